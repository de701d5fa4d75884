from __future__ import annotations

import gzip
import json
import pickle
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError, SourceError
from stoker.sources.bars import BarsSource, make_targets, read_bars
from stoker.sources.bars.files import BarFile
from stoker.sources.bars.reading import merge_bars
from stoker.sources.bars.timeframes import HOUR_NS, MINUTE_NS, TIMEFRAMES, TRAIN
from stoker.sources.contract import PartContext
from stoker.sources.times import parse_time, to_utc
from stoker.store.fields import Series

NOON = "2020-10-15 12:00"
NOON_NS = int(datetime(2020, 10, 15, 12, tzinfo=UTC).timestamp()) * 10**9


def write(folder, text, name="EURUSD_M1.csv"):
    path = folder / name
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def lines_of(refusals):
    return {refusal.line: refusal.reason for refusal in refusals}


BAR = "1.5,2.5,1.25,2.25"
DIALECTS = {
    "headerless": f"2020-10-15 12:00,{BAR},608\n2020-10-15 12:01,{BAR},548\n",
    "headed": f"Date,Open,High,Low,Close,Volume\n2020-10-15 12:00:00,{BAR},608\n"
    f"2020-10-15 12:01:00,{BAR},548\n",
    "mt5 export": "<DATE>\t<TIME>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<TICKVOL>\t<VOL>\t<SPREAD>\n"
    "2020.10.15\t12:00:00\t1.5\t2.5\t1.25\t2.25\t608\t0\t7\n"
    "2020.10.15\t12:01:00\t1.5\t2.5\t1.25\t2.25\t548\t0\t7\n",
    "copy_rates": "time,open,high,low,close,tick_volume,spread,real_volume\n"
    f"1602763200,{BAR},608,7,0\n1602763260,{BAR},548,7,0\n",
    "saved index": f",time,open,high,low,close\n0,1602763200,{BAR}\n1,1602763260,{BAR}\n",
    "epoch ms": f"1602763200000,{BAR}\n1602763260000,{BAR}\n",
    "epoch us": f"1602763200000000,{BAR}\n1602763260000000,{BAR}\n",
    "epoch ns": f"1602763200000000000,{BAR}\n1602763260000000000,{BAR}\n",
    "epoch float": f"time,open,high,low,close\n1602763200.0,{BAR}\n1602763260.0,{BAR}\n",
    "iso T Z": f"2020-10-15T12:00:00Z,{BAR}\n2020-10-15T12:01:00Z,{BAR}\n",
    "iso offset": f"2020-10-15 15:00:00+03:00,{BAR}\n2020-10-15 15:01:00+03:00,{BAR}\n",
    "dukascopy": "Gmt time,Open,High,Low,Close,Volume\n"
    f"15.10.2020 12:00:00.000,{BAR},1.25\n15.10.2020 12:01:00.000,{BAR},1.25\n",
    "histdata": "20201015 120000;1.5;2.5;1.25;2.25;0\n20201015 120100;1.5;2.5;1.25;2.25;0\n",
    "finam": "<TICKER>,<PER>,<DATE>,<TIME>,<OPEN>,<HIGH>,<LOW>,<CLOSE>,<VOL>\n"
    f"EURUSD,1,20201015,120000,{BAR},608\nEURUSD,1,20201015,120100,{BAR},548\n",
    "mt4": f"2020.10.15,12:00,{BAR},608\n2020.10.15,12:01,{BAR},548\n",
    "day first": f"15/10/2020 12:00,{BAR}\n15/10/2020 12:01,{BAR}\n",
    "month first, unpadded": f"10/15/2020 9:00,{BAR}\n10/15/2020 12:01,{BAR}\n".replace("9:00", "12:00"),
    "whole lines quoted": f'"2020-10-15 12:00,{BAR},608"\n"2020-10-15 12:01,{BAR},548"\n',
    "cells quoted": '"2020-10-15 12:00","1.5","2.5","1.25","2.25"\n"2020-10-15 12:01","1.5","2.5","1.25","2.25"\n',
    "crlf, bom": f"\ufeffTime,Open,High,Low,Close\r\n2020-10-15 12:00,{BAR}\r\n2020-10-15 12:01,{BAR}\r\n",
    "decimal comma": "2020-10-15 12:00;1,5;2,5;1,25;2,25\n2020-10-15 12:01;1,5;2,5;1,25;2,25\n",
    "trailing delimiter": f"2020-10-15 12:00,{BAR},608,\n2020-10-15 12:01,{BAR},548,\n",
    "header without the trailing delimiter": f"time,open,high,low,close\n2020-10-15 12:00,{BAR},\n"
    f"2020-10-15 12:01,{BAR},\n",
    "other order": "close,low,high,open,date\n2.25,1.25,2.5,1.5,2020-10-15 12:00\n"
    "2.25,1.25,2.5,1.5,2020-10-15 12:01\n",
    "spaces": "2020-10-15 12:00, 1.5, 2.5, 1.25, 2.25\n 2020-10-15 12:01 , 1.5, 2.5, 1.25 ,2.25\n",
    "no last newline": f"2020-10-15 12:00,{BAR}\n2020-10-15 12:01,{BAR}",
    "blank lines": f"\n2020-10-15 12:00,{BAR}\n\n  \n2020-10-15 12:01,{BAR}\n\n",
}  # fmt: skip


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_gives_the_same_bars(tmp_path, dialect, careful):
    bars = read_bars(write(tmp_path, DIALECTS[dialect]), careful=careful)
    assert bars.time.tolist() == [NOON_NS, NOON_NS + MINUTE_NS]
    prices = {name: bars.columns[name].tolist() for name in ("open", "high", "low", "close")}
    assert prices == {"open": [1.5] * 2, "high": [2.5] * 2, "low": [1.25] * 2, "close": [2.25] * 2}
    assert bars.refused == []


def test_columns_are_kept_and_named(tmp_path):
    mt5 = read_bars(write(tmp_path, DIALECTS["mt5 export"]))
    assert list(mt5.columns)[4:] == ["tick_volume", "real_volume", "spread"]
    assert mt5.columns["spread"].tolist() == [7, 7]
    rates = read_bars(write(tmp_path, DIALECTS["copy_rates"]))
    assert list(rates.columns)[4:] == ["tick_volume", "spread", "real_volume"]
    finam = read_bars(write(tmp_path, DIALECTS["finam"]))
    assert list(finam.columns)[4:] == ["volume"]


def test_bare_columns_beyond_volume_are_not_given_a_guessed_meaning(tmp_path):
    text = "".join(f"2020.10.15,12:0{i},{BAR},608,3,7\n" for i in range(3))
    assert list(read_bars(write(tmp_path, text)).columns)[4:] == ["volume", "extra_2", "extra_3"]


@pytest.mark.parametrize("name", ["a_M1.csv.gz", "a_M1.csv"])
def test_utf16_and_latin1_and_gzip(tmp_path, name):
    text = "Zeit;open;high;low;close;größe\n".replace("Zeit", "time")
    text += "".join(f"2020-10-15 12:0{i};1.5;2.5;1.25;2.25;{i}\n" for i in range(3))
    for encoding in ("utf-16", "latin-1", "utf-8"):
        bars = read_bars(write(tmp_path, text.encode(encoding), name))
        assert len(bars) == 3
        assert len(bars.columns) == 5


@pytest.mark.parametrize("careful", [False, True])
def test_damaged_lines_are_refused_with_line_and_reason(tmp_path, careful):
    text = "\n".join(
        [
            f"-(2020-10-15 11:59,{BAR}",
            f"2020-10-15 12:00,{BAR}",
            "# exported by nobody",
            f"2020-10-15 12:01,{BAR},9",
            f"2020-13-15 12:02,{BAR}",
            "2020-10-15 12:03,1.5,2.5,1.25,abc",
            "2020-10-15 12:04,1.5,2.5,,2.25",
            "2020-10-15 12:05,1.5,nan,1.25,2.25",
            "2020-10-15 12:06,1.5,1e400,1.25,2.25",
            "1,2,3",
            *(f"2020-10-15 13:{i:02d},{BAR}" for i in range(20)),
            "2020-10-15 14:00,1.5,2.",
        ]
    )
    bars = read_bars(write(tmp_path, text), careful=careful)
    assert len(bars) == 21
    assert bars.lines.tolist() == [2, *range(11, 31)]
    assert lines_of(bars.refused) == {
        1: "'-(2020-10-15 11:59' is not a time",
        3: "a comment",
        4: "6 cells instead of 5",
        5: "'2020-13-15 12:02' is no date between 1700 and 2199",
        6: "close is 'abc', not a number",
        7: "low is '', not a number",
        8: "high is 'nan', not a number",
        9: "high is '1e400', not a number",
        10: "3 cells instead of 5",
        31: "3 cells instead of 5",
    }


@pytest.mark.parametrize("careful", [False, True])
def test_a_second_header_and_bars_above_the_first_are_refused(tmp_path, careful):
    header = "time,open,high,low,close"
    rows = [f"2020-10-15 12:{i:02d},{BAR}" for i in range(9)]
    text = "\n".join(["made by me", rows[0], header, *rows[1:5], header, *rows[5:]])
    bars = read_bars(write(tmp_path, text), careful=careful)
    assert bars.lines.tolist() == [4, 5, 6, 7, 9, 10, 11, 12]
    assert lines_of(bars.refused) == {2: "a bar above the header", 8: "a header"}
    assert bars.ignored == {"lines above the header": 1, "header lines": 1}


def test_a_quoted_cell_with_the_delimiter_inside_is_not_split(tmp_path):
    text = "".join(f'2020-10-15 12:0{i},{BAR},"1,234"\n' for i in range(3))
    grouped = read_bars(write(tmp_path, text))
    assert grouped.columns["volume"].tolist() == [1234] * 3
    assert read_bars(write(tmp_path, text), decimal=",").columns["volume"].tolist() == [1.234] * 3
    good = "".join(f"2020-10-15 12:0{i},{BAR},7\n" for i in range(9))
    bars = read_bars(write(tmp_path, good + f'2020-10-15 12:09,{BAR},"a,b"\n'))
    assert lines_of(bars.refused) == {10: "7 cells instead of 6"}


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ("1.5,1.0,1.25,1.2", "high is below low"),
        ("1.5,2.0,1.25,2.25", "high is below open or close"),
        ("1.0,2.5,1.25,2.25", "low is above open or close"),
        ("0,2.5,0,2.25", "a price is not positive"),
        ("-1,2.5,-1,2.25", "a price is not positive"),
    ],
)
def test_impossible_prices_are_refused_unless_asked_for(tmp_path, cells, reason):
    path = write(tmp_path, f"2020-10-15 12:00,{BAR}\n2020-10-15 12:01,{cells}\n")
    assert lines_of(read_bars(path).refused) == {2: reason}
    assert len(read_bars(path, check_prices=False)) == 2


def test_copies_are_dropped_and_of_contradictions_none_is_taken(tmp_path):
    text = "\n".join(
        f"2020-10-15 12:0{minute},1.5,2.5,1.25,{close}"
        for minute, close in [(0, 2), (1, 2), (1, 2), (1, 2), (2, 2), (3, 2), (3, 1.5), (4, 2)]
    )
    bars = read_bars(write(tmp_path, text))
    assert bars.lines.tolist() == [1, 2, 5, 8]
    reasons = lines_of(bars.refused)
    assert sorted(reasons) == [3, 4, 6, 7]
    assert "copy" in reasons[3]
    assert "line 2" in reasons[4]
    assert "different bars of 2020-10-15 12:03:00" in reasons[6]


def test_order_newest_first_is_turned_and_disorder_is_an_error(tmp_path):
    stamps = [f"2020-10-15 12:{minute:02d},{BAR}" for minute in range(10)]
    turned = read_bars(write(tmp_path, "\n".join(stamps[::-1])))
    assert turned.time[0] == NOON_NS
    assert turned.lines[0] == 10
    assert "newest bar first" in turned.notes[0]
    mixed = [*stamps[:6], stamps[7], stamps[6], *stamps[8:]]
    with pytest.raises(SourceError, match="backwards at line 8"):
        read_bars(write(tmp_path, "\n".join(mixed)))
    assert read_bars(write(tmp_path, "\n".join(mixed)), sort=True).time.tolist() == sorted(
        NOON_NS + i * MINUTE_NS for i in range(10)
    )
    with pytest.raises(SourceError, match="forwards at line 4"):
        read_bars(write(tmp_path, "\n".join(mixed[::-1])))


def test_day_and_month_are_told_apart_by_proof_or_not_at_all(tmp_path):
    ambiguous = "".join(f"0{day}/10/2020,{BAR}\n" for day in range(1, 8))
    path = write(tmp_path, ambiguous, "A_D1.csv")
    with pytest.raises(SourceError, match="both day-first and month-first"):
        read_bars(path)
    assert (
        read_bars(path, day_first=True).time[1] - read_bars(path, day_first=True).time[0]
        == 24 * HOUR_NS
    )
    assert len(read_bars(path, day_first=False)) == 7
    proven = write(tmp_path, ambiguous + f"13/10/2020,{BAR}\n", "B_D1.csv")
    assert read_bars(proven).time[0] == read_bars(path, day_first=True).time[0]
    clash = write(tmp_path, ambiguous + f"13/10/2020,{BAR}\n10/14/2020,{BAR}\n", "C_D1.csv")
    with pytest.raises(SourceError, match="line 8 can only be day-first, line 9 only month-first"):
        read_bars(clash)
    assert lines_of(read_bars(clash, day_first=True).refused).keys() == {9}


@pytest.mark.parametrize("text", ["", "\n\n", "hello\nworld\n", "a,b,c,d,e\n", "\x00\x01\x02" * 50])
def test_what_is_no_file_of_bars_is_an_error(tmp_path, text):
    with pytest.raises(SourceError, match="does not read as bars"):
        read_bars(write(tmp_path, text))
    with pytest.raises(SourceError, match="does not exist"):
        read_bars(tmp_path / "nowhere.csv")


def test_mostly_damaged_is_misread(tmp_path):
    text = f"2020-10-15 12:00,{BAR}\n" + "2020-10-15 12:01,1,2\n" * 5
    with pytest.raises(SourceError, match="5 lines do not read as bars, 1 do"):
        read_bars(write(tmp_path, text))


def test_gzip_cut_short_keeps_whole_lines_and_says_so(tmp_path):
    text = "".join(
        f"2020-10-15 {i // 60:02d}:{i % 60:02d},{BAR},{i * 7919 % 977}\n" for i in range(900)
    )
    path = write(tmp_path, text, "EURUSD_M1.csv.gz")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    bars = read_bars(path)
    assert 0 < len(bars) < 900
    assert [refusal.reason for refusal in bars.refused] == [
        "the gzip file ends early: the last line and what followed are lost"
    ]
    path.write_bytes(data[:50] + b"\xff" * 60 + data[110:])
    with pytest.raises(SourceError, match="gzip"):
        read_bars(path)
    path.write_bytes(data + gzip.compress(f"2020-10-15 23:00,{BAR},1\n".encode()))
    assert len(read_bars(path)) == 901


def test_zone_turns_the_brokers_clock_into_utc(tmp_path):
    path = write(tmp_path, DIALECTS["headerless"])
    assert read_bars(path, tz="Europe/Athens").time[0] == NOON_NS - 3 * HOUR_NS
    january = np.array([int(datetime(2020, 1, 15, 12, tzinfo=UTC).timestamp()) * 10**9])
    assert to_utc(january, "Europe/Athens")[0] == january[0] - 2 * HOUR_NS
    assert to_utc(january, "UTC")[0] == january[0]
    with pytest.raises(InputError, match="not known"):
        read_bars(path, tz="Mars/Olympus")
    with pytest.raises(SourceError, match="their own offset"):
        read_bars(write(tmp_path, DIALECTS["iso T Z"]), tz="Europe/Athens")


def test_times_that_a_zone_does_not_have_are_refused(tmp_path):
    """Bars of every minute in UTC, read as New York's: 02:00 to 02:59 of that Sunday are in no clock there."""
    start = datetime(2024, 3, 10, 1, 30, tzinfo=UTC)
    times = [f"{start + timedelta(minutes=n):%Y-%m-%d %H:%M}" for n in range(120)]
    path = write(tmp_path, "".join(f"{time},1.1,1.2,1.0,1.1,5\n" for time in times))
    with pytest.raises(InputError, match=r"60 times, 2024-03-10 02:00:00 the first") as told:
        read_bars(path, tz="America/New_York", sort=True)
    assert told.value.fix == "--tz UTC"
    assert len(read_bars(path, tz="UTC")) == 120
    assert len(read_bars(path, tz="Europe/Berlin")) == 120


def test_columns_that_cannot_be_are_named_with_the_reason(tmp_path):
    """High and low under each other's name: every bar is refused, and nothing was said but that none is left."""
    lines = [f"2021-05-0{n} 10:00,1.2,1.1,1.3,1.2,5" for n in range(1, 9)]
    (tmp_path / "x.csv").write_text("\n".join(["time,open,high,low,close,volume", *lines]) + "\n")
    with pytest.raises(SourceError, match="high is below low in 8 of 8 bars") as told:
        read_bars(tmp_path / "x.csv")
    assert "--columns open=NAME,high=NAME" in told.value.fix


@pytest.mark.parametrize("is_newest_first", [False, True])
@pytest.mark.parametrize(
    ("zone", "day"),
    [("Europe/Berlin", (2021, 10, 31)), ("America/New_York", (2021, 11, 7)), ("Australia/Sydney", (2022, 4, 3)),
     ("Europe/Berlin", (2021, 3, 28)), ("Asia/Tokyo", (2021, 10, 31))],
)  # fmt: skip
def test_a_clock_that_is_set_back_is_read_in_the_order_of_its_bars(
    tmp_path, zone, day, is_newest_first
):
    """Of exchanges that never close, and of power markets: the second 02:30 is an hour after the first."""
    first = int(datetime(*day, tzinfo=UTC).timestamp()) - 86400
    utc = np.arange(first, first + 3 * 86400, 900)
    utc = utc[::-1] if is_newest_first else utc
    walls = [datetime.fromtimestamp(second, ZoneInfo(zone)) for second in utc.tolist()]
    lines = [f"{wall:%Y-%m-%d %H:%M},{BAR},1" for wall in walls]
    (tmp_path / "x.csv").write_text("\n".join(["time,open,high,low,close,volume", *lines]) + "\n")
    got = read_bars(tmp_path / "x.csv", tz=zone)
    assert not got.refused
    np.testing.assert_array_equal(got.time, np.sort(utc) * 10**9)
    if zone != "Asia/Tokyo" and day[1] != 3 and not is_newest_first:
        with pytest.raises(SourceError, match="time goes backwards") as told:
            read_bars(tmp_path / "x.csv")
        assert "such as --tz Europe/Berlin; or --sort" in told.value.fix


moments = st.datetimes(datetime(1900, 1, 1), datetime(2199, 12, 31), timezones=st.just(UTC))  # noqa: DTZ001


@given(moments.map(lambda m: m.replace(microsecond=0)), st.sampled_from([
    "%Y-%m-%d %H:%M:%S", "%Y.%m.%d %H:%M:%S", "%Y/%m/%d %H:%M:%S", "%Y-%m-%dT%H:%M:%SZ",
    "%d.%m.%Y %H:%M:%S", "%Y%m%d %H%M%S", "%Y%m%d%H%M%S", "%Y-%m-%dT%H:%M:%S+00:00",
    "%Y-%m-%d %H:%M:%S.000000", "%Y%m%d %H:%M:%S",
]))  # fmt: skip
def test_times_are_what_datetime_says(moment, style):
    shown = moment.strftime(style)
    expected = (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    assert parse_time(shown, day_first=True) == int(expected) * 10**9


_CELLS = st.sampled_from(
    ["1.5", "2.25", "1e1", "+1.5", " 2.0", "2.5 ", "-1", "", "nan", "inf", "x", "1,5", "1_0", "0x1",
     "1e400", "1.", ".5", "é", "\x00", "#", "5", "1.5\t", "-", "--", "1e", "NaN", "1 5", "\u0661"]
)  # fmt: skip
STAMPS = (
    ["2020-10-15 12:00", "2020-10-15 12:00:30", "2020-02-30 00:00", "2020-10-15T12:00Z", "2020.10.15 12:07",
     "15/10/2020 12:00", "1/2/2020 9:05", "1602763200", "1602763200000", "20201015 120000", "", " ",
     "2020-10-15 24:00", "# 2020-10-15", "-(2020-10-15 12:00", "2020-10-15", " 2020-10-15 12:09 ",
     "1899-01-01 00:00", "99999999999", "9999999999999999999", "20201315", "2020-10-15 12:00 +0300",
     "2020-10-15 1:05", "2020-1-5 01:05", "2020-10-15 12", "2020-10-15T1205", "2020-10-15 120530",
     "2020-10-15 12:0530", "2020-10-15 1", "2020-10-15T", "2199-12-31 23:59:59", "2200-01-01",
     "1900-01-01", "0000-00-00 00:00", "9999-12-31", "2020-10-15 12:00:00.5", "2020-10-15 12:00:60", "2020-10-15 12:60"]
)  # fmt: skip
_damaged = st.builds(
    lambda stamp, cells, delimiter: delimiter.join([stamp, *cells]),
    st.sampled_from(STAMPS),
    st.lists(_CELLS, min_size=2, max_size=6),
    st.sampled_from([",", ",", ",", ";", "\t"]),
)
_good = st.integers(0, 5000).map(
    lambda i: f"2020-10-{1 + i // 1440:02d} {i // 60 % 24:02d}:{i % 60:02d},{BAR},{i}"
)
_header = st.sampled_from(
    ["", "time,open,high,low,close,volume\n", "# note\ntime,open,high,low,close,volume\n"]
)


def outcome(path, **options):
    try:
        bars = read_bars(path, sort=True, **options)
    except SourceError as error:
        return str(error)
    columns = {name: values.tolist() for name, values in bars.columns.items()}
    refused = sorted((refusal.line or 0, refusal.reason) for refusal in bars.refused)
    return bars.time.tolist(), columns, bars.lines.tolist(), refused, bars.notes


@given(
    _header,
    st.lists(
        st.one_of(_good, _good, _good, _damaged, st.text('0123456789:,.- "#;e', max_size=20)),
        max_size=25,
    ),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_bulk_and_careful_agree(tmp_path_factory, header, body, newline, ends):
    text = header + "\n".join(body) + ("\n" if ends else "")
    path = tmp_path_factory.getbasetemp() / "parity_M1.csv"
    path.write_bytes(text.replace("\n", newline).encode())
    assert outcome(path) == outcome(path, careful=True)


@pytest.mark.parametrize("stamp", STAMPS)
def test_bulk_and_careful_agree_on_every_kind_of_time(tmp_path, stamp):
    """One odd time among ISO ones: the typed way of arrow must not take more than we do."""
    rows = [f"2020-10-15 12:{i:02d},{BAR}" for i in range(4)]
    path = write(tmp_path, "\n".join([*rows, f"{stamp},{BAR}"]))
    assert outcome(path) == outcome(path, careful=True)


@given(
    st.lists(st.floats(1e-6, 1e6, allow_subnormal=False), min_size=4, max_size=12), st.booleans()
)
def test_numbers_survive_text_bit_for_bit(tmp_path_factory, values, comma):
    rows = [f"2020-10-15 12:{i:02d};" + ";".join([repr(v)] * 4) for i, v in enumerate(values)]
    text = "\n".join(rows)
    path = tmp_path_factory.getbasetemp() / "digits_M1.csv"
    path.write_text(text.replace(".", ",") if comma else text)
    assert read_bars(path).columns["close"].tolist() == values


def test_files_of_one_timeframe_are_joined(tmp_path):
    rows = [f"2020-10-15 12:{i:02d},{BAR}" for i in range(30)]
    first = read_bars(write(tmp_path, "\n".join(rows[:20]), "a_M1.csv"))
    second = read_bars(write(tmp_path, "\n".join(rows[15:]), "b_M1.csv"))
    joined = merge_bars([second, first])
    assert joined.time.tolist() == [NOON_NS + i * MINUTE_NS for i in range(30)]
    assert len(joined.refused) == 5


# --- the source --------------------------------------------------------------------------------


def make_minutes(num, seed=0, start=NOON_NS):
    rng = np.random.default_rng(seed)
    close = 1.1 * np.exp(np.cumsum(rng.normal(0, 1e-4, num)))
    opens = np.concatenate([close[:1], close[:-1]])
    high = np.maximum(opens, close) + rng.uniform(0, 1e-4, num)
    low = np.minimum(opens, close) - rng.uniform(0, 1e-4, num)
    time = start + np.arange(num) * MINUTE_NS
    return time, np.stack([opens, high, low, close, rng.integers(1, 99, num).astype(float)], axis=1)


def resample(time, rows, timeframe):
    step = TIMEFRAMES[timeframe]
    groups, first = np.unique(time // step, return_index=True)
    last = np.append(first[1:], len(time)) - 1
    made = np.stack(
        [
            rows[first, 0],
            np.maximum.reduceat(rows[:, 1], first),
            np.minimum.reduceat(rows[:, 2], first),
            rows[last, 3],
            np.add.reduceat(rows[:, 4], first),
        ],
        axis=1,
    )
    return groups * step, made


def write_bars(folder, symbol, timeframe, time, rows):
    stamps = time.astype("M8[ns]").astype("M8[m]").astype(str)
    body = (
        ",".join([stamp.replace("T", " "), *map(repr, row)])
        for stamp, row in zip(stamps.tolist(), rows.tolist(), strict=True)
    )
    (folder / f"{symbol}_{timeframe}.csv").write_text("\n".join(body) + "\n")


WINDOWS = (("M1", 12), ("M5", 6), ("M15", 3))


def write_symbol(folder, symbol, num=900, seed=0, start=NOON_NS):
    minutes = make_minutes(num, seed, start)
    for timeframe, _ in WINDOWS:
        write_bars(folder, symbol, timeframe, *resample(*minutes, timeframe))
    return minutes


def build(source, part=0):
    prepared = source.prepare(None)
    context = PartContext(None, lambda row: None, {})
    return source.build(prepared.parts[part], context), prepared


def test_source_builds_series_samples_and_targets(tmp_path):
    write_symbol(tmp_path, "EURUSD")
    source = BarsSource((tmp_path,), windows=WINDOWS, horizon=4)
    data, prepared = build(source)
    assert [part.label for part in prepared.parts] == ["EURUSD"]
    counts = {name: field.num_samples for name, field in data.fields.items()}
    assert len(set(counts.values())) == 1
    assert set(counts) == {"M1", "M5", "M15", "time", "label_time", "targets", "split", "label_gap"}
    stored = sum(a.nbytes for n, f in data.fields.items() for a in f.arrays(n).values())
    assert stored <= prepared.estimated_bytes <= 3 * stored
    time, split = data.fields["time"].values, data.fields["split"].values
    assert ((time - NOON_NS) % (5 * MINUTE_NS) == 0).all()
    assert (data.fields["label_time"].values - time == 20 * MINUTE_NS).all()
    assert [int((split == kind).sum()) for kind in range(4)] == list(
        data.extra["splits"]["counts"].values()
    )
    close = read_bars(tmp_path / "EURUSD_M5.csv").columns["close"]
    bar = data.extra["dropped"]["window_not_full"] + 3
    np.testing.assert_allclose(
        data.fields["targets"].values[3], np.log(close[bar + 1 : bar + 5] / close[bar]), rtol=1e-5
    )


def test_windows_show_the_last_bars_before_the_decision(tmp_path):
    write_symbol(tmp_path, "EURUSD")
    data, _ = build(BarsSource((tmp_path,), windows=WINDOWS, horizon=4))
    times = data.fields["time"].values
    for name, length in WINDOWS:
        series = data.fields[name]
        assert isinstance(series, Series)
        step = TIMEFRAMES[name]
        for sample in (0, 7, len(times) - 1):
            shown = series.time[series.ends[sample] - length : series.ends[sample]]
            latest = times[sample] // step * step - step  # no gaps: the bar that ended last
            assert shown.tolist() == (latest - step * np.arange(length)[::-1]).tolist()


def test_materialised_bytes_count_what_windows_would_take(tmp_path):
    write_symbol(tmp_path, "EURUSD")
    source = BarsSource((tmp_path,), windows=WINDOWS, horizon=4)
    data, _ = build(source)
    num = data.fields["time"].num_samples
    features = [data.fields[name].rows.shape[1] for name, _ in WINDOWS]
    expected = num * 4 * (12 * features[0] + 6 * features[1] + 3 * features[2] + 4)
    assert source.finish([data.extra])["materialised_bytes"] == expected


def test_rows_are_scaled_by_the_recorded_scaler(tmp_path):
    from stoker.sources.bars import Scaler, apply_scaler, make_features

    write_symbol(tmp_path, "EURUSD")
    source = BarsSource((tmp_path,), windows=WINDOWS, horizon=4)
    data, _ = build(source)
    attributes = json.loads(json.dumps(source.finish([data.extra])))
    for name, _ in WINDOWS:
        bars = read_bars(tmp_path / f"EURUSD_{name}.csv")
        scaler = Scaler.from_json(attributes["scalers"]["EURUSD"][name])
        replayed = apply_scaler(make_features(bars.time, bars.columns, name).rows, scaler)
        series = data.fields[name]
        rows = np.searchsorted(bars.time, series.time)
        np.testing.assert_array_equal(series.rows, replayed[rows])
        assert scaler.columns == series.columns


def test_building_twice_and_after_a_pickle_gives_the_same_bytes(tmp_path):
    write_symbol(tmp_path, "EURUSD")
    source = BarsSource((tmp_path,), windows=WINDOWS, horizon=4)
    first, _ = build(source)
    second, _ = build(pickle.loads(pickle.dumps(source)))
    for name, field in first.fields.items():
        for path, array in field.arrays(name).items():
            np.testing.assert_array_equal(array, second.fields[name].arrays(name)[path])
    assert first.extra == second.extra
    json.dumps(source.options())


def test_symbols_share_the_split_dates(tmp_path):
    write_symbol(tmp_path, "EURUSD", 900)
    write_symbol(tmp_path, "GBPUSD", 1200, seed=5, start=NOON_NS + 60 * MINUTE_NS)
    source = BarsSource((tmp_path,), windows=WINDOWS, horizon=4)
    built = [build(source, part)[0] for part in (0, 1)]
    ends = [
        (data.extra["splits"]["train_end_ns"], data.extra["splits"]["val_end_ns"]) for data in built
    ]
    assert ends[0] == ends[1]
    latest_train = max(
        data.fields["label_time"].values[data.fields["split"].values == TRAIN].max()
        for data in built
    )
    for data in built:
        later = data.fields["time"].values[np.isin(data.fields["split"].values, (1, 2))]
        assert (later > latest_train).all()
    merged = source.finish([data.extra for data in built])
    assert set(merged["scalers"]) == {"EURUSD", "GBPUSD"}


def test_split_at_fixes_the_dates(tmp_path):
    write_symbol(tmp_path, "EURUSD")
    source = BarsSource(
        (tmp_path,), windows=WINDOWS, horizon=4, split_at=("2020-10-15 20:00", "2020-10-15 23:00")
    )
    data, _ = build(source)
    assert data.extra["splits"]["train_end_ns"] == NOON_NS + 8 * HOUR_NS
    with pytest.raises(InputError, match="two times in order"):
        BarsSource((tmp_path,), windows=WINDOWS, split_at=("2020-10-15", "soon"))


def test_latency_keeps_the_newest_bar_back(tmp_path):
    write_symbol(tmp_path, "EURUSD")
    data, _ = build(BarsSource((tmp_path,), windows=WINDOWS, horizon=4, latency_seconds=1))
    m5 = data.fields["M5"]
    closes = m5.time[m5.ends - 1] + m5.duration_ns
    assert (data.fields["time"].values - closes == 5 * MINUTE_NS).all()


def test_a_shifted_clock_is_an_error(tmp_path):
    minutes = write_symbol(tmp_path, "EURUSD", 1500)
    time, rows = resample(*minutes, "M15")
    write_bars(tmp_path, "EURUSD", "M15", time + 2 * HOUR_NS, rows)
    with pytest.raises(SourceError, match=r"runs \+2 h against"):
        build(BarsSource((tmp_path,), windows=WINDOWS, horizon=4))


def test_refusals_reach_the_part(tmp_path):
    write_symbol(tmp_path, "EURUSD")
    path = tmp_path / "EURUSD_M5.csv"
    path.write_text("damaged\n" + path.read_text())
    data, _ = build(BarsSource((tmp_path,), windows=WINDOWS, horizon=4))
    assert [(r.file, r.line) for r in data.refused] == [(str(path), 1)]
    assert data.extra["timeframes"]["M5"]["refused"] == 1


def test_missing_timeframes_names_and_overlap_are_explained(tmp_path):
    write_symbol(tmp_path, "EURUSD")
    with pytest.raises(SourceError, match="EURUSD has no file for H4"):
        BarsSource((tmp_path,), windows=(*WINDOWS, ("H4", 2))).prepare(None)
    with pytest.raises(SourceError, match="no file of bars"):
        BarsSource((tmp_path,), windows=(("D1", 2),)).prepare(None)
    with pytest.raises(SourceError, match="gives no sample"):
        build(BarsSource((tmp_path,), windows=(("M1", 12), ("M15", 500)), horizon=4))
    (tmp_path / "prices.csv").write_text("time,open\n")
    with pytest.raises(SourceError, match="does not name"):
        BarFile.parse(tmp_path / "prices.csv")
    with pytest.raises(SourceError, match=r"(?s)'.*/price.csv' does not exist.*/prices.csv"):
        BarFile.parse(tmp_path / "price.csv")
    labelled = BarFile.parse("eurusd:5m=/data/prices.csv")
    assert (labelled.symbol, labelled.timeframe, str(labelled.path)) == (
        "EURUSD",
        "M5",
        "/data/prices.csv",
    )
    (tmp_path / "EURUSD_M5.csv").rename(tmp_path / "EURUSD_M30.csv")
    with pytest.raises(SourceError, match="name it M5"):
        build(BarsSource((tmp_path,), windows=(("M1", 12), ("M30", 2)), horizon=4))


@pytest.mark.parametrize(
    "wrong",
    [
        {"horizon": 0},
        {"embargo": -1},
        {"latency_seconds": -1.0},
        {"ratios": (0.9, 0.2, 0.1)},
        {"base": "H1"},
    ],
)
def test_bad_options_are_refused(wrong):
    with pytest.raises(InputError):
        BarsSource(("x",), windows=WINDOWS, **wrong)


def test_columns_that_not_every_symbol_has_are_left_out(tmp_path):
    write_symbol(tmp_path, "EURUSD")
    write_symbol(tmp_path, "GBPUSD", seed=2)
    path = tmp_path / "GBPUSD_M5.csv"
    path.write_text("".join(line + ",7\n" for line in path.read_text().splitlines()))
    source = BarsSource((tmp_path,), windows=WINDOWS, horizon=4)
    data, prepared = build(source, part=1)
    assert any("extra_2" in note for note in prepared.notes)
    assert "extra_2" not in data.fields["M5"].columns


def test_targets_are_log_returns():
    close = np.array([1.0, 2.0, 4.0, 2.0])
    got = make_targets(close, np.array([0, 1]), 2)
    np.testing.assert_allclose(got, np.log([[2, 4], [2, 1]]), atol=1e-7)
    assert got.dtype == np.float32


def test_real_bars(shared_data):
    source = BarsSource((shared_data / "bars",))
    data, prepared = build(source)
    assert [part.label for part in prepared.parts] == ["EURUSD"]
    assert [(r.line, r.reason) for r in data.refused] == [(1, "'-(2018-10-12 12:00' is not a time")]
    rows = {name: facts["bars_read"] for name, facts in data.extra["timeframes"].items()}
    assert rows == {"M1": 50_000, "M5": 50_000, "M15": 49_999, "H1": 50_000, "H4": 22_256}
    assert data.fields["time"].num_samples > 9_000
    stored = sum(a.nbytes for n, f in data.fields.items() for a in f.arrays(n).values())
    assert data.extra["materialised_bytes"] > 50 * stored
