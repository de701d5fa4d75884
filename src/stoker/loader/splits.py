"""Which samples are for training, validation and test: from the store, or made here for stores without a split.

Enters: a store, or one key per sample (its group, its time, nothing). Leaves: sorted sample numbers, or one uint8
per sample: 0 train, 1 val, 2 test, 3 purged, as stores keep it; `.train`, `.val` and `.test` of it are sample numbers.
Costs: a read of one byte per sample; a hash, a sort or a permutation. No torch.

Choose by what could leak from training to test. Use `split_by_group` if several samples describe the same thing
(a compound, a patient): it keeps them together. Use `split_by_time` if labels look ahead in time: it purges the
samples whose labels cross a border, and leaves an embargo. Otherwise use `split_randomly`. Groups and times are
split by the same code as in `stoker pack`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from stoker.arguments import explained
from stoker.errors import InputError
from stoker.loader.drawing import rank_within
from stoker.sources.massspec import SPLIT_NAMES, assign_splits, group_of
from stoker.store.fields import Array, SplitCodes
from stoker.store.reader import Store
from stoker.units import whole_number

SplitName = Literal["train", "val", "test"]
Ratios = tuple[float, float, float]
DEFAULT_RATIOS: Ratios = (0.8, 0.1, 0.1)

_MAKE_ONE = "split_randomly(store.num_samples).train"
_LARGEST_SEED = 2**64 - 1  # of the hash of groups
_LARGEST_IN_FLOAT = 2**53  # beyond it float64 leaves whole numbers out


@explained("stoker.select_samples(stoker.open_store('data.h5'), 'train')")
def select_samples(store: Store, split: SplitName | None = None) -> Array:
    """Return the sorted sample numbers of a split, int64.

    Args:
        store: Store with a dense field `split`; it may be missing if `split` is None.
        split: "train", "val" or "test"; None selects all samples except the purged ones.
    """
    if isinstance(store, str | Path):
        raise InputError(
            f"select_samples was given a path, {str(store)!r}.",
            "an open store",
            "select_samples(stoker.open_store('store'), 'train')",
        )
    if "split" not in store.fields:
        if split is None:
            return np.arange(store.num_samples)
        raise InputError(
            f"{store.name} has no field 'split', so it has no {split!r} samples.",
            "a store packed with a split, or a split made here",
            f"stoker pack table FILE.csv OUT --split 0.8,0.1,0.1, or {_MAKE_ONE}",
        )
    info = store.fields["split"]
    if info.kind != "dense" or info.shape or np.dtype(info.dtype).kind not in "iu":
        raise InputError(
            f"the field 'split' of {store.name} is {info.kind} {info.dtype} {tuple(info.shape)}.",
            "one whole number per sample: 0 train, 1 val, 2 test, 3 purged",
            _MAKE_ONE,
        )
    return samples_of(store.read_rows("split", 0, store.num_samples), split)


def samples_of(assignment: Array, split: SplitName | None = None) -> Array:
    """Return the sorted sample numbers of a split, from 0, 1, 2 or 3 per sample.

    Args:
        assignment: `(n,)` from a `split_by_...` function or a store.
        split: "train", "val" or "test"; None selects all except the purged ones.
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


def split_by_group(groups: Array, ratios: Ratios = DEFAULT_RATIOS, seed: int = 42) -> SplitCodes:
    """Return a split per sample in which every group is in one split only.

    The hash of a group decides. So the ratios hold on average, and new data does not move old samples.

    Args:
        groups: `(n,)` whole numbers or text (bytes are read as UTF-8); equal ones stay together.
        ratios: Expected shares of the groups in train, val and test.
        seed: 0 to 2**64 - 1; another seed gives another split.
    """
    train, val, _ = check_ratios(ratios)
    seed = whole_number("the seed", seed, "seed=42", 0, _LARGEST_SEED)
    groups = np.asarray(groups)
    if groups.ndim != 1 or groups.dtype.kind not in "iuUSO":
        raise InputError(
            f"groups are {groups.dtype} {groups.shape}.",
            "one whole number or text per sample",
            "store.read_rows('group', 0, store.num_samples)",
        )
    if groups.dtype.kind in "USO":
        groups = _number_texts(groups)
    split = assign_splits(groups, train, val, seed)
    # A hash above train + val is test by rounding, even if test has no share.
    last_share = max(number for number, share in enumerate(ratios) if share > 0)
    return np.minimum(split, last_share).astype(np.uint8).view(SplitCodes)


def split_by_time(
    time: Array,
    label_time: Array,
    ratios: Ratios = (0.70, 0.15, 0.15),
    embargo: int = 0,
) -> SplitCodes:
    """Return a split per sample in time order: train before val before test, 3 where purged.

    A sample is purged when its label ends after the last decision of its split, or when it decides
    within `embargo` decision times after a border.

    Times are whole numbers, floats or datetime64, and are compared exactly; datetime64 of two units
    are brought to the finer one.

    Args:
        time: `(n,)`, when each sample's inputs end; any order, repeats allowed; no NaN or NaT.
        label_time: `(n,)` on the same clock, when its label is known; not before `time`.
        ratios: Shares of the samples, before purging.
        embargo: Distinct decision times left out after each border; take at least the horizon.
    """
    from stoker.sources.bars import timeframes  # pyarrow comes with it: 0.2 s

    shares = check_ratios(ratios)
    embargo = whole_number("the embargo", embargo, "embargo=36", 0)
    time, label_time = np.asarray(time), np.asarray(label_time)
    if time.ndim != 1 or time.shape != label_time.shape:
        raise InputError(
            f"time {time.shape} and label_time {label_time.shape}.", "(n,) both", "label_time=time"
        )
    time, label_time = _on_one_clock(time, label_time)
    early = np.flatnonzero(label_time < time)
    if len(early):
        raise InputError(
            f"the label of sample {early[0]} is known before its inputs end.",
            "label_time >= time for every sample",
            "split_by_time(time, label_time), in this order",
        )
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
    codes = timeframes.assign_splits(samples, np.unique(decisions), borders, embargo)
    return codes.view(SplitCodes)


def split_randomly(num_samples: int, ratios: Ratios = DEFAULT_RATIOS, seed: int = 42) -> SplitCodes:
    """Return a split per sample with exactly the shares asked for, rounded to whole samples.

    Args:
        num_samples: Samples of the store.
        ratios: Shares of train, val and test.
        seed: 0 or more.
    """
    shares = check_ratios(ratios)
    seed = whole_number("the seed", seed, "seed=42", 0)
    num_samples = whole_number("num_samples", num_samples, "store.num_samples", 0)
    borders = np.rint(np.cumsum(shares)[:2] * num_samples)
    in_order = np.searchsorted(borders, np.arange(num_samples), side="right").astype(np.uint8)
    return np.random.default_rng(seed).permutation(in_order).view(SplitCodes)


def draw_samples(samples: Array, most: int, seed: int, strata: Array | None = None) -> Array:
    """Return `most` of the samples, drawn by a seed, in their original order.

    With strata every class keeps its share, rounded, and none vanishes if `most` is at least the number of
    classes.

    Args:
        samples: `(n,)` ascending sample numbers.
        most: Samples to keep; all if there are fewer.
        seed: Equal seeds draw the same samples.
        strata: `(n,)` or `(n, columns)`, the class of each sample; None ignores classes.
    """
    if most >= len(samples):
        return samples
    shuffled_rows = np.random.default_rng(seed).permutation(len(samples))
    if strata is None:
        return samples[np.sort(shuffled_rows[:most])]
    rows = np.asarray(strata).reshape(len(samples), -1)
    _, classes, sizes = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    # Each class is shuffled and spread evenly from 0 to 1; the samples with the lowest quantiles are kept.
    shuffled = classes.ravel()[shuffled_rows]
    rank = rank_within(shuffled, sizes)
    quantile = np.where(rank == 0, 0.0, (rank + 0.5) / sizes[shuffled])
    kept = np.argsort(quantile, kind="stable")[:most]
    return samples[np.sort(shuffled_rows[kept])]


def check_ratios(ratios: Ratios) -> Ratios:
    """Return three shares that add up to 1, or raise."""
    try:
        shares = tuple(float(share) for share in ratios)
    except (TypeError, ValueError):  # one number, or text
        shares = ()
    if len(shares) != 3 or not min(shares) >= 0 or abs(sum(shares) - 1) > 1e-6:
        raise InputError(
            f"the shares are {tuple(ratios) if shares else ratios!r}.",
            "three shares of 0 or more for train, val and test that add up to 1",
            "ratios=(0.8, 0.1, 0.1)",
        )
    return shares


def _number_texts(groups: Array) -> Array:
    """Return a number for each text, the same as `stoker pack` gives it."""
    if groups.dtype.kind == "O":  # bytes and text cannot be sorted together
        groups = np.array([_as_text(key) for key in groups.tolist()], dtype=str)
    keys, inverse = np.unique(groups, return_inverse=True)
    return np.array([group_of(_as_text(key)) for key in keys.tolist()], dtype=np.int64)[inverse]


def _as_text(key: object) -> str:
    try:
        text = key.decode() if isinstance(key, bytes) else str(key)
        text.encode()  # half of a surrogate pair is text that has no bytes
    except UnicodeError:
        raise InputError(
            f"the group {key!r} is not UTF-8.",
            "whole numbers, text, or bytes in UTF-8",
            "np.char.decode(groups, 'latin-1')",
        ) from None
    return text


def _on_one_clock(time: Array, label_time: Array) -> tuple[Array, Array]:
    """Return int64 numbers that compare as the times do, or raise."""
    _check_times("time", time)
    _check_times("label_time", label_time)
    kinds = time.dtype.kind + label_time.dtype.kind
    if kinds in ("MM", "mm"):
        return _in_one_unit(time, label_time)
    if "M" in kinds or "m" in kinds:
        raise InputError(
            f"time is {time.dtype} and label_time is {label_time.dtype}.",
            "two of datetime64, or two of numbers",
            "np.asarray(label_time, 'datetime64[ns]'), where it counts nanoseconds",
        )
    if "f" not in kinds:
        return time.astype(np.int64), label_time.astype(np.int64)
    _check_whole_beside_floats(time, label_time)
    # Ranks: nothing but the order of the times matters from here on.
    _, ranks = np.unique(np.concatenate([time, label_time]), return_inverse=True)
    return ranks[: len(time)], ranks[len(time) :]


def _check_whole_beside_floats(time: Array, label_time: Array) -> None:
    for values, floats in ((time, "label_time"), (label_time, "time")):
        if values.dtype.kind == "f" or not len(values):
            continue
        largest = max(abs(int(values.min())), abs(int(values.max())))
        if largest > _LARGEST_IN_FLOAT:
            raise InputError(
                f"time is {time.dtype} and label_time is {label_time.dtype}, with whole numbers up "
                f"to {largest}, which floats do not tell apart.",
                "both whole numbers, or both floats",
                f"np.ceil({floats}).astype(np.int64)",
            )


def _check_times(name: str, values: Array) -> None:
    if values.dtype.kind not in "iufmM":
        raise InputError(
            f"{name} is {values.dtype}.",
            "whole numbers, floats or datetime64",
            f"np.asarray({name}, 'datetime64[ns]')",
        )
    strange = np.flatnonzero(~np.isfinite(values))
    if len(strange):
        raise InputError(
            f"the {name} of sample {strange[0]} is {values[strange[0]]}.",
            "times without NaN, inf and NaT",
            f"leave such samples out: keep = np.isfinite({name})",
        )
    if values.dtype.kind == "u" and values.max(initial=0) > np.iinfo(np.int64).max:
        raise InputError(
            f"{name} reaches {values.max()}.",
            "at most 2**63 - 1",
            "time, label_time = time - time.min(), label_time - time.min()",
        )


def _in_one_unit(time: Array, label_time: Array) -> tuple[Array, Array]:
    """Return datetimes of two units as int64 in the finer one, or raise where it does not reach."""
    try:
        unit = np.promote_types(time.dtype, label_time.dtype)
        moved = [values.astype(unit) for values in (time, label_time)]
        # A date that the finer unit cannot hold comes back as another one: years 1677 to 2262 in ns.
        held = all(
            (new.astype(old.dtype) == old).all()
            for new, old in zip(moved, (time, label_time), strict=True)
        )
    except (TypeError, OverflowError):  # months have no fixed number of seconds
        held = False
    if not held:
        raise InputError(
            f"time is {time.dtype} and label_time is {label_time.dtype}, and no one unit holds both.",
            "one unit that holds both: datetime64[ns] reaches from 1677 to 2262",
            "time, label_time = time.astype('datetime64[us]'), label_time.astype('datetime64[us]')",
        )
    return moved[0].astype(np.int64), moved[1].astype(np.int64)
