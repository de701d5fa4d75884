"""The Triton kernels of an LSTM layer's recurrence, forward and backward, and nothing else.

Enters: pointers and sizes; compile-time constants have names in capitals. Leaves: results written through the
pointers. Costs: see `stoker.recipes.forex.lstm`, which launches them; importing this module needs triton.

A program processes `ROWS` samples for the whole window. The recurrent weights, four matrices of `H x H`, are read
once and stay on the chip. A step multiplies by them, applies the gates, and passes its hidden state to the next
step through shared memory. Nothing else delays a step: the input's contribution to the gates is loaded one step
ahead, and results are stored without waiting. The four gates are one block of `4 H` columns in every product, load
and store: each change between the layout of memory and that of the tensor cores costs two barriers, and a step has
five of them this way instead of eleven.

Layout: `gates` and `taken` are `(batch, bars, 4 H)` in torch's order of gates: input, forget, candidate,
output; `rows` and `cells` are `(batch, bars, H)`.
"""

# Triton's language is typed by Triton: annotations other than constexpr have no meaning in it.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917, RET505

import triton
import triton.language as tl


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    """Return tanh. FAST is one instruction of the GPU, exact to 11 bits, as many as half precision has."""
    if FAST:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    if FAST:
        return 0.5 * _tanh(0.5 * x, FAST) + 0.5
    else:
        return tl.sigmoid(x)


@triton.jit
def _split_gates(four, ROWS: tl.constexpr, H: tl.constexpr):
    """Split a block of `4 H` columns into input, forget, candidate and output gate."""
    apart = tl.permute(tl.reshape(four, (ROWS, 2, 2, H)), (0, 3, 1, 2))
    first, second = tl.split(apart)
    i, g = tl.split(first)
    f, o = tl.split(second)
    return i, f, g, o


@triton.jit
def _join_gates(i, f, g, o, ROWS: tl.constexpr, H: tl.constexpr):
    """Undo `_split_gates`."""
    apart = tl.join(tl.join(i, g), tl.join(f, o))
    return tl.reshape(tl.permute(apart, (0, 2, 3, 1)), (ROWS, 4 * H))


@triton.jit
def forward_kernel(
    gates,
    weight,
    hidden,
    cell,
    rows,
    cells,
    taken,
    last_cell,
    num_samples,
    num_bars,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    SAVE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Run a window: `gates` is the input's contribution, biases included; `taken` saves the gates for backward."""
    sample = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = tl.arange(0, H)[None, :]
    wide = tl.arange(0, 4 * H)[None, :]
    there = (sample < num_samples) & (column < H)
    there_wide = (sample < num_samples) & (wide < 4 * H)
    # Transposed: weight is (4 H, H), a row per gate and unit.
    w = tl.load(weight + tl.arange(0, H)[:, None] + wide * H)
    h = tl.load(hidden + sample * H + column, mask=there, other=0.0).to(weight.dtype.element_ty)
    c = tl.load(cell + sample * H + column, mask=there, other=0.0).to(tl.float32)
    at_four = sample * num_bars * (4 * H) + wide
    at_rows = sample * num_bars * H + column
    coming = tl.load(gates + at_four, mask=there_wide, other=0.0)
    for bar in range(num_bars):
        share = coming.to(tl.float32)
        ahead = tl.minimum(bar + 1, num_bars - 1) * (4 * H)
        coming = tl.load(gates + at_four + ahead, mask=there_wide, other=0.0)
        x_i, x_f, x_g, x_o = _split_gates(tl.dot(h, w, acc=share, input_precision="ieee"), ROWS, H)
        i, f = _sigmoid(x_i, FAST), _sigmoid(x_f, FAST)
        g, o = _tanh(x_g, FAST), _sigmoid(x_o, FAST)
        c = f * c + i * g
        h = (o * _tanh(c, FAST)).to(h.dtype)
        tl.store(rows + at_rows + bar * H, h, mask=there)
        if SAVE:
            tl.store(cells + at_rows + bar * H, c, mask=there)
            four = _join_gates(i, f, g, o, ROWS, H).to(taken.dtype.element_ty)
            tl.store(taken + at_four + bar * (4 * H), four, mask=there_wide)
    tl.store(last_cell + sample * H + column, c, mask=there)


@triton.jit
def backward_kernel(
    grad_rows,
    grad_hidden,
    grad_cell,
    weight,
    cell,
    cells,
    taken,
    grad_gates,
    grad_first_hidden,
    grad_first_cell,
    num_samples,
    num_bars,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Run a window backwards: writes `grad_gates`, from which matrix products give the other gradients."""
    sample = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = tl.arange(0, H)[None, :]
    wide = tl.arange(0, 4 * H)[None, :]
    there = (sample < num_samples) & (column < H)
    there_wide = (sample < num_samples) & (wide < 4 * H)
    straight = tl.arange(0, H)[:, None] * H + column
    w_i = tl.load(weight + straight)
    w_f = tl.load(weight + H * H + straight)
    w_g = tl.load(weight + 2 * H * H + straight)
    w_o = tl.load(weight + 3 * H * H + straight)
    at_four = sample * num_bars * (4 * H) + wide
    at_rows = sample * num_bars * H + column
    kind = weight.dtype.element_ty
    last = num_bars - 1
    d_hidden = tl.load(grad_hidden + sample * H + column, mask=there, other=0.0).to(tl.float32)
    d_cell = tl.load(grad_cell + sample * H + column, mask=there, other=0.0).to(tl.float32)
    first_cell = tl.load(cell + sample * H + column, mask=there, other=0.0).to(tl.float32)
    next_four = tl.load(taken + at_four + last * (4 * H), mask=there_wide, other=0.0)
    next_d = tl.load(grad_rows + at_rows + last * H, mask=there, other=0.0)
    c = tl.load(cells + at_rows + last * H, mask=there, other=0.0)
    next_c = tl.load(cells + at_rows + tl.maximum(last - 1, 0) * H, mask=there, other=0.0)
    for step in range(num_bars):
        bar = last - step
        i, f, g, o = _split_gates(next_four.to(tl.float32), ROWS, H)
        d = d_hidden + next_d.to(tl.float32)
        before = tl.where(bar > 0, next_c, first_cell)
        ahead = tl.maximum(bar - 1, 0)
        next_four = tl.load(taken + at_four + ahead * (4 * H), mask=there_wide, other=0.0)
        next_d = tl.load(grad_rows + at_rows + ahead * H, mask=there, other=0.0)
        next_c = tl.load(cells + at_rows + tl.maximum(bar - 2, 0) * H, mask=there, other=0.0)
        squashed = _tanh(c, FAST)
        d_cell += d * o * (1.0 - squashed * squashed)
        d_i = (d_cell * g * i * (1.0 - i)).to(kind)
        d_f = (d_cell * before * f * (1.0 - f)).to(kind)
        d_g = (d_cell * i * (1.0 - g * g)).to(kind)
        d_o = (d * squashed * o * (1.0 - o)).to(kind)
        d_cell = d_cell * f
        four = _join_gates(d_i, d_f, d_g, d_o, ROWS, H)
        tl.store(grad_gates + at_four + bar * (4 * H), four, mask=there_wide)
        # Four independent products; with `+` the compiler would chain them into one accumulator.
        first = tl.dot(d_i, w_i, input_precision="ieee")
        second = tl.dot(d_f, w_f, input_precision="ieee")
        third = tl.dot(d_g, w_g, input_precision="ieee")
        fourth = tl.dot(d_o, w_o, input_precision="ieee")
        d_hidden = tl.fma(first, 1.0, second) + tl.fma(third, 1.0, fourth)
        c = before
    tl.store(grad_first_hidden + sample * H + column, d_hidden, mask=there)
    tl.store(grad_first_cell + sample * H + column, d_cell, mask=there)
