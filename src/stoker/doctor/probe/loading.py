"""torch's DataLoader and its workers: how long the step waits, and how long a batch takes to load.

Enters: the DataLoaders of a script. Leaves: waits in the current step, and a row per fetch in the process that
loaded the batch. Costs about 3 µs per batch in the training process, 6 µs in the one that loads.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import threading
import time
from typing import Any

from . import clocks, hooks, places, recorder, sampling

_LOADER_VARIABLE = "STOKER_DOCTOR_LOADER"
_MOST_FETCH_ROWS = 4000
_ALL_FETCHES, _SHORT_FETCH_SECONDS = 64, 2e-3
_NUM_PLACES = 4
"""Number of lines that identify a DataLoader: the line that makes it, and its callers."""
_FEW_SAMPLES = 64
"""Each sample is timed in batches of up to this many samples: only small batches may be too small."""


class _OfThread(threading.local):
    """Whether this thread is loading a batch; its calls are then not part of the step."""

    inside = False


of_thread = _OfThread()


def install(torch: Any) -> None:
    """Observe every DataLoader of this process and every worker that it starts."""
    from torch.utils.data import dataloader
    from torch.utils.data._utils import fetch, worker

    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        hooks.replace(kind, "fetch", _timed_fetch)
    hooks.replace(fetch._BaseDatasetFetcher, "__init__", _with_timed_collate)
    hooks.replace(worker, "_worker_loop", _as_worker)
    hooks.replace(dataloader.DataLoader, "__init__", _noting_arguments)
    hooks.replace(dataloader.DataLoader, "__iter__", _timed_epoch_start)
    hooks.replace(dataloader._BaseDataLoaderIter, "__next__", _timed_next)
    hooks.replace(dataloader._MultiProcessingDataLoaderIter, "_shutdown_workers", _timed_shutdown)
    global _torch  # noqa: PLW0603
    _torch = torch


_torch: Any = None


# -- in the training process -----------------------------------------------------------------------


def _noting_arguments(original: Any) -> Any:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        overrides = recorder.get().overrides
        if overrides:
            with recorder.guarded("overrides"):
                args, kwargs = _overridden(signature, overrides, self, args, kwargs)
        original(self, *args, **kwargs)
        with recorder.guarded("DataLoader"):
            # A subclass that wraps another loader comes here twice; the first caller is the user's line.
            made_at = itertools.islice(places.own_places(sys._getframe(1)), _NUM_PLACES)
            self.__dict__.setdefault("_stoker_places", tuple(made_at))

    return __init__


def _overridden(
    signature: Any, overrides: dict[str, Any], loader: Any, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Return the arguments of a DataLoader with the doctor's overrides."""
    bound = signature.bind(loader, *args, **kwargs)
    given = bound.arguments
    for name, value in overrides.items():
        if name in signature.parameters and not (
            name == "batch_size" and given.get("batch_sampler") is not None
        ):
            given[name] = value
    if not given.get("num_workers"):
        for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context"):
            given.pop(name, None)
    return bound.args[1:], bound.kwargs


def _facts(loader: Any) -> dict[str, Any]:
    """Return the facts of a loader, made when it is first used.

    Loaders made on the same line with the same size share their facts: a script may make a new loader for every epoch.
    """
    seen = recorder.get()
    places = loader.__dict__.get("_stoker_places", ())
    length = _length(loader)
    key = (places, loader.batch_size, length)
    facts = seen.loaders.get(key)
    if facts is None:
        dataset = loader.dataset
        while type(dataset).__module__.startswith("torch.utils.data") and hasattr(
            dataset, "dataset"
        ):
            dataset = dataset.dataset
        names = ("__getitems__", "__getitem__", "__iter__")
        methods = [getattr(type(dataset), name, None) for name in names]
        context = loader.multiprocessing_context
        facts = seen.loaders[key] = {
            "number": len(seen.loaders),
            "workers": loader.num_workers,
            "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            "is_stream": isinstance(loader.dataset, _torch.utils.data.IterableDataset),
            "pin_memory": bool(loader.pin_memory),
            "persistent_workers": bool(loader.persistent_workers),
            "prefetch_factor": loader.prefetch_factor,
            "start_method": context.get_start_method() if context is not None else None,
            "where": places[0] if places else None,
            "dataset_where": _own_place(next(filter(None, methods), None)),
            "collate_where": _own_place(loader.collate_fn),
            "open_hdf5": _open_hdf5(dataset),
            "in_order": type(getattr(loader, "sampler", None)).__name__ == "SequentialSampler",
            "made": 0,
            "batches": 0,
            "epochs": [],
            "ends": [],
            "batch_bytes": None,
            "length": length,
        }
    if not loader.__dict__.setdefault("_stoker_counted", False):
        loader.__dict__["_stoker_counted"] = True
        facts["made"] += 1
    return facts


def _open_hdf5(dataset: Any) -> list[str] | None:
    """Return attribute and file name of an HDF5 file that the dataset holds open; None if there is none."""
    h5py: Any = sys.modules.get("h5py")
    if h5py is None:
        return None
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, (h5py.File, h5py.Group, h5py.Dataset)) and value:
            return [name, str(value.file.filename)]
    return None


def _own_place(function: Any) -> str | None:
    """Return where a function is defined if it is the user's; None for a library's."""
    place = places.place_of_function(function)
    return None if place is None or places.is_foreign(place.rsplit(":", 1)[0]) else place


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _timed_epoch_start(original: Any) -> Any:
    def __iter__(self: Any) -> Any:  # noqa: N807
        facts = None
        with recorder.guarded("epoch start"):
            facts = _facts(self)
        began, _, delay = clocks.read()
        # Workers that are started meanwhile learn from it which loader they work for, forked or spawned. If the script
        # fails to start them, the variable is as before.
        before = os.environ.get(_LOADER_VARIABLE)
        os.environ[_LOADER_VARIABLE] = str(facts["number"] if facts else -1)
        try:
            iterator = original(self)
        finally:
            if before is None:
                os.environ.pop(_LOADER_VARIABLE, None)
            else:
                os.environ[_LOADER_VARIABLE] = before
        with recorder.guarded("epoch start"):
            ended, _, queued = clocks.read()
            iterator._stoker_facts = facts
            iterator._stoker_first = _add_wait(recorder.get(), began, ended, queued - delay)
        return iterator

    return __iter__


def _timed_shutdown(original: Any) -> Any:
    """Time the end of workers whose iterator is dropped before its last batch; `__next__` is timed as a whole."""

    def _shutdown_workers(self: Any) -> Any:
        facts = getattr(self, "_stoker_facts", None)
        if facts is None or of_thread.inside or getattr(self, "_shutdown", True):
            return original(self)
        began, _, delay = clocks.read()
        try:
            return original(self)
        finally:
            with recorder.guarded("epoch end"):
                ended, _, queued = clocks.read()
                seconds = _add_wait(recorder.get(), began, ended, queued - delay)
                facts["ends"].append((recorder.get().num_steps, seconds))

    return _shutdown_workers


def _add_wait(seen: Any, began: float, ended: float, queued: float) -> float:
    """Add a wait to the current step; return its seconds without those queued for a core."""
    if clocks.current_thread() == seen.training_thread or not seen.training_thread:
        # If asking for a batch ends a step, the wait belongs to the new step.
        waited = ended - max(began, seen.step_start)
        seen.wait += waited
        seen.wait_delay += min(queued, waited)
        if seen.drawing:
            add_span(seen, "wait", began, ended)
    return max(0.0, ended - began - queued)


def _timed_next(original: Any) -> Any:
    def __next__(self: Any) -> Any:  # noqa: N807
        facts = getattr(self, "_stoker_facts", None)
        if facts is None or of_thread.inside:
            return original(self)
        seen = recorder.get()
        # Without workers the fetch reads these clocks itself, and a second reading would cost time.
        began, _, delay = clocks.read() if facts["workers"] else (time.perf_counter(), 0.0, 0.0)
        seen.loader_id = facts["number"]
        seen.fetch_delay = 0.0
        of_thread.inside = True
        try:
            data = original(self)
        except StopIteration:
            with recorder.guarded("epoch end"):
                seconds = _add_wait(seen, began, time.perf_counter(), seen.fetch_delay)
                facts["ends"].append((seen.num_steps, seconds))
            raise
        finally:
            of_thread.inside = False
        if facts["workers"]:
            ended, _, queued = clocks.read()
        else:
            ended, queued = time.perf_counter(), seen.fetch_delay
        try:
            if seen.kind in ("", "batch"):
                # Without an optimizer or backward pass, asking for a batch begins a step; the end of an epoch does not.
                seen.mark("batch", began)
                seen.step_start = began
            _note_batch(seen, self, facts, data, _add_wait(seen, began, ended, queued - delay))
        except Exception as error:  # noqa: BLE001  cheaper than a context manager
            recorder.note_failure("batch", error)
        return data

    return __next__


def _note_batch(seen: Any, iterator: Any, facts: dict[str, Any], data: Any, waited: float) -> None:
    count = facts["batches"] = facts["batches"] + 1
    if iterator._stoker_first is not None:
        facts["epochs"].append((seen.num_steps, iterator._stoker_first, waited))
        iterator._stoker_first = None
        seen.flags |= recorder.EPOCH_START
    if seen.training_thread and clocks.current_thread() != seen.training_thread:
        return
    number = facts["number"]
    if seen.loader_of_step not in (-1, number):
        seen.flags |= recorder.OTHER_LOADER
    seen.loader_of_step = number
    seen.batches += 1
    seen.samples += _num_samples(data) or facts["batch_size"] or 0
    if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...: reading a batch costs time
        sizes = (tensor.numel() * tensor.element_size() for tensor in _tensors(data))
        facts["batch_bytes"] = int(sum(sizes))
        _look_for_bad_values(seen, data, facts)
        seen.disturb()


def _tensors(data: Any, depth: int = 0) -> Any:
    """Yield the tensors of a nested batch."""
    if isinstance(data, _torch.Tensor):
        yield data
    elif isinstance(data, dict) and depth < 4:
        for value in data.values():
            yield from _tensors(value, depth + 1)
    elif isinstance(data, (list, tuple)) and depth < 4:
        for value in data[:64]:
            yield from _tensors(value, depth + 1)
    elif depth < 2 and hasattr(data, "__dict__") and not callable(data):
        for value in list(vars(data).values())[:64]:
            yield from _tensors(value, depth + 2)


def _num_samples(data: Any) -> int | None:
    first = data[0] if type(data) in (list, tuple) and data else data
    if type(first) is _torch.Tensor:
        return first.size(0) if first.dim() else 1  # `len` is Python code of torch's
    for tensor in _tensors(data):
        return int(tensor.shape[0]) if tensor.dim() else 1
    return None


def _look_for_bad_values(seen: Any, data: Any, facts: dict[str, Any]) -> None:
    for tensor in _tensors(data):
        if tensor.is_floating_point() and not tensor.is_cuda and not tensor.requires_grad:
            counts = seen.bad.setdefault("batch", [0, 0, facts["dataset_where"] or facts["where"]])
            counts[1] += 1
            flat = tensor.reshape(-1)[: 1 << 20]
            counts[0] += int(not _torch.isfinite(flat).all())


# -- in the process that loads ---------------------------------------------------------------------


def _timed_fetch(original: Any) -> Any:
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        seen = recorder.get()
        if sampling.active_thread:
            return original(self, possibly_batched_index)
        seen.num_fetches += 1
        if seen.role == "worker":
            recorder.watching = recorder.is_watched(seen.num_fetches)
        seen.num_watched_fetches += recorder.watching
        if seen.num_fetches > _ALL_FETCHES and seen.num_fetches % 8 and seen.short_fetches:
            return _counted_fetch(original, self, possibly_batched_index)
        sampling.begin()
        self._stoker_collate = 0.0
        indices = possibly_batched_index
        if recorder.watching:
            indices = _StampedIndices.of(self, indices)
        sampling.active_thread = clocks.current_thread()
        held = sampling.awake_seconds() if recorder.watching else None
        others = _children_seconds(seen)
        began, cpu, delay = clocks.read()
        try:
            return original(self, indices)
        finally:
            sampling.active_thread = 0
            with recorder.guarded("fetch"):
                ended, on_core, queued = clocks.read()
                wall, busy = ended - began, on_core - cpu + _children_seconds(seen) - others
                seen.fetch_delay = max(0.0, queued - delay)
                if held is not None:
                    blocked = max(0.0, wall - busy - seen.fetch_delay)
                    held = min(blocked, sampling.awake_seconds() - held)
                    seen.fetch_delay += held
                    seen.held_delay += held
                seen.short_fetches = wall < _SHORT_FETCH_SECONDS
                if seen.num_fetches <= _MOST_FETCH_ROWS:
                    collate, number = self._stoker_collate, seen.loader_id
                    sample = getattr(indices, "sample_seconds", None)
                    seen.fetches.append(
                        recorder.Fetch(began, wall, busy, seen.fetch_delay, collate, number, sample)
                    )
                if seen.role == "worker":
                    seen.flush_when_due()

    return fetch


def _children_seconds(seen: Any) -> float:
    """Return the CPU seconds of programs that a worker ran, such as a decoder; the training's children are workers."""
    return clocks.children_seconds() if seen.role == "worker" else 0.0


def _counted_fetch(original: Any, fetcher: Any, indices: Any) -> Any:
    """Fetch without reading clocks: if batches are very fast, timing one in eight is enough."""
    sampling.active_thread = clocks.current_thread()
    try:
        return original(fetcher, indices)
    finally:
        sampling.active_thread = 0


class _StampedIndices(list[Any]):
    """The indices of a small batch, with the time at which each one is asked for.

    A fetch has a fixed cost before its first sample, and the first sample runs with cold caches. So the time of a large
    batch is not predicted from that of a small one, but from the samples after the first.
    """

    def __init__(self, indices: list[Any]) -> None:
        super().__init__(indices)
        self.asked: list[float] = []

    @classmethod
    def of(cls, fetcher: Any, indices: Any) -> Any:
        """Return indices that record times; the given ones if the dataset does not ask for them one by one."""
        if (
            type(indices) is not list
            or not 2 <= len(indices) <= _FEW_SAMPLES
            or not fetcher.auto_collation
            or hasattr(fetcher.dataset, "__getitems__")
        ):
            return indices
        return cls(indices)

    def __iter__(self) -> Any:
        self.asked.clear()
        for index in super().__iter__():
            self.asked.append(time.perf_counter())
            yield index
        self.asked.append(time.perf_counter())

    @property
    def sample_seconds(self) -> float | None:
        """Mean seconds of a sample, without the first one; None for fewer than two samples."""
        num_timed = len(self.asked) - 2
        return (self.asked[-1] - self.asked[1]) / num_timed if num_timed > 0 else None


class _TimedCollate:
    """The script's collate function with a timer. Made in the process that loads, so it is never pickled."""

    def __init__(self, collate: Any, fetcher: Any) -> None:
        self._collate = collate
        self._fetcher = fetcher

    def __call__(self, samples: Any) -> Any:
        began = time.perf_counter()
        sampling.collating = True
        try:
            return self._collate(samples)
        finally:
            sampling.collating = False
            self._fetcher._stoker_collate = time.perf_counter() - began


def _with_timed_collate(original: Any) -> Any:
    def __init__(  # noqa: N807
        self: Any, dataset: Any, auto_collation: Any, collate_fn: Any, drop_last: Any
    ) -> None:
        original(self, dataset, auto_collation, collate_fn, drop_last)
        self._stoker_collate = 0.0
        with recorder.guarded("collate"):
            self.collate_fn = _TimedCollate(collate_fn, self)

    return __init__


def _as_worker(original: Any) -> Any:
    def _worker_loop(*args: Any, **kwargs: Any) -> Any:
        seen = recorder.get()
        with recorder.guarded("worker"):
            seen.reset("worker")
            seen.loader_id = int(os.environ.get(_LOADER_VARIABLE, "-1"))
            # By its name: its place among the arguments differs between versions of torch.
            arguments = inspect.signature(original).bind(*args, **kwargs).arguments
            seen.worker_id = int(arguments.get("worker_id", -1))
            seen.first_cpu = (time.process_time(), time.perf_counter())
        try:
            return original(*args, **kwargs)
        finally:
            seen.finish()

    return _worker_loop


# -- spans for drawing -----------------------------------------------------------------------------

_MOST_SPANS = 400


def add_span(seen: Any, kind: str, began: float, ended: float) -> None:
    """Keep a span of time if the current step is one of those that are drawn."""
    if seen.drawing and len(seen.spans) < _MOST_SPANS:
        seen.spans.append((seen.num_steps, kind, began, ended))
