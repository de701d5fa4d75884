"""What a plan is asked about: the bytes of a store by field, and what a model takes.

Enters: a manifest, or the shapes of plain arrays; a number of parameters. Leaves: frozen facts in
bytes. Costs microseconds; no data is touched.

Facts from a manifest estimate what ragged values and windows take in a chunk. A loader knows where every
sample lies and gives exact facts (`stoker.loader.columns.column_facts`); the arithmetic is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from stoker.display import nearest
from stoker.errors import InputError
from stoker.store.manifest import FieldInfo, Manifest, ShardInfo

_UNEVEN = 1.25
"""Ragged values and series rows are not spread evenly over the samples: room above the mean."""
_STATES = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class FieldFacts:
    """One field, in bytes.

    Attributes:
        name: Of the field.
        kind: dense, ragged or series.
        num_rows: Stored rows: samples, ragged values or rows of the series.
        row_bytes: Of one stored row.
        device_bytes: All of it on the device, with its gap flags.
        sample_bytes: One sample inside a batch; ragged: the mean, and a quarter more.
        position_bytes: One sample's part of a chunk.
        halo_bytes: What a chunk needs on top: the rows before its first window's end.
        index_bytes: Offsets and window ends that the reader keeps in RAM.
        window: Rows per window of a series.
        series_bytes: What the series form of materialised windows would take; None when the
            field is not of that shape.
        slot_bytes: Exact bytes of the largest chunk by the most samples of a chunk, when the place of every
            sample is known; None estimates it from `position_bytes` and `halo_bytes`.
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
        """Bytes of one ring slot when no chunk has more than `num_positions` samples."""
        if self.slot_bytes is not None:
            return self.slot_bytes(num_positions)
        return self.halo_bytes + num_positions * self.position_bytes


@dataclass(frozen=True)
class StoreFacts:
    """What a plan needs to know of a store. Made by `store_facts`, `array_facts` or `column_facts`."""

    num_samples: int
    fields: tuple[FieldFacts, ...]
    left_out: tuple[str, ...] = ()

    @cached_property
    def device_bytes(self) -> int:
        """Everything on the device at once."""
        return sum(field.device_bytes for field in self.fields)

    @cached_property
    def sample_bytes(self) -> int:
        """One sample inside a batch, windows written out."""
        return sum(field.sample_bytes for field in self.fields)

    @cached_property
    def index_bytes(self) -> int:
        """Offsets and ends in RAM, and two numbers per sample for the order."""
        return sum(field.index_bytes for field in self.fields) + 16 * self.num_samples

    @cached_property
    def materialised(self) -> tuple[str, ...]:
        """Dense float fields of shape (n, T, F), which look like windows written out."""
        return tuple(field.name for field in self.fields if field.series_bytes is not None)

    def chunk_bytes(self, num_positions: int) -> int:
        """Bytes of one ring slot when no chunk has more than `num_positions` samples."""
        return sum(each.chunk_bytes(num_positions) for each in self.fields)

    def chunk_positions(self, num_bytes: int) -> int:
        """Most samples of a chunk that takes at most `num_bytes`; 0 when not even one does."""
        halo = sum(each.halo_bytes for each in self.fields)
        mean = sum(each.position_bytes for each in self.fields)
        guess = max(0, min(self.num_samples, (num_bytes - halo) // max(1, mean)))
        if all(each.slot_bytes is None for each in self.fields):
            return guess
        # The exact size hardly ever falls when chunks grow, so a bisection finds the edge; the last
        # steps down make sure of it.
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
    """Cut 0 to n into the fewest chunks of at most `most`, all of the same size or one less.

    A short last chunk would let one batch touch three chunks, and waste most of a slot.
    """
    if most < 1:
        raise InputError(f"chunks of {most} samples.", "1 or more", "even_chunks(1000, most=100)")
    count = -(-num_samples // most)
    edges = [num_samples * number // count for number in range(count + 1)] if count else []
    return tuple(pairwise(edges))


def most_chunks_per_batch(chunk_sizes: Sequence[int] | np.ndarray, batch_size: int) -> int:
    """Chunks that one batch can touch at the worst: the slots that a loader needs at least."""
    sizes = np.sort(np.asarray(chunk_sizes))
    whole = int(np.searchsorted(np.cumsum(sizes), batch_size - 2, side="right"))
    return min(len(sizes), batch_size, whole + 2)


def store_facts(
    manifest: Manifest, fields: Sequence[str] | None = None, num_samples: int | None = None
) -> StoreFacts:
    """Read the facts of a store from its manifest; no data is touched. Without `fields`, of all but text.

    `num_samples` is given when a part will be loaded, such as one split. Series rows count whole: a part may need all.
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
    each = _round_up(_UNEVEN * rate * row_bytes)
    num_rows = min(stored, _round_up(rate * num_samples))
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
        position_bytes=_round_up(_UNEVEN * rate * padded),
        # A chunk begins inside one shard and may end inside another: one halo for each.
        halo_bytes=min(2, max(1, len(shards))) * window * padded,
        index_bytes=8 * num_samples, window=window,
    )  # fmt: skip


def _densest(shards: Sequence[ShardInfo], dataset: str) -> float:
    """Rows per sample of the shard that has most."""
    return max((s.rows[dataset] / s.num_samples for s in shards if s.num_samples), default=0.0)


def _series_form(info: FieldInfo, num_samples: int, row_bytes: int) -> int | None:
    """Bytes of the rows behind overlapping windows that advance one row a sample."""
    if np.dtype(info.dtype).kind != "f" or len(info.shape) != 2 or min(info.shape) < 2:
        return None
    steps = info.shape[0]
    return (num_samples + steps - 1) * (row_bytes // steps + 1)


def _round_up(value: float) -> int:
    return int(np.ceil(value))


@dataclass(frozen=True)
class ModelCost:
    """What a model takes on the device. `activation_bytes_per_sample` None: estimated."""

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
    """Return the cost of training `num_parameters`; the optimizer's state has their dtype."""
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
