"""The Loader: batches that are already on the device, in an order you can repeat, resume and check.

Enters: a store, a batch size, a device, an order. Leaves: `Batch`es, assembled on the device from an
index tensor. Costs: the plan's bytes on the device (its reserve holds up to 4 MB of coming batches); per batch
one gather per large field. Indices and small fields (`small_fields.py`) are made for many batches at once.

Contract: every sample comes once per epoch. The order depends on (seed, epoch) alone. A state resumes at any
batch. Device memory stays within the plan while the consumer holds a batch. An error in a background thread
is raised by the next batch, with its cause. The CPU gives the same batches as the GPU. No copy can overwrite
a batch (`ring.py`, `staging.py`). `close` ends all threads. One iteration at a time, in one thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch

from stoker.display import table_html
from stoker.errors import InputError
from stoker.loader.background import JANITOR
from stoker.loader.batch import Batch, IndexBatch, IndexTable
from stoker.loader.columns import check_samples, column_facts, digest_samples, make_columns
from stoker.loader.elastic import Cut, ElasticEpoch, ResumePoint, find_resume_point, save_state
from stoker.loader.gather import Assembler, Augments, check_ids
from stoker.loader.lanes import LanePlan
from stoker.loader.order import (
    EpochOrder,
    EpochShelf,
    Mode,
    Order,
    PlannedBatch,
    Visit,
)
from stoker.loader.prefetch import prefetch
from stoker.loader.ring import Feeder, superseded
from stoker.loader.scattered import (
    Loads,
    ScatteredBatch,
    ScatteredRing,
    plan_loads,
    rows_for_scattered,
)
from stoker.loader.slabs import usable_device
from stoker.loader.staging import TableUploader, Uploader
from stoker.loader.straight import BLOCK_BYTES, StraightReader, can_read_straight
from stoker.plan import Plan, Tier, make_plan
from stoker.plan.facts import even_chunks
from stoker.store.fields import Array
from stoker.store.reader import Store, open_store
from stoker.units import format_bytes, whole_number

_BLOCK_SAMPLES, _BLOCK_BATCHES = 1 << 15, 256
"""Most samples and batches whose indices are uploaded together: 256 kB per column. More would delay the host."""

_FIRST_BATCHES, _GROWTH = 2, 8
"""Batches of an epoch's first block, and by how much each later block is longer. The device waits for the
first block; it trains on each block while the host computes the next."""


_T = TypeVar("_T")


class Loader:
    """Iterate for batches on `device`; see the module's text for the contract.

    One iteration is for one CUDA stream: that which is current when a batch is asked for.

    Args:
        store: An open store, a store folder or a plain HDF5 file.
        batch_size: Samples per batch and rank.
        device: Where batches are wanted; the first GPU by default, else the CPU.
        order: "sequential", "shuffled", "time" or "lanes".
        seed: Of the shuffle; the order is a function of (seed, epoch).
        plan: From `make_plan`; made from the free memory when None.
        fields: Fields to load; all but text by default.
        samples: Samples to load, rising; all by default. `select_samples` gives those of a split.
        drop_last: Leave out the epoch's last, short batch.
        rank: This process's number.
        world_size: Number of processes.
        data_bytes: Device memory for data, all chunks together; the plan's share when None.
        chunk_bytes: Size of one chunk instead, `num_slots` of which are on the device.
        num_slots: Chunks on the device at once, with `chunk_bytes`.
        lanes: From `plan_lanes`, for `order="lanes"`.
        augment: Applied to `images` (and `masks`, where they are loaded) while they are gathered, without
            a copy between. It draws from (its seed, epoch, batch), so a resumed epoch continues with the
            same draws. For validation: `augmentation.validation()`.

    Attributes:
        on_iteration: Called with the iterator over batches, or indices, of every iteration; what it returns
            is iterated instead. For measuring the consumer, or ending an epoch early.
    """

    on_iteration: Callable[[Iterable[Any]], Iterable[Any]] | None = None
    # Seconds of finished waits, and the start of the current one. One tuple, so that another thread never
    # reads one number before a change and the other after it.
    _waits: tuple[float, float | None] = (0.0, None)

    def __init__(
        self,
        store: Store | str | Path,
        batch_size: int,
        device: str | torch.device | None = None,
        *,
        order: Mode = "sequential",
        seed: int = 0,
        plan: Plan | None = None,
        fields: Sequence[str] | None = None,
        samples: Array | None = None,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        data_bytes: int | None = None,
        chunk_bytes: int | None = None,
        num_slots: int = 3,
        lanes: LanePlan | None = None,
        augment: Augments | None = None,
    ) -> None:
        self._options = {
            "order": order, "seed": seed, "fields": fields, "samples": samples, "lanes": lanes,
            "drop_last": drop_last, "rank": rank, "world_size": world_size, "augment": augment,
        }  # fmt: skip
        JANITOR.start()
        self._closed = False
        self._owns_store = not isinstance(store, Store)
        self.store = store if isinstance(store, Store) else open_store(store)
        self.device = pick_device(device)
        batch_size, seed, rank, world_size, num_slots = (
            whole_number(name, value)
            for name, value in (
                ("batch_size", batch_size),
                ("seed", seed),
                ("rank", rank),
                ("world_size", world_size),
                ("num_slots", num_slots),
            )
        )
        self.samples = check_samples(samples, self.store)
        self.columns = make_columns(self.store, fields, self.samples)
        self.plan = self._take_plan(plan, batch_size, data_bytes, chunk_bytes, num_slots)
        # Streamed batches are assembled in host memory by the same code, then copied to the device.
        local = self.plan.host or self.plan
        streamed = self.plan.tier == "streamed"
        self._home = torch.device("cpu") if streamed else self.device
        chunks, reason = self._choose_chunks(local, lanes)
        self.tier: Tier = "streamed" if streamed else "resident" if chunks is None else "chunked"
        self._resident = chunks is None
        self._order = Order(
            len(self.samples),
            batch_size,
            order,
            seed,
            rank,
            world_size,
            bool(drop_last),
            chunks,
            lanes,
            digest_samples(self.samples),
        )
        self.reason = f"{reason}; {self._order.reason}"
        self._epochs = EpochShelf(self._order)
        self._process = os.getpid()
        self._ended: tuple[int, EpochOrder | None] | None = None
        self._cuts: tuple[Cut, ...] = ()
        self._turn: object = None
        self._taken_in: object = None  # the turn that took an epoch's last batch
        self.batch_size = batch_size
        self._uploader = self._make_uploader(once=chunks is None)
        self._tables = TableUploader(self._home)
        whole = ((0, len(self.samples)),)
        num_slots = 1 if chunks is None else max(local.num_slots, self._order.most_chunks_per_batch)
        self._ring = ScatteredRing(self.columns, chunks or whole, num_slots, self._home)
        self.ring_number = 0
        check_ids(augment, self.tier)
        self.augment = augment
        self._assembler = Assembler(self.columns, self._ring.tensors, augment)
        ordered = self._home.type == "cpu" and not self._resident
        self._straight = (
            StraightReader(self.columns, min(BLOCK_BYTES, self._ring.num_bytes // (2 * num_slots)))
            if ordered and can_read_straight(self.columns, order)
            else None
        )
        self._feeder: Feeder | None = None
        self._promised: tuple[tuple[int, int], list[Visit]] = ((-1, 0), [])
        self._table: torch.Tensor | None = None
        self.epoch = 0
        self._position = 0

    # -- what it is ------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on all ranks."""
        return len(self._order)

    def __repr__(self) -> str:
        return f"Loader({', '.join(f'{name} {value}' for name, value in self._summary())})"

    def _repr_html_(self) -> str:
        return table_html("Loader", self._summary())

    def _summary(self) -> list[tuple[str, str]]:
        return [
            ("store", repr(self.store.name)),
            ("samples", f"{len(self.samples):,}"),
            ("batches", f"{len(self):,} of {self.batch_size} on {self.device}"),
            ("fields", "+".join(column.field for column in self.columns)),
            ("order", self._order.mode),
            ("data", f"{self.tier}, {format_bytes(self.device_bytes)}"),
            ("at", f"epoch {self.epoch}, batch {self._position}"),
        ]

    @property
    def num_batches(self) -> int:
        """Batches of the current epoch: `len`, unless other ranks or another batch size began it."""
        return self._epochs.get(self.epoch).num_batches

    @property
    def world_size(self) -> int:
        """Ranks that share the samples."""
        return self._order.world_size

    @property
    def walks_in_lanes(self) -> bool:
        """Whether row i of a batch continues row i of the one before; see `Batch.reset`."""
        return self._order.lanes is not None

    @property
    def device_bytes(self) -> int:
        """Bytes of data on the device, batches not counted."""
        return 0 if self.tier == "streamed" else self._ring.num_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments and the position: a spawned process opens the store itself.

        The plan is included, so that both processes have the same chunks and therefore the same order.
        """
        self._check_open()
        options = self._options | {"plan": self.plan}
        return _reopened, (self.store, self.batch_size, self.device, options, self.state_dict())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and free the memory; the loader cannot be used afterwards. May be called twice."""
        self._closed = True
        if self._process == os.getpid():
            self._stop_feeder()
            self._uploader.close()
        self._tables.close()
        self._ring.tensors.clear()
        self._assembler.close()
        if self._straight is not None:
            self._straight.close()
        if self._owns_store:
            self.store.close()

    def __del__(self) -> None:
        """End the threads of a loader that nobody refers to: they would keep the ring's memory.

        Another thread waits for them, because the garbage collector may run in one of them.
        """
        with contextlib.suppress(AttributeError):  # the constructor may have failed early
            if not self._closed and self._process == os.getpid():
                parts = self._feeder, self._uploader, self._tables
                JANITOR.hand_over(partial(_end_threads, *parts))

    def _settle_after_fork(self) -> None:
        """Make new threads in a forked child, where the parent's do not exist."""
        if self._process != os.getpid():
            self._process = os.getpid()
            JANITOR.start()
            self._uploader = self._make_uploader(once=self._resident)
            self._feeder, self._promised = None, ((-1, 0), [])
            self._epochs = self._epochs.renewed()

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(
                "the loader is closed.", "an open loader", "make a new Loader over the same store"
            )

    def _take_plan(
        self,
        given: Plan | None,
        batch_size: int,
        data_bytes: int | None,
        chunk_bytes: int | None,
        num_slots: int,
    ) -> Plan:
        """Return the given plan, or make one for the memory that is free now."""
        if num_slots < 1:
            raise InputError(f"num_slots is {num_slots}.", "1 or more", "num_slots=3")
        sizes = {"data_bytes": data_bytes, "chunk_bytes": chunk_bytes}
        told: dict[str, Any] = {
            name: whole_number(name, size) for name, size in sizes.items() if size is not None
        }
        if given is not None:
            if not isinstance(given, Plan):
                raise InputError(f"plan is {given!r}.", "a Plan", "leave plan out")
            if told:
                raise InputError(
                    f"a plan and {' and '.join(told)} were given.",
                    "one of them",
                    f"leave {next(iter(told))} out",
                )
            return given
        from stoker.machine import probe

        cuda = self.device.type == "cuda"
        return make_plan(
            column_facts(self.store, self.columns, len(self.samples)),
            gpu_memory_bytes=torch.cuda.mem_get_info(self.device)[0] if cuda else None,
            ram_bytes=probe(self.store.path).ram_available_bytes or 8 << 30,
            batch_size=batch_size,
            threads=self.store.threads,
            num_slots=num_slots if chunk_bytes is not None else 3,
            **told,
        )

    def _choose_chunks(
        self, plan: Plan, lanes: LanePlan | None
    ) -> tuple[tuple[tuple[int, int], ...] | None, str]:
        """Return the chunks, or None for resident data, and the reason."""
        reason = self.plan.reasons[0]
        if lanes is not None:
            if self.plan.tier != "resident":
                raise InputError(
                    f"lanes walk through the whole series at once, which must be resident; {reason}.",
                    "series that fit",
                    "order='time', lanes=None, which loads chunks; or fewer fields or samples",
                )
            return None, "resident: lanes walk through the whole series at once"
        if plan.chunk_rows is None:
            return None, reason
        # A plan for all samples may be given to a loader over a part of them.
        chunks = even_chunks(len(self.samples), max(1, plan.chunk_rows))
        return (chunks, reason) if len(chunks) > 1 else (None, reason)

    def _make_uploader(self, *, once: bool) -> Uploader:
        """Make an uploader with the staging of the plan."""
        plan, threads = self.plan, self.store.threads
        if self._home.type != "cuda" or plan.tier == "streamed" or not plan.num_slabs:
            return Uploader(self._home, threads, once=once)
        slab_bytes = plan.staging_bytes // plan.num_slabs
        return Uploader(self._home, threads, slab_bytes, num_slabs=plan.num_slabs, once=once)

    # -- iteration -------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the current epoch; the next iteration begins the next epoch.

        A loader has one position, so a new iteration ends the one before it.
        """
        self._begin_turn()
        if self.tier == "streamed":
            with prefetch(self._host_batches(), self.device) as batches:
                yield from self._hand_out(batches)
        elif self._reads_straight:
            yield from self._hand_out(self._host_batches())
        else:
            yield from self._moving(map(self.assemble, self._indices(self.epoch, self._position)))

    @property
    def _reads_straight(self) -> bool:
        """Whether this epoch's batches are ranges of rows; those of an elastic epoch have holes."""
        is_elastic = isinstance(self._epochs.get(self.epoch), ElasticEpoch)
        return self._straight is not None and not is_elastic

    def _finish(self, batch: Batch, planned: PlannedBatch) -> Batch:
        batch.step = planned.step
        batch.positions, batch._samples = planned.positions, self.samples
        batch._num_together = planned.num_together
        if planned.reset is not None:
            batch.reset = torch.from_numpy(planned.reset).to(self.device, non_blocking=True)
            batch.valid = torch.from_numpy(planned.positions >= 0).to(
                self.device, non_blocking=True
            )
        return batch

    def _host_batches(self) -> Iterator[tuple[PlannedBatch, dict[str, torch.Tensor]]]:
        """Yield the remaining batches in host memory; does not move the position, so it may be read ahead."""
        if self._straight is not None and self._reads_straight:
            self.store.check_unchanged()
            planned = self._epochs.get(self.epoch).batches(self._position)
            yield from self._straight.read(planned)
            return
        for index in self._indices(self.epoch, self._position):
            yield index.planned, self._assembler.gather(index, index.totals)

    def _hand_out(
        self, batches: Iterable[tuple[PlannedBatch, dict[str, torch.Tensor]]]
    ) -> Iterator[Batch]:
        yield from self._moving(
            self._finish(Batch(self._assembler.augment(tensors)), planned)
            for planned, tensors in batches
        )

    def index_batches(self) -> Iterator[IndexBatch]:
        """Yield the indices of the remaining batches, for `assemble`; moves the position.

        The chunks that an index refers to stay on the device until the next index is asked for.
        """
        self._begin_turn()
        yield from self._moving(self._indices(self.epoch, self._position))

    def _begin_turn(self) -> None:
        """Prepare a new iteration.

        The one before may have taken the last batch without asking for another, so that its generator never
        reached its end: the epoch is advanced here.
        """
        self._check_open()
        self._settle_after_fork()
        if self._taken_in is not None and self._taken_in is self._turn:
            self._begin_next_epoch()
        self._seek_augment()

    def _begin_next_epoch(self) -> None:
        ended = self.epoch, self._epochs.begun(self.epoch)
        self._go_to(ResumePoint(self.epoch + 1, 0))
        self._ended, self._taken_in = ended, None

    def _moving(self, batches: Iterable[_T]) -> Iterator[_T]:
        """Move the position with every batch; raise if a newer iteration has begun.

        A batch that could not be built does not move the position: a new iteration begins with it.
        """
        self._turn = turn = object()
        num_batches = self.num_batches
        wrapped = batches if self.on_iteration is None else self.on_iteration(batches)
        for batch in self._timed(wrapped):
            self._check_open()
            if self._turn is not turn:
                raise superseded()
            self._position += 1
            if self._position == num_batches:
                self._taken_in = turn
            yield batch
        if self._turn is turn:
            self._begin_next_epoch()

    @property
    def waited_seconds(self) -> float:
        """Total seconds that callers waited for batches, including a wait in progress; thread safe."""
        finished, since = self._waits
        return finished if since is None else finished + time.perf_counter() - since

    def _timed(self, batches: Iterable[_T]) -> Iterator[_T]:
        source = iter(batches)
        while True:
            self._waits = (self._waits[0], time.perf_counter())
            batch = next(source, None)
            self._waits = (self.waited_seconds, None)
            if batch is None:
                return
            yield batch

    def _indices(self, number: int, position: int) -> Iterator[IndexBatch]:
        """Yield the indices of epoch `number` from batch `position` on, also if the ring is replaced."""
        is_stale = True
        while is_stale:
            is_stale, ring = False, self._ring
            for index in self._ring_indices(number, position):
                yield index
                position += 1
                if self._ring is not ring:  # indices that were computed ahead refer to the old ring
                    is_stale = True
                    break

    def _ring_indices(self, number: int, position: int) -> Iterator[IndexBatch]:
        epoch = self._epochs.get(number)
        if not self._resident:
            self.store.check_unchanged()  # a file that was replaced would mix two versions of the data
        feeder, first, loads = self._feed(epoch, position)
        for block_number, block in enumerate(self._blocks(epoch.batches(position))):
            needed = self._needed(loads, block[0])
            feeder.release_before(first + needed[0])
            slots = [feeder.wait(first + visit) for visit in needed]
            yield from self._index_block(block, [loads.visits[visit] for visit in needed], slots)
            if block_number == 0:  # not earlier: the device waits for the first batch
                self._epochs.prepare(number + 1)
        if not self._resident:
            feeder.release_before(feeder.num_visits - len(self._promised[1]))

    def _needed(self, loads: Loads, batch: PlannedBatch) -> Sequence[int]:
        return (0,) if self._resident else loads.needed_by(batch)

    def _feed(self, epoch: EpochOrder, position: int) -> tuple[Feeder, int, Loads]:
        """Return a feeder, the number of its first visit for this epoch, and the epoch's visits.

        Resident data is loaded once and kept. Otherwise the feeder also gets the next epoch's visits, so that
        its first chunks are loaded while this epoch's last are trained on. A jump to another epoch or batch
        starts a new feeder.
        """
        self._settle_after_fork()
        if self._feeder is not None and self._feeder.failed:
            self._stop_feeder()
        if self._resident:
            everything: Visit = Visit(0, 0, len(self.samples))
            if self._feeder is None:
                self._start_feeder([everything])
            assert self._feeder is not None
            return self._feeder, 0, Loads([everything], {0: 0})
        loads = plan_loads(epoch, position, self._ring)
        is_promised = self._promised == ((epoch.epoch, position), loads.visits)
        # An epoch that was left early has visits that nobody waits for: they would be read first.
        if self._feeder is None or not is_promised or not self._feeder.has_taken(len(loads.visits)):
            self._stop_feeder()
            self._start_feeder(loads.visits)
        assert self._feeder is not None
        first = self._feeder.num_visits - len(loads.visits)
        # An epoch that is read straight needs no chunks.
        following = [] if self._straight else list(self._epochs.get(epoch.epoch + 1).visits())
        self._feeder.extend(following)
        self._promised = ((epoch.epoch + 1, 0), following)
        return self._feeder, first, loads

    def _start_feeder(self, visits: Sequence[Visit]) -> None:
        if self._home.type == "cuda":
            # Copies of the last feeder, gathers out of its slots, and other work with the memory that the
            # ring was given may still be queued. The new feeder copies on another stream, which would not
            # wait for them.
            torch.cuda.synchronize(self._home)
        self._feeder = Feeder(self._ring, self._uploader, visits)
        self._feeder.start()

    def _stop_feeder(self) -> None:
        if self._feeder is not None:
            self._feeder.stop()
        self._feeder = None

    def _blocks(self, batches: Iterator[PlannedBatch]) -> Iterator[list[PlannedBatch]]:
        """Group consecutive batches that touch the same chunks, into blocks of growing size."""
        block: list[PlannedBatch] = []
        samples, most = 0, _FIRST_BATCHES
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

    def _index_block(
        self, block: list[PlannedBatch], visits: Sequence[Visit], slots: Sequence[int]
    ) -> Iterator[IndexBatch]:
        """Compute the indices of many batches on the host and upload them in one copy."""
        positions = np.maximum(np.concatenate([batch.positions for batch in block]), 0)
        host: list[Array] = []
        lengths: dict[str, Array] = {}
        for number, column in enumerate(self.columns):
            host.append(column.starts[positions] + self._shifts(number, positions, visits, slots))
            if not isinstance(column.lengths, int):
                lengths[column.field] = column.lengths[positions]
                host.append(lengths[column.field])
        sizes = [len(batch.positions) for batch in block]
        table = IndexTable(self._tables.upload(np.stack(host)), sizes)
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
        """Return what to add to row numbers of the store to get those of the ring's tensors."""
        if len(slots) == 1 and not isinstance(visits[0], ScatteredBatch):
            return self._ring.shift(column, visits[0].chunk, slots[0])
        shifts = np.zeros(len(positions), dtype=np.int64)
        for visit, slot in zip(visits, slots, strict=True):
            inside = (positions >= visit.start) & (positions < visit.stop)
            shifts[inside] = (
                self._ring.shifts(column, positions[inside], visit, slot)
                if isinstance(visit, ScatteredBatch)
                else self._ring.shift(column, visit.chunk, slot)
            )
        return shifts

    # -- assembling ------------------------------------------------------------------------

    def assemble(
        self, indices: torch.Tensor | IndexBatch, totals: Mapping[str, int] | None = None
    ) -> Batch:
        """Build a batch on the device. No host synchronisation: safe to capture in a CUDA graph.

        Args:
            indices: `(rows, batch)` from `index_batches`; or, when everything is resident, a 1-D
                tensor of positions on the device; or what `index_batches` yielded last, for a batch
                that knows its samples, also after `shrink`.
            totals: Number of values per ragged field. Without it the shapes are static: ragged
                values are padded with zeros to the most that any batch can have.
        """
        self._check_open()
        if isinstance(indices, IndexBatch):
            index = self._renew(indices)
            return self._finish(Batch(self._assembler.assemble_in_turn(index)), index.planned)
        if indices.dim() == 1:
            indices = self._positions_table().index_select(1, indices)
        return Batch(self._assembler.assemble(indices.unbind(0), totals))

    def _renew(self, index: IndexBatch) -> IndexBatch:
        """Return the index for the current ring; if the ring was replaced, load the batch's chunks again."""
        planned = index.planned
        if index.ring_number == self.ring_number:
            return index
        feeder, first, loads = self._feed(self._epochs.get(self.epoch), planned.step)
        needed = self._needed(loads, planned)
        slots = [feeder.wait(first + visit) for visit in needed]
        return next(self._index_block([planned], [loads.visits[visit] for visit in needed], slots))

    def shrink(self, share: float) -> int:
        """Keep `share` of the chunks on the device, and free the memory of the others at once.

        Chunks, order, batches and position stay the same, also in the middle of an iteration. Fewer chunks
        are loaded ahead, so that training may wait for them. Waits for the device, and reads the chunks in
        use again.

        Returns:
            Bytes that were freed. 0 if the data is not chunked, or if there are only two chunks, or only as
            many as a batch can touch.
        """
        self._check_open()
        ring = self._ring
        least = max(2, self._order.most_chunks_per_batch)
        num_slots = max(least, int(ring.num_slots * share + 1e-9))
        if self.tier != "chunked" or self._straight is not None or num_slots >= ring.num_slots:
            return 0
        before = ring.num_bytes
        self._replace_ring(num_slots, self._rows_for_scattered(num_slots))
        return before - self._ring.num_bytes

    def _rows_for_scattered(self, num_slots: int) -> list[int]:
        epoch = self._epochs.get(self.epoch)
        return rows_for_scattered(epoch, self._position, self.columns, num_slots)

    def _replace_ring(self, num_slots: int, least_rows: Sequence[int]) -> None:
        """Replace the ring; waits for the device. An iteration continues and loads its chunks again."""
        self._settle_after_fork()
        self._stop_feeder()
        if self._home.type == "cuda":
            torch.cuda.synchronize(
                self._home
            )  # the new ring may get memory that queued work still uses
        self._ring.tensors.clear()
        self._assembler.close()
        if self._home.type == "cuda":
            torch.cuda.empty_cache()
        chunks = self._ring.chunks
        self._ring = ScatteredRing(self.columns, chunks, num_slots, self._home, least_rows)
        self.ring_number += 1
        self._assembler = Assembler(self.columns, self._ring.tensors, self.augment)

    def use_augmentation(self, augment: Augments | None) -> None:
        """Augment from the next batch on; None stops it."""
        self._check_open()
        check_ids(augment, self.tier)
        self._assembler = Assembler(self.columns, self._ring.tensors, augment)
        self.augment = augment
        self._seek_augment()

    def _seek_augment(self) -> None:
        if self.augment is not None:
            self.augment.seek(self.epoch, self._position)

    def _positions_table(self) -> torch.Tensor:
        if self.tier != "resident":
            raise InputError(
                f"positions were given, but the loader is {self.tier} ({self.reason}).",
                "positions when everything is resident",
                "use the indices of Loader.index_batches(), which know the slots",
            )
        if self._table is None:
            self._feed(self._epochs.get(0), 0)[0].wait(0)
            rows: list[Array] = []
            for number, column in enumerate(self.columns):
                rows.append(column.starts + self._ring.shift(number, 0, 0))
                if not isinstance(column.lengths, int):
                    rows.append(column.lengths)
            self._table = torch.from_numpy(np.stack(rows)).to(self._home)
        return self._table

    # -- position --------------------------------------------------------------------------

    def set_epoch(self, epoch: int, batch: int = 0) -> None:
        """Begin `epoch` at batch number `batch` with the next iteration."""
        epoch, batch = whole_number("epoch", epoch), whole_number("batch", batch)
        if epoch < 0 or not 0 <= batch <= len(self):
            raise InputError(
                f"epoch {epoch}, batch {batch}.",
                f"an epoch from 0, a batch from 0 to {len(self)}",
                "loader.set_epoch(0)",
            )
        self._go_to(ResumePoint(epoch, batch))
        self._turn = None

    def order_digest(self) -> str:
        """Return a digest of the samples yielded so far in this epoch, in order.

        After an epoch's last batch and before the next one's first: of the whole epoch. In an epoch that
        other ranks began: of those yielded since.
        """
        if self._ended is not None and self._position == 0:
            number, begun = self._ended
            return (begun or self._order.epoch(number)).digest()
        return self._epochs.get(self.epoch).digest(self._position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in plain values; every rank can continue from the state of any rank."""
        epoch = self._epochs.get(self.epoch)
        return save_state(self._order, epoch, self._position, self._cuts)

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Continue from the `state_dict` of a loader over the same samples in the same order.

        Any rank's state will do. With the same number of ranks and batch size the same batches follow. With
        others, in the middle of an epoch, its remaining samples are shared anew: none is lost or repeated,
        and `num_batches` says where the epoch ends. See `stoker.loader.elastic`.

        Returns:
            How the epoch continues, in words, if other ranks began it.

        Raises:
            InputError: The state belongs to other samples, another order or another number of lanes; the
                message names the difference.
        """
        point = find_resume_point(self._order, state)
        self._go_to(point)
        self._turn = None
        if point.begun is not None and not self._resident:
            rows = self._rows_for_scattered(self._ring.num_slots)
            if not self._ring.can_hold(rows):
                self._replace_ring(self._ring.num_slots, rows)
        return point.words

    def _go_to(self, point: ResumePoint) -> None:
        self._epochs.put(point.begun)
        self._ended = None
        self._cuts = point.cuts
        self.epoch, self._position = point.epoch, point.batch


def _reopened(
    store: Store,
    batch_size: int,
    device: torch.device,
    options: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Loader:
    """Return a loader with the position that another process has pickled."""
    loader = Loader(store, batch_size, device, **options)
    loader.load_state_dict(state)
    return loader


def _end_threads(feeder: Feeder | None, uploader: Uploader, tables: TableUploader) -> None:
    if feeder is not None:
        feeder.stop()
    uploader.close()
    tables.close()


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the device asked for; the first GPU when none is named, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return usable_device(device)
