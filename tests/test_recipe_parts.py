"""Splits of few samples: every part with a share has one, groups stay whole, or it is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.loader.splits import samples_of, split_by_group, split_randomly
from stoker.recipes.forex.recipe import ForexOptions, split_store
from stoker.recipes.gate import fill_parts
from stoker.recipes.images.recipe import split_pictures
from stoker.recipes.massspec.recipe import split_compounds
from stoker.recipes.segmentation.recipe import SegmentationOptions, split_images
from stoker.recipes.tabular.data import find_inputs, split_samples
from stoker.store.fields import Dense
from store_makers import write_store

RATIOS = (0.8, 0.1, 0.1)
PARTS = ("train", "val", "test")


@given(
    groups=st.lists(st.integers(0, 8), min_size=1, max_size=40),
    seed=st.integers(0, 99),
    shares=st.sampled_from([RATIOS, (0.9, 0.1, 0.0), (1.0, 0.0, 0.0), (0.34, 0.33, 0.33)]),
    is_random=st.booleans(),
)
def test_no_part_with_a_share_is_empty(groups, seed, shares, is_random):
    numbers = np.arange(len(groups)) if is_random else np.array(groups)
    drawn = (
        split_randomly(len(numbers), shares, seed)
        if is_random
        else split_by_group(numbers, shares, seed)
    )
    samples = {name: samples_of(drawn, name) for name in PARTS}
    wanted = [name for name, share in zip(PARTS, shares, strict=True) if share and name != "train"]
    lacks = [name for name in wanted if not len(samples[name])]
    if len(np.unique(numbers[samples["train"]])) <= len(lacks) and lacks:
        with pytest.raises(InputError, match="too few rows"):
            fill_parts(samples, shares, seed, numbers, "rows")
        return
    filled, said = fill_parts(samples, shares, seed, numbers, "rows")
    assert all(len(filled[name]) for name in wanted)
    assert bool(said) == bool(lacks)
    assert sorted(np.concatenate(list(filled.values())).tolist()) == list(range(len(numbers)))
    where = [set(numbers[ids].tolist()) for ids in filled.values()]
    assert len(set().union(*where)) == sum(map(len, where))


def _store(folder, count, **fields):
    rows = np.arange(count, dtype="f4")
    made = {"features": Dense(np.stack([rows, rows % 3], 1)), "targets": Dense(rows % 2), **fields}
    return write_store(folder, [made])


@pytest.mark.parametrize("count", [3, 4, 7, 12])
def test_each_recipe_divides_few_samples(tmp_path, count):
    group = {"group": Dense(np.arange(count))}
    labels = np.arange(count) % 3
    with _store(tmp_path / "s", count, **group) as store:
        inputs = find_inputs(store, "features", "targets")
        made = {
            "tabular": split_samples(store, inputs, "random", RATIOS, None, 0),
            "distinct": split_samples(store, inputs, "distinct", RATIOS, None, 0),
            "segmentation": split_images(store, SegmentationOptions(ratios=RATIOS), 0),
            "massspec": split_compounds(store, RATIOS, 0),
            "images": split_pictures(store, labels, RATIOS, 0),
        }
    for name, (samples, said) in made.items():
        assert [len(ids) > 0 for ids in samples.values()] == [True] * 3, name
        assert sum(map(len, samples.values())) == count
        assert name in ("images", "distinct", "massspec") or count > 4 or "from train" in said


def test_too_few_samples_are_refused_by_name(tmp_path):
    times = {"time": Dense(np.arange(2)), "label_time": Dense(np.arange(2) + 1)}
    with _store(tmp_path / "s", 2, group=Dense(np.arange(2)), **times) as store:
        inputs = find_inputs(store, "features", "targets")
        for what, split in {
            "rows": lambda: split_samples(store, inputs, "random", RATIOS, None, 0),
            "rows, divided by 'time'": lambda: split_samples(
                store, inputs, "time", RATIOS, None, 0
            ),
            "images": lambda: split_images(store, SegmentationOptions(ratios=RATIOS), 0),
            "compounds": lambda: split_compounds(store, RATIOS, 0),
            "pictures": lambda: split_pictures(store, np.zeros(2, int), RATIOS, 0),
            "bars, divided by time": lambda: split_store(store, ForexOptions(embargo=1)),
        }.items():
            with pytest.raises(InputError, match=f"too few {what}") as told:
                split()
            assert told.value.fix == "ratios=[1.0, 0.0, 0.0]"


@pytest.mark.parametrize("lacks", ["val", "test"])
def test_a_store_divided_into_two_gets_the_third_part(tmp_path, lacks):
    """People divide into train and val, or into train and test: each is kept whole but for what is lent."""
    other = {"val": 2, "test": 1}[lacks]
    codes = np.where(np.arange(60) < 40, 0, other).astype("u1")
    groups = np.arange(60) // 2
    with _store(tmp_path / "s", 60, group=Dense(groups), split=Dense(codes)) as store:
        inputs = find_inputs(store, "features", "targets")
        made = {
            "tabular": split_samples(store, inputs, "auto", RATIOS, None, 0),
            "segmentation": split_images(store, SegmentationOptions(), 0),
            "massspec": split_compounds(store, RATIOS, 0),
            "images": split_pictures(store, np.arange(60) % 3, RATIOS, 0),
        }
    for name, (samples, said) in made.items():
        lent = {"val": "a tenth of train as val (4)", "test": "half of val as test (10)"}[lacks]
        assert lent in said, name
        source = {"val": samples["train"], "test": samples["val"]}[lacks]
        own = np.arange(40) if lacks == "val" else np.arange(40, 60)
        assert sorted([*source, *samples[lacks]]) == own.tolist()
        if name == "massspec":
            assert not set(groups[source]) & set(groups[samples[lacks]])
