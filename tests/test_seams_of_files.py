"""What a reader of files must not do silently: read what is gone, open all files at once, replace a neighbour."""

from __future__ import annotations

import resource
import shutil

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from stoker.errors import CorruptError, InputError, StoreError
from stoker.loader.loader import Loader
from stoker.packing import PackOptions, pack
from stoker.sources.arrays import ArraysSource
from stoker.sources.tables import TableSource
from stoker.store import reader, shard
from stoker.store.fields import Dense
from stoker.store.foreign import identify_file, name_kind, unused_beside
from stoker.store.reader import open_store
from store_makers import write_store
from test_zarr_store import write_array

ROWS = np.arange(60, dtype="f4").reshape(20, 3)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("change", ["removed", "written anew"])
def test_a_zarr_folder_that_changes_is_no_fill_value(tmp_path, version, change):
    folder = tmp_path / "x.zarr"
    write_array(folder, ROWS, (5, 3), version)
    store = open_store(folder)
    assert (store.read_rows("features", 1, 3) == ROWS[1:3]).all()
    shutil.rmtree(folder)
    if change == "written anew":
        write_array(folder, ROWS + 1, (5, 2), version)
    with pytest.raises(StoreError, match=r"cannot be read|was written to"):
        store.read_rows("features", 12, 14)


def make_shards(folder, monkeypatch, num_shards, held=1, most_open=8):
    """A store of one row per shard, in a process that may have a few open files."""
    monkeypatch.setattr(reader, "_HELD_SHARDS", held)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most_open, most_open))
    monkeypatch.setattr(shard, "_OPEN", shard._OpenShards())
    return write_store(folder, [{"x": Dense(ROWS[at : at + 1])} for at in range(num_shards)])


def count_open(store):
    return sum(each._file is not None for each in store.shards)


@pytest.mark.parametrize("how", ["resident", "chunks", "verify", "rows"])
def test_a_store_of_more_shards_than_files_may_be_open(tmp_path, monkeypatch, how):
    store = make_shards(tmp_path / "s", monkeypatch, 20)
    if how == "rows":
        found = np.concatenate([store.read_rows("x", row, row + 1) for row in (*range(20), 3, 19)])
        assert (found == ROWS[[*range(20), 3, 19]]).all()
    elif how == "verify":
        assert store.verify().problems == ()
    else:
        options = {"chunk_bytes": 1} if how == "chunks" else {}
        with Loader(store, 1, **options) as loader:
            assert (np.concatenate([batch["x"] for batch in loader]) == ROWS).all()
    assert 1 < count_open(store) <= 4 + 1


def test_a_loader_in_order_opens_no_shard_before_it_reads(tmp_path, monkeypatch):
    store = make_shards(tmp_path / "s", monkeypatch, 20, held=0, most_open=1000)
    loader = Loader(store, 1, chunk_bytes=1)
    assert count_open(store) == 0
    assert len(list(loader)) == 20


@pytest.mark.parametrize(
    "text", ["BMI,age\n21.5,30\n22.5,31\n", "ORCID,x\n1,2\n", "CDF,PDF\n0.5,1\n", "GRIB,x\n1,2\n"]
)
def test_a_table_whose_first_name_begins_as_a_binary_file_does(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    assert name_kind(path) is None
    preparation = TableSource((path,), missing="keep").prepare(tmp_path)
    assert not preparation.refused


def test_what_is_typed_replaces_no_neighbour(tmp_path):
    path = tmp_path / "rows.xls"
    path.write_bytes(b"\xd0\xcf\x11\xe0" + bytes(600))
    (tmp_path / "rows.csv").write_text("mine\n")
    (tmp_path / "rows-2.csv").write_text("mine too\n")
    found = identify_file(path)
    assert "rows-3.csv" in found.fix
    assert "rows.csv" not in found.fix
    assert unused_beside(path, ".npz") == str(tmp_path / "rows.npz")


@pytest.mark.parametrize("offsets", [[0, 2, 9], [0, 3, 2], [-1, 2, 3]])
def test_offsets_beyond_the_rows_are_no_samples(tmp_path, offsets):
    path = tmp_path / "matrix.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"] = "csr_matrix"
        group.attrs["shape"] = [2, 4]
        group["data"] = np.ones(3, "f4")
        group["indices"] = np.array([0, 1, 2], "i4")
        group["indptr"] = np.array(offsets, "i8")
    with pytest.warns(UserWarning, match="sparse"), pytest.raises(CorruptError, match="offsets"):
        Loader(open_store(path), 1)


def test_a_distributed_sampler_that_shuffles_is_answered_with_a_shuffle():
    data = TensorDataset(torch.zeros(4, 1))
    for shuffle in (True, False):
        sampler = DistributedSampler(data, 2, 0, shuffle=shuffle)
        with pytest.raises(InputError) as caught:
            Loader({"x": ROWS}, 2, sampler=sampler)
        assert ("shuffle=True" in caught.value.fix) == shuffle
        assert "rank=sampler.rank" in caught.value.fix


def test_arrays_are_told_of_no_option_of_tables(tmp_path):
    rng = np.random.default_rng(0)
    targets = rng.normal(size=4000).astype("f4")
    features = rng.normal(size=(4000, 4)).astype("f4")
    features[:, 3] = targets
    np.savez(tmp_path / "x.npz", features=features, targets=targets)
    done = pack(ArraysSource((tmp_path / "x.npz",)), tmp_path / "s", PackOptions(jobs=1))
    remedies = [each.remedy for each in done.inspection.findings if each.name == "label-leak"]
    assert remedies
    assert not any("--drop" in each for each in remedies)
