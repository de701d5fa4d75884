"""How tables are read: any layout gives the same numbers, noise gives errors of ours, and nothing is lost."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.errors import QualityError, SourceError, StokerError
from stoker.packing import PackOptions, pack
from stoker.packing.workers import unguarded
from stoker.sources.contract import PartContext
from stoker.sources.tables import TableSource, TextOptions, parse_dtypes
from stoker.sources.tables.columns import Column, encode, find_kind, needs_float64
from stoker.sources.tables.layout import find_layout, parse_number
from stoker.store.reader import open_store

ONE = PackOptions(jobs=1)
WORDS = st.text("abcdefgh ,;\t|\"'éß", min_size=1, max_size=8).filter(
    lambda text: text.strip() == text and not text.startswith("'")
)


def shown(value: float, decimal: str) -> str:
    return repr(value).replace(".", decimal)


@given(
    values=st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.floats(-10, 10, width=32)), min_size=3, max_size=30),
    names=st.lists(WORDS, min_size=2, max_size=2, unique=True),
    sep=st.sampled_from([",", ";", "\t", "|"]),
    comma=st.booleans(),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252"]),
    end=st.sampled_from(["\n", "\r\n"]),
    title=st.sampled_from(["", "made by hand\n"]),
)  # fmt: skip
def test_any_layout_gives_the_same_numbers(values, names, sep, comma, encoding, end, title):
    """With a text column between the numbers, so that the separator is not the only thing that repeats."""
    decimal = "," if comma else "."
    sink = io.StringIO(newline="")
    writer = csv.writer(sink, delimiter=sep, lineterminator=end, quoting=csv.QUOTE_MINIMAL)
    writer.writerow([f"x {names[0]}", "kind", f"y {names[1]}"])
    for number, (one, two) in enumerate(values):
        writer.writerow([shown(one, decimal), ("red", "blue")[number % 2], shown(two, decimal)])
    data = (title + sink.getvalue()).encode(encoding, "replace")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_bytes(data)
        # The user's word on what a short file may not show: exponents have no decimal sign.
        text = TextOptions(sep=sep, decimal=decimal)
        source = TableSource((path,), text=text)
        preparation = source.prepare(Path(folder))
        built = source.build(preparation.parts[0], PartContext(Path(folder), unguarded, {}))
        found = built.fields["features"].values
        assert not built.refused
        assert preparation.found == len(values) + bool(title)
    assert (found[:, 0] == np.array([one for one, _ in values], "f4")).all()
    assert (found[:, -1] == np.array([two for _, two in values], "f4")).all()


@given(
    sep=st.sampled_from([",", ";", "\t", "|", " "]),
    width=st.integers(2, 6),
    rows=st.integers(4, 20),
    has_header=st.booleans(),
    comma=st.booleans(),
)
def test_the_layout_of_numbers_is_found(sep, width, rows, has_header, comma):
    comma = comma and sep not in ", "  # "1,5 2,5" may be three cells or two: it is asked about
    rng = np.random.default_rng(width * rows)
    table = rng.normal(size=(rows, width)).round(3) + 0.0625
    lines = [
        sep.join(f"{cell:.4f}".replace(".", "," if comma else ".") for cell in row) for row in table
    ]
    lines = [sep.join(f"name{i}" for i in range(width)), *lines] if has_header else lines
    layout = find_layout("\n".join(lines).encode(), Path("t.csv"), TextOptions(), is_whole=True)
    assert (layout.sep, layout.decimal) == (sep, "," if comma else ".")
    assert layout.has_header == has_header
    assert layout.skip == has_header
    assert len(layout.names) == width


@given(data=st.binary(max_size=400))
@example(b"a,b\n1,2\n\xff\xfe")
@example(b'"\n')
@example(b"sep=;\n")
@example(b"\n\n,\n")
def test_noise_gives_a_table_or_an_error_of_ours(data):
    """No exception of Python's or Arrow's, and every line that is a row is accounted for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_bytes(data)
        options = PackOptions(jobs=1, on_bad="quarantine", bad_budget="100%")
        try:
            result = pack(TableSource((path,)), Path(folder) / "s", options)
        except StokerError:
            return
        (account,) = result.manifest.attributes["accounts"]
        assert account["packed"] == result.manifest.num_samples > 0


@given(
    number=st.one_of(
        st.integers(-(10**12), 10**12), st.floats(-1e9, 1e9).map(lambda x: round(x, 3))
    ),
    decimal=st.sampled_from(".,"),
)
def test_numbers_are_read_with_and_without_groups(number, decimal):
    other = "," if decimal == "." else "."
    grouped = f"{number:,}".replace(",", "\0").replace(".", decimal).replace("\0", other)
    assert parse_number(grouped, decimal) == number
    for sign in "'\u2019\u00a0\u202f":
        assert parse_number(grouped.replace(other, sign), decimal) == number
    assert parse_number(f" {number!r} ".replace(".", decimal), decimal) == number


@pytest.mark.parametrize(
    "text", ["1,2,3", "1.2.3", "12,34", "--1", "1 2", "0x10", "1_000", "", "+"]
)
def test_what_is_no_number_is_none(text):
    assert parse_number(text, ".") is None


@given(
    cells=st.lists(st.sampled_from(["a", "b", "c", "", "NA", " a "]), min_size=1, max_size=40),
    seen=st.integers(1, 3),
)
def test_texts_are_encoded_by_what_training_saw(cells, seen):
    values = ("a", "b", "c")[:seen]
    for kind in ("one-hot", "codes"):
        made = Column("k", kind, values)
        encoded, unseen = encode(pa.array(cells), made, ".", {})
        assert encoded.shape == (len(cells), len(made.outputs))
        for row, cell in enumerate(cells):
            text = cell.strip()
            place = values.index(text) if text in values else None
            wanted = (
                [float(place == i) for i in range(seen)]
                if kind == "one-hot"
                else [0 if place is None else place + 1]
            )
            assert encoded[row].tolist() == wanted
            assert (row in unseen) == (place is None and text not in ("", "NA"))
        assert Column.from_json(made.to_json()) == made


@given(values=st.lists(st.integers(-(2**53) + 1, 2**53 - 1), min_size=1, max_size=20))
def test_whole_numbers_are_kept_exactly(values):
    array = np.array(values, np.float64)
    if not needs_float64(array):
        assert array.astype(np.float32).astype(np.float64).tolist() == array.tolist()
    texts = pa.array([str(value) for value in values])
    made = find_kind("k", texts, ".", "number")
    if isinstance(made, Column):
        dtype = np.float64 if made.is_wide else np.float32
        encoded = encode(texts, made, ".", {})[0][:, 0].astype(dtype)
        assert [int(value) for value in encoded] == values


@given(
    ns=st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=10),
    unit=st.sampled_from(["s", "ms", "us", "ns"]),
)
def test_timestamps_of_every_unit_are_taken_apart_exactly(ns, unit):
    per = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]
    column = pa.array([value // per for value in ns], pa.timestamp(unit))
    made = find_kind("t", column, ".", None)
    faults: dict = {}
    values = dict(zip(made.outputs, encode(column, made, ".", faults)[0].T, strict=True))
    assert not faults
    for row, value in enumerate(ns):
        whole = value // per * per
        day = np.datetime64(whole, "ns").astype("M8[D]")
        assert values["t_days"][row] == day.astype(int)
        assert values["t_month"][row] == int(str(day).split("-")[-2])
        if made.has_clock:
            assert values["t_seconds"][row] == (whole % (86_400 * 10**9)) / 10**9


def test_texts_come_from_the_training_rows_and_new_ones_are_counted(tmp_path):
    rows = [f"{'ab'[n % 2] if n < 80 else 'c'},{n}.5" for n in range(100)]
    (tmp_path / "t.csv").write_text("k,x\n" + "\n".join(rows) + "\n")
    source = TableSource((tmp_path / "t.csv",), split=(0.8, 0.1, 0.1), part_rows=30)
    pack(source, tmp_path / "s", ONE)
    with open_store(tmp_path / "s") as store:
        assert store.fields["features"].columns == ["k=a", "k=b", "x"]
        assert store.manifest.attributes["table"]["unseen"] == {"k": 20}
        assert store.read_rows("features", 80, 100)[:, :2].sum() == 0


def test_whole_numbers_that_grow_later_make_the_table_wide(tmp_path):
    """The sample of the first part shows small ones only."""
    rows = [f"{n % 7 if n < 90 else 16_777_217 + n},{n}.5" for n in range(100)]
    (tmp_path / "t.csv").write_text("k,x\n" + "\n".join(rows) + "\n")
    source = TableSource((tmp_path / "t.csv",), part_rows=30, dtypes={"x": "number"})
    with pytest.raises(QualityError, match="extreme"):  # and the gate sees them as they are
        pack(source, tmp_path / "s", ONE)
    preparation = source.prepare(tmp_path)
    built = [source.build(part, PartContext(tmp_path, unguarded, {})) for part in preparation.parts]
    values = np.concatenate([each.fields["features"].values for each in built])
    assert values.dtype == np.float64
    assert values[-1, 0] == 16_777_217 + 99


def test_kinds_that_are_not_known_are_refused():
    assert parse_dtypes(["a=b=codes", " x =bool"]) == {"a=b": "codes", "x": "bool"}
    for wrong in ("a", "=bool", "a=int"):
        with pytest.raises(StokerError, match="--dtype is"):
            parse_dtypes([wrong])


def test_files_that_lack_columns_are_all_named(tmp_path):
    for number, header in enumerate(("a,b", "b,a", "a,c", "a")):
        (tmp_path / f"{number}.csv").write_text(
            f"{header}\n" + "1,2\n3,5\n"[:: 1 if "," in header else 3]
        )
    paths = tuple(tmp_path / f"{number}.csv" for number in range(4))
    with pytest.raises(
        SourceError,
        match=r"(?s)2 files have other columns.*2.csv lacks 'b' and has 'c'.*3.csv lacks 'b'",
    ):
        pack(TableSource(paths), tmp_path / "s", ONE)
    result = pack(TableSource(paths[:2]), tmp_path / "s", ONE)
    with open_store(result.path) as store:
        assert store.read_rows("features", 0, 4).tolist() == [[1, 2], [3, 5], [2, 1], [5, 3]]


@pytest.mark.parametrize("text", ["a;b\n1,5;2\n3,5;\n", "https://example.org\na,b\n1.5,2\n3.5,\n"])
def test_inspect_reads_what_pack_reads_and_has_its_options(tmp_path, text):
    from typer.testing import CliRunner

    from stoker.cli.main import app

    path = tmp_path / "t.csv"
    path.write_text(text)
    found = CliRunner().invoke(app, ["inspect", str(path)])
    assert found.exit_code == 3, found.output
    assert "rows: 2" in found.output
    assert "1 of 2 values are NaN" in found.output
    for options in (
        ["--drop", "b"],
        ["--keep", "a"],
        ["--missing", "drop"],
        ["--dtype", "b=category"],
    ):
        assert CliRunner().invoke(app, ["inspect", str(path), *options]).exit_code == 0
    folder = CliRunner().invoke(app, ["inspect", str(tmp_path), "--drop", "b"])
    assert "rows: 2" in folder.output


def test_columns_of_parquet_that_are_dropped_are_not_decoded(tmp_path):
    from pyarrow import parquet

    table = pa.table({" a ": [1.5, 2.5], "s": [{"x": 1}, {"x": 2}], "b": [3.5, 4.5]})
    parquet.write_table(table, tmp_path / "t.parquet")
    pack(TableSource((tmp_path / "t.parquet",), drop=("s",)), tmp_path / "s", ONE)
    with open_store(tmp_path / "s") as store:
        assert store.fields["features"].columns == ["a", "b"]
        assert store.read_rows("features", 0, 2).tolist() == [[1.5, 3.5], [2.5, 4.5]]


def test_a_repair_names_a_column_as_the_file_writes_it(tmp_path):
    (tmp_path / "t.csv").write_text("x, Flow Bytes/s\n1.5,2.5\n2.5,\n3.5,4.5\n")
    options = PackOptions(jobs=1, repairs=("fill:0@ Flow Bytes/s",))
    result = pack(TableSource((tmp_path / "t.csv",)), tmp_path / "s", options)
    assert result.manifest.repairs["features"][0]["columns"] == ["Flow Bytes/s"]
