"""Files of bars, read in bulk, checked line by line where a line is not plain.

Enters: CSV in the dialects of `docs/bars.md`, plain or gzipped, Parquet or Feather. Leaves: `Bars`: open times in
nanoseconds, one float64 array per column, and a `Refusal` for every line that was not taken.
Costs: about 0.4 s and 150 bytes of memory per row for 1,000,000 rows on 2 cores.

Arrow reads the whole file. Only the lines it cannot read, or whose numbers are not finite, go to
`dialects.parse_line`, which decides; `careful=True` sends every line there, and
tests hold the two equal. Nothing is repaired or guessed: a line is a bar, or it is refused with
its number and the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from stoker.errors import Refusal, SourceError, require_file
from stoker.sources.bars.dialects import (
    PRICES,
    VOLUMES,
    Dialect,
    Naming,
    ParsedLine,
    find_dialect,
    is_incomplete,
    parse_line,
)
from stoker.sources.bars.text import find_text
from stoker.sources.tables.layout import file_kind
from stoker.sources.times import DAY_NS, EARLIEST_NS, LATEST_NS, SECOND_NS, parse_times, to_utc
from stoker.store.fields import Array

_HEADER, _BLANK, OTHER_SYMBOLS = "header lines", "blank lines", "lines of other symbols"
_ABOVE = "lines above the header"
_NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"


@dataclass(frozen=True)
class Bars:
    """The bars of one symbol and timeframe, oldest first.

    Attributes:
        time: `(n,)` int64 open times, nanoseconds, strictly rising.
        columns: Name to `(n,)` float64; open, high, low, close first, then what the file has.
        lines: `(n,)` int64, the 1-based line of each bar; its 0-based row in Parquet and Feather, which have no lines.
        file: As the user named it.
        refused: Every line that is not among the bars, and why.
        notes: Choices made while reading, in words for the user.
        ignored: Reason to number of lines that were never meant as bars of this symbol.
        num_lines: Lines, or rows, of the file.
        is_close: The times are those of the closes.
        unit: What `lines` counts: "line" or "row".
    """

    time: Array
    columns: dict[str, Array]
    lines: Array
    file: str
    refused: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ignored: dict[str, int] = field(default_factory=dict)
    num_lines: int = 0
    is_close: bool = False
    unit: str = "line"

    def __len__(self) -> int:
        """Return the number of bars, not of lines."""
        return len(self.time)

    def take(self, rows: Array) -> Bars:
        """Return the bars at `rows`, an index or a mask; refusals and notes stay."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return replace(self, time=self.time[rows], columns=columns, lines=self.lines[rows])


def read_bars(
    path: str | Path,
    *,
    day_first: bool | None = None,
    tz: str | None = None,
    check_prices: bool = True,
    sort: bool = False,
    careful: bool = False,
    naming: Naming | None = None,
    decimal: str | None = None,
) -> Bars:
    """Read one file of bars. Blocks; safe in threads and processes.

    Args:
        path: CSV, CSV.GZ, Parquet or Feather; the dialect is found by looking.
        day_first: How "10/11/2020" reads; None looks for proof in the file.
        tz: IANA zone of the file's clock, to turn its times into UTC. None keeps the clock.
        check_prices: Refuse bars whose prices contradict each other or are not positive.
        sort: Sort a file that is in no order; without it such a file is an error.
        careful: Read line by line: 50 times slower, same answer.
        naming: What the columns are called, where the header does not say it.
        decimal: The decimal sign of quoted numbers such as "1,234"; None finds it.

    Raises:
        SourceError: The file is missing, is no file of bars, is in no order, or most of its
            lines are damaged.
    """
    file = str(path)
    text, cut = find_text(require_file(path, "the file of bars"), decimal)
    dialect = find_dialect(text, file, day_first, naming)
    bars = (_read_careful if careful else _read_bulk)(text, dialect, file)
    bars.refused.extend([Refusal(file, None, cut)] if cut else [])
    bars.notes.extend(f"{file}: {note}" for note in dialect.left_out)
    bars = replace(bars, is_close=dialect.is_close)
    if file_kind(Path(path)) in ("parquet", "arrow"):
        bars = _in_rows(bars)
    bars = _refuse_columns(bars, text, dialect)
    # More refused than read is not a damaged file of bars but a misread one.
    lines = [refusal for refusal in bars.refused if refusal.line is not None]
    if len(lines) > max(len(bars), 1):
        shown = "; ".join(str(refusal) for refusal in lines[:3])
        raise SourceError(
            f"{bars.file}: {len(lines)} {bars.unit}s do not read as bars, {len(bars)} do. {shown}",
            "a file of bars in one format",
            "see docs/bars.md for the formats",
        )
    if tz is not None:
        if dialect.aware:
            raise SourceError(
                f"{file}: a time zone {tz!r} was given, but its times carry their own offset.",
                "a time zone for clocks without one",
                "leave --tz out",
            )
        bars = replace(bars, time=to_utc(bars.time, tz))
    if check_prices:
        bars = _refuse_bad_prices(bars)
    bars = _refuse_repeats(_in_order(bars, sort))
    if not dialect.header_line:
        bars.notes.append(f"{file}: no header; columns taken as time, {', '.join(dialect.columns)}")
    return bars


def merge_bars(parts: Sequence[Bars]) -> Bars:
    """Join files of one symbol and timeframe; repeated bars are refused under the names of all files, joined."""
    if len(parts) == 1:
        return parts[0]
    names = [name for name in parts[0].columns if all(name in part.columns for part in parts)]
    joined = Bars(
        np.concatenate([part.time for part in parts]),
        {name: np.concatenate([part.columns[name] for part in parts]) for name in names},
        np.concatenate([part.lines for part in parts]),
        " + ".join(part.file for part in parts),
        [refusal for part in parts for refusal in part.refused],
        [note for part in parts for note in part.notes],
        dict(sum((Counter(part.ignored) for part in parts), Counter())),
        sum(part.num_lines for part in parts),
        unit=parts[0].unit if len({part.unit for part in parts}) == 1 else "line",
    )
    return _refuse_repeats(joined.take(np.argsort(joined.time, kind="stable")))


def _in_rows(bars: Bars) -> Bars:
    """Number the bars of a Parquet or Feather file by rows from 0, without the header that its text was given."""
    refused = [
        refusal if refusal.line is None else replace(refusal, line=refusal.line - 2, unit="row")
        for refusal in bars.refused
    ]
    ignored = {reason: count for reason, count in bars.ignored.items() if reason != _HEADER}
    return replace(
        bars,
        lines=bars.lines - 2,
        refused=refused,
        ignored=ignored,
        num_lines=bars.num_lines - 1,
        unit="row",
    )


def show_time(time_ns: int) -> str:
    """Return "2020-10-15 13:00:00" for nanoseconds since 1970."""
    return str(np.datetime64(int(time_ns), "ns").astype("M8[s]")).replace("T", " ")


def _refuse_columns(bars: Bars, text: bytes, dialect: Dialect) -> Bars:
    """Leave out further columns in which a cell is no number: the column is refused, not its bars."""
    bad = {
        name: np.flatnonzero(np.isnan(values))
        for name, values in bars.columns.items()
        if name not in PRICES and np.isnan(values).any()
    }
    lines = text.split(b"\n") if bad else []
    for name, rows in bad.items():
        line = int(bars.lines[rows[0]])
        raw = lines[line - 1 if bars.unit == "line" else line + 1].decode("utf-8", "replace")
        shown = raw.split(dialect.delimiter)[dialect.names.index(name)].strip()[:40]
        bars.notes.append(
            f"{bars.file}: column {name!r} is left out: {len(rows):,} of {len(bars):,} bars have no number in it, "
            f"such as {shown!r} in {bars.unit} {line}"
        )
    kept = {name: values for name, values in bars.columns.items() if name not in bad}
    return replace(bars, columns=kept)


def _read_careful(text: bytes, dialect: Dialect, file: str) -> Bars:
    """Read every line by `parse_line`."""
    lines = text.split(b"\n")
    parsed = _parse_lines(lines, range(1, len(lines) + 1), dialect)
    return replace(_assemble({}, dialect, file, parsed), num_lines=len(lines) - (not lines[-1]))


class _Parsed(NamedTuple):
    """Results of `parse_line`, by the numbers of the lines."""

    bars: dict[int, ParsedLine]
    faults: dict[int, str]
    ignored: Counter[str]  # reason to number of lines that were never meant as bars


def _parse_lines(lines: Sequence[bytes], numbers: Sequence[int], dialect: Dialect) -> _Parsed:
    parsed = _Parsed({}, {}, Counter())
    for number in numbers:
        line = lines[number - 1].decode("utf-8", "replace")
        found = parse_line(line, dialect)
        if dialect.header_first <= number <= dialect.header_line:
            parsed.ignored[_HEADER] += 1
        elif found is None:
            if number < len(lines) or line:  # there is no line after the last newline
                parsed.ignored[OTHER_SYMBOLS if line.strip(" \t") else _BLANK] += 1
        elif isinstance(found, str) and number < dialect.header_first:
            parsed.ignored[_ABOVE] += 1
        elif isinstance(found, str):
            parsed.faults[number] = found
        elif number < dialect.header_line:
            parsed.faults[number] = "a bar above the header"
        else:
            parsed.bars[number] = found
    return parsed


def _assemble(bulk: dict[str, Array], dialect: Dialect, file: str, parsed: _Parsed) -> Bars:
    """Join the arrays read in bulk with the lines read one by one, in the file's order."""
    numbers = np.fromiter(parsed.bars, np.int64, len(parsed.bars))
    times = np.fromiter((bar.time_ns for bar in parsed.bars.values()), np.int64, len(numbers))
    rows = np.array([bar.values for bar in parsed.bars.values()], np.float64)
    rows = rows.reshape(len(numbers), len(dialect.columns))
    columns: dict[str, Array] = {":time": times, ":line": numbers}
    columns |= {name: rows[:, place] for place, name in enumerate(dialect.columns)}
    if bulk and not parsed.bars:
        columns = bulk
    elif bulk:
        order = np.argsort(np.concatenate([bulk[":line"], numbers]), kind="stable")
        columns = {
            name: np.concatenate([bulk[name], values])[order] for name, values in columns.items()
        }
    times, numbers = columns.pop(":time"), columns.pop(":line")
    refused = [Refusal(file, number, reason) for number, reason in sorted(parsed.faults.items())]
    names = [*PRICES, *(name for name in columns if name not in PRICES)]
    ordered = {name: np.ascontiguousarray(columns[name]) for name in names}
    return Bars(times, ordered, numbers, file, refused, ignored=dict(parsed.ignored))


def _read_bulk(text: bytes, dialect: Dialect, file: str) -> Bars:
    """Read whole columns by Arrow, and the lines that it cannot read one by one."""
    try:
        table, odd = _read_table(text, dialect)
    except pa.ArrowInvalid:  # a line longer than arrow's block: too rare for a fast way
        return _read_careful(text, dialect, file)
    # Without quotes a line is a row, so the lines are counted by the rows; tests hold it.
    numbers = np.arange(1, table.num_rows + len(odd) + 1) + dialect.header_line
    if odd:
        numbers = np.delete(numbers, np.asarray(odd, np.int64) - dialect.header_line - 1)
    num_other, num_lines = 0, table.num_rows + len(odd) + dialect.header_line
    if dialect.ticker_cell is not None:
        own = pc.equal(pc.ascii_trim(table.column(dialect.ticker_cell), " \t"), dialect.ticker)
        mask = own.to_numpy(zero_copy_only=False)
        num_other = int((~mask).sum())
        table, numbers = table.filter(own), numbers[mask]
    times, good = _bulk_times(table, dialect)
    bulk = {}
    for cell in dialect.value_cells:
        values = _to_floats(table.column(cell), dialect.decimal)
        if dialect.names[cell] in PRICES:
            good &= np.isfinite(values)
        elif not np.isfinite(values).all():
            values = np.where(np.isfinite(values), values, np.nan)
        bulk[str(dialect.names[cell])] = values
    if dialect.complete_cell is not None:
        cells: list[str] = table.column(dialect.complete_cell).to_pylist()
        one = replace(dialect, complete_cell=0)
        good &= ~np.array([is_incomplete([cell], one) for cell in cells], bool)
    bulk[":time"], bulk[":line"] = times, numbers
    above = range(1, dialect.header_first)
    doubtful = sorted([*above, *odd, *numbers[~good].tolist()])
    if not good.all():
        bulk = {name: values[good] for name, values in bulk.items()}
    lines = text.split(b"\n") if doubtful else []
    parsed = _parse_lines(lines, doubtful, dialect)
    if dialect.header_line:
        parsed.ignored[_HEADER] += dialect.header_line - dialect.header_first + 1
    if num_other:
        parsed.ignored[OTHER_SYMBOLS] += num_other
    return replace(_assemble(bulk, dialect, file, parsed), num_lines=num_lines)


def _read_table(text: bytes, dialect: Dialect) -> tuple[pa.Table, list[int]]:
    """Return the rows with the right number of cells, and the numbers of the other lines.

    Each try assumes less than the one before: ISO times and floats (arrow parses both
    on all cores; 0.3 s for a million rows), floats beside times as text, all text. Where a line
    has another number of cells, once more on one core, because only then does arrow count lines.
    """
    iso = len(dialect.time_cells) == 1 and not dialect.aware and dialect.day_first is None
    time, number = pa.timestamp("s"), pa.float64()
    tries = [(time, number)] * iso + [(pa.string(), number), (pa.string(), pa.string())]
    for attempt, types in enumerate(tries, 1):
        try:
            table, odd = _arrow_read(text, dialect, *types)
            break
        except pa.ArrowInvalid:
            if attempt == len(tries):
                raise
    if odd:
        table, odd = _arrow_read(text, dialect, *types, threads=False)
    return table, [number for number in odd if number is not None]


def _arrow_read(
    text: bytes, dialect: Dialect, time: pa.DataType, number: pa.DataType, threads: bool = True
) -> tuple[pa.Table, list[int | None]]:
    odd: list[int | None] = []

    def skip(row: arrow_csv.InvalidRow) -> str:
        odd.append(row.number)
        return "skip"

    names = [str(cell) for cell in range(len(dialect.names))]
    types = {name: pa.string() for name in names}
    types |= {names[cell]: number for cell in dialect.value_cells}
    types[names[dialect.time_cells[0]]] = time
    table = arrow_csv.read_csv(
        pa.BufferReader(text),
        read_options=arrow_csv.ReadOptions(
            use_threads=threads, skip_rows=dialect.header_line, column_names=names
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter=dialect.delimiter,
            quote_char=False,
            ignore_empty_lines=False,
            invalid_row_handler=skip,
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types=types,
            check_utf8=False,
            null_values=[""],
            strings_can_be_null=False,
            decimal_point=dialect.decimal,
        ),
    )
    return table, odd


def _bulk_times(table: pa.Table, dialect: Dialect) -> tuple[Array, Array]:
    column = table.column(dialect.time_cells[0])
    if pa.types.is_timestamp(column.type):
        seconds = pc.fill_null(pc.cast(column, pa.int64()), np.iinfo(np.int64).min).to_numpy()
        good = (seconds >= EARLIEST_NS // SECOND_NS) & (seconds < LATEST_NS // SECOND_NS)
        return np.where(good, seconds, 0) * SECOND_NS, good
    if len(dialect.time_cells) == 2:
        column = pc.binary_join_element_wise(column, table.column(dialect.time_cells[1]), " ")
    read = [parse_times(chunk, dialect.day_first, dialect.aware) for chunk in column.chunks]
    if not read:
        return np.zeros(0, np.int64), np.zeros(0, bool)
    return np.concatenate([times for times, _ in read]), np.concatenate([good for _, good in read])


def _to_floats(column: pa.ChunkedArray, decimal: str) -> Array:
    """Return float64, NaN where a cell is no plain number; `parse_line` decides on those."""
    if column.type == pa.string():
        column = pc.ascii_trim(column, " \t")
        column = pc.replace_substring(column, ",", ".") if decimal == "," else column
        plain = pc.match_substring_regex(column, _NUMBER)
        column = pc.if_else(plain, pc.ascii_ltrim(column, "+"), pa.scalar(None, pa.string()))
        column = pc.cast(column, pa.float64())
    return np.asarray(column.to_numpy(), np.float64)


def _refuse_bad_prices(bars: Bars) -> Bars:
    """Refuse impossible bars: their logarithms would be wrong or infinite.

    Raises if most bars are refused for one reason: then the columns are other ones than assumed.
    """
    first, high, low, last = (bars.columns[name] for name in PRICES)
    faults = [
        (np.minimum.reduce([first, high, low, last]) <= 0, "a price is not positive"),
        (high < low, "high is below low"),
        (high < np.maximum(first, last), "high is below open or close"),
        (low > np.minimum(first, last), "low is above open or close"),
    ]
    volumes = [name for name in VOLUMES if name in bars.columns]
    faults += [(bars.columns[name] < 0, f"{name} is negative") for name in volumes]
    bad = np.zeros(len(bars), bool)
    for mask, reason in faults:
        new = np.flatnonzero(mask & ~bad)
        bars.refused.extend(
            Refusal(bars.file, int(bars.lines[row]), reason, bars.unit) for row in new
        )
        bad[new] = True
    bars = bars.take(~bad) if bad.any() else bars
    reasons = Counter(each.reason for each in bars.refused if each.line is not None)
    reason, count = reasons.most_common(1)[0] if reasons else ("", 0)
    if count > max(len(bars), 1):
        raise SourceError(
            f"{bars.file}: {reason} in {count:,} of {count + len(bars):,} bars.",
            "open, high, low and close of bars, each in its column",
            "--columns open=NAME,high=NAME,low=NAME,close=NAME",
        )
    return bars


def _in_order(bars: Bars, sort: bool) -> Bars:
    """Return the bars oldest first. A reversed file is turned round; any other order needs `sort`."""
    steps = np.diff(bars.time)
    if not (steps < 0).any():
        return bars
    if not (steps > 0).any():
        bars.notes.append(f"{bars.file}: newest bar first; turned round")
        return bars.take(np.arange(len(bars))[::-1])
    if sort:
        bars.notes.append(f"{bars.file}: {int((steps < 0).sum())} steps back in time; sorted")
        return bars.take(np.argsort(bars.time, kind="stable"))
    falling = (steps < 0).mean() > 0.5
    row = int(np.argmax(steps > 0 if falling else steps < 0)) + 1
    # A clock that is set back at the end of summer: by an hour, on a Sunday.
    is_sunday = (int(bars.time[row]) // DAY_NS + 3) % 7 == 6
    an_hour = 3600 * SECOND_NS - int(np.median(np.abs(steps)))
    is_set_back = is_sunday and abs(int(steps[row - 1])) == an_hour
    sort_it = f"--sort (sort=True), or mend that {bars.unit}"
    raise SourceError(
        f"{bars.file}: time goes {'forwards' if falling else 'backwards'} at {bars.unit} {bars.lines[row]}, "
        f"from {show_time(bars.time[row - 1])} to {show_time(bars.time[row])}.",
        "bars from oldest to newest, or all from newest to oldest",
        f"the zone of a clock that is set back then, such as --tz Europe/Berlin; or {sort_it}"
        if is_set_back
        else sort_it,
    )


def _refuse_repeats(bars: Bars) -> Bars:
    """Keep one bar per time: copies are refused; of different bars for one time, all are."""
    same = np.diff(bars.time) == 0
    if not same.any():
        return bars
    bad = np.zeros(len(bars), bool)
    starts = np.flatnonzero(same & ~np.concatenate([[False], same[:-1]]))
    for start in map(int, starts):
        stop = start + 1
        while stop < len(bars) and bars.time[stop] == bars.time[start]:
            stop += 1
        group = slice(start, stop)
        alike = all((values[group] == values[start]).all() for values in bars.columns.values())
        when = show_time(bars.time[start])
        reason = (
            f"a copy of the bar of {when} in {bars.unit} {bars.lines[start]}"
            if alike
            else f"one of {stop - start} different bars of {when}; none is taken"
        )
        for row in range(start + alike, stop):
            bad[row] = True
            bars.refused.append(Refusal(bars.file, int(bars.lines[row]), reason, bars.unit))
    return bars.take(~bad)
