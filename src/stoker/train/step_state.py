"""What a training step changes, and a copy of it to undo one.

Enters: modules, optimizers, scalers, and the objects that draw. Leaves: their tensors and counts; a snapshot that puts
them back in place. Costs: a snapshot is a copy of all weights and of the optimizer's state on the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stoker.train.batches import iterate_tensors, map_tensors
from stoker.train.frozen import HeldTensors, HostNumbers
from stoker.train.ranks import Ranks


@dataclass
class StepState:
    """What a step changes.

    Attributes:
        modules: Models, and criteria that are modules.
        optimizers: Over their parameters.
        scalers: Of gradients.
        device: Where all of it is.
        draws: Returns the objects whose counters say what is drawn next, such as an augmentation.
        ranks: All of them must decide alike.
        functions: Python code of the step besides the modules' own.
        gradients: Returns the tensors in which gradients are left, where the step does not use them up.
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
        for module in self.modules:
            yield from module.parameters()
            yield from module.buffers()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
            for group in optimizer.param_groups:  # a rate, which a scheduler in the step would move
                yield from (value for value in group.values() if isinstance(value, torch.Tensor))
        for scaler in self.scalers:
            for name in ("_scale", "_growth_tracker"):
                value = getattr(scaler, name, None)
                if isinstance(value, torch.Tensor):
                    yield value
        yield from self.gradients()

    def find_on_host(self) -> str | None:
        """Return the name of an optimizer with a state that is not on the device; None if there is none."""
        return next(
            (
                type(optimizer).__name__
                for optimizer in self.optimizers
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.device.type != self.device.type
            ),
            None,
        )

    def positions(self) -> list[Any]:
        """Return what the host knows of the state: counts of optimizers, and where each of `draws` is."""
        counts = [
            value
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, bool | int | float)
        ]
        return [counts, [drawing.state_dict() for drawing in self.draws()]]


class Snapshot:
    """A copy of everything that a step changes, to undo it.

    Args:
        state: What it changes.
        count: The count of skipped updates, as an object with `num_skipped` and the tensor `_skipped`.

    Attributes:
        tensors: Copies of the tensors that the step changes, in the order of `StepState.tensors`.
    """

    def __init__(self, state: StepState, count: Any = None) -> None:
        self._state, self._count = state, count
        self._owners = list(state.tensors())
        self.tensors = [tensor.detach().clone() for tensor in self._owners]
        self._states = [
            {key: dict(values) for key, values in optimizer.state.items()}
            for optimizer in state.optimizers
        ]
        parameters = [parameter for module in state.modules for parameter in module.parameters()]
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.clone())
            for parameter in parameters
        ]
        self._numbers = HostNumbers(state.modules, state.functions, state.device)
        self._held = HeldTensors(state.modules, state.functions)
        self._held_values = self._held.values()
        own = {id(tensor) for tensor in self._owners}
        self._others = [
            (name, tensor, tensor._version)
            for name, tensor in self._held.reachable()
            if id(tensor) not in own and not tensor.is_inference()
        ]
        self._num_skipped = 0 if count is None else count.num_skipped
        self._rng = torch.cuda.get_rng_state(state.device), torch.get_rng_state()
        self._draws = [(drawing, drawing.state_dict()) for drawing in state.draws()]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what happened since the snapshot. In place: the graph keeps its addresses."""
        self._drop_new_states()
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

    def find_replaced(self) -> str | None:
        """Return the name of a tensor in an attribute or variable that was replaced since, or None."""
        return self._held.find_replaced(self._held_values)

    def find_changed(self) -> str | None:
        """Return the name of a tensor that was changed in place since and is not put back, or None."""
        changed = (name for name, tensor, version in self._others if tensor._version != version)
        return next(changed, None)

    def replacements(self) -> list[torch.Tensor]:
        """Return the tensors that have replaced others in attributes and variables since."""
        now = self._held.values()
        return [
            tensor
            for one, then in zip(now, self._held_values, strict=True)
            if one is not then
            for tensor in iterate_tensors(one)
        ]

    @torch.no_grad()
    def disturb(self) -> None:
        """Replace such tensors by others of the same shape: only a step that reads them has another result then."""

        def other(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach() * 1.5 + 1 if tensor.is_floating_point() else tensor

        self._held.put([map_tensors(other, value) for value in self._held_values])

    def _drop_new_states(self) -> None:
        """Remove optimizer states that did not exist before: a step creates them for a parameter's first update."""
        for optimizer, states in zip(self._state.optimizers, self._states, strict=True):
            for key in list(optimizer.state):
                if key not in states:
                    del optimizer.state[key]
            for key, kept in states.items():
                optimizer.state[key].clear()
                optimizer.state[key].update(kept)


def drawing_objects(*functions: Any) -> list[Any]:
    """Return the objects that functions use and that draw from a counter of their own, such as `MixUp`.

    They are found by their methods `seek`, `state_dict` and `load_state_dict`.
    """
    methods = ("seek", "state_dict", "load_state_dict")
    return [
        value
        for value in used_objects(*functions)
        if all(callable(getattr(value, name, None)) for name in methods)
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
        owners = [getattr(value, "__self__", None) for value in values]  # of bound methods
        values += [
            *owners,
            *(each for owner in owners for each in getattr(owner, "__dict__", {}).values()),
        ]
        found.update((id(value), value) for value in values)
    return list(found.values())
