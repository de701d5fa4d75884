"""Which files hold bars, of which symbol and timeframe, with which columns.

Enters: files, labels and folders as the user named them. Leaves: `BarFile`s, and per file what
its first lines tell. Costs: 128 KiB read per file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.display import quoted
from stoker.errors import SourceError, require_file
from stoker.sources.bars.dialects import PRICES, find_dialect
from stoker.sources.bars.reading import read_head
from stoker.sources.bars.timeframes import name_file, parse_timeframe

_SUFFIXES = (".csv", ".csv.gz", ".txt", ".txt.gz", ".tsv", ".tsv.gz")


@dataclass(frozen=True)
class BarFile:
    """A file with the symbol and timeframe it holds."""

    path: Path
    symbol: str
    timeframe: str

    @classmethod
    def parse(cls, text: str | Path) -> BarFile:
        """Read "path/EURUSD_M5.csv", or "EURUSD:M5=path/any-name.csv" where the name says nothing."""
        label, equals, path = str(text).partition("=")
        symbol, colon, timeframe = label.partition(":")
        if equals and colon:
            return cls(Path(path), symbol.strip().upper(), parse_timeframe(timeframe))
        found_symbol, found_timeframe = name_file(Path(text))
        if found_symbol is None or found_timeframe is None:
            raise SourceError(
                f"{str(text)!r} does not name a symbol and a timeframe.",
                "names such as EURUSD_M5.csv, EURUSD-H1.csv.gz, EURUSD15.csv",
                quoted(f"EURUSD:M5={text}"),
            )
        return cls(Path(text), found_symbol, found_timeframe)


@dataclass(frozen=True)
class Head:
    """What the first lines of a file tell."""

    extras: tuple[str, ...]
    num_rows: int


def look(path: Path, day_first: bool | None) -> Head:
    """Columns and estimated rows from the first 128 KiB."""
    text, num_bytes = read_head(require_file(path, "the file of bars"))
    # The order of day and month does not change the columns, and the head may not show it.
    dialect = find_dialect(text, str(path), day_first=bool(day_first))
    per_line = len(text) / max(1, text.count(b"\n"))
    extras = tuple(name for name in dialect.columns if name not in PRICES)
    # A tenth more: a head may compress better, or have longer lines, than the rest.
    return Head(extras, int(1.1 * num_bytes / per_line) + 2)


def find_files(paths: Sequence[str | Path]) -> tuple[list[BarFile], list[str]]:
    """Files as named, those in folders whose names say what they hold, and notes on the others."""
    found, notes = [], []
    for path in paths:
        if not Path(path).is_dir():
            file = BarFile.parse(path)
            require_file(file.path, "the file of bars")
            found.append(file)
            continue
        for inside in sorted(Path(path).iterdir()):
            if inside.name.lower().endswith(_SUFFIXES) and inside.is_file():
                if None in name_file(inside):
                    notes.append(f"{inside}: its name says no symbol and timeframe; not used")
                else:
                    found.append(BarFile.parse(inside))
    return found, notes


def shared_extras(
    grouped: Mapping[str, Mapping[str, list[Path]]], heads: Mapping[Path, Head]
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Further columns per timeframe that every file has: all parts need the same features."""
    shared: dict[str, tuple[str, ...]] = {}
    notes = []
    for name in next(iter(grouped.values())):
        paths = [path for files in grouped.values() for path in files[name]]
        first = heads[paths[0]].extras
        shared[name] = tuple(x for x in first if all(x in heads[path].extras for path in paths))
        every = {extra for path in paths for extra in heads[path].extras}
        if every - set(shared[name]):
            left = ", ".join(sorted(every - set(shared[name])))
            notes.append(f"{name}: not in every file, so left out: {left}")
    return shared, notes
