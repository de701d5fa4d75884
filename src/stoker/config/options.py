"""The options of every room, one model each: name, type, range, unit, default and meaning stand on the field.

Enters: keywords. Leaves: a frozen, strictly typed value, or an `InputError` that names the option. Costs about
0.1 s to import (pydantic), microseconds afterwards.

These models are the only list of settings. A config file, `--set`, `Trainer(config=...)`, the JSON Schema,
the tables of docs/config.md and `stoker config init` are all made from them, with the same names. The models
stand here and not in their rooms because a config is checked before torch is imported.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stoker.config.names import FORMER
from stoker.errors import InputError
from stoker.units import GIB

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_MOST = 2**31 - 1  # counts stay inside 32 bits: some kernels index with them
T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field, Field))
def options(kind: type[T]) -> type[T]:
    """Make a class of annotated defaults a model: checked when it is made, and after `dataclasses.replace`.

    Names that a field once had (`stoker.config.names.FORMER`) are still taken and read.
    """
    made = dataclass(frozen=True, kw_only=True, config=STRICT)(kind)
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


def _present_name(kind: type[Any], name: str) -> str:
    present = FORMER.get(name, "").rpartition(".")[2]
    return present if present in kind.__dataclass_fields__ else name


def _refusal(kind: type[Any], error: ValidationError) -> InputError:
    first = error.errors(include_url=False)[0]
    name, value = str(first["loc"][0]), first["input"]
    schemas = TypeAdapter(kind).json_schema()["properties"]
    if name not in schemas:
        near = difflib.get_close_matches(name, schemas, n=1)
        return InputError(
            f"there is no option {name!r}.", ", ".join(schemas), near[0] if near else "leave it out"
        )
    is_above = first["type"] == "less_than_equal"
    allowed = describe_allowed(schemas[name], bounds=is_above, in_python=True)
    default = kind.__dataclass_fields__[name].default
    return InputError(f"{name} is {value!r}.", allowed, f"{name}={default!r}")


def describe_allowed(
    schema: Mapping[str, Any], *, bounds: bool = False, in_python: bool = False
) -> str:
    """Return what an option accepts, in words: "a whole number from 0 to 1024, or null".

    Args:
        schema: JSON Schema of the option.
        bounds: Name the largest value also where it only guards against overflow.
        in_python: With Python's words for yes, no and nothing, instead of YAML's.
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
    # A bound that only guards against overflow would confuse whoever is below it.
    most = schema.get("maximum", float("inf"))
    bounded = bounds or most < 1_000_000
    shown = f"{most:,}" if most < 1e15 else f"{most:g}"
    if "exclusiveMinimum" in schema:
        noun += f" above {schema['exclusiveMinimum']:g}"
        return f"{noun}, up to {shown}" if bounded else noun
    if bounded:
        return f"{noun} from {schema['minimum']} to {shown}"
    return f"{noun}, {schema['minimum']} or more"


def _key(description: str, unit: str = "", **limits: Any) -> Any:
    extra: dict[str, Any] = {"unit": unit} if unit else {}
    return Field(description=description, json_schema_extra=extra, **limits)


def _capture_word(value: Any) -> Any:
    """Return "on" or "off" for what YAML 1.1 reads out of a bare `on` or `off`."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
Capture = Literal["auto", "on", "off"]
NonFinite = Literal["stop", "skip", "rollback"]
Count = Annotated[int, Field(ge=0, le=_MOST)]
Jitter = Annotated[float, Field(ge=0, le=1)]
Epochs = Annotated[
    Count, _key("Passes over the training samples. Unless written, the recipe's own.", "epochs")
]
LogEvery = Annotated[Count, _key("Log GPU memory after every n batches. 0: never.", "batches")]


@options
class LoadingOptions:
    """Loading of samples: the loader's options, and those of a DataLoader of your own."""

    use_chunk_loader: Annotated[
        bool, _key("Load big chunks to the GPU and cut the batches there.")
    ] = True
    chunk_size_gb: Annotated[
        float | None,
        _key(
            "GPU memory for data, in GiB (2**30 bytes). null: the plan takes 75 % of what is free.",
            "GiB",
            gt=0,
            le=100_000,
        ),
    ] = None
    drop_last: Annotated[bool, _key("Drop the last batch of an epoch when it is short.")] = False
    max_training_samples: Annotated[
        int | None,
        _key(
            "Train on n samples, drawn by the seed; each class keeps its share. null: on all.",
            "samples",
            ge=1,
            le=2**53,
        ),
    ] = None
    num_workers: Annotated[
        int,
        _key(
            "Worker processes of a DataLoader of your own; `stoker train` has none.",
            "processes",
            ge=0,
            le=1024,
        ),
    ] = 0
    prefetch_factor: Annotated[
        int | None,
        _key(
            "Batches that each worker of a DataLoader of your own loads ahead. null: 2 with workers, "
            "none without.",
            "batches per worker",
            ge=1,
            le=1024,
        ),
    ] = None
    persistent_workers: Annotated[
        bool | None,
        _key(
            "Keep the workers of a DataLoader of your own between epochs. null: yes when there are workers."
        ),
    ] = None
    pin_memory: Annotated[
        bool, _key("Pin batches of a DataLoader of your own; `stoker train` always does for a GPU.")
    ] = True
    use_lazy_loading: Annotated[
        bool,
        _key(
            "For a dataset of your own: read samples from a cache on disk; `stoker train` reads the store."
        ),
    ] = True
    lazy_cache_dir: Annotated[
        str, _key("For a dataset of your own: folder of that cache.", "path", min_length=1)
    ] = "data/processed/lazy_cache"
    precompute_graphs: Annotated[
        bool, _key("For a dataset of your own: build molecule graphs once, into that cache.")
    ] = False

    @property
    def chunk_bytes(self) -> int | None:
        """`chunk_size_gb` in bytes. Memory is binary here, whatever the key is called."""
        return None if self.chunk_size_gb is None else int(self.chunk_size_gb * GIB)


@options
class TrainOptions:
    """The training loop: what a `Trainer` does."""

    epochs: Epochs = 1
    precision: Annotated[
        Precision,
        _key(
            "Number format of the step; the loss is always fp32. auto: bf16 or fp16 by what the GPU "
            "and the model allow, fp32 on a CPU; the log says which and why."
        ),
    ] = "auto"
    gradient_accumulation_steps: Annotated[
        int,
        _key("Batches whose gradients are summed before one update.", "batches", ge=1, le=65536),
    ] = 1
    clip_norm: Annotated[
        float | None,
        _key("Largest norm of all gradients together. null: not clipped.", gt=0, le=1e30),
    ] = 1.0
    capture: Annotated[
        Capture,
        BeforeValidator(_capture_word, json_schema_input_type=Capture | bool),
        _key(
            "Replay the whole step as one CUDA graph. auto: where the model allows it and the "
            "first replay agrees with the eager step; on: or end with the reason."
        ),
    ] = "auto"
    compile: Annotated[bool, _key("Compile the model with torch.compile first.")] = False
    nonfinite: Annotated[
        NonFinite,
        _key(
            "What to do about a loss that is not finite. stop: end and name the batch; skip: leave "
            "the update out; rollback: go back to the epoch's start and leave the batch out."
        ),
    ] = "stop"
    read_every: Annotated[
        int,
        _key(
            "Steps between two reads of losses from the device; fewer make the loop wait.",
            "steps",
            ge=1,
            le=_MOST,
        ),
    ] = 50
    seed: Annotated[
        int | None, _key("Of all generators. null: they are left as they are.", ge=0, le=2**53)
    ] = None
    keep_last: Annotated[
        int, _key("Newest checkpoints that are kept, besides the best.", "files", ge=1, le=10_000)
    ] = 2
    checkpoint_every_epochs: Annotated[
        Count,
        _key(
            "Save after every n epochs, and at the end. 0: only when a signal ends the run.",
            "epochs",
        ),
    ] = 1
    checkpoint_every_steps: Annotated[
        Count, _key("Save after every n batches within an epoch. 0: never.", "batches")
    ] = 0
    empty_cache_every_n_epochs: Annotated[
        Count,
        _key(
            "Give cached GPU memory back after every n epochs. 0: never, the fastest; the next "
            "epoch must allocate again.",
            "epochs",
        ),
    ] = 0
    empty_cache_every_n_batches: Annotated[
        Count,
        _key(
            "Give cached GPU memory back after every n batches. 0: never; each call waits for "
            "the GPU.",
            "batches",
        ),
    ] = 0
    log_gpu_stats_every_n_batches: LogEvery = 0
    survive_oom: Annotated[
        bool,
        _key("When memory runs out, take smaller steps with the same result, instead of ending."),
    ] = True
    activation_checkpointing: Annotated[
        bool, _key("Recompute activations in the backward pass: less memory, more time.")
    ] = False
    tensorboard: Annotated[
        bool, _key("Write scalars for TensorBoard beside the run log; needs that package.")
    ] = False


@options
class JobOptions(TrainOptions):
    """The training step, and the job around it."""

    # A job has a seed and a log; a Trainer of one's own begins with as little as possible.
    epochs: Epochs = 10
    seed: Annotated[
        int, _key("Of weights, splits, shuffling, dropout and augmentation.", ge=0, le=2**53)
    ] = 0
    log_gpu_stats_every_n_batches: LogEvery = 100
    batch_size: Annotated[
        int,
        _key(
            "Samples in one step, over all GPUs together. Unless written, the recipe's own.",
            "samples",
            ge=1,
            le=_MOST,
        ),
    ] = 128
    lr: Annotated[
        float,
        _key(
            "Step size of the optimizer. Unless written, the recipe's own.",
            "1 per update",
            gt=0,
            le=1e6,
        ),
    ] = 1e-4
    use_amp: Annotated[
        bool, _key("Train in 16-bit where it is safe (automatic mixed precision).")
    ] = True
    use_gpu_augmentation: Annotated[
        bool,
        _key(
            "Augment on the GPU, as the section gpu_augmentation says. Unless written, the recipe decides: "
            "those of images do."
        ),
    ] = False
    parallel: Annotated[
        Literal["ddp", "fsdp"],
        _key(
            "With several ranks: the whole model on each (ddp), or a part of it where it does not fit "
            "(fsdp)."
        ),
    ] = "ddp"
    stall_seconds: Annotated[
        int,
        _key("With several ranks: end all when none has moved for so long.", "s", ge=5, le=86400),
    ] = 600
    init_gain: Annotated[
        float | None,
        _key("Gain of the Xavier initialisation. null: the model's own.", gt=0, le=100),
    ] = None
    output_bound: Annotated[
        float | None,
        _key("Keep outputs within plus or minus this. null: unbounded.", gt=0, le=1e30),
    ] = None
    output_bound_mode: Annotated[
        Literal["soft", "clamp"],
        _key(
            "soft: bound * tanh(x / bound), which keeps a gradient everywhere; clamp: a hard "
            "cut, whose gradient outside the bound is zero and hides divergence."
        ),
    ] = "soft"

    @property
    def samples_per_update(self) -> int:
        """Samples behind one optimizer update, over all ranks together."""
        return self.batch_size * self.gradient_accumulation_steps


@options
class AugmentOptions:
    """What is drawn per sample when training.use_gpu_augmentation is on."""

    horizontal_flip_prob: Annotated[
        float, _key("Share of samples flipped left to right.", ge=0, le=1)
    ] = 0.5
    rotation_degrees: Annotated[
        float, _key("Rotate by an angle within plus or minus this.", "degrees", ge=0, le=180)
    ] = 15.0
    brightness: Annotated[Jitter, _key("Multiply by a factor within 1 ± this.")] = 0.2
    contrast: Annotated[Jitter, _key("Stretch around the mean by a factor within 1 ± this.")] = 0.2
    saturation: Annotated[Jitter, _key("Stretch colours by a factor within 1 ± this.")] = 0.1


@options
class RecipeOptions:
    """Which job `stoker train` does, on which data (docs/training.md)."""

    name: Annotated[
        str | None,
        _key(
            "A ready job by name, or package.module:Class of your own (docs/extending.md). "
            "null: this file is not for `stoker train`.",
            min_length=1,
        ),
    ] = None
    store: Annotated[
        str | None,
        _key(
            "Packed by `stoker pack`, or an HDF5 file. null: `--store` says.", "path", min_length=1
        ),
    ] = None
    options: Annotated[
        dict[str, Any],
        _key("Options of the recipe by name, checked by the recipe; docs/recipes/ lists them."),
    ] = field(default_factory=dict, hash=False)


@options
class RunOptions:
    """Where a run keeps its log and checkpoints."""

    dir: Annotated[
        str | None,
        _key("Folder of one run. null: runs/ and the recipe's name.", "path", min_length=1),
    ] = None
