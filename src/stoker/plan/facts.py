"""The input of a plan: the bytes of a store by field, and the memory of a model.

Enters: a manifest, or the shapes of plain arrays; a number of parameters. Leaves: frozen facts in
bytes. Costs microseconds; no data is read.

Facts from a manifest estimate the bytes of ragged values and windows in a chunk. A loader knows the position of every
sample and gives exact facts (`stoker.loader.columns.column_facts`); the arithmetic is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from stoker.display import nearest
from stoker.errors import InputError
from stoker.store.manifest import FieldInfo, Manifest, ShardInfo

_UNEVEN = 1.25
"""Factor above the mean for ragged values and series rows, which are not spread evenly over the samples."""
_STATES = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class FieldFacts:
    """The sizes of one field in bytes.

    Attributes:
        name: Name of the field.
        kind: "dense", "ragged" or "series".
        num_rows: Number of stored rows: samples, ragged values or rows of the series.
        row_bytes: Bytes of one stored row.
        device_bytes: Bytes of the whole field on the device, gap flags included.
        sample_bytes: Bytes of one sample in a batch; ragged: 1.25 times those of a mean sample.
        position_bytes: Bytes of a chunk per sample.
        halo_bytes: Additional bytes of a chunk: the rows before the end of its first window.
        index_bytes: Bytes of offsets and window ends that the reader keeps in RAM.
        window: Rows per window of a series.
        series_bytes: Bytes of the series that materialised windows may be made of; None if the
            field does not have that shape.
        slot_bytes: Function from the most samples of a chunk to the exact bytes of the largest chunk, if the position
            of every sample is known; None estimates them from `position_bytes` and `halo_bytes`.
    """

    name: str
    kind: str
    num_rows: int
    row_bytes: int
    device_bytes: int
    sample_bytes: int
    position_bytes: int
    halo_bytes: int = 0
    index_bytes: int = 0
    window: int | None = None
    series_bytes: int | None = None
    slot_bytes: Callable[[int], int] | None = field(default=None, compare=False, repr=False)

    def chunk_bytes(self, num_positions: int) -> int:
        """Return the bytes of one ring slot if no chunk has more than `num_positions` samples."""
        if self.slot_bytes is not None:
            return self.slot_bytes(num_positions)
        return self.halo_bytes + num_positions * self.position_bytes


@dataclass(frozen=True)
class StoreFacts:
    """The sizes of a store that a plan needs. Made by `store_facts`, `array_facts` or `column_facts`."""

    num_samples: int
    fields: tuple[FieldFacts, ...]
    left_out: tuple[str, ...] = ()

    @cached_property
    def device_bytes(self) -> int:
        """Bytes of all fields on the device."""
        return sum(field.device_bytes for field in self.fields)

    @cached_property
    def sample_bytes(self) -> int:
        """Bytes of one sample in a batch, with windows written out."""
        return sum(field.sample_bytes for field in self.fields)

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of offsets and window ends in RAM, and of two numbers per sample for the order."""
        return sum(field.index_bytes for field in self.fields) + 16 * self.num_samples

    def chunk_bytes(self, num_positions: int) -> int:
        """Return the bytes of one ring slot if no chunk has more than `num_positions` samples."""
        return sum(each.chunk_bytes(num_positions) for each in self.fields)

    def chunk_positions(self, num_bytes: int) -> int:
        """Return the most samples of a chunk of at most `num_bytes`; 0 if not even one fits."""
        halo = sum(each.halo_bytes for each in self.fields)
        mean = sum(each.position_bytes for each in self.fields)
        guess = max(0, min(self.num_samples, (num_bytes - halo) // max(1, mean)))
        if all(each.slot_bytes is None for each in self.fields):
            return guess
        # The exact size hardly ever falls when chunks grow, so a bisection finds the limit; the loop below it
        # corrects the exceptions.
        low, high = 0, self.num_samples
        while low < high:
            middle = min(
                high, max(low + 1, guess if low < guess <= high else (low + high + 1) // 2)
            )
            guess = 0
            if self.chunk_bytes(middle) <= num_bytes:
                low = middle
            else:
                high = middle - 1
        while low and self.chunk_bytes(low) > num_bytes:
            low -= max(1, low // 64)
        return low


def even_chunks(num_samples: int, most: int) -> tuple[tuple[int, int], ...]:
    """Divide 0 to `num_samples` into the fewest chunks of at most `most`, all equal or one smaller.

    With a short last chunk, one batch could touch three chunks, and most of a slot would be wasted.
    """
    if most < 1:
        raise InputError(f"chunks of {most} samples.", "1 or more", "even_chunks(1000, most=100)")
    count = -(-num_samples // most)
    edges = [num_samples * number // count for number in range(count + 1)] if count else []
    return tuple(pairwise(edges))


def most_chunks_per_batch(chunk_sizes: Sequence[int] | np.ndarray, batch_size: int) -> int:
    """Return the most chunks that one batch can touch, in any order: the fewest slots that a loader needs."""
    sizes = np.sort(np.asarray(chunk_sizes))
    whole = int(np.searchsorted(np.cumsum(sizes), batch_size - 2, side="right"))
    return min(len(sizes), batch_size, whole + 2)


def store_facts(
    manifest: Manifest, fields: Sequence[str] | None = None, num_samples: int | None = None
) -> StoreFacts:
    """Return the facts of a store from its manifest; no data is read. By default of all fields except text.

    Give `num_samples` if only a part is loaded, such as one split. All series rows count, since a part may need all.
    """
    unknown = [name for name in fields or () if name not in manifest.fields]
    if unknown:
        raise InputError(
            f"the store has no field {unknown[0]!r}.",
            ", ".join(manifest.fields),
            "stoker inspect STORE",
        )
    text = tuple(name for name, info in manifest.fields.items() if info.encoding == "utf8")
    chosen = [name for name in manifest.fields if name not in text] if fields is None else fields
    part = manifest.num_samples if num_samples is None else num_samples
    facts = tuple(_field_facts(n, manifest.fields[n], manifest.shards, part) for n in chosen)
    return StoreFacts(part, facts, text if fields is None else ())


def array_facts(num_samples: int, arrays: Mapping[str, tuple[str, Sequence[int]]]) -> StoreFacts:
    """Return the facts of plain arrays: name to (dtype, shape of one row)."""
    fields = {
        name: FieldInfo(kind="dense", dtype=np.dtype(dtype).str, shape=list(shape))
        for name, (dtype, shape) in arrays.items()
    }
    facts = tuple(_field_facts(name, info, (), num_samples) for name, info in fields.items())
    return StoreFacts(num_samples, facts)


def _field_facts(
    name: str, info: FieldInfo, shards: Sequence[ShardInfo], num_samples: int
) -> FieldFacts:
    row_bytes = int(np.prod(info.shape, dtype=np.int64)) * np.dtype(info.dtype).itemsize
    if info.kind == "series":
        return _series_facts(name, info, shards, num_samples, row_bytes)
    if info.kind == "dense":
        return FieldFacts(
            name, "dense", num_samples, row_bytes,
            device_bytes=num_samples * row_bytes, sample_bytes=row_bytes, position_bytes=row_bytes,
            series_bytes=_series_form(info, num_samples, row_bytes),
        )  # fmt: skip
    stored = sum(shard.rows[f"{name}/values"] for shard in shards)
    rate = _densest(shards, f"{name}/values")
    each = math.ceil(_UNEVEN * rate * row_bytes)
    num_rows = min(stored, math.ceil(rate * num_samples))
    return FieldFacts(
        name, "ragged", num_rows, row_bytes,
        device_bytes=num_rows * row_bytes,
        sample_bytes=each, position_bytes=each, index_bytes=8 * (num_samples + 1),
    )  # fmt: skip


def _series_facts(
    name: str, info: FieldInfo, shards: Sequence[ShardInfo], num_samples: int, row_bytes: int
) -> FieldFacts:
    window = info.window or 0
    num_rows = sum(shard.rows[f"{name}/rows"] for shard in shards)
    is_timed = not shards or f"{name}/gap" in shards[0].rows
    padded = row_bytes + is_timed  # the gap flag
    rate = _densest(shards, f"{name}/rows")
    return FieldFacts(
        name, "series", num_rows, row_bytes,
        device_bytes=num_rows * padded,
        sample_bytes=window * padded,
        position_bytes=math.ceil(_UNEVEN * rate * padded),
        # A chunk begins in one shard and may end in another: one halo for each.
        halo_bytes=min(2, max(1, len(shards))) * window * padded,
        index_bytes=8 * num_samples, window=window,
    )  # fmt: skip


def _densest(shards: Sequence[ShardInfo], dataset: str) -> float:
    """Return the rows per sample in the shard where they are most."""
    return max((s.rows[dataset] / s.num_samples for s in shards if s.num_samples), default=0.0)


def _series_form(info: FieldInfo, num_samples: int, row_bytes: int) -> int | None:
    """Return the bytes of the rows of windows that advance by one row per sample; None if it has another shape."""
    if np.dtype(info.dtype).kind != "f" or len(info.shape) != 2 or min(info.shape) < 2:
        return None
    steps = info.shape[0]
    return (num_samples + steps - 1) * (row_bytes // steps + 1)


@dataclass(frozen=True)
class ModelCost:
    """The memory of a model on the device; `activation_bytes_per_sample` is estimated if it is None."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes_per_sample: int | None = None


def estimate_model(
    num_parameters: int,
    dtype_bytes: int = 4,
    optimizer: str = "adamw",
    activation_bytes_per_sample: int | None = None,
) -> ModelCost:
    """Return the memory for training `num_parameters` parameters; the optimizer's state has their dtype."""
    if num_parameters < 0 or dtype_bytes < 1:
        raise InputError(
            f"a model of {num_parameters} parameters of {dtype_bytes} bytes.",
            "0 or more parameters of 1 or more bytes",
            "estimate_model(25_000_000, dtype_bytes=4)",
        )
    if optimizer not in _STATES:
        near = nearest(optimizer, _STATES) or "adamw"
        raise InputError(
            f"unknown optimizer {optimizer!r}.",
            ", ".join(_STATES),
            f"--optimizer {near} (optimizer={near!r})",
        )
    size = num_parameters * dtype_bytes
    return ModelCost(size, size, size * _STATES[optimizer], activation_bytes_per_sample)
