"""Reading rows of one dataset by position, from any thread, into the caller's buffer.

Enters: a `Location`, optional block checksums, a row range and a buffer. Leaves: the rows in the
buffer, in native byte order, or an error with file, dataset and offset. Costs: one `preadv` per
piece (6 GB/s a thread from the page cache); the first read of a block also hashes it (about
10 GB/s), later reads do not; one `fstat` per piece notices a file that is written to meanwhile.

Contract, for every thread:
- success: every byte asked for is in the buffer and, where checksums exist, was verified at least once since opening. A
  file that was written to since then is noticed by its times and size: its blocks are verified anew before they are
  given out. Without checksums the read raises. Small reads look at the file once a millisecond at most.
- failure: the error names file, dataset and place. The buffer's content is undefined. The array stays usable: a read
  that failed on a bad block fails again, other rows can be read.
- cancel: a read is never interrupted. A task that has begun ends; tasks that were not run leave no trace.
  `OpenFile.close` during a read makes that read fail; `Shard.release` lets it finish first.
All methods are thread-safe. Only datasets that go through h5py wait for each other.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from stoker.bounds import SMALL_BYTES, require_memory
from stoker.display import command, look_in
from stoker.errors import CorruptError, StoreError
from stoker.stalls import Waiting
from stoker.store.fields import Array
from stoker.store.hdf5 import Chunk, Location, damaged, open_hdf5, read_chunk

PIECE_BYTES = 8 << 20
"""Bytes per task of a large read: a long call that holds no GIL, and a multiple of the block."""
_CACHED_CHUNK_BYTES = 32 << 20
_SPAN_WASTE = 4
"""A gather reads the whole span of its rows when that is at most this many times the bytes wanted:
one call instead of hundreds."""

_SMALL_READ_BYTES = 64 << 10
_UNLOOKED_SECONDS = 0.001
"""Small reads look at the file once in this time: an `fstat` costs 1 to 5 µs, as much as reading a small row."""
_MOST_REREADS = 20

_DIRECT_BYTES = 1 << 20
_BOUNCE_BYTES = 8 << 20
_PAGE = 4096
_SMALLER_ROWS = "store smaller rows: the first dimension counts samples"

Task = Callable[[], None]


class Stamp(NamedTuple):
    """Inode, size and times of a file when it was looked at."""

    inode: int
    num_bytes: int
    written_ns: int
    changed_ns: int  # last change of anything about it, also of its names

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        """Return the stamp of a file that was looked at."""
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def is_rewritten(self, since: Stamp) -> bool:
        """Whether the bytes may differ from those at `since`."""
        return (self.num_bytes, self.written_ns) != (since.num_bytes, since.written_ns)


class OpenFile:
    """A file descriptor for positional reads, shared by threads and forked children."""

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path = path
        # Read large cold pieces past the page cache. For data that is read once: 2.8 against 2.0 GB/s from a cold
        # disk on the H200 machine, but the next read is as cold.
        self.direct = False
        self._local = threading.local()
        # A given descriptor is closed with this object.
        self._descriptor = self._open() if descriptor is None else descriptor
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self.opened_as = self.stamp()

    def _open(self) -> int:
        try:
            # Not blocking: a pipe in the place of a shard would wait for its writer for ever.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise OSError(errno.EINVAL, "it is no regular file")
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be opened: {error.strerror}.",
                "a readable file",
                look_in(self.path.parent, "-l"),
            ) from error
        return descriptor

    def stamp(self) -> Stamp:
        """Return the stamp of the open file, even if another file has its name by now."""
        return Stamp.of(os.fstat(self._descriptor))

    def read(self, offset: int, out: memoryview, dataset: str) -> None:
        """Fill `out` from `offset`, or raise with the byte at which the file ended."""
        with Waiting(self.path):
            self._read(offset, out, dataset)

    def _read(self, offset: int, out: memoryview, dataset: str) -> None:
        done = 0
        if self.direct and len(out) >= _DIRECT_BYTES and self._is_cold(offset):
            done = self._read_direct(offset, out)
        while done < len(out):
            try:
                count = os.preadv(self._descriptor, [out[done:]], offset + done)
            except OverflowError as error:  # a damaged chunk table points beyond any file
                what = f" points to byte {offset + done}"
                raise damaged(self.path, dataset, what, "a place within the file") from error
            except OSError as error:
                raise StoreError(
                    f"{self.path}: reading dataset {dataset!r} at byte {offset + done} failed: {error.strerror}.",
                    "a readable disk",
                    command("dd", f"if={self.path}", "of=/dev/null"),
                ) from error
            if count == 0:
                early = f"{len(out) - done} bytes early"
                raise damaged(self.path, dataset, f" ends at byte {offset + done}, {early}")
            done += count

    def _is_cold(self, offset: int) -> bool:
        """Whether the page at `offset` is not in the page cache."""
        try:
            os.preadv(self._descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError:  # a file system that cannot tell
            self.direct = False
        return False

    def _read_direct(self, offset: int, out: memoryview) -> int:
        """Read past the page cache through an aligned buffer; return the bytes that were read."""
        done = 0
        try:
            # The file that is open, even if another one has its name by now.
            descriptor = os.open(
                f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
            )
        except OSError:
            self.direct = False
            return 0
        try:
            if not hasattr(self._local, "bounce"):
                # Private: a forked child must not write into the parent's buffer.
                private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self._local.bounce = mmap.mmap(-1, _BOUNCE_BYTES, private)
            bounce = memoryview(self._local.bounce)
            while done < len(out):
                skip = (offset + done) % _PAGE
                wanted = min(-(-(len(out) - done + skip) // _PAGE) * _PAGE, _BOUNCE_BYTES)
                count = os.preadv(descriptor, [bounce[:wanted]], offset + done - skip)
                count = min(count - skip, len(out) - done)
                if count <= 0:
                    break
                out[done : done + count] = bounce[skip : skip + count]
                done += count
        except OSError:  # no direct reads here: ordinary ones continue from where these ended
            self.direct = False
        finally:
            os.close(descriptor)
        return done

    def expect(self, offset: int, num_bytes: int) -> None:
        """Ask the kernel to read these bytes into the page cache; does not wait."""
        os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the descriptor; reading afterwards fails."""
        self._close()


class StoredArray:
    """One dataset of one file."""

    # Byte ranges, within the array, of blocks that failed their checksum and were read as zeros. With None such a
    # block raises.
    bad_blocks: set[tuple[int, int]] | None = None

    def __init__(
        self, file: OpenFile, location: Location, digests: Array | None, block_bytes: int
    ) -> None:
        self.location = location  # where its bytes are
        self.shape = location.shape  # `(rows, ...)`
        # native byte order, as it will stand in the caller's buffer
        self.dtype: np.dtype[Any] = location.dtype.newbyteorder("=")
        self.file = file  # its open file
        self._digests = digests
        self._block_bytes = block_bytes
        # One attribute, replaced as a whole: marks of verified blocks hold for the file at that stamp.
        self._trusted = (file.opened_as, bytearray(0 if digests is None else len(digests)))
        self._looked_at = 0.0
        self._swap = location.dtype.byteorder not in "=|" and location.dtype != self.dtype
        self._chunks: OrderedDict[tuple[int, ...], Array] = OrderedDict()
        self._lock = threading.Lock()
        self._library: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        """Return rows `start` to `stop` in a new array."""
        where = f"{self.location.file}: dataset {self.location.dataset!r}"
        if not 0 <= start <= stop <= len(self):  # offsets of a damaged or foreign file
            raise CorruptError(
                f"{where}: rows {start} to {stop} are asked for.",
                f"rows within 0 to {len(self)}",
                "pack the data again",
            )
        num_bytes = (stop - start) * self.location.row_bytes
        if num_bytes > SMALL_BYTES:
            what = f"{where}: reading rows {start} to {stop}"
            require_memory(num_bytes, what, _SMALLER_ROWS, StoreError)
        out = np.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        self.read_into(start, stop, out)
        return out

    def pieces(self, num_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
        """Yield all rows as ranges of at most `num_bytes`, or of one row."""
        return split_range(0, len(self), max(1, num_bytes // max(1, self.location.row_bytes)))

    def read_into(self, start: int, stop: int, out: Array) -> None:
        """Fill `out` (this dtype, C-contiguous, exactly these rows) in the calling thread; blocks."""
        if self.location.layout == "contiguous" and self.location.offset is not None and out.nbytes:
            # The common case without the task list: one small row costs 10 µs instead of 20.
            row_bytes = self.location.row_bytes
            self._read_bytes(
                start * row_bytes, stop * row_bytes, out.reshape(-1).view(np.uint8).data
            )
            return
        for task in self.tasks(start, stop, out):
            task()

    def tasks(self, start: int, stop: int, out: Array) -> Iterator[Task]:
        """Yield independent tasks that together fill `out`: each writes its own part, so any threads may run them.

        `out` is complete when all have returned. After one has raised, the others may still run: the caller must
        wait for them before it uses the buffer for something else.
        """
        if out.nbytes == 0:
            return
        if self.location.layout == "library":
            yield lambda: self._read_library(start, stop, out)
        elif self.location.layout == "chunked":
            yield from self._chunk_tasks(start, stop, out)
        elif self.location.offset is None:
            yield lambda: out.fill(self.location.fill)
        else:
            view = out.reshape(-1).view(np.uint8).data
            row_bytes = self.location.row_bytes
            begin, end = start * row_bytes, stop * row_bytes
            for low, high in split_range(begin, end, PIECE_BYTES):
                yield partial(self._read_bytes, low, high, view[low - begin : high - begin])

    def expect(self, start: int, stop: int) -> None:
        """Ask the kernel to read rows `start` to `stop` ahead; rows past the end are ignored."""
        stop = min(stop, len(self))
        if self.location.offset is not None and start < stop:
            row_bytes = self.location.row_bytes
            self.file.expect(self.location.offset + start * row_bytes, (stop - start) * row_bytes)

    def gather_into(self, indices: Array, out: Array) -> None:
        """Fill `out[k]` with row `indices[k]`, in few reads."""
        if out.nbytes == 0 or len(indices) == 0:
            return
        low, high = int(indices.min()), int(indices.max()) + 1
        if high - low <= _SPAN_WASTE * len(indices):
            np.take(self.read(low, high), indices - low, axis=0, out=out)
            return
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        breaks = (np.flatnonzero(np.diff(ordered) != 1) + 1).tolist()
        runs = [
            (int(ordered[low]), order[low:high])
            for low, high in pairwise((0, *breaks, len(ordered)))
        ]
        if self.location.layout == "contiguous" and self.location.offset is not None:
            self._read_settled(partial(self._gather_runs, runs, out))
            return
        for first, run in runs:
            out[run] = self.read(first, first + len(run))

    def _gather_runs(self, runs: list[tuple[int, Array]], out: Array, verified: bytearray) -> None:
        row_bytes = self.location.row_bytes
        most = max(len(run) for _, run in runs)
        spare = np.empty((most if most > 1 else 0, *self.shape[1:]), self.dtype)
        into, aside = (each.reshape(-1).view(np.uint8).data for each in (out, spare))
        for first, run in runs:
            begin, count = first * row_bytes, len(run)
            if count == 1:
                at = int(run[0]) * row_bytes
                self._fill(begin, begin + row_bytes, into[at : at + row_bytes], verified)
            else:
                num_bytes = count * row_bytes
                self._fill(begin, begin + num_bytes, aside[:num_bytes], verified)
                out[run] = spare[:count]

    # -- contiguous ------------------------------------------------------------------------

    def _read_bytes(self, begin: int, end: int, out: memoryview) -> None:
        """Read bytes `begin` to `end`, counted from the array's first byte, and verify them."""
        if end - begin < _SMALL_READ_BYTES:
            now = time.monotonic()
            if now - self._looked_at < _UNLOOKED_SECONDS:
                self._fill(begin, end, out, self._trusted[1])
                return
            self._looked_at = now
        self._read_settled(partial(self._fill, begin, end, out))

    def _read_settled(self, read: Callable[[bytearray], None]) -> None:
        """Call `read` with the marks of verified blocks, again if the file was written to meanwhile.

        After a rename or a link, which change no bytes, blocks are silently verified once more. So they are after a
        touch, if there are checksums; without them a touch raises as a write does.
        """
        for _ in range(_MOST_REREADS):
            stamp, verified = self._trusted
            read(verified)
            now = self.file.stamp()
            if now == stamp:
                return
            if self._digests is None and now.is_rewritten(stamp):
                raise self._written_to()
            with self._lock:
                if self._trusted[1] is verified:
                    self._trusted = (now, bytearray(len(verified)))
        raise self._written_to()

    def _fill(self, begin: int, end: int, out: memoryview, verified: bytearray) -> None:
        """Read bytes `begin` to `end` into `out`; blocks without a mark are verified and get one."""
        assert self.location.offset is not None
        first, last = begin // self._block_bytes, -(-end // self._block_bytes)
        if self._digests is None or verified.find(0, first, last) == -1:
            self.file.read(self.location.offset + begin, out, self.location.dataset)
        else:
            # Block by block, so that each is hashed while it is still in the cache.
            for low, high in split_range(begin, end, self._block_bytes):
                self._read_block(low, high, out[low - begin : high - begin], verified)
        if self._swap:
            np.frombuffer(out, dtype=self.location.dtype).byteswap(inplace=True)

    def _read_block(self, begin: int, end: int, out: memoryview, verified: bytearray) -> None:
        """Read bytes within one block; an unverified block is read whole and checked first."""
        assert self._digests is not None
        assert self.location.offset is not None
        block = begin // self._block_bytes
        total = len(self) * self.location.row_bytes
        low, high = block * self._block_bytes, min((block + 1) * self._block_bytes, total)
        whole = (begin, end) == (low, high) or verified[block]
        # Two threads may verify the same block at once: both hash the same bytes, and both set the mark to 1.
        data = out if whole else memoryview(bytearray(high - low))
        at = begin if whole else low
        self.file.read(self.location.offset + at, data, self.location.dataset)
        if not verified[block]:
            if xxhash.xxh3_64_intdigest(data) != int(self._digests[block]):
                if self.bad_blocks is None:
                    raise self._bad_block(block, low, high)
                self.bad_blocks.add((low, high))
                out[:] = bytes(len(out))
                return
            verified[block] = 1
        if not whole:
            out[:] = data[begin - low : end - low]

    def _written_to(self) -> StoreError:
        how = "was written to while it was read"
        return changed_data(self.location.file, how, "write to another file")

    def _bad_block(self, block: int, low: int, high: int) -> CorruptError:
        assert self.location.offset is not None
        row_bytes = self.location.row_bytes
        is_rewritten = self.file.stamp().is_rewritten(self.file.opened_as)
        since = " was written to since it was opened, and" if is_rewritten else ""
        return CorruptError(
            f"{self.location.file}: dataset {self.location.dataset!r}{since} fails its checksum in block {block} "
            f"(bytes {self.location.offset + low} to {self.location.offset + high}, "
            f"rows {low // row_bytes} to {-(-high // row_bytes)}).",
            "the bytes that were written",
            "pack again, or copy this file again from a good one",
        )

    # -- chunked ---------------------------------------------------------------------------

    def _chunk_tasks(self, start: int, stop: int, out: Array) -> Iterator[Task]:
        height = self.location.chunk_shape[0]
        grid = math.prod(
            -(-length // chunk)
            for length, chunk in zip(self.shape, self.location.chunk_shape, strict=True)
        )
        if self.location.num_chunks < grid:
            out.fill(self.location.fill)
        for row in range(start // height, -(-stop // height)):
            for chunk in self.location.chunks_at(row):
                yield partial(self._place_chunk, chunk, start, stop, out)

    def _place_chunk(self, chunk: Chunk, start: int, stop: int, out: Array) -> None:
        values = self._decoded(chunk)
        into, of = [], []
        for axis, (origin, size) in enumerate(
            zip(chunk.origin, self.location.chunk_shape, strict=True)
        ):
            low, high = (start, stop) if axis == 0 else (0, self.shape[axis])
            first, last = max(origin, low), min(origin + size, high)
            into.append(slice(first - low, last - low))
            of.append(slice(first - origin, last - origin))
        out[tuple(into)] = values[tuple(of)]

    def _decoded(self, chunk: Chunk) -> Array:
        """Return a chunk's values; the last few chunks are cached, because rows are often read one by one.

        The lock is held for the look-up only. Two threads that miss the same chunk both decode it, which costs
        less than one that waits while the other reads from a slow disk. A chunk that fails is not kept.
        """
        with self._lock:
            if (known := self._chunks.get(chunk.origin)) is not None:
                self._chunks.move_to_end(chunk.origin)
                return known
        values = self._read_chunk(chunk)
        with self._lock:
            self._chunks[chunk.origin] = values
            while len(self._chunks) > 1 and len(self._chunks) * values.nbytes > _CACHED_CHUNK_BYTES:
                self._chunks.popitem(last=False)
        return values

    def _read_chunk(self, chunk: Chunk) -> Array:
        read = partial(self.file.read, dataset=self.location.dataset)
        values = read_chunk(self.location, chunk, read)
        self._check_unwritten()  # a chunked array has no checksums
        return values

    def read_stored(self, chunk: Chunk) -> None:
        """Read a chunk's stored bytes and drop them, to measure what decoding costs."""
        self.file.read(chunk.byte_offset, memoryview(bytearray(chunk.size)), self.location.dataset)

    def _check_unwritten(self) -> None:
        if self.file.stamp().is_rewritten(self.file.opened_as):
            raise self._written_to()

    # -- library ---------------------------------------------------------------------------

    def _read_library(self, start: int, stop: int, out: Array) -> None:
        # h5py has one lock for the whole process; ours keeps the handle from being opened twice.
        location = self.location
        with self._lock:
            # A handle inherited by fork shares its file position and caches with the parent: open again.
            if self._library is None or self._library[0] != os.getpid():
                self._library = (os.getpid(), open_hdf5(location.file))
            try:
                with Waiting(location.file, is_work=True):
                    node = self._library[1][location.dataset]
                    if location.column:
                        out[...] = node.fields(location.column)[start:stop]
                    elif node.dtype.subdtype:
                        out[...] = node[start:stop]
                    else:
                        node.read_direct(out, np.s_[start:stop])
            except (OSError, RuntimeError, KeyError) as error:
                what = f", rows {start} to {stop}: {error}"
                raise damaged(
                    location.file, location.dataset, what, "readable HDF5 data"
                ) from error
        self._check_unwritten()  # there are no checksums, and h5py keeps what it has read


def changed_data(what: Path, how: str, fix: str) -> StoreError:
    """Return the error for data that changed under a job that reads it."""
    return StoreError(
        f"{what} {how}: other samples would follow.",
        "data that stays as it is while a job reads it",
        f"{fix}; a run that was saved goes on with --resume over the old data",
    )


def split_range(begin: int, end: int, piece: int) -> Iterator[tuple[int, int]]:
    """Cut `begin` to `end` at multiples of `piece`."""
    while begin < end:
        cut = min((begin // piece + 1) * piece, end)
        yield begin, cut
        begin = cut
