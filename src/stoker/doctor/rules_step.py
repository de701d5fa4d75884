"""Findings about the step itself: copies, syncs, launches, the size of a batch.

Enters: a `Case`. Leaves: a finding or None. Costs nothing; pure.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.doctor.cases import Case, Rule, call_lines, milliseconds, saved
from stoker.doctor.findings import Finding, Gain
from stoker.doctor.gains import Pace, gain, gain_of_steps, hand_over_seconds
from stoker.doctor.measurements import OPERATOR_SECONDS, HostCall, KernelFacts
from stoker.units import format_bytes

_SHORT_KERNEL_SECONDS = 25e-6
_LAUNCH_FLOOR_SECONDS = 2e-6
"""Time for which an empty kernel keeps the device busy."""
_PINNED_BYTES_PER_SECOND = 20e9
"""Rate of PCIe 4 with 16 lanes, used if the machine was not measured."""
_LAUNCH_SECONDS = 80e-6
"""Like OPERATOR_SECONDS, for operators that launch kernels (measured on an H200: 43 µs in a loop of 24 operators)."""
_NODE_SECONDS = 4e-7
"""Time between two kernels of a CUDA graph if one needs the other's result (measured on an H200: 0.2 to 1 µs)."""
_READ_EVERY = 50
"""Values are to be read every so many steps."""
_NOTABLE_PYTHON = 0.15
"""Python code of the forward pass is a finding from this share of a step."""
_NOTABLE_FETCH = 0.03
"""Fetching values is a finding from this share of a step."""
_SLOW_CORE = 1.5
"""How much longer an operator may take than usual: the same host was 1.4 times as slow half an hour later."""
_SMALL_BATCH = 64
_MOST_TIMES_LARGER, _ENOUGH = 32, 512
"""Limits of the proposed batch: as a multiple of the present one, and in samples."""
_FETCH_SECONDS = 60e-6
"""Fixed cost of asking a dataset for a batch."""
_COLLATE_CALLS, _COLLATE_BYTES_PER_SECOND = 40, 4e9
"""Fixed cost of torch's default_collate, as a number of small samples; and the rate at which it copies large ones."""


_OF_LIBRARIES = {
    "transformers/trainer.py": (
        "transformers' Trainer looks whether each loss is finite: TrainingArguments(logging_nan_inf_filter=False) "
        "leaves that out."
    ),
    "torch/amp/grad_scaler.py": (
        "GradScaler asks after each step whether a gradient overflowed: an optimizer with fused=True learns that on "
        "the GPU, and bfloat16 needs no scaler."
    ),
    "torch/distributions/": (
        "torch.distributions looks at the arguments of each distribution: "
        "torch.distributions.Distribution.set_default_validate_args(False) leaves that out."
    ),
    **dict.fromkeys(
        ("lightning/", "lightning_fabric/", "pytorch_lightning/"),
        "Lightning reads a value for its progress bar in each step: self.log(..., on_step=False, on_epoch=True) reads "
        "it once an epoch, prog_bar=False never.",
    ),
}
"""Remedies for values that a library fetches in every step, by how its file begins."""


def pageable_copies(case: Case) -> Finding | None:
    """The host waits for copies of batches to the device: their memory is not pinned, or the call blocks."""
    copies = case.measured.copies
    if case.pace is None or not copies or not case.on_gpu or case.measured.kernels is None:
        return None  # a copy also waits for the work before it: without the kernels' times its own cost is unknown
    seconds = sum(copy.seconds_per_step for copy in copies)
    num_bytes = sum(copy.bytes_per_step for copy in copies)
    rate = case.measured.machine.pinned_bytes_per_second or _PINNED_BYTES_PER_SECOND
    saved = max(0.0, seconds - num_bytes / rate)
    # The host no longer waits, and the device copies between its kernels.
    device = case.pace.device_busy + num_bytes / rate
    likely = replace(case.pace, compute=max(device, case.pace.compute - seconds))
    pins = case.measured.loader is not None and bool(case.measured.loader.pin_memory)
    blocks = 2 * sum(copy.seconds_per_step for copy in copies if copy.pinned) > seconds
    return case.advise(
        "pageable-copies",
        "the host waits for copies that need not block"
        if blocks
        else "batches are copied from pageable memory",
        [
            (
                f"{format_bytes(num_bytes)} per step, {milliseconds(seconds)} "
                f"({case.share_of_step(seconds):.0%} of it) with the host waiting"
            ),
            *(
                f"{copy.where}: {format_bytes(copy.bytes_per_step)} per step"
                + (" from pinned memory" if copy.pinned else "")
                for copy in copies[:3]
            ),
            "the DataLoader pins its batches, but what is copied is not what it gave"
            if pins and not blocks
            else None,
        ],
        "Copy with .to(device, non_blocking=True): the memory is pinned already, and the copy runs beside the host."
        if blocks
        else "Set pin_memory=True in the DataLoader and copy with .to(device, non_blocking=True).",
        gain(case.pace, likely, case.pace.saving(saved / 2), case.pace.saving(seconds)),
        loader_arguments={} if pins or blocks else {"pin_memory": True},
        where=copies[0].where,
        script="batch = batch.to(device, non_blocking=True)",
        config={"data.pin_memory": True},
    )


def sync_every_step(case: Case) -> Finding | None:
    """The host waits for the device, or fetches values one by one, in every step."""
    # Values fetched for Python code of the forward pass belong to the finding of `python_in_model`.
    fetched = _fetched_for_python(case)
    every = (sync for sync in case.measured.syncs if sync.calls_per_step >= 0.5)
    syncs = [sync for sync in every if sync not in fetched]
    if case.pace is None or not syncs:
        return None
    seconds = sum(sync.seconds_per_step for sync in syncs)
    if case.share_of_step(seconds) < _NOTABLE_FETCH:
        return None
    if case.on_gpu and case.measured.kernels is None:
        return None  # an unknown part of the wait is the device's own work; `why_unjudged` says so
    # One call in many steps is left, for all values of a loop.
    left = sum(sync.seconds_per_step / max(1.0, sync.calls_per_step) for sync in syncs)
    gained = saved(case.pace, seconds, likely=1 - left / seconds / _READ_EVERY)
    doing = "waits for the device" if case.on_gpu else "fetches values from tensors"
    costliest = max(syncs, key=lambda sync: sync.seconds_per_step)
    return case.advise(
        "sync-every-step",
        f"the host {doing} in every step",
        [
            f"{milliseconds(seconds)} of a step ({case.share_of_step(seconds):.0%}) is spent there",
            *call_lines(syncs),
        ],
        _less_often(costliest.library),
        gained,
        where=costliest.where,
        script=""
        if costliest.library
        else "total += loss.detach()  # and total.item() once in a while",
        config={} if costliest.library else {"training.read_every": 50},
    )


def _less_often(library: str) -> str:
    """Return the remedy for values that a step fetches, in a library or, if `library` is "", in the user's code."""
    for begins, remedy in _OF_LIBRARIES.items():
        if library.startswith(begins):
            return remedy
    if library:
        return f"The calls are those of {library}: look for an option of it that makes them less often, or never."
    return (
        "Keep running sums as tensors and read them every 50 steps, instead of calling .item() or .cpu() "
        "in the loop."
    )


def launch_bound(case: Case) -> Finding | None:
    """The host launches many short kernels, and the device waits between them."""
    kernels, pace = case.measured.kernels, case.pace
    if kernels is None or pace is None or case.measured.captured:
        return None
    if kernels.busy_share > 0.8 or kernels.per_step < 20:
        return None
    if kernels.mean_seconds > _SHORT_KERNEL_SECONDS:
        return None
    alone = case.measured.ablation
    if alone and alone.captured_step_seconds:
        spread = alone.captured_step_seconds
        likely, low, high = (
            replace(pace, compute=seconds) for seconds in (spread.median, spread.high, spread.low)
        )
        gained = gain(pace, likely, low, high)
    else:
        gap = _launching(case, pace, kernels)
        # There are short gaps between the kernels of a graph, too.
        after = max(0.1 * pace.device_busy, kernels.per_step * _NODE_SECONDS)
        gained = gain(pace, pace.saving(gap - after), pace.saving(0.4 * gap), pace.saving(gap))
    return case.advise(
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


def _launching(case: Case, pace: Pace, kernels: KernelFacts) -> float:
    """Return the seconds of a step in which the device waits for launches, and not for other work of the host.

    During a fetch or a blocking copy the device works at first: only time beyond its busy time is other work.
    """
    measured = case.measured
    waits = sum(sync.seconds_per_step for sync in measured.syncs)
    waits += sum(copy.seconds_per_step for copy in measured.copies)
    other = max(0.0, waits - pace.device_busy) + (measured.between_seconds or 0.0)
    for call in (*measured.host_calls, *measured.allocator.empty_cache):
        other += call.seconds_per_step
    most = max(kernels.per_step, measured.operators.per_step if measured.operators else 0.0)
    return max(0.0, min(pace.compute - pace.device_busy - other, most * _LAUNCH_SECONDS))


def batch_too_small(case: Case) -> Finding | None:
    """A step has few samples, and its cost hardly depends on their number.

    Without a DataLoader that number is unknown, unless the model multiplies one row at a time.
    """
    samples, pace = case.measured.samples_per_step, case.pace
    operators = case.measured.operators
    if samples is None and operators is not None and operators.num_rows == 1:
        samples = 1.0
    if samples is None or pace is None:
        return None
    alone = case.measured.ablation
    if alone and alone.larger_batches:
        return None  # sizes were tried: `consultation.weigh` has their result
    fixed_and_growing = _fixed_and_growing(case, pace)
    if samples > _SMALL_BATCH or fixed_and_growing is None:
        return None
    fixed, growing = fixed_and_growing
    if case.measured.loader is None:  # the user's own code makes the samples, one at a time
        made = min(fixed, case.measured.between_seconds or 0.0)
        fixed, growing = fixed - made, growing + made
    loading = _growing_load(case, pace, samples)
    times = 2
    while times < _MOST_TIMES_LARGER and times * growing < fixed and times * samples < _ENOUGH:
        times *= 2

    # The time of receiving a batch from workers, beyond the usual one of a small batch, grows with its bytes and with
    # the work beside it. No more of the workers work at once than there are cores.
    small = replace(case.loader, batch_bytes=None, queued_share=None)
    once = min(pace.hand_over, hand_over_seconds(small))
    blocked = (case.loader.blocked_share or 0.0) >= 0.5
    active = pace.active_workers if blocked else min(pace.active_workers, case.cores)

    def gained(grows: float, loads: float) -> float:
        after = replace(
            pace.loading(pace.load + (times - 1) * loads, active),
            compute=fixed + grows * times,
            hand_over=once + times * (pace.hand_over - once),
            device_busy=pace.device_busy + (times - 1) * grows * case.on_gpu,
        )
        return max(1.0, times * pace.step / after.step)

    # One more sample costs microseconds here, which are known to a factor only.
    likely = gained(growing, loading)
    low = min(gained(3.0 * growing, 2.0 * loading), 1 + 0.85 * (likely - 1))
    high = max(gained(0.3 * growing, 0.8 * loading), 1 + 1.15 * (likely - 1))
    if likely < 1.5:
        return None
    size = round(samples * times)
    by_hand = case.measured.samples_per_step is None
    advice = f"Raise the batch size from {samples:.0f} to {size}, and the learning rate with it."
    script = f"DataLoader(..., batch_size={size})"
    if by_hand:
        advice = (
            f"Give the model {size} samples at once, stacked to one tensor, and raise the learning rate; a game "
            f"or a simulation: run {size} at once."
        )
        script = f"x = torch.stack(samples[at : at + {size}])  # then model(x)"
    told = "the model is called with one row at a time, in a step" if by_hand else ""
    made_at = case.measured.between[0].where if by_hand and case.measured.between else None
    return case.finding(
        "batch-too-small",
        "the batch is too small to be worth a step",
        [
            f"{told or f'{samples:.0f} samples per step'} of {milliseconds(pace.step)}",
            f"{fixed / pace.compute:.0%} of the computing does not depend on how many",
            f"a step with {size} samples is expected to give {likely:.1f} times the samples per second",
        ],
        advice,
        Gain(low, likely, high),
        loader_arguments={} if by_hand else {"batch_size": size},
        where=case.measured.loader.where if case.measured.loader else made_at,
        script=script,
        config={"training.batch_size": size},
    )


def _growing_load(case: Case, pace: Pace, samples: float) -> float:
    """Return the seconds of a step's loading that grow with the number of samples."""
    loader = case.measured.loader
    if loader is None or loader.alone_seconds is None:
        return pace.load
    if loader.sample_seconds is None:
        growing = max(0.0, loader.alone_seconds.median - _FETCH_SECONDS)
    else:
        per_batch = samples / loader.batches_per_step
        growing = loader.sample_seconds.median * per_batch
        collate = loader.work.collate or 0.0
        if loader.collate_where is None:  # torch's own has a fixed cost; a user's grows as a whole
            called = collate * per_batch / (per_batch + _COLLATE_CALLS)
            copied = (loader.batch_bytes or 0) / _COLLATE_BYTES_PER_SECOND
            collate = max(called, min(collate, copied))
        growing += collate
    return min(pace.load, growing * loader.batches_per_step)


def _fixed_and_growing(case: Case, pace: Pace) -> tuple[float, float] | None:
    """Return (seconds of computing that are fixed per step, seconds that grow with the batch); None if unknown."""
    kernels, operators = case.measured.kernels, case.measured.operators
    if case.on_gpu:
        if kernels is None:
            return None
        growing = max(0.0, pace.device_busy - kernels.per_step * _LAUNCH_FLOOR_SECONDS)
        calls = max(kernels.per_step, operators.per_step if operators else 0.0)
        calling = calls * _LAUNCH_SECONDS
    elif operators is not None:
        growing = max(0.0, operators.work_seconds - (operators.weight_seconds or 0.0))
        calling = operators.per_step * OPERATOR_SECONDS
        if not case.loader.workers:  # a slow machine, not workers that crowd its cores
            calling *= _SLOW_CORE
    else:
        return None
    if growing > pace.compute or pace.compute - growing > calling:
        return None  # the device has enough to do, or calling operators does not explain the fixed part
    return pace.compute - growing, growing


def _fetched_for_python(case: Case) -> list[HostCall]:
    """Return the fetches of values for Python code of the forward pass, if that code is notable."""
    if case.share_of_step(case.measured.python_seconds) < _NOTABLE_PYTHON:
        return []
    return [sync for sync in case.measured.syncs if sync.in_model]


def python_in_model(case: Case) -> Finding | None:
    """The forward pass spends a notable part of a step in Python code, not in operators.

    Fetching the values for that code counts too. On a GPU a fetch waits for all earlier work, during which the code
    could otherwise run: neither is saved without the other.
    """
    seconds, pace = case.measured.python_seconds, case.pace
    share = case.share_of_step(seconds)
    if pace is None or share < _NOTABLE_PYTHON:
        return None
    spent = share * pace.step
    fetched = _fetched_for_python(case)
    waited = sum(sync.seconds_per_step for sync in fetched)
    lines = case.measured.python_lines
    # On a GPU the kernels may still run meanwhile.
    low, likely, high = (
        max(pace.step - spent * part - waited * also, pace.device_busy)
        for part, also in ((0.5, 0), (0.9, 1), (1, 1))
    )
    return case.advise(
        "python-in-model",
        "the forward pass waits for its own Python code",
        [
            (
                f"of a step of {milliseconds(pace.step)}, {milliseconds(spent)} ({share:.0%}) is Python code of the "
                "forward pass, while no operator of torch runs"
            ),
            f"most of it at {', '.join(lines[:3])}" if lines else None,
            (
                f"{milliseconds(waited)} more is spent on fetching the values that it works with, at {fetched[0].where}"
                if case.share_of_step(waited) >= _NOTABLE_FETCH
                else None
            ),
        ],
        "Make it a few calls on whole tensors, or do it before the step, in the Dataset of a DataLoader with workers. "
        "The gain is that of a tenth of the time.",
        gain_of_steps(pace.step, low, likely, high),
        where=lines[0] if lines else None,
    )


RULES: tuple[Rule, ...] = (
    pageable_copies,
    sync_every_step,
    launch_bound,
    python_in_model,
    batch_too_small,
)
