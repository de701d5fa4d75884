"""Augmentation on the device: drawn per sample, applied in one pass over memory.

Enters: batches of images, masks, boxes, keypoints. Leaves: the same, augmented, on the same device.
Files: `ops.py` (and `definition.py`, `geometry.py`) what can be asked for, `dice.py` and `draw.py`
what each sample gets, `reference.py` what it means in torch, `fused.py` the same in one Triton
kernel, `compose.py` all of it together, `mixing.py` MixUp and CutMix, `doors.py` the documents'
names, `guard.py` what may enter.
"""

from __future__ import annotations

from stoker.augment.compose import Compose, Params
from stoker.augment.doors import (
    GPUAugmentation,
    MinimalGPUAugmentation,
    ProgressiveAugmentation,
    StrongGPUAugmentation,
    augmentation_from_settings,
)
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

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "GPUAugmentation",
    "GaussianBlur",
    "MinimalGPUAugmentation",
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
    "StrongGPUAugmentation",
    "ToDtype",
    "Transform",
    "augmentation_from_settings",
]
