"""When the LSTM kernels are used; `tests/test_augment_fused.py` runs them in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.recipes.forex.lstm import can_run, run_lstm


def test_on_the_cpu_it_is_torchs_own():
    torch.manual_seed(0)
    lstm = nn.LSTM(5, 32, 2, batch_first=True)
    rows, zeros = torch.randn(3, 7, 5), torch.zeros(2, 3, 32)
    assert not can_run(lstm, rows)
    made, hidden, cell = run_lstm(lstm, rows, zeros, zeros)
    wanted, (wanted_hidden, wanted_cell) = lstm(rows, (zeros, zeros))
    assert torch.equal(made, wanted)
    assert torch.equal(hidden, wanted_hidden)
    assert torch.equal(cell, wanted_cell)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lstm",
    [
        nn.LSTM(5, 48, batch_first=True),
        nn.LSTM(5, 32),
        nn.LSTM(5, 32, batch_first=True, bidirectional=True),
        nn.LSTM(5, 32, batch_first=True, bias=False),
        nn.LSTM(5, 32, batch_first=True, proj_size=8),
        nn.LSTM(5, 32, 2, batch_first=True, dropout=0.1),
        nn.LSTM(5, 512, batch_first=True),
    ],
    ids=["odd width", "bars first", "two ways", "no bias", "projected", "dropout", "too wide"],
)
def test_what_the_kernels_cannot_do_goes_to_torch(lstm):
    rows = torch.randn(3, 7, 5, device="cuda")
    assert not can_run(lstm, rows)
    with torch.autocast("cuda", torch.float16):
        assert not can_run(lstm, rows)
        assert can_run(nn.LSTM(5, 32, batch_first=True), rows)
