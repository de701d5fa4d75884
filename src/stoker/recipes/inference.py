"""Use of a trained recipe: its model from a checkpoint, and int8 weights.

Enters: a checkpoint of `run_recipe`; no store. Leaves: the model with its weights; an int8 checkpoint that loads as
safely and predicts with the same command. Costs: reading the checkpoint; for int8 some passes over samples.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stoker.address import as_url
from stoker.display import command, look_in, nearest, quoted
from stoker.errors import InputError, StokerError
from stoker.loader.loader import Loader
from stoker.loader.slabs import usable_device
from stoker.ownership import check_output
from stoker.recipes.catalogue import (
    Chosen,
    as_augments,
    check_columns,
    rebuild,
    restore,
)
from stoker.recipes.contract import Job, Rebuilt, Recipe
from stoker.recipes.export.weights_file import SUFFIX, read_weights
from stoker.recipes.gate import SPLITS
from stoker.recipes.registry import is_ready
from stoker.report import LOG_NAME, Topic, read_note, read_run_log
from stoker.store.fields import Array
from stoker.store.reader import Store, open_store
from stoker.train.checkpoint import FORMAT, Loaded, load_checkpoint
from stoker.train.checkpoint_file import is_checkpoint, loadable, write_file
from stoker.train.precision import choose_precision, without_autocast
from stoker.train.predict import (
    evaluate,
)
from stoker.train.quantize import QuantizeReport, pack_int8, quantize_dynamic, unpack_int8

BATCH_SIZE = 256
_TIMED_BATCHES = 4


@dataclass(frozen=True)
class Trained:
    """A model from a checkpoint, ready to predict."""

    loaded: Loaded  # the checkpoint
    chosen: Chosen  # its recipe with its options
    made: Rebuilt  # the model with its weights, and how to use it

    @property
    def model(self) -> torch.nn.Module:
        """The network; `load_trained` leaves it on the CPU and in evaluation mode."""
        return self.made.model

    @property
    def facts(self) -> Mapping[str, Any]:
        """The result of `describe_job`: what the recipe found in its training store."""
        facts: Mapping[str, Any] = self.loaded.identity["facts"]
        return facts

    @property
    def class_names(self) -> list[str]:
        """Class names of a classifier, if its training store had them; else empty."""
        return list(self.facts.get("class_names", [])) if self.facts.get("is_classifier") else []

    def named(self, columns: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return answers under the names of the output: a single value per row gets the name of the target."""
        values = columns.get("value")
        if values is None or values.shape[1:] != (1,):
            return columns
        target = self.facts.get("table", {}).get("target")
        name = f"value_{target}" if target else "value"
        one = {name: values[:, 0]}
        return one | {key: each for key, each in columns.items() if key != "value"}

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.loaded.identity["settings"]["seed"])


def load_trained(path: str | Path, recipe: str | None = None) -> Trained:
    """Build the model of a checkpoint and fill it with its weights.

    Args:
        path: `best.pt` or `step-*.pt` of a run, or a file of `stoker export`: `.safetensors`, or with
            --int8.
        recipe: Name of the recipe that the checkpoint must be of; None takes any.

    Raises:
        InputError: The file is not a checkpoint of a recipe, or of another recipe.
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
            command(
                "stoker", "train", "--set", f"recipe.name={recipe or 'NAME'}", "--store", "STORE"
            ),
        )
    chosen = restore(identity["recipe"], identity["options"])
    with by_itself(chosen.recipe, torch.device("cpu")):
        made = rebuild(chosen, identity["facts"])
        state = loaded.state["model"]
        made.model.load_state_dict(unpack_int8(state) if "int8" in identity else state)
        if "int8" in identity:
            small, _ = quantize_dynamic(made.model)
            made = replace(made, model=small)
    return Trained(loaded, chosen, made)


@contextlib.contextmanager
def by_itself(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Context in which a model is made and used whatever a script has set for its own: dtype, device, autocast.

    A recipe of the user's own may have set the default dtype itself, and keeps it.
    """
    before = torch.get_default_dtype()
    # Each call of torch costs more in the context of a device.
    is_cpu = torch.get_default_device().type == "cpu"
    if is_ready(recipe):
        torch.set_default_dtype(torch.float32)
    try:
        with (
            contextlib.nullcontext() if is_cpu else torch.device("cpu"),
            without_autocast(device),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def device_for(trained: Trained, device: str | torch.device | None) -> torch.device:
    """Return the device for predictions; int8 weights run on the CPU only."""
    is_int8 = "int8" in trained.loaded.identity
    target = usable_device("cpu" if is_int8 and device is None else device)
    if is_int8 and target.type != "cpu":
        raise InputError(f"int8 weights on {target}.", "the CPU", "--device cpu")
    return target


def store_loader(
    store: Store, trained: Trained, samples: Array, batch_size: int, device: torch.device
) -> Loader:
    """Return a loader of samples to predict."""
    fields, augment = trained.made.fields, as_augments(trained.made.augment)
    return Loader(store, batch_size, device, fields=fields, samples=samples, augment=augment)


# -- int8 ----------------------------------------------------------------------------------------


def find_training_store(checkpoint: str | Path) -> str | Path | None:
    """Return the store that the run's log names, if it still exists; a URL is opened to check."""
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
    trained: Trained,  # with float weights
    out: str | Path,  # the file; `stoker predict` takes it like any checkpoint
    # the store on which latency and metric are measured; None reports the size only
    store_path: str | Path | None = None,
    *,
    split: str = "test",  # samples for the metric
    batch_size: int = BATCH_SIZE,  # of the measured passes
) -> tuple[QuantizeReport, str | None]:
    """Write an int8 checkpoint; return its report, and the name of the compared metric, None without a store."""
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
    with store_loader(
        store, trained, samples[: batch_size * _TIMED_BATCHES], batch_size, cpu
    ) as few:
        timed = [trained.made.unpack(batch) for batch in few]

    def metric(model: torch.nn.Module) -> float:
        with Loader(
            store, batch_size, cpu, fields=job.fields, samples=samples, augment=augment
        ) as loader:
            found = evaluate(model, loader, job.unpack, job.criterion, job.metrics, precision, cpu)
        return found[job.monitor[0]]

    _, report = quantize_dynamic(trained.model, timed, metric=metric, num_runs=5)
    return report
