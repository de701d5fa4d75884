"""The state that a training step changes, and snapshots of it to undo a step.

Enters: modules, optimizers, scalers, and objects that draw random numbers. Leaves: their tensors and counts; a snapshot
that restores them in place. Costs: a snapshot is a copy of all weights and of the optimizer's state on the device.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from types import BuiltinMethodType, MethodType
from typing import Any, NamedTuple

import torch

from stoker.train.batches import iterate_tensors, map_tensors
from stoker.train.graphs.frozen import HostNumbers
from stoker.train.graphs.frozen_groups import is_torchs_own
from stoker.train.graphs.held_tensors import (
    HeldTensors,
    containers_around,
    holds_tensors,
    tensors_in,
)
from stoker.train.graphs.places import is_opaque, is_plain_object, name_key
from stoker.train.graphs.step_code import with_helpers
from stoker.train.graphs.structure import HOOKS, PARAMETER_HOOKS, STEP_HOOKS
from stoker.train.ranks import Ranks

_OF_TORCH = frozenset(
    {
        *("state", "param_groups", "defaults", "step", "zero_grad", "grad_scale", "found_inf"),
        *("_opt_called", "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"),
        *vars(torch.optim.SGD([torch.zeros(1, device="cpu")])),
    }
)
"""Attributes that torch and its schedulers give an optimizer."""
_DEPTH = 6
_Kept = tuple[Any, Any, frozenset[str]]
"""A dict or a list, a shallow copy of it, and keys of it that are left alone."""


@dataclass
class StepState:
    """The objects that a step changes.

    Attributes:
        modules: Models, and criteria that are modules.
        optimizers: Optimizers of their parameters.
        scalers: Gradient scalers.
        device: Device of all of them.
        draws: Returns the objects with counters of random draws, such as an augmentation.
        ranks: Ranks that must make the same decisions.
        functions: Python functions of the step besides the modules' own.
        gradients: Returns the tensors of gradients that remain after the step.
    """

    modules: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    scalers: Sequence[torch.amp.GradScaler]
    device: torch.device
    draws: Callable[[], Sequence[Any]] = tuple
    ranks: Ranks = Ranks()  # noqa: RUF009 (immutable)
    functions: Sequence[Any] = ()
    gradients: Callable[[], Sequence[torch.Tensor]] = tuple

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that a step changes: weights, buffers, optimizer and scaler state, gradients that stay."""
        seen: set[int] = set()
        for module in self.changed_modules():
            for tensor in (*module.parameters(), *module.buffers()):
                seen.add(id(tensor))
                if tensor.layout == torch.strided:  # a sparse matrix of a graph is a constant
                    yield tensor
        for optimizer in self.optimizers:  # a rate too, which a scheduler in the step would move
            yield from (tensor for tensor in _kept_tensors(optimizer) if id(tensor) not in seen)
        for scaler in self.scalers:
            for name in ("_scale", "_growth_tracker"):
                value = getattr(scaler, name, None)
                if isinstance(value, torch.Tensor):
                    yield value
        yield from self.gradients()

    @torch.no_grad()
    def move_weights(self) -> None:
        """Give the modules other weights, a little larger than they are."""
        for parameter in (each for module in self.modules for each in module.parameters()):
            if parameter.is_floating_point() and parameter.layout == torch.strided:
                parameter.add_(0.1 * (1 + parameter.abs()))

    def find_on_host(self) -> str | None:
        """Return the class name of an optimizer whose state is not on the device; None if there is none."""
        return next(
            (
                type(optimizer).__name__
                for optimizer in self.optimizers
                for _, entries, _ in _kept_containers([optimizer])
                if isinstance(entries, dict)
                for name, value in entries.items()
                # The first learning rate is read by schedulers, not by the step.
                if isinstance(value, torch.Tensor)
                and value.device.type != self.device.type
                and name != "initial_lr"
            ),
            None,
        )

    def code(self) -> list[Any]:
        """Return the Python functions of the step besides forward passes, hooks of modules and optimizers included.

        Includes user-defined functions that these and forward passes call.
        """
        owners: list[tuple[Any, tuple[str, ...]]] = [(one, STEP_HOOKS) for one in self.optimizers]
        for module in (inner for root in self.modules for inner in root.modules()):
            owners.append((module, HOOKS))
            own = module._parameters.values()
            owners += [(p, PARAMETER_HOOKS) for p in own]
        tables = (getattr(owner, name, None) for owner, names in owners for name in names)
        hooks = (hook for table in tables if table for hook in table.values())
        return with_helpers(self.modules, [*self.functions, *hooks])

    def changed_modules(self) -> list[torch.nn.Module]:
        """Return the modules, and modules that hooks of the optimizers use, such as a moving average of the weights."""
        tables = (getattr(one, name, None) for one in self.optimizers for name in STEP_HOOKS)
        hooks = [hook for table in tables if table for hook in table.values()]
        known = {id(inner) for root in self.modules for inner in root.modules()} if hooks else set()
        others = (one for one in used_objects(*hooks) if isinstance(one, torch.nn.Module))
        return [*self.modules, *(module for module in others if id(module) not in known)]

    def examined(self) -> tuple[list[torch.nn.Module], list[Any]]:
        """Return the modules and functions whose numbers and objects a graph freezes.

        Besides those of `changed_modules` and `code`, these are modules that the code names, such as a criterion.
        """
        changed, code = self.changed_modules(), self.code()
        owners = (getattr(function, "__self__", None) for function in code)
        named = {id(one): one for one in owners if isinstance(one, torch.nn.Module)}
        known = {id(inner) for root in changed for inner in root.modules()}
        known |= {
            id(inner) for one in named.values() for inner in one.modules() if inner is not one
        }
        return [*changed, *(one for one in named.values() if id(one) not in known)], code

    def positions(self) -> tuple[list[tuple[str, Any]], list[Any]]:
        """Return the part of the state on the host: counts by name, and the position of each of `draws`.

        Counts are numbers in optimizers, and in containers that the step's code uses. The entries of lists are
        included, because a replay adds none.
        """
        named = [
            (type(optimizer).__name__, entries)
            for optimizer in self.optimizers
            for _, entries, _ in _kept_containers([optimizer])
            if isinstance(entries, dict)
        ]
        around = containers_around(*self.examined())
        named += [(name, entries) for name, entries in around if isinstance(entries, dict)]
        counts: list[tuple[str, Any]] = [
            (f"{name_key(key)} of {owner}", value)
            for owner, entries in named
            for key, value in entries.items()
            if issubclass(type(value), bool | int | float)  # asks the object nothing
        ]
        counts += [
            (f"the entries of {name}", [one if _is_number(one) else id(one) for one in held])
            for name, held in around
            if isinstance(held, list | deque)
        ]
        return counts, [drawing.state_dict() for drawing in self.draws()]

    def find_moved(self, positions: tuple[list[tuple[str, Any]], list[Any]]) -> str | None:
        """Return the name of a count that has changed since earlier `positions`; None if there is none."""
        counts, draws = self.positions()
        if len(counts) == len(positions[0]):
            pairs = zip(counts, positions[0], strict=True)
            named = next((name for (name, now), (_, then) in pairs if now != then), None)
            if named is not None or draws == positions[1]:
                return named
        return "a count of the optimizer or of the augmentation"


class Replaced(NamedTuple):
    """The new value where a step has replaced a tensor, or a container or object with tensors, in a dict."""

    name: str
    container: dict[Any, Any]
    key: Any
    value: Any


class KeptObjects:
    """Records which objects the containers of a step hold (counts, tensors), and puts them back.

    Containers of optimizers are their states and groups, attributes of user-defined classes, and optimizers inside
    (`Lookahead`); of modules, the tables of buffers; of code, the dicts, lists and objects that it uses. The memory of
    parameters, and of the tensors `around` the code, is recorded too, because `p.data = ...` replaces it.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        modules: Sequence[torch.nn.Module],
        functions: Sequence[Any] = (),
        around: HeldTensors | None = None,
    ) -> None:
        self._kept = [
            (type(one).__name__, *kept) for one in optimizers for kept in _kept_containers([one])
        ]
        inner = {id(each): each for root in modules for each in root.modules()}.values()
        self._kept += [
            (type(each).__name__, each._buffers, dict(each._buffers), frozenset[str]())
            for each in inner
            if each._buffers
        ]
        known = {id(container) for _, container, _, _ in self._kept}
        self._kept += [
            (name, held, copy(held) if isinstance(held, dict) else list(held), frozenset[str]())
            for name, held in containers_around(modules, functions)
            if id(held) not in known
        ]
        self._memory = [
            (tensor, tensor.data)
            for each in inner
            for tensor in (*each._parameters.values(), *each._buffers.values())
            if tensor is not None and tensor.layout == torch.strided
        ]
        others = {id(t): t for _, t in (() if around is None else around.reachable())}
        for each in others.values():
            if type(each) is torch.Tensor and each.layout == torch.strided:
                self._memory.append((each, each.data))

    def put_back(self) -> None:
        """Restore the entries of every container, and the memory of every parameter and buffer."""
        for _, container, entries, left in self._kept:
            if not isinstance(container, dict):
                if len(container) != len(entries) or any(map(_is_other, container, entries)):
                    container.clear()
                    container.extend(entries)
                continue
            for key in container.keys() - entries.keys() - left:
                del container[key]
            for key, value in entries.items():
                if _is_other(container.get(key), value):
                    container[key] = value
        for tensor, data in self._memory:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data

    def has_moved(self) -> bool:
        """Whether a parameter or buffer has other memory than at construction."""
        return any(tensor.data_ptr() != data.data_ptr() for tensor, data in self._memory)

    def replacements(self) -> list[Replaced]:
        """Return the new values in dicts where tensors were replaced since construction."""
        return [
            Replaced(f"{name_key(key)} of {owner}", container, key, container[key])
            for owner, container, entries, _ in self._kept
            if isinstance(container, dict)
            for key, value in entries.items()
            if _is_other(container.get(key), value)
            and holds_tensors(value)
            and holds_tensors(container.get(key))
        ]


def _is_number(value: Any) -> bool:
    return issubclass(type(value), bool | int | float | str | type(None))


def _is_other(one: Any, other: Any) -> bool:
    return one is not other


def _kept_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield each tensor in the containers of an optimizer once."""
    seen: set[int] = set()
    for _, entries, _ in _kept_containers([optimizer]):
        for value in entries.values() if isinstance(entries, dict) else entries:
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


def _kept_containers(optimizers: Iterable[torch.optim.Optimizer]) -> list[_Kept]:
    """Return the dicts and lists of optimizers that a step may change; groups without their parameters."""
    found: dict[int, _Kept] = {}

    def keep(container: Any, entries: Any, depth: int, left: frozenset[str] = frozenset()) -> None:
        if id(container) in found:
            return
        found[id(container)] = container, entries, left
        for value in list(entries.values()) if isinstance(entries, dict) else entries:
            look(value, depth + 1)

    def look(value: Any, depth: int) -> None:
        if depth > _DEPTH or is_opaque(value):
            return
        if isinstance(value, torch.Tensor | str | bool | int | float | type(None)):
            return
        if isinstance(value, torch.optim.Optimizer):
            keep(value.state, dict(value.state), depth)
            for group in value.param_groups:
                own = {name: entry for name, entry in group.items() if name != "params"}
                keep(group, own, depth, frozenset({"params"}))
            if not is_torchs_own(value):
                own = {name: one for name, one in vars(value).items() if name not in _OF_TORCH}
                keep(vars(value), own, depth, _OF_TORCH)
        elif isinstance(value, dict):
            keep(value, dict(value), depth)
        elif isinstance(value, list | deque):
            keep(value, list(value), depth)
        elif isinstance(value, tuple):
            for item in value:
                look(item, depth + 1)
        elif is_plain_object(value):
            keep(vars(value), dict(vars(value)), depth)

    for optimizer in optimizers:
        look(optimizer, 0)
    return list(found.values())


class Snapshot:
    """A copy of everything that a step changes, to undo the step.

    Args:
        state: The objects that the step changes.
        count: An object that counts skipped updates in `num_skipped` and the tensor `_skipped`, or None.

    Attributes:
        tensors: Copies of the tensors that the step changes, in the order of `StepState.tensors`.
    """

    def __init__(self, state: StepState, count: Any = None) -> None:
        self._state, self._count = state, count
        self._batch: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._owners = list(state.tensors())
        self.tensors = [tensor.detach().clone() for tensor in self._owners]
        modules, code = state.examined()
        self._held = HeldTensors(modules, code)
        self._kept = KeptObjects(state.optimizers, modules, code, self._held)
        parameters = [parameter for module in state.modules for parameter in module.parameters()]
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.clone())
            for parameter in parameters
        ]
        self._numbers = HostNumbers(modules, code, state.device)
        self._held_values = self._held.values()
        # The counters of objects that draw are restored by their `load_state_dict`.
        drawn = (tensor for drawing in state.draws() for tensor in tensors_in(drawing))
        own = {id(tensor) for tensor in (*self._owners, *drawn)}
        self._others = [
            (name, tensor, tensor._version)
            for name, tensor in self._held.reachable()
            if id(tensor) not in own and not tensor.is_inference()
        ]
        self._sums = _sums([tensor for _, tensor, _ in self._others])
        self._num_skipped = 0 if count is None else count.num_skipped
        self._rng = torch.cuda.get_rng_state(state.device), torch.get_rng_state()
        self._draws = [(drawing, drawing.state_dict()) for drawing in state.draws()]

    def keep_batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Restore these tensors of a batch too, if they were changed in place."""
        kept = (tensor for tensor in tensors if not tensor.is_inference())
        self._batch = [(tensor, tensor._version, tensor.detach().clone()) for tensor in kept]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what happened since the snapshot. In place: the graph keeps its addresses."""
        for each, version, before in self._batch:
            if each._version != version:
                each.copy_(before)
        self._kept.put_back()  # a step creates the state of a parameter at its first update
        owners = list(self._state.tensors())
        if len(owners) != len(self._owners):  # a buffer was added or removed
            owners = self._owners
        for tensor, kept in zip(owners, self.tensors, strict=True):
            tensor.copy_(kept)
        for parameter, gradient, values in self._gradients:
            parameter.grad = gradient
            if gradient is not None and values is not None:
                gradient.copy_(values)
        self._numbers.put_back()
        self._held.put(self._held_values)
        if self._count is not None:
            self._count._skipped += self._num_skipped - self._count.num_skipped
        torch.cuda.set_rng_state(self._rng[0], self._state.device)
        torch.set_rng_state(self._rng[1])
        for drawing, position in self._draws:
            drawing.load_state_dict(position)

    def has_moved(self) -> bool:
        """Whether a parameter or buffer has other memory than at the snapshot."""
        return self._kept.has_moved()

    def find_replaced(self) -> str | None:
        """Return the name of a tensor in an attribute or variable that was replaced since the snapshot, or None."""
        return self._held.find_replaced(self._held_values)

    def find_changed(self) -> str | None:
        """Return the name of a tensor that was changed in place and that `restore` does not restore, or None."""
        changed = (name for name, tensor, version in self._others if tensor._version != version)
        found = next(changed, None)
        if found is not None or not self._others:
            return found
        sums = _sums([tensor for _, tensor, _ in self._others])
        pairs = zip(self._others, sums, self._sums, strict=True)
        return next((name for (name, _, _), now, then in pairs if now != then), None)

    def replacements(self) -> list[torch.Tensor]:
        """Return the new tensors in attributes and variables that were replaced since the snapshot."""
        now = self._held.values()
        return [
            tensor
            for one, then in zip(now, self._held_values, strict=True)
            if one is not then
            for tensor in iterate_tensors(one)
        ]

    def find_held(self) -> list[bool]:
        """Return for each attribute and variable with tensors whether it was replaced since the snapshot."""
        pairs = zip(self._held.values(), self._held_values, strict=True)
        return [now is not then for now, then in pairs]

    @torch.no_grad()
    def disturb(self, held: Sequence[bool]) -> None:
        """Replace these tensors by others of the same shape: the result of a step changes only if it reads them."""
        pairs = zip(self._held_values, held, strict=True)
        self._held.put([map_tensors(disturbed, value) if one else value for value, one in pairs])


def disturbed(tensor: torch.Tensor) -> torch.Tensor:
    """Return other values of the same shape; ones for integers, which may be indices into a table."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.detach() * 1.5 + 1
    return torch.ones_like(tensor)


def _sums(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the sum of each real tensor, to detect changes; 0 for other tensors. Waits for the device.

    A tensor's version does not count writes through `.data`, as in most moving averages.
    """
    return [
        float(tensor.detach().sum(dtype=torch.float64).nan_to_num())
        if tensor.is_floating_point() and tensor.layout == torch.strided and not tensor.is_meta
        else 0.0
        for tensor in tensors
    ]


def drawing_objects(*functions: Any) -> list[Any]:
    """Return the objects that functions use and that have their own counter of draws, such as `MixUp`.

    They are recognised by their methods `seek`, `state_dict` and `load_state_dict`.
    """
    methods = ("seek", "state_dict", "load_state_dict")
    return [
        value
        for value in used_objects(*functions)
        if all(callable(getattr(type(value), name, None)) for name in methods)
    ]


def used_objects(*functions: Any) -> list[Any]:
    """Return the objects in the closures, defaults and globals of functions, and in the owners of methods."""
    found: dict[int, Any] = {}
    for function in functions:
        inner = inspect.unwrap(getattr(function, "__func__", function)) if function else None
        if not inspect.isfunction(inner):
            inner = vars(type(inner)).get("__call__")
        values: list[Any] = [function, getattr(function, "__self__", None)]
        if inspect.isfunction(inner):
            used = inspect.getclosurevars(inner)
            values += [*used.nonlocals.values(), *used.globals.values()]
            values += [*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values()]
        values = [value for value in values if not is_opaque(value)]
        bound = (one for one in values if issubclass(type(one), MethodType | BuiltinMethodType))
        owners = [one.__self__ for one in bound]
        values += [
            *owners,
            *(each for owner in owners for each in getattr(owner, "__dict__", {}).values()),
        ]
        found.update((id(value), value) for value in values if not is_opaque(value))
    return list(found.values())
