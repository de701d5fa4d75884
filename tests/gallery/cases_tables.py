# ruff: noqa: E501  a table: one file a line
"""Tables: CSV and other text, Parquet, Feather."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gallery.case import GalleryCase as Case

KIND = "Tables: `stoker pack table`"
NINES = [
    "Ann A",
    "Bo B",
    "Cy C",
    "Di D",
    "Ed E",
    "Flo F",
    "Gus G",
    "Hal H",
    "Ida I",
    "Jo J",
    "Kim K",
    "Lee L",
]


def rows(header: str, make: Callable[[int], str], count: int = 20) -> str:
    return header + "\n" + "".join(make(number) + "\n" for number in range(count))


def parquet(columns: Mapping[str, Any]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import pyarrow as pa
        from pyarrow import feather
        from pyarrow import parquet as pq

        table = pa.table({name: pa.array(*make) for name, make in columns.items()})
        if path.suffix == ".feather":
            feather.write_feather(table, path)
        else:
            pq.write_table(table, path)

    return write


def broken_page(path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet as pq

    values = pa.table({"a": pa.array(range(1000), pa.int64())})
    pq.write_table(values, path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    place = data.find((500).to_bytes(8, "little"))
    data[place] ^= 0xFF
    path.write_bytes(bytes(data))


def day_files(path: Path) -> None:
    (path / "_spark").mkdir(parents=True)
    for day in range(3):
        (path / f"day{day}.csv").write_text(f"a,b\n{day},2.5\n{day},3.5\n")
    (path / "notes.md").write_text("x")
    (path / "_spark" / "part.csv").write_text("z")


def partitions(path: Path) -> None:
    for year in (2020, 2021):
        (path / f"year={year}").mkdir(parents=True)
        (path / f"year={year}" / "part.csv").write_text("a\n1.5\n2.5\n")


PEOPLE = rows(
    "Name,Sex,Age,Survived",
    lambda n: (
        f"{NINES[n % 12]} {n},{('male', 'female')[n % 2]},{'' if n % 5 == 0 else 20 + n},{n % 2}"
    ),
)
MS = [(1_600_000_000_000 + 60_000 * n, (n, n * n)) for n in range(20)]

CASES = [
    Case("numbers, split by commas, under a header", "packed as float32", "a,b\n1,2.5\n3,4.5\n",
         fields={"features": [[1, 2.5], [3, 4.5]]}, columns=["a", "b"], account=(2, 2, 0, 0)),
    Case("semicolons and decimal commas", "found and said", "a;b\n1,5;2\n3,5;4\n",
         says=["separator semicolon, decimal comma"], fields={"features": [[1.5, 2], [3.5, 4]]}),
    Case("decimal commas and points between thousands", "read as numbers", "a;b\n1.234,5;1\n2.345,5;2\n",
         fields={"features": [[1234.5, 1], [2345.5, 2]]}),
    Case("quoted thousands, `\"1,234\"`", "read as 1234", 'a,b\n"1,234",1\n"2,345",2\n',
         fields={"features": [[1234, 1], [2345, 2]]}),
    Case("tabs", "found and said", "a\tb\n1\t2\n3\t4\n", name="t.tsv", says=["separator tab"], fields={"features": [[1, 2]]}),
    Case("runs of spaces, no header (UCI)", "found and said; columns are c0, c1, ...", " 1.5   2  7\n 2.5   3  9\n",
         name="t.data", says=["runs of spaces", "no header"], columns=["c0", "c1", "c2"], fields={"features": [[1.5, 2, 7]]}),
    Case("a separator that `--sep` names", "as told", "a:b\n1:2\n3:4\n", ["--sep", ":"], fields={"features": [[1, 2]]}),
    Case("no header, all numbers", "every line is a row, and it is said", "6,148,0.6\n1,85,0.3\n8,183,0.7\n",
         says=["no header, so columns are named c0 to c2"], account=(3, 3, 0, 0), fields={"features": [[6, 148, 0.6]]}),
    Case("no header, a text that repeats (iris)", "every line is a row", rows("5.1,3.5,setosa", lambda n: f"{n}.5,{n},{('setosa', 'virginica')[n % 2]}"),
         ["--target", "c2"], attributes={"classes": ["setosa", "virginica"]}, account=(21, 21, 0, 0)),
    Case("a first line of names and years: header or row?", "refused; `--header` or `--no-header` decides",
         "country,2019,2020\nA,1,2\nB,3,4\n", code=2, says=["may be a header or a row", "--no-header"]),
    Case("the same with `--header`", "as told", "country,2019,2020\nA,1,2\nB,3,4\nA,5,6\n", ["--header"],
         columns=["country=A", "country=B", "2019", "2020"]),
    Case("a title, a URL or comments above the header", "ignored, counted and said", "https://example.org/x\n# made 2020\na,b\n1,2\n3,4\n",
         says=["2 lines above the table ignored"], account=(4, 2, 0, 2), columns=["a", "b"]),
    Case("files joined by `cat`, with a header in the middle", "the header is ignored and counted", "a,b\n1,2\n3,4\na,b\n5,6\n",
         says=["ignored 1: repeats the header"], account=(4, 3, 0, 1), fields={"features": [[1, 2], [3, 4], [5, 6]]}),
    Case("Excel's `sep=;` line", "obeyed", "sep=;\na;b\n1;2\n3;4\n", columns=["a", "b"]),
    Case("a header with one name less than the rows have cells (R)", "the first column has no name; left out where it counts the rows",
         rows('"x","y"', lambda n: f'"{n + 1}",{n * n},{n}.5'), says=["'unnamed_0' only counts the rows"], columns=["x", "y"]),
    Case("an index column that pandas saved", "left out and said; `--keep` takes it", rows(",x", lambda n: f"{n},{n * n}"),
         says=["'unnamed_0' only counts the rows and is left out"], columns=["x"]),
    Case("a column that counts the rows under a name", "kept, and said", rows("id,x", lambda n: f"{n + 1},{n * n}"),
         says=["column 'id' counts the rows", "--drop id"], columns=["id", "x"]),
    Case("spaces around names (` Label`)", "do not count, in the file and on the command line", rows(" a, Label", lambda n: f"{n}.5, {'xy'[n % 2]}"),
         ["--target", " Label"], columns=["a"], attributes={"classes": ["x", "y"]}),
    Case("quoted names with spaces and commas", "kept as they are", '"a b","c, d"\n1,2\n3,4\n', columns=["a b", "c, d"]),
    Case("a name that is spelt otherwise", "refused with the closest one", "Label,x\n1,2\n", ["--target", "label"], code=2,
         says=["no column 'label'", "--target Label"]),
    Case("two columns of one name", "refused by name", "a,a\n1,2\n", code=2, says=["two columns called 'a'"]),
    Case("a BOM; CRLF", "read", b"\xef\xbb\xbfa,b\r\n1,2\r\n3,4\r\n", columns=["a", "b"], fields={"features": [[1, 2]]}),
    Case("UTF-16", "found and said", "a,b\n1,2\n3,4\n".encode("utf-16"), says=["encoding utf-16"], columns=["a", "b"]),
    Case("cp1252 or Latin-1", "found and said", rows("name,b", lambda n: f"{('café', 'thé')[n % 2]},{n * n}").encode("cp1252"),
         says=["encoding cp1252"], columns=["name=café", "name=thé", "b"]),
    Case("gzip, whatever the ending", "read", gzip.compress(b"a,b\n1,2\n3,4\n"), fields={"features": [[1, 2]]}),
    Case("an Excel workbook", "refused by name", b"PK\x03\x04rest", name="t.xlsx", code=2, says=["an Excel workbook"]),
    Case("binary noise", "refused", bytes(range(256)) * 4, code=2, says=["it is not text"]),
    Case("an empty file", "refused", "", code=2, says=["is empty"]),
    Case("a header without rows", "refused", "a,b\n", code=2, says=["holds no rows"]),
    Case("text with few values", "a column of 0 and 1 for each (up to 16 values)", rows("city,x", lambda n: f"{('Rome', 'Oslo')[n % 2]},{n}.5"),
         columns=["city=Oslo", "city=Rome", "x"], fields={"features": [[0, 1, 0.5], [1, 0, 1.5]]}),
    Case("text with more values", "codes from 1 (up to 1,000 values); 0 is missing or new", rows("t,x", lambda n: f"w{n % 20:02d},{n}.5", 60),
         columns=["t", "x"], fields={"features": [[1, 0.5], [2, 1.5]]}),
    Case("text that differs in every row; a missing number", "refused in one message, with all that is to be typed", PEOPLE,
         ["--target", "Survived"], code=2, says=["'Name' holds text that is different", "'Age' has no value in 4 rows", "--drop Name --missing median"]),
    Case("the same, as the message says", "packed; numbers filled with the training median", PEOPLE,
         ["--target", "Survived", "--drop", "Name", "--missing", "median"], columns=["Sex=female", "Sex=male", "Age"], account=(20, 20, 0, 0)),
    Case("missing numbers, `--missing flag`", "filled, and marked in a column of their own", PEOPLE,
         ["--target", "Survived", "--drop", "Name", "--missing", "flag"], columns=["Sex=female", "Sex=male", "Age", "Age_missing"]),
    Case("missing numbers, `--missing drop`", "their rows are ignored, counted and listed", PEOPLE,
         ["--target", "Survived", "--drop", "Name", "--missing", "drop"], account=(20, 16, 0, 4)),
    Case("missing numbers, nothing said", "refused by the gate, with the repairs for all columns", rows("a,b", lambda n: f"{n if n else ''},{n if n != 1 else 'NA'}"),
         code=3, says=["--repair fill:median@a --repair fill:median@b"]),
    Case("missing texts", "no column of 0 and 1 is set", rows("city,x", lambda n: f"{('Rome', 'Oslo', '')[n % 3]},{n}.5"),
         columns=["city=Oslo", "city=Rome", "x"], fields={"features": [[0, 1, 0.5], [1, 0, 1.5], [0, 0, 2.5]]}),
    Case("true/false, yes/no", "1 and 0", rows("ok,x", lambda n: f"{('Yes', 'no')[n % 2]},{n}.5"), columns=["ok", "x"], fields={"features": [[1, 0.5], [0, 1.5]]}),
    Case("dates with times", "days since 1970, month, weekday, second of the day", rows("when,x", lambda n: f"2020-01-{n + 1:02d} 10:{n:02d},{n}.5"),
         columns=["when_days", "when_month", "when_weekday", "when_seconds", "x"], fields={"features": [[18262, 1, 2, 36000, 0.5]]}),
    Case("months, `1949-01`", "the first of the month", rows("m,x", lambda n: f"{1949 + n}-01,{n}.5"), columns=["m_days", "m_month", "m_weekday", "x"]),
    Case("numbers and texts in one column (`A/5 21171`, `113803`)", "refused by name", rows("t,x", lambda n: f"{'A/' if n % 3 else ''}{n}17,{n}.5").replace("A/117", "117").replace("A/417", "417").replace("A/717", "717").replace("A/1017", "1017").replace("A/1317", "1317"), code=2,
         says=["'t' holds numbers, and texts such as", "--drop t"]),
    Case("dates, `--dtype when=seconds`", "seconds since 1970 as float64", rows("when,x", lambda n: f"2020-01-{n + 1:02d},{n}.5"),
         ["--dtype", "when=seconds"], columns=["when", "x"], fields={"features": [[1577836800, 0.5]]}),
    Case("day-first dates with a proof (13/10/2020)", "read day-first", rows("when,x", lambda n: f"{n + 1:02d}/02/2020,{n}.5"),
         fields={"features": [[18293, 2, 5, 0.5]]}),
    Case("dates that read both ways", "refused; `--dtype NAME=day-first` decides", rows("when,x", lambda n: f"{n % 9 + 1:02d}/02/2020,{n}.5"), code=2,
         says=["read day-first and month-first", "--dtype when=day-first"]),
    Case("milliseconds, ids: whole numbers above 2^24", "the table is float64, and it is said", rows("ts,x", lambda n: f"{MS[n][0]},{n * n}"),
         says=["ts needs float64", "stored as float64"], fields={"features": [[ms, square] for ms, (_, square) in MS]}),
    Case("whole numbers above 2^53", "refused by name", rows("k,x", lambda n: f"{2**60 + n},{n}.5"), code=2, says=["'k' holds whole numbers above 2**53", "--drop k"]),
    Case("the same, `--dtype k=codes`", "a code for each value", rows("k,x", lambda n: f"{2**60 + n},{n}.5"), ["--dtype", "k=codes"], columns=["k", "x"], fields={"features": [[1, 0.5], [2, 1.5]]}),
    Case("a column of the result is dropped (`Sex=male`)", "left out", rows("Sex,x", lambda n: f"{('male', 'female')[n % 2]},{n}.5"), ["--drop", "Sex=male"], columns=["Sex=female", "x"]),
    Case("a target of a few whole numbers", "classes, and it is said", rows("x,y", lambda n: f"{n}.5,{n % 3}"), ["--target", "y"],
         says=["target 'y': 3 classes (0, 1, 2); --dtype y=number"], attributes={"classes": ["0", "1", "2"]}, fields={"targets": [0, 1, 2]}),
    Case("the same, `--dtype y=number`", "numbers to be predicted", rows("x,y", lambda n: f"{n}.5,{n % 3}"), ["--target", "y", "--dtype", "y=number"],
         attributes={"classes": []}, fields={"targets": [0.0, 1.0, 2.0]}),
    Case("a target of many numbers", "numbers to be predicted", rows("x,y", lambda n: f"{n}.5,{n * n}.25"), ["--target", "y"], says=["target 'y': numbers"], attributes={"classes": []}),
    Case("a target of texts or yes/no", "classes with their names", rows("x,y", lambda n: f"{n}.5,{('no', 'yes')[n % 2]}"), ["--target", "y"],
         attributes={"classes": ["no", "yes"]}, fields={"targets": [0, 1, 0]}),
    Case("a row without a target", "refused with its row", rows("x,y", lambda n: f"{n}.5,{'ab'[n % 2] if n else ''}"), ["--target", "y", "--on-bad", "quarantine", "--bad-budget", "5%"],
         account=(20, 19, 1, 0)),
    Case("a word in a column of numbers", "the row is refused, with the word and the row", rows("a,b", lambda n: f"{n}.5,{'six' if n == 6 else n * n}"), code=3,
         says=["row 6: column 'b' holds 'six', not a number"]),
    Case("a line with too many or too few cells", "refused, with the line", rows("a,b", lambda n: f"{n}.5,{n * n}" + (",7" if n == 6 else "")),
         ["--on-bad", "quarantine", "--bad-budget", "5%"], account=(20, 19, 1, 0), says=["refused 1: lines without 2 cells"]),
    Case("a folder of day files", "joined in the order of their names; other files counted and said", day_files, name="days",
         says=["ignored 1: ends in '.md', which is no table", "ignored 1: hidden or system file"], account=(6, 6, 0, 0), fields={"features": [[0, 2.5], [0, 3.5], [1, 2.5]]}),
    Case("a folder with `year=2020/` inside (Hive)", "the folder's name becomes a column", partitions, name="data", columns=["a", "year"], fields={"features": [[1.5, 2020]]}),
    Case("Parquet: booleans, dates, times, durations, decimals, dictionaries", "numbers", parquet({
        "b": ([True, False, True],), "d": ([1, 2, 3], "date32"), "t": ([1_000_000, 2, 3], "time64[us]"), "u": ([1000, 2, 3], "duration[ms]"),
        "k": (["x", "y", "x"],)}), name="t.parquet", columns=["b", "d_days", "d_month", "d_weekday", "t", "u", "k=x", "k=y"],
        fields={"features": [[1, 1, 1, 4, 1, 1, 1, 0]]}),
    Case("Parquet: timestamps of nanoseconds", "read exactly", parquet({"t": ([1, 1_000_000_001, 2], "timestamp[ns]")}), name="t.parquet",
         columns=["t_days", "t_month", "t_weekday", "t_seconds"], fields={"features": [[0, 1, 3, 1e-9], [0, 1, 3, 1.000000001]]}),
    Case("Parquet: structs, lists, bytes, nulls", "refused by name, all in one message", parquet({
        "a": ([1, 2],), "s": ([{"x": 1}, {"x": 2}],), "l": ([[1], [2]],), "b": ([b"x", b"y"],), "n": ([None, None],)}), name="t.parquet", code=2,
        says=["'s' holds struct<x: int64>", "'l' holds list", "'b' holds binary", "'n' holds no value at all", "--drop s --drop l --drop b --drop n"]),
    Case("Parquet with a damaged page and page checksums", "refused", broken_page, name="t.parquet", code=2, says=["cannot be read as a table"]),
    Case("Feather", "read", parquet({"a": ([1, 2],), "b": ([0.5, 1.5],)}), name="t.feather", fields={"features": [[1, 0.5]]}),
    Case("JSON lines", "read; a name that a line lacks is a missing value", rows('{"a": 0.5, "b": true}', lambda n: f'{{"a": {n}.25, "b": false}}'), name="t.jsonl",
         columns=["a", "b"], fields={"features": [[0.5, 1], [0.25, 0]]}),
    Case("-200 or -999 among other numbers", "packed as numbers, with a warning and what to type", rows("a,b", lambda n: f"{n * n}.5,{-200 if n % 4 == 0 else n / 8}"),
         says=["5 of 20 values are -200, which may stand for a missing value", "--missing-code b=-200 --missing median"]),
    Case("the same, `--missing-code b=-200`", "missing values", rows("a,b", lambda n: f"{n * n}.5,{-200 if n % 4 == 0 else n / 8}"),
         ["--missing-code", "b=-200", "--missing", "zero"], fields={"features": [[0.5, 0], [1.5, 0.125]]}),
    Case("thousands by an apostrophe or a narrow space", "numbers", rows("a,b", lambda n: f"1'{n + 100}.5,{n * n}"), fields={"features": [[1100.5, 0], [1101.5, 1]]}),
    Case("a budget that would leave nothing", "refused: a store has at least one sample", rows("a,b", lambda n: f"{n}.5,"), ["--on-bad", "quarantine", "--bad-budget", "100%", "--dtype", "b=number"], code=3,
         says=["no sample is left"]),
]  # fmt: skip
