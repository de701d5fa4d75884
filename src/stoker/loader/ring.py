"""Where the values live on the device: slots of one ring, filled ahead of the consumer.

Enters: columns, chunks of positions, a number of slots. Leaves: one tensor per dataset, and for each
chunk in a slot the shift from its rows in the store to its rows in the tensor. Costs: `num_slots`
times the largest chunk, on the device, for the ring's life; nothing is allocated per chunk.

"Everything resident" is a ring of one slot whose only chunk is never released, so there is one code
path. Gathers copy out of the ring, so a consumer that holds its last batch holds no chunk: the
second chunk of memory that slices of a chunk would keep alive never exists.

Contract of the `Feeder`: one thread loads the visits in order, visit i into slot i modulo the slots,
as soon as visit i - slots was released and the device is done with it. `wait` returns when a visit
is loaded, or raises the thread's error with its traceback; `stop` ends the thread within one piece of
a read. Nothing is loaded twice, and what was released before its turn is not loaded at all.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from stoker.errors import InputError, StokerError
from stoker.loader.background import stop_at_exit
from stoker.loader.columns import Column
from stoker.loader.order import Visit
from stoker.loader.staging import Copy, Upload, Uploader, torch_dtype
from stoker.store.fields import Array

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class _Place:
    """Rows of one column: per chunk from `lows` to `highs`, `capacity` rows a slot."""

    lows: Array
    highs: Array
    capacity: int


class Ring:
    """Slots on the device.

    Args:
        columns: What is loaded.
        chunks: Ranges of positions.
        num_slots: Chunks on the device at the same time.
        device: Where.
        least_rows: Rows of each column that a slot holds at least, where the chunks need fewer.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        chunks: Sequence[tuple[int, int]],
        num_slots: int,
        device: torch.device,
        least_rows: Sequence[int] = (),
    ) -> None:
        self.columns = columns
        self.chunks = chunks
        self.num_slots = num_slots
        self.device = device
        least = least_rows or [0] * len(columns)
        self._places = [
            _place(column, chunks, rows) for column, rows in zip(columns, least, strict=True)
        ]
        self.tensors: dict[str, torch.Tensor] = {}
        for column, place in zip(columns, self._places, strict=True):
            for values in column.values:
                shape = (num_slots * place.capacity, *values.shape)
                self.tensors[values.name] = torch.empty(
                    shape, dtype=torch_dtype(values.dtype), device=device
                )
        self.used: list[torch.cuda.Event | None] = [None] * num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def load(
        self, visit: Visit, slot: int, uploader: Uploader, when_done: Callable[[Upload], None]
    ) -> Upload:
        """Begin to fill what a rank needs of a slot."""
        copies: list[Copy] = []
        whole = self.chunks[visit.chunk] == (visit.start, visit.stop)
        for number, (column, place) in enumerate(zip(self.columns, self._places, strict=True)):
            low, high = int(place.lows[visit.chunk]), int(place.highs[visit.chunk])
            if not whole:
                low, high = column.extent(visit.start, visit.stop)
            at = low + self.shift(number, visit.chunk, slot)
            copies.extend(
                Copy(values, low, high, self.tensors[values.name][at : at + high - low])
                for values in column.values
            )
        return uploader.begin(copies, self.used[slot], when_done)

    def shift(self, column: int, chunk: int, slot: int) -> int:
        """What to add to a row of the store to find it in the tensor."""
        place = self._places[column]
        return slot * place.capacity - int(place.lows[chunk])

    def release(self, slot: int) -> None:
        """Everything queued on the current stream is the last to read this slot."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self.used[slot] = event


def _place(column: Column, chunks: Sequence[tuple[int, int]], least_rows: int) -> _Place:
    extents = column.extents(chunks)
    capacity = int((extents[:, 1] - extents[:, 0]).max(initial=least_rows))
    return _Place(extents[:, 0], extents[:, 1], capacity)


class Feeder:
    """Loads visits ahead of the consumer; `extend` it with the next epoch's before this one ends.

    Attributes:
        num_visits: Visits asked for so far; those that are no longer needed are forgotten.
    """

    def __init__(self, ring: Ring, uploader: Uploader, visits: Sequence[Visit]) -> None:
        self._ring = ring
        self._uploader = uploader
        self._visits = dict(enumerate(visits))
        self.num_visits = len(self._visits)
        self._ready: dict[int, torch.cuda.Event | None] = {}
        self._released = self._taken = 0
        self._error: BaseException | None = None
        self._stopping = False
        # Taken as a plain lock: an exception out of a signal handler can come between taking a Condition
        # and entering its block, and would leave it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._news = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="stoker-feeder", daemon=True)
        self._process = os.getpid()

    def start(self) -> None:
        """Begin; apart from making it, so that whoever is interrupted in between can still stop it."""
        stop_at_exit(self)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the thread has ended with an error, or was ended."""
        return self._error is not None or not self._thread.is_alive()

    def has_taken(self, but: int) -> bool:
        """Whether all visits but the last so many were waited for, or are not needed any more."""
        return max(self._taken, self._released) >= self.num_visits - but

    def extend(self, visits: Sequence[Visit]) -> int:
        """Ask for more visits after the last; return the number of the first of them."""
        with self._lock:
            first = self.num_visits
            self._visits.update(enumerate(visits, first))
            self.num_visits = first + len(visits)
            self._changed.notify_all()
            return first

    def wait(self, visit: int) -> int:
        """Return the slot of a visit once it is loaded; the current stream waits for its copies."""
        assert visit < self._released + self._ring.num_slots, (
            "a batch touches more chunks than slots"
        )
        while visit not in self._ready:
            if visit < self._released:
                raise superseded()
            if self._error is not None and not self._stopping:
                raise self._error
            if self._stopping or not self._thread.is_alive():
                raise self._ended(visit)
            # Not by the Condition, whose wait is Python: an interrupt in it breaks its lock.
            self._news.acquire(timeout=_POLL_SECONDS)
        self._taken = max(self._taken, visit + 1)
        event = self._ready[visit]
        if event is not None:
            torch.cuda.current_stream(self._ring.device).wait_event(event)
        return visit % self._ring.num_slots

    def _ended(self, visit: int) -> StokerError:
        """Return why nothing more is loaded."""
        if self._stopping:
            return InputError(
                "the loader is closed, or its place was set, and an iteration goes on.",
                "one iteration at a time, over an open loader",
                "begin a new iteration, with a new Loader where it was closed",
            )
        if self._process != os.getpid():
            return InputError(
                "an iteration goes on in a forked process, where the loader's threads are not.",
                "an iteration that stays in the process that began it",
                "begin a new iteration in this process",
            )
        return StokerError(
            f"the feeder thread ended before {self._named(visit)} was loaded.",
            "a living thread",
            "look for what killed it, then resume from the last state_dict",
        )

    def release_before(self, visit: int) -> None:
        """Say that no later batch needs the visits before this one."""
        if visit <= self._released:
            return  # a thread that is woken for nothing takes the interpreter from the training loop
        with self._lock:
            for done in range(self._released, visit):
                self._ring.release(done % self._ring.num_slots)
                self._ready.pop(done, None)
                self._visits.pop(done, None)
            self._released = max(self._released, visit)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread; waits for it, at most one piece of a read."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
        self._uploader.stop()
        if self._thread.ident is not None:
            with contextlib.suppress(RuntimeError):  # an interrupt broke its start
                self._thread.join()
        self._uploader.stop()  # what the thread may have begun since
        self._uploader.stop(False)

    def _run(self) -> None:
        visit = 0
        try:
            while self._await_turn(visit):
                wanted = self._visits.get(visit)
                if wanted is not None:  # else it was released before its turn
                    slot, done = visit % self._ring.num_slots, partial(self._note, visit)
                    upload = self._ring.load(wanted, slot, self._uploader, done)
                    if self._uploader.once:
                        upload.wait()
                        self._uploader.release()  # nobody waits for this
                visit += 1
        except BaseException as error:  # noqa: BLE001  the consumer raises it, whatever it is
            self._fail(visit, error)

    def _note(self, visit: int, upload: Upload) -> None:
        """A visit is loaded, or could not be; called by the thread that had its last piece."""
        if upload.error is not None:
            self._fail(visit, upload.error)
            return
        with self._lock:
            if visit >= self._released:
                self._ready[visit] = upload.event
        self._tell()

    def _fail(self, visit: int, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                error.add_note(f"while loading {self._named(visit)} ahead of the training loop")
                self._error = error
            self._changed.notify_all()
        self._tell()

    def _named(self, visit: int) -> str:
        known = self._visits.get(visit)
        return "a chunk" if known is None else f"chunk {known.chunk}"

    def _tell(self) -> None:
        """Wake who waits for a visit; news that were not taken yet will do."""
        with contextlib.suppress(RuntimeError):
            self._news.release()

    def _await_turn(self, visit: int) -> bool:
        """Wait until there is such a visit and its slot is free; False when being stopped."""
        with self._lock:
            while not (self._stopping or self._error) and (
                visit >= self.num_visits or visit >= self._released + self._ring.num_slots
            ):
                self._changed.wait(_POLL_SECONDS)
            return not (self._stopping or self._error)


def superseded() -> InputError:
    """Return the error of an iteration that goes on although the loader's place is another's by now."""
    return InputError(
        "an iteration goes on after a newer one over the same loader began, or after its place was set.",
        "one iteration at a time",
        "begin a new iteration, or take a second Loader over the same store",
    )
