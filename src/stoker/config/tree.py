"""The tree of keys that a config file may write: names, types, ranges, units, defaults.

Enters: plain values. Leaves: a frozen, strictly typed `Config`, or its JSON Schema. Costs
about 0.1 s to import (pydantic), microseconds afterwards.

Sections and names are those that people's files already have (docs/migrate.md), so that such files work as
they stand. Several sections may ask for the same thing (four of them know a batch size);
`stoker.config.resolve` says who wins.
A key that is not written says nothing, whatever its default.

`recipe.options` is the one open leaf: its names are those of the recipe, which checks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from pydantic.fields import FieldInfo

from stoker.config.yaml_lines import Place

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_MOST = 2**31 - 1  # counts stay inside 32 bits: some kernels index with them


def _key(description: str, unit: str = "", **limits: Any) -> Any:
    extra: dict[str, Any] = {"unit": unit} if unit else {}
    return Field(description=description, json_schema_extra=extra, **limits)


BatchSize = Annotated[
    int,
    _key(
        "Samples in one step, over all GPUs together. Unless written, the recipe's own.",
        "samples",
        ge=1,
        le=_MOST,
    ),
]
NumWorkers = Annotated[
    int,
    _key(
        "Worker processes of a DataLoader of your own; `stoker train` has none.",
        "processes",
        ge=0,
        le=1024,
    ),
]
Accumulation = Annotated[
    int, _key("Batches whose gradients are summed before one update.", "batches", ge=1, le=65536)
]
PrefetchFactor = Annotated[
    int | None,
    _key(
        "Batches that each worker of a DataLoader of your own loads ahead. null: 2 with workers, "
        "none without.",
        "batches per worker",
        ge=1,
        le=1024,
    ),
]
PersistentWorkers = Annotated[
    bool | None,
    _key(
        "Keep the workers of a DataLoader of your own between epochs. null: yes when there are workers."
    ),
]
PinMemory = Annotated[
    bool, _key("Pin batches of a DataLoader of your own; `stoker train` always does for a GPU.")
]
DropLast = Annotated[bool, _key("Drop the last batch of an epoch when it is short.")]
UseAmp = Annotated[bool, _key("Train in 16-bit where it is safe (automatic mixed precision).")]
Every = Annotated[int, Field(ge=0, le=_MOST)]
Jitter = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A group of keys: strict types, no unknown names, unchangeable once read."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class GpuOptimization(Section):
    """Loading for the GPU."""

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
    batch_size: BatchSize = 128
    num_workers: NumWorkers = 0
    prefetch_factor: PrefetchFactor = None
    persistent_workers: PersistentWorkers = None
    pin_memory: PinMemory = True
    drop_last: DropLast = False
    use_amp: UseAmp = True
    gradient_accumulation_steps: Accumulation = 1
    empty_cache_every_n_epochs: Annotated[
        Every,
        _key(
            "Give cached GPU memory back after every n epochs. 0: never, the fastest; the next "
            "epoch must allocate again.",
            "epochs",
        ),
    ] = 0
    log_gpu_stats_every_n_batches: Annotated[
        Every, _key("Log GPU memory after every n batches. 0: never.", "batches")
    ] = 100


class Ram32GbMode(Section):
    """Limits for a machine with 32 GB of RAM."""

    max_training_samples: Annotated[
        int | None,
        _key(
            "Train on n samples, drawn by the seed; each class keeps its share. null: on all.",
            "samples",
            ge=1,
            le=2**53,
        ),
    ] = None
    gradient_accumulation: Accumulation = 1
    empty_cache_frequency: Annotated[
        Every,
        _key(
            "Give cached GPU memory back after every n batches. 0: never; each call waits for "
            "the GPU.",
            "batches",
        ),
    ] = 0


class MemoryEfficientMode(Section):
    """Loading with little memory."""

    enabled: Annotated[bool, _key("Turn this whole section on or off.")] = True
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
    ram_32gb_mode: Ram32GbMode = Field(default_factory=Ram32GbMode)


class Data(Section):
    """Loading of samples."""

    batch_size: BatchSize = 128
    num_workers: NumWorkers = 0
    prefetch_factor: PrefetchFactor = None
    persistent_workers: PersistentWorkers = None
    pin_memory: PinMemory = True
    drop_last: DropLast = False
    memory_efficient_mode: MemoryEfficientMode = Field(default_factory=MemoryEfficientMode)


class StudentDistill(Section):
    """The distillation stage; the most specific place of all."""

    batch_size: BatchSize = 128
    num_workers: NumWorkers = 0
    gradient_accumulation_steps: Accumulation = 1


Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
LearningRate = Annotated[
    float,
    _key(
        "Step size of the optimizer. Unless written, the recipe's own.",
        "1 per update",
        gt=0,
        le=1e6,
    ),
]


class Training(Section):
    """The training step."""

    batch_size: BatchSize = 128
    num_workers: NumWorkers = 0
    gradient_accumulation_steps: Accumulation = 1
    use_amp: UseAmp = True
    use_gpu_augmentation: Annotated[
        bool,
        _key(
            "Augment on the GPU, as the section gpu_augmentation says. Unless written, the recipe decides: "
            "those of images do."
        ),
    ] = False
    epochs: Annotated[
        int,
        _key(
            "Passes over the training samples. Unless written, the recipe's own.",
            "epochs",
            ge=0,
            le=_MOST,
        ),
    ] = 10
    precision: Annotated[
        Precision,
        _key(
            "Number format of the step; the loss is always fp32. auto: bf16 or fp16 by what the GPU "
            "and the model allow, fp32 on a CPU; the log says which and why."
        ),
    ] = "auto"
    capture: Annotated[
        # YAML 1.1 reads a bare `on` as true.
        Literal["auto", "on", "off"] | bool,
        _key(
            "Replay the whole step as one CUDA graph. auto: where the model allows it and the "
            "first replay agrees with the eager step; on: or end with the reason."
        ),
    ] = "auto"
    compile: Annotated[bool, _key("Compile the model with torch.compile first.")] = False
    clip_norm: Annotated[
        float | None,
        _key("Largest norm of all gradients together. null: not clipped.", gt=0, le=1e30),
    ] = 1.0
    nonfinite: Annotated[
        Literal["stop", "skip", "rollback"],
        _key(
            "What to do about a loss that is not finite. stop: end and name the batch; skip: leave "
            "the update out; rollback: go back to the epoch's start and leave the batch out."
        ),
    ] = "stop"
    seed: Annotated[
        int, _key("Of weights, splits, shuffling, dropout and augmentation.", ge=0, le=2**53)
    ] = 0
    read_every: Annotated[
        int,
        _key(
            "Steps between two reads of losses from the device; fewer make the loop wait.",
            "steps",
            ge=1,
            le=_MOST,
        ),
    ] = 50
    keep_last: Annotated[
        int, _key("Newest checkpoints that are kept, besides the best.", "files", ge=1, le=10_000)
    ] = 2
    max_steps: Annotated[
        int | None,
        _key(
            "Train on so many batches in the whole run, at most; it may end within an epoch.",
            "batches",
            ge=1,
            le=_MOST,
        ),
    ] = None
    patience: Annotated[
        Every,
        _key(
            "End the run after so many epochs without a better monitored metric. 0: never.",
            "epochs",
        ),
    ] = 0
    min_delta: Annotated[
        float | None,
        _key("By how much an epoch must be better to count for patience.", gt=0, le=1e9),
    ] = None
    checkpoint_every_epochs: Annotated[
        Every,
        _key(
            "Save after every n epochs, and at the end. 0: only when a signal ends the run.",
            "epochs",
        ),
    ] = 1
    checkpoint_every_steps: Annotated[
        Every, _key("Save after every n batches within an epoch. 0: never.", "batches")
    ] = 0
    tensorboard: Annotated[
        bool, _key("Write scalars for TensorBoard beside the run log; needs that package.")
    ] = False
    activation_checkpointing: Annotated[
        bool,
        _key("Recompute activations in the backward pass: less memory, more time."),
    ] = False
    survive_oom: Annotated[
        bool,
        _key("When memory runs out, take smaller steps with the same result, instead of ending."),
    ] = True
    parallel: Annotated[
        Literal["ddp", "fsdp"],
        _key(
            "With several ranks: the whole model on each (ddp), or a part of it where it does not fit "
            "(fsdp)."
        ),
    ] = "ddp"
    stall_seconds: Annotated[
        int,
        _key("With several ranks: end all when none has moved for so long.", ge=5, le=86400),
    ] = 600
    lr: LearningRate = 1e-4
    learning_rate: Annotated[LearningRate, _key("Another name of training.lr.")] = 1e-4
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
    student_distill: StudentDistill = Field(default_factory=StudentDistill)


class GpuAugmentation(Section):
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


class Recipe(Section):
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
    ] = Field(default={})


class Run(Section):
    """Where a run keeps its log and checkpoints."""

    dir: Annotated[
        str | None,
        _key("Folder of one run. null: runs/ and the recipe's name.", "path", min_length=1),
    ] = None


@dataclass(frozen=True)
class Origins:
    """Where each written key stands. All are equal: where a value stands is not what it says."""

    places: Mapping[str, Place] = field(default_factory=dict, compare=False)


class Config(Section):
    """Everything a stoker config file may say; see docs/config.md."""

    gpu_optimization: GpuOptimization = Field(default_factory=GpuOptimization)
    data: Data = Field(default_factory=Data)
    training: Training = Field(default_factory=Training)
    gpu_augmentation: GpuAugmentation = Field(default_factory=GpuAugmentation)
    recipe: Recipe = Field(default_factory=Recipe)
    run: Run = Field(default_factory=Run)

    _origins: Origins = PrivateAttr(default_factory=Origins)

    def place_of(self, key: str) -> Place | None:
        """Return where a dotted key was written; None when not in a file or on `--set`."""
        return self._origins.places.get(key)

    def placed(self, places: Mapping[str, Place]) -> Config:
        """Return the same config that also knows where its keys were written."""
        twin = self.model_copy()
        twin._origins = Origins(dict(places))
        return twin

    def written(self) -> dict[str, Any]:
        """Return what was written, flat: dotted key to value, defaults left out."""
        return dict(_flatten(self.model_dump(exclude_unset=True)))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if prefix + name in sections():
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _section_of(info: FieldInfo) -> type[Section] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


@cache
def sections() -> Mapping[str, type[Section]]:
    """Return every section by its dotted name; "" is the whole tree."""
    found: dict[str, type[Section]] = {"": Config}

    def walk(section: type[Section], prefix: str) -> None:
        for name, info in section.model_fields.items():
            below = _section_of(info)
            if below is not None:
                found[prefix + name] = below
                walk(below, f"{prefix}{name}.")

    walk(Config, "")
    return found


@cache
def key_schemas() -> Mapping[str, Mapping[str, Any]]:
    """Return the JSON Schema of every leaf by its dotted key, in the order of the tree."""
    found: dict[str, Mapping[str, Any]] = {}

    def walk(section: type[Section], prefix: str) -> None:
        properties = section.model_json_schema()["properties"]
        for name, info in section.model_fields.items():
            below = _section_of(info)
            if below is None:
                found[prefix + name] = properties[name]
            else:
                walk(below, f"{prefix}{name}.")

    walk(Config, "")
    return found


@cache
def open_leaves() -> frozenset[str]:
    """Return the leaves that hold names of their own, which are not checked here."""
    return frozenset(key for key, schema in key_schemas().items() if schema.get("type") == "object")


def default_of(key: str) -> Any:
    """Return the default of a dotted leaf key."""
    section, _, name = key.rpartition(".")
    return sections()[section].model_fields[name].default


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a config file, for editors.

    Every key has a description, its range, its unit (under `unit`) and its default. A default
    holds when no section writes an answer to the same question (docs/config.md).
    """
    schema = Config.model_json_schema()
    return {"$schema": SCHEMA_DIALECT, **schema, "title": "stoker config"}
