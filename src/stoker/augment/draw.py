"""Draws the parameters of every sample of a batch from tape and counter. The reference.

Enters: the tape (`definition.py` has its columns), the counter, the batch size. Leaves: the parameter
table, float32 `(batch, 16)` on the counter's device; the counter's step is one higher. Costs: some 150
tiny kernels; no host synchronisation after a tape's first use.

    0..5    m00 m01 m02 m10 m11 m12: output pixel -> input pixel, composed over all geometry ops,
            sx = m00*x + m01*y + m02, sy = m10*x + m11*y + m12, pixel centres at whole numbers
    6 7 8   factors of brightness, contrast, saturation (1 = untouched)
    9       hue shift in turns (0 = untouched)
    10      sigma of the blur (0 = none)
    11..14  erased rectangle x0 y0 x1 y1 in output pixels, half open; empty when x1 <= x0
    15      0

Everything is float32, one operation after the other as written here: a kernel that keeps this order
draws the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from stoker.augment.definition import TABLE_WIDTH, Opcode
from stoker.augment.philox import EPOCH, SEED, advance, philox, uniforms

BRIGHTNESS, CONTRAST, SATURATION, HUE, SIGMA, ERASE_X0 = 6, 7, 8, 9, 10, 11
SNAP = 1e-6
_IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
_UNTOUCHED = (*_IDENTITY, 1.0, 1.0, 1.0, *(0.0,) * 7)

Row = Sequence[float]
# A tape never changes once built, so its numbers are read from the device once.
_HOST_ROWS = WeakTensorKeyDictionary()


def draw_table(
    tape: torch.Tensor,
    counter: torch.Tensor,
    batch: int,
    num_batches: int = 1,
    *,
    ids: torch.Tensor | None = None,
    staged: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw the parameters of consecutive batches and advance the counter by one step for each.

    Args:
        tape: float32 `(num_ops, 16)`.
        counter: int64 `[seed, epoch, step, stream]`; changed in place.
        batch: Number of samples of one batch.
        num_batches: Number of batches.
        ids: int64, the number of each image of all batches, for ops that depend on the image and the epoch.
        staged: float32 `(num_batches * batch, rows, 8)`; receives the uniforms of stages.

    Returns:
        float32 `(num_batches * batch, 16)` on the counter's device.
    """
    rows = _HOST_ROWS.get(tape)
    if rows is None:
        rows = _HOST_ROWS[tape] = tape.tolist()
    table = untouched(batch * num_batches, counter.device)
    if rows:
        drawn = uniforms(counter, batch, len(rows), num_batches)
        flips = {
            index: flipped_by_id(counter, ids, index)
            for index, row in enumerate(rows)
            if row[0] == Opcode.FLIP_BY_ID and ids is not None
        }
        fill_table(table, rows, drawn, flips, staged)
    advance(counter, num_batches)
    return table


def untouched(batch: int, device: torch.device) -> torch.Tensor:
    """Return the table that changes nothing."""
    return constant(_UNTOUCHED, device).expand(batch, TABLE_WIDTH).clone()


def flipped_by_id(counter: torch.Tensor, ids: torch.Tensor, index: int) -> torch.Tensor:
    """Return bool `(batch,)`: the images that the op at `index` of the tape flips in this epoch.

    The uniform depends on the seed and the id alone, not on the stream: a sample may change its rank.
    """
    zero = torch.zeros_like(ids)
    words = philox(
        counter[SEED], torch.stack([ids, ids >> 32]), torch.stack([zero + 2 * index, zero])
    )
    in_even_epochs = (words[..., 0] >> 8).to(torch.float32) * 2.0**-24 < 0.5
    return in_even_epochs ^ (counter[EPOCH] % 2 == 1)


def fill_table(
    table: torch.Tensor,
    rows: Sequence[Row],
    drawn: torch.Tensor,
    flips: Mapping[int, torch.Tensor] = MappingProxyType({}),
    staged: torch.Tensor | None = None,
) -> None:
    """Write the parameters of the tape's `rows`.

    Args:
        table: The table to fill.
        rows: The tape.
        drawn: Uniforms `(batch, num_ops, 8)`.
        flips: Index of each FLIP_BY_ID row -> bool `(batch,)`, the samples that it flips.
        staged: Receives the uniforms of stages.
    """
    matrix: torch.Tensor | None = None
    for index, row in enumerate(rows):
        u = drawn[:, index].unbind(1)
        code, gate, numbers = Opcode(int(row[0])), u[0] < row[1], row[2:]
        gate = flips.get(index, gate)
        if code in _GEOMETRY:
            step = _matrix(_GEOMETRY[code](numbers, u, gate), u[0])
            if code not in _UNGATED:
                same = constant(_IDENTITY, table.device).view(2, 3)
                step = torch.where(gate[:, None, None], step, same)
            matrix = step if matrix is None else _then(matrix, step)
        elif code == Opcode.COLOUR:
            # Several colour ops share the table: each multiplies the factors that it lacks by 1.
            for offset, column in enumerate((BRIGHTNESS, CONTRAST, SATURATION)):
                factor = _within(numbers, 2 * offset, u[1 + offset])
                table[:, column] *= torch.where(gate, factor, 1.0)
            table[:, HUE] += _within(numbers, 6, u[4]) * gate
        elif code == Opcode.BLUR:
            table[:, SIGMA] = _within(numbers, 0, u[1]) * gate
        elif code == Opcode.STAGE:
            if staged is not None:
                staged[:, int(numbers[0])] = drawn[:, index]
        else:
            table[:, ERASE_X0 : ERASE_X0 + 4] = draw_erase(numbers, u) * gate[:, None]
    if matrix is not None:
        table[:, :6] = matrix.reshape(-1, 6)


# -- geometry ------------------------------------------------------------------------------------

Entries = Sequence[torch.Tensor | float]
Uniforms = Sequence[torch.Tensor]


def _affine(a: Row, u: Uniforms, _gate: torch.Tensor) -> Entries:
    """Return the inverse matrix: undo the shift, then rotation and scale, the shear along y, the shear along x."""
    angle = _within(a, 2, u[1])
    cosine, sine = torch.cos(angle), torch.sin(angle)
    # Snapped to 0 near 0, so that quarter turns move whole pixels.
    cosine, sine = cosine * (cosine.abs() >= SNAP), sine * (sine.abs() >= SNAP)
    across, down = _within(a, 4, u[2]) + a[0], _within(a, 6, u[3]) + a[1]
    shrink = 1.0 / _within(a, 8, u[4])
    lean_x, lean_y = _tangent(_within(a, 10, u[5])), _tangent(_within(a, 12, u[6]))
    m00, m01, m10, m11 = shrink * cosine, shrink * sine, -(shrink * sine), shrink * cosine
    m10, m11 = m10 + lean_y * m00, m11 + lean_y * m01
    m00, m01 = m00 + lean_x * m10, m01 + lean_x * m11
    m02 = a[0] - (m00 * across + m01 * down)
    m12 = a[1] - (m10 * across + m11 * down)
    return m00, m01, m02, m10, m11, m12


def _resized_crop(a: Row, u: Uniforms, gate: torch.Tensor) -> Entries:
    """Map the corners of the drawn rectangle to those of the result; where `gate` is False, the whole image's."""
    width, height, out_width, out_height = a[:4]
    area = _within(a, 4, u[1])
    shape = torch.exp(_within(a, 6, u[2]))
    shape = torch.minimum(torch.maximum(shape, area * a[8]), (1.0 / area) * a[8])
    pixels = area * a[9]
    w = torch.where(gate, _side(pixels * shape, width), width)
    h = torch.where(gate, _side(pixels / shape, height), height)
    left, top = _start(u[3], width - w), _start(u[4], height - h)
    m00, m02 = _stretch(w, left, out_width)
    m11, m12 = _stretch(h, top, out_height)
    return m00, 0.0, m02, 0.0, m11, m12


def _crop(a: Row, u: Uniforms, _gate: torch.Tensor) -> Entries:
    left, top = _start(u[1], a[2] - 1.0) + a[0], _start(u[2], a[3] - 1.0) + a[1]
    return 1.0, 0.0, left, 0.0, 1.0, top


_GEOMETRY: dict[Opcode, Callable[[Row, Uniforms, torch.Tensor], Entries]] = {
    Opcode.FLIP_H: lambda a, _u, _gate: (-1.0, 0.0, a[0], 0.0, 1.0, 0.0),
    Opcode.FLIP_BY_ID: lambda a, _u, _gate: (-1.0, 0.0, a[0], 0.0, 1.0, 0.0),
    Opcode.FLIP_V: lambda a, _u, _gate: (1.0, 0.0, 0.0, 0.0, -1.0, a[0]),
    Opcode.AFFINE: _affine,
    Opcode.RESIZED_CROP: _resized_crop,
    Opcode.CROP: _crop,
}
# Crops change the size, so a sample cannot be left unchanged.
_UNGATED = (Opcode.RESIZED_CROP, Opcode.CROP)


def _matrix(entries: Entries, like: torch.Tensor) -> torch.Tensor:
    """Return `(batch, 2, 3)`, or one `(2, 3)` for all, from six entries."""
    numbers = tuple(entry for entry in entries if isinstance(entry, float))
    if len(numbers) == 6:
        return constant(numbers, like.device).view(2, 3)
    full = [e if isinstance(e, torch.Tensor) else torch.full_like(like, e) for e in entries]
    return torch.stack(full, dim=1).view(-1, 2, 3)


@functools.lru_cache(maxsize=256)
def constant(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return float32 numbers on the device; cached, because a capture forbids copies from the host."""
    with torch.inference_mode(False):  # the cache also serves calls outside of inference mode
        return torch.tensor(numbers, dtype=torch.float32, device=device)


def _then(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the matrix of `first(second(x))`; not `@`, which may round to TF32 on a GPU."""
    product = first[:, :, 0:1] * second[:, 0:1] + first[:, :, 1:2] * second[:, 1:2]
    product[:, :, 2] += first[:, :, 2]
    return product


def _within(a: Row, at: int, u: torch.Tensor) -> torch.Tensor:
    """Return `low + u * span` of the range that starts at column `at`."""
    return u * a[at + 1] + a[at]


def _tangent(angle: torch.Tensor) -> torch.Tensor:
    return torch.sin(angle) / torch.cos(angle)


def _side(square: torch.Tensor, most: float) -> torch.Tensor:
    """Return the square root of `square`, rounded to a whole number from 1 to `most`."""
    return torch.floor(torch.sqrt(square) + 0.5).clamp(1.0, most)


def _start(u: torch.Tensor, free: torch.Tensor | float) -> torch.Tensor:
    """Return a whole number from 0 to `free`, both included; `u * n` can round up to n."""
    if isinstance(free, torch.Tensor):
        return torch.minimum(torch.floor(u * (free + 1.0)), free)
    return torch.floor(u * (free + 1.0)).clamp(max=free)


def _stretch(
    side: torch.Tensor, start: torch.Tensor, out_side: float
) -> tuple[torch.Tensor | float, torch.Tensor]:
    """Return factor and offset of one axis; a result of one pixel takes the middle."""
    if out_side > 1.0:
        return (side - 1.0) / (out_side - 1.0), start
    return 0.0, start + (side - 1.0) * 0.5


def draw_erase(a: Row, u: Uniforms) -> torch.Tensor:
    """Return the rectangle x0 y0 x1 y1 of each sample from `u1` to `u4`: float `(batch, 4)`."""
    pixels = _within(a, 2, u[1]) * a[6]
    shape = torch.exp(_within(a, 4, u[2]))
    h, w = _side(pixels * shape, a[1]), _side(pixels / shape, a[0])
    x0, y0 = _start(u[3], a[0] - w), _start(u[4], a[1] - h)
    return torch.stack([x0, y0, x0 + w, y0 + h], dim=1)
