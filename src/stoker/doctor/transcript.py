"""The lines that probes wrote, read back: processes, their steps, and which of them count.

Enters: a folder with one file per process of a script. Leaves: a `Process` each, and the usual steps of one.
Costs milliseconds. Lines torn by a kill are left out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.doctor.probe.recorder import DISTURBED, OTHER_LOADER, WARM_UP, Fetch, Row
from stoker.measure.readings import Spread
from stoker.strict_json import parse_json

_LONG_AFTER_SECONDS = 2.0
"""After the last step: less is the end of any script."""


@dataclass
class Process:
    """What one process wrote.

    Attributes:
        rows: Its steps, warm-up included.
        fetches: Batches it made.
        state: Its last word on everything else.
    """

    rows: list[Row] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int | None:
        """Its number in a data-parallel job."""
        torch = self.state.get("torch", {})
        return torch.get("rank") if (torch.get("world_size") or 1) > 1 else None


def read_folder(folder: Path) -> list[Process]:
    """Return every process that wrote a state."""
    found = [_read_process(path) for path in sorted(folder.glob("*.jsonl"))]
    return [process for process in found if process.state]


def _read_process(path: Path) -> Process:
    process = Process()
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = parse_json(text)
        except ValueError:
            continue
        event = line.get("event") if isinstance(line, dict) else None
        if event == "restart":
            process.rows.clear()
        elif event == "steps":
            process.rows += [Row(*row) for row in line["rows"]]
        elif event == "fetches":
            process.fetches += [Fetch(*row) for row in line["rows"]]
        elif event == "state":
            process.state = line
    return process


# -- which process, which steps --------------------------------------------------------------------


def main_process(processes: Sequence[Process]) -> Process | None:
    """Return rank 0, or the process that trained longest."""
    training = [
        one for one in processes if one.state.get("role") != "worker" and one.state.get("kind")
    ]
    ranked = [one for one in training if one.rank == 0 and one.rows]
    return max(
        ranked or training, key=lambda one: sum(row.seconds for row in one.rows), default=None
    )


def usual_rows(main: Process) -> tuple[list[Row], int | None]:
    """Return the steps that count, and the number of the loader that feeds them."""
    fed = Counter(row.loader for row in main.rows if row.loader >= 0)
    number = fed.most_common(1)[0][0] if fed else None
    warm = main.rows[WARM_UP:] if len(main.rows) > 2 * WARM_UP else main.rows[1:]
    good = [
        row
        for row in warm
        if not row.flags & (DISTURBED | OTHER_LOADER) and row.loader in (number, -1)
    ]
    if len(good) < len(warm) / 3:
        good = [row for row in warm if not row.flags & DISTURBED] or warm
    return good, number


@dataclass(frozen=True)
class Elsewhere:
    """Seconds since the first step that are in no figure: neither steps nor what the probe cost.

    Attributes:
        loaders: In steps that read another DataLoader, less a usual step each; also after the last step.
        after: After the last step, where that read no other loader and took long.
        whole: Since the first step.
    """

    loaders: float
    after: float
    whole: float

    @property
    def share(self) -> float | None:
        """Of the whole; None when there was none."""
        return (self.loaders + self.after) / self.whole if self.whole > 0 else None


def find_elsewhere(main: Process, counted: Sequence[Row], number: int | None) -> Elsewhere:
    """Return the time that the counted steps, fed by loader `number`, leave out."""
    usual = statistics.median(row.seconds for row in counted) if counted else 0.0
    seconds, flags, loader = main.state.get("running") or (0.0, 0, -1)
    whole = sum(row.seconds for row in main.rows) + seconds
    if any(_reads_other(row.flags, row.loader, number) for row in counted):
        loaders = 0.0  # every step reads several
    else:
        # A step behind a validation holds a step of its own.
        loaders = sum(
            row.seconds if row.loader not in (number, -1) else max(0.0, row.seconds - usual)
            for row in main.rows
            if _reads_other(row.flags, row.loader, number)
        )
        if _reads_other(flags, loader, number):
            return Elsewhere(loaders + seconds, 0.0, whole)
    after = seconds - usual
    return Elsewhere(loaders, after if after > _LONG_AFTER_SECONDS else 0.0, whole)


def _reads_other(flags: int, loader: int, number: int | None) -> bool:
    return bool(flags & OTHER_LOADER) or loader not in (number, -1)


@dataclass(frozen=True)
class Rhythm:
    """Steps in groups of one round of the workers: they deliver together, so single steps alternate."""

    groups: tuple[tuple[Row, ...], ...]

    def spread(self, seconds: Callable[[Row], float]) -> Spread | None:
        """Return the spread of the groups' means."""
        return Spread.of(statistics.fmean(map(seconds, group)) for group in self.groups)


def worker_shares(workers: Sequence[Process]) -> dict[int, float]:
    """Return the share of a core that each worker kept busy, by its number; started again it is the same."""
    spent: dict[int, list[float]] = {}
    for one in workers:
        cpu = one.state.get("cpu")
        if cpu and cpu[1] > 0:
            known = spent.setdefault(one.state["worker_id"], [0.0, 0.0])
            known[0] += cpu[0]
            known[1] += cpu[1]
    return {number: busy / seconds for number, (busy, seconds) in sorted(spent.items())}


@dataclass(frozen=True)
class Clock:
    """Whose the time is that a step queues for a core.

    Behind other work of the machine it is not the step's own and left out. Behind the script's own loading
    processes it is time that loading costs the step, as waiting for data is.

    Attributes:
        outside: Of the queueing, the share behind work that is not the script's.
        loading: Of the queueing, the share behind its loading processes.
    """

    outside: float = 1.0
    loading: float = 0.0

    @classmethod
    def of(cls, process: Process, processes: Sequence[Process]) -> Clock:
        """Return it for the training thread of one process: it queues behind whoever keeps the cores busy."""
        cpu, busy = process.state.get("cpu"), process.state.get("busy")
        seconds = sum(row.seconds for row in process.rows)
        if not cpu or busy is None or seconds <= 0:
            return cls()
        _, number = usual_rows(process)
        workers: list[Process] = []
        rest = 0.0
        for one in processes:
            if one.state.get("role") == "worker" and one.state.get("loader_id") == number:
                workers.append(one)
            elif one.state.get("cpu"):
                rest += one.state["cpu"][0]
        # Workers tell of themselves now and then, and are told to end without a word: their share counts.
        loading = sum(worker_shares(workers).values()) * cpu[1]
        script = loading + rest
        thread = sum(row.cpu for row in process.rows) / seconds * cpu[1]
        outside, others = max(0.0, busy - script), max(loading, script - thread)
        whole = outside + others
        return cls(outside / whole, loading / whole) if whole > 0 else cls()

    def seconds(self, row: Row) -> float:
        """Return a step's own seconds."""
        return max(0.0, row.seconds - self.outside * row.delay)

    def wait(self, row: Row) -> float:
        """Return those that loading costs it."""
        return max(0.0, row.wait - self.outside * row.wait_delay) + self.crowding(row)

    def crowding(self, row: Row) -> float:
        """Return those of them that it computed with one core too few, while a loading process had it."""
        return self.loading * max(0.0, row.delay - row.wait_delay)


def computing(row: Row) -> float:
    """Return a step's seconds without its wait for data and without any queueing for a core."""
    return max(0.0, row.seconds - row.delay) - max(0.0, row.wait - row.wait_delay)


def undisturbed(row: Row) -> float:
    """Return the share of a step's time apart from its wait that was not queueing for a core."""
    apart = row.seconds - row.wait
    return min(1.0, max(0.0, computing(row) / apart)) if apart > 0 else 1.0


def running(row: Row) -> float:
    """Return the share of the time on or queued for a core that was on one."""
    return row.cpu / (row.cpu + row.delay) if row.cpu > 0 else 1.0


def rhythm_of(rows: Sequence[Row], workers: int) -> Rhythm:
    """Group steps by rounds of the workers, as far as there are enough of them."""
    size = max(1, min(workers, len(rows) // 4))
    starts = range(0, len(rows) - size + 1, size)
    return Rhythm(tuple(tuple(rows[at : at + size]) for at in starts))
