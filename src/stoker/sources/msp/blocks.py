"""The fast reader of a spectrum library: blocks of text, converted in bulk.

Enters: a file, plain or gzipped. Leaves: blocks of whole lines that begin and end between
records; and, per block, what `text.CarefulParser` would have read there. Costs: 30 µs per
record of 60 peaks on a slow core (matchms: 1,100), unzipping 4 more; one block in memory.

The block parser takes a record only when its shape is beyond doubt: a name, plain fields, a peak
count, and exactly that many pairs of plain numbers. All peaks of a block are converted by one
call. Everything else goes to the careful parser.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stoker.bounds import LINE
from stoker.display import command
from stoker.errors import SourceError
from stoker.sources.msp.keys import WHITESPACE, HeaderReader, flags_of
from stoker.sources.msp.text import (
    MAX_INTENSITY,
    NAME_LINE,
    NUMBER,
    Array,
    CarefulParser,
    Parsed,
    Record,
)

CHUNK_BYTES = 2 << 20
MAX_LINE_BYTES = LINE.most
_OPEN_BYTES = 8 << 20  # without a certain record boundary, a text is cut here, inside a record
_ANY_LINE_END = re.compile(rb"\r\r?\n|\r")
_GZIP_MAGIC = b"\x1f\x8b"
UTF8_BOM = b"\xef\xbb\xbf"


class Block(NamedTuple):
    """Whole lines, ended by LF. `closed`: what follows certainly begins a new record."""

    text: bytes
    closed: bool


def read_blocks(path: Path, start_byte: int, end_byte: int | None) -> Iterator[Block]:
    """Cut a file into blocks of about 2 MiB of text, closed ones wherever possible."""
    carry, searched = b"", 0
    for chunk in _chunks(path, start_byte, end_byte):
        # Cut only now that there is more to come: a small file is one block.
        cut = _last_boundary(carry, max(0, searched - 64))
        searched = len(carry)
        if cut:
            yield Block(carry[:cut], closed=True)
        elif len(carry) > _OPEN_BYTES:
            cut = carry.rfind(b"\n") + 1
            if cut:
                yield Block(carry[:cut], closed=False)
            elif len(carry) > MAX_LINE_BYTES:
                raise overlong(path)
        if cut:
            carry, searched = carry[cut:], 0
        carry += chunk
    yield Block(carry, closed=True)


def _last_boundary(text: bytes, floor: int) -> int:
    """Return where the last `Name:` line under an empty line begins, or 0."""
    at = text.rfind(b"\n\n", floor)
    while at >= 0 and not NAME_LINE.match(text, at + 2):
        at = text.rfind(b"\n\n", floor, at + 1)
    return at + 2 if at >= 0 else 0


def _chunks(path: Path, start_byte: int, end_byte: int | None) -> Iterator[bytes]:
    """Yield the text piece by piece, without byte order mark, every line ended by LF."""
    held = b""
    for number, raw in enumerate(_raw_chunks(path, start_byte, end_byte)):
        if number == 0 and start_byte == 0:
            if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise SourceError(
                    f"{str(path)!r} is UTF-16 text.",
                    "UTF-8 or Latin-1",
                    f"{command('iconv', '-f', 'UTF-16', '-t', 'UTF-8', path)} > utf8.msp",
                )
            raw = raw.removeprefix(UTF8_BOM)
        raw = held + raw
        # A line end may continue in the next chunk.
        cut = len(raw) - min(2, len(raw) - len(raw.rstrip(b"\r")))
        held = raw[cut:]
        yield _with_plain_line_ends(raw[:cut])
    if held:
        yield _with_plain_line_ends(held)


def _with_plain_line_ends(raw: bytes) -> bytes:
    """End lines with LF: from Windows, old Mac, and text-mode copies that made CR CR LF."""
    if b"\r" not in raw:
        return raw
    if b"\r\r\r" in raw:
        return _ANY_LINE_END.sub(b"\n", raw)
    raw = raw.replace(b"\r\r\n", b"\n").replace(b"\r\n", b"\n")
    return raw.replace(b"\r", b"\n")


def _raw_chunks(path: Path, start_byte: int, end_byte: int | None) -> Iterator[bytes]:
    if is_gzip(path):
        if start_byte or end_byte is not None:
            raise no_ranges(path)
        yield from _unzipped(path)
        return
    with path.open("rb") as stream:
        stream.seek(start_byte)
        left = (path.stat().st_size if end_byte is None else end_byte) - start_byte
        while left > 0 and (raw := stream.read(min(CHUNK_BYTES, left))):
            left -= len(raw)
            yield raw


def _unzipped(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as stream:
            while raw := stream.read(CHUNK_BYTES):
                yield raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(
            f"{str(path)!r} is a damaged gzip file: {error}",
            "a complete gzip file",
            f"{command('gzip', '-t', path)}, then copy or download it again",
        ) from error


def is_gzip(path: Path) -> bool:
    """Whether the file is a gzip, by its first bytes."""
    with path.open("rb") as stream:
        return stream.read(2) == _GZIP_MAGIC


def no_ranges(path: Path) -> SourceError:
    """Return the error for byte ranges of a gzip."""
    return SourceError(
        f"{str(path)!r} is gzipped, so it has no byte ranges.",
        "read_msp over the whole file, or an uncompressed file",
        command("gunzip", "-k", path),
    )


def overlong(path: Path) -> SourceError:
    """Return the error for a line above the size limit."""
    return SourceError(
        f"{str(path)!r} has a line of more than {MAX_LINE_BYTES >> 20} MiB.",
        "text with one peak, or some peaks, per line",
        command("file", path),
    )


# ----------------------------------------------------------------------------------- block parser

_COUNT_LINE = re.compile(rb"\n(?:num[ _]?peaks?|number of peaks):", re.IGNORECASE)
_PLAIN_ROWS = re.compile(rb"(?:[ \t]*+%b[ \t]++%b[ \t]*+\n)*+" % (NUMBER, NUMBER))
_ANNOTATION = re.compile(rb"[ \t]+\"[^\"\n]*+\"[ \t]*+$", re.MULTILINE)
_NO_PEAKS = ("no-peaks",)
_ONE_PER_LINE = bytes.maketrans(b"(),;", b" \n\n\n")


class _Piece(NamedTuple):
    """Text from one `Name:` line to the next; if its shape is regular, also its record."""

    line: int
    text: bytes
    record: Record | None = None  # None where the careful parser reads the text
    rows: bytes = b""  # its peaks, still as text: `m/z intensity`
    num_rows: int = 0
    num_header_lines: int = 0
    num_peak_lines: int = 0


class BlockParser:
    """Reads closed blocks; sends irregular records to the careful parser.

    The careful parser is idle whenever `read` is called.
    """

    def __init__(self, careful: CarefulParser) -> None:
        self._careful = careful
        self._headers = HeaderReader()
        self._count_key = b"\nNum Peaks:"

    def read(self, text: bytes, first_line: int) -> Parsed:
        """Return what the careful parser would make of a block that begins at `first_line`."""
        plan = list(self._plan(text, first_line))
        numbers, odd = _convert([item for item in plan if item.record is not None])
        parsed, taken = Parsed(), 0
        for is_odd, items in groupby(plan, lambda item: item.record is None or item.line in odd):
            if is_odd:
                for item in items:
                    self._careful.feed(item.text, item.line)
                    self._careful.close()
                parsed.extend(self._careful.drain())
            else:
                taken = _take_regular(list(items), numbers, taken, parsed)
        # numpy counts at 4 GB/s; bytes.count at 0.9, for a line end every 12 bytes.
        num_line_ends = int(np.count_nonzero(np.frombuffer(text, np.uint8) == 10))
        num_lines = num_line_ends + (text[-1:] not in (b"", b"\n"))
        parsed.tally.blank += num_lines - parsed.tally.total
        return parsed

    def _plan(self, text: bytes, first_line: int) -> Iterator[_Piece]:
        """Cut a block at every `Name:` line under an empty line; a regular piece has its record."""
        paragraphs = text.split(b"\n\n")
        starts = [i for i, paragraph in enumerate(paragraphs) if _begins_with_name(paragraph)]
        if not starts or starts[0] != 0:
            starts.insert(0, 0)
        line = first_line
        for start, stop in zip(starts, [*starts[1:], len(paragraphs)], strict=True):
            piece = paragraphs[start]
            if stop - start > 1:
                piece = b"\n\n".join(paragraphs[start:stop])
            core = piece.strip(b"\n")
            core_line = line
            if piece[:1] == b"\n":
                core_line += len(piece) - len(piece.lstrip(b"\n"))
            item = self._regular(core, core_line)
            if item is not None:
                num_line_ends = item.num_header_lines + item.num_peak_lines - 1
                yield item
            else:
                num_line_ends = core.count(b"\n")
                yield _Piece(core_line, core)
            line += num_line_ends + len(piece) - len(core) + 2

    def _regular(self, core: bytes, line: int) -> _Piece | None:
        """Return the record if its shape is beyond doubt."""
        if not NAME_LINE.match(core):
            return None
        header, found, rest = core.partition(self._count_key)
        if not found:
            match = _COUNT_LINE.search(core)
            if match is None:
                return None
            self._count_key = match[0]
            header, _, rest = core.partition(self._count_key)
        count, _, rows = rest.partition(b"\n")
        count = count.strip(WHITESPACE)
        if not count.isdigit() or len(count) > 18:
            return None
        num_rows, num_peak_lines = int(count), rows.count(b"\n") + bool(rows)
        if b'"' in rows:
            rows = _ANNOTATION.sub(b"", rows)
        if num_rows != num_peak_lines:
            rows = _one_pair_per_line(rows)
            if rows.count(b"\n") + bool(rows) != num_rows or not rows:
                return None
        try:
            folded = self._headers.read(header.decode())
        except UnicodeDecodeError:
            return None
        if folded is None:
            return None
        flags = flags_of(folded[0], () if rows else _NO_PEAKS)
        record = Record(line, *folded, num_rows, flags)
        num_header_lines = header.count(b"\n") + 2
        return _Piece(line, core, record, rows, num_rows, num_header_lines, num_peak_lines)


def _begins_with_name(paragraph: bytes) -> bool:
    if paragraph[:5] == b"Name:":
        return True
    # Two empty lines between records leave one line end in front.
    return NAME_LINE.match(paragraph, paragraph[:1] == b"\n") is not None


def _one_pair_per_line(rows: bytes) -> bytes:
    """Bring `(51 5) (53 19)`, `51 5; 53 19` and `51:5 53:19` to one pair per line.

    If the result is not lines of exactly two numbers, the careful parser reads the record.
    """
    if not all(row.strip(b" \t\x0b\x0c(),;:") for row in rows.split(b"\n")):
        return b""  # a blank line ends the record, whatever the count says; a lone `(` is refused
    if b":" in rows:
        rows = rows.replace(b" ", b"\n").replace(b":", b" ")
    else:
        rows = rows.translate(_ONE_PER_LINE)
    return b"\n".join([row for row in rows.split(b"\n") if row and not row.isspace()])


def _take_regular(
    regular: list[_Piece], numbers: tuple[Array, Array], start: int, parsed: Parsed
) -> int:
    """Append consecutive records; return where their peaks end in `numbers`."""
    sizes = [item.num_rows for item in regular]
    stop = start + sum(sizes)
    parsed.records += [item.record for item in regular if item.record is not None]
    parsed.sizes += sizes
    parsed.mz.append(numbers[0][start:stop])
    parsed.intensity.append(numbers[1][start:stop])
    parsed.tally.metadata += sum([item.num_header_lines for item in regular])
    parsed.tally.peaks += sum([item.num_peak_lines for item in regular])
    return stop


def _convert(regular: list[_Piece]) -> tuple[tuple[Array, Array], set[int]]:
    """Convert the peaks of all records at once.

    Returns:
        m/z and intensity of all records with regular peaks; and the lines of the other records, for
        the careful parser.
    """
    numbers = _to_numbers(regular)
    if numbers is not None:
        return numbers, set()
    plain = [item for item in regular if _PLAIN_ROWS.fullmatch(item.rows + b"\n")]
    numbers = _to_numbers(plain)
    if numbers is None:
        plain, numbers = [], (np.empty(0), np.empty(0, np.float32))
    return numbers, {item.line for item in regular} - {item.line for item in plain}


def _to_numbers(regular: list[_Piece]) -> tuple[Array, Array] | None:
    """Return m/z and intensity if every row is exactly two plain numbers that can be taken."""
    text = b"\n".join([item.rows for item in regular if item.rows])
    if not text:
        return np.empty(0), np.empty(0, np.float32)
    if b"\t" in text:
        text = text.replace(b"\t", b" ")
    if text.translate(None, b"0123456789.eE+- \n"):
        return None
    columns = _read_columns(text) or _read_columns(_with_single_blanks(text))
    if columns is None:
        return None
    mz, intensity = columns
    fits = len(mz) == sum(item.num_rows for item in regular)
    fits = fits and bool(np.isfinite(mz).all() and (intensity <= MAX_INTENSITY).all())
    if fits and b"-" in text:
        fits = bool((mz >= 0).all() and (intensity >= 0).all())
        mz, intensity = mz + 0.0, intensity + 0.0  # -0 is a zero
    return (mz, intensity.astype(np.float32)) if fits else None


def _read_columns(text: bytes) -> tuple[Array, Array] | None:
    """Read rows of two numbers with one blank between; None if there is any other row."""
    # pyarrow's CSV reader does 80 MB/s on one core and rounds correctly; np.fromstring does 24,
    # map(float, text.split()) 17. It refuses a row that has not two values.
    import pyarrow as pa
    from pyarrow import csv

    names, kind = ["mz", "intensity"], pa.float64()
    try:
        table = csv.read_csv(
            pa.py_buffer(text),
            csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names),
            csv.ParseOptions(delimiter=" ", quote_char=False, ignore_empty_lines=False),
            csv.ConvertOptions(
                column_types=dict.fromkeys(names, kind), null_values=[], check_utf8=False
            ),
        )
    except pa.ArrowInvalid:
        return None
    return table["mz"].to_numpy(), table["intensity"].to_numpy()


def _with_single_blanks(text: bytes) -> bytes:
    while b"  " in text:
        text = text.replace(b"  ", b" ")
    return text.replace(b" \n", b"\n").replace(b"\n ", b"\n").strip(b" ")
