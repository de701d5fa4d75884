"""The Triton kernel that draws the parameters of each sample.

Enters: the tape, the counter `[seed, epoch, step, stream]`, a batch size. Leaves: the parameter
table; the counter's step is one higher. Costs: one launch, where the torch backend (`stoker.augment.draw`) takes
some 150 small kernels. Importing this module needs triton.

The numbers are those of `stoker.augment.draw`, in its order of operations: the uniforms bit for bit,
the table except for the last bits of sine, cosine and exponential. `numbers` points at `a0` of an op's row on the tape.
"""

# Triton's language is typed by Triton: annotations other than constexpr have no meaning in it.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0912, PLR0915, SIM102

import triton
import triton.language as tl

# `stoker.augment.definition.Opcode`, as the tape holds it.
FLIP_H = tl.constexpr(1.0)
FLIP_V = tl.constexpr(2.0)
AFFINE = tl.constexpr(3.0)
RESIZED_CROP = tl.constexpr(4.0)
CROP = tl.constexpr(5.0)
COLOUR = tl.constexpr(6.0)
BLUR = tl.constexpr(7.0)
ERASE = tl.constexpr(8.0)
FLIP_BY_ID = tl.constexpr(9.0)
STAGE = tl.constexpr(10.0)


@triton.jit
def _uniforms(seed, lanes, block, step, epoch):
    """Return four uniforms in [0, 1) per lane: the same bits as `stoker.augment.philox`."""
    same = lanes * 0
    x0, x1, x2, x3 = tl.philox(seed, lanes, same + block, same + step, same + epoch)
    return _unit(x0), _unit(x1), _unit(x2), _unit(x3)


@triton.jit
def _unit(word):
    # 24 bits are exact in float32; through int32, whose conversion every target has.
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _side(square, most):
    """Return the square root of `square`, rounded to a whole number from 1 to `most`."""
    side = tl.floor(tl.sqrt_rn(square) + 0.5)
    return tl.minimum(tl.maximum(side, 1.0), most)


@triton.jit
def _start(u, free):
    """Return a whole number from 0 to `free`, both included."""
    return tl.minimum(tl.floor(u * (free + 1.0)), free)


@triton.jit
def _snap(number):
    return tl.where(tl.abs(number) >= 1e-6, number, 0.0)


@triton.jit
def _affine(numbers, u1, u2, u3, u4, u5, u6):
    """Return the inverse matrix: undo the shift, then rotation and scale, the shear along y, the shear along x."""
    angle = _within(numbers, 2, u1)
    cosine, sine = _snap(tl.cos(angle)), _snap(tl.sin(angle))
    cx, cy = tl.load(numbers), tl.load(numbers + 1)
    across = _within(numbers, 4, u2) + cx
    down = _within(numbers, 6, u3) + cy
    shrink = tl.div_rn(u4 * 0.0 + 1.0, _within(numbers, 8, u4))
    lean_x = _within(numbers, 10, u5)
    lean_y = _within(numbers, 12, u6)
    lean_x = tl.div_rn(tl.sin(lean_x), tl.cos(lean_x))
    lean_y = tl.div_rn(tl.sin(lean_y), tl.cos(lean_y))
    m00, m01 = shrink * cosine, shrink * sine
    m10, m11 = -m01, m00
    m10, m11 = m10 + lean_y * m00, m11 + lean_y * m01
    m00, m01 = m00 + lean_x * m10, m01 + lean_x * m11
    return m00, m01, cx - (m00 * across + m01 * down), m10, m11, cy - (m10 * across + m11 * down)


@triton.jit
def _stretch(side, start, out_side):
    """Return factor and offset of one axis; a result of one pixel takes the middle."""
    many = out_side > 1.0
    factor = tl.div_rn(side - 1.0, tl.maximum(out_side - 1.0, 1.0))
    return tl.where(many, factor, 0.0), tl.where(many, start, start + (side - 1.0) * 0.5)


@triton.jit
def _resized_crop(numbers, gate, u1, u2, u3, u4):
    """Map the corners of the drawn rectangle to those of the result; where `gate` is False, the whole image's."""
    width, height = tl.load(numbers), tl.load(numbers + 1)
    proportion = tl.load(numbers + 8)
    area = _within(numbers, 4, u1)
    shape = tl.exp(_within(numbers, 6, u2))
    shape = tl.minimum(
        tl.maximum(shape, area * proportion), tl.div_rn(area * 0.0 + 1.0, area) * proportion
    )
    pixels = area * tl.load(numbers + 9)
    w = tl.where(gate, _side(pixels * shape, width), width)
    h = tl.where(gate, _side(tl.div_rn(pixels, shape), height), height)
    m00, m02 = _stretch(w, _start(u3, width - w), tl.load(numbers + 2))
    m11, m12 = _stretch(h, _start(u4, height - h), tl.load(numbers + 3))
    return m00, m02, m11, m12


@triton.jit
def _rectangle(numbers, u1, u2, u3, u4):
    width, height = tl.load(numbers), tl.load(numbers + 1)
    pixels = _within(numbers, 2, u1) * tl.load(numbers + 6)
    shape = tl.exp(_within(numbers, 4, u2))
    h = _side(pixels * shape, height)
    w = _side(tl.div_rn(pixels, shape), width)
    x0, y0 = _start(u3, width - w), _start(u4, height - h)
    return x0, y0, x0 + w, y0 + h


@triton.jit
def _within(numbers, at: tl.constexpr, u):
    """Return `low + u * span` of the range that starts at column `at`."""
    return u * tl.load(numbers + at + 1) + tl.load(numbers + at)


@triton.jit
def _flipped_by_id(seed, name, op, epoch):
    """Return which images are flipped in this epoch: by the seed and the id alone."""
    same = (name * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(
        seed, name.to(tl.uint32), same + 2 * op, (name >> 32).to(tl.uint32), same
    )
    return (_unit(word) < 0.5) != (epoch % 2 == 1)


@triton.jit(do_not_specialize=["batch", "num_ops", "num_staged"])
def draw(
    tape, counter, ids, staged, table, batch, num_ops, num_staged,
    LANES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Draw the table of each batch. Grid: (batches, programs of a batch, 1); a lane is a sample.

    With `COUNT` there is one program, which also counts its step: the counter is read by all programs and then
    written, so two of them would race. `ids` has the number of each image. `staged`, of shape
    `(num_batches * batch, num_staged, 8)`, receives the uniforms of stages. Both may be None.
    """
    seed = tl.load(counter)
    epoch = tl.load(counter + 1).to(tl.uint32)
    step = tl.load(counter + 2)
    count = (step + tl.program_id(0)).to(tl.uint32)
    table += tl.program_id(0) * batch * 16
    if ids is not None:
        ids += tl.program_id(0) * batch
    if staged is not None:
        staged += tl.program_id(0) * batch * num_staged * 8
    stream = tl.load(counter + 3).to(tl.uint32) << 16
    for first in range(tl.program_id(1) * LANES, batch, tl.num_programs(1) * LANES):
        sample = first + tl.arange(0, LANES)
        lanes = sample.to(tl.uint32)
        zero = tl.zeros([LANES], tl.float32)
        one = zero + 1.0
        m00, m01, m02, m10, m11, m12 = one, zero, zero, zero, one, zero
        brightness, contrast, saturation, hue, sigma = one, one, one, zero, zero
        x0, y0, x1, y1 = zero, zero, zero, zero
        for op in range(num_ops):
            code = tl.load(tape + op * 16)
            numbers = tape + op * 16 + 2
            block = stream + 2 * op
            u0, u1, u2, u3 = _uniforms(seed, lanes, block, count, epoch)
            u4, u5, u6, u7 = _uniforms(seed, lanes, block + 1, count, epoch)
            chance = tl.load(tape + op * 16 + 1)
            gate = u0 < chance
            n00, n01, n02, n10, n11, n12 = one, zero, zero, zero, one, zero
            # Crops change the size, so a sample cannot be left unchanged.
            moved = u0 < tl.where((code == RESIZED_CROP) | (code == CROP), 1.0, chance)
            if ids is not None:
                if code == FLIP_BY_ID:
                    name = tl.load(ids + sample, mask=sample < batch, other=0)
                    moved = _flipped_by_id(seed, name, op, epoch)
            if staged is not None:
                if code == STAGE:
                    q = staged + (sample * num_staged + tl.load(numbers).to(tl.int32)) * 8
                    tl.store(q, u0, mask=sample < batch)
                    tl.store(q + 1, u1, mask=sample < batch)
                    tl.store(q + 2, u2, mask=sample < batch)
                    tl.store(q + 3, u3, mask=sample < batch)
                    tl.store(q + 4, u4, mask=sample < batch)
                    tl.store(q + 5, u5, mask=sample < batch)
                    tl.store(q + 6, u6, mask=sample < batch)
                    tl.store(q + 7, u7, mask=sample < batch)
            if (code == FLIP_H) | (code == FLIP_BY_ID):
                n00, n02 = -one, zero + tl.load(numbers)
            elif code == FLIP_V:
                n11, n12 = -one, zero + tl.load(numbers)
            elif code == AFFINE:
                n00, n01, n02, n10, n11, n12 = _affine(numbers, u1, u2, u3, u4, u5, u6)
            elif code == RESIZED_CROP:
                n00, n02, n11, n12 = _resized_crop(numbers, gate, u1, u2, u3, u4)
            elif code == CROP:
                n02 = _start(u1, tl.load(numbers + 2) - 1.0) + tl.load(numbers)
                n12 = _start(u2, tl.load(numbers + 3) - 1.0) + tl.load(numbers + 1)
            elif code == COLOUR:
                brightness *= tl.where(gate, _within(numbers, 0, u1), 1.0)
                contrast *= tl.where(gate, _within(numbers, 2, u2), 1.0)
                saturation *= tl.where(gate, _within(numbers, 4, u3), 1.0)
                hue += tl.where(gate, _within(numbers, 6, u4), 0.0)
            elif code == BLUR:
                sigma = tl.where(gate, _within(numbers, 0, u1), 0.0)
            elif code == ERASE:
                e0, e1, e2, e3 = _rectangle(numbers, u1, u2, u3, u4)
                x0, y0 = tl.where(gate, e0, 0.0), tl.where(gate, e1, 0.0)
                x1, y1 = tl.where(gate, e2, 0.0), tl.where(gate, e3, 0.0)
            n00, n01 = tl.where(moved, n00, 1.0), tl.where(moved, n01, 0.0)
            n10, n11 = tl.where(moved, n10, 0.0), tl.where(moved, n11, 1.0)
            n02, n12 = tl.where(moved, n02, 0.0), tl.where(moved, n12, 0.0)
            # The matrix so far, applied after this op's: it maps output to input.
            m02 = (m00 * n02 + m01 * n12) + m02
            m12 = (m10 * n02 + m11 * n12) + m12
            m00, m01 = m00 * n00 + m01 * n10, m00 * n01 + m01 * n11
            m10, m11 = m10 * n00 + m11 * n10, m10 * n01 + m11 * n11
        p = table + sample * 16
        keep = sample < batch
        tl.store(p, m00, mask=keep)
        tl.store(p + 1, m01, mask=keep)
        tl.store(p + 2, m02, mask=keep)
        tl.store(p + 3, m10, mask=keep)
        tl.store(p + 4, m11, mask=keep)
        tl.store(p + 5, m12, mask=keep)
        tl.store(p + 6, brightness, mask=keep)
        tl.store(p + 7, contrast, mask=keep)
        tl.store(p + 8, saturation, mask=keep)
        tl.store(p + 9, hue, mask=keep)
        tl.store(p + 10, sigma, mask=keep)
        tl.store(p + 11, x0, mask=keep)
        tl.store(p + 12, y0, mask=keep)
        tl.store(p + 13, x1, mask=keep)
        tl.store(p + 14, y1, mask=keep)
        tl.store(p + 15, zero, mask=keep)
    if COUNT:
        # Every warp must have read the counter before one of them writes it.
        tl.debug_barrier()
        tl.store(counter + 2, step + 1)
