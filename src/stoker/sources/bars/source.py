"""Bars of several timeframes into a store: each bar once, each sample a few end indices.

Enters: CSV, Parquet or Feather files of bars, one or more per symbol and timeframe. Leaves: one part per symbol with
one series per timeframe and the dense fields `time`, `label_time`, `targets`, `split` and
`label_gap`. Costs: the read (about 0.5 s per million rows) and 150 bytes of memory per bar. With
several symbols the files are read twice, so that all symbols share the dates of the splits.

fields of a part of n samples (windows are never stored)
    M1, M5, ...   series: scaled features per bar, open time, gap flag; `ends` per sample
    time          (n,) int64      decision time: the close of a base bar, nanoseconds
    label_time    (n,) int64      close of the last bar the label uses
    targets       (n, horizon)    log return of the base close, 1 to horizon bars after `time`
    split         (n,) uint8      0 train, 1 val, 2 test, 3 purged: never use
    label_gap     (n,) uint8      1 where the label runs over missing bars
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from stoker.display import look_in, quoted
from stoker.errors import InputError, SourceError, count_kinds
from stoker.sources.bars.dialects import Naming
from stoker.sources.bars.features import (
    Scaler,
    apply_scaler,
    feature_names,
    fit_scaler,
    make_features,
)
from stoker.sources.bars.files import (
    BarFile,
    find_files,
    guessed_label,
    look,
    shared_extras,
    split_symbols,
    unnamed_files,
)
from stoker.sources.bars.reading import OTHER_SYMBOLS, Bars, merge_bars, read_bars, show_time
from stoker.sources.bars.timeframes import (
    DEFAULT_WINDOWS,
    SPLIT_NAMES,
    TIMEFRAMES,
    TRAIN,
    Samples,
    assign_splits,
    check_spacing,
    clock_shift,
    close_times,
    describe_spacing,
    find_boundaries,
    gap_mask,
    make_samples,
    parse_windows,
    pick_base,
)
from stoker.sources.contract import (
    Account,
    Json,
    Part,
    PartContext,
    PartData,
    PlainSource,
    Preparation,
    check_shares,
    recorded_options,
)
from stoker.sources.times import SECOND_NS, parse_time
from stoker.store.fields import Array, Dense, FieldData, Series
from stoker.units import format_count


class MissingBarsError(SourceError):
    """A timeframe that has a window has no file."""


@dataclass(frozen=True)
class BarsSource(PlainSource):
    """Bars of several timeframes, aligned on their close times.

    Attributes:
        paths: Files, "SYMBOL:TIMEFRAME=file" labels, or folders.
        windows: Bars per window, by timeframe.
        base: Timeframe that decides and is forecast; None takes M5, else the shortest.
        horizon: Base bars ahead that the targets cover.
        latency_seconds: Delay after its close before a bar may be used.
        ratios: Shares of train, val and test, in time order.
        split_at: Last decision times of train and val ("2020-09-01"), instead of `ratios`.
        embargo: Base bars left out after each boundary; None takes `horizon`.
        max_label_gap: Drop samples whose label misses more base bars than this in a row.
        day_first: How "10/11/2020" reads; None looks for proof.
        tz: IANA zone of the files' clock; None keeps the clock as it is.
        check_prices: Refuse bars whose prices contradict each other.
        sort: Sort files that are in no order.
        naming: What the columns are called, where the headers do not say it.
        stamp: "open" where a bar's time is its open, "close" where it is its close.
        decimal: The decimal sign of quoted numbers such as "1,234"; None finds it.
    """

    paths: tuple[str | Path, ...]
    windows: tuple[tuple[str, int], ...] = DEFAULT_WINDOWS
    base: str | None = None
    horizon: int = 36
    latency_seconds: float = 0.0
    ratios: tuple[float, float, float] = (0.70, 0.15, 0.15)
    split_at: tuple[str, str] | None = None
    embargo: int | None = None
    max_label_gap: int | None = None
    day_first: bool | None = None
    tz: str | None = None
    check_prices: bool = True
    sort: bool = False
    naming: Naming = field(default_factory=Naming)
    stamp: str = "open"
    decimal: str | None = None
    kind: ClassVar[str] = "bars"
    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        text = ",".join(f"{name}={length}" for name, length in self.windows)
        object.__setattr__(self, "windows", parse_windows(text))
        object.__setattr__(self, "base", pick_base(self.windows, self.base))
        object.__setattr__(self, "embargo", self.horizon if self.embargo is None else self.embargo)
        for name, least in (("horizon", 1), ("embargo", 0), ("latency_seconds", 0)):
            value, word = getattr(self, name), name.partition("_")[0]
            if value < least:
                raise InputError(
                    f"--{word} is {value}.",
                    f"{least} or more",
                    f"--{word} {least} ({name}={least})",
                )
        check_shares(self.ratios, "ratios")
        if self.stamp not in ("open", "close"):
            raise InputError(f"--stamp is {self.stamp!r}.", "open or close", "--stamp open")
        if self.decimal not in (None, ".", ","):
            raise InputError(f"--decimal is {self.decimal!r}.", "a point or a comma", "--decimal .")
        self._fixed_boundaries()

    @property
    def _base(self) -> str:
        return str(self.base)

    def files(self) -> Sequence[Path]:
        """Every file of bars that is used, in a stable order."""
        return list(dict.fromkeys(file.path for file in self._named()[0]))

    def options(self) -> Mapping[str, Json]:
        """Every option that changes the output."""
        return {
            **recorded_options(self, "paths", "naming"),
            **recorded_options(self.naming, "ticker"),
            "windows": dict(self.windows),
            "columns": dict(self.naming.columns),
        }

    def prepare(self, scratch: Path) -> Preparation:  # noqa: ARG002 the contract lends a folder
        """Group the files by symbol, fix the split dates, and estimate the size."""
        wanted, notes = self._wanted()
        grouped = self._grouped(wanted)
        heads = {file: look(file.path, self.naming, self.decimal, file.ticker) for file in wanted}
        extras, more_notes = shared_extras(grouped, heads)
        there = {name for head in heads.values() for name in head.dialect.dropped}
        lost = [name for name in self.naming.drop if name not in there]
        if lost:
            columns = dict.fromkeys(name for head in heads.values() for name in head.extras)
            raise SourceError(
                f"no file has a column {', '.join(map(repr, lost))} that can be dropped.",
                ", ".join(columns) or "files with further columns than open, high, low, close",
                " ".join(f"--drop {quoted(name)}" for name in list(columns)[:1])
                or "leave --drop out",
            )
        boundaries = self._fixed_boundaries()
        if boundaries is None and len(grouped) > 1:
            boundaries, kept = self._shared_boundaries(grouped)
            # A column that one file has no numbers in is left out for all: parts need the same features.
            extras = {
                name: tuple(x for x in names if x in kept[name]) for name, names in extras.items()
            }
        parts, size = [], 0
        for index, (symbol, by_name) in enumerate(grouped.items()):
            rows = {
                name: sum(heads[file].num_rows for file in files) for name, files in by_name.items()
            }
            payload = (by_name, len(grouped) == 1, extras, boundaries)
            parts.append(Part(index, symbol, rows[self._base], payload))
            size += rows[self._base] * (18 + 4 * self.horizon + 8 * len(rows))
            for name, count in rows.items():
                size += count * (4 * len(feature_names(extras[name], name)) + 9)
        return Preparation(parts, size, notes=[*notes, *more_notes])

    def build(self, part: Part, context: PartContext) -> PartData:  # noqa: ARG002 nothing can hang
        """Read one symbol and lay out its series, samples and targets."""
        files, is_alone, shared, boundaries = part.payload
        bars = self._read_all(files)
        samples = self._samples(bars)
        if not len(samples.time):
            raise _no_samples(part.label, bars, self.windows, samples)
        boundaries = boundaries or find_boundaries(samples.time, self.ratios)
        base_close = close_times(bars[self._base].time, self._base)
        split = assign_splits(samples, base_close, boundaries, int(self.embargo or 0))
        made: dict[str, FieldData] = {}
        scalers, facts, accounts = {}, {}, []
        for name, window in self.windows:
            each, ends = bars[name], samples.ends[name]
            extras = _known_extras(each, shared[name], is_alone)
            series, scaler = _make_series(each, name, window, ends, boundaries[0], extras)
            made[name], scalers[name] = series, scaler.to_json()
            assert series.time is not None
            assert series.gap is not None
            facts[name] = {
                "file": each.file,
                "bars_read": len(each),
                "rows_stored": len(series.rows),
                "first_ns": int(series.time[0]),
                "last_ns": int(series.time[-1]),
                "gaps": int(series.gap.sum()),
                "refused": len(each.refused),
            }
            accounts.append(_bar_account(each, len(series.rows), name))
        targets = make_targets(bars[self._base].columns["close"], samples.bar, self.horizon)
        steps = tuple(f"return_{step}" for step in range(1, self.horizon + 1))
        made |= {
            "time": Dense(samples.time),
            "label_time": Dense(samples.label_time),
            "targets": Dense(targets, columns=steps),
            "split": Dense(split),
            "label_gap": Dense(samples.label_gap),
        }
        train = targets[split == TRAIN]
        counts = np.bincount(split, minlength=len(SPLIT_NAMES)).tolist()
        refused = [refusal for each in bars.values() for refusal in each.refused]
        ignored = {_DROPPED[why]: count for why, count in samples.dropped.items()}
        num_bars = len(bars[self._base])
        accounts.append(
            Account("decisions (base bars)", num_bars, len(samples.time), ignored=ignored)
        )
        extra = {
            "symbol": part.label,
            "timeframes": facts,
            "scalers": scalers,
            "dropped": samples.dropped,
            "splits": {
                "counts": dict(zip(SPLIT_NAMES, counts, strict=True)),
                "train_end_ns": boundaries[0],
                "val_end_ns": boundaries[1],
                "labels_over_gaps": int(samples.label_gap.sum()),
            },
            # Standard deviation of the training targets, for losses.
            "target_scale": float(np.std(train, dtype=np.float64)) if len(train) else None,
            "materialised_bytes": _materialised_bytes(made, self.horizon),
            "notes": [note for each in bars.values() for note in each.notes],
            "accounts": list(map(asdict, accounts)),
        }
        return PartData(made, refused, extra)

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Merge the facts of all parts: facts and scalers by symbol, sizes in total."""
        keys = ("timeframes", "dropped", "splits", "target_scale", "notes")
        return {
            "base": self.base,
            "horizon": self.horizon,
            "windows": dict(self.windows),
            "split_names": list(SPLIT_NAMES),
            "symbols": {extra["symbol"]: {key: extra[key] for key in keys} for extra in extras},
            "scalers": {extra["symbol"]: extra["scalers"] for extra in extras},
            "notes": list(dict.fromkeys(note for extra in extras for note in extra["notes"])),
            "materialised_bytes": sum(extra["materialised_bytes"] for extra in extras),
            "accounts": [
                _total(each) for each in zip(*(extra["accounts"] for extra in extras), strict=True)
            ],
        }

    def read_symbols(self) -> Iterator[tuple[str, dict[str, Bars]]]:
        """Yield each symbol with its bars by timeframe, read and checked as for packing; for predictions."""
        for symbol, files in self._grouped(self._wanted()[0]).items():
            yield symbol, self._read_all(files)

    def _wanted(self) -> tuple[list[BarFile], list[str]]:
        """Return the files whose timeframe has a window, one for each symbol in them, and notes on others."""
        named, notes = self._named()
        files, more = split_symbols(named, self.naming, self.decimal)
        return sorted(files, key=lambda file: (file.symbol, str(file.path))), [*notes, *more]

    def _named(self) -> tuple[list[BarFile], list[str]]:
        found, notes = find_files(self.paths)
        names = {name for name, _ in self.windows}
        wanted = [file for file in found if file.timeframe in names]
        others = [file for file in found if file.timeframe not in names]
        notes += [f"{file.path}: {file.timeframe} has no window; ignored" for file in others]
        if not wanted:
            there = sorted({file.timeframe for file in found})
            unnamed = [] if there else unnamed_files(self.paths)
            labels = list(filter(None, map(guessed_label, unnamed[:_MOST_GUESSED])))
            shown = ", ".join(path.name for path in unnamed[:_MOST_GUESSED])
            raise MissingBarsError(
                f"no file of bars for {', '.join(sorted(names))} among {format_count(len(found), 'file')}"
                f"{f'; their names say no symbol and timeframe: {shown}' if unnamed else ''}.",
                "files named by symbol and timeframe, such as EURUSD_M5.csv.gz, or SYMBOL:TF=FILE for each",
                f"--windows {quoted(','.join(f'{name}=96' for name in there))}"
                if there
                else " ".join(map(quoted, labels)) or look_in(Path(self.paths[0])),
            )
        return sorted(wanted, key=lambda file: (file.symbol, str(file.path))), notes

    def _grouped(self, wanted: Sequence[BarFile]) -> dict[str, dict[str, list[BarFile]]]:
        """Return the files by symbol and timeframe; raise if a symbol lacks a timeframe."""
        grouped: dict[str, dict[str, list[BarFile]]] = {}
        for file in wanted:
            by_name = grouped.setdefault(file.symbol, {name: [] for name, _ in self.windows})
            by_name[file.timeframe].append(file)
        for symbol, by_name in grouped.items():
            missing = [name for name, files in by_name.items() if not files]
            if missing:
                add = f"add {quoted(f'{symbol}_{missing[0]}.csv')}"
                rest = ",".join(f"{name}={size}" for name, size in self.windows if by_name[name])
                raise MissingBarsError(
                    f"{symbol} has no file for {', '.join(missing)}.",
                    "a file per window",
                    f"--windows {quoted(rest)}, or {add}" if rest else add,
                )
        return grouped

    def _read_all(self, files: Mapping[str, Sequence[BarFile]]) -> dict[str, Bars]:
        """Read the timeframes of one symbol; raise if one of them has another clock."""
        bars = {name: self._read(paths, name) for name, paths in files.items()}
        self._check_clocks(bars)
        return bars

    def _read(self, files: Sequence[BarFile], timeframe: str) -> Bars:
        read = []
        for file in files:
            bars = read_bars(
                file.path,
                day_first=self.day_first,
                tz=self.tz,
                check_prices=self.check_prices,
                sort=self.sort,
                naming=replace(self.naming, ticker=file.ticker),
                decimal=self.decimal,
            )
            if self.stamp == "close" or bars.is_close:
                duration = TIMEFRAMES[timeframe]
                # Binance stamps the last millisecond of a bar, others its end: both belong to the next full minute.
                minute = 60 * SECOND_NS
                ends = -(-bars.time // minute) * minute
                bars.notes.append(
                    f"{bars.file}: times are those of the closes; a bar opens {timeframe} before"
                )
                bars = replace(bars, time=ends - duration)
            check_spacing(bars.time, timeframe, bars.file)
            bars.notes.extend(describe_spacing(bars.time, timeframe, bars.file))
            read.append(bars)
        return merge_bars(read)

    def _check_clocks(self, bars: Mapping[str, Bars]) -> None:
        """Raise where one file's clock is whole hours off: its bars would be seen too early."""
        finest = self.windows[0][0]
        for name, _ in self.windows[1:]:
            hours = clock_shift(
                (bars[finest].time, bars[finest].columns["close"], finest),
                (bars[name].time, bars[name].columns["close"], name),
            )
            if hours:
                raise SourceError(
                    f"the clock of {bars[name].file} runs {hours:+d} h against {bars[finest].file}.",
                    "all timeframes of a symbol on one clock",
                    "another export of all timeframes, from one broker and one terminal",
                )

    def _samples(self, bars: Mapping[str, Bars]) -> Samples:
        return make_samples(
            {name: each.time for name, each in bars.items()},
            self.windows,
            self._base,
            self.horizon,
            latency_ns=round(self.latency_seconds * SECOND_NS),
            max_label_gap=self.max_label_gap,
        )

    def _fixed_boundaries(self) -> tuple[int, int] | None:
        if self.split_at is None:
            return None
        read = [parse_time(text, self.day_first) for text in self.split_at]
        ends = [each for each in read if not isinstance(each, str)]
        if not len(read) == len(ends) == 2 or ends[0] > ends[1]:
            raise InputError(
                f"split_at {self.split_at} is not two times in order.",
                "the last decision times of train and of val",
                "--split-at 2020-09-15,2020-10-01",
            )
        return ends[0], ends[1]

    def _shared_boundaries(
        self, grouped: Mapping[str, Mapping[str, Sequence[BarFile]]]
    ) -> tuple[tuple[int, int], dict[str, set[str]]]:
        """Return split dates for all symbols (one's val must not be another's train), and the columns that all have."""
        decisions = []
        kept: dict[str, set[str]] = {}
        for files in grouped.values():
            bars = {name: self._read(paths, name) for name, paths in files.items()}
            for name, each in bars.items():
                kept[name] = kept.get(name, set(each.columns)) & set(each.columns)
            decisions.append(self._samples(bars).time)
        return find_boundaries(np.sort(np.concatenate(decisions)), self.ratios), kept


def _known_extras(bars: Bars, extras: Sequence[str], is_alone: bool) -> tuple[str, ...]:
    """Return the further columns that were read; raise if one is missing and other symbols have it."""
    known = tuple(name for name in extras if name in bars.columns)
    lost = [name for name in extras if name not in known]
    if lost and not is_alone:
        raise SourceError(
            f"{bars.file}: column {lost[0]!r} holds cells that are no numbers, and other symbols have it.",
            "the same columns for every symbol",
            f"--drop {quoted(lost[0])}",
        )
    return known


_MOST_GUESSED = 3
_DROPPED = {
    "window_not_full": "bars with too few bars before them for a window",
    "timeframe_stale": "bars whose other timeframe has no bar for over a week",
    "label_beyond_data": "bars whose label would end after the data",
    "label_gap_too_long": "bars whose label runs over too long a gap",
}


def _bar_account(bars: Bars, num_packed: int, name: str) -> Account:
    # A gzip file that ends early has one refusal without a line.
    whole = sum(refusal.count for refusal in bars.refused if refusal.line is None)
    ignored = {**bars.ignored, "bars that no window shows": len(bars) - num_packed}
    # Lines of other symbols are counted where those are packed.
    found = bars.num_lines + whole - ignored.pop(OTHER_SYMBOLS, 0)
    unit = f"{bars.unit}s of {name}"
    return Account(unit, found, num_packed, count_kinds(bars.refused), ignored)


def _total(accounts: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Add up the accounts of all symbols."""

    def added(key: str) -> Counter[str]:
        return sum((Counter(account[key]) for account in accounts), Counter())

    found, packed = (sum(account[key] for account in accounts) for key in ("found", "packed"))
    return asdict(Account(accounts[0]["unit"], found, packed, added("refused"), added("ignored")))


def make_targets(close: Array, bar: Array, horizon: int) -> Array:
    """Return `(n, horizon)` float32: log return from the close of `bar` to each of the next bars."""
    log_close = np.log(close)
    ahead = np.lib.stride_tricks.sliding_window_view(log_close, horizon + 1)[bar]
    returns: Array = (ahead[:, 1:] - ahead[:, :1]).astype(np.float32)
    return returns


def _make_series(
    bars: Bars,
    timeframe: str,
    window: int,
    ends: Array,
    train_end_ns: int,
    extras: Sequence[str],
) -> tuple[Series, Scaler]:
    """Return scaled features of the bars that windows use, and the scaler, fitted on the training span."""
    features = make_features(bars.time, bars.columns, timeframe, extras)
    first, stop = int(ends.min()) - window, int(ends.max())
    known = int(np.searchsorted(close_times(bars.time, timeframe), train_end_ns, side="right"))
    if known <= first:
        raise SourceError(
            f"{bars.file} has no bar before train ends at {show_time(train_end_ns)}.",
            "bars in the training span, to fit the scaler on",
            "leave the symbol out, or give a later split_at",
        )
    scaler = fit_scaler(features, slice(first, known), train_end_ns)
    series = Series(
        rows=apply_scaler(features.rows[first:stop], scaler),
        time=bars.time[first:stop],
        ends=ends - first,
        window=window,
        gap=gap_mask(bars.time, timeframe)[first:stop],
        columns=features.columns,
        duration_ns=TIMEFRAMES[timeframe],
    )
    return series, scaler


def _materialised_bytes(fields: Mapping[str, FieldData], horizon: int) -> int:
    """Bytes that the windows and targets would take if each sample were written out."""
    series = [data for data in fields.values() if isinstance(data, Series)]
    per_sample = sum(each.window * each.rows.shape[1] * each.rows.itemsize for each in series)
    return int(fields["targets"].num_samples * (per_sample + 4 * horizon))


def _no_samples(
    symbol: str, bars: Mapping[str, Bars], windows: Sequence[tuple[str, int]], samples: Samples
) -> SourceError:
    def spell(name: str, length: int) -> str:
        time = bars[name].time.astype("M8[ns]").astype("M8[m]")
        span = f"{time[0]} to {time[-1]}" if len(time) else "nothing"
        return f"{name}: {len(time)} bars for a window of {length}, {span}"

    spans = "; ".join(spell(name, length) for name, length in windows)
    drops = ", ".join(f"{reason} {count}" for reason, count in samples.dropped.items() if count)
    return SourceError(
        f"{symbol} gives no sample ({drops or 'no base bars'}). {spans}.",
        "spans of time that overlap by a whole window and horizon",
        "give longer files, shorter windows or a shorter horizon",
    )
