"""The forex model's LSTMs while it is traced: one operator each, for windows of any length.

Enters: a model, its calls of `run_lstm` while a trace runs. Leaves: ONNX's own LSTM nodes, with the weights
in ONNX's order. Costs nothing beside the trace.

torch walks through an LSTM bar by bar to find the shape of what it returns, several times: 170 seconds for
the five default timeframes, against 27 this way; and the length of the windows would be fixed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from stoker.recipes.forex import model as forex_model

Tensor = torch.Tensor

torch.library.define(
    "stoker::onnx_lstm",
    "(Tensor rows, Tensor weight, Tensor recurrent, Tensor bias, Tensor hidden, Tensor cell)"
    " -> (Tensor, Tensor, Tensor)",
)


def _shapes(
    rows: Tensor, weight: Tensor, recurrent: Tensor, bias: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of the shapes that ONNX's operator gives: `(bars, 1, batch, units)`, and two states."""
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
    """Let a model be traced with LSTMs as one operator, and with a batch whose size stays free.

    Gives what `torch.onnx.export` takes as `custom_translation_table`.

    Args:
        model: Traced inside; others stay as they are.
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

    with patch.dict(vars(forex_model), {"run_lstm": run_lstm}):
        yield _translations()


def _arrange(lstm: nn.LSTM, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of a layer as ONNX has them: gates in the order i, o, f, c; one direction."""
    assert lstm.batch_first
    assert lstm.bias
    assert not lstm.bidirectional
    assert not lstm.proj_size

    def turn(name: str) -> Tensor:
        into, forget, cell, out = getattr(lstm, f"{name}_l{layer}").detach().chunk(4)
        return torch.cat([into, out, forget, cell])

    bias = torch.cat([turn("bias_ih"), turn("bias_hh")])
    return turn("weight_ih")[None], turn("weight_hh")[None], bias[None]
