"""Which samples every batch of every epoch holds, on every rank; a pure function of (seed, epoch).

Enters: a number of samples, a batch size, a mode, ranks, and the chunks that are loaded together.
Leaves: per epoch the chunks to visit and the batches, from any batch on. Costs: a full shuffle of
10 million samples 0.7 s and 80 MB; in every other mode an epoch costs nothing before its first
batch, and holds the permutation of one chunk at a time. A batch costs about 6 µs. No torch.

A *position* is a place in the loader's list of samples, 0 to n - 1. A *chunk* is a range of
positions that is loaded at once. The *sequence* of an epoch is all positions in the order of their
chunks' visits. Who gets what:

    sequential, time   chunks ascending; rank r has the r-th of `world_size` blocks of the sequence
    shuffled, chunks   chunk order shuffled; rank r has the r-th block of the sequence; shuffled
                       within what a rank has of a chunk, so it reads 1 / world_size of the bytes
    shuffled, resident one permutation of everything; step k of all ranks together is the k-th piece
                       of `batch_size * world_size`: N ranks see what one rank with N times the
                       batch sees
    lanes              rank r has lanes r * batch_size to (r + 1) * batch_size - 1; see `lanes.py`

The rule of the tail: every rank takes the same number of steps, `ceil(n / (batch_size *
world_size))`, and no batch is empty or repeats a sample. Batches are full but the last; where that
would leave a rank nothing for its last step, the batch before gives up samples for it. With
`drop_last` the sequence is cut to whole steps of full batches: its last n % (batch_size *
world_size) samples are left out, other ones in every shuffled epoch.

numpy keeps the bits of its generators for ever, but may change `permutation` between releases: the
digest in a saved state tells, and tests pin it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import xxhash

from stoker.errors import InputError
from stoker.loader.lanes import LanePlan
from stoker.store.fields import Array

Mode = Literal["sequential", "shuffled", "time", "lanes"]
MODES: tuple[Mode, ...] = get_args(Mode)

_CHUNK_ORDER, _WITHIN, _EVERYTHING = range(3)
_PIECE = 1 << 20
"""Positions that a digest takes at once: 8 MB."""

_Take = Callable[[int, int], Array]


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
        reset: Lanes only: `(rows,)` bool, the row begins anew: at a lane's or segment's start, and
            where there is no sample.
    """

    step: int
    positions: Array
    chunks: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    reset: Array | None = None

    @property
    def valid(self) -> Array:
        """`(rows,)` bool: the row holds a sample. False only in lanes that have ended."""
        return self.positions >= 0


@dataclass(frozen=True)
class Visit:
    """What a rank needs of one chunk: positions `start` to `stop`; with lanes, steps."""

    chunk: int
    start: int
    stop: int


@dataclass(frozen=True)
class Order:
    """Everything that decides the batches.

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

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.mode == "lanes" or self.lanes is not None:
            _check_lanes(self)
        _check_steps(self)
        if self.chunks is not None:
            _check_chunks(self.chunks, *self._chunked)

    def __len__(self) -> int:
        """Batches of every epoch, the same on all ranks."""
        step_samples = self.batch_size * self.world_size
        spare = 0 if self.drop_last else step_samples - 1
        return (self._num_offered + spare) // step_samples

    @property
    def num_used(self) -> int:
        """Samples of every epoch over all ranks; fewer than `num_samples` by `drop_last` or lanes."""
        full = len(self) * self.batch_size * self.world_size
        return full if self.drop_last else self._num_offered

    @property
    def reason(self) -> str:
        """The order in words."""
        if self.lanes is not None:
            return self.lanes.reason
        if self.mode == "time":
            return "time order: samples as they stand, nothing is shuffled"
        if self.mode == "sequential":
            return "sequential: samples as they stand"
        if self.chunks is None:
            return "full shuffle: everything is resident"
        largest = int(np.diff(self._edges).max())
        return (
            f"chunk order and order within chunks are shuffled: {len(self.chunks):,} chunks of up "
            f"to {largest:,} samples are loaded one after the other"
        )

    @property
    def most_chunks_per_batch(self) -> int:
        """Chunks that one batch can touch at the worst: the slots that a loader needs at least."""
        if self.chunks is None or self.lanes is not None:
            return 1
        sizes = np.sort(np.diff(self._edges))
        whole = int(np.searchsorted(np.cumsum(sizes), self.batch_size - 2, side="right"))
        return min(len(sizes), self.batch_size, whole + 2)

    def epoch(self, epoch: int) -> EpochOrder:
        """Return the order of one epoch; cheap, nothing is permuted before it is needed."""
        if epoch < 0:
            raise InputError(f"the epoch is {epoch}.", "0 or more", "epoch(0)")
        if self.lanes is not None:
            return _LaneEpoch(self, epoch, self.lanes)
        if self.mode == "shuffled" and self.chunks is None:
            return _DealtEpoch(self, epoch)
        return _BlockEpoch(self, epoch)

    def remaining(self, epoch: int, step: int) -> Array:
        """Return the positions, ascending, that no rank was given in the first `step` batches.

        What `drop_last` leaves out is not among them. The answer is the same on every rank, so
        another number of ranks can go on from here. Costs as much as the rest of the epoch.
        """
        whole = self.epoch(epoch)
        if isinstance(whole, _DealtEpoch):
            return np.sort(whole.undealt(step))
        epochs = (replace(self, rank=rank).epoch(epoch) for rank in range(self.world_size))
        pieces = [piece for each in epochs for piece in each.stream(step, len(self))]
        return np.sort(np.concatenate(pieces)) if pieces else np.empty(0, np.int64)

    @property
    def _num_offered(self) -> int:
        return self.num_samples if self.lanes is None else len(self.lanes.positions)

    @property
    def _chunked(self) -> tuple[int, str]:
        """How many of what the chunks divide."""
        if self.lanes is None:
            return self.num_samples, "samples"
        return len(self), "steps (lanes are chunked by step, so that an edge breaks no lane)"

    @cached_property
    def _edges(self) -> Array:
        """`(chunks + 1,)` first position of each chunk, and the end."""
        if self.chunks is None:
            return np.array([0, self._chunked[0]])
        return np.array([0, *(stop for _, stop in self.chunks)])


class EpochOrder(ABC):
    """The batches of one rank in one epoch. Made by `Order.epoch`; threads may share it."""

    def __init__(self, order: Order, epoch: int) -> None:
        self.order = order
        self.epoch = epoch
        self.num_batches = len(order)

    def batches(self, start: int = 0) -> Iterator[PlannedBatch]:
        """Iterate from batch `start` on, without going through the ones before it."""
        self._check_step(start)
        return self._batches(start)

    def chunk_visits(self, start: int = 0) -> Sequence[int]:
        """Return the chunks that batches `start` on need, in order, each once."""
        return [visit.chunk for visit in self.visits(start)]

    def visits(self, start: int = 0) -> Sequence[Visit]:
        """Return the same with the part of each chunk that belongs to this rank."""
        self._check_step(start)
        return self._visits(start) if start < self.num_batches else []

    def digest(self, upto: int | None = None) -> str:
        """Return a digest of the positions of the first `upto` batches (all by default), in order.

        Equal digests mean the same samples in the same order; how they are cut into batches does
        not matter, nor do rows without a sample.
        """
        stop = self.num_batches if upto is None else upto
        self._check_step(stop)
        state = xxhash.xxh3_128()
        for positions in self.stream(0, stop):
            state.update(np.ascontiguousarray(positions, dtype="<i8").data)
        return state.hexdigest()

    @abstractmethod
    def stream(self, start: int, stop: int) -> Iterator[Array]:
        """Yield the positions of batches `start` to `stop` in order, in pieces of any size."""

    @abstractmethod
    def _batches(self, start: int) -> Iterator[PlannedBatch]: ...

    @abstractmethod
    def _visits(self, start: int) -> Sequence[Visit]: ...

    def _check_step(self, step: int) -> None:
        if not 0 <= step <= self.num_batches:
            raise InputError(
                f"batch {step} of an epoch of {self.num_batches} batches.",
                f"0 to {self.num_batches}",
                "resume with the batch size and number of ranks of the saved state",
            )


class EpochShelf:
    """The epochs in use, so that none is permuted twice, and the next one while this one is trained on."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epochs: dict[int, EpochOrder] = {}

    def get(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch; the last two asked for are kept."""
        found = self._epochs.pop(epoch, None) or self._order.epoch(epoch)
        self._epochs[epoch] = found
        while len(self._epochs) > 2:
            del self._epochs[next(iter(self._epochs))]
        return found

    def prepare(self, epoch: int) -> None:
        """Permute a large epoch in a thread: 0.7 s for 10 million samples that nobody waits for."""
        found = self.get(epoch)
        if isinstance(found, _DealtEpoch) and self._order.num_samples >= _PIECE:
            threading.Thread(target=lambda: found._rows, name="stoker-order", daemon=True).start()


class _BlockEpoch(EpochOrder):
    """A rank has one block of the sequence: parts of chunks, one after the other."""

    def __init__(self, order: Order, epoch: int) -> None:
        super().__init__(order, epoch)
        edges, used, ranks = order._edges, order.num_used, order.world_size
        first, last = used * order.rank // ranks, used * (order.rank + 1) // ranks
        visited = self._chunk_order(len(edges) - 1)
        ends = np.cumsum(np.diff(edges)[visited])
        low, high = np.searchsorted(ends, [first, last - 1], side="right")
        self._chunks = visited[low : high + 1]
        ends = ends[low : high + 1]
        shift = edges[self._chunks + 1] - ends
        self._stops = np.minimum(ends, last) + shift
        self._starts = np.maximum(ends - np.diff(edges)[self._chunks], first) + shift
        self._offsets = np.concatenate([[0], np.cumsum(self._stops - self._starts)])
        self._num_samples = last - first

    def _chunk_order(self, num_chunks: int) -> Array:
        if self.order.mode != "shuffled":
            return np.arange(num_chunks)
        return _permute(num_chunks, self.order.seed, self.epoch, _CHUNK_ORDER)

    def _sample(self, step: int) -> int:
        return _first_of_step(step, self.num_batches, self._num_samples, self.order.batch_size, 1)

    def _part(self, sample: int) -> int:
        return int(np.searchsorted(self._offsets, sample, side="right")) - 1

    def _taker(self, part: int) -> _Take:
        """Return what gives samples i to j of a part; it holds the part's permutation, if any."""
        start = int(self._starts[part])
        if self.order.mode != "shuffled":
            return lambda low, high: np.arange(start + low, start + high)
        count = int(self._stops[part]) - start
        rows = _permute(count, self.order.seed, self.epoch, _WITHIN, int(self._chunks[part]), start)
        rows += start
        return lambda low, high: rows[low:high].copy()

    def _visits(self, start: int) -> Sequence[Visit]:
        first = self._part(self._sample(start))
        columns = (self._chunks[first:], self._starts[first:], self._stops[first:])
        return [Visit(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def _batches(self, start: int) -> Iterator[PlannedBatch]:
        offsets, chunks = self._offsets.tolist(), self._chunks.tolist()
        low = self._sample(start)
        part = self._part(low) - 1
        take: _Take | None = None
        for step in range(start, self.num_batches):
            end = self._sample(step + 1)
            rows: list[Array] = []
            touched: list[int] = []
            while low < end:
                if take is None or low == offsets[part + 1]:
                    part += 1
                    take = self._taker(part)
                high = min(end, offsets[part + 1])
                rows.append(take(low - offsets[part], high - offsets[part]))
                touched.append(chunks[part])
                low = high
            positions = rows[0] if len(rows) == 1 else np.concatenate(rows)
            yield PlannedBatch(step, positions, tuple(touched), tuple(map(len, rows)))

    def stream(self, start: int, stop: int) -> Iterator[Array]:
        low, end = self._sample(start), self._sample(stop)
        part = self._part(low)
        while low < end:
            base, high = int(self._offsets[part]), min(end, int(self._offsets[part + 1]))
            take = self._taker(part)
            for first in range(low, high, _PIECE):
                yield take(first - base, min(first + _PIECE, high) - base)
            low, part = high, part + 1


class _DealtEpoch(EpochOrder):
    """One permutation of everything, dealt to the ranks step by step."""

    def __init__(self, order: Order, epoch: int) -> None:
        super().__init__(order, epoch)
        self._permuting = threading.Lock()

    @property
    def _rows(self) -> Array:
        with self._permuting:  # one of two threads permutes, the other waits for it
            return self._permuted

    @cached_property
    def _permuted(self) -> Array:
        return _permute(self.order.num_samples, self.order.seed, self.epoch, _EVERYTHING)

    def _global(self, step: int) -> int:
        ranks, used = self.order.world_size, self.order.num_used
        return _first_of_step(step, self.num_batches, used, self.order.batch_size * ranks, ranks)

    def _share(self, step: int) -> tuple[int, int]:
        first, last = self._global(step), self._global(step + 1)
        rank, ranks = self.order.rank, self.order.world_size
        count = last - first
        return first + count * rank // ranks, first + count * (rank + 1) // ranks

    def undealt(self, step: int) -> Array:
        """The used part of the permutation after `step` steps, of all ranks."""
        self._check_step(step)
        return self._rows[self._global(step) : self.order.num_used]

    def _visits(self, start: int) -> Sequence[Visit]:  # noqa: ARG002 resident: one for all
        return [Visit(0, 0, self.order.num_samples)]

    def _batches(self, start: int) -> Iterator[PlannedBatch]:
        rows, order, count = self._rows, self.order, self.num_batches
        rank, ranks, used = order.rank, order.world_size, order.num_used
        dealt = order.batch_size * ranks
        first = _first_of_step(start, count, used, dealt, ranks)
        for step in range(start, count):  # as `_share`, without asking for the same twice
            last = _first_of_step(step + 1, count, used, dealt, ranks)
            low = first + (last - first) * rank // ranks
            high = first + (last - first) * (rank + 1) // ranks
            yield PlannedBatch(step, rows[low:high].copy(), (0,), (high - low,))
            first = last

    def stream(self, start: int, stop: int) -> Iterator[Array]:
        if self.order.world_size == 1:
            yield self._rows[self._global(start) : self._global(stop)]
            return
        for step in range(start, stop):
            low, high = self._share(step)
            yield self._rows[low:high]


class _LaneEpoch(EpochOrder):
    """Batch k holds the k-th sample of every lane of the rank."""

    def __init__(self, order: Order, epoch: int, plan: LanePlan) -> None:
        super().__init__(order, epoch)
        starts, lengths = plan.lay_out(order.world_size, order.drop_last)
        own = slice(order.rank * order.batch_size, (order.rank + 1) * order.batch_size)
        self._plan, self._starts, self._lengths = plan, starts[own], lengths[own]

    def _at(self, step: int) -> tuple[Array, Array]:
        """Where the step's samples stand in the plan, and which lanes have one."""
        valid = step < self._lengths
        return np.where(valid, self._starts + step, 0), valid

    def _visits(self, start: int) -> Sequence[Visit]:
        edges = self.order._edges.tolist()
        pairs = enumerate(pairwise(edges))
        return [Visit(chunk, low, high) for chunk, (low, high) in pairs if high > start]

    def _batches(self, start: int) -> Iterator[PlannedBatch]:
        chunk_of = np.searchsorted(self.order._edges, range(start, self.num_batches), "right") - 1
        for step, chunk in zip(range(start, self.num_batches), chunk_of.tolist(), strict=True):
            where, valid = self._at(step)
            positions = np.where(valid, self._plan.positions[where], -1)
            reset = self._plan.begins[where] | ~valid | (step == 0)
            yield PlannedBatch(step, positions, (chunk,), (len(positions),), reset)

    def stream(self, start: int, stop: int) -> Iterator[Array]:
        for step in range(start, stop):
            where, valid = self._at(step)
            yield self._plan.positions[where[valid]]


def pick_mode(order: str | None, shuffle: bool | None) -> Mode:
    """Return the mode for an `order`, a `shuffle` flag, or both where they agree.

    Args:
        order: One of `MODES`; None leaves it to `shuffle`.
        shuffle: True asks for "shuffled"; None has no opinion.
    """
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


def even_chunks(num_samples: int, most: int) -> tuple[tuple[int, int], ...]:
    """Cut 0 to n into the fewest chunks of at most `most`, all of the same size or one less.

    A short last chunk would let one batch touch three chunks, and waste most of a slot.
    """
    if most < 1:
        raise InputError(f"chunks of {most} samples.", "1 or more", "")
    count = -(-num_samples // most)
    edges = [num_samples * number // count for number in range(count + 1)] if count else []
    return tuple(pairwise(edges))


def _permute(count: int, seed: int, *key: int) -> Array:
    """Return a permutation of 0 to count - 1, from the seed and the key alone."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key))
    return np.random.Generator(bits).permutation(count)


def _first_of_step(step: int, num_steps: int, count: int, full: int, least: int) -> int:
    """First of `count` items that a step takes: `full` a step, but `least` are kept for each to come."""
    return min(step * full, count - (num_steps - step) * least)


def _check_numbers(order: Order) -> None:
    if order.mode not in MODES:
        raise InputError(f"the order is {order.mode!r}.", ", ".join(MODES), "order='shuffled'")
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
    if plan.num_samples != order.num_samples:
        raise InputError(
            f"the lanes were planned over {plan.num_samples} samples, the order has "
            f"{order.num_samples}.",
            "one list of samples for both",
            "plan_store_lanes(store, ..., samples=samples) with the loader's samples",
        )


def _check_steps(order: Order) -> None:
    """Every rank must get a sample in every step."""
    offered, step_samples = order._num_offered, order.batch_size * order.world_size
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
            "chunks=even_chunks(num_samples, most=samples_per_chunk)",
        )
