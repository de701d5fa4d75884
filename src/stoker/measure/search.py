"""Which size to try next, and which of those that were tried to take.

Enters: a ladder of sizes and somebody who measures one. Leaves: what was tried, and a choice that was
tried, fitted, and paid. Costs nothing by itself; the number of tries is at most the ladder's length.

The rules are two. A step along the ladder is taken only when it gains at least `LEAST_GAIN`, and the first
step that does not ends the way in that direction (the second, where that is asked for). What is taken is the
smallest size within `LEAST_GAIN` of the best, and the configured one wherever it is among those: a change
must pay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

LEAST_GAIN = 0.02
"""A change that gains less is not worth being a change; medians of short runs differ by as much."""


@dataclass(frozen=True)
class Outcome:
    """One try.

    Attributes:
        rate: Samples per second, or whatever more of is better; None when it was not run to the end.
        fits: Whether it ran, and left the margin of memory free.
        reason: Why not, in words.
    """

    rate: float | None
    fits: bool
    reason: str = ""


OutcomeT = TypeVar("OutcomeT", bound=Outcome)


# -- ladders ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateShape:
    """How the samples of one update go through the model.

    Attributes:
        batch_size: Samples at once.
        accumulation_steps: Batches per update.
    """

    batch_size: int
    accumulation_steps: int

    @property
    def samples_per_update(self) -> int:
        """The effective batch."""
        return self.batch_size * self.accumulation_steps


def shape_ladder(configured: UpdateShape, most: int) -> tuple[UpdateShape, ...]:
    """Return the shapes to consider, by rising batch size, the configured one among them.

    Up to the effective batch a shape keeps it: about half the batch, twice the batches per update (where
    it does not divide, the last batch is rounded up). Above it the batch doubles, and the update grows.

    Args:
        configured: Where to start.
        most: No batch is larger; the number of training samples. The configured one always stays.
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
    """Whether a shape has the configured samples per update, up to rounding the last batch up."""
    whole = configured.samples_per_update
    more = shape.samples_per_update - whole
    return shape.batch_size <= whole and 0 <= more < shape.batch_size


# -- climbing --------------------------------------------------------------------------------------


def climb(
    num_levels: int,
    start: int,
    measure: Callable[[int], OutcomeT],
    least_gain: float = LEAST_GAIN,
    most_misses: int = 0,
) -> dict[int, OutcomeT]:
    """Try levels of a ladder from `start`, up while that pays, else down while that pays.

    Where `start` does not fit, the first level below that does takes its place.

    Args:
        num_levels: Of the ladder; levels are 0 to num_levels - 1, and what does not fit on one does not
            fit on those above.
        start: The configured level.
        measure: Runs a level.
        least_gain: Share by which the next level must be better.
        most_misses: Levels in a row that need not be: one alone may be the machine's doing.

    Returns:
        Level to outcome, in the order of trying; nothing is tried twice.
    """
    tried: dict[int, OutcomeT] = {}

    def walk(here: int, step: int) -> int:
        """Go on while it pays; return the last level that did."""
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
    """Return the level to take, one that was tried and fits; None when none does.

    Args:
        tried: From `climb`.
        start: The configured level, kept unless another gains `least_gain`.
        allowed: Levels that may be taken.
        least_gain: What a change must gain.
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
    """Return the largest number up to `most` that fits, tried and found to; 0 when not even 1 does.

    Doubles from 2 until something does not fit, then halves the gap. 1 is tried only where 2 does not fit:
    a batch norm cannot train on one sample.

    Args:
        most: The largest number of interest, 1 or more.
        fits: Tries a number; what fits at a number fits below it.
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
