"""Curves over time or steps, as a figure of a page: inline SVG, labels that keep their size.

Enters: lines of points, reference marks, units. Leaves: one `<figure>`. Costs: string work, about
10 bytes per point; reduce long lines first (`thin`).

The drawing is scaled to the width of its box, and its labels are HTML beside it: at phone width a
curve gets narrow, but its numbers stay readable. If nothing was recorded, the figure says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

from stoker.page import Html, escape, format_number, join, shorten
from stoker.page._style import COLOURS

__all__ = [
    "COLOURS", "MAX_POINTS", "Chart", "Line", "Mark", "Points", "Scale", "Style", "chart_grid",
    "line_chart", "round_ticks", "thin",
]  # fmt: skip

Points = Sequence[tuple[float, float | None]]
Scale = Literal["time", "count", "number"]
Style = Literal["plain", "dashed", "dots"]

MAX_POINTS = 300
_WIDTH, _HEIGHT = 1000, 100
_MOST_TICKS = 5
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_TIME_STEPS = (
    1, 2, 5, 10, 15, 30, _MINUTE, 2 * _MINUTE, 5 * _MINUTE, 10 * _MINUTE, 15 * _MINUTE,
    30 * _MINUTE, _HOUR, 2 * _HOUR, 3 * _HOUR, 6 * _HOUR, 12 * _HOUR, _DAY, 2 * _DAY, 5 * _DAY,
)  # fmt: skip
_TIME_UNITS = (("d", _DAY), ("h", _HOUR), ("min", _MINUTE), ("s", 1.0))


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        label: Its name in the legend; "" leaves it out of the legend.
        points: (x, y) with rising x; a y that is None or not finite interrupts the curve.
        colour: A number; the same number has the same colour on the whole page.
        style: "plain", "dashed", or "dots" for a few values that are far apart.
    """

    label: str
    points: Points
    colour: int = 0
    style: Style = "plain"

    @property
    def values(self) -> list[float]:
        """The y values that can be drawn: neither None nor infinite nor NaN."""
        return [y for _, y in self.points if y is not None and math.isfinite(y)]


@dataclass(frozen=True)
class Mark:
    """A reference: a dotted or dashed line at `low`, or with `high` a band between the two."""

    label: str
    low: float
    high: float | None = None
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves with one axis of values, as data.

    Attributes:
        key: Its id, unique on the page; also the file name if the chart is saved as a file.
        title: Title of the figure.
        lines: The curves; lines without any value are left out.
        unit: Unit of the values.
        scale: Meaning of x: seconds since the beginning, a count, or any number.
        along: Name of the x axis if it is not time, such as "step".
        begin: Largest allowed start of the x axis; smaller x extend it.
        marks: Reference values, which extend the axis of values.
        low: Largest allowed start of the axis of values; None: the smallest value.
        high: Smallest allowed end of the axis of values; None: the largest value.
        is_log: Whether the axis is logarithmic; used only if all values are above zero.
        caption: Sentence below the figure.
        absent: Text shown if there is nothing to draw.
    """

    key: str
    title: str
    lines: Sequence[Line]
    unit: str
    scale: Scale = "time"
    along: str = ""
    begin: float = 0.0
    marks: Sequence[Mark] = ()
    low: float | None = 0.0
    high: float | None = None
    is_log: bool = False
    caption: str = ""
    absent: str = "Not recorded."

    @property
    def is_empty(self) -> bool:
        """Whether no line has a value."""
        return not any(line.values for line in self.lines)


@dataclass(frozen=True)
class _Axis:
    """One axis: its range, its ticks and their names; logarithmic if `is_log`."""

    low: float
    high: float
    ticks: tuple[float, ...]
    names: tuple[str, ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        if self.is_log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(value)
        else:
            # Half of the values, because the difference of two floats can overflow.
            low, high, value = self.low / 2, self.high / 2, value / 2
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0


# -- lines ---------------------------------------------------------------------------------------


def thin(points: Points, most: int = MAX_POINTS, *, peaks: bool = False) -> Points:
    """Return at most `most` points: means of neighbouring points, or with `peaks` their maxima.

    Each gap stays as one missing value, unless there are so many that only dots would be left.
    """
    if len(points) <= most:
        return points
    stretches = [
        list(group)
        for part in _parts(points, most // 2)
        for _, group in groupby(part, key=lambda point: _drawable(point[1]))
    ]
    if len(stretches) > most:
        known = [point for point in points if _drawable(point[1])]
        stretches = _parts(known, most)
    merged: list[tuple[float, float | None]] = []
    for stretch in stretches:
        ys = Line("", stretch).values
        value = None if not ys else max(ys) if peaks else sum(ys) / len(ys)
        merged.append((sum(x for x, _ in stretch) / len(stretch), value))
    return merged


def _parts(points: Points, count: int) -> list[list[tuple[float, float | None]]]:
    size = math.ceil(len(points) / max(1, count))
    return [list(points[start : start + size]) for start in range(0, len(points), size)]


def _drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


# -- axes ----------------------------------------------------------------------------------------


def round_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return round numbers, evenly spaced, from at or below `low` to at or above `high`."""
    span = high - low
    if span <= 0:
        return (low, low + 1.0)
    if span <= 1e-9 * abs(low):  # the precision of a float is too low for round numbers in between
        return (low, high)
    # Outside of this range, powers of ten are not representable as floats.
    size = 10.0 ** math.floor(math.log10(span / _MOST_TICKS)) if 1e-300 < span < 1e300 else 0.0
    if size == 0.0:
        return (low, high)
    step = next(size * k for k in (1, 2, 2.5, 5, 10, 20) if span / (size * k) <= _MOST_TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(number * step for number in range(first, last + 1))


def _decades(low: float, high: float) -> tuple[float, ...]:
    """Return ticks of a logarithmic axis: powers of ten, with 2 and 5 where these are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = range(first, min(last, 308) + 1)
    if last - first > 2:
        every = powers[:: math.ceil(len(powers) / 6)]
        return tuple(10.0**power for power in every if low <= 10.0**power <= high)
    marks = (k * 10.0**power for power in powers for k in (1, 2, 5))
    return tuple(mark for mark in marks if low <= mark <= high)


def _named(ticks: Sequence[float]) -> tuple[str, ...]:
    """Return ticks as text, all with the same number of decimals."""
    top = max((abs(tick) for tick in ticks), default=0.0)
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if top >= size:
            divisor = 1e3 if suffix == "k" else size
            return tuple(f"{tick / divisor:g}{suffix}" if tick else "0" for tick in ticks)
    steps = [abs(b - a) for a, b in pairwise(ticks)]
    step = min((size for size in steps if size), default=1.0)
    if top and top < 1e-4:
        return tuple(format_number(tick) for tick in ticks)
    # As many decimals as the step needs: 2.5 needs one although it is above 1.
    decimals = next(d for d in range(12) if abs(round(step, d) - step) < step * 1e-6 or d == 11)
    return tuple(f"{tick:,.{decimals}f}" for tick in ticks)


def _value_axis(chart: Chart, lines: Sequence[Line]) -> _Axis:
    values = [value for line in lines for value in line.values]
    for mark in chart.marks:
        values += [mark.low] if mark.high is None else [mark.low, mark.high]
    least, most = min(values), max(values)
    if chart.is_log and least > 0:
        least, most = (least, most) if most > least else (least / 2, most * 2)
        ticks = _decades(least, most) or (least, most)
        return _Axis(least, most, ticks, tuple(format_number(tick) for tick in ticks), True)
    least = least if chart.low is None else min(chart.low, least)
    most = most if chart.high is None else max(chart.high, most)
    if most <= least:
        least, most = (least, least + 1.0) if least == 0 else (least - abs(least), most + abs(most))
    ticks = round_ticks(least, most)
    return _Axis(ticks[0], ticks[-1], ticks, _named(ticks))


def _along_axis(low: float, high: float, scale: Scale) -> _Axis:
    high = high if high > low else low + 1.0
    if scale == "time" and high - low >= 4:
        step = next((s for s in _TIME_STEPS if (high - low) / s <= 5), 10.0 * _DAY)
        ticks = tuple(number * step for number in range(math.floor(high / step) + 1))
        unit, size = next(pair for pair in _TIME_UNITS if step >= pair[1])
        names = tuple(f"{tick / size:g} {unit}" if tick else "0" for tick in ticks)
        return _Axis(low, high, ticks, names)
    ticks = tuple(tick for tick in round_ticks(low, high) if low <= tick <= high)
    if scale == "count":
        ticks = tuple(tick for tick in ticks if tick == int(tick)) or ticks
    if scale != "time":
        return _Axis(low, high, ticks, _named(ticks))
    return _Axis(low, high, ticks, tuple(f"{name} s" for name in _named(ticks)))


# -- figures -------------------------------------------------------------------------------------


def line_chart(chart: Chart) -> Html:
    """Return a chart as a figure."""
    # A line with a single value would be almost invisible, so it is drawn as a dot.
    drawn = [
        replace(line, style="dots") if len(line.values) == 1 else line
        for line in chart.lines
        if line.values
    ]
    if not drawn:
        return Html(
            f'<figure class="chart" id="{escape(chart.key)}"><div class="name">'
            f'{escape(shorten(chart.title))}</div><p class="quiet">{escape(chart.absent)}</p></figure>'
        )
    xs = [x for line in drawn for x, _ in line.points]
    along = _along_axis(min(chart.begin, *xs), max(xs), chart.scale)
    picture = _picture(chart, drawn, along, _value_axis(chart, drawn))
    under = f"<figcaption>{escape(chart.caption)}</figcaption>" if chart.caption else ""
    name = (
        f'<div class="name"><span>{escape(shorten(chart.title))}</span>'
        f'<span class="unit">{escape(chart.unit)}</span></div>'
        if chart.title or chart.unit
        else ""
    )
    return Html(
        f'<figure class="chart" id="{escape(chart.key)}">{name}'
        f"{_legend(drawn, chart.marks)}{picture}{under}</figure>"
    )


def chart_grid(figures: Iterable[Html]) -> Html:
    """Return charts side by side if there is room, else one below the other."""
    return Html(f'<div class="charts">{"".join(figures)}</div>')


def _legend(lines: Sequence[Line], marks: Sequence[Mark]) -> Html:
    def entry(style: str, label: str, path: str) -> str:
        return (
            f'<span><svg aria-hidden="true" viewBox="0 0 22 10"><path class="{style}" d="{path}"/>'
            f"</svg>{escape(shorten(label, 60))}</span>"
        )

    names = [
        entry(_classes(line), line.label, "M11 5h0" if line.style == "dots" else "M1 5h20")
        for line in lines
        if line.label
    ]
    names += [
        entry(_limit_classes(mark), mark.label, "M1 5h20")
        if mark.high is None
        else entry("band", mark.label, "M1 0h20v10h-20z")
        for mark in marks
    ]
    return Html(f'<div class="legend">{"".join(names)}</div>')


def _classes(line: Line) -> str:
    style = "" if line.style == "plain" else f" {line.style}"
    return f"curve c{line.colour % len(COLOURS)}{style}"


def _picture(chart: Chart, lines: Sequence[Line], along: _Axis, upward: _Axis) -> Html:
    key = escape(chart.key)
    grid = "".join(f"M0 {_down(upward, tick):.2f}h{_WIDTH}" for tick in upward.ticks)
    behind = "".join(_drawn_mark(mark, upward) for mark in chart.marks)
    curves = "".join(
        f'<path class="{_classes(line)}" d="{_path(line, along, upward)}"/>' for line in lines
    )
    told = " ".join(_told(line, chart.unit) for line in lines)
    upright = "".join(
        f'<span style="top:{_down(upward, tick):.2f}%">{escape(text)}</span>'
        for tick, text in zip(upward.ticks, upward.names, strict=True)
    )
    widest = max(upward.names, key=len, default="")
    name = f'<div class="along">{escape(chart.along)}</div>' if chart.along else ""
    return Html(
        f'<div class="plot"><div class="ys"><i>{escape(widest)}</i>{upright}</div>'
        f'<svg role="img" aria-labelledby="{key}-t {key}-d" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">'
        f'<title id="{key}-t">{escape(shorten(chart.title))}</title>'
        f'<desc id="{key}-d">{escape(told)}</desc>'
        f'<path class="base" d="{grid}"/>{behind}{curves}</svg>'
        f'<div class="xs">{join(_along_names(along))}</div>{name}</div>'
    )


def _along_names(along: _Axis) -> Iterator[Html]:
    for tick, text in zip(along.ticks, along.names, strict=True):
        at = along.share(tick)
        side = ' class="first"' if at < 0.03 else ' class="last"' if at > 0.94 else ""
        yield Html(f'<span{side} style="left:{at * 100:.2f}%">{escape(text)}</span>')


def _down(upward: _Axis, value: float) -> float:
    """Return the y coordinate of a value; in SVG it counts from the top."""
    return (1 - upward.share(value)) * _HEIGHT


def _limit_classes(mark: Mark) -> str:
    return "limit dashed" if mark.is_dashed else "limit"


def _drawn_mark(mark: Mark, upward: _Axis) -> str:
    below = _down(upward, mark.low)
    if mark.high is None:
        return f'<path class="{_limit_classes(mark)}" d="M0 {below:.2f}h{_WIDTH}"/>'
    above = _down(upward, mark.high)
    return f'<path class="band" d="M0 {above:.2f}h{_WIDTH}v{below - above:.2f}h-{_WIDTH}z"/>'


def _path(line: Line, along: _Axis, upward: _Axis) -> str:
    """Return the SVG path of a line: one stroke per stretch without a gap; a single point is a stroke of length 0."""
    strokes = []
    for drawable, group in groupby(line.points, key=lambda point: _drawable(point[1])):
        if drawable:
            places = [
                f"{along.share(x) * _WIDTH:.1f} {_down(upward, y or 0.0):.2f}" for x, y in group
            ]
            if line.style == "dots":
                strokes += [f"M{place}h0" for place in places]
            else:
                strokes.append(f"M{'L'.join(places)}{'h0' if len(places) == 1 else ''}")
    return "".join(strokes)


def _told(line: Line, unit: str) -> str:
    values = line.values
    who = f"{line.label}: " if line.label else ""
    return (
        f"{who}{len(values)} values from {format_number(min(values))} to "
        f"{format_number(max(values))}, the last {format_number(values[-1])} {unit}."
    )
