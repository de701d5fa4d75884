"""Random draws on the host: whether a step makes any, and those that have no effect, such as `torch.rand([]) < 0.0`.

At every step, layers of transformers draw whether they are skipped (LayerDrop), also where the probability is 0. Such a
step can be captured, because it is the same for every drawn number.

Enters: a step, run within `HostDraws`. Leaves: the draws that it made, and whether something may depend on one. Costs:
a call of Python for every operation of that one step. At each replay the draws are repeated, so that torch's generator
has the same state as after an eager step. A look at the generators takes 50 ms if other threads may draw from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stoker.train.generators import capture_host_rng, restore_rng

DRAWS_ON_HOST = "the step draws random numbers on the host"
_LOOK_SECONDS, _MOST_LOOKS = 0.05, 20
_EXACT = (torch.float32, torch.float64)
"""Types in which a draw is below 1; with fewer bits it may be rounded to 1."""


class HostDraws(TorchFunctionMode):
    """Watches the draws of `torch.rand` on the host.

    Attributes:
        made: Size and type of each draw, in order.
        decide: Whether a draw was used for anything but a comparison with the same outcome for every number.
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
        # A tensor subclass sees every operation on the draw, also after this mode has ended.
        draw = result.as_subclass(_Draw)
        draw.watch = self
        return draw

    def explains(self, before: dict[str, Any]) -> bool:
        """Whether these draws have no effect, and the host has drawn nothing else since `before`; goes back to it."""
        # Repeating the draws from the same start must give the same state of the generators. After other draws
        # (numpy, Python's random, another function of torch) the state would differ.
        after = capture_host_rng()
        restore_rng(before)
        self.repeat()
        is_all = not has_drawn(after)
        restore_rng(before)
        return is_all and not self.decide

    def repeat(self) -> None:
        """Repeat the draws of the step."""
        for size, dtype in self.made:
            torch.rand(size, dtype=dtype, device="cpu")


class _Draw(torch.Tensor):
    """Numbers from 0 to below 1 that report every operation on them to `watch`."""

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
    """Whether this compares a draw with a bound, with the same result for every number from 0 to below 1."""
    if len(args) != 2 or not isinstance(args[1], int | float):
        return False
    bound = args[1]
    if func in _LESS or func in _AT_LEAST:
        return bound <= 0 or bound >= 1
    return (func in _AT_MOST or func in _MORE) and (bound < 0 or bound >= 1)


def quiet_host_rng(may_wait: bool) -> dict[str, Any] | None:
    """Return the states of the host's generators at a time when no other thread draws; None if others go on drawing.

    Args:
        may_wait: Whether other threads may draw, such as one that prefetches from a dataset. Such a thread pauses
            when it is far enough ahead; this function waits for that, at most a second.
    """
    state = capture_host_rng()
    if not may_wait:
        return state
    for _ in range(_MOST_LOOKS):
        time.sleep(_LOOK_SECONDS)
        before, state = state, capture_host_rng()
        if _is_same(before, state):
            return state
    return None


def has_drawn(before: dict[str, Any]) -> bool:
    """Whether the host's generators have changed since the states `before`."""
    return not _is_same(before, capture_host_rng())


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_is_same(value, other[name]) for name, value in one.items())
    return bool(one == other)
