"""The three kinds of epoch: blocks of chunks, one permutation of all samples, and lanes; whole or partial.

Enters: an `Order` and the number of an epoch; for a partial epoch also its first step and the remaining
samples. Leaves: the batches of one rank and the chunks that they need. Costs and rules: see `order.py`.
No torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from stoker.loader.background import JANITOR
from stoker.loader.drawing import spread
from stoker.loader.lanes import LanePlan
from stoker.loader.planned import EpochOrder, OrderFacts, PlannedBatch, Share, Visit
from stoker.loader.positions import PositionSet, Subset
from stoker.store.fields import Array, offsets_of

_CHUNK_ORDER, _WITHIN, _EVERYTHING, _REST = range(4)
_PIECE = 1 << 20
"""Positions per call when a digest is computed: 8 MB."""

_LEAST_FOR_THREAD = 1 << 14
"""From this many samples on, another thread permutes the next epoch: here it would take the loop 0.3 ms."""

_Take = Callable[[int, int], Array]


def begin_epoch(order: OrderFacts, epoch: int) -> EpochOrder:
    """Return a whole epoch."""
    if order.lanes is not None:
        return LaneEpoch(order, epoch, order.lanes)
    if order.is_dealt:
        return DealtEpoch(order, epoch, Deck(order, epoch))
    return BlockEpoch(order, epoch)


@dataclass(frozen=True)
class _Block:
    """One rank's block of the sequence: parts of chunks, one after the other.

    `starts` and `stops` are indices into the sequence's list of positions, `offsets` into the block.
    """

    chunks: Array
    starts: Array
    stops: Array

    @cached_property
    def offsets(self) -> Array:
        return offsets_of(self.stops - self.starts)

    def part(self, sample: int) -> int:
        return int(np.searchsorted(self.offsets, sample, side="right")) - 1


class BlockEpoch(EpochOrder):
    """An epoch in which each rank has one block of the sequence: parts of chunks, one after another."""

    def __init__(
        self,
        order: OrderFacts,
        epoch: int,
        first_step: int = 0,
        rest: Share | None = None,
        edges: Array | None = None,
    ) -> None:
        super().__init__(order, epoch, first_step, rest)
        self._edges = order.edges_in(epoch) if edges is None else edges
        self.has_small_chunks = order.draws is not None
        visited = self._chunk_order(len(self._edges) - 1)
        sizes = np.diff(self._edges)[visited]
        self._visited = visited[sizes > 0]
        self._ends = np.cumsum(sizes[sizes > 0])
        self._own = self._block(order.rank)
        self._num_own = int(self._own.offsets[-1])
        small, num_large = divmod(self.num_used, order.world_size)
        self._sizes = ((small, order.world_size - num_large), (small + 1, num_large))

    def _chunk_order(self, num_chunks: int) -> Array:
        if self.order.mode != "shuffled":
            return np.arange(num_chunks)
        return _permute(num_chunks, self.order.seed, self.epoch, _CHUNK_ORDER)

    def _block(self, rank: int) -> _Block:
        ranks = self.order.world_size
        return self._cut(self.num_used * rank // ranks, self.num_used * (rank + 1) // ranks)

    def _cut(self, first: int, last: int) -> _Block:
        """Return samples `first` to `last` of the sequence."""
        low = np.searchsorted(self._ends, first, side="right")
        high = np.searchsorted(self._ends, last, side="left") + 1 if first < last else low
        chunks, ends = self._visited[low:high], self._ends[low:high]
        shift = self._edges[chunks + 1] - ends
        begins = ends - np.diff(self._edges)[chunks]
        return _Block(chunks, np.maximum(begins, first) + shift, np.minimum(ends, last) + shift)

    def _sample(self, step: int, count: int | None = None) -> int:
        """Return the first sample of a step in a block of `count` samples; this rank's block by default."""
        count = self._num_own if count is None else count
        done, batch = step - self.first_step, self.order.batch_size
        return _first_of_step(done, self._num_steps, count, batch, 1)

    def _together(self, step: int) -> int:
        if step < self.num_batches - 2:  # all batches but the last two are full
            return self.order.batch_size * self.order.world_size
        return sum(
            ranks * (self._sample(step + 1, count) - self._sample(step, count))
            for count, ranks in self._sizes
        )

    def _at(self, low: int, high: int) -> Array:
        """Return positions `low` to `high` of the list that the edges divide."""
        return np.arange(low, high)

    def _shuffled(self, start: int, rows: Array) -> Array:
        """Return the positions at `start` + rows of that list; may overwrite the rows."""
        rows += start
        return rows

    def _bounds(self, lows: Array, highs: Array) -> tuple[Array, Array]:
        """Return ranges of positions for ranges of that list."""
        return lows, highs

    def _chosen(self, indices: PositionSet, subsets: Sequence[Subset]) -> PositionSet:
        """Return the positions at ranges of that list, together with subsets of parts of chunks."""
        return PositionSet(indices.starts, indices.stops, tuple(subsets))

    def _key(self, chunk: int, start: int) -> tuple[int, ...]:
        """Return the key that the order within a part of a chunk is drawn from."""
        rest = (_REST, self.first_step) if self.first_step else (_WITHIN,)
        return *rest, chunk, start

    def _taker(self, block: _Block, part: int) -> _Take:
        """Return a function that gives samples i to j of a part; it keeps the part's permutation, if any."""
        start = int(block.starts[part])
        if self.order.mode != "shuffled":
            return lambda low, high: self._at(start + low, start + high)
        count, key = int(block.stops[part]) - start, self._key(int(block.chunks[part]), start)
        rows = self._shuffled(start, _permute(count, self.order.seed, self.epoch, *key))
        return lambda low, high: rows[low:high].copy()

    def _visits(self, start: int) -> Sequence[Visit]:
        own, first = self._own, self._own.part(self._sample(start))
        chunks, edges = own.chunks[first:], self.order.edges_in(self.epoch)
        starts, stops = self._bounds(own.starts[first:], own.stops[first:])
        starts = np.maximum(starts, edges[chunks])
        stops = np.minimum(stops, edges[chunks + 1])
        columns = chunks, self._drawn(starts), self._drawn(stops - 1) + 1
        return [Visit(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def num_chunks_of(self, start: int) -> Array:
        """Return how many chunks each batch from `start` on touches."""
        samples = np.array([self._sample(step) for step in range(start, self.num_batches + 1)])
        first = np.searchsorted(self._own.offsets, samples[:-1], side="right")
        last = np.searchsorted(self._own.offsets, samples[1:], side="left")
        return last - first + 1

    def chunks_between(self, start: int, stop: int) -> list[int]:
        """Return the chunks that batches `start` to `stop` touch, in order."""
        if start >= stop:
            return []
        first, last = self._own.part(self._sample(start)), self._own.part(self._sample(stop) - 1)
        chunks: list[int] = self._own.chunks[first : last + 1].tolist()
        return chunks

    def _batches(self, start: int) -> Iterator[PlannedBatch]:
        offsets, chunks = self._own.offsets.tolist(), self._own.chunks.tolist()
        low = self._sample(start)
        part = self._own.part(low) - 1
        take: _Take | None = None
        for step in range(start, self.num_batches):
            end = self._sample(step + 1)
            rows: list[Array] = []
            touched: list[int] = []
            while low < end:
                if take is None or low == offsets[part + 1]:
                    part += 1
                    take = self._taker(self._own, part)
                high = min(end, offsets[part + 1])
                rows.append(take(low - offsets[part], high - offsets[part]))
                touched.append(chunks[part])
                low = high
            positions = self._drawn(rows[0] if len(rows) == 1 else np.concatenate(rows))
            counts = tuple(map(len, rows))
            yield PlannedBatch(step, positions, tuple(touched), counts, self._together(step))

    def stream(self, start: int, stop: int) -> Iterator[Array]:
        """See `EpochOrder.stream`."""
        low, end = self._sample(start), self._sample(stop)
        part = self._own.part(low)
        while low < end:
            base, high = int(self._own.offsets[part]), min(end, int(self._own.offsets[part + 1]))
            take = self._taker(self._own, part)
            for first in range(low, high, _PIECE):
                yield self._drawn(take(first - base, min(first + _PIECE, high) - base))
            low, part = high, part + 1

    def untaken(self, step: int) -> PositionSet:
        """See `EpochOrder.untaken`. Whole parts are ranges; one part of each rank is a set of positions."""
        self._checked(step)
        over = self._cut(self.num_used, self.num_offered)
        starts, stops, halves = [over.starts], [over.stops], []
        for rank in range(self.order.world_size):
            block = self._block(rank)
            low = self._sample(step, int(block.offsets[-1]))
            part = block.part(low)
            if part < len(block.chunks) and low > block.offsets[part]:
                halves.append(self._second_half(block, part, low))
                part += 1
            starts.append(block.starts[part:])
            stops.append(block.stops[part:])
        whole = PositionSet.of(starts=np.concatenate(starts), stops=np.concatenate(stops))
        return self._chosen(whole, halves)

    def _second_half(self, block: _Block, part: int, sample: int) -> Subset:
        """Return the samples of a part from a given one on; permuted when they are first used."""
        base, end = (int(each) for each in block.offsets[part : part + 2])
        starts, stops = self._bounds(block.starts[part : part + 1], block.stops[part : part + 1])

        def members() -> Array:
            return np.sort(self._taker(block, part)(sample - base, end - base))

        return Subset(int(starts[0]), int(stops[0]), end - sample, members)


class Deck:
    """One permutation of an epoch's positions or draws, or of the remaining ones; computed when first needed.

    Thread safe: one thread permutes, the others wait.
    """

    def __init__(
        self, order: OrderFacts, epoch: int, step: int = 0, left: PositionSet | None = None
    ) -> None:
        self._order, self._epoch, self._left = order, epoch, left
        self._key = (epoch, _REST, step) if step else (epoch, _EVERYTHING)
        self._permuting = threading.Lock()
        self._rows: Array | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is the permutation of the whole epoch."""
        return self._left is None

    @property
    def rows(self) -> Array:
        """The permuted positions, or draws."""
        with self._permuting:
            if self._rows is None:
                order, draws, left = self._order, self._order.draws, self._left
                count = order.num_offered if left is None else len(left)
                rows = _permute(count, order.seed, *self._key)
                if left is not None:
                    rows = left.positions()[rows]
                if draws is not None and draws.per_batch and draws.strata is not None:
                    drawn = draws.positions(order.seed, self._epoch)[rows]
                    rows = spread(rows, draws.strata[drawn], _generator(order.seed, *self._key, 1))
                self._rows = rows
            return self._rows

    @cached_property
    def positions(self) -> Array:
        """The permuted positions; with draws, the positions that were drawn."""
        rows, order = self.rows, self._order
        if order.draws is None:
            return rows
        drawn: Array = order.draws.positions(order.seed, self._epoch)[rows]
        return drawn


class DealtEpoch(EpochOrder):
    """An epoch of one permutation, which the ranks share step by step, from index `begin` on."""

    def __init__(
        self,
        order: OrderFacts,
        epoch: int,
        deck: Deck,
        begin: int = 0,
        first_step: int = 0,
        rest: Share | None = None,
    ) -> None:
        super().__init__(order, epoch, first_step, rest)
        self.deck = deck
        self.begin = begin

    def dealt(self, step: int) -> int:
        """Return how many positions of the permutation come before a step."""
        ranks, batch = self.order.world_size, self.order.batch_size
        done = step - self.first_step
        return self.begin + _first_of_step(
            done, self._num_steps, self.num_used, batch * ranks, ranks
        )

    def prepare(self) -> None:
        """Draw and permute in a thread, if that takes long."""
        if self.num_offered >= _LEAST_FOR_THREAD:
            JANITOR.hand_over(lambda: self.deck.positions)

    def _share(self, step: int) -> tuple[int, int]:
        first, last = self.dealt(step), self.dealt(step + 1)
        rank, ranks = self.order.rank, self.order.world_size
        count = last - first
        return first + count * rank // ranks, first + count * (rank + 1) // ranks

    def untaken(self, step: int) -> PositionSet:
        """See `EpochOrder.untaken`. These are the rest of the deck, sorted."""
        first = self.dealt(self._checked(step))
        return PositionSet.of(self.deck.rows[first : self.begin + self.num_offered])

    def _visits(self, start: int) -> Sequence[Visit]:  # noqa: ARG002 resident: one for all
        return [Visit(0, 0, self.order.num_samples)]

    def _batches(self, start: int) -> Iterator[PlannedBatch]:
        rows, rank, ranks = self.deck.positions, self.order.rank, self.order.world_size
        full = self.order.batch_size * ranks
        first = self.dealt(start)
        for step in range(start, self.num_batches):
            # As `_share`, but cheaper: all steps except the last two are full.
            last = first + full if step < self.num_batches - 2 else self.dealt(step + 1)
            together = last - first
            low, high = first + together * rank // ranks, first + together * (rank + 1) // ranks
            yield PlannedBatch(step, rows[low:high].copy(), (0,), (high - low,), together)
            first = last

    def stream(self, start: int, stop: int) -> Iterator[Array]:
        """See `EpochOrder.stream`."""
        rows = self.deck.positions
        if self.order.world_size == 1:
            yield rows[self.dealt(start) : self.dealt(stop)]
            return
        for step in range(start, stop):
            low, high = self._share(step)
            yield rows[low:high]


class LaneEpoch(EpochOrder):
    """Batch k holds the k-th sample of every lane of the rank.

    Args:
        order: Order with as many lanes as the plan.
        epoch: Number of the epoch.
        plan: The lanes.
        layout_ranks: Number of ranks that the lanes were laid out for; those of the order by default.
        first_step: First step of a partial epoch.
    """

    def __init__(
        self,
        order: OrderFacts,
        epoch: int,
        plan: LanePlan,
        layout_ranks: int | None = None,
        first_step: int = 0,
    ) -> None:
        self.layout_ranks = layout_ranks or order.world_size
        self._plan = plan
        self._all_starts, self._all_lengths = plan.lay_out(self.layout_ranks, order.drop_last)
        rest: Share | None = None
        if first_step or self.layout_ranks != order.world_size:
            longest = self._all_lengths.reshape(order.world_size, order.batch_size).max(axis=1)
            steps = max(
                0, int(longest.min()) - first_step
            )  # every rank needs a sample in every step
            left = np.maximum(self._all_lengths - first_step, 0)
            rest = Share(steps, int(left.sum()), int(np.minimum(left, steps).sum()))
        super().__init__(order, epoch, first_step, rest)
        own = slice(order.rank * order.batch_size, (order.rank + 1) * order.batch_size)
        self._starts, self._lengths = self._all_starts[own], self._all_lengths[own]
        self._shortest = int(self._all_lengths.min())

    def _at(self, step: int) -> tuple[Array, Array]:
        """Return the indices of a step's samples in the plan, and which lanes have one."""
        valid = step < self._lengths
        return np.where(valid, self._starts + step, 0), valid

    def _together(self, step: int) -> int:
        if step < self._shortest:
            return len(self._all_lengths)
        return int((self._all_lengths > step).sum())

    def untaken(self, step: int) -> PositionSet:
        """See `EpochOrder.untaken`. These are the rest of every lane."""
        gone = np.minimum(self._checked(step), self._all_lengths)
        tiles = PositionSet.of(
            starts=self._all_starts + gone, stops=self._all_starts + self._all_lengths
        )
        return PositionSet.of(self._plan.positions[tiles.positions()])

    def _visits(self, start: int) -> Sequence[Visit]:
        pairs = enumerate(pairwise(self.order.edges.tolist()))
        return [
            Visit(chunk, low, high)
            for chunk, (low, high) in pairs
            if high > start and low < self.num_batches
        ]

    def _batches(self, start: int) -> Iterator[PlannedBatch]:
        steps = range(start, self.num_batches)
        chunk_of = np.searchsorted(self.order.edges, steps, "right") - 1
        for step, chunk in zip(steps, chunk_of.tolist(), strict=True):
            where, valid = self._at(step)
            positions = np.where(valid, self._plan.positions[where], -1)
            reset = self._plan.begins[where] | ~valid | (step == 0)
            together = self._together(step)
            yield PlannedBatch(step, positions, (chunk,), (len(positions),), together, reset)

    def stream(self, start: int, stop: int) -> Iterator[Array]:
        """See `EpochOrder.stream`."""
        for step in range(start, stop):
            where, valid = self._at(step)
            yield self._plan.positions[where[valid]]


def _permute(count: int, seed: int, *key: int) -> Array:
    """Return a permutation of 0 to count - 1, which depends on the seed and the key only."""
    return _generator(seed, *key).permutation(count)


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def _first_of_step(step: int, num_steps: int, count: int, full: int, least: int) -> int:
    """Return the first item of a step: `full` items per step, but `least` of the `count` remain for each later step."""
    return min(step * full, count - (num_steps - step) * least)
