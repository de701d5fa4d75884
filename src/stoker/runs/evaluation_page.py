"""The evaluation on a run's page: baselines, classes, confusion, curves, examples.

Enters: an `Evaluation`. Leaves: markup. Costs string work, a few kB; pictures of examples are in the log already.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from stoker import page
from stoker.page import Html
from stoker.page.charts import Chart, Line, chart_grid, line_chart
from stoker.runs.evaluation import (
    Confusion,
    Curve,
    Evaluation,
    Example,
    metric_words,
    spell_interval,
)

_WORTH_KINDS = {
    "better": "good",
    "unclear": "warn",
    "worse": "refuse",
    "few": "warn",
    "unknown": "note",
}
_WORTH_WORDS = {
    "better": "better than its baselines",
    "unclear": "maybe no better",
    "worse": "not worth training",
    "few": "too few test samples",
    "unknown": "nothing to compare with",
}
_SHOWN = {"answer": "prediction"}  # names of pictures in run logs, and on the page
_MOST_GROUPS = 60
_MOST_CONFUSED = 30
_MOST_INPUTS = 15
# Name endings of metrics that are no shares, even if all values of a run lie between 0 and 1.
_AMOUNTS = ("samples", "trades", "pips", "mae", "rmse", "loss")
_COLOUR = re.compile("#[0-9a-f]{6}")
_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")


def evaluation_section(made: Evaluation, key: str) -> Html:
    """Return the verdict first, then the numbers, then pictures."""
    badge = page.badge(_WORTH_WORDS[made.worth], _WORTH_KINDS[made.worth])
    parts = [Html(f"<p>{badge} {page.escape(made.verdict)}</p>"), _overall(made, key)]
    if made.confusion is not None:
        parts.append(_confusion(made.confusion, key))
    for number, (kind, rows) in enumerate(made.groups.items()):
        parts.append(_group(kind, rows, f"{key}-group-{number}"))
    curves = [line_chart(_chart(curve, f"{key}-curve-{n}")) for n, curve in enumerate(made.curves)]
    if curves:
        parts += [Html("<h3>Curves</h3>"), chart_grid(curves)]
    if made.importance:
        parts.append(_importance(made))
    if made.examples:
        parts += [Html("<h3>Examples</h3>"), page.grid(_examples(made.examples, key))]
        known = [pair for pair in made.colours.items() if _COLOUR.fullmatch(pair[1])]
        parts += [page.legend(known[:_MOST_GROUPS])] if known else []
    parts += [page.paragraph(note, quiet=True) for note in made.notes]
    return page.join(parts)


def _overall(made: Evaluation, key: str) -> Html:
    """Return model and baselines side by side, the strongest baseline first: a phone may show no more."""
    best = None if made.best_baseline is None else made.best_baseline[0]
    baselines = dict(sorted(made.baselines.items(), key=lambda item: item[0] != best))
    header = ("metric", "model", "95 % interval", *(page.shorten(name, 40) for name in baselines))
    rows = []
    for name, value in made.metrics.items():
        spelled = spell_interval(made.intervals.get(name), page.format_number, " to&nbsp;")
        if spelled not in ("", "n/a"):
            spelled = Html(f"<span class=breaks>{spelled}</span>")
        mark = " (compared by)" if name == made.compared_by[0] else ""
        others = (page.format_number(metrics.get(name)) for metrics in baselines.values())
        rows.append(
            (page.name(f"{metric_words(name)}{mark}"), page.format_number(value), spelled, *others)
        )
    return page.figures_table(header, rows, key=f"{key}-overall")


def _confusion(made: Confusion, key: str) -> Html:
    """Return the matrix as a table whose cells are shaded by their share of the true class."""
    names = made.names[:_MOST_CONFUSED]
    rows = []
    for name, counts in zip(names, made.counts, strict=False):
        whole = sum(counts)
        cells = [
            Html(f'<span class="share" style="--share:{100 * count / whole:.0f}%">{count:,}</span>')
            if count
            else Html('<span class="quiet">0</span>')
            for count in counts[: len(names)]
        ]
        rows.append((page.name(name), *cells))
    header = ("true class", *(page.shorten(name, 24) for name in names))
    table = page.figures_table(header, rows, key=f"{key}-confusion")
    is_cut = len(names) < len(made.names)
    cut = f" The first {len(names)} of {len(made.names)} classes." if is_cut else ""
    told = f"Columns are predicted classes; cells are shaded by their share of the row.{cut}"
    return page.join([Html("<h3>Confusion matrix</h3>"), table, page.paragraph(told, quiet=True)])


def _group(kind: str, rows: Mapping[str, Mapping[str, float]], key: str) -> Html:
    """Return a table with a row per class or group; shares from 0 to 1 get a bar."""
    # A row lacks its unknown metrics, so the longest row gives the order.
    longest = sorted(rows.values(), key=len, reverse=True)
    metrics = list(dict.fromkeys(name for row in longest for name in row))
    shown = list(rows.items())[:_MOST_GROUPS]
    is_share = {
        name: all(0 <= row[name] <= 1 for _, row in shown if math.isfinite(row.get(name, math.nan)))
        and not name.endswith(_AMOUNTS)
        for name in metrics
    }
    cells = []
    for who, row in shown:
        values = {name: row.get(name, math.nan) for name in metrics}
        drawn = (
            _meter(value, value)
            if is_share[name] and math.isfinite(value)
            else page.format_number(value)
            for name, value in values.items()
        )
        cells.append((page.name(who), *drawn))
    header = (kind, *(page.shorten(metric_words(name), 40) for name in metrics))
    table = page.figures_table(header, cells, key=key)
    cut = f", {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
    return page.join([Html(f"<h3>By {page.escape(kind)}{cut}</h3>"), table])


def _meter(value: float, share: float) -> Html:
    told = page.escape(page.format_number(value))
    return Html(f'<span class="meter" style="--share:{100 * share:.0f}%">{told}</span>')


def _drawn(lines: Mapping[str, Sequence[tuple[float, float]]]) -> list[Line]:
    """Return the first line, usually the truth, plain and the others dashed."""
    return [
        Line(name, list(points), number, "plain" if number == 0 else "dashed")
        for number, (name, points) in enumerate(lines.items())
    ]


def _chart(curve: Curve, key: str) -> Chart:
    lines = _drawn(curve.lines)
    return Chart(key, curve.title, lines, curve.unit, "number", curve.along, math.inf, low=None)


def _importance(made: Evaluation) -> Html:
    top = list(made.importance.items())[:_MOST_INPUTS]
    most = max((loss for _, loss in top), default=0.0) or 1.0
    items = "".join(
        f"<tr><td class=label>{page.name(name)}</td><td class=number>{_meter(loss, max(0.0, loss / most))}</td></tr>"
        for name, loss in top
    )
    title = (
        f"Importance of inputs: {page.escape(metric_words(made.compared_by[0]))} lost when permuted"
    )
    return Html(
        f"<h3>{title}</h3><div class=scroll><table class=tight><tbody>{items}</tbody></table></div>"
    )


def _examples(examples: Sequence[Example], key: str) -> Iterable[Html]:
    for number, example in enumerate(examples):
        told = f"true: {page.name(example.truth)}<br>predicted: {page.name(example.answer)}"
        caption = Html(told if example.truth or example.answer else "")
        picture = _picture(example, f"{key}-example-{number}")
        yield page.figure(page.name(example.key), picture, caption)


def _picture(example: Example, key: str) -> Html:
    if example.kind == "image":
        # Only pictures as bytes: a log must not make a browser ask a server.
        several = len(example.pictures) > 1
        shown = [
            f'<span><img alt="{page.escape(name)}" src="{url}">{page.escape(name) if several else ""}</span>'
            for name, url in (
                (_SHOWN.get(name, name), url) for name, url in example.pictures.items()
            )
            if _PICTURE.fullmatch(url)
        ]
        return Html(f'<div class="pictures">{"".join(shown)}</div>')
    if example.kind == "spectrum":
        return _mirror(example, key)
    if example.kind == "series":
        return line_chart(Chart(key, "", _drawn(example.lines), "", scale="count", low=None))
    return Html("")


def _mirror(example: Example, key: str) -> Html:
    """Return a mirror plot: the true peaks upwards, the answer's downwards, each to its own base peak."""
    truth, answer = (example.lines.get(name, ()) for name in ("truth", "answer"))
    last = max((x for x, _ in (*truth, *answer)), default=1.0) or 1.0
    paths = []
    for peaks, sign, colour in ((truth, -1, "c0"), (answer, 1, "c1")):
        base = max((y for _, y in peaks), default=0.0) or 1.0
        strokes = "".join(
            f"M{20 + 960 * x / last:.1f} 50v{sign * 48 * max(0.0, y) / base:.1f}" for x, y in peaks
        )
        paths.append(f'<path class="curve {colour}" d="{strokes}"/>')
    told = f"{len(truth)} true peaks above, {len(answer)} predicted below, up to m/z {last:g}"
    return Html(
        f'<svg role="img" aria-labelledby="{page.escape(key)}-t" viewBox="0 0 1000 100" '
        f'preserveAspectRatio="none" style="height:110px"><title id="{page.escape(key)}-t">{page.escape(told)}</title>'
        f'<path class="base" d="M0 50h1000"/>{"".join(paths)}</svg>'
        # Below the plot and not inside: its letters would be stretched with it.
        f'<div class="quiet" style="display:flex;justify-content:space-between;font-size:.75rem">'
        f"<span>m/z 0</span><span>{last / 2:.4g}</span><span>{last:.4g}</span></div>"
    )
