"""HDF5 files of other programs: numbers of other bits than numpy's are read right or left aside by name."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch

from stoker.loader.loader import Loader
from stoker.store.hdf5 import locate
from stoker.store.reader import open_store


def bfloat16():
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_precision(16)
    kind.set_ebias(127)
    return kind


def twelve_bits(signed, offset=0):
    kind = (h5py.h5t.STD_I16LE if signed else h5py.h5t.STD_U16LE).copy()
    kind.set_precision(12)
    kind.set_offset(offset)
    return kind


STRANGE = {
    "bfloat16": (bfloat16(), np.arange(-12, 12, dtype="f4").reshape(8, 3)),
    "unsigned of 12 bits": (twelve_bits(False, 4), np.arange(24, dtype="u2").reshape(8, 3)),
    "signed of 12 bits": (twelve_bits(True), np.arange(-12, 12, dtype="i2").reshape(8, 3)),
}


def write(path, kind, values, chunks=None, name=b"features"):
    with h5py.File(path, "a") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if chunks:
            plist.set_chunk(chunks)
        space = h5py.h5s.create_simple(values.shape)
        data = h5py.h5d.create(file.id, name, kind, space, plist)
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, values)


@pytest.mark.parametrize("chunks", [None, (3, 3)])
@pytest.mark.parametrize("name", STRANGE)
def test_numbers_of_other_bits_go_through_the_library(tmp_path, name, chunks):
    kind, values = STRANGE[name]
    path = tmp_path / "strange.h5"
    write(path, kind, values, chunks)
    with h5py.File(path) as file:
        location = locate(path, file["features"])
        np.testing.assert_array_equal(file["features"][:], values)
    assert location.layout == "library"
    assert "16 bits" in location.reason
    with Loader(path, 3, "cpu") as loader:
        got = torch.cat([batch["features"] for batch in loader])
    np.testing.assert_array_equal(got.numpy().astype(values.dtype), values)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", ["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4"])
def test_numpys_own_numbers_are_read_by_position(tmp_path, kind, order):
    values = np.arange(8).reshape(4, 2).astype(order + kind)
    path = tmp_path / "plain.h5"
    with h5py.File(path, "w") as file:
        file["features"] = values
        named = h5py.enum_dtype({"no": 0, "yes": 1}, basetype=order + "i2")
        file.create_dataset("answers", (4,), named)[:] = [0, 1, 1, 0]
    with h5py.File(path) as file:
        assert locate(path, file["features"]).layout == "contiguous"
        assert locate(path, file["answers"]).layout == "contiguous"
    with Loader(path, 4, "cpu") as loader:
        batch = next(iter(loader))
    np.testing.assert_array_equal(batch["features"].numpy(), values)
    assert batch["answers"].tolist() == [0, 1, 1, 0]


def test_what_torch_or_numpy_has_not_is_left_aside_by_name(tmp_path):
    path = tmp_path / "long.h5"
    with h5py.File(path, "w") as file:
        file["features"] = np.ones((4, 2), "f4")
        file["long"] = np.ones(4, np.longdouble)
    kind = h5py.h5t.STD_I32LE.copy()
    kind.set_size(3)
    kind.set_precision(24)
    write(path, kind, np.arange(4, dtype="i4"), name=b"three_bytes")
    with open_store(path) as store:
        assert list(store.fields) == ["features"]
        assert any("'long'" in note for note in store.notes)
        assert any("'three_bytes'" in note and "numpy" in note for note in store.notes)
    with pytest.warns(UserWarning, match="left aside"), Loader(path, 4, "cpu") as loader:
        assert next(iter(loader))["features"].sum() == 8


@pytest.mark.parametrize("stated", ["fifty", np.arange(3), float("nan"), 7])
def test_a_strange_count_is_noted_and_no_damage(tmp_path, stated):
    path = tmp_path / "counted.h5"
    with h5py.File(path, "w") as file:
        file["features"] = np.ones((4, 2), "f4")
        file.attrs["num_samples"] = stated
    with open_store(path) as store:
        assert store.num_samples == 4
        assert any("num_samples says" in note and "4 rows" in note for note in store.notes)
