"""How a file of bars is written: delimiter, decimal sign, columns, times; and one line of it.

Enters: the first lines of a file. Leaves: a `Dialect`, found by trying each one and taking the
one that reads most lines; and `parse_line`, the one definition of what a line means. The fast
reader of `reading` must agree with it. Costs: milliseconds per file, 25 µs per line.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stoker.errors import SourceError
from stoker.sources.bars.times import find_day_first, has_offset, is_slashed, match_time, parse_time

PRICES = ("open", "high", "low", "close")
VOLUMES = ("volume", "tick_volume", "real_volume")

_SAMPLE_LINES = 200
_HEADER_LINES = 50
_COMMENTS = ("#", "//", "--", "%")
_NUMBER = {
    sign: re.compile(rf"[ \t]*[+-]?(?:[0-9]+(?:{re.escape(sign)}[0-9]*)?|{re.escape(sign)}[0-9]+)"
                     r"(?:[eE][+-]?[0-9]+)?[ \t]*")
    for sign in ".,"
}  # fmt: skip
_TIME_NAMES = {
    "time", "date", "datetime", "date_time", "timestamp", "gmt_time", "local_time", "utc_time",
    "open_time", "opentime", "unix", "dt",
}  # fmt: skip
_ALIASES = {
    "o": "open", "h": "high", "l": "low", "c": "close",
    "open_price": "open", "high_price": "high", "low_price": "low", "close_price": "close",
    "v": "volume", "tickvol": "tick_volume", "tickvolume": "tick_volume",
    "realvolume": "real_volume",
}  # fmt: skip
# Known at the open, and no news: they would be features that only count the days.
_NO_FEATURES = {"close_time", "closetime", "per", "period", "timeframe", "index", "id", ""}


@dataclass(frozen=True)
class Dialect:
    """How one file is written.

    Attributes:
        delimiter: Between cells.
        decimal: "." or ",".
        names: Column name of each cell; None for a cell that is not kept.
        time_cells: One cell, or two for date and time apart.
        header_line: 1-based line of the header; 0 when there is none.
        aware: Times carry their own offset from UTC.
        day_first: How "10/11/2020" reads; None where no such date is expected.
        left_out: Columns not kept, with the reason, for the user.
    """

    delimiter: str
    decimal: str
    names: tuple[str | None, ...]
    time_cells: tuple[int, ...]
    header_line: int
    aware: bool = False
    day_first: bool | None = None
    left_out: tuple[str, ...] = ()

    @property
    def value_cells(self) -> tuple[int, ...]:
        """Cells that hold the values, in file order."""
        return tuple(cell for cell, name in enumerate(self.names) if name is not None)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the values, in file order."""
        return tuple(name for name in self.names if name is not None)


@dataclass(frozen=True)
class ParsedLine:
    """A line that was understood."""

    time_ns: int
    values: tuple[float, ...]


def parse_line(line: str, dialect: Dialect) -> ParsedLine | str | None:
    """Read one line; the one definition of what a line means.

    Returns:
        The bar; the reason, in words, why it is none; or None for a blank line.
    """
    if not line.strip(" \t"):
        return None
    cells = line.split(dialect.delimiter)
    if len(cells) != len(dialect.names):
        return _no_bar(line, cells) or f"{len(cells)} cells instead of {len(dialect.names)}"
    text = " ".join(cells[cell] for cell in dialect.time_cells)
    time_ns = parse_time(text, dialect.day_first, dialect.aware)
    if isinstance(time_ns, str):
        return _no_bar(line, cells) or time_ns
    values = []
    for cell in dialect.value_cells:
        value = parse_number(cells[cell], dialect.decimal)
        if value is None:
            return f"{dialect.names[cell]} is {cells[cell].strip()[:40]!r}, not a number"
        values.append(value)
    return ParsedLine(time_ns, tuple(values))


def parse_number(cell: str, decimal: str) -> float | None:
    """Return the finite number in `cell`, or None."""
    if not _NUMBER[decimal].fullmatch(cell):
        return None
    value = float(cell.replace(",", "."))
    return value if math.isfinite(value) else None


def find_dialect(text: bytes, file: str, day_first: bool | None = None) -> Dialect:
    """Find how a file is written by trying the known ways on its first lines.

    Args:
        text: The whole file as utf-8, lines ended by a newline, quotes taken off.
        file: For errors.
        day_first: The user's word on "10/11/2020"; None looks for proof in the file.

    Raises:
        SourceError: No way reads a single line, or day and month cannot be told apart.
    """
    lines = _sample(text)
    tried = [
        dialect for delimiter in (",", ";", "\t", "|") for dialect in _dialects(lines, delimiter)
    ]
    scored = [(_score(lines, dialect), dialect) for dialect in tried]
    best = max((score for score, _ in scored), default=0)
    if not best:
        shown = next((line for _, line in lines), "")[:80]
        raise SourceError(
            f"{file} does not read as bars; its first line is {shown!r}.",
            "time, open, high, low, close[, volume, ...] per line, split by , ; tab or |",
            "see docs/bars.md for the formats",
        )
    dialect = next(dialect for score, dialect in scored if score == best)
    aware, slashed = _usual_time(lines, dialect)
    dialect = replace(dialect, aware=aware)
    if slashed:
        if day_first is None:
            day_first = find_day_first(text, dialect.delimiter, dialect.time_cells[0], file)
        dialect = replace(dialect, day_first=day_first)
    return dialect


def _sample(text: bytes) -> list[tuple[int, str]]:
    head = text[: _SAMPLE_LINES * 400].split(b"\n")
    lines = [(number, raw.decode("utf-8", "replace")) for number, raw in enumerate(head, 1)]
    # A sample cut in the middle of a line must not vote.
    lines = lines[:-1] if len(lines) > 1 and len(text) > _SAMPLE_LINES * 400 else lines
    return [(number, line) for number, line in lines if line.strip()][:_SAMPLE_LINES]


def _clean_name(cell: str) -> str:
    name = re.sub(r"[^0-9a-z]+", "_", cell.strip().strip("<>\"'").lower()).strip("_")
    return _ALIASES.get(name, name)


def _no_bar(line: str, cells: Sequence[str]) -> str | None:
    """Name a line that was never meant as a bar."""
    if line.lstrip().startswith(_COMMENTS):
        return "a comment"
    return "a header" if _is_header(cells) else None


def _is_header(cells: Sequence[str]) -> bool:
    return set(PRICES) <= {_clean_name(cell) for cell in cells} if len(cells) > 3 else False


def _dialects(lines: list[tuple[int, str]], delimiter: str) -> list[Dialect]:
    """The ways of reading that this delimiter leaves open."""
    split = [(number, line.split(delimiter)) for number, line in lines]
    header = next(((n, cells) for n, cells in split[:_HEADER_LINES] if _is_header(cells)), None)
    header_line = header[0] if header else 0
    rows = [cells for number, cells in split if number > header_line and len(cells) >= 5]
    if not rows:
        return []
    num_cells = Counter(len(cells) for cells in rows).most_common(1)[0][0]
    rows = [cells for cells in rows if len(cells) == num_cells]
    if header:
        layouts = [_headed_layout(header[1], num_cells)]
    else:
        layouts = [_bare_layout(num_cells, num_time_cells) for num_time_cells in (1, 2)]
    decimals = (".",) if delimiter == "," else (".", ",")
    return [
        _without_text(Dialect(delimiter, decimal, layout[0], layout[1], header_line), rows)
        for layout in layouts
        if layout is not None
        for decimal in decimals
    ]


def _headed_layout(
    header: list[str], num_cells: int
) -> tuple[tuple[str | None, ...], tuple[int, ...]] | None:
    """Names and time cells under a header; None when the header does not fit the rows."""
    header = header[:-1] if len(header) == num_cells + 1 and not header[-1].strip() else header
    header = [*header, ""] if len(header) == num_cells - 1 else header
    if len(header) != num_cells:
        return None
    names: list[str | None] = [_clean_name(cell) for cell in header]
    if "vol" in names:
        names[names.index("vol")] = "real_volume" if "tick_volume" in names else "volume"
    time_cells: tuple[int, ...]
    if "date" in names and "time" in names:
        time_cells = (names.index("date"), names.index("time"))
    else:
        found = [cell for cell, name in enumerate(names) if name in _TIME_NAMES]
        # An index saved by pandas has no name, and stands first.
        found = found or ([0] if names[0] == "" else [])
        if not found:
            return None
        time_cells = (found[0],)
    drop = _TIME_NAMES | _NO_FEATURES
    kept = tuple(
        None if cell in time_cells or name in drop else name for cell, name in enumerate(names)
    )
    repeated = [name for name, count in Counter(kept).items() if name and count > 1]
    return None if repeated else (kept, time_cells)


def _bare_layout(
    num_cells: int, num_time_cells: int
) -> tuple[tuple[str | None, ...], tuple[int, ...]] | None:
    """Names by position: open, high, low, close, volume, extra_2, ..."""
    num_extras = num_cells - num_time_cells - len(PRICES)
    if num_extras < 0:
        return None
    # MT5 writes volume, real volume, spread; copy_rates the last two swapped. Not guessed.
    extras = ["volume", *(f"extra_{place}" for place in range(2, num_extras + 1))][:num_extras]
    return (None,) * num_time_cells + PRICES + tuple(extras), tuple(range(num_time_cells))


def _without_text(dialect: Dialect, rows: list[list[str]]) -> Dialect:
    """Leave out the columns that hold no number in any sampled row: symbols, empty cells."""
    names, left_out = list(dialect.names), []
    for cell in dialect.value_cells:
        name = names[cell]
        filled = any(parse_number(row[cell], dialect.decimal) is not None for row in rows)
        if name not in PRICES and not filled:
            names[cell] = None
            if any(row[cell].strip() for row in rows):
                left_out.append(f"column {name!r} holds no numbers and is left out")
    return replace(dialect, names=tuple(names), left_out=tuple(left_out))


def _score(lines: list[tuple[int, str]], dialect: Dialect) -> int:
    """Sampled lines that read as bars, whichever way day and month go."""
    read = 0
    for number, line in lines:
        if number > dialect.header_line:
            match = _time_of(line, dialect)
            trial = replace(dialect, aware=has_offset(match), day_first=True) if match else None
            good = trial and (
                isinstance(parse_line(line, trial), ParsedLine)
                or isinstance(parse_line(line, replace(trial, day_first=False)), ParsedLine)
            )
            read += bool(good)
    return read


def _time_of(line: str, dialect: Dialect) -> re.Match[str] | None:
    cells = line.split(dialect.delimiter)
    if len(cells) != len(dialect.names):
        return None
    return match_time(" ".join(cells[cell] for cell in dialect.time_cells))


def _usual_time(lines: list[tuple[int, str]], dialect: Dialect) -> tuple[bool, bool]:
    """Whether times carry an offset, and whether dates are slashed, in most sampled lines."""
    matches = [_time_of(line, dialect) for number, line in lines if number > dialect.header_line]
    kinds = Counter((has_offset(match), is_slashed(match)) for match in matches if match)
    return kinds.most_common(1)[0][0]
