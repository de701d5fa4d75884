"""Findings about the run: housekeeping in the loop, precision, memory, bad values, uneven ranks.

Enters: a `Case`. Leaves: a finding or None. Costs nothing; pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stoker.doctor.cases import WORTHWHILE, Case, Rule, call_lines, milliseconds, saved
from stoker.doctor.findings import Finding, Gain
from stoker.doctor.gains import Pace, gain, gain_of_steps
from stoker.doctor.measurements import HostCall
from stoker.units import KIB, MIB, format_bytes, format_count

_DRIVER_ALLOC_SECONDS = 150e-6
_RETRY_SECONDS = 20e-3
_CALL_SECONDS = 15e-6
"""Overhead of calling one operator of the model on a CPU (about 10 µs on a Xeon, 20 on an ARM core)."""
_UNEVEN = 1.15
_EVALUATE_EVERY = 10
_DEVICE_FULL = 0.9
"""A device that works for this share of a step sets its pace."""


def empty_cache_each_step(case: Case) -> Finding | None:
    """The allocator's cache is emptied in every step; reported on a CPU too, for scripts written for a GPU."""
    calls = [call for call in case.measured.allocator.empty_cache if call.calls_per_step >= 0.5]
    if case.pace is None or not calls:
        return None
    seconds = sum(call.seconds_per_step for call in calls)
    asked = case.measured.allocator.device_allocs_per_step or 0.0
    allocs = asked * _DRIVER_ALLOC_SECONDS
    return case.finding(
        "empty-cache-each-step",
        "empty_cache() is called in every step",
        [
            *call_lines(calls),
            f"the driver is asked for memory {asked:.0f} times per step" if asked else None,
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
        config={"training.empty_cache_every_n_batches": 0},
    )


def gc_each_step(case: Case) -> Finding | None:
    """Garbage is collected by hand in every step."""
    return _housekeeping(
        case,
        "gc.collect",
        "gc-each-step",
        "garbage is collected by hand in every step",
        "Remove gc.collect() from the loop: tensors are freed by reference counts, and the collector runs by "
        "itself.",
        script="# remove gc.collect()",
    )


def saves_too_often(case: Case) -> Finding | None:
    """Checkpoints take a notable part of the time."""
    return _housekeeping(
        case,
        "torch.save",
        "saves-too-often",
        "saving checkpoints takes a notable part of the time",
        "Save once per epoch or every few minutes instead.",
        script="if step % 1000 == 0:\n    torch.save(...)",
        config={"training.checkpoint_every_steps": 0},
    )


def _housekeeping(
    case: Case, call: str, name: str, title: str, remedy: str, **patch: Any
) -> Finding | None:
    calls = [one for one in case.measured.host_calls if one.call == call]
    if case.pace is None or not calls:
        return None
    seconds = sum(one.seconds_per_step for one in calls)
    evidence = [
        f"{milliseconds(seconds)} of a step on average ({case.share_of_step(seconds):.0%})",
        *call_lines(calls),
    ]
    # All calls in the loop are saved; their work still has to be done occasionally.
    gained = saved(case.pace, seconds, low=0.9, likely=1.0)
    return case.advise(name, title, evidence, remedy, gained, where=calls[0].where, **patch)


def evaluates_each_step(case: Case) -> Finding | None:
    """The model is evaluated in every step, or computes what no update needs."""
    measured, pace = case.measured, case.pace
    unused = sum(call.seconds_per_step for call in measured.unused_calls)
    if pace is None or not measured.evaluation_seconds + unused:
        return None
    host = measured.evaluation_seconds + unused
    device = measured.evaluation_device_seconds + measured.unused_device_seconds
    seconds, is_devices, gained = _seldom(case, pace, host, device)
    spent = f"of a step of {milliseconds(pace.step)}, {milliseconds(seconds)} ({seconds / pace.step:.0%}) "
    eval_seconds = measured.evaluation_seconds
    what = "what runs between model.eval() and model.train()"
    if not eval_seconds:
        what = "results of the model that no update needs"
    where = measured.evaluation_where if eval_seconds >= unused else measured.unused_calls[0].where
    return case.advise(
        "evaluates-each-step",
        "the model is evaluated in every step",
        [
            spent + (f"is the GPU's work for {what}" if is_devices else f"goes to {what}"),
            f"{measured.evaluation_where}: eval()" if eval_seconds else None,
            *_lines_of_model(measured.unused_calls),
        ],
        f"Evaluate every {_EVALUATE_EVERY} steps, or use the output that the training step has already; the gain is "
        "that of the first.",
        gained,
        where=where,
        script=f"if step % {_EVALUATE_EVERY} == 0:  # around what evaluates",
    )


def _seldom(case: Case, pace: Pace, host: float, device: float) -> tuple[float, bool, Gain]:
    """Return (seconds of a step, whether they are the device's, the gain if that runs in every tenth step only).

    `host` and `device` are the seconds of a step in which they work on it.
    """
    host, device = (case.share_of_step(seconds) * pace.step for seconds in (host, device))
    # A host that only launches kernels is soon done with them. Their time counts where the device sets the pace.
    is_devices = bool(device) and pace.device_busy >= _DEVICE_FULL * pace.step
    seconds = min(pace.step, device if is_devices else host)

    def without(share: float) -> float:
        """Return the seconds of a step without this share of it."""
        return max(pace.step - share * seconds, pace.device_busy - share * device)

    gained = gain_of_steps(pace.step, without(0.5), without(1 - 1 / _EVALUATE_EVERY), without(1.0))
    return seconds, is_devices, gained


def _lines_of_model(calls: Sequence[HostCall]) -> list[str]:
    return [
        f"{call.where}: {milliseconds(call.seconds_per_step)} of a step, in the model"
        for call in calls[:3]
    ]


def why_doubtful(case: Case) -> str:
    """Return that the model computes in every step what the training may or may not need; "" if that is little."""
    calls, pace = case.measured.doubtful_calls, case.pace
    if pace is None or not calls:
        return ""
    host = sum(call.seconds_per_step for call in calls)
    seconds, _, gained = _seldom(case, pace, host, case.measured.doubtful_device_seconds)
    if gained.likely < WORTHWHILE:
        return ""
    return (
        f"{seconds / pace.step:.0%} of a step the model computes at {calls[0].where} what no backward pass was seen to "
        f"need; if that is an evaluation, every {_EVALUATE_EVERY}th step is enough (× {gained.likely:.2f}), and if the "
        "training needs it, there is nothing to fix"
    )


def long_steps(case: Case) -> Finding | None:
    """A few steps take long because of work beside training, such as plots or exports."""
    long = case.measured.long_steps
    if long is None:
        return None
    spent = long.share * long.outside_share
    # What the host does runs beside the device's work, and a job whose device never rests is not faster without it.
    pace, mean = case.pace, case.measured.mean_step_seconds
    least = min(1.0, pace.device_busy / mean) if pace is not None and mean else 0.0
    return case.advise(
        "long-steps",
        "a few steps take long, for what they do beside training",
        [
            (
                f"{format_count(long.count, 'step')} took {milliseconds(long.seconds / long.count)} longer than the "
                f"others, {long.share:.0%} of all time, of which {long.outside_share:.0%} outside of the model"
            ),
            *(f"{where}: {share:.0%} of that" for where, share in long.lines[:3]),
        ],
        "Do this half as often, or in half the time: fewer plots and files, one call for many items, or another "
        "process. The gain is that of half.",
        gain_of_steps(1.0, *(max(least, 1 - part * spent) for part in (0.25, 0.5, 1.0))),
        where=long.lines[0][0] if long.lines else None,
    )


def double_precision(case: Case) -> Finding | None:
    """The step computes in float64."""
    operators, pace = case.measured.operators, case.pace
    if operators is None or pace is None or not operators.double_seconds:
        return None
    double = min(operators.double_seconds, pace.compute)
    products = operators.matmul_seconds
    if products and not products.get("float64"):
        return None  # only data is converted from float64; the model computes in another type
    listed = ", ".join(f"{dtype} {milliseconds(s)}" for dtype, s in products.items() if s > 0)
    floor = replace(pace, device_busy=0.0)
    if case.on_gpu:
        # Matrix products use the ratio measured on this GPU: some GPUs have as many units for float64 as for float32,
        # some a 64th. The other kernels move half of the bytes.
        product = min(double, operators.double_product_seconds or 0.0)
        times = 2.0 if operators.double_times is None else max(1.0, operators.double_times)
        less = product * (1 - 1 / times) + (double - product) * 0.5
        # Shorter kernels make a step shorter only in proportion to the device's share of it.
        less *= min(1.0, pace.device_busy / max(pace.compute, 1e-9))
        low, high = 0.6 * less, 1.3 * less
    else:
        # Half of the bytes and of the arithmetic; calling an operator takes as long as before.
        product = min(double, products.get("float64", 0.0))
        sized = product + max(0.0, double - product - operators.per_step * _CALL_SECONDS)
        low, less, high = sized * 0.3, sized * 0.5, double * 0.65
    return case.advise(
        "double-precision",
        "the step computes in float64",
        [
            f"{milliseconds(double)} of a step is spent on float64 ({double / pace.compute:.0%} of the computing)",
            f"matrix products by type: {listed}" if listed else None,
            (
                f"measured on this GPU: a product in float64 takes × {operators.double_times:.3g} as long as in float32"
                if operators.double_times
                else None
            ),
        ],
        "Make the data and the model float32: numpy arrays are float64 unless told otherwise.",
        gain(floor, floor.saving(less), floor.saving(low), floor.saving(high)),
        where=case.measured.loader.dataset_where if case.measured.loader else None,
        script="values = torch.from_numpy(array).float()",
        config={"training.precision": "auto"},
    )


def full_precision(case: Case) -> Finding | None:
    """A script's matrix products are computed in full float32 on a GPU that has units for TF32."""
    operators, pace = case.measured.operators, case.pace
    if operators is None or pace is None or case.measured.kind != "script":
        return None  # a config's job is tried in 16 bits (consultation.py)
    product, times = operators.single_product_seconds or 0.0, operators.single_times or 1.0
    less = min(product, pace.device_busy) * (1 - 1 / times)
    # Shorter kernels make a step shorter only in proportion to the device's share of it.
    less *= min(1.0, pace.device_busy / max(pace.compute, 1e-9))
    floor = replace(pace, device_busy=0.0)
    return case.advise(
        "full-precision",
        "matrix products are computed in full float32",
        [
            f"{milliseconds(product)} of a step the GPU multiplies matrices of float32",
            f"in TF32 they would take 1/{times:.3g} of that: twice the time that was measured in bfloat16",
        ],
        'Call torch.set_float32_matmul_precision("high") before the training: products then round their inputs to 10 '
        "bits (TF32) and add up in float32, as convolutions do already; compare the metrics of a short run.",
        gain(floor, floor.saving(less), floor.saving(0.6 * less), floor.saving(1.15 * less)),
        script='torch.set_float32_matmul_precision("high")',
    )


def allocator_retries(case: Case) -> Finding | None:
    """The device's memory is so full that the allocator has to flush its cache to find room."""
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
        "and asks the driver for everything again.",
        saved(case.pace, seconds, low=0.2, likely=0.8),
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
            size = f"{grown / KIB:,.0f} KiB" if grown < MIB else f"{grown / MIB:,.1f} MiB"
            told = (
                f"{what} memory grows by {size} per step and holds {format_bytes(held)} now{left}"
            )
            evidence.append(told)
    if not evidence:
        return None
    return case.finding(
        "memory-creep",
        "memory grows from step to step",
        evidence,
        "Do not keep tensors that hang on a graph: append loss.item() or loss.detach(), not loss, and empty "
        "lists between epochs.",
        Gain(),
        ends_the_run=True,
        script="losses.append(loss.detach())",
    )


def bad_values(case: Case) -> Finding | None:
    """Data or losses are not finite."""
    found = [bad for bad in case.measured.bad_values if bad.count]
    if not found:
        return None
    return case.finding(
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
        ends_the_run=True,
    )


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
    return case.advise(
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


RULES: tuple[Rule, ...] = (
    empty_cache_each_step,
    gc_each_step,
    saves_too_often,
    evaluates_each_step,
    long_steps,
    double_precision,
    full_precision,
    allocator_retries,
    memory_creep,
    bad_values,
    imbalanced_ranks,
)
