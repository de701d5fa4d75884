"""When a bar is known, which bars a decision may see, and which samples are for training, validation or test.

Enters: open times of bars (int64 nanoseconds) per timeframe. Leaves: end indices, gap masks,
labels and splits, as plain arrays. Pure functions of their arguments. Costs: one binary search
per sample and timeframe; 10 ms for 100,000 samples.

The rule, once: a bar's `time` is its open. It is known at `open + duration + latency`. A decision
at t sees, per timeframe, the last L bars known at t. Its label begins after t.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from stoker.display import quoted
from stoker.errors import InputError, SourceError
from stoker.sources.times import DAY_NS, SECOND_NS
from stoker.store.fields import Array

MINUTE_NS = 60 * SECOND_NS
HOUR_NS = 60 * MINUTE_NS

TIMEFRAMES: Mapping[str, int] = {
    **{f"M{count}": count * MINUTE_NS for count in (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30)},
    **{f"H{count}": count * HOUR_NS for count in (1, 2, 3, 4, 6, 8, 12)},
    "D1": DAY_NS,
    "W1": 7 * DAY_NS,
}
"""Name to duration in nanoseconds. A month has no fixed duration and is not among them."""
BY_DURATION = {duration: name for name, duration in TIMEFRAMES.items()}

DEFAULT_WINDOWS = (("M1", 480), ("M5", 288), ("M15", 192), ("H1", 96), ("H4", 48))
TRAIN, VAL, TEST, PURGED = 0, 1, 2, 3
SPLIT_NAMES = ("train", "val", "test", "purged")

# Longest market holiday seen in 13 years of EURUSD is 3 days and 1 hour.
_STALE_NS = 7 * DAY_NS
_LAST_WORDS = {"d": "D1", "daily": "D1", "w": "W1", "weekly": "W1", "hourly": "H1"}
_MT4 = ("M1", "M5", "M15", "M30", "H1", "H4", "D1", "W1")
_UNITS = {**dict.fromkeys(("m", "min", "t"), MINUTE_NS), "h": HOUR_NS, "d": DAY_NS, "w": 7 * DAY_NS}
_SUFFIXES = re.compile(r"(?i)\.(?:csv|txt|tsv|prn|gz|parquet|pq|feather|arrow)$")


def parse_timeframe(text: str) -> str:
    """Return the name for "M5", "m5", "5m", "5min", "1h", "PERIOD_H4"; "1M" (a month) is refused."""
    name = text.strip().upper().removeprefix("PERIOD_")
    if name in TIMEFRAMES:
        return name
    match = re.fullmatch(r"([0-9]+)(m|min|T|h|H|d|D|w|W)", text.strip())
    if match:
        duration = int(match[1]) * _UNITS[match[2].lower()]
        if duration in BY_DURATION:
            return BY_DURATION[duration]
    raise InputError(f"{text!r} is not a timeframe.", ", ".join(TIMEFRAMES), "for example M5")


def parse_windows(text: str) -> tuple[tuple[str, int], ...]:
    """Return the windows for "M1=480,M5=288,H1=96": bars per window, by timeframe."""
    windows: dict[str, int] = {}
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, length = (part.strip() for part in piece.partition("="))
        if not equals or not length.isdecimal() or int(length) < 1:
            raise InputError(
                f"window {piece!r} is not a timeframe and a number of bars.",
                "TIMEFRAME=BARS, split by commas",
                "--windows M5=288,H1=96",
            )
        name = parse_timeframe(name)
        if name in windows:
            raise InputError(f"window {name} is given twice.", "one window per timeframe", "")
        windows[name] = int(length)
    if not windows:
        raise InputError(
            "no window is given.", "TIMEFRAME=BARS, split by commas", "--windows M5=288,H1=96"
        )
    return tuple(sorted(windows.items(), key=lambda window: TIMEFRAMES[window[0]]))


def name_file(path: str | PurePath) -> tuple[str | None, str | None]:
    """Return symbol and timeframe from a file's name; None for one that it does not have.

    Reads EURUSD_M15.csv.gz, EURUSD-M5.csv, EURUSD_M5_202001020000_202010152355.csv (MT5),
    EURUSD15.csv and EURUSDh1.csv (MT4), DAT_ASCII_EURUSD_M1_2020.csv (histdata), BTCUSDT-5m-2020-10.csv,
    EURUSD_Candlestick_1_Hour_BID_01.01.2020-02.01.2020.csv (Dukascopy), eurusd_d.csv (Stooq).
    """
    stem = PurePath(path).name
    while _SUFFIXES.search(stem):
        stem = _SUFFIXES.sub("", stem)
    words = [word for word in re.split(r"[_\-, ]+|\.(?=[A-Za-z]+[0-9])", stem) if word]
    if [word.upper() for word in words[:2]] in (["DAT", "ASCII"], ["DAT", "MT"], ["DAT", "NT"]):
        words = words[2:]
    words = _joined_timeframe(words)
    for place, word in enumerate(words):
        try:
            timeframe = parse_timeframe(word)
        except InputError:
            continue
        # EUR_USD_H1 and EUR_GBP_H1 are two symbols, and so are Binance_BTCUSDT_1h and Binance_ETHUSDT_1h.
        symbol = "_".join(words[:place]) if place else next(iter(words[1:2]), None)
        return (symbol.upper() if symbol else None), timeframe
    # MT4 appends minutes. Six letters at least, or US30 would be thirty minutes of "US".
    # Others append the timeframe itself; EURUSDh1 is not one minute of EURUSDH.
    glued = re.fullmatch(r"([A-Za-z]{6,}?)([mhdw][0-9]+)", stem, re.IGNORECASE)
    if glued:
        with contextlib.suppress(InputError):
            return glued[1].upper(), parse_timeframe(glued[2])
    match = re.fullmatch(r"([A-Za-z]{6,}[A-Za-z.#]*?)([0-9]+)", stem)
    known = BY_DURATION.get(int(match[2]) * MINUTE_NS) if match else None
    if match and known in _MT4:
        return match[1].upper(), known
    return (words[0].upper() if words else None), None


def _joined_timeframe(pieces: list[str]) -> list[str]:
    """Return the words of a name, its timeframe as one word. Dukascopy uses two, others the last word or letter."""
    if "Candlestick" in pieces[1:-2]:
        place = pieces.index("Candlestick")
        count, unit = pieces[place + 1 : place + 3]
        return [*pieces[:place], f"{unit[0].upper()}{count}" if unit != "Month" else "month"]
    last = _LAST_WORDS.get(pieces[-1].lower()) if len(pieces) > 1 else None
    return [*pieces[:-1], last] if last else pieces


def observed_spacing(time: Array) -> int | None:
    """Return the commonest step between bars in nanoseconds; None below three bars."""
    if len(time) < 3:
        return None
    steps, counts = np.unique(np.diff(time), return_counts=True)
    return int(steps[np.argmax(counts)])


def check_spacing(time: Array, timeframe: str, file: str) -> None:
    """Raise unless the commonest step between bars is the timeframe's duration.

    A wrong duration would show bars before they close, so this is never a warning. The commonest
    step is used, not the median: in a thin market most bars of M1 are missing.
    """
    spacing = observed_spacing(time)
    if spacing is not None and spacing != TIMEFRAMES[timeframe]:
        raise SourceError(
            f"{file} is named {timeframe}, but its bars are mostly {spacing / MINUTE_NS:g} min apart.",
            f"bars {TIMEFRAMES[timeframe] / MINUTE_NS:g} min apart",
            f"name it {BY_DURATION[spacing]}"
            if spacing in BY_DURATION
            else "check how the file was made",
        )


def describe_spacing(time: Array, timeframe: str, file: str) -> list[str]:
    """Return warnings on bars that overlap, and on bars of another timeframe among them."""
    if len(time) < 3:
        return []
    duration = TIMEFRAMES[timeframe]
    steps = np.diff(time)
    notes = []
    overlapping = int(((steps > 0) & (steps < duration)).sum())
    if overlapping:
        notes.append(
            f"warning: {file}: {overlapping:,} bars open before the bar before them has closed ({timeframe}); "
            "they may be of another timeframe, or of two files with different clocks"
        )
    # A longer timeframe shows as runs of equal longer steps; gaps of a market have runs of 1.
    runs = steps[1:][(steps[1:] == steps[:-1]) & (steps[1:] > duration)]
    for name, known in TIMEFRAMES.items():
        count = int((runs == known).sum())
        if known > duration and count >= 10 and count > 0.05 * len(steps):
            notes.append(
                f"warning: {file}: {count:,} of its {len(time):,} bars are {name} apart, not {timeframe}"
            )
    return notes


def clock_shift(fine: tuple[Array, Array, str], coarse: tuple[Array, Array, str]) -> int:
    """Return by how many hours the coarse series' clock is ahead of the fine one; 0 if they agree.

    Two bars that end at the same moment have the same closing price. If files are from two
    brokers, or one was converted to UTC, that is false at 0 hours and true at another shift.
    """
    fine_close, coarse_close = close_times(fine[0], fine[2]), close_times(coarse[0], coarse[2])
    if len(fine_close) < 2 or len(coarse_close) < 2:
        return 0

    def share_alike(hours: int) -> tuple[float, int]:
        moments = coarse_close - hours * HOUR_NS
        places = np.minimum(np.searchsorted(fine_close, moments), len(fine_close) - 1)
        met = fine_close[places] == moments
        alike = np.isclose(fine[1][places[met]], coarse[1][met], rtol=1e-9, atol=0)
        return (float(alike.mean()) if len(alike) else 0.0), len(alike)

    level, _ = share_alike(0)
    if level >= 0.5:
        return 0
    # Prices repeat by chance, mostly where they do not move: require a clear majority of many.
    for hours in sorted(range(-14, 15), key=abs):
        share, count = share_alike(hours)
        if count >= 20 and share >= 0.8 and share > 2 * level:
            return hours
    return 0


def close_times(time: Array, timeframe: str, latency_ns: int = 0) -> Array:
    """Return when each bar is known: open + duration + latency."""
    return np.asarray(time, np.int64) + (TIMEFRAMES[timeframe] + latency_ns)


def window_ends(time: Array, timeframe: str, decisions: Array, latency_ns: int = 0) -> Array:
    """Return per decision the number of bars known by then: the exclusive end of its window."""
    return np.searchsorted(close_times(time, timeframe, latency_ns), decisions, side="right")


def gap_mask(time: Array, timeframe: str) -> Array:
    """Return uint8, 1 where bars are missing right before a bar. The first bar has 0."""
    mask = np.zeros(len(time), np.uint8)
    mask[1:] = np.diff(time) > TIMEFRAMES[timeframe]
    return mask


def pick_base(windows: Iterable[tuple[str, int]], base: str | None) -> str:
    """Return the timeframe that decides and is forecast: M5 where present, else the shortest."""
    names = [name for name, _ in windows]
    if base is None:
        return "M5" if "M5" in names else min(names, key=lambda name: TIMEFRAMES[name])
    base = parse_timeframe(base)
    if base not in names:
        wanted = ",".join(f"{name}={length}" for name, length in [*windows, (base, 96)])
        raise InputError(
            f"base {base} has no window.", ", ".join(names), f"--windows {quoted(wanted)}"
        )
    return base


@dataclass(frozen=True)
class Samples:
    """Decisions that have all their inputs and their whole label."""

    bar: Array  # `(n,)` position of the base bar whose close is the decision
    time: Array  # `(n,)` int64 decision time, nanoseconds
    label_time: Array  # `(n,)` int64 close of the last bar the label uses
    label_gap: Array  # `(n,)` uint8, 1 where the label runs over missing bars (a weekend)
    ends: dict[str, Array]  # timeframe to `(n,)` exclusive ends
    dropped: dict[str, int]  # reason to number of base bars that give no sample


def find_windows(
    times: Mapping[str, Array],
    windows: Iterable[tuple[str, int]],
    base: str,
    *,
    latency_ns: int = 0,
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Return the decision times, the ends of their windows per timeframe, and by reason which have no window.

    Only bars known at a decision are used. Arguments as for `make_samples`.
    """
    decisions = close_times(times[base], base)
    ends = {name: window_ends(times[name], name, decisions, latency_ns) for name, _ in windows}
    short = np.zeros(len(decisions), bool)
    stale = np.zeros(len(decisions), bool)
    for name, length in windows:
        short |= ends[name] < length
        known = close_times(times[name], name, latency_ns)
        last = known[np.maximum(ends[name] - 1, 0)] if len(known) else decisions
        stale |= decisions - last > _STALE_NS + TIMEFRAMES[name]
    return decisions, ends, {"window_not_full": short, "timeframe_stale": stale}


def make_samples(
    times: Mapping[str, Array],  # open times per timeframe
    windows: Iterable[tuple[str, int]],  # bars per window, by timeframe
    base: str,  # timeframe whose closes are the decisions and whose bars are the label
    horizon: int,  # bars of the label
    *,
    latency_ns: int = 0,  # delay after its close before a bar may be used
    # drop samples whose label misses more bars than this in a row; None keeps them, marked in `label_gap`
    max_label_gap: int | None = None,
) -> Samples:
    """Find the decisions and, per timeframe, where their windows end.

    Every rule but the label's looks only at bars known at the decision: cutting history at t
    leaves the samples before it as they are.
    """
    decisions, ends, lacks = find_windows(times, windows, base, latency_ns=latency_ns)
    bar = np.arange(len(decisions))
    step = TIMEFRAMES[base]
    missing = np.maximum(np.diff(times[base]) - step, 0) // step
    worst = _forward_max(missing, horizon, len(bar))
    faults = {
        **lacks,
        "label_beyond_data": bar + horizon >= len(bar),
        "label_gap_too_long": worst > (np.inf if max_label_gap is None else max_label_gap),
    }
    dropped, keep = {}, np.ones(len(bar), bool)
    for reason, mask in faults.items():
        dropped[reason] = int((keep & mask).sum())
        keep &= ~mask
    bar = bar[keep]
    kept_ends = {name: values[keep].astype(np.int64) for name, values in ends.items()}
    label_time = decisions[bar + horizon]
    return Samples(
        bar, decisions[bar], label_time, (worst[bar] > 0).astype(np.uint8), kept_ends, dropped
    )


def _forward_max(missing: Array, horizon: int, num_bars: int) -> Array:
    """Return the longest run of missing bars between bar k and bar k + horizon, for each k."""
    widest = np.concatenate([missing, np.zeros(num_bars + horizon - len(missing), np.int64)])
    width = 1
    while width * 2 <= horizon:  # maxima over 1, 2, 4, ... bars: log2(horizon) passes
        widest = np.maximum(widest[:-width], widest[width:])
        width *= 2
    rest = horizon - width
    longest: Array = np.maximum(widest[:num_bars], widest[rest : rest + num_bars])
    return longest


def find_boundaries(decisions: Array, ratios: tuple[float, float, float]) -> tuple[int, int]:
    """Return the last decision time of train and of val, for sorted decisions of all symbols.

    Counts are rounded to whole samples, as `split_randomly` does: truncated, 0.7 + 0.1 of 10 gave 7.
    """
    most = len(decisions)  # shares may add up to a little more than 1
    num_train, num_val = (
        min(round(share * most), most) for share in np.cumsum(ratios)[:2].tolist()
    )
    if not 0 < num_train <= num_val <= len(decisions):
        raise InputError(
            f"{len(decisions)} samples cannot be split {ratios}.",
            "shares that leave train at least one sample",
            "give more data or other ratios",
        )
    return int(decisions[num_train - 1]), int(decisions[num_val - 1])


def assign_splits(
    samples: Samples, base_close: Array, boundaries: tuple[int, int], embargo: int
) -> Array:
    """Return uint8 per sample: 0 train, 1 val, 2 test, 3 purged.

    A sample is purged when its label ends after the boundary that closes its split, or when it
    decides within `embargo` base bars after a boundary.
    """
    train_end, val_end = boundaries
    val_start, test_start = (_skip_bars(base_close, end, embargo) for end in boundaries)
    split = np.full(len(samples.time), PURGED, np.uint8)
    split[samples.label_time <= train_end] = TRAIN
    split[(samples.time > val_start) & (samples.label_time <= val_end)] = VAL
    split[samples.time > max(test_start, val_end)] = TEST
    return split


def _skip_bars(base_close: Array, boundary: int, count: int) -> int:
    """Return the close of the bar `count` bars after the last one known at `boundary`."""
    last = int(np.searchsorted(base_close, boundary, side="right")) - 1 + count
    if last < 0:
        return boundary
    return int(base_close[last]) if last < len(base_close) else int(np.iinfo(np.int64).max)
