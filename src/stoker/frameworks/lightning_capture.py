"""Two callbacks that replace a part of Lightning's training loop: steps as one CUDA graph, steps with less memory.

Enters: a Lightning `Trainer` with automatic optimization, in one process.

`CaptureCallback` (over `stoker.capture`, on a GPU) leaves the same weights, losses and logged values, from one launch
per step. It costs what `train/graphs` says, and per step the copies of the batch and of the logged values. The graph
holds `training_step`, the backward pass, the clipping of `gradient_clip_val` and the optimizer's step. A replay runs no
Python, so that

    self.log        is called after the step, with the values that the graph has computed
    progress        is counted after the step: `global_step` and schedulers behave as without capture
    hooks           within the step (`on_after_backward` and the like) would not be called: where a callback or the
                    module has one, the step runs eagerly, with the reason
    current_epoch   is read at the time of capture: a step that reads it is captured anew in every epoch
    global_step     and `batch_idx` change at every step: a step that reads one of them runs eagerly

`OomLadderCallback` (the levels of `train/oom.py`) leaves the same updates, with batches in smaller passes, or
activations recomputed, if the whole did not fit. It holds the batches of one update until it is done, and copies the
states of torch's generators and of the model's buffers for each: 0.1 ms of the host per step. When a `training_step`
or its backward pass runs out of memory, the gradients of the update so far are dropped, generators and buffers are
restored, the run goes one level down and the batches are run again (`train/update.py`). A pass is weighted by its
samples, so the update is that of the whole batch if `training_step` returns the mean over its samples. Not covered:
memory that runs out in the optimizer's step, or while a batch is built; manual optimization, whose steps only the
module knows; several processes, which would have to run out together. Values that a module logs are counted once per
pass.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

from stoker.frameworks.adapted import AdaptedLoader, count_samples
from stoker.frameworks.lightning_watch import Closure, ClosureResult, pl, require_adapted, tell
from stoker.loader.batch import Batch
from stoker.report import Note, Topic
from stoker.train.batches import Work
from stoker.train.graphs.function import CapturedFunction
from stoker.train.oom import Remembered
from stoker.train.precision import PrecisionChoice
from stoker.train.step import Step, StepParts
from stoker.train.update import Update

_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Called by Lightning within a step, of callbacks and of the module."""
_METHODS = (*_HOOKS, "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
"""Methods of the module: a replay would repeat what they decided at the time of capture."""


class _StandIn(pl.Callback):
    """Replaces a method of Lightning's loop of automatic optimization while a run goes on."""

    _replaced: str

    def __init__(self) -> None:
        self.notes: list[str] = []  # texts of the notes so far
        self._loop: Any = None

    def _replace(self, trainer: pl.Trainer, make: Callable[[Any], Any]) -> None:
        """Replace the method `_replaced` of the loop by what `make` returns for it."""
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        setattr(self._loop, self._replaced, make(getattr(self._loop, self._replaced)))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put Lightning's own method back."""
        if self._loop is not None:
            delattr(self._loop, self._replaced)
        self._loop = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Put Lightning's own method back too: Lightning does not call `teardown` after an error."""
        self.teardown(trainer, pl_module, "fit")

    def _tell(self, trainer: pl.Trainer, note: Note) -> None:
        self.notes.append(note.text)
        tell(trainer, note)


class CaptureCallback(_StandIn):
    """Runs training steps as replays of one CUDA graph where that is possible; see the module's text.

    Attributes:
        notes: Why steps run eagerly, and every new capture.
    """

    _replaced = "run"

    def __init__(self) -> None:
        super().__init__()
        self._step: CapturedFunction | None = None
        self._arguments: tuple[int, dict[str, Any]] = 0, {}
        self._logged: list[tuple[str, dict[str, Any]]] = []
        self._read: set[str] = set()

    @property
    def reason(self) -> str:
        """How steps run, and why: "captured ..." or "eager: ..."."""
        return "nothing was trained yet" if self._step is None else self._step.reason

    @property
    def is_captured(self) -> bool:
        """Whether steps are replayed now."""
        return self._step is not None and self._step.is_captured

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace Lightning's step by the captured one, where this trainer allows it."""
        self._step = CapturedFunction(
            self._train,
            None,
            pl_module,
            trainer.optimizers,
            None,
            None,
            lambda line: self._tell(trainer, Note(line, Topic.STEP)),
            [pl_module.training_step],
            _find_refusal(trainer, pl_module),
        )
        self._read.clear()
        if self._step.can_capture:
            self._replace(trainer, lambda plain: self._run)  # noqa: ARG005  which `_run` finds by the type

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Capture the step again if it reads the epoch's number."""
        if self._step is not None and "current_epoch" in self._read:
            self._step.forget()

    def _run(self, optimizer: Any, batch_idx: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Replace `run` of Lightning's loop: train on a batch, count, log; return the output of `training_step`."""
        loop, step = self._loop, self._step
        assert step is not None
        output: dict[str, Any]
        # GradientAccumulationScheduler may have changed the first. A module may iterate its batches itself.
        if (
            loop.trainer.accumulate_grad_batches > 1
            or "batch" not in kwargs
            or not step.can_capture
        ):
            output = type(loop).run(loop, optimizer, batch_idx, kwargs)
            return output
        counts, self._arguments = loop.optim_progress.optimizer, (batch_idx, dict(kwargs))
        before = counts.zero_grad.state_dict()
        counts.step.increment_ready()
        result = step(kwargs["batch"])
        # A replay has counted nothing; the comparison of graph and eager steps has counted several times.
        counts.zero_grad.load_state_dict(before)
        counts.zero_grad.increment_ready()
        counts.zero_grad.increment_started()
        counts.zero_grad.increment_completed()
        counts.step.increment_completed()
        self._refuse_what_changes(step, **result)
        module = loop.trainer.lightning_module
        called, module._current_fx_name = module._current_fx_name, "training_step"
        for (name, options), value in zip(self._logged, result["logged"], strict=True):
            module.log(name, value, **options)
        module._current_fx_name = called
        output = result["output"]
        return output

    def _refuse_what_changes(
        self, step: CapturedFunction, output: dict[str, Any], logged: list[Any], **_: Any
    ) -> None:
        """End capture where `training_step` reads, logs or returns what a graph cannot follow."""
        changing = sorted(self._read & {"global_step", "batch_idx"})
        if changing:
            step.refuse(
                f"training_step reads {' and '.join(changing)}, which a graph cannot follow"
            )
        elif any(isinstance(value, torch.nn.Module) for value in logged):
            step.refuse("training_step logs a Metric, which counts on the host: log a tensor")
        elif not output:
            step.refuse("training_step returned None: a graph cannot leave an update out")

    def _train(self, batch: Any) -> dict[str, Any]:
        """Train on a batch as Lightning does; the logged values are part of the result, and logged after the step."""
        loop, (batch_idx, kwargs) = self._loop, self._arguments
        trainer, module = loop.trainer, loop.trainer.lightning_module
        values: list[Any] = []
        self._logged.clear()

        def keep(name: str, value: Any, *given: Any, **options: Any) -> None:
            options.update(zip(("prog_bar", "logger", "on_step", "on_epoch"), given, strict=False))
            self._logged.append((name, options))
            values.append(value)

        closure = loop._make_closure({**kwargs, "batch": batch}, trainer.optimizers[0], batch_idx)
        closure._step_fn = partial(self._watched, closure._step_fn)
        own = vars(trainer.optimizers[0])
        # Lightning refuses to clip for an optimizer that could unscale gradients, even if none are scaled.
        could_unscale = own.pop("_step_supports_amp_scaling", False)
        module.log = keep
        try:
            optimizer = trainer.strategy._lightning_optimizers[0]
            module.optimizer_step(trainer.current_epoch, batch_idx, optimizer, closure)
        finally:
            del module.log
            own["_step_supports_amp_scaling"] = could_unscale
        done = closure.consume_result()
        if done.loss is None:
            zero = torch.zeros((), device=module.device)
            return {"output": {}, "logged": values, "no loss": zero}
        return {"output": done.asdict(), "logged": values}

    def _watched(self, training_step: Callable[[], Any]) -> Any:
        """Call `training_step`, and remember which of the changing numbers it reads."""
        method = self._loop.trainer.lightning_module.training_step
        if "batch_idx" in self._arguments[1] and _uses(method, "batch_idx"):
            self._read.add("batch_idx")
        with _watch("global_step", self._read), _watch("current_epoch", self._read):
            return training_step()


@contextlib.contextmanager
def _watch(name: str, read: set[str]) -> Iterator[None]:
    """Add the name of a trainer's property to `read` when it is asked for."""
    plain = getattr(pl.Trainer, name)

    def get(trainer: pl.Trainer) -> Any:
        read.add(name)
        return plain.fget(trainer)

    with mock.patch.object(pl.Trainer, name, property(get)):
        yield


def _uses(method: Any, argument: str) -> bool:
    """Whether a method's code reads one of its arguments."""
    return any(
        argument in (one.argval if isinstance(one.argval, tuple) else (one.argval,))
        for one in dis.get_instructions(method)
        if one.opname.startswith("LOAD_")
    )


def _find_refusal(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Return why a trainer's steps are not captured, and what to type instead; None if they can be."""
    if not module.automatic_optimization:
        return "the module optimizes by hand: a loop of your own with stoker.capture"
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy):
        return f"{type(trainer.strategy).__name__} trains in several processes: devices=1"
    if trainer.accumulate_grad_batches > 1:
        return (
            f"{trainer.accumulate_grad_batches} batches are accumulated per update: "
            "accumulate_grad_batches=1 and a larger batch"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "Lightning asks at every step whether fp16 has overflowed: precision='bf16-mixed'"
    if any(isinstance(one, OomLadderCallback) for one in trainer.callbacks):
        return "OomLadderCallback repeats a step in Python: CaptureCallback without it"
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    if not all(hasattr(loop, name) for name in ("_make_closure", "run", "optim_progress")):
        return f"Lightning {pl.__version__} makes its closures in another way than 2.6"
    for owner, base, names in (
        *((one, pl.Callback, _HOOKS) for one in trainer.callbacks),
        (module, pl.LightningModule, _METHODS),
    ):
        for name in names:
            if getattr(type(owner), name) is not getattr(base, name):
                return f"{type(owner).__name__}.{name} is called within the step, and a replay runs no Python"
    return None


# -- out of memory --------------------------------------------------------------------------------


class OomLadderCallback(_StandIn):
    """Repeats training steps with less memory when the device runs out of it; see the module's text.

    Args:
        remembered: Where settings that fitted are kept between runs; the user's cache folder by default.

    Attributes:
        notes: Every level that the run went down to, or why the callback does nothing.
    """

    _replaced = "_make_closure"

    def __init__(self, remembered: Remembered | None = None) -> None:
        super().__init__()
        self._remembered = remembered
        self._update: Update | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace Lightning's factory of closures, if this trainer is supported."""
        require_adapted(trainer)
        reason = _stands_aside(trainer, pl_module)
        if reason is not None:
            self._tell(trainer, Note(f"out-of-memory recovery is off: {reason}"))
            return

        def make_closure(
            make: Callable[..., Closure], kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int
        ) -> Closure:
            plain = make(kwargs, optimizer, batch_idx)
            batch = kwargs.get("batch")  # missing if the module iterates its batches itself
            if not count_samples(batch) or plain._backward_fn is None:
                return plain
            update = self._update or self._make_update(trainer, pl_module, batch)
            return _SurvivingClosure(plain, update, _Call(self._loop, kwargs, plain._backward_fn))

        self._replace(trainer, lambda plain: partial(make_closure, plain))

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
        """Put Lightning's own method back, and drop the update."""
        super().teardown(trainer, pl_module, stage)
        self._update = None

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
        # The call is not a tensor, so every part of the batch gets it unchanged.
        work = Work(batch, (call,), count_samples(batch), positions, own)
        loss = self._update.add(work)
        output = call.output
        assert output is not None
        if output.closure_loss is None or not self._update.is_lowered:
            return output
        return ClosureResult(loss)
