"""`ChunkDataLoader`: the documented chunk loader (S0-3 to S0-7), an adapter of `Loader`.

Enters: an HDF5 file with `features` and `targets`. Leaves: `(features, targets)` on the device, batch
after batch. Costs: at most `chunk_size_gb` on the device, whatever the file's size and however long a
batch is held; a few pinned slabs on the host.

What fits is loaded once and stays. What does not fit passes through three slots of a third of the
memory each (two of a half where a third is less than a batch), the next ones loading while this one
trains; batches run across the edges, so the division affects only the shuffle: it is full when all
fits, else by slots and within them. `stoker.make_plan` decides, as for every loader; `reason` says why.

A training loop, complete:

    loader = ChunkDataLoader("data/aligned_train.h5", batch_size=128, shuffle=False)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for features, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_function(model(features), targets)
            loss.backward()
            optimizer.step()

`Trainer(model, loader, ...)` takes it too, and trains from the `Loader` inside it: captured, resumed at any batch,
and with fewer chunks when memory runs out.

`shuffle=False` is what overlapping windows of several timeframes need. "GB" in `chunk_size_gb` is
2^30 bytes, as in the documents' own arithmetic (12.0 holds 53,547 samples of 360 x 167 floats and 36
targets).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from stoker.arguments import explained
from stoker.errors import InputError
from stoker.loader.arguments import NEEDLESS, check_keywords
from stoker.loader.columns import left_aside, make_columns
from stoker.loader.loader import Loader
from stoker.loader.slabs import usable_device
from stoker.loader.staging import Copy, Uploader, restore_sign, torch_dtype
from stoker.plan.facts import even_chunks
from stoker.store.manifest import FieldInfo
from stoker.store.reader import Store, open_store
from stoker.units import GIB, usable_count, whole_number

_FIELDS = ("features", "targets")


@explained("stoker.ChunkDataLoader('data.h5', batch_size=128)")
class ChunkDataLoader:
    """Iterate for `(features, targets)` that are already on the device.

    Each iteration is one epoch from its first batch; the epoch number rises when one ends. One that was
    left early is begun again; one that took its last batch, by `zip` or `islice` too, is followed by the
    next epoch. After `load_state_dict` the next iteration is the rest of that epoch. One iteration at a
    time.

    Args:
        hdf5_path: An HDF5 file (or a store) with `features (n, ...)` and `targets (n, ...)`, of any
            type and rank.
        batch_size: Samples per batch.
        chunk_size_gb: Device memory for data, in GiB: all of it, all slots together.
        device: "cuda", "cuda:1" or "cpu".
        shuffle: A new order every epoch, from (seed, epoch) alone.
        drop_last: Leave out the epoch's last batch if it is short.
        seed: Of the shuffle.
        rank: This process's number; ranks share the samples without repeats.
        world_size: Number of processes.
        **others: Arguments of torch's DataLoader that are needless here are accepted with a note.

    Attributes:
        num_samples: Samples in the file.
        sequence_length: Rows of a sample's window; 1 where features have no such axis.
        feature_count: Features per row.
        target_length: Numbers in one sample's targets.
        bytes_per_sample: Of features and targets together, as stored.
        samples_per_chunk: Samples that fit into `chunk_size_gb`, at most all.
        chunk_ranges: `[start, end)` of these chunks.
        slot_ranges: `[start, end)` of what iterating loads at a time.
        reason: Why it is loaded so, in words.
    """

    def __init__(
        self,
        hdf5_path: str | Path,
        batch_size: int = 128,
        chunk_size_gb: float = 12.0,
        device: str | torch.device = "cuda",
        shuffle: bool = False,
        drop_last: bool = False,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        **others: Any,
    ) -> None:
        if odd := [name for name in others if name not in NEEDLESS]:
            raise InputError(
                f"a ChunkDataLoader has no argument {odd[0]!r}.",
                "hdf5_path, batch_size, chunk_size_gb, device, shuffle, drop_last, seed, rank and world_size; a Loader "
                "over the same file has more",
                f"leave {odd[0]} out",
            )
        check_keywords(others, (), batch_size)
        self.batch_size = batch_size = usable_count("batch_size", batch_size, example=128)
        seed, rank = whole_number("seed", seed), whole_number("rank", rank)
        world_size = whole_number("world_size", world_size)
        self.device = usable_device(device)
        self.hdf5_path, self.chunk_size_gb = hdf5_path, chunk_size_gb
        self.store = open_store(hdf5_path)
        infos = _find_fields(self.store)
        self.num_samples = self.store.num_samples
        shape = infos[0].shape if len(infos[0].shape) > 1 else [1, *infos[0].shape]
        self.sequence_length, self.feature_count = shape[0], math.prod(shape[1:])
        self.target_length = math.prod(infos[1].shape)
        self.bytes_per_sample = sum(sample_bytes(info) for info in infos)
        fitting = samples_that_fit(chunk_size_gb, self.bytes_per_sample)
        self.samples_per_chunk = max(1, min(fitting, self.num_samples))
        starts = range(0, self.num_samples, self.samples_per_chunk)
        ends = (min(start + self.samples_per_chunk, self.num_samples) for start in starts)
        self.chunk_ranges = list(zip(starts, ends, strict=True))
        self._loader = Loader(
            self.store,
            batch_size,
            self.device,
            order="shuffled" if shuffle else "sequential",
            seed=seed,
            fields=_FIELDS,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            data_bytes=max(1, int(float(chunk_size_gb) * GIB)),
        )
        rows = self._loader.plan.chunk_rows or self.num_samples
        self.slot_ranges = list(even_chunks(self.num_samples, rows))
        self.reason = self._loader.reason
        self._resumed = False
        self._taken_epoch: int | None = None  # epoch whose last batch was taken
        self._uploader: Uploader | None = None
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield `(features, targets)`; new tensors, not views of a chunk: hold what you like."""
        loader = self._loader
        # After the last batch `Loader` begins the next epoch by itself, unless its place is set.
        if not self._resumed and self._taken_epoch != loader.epoch:
            loader.set_epoch(loader.epoch)
        self._resumed = False
        for batch in loader.remaining_batches():
            if batch.step + 1 == loader.num_batches:
                self._taken_epoch = loader.epoch
            yield self.present(batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def stoker_loader(self) -> Loader:
        """The `Loader` inside. A `Trainer` trains from it, with this loader's batches and order."""
        return self._loader

    def present(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch of the loader inside as `(features, targets)`."""
        return batch["features"], batch["targets"]

    @property
    def epoch(self) -> int:
        """The current epoch; after an iteration has ended, the next one."""
        return self._loader.epoch

    @property
    def device_bytes(self) -> int:
        """Bytes of data on the device; never more than `chunk_size_gb`."""
        return self._loader.device_bytes

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`, from its first batch."""
        self._loader.set_epoch(epoch)
        self._resumed, self._taken_epoch = False, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, for `load_state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; the next iteration yields the batches after it."""
        self._loader.load_state_dict(state)
        self._resumed, self._taken_epoch = True, None

    def order_digest(self) -> str:
        """Return a digest of the samples yielded so far in this epoch, in order."""
        return self._loader.order_digest()

    def close(self) -> None:
        """End the threads and release the memory."""
        self._loader.close()
        if self._uploader is not None:
            self._uploader.close()
            self._uploader = None
        self.store.close()

    def _load_chunk_to_gpu(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples `start` to `end` on the device, through pinned memory, without blocking it.

        Kept as documented; iterating does not need it, and its memory comes on top of `device_bytes`.
        The current stream waits for the copies.
        """
        if not 0 <= start <= end <= self.num_samples:
            raise InputError(
                f"samples {start} to {end}.",
                f"a range within 0 to {self.num_samples}",
                "loader._load_chunk_to_gpu(*loader.chunk_ranges[0])",
            )
        if self._uploader is None or self._process != os.getpid():  # a fork copies no threads
            self._uploader = Uploader(self.device, self.store.threads)
            self._process = os.getpid()
        every = np.arange(self.num_samples)
        values = [column.values[0] for column in make_columns(self.store, _FIELDS, every)]
        targets = [
            torch.empty((end - start, *v.shape), dtype=torch_dtype(v.dtype), device=self.device)
            for v in values
        ]
        copies = [Copy(v, start, end, t) for v, t in zip(values, targets, strict=True)]
        free = None
        if self.device.type == "cuda":
            # The allocator may reuse a chunk's memory that queued work still reads: copy after that work.
            free = torch.cuda.Event()
            free.record(torch.cuda.current_stream(self.device))
        done = self._uploader.upload(copies, free)
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)
        features, labels = (restore_sign(t, v.dtype) for v, t in zip(values, targets, strict=True))
        return features, labels


def samples_that_fit(chunk_size_gb: float, bytes_per_sample: int) -> int:
    """Return how many samples `chunk_size_gb` GiB hold: the documents' formula (S0-5)."""
    numbers = int | float | np.integer | np.floating
    is_number = isinstance(chunk_size_gb, numbers) and not isinstance(chunk_size_gb, bool)
    if not is_number or not 0 < chunk_size_gb < math.inf:
        raise InputError(
            f"chunk_size_gb is {chunk_size_gb!r}.",
            "a number of GiB above 0",
            "chunk_size_gb=12.0 on a GPU of 16 GB; `stoker plan` computes it",
        )
    return int(float(chunk_size_gb) * GIB / bytes_per_sample)


def sample_bytes(info: FieldInfo) -> int:
    """Return the bytes of one sample of a dense field, by its true type and rank."""
    return int(math.prod(info.shape) * np.dtype(info.dtype).itemsize)


def _find_fields(store: Store) -> list[FieldInfo]:
    dense = [name for name, info in store.fields.items() if info.kind == "dense"]
    missing = [name for name in _FIELDS if name not in dense]
    if missing:
        found = ", ".join(f"{name} ({info.kind})" for name, info in store.fields.items())
        raise InputError(
            f"{store.name} has no dense field {' and no '.join(map(repr, missing))}; it has {found}."
            f"{left_aside(store, missing)}",
            "an HDF5 file with arrays 'features' and 'targets' of equal length",
            "stoker.Loader(path, batch_size, fields=[...]) takes any names",
        )
    if not store.num_samples:
        raise InputError(f"{store.name} holds no samples.", "at least one", "")
    if not all(sample_bytes(store.fields[name]) for name in _FIELDS):
        raise InputError(
            f"{store.name} has arrays of no width.", "at least one value in each sample", ""
        )
    return [store.fields[name] for name in _FIELDS]
