"""HDF5 as other programs write it: values equal to h5py's, or an error or note that names what is not read."""

from __future__ import annotations

import itertools
import os

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import Loader
from stoker.errors import StokerError, StoreError
from stoker.store.plain import Selection
from stoker.store.reader import open_store

VALUES = np.arange(8 * 6 * 4).reshape(8, 6, 4).astype("i4")


@given(
    chunk=st.tuples(*[st.integers(1, 4)] * 3),
    growing=st.tuples(*[st.sampled_from([0, 3, None])] * 3),
    libver=st.sampled_from(["earliest", "latest"]),
    filters=st.sampled_from([{}, {"shuffle": True}, {"compression": 1}, {"fletcher32": True}]),
)
def test_chunks_have_h5py_s_values_whichever_axis_can_grow(
    tmp_path_factory, chunk, growing, libver, filters
):
    """HDF5's list of chunks gives them wrong places where one axis grows that is not the first."""
    path = tmp_path_factory.mktemp("grow") / "x.h5"
    most = tuple(None if g is None else n + g for n, g in zip(VALUES.shape, growing, strict=True))
    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("x", data=VALUES, chunks=chunk, maxshape=most, **filters)
    with open_store(path) as store:
        assert (store.read_rows("x", 0, 8) == VALUES).all()
        assert (store.gather("x", np.array([7, 2, 2, 0])) == VALUES[[7, 2, 2, 0]]).all()


def test_a_loader_reads_what_a_recorder_appended_along_the_second_axis(tmp_path):
    path = tmp_path / "channels.h5"
    with h5py.File(path, "w", libver="latest") as file:
        made = file.create_dataset("x", (6, 0), "f4", maxshape=(6, None), chunks=(2, 5))
        for _ in range(4):
            made.resize(made.shape[1] + 5, axis=1)
            made[:, -5:] = np.random.default_rng(0).random((6, 5))
        values = made[()]
    for batch in Loader(path, 2, "cpu", shuffle=True):
        assert (batch["x"].numpy() == values[batch.sample_ids]).all()


def test_a_missing_part_of_a_virtual_dataset_is_not_read_as_zeros(tmp_path):
    layout = h5py.VirtualLayout((10,), "i8")
    for number in range(2):
        with h5py.File(tmp_path / f"part{number}.h5", "w") as file:
            file["d"] = np.arange(1, 6)
        layout[5 * number : 5 * number + 5] = h5py.VirtualSource(f"part{number}.h5", "d", (5,))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with open_store(tmp_path / "x.h5") as store:
        assert store.read_rows("x", 0, 10).min() == 1
    (tmp_path / "part1.h5").rename(tmp_path / "elsewhere.h5")
    with pytest.raises(StoreError, match=r"takes values from part1\.h5, which is not there"):
        open_store(tmp_path / "x.h5")
    with h5py.File(tmp_path / "part1.h5", "w") as file:
        file["other"] = 1
    with pytest.raises(StoreError, match=r"part1\.h5, dataset 'd', which is not there"):
        open_store(tmp_path / "x.h5")


def test_a_missing_external_file_is_named(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (4,), "i4", external=[("raw-of-x.bin", 0, 16)])
    with pytest.raises(StoreError, match=r"takes values from raw-of-x\.bin"):
        open_store(tmp_path / "x.h5")


def test_a_filter_that_is_not_installed_is_named_when_the_file_is_opened(tmp_path):
    for code, advice in ((32001, "pip install hdf5plugin"), (305, "h5repack -f NONE")):
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((2,))
        path = tmp_path / f"{code}.h5"
        with h5py.File(path, "w") as file:
            # An unknown filter can only be set as one that may be left out; what is written is then plain.
            file.create_dataset("y", data=np.arange(4))
            plist.set_filter(code, h5py.h5z.FLAG_OPTIONAL)
            space = h5py.h5s.create_simple((4,))
            h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, plist)
        with pytest.raises(StoreError, match=f"HDF5's number {code}") as error:
            Loader(path, 2, "cpu")
        assert advice in error.value.fix


def test_second_names_are_said_and_can_be_chosen(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["data/a"] = np.arange(5)
        file["data/b"] = np.arange(5) * 2
        file["soft"] = h5py.SoftLink("/data/a")
        file["train"] = h5py.SoftLink("data")
        file["hard"] = file["data/b"]
        file["away"] = h5py.ExternalLink("other.h5", "/x")
        file["nowhere"] = h5py.SoftLink("/gone")
        file["data/up"] = file["/"]  # a group within itself
    with open_store(path) as store:
        assert set(store.fields) == {"data/a", "data/b"}
        notes = "\n".join(store.notes)
    for said in (
        "'soft' is a second name of 'data/a'",
        "'train/b' is a second name of 'data/b'",
        "'hard' is a second name of 'data/b'",
        "'away' is a link into another file, '/x' of 'other.h5'",
        "'nowhere' is a link to 'gone'",
    ):
        assert said in notes
    for choice in ({"group": "train"}, {"fields": ["soft", "hard"]}):
        loaded = {}
        for batch in Loader(path, 5, "cpu", **choice):
            loaded = {name: batch[name].tolist() for name in batch}
        assert list(loaded.values()) == [[0, 1, 2, 3, 4], [0, 2, 4, 6, 8]], choice


def test_the_columns_of_a_table_are_fields(tmp_path):
    path = tmp_path / "x.h5"
    table = np.zeros(
        9, [("x", ">f4", (3,)), ("label", "u1"), ("ok", "?"), ("name", "S4"), ("inner", [("a", "f4")]),
            ("CD4+/CD8", "i2")]
    )  # fmt: skip
    table["x"], table["label"] = np.random.default_rng(0).random((9, 3)), np.arange(9)
    table["ok"], table["CD4+/CD8"] = table["label"] > 4, -table["label"].astype("i2")
    with h5py.File(path, "w") as file:
        file.create_dataset("particles", data=table, chunks=(2,), compression="gzip")
        file["y"] = np.arange(9.0)
    with pytest.warns(match="particles/name"):
        loader = Loader(path, 4, "cpu", shuffle=True)
    with loader:
        assert set(loader.store.fields) == {
            "particles/x", "particles/label", "particles/ok", "particles/CD4+/CD8", "y",
        }  # fmt: skip
        assert "'particles/name' is text" in "\n".join(loader.store.notes)
        assert "'particles/inner' is a table of the columns a" in "\n".join(loader.store.notes)
        for batch in loader:
            rows = batch.sample_ids
            for name in ("x", "label", "ok", "CD4+/CD8"):
                values = batch[f"particles/{name}"].numpy()
                assert (values == table[name][rows]).all()
                assert values.dtype == table.dtype[name].base.newbyteorder("=")
    with open_store(path, group="particles") as store:
        assert (store.read_rows("label", 3, 5) == [3, 4]).all()


def test_what_netcdf_says_of_values_is_noted(tmp_path):
    with h5py.File(tmp_path / "x.nc", "w") as file:
        file["t"] = np.arange(5, dtype="i2")
        file["t"].attrs["scale_factor"] = 0.01
        file["t"].attrs["_FillValue"] = np.array([-999], "i2")
    with open_store(tmp_path / "x.nc") as store:
        assert "'t' says scale_factor 0.01, _FillValue -999" in store.notes[0]


def test_labels_in_attributes_are_said(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.zeros((20, 3))
        file["x"].attrs["labels"] = np.arange(20)
        file["x"].attrs["scale"] = 3.0
        file["x"].attrs["nothing"] = h5py.Empty("f4")
        file.attrs["names"] = ["a"] * 20
    with open_store(tmp_path / "x.h5") as store:
        notes = "\n".join(store.notes)
    assert "attribute 'labels' of dataset 'x' has a value for each of the 20 samples" in notes
    assert "attribute 'names' of the file" in notes
    assert "scale" not in notes


def test_a_file_without_numbers_says_what_it_has_instead(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["names"] = ["a", "b"]
        file.create_dataset("tracks", (2,), h5py.vlen_dtype("f4"))
    with pytest.raises(
        StoreError, match=r"'names' is text.*'tracks' has rows of different lengths"
    ):
        open_store(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "a") as file:
        file["x"] = np.zeros(2)
    with pytest.raises(StoreError, match="'tracks' has rows of different lengths"):
        open_store(tmp_path / "x.h5", fields=["tracks"])


def test_the_size_of_an_empty_matlab_array_is_no_data(tmp_path):
    path = tmp_path / "x.mat"
    with h5py.File(path, "w", userblock_size=512) as file:
        file["nothing"] = np.zeros(2, "u8")
        file["nothing"].attrs["MATLAB_empty"] = 1
        file["cell/a"] = np.ones((2, 3))
    with path.open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file")
    with pytest.raises(StoreError, match="structs, cells") as error:
        open_store(path)
    assert "MATLAB" in error.value.fix
    with open_store(path, rows=2) as store:
        assert set(store.fields) == {"cell/a"}


def test_a_file_that_its_writer_left_open_says_so(tmp_path):
    path = tmp_path / "x.h5"
    if (child := os.fork()) == 0:
        file = h5py.File(path, "w", libver="latest")
        file["x"] = np.zeros(3)
        file.swmr_mode = True
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(StokerError, match="was not closed by the program") as error:
        open_store(path)
    assert error.value.fix.startswith("h5clear -s ")


def test_a_file_written_to_behind_h5py_s_back_is_noticed(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.zeros((6, 2)), chunks=(2, 2), compression="lzf")
    with open_store(path) as store:
        store.read_rows("x", 0, 2)
        os.utime(path, ns=(1, 1))
        with pytest.raises(StoreError, match="was written to"):
            store.read_rows("x", 2, 4)


def test_a_link_within_a_loop_ends(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, other in itertools.pairwise("abcda"):
            file[name] = h5py.SoftLink(other)
        file["x"] = np.zeros(3)
    with open_store(tmp_path / "x.h5", **vars(Selection())) as store:
        assert set(store.fields) == {"x"}
