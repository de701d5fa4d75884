"""The interface of recipes. A recipe is everything that a training run needs besides the trainer itself.

Enters: an open store and options. Leaves: a `Job`; later, from plain values of a checkpoint, a `Rebuilt`
model. The interface itself costs nothing.

A recipe is a class that inherits `Recipe`. stoker's own are in the folders beside this file, one each. A user's
own recipe is named in the config as `package.module:Class` (docs/extending.md has a complete example).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from stoker.augment import Compose, ProgressiveAugmentation
from stoker.config import Settings
from stoker.loader.lanes import LanePlan
from stoker.loader.planned import Mode
from stoker.recipes.scaling import RobustScale
from stoker.recipes.schedule import make_adamw
from stoker.runs.evaluation import Evaluation
from stoker.sources.contract import Source
from stoker.store.fields import Array
from stoker.store.reader import Store
from stoker.train.predict import Predicted

Tensors = Mapping[str, torch.Tensor]
Facts = Mapping[str, Any]
Columns = dict[str, torch.Tensor]


class Metrics(Protocol):
    """Accumulates on the device over the batches of a validation; one object per pass."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch, without host synchronisation."""

    def state(self) -> Any:
        """Return the accumulated values: one tensor, or lists of tensors."""

    def merge(self, states: Sequence[Any]) -> None:
        """Replace the accumulated values by those of all `states` together. Called when ranks share the samples."""

    def compute(self) -> dict[str, float]:
        """Return the metrics over all batches. Waits for the device."""


class FinalMetrics(Protocol):
    """Evaluates the best weights on the test samples with the usual metrics of the field. One object per run."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch of test samples, as `Metrics` does. They arrive in order, unless the job uses lanes."""

    def evaluate(self, model: torch.nn.Module, device: torch.device, samples: Array) -> Evaluation:
        """Return the evaluation over all batches, with baselines that are fitted on training samples.

        Args:
            model: The model with the best weights, in evaluation mode, on `device`.
            device: Device of the model.
            samples: Sorted numbers of the test samples.
        """


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
        order: Order of the training samples.
        lanes: For `order="lanes"`.
        plan_lanes: With `lanes`: samples of another split to lanes for them; None where there are too few.
        augmentation: For the training images, if any.
        monitor: The metric that decides the best checkpoint, and whether more is better.
        strata: Class of each training sample, for a config that asks for a part of them: every class
            then keeps its share. None draws without regard to classes.
        balance: A field of classes, each of which the training loader draws equally often; None draws every sample
            once an epoch.
        scales_rate: Whether `make_optimizer` fits the learning rate to the samples per update itself.
        final_metrics: Makes what evaluates the best weights on the test samples, beside strong simple baselines; None
            leaves it at `metrics` and `baseline`. Every rank evaluates all test samples.
        notes: What was decided and why, for the log.
        facts: What was found in the store that `Recipe.rebuild` needs; ours return it from `describe`.
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
    augmentation: Compose | ProgressiveAugmentation | None = None
    monitor: tuple[str, bool] = ("loss", False)
    strata: Array | None = None
    balance: str | None = None
    scales_rate: bool = False
    final_metrics: Callable[[], FinalMetrics] | None = None
    notes: tuple[str, ...] = ()
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class RawBatch:
    """Some pieces of raw input on their way to the model."""

    # one per row: row numbers (int64), file names or ids (text), times (datetime64[ns])
    keys: Array
    # input of `Rebuilt.unpack`, in host memory; `Rebuilt.augment` is not applied to it. If there are more keys than
    # `batch_size`, every tensor must have one row per key. Rows without an answer hold zeros.
    batch: Tensors
    # `(rows,)` bool, False for rows with a reason instead of an answer; None if every row has an answer
    answered: Array | None = None
    reasons: Sequence[str | None] | None = None  # per row a remark for the user, or None
    # additional columns of the output, such as the file of each row
    labels: Mapping[str, Array] = field(default_factory=dict)
    # targets, if the input has any: `(rows,)` class indices, -1 for unknown; or `(rows, values)`, NaN for unknown.
    # The answers are then evaluated.
    truth: Array | None = None


class RawReader(Protocol):
    """Raw input that a recipe has opened. Applies what was fitted in training to new data."""

    key: str  # name of the column of `RawBatch.keys`: "row", "file", "time", "id"
    num_rows: int | None  # number of rows; None if it is not known before the last row

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield every row once, in input order: ready for the model, or with the reason why it is not."""

    def notes(self) -> Sequence[str]:
        """Return notes on what was done to the rows. Called after the last row."""


class Judge(Protocol):
    """Compares answers with known targets, batch by batch."""

    def update(self, columns: Mapping[str, Array], truth: Array) -> None:
        """Add answers, under the names of `Rebuilt.predict`, and one target per answer. Unknown targets are skipped."""

    def evaluate(self) -> Evaluation | None:
        """Return the evaluation of the answers; None if no target is known."""


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
        pack_command: What to type to make a store for it, whose folder is OUT.
        defaults: Settings that fit it better than the config's own defaults.
        uses: Keys of the config that only some recipes read, and this one does; a config that writes
            another one is told that it has no effect.
        transient: Options that a checkpoint does not keep: a resumed run may have another value.
        files: Options that are paths of files. A checkpoint keeps a digest of the file instead of its
            path, and a resumed run needs the same file.
        raw_kinds: What `open_raw` takes, in words, for messages: "a folder of pictures".
        endings: Of outputs that `write_answers` writes besides the tables (.csv, .parquet, .jsonl): ".msp"; "/" is a
            folder.
        label_fields: Text fields of a store that `write_answers` gets beside the answers for it.
    """

    name: str
    Options: type[Any]
    pack_command: str = "stoker pack --help"
    defaults: tuple[Default, ...] = ()
    uses: tuple[str, ...] = ()
    transient: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    raw_kinds: str = ""
    endings: tuple[str, ...] = ()
    label_fields: tuple[str, ...] = ()

    @abstractmethod
    def make_job(self, store: Store, options: Any, seed: int) -> Job:
        """Build the job for a store.

        Args:
            store: An open store, packed by `pack_command`.
            options: An instance of `Options`.
            seed: Seed of the initial weights and of random splits.
        """

    @abstractmethod
    def describe(self, job: Job) -> dict[str, Any]:
        """Return what `rebuild` needs besides the options, as values that JSON can hold.

        The key "inputs" is required: the fields of the store that a prediction reads. A store to be
        predicted must have these fields, with the columns of the training store.
        """

    @abstractmethod
    def rebuild(self, options: Any, facts: Facts) -> Rebuilt:
        """Build the model again, without its weights and without the training store.

        Args:
            options: The options of the training.
            facts: What `describe` returned.
        """

    def export_layout(self, made: Rebuilt, facts: Facts) -> Layout | None:
        """Return the inputs and outputs of the ONNX graph; None if the recipe has no ONNX export."""
        return None

    def open_raw(
        self, given: Any, made: Rebuilt, facts: Facts, told: Mapping[str, Any]
    ) -> RawReader | None:
        """Open raw input for predictions; return None for input of a kind that the recipe does not read.

        Args:
            given: A path, or in Python a frame, mapping or array.
            made: The model with its weights.
            facts: What `describe_job` returned: also the columns, repairs and class names of the training.
            told: Command-line options that the user gave: "text" (a `TextOptions`) and "batch_size". "is_table" says
                whether the answers become rows of one table; otherwise the recipe writes files of its own.

        Raises:
            InputError: The input lacks something that the model was trained on; the message names all of it.
        """
        return None

    def read_truth(
        self, store: Store, samples: Array, made: Rebuilt, options: Any, facts: Facts
    ) -> Array | None:
        """Return the targets of samples of a store, in the form of `RawBatch.truth`; None if it has no targets."""
        return None

    def make_judge(self, options: Any, facts: Facts) -> Judge | None:
        """Return the evaluator of answers with known targets; None takes stoker's own for classes and values."""
        return None

    def write_answers(
        self, out: Path, answers: Iterable[Predicted], made: Rebuilt, facts: Facts
    ) -> int | tuple[int, Sequence[str]]:
        """Write answers to a file with one of the recipe's `endings`; return the number of rows, perhaps with notes."""
        return 0  # never called for a recipe without endings

    def from_settings(self, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of the recipe that come from other keys of the config.

        Args:
            settings: The settings, with the recipe's defaults filled in.
            given: What the config says under `recipe.options`. An option that is in both with different
                values is an error, which names both places.
        """
        return {}

    def note_settings(self, settings: Settings, options: Any) -> list[str]:
        """Return notes on config keys that have no effect or another meaning with these options."""
        return []

    def make_source(self, **paths: Any) -> Source | None:
        """Return the source that `stoker train` packs into the store first; None if the recipe has none.

        Args:
            paths: Command-line options that the user gave, by name.
        """
        return None


# -- the inputs of an exported graph ----------------------------------------------------------------


Tensor = torch.Tensor
BATCH = "batch"
IMAGE_SIZES = ("height", "width")


@dataclass(frozen=True, eq=False)
class Port:
    """One input of the graph."""

    key: str  # name of the input in the recipe
    # per axis a number, or the name of a free size: `BATCH`, one of `IMAGE_SIZES`, or another word
    shape: tuple[int | str, ...]
    dtype: torch.dtype  # type that a caller must pass
    about: str  # description for people
    # upper bound (exclusive) of example values, which start at 0: a number, or the name of a size. None draws
    # numbers around 0, or around the center of `scaler`.
    below: float | str | None = None
    scaler: RobustScale | None = None  # range of the training values
    name: str = ""  # name in the graph; empty: the key, with "_" for special characters

    def draw(self, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
        """Return random example values of this shape and type."""
        shape = [sizes[size] if isinstance(size, str) else size for size in self.shape]
        if self.below is None:
            values = torch.randn(shape, generator=generator)
            if self.scaler is not None:
                # A series has one column more in the model than in the store: its gap flag.
                center, scale = (
                    part[: shape[-1]] for part in (self.scaler.center, self.scaler.scale)
                )
                values = (center + scale * values).to(self.dtype)
            return values
        top = sizes[self.below] if isinstance(self.below, str) else self.below
        return (torch.rand(shape, generator=generator) * top).to(self.dtype)


@dataclass(frozen=True)
class Layout:
    """How a trained recipe becomes a graph."""

    ports: Sequence[Port]  # the inputs, in order
    # converts tensors, named by `Port.key`, to the model's inputs
    read: Callable[[Mapping[str, Tensor]], Any]
    predict: Callable[[Any, Any], dict[str, Tensor]]  # model and inputs to named predictions
    # context around the tracing of the graph, for models that torch cannot trace alone; yields the
    # `custom_translation_table` for `torch.onnx.export`
    tracing: Callable[[torch.nn.Module], AbstractContextManager[dict[Any, Any]]] | None = None


@dataclass(frozen=True)
class Sizes:
    """Input sizes that are fixed in the graph; the others stay free."""

    batch: int | None = None  # samples; None leaves it free
    # height and width, where the recipe takes images; None leaves them free
    image: tuple[int, int] | None = None
