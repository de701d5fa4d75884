"""What columns of bars are called, by those who write such files and by the user.

Enters: names as they stand in a header; `--time-column`, `--columns`, `--drop`. Leaves: the names that stoker uses.
Costs nothing; pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.display import quoted
from stoker.errors import InputError, SourceError

_NEEDED = ("open", "high", "low", "close")
TIME_NAMES = (
    "open_time", "opentime", "datetime", "date_time", "timestamp", "gmt_time", "utc_time", "local_time", "date", "time",
    "unix", "unix_timestamp", "dt", "trading_date",
)  # fmt: skip
"""Names of open times; where a header has several, the first of these whose cells read as times is taken."""
TICKER_NAMES = (
    "ticker",
    "symbol",
    "pair",
    "instrument",
    "sym",
    "tic",
    "name",
    "stock",
    "asset",
    "code",
)
# Known at the open, and no news: they would be features that only count the days.
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
_STEMS = ("open", "high", "low", "close", "adj_close", "volume", "adjclose", "adjusted")
_ADJUSTED = re.compile(r"(?:.*_)?adj(?:usted)?(?:_.*|open|high|low|close|volume)?")


def clean_name(cell: str) -> str:
    """Return a name as stoker writes it: lower case, words joined by underscores, known names as their own."""
    name = re.sub(r"[^0-9a-z]+", "_", cell.strip().strip("<>\"'").lower()).strip("_")
    return _ALIASES.get(name, name)


def split_ticker(name: str) -> tuple[str, str]:
    """Return "close" and "aapl" for "close_aapl" and for "aapl_close"; the name and "" for others."""
    for stem in sorted(_STEMS, key=len, reverse=True):
        if name == stem:
            return stem, ""
        if name.startswith(f"{stem}_") and name not in NO_FEATURES and name != "close_adj":
            return stem, name[len(stem) + 1 :]
        if name.endswith(f"_{stem}") and not is_adjusted(name[: -len(stem) - 1]):
            return stem, name[: -len(stem) - 1]
    return name, ""


def is_adjusted(name: str) -> bool:
    """Tell whether a column is made anew whenever a dividend is paid or a share is split: it looks ahead."""
    return _ADJUSTED.fullmatch(name) is not None or name.endswith("_adj")


def is_close_stamp(name: str | None) -> bool:
    """Tell whether a column is called the time at which a bar ends."""
    return name in ("close_time", "closetime", "end", "end_time", "bar_end", "time_close")


@dataclass(frozen=True)
class Naming:
    """What the user says about the columns of his files.

    Attributes:
        time_column: Name of the time column, or two names joined by "+"; None finds it.
        columns: Our name to theirs, such as ("open", "Erster").
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
        # A column that the user did not choose for a name gives way to the one that he did.
        return [
            f"{name}_2" if name in taken and cell not in given else name
            for name, cell in zip(cleaned, plain, strict=True)
        ]


def unknown_header(file: str, header: Sequence[str], naming: Naming) -> SourceError:
    """Return the error for a header that names no prices: positions are not trusted under names."""
    if naming.is_asked and not header:
        return SourceError(
            f"{file} has no header with the columns that --time-column and --columns name.",
            "names that stand in the first lines of the file",
            "leave --time-column and --columns out, or use the names of the file",
        )
    names = {clean_name(cell) for cell in header}
    missing = [name for name in _NEEDED if name not in names]
    time = next(
        (cell for cell in header if clean_name(cell) in TIME_NAMES), header[0] if header else "NAME"
    )
    return SourceError(
        f"{file}: its header names no {', '.join(missing) or 'time'}; it has {', '.join(header)}.",
        "a time column, and open, high, low, close",
        f"--time-column {quoted(time)} --columns open=NAME,high=NAME,low=NAME,close=NAME, with the names of the file",
    )
