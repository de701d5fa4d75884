"""Decides from a store the inputs, the task and the split of the tabular recipe.

Enters: an open store. Leaves: frozen decisions, each with its reason in words, or an error that says
what to type. Costs: a read of the targets; a read of the inputs if equal rows are kept together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stoker.errors import InputError
from stoker.loader.splits import (
    Ratios,
    split_by_group,
    split_by_time,
    split_randomly,
)
from stoker.recipes.contract import Tensors
from stoker.recipes.gate import complete_parts, drawn_parts, fill_parts, own_parts
from stoker.recipes.tabular.options import SplitMode
from stoker.store.fields import Array
from stoker.store.manifest import FieldInfo
from stoker.store.reader import Store
from stoker.store.repairs import fitted_among
from stoker.store.row_sketch import hash_rows
from stoker.units import format_count

_MOST_CLASSES = 10_000
_FEW_VALUES = 20
_HASH_ROWS = 65_536


# -- inputs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The field of the inputs. `window` is None for single rows."""

    field: str
    is_series: bool
    window: int | None
    num_features: int
    reason: str

    @property
    def num_columns(self) -> int:
        """Columns that the model gets: those of the field, and for a series its gap flag."""
        return self.num_features + self.is_series

    def read(self, batch: Tensors) -> torch.Tensor:
        """Return the inputs of a batch as stored; for a series with its gap flag as an additional column."""
        values = batch[self.field]
        if not self.is_series:
            return values
        flag = (batch[f"{self.field}/gap"] != 0).float().unsqueeze(-1)
        return torch.cat([values.float(), flag], dim=-1)


def find_inputs(store: Store, wanted: str | None, target: str) -> Inputs:
    """Decide which field has the inputs."""
    usable = {
        name: info for name, info in store.fields.items() if name != target and _is_usable(info)
    }
    series = [name for name in usable if usable[name].kind == "series"]
    base = store.manifest.attributes.get("base")
    if wanted is not None:
        name, reason = wanted, "it was asked for"
    elif "features" in usable:
        name, reason = "features", "the store has dense features"
    elif base in series:
        name, reason = str(base), "it is the base timeframe of the store"
    elif len(usable) == 1:
        name, reason = next(iter(usable)), "it is the only one of numbers"
    else:
        name, reason = "", ""
    if name not in usable:
        held = ", ".join(f"{n} ({i.kind} {i.dtype} {i.shape})" for n, i in store.fields.items())
        raise InputError(
            f"{name!r} is no input." if name else f"{store.name} holds {held}.",
            ", ".join(usable) or "dense features (n, F) or (n, T, F), or a series",
            f"field={next(iter(usable))!r}" if usable else "stoker pack table FILE.csv OUT",
        )
    info = usable[name]
    window = info.window if info.kind == "series" else (info.shape[0] if info.shape[1:] else None)
    shown = f"{info.shape[-1]} columns" + (f" x {window} rows" if window else "")
    return Inputs(
        name,
        info.kind == "series",
        window,
        info.shape[-1],
        f"inputs: {name}, {shown}; {reason}",
    )


def _is_usable(info: FieldInfo) -> bool:
    number = np.dtype(info.dtype).kind in "fiu"
    return number and (
        info.kind == "series" or (info.kind == "dense" and len(info.shape) in (1, 2))
    )


# -- task ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Task:
    """The prediction target. `classes` are the sorted target values of the classes; None for regression."""

    classes: Array | None
    num_outputs: int
    reason: str


def find_task(store: Store, target: str, values: Array, wanted: str) -> Task:
    """Decide what is predicted: the option `task`, and for "auto" the type of the targets.

    `values` are the targets of all samples in the split, to find the classes.
    """
    whole = values.dtype.kind in "iu"
    # A packed table records the type of its target. Other floats are classes if they are a few whole numbers.
    told = "target" in store.manifest.attributes
    few = 0 if whole or told or wanted != "auto" else _count_classes(values)
    is_regression = wanted == "regression" or (wanted == "auto" and not (whole or few))
    why = f"the targets are {values.dtype}" if wanted == "auto" else "it was asked for"
    if few:
        why = f"the targets are {few} different whole numbers (task='regression' predicts them as numbers)"
    flat = values.reshape(len(values), -1)
    if is_regression:
        return Task(None, flat.shape[1], f"regression of {flat.shape[1]} values: {why}")
    if flat.shape[1] != 1 or not (whole or (values == np.rint(values)).all()):
        raise InputError(
            f"classification of {target!r}, which holds {values.dtype} {values.shape[1:]} a sample.",
            "one whole number per sample",
            "task='regression'",
        )
    _require_int64(target, values.reshape(-1))
    named = store.manifest.attributes.get("classes") or []
    classes = np.arange(len(named)) if named else np.unique(values).astype(np.int64)
    if not 2 <= len(classes) <= _MOST_CLASSES:
        raise InputError(
            f"{target!r} holds {format_count(len(classes))} different values.",
            f"2 to {_MOST_CLASSES:,} classes",
            "task='regression'" if len(classes) > 2 else "pack samples of at least two classes",
        )
    return Task(classes, len(classes), f"classification into {len(classes)} classes: {why}")


def _require_int64(target: str, values: Array) -> None:
    """Refuse labels beyond int64: they would wrap around and become other classes."""
    limit = 2**63
    beyond = values >= np.uint64(limit) if values.dtype.kind == "u" else np.abs(values) >= limit
    if values.dtype.kind != "i" and beyond.any():
        raise InputError(
            f"{target!r} holds the label {values[beyond][0]}.",
            "whole numbers from -2**63 to 2**63 - 1",
            "number the classes from 0: np.unique(labels, return_inverse=True)[1]",
        )


def _count_classes(values: Array) -> int:
    """Return the number of classes if floats are a few whole numbers that repeat; 0 for other values."""
    if values.size != len(values):
        return 0
    few = np.unique(values)
    if not 2 <= len(few) <= _FEW_VALUES or 2 * len(few) > len(values):
        return 0
    return len(few) if bool(np.isfinite(few).all() and (few == np.rint(few)).all()) else 0


# -- split ---------------------------------------------------------------------------------


def split_samples(
    store: Store,  # open
    inputs: Inputs,  # from `find_inputs`
    # "store" as packed; "time" in order, with purge and embargo; "random"; "distinct" random with equal rows on one
    # side; "auto" takes the first of these that can be right
    mode: SplitMode,
    ratios: Ratios,  # shares, unless the store has a split
    embargo: int | None,  # samples left out after a border in time; None is the window length
    seed: int,  # of random splits
    *,
    rows_repeat: bool = False,  # whether the quality gate found duplicate rows
) -> tuple[dict[str, Array], str]:
    """Return the samples of train, val and test, and a note with the reason for this split."""
    why = "it was asked for"
    if mode == "auto":
        mode, why = _choose_split(store, inputs, rows_repeat)
    samples: dict[str, Array]
    if mode == "store":
        samples = own_parts(store)
        if inputs.window is None and "time" not in store.fields:
            samples, made = complete_parts(samples, seed, np.arange(store.num_samples))
            why += made
    else:
        division, groups, more = _divide(store, inputs, mode, ratios, embargo, seed)
        samples = drawn_parts(division)
        what = "different rows" if mode == "distinct" else "rows"
        what += f", divided by {mode!r}{more}," if groups is None else ""
        samples, filled = fill_parts(samples, ratios, seed, groups, what)
        why += more + filled
        if names := fitted_among(store.manifest.repairs.get(inputs.field, ())):
            on = "the training rows of the store's split" if "split" in store.fields else "all rows"
            why += f"; when packed, {names} was fitted on {on}, so perhaps on rows that are now val or test"
    if not len(samples["train"]):
        raise InputError(
            f"{store.name} has no training samples (split {mode!r}: {why}).",
            "at least one",
            "ratios=[0.8, 0.1, 0.1]",
        )
    counts = ", ".join(f"{len(ids):,} {name}" for name, ids in samples.items())
    return samples, f"samples: {counts}; split {mode!r}: {why}"


def _choose_split(store: Store, inputs: Inputs, rows_repeat: bool) -> tuple[SplitMode, str]:
    if "split" in store.fields:
        return "store", "the store has one"
    if inputs.window is not None or "time" in store.fields:
        return "time", "windows of neighbouring samples overlap, so a random split would leak"
    if rows_repeat:
        return "distinct", "rows repeat, so a random split would test on training rows"
    return "random", "rows stand for themselves"


def _divide(
    store: Store,
    inputs: Inputs,
    mode: SplitMode,
    ratios: Ratios,
    embargo: int | None,
    seed: int,
) -> tuple[Array, Array | None, str]:
    """Return the split, the groups that it keeps together (None for a split by time), and a note."""
    total = store.num_samples
    if mode == "random":
        return split_randomly(total, ratios, seed), np.arange(total), ""
    if mode == "distinct":
        groups = _row_groups(store, inputs)
        return split_by_group(groups, ratios, seed), groups, ""
    time = np.arange(total)
    if "time" in store.fields:
        time = store.read_rows("time", 0, total)
    label_time = time
    if "label_time" in store.fields:
        label_time = store.read_rows("label_time", 0, total)
    # With an embargo of a whole window no row is on both sides; a small store has too few samples for it.
    asked = (inputs.window or 0) if embargo is None else embargo
    smallest = min((share for share in ratios[1:] if share > 0), default=1.0)
    used = asked if embargo is not None else min(asked, max(1, int(total * smallest / 4)))
    short = f", less than a window of {asked}: the store is small" if used < asked else ""
    division = split_by_time(time, label_time, ratios, used)
    return division, None, f"; an embargo of {used} samples{short}"


def _row_groups(store: Store, inputs: Inputs) -> Array:
    """Return a hash per sample, equal for equal inputs."""
    if inputs.is_series:
        raise InputError(
            f"split is 'distinct' for windows of the series {inputs.field!r}.",
            "dense features",
            "split='time'",
        )
    parts = [
        hash_rows(
            store.read_rows(inputs.field, low, min(low + _HASH_ROWS, store.num_samples))
        ).view(np.int64)
        for low in range(0, store.num_samples, _HASH_ROWS)
    ]
    return np.concatenate(parts)
