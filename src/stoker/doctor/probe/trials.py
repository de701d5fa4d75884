"""Small trials on the GPU after the profiled steps: what copies and matrix products would cost otherwise.

Enters: the profile. Leaves: a rate and two ratios. Costs 10 to 100 ms, once; the script waits meanwhile. No setting of
the script is read or changed: reading whether TF32 is allowed prints a warning in some versions of torch, and a script
that allows it would be changed by another value, even for a moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_COPIED_BYTES = 1 << 25
_NOTABLE = 0.05
"""Share of the kernels' time from which another number format is tried."""
_PRODUCT_SIZE, _NUM_PRODUCTS = 1024, 8
MOST_SHAPES, _MOST_VALUES, _TRIAL_SECONDS, _MOST_REPEATS = 4, 1 << 24, 1e-3, 20
_MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The two matrices of a product, or stacks of matrices."""


def single_products(events: Sequence[Any]) -> dict[int, Shapes]:
    """Return the shapes of matrix products in float32 by the number that their kernels have. Convolutions are none."""
    found = {}
    for event in events:
        if event.name() in _MATRIX_PRODUCTS and str(event.device_type()).endswith("CPU"):
            shapes = [tuple(shape) for shape in event.shapes() if len(shape) >= 2]
            if "float" in event.dtypes()[:1] and len(shapes) >= 2:
                found[event.correlation_id()] = (shapes[-2], shapes[-1])
    return found


def run(torch: Any, profile: Mapping[str, Any], copies: bool) -> dict[str, Any]:
    """Return what the trials of a profile say; `copies` tells whether the script copies pageable memory."""
    found: dict[str, Any] = {}
    kernels = profile.get("kernel_seconds", 0.0)
    if copies:
        found["pinned_bytes_per_second"] = _pinned_bytes_per_second(torch)
    if kernels and profile["double_kernel_seconds"] > _NOTABLE * kernels:
        found["double_times"] = _double_times(torch)
    if kernels and profile.get("single_product_seconds", 0.0) > _NOTABLE * kernels:
        found["single_times"] = _single_times(torch, profile["single_products"])
    return found


def _least_seconds(torch: Any, work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes on the GPU: the shortest of three runs after a first one."""
    taken = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _pinned_bytes_per_second(torch: Any) -> float:
    """Return the rate of copies from pinned memory to the device, which pageable copies could reach."""
    held = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    return _COPIED_BYTES / _least_seconds(torch, lambda: there.copy_(held, non_blocking=True))


def _double_times(torch: Any) -> float:
    """Return the time of a matrix product in float64 as a multiple of that in float32: 1 to 64, by the kind of GPU."""
    shape = (_PRODUCT_SIZE, _PRODUCT_SIZE)
    seconds = [
        _product_seconds(torch, (shape, shape), kind, _NUM_PRODUCTS)
        for kind in (torch.float64, torch.float32)
    ]
    return seconds[0] / seconds[1]


def _single_times(torch: Any, products: Sequence[Any]) -> float:
    """Return the time of the costliest products in float32, as the script sets it, as a multiple of that in TF32.

    TF32 has half the rate of bfloat16 and twice its bytes, so it takes about twice its time. 1 where TF32 is on.
    """
    now = after = 0.0
    for seconds, count, *shapes in products:
        repeats = min(_MOST_REPEATS, max(1, round(_TRIAL_SECONDS * count / seconds)))
        pair = _small_enough(shapes)
        single, half = (
            _product_seconds(torch, pair, kind, repeats) for kind in (torch.float32, torch.bfloat16)
        )
        now += seconds
        after += seconds / max(1.0, single / (2 * half))
    return now / after


def _small_enough(shapes: Sequence[Sequence[int]]) -> Shapes:
    """Return the shapes of a product with fewer matrices, rows or columns: the rate is about the same."""
    (*stack, rows, inner), (*_, columns) = shapes
    sizes = {"stack": math.prod(stack), "rows": rows, "columns": columns}
    while True:
        largest = max(
            inner * sizes["rows"], inner * sizes["columns"], sizes["rows"] * sizes["columns"]
        )
        if sizes["stack"] * largest <= _MOST_VALUES or max(sizes.values()) == 1:
            break
        halved = (
            "stack" if sizes["stack"] > 1 else max(("rows", "columns"), key=lambda one: sizes[one])
        )
        sizes[halved] = max(1, sizes[halved] // 2)
    stacked = (sizes["stack"],) if stack else ()
    return (*stacked, sizes["rows"], inner), (*stacked, inner, sizes["columns"])


def _product_seconds(torch: Any, shapes: Shapes, kind: Any, repeats: int) -> float:
    """Return the seconds of so many matrix products."""
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        # No random numbers: they are the script's.
        first, second = (
            torch.linspace(-1, 1, math.prod(shape), device="cuda").view(shape).to(kind)
            for shape in shapes
        )

        def multiply() -> None:
            for _ in range(repeats):
                torch.matmul(first, second)

        return _least_seconds(torch, multiply)
