"""One answer for all ranks: what fits on the smallest GPU, and the rate of all together.

Enters: what one rank has measured. Leaves: the same on every rank. Costs one small all-reduce and a
broadcast where torch.distributed is initialised; nothing elsewhere. Blocking: every rank must call it, in
the same order.

Ranks that decide from agreed outcomes alone take the same steps, so none waits for a size that the others
do not try.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import distributed

from stoker.tune.search import OutcomeT

OTHER_RANK = "it did not fit on another rank"


def agree(outcome: OutcomeT) -> OutcomeT:
    """Return the outcome of all ranks: it fits if it fits everywhere, and rates add up."""
    if not _is_shared():
        return outcome
    own = torch.tensor([outcome.fits, outcome.rate is not None], dtype=torch.float64)
    known = _reduce(own, distributed.ReduceOp.MIN)
    rate = _reduce(
        torch.tensor([outcome.rate or 0.0], dtype=torch.float64), distributed.ReduceOp.SUM
    )
    fits = bool(known[0])
    reason = OTHER_RANK if outcome.fits and not fits else outcome.reason
    return replace(outcome, fits=fits, rate=float(rate[0]) if known[1] else None, reason=reason)


def fits_everywhere(fits: bool) -> bool:
    """Return whether something fits on every rank."""
    if not _is_shared():
        return fits
    return bool(_reduce(torch.tensor([fits], dtype=torch.float64), distributed.ReduceOp.MIN)[0])


def is_first() -> bool:
    """Whether this rank is the one that prints and writes."""
    return not _is_shared() or distributed.get_rank() == 0


def _is_shared() -> bool:
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _reduce(values: torch.Tensor, how: distributed.ReduceOp.RedOpType) -> torch.Tensor:
    # NCCL takes tensors on the GPU only.
    on_gpu = distributed.get_backend() == "nccl"
    shared = values.to("cuda" if on_gpu else "cpu")
    distributed.all_reduce(shared, op=how)
    # The same bits everywhere: sums of floats may depend on the way they took.
    distributed.broadcast(shared, src=0)
    return shared.cpu()
