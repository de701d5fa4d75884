"""Data loading from first principles (REQUIREMENTS S2), thin over torch and the loader's own rooms.

Enters: arrays, datasets, batches. Leaves: the chapter's classes under the chapter's names, with
their errors corrected. Costs: what torch's classes cost; nothing here is an engine of its own.

    Dataset, ImageDataset, CustomDataset      items by index, bounds checked
    Sampler, RandomSampler, BatchSampler      which index comes when, from a seed
    DataLoader                                torch's, with batches fixed at `iter()`
    ParallelDataLoader                        threads, and a bound on the batches under way
    PrefetchBuffer, PrefetchingDataLoader     a queue, and a loader that fills one ahead
    PinnedMemoryAllocator, PipelinedDataLoader  pinned memory, one copy stream and events
    GradientAccumulator                       several small batches, one step
    Transform, ToTensor, Normalize, RandomHorizontalFlip, RandomCrop, Compose
                                              `apply(image_CHW)`; also whole batches, on the device

A sample that fails is an error with its index, everywhere; none is ever left out in silence. For
training use `stoker.Loader`, or `stoker.prefetch` around your own DataLoader: they are faster.
"""

from __future__ import annotations

import copy
import operator
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils import data as torch_data

from stoker.compat.max_batch import find_max_batch_size
from stoker.compat.transforms import (
    Compose,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    ToTensor,
    Transform,
)
from stoker.errors import InputError, StokerError
from stoker.loader.background import Background
from stoker.loader.slabs import CudaEngine, Staged, Stager, map_batch, usable_device
from stoker.train.accumulation import GradientAccumulator
from stoker.units import usable_count

__all__ = [
    "BatchSampler", "Compose", "CustomDataset", "DataLoader", "Dataset", "GradientAccumulator",
    "ImageDataset", "IndexOutOfBounds", "Normalize", "ParallelDataLoader", "PinnedMemoryAllocator",
    "PipelinedDataLoader", "PrefetchBuffer", "PrefetchingDataLoader", "RandomCrop",
    "RandomHorizontalFlip", "RandomSampler", "SampleError", "Sampler", "ToTensor", "Transform",
    "find_max_batch_size",
]  # fmt: skip

T = TypeVar("T")
Collate = Callable[[list[Any]], Any]


class IndexOutOfBounds(StokerError, IndexError):  # noqa: N818  the chapter's name
    """A dataset was asked for an item it does not have."""


class SampleError(StokerError, RuntimeError):
    """A dataset failed on one sample; the message says which, the cause says why."""


# -- datasets ----------------------------------------------------------------------------------


class Dataset(torch_data.Dataset[Any], ABC):
    """Items `0 .. len - 1`. Subclasses give `__len__` and `get`; torch's loaders take it as it is."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items."""

    @abstractmethod
    def get(self, index: int) -> Any:
        """Return item `index`; raise `IndexOutOfBounds` where there is none."""

    def __getitem__(self, index: int) -> Any:
        return self.get(index)

    def is_empty(self) -> bool:
        """Whether there are no items."""
        return len(self) == 0

    def check_index(self, index: int) -> int:
        """Return `index`, or raise; negative numbers are out of bounds, as in the chapter."""
        try:
            index = operator.index(index)
        except TypeError:
            raise InputError(
                f"the index is {index!r}.",
                "one whole number",
                "torch.utils.data.Subset(dataset, range(1, 3)) for several items",
            ) from None
        if not 0 <= index < len(self):
            raise IndexOutOfBounds(
                f"Index out of bounds: {index} of a dataset with {len(self)} items.",
                f"0 to {len(self) - 1}" if len(self) else "nothing: the dataset is empty",
                "for index in range(len(dataset)): ...",
            )
        return index


class CustomDataset(Dataset):
    """Pairs `(data[i], labels[i])`.

    Args:
        data: Anything with a length and an index: `(n, 3, 32, 32)` for example.
        labels: Of the same length.
    """

    def __init__(self, data: Any, labels: Any) -> None:
        if len(data) != len(labels):
            raise InputError(
                f"{len(data)} items but {len(labels)} labels.",
                "one label per item",
                "check that both come from the same rows",
            )
        self.data = data
        self.labels = labels

    def __len__(self) -> int:
        return len(self.data)

    def get(self, index: int) -> tuple[Any, Any]:
        """Return `(item, label)`; the item is a copy, so that changing it leaves the dataset as it is."""
        index = self.check_index(index)
        item = self.data[index]
        if isinstance(item, torch.Tensor):
            return item.clone(), self.labels[index]
        return item.copy() if isinstance(item, np.ndarray) else item, self.labels[index]


class ImageDataset(CustomDataset):
    """Images of shape CHW, each with a label; all of one shape."""

    def __init__(self, images: Sequence[Any], labels: Sequence[int] | Any) -> None:
        super().__init__(images, labels)
        shapes = {tuple(np.shape(image)) for image in images}
        if len(shapes) > 1 or any(len(shape) != 3 for shape in shapes):
            raise InputError(
                f"images of shapes {sorted(shapes)[:3]}.",
                "one shape (channels, height, width) for all images",
                "crop or resize them first; for NCHW arrays: ImageDataset.from_arrays(data, labels)",
            )

    @classmethod
    def from_arrays(cls, data: Any, labels: Any) -> ImageDataset:
        """Take an NCHW array apart along its first axis; no pixel is copied."""
        if np.ndim(data) != 4:
            raise InputError(
                f"data of shape {tuple(np.shape(data))}.",
                "(n, channels, height, width)",
                "data[:, None] adds a channel axis to grey images",
            )
        return cls(list(data), labels)


# -- samplers ----------------------------------------------------------------------------------


class Sampler(torch_data.Sampler[int], ABC):
    """Which index comes when. Inherit it and write `sample` and `__len__`; torch's loaders take it as it is."""

    @abstractmethod
    def sample(self, n: int) -> Sequence[int]:
        """Return `n` indices."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of indices of an epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.sample(len(self)))


class RandomSampler(Sampler):
    """All indices once, in a new order each time; torch's loaders take it as it is.

    The order is a function of (seed, epoch). The epoch counts the orders drawn so far; `set_epoch`
    sets it.

    Args:
        data_source: A dataset, or the number of samples.
        shuffle: False gives 0, 1, 2, ...
        seed: 0 or more; another seed, other orders.
        num_samples: The number of samples, instead of `data_source`.
    """

    def __init__(
        self,
        data_source: Sized | int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        *,
        num_samples: int | None = None,
    ) -> None:
        if (data_source is None) == (num_samples is None):
            raise InputError(
                f"data_source is {data_source!r} and num_samples is {num_samples!r}.",
                "one of the two",
                "RandomSampler(dataset), or RandomSampler(num_samples=1000)",
            )
        count = _count_samples(data_source) if num_samples is None else num_samples
        self.num_samples = usable_count("num_samples", count, least=0, example=1000)
        self.shuffle = shuffle
        self.seed = usable_count("seed", seed, least=0, example=0)
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.sample())

    def set_epoch(self, epoch: int) -> None:
        """Make the next order that of `epoch`, which is 0 or more."""
        self.epoch = usable_count("epoch", epoch, least=0, example=0)

    def sample(self, n: int | None = None) -> list[int]:
        """Return `n` different indices (all by default) of the next order."""
        count = self.num_samples if n is None else usable_count("n", n, least=0, example=10)
        if count > self.num_samples:
            raise InputError(
                f"{count} of {self.num_samples} samples were asked for.",
                f"0 to {self.num_samples}: each index comes once",
                "draw again for more",
            )
        if not self.shuffle:
            return list(range(count))
        generator = np.random.default_rng([self.seed, self.epoch])
        self.epoch += 1
        return [int(index) for index in generator.permutation(self.num_samples)[:count]]


def _count_samples(source: Any) -> Any:
    """Return the length of a dataset, or `source` itself if it is a number."""
    is_scalar = getattr(source, "ndim", None) == 0  # such an array has `__len__`, which raises
    if isinstance(source, Sized) and not is_scalar:
        return len(source)
    if hasattr(source, "__index__"):
        return source
    raise InputError(
        f"data_source is {source!r}, which has no length.",
        "a dataset with a length, or the number of samples",
        "RandomSampler(dataset), or RandomSampler(num_samples=1000)",
    )


class _Drawn(Sampler):
    """Adapts a user's sampler that has `sample(n)` and a length, but inherits nothing."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def sample(self, n: int) -> Sequence[int]:
        drawn: Sequence[int] = self._sampler.sample(n)
        return drawn


class BatchSampler(torch_data.BatchSampler):
    """Consecutive groups of a sampler's indices; the last may be short, or is left out."""

    def __init__(
        self, sampler: Iterable[int] | Any, batch_size: int, drop_last: bool = False
    ) -> None:
        if not isinstance(sampler, Iterable) and hasattr(sampler, "sample"):
            sampler = _Drawn(sampler)
        super().__init__(sampler, usable_count("batch_size", batch_size, example=4), drop_last)

    def batches(self) -> list[list[int]]:
        """Draw one epoch and return its batches."""
        return list(self)


# -- loaders -----------------------------------------------------------------------------------


class _Named(torch_data.Dataset[Any]):
    """A dataset whose errors name the sample."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            raise SampleError(
                f"sample {index} of {type(self.dataset).__name__} failed: {error!r}.",
                "a dataset that returns every item below its length",
                f"dataset[{index}] shows it alone",
            ) from error


class DataLoader:
    """Batches of a dataset, collated by torch's `default_collate`.

    Args:
        dataset: Anything with a length and an index.
        batch_size: Samples per batch.
        shuffle: A new order for every `iter()`.
        num_workers: Worker processes; 0 or 1 reads in this one, as in the chapter.
        drop_last: Leave out the last, short batch.
        seed: Of the shuffle.
        collate_fn: Makes a batch of a list of items.
        multiprocessing_context: "fork", "forkserver" or "spawn", for torch's workers.
        pin_memory: Give batches in pinned memory; without a GPU there is none, and they are as they are.
        sampler: Of your own, instead of `shuffle`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        num_workers: int = 0,
        drop_last: bool = False,
        *,
        seed: int = 0,
        collate_fn: Collate | None = None,
        multiprocessing_context: str | None = None,
        pin_memory: bool = False,
        sampler: Any = None,
    ) -> None:
        self.num_workers = usable_count("num_workers", num_workers, least=0, example=4)
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._context = multiprocessing_context
        self.pin_memory = pin_memory
        if sampler is not None and shuffle:
            raise InputError(
                "shuffle=True and a sampler.", "one of the two decides the order", "shuffle=False"
            )
        self.sampler = RandomSampler(dataset, shuffle, seed) if sampler is None else sampler
        self.batch_sampler = BatchSampler(self.sampler, batch_size, drop_last)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return self.iter()

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` that of `epoch`; does nothing if a sampler of your own has no `set_epoch`."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def iter(self) -> Iterator[Any]:
        """Fix the batches of one epoch now, and return an iterator over them.

        Raises:
            SampleError: While iterating, where the dataset failed on a sample.
        """
        batches = self.batch_sampler.batches()
        workers = self.num_workers if self.num_workers > 1 else 0
        return iter(
            torch_data.DataLoader(
                _Named(self.dataset),
                batch_sampler=batches,
                num_workers=workers,
                collate_fn=self._collate_fn,
                multiprocessing_context=self._context if workers else None,
                pin_memory=self.pin_memory and torch.cuda.is_available(),
            )
        )


class ParallelDataLoader:
    """Batches in order, fetched by threads, with a bound on how many are under way.

    Threads share the dataset and start at once, which suits datasets that wait for a disk or compute
    in numpy and torch; Python code that holds the interpreter needs processes (`DataLoader`).

    Args:
        dataset: Anything with a length and an index; read by several threads at once.
        batch_size: Samples per batch.
        num_workers: Threads, all of them used, even within one batch.
        prefetch_factor: Batches under way or ready behind the one you have, *in total* (torch counts
            per worker).
        shuffle: A new order for every iteration.
        drop_last: Leave out the last, short batch.
        seed: Of the shuffle.
        collate_fn: Makes a batch of a list of items; torch's `default_collate` by default.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        num_workers: int = 4,
        prefetch_factor: int = 2,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        collate_fn: Collate | None = None,
    ) -> None:
        self.num_workers = usable_count("num_workers", num_workers, example=4)
        self.prefetch_factor = usable_count("prefetch_factor", prefetch_factor)
        self.dataset = dataset
        self._collate = collate_fn or torch_data.default_collate
        self.sampler = RandomSampler(dataset, shuffle, seed)
        self.batch_sampler = BatchSampler(self.sampler, batch_size, drop_last)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`."""
        self.sampler.set_epoch(epoch)

    def iter(self) -> Iterator[Any]:
        """Return an iterator over the batches of one epoch."""
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches; the threads end with the iteration, however it ends.

        Raises:
            SampleError: The dataset failed on a sample.
        """
        get = _Named(self.dataset).__getitem__
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="stoker-parallel")
        waiting: deque[list[Future[Any]]] = deque()
        try:
            for indices in self.batch_sampler:
                waiting.append([pool.submit(get, index) for index in indices])
                if len(waiting) > self.prefetch_factor:
                    yield self._collate([future.result() for future in waiting.popleft()])
            while waiting:
                yield self._collate([future.result() for future in waiting.popleft()])
        finally:  # the caller left the loop, a sample failed, or all is done
            pool.shutdown(wait=False, cancel_futures=True)


# -- prefetching -------------------------------------------------------------------------------


class PrefetchBuffer(Generic[T]):
    """A bounded first-in, first-out queue that never blocks. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = usable_count("capacity", capacity)
        self._items: deque[T] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def push(self, item: T) -> bool:
        """Add an item; False, and nothing added, when the buffer is full."""
        if item is None:
            raise InputError("None was pushed.", "anything else: pop() says None for empty", "")
        with self._lock:
            if len(self._items) >= self.capacity:
                return False
            self._items.append(item)
            return True

    def pop(self) -> T | None:
        """Take the oldest item; None when there is none."""
        with self._lock:
            return self._items.popleft() if self._items else None

    def is_full(self) -> bool:
        """Whether the next push would be refused."""
        return len(self._items) >= self.capacity


class PrefetchingDataLoader:
    """A loader that is one thread and `prefetch_size` batches ahead.

    Args:
        loader: Anything that can be iterated.
        prefetch_size: Batches ready ahead of the caller.
        dataloader: The chapter's other name of `loader`.
    """

    def __init__(
        self,
        loader: Iterable[Any] | None = None,
        prefetch_size: int = 2,
        *,
        dataloader: Iterable[Any] | None = None,
    ) -> None:
        self.prefetch_size = usable_count("prefetch_size", prefetch_size)
        given = [each for each in (loader, dataloader) if each is not None]
        if len(given) != 1:
            raise InputError(
                f"{len(given)} loaders were given.", "one", "PrefetchingDataLoader(loader)"
            )
        self.loader = given[0]
        self._work: Background[Any] | None = None

    def next_batch(self) -> Any | None:
        """Return the next batch, waiting for it where needed; None once after the last one.

        The call after that None begins the next epoch. An error of the loader is raised here, behind
        the batches before it.
        """
        if self._work is None:
            self._work = Background(
                iter(self.loader).__next__, self.prefetch_size, "stoker-prefetching"
            )
        try:
            batch = self._work.take()
        except StopIteration:
            self.close()
            return None
        except Exception:
            self.close()
            raise
        if batch is None:
            self.close()
            raise InputError(
                "the loader yielded None.", "anything else: next_batch() says None at the end", ""
            )
        return batch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this epoch, or a whole one."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def close(self) -> None:
        """End the thread after the batch it is fetching; the next call begins a new epoch."""
        if self._work is not None:
            self._work.stop()
            self._work.join(1.0)
            self._work = None

    def __del__(self) -> None:
        if getattr(self, "_work", None) is not None:
            self._work.stop()  # type: ignore[union-attr]


# -- pinned memory -----------------------------------------------------------------------------


class PinnedMemoryAllocator:
    """Pinned host memory, and copies from it that do not block the host.

    Args:
        device: Where copies go. "cpu" gives ordinary memory and plain copies, for code that must run
            anywhere; `reason` says so.
    """

    def __init__(self, device: str | torch.device = "cuda") -> None:
        self.device = usable_device(device)
        self.is_pinned = self.device.type == "cuda"
        self.reason = "ordinary memory: the device is the CPU, and only CUDA pins"
        if self.is_pinned:
            self.reason = f"pinned for copies to {self.device}"

    def alloc_pinned(self, size: int) -> torch.Tensor:
        """Return `size` float32 values; `.view(dtype)` gives their bytes another type.

        Allocate once and reuse: pinning 64 MB takes up to 0.1 s. Torch's host allocator rounds up to
        a power of two and keeps what you let go of until the copies out of it are done.
        """
        size = usable_count("size", size, least=0, example=4096)
        return torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=self.is_pinned)

    def copy_to_device_async(
        self, host: torch.Tensor, stream: torch.cuda.Stream | None = None
    ) -> torch.Tensor:
        """Queue a copy of `host` on `stream` and return the device tensor, not yet filled.

        Before using the result: `torch.cuda.current_stream().wait_stream(stream)`. Before writing
        `host` again: `stream.synchronize()` or an event. The result may be let go at any time.

        Args:
            host: Pinned; from pageable memory the copy would block, so it is refused.
            stream: The current stream by default, which needs no waiting.
        """
        if not self.is_pinned:
            return host.clone()
        if not host.is_pinned():
            raise InputError(
                f"a pageable tensor of {host.nbytes} bytes: its copy cannot be asynchronous.",
                "memory from alloc_pinned",
                "buffer = allocator.alloc_pinned(host.numel()); buffer.copy_(host)",
            )
        user = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(stream or user):
            target = torch.empty_like(host, device=self.device)
            target.copy_(host, non_blocking=True)
        target.record_stream(user)
        return target


class PipelinedDataLoader:
    """Transfer of batch k + 1 while batch k computes: one copy stream, events, pinned slabs.

    The chapter takes several streams in turn. One is enough, since a GPU has one engine for copies
    from the host, and it is right where several are not: backward passes on two streams would add to
    the same gradients at once. So everything you launch stays on your own stream, and waits only for
    the copy of the batch that you synchronise.

    Args:
        device: "cuda" or "cpu" (batches are copied in host memory, at once).
        num_streams: Batches that may be loaded and not yet synchronised; more is an error, not a
            growing heap of device memory.
    """

    def __init__(self, device: str | torch.device = "cuda", num_streams: int = 2) -> None:
        self.num_streams = usable_count("num_streams", num_streams)
        self.device = usable_device(device)
        self._under_way: dict[int, Staged] = {}
        self._stager: Stager | None = None
        if self.device.type == "cuda":
            self._stager = Stager(CudaEngine(self.device, torch.cuda.Stream(self.device)))

    def load_batch_async(self, batch_idx: int, batch: Any) -> Any:
        """Queue the copies of a batch (tensors in any nesting) and return them, not yet filled: `synchronize` first.

        `batch` may be reused afterwards.

        Pageable memory is copied to a pinned slab here. Memory that you pinned yourself is read by the
        device directly, and this call returns when that is done.
        """
        if batch_idx in self._under_way or len(self._under_way) >= self.num_streams:
            waiting = sorted(self._under_way)
            raise InputError(
                f"batch {batch_idx} was given while {waiting} are under way.",
                f"{self.num_streams} different batches at the same time",
                f"loader.synchronize({waiting[0]}) first",
            )
        if self._stager is None:
            self._under_way[batch_idx] = Staged(map_batch(batch, _copy_to_host), [], [])
        else:
            self._under_way[batch_idx] = self._stager.stage(batch)
            self._stager.settle()
        return self._under_way[batch_idx].batch

    def synchronize(self, batch_idx: int) -> Any:
        """Return the batch on the device; your current stream waits for its copy, the host does not."""
        if batch_idx not in self._under_way:
            raise InputError(
                f"batch {batch_idx} is not under way.",
                f"one of {sorted(self._under_way)}",
                f"loader.load_batch_async({batch_idx}, batch) first",
            )
        staged = self._under_way.pop(batch_idx)
        if self._stager is not None:
            self._stager.engine.receive(staged.tensors, staged.marks)
        return staged.batch


def _copy_to_host(leaf: Any) -> Any:
    """Return a copy that shares no memory with `leaf`; `to` alone returns a tensor that is on the CPU already."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to("cpu", copy=True)
    return copy.deepcopy(leaf).to("cpu")
