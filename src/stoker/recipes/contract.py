"""What a recipe is: everything that a training run needs besides the trainer itself.

Enters: an open store and options. Leaves: a `Job`; later, from plain values of a checkpoint, a `Rebuilt`
model. Costs nothing by itself.

A recipe is a class that inherits `Recipe`. Ours are in the folders beside this file, one each; somebody
else's is named in a config as `package.module:Class` (docs/extending.md has a whole one).
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
        """Take a batch; no host synchronisation."""

    def state(self) -> Any:
        """Return what was counted: tensors, in lists or alone."""

    def merge(self, states: Sequence[Any]) -> None:
        """Become what all of these have counted together; where ranks share the samples."""

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything seen; waits for the device."""


class FinalMetrics(Protocol):
    """Evaluates the best weights on the test samples as the field does; one object per run."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Take a batch of test samples, as `Metrics` does. They come in order, unless the job walks over lanes."""

    def evaluate(self, model: torch.nn.Module, device: torch.device, samples: Array) -> Evaluation:
        """Return the evaluation of everything seen, beside baselines fitted on training samples.

        Args:
            model: With the best weights, in evaluation mode, on `device`.
            device: Where it is.
            samples: Numbers of the test samples, rising.
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
        order: Of the training samples.
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
    # what `Rebuilt.unpack` reads, on the host; `Rebuilt.augment` is not applied to it. Every tensor has one row per
    # key where there are more keys than `batch_size`. Rows that cannot be answered hold zeros.
    batch: Tensors
    # `(rows,)` bool, False where there is a reason instead of an answer; None where all have one
    answered: Array | None = None
    reasons: Sequence[str | None] | None = None  # per row what a user must know of it, or None
    # more columns beside the key, such as the file that a row is from
    labels: Mapping[str, Array] = field(default_factory=dict)
    # where the input has targets: `(rows,)` places of the classes, -1 where unknown, or `(rows, values)`, NaN where
    # unknown. The answers are then evaluated.
    truth: Array | None = None


class RawReader(Protocol):
    """Raw input that a recipe has opened: replays on new data what was fitted in training."""

    key: str  # name of the column of `RawBatch.keys`: "row", "file", "time", "id"
    num_rows: int | None  # how many there are; None where that is not known before the end

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield every row once, in the order of the input, with an answer or a reason."""

    def notes(self) -> Sequence[str]:
        """Return what was done to the rows; asked after the last one."""


class Judge(Protocol):
    """Compares answers with what is known to be true, as they come."""

    def update(self, columns: Mapping[str, Array], truth: Array) -> None:
        """Take some answers, by the names of `Rebuilt.predict`, and as many truths; unknown ones are passed over."""

    def evaluate(self) -> Evaluation | None:
        """Return how good the answers are; None where no truth is known."""


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
        return None

    def open_raw(
        self, given: Any, made: Rebuilt, facts: Facts, told: Mapping[str, Any]
    ) -> RawReader | None:
        """Open raw input for predictions; None where the recipe reads no input of this kind.

        Args:
            given: A path, or in Python a frame, mapping or array.
            made: With its weights.
            facts: From `describe_job`: with the columns, repairs and class names of training.
            told: Options of the command line that were given: "text" (a `TextOptions`), "batch_size"; "is_table" says
                whether the answers become rows of one table, and not files of the recipe's own.

        Raises:
            InputError: The input lacks what the model was trained on; all of it is named.
        """
        return None

    def read_truth(
        self, store: Store, samples: Array, made: Rebuilt, options: Any, facts: Facts
    ) -> Array | None:
        """Return the targets of some samples of a store, as `RawBatch.truth` has them; None where it has none."""
        return None

    def make_judge(self, options: Any, facts: Facts) -> Judge | None:
        """Return what evaluates answers whose truths are known; None where they are classes or values."""
        return None

    def write_answers(
        self, out: Path, answers: Iterable[Predicted], made: Rebuilt, facts: Facts
    ) -> int | tuple[int, Sequence[str]]:
        """Write answers in one of the recipe's own `endings`; return how many rows, perhaps with what to say of it."""
        return 0  # never called of a recipe without endings

    def from_settings(self, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return options that other keys of the config give.

        Args:
            settings: With the recipe's defaults.
            given: What the config writes under `recipe.options`. A name that is in both, with another
                value, is refused with both places.
        """
        return {}

    def note_settings(self, settings: Settings, options: Any) -> list[str]:
        """Return notes on keys of the config that mean little or something else with these options."""
        return []

    def make_source(self, **paths: Any) -> Source | None:
        """Return what `stoker train` packs into the store first; None where it cannot.

        Args:
            paths: Options of the command line that were given, by name.
        """
        return None


# -- the inputs of an exported graph ----------------------------------------------------------------


Tensor = torch.Tensor
BATCH = "batch"
IMAGE_SIZES = ("height", "width")


@dataclass(frozen=True, eq=False)
class Port:
    """One input of the graph."""

    key: str  # what the recipe calls it
    # a number, or the name of a size that is free: `BATCH`, `IMAGE_SIZES`, or another word
    shape: tuple[int | str, ...]
    dtype: torch.dtype  # as it must come
    about: str  # what it is, for people
    # values to try it with are from 0 to below this number, or this size; None for numbers around 0, or around
    # `scaler`
    below: float | str | None = None
    scaler: RobustScale | None = None  # says where the training values lie
    name: str = ""  # in the graph; the key, as a plain word, where it is empty

    def draw(self, sizes: Mapping[str, int], dice: torch.Generator) -> Tensor:
        """Return values of the right shape and kind."""
        shape = [sizes[size] if isinstance(size, str) else size for size in self.shape]
        if self.below is None:
            values = torch.randn(shape, generator=dice)
            if self.scaler is not None:
                # A series has one column more in the model than in the store: its gap flag.
                center, scale = (
                    part[: shape[-1]] for part in (self.scaler.center, self.scaler.scale)
                )
                values = (center + scale * values).to(self.dtype)
            return values
        top = sizes[self.below] if isinstance(self.below, str) else self.below
        return (torch.rand(shape, generator=dice) * top).to(self.dtype)


@dataclass(frozen=True)
class Layout:
    """How a trained recipe becomes a graph."""

    ports: Sequence[Port]  # the inputs, in order
    # tensors by the keys of the ports to the model's inputs
    read: Callable[[Mapping[str, Tensor]], Any]
    predict: Callable[[Any, Any], dict[str, Tensor]]  # model and inputs to named predictions
    # wraps the trace of the graph where torch needs help with it; gives what `torch.onnx.export` takes as
    # `custom_translation_table`
    tracing: Callable[[torch.nn.Module], AbstractContextManager[dict[Any, Any]]] | None = None


@dataclass(frozen=True)
class Sizes:
    """Sizes of inputs that shall be fixed; the others stay free."""

    batch: int | None = None  # samples; None leaves it free
    # height and width, where the recipe takes images; None leaves them free
    image: tuple[int, int] | None = None
