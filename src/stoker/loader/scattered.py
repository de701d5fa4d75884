"""Batches that touch more chunks than the ring has slots: their rows alone, in a slot of their own.

Enters: the rest of an epoch and a ring. Leaves: what is to be loaded, in order, and where each batch
finds its rows. Costs: nothing for a whole epoch, whose batches never need more chunks than there are
slots. In a rest (`elastic.py`) a chunk can have two samples left, and a batch can need dozens of chunks:
it is then loaded sample by sample, one read for each run of rows. Where all slots are smaller than one
batch, the ring is made larger, to hold just that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stoker.loader.columns import Column
from stoker.loader.elastic import RestEpoch
from stoker.loader.order import EpochOrder, PlannedBatch, Visit
from stoker.loader.ring import Ring
from stoker.loader.staging import Copy, Upload, Uploader
from stoker.store.fields import Array, offsets_of


@dataclass(frozen=True)
class Handful(Visit):
    """Single positions, ascending, from `start` to `stop`; of no one chunk."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Loads:
    """What the batches of an epoch need loaded.

    Attributes:
        visits: In order.
        visit_of: Chunk to its number in `visits`.
        handfuls_of: Batch to the numbers of its handfuls, for those that have some.
    """

    visits: list[Visit] = field(default_factory=list)
    visit_of: dict[int, int] = field(default_factory=dict)
    handfuls_of: dict[int, range] = field(default_factory=dict)

    def needed_by(self, batch: PlannedBatch) -> Sequence[int]:
        """Return the numbers of the visits that hold a batch's rows."""
        return self.handfuls_of.get(batch.step) or [self.visit_of[chunk] for chunk in batch.chunks]


class ScatteredRing(Ring):
    """A ring whose slots hold a chunk, or a handful of samples from anywhere."""

    def load(
        self, visit: Visit, slot: int, uploader: Uploader, when_done: Callable[[Upload], None]
    ) -> Upload:
        """Begin to fill what a rank needs of a slot."""
        if not isinstance(visit, Handful):
            return super().load(visit, slot, uploader, when_done)
        copies: list[Copy] = []
        for column, place in zip(self.columns, self._places, strict=True):
            lows, highs, _ = _runs(column, np.array(visit.positions))
            ats = slot * place.capacity + offsets_of(highs - lows)
            rows = list(zip(lows.tolist(), highs.tolist(), ats[:-1].tolist(), strict=True))
            copies.extend(
                Copy(values, low, high, self.tensors[values.name][at : at + high - low])
                for values in column.values
                for low, high, at in rows
                if low < high
            )
        return uploader.begin(copies, self.used[slot], when_done)

    def can_hold(self, num_rows: Sequence[int]) -> bool:
        """Whether a slot has room for so many rows of each column."""
        return all(
            rows <= place.capacity for rows, place in zip(num_rows, self._places, strict=True)
        )

    def shifts(self, column: int, positions: Array, handful: Handful, slot: int) -> Array:
        """What to add to the rows of these samples of a handful to find them in the tensor."""
        lows, highs, run_of = _runs(self.columns[column], np.array(handful.positions))
        shift = slot * self._places[column].capacity + offsets_of(highs - lows)[:-1] - lows
        return shift[run_of][np.searchsorted(handful.positions, positions)]


def plan_loads(epoch: EpochOrder, start: int, ring: ScatteredRing) -> Loads:
    """Return what the batches from `start` on need loaded."""
    visits, wide = epoch.visits(start), _wide_steps(epoch, start, ring.num_slots)
    if not isinstance(epoch, RestEpoch) or not wide:
        return Loads(list(visits), {visit.chunk: number for number, visit in enumerate(visits)})
    loads, by_chunk = Loads(), {visit.chunk: visit for visit in visits}
    low = start
    for step in [*wide, epoch.num_batches]:
        for chunk in epoch.chunks_between(low, step):
            loads.visit_of[chunk] = len(loads.visits)
            loads.visits.append(by_chunk[chunk])
        if step < epoch.num_batches:
            handfuls = _handfuls(next(epoch.batches(step)), ring)
            first = len(loads.visits)
            loads.handfuls_of[step] = range(first, first + len(handfuls))
            loads.visits.extend(handfuls)
        low = step + 1
    return loads


def rows_for_handfuls(
    epoch: EpochOrder, start: int, columns: Sequence[Column], num_slots: int
) -> list[int]:
    """Return how many rows of each column a slot must hold for the handfuls from `start` on.

    Windows of a handful lie apart, so they can need more rows than those of a chunk: all slots
    together then hold one batch as it is given out.
    """
    most = [0] * len(columns)
    for step in _wide_steps(epoch, start, num_slots):
        positions = np.sort(next(epoch.batches(step)).positions)
        for part in np.array_split(positions, num_slots):
            most = list(map(max, most, _num_rows(columns, part)))
    return most


def _wide_steps(epoch: EpochOrder, start: int, num_slots: int) -> list[int]:
    """Return the batches that touch more chunks than there are slots; only a rest has some."""
    if not isinstance(epoch, RestEpoch):
        return []
    steps: list[int] = (np.flatnonzero(epoch.num_chunks_of(start) > num_slots) + start).tolist()
    return steps


def _handfuls(batch: PlannedBatch, ring: ScatteredRing) -> list[Handful]:
    """Return a batch's samples in as few handfuls as fit into a slot each."""
    positions = np.sort(batch.positions)
    for count in range(1, ring.num_slots + 1):
        parts = np.array_split(positions, count)
        if all(ring.can_hold(_num_rows(ring.columns, part)) for part in parts):
            break
    else:
        raise AssertionError("the ring was made without rows_for_handfuls")
    return [Handful(-1, int(part[0]), int(part[-1]) + 1, tuple(part.tolist())) for part in parts]


def _num_rows(columns: Sequence[Column], positions: Array) -> list[int]:
    """Rows of each column that samples need."""
    runs = (_runs(column, positions) for column in columns)
    return [int((highs - lows).sum()) for lows, highs, _ in runs]


def _runs(column: Column, positions: Array) -> tuple[Array, Array, Array]:
    """Return the runs of rows that positions need, from `lows` to `highs`, and the run of each."""
    starts = column.starts[positions]
    lengths = column.lengths if isinstance(column.lengths, int) else column.lengths[positions]
    by_row = np.argsort(starts, kind="stable")
    lows, highs = starts[by_row], np.maximum.accumulate((starts + lengths)[by_row])
    first = np.append(True, lows[1:] > highs[:-1])
    run_of = np.empty(len(positions), np.int64)
    run_of[by_row] = np.cumsum(first) - 1
    return lows[first], highs[np.append(first[1:], True)], run_of
