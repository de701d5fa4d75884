"""Columns: each field as one long array of rows, and the range of rows that each sample has in it.

Enters: an open store, field names, the samples to load. Leaves: `Column`s. A sample of a dense field has one row, of
a series a window of a fixed number of rows, of a ragged field any number of rows. Costs: one or two int64 per sample
in host memory; only offsets and window ends are read.

All three kinds are ranges of rows of one array, so chunks, rings and gathers are written once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, cast

import numpy as np
import xxhash

from stoker.display import command, nearest
from stoker.errors import CorruptError, InputError
from stoker.plan.facts import FieldFacts, StoreFacts, even_chunks, store_facts
from stoker.store.arrays import StoredArray
from stoker.store.fields import Array, SplitCodes
from stoker.store.manifest import FieldInfo
from stoker.store.reader import Store
from stoker.store.shard import Shard

BESIDE_PICTURES = ("image_size", "image_orientation")
"""Fields beside encoded pictures. The loader reads them itself; they come into batches only when they are named."""


@dataclass(frozen=True)
class Values:
    """One dataset over all shards, as one array.

    Attributes:
        name: Name in the batch: "features", "M5", "M5/gap", "mz".
        num_rows: Rows over all shards.
        shape: Shape of one row.
        dtype: Type of a value, in native byte order.
        pieces: `(first row, end row, open)` per shard; `open()` returns its array and opens the shard if needed.
        is_packed: Whether stoker wrote all shards; their rows are contiguous then.
    """

    name: str
    num_rows: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    pieces: Sequence[tuple[int, int, Callable[[], StoredArray]]]
    is_packed: bool = False

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def spans(self, start: int, stop: int) -> Iterator[tuple[StoredArray, int, int, int]]:
        """Yield `(array, first, end, offset)` per shard touched: rows of the array, and their place in the range."""
        for open_array, first, last, offset in self.closed_spans(start, stop):
            yield open_array(), first, last, offset

    def closed_spans(
        self, start: int, stop: int
    ) -> Iterator[tuple[Callable[[], StoredArray], int, int, int]]:
        """Yield the same with functions that return the arrays: their shards are not opened yet."""
        for low, high, open_array in self.pieces:
            first, last = max(start, low), min(stop, high)
            if first < last:
                yield open_array, first - low, last - low, first - start


@dataclass(frozen=True)
class Column:
    """One field of a loader.

    Attributes:
        field: Name of the field.
        kind: Kind of the field in the store.
        values: Datasets of the field; all use the same `starts`.
        starts: First row of each position's range.
        lengths: Rows of each position's range; one number when all are equal.
        is_encoded: Whether the rows are bytes of pictures, which are decoded on the way into a batch.
    """

    field: str
    kind: Literal["dense", "ragged", "series"]
    values: tuple[Values, ...]
    starts: Array
    lengths: Array | int
    is_encoded: bool = False

    def extent(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first row that positions `start` to `stop` need, and one past the last."""
        starts = self.starts[start:stop]
        if len(starts) == 0:
            return 0, 0
        ends = starts + (
            self.lengths if isinstance(self.lengths, int) else self.lengths[start:stop]
        )
        return int(starts.min()), int(ends.max())

    def extents(self, chunks: Sequence[tuple[int, int]]) -> Array:
        """Return `(chunks, 2)`: the first row that each chunk of positions needs, and one past the last."""
        if not self._is_rising:
            return np.array([self.extent(*chunk) for chunk in chunks], np.int64).reshape(-1, 2)
        edges = np.array(chunks, np.int64).reshape(-1, 2)
        last = edges[:, 1] - 1
        length = self.lengths if isinstance(self.lengths, int) else self.lengths[last]
        return np.stack([self.starts[edges[:, 0]], self.starts[last] + length], axis=1)

    @cached_property
    def _is_rising(self) -> bool:
        """Whether starts and ends both ascend, so that the first and last sample of a range bound its rows."""
        ends = self.starts + self.lengths
        return bool((np.diff(self.starts) >= 0).all() and (np.diff(ends) >= 0).all())

    @cached_property
    def counts_samples(self) -> bool:
        """Whether position i is exactly row i."""
        if self.kind != "dense" or not len(self.starts):
            return False
        return bool(
            self.starts[-1] == len(self.starts) - 1
        )  # starts ascend from 0 or more, without repeats

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all its datasets."""
        return sum(values.row_bytes for values in self.values)


def column_facts(store: Store, columns: Sequence[Column], num_samples: int) -> StoreFacts:
    """Return the facts of a loader's data. Sizes are exact, because the rows of every sample are known."""
    estimated = store_facts(store.manifest, [column.field for column in columns], num_samples)

    def exact(column: Column, facts: FieldFacts) -> FieldFacts:
        def slot_bytes(most: int) -> int:
            extents = column.extents(even_chunks(num_samples, max(1, most)))
            return int((extents[:, 1] - extents[:, 0]).max(initial=0)) * column.row_bytes

        return replace(facts, device_bytes=slot_bytes(num_samples), slot_bytes=slot_bytes)

    pairs = zip(columns, estimated.fields, strict=True)
    return replace(estimated, fields=tuple(exact(column, facts) for column, facts in pairs))


def check_samples(samples: Array | str | slice | None, store: Store) -> Array:
    """Return sample numbers as ascending int64; None selects all samples of the store.

    Args:
        samples: Sample numbers, one bool per sample, a slice, or the name of a split.
        store: Store that holds the samples.
    """
    if samples is None and store.num_samples:
        return np.arange(store.num_samples, dtype=np.int64)
    if isinstance(samples, str):
        from stoker.loader.splits import select_samples  # the sources come with it: 0.2 s

        samples = select_samples(store, cast(Any, samples))  # other names are refused there
    if isinstance(samples, SplitCodes) and samples.dtype != bool:
        raise InputError(
            f"samples is a split of {len(samples):,} samples: 0 train, 1 val, 2 test, 3 purged.",
            "the samples of one of its parts: split.train, split.val or split.test",
            "samples=split.train",
        )
    if isinstance(samples, slice):
        samples = np.arange(store.num_samples)[samples]
    samples = np.asarray(samples)
    if samples.dtype == bool and samples.shape == (store.num_samples,):
        samples = np.flatnonzero(samples)
    if not store.num_samples or not samples.size:
        if not store.num_samples:
            look = command("stoker", "inspect", store.name)
            raise InputError(f"{store.name} has no samples.", "1 or more", look)
        raise InputError("no samples were asked for.", "1 or more", "look at what chose them")
    if samples.ndim != 1 or samples.dtype.kind not in "iu":
        fix = "np.flatnonzero(mask)"
        if not samples.ndim:  # a count, or a share
            is_count = samples.dtype.kind in "iu" and samples > 0
            fix = f"slice({samples})" if is_count else f"split_randomly({store.num_samples}).train"
        raise InputError(f"samples are {samples.dtype} {samples.shape}.", "1-D whole numbers", fix)
    allowed = f"rising, without repeats, from 0 to {store.num_samples - 1}"
    outside = samples[(samples < 0) | (samples >= store.num_samples)]
    if len(outside):
        raise InputError(
            f"sample {outside[0]} was asked of {store.name}, which has {store.num_samples:,}.",
            allowed,
            f"samples[(samples >= 0) & (samples < {store.num_samples})]",
        )
    samples = samples.astype(np.int64)
    falls = np.flatnonzero(np.diff(samples) <= 0)
    if len(falls) and len(samples) == store.num_samples and samples.max() <= 3:
        raise InputError(
            f"samples are {len(samples):,} numbers from 0 to {samples.max()}: a split, one number per sample.",
            allowed,
            "samples=stoker.loader.splits.samples_of(samples, 'train')",
        )
    if len(falls):
        before, after = samples[falls[0] : falls[0] + 2]
        raise InputError(
            f"sample {after} was asked for after {before}.",
            allowed,
            "np.unique(samples), with order='shuffled' for another order",
        )
    return samples


def digest_samples(samples: Array) -> str:
    """Return a digest of sample numbers; a lane plan and its loader must have the same."""
    return str(xxhash.xxh3_64_hexdigest(np.ascontiguousarray(samples, dtype=np.int64).data))


def default_fields(fields: Mapping[str, FieldInfo]) -> list[str]:
    """Return the default fields: all except text and, if pictures are encoded, `BESIDE_PICTURES`."""
    is_encoded = any(info.encoding == "picture" for info in fields.values())
    beside = BESIDE_PICTURES if is_encoded else ()
    return [name for name, info in fields.items() if info.encoding != "utf8" and name not in beside]


def make_columns(store: Store, fields: Sequence[str] | None, samples: Array) -> list[Column]:
    """Return the columns of `fields` for the given samples, in order; None selects `default_fields`."""
    if fields is None:
        fields = default_fields(store.fields)
    if isinstance(fields, str):
        raise InputError(f"fields is {fields!r}.", "a list of names", f"fields=[{fields!r}]")
    unknown = [name for name in fields if name not in store.fields]
    if unknown or not fields:
        near = nearest(unknown[0], store.fields) if unknown else None
        raise InputError(
            f"fields {unknown or 'none'} were asked of {store.name}.{left_aside(store, unknown)}",
            ", ".join(store.fields),
            f"fields={[near] if near else [*store.fields][:1]}",
        )
    columns = []
    for name in fields:
        info = store.fields[name]
        if info.kind == "dense":
            values = _values(store, name, name, info.shape, info.dtype)
            columns.append(Column(name, "dense", (values,), samples, 1))
        else:
            columns.append((_ragged if info.kind == "ragged" else _series)(store, name, samples))
    return columns


def batch_names(columns: Sequence[Column]) -> list[str]:
    """Return the names of the tensors in a batch of these columns."""
    names: list[str] = []
    for column in columns:
        names += [values.name for values in column.values]
        has_offsets = column.kind == "ragged" and not column.is_encoded
        names += [f"{column.field}/offsets"] if has_offsets else []
    return names


def left_aside(store: Store, names: Sequence[str]) -> str:
    """Return why these datasets are not fields, as text to append to a sentence; "" if unknown."""
    return "".join(f" ({note})" for note in map(store.left_aside, names) if note)


def _values(store: Store, dataset: str, name: str, shape: Sequence[int], dtype: str) -> Values:
    pieces: list[tuple[int, int, Callable[[], StoredArray]]] = []
    base = 0
    for shard in store.shards:
        rows = store.manifest.shards[len(pieces)].rows[dataset]
        # Opened when it is first read: a loader may need few of a store's shards.
        pieces.append((base, base + rows, partial(_open_array, shard, dataset)))
        base += rows
    native = np.dtype(dtype).newbyteorder("=")
    is_packed = all(shard.info is not None for shard in store.shards)
    return Values(name, base, tuple(shape), native, pieces, is_packed)


def _open_array(shard: Shard, dataset: str) -> StoredArray:
    return shard.arrays[dataset]


def _ragged(store: Store, name: str, samples: Array) -> Column:
    info = store.fields[name]
    values = _values(store, f"{name}/values", name, info.shape, info.dtype)
    starts = np.empty(store.num_samples, dtype=np.int64)
    lengths = np.empty(store.num_samples, dtype=np.int64)
    first = base = 0
    for number, shard in enumerate(store.shards):
        offsets = shard.whole(f"{name}/offsets")
        num_rows = values.pieces[number][1] - values.pieces[number][0]
        if int(offsets[0]) < 0 or int(offsets[-1]) > num_rows or (np.diff(offsets) < 0).any():
            # Checksums hold packed ones; a plain file may have been cut off while it was written.
            raise CorruptError(
                f"{shard.path}: the offsets of {name!r} go from {offsets[0]} to {offsets[-1]}, and there are "
                f"{num_rows:,} rows.",
                "offsets that rise, within the rows",
                "write the file again: its writer may have been stopped",
            )
        last = first + len(offsets) - 1
        starts[first:last] = offsets[:-1] + base
        lengths[first:last] = np.diff(offsets)
        first, base = last, base + int(offsets[-1])
    is_encoded = info.encoding == "picture"
    return Column(name, "ragged", (values,), starts[samples], lengths[samples], is_encoded)


def _series(store: Store, name: str, samples: Array) -> Column:
    info = store.fields[name]
    rows = _values(store, f"{name}/rows", name, info.shape, info.dtype)
    gaps = [_values(store, f"{name}/gap", f"{name}/gap", (), "|u1")] if "/gap" in info.parts else []
    window = info.window or 0
    ends = [
        shard.whole(f"{name}/ends") + base
        for shard, (base, _, _) in zip(store.shards, rows.pieces, strict=True)
    ]
    starts = (np.concatenate(ends) if ends else np.empty(0, np.int64)) - window
    return Column(name, "series", (rows, *gaps), starts[samples], window)
