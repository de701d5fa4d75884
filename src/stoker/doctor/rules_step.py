"""Findings about the step itself and the run: syncs, copies, launches, precision, memory, ranks.

Enters: a `Case`. Leaves: a finding or None. Costs nothing; pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from stoker.doctor.cases import Case, Rule, milliseconds, worthwhile
from stoker.doctor.findings import Finding, Gain
from stoker.doctor.gains import Pace, gain, gain_of_steps
from stoker.doctor.measurements import HostCall, HostSync
from stoker.units import KIB, MIB, format_bytes, format_count

_SHORT_KERNEL_SECONDS = 25e-6
_LAUNCH_FLOOR_SECONDS = 2e-6
"""A kernel that does nothing keeps the device busy for about this long."""
_PINNED_BYTES_PER_SECOND = 20e9
"""PCIe 4 with 16 lanes, where the machine was not measured."""
_OPERATOR_SECONDS = 40e-6
"""At most, of one operator forward and backward with the Python around it."""
_DRIVER_ALLOC_SECONDS = 150e-6
_RETRY_SECONDS = 20e-3
_SMALL_BATCH = 64
_MOST_TIMES_LARGER, _ENOUGH = 32, 512
"""The larger batch that is proposed: at most so many times this one, and not beyond so many samples."""
_FETCH_SECONDS = 60e-6
"""Of asking a dataset for a batch, however small."""
_UNEVEN = 1.15


def _saved(pace: Pace, seconds: float, low: float = 0.5, likely: float = 0.95) -> Gain:
    """Return the gain of `seconds` less on the host, of which only shares may come true."""
    return gain(
        pace, pace.saving(seconds * likely), pace.saving(seconds * low), pace.saving(seconds)
    )


def _call_lines(calls: Sequence[HostSync | HostCall]) -> list[str]:
    return [
        f"{call.where}: {call.call}, {call.calls_per_step:.3g} times and "
        f"{milliseconds(call.seconds_per_step)} per step"
        for call in calls[:3]
    ]


def pageable_copies(case: Case) -> Finding | None:
    """Batches go to the device from memory that is not pinned."""
    copies = case.measured.copies
    if case.pace is None or not copies or not case.on_gpu:
        return None
    seconds = sum(copy.seconds_per_step for copy in copies)
    num_bytes = sum(copy.bytes_per_step for copy in copies)
    rate = case.measured.machine.pinned_bytes_per_second or _PINNED_BYTES_PER_SECOND
    saved = max(0.0, seconds - num_bytes / rate)
    pinned = case.measured.loader is not None and bool(case.measured.loader.pin_memory)
    return worthwhile(
        case.finding(
            "pageable-copies",
            "batches are copied from pageable memory",
            [
                (
                    f"{format_bytes(num_bytes)} per step, {milliseconds(seconds)} "
                    f"({case.share_of_step(seconds):.0%} of it) with the host waiting"
                ),
                *(f"{c.where}: {format_bytes(c.bytes_per_step)} per step" for c in copies[:3]),
                "the DataLoader pins its batches, but what is copied is not what it gave"
                if pinned
                else None,
            ],
            "Set pin_memory=True in the DataLoader and copy with .to(device, non_blocking=True).",
            gain(
                case.pace,
                case.pace.saving(saved),
                case.pace.saving(saved / 2),
                case.pace.saving(seconds),
            ),
            loader_arguments={} if pinned else {"pin_memory": True},
            where=copies[0].where,
            script="batch = batch.to(device, non_blocking=True)",
            config={"data.pin_memory": True},
        )
    )


def sync_every_step(case: Case) -> Finding | None:
    """The host waits for the device, or fetches values one by one, in every step."""
    syncs = [sync for sync in case.measured.syncs if sync.calls_per_step >= 0.5]
    if case.pace is None or not syncs:
        return None
    seconds = sum(sync.seconds_per_step for sync in syncs)
    if case.share_of_step(seconds) < 0.03:
        return None
    gained = _saved(case.pace, seconds)
    if case.on_gpu and case.measured.kernels is None:
        # Part of the wait is the device's own work, and how much is unknown.
        gained = _saved(case.pace, seconds, low=0.0, likely=0.5)
    doing = "waits for the device" if case.on_gpu else "fetches values from tensors"
    return worthwhile(
        case.finding(
            "sync-every-step",
            f"the host {doing} in every step",
            [
                f"{milliseconds(seconds)} of a step ({case.share_of_step(seconds):.0%}) is spent there",
                *_call_lines(syncs),
            ],
            "Keep running sums as tensors and read them every 50 steps, instead of calling .item() or .cpu() "
            "in the loop.",
            gained,
            where=syncs[0].where,
            script="total += loss.detach()  # and total.item() once in a while",
            config={"training.read_every": 50},
        )
    )


def launch_bound(case: Case) -> Finding | None:
    """The host launches many short kernels, and the device waits between them."""
    kernels, pace = case.measured.kernels, case.pace
    if kernels is None or pace is None or case.measured.captured:
        return None
    if (
        kernels.busy_share > 0.8
        or kernels.mean_seconds > _SHORT_KERNEL_SECONDS
        or kernels.per_step < 20
    ):
        return None
    alone = case.measured.ablation
    if alone and alone.captured_step_seconds:
        spread = alone.captured_step_seconds
        gained = gain(
            pace,
            replace(pace, compute=spread.median),
            replace(pace, compute=spread.high),
            replace(pace, compute=spread.low),
        )
    else:
        busy = pace.device_busy
        gap = max(0.0, pace.compute - busy)
        gained = gain(pace, pace.saving(gap - 0.1 * busy), pace.saving(0.4 * gap), pace.saving(gap))
    return worthwhile(
        case.finding(
            "launch-bound",
            "the GPU waits for the next kernel to be launched",
            [
                f"{kernels.per_step:.0f} kernels per step of {kernels.mean_seconds * 1e6:.1f} µs on average",
                f"at least one kernel runs {kernels.busy_share:.0%} of the time",
            ],
            "Replay the step as one CUDA graph: stoker's Trainer does with capture=auto, torch.compile with "
            'mode="reduce-overhead".',
            gained,
            script='model = torch.compile(model, mode="reduce-overhead")',
            config={"training.capture": "auto"},
        )
    )


def batch_too_small(case: Case) -> Finding | None:
    """A step costs nearly the same whatever it holds, and it holds little."""
    samples, pace = case.measured.samples_per_step, case.pace
    if samples is None or pace is None:
        return None
    alone = case.measured.ablation
    if alone and alone.larger_batches:
        return _measured_batches(case, pace, samples, alone.larger_batches)
    fixed_and_growing = _fixed_and_growing(case, pace)
    if samples > _SMALL_BATCH or fixed_and_growing is None:
        return None
    fixed, growing = fixed_and_growing
    loading = _growing_load(case, pace)
    times = 2
    while times < _MOST_TIMES_LARGER and times * growing < fixed and times * samples < _ENOUGH:
        times *= 2

    def gained(grows: float) -> float:
        after = pace.loading(pace.load + (times - 1) * loading)
        return times * pace.step / replace(after, compute=fixed + grows * times).step

    low, likely, high = sorted(max(1.0, gained(growing * f)) for f in (3.0, 1.0, 0.3))
    if likely < 1.5:
        return None
    gains = Gain(low, likely, high)
    return _batch_finding(case, samples, round(samples * times), gains, fixed / pace.compute)


def _growing_load(case: Case, pace: Pace) -> float:
    """Return seconds of a step's loading that its samples cost, not the asking for a batch."""
    loader = case.measured.loader
    if loader is None or loader.alone_seconds is None:
        return pace.load
    alone = loader.alone_seconds.median - _FETCH_SECONDS
    return max(0.0, min(pace.load, alone * loader.batches_per_step))


def _fixed_and_growing(case: Case, pace: Pace) -> tuple[float, float] | None:
    """Return seconds of the computing that every step costs, and those that grow with the batch."""
    kernels, operators = case.measured.kernels, case.measured.operators
    if case.on_gpu:
        if kernels is None:
            return None
        growing = max(0.0, pace.device_busy - kernels.per_step * _LAUNCH_FLOOR_SECONDS)
    elif operators is not None:
        growing = max(0.0, operators.work_seconds - (operators.weight_seconds or 0.0))
        if pace.compute - growing > operators.per_step * _OPERATOR_SECONDS:
            return None  # more than calling operators costs: something else takes the time
    else:
        return None
    growing = min(growing, pace.compute)
    return pace.compute - growing, growing


def _measured_batches(
    case: Case, pace: Pace, samples: float, tried: Sequence[tuple[int, float]]
) -> Finding | None:
    """Decide by steps that really ran with larger batches."""

    def rate(size: int, seconds: float) -> float:
        times = size / samples
        grown = replace(pace.loading(pace.load * times), compute=seconds)
        return size / grown.step

    now = samples / pace.step
    best_size, best_seconds = max(tried, key=lambda one: rate(*one))
    if best_size <= samples:
        return None
    # The smallest size within 5 % of the best one: more would only cost memory.
    best = rate(best_size, best_seconds)
    size, seconds = min(
        (one for one in tried if rate(*one) >= 0.95 * best and one[0] > samples),
        key=lambda one: one[0],
    )
    factor = rate(size, seconds) / now
    if factor < 1.25:
        return None
    return _batch_finding(
        case, samples, size, Gain(1 + 0.85 * (factor - 1), factor, 1 + 1.1 * (factor - 1)), None
    )


def _batch_finding(
    case: Case, samples: float, size: int, gained: Gain, fixed_share: float | None
) -> Finding:
    return case.finding(
        "batch-too-small",
        "the batch is too small to be worth a step",
        [
            f"{samples:.0f} samples per step"
            + (f" of {milliseconds(case.pace.step)}" if case.pace else ""),
            f"{fixed_share:.0%} of the computing does not depend on how many"
            if fixed_share
            else None,
            f"a step with {size} samples is expected to give {gained.likely:.1f} times the samples per second",
        ],
        f"Raise the batch size from {samples:.0f} to {size}, and the learning rate with it.",
        gained,
        loader_arguments={"batch_size": size},
        where=case.measured.loader.where if case.measured.loader else None,
        script=f"DataLoader(..., batch_size={size})",
        config={"training.batch_size": size},
    )


def empty_cache_each_step(case: Case) -> Finding | None:
    """The allocator's cache is thrown away in every step."""
    calls = [call for call in case.measured.allocator.empty_cache if call.calls_per_step >= 0.5]
    if case.pace is None or not calls:
        return None
    seconds = sum(call.seconds_per_step for call in calls)
    allocs = (case.measured.allocator.device_allocs_per_step or 0.0) * _DRIVER_ALLOC_SECONDS
    return case.finding(
        "empty-cache-each-step",
        "empty_cache() is called in every step",
        [
            *_call_lines(calls),
            f"the driver is asked for memory {case.measured.allocator.device_allocs_per_step:.0f} times per step"
            if case.measured.allocator.device_allocs_per_step
            else None,
            None if case.on_gpu else "without a GPU the call does nothing; on one it would cost",
        ],
        "Remove the call: the cache is what makes allocations free, and it is emptied by itself when memory "
        "runs out.",
        gain(
            case.pace,
            case.pace.saving(seconds + allocs),
            case.pace.saving(0.7 * seconds),
            case.pace.saving(seconds + 3 * allocs),
        ),
        where=calls[0].where,
        script="# remove torch.cuda.empty_cache()",
        config={"data.memory_efficient_mode.ram_32gb_mode.empty_cache_frequency": 0},
    )
    # On a CPU the pattern itself is the finding: the script is written for a GPU.


def gc_each_step(case: Case) -> Finding | None:
    """Garbage is collected by hand in every step."""
    return _housekeeping(
        case,
        "gc.collect",
        "gc-each-step",
        "garbage is collected by hand in every step",
        "Remove gc.collect() from the loop: tensors are freed by reference counts, and the collector runs by "
        "itself.",
        "# remove gc.collect()",
        {},
    )


def saves_too_often(case: Case) -> Finding | None:
    """Checkpoints take a notable part of the time."""
    return _housekeeping(
        case,
        "torch.save",
        "saves-too-often",
        "saving checkpoints takes a notable part of the time",
        "Save once per epoch or every few minutes instead.",
        "if step % 1000 == 0:\n    torch.save(...)",
        {"training.checkpoint_every_steps": 0},
    )


def _housekeeping(
    case: Case,
    call: str,
    name: str,
    title: str,
    remedy: str,
    script: str,
    config: dict[str, object],
) -> Finding | None:
    calls = [one for one in case.measured.host_calls if one.call == call]
    if case.pace is None or not calls:
        return None
    seconds = sum(one.seconds_per_step for one in calls)
    evidence = [
        f"{milliseconds(seconds)} of a step on average ({case.share_of_step(seconds):.0%})",
        *_call_lines(calls),
    ]
    gained = _saved(case.pace, seconds, low=0.7)
    return worthwhile(
        case.finding(
            name,
            title,
            evidence,
            remedy,
            gained,
            where=calls[0].where,
            script=script,
            config=config,
        )
    )


def double_precision(case: Case) -> Finding | None:
    """The step computes in float64."""
    operators, pace = case.measured.operators, case.pace
    if operators is None or pace is None or not operators.double_seconds:
        return None
    double = min(operators.double_seconds, pace.compute)
    products = operators.matmul_seconds
    listed = ", ".join(f"{dtype} {milliseconds(s)}" for dtype, s in products.items() if s > 0)
    floor = replace(pace, device_busy=0.0)
    return worthwhile(
        case.finding(
            "double-precision",
            "the step computes in float64",
            [
                f"{milliseconds(double)} of a step is spent on float64 ({double / pace.compute:.0%} of the computing)",
                f"matrix products by type: {listed}" if listed else None,
            ],
            "Make the data and the model float32: numpy arrays are float64 unless told otherwise.",
            gain(
                floor,
                floor.saving(double * 0.5),
                floor.saving(double * 0.3),
                floor.saving(double * 0.65),
            ),
            where=case.measured.loader.dataset_where if case.measured.loader else None,
            script="values = torch.from_numpy(array).float()",
            config={"training.precision": "auto"},
        )
    )


def allocator_retries(case: Case) -> Finding | None:
    """The device's memory is so full that the allocator flushes its cache to find room."""
    retries = case.measured.allocator.retries_per_step
    if case.pace is None or not retries or retries < 0.01:
        return None
    seconds = retries * _RETRY_SECONDS
    return case.finding(
        "allocator-retries",
        "the GPU's memory is too full",
        [
            f"the allocator had to flush its cache {retries:.2g} times per step to find room",
            f"allocated at the end: {format_bytes(case.measured.memory.device_bytes)}",
        ],
        "Make the batch a little smaller, or accumulate gradients over two: each flush waits for the device "
        "and asks the driver for everything anew.",
        _saved(case.pace, seconds, low=0.2, likely=0.8),
        config={"training.gradient_accumulation_steps": 2},
    )


def memory_creep(case: Case) -> Finding | None:
    """Memory grows from step to step."""
    memory, machine = case.measured.memory, case.measured.machine
    evidence = []
    for what, grown, held, free in (
        ("GPU", memory.device_bytes_per_step, memory.device_bytes, machine.device_free_bytes),
        ("host", memory.host_bytes_per_step, memory.host_bytes, machine.ram_free_bytes),
    ):
        if grown and grown > 0:
            left = f"; the free {format_bytes(free)} last {free / grown:,.0f} steps" if free else ""
            evidence.append(
                f"{what} memory grows by {grown / KIB:,.0f} KiB per step"
                if grown < MIB
                else f"{what} memory grows by {grown / MIB:,.1f} MiB per step"
            )
            evidence[-1] += f" and holds {format_bytes(held)} now{left}"
    if not evidence:
        return None
    finding = case.finding(
        "memory-creep",
        "memory grows from step to step",
        evidence,
        "Do not keep tensors that hang on a graph: append loss.item() or loss.detach(), not loss, and empty "
        "lists between epochs.",
        Gain(),
        script="losses.append(loss.detach())",
    )
    return replace(finding, ends_the_run=True)


def bad_values(case: Case) -> Finding | None:
    """Data or losses are not finite."""
    found = [bad for bad in case.measured.bad_values if bad.count]
    if not found:
        return None
    finding = case.finding(
        "bad-values",
        "values that are not finite",
        [
            f"{bad.what}: NaN or infinity in {format_count(bad.count)} of {format_count(bad.looks, 'look')}"
            + (f", {bad.where}" if bad.where else "")
            for bad in found
        ],
        "Find and repair them before training: `stoker inspect` names the columns and rows, `stoker pack "
        "--repair` mends them.",
        Gain(),
        where=found[0].where,
        script="assert torch.isfinite(batch).all()",
        config={"training.nonfinite": "stop"},
    )
    return replace(finding, ends_the_run=True)


def imbalanced_ranks(case: Case) -> Finding | None:
    """One process of a data-parallel job is slower, and all others wait for it."""
    ranks, pace = case.measured.ranks, case.pace
    if len(ranks) < 2 or pace is None:
        return None
    own = [rank.own_seconds for rank in ranks]
    slowest = max(ranks, key=lambda rank: rank.own_seconds)
    others = statistics.median(rank.own_seconds for rank in ranks if rank is not slowest)
    if others <= 0 or slowest.own_seconds / others < _UNEVEN:
        return None
    even = statistics.fmean(own)
    step = statistics.median(rank.step_seconds for rank in ranks)
    shared = max(0.0, step - slowest.own_seconds)
    return worthwhile(
        case.finding(
            "imbalanced-ranks",
            f"all ranks wait for rank {slowest.rank}",
            [
                (
                    f"rank {slowest.rank} needs {milliseconds(slowest.own_seconds)} per step, the others "
                    f"{milliseconds(others)}; a step takes {milliseconds(step)}"
                ),
                *(
                    f"rank {rank.rank}: {milliseconds(rank.own_seconds)} of its own, "
                    f"{milliseconds(max(0.0, rank.step_seconds - rank.own_seconds))} waiting for the others"
                    for rank in ranks[:8]
                ),
            ],
            "Give every rank the same amount of work: shards of equal length, samples of similar size, the "
            "same disk.",
            gain_of_steps(
                step, (even + slowest.own_seconds) / 2 + shared, even + shared, others + shared
            ),
        )
    )


RULES: tuple[Rule, ...] = (
    pageable_copies,
    sync_every_step,
    launch_bound,
    batch_too_small,
    empty_cache_each_step,
    gc_each_step,
    saves_too_often,
    double_precision,
    allocator_retries,
    memory_creep,
    bad_values,
    imbalanced_ranks,
)
