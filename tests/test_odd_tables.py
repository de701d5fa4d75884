"""Tables and bars of others: a header with one name fewer than cells, dates before 1900."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.errors import QualityError, SourceError, StoreError
from stoker.packing import PackOptions, pack
from stoker.recipes.raw_tables import open_raw_table
from stoker.sources.bars import read_bars
from stoker.sources.tables import TableSource, TextOptions, reading
from stoker.sources.tables.columns import Column, Unusable, encode, find_kind
from stoker.sources.tables.layout import find_layout
from stoker.sources.tables.reading import TextFault, find_fault
from stoker.store.fields import Dense
from stoker.store.inspection import inspect_parts
from stoker.store.reader import open_store

ROWS = ["1,2,0.5,1.5,7", "1.5,2.5,1,2,8", "2,3,1.5,2.5,9"]


def bars(tmp_path, header, times, end=""):
    lines = [f"{time},{row}{end}" for time, row in zip(times, ROWS, strict=True)]
    (tmp_path / "x.csv").write_text("\n".join([header, *lines]) + "\n")
    return read_bars(tmp_path / "x.csv")


def test_a_time_of_day_without_a_name(tmp_path):
    times = [f"2006-01-02,09:0{n}:00" for n in range(1, 4)]
    got = bars(tmp_path, "Date,Open,High,Low,Close,Volume", times)
    assert got.columns["close"].tolist() == [1.5, 2.0, 2.5]
    assert got.columns["volume"].tolist() == [7, 8, 9]
    assert (got.time[1] - got.time[0]) == 60 * 10**9
    assert any("no name for the second column" in note for note in got.notes)


def test_an_index_without_a_name(tmp_path):
    times = [f"2006-01-0{n}" for n in range(2, 5)]
    got = bars(tmp_path, "Open,High,Low,Close,Volume", times)
    assert got.columns["open"].tolist() == [1, 1.5, 2]


@pytest.mark.parametrize(("end", "said"), [(",", False), (",5", True)])
def test_a_last_column_without_a_name_is_left_out_with_a_word(tmp_path, end, said):
    times = [f"2006-01-0{n}" for n in range(2, 5)]
    got = bars(tmp_path, "Date,Open,High,Low,Close,Volume", times, end)
    assert list(got.columns) == ["open", "high", "low", "close", "volume"]
    assert any("the last column has no name" in note for note in got.notes) == said


def test_a_table_says_that_the_first_name_is_missing():
    text = "a,b\nx,1,2\ny,3,4\nz,5,6\n"
    layout = find_layout(text.encode(), Path("t.csv"), TextOptions(), is_whole=True)
    assert layout.names == ("", "a", "b")
    assert "the header names all columns but the first" in layout.said


def test_a_table_has_dates_of_the_eighteenth_century():
    """Sunspots are counted since 1749."""
    months = pa.array([f"{1749 + n // 12}-{1 + n % 12:02d}" for n in range(240)])
    made = find_kind("Month", months, ".", None)
    assert isinstance(made, Column)
    assert made.kind == "date"
    faults: dict = {}
    values, _ = encode(months, made, ".", faults)
    assert not faults
    assert values[0].tolist() == [np.datetime64("1749-01-01").astype(int), 1, 2]  # a Wednesday


@pytest.mark.parametrize(
    ("cell", "number"), [("{},5 %", "10,5"), ("€ {}.50", "10.50"), ("${}", "10"), ("A-{}", None)]
)
def test_numbers_with_a_sign_are_named_as_such(cell, number):
    column = pa.array([cell.format(n) for n in range(10, 40)])
    made = find_kind("share", column, ",", None)
    assert isinstance(made, Unusable)
    hint = f"numbers are read without signs and units: {number!r}"
    assert (hint in made.what) == (number is not None)
    assert number is not None or "without signs" not in made.what


@pytest.mark.parametrize("day_first", [True, False])
def test_dates_in_the_other_order_are_refused_and_not_read_as_other_days(day_first):
    """A model of days first gets a file of months first: the 5th of March must not become the 3rd of May."""
    days = [(5, 3), (12, 3), (25, 3), (31, 3), (4, 4)]

    def column(first: bool, days=days):
        return pa.array(
            [f"{a:02d}/{b:02d}/2020" for a, b in (p if first else p[::-1] for p in days)]
        )

    made = find_kind("When", column(day_first), ".", None)
    assert isinstance(made, Column)
    assert made.day_first is day_first
    other: dict = {}
    encode(column(not day_first), made, ".", other)
    assert other.keys() == {0, 1, 2, 3}  # the 4th of April is the same in both orders
    assert "or 2020-03-25" in str(other[2])
    assert "as other rows are" in str(other[0])
    mistyped: dict = {}
    cells = pa.concat_arrays([column(day_first), column(not day_first, [(25, 3)])])
    encode(cells, made, ".", mistyped)
    assert mistyped.keys() == {5}  # one row in the other order condemns no others


def test_a_pandas_table_deep_in_a_file_is_known_by_the_index_below_it(tmp_path):
    """PyTables keeps an index of many arrays beside the table: none of them is a sample."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        group = file.create_group("A/B/ohlcv")
        group.attrs["pandas_type"] = b"frame_table"
        group["table"] = np.zeros(9, [("index", "i8"), ("values_block_0", "f8", 3)])
        group["_i_table/index/sortedLR"] = np.arange(50)
        group["_i_table/index/indicesLR"] = np.arange(50)
    with pytest.raises(StoreError, match="it is a pandas file: the values of 'A/B/ohlcv'"):
        open_store(tmp_path / "x.h5")


def test_inspect_takes_a_pattern_as_pack_does(tmp_path):
    for number in range(3):
        (tmp_path / f"day{number}.csv").write_text("a,b\n1,2\n3,4\n")
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "day*.csv"), "--json"])
    assert json.loads(done.stdout)["facts"]["rows"] == "6"


@pytest.mark.parametrize(
    ("codec", "asked"), [("utf-16", None), ("utf-16-le", "utf-16-le"), ("utf-16-be", "utf-16-be")]
)
def test_text_of_two_bytes_a_letter_is_a_table_by_its_mark_or_the_users_word(
    tmp_path, codec, asked
):
    (tmp_path / "t.csv").write_text("a;b\n1;2\n3;4\n", encoding=codec)
    made = reading.open_table(tmp_path / "t.csv", TextOptions(encoding=asked))
    assert made.names == ("a", "b")


def test_columns_that_nobody_chose_are_not_said_to_be_constant():
    """`pack massspec` stores the same conditions of every library, and has no --drop."""
    values = np.zeros((20, 2), np.float32)
    assert not inspect_parts([{"conditions": Dense(values, ("ms1", "energy"))}]).findings
    assert inspect_parts([{"features": Dense(values, ("ms1", "energy"))}]).findings
    values[3, 1] = np.nan
    assert inspect_parts([{"conditions": Dense(values, ("ms1", "energy"))}]).refused


# -- what Arrow cannot read in a text --------------------------------------------------------------


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_the_line_of_bytes_that_are_not_utf8_is_found_wherever_blocks_end(data, cuts):
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    blocks = [data[start:end] for start, end in itertools.pairwise(places) if start < end]
    try:
        data.decode()
        expected = None
    except UnicodeDecodeError as error:
        expected = TextFault(False, data.count(b"\n", 0, error.start) + 1)
    assert find_fault(blocks, True, 1000) == expected
    assert find_fault(blocks, False, 1000) is None


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"1,2\n" * 600 + b'3,"4\n' + b"1,2\n" * 900, "of more than .* begins in line 602"),
        (b"1,2\n" * 600 + b"caf\xe9,2\n", "holds other bytes in line 602"),
        (b"1,2\n" * 3 + b"1," + b"2" * 2500 + b"\n", "of more than .* begins in line 5"),
        (b'"1\n1",2\n' * 600, None),
    ],
)
def test_a_text_that_arrow_refuses_is_refused_with_the_line(tmp_path, monkeypatch, body, fault):
    monkeypatch.setattr(reading, "CSV_BLOCK_BYTES", 1000)
    monkeypatch.setattr(reading, "HEAD_BYTES", 40)
    (tmp_path / "a.csv").write_bytes(b"a,b\n" + body)
    source = TableSource((tmp_path / "a.csv",))
    if fault is None:
        assert source.prepare(tmp_path).parts
    else:
        with pytest.raises(SourceError, match=fault):
            source.prepare(tmp_path)


@pytest.mark.parametrize(("sign", "decimal", "sep"), [("'", ".", ","), ("\u202f", ",", ";")])
def test_thousands_by_an_apostrophe_or_a_narrow_space(tmp_path, sign, decimal, sep):
    """As Swiss and French programs write them: 1'234.50, 1\u202f234,50."""
    values = [1234.5, 987.25, 5_000_000.75, 12.5] * 20
    cells = [f"{v:,}".replace(".", "#").replace(",", sign).replace("#", decimal) for v in values]
    lines = [sep.join((cell, "ab"[n % 2])) for n, cell in enumerate(cells)]
    (tmp_path / "x.csv").write_text("\n".join([f"amount{sep}kind", *lines]) + "\n")
    source = TableSource((tmp_path / "x.csv",), "kind")
    with open_store(pack(source, tmp_path / "store", PackOptions(jobs=1)).path) as store:
        got = store.gather("features", np.arange(len(values)))[:, 0]
    np.testing.assert_array_equal(got, np.array(values, got.dtype))


def test_numbers_with_units_that_repeat_are_told(tmp_path):
    """A share such as "12.5 %" of few different values was packed as text without saying more."""
    lines = [f"{n % 40 / 2} %,{'low' if n % 2 else 'high'}" for n in range(200)]
    (tmp_path / "x.csv").write_text("\n".join(["share,level", *lines]) + "\n")
    notes = TableSource((tmp_path / "x.csv",)).prepare(tmp_path).notes
    (told,) = (note for note in notes if "signs or units" in note)
    assert told.startswith("column 'share' holds numbers with signs or units, such as '9.5 %', and")


def packed(tmp_path, text, repairs=(), **options):
    """Pack a text; return the store's manifest and its features by column."""
    (tmp_path / "x.csv").write_text(text)
    source = TableSource((tmp_path / "x.csv",), **options)
    made = pack(source, tmp_path / "store", PackOptions(jobs=1, repairs=repairs))
    with open_store(made.path) as store:
        features = store.gather("features", np.arange(store.num_samples))
        return store.manifest, dict(zip(store.fields["features"].columns, features.T, strict=True))


@pytest.mark.parametrize(
    ("sep", "one", "two", "values"),
    [
        (";", "{}.500", "{},5", (1500, 1.5)),  # German: a thousand beside a decimal comma
        (",", '"{},500"', "{}.5", (1500, 1.5)),  # English
        (",", "1", '"0,{}25"', (1, 0.125)),  # no thousand begins with 0
        (";", "{}.10", "{},5", (None, 1.5)),  # a column of versions does not make all others text
        (";", "{}.5", "{0},{0},{0}", (1.5, None)),  # nor does a column of lists
    ],
)
def test_the_decimal_sign_is_what_cannot_be_a_thousand(tmp_path, sep, one, two, values):
    lines = [sep.join((one.format(n), two.format(n), str(n))) for n in range(1, 10)]
    lines = [*lines, sep.join((one.format(7), "7,8" if "{0}" in two else two.format(7), "7"))]
    drop = tuple(name for name, value in zip(("one", "two"), values, strict=True) if value is None)
    _, got = packed(tmp_path, "\n".join([f"one{sep}two{sep}n", *lines]) + "\n", drop=drop)
    assert [got[name][0] for name in ("one", "two") if name in got] == [v for v in values if v]


def test_new_rows_that_do_not_tell_the_decimal_sign_have_that_of_training(tmp_path):
    """A row "14;1.234" was read as 1.234, where training had 1234."""
    lines = [f"{n},5;{n}.234" for n in range(1, 10)]
    manifest, _ = packed(tmp_path, "\n".join(["t;amount", *lines]) + "\n")
    facts = {"table": manifest.attributes["table"], "repairs": {}}
    for text, wanted in (("14;1.234", 1234), ("14.5;1.234", 1.234), ("14,5;1234", 1234)):
        (tmp_path / "new.csv").write_text(f"t;amount\n{text}\n")
        (batch,) = open_raw_table(tmp_path / "new.csv", facts, {})
        assert batch.batch["features"][0, 1].item() == pytest.approx(wanted)


def test_a_file_that_does_not_tell_the_decimal_sign_has_that_of_its_table(tmp_path):
    for name, cells in (("a.csv", ("1.234", "2.345")), ("b.csv", ("0,5", "1.000"))):
        (tmp_path / name).write_text("x;n\n" + "".join(f"{cell};1\n" for cell in cells))
    source = TableSource((tmp_path / "a.csv", tmp_path / "b.csv"))
    with open_store(pack(source, tmp_path / "store", PackOptions(jobs=1)).path) as store:
        got = store.gather("features", np.arange(4))[:, 0]
    assert got.tolist() == [1234, 2345, 0.5, 1000]


def test_a_separator_behind_the_last_cell_does_not_move_the_names(tmp_path):
    lines = [f"{n},{n + 0.5},{n + 0.25}," for n in range(9)]
    _, got = packed(tmp_path, "\n".join(["a,b,c", *lines]) + "\n", drop=("unnamed_3",))
    assert [got[name][1] for name in "abc"] == [1, 1.5, 1.25]


def test_rows_without_any_value_are_no_samples(tmp_path):
    """Spreadsheets are saved with hundreds of them: filled, they were samples that nobody has measured."""
    rows = [f"{n},{'ab'[n % 2]},{n % 3}" for n in range(9)] + [",,"] * 5
    text = "\n".join(["x,kind,y", *rows]) + "\n"
    for options in ({"missing": "flag"}, {"missing": "drop"}, {"target": "y"}):
        manifest, got = packed(tmp_path, text, **options)
        assert manifest.counts["ignored"] == {"no value in any column": 5}
        assert len(got["x"]) == 9
    lists = ["[1]", "[2]", "null", "[3]"]  # a list that was dropped is a value, too
    lines = [f'{{"x": {x}, "more": {more}}}' for x, more in zip("12", lists, strict=False)]
    lines += [f'{{"x": null, "more": {more}}}' for more in lists[2:]]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
    source = TableSource((tmp_path / "x.jsonl",), drop=("more",), missing="drop")
    made = pack(source, tmp_path / "lines", PackOptions(jobs=1))
    with open_store(made.path) as store:
        assert store.manifest.counts["ignored"] == {
            "no value in any column": 1,
            "no value in column 'x'": 1,
        }
    # A target alone is worth a word.
    with pytest.raises(QualityError, match="NaN"):
        packed(tmp_path, text + ",,1\n", target="y")


def test_missing_drop_leaves_out_a_blank_target_and_no_word(tmp_path):
    """Rows whose answer is not known yet are blank there; "None" may be a class, which must not vanish."""
    for values in ("ab", (0.5, 1.5)):
        text = (
            "x,y\n" + "".join(f"{n},{values[n % 2]}\n" for n in range(20)) + ",a\n" + "21,\n" * 30
        )
        manifest, got = packed(
            tmp_path, text.replace(",a", f",{values[0]}"), target="y", missing="drop"
        )
        dropped = {"no value in column 'x'": 1, "no value in the target": 30}
        assert manifest.counts["ignored"] == dropped
        assert len(got["x"]) == 20
    with pytest.raises(QualityError, match="y=None"):
        packed(tmp_path, "x,y\n1,a\n2,b\n3,a\n4,b\n5,None\n", target="y", missing="drop")


@pytest.mark.parametrize(
    ("lines", "advice", "told"),
    [
        (["a^b", *(f"{n}^{n / 3:.3f}" for n in range(12))], "--sep '^'", "has one column"),
        (["d,x", *(f"{n + 10}-Jan-20,{n}" for n in range(12))], "--drop d", "years of four digits"),
    ],
)
def test_a_table_that_cannot_be_packed_says_what_would_help(tmp_path, lines, advice, told):
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(SourceError, match=told) as refused:
        TableSource((tmp_path / "x.csv",)).prepare(tmp_path)
    assert refused.value.fix == advice


def test_the_encoding_that_is_advised_gives_letters(tmp_path):
    """gb18030 reads nearly all bytes, as letters for private use where they are none of its own."""
    lines = ["編號,名稱", *(f"{n},臺灣銀行證券{n % 3}" for n in range(20))]
    (tmp_path / "x.csv").write_bytes("\n".join(lines).encode("big5"))
    with pytest.raises(SourceError) as refused:
        TableSource((tmp_path / "x.csv",)).prepare(tmp_path)
    assert refused.value.fix == "--encoding big5"


def test_cells_of_databases_and_of_typeset_tables(tmp_path):
    lines = [f"{n % 2},{'−' if n % 2 else ''}{n}.5,{'ab'[n % 2]}" for n in range(8)]
    text = "\n".join(["y,x,kind", *lines, "1,\\N,\\N"]) + "\n"
    _, got = packed(tmp_path, text, ("fill:median",), missing="flag", target="y")
    assert got["x"][:4].tolist() == [0.5, -1.5, 2.5, -3.5]
    assert got["x_missing"].tolist() == [0] * 8 + [1]
    assert "kind=\\N" not in got


def test_numbers_that_begin_with_a_zero_may_be_codes(tmp_path):
    """Postal codes: as numbers they lose their zeros, and their order means nothing."""
    text = "".join(f"{n % 7}021{n % 10},{n}.0,0.{n}\n" for n in range(20))
    (tmp_path / "x.csv").write_text(f"postal code,size,share\n{text}")
    notes = TableSource((tmp_path / "x.csv",)).prepare(tmp_path).notes
    (note,) = (note for note in notes if "codes" in note)
    assert note.startswith("column 'postal code' holds numbers such as '00210'")
    assert note.endswith("--dtype 'postal code=category'")


@pytest.mark.parametrize(
    ("cell", "tried"),
    [
        ("{:,} €", "a file whose price holds plain numbers, or --target with another column"),
        ("house {}", "--dtype price=category"),
        (
            "2020-01-{:02d}",
            "a file whose price holds plain numbers, or --target with another column",
        ),
    ],
)
def test_the_advice_for_a_target_is_not_to_drop_it(tmp_path, cell, tried):
    path = tmp_path / "houses.csv"
    rows = [f'{n},"{cell.format(n)}"' for n in range(10, 30)]
    path.write_text("\n".join(["rooms,price", *rows]))
    with pytest.raises(SourceError, match="is the target and") as raised:
        TableSource((path,), target="price").prepare(tmp_path)
    assert raised.value.fix == tried


def test_headers_between_rows_of_joined_files_are_no_rows(tmp_path):
    header, rows = "size, kind,label", [f"{n}.5,{'ab'[n % 2]},{n % 2}" for n in range(40)]
    lines = [header, *rows[:10], header, "1,2", "\ufeff" + header, *rows[10:], header]
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    options = PackOptions(on_bad="quarantine", bad_budget=1, jobs=1)
    made = pack(TableSource((tmp_path / "all.csv",), target="label"), tmp_path / "store", options)
    with open_store(made.path) as store:
        assert store.gather("features", np.arange(40))[:, 0].tolist() == [
            n + 0.5 for n in range(40)
        ]
        facts = {"table": store.manifest.attributes["table"], "repairs": {}}
    assert facts["table"]["classes"] == ["0", "1"]
    kinds = [(each.line, each.is_asked) for each in made.refused]
    assert kinds == [(13, False), (12, True), (14, True), (45, True)]
    (batch,) = open_raw_table(tmp_path / "all.csv", facts, {})
    assert [row for row, why in zip(batch.keys, batch.reasons, strict=True) if why] == [
        10,
        11,
        12,
        43,
    ]
    values = batch.batch["features"][torch.from_numpy(batch.answered), 0]
    assert values.tolist() == [n + 0.5 for n in range(40)]
