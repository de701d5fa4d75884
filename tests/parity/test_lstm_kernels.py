"""The recurrence as one kernel = torch's LSTM. On a GPU as it is; elsewhere in Triton's interpreter.

`tests/test_augment_fused.py` runs this file in a process of its own with TRITON_INTERPRET=1; in any other process
these are `gpu` tests.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from stoker.recipes.forex.lstm import can_run, recur, run_lstm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
SHAPES = [(1, 1, 32), (5, 7, 32), (16, 3, 64), (17, 4, 32), (33, 2, 64)]
if not INTERPRETED:
    SHAPES += [(128, 96, 128), (40, 480, 128), (131, 31, 64)]


def weigh(rows, cell):
    """A loss that looks at every row and at the last cell, each with a weight of its own."""
    weights = torch.linspace(-1, 1, rows.numel(), dtype=rows.dtype, device=rows.device)
    return (rows * weights.view_as(rows)).sum() + cell.square().sum()


def gradients(loss, leaves):
    return torch.autograd.grad(loss, leaves)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the kernels run in half precision")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_recurrence_is_torchs(shape):
    num_samples, num_bars, units = shape
    torch.manual_seed(0)
    lstm = nn.LSTM(3, units, batch_first=True)
    inputs = torch.randn(num_samples, num_bars, 3)
    hidden = torch.randn(num_samples, units, requires_grad=True)
    cell = torch.randn(num_samples, units, requires_grad=True)
    leaves = [hidden, cell, *lstm.parameters()]
    gates = nn.functional.linear(inputs, lstm.weight_ih_l0, lstm.bias_ih_l0 + lstm.bias_hh_l0)
    rows, last = recur(gates, lstm.weight_hh_l0, hidden, cell)
    wanted, (_, wanted_last) = lstm(inputs, (hidden[None], cell[None]))
    torch.testing.assert_close(rows, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last, wanted_last[0], rtol=1e-5, atol=1e-6)
    for got, want in zip(
        gradients(weigh(rows, last), leaves),
        gradients(weigh(wanted, wanted_last[0]), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.skipif(INTERPRETED, reason="half precision is for tensor cores")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_under_autocast_it_is_as_near_to_double_precision_as_cudnn(shape, dtype):
    num_samples, num_bars, units = shape
    torch.manual_seed(0)
    lstm = nn.LSTM(11, units, 2, batch_first=True)
    inputs = torch.randn(num_samples, num_bars, 11)
    state = 0.3 * torch.randn(2, num_samples, units), 0.3 * torch.randn(2, num_samples, units)
    exact = nn.LSTM(11, units, 2, batch_first=True).double().cuda()
    exact.load_state_dict(lstm.state_dict())
    wanted, (_, cells) = exact(
        inputs.double().cuda(), tuple(part.double().cuda() for part in state)
    )
    wanted_gradients = gradients(weigh(wanted, cells), list(exact.parameters()))
    lstm = lstm.cuda()
    there = inputs.cuda(), *(part.cuda() for part in state)
    with torch.autocast("cuda", dtype):
        assert can_run(lstm, there[0])
        rows, hidden, cell = run_lstm(lstm, *there)
    assert rows.dtype == dtype
    tolerance = 4e-3 if dtype == torch.float16 else 3e-2
    torch.testing.assert_close(rows.double(), wanted, rtol=0, atol=tolerance)
    torch.testing.assert_close(cell.double(), cells, rtol=tolerance, atol=2 * tolerance)
    torch.testing.assert_close(hidden[-1], rows[:, -1].float())
    for got, want in zip(
        gradients(weigh(rows.float(), cell), list(lstm.parameters())), wanted_gradients, strict=True
    ):
        error = float((got.double() - want).norm() / want.norm())
        assert error < 5 * tolerance


@pytest.mark.skipif(INTERPRETED, reason="there are no streams and no graphs in the interpreter")
def test_it_can_be_captured():
    lstm = nn.LSTM(16, 64, batch_first=True).cuda()
    rows, zeros = torch.randn(32, 20, 16, device="cuda"), torch.zeros(1, 32, 64, device="cuda")

    def run():
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            return run_lstm(lstm, rows, zeros, zeros)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    rows.normal_()
    graph.replay()
    assert torch.equal(captured, run())
