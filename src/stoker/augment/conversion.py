"""torchvision's transforms as ops of a Compose, with a list of what became of each.

Enters: a `torchvision.transforms.v2.Compose`, one of the older `torchvision.transforms`, or a list. Leaves: ops for a
`Compose`, and one `Converted` per transform. Costs nothing. torchvision is not imported: transforms are known by the
names of their classes and attributes.

A transform becomes an op of the fused pass where both compute the same; a stage of ours where it can be written with
torch for whole batches; torchvision's own code, called image by image, where neither is possible; and nothing where
images in a batch on the device leave nothing to do (`ToImage`, `ToTensor`). A transform whose results differ in size
from image to image is refused: a batch has one size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from stoker.augment import geometry, ops
from stoker.augment.definition import OUTPUT_DTYPES, Op, Phase, Size
from stoker.augment.draw import draw_erase
from stoker.augment.policies import RandAugment, TrivialAugment
from stoker.augment.reference import GREY, inside_rectangle
from stoker.augment.stages import Apply, Function, Pair
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
    flat = _flatten(transforms)
    num_on_bytes = _count_on_bytes(flat)
    for at, transform in enumerate(flat):
        try:
            found = _convert_one(transform, normalised=phase >= Phase.NORMALIZE)
        except _NotFusedError as reason:
            op = _image_by_image(transform, phase, as_bytes=at < num_on_bytes)
            found = _Made(op, f"{reason}; {_IMAGE_BY_IMAGE}")
        how: How = "fused"
        if found.op is None:
            how = "dropped"
        elif isinstance(found.op, _ImageByImage):
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
            called = next((op for op in behind if isinstance(op, _ImageByImage)), None)
            if called is not None:
                raise InputError(
                    f"{_name(transform)} behind {called!r}, which is called image by image.",
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


def _count_on_bytes(flat: Sequence[Any]) -> int:
    """Return how many transforms stand before the one that turns bytes into floats from 0 to 1; 0 without one."""
    for at, transform in enumerate(flat):
        name = _name(transform)
        if name == "Normalize":
            break
        converts = name in ("ToDtype", "ConvertImageDtype")
        if name == "ToTensor" or (converts and _dtype_of(transform) in OUTPUT_DTYPES):
            return at
    return 0


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
    op = replace(made.op, p=p * float(transform.p))  # type: ignore[call-arg]
    return replace(made, op=replace(op, validation=False) if isinstance(op, Function) else op)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _NotFusedError(reason)


def _is_zero(fill: Any) -> bool:
    values = fill.values() if isinstance(fill, dict) else [fill]
    flat = [n for value in values for n in (value if isinstance(value, (list, tuple)) else [value])]
    return all(number in (None, 0, 0.0) for number in flat)


def _numbers(value: Any) -> list[float]:
    return [float(number) for number in (value if isinstance(value, (list, tuple)) else [value])]


def _size_of(transform: Any) -> Size:
    """Return (height, width) of a crop, whose one number is both sides; that of `Resize` is the shorter side."""
    size = _numbers(transform.size)
    return int(size[0]), int(size[-1])


def _smooth(transform: Any) -> str:
    """Return a note on the interpolation, where it is not bilinear without antialias as ours."""
    mode = getattr(transform, "interpolation", "bilinear")
    mode = (_PILLOW_MODES.get(mode, str(mode)) if isinstance(mode, int) else str(mode)).lower()
    aliased = getattr(transform, "antialias", False) not in (False, None)
    told = [] if "bilinear" in mode else [f"bilinear instead of {mode.rpartition('.')[2]}"]
    return ", ".join([*told, *(["no antialias"] if aliased else [])])


def _resize(transform: Any) -> _Made:
    size = transform.size
    side = "longer" if size is None else "shorter"
    both = isinstance(size, Sequence) and len(size) == 2
    _require(both, f"its size is the {side} side, so the result depends on the image")
    return _Made(geometry.Resize(_size_of(transform)), _smooth(transform))


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
    is_drawn = transform.value is None or isinstance(
        transform.value, str
    )  # "random"; v2 keeps None
    values = [] if is_drawn else _numbers(transform.value)
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


def _grey(transform: Any) -> _Made:
    def grayscale(images: Tensor, _u: Tensor) -> Tensor:
        if images.shape[1] == 1:
            return images
        red, green, blue = images.split(1, dim=1)
        grey: Tensor = red * GREY[0] + green * GREY[1] + blue * GREY[2]
        return grey.expand_as(images)

    is_fixed = _name(transform) == "Grayscale"
    p = 1.0 if is_fixed else float(transform.p)
    one_channel = is_fixed and getattr(transform, "num_output_channels", 1) == 1
    note = "3 equal channels for RGB instead of 1" if one_channel else ""
    return _Made(Function(grayscale, phase="colour", p=p, validation=is_fixed), note)


def _policy(policy: type[Op], *names: str) -> Callable[[Any], _Made]:
    def make(transform: Any) -> _Made:
        _require(_is_zero(getattr(transform, "fill", None)), "a fill other than 0")
        return _Made(policy(*(getattr(transform, name) for name in names)), _smooth(transform))

    return make


def _dtype_of(transform: Any) -> Any:
    dtype = getattr(transform, "dtype", torch.float32)
    return dtype.get(torch.Tensor, torch.float32) if isinstance(dtype, dict) else dtype


def _dtype(transform: Any) -> _Made:
    dtype = _dtype_of(transform)
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
    "Resize": _resize,
    "ColorJitter": _jitter,
    "GaussianBlur": _blur,
    "RandomGrayscale": _grey,
    "Grayscale": _grey,
    "RandomErasing": _erase,
    "Normalize": lambda t: ops.Normalize(tuple(_numbers(t.mean)), tuple(_numbers(t.std))),
    "ToDtype": _dtype,
    "ConvertImageDtype": _dtype,
    "RandAugment": _policy(RandAugment, "num_ops", "magnitude", "num_magnitude_bins"),
    "TrivialAugmentWide": _policy(TrivialAugment, "num_magnitude_bins"),
}
_DROPPED = {
    "Identity": "does nothing",
    "ToImage": "images are tensors already",
    "PILToTensor": "images are tensors already",
    "ToTensor": "images are tensors already, and become float from 0 to 1",
    "ToPureTensor": "images are plain tensors",
}
_PILLOW_MODES = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


# -- image by image --------------------------------------------------------------------------------


def _resized(transform: Any, size: Size) -> Size:
    """Return the size that `Resize` makes of `size`, where it is told one side only."""
    short, long = min(size), max(size)
    most: Any = getattr(transform, "max_size", None)
    if transform.size is None:
        new_short, new_long = int(most * short / long), int(most)
    else:
        new_short = int(_numbers(transform.size)[0])
        new_long = int(new_short * long / short)
        if most is not None and new_long > most:
            new_short, new_long = int(most * new_short / new_long), int(most)
    return (new_long, new_short) if size[0] > size[1] else (new_short, new_long)


def _padded(transform: Any, size: Size) -> Size:
    """Return the size that `Pad` makes of `size`; its numbers are (left, top, right, bottom), or fewer."""
    sides = [int(side) for side in _numbers(transform.padding)]
    left, top, right, bottom = sides * (4 // len(sides))
    return size[0] + top + bottom, size[1] + left + right


_SIZES: dict[str, Callable[[Any, Size], Size]] = {
    "Resize": _resized,
    "Pad": _padded,
    "RandomCrop": lambda transform, _size: _size_of(transform),
}
"""The size of the result for a size of the images; other transforms keep it."""
_FIXED = ("Resize", "Pad")
_UNEVEN = {
    *("FiveCrop", "TenCrop", "RandomIoUCrop", "RandomResize", "RandomShortestSize"),
    *("RandomZoomOut", "ScaleJitter"),
}
"""Each image gets a size of its own, or becomes several."""
_STILL = {
    *("ColorJitter", "GaussianBlur", "GaussianNoise", "Grayscale", "JPEG", "RandomAdjustSharpness"),
    *("RandomAutocontrast", "RandomChannelPermutation", "RandomEqualize", "RandomErasing"),
    *("RandomGrayscale", "RandomInvert", "RandomPhotometricDistort", "RandomPosterize"),
    "RandomSolarize",
}
"""These change values and move no pixel, so that masks can stay."""


def _is_still(transform: Any) -> bool:
    inside = getattr(transform, "transforms", None)  # RandomApply, RandomOrder, RandomChoice
    return _name(transform) in _STILL if inside is None else all(map(_is_still, inside))


@dataclass(frozen=True, repr=False)
class _ImageByImage(Function):
    """A transform of torchvision's, called for one image after the other.

    Attributes:
        as_bytes: Images enter it as uint8, as they do before `ToTensor` or `ToDtype`: its `fill` or threshold may be
            a number up to 255.
    """

    as_bytes: bool = False

    @property
    def moves(self) -> bool:
        """Whether it may move pixels: all do that are not known to change values only."""
        return not _is_still(self.function)

    def out_size(self, size: Size, /) -> Size:
        """Return (height, width) of the result."""
        return _SIZES[self.name](self.function, size) if self.name in _SIZES else size

    def settled(self) -> Op | None:
        """Return itself if it is not random, and the crop from the middle for a random crop."""
        if self.name == "RandomCrop":
            crop: Any = self.function
            size = _size_of(crop)
            sides = size if crop.pad_if_needed else _numbers(crop.padding or 0)
            return geometry.CenterCrop(size, int(max(sides)))
        return super().settled()

    def run(
        self, images: Tensor, masks: Tensor | None, _uniforms: Tensor, _ignore: int, _apply: Apply
    ) -> Pair:
        """Call the transform for each image."""
        if masks is not None and self.moves:
            raise InputError(
                f"masks with {self.name}, which is called image by image and would move images only.",
                "masks with the geometry ops of stoker.augment",
                f"the list without {self.name}",
            )
        height, width = self.out_size((images.shape[-2], images.shape[-1]))
        shape = (images.shape[1], height, width)
        call: Callable[[Tensor], Any] = self.function  # type: ignore[assignment]
        made = []
        for image in images.mul(255).add(0.5).to(torch.uint8) if self.as_bytes else images:
            one = call(image)
            if not isinstance(one, Tensor) or one.shape != shape or one.device != image.device:
                got = (
                    f"{tuple(one.shape)} on {one.device}"
                    if isinstance(one, Tensor)
                    else type(one).__name__
                )
                raise InputError(
                    f"{self.name} made {got} of an image {tuple(image.shape)} on {image.device}.",
                    f"a tensor {shape} on {image.device}, for each image of a batch",
                    f"the list without {self.name}",
                )
            made.append(
                one.to(images.dtype) / 255 if one.dtype == torch.uint8 else one.to(images.dtype)
            )
        values = torch.stack(made)
        return values if self.phase >= Phase.NORMALIZE else values.clamp(0.0, 1.0), masks


def _image_by_image(transform: Any, phase: Phase, *, as_bytes: bool) -> _ImageByImage:
    if isinstance(transform, Op) or not callable(transform):
        raise InputError(
            f"{transform!r} is no transform.",
            "transforms of torchvision, or functions of one image",
            "Compose.from_torchvision(v2.Compose([v2.RandomHorizontalFlip()]))",
        )
    name = _name(transform)
    expands = name == "RandomRotation" and transform.expand
    if expands or name in _UNEVEN:
        raise InputError(
            f"{name}{' with expand=True' if expands else ''} gives the images of a batch different sizes.",
            "transforms whose results have one size",
            "RandomRotation(..., expand=False)" if expands else f"the list without {name}",
        )
    return _ImageByImage(transform, phase=phase, validation=name in _FIXED, as_bytes=as_bytes)
