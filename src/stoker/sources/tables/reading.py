"""Tables as a stream of Arrow batches: text with its layout, JSON lines, Parquet, Feather; files, folders, globs.

Enters: paths as the user typed them. Leaves: `TableFile`s with their column names and notes, and record batches: text
files as columns of text, the others with their types. Costs: one streaming read; memory for one block. JSON lines
are read whole, and twice: only all of them tell the type of a column.
"""

from __future__ import annotations

import codecs
import glob
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, feather, json, parquet

from stoker import bounds
from stoker.display import command, look_in
from stoker.errors import Refusal, RefusalList, SourceError, require_file
from stoker.sources.tables.layout import (
    HEAD_BYTES,
    Layout,
    TextOptions,
    compression_of,
    file_kind,
    find_layout,
    refuse_kind,
)
from stoker.store.fields import Array
from stoker.store.foreign import JSON_LINES, text_kind
from stoker.units import format_bytes

CSV_BLOCK_BYTES = 8 << 20
_HEAD_LINES = 12
"""Least number of lines in the head of a file, even if a line has tens of thousands of cells."""
SUFFIXES = (
    ".csv", ".tsv", ".txt", ".data", ".dat", ".tab", ".arff", ".parquet", ".pq", ".feather", ".arrow", ".ipc",
    ".jsonl", ".ndjson",
)  # fmt: skip
_PACKED = (".gz", ".bz2", ".zst", ".lz4")
_TABLE_FORMATS = "CSV or other text with separators, JSON lines, Parquet, or Feather"
_HEADER = "repeats the header"
_CELL = re.compile(rb'"[^"]*"|\S+')  # of a line whose separator is a run of spaces
_PARTITION = re.compile(r"([^=/]+)=([^/]*)")


@dataclass(frozen=True)
class TableFile:
    """One file of a table."""

    path: Path  # as the user knows it
    kind: str  # "text", "parquet", "arrow" or "json"; "frame" for a table in memory
    names: tuple[str, ...]  # column names as they are packed: without spaces around them
    layout: Layout | None = None  # layout of a text file; None for other files
    # columns that the names of folders give ("year=2020")
    partitions: Mapping[str, str] = field(default_factory=dict)
    num_rows: int | None = None  # None for text, which does not tell it
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    table: Any = None  # rows of a frame

    @property
    def decimal(self) -> str:
        """The decimal sign of text cells."""
        return self.layout.decimal if self.layout else "."


def is_table(path: Path) -> bool:
    """Tell by its name whether a file may be a table."""
    name = path.name.lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return name.endswith(SUFFIXES)


def find_files(
    paths: Sequence[str | Path],
) -> tuple[list[tuple[Path, dict[str, str]]], Counter[str]]:
    """Return the files that paths stand for, with the columns that folder names give, and counts of ignored files.

    A folder stands for all tables below it, a pattern such as "day*.csv" for the files that it matches.
    """
    found: list[tuple[Path, dict[str, str]]] = []
    ignored: Counter[str] = Counter()
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.is_file())
            tables = []
            for each in inside:
                parts = each.relative_to(path).parts
                if any(part.startswith((".", "_")) for part in parts):
                    ignored["hidden or system file (its name begins with a dot or underscore)"] += 1
                elif not is_table(each):
                    ignored[f"ends in {each.suffix!r}, which is no table"] += 1
                else:
                    pairs = (_PARTITION.fullmatch(part) for part in parts[:-1])
                    tables.append((each, {pair[1]: pair[2] for pair in pairs if pair}))
            if not tables:
                raise SourceError(
                    f"{path} holds {len(inside):,} files, and none of them is a table.",
                    f"files that end in {', '.join(SUFFIXES)}",
                    look_in(path),
                )
            found += tables
        elif not path.exists() and re.search(r"[*?\[]", str(given)):
            matched = sorted(Path(each) for each in glob.glob(str(given), recursive=True))  # noqa: PTH207  absolute patterns too
            matched = [each for each in matched if each.is_file()]
            if not matched:
                raise SourceError(
                    f"no file matches {str(given)!r}.",
                    "a pattern that matches files",
                    look_in(path.parent),
                )
            found += [(each, {}) for each in matched]
        else:
            found.append((require_file(given, "table"), {}))
    return found, ignored


def open_tables(
    found: Sequence[tuple[Path, Mapping[str, str]]],
    asked: TextOptions,
    usual_decimal: str | None = None,
) -> list[TableFile]:
    """Look at the files of one table.

    A file whose cells do not tell its decimal sign ("1.234") has the usual one; by default that of the first file whose
    cells do.
    """
    files = [open_table(path, asked, partitions, usual_decimal) for path, partitions in found]
    usual = usual_decimal or told_decimal(files)
    for place, file in enumerate(files):
        if usual and file.layout and not file.layout.is_decimal_told and file.decimal != usual:
            files[place] = open_table(file.path, asked, file.partitions, usual)
    return files


def told_decimal(files: Sequence[TableFile]) -> str | None:
    """Return the decimal sign of the first file whose cells tell it."""
    told = (file.decimal for file in files if file.layout and file.layout.is_decimal_told)
    return next(told, None)


def open_table(
    path: Path,
    asked: TextOptions,
    partitions: Mapping[str, str] | None = None,
    usual_decimal: str | None = None,
) -> TableFile:
    """Look at a file: its kind, its columns, and how it is written; see `find_layout`."""
    partitions = dict(partitions or {})
    kind = file_kind(path, asked.encoding)
    wrong = refuse_kind(path, kind)
    if wrong is not None:
        raise wrong
    layout, num_rows = None, None
    types: Sequence[pa.DataType] = ()
    with readable(path):
        if kind in ("text", "json"):
            with _stream(path) as stream:
                head, is_whole = _read_head(stream)
            found = text_kind(path, head) if asked.sep is None else None
            kind = "json" if found is not None and found.what == JSON_LINES else "text"
        if kind == "text":
            layout = find_layout(head, path, asked, is_whole=is_whole, usual_decimal=usual_decimal)
            raw: Sequence[str] = layout.names
        elif kind == "parquet":
            with parquet.ParquetFile(path) as file:
                schema, num_rows = file.schema_arrow, file.metadata.num_rows
            raw, types = schema.names, schema.types
        else:
            table = read_arrow(path) if kind == "arrow" else _read_lines(path)
            raw, num_rows, types = table.column_names, table.num_rows, table.schema.types
    names = [name.strip() or f"unnamed_{place}" for place, name in enumerate(raw)]
    names += [name for name in partitions if name not in names]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise SourceError(
            f"{path} has two columns called {', '.join(map(repr, twice))}.",
            "different names",
            "rename one of them",
        )
    typed = dict(zip(names, types, strict=False))
    return TableFile(path, kind, tuple(names), layout, partitions, num_rows, typed)


def _read_head(stream: Any) -> tuple[bytes, bool]:
    """Return the first bytes of a text (more if rows are long), and whether they are the whole text."""
    head = stream.read(HEAD_BYTES)
    while head.count(b"\n") < _HEAD_LINES and len(head) < CSV_BLOCK_BYTES:
        more = stream.read(HEAD_BYTES)
        if not more:
            return head, True
        head += more
    return head, not stream.read(1)


def batches(
    file: TableFile, refused: RefusalList, wanted: Collection[str] | None = None
) -> Iterator[Any]:
    """Yield the rows as record batches whose columns have the names of `file.names`.

    Lines of a text file that are no rows go to `refused`. Of Parquet only `wanted` columns are decoded.
    """
    with readable(file.path):
        if file.kind == "parquet":
            # Page checksums are optional in Parquet: they are compared where the writer made them.
            # Spark's times (INT96) hold the year 9999, which overflows as nanoseconds.
            options: Any = {"page_checksum_verification": True, "coerce_int96_timestamp_unit": "us"}
            with parquet.ParquetFile(file.path, **options) as opened:
                raw = opened.schema_arrow.names
                pairs = zip(file.names, raw, strict=False)
                chosen = {name: own for name, own in pairs if not wanted or name in wanted}
                # A struct's parts have names of their own, so that a nested column is asked for by its top.
                for batch in opened.iter_batches(columns=[*chosen.values()]):
                    yield _renamed(batch, file, [*chosen, *file.names[len(raw) :]])
        elif file.kind != "text":
            read = read_arrow if file.kind == "arrow" else _read_lines
            table = read(file.path) if file.table is None else file.table
            for batch in table.to_batches(max_chunksize=1 << 16):
                yield _renamed(batch, file, file.names)
        else:
            assert file.layout is not None
            if file.layout.is_empty:
                return
            with _stream(file.path) as opened, _sound_text(file):
                source = _squeezed(opened) if file.layout.sep == " " else opened
                for batch in _rows_of_text(source, refused, file):
                    yield _renamed(batch, file, file.names)


def read_arrow(path: Path) -> Any:
    """Return the table of an Arrow file: Feather of either version, or a stream of batches. It is memory-mapped."""
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"\xff\xff\xff\xff":
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
            return stream.read_all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Feather's first version
        return feather.read_table(path, memory_map=True)


def _renamed(batch: Any, file: TableFile, names: Sequence[str]) -> Any:
    arrays = list(batch.columns)
    for name in names[len(arrays) :]:
        text = file.partitions[name]
        arrays.append(pa.array([text] * batch.num_rows, pa.string()))
    return pa.RecordBatch.from_arrays(arrays, names=list(names))


def _read_lines(path: Path) -> Any:
    """Return the table of a file with a JSON object on each line, compressed or not."""
    bounds.require_memory(2 * path.stat().st_size, f"reading {path} whole")
    options = json.ReadOptions(block_size=CSV_BLOCK_BYTES)
    with _stream(path) as stream:
        return json.read_json(stream, read_options=options)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of Arrow into a SourceError that names the file."""
    try:
        yield
    except UnicodeError as error:
        raise SourceError(
            f"{path} is not in the encoding that was given or found: {error}.",
            "the encoding it was written in",
            "--encoding latin-1",
        ) from error
    except (pa.ArrowException, OSError, EOFError) as error:
        raise SourceError(
            f"{path} cannot be read as a table: {error}.", _TABLE_FORMATS, command("file", path)
        ) from error


@contextmanager
def _sound_text(file: TableFile) -> Iterator[None]:
    """Name the line of a text that Arrow refuses. To find it, the file is read once more."""
    try:
        yield
    except pa.ArrowInvalid as error:
        assert file.layout is not None
        with _stream(file.path) as stream:
            blocks = iter(lambda: stream.read(CSV_BLOCK_BYTES), b"")
            fault = find_fault(blocks, file.layout.encoding == "utf-8", CSV_BLOCK_BYTES)
        if fault is None:
            raise
        if fault.is_long:
            raise SourceError(
                f"{file.path} has a line, or a quoted cell, of more than {format_bytes(CSV_BLOCK_BYTES)}, "
                f"which begins in line {fault.line:,}.",
                _TABLE_FORMATS,
                "look for a quotation mark that is not closed",
            ) from error
        raise SourceError(
            f"{file.path} begins as UTF-8 and holds other bytes in line {fault.line:,}.",
            "one encoding",
            "--encoding cp1252",
        ) from error


class TextFault(NamedTuple):
    """A fault that Arrow cannot read, with its line: a row of too many bytes, or bytes that are not UTF-8."""

    is_long: bool
    line: int


def find_fault(blocks: Iterable[bytes], is_utf8: bool, most_bytes: int) -> TextFault | None:
    """Return the first fault of a text in blocks. A line end within quotes does not end the row."""
    decoder = codecs.getincrementaldecoder("utf-8" if is_utf8 else "latin-1")()
    line = row = 1  # where we are, and where the row began
    length = num_quotes = 0
    for block in itertools.chain(blocks, [b""]):
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            return TextFault(False, line + error.object.count(b"\n", 0, error.start))
        for part in block.splitlines(keepends=True):
            length += len(part)
            num_quotes += part.count(b'"')
            if length > most_bytes:
                return TextFault(True, row)
            if part.endswith(b"\n"):
                line += 1
                if num_quotes % 2 == 0:
                    row, length = line, 0
    return None


def _open_csv(stream: Any, refused: RefusalList, file: TableFile) -> Any:
    """Open a CSV stream: every column as text; lines with a wrong number of cells are refused."""
    layout = file.layout
    assert layout is not None
    num_refused = 0

    def refuse(row: Any) -> str:
        nonlocal num_refused
        if layout.comment and (not row.text.strip() or row.text.startswith(layout.comment)):
            return "skip"
        num_refused += 1
        if num_refused > RefusalList.MOST and 2 * num_refused > row.number:
            return "error"  # noise, not a table; Arrow needs 0.1 ms for every line of it
        given = f"{row.actual_columns} cells instead of {row.expected_columns}"
        kind = f"lines without {row.expected_columns} cells"
        refused.append(Refusal(str(file.path), row.number, given, kind=kind))
        return "skip"

    keys = [str(place) for place in range(len(layout.names))]
    return csv.open_csv(
        stream,
        read_options=csv.ReadOptions(
            block_size=CSV_BLOCK_BYTES,
            use_threads=False,
            skip_rows=layout.skip,
            column_names=keys,
            encoding="utf8" if layout.encoding == "utf-8" else layout.encoding,
        ),
        parse_options=csv.ParseOptions(
            delimiter="\t" if layout.sep == " " else layout.sep,
            invalid_row_handler=refuse,
            newlines_in_values=True,
        ),
        # Everything as text: a column's type is not what its first rows suggest.
        convert_options=csv.ConvertOptions(
            column_types={key: pa.string() for key in keys}, strings_can_be_null=False
        ),
    )


def _rows_of_text(stream: Any, refused: RefusalList, file: TableFile) -> Iterator[Any]:
    """Yield the rows without those that repeat the header, as in files joined by `cat`; these go to `refused`."""
    layout = file.layout
    assert layout is not None
    first, num_listed = layout.skip + 1, len(refused)
    for batch in _open_csv(stream, refused, file):
        others = {refusal.line or 0 for refusal in refused[num_listed:]}
        numbers, first = number_rows(first, batch.num_rows, others)
        places = _places_of_header(batch, layout) if layout.has_header else ()
        for place in places:
            line = int(numbers[place])
            refused.append(Refusal(str(file.path), line, _HEADER, kind=_HEADER, is_asked=True))
        num_listed = len(refused)
        yield batch.filter(~np.isin(np.arange(len(numbers)), places)) if len(places) else batch


def number_rows(first: int, count: int, others: Collection[int]) -> tuple[Array, int]:
    """Return numbers for `count` rows, from `first`, without those of `others`; and the next free number."""
    span = np.arange(first, first + count + len(others), dtype=np.int64)
    own = span[~np.isin(span, [*others])][:count] if others else span
    return own, max([int(own[-1]) if len(own) else first - 1, *others]) + 1


def _places_of_header(batch: Any, layout: Layout) -> Array:
    """Return the rows whose cells are all the names of their columns."""
    # In a single column, a text such as "word" may be a value like others.
    ends = pc.ends_with(batch.column(0), pattern=layout.names[0]) if len(layout.names) > 1 else ()
    places = np.flatnonzero(ends)
    for column, name in zip(batch.columns, layout.names, strict=True):
        if not len(places):
            break
        cells = pc.utf8_trim(column.take(pa.array(places)), characters=" \t\ufeff")
        places = places[np.asarray(pc.equal(cells, name))]
    return places


def _stream(path: Path) -> Any:
    return pa.input_stream(str(path), compression=compression_of(path))


def _squeezed(stream: Any) -> Any:
    """Return a stream with one tab for each run of spaces and tabs outside quotes, and none at line ends.

    The encoding of `stream` must be a superset of ASCII.
    """
    rest = b""

    def squeeze(block: Any) -> bytes:
        nonlocal rest
        data = rest + bytes(block)
        cut = data.rfind(b"\n") + 1 if len(block) else len(data)  # after the end, an empty block
        rest = data[cut:]
        lines = data[:cut].splitlines()
        rows = (_CELL.findall(line) if b'"' in line else line.split() for line in lines)
        return b"".join(b"\t".join(cells) + b"\n" for cells in rows)

    return pa.TransformInputStream(stream, squeeze)


def shown_names(names: Sequence[str], most: int = 40) -> str:
    """Return column names for a message, the first ones of many."""
    shown = ", ".join(names[:most])
    return f"{shown}, ... {len(names)} in all" if len(names) > most else shown
