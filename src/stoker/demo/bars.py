"""Generated bars: prices with clustered volatility and no weekends, as CSV files in five timeframes.

Enters: a folder, a number of weeks, a seed. Leaves: `EURUSD_<TF>.csv`. Costs a second for nine weeks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stoker.ownership import always, write_text
from stoker.store.fields import Array

_MINUTE_NS = 60_000_000_000
_MINUTES = {"M1": 1, "M5": 5, "M15": 15, "H1": 60, "H4": 240}
_WEEK_MINUTES, _OPEN_MINUTES = 7 * 1440, 5 * 1440
_FIRST_SUNDAY_NS = 1_725_832_800_000_000_000  # Sunday 2024-09-08 22:00, when the week opens


def make_bars(folder: Path, weeks: int, seed: int) -> None:
    """Write `EURUSD_<TF>.csv` for five timeframes, with clustered volatility and no weekends."""
    folder.mkdir(parents=True, exist_ok=True)
    minute = _make_minutes(weeks, np.random.default_rng(seed))
    for name, minutes in _MINUTES.items():
        _write_csv(folder / f"EURUSD_{name}.csv", _resample(minute, minutes))


def _make_minutes(weeks: int, rng: np.random.Generator) -> dict[str, Array]:
    week = np.arange(weeks)[:, None] * _WEEK_MINUTES + np.arange(_OPEN_MINUTES)[None, :]
    opened = week.reshape(-1)
    daily = 1 + 0.6 * np.sin(2 * np.pi * (opened % 1440) / 1440 - 2)
    calm = np.exp(0.5 * np.convolve(rng.normal(size=len(opened)), np.ones(240) / 240**0.5, "same"))
    steps = rng.standard_t(4, size=(4, len(opened))) * 2e-5 * daily * calm
    # Four ticks a minute make a bar with an open, a close and something in between.
    path = 1.1 * np.exp(np.cumsum(steps.T.reshape(-1))).reshape(-1, 4)
    return {
        "time": _FIRST_SUNDAY_NS + opened * _MINUTE_NS,
        "open": path[:, 0],
        "high": path.max(axis=1),
        "low": path.min(axis=1),
        "close": path[:, -1],
        "volume": np.rint(40 * daily * calm * rng.gamma(4, size=len(opened))) + 1,
    }


def _resample(minute: dict[str, Array], minutes: int) -> dict[str, Array]:
    """Return bars of `minutes`, aligned to the clock, from one-minute bars."""
    slot = minute["time"] // (minutes * _MINUTE_NS)
    first = np.flatnonzero(np.diff(slot, prepend=-1))
    last = np.append(first[1:], len(slot)) - 1
    return {
        "time": slot[first] * minutes * _MINUTE_NS,
        "open": minute["open"][first],
        "high": np.maximum.reduceat(minute["high"], first),
        "low": np.minimum.reduceat(minute["low"], first),
        "close": minute["close"][last],
        "volume": np.add.reduceat(minute["volume"], first),
    }


def _write_csv(path: Path, bars: dict[str, Array]) -> None:
    times = np.datetime_as_string(bars["time"].astype("datetime64[ns]"), unit="m")
    prices = np.column_stack([bars[name] for name in ("open", "high", "low", "close")])
    lines = ["time,open,high,low,close,tick_volume"]
    for text, price, volume in zip(times, prices.tolist(), bars["volume"].tolist(), strict=True):
        lines.append(f"{text.replace('T', ' ')},{','.join(f'{x:.5f}' for x in price)},{volume:.0f}")
    write_text(path, "\n".join(lines) + "\n", always)
