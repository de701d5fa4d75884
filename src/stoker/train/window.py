"""The batches of one update, run again on a lower rung when memory runs out.

Enters: `Work`, batch by batch. Leaves: their losses, and the update at the window's end. Costs: per window
the state of torch's random generators and of the model's buffers; the batches of a window are held until its
update.

When memory runs out, in the forward pass, the backward pass or the update, everything of the window is
dropped, generators and buffers go back to where they were, one rung of the ladder (`oom.py`) is taken,
and the window is run again: the weights after it are those of a run that had the memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from stoker.train.activations import checkpoint_activations, choose_blocks
from stoker.train.batches import Work, map_tensors
from stoker.train.oom import (
    Circumstances,
    Footing,
    Remembered,
    Rung,
    cut,
    exhausted,
    forget_frames,
    is_oom,
    next_rung,
    sign_model,
)
from stoker.train.step import Step
from stoker.units import format_bytes


class Window:
    """Adds batches to a step and survives running out of memory.

    Args:
        step: What computes.
        survive: Whether to climb down the ladder; False lets the error through.
        say: Told of every rung.
        remembered: Where settings that fitted are kept.
    """

    def __init__(
        self,
        step: Step,
        survive: bool,
        say: Callable[[str], None],
        remembered: Remembered | None = None,
    ) -> None:
        parts = step.parts
        self.step = step
        self._survive = survive
        self._say = say
        self._remembered = remembered or Remembered()
        self._asked = Footing(
            parts.nominal_batch,
            parts.nominal_batch,
            parts.accumulation_steps,
            can_checkpoint=bool(choose_blocks(parts.model).names),
        )
        self.footing = self._asked
        self._works: list[Work] = []
        self._in_update = False
        self._buffers = list(parts.model.buffers())
        self._before: tuple[tuple[torch.Tensor, torch.Tensor | None], list[torch.Tensor]] | None = (
            None
        )
        self._carried: dict[str, torch.Tensor] | None = None
        self._circumstances: Circumstances | None = None
        if survive and parts.device.type == "cuda":
            self._recall()

    def add(self, work: Work) -> torch.Tensor:
        """Add a batch to the window; return its loss, on the device."""
        if not self._works:
            self.mark()
        self._works.append(work)
        loss = self._guarded(lambda: self._add(work))
        return loss if loss is not None else self._replay()[-1]

    @property
    def is_lowered(self) -> bool:
        """Whether a rung was taken, by this run or one that is remembered."""
        return self.footing != self._asked

    def mark(self) -> None:
        """Remember generators, buffers and carried state, for `restore`."""
        if self._survive:
            self._before = self._generators(), [buffer.clone() for buffer in self._buffers]
            carry = self.step.parts.carry
            self._carried = None if carry is None else carry.state_dict()

    def drop(self) -> None:
        """Forget the window and its batches."""
        self._works = []
        self.step.drop_window()

    def finish(self) -> None:
        """Update with the window's batches; nothing happens when there are none."""
        if self._guarded(self._update) is None:
            self._replay()
            self.finish()
            return
        self._works = []

    # -- inside ----------------------------------------------------------------------------

    def _update(self) -> bool:
        self._in_update = True
        try:
            self.step.finish_window()
        finally:
            self._in_update = False
        return True

    def _add(self, work: Work) -> torch.Tensor:
        """Run a batch in passes that fit, weighted by their samples."""
        if not self.is_lowered or work.num_samples <= self.footing.pass_size:
            return self.step.add(work.inputs, work.targets, work.num_samples, work.reset, work.rows)
        weight = self.step.begin_batch(work.num_samples)
        total = torch.zeros((), device=self.step.parts.device)
        for inputs, targets, count in _passes(work, self.footing.pass_size):
            share = count / work.num_samples
            total += self.step.forward_backward(inputs, targets, weight * share) * share
        return total

    def _guarded(self, run: Callable[[], Any]) -> Any:
        """Return what `run` returns, or None after a rung was taken."""
        try:
            return run()
        except RuntimeError as error:
            if not self._survive or not is_oom(error):
                raise
            if self._in_update and not self.step.guarded:
                error.add_note(
                    "in the update of an optimizer that may have changed some weights already: resume "
                    "from the last checkpoint with a smaller batch, or use torch.optim.AdamW"
                )
                raise
            forget_frames(error)
        self._climb_down()
        return None

    def _replay(self) -> list[torch.Tensor]:
        """Run the window's batches again, from the state before it."""
        while True:
            self.restore()
            losses = [self._guarded(partial(self._add, work)) for work in self._works]
            if all(loss is not None for loss in losses):
                return losses

    def restore(self) -> None:
        """Go back to the mark; gradients are dropped."""
        assert self._before is not None
        self.step.drop_window()
        if self.step.parts.carry is not None:
            self.step.parts.carry.load_state_dict(self._carried)
        (on_host, on_device), buffers = self._before
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self.step.parts.device)
        with torch.no_grad():
            for buffer, kept in zip(self._buffers, buffers, strict=True):
                buffer.copy_(kept)

    def _generators(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a forward pass draws from; Python's and numpy's generators would cost more than they give."""
        device = self.step.parts.device
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _climb_down(self) -> None:
        before = self._allocated()
        self.step.drop_window()
        gc.collect()
        if self.step.parts.device.type == "cuda":
            torch.cuda.empty_cache()
        rung = next_rung(self.footing)
        if rung is None or (rung.kind == "batch" and not all(map(_can_cut, self._works))):
            if self._circumstances is not None:
                self._remembered.forget(self._circumstances)
            raise exhausted(self.footing)
        self._take(rung)
        self._say(
            f"memory ran out with {format_bytes(before)} in use ({format_bytes(self._allocated())} after "
            f"letting go): {rung.reason}"
        )
        if self._circumstances is not None:
            self._remembered.remember(self._circumstances, self._asked, self.footing)

    def _take(self, rung: Rung) -> None:
        if rung.kind == "activation checkpointing":
            checkpoint_activations(self.step.parts.model)
        self.footing = self.footing.on(rung)

    def _recall(self) -> None:
        """Begin where an earlier run of the same model on the same GPU ended."""
        parts = self.step.parts
        free = torch.cuda.mem_get_info(parts.device)[0]
        signature = sign_model(parts.model, parts.precision.name, type(parts.optimizer).__name__)
        name = torch.cuda.get_device_name(parts.device)
        self._circumstances = Circumstances.of(signature, name, free)
        known = self._remembered.recall(self._circumstances, self._asked)
        if known is None:
            return
        if known.is_checkpointed:
            checkpoint_activations(parts.model)
        self.footing = known
        self._say(
            f"remembered from an earlier run: {known.pass_size} samples at once"
            + (", activations recomputed" if known.is_checkpointed else "")
        )

    def _allocated(self) -> int:
        device = self.step.parts.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _can_cut(work: Work) -> bool:
    """Whether every tensor has a row per sample, and rows carry no state."""
    return work.reset is None and all(
        tensor.dim() and tensor.shape[0] == work.num_samples
        for tensor in _tensors((work.inputs, work.targets))
    )


def _passes(work: Work, pass_size: int) -> Iterator[tuple[Any, Any, int]]:
    start = 0
    for count in cut(work.num_samples, pass_size):
        part = partial(_part, start=start, stop=start + count)
        yield map_tensors(part, work.inputs), map_tensors(part, work.targets), count
        start += count


def _part(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor[start:stop]
