"""Files that others write: read, or named with what to type; never taken for a table of text."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import lzma
import shlex
import struct
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import orc, parquet

from stoker.errors import SourceError, StokerError, StoreError
from stoker.sources.contract import PartContext
from stoker.sources.tables import TableSource, survey
from stoker.sources.tables.reading import batches
from stoker.store.foreign import identify_file
from stoker.store.reader import open_store

ROWS = {"a": [1.5, 2.5, 4.0], "b": ["x", "y", "x"]}


def table_of(path, scratch):
    """Return the columns of a packed table by name, and the notes."""
    source = TableSource((path,), missing="keep")
    scratch.mkdir(exist_ok=True)
    preparation = source.prepare(scratch)
    built = [
        source.build(part, PartContext(scratch, lambda _: None, {})) for part in preparation.parts
    ]
    assert not preparation.refused
    made = [part.fields["features"] for part in built]
    values = np.concatenate([each.values for each in made])
    return dict(zip(made[0].columns, values.T, strict=True)), [*built[0].refused]


def write(path, content):
    path.write_bytes(content)
    return path


def tar_of(path, mode):
    with tarfile.open(path, mode) as archive:
        archive.addfile(tarfile.TarInfo("a.csv"), io.BytesIO())
    return path


def zip_of(path, member):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, "")
    return path


@pytest.mark.parametrize(
    ("make", "what", "typed"),
    [
        (lambda d: tar_of(d / "x.tar", "w"), "a tar archive", "tar --extract --file"),
        (lambda d: tar_of(d / "x.csv.gz", "w:gz"), "a tar archive", "tar --extract --file"),
        (lambda d: zip_of(d / "x.csv.zip", "x.csv"), "a zip archive", "unzip"),
        (lambda d: zip_of(d / "x.xlsx", "xl/workbook.xml"), "an Excel workbook", "read_excel"),
        (lambda d: write(d / "x.csv.xz", lzma.compress(b"a\n1\n")), "compressed by xz", "xz --dec"),
        (lambda d: write(d / "x.xls", b"\xd0\xcf\x11\xe0" + bytes(99)), "an Excel workbook", "read_excel"),
        (lambda d: write(d / "x.wav", b"RIFF\1\0\0\0WAVE" + bytes(99)), "a sound", "wavfile.read"),
        (lambda d: write(d / "x.json", b'[{"a": 1}, {"a": 2}]'), "JSON", "read_json"),
        (lambda d: write(d / "x.txt", b"1 3:0.5 9:1\n-1 qid:2 4:2e3 # no\n"), "in the format of LIBSVM", "svmlight"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_named_with_what_to_type(tmp_path, make, what, typed):
    path = make(tmp_path)
    with pytest.raises(SourceError, match=f"is {what}") as error:
        table_of(path, tmp_path / "scratch")
    assert typed in error.value.fix


def test_the_advice_for_what_arrow_reads_works_as_typed(tmp_path):
    path = tmp_path / "rows.orc"
    orc.write_table(pa.table(ROWS), path)
    for call in (lambda: table_of(path, tmp_path / "scratch"), lambda: open_store(path)):
        with pytest.raises(StokerError) as error:
            call()
        first, second = error.value.fix.split("; stoker ")
        words = shlex.split(f"{first}")
        subprocess.run([sys.executable, *words[1:]], check=True)
        made = table_of(tmp_path / shlex.split(second)[2], tmp_path / "scratch")[0]
        assert made["a"].tolist() == ROWS["a"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz"])
def test_lines_of_json_are_read_as_a_table(tmp_path, name):
    rows = zip(*ROWS.values(), strict=True)
    text = "".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in rows) + '{"b": "x"}\n'
    path = write(tmp_path / name, gzip.compress(text.encode()) if "gz" in name else text.encode())
    made = table_of(path, tmp_path / "scratch")[0]
    assert made["a"][:-1].tolist() == ROWS["a"]
    assert np.isnan(made["a"][-1])
    if "gz" not in name:
        with pytest.raises(StoreError) as error:
            open_store(path)
        assert error.value.fix == f"stoker pack table {path} OUT"


def test_a_nested_column_is_refused_by_the_schema(tmp_path, monkeypatch):
    """With what else is wrong, after one batch of the other columns: a large file is not decoded for it."""
    count = 200_000
    columns = {
        "a": np.arange(count) / 7,
        "b": pa.array([[1]] * count),
        "n": [f"x{n}" for n in range(count)],
    }
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    seen = []
    monkeypatch.setattr(survey, "batches", lambda *told: seen.append(told[2]) or batches(*told))
    monkeypatch.setattr(TableSource, "_parts_of", lambda *_: pytest.fail("the file was decoded"))
    with pytest.raises(SourceError, match="2 columns cannot be packed") as error:
        table_of(tmp_path / "t.parquet", tmp_path / "scratch")
    assert error.value.fix == "--drop b --drop n"
    assert seen == [["a", "n"]]
    with pytest.raises(SourceError, match="'b' holds list"):
        TableSource((tmp_path / "t.parquet",), "b", keep=("a",)).prepare(tmp_path / "scratch")


def test_a_table_without_a_usable_column_is_not_told_to_drop_all(tmp_path):
    columns = {"a": [[1], [2, 3]] * 9, "b": [{"c": 1}] * 18, "n": [f"x{n}" for n in range(18)]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match="has no column that can be packed") as error:
        table_of(tmp_path / "t.parquet", tmp_path / "scratch")
    assert "--drop" not in error.value.fix
    assert len(error.value.details) == 3


def test_lines_of_json_that_are_damaged_or_nested_are_named(tmp_path):
    late = write(tmp_path / "late.jsonl", b'{"a": 1}\n' * 9 + b'{"a": "x"}\n')
    with pytest.raises(
        SourceError, match=r"late\.jsonl cannot be read as a table: .*changed from number"
    ):
        table_of(late, tmp_path / "scratch")
    nested = write(tmp_path / "n.jsonl", b'{"a": 1, "b": [1, 2], "c": {"d": 1}}\n' * 9)
    with pytest.raises(SourceError, match="2 columns cannot be packed") as error:
        table_of(nested, tmp_path / "scratch")
    assert error.value.fix == "--drop b --drop c"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [("notes.md", b"# hello\n", "a text"), ("x.bin2", b"\0\1\2\3", "of an unknown kind")],
)
def test_what_is_no_hdf5_is_not_called_damaged(tmp_path, name, content, what):
    with pytest.raises(StoreError, match=f"is {what}"):
        open_store(write(tmp_path / name, content))


@pytest.mark.parametrize("order", "<>")
def test_a_matlab_file_of_version_4_is_named(tmp_path, order):
    """It has no signature, and was called a damaged HDF5 file."""
    head = struct.pack(f"{order}5i", 1000 if order == ">" else 0, 3, 2, 0, 2) + b"x\0" + bytes(48)
    with pytest.raises(StoreError, match=r"MATLAB file of before 7\.3") as error:
        open_store(write(tmp_path / "x.mat", head))
    assert "scipy.io.loadmat" in error.value.fix


def test_a_damaged_hdf5_file_is_still_called_so(tmp_path):
    with pytest.raises(StokerError, match="cannot be opened as HDF5"):
        open_store(write(tmp_path / "x.h5", b"\x89HDF\r\n\x1a\n" + bytes(99)))


def test_a_table_of_text_is_a_text(tmp_path):
    assert identify_file(write(tmp_path / "x.csv", b"a,b\n1,2\n")).what == "a text"


def test_a_stream_of_arrow_is_read_as_a_file_of_arrow(tmp_path):
    table = pa.table(ROWS)
    with (
        pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    assert table_of(tmp_path / "data.arrow", tmp_path / "s")[0]["a"].tolist() == ROWS["a"]


def test_the_first_version_of_feather_is_read(tmp_path):
    from pyarrow import feather

    with pytest.warns(DeprecationWarning, match="Feather V1"):
        feather.write_feather(pa.table(ROWS), str(tmp_path / "x.feather"), version=1)
    assert table_of(tmp_path / "x.feather", tmp_path / "s")[0]["a"].tolist() == ROWS["a"]


ARFF = """% made by hand
@RELATION flowers
@attribute 'petal length' REAL
@ATTRIBUTE kind {x, y}

@DATA
% rows
1.5,x
?,y

4.0,x
%
% the end
"""


def test_arff_is_read_with_its_names(tmp_path):
    made, refused = table_of(write(tmp_path / "x.arff", ARFF.encode()), tmp_path / "s")
    assert np.array_equal(made["petal length"], [1.5, np.nan, 4.0], equal_nan=True)
    assert made["kind=y"].tolist() == [0, 1, 0]
    assert not refused


@pytest.mark.parametrize(
    ("rows", "said", "typed"),
    [
        ("1,'x, y'\n", "single quotes", "sed"),
        ("{0 1.5, 1 x}\n", "sparse", "CSV"),
        ("", "not found", "CSV"),
    ],
)
def test_arff_that_is_no_table_of_cells_is_refused(tmp_path, rows, said, typed):
    text = ARFF.partition("% rows")[0] + rows
    with pytest.raises(SourceError, match=said) as error:
        table_of(write(tmp_path / "x.arff", text.encode()), tmp_path / "s")
    assert typed in error.value.fix


def test_the_advice_for_single_quotes_in_arff_works_as_typed(tmp_path):
    text = ARFF.partition("% rows")[0] + "1,'x, y'\n2,'z'\n"
    with pytest.raises(SourceError) as error:
        table_of(write(tmp_path / "x.arff", text.encode()), tmp_path / "s")
    subprocess.run(["sh", "-c", error.value.fix], check=True)
    assert len(table_of(tmp_path / "x-quoted.arff", tmp_path / "s")[0]) > 0


@pytest.mark.parametrize(("encoding", "text"), [("shift_jis", "サウロン"), ("cp1251", "Москва")])
def test_text_that_is_not_western_asks_for_its_encoding(tmp_path, encoding, text):
    path = write(tmp_path / "x.csv", f"a,b\n1,{text}\n2,{text}\n3,{text}\n".encode(encoding))
    with pytest.raises(SourceError, match="neither UTF-8 nor Western") as error:
        table_of(path, tmp_path / "s")
    assert encoding in f"{error.value}"
    assert error.value.fix.startswith("--encoding ")


def test_western_text_is_still_found(tmp_path):
    path = write(tmp_path / "x.csv", "a,stadt\n1,Köln am Rhein\n2,Köln am Rhein\n".encode("cp1252"))
    assert table_of(path, tmp_path / "s")[0]["stadt=Köln am Rhein"].tolist() == [1, 1]


@pytest.mark.parametrize("word", [".", "#N/A", "<NA>"])
def test_what_others_write_for_a_missing_number_is_missing(tmp_path, word):
    cells = [word if n % 3 else str(n) for n in range(30)]
    path = write(tmp_path / "x.csv", "\n".join(["a,b", *(f"{cell},1" for cell in cells)]).encode())
    made = table_of(path, tmp_path / "s")[0]["a"]
    assert np.isnan(made).sum() == 20
    assert np.nansum(made) == sum(range(0, 30, 3))


def test_the_year_9999_of_spark_is_refused_and_not_another_year(tmp_path):
    days = [datetime.datetime(2020, 1, day) for day in range(1, 10)]  # noqa: DTZ001
    times = pa.array([*days, datetime.datetime(9999, 12, 31)], pa.timestamp("us"))  # noqa: DTZ001
    table = pa.table({"t": times, "x": range(10)})
    parquet.write_table(table, tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    made, refused = table_of(tmp_path / "x.parquet", tmp_path / "s")
    assert made["t_days"].tolist() == [18262 + day for day in range(9)]
    assert "'9999-12-31 00:00:00.000000', no date between 1700 and 2199" in refused[0].reason


def test_a_time_that_python_has_no_year_for_is_refused(tmp_path):
    times = pa.array([*range(9), 2**62], pa.timestamp("us"))
    parquet.write_table(pa.table({"t": times, "x": range(10)}), tmp_path / "x.parquet")
    assert len(table_of(tmp_path / "x.parquet", tmp_path / "s")[1]) == 1


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_header_alone_holds_no_rows(tmp_path, end):
    with pytest.raises(SourceError, match=r"x\.csv holds no rows"):
        table_of(write(tmp_path / "x.csv", f"a,b,c{end}".encode()), tmp_path / "s")


def test_a_signalling_nan_is_a_nan_without_a_warning(tmp_path):
    bits = np.array([0x7FF0000000000001, 0x3FF0000000000000], np.uint64).view(np.float64)
    parquet.write_table(pa.table({"a": np.tile(bits, 5)}), tmp_path / "x.parquet")
    assert np.isnan(table_of(tmp_path / "x.parquet", tmp_path / "s")[0]["a"]).sum() == 5


def test_a_header_longer_than_the_first_look_is_read(tmp_path):
    names = [f"gene-{number:01000d}" for number in range(300)]
    rows = [",".join([str(row)] * len(names)) for row in (1.5, 2.5, 4.5)]
    path = write(tmp_path / "x.csv", "\n".join([",".join(names), *rows]).encode())
    made = table_of(path, tmp_path / "s")[0]
    assert made[names[-1]].tolist() == [1.5, 2.5, 4.5]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_split_by_rows_that_are_ordered_by_class_is_said(tmp_path, is_ordered):
    classes = ["a"] * 40 + ["b"] * 40
    if not is_ordered:
        classes = ["a", "b"] * 40
    rows = "".join(f"{row},{name}\n" for row, name in enumerate(classes))
    source = TableSource(
        (write(tmp_path / "x.csv", f"n,c\n{rows}".encode()),),
        target="c",
        split=(0.6, 0.2, 0.2),
        part_rows=30,
    )
    context = PartContext(tmp_path, lambda _: None, {})
    built = [source.build(part, context) for part in source.prepare(tmp_path).parts]
    notes = source.finish([part.extra for part in built]).get("notes", [])
    assert [note.partition(":")[0] for note in notes] == (
        ["val has no row of a", "test has no row of a"] if is_ordered else []
    )


@pytest.mark.parametrize(
    ("cell", "said"),
    [({"bytes": b"PNG", "path": "a.png"}, "stoker pack images"), ([1.0, 2.0], "pack_from")],
)
def test_what_no_table_holds_is_named_with_what_takes_it(tmp_path, cell, said):
    parquet.write_table(pa.table({"a": [cell] * 3, "b": range(3)}), tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=said) as error:
        table_of(tmp_path / "x.parquet", tmp_path / "s")
    assert error.value.fix == "--drop a"
