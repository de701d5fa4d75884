"""Raw input in, answers out: `stoker predict` and `stoker.load_model(path).predict(frame)`.

Enters: a trained model and a user's files, folders or frames; or a store. Leaves: an answer, or the reason why there
is none, for every row, under its own key, as a file or an Arrow table. Costs: reading the input once and one forward
pass per row; a file is written in constant memory.

The recipe reads the input (`Recipe.open_raw`) and applies what was fitted in training. The rest is in this module, and
the same for all recipes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import torch

from stoker.address import as_url
from stoker.arguments import explained
from stoker.augment import Compose
from stoker.augment.geometry import Resize
from stoker.display import command, look_for, quoted
from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.loader.splits import select_samples
from stoker.ownership import check_output
from stoker.recipes.catalogue import check_columns, fingerprint
from stoker.recipes.classification import AnswerJudge
from stoker.recipes.contract import Judge, RawReader, Rebuilt, Tensors
from stoker.recipes.gate import SPLITS
from stoker.recipes.inference import (
    BATCH_SIZE,
    Trained,
    by_itself,
    device_for,
    load_trained,
    store_loader,
)
from stoker.recipes.raw_tables import open_raw_table
from stoker.recipes.registry import blamed
from stoker.report import Progress, Silent
from stoker.runs.evaluation import Evaluation
from stoker.store.fields import Array
from stoker.store.manifest import MANIFEST_NAME
from stoker.store.reader import Store, open_store
from stoker.store.repairs import FittedRepair
from stoker.store.zarr import is_zarr
from stoker.train.predict import (
    FILE_COLUMN,
    SAMPLE_COLUMN,
    TIME_COLUMN,
    Predicted,
    Repairer,
    as_rows,
    check_ending,
    is_written_here,
    predict,
    write_predictions,
)

_RAW = "stoker predict CKPT FILE.csv OUT.csv (on the rows as they came)"


class Model:
    """A trained model that predicts from raw input; made by `load_model`.

    Attributes:
        trained: The checkpoint, its recipe and its network.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained = trained

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, in the order of the probabilities; empty if the model has none."""
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
            given: A path that `stoker predict` takes; for tables also a pandas, polars or pyarrow table, a mapping
                of columns, a list of mappings, or a numpy array with the columns of training in their order; for
                spectra a list of SMILES or a table with a column of them; for pictures paths, images of Pillow, arrays,
                tensors, or a list of them; for bars a frame, or frames by timeframe and symbol.
            batch_size: Rows per forward pass.
            device: The first GPU by default; int8 weights run on the CPU only.
            told: Further arguments for the recipe, named like the options of the command line.

        Returns:
            A table with the key of each row, the answers, and `reason`; `to_pandas()` makes a frame of it.

        Raises:
            InputError: The input is of another kind, or lacks what the model was trained on.
        """
        target = device_for(self.trained, device)
        what = quoted(given) if isinstance(given, str | Path) else f"the {type(given).__name__}"
        with by_itself(self.trained.chosen.recipe, target):
            reader = open_raw(self.trained, given, {**told, "batch_size": batch_size})
            rows = _raw_rows(self.trained, reader, batch_size, target, what)
            tables = [
                pa.Table.from_batches([as_rows(predicted, {}, reader.key, self.class_names)])
                for predicted in _Answers(self.trained, rows)
            ]
        if len({str(table.schema) for table in tables}) > 1:
            tables = [_with_free_lengths(table) for table in tables]  # masks of several sizes
        return pa.concat_tables(tables)

    def __repr__(self) -> str:
        saved = self.trained.loaded.saved
        return f"Model({str(saved.path)!r}, recipe {self.trained.chosen.key}, step {saved.step})"


def _with_free_lengths(table: pa.Table) -> pa.Table:
    """Return a table in which lists of fixed length become lists of any length."""
    for place, column in enumerate(table.schema):
        if pa.types.is_fixed_size_list(column.type):
            free = pa.list_(column.type.value_type)
            table = table.set_column(place, column.name, table.column(place).cast(free))
    return table.replace_schema_metadata(None)


@explained("stoker.load_model('runs/first/best.pt')")
def load_model(path: str | Path) -> Model:
    """Return the model of a checkpoint, ready for raw input.

    Args:
        path: `best.pt` or `step-*.pt` of a run, or a file of `stoker export` (.safetensors, or with --int8).

    Raises:
        InputError: It is not the checkpoint of a recipe.
        CorruptError: Bytes are missing or changed.
    """
    return Model(load_trained(path))


@dataclass(frozen=True)
class PredictReport:
    """The result of `predict_file`."""

    path: Path  # the file
    num_rows: int  # one per sample
    columns: tuple[str, ...]  # names of the columns
    seconds: float  # from the first batch to the complete file
    notes: tuple[str, ...]  # what was done to the data, and what a user should know
    evaluation: Evaluation | None  # how good the answers are; None if the input has no targets


def predict_file(
    trained: Trained,  # from `load_trained`
    given: str | Path,  # a store with the model's fields, or raw input; targets are optional
    # the output; its ending chooses Parquet, CSV, JSON lines or a format of the recipe
    out: str | Path,
    *,
    split: str = "all",  # for a store: "all", "train", "val" or "test"
    batch_size: int = BATCH_SIZE,  # samples per forward pass
    # the first GPU by default; int8 weights run on the CPU only
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    **told: Any,  # passed to `Recipe.open_raw`
) -> PredictReport:
    """Write an answer for every sample of a store, or every row of raw input, in its order.

    Raises:
        InputError: The input or the output cannot be used.
    """
    recipe, out, shown = trained.chosen.recipe, Path(out), progress or Silent()
    if as_url(given) is None and not Path(given).exists():
        raise InputError(
            f"{given} does not exist.",
            f"{recipe.raw_kinds + '; or ' if recipe.raw_kinds else ''}a store like that of training",
            look_for(Path(given)),
        )
    # The recipe itself writes some outputs, by their ending.
    check_ending(out, recipe.endings)
    is_own = (out.suffix.lower() or "/") in recipe.endings
    if not is_own:
        check_output(out, [trained.loaded.saved.path, given], is_written_here)
    target = device_for(trained, device)
    if is_store(given):
        with open_store(given) as store:
            return _predict_store(trained, store, out, is_own, split, batch_size, target, shown)
    if split != "all":
        raise InputError(
            f"--split is {split!r}, and {given} is raw input.",
            "--split for stores only",
            "leave --split out",
        )
    reader = open_raw(trained, given, {**told, "batch_size": batch_size, "is_table": not is_own})
    shown.start("predicting", reader.num_rows, "rows")
    report = _write(
        trained,
        out,
        is_own,
        _Answers(trained, _raw_rows(trained, reader, batch_size, target, quoted(given))),
        {"input": str(given)},
        shown,
        reader.key,
    )
    told_of = "of the rows whose target is in the input"
    return _with_notes(report, reader.notes(), told_of)


def _predict_store(
    trained: Trained,
    store: Store,
    out: Path,
    is_own: bool,
    split: str,
    batch_size: int,
    device: torch.device,
    shown: Progress,
) -> PredictReport:
    recipe, options, facts = trained.chosen.recipe, trained.chosen.options, trained.facts
    check_columns(store, facts)
    repairer, notes = _find_repairs(store, facts)
    samples = find_samples(store, trained, split)
    made, resized = _resizing(store, trained)
    trained = replace(trained, made=made)
    key, keyed = _own_keys(store, facts)

    def rows(loader: Loader) -> Iterator[tuple[Predicted, Array | None]]:
        model = made.model.to(device)
        for predicted in predict(model, loader, made.unpack, made.predict, repairer):
            ids = predicted.sample_ids
            shown.advance(len(ids) if is_own else 0)
            named = _named(store, predicted, recipe.label_fields) if is_own else keyed(predicted)
            yield named, recipe.read_truth(store, ids, made, options, facts)

    about = {"store": store.name, "data": fingerprint(store), "split": split}
    with store_loader(store, trained, samples, batch_size, device) as loader:
        shown.start("predicting", len(samples), "samples")
        report = _write(trained, out, is_own, _Answers(trained, rows(loader)), about, shown, key)
    is_seen = split in ("all", "train") and _is_trained_on(store, trained)
    seen = "training samples are among them: --split test says what the model is worth"
    return _with_notes(report, [*notes, *resized], seen if is_seen else "")


def _with_notes(report: PredictReport, first: Sequence[str], of_evaluation: str) -> PredictReport:
    """Return the report with notes `first` before its own, and a note `of_evaluation` after its evaluation's."""
    found = report.evaluation
    if found is not None and of_evaluation:
        found = replace(found, notes=(*found.notes, of_evaluation))
    return replace(report, notes=(*first, *report.notes), evaluation=found)


def _write(
    trained: Trained,
    out: Path,
    is_own: bool,
    answers: _Answers,
    about: Mapping[str, Any],  # metadata: where the answers come from
    shown: Progress,
    key: str,
) -> PredictReport:
    recipe, saved = trained.chosen.recipe, trained.loaded.saved
    began = time.perf_counter()
    said: Sequence[str] = ()
    with blamed(recipe, "predict"):
        if is_own:
            written = recipe.write_answers(out, iter(answers), trained.made, trained.facts)
            num_rows, said = written if isinstance(written, tuple) else (written, ())
        else:
            whose = {"checkpoint": str(saved.path), "step": saved.step}
            about = {**whose, "recipe": trained.chosen.key, **about}
            classes = trained.class_names
            num_rows = write_predictions(out, answers, about, shown, key=key, classes=classes)
    seconds = time.perf_counter() - began
    notes = (*said, *trained.made.notes)
    return PredictReport(
        out, num_rows, tuple(answers.names), seconds, notes, answers.judge.evaluate()
    )


class _Answers:
    """Iterates over answers: renames their columns for the output, and passes known targets to the judge."""

    def __init__(self, trained: Trained, rows: Iterable[tuple[Predicted, Array | None]]) -> None:
        self._trained, self._rows = trained, rows
        own = trained.chosen.recipe.make_judge(trained.chosen.options, trained.facts)
        self.judge: Judge = AnswerJudge(trained.class_names) if own is None else own
        self.names: list[str] = []

    def __iter__(self) -> Iterator[Predicted]:
        for predicted, truth in self._rows:
            if truth is not None:
                known = slice(None) if predicted.answered is None else predicted.answered
                answers = {name: values[known] for name, values in predicted.columns.items()}
                self.judge.update(answers, truth[known])
            named = self._trained.named(predicted.columns)
            self.names = [*named, *(["reason"] if predicted.reasons is not None else [])]
            yield replace(predicted, columns=named)


# -- raw input -----------------------------------------------------------------------------------


def is_store(given: Any) -> bool:
    """Tell whether an input is a store: a folder of `stoker pack`, an HDF5 file, a Zarr folder, a URL."""
    if not isinstance(given, str | Path):
        return False
    path = Path(given)
    if as_url(given) is not None or not path.exists():
        return True  # opening it as a store gives the error for a missing path
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


def _raw_rows(
    trained: Trained, reader: RawReader, batch_size: int, device: torch.device, what: str
) -> Iterator[tuple[Predicted, Array | None]]:
    """Yield the rows of a reader with their truths."""
    model, is_empty = trained.model.to(device).eval(), True
    for raw in reader:
        is_empty = False
        columns = _forward(trained.made, model, raw.batch, len(raw.keys), batch_size, device)
        yield Predicted(raw.keys, columns, raw.answered, raw.reasons, raw.labels), raw.truth
    if is_empty:
        raise InputError(f"{what} has no rows.", "at least one to answer", "an input with rows")


@torch.inference_mode()
def _forward(
    made: Rebuilt,
    model: torch.nn.Module,
    batch: Tensors,
    count: int,
    size: int,
    device: torch.device,
) -> dict[str, Array]:
    parts: dict[str, list[Array]] = {}
    for low in range(0, count, size):
        rows = slice(low, low + size) if count > size else slice(None)
        part = {name: tensor[rows].to(device) for name, tensor in batch.items()}
        for name, value in made.predict(model, made.unpack(part)).items():
            parts.setdefault(name, []).append(value.cpu().numpy())
    return {name: np.concatenate(values) for name, values in parts.items()}


# -- a store -------------------------------------------------------------------------------------


def find_samples(store: Store, trained: Trained, split: str) -> Array:
    """Return the samples of a split: the store's own, or the recipe's on its training store.

    Args:
        store: The store to be predicted.
        trained: Its recipe makes the split of a store without one.
        split: "all", "train", "val" or "test".
    """
    if split == "all":
        return np.arange(store.num_samples, dtype=np.int64)
    if split not in SPLITS:
        raise InputError(
            f"--split is {split!r}.",
            f"all, {', '.join(SPLITS)}",
            "--split test, or leave --split out",
        )
    if "split" in store.fields:
        return select_samples(store, split)
    if not _is_trained_on(store, trained):
        raise InputError(
            f"{store.name} has no split, and is not the store that was trained on.",
            "--split all for new data",
            "leave --split out",
        )
    # With the same store, options and seed the recipe makes the same split as in training.
    return trained.chosen.make_job(store, trained.seed).samples[split]


def _is_trained_on(store: Store, trained: Trained) -> bool:
    return bool(fingerprint(store) == trained.loaded.identity["data"])


def _resizing(store: Store, trained: Trained) -> tuple[Rebuilt, tuple[str, ...]]:
    """Return the model, with a resize in front if the store's pictures do not have the training size."""
    made, images = trained.made, store.fields.get("images")
    size, augment = trained.facts.get("size"), made.augment
    if size is None or images is None or not isinstance(augment, Compose):
        return made, ()
    if any(isinstance(op, Resize) for op in augment.ops):  # trained on encoded pictures
        return made, ()
    if images.encoding != "picture" and list(images.shape[1:]) == list(size):
        return made, ()
    resize = Resize((int(size[0]), int(size[1])))
    told = f"pictures are resized to {size[0]} x {size[1]}, as in training"
    return replace(made, augment=Compose([resize, *augment.ops])), (told,)


def _named(store: Store, predicted: Predicted, fields: Sequence[str]) -> Predicted:
    """Return predictions with the samples' names as keys, and the text `fields` of the store as labels."""
    ids = predicted.sample_ids.tolist()
    names = [store.read_text("name", each) for each in ids] if _is_text(store, "name") else []
    keys = [
        name or f"sample {each}" for name, each in zip(names or [""] * len(ids), ids, strict=True)
    ]
    labels = {
        field: np.array([store.read_text(field, each) for each in ids], dtype=object)
        for field in fields
        if _is_text(store, field)
    }
    return replace(predicted, sample_ids=np.array(keys, dtype=object), labels=labels)


def _own_keys(
    store: Store, facts: Mapping[str, Any]
) -> tuple[str, Callable[[Predicted], Predicted]]:
    """Return the name of the key column, and a function that replaces sample numbers by keys.

    Keys are names (pictures, spectra) or times (bars), with the sample number as a label. Other stores have numbers.
    """
    if _is_text(store, "name"):

        def by_name(predicted: Predicted) -> Predicted:
            named = _named(store, predicted, ())
            return replace(named, labels={SAMPLE_COLUMN: predicted.sample_ids})

        return FILE_COLUMN if "images" in store.fields else "name", by_name
    symbols = [shard.label for shard in store.manifest.shards]
    if "bars" not in facts or "time" not in store.fields or not symbols:
        return SAMPLE_COLUMN, lambda predicted: predicted
    ends = np.cumsum([shard.num_samples for shard in store.manifest.shards])

    def by_time(predicted: Predicted) -> Predicted:
        ids = predicted.sample_ids
        labels: dict[str, Array] = {SAMPLE_COLUMN: ids}
        if len(set(symbols)) > 1:
            places = np.searchsorted(ends, ids, side="right")
            labels["symbol"] = np.array([symbols[place] for place in places], dtype=object)
        times = store.gather("time", ids)
        return replace(predicted, sample_ids=times.astype("M8[ns]"), labels=labels)

    return TIME_COLUMN, by_time


def _is_text(store: Store, field: str) -> bool:
    return field in store.fields and store.fields[field].encoding == "utf8"


def _find_repairs(
    store: Store, facts: Mapping[str, Any]
) -> tuple[Repairer | None, tuple[str, ...]]:
    """Return the repairs of the training data that this store still needs, and notes."""
    missing: dict[str, list[FittedRepair]] = {}
    notes: tuple[str, ...] = ()
    for name, trained in facts["repairs"].items():
        fitted = [FittedRepair.from_json(entry) for entry in trained]
        named = ", ".join(str(repair.spec) for repair in fitted)
        have = store.manifest.repairs.get(name)
        if have == trained:
            notes += (f"repairs of {name}: as packed ({named})",)
        elif have:
            other = ", ".join(entry["repair"] for entry in have)
            raise InputError(
                f"{name} of {store.name} was repaired by {other}; the model was trained on {named}.",
                "data with the same repairs, or with none: they are then made here",
                _RAW,
            )
        else:
            missing[name] = fitted
            notes += (f"repairs of {name}: made here as in training ({named})",)
    extra = [name for name in store.manifest.repairs if name not in facts["repairs"]]
    if set(extra) & set(facts["inputs"]):
        raise InputError(
            f"{', '.join(extra)} of {store.name} was repaired; the model was trained on data as it was.",
            "data without repairs",
            _RAW,
        )
    columns = {name: list(facts["columns"][name] or []) for name in missing}
    return (Repairer(missing, columns) if missing else None), notes
