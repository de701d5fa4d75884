"""The uploader: many small pieces, many threads, errors in between; nothing lost, nothing mixed up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from stoker.loader.columns import make_columns
from stoker.loader.staging import Copy, Uploader, torch_dtype
from stoker.store.arrays import StoredArray
from stoker.store.fields import Dense
from store_makers import write_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = 3000


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return {
        "wide": rng.normal(size=(ROWS, 40)).astype("f4"),
        "narrow": rng.integers(0, 60_000, ROWS, dtype=np.uint16),
    }


@pytest.fixture
def columns(tmp_path, data):
    halves = [slice(0, 1100), slice(1100, ROWS)]
    shards = [{name: Dense(values[half]) for name, values in data.items()} for half in halves]
    store = write_store(tmp_path / "store", shards)
    with store:
        yield make_columns(store, list(data), np.arange(ROWS))


def make_targets(columns, device):
    values = [column.values[0] for column in columns]
    return [
        torch.zeros((ROWS, *value.shape), dtype=torch_dtype(value.dtype), device=device)
        for value in values
    ]


def copies_of(columns, targets, low, high):
    return [
        Copy(column.values[0], low, high, target[low:high])
        for column, target in zip(columns, targets, strict=True)
    ]


def assert_equal(targets, columns, data):
    for target, column in zip(targets, columns, strict=True):
        values = data[column.field]
        assert np.array_equal(target.cpu().numpy().view(values.dtype), values), column.field


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [1, 12])
def test_many_uploads_of_many_pieces_arrive_whole(columns, data, device, threads):
    targets = make_targets(columns, device)
    uploader = Uploader(torch.device(device), threads, slab_bytes=1024)
    try:
        for _ in range(3):
            edges = [0, 1, 700, 1100, 1101, 2500, ROWS]
            uploads = [
                uploader.begin(copies_of(columns, targets, low, high))
                for low, high in pairwise(edges)
            ]
            for upload in uploads:
                event = upload.wait()
                assert (event is None) == (device == "cpu")
                if event is not None:
                    event.synchronize()
            assert_equal(targets, columns, data)
            for target in targets:
                target.zero_()
            if device == "cuda":
                torch.cuda.synchronize()
    finally:
        uploader.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_read_ends_its_upload_and_no_other(columns, data, device, monkeypatch):
    """More failures than there are slabs: each must come back."""
    read = StoredArray.read_into
    broken = [True]

    def fail_sometimes(self, start, stop, out):
        if broken[0] and start % 3 == 0:
            raise OSError(f"rows {start} to {stop} are gone")
        read(self, start, stop, out)

    monkeypatch.setattr(StoredArray, "read_into", fail_sometimes)
    targets = make_targets(columns, device)
    uploader = Uploader(torch.device(device), 4, slab_bytes=512, num_slabs=5)
    try:
        for _ in range(10):
            with pytest.raises(OSError, match="are gone"):
                uploader.upload(copies_of(columns, targets, 0, ROWS))
        broken[0] = False
        uploader.upload(copies_of(columns, targets, 0, ROWS))
        if device == "cuda":
            torch.cuda.synchronize()
        assert_equal(targets, columns, data)
    finally:
        uploader.close()


@pytest.mark.gpu
def test_a_failed_copy_ends_its_upload_and_its_slab_comes_back(columns, data):
    targets = make_targets(columns, "cuda")
    uploader = Uploader(torch.device("cuda"), 4, slab_bytes=512, num_slabs=5)
    short = [Copy(columns[0].values[0], 0, ROWS, targets[0][:7])]  # no room for the rest
    try:
        for _ in range(10):
            with pytest.raises(RuntimeError):
                uploader.upload(short)
        uploader.upload(copies_of(columns, targets, 0, ROWS))
        torch.cuda.synchronize()
        assert_equal(targets, columns, data)
    finally:
        uploader.close()
