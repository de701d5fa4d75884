"""Follow a run while it trains, by reading the lines that are added to its logs.

Enters: a run's folder, also one that does not exist yet. Leaves: a `RunNow` at every look. Costs one `stat`
per file and look, and parsing what is new; at the first look the last 256 kB of each file are read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.display import look_in
from stoker.errors import InputError
from stoker.report import LOG_NAME, LogLine, RunEnd, as_mapping, as_number, as_whole, parse_line
from stoker.runs.reading import is_going, lock_holder, read_settings
from stoker.runs.telemetry import TELEMETRY_NAME

_FIRST_BYTES, _HEAD_BYTES = 1 << 18, 1 << 16


@dataclass(frozen=True)
class RunNow:
    """The state of a run. None: unknown, or not yet known."""

    folder: Path  # of the run
    # "waiting" before its first line, "running", or how it ended: "done", "terminated", "interrupted", "failed: ...";
    # "not running" where its log does not say
    state: str = "waiting"
    pid: int | None = None  # the process that works on it, on this host
    age_seconds: float | None = None  # since the last line of its logs
    # the current one, from 1; the last finished one where nothing else is known
    epoch: int | None = None
    num_epochs: int | None = None  # from the config
    # until the last epoch ends, by the mean of finished epochs; None before the first has ended
    seconds_left: float | None = None
    step: int | None = None  # batches trained on
    # last training loss that was read; after an epoch, the mean of the whole epoch
    loss: float | None = None
    val_loss: float | None = None  # after the last finished epoch
    samples_per_second: float | None = None  # lately, or of the last epoch
    wait_share: float | None = None  # share of the same time that was spent waiting for batches
    allocated_bytes: int | None = None  # device memory in tensors
    reserved_bytes: int | None = None  # device memory that torch holds
    note: str | None = None  # its last note


class LogTail:
    """Reads the lines added to a log since the last look; an incomplete last line is kept for the next look."""

    def __init__(self, path: Path, first_bytes: int = _FIRST_BYTES) -> None:
        self.path = path  # the log; it may appear later, and may be replaced
        # largest piece of the end that the first look reads; it also reads the first 64 kB
        self._first_bytes = first_bytes
        self._file_id: int | None = None
        self._offset = 0
        self._rest = b""

    def read(self) -> list[LogLine]:
        """Return the new events; lines that are no events are skipped."""
        if not self.path.is_file():  # opening a named pipe would block until somebody writes
            return []
        try:
            with self.path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._file_id or status.st_size < self._offset:
                    self._file_id, self._rest = status.st_ino, b""
                    self._offset = max(0, status.st_size - self._first_bytes)
                    # The config is at the beginning of a log. This piece ends within a line, which is skipped.
                    self._rest = file.read(min(self._offset, _HEAD_BYTES)) + b"\n"
                if status.st_size == self._offset:
                    return []
                file.seek(self._offset)
                added = file.read(status.st_size - self._offset)
        except OSError:
            return []
        self._offset += len(added)
        *whole, self._rest = (self._rest + added).split(b"\n")
        return [line for line in (parse_line(text + b"\n") for text in whole) if line is not None]


class RunFollower:
    """Looks at a run from time to time.

    Args:
        folder: Of the run; it may come later, and so may its log.
        clock: Seconds since 1970.
    """

    def __init__(self, folder: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = Path(folder)
        if self.folder.name == LOG_NAME:
            self.folder = self.folder.parent
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(
                f"{str(folder)!r} is a file.",
                "the folder of a run, as `stoker train` makes it",
                look_in(self.folder.parent),
            )
        self._clock = clock
        self._log = LogTail(self.folder / LOG_NAME)
        self._telemetry = LogTail(self.folder / TELEMETRY_NAME)
        self._known: dict[str, Any] = {}
        self._last_time: float | None = None
        self._ended: str | None = None
        self._finished: int | None = None
        self._epoch_mark: float | None = None
        self._epoch_seconds: list[float] = []

    def look(self) -> RunNow:
        """Return the state of the run."""
        # Notes of the telemetry are about readings; the monitor takes its own.
        readings = [line for line in self._telemetry.read() if line.event != "note"]
        lines = sorted(self._log.read() + readings, key=lambda line: line.time)
        for line in lines:
            self._last_time = line.time
            self._learn(line)
            if line.event in ("end", "config", "begin", "fit", "evaluation"):
                end = RunEnd.read(line)
                self._ended = None if end is None else str(end)
            elif line.event == "result":
                self._ended = "done"
        holder = lock_holder(self.folder)
        going = is_going(holder, self._age())
        stopped = "waiting" if self._last_time is None else self._ended or "not running"
        return RunNow(
            self.folder,
            state="running" if going else stopped,
            pid=holder[0] if holder is not None and holder[2] else None,
            age_seconds=self._age(),
            seconds_left=self._seconds_left() if going else None,
            **self._known,
        )

    def _age(self) -> float | None:
        return None if self._last_time is None else max(0.0, self._clock() - self._last_time)

    def _seconds_left(self) -> float | None:
        """Return the time of the epochs that are left, validation and checkpoints included."""
        whole: int | None = self._known.get("num_epochs")
        took, mark = self._epoch_seconds, self._epoch_mark
        if whole is None or self._finished is None or not took or mark is None:
            return None
        # The first one includes the warm-up, and unread epochs where only the end of a log was read.
        steady = took[1:] or took
        each = sum(steady) / len(steady)
        return float(max(0.0, (whole - self._finished) * each - (self._clock() - mark)))

    def _learn(self, line: LogLine) -> None:
        told = {name: value for name, value in _told_by(line).items() if value is not None}
        if line.event == "epoch":
            self._finished = told.get("epoch")
            if self._epoch_mark is not None:
                self._epoch_seconds.append(line.time - self._epoch_mark)
            self._epoch_mark = line.time
        elif line.event in ("config", "begin", "fit"):
            self._finished, self._epoch_mark, self._epoch_seconds = None, line.time, []
        elif line.event == "telemetry" and told.get("epoch", 0) <= (self._finished or -1):
            # A reading after an epoch repeats the last batches' loss beside the whole epoch's.
            told.pop("loss", None)
        self._known |= told


def _told_by(line: LogLine) -> Mapping[str, Any]:
    """Return the values of a `RunNow` that an event changes."""
    values = as_mapping(line.values.get("run")) if line.event == "telemetry" else line.values
    speed = {name: as_number(values.get(name)) for name in ("samples_per_second", "wait_share")}
    epoch, loss = _from_one(values.get("epoch")), as_number(values.get("loss"))
    if line.event == "telemetry":
        sizes = {name: as_whole(values.get(name)) for name in ("allocated_bytes", "reserved_bytes")}
        return {**speed, **sizes, "loss": loss, "epoch": epoch}
    if line.event == "steps":
        return {"loss": loss, "step": as_whole(line.step), "epoch": _from_one(line.epoch)}
    if line.event == "epoch":
        val_loss = as_number(as_mapping(values.get("metrics")).get("loss"))
        loss = as_number(values.get("train_loss"))
        return {**speed, "loss": loss, "val_loss": val_loss, "epoch": epoch}
    if line.event == "fit":
        return {"num_epochs": as_whole(values.get("epochs"))}
    if line.event == "config":
        return {"num_epochs": as_whole(read_settings(values).get("training.epochs"))}
    if line.event == "note" and isinstance(values.get("text"), str):
        return {"note": values["text"]}
    return {}


def _from_one(epoch: Any) -> int | None:
    """Return an epoch counted from 1; logs count from 0."""
    number = as_whole(epoch)
    return None if number is None else number + 1
