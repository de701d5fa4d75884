"""Small trials on the GPU after the profiled steps: what copies and matrix products would cost otherwise.

Enters: the profile. Leaves: a rate and two ratios. Costs 10 to 100 ms, once; the script waits meanwhile. No setting of
the script is read or changed: reading whether TF32 is allowed prints a warning in some versions of torch, and a script
that allows it would be changed by another value, even for a moment.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_COPIED_BYTES = 1 << 25
_NOTABLE = 0.05
"""Share of the kernels' time from which another number format is tried."""
_PRODUCT_SIZE, _NUM_PRODUCTS = 1024, 8
_NUM_TURNS, _STEADY = 7, 1.25
"""How often a product is timed in each type, and what its usual time may be of its least one."""
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
    if None in found.values():
        found["untried"] = (
            "other programs used the GPU too: how fast it is in other number formats is not known"
        )
    return {name: value for name, value in found.items() if value is not None}


def _seconds(torch: Any, work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes on the GPU."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _pinned_bytes_per_second(torch: Any) -> float:
    """Return the rate of copies from pinned memory to the device, which pageable copies could reach."""
    held = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    taken = [_seconds(torch, lambda: there.copy_(held, non_blocking=True)) for _ in range(4)]
    return _COPIED_BYTES / min(taken[1:])


def _double_times(torch: Any) -> float | None:
    """Return the time of a matrix product in float64 as a multiple of that in float32: 1 to 64, by the kind of GPU."""
    shape = (_PRODUCT_SIZE, _PRODUCT_SIZE)
    return _ratio(torch, (shape, shape), (torch.float64, torch.float32), _NUM_PRODUCTS)


def _single_times(torch: Any, products: Sequence[Any]) -> float | None:
    """Return the time of the costliest products in float32, as the script sets it, as a multiple of that in TF32.

    TF32 has half the rate of bfloat16 and twice its bytes, so it takes about twice its time. 1 where TF32 is on.
    """
    now = after = 0.0
    is_known = False
    for seconds, count, *shapes in products:
        repeats = min(_MOST_REPEATS, max(1, round(_TRIAL_SECONDS * count / seconds)))
        kinds = (torch.float32, torch.bfloat16)
        times = _ratio(torch, _small_enough(shapes), kinds, repeats)
        is_known |= times is not None
        now += seconds
        after += seconds / max(1.0, (times or 0.0) / 2)
    return now / after if is_known else None


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


def _ratio(torch: Any, shapes: Shapes, kinds: Sequence[Any], repeats: int) -> float | None:
    """Return the time of so many matrix products in the first type by that in the second.

    Both take turns. Other programs get the GPU for milliseconds at a time: turns then differ, and None is returned.
    """
    turns = _seconds_of_turns(torch, shapes, kinds, repeats)
    least, usual = [], []
    for taken in zip(*turns, strict=True):
        least.append(min(taken))
        usual.append(sorted(taken)[len(taken) // 2])
    steady = all(one <= _STEADY * lowest for one, lowest in zip(usual, least, strict=True))
    return least[0] / least[1] if steady else None


def _seconds_of_turns(
    torch: Any, shapes: Shapes, kinds: Sequence[Any], repeats: int
) -> list[list[float]]:
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        # No random numbers: they are the script's.
        operands = [
            [
                torch.linspace(-1, 1, math.prod(shape), device="cuda").view(shape).to(kind)
                for shape in shapes
            ]
            for kind in kinds
        ]

        def multiply(first: Any, second: Any) -> None:
            for _ in range(repeats):
                torch.matmul(first, second)

        return [
            [_seconds(torch, functools.partial(multiply, *pair)) for pair in operands]
            for _ in range(1 + _NUM_TURNS)
        ][1:]
