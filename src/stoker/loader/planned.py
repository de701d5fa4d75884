"""What an order and its epochs are made of: the facts of the order, a batch, and an epoch without its rules.

Enters: the values of an `Order`. Leaves: arithmetic on them, and the interface of an epoch's batches. Costs nothing.
The rules are in `order.py` (which samples belong to which batch), `epochs.py` (whole epochs) and `elastic.py` (the
remaining part of one).
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
        reset: Lanes only: `(rows,)` bool, the row's state begins anew: at a lane's or segment's start, and
            without a sample.
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
class OrderFacts:
    """The values of an `Order`, and what follows from them alone.

    Attributes:
        num_samples: Positions, 0 to n - 1.
        batch_size: Rows per batch and rank; with lanes, lanes per rank.
        mode: See the text of `order.py`.
        seed: 0 or more; only "shuffled" uses it.
        rank: This process, 0 to `world_size` - 1.
        world_size: Processes that share the epoch.
        drop_last: Leave out what does not fill a batch on every rank.
        chunks: `[start, stop)` of positions, ascending, without holes; None when everything is
            resident. With lanes they are ranges of *steps*: a chunk holds the samples of all of a
            rank's lanes at these steps, so its edge breaks no lane.
        lanes: From `plan_lanes`, for "lanes" only.
        samples_digest: Digest of the samples behind the positions; states of other samples are refused.
        draws: Which samples an epoch holds, some of them several times, for "shuffled" only; None is all, once.
            Batches then share out the numbers of the draws; see `drawing.py`.
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
    def is_dealt(self) -> bool:
        """Whether all ranks share one permutation of all samples."""
        return self.mode == "shuffled" and self.chunks is None

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
        """Return the number of items that the chunks divide, and what they are called."""
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

    With `Order.draws` the numbers of the draws are shuffled, cut into chunks and shared by ranks. `_drawn` turns them
    into positions at the very end.

    Attributes:
        order: Order of the ranks that share the epoch.
        epoch: Number of the epoch.
        first_step: Number of the first batch; 0 for a whole epoch.
        num_batches: One past the number of the last batch, the same on all ranks.
        num_offered: Samples available from `first_step` on, to all ranks together.
        num_used: How many of them are in batches.
        has_small_chunks: Whether a batch may touch more chunks than there are slots.
    """

    has_small_chunks = False

    def __init__(
        self, order: OrderFacts, epoch: int, first_step: int = 0, rest: Share | None = None
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
        """Return the chunks that batches `start` on need, with the part of each that belongs to this rank."""
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
        """Return positions, or draws, that no rank has before batch `step`, including those that `drop_last` omits.

        The same on every rank. Costs a permutation of one chunk per rank, or the one of all samples.
        """

    def prepare(self) -> None:
        """Let another thread compute a long permutation before the first batch needs it."""
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
