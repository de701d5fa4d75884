"""The tree of keys that a config file may write: names, types, ranges, units, defaults.

Enters: plain values. Leaves: a frozen, strictly typed `Config`, or its JSON Schema. Costs
about 0.1 s to import (pydantic), microseconds afterwards.

The names are those of the source documents (S0-12, S0-26, S1-6, S1-7, S3-4, S3-11, S4-2 to
S4-5), so that their files work as they stand. Several sections may ask for the same thing
(five of them know a batch size or a worker count); `stoker.config.resolve` says who wins.
A key that is not written says nothing, whatever its default.
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


BatchSize = Annotated[int, _key("Samples in one step on one device.", "samples", ge=1, le=_MOST)]
NumWorkers = Annotated[
    int,
    _key(
        "Processes that load samples; 0 loads in the training process.", "processes", ge=0, le=1024
    ),
]
Accumulation = Annotated[
    int, _key("Batches whose gradients are summed before one update.", "batches", ge=1, le=65536)
]
PrefetchFactor = Annotated[
    int | None,
    _key(
        "Batches each worker loads ahead; needs workers. null: 2 with workers, none without.",
        "batches per worker",
        ge=1,
        le=1024,
    ),
]
PersistentWorkers = Annotated[
    bool | None,
    _key("Keep the workers between epochs; needs workers. null: yes when there are workers."),
]
PinMemory = Annotated[bool, _key("Stage batches in pinned memory; ignored without a GPU.")]
DropLast = Annotated[bool, _key("Drop the last batch of an epoch when it is short.")]
UseAmp = Annotated[bool, _key("Train in 16-bit where it is safe (automatic mixed precision).")]
Every = Annotated[int, Field(ge=0, le=_MOST)]
Jitter = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A group of keys: strict types, no unknown names, unchangeable once read."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class GpuOptimization(Section):
    """Loading for the GPU as the chunk-loader document has it (S0-12, S0-26)."""

    use_chunk_loader: Annotated[
        bool, _key("Load big chunks to the GPU and cut the batches there (S0-1).")
    ] = True
    chunk_size_gb: Annotated[
        float | None,
        _key(
            "Size of one chunk in GiB (2**30 bytes, as the document computed). "
            "null: the plan takes 75 % of the GPU's memory.",
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
    """Limits for a machine with 32 GB of RAM (S1-6)."""

    max_training_samples: Annotated[
        int | None,
        _key("Train on the first n samples only. null: on all.", "samples", ge=1, le=2**53),
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
    """Samples on disk, read when they are needed (S1-2, S1-6)."""

    enabled: Annotated[bool, _key("Turn this whole section on or off.")] = True
    use_lazy_loading: Annotated[
        bool, _key("Read samples from the cache on disk; off: hold all of them in RAM.")
    ] = True
    lazy_cache_dir: Annotated[str, _key("Folder of the cache.", "path", min_length=1)] = (
        "data/processed/lazy_cache"
    )
    precompute_graphs: Annotated[
        bool, _key("Build the molecule graphs once, into the cache; off: at each access.")
    ] = False
    ram_32gb_mode: Ram32GbMode = Field(default_factory=Ram32GbMode)


class Data(Section):
    """Loading of samples (S3-7, S3-11, S4-4)."""

    batch_size: BatchSize = 128
    num_workers: NumWorkers = 0
    prefetch_factor: PrefetchFactor = None
    persistent_workers: PersistentWorkers = None
    pin_memory: PinMemory = True
    drop_last: DropLast = False
    memory_efficient_mode: MemoryEfficientMode = Field(default_factory=MemoryEfficientMode)


class StudentDistill(Section):
    """The distillation stage; the most specific place of all (S1-7)."""

    batch_size: BatchSize = 128
    num_workers: NumWorkers = 0
    gradient_accumulation_steps: Accumulation = 1


LearningRate = Annotated[float, _key("Step size of the optimizer.", "1 per update", gt=0, le=1e6)]


class Training(Section):
    """The training step (S1-7, S3-11, S4-2 to S4-5)."""

    batch_size: BatchSize = 128
    num_workers: NumWorkers = 0
    gradient_accumulation_steps: Accumulation = 1
    use_amp: UseAmp = True
    use_gpu_augmentation: Annotated[
        bool, _key("Augment on the GPU, as the section gpu_augmentation says.")
    ] = False
    capture_step: Annotated[
        bool, _key("Replay the whole step as one CUDA graph where the model allows it.")
    ] = True
    lr: LearningRate = 1e-4
    learning_rate: Annotated[LearningRate, _key("Another name of training.lr.")] = 1e-4
    init_gain: Annotated[
        float | None,
        _key(
            "Gain of the Xavier initialisation (S4 used 0.5). null: the model's own.", gt=0, le=100
        ),
    ] = None
    output_bound: Annotated[
        float | None,
        _key(
            "Keep outputs within plus or minus this (S4 used 10). null: unbounded.", gt=0, le=1e30
        ),
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
    """What is drawn per sample when training.use_gpu_augmentation is on (S3-4)."""

    horizontal_flip_prob: Annotated[
        float, _key("Share of samples flipped left to right.", ge=0, le=1)
    ] = 0.5
    rotation_degrees: Annotated[
        float, _key("Rotate by an angle within plus or minus this.", "degrees", ge=0, le=180)
    ] = 15.0
    brightness: Annotated[Jitter, _key("Multiply by a factor within 1 ± this.")] = 0.2
    contrast: Annotated[Jitter, _key("Stretch around the mean by a factor within 1 ± this.")] = 0.2
    saturation: Annotated[Jitter, _key("Stretch colours by a factor within 1 ± this.")] = 0.1


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
        if isinstance(value, Mapping):
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
