"""torchvision's transforms as ops of a Compose, with a list of what became of each.

Enters: a `torchvision.transforms.v2.Compose`, one of the older `torchvision.transforms`, or a list. Leaves: ops for a
`Compose`, and one `Converted` per transform. Costs nothing. torchvision is not imported: transforms are known by the
names of their classes and attributes.

A transform becomes an op of the fused pass where both compute the same; a stage of ours where it can be written with
torch for whole batches; torchvision's own code, called image by image, where neither is possible; and nothing where
images in a batch on the device leave nothing to do (`ToImage`, `ToTensor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from stoker.augment import geometry, ops
from stoker.augment.definition import Op, Phase
from stoker.augment.draw import draw_erase
from stoker.augment.policies import RandAugment, TrivialAugment
from stoker.augment.reference import GREY, inside_rectangle
from stoker.augment.stages import Function
from stoker.errors import InputError

Tensor = torch.Tensor
How = Literal["fused", "stage", "image by image", "dropped"]
_IMAGE_BY_IMAGE = "its own code and torch's random numbers: slow, and in no CUDA graph"


@dataclass(frozen=True)
class Converted:
    """What became of one transform.

    Attributes:
        name: Class of the transform.
        how: "fused", "stage" (torch, between fused parts), "image by image" (torchvision's own code), or "dropped".
        note: What differs from torchvision, or why it is not fused; "" if there is nothing to say.
    """

    name: str
    how: How
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.how}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class _Made:
    """An op and its note for the user; `op` None drops the transform."""

    op: Op | None
    note: str = ""


class _NotFusedError(Exception):
    """A transform has an option that no op of ours has; the text says which."""


def convert(transforms: Any) -> tuple[list[Op], tuple[Converted, ...]]:
    """Return the ops and what became of each transform.

    Raises:
        InputError: It is no list of transforms, or a transform cannot be kept where it stands.
    """
    made: list[tuple[Any, _Made, How]] = []
    phase = Phase.GEOMETRY
    dtype: ops.ToDtype | None = None
    for transform in _flatten(transforms):
        try:
            found = _convert_one(transform, normalised=phase >= Phase.NORMALIZE)
        except _NotFusedError as reason:
            op = _image_by_image(transform, phase)
            found = _Made(op, f"{reason}; {_IMAGE_BY_IMAGE}")
        how: How = "fused"
        if found.op is None:
            how = "dropped"
        elif isinstance(found.op, Function) and isinstance(found.op.function, _ImageByImage):
            how = "image by image"
        elif found.op.phase >= phase and not isinstance(found.op, ops.ToDtype):
            how = "stage" if hasattr(found.op, "num_rows") else "fused"
            phase = found.op.phase
        elif hasattr(found.op, "num_rows"):
            how = "stage"
        if isinstance(found.op, ops.ToDtype):
            dtype, found = found.op, _Made(None, found.note)  # at the end, whatever its place
            how = "fused"
        made.append((transform, found, how))
    return _in_order(made, dtype)


def _in_order(
    made: Sequence[tuple[Any, _Made, How]], dtype: ops.ToDtype | None
) -> tuple[list[Op], tuple[Converted, ...]]:
    """Sort the ops by phase and note which moved; raise if one would pass a function called image by image."""
    placed: list[Op] = []
    told = []
    for transform, found, how in made:
        note = found.note
        if found.op is not None:
            behind = [op for op in placed if ops.place(op) > ops.place(found.op)]
            if any(
                isinstance(op, Function) and isinstance(op.function, _ImageByImage) for op in behind
            ):
                raise InputError(
                    f"{_name(transform)} behind {behind[0]!r}, which is called image by image.",
                    "geometry, colour, blur, erasing, Normalize, in this order",
                    "move it to the front of the list",
                )
            if behind:
                note = "; ".join(filter(None, [note, f"moved before {type(behind[0]).__name__}"]))
            placed.insert(len(placed) - len(behind), found.op)
        told.append(Converted(_name(transform), how, note))
    return [*placed, *([dtype] if dtype is not None else [])], tuple(told)


def _flatten(transforms: Any) -> list[Any]:
    inside = getattr(transforms, "transforms", transforms)
    is_list = isinstance(inside, Sequence) and not isinstance(inside, str)
    if not is_list or not (transforms is inside or _name(transforms) == "Compose"):
        raise InputError(
            f"{transforms!r} is no list of transforms.",
            "a torchvision.transforms.v2.Compose",
            "Compose.from_torchvision(v2.Compose([v2.RandomHorizontalFlip()]))",
        )
    flat = []
    for one in inside:
        flat += _flatten(one) if _name(one) == "Compose" else [one]
    return flat


def _name(transform: Any) -> str:
    return str(getattr(transform, "__name__", type(transform).__name__))


# -- one transform ---------------------------------------------------------------------------------


def _convert_one(transform: Any, *, normalised: bool) -> _Made:
    name = _name(transform)
    if name in _DROPPED:
        return _Made(None, _DROPPED[name])
    if name == "RandomApply":
        return _gated(transform, normalised)
    make = _KNOWN.get(name)
    if make is None:
        raise _NotFusedError("no op of ours")
    if name == "RandomErasing" and normalised:
        return _erase(transform, normalised=True)
    made = make(transform)
    return made if isinstance(made, _Made) else _Made(made)


def _gated(transform: Any, normalised: bool) -> _Made:
    inside = list(transform.transforms)
    if len(inside) != 1:
        raise _NotFusedError("several transforms behind one probability")
    made = _convert_one(inside[0], normalised=normalised)
    p = getattr(made.op, "p", None)
    if made.op is None or p is None:
        raise _NotFusedError(f"{_name(inside[0])} has no probability here")
    return replace(made, op=replace(made.op, p=p * float(transform.p)))  # type: ignore[call-arg]


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _NotFusedError(reason)


def _is_zero(fill: Any) -> bool:
    values = fill.values() if isinstance(fill, dict) else [fill]
    flat = [n for value in values for n in (value if isinstance(value, (list, tuple)) else [value])]
    return all(number in (None, 0, 0.0) for number in flat)


def _numbers(value: Any) -> list[float]:
    return [float(number) for number in (value if isinstance(value, (list, tuple)) else [value])]


def _size_of(transform: Any) -> tuple[int, int]:
    size = transform.size
    pair = [size, size] if isinstance(size, int) else list(size)
    _require(len(pair) == 2, "its size is the shorter side, which depends on the image")
    return int(pair[0]), int(pair[1])


def _smooth(transform: Any) -> str:
    """Return a note on the interpolation, where it is not bilinear without antialias as ours."""
    mode = str(getattr(transform, "interpolation", "bilinear")).lower()
    aliased = getattr(transform, "antialias", False) not in (False, None)
    told = [] if "bilinear" in mode else [f"bilinear instead of {mode.rpartition('.')[2]}"]
    return ", ".join([*told, *(["no antialias"] if aliased else [])])


def _rotation(transform: Any) -> _Made:
    _require(not transform.expand and transform.center is None, "expand or center")
    _require(_is_zero(transform.fill), "a fill other than 0")
    low, high = _numbers(transform.degrees)
    return _Made(geometry.RandomRotation((low, high)), _smooth(transform))


def _affine(transform: Any) -> _Made:
    _require(getattr(transform, "center", None) is None, "a center")
    _require(_is_zero(transform.fill), "a fill other than 0")
    low, high = _numbers(transform.degrees)
    shear = _numbers(transform.shear) if transform.shear is not None else [0.0, 0.0]
    pairs = [shear[:2], shear[2:] or [0.0, 0.0]]
    _require(all(pair[0] == -pair[1] for pair in pairs), "a shear that is not the same both ways")
    translate = transform.translate or (0.0, 0.0)
    made = geometry.RandomAffine(
        degrees=(low, high),
        translate=(float(translate[0]), float(translate[1])),
        scale=tuple(_numbers(transform.scale)) if transform.scale is not None else (1.0, 1.0),  # type: ignore[arg-type]
        shear=(abs(pairs[0][1]), abs(pairs[1][1])),
    )
    return _Made(made, _smooth(transform))


def _crop(transform: Any) -> Op:
    padding = transform.padding
    sides = {0} if padding is None else {int(side) for side in _numbers(padding)}
    _require(len(sides) == 1, "a padding that differs by side")
    _require(not getattr(transform, "pad_if_needed", False), "pad_if_needed")
    _require(_is_zero(getattr(transform, "fill", 0)), "a fill other than 0")
    mode = str(getattr(transform, "padding_mode", "constant"))
    _require(mode in geometry.PADDING_MODES, f"padding_mode {mode!r}")
    return geometry.RandomCrop(_size_of(transform), sides.pop(), mode)


def _jitter(transform: Any) -> _Made:
    ranges: dict[str, Any] = {}
    for kind in ops.COLOUR_ORDER:
        value = getattr(transform, kind, None)
        if value is not None:
            ranges[kind] = tuple(_numbers(value)) if isinstance(value, (list, tuple)) else value
    return _Made(ops.ColorJitter(**ranges), "in a fixed order")


def _blur(transform: Any) -> Op:
    taps = {int(side) for side in _numbers(transform.kernel_size)}
    _require(len(taps) == 1, "a kernel that is not square")
    low, *rest = _numbers(transform.sigma)
    return ops.GaussianBlur(taps.pop(), (low, rest[0] if rest else low))


def _erase(transform: Any, normalised: bool = False) -> _Made:
    values = _numbers(transform.value) if not isinstance(transform.value, str) else []
    _require(len(values) == 1, "a value per channel or random values")
    scale, ratio = tuple(_numbers(transform.scale)), tuple(_numbers(transform.ratio))
    p, value = float(transform.p), 0.0 if normalised else values[0]
    op = ops.RandomErasing(p, scale, ratio, value)  # type: ignore[arg-type]
    if not normalised:
        return _Made(op)

    def erase(images: Tensor, u: Tensor) -> Tensor:
        size = (int(images.shape[-2]), int(images.shape[-1]))
        drawn = draw_erase(op.numbers(size), [u[:, 0], *u.unbind(1)])
        return images.masked_fill(inside_rectangle(drawn, size), values[0])

    return _Made(Function(erase, phase="normalize", p=p), "behind Normalize, of normalised values")


def _grey(transform: Any) -> Op:
    def grayscale(images: Tensor, _u: Tensor) -> Tensor:
        if images.shape[1] == 1:
            return images
        red, green, blue = images.split(1, dim=1)
        grey: Tensor = red * GREY[0] + green * GREY[1] + blue * GREY[2]
        return grey.expand_as(images)

    return Function(grayscale, phase="colour", p=float(getattr(transform, "p", 1.0)))


def _dtype(transform: Any) -> _Made:
    dtype = getattr(transform, "dtype", torch.float32)
    dtype = dtype.get(torch.Tensor, torch.float32) if isinstance(dtype, dict) else dtype
    _require(isinstance(dtype, torch.dtype), "a dtype per kind of input")
    if dtype in (torch.uint8, torch.float32):  # an intermediate type; float32 is what leaves anyway
        return _Made(None, "images leave as float32 from 0 to 1")
    return _Made(ops.ToDtype(dtype), "at the end")


def _resized_crop(transform: Any) -> _Made:
    scale, ratio = tuple(_numbers(transform.scale)), tuple(_numbers(transform.ratio))
    op = geometry.RandomResizedCrop(_size_of(transform), scale, ratio)  # type: ignore[arg-type]
    return _Made(op, _smooth(transform))


_KNOWN: dict[str, Callable[[Any], Op | _Made]] = {
    "RandomHorizontalFlip": lambda t: geometry.RandomHorizontalFlip(float(t.p)),
    "RandomVerticalFlip": lambda t: geometry.RandomVerticalFlip(float(t.p)),
    "RandomRotation": _rotation,
    "RandomAffine": _affine,
    "RandomResizedCrop": _resized_crop,
    "RandomCrop": _crop,
    "CenterCrop": lambda t: geometry.CenterCrop(_size_of(t)),
    "Resize": lambda t: _Made(geometry.Resize(_size_of(t)), _smooth(t)),
    "ColorJitter": _jitter,
    "GaussianBlur": _blur,
    "RandomGrayscale": _grey,
    "Grayscale": _grey,
    "RandomErasing": _erase,
    "Normalize": lambda t: ops.Normalize(tuple(_numbers(t.mean)), tuple(_numbers(t.std))),
    "ToDtype": _dtype,
    "ConvertImageDtype": _dtype,
    "RandAugment": lambda t: RandAugment(t.num_ops, t.magnitude, t.num_magnitude_bins),
    "TrivialAugmentWide": lambda t: TrivialAugment(t.num_magnitude_bins),
}
_DROPPED = {
    "Identity": "does nothing",
    "ToImage": "images are tensors already",
    "PILToTensor": "images are tensors already",
    "ToTensor": "images are tensors already, and become float from 0 to 1",
    "ToPureTensor": "images are plain tensors",
}


class _ImageByImage:
    """A transform of torchvision's, called for one image after the other."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.__name__ = _name(transform)

    def __call__(self, images: Tensor, _u: Tensor) -> Tensor:
        return torch.stack([self.transform(image) for image in images])


def _image_by_image(transform: Any, phase: Phase) -> Function:
    if not callable(transform):
        raise InputError(
            f"{transform!r} is no transform.",
            "transforms of torchvision, or functions of one image",
            "Compose.from_torchvision(v2.Compose([v2.RandomHorizontalFlip()]))",
        )
    return Function(_ImageByImage(transform), phase=phase)
