"""When the LSTM kernels are used, and that they are right in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from stoker.recipes.forex.lstm import can_run, run_lstm

PARITY = Path(__file__).parent / "parity" / "test_lstm_kernels.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU here")
def test_the_kernels_agree_with_torch_in_the_interpreter():
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(PARITY)],
        env={**kept, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) == 5


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
