"""Shards back into memory, and copies of them with fewer samples or repaired values.

Enters: an open shard. Leaves: `ShardData` as a source would have built it. Costs: the shard's
bytes in memory, twice while a copy is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from stoker.store.fields import Array, Dense, FieldData, Ragged, Series, ShardData, offsets_of
from stoker.store.manifest import FieldInfo
from stoker.store.shard import Shard


def load_shard(shard: Shard, fields: Mapping[str, FieldInfo]) -> dict[str, FieldData]:
    """Read a whole shard, verifying its checksums on the way."""
    return {name: _load(shard, name, info) for name, info in fields.items()}


def _load(shard: Shard, name: str, info: FieldInfo) -> FieldData:
    def array(dataset: str) -> Array:
        stored = shard.arrays[dataset]
        return stored.read(0, len(stored))

    columns = None if info.columns is None else tuple(info.columns)
    if info.kind == "dense":
        return Dense(array(name), columns)
    if info.kind == "ragged":
        return Ragged(array(f"{name}/values"), array(f"{name}/offsets"), info.encoding)
    is_timed = info.duration_ns is not None
    return Series(
        rows=array(f"{name}/rows"),
        time=array(f"{name}/time") if is_timed else None,
        ends=array(f"{name}/ends"),
        window=cast(int, info.window),
        gap=array(f"{name}/gap") if is_timed else None,
        columns=columns,
        duration_ns=info.duration_ns,
    )


def keep_samples(fields: ShardData, keep: Array) -> dict[str, FieldData]:
    """Return the fields with only the samples where `keep` is true; series rows all stay."""
    return {name: _keep(data, keep) for name, data in fields.items()}


def _keep(data: FieldData, keep: Array) -> FieldData:
    if isinstance(data, Dense):
        return Dense(data.values[keep], data.columns)
    if isinstance(data, Series):
        return replace(data, ends=data.ends[keep])
    lengths = np.diff(data.offsets)
    return Ragged(data.values[np.repeat(keep, lengths)], offsets_of(lengths[keep]), data.encoding)


def samples_touching(data: FieldData, bad: Array) -> Array:
    """Say which samples touch a bad row, value or bar of this field.

    Args:
        data: The field.
        bad: One flag per row of its values (dense: sample; ragged: value; series: bar).
    """
    if isinstance(data, Dense):
        return bad
    counts = np.concatenate([[0], np.cumsum(bad)])
    if isinstance(data, Ragged):
        return cast(Array, counts[data.offsets[1:]] > counts[data.offsets[:-1]])
    return cast(Array, counts[data.ends] > counts[data.ends - data.window])


def row_values(data: FieldData) -> Array:
    """Return the values that the quality gate looks at, one row per row, value or bar."""
    return data.rows if isinstance(data, Series) else data.values


def column_names(data: FieldData) -> Sequence[str] | None:
    """Return the names of the columns, where the field has them."""
    return None if isinstance(data, Ragged) else data.columns
