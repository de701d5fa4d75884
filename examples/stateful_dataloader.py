"""Code written for torchdata's StatefulDataLoader, with it behind `stoker.prefetch` and with a stoker Loader."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import stoker

device = "cuda" if torch.cuda.is_available() else "cpu"
features = torch.randn(1000, 8)


def train(make: Callable[[], Any], stop: int, state: Any = None) -> tuple[float, Any]:
    """Train up to batch `stop` of the epoch; return the sum of what was seen, and where to go on."""
    loader = make()
    if state is not None:
        loader.load_state_dict(state)
    seen = 0.0
    for number, batch in enumerate(loader, 1):
        values = batch["features"] if isinstance(batch, dict) else batch[0]
        seen += values.double().sum().item()
        if number == stop:
            break
    return seen, loader.state_dict()


def stateful() -> Any:
    """Batches fetched ahead are not in the state: they are fetched again."""
    return stoker.prefetch(StatefulDataLoader(TensorDataset(features), batch_size=50), device)


with tempfile.TemporaryDirectory() as name:
    path = Path(name, "train.h5")
    with h5py.File(path, "w") as file:
        file["features"], file["targets"] = features.numpy(), features.numpy()[:, :1]

    def own() -> stoker.Loader:
        return stoker.Loader(path, 50, device, order="shuffled", seed=1)

    for kind, make in (("prefetch(StatefulDataLoader)", stateful), ("Loader", own)):
        first, state = train(make, 7)
        rest, _ = train(make, 13, state)  # a new process would do the same
        left = features.double().sum().item() - first - rest
        print(f"{kind}: 7 batches, then the other 13; what is missing adds up to {abs(left):.1f}")
