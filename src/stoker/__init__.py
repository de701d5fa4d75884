"""stoker keeps a GPU fed. The public names; importing does no work and loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stoker.augment.doors import (
        GPUAugmentation,
        MinimalGPUAugmentation,
        ProgressiveAugmentation,
        StrongGPUAugmentation,
    )
    from stoker.config import config_schema, load_config
    from stoker.errors import (
        ConfigError,
        CorruptError,
        InputError,
        QualityError,
        Refusal,
        SourceError,
        StokerError,
        StoreError,
    )
    from stoker.loader.chunk_door import ChunkDataLoader
    from stoker.loader.loader import Loader
    from stoker.loader.massspec_doors import LazyMassSpecDataset, NISTDataLoader
    from stoker.loader.prefetch import prefetch
    from stoker.loader.splits import select_samples
    from stoker.machine import Machine, probe
    from stoker.packing import PackOptions, pack
    from stoker.plan import make_plan
    from stoker.store.reader import Store, open_store
    from stoker.train.memory import log_gpu_stats, print_memory_usage
    from stoker.train.settings import TrainSettings
    from stoker.train.trainer import Trainer
    from stoker.tune.max_batch import find_max_batch_size

_HOMES = {
    "ChunkDataLoader": "stoker.loader.chunk_door",
    "GPUAugmentation": "stoker.augment.doors",
    "MinimalGPUAugmentation": "stoker.augment.doors",
    "ProgressiveAugmentation": "stoker.augment.doors",
    "StrongGPUAugmentation": "stoker.augment.doors",
    "LazyMassSpecDataset": "stoker.loader.massspec_doors",
    "Loader": "stoker.loader.loader",
    "NISTDataLoader": "stoker.loader.massspec_doors",
    "prefetch": "stoker.loader.prefetch",
    "make_plan": "stoker.plan",
    "select_samples": "stoker.loader.splits",
    "ConfigError": "stoker.errors",
    "CorruptError": "stoker.errors",
    "InputError": "stoker.errors",
    "Machine": "stoker.machine",
    "PackOptions": "stoker.packing",
    "QualityError": "stoker.errors",
    "Refusal": "stoker.errors",
    "SourceError": "stoker.errors",
    "StokerError": "stoker.errors",
    "Store": "stoker.store.reader",
    "StoreError": "stoker.errors",
    "config_schema": "stoker.config",
    "find_max_batch_size": "stoker.tune.max_batch",
    "load_config": "stoker.config",
    "open_store": "stoker.store.reader",
    "pack": "stoker.packing",
    "probe": "stoker.machine",
    "Trainer": "stoker.train.trainer",
    "TrainSettings": "stoker.train.settings",
    "log_gpu_stats": "stoker.train.memory",
    "print_memory_usage": "stoker.train.memory",
}

__all__ = [
    "ChunkDataLoader",
    "ConfigError",
    "CorruptError",
    "GPUAugmentation",
    "InputError",
    "LazyMassSpecDataset",
    "Loader",
    "Machine",
    "MinimalGPUAugmentation",
    "NISTDataLoader",
    "PackOptions",
    "ProgressiveAugmentation",
    "QualityError",
    "Refusal",
    "SourceError",
    "StokerError",
    "Store",
    "StoreError",
    "StrongGPUAugmentation",
    "TrainSettings",
    "Trainer",
    "config_schema",
    "find_max_batch_size",
    "load_config",
    "log_gpu_stats",
    "make_plan",
    "open_store",
    "pack",
    "prefetch",
    "print_memory_usage",
    "probe",
    "select_samples",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
