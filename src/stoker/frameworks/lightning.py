"""A stoker `Loader` under Lightning, and stoker's habits as Lightning callbacks.

Enters: what makes the loaders; a Lightning `Trainer`. Leaves: `StokerData`, a data module whose loaders are
this process's share on its device; callbacks for the whole step as one CUDA graph (`CaptureCallback`), the rate
(`ScheduleCallback`), the run's log and telemetry (`TelemetryCallback`), the doctor (`DoctorCallback`) and memory that
runs out (`OomLadderCallback`). Costs 40 µs of the host per step for the rate; the other callbacks say theirs.

Lightning neither moves nor re-wraps these batches and puts no `DistributedSampler` in. A checkpoint in the
middle of an epoch holds the loader's place, and a resumed run goes on with the batch after it.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from types import MethodType
from typing import Any, get_args

import torch

from stoker.errors import InputError
from stoker.frameworks.adapted import AdaptedLoader, MakesLoader, check_makes, check_share
from stoker.frameworks.lightning_capture import CaptureCallback, OomLadderCallback
from stoker.frameworks.lightning_doctor import DoctorCallback
from stoker.frameworks.lightning_watch import TelemetryCallback, pl, require_adapted
from stoker.loader.loader import Loader
from stoker.recipes.schedule import LrRule, cosine_factor, lr_factor


def adapt(loader: Loader) -> AdaptedLoader:
    """Return a loader for `trainer.fit(model, train_dataloaders=...)`, where there is one process.

    With several processes the rank is known only once they run: use `StokerData`.
    """
    return AdaptedLoader(loader)


class StokerData(pl.LightningDataModule):
    """Makes a loader for each part, with the trainer's device, rank and number of processes.

    Args:
        train: Makes the training loader, as `partial(Loader, "store/", 128, order="shuffled", seed=1)`.
        val: Likewise for validation.
        test: Likewise for testing.
        predict: Likewise for prediction.

    Attributes:
        loaders: Part to its loader, once it was asked for.
    """

    def __init__(
        self,
        train: MakesLoader | None = None,
        val: MakesLoader | None = None,
        test: MakesLoader | None = None,
        predict: MakesLoader | None = None,
    ) -> None:
        super().__init__()
        self._makes = {"train": train, "val": val, "test": test, "predict": predict}
        self.loaders: dict[str, AdaptedLoader] = {}
        for part, make in self._makes.items():
            check_makes(make, part)
            name = f"{part}_dataloader"
            if make is None and getattr(type(self), name) is getattr(StokerData, name):
                # Lightning asks whether the method was overridden: for a part without data it was not.
                setattr(self, name, MethodType(getattr(pl.LightningDataModule, name), self))

    def train_dataloader(self) -> AdaptedLoader:
        """Return the training loader."""
        return self._loader("train")

    def val_dataloader(self) -> AdaptedLoader:
        """Return the validation loader."""
        return self._loader("val")

    def test_dataloader(self) -> AdaptedLoader:
        """Return the testing loader."""
        return self._loader("test")

    def predict_dataloader(self) -> AdaptedLoader:
        """Return the prediction loader."""
        return self._loader("predict")

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Return a batch of ours unchanged: it is on the device already."""
        to = getattr(batch, "to", None)
        return to(device) if to else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def teardown(self, stage: str) -> None:
        """Release the loaders' memory and threads."""
        while self.loaders:
            self.loaders.popitem()[1].close()

    def _loader(self, part: str) -> AdaptedLoader:
        make, trainer = self._makes[part], self.trainer
        if make is None or trainer is None:
            what = "no trainer yet" if make is not None else "nothing that makes it"
            raise InputError(
                f"StokerData was asked for its {part} loader and has {what}.",
                "a trainer, which knows the device and the rank, and something that makes the loader",
                f"trainer.fit(model, datamodule=StokerData({part}=partial(Loader, 'store/', 128)))",
            )
        if part not in self.loaders:
            rank, world_size = trainer.global_rank, trainer.world_size
            loader = make(device=trainer.strategy.root_device, rank=rank, world_size=world_size)
            check_share(loader, rank, world_size)
            self.loaders[part] = AdaptedLoader(loader)
        return self.loaders[part]


class ScheduleCallback(pl.Callback):
    """Moves the rate with every update: up for a while, then down to 0 along half a cosine.

    The rate is a function of the number of updates done, so a resumed run goes on with it. The optimizer's
    own rate is the full one, multiplied for the batch size where one was named that it was tuned for.

    Args:
        warmup_share: Share of the updates in which the rate rises.
        num_updates: Of the whole run; what the trainer expects by default.
        tuned_batch: Samples per update, over all processes, for which the optimizer's rate was tuned; None
            leaves it as it is.
        batch_size: Samples per batch and process; the loader's own by default.
        rule: How the rate grows with the batch.

    Attributes:
        reason: What the full rate is multiplied with, and why.
    """

    def __init__(
        self,
        warmup_share: float = 0.05,
        num_updates: int | None = None,
        *,
        tuned_batch: int | None = None,
        batch_size: int | None = None,
        rule: LrRule = "linear",
    ) -> None:
        if not 0 <= warmup_share < 1:
            raise InputError(
                f"warmup_share is {warmup_share}.", "0 or more, below 1", "warmup_share=0.05"
            )
        for name, value in (
            ("num_updates", num_updates), ("tuned_batch", tuned_batch), ("batch_size", batch_size)
        ):  # fmt: skip
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}.", "1 or more", f"leave {name} out")
        if rule not in get_args(LrRule):
            known = ", ".join(get_args(LrRule))
            raise InputError(f"rule is {rule!r}.", f"one of {known}", "rule='linear'")
        self._warmup_share, self._num_updates = warmup_share, num_updates
        self._tuned_batch, self._batch_size, self._rule = tuned_batch, batch_size, rule
        self._updates = 0
        self._full: list[list[float]] = []
        self.reason = "lr as given"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the full rate of every group."""
        require_adapted(trainer)
        if trainer.lr_scheduler_configs:
            raise InputError(
                "configure_optimizers returns a scheduler, and ScheduleCallback moves the rate too.",
                "one of them",
                "return the optimizer alone, or leave ScheduleCallback out",
            )
        expected = self._num_updates or trainer.estimated_stepping_batches
        if not math.isfinite(expected):
            raise InputError(
                "the trainer does not know how many updates there will be.",
                "a number of updates",
                "ScheduleCallback(num_updates=10_000), or Trainer(max_epochs=10)",
            )
        self._updates = int(expected)
        factor, self.reason = self._scale(trainer)
        self._full = [
            # `initial_lr` as in torch's schedulers: a checkpoint keeps it with the group.
            [factor * float(group.setdefault("initial_lr", float(group["lr"]))) for group in groups]
            for groups in (optimizer.param_groups for optimizer in trainer.optimizers)
        ]

    def _scale(self, trainer: pl.Trainer) -> tuple[float, str]:
        if self._tuned_batch is None:
            return 1.0, "lr as given: no tuned_batch was named to scale it by"
        batch = self._batch_size or getattr(trainer.train_dataloader, "batch_size", None)
        if batch is None:
            raise InputError(
                "the training loader does not say its batch size.",
                "a batch size to scale the rate by",
                "batch_size=128 in the call of ScheduleCallback",
            )
        together = int(batch) * trainer.world_size * trainer.accumulate_grad_batches
        dataset = getattr(trainer.train_dataloader, "dataset", None)
        have = len(dataset) if isinstance(dataset, Sized) else None
        return lr_factor(together, self._tuned_batch, self._rule, have)

    def on_train_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Set the rate of the next update."""
        share = cosine_factor(trainer.global_step, self._updates, self._warmup_share)
        for optimizer, full in zip(trainer.optimizers, self._full, strict=True):
            for group, rate in zip(optimizer.param_groups, full, strict=True):
                lr: Any = group["lr"]
                if isinstance(lr, torch.Tensor):  # a captured or fused step reads it on the device
                    lr.fill_(rate * share)
                else:
                    group["lr"] = rate * share


__all__ = [
    "CaptureCallback", "DoctorCallback", "OomLadderCallback", "ScheduleCallback", "StokerData", "TelemetryCallback",
    "adapt",
]  # fmt: skip
