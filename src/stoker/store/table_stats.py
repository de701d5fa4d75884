"""Statistics of a table in one pass and bounded memory.

Enters: values `(n, ...)` of any float or integer dtype. Leaves: a `TableStats` that merges with
its neighbours, travels as JSON, and holds what `quality.judge` and the inspect page need:
statistics per column, a sample of rows, row hashes. Costs: about 3 s per GB of float32 in rows
of 300 bytes and more on one core (docs/quality.md has the other shapes), at most 64 MB of
temporaries, and the sketches of `row_sketch`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.errors import InputError
from stoker.store.fields import Array
from stoker.store.row_sketch import FIRST_ROWS, RowHashes, RowSample
from stoker.strict_json import finite

Json = Any

MAX_COLUMNS = 4096
_CHUNK_BYTES = 2**25
# Sorting row hashes takes 60 bytes per row: this keeps narrow tables within the 64 MB.
_CHUNK_ROWS = 2**19


def _layout(values: Array, columns: Sequence[str] | None) -> tuple[tuple[str, ...], int]:
    """Return the names of the columns of `values`, and how many values of one column a row has.

    Names for the last axis make it the columns, pooled over the axes between. Without names
    every position is a column, unless there are more than 4,096: these become one column,
    "all". Windows `(n, time, features)` too wide for that keep their features apart.
    """
    shape = values.shape[1:]
    size = math.prod(shape)
    if columns is not None:
        if shape and len(columns) == shape[-1]:
            return tuple(columns), size // len(columns) if len(columns) else 0
        if len(columns) != size:
            raise InputError(
                f"{len(columns)} column names for values of shape {values.shape}.",
                f"one name for each of {shape[-1] if shape else 1} columns",
            )
        return tuple(columns), 1
    if size <= MAX_COLUMNS:
        return tuple(map(str, range(size))), 1
    if len(shape) == 2 and shape[1] <= MAX_COLUMNS:
        return tuple(map(str, range(shape[1]))), shape[0]
    return ("all",), size


def checked_values(values: Array) -> Array:
    """Return `values` as an array this module can scan; bools become uint8."""
    values = np.asarray(values)
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8 or values.ndim == 0:
        raise InputError(
            f"cannot check values of dtype {values.dtype} and shape {values.shape}.",
            "an array (n, ...) of bool, integers, float16, float32 or float64",
            "np.asarray(values, dtype=np.float32)",
        )
    return values.view(np.uint8) if values.dtype.kind == "b" else values


def row_chunks(values: Array) -> Iterator[tuple[int, Array]]:
    """Yield `(start, rows)`: contiguous, native-endian pieces of at most 32 MB or one row."""
    row_bytes = max(1, values.nbytes // max(1, len(values)))
    step = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // row_bytes))
    for start in range(0, len(values), step):
        rows = values[start : start + step]
        yield start, np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("="))


@dataclass(frozen=True, eq=False)
class TableStats:
    """Everything that is known of a field after one pass. Immutable; safe to share.

    Attributes:
        field: Name of the field.
        columns: Names of its columns; `("all",)` when pooled.
        dtype: Of the values scanned, such as "float32".
        num_rows: Rows seen.
        inner: Values of one column per row.
        values: Counts, moments and magnitudes per column.
        sample: Rows to take quantiles and pictures from.
        hashes: Distinct rows; None when a row is a single value.
    """

    field: str
    columns: tuple[str, ...]
    dtype: str
    num_rows: int
    inner: int
    values: ColumnStats
    sample: RowSample
    hashes: RowHashes | None

    @classmethod
    def scan(
        cls,
        values: Array,
        columns: Sequence[str] | None = None,
        *,
        first_row: int = 0,
        field: str = "features",
    ) -> TableStats:
        """Scan `values` `(n, ...)` once; see `_layout` for what becomes a column. `columns` name the last axis.

        `first_row` is the number of row 0, so that parts report rows of the whole; `field` is for the findings.
        """
        values = checked_values(values)
        columns, inner = _layout(values, columns)
        width = len(columns)
        scan = BlockScan(width, max(1, inner), values.dtype)
        sample = RowSample.take(values[:0].reshape(0, inner, width), first_row)
        hashes = None if inner * width <= 1 else RowHashes.take(values[:0], first_row)
        for start, rows in row_chunks(values):
            table = rows.reshape(len(rows), inner, width)
            scan.add(table.reshape(len(rows) * inner, width), first_row + start)
            sample = sample.merge(RowSample.take(table, first_row + start))
            hashes = hashes and hashes.merge(RowHashes.take(rows, first_row + start))
        dtype = values.dtype.newbyteorder("=").name
        return cls(field, columns, dtype, len(values), inner, scan.stats, sample, hashes)

    def merge(self, other: TableStats) -> TableStats:
        """Return the statistics of both; associative, whatever the order of the parts."""
        mine = (self.field, self.columns, self.dtype, self.inner)
        theirs = (other.field, other.columns, other.dtype, other.inner)
        if mine != theirs:
            raise InputError(
                f"cannot merge statistics of {self._about()} with {other._about()}.",
                "parts of one field: same name, columns and dtype",
            )
        return TableStats(
            *mine[:3],
            self.num_rows + other.num_rows,
            self.inner,
            self.values.merge(other.values),
            self.sample.merge(other.sample),
            self.hashes.merge(other.hashes) if self.hashes and other.hashes else None,
        )

    def _about(self) -> str:
        return f"{self.field!r} ({len(self.columns)} columns, {self.dtype}, {self.inner} per row)"

    @property
    def num_values(self) -> int:
        """Values per column."""
        return self.values.num_values

    @property
    def std(self) -> Array:
        """Standard deviation of the finite values (population), NaN where there are none."""
        count = self.values.num_finite
        with np.errstate(all="ignore"):
            return np.where(count > 0, np.sqrt(self.values.squares / np.maximum(count, 1)), np.nan)

    def sampled(self, column: int) -> Array:
        """Return the finite sampled values of a column, as float64."""
        values = self.sample.values[:, :, column].astype(np.float64).ravel()
        return values[np.isfinite(values)]

    def quantiles(self, shares: Sequence[float], column: int) -> Array:
        """Return quantiles of the finite sampled values; NaN where there are none."""
        values = self.sampled(column)
        if len(values) == 0:
            return np.full(len(shares), np.nan)
        return np.quantile(values, shares, method="lower")

    def median_bin(self, column: int) -> int | None:
        """Return the exponent bin of the median non-zero magnitude; None when all are zero."""
        counts = self.values.bins[column].copy()
        counts[0] -= self.values.num_zero[column]
        counts[BIN_NOT_FINITE] = 0
        running = np.cumsum(counts)
        if running[-1] == 0:
            return None
        return int(np.searchsorted(running, (running[-1] + 1) // 2))

    def to_json(self) -> Json:
        """Return the statistics as JSON, without the sketches of rows: for people and programs."""
        return {
            "field": self.field,
            "columns": list(self.columns),
            "dtype": self.dtype,
            "num_rows": self.num_rows,
            "inner": self.inner,
            "values": self.values.to_json(),
            "num_duplicates": self.hashes and self.hashes.num_duplicates,
        }


# -- per column -------------------------------------------------------------------------------------
# A block of 2 MB is turned column-first, so that every reduction runs along contiguous memory, and the exponent bits
# of its floats are counted per column. That one histogram says where NaN, inf, zeros, denormals and large values are;
# rows are looked up only in columns that have some, and only until five are known. About 2 s per GB of float32.


FP16_MAX = 65504.0
# 1e15 as float32 holds it: one step (6.7e7) below the decimal number.
HUGE = float(np.float32(1e15))

# A magnitude in [2^(b - 127), 2^(b - 126)) is counted in bin b, as float32 stores its exponent.
# Bin 0 holds zeros and denormals, bin 255 what is not finite; float64 beyond the range of
# float32 is counted in the last bin on its side.
NUM_BINS = 256
BIN_NOT_FINITE = 255
BIN_2_TO_16 = 143

# Measured: 2^18 and 2^20 are 15 % and 40 % slower (cache against calls).
_BLOCK_VALUES = 2**19
_MIN_BLOCK_ROWS = 256


def as_float(values: Array) -> Array:
    """Return values in the float type they are judged in; int64 beyond 2^53 is rounded."""
    if values.dtype in (np.float32, np.float64):
        return values
    return values.astype(np.float32 if values.dtype.itemsize <= 2 else np.float64)


@dataclass(eq=False)
class ColumnStats:
    """Counts, moments and magnitudes of each column. Arrays are `(columns,)` unless said."""

    num_values: int  # values seen per column, all columns alike
    bins: Array  # `(columns, 256)` int64, values by exponent (see `NUM_BINS`)
    num_nan: Array
    num_inf: Array
    num_zero: Array
    num_denormal: Array
    num_over_fp16: Array
    num_huge: Array
    low: Array
    high: Array
    mean: Array
    squares: Array
    # first rows, at most five, by (what, column); what is "nan", "inf", "denormal", "over-fp16", "huge" or, from
    # 2^16 on, the bin number as text
    first_rows: dict[tuple[str, int], tuple[int, ...]]

    @classmethod
    def empty(cls, num_columns: int) -> ColumnStats:
        """Return statistics of no values."""
        counts = {name: np.zeros(num_columns, dtype=np.int64) for name in _COUNTS}
        return cls(
            num_values=0,
            bins=np.zeros((num_columns, NUM_BINS), dtype=np.int64),
            low=np.full(num_columns, np.inf),
            high=np.full(num_columns, -np.inf),
            mean=np.zeros(num_columns),
            squares=np.zeros(num_columns),
            first_rows={},
            **counts,
        )

    @property
    def num_finite(self) -> Array:
        """Values that are neither NaN nor infinite."""
        return self.num_values - self.num_nan - self.num_inf

    def rows_of(self, what: str, column: int) -> tuple[int, ...]:
        """Return the first rows noted for a column."""
        return self.first_rows.get((what, column), ())

    def count_from(self, first_bin: int, column: int) -> int:
        """Count finite magnitudes of at least `2 ** (first_bin - 127)`."""
        return int(self.bins[column, first_bin:BIN_NOT_FINITE].sum())

    def rows_from(self, first_bin: int, column: int) -> tuple[int, ...]:
        """Return the first rows of such magnitudes; known from bin 143 (2^16) on."""
        rows: set[int] = set()
        for index in range(first_bin, BIN_NOT_FINITE):
            rows.update(self.rows_of(str(index), column))
        return tuple(sorted(rows)[:FIRST_ROWS])

    def merge(self, other: ColumnStats) -> ColumnStats:
        """Return the statistics of both."""
        both = copy.deepcopy(self)
        both.add(other)
        return both

    def add(self, other: ColumnStats) -> None:
        """Merge in place: `bins` is large."""
        self.mean, self.squares = _merge_moments(self, other)
        self.num_values += other.num_values
        for name in ("bins", *_COUNTS):
            total = getattr(self, name)
            total += getattr(other, name)
        np.minimum(self.low, other.low, out=self.low)
        np.maximum(self.high, other.high, out=self.high)
        for key, more in other.first_rows.items():
            known = self.first_rows.get(key, ())
            self.first_rows[key] = tuple(sorted({*known, *more})[:FIRST_ROWS])

    def to_json(self) -> Json:
        """Return everything as JSON; numbers that are not finite become None."""
        rows: dict[str, dict[str, list[int]]] = {}
        for (what, column), found in self.first_rows.items():
            rows.setdefault(what, {})[str(column)] = list(found)
        return {
            "num_values": self.num_values,
            "bins": [_trim(counts) for counts in self.bins],
            "first_rows": rows,
            **{name: getattr(self, name).tolist() for name in _COUNTS},
            **{name: finite(getattr(self, name).tolist()) for name in _NUMBERS},
        }


_COUNTS = ("num_nan", "num_inf", "num_zero", "num_denormal", "num_over_fp16", "num_huge")
_NUMBERS = ("low", "high", "mean", "squares")


def _trim(counts: Array) -> list[Json]:
    used = np.flatnonzero(counts)
    if len(used) == 0:
        return [0, []]
    return [int(used[0]), counts[used[0] : used[-1] + 1].tolist()]


def _merge_moments(a: ColumnStats, b: ColumnStats) -> tuple[Array, Array]:
    """Combine means and sums of squared deviations (Chan, Golub, LeVeque)."""
    count_a, count_b = a.num_finite, b.num_finite
    total = np.maximum(count_a + count_b, 1)
    with np.errstate(all="ignore"):
        delta = b.mean - a.mean
        mean = a.mean + delta * (count_b / total)
        squares = a.squares + b.squares + delta * delta * (count_a * (count_b / total))
    # An empty side must not turn the other's overflow or rounding into something new.
    mean = np.where(count_b == 0, a.mean, np.where(count_a == 0, b.mean, mean))
    squares = np.where(count_b == 0, a.squares, np.where(count_a == 0, b.squares, squares))
    return mean, squares


class BlockScan:
    """Adds blocks of floats to one `ColumnStats`."""

    def __init__(self, num_columns: int, inner: int, dtype: np.dtype[Any]) -> None:
        self.stats = ColumnStats.empty(num_columns)
        self._inner = inner
        # float16 is scanned as float32, where its denormals (below 2^-14) are ordinary numbers.
        self._first_normal_bin = 113 if dtype == np.float16 else 1
        self._offsets = np.arange(num_columns, dtype=np.int64)[:, None] * NUM_BINS
        self._full: set[tuple[str, int]] = set()

    def add(self, table: Array, first_row: int) -> None:
        """Scan `(m, columns)` rows of a flattened chunk that starts at `first_row`."""
        step = max(_MIN_BLOCK_ROWS, _BLOCK_VALUES // max(1, table.shape[1]))
        for start in range(0, len(table), step):
            block = np.ascontiguousarray(as_float(table[start : start + step]).T)
            with np.errstate(all="ignore"):
                bins = _bins_of(block)
                keys = bins + self._offsets
                counts = np.bincount(keys.ravel(), minlength=self._offsets.size * NUM_BINS)
                counts = counts.reshape(-1, NUM_BINS)
                part = _block_moments(block, counts)
                part.bins = counts
                self._count_defects(part, block)
                self._note_rows(part, block, bins, start, first_row)
                self.stats.add(part)

    def _count_defects(self, part: ColumnStats, block: Array) -> None:
        small = part.bins[:, : self._first_normal_bin].sum(axis=1)
        (at,) = np.nonzero(small)
        if len(at):
            part.num_zero[at] = (block[at] == 0).sum(axis=1)
            part.num_denormal[at] = small[at] - part.num_zero[at]
        magnitude = np.maximum(np.abs(part.low), np.abs(part.high))
        (at,) = np.nonzero((magnitude > FP16_MAX) & (part.num_finite > 0))
        if len(at):
            large = np.abs(block[at])
            finite = np.isfinite(large)
            part.num_over_fp16[at] = ((large > FP16_MAX) & finite).sum(axis=1)
            part.num_huge[at] = ((large >= HUGE) & finite).sum(axis=1)

    def _note_rows(
        self, part: ColumnStats, block: Array, bins: Array, start: int, first_row: int
    ) -> None:
        for what, count in _DEFECTS.items():
            for column in np.flatnonzero(getattr(part, count)).tolist():
                if (what, column) not in self._full:
                    hit = self._is(what, block[column], bins[column])
                    self._note(what, column, hit, start, first_row)
        for column in np.flatnonzero(part.num_over_fp16).tolist():
            large = np.flatnonzero(part.bins[column, BIN_2_TO_16:BIN_NOT_FINITE])
            for index in (large + BIN_2_TO_16).tolist():
                if (str(index), column) not in self._full:
                    self._note(str(index), column, bins[column] == index, start, first_row)

    def _is(self, what: str, values: Array, bins: Array) -> Any:
        if what == "nan":
            return np.isnan(values)
        if what == "inf":
            return np.isinf(values)
        if what == "denormal":
            return (bins < self._first_normal_bin) & (values != 0)
        large = np.abs(values)
        return (large > FP16_MAX if what == "over-fp16" else large >= HUGE) & np.isfinite(large)

    def _note(self, what: str, column: int, hit: Array, start: int, first_row: int) -> None:
        rows = np.unique((np.flatnonzero(hit) + start) // self._inner + first_row)
        known = {*self.stats.first_rows.get((what, column), ()), *rows[:FIRST_ROWS].tolist()}
        self.stats.first_rows[what, column] = tuple(sorted(known)[:FIRST_ROWS])
        # Rows come in rising order, so the first five found are the first five there are.
        if len(known) >= FIRST_ROWS:
            self._full.add((what, column))


_DEFECTS = {
    "nan": "num_nan",
    "inf": "num_inf",
    "denormal": "num_denormal",
    "over-fp16": "num_over_fp16",
    "huge": "num_huge",
}


def _bins_of(block: Array) -> Array:
    if block.dtype == np.float32:
        bins = block.view(np.uint32) >> np.uint32(23)
        bins &= np.uint32(255)
        return bins
    wide = (block.view(np.uint64) >> np.uint64(52)).view(np.int64) & 2047
    bins = np.clip(wide - 896, 1, BIN_NOT_FINITE - 1)
    bins[wide == 0] = 0
    bins[wide == 2047] = BIN_NOT_FINITE
    return bins


def _block_moments(block: Array, counts: Array) -> ColumnStats:
    """Return range, mean and squared deviations of each row of a column-first block."""
    part = ColumnStats.empty(len(block))
    part.num_values = block.shape[1]
    wide = block.astype(np.float64, copy=False)
    part.low, part.high = block.min(axis=1).astype(float), block.max(axis=1).astype(float)
    part.mean = wide.mean(axis=1)
    deviation = wide - part.mean[:, None]
    part.squares = np.einsum("ij,ij->i", deviation, deviation)
    (at,) = np.nonzero(counts[:, BIN_NOT_FINITE])
    if len(at) == 0:
        return part
    wide = wide[at]
    finite = np.isfinite(wide)
    num_finite = finite.sum(axis=1)
    part.num_nan[at] = np.isnan(wide).sum(axis=1)
    part.num_inf[at] = block.shape[1] - num_finite - part.num_nan[at]
    part.low[at] = np.where(finite, wide, np.inf).min(axis=1)
    part.high[at] = np.where(finite, wide, -np.inf).max(axis=1)
    part.mean[at] = np.where(finite, wide, 0).sum(axis=1) / np.maximum(num_finite, 1)
    deviation = np.where(finite, wide - part.mean[at][:, None], 0)
    part.squares[at] = np.einsum("ij,ij->i", deviation, deviation)
    return part
