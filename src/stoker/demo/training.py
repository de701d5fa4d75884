"""Reads and trains in two ways: windows written out to HDF5, with a DataLoader; and stored series, with stoker.

Enters: a store of bars. Leaves: the HDF5 file of its windows; a `Reading` and a `Training` of each way, with equal
losses. Costs: about ten seconds on two cores; half a gigabyte of disk for nine weeks, until the file is deleted.
Model, initial weights, batches and their order are the same in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from stoker.loader.loader import Loader
from stoker.ownership import always, writing
from stoker.recipes.contract import Job
from stoker.recipes.forex.recipe import ForexRecipe
from stoker.report import Silent
from stoker.store.fields import Array
from stoker.store.reader import Store
from stoker.train.trainer import EpochReport, Trainer

WINDOWS = (("M1", 480), ("M5", 288), ("M15", 192), ("H1", 96), ("H4", 48))
BATCH_SIZE = 128


@dataclass(frozen=True)
class Reading:
    """Measured cost of reading the windows of one epoch in order, from the page cache, in one of the two ways."""

    stored_bytes: int
    seconds: float
    window_bytes: int  # bytes of all windows that were read
    num_samples: int


def measure_series(store: Store) -> Reading:
    """Measure reading each series once and cutting every batch of windows from it."""
    began = time.perf_counter()
    cut = _window_cutter(store)
    given = sum(
        sum(window.nbytes for window in cut(low, high)) for low, high in _batches(store.num_samples)
    )
    return Reading(store.num_bytes, time.perf_counter() - began, given, store.num_samples)


def _window_cutter(store: Store) -> Callable[[int, int], list[Array]]:
    """Return a function from a range of samples to one array of windows per timeframe."""
    views = []
    for name, _ in WINDOWS:
        rows, ends = store.read_series(name, "rows"), store.read_series(name, "ends")
        window = store.fields[name].window
        # A view: nothing is copied until a batch is taken from it.
        view = np.lib.stride_tricks.sliding_window_view(rows, window, axis=0).swapaxes(1, 2)
        views.append((view, ends - window))
    return lambda low, high: [view[starts[low:high]] for view, starts in views]


def write_windows(store: Store, path: Path) -> None:
    """Write all windows and the targets to one HDF5 file."""
    cut = _window_cutter(store)
    with writing(path, always) as temporary, h5py.File(temporary, "x") as file:
        for name, window in WINDOWS:
            shape = (store.num_samples, window, store.fields[name].shape[0])
            file.create_dataset(name, shape, "f4")
        for low, high in _batches(store.num_samples):
            for (name, _), windows in zip(WINDOWS, cut(low, high), strict=True):
                file[name][low:high] = windows
        file["targets"] = store.read_rows("targets", 0, store.num_samples)


def measure_materialised(store: Store, path: Path) -> Reading:
    """Measure reading the written-out windows in batches."""
    began = time.perf_counter()
    given = 0
    with h5py.File(path) as file:
        for low, high in _batches(store.num_samples):
            given += sum(file[name][low:high].nbytes for name, _ in WINDOWS)
    return Reading(path.stat().st_size, time.perf_counter() - began, given, store.num_samples)


def _batches(num_samples: int) -> Iterator[tuple[int, int]]:
    for low in range(0, num_samples, BATCH_SIZE):
        yield low, min(low + BATCH_SIZE, num_samples)


TRAINED = ("H1", "H4")  # timeframes of the small training job: all five would take minutes on a CPU
OPTIONS: dict[str, Any] = {
    "timeframes": list(TRAINED),
    "d_model": 16,
    "layers": 1,
    "dropout": 0.0,
    "gaps": "ignore",  # the written-out windows do not record missing bars
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
