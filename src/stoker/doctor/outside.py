"""Examines a running training process from outside (`stoker doctor --pid N`).

Enters: a process id. Leaves: a `Look`: where the main thread spends its time, by file and line, and how busy the
process and its workers are. Costs the seconds of the look; py-spy stops the process for about a millisecond per sample,
25 times a second.

Before Python 3.14 no code can be run inside another Python process, so the separate program py-spy reads the stacks.
Without py-spy, or without permission to inspect the process, only its CPU use is measured, and the `Look` says what is
missing. Steps are not visible from outside, so no gain is predicted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import psutil

from stoker.display import command
from stoker.doctor.probe.places import own_places
from stoker.doctor.probe.sampling import describe_training
from stoker.errors import InputError
from stoker.ownership import temporary_folder

_RATE = 25
_FRAME = re.compile(r"(.*) \((.*):(\d+)\)")
_STACK = re.compile(r"thread \(\S+\): (.*?);(.*) (\d+)")


@dataclass(frozen=True)
class Look:
    """The result of examining a running process."""

    subject: str  # its command line
    seconds: float  # duration of the examination
    busy_cores: float  # cores that the process itself kept busy
    worker_cores: tuple[float, ...]  # cores that each of its child processes kept busy
    num_samples: int  # stack samples of its main thread; 0 if stacks could not be read
    # share of the samples by what the thread did: "loader" (inside a DataLoader), "data" (other code that looks like
    # loading), "model", "between" (anything else)
    shares: dict[str, float]
    # the user's lines of code outside of the model with the most samples: (file:line, share)
    lines: tuple[tuple[str, float], ...]
    unread: str = ""  # why stacks could not be read; "" if they could

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.unread:
            return f"cannot judge where the time goes: {self.unread}"
        if self.num_samples < _RATE:
            return f"cannot judge: only {self.num_samples} samples were taken; give --seconds 10"
        waiting = self.shares.get("loader", 0.0) + self.shares.get("data", 0.0)
        if waiting >= 0.2:
            return f"the training thread spends {waiting:.0%} of its time on data"
        between = self.shares.get("between", 0.0)
        if between >= 0.3:
            return f"the training thread spends {between:.0%} of its time outside of the model"
        return f"the training thread spends {self.shares.get('model', 0.0):.0%} of its time in the model"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "verdict": self.verdict}


class _Code(NamedTuple):
    co_filename: str
    co_name: str


class _Frame(NamedTuple):
    """The attributes of a Python frame that `describe_training` reads."""

    f_code: _Code
    f_lineno: int
    f_back: Any


def look_at(pid: int, seconds: float) -> Look:
    """Examine a process for `seconds`. Blocking.

    Raises:
        InputError: There is no such process, or it may not be inspected.
    """
    try:
        process = psutil.Process(pid)
        subject = command(*process.cmdline()) or process.name()
        family = [process, *process.children(recursive=True)]
    except psutil.Error as error:
        raise InputError(
            f"process {pid} cannot be looked at: {error}.",
            "the number of a process of yours that runs",
            command("ps", "-ef"),
        ) from error
    before = [_cpu_seconds(one) for one in family]
    began = time.monotonic()
    stacks, unread = _read_stacks(pid, seconds)
    time.sleep(max(0.0, seconds - (time.monotonic() - began)))
    passed = time.monotonic() - began
    busy = [
        max(0.0, _cpu_seconds(one) - was) / passed for one, was in zip(family, before, strict=True)
    ]
    shares, lines = count_stacks(stacks)
    total = shares.total()
    return Look(
        subject,
        passed,
        busy[0],
        tuple(busy[1:]),
        total,
        {kind: count / total for kind, count in shares.most_common()},
        tuple((line, count / total) for line, count in lines.most_common(5)),
        unread,
    )


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended meanwhile
        return 0.0
    return float(times.user + times.system)


def _read_stacks(pid: int, seconds: float) -> tuple[list[str], str]:
    """Return (lines of collapsed stacks with counts, "") or ([], why the stacks could not be read)."""
    program = shutil.which("py-spy")
    if program is None:
        missing = "py-spy is not installed, which reads the stacks of a running Python"
        return [], f"{missing}: pip install py-spy"
    with temporary_folder("stoker-doctor-") as folder:
        raw = folder / "stacks"
        words = [
            "--pid",
            pid,
            "--duration",
            max(1, round(seconds)),
            "--rate",
            _RATE,
            "--output",
            raw,
        ]
        done = subprocess.run(
            [
                program,
                "record",
                *map(str, words),
                "--format",
                "raw",
                "--full-filenames",
                "--idle",
                "--threads",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not raw.exists():
            lines = done.stderr.strip().splitlines() or ["it said nothing"]
            # The error line, not the traceback below it.
            said = next(
                (line for line in lines if "Error" in line or "Permission" in line), lines[0]
            )
            return [], f"py-spy could not look into process {pid}: {said}"
        return raw.read_text(encoding="utf-8", errors="replace").splitlines(), ""


def count_stacks(stacks: Sequence[str]) -> tuple[Counter[str], Counter[str]]:
    """Return the samples of the main thread, counted by activity and by the user's line outside of the model.

    Each line of py-spy's raw format is a stack, outermost frame first, and its number of samples.
    """
    doing: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for stack in stacks:
        found = _STACK.fullmatch(stack)
        if found is None or found[1] != "MainThread":
            continue
        frame = None
        for text in found[2].split(";"):
            part = _FRAME.fullmatch(text)
            if part is not None:
                name = part[1].rpartition(".")[2]
                frame = _Frame(_Code(part[2], name), int(part[3]), frame)
        if frame is None:
            continue
        kind, line = describe_training(frame)
        kind = "loader" if "torch/utils/data/" in found[2] else "model" if kind == "timed" else kind
        doing[kind] += int(found[3])
        if kind != "model":
            # If a library is waiting, count the user's line that called it.
            line = line or next(own_places(frame), None)
            if line is not None:
                lines[line] += int(found[3])
    return doing, lines
