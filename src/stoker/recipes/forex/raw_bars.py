"""Raw bars for a trained forex model: one answer per bar of the base timeframe, under its time.

Enters: the facts of a model whose store was packed from bars, and files of new bars of the same symbols. Leaves:
`RawBatch`es: windows that end at each bar's close, made and scaled as in training. Costs: the read, and memory for
the bars and one batch of windows.

A window holds bars that had closed by the decision, never a later one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.display import command, look_in
from stoker.errors import InputError
from stoker.recipes.contract import Facts, RawBatch
from stoker.sources.bars import Bars, BarsSource, Naming, Scaler, apply_scaler, make_features
from stoker.sources.bars.dialects import PRICES
from stoker.sources.bars.features import feature_names
from stoker.sources.bars.source import MissingBarsError
from stoker.sources.bars.timeframes import find_windows, gap_mask
from stoker.sources.times import SECOND_NS
from stoker.store.fields import Array
from stoker.train.predict import TIME_COLUMN
from stoker.units import format_count

_WINDOW_ROWS = 4096
_LISTED = 3
_REASONS = {
    "window_not_full": "too few bars before this one for a window",
    "timeframe_stale": "another timeframe has no bar for over a week",
}


def open_raw_bars(given: Any, facts: Facts) -> RawBars:
    """Open files of bars; see `Recipe.open_raw`."""
    if not isinstance(given, str | Path):
        raise InputError(
            f"a {type(given).__name__} of bars.",
            "the path of a file or folder of bars, named by symbol and timeframe",
            'load_model("best.pt").predict("bars/")',
        )
    told = facts["bars"]["options"]
    base, used = told["base"], {*facts["inputs"], told["base"]}
    source = BarsSource(
        (given,),
        tuple((name, int(length)) for name, length in told["windows"].items() if name in used),
        base,
        int(told["horizon"]),
        float(told["latency_seconds"]),
        day_first=told["day_first"],
        tz=told["tz"],
        check_prices=told["check_prices"],
        sort=told["sort"],
        naming=Naming(
            told.get("time_column"),
            tuple(map(tuple, dict(told.get("columns") or {}).items())),
            tuple(told.get("drop") or ()),
        ),
        stamp=told.get("stamp", "open"),
        decimal=told.get("decimal"),
    )
    scalers = {
        symbol: {name: Scaler.from_json(each) for name, each in by_name.items()}
        for symbol, by_name in facts["bars"]["scalers"].items()
    }
    try:
        read = dict(source.read_symbols())
    except MissingBarsError as error:
        raise InputError(
            error.given,
            f"files of {', '.join(name for name, _ in source.windows)} for each symbol, as in training",
            look_in(Path(given) if Path(given).is_dir() else Path(given).parent),
        ) from error
    unknown = [symbol for symbol in read if symbol not in scalers]
    if unknown:
        raise InputError(
            f"{given} holds bars of {', '.join(unknown)}, which the model was not trained on: its prices have other "
            "units, and no scaler was fitted to them.",
            f"bars of {', '.join(scalers)}",
            f"train on these bars: {command('stoker', 'pack', 'bars', given, 'OUT')}",
        )
    return RawBars(read, source, scalers, facts)


class RawBars:
    """The bars of one or more symbols; a `RawReader`."""

    key = TIME_COLUMN

    def __init__(
        self,
        read: Mapping[str, Mapping[str, Bars]],
        source: BarsSource,
        scalers: Mapping[str, Mapping[str, Scaler]],
        facts: Facts,
    ) -> None:
        self._read, self._source, self._scalers = read, source, scalers
        self._inputs: Sequence[str] = facts["inputs"]
        self._base = str(source.base)
        self._num_unanswered = 0
        self.num_rows: int | None = sum(len(bars[self._base]) for bars in read.values())
        for symbol, bars in read.items():
            for name in self._inputs:
                _check_columns(symbol, bars[name], name, scalers[symbol][name])

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield every bar of the base timeframe, in order of symbol and time; its key is the time of its close."""
        for symbol, bars in self._read.items():
            series = {
                name: self._series(bars[name], name, self._scalers[symbol][name])
                for name in self._inputs
            }
            decisions, ends, lacks = find_windows(
                {name: each.time for name, each in bars.items()},
                self._source.windows,
                self._base,
                latency_ns=round(self._source.latency_seconds * SECOND_NS),
            )
            for low in range(0, len(decisions), _WINDOW_ROWS):
                part = slice(low, low + _WINDOW_ROWS)
                yield self._cut(symbol, decisions[part], series, ends, lacks, part)

    def notes(self) -> list[str]:
        """Return what the files were like, and how many bars have a reason instead of an answer."""
        read = [each for bars in self._read.values() for each in bars.values()]
        notes = list(dict.fromkeys(note for each in read for note in each.notes))
        refused = [refusal for each in read for refusal in each.refused]
        if refused:
            shown = "; ".join(map(str, refused[:_LISTED]))
            more = "; ..." if len(refused) > _LISTED else ""
            notes.append(f"{format_count(len(refused), 'line')} that are no bars: {shown}{more}")
        if self._num_unanswered:
            notes.append(
                f"{format_count(self._num_unanswered, 'bar')} without an answer; see 'reason'"
            )
        return notes

    def _series(self, bars: Bars, name: str, scaler: Scaler) -> tuple[Array, Array]:
        """Return scaled rows of float32 and the gap flags."""
        extras = [column for column in bars.columns if column not in PRICES]
        used = [column for column in extras if _is_used(column, name, scaler)]
        rows = make_features(bars.time, bars.columns, name, used).rows
        return apply_scaler(rows, scaler), gap_mask(bars.time, name)

    def _cut(
        self,
        symbol: str,
        decisions: Array,
        series: Mapping[str, tuple[Array, Array]],
        ends: Mapping[str, Array],
        lacks: Mapping[str, Array],
        part: slice,
    ) -> RawBatch:
        reasons: list[str | None] = [None] * len(decisions)
        answered = np.ones(len(decisions), bool)
        for reason, mask in lacks.items():
            for row in np.flatnonzero(mask[part] & answered).tolist():
                reasons[row] = _REASONS[reason]
            answered &= ~mask[part]
        batch: dict[str, torch.Tensor] = {}
        lengths = dict(self._source.windows)
        for name in self._inputs:
            rows, gap = series[name]
            window = np.arange(-lengths[name], 0)
            places = np.maximum(ends[name][part, None] + window, 0)
            cut = rows[places] if len(rows) else np.zeros((len(decisions), lengths[name], 0))
            bad = answered & ~np.isfinite(cut).all(axis=(1, 2))
            for row in np.flatnonzero(bad).tolist():
                reasons[row] = f"values of {name} that are not finite"
            answered &= ~bad
            batch[name] = torch.from_numpy(
                np.where(answered[:, None, None], cut, 0.0).astype(np.float32)
            )
            batch[f"{name}/gap"] = torch.from_numpy(gap[places].astype(np.uint8))
        self._num_unanswered += int((~answered).sum())
        labels = {} if len(self._read) == 1 else {"symbol": np.full(len(decisions), symbol, object)}
        return RawBatch(decisions.astype("M8[ns]"), batch, answered, reasons, labels)


def _is_used(column: str, timeframe: str, scaler: Scaler) -> bool:
    """Whether training had this further column."""
    return set(feature_names([column], timeframe)) <= set(scaler.columns)


def _check_columns(symbol: str, bars: Bars, name: str, scaler: Scaler) -> None:
    extras = [column for column in bars.columns if column not in PRICES]
    used = [column for column in extras if _is_used(column, name, scaler)]
    have = set(feature_names(used, name))
    missing = [column for column in scaler.columns if column not in have]
    if missing:
        raise InputError(
            f"{bars.file}: {symbol} {name} lacks what the model was trained on: {', '.join(missing)}.",
            f"files with the columns of training, which gave {', '.join(scaler.columns)}",
            "files of the same kind as those that were packed",
        )
