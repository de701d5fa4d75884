"""Bytes, shares, seconds, rates and counts: parsing typed text, formatting for output.

Enters: text such as "12GB", "75%", "90s". Leaves: plain numbers whose unit is in the name.
Costs nothing.

One rule for sizes: a typed GB means 2^30 bytes, as on the label of a memory module or a GPU
("16GB" is 16 GiB), and so does a key that ends in `_gb`. Printed sizes use KiB, MiB, GiB. Rates are the
exception, in powers of ten (GB/s), because disks and buses are sold by them.
"""

from __future__ import annotations

import math
import operator
import re
from datetime import UTC, datetime
from typing import Any

from stoker.errors import InputError

KIB, MIB, GIB = 1024, 1024**2, 1024**3
KB, MB, GB = 1000, 1000**2, 1000**3

_BYTE_UNITS = {
    "": 1, "b": 1,
    "k": KIB, "kb": KIB, "kib": KIB,
    "m": MIB, "mb": MIB, "mib": MIB,
    "g": GIB, "gb": GIB, "gib": GIB,
    "t": 1024**4, "tb": 1024**4, "tib": 1024**4,
}  # fmt: skip
_SECOND_UNITS = {
    "": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z%]*)\s*")


def _parse(text: str | float, units: dict[str, float] | dict[str, int], example: str) -> float:
    if isinstance(text, int | float) and not isinstance(text, bool):
        if math.isnan(text) or text < 0:
            raise InputError(f"{text!r} is not a size.", "zero or more", f"for example {example}")
        return float(text)
    match = _QUANTITY.fullmatch(str(text))
    unit = match[2].lower() if match else ""
    if match is None or unit not in units:
        known = ", ".join(name for name in units if name)
        raise InputError(
            f"cannot read {text!r} as a quantity.",
            f"a number and one of {known}" if known else "a number of 0 or more",
            f"for example {example}",
        )
    return float(match[1]) * units[unit]


def parse_bytes(text: str | float) -> int:
    """Return bytes for "12GB" (12 x 2^30), "1.5 GiB", "4096" or a number."""
    return int(_parse(text, _BYTE_UNITS, "12GB"))


def parse_memory(text: str, option: str) -> int:
    """Return bytes of memory; a number below 1 KiB such as "16" is refused, since its unit was forgotten."""
    size = parse_bytes(text)
    if 0 < size < KIB:
        raise InputError(
            f"{option} {text} is {size} bytes.", "a size with its unit", f"{option} {size}GB"
        )
    return size


def parse_seconds(text: str | float) -> float:
    """Return seconds for "90s", "5min", "250ms" or a number."""
    return _parse(text, _SECOND_UNITS, "90s")


def parse_share(text: str | float) -> float:
    """Return a share between 0 and 1 for "75%", "0.75" or 0.75."""
    if isinstance(text, str) and text.strip().endswith("%"):
        value = _parse(text.strip()[:-1], {"": 1.0}, "75%") / 100
    else:
        value = _parse(text, {"": 1.0}, "75%")
    if value > 1:
        raise InputError(
            f"{text!r} is more than the whole.", "0 to 1, or 0% to 100%", "for example 75%"
        )
    return value


def whole_number(
    name: str, value: Any, fix: str = "", least: int | None = None, most: int | None = None
) -> int:
    """Return an integer of any kind, also numpy's, as Python's int."""
    allowed, fix = "a whole number", fix or f"{name}=8"
    if most is not None:
        allowed += f" from {least} to {most}"
    elif least is not None:
        allowed += f", {least} or more"
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name} is {value!r}.", allowed, fix) from None
    if (least is not None and number < least) or (most is not None and number > most):
        raise InputError(f"{name} is {value!r}.", allowed, fix)
    return number


def usable_count(name: str, value: Any, least: int = 1, example: int = 2) -> int:
    """Return a count as Python's int; True and False are refused."""
    fix = f"{name}={example}"
    if isinstance(value, bool):
        raise InputError(f"{name} is {value}.", f"a whole number, {least} or more", fix)
    return whole_number(name, value, fix, least)


def format_bytes(num_bytes: float | None) -> str:
    """Return "12.4 GiB"; None reads "n/a"."""
    units = (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    return _scaled(num_bytes, units)


def _scaled(value: float | None, units: tuple[tuple[str, int], ...]) -> str:
    if value is None:
        return "n/a"
    for unit, size in units:
        if abs(value) >= size:
            return f"{value / size:.{1 if abs(value) >= 10 * size else 2}f} {unit}"
    return f"{value:.0f} B"


def format_seconds(seconds: float | None) -> str:
    """Return "250 ms", "1.50 s", "2 min 05 s" or "3 h 07 min"; None reads "n/a"."""
    if seconds is None:
        return "n/a"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def local_time(seconds: float) -> datetime:
    """Return a moment, in seconds since 1970, on the clock of this machine.

    In UTC where the local time cannot be computed; the year 9999 for later moments.
    """
    try:
        return datetime.fromtimestamp(seconds).astimezone()
    except (ValueError, OverflowError, OSError):
        last = datetime(9999, 12, 31, tzinfo=UTC)
        return datetime.fromtimestamp(seconds, UTC) if 0 <= seconds < last.timestamp() else last


def format_rate(num_bytes: float | None, seconds: float | None) -> str:
    """Return "6.10 GB/s"; "n/a" when either is unknown or no time passed."""
    if num_bytes is None or not seconds:
        return "n/a"
    units = (("TB", 10**12), ("GB", GB), ("MB", MB), ("kB", KB))
    return f"{_scaled(num_bytes / seconds, units)}/s"


def format_count(count: int | None, noun: str = "") -> str:
    """Return "300,000", or "1 shard" and "3 shards" with a noun; None reads "n/a"."""
    if count is None:
        return "n/a"
    return f"{count:,} {noun}{'' if count == 1 else 's'}" if noun else f"{count:,}"
