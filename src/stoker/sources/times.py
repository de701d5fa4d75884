"""Times from text to nanoseconds since 1970, for bars and tables: one text, or a whole column at once.

Enters: the text of a time cell ("2020-10-15 13:00", "15.10.2020 13:00:00.000", "1602766800").
Leaves: int64 nanoseconds, or the reason why not. Costs: 60 ns per row for a column (digits are
read as a byte matrix), 3 µs per single text.

A column has few shapes ("dddd-dd-dd dd:dd"). The first text of a shape is matched by the same
patterns as a single text; the match gives the positions of the digits. All rows of that shape are
then read at those positions. So both ways accept the same texts.

Nothing is guessed: two-digit years are refused, and day-first dates need a date that reads only one
way, or the user's choice. Month names are English.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa

from stoker.errors import InputError, SourceError
from stoker.store.fields import Array

SECOND_NS = 1_000_000_000
DAY_NS = 86_400 * SECOND_NS
FIRST_YEAR, LAST_YEAR = 1700, 2199

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_MARCH_0 = 719_468  # days from 0000-03-01 to 1970-01-01
EARLIEST_NS = (date(FIRST_YEAR, 1, 1).toordinal() - _EPOCH_DAY) * DAY_NS
LATEST_NS = (date(LAST_YEAR + 1, 1, 1).toordinal() - _EPOCH_DAY) * DAY_NS
# Unpadded "1/5/2020 9:05" has 8 shapes; more than this many in one block is not a time column.
_MAX_SHAPES = 48
_LOCAL_STEP_NS = 900 * SECOND_NS  # every zone changes its clock on a quarter of an hour

_CLOCK = (
    r"(?:(?: *T *| +)(?P<hour>[0-9]{1,2})"
    # Colons may be missing ("T1305"), as ISO 8601 and therefore arrow allow.
    r"(?::?(?P<minute>[0-9]{2})(?::?(?P<second>[0-9]{2})(?:[.,](?P<fraction>[0-9]{1,9}))?)?)?"
    r"(?: *(?P<half>[AaPp]\.?[Mm]\.?))?"
    r"(?: *(?P<zone>Z|UTC|GMT|(?:UTC|GMT)?[+-](?P<zone_hour>[0-9]{2})"
    r"(?::?(?P<zone_minute>[0-9]{2}))?))?)?"
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    "(?i:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|"
    "oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
_COMPACT = (
    r"(?P<year>(?:19|20|21)[0-9]{2})(?P<month>[0-9]{2})(?P<day>[0-9]{2})"
    r"(?:(?:T| *)(?P<hour>[0-9]{2}):?(?P<minute>[0-9]{2})(?::?(?P<second>[0-9]{2}))?)?"
)
_PATTERNS = tuple(
    re.compile(rf"[ \t]*{pattern}[ \t]*")
    for pattern in (
        rf"(?P<year>[0-9]{{4}})[-./](?P<month>[0-9]{{1,2}})[-./](?P<day>[0-9]{{1,2}}){_CLOCK}",
        rf"(?P<left>[0-9]{{1,2}})[-./](?P<right>[0-9]{{1,2}})[-./](?P<year>[0-9]{{4}}){_CLOCK}",
        rf"(?P<month_name>{_MONTH})[-. ,]+(?P<day>[0-9]{{1,2}})[-. ,]+(?P<year>[0-9]{{4}}){_CLOCK}",
        rf"(?P<day>[0-9]{{1,2}})[-. ]+(?P<month_name>{_MONTH})[-. ,]+(?P<year>[0-9]{{4}}){_CLOCK}",
        _COMPACT,
        r"(?P<epoch>[0-9]{9,10}|[0-9]{12,13}|[0-9]{15,16}|[0-9]{18,19})(?:\.0*)?",
    )
)
_PARTS = ("year", "month", "day", "hour", "minute", "second", "zone_hour", "zone_minute")


_SHORT_YEAR = re.compile(
    rf" *[0-9]{{1,2}}[-./ ](?:[0-9]{{1,2}}|{_MONTH})[-./ ][0-9]{{2}}(?![0-9:]).*"
)


def has_short_year(text: str) -> bool:
    """Tell whether a text is a date with a year of two digits, whose century nobody can know."""
    return match_time(text) is None and _SHORT_YEAR.fullmatch(text) is not None


def match_time(text: str) -> re.Match[str] | None:
    """Return the match of the first pattern that reads the whole of `text`, or None."""
    for pattern in _PATTERNS:
        match = pattern.fullmatch(text)
        if match is not None:
            return match
    return None


def has_offset(match: re.Match[str]) -> bool:
    """Return whether the text has an offset from UTC ("Z", "+03:00")."""
    return "zone" in match.re.groupindex and match["zone"] is not None


def is_slashed(match: re.Match[str]) -> bool:
    """Return whether the date is like "13/10/2020" or "10/13/2020", whose order must be known."""
    return "left" in match.re.groupindex


def parse_time(text: str, day_first: bool | None, aware: bool | None = None) -> int | str:
    """Read one time; slower than `parse_times`, with the same result.

    Args:
        text: The cell, or the date and time cells joined by a space.
        day_first: How to read "10/11/2020"; None refuses such dates.
        aware: Whether the text must carry an offset from UTC; None takes both.

    Returns:
        Nanoseconds since 1970, or the reason in words.
    """
    match = match_time(text)
    if match is None:
        why = "is not a time"
    elif aware is not None and has_offset(match) != aware:
        why = f"{'lacks' if aware else 'has'} an offset, unlike the first bar"
    elif is_slashed(match) and day_first is None:
        why = "may be day-first or month-first"
    else:
        ns, good = _nanoseconds(match, lambda span: int(text[slice(*span)]), day_first)
        if good:
            return int(ns)
        why = f"is no date between {FIRST_YEAR} and {LAST_YEAR}"
    shown = text.strip()
    return f"{shown if len(shown) <= 40 else shown[:37] + '...'!r} {why}"


def parse_times(
    texts: pa.StringArray, day_first: bool | None, aware: bool | None
) -> tuple[Array, Array]:
    """Read one block of a column at once. Arguments as for `parse_time`; the array has no nulls.

    Returns:
        `(n,)` int64 nanoseconds, and `(n,)` bool: False where `parse_time` must decide.
    """
    num_rows = len(texts)
    times, good = np.zeros(num_rows, np.int64), np.zeros(num_rows, bool)
    if not num_rows or texts.buffers()[2] is None:
        return times, good
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: num_rows + 1]
    blob = np.frombuffer(texts.buffers()[2], np.uint8)
    lengths = np.diff(offsets)
    waiting = lengths > 0
    for _ in range(_MAX_SHAPES):
        rows = np.flatnonzero(waiting)
        if not len(rows):
            break
        width = int(lengths[rows[0]])
        rows = rows[lengths[rows] == width]
        if len(rows) == num_rows:  # a view, not a copy
            matrix = blob[offsets[0] : offsets[-1]].reshape(num_rows, width)
        else:
            matrix = blob[offsets[rows][:, None] + np.arange(width)]
        # Rows of the first row's shape: digits where it has digits, equal bytes elsewhere.
        digit = (matrix[0] - 48) < 10  # bytes below "0" wrap around to large numbers
        alike = ((matrix[:, digit] - 48) < 10).all(axis=1)
        alike &= (matrix[:, ~digit] == matrix[0, ~digit]).all(axis=1)
        if not alike.all():
            rows, matrix = rows[alike], matrix[alike]
        waiting[rows] = False
        match = match_time(bytes(matrix[0]).decode("utf-8", "replace"))
        usable = match is not None and (aware is None or has_offset(match) == aware)
        if match is not None and usable and not (is_slashed(match) and day_first is None):
            times[rows], good[rows] = _nanoseconds(match, partial(_digits, matrix), day_first)
    return times, good


def to_utc(local_ns: Array, zone: str) -> Array:
    """Turn wall-clock nanoseconds of an IANA zone ("Europe/Athens") into UTC.

    Times must be in rising or in falling order. The hour that autumn repeats is read as its first pass, and after a
    step back in time within it as its second. A time in the hour that spring skips is refused: the zone is wrong.
    """
    try:
        info = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise InputError(
            f"time zone {zone!r} is not known here.",
            "an IANA name",
            "--tz Europe/Athens, or pip install tzdata",
        ) from error
    steps, back = np.unique(local_ns // _LOCAL_STEP_NS, return_inverse=True)
    seconds = steps * (_LOCAL_STEP_NS // SECOND_NS)
    # fromtimestamp(UTC) restores the digits of the wall clock; then the zone interprets them.
    walls = [datetime.fromtimestamp(s, UTC).replace(tzinfo=info) for s in seconds.tolist()]
    first, second = (
        np.array([_offset_ns(wall.replace(fold=fold)) for wall in walls], np.int64)[back]
        for fold in (0, 1)
    )
    skipped = local_ns[second > first]
    if len(skipped):
        first_one = str(np.datetime64(int(skipped[0]), "ns").astype("M8[s]")).replace("T", " ")
        raise InputError(
            f"{len(skipped):,} times, {first_one} the first, do not exist in {zone}: its clocks skip that hour.",
            "the zone of the clock that wrote the times",
            "--tz UTC",
        )
    return local_ns - np.where(_second_pass(local_ns, second < first), second, first)


def _offset_ns(wall: datetime) -> int:
    return int((wall.utcoffset() or timedelta()).total_seconds()) * SECOND_NS


def _second_pass(local_ns: Array, is_twice: Array) -> Array:
    """Return which times are in the second pass of a repeated hour: those after a step back within it."""
    steps = np.diff(local_ns)
    if not is_twice.any() or not (steps < 0).any():
        return np.zeros(len(local_ns), bool)
    if (steps < 0).sum() > (steps > 0).sum():  # newest first
        return _second_pass(local_ns[::-1], is_twice[::-1])[::-1]
    back = np.concatenate([[False], steps < 0]) & is_twice
    begins = is_twice & ~np.concatenate([[False], is_twice[:-1]])
    backs = np.cumsum(back)
    before = np.maximum.accumulate(np.where(begins, backs - back, 0))
    found: Array = is_twice & (backs > before)
    return found


def find_day_first(text: bytes, delimiter: str, date_cell: int, file: str) -> bool:
    """Decide from a whole file whether "10/11/2020" is 10 November or October 11.

    Raises SourceError if no date reads only one way, or if dates contradict each other.
    """
    cell = re.escape(delimiter)
    before = rf"(?m)^(?:[^{cell}\n]*{cell}){{{date_cell}}}[ \t]*"
    large, small = "(?:1[3-9]|2[0-9]|3[01])", "(?:0?[1-9]|1[0-2])"
    day_left = re.search(f"{before}{large}[-./]{small}[-./][0-9]{{4}}".encode(), text)
    day_right = re.search(f"{before}{small}[-./]{large}[-./][0-9]{{4}}".encode(), text)
    if day_left and day_right:
        lines = [text.count(b"\n", 0, match.start()) + 1 for match in (day_left, day_right)]
        raise SourceError(
            f"{file}: line {lines[0]} can only be day-first, line {lines[1]} only month-first.",
            "one order of day and month in a file",
            "dates written with the year first, such as 2020-05-13",
        )
    if not day_left and not day_right:
        raise SourceError(
            f"{file}: every date reads both day-first and month-first.",
            "at least one date with a day above 12",
            "--day-first, or --month-first (day_first=True, or False)",
        )
    return day_left is not None


def _nanoseconds(
    match: re.Match[str], digits: Callable[[tuple[int, int]], Any], day_first: bool | None
) -> tuple[Any, Any]:
    """Return nanoseconds since 1970, and whether the time is valid.

    `digits` reads the number at a span of the match, for one text or for all rows of its shape at once. Letters are
    equal in all rows of a shape, so the month's name and am or pm are those of the match.
    """
    spans = {name: match.span(name) for name, value in match.groupdict().items() if value}
    if "epoch" in spans:
        # 9-10 digits are seconds, 12-13 ms, 15-16 µs, 18-19 ns.
        start, stop = spans["epoch"]
        ns = digits((start, stop)) * 1000 ** (3 - (stop - start - 9) // 3)
        return ns, (ns >= 0) & (ns < LATEST_NS)  # what overflows int64 turns negative
    if "left" in spans:
        left, right = ("day", "month") if day_first else ("month", "day")
        spans[left], spans[right] = spans["left"], spans["right"]
    part = {name: digits(spans[name]) for name in _PARTS if name in spans}
    if "month_name" in spans:
        part["month"] = _MONTHS.index(match["month_name"][:3].lower()) + 1
    year, month, day = part["year"], part["month"], part["day"]
    first, next_first = _days(year, month), _days(year + month // 12, month % 12 + 1)
    good = (year >= FIRST_YEAR) & (year <= LAST_YEAR) & (month >= 1) & (month <= 12)
    good &= (day >= 1) & (day <= next_first - first)
    if "half" in spans:
        good &= (part["hour"] >= 1) & (part["hour"] <= 12)
        part["hour"] = part["hour"] % 12 + (12 if match["half"][0] in "pP" else 0)
    seconds = (first + day - 1) * 86_400
    east = 1 if "zone" in spans and "-" in match["zone"] else -1
    for name, unit, limit in (
        *(("hour", 3600, 24), ("minute", 60, 60), ("second", 1, 60)),
        *(("zone_hour", east * 3600, 16), ("zone_minute", east * 60, 60)),
    ):
        if name in part:
            good &= part[name] < limit
            seconds += part[name] * unit
    ns = seconds * SECOND_NS
    if "fraction" in spans:
        start, stop = spans["fraction"]
        ns += digits((start, stop)) * 10 ** (9 - (stop - start))
    return ns, good


def _days(year: Any, month: Any) -> Any:
    """Return the days from 1970 to the first of a month, for numbers or arrays. Here a year begins in March."""
    year, month = year - (month <= 2), (month + 9) % 12
    leap_days = year // 4 - year // 100 + year // 400
    return year * 365 + leap_days + (153 * month + 2) // 5 - _MARCH_0


def _digits(matrix: Array, span: tuple[int, int]) -> Array:
    number = np.zeros(len(matrix), np.int64)
    for place in range(*span):
        number *= 10
        number += matrix[:, place] - 48
    return number
