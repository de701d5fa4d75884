"""Recurrent state between batches: row i of a batch continues row i of the batch before.

Enters: a model that takes and returns its state, and the batches of a lane order. Leaves: its outputs.
Costs: the state, on the device. The state passes from batch to batch, gradients do not. A row whose lane begins, or
whose series has a gap, starts from the model's initial state. A batch whose loss is not finite does not change
the state.

A stateful model has `initial_state(batch, device)`, `reset_state(state, rows)` and is called as
`model(inputs, state) -> (outputs, state)`. A state is a dict of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stoker.loader.loader import Loader

State = Mapping[str, torch.Tensor]


class RecurrentState:
    """Keeps the state between batches. Training and validation each have their own."""

    def __init__(self, device: torch.device, model: Any) -> None:
        self.device = device
        self._model = model
        self._state: State | None = None
        self._before: State = {}

    def begin(self) -> None:
        """Begin an epoch with the initial state."""
        self._state = None

    def run(self, runner: Any, inputs: Any, reset: torch.Tensor) -> Any:
        """Run a batch with the state of the batch before; return the outputs and keep the new state.

        Args:
            runner: The model, or its compiled or parallel form.
            inputs: Inputs of the model.
            reset: Rows that start from the initial state.
        """
        state = self._state
        if state is None:
            state = self._model.initial_state(len(reset), self.device)
        self._before = self._model.reset_state(state, reset)
        outputs, following = runner(inputs, self._before)
        self._state = {name: value.detach() for name, value in following.items()}
        return outputs

    def keep_if(self, is_sound: torch.Tensor) -> None:
        """Keep the new state if the batch was sound, else restore the state before it; resets stay.

        Args:
            is_sound: A bool on the device: whether the loss is finite. The host does not wait for it.
        """
        self._state = {
            name: torch.where(is_sound, value, self._before[name].to(value.dtype))
            for name, value in (self._state or {}).items()
        }
        self._before = {}

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the state; None before the first batch."""
        return None if self._state is None else dict(self._state)

    def load_state_dict(self, state: State | None) -> None:
        """Continue from a state."""
        self._state = (
            None
            if state is None
            else {name: value.to(self.device) for name, value in state.items()}
        )

    def part_of(self, states: Sequence[State | None], rank: int, world_size: int) -> State | None:
        """Return the rows of one rank out of the states that any number of ranks saved; lanes keep their order.

        Args:
            states: The states that the ranks saved, in the order of ranks.
            rank: The rank that continues.
            world_size: Number of ranks that share all rows now.
        """
        if len(states) == world_size:
            return states[rank]
        whole = [state for state in states if state is not None]
        if not whole:
            return None
        # The axis of rows is the one whose size changes with the batch size.
        small, large = (self._model.initial_state(rows, self.device) for rows in (1, 2))
        made = {}
        for name in whole[0]:
            sizes = zip(small[name].shape, large[name].shape, strict=True)
            axis = next((number for number, (one, two) in enumerate(sizes) if one != two), None)
            if axis is None:  # the same for all rows
                made[name] = whole[0][name]
                continue
            rows = torch.cat([state[name] for state in whole], axis)
            made[name] = rows.chunk(world_size, axis)[rank].contiguous()
        return made


def make_recurrent_state(
    model: torch.nn.Module, loader: Any, device: torch.device
) -> RecurrentState | None:
    """Return a state if the loader has lanes and the model takes one; else None."""
    in_lanes = isinstance(loader, Loader) and loader.walks_in_lanes
    return RecurrentState(device, model) if in_lanes and hasattr(model, "initial_state") else None
