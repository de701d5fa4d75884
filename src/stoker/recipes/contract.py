"""What a recipe is: everything that a training run needs besides the trainer itself.

Enters: an open store and options. Leaves: a `Job`; later, from plain values of a checkpoint, a `Rebuilt`
model. Costs nothing by itself.

A recipe is a class that inherits `Recipe`. Ours are in the folders beside this file, one each; somebody
else's is named in a config as `package.module:Class` (docs/extending.md has a whole one).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from stoker.augment import Compose
from stoker.config import Settings
from stoker.loader.lanes import LanePlan
from stoker.loader.order import Mode
from stoker.recipes.export.ports import Layout
from stoker.recipes.schedule import make_adamw
from stoker.sources.contract import Source
from stoker.store.fields import Array
from stoker.store.reader import Store

Tensors = Mapping[str, torch.Tensor]
Facts = Mapping[str, Any]
Columns = dict[str, torch.Tensor]


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
        model: On the CPU, initialised from the seed; the trainer moves it.
        criterion: `(outputs, targets) -> loss`, the mean over the batch's samples.
        unpack: Batch to (inputs, targets): device work with static shapes, so that it can be captured
            in a CUDA graph. The model is called as `model(inputs)`.
        samples: Split name ("train", "val", "test") to rising sample numbers; val and test may be left
            out.
        metrics: Makes new `Metrics`; None for the loss alone.
        baseline: Metric to what chance (majority, zero, the mean spectrum) reaches on the validation
            samples, from training targets only.
        make_optimizer: Parameters and learning rate to an optimizer; AdamW where nothing is said.
        make_schedule: Optimizer and number of updates in the run to a scheduler that is stepped after
            every update; None keeps the rate.
        fields: Fields of the store to load; None is all but text.
        order: Of the training samples.
        lanes: For `order="lanes"`.
        plan_lanes: With `lanes`: samples of another split to lanes for them; None where there are too few.
        augmentation: For the training images, if any.
        monitor: The metric that decides the best checkpoint, and whether more is better.
        strata: Class of each training sample, for a config that asks for a part of them: every class
            then keeps its share. None draws without regard to classes.
        scales_rate: Whether `make_optimizer` fits the learning rate to the samples per update itself.
        notes: What was decided and why, for the log.
    """

    model: torch.nn.Module
    criterion: Callable[[Any, Any], torch.Tensor]
    unpack: Callable[[Tensors], tuple[Any, Any]]
    samples: Mapping[str, Array]
    metrics: Callable[[], Metrics] | None = None
    baseline: Mapping[str, float] = field(default_factory=dict)
    make_optimizer: Callable[[Iterable[torch.nn.Parameter], float], torch.optim.Optimizer] = (
        make_adamw
    )
    make_schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None
    fields: Sequence[str] | None = None
    order: Mode = "shuffled"
    lanes: LanePlan | None = None
    plan_lanes: Callable[[Array], LanePlan | None] | None = None
    augmentation: Compose | None = None
    monitor: tuple[str, bool] = ("loss", False)
    strata: Array | None = None
    scales_rate: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rebuilt:
    """A model to be filled with weights, and how to use it.

    Attributes:
        model: On the CPU, without its trained weights.
        fields: Fields of a store that it reads.
        unpack: Batch to the model's inputs; needs no targets.
        predict: Model and inputs to named columns, a row per sample.
        augment: What the loader does to images, if there are any.
        notes: What a user of the predictions should know.
    """

    model: torch.nn.Module
    fields: Sequence[str]
    unpack: Callable[[Tensors], Any]
    predict: Callable[[Any, Any], Columns]
    augment: Compose | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Default:
    """A setting that a recipe chooses where the config says nothing.

    Attributes:
        setting: A key of the config: "training.lr", "training.epochs", "training.batch_size".
        value: Instead of the config's own default.
        reason: Printed beside it.
    """

    setting: str
    value: Any
    reason: str


class Recipe(Protocol):
    """A kind of training job. Inherit it, and write the first five members; the others have defaults.

    Attributes:
        name: For people: messages, tables and logs.
        Options: A frozen dataclass of what a config may write under `recipe.options`: fields of bool,
            int, float, str, Literal, tuples or None, each with a default. `__post_init__` checks ranges
            with `stoker.recipes.options.require`.
        pack_command: What to type to make a store for it.
        defaults: Settings that fit it better than the config's own defaults.
        uses: Keys of the config that only some recipes read, and this one does; a config that writes
            another one is told that it has no effect.
        transient: Options that a checkpoint does not keep: a resumed run may have another value.
        files: Options that are paths of files. A checkpoint keeps a digest of the file instead of its
            path, and a resumed run needs the same file.
    """

    name: str
    Options: type[Any]
    pack_command: str = "stoker pack --help"
    defaults: tuple[Default, ...] = ()
    uses: tuple[str, ...] = ()
    transient: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @abstractmethod
    def make_job(self, store: Store, options: Any, seed: int) -> Job:
        """Build the job for a store.

        Args:
            store: Open; packed as `pack_command` says.
            options: An instance of `Options`.
            seed: Of initial weights and of the splits that need one.
        """

    @abstractmethod
    def describe(self, job: Job) -> dict[str, Any]:
        """Return what `rebuild` needs besides the options, as values that JSON knows.

        One of them is "inputs": the fields of the store that a prediction reads. A store that is
        predicted must have them with the columns of the training store.
        """

    @abstractmethod
    def rebuild(self, options: Any, facts: Facts) -> Rebuilt:
        """Return the model again, without weights and without the training store.

        Args:
            options: As in training.
            facts: From `describe`.
        """

    def export_layout(self, made: Rebuilt, facts: Facts) -> Layout | None:
        """Return the inputs and outputs of an ONNX graph; None where the recipe has none."""
        del made, facts
        return None

    def from_settings(self, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return options that other keys of the config give.

        Args:
            settings: With the recipe's defaults.
            given: What the config writes under `recipe.options`. A name that is in both, with another
                value, is refused with both places.
        """
        del settings, given
        return {}

    def note_settings(self, settings: Settings, options: Any) -> list[str]:
        """Return notes on keys of the config that mean little or something else with these options."""
        del settings, options
        return []

    def make_source(self, **paths: Any) -> Source | None:
        """Return what `stoker train` packs into the store first; None where it cannot.

        Args:
            paths: Options of the command line that were given, by name.
        """
        del paths
        return None
