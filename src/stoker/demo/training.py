"""The same small forex model trained both ways: a DataLoader over written-out windows, and stoker.

Enters: a store of bars and the file of its windows. Leaves: a `Training` each, with equal losses. Costs: about
ten seconds on two cores. Model, first weights, batches and their order are the same.
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
    """One way of training the small forex job.

    Attributes:
        num_samples: Of an epoch.
        seconds: Of each epoch.
        wait_shares: Of that time spent waiting for batches.
        losses: Mean training loss of each epoch.
    """

    num_samples: int
    seconds: tuple[float, ...]
    wait_shares: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def samples_per_second(self) -> float:
        """Of the fastest epoch: what others on this machine slowed down is no measure."""
        return self.num_samples / min(self.seconds)

    @property
    def wait_share(self) -> float:
        """Of the fastest epoch."""
        return self.wait_shares[self.seconds.index(min(self.seconds))]


@dataclass(frozen=True)
class _Small:
    """A small forex job with its optimizer and its loader."""

    job: Job
    optimizer: torch.optim.Optimizer
    loader: Loader


def _make_small(store: Store, seed: int) -> _Small:
    job = ForexRecipe().make_job(store, OPTIONS, seed)
    samples = job.samples["train"][:_TRAINED_SAMPLES]
    loader = Loader(
        store, BATCH_SIZE, "cpu", order="shuffled", seed=seed, fields=job.fields, samples=samples
    )
    return _Small(job, job.make_optimizer(job.model.parameters(), LEARNING_RATE), loader)


def train_both_ways(store: Store, path: Path, seed: int) -> tuple[Training, Training]:
    """Train the same model from written-out windows and by stoker, epoch by epoch in turn.

    Args:
        store: Packed from bars.
        path: HDF5 file with `(n, window, features)` per timeframe, and targets.
        seed: Of weights and order.
    """
    naive, ours = _make_small(store, seed), _make_small(store, seed)
    with naive.loader, ours.loader, h5py.File(path) as file:
        order = [batch.sample_ids.tolist() for batch in naive.loader]
        windows = _Windows(file)
        trainer = Trainer(
            ours.job.model, ours.loader, None, ours.job.criterion, ours.optimizer, None,
            {"precision": "fp32"}, "cpu", unpack=ours.job.unpack, progress=Silent(),
        )  # fmt: skip
        plain, reports = [], []
        for _ in range(_ROUNDS):
            plain.append(_naive_epoch(naive, windows, order))
            reports.append(trainer.train_epoch(0))  # the same batches in every round
        count = len(naive.loader.samples)
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


def _naive_epoch(small: _Small, windows: _Windows, order: list[list[int]]) -> EpochReport:
    """Train by a DataLoader and a plain loop, on the given batches."""
    small.job.model.train()
    began = time.perf_counter()
    batches = iter(torch.utils.data.DataLoader(windows, batch_sampler=order))
    waited = total = 0.0
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        total += _naive_step(small, batch) * len(batch["targets"])
    seconds = time.perf_counter() - began
    count = sum(map(len, order))
    return EpochReport(0, total / count, {}, count, seconds, waited / seconds)


def _naive_step(small: _Small, batch: dict[str, Any]) -> float:
    job = small.job
    for name in TRAINED:
        batch[f"{name}/gap"] = batch[name].new_zeros(batch[name].shape[:2])
    inputs, targets = job.unpack(batch)
    loss = job.criterion(job.model(inputs), targets)
    small.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    small.optimizer.step()
    return loss.item()
