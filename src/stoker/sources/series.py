"""`stoker pack series`: windows of any numeric series or stream of tokens, each row stored once.

Enters: `.npy`, `.npz`, HDF5 or Zarr arrays of shape (rows,) or (rows, features); columns of CSV, Parquet or Feather;
any file as raw numbers of a given type. Leaves: one series field whose windows are cut on the device, and `split`
where shares are given. Integers of arrays and Parquet keep their type (uint16 tokens stay uint16), those of CSV become
floats. Without a time column there is neither time nor gap. Costs: one read; 8 bytes per window for where it ends; one
part of about 256 MB per worker.

Windows do not cross files. A part repeats the rows that its first windows share with the previous part.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import xxhash

from stoker import bounds
from stoker.display import command, nearest
from stoker.errors import InputError, RefusalList, SourceError, require_file
from stoker.ownership import always, writing
from stoker.sources.arrays import PART_BYTES, ArraysSource, Rows, opened_arrays
from stoker.sources.contract import (
    Account,
    Json,
    Part,
    PartContext,
    PartData,
    PlainSource,
    Preparation,
    check_shares,
)
from stoker.sources.tables.columns import Column, find_kind, needs_float64, numbers, times
from stoker.sources.tables.layout import TextOptions
from stoker.sources.tables.reading import batches, is_table, open_table, shown_names
from stoker.sources.times import match_time
from stoker.store.fields import Array, Dense, FieldData, Series
from stoker.store.plain import Selection
from stoker.store.zarr import is_zarr

_ARRAYS = {".npy", ".npz", ".h5", ".hdf5", ".zarr"}
_TYPES = (
    "uint8", "uint16", "uint32", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
)  # fmt: skip
_PURGED = 3


@dataclass(frozen=True)
class SeriesSource(PlainSource):
    """Windows over series.

    Attributes:
        paths: The files, one series each.
        window: Rows of a window.
        stride: Rows from one window to the next; None takes the window, so that windows do not overlap.
        dtype: Type of the numbers in a raw file; None reads the file by its ending.
        columns: Columns of a table, or one array of an `.npz` or HDF5 file; empty takes all columns, or the only array.
        time_column: Column of a table with the time of each row; None stores no times.
        split: Shares of train, validation and test in the order of the rows; windows over a boundary are purged.
        name: Name of the field.
        part_bytes: Size of one part, and so of one shard.
    """

    paths: tuple[Path, ...]
    window: int
    stride: int | None = None
    dtype: str | None = None
    columns: tuple[str, ...] = ()
    time_column: str | None = None
    split: tuple[float, ...] = ()
    name: str = "series"
    part_bytes: int = PART_BYTES

    kind: ClassVar[str] = "series"

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(map(Path, self.paths)))
        if self.window < 1 or self.step < 1:
            raise InputError(
                f"the window is {self.window} and the stride {self.step}.",
                "1 row or more",
                "--window 16 --stride 16 (window=16, stride=16)",
            )
        if self.dtype is not None and self.dtype not in _TYPES:
            near = nearest(self.dtype, _TYPES) or "uint16"
            raise InputError(f"--dtype is {self.dtype!r}.", ", ".join(_TYPES), f"--dtype {near}")
        check_shares(self.split)

    @property
    def step(self) -> int:
        """Rows from one window to the next."""
        return self.window if self.stride is None else self.stride

    def prepare(self, scratch: Path) -> Preparation:
        """Count the windows of every file, and cut them into parts."""
        found = []
        for path in self.paths:
            with _open_rows(self, path, scratch) as rows:
                row_bytes = rows.row_bytes + (0 if rows.time is None else 9)
                found.append((rows.shape[0], row_bytes))
        total, first_row, size = sum(length for length, _ in found), 0, 1 << 20
        parts: list[Part] = []
        unused = {"after the last whole window": 0, "between two windows": 0}
        for path, (length, row_bytes) in zip(self.paths, found, strict=True):
            if length < self.window:
                raise SourceError(
                    f"{path} has {length:,} rows, fewer than a window of {self.window:,}.",
                    "a window that is at most as long as the series",
                    command("--window", max(1, length)),
                )
            count = (length - self.window) // self.step + 1
            unused["after the last whole window"] += length - (count - 1) * self.step - self.window
            unused["between two windows"] += (count - 1) * max(0, self.step - self.window)
            most = max(1, self.part_bytes // max(1, self.step * row_bytes))
            for start in range(0, count, most):
                num = min(most, count - start)
                payload = (path, start, first_row, total, unused)
                label = f"{path} windows {start}-{start + num}"
                parts.append(Part(len(parts), label, num, payload, str(path), start))
                size += ((num - 1) * self.step + self.window) * row_bytes + 9 * num
            first_row += length
        return Preparation(parts, size, unit="windows")

    def build(self, part: Part, context: PartContext) -> PartData:
        """Read the rows of some windows, and where each of them ends."""
        path, start, first_row, total, unused = part.payload
        low = start * self.step
        high = low + (part.num_samples - 1) * self.step + self.window
        ends = np.arange(part.num_samples) * self.step + self.window
        with _open_rows(self, path, context.scratch) as opened:
            rows = opened.read(low, high)
            assert isinstance(rows, Dense)
            time = gap = duration = None
            if opened.time is not None:
                steps = np.diff(opened.time)
                values, counts = np.unique(steps, return_counts=True)
                duration = int(values[np.argmax(counts)]) if len(values) else 1
                gap = np.concatenate([[False], steps > duration])[low:high]
                time = np.array(opened.time[low:high])
        fields: dict[str, FieldData] = {
            self.name: Series(rows.values, time, ends, self.window, gap, opened.columns, duration)
        }
        if self.split:
            begins = first_row + low + ends - self.window
            fields["split"] = Dense(_splits(begins, self.window, total, self.split))
        return PartData(fields, extra={"rows": total, "unused": unused, "windows": len(ends)})

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Account for every row."""
        total, unused = extras[0]["rows"], extras[0]["unused"]
        windows = sum(extra["windows"] for extra in extras)
        rows = Account("rows", total, total - sum(unused.values()), ignored=unused)
        accounts = [asdict(rows), asdict(Account("windows", windows, windows))]
        return {"window": self.window, "stride": self.step, "accounts": accounts}


def _splits(begins: Array, window: int, total: int, shares: Sequence[float]) -> Array:
    """Return 0, 1 or 2 for windows inside one share of the rows, and 3 for windows across a boundary."""
    edges = [0, *(round(total * share) for share in np.cumsum(shares)[:2].tolist()), total]
    split = np.full(len(begins), _PURGED, np.uint8)
    for number, (low, high) in enumerate(pairwise(edges)):
        split[(begins >= low) & (begins + window <= high)] = number
    return split


# -- rows ----------------------------------------------------------------------------------------


@contextmanager
def _open_rows(source: SeriesSource, path: Path, scratch: Path) -> Iterator[Rows]:
    """Open one file as rows of numbers."""
    if not is_zarr(path):
        require_file(path, "the series")
    suffix = path.suffix.lower()
    is_array = suffix in _ARRAYS or path.is_dir()
    if source.time_column is not None and (is_array or source.dtype is not None):
        raise SourceError(
            f"--time-column with {path}, which has no columns.",
            "a time column of CSV, Parquet or Feather",
            "leave --time-column out",
        )
    is_numbers = not is_array and is_table(path) and (suffix != ".txt" or _holds_lines(path))
    if source.dtype is not None and not is_array:
        if is_numbers and suffix != ".txt":
            raise _no_raw_numbers(path, source.dtype, "leave --dtype out")
        yield _raw(path, np.dtype(source.dtype))
    elif is_array:
        chosen = ArraysSource((path,), chosen=Selection(None, source.columns, None))
        with opened_arrays(chosen, scratch) as arrays:
            if len(arrays) > 1:
                raise SourceError(
                    f"{path} holds the arrays {', '.join(arrays)}.",
                    "one array of it",
                    command("--columns", next(iter(arrays))),
                )
            (rows,) = arrays.values()
            if len(rows.shape) > 2 or rows.ragged_bytes is not None:
                raise SourceError(
                    f"{path} has the shape {rows.shape}.",
                    "(rows,) or (rows, features)",
                    command("stoker", "pack", "arrays", path, "OUT"),
                )
            if source.dtype is not None and np.dtype(source.dtype) != rows.dtype:
                raise SourceError(
                    f"--dtype is {source.dtype}, and {path} holds {rows.dtype}.",
                    "the type of the file",
                    "leave --dtype out",
                )
            yield rows
    elif is_numbers:
        yield _table(source, path, scratch)
    else:
        raise SourceError(
            f"{path} does not say what numbers it holds.",
            ".npy, .npz, .h5, CSV, Parquet; or any file and its --dtype: uint8 for bytes of text, uint16 for tokens",
            "--dtype uint8" if _looks_like_text(path) else "--dtype uint16",
        )


def _looks_like_text(path: Path) -> bool:
    """Whether a file begins as UTF-8 text does, or has an odd number of bytes and so no numbers of two each."""
    return bool(path.stat().st_size % 2) or _is_text(path)


def _is_text(path: Path) -> bool:
    with path.open("rb") as file, suppress(UnicodeDecodeError):
        text = codecs.getincrementaldecoder("utf-8")().decode(file.read(4096))
        return not any(ord(each) < 9 for each in text)
    return False


def _holds_lines(path: Path) -> bool:
    """Whether a text holds lines of numbers, perhaps below a header, and no prose."""
    with path.open("rb") as file:
        lines = file.read(4096).splitlines()
    lines = [line for line in lines[:-1] if line.strip()][1:]  # the last one may be cut
    return bool(lines) and all(re.fullmatch(rb"[0-9.,;|eE+\-\s]+|nan", line) for line in lines)


def _raw(path: Path, dtype: np.dtype[Any]) -> Rows:
    """Return the bytes of a file as numbers, little-endian."""
    size = path.stat().st_size
    if size % dtype.itemsize or not size:
        raise SourceError(
            f"{path} has {size:,} bytes, which are no whole {dtype} numbers.",
            f"a multiple of {dtype.itemsize}",
            "--dtype uint8",
        )
    if dtype.itemsize > 1 and _is_text(path):  # two letters make no number
        fix = "leave --dtype out" if _holds_lines(path) else "--dtype uint8"
        raise _no_raw_numbers(path, dtype.name, fix)
    return Rows.of(np.memmap(path, dtype.newbyteorder("<"), mode="r"))


def _no_raw_numbers(path: Path, dtype: str, fix: str) -> SourceError:
    return SourceError(
        f"--dtype is {dtype}, and {path} is text: its bytes are letters, not raw numbers.",
        "raw numbers; a table, which has numbers of its own; or the letters of a text, as uint8",
        fix,
    )


def _table(source: SeriesSource, path: Path, scratch: Path) -> Rows:
    """Return columns of a table. They are converted to numbers once and cached in `scratch`."""
    stat = path.stat()
    key = xxhash.xxh3_64_hexdigest(
        f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="replace")
    )
    place = scratch / f"series-{key}.npz"
    if not place.exists():
        names, rows, time = _read_table(source, path)
        bounds.require_disk(scratch, rows.nbytes, f"rows of {path}")
        with writing(place, always) as temporary, temporary.open("xb") as file:
            empty = np.empty(0, np.int64)
            np.savez(file, names=np.array(names), rows=rows, time=empty if time is None else time)
    with np.load(place) as kept:
        rows, columns = kept["rows"], tuple(map(str, kept["names"]))
        time = kept["time"] if len(kept["time"]) else None
    if len(columns) == 1 and time is None:
        rows, columns = rows[:, 0], ()
    return Rows.of(rows, columns=columns or None, time=time)


def _read_table(source: SeriesSource, path: Path) -> tuple[list[str], Array, Array | None]:
    """Return the names of the columns, their numbers and the times of the rows."""
    bounds.require_memory(8 * path.stat().st_size, f"reading {path}", "a .npy file in its place")
    file = open_table(path, TextOptions())
    wanted = [name for name in source.columns or file.names if name != source.time_column]
    asked = [*wanted, *([source.time_column] if source.time_column else [])]
    unknown = [name for name in asked if name not in file.names]
    if unknown or not wanted:
        near = nearest(unknown[0], file.names) if unknown else None
        raise SourceError(
            f"{path} has no column {unknown[0]!r}." if unknown else f"{path} has no columns left.",
            shown_names(file.names),
            command("--columns", near or file.names[-1]),
        )
    refused = RefusalList()
    table = pa.Table.from_batches(list(batches(file, refused, set(asked))))
    if refused:
        raise SourceError(
            f"{refused[0]}.", "whole rows: a window must not skip any", "mend that line"
        )
    made = []
    for name in wanted:
        column = table.column(name)
        if pa.types.is_integer(column.type) and not column.null_count:
            made.append(column.to_numpy())
            continue
        is_time = pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)
        values, bad = (np.empty(0), [0]) if is_time else numbers(column, name, file.decimal)
        if len(bad):
            cell = str(column[int(bad[0])])
            # Without its times, a series in the wrong order would go unnoticed.
            may_be_time = source.time_column is None and (is_time or match_time(cell) is not None)
            others = ",".join(each for each in wanted if each != name) or "NAME"
            raise SourceError(
                f"{path}: column {name!r} holds {cell[:40]!r} in row {int(bad[0])}.",
                "numbers",
                command("--time-column", name) if may_be_time else command("--columns", others),
            )
        is_wide = needs_float64(values)
        made.append(values if is_wide else values.astype(np.float32))
    time = None
    if source.time_column is not None:
        kind = find_kind(source.time_column, table.column(source.time_column), file.decimal, "date")
        if not isinstance(kind, Column):
            raise SourceError(
                f"{path}: {kind.name!r} {kind.what}.", "times", "leave --time-column out"
            )
        time, good = times(table.column(source.time_column), kind)
        if not good.all():
            raise SourceError(
                f"{path}: column {source.time_column!r} holds no time in row {np.argmin(good)}.",
                "a time in every row",
                "",
            )
        wrong = np.flatnonzero(np.diff(time) <= 0)
        if len(wrong):
            row = int(wrong[0]) + 1
            before, after = (np.datetime64(int(each), "ns") for each in time[row - 1 : row + 1])
            copy = str(path.with_name(f"{path.stem}-sorted.parquet"))
            read = "p.read_table" if file.kind == "parquet" else "c.read_csv"
            table_of = f"{read}({str(path)!r}).sort_by({source.time_column!r})"
            code = f"import pyarrow.csv as c, pyarrow.parquet as p; p.write_table({table_of}, {copy!r})"
            raise SourceError(
                f"{path}: time goes from {before} to {after} at row {row}.",
                "strictly rising times; a local clock that is set back in autumn needs its offset in every row",
                command("python3", "-c", code),
            )
    return wanted, np.stack(made, axis=1), time
