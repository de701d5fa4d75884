"""The tabular recipe: classes or values from rows or windows of numbers.

Enters: a store with dense features `(n, F)` or `(n, T, F)`, or a series; a plain HDF5 file will do.
Leaves: a `Job`. Costs: the quality gate's look (only where no pack has looked), one read of the
targets and of up to 200,000 rows; seconds.

The gate stands in front: what would overflow is refused with the gate's own findings and what to
type. Inputs are scaled in the model by numbers fitted on training rows; outputs are bounded so that
they keep a gradient; the rate follows the batch size. Each decision is in the job's notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from torch import nn

from stoker.config import Settings
from stoker.errors import InputError
from stoker.recipes.classification import label_places
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
from stoker.recipes.options import (
    AtLeastOne,
    CheckedOptions,
    Range,
    Share,
    parse_options,
    require,
)
from stoker.recipes.raw_tables import open_raw_table
from stoker.recipes.scaling import Ramps, RobustScale, fit_ramps, fit_robust, training_rows
from stoker.recipes.schedule import LrRule, lr_factor, make_adamw, warmup_cosine
from stoker.recipes.tabular.data import (
    Inputs,
    SplitMode,
    Task,
    TaskName,
    find_inputs,
    find_task,
    split_samples,
)
from stoker.recipes.tabular.evaluation import (
    Classify,
    ClassWeights,
    Regress,
    RegressionLoss,
    TableData,
    class_names,
    find_quiet,
)
from stoker.recipes.tabular.model import (
    BoundMode,
    Channels,
    PatchShape,
    PatchTransformer,
    RowMlp,
    TabularModel,
    set_gain,
)
from stoker.store.fields import Array
from stoker.store.reader import Store

_MOST_RAMPS = 4096  # of all columns together: the first layer has `hidden[0]` weights for each
_ABOVE_0 = Range("above 0", lambda value: value > 0, 1)


@dataclass(frozen=True)
class TabularOptions(CheckedOptions):
    """What the tabular recipe may be told.

    Attributes:
        field: Inputs; None takes `features`, else the base series, else the only field of numbers.
        target_field: What is predicted.
        model: "mlp", "patchtst", or "auto": the MLP for rows, the patch transformer for windows.
        task: "auto" decides by the type of the targets: whole numbers are classes.
        hidden: Widths of the MLP's hidden layers.
        d_model: Width of the transformer.
        layers: Transformer layers.
        heads: Attention heads; divides `d_model`.
        ffn_factor: Width of the feed-forward part over `d_model`.
        patch: Rows per patch.
        stride: Rows from one patch to the next.
        channels: "mixed" embeds all columns of a patch together; "independent" runs every column by
            itself with shared weights, for as many times the work as there are columns.
        dropout: In both networks.
        init_gain: Gain of the Xavier initialisation, such as 0.5; None keeps torch's own.
        output_bound: Largest magnitude of an output: class scores, or values in units of the
            training targets' spread, such as 10; None for no bound.
        output_bound_mode: "soft" keeps gradients; "clamp" does not and is there to compare with.
        scale_inputs: Scale by median and quartiles of training rows, inside the model.
        input_tails: "log" passes scaled inputs through sign(x) log(1 + |x|), which keeps the order of values far out;
            "cut" leaves that to `input_clip` alone.
        input_clip: Largest scaled input; None for no limit.
        input_ramps: Ramps that the MLP gets beside each column, between its quantiles in training rows; fewer
            where a table has many columns, 0 for none.
        class_weights: "none"; "balanced" by the training shares; or a weight per class.
        quiet_class: Name of the class that should raise no alarm, for the rate of false alarms; None finds one that is
            called benign, normal, negative or the like.
        loss: Of a regression: Huber with delta 1, or mean squares, of scaled targets.
        split: "store" as packed; "time" in order; "random"; "distinct" is random with equal rows on one
            side; "auto" takes the first of these that can be right.
        ratios: Shares of train, val and test where the store has no split.
        embargo: Samples left out after a border in time; None is a window.
        batch_size: Samples per update, accumulation included, that the rate is scaled for; None
            leaves it as given.
        reference_batch: Samples per update at which the given rate is right.
        lr_rule: How the rate grows with the samples per update: "linear", "sqrt", or "none".
        weight_decay: Of AdamW, on matrices only.
        warmup_share: Share of the updates in which the rate rises.
    """

    field: str | None = None
    target_field: str = "targets"
    model: Literal["auto", "mlp", "patchtst"] = "auto"
    task: Literal["auto", "classification", "regression"] = "auto"
    hidden: Annotated[
        tuple[int, ...], Range("widths of 1 or more", lambda widths: min(widths, default=1) >= 1)
    ] = (512, 512)
    d_model: AtLeastOne = 256
    layers: AtLeastOne = 3
    heads: AtLeastOne = 4
    ffn_factor: AtLeastOne = 4
    patch: AtLeastOne = 16
    stride: AtLeastOne = 8
    channels: Channels = "mixed"
    dropout: Share = 0.1
    init_gain: Annotated[float | None, _ABOVE_0] = None
    output_bound: Annotated[float | None, _ABOVE_0] = None
    output_bound_mode: BoundMode = "soft"
    scale_inputs: bool = True
    input_tails: Literal["log", "cut"] = "log"
    input_clip: Annotated[float | None, _ABOVE_0] = 10.0
    input_ramps: Annotated[int, Range("0 or more", lambda ramps: ramps >= 0)] = 32
    class_weights: ClassWeights = "none"
    quiet_class: str | None = None
    loss: RegressionLoss = "huber"
    split: SplitMode = "auto"
    ratios: tuple[float, float, float] = (0.8, 0.1, 0.1)
    embargo: int | None = None
    batch_size: Annotated[int | None, _ABOVE_0] = None
    reference_batch: Annotated[int, _ABOVE_0] = 128
    lr_rule: LrRule = "linear"
    weight_decay: float = 1e-2
    warmup_share: Share = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.d_model % self.heads == 0,
            "heads",
            self.heads,
            f"a divisor of d_model, which is {self.d_model}",
            "heads=4",
        )

    @property
    def patch_shape(self) -> PatchShape:
        """The transformer's sizes."""
        return PatchShape(
            self.d_model,
            self.layers,
            self.heads,
            self.ffn_factor,
            self.patch,
            self.stride,
            self.channels,
        )


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
        wanted: TaskName | None = None if chosen.task == "auto" else chosen.task
        task = find_task(store, chosen.target_field, np.concatenate(list(targets.values())), wanted)
        goal: Classify | Regress
        if task.classes is None:
            goal = Regress(targets["train"], targets["val"], chosen.loss)
        else:
            goal = Classify(task.classes, targets["train"], targets["val"], chosen.class_weights)
        if task.classes is not None:  # a wrong name is refused before the training
            find_quiet(class_names(store, task), chosen.quiet_class)
        data = TableData(
            store,
            inputs,
            chosen.target_field,
            task,
            samples,
            targets,
            chosen.quiet_class,
            partial(read_inputs, inputs=inputs),
            seed,
        )
        factor, why_lr = lr_factor(
            chosen.batch_size, chosen.reference_batch, chosen.lr_rule, len(samples["train"])
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, why_model = _make_model(store, inputs, samples["train"], task, goal, chosen)
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
        """Return what `training.*` says about weights and outputs, and the samples per update."""
        asked = {
            key.rpartition(".")[2]: settings.get(key)
            for key in self.uses
            if not settings.is_default(key)
        }
        most = settings.data.max_training_samples or settings.training.samples_per_update
        together = min(settings.training.samples_per_update, most)
        return {"batch_size": given.get("batch_size", together), **asked}

    def describe(self, job: Job) -> dict[str, Any]:
        """Return the sizes of inputs and outputs, and which network it is."""
        model = cast(TabularModel, job.model)
        inputs: Inputs = cast("partial[Any]", job.unpack).keywords["inputs"]
        head: Any = [part for part in model.body.modules() if isinstance(part, nn.Linear)][-1]
        return {
            "inputs": [inputs.field],
            "is_series": inputs.is_series,
            "window": inputs.window,
            "num_features": inputs.num_features,
            "num_outputs": int(head.out_features),
            "is_classifier": model.is_classifier,
            "is_wide": model.scaler.center.dtype == torch.float64,
            "is_squashed": model.scaler.is_squashed,
            "num_ramps": 0 if model.ramps is None else len(model.ramps.columns),
            "body": "mlp" if isinstance(model.body, RowMlp) else "patchtst",
        }

    def rebuild(self, options: TabularOptions, facts: Facts) -> Rebuilt:
        """Return the network; scalers and classes come with the weights."""
        (field,) = facts["inputs"]
        inputs = Inputs(field, facts["is_series"], facts["window"], facts["num_features"], "")
        outputs, columns = facts["num_outputs"], inputs.num_columns
        known: dict[str, Any] = (
            {"classes": np.zeros(outputs, np.int64)}
            if facts["is_classifier"]
            else {"target_center": np.zeros(outputs), "target_scale": np.ones(outputs)}
        )
        # Their places and widths come with the weights, as the scaler's numbers do.
        num_ramps = facts.get("num_ramps", 0)
        ramps = Ramps(*np.zeros((3, num_ramps))) if num_ramps else None
        model = _build_network(
            facts["body"],
            inputs,
            outputs,
            _make_scaler(
                np.zeros(columns),
                np.ones(columns),
                options,
                is_wide=facts.get("is_wide", False),
                is_squashed=facts.get("is_squashed", False),
            ),
            known,
            options,
            ramps=ramps,
        )

        def unpack(batch: Tensors) -> torch.Tensor:
            return read_inputs(batch, inputs)

        return Rebuilt(model, [field], unpack, TabularModel.predict)

    def open_raw(
        self, given: Any, made: Rebuilt, facts: Facts, told: Mapping[str, Any]
    ) -> RawReader | None:
        """Return the rows of a table, for a model that was trained on one."""
        if "table" not in facts or facts["window"] is not None:
            return None
        scaler = cast(TabularModel, made.model).scaler
        spread = scaler.scale.double().cpu().numpy()
        is_scaled = bool((spread != 1).any())
        ranges = (scaler.center.double().cpu().numpy(), spread) if is_scaled else None
        return open_raw_table(given, facts, told, ranges)

    def read_truth(
        self, store: Store, samples: Array, made: Rebuilt, options: TabularOptions, facts: Facts
    ) -> Array | None:
        """Return the targets of a store's rows: places of the classes, or values."""
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
        """Return rows or windows as the store has them; a series has a gap flag beside each row."""
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
    return read_inputs(batch, inputs), encode(batch[target])


def read_inputs(batch: Tensors, inputs: Inputs) -> torch.Tensor:
    """Return inputs as stored; a series with its gap flag as one column more."""
    values = batch[inputs.field]
    if not inputs.is_series:
        return values
    flag = (batch[f"{inputs.field}/gap"] != 0).float().unsqueeze(-1)
    return torch.cat([values.float(), flag], dim=-1)


def _require_targets(store: Store, target: str) -> None:
    info = store.fields.get(target)
    aside = store.left_aside(target)
    if info is None and aside is not None:
        raise InputError(
            f"the option 'target_field' is {target!r}, and {aside}.",
            f"a dataset of numbers with {store.num_samples:,} rows, a target for every sample",
            f"write {target!r} again, or --set recipe.options.target_field=ANOTHER",
        )
    require(
        info is not None and info.kind == "dense" and np.dtype(info.dtype).kind in "fiu",
        "target_field",
        target,
        ", ".join(name for name, about in store.fields.items() if about.kind == "dense"),
        "stoker pack table FILE.csv OUT --target COLUMN",
    )


def _make_model(
    store: Store,
    inputs: Inputs,
    train: Array,
    task: Task,
    goal: Classify | Regress,
    options: TabularOptions,
) -> tuple[TabularModel, str]:
    center, scale = np.zeros(inputs.num_columns), np.ones(inputs.num_columns)
    rows = training_rows(store, inputs.field, train)
    if options.scale_inputs:
        center[: inputs.num_features], scale[: inputs.num_features] = fit_robust(rows)
    windowed = inputs.window is not None
    name = {"auto": "patchtst" if windowed else "mlp"}.get(options.model, options.model)
    require(
        windowed or name == "mlp", "model", name, "'mlp' for rows without a window", "model='mlp'"
    )
    scaler = _make_scaler(
        center,
        scale,
        options,
        is_wide=options.scale_inputs and np.dtype(store.fields[inputs.field].dtype) == np.float64,
        is_squashed=options.scale_inputs and options.input_tails == "log",
    )
    ramps = None
    each = min(options.input_ramps, _MOST_RAMPS // inputs.num_columns)
    if each > 1 and not windowed:
        fitted = fit_ramps(scaler(torch.from_numpy(rows)).numpy(), each)
        ramps = Ramps(*fitted) if len(fitted[0]) else None
    model = _build_network(
        name, inputs, task.num_outputs, scaler, goal.model_facts, options, ramps=ramps
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    why = "asked for" if options.model != "auto" else "windows" if windowed else "rows"
    also = "" if ramps is None else f"; {len(ramps.columns):,} ramps beside the columns"
    return model, f"model: {name}, {count:,} parameters ({why}){also}"


def _make_scaler(
    center: Array, scale: Array, options: TabularOptions, *, is_wide: bool, is_squashed: bool
) -> RobustScale:
    return RobustScale(
        center,
        scale,
        options.input_clip if options.scale_inputs else None,
        torch.float64 if is_wide else torch.float32,
        is_squashed=is_squashed,
    )


def _build_network(
    name: str,
    inputs: Inputs,
    num_outputs: int,
    scaler: RobustScale,
    known: Mapping[str, Any],
    options: TabularOptions,
    *,
    ramps: Ramps | None,
) -> TabularModel:
    """Return the network with initial weights; `known` is what the model must know of the targets."""
    body: nn.Module
    if name == "mlp":
        width = inputs.num_columns * (inputs.window or 1)
        width += 0 if ramps is None else len(ramps.columns)
        body = RowMlp(width, options.hidden, num_outputs, options.dropout)
    else:
        body = PatchTransformer(
            inputs.window or 1,
            inputs.num_columns,
            options.patch_shape,
            num_outputs,
            options.dropout,
        )
    if options.init_gain is not None:
        set_gain(body, options.init_gain)
    return TabularModel(
        scaler,
        body,
        bound=options.output_bound,
        bound_mode=options.output_bound_mode,
        ramps=ramps,
        **known,
    )
