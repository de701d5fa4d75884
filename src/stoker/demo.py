"""The story in one minute: made-up bars, packed, checked, and read both ways.

Enters: a folder. Leaves: CSV files, a store, and a `DemoResult` with measured figures: what was
stored, what a file of materialised windows takes, and how fast each gives batches. Costs: well
under a minute on two cores; half a gigabyte of disk for a moment. No GPU needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from stoker.packing import PackOptions, PackResult, pack
from stoker.report import Progress, Silent
from stoker.sources.bars import BarsSource
from stoker.store.fields import Array
from stoker.store.inspection import Inspection, inspect_store
from stoker.store.reader import Store, open_store

WINDOWS = (("M1", 480), ("M5", 288), ("M15", 192), ("H1", 96), ("H4", 48))
BATCH_SIZE = 128
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
class DemoResult:
    """What the demo measured."""

    packed: PackResult
    inspection: Inspection
    series: Reading
    materialised: Reading


def run_demo(
    folder: Path, weeks: int = 9, seed: int = 0, progress: Progress | None = None
) -> DemoResult:
    """Make bars, pack them, inspect the store, and read an epoch both ways.

    Args:
        folder: Where `bars/` and `store/` go.
        weeks: How much data; nine weeks are 64,800 one-minute bars.
        seed: Of the made-up prices.
        progress: Told about the longer steps.
    """
    progress = progress or Silent()
    progress.say(f"making {weeks} weeks of EURUSD-like bars in five timeframes")
    make_bars(folder / "bars", weeks, seed)
    source = BarsSource((folder / "bars",), windows=WINDOWS, horizon=36)
    packed = pack(source, folder / "store", PackOptions(jobs=1), progress)
    with open_store(folder / "store") as store:
        inspection = inspect_store(store, progress)
        series = _measure_series(store)
        progress.say("writing the same windows out, the way chunk loaders want them")
        materialised = _measure_materialised(store, folder / "windows.h5")
    return DemoResult(packed, inspection, series, materialised)


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


def _measure_materialised(store: Store, path: Path) -> Reading:
    """Write all windows to one HDF5 file, read them back in batches, and remove it."""
    try:
        cut = _window_cutter(store)
        with h5py.File(path, "w") as file:
            for name, window in WINDOWS:
                shape = (store.num_samples, window, store.fields[name].shape[0])
                file.create_dataset(name, shape, "f4")
            for low, high in _batches(store.num_samples):
                for (name, _), windows in zip(WINDOWS, cut(low, high), strict=True):
                    file[name][low:high] = windows
        began = time.perf_counter()
        given = 0
        with h5py.File(path) as file:
            for low, high in _batches(store.num_samples):
                given += sum(file[name][low:high].nbytes for name, _ in WINDOWS)
        return Reading(path.stat().st_size, time.perf_counter() - began, given, store.num_samples)
    finally:
        path.unlink(missing_ok=True)


def _batches(num_samples: int) -> Iterator[tuple[int, int]]:
    for low in range(0, num_samples, BATCH_SIZE):
        yield low, min(low + BATCH_SIZE, num_samples)
