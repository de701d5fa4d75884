"""The torch backend: applies parameters to images and masks with torch. The reference for every op.

Enters: images `(N, C, H, W)` uint8 or float, masks, the table of `stoker.augment.draw`, the program.
Leaves: new images and masks; boxes and keypoints by the same matrix. Costs: 0.6 of Kornia's time on a
CPU for flip, rotation, colour and normalisation; memory for the result and about six times a slice of the
batch (16 to 100 MB on a CPU); no host synchronisation.

This file defines what every op computes. Values are float32 in [0, 1] (float64 for float64 images):
a uint8 v is v * (1/255). Geometry is one resample of the composed matrix:

    sx = (m00*x + m01*y) + m02, x0 = floor(sx), fx = sx - x0; the same for y
    top = v00*(1-fx) + v01*fx, bottom likewise, v = top*(1-fy) + bottom*fy; taps outside are 0
    masks take the pixel floor(s + 0.5); outside is the ignore index

uint8 is interpolated first, then scaled. Colour follows, where its factor is not "untouched":
brightness clamp(v*b), contrast clamp(c*v + (1-c)*mean of grey), saturation clamp(s*v + (1-s)*grey),
hue; then blur, erase, (v - mean) * (1/std), dtype. An untouched factor leaves every bit as it was.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from stoker.augment.definition import Program, Size
from stoker.augment.draw import BRIGHTNESS, CONTRAST, ERASE_X0, HUE, SATURATION, SIGMA, draw_table
from stoker.augment.guard import find_missing, note_faults
from stoker.host_memory import Recycled

GREY = (0.299, 0.587, 0.114)
# Limit of a slice's float32 values; its intermediates take about six times as much. On a CPU it is for one thread, and
# a slice should stay in its cache: 1.26 ms for an image of 224 px in slices of 2.4 MB, 1.79 in slices of 16 MB, while
# the other core of two decoded (a core with 1 MB of level 2).
CPU_SLICE_BYTES = 5 << 19
MOST_CPU_SLICE_BYTES = 16 << 20
GPU_SLICE_BYTES = 128 << 20

Tensor = torch.Tensor


class TorchBackend:
    """Draws and applies with plain torch operations, on any device."""

    name = "torch"

    def __init__(self) -> None:
        self._memory = Recycled()

    def draw(
        self,
        tape: Tensor,
        counter: Tensor,
        batch: int,
        num_batches: int = 1,
        *,
        ids: Tensor | None = None,
        staged: Tensor | None = None,
    ) -> Tensor:
        """Return the table `(num_batches * batch, 16)` and advance the counter's step."""
        return draw_table(tape, counter, batch, num_batches, ids=ids, staged=staged)

    def apply(
        self,
        images: Tensor,
        masks: Tensor | None,
        rows: Tensor | None,
        table: Tensor,
        program: Program,
        faults: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return augmented images and masks.

        Args:
            images: `(N, C, H, W)`, any strides.
            masks: `(N, H, W)` or `(N, 1, H, W)` of an integer dtype, or None.
            rows: int64 `(B,)` into N, or None where N == B. A row that does not exist gives NaN, and
                the ignore index in masks.
            table: float32 `(B, 16)`.
            program: Made for this size and these channels.
            faults: int32 `(1,)`; bits are set where values are no valid image or rows do not exist.
                None skips the check.
        """
        shape = (table.shape[0], program.channels, *program.out_size)
        result = self._new_result(shape, program, images.device)
        moved = None if masks is None else masks.new_empty(shape[0], *masks.shape[1:-2], *shape[2:])
        work = torch.float64 if images.dtype == torch.float64 else torch.float32
        rows, missing = find_missing(rows, images.shape[0], faults)
        # Slices, so that the intermediates stay small.
        pixels = max(math.prod(program.in_size), math.prod(program.out_size))
        on_cpu = min(CPU_SLICE_BYTES * torch.get_num_threads(), MOST_CPU_SLICE_BYTES)
        limit = on_cpu if images.device.type == "cpu" else GPU_SLICE_BYTES
        step = max(1, limit // (pixels * 4 * program.channels))
        for start in range(0, shape[0], step):
            part = slice(start, min(start + step, shape[0]))
            chosen = images[part] if rows is None else images.index_select(0, rows[part])
            if faults is not None and chosen.is_floating_point():
                note_faults(chosen, faults)
            numbers = table[part].to(work)
            values = result[part]
            if result.dtype != work or program.channels_last:
                values = torch.empty(values.shape, dtype=work, device=images.device)
            move: _Stay | _Cut | _Warp = _Stay()
            if program.geometry:
                on_host = program.whole_pixels and images.device.type == "cpu"
                move = (_Cut if on_host else _Warp)(numbers, program)
            move.images(chosen, values)
            if images.dtype == torch.uint8:
                values.mul_(1.0 / 255.0)
            if missing is not None:
                values.masked_fill_(missing[part].view(-1, 1, 1, 1), torch.nan)
            _paint(values, numbers, program)
            if values.data_ptr() != result[part].data_ptr():
                result[part] = values
            if masks is not None and moved is not None:
                labels = masks[part] if rows is None else masks.index_select(0, rows[part])
                move.labels(labels.reshape(-1, *program.in_size), moved[part].view(-1, *shape[2:]))
        if missing is not None and moved is not None:
            gone = missing.view(-1, *[1] * (moved.dim() - 1))
            moved.masked_fill_(gone, program.ignore_index)
        return result, moved

    def _new_result(self, shape: Sequence[int], program: Program, device: torch.device) -> Tensor:
        dtype = program.out_dtype
        if device.type != "cpu":
            layout = torch.channels_last if program.channels_last else torch.contiguous_format
            return torch.empty(*shape, dtype=dtype, device=device, memory_format=layout)
        if not program.channels_last:
            return self._memory.empty("images", shape, dtype)
        batch, channels, height, width = shape
        side_by_side = self._memory.empty("images", (batch, height, width, channels), dtype)
        return side_by_side.permute(0, 3, 1, 2)


# -- geometry ------------------------------------------------------------------------------------


class _Stay:
    """No geometry: pixels are copied, converted to the dtype of the computation."""

    def images(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    labels = images


class _Cut:
    """Flips and crops on a CPU, where reading parameters is free: copies of slices, sample by sample."""

    def __init__(self, table: Tensor, program: Program) -> None:
        self._places = table[:, [0, 2, 4, 5]].tolist()
        self._ignore_index = program.ignore_index
        self._reflect = program.reflect

    def images(self, source: Tensor, target: Tensor) -> None:
        self._cut(source, target, 0)

    def labels(self, source: Tensor, target: Tensor) -> None:
        self._cut(source, target, self._ignore_index)

    def _cut(self, source: Tensor, target: Tensor, fill: int) -> None:
        for sample, (across, left, down, top) in enumerate(self._places):
            if self._reflect:
                from_x = _reflected(across, left, source.shape[-1], target.shape[-1])
                from_y = _reflected(down, top, source.shape[-2], target.shape[-2])
                target[sample] = source[sample].index_select(-2, from_y).index_select(-1, from_x)
                continue
            columns, x = _overlap(across, left, source.shape[-1], target.shape[-1])
            lines, y = _overlap(down, top, source.shape[-2], target.shape[-2])
            piece = source[sample, ..., lines, columns]
            mirrored = [axis for axis, sign in ((-1, across), (-2, down)) if sign < 0]
            if piece.shape[-2:] != target.shape[-2:]:
                target[sample] = fill
            target[sample, ..., y, x] = piece.flip(mirrored) if mirrored else piece


def _mirrored(places: Tensor, side: int) -> Tensor:
    """Reflect places about the first and the last pixel, without repeating them."""
    return (side - 1) - ((side - 1) - places.abs()).abs()


def _reflected(sign: float, offset: float, side: int, out_side: int) -> Tensor:
    """Return the pixels of one axis that are read, s = sign * x + offset, reflected at the border."""
    return _mirrored(torch.arange(out_side, device="cpu") * int(sign) + int(offset), side)


def _overlap(sign: float, offset: float, side: int, out_side: int) -> tuple[slice, slice]:
    """Return the pixels of one axis that are read, s = sign * x + offset, and where they land."""
    first = int(offset) if sign > 0 else int(offset) - out_side + 1
    start, stop = max(first, 0), max(min(first + out_side, side), 0)
    stop = max(start, stop)
    if sign > 0:
        return slice(start, stop), slice(start - first, stop - first)
    return slice(start, stop), slice(int(offset) - stop + 1, int(offset) - start + 1)


class _Warp:
    """One resample by the matrix of each sample.

    torch's `grid_sample` wants places from -1 to 1, and rounds on the way there and back: 3e-5 of a
    pixel at 512 pixels. In a frame whose sides are powers of two it is 8e-6, and whole places stay
    whole, because scaling by 2 / frame is exact. On a GPU float64 costs nothing beside the memory and
    makes it 0; on a CPU it would cost a quarter.
    """

    def __init__(self, table: Tensor, program: Program) -> None:
        (height, width), self._program = program.out_size, program
        self._frame = tuple(1 << (side - 1).bit_length() for side in program.in_size)
        x = torch.arange(width, device=table.device, dtype=table.dtype)
        y = torch.arange(height, device=table.device, dtype=table.dtype).view(-1, 1)
        rows = [table[:, 0:3] * (2.0 / self._frame[1]), table[:, 3:6] * (2.0 / self._frame[0])]
        self._sx, self._sy = (
            (row[:, 0, None, None] * x + row[:, 1, None, None] * y).add_(row[:, 2, None, None])
            for row in rows
        )
        if program.reflect:  # places are whole pixels, which the scale keeps exact
            self._sx, self._sy = (
                _mirrored(places * (frame / 2), side) * (2.0 / frame)
                for places, frame, side in zip(
                    (self._sx, self._sy), self._frame[::-1], program.in_size[::-1], strict=True
                )
            )

    def images(self, source: Tensor, target: Tensor) -> None:
        """Write the values between four taps each; taps outside the image are 0."""
        (height, width), (tall, wide) = self._program.in_size, self._frame
        values = source.to(torch.float64 if source.is_cuda else target.dtype)
        if (height, width) != self._frame:
            values = functional.pad(values, (0, wide - width, 0, tall - height))
        x = self._sx.to(values.dtype) + (1.0 / wide - 1.0)
        y = self._sy.to(values.dtype) + (1.0 / tall - 1.0)
        # Pairs (x, y) side by side; `stack` along the last axis takes six times as long on a CPU.
        grid = torch.view_as_real(torch.complex(x, y))
        target.copy_(functional.grid_sample(values, grid, align_corners=False))

    def labels(self, source: Tensor, target: Tensor) -> None:
        """Write the labels of the nearest pixels; the ignore index where there is none."""
        (height, width), (tall, wide) = self._program.in_size, self._frame
        # A frame of the ignore index: places beyond it are moved onto it.
        framed = functional.pad(source, (1, 1, 1, 1), value=self._program.ignore_index)
        x = (self._sx * (wide / 2) + 0.5).floor_().clamp_(-1, width).add_(1)
        y = (self._sy * (tall / 2) + 0.5).floor_().clamp_(-1, height).add_(1)
        index = y.to(torch.int64).mul_(width + 2).add_(x.to(torch.int64))
        target.copy_(framed.flatten(1).gather(1, index.flatten(1)).view(target.shape))


# -- pixels --------------------------------------------------------------------------------------


def _paint(values: Tensor, table: Tensor, program: Program) -> None:
    """Colour, blur, erase and normalise, in this order and in place."""
    brightness, contrast, saturation, hue, sigma = (
        table[:, k].view(-1, 1, 1, 1) for k in (BRIGHTNESS, CONTRAST, SATURATION, HUE, SIGMA)
    )
    if program.brightness:
        _clamp(values.mul_(brightness), brightness)
    if program.contrast:
        offset = (1.0 - contrast) * _grey(values.mean((2, 3), keepdim=True))
        _clamp(values.mul_(contrast).add_(offset), contrast)
    if program.saturation:
        offset = (1.0 - saturation) * _grey(values)
        _clamp(values.mul_(saturation).add_(offset), saturation)
    if program.hue:
        torch.where(hue == 0.0, values, _turn_hue(values, hue[:, 0]), out=values)
    if program.blur_kernel:
        _blur(values, sigma, program.blur_kernel)
    if program.erase:
        rectangle = inside_rectangle(table[:, ERASE_X0 : ERASE_X0 + 4], program.out_size)
        values.masked_fill_(rectangle, program.erase_value)
    if program.mean is not None and program.std is not None:
        values.sub_(_per_channel(program.mean, values.device, values.dtype))
        inverse = tuple(1.0 / std for std in program.std)
        values.mul_(_per_channel(inverse, values.device, values.dtype))


def _clamp(values: Tensor, factor: Tensor) -> None:
    """Clamp to [0, 1] in place, but only samples whose factor is not 1: they stay bit for bit.

    Two steps: `clamp` with a bound per sample takes nine times as long as with numbers.
    """
    if factor.device.type == "cpu" and bool((factor != 1.0).all()):
        values.clamp_(0.0, 1.0)
        return
    free = torch.where(factor == 1.0, torch.inf, 0.0)
    torch.maximum(values, -free, out=values)
    torch.minimum(values, free + 1.0, out=values)


def _grey(values: Tensor) -> Tensor:
    """Return luma `(n, 1, ...)`; one channel is grey already."""
    if values.shape[1] == 1:
        return values.clone()
    red, green, blue = values.split(1, dim=1)
    grey: Tensor = (red * GREY[0]).add_(green * GREY[1]).add_(blue * GREY[2])
    return grey


def _turn_hue(values: Tensor, shift: Tensor) -> Tensor:
    """Return RGB with the hue turned by `shift (n, 1, 1)` turns; value and chroma stay.

    HSV written with the chroma c = max - min in the place of s * v: nothing divides by the value,
    and the three channels come from one continuous function, so rounding cannot choose a branch.
    """
    red, green, blue = values.unbind(1)
    most, least = values.amax(1), values.amin(1)
    chroma = most - least
    divisor = torch.where(chroma == 0.0, 1.0, chroma)
    sixth = torch.where(
        most == red,
        (green - blue) / divisor,
        torch.where(most == green, (blue - red) / divisor + 2.0, (red - green) / divisor + 4.0),
    )
    turn = sixth * (1.0 / 6.0) + shift
    turn = (turn - turn.floor()) * 6.0
    result = torch.empty_like(values)
    for channel, start in enumerate((5.0, 3.0, 1.0)):
        corner = turn + start
        corner = torch.where(corner >= 6.0, corner - 6.0, corner)
        slope = torch.minimum(corner, 4.0 - corner).clamp_(0.0, 1.0)
        result[:, channel] = most - chroma * slope
    return result


def _blur(values: Tensor, sigma: Tensor, taps: int) -> None:
    """Blur along x, then along y, the border reflected; in place."""
    reach = taps // 2
    # torch's float32 `exp` on a CPU rounds by a value's place in memory, and slices must not change an image's bits.
    exact = torch.float64 if values.device.type == "cpu" else values.dtype
    sigma = sigma.to(exact)
    away = torch.arange(-reach, reach + 1, device=values.device, dtype=exact)
    bell = torch.exp(-(away * away).view(-1, 1, 1, 1, 1) / (2.0 * sigma * sigma).clamp(min=1e-12))
    # A sigma of 0 gives exp(0) = 1 in the middle and 0 beside it: every bit stays.
    weights = (bell / bell.sum(0)).to(values.dtype)
    padded = functional.pad(values, (reach, reach, reach, reach), mode="reflect")
    across = values.new_empty(*padded.shape[:3], values.shape[3])
    _weigh(padded, weights, 3, across)
    _weigh(across, weights, 2, values)


def _weigh(padded: Tensor, weights: Tensor, axis: int, target: Tensor) -> None:
    """Write the sum of the shifted views, each with its weight, from the first to the last."""
    length = target.shape[axis]
    torch.mul(padded.narrow(axis, 0, length), weights[0], out=target)
    for tap in range(1, weights.shape[0]):
        target.addcmul_(padded.narrow(axis, tap, length), weights[tap])


def inside_rectangle(corners: Tensor, size: Size) -> Tensor:
    """Return bool `(n, 1, height, width)`: the pixels in rectangles x0 y0 x1 y1, `(n, 4)`."""
    x0, y0, x1, y1 = (corners[:, k].view(-1, 1, 1, 1) for k in range(4))
    x = torch.arange(size[1], device=corners.device)
    y = torch.arange(size[0], device=corners.device).view(-1, 1)
    return ((x >= x0) & (x < x1)) & ((y >= y0) & (y < y1))


@functools.lru_cache(maxsize=64)
def _per_channel(numbers: Sequence[float], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return `(1, C, 1, 1)`; cached, because a capture forbids copies from the host."""
    with torch.inference_mode(False):  # the cache also serves calls outside of inference mode
        return torch.tensor(numbers, dtype=dtype, device=device).view(1, -1, 1, 1)


# -- boxes and keypoints -------------------------------------------------------------------------


def move_points(points: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return where input points `(B, N, 2)` land, and per sample whether the matrix has an inverse.

    Points are (x, y) with pixel centres at whole numbers. Computed in float64.
    """
    m00, m01, m02, m10, m11, m12 = (table[:, k].double().view(-1, 1) for k in range(6))
    determinant = m00 * m11 - m01 * m10
    solvable = determinant != 0.0
    determinant = torch.where(solvable, determinant, 1.0)
    x, y = points[..., 0].double() - m02, points[..., 1].double() - m12
    moved = torch.stack([m11 * x - m01 * y, m00 * y - m10 * x], dim=-1)
    return moved / determinant.unsqueeze(-1), solvable


def move_keypoints(keypoints: Tensor, table: Tensor, program: Program) -> tuple[Tensor, Tensor]:
    """Return keypoints `(B, N, 2)` after the geometry, and bool `(B, N)`: whether they lie on the result."""
    height, width = program.out_size
    if not program.geometry:
        moved, solvable = keypoints.double(), torch.ones_like(keypoints[..., 0], dtype=torch.bool)
    else:
        moved, solvable = move_points(keypoints, table)
    x, y = moved.unbind(-1)
    inside = (x >= -0.5) & (x < width - 0.5) & (y >= -0.5) & (y < height - 0.5) & solvable
    return moved.to(keypoints.dtype), inside


def move_boxes(boxes: Tensor, table: Tensor, program: Program) -> tuple[Tensor, Tensor]:
    """Return boxes `(B, N, 4)` around the moved corners, cut at the border, and whether any area is left.

    Boxes are x0 y0 x1 y1 in pixel edges: pixel i spans i to i + 1, so a flip maps x to width - x.
    """
    x0, y0, x1, y1 = boxes.double().unbind(-1)
    corners = torch.stack([x0, y0, x1, y0, x0, y1, x1, y1], dim=-1).view(boxes.shape[0], -1, 2)
    solvable = torch.ones_like(x0, dtype=torch.bool)
    if program.geometry:
        corners, solvable = move_points(corners - 0.5, table)
        corners = corners + 0.5
    corners = corners.view(*boxes.shape[:2], 4, 2)
    height, width = program.out_size
    most = torch.tensor([width, height], dtype=torch.float64, device=boxes.device)
    low = corners.amin(2).clamp(min=0.0).minimum(most)
    high = corners.amax(2).clamp(min=0.0).minimum(most)
    valid = (high > low).all(-1) & solvable
    return torch.cat([low, high], dim=-1).to(boxes.dtype), valid
