"""Augmentation on the device: drawn per sample, applied in one pass over memory.

Enters: batches of images, masks, boxes, keypoints. Leaves: the same, augmented, on the same device.
Files: `ops.py` (and `definition.py`, `geometry.py`) what can be asked for, `philox.py` and `draw.py`
what each sample gets, `reference.py` what it means in torch, `fused.py` the same in one Triton
kernel, `compose.py` all of it together, `mixing.py` MixUp and CutMix, `presets.py`
ready lists of ops, `schedule.py` stages over epochs, `guard.py` what may enter.
"""

from __future__ import annotations

from typing import Any

from stoker.augment.compose import Compose, Params
from stoker.augment.mixing import CutMix, MixUp
from stoker.augment.ops import (
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Normalize,
    RandomAffine,
    RandomBrightness,
    RandomContrast,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomHue,
    RandomResizedCrop,
    RandomRotation,
    RandomSaturation,
    RandomVerticalFlip,
    Resize,
    ToDtype,
    Transform,
)
from stoker.augment.presets import make_preset
from stoker.augment.schedule import ProgressiveAugmentation

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "GaussianBlur",
    "MixUp",
    "Normalize",
    "Params",
    "ProgressiveAugmentation",
    "RandomAffine",
    "RandomBrightness",
    "RandomContrast",
    "RandomCrop",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomHue",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomSaturation",
    "RandomVerticalFlip",
    "Resize",
    "ToDtype",
    "Transform",
    "make_preset",
]

_COMPAT = {"GPUAugmentation", "MinimalGPUAugmentation", "StrongGPUAugmentation"}


def __getattr__(name: str) -> Any:
    """Return the documented classes, which were defined here once and are public as `stoker.NAME`."""
    if name in _COMPAT:
        import stoker

        return getattr(stoker, name)
    raise AttributeError(f"module 'stoker.augment' has no attribute {name!r}")
