"""Batches from values on the device: rows, windows and ragged ranges, by index.

Enters: value tensors and an int64 index tensor. Leaves: new tensors (the values may be overwritten
afterwards). Costs: one read and one write of the batch at the device's memory speed. Pure device
work: no host synchronisation, and static shapes except for ragged values without a capacity, so all
of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def take_rows(values: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return `values[starts]`, one row per sample."""
    return values.index_select(0, starts)


def take_windows(values: torch.Tensor, starts: torch.Tensor, window: int) -> torch.Tensor:
    """Return `(batch, window, ...)` where sample i is `values[starts[i] : starts[i] + window]`.

    The windows are rows of an overlapping view, so that one gather moves whole windows: 3.6 TB/s
    on an H200 where indexing with `starts + arange` reaches 0.8.
    """
    if values.shape[0] < window:
        return values.new_empty((len(starts), window, *values.shape[1:]))
    if values.is_cuda and values[0].nbytes % 16 and (kernel := _window_kernel()) is not None:
        return kernel(values, starts, window)
    flat = values.reshape(values.shape[0], -1)
    width = flat.shape[1]
    view = flat.as_strided(
        (flat.shape[0] - window + 1, window * width), (width, 1), flat.storage_offset()
    )
    return view.index_select(0, starts).view(len(starts), window, *values.shape[1:])


@cache
def _window_kernel() -> Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None:
    """Return the Triton copy for rows that are not a multiple of 16 bytes; None without Triton."""
    try:
        from stoker.loader.window_kernel import copy_windows
    except ImportError:
        return None
    return copy_windows


def ragged_offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Return the n + 1 offsets of n lengths."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def take_ranges(
    values: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor, total: int, exact: bool
) -> torch.Tensor:
    """Return the ranges of all samples one after the other.

    Args:
        values: All values.
        starts: First value of each sample.
        offsets: Where each sample's values go, from `ragged_offsets`.
        total: Values to return: their exact number, known to the host; or a capacity.
        exact: Whether `total` is exact. With a capacity the values past `offsets[-1]` are zero.
    """
    place = torch.arange(total, device=values.device)
    sample = torch.searchsorted(offsets[1:], place, right=True)
    if not exact:
        sample = sample.clamp_(max=len(starts) - 1)
    source = starts[sample] - offsets[sample] + place
    if exact:
        return values.index_select(0, source)
    inside = place < offsets[-1]
    taken = values.index_select(0, torch.where(inside, source, 0))
    return taken * inside.view(-1, *[1] * (values.dim() - 1)).to(taken.dtype)
