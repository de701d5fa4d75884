"""The ops that change values (colour, blur, erasing, type), and a list of ops as tape and program.

Enters: ops in the order of the phases: geometry, colour, blur, erasing, Normalize, ToDtype. Leaves: the
checked list; its tape, one row of 16 numbers per random op (see `definition.py`); its `Program`, the part
of the work that is the same for every draw. Costs nothing on the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from stoker.augment.definition import (
    OUTPUT_DTYPES,
    TAPE_WIDTH,
    Op,
    Opcode,
    Phase,
    Program,
    Range,
    Size,
    check_around,
    check_number,
    check_range,
    span,
)
from stoker.augment.geometry import RandomCrop
from stoker.augment.stages import Stage
from stoker.errors import InputError

__all__ = [
    "ColorJitter",
    "GaussianBlur",
    "Normalize",
    "RandomBrightness",
    "RandomContrast",
    "RandomErasing",
    "RandomHue",
    "RandomSaturation",
    "ToDtype",
]

FLIPS = {Opcode.FLIP_H, Opcode.FLIP_V, Opcode.FLIP_BY_ID}
WHOLE_PIXELS = {*FLIPS, Opcode.CROP}
COLOUR_ORDER = ("brightness", "contrast", "saturation", "hue")
MOST_FACTOR = 1e6  # a larger factor only makes every pixel 0 or 1, and infinity times 0 is NaN
LEAST_STD = 1e-12  # its inverse is finite in every dtype that we compute in
IMAGENET = "(0.485, 0.456, 0.406), (0.229, 0.224, 0.225)"


# -- colour --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Colour(Op):
    """Base of the colour ops. Each writes four ranges on the tape; those it lacks change nothing."""

    phase = Phase.COLOUR
    opcode = Opcode.COLOUR
    kinds: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in self.kinds:
            centre, most = (0.0, 0.5) if kind == "hue" else (1.0, MOST_FACTOR)
            fix = f"{type(self).__name__}({kind}=0.2)"
            self._keep(**{kind: check_around(kind, getattr(self, kind), centre, most, fix)})

    def limits(self, kind: str) -> Range:
        """Return the range of a factor; a range of one value, the untouched one, if the op lacks it."""
        rest = 0.0 if kind == "hue" else 1.0
        return cast(Range, getattr(self, kind)) if kind in self.kinds else (rest, rest)

    def changes(self, kind: str) -> bool:
        """Return whether a draw can change this kind of colour."""
        rest = 0.0 if kind == "hue" else 1.0
        return self.gate > 0.0 and self.limits(kind) != (rest, rest)

    def numbers(self, _size: Size, /) -> list[float]:
        """Return the ranges of brightness, contrast, saturation and hue."""
        return [number for kind in COLOUR_ORDER for number in span(self.limits(kind))]

    def idle(self) -> bool:
        """Return whether every factor stays at its untouched value."""
        return not any(self.changes(kind) for kind in self.kinds)


@dataclass(frozen=True)
class RandomBrightness(_Colour):
    """Multiply by a factor within 1 ± `brightness` (or a range), clamped to [0, 1]."""

    kinds = ("brightness",)
    brightness: float | Range
    p: float = 1.0


@dataclass(frozen=True)
class RandomContrast(_Colour):
    """Stretch around the image's mean grey by a factor within 1 ± `contrast` (or a range)."""

    kinds = ("contrast",)
    contrast: float | Range
    p: float = 1.0


@dataclass(frozen=True)
class RandomSaturation(_Colour):
    """Stretch around each pixel's grey by a factor within 1 ± `saturation` (or a range)."""

    kinds = ("saturation",)
    saturation: float | Range
    p: float = 1.0


@dataclass(frozen=True)
class RandomHue(_Colour):
    """Turn the hue by up to `hue` turns either way (at most 0.5), or within a range."""

    kinds = ("hue",)
    hue: float | Range
    p: float = 1.0


@dataclass(frozen=True)
class ColorJitter(_Colour):
    """Brightness, contrast, saturation and hue behind one gate, always in this order.

    Args:
        brightness, contrast, saturation: A number j for factors within 1 ± j, or (low, high).
        hue: Largest turn either way, at most 0.5, or (low, high).
        p: Probability per sample, one gate for all four.
    """

    kinds = COLOUR_ORDER
    brightness: float | Range = 0.0
    contrast: float | Range = 0.0
    saturation: float | Range = 0.0
    hue: float | Range = 0.0
    p: float = 1.0


# -- blur, erase, normalise, dtype ---------------------------------------------------------------


@dataclass(frozen=True)
class GaussianBlur(Op):
    """Blur with a Gaussian of random width; reflected at the border.

    Args:
        kernel_size: Odd number of taps per axis, 3 to 63.
        sigma: Smallest and largest standard deviation in pixels.
        p: Probability per sample.
    """

    phase = Phase.BLUR
    opcode = Opcode.BLUR

    kernel_size: int
    sigma: Range = (0.1, 2.0)
    p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        taps = self.kernel_size
        if type(taps) is not int or not 3 <= taps <= 63 or taps % 2 == 0:
            raise InputError(
                f"kernel_size is {taps!r}.", "an odd number from 3 to 63", "GaussianBlur(3)"
            )
        self._keep(
            sigma=check_range("sigma", self.sigma, 1e-2, 1e3, "GaussianBlur(3, sigma=(0.1, 2.0))")
        )

    def numbers(self, _size: Size, /) -> list[float]:
        """Return the range of sigma."""
        return span(self.sigma)


@dataclass(frozen=True)
class RandomErasing(Op):
    """Fill a random rectangle with one value; masks, boxes and keypoints stay as they are.

    Args:
        p: Probability per sample.
        scale: Smallest and largest area as a fraction of the image.
        ratio: Smallest and largest height / width, drawn evenly in its logarithm.
        value: Written to every channel, in [0, 1] (before normalisation).
    """

    phase = Phase.ERASE
    opcode = Opcode.ERASE

    p: float = 0.5
    scale: Range = (0.02, 0.33)
    ratio: Range = (0.3, 3.3)
    value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        scale = check_range("scale", self.scale, 0.0, 1.0, "RandomErasing(scale=(0.02, 0.33))")
        ratio = check_range("ratio", self.ratio, 1e-3, 1e3, "RandomErasing(ratio=(0.3, 3.3))")
        value = check_number(
            "value of RandomErasing", self.value, 0.0, 1.0, "RandomErasing(value=0.5)"
        )
        self._keep(scale=scale, ratio=ratio, value=value)

    def numbers(self, size: Size, /) -> list[float]:
        """Return the size and the ranges of area and shape."""
        shape = span((math.log(self.ratio[0]), math.log(self.ratio[1])))
        return [size[1], size[0], *span(self.scale), *shape, size[0] * size[1]]


@dataclass(frozen=True)
class Normalize(Op):
    """Subtract `mean` and divide by `std`, per channel, of values in [0, 1].

    Args:
        mean: One number per channel, or one for all.
        std: One number per channel, or one for all; above 0.
    """

    phase = Phase.NORMALIZE
    is_fixed = True

    mean: float | Sequence[float]
    std: float | Sequence[float]

    def __post_init__(self) -> None:
        mean, std = (_channel_values(name, getattr(self, name)) for name in ("mean", "std"))
        if min(std) < LEAST_STD:
            raise InputError(
                f"std is {self.std!r}.",
                f"numbers above 0, {LEAST_STD:g} at least",
                f"Normalize({IMAGENET})",
            )
        self._keep(mean=mean, std=std)

    def for_channels(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and std with one number per channel."""
        pair = []
        for name, values in (("mean", self.mean), ("std", self.std)):
            numbers = cast(tuple[float, ...], values)
            if len(numbers) not in (1, channels):
                raise InputError(
                    f"{name} has {len(numbers)} numbers and the images have {channels} channels.",
                    f"{channels} numbers, or one for all channels",
                    f"Normalize(mean={(0.5,) * channels}, std={(0.5,) * channels})",
                )
            pair.append(numbers * channels if len(numbers) == 1 else numbers)
        return pair[0], pair[1]


@dataclass(frozen=True)
class ToDtype(Op):
    """Choose the dtype and the memory layout of the images that leave.

    Args:
        dtype: torch.float32, float16, bfloat16, or float64 (torch backend only).
        channels_last: Return NHWC memory.
    """

    phase = Phase.DTYPE
    is_fixed = True

    dtype: torch.dtype
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in OUTPUT_DTYPES:
            allowed = ", ".join(map(str, OUTPUT_DTYPES))
            raise InputError(f"dtype is {self.dtype!r}.", allowed, "ToDtype(torch.bfloat16)")


def _channel_values(name: str, value: Any) -> tuple[float, ...]:
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not values:
        raise InputError(f"{name} is empty.", "one number per channel", f"Normalize({IMAGENET})")
    return tuple(check_number(name, item, -1e6, 1e6, f"Normalize({IMAGENET})") for item in values)


# -- the whole list ------------------------------------------------------------------------------


def encode_tape(ops: Sequence[Op], size: Size) -> torch.Tensor:
    """Return the tape of `ops` for images of `size` (height, width): float32, on the CPU."""
    rows: list[list[float]] = []
    num_stage_rows = 0
    for op in ops:
        made = op.rows(size)
        if isinstance(op, Stage):
            for row in made:
                row[2] = float(num_stage_rows)
                num_stage_rows += 1
        rows += made
        size = op.out_size(size)
    return torch.tensor(rows, dtype=torch.float32, device="cpu").reshape(-1, TAPE_WIDTH)


def make_program(ops: Sequence[Op], size: Size, channels: int, ignore_index: int = 255) -> Program:
    """Return the program of `ops` for images of `size` (height, width) with `channels`."""
    out_size = size
    for op in ops:
        out_size = op.out_size(out_size)
    busy = [op for op in ops if not op.idle()]
    moves = [op.opcode for op in busy if op.phase == Phase.GEOMETRY]
    colours = [op for op in busy if isinstance(op, _Colour)]
    blur = next((op for op in busy if isinstance(op, GaussianBlur)), None)
    erase = next((op for op in busy if isinstance(op, RandomErasing)), None)
    normalize = next((op for op in ops if isinstance(op, Normalize)), None)
    dtype = next((op for op in ops if isinstance(op, ToDtype)), ToDtype(torch.float32))
    for kind in ("contrast", "saturation", "hue"):  # brightness takes any number of channels
        if channels not in (1, 3) and any(op.changes(kind) for op in colours):
            raise InputError(
                f"{kind} on images with {channels} channels.",
                "1 channel (grey) or 3 (RGB)",
                f"leave out {kind}, or augment the three colour channels alone",
            )
    if blur and min(out_size) <= blur.kernel_size // 2:
        raise InputError(
            f"a blur of {blur.kernel_size} taps on images of {out_size[0]}x{out_size[1]}.",
            f"at most {2 * min(out_size) - 1} taps: the border is reflected",
            "a smaller kernel_size",
        )
    mean, std = normalize.for_channels(channels) if normalize else (None, None)
    return Program(
        in_size=size,
        out_size=out_size,
        channels=channels,
        geometry=bool(moves),
        brightness=any(op.changes("brightness") for op in colours),
        contrast=any(op.changes("contrast") for op in colours),
        saturation=any(op.changes("saturation") for op in colours) and channels == 3,
        hue=any(op.changes("hue") for op in colours) and channels == 3,
        blur_kernel=blur.kernel_size if blur else 0,
        erase=erase is not None,
        erase_value=erase.value if erase else 0.0,
        mean=mean,
        std=std,
        out_dtype=dtype.dtype,
        channels_last=dtype.channels_last,
        ignore_index=ignore_index,
        whole_pixels=bool(moves) and set(moves) <= WHOLE_PIXELS,
        reflect=any(isinstance(op, RandomCrop) and op.reflects for op in busy),
    )


def split_program(
    ops: Sequence[Op], size: Size, channels: int, ignore_index: int
) -> tuple[Program | Stage, ...]:
    """Return the parts that are applied one after the other: programs, and the stages between them.

    All parts share one table: each kind of parameter belongs to one program.
    """
    parts: list[Program | Stage] = []
    group: list[Op] = []
    for op in [*ops, None]:
        if op is not None and not isinstance(op, Stage):
            group.append(op)
            continue
        # The first program makes float values and takes rows, so it is there even if it has no op.
        if group or not parts:
            program = make_program(group, size, channels, ignore_index)
            parts.append(program)
            group, size = [], program.out_size
        if op is not None and not op.idle():
            parts.append(op)
            size = op.out_size(size)
    return tuple(parts)


def check_order(ops: Sequence[Any]) -> tuple[Op, ...]:
    """Return `ops` as a tuple, or raise with the order to type.

    Raises:
        InputError: For something that is no op, a phase that goes back, or an op given twice.
    """
    if not isinstance(ops, Sequence) or isinstance(ops, str):
        raise InputError(
            f"the ops are {ops!r}.",
            "a list of ops of stoker.augment",
            f"Compose([{ops!r}])" if isinstance(ops, Op) else "Compose([RandomHorizontalFlip()])",
        )
    for op in ops:
        if not isinstance(op, Op) or type(op) in (Op, _Colour):
            raise InputError(
                f"{getattr(op, '__name__', repr(op))} is not an augmentation.",
                "ops of stoker.augment, your own functions of (images, u) as Function(function), and by "
                "Compose.from_torchvision(...) transforms of torchvision",
                "Compose([RandomHorizontalFlip(), Function(lambda images, u: 1 - images)])",
            )
    for before, after in itertools.pairwise(ops):
        if after.phase < before.phase:
            raise _misplaced(before, after, ops)
    own = [op for op in ops if not isinstance(op, Stage)]
    for before, after in itertools.pairwise(own):
        if place(after) < place(before):
            raise _misplaced(before, after, ops)
    _check_geometry([op for op in ops if op.phase == Phase.GEOMETRY])
    seen: set[object] = set()
    for op in own:
        kinds = op.kinds if isinstance(op, _Colour) else (op.phase,)
        if op.phase != Phase.GEOMETRY and seen & set(kinds):
            raise InputError(
                f"{type(op).__name__} repeats work that an op before it does.",
                "one op of each kind after geometry",
                f"leave out {op!r}, or use a second Compose",
            )
        seen |= set(kinds)
    return tuple(ops)


def _check_geometry(moves: Sequence[Op]) -> None:
    """Raise for geometry that one matrix and one rule for the border cannot describe."""
    runs = [is_stage for is_stage, _ in itertools.groupby(isinstance(op, Stage) for op in moves)]
    if runs.count(False) > 1:
        stage = next(op for op in moves if isinstance(op, Stage))
        raise InputError(
            f"{stage!r} stands between other geometry, which is one matrix.",
            "functions before or after all other geometry",
            "two Compose objects, one after the other",
        )
    reflecting = [op for op in moves if isinstance(op, RandomCrop) and op.reflects]
    others = [op for op in moves if op.opcode not in FLIPS and op not in reflecting]
    if reflecting and (others or len(reflecting) > 1):
        raise InputError(
            f"{reflecting[0]!r} beside {(others or reflecting)[-1]!r}.",
            "reflected padding with flips and no other geometry",
            "a Compose for this crop, and a second one for the rest",
        )


def place(op: Op) -> tuple[int, int]:
    """Return the sort key of an op: its phase and, inside colour, the fixed order."""
    return op.phase, COLOUR_ORDER.index(op.kinds[0]) if isinstance(op, _Colour) else 0


def _misplaced(before: Op, after: Op, ops: Sequence[Op]) -> InputError:
    first, second = type(before).__name__, type(after).__name__
    why = "each phase works on what the phase before it made"
    if before.phase >= Phase.NORMALIZE and after.phase == Phase.COLOUR:
        why = "colour on normalised values destroys them ([-2.1,2.6] -> [.14,.84])"
    elif before.phase >= Phase.NORMALIZE and after.phase == Phase.GEOMETRY:
        why = "after Normalize the 0 around the image is the mean colour, not black"
    elif before.phase == after.phase == Phase.COLOUR:
        why = "colour is always applied as brightness, contrast, saturation, hue"
    right = ", ".join(map(repr, sorted(ops, key=place)))
    return InputError(
        f"{second} stands after {first}: {why}.",
        "geometry, colour, blur, erasing, Normalize, ToDtype, in this order",
        f"Compose([{right}])",
    )
