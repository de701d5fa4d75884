"""Rows of a raw table for a trained model, converted as packing converted the training rows.

Enters: the facts of a model whose store was packed from a table, and new rows: a CSV, Parquet or Feather file, a folder
or pattern of them, or a frame in memory; columns in any order, with or without the target. Leaves: `RawBatch`es: every
row is ready for the model, or has a reason why not. Costs: one streaming read, in constant memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from stoker.errors import InputError, RefusalList
from stoker.recipes.contract import Facts, RawBatch
from stoker.sources.tables.columns import (
    Fault,
    as_numpy,
    as_text,
    without_codes,
)
from stoker.sources.tables.layout import TextOptions, header_advice
from stoker.sources.tables.reading import (
    TableFile,
    batches,
    find_files,
    number_rows,
    open_tables,
    shown_names,
)
from stoker.sources.tables.source import RowPlan
from stoker.store.fields import Array
from stoker.store.repairs import FittedRepair, apply_repairs
from stoker.train.predict import FILE_COLUMN, ROW_COLUMN
from stoker.units import format_count

_FIELD = "features"
_FAR_SHARE = 0.5
# Half of the training rows lie within one spread (quartile range). The limit is higher for a few rows, which may all be
# in a long tail.
_FAR_SPREADS, _FAR_SPREADS_OF_FEW, _FEW_ROWS = 8.0, 20.0, 8


def open_raw_table(
    given: Any,  # a path of a file or folder, a pattern, or a frame; see `as_frame`
    facts: Facts,  # of the checkpoint
    # "text": layout of a text file; by default that of the packed training table
    told: Mapping[str, Any],
    # center and spread of each feature in training, to detect other units; None skips this
    ranges: tuple[Array, Array] | None = None,
) -> RawTable:
    """Open rows for a model that was trained on a table."""
    recorded = facts["table"]
    used = [each["name"] for each in recorded["columns"]]
    if not isinstance(given, str | Path):
        table = as_frame(given, used)
        label, names = Path(f"the {type(given).__name__}"), tuple(table.column_names)
        files = [TableFile(label, "frame", names, num_rows=table.num_rows, table=table)]
    else:
        asked = told.get("text")
        asked = TextOptions(**recorded["text"]) if asked in (None, TextOptions()) else asked
        found, _ = find_files([given])
        files = open_tables(found, asked, recorded.get("decimal"))
    for file in files:
        missing = [name for name in used if name not in file.names]
        if missing:
            free = [name for name in file.names if name not in used]
            close = [
                f"{name!r} may be {near}" for name in missing if (near := header_advice(free, name))
            ]
            raise InputError(
                f"{file.path} lacks {format_count(len(missing), 'column')} of the training table: "
                f"{shown_names(missing)}.",
                shown_names(used),
                f"rename: {', '.join(close[:5])}" if close else "a file with these columns",
            )
    return RawTable(files, facts, ranges)


def as_frame(given: Any, names: Sequence[str]) -> pa.Table:
    """Return a table in memory as an Arrow table.

    Args:
        given: A pandas, polars or pyarrow table, a mapping of columns, a list of mappings, or a numpy array.
        names: Columns of the training, for an array without names.
    """
    try:
        if isinstance(given, pa.Table):
            return given
        if isinstance(given, np.ndarray):
            if given.dtype.names is not None:
                return pa.table({name: given[name] for name in given.dtype.names})
            rows = np.atleast_2d(given)
            if rows.ndim != 2 or rows.shape[1] != len(names):
                raise InputError(
                    f"an array of shape {given.shape}.",
                    f"(rows, {len(names)}), with the columns {shown_names(names, 12)}",
                    "a frame whose columns have names, in any order",
                )
            return pa.table({name: rows[:, place] for place, name in enumerate(names)})
        if isinstance(given, Mapping):
            return pa.table({str(name): np.atleast_1d(values) for name, values in given.items()})
        if isinstance(given, list | tuple) and all(isinstance(row, Mapping) for row in given):
            return pa.Table.from_pylist(list(given))
        # Pandas, which stoker does not need.
        if hasattr(given, "columns") and hasattr(given, "iloc"):
            return pa.Table.from_pandas(given, preserve_index=False)
        return pa.table(given)  # record batches, polars: anything that offers Arrow data
    except (TypeError, ValueError, pa.ArrowException) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"a {type(given).__name__} that is no table: {error}.",
            "a pandas, polars or pyarrow table, a mapping of columns, a list of mappings, or an array",
            "pandas.DataFrame(...)",
        ) from error


def _parts(file: TableFile, wanted: set[str]) -> Iterator[tuple[Any, dict[int, str]]]:
    """Yield parts of a table, each with the reasons for lines that are no rows, by row number."""
    refused, done = RefusalList(), 0
    skip = file.layout.skip if file.layout else 0
    for batch in chain(batches(file, refused, wanted), [None]):
        late = {(each.line or 0) - skip - 1: str(each.reason) for each in refused[done:]}
        done = len(refused)
        if batch is not None:
            yield pa.Table.from_batches([batch]), late
        elif late:
            yield None, late


class RawTable:
    """The rows of one or more tables; a `RawReader`."""

    key = ROW_COLUMN

    def __init__(
        self,
        files: Sequence[TableFile],
        facts: Facts,
        ranges: tuple[Array, Array] | None = None,
    ) -> None:
        self._files = files
        recorded = facts["table"]
        self._plan = RowPlan.from_json(recorded)
        self._columns, self._target = self._plan.columns, self._plan.target
        self._codes = recorded.get("codes", {})
        # A model may predict something else than the packed target. Then answers cannot be compared with it.
        self._is_comparable = bool(recorded["classes"]) == bool(facts.get("is_classifier"))
        self._outputs = self._plan.outputs
        self._origins = [column.name for column in self._columns for _ in column.outputs]
        repairs = facts["repairs"].get(_FIELD, [])
        self._repairs = [FittedRepair.from_json(entry) for entry in repairs]
        self._ranges = ranges
        self._num_far = np.zeros(len(self._outputs), np.int64)
        self._num_rows = self._num_unanswered = self._num_unseen = self._num_strange = 0
        counts = [file.num_rows for file in files]
        known = [count for count in counts if count is not None]
        self.num_rows = sum(known) if len(known) == len(counts) else None

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield the rows table by table, numbered from 0 in each table. Lines that are no rows are included."""
        wanted = {column.name for column in self._columns}
        wanted |= {self._target.name} if self._target else set()
        for file in self._files:
            next_row = 0
            for table, wrong in _parts(file, wanted):
                if self._codes and table is not None:
                    table = without_codes(table, self._codes, file.decimal)
                count = 0 if table is None else table.num_rows
                numbered, next_row = number_rows(next_row, count, wrong)
                made = self._make(file, table, numbered, wrong)
                if len(self._files) > 1:
                    named = np.full(len(made.keys), str(file.path), dtype=object)
                    made = replace(made, labels={FILE_COLUMN: named})
                if len(made.keys):
                    yield made

    def notes(self) -> list[str]:
        """Return notes: what was done to the rows, and how many have a reason instead of an answer."""
        notes = [f"{file.path}: {file.layout.said}" for file in self._files if file.layout]
        used = {column.name for column in self._columns}
        left = [n for n in self._files[0].names if n not in used]
        left = [n for n in left if self._target is None or n != self._target.name]
        if left:
            notes.append(f"not used, since the model was trained without: {shown_names(left, 8)}")
        named = ", ".join(str(repair.spec) for repair in self._repairs)
        if named:
            notes.append(f"repairs of {_FIELD}: made here as in training ({named})")
        far = np.flatnonzero(self._num_far > _FAR_SHARE * max(1, self._num_rows))
        if len(far):
            names = shown_names([self._outputs[place] for place in far], 8)
            notes.append(
                f"most values of {names} lie far outside of what training had: other units, or another column?"
            )
        if self._num_unseen:
            notes.append(
                f"{format_count(self._num_unseen, 'row')} with a text, or without one, unlike training; see 'reason'"
            )
        if self._num_strange and self._target:
            notes.append(
                f"{format_count(self._num_strange, 'row')} whose {self._target.name!r} is empty or a class that "
                "training did not have: answered, not evaluated"
            )
        if self._num_unanswered:
            notes.append(
                f"{format_count(self._num_unanswered, 'row')} without an answer; see 'reason'"
            )
        return notes

    def _make(
        self, file: TableFile, table: Any, numbered: Array, wrong: Mapping[int, str]
    ) -> RawBatch:
        features = np.zeros((0, len(self._outputs)), self._plan.dtype)
        reasons: list[str | None] = []
        answered = np.zeros(0, bool)
        truth: Array | None = None
        if table is not None and table.num_rows:
            features, reasons, answered = self._features(file, table)
            truth = self._truth(file, table)
            self._watch(features[answered])
        self._num_unanswered += len(wrong) + int((~answered).sum())
        if wrong:
            lines = sorted(wrong)
            places = np.searchsorted(numbered, lines)
            numbered = np.insert(numbered, places, lines)
            features = np.insert(features, places, 0, axis=0)
            answered = np.insert(answered, places, False)
            told = np.insert(np.array(reasons, object), places, [wrong[line] for line in lines])
            reasons = told.tolist()
            if truth is not None:
                unknown = -1 if truth.ndim == 1 else math.nan
                truth = np.insert(truth, places, unknown, axis=0)
        return RawBatch(
            numbered, {_FIELD: torch.from_numpy(features)}, answered, reasons, truth=truth
        )

    def _features(self, file: TableFile, table: Any) -> tuple[Array, list[str | None], Array]:
        faults: dict[int, Fault] = {}
        features, unseen = self._plan.features(table, file.decimal, faults, str(file.path))
        empty = self._plan.empty_rows(table, features)
        features = apply_repairs(features, self._repairs, self._outputs)
        reasons: list[str | None] = [None] * table.num_rows

        def remark(row: int, said: str) -> None:
            reasons[row] = f"{reasons[row]}; {said}" if reasons[row] else said

        words = {column.name: column.words for column in self._columns}
        for name, rows in unseen.items():
            texts = as_text(table.column(name), words[name])
            for row in rows.tolist():
                remark(row, f"{name} is {str(texts[row])[:40]!r}, which training did not have")
        for column in self._columns:
            if column.is_full:
                known = as_numpy(as_text(table.column(column.name), column.words).is_valid())
                for row in np.flatnonzero(~known).tolist():
                    remark(row, f"no value in {column.name}, which training always had")
        self._num_unseen += sum(reason is not None for reason in reasons)
        bad = ~np.isfinite(features)
        for row in np.flatnonzero(bad.any(axis=1)).tolist():
            names = list(dict.fromkeys(self._origins[place] for place in np.flatnonzero(bad[row])))
            lost = "no value" if np.isnan(features[row, bad[row]]).any() else "no finite value"
            reasons[row] = f"{lost} in {', '.join(names[:5])}"
        for row in empty:
            reasons[row] = "no value in any column"
        for row, fault in faults.items():
            reasons[row] = fault.reason
        answered: Array = np.logical_not(bad.any(axis=1))
        answered[[*empty, *faults]] = False
        features[~answered] = 0
        return features, reasons, answered

    def _truth(self, file: TableFile, table: Any) -> Array | None:
        """Return the targets, used to evaluate the answers; None if the table has none that can be compared."""
        target = self._target
        if target is None or target.name not in table.column_names or not self._is_comparable:
            return None
        faults: dict[int, Fault] = {}
        values = self._plan.targets(table, file.decimal, faults)
        if target.classes:
            self._num_strange += int((values < 0).sum())
            return values
        return values.astype(np.float64).reshape(-1, 1)

    def _watch(self, features: Array) -> None:
        """Count values that are far from those of training. `notes` reports them; they are not refused."""
        self._num_rows += len(features)
        if self._ranges is not None and len(features):
            center, spread = self._ranges
            limit = _FAR_SPREADS_OF_FEW if len(features) < _FEW_ROWS else _FAR_SPREADS
            self._num_far += (np.abs(features - center) > limit * spread).sum(axis=0)
