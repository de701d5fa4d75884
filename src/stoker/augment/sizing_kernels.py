"""The Triton kernel that resizes pictures of different sizes to one size.

Enters: a table of addresses, rectangles and row lengths, one row for each picture. Leaves: uint8 written to the result.
Costs: see `stoker.augment.sizing`, which launches it and defines the resample. Importing it needs triton.
"""

# Triton's language is typed by Triton: annotations other than constexpr have no meaning in it.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl

# A byte v as the float 65536 + 256 v, whose bits are those of v below an exponent. Conversions run on a narrow unit;
# this is one instruction, and the bias takes 1e-4 of a level from a sum's precision.
_BIAS_BITS = tl.constexpr(0x47800000)
_BIAS = tl.constexpr(256.0)  # in levels


@triton.jit
def _axis(place, side, out_side):
    """Return the first tap, the tap after the last, the largest number of taps, and the triangle's start and step.

    The triangle's height at tap `first + n` is `1 - |start + step * n|`.
    """
    shrink = side.to(tl.float32) / out_side
    reach = tl.maximum(shrink, 1.0)
    centre = (place.to(tl.float32) + 0.5) * shrink
    first = tl.maximum((centre - reach + 0.5).to(tl.int32), 0)
    last = tl.minimum((centre + reach + 0.5).to(tl.int32), side)
    step = 1.0 / reach
    start = (first.to(tl.float32) - centre + 0.5) * step
    return first, last, tl.ceil(2.0 * reach).to(tl.int32), start, step


@triton.jit
def _height(away, tap, first, last):
    return tl.where((tap >= first) & (tap < last), tl.maximum(1.0 - tl.abs(away), 0.0), 0.0)


@triton.jit
def _tap(p, weight, NARROW: tl.constexpr):
    if NARROW:
        value = tl.load(p, mask=weight > 0.0, other=0)
    else:
        value = tl.load(p)
    return ((value.to(tl.int32) << 15) + _BIAS_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _four(p, w0, w1, w2, w3, NARROW: tl.constexpr):
    """Return the weighted sum of four neighbours in a row."""
    total = w0 * _tap(p, w0, NARROW)
    total = tl.fma(w1, _tap(p + 1, w1, NARROW), total)
    total = tl.fma(w2, _tap(p + 2, w2, NARROW), total)
    return tl.fma(w3, _tap(p + 3, w3, NARROW), total)


@triton.jit
def resample(
    table, out, out_h, out_w,
    C: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `BLOCK` columns of `ROWS` rows of one picture, all channels. Grid: (tiles across, tiles down, pictures).

    Values equal in all columns (row, weight, address) are scalars. Taps are read in fours that
    lie within the rectangle, without a check of each; `NARROW` is for rectangles of fewer columns, which need it.
    """
    sample = tl.program_id(2).to(tl.int64)
    row = table + sample * 7
    left, top = tl.load(row + 1), tl.load(row + 2)
    width, height = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    line, plane = tl.load(row + 5), tl.load(row + 6)
    image = tl.load(row).to(tl.pointer_type(tl.uint8)) + top * line + left
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = x < out_w
    first_x, last_x, taps_x, start_x, step_x = _axis(tl.minimum(x, out_w - 1), width, out_w)
    size = out_h * out_w
    target = out + sample * C * size + x
    y_start = tl.program_id(1) * ROWS
    for number in range(0, tl.minimum(out_h - y_start, ROWS)):
        y = y_start + number
        first_y, last_y, _taps, start_y, step_y = _axis(y, height, out_h)
        across = tl.zeros([BLOCK], tl.float32)
        down = start_y * 0.0
        r = tl.zeros([BLOCK], tl.float32)
        g = tl.zeros([BLOCK], tl.float32)
        b = tl.zeros([BLOCK], tl.float32)
        for right in range(0, taps_x, 4):
            wanted = first_x + right
            from_x = tl.maximum(tl.minimum(wanted, width - 4), 0)
            away_x = start_x + step_x * (from_x - first_x).to(tl.float32)
            w0 = _height(away_x, from_x, wanted, last_x)
            w1 = _height(away_x + step_x, from_x + 1, wanted, last_x)
            w2 = _height(away_x + 2.0 * step_x, from_x + 2, wanted, last_x)
            w3 = _height(away_x + 3.0 * step_x, from_x + 3, wanted, last_x)
            across += (w0 + w1) + (w2 + w3)
            down = start_y * 0.0
            for from_y in range(first_y, last_y):
                weight = tl.maximum(1.0 - tl.abs(start_y + step_y * (from_y - first_y)), 0.0)
                down += weight
                p = image + from_y * line
                r = tl.fma(_four(p + from_x, w0, w1, w2, w3, NARROW), weight, r)
                if C == 3:
                    p += plane
                    g = tl.fma(_four(p + from_x, w0, w1, w2, w3, NARROW), weight, g)
                    p += plane
                    b = tl.fma(_four(p + from_x, w0, w1, w2, w3, NARROW), weight, b)
        scale = 1.0 / (256.0 * across * down)
        tl.store(target + y * out_w, tl.fma(r, scale, 0.5 - _BIAS).to(tl.uint8), mask=keep)
        if C == 3:
            p = target + size + y * out_w
            tl.store(p, tl.fma(g, scale, 0.5 - _BIAS).to(tl.uint8), mask=keep)
            tl.store(p + size, tl.fma(b, scale, 0.5 - _BIAS).to(tl.uint8), mask=keep)
