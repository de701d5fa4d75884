"""One update: its batches are run again with less memory when the device runs out of memory.

Enters: `Work`, batch by batch. Leaves: their losses, and the optimizer's step after the last one. Costs: per
update a copy of torch's random generator states and of the model's buffers. The batches of an update are
held until it is done.

Contract:

    success        the weights change once per update, and the batches are released
    out of memory  in the forward pass, the backward pass or the optimizer's step: the gradients of this update
                   are dropped, random generators, buffers and recurrent state are restored, the run goes one
                   level down (`oom.py`), and the same batches are run again. The weights are those of a run
                   that had enough memory. The same happens when building a batch runs out of memory
    another error  it is raised; the caller drops the update
    several ranks  nothing can be repeated, because the other ranks wait inside a collective. The lower level is
                   written to the user's cache, this rank ends with an error, and the next start uses that level
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from stoker.errors import EXIT_OURS, StokerError
from stoker.plan import FALLBACK_SHARE, GPU_SHARE
from stoker.report import Note, Topic
from stoker.train.activations import Buffers, Copies, checkpoint_activations, choose_blocks
from stoker.train.batches import Work, iterate_tensors
from stoker.train.oom import (
    Circumstances,
    LowerLevel,
    MemoryLevel,
    Remembered,
    bytes_in_use,
    cut,
    exhausted,
    forget_frames,
    is_oom,
    let_go,
    next_level,
    sign_model,
)
from stoker.train.step import Step
from stoker.units import format_bytes

_T = TypeVar("_T")
_Generators = tuple[torch.Tensor, tuple[int, int] | None]
"""State of the host's generator; seed and offset of the device's generator, None on a CPU."""


class MemoryRanOutError(StokerError, RuntimeError):
    """Memory ran out where the update cannot be repeated in this process."""

    exit_code = EXIT_OURS


class Update:
    """Adds batches to a step, and repeats them with less memory when the device runs out of memory.

    Args:
        step: Computes forward pass, backward pass and update.
        survive: Whether to go down a level when memory runs out; False raises the error.
        say: Called with a note each time the run goes down a level.
        shrink: Keeps a share of the chunks on the device and returns the bytes given back; None where
            the data is not chunked.
        remembered: The cache of levels that fitted in earlier runs.
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
        self._asked = MemoryLevel(
            parts.nominal_batch,
            parts.nominal_batch,
            parts.accumulation_steps,
            None if shrink is None else GPU_SHARE,
            can_checkpoint=bool(choose_blocks(parts.model).names),
        )
        self.level = self._asked
        self._works: list[Work] = []
        self._said_whole = False
        self._buffers = Buffers(parts.model)
        self._before: tuple[_Generators, Copies] | None = None
        self._recurrent_before: dict[str, torch.Tensor] | None = None
        self._circumstances: Circumstances | None = None
        if survive and parts.device.type == "cuda":
            self._recall()

    def add(self, work: Work) -> torch.Tensor:
        """Add a batch to the update; return its loss, on the device. Does not wait for the device.

        A batch that is too large for the memory level goes through in passes, each weighted by its share of
        the batch.
        """
        self._keep(work)
        return self._run([work])

    def count(self, work: Work) -> None:
        """Add a batch whose gradients the caller computes, as a replay does; `repeat` would compute them here."""
        self._keep(work)
        self.step.begin_batch(work.num_samples, work.num_together)

    def repeat(self) -> torch.Tensor:
        """Run all batches of the update again, eagerly, from the last `mark`; return the loss of the last one."""
        self.restore()
        return self._run(self._works)

    @property
    def is_lowered(self) -> bool:
        """Whether the step differs from the configured one, in this run or as remembered from an earlier one."""
        asked, now = self._asked, self.level
        return now.pass_size != asked.pass_size or now.is_checkpointed != asked.is_checkpointed

    def mark(self) -> None:
        """Save the states of random generators, the buffers and the recurrent state, for `restore`."""
        if self.survives:
            self._before = self._generators(), self._buffers.copy()
            recurrent = self.step.parts.recurrent
            self._recurrent_before = None if recurrent is None else recurrent.state_dict()

    def drop(self) -> None:
        """Drop the batches of this update and their gradients."""
        self._works = []
        self.step.drop_update()

    def finish(self) -> None:
        """Step the optimizer with the gradients so far; does nothing when no batch was added."""
        while True:
            try:
                self.step.finish_update()
            except RuntimeError as error:
                self._check_survives(error, updating=True)
            else:
                self._works = []
                return
            self._go_down()
            self.repeat()

    def survive(self, error: RuntimeError) -> None:
        """Go down a level after an error outside the step, such as in building a batch; the caller then retries.

        Raises:
            RuntimeError: The error itself, if memory was not its cause or `survive` is off.
            InputError: There is no lower level.
        """
        self._check_survives(error)
        self._go_down()
        if self._works:
            self.repeat()

    def obtain(self, get: Callable[[bool], _T]) -> _T:
        """Call `get` until it does not run out of memory; return its result. Goes down a level each time.

        Args:
            get: Called with True if this is a repeated call.
        """
        again = False
        while True:
            try:
                return get(again)
            except RuntimeError as error:
                self.survive(error)
            again = True

    def give_way(self) -> bool:
        """Free device memory by keeping fewer chunks; return False if that is not possible. The step stays as it is.

        With several ranks it returns False: the rank whose data moved would capture its step again, and the
        others would not.
        """
        lower = next_level(self.level)
        if not self.survives or lower is None or lower.kind != "chunk share":
            return False
        if self.step.parts.ranks.are_several:
            return False
        before = bytes_in_use(self.step.parts.device)
        let_go(self.step.parts.device)
        return self._take(lower, before)

    # -- inside ----------------------------------------------------------------------------

    def _keep(self, work: Work) -> None:
        """Keep a batch until the update is done; before the first one, save the state."""
        if not self._works:
            self.mark()
        self._works.append(work)

    def _run(self, works: list[Work]) -> torch.Tensor:
        """Run batches; return the loss of the last one.

        Each time memory runs out, all batches of the update are run again, one level lower.
        """
        step = self.step
        while True:
            try:
                for work in works:
                    weight = step.begin_batch(work.num_samples, work.num_together)
                    passes = self._passes(work)
                    losses = []
                    for part in passes:
                        share = part.num_samples / work.num_samples
                        exchange = part is passes[-1] and step.accumulation.is_complete
                        loss = step.forward_backward(
                            part.inputs,
                            part.targets,
                            weight * share,
                            part.reset,
                            part.rows,
                            exchange,
                        )
                        losses.append(loss if share == 1.0 else share * loss)
                return losses[0] if len(losses) == 1 else torch.stack(losses).sum()
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                if isinstance(error, StokerError):
                    raise
                if not isinstance(error, RuntimeError) or not is_oom(error):
                    error.add_note(self._describe(works[-1]))
                    raise
                self._check_survives(error)
            # Outside of the handler, the error is released, and with it the tensors of its frames.
            self._go_down()
            self.restore()
            works = self._works

    def _describe(self, work: Work) -> str:
        """Describe the batch of a step that raised: torch's messages name tensors inside the model, not the batch."""

        def told(value: Any) -> str:
            kinds = [f"{str(t.dtype)[6:]} {tuple(t.shape)}" for t in iterate_tensors(value)]
            return ", ".join(kinds) or type(value).__name__

        parameters = {str(p.dtype)[6:] for p in self.step.parts.model.parameters()}
        halves = {"bfloat16", "float16"} & parameters
        in_float32 = any(t.dtype == torch.float32 for t in iterate_tensors(work.inputs))
        cast = ""
        if halves and in_float32:
            pair, to = self.step.parts.pair_words(), f".to(torch.{min(halves)})"
            cast = (
                f" Weights of {min(halves)} take no float32 inputs: precision='bf16' casts them in every layer; "
                "without it, "
            )
            cast += (
                f"{to} in unpack= does."
                if pair is None
                else f"unpack=lambda batch: ({pair[0]}{to}, {pair[1]}) does."
            )
        return (
            f"The step was given inputs {told(work.inputs)} and targets {told(work.targets)}; the model's parameters "
            f"are {', '.join(sorted(parameters))}. Where types or shapes do not fit, unpack= of the Trainer converts "
            "them (.float(), .long(), .reshape); drop_last=True of the Loader leaves a short last batch out."
            f"{cast}"
        )

    def _passes(self, work: Work) -> list[Work]:
        """Return the parts of a batch that go through the model one after the other; usually the whole batch."""
        if not self.is_lowered or work.num_samples <= self.level.pass_size:
            return [work]
        if work.can_cut:
            sizes = cut(work.num_samples, self.level.pass_size)
            ends = list(itertools.accumulate(sizes))
            return [work.part(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        if not self._said_whole:
            self._said_whole = True
            self._say(
                Note(
                    f"batches go through whole, not {self.level.pass_size} samples at once: not every "
                    "tensor has a row per sample, or rows carry state"
                )
            )
        return [work]

    def _check_survives(self, error: RuntimeError, *, updating: bool = False) -> None:
        """Return if the update can be repeated with less memory after this error; otherwise raise."""
        if not self.survives or not is_oom(error):
            raise error
        if self.step.parts.ranks.are_several:
            raise self.next_time() from error
        # An optimizer that is not fused updates parameter by parameter: some may be updated already.
        if updating and not self.step.guarded:
            error.add_note(
                "in the update of an optimizer that may have changed some weights already: resume "
                "from the last checkpoint with a smaller batch, or use torch.optim.AdamW"
            )
            raise error
        forget_frames(error)

    def restore(self) -> None:
        """Go back to the last `mark`; gradients are dropped."""
        assert self._before is not None
        self.step.drop_update()
        if self.step.parts.recurrent is not None:
            self.step.parts.recurrent.load_state_dict(self._recurrent_before)
        (on_host, on_device), buffers = self._before
        torch.set_rng_state(on_host)
        if on_device is not None:
            generator = _device_generator(self.step.parts.device)
            generator.manual_seed(on_device[0])
            generator.set_offset(on_device[1])
        self._buffers.put_back(buffers)

    def _generators(self) -> _Generators:
        """Return the states of the generators that a forward pass draws from.

        Python's and numpy's generators are left out: copying them takes time in every update, and few models draw
        from them.
        """
        device = self.step.parts.device
        if device.type != "cuda":
            return torch.get_rng_state(), None
        generator = _device_generator(device)
        # Seed and offset are the whole state. Asking for it as a tensor costs as much as five kernel launches.
        return torch.get_rng_state(), (generator.initial_seed(), generator.get_offset())

    def _go_down(self) -> None:
        """Go down to the next level that frees memory."""
        before = bytes_in_use(self.step.parts.device)
        self.step.drop_update()
        let_go(self.step.parts.device)
        can_cut = all(work.can_cut for work in self._works)
        while True:
            lower = next_level(self.level, can_cut)
            if lower is None:
                if self._circumstances is not None:
                    self._remembered.forget(self._circumstances)
                raise exhausted(self.level, can_cut)
            if self._take(lower, before):
                return

    def next_time(self) -> MemoryRanOutError:
        """Return the error that ends this rank: the other ranks wait inside a collective, so nothing can be repeated.

        The lower level is written to the cache; the next start, by torchrun or by the user, uses it.
        """
        lower = next_level(self.level, all(work.can_cut for work in self._works))
        if lower is not None and self._circumstances is not None:
            self._remembered.remember(self._circumstances, self._asked, lower.level)
        return MemoryRanOutError(
            "this rank's memory ran out, and the other ranks wait for it.",
            "a batch whose share fits on every rank",
            "the same command with --resume"
            + (
                f"; it begins one level lower: {lower.reason}"
                if lower is not None
                else ", with a smaller batch"
            ),
        )

    def _take(self, lower: LowerLevel, before_bytes: int) -> bool:
        """Go to a lower level, note it and write it to the cache; return False if it freed nothing."""
        freed = self._apply(lower.level)
        if lower.kind == "chunk share" and not freed:
            return False
        data = f" ({format_bytes(freed)} of chunks given back)" if freed else ""
        after_bytes = bytes_in_use(self.step.parts.device)
        self._say(
            Note(
                f"memory ran out with {format_bytes(before_bytes)} in use "
                f"({format_bytes(after_bytes)} after letting go): {lower.reason}{data}",
                Topic.MEMORY,
                # "rung" is the field's name in run logs that exist.
                {"before_bytes": before_bytes, "after_bytes": after_bytes, "rung": lower.kind},
            )
        )
        if self._circumstances is not None:
            self._remembered.remember(self._circumstances, self._asked, self.level)
        return True

    def _apply(self, level: MemoryLevel) -> int:
        """Make `level` the current one; return the bytes that chunks gave back."""
        before, self.level = self.level, level
        if level.is_checkpointed and not before.is_checkpointed:
            checkpoint_activations(self.step.parts.model)
        if self._shrink is None or level.chunk_share == before.chunk_share:
            return 0
        return self._shrink(FALLBACK_SHARE / GPU_SHARE)

    def _recall(self) -> None:
        """Begin at the level that an earlier run of this model on such a GPU needed; all ranks at the lowest one."""
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

    def _lowest(self, own: MemoryLevel | None) -> MemoryLevel | None:
        """Return the lowest level of all ranks: their passes and captures must be the same."""
        ranks = self.step.parts.ranks
        if not ranks.are_several:
            return own
        known = [found for found in ranks.gather(None if own is None else asdict(own)) if found]
        if not known:
            return None
        return min(
            (MemoryLevel(**found) for found in known),
            key=lambda each: (each.pass_size, not each.is_checkpointed, each.chunk_share or 0.0),
        )


def _device_generator(device: torch.device) -> torch.Generator:
    number = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[number]
