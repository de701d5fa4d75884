"""The two tasks of the tabular recipe: how targets enter, what is lost, what is reported.

Enters: training and validation targets as stored. Leaves: `Classify` or `Regress`: the encoding of
targets on the device, the criterion, the metrics, the baseline. Costs: one pass over the targets; in
training a gather of a small constant, copied to the device once.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional

from stoker.recipes.contract import Metrics
from stoker.recipes.metrics import (
    ClassCounts,
    CountedParts,
    MaskedMean,
    class_priors,
    constant_mae,
    majority_baseline,
)
from stoker.recipes.options import require
from stoker.recipes.scaling import OnDevice, fit_robust
from stoker.recipes.tabular.evaluation import ClassTable, TableData, ValueTable
from stoker.store.fields import Array

ClassWeights = Literal["none", "balanced"] | tuple[float, ...]
RegressionLoss = Literal["huber", "mse"]


class Classify:
    """Targets as places in the list of classes; cross-entropy, the mean over samples."""

    def __init__(self, classes: Array, train: Array, val: Array, weights: ClassWeights) -> None:
        self._classes = classes
        self._on_device = OnDevice(classes, torch.int64)
        self.model_facts: dict[str, Any] = {"classes": classes}
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
            # Their mean over the training samples is 1, so that the rate means what it did.
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
        """Return `(batch,)` class places, on the device."""
        classes = self._on_device.on(targets.device)
        return torch.searchsorted(classes, targets.reshape(-1).long())

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean over samples; torch's own weighted mean divides by the weights' sum."""
        losses = functional.cross_entropy(outputs.float(), targets, reduction="none")
        if self._weights is not None:
            losses = losses * self._weights.on(losses.device)[targets]
        return losses.mean()

    def metrics(self) -> Metrics:
        """Return accumulators for one pass."""
        return ClassCounts(len(self._classes))

    def final_metrics(self, data: TableData) -> ClassTable:
        """Return what evaluates the best weights."""
        return ClassTable(data)

    def _find_baseline(self, known: Array, wanted: Array) -> dict[str, float]:
        """Return what the commonest class and the training shares reach."""
        if not len(wanted):
            return {}
        count = len(self._classes)
        priors = torch.from_numpy(np.log(class_priors(known, count))).float()
        loss = self.criterion(priors.expand(len(wanted), -1), torch.from_numpy(wanted))
        return majority_baseline(known, wanted, count) | {"loss": float(loss)}


class Regress:
    """Targets scaled by their training spread; errors reported in their own units."""

    def __init__(self, train: Array, val: Array, loss: RegressionLoss) -> None:
        flat = train.reshape(len(train), -1).astype(np.float64)
        self._center, self._scale = fit_robust(flat)
        self._loss = loss
        self._center_on, self._scale_on = OnDevice(self._center), OnDevice(self._scale)
        self._mean = OnDevice((flat.mean(axis=0) - self._center) / self._scale)
        self.model_facts: dict[str, Any] = {
            "target_center": self._center,
            "target_scale": self._scale,
        }
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
        """Return what evaluates the best weights."""
        return ValueTable(data, self._center, self._scale)

    def _find_baseline(self, val: Array) -> dict[str, float]:
        """Return what the training median reaches; R2 is counted from the training mean, so 0."""
        if not len(val):
            return {}
        wanted = self.encode(torch.from_numpy(val))
        loss = float(self.criterion(torch.zeros_like(wanted), wanted))
        return {"mae": constant_mae(self._center, val), "r2": 0.0, "loss": loss}


class RegressionMetrics(CountedParts):
    """Mean absolute error in the targets' units, and R2 against the training mean."""

    def __init__(self, scale: OnDevice, mean: OnDevice) -> None:
        self._scale, self._mean = scale, mean
        self._absolute, self._squares, self._spread = self.parts = [MaskedMean() for _ in range(3)]

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Take a batch; no host synchronisation."""
        errors = outputs.double() - targets.double()
        self._absolute.update(errors.abs() * self._scale.on(errors.device))
        self._squares.update(errors.square())
        self._spread.update((targets.double() - self._mean.on(errors.device)).square())

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything seen."""
        spread = self._spread.compute()
        share = self._squares.compute() / spread if spread else math.nan
        return {"mae": self._absolute.compute(), "r2": 1 - share}
