"""The ops that move pixels: flips, rotation, affine, crops, resize.

Enters: probabilities, ranges and sizes, checked at construction. Leaves: frozen ops that write
themselves on the tape. Costs nothing until applied; then all geometry of a Compose is one matrix per
sample and one resample, whatever the number of ops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from stoker.augment.definition import (
    RADIANS,
    Op,
    Opcode,
    Phase,
    Range,
    Size,
    centre_of,
    check_around,
    check_range,
    check_reaches,
    check_size,
    span,
)
from stoker.errors import InputError

__all__ = [
    "AlternatingFlip",
    "CenterCrop",
    "RandomAffine",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Resize",
]

PADDING_MODES = ("constant", "reflect")


@dataclass(frozen=True)
class RandomHorizontalFlip(Op):
    """Mirror left to right with probability `p`; exact."""

    phase = Phase.GEOMETRY
    opcode = Opcode.FLIP_H

    p: float = 0.5

    def numbers(self, size: Size, /) -> list[float]:
        """Return the index of the last column."""
        return [size[1] - 1]


@dataclass(frozen=True)
class AlternatingFlip(Op):
    """Mirror every image left to right in every second epoch; exact.

    Half of the images, chosen by the seed, are mirrored in even epochs and the others in odd ones: two epochs
    show each image both ways, where a random flip shows half of them the same way twice.

    Images must be known from epoch to epoch: `compose(images, ids=ids)`, or `rows` of a tensor that stays. A
    `Loader` with resident data does that by itself. The epoch is that of `set_epoch`.
    """

    phase = Phase.GEOMETRY
    opcode = Opcode.FLIP_BY_ID

    def numbers(self, size: Size, /) -> list[float]:
        """Return the index of the last column."""
        return [size[1] - 1]


@dataclass(frozen=True)
class RandomVerticalFlip(Op):
    """Mirror top to bottom with probability `p`; exact."""

    phase = Phase.GEOMETRY
    opcode = Opcode.FLIP_V

    p: float = 0.5

    def numbers(self, size: Size, /) -> list[float]:
        """Return the index of the last row."""
        return [size[0] - 1]


@dataclass(frozen=True)
class RandomRotation(Op):
    """Rotate about the centre; bilinear. Pixels from outside are 0, in masks the ignore index.

    Args:
        degrees: An angle d for -d to d, or (low, high). Positive is counter-clockwise, as in
            Kornia's RandomRotation; 90 and 180 are exact.
        p: Probability per sample.
    """

    phase = Phase.GEOMETRY
    opcode = Opcode.AFFINE

    degrees: float | Range
    p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._keep(degrees=check_around("degrees", self.degrees, 0.0, 360.0, "RandomRotation(15)"))

    def numbers(self, size: Size, /) -> list[float]:
        """Return centre and angle; the tape counts clockwise."""
        turn = span(cast(Range, self.degrees), -RADIANS)
        return [*centre_of(size), *turn, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    @property
    def reads_outside(self) -> bool:
        """Whether corners come from outside of the image."""
        return not self.idle()

    def idle(self) -> bool:
        """Return whether every angle is 0."""
        return self.p == 0.0 or self.degrees == (0.0, 0.0)


@dataclass(frozen=True)
class RandomAffine(Op):
    """Rotate, scale, shear and shift in one matrix; bilinear. Pixels from outside are 0.

    The matrix is Kornia's and torchvision's: shear x, shear y, scale and rotate about the centre,
    then shift. So a positive angle is *clockwise* here, unlike in `RandomRotation`.

    Args:
        degrees: An angle d for -d to d, or (low, high).
        translate: Largest shift as a fraction of (width, height), either way.
        scale: Smallest and largest factor; above 1 enlarges.
        shear: Largest shear angle in degrees along (x, y), either way.
        p: Probability per sample.
    """

    phase = Phase.GEOMETRY
    opcode = Opcode.AFFINE

    degrees: float | Range = 0.0
    translate: Range = (0.0, 0.0)
    scale: Range = (1.0, 1.0)
    shear: Range = (0.0, 0.0)
    p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        turn = check_around("degrees", self.degrees, 0.0, 360.0, "RandomAffine(degrees=10)")
        scale = check_range("scale", self.scale, 1e-3, 1e3, "RandomAffine(scale=(0.9, 1.1))")
        shift = check_reaches(
            "translate", self.translate, 1.0, "RandomAffine(translate=(0.05, 0.05))"
        )
        shear = check_reaches("shear", self.shear, 89.0, "RandomAffine(shear=(10, 0))")
        self._keep(degrees=turn, translate=shift, scale=scale, shear=shear)

    def numbers(self, size: Size, /) -> list[float]:
        """Return centre and the ranges of angle, shifts, scale and shears."""
        across, down = self.translate[0] * size[1], self.translate[1] * size[0]
        lean_x, lean_y = self.shear[0] * RADIANS, self.shear[1] * RADIANS
        turn = span(cast(Range, self.degrees), RADIANS)
        shifts = [-across, 2 * across, -down, 2 * down]
        return [
            *centre_of(size),
            *turn,
            *shifts,
            *span(self.scale),
            -lean_x,
            2 * lean_x,
            -lean_y,
            2 * lean_y,
        ]

    @property
    def reads_outside(self) -> bool:
        """Whether corners come from outside of the image."""
        return not self.idle()

    def idle(self) -> bool:
        """Return whether every matrix is the identity."""
        still = self.degrees == self.translate == self.shear == (0.0, 0.0)
        return self.p == 0.0 or (still and self.scale == (1.0, 1.0))


@dataclass(frozen=True)
class RandomResizedCrop(Op):
    """Cut a rectangle of random area and shape and resize it to `size`; bilinear, no antialias.

    The corners of the rectangle land on the corners of the result (align_corners), so no pixel
    from outside the image is ever read. The drawn area is kept: where the drawn shape would not
    fit into the image, the shape gives way.

    Args:
        size: Side, or (height, width), of the result.
        scale: Smallest and largest area as a fraction of the image.
        ratio: Smallest and largest width / height, drawn evenly in its logarithm.
        p: Probability per sample; the others are resized whole.
    """

    phase = Phase.GEOMETRY
    opcode = Opcode.RESIZED_CROP

    size: int | Size
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        scale = check_range(
            "scale", self.scale, 1e-6, 1.0, "RandomResizedCrop(224, scale=(0.08, 1.0))"
        )
        ratio = check_range(
            "ratio", self.ratio, 1e-3, 1e3, "RandomResizedCrop(224, ratio=(0.75, 1.33))"
        )
        self._keep(size=check_size("size", self.size), scale=scale, ratio=ratio)

    def out_size(self, _size: Size, /) -> Size:
        """Return the size that was asked for."""
        return cast(Size, self.size)

    def numbers(self, size: Size, /) -> list[float]:
        """Return the sizes and the ranges of area and shape."""
        (height, width), (out_height, out_width) = size, cast(Size, self.size)
        shape = span((math.log(self.ratio[0]), math.log(self.ratio[1])))
        sizes = [width, height, out_width, out_height]
        return [*sizes, *span(self.scale), *shape, width / height, width * height]

    def idle(self) -> bool:
        """Return False: even with p = 0 the image is resized."""
        return False

    def settled(self) -> Op:
        """Return the resize of the whole image."""
        return Resize(self.size)


@dataclass(frozen=True)
class Resize(Op):
    """Resize the whole image to `size`, corners on corners; bilinear, no antialias; not random."""

    phase = Phase.GEOMETRY
    opcode = Opcode.RESIZED_CROP
    is_fixed = True

    size: int | Size

    def __post_init__(self) -> None:
        self._keep(size=check_size("size", self.size))

    @property
    def gate(self) -> float:
        """Return 0: a resized crop that is not applied takes the whole image."""
        return 0.0

    def out_size(self, _size: Size, /) -> Size:
        """Return the size that was asked for."""
        return cast(Size, self.size)

    def numbers(self, size: Size, /) -> list[float]:
        """Return the sizes; with a gate of 0 the ranges are not used."""
        return RandomResizedCrop(self.size, (1.0, 1.0), (1.0, 1.0)).numbers(size)

    def idle(self) -> bool:
        """Return False: whether the size changes depends on the image."""
        return False


@dataclass(frozen=True)
class RandomCrop(Op):
    """Cut `size` at a random place of the padded image; exact.

    Args:
        size: Side, or (height, width), of the result.
        padding: Pixels added on every side first.
        padding_mode: "constant" adds 0, in masks the ignore index; "reflect" adds the image reflected at its
            border, in masks too. "reflect" goes with flips and no other geometry.
    """

    phase = Phase.GEOMETRY
    opcode = Opcode.CROP

    size: int | Size
    padding: int = 0
    padding_mode: str = "constant"

    def __post_init__(self) -> None:
        if not isinstance(self.padding, int) or isinstance(self.padding, bool) or self.padding < 0:
            raise InputError(
                f"padding is {self.padding!r}.", "a whole number >= 0", "RandomCrop(32, padding=4)"
            )
        if self.padding_mode not in PADDING_MODES:
            raise InputError(
                f"padding_mode is {self.padding_mode!r}.",
                ", ".join(PADDING_MODES),
                'RandomCrop(32, padding=4, padding_mode="reflect")',
            )
        self._keep(size=check_size("size", self.size))

    def out_size(self, size: Size, /) -> Size:
        """Return the size that was asked for, if the padded image is that large."""
        wanted = cast(Size, self.size)
        if self.reflects and self.padding >= min(size):
            raise InputError(
                f"a reflected padding of {self.padding} on an image of {size[0]}x{size[1]}.",
                f"at most {min(size) - 1}",
                f'RandomCrop({wanted}, padding={min(size) - 1}, padding_mode="reflect")',
            )
        padded = (size[0] + 2 * self.padding, size[1] + 2 * self.padding)
        if wanted[0] > padded[0] or wanted[1] > padded[1]:
            lack = max(wanted[0] - size[0], wanted[1] - size[1])
            raise InputError(
                f"a crop of {wanted[0]}x{wanted[1]} from an image of {size[0]}x{size[1]} with padding {self.padding}.",
                f"at most {padded[0]}x{padded[1]} (height x width)",
                f"RandomCrop({min(padded)}, padding={self.padding}), or padding={-(-lack // 2)}",
            )
        return wanted

    def numbers(self, size: Size, /) -> list[float]:
        """Return the first corner and the number of corners."""
        height, width = self.out_size(size)
        free = [size[1] + 2 * self.padding - width + 1, size[0] + 2 * self.padding - height + 1]
        return [-self.padding, -self.padding, *free]

    @property
    def reads_outside(self) -> bool:
        """Whether the padding is not part of the image."""
        return self.padding > 0 and not self.reflects

    @property
    def reflects(self) -> bool:
        """Whether pixels from outside of the image are reflected ones."""
        return self.padding > 0 and self.padding_mode == "reflect"

    def settled(self) -> Op:
        """Return the crop of the same size from the middle."""
        return CenterCrop(self.size, self.padding, self.padding_mode)


@dataclass(frozen=True)
class CenterCrop(RandomCrop):
    """Cut `size` from the middle of the padded image; not random."""

    is_fixed = True

    def numbers(self, size: Size, /) -> list[float]:
        """Return the corner of the crop in the middle."""
        left, top, columns, rows = super().numbers(size)
        return [left + (columns - 1) // 2, top + (rows - 1) // 2, 1, 1]
