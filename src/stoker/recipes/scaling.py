"""Robust scaling of inputs, fitted on training samples and kept in the model.

Enters: a store, a field and the training samples; then batches. Leaves: medians and quartile ranges
as buffers, so that a checkpoint carries them; then scaled float32. Costs: fitting reads at most
200,000 rows; applying is one fused pass over the batch.

A median and quartiles do not move when one row in a thousand is a million times too large; a mean
and a standard deviation do. What is far out is cut afterwards, so that no row decides a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from stoker.errors import InputError
from stoker.store.fields import Array
from stoker.store.reader import Store

FIT_ROWS = 200_000
_FIT_BYTES = 256 << 20
# Below this share of the median the quartiles are rounding noise, not spread.
_MIN_SPREAD_SHARE = 1e-9
_MIN_SPREAD = 1e-12


def fit_robust(rows: Array) -> tuple[Array, Array]:
    """Return the median and the quartile range per column, `(columns,)` float64 each.

    A column whose quartiles coincide (mostly zeros) takes its standard deviation, and one that does
    not move at all takes 1: nothing is divided by almost nothing.

    Args:
        rows: `(n, columns)`, finite, of training samples only.
    """
    if rows.ndim != 2 or not len(rows):
        raise InputError(
            f"a scaler was to be fitted on rows of shape {rows.shape}.",
            "(rows, columns) with at least one training row",
            "check the split: stoker inspect STORE",
        )
    low, center, high = np.percentile(rows.astype(np.float64), (25, 50, 75), axis=0)
    least = np.maximum(_MIN_SPREAD, _MIN_SPREAD_SHARE * np.abs(center))
    deviation = rows.std(axis=0, dtype=np.float64)
    scale = np.where(high - low > least, high - low, deviation)
    return center, np.where(scale > least, scale, 1.0)


class RobustScale(torch.nn.Module):
    """`clip((x - center) / scale)` in float32, whatever autocast says: raw inputs may exceed float16.

    Args:
        center: `(columns,)`.
        scale: `(columns,)`, above 0.
        clip: Largest magnitude that leaves; None for no limit.
        is_squashed: Whether scaled values go through sign(x) log(1 + |x|) before the limit, so that long tails keep
            their order instead of being cut.
        dtype: Of the arithmetic. A store of float64 has values that float32 cannot tell apart before the median is
            taken off: times in milliseconds, long numbers.
    """

    center: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self,
        center: Array,
        scale: Array,
        clip: float | None,
        dtype: torch.dtype = torch.float32,
        *,
        is_squashed: bool = False,
    ) -> None:
        super().__init__()
        self.clip = clip
        self.is_squashed = is_squashed
        self.register_buffer("center", torch.as_tensor(center, dtype=dtype))
        self.register_buffer("scale", torch.as_tensor(scale, dtype=dtype))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Scale `(..., columns)` of any number type; the result is float32."""
        scaled = ((values.to(self.center.dtype) - self.center) / self.scale).float()
        if self.is_squashed:
            scaled = scaled.sign() * scaled.abs().log1p()
        return scaled if self.clip is None else scaled.clamp(-self.clip, self.clip)


class OnDevice:
    """A small constant that follows the batches to their device; copied there once.

    The copy is made by the first call on a device, before a step is captured in a CUDA graph.
    """

    def __init__(self, values: Array, dtype: torch.dtype = torch.float32) -> None:
        self._copies = {torch.device("cpu"): torch.as_tensor(values, dtype=dtype)}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the constant on `device`."""
        if device not in self._copies:
            self._copies[device] = self._copies[torch.device("cpu")].to(device)
        return self._copies[device]


def training_rows(store: Store, field: str, samples: Array) -> Array:
    """Return up to 200,000 rows of a field that the given samples show, as `(rows, columns)`.

    Evenly spaced over the samples; of a series every row is taken once, though many windows show it.

    Args:
        store: Open.
        field: Dense `(n, columns)` or `(n, time, columns)`, or a series.
        samples: Rising sample numbers.
    """
    info = store.fields[field]
    columns = info.shape[-1]
    if not columns:
        raise InputError(
            f"field {field!r} of {store.name} has 0 columns.",
            "at least one column to learn from",
            "choose another field, or pack the data again",
        )
    limit = max(1, min(FIT_ROWS, _FIT_BYTES // max(1, 8 * columns)))
    if info.kind == "series":
        shards = list(_shards_of(store, samples))
        share = max(1, limit // max(1, len(shards)))
        return np.concatenate([_visible_rows(store, field, *shard, share) for shard in shards])
    per_sample = int(np.prod(info.shape[:-1], dtype=np.int64))
    chosen = evenly(samples, max(1, limit // max(1, per_sample)))
    rows: Array = store.gather(field, chosen).reshape(-1, columns)
    return rows


def evenly(values: Array, most: int) -> Array:
    """Return at most `most` of the values, evenly spaced."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).astype(np.int64)]


def _shards_of(store: Store, samples: Array) -> Iterator[tuple[int, Array]]:
    """Yield each shard that holds some of the samples, and their numbers within it."""
    first = 0
    for number, info in enumerate(store.manifest.shards):
        low, high = np.searchsorted(samples, (first, first + info.num_samples))
        if high > low:
            yield number, samples[low:high] - first
        first += info.num_samples


def _visible_rows(store: Store, field: str, shard: int, samples: Array, most: int) -> Array:
    """Rows of one shard's series that at least one of the samples' windows shows."""
    ends = store.read_series(field, "ends", shard)[samples]
    rows = store.read_series(field, "rows", shard)
    window = int(store.fields[field].window or 0)
    edges = np.bincount(ends - window, minlength=len(rows) + 1)
    edges = edges - np.bincount(ends, minlength=len(rows) + 1)
    visible: Array = rows[evenly(np.flatnonzero(np.cumsum(edges)[: len(rows)]), most)]
    return visible
