from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.loader.splits import (
    draw_samples,
    samples_of,
    select_samples,
    split_by_group,
    split_by_time,
    split_randomly,
)
from stoker.sources import massspec
from stoker.store.fields import Dense, Ragged
from store_makers import write_store

RATIOS = st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8)).map(
    lambda parts: tuple(part / sum(parts) for part in parts)
)


def store_with(folder, split):
    shards = [{"x": Dense(np.zeros(len(part))), "split": Dense(part)} for part in split]
    return write_store(folder, shards)


# ---------------------------------------------------------------------------------------- selection


def test_samples_of_a_store_by_split_over_shards(tmp_path):
    parts = [np.array([0, 0, 1, 3], np.uint8), np.array([2, 0, 3, 1, 2], np.uint8)]
    with store_with(tmp_path / "store", parts) as store:
        assert select_samples(store, "train").tolist() == [0, 1, 5]
        assert select_samples(store, "val").tolist() == [2, 7]
        assert select_samples(store, "test").tolist() == [4, 8]
        everything = select_samples(store)
        assert everything.tolist() == [0, 1, 2, 4, 5, 7, 8], "purged samples are never used"
        assert everything.dtype == np.int64


def test_a_store_without_a_split_gives_everything_or_says_what_to_type(tmp_path):
    with write_store(tmp_path / "store", [{"x": Dense(np.zeros(5))}]) as store:
        assert select_samples(store).tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(InputError) as caught:
            select_samples(store, "train")
        assert "no field 'split'" in caught.value.given
        assert "--split 0.8,0.1,0.1" in caught.value.fix
        suggestion = caught.value.fix.partition(", or ")[2]
        names = {"store": store, "samples_of": samples_of, "split_randomly": split_randomly}
        assert len(eval(suggestion, names)) == 4  # what it says can be typed


@pytest.mark.parametrize("split", ["train", None])
def test_a_split_field_of_another_kind_is_refused(tmp_path, split):
    for number, field in enumerate(
        [Dense(np.zeros((2, 2), np.uint8)), Dense(np.zeros(2)), Ragged.from_strings(["a", "b"])]
    ):
        with (
            write_store(tmp_path / str(number), [{"split": field}]) as store,
            pytest.raises(InputError, match="one whole number per sample"),
        ):
            select_samples(store, split)


def test_unknown_names_and_numbers_are_refused(tmp_path):
    with pytest.raises(InputError, match="was given a path"):
        select_samples("a.h5", "train")
    for name in ("purged", "validation", "TRAIN", ""):
        with pytest.raises(InputError, match="'train', 'val', 'test'"):
            samples_of(np.zeros(3, np.uint8), name)
    with pytest.raises(InputError, match="sample 1 has split 4"):
        samples_of(np.array([0, 4]), "train")
    with pytest.raises(InputError, match="sample 0 has split -1"):
        samples_of(np.array([-1, 0]))
    assert samples_of(np.zeros(3, np.uint8), "test").tolist() == []


# ------------------------------------------------------------------------------------------- groups


@given(st.lists(st.integers(-5, 2**62), max_size=80), RATIOS, st.integers(0, 2**32))
def test_no_group_stands_on_two_sides(groups, ratios, seed):
    groups = np.array(groups, np.int64)
    split = split_by_group(groups, ratios, seed)
    assert split.dtype == np.uint8
    assert all(len(set(split[groups == group].tolist())) == 1 for group in groups)
    assert all(ratios[number] > 0 for number in set(split.tolist()))
    assert (split_by_group(groups[::-1], ratios, seed) == split[::-1]).all()


def test_groups_of_text_and_the_pack_command_agree():
    keys = ["BSYNRYMUTXBXSQ", "RYYVLZVUVIJVGH", "BSYNRYMUTXBXSQ", "é"]
    numbers = np.array([massspec.group_of(key) for key in keys])
    expected = massspec.assign_splits(numbers, 0.5, 0.25, 7)
    for groups in (keys, np.array(keys), np.array(keys, object), numbers):
        assert split_by_group(groups, (0.5, 0.25, 0.25), 7).tolist() == expected.tolist()


def test_shares_of_groups_hold_on_average():
    counts = np.bincount(split_by_group(np.arange(20_000), (0.7, 0.2, 0.1)))
    assert np.abs(counts / 20_000 - [0.7, 0.2, 0.1]).max() < 0.015


# --------------------------------------------------------------------------------------------- time


@given(
    st.lists(st.integers(0, 200), min_size=3, max_size=80),
    st.integers(0, 20),
    st.integers(0, 10),
    RATIOS,
)
def test_no_label_reaches_over_a_border_and_the_embargo_is_kept(time, horizon, embargo, ratios):
    time = np.array(time)
    assume(int(len(time) * ratios[0]) > 0)
    split = split_by_time(time, time + horizon, ratios, embargo)
    known = np.unique(time)
    for before, after in ((0, 1), (1, 2), (0, 2)):
        old, new = time[split == before], time[split == after]
        if len(old) and len(new):
            assert old.max() + horizon < new.min()
            assert ((known > old.max()) & (known < new.min())).sum() >= embargo
    assert set(split.tolist()) <= {0, 1, 2, 3}


def test_time_split_by_hand():
    time = np.arange(20)
    split = split_by_time(time, time + 2, (0.5, 0.25, 0.25), embargo=1)
    #                        train to 9, minus 2 labels; one embargoed; val to 14; one embargoed
    assert split.tolist() == [0] * 8 + [3, 3, 3] + [1, 1] + [3, 3, 3] + [2] * 4
    shuffled = np.random.default_rng(0).permutation(20)
    again = split_by_time(time[shuffled], time[shuffled] + 2, (0.5, 0.25, 0.25), embargo=1)
    assert again.tolist() == split[shuffled].tolist()


def test_time_splits_that_cannot_be_are_refused():
    time = np.arange(5)
    with pytest.raises(InputError, match="label of sample 0 is known before"):
        split_by_time(time, time - 1)
    with pytest.raises(InputError, match=r"time \(5,\) and label_time \(4,\)"):
        split_by_time(time, time[1:])
    with pytest.raises(InputError, match="embargo is -1"):
        split_by_time(time, time, embargo=-1)
    with pytest.raises(InputError, match="0 samples cannot be split"):
        split_by_time(time[:0], time[:0])


# ------------------------------------------------------------------------------------------- random


@given(st.integers(0, 500), RATIOS, st.integers(0, 2**32))
def test_random_shares_are_exact(num_samples, ratios, seed):
    split = split_randomly(num_samples, ratios, seed)
    assert len(split) == num_samples
    counts = np.bincount(split, minlength=3)
    assert (np.abs(counts - np.array(ratios) * num_samples) <= 1).all()
    assert (split == split_randomly(num_samples, ratios, seed)).all()


def test_another_seed_is_another_random_split():
    assert (split_randomly(100, seed=1) != split_randomly(100, seed=2)).any()
    assert (np.diff(split_randomly(100).astype(int)) < 0).any(), "not in sample order"


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("make", [
    lambda ratios: split_randomly(10, ratios),
    lambda ratios: split_by_group(np.arange(10), ratios),
    lambda ratios: split_by_time(np.arange(10), np.arange(10), ratios),
])  # fmt: skip
@pytest.mark.parametrize(
    "ratios", [(0.8, 0.1), (0.8, 0.1, 0.2), (1.1, -0.1, 0.0), (float("nan"), 0.5, 0.5), (8, 1, 1)]
)
def test_shares_that_do_not_add_up_are_refused(make, ratios):
    with pytest.raises(InputError, match="add up to 1") as caught:
        make(ratios)
    assert caught.value.fix == "ratios=(0.8, 0.1, 0.1)"


def test_other_arguments_that_are_refused():
    for call in (lambda: split_randomly(3, seed=-1), lambda: split_by_group([1], seed=-1)):
        with pytest.raises(InputError, match="seed is -1"):
            call()
    with pytest.raises(InputError, match="num_samples is -1"):
        split_randomly(-1)
    with pytest.raises(InputError, match="groups are float64"):
        split_by_group(np.zeros(3))
    with pytest.raises(InputError, match="groups are int64 \\(2, 2\\)"):
        split_by_group(np.zeros((2, 2), int))


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=80),
    st.integers(1, 90),
    st.integers(0, 5),
    st.booleans(),
)
def test_a_draw_keeps_order_number_and_classes(classes, most, seed, stratified):
    samples = 7 + 3 * np.arange(len(classes))
    strata = np.array(classes) if stratified else None
    drawn = draw_samples(samples, most, seed, strata)
    assert len(drawn) == min(most, len(samples))
    assert (np.diff(drawn) > 0).all()
    assert np.isin(drawn, samples).all()
    assert np.array_equal(drawn, draw_samples(samples, most, seed, strata))
    if stratified:
        kept = np.array(classes)[np.searchsorted(samples, drawn)]
        known, sizes = np.unique(classes, return_counts=True)
        assert len(np.unique(kept)) == min(len(known), len(drawn))
        share = len(drawn) / len(samples)
        for value, size in zip(known, sizes, strict=True):
            count = (kept == value).sum()
            assert count <= size * (share + len(known) / len(samples) / 2) + 1


def test_a_draw_is_no_slice_and_follows_the_seed():
    samples = np.arange(1000)
    one, other = draw_samples(samples, 100, 0), draw_samples(samples, 100, 1)
    assert one.max() > 900
    assert not np.array_equal(one, other)
    wide = np.stack([samples % 2, samples % 3], axis=1)
    assert len({tuple(row) for row in wide[draw_samples(samples, 6, 0, wide)]}) == 6
