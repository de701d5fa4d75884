"""Long campaigns that can be stopped and go on: blocks of numbered trials in child processes, and one state file.

Enters: families of trials, each a function of (number, note) that returns a word for its outcome. A trial depends on
the seed and its number only, so any trial can be repeated alone. Leaves: a JSON with the counts, what was found, and
which numbers are left. Costs: a fork for each block and two stores into shared memory for each trial.

Contract: the state file is exchanged as a whole every few seconds; counts and the numbers that are left belong to the
same moment, so that after `kill -9` no trial counts twice and none is left out. A child that ends by a signal is a
*crash* of the trial it was in, one that stands still for `hang_seconds` a *hang* (and is killed); both are kept by
their number, and the block goes on behind them. A trial that raises is *wrong*.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / name)
    for name in ("benchmarks", "tests", "tests/campaign")
)
from harness import RESULTS, machine_facts, machine_name

OUTCOMES = ("right", "refused", "wrong", "crash", "hang")
_MOST_FOUND = 50
_SAVE_SECONDS = 10.0
_COUNTS = struct.Struct(f"<{len(OUTCOMES)}q")


Trial = Callable[[random.Random], str | tuple[str, float]]
"""Returns the outcome; and seconds, where those count."""


@dataclass
class Family:
    """Trials of one kind.

    Attributes:
        prepare: Called once in every child; returns the trial.
        weight: Share of the blocks.
        block: Trials of one child. Few forks: each prepares anew and copies the pages that it touches.
    """

    name: str
    prepare: Callable[[Path], Trial]
    weight: float = 1.0
    block: int = 20_000


@dataclass
class _Child:
    """A process that does trials `start` to `stop` one after the other.

    `shared` holds whether it is asked to stop, and how many trials had each outcome: their sum says how far it came.
    """

    pid: int
    family: Family
    start: int
    stop: int
    shared: mmap.mmap
    pipe: int
    counted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    since: float = field(default_factory=time.monotonic)
    late_at: float | None = None
    said: bytes = b""

    @property
    def at(self) -> int:
        """The trial it is in, as far as the counts were taken."""
        return self.start + sum(self.counted.values())

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since it was last asked."""
        now = dict(zip(OUTCOMES, _COUNTS.unpack_from(self.shared, 8), strict=True))
        new = {word: count - self.counted[word] for word, count in now.items()}
        if any(new.values()):
            self.since, self.late_at = time.monotonic(), None
        self.counted = now
        return new


def state_path(name: str) -> Path:
    """Return the state file of a campaign on this machine, which is also its published result."""
    return RESULTS / f"proof_{name}-{machine_name()}.json"


def read_state(path: Path) -> dict[str, Any]:
    """Return the result of an earlier run, or an empty one."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))["result"]
    return found


def write_state(path: Path, name: str, result: dict[str, Any], facts: dict[str, Any]) -> None:
    """Exchange the state file as a whole."""
    document = {"benchmark": f"proof_{name}", "machine": facts, "result": result}
    beside = path.with_suffix(".json.new")
    beside.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    beside.replace(path)


def make_parser(description: str, unit: str, goal: int) -> argparse.ArgumentParser:
    """Return a parser of the options that every campaign has; `--UNIT` says how many there are to be."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(f"--{unit}", type=int, default=goal)
    parser.add_argument(
        "--seconds", type=float, default=36_000.0, help="stop after this; the next run goes on"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=None, help="a state file instead of that in benchmarks/results"
    )
    return parser


class Campaign:
    """Runs blocks until the goal or the time is reached."""

    def __init__(
        self,
        name: str,
        families: list[Family],
        goal: int,
        seed: int,
        hang_seconds: float,
        out: Path | None,
    ) -> None:
        self.name, self.families, self.goal, self.seed = name, families, goal, seed
        self.hang_seconds = hang_seconds
        self.path = out or state_path(name)
        self.result = read_state(self.path) or {
            "seed": seed,
            "goal": goal,
            "families": {},
            "found": [],
            "cpu_seconds": 0.0,
        }
        if self.result["seed"] != seed:
            raise SystemExit(
                f"{self.path} has the seed {self.result['seed']}: use it, or another --out"
            )
        for each in families:
            self.result["families"].setdefault(
                each.name, {"next": 0, "left": [], "counts": dict.fromkeys(OUTCOMES, 0)}
            )
        self.result["goal"] = goal
        self.facts = machine_facts()
        # Which code made which numbers: generators change while a campaign of months goes on.
        first = {name: entry["next"] for name, entry in self.result["families"].items()}
        begun = {"date": self.facts["date"], "commit": self.facts["commit"], "first": first}
        self.result.setdefault("runs", []).append(begun)
        self.children: list[_Child] = []
        self.stopping = False

    # -- what is left --------------------------------------------------------------------------------

    def done(self) -> int:
        """Return how many trials were done in all."""
        return sum(sum(one["counts"].values()) for one in self.result["families"].values())

    def _spent(self, name: str) -> tuple[int, float]:
        """Return trials and CPU seconds of a family."""
        entry = self.result["families"][name]
        return sum(entry["counts"].values()), entry.get("cpu_seconds", 0.0)

    def _next_block(self) -> tuple[Family, int, int] | None:
        """Take a block of the family that lags most behind its share."""
        for each in self.families:
            entry = self.result["families"][each.name]
            if entry["left"]:
                start, stop = entry["left"].pop(0)
                return each, start, stop
        given = {each.name: self.result["families"][each.name]["next"] for each in self.families}
        if sum(given.values()) >= self.goal:
            return None
        each = min(self.families, key=lambda one: given[one.name] / one.weight)
        entry = self.result["families"][each.name]
        start = entry["next"]
        share = each.weight / sum(one.weight for one in self.families)
        small = max(50, int(self.goal * share / 4))  # else a short campaign is all of one family
        entry["next"] = start + min(each.block, small, self.goal - sum(given.values()))
        return each, start, entry["next"]

    # -- children ------------------------------------------------------------------------------------

    def _start(self, family: Family, start: int, stop: int) -> None:
        shared = mmap.mmap(-1, 4096)
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            try:
                self._run_block(family, start, stop, shared, theirs)
            except BaseException:  # noqa: BLE001  the parent must hear of it
                os.write(
                    theirs,
                    json.dumps({"number": -1, "text": traceback.format_exc()[-1500:]}).encode()
                    + b"\n",
                )
                os._exit(3)
            os._exit(0)
        os.close(theirs)
        self.children.append(_Child(pid, family, start, stop, shared, ours))

    def _run_block(
        self, family: Family, start: int, stop: int, shared: mmap.mmap, pipe: int
    ) -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        scratch = Path(
            "/dev/shm" if Path("/dev/shm").is_dir() else "/tmp", f"stoker-proof-{os.getpid()}"
        )
        scratch.mkdir()
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(quiet, number)
        counts = [0] * len(OUTCOMES)
        trial = family.prepare(scratch)
        try:
            for number in range(start, stop):
                if shared[0]:
                    return
                try:
                    answer = trial(random.Random(f"{self.seed} {family.name} {number}"))
                    word, seconds = (answer, None) if isinstance(answer, str) else answer
                    if seconds is not None:
                        os.write(pipe, json.dumps({"seconds": seconds}).encode() + b"\n")
                except Exception:  # noqa: BLE001  that is what is looked for
                    word = "wrong"
                    entry = {"number": number, "text": traceback.format_exc()[-1500:]}
                    os.write(pipe, json.dumps(entry).encode() + b"\n")
                counts[OUTCOMES.index(word)] += 1
                _COUNTS.pack_into(shared, 8, *counts)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _stands_still(self, child: _Child) -> bool:
        """Whether nothing of a child's session waits for a core, or it used its time up.

        A campaign at the lowest priority of a busy machine gets no core for minutes: that is no hang.
        """
        waits, used = False, 0.0
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, *numbers = entry.read_text().rpartition(") ")[2].split()
                if int(numbers[2]) == child.pid:  # the session
                    waits |= state == "R"
                    used += (int(numbers[10]) + int(numbers[11])) / os.sysconf("SC_CLK_TCK")
        if not waits:
            return True
        if child.late_at is None:
            child.late_at = used
        return used - child.late_at > self.hang_seconds

    def _keep(self, family: Family, what: str, number: int, text: str) -> None:
        if len(self.result["found"]) < _MOST_FOUND:
            self.result["found"].append(
                {"family": family.name, "what": what, "number": number, "text": text}
            )
        print(
            f"FOUND {family.name} {what} {number}: {text.strip().splitlines()[-1] if text.strip() else ''}",
            flush=True,
        )

    def _look_after(self, child: _Child) -> None:
        """Take a child's news; end it where it hangs; note what it did when it has ended."""
        entry = self.result["families"][child.family.name]
        pid, status, used = os.wait4(child.pid, os.WNOHANG)
        ended = pid == child.pid
        hung = False
        late = time.monotonic() - child.since > self.hang_seconds
        if not ended and late and self._stands_still(child):
            os.kill(child.pid, signal.SIGKILL)
            _, status, used = os.wait4(child.pid, 0)
            ended = hung = True
        with contextlib.suppress(BlockingIOError):
            while more := os.read(child.pipe, 65536):
                child.said += more
        *lines, child.said = child.said.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "seconds" in said:
                entry.setdefault("seconds", []).append(round(said["seconds"], 3))
                continue
            self._keep(child.family, "wrong", said["number"], said["text"])
        for word, count in child.take_counts().items():
            entry["counts"][word] += count
        if not ended:
            return
        self.children.remove(child)
        os.close(child.pipe)
        seconds = used.ru_utime + used.ru_stime
        entry["cpu_seconds"] = round(entry.get("cpu_seconds", 0.0) + seconds, 3)
        self.result["cpu_seconds"] = round(self.result["cpu_seconds"] + seconds, 3)
        at, code = child.at, os.waitstatus_to_exitcode(status)
        if code == 3:
            raise SystemExit(
                f"{child.family.name}: its preparation failed: {self.result['found'][-1:]}"
            )
        if hung or code < 0:
            what = "hang" if hung else "crash"
            entry["counts"][what] += 1
            self._keep(child.family, what, at, f"exit code {code}")
            at += 1
            self._sweep(child.pid)
        if at < child.stop:
            entry["left"].append([at, child.stop])

    def _sweep(self, pid: int) -> None:
        for place in ("/dev/shm", "/tmp"):
            shutil.rmtree(Path(place, f"stoker-proof-{pid}"), ignore_errors=True)

    # -- the loop ------------------------------------------------------------------------------------

    def run(self, seconds: float, jobs: int) -> None:
        """Run until the goal is reached, the time is over, or a signal asks to stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "stopping", True))
        began = saved = time.monotonic()
        before = {name: self._spent(name) for name in self.result["families"]}
        gc.freeze()  # else a collection in a child writes to, and copies, every page that it shares with its parent
        while True:
            self.stopping = self.stopping or time.monotonic() - began > seconds
            while not self.stopping and len(self.children) < jobs:
                block = self._next_block()
                if block is None:
                    break
                self._start(*block)
            if not self.children:
                break
            for child in list(self.children):
                if self.stopping:
                    child.shared[0] = 1
                self._look_after(child)
            if time.monotonic() - saved > _SAVE_SECONDS:
                saved = time.monotonic()
                self._save()
                print(f"{self.done():,} of {self.goal:,}", flush=True)
            time.sleep(0.02)
        self._save()
        print(f"{self.name}: {self.done():,} of {self.goal:,}")
        for name, entry in self.result["families"].items():
            count, seconds = (
                now - then for now, then in zip(self._spent(name), before[name], strict=True)
            )
            print(
                f"  {name:20} {count:,} now, {1e3 * seconds / max(1, count):.2f} ms each; {entry['counts']}"
            )

    def _save(self) -> None:
        """Write a snapshot in which the blocks under way count as left from their current trial on."""
        running: dict[str, list[list[int]]] = {}
        for child in self.children:
            entry = self.result["families"][child.family.name]
            for word, count in child.take_counts().items():
                entry["counts"][word] += count
            if child.at < child.stop:
                running.setdefault(child.family.name, []).append([child.at, child.stop])
        families = {
            name: entry | {"left": entry["left"] + running.get(name, [])}
            for name, entry in self.result["families"].items()
        }
        write_state(
            self.path,
            self.name,
            self.result | {"families": families, "done": self.done()},
            self.facts,
        )
