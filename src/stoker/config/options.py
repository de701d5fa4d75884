"""The options of every room, one model each: each field has its name, type, range, unit, default and meaning.

Enters: keywords. Leaves: a frozen, strictly typed value, or an `InputError` that names the option; mappings from other
names of a key to the key. Costs about 0.1 s to import (pydantic), microseconds afterwards.

These models are the only list of settings. A config file, `--set`, `Trainer(config=...)`, the JSON Schema,
the tables of docs/config.md and `stoker config init` are all made from them, with the same names. The models
stand here and not in their rooms because a config is checked before torch is imported.

Other names of a key:

- `LAYOUTS`: keys that config files of the documents have in other sections. A config may write them.
- `FORMER`: names that options had in Python. Models take and show them.
- `SYNONYMS`: what other programs call a key. `stoker config migrate` takes them over; a config, `--set` and
  `Trainer(config=...)` refuse them with the name to write.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stoker.display import nearest
from stoker.errors import InputError
from stoker.units import GIB

DISTILL = "training.student_distill"
LAZY = "data.memory_efficient_mode"
RAM = f"{LAZY}.ram_32gb_mode"
SECTION_RANKS = (DISTILL, "training", RAM, LAZY, "data", "gpu_optimization")
"""Precedence of sections that write the same key, the most specific first."""

LAYOUTS: Mapping[str, str] = {
    f"{DISTILL}.batch_size": "training.batch_size",
    f"{DISTILL}.gradient_accumulation_steps": "training.gradient_accumulation_steps",
    f"{DISTILL}.num_workers": "data.num_workers",
    "training.learning_rate": "training.lr",
    "training.num_workers": "data.num_workers",
    f"{RAM}.max_training_samples": "data.max_training_samples",
    f"{RAM}.gradient_accumulation": "training.gradient_accumulation_steps",
    f"{RAM}.empty_cache_frequency": "training.empty_cache_every_n_batches",
    f"{LAZY}.use_lazy_loading": "data.use_lazy_loading",
    f"{LAZY}.enabled": "data.use_lazy_loading",
    f"{LAZY}.lazy_cache_dir": "data.lazy_cache_dir",
    f"{LAZY}.precompute_graphs": "data.precompute_graphs",
    "data.batch_size": "training.batch_size",
    **{
        f"gpu_optimization.{name}": f"{section}.{name}"
        for section, names in {
            "training": "batch_size use_amp gradient_accumulation_steps empty_cache_every_n_epochs "
            "log_gpu_stats_every_n_batches",
            "data": "use_chunk_loader chunk_size_gb num_workers prefetch_factor persistent_workers pin_memory "
            "drop_last",
        }.items()
        for name in names.split()
    },
}

FORMER: Mapping[str, str] = {
    "accumulation_steps": "training.gradient_accumulation_steps",
    "learning_rate": "training.lr",
    "gradient_accumulation": "training.gradient_accumulation_steps",
    "empty_cache_frequency": "training.empty_cache_every_n_batches",
    "lazy_loading": "data.use_lazy_loading",
    "run_dir": "run.dir",
    "recipe": "recipe.name",
    "augmentation": "training.use_gpu_augmentation",
    "recipe_options": "recipe.options",
}

_WORDS = {
    "training.batch_size": "train_batch_size",
    "data.num_workers": "workers n_workers dataloader_workers",
    "training.epochs": "num_epochs n_epochs max_epochs",
    "training.lr": "base_lr initial_lr",
    "training.gradient_accumulation_steps": "accumulation_steps gradient_accumulation grad_accum_steps "
    "grad_accumulation_steps accumulate_grad_batches",
    "training.clip_norm": "grad_clip gradient_clip gradient_clip_val gradient_clip_norm grad_clip_norm "
    "clip_grad_norm max_grad_norm",
    "training.use_amp": "amp mixed_precision use_mixed_precision",
    "training.seed": "random_seed random_state",
    "training.compile": "torch_compile use_compile compile_model",
    "training.tensorboard": "use_tensorboard",
    "training.activation_checkpointing": "gradient_checkpointing use_gradient_checkpointing "
    "use_checkpointing",
    "training.init_gain": "xavier_gain gain",
    "training.output_bound": "output_clip output_clamp output_clipping clip_outputs",
    "training.use_gpu_augmentation": "gpu_augmentation_enabled gpu_augmentation",
    "data.chunk_size_gb": "chunk_gb",
    f"{LAZY}.enabled": "memory_efficient_mode memory_efficient",
    "data.lazy_cache_dir": "cache_dir",
    "data.use_lazy_loading": "lazy_loading lazy",
    "data.max_training_samples": "max_samples max_train_samples",
    "training.empty_cache_every_n_batches": "empty_cache_steps",
    "recipe.store": "hdf5_path h5_path hdf5_file data_path",
    "run.dir": "run_dir output_dir save_dir checkpoint_dir",
}

SYNONYMS: Mapping[str, str] = {word: key for key, words in _WORDS.items() for word in words.split()}

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_MOST = 2**31 - 1  # counts stay inside 32 bits: some kernels index with them
_ENTRY = re.compile(r"^    (\w+): (.+(?:\n        .+)*)", re.MULTILINE)
T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field, Field))
def options(kind: type[T]) -> type[T]:
    """Make a class of annotated defaults a model: checked when it is made, and after `dataclasses.replace`.

    Names that a field once had (`FORMER`) are still taken and read.
    """
    made = dataclass(frozen=True, kw_only=True, config=STRICT)(kind)
    for base in reversed(made.__mro__):
        for name, meaning in read_docstring(base)[1].items():
            made.__pydantic_fields__[name].description = meaning
    plain: Callable[..., None] = made.__init__

    @functools.wraps(plain)
    def checked(self: Any, **given: Any) -> None:
        names = {name: _present_name(made, name) for name in given}
        try:
            plain(self, **{names[name]: value for name, value in given.items()})
        except ValidationError as error:
            raise _refusal(made, error) from None

    def read_former(self: Any, name: str) -> Any:
        if not name.startswith("_") and (present := _present_name(made, name)) != name:
            return getattr(self, present)
        raise AttributeError(f"{made.__name__!r} object has no attribute {name!r}")

    made.__init__ = checked  # type: ignore[method-assign]
    made.__getattr__ = read_former  # type: ignore[attr-defined]
    return made  # type: ignore[return-value]


def read_docstring(kind: type[Any]) -> tuple[str, dict[str, str]]:
    """Return a class's docstring up to its attributes, and the meaning of each attribute."""
    about, _, entries = (inspect.cleandoc(kind.__doc__ or "")).partition("\n\nAttributes:\n")
    return about, {name: " ".join(text.split()) for name, text in _ENTRY.findall(entries)}


def _present_name(kind: type[Any], name: str) -> str:
    present = FORMER.get(name, "").rpartition(".")[2]
    return present if present in kind.__dataclass_fields__ else name


def _refusal(kind: type[Any], error: ValidationError) -> InputError:
    first = error.errors(include_url=False)[0]
    name, value = str(first["loc"][0]), first["input"]
    schemas = TypeAdapter(kind).json_schema()["properties"]
    if name not in schemas:
        near = nearest(name, schemas)
        fix = f"{near}={value!r}" if near else f"leave {name} out"
        return InputError(f"there is no option {name!r}.", ", ".join(schemas), fix)
    is_above = first["type"] == "less_than_equal"
    allowed = describe_allowed(schemas[name], bounds=is_above, in_python=True)
    default = kind.__pydantic_fields__[name].default
    return InputError(f"{name} is {value!r}.", allowed, f"{name}={default!r}")


def describe_allowed(
    schema: Mapping[str, Any], *, bounds: bool = False, in_python: bool = False
) -> str:
    """Return what an option of this JSON Schema accepts, in words: "a whole number from 0 to 1024, or null".

    `bounds` names the largest value also where it only guards against overflow; `in_python` has Python's words for
    yes, no and nothing, instead of YAML's.
    """
    if "anyOf" in schema:
        return ", or ".join(
            describe_allowed(option, bounds=bounds, in_python=in_python)
            for option in schema["anyOf"]
        )
    if "enum" in schema:
        return " or ".join(str(choice) for choice in schema["enum"])
    kinds = {"boolean": "true or false", "null": "null"}
    if in_python:
        kinds = {"boolean": "True or False", "null": "None"}
    kinds |= {"string": "text", "object": "a section of names and values"}
    kind = schema["type"]
    if kind in kinds:
        return kinds[kind]
    noun = "a whole number" if kind == "integer" else "a number"
    # A bound that only guards against overflow would confuse a user whose value is far below it.
    most = schema.get("maximum", float("inf"))
    bounded = bounds or most < 1_000_000
    shown = f"{most:,}" if most < 1e15 else f"{most:g}"
    if "exclusiveMinimum" in schema:
        noun += f" above {schema['exclusiveMinimum']:g}"
        return f"{noun}, up to {shown}" if bounded else noun
    if bounded:
        return f"{noun} from {schema['minimum']} to {shown}"
    return f"{noun}, {schema['minimum']} or more"


def _key(default: Any, unit: str = "", **limits: Any) -> Any:
    """Return a field: its default, its unit, and what values it takes. Its meaning stands in the class's docstring."""
    extra: dict[str, Any] = {"unit": unit} if unit else {}
    return Field(default, json_schema_extra=extra, **limits)


def _capture_word(value: Any) -> Any:
    """Return "on" or "off" for what YAML 1.1 reads out of a bare `on` or `off`."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
Capture = Literal["auto", "on", "off"]
NonFinite = Literal["stop", "skip", "rollback"]
Count = Annotated[int, Field(ge=0, le=_MOST)]
Jitter = Annotated[float, Field(ge=0, le=1)]


@options
class LoadingOptions:
    """Loading of samples: the loader's options, and those of a DataLoader of your own.

    Attributes:
        use_chunk_loader: Load big chunks to the GPU and cut the batches there.
        chunk_size_gb: GPU memory for data, in GiB (2**30 bytes). null: the plan takes 75 % of what is free.
        drop_last: Drop the last batch of an epoch when it is short.
        max_training_samples: Train on n samples, drawn by the seed; each class keeps its share. null: on all.
        num_workers: Worker processes of a DataLoader of your own; `stoker train` has none.
        prefetch_factor: Batches that each worker of a DataLoader of your own loads ahead. null: 2 with workers, none
            without.
        persistent_workers: Keep the workers of a DataLoader of your own between epochs. null: yes when there are
            workers.
        pin_memory: Pin batches of a DataLoader of your own; `stoker train` always does for a GPU.
        use_lazy_loading: For a dataset of your own: read samples from a cache on disk; `stoker train` reads the store.
        lazy_cache_dir: For a dataset of your own: folder of that cache.
        precompute_graphs: For a dataset of your own: build molecule graphs once, into that cache.
    """

    use_chunk_loader: bool = _key(True)
    chunk_size_gb: float | None = _key(None, "GiB", gt=0, le=100_000)
    drop_last: bool = _key(False)
    max_training_samples: int | None = _key(None, "samples", ge=1, le=2**53)
    num_workers: int = _key(0, "processes", ge=0, le=1024)
    prefetch_factor: int | None = _key(None, "batches per worker", ge=1, le=1024)
    persistent_workers: bool | None = _key(None)
    pin_memory: bool = _key(True)
    use_lazy_loading: bool = _key(True)
    lazy_cache_dir: str = _key("data/processed/lazy_cache", "path", min_length=1)
    precompute_graphs: bool = _key(False)

    @property
    def chunk_bytes(self) -> int | None:
        """`chunk_size_gb` in bytes. Memory is binary here, whatever the key is called."""
        return None if self.chunk_size_gb is None else int(self.chunk_size_gb * GIB)


@options
class TrainOptions:
    """The training loop: what a `Trainer` does.

    Attributes:
        epochs: Passes over the training samples. Unless written, the recipe's own.
        precision: Number format of the step; the loss is fp32 or more. auto: bf16 or fp16 by what the GPU and the model
            allow, fp32 on a CPU; the log says which and why.
        gradient_accumulation_steps: Batches whose gradients are summed before one update.
        clip_norm: Largest norm of all gradients together. null: not clipped.
        capture: Replay the whole step as one CUDA graph. auto: where the model allows it and the first replay agrees
            with the eager step; on: or end with the reason.
        compile: Compile the model with torch.compile first.
        nonfinite: What to do about a loss that is not finite. stop: end and name the batch; skip: leave the update out;
            rollback: go back to the epoch's start and leave the batch out.
        read_every: Steps between two reads of losses from the device; fewer make the loop wait.
        seed: Seed of all generators. null: they are left as they are.
        max_steps: Train on at most this many batches in the whole run; it may end within an epoch.
        patience: End the run after this many epochs without a better monitored metric. 0: never.
        min_delta: Smallest improvement of the metric that counts for patience. null: any.
        keep_last: Newest checkpoints that are kept, besides the best.
        checkpoint_every_epochs: Save after every n epochs, and at the end. 0: only when a signal ends the run.
        checkpoint_every_steps: Save after every n batches within an epoch. 0: never.
        empty_cache_every_n_epochs: Give cached GPU memory back after every n epochs. 0: never, the fastest; the next
            epoch must allocate again.
        empty_cache_every_n_batches: Give cached GPU memory back after every n batches. 0: never; each call waits for
            the GPU.
        log_gpu_stats_every_n_batches: Log GPU memory after every n batches. 0: never.
        survive_oom: When memory runs out, take smaller steps with the same result, instead of ending.
        activation_checkpointing: Recompute activations in the backward pass: less memory, more time.
        tensorboard: Write scalars for TensorBoard beside the run log; needs that package.
    """

    epochs: Count = _key(1, "epochs")
    precision: Precision = _key("auto")
    gradient_accumulation_steps: int = _key(1, "batches", ge=1, le=65536)
    clip_norm: float | None = _key(1.0, gt=0, le=1e30)
    capture: Annotated[
        Capture, BeforeValidator(_capture_word, json_schema_input_type=Capture | bool)
    ] = _key("auto")
    compile: bool = _key(False)
    nonfinite: NonFinite = _key("stop")
    read_every: int = _key(50, "steps", ge=1, le=_MOST)
    seed: int | None = _key(None, ge=0, le=2**53)
    max_steps: int | None = _key(None, "batches", ge=1, le=_MOST)
    patience: Count = _key(0, "epochs")
    min_delta: float | None = _key(None, gt=0, le=1e30)
    keep_last: int = _key(2, "files", ge=1, le=10_000)
    checkpoint_every_epochs: Count = _key(1, "epochs")
    checkpoint_every_steps: Count = _key(0, "batches")
    empty_cache_every_n_epochs: Count = _key(0, "epochs")
    empty_cache_every_n_batches: Count = _key(0, "batches")
    log_gpu_stats_every_n_batches: Count = _key(0, "batches")
    survive_oom: bool = _key(True)
    activation_checkpointing: bool = _key(False)
    tensorboard: bool = _key(False)


@options
class JobOptions(TrainOptions):
    """The training step, and the job around it.

    Attributes:
        seed: Seed of weights, splits, shuffling, dropout and augmentation.
        batch_size: Samples in one step, over all GPUs together. Unless written, the recipe's own.
        lr: Step size of the optimizer. Unless written, the recipe's own.
        use_amp: Train in 16-bit where it is safe (automatic mixed precision).
        use_gpu_augmentation: Augment on the GPU, as the section gpu_augmentation says. Unless written, the recipe
            decides: those of images do.
        parallel: With several ranks: the whole model on each (ddp), or a part of it where it does not fit (fsdp).
        stall_seconds: With several ranks: end all of them when none has made a step for this time.
        init_gain: Gain of the Xavier initialisation. null: the model's own.
        output_bound: Keep outputs within plus or minus this. null: unbounded.
        output_bound_mode: soft: bound * tanh(x / bound), which keeps a gradient everywhere; clamp: a hard cut, whose
            gradient outside the bound is zero and hides divergence.
    """

    # A job always has a seed and a log; a Trainer made in Python begins with as little as possible.
    epochs: Count = _key(10, "epochs")
    seed: int = _key(0, ge=0, le=2**53)
    log_gpu_stats_every_n_batches: Count = _key(100, "batches")
    batch_size: int = _key(128, "samples", ge=1, le=_MOST)
    lr: float = _key(1e-4, "1 per update", gt=0, le=1e6)
    use_amp: bool = _key(True)
    use_gpu_augmentation: bool = _key(False)
    parallel: Literal["ddp", "fsdp"] = _key("ddp")
    stall_seconds: int = _key(600, "s", ge=5, le=86400)
    init_gain: float | None = _key(None, gt=0, le=100)
    output_bound: float | None = _key(None, gt=0, le=1e30)
    output_bound_mode: Literal["soft", "clamp"] = _key("soft")

    @property
    def samples_per_update(self) -> int:
        """Samples behind one optimizer update, over all ranks together."""
        return self.batch_size * self.gradient_accumulation_steps


@options
class AugmentOptions:
    """What is drawn per sample when training.use_gpu_augmentation is on.

    Attributes:
        horizontal_flip_prob: Share of samples flipped left to right.
        rotation_degrees: Rotate by an angle within plus or minus this.
        brightness: Multiply by a factor within 1 ± this.
        contrast: Stretch around the mean by a factor within 1 ± this.
        saturation: Stretch colours by a factor within 1 ± this.
    """

    horizontal_flip_prob: float = _key(0.5, ge=0, le=1)
    rotation_degrees: float = _key(15.0, "degrees", ge=0, le=180)
    brightness: Jitter = _key(0.2)
    contrast: Jitter = _key(0.2)
    saturation: Jitter = _key(0.1)


@options
class RecipeOptions:
    """Which job `stoker train` does, on which data (docs/training.md).

    Attributes:
        name: A ready job by name, or package.module:Class of your own (docs/extending.md). null: this file is not for
            `stoker train`.
        store: Packed by `stoker pack`, or an HDF5 file. null: `--store` says.
        options: Options of the recipe by name, checked by the recipe; docs/recipes/ lists them.
    """

    name: str | None = _key(None, min_length=1)
    store: str | None = _key(None, "path", min_length=1)
    options: dict[str, Any] = field(default_factory=dict, hash=False)


@options
class RunOptions:
    """Where a run keeps its log and checkpoints.

    Attributes:
        dir: Folder of one run. null: runs/ and the recipe's name.
    """

    dir: str | None = _key(None, "path", min_length=1)
