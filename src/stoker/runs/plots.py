"""Charts as PNG files for papers: a column wide, 300 dots per inch, black on white.

Enters: `Chart`s and a folder. Leaves: one file per chart that has something to show. Costs about 0.2 s per
file, and a second to import matplotlib, which is in the extra `plots`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.errors import MissingExtraError, unwritable
from stoker.ownership import SIGNATURE, writing
from stoker.page.charts import COLOURS, Chart, Line, Mark

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
                # Its font has no Chinese, for one: such letters are drawn as boxes.
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
            _draw_line(line, axes, divisor)
    axes.set_title(_plain(chart.title), fontsize=9, loc="left")
    axes.set_ylabel(_plain(chart.unit), fontsize=8)
    axes.set_xlabel(_plain(chart.along) if chart.scale == "count" else unit, fontsize=8)
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


def _draw_line(line: Line, axes: Any, divisor: float) -> None:
    xs = [x / divisor for x, _ in line.points]
    ys = [float("nan") if y is None else y for _, y in line.points]
    style: dict[str, Any] = {"color": COLOURS[line.colour % len(COLOURS)], "linewidth": 1.1}
    if line.style == "dots":
        style |= {"linestyle": "none", "marker": "o", "markersize": 3}
    elif line.style == "dashed":
        style |= {"linestyle": (0, (4, 2))}
    axes.plot(xs, ys, label=_plain(line.label) or None, **style)


def _draw_mark(mark: Mark, axes: Any) -> None:
    if mark.high is None:
        axes.axhline(
            mark.low,
            color="#555555",
            linewidth=0.8,
            linestyle="--" if mark.is_dashed else ":",
            label=_plain(mark.label),
        )
    else:
        axes.axhspan(
            mark.low, mark.high, color="#2f6b45", alpha=0.13, linewidth=0, label=_plain(mark.label)
        )


def _time_unit(chart: Chart) -> tuple[float, str]:
    """Return seconds per unit of the axis, and its name."""
    if chart.scale == "count":
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
