"""Walk-forward evaluation: the same job is trained on several spans of the past, each evaluated on the time after it.

Enters: settings of a recipe with the option `fold`, and a number of folds. Leaves: a run per fold in its own folder,
and one evaluation of all folds in the folder above. Costs a training per fold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stoker.config import Settings
from stoker.errors import InputError
from stoker.recipes.catalogue import choose_recipe
from stoker.recipes.run import RecipeRun, run_folder, run_recipe
from stoker.report import LOG_NAME, RunEnd, RunLog
from stoker.runs.evaluation import Evaluation
from stoker.train.checkpoint import Checkpoints
from stoker.train.run_folder import RunLock

_PER_SIDE = 3.92  # width of a 95 % interval in standard deviations


@dataclass(frozen=True)
class WalkForward:
    """The result of `walk_forward`."""

    folder: Path  # contains the folders of the folds, and the log with the evaluation of all
    runs: tuple[RecipeRun, ...]  # one per fold, in time order
    evaluation: Evaluation | None  # of all folds together; None if a fold was cut short


def walk_forward(
    settings: Settings, count: int, *, resume: bool = False, **named: Any
) -> WalkForward:
    """Train and evaluate every fold."""
    chosen = choose_recipe(settings)
    if "fold" not in {field.name for field in fields(chosen.recipe.Options)}:
        raise InputError(
            f"--folds is {count}, and the recipe {chosen.recipe.name} has no option 'fold'.",
            "a recipe of samples in time, whose options have 'fold'",
            "leave --folds out",
        )
    folder = run_folder(settings)
    runs = []
    for number in range(1, count + 1):
        options = {**settings.recipe.options, "fold": [number, count]}
        told = settings.told("recipe.options", options, "--folds")
        told = told.told("run.dir", str(folder / f"fold-{number}"), "--folds")
        is_begun = resume and bool(Checkpoints(run_folder(told)).list())
        runs.append(run_recipe(told, resume=is_begun, **named))
        if runs[-1].ended != "done":
            return WalkForward(folder, tuple(runs), None)
    found = [run.evaluation for run in runs if run.evaluation is not None]
    made = merge_folds(found) if len(found) == count else None
    if made is not None:
        with RunLock(folder), RunLog(folder / LOG_NAME) as log:
            log.write("result", {"evaluation": made.to_json(), "num_test": made.num_samples})
            log.write("end", vars(RunEnd("done")))
    return WalkForward(folder, tuple(runs), made)


def merge_folds(folds: Sequence[Evaluation]) -> Evaluation:
    """Return one evaluation of all folds: means over their samples, and a row for each fold."""
    weights = [fold.num_samples for fold in folds]
    name, _ = folds[0].compared_by
    metrics = _mean([fold.metrics for fold in folds], weights)
    shared = [who for who in folds[0].baselines if all(who in fold.baselines for fold in folds)]
    rows = {}
    for number, fold in enumerate(folds, 1):
        best = fold.best_baseline
        beside = {} if best is None else {f"best baseline's {name}": best[1]}
        rows[str(number)] = {"samples": float(fold.num_samples), **fold.metrics, **beside}
    return Evaluation(
        sum(weights),
        folds[0].compared_by,
        metrics,
        _intervals(folds, metrics, weights),
        {who: _mean([fold.baselines[who] for fold in folds], weights) for who in shared},
        {
            "fold": rows,
            **{
                kind: _merge_rows([fold.groups[kind] for fold in folds])
                for kind in ("side", "horizon")
                if all(kind in fold.groups for fold in folds)
            },
        },
        notes=(
            f"{len(folds)} folds, each trained on the time before its test span, with purge and embargo",
            *folds[0].notes,
        ),
    )


def _intervals(
    folds: Sequence[Evaluation], metrics: Mapping[str, float], weights: Sequence[int]
) -> dict[str, tuple[float, float]]:
    """Return intervals of the means. Folds have no test sample in common, so the variances add up."""
    total, found = sum(weights), {}
    for name, value in metrics.items():
        spans = [fold.intervals.get(name) for fold in folds]
        known = [span for span in spans if span is not None]
        if len(known) == len(folds):
            variance = sum(
                (weight / total * (high - low) / _PER_SIDE) ** 2
                for weight, (low, high) in zip(weights, known, strict=True)
            )
            half = _PER_SIDE / 2 * math.sqrt(variance)
            found[name] = (value - half, value + half)
    return found


def _merge_rows(folds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    merged = {}
    for name in folds[0]:
        rows = [fold[name] for fold in folds if name in fold]
        trades = [row.get("trades", 1.0) for row in rows]
        merged[name] = _mean(rows, trades)
        if "trades" in merged[name]:
            merged[name]["trades"] = sum(trades)
    return merged


def _mean(rows: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    found = {}
    for name in rows[0]:
        known = [
            (row[name], weight)
            for row, weight in zip(rows, weights, strict=True)
            if weight and math.isfinite(row.get(name, math.nan))
        ]
        total = sum(weight for _, weight in known)
        found[name] = sum(value * weight for value, weight in known) / total if total else math.nan
    return found
