"""The batches of one update, run again on a lower rung when memory runs out.

Enters: `Work`, batch by batch. Leaves: their losses, and the update at the window's end. Costs: per window
the state of torch's random generators and of the model's buffers; the batches of a window are held until its
update.

When memory runs out, in the forward pass, the backward pass or the update, everything of the window is
dropped, generators and buffers go back to where they were, one rung of the ladder (`oom.py`) is taken,
and the window is run again: the weights after it are those of a run that had the memory. The same where a
batch cannot be built.

Among several ranks nothing can be run again, for the others are in the middle of an exchange: the rung is
remembered, the run ends with it, and the next start begins there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch

from stoker.errors import EXIT_OURS, StokerError
from stoker.plan import FALLBACK_SHARE, GPU_SHARE
from stoker.report import Note, Topic
from stoker.train.activations import checkpoint_activations, choose_blocks
from stoker.train.batches import Work
from stoker.train.buffers import Buffers, Copies
from stoker.train.oom import (
    Circumstances,
    Footing,
    Remembered,
    Rung,
    bytes_in_use,
    cut,
    exhausted,
    forget_frames,
    is_oom,
    let_go,
    next_rung,
    sign_model,
)
from stoker.train.step import Step
from stoker.units import format_bytes

_T = TypeVar("_T")
_Generators = tuple[torch.Tensor, tuple[int, int] | None]
"""The host's state, and the device's seed and offset."""


class MemoryRanOutError(StokerError, RuntimeError):
    """Memory ran out where the ladder cannot be climbed down at once."""

    exit_code = EXIT_OURS


class Window:
    """Adds batches to a step and survives running out of memory.

    Args:
        step: What computes.
        survive: Whether to climb down the ladder; False lets the error through.
        say: Told of every rung.
        shrink: Keeps a share of the chunks on the device and returns the bytes given back; None where
            the data is not chunked.
        remembered: Where settings that fitted are kept.
    """

    def __init__(
        self,
        step: Step,
        survive: bool,
        say: Callable[[Note], object],
        shrink: Callable[[float], int] | None = None,
        remembered: Remembered | None = None,
    ) -> None:
        parts = step.parts
        self.step = step
        self.survives = survive
        self._say = say
        self._shrink = shrink
        self._remembered = remembered or Remembered()
        self._asked = Footing(
            parts.nominal_batch,
            parts.nominal_batch,
            parts.accumulation_steps,
            None if shrink is None else GPU_SHARE,
            can_checkpoint=bool(choose_blocks(parts.model).names),
        )
        self.footing = self._asked
        self._works: list[Work] = []
        self._in_update = False
        self._said_whole = False
        self._buffers = Buffers(parts.model)
        self._before: tuple[_Generators, Copies] | None = None
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
        """Whether a rung was taken that changes the step, by this run or one that is remembered."""
        asked, now = self._asked, self.footing
        return now.pass_size != asked.pass_size or now.is_checkpointed != asked.is_checkpointed

    def mark(self) -> None:
        """Remember generators, buffers and carried state, for `restore`."""
        if self.survives:
            self._before = self._generators(), self._buffers.copy()
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

    def survive(self, error: RuntimeError) -> None:
        """Take a rung for an error beside the window, as in building a batch; then try that again.

        Raises:
            RuntimeError: The error itself, where it is another one or the ladder is not to be used.
            InputError: There is no rung left.
        """
        if not self.survives or not is_oom(error):
            raise error
        if self.step.parts.ranks.are_several:
            raise self.next_time() from error
        forget_frames(error)
        self._climb_down()
        if self._works:
            self._replay()

    def obtain(self, get: Callable[[bool], _T]) -> _T:
        """Return what `get` returns, taking rungs as long as memory runs out in it.

        Args:
            get: Called with False, and again with True.
        """
        again = False
        while True:
            try:
                return get(again)
            except RuntimeError as error:
                self.survive(error)
            again = True

    def give_way(self) -> bool:
        """Take the rung that the data gives, if it is still there; the step stays as it is.

        Not among several ranks: one whose data has moved would capture its step anew, and the others not.
        """
        rung = next_rung(self.footing)
        if not self.survives or rung is None or rung.kind != "chunk share":
            return False
        if self.step.parts.ranks.are_several:
            return False
        before = bytes_in_use(self.step.parts.device)
        let_go(self.step.parts.device)
        return self._take(rung, before)

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
        if (
            not self.is_lowered
            or work.num_samples <= self.footing.pass_size
            or self._is_whole(work)
        ):
            return self.step.add(
                work.inputs,
                work.targets,
                work.num_samples,
                work.reset,
                work.rows,
                work.num_together,
            )
        weight = self.step.begin_batch(work.num_samples, work.num_together)
        total = torch.zeros((), device=self.step.parts.device)
        left = work.num_samples
        for part in _passes(work, self.footing.pass_size):
            share = part.num_samples / work.num_samples
            left -= part.num_samples
            exchange = not left and self.step.window.is_complete
            total += share * self.step.forward_backward(
                part.inputs, part.targets, weight * share, exchange=exchange
            )
        return total

    def _is_whole(self, work: Work) -> bool:
        """Whether a batch cannot go through in parts; says so once."""
        if work.can_cut:
            return False
        if not self._said_whole:
            self._said_whole = True
            self._say(
                Note(
                    f"batches go through whole, not {self.footing.pass_size} samples at once: not every "
                    "tensor has a row per sample, or rows carry state"
                )
            )
        return True

    def _guarded(self, run: Callable[[], Any]) -> Any:
        """Return what `run` returns, or None after a rung was taken."""
        try:
            return run()
        except RuntimeError as error:
            if not self.survives or not is_oom(error):
                raise
            if self.step.parts.ranks.are_several:
                raise self.next_time() from error
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
            generator = _device_generator(self.step.parts.device)
            generator.manual_seed(on_device[0])
            generator.set_offset(on_device[1])
        self._buffers.put_back(buffers)

    def _generators(self) -> _Generators:
        """What a forward pass draws from; Python's and numpy's generators would cost more than they give."""
        device = self.step.parts.device
        if device.type != "cuda":
            return torch.get_rng_state(), None
        generator = _device_generator(device)
        # Two numbers say it all; the state as a tensor would cost as much as five kernels' launches.
        return torch.get_rng_state(), (generator.initial_seed(), generator.get_offset())

    def _climb_down(self) -> None:
        """Take the next rung that gives anything."""
        before = bytes_in_use(self.step.parts.device)
        self.step.drop_window()
        let_go(self.step.parts.device)
        can_cut = all(work.can_cut for work in self._works)
        while True:
            rung = next_rung(self.footing, can_cut)
            if rung is None:
                if self._circumstances is not None:
                    self._remembered.forget(self._circumstances)
                raise exhausted(self.footing, can_cut)
            if self._take(rung, before):
                return

    def next_time(self) -> MemoryRanOutError:
        """Return the error that ends this rank: the others wait in the exchange, so nothing can be run again.

        The rung is remembered, and the next start begins on it: torchrun's, or the user's.
        """
        rung = next_rung(self.footing, all(work.can_cut for work in self._works))
        if rung is not None and self._circumstances is not None:
            self._remembered.remember(self._circumstances, self._asked, self.footing.on(rung))
        return MemoryRanOutError(
            "this rank's memory ran out, and the other ranks wait for it.",
            "a batch whose share fits on every rank",
            "the same command with --resume"
            + (
                f"; it begins a rung lower: {rung.reason}"
                if rung is not None
                else ", with a smaller batch"
            ),
        )

    def _take(self, rung: Rung, before_bytes: int) -> bool:
        """Take a rung, say and remember it; False where it gave nothing."""
        freed = self._apply(self.footing.on(rung))
        if rung.kind == "chunk share" and not freed:
            return False
        data = f" ({format_bytes(freed)} of chunks given back)" if freed else ""
        after_bytes = bytes_in_use(self.step.parts.device)
        self._say(
            Note(
                f"memory ran out with {format_bytes(before_bytes)} in use "
                f"({format_bytes(after_bytes)} after letting go): {rung.reason}{data}",
                Topic.MEMORY,
                {"before_bytes": before_bytes, "after_bytes": after_bytes, "rung": rung.kind},
            )
        )
        if self._circumstances is not None:
            self._remembered.remember(self._circumstances, self._asked, self.footing)
        return True

    def _apply(self, footing: Footing) -> int:
        """Stand on a lower footing; return the bytes that chunks gave back."""
        before, self.footing = self.footing, footing
        if footing.is_checkpointed and not before.is_checkpointed:
            checkpoint_activations(self.step.parts.model)
        if self._shrink is None or footing.chunk_share == before.chunk_share:
            return 0
        return self._shrink(FALLBACK_SHARE / GPU_SHARE)

    def _recall(self) -> None:
        """Begin where an earlier run of the same model on the same GPU ended; ranks on the lowest rung of all."""
        parts = self.step.parts
        free = torch.cuda.mem_get_info(parts.device)[0]
        signature = sign_model(parts.model, parts.precision.name, type(parts.optimizer).__name__)
        name = torch.cuda.get_device_name(parts.device)
        self._circumstances = Circumstances.of(signature, name, free)
        known = self._lowest(self._remembered.recall(self._circumstances, self._asked))
        if known is None:
            return
        freed = self._apply(known)
        self._say(
            Note(
                f"remembered from an earlier run: {known.pass_size} samples at once"
                + (", activations recomputed" if known.is_checkpointed else "")
                + (f", {format_bytes(freed)} of chunks given back" if freed else ""),
                Topic.MEMORY,
                asdict(known),
            )
        )

    def _lowest(self, own: Footing | None) -> Footing | None:
        """Return the lowest footing of all ranks: their passes and captures must be the same."""
        ranks = self.step.parts.ranks
        if not ranks.are_several:
            return own
        known = [found for found in ranks.gather(None if own is None else asdict(own)) if found]
        if not known:
            return None
        return min(
            (Footing(**found) for found in known),
            key=lambda each: (each.pass_size, not each.is_checkpointed, each.chunk_share or 0.0),
        )


def _device_generator(device: torch.device) -> torch.Generator:
    number = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[number]


def _passes(work: Work, pass_size: int) -> Iterator[Work]:
    start = 0
    for count in cut(work.num_samples, pass_size):
        yield work.part(start, start + count)
        start += count
