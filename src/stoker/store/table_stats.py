"""Statistics of a table in one pass and bounded memory.

Enters: values `(n, ...)` of any float or integer dtype. Leaves: a `TableStats` that merges with
its neighbours, travels as JSON, and holds what `quality.judge` and the inspect page need:
statistics per column, a sample of rows, row hashes. Costs: about 3 s per GB of float32 in rows
of 300 bytes and more on one core (docs/quality.md has the other shapes), at most 64 MB of
temporaries, and the sketches of `row_sketch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.errors import InputError
from stoker.store.column_stats import BIN_NOT_FINITE, BlockScan, ColumnStats
from stoker.store.fields import Array
from stoker.store.row_sketch import SAMPLE_VALUES, RowHashes, RowSample

Json = Any

MAX_COLUMNS = 4096
_CHUNK_BYTES = 2**25
# Sorting row hashes takes 60 bytes per row: this keeps narrow tables within the 64 MB.
_CHUNK_ROWS = 2**19


@dataclass(frozen=True)
class Layout:
    """How a field becomes a table.

    Attributes:
        columns: Names of the columns.
        inner: Values of one column per row: the middle axes, or all axes of a pooled field.
    """

    columns: tuple[str, ...]
    inner: int

    @classmethod
    def of(cls, values: Array, columns: Sequence[str] | None) -> Layout:
        """Decide what the columns of `values` are.

        Names for the last axis make it the columns, pooled over the axes between. Without names
        every position is a column, unless there are more than 4,096: these become one column,
        "all". Windows `(n, time, features)` too wide for that keep their features apart.
        """
        shape = values.shape[1:]
        size = math.prod(shape)
        if columns is not None:
            if shape and len(columns) == shape[-1]:
                return cls(tuple(columns), size // len(columns) if len(columns) else 0)
            if len(columns) != size:
                raise InputError(
                    f"{len(columns)} column names for values of shape {values.shape}.",
                    f"one name for each of {shape[-1] if shape else 1} columns",
                )
            return cls(tuple(columns), 1)
        if size <= MAX_COLUMNS:
            return cls(tuple(str(index) for index in range(size)), 1)
        if len(shape) == 2 and shape[1] <= MAX_COLUMNS:
            return cls(tuple(str(index) for index in range(shape[1])), shape[0])
        return cls(("all",), size)

    def table(self, values: Array) -> Array:
        """Return `values` as `(n, inner, columns)`."""
        return values.reshape(len(values), self.inner, len(self.columns))


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
        inner: Values of one column per row (see `Layout`).
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
        """Scan `values` once.

        Args:
            values: `(n, ...)`; see `Layout.of` for what becomes a column.
            columns: Names of the last axis.
            first_row: Number of row 0, so that parts report rows of the whole.
            field: Name of the field, for the findings.
        """
        values = checked_values(values)
        layout = Layout.of(values, columns)
        scan = BlockScan(len(layout.columns), max(1, layout.inner), values.dtype)
        sample = RowSample.take(layout.table(values[:0]), first_row)
        is_single = layout.inner * len(layout.columns) <= 1
        hashes = None if is_single else RowHashes.take(values[:0], first_row)
        for start, rows in row_chunks(values):
            table = layout.table(rows)
            flat = table.reshape(len(rows) * layout.inner, len(layout.columns))
            scan.add(flat, first_row + start)
            sample = sample.merge(RowSample.take(table, first_row + start))
            hashes = hashes and hashes.merge(RowHashes.take(rows, first_row + start))
        return cls(
            field, layout.columns, values.dtype.newbyteorder("=").name, len(values),
            layout.inner, scan.stats, sample, hashes,
        )  # fmt: skip

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
        """Return the statistics as JSON, without the row hashes and most of the sample: for people and programs."""
        width = max(1, self.sample.values[:1].size)
        sample = self.sample.shrink(max(64, min(256, SAMPLE_VALUES // 16 // width)))
        return {
            "field": self.field,
            "columns": list(self.columns),
            "dtype": self.dtype,
            "num_rows": self.num_rows,
            "inner": self.inner,
            "values": self.values.to_json(),
            "sample": sample.to_json(),
            "hashes": self.hashes.to_json() if self.hashes else None,
        }
