"""The Loader: batches that are already on the device, in an order you can repeat, resume and check.

Enters: a store, a batch size, a device, an order. Leaves: `Batch`es, assembled on the device from an
index tensor. Costs: the plan's bytes on the device (its reserve holds up to 4 MB of coming batches; 256 MB beside data
that is resident on a GPU, but no more than twice the data); per batch one gather per large field. Indices, small fields
and small augmented images are made for many batches at once.

Contract: every sample comes once per epoch. The order depends on (seed, epoch) alone. A state resumes at any
batch. Device memory stays within the plan while the consumer holds a batch. An error in a background thread
is raised by the next batch, with its cause. The CPU gives the same batches as the GPU. No copy can overwrite
a batch (`ring.py`, `staging.py`). `close` ends all threads. One iteration at a time, in one thread.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, Self, TypeVar

import numpy as np
import torch

from stoker.display import table_html
from stoker.errors import InputError
from stoker.loader.arguments import (
    Habits,
    check_keywords,
    check_names,
    fix_options,
    open_data,
    tell_of_ranks,
    tell_once,
)
from stoker.loader.background import JANITOR
from stoker.loader.batch import Batch, IndexBatch
from stoker.loader.columns import (
    batch_names,
    check_samples,
    column_facts,
    default_fields,
    digest_samples,
    make_columns,
)
from stoker.loader.device_data import DeviceData
from stoker.loader.drawing import Mixture, Weights, choose_draws
from stoker.loader.elastic import ElasticEpoch, Progress, ResumePoint
from stoker.loader.gather import Assembler, Augments, check_augment
from stoker.loader.lanes import LanePlan
from stoker.loader.order import Order, pick_mode
from stoker.loader.pictures import Pictures, Work, make_policy, one_thread
from stoker.loader.planned import Mode, PlannedBatch
from stoker.loader.prefetch import prefetch
from stoker.loader.ring import superseded
from stoker.loader.scattered import rows_for_scattered
from stoker.loader.slabs import usable_device
from stoker.loader.straight import BLOCK_BYTES, StraightReader, can_read_straight
from stoker.plan import Plan, Tier, make_plan
from stoker.plan.facts import even_chunks
from stoker.stalls import start_watch
from stoker.store.fields import Array
from stoker.store.identity import compare_identity, identify
from stoker.store.reader import Store
from stoker.units import format_bytes, whole_number

_T = TypeVar("_T")


class Loader(Habits):
    """Iterate for batches on `device`; see the module's text for the contract.

    One iteration is for one CUDA stream: that which is current when a batch is asked for.

    Args:
        store: An open store, a store folder or a plain HDF5 file; several stores as `mix` joins them. Or data in
            memory: a dict of arrays or tensors, a tuple of them or one alone (batches come in the same form), or a
            Dataset, which is read once.
        batch_size: Samples per batch and rank.
        device: Where batches are wanted; the first GPU by default, else the CPU.
        order: "sequential" (by default), "shuffled", "time" or "lanes".
        shuffle: True is the same as order="shuffled".
        seed: Of the shuffle; the order is a function of (seed, epoch).
        plan: From `make_plan`; made from the free memory when None.
        fields: Fields to load; all but text by default.
        samples: Samples to load, rising; all by default. A mask, or the name of a split that the store has
            ("train", "val", "test"), is taken too; `split_randomly(...).train` gives those of one made here.
        as_tuple: Yield these fields as a tuple, for `for x, y in loader`; by default a `Batch` by names.
        group: Of a plain HDF5 file: the group that holds the arrays, such as "train".
        rows: Of a plain HDF5 file whose arrays differ in length: the number of samples.
        drop_last: Leave out the epoch's last, short batch.
        rank: This process's number.
        world_size: Number of processes that share the samples; 1 by default.
        data_bytes: Device memory for data, all chunks together; the plan's share when None.
        chunk_bytes: Size of one chunk instead, `num_slots` of which are on the device.
        num_slots: Chunks on the device at once, with `chunk_bytes`.
        lanes: From `plan_lanes`, for `order="lanes"`.
        weights: One number of 0 or more per sample, or a function of the epoch that returns them: samples come as
            often as their weights say. See `stoker.loader.drawing`.
        balance: A field of classes: each class comes equally often.
        epoch_samples: Samples of an epoch; as many as there are by default.
        augment: Applied to `images` (and `masks`, where they are loaded) while they are gathered, without
            a copy between. It draws from (its seed, epoch, batch), so a resumed epoch continues with the
            same draws. For validation: `augmentation.validation()`. Encoded pictures of several sizes need one
            whose first op is `RandomResizedCrop` or `Resize`; it is done while they are decoded.
        on_broken: What is done with an encoded picture that cannot be decoded: "stop", "skip" (the sample is left out
            of its batch) or "replace" (by another sample of its batch, with all fields). `broken` lists them.
        broken_budget: How many samples may be broken before an error is raised: a share or a number.
        **others: Arguments of torch's DataLoader. Those that are needless here are accepted with a note
            (`num_workers`, `pin_memory`, ...); others are refused with what to type.

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
        store: Any,
        batch_size: int,
        device: str | torch.device | None = None,
        *,
        order: Mode | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        plan: Plan | None = None,
        fields: Sequence[str] | None = None,
        samples: Array | str | slice | None = None,
        as_tuple: Sequence[str] | None = None,
        group: str | None = None,
        rows: int | None = None,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int | None = None,
        data_bytes: int | None = None,
        chunk_bytes: int | None = None,
        num_slots: int = 3,
        lanes: LanePlan | None = None,
        weights: Weights | None = None,
        balance: str | None = None,
        epoch_samples: int | None = None,
        augment: Augments | None = None,
        on_broken: str = "stop",
        broken_budget: str | float = "1%",
        **others: Any,
    ) -> None:
        self._closed = False
        check_keywords(others, _KEYWORDS, batch_size)
        start_watch()
        named = as_tuple if fields is None and isinstance(as_tuple, Sequence) else fields
        self.store, form, self._owns_store, self._mixture = open_data(store, group, rows, named)
        if on_broken != "stop" and self._mixture is None:
            self._tolerate_damage()
        self.device = usable_device(device)
        if world_size is None:
            tell_of_ranks()
        batch_size, seed, rank, world_size, num_slots = (
            whole_number(name, value)
            for name, value in (
                ("batch_size", batch_size),
                ("seed", seed),
                ("rank", rank),
                ("world_size", 1 if world_size is None else world_size),
                ("num_slots", num_slots),
            )
        )
        self._batch_size = batch_size
        self.samples = check_samples(samples, self.store)
        draws = choose_draws(
            self.store, self.samples, weights, balance, epoch_samples, self._mixture
        )
        order = pick_mode(order, shuffle, is_drawn=draws is not None)
        example = default_fields(self.store.fields)
        self.as_tuple = form if as_tuple is None else check_names(as_tuple, None, example)
        self.columns = make_columns(self.store, self._fields_to_load(fields), self.samples)
        if as_tuple is not None:
            check_names(as_tuple, batch_names(self.columns))
        self._options = {
            "order": order, "seed": seed, "fields": [column.field for column in self.columns], "lanes": lanes,
            "samples": None if samples is None else self.samples, "drop_last": drop_last,
            "rank": rank, "world_size": world_size, "augment": augment,
            "weights": weights, "balance": balance, "epoch_samples": epoch_samples,
            "on_broken": on_broken, "broken_budget": broken_budget,
        }  # fmt: skip
        self._pictures = self._open_pictures(on_broken, broken_budget)
        self.plan = self._take_plan(plan, batch_size, data_bytes, chunk_bytes, num_slots)
        # Streamed batches are assembled in host memory by the same code, then copied to the device.
        local = self.plan.host or self.plan
        streamed = self.plan.tier == "streamed" or self._pictures is not None
        home = torch.device("cpu") if streamed else self.device
        chunks, reason = self._choose_chunks(local, lanes)
        self.tier: Tier = "streamed" if streamed else "resident" if chunks is None else "chunked"
        check_augment(augment, self.tier)
        count, digest = len(self.samples), digest_samples(self.samples)
        if draws is not None and draws.per_batch and chunks is not None:
            raise InputError(
                f"the shares of several stores in every batch need resident data; {reason}.",
                "stores that fit, or shares that hold over an epoch",
                "mix(shares, per_batch=False)",
            )
        made = Order(
            count, batch_size, order, seed, rank, world_size, bool(drop_last), chunks, lanes, digest, draws
        )  # fmt: skip
        self._progress = Progress(made)
        if self._pictures is not None:
            reason = f"encoded pictures in host memory, {self._pictures.reason} ({reason})"
        self.reason = f"{reason}; {self._order.reason}"
        self._data, self._straight = self._open_data(local, home, chunks)
        self._augment = augment
        self._assembler = self._make_assembler()
        self._turn: object = None

    # -- facts -----------------------------------------------------------------------------

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
            ("at", f"epoch {self.epoch}, batch {self._progress.batch}"),
        ]

    @property
    def _order(self) -> Order:
        return self._progress.order

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._progress.epoch

    @property
    def num_batches(self) -> int:
        """Batches of the current epoch: `len`, unless other ranks or another batch size began it."""
        return self._progress.current.num_batches

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
        return 0 if self.tier == "streamed" else self._data.ring.num_bytes

    @property
    def ring_number(self) -> int:
        """Changes when `shrink` or a state has replaced the memory that indices refer to."""
        return self._data.ring_number

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments and the position: a spawned process opens the store itself.

        The plan is included, so that both processes have the same chunks and therefore the same order.
        """
        self._check_open()
        options = self._options | {"plan": self.plan}
        made_of = self._mixture or self.store, self.batch_size, self.device, options
        return _reopened, (*made_of, self.as_tuple, self.state_dict())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and free the memory; the loader cannot be used afterwards. May be called twice."""
        self._closed = True
        self._data.close()
        self._assembler.close()
        if self._pictures is not None:
            self._pictures.close()
            # The old one's augmentation is a copy of the user's, with results of its own in memory.
            self._assembler = Assembler([], {}, None)
        if self._straight is not None:
            self._straight.close()
        if self._owns_store:
            self.store.close()

    def __del__(self) -> None:
        """End the threads of an unreferenced loader: they would keep the ring's memory.

        Another thread waits for them, because the garbage collector may run in one of them.
        """
        with contextlib.suppress(AttributeError):  # the constructor may have failed early
            if not self._closed and self._data.has_threads:
                JANITOR.hand_over(self._data.end_threads)

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(
                "the loader is closed.", "an open loader", "make a new Loader over the same store"
            )

    def _tolerate_damage(self) -> None:
        """Open the store again, so that pictures may fail their checksums; the given store stays strict for others."""
        encoded = [name for name, info in self.store.fields.items() if info.encoding == "picture"]
        again = self.store.tolerating(encoded) if encoded else None
        if again is not None:
            if self._owns_store:
                self.store.close()
            self.store, self._owns_store = again, True

    def _fields_to_load(self, fields: Sequence[str] | None) -> Sequence[str] | None:
        """Return the fields to load: those that `as_tuple` names, unless others were asked for."""
        if fields is None and not isinstance(self.as_tuple, tuple):
            if self.store.notes:
                tell_once(f"{self.store.name}: {'; '.join(self.store.notes)}")
            return None
        if fields is not None or not isinstance(self.as_tuple, tuple):
            return fields
        # Values beside a field ("M5/gap", "mz/offsets") come with it.
        known = self.store.fields
        named = [name if name in known else name.rpartition("/")[0] for name in self.as_tuple]
        if not all(name in known for name in named):
            check_names(self.as_tuple, list(known))
        return list(dict.fromkeys(named))

    def _open_pictures(self, on_broken: str, broken_budget: str | float) -> Pictures | None:
        """Return the decoder of encoded pictures; None if no field holds them."""
        policy = make_policy(on_broken, broken_budget, len(self.samples))
        encoded = [column.field for column in self.columns if column.is_encoded]
        if not encoded:
            return None
        if on_broken != "stop" and any(
            column.kind == "ragged" and not column.is_encoded for column in self.columns
        ):
            raise InputError(
                f"on_broken={on_broken!r} with a field of several values per sample.",
                "fields with one row per sample beside the pictures",
                "fields=['images', 'labels']",
            )
        return Pictures(self.store, encoded, self.samples, self.device, policy)

    def _open_data(
        self, plan: Plan, home: torch.device, chunks: tuple[tuple[int, int], ...] | None
    ) -> tuple[DeviceData, StraightReader | None]:
        """Return the memory at `home` that holds the chunks, and the reader of epochs that need none of it."""
        slots = 1 if chunks is None else max(plan.num_slots, self._order.most_chunks_per_batch)
        is_straight = (
            home.type == "cpu"
            and chunks is not None
            and can_read_straight(self.columns, self._order.mode)
        )
        is_drawn = chunks is not None and self._order.draws is not None
        data = DeviceData(
            self.store, self.columns, len(self.samples), chunks, slots, home, self.plan,
            loads_ahead=not is_straight,  # an epoch that is read straight needs no chunks ahead
            least_rows=self._check_slots(slots, plan) if is_drawn else (),
        )  # fmt: skip
        block_bytes = min(BLOCK_BYTES, data.ring.num_bytes // (2 * slots))
        return data, StraightReader(self.columns, block_bytes) if is_straight else None

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
            if self._pictures is not None and given.gpu_memory_bytes is not None:
                raise InputError(
                    "a plan for the memory of a GPU, and encoded pictures stay in host memory.",
                    "a plan for host memory: make_plan(..., gpu_memory_bytes=None)",
                    "leave plan out",
                )
            return given
        # Not `probe`, which starts NVML and looks for torch: 30 to 100 ms for every loader, and cyclic garbage.
        from stoker.machine import available_memory

        # Encoded pictures stay in host memory, because decoders read them there.
        cuda = self.device.type == "cuda" and self._pictures is None
        return make_plan(
            column_facts(self.store, self.columns, len(self.samples)),
            gpu_memory_bytes=torch.cuda.mem_get_info(self.device)[0] if cuda else None,
            ram_bytes=available_memory() or 8 << 30,
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

    # -- iteration -------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch: `Batch`es, or tuples of the fields in `as_tuple`.

        After a `break` the next iteration begins the next epoch. After `load_state_dict`, or `set_epoch` with a
        batch, it continues there. A loader has one position, so a new iteration ends the one before it.
        """
        if self.as_tuple is None:
            return self._walk(self._batches, is_new=True)
        pick = itemgetter(*([self.as_tuple] if isinstance(self.as_tuple, str) else self.as_tuple))
        if isinstance(self.as_tuple, str) or len(self.as_tuple) > 1:
            return self._walk(lambda: map(pick, self._batches()), is_new=True)
        return self._walk(lambda: ((pick(batch),) for batch in self._batches()), is_new=True)

    def remaining_batches(self) -> Iterator[Batch]:
        """Yield the remaining `Batch`es of the current epoch, also after a `break`; moves the position."""
        return self._walk(self._batches)

    def index_batches(self) -> Iterator[IndexBatch]:
        """Yield the indices of the remaining batches, for `assemble`; moves the position.

        The chunks that an index refers to stay on the device until the next index is asked for.
        """
        return self._walk(lambda: self._data.indices(self._progress))

    def _walk(self, begin: Callable[[], Iterable[_T]], *, is_new: bool = False) -> Iterator[_T]:
        """Yield what `begin` returns, and move the position with every item.

        Raises if a newer iteration has begun. A batch that could not be built does not move the position. With
        `is_new` an epoch that was left in the middle is not continued.
        """
        self._check_open()
        progress = self._progress
        if self._data.settle_after_fork():
            progress.forget_epochs()
        if progress.is_over or (is_new and progress.is_begun):
            # The iteration before took the last batch without asking for another, or was left early.
            progress.begin_next_epoch()
        self._seek_augment()
        self._turn = turn = object()
        num_batches = self.num_batches
        source = begin()
        wrapped = iter(source if self.on_iteration is None else self.on_iteration(source))
        try:
            while True:
                self._check_open()  # before, and after a wait in which another thread closed it
                began = time.perf_counter()
                self._waits = (self._waits[0], began)
                batch = next(wrapped, None)
                self._waits = (self._waits[0] + time.perf_counter() - began, None)
                if batch is None:
                    break
                self._check_open()
                if self._turn is not turn:
                    raise superseded()
                progress.advance(num_batches)
                yield batch
        finally:
            if isinstance(source, Generator):
                source.close()  # now, not when it is collected: it may own a thread
        if self._turn is turn:
            progress.begin_next_epoch()

    @property
    def waited_seconds(self) -> float:
        """Total seconds that callers waited for batches, including a wait in progress; thread safe."""
        finished, since = self._waits
        return finished if since is None else finished + time.perf_counter() - since

    def _batches(self) -> Iterable[Batch]:
        if self._pictures is not None:
            return self._picture_batches(self._pictures)
        if self.tier == "streamed" or self._reads_straight:
            return self._host_batches()
        return map(partial(self._assemble, in_turn=True), self._data.indices(self._progress))

    def _picture_batches(self, pictures: Pictures) -> Iterator[Batch]:
        """Yield batches whose pictures were decoded ahead; after `use_augmentation`, they are decoded again."""
        while True:
            assembler = self._assembler
            work = (
                Work(
                    index.planned, assembler.gather(index, index.totals), assembler.pictures(index)
                )
                for index in self._data.indices(self._progress)
            )
            with contextlib.closing(pictures.decoded(work, self.epoch)) as decoded:
                while self._assembler is assembler:
                    if (made := next(decoded, None)) is None:
                        return
                    with one_thread(self.device):
                        images = assembler.augment(made.tensors, made.planned.step)
                        batch = self._finish(images, made.planned)
                    batch.positions = made.positions
                    yield batch

    @property
    def broken(self) -> dict[int, str]:
        """Samples whose pictures could not be decoded so far, with the reason; see `on_broken`."""
        return {} if self._pictures is None else dict(self._pictures.policy.samples)

    @property
    def _reads_straight(self) -> bool:
        """Whether this epoch's batches are ranges of rows; those of an elastic epoch have holes."""
        return self._straight is not None and not isinstance(self._progress.current, ElasticEpoch)

    def _host_batches(self) -> Iterator[Batch]:
        """Yield batches that were built in host memory, and copied to the device where they are streamed."""
        made: Iterable[tuple[PlannedBatch, Mapping[str, torch.Tensor]]]
        if self._straight is not None and self._reads_straight:
            self.store.check_unchanged()
            made = self._straight.read(self._progress.current.batches(self._progress.batch))
        else:
            made = (
                (index.planned, self._assembler.gather(index, index.totals))
                for index in self._data.indices(self._progress)
            )
        streams = self.tier == "streamed"
        with prefetch(made, self.device) if streams else contextlib.nullcontext(made) as batches:
            for planned, tensors in batches:
                yield self._finish(self._assembler.augment(tensors, planned.step), planned)

    def _finish(self, batch: Batch, planned: PlannedBatch) -> Batch:
        batch.step = planned.step
        batch.positions, batch._samples = planned.positions, self.samples
        batch._num_together = planned.num_together
        if planned.reset is not None:
            valid = torch.from_numpy(planned.positions >= 0)
            batch.reset = torch.from_numpy(planned.reset).to(self.device, non_blocking=True)
            batch.valid = valid.to(self.device, non_blocking=True)
        return batch

    # -- assembling ------------------------------------------------------------------------

    def assemble(
        self,
        indices: torch.Tensor | IndexBatch,
        totals: Mapping[str, int] | None = None,
    ) -> Batch:
        """Build a batch on the device. No host synchronisation: safe to capture in a CUDA graph.

        Args:
            indices: `(rows, batch)` from `index_batches`; or, if everything is resident, a 1-D
                tensor of positions on the device; or the `IndexBatch` that `index_batches` yielded last. Only then
                does the batch know its samples, and `shrink` may come in between.
            totals: Number of values per ragged field. Without it the shapes are static: ragged
                values are padded with zeros to the most that any batch can have.
        """
        self._check_open()
        if self._pictures is not None:
            raise InputError(
                "encoded pictures are decoded ahead of the step, not assembled from indices.",
                "an iteration over the loader",
                "for batch in loader: ...",
            )
        if isinstance(indices, IndexBatch):
            return self._assemble(indices)
        if indices.dim() == 1:
            if self.tier != "resident":
                raise InputError(
                    f"positions were given, but the loader is {self.tier} ({self.reason}).",
                    "positions when everything is resident",
                    "use the indices of Loader.index_batches(), which know the slots",
                )
            indices = self._positions_table.index_select(1, indices)
        return self._assembler.assemble(indices.unbind(0), totals)

    def _assemble(self, index: IndexBatch, *, in_turn: bool = False) -> Batch:
        """Build a batch; `in_turn` if every batch of the iteration is built, one after the other."""
        if index.ring_number != self._data.ring_number:
            index = self._data.renewed(index, self._progress)
        batch = self._assembler.assemble(index, index.totals, in_turn=in_turn)
        return self._finish(batch, index.planned)

    @cached_property
    def _positions_table(self) -> torch.Tensor:
        return self._data.positions_table(self._progress)

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
        ring = self._data.ring
        least = max(2, self._order.most_chunks_per_batch)
        num_slots = max(least, int(ring.num_slots * share + 1e-9))
        if self.tier != "chunked" or self._straight is not None or num_slots >= ring.num_slots:
            return 0
        before = ring.num_bytes
        self._replace_ring(num_slots, self._rows_for_scattered(num_slots))
        return before - self._data.ring.num_bytes

    def _check_slots(self, num_slots: int, plan: Plan) -> list[int]:
        """Return the rows that a slot needs where samples are drawn, or refuse a plan whose slots are smaller."""
        rows = self._rows_for_scattered(num_slots)
        needed = sum(n * column.row_bytes for n, column in zip(rows, self.columns, strict=True))
        room = max(plan.slot_bytes, plan.data_budget_bytes // num_slots)
        if needed > room:
            raise InputError(
                f"a batch of drawn samples may lie in many chunks, and needs {num_slots} slots of "
                f"{format_bytes(needed)}; the plan has {format_bytes(room)} for each.",
                "slots that hold a batch together",
                f"data_bytes={num_slots * needed}, or a smaller batch_size",
            )
        return rows

    def _rows_for_scattered(self, num_slots: int) -> list[int]:
        """Return how many rows of each column a slot must hold, so that the slots together hold any batch."""
        if self._order.draws is not None:
            # Any samples may meet in a batch of an epoch to come: the longest ones, at worst.
            each = min(-(-self.batch_size // num_slots), len(self.samples))
            return [
                each * column.lengths
                if isinstance(column.lengths, int)
                else int(np.partition(column.lengths, -each)[-each:].sum())
                for column in self.columns
            ]
        progress = self._progress
        return rows_for_scattered(progress.current, progress.batch, self.columns, num_slots)

    def _replace_ring(self, num_slots: int, least_rows: Sequence[int]) -> None:
        self._assembler.close()  # it refers to the old ring's memory
        self._data.replace_ring(num_slots, least_rows)
        self._assembler = self._make_assembler()
        self._seek_augment()  # images that were augmented ahead are lost

    def _make_assembler(self) -> Assembler:
        tensors, is_resident = self._data.ring.tensors, self.tier == "resident"
        augment = self.augment
        if self._pictures is not None:
            is_resident = self._data.is_resident
            augment = self._pictures.use(augment)
        return Assembler(self.columns, tensors, augment, is_resident)

    def use_augmentation(self, augment: Augments | None) -> None:
        """Augment from the next batch on; None stops it."""
        self._check_open()
        check_augment(augment, self.tier)
        self._augment = augment
        self._assembler = self._make_assembler()
        self._seek_augment()

    def _seek_augment(self) -> None:
        if self.augment is not None:
            self._assembler.seek(self.epoch, self._progress.batch)

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
        self._progress.go_to(ResumePoint(epoch, batch))
        self._turn = None

    def order_digest(self) -> str:
        """Return a digest of the samples yielded so far in this epoch, in order.

        After an epoch's last batch and before the next one's first: of the whole epoch. In an epoch that
        other ranks began: of those yielded since. Samples that were skipped or replaced change it.
        """
        return self._progress.digest(self._broken_ledger())

    def _broken_ledger(self) -> list[tuple[int, int, int]]:
        return [] if self._pictures is None else self._pictures.policy.ledger

    def state_dict(self) -> dict[str, Any]:
        """Return the position in plain values; every rank can continue from the state of any rank."""
        state = self._progress.state_dict()
        if (data := self._data_identity) is not None:
            state["data"] = dict(data)
        if ledger := self._broken_ledger():
            state["broken"] = [list(entry) for entry in ledger]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Continue from the `state_dict` of a loader over the same samples in the same order.

        Any rank's state will do. With the same number of ranks and batch size the same batches follow. With
        others, in the middle of an epoch, its remaining samples are shared anew: none is lost or repeated,
        and `num_batches` says where the epoch ends. See `stoker.loader.elastic`.

        Returns:
            A sentence on how the epoch continues if other ranks began it, and a note if a plain file was written to
            or copied since; else None.

        Raises:
            InputError: The state belongs to other samples, other data, another order or another number of lanes;
                the message names the difference.
        """
        broken: Any = []
        note = None
        if isinstance(state, Mapping):
            broken, saved = state.get("broken", []), state.get("data")
            if isinstance(saved, Mapping):  # states of older versions have none
                note = compare_identity(saved, self._data_identity, self.store.name)
            state = {name: value for name, value in state.items() if name not in ("broken", "data")}
        point = self._progress.load_state_dict(state)
        if self._pictures is not None:
            self._pictures.policy.restore(broken)
        self._turn = None
        if point.begun is not None and not self._data.is_resident:
            num_slots = self._data.ring.num_slots
            rows = self._rows_for_scattered(num_slots)
            if not self._data.ring.can_hold(rows):
                self._replace_ring(num_slots, rows)
        return "; ".join(filter(None, (note, point.words))) or None

    @cached_property
    def _data_identity(self) -> dict[str, Any] | None:
        """Identity of the data; computed when the first state is saved or loaded."""
        return identify(self.store)


_KEYWORDS = tuple(
    name
    for name, each in inspect.signature(Loader.__init__).parameters.items()
    if each.kind is not each.VAR_KEYWORD and name != "self"
)
fix_options(Loader, _KEYWORDS)


def _reopened(
    store: Store | Mixture,
    batch_size: int,
    device: torch.device,
    options: Mapping[str, Any],
    as_tuple: tuple[str, ...] | str | None,
    state: Mapping[str, Any],
) -> Loader:
    """Return a loader with the position that another process has pickled."""
    loader = Loader(store, batch_size, device, **options)
    loader.as_tuple = as_tuple
    loader.load_state_dict(state)
    return loader
