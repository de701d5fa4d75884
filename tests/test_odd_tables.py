"""Tables and bars of others: a header with one name fewer than cells, dates before 1900."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stoker.sources.bars import read_bars
from stoker.sources.tables import TextOptions
from stoker.sources.tables.columns import Column, encode, find_kind
from stoker.sources.tables.layout import find_layout

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
