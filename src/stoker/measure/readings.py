"""Repeated readings of one quantity: their quartiles, and whether they keep growing.

Enters: numbers in the order in which they were read. Leaves: a `Spread`, or the growth per reading. Costs a
sort; pure, and without torch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CREEP_HOST_BYTES, CREEP_DEVICE_BYTES = 8 << 20, 1 << 20
"""Growth below this is an allocator settling; torch's own count on a device is exact."""
_CREEP_BLOCKS = 6
_STEADY_SHARE = 0.08
"""Each block must have at least this share of the whole growth: an allocator that settles grows only at first."""


@dataclass(frozen=True)
class Spread:
    """Median, quartiles (`low` and `high`) and number of repeated readings of one quantity."""

    median: float
    low: float
    high: float
    count: int = 1

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the quartiles of the finite values; None when there are none."""
        ordered = sorted(value for value in values if math.isfinite(value))
        if not ordered:
            return None
        middle, low, high = (_at_share(ordered, share) for share in (0.5, 0.25, 0.75))
        return cls(middle, low, high, len(ordered))


def _at_share(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def creep(readings: Sequence[float | None], least: float) -> float | None:
    """Return the steady growth of readings, per reading; 0 if they settle, None if there are too few.

    The first quarter is left out. The rest must grow from each of six blocks to the next, and by `least` in all:
    memory that settles grows only once, and other memory goes up and down.
    """
    points = [(at, value) for at, value in enumerate(readings) if value is not None]
    points = points[len(points) // 4 :]
    if len(points) < 2 * _CREEP_BLOCKS:
        return None
    size = len(points) // _CREEP_BLOCKS
    blocks = [points[i * size : (i + 1) * size] for i in range(_CREEP_BLOCKS)]
    middles = [statistics.median(value for _, value in block) for block in blocks]
    grown = middles[-1] - middles[0]
    rises = [after - before for before, after in itertools.pairwise(middles)]
    if grown < least or min(rises) < _STEADY_SHARE * grown:
        return 0.0
    first, last = (statistics.median(at for at, _ in blocks[i]) for i in (0, -1))
    return float(grown / max(1.0, last - first))
