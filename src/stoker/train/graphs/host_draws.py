"""Draws on the host that decide nothing, such as `torch.rand([]) < 0.0`.

The layers of transformers ask at every step whether they are left out, also where the chance is 0. A graph may be made
of such a step: whatever is drawn, the step is the same.

Enters: a step, run within `HostDraws`. Leaves: the draws that it made, and whether something may depend on one. Costs:
a call of Python for every operation of that one step; afterwards one draw for each, so that whoever draws next from
torch's generator gets the number that an eager step leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stoker.train.generators import capture_host_rng, restore_rng
from stoker.train.graphs.frozen import has_drawn

_EXACT = (torch.float32, torch.float64)
"""A draw of fewer bits may be rounded to 1."""


class HostDraws(TorchFunctionMode):
    """Watches the draws of `torch.rand` on the host.

    Attributes:
        made: Size and type of each, in their order.
        decide: Whether a draw was used otherwise than in a comparison that has one outcome.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.Size, torch.dtype]] = []
        self.decide = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.rand or result.device.type != "cpu" or result.dtype not in _EXACT:
            return result
        self.made.append((result.shape, result.dtype))
        # A subclass meets every operation on the draw, also in code that this mode no longer surrounds.
        draw = result.as_subclass(_Draw)
        draw.watch = self
        return draw

    def explains(self, before: dict[str, Any]) -> bool:
        """Whether these draws decide nothing and are all that the host has drawn since `before`, which it is set to."""
        # The proof: drawing the same again from the same start must end at the same state. Other draws (numpy,
        # Python's random, another function of torch) would leave it elsewhere.
        after = capture_host_rng()
        restore_rng(before)
        self.repeat()
        is_all = not has_drawn(after)
        restore_rng(before)
        return is_all and not self.decide

    def repeat(self) -> None:
        """Draw as the step did."""
        for size, dtype in self.made:
            torch.rand(size, dtype=dtype)


class _Draw(torch.Tensor):
    """Numbers from 0 to below 1, of which it is known what they were used for."""

    watch: HostDraws

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # Anything but a known comparison counts as a decision: a wrong graph is worse than an eager step.
        if kwargs or not _has_one_outcome(func, args):
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, _Draw):
                    each.watch.decide = True
        return result


_LESS = (torch.Tensor.lt, torch.Tensor.__lt__, torch.lt)
_AT_LEAST = (torch.Tensor.ge, torch.Tensor.__ge__, torch.ge)
_AT_MOST = (torch.Tensor.le, torch.Tensor.__le__, torch.le)
_MORE = (torch.Tensor.gt, torch.Tensor.__gt__, torch.gt)


def _has_one_outcome(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether this compares a draw with a bound, in the same way for every number from 0 to below 1."""
    if len(args) != 2 or not isinstance(args[1], int | float):
        return False
    bound = args[1]
    if func in _LESS or func in _AT_LEAST:
        return bound <= 0 or bound >= 1
    return (func in _AT_MOST or func in _MORE) and (bound < 0 or bound >= 1)
