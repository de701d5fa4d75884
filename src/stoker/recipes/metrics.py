"""Metric accumulators that stay on the device during a validation, trivial baselines, and bootstrap intervals.

Enters: outputs and targets of batches, with a mask if some rows hold no sample. Leaves: numbers,
once, at the end. Costs: a few small kernels per batch and no host synchronisation; counts are exact
integers, sums are float64.

A metric without a baseline says nothing: an accuracy of 60 % is bad if one class has 70 % of the samples. The
baselines here are constants that are chosen from training targets and evaluated on validation samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stoker.store.fields import Array


class Counted:
    """Base of accumulators whose only state is a tensor of counts; ranks add their counts up."""

    counts: torch.Tensor | None = None  # made by the first batch

    def state(self) -> torch.Tensor | None:
        """Return what was counted, for `merge`."""
        return self.counts

    def merge(self, states: Sequence[torch.Tensor | None]) -> None:
        """Become what all of these have counted together."""
        counted = [state for state in states if state is not None]
        self.counts = torch.stack(counted).sum(dim=0) if counted else None


class CountedParts:
    """Several `Counted` accumulators as one."""

    parts: Sequence[Counted]

    def state(self) -> list[Any]:
        """Return what was counted, for `merge`."""
        return [part.state() for part in self.parts]

    def merge(self, states: Sequence[list[Any]]) -> None:
        """Become what all of these have counted together."""
        for part, theirs in zip(self.parts, zip(*states, strict=True), strict=True):
            part.merge(theirs)


class ClassCounts(Counted):
    """Samples and hits per class."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes

    def update(
        self, scores: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """Add a batch. Scores are `(batch, classes)`; `valid` marks the rows that count."""
        labels = labels.long()
        seen = torch.ones_like(labels) if valid is None else valid.long()
        hits = (scores.argmax(dim=1) == labels).long() * seen
        self.count((labels, seen), (labels, hits))

    def count(self, *rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add one (class numbers, weights) pair to each row of the counts."""
        if self.counts is None:
            shape, device = (len(rows), self._num_classes), rows[0][0].device
            self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        for row, (classes, seen) in zip(self.counts, rows, strict=True):
            # Not bincount, which waits for the device to find the largest label.
            row.index_add_(0, classes, seen)

    def compute(self) -> dict[str, float]:
        """Return accuracy and balanced accuracy: the mean recall of the classes that occur."""
        if self.counts is None or not self.counts[0].any():
            return {"accuracy": math.nan, "balanced_accuracy": math.nan}
        seen, hits = self.counts[:2].cpu().double().numpy()
        occurs = seen > 0
        recalls = hits[occurs] / seen[occurs]
        return {
            "accuracy": float(hits.sum() / seen.sum()),
            "balanced_accuracy": float(recalls.mean()),
        }


class MaskedMean(Counted):
    """Mean over the samples of a pass. The values of one sample are averaged first."""

    def update(self, values: torch.Tensor, valid: torch.Tensor | None = None) -> None:
        """Add a batch. Values are `(batch, ...)`; `valid` marks the rows that count."""
        per_sample = values.detach().double().reshape(len(values), -1).mean(dim=1)
        seen = torch.ones_like(per_sample) if valid is None else valid.double()
        # Where, not a product: a row that does not count may hold anything, NaN included.
        added = torch.stack([torch.where(seen > 0, per_sample, 0.0).sum(), seen.sum()])
        self.counts = added if self.counts is None else self.counts + added

    def compute(self) -> float:
        """Return the mean; NaN without samples."""
        if self.counts is None:
            return math.nan
        total, count = self.counts.tolist()
        return total / count if count else math.nan


def majority_baseline(train: Array, val: Array, num_classes: int) -> dict[str, float]:
    """Return the metrics on `val` of always answering the most common class of `train`."""
    if not len(val):
        return {}
    majority = int(np.argmax(np.bincount(train, minlength=num_classes)))
    present = np.unique(val)
    return {
        "accuracy": float(np.mean(val == majority)),
        "balanced_accuracy": float(majority in present) / len(present),
    }


def class_priors(train: Array, num_classes: int) -> Array:
    """Return the share of each class in training. One sample is added to each class, so that no share is 0."""
    counts = np.bincount(train, minlength=num_classes) + 1.0
    priors: Array = counts / counts.sum()
    return priors


def constant_mae(constant: Array | float, val: Array) -> float:
    """Return the mean absolute error of a constant answer; NaN without samples."""
    return float(np.abs(np.asarray(val, np.float64) - constant).mean()) if len(val) else math.nan


# -- confidence intervals ------------------------------------------------------------------------

_NUM_DRAWS = 1000
_MOST_BLOCKS = 5000
_DRAWN_CELLS = 1 << 22
_LEVEL = 0.95


def bootstrap(
    # `(n,)` or `(n, k)` values of samples, in their order; rows that are not finite are left out
    values: Array,
    # `(draws, k)` means to `(draws,)` numbers; None is the mean of the first column
    statistic: Callable[[Array], Array] | None = None,
    *,
    # number of neighbours that are drawn together, for samples that depend on each other (overlapping windows)
    block: int = 1,
    seed: int = 0,  # of the draws
) -> tuple[float, float]:
    """Return the 95 % confidence interval of a statistic of means over samples.

    Above 5,000 samples, neighbours are always drawn together, which limits the cost.
    """
    rows = np.asarray(values, np.float64)
    rows = rows[:, None] if rows.ndim == 1 else rows
    rows = rows[np.isfinite(rows).all(axis=1)]
    if len(rows) < 2:
        return math.nan, math.nan
    size = max(1, min(block, len(rows) // 2), -(-len(rows) // _MOST_BLOCKS))
    starts = np.arange(0, len(rows), size)
    sums = np.add.reduceat(rows, starts)
    sizes = np.diff(np.append(starts, len(rows))).astype(np.float64)
    drawn = np.random.default_rng(seed).multinomial(
        len(sums), np.full(len(sums), 1 / len(sums)), _NUM_DRAWS
    )
    means = (drawn @ sums) / (drawn @ sizes)[:, None]
    return interval_of(means[:, 0] if statistic is None else statistic(means))


def bootstrap_counts(
    counts: Array, statistic: Callable[[Array], Array], seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % confidence interval of a statistic of a table of counts, such as a confusion matrix.

    `statistic` turns `(draws, *shape)` counts into `(draws,)` numbers.
    """
    total = int(counts.sum())
    if total < 2:
        return math.nan, math.nan
    filled = np.flatnonzero(counts.reshape(-1))  # cells without samples are never drawn
    shares = counts.reshape(-1)[filled] / total
    random = np.random.default_rng(seed)
    draws: list[Array] = []
    # In parts, so that memory does not grow with the size of the matrix.
    part = max(1, min(_NUM_DRAWS, _DRAWN_CELLS // counts.size))
    for _ in range(0, _NUM_DRAWS, part):
        drawn = np.zeros((part, counts.size))
        drawn[:, filled] = random.multinomial(total, shares, part)
        draws.append(statistic(drawn.reshape(part, *counts.shape)))
    return interval_of(np.concatenate(draws))


def interval_of(draws: Array) -> tuple[float, float]:
    """Return the middle 95 % of bootstrap draws; NaN where none is finite."""
    known = draws[np.isfinite(draws)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    return float(low), float(high)
