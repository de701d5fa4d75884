"""The Triton kernel that brings pictures of different sizes to one.

Enters: a table of addresses, rectangles and row lengths, one row for each picture. Leaves: uint8 written to the result.
Costs: see `stoker.augment.sizing`, which launches it and defines the resample. Importing it needs triton.
"""

# Triton's language is typed by Triton: annotations other than constexpr have no meaning in it.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0915

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


@triton.jit
def _inside(tap, centre, reach, last):
    """Return the height of the triangle at a tap; 0 outside of the rectangle."""
    return tl.where(tap >= 0, _weight(tap, centre, reach, last), 0.0)


@triton.jit
def _share(sample, start, halved, centre, reach, last):
    """Return how much a sample of a colour plane counts for a result, along one axis.

    A plane of half the size is enlarged as libjpeg does it: a pixel is 3/4 of the nearer sample and 1/4 of the other.
    So a sample counts for four pixels, and no pixel's colour has to be made.
    """
    pixel = tl.where(halved != 0, 2 * sample, sample) - start
    own = _inside(pixel, centre, reach, last)
    near = own + _inside(pixel + 1, centre, reach, last)
    far = _inside(pixel - 1, centre, reach, last) + _inside(pixel + 2, centre, reach, last)
    return tl.where(halved != 0, 0.75 * near + 0.25 * far, own)


@triton.jit
def _level(value):
    return tl.minimum(tl.maximum(value + 0.5, 0.0), 255.0).to(tl.uint8)


@triton.jit
def resample_planes(table, out, out_h, out_w, BLOCK: tl.constexpr):
    """Write `BLOCK` RGB pixels of one picture that lies in three planes. Grid: (tiles, pictures).

    Brightness and colours are resampled apart, each in its own size, and become RGB once for each result.
    """
    sample = tl.program_id(1).to(tl.int64)
    row = table + sample * 16
    first = tl.load(row).to(tl.pointer_type(tl.uint8))
    second = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    third = tl.load(row + 2).to(tl.pointer_type(tl.uint8))
    line, colour_line = tl.load(row + 3), tl.load(row + 4)
    halved_x, halved_y = tl.load(row + 5).to(tl.int32), tl.load(row + 6).to(tl.int32)
    kind = tl.load(row + 7)
    left, top = tl.load(row + 8).to(tl.int32), tl.load(row + 9).to(tl.int32)
    width, height = tl.load(row + 10).to(tl.int32), tl.load(row + 11).to(tl.int32)
    full_w, full_h = tl.load(row + 12).to(tl.int32), tl.load(row + 13).to(tl.int32)
    turn, step = tl.load(row + 14).to(tl.int32), tl.load(row + 15).to(tl.int32)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = pixel < out_h * out_w
    y, x = pixel // out_w, pixel % out_w
    # The place of the result in the picture as it lies in its file.
    x = tl.where(turn & 1 != 0, out_w - 1 - x, x)
    y = tl.where(turn & 2 != 0, out_h - 1 - y, y)
    lying_x = tl.where(turn & 4 != 0, y, x)
    lying_y = tl.where(turn & 4 != 0, x, y)
    lying_w = tl.where(turn & 4 != 0, out_h, out_w)
    lying_h = tl.where(turn & 4 != 0, out_w, out_h)
    centre_x, reach_x, first_x, last_x = _reach(lying_x, width, lying_w)
    centre_y, reach_y, first_y, last_y = _reach(lying_y, height, lying_h)
    taps_x = tl.ceil(2.0 * reach_x).to(tl.int32)
    taps_y = tl.ceil(2.0 * reach_y).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    bright = tl.zeros([BLOCK], tl.float32)
    for down in range(0, taps_y):
        from_y = first_y + down
        weight_y = _weight(from_y, centre_y, reach_y, last_y)
        place = first + (top + from_y).to(tl.int64) * line + left
        for right in range(0, taps_x):
            from_x = first_x + right
            weight = weight_y * _weight(from_x, centre_x, reach_x, last_x)
            used = keep & (weight > 0.0)
            total += weight
            bright += weight * tl.load(place + from_x, mask=used, other=0).to(tl.float32)
    total = tl.where(total > 0.0, total, 1.0)  # pixels behind the last have no taps
    bright = bright / total
    r, g, b = bright, bright, bright
    if kind != 0:
        colour_w, colour_h = (full_w + halved_x) >> halved_x, (full_h + halved_y) >> halved_y
        start_x = tl.where(halved_x != 0, (left + first_x - 1) >> 1, left + first_x)
        start_y = tl.where(halved_y != 0, (top + first_y - 1) >> 1, top + first_y)
        taps_x = tl.where(halved_x != 0, taps_x // 2 + 2, taps_x)
        taps_y = tl.where(halved_y != 0, taps_y // 2 + 2, taps_y)
        u = tl.zeros([BLOCK], tl.float32)
        v = tl.zeros([BLOCK], tl.float32)
        for down in range(0, taps_y):
            from_y = start_y + down
            weight_y = _share(from_y, top, halved_y, centre_y, reach_y, last_y)
            held_y = tl.minimum(tl.maximum(from_y, 0), colour_h - 1).to(tl.int64)
            for right in range(0, taps_x):
                from_x = start_x + right
                weight = weight_y * _share(from_x, left, halved_x, centre_x, reach_x, last_x)
                held_x = tl.minimum(tl.maximum(from_x, 0), colour_w - 1)
                place = held_y * colour_line + held_x * step
                used = keep & (weight > 0.0)
                u += weight * tl.load(second + place, mask=used, other=0).to(tl.float32)
                v += weight * tl.load(third + place, mask=used, other=0).to(tl.float32)
        u, v = u / total, v / total
        is_rgb = kind == 2
        r = tl.where(is_rgb, bright, bright + 1.402 * (v - 128.0))
        g = tl.where(is_rgb, u, bright - 0.344136 * (u - 128.0) - 0.714136 * (v - 128.0))
        b = tl.where(is_rgb, v, bright + 1.772 * (u - 128.0))
    size = out_h * out_w
    target = out + sample * 3 * size + pixel
    tl.store(target, _level(r), mask=keep)
    tl.store(target + size, _level(g), mask=keep)
    tl.store(target + 2 * size, _level(b), mask=keep)
