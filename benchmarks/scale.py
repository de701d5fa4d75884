"""What one rank of many costs, from 1 to 1024 of them: bytes read, steps, memory and host time.

    python benchmarks/scale.py [--samples 100000000] [--resident 10000000]

Nothing is trained and no data is read: the real order code is asked what every rank would do, over a
store of 1 KB samples that need not exist. The limit is the ideal: one N-th of what one rank costs. A
rank's plan is made from its number and the number of ranks alone; that all of them together read every
sample once is checked here over all ranks. What does not fall as 1 / N is in the table too.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from harness import publish
from stoker.loader.elastic import find_resume_point, save_state
from stoker.loader.lanes import LanePlan
from stoker.loader.order import Order
from stoker.loader.planned import EpochOrder
from stoker.plan.facts import even_chunks

RANKS = (1, 2, 3, 4, 7, 8, 16, 32, 64, 100, 128, 256, 512, 1000, 1024)
FEW_RANKS = (1, 8, 64, 1024)
SAMPLE_BYTES = 1024
CHUNK_SAMPLES = 100_000
BATCH = 128
EPOCH = 1


def every_rank(order: Order) -> Iterator[EpochOrder]:
    for rank in range(order.world_size):
        yield replace(order, rank=rank).epoch(EPOCH)


def read_samples(epoch: EpochOrder) -> int:
    return sum(visit.stop - visit.start for visit in epoch.visits())


def covers_once(order: Order) -> bool:
    """Whether the ranks together read every sample that is used, and none twice."""
    ranges = sorted(
        (visit.start, visit.stop) for epoch in every_rank(order) for visit in epoch.visits()
    )
    low, high = np.array(ranges).T
    return bool((high[:-1] <= low[1:]).all()) and int((high - low).sum()) == order.num_used


def host_cost(order: Order) -> dict[str, float]:
    """Time to the first batch, time per batch, and memory of the plan and its permutations."""
    middle = replace(order, rank=order.world_size // 2)
    batch_seconds = []
    for _ in range(3):
        began = time.perf_counter()
        batches = middle.epoch(EPOCH).batches()
        next(batches)
        first_seconds = time.perf_counter() - began
        began = time.perf_counter()
        count = sum(1 for _ in islice(batches, 1000))
        batch_seconds.append((time.perf_counter() - began) / max(1, count))
    tracemalloc.start()
    batches = middle.epoch(EPOCH).batches()
    kept = list(islice(batches, 3))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kept
    return {
        "first_batch_ms": first_seconds * 1e3,
        "batch_us": min(batch_seconds) * 1e6,
        "plan_bytes": most,
    }


def measure(order: Order, whole: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a rank costs; `whole` is what it costs alone."""
    read = max(map(read_samples, every_rank(order))) * SAMPLE_BYTES
    ideal = (whole or {"read_bytes": read})["read_bytes"] / order.world_size
    steps = (whole or {"steps": len(order)})["steps"] / order.world_size
    return {
        "read_bytes": read,
        "ideal_read_bytes": ideal,
        "read_times_ideal": read / ideal,
        "steps": len(order),
        "steps_times_ideal": len(order) / steps,
        "most_chunks_per_batch": order.most_chunks_per_batch,
        **host_cost(order),
    }


def scale(order: Order, ranks: tuple[int, ...], *, is_shared: bool) -> dict[str, Any]:
    """Measure an order for several numbers of ranks."""
    result: dict[str, Any] = {}
    for count in ranks:
        each = replace(order, world_size=count)
        result[str(count)] = measure(each, result.get("1"))
        if is_shared:
            assert covers_once(each), f"{count} ranks do not share the epoch"
            result[str(count)]["covers_once"] = True
    return result


def scale_lanes(plan: LanePlan, ranks: tuple[int, ...]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for count in ranks:
        lanes = replace(plan, num_lanes=BATCH * count)
        order = Order(plan.num_samples, BATCH, "lanes", world_size=count, lanes=lanes)
        own = [sum(map(len, epoch.stream(0, 3))) for epoch in islice(every_rank(order), 4)]
        assert set(own) == {3 * BATCH}
        result[str(count)] = {
            "steps": len(order),
            "steps_times_ideal": len(order)
            * count
            / result.get("1", {"steps": len(order)})["steps"],
            **host_cost(order),
        }
    return result


def resume_cost(order: Order, ranks: int) -> dict[str, float]:
    """Half of an epoch on `ranks` ranks, the rest on half as many: what one of them spends on it."""
    before = replace(order, world_size=ranks)
    state = save_state(before, before.epoch(EPOCH), len(before) // 2, ())
    after = replace(order, world_size=ranks // 2)
    began = time.perf_counter()
    place = find_resume_point(after, state)
    assert place.begun is not None
    next(place.begun.batches())
    seconds = time.perf_counter() - began
    tracemalloc.start()
    place = find_resume_point(after, state)
    assert place.begun is not None
    few = list(islice(place.begun.batches(), 3))
    kept, most = tracemalloc.get_traced_memory()
    assert few
    tracemalloc.stop()
    return {"seconds": seconds, "kept_bytes": kept, "peak_bytes": most}


def show(title: str, rows: dict[str, Any]) -> None:
    print(f"\n{title}")
    print("  ranks      steps   x ideal      read/rank   x ideal   1st batch   a batch     plan")
    for ranks, row in rows.items():
        read = f"{row['read_bytes'] / 1e6:10,.1f} MB" if "read_bytes" in row else f"{'all':>13}"
        times = f"{row['read_times_ideal']:8.4f}" if "read_times_ideal" in row else f"{'':8}"
        print(
            f"  {ranks:>5} {row['steps']:>10,} {row['steps_times_ideal']:9.4f}  {read}  {times}"
            f"  {row['first_batch_ms']:7.1f} ms {row['batch_us']:6.1f} us {row['plan_bytes'] / 1e6:7.2f} MB"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--resident", type=int, default=10_000_000)
    args = parser.parse_args()
    chunks = even_chunks(args.samples, CHUNK_SAMPLES)
    shuffled = Order(args.samples, BATCH, "shuffled", 1, chunks=chunks)
    in_time = Order(args.samples, BATCH, "time", chunks=chunks)
    resident = Order(args.resident, BATCH, "shuffled", 1)
    every = np.arange(args.resident)
    lanes = LanePlan(args.resident, BATCH, every, every == 0, {})
    result: dict[str, Any] = {
        "samples": args.samples,
        "resident_samples": args.resident,
        "sample_bytes": SAMPLE_BYTES,
        "batch_size": BATCH,
        "chunk_samples": CHUNK_SAMPLES,
        "shuffled_chunks": scale(shuffled, RANKS, is_shared=True),
        "time_chunks": scale(in_time, RANKS, is_shared=True),
        "shuffled_resident": scale(resident, FEW_RANKS, is_shared=False),
        "lanes_resident": scale_lanes(lanes, RANKS),
        "resume_on_half_the_ranks": {
            str(ranks): resume_cost(shuffled, ranks) for ranks in (2, 16, 128, 1024)
        },
    }
    show(f"shuffled, {len(chunks):,} chunks of {args.samples:,} samples", result["shuffled_chunks"])
    show(f"time order, {args.samples:,} samples", result["time_chunks"])
    show(
        f"full shuffle of {args.resident:,} resident samples: reading, permutation and memory do NOT "
        "fall: every rank has everything",
        result["shuffled_resident"],
    )
    show(f"lanes over {args.resident:,} resident samples", result["lanes_resident"])
    print(
        "\nhalf of a shuffled epoch on N ranks, the rest on N / 2: checked and begun, once (few ranks "
        "check more samples each; of many, each is looked at)"
    )
    for ranks, row in result["resume_on_half_the_ranks"].items():
        print(
            f"  {ranks:>5}  {row['seconds']:6.2f} s   keeps {row['kept_bytes'] / 1e6:6.1f} MB"
            f"   at most {row['peak_bytes'] / 1e6:6.1f} MB"
        )
    publish("scale", result)


if __name__ == "__main__":
    main()
