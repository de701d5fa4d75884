"""Lightning's whole training step as one CUDA graph, by a callback over `stoker.capture`.

Enters: a Lightning `Trainer` with automatic optimization, in one process, on a GPU. Leaves: the same weights, losses
and logged values, from one launch per step. Costs: see `train/graph.py`; per step, the copies of the batch and of
the logged values.

The graph holds `training_step`, the backward pass, the clipping of `gradient_clip_val` and the optimizer's step.
A replay runs no Python, so that

    self.log        is called after the step, with the values that the graph has computed
    progress        is counted after the step: `global_step` and schedulers go on as they do without
    hooks           within the step (`on_after_backward` and the like) would not be called: where a callback or the
                    module has one, the step runs eagerly, with the reason
    current_epoch   is read at the time of capture: a step that reads it is captured anew in every epoch
    global_step     and `batch_idx` change at every step: a step that reads one of them runs eagerly
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch

from stoker.frameworks.lightning_oom import OomLadderCallback
from stoker.frameworks.lightning_watch import pl, tell
from stoker.report import Note, Topic
from stoker.train.capture_function import CapturedFunction

_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Called by Lightning within a step, of callbacks and of the module."""
_METHODS = (*_HOOKS, "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
"""Of the module: a replay would repeat what they decided at the time of capture."""


class CaptureCallback(pl.Callback):
    """Runs training steps as replays of one CUDA graph where that is possible; see the module's text.

    Attributes:
        notes: Why steps run eagerly, and every new capture.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._step: CapturedFunction | None = None
        self._loop: Any = None
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
        """Put the captured step in the place of Lightning's, where this trainer allows it."""
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
            self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
            self._loop.run = self._run

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Capture a step anew that reads the epoch's number."""
        if self._step is not None and "current_epoch" in self._read:
            self._step.forget()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put Lightning's own step back; `reason` stays."""
        if self._loop is not None:
            del self._loop.run
        self._loop = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Put Lightning's own step back too: Lightning does not call `teardown` after an error."""
        self.teardown(trainer, pl_module, "fit")

    def _run(self, optimizer: Any, batch_idx: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Stand in for `run` of Lightning's loop: train on a batch, count, log; return what `training_step` did."""
        loop, step = self._loop, self._step
        assert step is not None
        output: dict[str, Any]
        # A scheduler of accumulation may have changed it. A module may iterate its batches itself.
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
        # A replay has counted nothing, a comparison of both ways several times.
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
        """Train on a batch as Lightning does; what it logs is part of the result, for after the step."""
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
        # Lightning refuses to clip for an optimizer that could unscale gradients, also where nothing scales them.
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
            return {
                "output": {},
                "logged": values,
                "no loss": torch.zeros((), device=module.device),
            }
        return {"output": done.asdict(), "logged": values}

    def _watched(self, training_step: Callable[[], Any]) -> Any:
        """Call `training_step`, and remember which of the changing numbers it reads."""
        method = self._loop.trainer.lightning_module.training_step
        if "batch_idx" in self._arguments[1] and _uses(method, "batch_idx"):
            self._read.add("batch_idx")
        with _watch("global_step", self._read), _watch("current_epoch", self._read):
            return training_step()

    def _tell(self, trainer: pl.Trainer, note: Note) -> None:
        self.notes.append(note.text)
        tell(trainer, note)


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
    """Return why a trainer's steps are not captured, and what to type instead; None if they may be."""
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


__all__ = ["CaptureCallback"]
