"""The Triton kernels of the fused backend that touch pixels.

Enters: pointers, sizes, strides, and choices fixed at compile time (capitals). Leaves: results
written through the pointers. Costs: see `stoker.augment.fused`, which launches them; importing this
module needs triton.

Axes: b sample, c channel, y and x pixel. A *tile* is the pixels of one program; it is worked
through in *steps* of `STEP_Y x STEP_X` pixels, so that a thread holds the taps of one or two pixels
at a time, and the cost per program (matrix, factors, the mean) occurs once per tile.

Three rules keep the result equal to the torch reference. Coordinates are rounded after every
multiplication and addition (the launcher turns contraction off); all else may use `tl.fma`, which
moves a value by 1e-7 at the most. Sums are taken in a fixed order. A factor of exactly 1 opens its
clamp to infinity, so that nothing happens to the value.
"""

# Triton's language is typed by Triton: annotations other than constexpr have no meaning in it.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, PLR0917, RET505, SIM102

import triton
import triton.language as tl

# How a block of pixels is read: one tap where the matrix is whole (flips, crops, quarter turns:
# fx = fy = 0 everywhere), four without checks where the tile lies inside, else four with checks.
ONE_TAP = tl.constexpr(0)
INSIDE = tl.constexpr(1)
CHECKED = tl.constexpr(2)

# Bit patterns of 1.001 and infinity as int32, of -0.001 and -infinity as uint32.
TOO_HIGH = tl.constexpr(0x3F8020C5)
POSITIVE_INFINITY = tl.constexpr(0x7F800000)
TOO_LOW = tl.constexpr(0xBA83126F)
NEGATIVE_INFINITY = tl.constexpr(0xFF800000)

# `stoker.augment.guard.NO_SUCH_ROW`.
NO_SUCH_ROW = tl.constexpr(4)

TWO_TO_23 = tl.constexpr(8388608.0)
TWO_TO_23_BITS = tl.constexpr(0x4B000000)


# -- reading pixels --------------------------------------------------------------------------------


@triton.jit
def _pixels(STEP_Y: tl.constexpr, STEP_X: tl.constexpr, SCATTERED: tl.constexpr):
    """Return y and x of a step's pixels, counted from its corner.

    In one dimension, so that neighbours in a patch of `STEP_X` pixels across sit in one warp. Where
    taps are gathered, neighbours in x go to neighbouring threads: the hint keeps the compiler from
    giving a thread several of them for the sake of wide stores, which makes every gather touch
    several times the cache lines.
    """
    lane = tl.arange(0, STEP_Y * STEP_X)
    x = lane % STEP_X
    if SCATTERED:
        x = tl.max_contiguous(x, 1)
    return lane // STEP_X, x


@triton.jit
def _note(value, high, low):
    """Keep the largest bit pattern: as int32 it finds what is too high, as uint32 what is too low.

    Two integer maxima per tap; a NaN's pattern is larger than infinity's either way.
    """
    bits = value.to(tl.int32, bitcast=True)
    return tl.maximum(high, bits), tl.maximum(low, bits.to(tl.uint32, bitcast=True))


@triton.jit
def _report(faults, high, low):
    """Set bit 0 for a value outside [-0.001, 1.001], bit 1 for one that is not finite."""
    outside = (high > TOO_HIGH) | (low > TOO_LOW)
    endless = (high >= POSITIVE_INFINITY) | (low >= NEGATIVE_INFINITY)
    found = outside.to(tl.int32) + 2 * endless.to(tl.int32)
    tl.atomic_or(faults + found * 0, found, mask=outside, sem="relaxed")


@triton.jit
def _tap(p, keep, MODE: tl.constexpr):
    """Load one tap as float; a byte v as 2**23 + v, whose bits are those of v beside an exponent.

    Conversions run on a narrow unit, and a pixel has twelve of them; this is one OR.
    """
    if MODE == INSIDE:
        value = tl.load(p)
    else:
        value = tl.load(p, mask=keep, other=0)
    if value.dtype == tl.uint8:
        return (value.to(tl.int32) | TWO_TO_23_BITS).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _between(first, second, f, BYTES: tl.constexpr):
    """Return the value a fraction `f` of the way; exactly `first` where f is 0."""
    if BYTES:
        # Differences of the biased bytes are exact, so the bias cancels.
        return tl.fma(second - first, f, first - TWO_TO_23)
    else:
        return tl.fma(second, f, first * (1.0 - f))


@triton.jit
def _plane(
    p, down, right, k00, k01, k10, k11, fx, fy, high, low, MODE: tl.constexpr, CHECK: tl.constexpr
):
    """Resample one channel at pointers `p`; returns the value and what `_note` saw."""
    BYTES: tl.constexpr = p.dtype.element_ty == tl.uint8
    v00 = _tap(p, k00, MODE)
    if CHECK:
        high, low = _note(v00, high, low)
    if MODE == ONE_TAP:
        value = v00
        if BYTES:
            value = v00 - TWO_TO_23
    else:
        # From pointer to pointer, so that the step to the right becomes the load's own offset.
        below = p + down
        v01 = _tap(p + right, k01, MODE)
        v10 = _tap(below, k10, MODE)
        v11 = _tap(below + right, k11, MODE)
        if CHECK:
            high, low = _note(v01, high, low)
            high, low = _note(v10, high, low)
            high, low = _note(v11, high, low)
        top = _between(v00, v01, fx, BYTES)
        bottom = _between(v10, v11, fx, BYTES)
        value = _between(top, bottom, fy, False)
    return value, high, low


@triton.jit
def _planes(
    p, across, down, right, k00, k01, k10, k11, fx, fy, high, low,
    C: tl.constexpr, MODE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Resample one channel, or three that are `across` apart, with one set of coordinates."""
    r, high, low = _plane(p, down, right, k00, k01, k10, k11, fx, fy, high, low, MODE, CHECK)
    g, b = r, r
    if C == 3:
        p = p + across
        g, high, low = _plane(p, down, right, k00, k01, k10, k11, fx, fy, high, low, MODE, CHECK)
        p = p + across
        b, high, low = _plane(p, down, right, k00, k01, k10, k11, fx, fy, high, low, MODE, CHECK)
    return r, g, b, high, low


@triton.jit
def _whole(number):
    return tl.floor(number) == number


@triton.jit
def _reach(m0, m1, m2, x_first, x_last, y_first, y_last):
    """Return the least and the most over a tile: rounding keeps order, so the corners have them."""
    x0, x1 = m0 * x_first, m0 * x_last
    y0, y1 = m1 * y_first, m1 * y_last
    least = (tl.minimum(x0, x1) + tl.minimum(y0, y1)) + m2
    most = (tl.maximum(x0, x1) + tl.maximum(y0, y1)) + m2
    return least, most


@triton.jit
def _choose_mode(
    matrix, x_start, y_start, in_h, in_w, out_h, out_w,
    BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Return how the tile is read, decided once for all its pixels."""
    m00, m01, m02, m10, m11, m12 = matrix
    x_first = x_start.to(tl.float32)
    y_first = y_start.to(tl.float32)
    x_last = tl.minimum(x_start + BLOCK_X, out_w).to(tl.float32) - 1.0
    y_last = tl.minimum(y_start + BLOCK_Y, out_h).to(tl.float32) - 1.0
    x_least, x_most = _reach(m00, m01, m02, x_first, x_last, y_first, y_last)
    y_least, y_most = _reach(m10, m11, m12, x_first, x_last, y_first, y_last)
    # The hundredth of a pixel keeps this safe even where a compiler contracts one of the two sides.
    inside = (x_least >= 0.01) & (x_most <= in_w - 1.01)
    inside = inside & (y_least >= 0.01) & (y_most <= in_h - 1.01)
    whole = _whole(m00) & _whole(m01) & _whole(m02) & _whole(m10) & _whole(m11) & _whole(m12)
    return tl.where(whole, ONE_TAP, tl.where(inside, INSIDE, CHECKED))


@triton.jit
def _load_matrix(numbers):
    return (
        tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2),
        tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5),
    )  # fmt: skip


@triton.jit
def _locate(matrix, x, y):
    """Return the input coordinates of output pixels; the order of rounding is the reference's."""
    m00, m01, m02, m10, m11, m12 = matrix
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    return (m00 * x + m01 * y) + m02, (m10 * x + m11 * y) + m12


@triton.jit
def _source(rows, sample, num_images):
    """Return the image of a sample, 1 (NaN for a row that does not exist), and whether it exists.

    For a missing row another one is read instead of foreign memory, and the result is all NaN:
    the host cannot check rows without waiting for the device.
    """
    source = sample
    unit = 1.0
    exists = True
    if rows is not None:
        row = tl.load(rows + sample)
        source = tl.minimum(tl.maximum(row, 0), num_images - 1)
        exists = source == row
        unit = tl.where(exists, 1.0, float("nan"))
    return source, unit, exists


@triton.jit
def _mirror(index, size):
    """Reflect an index about the first and the last pixel, without repeating them."""
    index = tl.abs(index)
    return (size - 1) - tl.abs((size - 1) - index)


@triton.jit
def _offset(y, x, stride_y, stride_x, WIDE: tl.constexpr):
    if WIDE:
        y = y.to(tl.int64)
        x = x.to(tl.int64)
    return y * stride_y + x * stride_x


@triton.jit
def _sample(
    image, sx, sy, y, x, keep, mode, in_h, in_w, across, down, right, high, low,
    C: tl.constexpr, GEOMETRY: tl.constexpr, REFLECT: tl.constexpr, CHECK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Read a block of one channel (C = 1) or of three, `across` apart, as they are stored."""
    if GEOMETRY:
        x0 = tl.floor(sx).to(tl.int32)
        y0 = tl.floor(sy).to(tl.int32)
        if REFLECT:  # whole pixels only: there is one tap, and sx and sy are not used again
            x0, y0 = _mirror(x0, in_w), _mirror(y0, in_h)
            sx, sy = x0.to(tl.float32), y0.to(tl.float32)
        # Back from int32 instead of a second floor: the same number, from a faster unit.
        fx = sx - x0.to(tl.float32)
        fy = sy - y0.to(tl.float32)
        p = image + _offset(y0, x0, down, right, WIDE)
        if mode == INSIDE:
            r, g, b, high, low = _planes(
                p, across, down, right, None, None, None, None, fx, fy, high, low,
                C, INSIDE, CHECK,
            )  # fmt: skip
        else:
            in_x0 = (x0 >= 0) & (x0 < in_w)
            in_y0 = (y0 >= 0) & (y0 < in_h)
            if mode == ONE_TAP:
                r, g, b, high, low = _planes(
                    p, across, down, right, in_x0 & in_y0, None, None, None, fx, fy, high, low,
                    C, ONE_TAP, CHECK,
                )  # fmt: skip
            else:
                in_x1 = (x0 >= -1) & (x0 < in_w - 1)
                in_y1 = (y0 >= -1) & (y0 < in_h - 1)
                r, g, b, high, low = _planes(
                    p, across, down, right, in_x0 & in_y0, in_x1 & in_y0, in_x0 & in_y1,
                    in_x1 & in_y1, fx, fy, high, low, C, CHECKED, CHECK,
                )  # fmt: skip
    else:
        p = image + _offset(y, x, down, right, WIDE)
        r, g, b, high, low = _planes(
            p, across, down, right, keep, None, None, None, None, None, high, low,
            C, ONE_TAP, CHECK,
        )  # fmt: skip
    return r, g, b, high, low


# -- colour ----------------------------------------------------------------------------------------


@triton.jit
def _limits(factor):
    """Return the clamp of a colour op: [0, 1], or everything where the factor is exactly 1."""
    free = factor == 1.0
    return tl.where(free, float("-inf"), 0.0), tl.where(free, float("inf"), 1.0)


@triton.jit
def _clamp(value, low, high):
    value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gray(r, g, b):
    return tl.fma(b, 0.114, tl.fma(g, 0.587, r * 0.299))


@triton.jit
def _slope(turn, start: tl.constexpr):
    corner = turn + start
    corner = tl.where(corner >= 6.0, corner - 6.0, corner)
    return tl.minimum(tl.maximum(tl.minimum(corner, 4.0 - corner), 0.0), 1.0)


@triton.jit
def _turn_hue(r, g, b, shift):
    """Turn the hue by `shift` turns, keeping value and chroma (`stoker.augment.reference`)."""
    most = tl.maximum(r, tl.maximum(g, b))
    chroma = most - tl.minimum(r, tl.minimum(g, b))
    divisor = tl.where(chroma == 0.0, 1.0, chroma)
    on_green = (b - r) / divisor + 2.0
    on_blue = (r - g) / divisor + 4.0
    sixth = tl.where(most == r, (g - b) / divisor, tl.where(most == g, on_green, on_blue))
    turn = sixth * 0.16666666666666666 + shift
    turn = (turn - tl.floor(turn)) * 6.0
    r = most - chroma * _slope(turn, 5.0)
    g = most - chroma * _slope(turn, 3.0)
    b = most - chroma * _slope(turn, 1.0)
    return r, g, b


@triton.jit
def _load_factors(numbers):
    """Return brightness, contrast, saturation and hue of a sample; once, outside of the loop."""
    return (
        tl.load(numbers + 6), tl.load(numbers + 7), tl.load(numbers + 8), tl.load(numbers + 9)
    )  # fmt: skip


@triton.jit
def _blend(r, g, b, factor, base):
    """Return `factor * v + base` in [0, 1] per channel."""
    low, high = _limits(factor)
    r = _clamp(tl.fma(r, factor, base), low, high)
    g = _clamp(tl.fma(g, factor, base), low, high)
    b = _clamp(tl.fma(b, factor, base), low, high)
    return r, g, b


@triton.jit
def _colour(
    r, g, b, unit, factors, mean, C: tl.constexpr, SCALE: tl.constexpr, GATHER: tl.constexpr,
    BRIGHTNESS: tl.constexpr, CONTRAST: tl.constexpr, SATURATION: tl.constexpr, HUE: tl.constexpr,
):  # fmt: skip
    """Bring stored values to [0, 1] and jitter them: brightness, contrast, saturation, hue."""
    brightness, contrast, saturation, hue = factors
    if SCALE is not None:
        unit *= SCALE
    if SCALE is not None or GATHER:
        r, g, b = r * unit, g * unit, b * unit
    if BRIGHTNESS:
        low, high = _limits(brightness)
        r = _clamp(r * brightness, low, high)
        g = _clamp(g * brightness, low, high)
        b = _clamp(b * brightness, low, high)
    if CONTRAST:
        r, g, b = _blend(r, g, b, contrast, (1.0 - contrast) * mean)
    if SATURATION and C == 3:
        r, g, b = _blend(r, g, b, saturation, (1.0 - saturation) * _gray(r, g, b))
    if HUE and C == 3:
        if hue != 0.0:
            r, g, b = _turn_hue(r, g, b, hue)
    return r, g, b


@triton.jit
def _load_mean(contrast, partials, num_partials, num_pixels, PARTIALS: tl.constexpr):
    """Sum what `sum_gray` left for a sample, in a fixed order; 0 where contrast is untouched."""
    mean = contrast * 0.0
    if contrast != 1.0:
        index = tl.arange(0, PARTIALS)
        parts = tl.load(partials + index, mask=index < num_partials, other=0.0)
        mean = tl.sum(parts, axis=0) / num_pixels
    return mean


# -- writing pixels --------------------------------------------------------------------------------


@triton.jit
def _load_rectangle(numbers):
    return (
        tl.load(numbers + 11), tl.load(numbers + 12), tl.load(numbers + 13), tl.load(numbers + 14)
    )  # fmt: skip


@triton.jit
def _erased(rectangle, y, x):
    """Return which pixels lie in the rectangle; an empty one has x1 <= x0."""
    x0, y0, x1, y1 = rectangle
    return (x >= x0) & (x < x1) & (y >= y0) & (y < y1)


@triton.jit
def _write(
    p, value, keep, erased, c: tl.constexpr,
    ERASE: tl.constexpr, ERASE_VALUE: tl.constexpr, NORM: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Erase, normalise, cast and store one channel."""
    if ERASE:
        value = tl.where(erased, ERASE_VALUE, value)
    if NORM is not None:
        value = (value - NORM[2 * c]) * NORM[2 * c + 1]
    tl.store(p, value.to(p.dtype.element_ty), mask=keep, cache_modifier=HINT)


@triton.jit
def _emit(
    p, aside, value, sigma, keep, erased, c: tl.constexpr, BLUR: tl.constexpr,
    ERASE: tl.constexpr, ERASE_VALUE: tl.constexpr, NORM: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Write one channel as result, or aside where it still has to be blurred."""
    if BLUR:
        if sigma > 0.0:
            tl.store(aside, value, mask=keep)
        else:
            _write(p, value, keep, erased, c, ERASE, ERASE_VALUE, NORM, HINT)
    else:
        _write(p, value, keep, erased, c, ERASE, ERASE_VALUE, NORM, HINT)


@triton.jit
def _label(
    mask, mask_out, sx, sy, y, x, keep, in_h, in_w, out_w, down, right, ignore,
    GEOMETRY: tl.constexpr, REFLECT: tl.constexpr, GATHER: tl.constexpr, WIDE: tl.constexpr,
    HINT: tl.constexpr,
):  # fmt: skip
    """Copy the nearest label of a block of pixels; `ignore` where there is none.

    A mask that does not exist (only with `GATHER`) has a height of 0: nothing lies inside of it.
    """
    inside = keep
    from_y, from_x = y, x
    if GEOMETRY:
        from_x = tl.floor(sx + 0.5).to(tl.int32)
        from_y = tl.floor(sy + 0.5).to(tl.int32)
        if REFLECT:
            from_x, from_y = _mirror(from_x, in_w), _mirror(from_y, in_h)
        inside = (from_x >= 0) & (from_x < in_w) & (from_y >= 0) & (from_y < in_h)
    elif GATHER:
        inside = keep & (y < in_h)
    label = tl.load(mask + _offset(from_y, from_x, down, right, WIDE), mask=inside, other=ignore)
    tl.store(mask_out + _offset(y, x, out_w, 1, WIDE), label, mask=keep, cache_modifier=HINT)


# -- the kernels -----------------------------------------------------------------------------------

# Sizes whose divisibility is of no use: images of many sizes then share one compiled kernel.
PLAIN = [
    "num_images",
    "in_h",
    "in_w",
    "out_h",
    "mask_n",
    "mask_y",
    "mask_x",
    "ignore",
    "num_partials",
]


@triton.jit(do_not_specialize=PLAIN[:4])
def sum_gray(
    image, rows, table, partials,
    num_images, in_h, in_w, out_h, out_w, image_n, image_c, image_y, image_x,
    C: tl.constexpr, GEOMETRY: tl.constexpr, WHOLE: tl.constexpr, REFLECT: tl.constexpr,
    SCALE: tl.constexpr, BRIGHTNESS: tl.constexpr, WIDE: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr,
    STEP_Y: tl.constexpr, STEP_X: tl.constexpr,
):  # fmt: skip
    """Sum the warped and brightened gray of every tile, for contrast's mean.

    Grid: (tiles across, tiles down, samples). A sample with a contrast of exactly 1 is skipped, and
    its partial sums stay unwritten: `augment` does not read them either.
    """
    sample = tl.program_id(2).to(tl.int64)
    numbers = table + sample * 16
    if tl.load(numbers + 7) != 1.0:
        x_start = tl.program_id(0) * BLOCK_X
        y_start = tl.program_id(1) * BLOCK_Y
        matrix = _load_matrix(numbers)
        factors = _load_factors(numbers)
        mode = ONE_TAP
        if not WHOLE:
            mode = _choose_mode(
                matrix, x_start, y_start, in_h, in_w, out_h, out_w, BLOCK_Y, BLOCK_X
            )
        source, unit, _exists = _source(rows, sample, num_images)
        image += source * image_n
        unseen = tl.zeros([STEP_Y * STEP_X], tl.int32)
        total = tl.zeros([STEP_Y * STEP_X], tl.float32)
        down, right = _pixels(STEP_Y, STEP_X, GEOMETRY)
        for step in range((BLOCK_Y // STEP_Y) * (BLOCK_X // STEP_X)):
            y = y_start + (step // (BLOCK_X // STEP_X)) * STEP_Y + down
            x = x_start + (step % (BLOCK_X // STEP_X)) * STEP_X + right
            keep = (y < out_h) & (x < out_w)
            sx, sy = _locate(matrix, tl.minimum(x, out_w - 1), tl.minimum(y, out_h - 1))
            r, g, b, _, _ = _sample(
                image, sx, sy, y, x, keep, mode, in_h, in_w, image_c, image_y, image_x,
                unseen, unseen, C, GEOMETRY, REFLECT, False, WIDE,
            )  # fmt: skip
            r, g, b = _colour(
                r, g, b, unit, factors, 0.0, C, SCALE, rows is not None, BRIGHTNESS,
                False, False, False,
            )  # fmt: skip
            gray = r
            if C == 3:
                gray = _gray(r, g, b)
            total += tl.where(keep, gray, 0.0)
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        num_tiles = tl.num_programs(0) * tl.num_programs(1)
        tl.store(partials + sample * num_tiles + tile, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=PLAIN)
def augment(
    image, out, spare, mask, mask_out, rows, table, partials, faults,
    num_images, in_h, in_w, out_h, out_w, plane, image_n, image_c, image_y, image_x,
    out_n, out_c, out_y, out_x, mask_n, mask_y, mask_x, ignore, num_partials,
    C: tl.constexpr, GEOMETRY: tl.constexpr, WHOLE: tl.constexpr, REFLECT: tl.constexpr,
    SCALE: tl.constexpr, BRIGHTNESS: tl.constexpr, CONTRAST: tl.constexpr, SATURATION: tl.constexpr, HUE: tl.constexpr,
    BLUR: tl.constexpr, ERASE: tl.constexpr, ERASE_VALUE: tl.constexpr, NORM: tl.constexpr,
    CHECK: tl.constexpr, WATCH: tl.constexpr, WIDE: tl.constexpr, PARTIALS: tl.constexpr,
    HINT: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, STEP_Y: tl.constexpr,
    STEP_X: tl.constexpr,
):  # fmt: skip
    """Do everything up to the blur; for samples that are not blurred, also all that follows it.

    Grid: (tiles across, tiles down, samples). With `BLUR` the coloured image of samples to be
    blurred goes to `spare`, float32 and planar, and `blur` does the rest. `CHECK` looks at every
    value, `WATCH` at one row number per program.
    """
    sample = tl.program_id(2).to(tl.int64)
    if CONTRAST:
        # Backwards: `sum_gray` has just read the last samples, and they are still in the L2 cache.
        sample = tl.num_programs(2) - 1 - sample
    x_start = tl.program_id(0) * BLOCK_X
    y_start = tl.program_id(1) * BLOCK_Y
    numbers = table + sample * 16
    source, unit, exists = _source(rows, sample, num_images)
    if WATCH:
        if not exists:
            tl.atomic_or(faults, NO_SUCH_ROW, sem="relaxed")
    mask_h = in_h
    if rows is not None:
        mask_h = tl.where(exists, in_h, 0)
    matrix = _load_matrix(numbers)
    mode = ONE_TAP
    if not WHOLE:
        mode = _choose_mode(matrix, x_start, y_start, in_h, in_w, out_h, out_w, BLOCK_Y, BLOCK_X)
    factors = _load_factors(numbers)
    mean = 0.0
    if CONTRAST:
        sums = partials + sample * num_partials
        mean = _load_mean(factors[1], sums, num_partials, plane, PARTIALS)
    sigma = tl.load(numbers + 10)
    rectangle = _load_rectangle(numbers)
    high = tl.zeros([STEP_Y * STEP_X], tl.int32)
    low = tl.zeros([STEP_Y * STEP_X], tl.uint32)
    # Three channels are read together, so that their twelve taps are on the way at once.
    GROUP: tl.constexpr = 3 if C == 3 else 1
    down, right = _pixels(STEP_Y, STEP_X, GEOMETRY)
    for step in range((BLOCK_Y // STEP_Y) * (BLOCK_X // STEP_X)):
        y = y_start + (step // (BLOCK_X // STEP_X)) * STEP_Y + down
        x = x_start + (step % (BLOCK_X // STEP_X)) * STEP_X + right
        keep = (y < out_h) & (x < out_w)
        sx, sy = _locate(matrix, tl.minimum(x, out_w - 1), tl.minimum(y, out_h - 1))
        if mask is not None:
            _label(
                mask + source * mask_n, mask_out + sample * plane, sx, sy, y, x, keep, mask_h,
                in_w, out_w, mask_y, mask_x, ignore, GEOMETRY, REFLECT, rows is not None, WIDE,
                HINT,
            )  # fmt: skip
        erased = _erased(rectangle, y, x)
        p = out + sample * out_n + _offset(y, x, out_y, out_x, WIDE)
        aside = p
        if BLUR:
            aside = spare + sample * C * plane + _offset(y, x, out_w, 1, WIDE)
        channel = image + source * image_n
        for c in tl.static_range(0, C, GROUP):
            r, g, b, high, low = _sample(
                channel, sx, sy, y, x, keep, mode, in_h, in_w, image_c, image_y, image_x,
                high, low, GROUP, GEOMETRY, REFLECT, CHECK, WIDE,
            )  # fmt: skip
            r, g, b = _colour(
                r, g, b, unit, factors, mean, GROUP, SCALE, rows is not None, BRIGHTNESS,
                CONTRAST, SATURATION, HUE,
            )  # fmt: skip
            _emit(p, aside, r, sigma, keep, erased, c, BLUR, ERASE, ERASE_VALUE, NORM, HINT)
            # From pointer to pointer: a product of strides could leave 32 bits.
            p += out_c
            aside += plane
            channel += image_c
            if GROUP == 3:
                _emit(p, aside, g, sigma, keep, erased, 1, BLUR, ERASE, ERASE_VALUE, NORM, HINT)
                p += out_c
                aside += plane
                _emit(p, aside, b, sigma, keep, erased, 2, BLUR, ERASE, ERASE_VALUE, NORM, HINT)
    if CHECK:
        _report(faults, high, low)


@triton.jit
def _bell(sigma, TAP: tl.constexpr, TAPS: tl.constexpr):
    """Return the weight of one tap of a Gaussian, not yet divided by the sum."""
    away = (TAP - TAPS // 2) / sigma
    return tl.exp(-0.5 * (away * away))


@triton.jit
def _bell_sum(sigma, TAPS: tl.constexpr):
    total = sigma * 0.0
    for tap in tl.static_range(TAPS):
        total += _bell(sigma, tap, TAPS)
    return total


@triton.jit(do_not_specialize=["out_h"])
def blur(
    spare, out, table, out_h, out_w, plane, out_n, out_c, out_y, out_x,
    C: tl.constexpr, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, LAST: tl.constexpr,
    ERASE: tl.constexpr, ERASE_VALUE: tl.constexpr, NORM: tl.constexpr,
    WIDE: tl.constexpr, STEP_Y: tl.constexpr, STEP_X: tl.constexpr,
):  # fmt: skip
    """Blur the samples with a sigma above 0; with `LAST` also erase, normalise and cast.

    Grid: (tiles across, tiles down, samples). Small kernels do both directions at once; for large
    ones this runs twice, across (TAPS_Y = 1) into a second spare image, then down (TAPS_X = 1).
    """
    sample = tl.program_id(2).to(tl.int64)
    numbers = table + sample * 16
    sigma = tl.load(numbers + 10)
    if sigma > 0.0:
        y, x = _pixels(STEP_Y, STEP_X, False)
        y += tl.program_id(1) * STEP_Y
        x += tl.program_id(0) * STEP_X
        keep = (y < out_h) & (x < out_w)
        erased = _erased(_load_rectangle(numbers), y, x)
        weight = 1.0 / (_bell_sum(sigma, TAPS_Y) * _bell_sum(sigma, TAPS_X))
        p = out + sample * out_n + _offset(y, x, out_y, out_x, WIDE)
        channel = spare + sample * C * plane
        for c in tl.static_range(C):
            total = tl.zeros([STEP_Y * STEP_X], tl.float32)
            for row in tl.static_range(TAPS_Y):
                line = tl.zeros([STEP_Y * STEP_X], tl.float32)
                from_y = _mirror(tl.minimum(y, out_h - 1) + (row - TAPS_Y // 2), out_h)
                for column in tl.static_range(TAPS_X):
                    from_x = _mirror(tl.minimum(x, out_w - 1) + (column - TAPS_X // 2), out_w)
                    value = tl.load(channel + _offset(from_y, from_x, out_w, 1, WIDE))
                    line = tl.fma(value, _bell(sigma, column, TAPS_X), line)
                total = tl.fma(line, _bell(sigma, row, TAPS_Y), total)
            total *= weight
            if LAST:
                _write(p, total, keep, erased, c, ERASE, ERASE_VALUE, NORM, "")
            else:
                tl.store(p, total, mask=keep)
            p += out_c
            channel += plane
