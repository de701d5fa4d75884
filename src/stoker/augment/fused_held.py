"""The Triton kernel for contrast: one pass, in which a program holds its pixels until the image's mean is known.

Enters and leaves: as `fused_kernels.augment`, whose helpers it uses. Costs: every pixel is resampled once, where
`sum_gray` and `augment` do it twice; 48 registers of a thread hold 16 pixels of three channels.

A program resamples its tile, stores the sum of its gray, and waits until all programs of its image have. They must be
on the GPU together: programs start in the order of their numbers, so they are wherever one image has fewer tiles than
the GPU has room for, and `fused.choose_held` asks for four times that room.
"""

# Triton's language is typed by Triton: annotations other than constexpr have no meaning in it.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0915, PLR0917, RUF005, SIM102

import triton
import triton.language as tl

from stoker.augment.fused_kernels import (
    NO_SUCH_ROW,
    ONE_TAP,
    PLAIN,
    _choose_mode,
    _colour,
    _erased,
    _gray,
    _label,
    _load_factors,
    _load_matrix,
    _load_mean,
    _load_rectangle,
    _locate,
    _offset,
    _pixels,
    _report,
    _sample,
    _source,
    _write,
)

ONE_LEFT = tl.constexpr(1 << 16)
ARRIVED = tl.constexpr((1 << 16) - 1)


@triton.jit
def _meet(counter, num_tiles):
    """Wait until every program of the image has arrived.

    The lower 16 bits of the counter count arrivals, the upper 16 departures; the last program resets it to 0.
    """
    seen = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    while (seen & ARRIVED) < num_tiles:
        seen = tl.atomic_add(counter, 0, sem="acquire")
    left = tl.atomic_add(counter, ONE_LEFT, sem="relaxed")
    if (left // ONE_LEFT) == num_tiles - 1:
        tl.atomic_xchg(counter, 0, sem="relaxed")


@triton.jit(do_not_specialize=PLAIN)
def augment_held(
    image, out, mask, mask_out, rows, table, counters, partials, faults,
    num_images, in_h, in_w, out_h, out_w, plane, image_n, image_c, image_y, image_x,
    out_n, out_c, out_y, out_x, mask_n, mask_y, mask_x, ignore, num_partials,
    C: tl.constexpr, GEOMETRY: tl.constexpr, WHOLE: tl.constexpr, REFLECT: tl.constexpr,
    SCALE: tl.constexpr, BRIGHTNESS: tl.constexpr, SATURATION: tl.constexpr, HUE: tl.constexpr,
    ERASE: tl.constexpr, ERASE_VALUE: tl.constexpr, NORM: tl.constexpr,
    CHECK: tl.constexpr, WATCH: tl.constexpr, WIDE: tl.constexpr, PARTIALS: tl.constexpr, HINT: tl.constexpr,
    WAIT: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, STEP_Y: tl.constexpr, STEP_X: tl.constexpr,
):  # fmt: skip
    """Do everything but a blur. Grid: (tiles across, tiles down, samples).

    `counters` is the table as int32, whose last column is 0. Without `WAIT`, for the interpreter, which runs one
    program after the other, the sums of an earlier launch are taken.
    """
    sample = tl.program_id(2).to(tl.int64)
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
    high = tl.zeros([STEP_Y * STEP_X], tl.int32)
    low = tl.zeros([STEP_Y * STEP_X], tl.uint32)
    total = tl.zeros([STEP_Y * STEP_X], tl.float32)
    down, right = _pixels(STEP_Y, STEP_X, GEOMETRY)
    held = ()
    for step in tl.static_range((BLOCK_Y // STEP_Y) * (BLOCK_X // STEP_X)):
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
        r, g, b, high, low = _sample(
            image + source * image_n, sx, sy, y, x, keep, mode, in_h, in_w, image_c, image_y,
            image_x, high, low, C, GEOMETRY, REFLECT, CHECK, WIDE,
        )  # fmt: skip
        r, g, b = _colour(
            r, g, b, unit, factors, 0.0, C, SCALE, rows is not None, BRIGHTNESS, False, False, False
        )
        gray = r
        if C == 3:
            gray = _gray(r, g, b)
            held = held + (r, g, b)
        else:
            held = held + (r,)
        total += tl.where(keep, gray, 0.0)
    if CHECK:
        _report(faults, high, low)
    mean = 0.0
    if factors[1] != 1.0:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        sums = partials + sample * num_partials
        tl.store(sums + tile, tl.sum(total, axis=0))
        if WAIT:
            _meet(counters + sample * 16 + 15, num_partials)
        mean = _load_mean(factors[1], sums, num_partials, plane, PARTIALS)
    rectangle = _load_rectangle(numbers)
    for step in tl.static_range((BLOCK_Y // STEP_Y) * (BLOCK_X // STEP_X)):
        y = y_start + (step // (BLOCK_X // STEP_X)) * STEP_Y + down
        x = x_start + (step % (BLOCK_X // STEP_X)) * STEP_X + right
        keep = (y < out_h) & (x < out_w)
        erased = _erased(rectangle, y, x)
        p = out + sample * out_n + _offset(y, x, out_y, out_x, WIDE)
        r = held[step * C]
        g, b = r, r
        if C == 3:
            g, b = held[step * C + 1], held[step * C + 2]
        r, g, b = _colour(r, g, b, 1.0, factors, mean, C, None, False, False, True, SATURATION, HUE)
        _write(p, r, keep, erased, 0, ERASE, ERASE_VALUE, NORM, HINT)
        if C == 3:
            _write(p + out_c, g, keep, erased, 1, ERASE, ERASE_VALUE, NORM, HINT)
            _write(p + out_c + out_c, b, keep, erased, 2, ERASE, ERASE_VALUE, NORM, HINT)
