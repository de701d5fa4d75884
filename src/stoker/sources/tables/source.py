"""`stoker pack table`: rows of CSV, Parquet and Feather files as one table of numbers and its target.

Enters: text files in any layout, Parquet or Feather files with the same columns; folders and patterns of them. Leaves:
`features` (rows, columns) float32, or float64 where a column needs it, with the names of its columns; `targets` where a
target column is named, as class numbers when it is text or a few whole numbers; `split` when shares are given. What
every column became is in the manifest (`attributes["table"]`), and `stoker predict` does the same to new rows. Costs: a
streaming read and as much scratch space as the files; one part of rows in memory per worker.

Missing numbers become NaN and are left to the quality gate, which reports them, unless `missing` says otherwise. A row
with a cell that cannot be read is refused with its place; a column that cannot be used is refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stoker import bounds
from stoker.display import first_names, quoted
from stoker.errors import InputError, Refusal, RefusalList, SourceError
from stoker.ownership import always, writing
from stoker.sources.contract import (
    Json,
    Part,
    PartContext,
    PartData,
    Preparation,
    check_shares,
)
from stoker.sources.tables.columns import (
    KINDS,
    Column,
    Fault,
    as_numpy,
    as_text,
    encode,
    is_text,
    needs_float64,
    numbers,
    places_in,
    plain,
    refuse_type,
    without_codes,
)
from stoker.sources.tables.layout import NULLS, parse_number
from stoker.sources.tables.reading import (
    TableFile,
    batches,
    find_files,
    open_tables,
    shown_names,
    told_decimal,
)
from stoker.sources.tables.survey import Survey, TableOptions, Target, class_name
from stoker.store.fields import Array, Dense, FieldData
from stoker.units import format_count

_PIECE = "table-{:05d}.arrow"
_SPLITS = ("train", "val", "test")
_EMPTY = "no value in any column"
_EXPECTED = 5
"""If a split should have this many rows of a class by its share, having none is not chance (1 in 150)."""
_PART_BYTES = 512 << 20
"""Most bytes of a part, so that it fits in memory and in Arrow's limit of 2 GiB of text per column."""
MISSING = ("stop", "flag", "drop", "keep")
"""What happens to missing numbers: the gate refuses them; a further column marks them; their rows are left out."""


@dataclass(frozen=True)
class TableSource(TableOptions):
    """Rows of tables.

    Attributes:
        paths: Files, folders or patterns ("day*.csv"), one after the other.
        target: Column to predict; None for a table without one.
        drop: Columns to leave out.
        split: Shares of train, validation and test, by row order in blocks; empty for no split.
        part_rows: Rows per part, and so per shard.
        keep: Only these columns (and the target); empty for all.
        dtypes: Column to kind, where the values do not say it; see `columns.KINDS`.
        missing: What happens to missing numbers; see `MISSING`. "keep" is "stop" for a store that repairs them.
        text: How text files are written, where it should not be detected.
        words: By column, texts that are values there, although they usually mean a missing one: `{"a": ["None"]}`.
        codes: By column, numbers that stand for a missing value: `{"a": [-999]}`; "" is every column.
    """

    kind: ClassVar[str] = "table"
    version: ClassVar[int] = 5

    def __post_init__(self) -> None:
        check_shares(self.split)
        if self.missing not in MISSING:
            raise InputError(f"missing is {self.missing!r}.", ", ".join(MISSING), "missing='flag'")
        wrong = [kind for kind in self.dtypes.values() if kind not in KINDS]
        if wrong:
            raise InputError(
                f"a dtype is {wrong[0]!r}.", ", ".join(KINDS), "dtypes={'NAME': 'category'}"
            )
        if self.target is not None:
            object.__setattr__(self, "target", self.target.strip())

    def files(self) -> Sequence[Path]:
        """Every table file, also those of folders and patterns."""
        return [path for path, _ in find_files(self.paths)[0]] if self.paths else []

    def prepare(self, scratch: Path) -> Preparation:
        """Read the files once as a stream, leaving Arrow pieces in `scratch` for `build`.

        A CSV cannot be read from the middle (a quoted cell may hold line breaks), so it is cut in one
        pass. Workers do the slow half: turning text into numbers.
        """
        if not self.paths:
            raise SourceError(
                "no table files were given.",
                "CSV or Parquet files",
                "stoker pack table FILE.csv OUT",
            )
        paths, ignored = find_files(self.paths)
        files = open_tables(paths, self.text)
        survey = Survey(self, files[0])
        _check_alike(files, survey.wanted)
        survey.check_types(files[0])
        pieces: list[tuple[TableFile, int, int]] = []  # a file, the first row in it, and how many
        refused = RefusalList()
        for file in files:
            row = 0
            for table in self._parts_of(file, refused, survey.wanted):
                survey.look(table, file.decimal)
                bounds.require_disk(scratch, table.nbytes, f"rows of {file.path}")
                _write_piece(scratch, len(pieces), table)
                pieces.append((file, row, table.num_rows))
                row += table.num_rows
        if not pieces:
            raise SourceError(
                f"{files[0].path} holds no rows.",
                "a header and at least one row",
                "name other files",
            )
        *firsts, total = accumulate((count for _, _, count in pieces), initial=0)
        cuts = tuple(round(total * share) for share in np.cumsum(self.split))[:2]
        columns, target = survey.finish(
            cuts[0] if cuts else None, [*firsts, total], partial(_read_piece, scratch)
        )
        plan = RowPlan.of(columns, target)
        parts = []
        for number, (file, row, count) in enumerate(pieces):
            label, payload = (
                f"{file.path} rows {row}-{row + count}",
                (plan, file.decimal, firsts[number], cuts, told_decimal(files)),
            )
            parts.append(Part(number, label, count, payload, str(file.path), row))
        size = total * (len(plan.outputs) * plan.dtype.itemsize + 12) + (1 << 20)
        lines = sum(file.layout.preamble for file in files if file.layout)
        about = {"lines above the table": lines} if lines else {}
        notes = [*_said(files, ignored), *survey.notes]
        found = total + sum(refusal.count for refusal in refused) + lines
        return Preparation(parts, size, refused, notes, found, about, "rows")

    def build(self, part: Part, context: PartContext) -> PartData:
        """Turn one piece into numbers; rows with cells that cannot be read are refused."""
        plan, decimal, first, cuts, told = part.payload
        table = _read_piece(context.scratch, part.index)
        faults: dict[int, Fault] = {}
        features, unseen = plan.features(table, decimal, faults, part.file)
        fields: dict[str, FieldData] = {"features": Dense(features, plan.outputs)}
        if plan.target is not None:
            fields["targets"] = Dense(plan.targets(table, decimal, faults))
        if cuts:
            rows = np.arange(first, first + table.num_rows)
            fields["split"] = Dense(np.searchsorted(cuts, rows, side="right").astype(np.uint8))
        asked = {}
        # The only column of a table is worth a word where it has no value.
        for row in plan.empty_rows(table, features, True) if table.num_columns > 1 else ():
            faults.pop(row, None)
            asked[row] = Fault("", _EMPTY, _EMPTY)
        if self.missing == "drop" and plan.target is not None:
            blank_target = _no_target(plan.target.name)
            for row in [row for row, fault in faults.items() if fault == blank_target]:
                asked[row] = faults.pop(row)
        _check_columns(faults, table, part.file)
        if self.missing == "drop":
            blank = np.isnan(features)
            for row in set(np.flatnonzero(blank.any(axis=1)).tolist()) - {*faults, *asked}:
                column = plan.outputs[int(blank[row].argmax())]
                reason = f"no value in column {column!r}"
                asked[row] = Fault(column, reason, reason)
        refused = [
            Refusal(
                part.file, part.first_row + row, fault.reason, "row", 1, fault.kind, row in asked
            )
            for row, fault in sorted({**asked, **faults}.items())
        ]
        keep = np.ones(table.num_rows, dtype=bool)
        keep[[*asked, *faults]] = False
        extra: dict[str, Json] = {"unseen": {name: len(rows) for name, rows in unseen.items()}}
        if part.index == 0:
            extra["table"] = {
                **plan.to_json(),
                "text": asdict(self.text),
                "decimal": told,
                "codes": {name: list(codes) for name, codes in self.codes.items()},
            }
        kept = {name: data.keep(keep) for name, data in fields.items()}
        if cuts and plan.target is not None and plan.target.classes:
            split, targets = kept["split"].values, kept["targets"].values
            extra["in_split"] = _count_classes(split, targets, plan.target)
        return PartData(kept, refused, extra)

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Record what the columns became, and the class names in the order of their numbers."""
        table = dict(extras[0]["table"]) if extras else {}
        unseen: Counter[str] = Counter()
        for extra in extras:
            unseen.update(extra["unseen"])
        if unseen:
            table["unseen"] = dict(unseen)
        target = {"classes": table["classes"], "target": self.target} if self.target else {}
        counts = [np.array(extra["in_split"]) for extra in extras if "in_split" in extra]
        notes = _tell_of_order(sum(counts[1:], counts[0]), self, table["classes"]) if counts else []
        return {"table": table, **target, **({"notes": notes} if notes else {})}

    def _parts_of(
        self, file: TableFile, refused: RefusalList, wanted: Collection[str]
    ) -> Iterator[Any]:
        """Yield tables of `part_rows` rows; the last one, and those that would exceed `_PART_BYTES`, have fewer."""
        waiting: list[Any] = []
        rows = 0
        for batch in batches(file, refused, wanted):
            batch = without_codes(batch, self.codes, file.decimal) if self.codes else batch
            waiting.append(batch)
            rows += batch.num_rows
            while rows >= self.part_rows:
                table = pa.Table.from_batches(waiting)
                yield table.slice(0, self.part_rows).combine_chunks()
                waiting = table.slice(self.part_rows).to_batches()
                rows -= self.part_rows
            if rows and sum(each.nbytes for each in waiting) >= _PART_BYTES:
                yield pa.Table.from_batches(waiting).combine_chunks()
                waiting, rows = [], 0
        if rows:
            yield pa.Table.from_batches(waiting).combine_chunks()


def _count_classes(split: Array, targets: Array, target: Target) -> Json:
    """Return the number of rows of each class in train, val and test."""
    known = targets >= 0
    places = split[known].astype(np.int64) * len(target.classes) + targets[known]
    counts = np.bincount(places, minlength=len(_SPLITS) * len(target.classes))
    return [row.tolist() for row in counts.reshape(len(_SPLITS), -1)]


def _tell_of_order(counts: Array, source: TableSource, classes: Sequence[str]) -> list[str]:
    """Return a note for each split without any row of a frequent class: the file is ordered by class."""
    notes = []
    for name, row in zip(_SPLITS, counts, strict=True):
        expected = row.sum() * counts.sum(axis=0) / max(1, counts.sum())
        is_absent = (row == 0) & (expected >= _EXPECTED)
        absent = [each for each, is_none in zip(classes, is_absent, strict=True) if is_none]
        if absent:
            notes.append(
                f"{name} has no row of {shown_names(absent, 6)}: --split goes by the order of rows, and they are "
                f"ordered by {source.target!r}. Without --split, training draws a split at random"
            )
    return notes


@dataclass(frozen=True)
class RowPlan:
    """How each row of a table is encoded: the same for packing and for prediction."""

    columns: tuple[Column, ...]
    target: Target | None
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, columns: Sequence[Column], target: Target | None) -> RowPlan:
        """Return the plan, with a dtype that fits all columns."""
        dtype = np.dtype("<f8" if any(column.is_wide for column in columns) else "<f4")
        return cls(tuple(columns), target, dtype)

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> RowPlan:
        """Return the plan that `to_json` wrote. The numbers of a target are float64."""
        words = tuple(data.get("target_words", ()))
        name = data.get("target")
        target = Target(name, tuple(data["classes"]), True, words) if name else None
        return cls(tuple(map(Column.from_json, data["columns"])), target, np.dtype(data["dtype"]))

    def to_json(self) -> dict[str, Json]:
        """Return plain values, for the manifest and for checkpoints."""
        return {
            "columns": [column.to_json() for column in self.columns],
            "dtype": self.dtype.str,
            "target": self.target.name if self.target else None,
            "classes": list(self.target.classes) if self.target else [],
            "target_words": list(self.target.words) if self.target else [],
        }

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the columns of `features`."""
        return tuple(name for column in self.columns for name in column.outputs)

    def features(
        self, table: Any, decimal: str, faults: dict[int, Fault], path: str
    ) -> tuple[Array, dict[str, Array]]:
        """Return the numbers of a table's rows, `(rows, outputs)`.

        Rows that cannot be read are added to `faults`, with the reason.

        Returns:
            The numbers, and per column the rows with a text that the training rows did not have.
        """
        made = np.empty((table.num_rows, len(self.outputs)), self.dtype)
        unseen: dict[str, Array] = {}
        place = 0
        for column in self.columns:
            values, unknown = encode(table.column(column.name), column, decimal, faults)
            if column.kind == "number" and not column.is_wide and self.dtype == np.float32:
                _check_narrow(values[:, 0], column.name, path)
            # 1e300 becomes inf, which the gate reports; a signalling NaN becomes a quiet one.
            with np.errstate(over="ignore", invalid="ignore"):
                made[:, place : place + values.shape[1]] = values
            place += values.shape[1]
            if len(unknown):
                unseen[column.name] = unknown
        return made, unseen

    def empty_rows(self, table: Any, features: Array, whole: bool = False) -> list[int]:
        """Return the rows without a value in any column of the plan; or `whole`, in any column of the file.

        Filled, they would be samples that nobody has measured: spreadsheets are saved with rows of separators only.
        """
        marks = [name == f"{each.name}_missing" for each in self.columns for name in each.outputs]
        blank = np.flatnonzero((np.isnan(features) | (features == 0) | marks).all(axis=1))
        words = {each.name: each.words for each in self.columns}
        if self.target is not None:
            words[self.target.name] = self.target.words
        names = table.column_names if whole else [each.name for each in self.columns]
        for name in names:
            if len(blank):
                cells = table.column(name).take(pa.array(blank))
                if refuse_type(name, cells.type) is None:  # no list, and no bytes
                    cells = as_text(cells, words.get(name, ()))
                blank = blank[~as_numpy(cells.is_valid())]
        rows: list[int] = blank.tolist()
        return rows

    def targets(self, table: Any, decimal: str, faults: dict[int, Fault]) -> Array:
        """Return the targets of a table's rows: numbers of classes, -1 for unknown ones; or values."""
        assert self.target is not None
        name, classes = self.target.name, self.target.classes
        column = table.column(name)
        missing = _no_target(name)
        if not classes:
            values, _ = numbers(column, name, decimal, faults)
            for row in np.flatnonzero(np.isnan(values)).tolist():
                faults.setdefault(row, missing)
            return values.astype(np.float64 if self.target.is_wide else np.float32)
        texts = as_text(column, self.target.words)
        if all(parse_number(each, ".") is not None for each in classes):
            encoded = texts.dictionary_encode()
            known = {text: parse_number(text, decimal) for text in encoded.dictionary.to_pylist()}
            names = [None if value is None else class_name(value) for value in known.values()]
            texts = pa.array(names, pa.string()).take(encoded.indices)
        found, _ = places_in(texts, classes)
        words = _missing_words(column)
        for row in np.flatnonzero(found < 0).tolist():
            word = words[row] if words is not None else None
            option = f"--value {quoted(f'{name}={word}')}"
            told = f"{missing.reason}: {word!r} is read as missing ({option} makes it a class)"
            faults.setdefault(row, missing._replace(reason=told) if word else missing)
        return found


def _no_target(name: str) -> Fault:
    return Fault(name, f"no value in the target column {name!r}", "no value in the target")


def _check_narrow(values: Array, name: str, path: str) -> None:
    """Raise if float32 would change whole numbers: none of the sampled rows had such numbers."""
    finite = values[np.isfinite(values)]
    large = finite[np.abs(finite) > 1 << 24]
    if len(large) and (finite == np.rint(finite)).all() and needs_float64(large):
        raise SourceError(
            f"{path}: column {name!r} holds whole numbers such as {large[0]:.0f}, which float32 turns into others.",
            "float64 for such a column",
            f"--dtype {quoted(name + '=float64')}",
        )


def _missing_words(column: Any) -> list[str | None] | None:
    """Return for each row the word that marks a missing value, such as "NA"; None for a column without such words."""
    texts = plain(column)
    if not is_text(texts.type):
        return None
    texts = pc.utf8_trim_whitespace(texts)
    is_word = pc.is_in(texts, value_set=pa.array([word for word in NULLS if word]))
    if not pc.any(is_word).as_py():
        return None
    words: list[str | None] = pc.if_else(is_word, texts, pa.scalar(None, pa.string())).to_pylist()
    return words


def _check_alike(files: Sequence[TableFile], needed: Sequence[str]) -> None:
    """Raise where a file lacks a column of the first one; the order of columns may differ."""
    wrong = []
    for file in files[1:]:
        lacks = [name for name in needed if name not in file.names]
        more = [name for name in file.names if name not in files[0].names]
        if lacks or more:
            said = [f"lacks {', '.join(map(repr, lacks[:5]))}"] if lacks else []
            said += [f"has {', '.join(map(repr, more[:5]))}"] if more else []
            wrong.append(f"{file.path} {' and '.join(said)}")
    if wrong:
        raise SourceError(
            f"{format_count(len(wrong), 'file')} have other columns than {files[0].path}:",
            "the same columns in every file",
            "pack them apart",
            wrong[:10],
        )


def _said(files: Sequence[TableFile], ignored: Mapping[str, int]) -> list[str]:
    """Return notes on how the files were read, one for each layout, and on ignored files."""
    said: dict[str, list[Path]] = {}
    for file in files:
        if file.layout is not None and not file.layout.is_usual:
            said.setdefault(file.layout.said, []).append(file.path)
    lines = [f"{first_names(paths, 1)}: {words}" for words, paths in said.items()]
    return [*lines, *(f"ignored {count:,}: {reason}" for reason, count in ignored.items())]


def _check_columns(faults: Mapping[int, Fault], table: Any, path: str) -> None:
    """Raise if at least half of a column is faulty: a mistake in the command, not thousands of bad rows."""
    if len(faults) < 2 or 2 * len(faults) < table.num_rows:
        return
    for name in table.column_names:
        about = [fault for fault in faults.values() if fault.column == name]
        if 2 * len(about) >= table.num_rows:
            words = set(filter(None, _missing_words(table.column(name)) or ()))
            given = f"{path}: {about[0].reason}, in {len(about):,} of {table.num_rows:,} rows."
            if words:  # such a word may name a class: "None" as the damage of a collision
                raise SourceError(
                    given,
                    f"values that are not read as missing, as {', '.join(NULLS[1:])} are",
                    " ".join(f"--value {quoted(f'{name}={word}')}" for word in sorted(words)),
                )
            raise SourceError(
                given,
                "a column of one kind",
                f"--drop {quoted(name)}, or --dtype {quoted(name + '=category')}",
            )


def _write_piece(scratch: Path, number: int, table: Any) -> None:
    with (
        writing(scratch / _PIECE.format(number), always) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)


def _read_piece(scratch: Path, number: int) -> Any:
    with pa.memory_map(str(scratch / _PIECE.format(number))) as mapped:
        return pa.ipc.open_file(mapped).read_all()
