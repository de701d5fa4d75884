"""Images that are augmented for many batches at once are those that a call for each batch gives."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.augment import (
    Compose,
    Normalize,
    ProgressiveAugmentation,
    RandomCrop,
    RandomHorizontalFlip,
    ToDtype,
)
from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.loader.staging import TableUploader

on_each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("ahead") / "images.h5"
    with h5py.File(path, "w") as file:
        file["images"] = rng.integers(0, 256, (300, 3, 8, 8), dtype=np.uint8)
        file["masks"] = rng.integers(0, 4, (300, 8, 8), dtype=np.uint8)
        file["labels"] = np.arange(300)
    return path


def make(seed=3):
    ops = [
        RandomHorizontalFlip(0.5),
        RandomCrop(8, padding=2),
        Normalize((0.5,) * 3, (0.2,) * 3),
        ToDtype(torch.float32),
    ]
    return Compose(ops, seed=seed)


class OneByOne:
    """The same augmentation without `batches`: every batch is drawn by a call of its own."""

    def __init__(self, compose):
        self._compose = compose

    def __call__(self, *values, rows=None):
        return self._compose(*values, rows=rows)

    def seek(self, epoch, step=0):
        self._compose.seek(epoch, step)


def same(one, other):
    assert len(one) == len(other)
    for mine, wanted in zip(one, other, strict=True):
        for name in wanted:
            assert torch.equal(mine[name], wanted[name]), name


@on_each_device
@given(
    batch_size=st.integers(1, 70),
    chunk_rows=st.one_of(st.none(), st.integers(80, 200)),
    skipped=st.integers(0, 7),
    left_at=st.integers(0, 9),
)
@settings(max_examples=8)  # two epochs each
def test_draws_do_not_depend_on_how_many_batches_are_made_at_once(
    store, device, batch_size, chunk_rows, skipped, left_at
):
    chunk_bytes = chunk_rows and chunk_rows * 264
    options = {"order": "shuffled", "seed": 5, "chunk_bytes": chunk_bytes}
    runs = []
    for augment in (make(), OneByOne(make())):
        with Loader(store, batch_size, device, augment=augment, **options) as loader:
            loader.set_epoch(1, min(skipped, len(loader)))
            batches = iter(loader)
            seen = [batch for _, batch in zip(range(left_at), batches, strict=False)]
            batches.close()
            seen += list(loader)  # goes on, or begins the next epoch
            runs.append(seen)
    same(*runs)


@on_each_device
def test_a_smaller_ring_and_another_stream_change_nothing(store, device):
    runs = []
    for augment in (make(), OneByOne(make())):
        options = {"chunk_bytes": 30 * 264, "num_slots": 6}
        with Loader(store, 10, device, order="shuffled", augment=augment, **options) as loader:
            seen = []
            for number, batch in enumerate(loader):
                seen.append(batch)
                if number == 4:
                    loader.shrink(0.5)
            with torch.inference_mode():
                seen += [batch for _, batch in zip(range(3), loader, strict=False)]
            runs.append(seen)
    same(*runs)


def test_batches_are_made_together_and_a_step_is_counted_for_each(store):
    compose, alone = make(), make()
    images = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (40, 3, 8, 8), np.uint8))
    rows = torch.arange(30)
    together = compose.batches(images, rows=rows, batch_size=10)
    one_by_one = torch.cat([alone(images, rows=part) for part in rows.split(10)])
    assert torch.equal(together, one_by_one)
    assert compose.state_dict() == alone.state_dict()
    with pytest.raises(InputError, match="30 rows in batches of 7"):
        compose.batches(images, rows=rows, batch_size=7)
    assert compose.batches(images, rows=rows, batch_size=30).shape[0] == 30


def test_an_epoch_of_small_images_takes_one_table_and_few_passes(store, monkeypatch):
    tables, passes = [], []
    upload, batches = TableUploader.upload, Compose.batches

    def noted_upload(self, rows, at_once):
        tables.append(len(rows))
        return upload(self, rows, at_once)

    def noted_batches(self, *values, rows, batch_size):
        passes.append(len(rows) // batch_size)
        return batches(self, *values, rows=rows, batch_size=batch_size)

    monkeypatch.setattr(TableUploader, "upload", noted_upload)
    monkeypatch.setattr(Compose, "batches", noted_batches)
    with Loader(store, 10, "cpu", order="shuffled", augment=make()) as loader:
        assert len(list(loader)) == 30
        assert tables == [1], "images, masks and labels have the same rows"
        assert passes == [29], "the first batch alone tells how large they are"
        assert len(list(loader)) == 30
    assert tables == [1, 1]
    assert passes == [29, 30]


def test_a_schedule_of_stages_is_augmented_ahead_too(store):
    stages = {0: make(), 1: make(seed=9)}
    runs = []
    for augment in (ProgressiveAugmentation(stages), OneByOne(ProgressiveAugmentation(stages))):
        with Loader(store, 16, "cpu", order="shuffled", augment=augment) as loader:
            runs.append([*loader, *loader])
    same(*runs)
