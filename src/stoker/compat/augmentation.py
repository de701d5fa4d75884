"""The documented augmentation classes (S3), each a preset of `stoker.augment.presets` under its own name.

Enters: the keyword arguments of the documents, or `AugmentOptions`. Leaves: a `Compose`, called as
`aug(images)` or `aug(images, masks)`. Costs what a `Compose` costs; nothing here works on pixels.

Unlike in the documents' own code: masks are labels and stay so (integer in, the same dtype out, the ignore index
in rotated-in corners, never class 0), every key of the config has an effect, and a change of schedule reaches a
trainer that already holds the object.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from stoker.arguments import explained
from stoker.augment.compose import Compose
from stoker.augment.presets import (
    Channels,
    ProgressiveAugmentation,
    add_normalisation,
    minimal_ops,
    standard_ops,
    strong_ops,
)
from stoker.config import AugmentOptions

__all__ = [
    "GPUAugmentation", "MinimalGPUAugmentation", "ProgressiveAugmentation", "StrongGPUAugmentation",
    "augmentation_from_settings",
]  # fmt: skip


@explained("stoker.GPUAugmentation(horizontal_flip_prob=0.5)")
class GPUAugmentation(Compose):
    """Flip, rotation (p 0.3), scale 0.9 to 1.1 with shift 5 % (p 0.3), colour jitter (p 0.5).

    Args:
        horizontal_flip_prob: Share of samples flipped left to right.
        rotation_degrees: Rotate by up to this, either way.
        brightness, contrast, saturation: Factors within 1 ± this.
        mean, std: Normalise after augmenting; both or neither.
        dtype: Of the images that leave; float32 by default.
        **options: Keywords of `Compose`: seed, stream, ignore_index, backend.
    """

    def __init__(
        self,
        horizontal_flip_prob: float = 0.5,
        rotation_degrees: float = 15,
        brightness: float = 0.2,
        contrast: float = 0.2,
        saturation: float = 0.1,
        *,
        mean: Channels | None = None,
        std: Channels | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        ops = standard_ops(horizontal_flip_prob, rotation_degrees, brightness, contrast, saturation)
        super().__init__(add_normalisation(ops, mean, std, dtype), **options)


@explained("stoker.MinimalGPUAugmentation(horizontal_flip_prob=0.5)")
class MinimalGPUAugmentation(Compose):
    """The flip alone: for small memory and for the first epochs. Arguments as above."""

    def __init__(
        self,
        horizontal_flip_prob: float = 0.5,
        *,
        mean: Channels | None = None,
        std: Channels | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        ops = minimal_ops(horizontal_flip_prob)
        super().__init__(add_normalisation(ops, mean, std, dtype), **options)


@explained("stoker.StrongGPUAugmentation(horizontal_flip_prob=0.5)")
class StrongGPUAugmentation(Compose):
    """Rotation 20 (p 0.4), scale 0.85 to 1.15 with shift 10 % (p 0.4), jitter (p 0.5), blur (p 0.2).

    Arguments as for `GPUAugmentation`, with stronger defaults.
    """

    def __init__(
        self,
        horizontal_flip_prob: float = 0.5,
        rotation_degrees: float = 20,
        brightness: float = 0.3,
        contrast: float = 0.3,
        saturation: float = 0.15,
        *,
        mean: Channels | None = None,
        std: Channels | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        ops = strong_ops(horizontal_flip_prob, rotation_degrees, brightness, contrast, saturation)
        super().__init__(add_normalisation(ops, mean, std, dtype), **options)


def augmentation_from_settings(
    settings: AugmentOptions | None, **options: Any
) -> GPUAugmentation | None:
    """Build the augmentation of the config's section `gpu_augmentation`; None where it is off.

    `options` are keywords of `GPUAugmentation`: mean, std, dtype, seed, ignore_index, backend.
    """
    return None if settings is None else GPUAugmentation(**asdict(settings), **options)
