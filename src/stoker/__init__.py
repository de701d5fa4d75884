"""stoker keeps a GPU fed. The public names; importing does no work and loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stoker.compat.augmentation import GPUAugmentation as GPUAugmentation
    from stoker.compat.augmentation import MinimalGPUAugmentation as MinimalGPUAugmentation
    from stoker.compat.augmentation import ProgressiveAugmentation as ProgressiveAugmentation
    from stoker.compat.augmentation import StrongGPUAugmentation as StrongGPUAugmentation
    from stoker.compat.chunk_loader import ChunkDataLoader as ChunkDataLoader
    from stoker.compat.massspec import LazyMassSpecDataset as LazyMassSpecDataset
    from stoker.compat.massspec import NISTDataLoader as NISTDataLoader
    from stoker.compat.max_batch import find_max_batch_size as find_max_batch_size
    from stoker.compat.quantization import quantize_dynamic as quantize_dynamic
    from stoker.config import config_schema as config_schema
    from stoker.config import load_config as load_config
    from stoker.errors import ConfigError as ConfigError
    from stoker.errors import CorruptError as CorruptError
    from stoker.errors import InputError as InputError
    from stoker.errors import QualityError as QualityError
    from stoker.errors import Refusal as Refusal
    from stoker.errors import SourceError as SourceError
    from stoker.errors import StokerError as StokerError
    from stoker.errors import StoreError as StoreError
    from stoker.loader.drawing import mix as mix
    from stoker.loader.loader import Loader as Loader
    from stoker.loader.prefetch import prefetch as prefetch
    from stoker.loader.splits import select_samples as select_samples
    from stoker.machine import Machine as Machine
    from stoker.machine import probe as probe
    from stoker.packing import PackOptions as PackOptions
    from stoker.packing import pack as pack
    from stoker.packing import pack_from as pack_from
    from stoker.plan import Plan as Plan
    from stoker.plan import make_plan as make_plan
    from stoker.recipes.answers import load_model as load_model
    from stoker.store.reader import Store as Store
    from stoker.store.reader import open_store as open_store
    from stoker.train.graphs.function import capture as capture
    from stoker.train.memory import log_gpu_stats as log_gpu_stats
    from stoker.train.memory import print_memory_usage as print_memory_usage
    from stoker.train.settings import TrainSettings as TrainSettings
    from stoker.train.trainer import Trainer as Trainer

_HOMES = {
    name: module
    for module, names in {
        "stoker.augment.presets": "ProgressiveAugmentation",
        "stoker.compat.augmentation": "GPUAugmentation MinimalGPUAugmentation StrongGPUAugmentation",
        "stoker.compat.chunk_loader": "ChunkDataLoader",
        "stoker.compat.massspec": "LazyMassSpecDataset NISTDataLoader",
        "stoker.compat.max_batch": "find_max_batch_size",
        "stoker.compat.quantization": "quantize_dynamic",
        "stoker.config": "config_schema load_config",
        "stoker.errors": "ConfigError CorruptError InputError QualityError Refusal SourceError StokerError StoreError",
        "stoker.loader.drawing": "mix",
        "stoker.loader.loader": "Loader",
        "stoker.loader.prefetch": "prefetch",
        "stoker.loader.splits": "select_samples",
        "stoker.machine": "Machine probe",
        "stoker.packing": "PackOptions pack pack_from",
        "stoker.plan": "Plan make_plan",
        "stoker.recipes.answers": "load_model",
        "stoker.store.reader": "Store open_store",
        "stoker.train.graphs.function": "capture",
        "stoker.train.memory": "log_gpu_stats print_memory_usage",
        "stoker.train.settings": "TrainSettings",
        "stoker.train.trainer": "Trainer",
    }.items()
    for name in names.split()
}

__all__ = [
    "Loader", "Plan", "StokerError", "Store", "TrainSettings", "Trainer", "capture",
    "find_max_batch_size", "load_config", "load_model", "make_plan", "mix", "open_store", "pack",
    "pack_from", "prefetch", "probe", "select_samples",
]  # fmt: skip
"""Names for new users. Every other name of `_HOMES` is importable from here as well, and listed by `dir`."""


def __dir__() -> list[str]:
    """Return every public name, also those that are loaded on demand."""
    hidden = {"Any", "TYPE_CHECKING", "annotations", "importlib"}
    return sorted({*globals(), *_HOMES} - hidden)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name not in _HOMES:
        import sys

        # With its object, Python adds the nearest name of `__dir__` to the message.
        here = sys.modules[__name__]
        raise AttributeError(f"module 'stoker' has no attribute {name!r}", name=name, obj=here)
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
