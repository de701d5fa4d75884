"""Sinks: progress for users, and the run log for programs that read a run afterwards.

Enters: stages and counts, or events with their values. Leaves: calls on a `Progress`; a JSONL file with
one object per line (`time`, `step`, `epoch`, `event`, `values`), and TensorBoard scalars where asked.
Costs one `write` per line, about 30 µs. Imports nothing above `errors` and `units`, and no torch.

The log is always complete up to its last line: a line is one `write` of an append-only file. A line torn by
a crash is skipped by the reader and cut off when the log is opened again.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self

from stoker.address import masked, shown
from stoker.display import command, escaped_json, look_in
from stoker.errors import CorruptError, InputError, MissingExtraError, StoreError, unwritable
from stoker.ownership import empty_file, open_own_file
from stoker.strict_json import json_text, parse_json

# -- progress ------------------------------------------------------------------------------------


class Progress(Protocol):
    """Receives the progress of a long job. Used as a context manager."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin a stage of `total` `unit`s (None when unknown)."""

    def advance(self, count: int = 1) -> None:
        """Report that `count` more units are done."""

    def say(self, line: str) -> None:
        """Show the user a line that is not progress."""


class Silent:
    """A `Progress` that shows nothing: the default everywhere below the command line."""

    def start(self, *given: Any, **named: Any) -> None:
        """Ignore a report; `advance` and `say` do the same."""

    advance = say = start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


# -- run log -------------------------------------------------------------------------------------


class ScalarWriter(Protocol):
    """The part of TensorBoard's SummaryWriter that the run log uses."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Add one point to the curve `tag`."""

    def flush(self) -> None:
        """Write pending scalars."""

    def close(self) -> None:
        """Flush and end."""


@dataclass(frozen=True)
class LogLine:
    """One event of a run."""

    time: float  # seconds since 1970, by the writer's clock
    event: str  # what happened: "epoch", "read", "oom", ...
    step: int | None = None  # optimizer updates done; None where it does not apply
    epoch: int | None = None  # from 0; None where it does not apply
    values: Mapping[str, Any] = field(default_factory=dict)  # plain values by name


class Topic(StrEnum):
    """The subject of a note. Code decides by it; the text of a note is for people only."""

    PRECISION = "precision"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    STEP = "step"
    RANKS = "ranks"
    DATA = "data"
    STORE = "store"
    MEMORY = "memory"
    LOSS = "loss"
    RESUMED = "resumed"
    STOPPED = "stopped"
    OTHER = "other"


INCIDENTS = frozenset({Topic.MEMORY, Topic.LOSS, Topic.RESUMED})
"""Topics of notes about incidents; notes of other topics explain a choice."""


@dataclass(frozen=True)
class Note:
    """A choice of a run with its reason, or an incident."""

    text: str  # the text for users
    topic: Topic = Topic.OTHER  # the subject, by which code decides
    # facts as plain values: `captured` of a step, `store` of a store, `epoch` and `step` of a resumed run
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> dict[str, Any]:
        """Return the values of a "note" event."""
        return {"topic": self.topic.value, "text": self.text, **self.values}


_BEGINNING = b'{"time": '  # the first bytes of every event
LOG_NAME = "run.jsonl"  # the log of a run, in its folder


class RunLog:
    """An append-only log of one run; also a context manager. One writer at a time, one thread.

    Values that are not finite are written as the texts "nan", "inf" and "-inf", since JSON has no word
    for them; `read_run_log` turns these texts back into numbers. Numpy and torch scalars are taken by
    their `item()`, which waits for the device: pass numbers that were read already.
    """

    def __init__(
        self,
        # the file, made with its folder where missing. A torn last line is cut off.
        path: str | Path,
        # also gets every number of an event that has a step, as `event/name`
        scalars: ScalarWriter | None = None,
        clock: Callable[[], float] = time.time,  # seconds since 1970
    ) -> None:
        self.path = Path(path)
        self._scalars = scalars
        self._clock = clock
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_own_file(
                self.path, os.O_RDWR | os.O_APPEND, _begins_with_an_event, "the log of the run"
            )
        except OSError as error:
            raise unwritable(self.path, error, "the run log") from error
        self.num_torn_bytes = _cut_torn_end(self._file)

    def write(
        self,
        event: str,
        values: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Append one line; it survives a kill of the process once this returns (not a power cut).

        Raises:
            StoreError: The disk is full or the file cannot be written; no part of the line is left.
            InputError: A value has no plain form.
        """
        plain = _plain(values or {}, event)
        about = {"time": round(self._clock(), 6), "step": step, "epoch": epoch, "event": event}
        text = json_text(about | {"values": plain}, ensure_ascii=False)
        # File names may hold bytes that are not UTF-8; escaped they are valid JSON.
        line = escaped_json(text).encode() + b"\n"
        if self._file < 0:
            raise InputError(f"the run log {self.path} is closed.", "an open log", "RunLog(path)")
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written != len(line):
                # A nearly full disk causes a short write; the second write then raises the error.
                os.write(self._file, line[written:])
        except OSError as error:
            empty_file(self._file, before)
            raise unwritable(self.path, error, "the run log") from error
        if self._scalars is not None and step is not None:
            for name, value in plain.items():
                number = _restored(value)
                if isinstance(number, int | float) and not isinstance(number, bool):
                    self._scalars.add_scalar(f"{event}/{name}", float(number), step)

    def close(self) -> None:
        """End the log; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._scalars is not None:
            self._scalars.close()
            self._scalars = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_run_log(path: str | Path) -> list[LogLine]:
    """Return the events of a log, also of one that is being written; a torn last line is left out.

    Raises:
        CorruptError: A line before the last one is not an event; file and line are named.
        StoreError: There is no such log.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise StoreError(
            f"cannot read the run log {path}: {error.strerror}.",
            "the run.jsonl of a run",
            look_in(path.parent),
        ) from error
    events = []
    for number, line in enumerate(lines, 1):
        parsed = parse_line(line)
        if parsed is not None:
            events.append(parsed)
        elif number < len(lines):
            raise CorruptError(
                f"{path}, line {number} is not an event: {line[:60]!r}.",
                "one JSON object per line, as RunLog writes it",
                command("sed", "-i", f"{number}d", path),
            )
    return events


def parse_line(line: bytes) -> LogLine | None:
    """Return the event of one line with its line end; None if the line is torn or no event."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = parse_json(line)
        moment = float(found["time"])
        if not math.isfinite(moment):
            return None
        return LogLine(
            moment,
            str(found["event"]),
            found["step"],
            found["epoch"],
            {name: _restored(value) for name, value in found["values"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


# -- values of a log of any version ------------------------------------------------------------------


def as_number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def as_whole(value: Any) -> int | None:
    """Return a finite number without its fraction; None for anything else."""
    number = as_number(value)
    return None if number is None else int(number)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def as_mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return the mappings of a list; an empty list for anything else."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


# -- notes and endings in a log --------------------------------------------------------------------


# Notes in logs of older versions have no topic, only a text. These are the texts of those versions.
_OLD_WORDS: Mapping[str, Topic] = {
    "memory ran out": Topic.MEMORY,
    "remembered from an earlier run": Topic.MEMORY,
    "GPU memory grew": Topic.MEMORY,
    "the loss of step": Topic.LOSS,
    "the gradients of": Topic.LOSS,
    "resumed at epoch": Topic.RESUMED,
}
_OLD_STORE = "store: "
_OLD_FAILED = "failed: "


def read_note(line: LogLine) -> Note | None:
    """Return the note of a line; None for every other event. Notes of older logs get their topic here."""
    values = dict(line.values)
    text, topic = values.pop("text", None), values.pop("topic", None)
    if line.event != "note" or not isinstance(text, str):
        return None
    if topic is not None:
        # Code of this version cannot decide by a topic of a newer one.
        known = str(topic) in {each.value for each in Topic}
        return Note(text, Topic(topic) if known else Topic.OTHER, values)
    if text.startswith(_OLD_STORE):
        return Note(text, Topic.STORE, {"store": text.removeprefix(_OLD_STORE)})
    old = next((topic for words, topic in _OLD_WORDS.items() if words in text), Topic.OTHER)
    return Note(text, old)


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    ended: str = "done"  # "done", "terminated", "interrupted" or "failed"
    error: str = ""  # what failed; empty for the other endings

    def __str__(self) -> str:
        return f"{self.ended}: {self.error}" if self.error else self.ended

    @classmethod
    def by(cls, error: BaseException) -> Self:
        """Return how an exception ends a run."""
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted")
        first_line = next(iter(str(error).splitlines()), "")
        return cls("failed", f"{type(error).__name__}: {first_line}")

    @classmethod
    def read(cls, line: LogLine) -> Self | None:
        """Return the ending in a line; None for other events. Older logs have ending and error in one text."""
        if line.event != "end":
            return None
        ended, error = str(line.values.get("ended")), str(line.values.get("error") or "")
        if ended.startswith(_OLD_FAILED):
            return cls("failed", ended.removeprefix(_OLD_FAILED))
        return cls(ended, error)


def _begins_with_an_event(file: int) -> bool:
    """Return whether a file is a run log; any other file must not be changed, not even a torn end."""
    head = os.pread(file, 64, 0)
    return head.startswith(_BEGINNING[: len(head)])


def _cut_torn_end(file: int) -> int:
    """Truncate the file after its last whole line; return the number of bytes removed."""
    size = os.fstat(file).st_size
    reach, tail = 1 << 16, b""
    while tail.count(b"\n") < 2 and len(tail) < size:
        reach *= 16
        tail = os.pread(file, reach, max(0, size - reach))
    keep = tail.rfind(b"\n") + 1
    last = tail[tail.rfind(b"\n", 0, max(keep - 1, 0)) + 1 : keep]
    if last and parse_line(last) is None:
        keep -= len(last)
    num_torn = len(tail) - keep
    if num_torn:
        empty_file(file, size - num_torn)
    return num_torn


_SPELLED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _plain(value: Any, name: str) -> Any:
    """Return values for JSON, with passwords masked: others may read a log."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, Mapping):
        return {masked(str(key)): _plain(entry, f"{name}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, f"{name}[{place}]") for place, entry in enumerate(value)]
    if isinstance(value, Path):
        return shown(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _plain(value.item(), name)
    raise InputError(
        f"{name} is a {type(value).__name__}: it cannot stand in a run log.",
        "numbers, texts, lists and mappings of these",
        "pass value.tolist(), or a summary of it",
    )


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _SPELLED.get(value, value)
    if isinstance(value, list):
        return [_restored(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _restored(entry) for name, entry in value.items()}
    return value


def open_tensorboard(folder: str | Path) -> ScalarWriter:
    """Return a writer of TensorBoard scalars in `folder`, for `RunLog(..., scalars=)`.

    Raises:
        MissingExtraError: The package tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            f"TensorBoard scalars need the package 'tensorboard': {error}.",
            "an environment with tensorboard, or the JSONL run log alone",
            "pip install tensorboard, or set training.tensorboard to false",
        ) from error
    writer: ScalarWriter = SummaryWriter(str(folder))
    return writer
