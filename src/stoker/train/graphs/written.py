"""Tensors that a step only writes: `logs["loss"] = loss`, an attribute, a variable of an outer function.

A plain step makes a new tensor each time, and a loop may keep the old ones. A graph writes to the same memory at every
step, so each place gets a copy of it after each replay.

Enters: places, and the tensors that the capture has put there. Leaves: the places with their own tensors. Costs: a copy
of each tensor of up to 1 MiB. Larger ones share the graph's memory until the loop is found to keep one: 1 µs for each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from stoker.train.batches import iterate_tensors, map_tensors
from stoker.train.graphs.held_tensors import put_in

_MOST_COPIED_BYTES = 1 << 20
_SEVERAL = 4
"""From this number of tensors on, one launch that copies all of them is faster than one launch each."""
_Place = tuple[Any, Any, Any]
"""A container, a key in it, and the value there."""


class WrittenTensors:
    """Places that a step only writes.

    Args:
        places: The places, with the graph's own values.
        state: Tensors that are not copied, such as weights.
        copies_all: Whether large tensors are copied too.
    """

    def __init__(
        self,
        places: Sequence[_Place] = (),
        state: Iterable[torch.Tensor] = (),
        copies_all: bool = False,
    ) -> None:
        self._places = places
        # A place may hold a weight itself: a copy would be a weight that no update reaches.
        own = {_memory(tensor) for tensor in state} if places else set()
        found = {
            id(tensor): tensor
            for _, _, value in places
            for tensor in iterate_tensors(value)
            if _memory(tensor) not in own
        }.values()
        self._copied = [each for each in found if copies_all or _is_small(each)]
        self._lent = [each for each in found if not copies_all and not _is_small(each)]
        self._out: list[torch.Tensor] = []
        self._uses: list[tuple[int, int]] = []

    @torch.no_grad()
    def put(self) -> None:
        """Put the tensors that a replay has computed into the places."""
        if not self._places:
            return
        copies: list[torch.Tensor]
        if len(self._copied) < _SEVERAL:
            copies = [tensor.detach().clone() for tensor in self._copied]
        else:
            copies = [torch.empty_like(tensor) for tensor in self._copied]
            torch._foreach_copy_(copies, [tensor.detach() for tensor in self._copied])
        # `detach` makes a new object over the same memory: references to it are the loop's, not the graph's.
        self._out = [tensor.detach() for tensor in self._lent]
        self._uses = self._count_uses()
        made = dict(zip(map(id, self._copied), copies, strict=True))
        made |= zip(map(id, self._lent), self._out, strict=True)
        for container, key, value in self._places:
            put_in(container, key, map_tensors(lambda tensor: made.get(id(tensor), tensor), value))

    def is_kept(self) -> bool:
        """Clear the places before a replay overwrites shared tensors; return whether other code still holds one."""
        if not self._out:
            return False
        # When the places no longer hold them, a further reference is the loop's: to the tensor or to a view of it.
        for container, key, _ in self._places:
            put_in(container, key, None)
        return any(
            now > then
            for pair in zip(self._count_uses(), self._uses, strict=True)
            for now, then in zip(*pair, strict=True)
        )

    def _count_uses(self) -> list[tuple[int, int]]:
        """Return the number of references to each shared tensor, and to its memory."""
        return [
            (sys.getrefcount(tensor), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
            for tensor in self._out
        ]


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _MOST_COPIED_BYTES


def _memory(tensor: torch.Tensor) -> int:
    is_plain = tensor.layout == torch.strided  # sparse tensors have no storage of their own
    return tensor.untyped_storage().data_ptr() if is_plain else id(tensor)
