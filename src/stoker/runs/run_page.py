"""The page of `stoker report`: one run in full, or several side by side with their ratio.

Enters: `RunRecord`s. Leaves: one HTML page as text, which needs no network. Costs: string work, about 60 kB
and 30 ms per run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stoker import page
from stoker.page import Html, Section
from stoker.page.charts import Chart, chart_grid, line_chart
from stoker.report import as_mapping, as_mappings, as_number, as_whole
from stoker.runs.evaluation import metric_words
from stoker.runs.evaluation_page import evaluation_section
from stoker.runs.figures import gpu_charts, loss_charts, memory_charts, speed_charts
from stoker.runs.record import QUANTITIES, RunRecord, format_rate, format_share, ratio
from stoker.runs.telemetry import BUSY_FOOTNOTE
from stoker.strict_json import json_text
from stoker.units import format_bytes, format_count, format_seconds, local_time

_STATE_KINDS = {
    "running": "note", "done": "good", "stopped": "warn", "failed": "refuse", "cut short": "warn",
    "empty": "warn",
}  # fmt: skip
_MAX_EPOCHS = 200
_MAX_EVENTS = 300


def run_page(runs: Sequence[RunRecord], previous: RunRecord | None = None) -> str:
    """Return the page of one run, or of several, which are compared with the first.

    `previous` is the run before a single one; the page lists what has changed since.
    """
    runs = with_unique_names(runs)
    sections = [
        Section("summary", "Summary", _summary(runs)),
        *_per_run(runs, "worth", "Evaluation", _worth),
        *([Section("since", "Since the last run", _since(runs[0], previous))] if previous else []),
        *_per_run(runs, "findings", "Findings", _findings),
        Section("speed", "Speed", _charts(speed_charts(runs))),
        Section(
            "metrics", "Loss and metrics", page.join([_charts(loss_charts(runs)), _results(runs)])
        ),
        Section("memory", "Memory", _charts(memory_charts(runs))),
        Section("gpu", "GPU", _gpu(runs)),
        *_per_run(runs, "events", "Events", _events),
        *_per_run(runs, "data", "Data", _data),
        *_per_run(runs, "plan", "Plan and choices", _plan),
        *_per_run(runs, "epochs", "Epochs", _epochs),
        Section("config", "Config", _config(runs)),
        *_per_run(runs, "machine", "Machine", _machine),
    ]
    title = f"stoker report: {', '.join(run.name for run in runs)}"
    return page.html(title, sections, subtitle=verdict(runs))


def with_unique_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs with unique names: their paths, if folders have the same name."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    names = [page.shorten(name, 74) for name in names]  # before they are numbered: ends may be cut
    numbered = [
        f"{name} ({names[:place].count(name) + 1})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]
    return [replace(run, name=name) for run, name in zip(runs, numbered, strict=True)]


def verdict(runs: Sequence[RunRecord]) -> str:
    """Return the conclusion of the page in one sentence."""
    first = runs[0]
    if len(runs) == 1:
        rate, waited = first.samples_per_second, first.wait_share
        if rate is None:
            return first.told
        share = f", {format_share(waited)} of the time waiting for batches"
        return f"{first.told} {format_rate(rate)} samples/s{'' if waited is None else share}."
    known = [(run.samples_per_second, run) for run in runs if run.samples_per_second]
    if first.samples_per_second is None or len(known) < 2:
        return f"{len(runs)} runs; there is no rate to compare."
    disturbed = [run for run in runs if run.is_disturbed]
    if disturbed:
        busy = ", ".join(f"{run.other_cores:.1f} cores in {run.name}" for run in disturbed)
        rates = ", ".join(f"{run.name} {format_rate(run.samples_per_second)}" for run in runs)
        return f"The machine was busy with other work ({busy}): rates do not compare. Samples/s: {rates}."
    rate, best = max(known, key=lambda pair: pair[0] or 0.0)
    if best is first:
        return f"{first.name} is the fastest of {len(runs)}: {format_rate(rate)} samples/s."
    times = (rate or 0.0) / first.samples_per_second
    return f"{best.name} trains {times:.2f} times as fast as {first.name}: {format_rate(rate)} samples/s."


def _per_run(
    runs: Sequence[RunRecord], key: str, title: str, make: Callable[[RunRecord, str], Html | None]
) -> Iterator[Section]:
    """Yield a section with one part per run; none if no run has a part."""
    parts = [(run, make(run, f"{key}-{number}")) for number, run in enumerate(runs)]
    first = parts[0][1]
    if first is not None and len(runs) > 1 and all(part == first for _, part in parts):
        same = page.paragraph("The same for all runs.", quiet=True)
        yield Section(key, title, page.join([same, first]))
        return
    told = [
        page.join([_heading(run.name) if len(runs) > 1 else Html(""), part])
        for run, part in parts
        if part is not None
    ]
    if told:
        yield Section(key, title, page.join(told))


def _heading(text: str) -> Html:
    return Html(f"<h3>{page.name(text)}</h3>")


def _charts(charts: Sequence[Chart]) -> Html:
    return chart_grid(line_chart(chart) for chart in charts)


# -- summary -------------------------------------------------------------------------------------


def _summary(runs: Sequence[RunRecord]) -> Html:
    parts = [_comparison(runs)] if len(runs) > 1 else [_figures(runs[0])]
    for run in runs:
        who = f"{run.name}: " if len(runs) > 1 else ""
        parts += [page.paragraph(f"{who}{problem}", quiet=True) for problem in run.problems]
        if run.state == "running":
            parts.append(page.paragraph(f"{who}{run.told} Make the page again later.", quiet=True))
    return page.join(parts)


def _figures(run: RunRecord) -> Html:
    facts: dict[str, str] = {"State": page.badge(run.state, _STATE_KINDS[run.state])}
    recipe = run.config.get("recipe.name")
    if recipe:
        facts["Recipe"] = str(recipe)
    for quantity in QUANTITIES:
        value = quantity.value(run)
        if value is not None:
            facts[quantity.title] = quantity.text(value)
    if run.began is not None:
        began = local_time(run.began)
        facts["Began"] = f"{began:%Y-%m-%d %H:%M}"
    if run.num_sessions > 1:
        facts["Resumed"] = f"{format_count(run.num_sessions - 1, 'time')}; pauses left out"
    facts["Folder"] = str(run.folder)
    return page.facts(facts)


def _comparison(runs: Sequence[RunRecord]) -> Html:
    header = ["", runs[0].name]
    for run in runs[1:]:
        header += [run.name, "ratio"]
    state = ["State", page.badge(runs[0].state, _STATE_KINDS[runs[0].state])]
    for run in runs[1:]:
        state += [page.badge(run.state, _STATE_KINDS[run.state]), ""]
    rows = [state]
    for quantity in QUANTITIES:
        values = [quantity.value(run) for run in runs]
        if all(value is None for value in values):
            continue
        row = [quantity.title, quantity.text(values[0])]
        for run, value in zip(runs[1:], values[1:], strict=True):
            times = ratio(quantity, runs[0], run)
            row += [quantity.text(value), "" if times is None else f"× {times:.2f}"]
        rows.append(row)
    rows += _test_rows(runs)
    table = page.figures_table(header, rows, key="comparison")
    told = f"Ratios are to {runs[0].name}. Rates and epochs leave out each run's first epoch."
    return page.join([table, page.paragraph(told, quiet=True)])


def _test_rows(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return the test metrics that all runs have, the one they are compared by first."""
    known = [run.evaluation for run in runs if run.evaluation is not None]
    if len(known) < len(runs) or len({each.compared_by for each in known}) > 1:
        return []
    shared = [name for name in known[0].metrics if all(name in each.metrics for each in known)]
    shared.sort(key=lambda name: name != known[0].compared_by[0])
    rows = []
    for name in shared:
        values = [each.metrics[name] for each in known]
        row = [page.name(f"Test {metric_words(name)}"), page.format_number(values[0])]
        for value in values[1:]:
            row += [page.format_number(value), ""]
        rows.append(row)
    return rows


# -- parts ---------------------------------------------------------------------------------------


def _worth(run: RunRecord, key: str) -> Html | None:
    return None if run.evaluation is None else evaluation_section(run.evaluation, key)


def _data(run: RunRecord, key: str) -> Html | None:
    """Return the splits, and the input that is in none of them, counted by reason."""
    if not run.data:
        return None
    splits = {
        name: format_count(as_whole(n)) for name, n in as_mapping(run.data.get("splits")).items()
    }
    parts = [page.facts({"Store": str(run.data.get("store", "")), **splits})]
    counts = as_mapping(run.data.get("counts"))
    rows = [
        (page.name(str(reason)), format_count(as_whole(count)), kind)
        for kind in ("refused", "ignored")
        for reason, count in as_mapping(counts.get(kind)).items()
    ]
    if rows:
        header = ("left out, and why", "pieces", "how")
        parts.append(page.table(header, rows, key=f"{key}-left", numeric=(1,), wide=(0,)))
    elif counts:
        parts.append(page.paragraph("Nothing was left out when the store was packed.", quiet=True))
    if "unused" in splits:
        told = "Unused samples are in no split: purged at a border in time, dropped by an option, or not drawn."
        parts.append(page.paragraph(told, quiet=True))
    repairs = [
        f"{name}: {', '.join(map(str, made))}"
        for name, made in as_mapping(run.data.get("repairs")).items()
        if isinstance(made, list)
    ]
    return page.join([*parts, *([_listed("Repaired", repairs)] if repairs else [])])


def _since(run: RunRecord, before: RunRecord) -> Html:
    """Return how a run differs from the one before it: settings, data, code, result, and how busy the machine was."""
    began = "" if before.began is None else f", {local_time(before.began):%Y-%m-%d %H:%M}"
    parts = [page.paragraph(f"The run before it in the same folder: {before.name}{began}.")]
    facts = {}
    for title, name in (("Data", "digest"), ("Code", "code")):
        one, two = before.data.get(name), run.data.get(name)
        known = one is not None and two is not None
        facts[title] = "not recorded" if not known else "the same" if one == two else "changed"
    for title, each in (("Other work then", before), ("Other work now", run)):
        cores = "n/a" if each.other_cores is None else f"{each.other_cores:.1f} cores"
        facts[title] = f"{cores}{', disturbed: rates do not compare' if each.is_disturbed else ''}"
    parts.append(page.facts(facts))
    if run.config and before.config:
        parts.append(_differences([before, run]))
    metrics = [each.evaluation.metrics if each.evaluation else {} for each in (before, run)]
    rows = [_metric_row(name, metrics) for name in metrics[1] if name in metrics[0]]
    if rows:
        header = ("test metric", before.name, run.name)
        parts.append(page.figures_table(header, rows, key="since-metrics"))
    return page.join(parts)


def _metric_row(name: str, columns: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    values = (page.format_number(as_number(column.get(name))) for column in columns)
    return page.name(metric_words(name)), *values


def _findings(run: RunRecord, key: str) -> Html | None:
    if not run.findings:
        return None
    rows = []
    for finding in run.findings:
        name, evidence = str(finding.get("name", "")), finding.get("evidence")
        lines = evidence if isinstance(evidence, list) else filter(None, [evidence])
        title = Html(f"{page.name(str(finding.get('title') or name))}<br>{page.code(name)}")
        remedy = page.instruction(str(finding.get("remedy", "")))
        rows.append((title, page.bullets(map(str, lines)), remedy, _gain(finding)))
    header = ("finding", "evidence", "remedy", "predicted")
    return page.table(header, rows, key=f"{key}-table", wide=(0, 1, 2), labels=(3,))


def _gain(finding: Mapping[str, Any]) -> str:
    """Return "× 1.8 (1.5 to 2.1)", how many times the samples/s; n/a where nothing was predicted."""
    gain = as_mapping(finding.get("gain"))
    low, likely, high = (as_number(gain.get(name)) for name in ("low", "likely", "high"))
    if likely is None:
        return "n/a"
    span = "" if low is None or high is None else f" ({low:.2g} to {high:.2g})"
    return f"× {likely:.2g}{span}"


def _results(runs: Sequence[RunRecord]) -> Html:
    parts = []
    for number, run in enumerate(runs):
        columns = [as_mapping(run.result.get(name)) for name in ("baseline", "val", "test")]
        names = dict.fromkeys(name for column in reversed(columns) for name in column)
        if not names:
            continue
        rows = [_metric_row(str(name), columns) for name in names]
        parts += [_heading(f"{run.name}: best checkpoint" if len(runs) > 1 else "Best checkpoint")]
        header = ("metric", "chance", "validation", "test")
        parts.append(page.figures_table(header, rows, key=f"result-{number}"))
    return page.join(parts)


def _gpu(runs: Sequence[RunRecord]) -> Html:
    charts = gpu_charts(runs)
    if not charts:
        notes = {event.text for run in runs for event in run.events if event.kind == "telemetry"}
        why = f": {'; '.join(sorted(notes))}" if notes else ""
        return page.paragraph(f"No GPU was read{why}.", quiet=True)
    parts = [_charts(charts)]
    for run in runs:
        who = f"{run.name}: " if len(runs) > 1 else ""
        names = "; ".join(page.shorten(run.gpu_name(index)) for index in run.gpu_indices)
        held = ", ".join(
            f"{page.shorten(word, 60)} {share:.0%}" for word, share in run.throttle_shares.items()
        )
        told = f"{who}{names}. Clocks held down by: {held or 'nothing'} (share of readings)."
        parts.append(page.paragraph(told))
    parts.append(page.paragraph(BUSY_FOOTNOTE[:1].upper() + BUSY_FOOTNOTE[1:], quiet=True))
    return page.join(parts)


def _events(run: RunRecord, key: str) -> Html | None:
    # A missing GPU is mentioned once, in the GPU section.
    events = [event for event in run.events if run.gpu_indices or event.kind != "telemetry"]
    if not events:
        return None
    rows = [
        (
            format_seconds(event.at) if event.at >= 1 else "0 s",
            "" if event.step is None else f"{event.step:,}",
            event.kind,
            page.shorten(event.text, 600),
        )
        for event in events[:_MAX_EVENTS]
    ]
    header = ("after", "step", "about", "what happened")
    parts = [page.table(header, rows, key=f"{key}-table", numeric=(0, 1), labels=(2,), wide=(3,))]
    if (left := len(events) - _MAX_EVENTS) > 0:
        parts.append(page.paragraph(f"{left:,} more are in the run log.", quiet=True))
    return page.join(parts)


def _plan(run: RunRecord, key: str) -> Html | None:
    parts = []
    lines = as_mappings(run.plan.get("lines"))
    if lines:
        rows = [
            (
                page.name(str(line.get("where", ""))),
                page.name(str(line.get("what") or line.get("name") or "")),
                format_bytes(as_number(line.get("num_bytes"))),
                page.shorten(str(line.get("reason", "")), 400),
            )
            for line in lines
        ]
        header = ("where", "what", "bytes", "reason")
        parts.append(
            page.table(header, rows, key=f"{key}-lines", numeric=(2,), labels=(0,), wide=(3,))
        )
    reasons = run.plan.get("reasons")
    if isinstance(reasons, list):
        parts.append(_listed("Why the plan is so", [str(reason) for reason in reasons]))
    if run.notes:
        parts.append(_listed("What the run chose, and why", run.notes))
    return page.join(parts) if parts else None


def _listed(title: str, lines: Sequence[str]) -> Html:
    return page.join([_heading(title), page.bullets(lines, 600)])


def _epochs(run: RunRecord, key: str) -> Html | None:
    if not run.epochs:
        return None
    names = list(dict.fromkeys(name for epoch in run.epochs for name in epoch.metrics))[:8]
    shown = run.epochs[-_MAX_EPOCHS:]
    rows = [
        (
            f"{epoch.number + 1}",
            page.format_number(epoch.train_loss),
            *(page.format_number(epoch.metrics.get(name)) for name in names),
            format_rate(epoch.samples_per_second),
            format_share(epoch.wait_share),
            format_seconds(epoch.seconds),
        )
        for epoch in shown
    ]
    heads = [page.shorten(f"validation {metric_words(name)}", 40) for name in names]
    header = ("epoch", "training loss", *heads, "samples/s", "waited", "time")
    table = page.table(header, rows, key=f"{key}-table", numeric=range(len(header)), tight=True)
    count = format_count(len(run.epochs), "epoch")
    cut = f", the last {len(shown)} of them" if len(shown) < len(run.epochs) else ""
    return table if len(rows) <= 12 else page.details(f"{count}{cut}", table)


# -- config and machine --------------------------------------------------------------------------


def _config(runs: Sequence[RunRecord]) -> Html:
    told = [run for run in runs if run.config]
    if not told:
        return page.paragraph("Not recorded: this log was not made by `stoker train`.", quiet=True)
    parts = []
    if len(told) > 1:
        parts.append(_differences(told))
    for number, run in enumerate(told):
        rows = [
            (page.name(name), page.code(_plain(value)), page.name(str(run.reasons.get(name, ""))))
            for name, value in sorted(run.config.items())
        ]
        table = page.table(
            ("setting", "value", "from"), rows, key=f"config-{number}", labels=(0,), wide=(1, 2)
        )
        who = f"{run.name}: all" if len(runs) > 1 else "All"
        parts.append(page.details(f"{who} {format_count(len(rows), 'setting')}", table))
    return page.join(parts)


def _differences(runs: Sequence[RunRecord]) -> Html:
    names = sorted({name for run in runs for name in run.config} - {"run.dir", "notes"})
    rows = []
    for name in names:
        values = [_plain(run.config.get(name)) for run in runs]
        if len(set(values)) > 1:
            rows.append((page.name(name), *(page.code(value) for value in values)))
    if not rows:
        return page.paragraph("All runs have the same settings.")
    header = ("differs", *(page.shorten(run.name, 60) for run in runs))
    return page.table(header, rows, key="config-differences", labels=(0,))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value, ensure_ascii=False, default=str)


def _machine(run: RunRecord, key: str) -> Html | None:  # noqa: ARG001  one signature for all parts
    machine = run.machine
    if not machine:
        return None
    disk = as_mapping(machine.get("disk"))
    gpus = as_mappings(machine.get("gpus"))
    facts = {
        "CPU": machine.get("cpu"),
        "Cores usable": machine.get("cores_usable"),
        "RAM": format_bytes(as_number(machine.get("ram_total_bytes"))),
        "RAM limit": format_bytes(as_number(machine.get("ram_limit_bytes"))),
        "Disk": f"{disk.get('filesystem') or 'n/a'}, {disk.get('bandwidth_class') or 'n/a'}",
        "GPU": "; ".join(
            f"{gpu.get('name') or 'n/a'}, {format_bytes(as_number(gpu.get('memory_total_bytes')))}"
            for gpu in gpus
        )
        or "none",
        "Driver": machine.get("driver"),
        "torch": machine.get("torch"),
        "CUDA": machine.get("torch_cuda"),
        "Python": machine.get("python"),
        "System": machine.get("os"),
    }
    texts = {name: "n/a" if value is None else str(value) for name, value in facts.items()}
    return page.facts(texts)
