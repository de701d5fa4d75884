"""Predictions for the rows of a raw table: what packing did to the training rows is done to the new ones.

Enters: a trained model whose store was packed from a table, and a CSV, Parquet or Feather file of new rows, its columns
in any order, with or without the target. Leaves: a file with one line per row: an answer, a reason, or an answer with
a remark. Costs: one streaming read and one forward pass per row, in constant memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from stoker.errors import InputError, RefusalList
from stoker.loader.loader import pick_device
from stoker.ownership import check_output
from stoker.recipes.inference import BATCH_SIZE, PredictReport, Trained
from stoker.recipes.registry import blamed
from stoker.report import Progress, Silent
from stoker.sources.tables.columns import Column, Fault, as_text
from stoker.sources.tables.layout import TextOptions, header_advice
from stoker.sources.tables.reading import TableFile, batches, open_table, shown_names
from stoker.sources.tables.source import make_features
from stoker.store.fields import Array
from stoker.store.repairs import FittedRepair, apply_repairs
from stoker.train.predict import (
    ROW_COLUMN,
    Predicted,
    check_ending,
    is_written_here,
    write_predictions,
)
from stoker.units import format_count

_FIELD = "features"


def predict_table(
    trained: Trained,
    path: str | Path,
    out: str | Path,
    *,
    text: TextOptions | None = None,
    batch_size: int = BATCH_SIZE,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> PredictReport:
    """Write a prediction, or the reason why there is none, for every row of a table.

    Args:
        trained: From `load_trained`.
        path: CSV, Parquet or Feather.
        out: The Parquet or CSV file, by its ending.
        text: How a text file is written; what was said when the training table was packed by default.
        batch_size: Rows per forward pass.
        device: The first GPU by default; int8 weights run on the CPU only.
        progress: Told how far it is.

    Raises:
        InputError: The model was not trained on a table, or columns are missing; all are named.
    """
    path = Path(path)
    check_ending(out)
    check_output(out, [trained.loaded.saved.path, path], is_written_here)
    recorded = trained.facts.get("table")
    if recorded is None:
        raise InputError(
            f"{trained.loaded.saved.path} was not trained on a store of `stoker pack table`, so it does not say "
            f"what the columns of {path} become.",
            "a store with the fields of the training store",
            "pack the new data like the training data",
        )
    columns = [Column.from_json(each) for each in recorded["columns"]]
    given = text if text is not None and text != TextOptions() else TextOptions(**recorded["text"])
    file = open_table(path, given)
    _check_names(file, columns)
    told = progress or Silent()
    is_int8 = "int8" in trained.loaded.identity
    place = pick_device("cpu" if is_int8 and device is None else device)
    told.start("predicting", file.num_rows, "rows")
    rows = _Rows(trained, file, columns, np.dtype(recorded["dtype"]), place, batch_size)
    began = time.perf_counter()
    about = {
        "checkpoint": str(trained.loaded.saved.path),
        "step": trained.loaded.saved.step,
        "recipe": trained.chosen.key,
        "table": str(path),
    }
    with blamed(trained.chosen.recipe, "predict"):
        num_rows = write_predictions(
            out, rows.predict(), about, told, key=ROW_COLUMN, classes=trained.class_names
        )
    seconds = time.perf_counter() - began
    notes = (*_said(file, columns, recorded.get("target")), *rows.notes(), *trained.made.notes)
    return PredictReport(Path(out), num_rows, tuple(rows.names), seconds, notes)


def _check_names(file: TableFile, columns: Sequence[Column]) -> None:
    missing = [column.name for column in columns if column.name not in file.names]
    if missing:
        close = [
            f"{name!r} may be {near}"
            for name in missing
            if (near := header_advice(file.names, name))
        ]
        raise InputError(
            f"{file.path} lacks {format_count(len(missing), 'column')} of the training table: {shown_names(missing)}.",
            shown_names([column.name for column in columns]),
            f"rename: {', '.join(close[:5])}" if close else "a file with these columns",
        )


def _said(file: TableFile, columns: Sequence[Column], target: str | None) -> list[str]:
    used = {column.name for column in columns}
    left = [name for name in file.names if name not in used and name != target]
    said = [f"{file.path}: {file.layout.said}"] if file.layout else []
    return [*said, *([f"not used, as in training: {shown_names(left, 8)}"] if left else [])]


class _Rows:
    """The rows of a file on their way through the model.

    Args:
        trained: The model.
        file: Where the rows are.
        columns: What each column becomes.
        dtype: Of the features in training.
        device: For the forward passes.
        batch_size: Rows of one.
    """

    def __init__(
        self,
        trained: Trained,
        file: TableFile,
        columns: Sequence[Column],
        dtype: np.dtype[Any],
        device: torch.device,
        batch_size: int,
    ) -> None:
        self._trained, self._file, self._columns, self._dtype = trained, file, columns, dtype
        self._device, self._batch_size = device, batch_size
        self._outputs = [name for column in columns for name in column.outputs]
        repairs = trained.facts["repairs"].get(_FIELD, [])
        self._repairs = [FittedRepair.from_json(entry) for entry in repairs]
        self._model = trained.made.model.to(device)
        self.names: list[str] = []
        self._num_unanswered = self._num_unseen = 0

    def notes(self) -> list[str]:
        """Return what was done to the rows, and how many have a reason instead of an answer."""
        named = ", ".join(str(repair.spec) for repair in self._repairs)
        notes = [f"repairs of {_FIELD}: made here as in training ({named})"] if named else []
        if self._num_unseen:
            notes.append(
                f"{format_count(self._num_unseen, 'row')} with a text that training did not have; see 'reason'"
            )
        if self._num_unanswered:
            notes.append(
                f"{format_count(self._num_unanswered, 'row')} without an answer; see 'reason'"
            )
        return notes

    def predict(self) -> Iterator[Predicted]:
        """Yield the rows in the order of the file, in numbers from 0; lines that are no rows among them."""
        refused = RefusalList()
        skip = self._file.layout.skip if self._file.layout else 0
        next_row, done = 0, 0
        for batch in batches(self._file, refused, {column.name for column in self._columns}):
            wrong = {
                (refusal.line or 0) - skip - 1: str(refusal.reason) for refusal in refused[done:]
            }
            done = len(refused)
            numbers, next_row = _number_rows(next_row, batch.num_rows, wrong)
            predicted = self._predict_batch(pa.Table.from_batches([batch]), numbers)
            yield from _with_lines(predicted, wrong)
            self._num_unanswered += len(wrong)
        late = {(refusal.line or 0) - skip - 1: refusal.reason for refusal in refused[done:]}
        if late and self.names:
            self._num_unanswered += len(late)
            yield self._empty(late)

    def _predict_batch(self, table: Any, numbers: Array) -> Predicted:
        faults: dict[int, Fault] = {}
        features, unseen = make_features(
            table, self._columns, self._dtype, self._file.decimal, faults, str(self._file.path)
        )
        features = apply_repairs(features, self._repairs, self._outputs)
        reasons: list[str | None] = [None] * table.num_rows
        for name, rows in unseen.items():
            texts = as_text(table.column(name))
            for row in rows.tolist():
                said = f"{name} is {str(texts[row])[:40]!r}, which training did not have"
                reasons[row] = f"{reasons[row]}; {said}" if reasons[row] else said
        self._num_unseen += sum(reason is not None for reason in reasons)
        bad = ~np.isfinite(features)
        for row in np.flatnonzero(bad.any(axis=1)).tolist():
            names = [self._outputs[place] for place in np.flatnonzero(bad[row])[:5]]
            lost = "no value" if np.isnan(features[row, bad[row]]).any() else "no finite value"
            reasons[row] = f"{lost} in {', '.join(names)}"
        for row, fault in faults.items():
            reasons[row] = fault.reason
        answered: Array = np.logical_not(bad.any(axis=1))
        answered[list(faults)] = False
        self._num_unanswered += int((~answered).sum())
        features[~answered] = 0
        return Predicted(numbers, self._forward(features), answered, reasons)

    @torch.inference_mode()
    def _forward(self, features: Array) -> Mapping[str, Array]:
        made = self._trained.made
        parts: dict[str, list[Array]] = {}
        for low in range(0, len(features), self._batch_size):
            values = torch.from_numpy(features[low : low + self._batch_size]).to(self._device)
            for name, value in made.predict(self._model, made.unpack({_FIELD: values})).items():
                parts.setdefault(name, []).append(value.cpu().numpy())
        columns = {name: np.concatenate(values) for name, values in parts.items()}
        self.names = [*columns, "reason"]
        self._shapes = {name: (value.shape[1:], value.dtype) for name, value in columns.items()}
        return columns

    def _empty(self, wrong: Mapping[int, str]) -> Predicted:
        rows = sorted(wrong)
        columns = {
            name: np.zeros((len(rows), *shape), dtype)
            for name, (shape, dtype) in self._shapes.items()
        }
        return Predicted(
            np.asarray(rows, np.int64),
            columns,
            np.zeros(len(rows), bool),
            [wrong[row] for row in rows],
        )


def _number_rows(first: int, count: int, wrong: Mapping[int, str]) -> tuple[Array, int]:
    """Return the numbers of `count` rows from `first` on, without those of lines that are no rows."""
    span = np.arange(first, first + count + len(wrong), dtype=np.int64)
    kept = span[~np.isin(span, list(wrong))][:count] if wrong else span
    return kept, max([int(kept[-1]) if len(kept) else first - 1, *wrong], default=first - 1) + 1


def _with_lines(predicted: Predicted, wrong: Mapping[int, str]) -> Iterator[Predicted]:
    """Yield the rows with the lines that are no rows between them, in order."""
    if not wrong:
        yield predicted
        return
    lines = sorted(wrong)
    ids = np.concatenate([predicted.sample_ids, np.asarray(lines, np.int64)])
    order = np.argsort(ids, kind="stable")
    empty = np.zeros(len(lines), np.int64)
    columns = {
        name: np.concatenate([value, value[empty]])[order]
        for name, value in predicted.columns.items()
    }
    assert predicted.answered is not None
    assert predicted.reasons is not None
    answered = np.concatenate([predicted.answered, np.zeros(len(lines), bool)])[order]
    reasons = [*predicted.reasons, *(wrong[line] for line in lines)]
    yield Predicted(ids[order], columns, answered, [reasons[place] for place in order.tolist()])
