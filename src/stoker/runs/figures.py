"""Charts of one run or several, as values for the page and for files.

Enters: `RunRecord`s. Leaves: `Chart`s in groups; an empty chart says why it is empty. Costs a pass over the
telemetry per curve; a curve has 300 points at most.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from stoker.errors import MissingExtraError, unwritable
from stoker.ownership import SIGNATURE, check_home, writing
from stoker.page import format_number
from stoker.page.charts import COLOURS, Chart, Line, Mark, Points, Style, thin
from stoker.report import as_mapping, as_number
from stoker.runs.evaluation import metric_words
from stoker.runs.record import RunRecord, largest
from stoker.runs.telemetry import BUSY, MEMORY, TEMPERATURE
from stoker.units import GB, GIB, MIB

_MAX_METRICS = 6
# Losses that span more than this are drawn on a logarithmic axis.
_WIDE = 30.0


def speed_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return samples/s, share of waiting, and cores used by the process."""
    rates, waits = [], []
    # Readings count the loader alone; epochs and the summary also count the Trainer's own work on a batch.
    waited_for = "batches"
    for number, run in enumerate(runs):
        rate, wait = run.track("run", "samples_per_second"), run.track("run", "wait_share")
        telling = any(value is not None for _, value in rate)
        style: Style = "plain" if telling else "dots"
        if telling:
            waited_for = "the loader"
        else:
            rate = [(epoch.at, epoch.samples_per_second) for epoch in run.epochs]
            wait = [(epoch.at, epoch.wait_share) for epoch in run.epochs]
        rates.append(Line(_label(runs, run), rate, number, style))
        waits.append(_scaled(Line(_label(runs, run), wait, number, style), 100))
    cores = _process_lines(runs, "cpu_cores")
    return [
        _settled(Chart("throughput", "Training rate", rates, "samples/s")),
        _settled(Chart("waits", f"Time spent waiting for {waited_for}", waits, "%", high=10)),
        _settled(Chart("cores", "Cores that the process keeps busy", cores, "cores")),
    ]


def loss_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the losses by step, and every metric of validation by epoch."""
    lines = list(_loss_lines(runs))
    values = [value for line in lines for value in line.values]
    wide = bool(values) and min(values) > 0 and max(values) > _WIDE * min(values)
    absent = "No loss was read yet."
    loss = Chart("loss", "Loss", lines, "", "count", "step", low=None, is_log=wide, absent=absent)
    names = dict.fromkeys(name for run in runs for epoch in run.epochs for name in epoch.metrics)
    metrics = [name for name in names if name != "loss"][:_MAX_METRICS]
    return [loss, *(_metric_chart(number, name, runs) for number, name in enumerate(metrics))]


def _loss_lines(runs: Sequence[RunRecord]) -> Iterator[Line]:
    several = len(runs) > 1
    for number, run in enumerate(runs):
        who = f"{run.name}, " if several else ""
        yield Line(f"{who}training", thin(run.losses), number)
        validation = [
            (float(epoch.step), epoch.metrics.get("loss"))
            for epoch in run.epochs
            if epoch.step is not None
        ]
        yield Line(f"{who}validation", thin(validation), number if several else 1, "dots")


def _metric_chart(number: int, name: str, runs: Sequence[RunRecord]) -> Chart:
    lines = [
        Line(
            _label(runs, run),
            thin([(float(epoch.number + 1), epoch.metrics.get(name)) for epoch in run.epochs]),
            place,
            "dots" if len(run.epochs) <= 40 else "plain",
        )
        for place, run in enumerate(runs)
    ]
    chance = as_number(as_mapping(runs[0].result.get("baseline")).get(name))
    marks = [] if chance is None else [Mark("chance", chance)]
    made = runs[0].evaluation
    best = None if made is None else made.best_baseline
    if made is not None and best is not None and name in made.baselines[best[0]]:
        value = made.baselines[best[0]][name]
        marks.append(Mark(f"{best[0]}, on test samples", value, is_dashed=True))
    title = f"Validation: {metric_words(name)}"
    return Chart(f"metric-{number}", title, lines, "", "count", "epoch", 1.0, marks, low=None)


def memory_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return device memory against its total, where a device was used, and the memory of the process."""
    resident = _process_lines(runs, "resident_bytes")
    divisor, unit = _byte_unit(resident)
    host = [_scaled(line, 1 / divisor) for line in resident]
    device = _device_memory(runs)
    return [
        *([] if device.is_empty else [device]),
        _settled(Chart("host-memory", "Memory of the process", host, unit), peaks=True),
    ]


def _device_memory(runs: Sequence[RunRecord]) -> Chart:
    lines = []
    for number, run in enumerate(runs):
        kinds = [("reserved_bytes", "held by torch"), ("allocated_bytes", "in tensors")]
        for place, (name, words) in enumerate(kinds[: 1 if len(runs) > 1 else 2]):
            label = run.name if len(runs) > 1 else words
            track = run.track("run", name)
            lines.append(Line(label, track, number or place, "plain" if not place else "dashed"))
    if len(runs) == 1:
        for place, index in enumerate(runs[0].gpu_indices):
            track = runs[0].gpu_track(index, "memory_used_bytes")
            lines.append(Line(f"GPU {index}, all processes", track, place + 2))
    divisor, unit = _byte_unit(lines)
    total = largest(value for run in runs for value in run.gpu_values("memory_total_bytes"))
    marks = []
    if total is not None:
        whole = total / divisor
        target = f"target {MEMORY.low:.0f} to {MEMORY.high:.0f} %"
        marks = [Mark(target, whole * MEMORY.low / 100, whole * MEMORY.high / 100)]
        marks.append(Mark("whole GPU", whole))
    drawn = [_scaled(line, 1 / divisor) for line in lines]
    chart = Chart("device-memory", "Device memory", drawn, unit, marks=marks)
    return _settled(chart, peaks=True)


def gpu_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return busy share, temperature, power and PCIe traffic of the GPUs over time."""
    if not any(run.gpu_indices for run in runs):
        return []
    limit = largest(value for run in runs for value in run.gpu_values("power_limit_watts"))
    power_marks = [] if limit is None else [Mark("limit", limit)]
    busy_mark = Mark(f"target {BUSY.low:.0f} to {BUSY.high:.0f} %", BUSY.low, BUSY.high)
    busy = _gpu_lines(runs, "utilization_percent")
    watts = _gpu_lines(runs, "power_watts")
    degrees = _gpu_lines(runs, "temperature_celsius")
    hot = Mark(f"target below {TEMPERATURE.high + 1:.0f} °C", TEMPERATURE.high + 1)
    traffic = [
        _scaled(line, 1 / GB)
        for line in (
            *_gpu_lines(runs, "pcie_received_bytes_per_second", "in"),
            *_gpu_lines(runs, "pcie_sent_bytes_per_second", "out", "dashed"),
        )
    ]
    uncounted = "This driver or GPU does not count bytes on PCIe."
    return [
        _settled(Chart("busy", "GPU busy", busy, "%", high=100, marks=[busy_mark])),
        _settled(Chart("power", "Power", watts, "W", marks=power_marks)),
        _settled(Chart("temperature", "Temperature", degrees, "°C", marks=[hot]), peaks=True),
        _settled(Chart("pcie", "PCIe traffic", traffic, "GB/s", absent=uncounted)),
    ]


def _gpu_lines(
    runs: Sequence[RunRecord], name: str, word: str = "", style: Style = "plain"
) -> list[Line]:
    """Return a line per run and GPU; colours follow the runs, or the GPUs of a single run."""
    lines = []
    for number, run in enumerate(runs):
        for place, index in enumerate(run.gpu_indices):
            parts = [run.name] if len(runs) > 1 else []
            parts += [f"GPU {index}"] if len(run.gpu_indices) > 1 else []
            parts += [word] if word else []
            track = run.gpu_track(index, name)
            colour = number if len(runs) > 1 else place
            dashed = style == "dashed" or (len(runs) > 1 and place > 0)
            lines.append(Line(", ".join(parts), track, colour, "dashed" if dashed else "plain"))
    return lines


def all_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return every chart that has something to show."""
    groups = (speed_charts, loss_charts, memory_charts, gpu_charts)
    return [chart for group in groups for chart in group(runs) if not chart.is_empty]


# -- lines ---------------------------------------------------------------------------------------


def _label(runs: Sequence[RunRecord], run: RunRecord) -> str:
    return run.name if len(runs) > 1 else ""


def _process_lines(runs: Sequence[RunRecord], name: str) -> list[Line]:
    return [
        Line(_label(runs, run), run.track("process", name), number)
        for number, run in enumerate(runs)
    ]


def _scaled(line: Line, factor: float) -> Line:
    points: Points = [(x, None if y is None else y * factor) for x, y in line.points]
    return replace(line, points=points)


def _byte_unit(lines: Sequence[Line]) -> tuple[float, str]:
    top = largest(value for line in lines for value in line.values)
    return (MIB, "MiB") if top is not None and top < GIB else (GIB, "GiB")


def _settled(chart: Chart, *, peaks: bool = False) -> Chart:
    """Return the chart with thinned curves; a single curve gets a caption with median, lowest and highest."""
    values = chart.lines[0].values if len(chart.lines) == 1 else []
    caption = chart.caption
    if len(values) > 1:
        numbers = (format_number(part) for part in (median(values), min(values), max(values)))
        caption = "Median {}, lowest {}, highest {}.".format(*numbers)
    lines = [replace(line, points=thin(line.points, peaks=peaks)) for line in chart.lines]
    return replace(chart, lines=lines, caption=caption)


# -- as PNG files -----------------------------------------------------------------------------------
# For papers: a column wide, 300 dots per inch, black on white. About 0.2 s per file, and a second to import
# matplotlib.


_INCHES, _DOTS = (3.4, 2.3), 300
_TIME_UNITS = (
    (86400.0 * 3, "days", 86400.0),
    (3600.0 * 3, "hours", 3600.0),
    (180.0, "minutes", 60.0),
)


def write_plots(charts: Sequence[Chart], folder: str | Path) -> list[Path]:
    """Draw each chart into `folder`, made where missing; return the files in order."""
    make_figure = _import("matplotlib.figure").Figure
    make_canvas = _import("matplotlib.backends.backend_agg").FigureCanvasAgg
    folder = Path(folder)
    check_home(folder)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            if chart.is_empty:
                continue
            figure = make_figure(figsize=_INCHES, dpi=_DOTS, layout="constrained")
            make_canvas(figure)
            _draw(chart, figure.add_subplot())
            written.append(folder / f"{chart.key}.png")
            with warnings.catch_warnings():
                # Its font lacks many scripts, such as Chinese: such letters are drawn as boxes.
                warnings.filterwarnings("ignore", message="Glyph")
                with writing(written[-1]) as temporary:
                    figure.savefig(temporary, format="png", metadata={"Software": SIGNATURE})
    except OSError as error:
        raise unwritable(folder, error, "plots into") from error
    return written


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError.for_package("matplotlib", "plots", "Writing PNG files") from error


def _draw(chart: Chart, axes: Any) -> None:
    divisor, unit = _time_unit(chart)
    for mark in chart.marks:
        _draw_mark(mark, axes)
    for line in chart.lines:
        if line.values:
            xs = [x / divisor for x, _ in line.points]
            ys = [float("nan") if y is None else y for _, y in line.points]
            style: dict[str, Any] = {"color": COLOURS[line.colour % len(COLOURS)], "linewidth": 1.1}
            if line.style == "dots":
                style |= {"linestyle": "none", "marker": "o", "markersize": 3}
            elif line.style == "dashed":
                style |= {"linestyle": (0, (4, 2))}
            axes.plot(xs, ys, label=_plain(line.label) or None, **style)
    axes.set_title(_plain(chart.title), fontsize=9, loc="left")
    axes.set_ylabel(_plain(chart.unit), fontsize=8)
    axes.set_xlabel(_plain(chart.along) if chart.scale != "time" else unit, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(True, color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    values = [value for line in chart.lines for value in line.values]
    if chart.is_log and min(values) > 0:
        axes.set_yscale("log")
    else:
        low, high = axes.get_ylim()
        axes.set_ylim(
            low if chart.low is None else min(chart.low, *values),
            max(high, 1.05 * max(values)) if chart.high is None else max(chart.high, high),
        )
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=6.5, frameon=False)


def _draw_mark(mark: Mark, axes: Any) -> None:
    label = _plain(mark.label)
    if mark.high is None:
        style = "--" if mark.is_dashed else ":"
        axes.axhline(mark.low, color="#555555", linewidth=0.8, linestyle=style, label=label)
    else:
        axes.axhspan(mark.low, mark.high, color="#2f6b45", alpha=0.13, linewidth=0, label=label)


def _time_unit(chart: Chart) -> tuple[float, str]:
    """Return seconds per unit of the axis, and its name."""
    if chart.scale != "time":
        return 1.0, ""
    last = max((x for line in chart.lines for x, _ in line.points), default=0.0)
    return next(
        ((size, name) for least, name, size in _TIME_UNITS if last >= least), (1.0, "seconds")
    )


def _plain(text: str) -> str:
    """Escape text for matplotlib, which reads $ as mathematics and a first _ as 'no label'."""
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in text[:80])
    shown = shown.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
