"""A stoker `Loader` under the Hugging Face `Trainer`, and its whole training step as one CUDA graph.

Enters: what makes the loaders, and which field is which argument of the model. Leaves: a Trainer whose
batches come from a store: dicts on the device with the model's argument names, this process's share.
Costs: `_prepare_inputs` of the Trainer looks at every tensor and copies none.

Batch size and `drop_last` are those of the `TrainingArguments`, per device; order and seed are the Loader's
own. Epochs, gradient accumulation, evaluation and `resume_from_checkpoint` are the Trainer's: it asks for an
epoch by number and skips the batches that were trained on, without the loader reading them.

With `capture=True` the graph holds forward, backward, the clipping of `max_grad_norm`, the optimizer's step and
`zero_grad`. It is run where the Trainer calls `training_step`; what the Trainer does after it (clipping, the
optimizer's step) is then done already. A replay runs no Python: a callback with `on_pre_optimizer_step`, which would
see gradients before the update, makes the step run eagerly, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from stoker.errors import InputError, MissingExtraError
from stoker.loader.loader import Loader
from stoker.train.graphs.function import CapturedFunction

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError.for_package(
        "transformers", "huggingface", "stoker.frameworks.huggingface"
    ) from error

from stoker.frameworks.accelerate import AccelerateLoader, find_refusal, plain_optimizer
from stoker.frameworks.adapted import check_makes

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

Makes = Callable[..., Loader]
"""Called with `batch_size`, `drop_last`, `device`, `rank` and `world_size`."""


class StokerTrainerMixin(_Base):
    """Put before the Trainer: `class MyTrainer(StokerTrainerMixin, Trainer)`.

    Args:
        train_loader: Makes the training loader, as `partial(Loader, "store/", order="shuffled", seed=1)`.
        eval_loader: Makes the evaluation loader; None leaves evaluation to `eval_dataset`.
        fields: Field of the store to argument of the model: `{"features": "input_values", "targets":
            "labels"}`. Fields that are not named are not handed on.
        capture: Whether to run the whole step as one CUDA graph where that is possible.
        args: The Trainer's own arguments, by position and by name.
        kwargs: Likewise.

    Attributes:
        captured: The step, once training has begun; None without `capture`.
    """

    def __init__(
        self,
        *args: Any,
        train_loader: Makes | None = None,
        eval_loader: Makes | None = None,
        fields: Mapping[str, str] | None = None,
        capture: bool = False,
        **kwargs: Any,
    ) -> None:
        self._capture = capture
        self.captured: CapturedFunction | None = None
        self._norm: torch.Tensor | None = None
        self._update: Callable[..., Any] | None = None
        self._makes = {"train": train_loader, "eval": eval_loader}
        for part, make in self._makes.items():
            check_makes(make, f"{part}_loader")
        self._fields = None if fields is None else dict(fields)
        self._made: dict[str, AccelerateLoader] = {}
        if eval_loader is not None and kwargs.get("eval_dataset") is None:
            kwargs["eval_dataset"] = _Named()
        super().__init__(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the training loader; the Trainer's own where none was given."""
        if self._makes["train"] is None:
            return super().get_train_dataloader()
        return self._make("train", self._train_batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the evaluation loader; the Trainer's own for a dataset that is given by hand."""
        asked_for_ours = eval_dataset is None or isinstance(eval_dataset, _Named)
        if self._makes["eval"] is None or not asked_for_ours:
            return super().get_eval_dataloader(eval_dataset)
        return self._make("eval", self.args.eval_batch_size)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does."""
        self.captured = None  # made at the first batch, when the optimizer exists
        try:
            return super().train(*args, **kwargs)
        finally:
            self._end_capture()

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Any:
        """Train on a batch: all of the step where it is captured, else forward and backward."""
        if self._capture and self.captured is None:
            self.captured = self._make_captured(model)
        if self.captured is None or not self.captured.can_capture:
            self._end_capture()
            return super().training_step(model, inputs, num_items_in_batch)
        # The Trainer calls it after this method, and the update is part of the captured step.
        self.optimizer.step = _do_nothing
        loss, self._norm = self.captured((dict(self._prepare_inputs(inputs)), num_items_in_batch))
        return loss

    def _end_capture(self) -> None:
        """Restore the optimizer's own step."""
        self._norm = None
        if self._update is not None:
            self.optimizer.step, self._update = self._update, None

    def _make_captured(self, model: torch.nn.Module) -> CapturedFunction:
        forward_backward = super().training_step
        self._update = update = self.optimizer.step

        def step(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            loss = forward_backward(model, *batch)
            limit = self.args.max_grad_norm
            # As `_clip_grad_norm` and `_get_grad_norm` of the Trainer: without a limit the norm is measured alone.
            norm = self.accelerator.clip_grad_norm_(
                model.parameters(), limit if limit and limit > 0 else math.inf
            )
            update()
            model.zero_grad()
            return loss, norm

        optimizer = plain_optimizer(self.optimizer)
        calls, refusal = [self.compute_loss], self._find_refusal()
        return CapturedFunction(step, None, model, optimizer, None, None, None, calls, refusal)

    def _find_refusal(self) -> str | None:
        refusal = find_refusal(self.accelerator)
        if refusal is not None:
            return refusal
        # Counted by the Trainer, not by its accelerator.
        if self.args.gradient_accumulation_steps > 1:
            return (
                f"{self.args.gradient_accumulation_steps} batches are accumulated per update: "
                "gradient_accumulation_steps=1 and a larger batch"
            )
        if self.args.torch_empty_cache_steps is not None:
            return "torch_empty_cache_steps frees memory within the step: leave it out"
        for callback in self.callback_handler.callbacks:
            if type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
                return (
                    f"{type(callback).__name__}.on_pre_optimizer_step is called before the update, which a "
                    "replay has done already"
                )
        return None

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return super()._clip_grad_norm(model) if self._norm is None else self._norm

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        grad_norm = self._norm if grad_norm is None else grad_norm
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _get_learning_rate(self) -> Any:
        # A captured step keeps the rate on the device; reading it at every step would wait for the device.
        scheduler = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if self._norm is None or not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            return super()._get_learning_rate()
        return scheduler.get_last_lr()[0]

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does; a learning rate on the device is read now."""
        if isinstance(logs.get("learning_rate"), torch.Tensor):
            logs["learning_rate"] = logs["learning_rate"].item()
        super().log(logs, *args, **kwargs)

    def close_loaders(self) -> None:
        """Release the loaders' memory and threads; the next training or evaluation makes new loaders."""
        while self._made:
            self._made.popitem()[1].close()

    def _make(self, part: str, batch_size: int) -> AccelerateLoader:
        made = self._made.get(part)
        if made is not None and made.batch_size == batch_size:
            return made
        if made is not None:  # the Trainer looks for a batch size that fits
            made.close()
        make = self._makes[part]
        assert make is not None
        try:
            loader = make(
                batch_size=batch_size,
                drop_last=self.args.dataloader_drop_last,
                device=self.args.device,
                rank=self.args.process_index,
                world_size=self.args.world_size,
            )
        except TypeError as error:
            raise InputError(
                f"{part}_loader cannot be called with batch_size, drop_last, device, rank and world_size: "
                f"{error}.",
                "a Loader without these arguments, which TrainingArguments decide",
                f"{part}_loader=partial(Loader, 'store/', order='sequential')",
            ) from error
        names = [loader.as_tuple] if isinstance(loader.as_tuple, str) else loader.as_tuple
        own = None if names is None else {name: name for name in names}  # the model takes names
        made = AccelerateLoader(loader, self._fields or own)
        if part == "eval" and made.num_samples % self.args.world_size:
            made.close()
            raise InputError(
                f"eval_loader deals {made.num_samples:,} samples to {self.args.world_size} processes: their last "
                "batches are not equally long, and the Trainer gathers them.",
                f"a multiple of {self.args.world_size}",
                "dataloader_drop_last=True, or partial(Loader, ..., samples=numpy.arange(N))",
            )
        self._made[part] = made
        return made


def _do_nothing(closure: Any = None) -> None:
    """Replace the optimizer's step, which the captured step has done."""


# Marked as wrapped, because schedulers warn about an optimizer's step that they have not wrapped.
vars(_do_nothing)["_wrapped_by_lr_sched"] = True


class _Named:
    """Stands where the Trainer wants an `eval_dataset`; the loader has the data."""


__all__ = ["StokerTrainerMixin"]
