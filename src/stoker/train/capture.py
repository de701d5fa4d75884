"""The whole training step as one CUDA graph: gather, augment, forward, backward, clip, update.

Enters: an eager `Step` and a feed. Leaves: the same weights, from one launch per step instead of
hundreds. Costs: three eager steps of warm-up (they train like any other), one capture, three steps
computed twice to compare graph and eager step (`replay_check.py`). The graph's memory stays reserved while it exists.

A graph reads its batch at fixed addresses. With a stoker loader on the device that is an index tensor,
which is overwritten before each replay; with other loaders it is the input tensors themselves, if their
shapes do not change. A short last batch runs eagerly.

Contract of `CapturedStep.run`:

    success        the weights are those of an eager step; the loss is a tensor of its own
    cannot capture the reason is noted and training continues eagerly; with capture="on" it is an error.
                   The same if a replay differs from the eager step, or if a number of the optimizer other
                   than its learning rate changes (`frozen.py`): a graph repeats the numbers it was made with
    out of memory  the step is undone and run eagerly, which may lower the memory level (`update.py`)
    another error  it is raised; if it came while a replay was checked, nothing of the step remains

One thread, one stream: the caller's. Other threads may copy while a graph is captured.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch

from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.report import Note, Topic
from stoker.train.batches import Feed, Work, map_tensors
from stoker.train.frozen import DRAWS_ON_HOST, FrozenGroups, has_drawn, is_equal, quiet_host_rng
from stoker.train.generators import restore_rng
from stoker.train.oom import forget_frames, is_oom
from stoker.train.replay_check import (
    as_if_captured,
    difference,
    is_same_function,
    is_too_noisy,
    spread,
)
from stoker.train.settings import Capture
from stoker.train.step import Step, compact_recurrent, state_tensors
from stoker.train.update import Update

WARM_UP_STEPS = 3
WARM_UP_STEPS_OF_RANKS = 11
CHECKED_REPLAYS = 3
MOST_MISFITS = 3


def cannot_capture(asked: Capture, feed: Feed, step: Step) -> str | None:
    """Return why the step cannot be captured, as far as is known without trying; None if it may be."""
    parts = step.parts
    if asked == "off":
        return "capture is off"
    if parts.device.type != "cuda":
        return f"there are no CUDA graphs on the {parts.device.type.upper()}"
    if parts.accumulation_steps > 1:
        return "several batches are accumulated per update"
    if parts.recurrent is not None:
        return "recurrent state is carried from batch to batch"
    if feed.is_stoker and feed.loader.walks_in_lanes:
        return "lanes end at different batches"
    if not step.guarded:
        return f"{type(parts.optimizer).__name__} is not a fused optimizer"
    if feed.is_stoker and any(column.kind == "ragged" for column in feed.loader.columns):
        return "ragged fields have another size in every batch"
    if not parts.parallel.can_capture:
        return "parameters in parts are gathered by the host"
    if parts.ranks.joined and not feed.is_stoker:
        return "ranks with loaders of others count their samples at every step"
    if isinstance(parts.model, torch.nn.DataParallel):
        return "DataParallel starts threads in the forward pass"
    return None


def refuse_eager(reason: str) -> InputError:
    """Return the error for capture="on" and a step that cannot be captured."""
    return InputError(
        f"capture is 'on', but {reason}.",
        "a step that can be captured",
        "capture='auto', which goes on eagerly and says so",
    )


def step_note(words: str, *, captured: bool) -> Note:
    """Return the note on how steps run: as one CUDA graph, or eagerly."""
    return Note(f"step {words}", Topic.STEP, {"captured": captured, "how": words})


class CapturedStep:
    """Runs steps as replays of a CUDA graph where it can, else eagerly. See the module's text.

    Args:
        step: The eager step.
        feed: Where batches come from.
        update: Runs the batches that are not replayed.
        say: Called with a note when training continues eagerly.
        demanded: Whether that is an error instead.

    Attributes:
        reason: How steps run, and why.
        active: Whether steps are replayed now.
    """

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
        self._say = say
        self._demanded = demanded
        self._num_misfits = 0
        self.active = False
        self.reason = f"captured after {self._warm_up_steps} steps of warm-up"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._frozen: FrozenGroups | None = None
        self._static: Any = None
        self._loss: torch.Tensor | None = None
        self._num_warm = 0
        self._given_up = False
        self._num_checked = 0
        self._worst = 0.0
        self._generation = _generation(feed)

    def works(self) -> Iterator[Work]:
        """Yield an epoch's work. From a loader on the device it has indices only: the graph gathers the batch."""
        loader = self.feed.loader
        if not isinstance(loader, Loader) or loader.tier == "streamed" or self._given_up:
            yield from self.feed
            return
        for index in loader.index_batches():
            places = index.planned.positions
            several = self.step.parts.ranks.are_several
            together = index.planned.num_together if several else None
            yield Work(None, None, len(places), places, index=index, num_together=together)

    def run(self, work: Work) -> torch.Tensor:
        """Train on one batch; return its loss on the device."""
        if self._update.is_lowered and not self._given_up:
            self._give_up("memory ran out, and a batch that goes through in parts is not captured")
        full = self._is_full(work)
        if self._given_up or not full or not self._fits(work):
            return self._run_eagerly(work)
        if self._num_checked == CHECKED_REPLAYS and self._generation == _generation(self.feed):
            return self._run_captured(
                work
            )  # a replay allocates nothing, so it cannot run out of memory
        self._update.mark()
        try:
            return self._run_captured(work)
        except RuntimeError as error:
            if not self._update.survives or not is_oom(error):
                raise
            if self.step.parts.ranks.are_several:
                raise self._update.next_time() from error
            forget_frames(error)
        self.forget()
        self._update.restore()
        if not self._update.give_way():
            self._give_up("memory ran out while the step was being captured")
        return self._run_eagerly(work, again=True)

    def _run_captured(self, work: Work) -> torch.Tensor:
        if self._generation != _generation(self.feed):  # other ops, or the data has moved
            self.forget()
        if self._graph is None and self._num_warm < self._warm_up_steps:
            self._num_warm += 1
            return self._warm_up(work)
        self._set_static(work)
        if self._graph is None and not self._capture():
            return self._run_eagerly(work)
        assert self._frozen is not None
        change = self._frozen.find_change()
        if (
            change is not None
        ):  # such a number often changes at every step: a new graph would not last
            self._give_up(change)
            return self._run_eagerly(work)
        if self._num_checked < CHECKED_REPLAYS:
            return self._replay_and_check(work)
        assert self._graph is not None
        assert self._loss is not None
        self._graph.replay()
        return self._loss.clone()  # the next replay overwrites it

    # -- inside ----------------------------------------------------------------------------

    @property
    def _warm_up_steps(self) -> int:
        # DDP observes its first ten steps and rebuilds its buckets during them.
        return WARM_UP_STEPS_OF_RANKS if self.step.parts.ranks.joined else WARM_UP_STEPS

    def _is_full(self, work: Work) -> bool:
        """Whether the batch is full on every rank. All ranks must replay, or none: a graph contains collectives."""
        nominal, ranks = self.step.parts.nominal_batch, self.step.parts.ranks.world_size
        together = work.num_together
        return work.num_samples == nominal and (together is None or together == nominal * ranks)

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

    def _fits(self, work: Work) -> bool:
        """Whether the batch has the shapes that the graph was made for. A few misfits end capturing."""
        if self._static is None or _alike(self._static, _given(work)):
            return True
        self._num_misfits += 1
        if self._num_misfits == MOST_MISFITS:
            self._give_up("batches change their shape")
        return False

    def _opened(self, work: Work, again: bool) -> Work:
        """Return work with its batch, which is assembled now if there are only indices."""
        if work.index is None:
            return work
        if again and self.feed.augmentation is not None:
            self.feed.augmentation.seek(self.feed.loader.epoch, work.index.planned.step)
        inputs, targets = self.feed.unpack(self.feed.loader.assemble(work.index))
        return replace(work, inputs=inputs, targets=targets, index=None)

    def _set_static(self, work: Work) -> None:
        """Copy the batch, or its indices, to the addresses that the graph reads."""
        given = _given(work)
        if self._static is None:
            self._static = map_tensors(torch.clone, given)
        else:
            _copy(self._static, given)

    def _static_step(self) -> torch.Tensor:
        """Run what is captured: from the static tensors to the new weights."""
        if isinstance(self._static, torch.Tensor):
            inputs, targets = self.feed.unpack(self.feed.loader.assemble(self._static))
        else:
            inputs, targets = self._static
        loss = self.step.forward_backward(inputs, targets, 1.0)
        self.step.update(pieces=True)
        return loss

    def _run_as_if_captured(self, work: Work) -> torch.Tensor:
        """Run a step eagerly, with the algorithms that the model chooses during a capture."""
        opened = self._opened(work, again=False)
        with as_if_captured():
            loss = self.step.forward_backward(opened.inputs, opened.targets, 1.0)
        self.step.update(pieces=True)
        return loss

    def _warm_up(self, work: Work) -> torch.Tensor:
        """Train eagerly on a side stream, which CUDA requires before a capture."""
        stream = _side_stream(self.step.parts.device)
        current = torch.cuda.current_stream(self.step.parts.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._set_static(work)
            loss = self._static_step()
        current.wait_stream(stream)
        return loss

    def _capture(self) -> bool:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        generator, on_host = self._copy_generator(), quiet_host_rng(not self.feed.is_stoker)
        compact_recurrent(self.step.parts.model)
        self._frozen = FrozenGroups(self.step.parts.optimizer, self.step.parts.device)
        why = ""
        try:
            # thread_local: the feeder's threads call CUDA at the same time, which must not end the capture.
            stream = _side_stream(self.step.parts.device)
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                self._loss = self._static_step()
        except (RuntimeError, AssertionError, ValueError) as error:
            self._heal(generator, pool)
            if is_oom(error):
                raise
            first_line = str(error).strip().splitlines()[0].rstrip(".")
            why = f"the step cannot be captured ({first_line})"
        if on_host is not None and has_drawn(on_host):
            # The capture computed nothing: the eager step that follows must draw the same numbers. A graph
            # would repeat them at every replay.
            restore_rng(on_host)
            why = why or DRAWS_ON_HOST
        if not self.step.parts.ranks.all_of(not why):
            self._give_up(why or "the step cannot be captured (on another rank)")
            return False
        self._graph, self.active = graph, True
        return True

    def _copy_generator(self) -> Any:
        device = self.step.parts.device
        return torch.cuda.default_generators[device.index or 0].clone_state()

    def _heal(self, generator: Any, pool: Any) -> None:
        """Repair the generator and the allocator, which both still believe that a failed capture is going on.

        The generator would refuse to draw. The allocator would keep every tensor that another stream has
        used, such as a prefetched batch, until the process ends (torch 2.13 and before).
        """
        number = self.step.parts.device.index or 0
        with contextlib.suppress(RuntimeError):
            torch.cuda.default_generators[number].graphsafe_set_state(generator)
        with contextlib.suppress(
            RuntimeError, AttributeError
        ):  # it has ended, or torch has changed
            torch._C._cuda_endAllocateToPool(number, pool)
            torch._C._cuda_releasePool(number, pool)

    def _replay_and_check(self, work: Work) -> torch.Tensor:
        """Run the step eagerly and as a replay from the same state; keep the replay if they agree."""
        keep = _Snapshot(self)
        try:
            return self._compare(work, keep)
        except RuntimeError:
            keep.restore()  # nothing of the step remains, so that the caller can repeat it
            raise

    def _compare(self, work: Work, keep: _Snapshot) -> torch.Tensor:
        eager = self._outcome(lambda: self._run_eagerly(work))
        if self._update.is_lowered or self._generation != _generation(self.feed):
            # The eager step ran out of memory and freed some: the tensors that the graph reads are gone.
            return eager[0]
        keep.restore()
        first = away = self._agreed(difference(eager, [self._replay(), *self._state()]))
        if 1.0 < away < math.inf:  # infinite: a tensor or a NaN exists in one way only
            away = self._compare_again(work, keep)
        if away <= 1.0:
            self._note_agreement(away)
            assert self._loss is not None
            return self._loss.clone()
        keep.restore()
        self._give_up(
            f"a replayed step differed from the eager one by {first:.3g} times the tolerance"
        )
        return self._run_eagerly(work)

    def _compare_again(self, work: Work, keep: _Snapshot) -> float:
        """Return the difference beyond what repeated steps differ by, with the capture's own algorithms if needed.

        Leaves the weights of a replay. Every rank takes the same turns, because a step contains collectives.
        """
        keep.restore()
        replayed = self._outcome(self._replay)
        keep.restore()
        between_replays = spread(replayed, [self._replay(), *self._state()])
        for run in (self._run_eagerly, self._run_as_if_captured):
            keep.restore()
            one = self._outcome(functools.partial(run, work))
            keep.restore()
            between_eager = spread(one, [run(work), *self._state()])
            if self._update.is_lowered or self._generation != _generation(self.feed):
                return math.inf  # memory ran out: the tensors that the graph reads are gone
            noise = torch.maximum(between_eager, between_replays)
            blind = is_too_noisy(one, noise)
            away = self._agreed(math.inf if blind else difference(one, replayed, noise))
            if away <= 1.0:
                break
        else:
            return away
        if run == self._run_as_if_captured:
            keep.restore()
            inputs = self._opened(work, again=False).inputs
            alike = is_same_function(self.step.parts, inputs)
            away = self._agreed(away if alike else math.inf)
        keep.restore()
        self._replay()
        return away

    def _outcome(self, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """Run a step; return copies of its loss and of everything that it changed."""
        loss = run().clone()
        return [loss, *(tensor.detach().clone() for tensor in self._state())]

    def _state(self) -> list[torch.Tensor]:
        return list(state_tensors(self.step.parts))

    def _replay(self) -> torch.Tensor:
        assert self._graph is not None
        assert self._loss is not None
        self._graph.replay()
        return self._loss

    def _agreed(self, difference: float) -> float:
        """Return the largest difference of all ranks: they must decide alike."""
        return float(max(self.step.parts.ranks.gather(difference)))

    def _note_agreement(self, difference: float) -> None:
        self._num_checked += 1
        self._worst = max(self._worst, difference)
        if self._num_checked == CHECKED_REPLAYS:
            self.reason = (
                f"captured after {self._warm_up_steps} steps of warm-up; the first {CHECKED_REPLAYS} replays "
                f"agreed with eager steps from the same state ({self._worst:.2g} of the tolerance)"
            )

    def _give_up(self, reason: str) -> None:
        """Continue eagerly from here on; with capture="on" raise the reason as an error."""
        self.forget()
        self._given_up, self.reason = True, f"eager: {reason}"
        self._update.drop()
        if self._demanded:
            raise refuse_eager(reason)
        self._say(step_note(self.reason, captured=False))

    def forget(self) -> None:
        """Drop the graph; the next steps warm up and capture again. For when its tensors or kernels changed."""
        self._graph, self._static, self._loss = None, None, None
        self._frozen = None
        self._num_warm = self._num_checked = 0
        self._worst, self.active = 0.0, False
        self._generation = _generation(self.feed)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for warm-up and capture; one per device.

    Torch keeps a cuBLAS workspace for every stream that ever ran a matrix product, 32 MB on an H200. A new
    stream for every warm-up would add up to a gigabyte.
    """
    return torch.cuda.Stream(device)


class _Snapshot:
    """A copy of everything that a step changes, to undo it."""

    def __init__(self, captured: CapturedStep) -> None:
        device = captured.step.parts.device
        self._device = device
        self._step = captured.step
        self._parts = captured.step.parts
        self._owners = list(state_tensors(self._parts))
        self._tensors = [tensor.detach().clone() for tensor in self._owners]
        self._states = {key: dict(state) for key, state in self._parts.optimizer.state.items()}
        self._num_skipped = captured.step.num_skipped
        self._rng = torch.cuda.get_rng_state(device), torch.get_rng_state()
        self._augmentation = cast(Any, captured.feed.augmentation)
        self._draws: Any = None
        if self._augmentation is not None:
            self._draws = self._augmentation.state_dict()

    def restore(self) -> None:
        """Undo what happened since the snapshot. In place: the graph keeps its addresses."""
        self._drop_new_states()
        owners = list(state_tensors(self._parts))
        if len(owners) != len(
            self._owners
        ):  # a buffer was added or removed: the lists do not match
            owners = self._owners
        with torch.no_grad():
            for tensor, kept in zip(owners, self._tensors, strict=True):
                tensor.copy_(kept)
        self._step._skipped += self._num_skipped - self._step.num_skipped
        torch.cuda.set_rng_state(self._rng[0], self._device)
        torch.set_rng_state(self._rng[1])
        if self._draws is not None:
            self._augmentation.load_state_dict(self._draws)

    def _drop_new_states(self) -> None:
        """Remove optimizer states that did not exist before: a step creates them for a parameter's first update."""
        states = self._parts.optimizer.state
        for key in list(states):
            if key not in self._states:
                del states[key]
        for key, kept in self._states.items():
            states[key].clear()
            states[key].update(kept)


def _generation(feed: Feed) -> tuple[int, int]:
    """Return a value that changes when the graph's kernels, or the tensors that they read, are outdated."""
    ring_number = feed.loader.ring_number if feed.is_stoker else 0
    return int(getattr(feed.augmentation, "generation", 0)), ring_number


def _given(work: Work) -> Any:
    return work.index.indices if work.index is not None else (work.inputs, work.targets)


def _alike(one: Any, other: Any) -> bool:
    """Whether two nested values have the same structure, shapes and types, and equal constants."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor)
        return same and one.shape == other.shape and one.dtype == other.dtype
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_alike(value, other[name]) for name, value in one.items())
        )
    if isinstance(one, tuple | list):
        same = isinstance(other, type(one)) and len(one) == len(other)
        return same and all(map(_alike, one, other))
    return is_equal(one, other)


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(source, non_blocking=True)
    elif isinstance(target, dict):
        for name, item in target.items():
            _copy(item, source[name])
    elif isinstance(target, tuple | list):
        for item, other in zip(target, source, strict=True):
            _copy(item, other)
