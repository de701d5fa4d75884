"""The page of `stoker tune --html`, and the table cells that the terminal shows as well.

Enters: `Tuned`. Leaves: one HTML page as text. Costs: string work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker import page
from stoker.page import Html
from stoker.page.charts import Chart, Line, Mark, chart_grid, line_chart
from stoker.tune.job import Tuned
from stoker.tune.trial import Measured
from stoker.units import GIB, format_bytes

CURVE_HEADER = (
    "batch", "accumulate", "per update", "samples/s", "spread", "× configured", "peak memory",
    "may use", "remark",
)  # fmt: skip
OPTION_HEADER = ("option", "value", "samples/s", "spread", "× configured", "remark")


def curve_cells(tuned: Tuned) -> list[tuple[str, ...]]:
    """Return a row of text per batch size."""
    return [
        (
            f"{point.shape.batch_size:,}",
            str(point.shape.accumulation_steps),
            f"{point.shape.samples_per_update:,}",
            *_rate_cells(point, tuned),
            format_bytes(point.peak_bytes),
            format_bytes(point.cap_bytes),
            _remark(point, tuned),
        )
        for point in tuned.curve
    ]


def option_cells(tuned: Tuned) -> list[tuple[str, ...]]:
    """Return a row of text per option that was tried."""
    return [
        (
            tried.option,
            tried.value,
            *_rate_cells(tried.measured, tuned),
            "taken" if tried.is_kept else tried.measured.reason or "does not pay",
        )
        for tried in tuned.options
    ]


def _rate_cells(done: Measured, tuned: Tuned) -> tuple[str, str, str]:
    before = tuned.before.rate
    return (
        "n/a" if done.rate is None else f"{done.rate:,.0f}",
        "n/a" if done.spread is None else f"{done.spread:.0%}",
        "n/a" if done.rate is None or not before else f"{done.rate / before:.2f}",
    )


def _remark(point: Measured, tuned: Tuned) -> str:
    words = [point.reason] if point.reason else []
    if point.shape == tuned.configured:
        words.append("configured")
    if point.shape == tuned.final.shape:
        words.append("taken")
    return ", ".join(words)


def verdict(tuned: Tuned) -> str:
    """Return the result in one sentence."""
    final = tuned.final
    rate = f"{final.rate or 0:,.0f} samples/s"
    held = f"{format_bytes(final.peak_bytes)} of memory at most, {format_bytes(final.cap_bytes)} may be used"
    noisy = ""
    if tuned.noise is not None:
        noisy = (
            f" Slices of one try differ by up to {tuned.noise:.0%}, which is too noisy to tell: repeat it without "
            "other work on the machine, or with more --seconds-per-try."
        )
    if not tuned.changes:
        return f"Nothing that was tried gains 2 %: the configured settings stay, at {rate}; {held}.{noisy}"
    what = ", ".join(f"{key} {value}" for key, value in tuned.changes.items())
    if tuned.gain is None:
        return f"{what}: {rate}; {held}. The configured settings do not fit."
    return f"{what}: {rate}, {tuned.gain:.2f} times the configured rate; {held}.{noisy}"


def tuned_page(title: str, tuned: Tuned, facts: Mapping[str, str]) -> str:
    """Return the page; `facts` are shown at the top."""
    sections = [
        page.Section("result", "Result", _result(tuned, facts)),
        page.Section("curve", "Batch sizes", _curve(tuned)),
        page.Section("options", "Other settings", _options(tuned)),
    ]
    return page.html(title, sections, subtitle=verdict(tuned))


def _result(tuned: Tuned, facts: Mapping[str, str]) -> Html:
    how = (
        "Every rate is the median of slices of a real training run, after a warm-up: loader, forward, "
        "backward, update. Spread: largest less smallest slice, as a share of the median. A change is taken "
        "when it gains 2 %; the result was run twice as long, and its memory checked."
    )
    notes = [page.paragraph(note) for note in tuned.notes]
    return page.join([page.facts(facts), *notes, page.paragraph(how, quiet=True)])


def _curve(tuned: Tuned) -> Html:
    rates = [(float(point.shape.batch_size), point.rate) for point in tuned.curve]
    held = [
        (
            float(point.shape.batch_size),
            None if point.peak_bytes is None else point.peak_bytes / GIB,
        )
        for point in tuned.curve
    ]
    cap = Mark("may be used", min(point.cap_bytes for point in tuned.curve) / GIB)
    charts = [
        _chart("Throughput", rates, "samples/s", "chart-rate", tuned),
        _chart("Peak memory", held, "GiB", "chart-memory", tuned, [cap]),
    ]
    table = page.table(
        CURVE_HEADER, curve_cells(tuned), key="table-curve", numeric=range(8), labels=(8,)
    )
    return page.join([chart_grid(charts), table])


def _chart(
    title: str,
    points: Sequence[tuple[float, float | None]],
    unit: str,
    key: str,
    tuned: Tuned,
    marks: Sequence[Mark] = (),
) -> Html:
    configured, taken = tuned.configured.batch_size, tuned.final.shape.batch_size
    lines = [Line("", points), Line("", points, style="dots")]
    named = {"configured and taken": taken} if configured == taken else {}
    named = named or {"configured": configured, "taken": taken}
    for number, (label, size) in enumerate(named.items()):
        lines.append(Line(label, [p for p in points if p[0] == size], number + 1, "dots"))
    chart = Chart(
        key,
        title,
        lines,
        unit,
        scale="count",
        along="batch size",
        marks=marks,
        absent="Nothing fitted.",
    )
    return line_chart(chart)


def _options(tuned: Tuned) -> Html:
    parts: list[Html] = []
    if tuned.options:
        parts.append(
            page.table(
                OPTION_HEADER,
                option_cells(tuned),
                key="table-options",
                numeric=(2, 3, 4),
                labels=(0, 1),
            )
        )
    if tuned.left_alone:
        alone = page.table(
            ("not tried", "why"), tuned.left_alone.items(), key="table-alone", labels=(0,)
        )
        parts.append(alone)
    return page.join(parts)
