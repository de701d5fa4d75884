"""From disk to the device: positional reads into pinned slabs, then copies on a side stream.

Enters: rows of stored datasets and a tensor to put them in. Leaves: the tensor filled, and on CUDA
an event that says when. Costs: on CUDA `threads + 2` pinned slabs of 8 MB, pinned once for the
uploader's life; each thread reads into one slab while others are being copied. From the page cache
50 GB/s on an H200 with an idle host (12 threads), 42 to 45 with a busy one (10). The bus gives 55; pinning
every chunk anew gives 1.3.

Only one thread at a time calls the driver. A thread that has filled a slab, and finds no other thread
queueing copies, queues the copies of all slabs that are ready. Twelve threads that each queue their own copy
wait for each other at every slab, for the driver's lock and the interpreter's: 18 GB/s instead of 34 with
slabs of 4 MB, 40 instead of 50 with 8 MB.

Contract of an `Upload`:

    success   all copies are queued, and `event` fires after the last of them
    failure   `wait` raises the first error, after every thread has finished with the upload's pieces; the
              pieces that were not begun are skipped, and the target's content is undefined
    cancel    `Uploader.stop` makes each piece that was not begun fail with InterruptedError, and waits for
              the pieces in progress
    memory    a slab is filled again only after the event of its last copy; the caller keeps the targets
              alive until `event`. Copies wait for the caller's `wait_for` event, reads do not

Threads: any thread may call `begin`, one call at a time. Reader threads belong to the uploader.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from stoker.loader.columns import Values
from stoker.plan.budget import MAX_READERS, SLAB_BYTES, SPARE_SLABS
from stoker.store.arrays import OpenFile, StoredArray
from stoker.store.fields import Array
from stoker.units import format_bytes

_POLL_SECONDS = 0.2
_NUM_TABLES = 4
_LEAST_TABLE_BYTES = 64 << 10
_SIGNED = {"u2": "i2", "u4": "i4", "u8": "i8"}
_UNSIGNED = {torch.int16: torch.uint16, torch.int32: torch.uint32, torch.int64: torch.uint64}


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return the torch type with the same bits; unsigned types wider than 8 bits as their signed twin."""
    name = dtype.newbyteorder("=").str.lstrip("<>|=")
    return torch.from_numpy(np.empty(0, dtype=_SIGNED.get(name, name))).dtype


def restore_sign(values: torch.Tensor, dtype: np.dtype[Any]) -> torch.Tensor:
    """View values that were stored as a signed type as the unsigned type they came from."""
    return (
        values.view(_UNSIGNED[values.dtype]) if dtype.kind == "u" and dtype.itemsize > 1 else values
    )


@dataclass(frozen=True)
class Copy:
    """A range of rows to copy: `values[start:stop]` into `target`, which has as many rows."""

    values: Values
    start: int
    stop: int
    target: torch.Tensor


class OnceFlag:
    """An event that is set once and can be waited for.

    Like `threading.Event`, but safe when a signal handler raises in the middle of a wait. An Event takes its
    lock in Python code, so such an exception can leave the lock taken for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._until = threading.Lock()
        self._until.acquire()

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._is_set

    def set(self) -> None:
        """Set it and wake all waiting threads. Must be called only once."""
        self._is_set = True
        self._until.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until it is set, at most `seconds`; return whether it is set."""
        end = None if seconds is None else time.monotonic() + seconds
        while not self._is_set and (end is None or time.monotonic() < end):
            # Polls: the main thread runs signal handlers between two calls, not within one.
            if self._until.acquire(timeout=_POLL_SECONDS):
                self._until.release()  # let the next waiter through
        return self._is_set


class Upload:
    """A set of copies in progress. `wait` for it, or pass `when_done` to be called at its end.

    Attributes:
        event: On CUDA the event after the last copy; None on the CPU, and until all copies are queued.
        error: The first error, or None.
    """

    def __init__(
        self,
        num_pieces: int,
        stream: torch.cuda.Stream | None,
        when_done: Callable[[Upload], None] | None,
    ) -> None:
        self.event: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self.stream = stream
        self._when_done = when_done
        self._left = num_pieces
        self._lock = threading.Lock()
        self._finished = OnceFlag()
        if not num_pieces:
            self._finish()

    def wait(self) -> torch.cuda.Event | None:
        """Block until no thread works on the upload; return its event, or raise its error."""
        self._finished.wait()
        if self.error is not None:
            raise self.error
        return self.event

    def count_piece(self, error: BaseException | None) -> None:
        """Count a piece that was queued, failed, or was skipped because another piece failed."""
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        try:
            if self.stream is not None and self.error is None:
                event = torch.cuda.Event()
                event.record(self.stream)
                self.event = event
        except Exception as error:  # noqa: BLE001  CUDA reports a kernel that failed earlier at its next call
            self.error = error
        # Drop the callback: it may refer to this upload. The garbage collector would then free the event,
        # possibly in a forked child, where CUDA aborts the process.
        when_done, self._when_done = self._when_done, None
        try:
            if when_done is not None:
                when_done(self)
        except Exception as error:  # noqa: BLE001  raised by `Upload.wait`
            self.error = self.error or error
        finally:
            self._finished.set()  # whatever happened: `wait` must return


class _Piece(NamedTuple):
    """Rows that one thread reads in one call, at most a slab: `open()[low:high]` to byte `at` of `target`."""

    upload: Upload
    open: Callable[
        [], StoredArray
    ]  # opened when it is read: a store may have more shards than files may be open
    low: int
    high: int
    target: torch.Tensor
    at: int
    num_bytes: int


class Uploader:
    """Fills tensors from disk, on the CPU or on a CUDA device, with a pool of reader threads.

    Args:
        device: Device of the targets.
        threads: Reader threads, at most 10.
        slab_bytes: Size of one pinned buffer; a larger row gets a slab of its own size.
        num_slabs: Pinned buffers on CUDA; two more than threads by default.
        once: Whether every row is read only once; reads then bypass the page cache.
    """

    def __init__(
        self,
        device: torch.device,
        threads: int,
        slab_bytes: int = SLAB_BYTES,
        *,
        num_slabs: int | None = None,
        once: bool = False,
    ) -> None:
        self.device = device
        self.threads = threads = min(threads, MAX_READERS, num_slabs or threads)
        self._num_slabs = num_slabs or threads + SPARE_SLABS
        self._slab_bytes = slab_bytes
        self.once = once
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="stoker-upload")
        self._lock = threading.Lock()
        self._stopped = False
        self._waiting: deque[_Piece] = deque()
        self._recent: deque[Upload] = deque(maxlen=2)
        self._slabs: queue.SimpleQueue[_Slab] | None = None
        self._num_made = 0
        # Files that are read past the page cache; not kept open by this.
        self._direct: list[weakref.ref[OpenFile]] = []
        self._ready: deque[tuple[_Piece, _Slab]] = deque()
        self._queueing = threading.Lock()
        # Two streams in turn: a new upload makes its stream wait for its target, and must not delay the
        # copies of the upload before it.
        self._streams = (
            [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        )

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory that uploads to CUDA use."""
        return self._num_slabs * self._slab_bytes if self._streams else 0

    def upload(
        self, copies: Sequence[Copy], wait_for: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Fill the targets; blocks until all reads are done and all copies are queued.

        Args:
            copies: What goes where.
            wait_for: An event after which the targets may be overwritten.

        Returns:
            On CUDA the event after which the targets are filled; None on the CPU.
        """
        return self.begin(copies, wait_for).wait()

    def begin(
        self,
        copies: Sequence[Copy],
        wait_for: torch.cuda.Event | None = None,
        when_done: Callable[[Upload], None] | None = None,
    ) -> Upload:
        """Begin to fill the targets; blocks only until the upload before the last one is done.

        Threads continue with this upload's pieces when all pieces of earlier uploads are taken, so no thread is
        idle at the end of a chunk.

        Args:
            copies: What goes where.
            wait_for: An event after which the targets may be overwritten.
            when_done: Called once, from a reader thread, when no thread works on the upload any more.
        """
        with self._lock:
            if len(self._recent) == 2:  # at most two at once: more would share the same slabs
                self._recent[0]._finished.wait()
            cuts = list(self._cut(copies))
            stream = None
            if self._streams:
                self._streams.reverse()
                stream = self._streams[0]
                if wait_for is not None:
                    stream.wait_event(wait_for)
                self._add_slabs(copies, len(cuts))
            upload = Upload(len(cuts), stream, when_done)
            self._recent.append(upload)
            self._waiting.extend(_Piece(upload, *cut) for cut in cuts)
            try:
                for _ in range(min(self.threads, len(cuts))):
                    self._pool.submit(self._drain)
            except RuntimeError as error:  # the interpreter is shutting down: no new tasks
                upload.error = upload.error or error
                self._drain()  # count its pieces, so that `wait` returns
            return upload

    def stop(self, stopped: bool = True) -> None:
        """Cancel the uploads in progress and wait for them. `stop(False)` allows new uploads again."""
        self._stopped = stopped
        if stopped:
            for upload in tuple(self._recent):
                upload._finished.wait()

    def close(self) -> None:
        """Cancel uploads, end the threads and unpin the slabs. The uploader cannot be used afterwards."""
        self.stop()
        self._pool.shutdown()
        self._recent.clear()
        self.release()

    def release(self) -> None:
        """Unpin the slabs and read files through the page cache again; blocks until the last copies are done.

        A later upload makes new slabs.
        """
        for file in filter(None, (self._direct.pop()() for _ in range(len(self._direct)))):
            file.direct = False
        while self._slabs is not None and not self._slabs.empty():
            self._slabs.get().release()
        self._slabs, self._num_made = None, 0

    def _cut(
        self, copies: Sequence[Copy]
    ) -> Iterator[tuple[Callable[[], StoredArray], int, int, torch.Tensor, int, int]]:
        """Cut the copies at shard boundaries and into pieces of at most a slab."""
        for copy in copies:
            row_bytes = copy.values.row_bytes
            rows = max(1, self._slab_bytes // max(1, row_bytes))
            target = copy.target.view(-1).view(torch.uint8)
            for open_array, first, last, at in copy.values.closed_spans(copy.start, copy.stop):
                for low in range(first, last, rows):
                    count = min(rows, last - low)
                    where = (at + low - first) * row_bytes
                    yield open_array, low, low + count, target, where, count * row_bytes

    def _drain(self) -> None:
        """Process pieces until the queue is empty; runs in a reader thread.

        One task per thread, not per piece: a task and a stream context for each piece hold the interpreter's
        lock so long that 16 threads get 37 GB/s instead of 48 (H200).
        """
        read = self._read_into_slab if self._streams else self._read_into_place
        while True:
            try:
                piece = self._waiting.popleft()
            except IndexError:
                return
            if self._stopped:
                piece.upload.count_piece(InterruptedError("the upload was stopped"))
            elif piece.upload.error is not None:
                piece.upload.count_piece(None)
            else:
                try:
                    read(piece)
                except BaseException as error:  # noqa: BLE001  raised by `Upload.wait`
                    piece.upload.count_piece(error)
                    continue
                if self._streams:
                    self._queue_copies()
                else:
                    piece.upload.count_piece(None)

    def _open(self, piece: _Piece) -> StoredArray:
        array = piece.open()
        if self.once and not array.file.direct:
            array.file.direct = True
            self._direct.append(weakref.ref(array.file))
        return array

    def _read_into_place(self, piece: _Piece) -> None:
        array, end = self._open(piece), piece.at + piece.num_bytes
        memory = piece.target.numpy()[piece.at : end].view(array.dtype)
        array.read_into(
            piece.low, piece.high, memory.reshape(piece.high - piece.low, *array.shape[1:])
        )

    def _read_into_slab(self, piece: _Piece) -> None:
        assert self._slabs is not None
        slab = self._slabs.get()
        try:
            array = self._open(piece)
            host = slab.array((piece.high - piece.low, *array.shape[1:]), array.dtype)
            array.read_into(piece.low, piece.high, host)
        except BaseException:
            self._slabs.put(slab)
            raise
        self._ready.append((piece, slab))

    def _queue_copies(self) -> None:
        """Queue the copies of all pieces that are read, unless another thread is doing so."""
        # Check again after releasing the lock: another thread may have added a piece and failed to acquire
        # the lock just before.
        while self._ready and self._queueing.acquire(blocking=False):
            try:
                while self._ready:
                    self._queue_copy(*self._ready.popleft())
            finally:
                self._queueing.release()

    def _queue_copy(self, piece: _Piece, slab: _Slab) -> None:
        stream = piece.upload.stream
        assert self._slabs is not None
        assert stream is not None
        error: BaseException | None = None
        try:
            if torch.cuda.current_stream(self.device) != stream:
                torch.cuda.set_stream(
                    stream
                )  # for this thread, which is a reader: a context costs more
            target = piece.target[piece.at : piece.at + piece.num_bytes]
            target.copy_(slab.memory[: piece.num_bytes], non_blocking=True)
            slab.free.record(stream)
        except BaseException as caught:  # noqa: BLE001  raised by `Upload.wait`
            error = caught
        self._slabs.put(slab)
        piece.upload.count_piece(error)

    def _add_slabs(self, copies: Sequence[Copy], num_pieces: int) -> None:
        """Pin as many slabs as this upload can use; a small earlier upload may have needed fewer."""
        missing = min(self._num_slabs, num_pieces) - self._num_made
        if missing <= 0:
            return
        size = max(self._slab_bytes, *(copy.values.row_bytes for copy in copies))
        self._slabs = self._slabs or queue.SimpleQueue()
        for slab in self._pool.map(lambda _: _Slab(size, self.device), range(missing)):
            self._slabs.put(slab)
        self._num_made += missing


def signed_twin(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type with the same bits that torch supports: signed for wide unsigned types."""
    return np.dtype(_SIGNED.get(dtype.str.lstrip("<>|="), dtype.str))


class TableUploader:
    """Copies small index tables to a CUDA device, through pinned memory that is allocated once.

    Pinning each table anew asks the driver for memory, which waits for the device. Copied on the training
    loop's stream, a table would wait behind a chunk that has just begun to load: the GPU idled for 4.6 ms at
    every chunk boundary on an H200. So tables are copied early, on a stream of their own.

    Args:
        device: Device of the tables; on the CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: deque[_Slab] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def upload(self, rows: Sequence[Array], at_once: bool) -> torch.Tensor:
        """Return the rows as one table on the device; the current stream waits for it.

        Blocks only until the table `_NUM_TABLES` calls ago has arrived.

        Args:
            rows: Rows of the same length and type.
            at_once: Copy on the current stream; for resident data, when no chunk is being copied.
        """
        if self._stream is None:
            return torch.from_numpy(np.stack(rows))
        num_bytes = sum(row.nbytes for row in rows)
        slab = self._slabs.popleft() if len(self._slabs) == _NUM_TABLES else None
        if slab is None or slab.num_bytes < num_bytes:
            if slab is not None:
                slab.release()
            slab = _Slab(max(_LEAST_TABLE_BYTES, 1 << (num_bytes - 1).bit_length()), self._device)
        host = slab.array((len(rows), len(rows[0])), rows[0].dtype)
        for number, row in enumerate(rows):
            host[number] = row
        user = torch.cuda.current_stream(self._device)
        if at_once:
            made = torch.from_numpy(host).to(self._device, non_blocking=True)
            slab.free.record(user)
        else:
            with torch.cuda.stream(self._stream):
                made = torch.from_numpy(host).to(self._device, non_blocking=True)
            slab.free.record(self._stream)
            user.wait_event(slab.free)
            made.record_stream(user)  # the allocator must not reuse it while the loop reads it
        self._slabs.append(slab)
        return made

    def close(self) -> None:
        """Unpin the memory; waits for its last copies."""
        while self._slabs:
            self._slabs.popleft().release()


class _Slab:
    """A block of pinned host memory; `free` is the event after the last copy out of it.

    Registering memory that was touched before is eight times faster than `pin_memory=True`: 54 against
    456 ms for 1 GB on an H200.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._map = mmap.mmap(-1, num_bytes)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._bytes[::4096] = 0  # touch every page, so that registering need not fault them in
        # In a thread that has not chosen a device, the call would make a context on the first GPU: of every rank.
        with torch.cuda.device(device):
            status = torch.cuda.cudart().cudaHostRegister(self._bytes.ctypes.data, num_bytes, 0)
        self._pinned = int(status) == 0
        if not self._pinned:
            warnings.warn(
                f"{format_bytes(num_bytes)} of host memory could not be pinned ({status}): copies to the GPU are "
                "slower. See: ulimit -l; free -h",
                RuntimeWarning,
                stacklevel=2,
            )
        self.memory = torch.from_numpy(self._bytes)
        # blocking=True sleeps: sixteen threads that spin on events take the cores of the training loop.
        self.free = torch.cuda.Event(blocking=True)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Wait until the last copy out of the slab is done; return its memory as an array."""
        # It mostly is done, and `synchronize` would release the interpreter's lock.
        if not self.free.query():
            self.free.synchronize()
        count = int(np.prod(shape, dtype=np.int64))
        return self._bytes[: count * dtype.itemsize].view(dtype).reshape(shape)

    def release(self) -> None:
        """Unpin the memory; waits for the last copy out of it."""
        self.free.synchronize()
        if self._pinned:
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._bytes.ctypes.data)
