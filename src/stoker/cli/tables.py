"""Tables that several verbs print."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stoker.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from rich.console import Console
    from rich.table import Table

    from stoker.runs.evaluation import Evaluation
    from stoker.store.reader import Store

_MOST_GROUPS = 24
_MOST_CONFUSED = 12
_MOST_INPUTS = 10


def make_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    left: Collection[int] = (0,),
) -> Table:
    """Return a table; numbers stand to the right. Columns of `left` hold text and may be folded."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        is_text = number in left
        table.add_column(head, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def store_table(store: Store) -> Table:
    """Return one line per field: kind, rows, type, bytes."""
    import numpy as np

    title = f"{store.name}: {format_count(store.num_samples)} samples"
    table = make_table(title, ("field", "kind", "rows", "row", "bytes"), left=(0, 1, 3))
    for name, info in store.fields.items():
        dataset = {"dense": name, "ragged": f"{name}/values", "series": f"{name}/rows"}[info.kind]
        rows = sum(shard.rows[dataset] for shard in store.manifest.shards)
        row_bytes = int(np.prod(info.shape, dtype=np.int64)) * np.dtype(info.dtype).itemsize
        about = {"utf8": "text", "picture": "encoded pictures"}.get(
            info.encoding or ""
        ) or f"{np.dtype(info.dtype).name} {tuple(info.shape)}"
        if info.window:
            about += f", windows of {info.window}"
        table.add_row(name, info.kind, format_count(rows), about, format_bytes(rows * row_bytes))
    table.add_section()
    table.add_row(
        "on disk", "", "", format_count(len(store.shards), "shard"), format_bytes(store.num_bytes)
    )
    return table


def print_evaluation(console: Console, made: Evaluation) -> None:
    """Print what a model is worth: overall beside its baselines, per group, the confusion, the verdict last."""
    name, _ = made.compared_by
    heads = ("metric", "model", "95 % interval", *made.baselines)
    table = make_table(format_count(made.num_samples, "test sample"), heads)
    for metric, value in made.metrics.items():
        span = made.intervals.get(metric)
        known = span is not None and all(map(math.isfinite, span))
        spelled = "" if span is None else "n/a"
        spelled = f"{span[0]:.4g} to {span[1]:.4g}" if span and known else spelled
        others = [_number(metrics.get(metric)) for metrics in made.baselines.values()]
        mark = " *" if metric == name else ""
        table.add_row(f"{metric}{mark}", _number(value), spelled, *others)
    console.print(table)
    for kind, rows in made.groups.items():
        names = list(dict.fromkeys(metric for row in rows.values() for metric in row))
        shown = dict(list(rows.items())[:_MOST_GROUPS])
        cut = f", {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
        cells = ([who, *(_number(row.get(each)) for each in names)] for who, row in shown.items())
        console.print(make_table(f"by {kind}{cut}", (kind, *names), cells))
    if made.confusion is not None and len(made.confusion.names) <= _MOST_CONFUSED:
        names = list(made.confusion.names)
        counts = made.confusion.counts
        rows_of = ([who, *map(str, row)] for who, row in zip(names, counts, strict=True))
        console.print(make_table("confusion: true class by answer", ("", *names), rows_of))
    if made.importance:
        top = list(made.importance.items())[:_MOST_INPUTS]
        told = ", ".join(f"{who} {loss:.3g}" for who, loss in top)
        console.print(f"most important inputs ({name} lost when permuted): {told}", soft_wrap=True)
    for note in made.notes:
        console.print(note, soft_wrap=True)
    if made.baselines:
        console.print(made.verdict, soft_wrap=True)


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "n/a"
    # Counts of samples and trades stand among shares: 16,210, not 1.621e+04.
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
