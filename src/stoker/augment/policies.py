"""RandAugment and TrivialAugment: for each image a few ops out of a fixed list, at a drawn strength.

Enters: float images in [0, 1] of one or three channels, masks if there are any, and uniforms of each sample. Leaves:
images and masks. Costs, per drawn op: one pass of the backend for geometry, brightness, contrast and saturation, and
about thirty torch operations over the whole batch for the others (each image keeps the result of its own op). No host
synchronisation: it can be captured in a CUDA graph.

The lists, strengths and their order are those of torchvision (`RandAugment`, `TrivialAugmentWide`): ops are applied one
after the other, each geometric one with a resample of its own. Unlike there, resampling is bilinear.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn import functional

from stoker.augment.definition import Phase, Program
from stoker.augment.draw import BRIGHTNESS, CONTRAST, SATURATION, constant, untouched
from stoker.augment.ops import make_program
from stoker.augment.stages import Apply, Pair, Stage, check_whole
from stoker.errors import InputError

Tensor = torch.Tensor

NAMES = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color"),
    *("Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
)
"""The ops that are drawn from, as torchvision names them; their indices are the values of a draw."""
_SIGNED = 10
"""Ops below this index take their strength with a random sign."""


@dataclass(frozen=True)
class _Policy(Stage):
    """Base of both policies: uniforms to ops and strengths, and their application."""

    phase = Phase.COLOUR
    moves = True
    wide: ClassVar[bool]

    @property
    def reads_outside(self) -> bool:
        """Whether pixels come from outside of the image: shears, shifts and rotations do."""
        return True

    def strengths(self, level: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the strength of every op of `NAMES` at levels from 0 to 1: float `(B, 14)`."""
        height, width = size
        shear, turn, colour, bits = (0.99, 135.0, 0.99, 6) if self.wide else (0.3, 30.0, 0.9, 4)
        reach = (32.0, 32.0) if self.wide else (150.0 / 331.0 * width, 150.0 / 331.0 * height)
        most = [0.0, shear, shear, *reach, math.radians(turn), *[colour] * 4, 0.0, 0.0, 0.0, 0.0]
        made = level[:, None] * constant(tuple(most), level.device)
        made[:, 3:5] = made[:, 3:5].floor()  # whole pixels
        made[:, 10] = 8 - torch.floor(level * bits + 0.5)  # bits that stay
        made[:, 11] = 1.0 - level  # values from here on are inverted
        return made

    def level(self, u: Tensor, /) -> Tensor:
        """Return the strength of one op for each image, 0 to 1, from its uniforms `(B, 8)`."""
        raise NotImplementedError

    def run(
        self,
        images: Tensor,
        masks: Tensor | None,
        uniforms: Tensor,
        ignore_index: int,
        apply: Apply,
    ) -> Pair:
        name, channels = type(self).__name__, images.shape[1]
        if channels not in (1, 3):
            raise InputError(
                f"{name} on images with {channels} channels.",
                "1 channel (grey) or 3 (RGB)",
                f"leave out {name}, or augment the three colour channels alone",
            )
        pair: Pair = (images, masks)
        for u in uniforms.unbind(1):
            chosen = torch.floor(u[:, 1] * len(NAMES)).clamp(max=len(NAMES) - 1).to(torch.int64)
            sign = torch.where(u[:, 2] < 0.5, -1.0, 1.0)
            pair = self.run_one(pair, chosen, self.level(u), sign, ignore_index, apply)
        return pair

    def run_one(
        self,
        pair: Pair,
        chosen: Tensor,
        level: Tensor,
        sign: Tensor,
        ignore_index: int,
        apply: Apply,
    ) -> Pair:
        """Apply one op to each image: `chosen` int64 `(B,)`, `level` from 0 to 1, `sign` 1 or -1."""
        images, masks = pair
        batch, channels, height, width = images.shape
        strength = self.strengths(level, (height, width)).gather(1, chosen[:, None])[:, 0]
        strength = torch.where(chosen < _SIGNED, strength * sign, strength)
        table = untouched(batch, images.device)

        def of(name: str) -> Tensor:
            return chosen == NAMES.index(name)

        table[:, 1] = torch.where(of("ShearX"), strength, 0.0)
        table[:, 3] = torch.where(of("ShearY"), strength, 0.0)
        table[:, 2] = torch.where(of("TranslateX"), strength, 0.0)
        table[:, 5] = torch.where(of("TranslateY"), strength, 0.0)
        turn = torch.where(of("Rotate"), strength, 0.0)
        cosine, sine = torch.cos(turn), torch.sin(turn)
        cx, cy = (width - 1) / 2, (height - 1) / 2
        table[:, 0], table[:, 4] = cosine, cosine
        table[:, 1] += sine
        table[:, 3] -= sine
        table[:, 2] += cx - (cosine * cx + sine * cy)
        table[:, 5] += cy - (cosine * cy - sine * cx)
        for column, name in (
            (BRIGHTNESS, "Brightness"),
            (CONTRAST, "Contrast"),
            (SATURATION, "Color"),
        ):
            table[:, column] = torch.where(of(name), 1.0 + strength, 1.0)
        program = _make_program((height, width), channels, images.dtype, ignore_index)
        images, masks = apply(images, masks, table, program)
        amount = strength.view(-1, 1, 1, 1)
        for name, change in _IN_TORCH.items():
            images = torch.where(of(name).view(-1, 1, 1, 1), change(images, amount), images)
        return images, masks


@functools.lru_cache(maxsize=64)
def _make_program(
    size: tuple[int, int], channels: int, dtype: torch.dtype, ignore_index: int
) -> Program:
    """Return geometry, brightness, contrast and saturation; cached, because backends plan by its id."""
    base = make_program([], size, channels, ignore_index)
    return replace(
        base,
        geometry=True,
        brightness=True,
        contrast=True,
        saturation=channels == 3,
        out_dtype=dtype,
    )


@dataclass(frozen=True)
class RandAugment(_Policy):
    """`num_ops` ops one after the other for each image, all at one strength (Cubuk et al., 2020).

    Args:
        num_ops: How many, 1 to 8.
        magnitude: Strength, 0 to `num_magnitude_bins` - 1.
        num_magnitude_bins: Number of strengths, 2 or more.
    """

    wide = False

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31

    def __post_init__(self) -> None:
        bins = check_whole("num_magnitude_bins", self.num_magnitude_bins, 2, 1000, "RandAugment()")
        check_whole("num_ops", self.num_ops, 1, 8, "RandAugment(num_ops=2)")
        check_whole("magnitude", self.magnitude, 0, bins - 1, f"RandAugment(magnitude={bins // 3})")

    @property
    def num_rows(self) -> int:
        """One row of uniforms per op."""
        return self.num_ops

    def level(self, u: Tensor, /) -> Tensor:
        """Return the one strength of all ops."""
        return torch.full_like(u[:, 0], self.magnitude / (self.num_magnitude_bins - 1))


@dataclass(frozen=True)
class TrivialAugment(_Policy):
    """One op for each image, at a random strength (Müller and Hutter, 2021; torchvision's TrivialAugmentWide).

    Args:
        num_magnitude_bins: Number of strengths, 2 or more.
    """

    wide = True

    num_magnitude_bins: int = 31

    def __post_init__(self) -> None:
        check_whole("num_magnitude_bins", self.num_magnitude_bins, 2, 1000, "TrivialAugment()")

    def level(self, u: Tensor, /) -> Tensor:
        """Return a drawn strength for each image."""
        bins = self.num_magnitude_bins
        return torch.floor(u[:, 3] * bins).clamp(max=bins - 1) / (bins - 1)


# -- ops that no backend has ---------------------------------------------------------------------


def _sharpen(images: Tensor, amount: Tensor) -> Tensor:
    """Blend with a smoothed image by `1 + amount`; the border stays, as in torchvision."""
    if min(images.shape[-2:]) <= 2:
        return images
    # The centre counts five times. Its weight is added apart: writing it into the weights would copy from the
    # host, which a CUDA graph capture forbids.
    weights = torch.full((1, 1, 3, 3), 1.0 / 13.0, dtype=images.dtype, device=images.device)
    flat = images.reshape(-1, 1, *images.shape[-2:])
    smooth = images.clone()
    inner = functional.conv2d(flat, weights) + flat[..., 1:-1, 1:-1] * (4.0 / 13.0)
    smooth[..., 1:-1, 1:-1] = inner.view(*images.shape[:2], *inner.shape[-2:])
    return (smooth + (1.0 + amount) * (images - smooth)).clamp(0.0, 1.0)


def _bytes(images: Tensor) -> Tensor:
    return torch.floor(images * 255.0 + 0.5).clamp(0.0, 255.0)


def _posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper `bits` bits of each byte."""
    step = torch.exp2(8.0 - bits)
    return torch.floor(_bytes(images) / step) * step / 255.0


def _solarize(images: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(images >= threshold, 1.0 - images, images)


def _stretch(images: Tensor, _amount: Tensor) -> Tensor:
    """Stretch each channel of each image to [0, 1]; a channel of one value stays."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    flat = high == low
    return torch.where(flat, images, (images - low) / torch.where(flat, 1.0, high - low)).clamp(
        0, 1
    )


def _equalize(images: Tensor, _amount: Tensor) -> Tensor:
    """Equalise the histogram of each channel of each image, as PIL and torchvision do."""
    values = _bytes(images).flatten(2).to(torch.int64)
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, values, torch.ones_like(values))
    last = 255 - (counts.flip(2) > 0).to(torch.int64).argmax(2, keepdim=True)
    step = (values.shape[2] - counts.gather(2, last)) // 255
    before = counts.cumsum(2) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(0, 255)
    made = table.gather(2, values).to(images.dtype).view(images.shape) / 255.0
    return torch.where(step.view(*images.shape[:2], 1, 1) == 0, images, made)


_IN_TORCH = {
    "Sharpness": _sharpen,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "AutoContrast": _stretch,
    "Equalize": _equalize,
}
