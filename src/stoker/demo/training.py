"""Trains the same small forex model in two ways: with a DataLoader over written-out windows, and with stoker.

Enters: a store of bars and the file of its windows. Leaves: a `Training` for each, with equal losses. Costs: about
ten seconds on two cores. Model, initial weights, batches and their order are the same in both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import torch

from stoker.demo.reading import BATCH_SIZE
from stoker.loader.loader import Loader
from stoker.recipes.contract import Job
from stoker.recipes.forex.recipe import ForexRecipe
from stoker.report import Silent
from stoker.store.fields import Array
from stoker.store.reader import Store
from stoker.train.trainer import EpochReport, Trainer

TRAINED = ("H1", "H4")
"""Timeframes of the small training job: all five would take minutes on a CPU."""
OPTIONS: dict[str, Any] = {
    "timeframes": list(TRAINED),
    "d_model": 16,
    "layers": 1,
    "dropout": 0.0,
    "gaps": "ignore",  # the written-out windows do not say where bars are missing
}
LEARNING_RATE = 1e-3
_TRAINED_SAMPLES = 1024
_ROUNDS = 3


@dataclass(frozen=True)
class Training:
    """Measurements of the small forex job, trained in one way: time, share of waiting and mean loss of each epoch."""

    num_samples: int
    seconds: tuple[float, ...]
    wait_shares: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def samples_per_second(self) -> float:
        """Rate of the fastest epoch: slower ones may have shared the machine with other work."""
        return self.num_samples / min(self.seconds)

    @property
    def wait_share(self) -> float:
        """Share of the fastest epoch spent waiting for batches."""
        return self.wait_shares[self.seconds.index(min(self.seconds))]


def _make_job(store: Store, seed: int) -> tuple[Job, torch.optim.Optimizer, Loader]:
    job = ForexRecipe().make_job(store, OPTIONS, seed)
    samples = job.samples["train"][:_TRAINED_SAMPLES]
    loader = Loader(
        store, BATCH_SIZE, "cpu", order="shuffled", seed=seed, fields=job.fields, samples=samples
    )
    return job, job.make_optimizer(job.model.parameters(), LEARNING_RATE), loader


def train_both_ways(store: Store, path: Path, seed: int) -> tuple[Training, Training]:
    """Train the same model from the windows in the HDF5 file `path` and by stoker, epoch by epoch in turn."""
    plain_job, plain_optimizer, plain_loader = _make_job(store, seed)
    job, optimizer, loader = _make_job(store, seed)
    with plain_loader, loader, h5py.File(path) as file:
        order = [batch.sample_ids.tolist() for batch in plain_loader]
        trainer = Trainer(
            job.model, loader, None, job.criterion, optimizer, None,
            {"precision": "fp32"}, "cpu", unpack=job.unpack, progress=Silent(),
        )  # fmt: skip
        plain, reports = [], []
        for _ in range(_ROUNDS):
            plain.append(_naive_epoch(plain_job, plain_optimizer, _Windows(file), order))
            reports.append(trainer.train_epoch(0))  # the same batches in every round
        count = len(plain_loader.samples)
    return _as_training(count, plain), _as_training(count, reports)


def _as_training(num_samples: int, reports: Sequence[EpochReport]) -> Training:
    return Training(
        num_samples,
        tuple(report.seconds for report in reports),
        tuple(report.wait_share for report in reports),
        tuple(report.train_loss for report in reports),
    )


class _Windows(torch.utils.data.Dataset[dict[str, Array]]):
    """One written-out sample at a time, as a DataLoader asks for them."""

    def __init__(self, file: h5py.File) -> None:
        self._file = file

    def __getitem__(self, sample: int) -> dict[str, Array]:
        return {name: self._file[name][sample] for name in (*TRAINED, "targets")}


def _naive_epoch(
    job: Job, optimizer: torch.optim.Optimizer, windows: _Windows, order: list[list[int]]
) -> EpochReport:
    """Train for one epoch on the given batches with a DataLoader and a plain loop."""
    job.model.train()
    began = time.perf_counter()
    batches = iter(torch.utils.data.DataLoader(windows, batch_sampler=order))
    waited = total = 0.0
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        for name in TRAINED:
            batch[f"{name}/gap"] = batch[name].new_zeros(batch[name].shape[:2])
        inputs, targets = job.unpack(batch)
        loss = job.criterion(job.model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        optimizer.step()
        total += loss.item() * len(batch["targets"])
    seconds = time.perf_counter() - began
    count = sum(map(len, order))
    return EpochReport(0, total / count, {}, count, seconds, waited / seconds)
