"""Reading the folder of a run, whatever state its files are in.

Enters: a run's folder with `run.jsonl`, and `telemetry.jsonl`, `doctor.json`, `lock` where they exist.
Leaves: a `RunRecord`. Costs one pass over the files, about 10 µs per line.

Only a folder that holds no run is refused. An empty log, a torn or unreadable line, a run that is in
progress or was killed are part of the record, with a sentence in `problems` where something is missing.
"""

from __future__ import annotations

import math
import re
import socket
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from stoker.config.resolve import as_key
from stoker.display import look_for, look_in, quoted
from stoker.errors import InputError
from stoker.report import (
    INCIDENTS,
    LOG_NAME,
    LogLine,
    Note,
    RunEnd,
    as_mapping,
    as_mappings,
    as_number,
    parse_line,
    read_note,
)
from stoker.runs.evaluation import known_numbers
from stoker.runs.record import Epoch, Event, RunRecord, State
from stoker.runs.telemetry import TELEMETRY_NAME
from stoker.strict_json import parse_json
from stoker.units import format_count, format_seconds

LOCK_NAME, DOCTOR_NAME = "lock", "doctor.json"

Holder = tuple[int, str, bool | None]
"""Process, host, and whether it is alive; None where that cannot be known."""

_SILENT_SECONDS = 60.0
_MOST_NEIGHBOURS = 500
_FIRST_BYTES = 1 << 20


def find_previous(run: RunRecord) -> RunRecord | None:
    """Return the run beside this one that began last before it and has the same recipe; None without one."""
    if run.began is None:
        return None
    found: list[tuple[float, Path]] = []
    for log in sorted(run.folder.resolve().parent.glob(f"*/{LOG_NAME}"))[:_MOST_NEIGHBOURS]:
        if log.parent == run.folder.resolve():
            continue
        try:
            with log.open("rb") as file:
                line = parse_line(file.readline(_FIRST_BYTES))
        except OSError:
            continue
        if line is not None and line.time < run.began:
            found.append((line.time, log.parent))
    for _, folder in sorted(found, reverse=True):
        other = read_run(folder)
        if other.config.get("recipe.name") == run.config.get("recipe.name"):
            return other
    return None


def read_run(path: str | Path, *, now: Callable[[], float] = time.time) -> RunRecord:
    """Read the folder of a run, or the `run.jsonl` in it."""
    folder = run_folder_of(path)
    problems: list[str] = []
    log = _read_lines(folder / LOG_NAME, problems)
    readings = _read_lines(folder / TELEMETRY_NAME, problems)
    clock = _Clock([log, readings])
    # The lines of the last process: its config is its first line.
    begins = (place for place, line in enumerate(log) if line.event == "config")
    session = log[max(begins, default=0) :]
    epochs = _epochs(log, clock)
    state, told = _judge(folder, log, readings, epochs, now())
    if state == "empty" and _has_bytes(folder / LOG_NAME):
        told = f"Nothing in {LOG_NAME} can be read: it is no log of a run, or it is damaged."
    config = _last(session, "config") or _last(log, "config")
    return RunRecord(
        folder=folder,
        name=folder.resolve().name,
        state=state,
        told=told,
        began=clock.began,
        seconds=clock.length,
        num_sessions=clock.num_sessions,
        epochs=epochs,
        losses=_losses(log),
        telemetry=tuple(
            (clock.at(line.time), line.values) for line in readings if line.event == "telemetry"
        ),
        notes=tuple(
            dict.fromkeys(n.text for _, n in _notes(session or log) if n.topic not in INCIDENTS)
        ),
        events=_events(log, readings, clock),
        config=read_settings(config),
        reasons=read_settings(config, "reasons"),
        plan=_last(log, "plan"),
        machine=_last(log, "machine"),
        data=_last(log, "data"),
        result=_last(session, "result"),
        findings=_findings(folder / DOCTOR_NAME, problems),
        problems=tuple(problems),
    )


def run_folder_of(path: str | Path, otherwise: str = "") -> Path:
    """Return the folder of a run, or raise; the message adds `otherwise` to what is allowed."""
    folder = Path(path)
    if folder.is_file() and folder.name == LOG_NAME:
        folder = folder.parent
    if not (folder / LOG_NAME).is_file():
        inside = next((log.parent for log in sorted(folder.glob(f"*/{LOG_NAME}"))), None)
        what = "is not the folder of a run" if folder.exists() else "does not exist"
        there = folder if folder.is_dir() else folder.parent
        raise InputError(
            f"{str(path)!r} {what}.",
            f"a folder with {LOG_NAME}, as `stoker train` makes it{otherwise and '; '}{otherwise}",
            quoted(inside)
            if inside
            else look_in(there)
            if folder.exists()
            else look_for(folder, holding=LOG_NAME),
        )
    return folder


def _read_lines(path: Path, problems: list[str]) -> list[LogLine]:
    """Return the events of a log; lines that are not events are counted and left out."""
    try:
        raw = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        if path.name == TELEMETRY_NAME:
            problems.append(
                "No telemetry: samples/s within an epoch, memory and GPU readings were not recorded."
            )
        return []
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}.")
        return []
    parsed = [(number, parse_line(line)) for number, line in enumerate(raw, 1)]
    bad = [number for number, line in parsed if line is None]
    if bad == [len(raw)]:
        problems.append(f"{path.name} is cut in the middle of its last line, which is left out.")
    elif bad:
        problems.append(
            f"{path.name}: {format_count(len(bad), 'line')} that cannot be read, the first is "
            f"line {bad[0]}; left out."
        )
    if path.name == LOG_NAME and not raw:
        problems.append(f"{path.name} is empty: the run has not written anything yet.")
    return [line for _, line in parsed if line is not None]


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


class _Clock:
    """Seconds since a run began, pauses between its processes left out.

    A process begins with a `config` in the log, or a `begin` in the telemetry; a user's own trainer, which
    writes neither, begins with a `fit`. The time from the line before until then is a pause. Telemetry has a
    thread of its own: on a busy machine its `begin` comes after the first steps of the same process.
    """

    def __init__(self, logs: Sequence[Sequence[LogLine]]) -> None:
        lines = sorted((line for log in logs for line in log), key=lambda line: line.time)
        self.began = lines[0].time if lines else None
        self._starts, self._pauses = [-math.inf], [self.began or 0.0]
        self.num_sessions = 1 if lines else 0
        before: LogLine | None = None
        fresh, has_telemetry = True, False
        begins = {"config", "begin"} if any(line.event == "config" for line in lines) else {"fit"}
        for line in lines:
            if line.event == "begin" and not has_telemetry:
                has_telemetry = True
            elif line.event in begins:
                if not fresh and before is not None:
                    has_telemetry = line.event == "begin"
                    self.num_sessions += 1
                    self._starts.append(line.time)
                    self._pauses.append(self._pauses[-1] + line.time - before.time)
                fresh = True
            elif line.event not in ("plan", "machine", "data", "note"):
                fresh = False
            before = line
        self.length = self.at(lines[-1].time) if lines else 0.0

    def at(self, moment: float) -> float:
        """Return seconds of running before a moment."""
        return max(0.0, moment - self._pauses[bisect_right(self._starts, moment) - 1])


def _last(lines: Sequence[LogLine], event: str) -> Mapping[str, Any]:
    return next((line.values for line in reversed(lines) if line.event == event), {})


def _notes(lines: Iterable[LogLine]) -> Iterator[tuple[LogLine, Note]]:
    for line in lines:
        note = read_note(line)
        if note is not None:
            yield line, note


def _epochs(log: Sequence[LogLine], clock: _Clock) -> tuple[Epoch, ...]:
    found: dict[int, Epoch] = {}
    for line in log:
        number = as_number(line.values.get("epoch"))
        if line.event != "epoch" or number is None:
            continue
        step = line.step if isinstance(line.step, int) else None
        rest = ("num_samples", "seconds", "wait_share", "samples_per_second")
        found[int(number)] = Epoch(
            int(number),
            clock.at(line.time),
            step,
            as_number(line.values.get("train_loss")),
            known_numbers(line.values.get("metrics")),
            *(as_number(line.values.get(name)) for name in rest),
        )
    return tuple(found[number] for number in sorted(found))


def _losses(log: Sequence[LogLine]) -> tuple[tuple[int, float], ...]:
    """Return losses by step; of steps that were repeated after a resume, the last loss."""
    kept: list[tuple[int, float]] = []
    for line in log:
        loss = as_number(line.values.get("loss"))
        if line.event == "steps" and isinstance(line.step, int) and loss is not None:
            while kept and kept[-1][0] >= line.step:
                kept.pop()
            kept.append((line.step, loss))
    return tuple(kept)


def _events(
    log: Sequence[LogLine], readings: Sequence[LogLine], clock: _Clock
) -> tuple[Event, ...]:
    found = [
        Event(clock.at(line.time), note.topic.value, note.text, line.step)
        for line, note in _notes(log)
        if note.topic in INCIDENTS or note.values.get("fallback") is True
    ]
    found += [
        Event(clock.at(line.time), "loss", line.values["message"], line.step)
        for line in log
        if line.event == "nonfinite" and isinstance(line.values.get("message"), str)
    ]
    found += [Event(clock.at(line.time), "telemetry", note.text) for line, note in _notes(readings)]
    # A Trainer writes the end to the log; `stoker train` writes it to the telemetry as well.
    for line in (*readings, *_open_evaluation(log)) if readings else log:
        end = RunEnd.read(line)
        if end is not None and end.ended != "done":
            found.append(Event(clock.at(line.time), "ended", str(end)))
    return tuple(sorted(found, key=lambda event: event.at))


def _findings(path: Path, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    try:
        document = parse_json(path.read_bytes())
        return tuple(as_mappings(list(document["findings"])))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{path.name} cannot be read: {type(error).__name__}: {error}.")
        return ()


# -- state ---------------------------------------------------------------------------------------


def _judge(
    folder: Path,
    log: Sequence[LogLine],
    readings: Sequence[LogLine],
    epochs: Sequence[Epoch],
    now: float,
) -> tuple[State, str]:
    last = max((line.time for line in (*log[-1:], *readings[-1:])), default=None)
    ago = "" if last is None else f", last heard of {format_seconds(max(0.0, now - last))} ago"
    holder = lock_holder(folder)
    if holder is not None and is_going(holder, None if last is None else now - last):
        return "running", f"Still running: process {holder[0]} on {holder[1]}{ago}."
    if last is None:
        return "empty", "Nothing is written yet."
    finished = f"{format_count(len(epochs), 'epoch')} finished"
    evaluation = _open_evaluation(log)
    if evaluation:
        finished = f"{finished}, its evaluation is not"
    elif _is_finished(log, readings, epochs):
        return "done", f"Done: {format_count(len(epochs), 'epoch')}."
    lines = evaluation or sorted((*log, *readings), key=lambda line: line.time)
    end = next((end for line in reversed(lines) if (end := RunEnd.read(line))), None)
    if end is not None and end.ended in ("terminated", "interrupted"):
        return "stopped", f"Stopped before its end ({end.ended}); {finished}. `--resume` goes on."
    if end is not None and end.ended == "failed":
        return "failed", f"Ended by an error: {end.error}{f' {finished}.' if evaluation else ''}"
    goes_on = " `--resume` goes on." if evaluation else ""
    return "cut short", f"Its log ends without an ending{ago}; {finished}.{goes_on}"


def _open_evaluation(log: Sequence[LogLine]) -> Sequence[LogLine]:
    """Return the lines since an evaluation began whose result was not written; empty where there is none."""
    for place in range(len(log) - 1, -1, -1):
        if log[place].event in ("evaluation", "result", "steps", "epoch"):
            return log[place:] if log[place].event == "evaluation" else ()
    return ()


def _is_finished(
    log: Sequence[LogLine], readings: Sequence[LogLine], epochs: Sequence[Epoch]
) -> bool:
    """Return whether the run finished; a later resume that was refused does not change that."""
    telling = ("result", "fit", "steps", "epoch", "end")
    told = next((line for line in reversed(log) if line.event in telling), None)
    if told is not None and (told.event == "result" or RunEnd.read(told) == RunEnd("done")):
        return True
    if readings and RunEnd.read(readings[-1]) == RunEnd("done"):
        return True
    asked = as_number(read_settings(_last(log, "config")).get("training.epochs"))
    return bool(epochs) and asked is not None and epochs[-1].number + 1 >= asked


def read_settings(config: Mapping[str, Any], part: str = "settings") -> dict[str, Any]:
    """Return the settings of a log's line `config`, or their reasons, by key; older logs have former names."""
    return {as_key(name): value for name, value in as_mapping(config.get(part)).items()}


def is_going(holder: Holder | None, age_seconds: float | None) -> bool:
    """Return whether a process trains the run; on another host, whether the log was written lately."""
    if holder is None or holder[2] is not None:
        return holder is not None and bool(holder[2])
    return age_seconds is not None and age_seconds < _SILENT_SECONDS


def lock_holder(folder: Path) -> Holder | None:
    """Return (process, host, whether it is alive) of the process that trains a run, or None.

    Alive is None for a process on another host. Does not take the lock, not even for a moment.
    """
    path = folder / LOCK_NAME
    try:
        text, written = path.read_text(errors="replace"), path.stat().st_mtime
    except OSError:
        return None
    found = re.match(r"process (\d+) on (\S+)", text)
    if found is None:
        return None
    pid, host = int(found[1]), found[2]
    if host != socket.gethostname():
        return pid, host, None
    try:
        # After a kill another process can get the number: it began after the lock was written.
        return pid, host, psutil.Process(pid).create_time() <= written + 1
    except psutil.Error:
        return pid, host, False
