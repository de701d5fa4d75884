"""Outputs of a trained model, batch by batch: for metrics, and for a parquet file.

Enters: a model, a loader, how a batch becomes inputs. Leaves: metrics of a split; or one row per sample
with its number, in the loader's order. Costs the forward passes; memory for one batch and one row group
(8 MB), however many samples there are.

A file appears when it is whole: rows go to a temporary name beside it, which an error or an interrupt
removes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from stoker.address import masked_values
from stoker.errors import InputError, require_utf8, unwritable
from stoker.loader.batch import Batch
from stoker.loader.loader import Loader
from stoker.ownership import SIGNATURE, writing
from stoker.report import Progress, Silent
from stoker.store.fields import Array
from stoker.store.repairs import FittedRepair, apply_repairs
from stoker.strict_json import json_text
from stoker.train.batches import Feed, Unpack
from stoker.train.evaluation import Evaluator
from stoker.train.precision import PrecisionChoice
from stoker.train.ranks import Ranks
from stoker.train.step import Criterion

Columns = Mapping[str, torch.Tensor]
SAMPLE_COLUMN = "sample"
_GROUP_BYTES = 8 << 20


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
    with precision.matmuls():
        return Evaluator(model, criterion, metrics, precision, device, ranks=ranks).evaluate(
            Feed(loader, device, unpack, ranks=ranks)
        )


# -- predictions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """The predictions of one batch, on the host.

    Attributes:
        sample_ids: Samples of the store, one per row.
        columns: Name to `(batch, ...)` values.
    """

    sample_ids: Array
    columns: Mapping[str, Array]


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
        loader: Over the samples to predict; not over lanes, which leave windows out.
        unpack: Batch to the model's inputs.
        read: Model and inputs to named columns.
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
    """Makes the repairs of the training store on batches of another one, bit for bit.

    Args:
        repairs: Field to fitted repairs, in order.
        columns: Field to the names of its columns.
    """

    def __init__(
        self, repairs: Mapping[str, list[FittedRepair]], columns: Mapping[str, list[str]]
    ) -> None:
        self._repairs = repairs
        self._columns = columns

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with repaired fields; goes over the host, where repairs are defined."""
        for name, fitted in self._repairs.items():
            values = batch[name]
            repaired = apply_repairs(values.cpu().numpy(), fitted, self._columns[name])
            batch[name] = torch.from_numpy(repaired).to(values.device)
        return batch


# -- parquet -------------------------------------------------------------------------------------


def write_parquet(
    path: str | Path,
    predictions: Iterable[Predicted],
    about: Mapping[str, Any],
    progress: Progress | None = None,
) -> int:
    """Write predictions as they come; return how many rows.

    A value per sample is a column of numbers; `(batch, ...)` values are lists of fixed length, whose
    shape stands in the column's metadata.

    Args:
        path: The parquet file; replaced when the last row is written.
        predictions: One or more.
        about: Plain values for the file's metadata, under the key "stoker".
        progress: Told about rows.
    """
    path, progress = Path(path), progress or Silent()
    require_utf8(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as temporary:
            num_rows = _write(temporary, predictions, about, progress)
    except OSError as error:
        raise unwritable(path, error) from error
    return num_rows


def _write(
    path: Path, predictions: Iterable[Predicted], about: Mapping[str, Any], progress: Progress
) -> int:
    writer: pq.ParquetWriter | None = None
    held: list[pa.RecordBatch] = []
    num_rows = 0
    try:
        for predicted in predictions:
            rows = _as_rows(predicted, about)
            writer = writer or pq.ParquetWriter(path, rows.schema, compression="zstd")
            held.append(rows)
            num_rows += rows.num_rows
            progress.advance(rows.num_rows)
            # Row groups of a batch each would be slow to read, all in one would fill the memory.
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


def _as_rows(predicted: Predicted, about: Mapping[str, Any]) -> pa.RecordBatch:
    arrays = [pa.array(predicted.sample_ids, pa.int64())]
    fields = [pa.field(SAMPLE_COLUMN, pa.int64(), nullable=False)]
    for name, values in predicted.columns.items():
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        shape = values.shape[1:]
        if shape:
            flat = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(shape)))
        arrays.append(flat)
        more = {"shape": json_text(list(shape))} if len(shape) > 1 else None
        fields.append(pa.field(name, flat.type, metadata=more))
    about = masked_values(about)
    schema = pa.schema(fields, metadata={"stoker": json_text(about), SIGNATURE: "1"})
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
