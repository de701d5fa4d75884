"""The work of a stoker loader by kind: reading, decoding, gathering, augmenting, copying, each measured alone.

Enters: a loader and one batch of it. Leaves: `LoaderWork`, seconds of one batch in one thread, and the HDF5 layout of
datasets that are not contiguous. Costs a fraction of a second: each part is run a few times.

Resident data was read once, before the first step: reading is not part of a step and counts as 0.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from h5py.h5z import FILTER_DEFLATE, FILTER_LZF

from stoker.doctor.measurements import Hdf5Facts, LoaderWork
from stoker.loader.batch import Batch
from stoker.loader.loader import Loader
from stoker.measure.readings import Spread
from stoker.recipes.run import Run
from stoker.store.arrays import StoredArray

_REPEATS = 7
_READ_BYTES = 32 << 20
_FILTERS = {FILTER_DEFLATE: "gzip", FILTER_LZF: "lzf"}


class LoaderShare(NamedTuple):
    """The result of `split_loader`.

    Attributes:
        work: Seconds of one batch in one thread.
        blocked_share: Share of these that was neither computing nor queued for a core: a disk, a network.
        hdf5: Datasets that are chunked or compressed.
    """

    work: LoaderWork
    blocked_share: float
    hdf5: tuple[Hdf5Facts, ...] = ()


def split_loader(run: Run, loader: Loader, batch: Batch, copy_seconds: float | None) -> LoaderShare:
    """Measure each part of the loader's work on one batch.

    Args:
        run: The job, whose augmentation is used.
        loader: Its loader, open.
        batch: One batch of the loader.
        copy_seconds: Seconds of copying one batch to the device; None if there is no such copy.
    """
    collate, transform = _gather_and_augment(run, loader)
    if loader.tier == "resident":
        return LoaderShare(LoaderWork(0.0, 0.0, transform, collate, 0.0), 0.0)
    copied = copy_seconds if loader.device.type == "cuda" else 0.0
    reading = _read(loader, len(batch.positions))
    work = LoaderWork(reading.read, reading.decode, transform, collate, copied)
    return LoaderShare(work, reading.blocked / max(work.total, 1e-12), reading.hdf5)


def time_copy(batch: Batch, device: torch.device) -> Spread | None:
    """Return the seconds of copying a batch from pinned memory to the GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    num_bytes = sum(tensor.nbytes for tensor in batch.values())
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    took = []
    for _ in range(_REPEATS + 2):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return Spread.of(took[2:])


def _gather_and_augment(run: Run, loader: Loader) -> tuple[float, float]:
    """Return the seconds of gathering a batch, and of augmenting it."""
    augmentation = run.drawn_augmentation or loader.augment
    indices = loader.index_batches()
    index = next(indices)

    def assemble() -> None:
        loader.assemble(index.indices, index.totals)

    loader.use_augmentation(None)
    gather = _median(assemble, loader.device)
    augmented = gather
    if augmentation is not None:
        loader.use_augmentation(augmentation)
        augmented = _median(assemble, loader.device)
    return gather, max(0.0, augmented - gather)


def _median(work: Callable[[], None], device: torch.device) -> float:
    took = []
    for _ in range(_REPEATS + 2):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took[2:])


# -- reading ---------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """A range of rows of one stored array."""

    array: StoredArray
    first: int
    last: int

    @property
    def num_bytes(self) -> int:
        """Of the rows, decoded."""
        return (self.last - self.first) * self.array.location.row_bytes


class _Reading(NamedTuple):
    """Seconds of one batch in one thread, and the layout of its datasets."""

    read: float
    decode: float
    blocked: float
    hdf5: tuple[Hdf5Facts, ...]


def _read(loader: Loader, batch_size: int) -> _Reading:
    """Read as many samples in a row as a chunk would, in one thread; scale to one batch."""
    per_batch = max(1, sum(rows.num_bytes for rows in _rows(loader, 0, batch_size)))
    num_samples = min(len(loader.samples), batch_size * max(1, _READ_BYTES // per_batch))
    scale = batch_size / num_samples
    read = decode = 0.0
    facts = []
    waited = _idle_seconds()
    for rows in _rows(loader, 0, num_samples):
        raw, whole = _time_rows(rows)
        read += raw * scale
        decode += max(0.0, whole - raw) * scale
        if rows.array.location.layout != "contiguous":
            facts.append(_describe(rows, whole, scale))
    # Chunks were read twice, decoded and raw, but only the first time may have waited for the disk.
    waited = max(0.0, _idle_seconds() - waited) * scale
    return _Reading(read, decode, min(waited, read), tuple(facts))


def _idle_seconds() -> float:
    """Return the seconds in which this thread neither ran nor queued for a core, up to a constant."""
    queued = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        queued = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return time.perf_counter() - time.thread_time() - queued


def _rows(loader: Loader, start: int, stop: int) -> Iterator[_Rows]:
    for column in loader.columns:
        low, high = column.extent(start, min(stop, len(loader.samples)))
        for values in column.values:
            for array, first, last, _ in values.spans(low, high):
                yield _Rows(array, first, last)


def _time_rows(rows: _Rows) -> tuple[float, float]:
    """Return the seconds for the bytes alone, and for the decoded rows."""
    began = time.perf_counter()
    rows.array.read(rows.first, rows.last)
    whole = time.perf_counter() - began
    location = rows.array.location
    if location.layout != "chunked":
        return whole, whole
    height = location.chunk_shape[0]
    began = time.perf_counter()
    for row in range(rows.first // height, -(-rows.last // height)):
        for chunk in location.chunks_at(row):
            rows.array.read_stored(chunk)
    return min(whole, time.perf_counter() - began), whole


def _describe(rows: _Rows, seconds: float, scale: float) -> Hdf5Facts:
    location = rows.array.location
    used = rows.num_bytes * scale
    return Hdf5Facts(
        name=f"{location.file}:{location.dataset}",
        shape=location.shape,
        chunks=location.chunk_shape or None,
        compression=next((_FILTERS[code] for code in location.filters if code in _FILTERS), None),
        bytes_used_per_batch=used,
        # A stoker loader reads samples in order, so every chunk is decoded once.
        bytes_touched_per_batch=used,
        seconds_per_batch=seconds * scale,
        reads_per_batch=_num_chunks(rows) * scale,
    )


def _num_chunks(rows: _Rows) -> int:
    height = (rows.array.location.chunk_shape or (rows.last - rows.first,))[0]
    found = range(rows.first // height, -(-rows.last // height))
    return sum(len(rows.array.location.chunks_at(row)) for row in found) or len(found)
