# ruff: noqa: E501, E741  a table: one file a line; open, high, low, close are o, h, l, c
"""Bars of every vendor, and what goes wrong with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from gallery.case import GalleryCase

KIND = "Bars: `stoker pack bars`"
START = datetime(2020, 10, 12, tzinfo=UTC)
COUNT = 60
SMALL = ["--windows", "D1=4", "--horizon", "2", "--embargo", "0"]
# The first decision is the close of day 3; its returns tell which column was taken as the close.
TARGETS = {"targets": [[math.log(104.75) - math.log(103.75), math.log(105.75) - math.log(103.75)]]}
Case = partial(
    GalleryCase, options=SMALL, name="AAPL_D1.csv", verb=("pack", "bars"), fields=TARGETS
)


def prices(day: int) -> tuple[float, float, float, float]:
    """Open, high, low, close; each recognisable, and never equal to another."""
    return 100.25 + day, 101.75 + day, 99.5 + day, 100.75 + day


def day(number: int, form: str = "%Y-%m-%d") -> str:
    return (START + timedelta(days=number)).strftime(form)


def lines(
    header: str, make: Callable[[int, float, float, float, float], str], count: int = COUNT
) -> str:
    return header + "".join(make(n, *prices(n)) + "\n" for n in range(count))


def plain(header: str = "Date,Open,High,Low,Close,Volume\n") -> str:
    return lines(header, lambda n, o, h, l, c: f"{day(n)},{o},{h},{l},{c},{1000 + n}")


def typed(path: Path) -> None:
    import pyarrow as pa
    from pyarrow import feather, parquet

    table = pa.table({
        "Open": [prices(n)[0] for n in range(COUNT)], "High": [prices(n)[1] for n in range(COUNT)],
        "Low": [prices(n)[2] for n in range(COUNT)], "Close": [prices(n)[3] for n in range(COUNT)],
        "Volume": [1000 + n for n in range(COUNT)],
        "Date": pa.array([START + timedelta(days=n) for n in range(COUNT)], pa.timestamp("ns", "UTC")),
    })  # fmt: skip
    (feather.write_feather if path.suffix == ".feather" else parquet.write_table)(table, path)


def investing() -> str:
    return lines(
        '"Date","Price","Open","High","Low","Vol.","Change %"\n',
        lambda n, o, h, l, c: (
            f'"{day(COUNT - n, "%b %d, %Y")}","{c + 1000:,.2f}","{o + 1000:,.2f}","{h + 1000:,.2f}","{l + 1000:,.2f}","{n + 1}.50K","-0.35%"'
        ),
    )


def with_cell(number: int, text: str) -> str:
    return lines(
        "Date,Open,High,Low,Close,Extra\n",
        lambda n, o, h, l, c: f"{day(n)},{o},{h},{l},{c},{text if n == number else n}",
    )


CASES = [
    Case("a header of usual names, in any order", "packed", lines("close,low,high,open,date\n", lambda n, o, h, l, c: f"{c},{l},{h},{o},{day(n)}"),
         account=(60, 55, 0, 5), says=["60 decisions (base bars) found = 55 packed", "ignored 3: bars with too few bars before them", "ignored 2: bars whose label would end after the data"]),
    Case("a header without open, high, low, close", "refused with the names that it has; `--time-column` and `--columns` decide", lines("Datum,Schluss,Erster,Hoch,Tief\n", lambda n, o, h, l, c: f"{day(n)},{c},{o},{h},{l}"), code=2,
         says=["its header names no open, high, low, close; it has Datum, Schluss, Erster, Hoch, Tief", "--time-column Datum --columns open=NAME"]),
    Case("the same with `--time-column` and `--columns`", "packed as told", lines("Datum,Schluss,Erster,Hoch,Tief\n", lambda n, o, h, l, c: f"{day(n)},{c},{o},{h},{l}"),
         options=[*SMALL, "--time-column", "Datum", "--columns", "open=Erster,high=Hoch,low=Tief,close=Schluss"], account=(60, 55, 0, 5)),
    Case("CryptoDataDownload: a URL above the header, `Unix`, `Date`, `Symbol`", "the line is ignored and counted", "https://www.CryptoDataDownload.com\n" + lines("Unix,Date,Symbol,Open,High,Low,Close,Volume BTC,Volume USD\n", lambda n, o, h, l, c: f"{int((START + timedelta(days=n)).timestamp())},{day(n)} 12-AM,BTC/USD,{o},{h},{l},{c},1,{n}"),
         says=["ignored 1: lines above the header"], account=(60, 55, 0, 5)),
    Case("no header", "taken as time, open, high, low, close, volume; it is said", plain(""), says=["no header; columns taken as time, open, high, low, close, volume"], account=(60, 55, 0, 5)),
    Case("yfinance: `Adj Close`", "left out: it is adjusted by what came later", says=["column 'Adj Close' is left out: it is adjusted"], write=lines("Date,Open,High,Low,Close,Adj Close,Volume\n", lambda n, o, h, l, c: f"{day(n)},{o},{h},{l},{c},{c / 2},{n}"), account=(60, 55, 0, 5)),
    Case("yfinance: three header lines", "joined", lines("Price,Close,High,Low,Open,Volume\nTicker,AAPL,AAPL,AAPL,AAPL,AAPL\nDate,,,,,\n", lambda n, o, h, l, c: f"{day(n)},{c},{h},{l},{o},{n}"), account=(60, 55, 0, 5), says=["ignored 3: header lines"]),
    Case("yfinance: `Close_AAPL,High_AAPL,…`", "names without the ticker", lines("Date,Close_AAPL,High_AAPL,Low_AAPL,Open_AAPL,Volume_AAPL\n", lambda n, o, h, l, c: f"{day(n)},{c},{h},{l},{o},{n}"), account=(60, 55, 0, 5)),
    Case("yfinance: several tickers in columns", "each packed by itself", lines("Price,Close,Close,High,High,Low,Low,Open,Open\nTicker,AAPL,MSFT,AAPL,MSFT,AAPL,MSFT,AAPL,MSFT\nDate,,,,,,,,\n", lambda n, o, h, l, c: f"{day(n)},{c},{c},{h},{h},{l},{l},{o},{o}"),
         name="ALL_D1.csv", account=(120, 110, 0, 10), says=["2 symbols in one file (aapl, msft)"]),
    Case("several tickers in rows (`Name`, `symbol`)", "each packed by itself", lines("date,open,high,low,close,volume,Name\n", lambda n, o, h, l, c: f"{day(n)},{o},{h},{l},{c},5,AAL\n{day(n)},{o},{h},{l},{c},5,AAPL"),
         name="ALL_D1.csv", account=(120, 110, 0, 10), says=["2 symbols in one file (AAL, AAPL)", "122 lines of D1 found"]),
    Case("Investing.com: `Price`, month names, `1,234.5`, `12.5K`, newest first", "read; `Price` is the close", investing(), account=(60, 55, 0, 5), fields={"targets": [[math.log(1155.75) - math.log(1156.75), math.log(1154.75) - math.log(1156.75)]]}),
    Case("quoted `110,123` in every price", "refused: a thousand or a decimal comma? `--decimal` decides", lines("", lambda n, o, h, l, c: f'"{day(n)}","{110 + n},250","{110 + n},500","{110 + n},125","{110 + n},375"'), code=2, says=["may be a decimal comma or a thousand"]),
    Case("Binance klines without a header", "known: the close time is no feature", lines("", lambda n, o, h, l, c: f"{int((START + timedelta(days=n)).timestamp()) * 1000},{o},{h},{l},{c},7,{int((START + timedelta(days=n + 1)).timestamp()) * 1000 - 1},9,10,3,4,0"), account=(60, 55, 0, 5)),
    Case("Kraken: seconds, seven columns", "read", lines("", lambda n, o, h, l, c: f"{int((START + timedelta(days=n)).timestamp())},{o},{h},{l},{c},0.5,{n + 1}"), account=(60, 55, 0, 5)),
    Case("Dukascopy: `Gmt time`, `15.10.2020 12:00:00.000`", "read", lines("Gmt time,Open,High,Low,Close,Volume\n", lambda n, o, h, l, c: f"{day(n, '%d.%m.%Y')} 00:00:00.000,{o},{h},{l},{c},1.5"), account=(60, 55, 0, 5)),
    Case("HistData: `20201015 120000;…`", "read", lines("", lambda n, o, h, l, c: f"{day(n, '%Y%m%d')} 000000;{o};{h};{l};{c};0"), account=(60, 55, 0, 5)),
    Case("Oanda: `mid.o`, `complete`", "read; a bar that is not complete is refused", lines("time,volume,complete,mid.o,mid.h,mid.l,mid.c\n", lambda n, o, h, l, c: f"{day(n)}T00:00:00.000000000Z,5,{n < COUNT - 1},{o},{h},{l},{c}"),
         options=[*SMALL, "--on-bad", "quarantine", "--bad-budget", "2%"], says=["refused 1: the bar is not complete"], account=(59, 54, 0, 5)),
    Case("MT5 export: `<DATE> <TIME> …`", "read", lines("<DATE>\t<TIME>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<TICKVOL>\t<VOL>\t<SPREAD>\n", lambda n, o, h, l, c: f"{day(n, '%Y.%m.%d')}\t00:00:00\t{o}\t{h}\t{l}\t{c}\t5\t0\t7"), account=(60, 55, 0, 5)),
    Case("MT4: `2020.10.15,12:00,…`", "read", lines("", lambda n, o, h, l, c: f"{day(n, '%Y.%m.%d')},00:00,{o},{h},{l},{c},5"), account=(60, 55, 0, 5)),
    Case("Stooq: `<TICKER>,<PER>,…`", "read", lines("<TICKER>,<PER>,<DATE>,<TIME>,<OPEN>,<HIGH>,<LOW>,<CLOSE>,<VOL>,<OPENINT>\n", lambda n, o, h, l, c: f"AAPL.US,D,{day(n, '%Y%m%d')},000000,{o},{h},{l},{c},5,0"), account=(60, 55, 0, 5)),
    Case("AM and PM", "read", lines("Date,Open,High,Low,Close\n", lambda n, o, h, l, c: f"{day(n, '%m/%d/%Y')} 12:00 AM,{o},{h},{l},{c}"), account=(60, 55, 0, 5)),
    Case("`id,timestamp,time,open,…`", "the first that reads as a time is the time; the others are no features", lines("id,timestamp,time,open,high,low,close\n", lambda n, o, h, l, c: f"{n},{int((START + timedelta(days=n)).timestamp())},{day(n)},{o},{h},{l},{c}"), account=(60, 55, 0, 5)),
    Case("only a close time", "a bar opens its length before", lines("close_time,open,high,low,close\n", lambda n, o, h, l, c: f"{int((START + timedelta(days=n + 1)).timestamp()) * 1000 - 1},{o},{h},{l},{c}"), account=(60, 55, 0, 5), fields=TARGETS | {"time": [(int((START + timedelta(days=4)).timestamp())) * 10**9]}),
    Case("times of closes, `--stamp close`", "a bar opens its length before", plain(), options=[*SMALL, "--stamp", "close"], account=(60, 55, 0, 5), fields=TARGETS | {"time": [(int((START + timedelta(days=3)).timestamp())) * 10**9]}),
    Case("Parquet, columns in any order", "read", typed, name="AAPL_D1.parquet", account=(60, 55, 0, 5)),
    Case("Feather", "read", typed, name="AAPL_D1.feather", account=(60, 55, 0, 5)),
    Case("NULL in one further column", "the column is left out, not the bar", with_cell(30, "NULL"), says=["column 'extra' is left out: 1 of 60 bars", "'NULL' in line 32"], account=(60, 55, 0, 5)),
    Case("a column that shall not be a feature, `--drop`", "left out", with_cell(-1, ""), options=[*SMALL, "--drop", "Extra"], account=(60, 55, 0, 5)),
    Case("`--drop` of a column that no file has", "refused with those that there are", with_cell(-1, ""), options=[*SMALL, "--drop", "Extras"], code=2, says=["no file has a column 'Extras'", "--drop extra"]),
    Case("a word in a price", "the bar is refused with its line", plain().replace(",101.75,", ",high,", 1).replace("101.25,102.75", "101.25,oops", 1), code=3, says=["oops", "refused"]),
    Case("a file named D1 with bars of an hour", "refused: bars would be seen before they close", lines("Date,Open,High,Low,Close\n", lambda n, o, h, l, c: f"{(START + timedelta(hours=n)):%Y-%m-%d %H:%M},{o},{h},{l},{c}"), code=2, says=["is named D1, but its bars are mostly 60 min apart"]),
    Case("some bars of a shorter timeframe in a file", "a warning with their number", plain() + "".join(f"{START + timedelta(days=COUNT, hours=n):%Y-%m-%d %H:%M},100,101,99,100,5\n" for n in range(1, 9)), says=["bars open before the bar before them has closed"]),
]  # fmt: skip
