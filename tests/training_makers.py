"""Small models, files and runs for the tests of training, and memory that runs out when it should."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from stoker.loader.loader import Loader
from stoker.store.fields import Dense
from stoker.store.reader import Store
from stoker.train.step import Step
from stoker.train.trainer import Trainer
from store_makers import write_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Three chunks of 33 or 34 samples of `write_linear`; a batch of 16 touches two.
CHUNK_BYTES = 40 * 24


def write_rows(folder: Path) -> Path:
    """Write 203 rows of six features, and a target to learn from them."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(203, 6)).astype("f4")
    with h5py.File(folder / "rows.h5", "w") as file:
        file["features"] = features
        file["targets"] = (features[:, :1] * 2 - features[:, 1:2]).astype("f4")
    return folder / "rows.h5"


def write_dirty(folder: Path, sample: int) -> Path:
    """Write 200 rows, one of which has a value that is not a number."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 6)).astype("f4")
    targets = features[:, :1].copy()
    features[sample, 4] = np.nan
    with h5py.File(folder / f"dirty-{sample}.h5", "w") as file:
        file["features"], file["targets"] = features, targets
    return folder / f"dirty-{sample}.h5"


def write_linear(folder: Path) -> Store:
    """Write a store of 100 rows of five features, 24 bytes with their target."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(100, 5)).astype("f4")
    data = {"features": Dense(features), "targets": Dense(features[:, :1] * 3)}
    return write_store(folder, [data])


def make_model(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))


def make_trainer(path, device="cpu", batch=20, order="shuffled", dropout=0.0, lr=0.01, **options):
    model = make_model(dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = Loader(path, batch, device, order=order, seed=1)
    val = options.pop("val", None)
    scheduler = options.pop("scheduler", None)
    extra = {
        name: options.pop(name) for name in ("run_dir", "progress", "unpack") if name in options
    }
    config = {"epochs": 2, "capture": "off", "precision": "fp32", "read_every": 7, **options}
    return Trainer(
        model, loader, val, nn.functional.mse_loss, optimizer, scheduler, config, device, **extra
    )


def weights(trainer):
    return torch.cat([p.detach().flatten().cpu() for p in trainer.model.parameters()])


# -- memory that runs out ------------------------------------------------------------------------


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class Net(nn.Module):
    """A model with a buffer that counts its calls, and room for `most` rows at a time."""

    def __init__(self, most, where):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros(()))
        self.most, self.where = most, where

    def forward(self, x):
        self.seen += len(x)
        if self.where == "forward" and len(x) > self.most:
            raise out_of_memory()
        result = self.body(x)
        if self.where == "backward" and len(x) > self.most:
            result.register_hook(self._fail)
        return result

    def _fail(self, gradient):
        raise out_of_memory()


class Failing(torch.optim.SGD):
    """An optimizer that runs out of memory the first few times."""

    failures = 0
    _step_supports_amp_scaling = True  # as a fused one: it changes nothing before it has its memory

    def step(self, closure=None):
        if Failing.failures:
            Failing.failures -= 1
            raise out_of_memory()
        return super().step(closure)


def train(store, most, where, steps=1, failures=0, **options):
    model = Net(most, where)
    kind = Failing if where == "optimizer" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    Failing.failures = failures
    loader = Loader(store, 16, "cpu", order="shuffled", seed=3)
    config = {"epochs": 2, "accumulation_steps": steps, **options}
    trainer = Trainer(model, loader, None, nn.functional.mse_loss, optimizer, None, config, "cpu")
    return trainer, trainer.fit()


def chunked(store, device="cpu", batch=16, **options):
    options = {"order": "shuffled", "seed": 3, "chunk_bytes": CHUNK_BYTES, **options}
    return Loader(store, batch, device, **options)


def fail_while_large(loader, at=5):
    """Something to call before a piece of work: out of memory from the `at`-th call on, until chunks gave way."""
    large, calls = loader.device_bytes, []

    def check():
        calls.append(1)
        if len(calls) >= at and loader.device_bytes == large:
            raise out_of_memory()

    return check


def inject(monkeypatch, where, check):
    if where == "assembly":
        assemble = Loader._assemble

        def guarded(self, *args, **named):
            check()
            return assemble(self, *args, **named)

        monkeypatch.setattr(Loader, "_assemble", guarded)
        return
    name = {"forward": "forward_backward", "update": "update"}[where]
    original = getattr(Step, name)

    def before(self, *args, **kwargs):
        check()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Step, name, before)


def train_chunked(store, loader, device="cpu", val=None, **options):
    model = Net(1000, "").to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {"epochs": 3, "precision": "fp32", "capture": "off", **options}
    trainer = Trainer(model, loader, val, nn.functional.mse_loss, optimizer, None, config, device)
    return trainer, trainer.fit()


def read_rows(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `write_rows` wrote."""
    with h5py.File(path) as file:
        return torch.from_numpy(file["features"][:]), torch.from_numpy(file["targets"][:])
