"""Metrics of a picture classifier, in validation and on test samples.

Enters: scores and class numbers on the device; for the baselines, training pictures of the store. Leaves: validation
metrics; at the end an `Evaluation` with metrics per class, a confusion matrix, confidence intervals, two baselines
and pictures of the worst mistakes. Costs: some small kernels per batch; at the end one read of at most 20,000 training
pictures and of the test pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from stoker.recipes.classification import ScoreList, class_metrics, evaluate_classes
from stoker.recipes.metrics import ClassCounts, bootstrap
from stoker.recipes.pictures import as_data_url, read_rows, sample_name
from stoker.recipes.scaling import evenly
from stoker.runs.evaluation import Evaluation, Example
from stoker.store.fields import Array
from stoker.store.reader import Store

Tensor = torch.Tensor
_FIT_IMAGES = 20_000
_THUMBNAIL = 8
_SHOWN = 12
_SHOWN_SIDE = 72
_TOP = 5
COMPARED_BY = ("accuracy", True)
"""In validation, at the end of a run, and for answers."""
_OF_ANSWERS = ("accuracy", "balanced_accuracy", "macro_f1")


class ImageMetrics(ClassCounts):
    """`ClassCounts` that also counts answers per class (for F1) and hits among the five best classes."""

    def update(self, scores: Tensor, labels: Tensor, valid: Tensor | None = None) -> None:
        """Add scores and class numbers of a batch."""
        labels, answers = labels.long(), scores.argmax(dim=1)
        seen = torch.ones_like(labels) if valid is None else valid.long()
        hits, near = (labels == answers) * seen, hits_in_top(scores, labels) * seen
        self.count((labels, seen), (labels, hits), (answers, seen), (labels, near))

    def compute(self) -> dict[str, float]:
        """Return accuracy, balanced accuracy, macro F1, and top-5 accuracy if there are more than 5 classes."""
        if self.counts is None:
            return {}
        seen, hits, answered, near = self.counts.cpu().double().numpy()
        occurs = seen > 0
        f1 = 2 * hits[occurs] / (seen + answered)[occurs]
        found = super().compute() | {"macro_f1": float(f1.mean())}
        if self._num_classes > _TOP:
            found["top5_accuracy"] = float(near.sum() / seen.sum())
        return found


def hits_in_top(scores: Tensor, labels: Tensor) -> Tensor:
    """Return `(batch,)`, whether the true class is among the five best; ties count against it."""
    own = scores.gather(1, labels[:, None])
    return (scores >= own).sum(dim=1) <= _TOP


# -- at the end ----------------------------------------------------------------------------------


class FinalImageMetrics:
    """Evaluates the best weights on the test pictures, with baselines fitted on training pictures."""

    def __init__(self, store: Store, train: Array, names: Sequence[str]) -> None:
        self._store, self._train, self._names = store, train, list(names)
        self._scores = ScoreList()
        self._near: list[Array] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take scores and class numbers of a batch."""
        self._scores.update(outputs, targets)
        self._near.append(hits_in_top(outputs, targets.long()).cpu().numpy())

    def evaluate(self, model: torch.nn.Module, device: torch.device, samples: Array) -> Evaluation:
        """Return the evaluation over all batches; see `FinalMetrics`."""
        shares, labels = self._scores.probabilities, self._scores.labels
        report = evaluate_classes(shares, labels, self._names)
        metrics, intervals = {**report.metrics}, {**report.intervals}
        if len(self._names) > _TOP:
            near = np.concatenate(self._near)
            metrics["top5_accuracy"] = float(near.mean())
            intervals["top5_accuracy"] = bootstrap(near)
        baselines, note = self._baselines(samples, labels)
        return replace(
            report,
            compared_by=COMPARED_BY,
            metrics=metrics,
            intervals=intervals,
            baselines=baselines,
            examples=tuple(self._mistakes(samples, labels, shares)),
            notes=(note, "pictures: the mistakes that the model was surest of"),
        )

    def _baselines(self, samples: Array, labels: Array) -> tuple[dict[str, dict[str, float]], str]:
        num = len(self._names)
        known = self._store.gather("labels", self._train)
        majority = np.bincount(known, minlength=num).argmax()
        few = evenly(self._train, _FIT_IMAGES)
        weights = fit_ridge(self._features(few), self._store.gather("labels", few), num)
        guessed = (self._features(samples) @ weights).argmax(axis=1)
        linear = f"linear on {_THUMBNAIL} x {_THUMBNAIL} thumbnails"
        found = {}
        for name, answers in (("majority", np.full(len(labels), majority)), (linear, guessed)):
            told = class_metrics(np.eye(num, dtype=np.float32)[answers], labels)
            found[name] = {metric: told[metric] for metric in _OF_ANSWERS}
        return found, f"{linear}: ridge regression on {len(few):,} training pictures"

    def _features(self, samples: Array) -> Array:
        return np.concatenate(
            [thumbnails(images) for images in read_rows(self._store, "images", samples)]
        )

    def _mistakes(self, samples: Array, labels: Array, shares: Array) -> Iterator[Example]:
        """Yield the most confident mistakes."""
        answers, sure = shares.argmax(axis=1), shares.max(axis=1)
        wrong = np.flatnonzero(labels != answers)
        for place in wrong[np.argsort(-sure[wrong], kind="stable")[:_SHOWN]].tolist():
            sample = int(samples[place])
            image = self._store.gather("images", np.array([sample]))[0]
            yield Example(
                "image",
                sample_name(self._store, sample),
                self._names[labels[place]],
                f"{self._names[answers[place]]} ({sure[place]:.0%})",
                {"picture": as_data_url(image, _SHOWN_SIDE)},
            )


def thumbnails(images: Array) -> Array:
    """Return `(n, features)`: means over an 8 x 8 grid of pictures `(n, channels, height, width)`, and a 1 as bias."""
    shrunk = torch.nn.functional.adaptive_avg_pool2d(
        torch.from_numpy(images).float() / 255 - 0.5, _THUMBNAIL
    ).numpy()
    flat = shrunk.reshape(len(images), -1)
    return np.concatenate([flat, np.ones((len(images), 1), flat.dtype)], axis=1)


def fit_ridge(features: Array, labels: Array, num_classes: int, strength: float = 1e-3) -> Array:
    """Return `(features, classes)` weights of a ridge regression on class indicators."""
    rows = features.astype(np.float64)
    wanted = np.eye(num_classes)[labels]
    gram = rows.T @ rows / len(rows) + strength * np.eye(rows.shape[1])
    made: Array = np.linalg.solve(gram, rows.T @ wanted / len(rows))
    return made
