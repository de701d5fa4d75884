"""Robust scaling of inputs, fitted on training samples and kept in the model.

Enters: a store, a field and the training samples; then batches. Leaves: medians and quartile ranges
as buffers, so that a checkpoint carries them; then scaled float32. Costs: fitting reads at most
200,000 rows; applying is one fused pass over the batch.

Median and quartiles do not move when one row in a thousand is a million times too large; mean and
standard deviation do. Scaled outliers are clipped, so that no single row dominates a gradient.
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

    If the quartiles of a column coincide (mostly zeros), its standard deviation is used instead; for a
    constant column, 1. So no column is divided by a number near 0.
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
        # of the arithmetic. A store of float64 may have values that float32 cannot distinguish before the median is
        # subtracted: times in milliseconds, long numbers.
        dtype: torch.dtype = torch.float32,
        *,
        # whether scaled values go through sign(x) log(1 + |x|) before the limit, so that long tails keep their
        # order instead of being clipped
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

    A column has fewer ramps if many rows have equal values, and none if all have. `rows` are those of
    training samples, scaled as the model scales them.
    """
    shares = np.linspace(0, 1, num_ramps + 1)
    edges = []
    for column in rows.T:
        # One infinite value would make quantiles NaN, and with them the ramps of every row.
        known = column[np.isfinite(column)]
        edges.append(
            np.unique(np.quantile(known if len(known) else [0.0], shares).astype(np.float32))
        )
    columns = np.repeat(np.arange(len(edges)), [len(each) - 1 for each in edges])
    starts = np.concatenate([each[:-1] for each in edges])
    return columns, starts, np.concatenate([np.diff(each) for each in edges])


class Ramps(torch.nn.Module):
    """Piecewise linear encoding: appends to each row, per ramp, 0 before its start, 1 after its end, linear between.

    A tree can split a column at any value; an MLP is smooth. With a ramp per quantile, one layer can split a
    column as well (Gorishniy et al. 2022).

    Args:
        columns: `(ramps,)` index of the column that a ramp reads.
        starts: `(ramps,)` value at which it starts to rise from 0.
        widths: `(ramps,)` above 0; the ramp is 1 from start + width on.
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
    """A small constant with a cached copy per device.

    The first call on a device makes the copy; it must happen before a step is captured in a CUDA graph.
    """

    def __init__(self, values: Array, dtype: torch.dtype = torch.float32) -> None:
        self._copies = {torch.device("cpu"): torch.as_tensor(values, dtype=dtype)}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the constant on `device`."""
        if device not in self._copies:
            self._copies[device] = self._copies[torch.device("cpu")].to(device)
        return self._copies[device]


def training_rows(store: Store, field: str, samples: Array) -> Array:
    """Return up to 200,000 rows of a field that the given samples (sorted numbers) contain, as `(rows, columns)`.

    Rows are evenly spaced over the samples. A row of a series is taken at most once, though many windows contain it.
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
    """Yield for each shard with some of the samples its number, their slice of `samples`, and their rows in it."""
    first = 0
    for number, info in enumerate(store.manifest.shards):
        low, high = np.searchsorted(samples, (first, first + info.num_samples))
        if high > low:
            yield number, slice(low, high), samples[low:high] - first
        first += info.num_samples


def _visible_rows(store: Store, field: str, shard: int, samples: Array, most: int) -> Array:
    """Return rows of one shard's series that are in at least one window of the samples."""
    ends = store.read_series(field, "ends", shard)[samples]
    rows = store.read_series(field, "rows", shard)
    window = int(store.fields[field].window or 0)
    edges = np.bincount(ends - window, minlength=len(rows) + 1)
    edges = edges - np.bincount(ends, minlength=len(rows) + 1)
    visible: Array = rows[evenly(np.flatnonzero(np.cumsum(edges)[: len(rows)]), most)]
    return visible
