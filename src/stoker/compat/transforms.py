"""The chapter's transforms: `apply(image_CHW)` for one image, torch or numpy, of any range; also the user's own.

Enters: an image `(channels, height, width)`. Leaves: one of the same kind. Costs: a batch of images in the usual range
goes through `stoker.augment`, many at once on the device; everything else (values outside 0 to 1, numpy,
the user's transforms) is done image by image on the host, with torch's random numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stoker import augment
from stoker.augment.compose import Compose as FusedCompose
from stoker.augment.definition import Op


class Transform(ABC):
    """One image in, one image out. Inherit it, or write any class with `apply`."""

    @abstractmethod
    def apply(self, image: Any, /) -> Any:
        """Return the transformed image."""

    def __call__(self, image: Any) -> Any:
        """Do as `apply`: torch's datasets call their transforms."""
        return self.apply(image)

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return callable(getattr(other, "apply", None)) if cls is Transform else NotImplemented


class ToTensor(Transform):
    """An image as a float tensor `(channels, height, width)`; uint8 becomes 0 to 1, `(H, W, C)` arrays are turned."""

    def apply(self, image: Any, /) -> torch.Tensor:
        """Return the tensor."""
        values = image if isinstance(image, torch.Tensor) else torch.from_numpy(np.array(image))
        if values.dim() == 2:
            values = values[None]
        elif not isinstance(image, torch.Tensor) and values.dim() == 3 and values.shape[-1] <= 4:
            values = values.permute(2, 0, 1)
        is_bytes = values.dtype == torch.uint8
        return values.float().div(255) if is_bytes else values.float().contiguous()


def _is_usual(image: Any) -> bool:
    """Return whether `stoker.augment` takes the image: a tensor of bytes, or of floats from 0 to 1."""
    if not isinstance(image, torch.Tensor):
        return False
    if image.dtype == torch.uint8 or not image.is_floating_point() or not image.numel():
        return True
    return bool((image.min() >= 0) & (image.max() <= 1))


def _host_apply(image: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to a tensor of the image; return numpy if the image is numpy."""
    if isinstance(image, np.ndarray):
        return change(torch.from_numpy(np.ascontiguousarray(image))).numpy()
    return change(image)


def _host_draw(image: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change`, which draws, to the image, or to each image of a batch."""

    def change_each(values: torch.Tensor) -> torch.Tensor:
        is_batch = values.dim() == 4 and len(values) > 0
        return torch.stack([change(each) for each in values]) if is_batch else change(values)

    return _host_apply(image, change_each)


class Normalize(augment.Normalize):
    """`(x - mean) / std` per channel."""

    def apply(self, image: Any, /) -> Any:
        """Return the normalised image; values may lie anywhere."""
        if _is_usual(image):
            return super().apply(image)

        def change(values: torch.Tensor) -> torch.Tensor:
            pair = self.for_channels(values.shape[-3])
            mean, std = (torch.tensor(each, device=values.device)[:, None, None] for each in pair)
            return (values.float() - mean) / std

        return _host_apply(image, change)


class RandomHorizontalFlip(augment.RandomHorizontalFlip):
    """Left and right exchanged with probability `p`."""

    def apply(self, image: Any, /) -> Any:
        """Return the image, or its mirror image."""
        if _is_usual(image):
            return super().apply(image)

        def change(values: torch.Tensor) -> torch.Tensor:
            return values.flip(-1) if float(torch.rand(())) < self.p else values.clone()

        return _host_draw(image, change)


def _reflected(side: int, pad: int) -> torch.Tensor:
    """Return the pixel of each place from `-pad` to `side + pad`, reflected at the border."""
    places = torch.arange(-pad, side + pad).abs()
    return side - 1 - (side - 1 - places).abs()


class RandomCrop(augment.RandomCrop):
    """A window of `size` anywhere in the image with `padding` pixels around it: zeros, or the reflected image."""

    def apply(self, image: Any, /) -> Any:
        """Return the window."""
        if _is_usual(image):
            return super().apply(image)

        def change(values: torch.Tensor) -> torch.Tensor:
            before, pad = (values.shape[-2], values.shape[-1]), self.padding
            height, width = self.out_size(before)
            if self.reflects:  # by index: torch's reflected padding takes no integers
                rows, columns = (_reflected(side, pad) for side in before)
                padded = values[..., rows[:, None], columns]
            else:
                padded = torch.nn.functional.pad(values, (pad, pad, pad, pad))
            free = padded.shape[-2] - height, padded.shape[-1] - width
            top, left = (int(torch.randint(0, each + 1, ())) for each in free)
            return padded[..., top : top + height, left : left + width].clone()

        return _host_draw(image, change)


class _Chain(Transform):
    """Transforms one after the other, image by image; made by `Compose` where one of them is not ours."""

    def __init__(self, transforms: Sequence[Any]) -> None:
        self.transforms = list(transforms)

    def apply(self, image: Any, /) -> Any:
        """Return what the last one returns."""
        for each in self.transforms:
            image = each.apply(image) if hasattr(each, "apply") else each(image)
        return image


class Compose(FusedCompose):
    """Transforms (ours, objects with `apply`, functions of one image) one after the other: fused where all are ours.

    Keywords are as for `stoker.augment.Compose`.
    """

    def __new__(cls, ops: Sequence[Any] = (), **_named: Any) -> Any:
        """Return a chain if a transform is not ours. `copy` and pickle call this without ops."""
        is_list = isinstance(ops, Sequence) and not isinstance(ops, str)
        foreign = [op for op in ops if not isinstance(op, Op)] if is_list else []
        usable = [op for op in foreign if isinstance(op, Transform) or callable(op)]
        if foreign and len(usable) == len(foreign):
            return _Chain(ops)
        return super().__new__(cls)

    def apply(self, images: Any, *given: Any, **named: Any) -> Any:
        """Return the transformed image or batch; see `stoker.augment.Compose.apply`."""
        if given or named or _is_usual(images):
            return super().apply(images, *given, **named)
        return _Chain(self.ops).apply(images)
