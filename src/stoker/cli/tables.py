"""Tables that several verbs print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from rich.table import Table

    from stoker.store.reader import Store


def make_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    left: Collection[int] = (0,),
) -> Table:
    """Return a table; numbers stand to the right.

    Args:
        title: Above it.
        heads: Of the columns.
        rows: Cells as text.
        left: Columns of text, which stand to the left and may be folded.
    """
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

    from stoker.units import format_bytes, format_count

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
