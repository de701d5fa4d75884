"""Outputs of a trained model, batch by batch: for metrics, and for a Parquet, CSV or JSON lines file.

Enters: a model, a loader, a function from a batch to inputs. Leaves: metrics of a split; or one row per sample
with its number, in the loader's order. Costs the forward passes; memory for one batch and one row group
(8 MB), independent of the number of samples.

A file appears only when it is complete: rows go to a temporary file beside it, which is removed after an error
or an interrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import torch

from stoker.address import masked_values
from stoker.display import quoted
from stoker.errors import InputError, require_utf8, unwritable
from stoker.loader.batch import Batch
from stoker.loader.loader import Loader
from stoker.ownership import SIGNATURE, check_home, has_signature, writing
from stoker.report import Progress, Silent
from stoker.store.fields import Array
from stoker.store.repairs import FittedRepair, apply_repairs
from stoker.strict_json import json_text, parse_json
from stoker.train.batches import Feed, Unpack
from stoker.train.evaluation import Evaluator
from stoker.train.precision import PrecisionChoice
from stoker.train.ranks import Ranks
from stoker.train.step import Criterion

Columns = Mapping[str, torch.Tensor]
SAMPLE_COLUMN, ROW_COLUMN, TIME_COLUMN, FILE_COLUMN = "sample", "row", "time", "file"
_KEYS = (SAMPLE_COLUMN, ROW_COLUMN, TIME_COLUMN, FILE_COLUMN, "id", "name")
_LABELS = {
    FILE_COLUMN, SAMPLE_COLUMN, "height", "width", "symbol", "formula", "smiles", "adduct", "ion_mode",
    "collision_energy",
}  # fmt: skip
_GROUP_BYTES = 8 << 20
_MOST_CELLS = 4096
_HEADER_BYTES = 1 << 20
_ANSWERS = {
    "class",
    "value",
    "probability",
    "spectrum",
    "mask",
    "reason",
    "scalp",
    "swing",
    "trend",
}


# -- metrics -------------------------------------------------------------------------------------


def evaluate(
    model: torch.nn.Module,
    loader: Any,
    unpack: Unpack,
    criterion: Criterion,
    metrics: Callable[[], Any] | None,
    precision: PrecisionChoice,
    device: torch.device,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """Return the mean loss and the metrics over one pass of a loader, as validation does."""
    with precision.alone(device):
        return Evaluator(model, criterion, metrics, precision, device, ranks=ranks).evaluate(
            Feed(loader, device, unpack, ranks=ranks)
        )


# -- predictions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """The predictions of one batch, on the host.

    Attributes:
        sample_ids: Samples of the store or rows of a file (int64), times (datetime64[ns]) or names (text); one per row.
        columns: Dict from name to `(batch, ...)` values.
        answered: `(batch,)` bool, False for a row without a prediction; None if all rows have one.
        reasons: For each row a remark, such as why it has no prediction, or None; None if no row has a remark.
        labels: Further columns after the key, such as the file that a row is from.
    """

    sample_ids: Array
    columns: Mapping[str, Array]
    answered: Array | None = None
    reasons: Sequence[str | None] | None = None
    labels: Mapping[str, Array] = field(default_factory=dict)


@torch.inference_mode()
def predict(
    model: torch.nn.Module,
    loader: Loader,
    unpack: Callable[[Batch], Any],
    read: Callable[[Any, Any], Columns],
    prepare: Callable[[Batch], Batch] | None = None,
) -> Iterator[Predicted]:
    """Yield predictions in the loader's order, every sample once, computed in float32.

    Args:
        model: On the loader's device; put into evaluation mode.
        loader: Yields the samples to predict; not in lanes, which leave windows out.
        unpack: Maps a batch to the model's inputs.
        read: Maps model and inputs to named columns.
        prepare: Changes a batch before it is unpacked; see `Repairer`.
    """
    model.eval()
    for batch in loader.remaining_batches():
        ids = batch.sample_ids
        made = read(model, unpack(batch if prepare is None else prepare(batch)))
        columns = {name: value.cpu().numpy() for name, value in made.items()}
        strange = [name for name, value in columns.items() if len(value) != len(ids)]
        if strange:
            raise InputError(
                f"the model gives {len(columns[strange[0]])} rows of {strange[0]!r} for {len(ids)} samples.",
                "one row per sample",
                "return tensors whose first axis is the batch",
            )
        yield Predicted(ids, columns)


class Repairer:
    """Applies the repairs of the training store to batches of another store, bit for bit.

    Args:
        repairs: For each field, its fitted repairs in order.
        columns: For each field, the names of its columns.
    """

    def __init__(
        self, repairs: Mapping[str, list[FittedRepair]], columns: Mapping[str, list[str]]
    ) -> None:
        self._repairs = repairs
        self._columns = columns

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with repaired fields; copies them to the host and back, where repairs are defined."""
        for name, fitted in self._repairs.items():
            values = batch[name]
            repaired = apply_repairs(values.cpu().numpy(), fitted, self._columns[name])
            batch[name] = torch.from_numpy(repaired).to(values.device)
        return batch


# -- files ---------------------------------------------------------------------------------------

ENDINGS = (".parquet", ".pq", ".csv", ".jsonl")


def check_ending(path: str | Path, others: Sequence[str] = ()) -> None:
    """Raise unless the ending of an output's name is that of a known format.

    Args:
        path: Path of the output.
        others: Endings that are allowed besides those of tables; "/" is a folder.

    Raises:
        InputError: The name has another ending.
    """
    path = Path(path)
    suffix = path.suffix.lower() or "/"
    if suffix not in (*ENDINGS, *others):
        spelled = [each for each in (*ENDINGS, *others) if each != "/"]
        folder = ", or a folder" if "/" in others else ""
        raise InputError(
            f"predictions are to be written to {path}.",
            f"a name that ends in {' or '.join(spelled)}{folder}",
            quoted(path.with_suffix("" if "/" in others else ".csv")),
        )


def write_predictions(
    path: str | Path,
    predictions: Iterable[Predicted],
    about: Mapping[str, Any],
    progress: Progress | None = None,
    *,
    key: str = SAMPLE_COLUMN,
    classes: Sequence[str] = (),
) -> int:
    """Write predictions batch by batch; return the number of rows.

    One value per sample is a column of numbers. Several values per sample, of shape `(batch, ...)`, are in Parquet
    lists of fixed length with the shape in the column's metadata. In CSV each is a column. In JSON lines they are a
    list, or an object by the names of the classes. Class numbers become class names.

    Args:
        path: A Parquet, CSV or JSON lines file, by its ending; replaced when the last row is written.
        predictions: Predictions of one or more batches.
        about: Plain values for the metadata of a Parquet file, under the key "stoker".
        progress: Advanced by the number of rows.
        key: Name of the column of `Predicted.sample_ids`.
        classes: Names of the classes; empty where classes have numbers only, or where there are none.
    """
    path, progress = Path(path), progress or Silent()
    require_utf8(path)
    check_home(path)
    check_ending(path)
    rows = (as_rows(predicted, about, key, classes) for predicted in predictions)
    ending = path.suffix.lower()
    if ending == ".csv":
        rows = (_flattened(batch, classes) for batch in rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path, is_written_here) as temporary:
            num_rows = _write(temporary, rows, progress, ending, classes)
    except OSError as error:
        raise unwritable(path, error) from error
    return num_rows


def is_written_here(path: Path) -> bool:
    """Whether a file holds predictions that stoker wrote, so that it may be replaced.

    CSV and JSON lines have no room for a signature. So the column names, or the names in the first object, must begin
    with a known key, contain a prediction, and be only such as predictions have.
    """
    if has_signature(path):
        return True
    with path.open("rb") as file:
        first = file.read(_HEADER_BYTES).partition(b"\n")[0].decode("utf-8", "replace")
    if first.startswith("{"):
        try:
            names = list(parse_json(first))
        except ValueError:
            return False
    else:
        names = first.removeprefix('"').removesuffix('"').split('","')
    stems = {name.partition("_")[0] for name in names[1:] if name not in _LABELS}
    if not names or names[0] not in _KEYS:
        return False
    return bool(stems & {"class", "value", "spectrum", "mask"}) and stems <= _ANSWERS


class _LinesWriter:
    """Writes rows as JSON objects, one per line."""

    def __init__(self, path: Path, classes: Sequence[str]) -> None:
        self._file, self._classes = path.open("xb"), classes

    def write_table(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            shares = row.get("probability")
            if shares is not None and len(shares) == len(self._classes):
                row["probability"] = dict(zip(self._classes, shares, strict=True))
            plain = {
                name: value.isoformat() if isinstance(value, datetime) else value
                for name, value in row.items()
            }
            self._file.write(json_text(plain).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def _open_writer(path: Path, ending: str, schema: pa.Schema, classes: Sequence[str]) -> Any:
    if ending == ".csv":
        return arrow_csv.CSVWriter(path, schema)
    if ending == ".jsonl":
        return _LinesWriter(path, classes)
    return pq.ParquetWriter(path, schema, compression="zstd")


def _write(
    path: Path,
    batches: Iterable[pa.RecordBatch],
    progress: Progress,
    ending: str,
    classes: Sequence[str],
) -> int:
    writer: Any = None
    held: list[pa.RecordBatch] = []
    num_rows = 0
    try:
        for rows in batches:
            if writer is None:
                writer = _open_writer(path, ending, rows.schema, classes)
            held.append(rows)
            num_rows += rows.num_rows
            progress.advance(rows.num_rows)
            # One row group per batch would be slow to read; one for all rows would need too much memory.
            if sum(part.nbytes for part in held) >= _GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(held))
                held.clear()
        if writer is None:
            raise InputError(
                "there is no sample to predict.", "at least one", "a split or a loader with samples"
            )
        if held:
            writer.write_table(pa.Table.from_batches(held))
    finally:
        if writer is not None:
            writer.close()
    return num_rows


def as_rows(
    predicted: Predicted, about: Mapping[str, Any], key: str, classes: Sequence[str]
) -> pa.RecordBatch:
    """Return predictions as a batch of an Arrow table; see `write_predictions`."""
    arrays = [_as_column(predicted.sample_ids)]
    fields = [pa.field(key, arrays[0].type, nullable=False)]
    for name, labels in predicted.labels.items():
        arrays.append(_as_column(labels))
        fields.append(pa.field(name, arrays[-1].type))
    answered = predicted.answered
    hidden = None if answered is None else ~answered
    for name, values in predicted.columns.items():
        shape = values.shape[1:]
        if classes and name == "class" and values.dtype.kind in "iu" and not shape:
            made = pa.array(np.asarray(classes, dtype=object)[values], pa.string(), mask=hidden)
        elif shape:
            flat = pa.array(np.ascontiguousarray(values).reshape(-1))
            mask = None if hidden is None else pa.array(hidden)
            made = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(shape)), mask=mask)
        else:
            made = pa.array(np.ascontiguousarray(values), mask=hidden)
        arrays.append(made)
        more = {"shape": json_text(list(shape))} if len(shape) > 1 else None
        fields.append(pa.field(name, made.type, metadata=more))
    if predicted.reasons is not None:
        arrays.append(pa.array(predicted.reasons, pa.string()))
        fields.append(pa.field("reason", pa.string()))
    told = masked_values(about) | ({"classes": list(classes)} if classes else {})
    schema = pa.schema(fields, metadata={"stoker": json_text(told), SIGNATURE: "1"})
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _as_column(values: Array) -> Any:
    """Return keys or labels: whole numbers, times in UTC, or texts."""
    if values.dtype.kind == "M":
        return pa.array(values.astype("M8[us]").astype(np.int64), pa.timestamp("us", "UTC"))
    is_number = values.dtype.kind in "iu"
    return pa.array(
        values if is_number else values.tolist(), pa.int64() if is_number else pa.string()
    )


def _flattened(rows: pa.RecordBatch, classes: Sequence[str]) -> pa.RecordBatch:
    """Return the rows with a column for each value of a list, because a CSV cell holds one value."""
    arrays, names = [], []
    for about, column in zip(rows.schema, rows.columns, strict=True):
        if not pa.types.is_fixed_size_list(about.type):
            arrays.append(column)
            names.append(about.name)
            continue
        size = about.type.list_size
        if size > _MOST_CELLS:
            raise InputError(
                f"{about.name!r} has {size:,} values a row, too many for the cells of a CSV file.",
                f"at most {_MOST_CELLS:,}",
                "OUT.parquet",
            )
        for place in range(size):
            # pc.list_element keeps the nulls of rows without an answer.
            arrays.append(pc.list_element(column, place))
            label = (
                classes[place] if about.name == "probability" and len(classes) == size else place
            )
            names.append(f"{about.name}_{label}")
    return pa.RecordBatch.from_arrays(arrays, names=names)
