"""One answer for all ranks: what fits on the smallest GPU, and the rate of all together.

Enters: what one rank has measured. Leaves: the same on every rank. Costs a small message or two where
torch.distributed is initialised; nothing elsewhere. Blocking: every rank must call it, in the same order.

Ranks that decide from agreed outcomes alone take the same steps, so none waits for a size that the others
do not try.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.measure.search import OutcomeT
from stoker.train.ranks import Ranks

OTHER_RANK = "it did not fit on another rank"


def agree(outcome: OutcomeT) -> OutcomeT:
    """Return the outcome of all ranks: it fits if it fits everywhere, and rates add up."""
    ranks = Ranks.current()
    if not ranks.are_several:
        return outcome
    fits = ranks.all_of(outcome.fits)
    is_known = ranks.all_of(outcome.rate is not None)
    (rate,) = ranks.total(outcome.rate or 0.0)
    reason = OTHER_RANK if outcome.fits and not fits else outcome.reason
    return replace(outcome, fits=fits, rate=rate if is_known else None, reason=reason)


def fits_everywhere(fits: bool) -> bool:
    """Return whether something fits on every rank."""
    return Ranks.current().all_of(fits)


def is_first() -> bool:
    """Whether this rank is the one that prints and writes."""
    return Ranks.current().is_first
