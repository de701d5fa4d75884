"""The tabular recipe: predicts classes or values from rows or windows of numbers.

Enters: a store with dense features `(n, F)` or `(n, T, F)`, or a series; also a plain HDF5 file.
Leaves: a `Job`. Costs: the quality gate (only for data that `stoker pack` did not check), one read of the
targets and of up to 200,000 rows; seconds.

The quality gate first refuses values that would overflow, with its findings and what to type. The model
scales its inputs by numbers fitted on training rows; outputs can be bounded without losing their gradient; the
learning rate follows the batch size. Each decision is in the job's notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from stoker.config import Settings
from stoker.errors import InputError
from stoker.recipes.classification import AnswerJudge, label_places
from stoker.recipes.contract import (
    BATCH,
    Default,
    Facts,
    Job,
    Layout,
    Port,
    RawReader,
    Rebuilt,
    Recipe,
    Tensors,
)
from stoker.recipes.gate import gate_notes, quality_gate
from stoker.recipes.options import parse_options, require
from stoker.recipes.raw_tables import open_raw_table
from stoker.recipes.scaling import Ramps, fit_ramps, fit_robust, training_rows
from stoker.recipes.schedule import lr_factor, make_adamw, warmup_cosine
from stoker.recipes.tabular.data import Inputs, Task, find_inputs, find_task, split_samples
from stoker.recipes.tabular.evaluation import (
    Classify,
    Regress,
    TableData,
    class_names,
    find_quiet,
)
from stoker.recipes.tabular.model import TabularModel, make_scaler
from stoker.recipes.tabular.options import TabularOptions
from stoker.store.fields import Array
from stoker.store.manifest import FieldInfo
from stoker.store.reader import Store

_MOST_RAMPS = 4096  # of all columns together: the first layer has `hidden[0]` weights for each


class TabularRecipe(Recipe):
    """Builds tabular jobs."""

    name = "tabular"
    Options = TabularOptions
    pack_command = "stoker pack table FILE.csv OUT --target COLUMN"
    raw_kinds = "CSV or Parquet files with the columns of training"
    defaults = (
        Default(
            "training.lr",
            1e-3,
            "AdamW, for reference_batch samples per update; chosen by cross-validation on intrusion data",
        ),
        Default("training.epochs", 40, "at most; rows are cheap"),
        Default(
            "training.patience", 8, "epochs without a lower validation loss; the best weights count"
        ),
    )
    uses = ("training.init_gain", "training.output_bound", "training.output_bound_mode")

    def make_job(self, store: Store, options: TabularOptions | Mapping[str, Any], seed: int) -> Job:
        """Build the job; see `Recipe`."""
        chosen = parse_options(TabularOptions, options, self.name)
        inputs = find_inputs(store, chosen.field, chosen.target_field)
        _require_targets(store, chosen.target_field)
        fields = [inputs.field, chosen.target_field]
        warnings = quality_gate(store, fields, scaled=chosen.scale_inputs)
        samples, how = split_samples(
            store,
            inputs,
            chosen.split,
            chosen.ratios,
            chosen.embargo,
            seed,
            rows_repeat=any(
                finding.name == "duplicate-rows" and finding.field == inputs.field
                for finding in warnings
            ),
        )
        targets = {name: store.gather(chosen.target_field, ids) for name, ids in samples.items()}
        values = np.concatenate(list(targets.values()))
        task = find_task(store, chosen.target_field, values, chosen.task)
        goal: Classify | Regress
        if task.classes is None:
            goal = Regress(targets["train"], targets["val"], chosen.loss)
        else:
            goal = Classify(task.classes, targets["train"], targets["val"], chosen.class_weights)
            # A wrong name is refused before the training.
            find_quiet(class_names(store, task), chosen.quiet_class)
        data = TableData(store, inputs, task, samples, targets, chosen, seed)
        factor, why_lr = lr_factor(
            chosen.batch_size, chosen.reference_batch, chosen.lr_rule, len(samples["train"])
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, facts, why_model = _make_model(
                store, inputs, samples["train"], task, goal, chosen
            )
        return Job(
            model=model,
            criterion=goal.criterion,
            unpack=partial(
                unpack_tabular, inputs=inputs, target=chosen.target_field, encode=goal.encode
            ),
            metrics=goal.metrics,
            final_metrics=partial(goal.final_metrics, data),
            baseline=goal.baseline,
            samples=samples,
            make_optimizer=lambda weights, lr: make_adamw(
                weights, lr * factor, chosen.weight_decay
            ),
            make_schedule=partial(warmup_cosine, warmup_share=chosen.warmup_share),
            fields=fields,
            monitor=("loss", False),
            strata=None if task.classes is None else targets["train"],
            scales_rate=chosen.batch_size is not None and chosen.lr_rule != "none",
            facts=facts,
            notes=(
                inputs.reason,
                task.reason,
                why_model,
                how,
                why_lr,
                *goal.notes,
                *gate_notes(warnings),
            ),
        )

    def from_settings(self, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that `training.*` sets for weights and outputs, and the samples per update."""
        asked = {
            key.rpartition(".")[2]: settings.get(key)
            for key in self.uses
            if not settings.is_default(key)
        }
        most = settings.data.max_training_samples or settings.training.samples_per_update
        together = min(settings.training.samples_per_update, most)
        return {"batch_size": given.get("batch_size", together), **asked}

    def describe(self, job: Job) -> dict[str, Any]:
        """Return the sizes of inputs and outputs, and the kind of network."""
        return dict(job.facts)

    def rebuild(self, options: TabularOptions, facts: Facts) -> Rebuilt:
        """Return the network; scalers and classes are restored with the weights."""
        (field,) = facts["inputs"]
        inputs = Inputs(field, facts["is_series"], facts["window"], facts["num_features"], "")
        return Rebuilt(TabularModel(options, facts), [field], inputs.read, TabularModel.predict)

    def open_raw(
        self, given: Any, made: Rebuilt, facts: Facts, told: Mapping[str, Any]
    ) -> RawReader | None:
        """Open rows of a table, for a model that was trained on a packed table of rows."""
        if "table" not in facts or facts["window"] is not None:
            return None
        scaler = cast(TabularModel, made.model).scaler
        spread = scaler.scale.double().cpu().numpy()
        is_scaled = bool((spread != 1).any())
        ranges = (scaler.center.double().cpu().numpy(), spread) if is_scaled else None
        return open_raw_table(given, facts, told, ranges)

    def make_judge(self, options: TabularOptions, facts: Facts) -> AnswerJudge | None:
        """Return the judge of classes, which counts false alarms as the run does."""
        names = facts.get("class_names", ()) if facts["is_classifier"] else ()
        if not names:
            return None
        quiet, notes = find_quiet(names, options.quiet_class)
        return AnswerJudge(names, quiet_class=quiet, notes=notes)

    def read_truth(
        self, store: Store, samples: Array, made: Rebuilt, options: TabularOptions, facts: Facts
    ) -> Array | None:
        """Return the targets of a store's rows: class indices, or values."""
        if options.target_field not in store.fields:
            return None
        values = store.gather(options.target_field, samples)
        if not facts["is_classifier"]:
            return values.reshape(len(values), -1).astype(np.float64)
        values = values.reshape(-1)
        classes = cast(TabularModel, made.model).classes.cpu().numpy()
        numbers = label_places(store, values, facts.get("class_names", ()))
        places = np.minimum(np.searchsorted(classes, numbers), len(classes) - 1)
        found: Array = np.where(classes[places] == numbers, places, -1)
        return found

    def export_layout(self, made: Rebuilt, facts: Facts) -> Layout:
        """Return inputs for rows or windows as stored; a series also has a gap flag for each row."""
        (field,) = facts["inputs"]
        rows = () if facts["window"] is None else (int(facts["window"]),)
        names = facts["columns"][field]
        columns = f": {', '.join(names)}" if names else ""
        shown = f"windows of {rows[0]} rows, oldest first" if rows else "rows"
        ports = [
            Port(
                field,
                (BATCH, *rows, facts["num_features"]),
                torch.float64 if facts.get("is_wide") else torch.float32,
                f"{shown}{columns}",
                scaler=cast(TabularModel, made.model).scaler,
            )
        ]
        if facts["is_series"]:
            about = "1 where rows are missing before this one, else 0"
            ports.append(Port(f"{field}/gap", (BATCH, *rows), torch.uint8, about, below=2))
        return Layout(ports, made.unpack, made.predict)


def unpack_tabular(
    batch: Tensors,
    inputs: Inputs,
    target: str,
    encode: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs as stored and encoded targets."""
    return inputs.read(batch), encode(batch[target])


def _require_targets(store: Store, target: str) -> None:
    info = store.fields.get(target)
    aside = store.left_aside(target)
    if info is None and aside is not None:
        raise InputError(
            f"the option 'target_field' is {target!r}, and {aside}.",
            f"a dataset of numbers with {store.num_samples:,} rows, a target for every sample",
            f"write {target!r} again, or --set recipe.options.target_field=ANOTHER",
        )
    dense = {name: each for name, each in store.fields.items() if each.kind == "dense"}
    single = [n for n, each in dense.items() if not each.shape and _is_number(each)]
    require(
        info is not None and info.kind == "dense" and _is_number(info),
        "target_field",
        target,
        ", ".join(dense),
        f"target_field={single[0]!r}"
        if single
        else "stoker pack table FILE.csv OUT --target COLUMN",
    )


def _is_number(info: FieldInfo) -> bool:
    return np.dtype(info.dtype).kind in "fiu"


def _make_model(
    store: Store,
    inputs: Inputs,
    train: Array,
    task: Task,
    goal: Classify | Regress,
    options: TabularOptions,
) -> tuple[TabularModel, dict[str, Any], str]:
    """Return the network with initial weights, scaler and ramps fitted; its facts; and a note."""
    windowed = inputs.window is not None
    name = {"auto": "patchtst" if windowed else "mlp"}.get(options.model, options.model)
    require(
        windowed or name == "mlp", "model", name, "'mlp' for rows without a window", "model='mlp'"
    )
    is_float64 = np.dtype(store.fields[inputs.field].dtype) == np.float64
    facts: dict[str, Any] = {
        "inputs": [inputs.field],
        "is_series": inputs.is_series,
        "window": inputs.window,
        "num_features": inputs.num_features,
        "num_outputs": task.num_outputs,
        "is_classifier": task.classes is not None,
        "is_wide": options.scale_inputs and is_float64,
        "is_squashed": options.scale_inputs and options.input_tails == "log",
        "num_ramps": 0,
        "body": name,
    }
    rows = training_rows(store, inputs.field, train)
    scaler = make_scaler(options, facts)
    if options.scale_inputs:
        center, scale = map(torch.from_numpy, fit_robust(rows))
        scaler.center[: inputs.num_features], scaler.scale[: inputs.num_features] = center, scale
    ramps = None
    each = min(options.input_ramps, _MOST_RAMPS // inputs.num_columns)
    if each > 1 and not windowed:
        fitted = fit_ramps(scaler(torch.from_numpy(rows)).numpy(), each)
        facts["num_ramps"] = len(fitted[0])
        ramps = Ramps(*fitted)
    model = TabularModel(options, facts)
    model.scaler = scaler
    model.ramps = ramps if facts["num_ramps"] else None
    for buffer, values in goal.fitted.items():
        model.get_buffer(buffer).copy_(torch.from_numpy(values))
    count = sum(parameter.numel() for parameter in model.parameters())
    why = "asked for" if options.model != "auto" else "windows" if windowed else "rows"
    also = f"; {facts['num_ramps']:,} ramps beside the columns" if facts["num_ramps"] else ""
    return model, facts, f"model: {name}, {count:,} parameters ({why}){also}"
