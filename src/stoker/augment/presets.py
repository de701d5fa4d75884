"""Ready lists of ops by name: "minimal", "standard", "strong".

Enters: a name and the strength of each op. Leaves: a `Compose`. Costs what a `Compose` costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoker.augment.compose import Compose
from stoker.augment.definition import Op
from stoker.augment.geometry import RandomAffine, RandomHorizontalFlip, RandomRotation
from stoker.augment.ops import ColorJitter, GaussianBlur, Normalize, ToDtype
from stoker.errors import InputError

Channels = float | Sequence[float]


def minimal_ops(horizontal_flip_prob: float = 0.5) -> list[Op]:
    """The flip alone: for small memory and for the first epochs."""
    return [RandomHorizontalFlip(horizontal_flip_prob)]


def standard_ops(
    horizontal_flip_prob: float = 0.5,
    rotation_degrees: float = 15,
    brightness: float = 0.2,
    contrast: float = 0.2,
    saturation: float = 0.1,
) -> list[Op]:
    """Flip, rotation (p 0.3), scale 0.9 to 1.1 with shift 5 % (p 0.3), colour jitter (p 0.5)."""
    return [
        RandomHorizontalFlip(horizontal_flip_prob),
        RandomRotation(rotation_degrees, p=0.3),
        RandomAffine(scale=(0.9, 1.1), translate=(0.05, 0.05), p=0.3),
        ColorJitter(brightness, contrast, saturation, p=0.5),
    ]


def strong_ops(
    horizontal_flip_prob: float = 0.5,
    rotation_degrees: float = 20,
    brightness: float = 0.3,
    contrast: float = 0.3,
    saturation: float = 0.15,
) -> list[Op]:
    """Rotation 20 (p 0.4), scale 0.85 to 1.15 with shift 10 % (p 0.4), jitter (p 0.5), blur (p 0.2)."""
    return [
        RandomHorizontalFlip(horizontal_flip_prob),
        RandomRotation(rotation_degrees, p=0.4),
        RandomAffine(scale=(0.85, 1.15), translate=(0.1, 0.1), p=0.4),
        ColorJitter(brightness, contrast, saturation, p=0.5),
        GaussianBlur(3, sigma=(0.1, 2.0), p=0.2),
    ]


PRESETS: dict[str, Callable[..., list[Op]]] = {
    "minimal": minimal_ops,
    "standard": standard_ops,
    "strong": strong_ops,
}


def make_preset(
    name: str,
    *,
    mean: Channels | None = None,
    std: Channels | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    stream: int = 0,
    ignore_index: int = 255,
    backend: str = "auto",
    **strengths: Any,
) -> Compose:
    """Build a preset.

    Args:
        name: "minimal", "standard" or "strong".
        mean: Normalise after augmenting, with `std`; both or neither.
        std: See `mean`.
        dtype: Dtype of the images that leave; float32 by default.
        seed: Another seed, other draws.
        stream: Number of the random stream; ranks take one each.
        ignore_index: Written in masks where no input pixel is.
        backend: "auto", "torch" or "fused".
        **strengths: Arguments of `minimal_ops`, `standard_ops` or `strong_ops`.
    """
    if name not in PRESETS:
        raise InputError(
            f"an augmentation preset {name!r}.", ", ".join(PRESETS), 'make_preset("standard")'
        )
    ops = add_normalisation(PRESETS[name](**strengths), mean, std, dtype)
    return Compose(ops, seed=seed, stream=stream, ignore_index=ignore_index, backend=backend)


def add_normalisation(
    ops: Sequence[Op], mean: Channels | None, std: Channels | None, dtype: torch.dtype | None
) -> list[Op]:
    """Return `ops` followed by normalisation and conversion where they are asked for."""
    if (mean is None) != (std is None):
        raise InputError(
            f"mean is {mean!r} and std is {std!r}.",
            "both or neither",
            "mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)",
        )
    ending: list[Op] = [] if mean is None or std is None else [Normalize(mean, std)]
    return [*ops, *ending, *([] if dtype is None else [ToDtype(dtype)])]
