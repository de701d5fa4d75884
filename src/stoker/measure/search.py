"""Search for a size: which one to try next, and which of the tried ones to choose.

Enters: a list of sizes (levels) and a function that measures one. Leaves: the outcomes, and a choice that was
measured, fits, and pays. Costs only the tries, of which there are at most as many as levels.

There are two rules. The search continues to the next level while each one gains at least `LEAST_GAIN`; the first
level that does not ends that direction (or the second, on request). The choice is the smallest size within
`LEAST_GAIN` of the best, or the configured one if it is among those: a change must pay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

LEAST_GAIN = 0.02  # least gain of a change: medians of short runs differ by as much without one
NOISY = 5 * LEAST_GAIN
"""Spread of the slices of one try above which a gain of `LEAST_GAIN` cannot be told from noise."""


@dataclass(frozen=True)
class Outcome:
    """The result of one try."""

    # samples per second, or another rate; None if the try did not run to its end
    rate: float | None
    fits: bool  # whether the try ran, and left the margin of memory free
    reason: str = ""  # why it does not fit, in words


OutcomeT = TypeVar("OutcomeT", bound=Outcome)


# -- shapes of an update ---------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateShape:
    """The division of an update's samples into batches."""

    batch_size: int
    accumulation_steps: int

    @property
    def samples_per_update(self) -> int:
        """Effective batch size."""
        return self.batch_size * self.accumulation_steps


def shape_ladder(configured: UpdateShape, most: int) -> tuple[UpdateShape, ...]:
    """Return the shapes to consider, by rising batch size up to `most`, and always the configured one.

    Up to the effective batch size the samples per update stay: half the batch, twice the batches per update (rounded
    up if it does not divide). Above it the batch doubles, and the update grows.
    """
    whole = configured.samples_per_update
    shapes = {configured.batch_size: configured}

    def add(num_batches: int) -> int:
        size = -(-whole // num_batches)
        shapes.setdefault(size, UpdateShape(size, -(-whole // size)))
        return size

    steps = configured.accumulation_steps
    while steps > 1:
        steps = -(-steps // 2)
        add(steps)
    steps = 2 * configured.accumulation_steps
    while add(steps) > 1:
        steps *= 2
    size = 2 * whole
    while size <= most:
        shapes[size] = UpdateShape(size, 1)
        size *= 2
    return tuple(
        shapes[size] for size in sorted(shapes) if size <= most or size == configured.batch_size
    )


def keeps_update(shape: UpdateShape, configured: UpdateShape) -> bool:
    """Return whether a shape has the configured samples per update, except for rounding up the last batch."""
    whole = configured.samples_per_update
    more = shape.samples_per_update - whole
    return shape.batch_size <= whole and 0 <= more < shape.batch_size


# -- searching -------------------------------------------------------------------------------------


def climb(
    num_levels: int,
    start: int,
    measure: Callable[[int], OutcomeT],
    least_gain: float = LEAST_GAIN,
    most_misses: int = 0,
) -> dict[int, OutcomeT]:
    """Measure levels from `start` upwards while that pays; if it never does, downwards while that pays.

    If `start` does not fit, the search begins at the first level below that fits; levels above one that does not fit
    are not tried. A level pays if its rate is higher by the share `least_gain`; `most_misses` levels in a row may fail,
    since one may be noise. Returns each level's outcome, in the order of trying; nothing is tried twice.
    """
    tried: dict[int, OutcomeT] = {}

    def walk(here: int, step: int) -> int:
        """Continue in one direction while it pays; return the last level that paid."""
        at, num_misses = here, 0
        while 0 <= at + step < num_levels and num_misses <= most_misses:
            at += step
            tried[at] = following = measure(at)
            if not following.fits:
                break
            if _pays(tried[here], following, least_gain):
                here, num_misses = at, 0
            else:
                num_misses += 1
        return here

    here = start
    tried[here] = measure(here)
    while not tried[here].fits and here > 0:
        here -= 1
        tried[here] = measure(here)
    if not tried[here].fits:
        return tried
    if here != start or walk(here, 1) == here:
        walk(here, -1)
    return tried


def _pays(now: Outcome, following: Outcome, least_gain: float) -> bool:
    if following.rate is None or now.rate is None:
        return False
    return following.rate >= now.rate * (1 + least_gain)


def choose(
    tried: Mapping[int, Outcome],
    start: int,
    allowed: Callable[[int], bool] = lambda _: True,
    least_gain: float = LEAST_GAIN,
) -> int | None:
    """Return the level to choose among those that were tried, fit and are `allowed`; None if there is none.

    The configured level, `start`, is kept unless another level gains `least_gain`.
    """
    rates = {
        level: outcome.rate
        for level, outcome in tried.items()
        if outcome.fits and outcome.rate is not None and allowed(level)
    }
    if not rates:
        return None
    best = max(rates.values())
    near = [
        level for level, rate in rates.items() if rate * (1 + least_gain) > best or rate == best
    ]
    return start if start in near else min(near)


# -- the largest that fits -------------------------------------------------------------------------


def largest_fitting(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that was tried and fits; 0 if not even 1 does.

    Doubles from 2 until a number does not fit, then bisects; every number below one that fits must fit too. 1 is tried
    only if 2 does not fit: a batch norm cannot train on one sample.
    """
    good, bad = 0, most + 1
    size = min(2, most)
    while size < bad and size > good:
        if fits(size):
            good = size
            size = min(2 * size, most)
        else:
            bad = size
    while bad - good > 1:
        size = (good + bad) // 2
        if fits(size):
            good = size
        else:
            bad = size
    return good
