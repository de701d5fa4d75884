"""The story in twenty seconds: made-up bars, packed, checked, planned, read and trained on both ways.

Enters: a folder. Leaves: CSV files, a store, and a `DemoResult` with measured figures: what was
stored, what a file of materialised windows takes, how fast each gives batches, and how fast the same
small model trains on either. Costs: under 20 s on two cores; half a gigabyte of disk for a moment. No
GPU needed.

The other way is that of S0 before its chunk loader: windows written out to HDF5, a torch DataLoader that
reads them sample by sample, a plain loop. Model, first weights, batches and their order are the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from stoker.loader.loader import Loader
from stoker.machine import probe
from stoker.packing import PackOptions, PackResult, pack
from stoker.plan import Plan, make_plan, store_facts
from stoker.recipes.contract import Job
from stoker.recipes.forex import ForexRecipe
from stoker.report import Progress, Silent
from stoker.sources.bars import BarsSource
from stoker.store.fields import Array
from stoker.store.inspection import Inspection, inspect_store
from stoker.store.reader import Store, open_store
from stoker.train.trainer import EpochReport, Trainer

WINDOWS = (("M1", 480), ("M5", 288), ("M15", 192), ("H1", 96), ("H4", 48))
BATCH_SIZE = 128
TRAINED = ("H1", "H4")
"""Timeframes of the small training job: all five would take minutes on a CPU."""
_TRAINED_SAMPLES = 1024
_ROUNDS = 3
_LEARNING_RATE = 1e-3
_MINUTE_NS = 60_000_000_000
_MINUTES = {"M1": 1, "M5": 5, "M15": 15, "H1": 60, "H4": 240}
_WEEK_MINUTES, _OPEN_MINUTES = 7 * 1440, 5 * 1440
_FIRST_SUNDAY_NS = 1_725_832_800_000_000_000  # Sunday 2024-09-08 22:00, when the week opens


@dataclass(frozen=True)
class Reading:
    """One way of reading an epoch of windows.

    Attributes:
        stored_bytes: On disk.
        seconds: For all batches of one epoch, in order, from the page cache.
        window_bytes: Handed out in that time.
        num_samples: In the epoch.
    """

    stored_bytes: int
    seconds: float
    window_bytes: int
    num_samples: int


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
class DemoResult:
    """What the demo measured, and what `stoker plan` says of the store."""

    packed: PackResult
    inspection: Inspection
    plan: Plan
    series: Reading
    materialised: Reading
    naive: Training
    trained: Training


def run_demo(
    folder: Path, weeks: int = 9, seed: int = 0, progress: Progress | None = None
) -> DemoResult:
    """Make bars, pack them, inspect and plan the store, and read and train on it both ways.

    Args:
        folder: Where `bars/` and `store/` go.
        weeks: How much data; nine weeks are 64,800 one-minute bars.
        seed: Of the made-up prices and of the model's weights.
        progress: Told about the longer steps.
    """
    progress = progress or Silent()
    progress.say(f"making {weeks} weeks of EURUSD-like bars in five timeframes")
    make_bars(folder / "bars", weeks, seed)
    source = BarsSource((folder / "bars",), windows=WINDOWS, horizon=36)
    packed = pack(source, folder / "store", PackOptions(jobs=1), progress)
    with open_store(folder / "store") as store, _windows_file(folder / "windows.h5") as path:
        inspection = inspect_store(store, progress)
        plan = _make_plan(store)
        series = _measure_series(store)
        progress.say("writing the same windows out, the way chunk loaders want them")
        _write_windows(store, path)
        materialised = _measure_materialised(store, path)
        progress.say("training the same small forex model on both")
        naive, trained = train_both_ways(store, path, seed)
    return DemoResult(packed, inspection, plan, series, materialised, naive, trained)


@contextlib.contextmanager
def _windows_file(path: Path) -> Iterator[Path]:
    """Lend a path; what was written there goes, however the demo ends."""
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _make_plan(store: Store) -> Plan:
    machine = probe(store.path)
    seen = [gpu.memory_free_bytes for gpu in machine.gpus if gpu.visible is not False]
    return make_plan(
        store_facts(store.manifest),
        gpu_memory_bytes=seen[0] if seen else None,
        ram_bytes=machine.ram_available_bytes or 8 << 30,
        batch_size=BATCH_SIZE,
        threads=store.threads,
    )


# -- made-up bars --------------------------------------------------------------------------


def make_bars(folder: Path, weeks: int, seed: int) -> None:
    """Write `EURUSD_<TF>.csv` for five timeframes: volatility that clusters, weekends missing."""
    folder.mkdir(parents=True, exist_ok=True)
    minute = _make_minutes(weeks, np.random.default_rng(seed))
    for name, minutes in _MINUTES.items():
        _write_csv(folder / f"EURUSD_{name}.csv", _resample(minute, minutes))


def _make_minutes(weeks: int, rng: np.random.Generator) -> dict[str, Array]:
    week = np.arange(weeks)[:, None] * _WEEK_MINUTES + np.arange(_OPEN_MINUTES)[None, :]
    opened = week.reshape(-1)
    daily = 1 + 0.6 * np.sin(2 * np.pi * (opened % 1440) / 1440 - 2)
    calm = np.exp(0.5 * np.convolve(rng.normal(size=len(opened)), np.ones(240) / 240**0.5, "same"))
    steps = rng.standard_t(4, size=(4, len(opened))) * 2e-5 * daily * calm
    # Four ticks a minute make a bar with an open, a close and something in between.
    path = 1.1 * np.exp(np.cumsum(steps.T.reshape(-1))).reshape(-1, 4)
    return {
        "time": _FIRST_SUNDAY_NS + opened * _MINUTE_NS,
        "open": path[:, 0],
        "high": path.max(axis=1),
        "low": path.min(axis=1),
        "close": path[:, -1],
        "volume": np.rint(40 * daily * calm * rng.gamma(4, size=len(opened))) + 1,
    }


def _resample(minute: dict[str, Array], minutes: int) -> dict[str, Array]:
    """Bars of `minutes`, on the clock's own boundaries, from one-minute bars."""
    slot = minute["time"] // (minutes * _MINUTE_NS)
    first = np.flatnonzero(np.diff(slot, prepend=-1))
    last = np.append(first[1:], len(slot)) - 1
    return {
        "time": slot[first] * minutes * _MINUTE_NS,
        "open": minute["open"][first],
        "high": np.maximum.reduceat(minute["high"], first),
        "low": np.minimum.reduceat(minute["low"], first),
        "close": minute["close"][last],
        "volume": np.add.reduceat(minute["volume"], first),
    }


def _write_csv(path: Path, bars: dict[str, Array]) -> None:
    times = np.datetime_as_string(bars["time"].astype("datetime64[ns]"), unit="m")
    prices = np.column_stack([bars[name] for name in ("open", "high", "low", "close")])
    lines = ["time,open,high,low,close,tick_volume"]
    for text, price, volume in zip(times, prices.tolist(), bars["volume"].tolist(), strict=True):
        lines.append(f"{text.replace('T', ' ')},{','.join(f'{x:.5f}' for x in price)},{volume:.0f}")
    path.write_text("\n".join(lines) + "\n")


# -- reading both ways ---------------------------------------------------------------------


def _measure_series(store: Store) -> Reading:
    """Read each series once and cut every batch from it."""
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


def _write_windows(store: Store, path: Path) -> None:
    """Write all windows and the targets to one HDF5 file."""
    cut = _window_cutter(store)
    with h5py.File(path, "w") as file:
        for name, window in WINDOWS:
            shape = (store.num_samples, window, store.fields[name].shape[0])
            file.create_dataset(name, shape, "f4")
        for low, high in _batches(store.num_samples):
            for (name, _), windows in zip(WINDOWS, cut(low, high), strict=True):
                file[name][low:high] = windows
        file["targets"] = store.read_rows("targets", 0, store.num_samples)


def _measure_materialised(store: Store, path: Path) -> Reading:
    """Read the windows back in batches."""
    began = time.perf_counter()
    given = 0
    with h5py.File(path) as file:
        for low, high in _batches(store.num_samples):
            given += sum(file[name][low:high].nbytes for name, _ in WINDOWS)
    return Reading(path.stat().st_size, time.perf_counter() - began, given, store.num_samples)


def _batches(num_samples: int) -> Iterator[tuple[int, int]]:
    for low in range(0, num_samples, BATCH_SIZE):
        yield low, min(low + BATCH_SIZE, num_samples)


# -- training both ways --------------------------------------------------------------------


@dataclass(frozen=True)
class _Small:
    """A small forex job with its optimizer and its loader."""

    job: Job
    optimizer: torch.optim.Optimizer
    loader: Loader


def _make_small(store: Store, seed: int) -> _Small:
    options = {
        "timeframes": list(TRAINED),
        "d_model": 16,
        "layers": 1,
        "dropout": 0.0,
        "gaps": "ignore",  # the written-out windows do not say where bars are missing
    }
    job = ForexRecipe().make_job(store, options, seed)
    samples = job.samples["train"][:_TRAINED_SAMPLES]
    loader = Loader(
        store, BATCH_SIZE, "cpu", order="shuffled", seed=seed, fields=job.fields, samples=samples
    )
    return _Small(job, job.make_optimizer(job.model.parameters(), _LEARNING_RATE), loader)


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
            {"precision": "fp32"}, "cpu", unpack=ours.job.unpack,
        )  # fmt: skip
        plain, reports = [], []
        for _ in range(_ROUNDS):
            plain.append(_naive_epoch(naive, windows, order))
            reports.append(trainer.train_epoch())
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
