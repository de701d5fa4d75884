"""Options of a table, and one pass over all its rows: what columns become, and all problems in one message.

Enters: the pieces of a table as they are read. Leaves: the `Column`s with the texts of the training rows, the classes
of the target, notes for the user; or one error that names every column that cannot be packed. Costs: a sample of 8,192
rows is read closely; of the others only text columns and long whole numbers are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stoker.display import quoted
from stoker.errors import RefusalList, SourceError
from stoker.sources.contract import PlainSource
from stoker.sources.tables.columns import (
    CODE_VALUES,
    FEW_CLASSES,
    MOST_CLASSES,
    ONE_HOT_VALUES,
    Column,
    Unusable,
    are_signed_numbers,
    as_numpy,
    as_text,
    find_kind,
    is_text,
    judge_texts,
    needs_float64,
    numbers,
    plain,
    refuse_type,
    trimmed,
)
from stoker.sources.tables.layout import SEPARATORS, TextOptions, header_advice, parse_number
from stoker.sources.tables.reading import TableFile, batches, shown_names
from stoker.units import format_count

_SAMPLE_ROWS = 8192
_LONG_DIGITS = 8  # digits of 2**24: float32 holds 2**24 + 1 as 2**24
_LISTED = 6
_TEXT_KINDS = ("category", "one-hot", "codes")
"""Kinds that have a code for a missing value; in the others it is NaN."""


@dataclass(frozen=True)
class Target:
    """The column to be predicted."""

    name: str  # in the files
    # class names, in the order of their numbers; () where numbers are predicted
    classes: tuple[str, ...] = ()
    is_wide: bool = False  # numbers that need float64
    words: tuple[str, ...] = ()  # texts that are classes here, though `NULLS` has them


@dataclass(frozen=True)
class TableOptions(PlainSource):
    """Options of a table; `TableSource` documents each of them."""

    paths: tuple[Path | str, ...]
    target: str | None = None
    drop: tuple[str, ...] = ()
    split: tuple[float, ...] = ()
    part_rows: int = 200_000
    keep: tuple[str, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    missing: str = "stop"
    text: TextOptions = field(default_factory=TextOptions)
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    codes: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Survey:
    """Collects facts about all rows before any of them is turned into numbers.

    Spaces around a typed name are ignored.

    Raises:
        SourceError: A name is not in the file (the error has the closest one), or no column is left.
    """

    def __init__(self, asked: TableOptions, first: TableFile) -> None:
        self._path, self._target = first.path, asked.target
        self._missing, self._dtypes = asked.missing, dict(asked.dtypes)
        self._words = {name.strip(): tuple(words) for name, words in asked.words.items()}
        dropped, self._keep = (
            {name.strip() for name in names} for names in (asked.drop, asked.keep)
        )
        self._check_names(asked, first.names)
        if self._target in dropped:
            raise SourceError(
                f"{self._path}: column {self._target!r} is the target, and is to be dropped.",
                "a target that is kept, which is no feature anyway; or a table without one",
                "leave --drop out",
            )
        for name, words in self._words.items():
            kind = self._dtypes.setdefault(name, "category")
            if kind not in _TEXT_KINDS:
                raise SourceError(
                    f"{name!r} is to keep the text {words[0]!r}, and to be of the type {kind}.",
                    "a text as a value only in a column of texts",
                    f"--dtype {quoted(name + '=category')}",
                )
        # columns for features; one that the user keeps is not left out as a row index
        self.names = [
            name
            for name in first.names
            if name != self._target
            and name not in dropped
            and (not asked.keep or name in self._keep)
        ]
        self.wanted = [*self.names, *([self._target] if self._target else [])]
        # Dropped names that are no columns of the files: parts that such a column becomes.
        self._parts = [name.strip() for name in asked.drop if name.strip() not in first.names]
        self._columns: dict[str, Column] = {}
        self._whole: set[str] = set()
        self._gaps: set[str] = set()
        self._texts: dict[str, list[set[str]]] = {}
        self._target_texts: set[str] | None = set()
        self._target_decimal, self._target_is_wide = ".", False
        self.notes: list[str] = []  # what a user should know about the columns
        if not self.names:
            raise self._nothing_left()

    def _check_names(self, asked: TableOptions, all_names: Sequence[str]) -> None:
        """Raise if a typed name is not in the file, with the closest names that are."""
        ends = {
            "--target": dict.fromkeys([asked.target] if asked.target else [], ""),
            "--drop": dict.fromkeys(asked.drop, ""),
            "--keep": dict.fromkeys(asked.keep, ""),
            "--dtype": {name: f"={kind}" for name, kind in asked.dtypes.items()},
            "--value": {name: f"={words[0]}" for name, words in self._words.items()},
            "--missing-code": {
                n.strip(): f"={each[0]:g}" for n, each in asked.codes.items() if n.strip()
            },
        }
        unknown = []
        for option, names in ends.items():
            for name in names:
                # A part of a column may be dropped: "Sex=male", "When_month".
                wholes = (name.partition("=")[0].strip(), name.rpartition("_")[0].strip())
                is_part = option == "--drop" and any(each in all_names for each in wholes)
                if name.strip() not in all_names and not is_part:
                    unknown.append((option, name))
        if unknown:
            typed = [
                f"{option} {near}{ends[option][name]}"
                for option, name in unknown
                if (near := header_advice(all_names, name))
            ]
            # The name of the only column holds the wanted one: the separator is wrong.
            only, wanted = all_names[0] if len(all_names) == 1 else "", unknown[0][1].strip()
            signs = SEPARATORS.items()
            sep = next((word for word, sign in signs if wanted in only.split(sign)), None)
            raise SourceError(
                f"{self._path} has no column {', '.join(repr(name) for _, name in unknown)}.",
                shown_names(all_names),
                f"--sep {quoted(sep)}" if sep else " ".join(typed) or f"leave {unknown[0][0]} out",
            )

    def _nothing_left(self) -> SourceError:
        given = f"{self._path} has no feature columns left."
        return SourceError(given, "at least one", "drop fewer columns")

    def check_types(self, file: TableFile) -> None:
        """Raise if a column's type cannot be packed: by the schema, before the file is decoded."""
        types = {name: file.types[name] for name in self.wanted if name in file.types}
        found = [refuse_type(name, kind) for name, kind in types.items()]
        nested = [each for each in found if each is not None]
        if nested:
            # Look at some rows of the others, to report all problems at once.
            others = [name for name in self.wanted if name not in {each.name for each in nested}]
            rows = next(batches(file, RefusalList(), others), None) if others else None
            table = pa.table({}) if rows is None else pa.Table.from_batches([rows]).select(others)
            self._decide(table, file.decimal, nested)

    def look(self, table: Any, decimal: str) -> None:
        """Look at one piece of rows; the first one decides the kinds."""
        if not self._columns:
            self._decide(table, decimal)
        for name, column in self._columns.items():
            cells = table.column(name)
            if column.kind in _TEXT_KINDS:
                words = self._words.get(name, ())
                if _num_known(cells, words) < len(cells):
                    self._gaps.add(name)
                seen = _different(cells, CODE_VALUES + 1, words)
                self._texts.setdefault(name, []).append(seen)
                continue
            is_wide, has_flag = column.is_wide, column.has_flag
            if name in self._whole and not is_wide and _is_long(cells):
                values, _ = numbers(cells, name, decimal)
                is_wide = needs_float64(values)
            if self._missing == "flag" and not has_flag:
                has_flag = _num_known(cells) < len(cells)
            if (is_wide, has_flag) != (column.is_wide, column.has_flag):
                self._columns[name] = replace(column, is_wide=is_wide, has_flag=has_flag)
        if self._target and self._target_texts is not None:
            words, cells = self._words.get(self._target, ()), table.column(self._target)
            self._target_texts |= _different(cells, MOST_CLASSES + 1, words)
            if len(self._target_texts) > MOST_CLASSES:
                self._target_texts = None

    def _decide(self, table: Any, decimal: str, refused: Sequence[Unusable] = ()) -> None:
        rows = np.unique(
            np.linspace(0, table.num_rows - 1, min(table.num_rows, _SAMPLE_ROWS)).astype(np.int64)
        )
        sample = table.take(rows) if len(rows) < table.num_rows else table
        problems: list[Unusable] = list(refused)
        blank: dict[str, int] = {}
        for name in [name for name in self.names if name in table.column_names]:
            found = find_kind(name, sample.column(name), decimal, self._dtypes.get(name))
            if isinstance(found, Unusable):
                problems.append(found)
                continue
            # An index that a library has saved: without a name, and with numbers that count the rows.
            joined = name.lower().replace(":", "_").replace(" ", "")
            unnamed = name.lower() in ("index", "level_0") or joined.startswith("unnamed_")
            is_index = unnamed and _counts_rows(sample.column(name), name, ".", rows)
            if is_index and name not in self._keep:
                self.notes.append(
                    f"column {name!r} only counts the rows and is left out (--keep would take it)"
                )
                continue
            self._columns[name] = found
            if found.kind == "number":
                values, _ = numbers(sample.column(name), name, decimal)
                finite = values[np.isfinite(values)]
                if len(finite) and (finite == np.rint(finite)).all():
                    self._whole.add(name)
            if found.kind not in _TEXT_KINDS and self._missing == "stop":
                count = len(rows) - _num_known(sample.column(name))
                blank |= {name: count} if count else {}
        if self._target in table.column_names:
            problems += self._judge_target(sample.column(self._target), decimal)
        if problems:
            unusable = {problem.name for problem in problems if problem.option == "drop"}
            if unusable >= set(self.names):  # dropping them all would only be refused again
                if len(self.names) == 1 and (sep := _other_separator(sample)):
                    raise SourceError(
                        f"{self._path} has one column, {self.names[0]!r}, of texts that differ.",
                        "the separator between its cells",
                        f"--sep {quoted(sep)}",
                    )
                raise SourceError(
                    f"{self._path} has no column that can be packed:",
                    "numbers, true and false, dates, texts that repeat",
                    "stoker.pack_from(SAMPLES, OUT), with samples from code of your own",
                    [f"{problem.name!r} {problem.what}" for problem in problems],
                )
            raise _problem_error(self._path, problems, blank, len(rows), table.num_rows)
        if not self._columns:
            raise self._nothing_left()
        wide = [
            name for name, each in self._columns.items() if each.kind == "number" and each.is_wide
        ]
        if wide:
            needs = "needs" if len(wide) == 1 else "need"
            self.notes.append(
                f"{shown_names(wide, _LISTED)} {needs} float64: float32 would lose some of the values"
            )
        self._remark(sample, decimal, rows)

    def _remark(self, sample: Any, decimal: str, rows: Any) -> None:
        """Note columns of whole numbers that may be no quantities: codes, and numbers of rows."""
        for name in self._columns:
            if name in self._whole and (code := _code_in(sample.column(name))):
                as_code = f"--dtype {quoted(name + '=category')}"
                self.notes.append(
                    f"column {name!r} holds numbers such as {code!r}: if they are codes, {as_code}"
                )
            if name in self._whole and _counts_rows(sample.column(name), name, decimal, rows):
                self.notes.append(
                    f"column {name!r} counts the rows: if it is a number of the row, --drop {quoted(name)}"
                )

    def _judge_target(self, column: Any, decimal: str) -> list[Unusable]:
        assert self._target is not None
        self._target_decimal = decimal
        asked = self._dtypes.get(self._target)
        found = find_kind(self._target, column, decimal, asked)
        if isinstance(found, Column):
            self._target_is_wide = found.is_wide
            if found.kind in ("date", "seconds"):
                return [Unusable(found.name, "is the target and holds dates", "target")]
            return []
        # Text that is different in most rows makes no classes, unless the user says so.
        if is_text(column.type) and asked is not None:
            return []
        is_named = is_text(column.type) and not are_signed_numbers(trimmed(column).to_pylist())
        option = "classes" if is_named else "target"
        return [Unusable(found.name, f"is the target and {found.what}", option)]

    def finish(
        self, cut: int | None, firsts: Sequence[int], reread: Any
    ) -> tuple[list[Column], Target | None]:
        """Return the columns with the texts of the training rows, and the target.

        Args:
            cut: First row after the training rows; None where all rows are for training.
            firsts: First row of every piece, and the number of all rows.
            reread: Returns the table of a piece by its number; called for the piece that the cut divides.
        """
        made, problems = [], []
        for name, column in self._columns.items():
            if column.kind not in _TEXT_KINDS:
                made.append(column)
                continue
            sets, words = [], self._words.get(name, ())
            for number, texts in enumerate(self._texts[name]):
                if cut is None or firsts[number + 1] <= cut:
                    sets.append(texts)
                elif firsts[number] < cut:
                    cells = reread(number).column(name).slice(0, cut - firsts[number])
                    sets.append(_different(cells, CODE_VALUES + 1, words))
            values = tuple(sorted(set().union(*sets)))
            total = firsts[-1] if cut is None else cut
            kind = self._dtypes.get(name)
            if kind == "category":
                kind = "one-hot" if len(values) <= ONE_HOT_VALUES else "codes"
            judged: Column | Unusable
            if len(values) > CODE_VALUES:
                judged = Unusable(name, f"holds more than {CODE_VALUES:,} different texts")
            elif kind is not None:
                judged = Column(name, kind)
            else:
                judged = judge_texts(name, len(values), total, values[0] if values else "")
            if isinstance(judged, Unusable):
                problems.append(judged)
            else:
                made.append(
                    replace(judged, values=values, is_full=name not in self._gaps, words=words)
                )
        if problems:
            raise _problem_error("the table", problems, {}, firsts[-1], firsts[-1])
        made = [
            replace(each, without=tuple(name for name in self._parts if name in each.all_outputs))
            for each in made
        ]
        lost = [name for name in self._parts if not any(name in each.without for each in made)]
        if lost or not any(each.outputs for each in made):
            raise SourceError(
                f"there is no column {', '.join(map(repr, lost))} to drop."
                if lost
                else "no feature columns are left.",
                shown_names([name for each in made for name in each.all_outputs]),
                "a name of this list",
            )
        outputs = [name for each in made for name in each.outputs]
        twice = [name for name, count in Counter(outputs).items() if count > 1]
        if twice:
            raise SourceError(
                f"two columns would be called {', '.join(map(repr, twice))}: one of the file, and a part of another.",
                "different names",
                "rename one of them in the file",
            )
        target = self._finish_target(firsts[-1])
        self.notes += describe(made, target)
        self.notes += [
            f"column {each.name!r} holds numbers with signs or units, such as {each.values[-1]!r}, and is packed as "
            f"text: without them it is a column of numbers"
            for each in made
            if are_signed_numbers(each.values)
        ]
        return made, target

    def _finish_target(self, num_rows: int) -> Target | None:
        if self._target is None:
            return None
        asked = self._dtypes.get(self._target)
        if asked in ("number", "float64") or self._target_texts is None:
            return Target(self._target, (), asked == "float64" or self._target_is_wide)
        values = {text: parse_number(text, self._target_decimal) for text in self._target_texts}
        known = np.array(sorted({value for value in values.values() if value is not None}))
        if len(known) and None not in values.values():
            is_whole = bool(np.isfinite(known).all() and (known == np.rint(known)).all())
            few = 2 <= len(known) <= FEW_CLASSES and 2 * len(known) <= num_rows
            if asked is None and not (is_whole and few):
                return Target(self._target, (), needs_float64(known))
            return Target(self._target, tuple(map(class_name, known.tolist())))
        words = self._words.get(self._target, ())
        return Target(self._target, tuple(sorted(values)), words=words)


def class_name(value: float) -> str:
    """Return the name of a class that is a number: whole numbers without a point."""
    return str(int(value)) if np.isfinite(value) and value == np.rint(value) else repr(float(value))


def describe(columns: Sequence[Column], target: Target | None) -> list[str]:
    """Return in words what the columns and the target become."""
    lines = []
    for kind, words in (
        ("bool", "true or false, as 1 and 0"),
        ("one-hot", "text, a column of 0 and 1 for each value"),
        ("codes", "text, as a code for each value"),
        ("date", "dates, as days since 1970, month, weekday and second of the day"),
        ("seconds", "dates, as seconds since 1970"),
    ):
        names = [column.name for column in columns if column.kind == kind]
        if names:
            lines.append(f"{shown_names(names, _LISTED)}: {words}")
    if any(column.is_wide for column in columns):
        lines.append("features are stored as float64, twice the size of float32")
    if target is not None and target.classes:
        shown = ", ".join(target.classes[:_LISTED])
        shown += ", ..." if len(target.classes) > _LISTED else ""
        line = f"target {target.name!r}: {len(target.classes)} classes ({shown})"
        if all(parse_number(name, ".") is not None for name in target.classes):
            line += f"; --dtype {quoted(target.name + '=number')} would predict numbers"
        lines.append(line)
    elif target is not None:
        lines.append(
            f"target {target.name!r}: numbers; --dtype {quoted(target.name + '=category')} would make classes"
        )
    return lines


def _problem_error(
    path: Any,
    problems: Sequence[Unusable],
    blank: Mapping[str, int],
    num_looked: int,
    num_rows: int,
) -> SourceError:
    details = [f"{problem.name!r} {problem.what}" for problem in problems]
    about = "" if num_looked == num_rows else f" of the {num_looked:,} rows that were looked at"
    details += [
        f"{name!r} has no value in {count:,}{about or ' rows'}" for name, count in blank.items()
    ]
    options = {
        "drop": "--drop {0}",
        "date": "--dtype {0}=day-first (or month-first)",
        "classes": "--dtype {0}=category",
        "target": "a file whose {0} holds plain numbers, or --target with another column",
    }
    typed = [options[problem.option].format(quoted(problem.name)) for problem in problems]
    typed += ["--missing median"] if blank else []
    count = format_count(len(problems) + len(blank), "column")
    return SourceError(
        f"{path}: {count} cannot be packed as they are:"
        if len(details) > 1
        else f"{path}: a column cannot be packed:",
        "numbers, true and false, dates, texts that repeat; a value in every row, or --missing",
        " ".join(typed),
        details,
    )


def _other_separator(sample: Any) -> str | None:
    """Return a sign that stands equally often in the name and all texts of a single column: "^" in "a^b"."""
    texts = [sample.column_names[0], *map(str, sample.column(0).slice(0, 50).to_pylist())]
    signs = (sign for sign in "^~:!#&@%$*+=/\x01" if texts[0].count(sign))
    return next((sign for sign in signs if len({each.count(sign) for each in texts}) == 1), None)


def _different(column: Any, most: int, words: Sequence[str]) -> set[str]:
    """Return the different texts of a column, at most `most` of them; `words` count as values."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if is_text(column.type) and not pa.types.is_dictionary(column.type):
        column = column.unique()  # before trimming, which costs more for each row
    texts = as_text(column, words).unique().drop_null()
    return set(texts.slice(0, most).to_pylist())


def _num_known(column: Any, words: Sequence[str] = ()) -> int:
    column = plain(column)
    if is_text(column.type):
        column = trimmed(column, words)
    if pa.types.is_floating(column.type):
        return int(np.isfinite(as_numpy(column.cast(pa.float64()))).sum())
    return int(len(column) - column.null_count)


def _is_long(column: Any) -> bool:
    column = plain(column)
    if is_text(column.type):
        longest = pc.max(pc.binary_length(column)).as_py()
        return longest is not None and longest >= _LONG_DIGITS
    return not pa.types.is_integer(column.type) or column.type.bit_width > 16


def _code_in(column: Any) -> str | None:
    """Return a number that begins with a 0, as postal codes do and quantities do not."""
    if not is_text(column.type):
        return None
    texts = trimmed(plain(column)).drop_null().unique()
    found = texts.filter(pc.match_substring_regex(texts, "^0[0-9]+$"))
    code: str | None = found[0].as_py() if len(found) else None
    return code


def _counts_rows(column: Any, name: str, decimal: str, rows: Any) -> bool:
    """Tell whether a column is the number of its row, from 0 or from 1."""
    if len(rows) < 10:
        return False
    values, bad = numbers(column, name, decimal)
    if len(bad) or values[0] not in (0, 1):
        return False
    return bool((values == rows - rows[0] + values[0]).all())
