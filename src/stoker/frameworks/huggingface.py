"""A stoker `Loader` under the Hugging Face `Trainer`.

Enters: what makes the loaders, and which field is which argument of the model. Leaves: a Trainer whose
batches come from a store: dicts on the device with the model's argument names, this process's share.
Costs: `_prepare_inputs` of the Trainer looks at every tensor and copies none.

Batch size and `drop_last` are those of the `TrainingArguments`, per device; order and seed are the Loader's
own. Epochs, gradient accumulation, evaluation and `resume_from_checkpoint` are the Trainer's: it asks for an
epoch by number and leaves out the batches that were trained on, and the loader goes straight there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stoker.errors import InputError, MissingExtraError
from stoker.loader.loader import Loader

try:
    import transformers  # noqa: F401  the mix-in needs it, and says so
except ImportError as error:
    raise MissingExtraError.for_package(
        "transformers", "huggingface", "stoker.frameworks.huggingface"
    ) from error

from stoker.frameworks.accelerate import AccelerateLoader

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
        args: The Trainer's own arguments, by position and by name.
        kwargs: Likewise.
    """

    def __init__(
        self,
        *args: Any,
        train_loader: Makes | None = None,
        eval_loader: Makes | None = None,
        fields: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._makes = {"train": train_loader, "eval": eval_loader}
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

    def close_loaders(self) -> None:
        """Give the loaders' memory and threads back; the next training or evaluation makes them anew."""
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
        made = AccelerateLoader(loader, self._fields)
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


class _Named:
    """Stands where the Trainer wants an `eval_dataset`; the loader has the data."""


__all__ = ["StokerTrainerMixin"]
