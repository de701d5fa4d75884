"""The trainer's step as one CUDA graph: gather, augment, forward, backward, clip, update.

Enters: an eager `Step` and a feed. Leaves: the same weights, from one launch per step instead of hundreds. Costs:
see `graphed_step.py`, which captures and compares.

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
from stoker.train.batches import Feed, Work, is_plain
from stoker.train.graphs.graphed_step import GraphedStep, has_graphs
from stoker.train.graphs.replay_check import as_if_captured, is_same_function
from stoker.train.graphs.step_state import Snapshot, StepState, drawing_objects
from stoker.train.oom import forget_frames, is_oom
from stoker.train.settings import Capture
from stoker.train.step import SPARSE, Step, StepParts, has_sparse_gradients
from stoker.train.update import Update

MOST_MISFITS = 3
_NO_MEMORY = "memory ran out while the step was being captured"


def cannot_capture(asked: Capture, feed: Feed, step: Step) -> str | None:
    """Return why the step cannot be captured, as far as is known without trying; None if it may be."""
    parts = step.parts
    if asked == "off":
        return "capture is off"
    if not has_graphs(parts.device):
        return f"there are no CUDA graphs on the {parts.device.type.upper()}"
    if parts.recurrent is not None:
        return "recurrent state is carried from batch to batch"
    if feed.is_stoker and feed.loader.walks_in_lanes:
        return "lanes end at different batches"
    is_accumulated = parts.accumulation_steps > 1
    if is_accumulated and parts.ranks.joined:
        return "ranks exchange the gradients of accumulated batches with the last one only"
    if not is_accumulated and not step.guarded and parts.scaler.is_enabled():
        return f"{type(parts.optimizer).__name__} asks the host whether fp16 has overflowed; bf16 is captured"
    # Encoded pictures are ragged in the store, and batches of one size when they are decoded.
    if feed.is_stoker and any(
        column.kind == "ragged" and not column.is_encoded for column in feed.loader.columns
    ):
        return "ragged fields have another size in every batch"
    if not parts.parallel.can_capture:
        return "parameters in parts are gathered by the host"
    if parts.ranks.joined and not feed.is_stoker:
        return "ranks with loaders of others count their samples at every step"
    if feed.augmentation is not None and not hasattr(feed.augmentation, "load_state_dict"):
        kind = type(feed.augmentation).__name__
        return f"{kind} has no state_dict and load_state_dict, so its draws cannot be repeated"
    if has_sparse_gradients([parts.model]):
        return SPARSE
    if isinstance(parts.model, torch.nn.DataParallel):
        return "DataParallel starts threads in the forward pass"
    return None


def step_state(
    parts: StepParts,
    draws: Callable[[], Sequence[Any]] = tuple,
    gradients: Callable[[], Sequence[torch.Tensor]] = tuple,
    functions: Sequence[Any] = (),
) -> StepState:
    """Return what a step of the trainer changes; `functions` are other functions that the step calls."""
    modules = [m for m in (parts.model, parts.criterion) if isinstance(m, torch.nn.Module)]
    functions = [parts.criterion, *functions] if len(modules) == 1 else functions
    return StepState(
        modules,
        [parts.optimizer],
        [parts.scaler],
        parts.device,
        draws,
        parts.ranks,
        functions,
        gradients,
    )


class CapturedStep(GraphedStep):
    """Runs the trainer's steps as replays of a CUDA graph where possible, else eagerly.

    Args:
        step: The eager step.
        feed: Source of the batches.
        update: Runs the batches that are not replayed.
        say: Called with a note when training continues eagerly.
        demanded: Whether to raise an error instead of continuing eagerly.
    """

    _can_split = True
    what = "one CUDA graph"

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
        super().__init__(self._find_state(), say, demanded)

    def _find_state(self) -> StepState:
        others = drawing_objects(self.feed.given_unpack, self.step.parts.criterion)

        def draws() -> list[Any]:
            augmentation = self.feed.augmentation
            return others if augmentation is None else [augmentation, *others]

        # The graph gathers batches of a loader that is on the device, and unpacks them.
        functions = [self.feed.given_unpack] if self._gathers else []
        return step_state(self.step.parts, draws, functions=functions)

    @property
    def _gathers(self) -> bool:
        loader = self.feed.loader
        return isinstance(loader, Loader) and loader.tier != "streamed"

    def works(self) -> Iterator[Work]:
        """Yield an epoch's work. With a loader on the device, it has indices only: the graph gathers the batch."""
        if not self._gathers or self.is_given_up:
            yield from self.feed
            return
        for index in self.feed.loader.index_batches():
            places = index.planned.positions
            several = self.step.parts.ranks.are_several
            together = index.planned.num_together if several else None
            yield Work(None, None, len(places), places, index=index, num_together=together)

    def run(self, work: Work) -> torch.Tensor:
        """Train on one batch; return its loss on the device."""
        if not self._can_replay(work):
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
            self._check_survives(error, self.step.guarded)
        else:
            return loss
        self.forget()
        self._update.restore()
        if not self._update.give_way():
            self.give_up(_NO_MEMORY)
        return self._run_eagerly(work, again=True)

    def _can_replay(self, work: Work) -> bool:
        """Whether the batch fits the graph, or may be used to capture one."""
        if self._update.is_lowered and not self.is_given_up:
            self.give_up("memory ran out, and a batch that goes through in parts is not captured")
        return not self.is_given_up and self._is_full(work) and self._fits(work)

    def _check_survives(self, error: RuntimeError, is_undone: bool) -> None:
        """Return if memory ran out and the batch can be run again; otherwise raise."""
        if not self._update.survives or not is_oom(error) or not is_undone:
            raise error
        if self.step.parts.ranks.are_several:
            raise self._update.next_time() from error
        forget_frames(error)

    # -- definition of the step --------------------------------------------------------------

    def _given(self, work: Work) -> Any:
        return work.index.indices if work.index is not None else (work.inputs, work.targets)

    def _graphed_part(self) -> torch.Tensor:
        if isinstance(self._static, torch.Tensor):
            inputs, targets = self.feed.unpack(self.feed.loader.assemble(self._static))
        else:
            inputs, targets = self._views()
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
            again: Whether the batch was tried before. Its augmentation may then have drawn, and repeats its draws.
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
        """Return work with its batch; if there are only indices, the batch is assembled now."""
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
        """Whether the batch has the shapes of the graph. After `MOST_MISFITS` that do not, steps run eagerly."""
        if super()._fits(work):
            return True
        self._num_misfits += 1
        if self._num_misfits == MOST_MISFITS:
            odd = next((x for x in (work.inputs, work.targets) if not is_plain(x)), None)
            self.give_up(
                "batches change their shape"
                if odd is None
                else f"a batch has a {type(odd).__name__}, not tensors in tuples, lists and dicts"
            )
        return False


class CapturedPass(CapturedStep):
    """With gradient accumulation: replays the forward and backward pass of each batch; the update itself is eager.

    The graph adds its gradients to tensors of its own. During an update these are the parameters' gradients, so that
    batches that are not replayed, such as a short one, add to the same tensors. Batches are gathered and augmented
    before the graph, and kept until the update is done: when memory runs out, all of them are run again.
    """

    what = "one CUDA graph per batch; the update of several is eager"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.split_reason = "several batches are accumulated per update"
        self._num_begun = 0
        self._with_gradient: list[torch.nn.Parameter] = []

    def works(self) -> Iterator[Work]:
        """See `CapturedStep.works`."""
        yield from self.feed

    def run(self, work: Work) -> torch.Tensor:
        """Add one batch to the update; return its loss on the device. The caller finishes the update."""
        self._num_begun += not self.step.accumulation.num_batches
        # The first update creates the optimizer's state: if memory runs out there, all of it is run again.
        if self._num_begun == 1 or not self._can_replay(work):
            return self._update.add(work)
        self._update.count(work)
        try:
            self._attach()
            loss: torch.Tensor = self._run_captured(work)
        except RuntimeError as error:
            self._check_survives(error, is_undone=True)
        else:
            return loss
        self.give_up(_NO_MEMORY)
        return self._update.repeat()

    def _attach(self) -> None:
        """Make the graph's gradient tensors the parameters' gradients, so that all backward passes add to them."""
        if not self._gradients and self._num_warm == self._warm_up_steps:
            self._gradients = [(each, torch.zeros_like(each)) for each in self._with_gradient]
        empty = []
        for parameter, gradient in self._gradients:
            if parameter.grad is gradient:
                continue
            if parameter.grad is None:
                empty.append(gradient)
            else:  # of batches of this update that were not replayed
                gradient.copy_(parameter.grad)
            parameter.grad = gradient
        if empty:
            torch._foreach_zero_(empty)

    def _find_state(self) -> StepState:
        draws = drawing_objects(self.step.parts.criterion)
        return step_state(
            self.step.parts, lambda: draws, lambda: [gradient for _, gradient in self._gradients]
        )

    def _find_generation(self) -> tuple[int, int]:
        return 0, 0  # the graph reads copies of its batches

    def _warm_up(self, work: Work) -> torch.Tensor:
        loss: torch.Tensor = super()._warm_up(work)
        groups = self.step.parts.optimizer.param_groups
        found = [p for group in groups for p in group["params"] if p.grad is not None]
        if any(parameter.grad.is_sparse for parameter in found):
            self.give_up(SPARSE)
        self._with_gradient = found
        return loss

    def _graphed_part(self) -> torch.Tensor:
        return self._run_pass(*self._views())

    def _run_eagerly(self, work: Work, again: bool = False) -> torch.Tensor:  # noqa: ARG002
        return self._run_pass(work.inputs, work.targets)

    def _run_as_if_captured(self, work: Work) -> torch.Tensor:
        with as_if_captured():
            return self._run_eagerly(work)

    def _run_pass(self, inputs: Any, targets: Any) -> torch.Tensor:
        weight = self.step.accumulation.weight(self.step.parts.nominal_batch)
        return self.step.forward_backward(inputs, targets, weight)

    def _rest(self) -> None:
        pass  # the caller's

    def _keep_gradients(self) -> None:
        pass  # they are known before

    def _before_giving_up(self) -> None:
        pass  # a capture computes nothing, and the gradients so far are those of eager batches and replays
