"""An LSTM for small hidden sizes that runs a whole window in one kernel, with its weights in registers.

Enters: a torch `nn.LSTM` and its arguments. Leaves: the module's results. Costs: on an H200, batch
128 and 128 units, about a quarter of cuDNN's time; the gates of every step are kept for the backward pass.

cuDNN runs a window of 480 bars as a chain of kernels that each read the weights again, and several LSTMs
one after the other. Here a program keeps the four recurrent matrices in its registers and steps through the
window with 16 samples; the other products (inputs, weights' gradients) are plain matrix products over all
steps at once. A batch of 128 takes 8 of the GPU's multiprocessors, so the LSTMs of several timeframes run
in parallel on streams of their own.

Used under autocast on a GPU, for widths of `WIDTHS`, one direction, biases, and no dropout between the layers of
one module; otherwise torch's own LSTM runs. Results differ from cuDNN's by rounding: both multiply in half
precision and add in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from stoker.augment.fused import available

WIDTHS = (32, 64, 128)
_ROWS = 16  # samples per program: the smallest matrix product of a tensor core
_STATE_BYTES = 128  # per unit, in shared memory, beside the weights


def run_lstm(
    lstm: nn.LSTM, rows: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, hidden and cell state of `lstm(rows, (hidden, cell))`, by the kernels if they can be used."""
    if not can_run(lstm, rows):
        rows, (hidden, cell) = lstm(rows, (hidden, cell))
        return rows, hidden, cell
    hiddens, cells = [], []
    for layer in range(lstm.num_layers):
        gates, of_state = _share_of_input(lstm, layer, rows)
        rows, last = recur(gates, of_state, hidden[layer], cell[layer])
        hiddens.append(rows[:, -1].float())
        cells.append(last)
    return rows, torch.stack(hiddens), torch.stack(cells)


def _share_of_input(
    lstm: nn.LSTM, layer: int, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input's contribution to all gates, and the recurrent weights in the same type.

    The biases are an additional column of the weights, with an input of 1. So their gradient is part of a
    matrix product instead of a sum over all steps, which took longer than the product. The columns are
    padded with zeros to a multiple of 8 for tensor cores.
    """
    dtype = torch.get_autocast_dtype(rows.device.type)
    weight, of_state, *biases = (
        getattr(lstm, f"{name}_l{layer}")
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    lacks = -(rows.shape[-1] + 1) % 8
    bias = nn.functional.pad((biases[0] + biases[1]).unsqueeze(1), (0, lacks))
    one = nn.functional.pad(rows.new_ones(1, dtype=dtype), (0, lacks))
    wider = torch.cat([rows.to(dtype), one.expand(*rows.shape[:2], -1)], dim=-1)
    gates = nn.functional.linear(wider, torch.cat([weight, bias], dim=1).to(dtype))
    return gates, of_state.to(dtype)


def can_run(lstm: nn.LSTM, rows: torch.Tensor) -> bool:
    """Whether the kernels support this module and its input."""
    return (
        rows.is_cuda
        and torch.is_autocast_enabled("cuda")
        and lstm.hidden_size in WIDTHS
        and not lstm.bidirectional
        and lstm.bias
        and lstm.batch_first
        and lstm.proj_size == 0
        and rows.shape[1] > 0
        and (lstm.num_layers == 1 or lstm.dropout == 0 or not lstm.training)
        and _fits(rows.device, lstm.hidden_size)
    )


@lru_cache(maxsize=64)
def _fits(device: torch.device, units: int) -> bool:
    """Whether triton runs there, and a program's weights fit the memory of one processor."""
    if available(device) is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    about: Any = torch.cuda.get_device_properties(device)
    return bool(8 * units * units + _STATE_BYTES * units <= about.shared_memory_per_block_optin)


def recur(
    gates: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one layer's recurrence; return its rows `(batch, bars, units)` and the last cell.

    Args:
        gates: `(batch, bars, 4 units)`, the input's contribution, biases included.
        weight: `(4 units, units)` recurrent weights, in the type of `gates`.
        hidden: `(batch, units)` hidden state before the first bar.
        cell: `(batch, units)` cell state before the first bar.
    """
    made: tuple[torch.Tensor, torch.Tensor] = _Recurrence.apply(  # type: ignore[no-untyped-call]
        gates.contiguous(), weight.contiguous(), hidden.contiguous(), cell.contiguous()
    )
    return made


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: torch.Tensor,
        weight: torch.Tensor,
        hidden: torch.Tensor,
        cell: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from stoker.recipes.forex.lstm_kernels import forward_kernel

        num_samples, num_bars, width = gates.shape
        units = width // 4
        rows = gates.new_empty(num_samples, num_bars, units)
        last_cell = gates.new_empty(num_samples, units, dtype=torch.float32)
        save = any(ctx.needs_input_grad)
        taken = torch.empty_like(gates) if save else gates
        cells = rows.new_empty(rows.shape, dtype=torch.float32) if save else last_cell
        forward_kernel[_grid(num_samples)](
            gates, weight, hidden, cell, rows, cells, taken, last_cell, num_samples, num_bars,
            H=units, ROWS=_ROWS, SAVE=save, FAST=_fast(gates), num_warps=_warps(units), num_stages=1,
        )  # fmt: skip
        if save:
            ctx.save_for_backward(weight, hidden, cell, rows, cells, taken)
        return rows, last_cell

    @staticmethod
    def backward(
        ctx: Any, grad_rows: torch.Tensor, grad_cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        from stoker.recipes.forex.lstm_kernels import backward_kernel

        weight, hidden, cell, rows, cells, taken = ctx.saved_tensors
        num_samples, num_bars, units = rows.shape
        grad_gates = torch.empty_like(taken)
        first_hidden, first_cell = torch.empty_like(cells[:, 0]), torch.empty_like(cells[:, 0])
        backward_kernel[_grid(num_samples)](
            grad_rows.contiguous(), torch.zeros_like(first_hidden), grad_cell.contiguous(), weight,
            cell, cells, taken, grad_gates, first_hidden, first_cell, num_samples, num_bars,
            H=units, ROWS=_ROWS, FAST=_fast(rows), num_warps=_warps(units), num_stages=1,
        )  # fmt: skip
        before = torch.cat([hidden.to(rows.dtype).unsqueeze(1), rows[:, :-1]], dim=1)
        grad_weight = grad_gates.flatten(0, 1).t() @ before.flatten(0, 1)
        return grad_gates, grad_weight, first_hidden.to(hidden.dtype), first_cell.to(cell.dtype)


def _grid(num_samples: int) -> tuple[int]:
    return (-(-num_samples // _ROWS),)


def _warps(units: int) -> int:
    return max(1, units // 16)


def _fast(values: torch.Tensor) -> bool:
    """Whether the GPU's approximate tanh is exact enough: it is for half precision."""
    return values.is_cuda and values.dtype != torch.float32


# -- for ONNX ---------------------------------------------------------------------------------------
# To find the output's shape torch traces an LSTM bar by bar, several times: 170 seconds for the five default
# timeframes. With one custom operator per layer it takes 27, and the length of windows stays free.


Tensor = torch.Tensor

torch.library.define(
    "stoker::onnx_lstm",
    "(Tensor rows, Tensor weight, Tensor recurrent, Tensor bias, Tensor hidden, Tensor cell)"
    " -> (Tensor, Tensor, Tensor)",
)


def _shapes(
    rows: Tensor, weight: Tensor, recurrent: Tensor, bias: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors with the shapes of ONNX's operator: `(bars, 1, batch, units)`, and two states."""
    del weight, bias
    made = rows.new_empty(rows.shape[0], 1, rows.shape[1], recurrent.shape[2])
    return made, torch.empty_like(hidden), torch.empty_like(cell)


torch.library.register_fake("stoker::onnx_lstm", _shapes)


def _translations() -> dict[Any, Any]:
    from onnxscript import opset18

    def translate(rows: Any, weight: Any, recurrent: Any, bias: Any, hidden: Any, cell: Any) -> Any:
        units = recurrent.shape[2]
        return opset18.LSTM(rows, weight, recurrent, bias, None, hidden, cell, hidden_size=units)

    return {torch.ops.stoker.onnx_lstm.default: translate}


@contextlib.contextmanager
def traceable(model: nn.Module) -> Iterator[dict[Any, Any]]:
    """Replace `run_lstm`, so that LSTM layers are traced as one operator each and the batch size stays free.

    Yields the `custom_translation_table` for `torch.onnx.export`.

    Args:
        model: The model to trace inside the context; no other model may run there.
    """
    weights = {
        lstm: [_arrange(lstm, layer) for layer in range(lstm.num_layers)]
        for lstm in model.modules()
        if isinstance(lstm, nn.LSTM)
    }

    def run_lstm(
        lstm: nn.LSTM, rows: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, hiddens, cells = rows.transpose(0, 1), [], []
        for layer, arranged in enumerate(weights[lstm]):
            started = hidden[layer : layer + 1], cell[layer : layer + 1]
            made, last, last_cell = torch.ops.stoker.onnx_lstm(rows, *arranged, *started)
            rows = made.squeeze(1)
            hiddens.append(last)
            cells.append(last_cell)
        return rows.transpose(0, 1), torch.cat(hiddens), torch.cat(cells)

    with patch.dict(globals(), {"run_lstm": run_lstm}):
        yield _translations()


def _arrange(lstm: nn.LSTM, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of a layer in ONNX's layout: gates in the order i, o, f, c; one direction."""
    assert lstm.batch_first
    assert lstm.bias
    assert not lstm.bidirectional
    assert not lstm.proj_size

    def turn(name: str) -> Tensor:
        into, forget, cell, out = getattr(lstm, f"{name}_l{layer}").detach().chunk(4)
        return torch.cat([into, out, forget, cell])

    bias = torch.cat([turn("bias_ih"), turn("bias_hh")])
    return turn("weight_ih")[None], turn("weight_hh")[None], bias[None]
