"""The Triton kernel that brings pictures of different sizes to one.

Enters: a table of addresses, rectangles and row lengths, one row for each picture. Leaves: uint8 written to the result.
Costs: see `stoker.augment.sizing`, which launches it and defines the resample. Importing it needs triton.
"""

# Triton's language is typed by Triton: annotations other than constexpr have no meaning in it.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl

# A byte v as the float 2**23 + v, whose bits are those of v beside an exponent: conversions run on a narrow unit.
_BIAS = tl.constexpr(8388608.0)
_BIAS_BITS = tl.constexpr(0x4B000000)


@triton.jit
def _axis(place, side, out_side):
    """Return the first tap, the tap after the last, how many lie between at most, and the triangle's steps.

    The triangle has a height of `1 - |start + step * n|` at tap `first + n`.
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
def _height(away, inside):
    return tl.where(inside, tl.maximum(1.0 - tl.abs(away), 0.0), 0.0)


@triton.jit
def _tap(p, weight):
    """Load one tap; any byte where the weight is 0, which makes nothing of it."""
    value = tl.load(p, mask=weight > 0.0)
    return (value.to(tl.int32) | _BIAS_BITS).to(tl.float32, bitcast=True) - _BIAS


@triton.jit
def _four(p, w0, w1, w2, w3):
    """Return the weighted sum of four neighbours in a row."""
    total = w0 * _tap(p, w0)
    total = tl.fma(w1, _tap(p + 1, w1), total)
    total = tl.fma(w2, _tap(p + 2, w2), total)
    return tl.fma(w3, _tap(p + 3, w3), total)


@triton.jit
def resample(table, out, out_h, out_w, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write `BLOCK` columns of `ROWS` rows of one picture, all channels. Grid: (tiles across, tiles down, pictures).

    What is the same in all columns (row, weight, address) is one number for the program; the weights of four columns of
    taps are found once for each row.
    """
    sample = tl.program_id(2).to(tl.int64)
    row = table + sample * 7
    left, top = tl.load(row + 1), tl.load(row + 2)
    width, height = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    line, plane = tl.load(row + 5), tl.load(row + 6)
    image = tl.load(row).to(tl.pointer_type(tl.uint8)) + top * line + left
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = x < out_w
    first_x, last_x, taps_x, start_x, step_x = _axis(x, width, out_w)
    last_x = tl.where(keep, last_x, 0)
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
            from_x = first_x + right
            away_x = start_x + step_x * right
            w0 = _height(away_x, from_x < last_x)
            w1 = _height(away_x + step_x, from_x + 1 < last_x)
            w2 = _height(away_x + 2.0 * step_x, from_x + 2 < last_x)
            w3 = _height(away_x + 3.0 * step_x, from_x + 3 < last_x)
            across += (w0 + w1) + (w2 + w3)
            down = start_y * 0.0
            for from_y in range(first_y, last_y):
                weight = tl.maximum(1.0 - tl.abs(start_y + step_y * (from_y - first_y)), 0.0)
                down += weight
                p = image + from_y * line
                r = tl.fma(_four(p + from_x, w0, w1, w2, w3), weight, r)
                if C == 3:
                    p += plane
                    g = tl.fma(_four(p + from_x, w0, w1, w2, w3), weight, g)
                    p += plane
                    b = tl.fma(_four(p + from_x, w0, w1, w2, w3), weight, b)
        scale = 1.0 / tl.where(keep, across * down, 1.0)
        tl.store(target + y * out_w, tl.fma(r, scale, 0.5).to(tl.uint8), mask=keep)
        if C == 3:
            tl.store(target + size + y * out_w, tl.fma(g, scale, 0.5).to(tl.uint8), mask=keep)
            tl.store(target + 2 * size + y * out_w, tl.fma(b, scale, 0.5).to(tl.uint8), mask=keep)
