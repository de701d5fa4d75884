"""Strong simple baselines, fitted in the same run on the same training samples: what a network must beat.

Enters: rows of numbers and targets. Leaves: boosted trees or a linear model that predict other rows. Costs: about five
seconds on one core, limited by the number of values that are looked at. There is no time limit, so a run can be
repeated with the same numbers. No dependency: the usual libraries for boosted trees are larger than stoker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stoker.recipes.scaling import shards_of
from stoker.store.fields import Array
from stoker.store.reader import Store

MOST_TREE_CLASSES = 20
"""With more classes than this, a tree per class and round takes too long: a linear model is fitted instead."""
_MOST_ROWS = 20_000
_MOST_VALUES = 3e8
_PART_BYTES, _PART_ROWS = 64 << 20, 20_000
_NUM_BINS, _DEPTH, _ROUNDS = 32, 5, 60
_RATE, _LAMBDA, _MIN_WEIGHT = 0.15, 1.0, 1e-3
_MIN_LEAF_ROWS = 5
_COLUMN_SHARE, _FEWEST_COLUMNS, _ROW_SHARE = 0.5, 8, 0.8


# -- rows ----------------------------------------------------------------------------------------


def thin_samples(samples: Array, most: int, seed: int) -> Array:
    """Return at most `most` of the samples, drawn by the seed, in their order."""
    if len(samples) <= most:
        return samples
    return np.sort(np.random.default_rng(seed).choice(samples, most, replace=False))


def summary_rows(store: Store, field: str, samples: Array) -> Array:
    """Return one float64 row per sample: a row as it is; of a window the last row, mean and standard deviation."""
    if store.fields[field].kind != "series":
        shape = store.fields[field].shape
        if len(shape) == 1:
            return store.gather(field, samples).astype(np.float64)
        # In parts: the windows of 20,000 samples may be gigabytes, their summaries are not.
        size = max(1, _PART_BYTES // (8 * int(np.prod(shape))))
        made = []
        for low in range(0, len(samples), size):
            values = store.gather(field, samples[low : low + size]).astype(np.float64)
            parts = [values[:, -1], values.mean(axis=1), values.std(axis=1)]
            made.append(np.concatenate(parts, axis=1))
        return np.concatenate(made) if made else np.zeros((0, 3 * shape[-1]))
    window = int(store.fields[field].window or 1)
    parts = []
    for number, _, own in shards_of(store, samples):
        rows = store.read_series(field, "rows", number).astype(np.float64)
        ends = store.read_series(field, "ends", number)[own]
        sums = np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0)])
        squares = np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows**2, axis=0)])
        mean = (sums[ends] - sums[ends - window]) / window
        spread = np.sqrt(np.maximum((squares[ends] - squares[ends - window]) / window - mean**2, 0))
        parts.append(np.concatenate([rows[ends - 1], mean, spread], axis=1))
    return np.concatenate(parts)


def answer_samples(model: Boosting | Ridge, store: Store, field: str, samples: Array) -> Array:
    """Return a baseline's predictions for samples of a store, in parts of 20,000; of a series all at once."""
    size = len(samples) if store.fields[field].kind == "series" else _PART_ROWS
    starts = range(0, len(samples), max(1, size))
    return np.concatenate(
        [model.predict(summary_rows(store, field, samples[low : low + size])) for low in starts]
    )


# -- boosted trees -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tree:
    """One tree of full depth: feature and bin per inner node, value per leaf."""

    features: Array
    bins: Array
    values: Array

    def leaves(self, codes: Array) -> Array:
        node = np.zeros(len(codes), np.int64)
        rows, first = np.arange(len(codes)), 0
        for level in range(_DEPTH):
            at = first + node
            node = 2 * node + (codes[rows, self.features[at]] > self.bins[at])
            first += 1 << level
        return node


class Boosting:
    """Gradient boosting of histogram trees: softmax for classes, squared error for numbers.

    Targets are `(n,)` class indices, or `(n, values)` numbers if `num_classes` is None.
    """

    def __init__(self, rows: Array, targets: Array, num_classes: int | None, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        if len(rows) > _MOST_ROWS:
            kept = np.sort(random.choice(len(rows), _MOST_ROWS, replace=False))
            rows, targets = rows[kept], targets[kept]
        self.num_rows = len(rows)
        self._edges = [
            np.unique(np.quantile(column, np.linspace(0, 1, _NUM_BINS + 1)[1:-1]))
            for column in rows.T
        ]
        codes = self._codes(rows)
        wanted = np.eye(num_classes)[targets] if num_classes else targets.astype(np.float64)
        if num_classes:
            self._start = np.log((wanted.sum(axis=0) + 1) / (len(wanted) + num_classes))
            self._scale = np.ones(num_classes)
        else:
            self._start = wanted.mean(axis=0)
            self._scale = np.maximum(wanted.std(axis=0), 1e-12)
        self._is_classifier = bool(num_classes)
        # For two classes one tree per round is enough: the scores of one class are the negatives of the other's.
        self._outputs = [1] if num_classes == 2 else list(range(wanted.shape[1]))
        num_columns = min(rows.shape[1], max(_FEWEST_COLUMNS, int(rows.shape[1] * _COLUMN_SHARE)))
        looked_at = max(1, len(rows) * num_columns * _DEPTH * len(self._outputs))
        self.num_rounds = int(np.clip(_MOST_VALUES / looked_at, 5, _ROUNDS))
        self._rounds: list[list[_Tree]] = []
        scores = np.tile(self._start, (len(rows), 1))
        for _ in range(self.num_rounds):
            gradient, weight = self._gradient(scores, wanted)
            seen = random.random(len(rows)) < _ROW_SHARE
            trees = []
            for k in self._outputs:
                columns = np.sort(random.choice(rows.shape[1], num_columns, replace=False))
                tree = _grow(codes[:, columns], gradient[:, k] * seen, weight[:, k] * seen, seen)
                trees.append(replace(tree, features=columns[tree.features]))
            self._rounds.append(trees)
            self._add(scores, codes, trees)

    def predict(self, rows: Array) -> Array:
        """Return `(n, classes)` probabilities or `(n, values)` numbers."""
        codes = self._codes(rows)
        scores = np.tile(self._start, (len(rows), 1))
        for trees in self._rounds:
            self._add(scores, codes, trees)
        return _softmax(scores) if self._is_classifier else scores

    def _add(self, scores: Array, codes: Array, trees: list[_Tree]) -> None:
        for k, tree in zip(self._outputs, trees, strict=True):
            step = _RATE * tree.values[tree.leaves(codes)] * self._scale[k]
            scores[:, k] += step
            if self._is_classifier and len(self._outputs) == 1:
                scores[:, 1 - k] -= step

    def _gradient(self, scores: Array, wanted: Array) -> tuple[Array, Array]:
        if not self._is_classifier:
            return (wanted - scores) / self._scale, np.ones_like(scores)
        chances = _softmax(scores)
        factor = 2.0 if len(self._outputs) == 1 else 1.0  # both scores of two classes move
        return (wanted - chances) / factor, np.maximum(chances * (1 - chances), 1e-6)

    def _codes(self, rows: Array) -> Array:
        codes = [
            np.searchsorted(edges, column)
            for edges, column in zip(self._edges, rows.T, strict=True)
        ]
        return np.stack(codes, axis=1).astype(np.int64)


def _grow(codes: Array, gradient: Array, weight: Array, seen: Array) -> _Tree:
    """Return a tree of `_DEPTH` levels, each node split where the squared error falls most."""
    num_rows, num_columns = codes.shape
    node = np.zeros(num_rows, np.int64)
    rows = np.arange(num_rows)
    offsets = np.arange(num_columns) * _NUM_BINS
    repeated = [np.repeat(values, num_columns) for values in (gradient, weight, seen.astype(float))]
    features, bins = [], []
    for level in range(_DEPTH):
        count = 1 << level
        places = (codes + offsets + (node * (num_columns * _NUM_BINS))[:, None]).reshape(-1)
        sums = [
            np.bincount(places, values, count * num_columns * _NUM_BINS)
            .reshape(count, num_columns, _NUM_BINS)
            .cumsum(axis=2)
            for values in repeated
        ]
        gain = _gains(*sums).reshape(count, -1)
        best = gain.argmax(axis=1)
        feature, cut = np.divmod(best, _NUM_BINS)
        # If no split helps, all rows go to the left: no code is above _NUM_BINS.
        cut = np.where(gain[np.arange(count), best] > 1e-9, cut, _NUM_BINS)
        features.append(feature)
        bins.append(cut)
        node = 2 * node + (codes[rows, feature[node]] > cut[node])
    size = 1 << _DEPTH
    total, held = np.bincount(node, gradient, size), np.bincount(node, weight, size)
    return _Tree(np.concatenate(features), np.concatenate(bins), total / (held + _LAMBDA))


def _gains(gradient: Array, weight: Array, count: Array) -> Array:
    """Return the gain of each split from cumulative sums `(nodes, columns, bins)`; -inf if a side is too small."""
    whole, held, all_rows = gradient[..., -1:], weight[..., -1:], count[..., -1:]
    right, right_held, right_rows = whole - gradient, held - weight, all_rows - count
    gain = (
        gradient**2 / (weight + _LAMBDA)
        + right**2 / (right_held + _LAMBDA)
        - whole**2 / (held + _LAMBDA)
    )
    small = np.minimum(count, right_rows) < _MIN_LEAF_ROWS
    small |= np.minimum(weight, right_held) < _MIN_WEIGHT
    gains: Array = np.where(small, -np.inf, gain)
    return gains


def _softmax(scores: Array) -> Array:
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances: Array = shares / shares.sum(axis=1, keepdims=True)
    return chances


# -- linear --------------------------------------------------------------------------------------


class Ridge:
    """Ridge regression on standardised columns. The penalty `strength` counts like that many rows."""

    def __init__(self, rows: Array, targets: Array, strength: float = 10.0) -> None:
        self._center, spread = rows.mean(axis=0), rows.std(axis=0)
        self._scale = np.where(spread > 1e-12, spread, 1.0)
        self._mean = targets.mean(axis=0)
        x = (rows - self._center) / self._scale
        gram = x.T @ x + strength * np.eye(x.shape[1])
        self._weights = np.linalg.solve(gram, x.T @ (targets - self._mean))

    def predict(self, rows: Array) -> Array:
        """Return `(n, values)`."""
        # A line extrapolates badly: columns are clipped at ten standard deviations.
        x = np.clip((rows - self._center) / self._scale, -10.0, 10.0)
        values: Array = x @ self._weights + self._mean
        return values
