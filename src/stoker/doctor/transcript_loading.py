"""What the processes of a script saw of its loader: waits, work by kind, epochs, HDF5.

Enters: the processes of a transcript. Leaves: `LoaderFacts` and `Hdf5Facts`. Costs nothing; pure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoker.doctor.measurements import Hdf5Facts, LoaderFacts, LoaderWork
from stoker.doctor.probe.recorder import WARM_UP, Fetch, Row
from stoker.doctor.transcript import Clock, Process, worker_shares
from stoker.measure.readings import Spread

_WARM_FETCHES = 2


def loading_processes(
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


def facts_of(main: Process, number: int | None) -> dict[str, Any] | None:
    """Return what the training process noted of a loader."""
    loaders: Iterable[dict[str, Any]] = main.state["loaders"]
    return next((facts for facts in loaders if facts["number"] == number), None)


def read_loader(
    main: Process, processes: Sequence[Process], rows: Sequence[Row], number: int | None
) -> LoaderFacts | None:
    """Return the loader that feeds the steps, with what its workers saw; None without a DataLoader."""
    facts = facts_of(main, number)
    if facts is None:
        return None
    workers = loading_processes(main, processes, number, facts["workers"])
    fetches = [
        fetch
        for one in workers
        for fetch in one.fetches[_WARM_FETCHES:] or one.fetches
        if fetch.loader == number
    ]
    wall = sum(fetch.seconds for fetch in fetches)
    ran = sum(max(0.0, fetch.seconds - fetch.delay) for fetch in fetches)
    idle = sum(max(0.0, fetch.seconds - fetch.cpu - fetch.delay) for fetch in fetches)
    lines = sum((Counter(one.state["lines"]) for one in workers), Counter[str]())
    seen, looks = (lines.most_common(1) or [(None, 0)])[0], max(1, lines.total())
    batches = sum(row.batches for row in rows)
    clock = Clock.of(main, processes)
    waits = Spread.of(map(clock.wait, rows))
    steps = sum(map(clock.seconds, rows))
    starts, start_seconds = _epoch_starts(facts, waits.median if waits else 0.0)
    cpu = main.state["cpu"]
    return LoaderFacts(
        workers=facts["workers"],
        batch_size=facts["batch_size"],
        is_stream=facts.get("is_stream", False),
        pin_memory=facts["pin_memory"],
        persistent_workers=facts["persistent_workers"],
        prefetch_factor=facts["prefetch_factor"],
        start_method=facts["start_method"],
        work=_work(workers, fetches),
        alone_seconds=Spread.of(fetch.seconds - fetch.delay for fetch in fetches),
        sample_seconds=Spread.of(fetch.sample for fetch in fetches if fetch.sample is not None),
        # Seconds queued for a core are the machine's affair: they are neither work nor waiting.
        blocked_share=idle / ran if ran > 0 else None,
        queued_share=1 - ran / wall if wall > 0 else None,
        crowding_share=sum(map(clock.crowding, rows)) / steps if steps > 0 else None,
        worker_cpu_shares=tuple(worker_shares(workers if facts["workers"] else []).values()),
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


def _work(workers: Sequence[Process], fetches: Sequence[Fetch]) -> LoaderWork:
    """Split the usual batch: collating by the clock, the rest by what was seen being done."""
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


def read_hdf5(
    main: Process, processes: Sequence[Process], number: int | None
) -> tuple[Hdf5Facts, ...]:
    """Return the HDF5 datasets read for a loader's batches, the costliest first."""
    facts = facts_of(main, number)
    if facts is None:
        return ()
    workers = loading_processes(main, processes, number, facts["workers"])
    num_fetches = max(1, sum(one.state["num_fetches"] for one in workers))
    fetches = [fetch for one in workers for fetch in one.fetches]
    on_core = 1 - sum(f.delay for f in fetches) / max(1e-9, sum(f.seconds for f in fetches))
    together: dict[str, dict[str, Any]] = {}
    for one in workers:
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
            seconds_per_batch=data["seconds"] * on_core / num_fetches,
            reads_per_batch=data["reads"] / num_fetches,
            where=data["where"],
        )
        for data in sorted(together.values(), key=lambda data: -data["seconds"])[:20]
    )
