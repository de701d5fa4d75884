"""Habits from other loaders: options set later, slices, open files, indexing. They work or are answered."""

from __future__ import annotations

import warnings

import h5py
import numpy as np
import pytest
import torch

from stoker.augment import Compose, Normalize
from stoker.errors import InputError, StoreError
from stoker.loader import arguments
from stoker.loader.loader import Loader


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
