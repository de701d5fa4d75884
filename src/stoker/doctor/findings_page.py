"""The page of `stoker doctor --html`: the verdict, the findings, the parts of a step, a timeline of a few steps.

Enters: a `Consultation`. Leaves: one self-contained HTML page as text. Costs string work.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker import page
from stoker.doctor.cases import milliseconds
from stoker.doctor.findings import Consultation, Finding, Outcome, describe_changes
from stoker.doctor.gains import StepShare, split_step
from stoker.doctor.measurements import Measurements, TimelineSpan
from stoker.measure.readings import Spread
from stoker.page import Html
from stoker.page.charts import round_ticks
from stoker.units import format_bytes

_PART_COLOURS = {"wait": "--c1", "load": "--c3", "host": "--c4", "compute": "--bar"}
_SPAN_COLOURS = {
    "wait": "--c1", "load": "--c3", "copy": "--note", "sync": "--c4", "step": "--line",
    "forward": "--c0", "backward": "--c5", "optimizer": "--c2", "kernels": "--c2",
}  # fmt: skip
_MOST_SPANS = 600
_MOST_PROSE = 400
_LANE_HEIGHT, _SPAN_HEIGHT = 24, 16
_NARROW = 0.15
"""Least width of a span in percent of the picture's width: a thinner one would be invisible."""


def findings_page(consultation: Consultation) -> str:
    """Return the page."""
    measured = consultation.measurements
    sections = [page.Section("summary", "Summary", _summary(consultation))]
    if consultation.outcome is not None:
        body = _outcome(consultation.outcome)
        sections.append(page.Section("outcome", "Before, predicted, after", body))
    found = _findings(consultation, measured.kind == "job")
    sections.append(page.Section("findings", "Findings", found))
    if measured.step_seconds is not None:
        sections.append(page.Section("step", "Where a step's time goes", _waterfall(measured)))
    if measured.timeline:
        sections.append(page.Section("timeline", "A few steps", draw_timeline(measured.timeline)))
    if measured.ablation is not None:
        sections.append(page.Section("alone", "Each part alone", _alone(measured)))
    if measured.loader is not None:
        sections.append(page.Section("loader", "The loader's work", _loader(measured)))
    if measured.notes:
        sections.append(page.Section("notes", "Notes", page.bullets(measured.notes)))
    return page.html(measured.subject, sections, subtitle=f"{consultation.verdict}.")


def _summary(consultation: Consultation) -> Html:
    measured = consultation.measurements
    machine = measured.machine
    share = measured.wait_share
    shown = {
        "Samples per second": _rate(measured.samples_per_second),
        "Step": spread_text(measured.step_seconds),
        "Waiting for data": "n/a" if share is None else f"{share:.0%}",
        "Steps measured": f"{measured.steps:,}",
        "Device": machine.device_name or machine.device,
    }
    if measured.precision:
        shown["Precision"] = measured.precision
    if measured.kernels is not None:
        shown["Device busy"] = f"{measured.kernels.busy_share:.0%}"
        shown["Kernels per step"] = f"{measured.kernels.per_step:,.0f}"
    held = measured.memory.device_bytes or measured.memory.host_bytes
    shown["Memory held"] = format_bytes(held)
    return page.facts(shown)


def spread_text(spread: Spread | None) -> str:
    """Return median and quartiles as "12.3 ms (11.9 ms to 13 ms)"; "n/a" if not measured."""
    if spread is None:
        return "n/a"
    if spread.count < 2:
        return milliseconds(spread.median)
    return (
        f"{milliseconds(spread.median)} ({milliseconds(spread.low)} to {milliseconds(spread.high)})"
    )


def gain_text(finding: Finding) -> str:
    """Return "× 1.80 (1.50 to 2.10)", or a word if the remedy makes nothing faster."""
    gain = finding.gain
    if gain.likely <= 1.0:
        return "saves the run" if finding.ends_the_run else "n/a"
    return f"× {gain.likely:.2f} ({gain.low:.2f} to {gain.high:.2f})"


# -- findings --------------------------------------------------------------------------------------


def _findings(consultation: Consultation, of_job: bool) -> Html:
    if not consultation.findings:
        said = consultation.verdict
        return page.paragraph(f"{said[:1].upper()}{said[1:]}.")
    rows = [
        (
            page.join([page.badge(f"{number}", "note"), " ", page.name(finding.name)]),
            _gain(finding),
            page.join([_prose(finding.title), page.bullets(finding.evidence)]),
            _remedy(finding, of_job),
        )
        for number, finding in enumerate(consultation.findings, 1)
    ]
    header = ("finding", "predicted gain", "evidence", "remedy")
    table = page.table(header, rows, key="findings-table", labels=(0, 1), wide=(2, 3))
    told = filter(None, (consultation.overlap, *consultation.behind))
    return page.join([table, *(page.paragraph(f"{line}.") for line in told)])


def _gain(finding: Finding) -> Html:
    label = page.badge(gain_text(finding), "refuse" if finding.ends_the_run else "good")
    after = finding.predicted_samples_per_second
    if after is None or finding.gain.likely <= 1:
        return label
    return page.join([label, page.paragraph(f"{after[1]:,.0f} samples/s", quiet=True)])


def _remedy(finding: Finding, of_job: bool) -> Html:
    """Return the remedy in words, and as a change of the config (for a job) or of the code (for a script)."""
    parts: list[Html] = [_prose(finding.remedy)]
    changes = describe_changes(finding.patch.config)
    if of_job and changes and changes not in finding.remedy:
        parts.append(_lines(changes.split(", ")))
    script = [*finding.patch.script.splitlines(), *filter(None, [finding.patch.replacement])]
    if not of_job and script:
        where = [f"{finding.patch.where}:"] if finding.patch.where else []
        parts.append(_lines([*where, *script]))
    parts.append(page.paragraph(finding.docs, quiet=True))
    return page.join(parts)


def _prose(text: str) -> Html:
    return page.paragraph(page.shorten(text, _MOST_PROSE))


def _lines(lines: Sequence[str]) -> Html:
    return Html("<p>" + "<br>".join(page.code(line) for line in lines) + "</p>")


def _outcome(outcome: Outcome) -> Html:
    predicted = outcome.predicted
    said = "n/a"
    if predicted is not None:
        said = f"{predicted[1]:,.0f} ({predicted[0]:,.0f} to {predicted[2]:,.0f})"
    facts = {
        "Before, samples/s": _rate(outcome.before),
        "Predicted": said,
        "After, samples/s": _rate(outcome.after),
        "Measured gain": "n/a" if outcome.ratio is None else f"× {outcome.ratio:.2f}",
    }
    failed = [_prose(f"{line}.") for line in (outcome.failure, outcome.miss) if line]
    return page.join([page.paragraph(page.code(outcome.change)), page.facts(facts), *failed])


def _rate(value: float | Spread | None) -> str:
    value = value.median if isinstance(value, Spread) else value
    return "n/a" if value is None else f"{value:,.0f}"


# -- pictures --------------------------------------------------------------------------------------


def _waterfall(measured: Measurements) -> Html:
    """Return a bar chart of the parts of a step, each bar starting where the previous one ends."""
    parts = split_step(measured)
    whole = max(sum(part.seconds for part in parts), 1e-12)
    rows, at = [], 0.0
    for part in parts:
        rows.append(_waterfall_row(part, at / whole * 100, part.seconds / whole))
        at += part.seconds
    step = measured.step_seconds
    assert step is not None
    under = f"Parts of a usual step of {milliseconds(step.median)}, one after the other."
    return page.join(
        [
            Html(f'<div class="bars" id="waterfall">{"".join(rows)}</div>'),
            page.paragraph(under, quiet=True),
        ]
    )


def _waterfall_row(part: StepShare, left: float, share: float) -> str:
    label = f'{page.escape(part.label)} <span class="quiet">{share:.0%}</span>'
    return (
        f'<div class="line"><div class="who">{label}</div>'
        f'<div class="how">{page.escape(milliseconds(part.seconds))}</div>'
        '<svg class="pic" aria-hidden="true" viewBox="0 0 100 10" preserveAspectRatio="none">'
        f'<path class="base" d="M0 5h100"/>{_bar(_PART_COLOURS[part.kind], left, share * 100, 1, 8)}</svg></div>'
    )


def _bar(colour: str, left: float, wide: float, top: float, height: float) -> str:
    wide = max(wide, _NARROW)
    return (
        f'<path style="fill:var({colour})" '
        f'd="M{min(left, 100 - wide):.3f} {top:g}h{wide:.3f}v{height:g}h-{wide:.3f}z"/>'
    )


def draw_timeline(spans: Sequence[TimelineSpan]) -> Html:
    """Return a drawing to scale of a few steps, one row per lane, with a description for screen readers."""
    spans = spans[:_MOST_SPANS]
    end = max((span.start_seconds + span.seconds for span in spans), default=0.0)
    if end <= 0:
        return page.paragraph("No step was drawn.", quiet=True)
    lanes = list(dict.fromkeys(span.lane for span in spans))
    rows = "".join(_lane(lane, [s for s in spans if s.lane == lane], end) for lane in lanes)
    kinds = [kind for kind in _SPAN_COLOURS if any(span.kind == kind for span in spans)]
    ticks = [tick for tick in round_ticks(0.0, end * 1e3) if tick <= end * 1e3]
    names = "".join(
        f'<span style="left:{tick / (end * 1e3) * 100:.2f}%">{page.format_number(tick)}</span>'
        for tick in ticks
    )
    axis = f'<div class="line axis"><div class="pic">{names}</div></div>'
    steps = len({span.step for span in spans})
    told = f"{steps} steps in {milliseconds(end)}."
    return page.join(
        [
            page.legend((kind, f"var({_SPAN_COLOURS[kind]})") for kind in kinds),
            Html(f'<div class="bars" id="lanes">{rows}{axis}</div>'),
            page.paragraph(f"{told} Time runs from left to right, in milliseconds.", quiet=True),
        ]
    )


def _lane(lane: str, spans: Sequence[TimelineSpan], end: float) -> str:
    # Wide spans first, so that a step does not cover its forward and backward pass.
    ordered = sorted(spans, key=lambda span: -span.seconds)
    top = (_LANE_HEIGHT - _SPAN_HEIGHT) / 2
    marks = "".join(
        _bar(
            _SPAN_COLOURS.get(span.kind, "--quiet"),
            span.start_seconds / end * 100,
            span.seconds / end * 100,
            top,
            _SPAN_HEIGHT,
        )
        for span in ordered
    )
    edges = "".join(
        f"M{span.start_seconds / end * 100:.3f} 0v{_LANE_HEIGHT}"
        for span in spans
        if span.kind == "wait"
    )
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.kind] = totals.get(span.kind, 0.0) + span.seconds
    said = ", ".join(f"{kind} {milliseconds(seconds)}" for kind, seconds in totals.items())
    told = page.escape(page.shorten(f"{lane}: {said}", 400))
    return (
        '<div class="line"><div class="who" style="min-width:0;overflow-wrap:anywhere">'
        f'{page.name(lane)}</div><div class="how"></div>'
        f'<svg class="pic" role="img" aria-label="{told}" '
        f'viewBox="0 0 100 {_LANE_HEIGHT}" preserveAspectRatio="none" style="height:{_LANE_HEIGHT}px">'
        f'{marks}<path class="base" d="{edges}"/></svg></div>'
    )


# -- tables ----------------------------------------------------------------------------------------


def _alone(measured: Measurements) -> Html:
    ablation = measured.ablation
    assert ablation is not None
    rows = [
        ("everything together", spread_text(ablation.together_seconds)),
        ("the step alone, on one batch that stays", spread_text(ablation.step_seconds)),
        ("the loader alone", spread_text(ablation.loader_seconds)),
        ("host to device alone", spread_text(ablation.copy_seconds)),
    ]
    tables = [
        page.table(("per batch", "median (quartiles)"), rows, key="alone-table", numeric=(1,))
    ]
    if ablation.larger_batches and ablation.step_seconds is not None:
        tables.append(_batches(measured))
    if ablation.alternatives:
        tried = [
            (
                page.join([page.code(describe_changes(item.changes)), f" {item.reason}"]),
                item.failure or _rate(item.samples_per_second),
            )
            for item in ablation.alternatives
        ]
        now = ablation.together_rate
        rows = [("as it is", _rate(now)), *tried]
        tables.append(Html("<h3>What was tried</h3>"))
        tables.append(
            page.table(("config", "samples/s"), rows, key="tried-table", numeric=(1,), wide=(0,))
        )
    return page.join(tables)


def _batches(measured: Measurements) -> Html:
    ablation, loader = measured.ablation, measured.loader
    assert ablation is not None
    assert ablation.step_seconds is not None
    sizes = list(ablation.larger_batches)
    if loader is not None and loader.batch_size:
        sizes.insert(0, (loader.batch_size, ablation.step_seconds.median))
    rows = [
        (f"{size:,}", milliseconds(seconds), _rate(size / max(seconds, 1e-12)))
        for size, seconds in sizes
    ]
    header = ("batch", "step alone", "samples/s")
    table = page.table(header, rows, key="batch-table", numeric=(0, 1, 2))
    return page.join([Html("<h3>Larger batches, the step alone</h3>"), table])


def _loader(measured: Measurements) -> Html:
    loader = measured.loader
    assert loader is not None
    facts = {
        "Kind": f"{loader.kind}, {loader.tier}" if loader.tier else loader.kind,
        "Threads" if loader.kind == "stoker" else "Workers": f"{loader.workers}",
        "Batch": "n/a" if loader.batch_size is None else f"{loader.batch_size:,}",
        "Bytes of a batch": format_bytes(loader.batch_bytes),
    }
    if loader.where:
        facts["Where"] = loader.where
    rows = [
        (words, "n/a" if seconds is None else milliseconds(seconds))
        for words, seconds in loader.work.parts.items()
    ]
    table = page.table(("work on one batch", "time"), rows, key="loader-table", numeric=(1,))
    return page.join([page.facts(facts), table])
