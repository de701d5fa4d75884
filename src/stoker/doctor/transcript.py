"""From the lines that probes wrote to measurements.

Enters: a folder with one file per process of a script. Leaves: `Measurements` of the process that trains,
with what its workers and the other ranks saw. Costs milliseconds; nothing is run. Lines torn by a kill are
left out.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stoker.doctor.measurements import (
    AllocatorFacts,
    BadValues,
    Hdf5Facts,
    HostCall,
    HostSync,
    KernelFacts,
    LoaderFacts,
    LoaderWork,
    MachineFacts,
    Measurements,
    MemoryFacts,
    OperatorFacts,
    PageableCopy,
    RankFacts,
    Spread,
    TimelineSpan,
)
from stoker.doctor.probe.recorder import DISTURBED, OTHER_LOADER, WARM_UP, Fetch, Row
from stoker.units import MIB

_WARM_FETCHES = 2
_CREEP_BLOCKS = 6
_CREEP_BYTES = {"host_bytes": 8 * MIB, "device_bytes": 1 * MIB}


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
            line = json.loads(text)
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


def measure(
    processes: Sequence[Process], subject: str, machine: MachineFacts, notes: Iterable[str] = ()
) -> Measurements:
    """Return what the processes of one script saw."""
    main = _main_process(processes)
    said = list(notes)
    if main is None:
        said.append(
            "no Python process of the script trained with torch, or it ended before its first step"
        )
        return Measurements(subject, machine=machine, notes=tuple(said))
    state = main.state
    rows, loader_number = _usual_rows(main)
    said += _notes(main, processes, rows)
    per_step = 1.0 / max(1, state["num_steps"])
    facts = _facts(main, loader_number)
    rhythm = _rhythm(rows, facts["workers"] if facts else 0)
    step = rhythm.spread(_own_seconds)
    wait = rhythm.spread(_own_wait) if facts else None
    # Fetches are too many to ask the kernel at each: they queue as the rest of the step's work does.
    cpu, queued = sum(row.cpu for row in rows), sum(row.delay for row in rows)
    running = cpu / (cpu + queued) if cpu > 0 else 1.0
    sites = [(site, site.pop("family")) for site in map(dict, state["sites"])]
    seconds = sum(map(_own_seconds, rows))
    samples = sum(row.samples for row in rows)
    return Measurements(
        subject,
        machine=_machine(machine, state),
        steps=len(rows),
        seconds=seconds,
        samples_per_step=samples / len(rows) if rows and samples else None,
        step_seconds=step,
        wait_seconds=wait,
        compute_seconds=Spread.of(_own_seconds(row) - _own_wait(row) for row in rows),
        backward_seconds=Spread.of(row.backward for row in rows if row.backward),
        optimizer_seconds=Spread.of(row.optimizer for row in rows if row.optimizer),
        loader=_loader(main, processes, rows, loader_number),
        syncs=tuple(
            HostSync(
                s["where"], s["call"], s["calls"] * per_step, s["seconds"] * per_step * running
            )
            for s in _costliest(sites, "sync")
        ),
        copies=tuple(
            PageableCopy(
                s["where"],
                s["bytes"] * per_step,
                s["seconds"] * per_step * running,
                s["calls"] * per_step,
            )
            for s in _costliest(sites, "copy")
        ),
        kernels=_kernels(state["profile"], step),
        operators=_operators(state["profile"]),
        allocator=_allocator(state, sites, per_step),
        memory=_memory(main.rows),
        host_calls=_calls(sites, "host", per_step),
        hdf5=_hdf5(main, processes, loader_number),
        ranks=_ranks(processes),
        bad_values=tuple(
            BadValues(what, where, count, looks)
            for what, (count, looks, where) in state["bad"].items()
            if count
        ),
        captured=True if state["kind"] == "replay" else None,
        timeline=_timeline(main, processes, loader_number),
        notes=tuple(said),
    )


# -- which process, which steps --------------------------------------------------------------------


def _main_process(processes: Sequence[Process]) -> Process | None:
    """Return rank 0, or the process that trained longest."""
    training = [
        one for one in processes if one.state.get("role") != "worker" and one.state.get("kind")
    ]
    ranked = [one for one in training if one.rank == 0 and one.rows]
    return max(
        ranked or training, key=lambda one: sum(row.seconds for row in one.rows), default=None
    )


def _usual_rows(main: Process) -> tuple[list[Row], int | None]:
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
class Rhythm:
    """Steps in groups of one round of the workers: they deliver together, so single steps alternate."""

    groups: tuple[tuple[Row, ...], ...]

    def spread(self, seconds: Callable[[Row], float]) -> Spread | None:
        """Return the spread of the groups' means."""
        return Spread.of(statistics.fmean(map(seconds, group)) for group in self.groups)


def _own_seconds(row: Row) -> float:
    """Return a step's seconds less those queued for a core: they are other work's on the machine."""
    return max(0.0, row.seconds - row.delay)


def _own_wait(row: Row) -> float:
    return max(0.0, row.wait - row.wait_delay)


def _rhythm(rows: Sequence[Row], workers: int) -> Rhythm:
    size = max(1, min(workers, len(rows) // 4))
    starts = range(0, len(rows) - size + 1, size)
    return Rhythm(tuple(tuple(rows[at : at + size]) for at in starts))


def _notes(main: Process, processes: Sequence[Process], rows: Sequence[Row]) -> list[str]:
    state = main.state
    notes = list(state["notes"])
    if state["kind"] == "batch":
        notes.append("no optimizer step and no backward pass was seen: a step is one batch")
    elif state["kind"] == "backward":
        notes.append("no optimizer step was seen: a step is one backward pass")
    if len(rows) < 10:
        notes.append(f"only {len(rows)} steps were measured: every figure is rough")
    queued = sum(row.delay for row in rows) / max(1e-9, sum(row.seconds for row in rows))
    if queued > 0.2:
        notes.append(
            f"other work on this machine took the cores: {queued:.0%} of a step was spent queueing for one "
            "and is left out of the figures"
        )
    if not state["loaders"]:
        notes.append("no DataLoader was used: waiting for data was not measured")
    if "skipped" in state["profile"]:
        notes.append(f"operators and kernels were not measured: {state['profile']['skipped']}")
    if state["stands"]:
        notes.append(f"at the end the script had been standing at {state['stands']} for a while")
    others = [
        one
        for one in processes
        if one is not main and one.rank is None and one.rows and one.state["role"] != "worker"
    ]
    if others:
        notes.append(
            f"{len(others)} other processes of the script trained too; this is the longest"
        )
    return notes


def _machine(machine: MachineFacts, state: Mapping[str, Any]) -> MachineFacts:
    torch = state["torch"]
    return replace(
        machine,
        device="cuda" if torch.get("cuda") else "cpu",
        device_name=torch.get("cuda") or machine.device_name,
        torch=torch.get("version"),
        device_free_bytes=torch.get("free_bytes"),
    )


# -- the loader ------------------------------------------------------------------------------------


def _loading_processes(
    main: Process, processes: Sequence[Process], number: int | None, workers: int
) -> list[Process]:
    """Return the processes that make the batches of one loader."""
    if workers == 0:
        return [main]
    return [
        one
        for one in processes
        if one.state["role"] == "worker" and one.state["loader_id"] == number and one.fetches
    ]


def _facts(main: Process, number: int | None) -> dict[str, Any] | None:
    loaders: Iterable[dict[str, Any]] = main.state["loaders"].values()
    return next((facts for facts in loaders if facts["number"] == number), None)


def _loader(
    main: Process, processes: Sequence[Process], rows: Sequence[Row], number: int | None
) -> LoaderFacts | None:
    facts = _facts(main, number)
    if facts is None:
        return None
    crew = _loading_processes(main, processes, number, facts["workers"])
    fetches = [
        fetch
        for one in crew
        for fetch in one.fetches[_WARM_FETCHES:] or one.fetches
        if fetch.loader == number
    ]
    wall = sum(fetch.seconds for fetch in fetches)
    ran = sum(max(0.0, fetch.seconds - fetch.delay) for fetch in fetches)
    idle = sum(max(0.0, fetch.seconds - fetch.cpu - fetch.delay) for fetch in fetches)
    lines = sum((Counter(one.state["lines"]) for one in crew), Counter[str]())
    seen, looks = (lines.most_common(1) or [(None, 0)])[0], max(1, lines.total())
    batches = sum(row.batches for row in rows)
    waits = Spread.of(map(_own_wait, rows))
    starts, start_seconds = _epoch_starts(facts, waits.median if waits else 0.0)
    cpu = main.state["cpu"]
    return LoaderFacts(
        workers=facts["workers"],
        batch_size=facts["batch_size"],
        pin_memory=facts["pin_memory"],
        persistent_workers=facts["persistent_workers"],
        prefetch_factor=facts["prefetch_factor"],
        start_method=facts["start_method"],
        work=_work(crew, fetches),
        alone_seconds=Spread.of(fetch.seconds - fetch.delay for fetch in fetches),
        # Seconds queued for a core are the machine's affair: they are neither work nor waiting.
        blocked_share=idle / ran if ran > 0 else None,
        queued_share=1 - ran / wall if wall > 0 else None,
        worker_cpu_shares=_cpu_shares(crew if facts["workers"] else []),
        main_cpu_share=cpu[0] / cpu[1] if cpu and cpu[1] > 0 else None,
        epoch_starts=starts,
        epoch_start_seconds=start_seconds,
        steps_per_epoch=facts["length"],
        batches_per_step=max(1.0, batches / len(rows)) if rows else 1.0,
        batch_bytes=facts["batch_bytes"],
        where=facts["where"],
        dataset_where=facts["dataset_where"],
        collate_where=facts["collate_where"],
        busiest_line=seen[0],
        busiest_share=seen[1] / looks if seen[0] else None,
    )


def _cpu_shares(crew: Sequence[Process]) -> tuple[float, ...]:
    shares: dict[int, float] = {}
    for one in crew:
        cpu = one.state["cpu"]
        if cpu and cpu[1] > 0:
            # Workers that were started again have the same number: the last one stands for it.
            shares[one.state["worker_id"]] = cpu[0] / cpu[1]
    return tuple(shares[number] for number in sorted(shares))


def _work(crew: Sequence[Process], fetches: Sequence[Fetch]) -> LoaderWork:
    """Split the usual batch: collating by the clock, the rest by what was seen being done."""
    if not fetches:
        return LoaderWork()
    whole = statistics.median(fetch.seconds - fetch.delay for fetch in fetches)
    collate_share = sum(f.collate for f in fetches) / max(1e-9, sum(f.seconds for f in fetches))
    collate, dataset = whole * collate_share, whole * (1 - collate_share)
    seen = sum((Counter(one.state["doing"]) for one in crew), Counter[str]())
    looks = seen.total()
    if looks < 5:
        return LoaderWork(collate=collate, other=dataset)
    share = {kind: count / looks for kind, count in seen.items()}
    return LoaderWork(
        read=dataset * share.get("read", 0.0),
        decode=dataset * share.get("decode", 0.0),
        transform=dataset * share.get("transform", 0.0),
        collate=collate,
        other=dataset * share.get("other", 0.0),
    )


def _epoch_starts(facts: Mapping[str, Any], usual_wait: float) -> tuple[int, float | None]:
    """Return how many epochs began after warm-up, and what ending and beginning one costs."""
    began = [
        started + max(0.0, waited - usual_wait)
        for step, started, waited in facts["epochs"]
        if step > WARM_UP
    ]
    ended = [seconds for step, seconds in facts["ends"] if step > WARM_UP]
    if not began:
        return 0, None
    return len(began), statistics.median(began) + (statistics.median(ended) if ended else 0.0)


def _hdf5(main: Process, processes: Sequence[Process], number: int | None) -> tuple[Hdf5Facts, ...]:
    facts = _facts(main, number)
    if facts is None:
        return ()
    crew = _loading_processes(main, processes, number, facts["workers"])
    num_fetches = max(1, sum(one.state["num_fetches"] for one in crew))
    fetches = [fetch for one in crew for fetch in one.fetches]
    running = 1 - sum(f.delay for f in fetches) / max(1e-9, sum(f.seconds for f in fetches))
    together: dict[str, dict[str, Any]] = {}
    for one in crew:
        for data in one.state["hdf5"]:
            known = together.setdefault(
                data["name"],
                {**data, **dict.fromkeys(("reads", "seconds", "counted", "used", "touched"), 0)},
            )
            for name in ("reads", "seconds", "counted", "used", "touched"):
                known[name] += data[name]
    return tuple(
        Hdf5Facts(
            name=data["name"],
            shape=tuple(data["shape"]),
            chunks=None if data["chunks"] is None else tuple(data["chunks"]),
            compression=data["compression"],
            bytes_used_per_batch=data["used"]
            * data["reads"]
            / max(1, data["counted"])
            / num_fetches,
            bytes_touched_per_batch=data["touched"]
            * data["reads"]
            / max(1, data["counted"])
            / num_fetches,
            seconds_per_batch=data["seconds"] * running / num_fetches,
            reads_per_batch=data["reads"] / num_fetches,
            where=data["where"],
        )
        for data in sorted(together.values(), key=lambda data: -data["seconds"])[:20]
    )


# -- the step --------------------------------------------------------------------------------------


def _costliest(sites: Sequence[tuple[dict[str, Any], str]], family: str) -> list[dict[str, Any]]:
    """Return the sites of one family by line, the costliest first."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for site, kind in sites:
        if kind == family:
            known = merged.setdefault(
                (site["where"], site["call"]), {**site, "calls": 0, "seconds": 0.0, "bytes": 0}
            )
            for name in ("calls", "seconds", "bytes"):
                known[name] += site[name]
    return sorted(merged.values(), key=lambda site: -site["seconds"])[:20]


def _calls(
    sites: Sequence[tuple[dict[str, Any], str]], family: str, per_step: float
) -> tuple[HostCall, ...]:
    return tuple(
        HostCall(s["where"], s["call"], s["calls"] * per_step, s["seconds"] * per_step)
        for s in _costliest(sites, family)
    )


def _allocator(
    state: Mapping[str, Any],
    sites: Sequence[tuple[dict[str, Any], str]],
    per_step: float,
) -> AllocatorFacts:
    now, first = state["torch"], state["first_torch"]

    def per_step_of(name: str) -> float | None:
        if name not in now:
            return None
        grown = float(now[name] - first.get(name, 0))
        return grown / max(1, int(state["num_steps"]) - WARM_UP)

    return AllocatorFacts(
        per_step_of("retries"),
        per_step_of("device_allocs"),
        _calls(sites, "empty", per_step),
    )


def _kernels(profile: Mapping[str, Any], step: Spread | None) -> KernelFacts | None:
    if not profile.get("kernels") or step is None or step.median <= 0:
        return None
    # The profiler slows the host down, not the kernels: their time is held against a usual step.
    busy = profile["busy_seconds"] / profile["steps"]
    return KernelFacts(
        per_step=profile["kernels"] / profile["steps"],
        mean_seconds=profile["kernel_seconds"] / profile["kernels"],
        busy_share=min(1.0, busy / step.median),
    )


def _operators(profile: Mapping[str, Any]) -> OperatorFacts | None:
    if not profile.get("operators"):
        return None
    double = profile["double_seconds"]
    if "double_kernel_seconds" in profile:
        double = profile["double_kernel_seconds"] / profile["steps"]
    return OperatorFacts(
        per_step=profile["operators"],
        work_seconds=profile["work_seconds"] + profile["update_seconds"],
        weight_seconds=profile["update_seconds"],
        double_seconds=double,
        matmul_seconds=profile["matmul_seconds"],
    )


def _memory(rows: Sequence[Row]) -> MemoryFacts:
    def last(name: str) -> int | None:
        return next(
            (value for row in reversed(rows) if (value := getattr(row, name)) is not None), None
        )

    return MemoryFacts(
        device_bytes_per_step=creep(rows, "device_bytes"),
        host_bytes_per_step=creep(rows, "host_bytes"),
        device_bytes=last("device_bytes"),
        host_bytes=last("host_bytes"),
    )


def creep(rows: Sequence[Row], name: str) -> float | None:
    """Return bytes per step by which memory keeps growing; 0 when it settles, None when unknown.

    The first quarter is left out; the rest must grow from each of six blocks to the next, since an
    allocator that settles grows once, and one that breathes goes up and down.
    """
    points = [
        (at, value) for at, row in enumerate(rows) if (value := getattr(row, name)) is not None
    ]
    points = points[len(points) // 4 :]
    if len(points) < 2 * _CREEP_BLOCKS:
        return None
    size = len(points) // _CREEP_BLOCKS
    blocks = [points[i * size : (i + 1) * size] for i in range(_CREEP_BLOCKS)]
    middles = [statistics.median(value for _, value in block) for block in blocks]
    grown = middles[-1] - middles[0]
    rises = [after - before for before, after in itertools.pairwise(middles)]
    if grown < _CREEP_BYTES[name] or min(rises) < 0.08 * grown:
        return 0.0
    steps = statistics.median(at for at, _ in blocks[-1]) - statistics.median(
        at for at, _ in blocks[0]
    )
    return float(grown / max(1.0, steps))


def _ranks(processes: Sequence[Process]) -> tuple[RankFacts, ...]:
    """Return every rank's own share of a step.

    What a rank spends in `backward` and in collectives is its own work plus its wait for the others; the
    rank that waits least shows how much of it is work.
    """
    found: dict[int, tuple[float, float]] = {}
    for one in processes:
        if one.rank is None or one.state["role"] == "worker":
            continue
        rows, _ = _usual_rows(one)
        if rows:
            shared = statistics.median(row.backward + row.collective for row in rows)
            found[one.rank] = (statistics.median(map(_own_seconds, rows)), shared)
    if len(found) < 2:
        return ()
    least = min(shared for _, shared in found.values())
    return tuple(
        RankFacts(rank, step, max(0.0, step - shared + least))
        for rank, (step, shared) in sorted(found.items())
    )


# -- drawing ---------------------------------------------------------------------------------------


def _timeline(
    main: Process, processes: Sequence[Process], number: int | None
) -> tuple[TimelineSpan, ...]:
    """Return the spans of a few steps, with what the workers did meanwhile."""
    raw = [tuple(span) for span in main.state["spans"]]
    drawn = sorted({step for step, *_ in raw if step < len(main.rows)})
    if not drawn:
        return ()
    zero = main.rows[drawn[0]].start
    spans = []
    for count, step in enumerate(drawn):
        row = main.rows[step]
        spans.append(TimelineSpan(count, "main", "step", row.start - zero, row.seconds))
        inside = sorted((began, ended, kind) for at, kind, began, ended in raw if at == step)
        data = [ended for began, ended, kind in inside if kind == "wait"]
        back = [began for began, ended, kind in inside if kind == "backward"]
        if data and back and back[0] > data[0]:
            inside.append((data[0], back[0], "forward"))
        spans += [
            TimelineSpan(
                count, "main", kind, max(began, row.start) - zero, ended - max(began, row.start)
            )
            for began, ended, kind in inside
            if ended > row.start
        ]
    end = main.rows[drawn[-1]].start + main.rows[drawn[-1]].seconds
    facts = _facts(main, number)
    for one in _loading_processes(main, processes, number, facts["workers"]) if facts else ():
        if facts and facts["workers"]:
            spans += [
                TimelineSpan(
                    0, f"worker {one.state['worker_id']}", "load", f.start - zero, f.seconds
                )
                for f in one.fetches
                if f.start + f.seconds > zero and f.start < end
            ]
    return tuple(spans)
