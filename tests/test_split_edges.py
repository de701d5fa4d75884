"""Times, keys and seeds of every kind: floats, datetimes of two units, bytes, numpy's own numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.loader.splits import split_by_group, split_by_time, split_randomly

TENTHS = np.arange(1, 11)
HALF = (0.5, 0.3, 0.2)
DAY_S = 86_400


def days(unit: str, num: int = 10) -> np.ndarray:
    return np.datetime64("2020-01-01", unit) + (np.arange(num) * DAY_S).astype("m8[s]").astype(
        f"m8[{unit}]"
    )


# ------------------------------------------------------------------------------------------- floats


@pytest.mark.parametrize("kind", ["f4", "f8", np.longdouble])
def test_floats_are_split_as_the_whole_numbers_they_stand_for(kind):
    whole = split_by_time(TENTHS * 100, TENTHS * 100 + 150, HALF)
    assert whole.tolist() == [0, 0, 0, 3, 3, 1, 3, 3, 2, 2]
    time = (TENTHS / 10).astype(kind)
    assert split_by_time(time, time + kind_of(kind)(0.15), HALF).tolist() == whole.tolist()
    assert split_by_time((-time)[::-1], (-time)[::-1], HALF).tolist() == [0] * 5 + [1] * 3 + [2] * 2


def kind_of(kind) -> type:
    return np.dtype(kind).type


@given(
    st.lists(st.integers(-60, 60), min_size=3, max_size=60), st.integers(0, 9), st.integers(0, 4)
)
def test_any_unit_of_time_gives_one_split(quarters, horizon, embargo):
    """Quarters are exact in floats: hours as floats, and their whole quarters, must agree."""
    time = np.array(quarters)
    whole = split_by_time(time, time + horizon, HALF, embargo)
    as_floats = split_by_time(time / 4, (time + horizon) / 4, HALF, embargo)
    assert as_floats.tolist() == whole.tolist()
    mixed = split_by_time(time, time + horizon + 0.5, HALF, embargo)
    assert (
        mixed.tolist() == split_by_time(2 * time, 2 * (time + horizon) + 1, HALF, embargo).tolist()
    )


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["time", "label_time"])
def test_times_that_are_not_known_are_refused_by_name(name, strange):
    times = {"time": TENTHS / 10, "label_time": TENTHS / 10}
    times[name] = np.where(TENTHS == 4, strange, times[name])
    with pytest.raises(InputError, match=rf"the {name} of sample 3 is {strange}") as caught:
        split_by_time(**times)
    assert f"np.isfinite({name})" in caught.value.fix


def test_whole_numbers_that_floats_cannot_tell_apart_are_refused_beside_floats():
    time = 1_600_000_000_000_000_000 + np.arange(10)
    with pytest.raises(InputError, match="which floats do not tell apart") as caught:
        split_by_time(time, time.astype(float) + 1000)
    assert caught.value.fix == "np.ceil(label_time).astype(np.int64)"
    with pytest.raises(InputError, match="do not tell apart") as caught:
        split_by_time(TENTHS / 10, -time)
    assert caught.value.fix == "np.ceil(time).astype(np.int64)"


def test_unsigned_and_small_numbers_are_times_and_too_large_ones_are_refused():
    expected = split_by_time(TENTHS, TENTHS + 1, HALF).tolist()
    for kind in (np.uint64, np.uint8, np.int16):
        assert split_by_time(TENTHS.astype(kind), TENTHS + 1, HALF).tolist() == expected
    large = TENTHS.astype(np.uint64) + np.uint64(2**63)
    with pytest.raises(InputError, match="time reaches 9223372036854775818"):
        split_by_time(large, large)


# ---------------------------------------------------------------------------------------- datetimes


@pytest.mark.parametrize("unit", ["s", "ms", "ns"])
@pytest.mark.parametrize("label_unit", ["s", "us", "ns"])
def test_datetimes_of_two_units_are_compared_as_moments(unit, label_unit):
    time, label_time = days(unit), days(label_unit) + np.timedelta64(36, "h")
    expected = split_by_time(np.arange(10) * 24, np.arange(10) * 24 + 36, HALF)
    assert expected.tolist() == [0, 0, 0, 3, 3, 1, 3, 3, 2, 2]
    assert split_by_time(time, label_time, HALF).tolist() == expected.tolist()


def test_a_label_known_before_its_inputs_is_found_across_units():
    with pytest.raises(InputError, match="label of sample 0 is known before"):
        split_by_time(days("s"), days("ns") - np.timedelta64(1, "ns"))
    assert split_by_time(days("D"), days("ns"), HALF).tolist() == [0] * 5 + [1] * 3 + [2] * 2


def test_durations_are_times_too():
    elapsed = TENTHS.astype("m8[h]")
    split = split_by_time(elapsed, elapsed.astype("m8[s]"), HALF)
    assert split.tolist() == [0] * 5 + [1] * 3 + [2] * 2


def test_datetimes_that_are_missing_or_out_of_reach_are_refused():
    late = days("s")
    late[7] = np.datetime64("NaT")
    with pytest.raises(InputError, match="the label_time of sample 7 is NaT"):
        split_by_time(days("s"), late)
    late[7] = np.datetime64("9999-01-01")  # in nanoseconds it would be 1815
    with pytest.raises(InputError, match="no one unit holds both") as caught:
        split_by_time(days("ns"), late)
    assert "datetime64[us]" in caught.value.fix
    fitting = split_by_time(days("ns").astype("M8[us]"), late.astype("M8[us]"), HALF)
    assert fitting.tolist() == [0] * 5 + [1, 1, 3] + [2] * 2
    with pytest.raises(InputError, match="no one unit holds both"):
        split_by_time(TENTHS.astype("m8[M]"), TENTHS.astype("m8[s]"))


@pytest.mark.parametrize(
    ("time", "label_time", "given"),
    [
        (days("ns"), days("ns").astype(np.int64), "time is datetime64[ns] and label_time is int64"),
        (TENTHS, TENTHS.astype("m8[s]"), "time is int64 and label_time is timedelta64[s]"),
        (days("s").tolist(), days("s").tolist(), "time is object"),
        (TENTHS, TENTHS.astype(str), "label_time is <U21"),
        (TENTHS > 3, TENTHS, "time is bool"),
    ],
)
def test_times_of_other_kinds_are_refused_by_name(time, label_time, given):
    with pytest.raises(InputError) as caught:
        split_by_time(time, label_time)
    assert given in caught.value.given
    assert "datetime64" in caught.value.allowed
    assert "datetime64[ns]" in caught.value.fix


# -------------------------------------------------------------------------------- embargo and shares


@pytest.mark.parametrize("embargo", [2.5, 2.0, np.float64(2), "2", None, [2]])
def test_an_embargo_that_is_no_whole_number_is_refused(embargo):
    with pytest.raises(InputError, match="the embargo is") as caught:
        split_by_time(TENTHS, TENTHS, embargo=embargo)
    assert caught.value.fix == "embargo=36"


@pytest.mark.parametrize("kind", [int, np.int8, np.uint8, np.int64])
def test_an_embargo_may_be_any_kind_of_whole_number(kind):
    time = np.arange(1000)
    split = split_by_time(time, time, (0.5, 0.25, 0.25), kind(100))
    assert np.bincount(split).tolist() == [500, 150, 150, 200]


@pytest.mark.parametrize(
    ("num", "ratios", "counts"),
    [
        (10, (0.7, 0.1, 0.2), [7, 1, 2]),  # 0.7 + 0.1 is 0.7999...
        (100, (0.29, 0.29, 0.42), [29, 29, 42]),
        (10, (0.7, 0.15, 0.15), [7, 1, 2]),
        (3, (0.6, 0.2, 0.2), [2, 0, 1]),
    ],
)
def test_shares_of_time_are_rounded_not_cut_off(num, ratios, counts):
    split = split_by_time(np.arange(num), np.arange(num), ratios)
    assert np.bincount(split, minlength=3).tolist() == counts


@given(
    st.integers(1, 400),
    st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)).filter(any),
)
def test_time_and_chance_share_out_the_same_numbers(num, parts):
    ratios = tuple(part / sum(parts) for part in parts)
    by_chance = np.bincount(split_randomly(num, ratios), minlength=3).tolist()
    if not by_chance[0]:
        with pytest.raises(InputError, match="cannot be split"):
            split_by_time(np.arange(num), np.arange(num), ratios)
        return
    by_time = np.bincount(split_by_time(np.arange(num), np.arange(num), ratios), minlength=3)
    assert by_time.tolist() == by_chance


def test_shares_a_millionth_too_large_do_not_reach_over_the_end():
    time = np.arange(1_200_000)
    split = split_by_time(time, time, (0.5, 0.5000009, 0.0))
    assert np.bincount(split).tolist() == [600_000, 600_000]


# ------------------------------------------------------------------------------------ keys and seeds


def test_bytes_are_the_text_that_they_spell():
    keys = ["é", "BSYNRYMUTXBXSQ", "日本", "é"] * 5 + [f"k{number}" for number in range(40)]
    expected = split_by_group(keys, HALF).tolist()
    as_bytes = [key.encode() for key in keys]
    mixed = [key if number % 2 else key.encode() for number, key in enumerate(keys)]
    for groups in (
        as_bytes,
        np.array(as_bytes),
        np.array(as_bytes, object),
        np.array(mixed, object),
    ):
        assert split_by_group(groups, HALF).tolist() == expected
    assert len(set(expected)) == 3
    assert split_by_group(np.array([], object)).tolist() == []


@pytest.mark.parametrize(
    "groups", [[b"a", b"\xe9"], np.array([b"a", b"\xe9"], object), ["a", "\ud800"]]
)
def test_keys_that_are_not_utf8_are_refused(groups):
    with pytest.raises(InputError, match="is not UTF-8") as caught:
        split_by_group(groups)
    assert repr(groups[-1]).strip("'") in caught.value.given
    if isinstance(groups, list) and isinstance(groups[0], bytes):
        repaired = eval(caught.value.fix, {"np": np, "groups": groups})
        assert repaired.tolist() == ["a", "é"]
        assert len(split_by_group(repaired)) == 2


def test_seeds_of_groups_end_where_their_hash_does():
    for seed in (2**64, 2**70):
        with pytest.raises(InputError, match=f"the seed is {seed}") as caught:
            split_by_group(TENTHS, seed=seed)
        assert str(2**64 - 1) in caught.value.allowed
    largest = split_by_group(np.arange(1000), HALF, 2**64 - 1)
    assert (largest != split_by_group(np.arange(1000), HALF, 0)).any()
    assert len(split_randomly(10, seed=2**70)) == 10


@pytest.mark.parametrize("make", [
    lambda seed: split_by_group(TENTHS, seed=seed),
    lambda seed: split_randomly(10, seed=seed),
])  # fmt: skip
def test_seeds_are_whole_numbers_of_any_kind(make):
    assert make(np.uint8(7)).tolist() == make(7).tolist()
    for seed in (1.5, "7", None):
        with pytest.raises(InputError, match="the seed is") as caught:
            make(seed)
        assert caught.value.fix == "seed=42"
