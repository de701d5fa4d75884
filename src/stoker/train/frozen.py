"""Values that a CUDA graph freezes: the optimizer's numbers, and random numbers drawn on the host.

A graph repeats the numbers that the host had when it was captured. If one of them changes, a replay differs
from the eager step.

Enters: an optimizer whose update is captured; the states of the host's generators before. Leaves: why a replay
would differ, or None. Costs: some µs per replay, 0.1 µs for each parameter; 50 ms per capture if other threads
may draw random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch

from stoker.train.generators import capture_host_rng

DRAWS_ON_HOST = "the step draws random numbers on the host"
_OTHER_GROUPS = "the optimizer was given other parameter groups, which a graph cannot follow"
_LOOK_SECONDS, _MOST_LOOKS = 0.05, 20
_Frozen = tuple[dict[str, Any], torch.Tensor | None, list[str], list[Any]]
"""A group, its learning rate on the device, and the names and values that are compared."""


class FrozenGroups:
    """The parameter groups of an optimizer at the time its update is captured.

    Only learning rates may change: torch's own optimizers get them as tensors on the device, which the graph
    reads.

    Args:
        optimizer: About to be captured.
        device: Where the graph will read the learning rates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._groups = [_freeze(optimizer, group, device) for group in optimizer.param_groups]
        self._trained = self._list_trained()

    def find_change(self) -> str | None:
        """Return what a replay would not follow, in words, or None; new learning rates are copied to the graph's."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            return _OTHER_GROUPS
        for group, (recorded, rate, names, values) in zip(groups, self._groups, strict=True):
            if group is not recorded:
                return _OTHER_GROUPS
            if rate is not None and group["lr"] is not rate:
                _put_back(group, rate)
            now = [group[name] for name in names]
            if not is_equal(now, values):
                alike = map(is_equal, now, values)
                changed = [name for name, same in zip(names, alike, strict=True) if not same]
                return f"the scheduler changes {', '.join(changed)}, which a graph cannot follow"
        if self._list_trained() != self._trained:
            return "parameters were frozen or thawed, which a graph cannot follow"
        return None

    def _list_trained(self) -> list[bool]:
        groups = self._optimizer.param_groups
        return [parameter.requires_grad for group in groups for parameter in group["params"]]


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; False if that has no single answer, as for arrays."""
    try:
        return bool(one == other)
    except (ValueError, TypeError, RuntimeError):
        return False


def quiet_host_rng(may_wait: bool) -> dict[str, Any] | None:
    """Return the states of the host's generators at a time when no other thread draws; None if there is none.

    Args:
        may_wait: Whether other threads may draw, such as one that prefetches from a dataset. It pauses when it
            is far enough ahead; this waits for that, at most a second.
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
    """Whether the host's generators have changed since."""
    return not _is_same(before, capture_host_rng())


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_is_same(value, other[name]) for name, value in one.items())
    return bool(one == other)


def _freeze(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device
) -> _Frozen:
    rate = _bring_rate(optimizer, group, device)
    names = _compared_names(optimizer, group, rate)
    return group, rate, names, [copy(group[name]) for name in names]  # a list may change in place


def _is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _bring_rate(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device
) -> torch.Tensor | None:
    """Return the group's learning rate as a tensor on the device; None if it must stay a number."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor) and rate.device.type == device.type:
        return rate
    if rate is None or not _is_torchs_own(optimizer):
        return None
    brought = torch.as_tensor(rate, dtype=torch.float32).to(device)
    group["lr"] = brought
    return brought


def _compared_names(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rate: torch.Tensor | None
) -> list[str]:
    """Return the names of the values that the captured update may have read on the host."""
    # Torch's optimizers read their defaults only; schedulers and users keep other values in a group.
    read = optimizer.defaults if _is_torchs_own(optimizer) else group
    return [
        name
        for name, value in group.items()
        if name in read
        and name != "params"
        and not isinstance(value, torch.Tensor)
        and (name != "lr" or rate is None)
    ]


def _put_back(group: dict[str, Any], rate: torch.Tensor) -> None:
    """Copy a new learning rate into the tensor that the graph reads."""
    given = group["lr"]
    rate.fill_(given.reshape(()) if isinstance(given, torch.Tensor) else float(given))
    group["lr"] = rate
