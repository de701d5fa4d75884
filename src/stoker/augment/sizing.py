"""Resizes pictures of different sizes to one size: the first op of a `Compose`, drawn on the host, in one resample.

Enters: decoded pictures, each of its own size, and a `RandomResizedCrop` or `Resize`. Leaves: uint8
`(batch, channels, height, width)`, and masks. Costs: one resample for each picture: 1.0 ms on an ARM core for 224 x 224
out of 500 x 375 (Pillow); on a GPU one kernel for the batch, `2 s` squared taps for a pixel that shrinks by s.

The resample is torchvision's `resized_crop`, which is Pillow's: the rectangle is cut first, then each result is the
weighted mean of the pixels around its centre, with a triangle of half-width `max(1, shrink)`; masks take the nearest
pixel. So pictures are antialiased whenever they shrink. The rectangle is the one that `draw.py` draws for a tensor of
that size at (seed, stream, epoch, step, row), so a resumed epoch draws the same.

What follows in the `Compose` sees pictures of one size: `Compose.split_sizing` replaces the first op by a crop of the
same size, which keeps every later op at its place on the tape and therefore its draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional

from stoker.augment import fused
from stoker.augment.definition import Size, span
from stoker.augment.geometry import RandomResizedCrop, Resize
from stoker.augment.philox import make_counter, uniforms
from stoker.store.fields import Array

_TOGETHER = 4  # taps in a row that the kernel reads
_COLUMNS, _ROWS = 128, 8  # pixels of the result that one program of the kernel writes


class Sizing:
    """Draws the rectangle of each picture.

    Attributes:
        size: (height, width) of the result.
    """

    def __init__(self, op: RandomResizedCrop | Resize, seed: int, stream: int) -> None:
        self.size = cast(Size, op.size)
        self._gate = op.gate
        self._seed, self._stream = seed, stream
        scale = op.scale if isinstance(op, RandomResizedCrop) else (1.0, 1.0)
        ratio = op.ratio if isinstance(op, RandomResizedCrop) else (1.0, 1.0)
        self._area = span(scale)
        self._shape = span((float(np.log(ratio[0])), float(np.log(ratio[1]))))

    def boxes(self, sizes: Array, epoch: int, step: int) -> Array:
        """Return int64 `(batch, 4)`: left, top, width, height of each picture's rectangle.

        Args:
            sizes: `(batch, 2)`: height and width of each picture.
            epoch: Epoch of the batch.
            step: Number of the batch in its epoch.
        """
        drawn = uniforms(make_counter(self._seed, epoch, step, self._stream), len(sizes), 1)
        u = drawn[:, 0].unbind(1)
        high, wide = torch.from_numpy(np.ascontiguousarray(sizes, dtype=np.float64)).unbind(1)
        relation, pixels = (wide / high).float(), (wide * high).float()
        height, width = high.float(), wide.float()
        # float32 and this order of operations are those of `draw._resized_crop`.
        area = u[1] * self._area[1] + self._area[0]
        shape = torch.exp(u[2] * self._shape[1] + self._shape[0])
        shape = torch.minimum(torch.maximum(shape, area * relation), (1.0 / area) * relation)
        gate = u[0] < self._gate
        sides = []
        for square, most in ((area * pixels * shape, width), (area * pixels / shape, height)):
            side = torch.floor(torch.sqrt(square) + 0.5).clamp(min=1.0)
            sides.append(torch.where(gate, torch.minimum(side, most), most))
        starts = [
            torch.minimum(torch.floor(u[number] * (most - side + 1.0)), most - side)
            for number, most, side in ((3, width, sides[0]), (4, height, sides[1]))
        ]
        return torch.stack([*starts, *sides], 1).long().numpy()

    def resize_picture(self, image: Any, box: Sequence[int], nearest: bool = False) -> Array:
        """Return uint8 `(height, width)` or `(height, width, channels)` of a part of one of Pillow's images."""
        left, top, width, height = box
        if (width, height) != image.size:
            image = image.crop((left, top, left + width, top + height))
        if image.size != (self.size[1], self.size[0]):
            from PIL.Image import Resampling

            way = Resampling.NEAREST if nearest else Resampling.BILINEAR
            image = image.resize((self.size[1], self.size[0]), way)
        return np.asarray(image)

    def resize_tensors(self, images: Sequence[torch.Tensor], boxes: Array) -> torch.Tensor:
        """Return uint8 `(batch, channels, height, width)` of parts of pictures on one device.

        Queued on the current stream; the host does not wait. On a GPU with Triton it is one kernel over all pictures.

        Args:
            images: uint8 `(channels, height, width)` each.
            boxes: From `boxes`.
        """
        device, channels = images[0].device, images[0].shape[0]
        if device.type == "cuda" and fused.available(device) is None:
            shape = (len(images), channels, *self.size)
            out = torch.empty(shape, dtype=torch.uint8, device=device)
            launch(images, boxes, out)
            return out
        parts = []
        for image, (left, top, width, height) in zip(images, boxes.tolist(), strict=True):
            part = image[None, :, top : top + height, left : left + width].float()
            made = functional.interpolate(part, self.size, mode="bilinear", antialias=True)
            parts.append(made.add_(0.5).clamp_(0, 255).to(torch.uint8))
        return torch.cat(parts)

    def resize_block(
        self, memory: torch.Tensor, starts: Array, sizes: Array, boxes: Array, channels: int
    ) -> torch.Tensor | None:
        """Do as `resize_tensors`, for pictures in one piece of GPU memory; return None without a GPU and Triton.

        It makes no tensor per picture, so that the GIL stays free for the training loop.

        Args:
            memory: uint8.
            starts: Where each picture begins in it.
            sizes: `(batch, 2)`: height and width of each.
            boxes: From `boxes`.
            channels: Planes of each picture.
        """
        if memory.device.type != "cuda" or fused.available(memory.device) is not None:
            return None
        shape = (len(boxes), channels, *self.size)
        out = torch.empty(shape, dtype=torch.uint8, device=memory.device)
        launch_table(memory.data_ptr() + starts, sizes, boxes, out)
        return out


def launch(images: Sequence[torch.Tensor], boxes: Array, out: torch.Tensor) -> None:
    """Run the Triton kernel. The pictures may be freed afterwards, on the same stream."""
    kept = [image.contiguous() for image in images]
    addresses = np.array([image.data_ptr() for image in kept], dtype=np.int64)
    launch_table(addresses, np.array([image.shape[1:] for image in kept]), boxes, out)


def launch_table(addresses: Array, sizes: Array, boxes: Array, out: torch.Tensor) -> None:
    """Run the Triton kernel for pictures at these addresses."""
    from stoker.augment.sizing_kernels import resample

    table = np.empty((len(boxes), 7), dtype=np.int64)
    table[:, 0] = addresses
    table[:, 1:5] = boxes
    table[:, 5] = sizes[:, 1]
    table[:, 6] = sizes.astype(np.int64).prod(axis=1)
    on_device = torch.from_numpy(table).to(out.device)
    batch, channels, height, width = out.shape
    grid = (-(-width // _COLUMNS), -(-height // _ROWS), batch)
    narrow = bool((boxes[:, 2] < _TOGETHER).any())
    resample[grid](
        on_device, out, height, width, C=channels, NARROW=narrow, ROWS=_ROWS, BLOCK=_COLUMNS
    )
