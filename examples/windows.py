"""Five timeframes of made-up bars: packed once, windows cut on the device, one epoch of an LSTM."""

import tempfile
from pathlib import Path

import torch

from stoker import Loader, PackOptions, pack
from stoker.demo.story import make_bars
from stoker.sources.bars import BarsSource

WINDOWS = {"M1": 48, "M5": 32, "M15": 24, "H1": 16, "H4": 8}


def train(loader: Loader) -> float:
    lstm = torch.nn.LSTM(11, 16, batch_first=True).to(loader.device)
    head = torch.nn.Linear(16 * len(WINDOWS), 36).to(loader.device)
    optimizer = torch.optim.AdamW([*lstm.parameters(), *head.parameters()], lr=1e-3)
    for batch in loader:  # batch["M5"] is (128, 32, 11) and already on the device
        states = [lstm(batch[name])[0][:, -1] for name in WINDOWS]
        loss = torch.nn.functional.mse_loss(head(torch.cat(states, dim=1)), batch["targets"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


with tempfile.TemporaryDirectory() as folder:
    make_bars(Path(folder, "bars"), weeks=1, seed=0)
    source = BarsSource((Path(folder, "bars"),), windows=tuple(WINDOWS.items()), horizon=36)
    pack(source, Path(folder, "store"), PackOptions(jobs=1))
    with Loader(Path(folder, "store"), 128, order="shuffled", seed=1) as loader:
        print(loader.reason)
        last = train(loader)
        print(f"{len(loader)} batches from {loader.device_bytes:,} bytes; last loss {last:.4f}")
