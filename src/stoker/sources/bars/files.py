"""Which files hold bars, of which symbols and timeframe, with which columns.

Enters: files, labels and folders as the user named them. Leaves: `BarFile`s, one for each symbol of a file, and per
file what its first lines tell. Costs: 128 KiB read per file; a file with a column of symbols is read whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from stoker.display import command, quoted
from stoker.errors import SourceError, StokerError, require_file
from stoker.sources.bars.dialects import PRICES, Dialect, Naming, find_dialect
from stoker.sources.bars.reading import read_bars
from stoker.sources.bars.text import find_text, read_head
from stoker.sources.bars.timeframes import (
    BY_DURATION,
    DEFAULT_WINDOWS,
    name_file,
    observed_spacing,
    parse_timeframe,
)

_SUFFIXES = (
    ".csv", ".csv.gz", ".txt", ".txt.gz", ".tsv", ".tsv.gz", ".parquet", ".pq", ".feather", ".arrow",
)  # fmt: skip
_MOST_SYMBOLS = 10_000


@dataclass(frozen=True)
class BarFile:
    """A file, its symbol (in upper case) and timeframe; `ticker` is the symbol as a file of several writes it."""

    path: Path
    symbol: str
    timeframe: str
    ticker: str | None = None

    @classmethod
    def parse(cls, text: str | Path) -> BarFile:
        """Read "path/EURUSD_M5.csv", or "EURUSD:M5=path/any-name.csv" where the name says nothing."""
        label, equals, path = str(text).partition("=")
        symbol, colon, timeframe = label.partition(":")
        if equals and colon:
            return cls(Path(path), symbol.strip().upper(), parse_timeframe(timeframe))
        found_symbol, found_timeframe = name_file(Path(text))
        if found_symbol is None or found_timeframe is None:
            require_file(text, "bars")
            raise SourceError(
                f"{str(text)!r} does not name a symbol and a timeframe.",
                "names such as EURUSD_M5.csv, EURUSD-H1.csv.gz, EURUSD15.csv",
                quoted(guessed_label(Path(text)) or f"EURUSD:M5={text}"),
            )
        return cls(Path(text), found_symbol, found_timeframe)


@dataclass(frozen=True)
class Head:
    """Facts from the first lines of a file: how it is written, and the estimated number of rows."""

    dialect: Dialect
    num_rows: int

    @property
    def extras(self) -> tuple[str, ...]:
        """The columns besides the prices."""
        return tuple(name for name in self.dialect.columns if name not in PRICES)


def look(path: Path, naming: Naming, decimal: str | None, ticker: str | None = None) -> Head:
    """Read the first 128 KiB of a file; if it holds several symbols, `ticker` is the one to read."""
    text, num_bytes = read_head(require_file(path, "the file of bars"), decimal)
    # The order of day and month does not change the columns, and the head may not show it.
    asked = replace(naming, ticker=ticker)
    dialect = find_dialect(text, str(path), day_first=True, naming=asked)
    per_line = len(text) / max(1, text.count(b"\n"))
    # A tenth more: a head may compress better, or have longer lines, than the rest.
    return Head(dialect, int(1.1 * num_bytes / per_line) + 2)


def split_symbols(
    files: Sequence[BarFile], naming: Naming, decimal: str | None
) -> tuple[list[BarFile], list[str]]:
    """Return a `BarFile` for each symbol, where a file holds several: in columns, or in a column of symbols."""
    found, notes = [], []
    for file in files:
        dialect = look(file.path, naming, decimal).dialect
        tickers: Sequence[str] = dialect.tickers
        if dialect.symbol_cell is not None and not tickers:
            whole, _ = find_text(file.path, decimal)
            cells = (line.split(dialect.delimiter.encode()) for line in whole.split(b"\n"))
            names = {
                row[dialect.symbol_cell].strip().decode("utf-8", "replace")
                for number, row in enumerate(cells, 1)
                if number > dialect.header_line and len(row) == len(dialect.names)
            }
            tickers = sorted(names - {""})
        if len(tickers) < 2:
            found.append(file)
            continue
        if len(tickers) > _MOST_SYMBOLS:
            raise SourceError(
                f"{file.path} holds {len(tickers):,} symbols.",
                f"at most {_MOST_SYMBOLS:,}",
                "split the file",
            )
        shown = ", ".join(tickers[:5]) + (", ..." if len(tickers) > 5 else "")
        notes.append(
            f"{file.path}: {len(tickers)} symbols in one file ({shown}), each packed by itself"
        )
        found += [replace(file, symbol=ticker.upper(), ticker=ticker) for ticker in tickers]
    return found, notes


def find_files(paths: Sequence[str | Path]) -> tuple[list[BarFile], list[str]]:
    """Return the named files, files in folders whose names give symbol and timeframe, and notes on the others."""
    found, notes = [], []
    for path in paths:
        if not Path(path).is_dir():
            file = BarFile.parse(path)
            require_file(file.path, "the file of bars")
            found.append(file)
            continue
        for inside in _files_in(Path(path)):
            if None in name_file(inside):
                notes.append(f"{inside}: its name says no symbol and timeframe; ignored")
            else:
                found.append(BarFile.parse(inside))
    return found, notes


def _files_in(folder: Path) -> list[Path]:
    """Return the files of a folder that may hold bars, by their endings."""
    named = (path for path in folder.iterdir() if path.name.lower().endswith(_SUFFIXES))
    return sorted(path for path in named if path.is_file())


def unnamed_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files of folders that may hold bars, but whose names give no symbol and timeframe."""
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    return [path for folder in folders for path in _files_in(folder) if None in name_file(path)]


def shared_extras(
    grouped: Mapping[str, Mapping[str, Sequence[BarFile]]], heads: Mapping[BarFile, Head]
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return per timeframe the further columns that every file has, because parts need equal features; and notes."""
    shared: dict[str, tuple[str, ...]] = {}
    notes = []
    for name in next(iter(grouped.values())):
        files = [file for by_name in grouped.values() for file in by_name[name]]
        extras = [heads[file].extras for file in files]
        shared[name] = tuple(x for x in extras[0] if all(x in each for each in extras))
        if left := sorted({*chain(*extras)} - {*shared[name]}):
            notes.append(f"{name}: not in every file, so left out: {', '.join(left)}")
    return shared, notes


def holds_bars(path: Path) -> bool:
    """Return whether a path is a file or a folder of bars, by file names and by columns."""
    label, equals, file = str(path).partition("=")
    if equals and ":" in label and not path.exists():
        return Path(file).is_file()
    one = [path] if path.is_file() and path.name.lower().endswith(_SUFFIXES) else []
    files = _files_in(path) if path.is_dir() else one
    named = [file for file in files if None not in name_file(file)]
    return bool(named) and all(map(_reads_as_bars, named[:3]))


def _reads_as_bars(path: Path) -> bool:
    try:
        look(path, Naming(), None)
    except StokerError:
        return False
    return True


def bars_hint(paths: Sequence[Path]) -> str:
    """Return a hint how to inspect a table as bars, if its header has their names; else ""."""
    label = guessed_label(paths[0]) if len(paths) == 1 else ""
    timeframe = label.partition("=")[0].rpartition(":")[2]
    look_at_it = command("stoker", "inspect", label)
    return f"these are bars of {timeframe}: to see their windows, {look_at_it}" if label else ""


def guessed_label(path: Path) -> str:
    """Return "SYMBOL:TF=path" for a file of bars, the timeframe by the step between bars; "" for other files."""
    if not path.name.lower().endswith(_SUFFIXES):
        return ""
    try:
        if not _reads_as_bars(path):  # by its first lines: most tables are not read again
            return ""
        bars = read_bars(path, day_first=True)
    except StokerError:
        return ""
    timeframe = BY_DURATION.get(observed_spacing(bars.time) or 0)
    stem = path.name.partition(".")[0].upper()
    symbol = name_file(path)[0] or (stem if stem.isalnum() else "SYMBOL")
    return f"{symbol}:{timeframe}={path}" if timeframe else ""


def fitting_windows(
    paths: Sequence[str | Path], naming: Naming, decimal: str | None
) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return windows and a horizon to inspect files with: the defaults, each at most a quarter of the bars."""
    files, _ = find_files(paths)
    by_symbol: dict[str, set[str]] = {}
    for file in files:
        by_symbol.setdefault(file.symbol, set()).add(file.timeframe)
    shared = set.intersection(*by_symbol.values()) if by_symbol else set()
    usual = dict(DEFAULT_WINDOWS)
    windows: dict[str, int] = {}
    horizon = 36
    for file in files:
        if file.timeframe in shared:
            most = max(1, look(file.path, naming, decimal, file.ticker).num_rows // 4)
            known = windows.get(file.timeframe, usual.get(file.timeframe, 96))
            windows[file.timeframe], horizon = min(known, most), min(horizon, most)
    return tuple(windows.items()) or DEFAULT_WINDOWS, horizon
