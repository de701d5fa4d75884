"""Explains a loss that is not finite or grows, and updates that were skipped.

Enters: the loader, the step with its sample ids, the precision. Leaves: a `NonFiniteError` whose message
names the epoch, the batch, the samples and the columns; or a note. Costs: one read of that batch from disk, only
for a bad loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.display import command
from stoker.loader.loader import Loader
from stoker.report import Note, Topic
from stoker.store.fields import Array
from stoker.store.memory import is_in_memory
from stoker.train.losses import NonFiniteError, StepLoss
from stoker.train.precision import PrecisionChoice
from stoker.train.ranks import Ranks

FLOAT16_MAX = 65504.0
_MOST_NAMED = 3


@dataclass(frozen=True)
class _BadValue:
    field: str
    column: int
    sample: int
    value: float

    def __str__(self) -> str:
        return f"{self.field} column {self.column} is {self.value:g} in sample {self.sample}"


def explain_batch(
    loader: Any, seen: StepLoss, precision: PrecisionChoice, ranks: Ranks | None = None
) -> NonFiniteError:
    """Return the error for a loss that is not finite, with the bad values of its batch.

    Collective with several ranks: only the rank that had this part of the batch can examine it.
    """
    epoch, batch = seen.place
    where = f"the loss of step {seen.step} (epoch {epoch}, batch {batch}) is {seen.loss}"
    if ranks is None or not ranks.are_several:
        return explain_samples(loader, seen.positions, precision, where)
    is_own = seen.own is not None and not math.isfinite(seen.own)
    found = explain_samples(loader, seen.positions, precision, where) if is_own else None
    words = None if found is None else (found.given, found.allowed, found.fix)
    told = {rank: words for rank, words in enumerate(ranks.gather(words)) if words is not None}
    if not told:  # finite on each rank, but their sum overflows
        return explain_samples(loader, seen.positions, precision, where)
    rank = min(told)
    given, allowed, fix = told[rank]
    return NonFiniteError(f"on rank {rank}, {given}", allowed, fix)


def explain_samples(
    loader: Any, positions: Array | None, precision: PrecisionChoice, where: str
) -> NonFiniteError:
    """Return the error for samples whose loss is not finite; its message begins with `where`."""
    if positions is None or not isinstance(loader, Loader):
        return NonFiniteError(
            f"{where}; the loader does not say which samples were in it.",
            "finite losses",
            "stoker inspect FILE, which looks for values that break training; a stoker.Loader would name the samples",
        )
    ids = loader.samples[positions[positions >= 0]]
    limit = FLOAT16_MAX if str(precision.dtype) == "torch.float16" else np.inf
    bad = list(_bad_values(loader, ids, limit))
    shown = ", ".join(map(str, ids[:5].tolist())) + (", ..." if len(ids) > 5 else "")
    if bad:
        named = "; ".join(map(str, bad[:_MOST_NAMED]))
        more = f" and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
        return NonFiniteError(
            f"{where}. Its batch (samples {shown}) holds bad values: {named}{more}.",
            "finite values" if limit == np.inf else f"finite values up to {limit:g} in float16",
            _how_to_leave_out(bad[0].field, limit)
            if is_in_memory(loader.store)
            else f"{command('stoker', 'inspect', loader.store.name)}, then pack again with a repair it names",
        )
    return NonFiniteError(
        f"{where}. Its batch (samples {shown}) holds finite values only: the model diverged.",
        "finite losses",
        "a lower learning rate, clip_norm=1.0, or precision='fp32' to see where it begins",
    )


def _how_to_leave_out(field: str, limit: float) -> str:
    """Return a `samples=` argument that excludes bad rows: no command can inspect arrays in memory."""
    good = (
        f"np.isfinite({field})" if limit == np.inf else f"(abs(np.asarray({field})) <= {limit:g})"
    )
    return f"samples=np.flatnonzero({good}.reshape(len({field}), -1).all(1)) in the call of Loader"


def _bad_values(loader: Loader, ids: Array, limit: float) -> Iterator[_BadValue]:
    """Yield the first bad value of every column of every field of the batch."""
    for column in loader.columns:
        if column.kind == "ragged" or column.values[0].dtype.kind != "f":
            continue
        for sample, rows in _rows(loader, column.field, column.kind, ids):
            flat = np.asarray(rows, dtype=np.float64).reshape(
                -1, rows.shape[-1] if rows.ndim else 1
            )
            wrong = ~(np.abs(flat) <= limit) | ~np.isfinite(flat)
            for number in np.flatnonzero(wrong.any(axis=0)).tolist():
                first = int(np.flatnonzero(wrong[:, number])[0])
                yield _BadValue(column.field, number, sample, float(flat[first, number]))


def _rows(loader: Loader, field: str, kind: str, ids: Array) -> Iterator[tuple[int, Array]]:
    if kind == "dense":
        yield from zip(ids.tolist(), loader.store.gather(field, ids), strict=True)
        return
    for sample in ids.tolist():
        yield sample, loader.store.read_window(field, sample)


def explain_skipped(num_updates: int, epoch: int) -> NonFiniteError:
    """Return the error for updates that were left out although their losses were finite."""
    return NonFiniteError(
        f"the gradients of {num_updates} updates of epoch {epoch} were not finite although "
        "their losses were; these updates were left out.",
        "a loss with finite gradients",
        "look for sqrt, log or a division at 0 in the loss: torch.autograd.set_detect_anomaly(True)",
    )


def explain_growth(growth: float, loss: float, first: float | None, step: int) -> Note:
    """Return the note on a loss that is `growth` times the `first`."""
    return Note(
        f"the loss grows without bound: {loss:.4g} at step {step}, {growth:.3g} times "
        f"the {first:.4g} that it began with: a lower learning rate, clip_norm=1.0, or "
        "inputs and targets of one scale",
        Topic.LOSS,
        {"growth": growth, "loss": loss},
    )
