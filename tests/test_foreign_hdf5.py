"""HDF5 files of every kind: opened right, or refused with the candidates and what to type; never one sample."""

from __future__ import annotations

import pickle
import re
import shlex

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.errors import InputError, StokerError, StoreError
from stoker.loader.loader import Loader
from stoker.loader.ragged import dense_rows
from stoker.store.plain import Selection, choose
from stoker.store.reader import open_store


def csr(group, values: np.ndarray, form: str = "csr_matrix", **attributes) -> None:
    """Write a sparse matrix as AnnData does."""
    rows, columns = np.nonzero(values)
    group["data"] = values[rows, columns].astype("f4")
    group["indices"] = columns.astype("i4")
    group["indptr"] = np.searchsorted(rows, np.arange(len(values) + 1)).astype("i4")
    group.attrs["encoding-type"] = form
    group.attrs["shape"] = values.shape
    for name, value in attributes.items():
        group.attrs[name] = value


COUNTS = np.random.default_rng(0).poisson(0.4, (30, 8)).astype("f4")


def anndata(path, form="csr_matrix"):
    with h5py.File(path, "w") as file:
        file.attrs["encoding-type"] = "anndata"
        if form == "dense":
            file["X"] = COUNTS
        else:
            csr(file.create_group("X"), COUNTS, form)
        file["obs/_index"] = [f"cell{n}" for n in range(30)]
        file["obs/n_genes"] = np.arange(30)
        file["obs/kind/codes"] = np.zeros(30, "i1")
        file["obs/kind/categories"] = ["a", "b"]
        file["obsm/X_pca"] = np.zeros((30, 3))
        for name in ("n_cells", "mean", "std", "highly_variable"):
            file[f"var/{name}"] = np.arange(8)
        csr(file.create_group("obsp/distances"), np.eye(30))
        file["uns/pca/variance"] = np.zeros(3)
    return path


def test_a_sparse_anndata_is_ragged_with_what_belongs_to_its_cells(tmp_path):
    with open_store(anndata(tmp_path / "x.h5ad")) as store:
        assert store.num_samples == 30
        assert set(store.fields) == {
            "X/data", "X/indices", "obs/n_genes", "obs/kind/codes", "obsm/X_pca",
        }  # fmt: skip
        assert "X is a sparse matrix of 30 x 8" in "\n".join(store.notes)
        assert store.left_aside("obsp/distances/data")
        for row in (0, 7, 29):
            dense = np.zeros(8, "f4")
            dense[store.read_values("X/indices", row)] = store.read_values("X/data", row)
            assert (dense == COUNTS[row]).all()
        values, offsets = pickle.loads(pickle.dumps(store)).read_ragged("X/data", 3, 20)
        assert values.sum() == COUNTS[3:20].sum()
        assert offsets.dtype == np.int64
        assert not store.verify().problems


def test_a_loader_has_the_rows_of_a_sparse_matrix(tmp_path):
    fields = ["X/data", "X/indices"]
    with Loader(anndata(tmp_path / "x.h5ad"), 7, "cpu", fields=fields) as loader:
        seen = 0
        for batch in loader:
            offsets = batch["X/data/offsets"].tolist()
            for at in range(len(offsets) - 1):
                dense = np.zeros(8, "f4")
                part = slice(offsets[at], offsets[at + 1])
                dense[batch["X/indices"][part].numpy()] = batch["X/data"][part].numpy()
                assert (dense == COUNTS[seen]).all()
                seen += 1
        assert seen == 30


@given(
    rows=st.integers(1, 6),
    width=st.integers(1, 7),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
    subset=st.booleans(),
)
def test_dense_rows_of_a_sparse_batch(rows, width, padding, seed, subset):
    rng = np.random.default_rng(seed)
    values = rng.poisson(0.7, (rows, width)).astype("f4")
    row, column = np.nonzero(values)
    offsets = torch.from_numpy(np.searchsorted(row, np.arange(rows + 1)))
    keep = rng.permutation(width)[: rng.integers(1, width + 1)] if subset else np.arange(width)
    data = torch.from_numpy(np.append(values[row, column], np.full(padding, 9, "f4")))
    indices = torch.from_numpy(np.append(column, np.zeros(padding, "i8")))
    chosen = torch.from_numpy(keep) if subset else None
    assert (dense_rows(data, indices, offsets, width, chosen).numpy() == values[:, keep]).all()


def test_a_column_outside_of_the_matrix_makes_its_row_nan():
    offsets, columns = torch.tensor([0, 2, 3]), torch.tensor([1, 5, 0])
    for keep in (None, torch.tensor([0])):
        dense = dense_rows(torch.ones(3), columns, offsets, 5, keep)
        assert dense.isnan().any(dim=1).tolist() == [True, False]


def test_a_dense_anndata_and_a_10x_file(tmp_path):
    with open_store(anndata(tmp_path / "x.h5ad", "dense")) as store:
        assert (store.read_rows("X", 0, 30) == COUNTS).all()
        assert store.num_samples == 30
    with h5py.File(tmp_path / "10x.h5", "w") as file:
        csr(file.create_group("matrix"), COUNTS)
        file["matrix"].attrs.clear()
        file["matrix/shape"] = np.array([8, 30], "i4")  # genes, cells
        file["matrix/barcodes"] = [b"AAAC-1"] * 30
        file["matrix/features/id"] = [b"ENSG"] * 8
    with open_store(tmp_path / "10x.h5") as store:
        assert store.num_samples == 30
        assert set(store.fields) == {"matrix/data", "matrix/indices"}


def test_sparse_matrices_are_packed_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    anndata(tmp_path / "x.h5ad")
    run = CliRunner().invoke(app, ["pack", "arrays", "x.h5ad", "out", "--jobs", "1"])
    assert run.exit_code == 0, run.output
    with open_store("out") as store:
        assert store.fields["X_data"].kind == "ragged"
        assert store.read_values("X_data", 4).sum() == COUNTS[4].sum()
    assert "'obsp/distances/data' is not of the samples' own groups" in " ".join(run.output.split())


# -- refused by name ---------------------------------------------------------------------------------


def keras(file):
    file.attrs["layer_names"] = ["dense"]
    file["dense/dense/kernel:0"] = np.zeros((784, 10))
    file["dense/dense/bias:0"] = np.zeros(10)


def keras3(file):
    file["layers/dense/vars/0"] = np.zeros((784, 10))
    file["layers/dense/vars/1"] = np.zeros(10)


def nexus(file):
    file.create_group("entry").attrs["NX_class"] = "NXentry"
    file["entry/data/counts"] = np.zeros((1, 500))
    file["entry/title_number"] = np.zeros(1)
    file["entry/duration"] = np.zeros(1)


def pandas(file):
    group = file.create_group("df")
    group.attrs["pandas_type"] = "frame"
    file["df/axis1"] = np.arange(100)
    file["df/block0_values"] = np.zeros((100, 4))
    file["df/block1_values"] = np.zeros((100, 2), "i8")


FOREIGN = {
    "weights of a Keras model": (keras, "784 rows: dense/dense/kernel:0"),
    "the weights of a Keras": (keras3, "10 rows: layers/dense/vars/1"),
    "a NeXus file": (nexus, "1 rows: entry/data/counts, entry/duration, entry/title_number"),
    "a pandas file": (pandas, "100 rows: df/axis1"),
}


@pytest.mark.parametrize("words", FOREIGN)
def test_files_of_other_programs_are_refused_by_name(words, tmp_path):
    make, listed = FOREIGN[words]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file)
    with pytest.raises(StoreError, match=words) as caught:
        open_store(tmp_path / "x.h5")
    assert listed in caught.value.allowed
    if "pandas" not in words:
        rows = int(re.search(r"--rows (\d+)", caught.value.fix)[1])
        with open_store(tmp_path / "x.h5", rows=rows) as store:
            assert store.num_samples == rows


def test_a_group_of_a_nexus_file_is_opened(tmp_path):
    with h5py.File(tmp_path / "x.nxs", "w") as file:
        nexus(file)
        file["entry/frames/image"] = np.zeros((40, 5, 5))
        file["entry/frames/angle"] = np.zeros(40)
    with open_store(tmp_path / "x.nxs", group="entry/frames") as store:
        assert store.num_samples == 40
        assert set(store.fields) == {"image", "angle"}


def test_a_matlab_file_is_refused_with_a_command_that_turns_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File("x.mat", "w", userblock_size=512) as file:
        file["X"] = np.arange(20.0).reshape(
            4, 5
        )  # five samples of four numbers, as MATLAB writes them
        file["y"] = np.zeros((1, 5))
    with (tmp_path / "x.mat").open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64")
    with pytest.raises(StoreError, match=r"MATLAB 7.3 file, whose arrays .* reverse") as caught:
        open_store("x.mat")
    words = shlex.split(caught.value.fix)
    exec(words[2])
    with np.load("x.npz") as turned:
        assert turned["X"].shape == (5, 4)
        assert turned["y"].shape == (5, 1)


def test_a_matrix_stored_by_columns_is_refused(tmp_path):
    with pytest.raises(StoreError, match="'X' is stored by columns") as caught:
        open_store(anndata(tmp_path / "x.h5ad", "csc_matrix"))
    assert "tocsr" in caught.value.fix


def test_other_matrices_by_columns_are_left_aside(tmp_path):
    with h5py.File(anndata(tmp_path / "x.h5ad"), "r+") as file:
        csr(file.create_group("layers/scaled"), np.eye(30), "csc_matrix")
    with open_store(tmp_path / "x.h5ad") as store:
        assert "stored by columns" in store.left_aside("layers/scaled/data")
        assert "X/data" in store.fields


def test_one_of_several_matrices_is_chosen_by_its_group(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name in ("human", "mouse"):
            csr(file.create_group(name), COUNTS)
            file[f"{name}/shape"] = np.array([8, 30])
    with pytest.raises(StoreError, match="several sparse matrices") as caught:
        open_store(tmp_path / "x.h5")
    assert caught.value.fix.endswith("--group human")
    with open_store(tmp_path / "x.h5", group="mouse") as store:
        assert store.read_values("data", 2).sum() == COUNTS[2].sum()


# -- which dimension counts samples --------------------------------------------------------------------


def write(path, **shapes):
    with h5py.File(path, "w") as file:
        for name, shape in shapes.items():
            file[name.replace("__", "/")] = np.zeros(shape)
    return path


@pytest.mark.parametrize(
    ("shapes", "fields"),
    [
        ({"x": (50, 3), "y": (50,)}, {"x", "y"}),
        ({"x": (5000, 90), "y": (5000,), "mean": (90,), "std": (90,)}, {"x", "y"}),
        ({"features": (50, 3), "y": (50,), "a": (7,), "b": (7,), "c": (7,)}, {"features", "y"}),
        ({"features": (1, 3)}, {"features"}),
    ],
)
def test_what_is_clear_is_opened(shapes, fields, tmp_path):
    with open_store(write(tmp_path / "x.h5", **shapes)) as store:
        assert set(store.fields) == fields


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": (784, 5000), "y": (5000,)},  # turned
        {"x": (50, 3), "bins": (11,)},
        {"a": (1, 50), "b": (1,), "c": (1, 2, 3)},
        {"x": (1, 50)},
        {"train__x": (12, 2), "train__y": (12,), "test__x": (5, 2), "test__y": (5,)},
    ],
)
def test_what_is_not_clear_is_refused_and_the_advice_opens_it(shapes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.h5", **shapes)
    with pytest.raises(StoreError) as caught:
        open_store("x.h5")
    for shape in shapes.values():
        assert f"{shape[0]:,} rows: " in caught.value.allowed
    ways = caught.value.fix.split(", or ")
    for python, shell in zip(ways[::2], ways[1::2], strict=True):
        with eval(f"open_store('x.h5', {python})") as store:
            assert len(store) in {shape[0] for shape in shapes.values()}
        assert CliRunner().invoke(app, shlex.split(shell)[1:]).exit_code in (0, 3)
    assert ("--group test" in caught.value.fix) == ("test__x" in shapes)


@given(
    lengths=st.dictionaries(st.text("abc/", min_size=1), st.integers(0, 5), max_size=6),
    widths=st.lists(st.integers(1, 9_999), min_size=6, max_size=6),
    rows=st.none() | st.integers(0, 5),
    fields=st.lists(st.text("abc/", min_size=1), max_size=2),
)
def test_what_is_chosen_always_has_one_length(lengths, widths, rows, fields, tmp_path_factory):
    sizes = {name: n * width for (name, n), width in zip(lengths.items(), widths, strict=False)}
    chosen = Selection(None, tuple(fields), rows)
    path = tmp_path_factory.getbasetemp() / "x.h5"
    try:
        taken = choose(path, lengths, sizes, chosen)
    except StoreError:
        assert (
            fields or rows is not None or len(set(lengths.values())) != 1 or 1 in lengths.values()
        )
        return
    assert taken
    assert len({lengths[name] for name in taken}) == 1
    if fields:
        assert taken == list(dict.fromkeys(fields))
    if rows is not None:
        assert lengths[taken[0]] == rows
    elif not fields:
        assert lengths[taken[0]] != 1, "never opened as one sample"


def test_chosen_fields_are_all_that_is_opened(tmp_path):
    path = write(tmp_path / "x.h5", x=(50, 3), y=(50,), bins=(11,), deep__z=(50,))
    with open_store(path, fields=["x", "deep/z"]) as store:
        assert list(store.fields) == ["x", "deep/z"]
        assert store.left_aside("y") == "dataset 'y' was not chosen: left aside"
        assert list(pickle.loads(pickle.dumps(store)).fields) == ["x", "deep/z"]
    with open_store(path, group="deep", fields=["z"]) as store:
        assert list(store.fields) == ["z"]
    with pytest.raises(StoreError, match=r"different numbers of rows: {'x': 50, 'bins': 11}"):
        open_store(path, fields=["x", "bins"])
    with pytest.raises(StoreError, match=r"(?s)no numeric array 'bin'.*--fields bins"):
        open_store(path, fields=["bin"])
    with pytest.raises(StoreError, match=r"no array has 3 rows"):
        open_store(path, rows=3)


def test_a_packed_store_has_no_groups_to_choose(tmp_path):
    (tmp_path / "s").mkdir()
    with pytest.raises(InputError, match=r"rows=3 with .*s"):
        open_store(tmp_path / "s", rows=3)


# -- fill values, and archives -------------------------------------------------------------------------


@pytest.mark.parametrize("written", [12, 6])
def test_an_undefined_fill_value_is_valid(written, tmp_path):
    """As netCDF writes it in its no-fill mode; h5py cannot, so one byte of the header is changed."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        data = file.create_dataset("features", (12,), "f4", chunks=(6,), fillvalue=7.0)
        data[:written] = np.arange(written)
    raw = path.read_bytes()
    place = raw.index(b"\x01\x04\0\0\0" + np.float32(7).tobytes())
    path.write_bytes(raw[:place] + b"\0" + raw[place + 1 :])
    with h5py.File(path) as file, pytest.raises(RuntimeError):
        file["features"].fillvalue  # noqa: B018
    with open_store(path) as store:
        assert store.read_rows("features", 0, written).tolist() == list(range(written))
        assert store.read_rows("features", 0, 12)[written:].tolist() == [0] * (12 - written)
        assert ("no fill value, and are read as 0" in "".join(store.notes)) == (written < 12)


@pytest.fixture
def archive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrays = {"train/x": np.ones((8, 2)), "train/y": np.ones(8), "val/x": np.ones((3, 2))}
    np.savez("x.npz", **arrays, names=np.array(["a", None]), version=np.array(3))
    return tmp_path / "x.npz"


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--rows", "8"], {"train_x", "train_y"}),
        (["--fields", "val/x"], {"val_x"}),
        (["--group", "train"], {"x", "y"}),
        (["--group", "train", "--fields", "y"], {"y"}),
    ],
)
def test_arrays_of_an_archive_are_chosen(options, fields, archive):
    run = CliRunner().invoke(app, ["pack", "arrays", "x.npz", "out", "--jobs", "1", *options])
    assert run.exit_code == 0, run.output
    with open_store("out") as store:
        assert set(store.fields) == fields
    assert CliRunner().invoke(app, ["inspect", "x.npz", *options]).exit_code in (0, 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "x.npz", "--fields", "names"], "no numeric array 'names'"),
        (["inspect", "x.npz", "--rows", "9"], "no array has 9 rows"),
        (["inspect", "x.npz", "--group", "trian"], "--group train"),
        (["pack", "arrays", "x.npz", "x.npz", "out", "--rows", "8"], "with 2 files"),
        (["inspect", "t.csv", "--rows", "8"], "with the table"),
    ],
)
def test_a_wrong_choice_is_named(words, said, archive):
    (archive.parent / "t.csv").write_text("a,b\n1,2\n")
    run = CliRunner().invoke(app, words)
    assert isinstance(run.exception, StokerError)
    assert said in str(run.exception)
