"""`pack arrays` and `pack table`: what goes in comes out, and what is wrong is named."""

from __future__ import annotations

import gzip
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

import stoker
from stoker.errors import InputError, QualityError, SourceError
from stoker.packing import PackOptions, pack
from stoker.sources.arrays import ArraysSource
from stoker.sources.tables import TableSource
from stoker.store.reader import open_store

ONE = PackOptions(jobs=1)


@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 5),
    part_bytes=st.integers(1, 400),
    dtype=st.sampled_from(["f4", ">f4", "i8", "u1", "f2"]),
    kind=st.sampled_from(["npy", "npz", "h5"]),
)
def test_arrays_of_any_kind_and_part_size_round_trip(
    rows, width, part_bytes, dtype, kind, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("a")
    rng = np.random.default_rng(0)
    features = rng.integers(0, 100, (rows, width)).astype(dtype)
    targets = rng.integers(0, 3, rows)
    if kind == "npy":
        paths = (folder / "features.npy", folder / "targets.npy")
        np.save(paths[0], features)
        np.save(paths[1], targets)
    elif kind == "npz":
        paths = (folder / "both.npz",)
        np.savez(paths[0], features=features, targets=targets)
    else:
        paths = (folder / "both.h5",)
        with h5py.File(paths[0], "w") as file:
            file["features"], file["targets"] = features, targets
    pack(ArraysSource(paths, part_bytes=part_bytes), folder / "s", ONE)
    with open_store(folder / "s") as store:
        assert (store.read_rows("features", 0, rows) == features).all()
        assert (store.read_rows("targets", 0, rows) == targets).all()


def test_arrays_that_do_not_fit_together_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))
    np.save(tmp_path / "b.npy", np.zeros(4))
    with pytest.raises(SourceError, match="different numbers of rows"):
        pack(ArraysSource((tmp_path / "a.npy", tmp_path / "b.npy")), tmp_path / "s", ONE)
    with pytest.raises(SourceError, match="two arrays are called 'a'"):
        pack(ArraysSource((tmp_path / "a.npy", tmp_path / "a.npy")), tmp_path / "s", ONE)
    with pytest.raises(SourceError, match="2 names were given for 1 arrays"):
        pack(ArraysSource((tmp_path / "a.npy",), ("x", "y")), tmp_path / "s", ONE)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npy", b"not numpy", "cannot be read as a numpy file"),
        ("a.npz", b"not a zip", "cannot be read as a numpy file"),
        ("a.txt", b"", "has the ending '.txt'"),
        ("a.h5", b"zzz", "cannot be opened as HDF5"),
    ],
)
def test_files_that_are_not_arrays_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Exception, match=message):
        pack(ArraysSource((tmp_path / name,)), tmp_path / "s", ONE)


def test_pickled_arrays_are_never_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{"evil": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(SourceError, match="holds Python objects, as pickles"):
        pack(ArraysSource((tmp_path / "a.npy",)), tmp_path / "s", ONE)


def test_the_advice_for_arrays_of_objects_works(tmp_path, monkeypatch):
    """Rows of different lengths, as numpy.save keeps them."""
    monkeypatch.chdir(tmp_path)
    np.save("own.npy", np.array([np.zeros(3), np.zeros(5)], dtype=object), allow_pickle=True)
    with pytest.raises(SourceError) as refused:
        pack(ArraysSource((Path("own.npy"),)), tmp_path / "s", ONE)
    made = eval(refused.value.fix, {"stoker": stoker, "numpy": np})
    with open_store(made.path) as store:
        assert store.num_samples == 2


# -- tables --------------------------------------------------------------------------------


@given(
    data=st.data(),
    rows=st.integers(1, 50),
    part_rows=st.integers(1, 60),
    kind=st.sampled_from(["csv", "csv.gz", "parquet"]),
)
def test_tables_round_trip_in_any_format_and_part_size(
    data, rows, part_rows, kind, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("t")
    values = np.array(
        data.draw(
            st.lists(
                st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
                min_size=rows,
                max_size=rows,
            )
        ),
        "f4",
    )
    labels = data.draw(
        st.lists(st.sampled_from(["cat", "dog", 'x, "y"\nz']), min_size=rows, max_size=rows)
    )
    path = folder / f"t.{kind}"
    if kind == "parquet":
        table = pa.table(
            {"a": values[:, 0], "b": values[:, 1], "label": labels, "c c": values[:, 2]}
        )
        parquet.write_table(table, path)
    else:
        quoted = ['"' + label.replace('"', '""') + '"' for label in labels]
        lines = [
            f"{a!r},{b!r},{q},{c!r}"
            for (a, b, c), q in zip(values.astype(float).tolist(), quoted, strict=True)
        ]
        text = "a,b,label,c c\n" + "\n".join(lines) + "\n"
        path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    pack(TableSource((path,), "label", part_rows=part_rows), folder / "s", ONE)
    with open_store(folder / "s") as store:
        assert store.fields["features"].columns == ["a", "b", "c c"]
        assert (store.read_rows("features", 0, rows) == values).all()
        classes = store.manifest.attributes["classes"]
        assert [classes[number] for number in store.read_rows("targets", 0, rows)] == [
            label.strip() for label in labels
        ]


def test_the_real_flow_table_stops_at_the_gate_and_passes_when_repaired(shared_data, tmp_path):
    path = shared_data / "tabular" / "cicids2017_sample.csv"
    with pytest.raises(QualityError, match=r"10 of 6,311 values are infinite"):
        pack(TableSource((path,), "Label"), tmp_path / "s", ONE)
    options = PackOptions(jobs=1, repairs=("clip", "fill:median"))
    result = pack(TableSource((path,), "Label"), tmp_path / "s", options)
    assert result.manifest.num_samples == 6311
    with open_store(tmp_path / "s") as store:
        assert np.isfinite(store.read_rows("features", 0, 6311)).all()


def test_bad_cells_and_bad_lines_are_refused_with_their_place(tmp_path):
    rows = [f"{i},{i * 2}" for i in range(10)]
    rows[3] = "3,six"
    rows[7] = "7,14,21"
    (tmp_path / "t.csv").write_text("a,b\n" + "\n".join(rows) + "\n")
    source = TableSource((tmp_path / "t.csv",), part_rows=8)
    with pytest.raises(QualityError, match="3 cells instead of 2"):
        pack(source, tmp_path / "s", ONE)
    result = pack(source, tmp_path / "s", PackOptions(jobs=1, on_bad="quarantine", bad_budget="5"))
    reasons = {(refusal.unit, refusal.line, refusal.reason) for refusal in result.refused}
    assert reasons == {
        ("row", 3, "column 'b' holds 'six', not a number"),
        ("line", 9, "3 cells instead of 2"),
    }
    with open_store(tmp_path / "s") as store:
        assert store.read_rows("features", 0, 8)[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 8, 9]


def test_blanks_become_nan_for_the_gate_and_huge_text_becomes_inf(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,\n2,NA\n3, 5 \n4,1e300\n")
    with pytest.raises(QualityError, match=r"(?s)inf features\['b'\].*nan features\['b'\]: 2 of 4"):
        pack(TableSource((tmp_path / "t.csv",)), tmp_path / "s", ONE)


def test_the_split_is_by_row_order_across_files(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.csv").write_text("a\n" + "\n".join(str(i) for i in range(50)) + "\n")
    source = TableSource(
        (tmp_path / "0.csv", tmp_path / "1.csv"), split=(0.8, 0.1, 0.1), part_rows=30
    )
    pack(source, tmp_path / "s", ONE)
    with open_store(tmp_path / "s") as store:
        assert store.read_rows("split", 0, 100).tolist() == [0] * 80 + [1] * 10 + [2] * 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: TableSource((folder / "t.csv",), "zzz"), "no column 'zzz'"),
        (
            lambda folder: TableSource((folder / "t.csv",), drop=("a", "b")),
            "no feature columns left",
        ),
        (lambda folder: TableSource((folder / "none.csv",)), "does not exist"),
        (lambda folder: TableSource((folder / "twice.csv",)), "two columns called 'a'"),
        (lambda folder: TableSource((folder / "t.csv", folder / "other.csv")), "other columns"),
        (lambda folder: TableSource((folder / "empty.csv",)), "cannot be read as a table"),
        (lambda folder: TableSource(()), "no table files"),
    ],
)
def test_wrong_tables_and_options_are_named(tmp_path, make, message):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    (tmp_path / "other.csv").write_text("a,c\n1,2\n")
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(SourceError, match=message):
        pack(make(tmp_path), tmp_path / "s", ONE)


def test_shares_that_do_not_add_up_are_refused():
    with pytest.raises(InputError, match="split shares"):
        TableSource((), split=(0.5, 0.1))
