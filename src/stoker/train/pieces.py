"""Small models updated by more of the GPU: torch's fused kernels over pieces of the parameters.

Enters: an update that is being captured. Leaves: the same update. Costs: nothing when it is replayed;
some views when it is recorded.

Torch's fused optimizers and `_foreach_norm` give 65,536 elements to a block of threads, so a model with
400,000 parameters is updated by ten blocks, on a GPU with room for hundreds: 35 µs of a 175 µs step on an
H200, and 8 for the norm. A list of views of a few thousand elements makes as many blocks as there are views.
Every element is computed as before; the norm's sum has another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_BLOCK = 65_536
_STEP = 2048
_LAUNCH_MICROSECONDS, _MICROSECONDS_PER_ELEMENT = 1.5, 35.5 / _BLOCK
# As many tensors as one launch can take (torch's multi_tensor_apply), by how many lists of them there are.
_TENSORS_OF_ADAM, _TENSORS_OF_NORM = 36, 110
_NUM_ADAM_LISTS = 6


def piece_size(sizes: Sequence[int], tensors_per_launch: int) -> int:
    """Return how many elements a piece should have so that all launches together are shortest."""

    def microseconds(size: int) -> float:
        count = len(sizes) if size == _BLOCK else sum(-(-elements // size) for elements in sizes)
        longest = min(size, max(sizes, default=0))
        launches = -(-count // tensors_per_launch)
        return launches * (_LAUNCH_MICROSECONDS + longest * _MICROSECONDS_PER_ELEMENT)

    return min(range(_BLOCK, 0, -_STEP), key=microseconds)


class UpdateInPieces(TorchFunctionMode):
    """While active, Adam's and AdamW's fused updates and lists of norms work on pieces."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch._fused_adam_, torch._fused_adamw_) and len(args) == _NUM_ADAM_LISTS:
            *lists, steps = map(list, args)
            rows = list(zip(*(part for part in lists if part), steps, strict=True))
            args = _spread(rows, [bool(part) for part in (*lists, steps)])
        elif func is torch._foreach_norm:
            args = _norm_pieces(args[0]), *args[1:]
        return func(*args, **kwargs)


def _spread(rows: list[tuple[torch.Tensor, ...]], given: Sequence[bool]) -> list[list[Any]]:
    """Cut rows of tensors alike, all but the last of each row, and lay them out as lists again."""
    size = piece_size([row[0].numel() for row in rows], _TENSORS_OF_ADAM)
    cut: list[tuple[torch.Tensor, ...]] = []
    for *tensors, step in rows:
        if tensors[0].numel() <= size or not all(t.is_contiguous() for t in tensors):
            cut.append((*tensors, step))
        else:
            parts = zip(*(t.view(-1).split(size) for t in tensors), strict=True)
            cut.extend((*part, step) for part in parts)
    columns = iter(zip(*cut, strict=True))
    return [list(next(columns)) if is_given else [] for is_given in given]


def _norm_pieces(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    size = piece_size([tensor.numel() for tensor in tensors], _TENSORS_OF_NORM)
    return [
        piece
        for tensor in tensors
        for piece in (tensor.view(-1).split(size) if tensor.is_contiguous() else (tensor,))
    ]
