"""How a file of bars is written: delimiter, decimal sign, names of columns, times; and what one line means.

Enters: the first lines of a file, and what the user said about its columns. Leaves: a `Dialect`, found by trying
all of them and taking the one that reads most lines; and `parse_line`, the definition of what a line means. The fast
reader of `reading` must agree with it. Costs: milliseconds per file, 25 µs per line.

Under a header, names decide and not positions: a header without open, high, low and close is refused with the names
that it has. Files without a header are read in the usual order, and a note says so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from stoker.display import quoted
from stoker.errors import InputError, SourceError
from stoker.sources.times import (
    find_day_first,
    has_offset,
    has_short_year,
    is_slashed,
    match_time,
    parse_time,
)

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
_BINANCE = (
    None, *PRICES, "volume", None, "quote_volume", "trades", "taker_buy_volume", "taker_buy_quote_volume", None,
)  # fmt: skip
_FALSE = {"false", "0", "no", "n", "f"}


@dataclass(frozen=True)
class Dialect:
    """How one file is written."""

    delimiter: str  # between cells
    decimal: str  # "." or ","
    names: tuple[str | None, ...]  # column name of each cell; None for a cell that is not kept
    time_cells: tuple[int, ...]  # one cell, or two for date and time apart
    header_line: int  # 1-based line of the header, the last one of several; 0 when there is none
    header_first: int = 0  # the first one of several
    aware: bool = False  # times carry their own offset from UTC
    day_first: bool | None = None  # how "10/11/2020" reads; None where no such date is expected
    left_out: tuple[str, ...] = ()  # columns not kept, with the reason, for the user
    symbol_cell: int | None = None  # the cell that names the symbol; None where there is none
    # the same, where a file holds several symbols and one of them is read
    ticker_cell: int | None = None
    ticker: str | None = None  # lines with another text in that cell belong to other symbols
    complete_cell: int | None = None  # the cell that says whether a bar is complete
    is_close: bool = False  # times are the closes of bars
    dropped: tuple[str, ...] = ()  # columns that the user dropped, as typed
    gone: tuple[str, ...] = ()  # columns that are always left out
    # symbols in names of columns ("Close_AAPL"); () if there are none
    tickers: tuple[str, ...] = ()

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
    """One parsed line."""

    time_ns: int
    values: tuple[float, ...]


def parse_line(line: str, dialect: Dialect) -> ParsedLine | str | None:
    """Read one line. This function defines what a line means.

    A further column that holds no number gives NaN: such a column is refused as a whole, not its lines.

    Returns:
        The bar; or in words why the line is none; or None for a blank line and a line of another symbol.
    """
    if not line.strip(" \t"):
        return None
    cells = line.split(dialect.delimiter)
    if len(cells) != len(dialect.names):
        return _no_bar(line, cells) or f"{len(cells)} cells instead of {len(dialect.names)}"
    if (
        dialect.ticker_cell is not None
        and cells[dialect.ticker_cell].strip(" \t") != dialect.ticker
    ):
        return None
    if is_incomplete(cells, dialect):
        return "the bar is not complete"
    text = " ".join(cells[cell] for cell in dialect.time_cells)
    time_ns = parse_time(text, dialect.day_first, dialect.aware)
    if isinstance(time_ns, str):
        return _no_bar(line, cells) or time_ns
    values = []
    for cell in dialect.value_cells:
        value = parse_number(cells[cell], dialect.decimal)
        if value is None and dialect.names[cell] not in PRICES:
            value = math.nan
        if value is None:
            return f"{dialect.names[cell]} is {cells[cell].strip()[:40]!r}, not a number"
        values.append(value)
    return ParsedLine(time_ns, tuple(values))


def is_incomplete(cells: Sequence[str], dialect: Dialect) -> bool:
    """Return whether a line marks its bar as not complete."""
    place = dialect.complete_cell
    return place is not None and cells[place].strip().lower() in _FALSE


def parse_number(cell: str, decimal: str) -> float | None:
    """Return the finite number in `cell`, or None."""
    if not _NUMBER[decimal].fullmatch(cell):
        return None
    value = float(cell.replace(",", "."))
    return value if math.isfinite(value) else None


def find_dialect(
    text: bytes, file: str, day_first: bool | None = None, naming: Naming | None = None
) -> Dialect:
    """Find how a file is written by trying all known dialects on its first lines.

    `text` is the whole file as UTF-8, with LF line ends and without quotes. `day_first` and `naming` are what the user
    said about "10/11/2020" and about columns; if `day_first` is None, the file must prove the order.
    """
    naming = naming or Naming()
    lines = _sample(text)
    scored = _scored(tuple(lines), naming)
    best = max((score for score, _ in scored), default=0)
    headers = [_unknown(lines, delimiter) for delimiter in (",", ";", "\t", "|")]
    header = max((cells for cells in headers if cells), key=len, default=None)
    named = any(dialect.header_line for score, dialect in scored if score == best)
    if header is not None and not (best and named):
        raise unknown_header(file, header, naming, lines[-1][1])
    if len(lines) == 1 and any(_is_header(lines[0][1].split(mark)) for mark in ",;\t|"):
        raise SourceError(
            f"{file} has a header and no bars.", "at least one bar", "a file or a frame with bars"
        )
    if not best:
        shown = next((line for _, line in lines), "")[:80]
        raise SourceError(
            f"{file} does not read as bars; its first line is {shown!r}.",
            "time, open, high, low, close[, volume, ...] per line, split by , ; tab or |",
            "see docs/bars.md for the formats",
        )
    dialect = next(dialect for score, dialect in scored if score == best)
    head = next((line for number, line in lines if number == dialect.header_line), "")
    if naming.is_asked and not naming.fits(head.split(dialect.delimiter)):
        raise unknown_header(file, [], naming)
    # Whether times carry an offset, and whether dates are slashed, in most sampled lines.
    matches = [_time_of(line, dialect) for number, line in lines if number > dialect.header_line]
    kinds = Counter((has_offset(match), is_slashed(match)) for match in matches if match)
    aware, slashed = kinds.most_common(1)[0][0]
    dialect = replace(dialect, aware=aware)
    if slashed:
        if day_first is None:
            day_first = find_day_first(text, dialect.delimiter, dialect.time_cells[0], file)
        dialect = replace(dialect, day_first=day_first)
    return dialect


def _unknown(lines: list[tuple[int, str]], delimiter: str) -> list[str] | None:
    """Return the cells of a header with names that this module does not know; None if there is no such header."""
    split = [line.split(delimiter) for _, line in lines[:_HEADER_LINES]]
    if len(split) < 2:
        return None
    width = Counter(map(len, split)).most_common(1)[0][0]
    rows = [cells for cells in split if len(cells) == width]
    if width < 4 or len(rows) < 2:
        return None
    if _is_header(rows[0]):  # with prices; the caller knows whether anything else is missing
        return [cell.strip() for cell in rows[0]]

    def num_numbers(cells: list[str]) -> int:
        return sum(_is_number(cell) for cell in cells)

    first = rows[0]
    is_words = not num_numbers(first) and sum(bool(cell.strip()) for cell in first) >= 4
    is_words &= not match_time(first[0]) and not first[0].lstrip().startswith(_COMMENTS)
    return [cell.strip() for cell in first] if is_words and num_numbers(rows[-1]) >= 4 else None


def _is_number(cell: str) -> bool:
    return parse_number(cell, ".") is not None or parse_number(cell, ",") is not None


def _sample(text: bytes) -> list[tuple[int, str]]:
    head = text[: _SAMPLE_LINES * 400].split(b"\n")
    lines = [(number, raw.decode("utf-8", "replace")) for number, raw in enumerate(head, 1)]
    # A line that is cut off at the end of the sample must not count.
    lines = lines[:-1] if len(lines) > 1 and len(text) > _SAMPLE_LINES * 400 else lines
    return [(number, line) for number, line in lines if line.strip()][:_SAMPLE_LINES]


def _no_bar(line: str, cells: Sequence[str]) -> str | None:
    """Return what a line is that was never meant as a bar; None for any other line."""
    if line.lstrip().startswith(_COMMENTS):
        return "a comment"
    return "a header" if _is_header(cells) else None


def _is_header(cells: Sequence[str], naming: Naming | None = None) -> bool:
    if len(cells) < 4:
        return False
    names = {clean_name(cell) for cell in cells}
    stems = {split_ticker(name)[0] for name in names}
    investing = {"open", "high", "low", "price"} <= names
    asked = naming is not None and naming.is_asked and naming.fits(cells)
    return asked or set(PRICES) <= stems or investing


def _dialects(lines: list[tuple[int, str]], delimiter: str, naming: Naming) -> list[Dialect]:
    """Return the possible dialects with this delimiter."""
    split = [(number, line.split(delimiter)) for number, line in lines]
    header = next((each for each in split[:_HEADER_LINES] if _is_header(each[1], naming)), None)
    first = last = header[0] if header else 0
    rows = [cells for number, cells in split if number > last and len(cells) >= 5]
    if not rows:
        return []
    num_cells = Counter(map(len, rows)).most_common(1)[0][0]
    rows = [cells for cells in rows if len(cells) == num_cells]
    if header:
        names, first, last = _stacked_header(split, header)
        rows = [cells for number, cells in split if number > last and len(cells) == num_cells]
        layouts = [_headed_layout(names, rows, naming)]
    elif num_cells == len(_BINANCE) and _is_binance(rows):
        layouts = [Dialect("", "", _BINANCE, (0,), 0)]
    else:
        layouts = [_bare_layout(rows, num_time_cells) for num_time_cells in (1, 2)]
    return [
        _without_unused(
            replace(
                layout, delimiter=delimiter, decimal=decimal, header_line=last, header_first=first
            ),
            rows,
            naming,
        )
        for layout in layouts
        if layout is not None
        for decimal in ((".",) if delimiter == "," else (".", ","))
    ]


def _stacked_header(
    split: list[tuple[int, list[str]]], header: tuple[int, list[str]]
) -> tuple[list[str], int, int]:
    """Join the lines of a header that has several, as yfinance writes it: prices, tickers, the name of the index.

    Returns:
        The names, "Close_AAPL" where a line has the tickers, and the numbers of the header's first and last line.
    """
    last, cells = header
    first = last
    place = next(i for i, (number, _) in enumerate(split) if number == last)
    block = [cells]
    for number, more in split[place + 1 : place + 3]:
        if len(more) != len(cells) or any(_is_number(cell) for cell in more) or match_time(more[0]):
            break
        block.append(more)
        last = number
    above = split[place - 1] if place else None
    if above and len(above[1]) == len(cells) and clean_name(above[1][0]) in TICKER_NAMES:
        block.insert(1, above[1])  # group_by="ticker": the line of tickers comes first
        first = above[0]
    if len(block) == 1:
        return cells, first, last
    tickers = next((each for each in block[1:] if clean_name(each[0]) in TICKER_NAMES), None)
    index = next((each[0] for each in block[1:] if clean_name(each[0]) in TIME_NAMES), "Date")
    names = [
        f"{name}_{ticker}" if ticker.strip() else name
        for name, ticker in zip(cells, tickers or [""] * len(cells), strict=True)
    ]
    return [index, *names[1:]], first, last


def _headed_layout(header: list[str], rows: list[list[str]], naming: Naming) -> Dialect | None:
    """Return the names and time cells that a header gives; None if it does not fit the rows."""
    num_cells = len(rows[0]) if rows else len(header)
    header = header[:-1] if len(header) == num_cells + 1 and not header[-1].strip() else header
    left_out = []
    if len(header) == num_cells - 1:
        header, missing = _named_all(header, rows)
        left_out += [missing] if missing else []
    if len(header) != num_cells:
        return None
    names: list[str | None] = [*naming.named(header)]
    names, tickers = _one_ticker(names, naming.ticker)
    if "vol" in names:
        names[names.index("vol")] = "real_volume" if "tick_volume" in names else "volume"
    if "price" in names and "close" not in names and {"open", "high", "low"} <= {*names}:
        names[names.index("price")] = "close"  # Investing.com calls the close the price
    time_cells, is_close = _time_cells(names, header, rows, naming)
    if not time_cells:
        return None
    complete_cell = names.index("complete") if "complete" in names else None
    symbol_cell = next((i for i, name in enumerate(names) if name in TICKER_NAMES), None)
    ticker_cell = symbol_cell if naming.ticker is not None and not tickers else None
    kept: list[str | None] = []
    for cell, name in enumerate(names):
        adjusted = is_adjusted(name or "")
        if adjusted:
            left_out.append(
                f"column {header[cell].strip()!r} is left out: it is adjusted by dividends and splits that came later"
            )
        gone = adjusted or name in TIME_NAMES or name in NO_FEATURES
        kept.append(None if cell in time_cells or gone or cell == complete_cell else name)
    for cell, name in enumerate(kept):  # "Change" and "%Change"
        if name is not None and name not in PRICES and name in kept[:cell]:
            kept[cell] = f"{name}_{names[:cell].count(name) + 1}"
    if any(kept.count(name) != 1 for name in PRICES):
        return None
    return Dialect(
        "", "", tuple(kept), time_cells, 0, left_out=tuple(left_out), symbol_cell=symbol_cell, ticker_cell=ticker_cell,
        ticker=naming.ticker if ticker_cell is not None else None, complete_cell=complete_cell,
        is_close=is_close, tickers=tickers,
        gone=tuple(name for name, left in zip(names, kept, strict=True) if name and left is None),
    )  # fmt: skip


def _named_all(header: list[str], rows: list[list[str]]) -> tuple[list[str], str]:
    """Return a header that has one name fewer than rows have cells, completed; and a note."""
    if not any(row[-1].strip() for row in rows):
        return [*header, ""], ""
    if clean_name(header[0]) not in TIME_NAMES:
        return ["", *header], ""  # an index, as R and pandas write it
    if any(":" in row[1] and match_time(f"{row[0]} {row[1]}") for row in rows[:20]):
        return [header[0], "time", *header[1:]], (
            "the header has no name for the second column, which is taken as the time of day"
        )
    return [*header, ""], "the last column has no name in the header and is left out"


def _one_ticker(
    names: list[str | None], wanted: str | None
) -> tuple[list[str | None], tuple[str, ...]]:
    """Remove the ticker from names such as "close_aapl"; of several tickers, keep the wanted one's columns."""
    if set(PRICES) <= {*names}:
        return names, ()
    pairs = [split_ticker(name or "") for name in names]
    closes = [ticker for stem, ticker in pairs if stem == "close" and ticker]
    tickers = tuple(
        ticker
        for ticker in dict.fromkeys(closes)
        if {*PRICES} <= {stem for stem, other in pairs if other == ticker}
    )
    if not tickers:
        return names, ()
    chosen = clean_name(wanted) if wanted and clean_name(wanted) in tickers else tickers[0]
    made = [
        stem if ticker == chosen else "" if ticker in tickers else name
        for name, (stem, ticker) in zip(names, pairs, strict=True)
    ]
    return made, tickers


def _time_cells(
    names: list[str | None], header: list[str], rows: list[list[str]], naming: Naming
) -> tuple[tuple[int, ...], bool]:
    """Return the cells of the time, and whether it is that of the close."""
    if naming.time_column is not None:
        wanted = [part.strip() for part in naming.time_column.split("+")]
        plain = [cell.strip() for cell in header]
        places = [plain.index(part) for part in wanted if part in plain]
        return (tuple(places), False) if len(places) == len(wanted) <= 2 else ((), False)

    def reads(*cells: int) -> bool:
        return any(match_time(" ".join(row[cell] for cell in cells)) for row in rows[:20])

    if "date" in names and "time" in names:
        both = (names.index("date"), names.index("time"))
        if reads(*both):
            return both, False
    found = sorted(
        (TIME_NAMES.index(name), cell) for cell, name in enumerate(names) if name in TIME_NAMES
    )
    # An index saved by pandas has no name, and comes first.
    cells = [cell for _, cell in found] or ([0] if names and names[0] == "" else [])
    known = next((cell for cell in cells if reads(cell)), None)
    if known is not None:
        return (known,), False
    closing = [cell for cell, name in enumerate(names) if name in CLOSE_NAMES and reads(cell)]
    return ((closing[0],), True) if closing else ((), False)


def _is_binance(rows: list[list[str]]) -> bool:
    """Klines without a header: the seventh cell is the close time, the end of the bar."""
    try:
        spans = {int(row[6]) - int(row[0]) + 1 for row in rows[:20]}
    except ValueError:
        return False
    return len(spans) == 1 and min(spans) > 0


def _bare_layout(rows: list[list[str]], num_time_cells: int) -> Dialect | None:
    """Names by position: open, high, low, close, volume, extra_2, ..."""
    num_extras = len(rows[0]) - num_time_cells - len(PRICES)
    if num_extras < 0:
        return None
    # MT5 writes volume, real volume, spread; copy_rates the last two swapped. Not guessed.
    extras = ["volume", *(f"extra_{place}" for place in range(2, num_extras + 1))][:num_extras]
    if num_extras > 1:
        # Kraken's API has the volume-weighted price before the volume: between low and high in every row.
        high, low, behind = num_time_cells + 1, num_time_cells + 2, num_time_cells + 4
        with suppress(ValueError):
            values = [[float(row[cell]) for cell in (low, behind, high)] for row in rows[:50]]
            if all(a <= b <= c for a, b, c in values) and any(a < c for a, _, c in values):
                extras[0] = "extra_1"
    names = (None,) * num_time_cells + PRICES + tuple(extras)
    return Dialect("", "", names, tuple(range(num_time_cells)), 0)


def _without_unused(dialect: Dialect, rows: list[list[str]], naming: Naming) -> Dialect:
    """Leave out columns without a number in any sampled row, such as symbols, and columns that the user dropped.

    The user may name columns of the file, or features made from them ("volume_log").
    """
    names, left_out, dropped = list(dialect.names), [], []
    for cell in dialect.value_cells:
        filled = any(parse_number(row[cell], dialect.decimal) is not None for row in rows)
        if names[cell] not in PRICES and not filled:
            if names[cell] and any(row[cell].strip() for row in rows):
                left_out.append(f"column {names[cell]!r} holds no numbers and is left out")
            names[cell] = None
    gone = [name for name, left in zip(dialect.names, names, strict=True) if name and left is None]
    for asked in naming.drop:
        cleaned = clean_name(asked)
        stem = cleaned.removesuffix("_log").removesuffix("_change")
        wanted = stem if stem in VOLUMES else cleaned
        if wanted in names and wanted not in PRICES:
            names[names.index(wanted)] = None
            dropped.append(asked)
        elif cleaned in (*dialect.gone, *gone):
            dropped.append(asked)
    return replace(
        dialect,
        names=tuple(names),
        left_out=(*dialect.left_out, *left_out),
        gone=(*dialect.gone, *gone),
        dropped=tuple(dropped),
    )


@lru_cache(maxsize=16)
def _scored(lines: tuple[tuple[int, str], ...], naming: Naming) -> list[tuple[int, Dialect]]:
    """Score every dialect. Cached: a pack needs the head of a file when it lists, checks and reads the file."""
    tried = [
        dialect
        for delimiter in (",", ";", "\t", "|")
        for dialect in _dialects(list(lines), delimiter, naming)
    ]
    return [(_score(lines, dialect), dialect) for dialect in tried]


def _score(lines: Sequence[tuple[int, str]], dialect: Dialect) -> int:
    """Return how many sampled lines read as bars, with either order of day and month and of any symbol."""
    trials = {
        aware: [
            replace(dialect, ticker_cell=None, aware=aware, day_first=first)
            for first in (True, False)
        ]
        for aware in (True, False)
    }
    read = 0
    for number, line in lines:
        match = _time_of(line, dialect) if number > dialect.header_line else None
        read += match is not None and any(
            isinstance(parse_line(line, trial), ParsedLine) for trial in trials[has_offset(match)]
        )
    return read


def _time_of(line: str, dialect: Dialect) -> re.Match[str] | None:
    cells = line.split(dialect.delimiter)
    if len(cells) != len(dialect.names):
        return None
    return match_time(" ".join(cells[cell] for cell in dialect.time_cells))


# -- what columns of bars are called ----------------------------------------------------------------


TIME_NAMES = (
    "open_time", "opentime", "datetime", "date_time", "timestamp", "gmt_time", "utc_time", "local_time", "date", "time",
    "unix", "unix_timestamp", "dt", "trading_date",
)  # fmt: skip
"""Names of open times; where a header has several, the first of these whose cells read as times is taken."""
CLOSE_NAMES = ("close_time", "closetime", "end", "end_time", "bar_end", "time_close")
"""Names of the time at which a bar ends."""
TICKER_NAMES = (
    "ticker", "symbol", "pair", "instrument", "sym", "tic", "name", "stock", "asset", "code",
)  # fmt: skip
# Not features: known in advance, constant, or counters of rows.
NO_FEATURES = {
    "close_time", "closetime", "per", "period", "timeframe", "index", "id", "", "ignore", "unnamed_0",
    *TICKER_NAMES,
}  # fmt: skip
_ALIASES = {
    "o": "open", "h": "high", "l": "low", "c": "close",
    "open_price": "open", "high_price": "high", "low_price": "low", "close_price": "close",
    "mid_o": "open", "mid_h": "high", "mid_l": "low", "mid_c": "close",
    "open_mid": "open", "high_mid": "high", "low_mid": "low", "close_mid": "close",
    "openmid": "open", "highmid": "high", "lowmid": "low", "closemid": "close",
    "close_last": "close",  # nasdaq.com: "Close/Last"
    "v": "volume", "tickvol": "tick_volume", "tickvolume": "tick_volume", "realvolume": "real_volume",
}  # fmt: skip
_STEMS = ("adj_close", "adjclose", "adjusted", "volume", "close", "open", "high", "low")
"""Longer ones first."""
_ADJUSTED = re.compile(r"(?:.*_)?adj(?:usted)?(?:_.*|open|high|low|close|volume)?")


def clean_name(cell: str) -> str:
    """Return a name as stoker writes it: lower case, words joined by underscores, aliases replaced."""
    name = re.sub(r"[^0-9a-z]+", "_", cell.strip().strip("<>\"'").lower()).strip("_")
    return _ALIASES.get(name, name)


def split_ticker(name: str) -> tuple[str, str]:
    """Return "close" and "aapl" for "close_aapl" and for "aapl_close"; the name and "" for others."""
    for stem in _STEMS:
        if name == stem:
            return stem, ""
        if name.startswith(f"{stem}_") and name not in NO_FEATURES and name != "close_adj":
            return stem, name[len(stem) + 1 :]
        if name.endswith(f"_{stem}") and not is_adjusted(name[: -len(stem) - 1]):
            return stem, name[: -len(stem) - 1]
    return name, ""


def is_adjusted(name: str) -> bool:
    """Return whether a column is adjusted by later dividends and splits, and so looks ahead."""
    return _ADJUSTED.fullmatch(name) is not None or name.endswith("_adj")


@dataclass(frozen=True)
class Naming:
    """What the user says about the columns of the files.

    Attributes:
        time_column: Name of the time column, or two names joined by "+"; None finds it.
        columns: Pairs of stoker's name and the name in the file, such as ("open", "Erster").
        drop: Columns to leave out.
        ticker: Symbol to read, where a file holds several.
    """

    time_column: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    ticker: str | None = None

    @classmethod
    def parse(cls, time_column: str | None, columns: str | None, drop: Sequence[str]) -> Naming:
        """Read what is typed: `--columns open=Erster,high=Hoch,low=Tief,close=Schluss`."""
        pairs = []
        for piece in filter(None, (columns or "").split(",")):
            ours, equals, theirs = (part.strip() for part in piece.partition("="))
            if not equals or not theirs or not re.fullmatch("[a-z][a-z0-9_]*", ours):
                raise InputError(
                    f"--columns is {columns!r}.",
                    "NAME=NAME IN THE FILE, split by commas, for open, high, low, close and any other",
                    "--columns open=Open,high=High,low=Low,close=Close",
                )
            pairs.append((ours, theirs))
        return cls(time_column, tuple(pairs), tuple(drop))

    @property
    def is_asked(self) -> bool:
        """Whether the user named a column."""
        return self.time_column is not None or bool(self.columns)

    def fits(self, cells: Sequence[str]) -> bool:
        """Tell whether a line has all the names that the user gave."""
        there = {cell.strip().strip("<>\"'") for cell in cells}
        wanted = [theirs for _, theirs in self.columns]
        wanted += self.time_column.split("+") if self.time_column else []
        return all(name.strip() in there for name in wanted)

    def named(self, header: Sequence[str]) -> list[str]:
        """Return our names for the cells of a header."""
        given = {theirs: ours for ours, theirs in self.columns}
        plain = [cell.strip().strip("<>\"'") for cell in header]
        taken = {given[cell] for cell in plain if cell in given}
        cleaned = [given.get(cell) or clean_name(cell) for cell in plain]
        # A column of the same name as one that the user chose is renamed.
        return [
            f"{name}_2" if name in taken and cell not in given else name
            for name, cell in zip(cleaned, plain, strict=True)
        ]


def unknown_header(file: str, header: Sequence[str], naming: Naming, bar: str = "") -> SourceError:
    """Return the error for a header that names no prices: under a header, positions are not trusted.

    If the header names all that is needed, the fault is in the lines below, of which `bar` is one.
    """
    if naming.is_asked and not header:
        return SourceError(
            f"{file} has no header with the columns that --time-column and --columns name.",
            "names that stand in the first lines of the file",
            "leave --time-column and --columns out, or use the names of the file",
        )
    names = {clean_name(cell) for cell in header}
    missing = [name for name in PRICES if name not in names]
    time = next((cell for cell in header if clean_name(cell) in TIME_NAMES), None)
    time = time or _holding(header, ("start", "open_time", "date", "time")) or [*header, "NAME"][0]
    if bar and not missing and clean_name(time) in TIME_NAMES:
        cells = re.split("[,;\t|]", bar)
        is_timed = any(match_time(cell.strip()) for cell in cells)
        return SourceError(
            f"{file}: the lines below its header do not read as bars; one is {bar[:80]!r}.",
            "a time such as 2020-04-23 15:00, 2020-04-23 11:00-04:00 or 1587654000, and plain numbers",
            "prices without signs and units"
            if is_timed
            else "years of four digits: in 20-10-22 or 22-Oct-20, nobody can know the year"
            if any(map(has_short_year, cells))
            else "the time in UTC or with its offset: letters such as EDT or CST stand for several zones",
        )
    words = {**{name: (name,) for name in PRICES}, "close": ("close", "last", "latest")}
    pairs = [f"{name}={_holding(header, words[name]) or 'NAME'}" for name in PRICES]
    named = f"--time-column {quoted(time)} --columns {quoted(','.join(pairs))}"
    return SourceError(
        f"{file}: its header names no {', '.join(missing) or 'time'}; it has {', '.join(header)}.",
        "a time column, and open, high, low, close",
        f"{named}, with the names of the file" if "NAME" in named else named,
    )


def _holding(header: Sequence[str], words: Sequence[str]) -> str | None:
    """Return the first cell of a header that is, or else begins with, or holds, one of some words."""
    cells = [cell for cell in header if "," not in cell]
    for pattern in (r"{}", r"{}_.*", r".*{}.*"):
        for word in words:
            for cell in cells:
                if re.fullmatch(pattern.format(word), clean_name(cell)):
                    return cell
    return None
