"""The quality gate: what is wrong with the values of a field, where, and what to do about it.

Enters: statistics of a field (`TableStats.scan`), or its time axis. Leaves: named
findings with evidence and remedy, and the limits by which `bad_rows` marks the rows to set
aside. Costs: `judge` is pure and takes milliseconds; `bad_rows` reads its values once.

| finding | when | severity |
|---|---|---|
| nan, inf | any | refuse |
| extreme | a magnitude a million times the column's median and above 65,504; or 1e15 in float32 | refuse |
| overflows-fp16 | a magnitude above 65,504 | warn |
| time-backwards, time-repeats | a time not after the one before | refuse |
| constant | one value only | warn |
| missing-code | a number such as -999 that repeats, far from all other values | warn |
| duplicate-rows | rows equal bit for bit | warn |
| label-leak | a correlation of 0.9999 or more with the target | warn |
| denormal | magnitudes below the smallest normal number | note |

Integers can only be extreme, constant, duplicated or a code. "A million" is 2^20, counted from the top
of the median's octave, so that the limit is a power of two: counts above it are exact sums of
the exponent histogram, however the table was cut into parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from stoker.display import quoted
from stoker.errors import InputError
from stoker.store.fields import Array
from stoker.store.repairs import drop_option, escape_name
from stoker.store.row_sketch import FIRST_ROWS
from stoker.store.table_stats import (
    BIN_2_TO_16,
    BIN_NOT_FINITE,
    HUGE,
    TableStats,
    as_float,
    checked_values,
    row_chunks,
)
from stoker.units import format_count

Json = Any
Severity = Literal["refuse", "warn", "note"]
FindingName = Literal[
    "nan", "inf", "extreme", "overflows-fp16", "time-backwards", "time-repeats", "constant",
    "duplicate-rows", "label-leak", "denormal", "missing-code",
]  # fmt: skip

SEVERITIES: tuple[Severity, ...] = ("refuse", "warn", "note")
LEAK_CORRELATION = 0.9999
_LEAK_MIN_ROWS = 32
_LEAVE_OUT = "leave these rows out: --on-bad quarantine, or correct them in the input"
_EXTREME_OCTAVES = 20
_CODE_REPEATS = 3
_CODE_NEIGHBOURS, _MOST_CODES = 10, 4
_UNSET = np.array(
    [-(2**15), 1 - 2**15, 2**15 - 1, 2**16 - 1, -(2**31), 2**31 - 1, 2**32 - 1], np.float32
)
"""Ends of integer types, which readers of sensors and netCDF leave where nothing was measured."""
_COLUMNS_TOLD = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, in one column."""

    name: FindingName  # what it is
    field: str  # the field it is in
    column: str | None = None  # the column's name; None when it concerns whole rows
    column_index: int | None = None  # the column's position; None when it concerns whole rows
    count: int  # values (or rows) that have it; an estimate where `evidence` says "about"
    share: float  # `count` over all values of the column (or all rows)
    first_rows: tuple[int, ...] = ()  # first rows that have it, at most five
    severity: Severity  # "refuse" stops a pack, "warn" does not, "note" is for completeness
    evidence: str  # the numbers, in words
    remedy: str  # what to type

    def to_json(self) -> Json:
        """Return the finding as JSON."""
        return asdict(self) | {"first_rows": list(self.first_rows)}

    @classmethod
    def from_json(cls, json: Mapping[str, Json]) -> Finding:
        """Read what `to_json` wrote."""
        return cls(**{**json, "first_rows": tuple(json["first_rows"])})

    @property
    def repair(self) -> str | None:
        """The repair that removes it, as `--repair` takes it; None where a person has to look."""
        # Repairs act on features only: a made-up target would be learned.
        if self.field != "features" or self.column is None or self.name not in _REPAIRS:
            return None
        kind = _clip(self.share) if self.name == "extreme" else _REPAIRS[self.name]
        return f"{kind}@{escape_name(self.column)}"

    def __str__(self) -> str:
        """Format as one line: severity, name, place, evidence, remedy."""
        place = self.field if self.column is None else f"{self.field}[{_shown(self.column)}]"
        return f"{self.severity} {self.name} {place}: {self.evidence}. Try: {self.remedy}"


_REPAIRS: Mapping[str, str] = {
    "nan": "fill:median",
    "inf": "clip",
    "extreme": "clip",
    "overflows-fp16": "robust",
}


def _clip(share: float) -> str:
    """Return a clip whose quantiles leave out twice as many values as are extreme.

    The default, 0.1 %, would keep the 1e15 where more than one value in a thousand is extreme.
    """
    if 2 * share <= 0.001:
        return "clip"
    edge = min(0.25, math.ceil(2000 * share) / 1000)
    return f"clip:{edge:g},{1 - edge:g}"


def sorted_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, the most severe first, then by field and column."""
    rank = {severity: index for index, severity in enumerate(SEVERITIES)}
    return sorted(findings, key=lambda f: (rank[f.severity], f.field, f.column_index or 0, f.name))


def _shown(name: str, limit: int = 80) -> str:
    """Return a name fit for a terminal line: printable, quoted, of bounded length."""
    return repr(name if len(name) <= limit else f"{name[: limit - 1]}…")


@dataclass(frozen=True, eq=False)
class Limits:
    """The magnitudes a pack refuses, per column as scanned.

    `refuse_from` is `(columns,)` float64: this magnitude and above is refused; inf refuses only what is not finite.
    """

    columns: tuple[str, ...]
    inner: int
    refuse_from: Array


def limits_of(stats: TableStats) -> Limits:
    """Return the limits that follow from the statistics of a whole field: a median of one part may mislead."""
    dtype = np.dtype(stats.dtype)
    limits = np.full(len(stats.columns), np.inf)
    for column in range(len(limits)):
        first_bin = _extreme_bin(stats, column)
        if first_bin is not None:
            limits[column] = 2.0 ** (first_bin - 127)
    if dtype.kind == "f" and dtype.itemsize <= 4:
        limits = np.minimum(limits, HUGE)
    return Limits(stats.columns, stats.inner, limits)


def _extreme_bin(stats: TableStats, column: int) -> int | None:
    """Return the exponent bin from which magnitudes are extreme by the column's own measure."""
    median = stats.median_bin(column)
    if median is None:
        return None
    first_bin = max(BIN_2_TO_16, median + 1 + _EXTREME_OCTAVES)
    return first_bin if first_bin < BIN_NOT_FINITE else None


def bad_rows(values: Array, limits: Limits) -> Array:
    """Return `(n,)` bool: which rows hold NaN, inf, or a magnitude at or above the limit of their column."""
    values = checked_values(values)
    width = limits.inner * len(limits.columns)
    if values[:1].size != min(1, len(values)) * width:
        raise InputError(
            f"values of shape {values.shape} do not fit limits for {len(limits.columns)} columns.",
            f"rows of {width} values",
            "limits_of(TableStats.scan(values, columns))",
        )
    bad = np.zeros(len(values), dtype=bool)
    for start, rows in row_chunks(values):
        table = as_float(rows.reshape(len(rows), limits.inner, len(limits.columns)))
        # Rounded up, so that `x < bound` says the same as in float64.
        bound = limits.refuse_from.astype(table.dtype)
        above = np.nextafter(bound, table.dtype.type(np.inf))
        bound = np.where(bound < limits.refuse_from, above, bound)
        with np.errstate(invalid="ignore"):
            # Written so that NaN, for which every comparison is false, is bad too.
            bad[start : start + len(rows)] = ~(np.abs(table) < bound).all(axis=(1, 2))
    return bad


def judge(stats: TableStats, *, target: TableStats | None = None) -> list[Finding]:
    """Return everything that is wrong with a field, the most severe first.

    With the `target` to be predicted, over the same rows, label leaks are looked for in the sampled rows.
    """
    findings: list[Finding] = []
    codes: dict[float, list[Finding]] = {}
    for column in range(len(stats.columns)):
        judged = _Column(stats, column)
        findings += judged.findings()
        for code, finding in judged.missing_codes():
            codes.setdefault(code, []).append(finding)
    for code, same in codes.items():
        findings += same if len(same) <= _COLUMNS_TOLD else [_of_many(code, same, stats)]
    findings += _duplicates(stats)
    if target is not None:
        findings += _leaks(stats, target)
    return sorted_findings(findings)


class _Column:
    def __init__(self, stats: TableStats, column: int) -> None:
        self._stats, self._values, self._column = stats, stats.values, column
        self._name = stats.columns[column]
        self._ends = float(stats.values.low[column]), float(stats.values.high[column])
        self._dtype = np.dtype(stats.dtype)

    def _repair(self, text: str) -> str:
        return f"--repair {quoted(f'{text}@{escape_name(self._name)}')}"

    def _drop(self) -> str:
        return _without_column(self._name, self._column)

    def _found(
        self, name: FindingName, severity: Severity, count: int, rows: tuple[int, ...], what: str, remedy: str,
        is_exact: bool = True,
    ) -> Finding:  # fmt: skip
        total = self._stats.num_values
        about, which = ("", "first") if is_exact else ("about ", "among them")
        values = f"{about}{format_count(count)} of {format_count(total)} values"
        return Finding(
            name=name, field=self._stats.field, column=self._name, column_index=self._column, count=count,
            share=count / total, first_rows=rows, severity=severity, evidence=f"{values} {what}{_at(rows, which)}",
            remedy=remedy,
        )  # fmt: skip

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong with the values, except codes for missing ones (`missing_codes`)."""
        values, at = self._values, self._column
        # Repairs act on features only: a made-up target would be learned.
        can_repair = self._stats.field == "features"
        low, high = self._ends
        largest = max(abs(low), abs(high))
        not_finite: Sequence[tuple[FindingName, Array, str]] = (
            ("nan", values.num_nan, "are NaN"),
            ("inf", values.num_inf, "are infinite"),
        )
        for name, counts, what in not_finite:
            if count := int(counts[at]):
                remedy = f"{self._repair(_REPAIRS[name])}, or {self._drop()}"
                remedy = remedy if can_repair else _LEAVE_OUT
                yield self._found(name, "refuse", count, values.rows_of(name, at), what, remedy)
        count, rows, why = self._extreme()
        if count:
            remedy = (
                f"{self._repair(_clip(count / self._stats.num_values))}; if it is a ratio, look at its denominator: "
                "--repair min-denominator:RATIO=NUMERATOR/DENOMINATOR,min=0.01"
            )
            what, remedy = f"reach {largest:.3g}, {why}", remedy if can_repair else _LEAVE_OUT
            yield self._found("extreme", "refuse", count, rows, what, remedy)
        is_float = self._dtype.kind == "f"
        if is_float and (count := int(values.num_over_fp16[at])):
            what = f"are above 65,504, the largest float16 (up to {largest:.3g})"
            remedy = "train in bfloat16, or store them in a larger unit"
            if can_repair:
                remedy = (
                    f"{self._repair('robust')} or {self._repair('asinh')}; or train in bfloat16"
                )
            rows = values.rows_of("over-fp16", at)
            yield self._found("overflows-fp16", "warn", count, rows, what, remedy)
        if low == high and (count := int(values.num_finite[at])) >= 2:
            what = f"are the same, {low:.6g}"
            yield self._found("constant", "warn", count, (), what, self._drop())
        if is_float and (count := int(values.num_denormal[at])):
            what = f"are denormal (below {np.finfo(self._dtype).tiny:.3g})"
            scale = f", or scale the column: {self._repair('robust')}" if can_repair else ""
            remedy = f"nothing: they are as good as zero{scale}"
            rows = values.rows_of("denormal", at)
            yield self._found("denormal", "note", count, rows, what, remedy)

    def _extreme(self) -> tuple[int, tuple[int, ...], str]:
        """Return how many values are extreme, the first rows, and by what measure."""
        values, at = self._values, self._column
        by_ratio = _extreme_bin(self._stats, at)
        ruins = self._dtype.kind == "f" and self._dtype.itemsize <= 4
        if by_ratio is not None and (not ruins or 2.0 ** (by_ratio - 127) <= HUGE):
            sizes = np.abs(self._stats.sampled(at))
            sizes = sizes[sizes > 0]
            usual = f"{np.median(sizes):.3g}" if len(sizes) else "magnitude"
            why = f"more than a million times the usual {usual}"
            return values.count_from(by_ratio, at), values.rows_from(by_ratio, at), why
        why = "where float32 counts in steps of 67 million"
        return int(values.num_huge[at]) if ruins else 0, values.rows_of("huge", at), why

    def missing_codes(self) -> Iterator[tuple[float, Finding]]:
        """Yield numbers that may stand for a missing value, from the sample: counts of long columns are estimates."""
        if not any(map(_is_code, self._ends)):
            return
        sample = self._stats.sample.values[:, :, self._column].astype(np.float64)
        total = self._stats.num_values
        for code, low, high in find_codes(sample[np.isfinite(sample)]):
            is_code, typed = sample == code, _spelled(code, self._stats)
            is_whole = sample.size == total
            count = int(is_code.sum()) if is_whole else round(is_code.mean() * total)
            having = np.sort(self._stats.sample.rows[is_code.any(axis=1)])
            rows = tuple(having[:FIRST_ROWS].tolist())
            others = f"the others are {low:.6g} to {high:.6g}"
            what = f"are {typed}, which may stand for a missing value: {others}"
            remedy = self._without_code(typed, count / total)
            yield code, self._found("missing-code", "warn", count, rows, what, remedy, is_whole)

    def _without_code(self, code: str, share: float) -> str:
        is_array = self._stats.columns[0] == "0"
        if self._stats.field == "targets" and not is_array:
            budget = math.ceil(100 * share)
            typed = f"--missing-code {quoted(code)} --on-bad quarantine --bad-budget {budget}%"
            return f"if so, leave these rows out: {typed}"
        if _is_table(self._stats):
            typed = f"--missing-code {quoted(f'{self._name}={code}')} --missing median"
            return f"if so, {typed}; without the name, for every column"
        return _other_value(code)


def find_codes(values: Array) -> list[tuple[float, float, float]]:
    """Return numbers that may stand for a missing value, each with the smallest and largest of the other values.

    Such a number looks like a code (`_is_code`) or is beside one, as -998 and -999, and it repeats. It is farther from
    all other values than these are from each other, or the codes are the only negative values.
    """
    known, counts = np.unique(values, return_counts=True)
    codes: list[float] = []
    for sign in (1, -1) * 2:  # a code at the one end may have hidden that of the other
        ends, times = (known, counts) if sign > 0 else (-known[::-1], counts[::-1])
        for size in range(1, min(_MOST_CODES, len(ends) - 2) + 1):
            block, rest = sign * ends[:size], ends[size:]
            looks = [_is_code(float(code)) for code in block]
            is_apart = any(looks) and rest[0] - ends[size - 1] > rest[-1] - rest[0]
            is_only = all(looks) and sign > 0 and block[-1] < 0 <= rest[0]
            is_only = is_only and len(rest) >= _CODE_NEIGHBOURS
            if times[:size].min() >= _CODE_REPEATS and (is_apart or is_only):
                codes += block.tolist()
                kept = slice(size, None) if sign > 0 else slice(0, -size)
                known, counts = known[kept], counts[kept]
                break
    return [(code, float(known[0]), float(known[-1])) for code in codes]


def _is_code(value: float) -> bool:
    """Whether a number is one that people and programs write for a missing value: -9, -200, 999.9, 65535."""
    if not math.isfinite(value):
        return False
    if np.float32(value) in _UNSET:
        return True
    for text in (f"{abs(value):.9g}", f"{abs(value):.6g}"):  # float32 has 99.99 as 99.9899979
        digits = text.replace(".", "")
        if set(digits) == {"9"} and (value < 0 or abs(value) >= 99):
            return True
    is_eights = len(digits) > 1 and set(digits) in ({"8"}, {"7"})
    # -100, -200, ..., -900, -1000, -2000, ...
    is_round = value <= -100 and value == np.rint(value) and set(f"{-value:.0f}"[1:]) == {"0"}
    return value < 0 and (is_eights or is_round)


def _spelled(code: float, stats: TableStats) -> str:
    """Return a number as it is typed, in the shortest text that the column's type reads so: 99.99, not 99.9899979."""
    kind = np.dtype(stats.dtype).type
    return (
        np.format_float_positional(kind(code), trim="-")
        if kind in (np.float32, np.float64)
        else f"{code:.0f}"
    )


def _without_column(name: str, column: int) -> str:
    option = drop_option(name, column)
    return f"drop the column: {option}" if option else "leave the column out of the array"


def _is_table(stats: TableStats) -> bool:
    """Whether these are the features of a table, whose columns have names; columns of arrays are numbered."""
    return stats.field == "features" and stats.columns[0] != "0"


def _of_many(code: float, same: Sequence[Finding], stats: TableStats) -> Finding:
    """Return one finding for a code that many columns of a field have."""
    share, typed = sum(each.share for each in same) / len(same), _spelled(code, stats)
    shown = ", ".join(_shown(each.column or "") for each in same[:_COLUMNS_TOLD])
    evidence = (
        f"{format_count(len(same), 'column')} ({shown}, ...) hold {typed}, which may stand for a missing value: "
        f"about {share:.2g} of their values, far from the others"
    )
    remedy = f"if so, --missing-code {quoted(typed)} --missing median"
    remedy = remedy if _is_table(stats) else _other_value(typed)
    count, rows = sum(each.count for each in same), same[0].first_rows
    return Finding(
        name="missing-code", field=stats.field, count=count, share=share, first_rows=rows, severity="warn",
        evidence=evidence, remedy=remedy,
    )  # fmt: skip


def _other_value(code: str) -> str:
    return (
        f"if so, give these a value before packing: x[x == {code}] = numpy.median(x[x != {code}])"
    )


def _at(rows: tuple[int, ...], which: str = "first") -> str:
    if not rows:
        return ""
    # No thousands separators: in a list of rows "1,348, 1,443" reads as four numbers.
    listed = ", ".join(map(str, rows))
    return f"; {which} {'row' if len(rows) == 1 else 'rows'} {listed}"


def _duplicates(stats: TableStats) -> list[Finding]:
    hashes = stats.hashes
    if hashes is None or hashes.num_duplicates <= 0:
        return []
    count = hashes.num_duplicates
    about = "" if hashes.level == 0 else "about "
    how = "" if hashes.level == 0 else f" (estimated from 1 row in {2**hashes.level})"
    evidence = (
        f"{about}{format_count(count)} of {format_count(stats.num_rows)} rows repeat an earlier "
        f"row{how}{_at(hashes.repeats)}"
    )
    remedy = "keep them only where they are real: the same row in train and test inflates the score"
    return [
        Finding(
            name="duplicate-rows", field=stats.field, count=count, share=count / stats.num_rows,
            first_rows=hashes.repeats, severity="warn", evidence=evidence, remedy=remedy,
        )
    ]  # fmt: skip


def _leaks(stats: TableStats, target: TableStats) -> list[Finding]:
    """Compare sampled columns with sampled targets: both fields sample the same rows."""
    if stats.inner != 1 or target.inner != 1 or stats.field == target.field:
        return []
    _, mine, theirs = np.intersect1d(
        stats.sample.rows, target.sample.rows, assume_unique=True, return_indices=True
    )
    values = stats.sample.values[mine, 0].astype(np.float64)
    wanted = target.sample.values[theirs, 0].astype(np.float64)
    findings: list[Finding] = []
    for column, name in enumerate(stats.columns):
        for index, label in enumerate(target.columns):
            correlation, num_rows = _correlation(values[:, column], wanted[:, index])
            if abs(correlation) >= LEAK_CORRELATION:
                evidence = (
                    f"correlates {correlation:+.6f} with {_shown(label)} of {_shown(target.field)}"
                    f" over {format_count(num_rows)} sampled rows"
                )
                remedy = f"{_without_column(name, column)}, unless it is known in time"
                findings.append(
                    Finding(
                        name="label-leak", field=stats.field, column=name, column_index=column, count=num_rows,
                        share=1.0, severity="warn", evidence=evidence, remedy=remedy,
                    )
                )  # fmt: skip
                break
    return findings


def _correlation(a: Array, b: Array) -> tuple[float, int]:
    """Return Pearson's correlation over the finite pairs, and their number; 0 if unknown."""
    both = np.isfinite(a) & np.isfinite(b)
    a, b = a[both], b[both]
    if len(a) < _LEAK_MIN_ROWS:
        return 0.0, len(a)
    with np.errstate(all="ignore"):
        a, b = a - a.mean(), b - b.mean()
        a, b = a / np.abs(a).max(), b / np.abs(b).max()
        correlation = float((a @ b) / np.sqrt((a @ a) * (b @ b)))
    return (correlation, len(a)) if np.isfinite(correlation) else (0.0, len(a))


def judge_time(time: Array, *, first_row: int = 0, field: str = "time") -> list[Finding]:
    """Return the steps of a time axis that go backwards or stand still."""
    cases: Sequence[tuple[FindingName, Array, str]] = (
        ("time-backwards", time[1:] < time[:-1], "are earlier than"),
        ("time-repeats", time[1:] == time[:-1], "have the time of"),
    )
    findings = []
    for name, wrong, how in cases:
        if count := int(wrong.sum()):
            rows = tuple((np.flatnonzero(wrong)[:FIRST_ROWS] + 1 + first_row).tolist())
            evidence = f"{format_count(count)} of {format_count(len(time))} rows {how} the row before{_at(rows)}"
            remedy = "sort the file by time and drop repeated times before packing"
            findings.append(
                Finding(
                    name=name, field=field, count=count, share=count / len(time), first_rows=rows, severity="refuse",
                    evidence=evidence, remedy=remedy,
                )
            )  # fmt: skip
    return findings
