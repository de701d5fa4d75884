from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError, SourceError
from stoker.sources.bars.features import (
    Features,
    Scaler,
    apply_scaler,
    feature_names,
    fit_scaler,
    make_features,
)
from stoker.sources.bars.timeframes import (
    HOUR_NS,
    MINUTE_NS,
    PURGED,
    TEST,
    TIMEFRAMES,
    TRAIN,
    VAL,
    assign_splits,
    check_spacing,
    clock_shift,
    close_times,
    find_boundaries,
    gap_mask,
    make_samples,
    name_file,
    observed_spacing,
    parse_timeframe,
    parse_windows,
    pick_base,
    window_ends,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [("M5", "M5"), ("m15", "M15"), ("5m", "M5"), ("1h", "H1"), ("4H", "H4"), ("1d", "D1"),
     ("15min", "M15"), ("PERIOD_H4", "H4"), ("60m", "H1"), ("1w", "W1")],
)  # fmt: skip
def test_timeframe_names(text, name):
    assert parse_timeframe(text) == name


@pytest.mark.parametrize("text", ["1M", "M7", "MN1", "", "H", "5", "7m"])
def test_what_is_no_timeframe_is_refused(text):
    with pytest.raises(InputError, match="not a timeframe"):
        parse_timeframe(text)


@pytest.mark.parametrize(
    ("file", "symbol", "timeframe"),
    [
        ("EURUSD_M15.csv.gz", "EURUSD", "M15"),
        ("EURUSD-M5.csv", "EURUSD", "M5"),
        ("EURUSD15.csv", "EURUSD", "M15"),
        ("eurusd240.csv", "EURUSD", "H4"),
        ("EURUSD_M5_202001020000_202010152355.csv", "EURUSD", "M5"),
        ("DAT_ASCII_EURUSD_M1_2020.csv", "EURUSD", "M1"),
        ("BTCUSDT-5m-2020-10.csv", "BTCUSDT", "M5"),
        ("H1_GBPUSD.txt", "GBPUSD", "H1"),
        ("EURUSD.M5.csv", "EURUSD", "M5"),
        ("US30.csv", "US30", None),
        ("US30_H1.csv", "US30", "H1"),
        ("notes.csv", "NOTES", None),
    ],
)
def test_names_of_files(file, symbol, timeframe):
    assert name_file(f"/some/M1/folder/{file}") == (symbol, timeframe)


def test_windows_are_read_and_sorted_by_duration():
    assert parse_windows("H4=48, M1=480,5m=288") == (("M1", 480), ("M5", 288), ("H4", 48))


@pytest.mark.parametrize("text", ["", "M1", "M1=", "M1=0", "M1=-3", "M1=x", "M1=480,M1=3", "M1:4"])
def test_bad_windows_are_refused(text):
    with pytest.raises(InputError):
        parse_windows(text)


def test_base_is_m5_else_the_shortest_and_must_have_a_window():
    assert pick_base(parse_windows("M1=4,M5=4"), None) == "M5"
    assert pick_base(parse_windows("H4=4,H1=4"), None) == "H1"
    with pytest.raises(InputError, match="has no window"):
        pick_base(parse_windows("H4=4"), "M5")


def test_a_bar_is_known_at_its_close_and_not_before():
    opens = np.arange(4) * 4 * HOUR_NS
    second_close = 8 * HOUR_NS
    decisions = np.array([second_close - 1, second_close, second_close + 1])
    assert window_ends(opens, "H4", decisions).tolist() == [1, 2, 2]
    assert window_ends(opens, "H4", decisions, latency_ns=1).tolist() == [1, 1, 2]


def test_gap_mask_marks_the_bar_after_the_hole():
    opens = np.array([0, 1, 2, 5, 6]) * MINUTE_NS
    assert gap_mask(opens, "M1").tolist() == [0, 0, 0, 1, 0]


def test_spacing_survives_weekends_and_catches_a_wrong_name():
    opens = np.concatenate([np.arange(20), 2880 + np.arange(20)]) * MINUTE_NS
    assert observed_spacing(opens) == MINUTE_NS
    check_spacing(opens, "M1", "x.csv")
    with pytest.raises(SourceError, match="name it M1"):
        check_spacing(opens, "M5", "x.csv")


@pytest.mark.parametrize("hours", [-3, -1, 0, 2, 7])
def test_a_clock_that_is_hours_off_is_found(hours):
    rng = np.random.default_rng(3)
    fine_time = np.arange(6000) * 5 * MINUTE_NS
    prices = 1.1 + np.cumsum(rng.normal(0, 1e-3, 6000))
    coarse_time = fine_time[::12] + hours * HOUR_NS
    assert clock_shift((fine_time, prices, "M5"), (coarse_time, prices[11::12], "H1")) == hours


def test_other_prices_are_not_another_clock():
    rng = np.random.default_rng(4)
    time = np.arange(6000) * 5 * MINUTE_NS
    fine, coarse = rng.normal(1, 0.1, 6000), rng.normal(1, 0.1, 500)
    assert clock_shift((time, fine, "M5"), (time[::12], coarse, "H1")) == 0


@st.composite
def base_times(draw):
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 4, 600]), min_size=1, max_size=60))
    return np.cumsum([0, *steps]) * 5 * MINUTE_NS


@given(base_times(), st.integers(1, 9), st.one_of(st.none(), st.integers(0, 5)))
def test_samples_follow_their_definition(opens, horizon, max_gap):
    made = make_samples({"M5": opens}, [("M5", 3)], "M5", horizon, max_label_gap=max_gap)
    step = TIMEFRAMES["M5"]
    expected = []
    for bar in range(len(opens)):
        if bar + 1 >= 3 and bar + horizon < len(opens):
            missing = np.diff(opens[bar : bar + horizon + 1]) // step - 1
            if max_gap is None or missing.max() <= max_gap:
                expected.append(
                    (bar, opens[bar] + step, opens[bar + horizon] + step, missing.max() > 0)
                )
    got = zip(made.bar, made.time, made.label_time, made.label_gap, strict=True)
    assert [(int(a), int(b), int(c), bool(d)) for a, b, c, d in got] == expected
    assert len(made.bar) + sum(made.dropped.values()) == len(opens)


def test_a_timeframe_that_ended_long_ago_gives_no_samples():
    base = np.arange(0, 30 * 288) * 5 * MINUTE_NS
    ended = np.arange(48) * HOUR_NS
    made = make_samples({"M5": base, "H1": ended}, [("M5", 2), ("H1", 2)], "M5", 1)
    assert made.dropped["timeframe_stale"] > 0
    assert made.time.max() <= ended[-1] + 2 * HOUR_NS + 7 * 24 * HOUR_NS


@given(
    base_times(),
    st.integers(1, 6),
    st.integers(0, 12),
    st.tuples(st.floats(0.2, 0.7), st.floats(0, 0.3)),
)
def test_splits_are_in_order_and_apart(opens, horizon, embargo, shares):
    made = make_samples({"M5": opens}, [("M5", 1)], "M5", horizon)
    if len(made.time) < 6:
        return
    ratios = (shares[0], shares[1], 1 - sum(shares))
    bounds = find_boundaries(made.time, ratios)
    close = close_times(opens, "M5")
    split = assign_splits(made, close, bounds, embargo)
    order = [made.time[split == kind] for kind in (TRAIN, VAL, TEST)]
    labels = [made.label_time[split == kind] for kind in (TRAIN, VAL, TEST)]
    for earlier in range(3):
        for later in range(earlier + 1, 3):
            if len(order[earlier]) and len(order[later]):
                assert labels[earlier].max() < order[later].min()
                between = (close > bounds[later - 1]) & (close < order[later].min())
                assert between.sum() >= embargo
    assert set(np.unique(split)) <= {TRAIN, VAL, TEST, PURGED}


def test_boundaries_need_samples():
    with pytest.raises(InputError, match="cannot be split"):
        find_boundaries(np.arange(1), (0.4, 0.3, 0.3))
    with pytest.raises(InputError, match="cannot be split"):
        find_boundaries(np.arange(0), (0.7, 0.15, 0.15))
    assert find_boundaries(np.array([5]), (0.7, 0.15, 0.15)) == (5, 5)


@pytest.mark.parametrize(
    ("num", "ratios", "bounds"),
    [
        (10, (0.7, 0.1, 0.2), (6, 7)),  # 10 * (0.7 + 0.1) is 7.999...
        (10, (0.7, 0.2, 0.1), (6, 8)),
        (100, (0.29, 0.29, 0.42), (28, 57)),  # 100 * 0.29 is 28.999...
        (1999, (0.7, 0.15, 0.15), (1398, 1698)),
    ],
)
def test_boundaries_are_rounded_to_whole_samples(num, ratios, bounds):
    assert find_boundaries(np.arange(num), ratios) == bounds


def bars_of(num, seed=0, **further):
    rng = np.random.default_rng(seed)
    last = 1.1 * np.exp(np.cumsum(rng.normal(0, 1e-4, num)))
    first = np.concatenate([last[:1], last[:-1]])
    high, low = np.maximum(first, last) * 1.0001, np.minimum(first, last) * 0.9999
    return {"open": first, "high": high, "low": low, "close": last, **further}


def test_features_by_hand():
    columns = {name: np.array(values, float) for name, values in {
        "open": [1.0, 2.0], "high": [2.0, 4.0], "low": [0.5, 2.0], "close": [1.5, 3.0],
        "volume": [0.0, 9.0], "spread": [7.0, 8.0],
    }.items()}  # fmt: skip
    monday_noon = 4 * 86_400_000_000_000 + 12 * HOUR_NS
    made = make_features(np.array([monday_noon, monday_noon + HOUR_NS]), columns, "H1")
    row = dict(zip(made.columns, made.rows[1], strict=True))
    assert row["return"] == pytest.approx(np.log(2))
    assert row["range"] == pytest.approx(np.log(2))
    assert row["body"] == pytest.approx(np.log(1.5))
    assert (row["upper_wick"], row["lower_wick"]) == (0.5, 0.0)
    assert row["volume_log"] == pytest.approx(np.log(10))
    assert row["volume_change"] == pytest.approx(np.log(10))
    assert row["spread"] == 8
    assert row["day_sin"] == pytest.approx(np.sin(2 * np.pi * 13 / 24))
    assert (row["week_sin"], row["week_cos"]) == (0, 1)
    assert made.rows[0, made.columns.index("return")] == 0
    assert made.columns == feature_names(["volume", "spread"], "H1")


def test_daily_and_weekly_bars_have_no_constant_calendar_columns():
    assert "day_sin" not in feature_names([], "D1")
    assert not [name for name in feature_names([], "W1") if name.endswith("_sin")]


def test_flat_bars_and_empty_volume_stay_finite():
    flat = {name: np.full(5, 1.2) for name in ("open", "high", "low", "close")}
    made = make_features(np.arange(5) * MINUTE_NS, {**flat, "volume": np.zeros(5)}, "M1")
    assert np.isfinite(made.rows).all()
    assert np.abs(made.rows).max() <= 1


@given(
    st.lists(st.floats(1e-9, 1e9), min_size=8, max_size=8),
    st.lists(st.floats(0, 1e15), min_size=2, max_size=2),
)
def test_no_feature_explodes(prices, volumes):
    """The 1e15 of S4 came from a ratio with a tiny denominator."""
    pairs = np.sort(np.array(prices).reshape(2, 4), axis=1)
    columns = dict(zip(("low", "open", "close", "high"), pairs.T, strict=True))
    made = make_features(np.arange(2) * MINUTE_NS, {**columns, "volume": np.array(volumes)}, "M1")
    assert np.isfinite(made.rows).all()
    assert np.abs(made.rows).max() < 100


def test_scaler_is_median_and_quartiles_and_leaves_waves_alone():
    rng = np.random.default_rng(1)
    rows = rng.normal(5, 3, (200, 3))
    rows[:, 2] = np.sin(rows[:, 2])
    features = Features(rows, ("a", "b", "day_sin"))
    scaler = fit_scaler(features, slice(0, 100), 42)
    low, middle, high = np.percentile(rows[:100, 0], (25, 50, 75))
    assert (scaler.center[0], scaler.scale[0]) == (middle, high - low)
    assert (scaler.center[2], scaler.scale[2]) == (0.0, 1.0)
    assert (scaler.num_rows, scaler.fitted_until_ns) == (100, 42)
    scaled = apply_scaler(rows, scaler)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled[:, 0], (rows[:, 0] - middle) / (high - low), rtol=1e-6)
    np.testing.assert_array_equal(scaled[:, 2], rows[:, 2].astype(np.float32))


def test_scaler_never_divides_by_almost_nothing():
    rows = np.zeros((100, 3))
    rows[::10, 0] = 1e6  # quartiles coincide, the spread is in the tail
    rows[:, 1] = 7.0  # does not move
    rows[:, 2] = 1e9 + np.arange(100) % 2 * 1e-7  # rounding noise on a large level
    scaler = fit_scaler(Features(rows, ("spiky", "constant", "noise")), slice(None), 0)
    assert scaler.scale[0] == pytest.approx(3e5)
    assert scaler.scale[1:] == (1.0, 1.0)
    assert np.abs(apply_scaler(rows, scaler)).max() < 10


def test_scaler_survives_json_bit_for_bit():
    import json

    features = make_features(np.arange(50) * MINUTE_NS, bars_of(50), "M1")
    scaler = fit_scaler(features, slice(0, 40), 5)
    assert Scaler.from_json(json.loads(json.dumps(scaler.to_json()))) == scaler


def test_scaler_of_other_columns_is_refused():
    scaler = fit_scaler(Features(np.ones((3, 2)), ("a", "b")), slice(None), 0)
    with pytest.raises(InputError, match="2 features"):
        apply_scaler(np.ones((3, 5)), scaler)


@given(st.integers(2, 400), st.integers(1, 399))
def test_features_do_not_depend_on_the_length_of_the_array(num, cut):
    """Vector units must not round a row differently because of where the array ends."""
    time, columns = np.arange(num) * MINUTE_NS, bars_of(num)
    cut = min(cut, num)
    whole = make_features(time, columns, "M1").rows
    part = make_features(time[:cut], {k: v[:cut].copy() for k, v in columns.items()}, "M1").rows
    np.testing.assert_array_equal(whole[:cut], part)
