"""Habits from other loaders: options set later, slices, open files, indexing. They work or are answered."""

from __future__ import annotations

import pickle
import warnings

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler

import stoker
from stoker import PackOptions
from stoker.augment import Compose, Normalize
from stoker.errors import InputError, StoreError
from stoker.loader import arguments
from stoker.loader.loader import Loader
from stoker.loader.splits import split_randomly
from stoker.sources.samples import collect


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = rng.integers(0, 256, (50, 3, 4, 4), dtype=np.uint8)
        file["labels"] = np.arange(50)
        file["inner/images"] = np.zeros((50, 3, 4, 4), np.uint8)
    return tmp_path / "a.h5"


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 5), ("shuffle", True), ("seed", 3), ("drop_last", True)]
)
def test_an_option_that_is_set_later_is_refused_and_not_swallowed(path, name, value):
    with Loader(path, 20, "cpu") as loader:
        with pytest.raises(InputError, match=f"{name} was set") as caught:
            setattr(loader, name, value)
        assert f"{name}={value!r}" in caught.value.fix
        assert len(next(iter(loader))["labels"]) == 20


@pytest.mark.parametrize("value", ["no", "False", [1], 0.5])
def test_a_shuffle_that_is_neither_true_nor_false_is_refused(path, value):
    with pytest.raises(InputError, match="shuffle is"):
        Loader(path, 20, "cpu", shuffle=value)
    with Loader(path, 20, "cpu", shuffle=np.False_) as loader:
        assert next(iter(loader))["labels"].tolist() == list(range(20))


def test_the_advice_for_another_batch_size_goes_on_from_there(path):
    with Loader(path, 20, "cpu") as loader, Loader(path, batch_size=5) as other:
        next(iter(loader))
        other.load_state_dict(loader.state_dict())
        assert next(iter(other))["labels"].tolist() == [20, 21, 22, 23, 24]


def test_another_augmentation_augments_from_the_next_batch_on(path):
    with Loader(path, 50, "cpu") as loader:
        plain = next(iter(loader))["images"]
        loader.augment = Compose([Normalize([0.5] * 3, [0.25] * 3)])
        augmented = next(iter(loader))["images"]
        assert plain.dtype == torch.uint8
        torch.testing.assert_close(augmented.float(), (plain / 255 - 0.5) / 0.25)
        loader.augment = None
        assert torch.equal(next(iter(loader))["images"], plain)


def test_a_slice_of_samples(path):
    with Loader(path, 50, "cpu", samples=slice(10, None, 2)) as loader:
        assert next(iter(loader))["labels"].tolist() == list(range(10, 50, 2))
    with pytest.raises(InputError, match="no samples"):
        Loader(path, 50, "cpu", samples=slice(60, 70))


def test_an_open_file_is_answered_with_its_path(path):
    with h5py.File(path) as file:
        for given, typed in (
            (file, f"Loader({str(path)!r}, batch_size)"),
            (file["inner"], f"Loader({str(path)!r}, batch_size, group='inner')"),
            (file["images"], f"Loader({str(path)!r}, batch_size)"),
        ):
            with pytest.raises(InputError, match="into memory whole") as caught:
                Loader(given, 20, "cpu")
            assert caught.value.fix == typed


def test_the_folder_one_is_in_is_no_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="not a finished store"):
        Loader(".", 20, "cpu")


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({"generator": torch.Generator().manual_seed(7)}, "seed=7"),
        ({"sampler": [5, 1, 3]}, "samples=[1, 3, 5]"),
        ({"epochs": 3}, "leave epochs out"),
    ],
)
def test_the_advice_for_arguments_of_others_does_the_same(path, given, typed):
    with pytest.raises(InputError) as caught:
        Loader(path, 20, "cpu", **given)
    assert caught.value.fix == typed


def test_shuffle_by_its_place_in_a_dataloader_is_answered_by_name(path):
    with pytest.raises(InputError, match="True is no device") as caught:
        Loader(path, 20, True)
    assert caught.value.fix == "shuffle=True"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sampler", r"loader.set_epoch\(epoch\)"),
        ("batch_sampler", r"loader.set_epoch\(epoch\)"),
        ("num_workers", "without worker processes"),
        ("pin_memory", "on the device"),
        ("drop_last", r"len\(loader\)"),
        ("collate_fn", r"next\(iter\(loader\)\)"),
        ("generator", "seed="),
    ],
)
def test_what_a_dataloader_has_and_a_loader_has_not_is_answered(path, name, words):
    with Loader(path, 20, "cpu") as loader, pytest.raises(AttributeError, match=words):
        getattr(loader, name)


def test_indexing_says_how_to_get_a_batch(path):
    with Loader(path, 20, "cpu") as loader:
        with pytest.raises(TypeError, match=r"next\(iter\(loader\)\)"):
            loader[0]
        with pytest.raises(TypeError, match="DataLoader around it is not needed"):
            next(iter(torch.utils.data.DataLoader(loader, batch_size=None)))


def test_a_loader_that_shares_nothing_among_ranks_is_told_once(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    values = {"x": np.arange(10.0, dtype=np.float32)}
    with pytest.warns(UserWarning, match="3 ranks train together.*world_size=1 if every rank"):
        Loader(values, 2, "cpu").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loader(values, 2, "cpu").close()
        monkeypatch.setattr(arguments, "_told", set())
        for given in ({"world_size": 1}, {"rank": 1, "world_size": 3}):
            Loader(values, 2, "cpu", **given).close()


@pytest.mark.parametrize("kind", ["file", "store"])
def test_a_relative_path_stays_what_it_was_after_a_change_of_folder(
    path, kind, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    name = path.name
    if kind == "store":
        name = "made"
        stoker.pack_from([{"labels": n} for n in range(50)], name, options=PackOptions(jobs=1))
    loader = Loader(name, 10, "cpu", fields=["labels"], data_bytes=300)
    pickled = pickle.dumps(loader)
    assert name in repr(loader)
    monkeypatch.chdir("/")
    for each in (loader, pickle.loads(pickled)):
        assert torch.cat([batch["labels"] for batch in each]).tolist() == list(range(50))


@pytest.mark.parametrize(
    ("sampler", "typed"),
    [
        (RandomSampler(range(50), num_samples=20), "shuffle=True, epoch_samples=20"),
        (RandomSampler(range(50)), "shuffle=True"),
        (WeightedRandomSampler([1] * 50, 80), "weights=sampler.weights, epoch_samples=80"),
        (WeightedRandomSampler([1] * 50, 50), "weights=sampler.weights"),
    ],
)
def test_the_advice_for_a_sampler_gives_as_many_samples(path, sampler, typed):
    with pytest.raises(InputError) as caught:
        Loader(path, 10, "cpu", sampler=sampler)
    assert caught.value.fix == typed
    with eval(f"Loader(path, 10, 'cpu', {typed})") as loader:
        assert sum(len(batch["labels"]) for batch in loader) == len(sampler)


def test_the_advice_for_an_endless_sampler_is_an_epoch(path):
    with pytest.raises(InputError) as caught:
        Loader(path, 10, "cpu", sampler=RandomSampler(range(50), True, 10**10))
    assert caught.value.fix == "shuffle=True"


def test_a_list_of_numbers_in_a_sample_is_said_to_be_one_tensor():
    with pytest.warns(UserWarning, match=r"stacks the 2 numbers that 'targets' .* \(batch, 2\),"):
        loader = Loader([(np.ones(3), [1.0, n]) for n in range(4)], 2, "cpu")
    assert next(iter(loader))[1].tolist() == [[1, 0], [1, 1]]


def test_a_slip_in_a_keyword_of_a_dataloader_is_answered_with_it(path):
    with pytest.raises(InputError, match="no argument 'num_worker'") as caught:
        Loader(path, 10, "cpu", num_worker=3)
    assert caught.value.fix == "num_workers=3"


def test_masked_values_are_not_handed_out():
    masked = np.ma.masked_array(np.arange(4.0), [0, 1, 0, 0])
    with pytest.raises(InputError, match="masked values"):
        Loader((masked, np.arange(4)), 2, "cpu")
    with Loader(np.ma.masked_array(np.arange(4.0), [0] * 4), 4, "cpu") as loader:
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]


def test_the_columns_of_a_structured_array_are_advised():
    array = np.zeros(3, [("a", "f4"), ("b", "i4")])
    with pytest.raises(InputError) as caught:
        Loader(array, 2, "cpu")
    fields = eval(caught.value.fix.partition(", as fields")[0], {"value": array})
    assert set(next(iter(Loader(fields, 2, "cpu")))) == {"a", "b"}


class Fails(torch.utils.data.Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, number):
        return [1, 2][number], number


def test_a_sample_that_raises_is_named():
    with pytest.raises(IndexError) as caught, pytest.warns(match="into memory once"):
        Loader(Fails(), 2, "cpu")
    assert caught.value.__notes__ == ["in sample 2 of Fails, which says that it has 9"]


def test_tuples_of_different_lengths_say_how_to_get_their_borders():
    samples = [(np.arange(n), n) for n in (2, 1, 3)]
    with pytest.warns(match="another length in every sample") as told:
        Loader(samples, 3, "cpu")
    names = ("features", "features/offsets", "targets")
    assert f"as_tuple={names}" in str(told[0].message)
    values, offsets, targets = next(iter(Loader(samples, 3, "cpu", as_tuple=names)))
    assert values.tolist() == [0, 1, 0, 0, 1, 2]
    assert offsets.tolist() == [0, 2, 3, 6]
    assert targets.tolist() == [2, 1, 3]


def test_shapes_that_differ_in_a_later_axis_have_advice_that_works():
    shapes = [(2, 3), (2, 4)]
    with pytest.raises(InputError, match="not of one shape") as caught:
        collect([{"x": np.zeros(shape)} for shape in shapes])
    assert caught.value.fix == "np.ravel(x), with np.shape(x) as a field of its own"
    made = collect([{"x": np.ravel(x), "s": np.shape(x)} for x in map(np.zeros, shapes)])
    assert made["s"].values.tolist() == [[2, 3], [2, 4]]


@pytest.mark.parametrize("ratios", [0.8, "0.8", None])
def test_one_share_is_answered(ratios):
    with pytest.raises(InputError, match="the shares are"):
        split_randomly(10, ratios)
    with pytest.raises(InputError, match="num_samples is"):
        split_randomly([1, 2])


def test_nothing_to_load_is_said(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((0, 3))
        file["y"] = np.zeros((5, 2))
    with pytest.raises(InputError, match="has no samples"):
        Loader(tmp_path / "a.h5", 2, "cpu", rows=0)
    with pytest.raises(InputError, match="epoch_samples is 0"):
        Loader(np.arange(9), 2, "cpu", epoch_samples=0)
    with pytest.raises(InputError, match="drawing 10,000,000,000,000 samples needs"):
        Loader(np.arange(9), 2, "cpu", epoch_samples=10**13)


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({"split": "train"}, "samples='train'"),
        ({"indices": [1, 2]}, "samples=[1, 2]"),
        ({"columns": ["labels"]}, "fields=['labels']"),
        ({"random_state": 3}, "seed=3"),
        ({"subset": np.arange(1000)}, "samples=..."),
    ],
)
def test_the_names_of_others_are_answered_with_ours(path, given, typed):
    with pytest.raises(InputError, match="has no argument") as caught:
        Loader(path, 8, "cpu", **given)
    assert caught.value.fix == typed


@pytest.mark.parametrize(("samples", "expected"), [(10, 10), (np.int64(50), 50), (0.8, 40)])
def test_a_count_or_a_share_of_samples_is_answered_with_what_takes_them(path, samples, expected):
    with pytest.raises(InputError, match="1-D whole numbers") as caught:
        Loader(path, 8, "cpu", samples=samples)
    with Loader(path, 8, "cpu", samples=eval(caught.value.fix)) as loader:
        assert len(loader.samples) == expected


def test_arrays_that_are_given_apart_or_in_a_list_are_no_samples(monkeypatch):
    x, y = torch.randn(100, 4), torch.arange(100)
    for given in (lambda: Loader(x, y, 64), lambda: Loader([x, y], 64)):
        with pytest.raises(InputError) as caught:
            given()
        with eval(caught.value.fix, {"Loader": Loader, "x": x, "y": y}) as loader:
            assert next(iter(loader))[1].tolist() == list(range(64))
    monkeypatch.setattr(arguments, "_told", set())
    with pytest.warns(UserWarning, match="a list of 2 arrays of 100 rows for 2 samples"):
        Loader([x, x], 1).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for samples in ([x[:2], x[:2]], [x] * 20, [1.0, 2.0], [x.numpy()[0, 0]] * 3):
            Loader(samples, 1).close()


def test_a_loader_in_a_loader_is_answered_with_its_store(path):
    with (
        Loader(path, 8, "cpu") as loader,
        pytest.raises(InputError, match="given a Loader") as caught,
    ):
        Loader(loader, 8)
    with Loader(path, 8, "cpu") as loader, eval(caught.value.fix) as other:
        assert len(other.samples) == 50


def test_a_batch_says_what_it_has_instead_of_an_attribute(path):
    with Loader(path, 8, "cpu") as loader:
        batch = next(iter(loader))
    for name, words in (
        ("labels", r"batch\['labels'\] is the field"),
        ("cuda", "its tensors are on cpu already"),
        ("nothing", "no attribute 'nothing'$"),
    ):
        assert not hasattr(batch, name)
        with pytest.raises(AttributeError, match=words):
            getattr(batch, name)
    again = pickle.loads(pickle.dumps(batch))
    assert again["labels"].tolist() == batch["labels"].tolist()
    assert again.step == batch.step
