"""Device memory for the data: a ring of slots, and a thread that fills them ahead of the consumer.

Enters: columns, chunks of positions, a number of slots. Leaves: one tensor per dataset, and for each
chunk in a slot the shift from its rows in the store to its rows in the tensor. Costs: `num_slots`
times the largest chunk, on the device, for the ring's life; nothing is allocated per chunk.

Resident data is a ring of one slot whose only chunk is never released, so both cases share one code
path. Batches are copied out of the ring by gathers. A consumer that keeps its last batch therefore keeps
no chunk alive, which a batch that is a slice of a chunk would do.

A *visit* is one load of a chunk, or of a part of it, into a slot. Contract of the `Feeder`:

    order     one thread loads the visits in order, visit i into slot `i % num_slots`, as soon as visit
              `i - num_slots` was released and the device has finished reading it
    success   `wait` returns the slot, and the caller's CUDA stream waits for the copies
    failure   the first error stops the thread; `wait` raises it with its traceback and the chunk's name
    cancel    `stop` returns when the thread has ended, which takes at most one piece of a read
    skipping  a visit that is released before its turn is not loaded

The loader owns ring, uploader and feeder. The feeder's thread and the uploader's readers write into slots;
only the consumer's thread calls `wait` and `release_before`.
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
from stoker.loader.planned import Visit
from stoker.loader.staging import Copy, Upload, Uploader, torch_dtype
from stoker.store.fields import Array

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class _Layout:
    """Layout of one column in a slot: chunk i has the store's rows `lows[i]` to `highs[i]`.

    Every slot has room for `capacity` rows.
    """

    lows: Array
    highs: Array
    capacity: int


class Ring:
    """Memory for `num_slots` chunks on the device, allocated once.

    Args:
        columns: Columns to load.
        chunks: Ranges of positions.
        num_slots: Chunks on the device at the same time.
        device: Device of the slots.
        least_rows: Least number of rows of each column in a slot, also if the chunks need fewer.
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
        self._layouts = [
            _lay_out(column, chunks, rows) for column, rows in zip(columns, least, strict=True)
        ]
        self.tensors: dict[str, torch.Tensor] = {}
        for column, layout in zip(columns, self._layouts, strict=True):
            for values in column.values:
                shape = (num_slots * layout.capacity, *values.shape)
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
        """Begin to read a visit's rows into a slot; returns before they have arrived.

        Args:
            visit: A chunk, or the part of it that this rank needs.
            slot: Number of the slot. The copies wait for its last reader (`release`).
            uploader: Uploader that reads and copies.
            when_done: Called once, from a reader thread, with success or failure.
        """
        copies: list[Copy] = []
        whole = self.chunks[visit.chunk] == (visit.start, visit.stop)
        for number, (column, layout) in enumerate(zip(self.columns, self._layouts, strict=True)):
            low, high = int(layout.lows[visit.chunk]), int(layout.highs[visit.chunk])
            if not whole:
                low, high = column.extent(visit.start, visit.stop)
            at = low + self.shift(number, visit.chunk, slot)
            copies.extend(
                Copy(values, low, high, self.tensors[values.name][at : at + high - low])
                for values in column.values
            )
        return uploader.begin(copies, self.used[slot], when_done)

    def shift(self, column: int, chunk: int, slot: int) -> int:
        """Return what to add to a row number of the store to get the row number in the ring's tensor."""
        layout = self._layouts[column]
        return slot * layout.capacity - int(layout.lows[chunk])

    def release(self, slot: int) -> None:
        """Allow the slot to be overwritten after the work that is queued on the current stream now."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self.used[slot] = event


def _lay_out(column: Column, chunks: Sequence[tuple[int, int]], least_rows: int) -> _Layout:
    extents = column.extents(chunks)
    capacity = int((extents[:, 1] - extents[:, 0]).max(initial=least_rows))
    return _Layout(extents[:, 0], extents[:, 1], capacity)


class Feeder:
    """Loads visits ahead of the consumer. See the module's text for its contract.

    `extend` adds the next epoch's visits before this epoch ends, so that its first chunks are loaded in time.

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
        # `with lock` instead of `with condition`: a signal handler may raise after Condition.__enter__, which
        # is Python code, has acquired the lock and before the block begins. Nobody would release it then.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Locked until there is a notification; released to wake the consumer. A lock, because acquiring it with a
        # timeout is one C call that a signal handler cannot interrupt halfway.
        self._news = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="stoker-feeder", daemon=True)
        self._process = os.getpid()

    def start(self) -> None:
        """Start the thread. Separate from the constructor, so that an interrupted caller can still `stop` it."""
        stop_at_exit(self)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the thread has ended, with an error or because it was stopped."""
        return self._error is not None or not self._thread.is_alive()

    def has_taken(self, but: int) -> bool:
        """Whether all visits except the last `but` were waited for or released."""
        return max(self._taken, self._released) >= self.num_visits - but

    def extend(self, visits: Sequence[Visit]) -> int:
        """Append visits; return the number of the first of them."""
        with self._lock:
            first = self.num_visits
            self._visits.update(enumerate(visits, first))
            self.num_visits = first + len(visits)
            self._changed.notify_all()
            return first

    def wait(self, visit: int) -> int:
        """Block until a visit is loaded; return its slot. The current stream waits for its copies.

        Raises:
            InputError: The feeder was stopped, the visit was released, or this is a forked process.
            StokerError: The thread died. Its own error is raised as it is.
        """
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
            # Not Condition.wait, which is Python code: an interrupt inside it would leave its lock broken.
            # The timeout covers a thread that died without a word.
            self._news.acquire(timeout=_POLL_SECONDS)
        self._taken = max(self._taken, visit + 1)
        event = self._ready[visit]
        if event is not None:
            torch.cuda.current_stream(self._ring.device).wait_event(event)
        return visit % self._ring.num_slots

    def _ended(self, visit: int) -> StokerError:
        """Return the error that says why this visit will never be loaded."""
        if self._stopping:
            return InputError(
                "an iteration goes on after its loader was closed, or after its position was set.",
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
        """Release the slots of all visits before this one: no later batch reads them."""
        if visit <= self._released:
            return  # waking the thread for nothing would take the interpreter lock from the training loop
        with self._lock:
            for done in range(self._released, visit):
                self._ring.release(done % self._ring.num_slots)
                self._ready.pop(done, None)
                self._visits.pop(done, None)
            self._released = max(self._released, visit)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread and wait for it: at most one piece of a read. The uploader can be used again after it."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
        self._uploader.stop()
        if self._thread.ident is not None:
            # An interrupt came in the middle of Thread.start.
            with contextlib.suppress(RuntimeError):
                self._thread.join()
        self._uploader.stop()  # again: the thread may have begun an upload between the first call and its end
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
                        # Resident data is read once: its pinned slabs are given back here, in this
                        # thread, where no consumer waits for it.
                        self._uploader.release()
                visit += 1
        except BaseException as error:  # noqa: BLE001  the consumer raises it, whatever it is
            self._fail(visit, error)

    def _note(self, visit: int, upload: Upload) -> None:
        """Record the end of a visit's upload; called by the reader thread that finished its last piece."""
        if upload.error is not None:
            self._fail(visit, upload.error)
            return
        with self._lock:
            if visit >= self._released:  # else it was released while it was loaded
                self._ready[visit] = upload.event
        self._tell()

    def _fail(self, visit: int, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                # The first error is the cause; those after it are uploads that were cancelled.
                error.add_note(f"while loading {self._named(visit)} ahead of the training loop")
                self._error = error
            self._changed.notify_all()
        self._tell()

    def _named(self, visit: int) -> str:
        known = self._visits.get(visit)
        return "a chunk" if known is None else f"chunk {known.chunk}"

    def _tell(self) -> None:
        """Wake the consumer. Safe to call twice: an unread notification is enough."""
        with contextlib.suppress(RuntimeError):
            self._news.release()

    def _await_turn(self, visit: int) -> bool:
        """Block until the visit exists and its slot is released; return False if the thread should end."""
        with self._lock:
            while not (self._stopping or self._error) and (
                visit >= self.num_visits or visit >= self._released + self._ring.num_slots
            ):
                self._changed.wait(_POLL_SECONDS)
            return not (self._stopping or self._error)


def superseded() -> InputError:
    """Return the error of an iteration that is no longer the loader's current one."""
    return InputError(
        "an iteration goes on after a newer one over the same loader began, or after its position was set.",
        "one iteration at a time",
        "begin a new iteration, or take a second Loader over the same store",
    )
