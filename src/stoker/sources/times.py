"""The time of a bar, from text to nanoseconds since 1970, one at a time or a column at once.

Enters: the text of a time cell ("2020-10-15 13:00", "15.10.2020 13:00:00.000", "1602766800").
Leaves: int64 nanoseconds, or the reason why not. Costs: 60 ns per row for a column (digits are
read as a byte matrix), 3 µs per text on its own.

A column has few shapes ("dddd-dd-dd dd:dd"). The first text of a shape goes through the same
patterns as a lone text, and says where the digits of each part stand; all rows of that shape are
then read by those places. So the two ways cannot differ in what they accept.

Nothing is guessed: two-digit years are refused, and day-first dates need either a date that reads only
one way or the user's word. Month names are the English ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa

from stoker.errors import InputError, SourceError
from stoker.store.fields import Array

SECOND_NS = 1_000_000_000
DAY_NS = 86_400 * SECOND_NS
FIRST_YEAR, LAST_YEAR = 1700, 2199

_EPOCH_DAY = date(1970, 1, 1).toordinal()
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


def match_time(text: str) -> re.Match[str] | None:
    """Return the match of the first pattern that reads the whole of `text`, or None."""
    for pattern in _PATTERNS:
        match = pattern.fullmatch(text)
        if match is not None:
            return match
    return None


def has_offset(match: re.Match[str]) -> bool:
    """Say whether the text carries its own offset from UTC ("Z", "+03:00")."""
    return "zone" in match.re.groupindex and match["zone"] is not None


def is_slashed(match: re.Match[str]) -> bool:
    """Say whether the date is "13/10/2020" or "10/13/2020", whose order must be known."""
    return "left" in match.re.groupindex


def parse_time(text: str, day_first: bool | None, aware: bool | None = None) -> int | str:
    """Read one time; the careful twin of `parse_times`.

    Args:
        text: The cell, or the date and time cells joined by a space.
        day_first: How to read "10/11/2020"; None refuses such dates.
        aware: Whether the text must carry an offset from UTC; None takes both.

    Returns:
        Nanoseconds since 1970, or the reason in words.
    """
    match = match_time(text)
    if match is None:
        return f"{_shorten(text)!r} is not a time"
    if aware is not None and has_offset(match) != aware:
        return f"{_shorten(text)!r} {'lacks' if aware else 'has'} an offset, unlike the first bar"
    if is_slashed(match) and day_first is None:
        return f"{_shorten(text)!r} may be day-first or month-first"
    found = {name: value for name, value in match.groupdict().items() if value is not None}
    ns = None
    if "epoch" not in found:
        ns = _from_parts(found, day_first)
    elif (since := int(found["epoch"]) * _epoch_unit(len(found["epoch"]))) < LATEST_NS:
        ns = since
    if ns is None:
        return f"{_shorten(text)!r} is no date between {FIRST_YEAR} and {LAST_YEAR}"
    return ns


def parse_times(
    texts: pa.StringArray, day_first: bool | None, aware: bool | None
) -> tuple[Array, Array]:
    """Read one block of a column at once. Arguments as for `parse_time`; the array has no nulls.

    Returns:
        `(n,)` int64 nanoseconds, and `(n,)` bool, False where the careful reader must look.
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
        matrix = _matrix(blob, offsets, rows, width)
        rows, matrix = _rows_like_first(rows, matrix)
        waiting[rows] = False
        match = match_time(bytes(matrix[0]).decode("utf-8", "replace"))
        usable = match is not None and (aware is None or has_offset(match) == aware)
        if match is not None and usable and not (is_slashed(match) and day_first is None):
            times[rows], good[rows] = _from_matrix(matrix, match, day_first)
    return times, good


def to_utc(local_ns: Array, zone: str) -> Array:
    """Turn wall-clock nanoseconds of an IANA zone ("Europe/Athens") into UTC.

    The hour that autumn repeats is read as its first pass, and after a step back within it as its second: times are
    expected in their order, or all the other way round. The hour that spring skips cannot be: such a clock is another
    one.
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
    # fromtimestamp(UTC) gives the wall clock digits back; only then does the zone read them.
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
    """Tell which times lie in the second pass of a repeated hour: those behind a step back within it."""
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
    """Decide over a whole file whether "10/11/2020" is the tenth or October.

    Refused where no date, or dates of both kinds, can be read only one way.
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


def _shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 40 else text[:37] + "..."


@lru_cache(maxsize=8)
def _epoch_unit(num_digits: int) -> int:
    """Nanoseconds per unit: 9-10 digits are seconds, 12-13 ms, 15-16 µs, 18-19 ns."""
    return int(1000 ** (3 - (num_digits - 9) // 3))


def _from_parts(found: Mapping[str, str], day_first: bool | None) -> int | None:
    month, day = found.get("month"), found.get("day")
    if "month_name" in found:
        month = str(_MONTHS.index(found["month_name"][:3].lower()) + 1)
    if month is None or day is None:
        left, right = found["left"], found["right"]
        day, month = (left, right) if day_first else (right, left)
    hour, minute, second = (int(found.get(name, 0)) for name in ("hour", "minute", "second"))
    if "half" in found:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if found["half"][0] in "pP" else 0)
    year = int(found["year"])
    if not FIRST_YEAR <= year <= LAST_YEAR:
        return None
    try:
        days = datetime(year, int(month), int(day), hour, minute, second).toordinal()  # noqa: DTZ001
        days -= _EPOCH_DAY
    except ValueError:
        return None
    zone_hour, zone_minute = int(found.get("zone_hour", 0)), int(found.get("zone_minute", 0))
    if zone_hour > 15 or zone_minute > 59:
        return None
    shift = zone_hour * 3600 + zone_minute * 60
    shift = -shift if "-" in found.get("zone", "") else shift
    seconds = days * 86_400 + hour * 3600 + minute * 60 + second - shift
    return seconds * SECOND_NS + int(found.get("fraction", "").ljust(9, "0"))


def _matrix(blob: Array, offsets: Array, rows: Array, width: int) -> Array:
    """The texts of `rows`, all `width` bytes long, as a byte matrix; a view when none is left out."""
    if len(rows) == len(offsets) - 1:
        return blob[offsets[0] : offsets[-1]].reshape(len(rows), width)
    return blob[offsets[rows][:, None] + np.arange(width)]


def _rows_like_first(rows: Array, matrix: Array) -> tuple[Array, Array]:
    """Keep the rows with digits where the first has digits, and its very bytes elsewhere."""
    digit = (matrix[0] - 48) < 10  # bytes below "0" wrap around to large numbers
    alike = ((matrix[:, digit] - 48) < 10).all(axis=1)
    alike &= (matrix[:, ~digit] == matrix[0, ~digit]).all(axis=1)
    if alike.all():
        return rows, matrix
    return rows[alike], matrix[alike]


def _from_matrix(
    matrix: Array, match: re.Match[str], day_first: bool | None
) -> tuple[Array, Array]:
    """Read the rows of one shape by the places that `match` found in the first."""
    spans = {name: match.span(name) for name, value in match.groupdict().items() if value}
    if "epoch" in spans:
        start, stop = spans["epoch"]
        ns = _digits(matrix, (start, stop)) * _epoch_unit(stop - start)
        return ns, (ns >= 0) & (ns < LATEST_NS)  # what overflows int64 turns negative
    if "left" in spans:
        left, right = ("day", "month") if day_first else ("month", "day")
        spans[left], spans[right] = spans["left"], spans["right"]
    part = {name: _digits(matrix, spans[name]) for name in _PARTS if name in spans}
    if "month_name" in spans:
        # Letters are the same in all rows of a shape, so that the first one's name and half of the day are all rows'.
        number = _MONTHS.index(match["month_name"][:3].lower()) + 1
        part["month"] = np.full(len(matrix), number, np.int64)
    months = (part["year"] - 1970) * 12 + part["month"] - 1
    first = months.astype("M8[M]").astype("M8[D]").astype(np.int64)
    next_first = (months + 1).astype("M8[M]").astype("M8[D]").astype(np.int64)
    good = (part["year"] >= FIRST_YEAR) & (part["year"] <= LAST_YEAR)
    good &= (part["month"] >= 1) & (part["month"] <= 12)
    good &= (part["day"] >= 1) & (part["day"] <= next_first - first)
    seconds = (first + part["day"] - 1) * 86_400
    if "half" in spans and "hour" in part:
        good &= (part["hour"] >= 1) & (part["hour"] <= 12)
        part["hour"] = part["hour"] % 12 + (12 if match["half"][0] in "pP" else 0)
    for name, unit, limit in (("hour", 3600, 24), ("minute", 60, 60), ("second", 1, 60)):
        if name in part:
            good &= part[name] < limit
            seconds += part[name] * unit
    sign = -1 if "-" in (match.groupdict().get("zone") or "") else 1
    for name, unit, limit in (("zone_hour", 3600, 16), ("zone_minute", 60, 60)):
        if name in part:
            good &= part[name] < limit
            seconds -= sign * part[name] * unit
    ns = seconds * SECOND_NS
    if "fraction" in spans:
        start, stop = spans["fraction"]
        ns += _digits(matrix, (start, stop)) * 10 ** (9 - (stop - start))
    return ns, good


def _digits(matrix: Array, span: tuple[int, int]) -> Array:
    number = np.zeros(len(matrix), np.int64)
    for place in range(*span):
        number *= 10
        number += matrix[:, place] - 48
    return number
