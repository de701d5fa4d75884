"""Augmentation on the device: drawn per sample, applied in one pass over memory.

Enters: batches of images, masks, boxes, keypoints. Leaves: the same, augmented, on the same device.
Files: `definition.py`, `geometry.py`, `ops.py` define the ops; `philox.py` and `draw.py` draw the
parameters of each sample; `reference.py` applies them with torch, `fused.py` with one Triton kernel;
`compose.py` puts both together; `position.py` keeps the position in the run; `stages.py` and `policies.py` are
functions of your own, RandAugment and TrivialAugment; `conversion.py` reads torchvision's transforms; `mixing.py`
has MixUp and CutMix; `presets.py` ready lists of ops, and stages over epochs; `guard.py` checks input.
"""

from __future__ import annotations

from typing import Any

from stoker.augment import geometry, ops
from stoker.augment.compose import Compose, Params
from stoker.augment.definition import Transform
from stoker.augment.geometry import *  # noqa: F403  its ops, by their list
from stoker.augment.mixing import CutMix, MixUp
from stoker.augment.ops import *  # noqa: F403
from stoker.augment.policies import RandAugment, TrivialAugment
from stoker.augment.presets import ProgressiveAugmentation, make_preset
from stoker.augment.stages import Function

__all__ = [
    "Compose",
    "CutMix",
    "Function",
    "MixUp",
    "Params",
    "ProgressiveAugmentation",
    "RandAugment",
    "Transform",
    "TrivialAugment",
    "make_preset",
]
__all__ += geometry.__all__
__all__ += ops.__all__

_COMPAT = {"GPUAugmentation", "MinimalGPUAugmentation", "StrongGPUAugmentation"}


def __getattr__(name: str) -> Any:
    """Return the documented classes, which were defined here once and are public as `stoker.NAME`."""
    if name in _COMPAT:
        import stoker

        return getattr(stoker, name)
    raise AttributeError(f"module 'stoker.augment' has no attribute {name!r}")
