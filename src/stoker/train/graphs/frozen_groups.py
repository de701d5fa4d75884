"""The parameter groups of an optimizer, of which a CUDA graph freezes all numbers but the learning rate.

Enters: an optimizer. Leaves: why a replay of its update would differ from an eager one, or None. Costs: per replay some
µs and 0.1 µs for each parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from copy import copy
from operator import is_
from typing import Any

import torch

from stoker.train.batches import is_equal
from stoker.train.step import is_guarded

OTHER_GROUPS = "the optimizer was given other parameter groups or another state"
_Frozen = tuple[dict[str, Any], torch.Tensor | None, list[str], list[Any]]
"""A group, its learning rate on the device, and the names and values that are compared."""


class FrozenGroups:
    """The parameter groups of an optimizer at the time its update is captured.

    Only learning rates may change: torch's own optimizers get them as tensors on the device, which the graph
    reads.

    Args:
        optimizer: The optimizer, before the capture.
        device: Device from which the graph reads the learning rates.
        bring_rates: Whether to put the rates there. Some optimizers that are not fused refuse rates on a device.
        has_update: Whether the update is captured. If not, only the set of trained parameters must stay the same.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        bring_rates: bool = True,
        has_update: bool = True,
    ) -> None:
        self._optimizer, self._has_update = optimizer, has_update
        groups = optimizer.param_groups if has_update else ()
        self._groups = [_freeze(optimizer, group, device, bring_rates) for group in groups]
        self._kept: list[Any] | None = None
        self._moments: dict[str, Any] = {}
        trained = (p for group in optimizer.param_groups for p in group["params"])
        order = operator.attrgetter("requires_grad")
        self._sample: torch.Tensor = max(trained, key=order, default=torch.empty(0, device="cpu"))
        self._trained = self._list_trained()

    def has_other_groups(self) -> bool:
        """Whether groups or state were added or replaced since the first call after the capture, or groups before.

        `load_state_dict` replaces both; some users empty the state, or replace all moments, to begin anew with them.
        """
        groups = self._optimizer.param_groups if self._has_update else ()
        if len(groups) != len(self._groups):
            return True
        if self._has_update:
            state = self._optimizer.state
            kept = [*state.values(), *self._moments.values()]
            if self._kept is None:
                self._moments = state.get(self._sample, {}) if is_guarded(self._optimizer) else {}
                self._kept = kept = [*kept, *self._moments.values()]
            if len(kept) != len(self._kept) or not all(map(is_, kept, self._kept)):
                return True
        return any(now is not then[0] for now, then in zip(groups, self._groups, strict=True))

    def find_change(self) -> str | None:
        """Describe a change that a replay would ignore, or return None. Copies new learning rates to the graph's."""
        for group, rate, names, values in self._groups:
            if rate is not None and group["lr"] is not rate:
                _put_back(group, rate)
            now = [group[name] for name in names]
            if not is_equal(now, values):
                alike = map(is_equal, now, values)
                changed = [name for name, same in zip(names, alike, strict=True) if not same]
                return f"the scheduler changes {', '.join(changed)}, which a graph cannot follow{_advise(changed)}"
        return None

    def trains_others(self) -> bool:
        """Whether parameters were frozen or unfrozen since the capture."""
        return self._list_trained() != self._trained

    def _list_trained(self) -> list[bool]:
        groups = self._optimizer.param_groups
        return [parameter.requires_grad for group in groups for parameter in group["params"]]


def _freeze(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device, bring: bool
) -> _Frozen:
    rate = _bring_rate(optimizer, group, device, bring)
    names = _compared_names(optimizer, group, rate)
    return group, rate, names, [copy(group[name]) for name in names]  # a list may change in place


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class of an optimizer is torch's own, not a subclass."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _bring_rate(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device, bring: bool
) -> torch.Tensor | None:
    """Return the group's learning rate as a tensor on the device; None if it must stay a number."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor) and rate.device.type == device.type:
        return rate
    if rate is None or not bring or not is_torchs_own(optimizer):
        return None
    brought = torch.as_tensor(rate, dtype=torch.float32, device=device)
    group["lr"] = brought
    return brought


def _compared_names(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rate: torch.Tensor | None
) -> list[str]:
    """Return the names of the values that the captured update may have read on the host."""
    # Torch's optimizers read only the names in their defaults; other values in a group are of schedulers and users.
    read = optimizer.defaults if is_torchs_own(optimizer) else group
    return [
        name
        for name, value in group.items()
        if name in read
        and name != "params"
        and not isinstance(value, torch.Tensor)
        and (name != "lr" or rate is None)
    ]


def _advise(changed: list[str]) -> str:
    """Return advice on how to keep these values of a group constant, as the end of a sentence."""
    if "lr" in changed:
        return "; it follows an lr that is a tensor on the GPU"
    if {"betas", "momentum"} & {*changed}:
        return "; cycle_momentum=False leaves it as it is"
    return ""


def _put_back(group: dict[str, Any], rate: torch.Tensor) -> None:
    """Copy a new learning rate into the tensor that the graph reads."""
    given = group["lr"]
    rate.fill_(given.reshape(()) if isinstance(given, torch.Tensor) else float(given))
    group["lr"] = rate
