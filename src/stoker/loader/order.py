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

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np
import xxhash

from stoker.errors import InputError
from stoker.loader.drawing import Draws
from stoker.loader.lanes import LanePlan
from stoker.loader.positions import PositionSet
from stoker.plan.facts import most_chunks_per_batch
from stoker.store.fields import Array

Mode = Literal["sequential", "shuffled", "time", "lanes"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(slots=True, eq=False)  # not frozen: that costs a microsecond a batch
class PlannedBatch:
    """One batch of one rank.

    Attributes:
        step: Number of the batch in its epoch.
        positions: `(rows,)` int64, the caller's own. Lanes only: -1 in a row whose lane has ended;
            rows are never moved up.
        chunks: Chunks that the rows lie in, in visit order: at most two when every chunk holds a
            batch. One when everything is resident.
        chunk_rows: How many rows come from each of `chunks`; they lie together, in this order.
        num_together: Samples of this step over all ranks; a data-parallel trainer weights its rows by
            `world_size / num_together`, so that a short batch counts for what it holds.
        reset: Lanes only: `(rows,)` bool, the row begins anew: at a lane's or segment's start, and
            where there is no sample.
    """

    step: int
    positions: Array
    chunks: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    num_together: int
    reset: Array | None = None

    @property
    def valid(self) -> Array:
        """`(rows,)` bool: the row holds a sample. False only in lanes that have ended."""
        return self.positions >= 0


@dataclass(frozen=True)
class Visit:
    """The part of one chunk that a rank needs: positions `start` to `stop`; with lanes, steps."""

    chunk: int
    start: int
    stop: int


@dataclass(frozen=True)
class Order:
    """Everything that the batches depend on.

    Attributes:
        num_samples: Positions, 0 to n - 1.
        batch_size: Rows per batch and rank; with lanes, lanes per rank.
        mode: See the module's text.
        seed: 0 or more; only "shuffled" uses it.
        rank: This process, 0 to `world_size` - 1.
        world_size: Processes that share the epoch.
        drop_last: Leave out what does not fill a batch on every rank.
        chunks: `[start, stop)` of positions, ascending, without holes; None when everything is
            resident. With lanes they are ranges of *steps*: a chunk holds the samples of all of a
            rank's lanes at these steps, so its edge breaks no lane.
        lanes: From `plan_lanes`, for "lanes" only.
        samples_digest: Of the samples that the positions stand for; states of others are refused.
        draws: Which samples an epoch holds, some of them several times, for "shuffled" only; None is all, once.
            Batches then share out the numbers of the draws; see `drawing.py`.

    Raises:
        InputError: The values do not fit together; the message says which, and what to type.
    """

    num_samples: int
    batch_size: int
    mode: Mode = "sequential"
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    chunks: tuple[tuple[int, int], ...] | None = None
    lanes: LanePlan | None = None
    samples_digest: str = ""
    draws: Draws | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.mode == "lanes" or self.lanes is not None:
            _check_lanes(self)
        if self.draws is not None:
            assert self.mode == "shuffled", "a Loader draws for order='shuffled' only"
        _check_steps(self)
        if self.chunks is not None:
            _check_chunks(self.chunks, *self._chunked)

    def __len__(self) -> int:
        """Batches of every epoch, the same on all ranks."""
        return self.count_steps(self.num_offered)

    def count_steps(self, num_samples: int) -> int:
        """Return how many steps all ranks together need for this many samples."""
        step_samples = self.batch_size * self.world_size
        spare = 0 if self.drop_last else step_samples - 1
        return (num_samples + spare) // step_samples

    @property
    def num_used(self) -> int:
        """Samples of an epoch over all ranks; fewer than `num_samples` with `drop_last` or lanes."""
        full = len(self) * self.batch_size * self.world_size
        return full if self.drop_last else self.num_offered

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
        from stoker.loader.epochs import begin_epoch  # it imports this module

        return begin_epoch(self, epoch)

    @property
    def is_dealt(self) -> bool:
        """Whether all ranks share one permutation of all samples."""
        return self.mode == "shuffled" and self.chunks is None

    def remaining(self, epoch: int, step: int) -> Array:
        """Return the positions, ascending, that no rank was given in the first `step` batches.

        What `drop_last` leaves out is not among them. The answer is the same on every rank.
        """
        whole = self.epoch(epoch)
        left, unused = whole.untaken(step), whole.untaken(len(self))
        return whole._drawn(np.setdiff1d(left.positions(), unused.positions(), assume_unique=True))

    @property
    def num_offered(self) -> int:
        """Samples that an epoch has to offer: all, the draws, or those in lanes."""
        if self.draws is not None:
            return self.draws.num_draws
        return self.num_samples if self.lanes is None else len(self.lanes.positions)

    def edges_in(self, epoch: int) -> Array:
        """Return the edges of the chunks in the list that an epoch shares out: positions, or draws."""
        if self.draws is None:
            return self.edges
        return np.searchsorted(self.draws.positions(self.seed, epoch), self.edges)

    @property
    def _chunked(self) -> tuple[int, str]:
        """Return how many things the chunks divide, and what they are."""
        if self.lanes is None:
            return self.num_samples, "samples"
        return len(self), "steps (lanes are chunked by step, so that an edge breaks no lane)"

    @cached_property
    def edges(self) -> Array:
        """`(chunks + 1,)` first position of each chunk, and the end."""
        if self.chunks is None:
            return np.array([0, self._chunked[0]])
        return np.array([0, *(stop for _, stop in self.chunks)])


class Share(NamedTuple):
    """How many steps and samples all ranks together have, out of the samples offered."""

    num_steps: int
    num_offered: int
    num_used: int


class EpochOrder(ABC):
    """The batches of one rank in one epoch, or in the remaining part of one. Thread safe.

    With `Order.draws` the numbers of the draws are what is shuffled, cut into chunks and shared by ranks, and
    `_drawn` turns them into positions at the very end.

    Attributes:
        order: Of the ranks that share the epoch.
        epoch: Number of the epoch.
        first_step: Number of the first batch; 0 for a whole epoch.
        num_batches: One past the number of the last batch, the same on all ranks.
        num_offered: Samples available from `first_step` on, to all ranks together.
        num_used: How many of them are in batches.
        has_small_chunks: Whether a batch may touch more chunks than there are slots.
    """

    has_small_chunks = False

    def __init__(
        self, order: Order, epoch: int, first_step: int = 0, rest: Share | None = None
    ) -> None:
        self.order = order
        self.epoch = epoch
        self.first_step = first_step
        whole = Share(len(order), order.num_offered, order.num_used)
        self._num_steps, self.num_offered, self.num_used = rest or whole
        self.num_batches = first_step + self._num_steps

    def _drawn(self, numbers: Array) -> Array:
        """Return the positions of draws; without draws the numbers are positions."""
        draws = self.order.draws
        if draws is None:
            return numbers
        taken: Array = draws.positions(self.order.seed, self.epoch)[numbers]
        return taken

    def batches(self, start: int | None = None) -> Iterator[PlannedBatch]:
        """Iterate from batch `start` on, without going through the ones before it."""
        return self._batches(self._checked(start))

    def chunk_visits(self, start: int | None = None) -> Sequence[int]:
        """Return the chunks that batches `start` on need, in order, each once."""
        return [visit.chunk for visit in self.visits(start)]

    def visits(self, start: int | None = None) -> Sequence[Visit]:
        """Return these chunks with the part of each that belongs to this rank."""
        start = self._checked(start)
        return self._visits(start) if start < self.num_batches else []

    def digest(self, upto: int | None = None) -> str:
        """Return a digest of the samples of the batches before `upto` (all by default), in order.

        Equal digests mean the same samples in the same order. It does not depend on how they are cut into
        batches, nor on rows without a sample. It begins at `first_step`.
        """
        stop = self._checked(self.num_batches if upto is None else upto)
        state = xxhash.xxh3_128(self.order.samples_digest.encode())
        for positions in self.stream(self.first_step, stop):
            state.update(np.ascontiguousarray(positions, dtype="<i8").data)
        return state.hexdigest()

    @abstractmethod
    def stream(self, start: int, stop: int) -> Iterator[Array]:
        """Yield the positions of batches `start` to `stop` in order, in pieces of any size."""

    @abstractmethod
    def untaken(self, step: int) -> PositionSet:
        """Return what no rank has before batch `step`, including what `drop_last` leaves out: positions, or draws.

        The same on every rank. Costs a permutation of one chunk per rank, or the one of all samples.
        """

    def prepare(self) -> None:
        """Start a thread that computes a long permutation before the first batch needs it."""
        return

    @abstractmethod
    def _batches(self, start: int) -> Iterator[PlannedBatch]: ...

    @abstractmethod
    def _visits(self, start: int) -> Sequence[Visit]: ...

    def _checked(self, step: int | None) -> int:
        step = self.first_step if step is None else step
        if not self.first_step <= step <= self.num_batches:
            raise InputError(
                f"batch {step} of an epoch of {self.num_batches} batches"
                + (f", of which {self.first_step} are behind it." if self.first_step else "."),
                f"{self.first_step} to {self.num_batches}",
                "resume with the state that was saved last",
            )
        return step


def pick_mode(order: str | None, shuffle: bool | None, is_drawn: bool = False) -> Mode:
    """Return the mode for an `order`, a `shuffle` flag, or both where they agree.

    Args:
        order: One of `MODES`; None leaves it to `shuffle`.
        shuffle: True asks for "shuffled"; None has no opinion.
        is_drawn: Whether samples are drawn by weight, which is always shuffled.
    """
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
