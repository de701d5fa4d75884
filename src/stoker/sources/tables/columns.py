"""Kinds of table columns: how they are detected, and the numbers that they become.

Enters: Arrow columns, of text or typed. Leaves: `Column`s, plain values that travel in the manifest and in
checkpoints, and their numbers: the same for packing and for prediction. Costs: about 0.1 µs per cell of plain numbers.

| kind | given by | becomes |
|---|---|---|
| `number` | numbers, durations, times of day | itself; whole numbers above 2**24 make the table float64 |
| `bool` | true/false, yes/no, t/f, y/n | 0 or 1 |
| `one-hot` | up to 16 different texts | a column per text, `NAME=TEXT`; all 0 for any other cell |
| `codes` | up to 1,000 texts that repeat | 1, 2, ... in the order of `values`; 0 for any other cell |
| `date` | dates and times | days since 1970, month, weekday, second of the day |
| `seconds` | a date, where the user says so | seconds since 1970, as float64 |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stoker.display import nearest, quoted
from stoker.errors import InputError
from stoker.sources.tables.layout import NULLS, parse_number
from stoker.sources.times import (
    DAY_NS,
    EARLIEST_NS,
    FIRST_YEAR,
    LAST_YEAR,
    LATEST_NS,
    SECOND_NS,
    has_offset,
    has_short_year,
    is_slashed,
    match_time,
    parse_times,
)
from stoker.store.fields import Array

ONE_HOT_VALUES = 16
CODE_VALUES = 1000
MOST_CLASSES = 10_000
FEW_CLASSES = 20  # whole-number targets with at most this many different values are classes
KINDS = (
    "number", "float64", "bool", "category", "one-hot", "codes", "date", "day-first", "month-first",
    "seconds",
)  # fmt: skip
"""What may be typed after `--dtype NAME=`."""
_WORDS = ({"true": 1, "false": 0}, {"yes": 1, "no": 0}, {"t": 1, "f": 0}, {"y": 1, "n": 0})
_UNITS = {"s": SECOND_NS, "ms": 1_000_000, "us": 1000, "ns": 1}
_NULLS, _NULL = pa.array(NULLS), pa.scalar(None, pa.string())
_SHOWN_TEXT = 40
_NUMBER_SHARE = 0.8
"""A column with at least this share of numbers is numeric, and its texts are refused row by row."""
_YEAR_MONTH = "^([0-9]{4}-[0-9]{2})$"


class Fault(NamedTuple):
    """Why a row is refused. `kind` is the reason without the cell."""

    column: str
    reason: str
    kind: str

    @classmethod
    def of(cls, column: str, cell: object, why: str) -> Fault:
        """Return the fault of a cell that is not what its column holds."""
        reason = f"column {column!r} holds {str(cell)[:_SHOWN_TEXT]!r}, {why}"
        return cls(column, reason, f"column {column!r}: {why}")


@dataclass(frozen=True)
class Column:
    """What one column of the files becomes."""

    name: str  # in the files, without spaces around it
    kind: str  # see the table in the module's text
    values: tuple[str, ...] = ()  # the texts of `one-hot` and `codes`, found in the training rows
    is_wide: bool = False  # float32 would lose values
    day_first: bool | None = None  # how "10/11/2020" reads; None where no such date is expected
    is_aware: bool = False  # dates carry an offset from UTC
    has_clock: bool = False  # a `date` has a time of day
    has_flag: bool = False  # a further column says where the value is missing
    # columns of `features` that it would give and that the user dropped
    without: tuple[str, ...] = ()
    is_full: bool = False  # for texts: no row lacks a value
    words: tuple[str, ...] = ()  # texts that are values here, though `NULLS` has them

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the columns of `features` that it becomes."""
        return tuple(name for name in self.all_outputs if name not in self.without)

    @property
    def all_outputs(self) -> tuple[str, ...]:
        """Names of its columns of `features`, with those that the user dropped."""
        made: tuple[str, ...] = (self.name,)
        if self.kind == "one-hot":
            made = tuple(f"{self.name}={value}" for value in self.values)
        elif self.kind == "date":
            parts = ("days", "month", "weekday", "seconds")[: 4 if self.has_clock else 3]
            made = tuple(f"{self.name}_{part}" for part in parts)
        return (*made, f"{self.name}_missing") if self.has_flag else made

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for the manifest and for checkpoints."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Column:
        """Return the column that `to_json` wrote."""
        lists = {name: tuple(each) for name, each in data.items() if isinstance(each, list | tuple)}
        return cls(**{**data, **lists})


_SIGNS = "%‰€$£¥° "
_SIGNED = re.compile(rf"(?=.*[{_SIGNS.strip()}])[{_SIGNS}]*[-+]?\d[\d.,' ]*[{_SIGNS}]*")


def are_signed_numbers(texts: Sequence[str]) -> bool:
    """Return whether texts are numbers with a sign or unit, such as "76,1 %" and "$ 5"; one text may be another."""
    return len(texts) > 2 and sum(bool(_SIGNED.fullmatch(text)) for text in texts) >= len(texts) - 1


class Unusable(NamedTuple):
    """A column that cannot be packed as it is."""

    name: str
    what: str
    option: str = "drop"


# -- telling the kind --------------------------------------------------------------------------------------------------


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a type is text, also where it is stored as a dictionary."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def as_numpy(column: Any) -> Array:
    """Return an Arrow column as a numpy array, NaN where a number is missing."""
    return np.asarray(column.to_numpy(zero_copy_only=False))


def plain(column: Any) -> Any:
    """Return the column without dictionary, as one array; text as plain strings."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if is_text(column.type) and column.type != pa.string():
        column = column.cast(pa.string())
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def trimmed(column: Any, kept: Sequence[str] = ()) -> Any:
    """Return text without spaces around it, and null where the value is missing; those `kept` are values."""
    text = pc.utf8_trim_whitespace(column)
    nulls = pa.array([word for word in NULLS if word not in kept]) if kept else _NULLS
    return pc.if_else(pc.is_in(text, value_set=nulls), _NULL, text)


def as_text(column: Any, kept: Sequence[str] = ()) -> Any:
    """Return any column as trimmed text with nulls, as `trimmed`: numbers and booleans as they are written."""
    column = plain(column)
    return trimmed(column if is_text(column.type) else column.cast(pa.string()), kept)


def find_kind(name: str, sample: Any, decimal: str, asked: str | None) -> Column | Unusable:
    """Decide what a column becomes, from a sample of its rows.

    `asked` is the kind that the user gave, one of `KINDS`; None decides by the values.
    """
    refused = refuse_type(name, sample.type)
    if refused is not None:
        return refused
    column = plain(sample)
    if asked in ("category", "one-hot", "codes", "bool"):
        return Column(name, asked)
    if asked in ("number", "float64"):
        return _number_column(name, column, decimal, asked == "float64")
    if asked or pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return _date_column(name, column, asked or "date")
    if pa.types.is_boolean(column.type):
        return Column(name, "bool")
    if is_text(column.type):
        return _find_text_kind(name, column, decimal)
    return _number_column(name, column, decimal)


def refuse_type(name: str, kind: pa.DataType) -> Unusable | None:
    """Return why no column of this type can be packed; None where its values decide."""
    types = pa.types
    inner = kind.value_type if types.is_dictionary(kind) else kind
    tests = (_is_number, types.is_boolean, types.is_temporal, is_text)
    known = any(is_one(inner) for is_one in tests)
    if types.is_null(inner):
        return Unusable(name, "holds no value at all")
    if types.is_struct(inner) and any(types.is_binary(part.type) for part in inner):
        what = "holds files as bytes: pictures are packed from a folder, by stoker pack images"
        return Unusable(name, what)
    if not known or types.is_interval(inner):
        what = f"holds {inner}, which is no number, text, date or boolean"
        if types.is_nested(inner) and hasattr(inner, "value_type"):
            what += "; in Python, stoker.pack_from(pyarrow.parquet.read_table(FILE).to_pylist(), OUT) takes lists"
        return Unusable(name, what)
    return None


def _find_text_kind(name: str, column: Any, decimal: str) -> Column | Unusable:
    with suppress(pa.ArrowInvalid):  # the usual case: only plain numbers
        if pc.any(pc.is_finite(column.cast(pa.float64()))).as_py():
            return _number_column(name, column, decimal)
    filled = trimmed(column).drop_null()
    if not len(filled):
        return Unusable(name, "holds no value in the rows that were looked at")
    try:
        filled.cast(pa.float64())
        return _number_column(name, column, decimal)
    except pa.ArrowInvalid:
        counted = filled.value_counts()
    texts: list[str] = counted.field("values").to_pylist()
    counts = as_numpy(counted.field("counts"))
    total = len(filled)
    numeric = np.array([parse_number(text, decimal) is not None for text in texts])
    num_numbers = int(counts[numeric].sum())
    # Mostly numbers; or few rows, more than half of them numbers.
    is_short = len(texts) <= ONE_HOT_VALUES and 2 * len(texts) > total
    if num_numbers >= _NUMBER_SHARE * total or (2 * num_numbers > total and is_short):
        return _number_column(name, column, decimal)
    if 2 * num_numbers > total and len(texts) > ONE_HOT_VALUES:
        word = texts[int(np.argmin(numeric))][:_SHOWN_TEXT]
        shown = f"{word!r} in {total - num_numbers:,} of {total:,} rows"
        return Unusable(name, f"holds numbers, and texts such as {shown}")
    lowered = {text.lower() for text in texts}
    if any(lowered <= set(words) for words in _WORDS):
        return Column(name, "bool")
    told = [text for text in texts[:200] if not text.isdecimal()]
    matches = filter(None, map(match_time, _with_days(pa.array(told, pa.string())).to_pylist()))
    if 2 * sum("epoch" not in match.re.groupindex for match in matches) > len(texts[:200]):
        return _date_column(name, column, "date")
    return judge_texts(name, len(texts), total, texts[0])


def judge_texts(name: str, num_values: int, num_rows: int, example: str) -> Column | Unusable:
    """Decide between one-hot and codes by the number of different texts."""
    differs = num_rows >= 10 and num_values > 0.9 * num_rows
    if num_values <= ONE_HOT_VALUES and not differs:
        return Column(name, "one-hot")
    if num_values <= CODE_VALUES and not differs and 2 * num_values <= num_rows:
        return Column(name, "codes")
    shown = f"{example[:_SHOWN_TEXT]!r}"
    if has_short_year(example):
        shown += " (dates need years of four digits)"
    if _SIGNED.fullmatch(example):
        shown += f" (numbers are read without signs and units: {example.strip(_SIGNS)!r})"
    return Unusable(
        name,
        f"holds text that is different in {num_values:,} of {num_rows:,} rows, such as {shown}",
    )


def _with_days(texts: Any) -> Any:
    """Return texts with "1949-01" replaced by "1949-01-01"."""
    return pc.replace_substring_regex(texts, _YEAR_MONTH, r"\1-01")


def _number_column(
    name: str, column: Any, decimal: str, is_wide: bool = False
) -> Column | Unusable:
    values, bad = numbers(column, name, decimal)
    too_long = len(bad) if pa.types.is_integer(column.type) else 0
    if is_text(column.type):
        is_long = pc.match_substring_regex(trimmed(column), "^[+-]?[0-9]{16,}$")
        too_long = pc.sum(is_long).as_py() or 0
    if 2 * too_long > len(column):
        return Unusable(name, "holds whole numbers above 2**53, which no float holds exactly")
    return Column(name, "number", is_wide=is_wide or needs_float64(values))


def needs_float64(values: Array) -> bool:
    """Return whether float32 would lose values: inexact whole numbers, or many values that become equal.

    Values that are not finite, or from 2**53 on, are left to the quality gate: float64 is inexact there too.
    """
    values = values[np.abs(values) < 1 << 53]
    if not len(values):
        return False
    narrow = values.astype(np.float32)
    if bool((values == np.rint(values)).all()):
        return bool((narrow != values).any())
    different = len(np.unique(values))
    return bool(different >= 10 and len(np.unique(narrow)) < 0.99 * different)


def _date_column(name: str, column: Any, asked: str) -> Column | Unusable:
    made = Column(name, "seconds" if asked == "seconds" else "date", is_wide=asked == "seconds")
    if not is_text(column.type):
        if pa.types.is_timestamp(column.type):
            made = replace(made, is_aware=column.type.tz is not None)
        elif not pa.types.is_date(column.type):
            # Whole numbers: seconds, ms, µs or ns by their digits.
            column = column.cast(pa.string())
    if is_text(column.type):
        texts = _with_days(trimmed(column).drop_null()).to_pylist()
        matches = [match for match in map(match_time, texts) if match is not None]
        if not matches:
            return Unusable(name, f"was said to hold dates, but holds {texts[:1]}")
        made = replace(made, is_aware=2 * sum(map(has_offset, matches)) > len(matches))
        slashed = [match for match in matches if is_slashed(match)]
        if slashed:
            if asked in ("day-first", "month-first"):
                made = replace(made, day_first=asked == "day-first")
            else:
                left = any(int(match["left"]) > 12 for match in slashed)
                right = any(int(match["right"]) > 12 for match in slashed)
                if left == right:
                    shown = f"{slashed[0][0].strip()!r}"
                    how = "in both orders" if left else "that read day-first and month-first"
                    return Unusable(name, f"holds dates {how}, such as {shown}", "date")
                made = replace(made, day_first=left)
    ns, good = times(column, made)
    clock = ns[good] % DAY_NS
    is_wide = made.is_wide or bool((clock % SECOND_NS).any())
    return replace(made, has_clock=bool(clock.any()), is_wide=is_wide)


# -- the numbers -------------------------------------------------------------------------------------------------------


def numbers(
    column: Any, name: str, decimal: str, faults: MutableMapping[int, Fault] | None = None
) -> tuple[Array, Array]:
    """Return a column as float64, NaN for missing cells and for other than numbers; and the rows of the latter."""
    column = plain(column)
    kind = column.type
    nothing = np.zeros(0, np.int64)
    if is_text(kind):
        if decimal == ".":
            # The usual case, ten times as fast: only plain numbers.
            with suppress(pa.ArrowInvalid):
                return as_numpy(column.cast(pa.float64())), nothing
        column = trimmed(column)
    try:
        if pa.types.is_temporal(kind):
            whole = column.cast(pa.int64() if kind.bit_width == 64 else pa.int32())
            unit = _UNITS[kind.unit] if hasattr(kind, "unit") else DAY_NS
            return as_numpy(whole.cast(pa.float64())) * (unit / SECOND_NS), nothing
        cells = column
        if is_text(kind) and decimal == ",":
            # A point may group digits: such cells are read one by one.
            cells = pc.replace_substring(pc.replace_substring(column, ".", "x"), ",", ".")
        return as_numpy(cells.cast(pa.float64())), nothing
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return _numbers_one_by_one(column, name, decimal, faults)


def _numbers_one_by_one(
    column: Any, name: str, decimal: str, faults: MutableMapping[int, Fault] | None
) -> tuple[Array, Array]:
    values = np.full(len(column), np.nan)
    bad = []
    for row, cell in enumerate(column.to_pylist()):
        if cell is None:
            continue
        if isinstance(cell, str):
            number = parse_number(cell, decimal)
        else:
            number = float(cell) if not isinstance(cell, int) or abs(cell) <= 1 << 53 else None
        if number is not None:
            values[row] = number
            continue
        bad.append(row)
        if faults is not None:
            why = "a whole number above 2**53" if isinstance(cell, int) else "not a number"
            faults.setdefault(row, Fault.of(name, cell, why))
    return values, np.asarray(bad, np.int64)


def without_codes(batch: Any, codes: Mapping[str, Sequence[float]], decimal: str) -> Any:
    """Return the batch with the codes of missing values replaced by null; see `parse_codes`."""
    for place, name in enumerate(batch.schema.names):
        wanted = np.array([*codes.get(name, ()), *codes.get("", ())])
        column = plain(batch.column(place))
        if not len(wanted) or not (is_text(column.type) or _is_number(column.type)):
            continue
        values, _ = numbers(column, name, decimal)
        # A 99.99 that was stored as float32 reads 99.98999786.
        is_code = np.isin(values, np.concatenate([wanted, wanted.astype(np.float32)]))
        if is_code.any():
            hidden = pc.if_else(pa.array(is_code), pa.scalar(None, column.type), column)
            batch = batch.set_column(place, name, hidden)
    return batch


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def times(column: Any, made: Column) -> tuple[Array, Array]:
    """Return nanoseconds since 1970, and a mask of the rows with a valid time."""
    column = plain(column)
    kind = column.type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        known = as_numpy(column.is_valid())
        # Through integers: Python's datetime has no nanoseconds.
        whole = column.cast(pa.int64() if kind.bit_width == 64 else pa.int32())
        counts = as_numpy(pc.fill_null(whole, 0)).astype(np.int64)
        unit = {pa.date32(): DAY_NS, pa.date64(): _UNITS["ms"]}.get(kind) or _UNITS[kind.unit]
        fits = np.abs(counts) <= np.iinfo(np.int64).max // unit
        ns = np.where(fits, counts, 0) * unit
        return ns, known & fits & (ns >= EARLIEST_NS) & (ns < LATEST_NS)
    texts = trimmed(column if is_text(kind) else column.cast(pa.string()))
    filled = pc.fill_null(_with_days(texts), "")
    filled = filled.combine_chunks() if isinstance(filled, pa.ChunkedArray) else filled
    return parse_times(filled, made.day_first, made.is_aware)


def encode(
    column: Any, made: Column, decimal: str, faults: MutableMapping[int, Fault]
) -> tuple[Array, Array]:
    """Return the numbers of a column, and the rows with a text that the training rows did not have.

    Numbers are `(rows, outputs)` float64, NaN where the value is missing. Rows that cannot be read are put into
    `faults`.
    """
    unseen = np.zeros(0, np.int64)
    if made.kind == "number":
        values = numbers(column, made.name, decimal, faults)[0][:, None]
    elif made.kind == "bool":
        values = _booleans(column, made.name, faults)[:, None]
    elif made.kind in ("one-hot", "codes"):
        found, is_other = places_in(as_text(column, made.words), made.values)
        is_one = found[:, None] == np.arange(len(made.values))
        values = is_one.astype(np.float64) if made.kind == "one-hot" else (found + 1.0)[:, None]
        unseen = np.flatnonzero(is_other)
    else:
        values = _encode_times(column, made, faults)
    if made.has_flag:
        values = np.hstack([values, np.isnan(values).any(axis=1, keepdims=True)])
    if made.without:
        values = values[:, [name not in made.without for name in made.all_outputs]]
    return values, unseen


def _booleans(column: Any, name: str, faults: MutableMapping[int, Fault]) -> Array:
    column = plain(column)
    if not is_text(column.type):
        return as_numpy(column.cast(pa.float64()))
    texts = pc.utf8_lower(trimmed(column))
    words = {
        word: number for pairs in (*_WORDS, {"1": 1, "0": 0}) for word, number in pairs.items()
    }
    found, is_other = places_in(texts, list(words))
    _refuse(is_other, name, texts, "not true or false", faults)
    return np.array([*words.values(), np.nan], np.float64)[found]  # the last one for -1


def places_in(texts: Any, values: Sequence[str]) -> tuple[Array, Array]:
    """Return the index of each text in `values`, -1 if it is not there; and which non-null texts are not there."""
    places = pc.fill_null(pc.index_in(texts, value_set=pa.array(values, pa.string())), -1)
    found: Array = as_numpy(places).astype(np.int64)
    return found, as_numpy(texts.is_valid()) & (found < 0)


def _refuse(
    rows: Array, name: str, cells: Any, why: str, faults: MutableMapping[int, Fault]
) -> None:
    """Add rows to `faults`, unless they have a reason already."""
    for row in np.flatnonzero(rows).tolist():
        faults.setdefault(row, Fault.of(name, cells[row], why))


def _encode_times(column: Any, made: Column, faults: MutableMapping[int, Fault]) -> Array:
    ns, good = times(column, made)
    column = plain(column)
    # Other types become text in Arrow, not in Python, whose years end with 9999.
    texts = trimmed(column if is_text(column.type) else column.cast(pa.string()))
    known = as_numpy(texts.is_valid())
    _refuse_other_order(texts, made, (ns, good), faults)
    for row in np.flatnonzero(known & ~good).tolist():
        cell = texts[row].as_py()
        is_far = re.match(r"[0-9]{4,}-", cell) and not FIRST_YEAR <= int(cell[:4]) <= LAST_YEAR
        far = f"no date between {FIRST_YEAR} and {LAST_YEAR}"
        why = far if is_far else "not a date as in the other rows"
        faults.setdefault(row, Fault.of(made.name, cell, why))
    parts: list[Array] = [ns / SECOND_NS]
    if made.kind != "seconds":
        days = ns // DAY_NS
        months = days.astype("M8[D]").astype("M8[M]").astype(np.int64)
        parts = [days, months % 12 + 1, (days + 3) % 7]
        parts += [(ns % DAY_NS) / SECOND_NS] if made.has_clock else []
    values = np.stack([np.asarray(part, np.float64) for part in parts], axis=1)
    values[~(good & known)] = np.nan
    return values


def _refuse_other_order(
    texts: Any, made: Column, read: tuple[Array, Array], faults: MutableMapping[int, Fault]
) -> None:
    """Refuse "03/25/2020", with this reason, where days are expected first.

    If more rows read only in the other order than only in the expected one, "03/05/2020" is refused too: it would
    silently become another day. A few mistyped rows do not affect other rows.
    """
    ns, good = read
    if made.day_first is None or good.all() or not is_text(texts.type):
        return
    other_ns, other_good = times(texts, replace(made, day_first=not made.day_first))
    strange = other_good & ~good
    if not strange.any():
        return
    expected, found = ("day", "month") if made.day_first else ("month", "day")
    for row in np.flatnonzero(strange).tolist():
        day = np.datetime64(int(other_ns[row]) // DAY_NS, "D")
        why = f"a date {found}-first; expected: {expected}-first, or {day}"
        faults.setdefault(row, Fault.of(made.name, texts[row], why))
    if strange.sum() > (good & ~other_good).sum():
        why = f"{expected}-first or {found}-first, as other rows are; expected: {expected}-first, or 2020-12-31"
        _refuse(good & other_good & (ns != other_ns), made.name, texts, why, faults)


def parse_dtypes(texts: Sequence[str]) -> dict[str, str]:
    """Read "NAME=KIND" as typed after `--dtype`."""
    kinds: dict[str, str] = {}
    for text in texts:
        name, equals, kind = text.rpartition("=")
        if not equals or not name.strip() or kind.strip() not in KINDS:
            meant, _, word = (name, equals, kind) if equals else text.rpartition(":")
            better = f"{meant.strip() or 'NAME'}={nearest(word.strip(), KINDS) or 'category'}"
            raise InputError(
                f"--dtype is {text!r}.",
                f"NAME=KIND, with a kind of {', '.join(KINDS)}",
                f"--dtype {quoted(better)}",
            )
        kinds[name.strip()] = kind.strip()
    return kinds


def parse_codes(texts: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Read "CODE" or "NAME=CODE" as typed after `--missing-code`: codes by column, those of every column under ""."""
    codes: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, equals, code = text.rpartition("=")
        number = parse_number(code, ".")
        if number is None or not np.isfinite(number) or (equals and not name.strip()):
            raise InputError(
                f"--missing-code is {text!r}.",
                "a number that stands for a missing value, or NAME=NUMBER for one column",
                f"--missing-code {quoted((name.strip() or 'NAME') + '=-999')}",
            )
        codes[name.strip()] = (*codes.get(name.strip(), ()), number)
    return codes


def parse_words(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read "NAME=WORD" as typed after `--value`: words by column that are values there."""
    words: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, word = text.rpartition("=")
        if not name.strip() or word.strip() not in NULLS[1:]:
            raise InputError(
                f"--value is {text!r}.",
                f"NAME=WORD, with a word that is usually read as missing: {', '.join(NULLS[1:])}",
                f"--value {quoted((name.strip() or 'NAME') + '=None')}",
            )
        words[name.strip()] = (*words.get(name.strip(), ()), word.strip())
    return words
