"""`stoker pack table`: CSV and Parquet rows as one float table and its target.

Enters: CSV (optionally .gz) or Parquet files with the same columns. Leaves: `features`
(rows, columns) float32 with its column names, `targets` where a target column is named, its
classes as whole numbers when it is text, and `split` when shares are given. Costs: a streaming
read and as much scratch space as the files; one part of rows in memory per worker.

Blank cells become NaN and are left to the quality gate, which names them: nothing is filled in
silently. Text that is not a number in a numeric column is refused with its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from stoker import bounds
from stoker.display import quoted
from stoker.errors import InputError, Refusal, RefusalList, SourceError, require_file
from stoker.ownership import always, writing
from stoker.sources.contract import Json, Part, PartContext, PartData, Preparation
from stoker.store.fields import Array, Dense, FieldData
from stoker.store.rewrite import keep_samples
from stoker.units import format_bytes

_PART_ROWS = 200_000
_PART_BYTES = 512 << 20
"""Of text: wide rows make a part shorter, so that it fits the memory and Arrow's 2 GiB of text in a column."""
_CSV_BLOCK_BYTES = 8 << 20
_TABLE_FORMATS = "CSV with a header line, or Parquet"
_NULLS = ["", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "-", "?"]
_INFINITIES = {
    "inf": np.inf,
    "+inf": np.inf,
    "infinity": np.inf,
    "-inf": -np.inf,
    "-infinity": -np.inf,
}


@dataclass(frozen=True)
class TableSource:
    """Rows of tables.

    Attributes:
        paths: CSV or Parquet files, one after the other.
        target: Column to predict; None for a table without one.
        drop: Columns to leave out.
        split: Shares of train, validation and test, by row order in blocks; empty for no split.
        part_rows: Rows per part, and so per shard.
    """

    paths: tuple[Path, ...]
    target: str | None = None
    drop: tuple[str, ...] = ()
    split: tuple[float, ...] = ()
    part_rows: int = _PART_ROWS

    kind: ClassVar[str] = "table"
    version: ClassVar[int] = 2
    row_limit_seconds: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        if self.split and (
            len(self.split) != 3 or abs(sum(self.split) - 1) > 1e-6 or min(self.split) < 0
        ):
            raise InputError(
                f"the split shares are {self.split}.",
                "three shares that add up to 1",
                "split=(0.8, 0.1, 0.1), or --split 0.8,0.1,0.1",
            )

    def files(self) -> Sequence[Path]:
        """The table files."""
        return self.paths

    def options(self) -> Mapping[str, Json]:
        """Everything that changes the store."""
        return {
            "target": self.target,
            "drop": list(self.drop),
            "split": list(self.split),
            "part_rows": self.part_rows,
        }

    def prepare(self, scratch: Path) -> Preparation:
        """Read the files once as a stream, leaving Arrow pieces in `scratch` for `build`.

        A CSV cannot be entered in the middle (a quoted cell may hold line breaks), so cutting it is
        one pass; turning text into numbers, the slow half, is left to the workers.
        """
        if not self.paths:
            raise SourceError(
                "no table files were given.",
                "CSV or Parquet files",
                "stoker pack table FILE.csv OUT",
            )
        pieces: list[_Piece] = []
        refused = RefusalList()
        classes: set[str] = set()
        first_columns = self._features(_header(self.paths[0]), self.paths[0])
        for path in self.paths:
            if self._features(_header(path), path) != first_columns:
                raise SourceError(
                    f"{path} has other columns than {self.paths[0]}.",
                    "the same columns in every file",
                    "pack them apart",
                )
            for table in self._parts_of(path, refused):
                classes |= self._text_classes(table)
                piece = scratch / f"table-{len(pieces):05d}.arrow"
                bounds.require_disk(scratch, table.nbytes, f"rows of {path}")
                _write_piece(piece, table)
                before = pieces[-1] if pieces else None
                in_file = before.row + before.count if before and before.path == str(path) else 0
                first = before.first + before.count if before else 0
                pieces.append(_Piece(str(path), piece.name, in_file, first, table.num_rows))
        total = sum(piece.count for piece in pieces)
        cuts = tuple(round(total * share) for share in np.cumsum(self.split))[:2]
        parts = [
            Part(
                number,
                f"{piece.path} rows {piece.row}-{piece.row + piece.count}",
                piece.count,
                (piece, cuts, tuple(sorted(classes))),
                piece.path,
                piece.row,
            )
            for number, piece in enumerate(pieces)
        ]
        return Preparation(parts, total * (len(first_columns) + 3) * 4 + (1 << 20), refused)

    def _text_classes(self, table: Any) -> set[str]:
        """Return the target's values when they are words; numbers need no class names."""
        if not self.target:
            return set()
        column = _decode(table.column(self.target))
        texts = (
            {text.strip() for text in column.unique().to_pylist() if text}
            if _is_text(column)
            else set()
        )
        return set() if all(_number(text) is not None for text in texts) else texts

    def build(self, part: Part, context: PartContext) -> PartData:
        """Turn one piece into numbers; rows with text where a number belongs are refused."""
        piece, cuts, classes = part.payload
        table = _read_piece(context.scratch / piece.file)
        columns = self._features(table.column_names, Path(piece.path))
        features = np.empty((table.num_rows, len(columns)), dtype=np.float32)
        faults: dict[int, _Fault] = {}
        for number, name in enumerate(columns):
            features[:, number] = _floats(table.column(name), name, faults)
        fields: dict[str, FieldData] = {"features": Dense(features, tuple(columns))}
        if self.target:
            fields["targets"] = Dense(self._targets(table, classes, faults))
        if cuts:
            rows = np.arange(piece.first, piece.first + table.num_rows)
            fields["split"] = Dense(np.searchsorted(cuts, rows, side="right").astype(np.uint8))
        _check_columns(faults, table, piece.path)
        keep = np.ones(table.num_rows, dtype=bool)
        keep[list(faults)] = False
        refused = [
            Refusal(piece.path, piece.row + row, faults[row].reason, unit="row")
            for row in sorted(faults)
        ]
        return PartData(keep_samples(fields, keep), refused, {"classes": list(classes)})

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Record the class names, in the order of their numbers."""
        classes = extras[0]["classes"] if extras else []
        return {"classes": classes, "target": self.target} if self.target else {}

    def _targets(self, table: Any, classes: Sequence[str], faults: dict[int, _Fault]) -> Array:
        assert self.target is not None
        column = table.column(self.target)
        if not classes:
            return _floats(column, self.target, faults)
        numbers = {name: number for number, name in enumerate(classes)}
        texts = _decode(column).to_pylist()
        values = np.array([numbers.get((text or "").strip(), -1) for text in texts], dtype=np.int64)
        for row in np.flatnonzero(values < 0):
            reason = f"no value in the target column {self.target!r}"
            faults.setdefault(int(row), _Fault(None, reason))
        return values

    def _features(self, names: Sequence[str], path: Path) -> list[str]:
        for wanted in (*self.drop, *([self.target] if self.target else [])):
            if wanted not in names:
                raise SourceError(
                    f"{path} has no column {wanted!r}.",
                    ", ".join(names[:40]),
                    "check the spelling and spaces",
                )
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SourceError(
                f"{path} has two columns called {twice!r}.", "different names", "rename one"
            )
        columns = [name for name in names if name != self.target and name not in self.drop]
        if not columns:
            raise SourceError(
                f"{path} has no feature columns left.", "at least one", "drop fewer columns"
            )
        return columns

    def _parts_of(self, path: Path, refused: RefusalList) -> Iterator[Any]:
        """Yield tables of exactly `part_rows` rows, the last one shorter, and those that grow too large."""
        import pyarrow as pa

        waiting: list[Any] = []
        rows = 0
        for batch in _batches(path, refused):
            waiting.append(batch)
            rows += batch.num_rows
            while rows >= self.part_rows:
                table = pa.Table.from_batches(waiting)
                yield table.slice(0, self.part_rows).combine_chunks()
                waiting = table.slice(self.part_rows).to_batches()
                rows -= self.part_rows
            if rows and sum(each.nbytes for each in waiting) >= _PART_BYTES:
                yield pa.Table.from_batches(waiting).combine_chunks()
                waiting, rows = [], 0
        if rows:
            yield pa.Table.from_batches(waiting).combine_chunks()


@dataclass(frozen=True)
class _Piece:
    """Rows of one file, as they wait in the scratch folder.

    Attributes:
        path: The user's file.
        file: The Arrow file's name.
        row: First row within the user's file.
        first: First row within the whole table.
        count: Rows.
    """

    path: str
    file: str
    row: int
    first: int
    count: int


class _Fault(NamedTuple):
    """Why a row is refused.

    Attributes:
        text_column: The column that holds text where a number belongs; None for another fault.
        reason: In words.
        is_large: The cell is a whole number that no float32 column can hold.
    """

    text_column: str | None
    reason: str
    is_large: bool = False


def _check_columns(faults: Mapping[int, _Fault], table: Any, path: str) -> None:
    """A column that is mostly text is a mistake in the command, not thousands of bad rows."""
    if len(faults) < 2 or 2 * len(faults) < table.num_rows:
        return
    for name in table.column_names:
        about = [fault for fault in faults.values() if fault.text_column == name]
        if 2 * len(about) >= table.num_rows:
            large = about[0].is_large
            raise SourceError(
                f"{path}: {about[0].reason}, in {len(about):,} of {table.num_rows:,} rows.",
                "numbers that a float holds exactly; number classes from 0, or name them by text"
                if large
                else "columns of numbers, and one --target that may be text",
                f"--drop {quoted(name)}"
                if large
                else f"--target {quoted(name)}, or --drop {quoted(name)}",
            )


def _write_piece(path: Path, table: Any) -> None:
    import pyarrow as pa

    with (
        writing(path, always) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)


def _read_piece(path: Path) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        return pa.ipc.open_file(mapped).read_all()


def _header(path: Path) -> list[str]:
    from pyarrow import parquet

    with _readable(require_file(path, "table")):
        if _is_parquet(path):
            return list(parquet.read_schema(path).names)
        with _stream(path) as stream:
            return list(_open_csv(stream, RefusalList(), str(path)).schema.names)


def _batches(path: Path, refused: RefusalList) -> Iterator[Any]:
    from pyarrow import parquet

    with _readable(path):
        if _is_parquet(path):
            yield from parquet.ParquetFile(path).iter_batches()
            return
        names = _header(path)
        with _stream(path) as stream:
            yield from _open_csv(stream, refused, str(path), names)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowInvalid as error:
        if "straddling" not in str(error):
            raise SourceError(
                f"{path} cannot be read as a table: {error}.", _TABLE_FORMATS, ""
            ) from error
        raise SourceError(
            f"{path} has a line, or a quoted cell, of more than {format_bytes(_CSV_BLOCK_BYTES)}.",
            _TABLE_FORMATS,
            "look for a quotation mark that is not closed",
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{path} cannot be read as a table: {error}.", _TABLE_FORMATS, ""
        ) from error


def _open_csv(stream: Any, refused: RefusalList, path: str, names: Sequence[str] = ()) -> Any:
    """Open a CSV stream; the named columns as text, and lines of the wrong length set aside."""
    import pyarrow as pa
    from pyarrow import csv

    num_refused = 0

    def refuse(row: Any) -> str:
        nonlocal num_refused
        num_refused += 1
        if num_refused > RefusalList.MOST and 2 * num_refused > row.number:
            return "error"  # noise, not a table; Arrow needs 0.1 ms for every line of it
        given = f"{row.actual_columns} cells instead of {row.expected_columns}"
        refused.append(Refusal(path, row.number, given))
        return "skip"

    return csv.open_csv(
        stream,
        read_options=csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, use_threads=False),
        parse_options=csv.ParseOptions(invalid_row_handler=refuse, newlines_in_values=True),
        # Everything as text: a column's type is not what its first rows suggest.
        convert_options=csv.ConvertOptions(
            column_types={name: pa.string() for name in names}, strings_can_be_null=False
        ),
    )


def _stream(path: Path) -> Any:
    import pyarrow as pa

    return pa.input_stream(str(path), compression="detect")


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() in {".parquet", ".pq"}


def _is_text(column: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _decode(column: Any) -> Any:
    import pyarrow as pa

    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _number(text: str | None) -> float | None:
    stripped = (text or "").strip()
    if stripped in _NULLS:
        return float("nan")
    if stripped.lower() in _INFINITIES:
        return _INFINITIES[stripped.lower()]
    try:
        return float(stripped)
    except ValueError:
        return None


def _floats(column: Any, name: str, faults: dict[int, _Fault]) -> Array:
    """Return a column as float32; blank is NaN, and text that is no number is a fault of its row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _decode(column)
    with np.errstate(over="ignore"):  # a 1e300 becomes inf, which the gate names
        try:
            if _is_text(column):
                trimmed = pc.utf8_trim_whitespace(column)
                blank = pc.is_in(trimmed, value_set=pa.array(_NULLS))
                column = pc.if_else(blank, pa.scalar(None, pa.string()), trimmed)
            values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
            return np.asarray(values, dtype=np.float32)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return _floats_one_by_one(column, name, faults)


def _floats_one_by_one(column: Any, name: str, faults: dict[int, _Fault]) -> Array:
    values = np.full(len(column), np.nan, dtype=np.float32)
    for row, cell in enumerate(column.to_pylist()):
        number = _number(cell) if isinstance(cell, str | None) else None
        if number is None:
            why = "a whole number above 2**53" if isinstance(cell, int) else "not a number"
            reason = f"column {name!r} holds {cell!r}, {why}"
            faults.setdefault(row, _Fault(name, reason, isinstance(cell, int)))
        else:
            values[row] = number
    return values
