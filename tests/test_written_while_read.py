"""A file that is written to while it is read: noticed, and the old bytes stay readable after a rename."""

from __future__ import annotations

import os
from collections import deque

import h5py
import numpy as np
import pytest

from stoker.errors import CorruptError, StoreError
from stoker.loader.loader import Loader
from stoker.store.fields import Dense
from stoker.store.reader import open_store
from store_makers import write_store

ROWS = np.arange(60_000, dtype="f4").reshape(6000, 10)


@pytest.fixture
def store_path(tmp_path):
    write_store(tmp_path / "s", [{"x": Dense(ROWS)}]).close()
    return tmp_path / "s"


def shard_of(path):
    (shard,) = path.glob("*.h5")
    return shard


def overwrite(path, values=bytes(4096)):
    """Write zeros over values in the same inode, as `cp` and `rsync --inplace` do."""
    # Time stamps of files move with the kernel's clock of 4 ms.
    before = path.stat().st_mtime_ns
    at = path.read_bytes().find(ROWS[3000:3100].tobytes())
    assert at > 0
    while path.stat().st_mtime_ns == before:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(values)


READS = {
    "range": lambda store: store.read_rows("x", 0, 6000),
    "scattered": lambda store: store.gather("x", np.array([5999, 3000, 5, 3001])),
    "dense gather": lambda store: store.gather("x", np.arange(3050, 3000, -1)),
    "one row": lambda store: store.shards[0].arrays["x"].read(3000, 3001),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_verified_blocks_that_are_overwritten_are_noticed(store_path, read, monkeypatch):
    monkeypatch.setattr("stoker.store.arrays._UNLOOKED_SECONDS", 0.0)
    with open_store(store_path) as store:
        read(store)
        store.read_rows("x", 0, 6000)
        overwrite(shard_of(store_path))
        for _ in range(2):  # a read that failed fails again
            with pytest.raises(CorruptError, match=r"shard-.*written to since it was opened"):
                read(store)


def test_a_single_row_is_looked_after_within_a_millisecond(store_path):
    with open_store(store_path) as store:
        array = store.shards[0].arrays["x"]
        store.read_rows("x", 0, 6000)
        overwrite(shard_of(store_path))
        rows = (array.read(3000, 3001) for _ in range(1_000_000))
        with pytest.raises(CorruptError, match="written to"):
            deque(rows, maxlen=1)


def test_what_changes_no_byte_is_no_fault(store_path, tmp_path):
    write_store(tmp_path / "other", [{"x": Dense(-ROWS)}]).close()
    shard = shard_of(store_path)
    with open_store(store_path) as store:
        expected = store.read_rows("x", 0, 6000)
        changes = (
            lambda: os.utime(shard),
            lambda: os.link(shard, tmp_path / "name"),
            lambda: shard.chmod(0o600),
            lambda: overwrite(shard, ROWS[3000:3100].tobytes()),
            lambda: shard_of(tmp_path / "other").replace(shard),
            shard.unlink,
        )
        for change in changes:
            change()
            assert np.array_equal(store.read_rows("x", 0, 6000), expected)
            assert np.array_equal(store.gather("x", np.array([9, 4000])), expected[[9, 4000]])


@pytest.mark.parametrize("options", [{}, {"chunks": (500, 10)}], ids=["contiguous", "chunked"])
def test_a_plain_file_has_no_checksums_so_any_write_is_refused(tmp_path, options):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=ROWS, **options)
    with open_store(path) as store:
        store.read_rows("x", 0, 2000)
        os.link(path, tmp_path / "name")
        assert np.array_equal(store.read_rows("x", 2000, 3000), ROWS[2000:3000])
        overwrite(path)
        with pytest.raises(StoreError, match=r"x\.h5 was written to while it was read"):
            store.read_rows("x", 3000, 6000)


def test_a_loader_stops_at_a_store_that_is_overwritten_in_the_second_epoch(store_path):
    with Loader(store_path, 100, "cpu", data_bytes=80_000) as loader:
        assert sum(1 for _ in loader) == 60
        batches = iter(loader)
        next(batches)
        overwrite(shard_of(store_path))
        sums = []
        with pytest.raises(StoreError, match="written to"):
            sums.extend(np.ptp(batch["x"].numpy(), 1) for batch in batches)
        assert (np.concatenate(sums or [np.full(1, 9.0)]) == 9).all()  # a row counts up by nine
