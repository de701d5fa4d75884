"""Small models updated by more of the GPU: torch's fused kernels over pieces of the parameters.

Enters: an update that is being captured. Leaves: the same update. Costs: nothing when it is replayed;
some views when it is recorded.

Torch's fused optimizers and `_foreach_norm` give 65,536 elements to a block of threads, so a model with
400,000 parameters is updated by ten blocks, on a GPU with room for hundreds: 35 µs of a 175 µs step on an
H200, and 8 for the norm. A list of views of a few thousand elements makes as many blocks as there are views.
Every element is computed as before; the norm's sum has another order. Large models stay as they are: their
blocks fill the GPU, and more tensors would be more launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_BLOCK = 65_536
_STEP = 2048
_LAUNCH_MICROSECONDS, _MICROSECONDS_PER_ELEMENT = 1.5, 35.5 / _BLOCK
# As many tensors as one launch takes (torch's multi_tensor_apply), by how many lists of them there are.
# Builds for CUDA 13 may take seven times as many, which would make pieces shorter still; not measured.
_TENSORS_PER_LAUNCH = {1: 110, 4: 36, 5: 30}
_NUM_ADAM_LISTS = 6


def piece_size(sizes: Sequence[int], num_lists: int) -> int | None:
    """Return the elements of a piece with which all launches together are shortest; None: cut nothing.

    Args:
        sizes: Elements of each tensor.
        num_lists: Lists of such tensors that the kernel goes over.
    """
    most = _TENSORS_PER_LAUNCH[num_lists]

    def microseconds(size: int | None) -> float:
        count = len(sizes) if size is None else sum(-(-elements // size) for elements in sizes)
        longest = min(size or _BLOCK, max(sizes, default=0))
        return -(-count // most) * (_LAUNCH_MICROSECONDS + longest * _MICROSECONDS_PER_ELEMENT)

    choices: list[int | None] = [None, *range(_BLOCK - _STEP, 0, -_STEP)]
    return min(choices, key=microseconds)


def split_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views that together are the tensors, to take the norm of."""
    size = piece_size([tensor.numel() for tensor in tensors], 1)
    return [piece for tensor in tensors for (piece,) in _cut((tensor,), size)]


class SplitUpdate(TorchFunctionMode):
    """While active, Adam's and AdamW's fused updates go over pieces of their tensors."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        is_adam = func in (torch._fused_adam_, torch._fused_adamw_)
        if is_adam and len(args) == _NUM_ADAM_LISTS and len(args[0]):
            args = _spread(args)
        return func(*args, **(kwargs or {}))


def _spread(lists: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Cut what an update is given: lists of tensors alike, of which one may be empty, and their steps."""
    *alike, steps = lists
    given = [tensors for tensors in alike if len(tensors)]
    size = piece_size([tensor.numel() for tensor in given[0]], len(given))
    rows = [
        (*part, step)
        for *row, step in zip(*given, steps, strict=True)
        for part in _cut(tuple(row), size)
    ]
    columns = iter(zip(*rows, strict=True))
    return [list(next(columns)) if len(tensors) else [] for tensors in lists]


def _cut(row: tuple[torch.Tensor, ...], size: int | None) -> list[tuple[torch.Tensor, ...]]:
    """Cut tensors of one shape alike; those that are no plain memory in order stay whole."""
    is_plain = all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_contiguous()
        for tensor in row
    )
    if size is None or row[0].numel() <= size or not is_plain:
        return [row]
    return list(zip(*(tensor.view(-1).split(size) for tensor in row), strict=True))
