"""Which samples every batch of every epoch holds, on every rank; a pure function of (seed, epoch).

Enters: a number of samples, a batch size, a mode, ranks, and the chunks that are loaded together.
Leaves: per epoch the chunks to visit and the batches, from any batch on. Costs: a full shuffle of
10 million samples 0.7 s and 80 MB; in every other mode an epoch costs nothing before its first
batch, and holds the permutation of one chunk at a time. A batch costs about 6 µs. No torch.

A *position* is an index into the loader's list of samples, 0 to n - 1. A *chunk* is a range of
positions that is loaded at once. The *sequence* of an epoch is all positions in the order of their
chunks' visits. How samples are shared by ranks:

    sequential, time   chunks ascending; rank r has the r-th of `world_size` blocks of the sequence
    shuffled, chunks   chunk order shuffled; rank r has the r-th block of the sequence; shuffled
                       within what a rank has of a chunk, so it reads 1 / world_size of the bytes
    shuffled, resident one permutation of everything; step k of all ranks together is the k-th piece
                       of `batch_size * world_size`: N ranks see what one rank with N times the
                       batch sees
    lanes              rank r has lanes r * batch_size to (r + 1) * batch_size - 1; see `lanes.py`

The end of an epoch: every rank has the same number of steps, `ceil(n / (batch_size * world_size))`, and
no batch is empty or repeats a sample. All batches are full except the last. If a rank would have nothing
for its last step, the batch before gives up samples for it. With `drop_last` the sequence is cut to whole
steps of full batches: its last n % (batch_size * world_size) samples are left out, different ones in every
shuffled epoch.

Every rank can compute how many samples all ranks have in a step, because blocks have only two sizes. For
an epoch that other ranks began see `elastic.py`.

numpy guarantees the bits of its generators, but may change `permutation` between releases. The digest in a
saved state detects that, and tests pin it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stoker.errors import InputError
from stoker.loader.epochs import begin_epoch
from stoker.loader.planned import MODES, EpochOrder, Mode, OrderFacts
from stoker.plan.facts import most_chunks_per_batch
from stoker.store.fields import Array


@dataclass(frozen=True)
class Order(OrderFacts):
    """Everything that the batches depend on; `OrderFacts` lists the attributes.

    Raises:
        InputError: The values do not fit together; the message says which, and what to type.
    """

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.mode == "lanes" or self.lanes is not None:
            _check_lanes(self)
        if self.draws is not None:
            assert self.mode == "shuffled", "a Loader draws for order='shuffled' only"
        _check_steps(self)
        if self.chunks is not None:
            _check_chunks(self.chunks, *self._chunked)

    @property
    def reason(self) -> str:
        """The order in words."""
        if self.lanes is not None:
            return self.lanes.reason
        if self.draws is not None:
            where = (
                ""
                if self.chunks is None
                else f", from {len(self.chunks):,} chunks one after the other"
            )
            return f"{self.draws.reason}: {self.draws.num_draws:,} of {self.num_samples:,} samples{where}"
        if self.mode == "time":
            return "time order: samples as they stand, nothing is shuffled"
        if self.mode == "sequential":
            return "sequential: samples as they stand"
        if self.chunks is None:
            return "full shuffle: everything is resident"
        largest = int(np.diff(self.edges).max())
        return (
            f"chunk order and order within chunks are shuffled: {len(self.chunks):,} chunks of up "
            f"to {largest:,} samples are loaded one after the other"
        )

    @property
    def most_chunks_per_batch(self) -> int:
        """Most chunks that one batch can touch: a loader needs at least as many slots."""
        if self.chunks is None or self.lanes is not None:
            return 1
        return most_chunks_per_batch(np.diff(self.edges), self.batch_size)

    def epoch(self, epoch: int) -> EpochOrder:
        """Return the order of one epoch. Cheap: a permutation is computed when it is first needed."""
        if epoch < 0:
            raise InputError(f"the epoch is {epoch}.", "0 or more", "order.epoch(0)")
        return begin_epoch(self, epoch)

    def remaining(self, epoch: int, step: int) -> Array:
        """Return the positions, ascending, that no rank was given in the first `step` batches.

        What `drop_last` leaves out is not among them. The answer is the same on every rank.
        """
        whole = self.epoch(epoch)
        left, unused = whole.untaken(step), whole.untaken(len(self))
        return whole._drawn(np.setdiff1d(left.positions(), unused.positions(), assume_unique=True))


def pick_mode(order: str | None, shuffle: bool | None, is_drawn: bool = False) -> Mode:
    """Return the mode for an `order`, a `shuffle` flag, or both where they agree.

    Args:
        order: One of `MODES`; None leaves it to `shuffle`.
        shuffle: True asks for "shuffled"; None has no opinion.
        is_drawn: Whether samples are drawn by weight, which is always shuffled.
    """
    if shuffle not in (None, True, False):  # the text "no" is true
        raise InputError(f"shuffle is {shuffle!r}.", "True or False", "shuffle=True")
    if is_drawn and (order not in (None, "shuffled") or shuffle is False):
        raise InputError(
            f"samples are drawn by weight, with {'shuffle=False' if order is None else f'order={order!r}'}.",
            "order='shuffled' for weights, balance, epoch_samples or several stores",
            "order='shuffled', shuffle=True",
        )
    if is_drawn:
        return "shuffled"
    if order is not None and order not in MODES:
        raise InputError(f"the order is {order!r}.", ", ".join(MODES), "order='shuffled'")
    if order is None:
        return "shuffled" if shuffle else "sequential"
    if shuffle and order != "shuffled":
        raise InputError(
            f"shuffle=True with order={order!r}, which keeps samples in their order.",
            "shuffle=True with order='shuffled', or no shuffle",
            f"order={order!r}, shuffle=False",
        )
    if shuffle is False and order == "shuffled":
        raise InputError(
            "shuffle=False with order='shuffled'.", "one of the two", "order='sequential'"
        )
    return next(mode for mode in MODES if mode == order)


def _check_numbers(order: Order) -> None:
    pick_mode(order.mode, None)
    if order.batch_size < 1:
        raise InputError(f"batch_size is {order.batch_size}.", "1 or more", "batch_size=128")
    if order.seed < 0:
        raise InputError(f"the seed is {order.seed}.", "0 or more", "seed=0")
    if order.world_size < 1 or not 0 <= order.rank < order.world_size:
        raise InputError(
            f"rank {order.rank} of world_size {order.world_size}.",
            "a rank from 0 to world_size - 1",
            "rank=int(os.environ['RANK']), world_size=int(os.environ['WORLD_SIZE'])",
        )
    if order.num_samples < order.world_size:
        raise InputError(
            f"{order.num_samples} samples for {order.world_size} ranks.",
            "at least one sample per rank",
            "check the selection: stoker inspect STORE shows the samples of each split",
        )


def _check_lanes(order: Order) -> None:
    plan = order.lanes
    if order.mode != "lanes" or plan is None:
        raise InputError(
            f"order={order.mode!r} {'without' if plan is None else 'with'} a lane plan.",
            "order='lanes' and lanes=plan_lanes(...) together",
            "order='lanes', lanes=plan_store_lanes(store, num_lanes=batch_size * world_size)",
        )
    wanted = order.batch_size * order.world_size
    if plan.num_lanes != wanted:
        raise InputError(
            f"{plan.num_lanes} lanes for batch_size {order.batch_size} on {order.world_size} ranks.",
            f"batch_size * world_size = {wanted} lanes",
            f"num_lanes={wanted}",
        )
    # Without a digest only the number of samples can be compared.
    digests = {plan.samples_digest, order.samples_digest} - {""}
    as_many = plan.num_samples == order.num_samples
    if not as_many or len(digests) > 1:
        raise InputError(
            f"the lanes were planned over {plan.num_samples} samples, the order has "
            + ("as many others." if as_many else f"{order.num_samples}."),
            "one list of samples for both",
            f"plan_store_lanes(store, {plan.num_lanes}, samples=samples), where samples are the loader's",
        )


def _check_steps(order: Order) -> None:
    """Check that every rank has a sample in every step."""
    offered, step_samples = order.num_offered, order.batch_size * order.world_size
    if not len(order):
        raise InputError(
            f"drop_last with {offered} samples leaves no batch of {order.batch_size} on "
            f"{order.world_size} ranks.",
            f"at least {step_samples} samples",
            "drop_last=False, or a smaller batch_size",
        )
    if offered < len(order) * order.world_size:  # only a batch of one cannot be shared
        raise InputError(
            f"{offered} samples in batches of 1 do not give {order.world_size} ranks equal steps.",
            f"a multiple of {order.world_size} samples, or larger batches",
            "batch_size=2, or drop_last=True",
        )


def _check_chunks(chunks: tuple[tuple[int, int], ...], count: int, what: str) -> None:
    pairs = np.asarray(chunks, dtype=np.int64).reshape(-1, 2)
    edges = np.concatenate([[0], pairs[:, 1]])
    wrong = np.flatnonzero((pairs[:, 0] != edges[:-1]) | (pairs[:, 1] <= pairs[:, 0]))
    if len(wrong) or edges[-1] != count:
        where = (
            f"chunk {wrong[0]} is {chunks[wrong[0]]}" if len(wrong) else f"they end at {edges[-1]}"
        )
        raise InputError(
            f"the chunks do not cover 0 to {count}: {where}.",
            f"(start, stop) pairs, ascending, without holes, over {count} {what}",
            f"chunks=even_chunks({count}, most={max(1, count // 4)})",
        )
