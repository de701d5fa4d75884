"""Scattered batches: those that touch more chunks than the ring has slots.

Enters: the order of an epoch and a ring. Leaves: the visits to load, in order, and which of them each batch
needs. Costs: nothing for a whole epoch, whose batches never touch more chunks than there are slots.

Only the remaining part of an elastic epoch (`elastic.py`) has such batches: a chunk may have two samples
left, and a batch may touch dozens of chunks. Then only the batch's own rows are loaded, with one read for
each run of neighbouring rows. If a batch needs more rows than all slots have, the ring is made that large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stoker.loader.columns import Column
from stoker.loader.epochs import BlockEpoch
from stoker.loader.planned import EpochOrder, PlannedBatch, Visit
from stoker.loader.ring import Ring
from stoker.loader.staging import Copy, Upload, Uploader
from stoker.store.fields import Array, offsets_of


@dataclass(frozen=True)
class ScatteredBatch(Visit):
    """A visit that loads single samples of one batch into a slot, whichever chunks they are in.

    A batch that does not fit into one slot has several of these. `chunk` is -1.

    Attributes:
        positions: Positions of the samples, ascending; `start` and `stop` enclose them.
    """

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Loads:
    """The visits that the batches of an epoch need.

    Attributes:
        visits: Visits in the order of loading.
        visit_of: Number in `visits` by chunk.
        scattered_of: Numbers of the visits of a scattered batch, by its step.
    """

    visits: list[Visit] = field(default_factory=list)
    visit_of: dict[int, int] = field(default_factory=dict)
    scattered_of: dict[int, range] = field(default_factory=dict)

    def needed_by(self, batch: PlannedBatch) -> Sequence[int]:
        """Return the numbers of the visits that hold a batch's rows."""
        return self.scattered_of.get(batch.step) or [self.visit_of[chunk] for chunk in batch.chunks]


class ScatteredRing(Ring):
    """A ring whose slots hold a chunk, or samples of one batch from many chunks."""

    def load(
        self, visit: Visit, slot: int, uploader: Uploader, when_done: Callable[[Upload], None]
    ) -> Upload:
        """See `Ring.load`; the runs of a scattered batch are copied one after another."""
        if not isinstance(visit, ScatteredBatch):
            return super().load(visit, slot, uploader, when_done)
        copies: list[Copy] = []
        for column, layout in zip(self.columns, self._layouts, strict=True):
            lows, highs, _ = _runs(column, np.array(visit.positions))
            ats = slot * layout.capacity + offsets_of(highs - lows)
            rows = list(zip(lows.tolist(), highs.tolist(), ats[:-1].tolist(), strict=True))
            copies.extend(
                Copy(values, low, high, self.tensors[values.name][at : at + high - low])
                for values in column.values
                for low, high, at in rows
                if low < high
            )
        return uploader.begin(copies, self.used[slot], when_done)

    def can_hold(self, num_rows: Sequence[int]) -> bool:
        """Whether a slot has room for this many rows of each column."""
        return all(
            rows <= layout.capacity for rows, layout in zip(num_rows, self._layouts, strict=True)
        )

    def shifts(self, column: int, positions: Array, scattered: ScatteredBatch, slot: int) -> Array:
        """Return what to add to the rows of these samples to find them in the ring's tensor."""
        lows, highs, run_of = _runs(self.columns[column], np.array(scattered.positions))
        shift = slot * self._layouts[column].capacity + offsets_of(highs - lows)[:-1] - lows
        return shift[run_of][np.searchsorted(scattered.positions, positions)]


def plan_loads(epoch: EpochOrder, start: int, ring: ScatteredRing) -> Loads:
    """Return the visits for the batches from `start` on."""
    visits, wide = epoch.visits(start), _wide_steps(epoch, start, ring.num_slots)
    if not isinstance(epoch, BlockEpoch) or not wide:
        return Loads(list(visits), {visit.chunk: number for number, visit in enumerate(visits)})
    loads, by_chunk = Loads(), {visit.chunk: visit for visit in visits}
    low = start
    for step in [*wide, epoch.num_batches]:
        for chunk in epoch.chunks_between(low, step):
            loads.visit_of[chunk] = len(loads.visits)
            loads.visits.append(by_chunk[chunk])
        if step < epoch.num_batches:
            scattered = _scattered_batches(next(epoch.batches(step)), ring)
            first = len(loads.visits)
            loads.scattered_of[step] = range(first, first + len(scattered))
            loads.visits.extend(scattered)
        low = step + 1
    return loads


def rows_for_scattered(
    epoch: EpochOrder, start: int, columns: Sequence[Column], num_slots: int
) -> list[int]:
    """Return how many rows of each column a slot must hold for the scattered batches from `start` on.

    Windows of neighbouring samples share rows; those of scattered samples do not. A scattered batch can
    therefore need more rows than a chunk of as many samples.
    """
    most = [0] * len(columns)
    for step in _wide_steps(epoch, start, num_slots):
        positions = np.sort(next(epoch.batches(step)).positions)
        for part in np.array_split(positions, num_slots):
            most = list(map(max, most, _num_rows(columns, part)))
    return most


def _wide_steps(epoch: EpochOrder, start: int, num_slots: int) -> list[int]:
    """Return the steps whose batches touch more chunks than there are slots; none in an ordinary epoch."""
    if not isinstance(epoch, BlockEpoch) or not epoch.has_small_chunks:
        return []
    steps: list[int] = (np.flatnonzero(epoch.num_chunks_of(start) > num_slots) + start).tolist()
    return steps


def _scattered_batches(batch: PlannedBatch, ring: ScatteredRing) -> list[ScatteredBatch]:
    """Split a batch's samples into as few visits as possible, each small enough for a slot."""
    positions = np.sort(batch.positions)
    for count in range(1, ring.num_slots + 1):
        parts = np.array_split(positions, count)
        if all(ring.can_hold(_num_rows(ring.columns, part)) for part in parts):
            break
    else:
        raise AssertionError("the ring was made without rows_for_scattered")
    return [
        ScatteredBatch(-1, int(part[0]), int(part[-1]) + 1, tuple(part.tolist())) for part in parts
    ]


def _num_rows(columns: Sequence[Column], positions: Array) -> list[int]:
    """Return how many rows of each column these samples need."""
    runs = (_runs(column, positions) for column in columns)
    return [int((highs - lows).sum()) for lows, highs, _ in runs]


def _runs(column: Column, positions: Array) -> tuple[Array, Array, Array]:
    """Return the runs of neighbouring rows that samples need (`lows`, `highs`), and the run of each sample.

    Ranges that touch or overlap become one run, so that no row is read twice.
    """
    starts = column.starts[positions]
    lengths = column.lengths if isinstance(column.lengths, int) else column.lengths[positions]
    by_row = np.argsort(starts, kind="stable")
    lows, highs = starts[by_row], np.maximum.accumulate((starts + lengths)[by_row])
    first = np.append(True, lows[1:] > highs[:-1])
    run_of = np.empty(len(positions), np.int64)
    run_of[by_row] = np.cumsum(first) - 1
    return lows[first], highs[np.append(first[1:], True)], run_of
