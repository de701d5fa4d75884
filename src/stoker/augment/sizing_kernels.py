"""The Triton kernel that brings pictures of different sizes to one.

Enters: a table of addresses, rectangles and row lengths, one row for each picture. Leaves: uint8 written to the result.
Costs: see `stoker.augment.sizing`, which launches it and defines the resample. Importing it needs triton.
"""

# Triton's language is typed by Triton: annotations other than constexpr have no meaning in it.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl


@triton.jit
def _reach(place, side, out_side):
    """Return centre, reach, first tap and the tap after the last, of the pixels `place` of one axis."""
    shrink = side.to(tl.float32) / out_side
    reach = tl.maximum(shrink, 1.0)
    centre = (place.to(tl.float32) + 0.5) * shrink
    first = tl.maximum((centre - reach + 0.5).to(tl.int32), 0)
    last = tl.minimum((centre + reach + 0.5).to(tl.int32), side.to(tl.int32))
    return centre, reach, first, last


@triton.jit
def _weight(tap, centre, reach, last):
    """Return the height of the triangle at a tap; 0 behind the last one."""
    away = tl.abs((tap.to(tl.float32) - centre + 0.5) / reach)
    return tl.where(tap < last, tl.maximum(1.0 - away, 0.0), 0.0)


@triton.jit
def resample(table, out, out_h, out_w, C: tl.constexpr, BLOCK: tl.constexpr):
    """Write `BLOCK` pixels of one picture, all channels. Grid: (tiles, pictures)."""
    sample = tl.program_id(1).to(tl.int64)
    row = table + sample * 7
    left, top = tl.load(row + 1), tl.load(row + 2)
    width, height = tl.load(row + 3), tl.load(row + 4)
    line, plane = tl.load(row + 5), tl.load(row + 6)
    image = tl.load(row).to(tl.pointer_type(tl.uint8)) + top * line + left
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = pixel < out_h * out_w
    y, x = pixel // out_w, pixel % out_w
    centre_x, reach_x, first_x, last_x = _reach(x, width, out_w)
    centre_y, reach_y, first_y, last_y = _reach(y, height, out_h)
    taps_x = tl.ceil(2.0 * reach_x).to(tl.int32)  # the most that lie between first and last
    taps_y = tl.ceil(2.0 * reach_y).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    r = tl.zeros([BLOCK], tl.float32)
    g = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    for down in range(0, taps_y):
        from_y = first_y + down
        weight_y = _weight(from_y, centre_y, reach_y, last_y)
        for right in range(0, taps_x):
            from_x = first_x + right
            weight = weight_y * _weight(from_x, centre_x, reach_x, last_x)
            place = image + from_y.to(tl.int64) * line + from_x
            used = keep & (weight > 0.0)
            total += weight
            r += weight * tl.load(place, mask=used, other=0).to(tl.float32)
            if C == 3:
                g += weight * tl.load(place + plane, mask=used, other=0).to(tl.float32)
                b += weight * tl.load(place + 2 * plane, mask=used, other=0).to(tl.float32)
    total = tl.where(total > 0.0, total, 1.0)  # pixels behind the last have no taps
    size = out_h * out_w
    target = out + sample * C * size + pixel
    tl.store(target, (r / total + 0.5).to(tl.uint8), mask=keep)
    if C == 3:
        tl.store(target + size, (g / total + 0.5).to(tl.uint8), mask=keep)
        tl.store(target + 2 * size, (b / total + 0.5).to(tl.uint8), mask=keep)
