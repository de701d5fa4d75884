"""Raw bars for a trained forex model: one answer per bar of the base timeframe, with the bar's close time as key.

Enters: the facts of a model whose store was packed from bars, and new bars of the same symbols: files, or frames in
memory. Leaves: `RawBatch`es: windows that end at each bar's close, made and scaled as in training. Costs: the read, and
memory for the bars and one batch of windows; frames are written to a temporary folder and read like files.

A window contains only bars that had closed at the decision time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from stoker.display import command, look_in
from stoker.errors import InputError, SourceError
from stoker.ownership import temporary_folder
from stoker.recipes.contract import Facts, RawBatch
from stoker.recipes.raw_tables import as_frame
from stoker.sources.bars import Bars, BarsSource, Naming, Scaler, apply_scaler, make_features
from stoker.sources.bars.dialects import PRICES, TICKER_NAMES, TIME_NAMES, clean_name
from stoker.sources.bars.features import feature_names
from stoker.sources.bars.source import MissingBarsError
from stoker.sources.bars.timeframes import find_windows, gap_mask, parse_timeframe
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
    """Open bars; see `Recipe.open_raw`.

    Args:
        given: A file, a folder, or "SYMBOL:TIMEFRAME=file"; in memory a frame, or frames by timeframe, by symbol, or by
            both, as in `{"M5": frame, "H1": frame}`.
        facts: The facts of the checkpoint.

    Raises:
        InputError: A symbol was not in the training, or a column of the training is missing.
        SourceError: The files cannot be read.
    """
    told = facts["bars"]["options"]
    base, used = told["base"], {*facts["inputs"], told["base"]}
    source = BarsSource(
        (given,) if isinstance(given, str | Path) else (),
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
    timeframes = [name for name, _ in source.windows]
    if isinstance(given, str | Path):
        where = Path(given) if Path(given).is_dir() else Path(given).parent
        what, mend = str(given), look_in(where)
        read = _read(source, mend)
    else:
        what = f"the {type(given).__name__}"
        read = _read_frames(given, source, list(scalers), timeframes)
    unknown = [symbol for symbol in read if symbol not in scalers]
    if unknown:
        raise InputError(
            f"{what} holds bars of {', '.join(unknown)}, which the model was not trained on: its prices have other "
            "units, and no scaler was fitted to them.",
            f"bars of {', '.join(scalers)}",
            f"train on these bars: {command('stoker', 'pack', 'bars', given, 'OUT')}"
            if isinstance(given, str | Path)
            else f"frames under these names: {_frames_like(list(scalers), timeframes)}",
        )
    return RawBars(read, source, scalers, facts)


def _read(source: BarsSource, mend: str) -> dict[str, dict[str, Bars]]:
    try:
        return dict(source.read_symbols())
    except MissingBarsError as error:
        names = ", ".join(name for name, _ in source.windows)
        allowed = f"files of {names} for each symbol, as in training"
        raise InputError(error.given, allowed, mend) from error


# -- frames in memory ----------------------------------------------------------------------------


def _read_frames(
    given: Any, source: BarsSource, symbols: Sequence[str], timeframes: Sequence[str]
) -> dict[str, dict[str, Bars]]:
    """Return the bars of frames, with the reader for files."""
    mend = _frames_like(symbols, timeframes)
    frames = list(_named_frames(given))
    for _, timeframe, frame in frames:
        if timeframe is None and len(timeframes) > 1:
            raise InputError(
                f"a {type(frame).__name__} of bars without a timeframe.",
                f"a frame for each of {', '.join(timeframes)}, as in training",
                _frames_like(symbols, timeframes),
            )
    with temporary_folder() as scratch:
        paths = []
        for named, timeframe, frame in frames:
            table = _with_time(frame)
            symbol, name = named or _symbol_in(table, symbols, mend), timeframe or timeframes[0]
            path = scratch / f"the frame of {symbol} {name}"
            pq.write_table(table, path)
            paths.append(f"{symbol}:{name}={path}")
        place = f"{scratch}/"
        try:
            read = _read(replace(source, paths=tuple(paths)), mend)
        except SourceError as error:
            raise InputError(
                error.given.replace(place, ""),
                "a frame of bars: a time, open, high, low and close, named as in the files of training",
                "frame.rename(columns={'NAME': 'open'}), and frame.sort_values('time') where times do not rise",
            ) from error
    for by_name in read.values():
        for name, bars in by_name.items():
            by_name[name] = replace(
                bars,
                file=bars.file.replace(place, ""),
                notes=[note.replace(place, "") for note in bars.notes],
                refused=[replace(each, file=each.file.replace(place, "")) for each in bars.refused],
            )
    return read


def _frames_like(symbols: Sequence[str], timeframes: Sequence[str]) -> str:
    """Return an example call for error messages: a frame, or a mapping with the fewest names needed."""
    if len(timeframes) == 1 and len(symbols) == 1:
        return "predict(frame)"
    by_timeframe = ", ".join(f"{name!r}: frame" for name in timeframes)
    inner = "frame" if len(timeframes) == 1 else f"{{{by_timeframe}}}"
    return f"predict({inner})" if len(symbols) == 1 else f"predict({{{symbols[0]!r}: {inner}}})"


def _named_frames(
    given: Any, symbol: str | None = None, timeframe: str | None = None
) -> Iterator[tuple[str | None, str | None, Any]]:
    """Yield every frame of a mapping of any depth, with symbol and timeframe from its keys, else None."""
    is_nested = isinstance(given, Mapping) and any(
        isinstance(value, Mapping) or hasattr(value, "columns") for value in given.values()
    )
    if not is_nested:
        yield symbol, timeframe, given
        return
    for key, inside in given.items():
        own_symbol, own_timeframe = symbol, timeframe
        for word in key if isinstance(key, tuple) else str(key).split(":"):
            try:
                own_timeframe = parse_timeframe(str(word))
            except InputError:
                own_symbol = str(word).upper()
        yield from _named_frames(inside, own_symbol, own_timeframe)


def _symbol_in(table: pa.Table, symbols: Sequence[str], mend: str) -> str:
    """Return the symbol of a frame that has no key: from its own column, or the only symbol of the training."""
    column = next((name for name in table.column_names if clean_name(name) in TICKER_NAMES), None)
    inside = sorted(map(str, pc.unique(table[column]).to_pylist())) if column is not None else []
    if len(inside) == 1:
        return inside[0].upper()
    if not inside and len(symbols) > 1:
        raise InputError(
            f"a frame of bars without a symbol, for a model of {', '.join(symbols)}.",
            "a frame for each symbol, or a column 'symbol'",
            mend,
        )
    return symbols[0]  # if one frame has several symbols, the reader separates them by name


def _with_time(given: Any) -> pa.Table:
    """Return a frame as an Arrow table; a pandas index other than a RangeIndex becomes a column."""
    if hasattr(given, "iloc"):
        index: Any = given.index
        given = given.copy(deep=False)
        given.columns = [
            "_".join(map(str, filter(None, name))) if isinstance(name, tuple) else str(name)
            for name in given.columns
        ]
        has_time = any(clean_name(name) in TIME_NAMES for name in given.columns)
        if type(index).__name__ != "RangeIndex" and not has_time:
            given = given.rename_axis(index=str(index.name or "time")).reset_index()
    return as_frame(given, ["time", *PRICES])


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
        self._step: int | None = facts.get("labels", {}).get("direction_step")
        self._num_unanswered = self._num_trained = 0
        self.num_rows: int | None = sum(len(bars[self._base]) for bars in read.values())
        for symbol, bars in read.items():
            for name in self._inputs:
                _check_columns(symbol, bars[name], name, scalers[symbol][name])

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield every bar of the base timeframe, by symbol, then time. The key is the time of its close."""
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
            came = self._returns(bars[self._base], len(decisions))
            until = self._scalers[symbol][self._base].fitted_until_ns
            came[decisions <= until] = np.nan
            self._num_trained += int((decisions <= until).sum())
            for low in range(0, len(decisions), _WINDOW_ROWS):
                part = slice(low, low + _WINDOW_ROWS)
                made = self._cut(symbol, decisions[part], series, ends, lacks, part)
                yield replace(made, truth=came[part, None])

    def notes(self) -> list[str]:
        """Return notes on the files, and how many bars have a reason instead of an answer."""
        read = [each for bars in self._read.values() for each in bars.values()]
        notes = list(dict.fromkeys(note for each in read for note in each.notes))
        refused = [refusal for each in read for refusal in each.refused]
        if refused:
            shown = "; ".join(map(str, refused[:_LISTED]))
            more = "; ..." if len(refused) > _LISTED else ""
            count = format_count(len(refused), refused[0].unit)
            notes.append(f"{count} that are no bars: {shown}{more}")
        if self._num_trained:
            count = format_count(self._num_trained, "bar")
            notes.append(f"{count} of the span that was trained on: answered, not evaluated")
        if self._num_unanswered:
            notes.append(
                f"{format_count(self._num_unanswered, 'bar')} without an answer; see 'reason'"
            )
        return notes

    def _returns(self, bars: Bars, count: int) -> Array:
        """Return the log return over the `direction_step` bars after each bar; NaN at the end of the bars."""
        returns = np.full(count, np.nan)
        if self._step is not None and count == len(bars) > self._step:
            close = np.log(bars.columns["close"])
            returns[: -self._step] = close[self._step :] - close[: -self._step]
        return returns

    def _series(self, bars: Bars, name: str, scaler: Scaler) -> tuple[Array, Array]:
        """Return scaled rows of float32 and the gap flags."""
        extras = _used_extras(bars, name, scaler)
        rows = make_features(bars.time, bars.columns, name, extras).rows
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


def _used_extras(bars: Bars, timeframe: str, scaler: Scaler) -> list[str]:
    """Return the additional columns (besides prices) that the training had as well."""
    extras = [column for column in bars.columns if column not in PRICES]
    known = set(scaler.columns)
    return [column for column in extras if known.issuperset(feature_names([column], timeframe))]


def _check_columns(symbol: str, bars: Bars, name: str, scaler: Scaler) -> None:
    have = feature_names(_used_extras(bars, name, scaler), name)
    missing = [column for column in scaler.columns if column not in have]
    if missing:
        raise InputError(
            f"{bars.file}: {symbol} {name} lacks what the model was trained on: {', '.join(missing)}.",
            f"files with the columns of training, which gave {', '.join(scaler.columns)}",
            "files of the same kind as those that were packed",
        )
