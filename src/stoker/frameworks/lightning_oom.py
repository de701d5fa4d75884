"""Out-of-memory recovery in Lightning: the levels of `train/oom.py`, in Lightning's loop.

Enters: a Lightning `Trainer` with automatic optimization, in one process. Leaves: the same updates, with batches
in smaller passes, or activations recomputed, if the whole did not fit. Costs: the batches of one update are held
until it is done, and the states of torch's generators and of the model's buffers are copied for each: 0.1 ms of
the host per step.

When a `training_step` or its backward pass runs out of memory, the gradients of the update so far are dropped,
generators and buffers are restored, the run goes one level down and the batches are run again
(`train/update.py`). A pass is weighted by its samples, so the update is that of the whole batch if
`training_step` returns the mean over its samples.

Not covered: memory that runs out in the optimizer's step, or while a batch is built; manual optimization, whose
steps only the module knows; several processes, which would have to run out together. Values that a module logs
are counted once per pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch

from stoker.frameworks.adapted import AdaptedLoader, count_samples
from stoker.frameworks.lightning_watch import Closure, ClosureResult, pl, require_adapted, tell
from stoker.loader.batch import Batch
from stoker.report import Note
from stoker.train.batches import Work
from stoker.train.oom import Remembered
from stoker.train.precision import PrecisionChoice
from stoker.train.step import Step, StepParts
from stoker.train.update import Update


class OomLadderCallback(pl.Callback):
    """Repeats training steps with less memory when the device runs out of it; see the module's text.

    Args:
        remembered: Where settings that fitted are kept between runs; the user's cache folder by default.

    Attributes:
        notes: Every level that the run went down to, or why the callback does nothing.
    """

    def __init__(self, remembered: Remembered | None = None) -> None:
        self.notes: list[str] = []
        self._remembered = remembered
        self._update: Update | None = None
        self._loop: Any = None

    @property
    def window(self) -> Update | None:
        """The update in progress, with its memory level; None before the first step, or if the callback is off."""
        return self._update

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace Lightning's factory of closures, if this trainer is supported."""
        require_adapted(trainer)
        reason = _stands_aside(trainer, pl_module)
        if reason is not None:
            self._tell(trainer, Note(f"out-of-memory recovery is off: {reason}"))
            return
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        make = self._loop._make_closure

        def make_closure(kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> Closure:
            plain: Closure = make(kwargs, optimizer, batch_idx)
            batch = kwargs.get("batch")  # missing if the module iterates its batches itself
            if not count_samples(batch) or plain._backward_fn is None:
                return plain
            update = self._update or self._make_update(trainer, pl_module, batch)
            return _SurvivingClosure(plain, update, _Call(self._loop, kwargs, plain._backward_fn))

        self._loop._make_closure = make_closure

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Release the batches of an update after it."""
        if self._update is not None and not trainer.fit_loop._should_accumulate():
            self._update.finish()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore Lightning's factory of closures."""
        if self._loop is not None:
            del self._loop._make_closure
        self._loop = self._update = None

    def on_exception(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        exception: BaseException,
    ) -> None:
        """Restore Lightning's factory too: Lightning does not call `teardown` after an error."""
        self.teardown(trainer, pl_module, "fit")

    def _make_update(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> Update:
        loader = trainer.train_dataloader
        nominal = getattr(loader, "batch_size", None) or count_samples(batch)
        parts = StepParts(
            module,
            _no_criterion,
            trainer.optimizers[0],
            cast(PrecisionChoice, SimpleNamespace(name=str(trainer.precision))),
            getattr(trainer.precision_plugin, "scaler", None)
            or torch.amp.GradScaler("cpu", enabled=False),
            module.device,
            None,
            int(nominal),
            trainer.accumulate_grad_batches,
        )
        chunked = isinstance(loader, AdaptedLoader) and loader.loader.tier == "chunked"
        self._update = Update(
            _LightningStep(parts),
            True,
            lambda note: self._tell(trainer, note),
            loader.loader.shrink if chunked else None,
            self._remembered,
        )
        return self._update

    def _tell(self, trainer: pl.Trainer, note: Note) -> None:
        self.notes.append(note.text)
        tell(trainer, note)


def _stands_aside(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Return why this trainer is not supported; None if it is."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    hooks = (
        (loop, "_make_closure"),
        (loop, "_training_step"),
        (trainer.fit_loop, "_should_accumulate"),
    )
    if not all(hasattr(owner, name) for owner, name in hooks):
        return f"Lightning {pl.__version__} makes its closures in another way than 2.6"
    if not module.automatic_optimization:
        return "the module optimizes by hand, and only it knows what a step is"
    if trainer.world_size > 1:
        return f"{trainer.world_size} processes would have to run out of memory together"
    if trainer.strategy.handles_gradient_accumulation:
        return f"{type(trainer.strategy).__name__} accumulates gradients by itself"
    return None


def _no_criterion(*_: Any) -> torch.Tensor:
    raise AssertionError("the loss is the module's own")


class _Call:
    """One call of `training_step`. Not a dataclass, whose tensors would be cut with the batch."""

    def __init__(
        self, loop: Any, kwargs: Mapping[str, Any], backward: Callable[[torch.Tensor], None]
    ) -> None:
        self.kwargs = kwargs
        self.output: ClosureResult | None = None
        self._loop, self._backward = loop, backward

    def run(self, batch: Any, weight: float) -> torch.Tensor:
        """Run forward and backward passes of a batch, or a part of one; return its loss as Lightning scales it."""
        self.output = self._loop._training_step({**self.kwargs, "batch": batch})
        loss: torch.Tensor | None = self.output.closure_loss
        if loss is None:  # the module skips this batch
            return torch.zeros((), device=self._loop.trainer.strategy.root_device)
        self._backward(loss if weight == 1.0 else loss * weight)
        return loss.detach()


class _LightningStep(Step):
    """A `Step` whose forward and backward passes are Lightning's; Lightning also steps the optimizer."""

    def begin_batch(self, num_samples: int, *_: Any, **__: Any) -> float:
        """Count a batch; Lightning has already divided its loss by the batches of an update."""
        self.accumulation.num_batches += 1
        self.accumulation.num_samples += num_samples
        return 1.0

    def forward_backward(
        self, inputs: Any, targets: Any, weight: float, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Run a batch or a part of one; `targets` has the call that it belongs to."""
        call: _Call = targets[0]
        return call.run(inputs, weight)

    def finish_update(self) -> None:
        """Reset the counts; Lightning has stepped the optimizer."""
        self.accumulation.close()


class _SurvivingClosure(Closure):
    """Lightning's closure for one batch, as part of an `Update`."""

    def __init__(self, plain: Closure, update: Update, call: _Call) -> None:
        super().__init__(plain._step_fn, plain._backward_fn, plain._zero_grad_fn)
        self._update, self._call = update, call

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Run forward and backward of one batch, in as many passes as fit."""
        if self._zero_grad_fn is not None:  # the first batch of an update
            self._update.drop()
            self._zero_grad_fn()
        call = self._call
        batch = call.kwargs["batch"]
        own = batch if isinstance(batch, Batch) else None
        positions = None if own is None else own.positions
        # The call is not a tensor, so every part of the batch gets it as it is.
        work = Work(batch, (call,), count_samples(batch), positions, own)
        loss = self._update.add(work)
        output = call.output
        assert output is not None
        if output.closure_loss is None or not self._update.is_lowered:
            return output
        return ClosureResult(loss)
