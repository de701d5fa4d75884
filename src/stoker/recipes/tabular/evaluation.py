"""The two tasks of the tabular recipe, and its final evaluation, with boosted trees as a baseline.

Enters: training and validation targets as stored; the store, the split, the task; then the outputs for the test
samples. Leaves: `Classify` or `Regress` (the encoding of targets on the device, criterion, metrics, baseline), and an
`Evaluation` with the importance of inputs. Costs: one pass over the targets; in training a gather of a small constant,
copied to the device once; at the end fitting the baseline (seconds, see `recipes/baselines.py`), and a forward pass
over up to 1,000 rows for every column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from stoker.errors import InputError
from stoker.recipes.baselines import (
    MOST_TREE_CLASSES,
    Boosting,
    Ridge,
    answer_samples,
    summary_rows,
    thin_samples,
)
from stoker.recipes.classification import (
    ScoreList,
    class_examples,
    class_metrics,
    confusion_counts,
    evaluate_classes,
    macro_f1,
)
from stoker.recipes.contract import Metrics
from stoker.recipes.metrics import (
    ClassCounts,
    CountedParts,
    MaskedMean,
    bootstrap,
    class_priors,
    constant_mae,
    majority_baseline,
)
from stoker.recipes.options import require
from stoker.recipes.scaling import OnDevice, fit_robust
from stoker.recipes.tabular.data import Inputs, Task
from stoker.recipes.tabular.options import ClassWeights, RegressionLoss, TabularOptions
from stoker.runs.evaluation import Curve, Evaluation, Example
from stoker.store.fields import Array
from stoker.store.reader import Store

_FIT_ROWS, _MOST_COMPARED = 20_000, 100_000
_PERMUTED_ROWS, _PERMUTED_WINDOWS = 1000, 200
_MOST_COLUMNS = 200
_NUM_EXAMPLES = 12
_MOST_POINTS = 200
_QUIET = {
    "benign", "normal", "negative", "none", "no", "false", "healthy", "ok", "legitimate", "ham", "clean", "good",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class TableData:
    """Parts of the job that the evaluation needs."""

    store: Store
    inputs: Inputs
    task: Task
    samples: Mapping[str, Array]
    targets: Mapping[str, Array]
    options: TabularOptions
    seed: int

    def places(self, split: str) -> Array:
        """Return the targets of a split as class indices."""
        assert self.task.classes is not None
        return np.searchsorted(self.task.classes, self.targets[split].reshape(-1))

    def values(self, split: str) -> Array:
        """Return the targets of a split as `(n, values)` float64."""
        return self.targets[split].reshape(len(self.targets[split]), -1).astype(np.float64)

    def compared(self, samples: Array) -> tuple[Array, tuple[str, ...]]:
        """Return indices of the test samples that baselines predict, and a note if these are only a part."""
        drawn = thin_samples(np.arange(len(samples)), _MOST_COMPARED, self.seed)
        if len(drawn) == len(samples):
            return drawn, ()
        return drawn, (f"baselines predict {len(drawn):,} of the test samples, drawn by the seed",)

    def rows_for(self, split: str, most: int) -> tuple[Array, Array]:
        """Return at most `most` rows for a baseline, and their indices in the split."""
        kept = thin_samples(np.arange(len(self.samples[split])), most, self.seed)
        return summary_rows(self.store, self.inputs.field, self.samples[split][kept]), kept


def class_names(store: Store, task: Task) -> list[str]:
    """Return the names of the classes from the table, or their numbers."""
    named = store.manifest.attributes.get("classes") or []
    return list(named) or [str(number) for number in np.asarray(task.classes).tolist()]


class ClassTable:
    """Final metrics of a classifier."""

    def __init__(self, data: TableData) -> None:
        self._data = data
        self._scores = ScoreList()
        self._names = class_names(data.store, data.task)
        self._quiet, self._notes = find_quiet(self._names, data.options.quiet_class)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch."""
        self._scores.update(outputs, targets)

    def evaluate(self, model: torch.nn.Module, device: torch.device, samples: Array) -> Evaluation:
        """Return the evaluation, with the baselines majority and boosted trees (linear for many classes)."""
        data, names = self._data, self._names
        chances, labels = self._scores.probabilities, self._scores.labels
        report = evaluate_classes(chances, labels, names, quiet_class=self._quiet)
        known = data.places("train")
        drawn, notes = data.compared(samples)
        wanted = labels[drawn]
        priors = np.tile(class_priors(known, len(names)), (len(wanted), 1))
        baselines = {"majority": class_metrics(priors, wanted, self._quiet)}
        rows, kept = data.rows_for("train", _FIT_ROWS)
        if len(names) <= MOST_TREE_CLASSES:
            trees = Boosting(rows, known[kept], len(names), data.seed)
            scores = answer_samples(trees, data.store, data.inputs.field, samples[drawn])
            baselines["boosted trees"] = class_metrics(scores, wanted, self._quiet)
            note = _tree_note(trees)
        else:
            line = Ridge(rows, np.eye(len(names))[known[kept]])
            scores = answer_samples(line, data.store, data.inputs.field, samples[drawn])
            scores = np.clip(scores, 1e-6, None)
            scores /= scores.sum(axis=1, keepdims=True)
            baselines["linear"] = class_metrics(scores, wanted, self._quiet)
            note = f"linear baseline: least squares on {len(rows):,} training samples"
        importance, told = _importance(data, model, device, samples, labels)
        return replace(
            report,
            baselines=baselines,
            importance=importance,
            examples=_with_inputs(
                data,
                class_examples(samples.tolist(), chances, labels, names, _NUM_EXAMPLES),
                importance,
            ),
            notes=(*self._notes, note, *notes, *told),
        )


class ValueTable:
    """Final metrics of a regression, in the units of the targets.

    Targets were scaled by `(target - center) / scale`.
    """

    def __init__(self, data: TableData, center: Array, scale: Array) -> None:
        self._data, self._center, self._scale = data, center, scale
        self._answers: list[Array] = []

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch."""
        self._answers.append(outputs.double().cpu().numpy() * self._scale + self._center)

    def evaluate(self, model: torch.nn.Module, device: torch.device, samples: Array) -> Evaluation:
        """Return the evaluation, with the baselines median, linear and boosted trees."""
        data = self._data
        known, wanted = data.values("train"), data.values("test")
        answers = np.concatenate(self._answers)
        mean = known.mean(axis=0)
        rows, kept = data.rows_for("train", _FIT_ROWS)
        drawn, notes = data.compared(samples)
        trees = Boosting(rows, known[kept], None, data.seed)
        truth = wanted[drawn]
        baselines = {
            "median": _value_metrics(np.broadcast_to(self._center, truth.shape), truth, mean)
        }
        for who, fitted in (("linear", Ridge(rows, known[kept])), ("boosted trees", trees)):
            said = answer_samples(fitted, data.store, data.inputs.field, samples[drawn])
            baselines[who] = _value_metrics(said, truth, mean)
        errors = np.abs(answers - wanted).mean(axis=1)
        names = data.store.fields[data.options.target_field].columns or [
            f"value {number}" for number in range(wanted.shape[1])
        ]
        groups = {}
        if wanted.shape[1] > 1:
            groups["value"] = {
                str(names[k]): _value_metrics(answers[:, [k]], wanted[:, [k]], mean[[k]])
                for k in range(min(wanted.shape[1], _MOST_COLUMNS))
            }
        importance, told = _importance(data, model, device, samples, wanted)
        shown = thin_samples(np.arange(len(wanted)), _MOST_POINTS, data.seed)
        shown = shown[np.argsort(wanted[shown, 0], kind="stable")]
        lines = {
            "predicted": [(float(wanted[k, 0]), float(answers[k, 0])) for k in shown],
            "true": [(float(wanted[k, 0]), float(wanted[k, 0])) for k in shown],
        }
        worst = np.argsort(-errors, kind="stable")[: _NUM_EXAMPLES // 2].tolist()
        best = np.argsort(errors, kind="stable")[: _NUM_EXAMPLES // 2].tolist()
        return Evaluation(
            len(wanted),
            ("mae", False),
            _value_metrics(answers, wanted, mean),
            {"mae": bootstrap(errors), "r2": _r2_interval(answers, wanted, mean)},
            baselines,
            groups,
            curves=(
                Curve("Predicted against true values", "true value", "predicted value", lines),
            ),
            importance=importance,
            examples=_with_inputs(
                data,
                [
                    Example("text", str(samples[k]), _spell(wanted[k]), _spell(answers[k]))
                    for k in dict.fromkeys([*worst, *best])
                ],
                importance,
            ),
            notes=(_tree_note(trees), *notes, *told),
        )


def _with_inputs(
    data: TableData, examples: Sequence[Example], importance: Mapping[str, float]
) -> tuple[Example, ...]:
    """Return examples with the values of the three most important columns added to their sample numbers."""
    info = data.store.fields[data.inputs.field]
    columns = list(info.columns or ()) if len(info.shape) == 1 and not data.inputs.is_series else []
    places = [columns.index(name) for name in list(importance)[:3] if name in columns]
    shown = []
    for example in examples:
        key = f"sample {example.key}"
        if places:
            row = data.store.gather(data.inputs.field, np.array([int(example.key)]))[0]
            key += ": " + ", ".join(f"{columns[place]} {_plain(row[place])}" for place in places)
        shown.append(replace(example, key=key))
    return tuple(shown)


def _tree_note(trees: Boosting) -> str:
    return (
        f"boosted trees: {trees.num_rounds} rounds on {trees.num_rows:,} training samples, untuned"
    )


def _value_metrics(answers: Array, wanted: Array, mean: Array) -> dict[str, float]:
    errors = answers - wanted
    return {
        "mae": float(np.abs(errors).mean()),
        "rmse": float(math.sqrt(np.square(errors).mean())),
        "r2": _r2(answers, wanted, mean),
    }


def _r2(answers: Array, wanted: Array, mean: Array) -> float:
    """Return R2 against the training mean (1 - squared error / its squared error), averaged over values."""
    held = np.square(wanted - mean).sum(axis=0)
    lost = np.square(answers - wanted).sum(axis=0)
    known = held > 0
    return float((1 - lost[known] / held[known]).mean()) if known.any() else math.nan


def _r2_interval(answers: Array, wanted: Array, mean: Array) -> tuple[float, float]:
    lost, held = np.square(answers - wanted).mean(axis=1), np.square(wanted - mean).mean(axis=1)
    return bootstrap(
        np.stack([lost, held], axis=1),
        lambda means: 1 - means[:, 0] / np.maximum(means[:, 1], 1e-300),
    )


def _spell(values: Array) -> str:
    return ", ".join(map(_plain, values[:4])) + (", ..." if len(values) > 4 else "")


def _plain(value: float) -> str:
    """Return a number without an exponent if possible: 4,998,240, not 4.99824e+06."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.5g}"


def find_quiet(names: Sequence[str], asked: str | None) -> tuple[int | None, tuple[str, ...]]:
    """Return the index of the class that should raise no alarm, or None, and notes."""
    if asked is not None:
        if asked not in names:
            raise InputError(
                f"the option 'quiet_class' is {asked!r}.",
                ", ".join(names),
                f"quiet_class={names[0]!r}",
            )
        return list(names).index(asked), ()
    found = [place for place, name in enumerate(names) if name.strip().lower() in _QUIET]
    if len(found) != 1:
        return None, ()
    return found[0], (
        f"false alarms are predictions other than {names[found[0]]!r} for samples of it (quiet_class)",
    )


# -- importance ------------------------------------------------------------------------------------


@torch.no_grad()
def _importance(
    data: TableData, model: torch.nn.Module, device: torch.device, samples: Array, truth: Array
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the loss of the metric when a column is permuted among samples, largest first, and notes."""
    info = data.store.fields[data.inputs.field]
    if data.inputs.is_series or info.shape[-1] > _MOST_COLUMNS:
        why = "windows of a series" if data.inputs.is_series else f"{info.shape[-1]:,} columns"
        return {}, (f"no importance by permutation: {why}",)
    most = _PERMUTED_WINDOWS if data.inputs.window else _PERMUTED_ROWS
    chosen = thin_samples(np.arange(len(samples)), most, data.seed)
    if len(chosen) < 2:
        return {}, ()
    values = torch.from_numpy(data.store.gather(data.inputs.field, samples[chosen])).to(device)
    wanted = truth[chosen]

    def reached(rows: torch.Tensor) -> float:
        outputs: Any = model(data.inputs.read({data.inputs.field: rows}))
        if data.task.classes is not None:
            answers = outputs.argmax(dim=1).cpu().numpy()
            counts = confusion_counts(wanted, answers, data.task.num_outputs)
            return float(macro_f1(counts[None].astype(np.float64))[0])
        model_any: Any = model
        answers = (
            (outputs * model_any.target_scale + model_any.target_center).double().cpu().numpy()
        )
        return -float(np.abs(answers - wanted).mean())

    whole = reached(values)
    order = torch.from_numpy(np.random.default_rng(data.seed).permutation(len(chosen))).to(device)
    names = info.columns or [f"column {number}" for number in range(info.shape[-1])]
    lost = {}
    for place, name in enumerate(names):
        changed = values.clone()
        changed[..., place] = values[order][..., place]
        lost[str(name)] = whole - reached(changed)
    ranked = dict(sorted(lost.items(), key=lambda pair: -pair[1]))
    return ranked, (
        f"importance: one permutation of each column among {len(chosen):,} test samples",
    )


# -- the two tasks --------------------------------------------------------------------------------


class Classify:
    """Classification: encodes targets as class indices; the loss is the mean cross-entropy over samples."""

    def __init__(self, classes: Array, train: Array, val: Array, weights: ClassWeights) -> None:
        self._classes = classes
        self._on_device = OnDevice(classes, torch.int64)
        self.fitted = {"classes": classes}  # buffers of the model
        self.notes: tuple[str, ...] = ()
        self._weights: OnDevice | None = None
        if weights != "none":
            found = self._find_weights(train, weights)
            self._weights = OnDevice(found)
            shown = ", ".join(f"{weight:.3g}" for weight in found[:8])
            self.notes = (f"class weights: {shown}{', ...' if len(found) > 8 else ''}",)
        self.baseline = self._find_baseline(self._places(train), self._places(val))

    def _find_weights(self, train: Array, asked: ClassWeights) -> Array:
        count = len(self._classes)
        if asked == "balanced":
            seen = np.bincount(self._places(train), minlength=count)
            # Their mean over the training samples is 1, so that the learning rate need not change.
            return np.where(seen > 0, len(train) / (max(1, (seen > 0).sum()) * seen.clip(1)), 1.0)
        given = np.asarray(asked)
        require(
            given.dtype.kind == "f" and len(given) == count and bool((given >= 0).all()),
            "class_weights",
            asked,
            f"{count} weights of 0 or more, 'balanced' or 'none'",
            "class_weights='balanced'",
        )
        return given

    def _places(self, values: Array) -> Array:
        return np.searchsorted(self._classes, values.reshape(-1))

    def encode(self, targets: torch.Tensor) -> torch.Tensor:
        """Return `(batch,)` class indices, on the device."""
        classes = self._on_device.on(targets.device)
        return torch.searchsorted(classes, targets.reshape(-1).long())

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the weighted losses' mean over samples; torch's own weighted mean divides by the weights' sum."""
        losses = functional.cross_entropy(outputs.float(), targets, reduction="none")
        if self._weights is not None:
            losses = losses * self._weights.on(losses.device)[targets]
        return losses.mean()

    def metrics(self) -> Metrics:
        """Return accumulators for one pass."""
        return ClassCounts(len(self._classes))

    def final_metrics(self, data: TableData) -> ClassTable:
        """Return the evaluator of the best weights."""
        return ClassTable(data)

    def _find_baseline(self, known: Array, wanted: Array) -> dict[str, float]:
        """Return accuracies of the most common class, and the loss of the training shares."""
        if not len(wanted):
            return {}
        count = len(self._classes)
        priors = torch.from_numpy(np.log(class_priors(known, count))).float()
        loss = self.criterion(priors.expand(len(wanted), -1), torch.from_numpy(wanted))
        return majority_baseline(known, wanted, count) | {"loss": float(loss)}


class Regress:
    """Regression: scales targets by median and quartile range of training; errors are in the targets' units."""

    def __init__(self, train: Array, val: Array, loss: RegressionLoss) -> None:
        flat = train.reshape(len(train), -1).astype(np.float64)
        self._center, self._scale = fit_robust(flat)
        self._loss = loss
        self._center_on, self._scale_on = OnDevice(self._center), OnDevice(self._scale)
        self._mean = OnDevice((flat.mean(axis=0) - self._center) / self._scale)
        # Buffers of the model.
        self.fitted = {"target_center": self._center, "target_scale": self._scale}
        flat_val = val.reshape(len(val), -1).astype(np.float64)
        self.baseline = self._find_baseline(flat_val)
        self.notes: tuple[str, ...] = (
            "targets: scaled by median and quartiles of the training samples",
            f"always answering 0 would have an mae of {constant_mae(0.0, flat_val):.6g}",
        )

    def encode(self, targets: torch.Tensor) -> torch.Tensor:
        """Return `(batch, values)` scaled targets, on the device."""
        flat = targets.reshape(len(targets), -1).float()
        return (flat - self._center_on.on(flat.device)) / self._scale_on.on(flat.device)

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean over samples of the mean over their values."""
        if self._loss == "mse":
            return functional.mse_loss(outputs.float(), targets)
        return functional.huber_loss(outputs.float(), targets)

    def metrics(self) -> Metrics:
        """Return accumulators for one pass."""
        return RegressionMetrics(self._scale_on, self._mean)

    def final_metrics(self, data: TableData) -> ValueTable:
        """Return the evaluator of the best weights."""
        return ValueTable(data, self._center, self._scale)

    def _find_baseline(self, val: Array) -> dict[str, float]:
        """Return MAE and loss of the training median, and R2 of the training mean, which is 0 by definition."""
        if not len(val):
            return {}
        wanted = self.encode(torch.from_numpy(val))
        loss = float(self.criterion(torch.zeros_like(wanted), wanted))
        return {"mae": constant_mae(self._center, val), "r2": 0.0, "loss": loss}


class RegressionMetrics(CountedParts):
    """Mean absolute error in the targets' units, and R2 against the training mean."""

    def __init__(self, scale: OnDevice, mean: OnDevice) -> None:
        self._scale, self._mean = scale, mean
        self._absolute, self._squares, self._spread = MaskedMean(), MaskedMean(), MaskedMean()
        self.parts = [self._absolute, self._squares, self._spread]

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch, without host synchronisation."""
        errors = outputs.double() - targets.double()
        self._absolute.update(errors.abs() * self._scale.on(errors.device))
        self._squares.update(errors.square())
        self._spread.update((targets.double() - self._mean.on(errors.device)).square())

    def compute(self) -> dict[str, float]:
        """Return the metrics over all batches."""
        spread = self._spread.compute()
        share = self._squares.compute() / spread if spread else math.nan
        return {"mae": self._absolute.compute(), "r2": 1 - share}
