"""The page of `stoker bench augment --html`: bars and numbers of every comparison.

Enters: comparisons and facts about the machine. Leaves: one HTML page as text. Costs: string work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker import page
from stoker.augment.bench import KORNIA, Comparison, Row
from stoker.page import Html
from stoker.units import format_count

_COLOURS = {"cpu": "plain", "peer": "plain", "ours": "good", "limit": "note"}
_HEADER = ("way", "ms per batch", "spread", "images/s", "× Kornia", "× the limit")


def bench_page(title: str, comparisons: Sequence[Comparison], facts: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        title: Of the page.
        comparisons: In the order to show.
        facts: Names and values for its top.
    """
    sections = [page.Section("setup", "Set-up", _setup(facts))]
    for number, comparison in enumerate(comparisons):
        heading = comparison.title[:1].upper() + comparison.title[1:]
        sections.append(page.Section(f"case-{number}", heading, _case(comparison, number)))
    return page.html(title, sections, subtitle=verdict(comparisons))


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Return the one sentence that the page is about."""
    for comparison in comparisons:
        ours = [row for row in comparison.rows if row.kind == "ours" and row.timing is not None]
        if not ours:
            continue
        best = min(ours, key=lambda row: row.timing.median_ms if row.timing else 0.0)
        if best.timing is None:
            continue
        said = f"{best.name}: {milliseconds(best)} per batch of {comparison.work.batch}"
        faster = comparison.times_faster_than(KORNIA, best)
        limit = comparison.times_the_limit(best)
        if faster is not None:
            said += f", {faster:.1f} times as fast as Kornia"
        if limit is not None:
            said += f", {limit:.1f} times the copy limit"
        return f"{said} ({comparison.title})."
    return "Nothing of ours could be measured here."


def milliseconds(row: Row) -> str:
    """Return "0.104 ms"; n/a when it was not measured."""
    if row.timing is None:
        return "n/a"
    ms = row.timing.median_ms
    return f"{ms:.3g} ms" if ms < 100 else f"{ms:,.0f} ms"


def cells(comparison: Comparison, row: Row) -> list[str]:
    """Return a row's numbers as text: ms, spread, images/s, × Kornia, × the limit."""
    if row.timing is None:
        return ["n/a"] * 5
    rate = comparison.images_per_second(row)
    faster = comparison.times_faster_than(KORNIA, row)
    limit = comparison.times_the_limit(row)
    return [
        milliseconds(row).removesuffix(" ms"),
        f"{row.timing.spread * 100:.0f} %" if row.timing.repeats > 1 else "n/a",
        format_count(round(rate)) if rate is not None else "n/a",
        "n/a" if faster is None else f"{faster:.3g}",
        "n/a" if limit is None else f"{limit:,.3g}" if limit < 1000 else f"{limit:,.0f}",
    ]


def _setup(facts: Mapping[str, str]) -> Html:
    how = (
        "Median of repeats that take turns, after warm-up, the device synchronised at both ends. "
        "Drawing the parameters is counted. The limit reads the input once and writes the output "
        "once. × Kornia: how many times as fast. × the limit: how many times its time."
    )
    return page.join([page.facts(facts), page.paragraph(how, quiet=True)])


def _case(comparison: Comparison, number: int) -> Html:
    lines = [
        page.Bar(
            row.name,
            row.timing.median_ms if row.timing else None,
            milliseconds(row) if row.timing else f"n/a: {row.reason}",
            _COLOURS[row.kind],
        )
        for row in comparison.rows
    ]
    rows = [(row.name, *cells(comparison, row)) for row in comparison.rows]
    chart = page.bars(lines, key=f"bars-{number}", unit="ms per batch")
    table = page.table(_HEADER, rows, key=f"table-{number}", numeric=(1, 2, 3, 4, 5), labels=(0,))
    return page.join([chart, table])
