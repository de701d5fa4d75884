"""Evaluation of a classifier on test samples: overall and per class, calibration, confidence intervals.

Enters: probabilities and labels of all test samples. Leaves: metrics, one row per class, the confusion matrix, 95 %
intervals and the reliability curve, ready for an `Evaluation`. Costs: a sort per class; memory for the probabilities
(8 MB per million samples and class).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stoker.recipes.metrics import bootstrap, bootstrap_counts
from stoker.runs.evaluation import Confusion, Curve, Evaluation, Example
from stoker.store.fields import Array
from stoker.store.reader import Store

MOST_SHOWN_CLASSES = 200
"""A larger confusion matrix is not kept: nobody can read it, and its intervals would take minutes."""
_NUM_BINS = 10
_MOST_EVALUATED = 2_000_000


class ScoreList:
    """Collects the class probabilities and labels of a pass in host memory."""

    def __init__(self) -> None:
        self._probabilities: list[Array] = []
        self._labels: list[Array] = []

    def update(
        self, scores: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """Add a batch of `(batch, classes)` logits and `(batch,)` labels; rows that are not valid are left out."""
        kept = slice(None) if valid is None else valid.bool()
        self._probabilities.append(scores.float().softmax(dim=1)[kept].cpu().numpy())
        self._labels.append(labels.long()[kept].cpu().numpy())

    @property
    def probabilities(self) -> Array:
        """`(n, classes)`, rows that sum to 1."""
        return np.concatenate(self._probabilities)

    @property
    def labels(self) -> Array:
        """`(n,)` class indices."""
        return np.concatenate(self._labels)


def evaluate_classes(
    probabilities: Array, labels: Array, names: Sequence[str], *, quiet_class: int | None = None
) -> Evaluation:
    """Return the evaluation of a classifier, without baselines.

    Args:
        probabilities: `(n, classes)`.
        labels: `(n,)` indices of the true classes.
        names: Names of the classes.
        quiet_class: Index of the class that should raise no alarm (benign traffic, healthy patients); every other
            answer for one of its samples is a false alarm.
    """
    answers = probabilities.argmax(axis=1)
    matrix = confusion_counts(labels, answers, len(names))
    metrics = class_metrics(probabilities, labels, quiet_class)
    intervals: dict[str, tuple[float, float]] = {"accuracy": bootstrap(answers == labels)}
    is_small = len(names) <= MOST_SHOWN_CLASSES
    if is_small:
        intervals["macro_f1"] = bootstrap_counts(matrix, macro_f1)
        intervals["balanced_accuracy"] = bootstrap_counts(matrix, _balanced)
        if quiet_class is not None:
            quiet = labels == quiet_class
            alarms = 1000.0 * (answers != quiet_class)[quiet]
            intervals["false_alarms_per_1000"] = bootstrap(alarms)
    curve, _ = reliability(probabilities, labels)
    return Evaluation(
        len(labels),
        ("macro_f1", True),
        metrics,
        {name: span for name, span in intervals.items() if math.isfinite(span[0])},
        groups={"class": per_class(probabilities, labels, matrix, names)},
        confusion=Confusion(tuple(names), tuple(map(tuple, matrix.tolist()))) if is_small else None,
        curves=(curve,),
    )


def class_metrics(
    probabilities: Array, labels: Array, quiet_class: int | None = None
) -> dict[str, float]:
    """Return the overall metrics of probabilities, a model's or a baseline's."""
    matrix = confusion_counts(labels, probabilities.argmax(axis=1), probabilities.shape[1])
    counts = matrix[None].astype(np.float64)
    picked = probabilities[np.arange(len(labels)), labels]
    areas = [
        average_precision(probabilities[:, place], labels == place)
        for place in np.flatnonzero(matrix.sum(axis=1)).tolist()
    ]
    found = {
        "accuracy": float(np.trace(matrix) / max(1, matrix.sum())),
        "balanced_accuracy": float(_balanced(counts)[0]),
        "macro_f1": float(macro_f1(counts)[0]),
        "pr_auc": float(np.mean(areas)) if areas else math.nan,
        "log_loss": float(-np.log(np.maximum(picked, 1e-12)).mean()) if len(labels) else math.nan,
        "calibration_error": reliability(probabilities, labels)[1],
    }
    if quiet_class is not None:
        quiet = matrix[quiet_class]
        found["false_alarms_per_1000"] = (
            1000.0 * float(quiet.sum() - quiet[quiet_class]) / max(1, int(quiet.sum()))
        )
    return found


def confusion_counts(labels: Array, answers: Array, num_classes: int) -> Array:
    """Return `(classes, classes)` counts: true class by answer."""
    cells = np.bincount(labels * num_classes + answers, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes)


def per_class(
    probabilities: Array, labels: Array, matrix: Array, names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1, PR-AUC and the number of samples of each class."""
    hits = np.diagonal(matrix).astype(np.float64)
    support, answered = matrix.sum(axis=1), matrix.sum(axis=0)
    rows: dict[str, dict[str, float]] = {}
    for place, name in enumerate(names):
        rows[name] = {
            "precision": hits[place] / answered[place] if answered[place] else math.nan,
            "recall": hits[place] / support[place] if support[place] else math.nan,
            "f1": 2 * hits[place] / max(1, support[place] + answered[place]),
            "pr_auc": average_precision(probabilities[:, place], labels == place),
            "samples": float(support[place]),
        }
    return rows


def average_precision(scores: Array, is_true: Array) -> float:
    """Return the average precision (step-wise area under the precision-recall curve); NaN without a true sample."""
    total = int(is_true.sum())
    if not total:
        return math.nan
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], np.cumsum(is_true[order])
    # Samples with equal scores cannot be ranked, so the curve has one point after the last of them.
    last = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    recall = hits[last] / total
    return float(np.sum(np.diff(recall, prepend=0.0) * hits[last] / (last + 1)))


def reliability(probabilities: Array, labels: Array) -> tuple[Curve, float]:
    """Return how often answers of a given confidence are right, and the expected calibration error."""
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    bins = np.minimum((confidence * _NUM_BINS).astype(int), _NUM_BINS - 1)
    count = np.bincount(bins, minlength=_NUM_BINS)
    used = np.flatnonzero(count)
    said = np.bincount(bins, confidence, _NUM_BINS)[used] / count[used]
    was = np.bincount(bins, right, _NUM_BINS)[used] / count[used]
    error = float((np.abs(said - was) * count[used]).sum() / max(1, count.sum()))
    lines = {
        "model": list(zip(said.tolist(), was.tolist(), strict=True)),
        "perfectly calibrated": [(0.0, 0.0), (1.0, 1.0)],
    }
    return Curve("Calibration", "predicted probability", "share correct", lines), error


def class_examples(
    keys: Sequence[Any], probabilities: Array, labels: Array, names: Sequence[str], most: int = 12
) -> tuple[Example, ...]:
    """Return the most confident mistakes, then right answers of different classes."""
    answers, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    wrong = np.flatnonzero(answers != labels)
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")][: most // 2]
    right = np.flatnonzero(answers == labels)
    _, firsts = np.unique(labels[right], return_index=True)
    chosen = np.concatenate([wrong, right[firsts][: most - len(wrong)]]).astype(int)
    return tuple(
        Example(
            "text",
            str(keys[place]),
            names[labels[place]],
            f"{names[answers[place]]} ({confidence[place]:.0%})",
        )
        for place in chosen.tolist()
    )


def macro_f1(counts: Array) -> Array:
    """Return `(draws,)` means of F1 over the classes that occur, from `(draws, classes, classes)` counts."""
    hits = np.diagonal(counts, axis1=1, axis2=2)
    support, answered = counts.sum(axis=2), counts.sum(axis=1)
    scores = 2 * hits / np.maximum(support + answered, 1e-12)
    occurs = support > 0
    means: Array = (scores * occurs).sum(axis=1) / np.maximum(occurs.sum(axis=1), 1)
    return means


def _balanced(counts: Array) -> Array:
    support = counts.sum(axis=2)
    recalls = np.diagonal(counts, axis1=1, axis2=2) / np.maximum(support, 1e-12)
    means: Array = recalls.sum(axis=1) / np.maximum((support > 0).sum(axis=1), 1)
    return means


# -- answers whose truth is known --------------------------------------------------------------------


def label_places(store: Store, numbers: Array, names: Sequence[str]) -> Array:
    """Return the model's class index for each class number of a store; -1 for a class that the model does not know.

    Another store may have other classes, or another order. If both have class names, classes are matched by name.
    """
    own = list(store.manifest.attributes.get("classes") or ())
    if not own or not names or own == list(names):
        return numbers
    places = np.array([names.index(name) if name in names else -1 for name in own])
    known = (numbers >= 0) & (numbers < len(own))
    found: Array = np.where(known, places[np.where(known, numbers, 0)], -1)
    return found


class AnswerJudge:
    """A `Judge` for classes (all metrics of `evaluate_classes`) and for values (mean absolute error)."""

    def __init__(
        self,
        names: Sequence[
            str
        ],  # of the classes, in the order of the probabilities; empty for numbers
        # the next three are for classes, as in the run's own evaluation
        compared_by: tuple[str, bool] = ("macro_f1", True),
        quiet_class: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._names, self._quiet = names, quiet_class
        self._compared_by, self._notes = compared_by, notes
        self._truths: list[Array] = []
        self._given: list[Array] = []
        self._num_kept = 0

    def update(self, columns: Mapping[str, Array], truth: Array) -> None:
        """Add answers; those after the first two million are left out."""
        given = columns.get("probability", columns.get("value"))
        if given is None or self._num_kept > _MOST_EVALUATED:
            return
        known = truth >= 0 if truth.ndim == 1 else np.isfinite(truth).all(axis=1)
        self._truths.append(truth[known])
        self._given.append(given[known])
        self._num_kept += int(known.sum())

    def evaluate(self) -> Evaluation | None:
        """Return the evaluation; see `Judge`."""
        if not self._num_kept:
            return None
        truth, given = np.concatenate(self._truths), np.concatenate(self._given)
        if truth.ndim == 1:
            names = list(self._names) or [str(n) for n in range(given.shape[1])]
            found = evaluate_classes(given, truth, names, quiet_class=self._quiet)
            return replace(found, compared_by=self._compared_by, notes=self._notes)
        errors = np.abs(given.reshape(len(truth), -1) - truth).mean(axis=1)
        mean = {"mae": float(errors.mean())}
        return Evaluation(len(truth), ("mae", False), mean, {"mae": bootstrap(errors)})
