"""The trainer's step as one CUDA graph: gather, augment, forward, backward, clip, update.

Enters: an eager `Step` and a feed. Leaves: the same weights, from one launch per step instead of hundreds. Costs:
see `graph.py`, which captures and compares.

A graph reads its batch at fixed addresses. With a stoker loader on the device that is an index tensor,
which is overwritten before each replay; with other loaders it is the input tensors themselves, if their
shapes do not change. A short last batch runs eagerly.

Contract of `CapturedStep.run`:

    success        the weights are those of an eager step; the loss is a tensor of its own
    cannot capture the reason is noted and training continues eagerly; with capture="on" it is an error
    out of memory  the step is undone and run eagerly, which may lower the memory level (`update.py`)
    another error  it is raised; if it came while a replay was checked, nothing of the step remains
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from stoker.loader.loader import Loader
from stoker.report import Note
from stoker.train.batches import Feed, Work
from stoker.train.graph import GraphedStep, has_graphs
from stoker.train.oom import forget_frames, is_oom
from stoker.train.replay_check import as_if_captured, is_same_function
from stoker.train.settings import Capture
from stoker.train.step import Step, StepParts
from stoker.train.step_state import Snapshot, StepState, drawing_objects
from stoker.train.update import Update

MOST_MISFITS = 3


def cannot_capture(asked: Capture, feed: Feed, step: Step) -> str | None:
    """Return why the step cannot be captured, as far as is known without trying; None if it may be."""
    parts = step.parts
    if asked == "off":
        return "capture is off"
    if not has_graphs(parts.device):
        return f"there are no CUDA graphs on the {parts.device.type.upper()}"
    if parts.accumulation_steps > 1:
        together = parts.accumulation_steps * parts.nominal_batch
        return f"several batches are accumulated per update; one batch of {together} is captured"
    if parts.recurrent is not None:
        return "recurrent state is carried from batch to batch"
    if feed.is_stoker and feed.loader.walks_in_lanes:
        return "lanes end at different batches"
    if not step.guarded and parts.scaler.is_enabled():
        return f"{type(parts.optimizer).__name__} asks the host whether fp16 has overflowed; bf16 is captured"
    if feed.is_stoker and any(column.kind == "ragged" for column in feed.loader.columns):
        return "ragged fields have another size in every batch"
    if not parts.parallel.can_capture:
        return "parameters in parts are gathered by the host"
    if parts.ranks.joined and not feed.is_stoker:
        return "ranks with loaders of others count their samples at every step"
    if feed.augmentation is not None and not hasattr(feed.augmentation, "load_state_dict"):
        kind = type(feed.augmentation).__name__
        return f"{kind} has no state_dict and load_state_dict, so its draws cannot be repeated"
    if isinstance(parts.model, torch.nn.DataParallel):
        return "DataParallel starts threads in the forward pass"
    return None


def step_state(parts: StepParts, draws: Callable[[], Sequence[Any]] = tuple) -> StepState:
    """Return what a step of the trainer changes."""
    modules = [m for m in (parts.model, parts.criterion) if isinstance(m, torch.nn.Module)]
    functions = [parts.criterion] if len(modules) == 1 else []
    return StepState(
        modules, [parts.optimizer], [parts.scaler], parts.device, draws, parts.ranks, functions
    )


class CapturedStep(GraphedStep):
    """Runs the trainer's steps as replays of a CUDA graph where it can, else eagerly.

    Args:
        step: The eager step.
        feed: Where batches come from.
        update: Runs the batches that are not replayed.
        say: Called with a note when training continues eagerly.
        demanded: Whether that is an error instead.
    """

    _can_split = True

    def __init__(
        self,
        step: Step,
        feed: Feed,
        update: Update,
        say: Callable[[Note], object],
        demanded: bool = False,
    ) -> None:
        self.step = step
        self.feed = feed
        self._update = update
        self._others_draw = not feed.is_stoker
        self._num_misfits = 0
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        others = drawing_objects(feed.given_unpack, step.parts.criterion)

        def draws() -> list[Any]:
            return others if feed.augmentation is None else [feed.augmentation, *others]

        state = step_state(step.parts, draws)
        super().__init__(state, say, demanded)

    def works(self) -> Iterator[Work]:
        """Yield an epoch's work. From a loader on the device it has indices only: the graph gathers the batch."""
        loader = self.feed.loader
        if not isinstance(loader, Loader) or loader.tier == "streamed" or self.is_given_up:
            yield from self.feed
            return
        for index in loader.index_batches():
            places = index.planned.positions
            several = self.step.parts.ranks.are_several
            together = index.planned.num_together if several else None
            yield Work(None, None, len(places), places, index=index, num_together=together)

    def run(self, work: Work) -> torch.Tensor:
        """Train on one batch; return its loss on the device."""
        if self._update.is_lowered and not self.is_given_up:
            self.give_up("memory ran out, and a batch that goes through in parts is not captured")
        if self.is_given_up or not self._is_full(work) or not self._fits(work):
            return self._run_eagerly(work)
        loss: torch.Tensor
        if self._is_trusted:  # a replay allocates nothing, so it cannot run out of memory
            loss = self._run_captured(work)
            return loss
        self._update.mark()
        try:
            loss = self._run_captured(work)
        except RuntimeError as error:
            # An optimizer that is not fused may have changed some weights already.
            if not self._update.survives or not is_oom(error) or not self.step.guarded:
                raise
            if self.step.parts.ranks.are_several:
                raise self._update.next_time() from error
            forget_frames(error)
        else:
            return loss
        self.forget()
        self._update.restore()
        if not self._update.give_way():
            self.give_up("memory ran out while the step was being captured")
        return self._run_eagerly(work, again=True)

    # -- what the step is --------------------------------------------------------------------

    def _given(self, work: Work) -> Any:
        return work.index.indices if work.index is not None else (work.inputs, work.targets)

    def _graphed_part(self) -> torch.Tensor:
        if isinstance(self._static, torch.Tensor):
            inputs, targets = self.feed.unpack(self.feed.loader.assemble(self._static))
        else:
            inputs, targets = self._static
        loss = self.step.forward_backward(inputs, targets, 1.0)
        if self.split_reason is None:
            self.step.update(pieces=True)
        return loss

    def _rest(self) -> None:
        if self.split_reason is None:
            return
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self.step.update()

    def _keep_gradients(self) -> None:
        if self.split_reason is None:
            return
        parameters = [
            p for group in self.step.parts.optimizer.param_groups for p in group["params"]
        ]
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        self.step.parts.optimizer.zero_grad(set_to_none=True)  # of a backward pass not computed

    def forget(self) -> None:
        """See `GraphedStep.forget`."""
        super().forget()
        self._gradients = []

    def _run_eagerly(self, work: Work, again: bool = False) -> torch.Tensor:
        """Train on a batch without the graph; running out of memory lowers the level.

        Args:
            work: The batch.
            again: Whether it was tried before. Its augmentation may then have been drawn, and is drawn anew.
        """
        opened = self._update.obtain(lambda retried: self._opened(work, again or retried))
        loss = self._update.add(opened)
        self._update.finish()
        return loss

    def _run_as_if_captured(self, work: Work) -> torch.Tensor:
        opened = self._opened(work, again=False)
        with as_if_captured():
            loss = self.step.forward_backward(opened.inputs, opened.targets, 1.0)
        self.step.update(pieces=True)
        return loss

    def _is_same_function(self, work: Work, keep: Snapshot) -> bool:
        same = is_same_function(self.step.parts, self._opened(work, again=False).inputs)
        keep.restore()
        return same

    def _opened(self, work: Work, again: bool) -> Work:
        """Return work with its batch, which is assembled now if there are only indices."""
        if work.index is None:
            return work
        if again and self.feed.augmentation is not None:
            self.feed.augmentation.seek(self.feed.loader.epoch, work.index.planned.step)
        inputs, targets = self.feed.unpack(self.feed.loader.assemble(work.index))
        return replace(work, inputs=inputs, targets=targets, index=None)

    def _make_snapshot(self) -> Snapshot:
        return Snapshot(self._state, self.step)

    def _find_generation(self) -> tuple[int, int]:
        """Return a value that changes with the ops of the augmentation, or when the data has moved."""
        ring_number = self.feed.loader.ring_number if self.feed.is_stoker else 0
        return int(getattr(self.feed.augmentation, "generation", 0)), ring_number

    def _is_invalid(self) -> bool:
        return self._update.is_lowered or super()._is_invalid()

    def _before_giving_up(self) -> None:
        self._update.drop()

    def _is_full(self, work: Work) -> bool:
        """Whether the batch is full on every rank. All ranks must replay, or none: a graph contains collectives."""
        nominal, ranks = self.step.parts.nominal_batch, self.step.parts.ranks.world_size
        together = work.num_together
        return work.num_samples == nominal and (together is None or together == nominal * ranks)

    def _fits(self, work: Work) -> bool:
        """Whether the batch has the shapes that the graph was made for. A few misfits end capturing."""
        if super()._fits(work):
            return True
        self._num_misfits += 1
        if self._num_misfits == MOST_MISFITS:
            self.give_up("batches change their shape")
        return False
