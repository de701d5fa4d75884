"""Bars to features, and the scaler that is fitted on the training span alone.

Enters: the columns of one timeframe, float64. Leaves: `(bars, features)`, and a `Scaler` that
travels in the store's manifest and is applied the same way at inference. Costs: 0.2 µs per value.

Every feature of row r is made of rows r and r - 1 only, so a bar's features never change once the
bar has closed. No feature divides by a quantity that can be near 0: a ratio to a tiny volume is how
a trading data set got inputs of 1e15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.errors import InputError
from stoker.sources.bars.dialects import PRICES, VOLUMES
from stoker.sources.bars.timeframes import TIMEFRAMES
from stoker.sources.times import DAY_NS
from stoker.store.fields import Array

# A bar's range below a millionth of its price is a flat bar: wicks are divided by this instead.
_MIN_RANGE_SHARE = 1e-6
_MIN_PRICE = 1e-12
# Below this share of the median the quartiles are rounding noise, not spread.
_MIN_SPREAD_SHARE = 1e-9
_MIN_SPREAD = 1e-12
_PLAIN = ("return", "range", "body", "upper_wick", "lower_wick")


@dataclass(frozen=True)
class Features:
    """Features of one timeframe before scaling."""

    rows: Array
    columns: tuple[str, ...]


def feature_names(extras: Sequence[str], timeframe: str) -> tuple[str, ...]:
    """Return the names of the features that `make_features` gives for these further columns."""
    volumes = [name for name in extras if name in VOLUMES]
    others = [name for name in extras if name not in VOLUMES]
    pairs = [f"{name}_{form}" for name in volumes for form in ("log", "change")]
    return (*_PLAIN, *pairs, *_calendar_names(timeframe), *others)


def make_features(
    time: Array, columns: Mapping[str, Array], timeframe: str, extras: Sequence[str] | None = None
) -> Features:
    """Return the features of every bar, from this bar and the one before it.

    The first bar has no predecessor: its `return` and `*_change` are 0.

    `extras` are further columns to use; None takes all.
    """
    if extras is None:
        extras = [name for name in columns if name not in PRICES]
    first, high, low, last = (np.maximum(columns[name], _MIN_PRICE) for name in PRICES)
    log_close = np.log(last)
    width = np.maximum(high - low, _MIN_RANGE_SHARE * last)
    made = [
        _steps(log_close),
        np.log(high) - np.log(low),
        log_close - np.log(first),
        (high - np.maximum(first, last)) / width,
        (np.minimum(first, last) - low) / width,
    ]
    for name in extras:
        if name in VOLUMES:
            level = np.log1p(np.maximum(columns[name], 0))
            made += [level, _steps(level)]
    # Sine and cosine of the open's place in its day and, by whole days, in its week.
    names = _calendar_names(timeframe)
    turns = []
    if "day_sin" in names:
        turns.append((time % DAY_NS) / DAY_NS)
    if "week_sin" in names:
        turns.append((time // DAY_NS + 3) % 7 / 7)  # 1970-01-01 was a Thursday; Monday is 0
    made += [wave(2 * np.pi * turn) for turn in turns for wave in (np.sin, np.cos)]
    made += [columns[name] for name in extras if name not in VOLUMES]
    return Features(np.stack(made, axis=1), feature_names(extras, timeframe))


def _steps(values: Array) -> Array:
    steps = np.zeros(len(values))
    np.subtract(values[1:], values[:-1], out=steps[1:])
    return steps


def _calendar_names(timeframe: str) -> tuple[str, ...]:
    """Calendar features that can vary within a timeframe; a daily bar has no time of day."""
    duration = TIMEFRAMES[timeframe]
    day = ("day_sin", "day_cos") if duration < DAY_NS else ()
    return (*day, "week_sin", "week_cos") if duration < 7 * DAY_NS else day


@dataclass(frozen=True)
class Scaler:
    """Median and spread per feature, as fitted on the training span.

    Attributes:
        columns: Feature names.
        center: Median; 0 for features that are not scaled.
        scale: Quartile range 25-75; 1 for features that are not scaled.
        fitted_until_ns: Close of the last bar that could be used.
        num_rows: Bars used.
    """

    columns: tuple[str, ...]
    center: tuple[float, ...]
    scale: tuple[float, ...]
    fitted_until_ns: int
    num_rows: int

    def to_json(self) -> dict[str, Any]:
        """Return what the manifest holds; floats survive JSON bit for bit."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Scaler:
        """Return the scaler that `to_json` wrote."""
        return cls(
            tuple(data["columns"]),
            tuple(map(float, data["center"])),
            tuple(map(float, data["scale"])),
            int(data["fitted_until_ns"]),
            int(data["num_rows"]),
        )


def fit_scaler(features: Features, train: Array | slice, fitted_until_ns: int) -> Scaler:
    """Fit medians and quartile ranges on the `train` rows only.

    A feature whose quartiles coincide (mostly zeros) takes its standard deviation instead, and
    one that does not move at all takes 1: nothing is divided by almost nothing.
    """
    rows = features.rows[train]
    center, scale = np.zeros(rows.shape[1]), np.ones(rows.shape[1])
    for place, name in enumerate(features.columns):
        if len(rows) and not name.endswith(("_sin", "_cos")):
            low, middle, high = np.percentile(rows[:, place], (25, 50, 75))
            least = max(_MIN_SPREAD, _MIN_SPREAD_SHARE * abs(middle))
            spread = high - low
            spread = spread if spread > least else float(np.std(rows[:, place]))
            center[place], scale[place] = middle, spread if spread > least else 1.0
    return Scaler(
        features.columns, tuple(center.tolist()), tuple(scale.tolist()), fitted_until_ns, len(rows)
    )


def apply_scaler(rows: Array, scaler: Scaler) -> Array:
    """Return `(rows - center) / scale` as float32; for packing and, the same way, for inference.

    Scaled in float64, so that large raw columns do not lose their digits before the median is subtracted.
    """
    if rows.ndim != 2 or rows.shape[1] != len(scaler.columns):
        raise InputError(
            f"rows of shape {rows.shape} for a scaler of {len(scaler.columns)} features.",
            f"columns {', '.join(scaler.columns)}",
            "make the rows with make_features and the same extras",
        )
    scaled: Array = (np.asarray(rows, np.float64) - scaler.center) / np.asarray(scaler.scale)
    with np.errstate(over="ignore"):  # beyond float32 turns to inf, which the quality gate names
        return scaled.astype(np.float32)
