"""Tables that several verbs print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from stoker.store.manifest import FieldInfo
    from stoker.store.reader import Store


def store_table(store: Store) -> Table:
    """One line per field: kind, rows, type, bytes."""
    import numpy as np
    from rich.table import Table

    from stoker.units import format_bytes, format_count

    title = f"{store.name}: {format_count(store.num_samples)} samples"
    table = Table(title=title, title_justify="left")
    for name, justify in (
        ("field", "left"),
        ("kind", "left"),
        ("rows", "right"),
        ("row", "left"),
        ("bytes", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, info in store.fields.items():
        rows = _num_rows(store, name, info)
        row_bytes = int(np.prod(info.shape, dtype=np.int64)) * np.dtype(info.dtype).itemsize
        about = "text" if info.encoding else f"{np.dtype(info.dtype).name} {tuple(info.shape)}"
        if info.window:
            about += f", windows of {info.window}"
        table.add_row(name, info.kind, format_count(rows), about, format_bytes(rows * row_bytes))
    table.add_section()
    table.add_row(
        "on disk", "", "", format_count(len(store.shards), "shard"), format_bytes(store.num_bytes)
    )
    return table


def _num_rows(store: Store, name: str, info: FieldInfo) -> int:
    dataset = {"dense": name, "ragged": f"{name}/values", "series": f"{name}/rows"}[info.kind]
    return sum(shard.rows[dataset] for shard in store.manifest.shards)
