"""Measures one epoch of windows read in two ways: cut from stored series, and read from written-out windows.

Enters: a store of bars. Leaves: a `Reading` each, and the HDF5 file of windows. Costs: half a gigabyte of disk
for nine weeks, until the file is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from stoker.ownership import always, writing
from stoker.store.fields import Array
from stoker.store.reader import Store

WINDOWS = (("M1", 480), ("M5", 288), ("M15", 192), ("H1", 96), ("H4", 48))
BATCH_SIZE = 128


@dataclass(frozen=True)
class Reading:
    """Measured cost of reading the windows of one epoch in order, from the page cache, in one way."""

    stored_bytes: int
    seconds: float
    window_bytes: int
    num_samples: int


def measure_series(store: Store) -> Reading:
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
