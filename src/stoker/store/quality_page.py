"""The page of `stoker inspect`: what is in a store, what is wrong with it, how it is spread.

Enters: statistics and findings per field, facts about the store. Leaves: one HTML page as text.
Costs: string work, about 1 kB and 0.2 ms per column; 400 columns at most are drawn per field.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from stoker import page
from stoker.page import Html
from stoker.store.fields import Array
from stoker.store.quality import SEVERITIES, Finding, sorted_findings
from stoker.store.table_stats import BIN_NOT_FINITE, TableStats
from stoker.units import format_count

MAX_COLUMNS_DRAWN = 400
MAX_FINDINGS_SHOWN = 1000
NUM_BARS = 32
# A range of 2^12 and more no longer shows in a plain histogram: draw the magnitudes as well.
_WIDE_OCTAVES = 12

_MEANING = {"refuse": "stops a pack", "warn": "packs, but look at it", "note": "for completeness"}


def quality_page(
    title: str,
    stats: Mapping[str, TableStats],
    findings: Sequence[Finding],
    facts: Mapping[str, str],
    samples: page.Section | None = None,
) -> str:
    """Return the inspect page. Samples as the model gets them are shown first."""
    findings = sorted_findings(findings)
    sections = [
        *([samples] if samples is not None else []),
        page.Section("summary", "Summary", _summary(stats, findings, facts)),
        page.Section("findings", "Findings", _findings(findings)),
    ]
    for number, (field, table) in enumerate(stats.items()):
        mine = [finding for finding in findings if finding.field == table.field]
        label = page.shorten(field, 60)
        shapes, numbers = _shapes(table, mine, number), _numbers(table, number)
        sections += [
            page.Section(f"shapes-{number}", f"{label}: shapes", shapes),
            page.Section(f"columns-{number}", f"{label}: numbers", numbers),
        ]
    return page.html(title, sections, subtitle=_verdict(findings))


def _verdict(findings: Sequence[Finding]) -> str:
    by = Counter(finding.severity for finding in findings)
    if by["refuse"]:
        return f"{format_count(by['refuse'], 'finding')} would stop a pack."
    if by["warn"]:
        return f"Nothing stops a pack; {format_count(by['warn'], 'warning')} to look at."
    return "Nothing wrong was found."


def _summary(
    stats: Mapping[str, TableStats], findings: Sequence[Finding], facts: Mapping[str, str]
) -> Html:
    by = Counter(finding.severity for finding in findings)
    shown = dict(facts)
    for severity in SEVERITIES:
        shown[f"{severity} ({_MEANING[severity]})"] = format_count(by[severity])
    rows = [
        (page.name(field), table.dtype, *map(format_count, counts))
        for field, table in stats.items()
        for counts in [(table.num_rows, len(table.columns), table.inner)]
    ]
    header = ("field", "dtype", "rows", "columns", "values per column and row")
    fields = page.table(header, rows, key="fields", numeric=(2, 3, 4))
    return page.join([page.facts(shown), fields])


def _findings(findings: Sequence[Finding]) -> Html:
    if not findings:
        return page.join([page.badge("clean", "good"), page.paragraph(" No findings.")])
    rows = [
        (
            page.join([page.badge(finding.severity, finding.severity), " ", finding.name]),
            _place(finding),
            finding.evidence,
            page.instruction(finding.remedy),
        )
        for finding in findings[:MAX_FINDINGS_SHOWN]
    ]
    header = ("finding", "where", "evidence", "what to do")
    table = page.table(header, rows, key="findings-table", labels=(0,), wide=(2, 3))
    return _with_rest(table, len(findings) - len(rows), "finding")


def _with_rest(table: Html, left: int, noun: str) -> Html:
    note = f"{format_count(left, noun)} more, not listed."
    return page.join([table, page.paragraph(note, quiet=True)] if left else [table])


def _place(finding: Finding) -> Html:
    if finding.column is None:
        return page.name(finding.field)
    where = f"{finding.field}, column {finding.column_index}"
    return page.join([page.name(finding.column), Html("<br>"), Html("<small class=quiet>"), where,
                      Html("</small>")])  # fmt: skip


def _shapes(table: TableStats, findings: Iterable[Finding], number: int) -> Html:
    by_column: dict[int, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.column_index is not None:
            by_column[finding.column_index].append(finding)
    drawn = list(range(len(table.columns)))
    if len(drawn) > MAX_COLUMNS_DRAWN:
        first = sorted(drawn, key=lambda column: (column not in by_column, column))
        drawn = sorted(first[:MAX_COLUMNS_DRAWN])
    figures = [
        _figure(table, column, by_column[column], f"shape-{number}-{column}") for column in drawn
    ]
    told = (
        f"From {format_count(len(table.sample.rows))} sampled rows, between the quantiles 0.5 % "
        "and 99.5 %. Where a column spans more than three decades its magnitudes follow, from "
        "all rows, one bar per power of two; what a pack refuses is red."
    )
    parts = [page.paragraph(told, quiet=True), page.grid(figures)]
    left = len(table.columns) - len(drawn)
    if left:
        note = f"{format_count(left, 'column')} more, not drawn; those with findings come first."
        parts.insert(1, page.paragraph(note, quiet=True))
    return page.join(parts)


def _figure(table: TableStats, column: int, findings: Sequence[Finding], key: str) -> Html:
    label = table.columns[column]
    counts, edges = histogram(table, column)
    # A single value is drawn as one thin bar, not as a block.
    bars = counts.tolist() if len(counts) > 1 else [0] * 15 + counts.tolist() + [0] * 16
    picture = page.svg_histogram(bars, edges.tolist(), label, key=key)
    one_each = len(counts) > 1 and edges[1] - edges[0] == 1 and edges[0] == round(edges[0])
    low, high = (page.format_number(float(edges[at])) for at in (0, -2 if one_each else -1))
    caption = [_ends(low, high) if counts.sum() else page.escape("no finite value sampled")]
    bins, first_bin = magnitudes(table, column)
    if len(bins) >= _WIDE_OCTAVES:
        caption += [_magnitude_picture(bins, first_bin, label, findings, key)]
    badges = [page.badge(finding.name, finding.severity) for finding in findings]
    if badges:
        caption += [Html("<p>"), *badges, Html("</p>")]
    return page.figure(page.name(label), picture, page.join(caption))


def _ends(low: str, high: str) -> Html:
    ends = [f"{low} only"] if low == high else [low, high]
    spans = "".join(f"<span>{page.escape(end)}</span>" for end in ends)
    return Html(f'<span class="ends">{spans}</span>')


def _magnitude_picture(
    bins: Array, first_bin: int, label: str, findings: Sequence[Finding], key: str
) -> Html:
    edges = [2.0 ** (first_bin + index - 127) for index in range(len(bins) + 1)]
    extreme = next((finding.count for finding in findings if finding.name == "extreme"), 0)
    # The extremes are the largest magnitudes, and end on a bar's edge unless 1e15 is the limit.
    above = np.cumsum(bins[::-1])[::-1]
    marked = [index for index in range(len(bins)) if 0 < above[index] <= extreme]
    picture = page.svg_histogram(
        bins.tolist(), edges, f"magnitudes of {label}", key=f"{key}-m", marked=marked, height=28
    )
    low, high = page.format_number(edges[0]), page.format_number(edges[-1])
    return page.join([Html('<p class="quiet">magnitudes</p>'), picture, _ends(low, high)])


def histogram(table: TableStats, column: int) -> tuple[Array, Array]:
    """Return counts and edges over the sampled values between the quantiles 0.5 % and 99.5 %.

    Whole numbers in a small range get one bar each; everything else 32 equal bars.
    """
    values = table.sampled(column)
    if len(values) == 0:
        return np.zeros(NUM_BARS, dtype=np.int64), np.zeros(NUM_BARS + 1)
    low = np.quantile(values, 0.005, method="lower")
    high = np.quantile(values, 0.995, method="higher")
    inside = values[(values >= low) & (values <= high)]
    # Halved before subtracting: the span of float64 can exceed float64.
    if low == high or high / 2 - low / 2 < abs(low) * 1e-12:
        return np.array([len(inside)]), np.array([low, high])
    with np.errstate(over="ignore"):
        span = high - low
    if span <= NUM_BARS and (inside == np.round(inside)).all():
        counts = np.bincount((inside - low).astype(np.int64), minlength=int(span) + 1)
        return counts, low + np.arange(len(counts) + 1, dtype=np.float64)
    # Scaled by hand: np.histogram fails where neighbouring edges round to the same number.
    place = (inside / 2 - low / 2) / (high / 2 - low / 2)
    index = np.minimum((place * NUM_BARS).astype(np.int64), NUM_BARS - 1)
    steps = np.linspace(0, 1, NUM_BARS + 1)
    return np.bincount(index, minlength=NUM_BARS), low * (1 - steps) + high * steps


def magnitudes(table: TableStats, column: int) -> tuple[Array, int]:
    """Return the counts of non-zero magnitudes by power of two, and the first one's bin."""
    counts = table.values.bins[column, 1:BIN_NOT_FINITE]
    used = np.flatnonzero(counts)
    if len(used) == 0:
        return counts[:0], 0
    return counts[used[0] : used[-1] + 1], int(used[0]) + 1


def _numbers(table: TableStats, number: int) -> Html:
    values = table.values
    rows = []
    for column, label in enumerate(table.columns[:MAX_COLUMNS_DRAWN]):
        low, high = float(values.low[column]), float(values.high[column])
        median = float(table.quantiles([0.5], column)[0])
        known = int(values.num_finite[column]) > 0
        mean = float(values.mean[column]) if known else None
        total = max(1, table.num_values)
        numbers = (low, median, high, mean, float(table.std[column]))
        rows.append(
            (
                page.name(label),
                *(page.format_number(value) for value in numbers),
                f"{values.num_zero[column] / total:.1%}",
                format_count(int(values.num_nan[column])),
                format_count(int(values.num_inf[column])),
            )
        )
    header = ("column", "min", "median", "max", "mean", "std", "zeros", "NaN", "inf")
    shown = page.table(header, rows, key=f"numbers-{number}", numeric=range(1, 9))
    return _with_rest(shown, len(table.columns) - len(rows), "column")
