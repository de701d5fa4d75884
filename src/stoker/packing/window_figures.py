"""Windows of a series as the model gets them: prices computed from the scaled features, the moment t, the target.

Enters: the stored rows of a window and of what follows it, the scalers of the manifest. Leaves: facts for a terminal,
and a drawing of each window. Costs: string work, about 10 kB a window.

Prices are computed from the stored `return`, `range`, `body` and wicks, with the scaling undone. Bars after t are
drawn pale, since the model does not see them, with the target on top of them. So two mistakes are visible: if the close
is another column, the bars do not join; if the label is shifted, it leaves the bars after t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker import page
from stoker.page import Html
from stoker.store.fields import Array
from stoker.store.manifest import FieldInfo

_SHOWN_BARS, _SHOWN_ROWS = 72, 400
_MOST_LINES = 6
_MOST_TOKENS = 96
_WIDTH, _HEIGHT = 400, 130
_PRICES = ("return", "range", "body", "upper_wick", "lower_wick")
_FAR = 0.5  # an open this share of a bar's range away does not continue the last close
_SAME = 1e-5
WARNING = "look at this"  # key of the fact that says what is probably wrong
_SPLITS = ("train", "val", "test", "purged")


@dataclass(frozen=True)
class Window:
    """One sample's window: `length` rows as stored, and rows after it; with open times, if the series has them."""

    rows: Array
    length: int
    time: Array | None


@dataclass(frozen=True)
class _Bars:
    """Logarithms of prices against the close at t: `(rows,)` each."""

    open: Array
    high: Array
    low: Array
    close: Array


def bars_of(
    window: Window, columns: Sequence[str], scaler: Mapping[str, Any] | None
) -> _Bars | None:
    """Return the bars of a window, its scaling undone; None where the columns are not those of bars."""
    if not set(_PRICES) <= set(columns):
        return None
    values = np.asarray(window.rows, np.float64)
    if scaler is not None and list(scaler["columns"]) == list(columns):
        values = values * np.asarray(scaler["scale"]) + np.asarray(scaler["center"])
    step, width, body, upper, lower = (values[:, list(columns).index(name)] for name in _PRICES)
    close = np.cumsum(step)
    close = close - close[window.length - 1]
    first = close - body
    top, bottom = np.maximum(first, close), np.minimum(first, close)
    return _Bars(first, top + upper * width, bottom - lower * width, close)


def _scaler(attributes: Mapping[str, Any], row: Mapping[str, Any], field: str) -> Any:
    return attributes.get("scalers", {}).get(row.get("symbol"), {}).get(field)


def _base(attributes: Mapping[str, Any], names: Sequence[str]) -> str:
    base = attributes.get("base")
    return str(base) if base in names else names[0]


def _moment(row: Mapping[str, Any]) -> int | None:
    """Return the field `time` of a sample in nanoseconds; None if it has no such field, or not of integers."""
    time = row.get("time")
    is_moment = isinstance(time, np.generic) and time.dtype.kind == "i"
    return int(time) if time is not None and is_moment else None


# -- facts ---------------------------------------------------------------------------------------


def window_facts(
    fields: Mapping[str, FieldInfo],
    rows: Sequence[Mapping[str, Any]],
    attributes: Mapping[str, Any],
) -> dict[str, str]:
    """Return facts about the windows: lengths, times, whether bars and targets fit together."""
    names = [name for name, info in fields.items() if info.kind == "series"]
    if not names or not rows:
        return {}
    lengths = "; ".join(f"{name} {fields[name].window:,} rows" for name in names)
    columns = dict.fromkeys(column for name in names for column in fields[name].columns or ())
    facts = {"windows": lengths} | ({"features": ", ".join(columns)} if columns else {})
    moments = sorted(moment for row in rows if (moment := _moment(row)) is not None)
    if moments:
        facts["t"] = f"{show_time(moments[0])} to {show_time(moments[-1])}"
    base = _base(attributes, names)
    gaps, matching, compared = [], 0, 0
    for row in rows:
        window: Window = row[base]
        bars = bars_of(window, fields[base].columns or (), _scaler(attributes, row, base))
        if bars is None:
            continue
        width = np.maximum(bars.high - bars.low, 1e-12)
        # Only bars that follow each other directly: after a weekend the open is elsewhere.
        follows = np.ones(len(width) - 1, bool)
        if window.time is not None and len(width) > 2:
            follows = np.diff(window.time) == np.median(np.diff(window.time))
        jumps = np.abs(bars.open[1:] - bars.close[:-1])[follows]
        gaps.append(float(np.median(jumps / width[1:][follows])) if follows.any() else 0.0)
        targets = row.get("targets")
        ahead = bars.close[window.length :]
        if targets is not None and np.ndim(targets) == 1 and len(ahead):
            known = min(len(ahead), len(targets))
            compared += 1
            matching += bool(np.allclose(ahead[:known], targets[:known], rtol=1e-3, atol=_SAME))
    warnings = []
    if gaps:
        far = float(np.median(gaps))
        facts["open against the close before"] = f"{far:.2f} of a bar's range apart"
        if far > _FAR:
            warnings.append(
                "bars do not open where the bar before closed: the close may be another column"
            )
    if compared:
        facts["targets are the bars after t"] = f"in {matching} of {compared} windows"
        if matching < compared:
            warnings.append("targets are not the bars after t: the labels may be shifted")
    return facts | ({WARNING: "; ".join(warnings)} if warnings else {})


# -- drawings ------------------------------------------------------------------------------------


def window_figure(
    fields: Mapping[str, FieldInfo],
    row: Mapping[str, Any],
    attributes: Mapping[str, Any],
    number: int,
) -> Html:
    """Return one sample's windows, the base timeframe first."""
    names = [name for name, info in fields.items() if info.kind == "series"]
    base = _base(attributes, names)
    drawn = []
    for name in sorted(names, key=lambda each: each != base):
        window: Window = row[name]
        columns = list(fields[name].columns or ())
        bars = bars_of(window, columns, _scaler(attributes, row, name))
        if bars is not None:
            targets = row.get("targets") if name == base else None
            drawn += [_label(name, window, _SHOWN_BARS), _candles(bars, window.length, targets)]
        elif window.rows.dtype.kind in "iu" and window.rows.ndim == 1:
            values = window.rows[: window.length].tolist()
            more = f" … {len(values):,} in all" if len(values) > _MOST_TOKENS else ""
            drawn.append(page.paragraph(" ".join(map(str, values[:_MOST_TOKENS])) + more))
        else:
            drawn += [_label(name, window, _SHOWN_ROWS), _lines(window, columns)]
    about = []
    if (moment := _moment(row)) is not None:
        about.append(f"t = {show_time(moment)}")
    if row.get("split") is not None and int(row["split"]) < len(_SPLITS):
        about.append(_SPLITS[int(row["split"])])
    targets = row.get("targets")
    if targets is not None and np.size(targets):
        last = float(np.ravel(targets)[-1])
        about.append(f"last of {np.size(targets)} targets {last:+.4g}")
    title = str(row.get("symbol") or f"sample {number}")
    return page.figure(page.name(title), page.join(drawn), page.escape("; ".join(about)))


def show_time(time_ns: int) -> str:
    """Return "2020-10-15 13:00" for nanoseconds since 1970, with seconds where there are any."""
    text = str(np.datetime64(time_ns, "ns").astype("M8[s]")).replace("T", " ")
    return text.removesuffix(":00")


def _label(name: str, window: Window, most: int) -> Html:
    shown = min(window.length, most)
    rows = (
        f"{window.length:,} rows"
        if shown == window.length
        else f"the last {shown} of {window.length:,} rows"
    )
    return page.paragraph(f"{name}: {rows}", quiet=True)


def _candles(bars: _Bars, length: int, targets: Array | None) -> Html:
    start = max(0, length - _SHOWN_BARS)
    # After t only as far as the target goes.
    stop = length + (0 if targets is None else min(len(targets), len(bars.close) - length))
    ahead = 0 if targets is None else len(targets)
    step = _WIDTH / max(1, length - start + ahead)
    values = [bars.high[start:stop], bars.low[start:stop]]
    values += [] if targets is None else [np.asarray(targets, np.float64)]
    top, bottom = (
        max(float(v.max()) for v in values if len(v)),
        min(float(v.min()) for v in values if len(v)),
    )
    span = max(top - bottom, 1e-12)

    def down(value: float) -> float:
        return 4 + (_HEIGHT - 8) * (top - value) / span

    parts = []
    for pale, low, high in ((False, start, length), (True, length, stop)):
        for rising, colour in ((True, "var(--good)"), (False, "var(--refuse)")):
            path = ""
            for at in range(low, high):
                if (bars.close[at] >= bars.open[at]) != rising:
                    continue
                x = (at - start + 0.5) * step
                first, last = sorted((down(bars.open[at]), down(bars.close[at])))
                path += f"M{x:.1f} {down(bars.high[at]):.1f}V{down(bars.low[at]):.1f}"
                path += f"M{x - 0.35 * step:.1f} {first:.1f}h{0.7 * step:.1f}v{max(0.6, last - first):.1f}"
                path += f"h{-0.7 * step:.1f}z"
            faint = ' opacity="0.35"' if pale else ""
            parts.append(
                f'<path d="{path}" stroke="{colour}" fill="{colour}"{faint}/>' if path else ""
            )
    moment = (length - start) * step
    parts.append(
        f'<path d="M{moment:.1f} 0V{_HEIGHT}" stroke="var(--ink)" stroke-dasharray="4 3"/>'
    )
    if targets is not None:
        points = [(moment - 0.5 * step, 0.0)]
        points += [(moment + (k + 0.5) * step, float(value)) for k, value in enumerate(targets)]
        line = " ".join(f"{x:.1f},{down(value):.1f}" for x, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="var(--c0)" stroke-width="2"/>')
    label = "prices against the close at t, the dashed line; the target is the line after it"
    ends = f"{100 * bottom:+.2g} % to {100 * top:+.2g} % of the close at t"
    return _drawn("".join(parts), label, ends)


def _lines(window: Window, columns: Sequence[str]) -> Html:
    """Return up to six columns as lines, each over its own range."""
    rows = np.asarray(window.rows[: window.length][-_SHOWN_ROWS:], np.float64)
    rows = rows[:, None] if rows.ndim == 1 else rows
    parts, named = [], []
    for number in range(min(_MOST_LINES, rows.shape[1])):
        column = rows[:, number]
        known = column[np.isfinite(column)]
        low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
        scaled = (_HEIGHT - 8) * (high - column) / max(high - low, 1e-12) + 4
        step = _WIDTH / max(1, len(column) - 1)
        line = " ".join(f"{at * step:.1f},{y:.1f}" for at, y in enumerate(scaled) if np.isfinite(y))
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="var(--c{number})" stroke-width="1.5"/>'
        )
        name = columns[number] if number < len(columns) else "values"
        named.append(f"{name} {page.format_number(low)} to {page.format_number(high)}")
    more = f"; {rows.shape[1] - _MOST_LINES} more columns" if rows.shape[1] > _MOST_LINES else ""
    return _drawn("".join(parts), "columns of the window", f"{'; '.join(named)}{more}")


def _drawn(inside: str, label: str, ends: str) -> Html:
    return Html(
        f'<svg role="img" aria-label="{page.escape(label)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'preserveAspectRatio="none" style="height:{_HEIGHT}px;margin-bottom:2px">{inside}</svg>'
        f'<p class="quiet">{page.escape(ends)}</p>'
    )
