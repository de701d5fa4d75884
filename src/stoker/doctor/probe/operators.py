"""A few steps under torch's profiler: operators, matrix products by type, kernels and how long they run.

Enters: a few steps after the warm-up. Leaves: one summary. Costs two to four steps, which are not counted, once.

On a GPU torch traces kernels with CUPTI, which by default stays attached after the profiler has stopped and slows every
later launch (a GPT's step of 23 ms took 30). So the profiler is told to detach it (TEARDOWN_CUPTI, from CUDA 12.6 on:
before, that crashed with CUDA graphs), and the steps after it count. Where it stays, only the steps before it do.

Contract: a profiler that the script starts has precedence; the probe's profiler stops at once and notes that it was
skipped. If the process ends or forks while the probe's profiler runs, it is stopped first: torch crashes otherwise.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from . import clocks, hooks, recorder, trials, unused

FIRST_STEP, FIRST_LONG_STEP = 6, 2
"""Steps before the profiler starts: fewer if a step is long, because there may be only a few steps."""
_GPU_STEP, _GPU_SECONDS = 36, 1.5
"""On a GPU the profiler waits for this step, or this long, so that there are steps that it cannot have slowed down."""
_TEARDOWN, _TEARDOWN_CUDA = "TEARDOWN_CUPTI", (12, 6)
_TEARDOWN_CALLS, _TEARDOWN_SECONDS = 3, 2e-3
_NUM_STEPS, _NUM_LONG_STEPS, _LONG_SECONDS = 3, 1, 0.5
_MOST_EVENTS = 400_000
_PRODUCTS = frozenset((
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot", "aten::linear",
    "aten::mkldnn_linear", "aten::_convolution", "aten::mkldnn_convolution", "aten::cudnn_convolution",
    "aten::convolution_backward", "aten::_slow_conv2d_forward", "aten::_slow_conv2d_backward", "aten::thnn_conv2d",
    "aten::_thnn_fused_lstm_cell", "aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward", "aten::_cudnn_rnn",
    "aten::_cudnn_rnn_backward",
))  # fmt: skip
_VIEWS = frozenset((
    "aten::t", "aten::transpose", "aten::permute", "aten::view", "aten::reshape", "aten::_reshape_alias",
    "aten::as_strided", "aten::expand", "aten::detach", "aten::detach_", "aten::select", "aten::slice",
    "aten::squeeze", "aten::unsqueeze", "aten::narrow", "aten::alias", "aten::unbind", "aten::empty",
    "aten::empty_like", "aten::empty_strided", "aten::resize_", "aten::linear", "aten::flatten", "aten::to",
    "aten::result_type", "aten::resolve_conj", "aten::resolve_neg",
))  # fmt: skip
"""Operators that move no data themselves."""
_FETCHES = ("aten::item", "aten::_local_scalar_dense")
"""Operators that are not counted as work of the model: a loop over values has thousands of them."""
_SHORT = {
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "float": "float32",
    "double": "float64",
}
_BACKWARD = "autograd::engine"
_UPDATE, _LOAD = "Optimizer.step", "enumerate(DataLoader)"
"""torch's annotations around an optimizer step and around waiting for a batch."""
_DOUBLE_KERNELS = ("double", "dgemm", "d884", "f64", "_ddd_")
_PRODUCT_KERNELS = ("gemm", "d884", "conv", "wgrad", "dgrad")
_OPERATIONS_PER_SECOND, _BYTES_PER_SECOND = 3e10, 2e10

_profiler: Any = None
_marks: list[int] = []
_queued: list[float] = []
"""Seconds that the training thread had queued for a core, at each mark."""
_backwards: list[tuple[int, int]] = []
_fetches: list[int] = []
"""Times in ns at which a forward pass fetched a value: by then it has begun, whatever its first operator is."""
_evaluations: list[tuple[int, int]] = []
"""Begins and ends in ns of code between `model.eval()` and `model.train()`."""
_num_steps = 0
_was_used = False
_asked_teardown = False


def install(torch: Any) -> None:
    """Profile a few steps, once, in the process that trains."""
    recorder.get().on_step.append(_step)
    recorder.get().call_at = FIRST_LONG_STEP
    hooks.replace(torch.autograd.profiler.profile, "__init__", _giving_way)
    os.register_at_fork(before=_stop_early, after_in_child=_leave_at_once)


def _leave_at_once() -> None:
    """Make a forked process exit without the profiler's destructor, which waits for a thread of its parent.

    This is a bug in torch, but the probe started the profiler. `on_exit` calls functions in reverse order of their
    registration: C's streams are flushed, then the process exits with the status that it asked for.
    """
    if _was_used:
        with recorder.guarded("fork"):
            libc = ctypes.CDLL(None)
            for function in (libc._exit, libc.fcloseall):
                libc.on_exit(function, None)


def _giving_way(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if _profiler is not None:
            with recorder.guarded("profiler"):
                _stop(recorder.get(), keep=False)
        original(self, *args, **kwargs)

    return __init__


def _step(seen: Any) -> None:
    if _profiler is not None:
        _marks.append(time.time_ns())
        _queued.append(clocks.run_delay())
        if len(_marks) > _num_steps:
            _stop(seen, keep=True)
    elif not seen.profile and _is_due(seen):
        _start(seen)


def _is_due(seen: Any) -> bool:
    last = seen.rows[-1].seconds if seen.rows else 0.0
    if seen.num_steps < FIRST_STEP and last <= _LONG_SECONDS:
        return False
    if not clocks.uses_cuda(sys.modules["torch"]) or seen.num_steps >= _GPU_STEP:
        return True
    taken = sum(row.seconds for row in seen.rows[recorder.WARM_UP :])
    return bool(taken > _GPU_SECONDS or 2 * seen.num_counted >= seen.stop_at)


def _start(seen: Any) -> None:
    global _profiler, _num_steps, _was_used  # noqa: PLW0603
    torch: Any = sys.modules["torch"]
    if torch.autograd.profiler._is_profiler_enabled:
        seen.profile = {"skipped": "the script's own profiler was running"}
        return
    last = seen.rows[-1].seconds if seen.rows else 0.0
    _num_steps = _NUM_LONG_STEPS if last > _LONG_SECONDS else _NUM_STEPS
    seen.profile = {"steps": _num_steps}
    seen.disturb(_num_steps + 1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if clocks.uses_cuda(torch):
        torch.cuda.synchronize()
        seen.was_profiled = not _detaches(torch)
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    profiler.start()
    _was_used = True
    _profiler = profiler  # set last: from here on, any new profiler is the script's
    _marks[:] = [time.time_ns()]
    _queued[:] = [clocks.run_delay()]
    _backwards.clear()
    _fetches.clear()
    _evaluations.clear()
    seen.is_profiling = True
    # A process that ends while its profiler runs crashes in the libraries' destructors.
    atexit.register(_stop_early)


def _detaches(torch: Any) -> bool:
    """Ask torch to detach CUPTI after profiling, if that is safe; return whether it will.

    If the script or torch.compile has set the variable already, it is not changed.
    """
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    global _asked_teardown  # noqa: PLW0603
    _asked_teardown = version >= _TEARDOWN_CUDA and _TEARDOWN not in os.environ
    if _asked_teardown:
        os.environ[_TEARDOWN] = "1"
    return os.environ.get(_TEARDOWN) == "1"


def _stop_early() -> None:
    """Stop because the process ends or forks; keep the steps so far, or try again later if there are none."""
    if _profiler is not None:
        with recorder.guarded("profiler"):
            seen = recorder.get()
            _stop(seen, keep=len(_marks) > 1)
            if len(_marks) <= 1:
                seen.profile = {}
                seen.call_at = seen.num_steps + FIRST_STEP


def _stop(seen: Any, keep: bool) -> None:
    global _profiler
    profiler, _profiler = _profiler, None
    seen.call_at = 1 << 60
    seen.is_profiling = False
    began = time.perf_counter()
    torch: Any = sys.modules["torch"]
    if clocks.uses_cuda(torch):
        torch.cuda.synchronize()
    if not keep and _asked_teardown:
        # The script's own profiler starts at once, and must not meet a teardown that is still under way.
        os.environ.pop(_TEARDOWN, None)
        seen.was_profiled = True
    profiler.stop()
    if clocks.uses_cuda(torch) and not seen.was_profiled:
        # A thread of torch requests the teardown, which runs at the end of the next CUDA call: here, not in a step.
        for _ in range(_TEARDOWN_CALLS):
            time.sleep(_TEARDOWN_SECONDS)
            torch.cuda.synchronize()
    if not keep:
        seen.profile = {"skipped": "the script began a profiler of its own"}
        return
    seen.profile["steps"] = max(1, len(_marks) - 1)
    with recorder.guarded("profile"):
        events = profiler.profiler.kineto_results.events()
        taken = list(events)[:_MOST_EVENTS]
        times = (list(_marks), list(_backwards), list(_queued), list(_fetches), list(_evaluations))
        seen.profile.update(summarise(taken, *times))
    if clocks.uses_cuda(torch):
        with recorder.guarded("trials"):
            copies = any(key[0] == "copy" for key in list(seen.sites))
            seen.profile.update(trials.run(torch, seen.profile, copies))
    # While the events were read, workers filled their queues: the next waits would be too short.
    loaders = list(seen.loaders.values())
    if time.perf_counter() - began > 5e-3 and any(facts["workers"] for facts in loaders):
        seen.disturb(8)


def note_backward(seconds: float) -> None:
    """Record a backward pass that has just ended, to measure the time between the parts of a step."""
    if _profiler is not None:
        now = time.time_ns()
        _backwards.append((now - int(seconds * 1e9), now))


def note_fetch(seconds: float) -> None:
    """Record that a module's code has just fetched a value, which took `seconds`."""
    if _profiler is not None:
        _fetches.append(time.time_ns() - int(seconds * 1e9))


def note_evaluation(seconds: float) -> None:
    """Record that a model has just gone back to training, `seconds` after its `eval()`."""
    if _profiler is not None:
        now = time.time_ns()
        _evaluations.append((now - int(seconds * 1e9), now))


def summarise(
    events: list[Any],
    marks: list[int],
    backwards: list[tuple[int, int]],
    queued: list[float] | None = None,
    fetches: Sequence[int] = (),
    evaluations: Sequence[tuple[int, int]] = (),
) -> dict[str, Any]:
    """Return totals of the profiler's raw events.

    `marks` are the ends of the steps in ns, `backwards` and `evaluations` the begins and ends of their backward passes
    and evaluations, `fetches` the times at which a module's code fetched values. `queued` has the seconds queued for a
    core until each mark.

    Host totals are those of the fastest step: an operator that lost its core is not a slow operator. Queueing for a
    core between two operators does not count as Python code.
    """
    host, device = [], []
    annotations = set()
    periods = {"evaluation": evaluations}
    periods |= unused.find_unused(events, marks[0], marks[-1], evaluations, _PRODUCTS)
    kinds = {number: kind for kind in periods for number in _started_in(periods[kind], events)}
    singles = trials.single_products(events)
    single_seconds: dict[trials.Shapes, list[float]] = {}
    for event in events:
        name = event.name()
        start, seconds = event.start_ns() * 1e-9, event.duration_ns() * 1e-9
        if not str(event.device_type()).endswith("CPU"):
            number = event.linked_correlation_id() if kinds or singles else 0
            device.append((start, seconds, name, kinds.get(number)))
            if number in singles:
                found = single_seconds.setdefault(singles[number], [0.0, 0])
                found[0] += seconds
                found[1] += 1
        elif "::" in name or name.startswith((_UPDATE, _LOAD)):
            host.append((event.start_thread_id(), start, -seconds, name, event))
        else:
            annotations.add(name)
    # Annotations appear among the device's events too. They are not kernels, and neither are copies.
    kernels = [
        one
        for one in device
        if one[2] not in annotations and not one[2].startswith(("Memcpy", "Memset", _UPDATE, _LOAD))
    ]
    host.sort(key=lambda one: one[:3])
    totals = [
        _host_totals([one for one in host if begin <= one[1] * 1e9 < end])
        for begin, end in itertools.pairwise(marks)
    ]
    totals = [one for one in totals if one["operators"]] or [_host_totals(host)]
    quietest = min(
        totals, key=lambda one: sum(one["matmul_seconds"].values()) + one["work_seconds"]
    )
    waits = [after - before for before, after in itertools.pairwise(queued or [0.0] * len(marks))]
    gaps = [_gap_seconds(host, *step, backwards, fetches) for step in itertools.pairwise(marks)]
    known = [
        (max(0.0, gap[0] - waited), max(0.0, gap[1] - waited), (end - begin) * 1e-9 - waited)
        for gap, waited, (begin, end) in zip(gaps, waits, itertools.pairwise(marks), strict=True)
        if gap is not None
    ]
    # The first step includes the profiler's start; all steps include a pause in which the next operator is called.
    gap, _, whole = max(known[1:] or known, default=(0.0, 0.0, 0.0))
    between = {
        "gap_seconds": max(0.0, gap - _CALLING_SECONDS),
        "gap_step_seconds": whole,
        "python_seconds": min((python for _, python, _ in known), default=0.0),
    }
    for kind in unused.KINDS:
        taken = sum(ended - began for began, ended in periods[kind])
        quietest[f"{kind}_share"] = taken / max(1, marks[-1] - marks[0])
    if single_seconds:
        costliest = sorted(single_seconds.items(), key=lambda one: -one[1][0])
        quietest["single_product_seconds"] = sum(found[0] for found in single_seconds.values())
        quietest["single_products"] = [
            [*found, *shapes] for shapes, found in costliest[: trials.MOST_SHAPES]
        ]
    return {**quietest, **_device_totals(kernels), **(between if known else {})}


def _started_in(periods: Sequence[tuple[int, int]], events: list[Any]) -> set[int]:
    """Return the numbers of the operators that began in one of `periods`: what the device runs for them has the same.

    Calls of the driver are numbered by themselves, and have the number of their operator besides.
    """
    return {
        event.correlation_id()
        for event in (events if periods else ())
        if str(event.device_type()).endswith("CPU")
        and event.linked_correlation_id() == 0
        and any(begin <= event.start_ns() < end for begin, end in periods)
    } - {0}


_CALLING_SECONDS = 1e-4
"""Longest gap between two operators that counts as calling the next one, through modules and under the profiler."""


def _gap_seconds(
    host: list[Any],
    begin: int,
    end: int,
    backwards: list[tuple[int, int]],
    fetches: Sequence[int] = (),
) -> tuple[float, float] | None:
    """Return (seconds of a step outside of forward pass, backward pass, optimizer and DataLoader, Python part of them).

    None if no forward pass was seen. It begins with the first operator that autograd records, or earlier with a value
    that its own code fetches. In a step without an optimizer, operators outside of it are left out too. Longer Python
    code between its operators counts, because a metric may be computed there; its seconds are the second value.
    """
    gap, python, start = 0.0, 0.0, begin
    # Without an optimizer, the script updates the weights itself, by operators after the backward pass.
    by_hand = not any(
        name.startswith(_UPDATE) for _, at, _, name, _ in host if begin <= at * 1e9 < end
    )
    for first, last in backwards:
        if begin <= first and last <= end:
            found = _first_forward(host, start * 1e-9, first * 1e-9)
            if found is None:
                return None
            thread, at = found
            at = min([at, *(one * 1e-9 for one in fetches if start <= one < first)])
            code = _uncovered(host, thread, at, first * 1e-9)
            before = at - start * 1e-9
            gap += code
            gap += _uncovered(host, thread, start * 1e-9, at) if by_hand else before
            python += code
            start = last
    if start == begin:
        return None
    for _, at, negative, name, _ in host:
        if begin * 1e-9 <= at < end * 1e-9 and (
            name.startswith(_LOAD) or (name.startswith(_UPDATE) and at >= start * 1e-9)
        ):
            gap += negative
    return max(0.0, gap + (end - start) * 1e-9), python


def _uncovered(host: list[Any], thread: int, begin: float, end: float) -> float:
    """Return the seconds between two times in which a thread ran no operator, without short gaps (calling the next)."""
    uncovered, until = 0.0, begin
    for its_thread, start, negative, name, _ in host:
        if its_thread == thread and begin <= start < end and not name.startswith((_UPDATE, _LOAD)):
            if start - until > _CALLING_SECONDS:
                uncovered += start - until
            until = max(until, start - negative)
    return uncovered + (end - until if end - until > _CALLING_SECONDS else 0.0)


def _first_forward(host: list[Any], begin: float, end: float) -> tuple[int, float] | None:
    """Return (thread, time) of the first operator that autograd records between two times; None if there is none.

    The profiler gives each operator the number of operators that autograd has recorded in its thread so far. So the
    first recorded operator is the last outermost one before this number grows.
    """
    last: dict[
        int, tuple[int, float, float]
    ] = {}  # by thread: number, begin and end of an outermost operator
    found = []
    for thread, start, negative, name, event in host:
        if not begin <= start < end or name.startswith((_UPDATE, _LOAD)):
            continue
        number, known = event.sequence_nr(), last.get(thread)
        if number < 0:
            continue
        if known is not None and number > known[0]:
            found.append((known[1], thread))
            last[thread] = (1 << 62, 0.0, 0.0)
        elif known is None or start >= known[2]:
            last[thread] = (number, start, start - negative)
    return min(found)[::-1] if found else None


def _host_totals(host: list[Any]) -> dict[str, Any]:
    """Return the totals of host operators: the number of outermost ones, and self time by type.

    The operators of each thread form a tree. Loading is left out: without workers its operators are mixed with
    those of the step.
    """
    totals = {"operators": 0, "work_seconds": 0.0, "update_seconds": 0.0, "double_seconds": 0.0}
    rows = 0
    products: dict[str, float] = {}
    stack: list[
        list[Any]
    ] = []  # [thread, end, self seconds, name, event, the annotation around it]

    def close(one: list[Any]) -> None:
        nonlocal rows
        _, _, seconds, name, event, around = one
        tensors = _tensors(event) if around != _LOAD else []
        kinds = [kind for kind, _ in tensors]
        if "float64" in kinds:
            totals["double_seconds"] += seconds
        if name in _PRODUCTS and tensors:
            products[kinds[0]] = products.get(kinds[0], 0.0) + seconds
            if not any(above[3].startswith(_BACKWARD) for above in stack):
                rows = max(rows, _num_rows([shape for _, shape in tensors]))
        accounted = min(max(seconds, 0.0), _size_seconds(name, [shape for _, shape in tensors]))
        totals["update_seconds" if around == _UPDATE else "work_seconds"] += accounted

    for thread, start, negative, name, event in host:
        seconds = -negative
        while stack and (stack[-1][0] != thread or stack[-1][1] <= start):
            close(stack.pop())
        own = next((prefix for prefix in (_UPDATE, _LOAD) if name.startswith(prefix)), "")
        around = own or (stack[-1][5] if stack else "")
        if not own:
            outermost = all(above[3].startswith((_UPDATE, _LOAD)) for above in stack)
            totals["operators"] += outermost and around != _LOAD and name not in _FETCHES
            if stack:
                stack[-1][2] -= seconds
        stack.append([thread, start + seconds, seconds, name, event, around])
    while stack:
        close(stack.pop())
    return {**totals, "matmul_seconds": products, "rows": rows}


def _num_rows(shapes: list[list[int]]) -> int:
    """Return the number of rows that a matrix product multiplies: those of the last matrix but one.

    If that matrix is not the batch (weights times a batch, the pictures of a convolution), the number is too large; but
    a result of 1 always means one sample.
    """
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if len(matrices) < 2:
        return 1  # a matrix times a vector
    return math.prod(matrices[-2][:-1])


def _size_seconds(name: str, shapes: list[list[int]]) -> float:
    """Return an estimate of an operator's time on one core, from its arithmetic and memory traffic."""
    if name in _VIEWS or name.startswith(("autograd::", "torch::autograd::")):
        return 0.0
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if name in _PRODUCTS and len(matrices) >= 2:
        left, right = matrices[0], matrices[1]
        # A convolution uses its weights at every pixel of every image; other products multiply matrices.
        pixels = math.prod(left[2:]) * left[0] if len(left) > 3 else 0
        operations = 2.0 * (pixels * math.prod(right) if pixels else math.prod(left) * right[-1])
        return operations / _OPERATIONS_PER_SECOND
    sizes = [math.prod(shape) for shape in shapes]
    return 4 * (sum(sizes) + max(sizes)) / _BYTES_PER_SECOND if sizes else 0.0


def _tensors(event: Any) -> list[tuple[str, list[int]]]:
    """Return type and shape of an operator's tensors; plain numbers have no shape and are left out."""
    try:
        found = zip(event.dtypes(), event.shapes(), strict=False)
        return [(_SHORT.get(kind, ""), shape) for kind, shape in found if shape]
    except (AttributeError, RuntimeError):
        return []


_Kernel = tuple[float, float, str, "str | None"]
"""Begin, seconds and name of a kernel, and the kind of period in which it was launched."""


def _device_totals(device: list[_Kernel]) -> dict[str, Any]:
    if not device:
        return {}
    device.sort(key=lambda one: one[:3])
    doubles = [
        (s, name) for _, s, name, _ in device if any(word in name for word in _DOUBLE_KERNELS)
    ]
    products = sum(s for s, name in doubles if any(word in name for word in _PRODUCT_KERNELS))
    return {
        "kernels": len(device),
        "kernel_seconds": sum(seconds for _, seconds, _, _ in device),
        "busy_seconds": _busy_seconds(device),
        **{
            f"{kind}_busy_seconds": _busy_seconds([one for one in device if one[3] == kind])
            for kind in ("evaluation", *unused.KINDS)
        },
        "double_kernel_seconds": sum(s for s, _ in doubles),
        "double_product_seconds": products,
    }


def _busy_seconds(kernels: list[_Kernel]) -> float:
    """Return the seconds in which at least one of the kernels runs; they are in the order of their begins."""
    busy, end = 0.0, 0.0
    for start, seconds, _, _ in kernels:
        busy += max(0.0, start + seconds - max(start, end))
        end = max(end, start + seconds)
    return busy
