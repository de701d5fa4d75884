"""A trained recipe used: its model from a checkpoint, predictions to a file, int8 weights.

Enters: a checkpoint of `run_recipe`, alone. Leaves: the model with its weights; a parquet file; an int8
checkpoint that loads as safely and predicts with the same command. Costs: reading the checkpoint; then
one pass over the samples, in constant memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.address import as_url
from stoker.augment import Compose
from stoker.augment.geometry import Resize
from stoker.display import command, look_in, nearest, quoted
from stoker.errors import InputError, StokerError
from stoker.loader.loader import Loader
from stoker.loader.slabs import usable_device
from stoker.loader.splits import select_samples
from stoker.ownership import check_output
from stoker.recipes.catalogue import (
    SPLITS,
    Chosen,
    as_augments,
    check_columns,
    fingerprint,
    rebuild,
    restore,
)
from stoker.recipes.classification import AnswerJudge
from stoker.recipes.contract import Job, Judge, Rebuilt
from stoker.recipes.export.weights_file import SUFFIX, read_weights
from stoker.recipes.registry import blamed
from stoker.report import LOG_NAME, Progress, Silent, Topic, read_note, read_run_log
from stoker.runs.evaluation import Evaluation
from stoker.store.fields import Array
from stoker.store.reader import Store, open_store
from stoker.store.repairs import FittedRepair
from stoker.train.checkpoint import FORMAT, Loaded, load_checkpoint
from stoker.train.checkpoint_file import is_checkpoint, loadable, write_file
from stoker.train.precision import choose_precision
from stoker.train.predict import (
    FILE_COLUMN,
    SAMPLE_COLUMN,
    TIME_COLUMN,
    Predicted,
    Repairer,
    check_ending,
    evaluate,
    is_written_here,
    predict,
    write_predictions,
)
from stoker.train.quantize import QuantizeReport, pack_int8, quantize_dynamic, unpack_int8

BATCH_SIZE = 256
_TIMED_BATCHES = 4
_RAW = "stoker predict CKPT FILE.csv OUT.csv (on the rows as they came)"


@dataclass(frozen=True)
class Trained:
    """A model from a checkpoint, ready to predict."""

    loaded: Loaded  # the checkpoint
    chosen: Chosen  # its recipe with its options
    made: Rebuilt  # the model, filled with weights, and how it is used

    @property
    def model(self) -> torch.nn.Module:
        """The network, on the CPU and in evaluation mode until somebody moves it."""
        return self.made.model

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the recipe found in its training store."""
        facts: Mapping[str, Any] = self.loaded.identity["facts"]
        return facts

    @property
    def class_names(self) -> list[str]:
        """Of a classifier whose training store had names for its classes; else none."""
        return list(self.facts.get("class_names", [])) if self.facts.get("is_classifier") else []

    def named(self, columns: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return answers under the names that are written: the one value of a row under that of its target."""
        values = columns.get("value")
        if values is None or values.shape[1:] != (1,):
            return columns
        target = self.facts.get("table", {}).get("target")
        name = f"value_{target}" if target else "value"
        one = {name: values[:, 0]}
        return one | {key: each for key, each in columns.items() if key != "value"}

    @property
    def seed(self) -> int:
        """Of the run."""
        return int(self.loaded.identity["settings"]["seed"])


def load_trained(path: str | Path, recipe: str | None = None) -> Trained:
    """Build the model of a checkpoint and fill it with its weights.

    Args:
        path: `best.pt`, a `step-*.pt`, what `stoker export --int8` wrote, or the `.safetensors` of
            `stoker export`.
        recipe: Insist on this one.

    Raises:
        InputError: It is not the checkpoint of a recipe, or of another one.
        CorruptError: Bytes are missing or changed.
    """
    if Path(path).is_dir():
        best = Path(path) / "best.pt"
        raise InputError(
            f"{path} is a folder.",
            "a checkpoint of a run",
            quoted(best) if best.exists() else look_in(Path(path)),
        )
    others = [] if Path(path).exists() else sorted(Path(path).parent.glob("step-*.pt"))
    if others and Path(path).name == "best.pt":
        raise InputError(
            f"{path} does not exist: without validation samples no checkpoint is the best.",
            "a checkpoint of the run",
            quoted(others[-1]),
        )
    if Path(path).suffix == ".onnx":
        raise InputError(
            f"{path} is a graph for other programs.",
            "best.pt or step-*.pt of a run, or an exported .safetensors",
            command("stoker", "export", "CKPT", Path(path).with_suffix(SUFFIX)),
        )
    loaded = read_weights(path) if Path(path).suffix == SUFFIX else load_checkpoint(path)
    identity = loaded.identity
    if "facts" not in identity or (recipe is not None and identity["recipe"] != recipe):
        found = identity.get("recipe", "a Trainer that was called directly")
        raise InputError(
            f"{path} is a checkpoint of {found}.",
            f"one of a run of {recipe or 'stoker train'}",
            command("stoker", "train", "--config", recipe or "NAME", "--store", "STORE"),
        )
    chosen = restore(identity["recipe"], identity["options"])
    made = rebuild(chosen, identity["facts"])
    state = loaded.state["model"]
    made.model.load_state_dict(unpack_int8(state) if "int8" in identity else state)
    if "int8" in identity:
        small, _ = quantize_dynamic(made.model)
        made = replace(made, model=small)
    return Trained(loaded, chosen, made)


# -- which samples -------------------------------------------------------------------------------


def find_samples(store: Store, trained: Trained, split: str) -> Array:
    """Return the samples of a split: the store's own, or the recipe's on its training store.

    Args:
        store: To be predicted.
        trained: Its recipe divides a store that has no split.
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
    # The same store, options and seed: the recipe divides it as it did.
    return trained.chosen.make_job(store, trained.seed).samples[split]


# -- predicting ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictReport:
    """What was predicted."""

    path: Path  # the file
    num_rows: int  # one per sample
    columns: tuple[str, ...]  # their names
    seconds: float  # from the first batch to the whole file
    notes: tuple[str, ...]  # what was done to the data on the way, and what a user should know
    evaluation: Evaluation | None = None  # how good the answers are, where the input has targets


def predict_store(
    trained: Trained,  # from `load_trained`
    store_path: str | Path,  # needs the fields that the model reads; no targets
    # the Parquet, CSV or JSON lines file, or what the recipe writes besides, by its ending
    out: str | Path,
    *,
    split: str = "all",  # "all", "train", "val" or "test"
    batch_size: int = BATCH_SIZE,  # samples per forward pass
    # the first GPU by default; int8 weights run on the CPU only
    device: str | torch.device | None = None,
    progress: Progress | None = None,  # told how far it is
) -> PredictReport:
    """Write a prediction for every sample of a split, in the store's order."""
    recipe, out, told = trained.chosen.recipe, Path(out), progress or Silent()
    is_own = check_answers(trained, out, store_path)
    target = device_for(trained, device)
    columns: list[str] = []
    with open_store(store_path) as store, contextlib.ExitStack() as stack:
        check_columns(store, trained.facts)
        repairer, notes = _find_repairs(store, trained.facts)
        samples = find_samples(store, trained, split)
        made, resized = _resizing(store, trained)
        notes += resized
        trained = replace(trained, made=made)
        loader = stack.enter_context(_loader(store, trained, samples, batch_size, target))
        told.start("predicting", len(samples), "samples")
        rows = predict(made.model.to(target), loader, made.unpack, made.predict, repairer)
        began = time.perf_counter()
        key, keyed = _own_keys(store, trained.facts)
        judge = make_judge(trained)

        def watched() -> Iterator[Any]:
            for predicted in rows:
                ids = predicted.sample_ids
                truth = recipe.read_truth(store, ids, made, trained.chosen.options, trained.facts)
                if truth is not None:
                    judge.update(predicted.columns, truth)
                predicted = replace(predicted, columns=trained.named(predicted.columns))
                columns[:] = predicted.columns
                told.advance(len(predicted.sample_ids) if is_own else 0)
                yield _named(store, predicted, recipe.label_fields) if is_own else keyed(predicted)

        about = {"store": store.name, "data": fingerprint(store), "split": split}
        num_rows, said = write_out(trained, out, is_own, watched(), about, told, key=key)
        found = judge.evaluate()
        if found is not None and split in ("all", "train") and _is_trained_on(store, trained):
            seen = "training samples are among them: --split test says what the model is worth"
            found = replace(found, notes=(*found.notes, seen))
    seconds = time.perf_counter() - began
    told_of = (*notes, *said, *made.notes)
    return PredictReport(out, num_rows, tuple(columns), seconds, told_of, found)


def make_judge(trained: Trained) -> Judge:
    """Return what compares answers with truths: the recipe's own, or that of classes and values."""
    own = trained.chosen.recipe.make_judge(trained.chosen.options, trained.facts)
    return AnswerJudge(trained.class_names) if own is None else own


def _is_trained_on(store: Store, trained: Trained) -> bool:
    return bool(fingerprint(store) == trained.loaded.identity["data"])


def check_answers(trained: Trained, out: Path, given: str | Path) -> bool:
    """Refuse an output that cannot be written; return whether the recipe itself writes it, by its ending."""
    endings = trained.chosen.recipe.endings
    check_ending(out, endings)
    is_own = (out.suffix.lower() or "/") in endings
    if not is_own:
        check_output(out, [trained.loaded.saved.path, given], is_written_here)
    return is_own


def device_for(trained: Trained, device: str | torch.device | None) -> torch.device:
    """Return the device that answers; int8 weights run on the CPU only."""
    is_int8 = "int8" in trained.loaded.identity
    target = usable_device("cpu" if is_int8 and device is None else device)
    if is_int8 and target.type != "cpu":
        raise InputError(f"int8 weights on {target}.", "the CPU", "--device cpu")
    return target


def write_out(
    trained: Trained,
    out: Path,
    is_own: bool,
    answers: Iterator[Predicted],
    about: Mapping[str, Any],
    told: Progress,
    **named: Any,
) -> tuple[int, tuple[str, ...]]:
    """Write answers, and what they are `about`; return how many there were, and what the recipe says of them."""
    recipe, saved = trained.chosen.recipe, trained.loaded.saved
    with blamed(recipe, "predict"):
        if is_own:
            written = recipe.write_answers(out, answers, trained.made, trained.facts)
            num_rows, said = written if isinstance(written, tuple) else (written, ())
            return num_rows, tuple(said)
        whose = {"checkpoint": str(saved.path), "step": saved.step, "recipe": trained.chosen.key}
        classes = trained.class_names
        about = {**whose, **about}
        return write_predictions(out, answers, about, told, classes=classes, **named), ()


def _resizing(store: Store, trained: Trained) -> tuple[Rebuilt, tuple[str, ...]]:
    """Return the model with a resize in front where a store's pictures are not of the size of training."""
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
    """Return predictions under the names that a store has, with what else it says of its samples."""
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
    """Return the key under which a store knows its samples, and how predictions get it, their numbers beside it.

    Names of pictures and spectra, times of bars. Any other store has numbers alone.
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


def _loader(
    store: Store, trained: Trained, samples: Array, batch_size: int, device: torch.device
) -> Loader:
    made = trained.made
    return Loader(
        store,
        batch_size,
        device,
        fields=made.fields,
        samples=samples,
        augment=as_augments(made.augment),
    )


def _find_repairs(
    store: Store, facts: Mapping[str, Any]
) -> tuple[Repairer | None, tuple[str, ...]]:
    """Return what must still be done to this store's batches to be like the training data."""
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


# -- int8 ----------------------------------------------------------------------------------------


def find_training_store(checkpoint: str | Path) -> str | Path | None:
    """Return where the run's log says its store was, if that is still there; a URL is asked."""
    with contextlib.suppress(StokerError):
        for line in reversed(read_run_log(Path(checkpoint).resolve().parent / LOG_NAME)):
            note = read_note(line)
            if note is not None and note.topic is Topic.STORE:
                place = str(note.values.get("store", ""))
                if (url := as_url(place)) is not None:
                    open_store(url).close()
                    return url
                return Path(place) if Path(place).exists() else None
    return None


def quantize_trained(
    trained: Trained,  # of float weights
    out: str | Path,  # the file; `stoker predict` takes it like any checkpoint
    # where latency and metric are measured; without it only the size is reported
    store_path: str | Path | None = None,
    *,
    split: str = "test",  # samples for the metric
    batch_size: int = BATCH_SIZE,  # of the measured passes
) -> tuple[QuantizeReport, str | None]:
    """Write an int8 checkpoint; return what it changed, and the name of the metric that was compared."""
    check_output(out, [trained.loaded.saved.path], is_checkpoint)
    identity = trained.loaded.identity
    if "int8" in identity:
        raise InputError(
            f"{trained.loaded.saved.path} holds int8 weights already.",
            "a checkpoint of stoker train",
            "the one it was made from",
        )
    if split not in SPLITS:
        raise InputError(
            f"--split is {split!r}.",
            ", ".join(SPLITS),
            f"--split {quoted(nearest(split, SPLITS) or 'val')}",
        )
    if batch_size < 1:
        raise InputError(f"--batch is {batch_size}.", "1 or more", "--batch 64")
    name = None
    if store_path is None:
        _, report = quantize_dynamic(trained.model)
    else:
        with open_store(store_path) as store:
            check_columns(store, trained.facts)
            job = trained.chosen.make_job(store, trained.seed)
            name = job.monitor[0]
            report = _compare(trained, store, job, split, batch_size)
    saved = trained.loaded.saved
    state = pack_int8(trained.loaded.state["model"], report.modules)
    described = {
        "format": FORMAT,
        "number": saved.number,
        "step": saved.step,
        "epoch": saved.epoch,
        "metrics": dict(saved.metrics),
        "saved_at": round(time.time(), 3),
    }
    about = {**identity, "int8": {"modules": list(report.modules)}}
    payload = {"format": FORMAT, "identity": about, "state": loadable({"model": state})}
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_file(Path(out), payload, described)
    return report, name


def _compare(
    trained: Trained, store: Store, job: Job, split: str, batch_size: int
) -> QuantizeReport:
    cpu = torch.device("cpu")
    samples = job.samples[split]
    if not len(samples):
        raise InputError(
            f"{store.name} has no {split} samples.",
            "a split with samples",
            f"--split {quoted(next(name for name, ids in job.samples.items() if len(ids)))}",
        )
    precision = choose_precision("fp32", cpu, trained.model)
    augment = None if job.augmentation is None else as_augments(job.augmentation.validation())
    with _loader(store, trained, samples[: batch_size * _TIMED_BATCHES], batch_size, cpu) as few:
        timed = [trained.made.unpack(batch) for batch in few]

    def metric(model: torch.nn.Module) -> float:
        with Loader(
            store, batch_size, cpu, fields=job.fields, samples=samples, augment=augment
        ) as loader:
            found = evaluate(model, loader, job.unpack, job.criterion, job.metrics, precision, cpu)
        return found[job.monitor[0]]

    _, report = quantize_dynamic(trained.model, timed, metric=metric, num_runs=5)
    return report
