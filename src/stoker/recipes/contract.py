"""What a recipe is: everything that a training run needs besides the trainer itself.

Enters: an open store and options. Leaves: a `Job`. A user's own recipe meets the same `Recipe`
protocol. Costs nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from stoker.augment import Compose
from stoker.loader.lanes import LanePlan
from stoker.loader.order import Mode
from stoker.store.fields import Array
from stoker.store.reader import Store

Tensors = Mapping[str, torch.Tensor]


class Metrics(Protocol):
    """Accumulates on the device over the batches of a validation; one object per pass."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Take a batch; no host synchronisation."""

    def state(self) -> Any:
        """Return what was counted: tensors, in lists or alone."""

    def merge(self, states: Sequence[Any]) -> None:
        """Become what all of these have counted together; where ranks share the samples."""

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything seen; waits for the device."""


@dataclass(frozen=True)
class Job:
    """One training job.

    Attributes:
        name: Of the recipe.
        model: On the CPU, initialised from the seed; the trainer moves it.
        criterion: `(outputs, targets) -> loss`, the mean over the batch's samples.
        unpack: Batch to (inputs, targets): device work with static shapes, so that it can be captured
            in a CUDA graph. The model is called as `model(inputs)`.
        metrics: Makes new `Metrics`.
        baseline: Metric to what chance (majority, zero, the mean spectrum) reaches on the validation
            samples, from training targets only.
        samples: Split name ("train", "val", "test") to rising sample numbers.
        fields: Fields of the store to load; None is all but text.
        order: Of the training samples.
        lanes: For `order="lanes"`.
        augmentation: For the training images, if any.
        make_optimizer: Parameters and learning rate to an optimizer.
        make_schedule: Optimizer and number of updates in the run to a scheduler that is stepped after
            every update; None keeps the rate.
        monitor: The metric that decides the best checkpoint, and whether more is better.
        notes: What was decided and why, for the log.
    """

    name: str
    model: torch.nn.Module
    criterion: Callable[[Any, Any], torch.Tensor]
    unpack: Callable[[Tensors], tuple[Any, Any]]
    metrics: Callable[[], Metrics]
    baseline: Mapping[str, float]
    samples: Mapping[str, Array]
    make_optimizer: Callable[[Iterable[torch.nn.Parameter], float], torch.optim.Optimizer]
    make_schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None
    fields: Sequence[str] | None = None
    order: Mode = "shuffled"
    lanes: LanePlan | None = None
    augmentation: Compose | None = None
    monitor: tuple[str, bool] = ("loss", False)
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Default:
    """A setting that a recipe chooses where the config says nothing.

    Attributes:
        setting: A field of `Settings`: "learning_rate", "epochs", "batch_size".
        value: Instead of the config's own default.
        reason: Printed beside it.
    """

    setting: str
    value: Any
    reason: str


class Recipe(Protocol):
    """A ready job, or a user's own."""

    name: str
    defaults: ClassVar[tuple[Default, ...]] = ()

    def make_job(self, store: Store, options: Mapping[str, Any], seed: int) -> Job:
        """Build the job for a store.

        Args:
            store: Packed by the recipe's source.
            options: Of the config's section for this recipe; unknown ones are refused.
            seed: Of initial weights and of the splits that need one.
        """
