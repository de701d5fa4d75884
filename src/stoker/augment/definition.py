"""The base class of all ops, the program, the layout of the tape, and the checks of arguments.

Enters: arguments as a user types them. Leaves: checked values. Costs nothing; no tensor is touched.

The tape is float32 `(num_ops, 16)`: column 0 the opcode, column 1 the probability of the gate,
columns 2 to 15 the numbers `a0 .. a13` below. A range is two numbers, *low* and *span*, and gives
`low + u * span`. `u0` is the gate of every op (`u0 < p` applies it); sizes are those of the image
that enters the op.

    FLIP_H        a0 width - 1
    FLIP_V        a0 height - 1
    AFFINE        a0 cx, a1 cy, then ranges: a2 angle (radians, clockwise) u1, a4 shift x (pixels)
                  u2, a6 shift y u3, a8 scale u4, a10 shear x (radians) u5, a12 shear y u6
    RESIZED_CROP  a0 width, a1 height, a2 out width, a3 out height, a4 area range u1, a6 log(w / h)
                  range u2, a8 width / height, a9 width * height; left u3, top u4
    CROP          a0 first left, a1 first top, a2 number of lefts u1, a3 number of tops u2
    COLOUR        ranges: a0 brightness u1, a2 contrast u2, a4 saturation u3, a6 hue u4
    BLUR          a0 sigma range u1
    ERASE         a0 width, a1 height, a2 area range u1, a4 log(h / w) range u2, a6 width * height;
                  left u3, top u4
    FLIP_BY_ID    a0 width - 1; flips by the image's id and the epoch, whatever the gate
    STAGE         a0 index of the stage's uniforms; draws u0 .. u7 and changes no parameter

`draw.py` turns a row into parameters. `Normalize` and `ToDtype` draw nothing and have no row: they are
part of the program only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, ClassVar, Protocol, cast

import torch

from stoker.errors import InputError

TAPE_WIDTH = 16
TABLE_WIDTH = 16
Size = tuple[int, int]
Range = tuple[float, float]
OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
RADIANS = math.pi / 180.0

# An op that is used without a Compose has a stream of its own, so that two of them draw differently.
_LONE_STREAMS = itertools.count()


class Opcode(IntEnum):
    """Column 0 of the tape."""

    FLIP_H = 1
    FLIP_V = 2
    AFFINE = 3
    RESIZED_CROP = 4
    CROP = 5
    COLOUR = 6
    BLUR = 7
    ERASE = 8
    FLIP_BY_ID = 9
    STAGE = 10


class Phase(IntEnum):
    """The order of work; inside a Compose phases only increase."""

    GEOMETRY = 1
    COLOUR = 2
    BLUR = 3
    ERASE = 4
    NORMALIZE = 5
    DTYPE = 6


class Transform(Protocol):
    """Anything that takes one image `(channels, height, width)` and returns one."""

    def apply(self, image: torch.Tensor, /) -> torch.Tensor:
        """Return the transformed image."""


@dataclass(frozen=True)
class Program:
    """The part of the work that is the same for every sample; hashable: kernels are cached by it.

    Attributes:
        in_size: Height and width of the images that enter.
        out_size: Height and width of those that leave.
        channels: Number of channels of both.
        geometry: False if no pixel moves; the matrix is then never read.
        brightness, contrast, saturation, hue: Whether that factor can differ from "untouched".
        blur_kernel: Odd number of taps, 0 for no blur.
        erase: Whether rectangles can be erased.
        erase_value: Written into the rectangle, in [0, 1].
        mean, std: Per channel, or None for no normalisation.
        out_dtype: Dtype of the images that leave.
        channels_last: Memory layout of the images that leave.
        ignore_index: Written in masks where no input pixel is.
        whole_pixels: True if geometry is flips and crops only, so that nothing is interpolated. A
            backend may ignore this: it is then slower, and its result is the same.
        reflect: Places outside of the image read the pixel that is reflected at the border, in masks
            too. Only together with `whole_pixels`.
    """

    in_size: Size
    out_size: Size
    channels: int
    geometry: bool
    brightness: bool
    contrast: bool
    saturation: bool
    hue: bool
    blur_kernel: int
    erase: bool
    erase_value: float
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    out_dtype: torch.dtype
    channels_last: bool
    ignore_index: int
    whole_pixels: bool = False
    reflect: bool = False


# -- checks --------------------------------------------------------------------------------------


def check_number(name: str, value: Any, low: float, high: float, fix: str) -> float:
    """Return a number from `low` to `high`; NaN and bools are refused."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (plain and low <= value <= high):
        raise InputError(f"{name} is {value!r}.", f"a number from {low:g} to {high:g}", fix)
    return float(value) + 0.0  # -0.0 becomes 0.0, which prints better


def check_range(name: str, value: Any, low: float, high: float, fix: str) -> Range:
    """Return two numbers in order within `low .. high`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InputError(f"{name} is {value!r}.", "two numbers (low, high)", fix)
    first, second = (check_number(name, item, low, high, fix) for item in value)
    if first > second:
        raise InputError(
            f"{name} is {value!r}: the low end is above the high end.", "low <= high", fix
        )
    return first, second


def check_around(name: str, value: Any, centre: float, most: float, fix: str) -> Range:
    """Return `centre ± value` for a number, or the range that was given."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return check_range(name, value, 0.0 if centre else -most, most, fix)
    reach = check_number(name, value, 0.0, most, fix)
    low = centre - reach  # for a reach of 0 it is 0.0; -reach would be -0.0
    return max(0.0, low) if centre else low, centre + reach


def check_size(name: str, value: Any) -> Size:
    """Return (height, width) from one side or both."""
    pair = (value, value) if isinstance(value, int) else value
    whole = isinstance(pair, Sequence) and len(pair) == 2 and not isinstance(pair, str)
    if not whole or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in pair):
        raise InputError(
            f"{name} is {value!r}.", "a whole number >= 1, or (height, width)", f"{name}=224"
        )
    return int(pair[0]), int(pair[1])


def span(limits: Range, factor: float = 1.0) -> list[float]:
    """Return a range as the tape holds it: low and span."""
    return [limits[0] * factor, (limits[1] - limits[0]) * factor]


def check_reaches(name: str, value: Any, most: float, fix: str) -> Range:
    """Return two numbers from 0 to `most`, for x and for y; either may be the larger."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InputError(f"{name} is {value!r}.", "two numbers, for x and for y", fix)
    across, down = (check_number(name, item, 0.0, most, fix) for item in value)
    return across, down


def centre_of(size: Size) -> list[float]:
    """Return the centre (cx, cy) of an image; pixel centres are whole numbers."""
    return [(size[1] - 1) / 2, (size[0] - 1) / 2]


# -- the base ------------------------------------------------------------------------------------


class Applies(Protocol):
    """The part of a `Compose` that an op needs when it is used alone."""

    def apply(self, image: torch.Tensor, /) -> torch.Tensor:
        """Draw for one image, and return it as float."""


@dataclass(frozen=True)
class Op:
    """One augmentation. Subclasses are frozen and checked at construction.

    Attributes:
        phase: When it is applied.
        opcode: Kind of its row on the tape; None for an op that draws nothing.
        is_fixed: Whether it is not random, and so is kept for validation.
        composed_by: `Compose`, for an op that is applied alone. `compose.py`, which imports this module, sets it.
    """

    phase: ClassVar[Phase]
    opcode: ClassVar[Opcode | None] = None
    is_fixed: ClassVar[bool] = False
    composed_by: ClassVar[type[Any]]

    @property
    def reads_outside(self) -> bool:
        """Whether the result can have pixels from outside of the image, which masks mark with the ignore index."""
        return False

    def __post_init__(self) -> None:
        if hasattr(self, "p"):
            name = type(self).__name__
            self._keep(p=check_number(f"p of {name}", self.gate, 0.0, 1.0, f"{name}(..., p=0.5)"))

    def _keep(self, **values: Any) -> None:
        """Store checked values in the frozen dataclass."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def gate(self) -> float:
        """Probability that a sample is changed; ops without `p` always act."""
        return cast(float, getattr(self, "p", 1.0))

    def out_size(self, size: Size, /) -> Size:
        """Return (height, width) of the result for an image of `size`."""
        return size

    def numbers(self, size: Size, /) -> list[float]:
        """Return `a0, a1, ...` of the tape for an image of `size`."""
        raise NotImplementedError

    def idle(self) -> bool:
        """Return whether no draw can change anything; the program then leaves the op out."""
        return self.gate == 0.0

    def settled(self) -> Op | None:
        """Return the op to use for validation, which is never random; None to leave it out."""
        return self if self.is_fixed else None

    def rows(self, size: Size, /) -> list[list[float]]:
        """Return the rows of this op on the tape, 16 numbers each; none for an op that draws nothing."""
        if self.opcode is None:
            return []
        values = [float(self.opcode), self.gate, *self.numbers(size)]
        return [values + [0.0] * (TAPE_WIDTH - len(values))]

    @cached_property
    def _alone(self) -> Applies:
        made: Applies = self.composed_by([self], stream=0x8000 + next(_LONE_STREAMS) % 0x8000)
        return made

    def __call__(self, *_: Any) -> Any:
        """Raise: a `Compose` is called with images, one op is not."""
        raise InputError(
            f"{type(self).__name__} was called like a function.",
            "a Compose of it, with a batch; or its apply, with one image",
            f"Compose([{self!r}])(images)",
        )

    def apply(self, image: torch.Tensor) -> torch.Tensor:
        """Draw for one image `(C, H, W)` and return it as float in [0, 1] (see `Compose.apply`)."""
        return self._alone.apply(image)
