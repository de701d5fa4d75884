"""Split update: torch's fused optimizer kernels over pieces of small parameters, to use more of the GPU.

Enters: an update that is being captured. Leaves: the same update. Costs: nothing when it is replayed; some views
when it is captured.

Torch's fused optimizers and `_foreach_norm` give 65,536 elements to a block of threads, so a model with
400,000 parameters is updated by ten blocks, on a GPU with room for hundreds: 35 µs of a 175 µs step on an
H200, and 8 for the norm. A list of views of a few thousand elements each gives one block per view. Every element
is computed as before; only the order of the norm's sum changes. Large models are not split: their blocks fill the
GPU, and more tensors would mean more launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_BLOCK = 65_536
_STEP = 2048
_LAUNCH_MICROSECONDS, _MICROSECONDS_PER_ELEMENT = 1.5, 35.5 / _BLOCK
# Tensors that one launch of torch's multi_tensor_apply takes, by the number of lists.
# Builds for CUDA 13 may take seven times as many, which would make pieces even shorter; not measured.
_TENSORS_PER_LAUNCH = {1: 110, 4: 36, 5: 30}
_NUM_ADAM_LISTS = 6


def piece_size(sizes: Sequence[int], num_lists: int) -> int | None:
    """Return the piece size, in elements, with the shortest total time; None if splitting does not pay.

    Args:
        sizes: Number of elements of each tensor.
        num_lists: Number of lists of such tensors that the kernel reads: parameters, gradients, moments.
    """
    most = _TENSORS_PER_LAUNCH[num_lists]

    def microseconds(size: int | None) -> float:
        count = len(sizes) if size is None else sum(-(-elements // size) for elements in sizes)
        longest = min(size or _BLOCK, max(sizes, default=0))
        return -(-count // most) * (_LAUNCH_MICROSECONDS + longest * _MICROSECONDS_PER_ELEMENT)

    choices: list[int | None] = [None, *range(_BLOCK - _STEP, 0, -_STEP)]
    return min(choices, key=microseconds)


def split_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors as views of at most the piece size, for a norm over all of them."""
    size = piece_size([tensor.numel() for tensor in tensors], 1)
    return [piece for tensor in tensors for (piece,) in _cut((tensor,), size)]


class SplitUpdate(TorchFunctionMode):
    """While active, Adam's and AdamW's fused kernels get pieces of their tensors."""

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
    """Split the arguments of a fused update: lists of tensors of equal shapes, one maybe empty, and steps."""
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
    """Split tensors of one shape in the same way; tensors that are not contiguous stay whole."""
    is_plain = all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_contiguous()
        for tensor in row
    )
    if size is None or row[0].numel() <= size or not is_plain:
        return [row]
    return list(zip(*(tensor.view(-1).split(size) for tensor in row), strict=True))
