"""The five leak tests of REQUIREMENTS §4, as properties of random gappy data.

Minutes with random holes are resampled to M5 and M15, so that every timeframe tells the same
story. Each check is a function that returns what is wrong; the last tests hand the same checks a
deliberately wrong alignment (S0's: forward fill on open times) and expect them to find it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.sources.bars import BarsSource, Scaler, apply_scaler
from stoker.sources.bars.features import Features, fit_scaler, make_features
from stoker.sources.bars.timeframes import (
    MINUTE_NS,
    TEST,
    TRAIN,
    VAL,
    Samples,
    assign_splits,
    find_boundaries,
    make_samples,
    window_ends,
)
from stoker.sources.contract import PartContext

WINDOWS = (("M1", 8), ("M5", 5), ("M15", 3))
NAMES = tuple(name for name, _ in WINDOWS)
HORIZON = 4
START = 1_600_000_200 * 10**9 // (15 * MINUTE_NS) * (15 * MINUTE_NS)
# Not the module's own durations and close times: a check must not share a mistake.
DURATION = {"M1": 60 * 10**9, "M5": 300 * 10**9, "M15": 900 * 10**9}
COLUMNS = ("open", "high", "low", "close", "volume")


def closes(time, timeframe):
    return np.asarray(time) + DURATION[timeframe]


@dataclass(frozen=True)
class History:
    """Open times and columns per timeframe."""

    time: dict[str, np.ndarray]
    columns: dict[str, dict[str, np.ndarray]]

    def known_at(self, moment):
        """What existed at `moment`: bars closed by then, and nothing else."""
        keep = {name: closes(self.time[name], name) <= moment for name in NAMES}
        return History(
            {name: self.time[name][keep[name]] for name in NAMES},
            {
                name: {key: values[keep[name]] for key, values in self.columns[name].items()}
                for name in NAMES
            },
        )

    def perturbed_after(self, moment, seed):
        """The same bars, with other values in every bar that closes after `moment`."""
        rng = np.random.default_rng(seed)
        columns = {}
        for name in NAMES:
            later = closes(self.time[name], name) > moment
            columns[name] = {key: values.copy() for key, values in self.columns[name].items()}
            factor = rng.uniform(0.2, 5)
            for key in COLUMNS:
                columns[name][key][later] *= factor
            columns[name]["high"][later] *= 1 + rng.uniform(0, 1, later.sum())
        return History(self.time, columns)


def resample(minutes, timeframe):
    """Bars of a timeframe from minutes; a bar without a single minute does not exist."""
    time, columns = minutes
    step = DURATION[timeframe]
    groups, first = np.unique(time // step, return_index=True)
    last = np.append(first[1:], len(time)) - 1
    return groups * step, {
        "open": columns["open"][first],
        "high": np.maximum.reduceat(columns["high"], first),
        "low": np.minimum.reduceat(columns["low"], first),
        "close": columns["close"][last],
        "volume": np.add.reduceat(columns["volume"], first),
    }


@st.composite
def histories(draw):
    """400 to 700 minutes, with holes of a minute to a weekend."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num = draw(st.integers(400, 700))
    steps = np.ones(num, np.int64)
    holes = rng.integers(1, num, draw(st.integers(0, 12)))
    steps[holes] += rng.choice([1, 2, 7, 40, 2880], len(holes))
    close = 1.1 * np.exp(np.cumsum(rng.normal(0, 1e-3, num)))
    opens = np.concatenate([close[:1], close[:-1]])
    columns = {
        "open": opens,
        "high": np.maximum(opens, close) * (1 + rng.uniform(0, 1e-3, num)),
        "low": np.minimum(opens, close) * (1 - rng.uniform(0, 1e-3, num)),
        "close": close,
        "volume": rng.integers(0, 99, num).astype(float),
    }
    minutes = START + np.cumsum(steps) * MINUTE_NS, columns
    made = {name: resample(minutes, name) for name in NAMES}
    return History({n: made[n][0] for n in NAMES}, {n: made[n][1] for n in NAMES})


def samples_of(history, ends_of=window_ends):
    made = make_samples(history.time, WINDOWS, "M5", HORIZON)
    if ends_of is not window_ends:
        ends = {name: ends_of(history.time[name], name, made.time) for name in NAMES}
        made = Samples(made.bar, made.time, made.label_time, made.label_gap, ends, made.dropped)
    return made


def inputs_at(history, moment, ends_of=window_ends):
    """What a decision at `moment` is shown: per timeframe the unscaled rows of its window."""
    shown = {}
    for name, length in WINDOWS:
        end = int(ends_of(history.time[name], name, np.array([moment]))[0])
        rows = make_features(history.time[name], history.columns[name], name).rows
        shown[name] = rows[max(0, end - length) : end]
    return shown


def differing(left, right):
    return [name for name in NAMES if left[name].tobytes() != right[name].tobytes()]


def some(samples, share):
    return int(share * (len(samples.time) - 1))


# --- the five checks ---------------------------------------------------------------------------


def check_perturbation(history, samples, place, seed, ends_of=window_ends):
    """(1) Changing everything after t changes no input at t."""
    moment = samples.time[place]
    other = history.perturbed_after(moment, seed)
    return differing(inputs_at(history, moment, ends_of), inputs_at(other, moment, ends_of))


def check_times(history, samples):
    """(2) Every bar of every window has closed by t, and t is before the label's end."""
    wrong = []
    for name, length in WINDOWS:
        offsets = np.arange(-length, 0)
        rows = samples.ends[name][:, None] + offsets
        closed = closes(history.time[name], name)[rows]
        if (closed > samples.time[:, None]).any():
            wrong.append(name)
    if (samples.label_time <= samples.time).any():
        wrong.append("label")
    return wrong


def check_truncation(history, samples, place, ends_of=window_ends):
    """(3) Throwing away what did not exist at t, and starting over, gives the same bits."""
    moment = samples.time[place]
    past = history.known_at(moment)
    return differing(inputs_at(history, moment, ends_of), inputs_at(past, moment, ends_of))


@given(histories(), st.floats(0, 1), st.integers(0, 99))
def test_1_the_future_cannot_change_an_input(history, share, seed):
    samples = samples_of(history)
    assert check_perturbation(history, samples, some(samples, share), seed) == []


@given(histories())
def test_2_every_bar_has_closed_and_every_label_is_ahead(history):
    samples = samples_of(history)
    assert len(samples.time)
    assert check_times(history, samples) == []


@given(histories(), st.floats(0, 1))
def test_3_history_cut_at_the_decision_gives_the_same_bits(history, share):
    samples = samples_of(history)
    assert check_truncation(history, samples, some(samples, share)) == []


@given(histories(), st.floats(0.1, 0.9))
def test_3_cutting_history_leaves_the_samples_before_it_as_they_were(history, share):
    """Which decisions become samples is itself free of the future, labels aside."""
    samples = samples_of(history)
    moment = samples.time[some(samples, share)]
    past = samples_of(history.known_at(moment))
    whole = samples.label_time <= moment
    np.testing.assert_array_equal(past.time, samples.time[whole])
    for name in NAMES:
        np.testing.assert_array_equal(past.ends[name], samples.ends[name][whole])


# --- through the whole source: files in, fields out ---------------------------------------------


def write(folder, history):
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        table = np.stack([history.columns[name][key] for key in COLUMNS], axis=1).tolist()
        rows = zip(history.time[name].tolist(), table, strict=True)
        body = "\n".join(",".join([str(time), *map(repr, row)]) for time, row in rows)
        (folder / f"EURUSD_{name}.csv").write_text(body + "\n")


def pack(folder, **options):
    source = BarsSource((folder,), windows=WINDOWS, horizon=HORIZON, **options)
    part = source.prepare(folder).parts[0]
    return source.build(part, PartContext(folder, lambda row: None, {}))


def window_of(data, name, sample):
    series = data.fields[name]
    return series.rows[series.ends[sample] - series.window : series.ends[sample]]


@given(histories(), st.floats(0, 1), st.integers(0, 99))
def test_1_and_4_through_files_nothing_after_t_reaches_the_stored_windows(
    tmp_path_factory, history, share, seed
):
    folder = tmp_path_factory.getbasetemp() / "looks"
    write(folder, history)
    before = pack(folder)
    times = before.fields["time"].values
    after_train = np.flatnonzero(times >= before.extra["splits"]["train_end_ns"])
    sample = int(after_train[int(share * (len(after_train) - 1))])
    write(folder, history.perturbed_after(times[sample], seed))
    after = pack(folder)
    np.testing.assert_array_equal(after.fields["time"].values, times)
    assert after.extra["scalers"] == before.extra["scalers"]
    for earlier in range(sample + 1):
        for name in NAMES:
            assert (
                window_of(before, name, earlier).tobytes()
                == window_of(after, name, earlier).tobytes()
            )


@given(histories(), st.integers(0, 99), st.floats(0.3, 0.95))
def test_4_the_scaler_knows_the_training_span_only(tmp_path_factory, history, seed, cut):
    """Neither other values nor other bars after the end of train change a scaler."""
    folder = tmp_path_factory.getbasetemp() / "scales"
    write(folder, history)
    before = pack(folder)
    times = before.fields["time"].values
    train_end = before.extra["splits"]["train_end_ns"]
    split_at = tuple(str(before.extra["splits"][key]) for key in ("train_end_ns", "val_end_ns"))
    write(folder, history.perturbed_after(train_end, seed))
    assert pack(folder).extra["scalers"] == before.extra["scalers"]
    moment = max(train_end, times[int(cut * (len(times) - 1))])
    shorter = history.perturbed_after(train_end, seed).known_at(moment)
    write(folder, shorter)
    assert pack(folder, split_at=split_at).extra["scalers"] == before.extra["scalers"]


@given(histories(), st.floats(0, 1))
def test_3_inference_from_a_cut_history_replays_the_stored_windows(
    tmp_path_factory, history, share
):
    """What a live model would compute at t, from the recorded scaler, is what it trained on."""
    folder = tmp_path_factory.getbasetemp() / "replays"
    write(folder, history)
    data = pack(folder)
    times = data.fields["time"].values
    sample = int(share * (len(times) - 1))
    live = inputs_at(history.known_at(times[sample]), times[sample])
    for name in NAMES:
        scaler = Scaler.from_json(data.extra["scalers"][name])
        assert apply_scaler(live[name], scaler).tobytes() == window_of(data, name, sample).tobytes()


@given(histories(), st.one_of(st.none(), st.integers(0, 12)))
def test_5_no_training_label_reaches_a_later_split(history, embargo):
    samples = samples_of(history)
    base_close = closes(history.time["M5"], "M5")
    bars_apart = HORIZON if embargo is None else embargo
    boundaries = find_boundaries(samples.time, (0.7, 0.15, 0.15))
    split = assign_splits(samples, base_close, boundaries, bars_apart)
    assert (split == TRAIN).any()
    assert check_splits(samples, split, base_close, boundaries, bars_apart) == []


def check_splits(samples, split, base_close, boundaries, embargo):
    """(5) Labels end before later splits decide; `embargo` bars stand between."""
    wrong = []
    for earlier, later, boundary in ((TRAIN, VAL, 0), (TRAIN, TEST, 0), (VAL, TEST, 1)):
        labels, decisions = samples.label_time[split == earlier], samples.time[split == later]
        if len(labels) and len(decisions):
            if labels.max() >= decisions.min():
                wrong.append((earlier, later, "label"))
            end = boundaries[boundary]
            between = (base_close > end) & (base_close < decisions.min())
            if between.sum() < embargo:
                wrong.append((earlier, later, "embargo"))
    return wrong


# --- the checks can fail ------------------------------------------------------------------------


def ends_by_open_time(time, timeframe, decisions, latency_ns=0):
    """S0's alignment, `reindex(ffill)` on open times: a bar is used from its open on."""
    return np.searchsorted(time, decisions, side="right")


@pytest.fixture(scope="module")
def plain_history():
    rng = np.random.default_rng(11)
    num = 600
    close = 1.1 * np.exp(np.cumsum(rng.normal(0, 1e-3, num)))
    opens = np.concatenate([close[:1], close[:-1]])
    columns = {
        "open": opens,
        "high": np.maximum(opens, close) * 1.0001,
        "low": np.minimum(opens, close) * 0.9999,
        "close": close,
        "volume": np.ones(num),
    }
    minutes = START + np.arange(num) * MINUTE_NS, columns
    made = {name: resample(minutes, name) for name in NAMES}
    return History({n: made[n][0] for n in NAMES}, {n: made[n][1] for n in NAMES})


def test_alignment_on_open_times_leaks_and_is_caught(plain_history):
    """At 12:05 it shows the M15 bar of 12:00, whose close is the price of 12:15."""
    history = plain_history
    samples = samples_of(history, ends_by_open_time)
    place = next(
        i for i, t in enumerate(samples.time) if t % (15 * MINUTE_NS) == 5 * MINUTE_NS and i > 9
    )
    assert "M15" in check_perturbation(history, samples, place, 1, ends_by_open_time)
    assert "M15" in check_times(history, samples)
    assert "M15" in check_truncation(history, samples, place, ends_by_open_time)
    moment = samples.time[place]
    bar = ends_by_open_time(history.time["M15"], "M15", moment) - 1
    future = np.flatnonzero(
        history.time["M1"] + MINUTE_NS == history.time["M15"][bar] + 15 * MINUTE_NS
    )
    assert history.time["M1"][future[0]] >= moment
    assert history.columns["M15"]["close"][bar] == history.columns["M1"]["close"][future[0]]


def test_windows_that_start_together_leak_and_are_caught(plain_history):
    """S0's other leak: `features[i:i + w]` per timeframe, so the longer window ends later."""
    samples = samples_of(plain_history)
    starts = samples.ends["M5"] - dict(WINDOWS)["M15"]
    ends = {**samples.ends, "M5": starts + dict(WINDOWS)["M5"]}
    ends["M5"] = np.minimum(ends["M5"], len(plain_history.time["M5"]))
    wrong = Samples(
        samples.bar, samples.time, samples.label_time, samples.label_gap, ends, samples.dropped
    )
    assert check_times(plain_history, wrong) == ["M5"]


def test_a_scaler_fitted_on_everything_is_caught(plain_history):
    history = plain_history
    moment = history.time["M5"][80]
    train = closes(history.time["M5"], "M5") <= moment
    fits = {}
    for kind, world in (("as is", history), ("perturbed", history.perturbed_after(moment, 3))):
        features = make_features(world.time["M5"], world.columns["M5"], "M5")
        fits[kind] = fit_scaler(features, train, 0), fit_scaler(features, slice(None), 0)
    assert fits["as is"][0] == fits["perturbed"][0]
    assert fits["as is"][1] != fits["perturbed"][1]


def test_splits_without_purge_are_caught(plain_history):
    samples = samples_of(plain_history)
    base_close = closes(plain_history.time["M5"], "M5")
    boundaries = find_boundaries(samples.time, (0.7, 0.15, 0.15))
    naive = np.digitize(samples.time, boundaries, right=True).astype(np.uint8)
    found = check_splits(samples, naive, base_close, boundaries, HORIZON)
    assert (TRAIN, VAL, "label") in found
    assert (VAL, TEST, "embargo") in found


def test_a_feature_that_looks_ahead_is_caught(plain_history, monkeypatch):
    """A centred difference in place of a backward one moves when history is cut."""

    def centred(time, columns, timeframe, extras=None):
        return Features(np.gradient(np.log(columns["close"]))[:, None], ("return",))

    samples = samples_of(plain_history)
    assert check_truncation(plain_history, samples, 20) == []
    monkeypatch.setitem(globals(), "make_features", centred)
    assert set(check_truncation(plain_history, samples, 20)) == set(NAMES)
    assert set(check_perturbation(plain_history, samples, 20, 1)) == set(NAMES)
