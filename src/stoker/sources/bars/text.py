"""Files of bars as plain text: decompressed, in UTF-8, without quotes; Parquet and Feather as the same text.

Enters: a file. Leaves: bytes with a line per bar, cells split by one delimiter that no cell contains. Costs: memory
for three copies of the text.
"""

from __future__ import annotations

import io
import re
import zlib
from decimal import Decimal
from pathlib import Path

import pyarrow as pa

from stoker import bounds
from stoker.display import command
from stoker.errors import SourceError
from stoker.sources.tables.layout import file_kind
from stoker.sources.tables.reading import read_arrow, readable
from stoker.store.foreign import LIBSVM, TAR, name_kind
from stoker.units import format_bytes

_SAMPLE_BYTES = 128 << 10
_HEAD_BYTES = 4 << 20
_GUNZIP_BYTES = 64 << 20
_TEXT_COPIES = 3  # as read, without quotes, and in columns
_SPLIT = "split the file by years, and name all parts: they are joined"


def read_head(path: Path, decimal: str | None = None) -> tuple[bytes, int]:
    """Return the first lines of a file as text, and its estimated size when decompressed.

    More than the sample of `find_dialect`, so that head and whole file give one dialect.
    """
    if file_kind(path) in ("parquet", "arrow"):
        text = _typed_text(path)
        return text[: text.rfind(b"\n", 0, _SAMPLE_BYTES) + 1] or text, len(text)
    _refuse_other(path)
    size = path.stat().st_size
    with path.open("rb") as stream:
        raw = stream.read(_SAMPLE_BYTES)
    head = raw
    if raw[:2] == b"\x1f\x8b":
        try:
            member = zlib.decompressobj(wbits=31)
            head = member.decompress(raw, _HEAD_BYTES)
            raw = raw[: len(raw) - len(member.unconsumed_tail)]
        except zlib.error as error:
            raise _damaged(path, error) from error
    text = _as_utf8(head)
    text = text[: text.rfind(b"\n") + 1] if size > len(raw) else text
    return _unquote(text, path, decimal), int(size * len(head) / max(1, len(raw)))


def find_text(path: Path, decimal: str | None = None) -> tuple[bytes, str | None]:
    """Return a file (text, plain or gzipped; Parquet or Feather) as UTF-8 with LF line ends and no quotes.

    The second value is the fault at its end, or None. `decimal` is the sign of quoted numbers such as "1,234"; None
    finds it.
    """
    if file_kind(path) in ("parquet", "arrow"):
        return _typed_text(path), None
    _refuse_other(path)
    bounds.require_memory(_TEXT_COPIES * path.stat().st_size, f"reading {path}", _SPLIT)
    data, cut = path.read_bytes(), None
    if data[:2] == b"\x1f\x8b":
        data, cut = _gunzip(data, path)
    text = _as_utf8(data)
    if cut:  # the last line is half a line
        text = text[: text.rfind(b"\n") + 1]
    bounds.LINE.check(_longest_line(text), f"a line of {path}", command("file", path))
    return _unquote(text, path, decimal), cut


def _refuse_other(path: Path) -> None:
    """Refuse archives, JSON and binary files by name: a zip whose files are not compressed would read as text."""
    other = name_kind(path)
    with path.open("rb") as stream:
        is_gzip = stream.read(2) == b"\x1f\x8b"
    # A gzip is unpacked here, and "12 09:00" may be a time.
    if other is None or other.what == LIBSVM or (is_gzip and other.what != TAR):
        return
    raise SourceError(
        f"{path} is {other.what}.",
        "bars as text, plain or gzipped; Parquet or Feather",
        other.convert or other.fix,
    )


def _longest_line(text: bytes) -> int:
    """Return the length of the first line over the limit of `bounds.LINE`, or 0."""
    start = 0
    while len(text) - start > bounds.LINE.most:
        end = text.rfind(b"\n", start, start + bounds.LINE.most + 1)
        if end < start:
            stop = text.find(b"\n", start)
            return (len(text) if stop < 0 else stop) - start
        start = end + 1
    return 0


def _gunzip(data: bytes, path: Path) -> tuple[bytes, str | None]:
    """Decompress all members; of a truncated file, return what it has and the reason."""
    out, cut, total = [], None, 0
    try:
        while data[:2] == b"\x1f\x8b":
            member = zlib.decompressobj(wbits=31)
            while data and not member.eof:
                piece = member.decompress(data, _GUNZIP_BYTES)
                if not piece and not member.unconsumed_tail:
                    break
                out.append(piece)
                total += len(piece)
                what = f"reading {path}, of which {format_bytes(total)} are unpacked so far,"
                bounds.require_memory(_TEXT_COPIES * total, what, _SPLIT)
                data = member.unconsumed_tail
            data = member.unused_data
            if not member.eof:
                cut = "the gzip file ends early: the last line and what followed are lost"
    except zlib.error as error:
        raise _damaged(path, error) from error
    return b"".join(out), cut


def _damaged(path: Path, error: zlib.error) -> SourceError:
    return SourceError(
        f"{path} is damaged: {error}.", "a whole gzip file", command("gzip", "-t", path)
    )


def _as_utf8(data: bytes) -> bytes:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        data = data[: len(data) // 2 * 2].decode("utf-16", "replace").encode()
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError:
            data = data.decode("latin-1").encode()
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


_DOLLARS = re.compile(rb"""(?m)(^|[,;\t|"])[ ]*\$[ ]*(?=[0-9.])""")


def _unquote(text: bytes, path: Path, decimal: str | None) -> bytes:
    """Remove quotes from whole lines, from cells without a delimiter, and from numbers and dates with a comma.

    "1,234.50" becomes 1234.50, "12.5K" becomes 12500, "Jan 15, 2020" loses its comma. Any other quoted cell with a
    delimiter inside keeps its quotes, so that its line is refused.

    Raises:
        SourceError: All numbers are like "110,123", which may be a thousand times smaller.
    """
    if b"$" in text:  # nasdaq.com: $320.93
        text = _DOLLARS.sub(rb"\1", text)
    if b'"' not in text:
        return text
    whole = re.sub(rb'(?m)^"((?:[^"\n]|"")*)"$', rb"\1", text)
    whole = re.sub(rb'(?m)(^|[,;\t|])""(?=$|[,;\t|])', rb"\1", whole)  # empty cells
    whole = whole.replace(b'""', b'"')
    if b"," in whole:
        whole = _without_commas(whole, path, decimal)
    return re.sub(rb'(?m)(^|[,;\t|])"([^",;\t|\n]*)"(?=$|[,;\t|])', rb"\1\2", whole)


_QUOTED = re.compile(rb'(?m)(?<![^,;\t|\n])"([^"\n]*)"(?=$|[,;\t|])')
_THOUSANDS = re.compile(rb"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_COMMA_NUMBER = re.compile(rb"[+-]?[0-9]+,[0-9]+")
_SCALED = re.compile(rb"([+-]?[0-9][0-9,]*(?:\.[0-9]+)?)([KMBT%])")
_DATE = re.compile(rb"[A-Za-z]{3,9}\.? [0-9]{1,2}, [0-9]{4}.*|.*[0-9]{1,2}:[0-9]{2}.*")
_POINTED = re.compile(rb"(?m)(?:^|[,;\t|])[+-]?[0-9]+\.[0-9]+(?=$|[,;\t|])")
_PLAIN = re.compile(rb"[+-]?[0-9]+(?:\.[0-9]+)?[KMBT%]?")
_SCALES = {b"K": 3, b"M": 6, b"B": 9, b"T": 12}


def _without_commas(text: bytes, path: Path, decimal: str | None) -> bytes:
    head = [match[1] for match in _QUOTED.finditer(text[:_HEAD_BYTES])]
    comma = [cell for cell in head if _COMMA_NUMBER.fullmatch(cell)]
    if decimal is None and comma:
        points = any(b"." in cell and _PLAIN.fullmatch(cell.replace(b",", b"")) for cell in head)
        points = points or _POINTED.search(text, 0, _HEAD_BYTES) is not None
        if not points and all(_THOUSANDS.fullmatch(cell) for cell in comma):
            raise SourceError(
                f"{path}: {comma[0].decode()!r} may be a decimal comma or a thousand.",
                "numbers that read only one way, or your word",
                "--decimal . (the comma groups digits), or --decimal ,",
            )
        decimal = "." if points else ","

    def plain(match: re.Match[bytes]) -> bytes:
        cell = match[1].strip()
        scaled = _SCALED.fullmatch(cell)
        if scaled:
            number = Decimal(scaled[1].replace(b",", b"").decode())
            return format(number.scaleb(_SCALES.get(scaled[2], 0)), "f").encode()
        if _COMMA_NUMBER.fullmatch(cell) or _THOUSANDS.fullmatch(cell):
            return cell.replace(b",", b"." if decimal == "," else b"")
        return cell.replace(b",", b"") if b"," in cell and _DATE.fullmatch(cell) else match[0]

    return _QUOTED.sub(plain, text)


def _typed_text(path: Path) -> bytes:
    """Return a Parquet or Feather file as equivalent CSV text; floats keep every bit."""
    from pyarrow import csv, parquet

    bounds.require_memory(_TEXT_COPIES * path.stat().st_size, f"reading {path}", _SPLIT)
    with readable(path):
        if file_kind(path) == "parquet":
            table = parquet.read_table(path, page_checksum_verification=True)
        else:
            table = read_arrow(path)
    nested = [field.name for field in table.schema if pa.types.is_nested(field.type)]
    if nested:
        raise SourceError(
            f"{path}: {', '.join(map(repr, nested))} hold lists or structs.",
            "columns of numbers, times and text",
            "write the file without them",
        )
    columns = []
    for column in table.columns:
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        columns.append(column.cast(pa.float64() if pa.types.is_floating(kind) else pa.string()))
    names = [" ".join(re.split(r"[,;\t|\n]+", name)) for name in table.column_names]
    sink = io.BytesIO()
    sink.write((",".join(names) + "\n").encode())
    options = csv.WriteOptions(quoting_style="none", include_header=False)
    plain = pa.table(columns, names=[str(place) for place in range(len(columns))])
    try:
        csv.write_csv(plain, sink, options)
    except pa.ArrowInvalid as error:  # a text with a comma or a quote inside
        raise SourceError(
            f"{path}: a text column holds commas or quotes.",
            "symbols and numbers",
            "write the file without it",
        ) from error
    return sink.getvalue()
