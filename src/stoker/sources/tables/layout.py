"""How a text table is written: compression, encoding, separator, decimal sign, header.

Enters: the first 256 KiB of a file, and what the user said about it. Leaves: a `Layout` with a description of
every choice, or an error. Costs: milliseconds per file.

Nothing is guessed where two readings are equally likely: the first line of "Country,2019,2020" may be a header or a
row, and the user is asked.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

from stoker.display import command, nearest, quoted
from stoker.errors import InputError, SourceError
from stoker.store.foreign import JSON_LINES, TAR, name_kind, text_kind
from stoker.units import format_bytes, format_count

HEAD_BYTES = 256 << 10
NULLS = (
    *("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "-", "?"),
    *(".", "#N/A", "#NA", "<NA>", "1.#QNAN", "-1.#IND"),  # of SAS and Stata, Excel, pandas, Windows
    "\\N",  # of MySQL, Hive and PostgreSQL
)
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "whitespace": " "}
_SHOWN = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar", " ": "runs of spaces"}
_HEAD_ROWS = 2000
_DECIMAL_ROWS = 200
_PLAIN = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+(?:[eE][+-]?[0-9]+)?")
_SIGNED_GROUPS = re.compile(
    r"[+-]?[0-9]{1,3}(['\u2019\u00a0\u202f\u2009])[0-9]{3}(?:\1[0-9]{3})*(?:[.,][0-9]+)?"
)
_GROUPED = {  # digits in groups of three, by the decimal sign that then remains
    ".": re.compile(r"[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?"),
    ",": re.compile(r"[+-]?[1-9][0-9]{0,2}(?:\.[0-9]{3})+(?:,[0-9]*)?"),
}
_MAGIC = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"FEA1": "arrow",  # Feather of before 2020
    b"\xff\xff\xff\xff": "arrow",  # a stream of batches, as Hugging Face saves datasets
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a numpy file",
}
_ATTRIBUTE = r"""@attribute\s+(?:'([^']*)'|"([^"]*)"|(\S+))"""
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


@dataclass(frozen=True)
class TextOptions:
    """What the user says about text files; None detects it.

    Attributes:
        sep: Separator, or one of the words "tab", "comma", "semicolon", "bar", "whitespace".
        decimal: "." or ",".
        encoding: Name of a Python codec.
        header: Whether the first line names the columns.
    """

    sep: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    header: bool | None = None

    def __post_init__(self) -> None:
        sep = SEPARATORS.get(self.sep or "", self.sep)
        sep = "\t" if sep == "\\t" else sep
        if sep is not None and (len(sep) != 1 or sep in "\"'\r\n" or ord(sep) > 127):
            raise InputError(
                f"--sep is {self.sep!r}.",
                f"one character, or {', '.join(SEPARATORS)}",
                "--sep semicolon",
            )
        object.__setattr__(self, "sep", sep)
        if self.decimal not in (None, ".", ","):
            raise InputError(f"--decimal is {self.decimal!r}.", "a point or a comma", "--decimal ,")
        if self.encoding is not None:
            try:
                codecs.lookup(self.encoding)
            except LookupError:
                raise InputError(
                    f"--encoding is {self.encoding!r}.",
                    "the name of a text encoding",
                    "--encoding cp1252",
                ) from None


@dataclass(frozen=True)
class Layout:
    """How one text table is written."""

    sep: str  # between cells; a space stands for runs of spaces and tabs
    decimal: str  # "." or ","
    encoding: str  # name of the codec
    skip: int  # lines before the first row, the header among them
    preamble: int  # lines above the header, or above the first row where there is no header
    # names of the columns, without spaces around them; "c0", "c1" ... without a header
    names: tuple[str, ...]
    has_header: bool  # whether the file has the names
    said: str  # the layout in words, for the user
    comment: str | None = None  # how lines that are no rows begin; they are skipped
    is_empty: bool = False  # whether there is a header and nothing below it
    is_usual: bool = False  # whether it is a header and rows in UTF-8 with commas: not worth a note
    is_decimal_told: bool = False  # whether the cells tell the decimal sign, or the user did


def file_kind(path: Path, encoding: str | None = None) -> str:
    """Return a file's kind by its first bytes: "text", "parquet", "arrow", "json", or an unreadable kind in words.

    If the user named an encoding, every file of unknown kind is text.
    """
    found = _by_magic(path, _MAGIC)
    if found is None and encoding is None and (other := name_kind(path)) is not None:
        found = None if compression_of(path) and other.what != TAR else other.what
    return "json" if found == JSON_LINES else found or "text"


def compression_of(path: Path) -> str | None:
    """Return how a file is compressed, by its first bytes, whatever its name."""
    return _by_magic(path, _COMPRESSED)


def _by_magic(path: Path, known: Mapping[bytes, str]) -> str | None:
    with path.open("rb") as stream:
        start = stream.read(8)
    return next((word for magic, word in known.items() if start.startswith(magic)), None)


def refuse_kind(path: Path, kind: str) -> SourceError | None:
    """Return the error for a file that is not a table that stoker reads; None for one that is."""
    if kind in ("text", "parquet", "arrow", "json"):
        return None
    other = name_kind(path)
    arrays = command("stoker", "pack", "arrays", path, "OUT")
    fix = arrays if kind in _MAGIC.values() or other is None else other.fix
    return SourceError(f"{path} is {kind}.", "CSV, JSON lines, Parquet or Feather", fix)


def find_layout(
    head: bytes, path: Path, asked: TextOptions, *, is_whole: bool, usual_decimal: str | None = None
) -> Layout:
    """Find how a text table is written.

    Args:
        head: First bytes of the text.
        path: For messages.
        asked: What the user said; it overrides detection.
        is_whole: Whether `head` is the whole file.
        usual_decimal: Decimal sign of the other files, for a file whose cells do not tell it.
    """
    if asked.sep is None and (other := text_kind(path, head)) is not None:  # also if compressed
        raise SourceError(
            f"{path} is {other.what}.", "CSV, JSON lines, Parquet or Feather", other.fix
        )
    encoding, text = _decode(head, path, asked.encoding, is_whole)
    lines = text.splitlines(keepends=True)
    is_endless = not is_whole and len(lines) < 2
    if not is_whole and len(lines) > 1:
        lines = lines[:-1]  # the last one is cut
    if not any(line.strip() for line in lines):
        raise SourceError(
            f"{path} is empty: it cannot be read as a table.",
            "rows of cells",
            command("head", path),
        )
    if is_endless:
        raise SourceError(
            f"{path} cannot be read as a table: its first line is longer than {format_bytes(len(head))}.",
            "rows of cells",
            command("file", path),
        )
    if (weka := _find_arff(lines, path)) is not None:
        names, skip = weka
        found = f"ARFF, {format_count(skip, 'line')} above the rows"
        return Layout(",", ".", encoding, skip, skip, names, True, found, "%")
    hint = re.fullmatch(r"\ufeff?sep=(.)", lines[0].strip())
    sep = asked.sep or (hint[1] if hint else _find_separator(lines))
    shift = 1 if hint else 0
    rows = [(number + shift, cells) for number, cells in _split(lines[shift:], sep)]
    if not rows:
        raise SourceError(f"{path} holds no rows.", "rows of cells", command("head", path))
    width = _usual_width([cells for _, cells in rows])
    start = next(i for i, (_, cells) in enumerate(rows) if len(cells) == width)
    first_line, first = rows[start]
    body = [cells for _, cells in rows[start + 1 :] if len(cells) == width]
    before = rows[start - 1][1] if start else []
    given = [cell.strip() for cell in before]
    is_named = all(given) and len({*given}) == len(given) and not any(map(_is_number, given))
    is_short = is_named and len(before) == width - 1 > 1 and asked.header is not False
    # A separator behind the last cell of each row makes one cell more. Else R left the name of the first column out.
    is_behind = is_short and not any(cells[-1].strip() for cells in [first, *body])
    if is_short:
        named = [*before, ""] if is_behind else ["", *before]
        first_line, first, body = rows[start - 1][0], named, [first, *body]
        asked = replace(asked, header=True)
    # A quoted cell may span lines: a row ends at its line number, and begins after the row before.
    preamble = first_line - 1 - sum(cell.count("\n") for cell in first)
    told = asked.decimal or _told_decimal([first, *body], sep)
    decimal = told or usual_decimal or _likely_decimal([first, *body], sep)
    has_header = asked.header
    if has_header is None:
        has_header = _find_header(first, body, decimal, path)
    names = (
        tuple(re.sub(r"\s*\n\s*", " ", cell.strip()) for cell in first)
        if has_header
        else tuple(f"c{i}" for i in range(width))
    )
    said = ["decimal comma"] if decimal == "," else []
    said += [f"encoding {encoding}"] if encoding != "utf-8" else []
    said += [] if has_header else [f"no header, so columns are named c0 to c{width - 1}"]
    said += ["rows end with a separator, which the header does not"] if is_behind else []
    said += ["the header names all columns but the first"] if is_short and not is_behind else []
    said += [f"{format_count(preamble, 'line')} above the table ignored"] if preamble else []
    is_usual = width > 1 and sep == "," and not said
    skip = first_line if has_header else preamble
    is_empty = has_header and not body and is_whole
    separated = f"separator {_SHOWN.get(sep, repr(sep))}" if width > 1 else "one column"
    words = ", ".join([separated, *said])
    return Layout(
        sep, decimal, encoding, skip, preamble, names, has_header, words,
        is_empty=is_empty, is_usual=is_usual, is_decimal_told=told is not None,
    )  # fmt: skip


_ENCODINGS = ("shift_jis", "gb18030", "euc_kr", "big5", "cp1251", "cp1250", "latin-1")


def _unknown_encoding(head: bytes, path: Path, is_whole: bool) -> SourceError:
    """Return the error for text that is neither UTF-8 nor Western, with the encodings that could read it."""
    private: dict[str, int] = {}  # letters that stand for nothing: gb18030 reads nearly all bytes
    for name in _ENCODINGS:
        with suppress(UnicodeError):
            text = codecs.getincrementaldecoder(name)().decode(head, final=is_whole)
            private[name] = sum("\ue000" <= letter <= "\uf8ff" for letter in text)
    fitting = sorted(private, key=private.__getitem__)
    return SourceError(
        f"{path} is text in an encoding that its bytes do not tell: neither UTF-8 nor Western.",
        f"the encoding it was written in; of usual ones {', '.join(fitting)} can read it",
        f"--encoding {quoted(fitting[0])}",
    )


def _find_arff(lines: Sequence[str], path: Path) -> tuple[tuple[str, ...], int] | None:
    """Return the names and the number of lines above the rows of a Weka file (ARFF); None for other files."""
    stripped = [line.strip() for line in lines]
    first = next((line for line in stripped if line and not line.startswith("%")), "")
    if not re.match(r"@relation\b", first, re.IGNORECASE):
        return None
    start = next((i for i, line in enumerate(stripped) if line.lower() == "@data"), len(stripped))
    found = (re.match(_ATTRIBUTE, line, re.IGNORECASE) for line in stripped[:start])
    names = tuple(match[1] or match[2] or match[3] for match in found if match)
    rows = [line for line in stripped[start + 1 :] if line and not line.startswith("%")]
    if not rows or not names or any(line.startswith("{") for line in rows):
        why = "with sparse rows" if rows and names else "whose rows were not found"
        raise SourceError(f"{path} is ARFF {why}.", "rows of cells", "save it as CSV")
    if any("'" in line for line in rows):
        copy = path.with_name(f"{path.stem}-quoted{path.suffix}")
        raise SourceError(
            f"{path} is ARFF with single quotes.",
            "cells in double quotes",
            f"{command('sed', chr(34).join(('s/' + chr(39) + '/', '/g')), path)} > {quoted(copy)}",
        )
    start += 1
    while start < len(stripped) and (not stripped[start] or stripped[start].startswith("%")):
        start += 1
    return names, start


def _decode(head: bytes, path: Path, asked: str | None, is_whole: bool) -> tuple[str, str]:
    found = asked or ("utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8")
    if asked is None and found == "utf-8" and b"\x00" in head:
        raise SourceError(
            f"{path} holds zero bytes: it is not text that can be read as a table.",
            "CSV, Parquet or Feather",
            command("file", path),
        )
    try:
        text = codecs.getincrementaldecoder(found)().decode(head, final=is_whole)
    except UnicodeError as error:
        if asked is not None:
            raise SourceError(
                f"{path} is not {asked}: {error}.",
                "the encoding it was written in",
                "--encoding cp1252",
            ) from error
        # Western exports without a byte order mark. cp1252 leaves five bytes undefined, which latin-1 does not.
        found = "cp1252" if not re.search(rb"[\x81\x8d\x8f\x90\x9d]", head) else "latin-1"
        text = head.decode(found)
        high = sum(letter > "\x7f" for letter in text)
        if high > 0.3 * sum(map(str.isalpha, text)):
            raise _unknown_encoding(head, path, is_whole) from error
    return found, text.removeprefix("\ufeff")


def squeeze(line: str) -> list[str]:
    """Return the cells of a line whose separator is a run of spaces; quotes keep spaces inside."""
    return [cell.strip('"') for cell in re.findall(r'"[^"]*"|\S+', line)]


def _split(lines: Sequence[str], sep: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each row that is not blank, and the number of the line it ends in."""
    if sep == " ":
        numbered = ((number, squeeze(line)) for number, line in enumerate(lines, 1))
    else:
        reader = csv.reader(io.StringIO("".join(lines), newline=""), delimiter=sep)
        numbered = ((reader.line_num, cells) for cells in reader)
    # The csv module raises for a cell of more than 128 kB: what was read until then is enough.
    with suppress(csv.Error):
        for number, cells in islice(numbered, _HEAD_ROWS):
            if cells and (len(cells) > 1 or cells[0].strip()):
                yield number, cells


def _usual_width(rows: Sequence[Sequence[str]]) -> int:
    return Counter(map(len, rows)).most_common(1)[0][0]


def _find_separator(lines: Sequence[str]) -> str:
    """Return the separator that gives most rows the same number of clean cells."""
    best, score = ",", 0.0
    for sep in (",", ";", "\t", "|", " "):
        rows = [cells for _, cells in _split(lines, sep)]
        width = _usual_width(rows) if rows else 0
        if width < 2:
            continue
        alike = [cells for cells in rows if len(cells) == width]
        cells = [cell.strip() for row in alike[:200] for cell in row]
        clean = sum(map(_is_clean, cells)) / len(cells)
        found = clean * len(alike) / len(rows)
        if sep == " ":  # prose has spaces too
            found *= sum(map(_is_number, cells)) / len(cells) * 0.9
        if found > score + 1e-9:
            best, score = sep, found
    return best


def _is_clean(cell: str) -> bool:
    """Tell whether a cell looks whole: no other separator inside, unless it is a decimal comma; not two numbers."""
    if re.fullmatch(r"[-+]?[0-9.]+[ \t]+[-+]?[0-9.,]+", cell):
        return False
    return not re.search(r"[,;\t|]", cell) or _is_number(cell)


def _is_number(cell: str) -> bool:
    return bool(_PLAIN.fullmatch(cell) or _COMMA.fullmatch(cell))


def _told_decimal(rows: Sequence[Sequence[str]], sep: str) -> str | None:
    """Return the decimal sign that the cells tell; None where "1.234" or "1,234" may be a thousand in all of them."""
    cells = [_ungrouped(cell.strip()) for row in rows for cell in row]
    if any("," in cell and _GROUPED[","].fullmatch(cell) for cell in cells if "." in cell):
        return ","  # 1.234,56
    if any("." in cell and _GROUPED["."].fullmatch(cell) for cell in cells if "," in cell):
        return "."  # 1,234.56
    points = any(_is_decimal(cell, ".") for cell in cells)
    commas = any(_is_decimal(cell, ",") for cell in cells)
    if points and commas:  # such as a column of versions, or of lists
        more = _num_decimal(rows, ",") - _num_decimal(rows, ".")
        return "," if more > 0 or (more == 0 and sep != ",") else "."
    return "." if points else "," if commas else None


def _num_decimal(rows: Sequence[Sequence[str]], decimal: str) -> int:
    """Return how many columns hold numbers with this decimal sign; a list such as "3,4" has neighbours like "1,2,5"."""
    num = 0
    for column in zip(*rows[1:_DECIMAL_ROWS], strict=True):
        cells = [text for cell in column if (text := cell.strip()) not in NULLS]
        numbers = sum(parse_number(cell, decimal) is not None for cell in cells)
        num += 10 * numbers >= 9 * len(cells) and any(
            _is_decimal(_ungrouped(cell), decimal) for cell in cells
        )
    return num


def _is_decimal(cell: str, decimal: str) -> bool:
    """Tell whether a cell is a number with this decimal sign, and could not be one with groups of digits."""
    number = decimal in cell and (_PLAIN if decimal == "." else _COMMA).fullmatch(cell)
    return bool(number) and not _GROUPED["," if decimal == "." else "."].fullmatch(cell)


def _likely_decimal(rows: Sequence[Sequence[str]], sep: str) -> str:
    """Return the decimal sign of cells such as "1,234": a thousand where commas split cells, else 1.234."""
    cells = [cell.strip() for row in rows for cell in row]
    points = any("." in cell and _PLAIN.fullmatch(cell) for cell in cells)
    commas = any(_COMMA.fullmatch(cell) for cell in cells)
    return "," if commas and not points and sep != "," else "."


def _ungrouped(text: str) -> str:
    """Return a number without an apostrophe or a narrow space between its thousands: 1'234.50, 1\u202f234,50."""
    found = _SIGNED_GROUPS.fullmatch(text)
    return text.replace(found[1], "") if found else text


def parse_number(text: str, decimal: str) -> float | None:
    """Return the number in a cell, with or without groups of three digits; None where it holds none."""
    text = _ungrouped(text.strip().replace("\u2212", "-"))  # the minus sign of typeset tables
    if _GROUPED[decimal].fullmatch(text):
        text = text.replace("," if decimal == "." else ".", "")
    if decimal == ",":
        if "." in text:
            return None
        text = text.replace(",", ".")
    if not _PLAIN.fullmatch(text):
        return _INFINITE.get(text.lower())
    return float(text)


_INFINITE = {
    f"{sign}{word}": float(f"{sign}inf") for sign in ("", "+", "-") for word in ("inf", "infinity")
}


def _find_header(
    first: Sequence[str], body: Sequence[Sequence[str]], decimal: str, path: Path
) -> bool:
    """Tell whether the first row names the columns.

    Text above a column of numbers is a header; a number there is a row. If only text columns can decide, a text
    that the column repeats is a row, and otherwise the first line is a header.
    """
    cells = [cell.strip() for cell in first]
    for_header = for_row = 0
    is_numeric, repeats = [], False
    for place, cell in enumerate(cells):
        filled = [text for row in body if (text := row[place].strip()) not in NULLS]
        numeric = 2 * sum(parse_number(text, decimal) is not None for text in filled) > len(filled)
        is_numeric.append(numeric)
        if numeric and cell not in NULLS:
            is_row = parse_number(cell, decimal) is not None
            for_row, for_header = for_row + is_row, for_header + (not is_row)
        elif cell not in NULLS:
            repeats = repeats or cell in filled
    if for_header:
        return True
    # Years and running numbers in a header go up by one.
    above = [cell for cell, numeric in zip(cells, is_numeric, strict=True) if numeric]
    whole = [int(cell) for cell in above if cell.isdecimal() and len(cell) < 10]
    years = len(whole) == len(above) > 2 and all(b - a == 1 for a, b in pairwise(whole))
    if for_row and not repeats and (years or not all(is_numeric)) and len(cells) > 1 and body:
        raise SourceError(
            f"{path}: the first line, {', '.join(cells)[:80]!r}, may be a header or a row.",
            "a first line that is clearly one of them, or your word",
            "--header, or --no-header",
        )
    if not body:
        return not any(parse_number(cell, decimal) is not None for cell in cells)
    return not for_row and not repeats


def header_advice(names: Sequence[str], wanted: str) -> str:
    """Return the closest existing name, quoted for a shell."""
    near = nearest(wanted.strip(), names)
    return quoted(near) if near else ""
