"""Reads through h5py: how long they take, how many bytes they return, how many bytes HDF5 had to read.

Enters: slices of h5py datasets. Leaves: totals by dataset. Costs about 10 µs per read, which itself takes about 100.

HDF5's chunk cache is simulated, so that neighbouring rows of one chunk are not counted twice. After 2000 reads of a
dataset only the time is measured.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from typing import Any

from . import clocks, hooks, places, recorder, sampling

_CACHE_BYTES = 8 << 20
_MOST_COUNTED_READS = 2000
_MOST_CHUNKS_LISTED = 4096


def install(h5py: Any) -> None:
    """Watch slices of datasets in this process."""
    hooks.replace(h5py.Dataset, "__getitem__", _timed_getitem)
    hooks.replace(h5py.Dataset, "read_direct", _timed_read_direct)


def _timed_getitem(original: Any) -> Any:
    def __getitem__(self: Any, args: Any, *more: Any, **kwargs: Any) -> Any:  # noqa: N807
        if not recorder.watching:  # steps without these clocks give the time of a step
            return original(self, args, *more, **kwargs)
        began = time.perf_counter()
        values = original(self, args, *more, **kwargs)
        ended = time.perf_counter()
        # The script gets its values even if the probe fails from here on: a failure becomes a note.
        with recorder.guarded("h5py"):
            _note(self, args, getattr(values, "nbytes", 0), began, ended, sys._getframe(1))
        return values

    return __getitem__


def _timed_read_direct(original: Any) -> Any:
    def read_direct(self: Any, dest: Any, source_sel: Any = None, dest_sel: Any = None) -> Any:
        if not recorder.watching:
            return original(self, dest, source_sel, dest_sel)
        began = time.perf_counter()
        result = original(self, dest, source_sel, dest_sel)
        ended = time.perf_counter()
        with recorder.guarded("h5py"):
            selection = source_sel if source_sel is not None else ()
            _note(self, selection, getattr(dest, "nbytes", 0), began, ended, sys._getframe(1))
        return result

    return read_direct


def _note(dataset: Any, selection: Any, used: int, began: float, ended: float, frame: Any) -> None:
    if sampling.active_thread != clocks.current_thread():
        return  # this thread is not loading: a script may read anything before it trains
    seen = recorder.get()
    key = (dataset.file.filename, dataset.name)
    facts = seen.hdf5.get(key)
    if facts is None:
        facts = seen.hdf5[key] = {
            "name": f"{key[0]}:{key[1]}",
            "shape": list(dataset.shape),
            "chunks": None if dataset.chunks is None else list(dataset.chunks),
            "compression": dataset.compression or _other_filter(dataset),
            "itemsize": dataset.dtype.itemsize,
            "where": places.place_of(frame),
            "reads": 0,
            "seconds": 0.0,
            "counted": 0,
            "used": 0,
            "touched": 0,
        }
        _CACHES[key] = {}
    facts["reads"] += 1
    facts["seconds"] += ended - began
    if facts["counted"] < _MOST_COUNTED_READS:
        facts["counted"] += 1
        facts["used"] += used
        facts["touched"] += touched_bytes(facts, selection, used, _CACHES[key])


_CACHES: dict[Any, dict[Any, None]] = {}


def _other_filter(dataset: Any) -> str | None:
    """Return the name of a compression filter that h5py itself does not list."""
    known = {"shuffle", "fletcher32", "scaleoffset"}
    return next((str(name) for name in getattr(dataset, "_filters", {}) if name not in known), None)


def touched_bytes(facts: dict[str, Any], selection: Any, used: int, cache: dict[Any, None]) -> int:
    """Return the bytes of all chunks that a selection touches and a cache of 8 MiB does not hold."""
    chunks, shape = facts["chunks"], facts["shape"]
    if not chunks:
        return used
    ranges = _chunk_ranges(selection, shape, chunks)
    if ranges is None:
        return used  # a mask or a region: unknown, so no waste is claimed
    chunk_bytes = int(math.prod(chunks, start=facts["itemsize"]))
    count = math.prod(len(one) for one in ranges)
    if count > _MOST_CHUNKS_LISTED:
        return count * chunk_bytes  # too many to list: all are taken as read
    room = _CACHE_BYTES // max(1, chunk_bytes)
    missed = 0
    for chunk in itertools.product(*ranges):
        # Removed and inserted again, so that the least recently used chunk is first: HDF5 evicts it first.
        if cache.pop(chunk, cache) is not None:
            missed += 1
        if room:
            cache[chunk] = None
            if len(cache) > room:
                del cache[next(iter(cache))]
    return missed * chunk_bytes


def _chunk_ranges(selection: Any, shape: Any, chunks: Any) -> list[Any] | None:
    """Return the chunk numbers touched along each axis; None for other kinds of selections."""
    words = list(selection) if isinstance(selection, tuple) else [selection]
    if any(word is Ellipsis for word in words):
        at = next(i for i, word in enumerate(words) if word is Ellipsis)
        words[at : at + 1] = [slice(None)] * (len(shape) - len(words) + 1)
    words += [slice(None)] * (len(shape) - len(words))
    if len(words) != len(shape):
        return None
    ranges: list[Any] = []
    for word, length, size in zip(words, shape, chunks, strict=True):
        if isinstance(word, slice):
            start, stop, step = word.indices(length)
            if stop <= start:
                return None
            met = range(start, stop, step)
            if step >= size:  # chunks are skipped: list those that are met
                ranges.append(sorted({place // size for place in met}))
            else:
                ranges.append(range(met[0] // size, met[-1] // size + 1))
        elif hasattr(word, "__index__"):
            ranges.append([(int(word) % length if length else 0) // size])
        else:
            try:
                places = [int(place) for place in word]
            except (TypeError, ValueError):
                return None
            ranges.append(sorted({place // size for place in places}))
    return ranges
