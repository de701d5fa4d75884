"""The data on the device, and the indices from which batches are gathered.

Enters: a store's columns, the chunks of a plan, the order of an epoch. Leaves: the ring's tensors, filled ahead of
the consumer by a feeder thread, and `IndexBatch`es into them. Costs: the ring's bytes on the device. Per batch no
more than a view: indices are computed on the host for many batches at once and uploaded in one copy.

Resident data is a ring with one slot. Streamed data has its ring in host memory, and `device` is the CPU.

Contract: one consumer thread. An error of the feeder's or a reader's thread is raised by the next index, with its
cause. A forked child gets new threads (`settle_after_fork`). `close` ends the threads and frees the memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from stoker.loader.arguments import tell_once
from stoker.loader.background import JANITOR
from stoker.loader.batch import IndexBatch, IndexTable
from stoker.loader.columns import Column
from stoker.loader.elastic import Progress
from stoker.loader.planned import EpochOrder, PlannedBatch, Visit
from stoker.loader.ring import Feeder
from stoker.loader.scattered import Loads, ScatteredBatch, ScatteredRing, plan_loads
from stoker.loader.staging import TableUploader, Uploader
from stoker.plan import Plan
from stoker.store.fields import Array
from stoker.store.reader import Store

_BLOCK_SAMPLES, _BLOCK_BATCHES = 1 << 16, 512
"""Most samples and batches whose indices are uploaded together: 512 kB per column. More would delay the host."""

_FIRST_BATCHES, _GROWTH = 2, 8
"""For chunked data: batches in an epoch's first block, and the growth factor of later ones. The device waits for
the first block; it trains on each block while the host computes the next."""


class DeviceData:
    """The ring, the threads that fill it, and the indices of batches in it.

    Args:
        store: Store of the columns.
        columns: Columns to load.
        num_samples: Number of positions.
        chunks: Ranges of positions that are loaded together; None for resident data.
        num_slots: Chunks on the device at the same time.
        device: Device of the ring.
        plan: Gives the number and size of pinned slabs if the ring is on a GPU.
        loads_ahead: Whether the next epoch's first chunks are loaded before the current epoch ends.
        least_rows: Least number of rows of each column in a slot; for batches of scattered samples.

    Attributes:
        ring: The current ring, whose tensors hold the chunks.
        ring_number: Number of the current ring; indices into an earlier ring are invalid.
    """

    def __init__(
        self,
        store: Store,
        columns: Sequence[Column],
        num_samples: int,
        chunks: tuple[tuple[int, int], ...] | None,
        num_slots: int,
        device: torch.device,
        plan: Plan,
        *,
        loads_ahead: bool,
        least_rows: Sequence[int] = (),
    ) -> None:
        self.device = device
        self.is_resident = chunks is None
        whole = ((0, num_samples),)
        self.ring = ScatteredRing(columns, chunks or whole, num_slots, device, least_rows)
        self.ring_number = 0
        self._store = store
        self._plan = plan
        self._loads_ahead = loads_ahead
        self._everything = Visit(0, *whole[0])
        self._tables = TableUploader(device)
        self._feeder: Feeder | None = None
        self._start_in_this_process()

    def _start_in_this_process(self) -> None:
        """Make the uploader. Its threads and the feeder's exist only in the process that started them."""
        self._process = os.getpid()
        JANITOR.start()
        plan, threads, once = self._plan, self._store.threads, self.is_resident
        if self.device.type != "cuda" or plan.tier == "streamed" or not plan.num_slabs:
            self.uploader = Uploader(self.device, threads, once=once)
        else:
            slab_bytes = plan.staging_bytes // plan.num_slabs
            self.uploader = Uploader(
                self.device, threads, slab_bytes, num_slabs=plan.num_slabs, once=once
            )
        self._feeder = None
        # The epoch and batch whose visits the feeder has already, and these visits.
        self._promised: tuple[tuple[int, int], list[Visit]] = ((-1, 0), [])

    def settle_after_fork(self) -> bool:
        """Make new threads in a forked child, which has none of the parent's; return whether this is one."""
        is_child = self._process != os.getpid()
        if is_child:
            if torch.get_num_threads() > 1:
                # OpenMP's threads do not exist here either: the first gather that wants them would wait for ever.
                torch.set_num_threads(1)
                tell_once(
                    "a Loader in a forked process: torch's threads stayed in the parent, so torch.set_num_threads(1) "
                    "was called here; multiprocessing.get_context('spawn') gives a process threads of its own"
                )
            self._start_in_this_process()
        return is_child

    @property
    def has_threads(self) -> bool:
        """Whether the threads are this process's own."""
        return self._process == os.getpid()

    def end_threads(self) -> None:
        """End the threads and unpin the memory; waits for at most one piece of a read."""
        if self.has_threads:
            self._stop_feeder()
            self.uploader.close()
        self._tables.close()

    def close(self) -> None:
        """End the threads and free the device memory."""
        self.end_threads()
        self.ring.tensors.clear()

    # -- indices ---------------------------------------------------------------------------

    def indices(self, progress: Progress) -> Iterator[IndexBatch]:
        """Yield the indices of the current epoch from the current batch on, also if the ring is replaced.

        Does not move the position, so it may be read ahead. The chunks that an index refers to stay on the
        device until the next index is asked for.
        """
        epoch, position = progress.current, progress.batch
        is_stale, begun = True, position
        while is_stale:
            is_stale, ring = False, self.ring
            if not self.is_resident:
                self._store.check_unchanged()  # a replaced file would mix two versions of the data
            feeder, first, loads = self._feed(progress, epoch, position)
            most = _BLOCK_BATCHES if self.is_resident else _FIRST_BATCHES
            for block in _blocks(epoch.batches(position), most):
                needed = (0,) if self.is_resident else loads.needed_by(block[0])
                feeder.release_before(first + needed[0])
                for index in self._index_block(block, feeder, first, loads, needed):
                    yield index
                    if position == begun:  # not earlier: the device waits for the first batch
                        progress.get(epoch.epoch + 1).prepare()
                    position += 1
                    if self.ring is not ring:  # indices computed ahead refer to the old ring
                        is_stale = True
                        break
                if is_stale:
                    break
            else:
                if not self.is_resident:
                    feeder.release_before(feeder.num_visits - len(self._promised[1]))

    def renewed(self, index: IndexBatch, progress: Progress) -> IndexBatch:
        """Return an index for the current ring; loads the batch's chunks again."""
        planned = index.planned
        feeder, first, loads = self._feed(progress, progress.current, planned.step)
        needed = (0,) if self.is_resident else loads.needed_by(planned)
        return next(self._index_block([planned], feeder, first, loads, needed))

    def positions_table(self, progress: Progress) -> torch.Tensor:
        """Return the index of every position, `(rows, positions)` on the device; for resident data."""
        self._feed(progress, progress.get(0), 0)[0].wait(0)
        rows: list[Array] = []
        for number, column in enumerate(self.ring.columns):
            rows.append(column.starts + self.ring.shift(number, 0, 0))
            if not isinstance(column.lengths, int):
                rows.append(column.lengths)
        return torch.from_numpy(np.stack(rows)).to(self.device)

    def _feed(
        self, progress: Progress, epoch: EpochOrder, position: int
    ) -> tuple[Feeder, int, Loads]:
        """Return a feeder, the number of its first visit for this epoch, and the epoch's visits.

        Resident data is loaded once and kept. Otherwise the feeder also gets the next epoch's visits, so that
        its first chunks are loaded while this epoch's last are trained on. A jump to another epoch or batch
        starts a new feeder.
        """
        self.settle_after_fork()
        if self._feeder is not None and self._feeder.failed:
            self._stop_feeder()
        if self.is_resident:
            if self._feeder is None:
                self._start_feeder([self._everything])
            assert self._feeder is not None
            return self._feeder, 0, Loads([self._everything], {0: 0})
        loads = plan_loads(epoch, position, self.ring)
        is_promised = self._promised == ((epoch.epoch, position), loads.visits)
        # After an epoch that was left early, its visits that nobody needs would be loaded first.
        if self._feeder is None or not is_promised or not self._feeder.has_taken(len(loads.visits)):
            self._stop_feeder()
            self._start_feeder(loads.visits)
        assert self._feeder is not None
        first = self._feeder.num_visits - len(loads.visits)
        following = list(progress.get(epoch.epoch + 1).visits()) if self._loads_ahead else []
        self._feeder.extend(following)
        self._promised = ((epoch.epoch + 1, 0), following)
        return self._feeder, first, loads

    def _start_feeder(self, visits: Sequence[Visit]) -> None:
        if self.device.type == "cuda":
            # Copies of the last feeder, gathers out of its slots, and other work with the memory that the
            # ring was given may still be queued. The new feeder copies on another stream, which would not
            # wait for them.
            torch.cuda.synchronize(self.device)
        self._feeder = Feeder(self.ring, self.uploader, visits)
        self._feeder.start()

    def _stop_feeder(self) -> None:
        if self._feeder is not None:
            self._feeder.stop()
        self._feeder = None

    def replace_ring(self, num_slots: int, least_rows: Sequence[int]) -> None:
        """Replace the ring; waits for the device. An iteration continues and loads its chunks again."""
        self.settle_after_fork()
        self._stop_feeder()
        old, self.ring_number = self.ring, self.ring_number + 1
        if self.device.type == "cuda":
            # The new ring may get memory that queued work still uses.
            torch.cuda.synchronize(self.device)
        old.tensors.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.ring = ScatteredRing(old.columns, old.chunks, num_slots, self.device, least_rows)

    def _index_block(
        self,
        block: list[PlannedBatch],
        feeder: Feeder,
        first: int,
        loads: Loads,
        needed: Sequence[int],
    ) -> Iterator[IndexBatch]:
        """Wait for the chunks of many batches, compute their indices on the host, upload them in one copy."""
        slots = [feeder.wait(first + visit) for visit in needed]
        visits = [loads.visits[visit] for visit in needed]
        positions = np.concatenate([batch.positions for batch in block])
        if block[0].reset is not None:
            np.maximum(positions, 0, out=positions)  # lanes that have ended
        host: list[Array] = []
        lengths: dict[str, Array] = {}
        known: dict[tuple[int, int], Array] = {}  # dense fields have the same rows
        for number, column in enumerate(self.ring.columns):
            shift = self._shifts(number, positions, visits, slots)
            if not isinstance(shift, int):
                host.append(column.starts[positions] + shift)
            elif (row := known.get((id(column.starts), shift))) is not None:
                host.append(row)
            else:
                row = positions if column.counts_samples else column.starts[positions]
                row = row + shift if shift else row
                known[id(column.starts), shift] = row
                host.append(row)
            if not isinstance(column.lengths, int):
                lengths[column.field] = column.lengths[positions]
                host.append(lengths[column.field])
        sizes = [len(batch.positions) for batch in block]
        different = host[:1] if all(row is host[0] for row in host) else host
        table = IndexTable(self._tables.upload(different, self.is_resident), sizes, len(host))
        at, totals = 0, {}
        for number, batch in enumerate(block):
            if lengths:
                end = at + sizes[number]
                totals = {name: int(count[at:end].sum()) for name, count in lengths.items()}
                at = end
            yield IndexBatch(table, number, totals, batch, self.ring_number)

    def _shifts(
        self, column: int, positions: Array, visits: Sequence[Visit], slots: Sequence[int]
    ) -> Array | int:
        """Return the shift from row numbers of the store to those of the ring's tensors."""
        if len(slots) == 1 and not isinstance(visits[0], ScatteredBatch):
            return self.ring.shift(column, visits[0].chunk, slots[0])
        shifts = np.zeros(len(positions), dtype=np.int64)
        for visit, slot in zip(visits, slots, strict=True):
            inside = (positions >= visit.start) & (positions < visit.stop)
            shifts[inside] = (
                self.ring.shifts(column, positions[inside], visit, slot)
                if isinstance(visit, ScatteredBatch)
                else self.ring.shift(column, visit.chunk, slot)
            )
        return shifts


def _blocks(batches: Iterator[PlannedBatch], most: int) -> Iterator[list[PlannedBatch]]:
    """Group consecutive batches that touch the same chunks into growing blocks, the first of at most `most`."""
    block: list[PlannedBatch] = []
    samples = 0
    for batch in batches:
        if block and (
            batch.chunks != block[0].chunks
            or len(block) == most
            or samples + len(batch.positions) > _BLOCK_SAMPLES
        ):
            yield block
            block, samples = [], 0
            most = min(_GROWTH * most, _BLOCK_BATCHES)
        block.append(batch)
        samples += len(batch.positions)
    if block:
        yield block
