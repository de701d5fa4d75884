"""Reads the files that the probe wrote: processes, their steps, their loader, and which steps count.

Enters: a folder with one file per process of a script. Leaves: a `Process` for each file, the `Training` of one of
them, and `LoaderFacts` and `Hdf5Facts` of its loader. Costs milliseconds. Lines cut by a kill are left out.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.doctor.measurements import Hdf5Facts, LoaderFacts, LoaderWork
from stoker.doctor.probe.recorder import (
    DISTURBED,
    EPOCH_START,
    LONG,
    OTHER_LOADER,
    PROFILED,
    UNWATCHED,
    WARM_UP,
    Fetch,
    Row,
)
from stoker.measure.readings import Spread
from stoker.strict_json import parse_json

_ENOUGH_ROWS = 12
"""With this many steps of the preferred kind, the other steps are left out."""
_FEWEST_LONG = 3
"""Fewer long steps than this may be chance."""
_LONG_AFTER_SECONDS = 2.0
"""Up to this much time after the last step is normal at the end of a script."""


@dataclass
class Process:
    """The recorded lines of one process."""

    rows: list[Row] = field(default_factory=list)  # its steps, including the warm-up
    fetches: list[Fetch] = field(default_factory=list)  # the batches that it loaded
    state: dict[str, Any] = field(default_factory=dict)  # its last snapshot of all other data

    @property
    def rank(self) -> int | None:
        """Its rank in a data-parallel job; None otherwise."""
        torch = self.state.get("torch", {})
        return torch.get("rank") if (torch.get("world_size") or 1) > 1 else None


def read_folder(folder: Path) -> list[Process]:
    """Return the processes that wrote at least one snapshot."""
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
    """Return the process of rank 0, else the one that trained longest; None if no process trained."""
    training = [
        one for one in processes if one.state.get("role") != "worker" and one.state.get("kind")
    ]
    ranked = [one for one in training if one.rank == 0 and one.rows]
    return max(
        ranked or training, key=lambda one: sum(row.seconds for row in one.rows), default=None
    )


def usual_rows(main: Process) -> tuple[list[Row], int | None]:
    """Return (steps that count, number of the loader that feeds them or None)."""
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
    training = [row for row in good if not row.evaluation]
    if len(training) >= len(good) / 2:  # otherwise an evaluation is part of a usual step
        good = training
    before = [row for row in good if not row.flags & PROFILED]
    return (before if len(before) >= _ENOUGH_ROWS else good), number


@dataclass(frozen=True)
class Elsewhere:
    """Seconds since the first step that are in no other figure."""

    # time of steps that read another DataLoader, less a usual step each; also such time after the last step
    loaders: float
    # time from `model.eval()` to `model.train()` in other steps, if a usual step has no evaluation
    evaluation: float
    # time by which a few long steps exceed a usual one, without time that is measured otherwise
    long: float
    num_long: int  # number of these long steps
    # time of all counted steps; like `long`, without queueing for a core
    counted: float
    after: float  # time after the last step, if it was long and read no other loader
    whole: float  # all time since the first step

    @property
    def share(self) -> float | None:
        """Share of all time since the first step; None if there was no step."""
        spent = self.loaders + self.evaluation + self.long + self.after
        return spent / self.whole if self.whole > 0 else None


def find_elsewhere(main: Process, counted: Sequence[Row], number: int | None) -> Elsewhere:
    """Return the time outside of the counted steps, which loader `number` feeds."""
    usual = statistics.median(row.seconds for row in counted) if counted else 0.0
    seconds, flags, loader = main.state.get("running") or (0.0, 0, -1)
    whole = sum(row.seconds for row in main.rows) + seconds
    if not main.rows or any(_reads_other(row.flags, row.loader, number) for row in counted):
        loaders = 0.0  # no step has ended yet, so the loader feeds the training; or counted steps read several loaders
    else:
        # The step that follows a validation contains a usual step.
        loaders = sum(
            row.seconds if row.loader not in (number, -1) else max(0.0, row.seconds - usual)
            for row in main.rows
            if _reads_other(row.flags, row.loader, number)
        )
        if _reads_other(flags, loader, number):
            loaders, seconds = loaders + seconds, 0.0
    evaluation = sum(
        row.evaluation
        for row in main.rows
        if not any(one.evaluation for one in counted)
        and not _reads_other(row.flags, row.loader, number)
    )
    longer = _longer(counted)
    after = seconds - usual
    return Elsewhere(
        loaders,
        evaluation,
        sum(longer),
        len(longer),
        sum(max(0.0, row.seconds - row.delay) for row in counted),
        after if after > _LONG_AFTER_SECONDS else 0.0,
        whole,
    )


def _longer(counted: Sequence[Row]) -> list[float]:
    """Return the seconds by which each long step exceeds a usual one; empty unless a few steps are long."""
    taken = [max(0.0, computing(row) - row.host) for row in counted]
    usual = statistics.median(taken) if taken else 0.0
    longer = [seconds - usual for seconds in taken if seconds > LONG * usual]
    few = _FEWEST_LONG <= len(longer) <= len(taken) / 4
    return longer if few else []


def _reads_other(flags: int, loader: int, number: int | None) -> bool:
    return bool(flags & OTHER_LOADER) or loader not in (number, -1)


def worker_shares(workers: Sequence[Process], main: Process) -> dict[int, float]:
    """Return the share of a core that each worker kept busy, by worker number; a restarted worker keeps its number.

    What was before the steps that count is left out: workers stand still while a first step compiles its kernels.
    """
    since = main.rows[min(WARM_UP, len(main.rows) - 1)].start if main.rows else 0.0
    spent: dict[int, list[float]] = {}
    for one in workers:
        cpu = one.state.get("cpu")
        if cpu and cpu[1] > 0:
            busy, seconds, until = cpu
            early = min(seconds, since - (until - seconds))
            if 0 < early < seconds:
                busy -= sum(fetch.cpu for fetch in one.fetches if fetch.start < since)
                seconds -= early
            known = spent.setdefault(one.state["worker_id"], [0.0, 0.0])
            known[0] += max(0.0, busy)
            known[1] += seconds
    return {number: busy / seconds for number, (busy, seconds) in sorted(spent.items())}


@dataclass(frozen=True)
class Clock:
    """Divides the time that a step queued for a core by the processes that it queued behind.

    Queueing behind other programs is left out of the step. Queueing behind the script's own loading processes is
    a cost of loading, and counts as waiting for data.
    """

    outside: float = 1.0  # share of the queueing behind other programs
    loading: float = 0.0  # share of the queueing behind the script's loading processes

    @classmethod
    def of(cls, process: Process, processes: Sequence[Process]) -> Clock:
        """Return the clock of a process's training thread, from the CPU time of all processes."""
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
        # Workers report now and then and may be killed before a last report, so their share is scaled to the
        # whole time.
        loading = sum(worker_shares(workers, process).values()) * cpu[1]
        script = loading + rest
        thread = sum(row.cpu for row in process.rows) / seconds * cpu[1]
        outside, others = max(0.0, busy - script), max(loading, script - thread)
        whole = outside + others
        return cls(outside / whole, loading / whole) if whole > 0 else cls()

    def seconds(self, row: Row) -> float:
        """Return the seconds of a step without queueing behind other programs."""
        return max(0.0, row.seconds - self.outside * row.delay)

    def wait(self, row: Row) -> float:
        """Return the seconds that loading costs the step."""
        return max(0.0, row.wait - self.outside * row.wait_delay) + self.crowding(row)

    def crowding(self, row: Row) -> float:
        """Return the seconds for which the step queued behind loading processes while computing."""
        return self.loading * max(0.0, row.delay - row.wait_delay)


def computing(row: Row) -> float:
    """Return the seconds of a step without waiting for data and without queueing for a core."""
    return max(0.0, row.seconds - row.delay) - max(0.0, row.wait - row.wait_delay)


def undisturbed(row: Row) -> float:
    """Return the share of a step, its wait for data left out, in which it did not queue for a core."""
    apart = row.seconds - row.wait
    return min(1.0, max(0.0, computing(row) / apart)) if apart > 0 else 1.0


def running(row: Row) -> float:
    """Return the time on a core as a share of the time on a core or queued for one."""
    return row.cpu / (row.cpu + row.delay) if row.cpu > 0 else 1.0


class Training:
    """The measured process of a script: its usual steps, the loader that feeds them, its clock."""

    def __init__(self, main: Process, processes: Sequence[Process]) -> None:
        self.main, self.processes, self.state = main, processes, main.state
        self.rows, self.number = usual_rows(main)
        self.clock = Clock.of(main, processes)
        self.watched = [row for row in self.rows if not row.flags & UNWATCHED]
        unwatched = [row for row in self.rows if row.flags & UNWATCHED]
        # Steps that the probe did not slow down: those in which it timed no calls, if there are enough.
        self.plain = unwatched if len(unwatched) >= _ENOUGH_ROWS else self.rows
        # Number of steps in which calls were timed: the totals of calls are divided by it.
        self.num_watched = max(1, int(self.state.get("num_watched", self.state["num_steps"])))
        loaders: list[dict[str, Any]] = self.state["loaders"]
        self.loader = next((facts for facts in loaders if facts["number"] == self.number), None)
        self.num_workers: int = self.loader["workers"] if self.loader else 0
        # The processes that make its batches.
        self.loading = [main] if self.loader else []
        if self.num_workers:
            self.loading = [
                one
                for one in processes
                if one.state["role"] == "worker"
                and one.state["loader_id"] == self.number
                and one.fetches
            ]

    def spread(self, rows: Sequence[Row], seconds: Callable[[Row], float]) -> Spread | None:
        """Return the spread of means over groups of one step per worker; smaller groups if there are few steps.

        Workers deliver their batches at about the same time, so that short and long steps alternate.
        """
        size = max(1, min(self.num_workers, len(rows) // 4))
        starts = range(0, len(rows) - size + 1, size)
        return Spread.of(statistics.fmean(map(seconds, rows[at : at + size])) for at in starts)


def seconds_of_look(
    state: Mapping[str, Any], step: Spread, known: float
) -> tuple[set[str], int, float]:
    """Return the lines of loops of timed calls, the samples at these lines, and the seconds of a sample in a step.

    `known` are the seconds of a step spent waiting for data and in timed calls. Samples divide the rest of the step.
    """
    doing = state.get("training", {})
    # A loop of timed calls is timed as a whole, so samples between two of its calls are left out.
    loops = {site["where"] for site in state["sites"] if site["calls"] >= 3 * state["num_steps"]}
    inside = sum(count for where, count in state.get("between", {}).items() if where in loops)
    looks = sum(doing.values()) - doing.get("timed", 0) - inside
    return loops, inside, max(0.0, step.median - known) / max(1, looks)


_WARM_FETCHES = 2
_SAME = (
    "workers", "batch_size", "is_stream", "pin_memory", "persistent_workers", "prefetch_factor", "start_method",
    "batch_bytes", "where", "dataset_where", "collate_where", "in_order",
)  # fmt: skip
"""Facts of a loader with the same name in the probe and in `LoaderFacts`."""


def read_loader(training: Training) -> LoaderFacts | None:
    """Return the facts of the loader that feeds the steps; None without a DataLoader."""
    facts, rows, clock = training.loader, training.rows, training.clock
    if facts is None:
        return None
    workers = training.loading
    fetches = [
        fetch
        for one in workers
        for fetch in one.fetches[_WARM_FETCHES:] or one.fetches
        if fetch.loader == training.number
    ]
    wall = sum(fetch.seconds for fetch in fetches)
    ran = sum(max(0.0, fetch.seconds - fetch.delay) for fetch in fetches)
    idle = sum(max(0.0, fetch.seconds - fetch.cpu - fetch.delay) for fetch in fetches)
    lines = sum((Counter(one.state["lines"]) for one in workers), Counter[str]())
    # Samples in a library that was not called by the user's code have no line.
    doing = sum((Counter(one.state["doing"]) for one in workers), Counter[str]())
    looks = doing.total()
    seen = (lines.most_common(1) or [(None, 0)])[0]
    batches = sum(row.batches for row in rows)
    waits = Spread.of(map(clock.wait, rows))
    steps = sum(map(clock.seconds, rows))
    starts, start_seconds = epoch_starts(facts, waits.median if waits else 0.0)
    if start_seconds is not None:
        start_seconds += _filling_seconds(training.main, rows, facts)
    cpu = training.state["cpu"]
    return LoaderFacts(
        **{name: facts[name] for name in _SAME if name in facts},
        work=_work(workers, fetches),
        alone_seconds=Spread.of(fetch.seconds - fetch.delay for fetch in fetches),
        sample_seconds=Spread.of(fetch.sample for fetch in fetches if fetch.sample is not None),
        # Time queued for a core counts neither as work nor as waiting.
        blocked_share=idle / ran if ran > 0 else None,
        queued_share=1 - ran / wall if wall > 0 else None,
        crowding_share=sum(map(clock.crowding, rows)) / steps if steps > 0 else None,
        worker_cpu_shares=tuple(
            worker_shares(workers if training.num_workers else [], training.main).values()
        ),
        main_cpu_share=cpu[0] / cpu[1] if cpu and cpu[1] > 0 else None,
        epoch_starts=starts,
        counted_starts=sum(bool(row.flags & EPOCH_START) for row in rows),
        epoch_start_seconds=start_seconds,
        steps_per_epoch=facts["length"],
        batches_per_step=max(1.0, batches / len(rows)) if rows else 1.0,
        open_hdf5=tuple(facts.get("open_hdf5") or ()),
        made_again=is_made_again(facts),
        decodes_pictures=doing["picture"] > doing["decode"],
        busiest_line=seen[0],
        busiest_share=seen[1] / max(1, looks, lines.total()) if seen[0] else None,
    )


def _work(workers: Sequence[Process], fetches: Sequence[Fetch]) -> LoaderWork:
    """Split the work on a batch by kind: collating was timed, the rest was sampled."""
    if not fetches:
        return LoaderWork()
    whole = statistics.median(fetch.seconds - fetch.delay for fetch in fetches)
    collate_share = sum(f.collate for f in fetches) / max(1e-9, sum(f.seconds for f in fetches))
    collate, dataset = whole * collate_share, whole * (1 - collate_share)
    seen = sum((Counter(one.state["doing"]) for one in workers), Counter[str]())
    looks = seen.total()
    if looks < 5:
        return LoaderWork(collate=collate, other=dataset)
    share = {kind: count / looks for kind, count in seen.items()}
    return LoaderWork(
        read=dataset * share.get("read", 0.0),
        decode=dataset * (share.get("decode", 0.0) + share.get("picture", 0.0)),
        transform=dataset * share.get("transform", 0.0),
        collate=collate,
        other=dataset * share.get("other", 0.0),
    )


def is_made_again(facts: Mapping[str, Any]) -> bool:
    """Return whether most epochs have a DataLoader of their own."""
    made = facts.get("made", 1)
    return bool(made > 1 and 2 * made > len(facts["epochs"]))


def epoch_starts(facts: Mapping[str, Any], usual_wait: float) -> tuple[int, float | None]:
    """Return the number of epochs that began after the warm-up, and the seconds between the steps of two epochs."""
    began = [
        started + max(0.0, waited - usual_wait)
        for step, started, waited in facts["epochs"]
        if step > WARM_UP
    ]
    ended = [seconds for step, seconds in facts["ends"] if step > WARM_UP]
    if not began:
        return 0, None
    return len(began), statistics.median(began) + (statistics.median(ended) if ended else 0.0)


def _filling_seconds(main: Process, counted: Sequence[Row], facts: Mapping[str, Any]) -> float:
    """Return the seconds that an epoch's next steps lose while new workers fill their queues, the median over epochs.

    `counted` are the usual steps. 0 with persistent workers, whose queues are filled ahead.
    """
    ahead = facts["workers"] * (facts["prefetch_factor"] or 0)
    kept = facts["persistent_workers"] and not is_made_again(facts)
    if not ahead or kept or not counted:
        return 0.0
    usual = statistics.median(row.seconds for row in counted)
    found = []
    for at, first in enumerate(main.rows):
        if at <= WARM_UP or not first.flags & EPOCH_START or first.loader != facts["number"]:
            continue
        following = itertools.takewhile(
            lambda row: not row.flags & (EPOCH_START | OTHER_LOADER),
            main.rows[at + 1 : at + 1 + ahead],
        )
        late = [row.seconds - usual for row in following if not row.flags & DISTURBED]
        found.append(max(0.0, sum(late)))
    return statistics.median(found) if found else 0.0


def read_hdf5(training: Training) -> tuple[Hdf5Facts, ...]:
    """Return the HDF5 datasets read for the loader's batches, the costliest first."""
    states = [one.state for one in training.loading]
    counts = (state.get("num_watched_fetches", state["num_fetches"]) for state in states)
    num_fetches = max(1, sum(counts))
    fetches = [fetch for one in training.loading for fetch in one.fetches]
    on_core = 1 - sum(f.delay for f in fetches) / max(1e-9, sum(f.seconds for f in fetches))
    by_name: dict[str, list[dict[str, Any]]] = {}
    for data in itertools.chain.from_iterable(state["hdf5"] for state in states):
        by_name.setdefault(data["name"], []).append(data)
    found = []
    for name, read in by_name.items():
        reads, seconds, counted, used, touched = (
            sum(data[key] for data in read)
            for key in ("reads", "seconds", "counted", "used", "touched")
        )
        scale = reads / max(1, counted) / num_fetches  # bytes were counted for the first reads only
        first = read[0]
        found.append(
            Hdf5Facts(
                name=name,
                shape=tuple(first["shape"]),
                chunks=None if first["chunks"] is None else tuple(first["chunks"]),
                compression=first["compression"],
                bytes_used_per_batch=used * scale,
                bytes_touched_per_batch=touched * scale,
                seconds_per_batch=seconds * on_core / num_fetches,
                reads_per_batch=reads / num_fetches,
                where=first["where"],
            )
        )
    return tuple(sorted(found, key=lambda data: -data.seconds_per_batch)[:20])
