"""A Triton kernel that copies windows out of a series; imported only where there is a CUDA device.

Enters: the series, the first row of each window. Leaves: the windows. Costs: one read and one write.
Worth having because torch's gather falls to scalar copies with a division per element when a row is
not a multiple of 16 bytes (167 floats, say), while a window is one contiguous run in any case.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _copy_windows(values, starts, out, width, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(1).to(tl.int64)
    inside = place < length
    first = tl.load(starts + sample) * width
    tl.store(
        out + sample * length + place, tl.load(values + first + place, mask=inside), mask=inside
    )


def copy_windows(values: torch.Tensor, starts: torch.Tensor, window: int) -> torch.Tensor:
    """Return `(batch, window, ...)`; `values` is contiguous, on CUDA. Safe to capture."""
    width = values[0].numel()
    out = values.new_empty((len(starts), window, *values.shape[1:]))
    if len(starts):
        grid = (triton.cdiv(window * width, _BLOCK), len(starts))
        _copy_windows[grid](
            values, starts.contiguous(), out, width, window * width, BLOCK=_BLOCK, num_warps=8
        )
    return out
