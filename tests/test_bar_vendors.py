# ruff: noqa: E501
"""Files of bars as vendors write them: names decide, both readers agree, noise gives errors of ours."""

from __future__ import annotations

import shlex
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.errors import InputError, SourceError, StokerError
from stoker.sources.bars import Naming, read_bars
from stoker.sources.bars.dialects import clean_name, is_adjusted, split_ticker
from stoker.sources.bars.timeframes import DAY_NS, HOUR_NS, describe_spacing

NAMES = (
    "Date",
    "Open",
    "High",
    "Low",
    "Close",
    "Volume",
    "Adj Close",
    "complete",
    "symbol",
    "close_time",
    "Extra",
)


def cells(day: int, symbol: str) -> dict[str, str]:
    return {
        "Date": f"2020-01-{day + 1:02d}", "Open": f"{day + 1.25}", "High": f"{day + 2.75}", "Low": f"{day + 0.5}",
        "Close": f"{day + 1.75}", "Volume": str(100 + day), "Adj Close": "9", "complete": "True", "symbol": symbol,
        "close_time": f"2020-01-{day + 2:02d}", "Extra": str(day),
    }  # fmt: skip


def both(path: Path, **named):
    """Read a file in bulk and line by line; they must agree in everything."""
    bulk, careful = (read_bars(path, careful=way, **named) for way in (False, True))
    assert bulk.time.tolist() == careful.time.tolist()
    assert {name: values.tolist() for name, values in bulk.columns.items()} == {
        name: values.tolist() for name, values in careful.columns.items()
    }
    assert (bulk.refused, bulk.notes) == (careful.refused, careful.notes)
    assert (bulk.ignored, bulk.num_lines) == (careful.ignored, careful.num_lines)
    # Every line is a bar, refused or ignored.
    assert bulk.num_lines == len(bulk) + len(bulk.refused) + sum(bulk.ignored.values())
    return bulk


@given(
    order=st.permutations(NAMES[1:]),
    num_kept=st.integers(4, 10),
    broken=st.sampled_from(["", "NULL", "n/a", "1e999"]),
    blank=st.booleans(),
)
def test_names_decide_whatever_the_order(order, num_kept, broken, blank):
    names = [
        *("Date", "Open", "High", "Low", "Close"),
        *[name for name in order if name not in NAMES[:5]][: num_kept - 4],
    ]
    names = sorted(names, key=["Date", *order].index)
    rows = [cells(day, "EURUSD") for day in range(12)]
    rows[5]["Extra"] = broken or rows[5]["Extra"]
    rows[-1]["complete"] = "False"
    lines = [",".join(names), *(",".join(row[name] for name in names) for row in rows)]
    lines += [""] if blank else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "EURUSD_D1.csv"
        path.write_text("\n".join(lines) + "\n")
        bars = both(path)
    count = 11 if "complete" in names else 12
    assert bars.columns["close"].tolist() == [day + 1.75 for day in range(count)]
    assert bars.columns["open"].tolist() == [day + 1.25 for day in range(count)]
    extras = set(bars.columns) - {"open", "high", "low", "close"}
    wanted = {"Volume"} | (set() if broken else {"Extra"})
    assert extras == {name.lower() for name in names if name in wanted}
    if "complete" in names:
        assert [refusal.reason for refusal in bars.refused] == ["the bar is not complete"]


@given(symbols=st.lists(st.sampled_from(["AA", "BB", "CC"]), min_size=12, max_size=30))
def test_one_symbol_of_several(symbols):
    symbols = ["AA", "BB", *symbols]
    seen: dict[str, int] = {}
    lines = ["symbol,Date,Open,High,Low,Close"]
    for symbol in symbols:
        day = seen[symbol] = seen.get(symbol, -1) + 1
        row = cells(day % 28, symbol)
        lines.append(
            ",".join(
                [
                    symbol,
                    f"20{20 + day // 28}-01-{day % 28 + 1:02d}",
                    *(row[name] for name in NAMES[1:5]),
                ]
            )
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ALL_D1.csv"
        path.write_text("\n".join(lines) + "\n")
        for symbol, last in seen.items():
            bars = both(path, naming=Naming(ticker=symbol))
            assert len(bars) == last + 1
            assert bars.ignored.get("lines of other symbols", 0) == len(symbols) - len(bars)


@given(data=st.binary(max_size=300))
@example(b'"2020-01-01","1,2"\n')
@example(b"Price,Close,High,Low,Open\nTicker,A,A,A,A\nDate,,,,\n")
@example(b"PAR1")
def test_noise_gives_bars_or_an_error_of_ours(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "EURUSD_D1.csv"
        path.write_bytes(data)
        try:
            both(path)
        except StokerError:
            return


@given(price=st.decimals(1000, 10**9, places=2), decimal=st.sampled_from([".", ",", None]))
def test_quoted_numbers_with_groups(price, decimal):
    text = f'"{price:,.2f}"' if decimal != "," else f'"{price}"'.replace(".", ",")
    row = f'"2020-01-01",{text},{text},{text},{text},"5.5K"\n'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "EURUSD_D1.csv"
        path.write_text('"Date","Price","Open","High","Low","Vol."\n' + row)
        bars = both(path, decimal=decimal)
    assert bars.columns["close"].tolist() == [float(price)]
    assert bars.columns["volume"].tolist() == [5500]


@pytest.mark.parametrize(
    ("name", "stem", "ticker", "adjusted"),
    [
        ("Close", "close", "", False),
        ("Close_AAPL", "close", "aapl", False),
        ("('Close', 'BTC-USD')", "close", "btc_usd", False),
        ("AAPL.Open", "open", "aapl", False),
        ("Adj Close", "adj_close", "", True),
        ("AdjVolume", "adjvolume", "", True),
        ("AAPL.Adjusted", "adjusted", "aapl", True),
        ("close_time", "close_time", "", False),
        ("Adjective", "adjective", "", False),
    ],
)
def test_names_are_taken_apart(name, stem, ticker, adjusted):
    assert split_ticker(clean_name(name)) == (stem, ticker)
    assert is_adjusted(clean_name(name)) == adjusted


@pytest.mark.parametrize(
    ("bar", "remedy"),
    [
        ("2020-04-{:02d} 11:00:00 EDT,1,2,0.5,1", "in UTC or with its offset"),
        ("2020-04-{:02d} 11:00:00-04:00,1 EUR,2 EUR,0.5 EUR,1 EUR", "without signs and units"),
    ],
)
def test_lines_that_do_not_read_under_a_known_header_are_shown(tmp_path, bar, remedy):
    path = tmp_path / "X_D1.csv"
    bars = "\n".join(bar.format(day) for day in range(1, 9))
    path.write_text(f"Datetime,Open,High,Low,Close\n{bars}\n")
    with pytest.raises(
        SourceError, match="do not read as bars; one is '2020-04-08 11:00"
    ) as caught:
        read_bars(path)
    assert remedy in str(caught.value)


def test_columns_that_the_user_names(tmp_path):
    path = tmp_path / "X_D1.csv"
    rows = [cells(day, "x") for day in range(5)]
    path.write_text("Tag;Uhr;E;H;T;S;Open\n" + "".join(
        f"{row['Date']};00:00;{row['Open']};{row['High']};{row['Low']};{row['Close']};7\n" for row in rows))  # fmt: skip
    with pytest.raises(SourceError, match="names no low, close; it has Tag, Uhr, E, H, T, S, Open"):
        read_bars(path)
    naming = Naming.parse("Tag+Uhr", "open=E,high=H,low=T,close=S", ["open_2"])
    bars = both(path, naming=naming)
    assert bars.columns["open"].tolist() == [day + 1.25 for day in range(5)]
    assert list(bars.columns) == ["open", "high", "low", "close"]
    path.write_text("2020-01-01,1,2,0.5,1\n2020-01-02,1,2,0.5,1\n")
    with pytest.raises(SourceError, match="no header with the columns"):
        read_bars(path, naming=naming)
    for wrong in ("open", "open=", "=x", "Open Price=x"):
        with pytest.raises(InputError, match="--columns is"):
            Naming.parse(None, wrong, ())


def test_bars_of_other_lengths_among_them_are_told():
    days = np.arange(100) * DAY_NS
    assert describe_spacing(days, "D1", "f") == []
    mixed = np.concatenate([days, days[-1] + np.arange(1, 9) * HOUR_NS])
    assert (
        "8 bars open before the bar before them has closed" in describe_spacing(mixed, "D1", "f")[0]
    )
    weekly = np.concatenate([days, days[-1] + np.arange(1, 40) * 7 * DAY_NS])
    assert "are W1 apart, not D1" in describe_spacing(weekly, "D1", "f")[0]


def write_bars(path, header, columns, tail=""):
    """Write 40 bars of an hour; `columns` makes the cells of one from its time and its prices."""
    lines = [header]
    for number in range(40):
        time, prices = f"2024-01-{number // 24 + 1:02d} {number % 24:02d}:00", (2.0, 3.0, 1.0, 2.5)
        lines.append(columns(number, time, prices))
    path.write_text("\n".join([*lines, tail]))
    return path


def test_the_advice_for_an_unknown_header_finds_its_columns(tmp_path):
    """The first column only counts the rows: it was advised as the time."""
    path = write_bars(
        tmp_path / "x.csv",
        "Index,Start Date,Open Price,High Price,Low Price,Latest,Volume,End Date",
        lambda n, time, prices: f"{n},{time},{','.join(map(str, prices))},{n},{time}:59",
    )
    with pytest.raises(SourceError, match="names no") as told:
        read_bars(path)
    _, time, _, columns = shlex.split(told.value.fix)
    bars = read_bars(path, naming=Naming.parse(time, columns, ()))
    assert bars.columns["close"].tolist() == [2.5] * 40
    assert bars.time[1] - bars.time[0] == 3600 * 10**9


def test_further_columns_of_one_name_are_numbered(tmp_path):
    """Change and %Change: the file was refused, with an advice about its prices."""
    path = write_bars(
        tmp_path / "x.csv",
        "Time,Open,High,Low,Close,Change,%Change,$Change",
        lambda n, time, prices: f"{time},{','.join(map(str, prices))},{n},0.5,{n + 1}",
    )
    columns = read_bars(path).columns
    assert [columns[name][3] for name in ("change", "change_2", "change_3")] == [3, 0.5, 4]


def test_archives_and_json_are_no_bars(tmp_path):
    """A zip whose file is not compressed was read as text: its first bar was lost, without the header's names."""
    path = write_bars(
        tmp_path / "x.csv", "", lambda n, time, prices: f"{time},{','.join(map(str, prices))}"
    )
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(path)
    with pytest.raises(SourceError, match="is a zip archive") as told:
        read_bars(tmp_path / "x.zip")
    assert told.value.fix.startswith("unzip")
    (tmp_path / "x.json").write_text(
        '{"time": 1, "open": 2, "high": 3, "low": 1, "close": 2}\n' * 9
    )
    with pytest.raises(SourceError, match="is lines of JSON"):
        read_bars(tmp_path / "x.json")


def test_years_of_two_digits_are_named_as_such(tmp_path):
    path = write_bars(
        tmp_path / "x.csv",
        "Date,Open,High,Low,Close",
        lambda n, time, prices: f"{n % 28 + 1}-Jan-22,{','.join(map(str, prices))}",
    )
    with pytest.raises(SourceError, match="do not read as bars") as told:
        read_bars(path)
    assert told.value.fix.startswith("years of four digits")
