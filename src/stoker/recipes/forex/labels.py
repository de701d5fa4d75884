"""Labels of the forex recipe, made from stored returns; their loss, metrics and baselines.

Enters: forward log returns `(batch, horizon)` as `stoker pack bars` stores them. Leaves: labels, made on the
device with static shapes; a loss; metrics; metrics of constant answers. Costs: a dozen small kernels.

Every limit comes from training samples:

    direction  DOWN, NEUTRAL or UP: the return over the horizon against a neutral band that contains a
               third of the training samples
    scalp      size of the move in pips, clipped to 0.5 to 2, at the step whose median training move is
               nearest to the middle of that band
    swing      the same for 2 to 5 pips
    trend      return over the length of its path, -1 to 1: a straight climb is 1, no net move is 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from stoker.recipes.contract import Tensors
from stoker.recipes.forex.model import DOWN, NAMES, NEUTRAL, SCALP_PIPS, SWING_PIPS, UP
from stoker.recipes.forex.options import ForexOptions, LossWeights
from stoker.recipes.metrics import (
    ClassCounts,
    CountedParts,
    MaskedMean,
    class_priors,
    constant_mae,
    majority_baseline,
)
from stoker.recipes.options import require
from stoker.store.fields import Array

NUM_DIRECTIONS = 3
_HUBER_SCALP, _HUBER_SWING = 0.3, 0.5
_TINY_PATH = 1e-12
_MOST_CUT = 0.5


@dataclass(frozen=True)
class LabelPlan:
    """How returns become labels; every number comes from training samples or from the options.

    Steps are bars ahead, from 1; returns within plus or minus `neutral` are NEUTRAL.
    """

    pip: float
    neutral: float
    direction_step: int
    scalp_step: int
    swing_step: int


def plan_labels(returns: Array, options: ForexOptions) -> LabelPlan:
    """Choose the limits by `(n, horizon)` log returns of training samples only."""
    horizon = returns.shape[1]
    for name in ("direction_step", "scalp_step", "swing_step"):
        step = getattr(options, name)
        allowed = f"1 to {horizon}, the horizon of the store"
        require(step is None or 1 <= step <= horizon, name, step, allowed, f"{name}={horizon}")
    pip, neutral_share = options.pip, options.neutral_share
    moves = np.maximum(np.median(np.abs(returns), axis=0) / pip, 1e-12)
    direction = options.direction_step or horizon
    neutral = np.quantile(np.abs(returns[:, direction - 1]), neutral_share)
    return LabelPlan(
        pip=pip,
        neutral=float(neutral) if neutral_share > 0 else 0.0,
        direction_step=direction,
        scalp_step=options.scalp_step or _step_near(moves, SCALP_PIPS),
        swing_step=options.swing_step or _step_near(moves, SWING_PIPS),
    )


def _step_near(moves: Array, band: tuple[float, float]) -> int:
    """Return the step whose median move is nearest to the band's geometric middle."""
    middle = np.sqrt(band[0] * band[1])
    return int(np.argmin(np.abs(np.log(moves / middle)))) + 1


def make_labels(returns: torch.Tensor, plan: LabelPlan) -> dict[str, torch.Tensor]:
    """Return the four labels of a batch, on its device, without host synchronisation."""
    returns = returns.float()
    last = returns[:, plan.direction_step - 1]
    steps = torch.diff(returns, dim=1, prepend=torch.zeros_like(returns[:, :1]))
    path = steps.abs().sum(dim=1).clamp_min(_TINY_PATH)
    pips = returns.abs() / plan.pip
    return {
        "direction": (last > plan.neutral).long() + (last >= -plan.neutral).long(),
        "scalp": pips[:, plan.scalp_step - 1].clamp(*SCALP_PIPS),
        "swing": pips[:, plan.swing_step - 1].clamp(*SWING_PIPS),
        "trend": returns[:, -1] / path,
    }


def forex_loss(outputs: Tensors, targets: Tensors, weights: LossWeights) -> torch.Tensor:
    """Return the weighted sum of the four losses, averaged over the valid samples."""
    losses = (
        functional.cross_entropy(
            outputs["direction"].float(), targets["direction"], reduction="none"
        ),
        _huber(outputs["scalp"], targets["scalp"], _HUBER_SCALP),
        _huber(outputs["swing"], targets["swing"], _HUBER_SWING),
        (outputs["trend"].float() - targets["trend"]).square(),
    )
    per_sample = sum(
        (weight * loss for weight, loss in zip(weights, losses, strict=True)),
        start=torch.zeros_like(losses[0]),
    )
    if "valid" not in targets:
        return per_sample.mean()
    valid = targets["valid"].bool()
    return torch.where(valid, per_sample, 0.0).sum() / valid.sum().clamp_min(1)


def _huber(predicted: torch.Tensor, wanted: torch.Tensor, delta: float) -> torch.Tensor:
    return functional.huber_loss(predicted.float(), wanted, reduction="none", delta=delta)


class ForexMetrics(CountedParts):
    """Accuracy of the direction, and mean absolute errors of the three sizes.

    Volatility clusters, so calm and wild hours are easy to tell apart, and that alone raises `accuracy`.
    `side_accuracy` measures the hard part: up or down, over samples that are not NEUTRAL.
    """

    def __init__(self) -> None:
        self._direction = ClassCounts(NUM_DIRECTIONS)
        self._side = ClassCounts(2)
        self._errors = {name: MaskedMean() for name in ("scalp", "swing", "trend")}
        self.parts = [self._direction, self._side, *self._errors.values()]

    def update(self, outputs: Tensors, targets: Tensors) -> None:
        """Add a batch, without host synchronisation."""
        valid = targets.get("valid")
        scores, labels = outputs["direction"], targets["direction"]
        self._direction.update(scores, labels, valid)
        moved = labels != NEUTRAL
        moved = moved if valid is None else moved & valid.bool()
        # Columns 0 and 2 by a slice: a list of indices would be copied to the device, which synchronises.
        self._side.update(scores[:, DOWN::UP], (labels == UP).long(), moved)
        for name, errors in self._errors.items():
            errors.update((outputs[name].float() - targets[name]).abs(), valid)

    def compute(self) -> dict[str, float]:
        """Return the metrics over all batches."""
        errors = {f"mae_{name}": errors.compute() for name, errors in self._errors.items()}
        side = {"side_accuracy": self._side.compute()["accuracy"]}
        return self._direction.compute() | side | errors


def find_baseline(
    train: Array, val: Array, plan: LabelPlan, weights: LossWeights
) -> dict[str, float]:
    """Return the validation metrics of constants that are chosen from training labels.

    The constants are the majority class, the majority side, the median scalp and swing, and trend 0. `loss`
    uses the training shares of the classes and the same constants.
    """
    if not len(val):
        return {}
    known = make_labels(torch.from_numpy(train), plan)
    wanted = make_labels(torch.from_numpy(val), plan)
    labels = known["direction"].numpy()
    medians = {name: float(known[name].median()) for name in ("scalp", "swing")} | {"trend": 0.0}
    errors = {
        f"mae_{name}": constant_mae(value, wanted[name].numpy()) for name, value in medians.items()
    }
    priors = torch.from_numpy(np.log(class_priors(labels, NUM_DIRECTIONS))).float()
    answers = {"direction": priors.expand(len(val), -1)} | {
        name: torch.full((len(val),), value) for name, value in medians.items()
    }
    loss = float(forex_loss(answers, wanted, weights))
    wanted_direction = wanted["direction"].numpy()
    accuracy = majority_baseline(labels, wanted_direction, NUM_DIRECTIONS)
    sides = majority_baseline(
        labels[labels != NEUTRAL] // UP,
        wanted_direction[wanted_direction != NEUTRAL] // UP,
        num_classes=2,
    )
    side = {"side_accuracy": sides.get("accuracy", math.nan)}
    return accuracy | side | errors | {"loss": loss}


def describe_labels(plan: LabelPlan, train: Array) -> str:
    """Return the limits, and the training share of each direction, in words."""
    shares = torch.bincount(
        make_labels(torch.from_numpy(train), plan)["direction"], minlength=NUM_DIRECTIONS
    ) / max(1, len(train))
    words = zip(NAMES, shares.tolist(), strict=True)
    return (
        f"labels: direction at bar {plan.direction_step}, neutral within {plan.neutral / plan.pip:.3g} "
        f"pips ({', '.join(f'{name} {share:.1%}' for name, share in words)} of training); "
        f"scalp at bar {plan.scalp_step}, swing at bar {plan.swing_step}, by the median training move"
    )


def describe_cut(plan: LabelPlan, train: Array, cost_pips: float) -> list[str]:
    """Return a warning if most scalp or swing sizes lie outside their band, with a pip that fits.

    Hourly bars, shares and coins move by tens of basis points. Nearly all sizes are then clipped to the same value,
    and their metrics say nothing.
    """
    cut = {}
    for name, step, band in (
        ("scalp", plan.scalp_step, SCALP_PIPS),
        ("swing", plan.swing_step, SWING_PIPS),
    ):
        pips = np.abs(train[:, step - 1]) / plan.pip
        cut[name] = (float((pips < band[0]).mean()), float((pips > band[1]).mean()))
    if not len(train) or max(map(max, cut.values())) <= _MOST_CUT:
        return []
    shares = "; ".join(
        f"{name} {below:.0%} below, {above:.0%} above" for name, (below, above) in cut.items()
    )
    # The middle of the scalp band is 1 pip. A cost stays the same share of the price.
    fitting = float(np.median(np.abs(train[:, 0])))
    advice = ""
    if fitting > 0:
        cost = cost_pips * plan.pip / fitting
        advice = (
            f". A pip of the median move of one bar: --set recipe.options.pip={fitting:.2g} "
            f"--set recipe.options.cost_pips={cost:.2g}"
        )
    return [f"sizes outside of their bands in pips are cut to them ({shares} of training){advice}"]
