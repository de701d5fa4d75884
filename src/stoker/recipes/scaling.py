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
    """`clip((x - center) / scale)` in float32, whatever autocast says: raw inputs may exceed float16."""

    center: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self,
        center: Array,  # `(columns,)`
        scale: Array,  # `(columns,)`, above 0
        clip: float | None,  # largest magnitude that leaves; None for no limit
        # of the arithmetic. A store of float64 has values that float32 cannot tell apart before the median is taken
        # off: times in milliseconds, long numbers.
        dtype: torch.dtype = torch.float32,
        *,
        # whether scaled values go through sign(x) log(1 + |x|) before the limit, so that long tails keep their
        # order instead of being cut
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


def fit_ramps(rows: Array, num_ramps: int) -> tuple[Array, Array, Array]:
    """Return column, start and width of each ramp, `(ramps,)` each: from one quantile of a column to the next.

    A column has fewer where many rows share a value, and none where all do.

    Rows are of training samples, scaled as the model scales them.
    """
    shares = np.linspace(0, 1, num_ramps + 1)
    edges = []
    for column in rows.T:
        # An infinite value among them would make quantiles that are no numbers, and so every row's ramps.
        known = column[np.isfinite(column)]
        edges.append(
            np.unique(np.quantile(known if len(known) else [0.0], shares).astype(np.float32))
        )
    columns = np.repeat(np.arange(len(edges)), [len(each) - 1 for each in edges])
    starts = np.concatenate([each[:-1] for each in edges])
    return columns, starts, np.concatenate([np.diff(each) for each in edges])


class Ramps(torch.nn.Module):
    """Adds to each row how far every column has gone from one quantile to the next: 0 before, 1 behind.

    An MLP bends a column slowly; trees cut it anywhere. With a ramp per quantile one layer can cut it as well
    (Gorishniy et al. 2022, piecewise linear encoding).

    Args:
        columns: `(ramps,)` which column a ramp looks at.
        starts: `(ramps,)` value at which it leaves 0.
        widths: `(ramps,)` above 0, after which it is 1.
    """

    columns: torch.Tensor
    starts: torch.Tensor
    widths: torch.Tensor

    def __init__(self, columns: Array, starts: Array, widths: Array) -> None:
        super().__init__()
        self.register_buffer("columns", torch.as_tensor(columns, dtype=torch.int64))
        self.register_buffer("starts", torch.as_tensor(starts, dtype=torch.float32))
        self.register_buffer("widths", torch.as_tensor(widths, dtype=torch.float32))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `(batch, columns + ramps)` for `(batch, columns)` of scaled float32."""
        past = (rows.index_select(1, self.columns) - self.starts) / self.widths
        return torch.cat([rows, past.clamp(0, 1)], dim=1)


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

    Sample numbers rise.
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
        shards = list(shards_of(store, samples))
        share = max(1, limit // max(1, len(shards)))
        return np.concatenate(
            [_visible_rows(store, field, number, own, share) for number, _, own in shards]
        )
    per_sample = int(np.prod(info.shape[:-1], dtype=np.int64))
    chosen = evenly(samples, max(1, limit // max(1, per_sample)))
    rows: Array = store.gather(field, chosen).reshape(-1, columns)
    return rows


def evenly(values: Array, most: int) -> Array:
    """Return at most `most` of the values, evenly spaced."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).astype(np.int64)]


def shards_of(store: Store, samples: Array) -> Iterator[tuple[int, slice, Array]]:
    """Yield each shard that holds some of the samples, where they are, and their numbers within it."""
    first = 0
    for number, info in enumerate(store.manifest.shards):
        low, high = np.searchsorted(samples, (first, first + info.num_samples))
        if high > low:
            yield number, slice(low, high), samples[low:high] - first
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
