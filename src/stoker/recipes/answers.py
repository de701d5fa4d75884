"""Raw input in, answers out: `stoker predict` and `stoker.load_model(path).predict(frame)`.

Enters: a trained model and what a user has: files, folders, frames; or a store. Leaves: an answer or a reason for every
row, under its own key, as a file or an Arrow table. Costs: reading the input once and one forward pass per row; a file
is written in constant memory.

The recipe reads the input (`Recipe.open_raw`) and replays what was fitted in training. Everything after that is here
and the same for all recipes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import torch

from stoker.address import as_url
from stoker.display import command, look_for, quoted
from stoker.errors import InputError
from stoker.recipes.contract import RawReader
from stoker.recipes.inference import (
    BATCH_SIZE,
    PredictReport,
    Trained,
    check_answers,
    device_for,
    load_trained,
    make_judge,
    predict_store,
    write_out,
)
from stoker.recipes.raw_tables import open_raw_table
from stoker.recipes.registry import blamed
from stoker.report import Progress, Silent
from stoker.runs.evaluation import Evaluation
from stoker.store.fields import Array
from stoker.store.manifest import MANIFEST_NAME
from stoker.store.zarr import is_zarr
from stoker.train.predict import (
    Predicted,
    as_rows,
)


class Model:
    """A trained model that answers for raw input; made by `load_model`.

    Attributes:
        trained: The checkpoint, its recipe and its network.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained = trained

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, in the order of the probabilities; empty where there are none."""
        return self.trained.class_names

    def predict(
        self,
        given: Any,
        *,
        batch_size: int = BATCH_SIZE,
        device: str | torch.device | None = None,
        **told: Any,
    ) -> pa.Table:
        """Return an answer, or the reason why there is none, for every row.

        Args:
            given: What `stoker predict` takes, as a path; for tables also a pandas, polars or pyarrow table, a mapping
                of columns, a list of mappings, or a numpy array with the columns of training in their order; for
                spectra a list of SMILES or a table with a column of them; for pictures paths, images of Pillow, arrays,
                tensors, or a list of them; for bars a frame, or frames by timeframe and symbol.
            batch_size: Rows per forward pass.
            device: The first GPU by default; int8 weights run on the CPU only.
            told: More for the recipe, by the names of the command line's options.

        Returns:
            A table with the key of each row, the answers, and `reason`; `to_pandas()` makes a frame of it.

        Raises:
            InputError: The input is of another kind, or lacks what the model was trained on.
        """
        reader = open_raw(self.trained, given, {**told, "batch_size": batch_size})
        answers = _Answers(self.trained, reader, batch_size, device, given)
        tables = [
            pa.Table.from_batches([as_rows(predicted, {}, reader.key, self.class_names)])
            for predicted in answers.predict()
        ]
        if len({str(table.schema) for table in tables}) > 1:
            tables = [_with_free_lengths(table) for table in tables]  # masks of several sizes
        return pa.concat_tables(tables)

    def __repr__(self) -> str:
        saved = self.trained.loaded.saved
        return f"Model({str(saved.path)!r}, recipe {self.trained.chosen.key}, step {saved.step})"


def _with_free_lengths(table: pa.Table) -> pa.Table:
    """Return a table whose lists may have a length of their own in each row."""
    for place, column in enumerate(table.schema):
        if pa.types.is_fixed_size_list(column.type):
            free = pa.list_(column.type.value_type)
            table = table.set_column(place, column.name, table.column(place).cast(free))
    return table.replace_schema_metadata(None)


def load_model(path: str | Path) -> Model:
    """Return the model of a checkpoint, ready for raw input.

    Args:
        path: `best.pt` or `step-*.pt` of a run, or what `stoker export` wrote as .safetensors or with --int8.

    Raises:
        InputError: It is not the checkpoint of a recipe.
        CorruptError: Bytes are missing or changed.
    """
    return Model(load_trained(path))


def predict_file(
    trained: Trained,
    given: str | Path,
    out: str | Path,
    *,
    split: str = "all",
    batch_size: int = BATCH_SIZE,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    **told: Any,
) -> PredictReport:
    """Write an answer for every sample of a store, or every row of raw input.

    `told` is for `Recipe.open_raw`; `split` is that of a store.

    Raises:
        InputError: The input or the output cannot be used.
    """
    recipe = trained.chosen.recipe
    if as_url(given) is None and not Path(given).exists():
        raise InputError(
            f"{given} does not exist.",
            f"{recipe.raw_kinds + '; or ' if recipe.raw_kinds else ''}a store like that of training",
            look_for(Path(given)),
        )
    if is_store(given):
        return predict_store(
            trained,
            given,
            out,
            split=split,
            batch_size=batch_size,
            device=device,
            progress=progress,
        )
    out = Path(out)
    is_own = check_answers(trained, out, given)
    if split != "all":
        raise InputError(
            f"--split is {split!r}, and {given} is raw input.",
            "--split for stores only",
            "leave --split out",
        )
    reader = open_raw(trained, given, {**told, "batch_size": batch_size, "is_table": not is_own})
    shown = progress or Silent()
    shown.start("predicting", reader.num_rows, "rows")
    answers = _Answers(trained, reader, batch_size, device, given)
    began = time.perf_counter()
    about = {"input": str(given)}
    num_rows, said = write_out(
        trained, out, is_own, answers.predict(), about, shown, key=reader.key
    )
    seconds = time.perf_counter() - began
    notes = (*reader.notes(), *said, *trained.made.notes)
    return PredictReport(
        out, num_rows, tuple(answers.names), seconds, notes, evaluation=answers.evaluation()
    )


def is_store(given: Any) -> bool:
    """Tell whether an input is a store: a folder of `stoker pack`, an HDF5 file, a Zarr folder, a URL."""
    if not isinstance(given, str | Path):
        return False
    path = Path(given)
    if as_url(given) is not None or not path.exists():
        return True  # what is not there is asked for as a store, whose error says so
    if path.is_dir():
        return (path / MANIFEST_NAME).exists() or is_zarr(path)
    return path.name == MANIFEST_NAME or bool(h5py.is_hdf5(path))


def open_raw(trained: Trained, given: Any, told: Mapping[str, Any]) -> RawReader:
    """Return a reader of raw input."""
    recipe = trained.chosen.recipe
    if is_store(given):
        raise InputError(
            f"{given} is a store." if Path(given).exists() else f"{given} does not exist.",
            "a file, a folder or a frame of raw input",
            command("stoker", "predict", trained.loaded.saved.path, given, "OUT.parquet"),
        )
    with blamed(recipe, "open_raw"):
        reader = recipe.open_raw(given, trained.made, trained.facts, told)
    if reader is None and "table" in trained.facts:
        reader = open_raw_table(given, trained.facts, told)
    if reader is None:
        what = given if isinstance(given, str | Path) else f"a {type(given).__name__}"
        raise InputError(
            f"{trained.loaded.saved.path} is a model of the recipe {recipe.name}, which does not read {what} "
            "as it is.",
            f"{recipe.raw_kinds + '; or ' if recipe.raw_kinds else ''}a store with the fields "
            f"{', '.join(trained.facts['inputs'])}, as in training",
            f"pack the new data like the training data: {recipe.pack_command}",
        )
    return reader


class _Answers:
    """Raw rows on their way through the model; keeps what is needed to evaluate them where truths are known."""

    def __init__(
        self,
        trained: Trained,
        reader: RawReader,
        batch_size: int,
        device: str | torch.device | None,
        given: Any,
    ) -> None:
        self._device = device_for(trained, device)
        self._trained, self._reader, self._batch_size = trained, reader, batch_size
        is_path = isinstance(given, str | Path)
        self._input = quoted(given) if is_path else f"the {type(given).__name__}"
        self._model = trained.made.model.to(self._device).eval()
        self._judge = make_judge(trained)
        self.names: list[str] = []

    def predict(self) -> Iterator[Predicted]:
        """Yield the rows in the order of the input."""
        for raw in self._reader:
            columns = self._forward(raw.batch, len(raw.keys))
            if raw.truth is not None:
                known = slice(None) if raw.answered is None else raw.answered
                answers = {name: values[known] for name, values in columns.items()}
                self._judge.update(answers, raw.truth[known])
            named = self._trained.named(columns)
            self.names = [*named, *(["reason"] if raw.reasons is not None else [])]
            yield Predicted(raw.keys, named, raw.answered, raw.reasons, raw.labels)
        if not self.names:
            raise InputError(
                f"{self._input} has no rows.", "at least one to answer", "an input with rows"
            )

    @torch.inference_mode()
    def _forward(self, batch: Mapping[str, torch.Tensor], count: int) -> dict[str, Array]:
        made = self._trained.made
        parts: dict[str, list[Array]] = {}
        for low in range(0, count, self._batch_size):
            part = {
                name: tensor[low : low + self._batch_size].to(self._device)
                for name, tensor in batch.items()
            }
            for name, value in made.predict(self._model, made.unpack(part)).items():
                parts.setdefault(name, []).append(value.cpu().numpy())
        return {name: np.concatenate(values) for name, values in parts.items()}

    def evaluation(self) -> Evaluation | None:
        """Return how good the answers are, where the input had targets."""
        made = self._judge.evaluate()
        told = "of the rows whose target is in the input"
        return None if made is None else replace(made, notes=(*made.notes, told))
