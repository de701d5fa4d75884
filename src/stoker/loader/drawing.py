"""Drawn epochs: samples by weight, by class or by store, as a pure function of (seed, epoch).

Enters: one weight per sample, or shares of classes or stores. Leaves: which samples an epoch holds, some of them
several times and some not at all. Costs: about the time of three permutations, in the thread that prepares the next
epoch (10 million samples: 2 s); 8 bytes per sample. No torch.

An epoch of N draws holds sample i exactly floor or ceil of N * weight[i] / sum(weights) times (systematic sampling).
The samples are put on a line, in an order that is shuffled for the epoch, each as an interval as long as its expected
number. Points at distance 1 from a random start are the draws: a point in an interval draws its sample. On average
each sample comes as often as its weight says, with less noise than independent draws. With equal weights and N = n an
epoch is a plain shuffled one: every sample once.

The draws are numbered in ascending order of their samples. Orders, ranks, chunks and elastic resume work on these
numbers, as they work on positions elsewhere, so all their guarantees hold: each draw is trained on once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stoker.arguments import explained
from stoker.bounds import require_memory
from stoker.display import nearest
from stoker.errors import InputError
from stoker.store.fields import Array
from stoker.store.reader import Store, join_stores, open_store
from stoker.units import whole_number

Weights = Array | Callable[[int], Array]
_KEPT = 3


@dataclass(frozen=True, eq=False)
class Draws:
    """How the samples of an epoch are drawn.

    Attributes:
        num_positions: Samples to draw from.
        weights: `(n,)`, 0 or more; or a function of the epoch that returns them.
        num_draws: Samples of an epoch.
        strata: `(n,)` whole numbers from 0: the class or store of each sample. An epoch holds floor or ceil of the
            expected number of each of them too.
        per_batch: Whether every batch holds the epoch's shares of the strata, within one of each.
        reason: The draw in words.
    """

    num_positions: int
    weights: Weights
    num_draws: int
    strata: Array | None = None
    per_batch: bool = False
    reason: str = "drawn by weight"
    _known: dict[tuple[int, int], Array] = field(default_factory=dict, repr=False)
    _drawing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.weights):
            checked = check_weights(self.weights, self.num_positions)
            object.__setattr__(self, "weights", checked)

    @property
    def digest(self) -> str:
        """Digest of weights, strata and number of draws; a weights function is identified by its weights of epoch 0."""
        weights = self.weights(0) if callable(self.weights) else self.weights
        state = xxhash.xxh3_64(np.ascontiguousarray(weights, dtype="<f8").data)
        state.update(f"{self.num_draws} {self.per_batch}".encode())
        if self.strata is not None:
            state.update(np.ascontiguousarray(self.strata, dtype="<i8").data)
        return state.hexdigest()

    def positions(self, seed: int, epoch: int) -> Array:
        """Return the samples of an epoch, ascending, `(num_draws,)`; the last few epochs are cached."""
        with self._drawing:
            if (found := self._known.get((seed, epoch))) is None:
                weights = self.weights
                if callable(weights):
                    weights = check_weights(weights(epoch), self.num_positions, epoch)
                found = draw(weights, self.num_draws, seed, epoch, self.strata)
                while len(self._known) >= _KEPT:
                    del self._known[next(iter(self._known))]
                self._known[seed, epoch] = found
        return found

    def __getstate__(self) -> dict[str, object]:
        names = ("num_positions", "weights", "num_draws", "strata", "per_batch", "reason")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        for name, value in {**state, "_known": {}, "_drawing": threading.Lock()}.items():
            object.__setattr__(self, name, value)


def draw(
    weights: Array, num_draws: int, seed: int, epoch: int, strata: Array | None = None
) -> Array:
    """Return `num_draws` positions, ascending; see the module's text."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch, _DRAWS)))
    generator = np.random.Generator(bits)
    if num_draws == len(weights) and (weights == weights[0]).all():
        return np.arange(num_draws)
    shuffled = generator.permutation(len(weights))
    if strata is not None:
        # Strata one after another, so that each gets floor or ceil of its expected number of draws.
        small = strata.astype(np.uint16 if strata.max(initial=0) < 1 << 16 else np.int64)
        shuffled = shuffled[np.argsort(small[shuffled], kind="stable")]
    sums = np.cumsum(weights[shuffled])
    ends = sums * (num_draws / sums[-1])
    # All draws end at the last sample with a weight: rounding must give none to samples without weight.
    ends[np.searchsorted(sums, sums[-1]) :] = num_draws
    ends += generator.random()
    reached = np.minimum(ends, num_draws, out=ends).astype(np.int64)  # rounds down: none is below 0
    counts = reached.copy()
    counts[1:] -= reached[:-1]
    per_position = np.empty(len(weights), np.int64)
    per_position[shuffled] = counts
    return np.repeat(np.arange(len(weights)), per_position)


_DRAWS = 1 << 20  # a key that no permutation of an epoch has


def spread(rows: Array, strata: Array, generator: np.random.Generator) -> Array:
    """Return rows in an order in which every stretch has the shares of the strata, within one of each.

    Args:
        rows: Shuffled rows.
        strata: The stratum of each row.
        generator: Draws where each stratum begins.
    """
    _, strata, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    quantile = (rank_within(strata, sizes) + generator.random(len(sizes))[strata]) / sizes[strata]
    return rows[np.argsort(quantile, kind="stable")]


def rank_within(strata: Array, sizes: Array) -> Array:
    """Return, for each sample, how many before it are in the same stratum; strata count from 0 and have `sizes`."""
    rank = np.empty(len(strata), np.int64)
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    rank[np.argsort(strata, kind="stable")] = np.arange(len(strata)) - starts
    return rank


def check_weights(weights: Array, count: int, epoch: int | None = None) -> Array:
    """Return weights as float64, or raise."""
    where = "" if epoch is None else f" in epoch {epoch}"
    made = np.asarray(weights)
    if made.dtype.kind in "biuf":
        made = made.astype(np.float64)
    if made.shape != (count,) or made.dtype != np.float64:
        raise InputError(
            f"the weights{where} are {made.dtype} {made.shape}.",
            f"one number of 0 or more for each of {count:,} samples",
            f"weights=np.ones({count})",
        )
    wrong = np.flatnonzero(~(np.isfinite(made) & (made >= 0)))
    if len(wrong):
        raise InputError(
            f"the weight of sample {wrong[0]}{where} is {made[wrong[0]]}.",
            "finite numbers of 0 or more",
            "weights=np.nan_to_num(weights, posinf=0).clip(0)",
        )
    with np.errstate(over="ignore"):
        total = made.sum()
    if not 0 < total < np.inf:
        raise InputError(
            f"the weights{where} add up to {total}.",
            "at least one sample with a weight above 0",
            f"weights=np.ones({count})",
        )
    return made


def class_weights(classes: Array, name: str) -> tuple[Array, Array]:
    """Return weights that make every class equally likely, and the number of each sample's class.

    Args:
        classes: `(n,)` whole numbers: the class of each sample.
        name: Name of the field, for errors.
    """
    if classes.ndim != 1 or classes.dtype.kind not in "iub":
        raise InputError(
            f"{name!r} is {classes.dtype} {classes.shape[1:]} per sample.",
            "a field with one whole number per sample, its class; or weights= of your own",
            "leave balance out",
        )
    _, inverse, sizes = np.unique(classes, return_inverse=True, return_counts=True)
    return 1.0 / sizes[inverse], inverse


@dataclass(frozen=True)
class _Selected:
    """A user's function of the epoch, whose weights are for all samples of the store."""

    weights: Callable[[int], Array]
    samples: Array
    num_stored: int

    def __call__(self, epoch: int) -> Array:
        found = np.asarray(self.weights(epoch))
        return found[self.samples] if found.shape == (self.num_stored,) else found


def choose_draws(
    store: Store,
    samples: Array,
    weights: Weights | None,
    balance: str | None,
    epoch_samples: int | None,
    mixture: Mixture | None,
) -> Draws | None:
    """Return how a loader draws samples; None if every sample comes once.

    Args:
        store: Store of the samples.
        samples: Samples to load.
        weights: As given to the loader: one per sample of the store, or of `samples`.
        balance: A field of classes, each of which is to be equally likely.
        epoch_samples: Samples of an epoch; as many as there are by default.
        mixture: Several stores with their shares, as `mix` returns them.
    """
    given = {"weights": weights, "balance": balance, "a mixture of stores": mixture}
    several = [name for name, value in given.items() if value is not None]
    if len(several) > 1:
        raise InputError(
            f"{' and '.join(several)} were given.",
            "one of them",
            f"leave {'weights' if weights is not None else 'balance'} out",
        )
    count = len(samples)
    num_draws = whole_number(
        "epoch_samples", count if epoch_samples is None else epoch_samples, "epoch_samples=1000", 1
    )
    require_memory(
        24 * num_draws, f"drawing {num_draws:,} samples", f"epoch_samples={count}", InputError
    )
    if mixture is not None:
        return mixture.draws(samples, num_draws)
    if balance is not None:
        if balance not in store.fields or store.fields[balance].kind != "dense":
            found = [
                name
                for name, info in store.fields.items()
                if info.kind == "dense" and not info.shape and np.dtype(info.dtype).kind in "iub"
            ]
            near = nearest(balance, found) or next(iter(found), None)
            raise InputError(
                f"balance={balance!r}.",
                f"a field with one whole number per sample, its class: {', '.join(found) or 'none here'}",
                f"balance={near!r}" if near else "leave balance out",
            )
        classes = store.gather(balance, samples)
        made, strata = class_weights(classes, balance)
        return Draws(
            count,
            made,
            num_draws,
            strata,
            reason=f"drawn so that the classes of {balance!r} are equally likely",
        )
    if weights is None:
        return (
            None
            if epoch_samples is None
            else Draws(count, np.ones(count), num_draws, reason="drawn")
        )
    if callable(weights):
        return Draws(count, _Selected(weights, samples, store.num_samples), num_draws)
    chosen = np.asarray(weights)
    return Draws(
        count, chosen[samples] if chosen.shape == (store.num_samples,) else chosen, num_draws
    )


@dataclass(frozen=True, eq=False)
class Mixture:
    """Several stores as one, with a share of each. Made by `mix`; give it to a `Loader`.

    Attributes:
        store: All samples, one store after another.
        names: Names of the stores.
        shares: Share of each store; they add up to 1.
        per_batch: Whether every batch holds the shares, within one sample of each.
    """

    store: Store
    names: tuple[str, ...]
    shares: Array
    per_batch: bool
    store_of: Array = field(repr=False)

    def draws(self, samples: Array, num_draws: int | None) -> Draws:
        """Return the draw from these samples of the joined store."""
        chosen = self.store_of[samples]
        sizes = np.bincount(chosen, minlength=len(self.shares))
        empty = [
            name
            for name, size, share in zip(self.names, sizes, self.shares, strict=True)
            if share and not size
        ]
        if empty:
            raise InputError(
                f"no sample of {empty[0]} is among those chosen.",
                "at least one sample of every store that has a share",
                "leave samples out",
            )
        shares = ", ".join(
            f"{share:.3g} of {name}" for name, share in zip(self.names, self.shares, strict=True)
        )
        return Draws(
            len(samples),
            (self.shares / np.maximum(sizes, 1))[chosen],
            num_draws or len(samples),
            chosen,
            self.per_batch,
            f"drawn: {shares}" + (" in every batch" if self.per_batch else ""),
        )


@explained("stoker.mix({'one.store': 0.7, 'other.store': 0.3})")
def mix(shares: Mapping[str | Store, float], *others: Any, per_batch: bool = False) -> Mixture:
    """Join stores with the same fields, so that a `Loader` draws a share of its samples from each.

    `Loader(mix({"wiki/": 0.7, "code/": 0.3}), 64)` is an epoch of as many samples as there are, 70 % of them from
    `wiki/`, whose samples repeat after all were drawn. The shares hold over an epoch; with `per_batch` they hold in
    every batch, within one sample of each store, if all data is resident.

    Args:
        shares: Share of each store, given as a store or its path; shares are divided by their sum.
        *others: Always refused with what to type: other libraries take a list of stores, then a list of shares.
        per_batch: Whether every batch holds the shares.
    """
    given: Any = shares  # code without types hands over a list, or one path
    if not isinstance(given, Mapping) or others:
        raise _no_shares(given, others)
    values = np.array([float(share) for share in shares.values()])
    if not len(values) or not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise InputError(
            f"the shares are {[float(value) for value in values]}.",
            "a share of 0 or more for each store, and one above 0",
            "mix({'store': 1})",
        )
    stores = [each if isinstance(each, Store) else open_store(each) for each in shares]
    counts = [store.num_samples for store in stores]
    names = tuple(store.name for store in stores)
    joined = join_stores(stores)
    store_of = np.repeat(np.arange(len(stores)), counts)
    return Mixture(joined, names, values / values.sum(), per_batch, store_of)


def _no_shares(given: Any, others: tuple[Any, ...]) -> InputError:
    """Return the error for stores that were not given as a dict, such as a list of stores and one of shares."""
    listed = list(given) if isinstance(given, list | tuple | set) else [given]
    beside = list(others[0]) if others and isinstance(others[0], Iterable) else []
    told = beside if len(beside) == len(listed) else [1] * len(listed)
    paths = [each.path if isinstance(each, Store) else each for each in listed[:4]]
    if all(isinstance(each, str | Path) for each in paths):
        fix = f"mix({dict(zip(map(str, paths), told, strict=False))})"
    else:
        fix = "stoker.pack_from(SAMPLES, 'store'), then mix({'store': 1})"
    kinds = " and a ".join(type(each).__name__ for each in (given, *others))
    allowed = "a dict of each store, or its path, and its share"
    return InputError(f"mix was given a {kinds}.", allowed, fix)
