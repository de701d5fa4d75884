"""Evaluation of the forex recipe on test samples: directions, and the result of trading on them, after costs.

Enters: the store, the split, the label plan; then the outputs for the test samples in time order. Leaves: an
`Evaluation`. Costs: one read of the targets, and of a linear fit (seconds).

Baselines use only training samples, or labels that were known at the decision: the last value is the return of the
latest decision whose whole label was known. Decisions overlap, so intervals are drawn in blocks of a horizon, and
each decision trades 1 / `horizon` of a position. Several symbols are first sorted by time: earnings add up over all
of them, and their decisions of one time are drawn together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stoker.recipes.baselines import Ridge, answer_samples, summary_rows, thin_samples
from stoker.recipes.classification import ScoreList, class_metrics, evaluate_classes
from stoker.recipes.forex.labels import NUM_DIRECTIONS, LabelPlan
from stoker.recipes.forex.model import DOWN, NAMES, NEUTRAL, UP
from stoker.recipes.metrics import bootstrap
from stoker.recipes.scaling import shards_of
from stoker.runs.evaluation import Curve, Evaluation, Example
from stoker.store.fields import Array
from stoker.store.reader import Store

_NUM_PARTS = 5
_FIT_ROWS = 20_000
_MOST_POINTS = 200
_NUM_EXAMPLES = 6


@dataclass(frozen=True, eq=False)
class Trades:
    """The side taken by each decision, and its result in pips."""

    sides: Array  # -1 (short), 0 (no trade) or 1 (long) per decision
    moves: Array  # move of the price after each decision, in pips
    cost_pips: float  # of one trade, both ways

    @property
    def earned(self) -> Array:
        """Pips per decision after costs."""
        earned: Array = self.sides * self.moves - self.cost_pips * (self.sides != 0)
        return earned

    @property
    def metrics(self) -> dict[str, float]:
        """Mean pips per decision, the share of decisions that trade, and the share of trades that were right."""
        traded = self.sides != 0
        hits = np.sign(self.moves[traded]) == self.sides[traded]
        return {
            "net_pips": float(self.earned.mean()),
            "gross_pips": float((self.sides * self.moves).mean()),
            "traded": float(traded.mean()),
            "hit_rate": float(hits.mean()) if len(hits) else math.nan,
        }

    def by_side(self) -> dict[str, dict[str, float]]:
        """Return the results of long and short trades, per trade."""
        rows = {}
        for name, side in (("long", 1), ("short", -1)):
            gross = side * self.moves[self.sides == side]
            rows[name] = {
                "trades": float(len(gross)),
                "hit_rate": float((gross > 0).mean()) if len(gross) else math.nan,
                "gross_pips": float(gross.mean()) if len(gross) else math.nan,
                "net_pips": float(gross.mean() - self.cost_pips) if len(gross) else math.nan,
            }
        return rows

    def by_part(self, parts: Mapping[str, Array]) -> dict[str, dict[str, float]]:
        """Return the metrics of each part; `parts` maps names to indices of decisions."""
        rows = {}
        for name, places in parts.items():
            taken = Trades(self.sides[places], self.moves[places], self.cost_pips)
            rows[name] = {"samples": float(len(places)), **taken.metrics}
        return rows


class DirectionJudge:
    """Evaluates predicted directions by the actual returns; a `Judge`.

    Args:
        plan: How returns become directions.
        cost_pips: Cost of one trade, entry and exit together.
    """

    def __init__(self, plan: LabelPlan, cost_pips: float) -> None:
        self._plan, self._cost_pips = plan, cost_pips
        self._chances: list[Array] = []
        self._returns: list[Array] = []

    def update(self, columns: Mapping[str, Array], truth: Array) -> None:
        """Add probabilities and `(n, 1)` log returns over the bars of the direction; NaN if not known yet."""
        known = np.isfinite(truth[:, 0])
        self._chances.append(columns["probability"][known])
        self._returns.append(truth[known, 0])

    def evaluate(self) -> Evaluation | None:
        """Return metrics of the classes and of trading by side, with buy and hold as the baseline."""
        returns = np.concatenate([np.zeros(0), *self._returns])
        if not len(returns):
            return None
        plan, chances = self._plan, np.concatenate(self._chances)
        report = evaluate_classes(chances, _sides(returns, plan.neutral) + NEUTRAL, NAMES)
        sides, moves = chances.argmax(axis=1) - NEUTRAL, returns / plan.pip
        taken = Trades(sides, moves, self._cost_pips)
        return Evaluation(
            len(returns),
            ("net_pips", True),
            {**report.metrics, **taken.metrics},
            {"net_pips": bootstrap(taken.earned, block=plan.direction_step)},
            {"buy and hold": Trades(np.ones_like(sides), moves, 0.0).metrics},
            {**report.groups, "side": taken.by_side()},
            report.confusion,
            notes=(
                f"net_pips: per decision after {plan.direction_step} bars; a trade costs {self._cost_pips:g}",
            ),
        )


@dataclass(eq=False)
class BarEvaluation:
    """Final metrics of a forex run."""

    store: Store  # must stay open during the run
    base: str  # the series that the linear baseline reads
    plan: LabelPlan  # how returns become labels
    samples: Mapping[str, Array]  # of each split, in time order within a symbol
    returns: Mapping[str, Array]  # of each split, `(n, horizon)` log returns
    cost_pips: float  # cost of one trade, entry and exit together
    seed: int  # of the random baseline

    def __post_init__(self) -> None:
        self._scores = ScoreList()
        self._walked: list[Array] = []

    def update(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> None:
        """Add a batch."""
        scores, wanted = outputs["direction"], targets["direction"]
        if "sample" in targets:  # a batch of lanes: rows of lanes that have ended hold no sample
            ids = targets["sample"].cpu().numpy()
            rows = torch.from_numpy(np.flatnonzero(ids >= 0)).to(scores.device)
            scores, wanted = scores[rows], wanted[rows]
            self._walked.append(ids[ids >= 0])
        self._scores.update(scores, wanted)

    def evaluate(self, model: torch.nn.Module, device: torch.device, samples: Array) -> Evaluation:
        """Return the evaluation, with the baselines buy and hold, random, last value and linear regression."""
        plan, cost = self.plan, self.cost_pips
        chances, labels = self._scores.probabilities, self._scores.labels
        moves = self.returns["test"] / plan.pip
        walked: tuple[str, ...] = ()
        step, horizon = plan.direction_step - 1, moves.shape[1]
        # Number of neighbouring decisions whose labels overlap.
        together = horizon
        if self._walked:
            seen = np.concatenate(self._walked)
            order = np.argsort(seen, kind="stable")
            chances, labels = chances[order], labels[order]
            places = np.searchsorted(samples, seen[order])
            if len(places) > 1:
                together = max(1, math.ceil(horizon / max(1.0, float(np.median(np.diff(places))))))
            share = f"{len(places):,} of {len(samples):,} test samples"
            walked = (f"{share}: the walk over lanes takes windows that follow one another",)
            samples, moves = samples[places], moves[places]
        sides = chances.argmax(axis=1) - NEUTRAL
        others = self._baseline_sides(samples, sides, moves)
        symbols = _symbols(self.store, samples)
        if symbols is not None and "time" in self.store.fields:
            order = np.argsort(self.store.gather("time", samples), kind="stable")
            chances, labels, sides = chances[order], labels[order], sides[order]
            samples, moves, symbols = samples[order], moves[order], symbols[order]
            others = {name: taken[order] for name, taken in others.items()}
            together *= len(np.unique(symbols))
        report = evaluate_classes(chances, labels, NAMES)
        kept = ("accuracy", "balanced_accuracy", "macro_f1", "log_loss", "calibration_error")
        taken = Trades(sides, moves[:, step], cost)
        earned, baselines = {"model": taken.earned}, {}
        for name, other in others.items():
            trades = Trades(other, moves[:, step], 0.0 if name == "buy and hold" else cost)
            earned[name] = trades.earned
            told = class_metrics(np.eye(NUM_DIRECTIONS)[other + NEUTRAL], labels)
            baselines[name] = {metric: told[metric] for metric in kept[:3]} | trades.metrics
        hits = (np.sign(taken.moves) == sides)[sides != 0]
        intervals = {
            "accuracy": bootstrap(chances.argmax(axis=1) == labels, block=together),
            "net_pips": bootstrap(taken.earned, block=together),
            "hit_rate": bootstrap(hits, block=together),
        }
        groups = {
            "class": report.groups["class"],
            "side": taken.by_side(),
            "horizon": _by_horizon(sides, moves, cost),
            "part of the test span": taken.by_part(_parts(self.store, samples)),
        }
        if symbols is not None:
            names = sorted(set(symbols))
            groups["symbol"] = taken.by_part({n: np.flatnonzero(symbols == n) for n in names})
        pips = "pip" if cost == 1 else "pips"
        paid = f"a trade costs {cost:g} {pips}, of {plan.pip:g} of the price"
        return Evaluation(
            len(labels),
            ("net_pips", True),
            {name: report.metrics[name] for name in kept} | taken.metrics,
            {name: span for name, span in intervals.items() if math.isfinite(span[0])},
            baselines,
            groups,
            report.confusion,
            (_curve(earned, together), *report.curves),
            examples=_examples(self.store, plan, samples, symbols, chances, moves),
            notes=(
                f"net_pips: per decision after {plan.direction_step} bars; {paid}",
                f"intervals are drawn in blocks of {together} decisions, since neighbours share their labels",
                *walked,
            ),
        )

    def _baseline_sides(self, samples: Array, sides: Array, moves: Array) -> dict[str, Array]:
        """Return each baseline's sides: -1, 0 or 1 per test sample."""
        plan = self.plan
        step = plan.direction_step - 1
        random = np.random.default_rng(self.seed)
        found = {
            "buy and hold": np.ones(len(moves), np.int64),
            # Trades as often as the model, on random sides.
            "random": random.permutation(np.abs(sides)) * random.choice((-1, 1), len(sides)),
        }
        last = last_values(self.store, samples, step)
        if last is not None:
            found["last value"] = _sides(last, plan.neutral)
        fitted = thin_samples(np.arange(len(self.samples["train"])), _FIT_ROWS, self.seed)
        known = summary_rows(self.store, self.base, self.samples["train"][fitted])
        line = Ridge(known, self.returns["train"][fitted][:, [step]].astype(np.float64))
        said = np.abs(line.predict(known)[:, 0])
        tested = answer_samples(line, self.store, self.base, samples)[:, 0]
        # A linear fit predicts small returns. Its threshold lets it trade as often as training samples left the band.
        share = float(np.mean(np.abs(self.returns["train"][:, step]) <= plan.neutral))
        found["linear regression"] = _sides(tested, float(np.quantile(said, share)))
        return found


def last_values(store: Store, samples: Array, step: int) -> Array | None:
    """Return for each sample the latest return that was known at its decision; 0 if there is none."""
    if not {"time", "label_time"} <= store.fields.keys():
        return None
    found = np.zeros(len(samples))
    starts = np.cumsum([0, *(shard.num_samples for shard in store.manifest.shards)])
    for number, here, _ in shards_of(store, samples):  # one symbol each; their times overlap
        span = int(starts[number]), int(starts[number + 1])
        known_at = store.read_rows("label_time", *span)
        returns = store.read_rows("targets", *span).reshape(len(known_at), -1)[:, step]
        order = np.argsort(known_at, kind="stable")
        time = store.gather("time", samples[here])
        place = np.searchsorted(known_at[order], time, side="right") - 1
        found[here] = np.where(place >= 0, returns[order][np.maximum(place, 0)], 0.0)
    return found


def _symbols(store: Store, samples: Array) -> Array | None:
    """Return the symbol of each sample; None for one symbol, or a store that is not from `stoker pack bars`."""
    shards = store.manifest.shards
    if not {shard.label for shard in shards} <= store.manifest.attributes.get("scalers", {}).keys():
        return None
    ends = np.cumsum([shard.num_samples for shard in shards])
    names = np.array([shard.label for shard in shards], dtype=object)
    found: Array = names[np.searchsorted(ends, samples, side="right")]
    return found if len(set(found)) > 1 else None


def _sides(returns: Array, neutral: float) -> Array:
    return (returns > neutral).astype(np.int64) - (returns < -neutral).astype(np.int64)


def _by_horizon(sides: Array, moves: Array, cost_pips: float) -> dict[str, dict[str, float]]:
    """Return the metrics of the same sides for trades that are closed after fewer or more bars."""
    last = moves.shape[1]
    steps = sorted({1, max(1, last // 4), max(1, last // 2), last})
    return {
        f"{step} bars" if step > 1 else "1 bar": Trades(
            sides, moves[:, step - 1], cost_pips
        ).metrics
        for step in steps
    }


def _parts(store: Store, samples: Array) -> dict[str, Array]:
    """Return consecutive parts of the test span; a good strategy earns in most of them."""
    order, days = np.arange(len(samples)), None
    if "time" in store.fields:
        time = store.gather("time", samples)
        order = np.argsort(time, kind="stable")
        days = time.astype("M8[ns]").astype("M8[D]")
    parts = {}
    for number, part in enumerate(np.array_split(order, min(_NUM_PARTS, len(order))), 1):
        span = "" if days is None else f", {days[part[0]]} to {days[part[-1]]}"
        parts[f"{number}{span}"] = part
    return parts


def _curve(earned: Mapping[str, Array], together: int) -> Curve:
    """Return the cumulative result of one unit that overlapping decisions share."""
    lines = {}
    for name, pips in earned.items():
        total = np.cumsum(pips) / together
        kept = np.unique(np.linspace(0, len(total) - 1, _MOST_POINTS).astype(int))
        lines[name] = [(float(place), float(total[place])) for place in kept]
    return Curve("Earned after costs", "decision", "pips", lines)


def _examples(
    store: Store,
    plan: LabelPlan,
    samples: Array,
    symbols: Array | None,
    chances: Array,
    moves: Array,
) -> tuple[Example, ...]:
    """Return the most confident answer in each part of the test span, with the actual moves after it."""
    if not len(samples):
        return ()
    confidence = np.maximum(chances[:, UP], chances[:, DOWN])
    parts = np.array_split(np.arange(len(samples)), min(_NUM_EXAMPLES, len(samples)))
    chosen = [int(part[np.argmax(confidence[part])]) for part in parts]
    keys: Sequence[Any] = samples[chosen].tolist()
    if "time" in store.fields:
        times = store.gather("time", samples[chosen])
        keys = times.astype("M8[ns]").astype("M8[m]").tolist()
    step, band = plan.direction_step - 1, plan.neutral / plan.pip
    made = []
    for place, key in zip(chosen, keys, strict=True):
        answer = int(chances[place].argmax())
        path = [(0.0, 0.0), *((float(k + 1), float(v)) for k, v in enumerate(moves[place]))]
        forecast = {"up": band, "down": -band, "neutral": 0.0}[NAMES[answer]]
        lines = {
            "what came, pips": path,
            "forecast, pips": [(0.0, 0.0), (float(step + 1), forecast)],
        }
        truth = f"{moves[place, step]:+.1f} pips after {step + 1} bars"
        told = f"{NAMES[answer]} ({chances[place, answer]:.0%})"
        shown = str(key) if symbols is None else f"{symbols[place]} {key}"
        made.append(Example("series", shown, truth, told, lines=lines))
    return tuple(made)
