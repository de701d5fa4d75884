"""Which samples train, judge and test: from the store, or made here for stores without a split.

Enters: a store, or one key per sample (its group, its time, nothing). Leaves: sorted sample numbers,
or one uint8 per sample: 0 train, 1 val, 2 test, 3 purged, as stores keep it. Costs: a read of one
byte per sample; a hash, a sort or a permutation. No torch.

What may go wrong decides which one is right. Records of one thing (a compound, a patient) on both
sides: `split_by_group`. Labels that look ahead over the border: `split_by_time`, which purges them
and leaves an embargo. Neither: `split_randomly`. The rules for groups and times are those of
`stoker pack`; there is one of each.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from stoker.errors import InputError
from stoker.sources.massspec import SPLIT_NAMES, assign_splits, group_of
from stoker.store.fields import Array
from stoker.store.reader import Store

SplitName = Literal["train", "val", "test"]
Ratios = tuple[float, float, float]
DEFAULT_RATIOS: Ratios = (0.8, 0.1, 0.1)

_MAKE_ONE = "samples_of(split_randomly(store.num_samples), 'train')"


def select_samples(store: Store, split: SplitName | None = None) -> Array:
    """Return the sorted sample numbers of a split, int64.

    Args:
        store: With a dense field `split`, unless `split` is None.
        split: "train", "val" or "test"; None gives all samples but the purged ones.
    """
    if "split" not in store.fields:
        if split is None:
            return np.arange(store.num_samples)
        raise InputError(
            f"{store.name} has no field 'split', so it has no {split!r} samples.",
            "a store packed with a split, or a split made here",
            f"stoker pack table ... --split 0.8,0.1,0.1; or Loader(..., samples={_MAKE_ONE})",
        )
    info = store.fields["split"]
    if info.kind != "dense" or info.shape or np.dtype(info.dtype).kind not in "iu":
        raise InputError(
            f"the field 'split' of {store.name} is {info.kind} {info.dtype} {tuple(info.shape)}.",
            "one whole number per sample: 0 train, 1 val, 2 test, 3 purged",
            f"Loader(..., samples={_MAKE_ONE})",
        )
    return samples_of(store.read_rows("split", 0, store.num_samples), split)


def samples_of(assignment: Array, split: SplitName | None = None) -> Array:
    """Return the sorted sample numbers of a split, from 0, 1, 2 or 3 per sample.

    Args:
        assignment: `(n,)` from a `split_by_...` function or a store.
        split: "train", "val" or "test"; None gives all but the purged ones. Nothing gives those.
    """
    assignment = np.asarray(assignment)
    if split is not None and split not in SPLIT_NAMES:
        raise InputError(
            f"the split is {split!r}.", "'train', 'val', 'test', or None for all three", "'train'"
        )
    strange = np.flatnonzero((assignment < 0) | (assignment > len(SPLIT_NAMES)))
    if len(strange):
        raise InputError(
            f"sample {strange[0]} has split {assignment[strange[0]]}.",
            "0 train, 1 val, 2 test, 3 purged",
            _MAKE_ONE,
        )
    if split is None:
        return np.flatnonzero(assignment < len(SPLIT_NAMES))
    return np.flatnonzero(assignment == SPLIT_NAMES.index(split))


def split_by_group(groups: Array, ratios: Ratios = DEFAULT_RATIOS, seed: int = 42) -> Array:
    """Return a split per sample in which no group stands on two sides.

    Decided by each group's hash: the ratios hold on average, more data does not move old samples.

    Args:
        groups: `(n,)` whole numbers or text; equal ones stay together.
        ratios: Expected shares of the groups in train, val and test.
        seed: 0 or more; another seed, another division.
    """
    train, val, _ = check_ratios(ratios)
    _check_seed(seed)
    groups = np.asarray(groups)
    if groups.ndim != 1 or groups.dtype.kind not in "iuUSO":
        raise InputError(
            f"groups are {groups.dtype} {groups.shape}.",
            "one whole number or text per sample",
            "store.read_rows('group', 0, store.num_samples)",
        )
    if groups.dtype.kind in "USO":
        keys, inverse = np.unique(groups.astype(str), return_inverse=True)
        groups = np.array([group_of(key) for key in keys.tolist()], dtype=np.int64)[inverse]
    split = assign_splits(groups, train, val, seed)
    # A hash above train + val is test by rounding even where test has no share.
    return np.minimum(split, _last_share(ratios)).astype(np.uint8)


def split_by_time(
    time: Array,
    label_time: Array,
    ratios: Ratios = (0.70, 0.15, 0.15),
    embargo: int = 0,
) -> Array:
    """Return a split per sample in time order: train before val before test, 3 where purged.

    A sample is purged when its label ends after the last decision of its split, or when it decides
    within `embargo` decision times after a border.

    Args:
        time: `(n,)` int64, when each sample's inputs end; any order, repeats allowed.
        label_time: `(n,)` int64, when its label is known; not before `time`.
        ratios: Shares of the samples, before purging.
        embargo: Distinct decision times left out after each border; take at least the horizon.
    """
    from stoker.sources.bars import timeframes  # pyarrow comes with it: 0.2 s

    shares = check_ratios(ratios)
    time, label_time = np.asarray(time, np.int64), np.asarray(label_time, np.int64)
    if time.ndim != 1 or time.shape != label_time.shape:
        raise InputError(
            f"time {time.shape} and label_time {label_time.shape}.", "(n,) both", "label_time=time"
        )
    early = np.flatnonzero(label_time < time)
    if len(early):
        raise InputError(
            f"the label of sample {early[0]} is known before its inputs end.",
            "label_time >= time for every sample",
            "split_by_time(time, label_time, ...), in this order",
        )
    if embargo < 0:
        raise InputError(f"the embargo is {embargo}.", "0 or more", "embargo=36")
    decisions = np.sort(time)
    borders = timeframes.find_boundaries(decisions, shares)
    samples = timeframes.Samples(
        bar=np.arange(len(time)),
        time=time,
        label_time=label_time,
        label_gap=np.zeros(len(time), np.uint8),
        ends={},
        dropped={},
    )
    return timeframes.assign_splits(samples, np.unique(decisions), borders, embargo)


def split_randomly(num_samples: int, ratios: Ratios = DEFAULT_RATIOS, seed: int = 42) -> Array:
    """Return a split per sample with exactly the shares asked for, rounded to whole samples.

    Args:
        num_samples: Samples of the store.
        ratios: Shares of train, val and test.
        seed: 0 or more.
    """
    shares = check_ratios(ratios)
    _check_seed(seed)
    if num_samples < 0:
        raise InputError(f"{num_samples} samples.", "0 or more", "store.num_samples")
    borders = np.rint(np.cumsum(shares)[:2] * num_samples)
    in_order = np.searchsorted(borders, np.arange(num_samples), side="right").astype(np.uint8)
    return np.random.default_rng(seed).permutation(in_order)


def check_ratios(ratios: Ratios) -> Ratios:
    """Return three shares that add up to 1, or raise."""
    shares = tuple(float(share) for share in ratios)
    if len(shares) != 3 or not min(shares) >= 0 or abs(sum(shares) - 1) > 1e-6:
        raise InputError(
            f"the shares are {tuple(ratios)}.",
            "three shares of 0 or more for train, val and test that add up to 1",
            "ratios=(0.8, 0.1, 0.1)",
        )
    return shares


def _last_share(ratios: Ratios) -> int:
    return max(number for number, share in enumerate(ratios) if share > 0)


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise InputError(f"the seed is {seed}.", "0 or more", "seed=42")
