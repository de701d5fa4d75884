"""One HDF5 file of a store, opened on first use and compared with its manifest entry.

Enters: a path and, for a packed store, its `ShardInfo`. Leaves: `StoredArray`s by dataset path,
or an error that says whether the shard is missing, cut short, or another one. Costs: about 1 ms
and 0.1 ms per dataset, once.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import xxhash

from stoker.errors import CorruptError, InputError, StoreError, unwritable
from stoker.ownership import always, writing
from stoker.store.arrays import OpenFile, Stamp, StoredArray, changed_data
from stoker.store.fields import Array, Dense, FieldData, Ragged, Series, ShardData, attribute_of
from stoker.store.hdf5 import Location, check_bounds, find_node, locate, named_damage, open_hdf5
from stoker.store.manifest import BLOCK_BYTES, FieldInfo, ShardInfo


class _OpenShards:
    """The local shards that were opened, oldest first: a store may have more than a process may have open files."""

    def __init__(self) -> None:
        self._shards: deque[weakref.ref[Shard]] = deque()
        self._lock = threading.Lock()

    def add(self, shard: Shard) -> None:
        """Remember a shard that is about to be opened; release the oldest beyond half of the limit of this process."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = max(1, limit // 2) if limit != resource.RLIM_INFINITY else len(self._shards) + 1
        with self._lock:
            self._shards.append(weakref.ref(shard))
            for _ in range(len(self._shards) - most):
                oldest = self._shards.popleft()()
                if oldest is not None:  # one that is being opened again is in the queue again
                    oldest.release()


_OPEN = _OpenShards()


class Shard:
    """A shard, opened on first use; thread-safe.

    A file that cannot be opened raises on every use until it can be: no failure is remembered. `close` while another
    thread reads makes that read fail; `release` lets it finish.
    """

    def __init__(
        self,
        path: Path,  # the HDF5 file
        # its manifest entry; None for a plain file, which then has no checksums
        info: ShardInfo | None,
        # dataset paths to expose, with the dtype and row shape each must have
        datasets: Mapping[str, tuple[str, list[int]]],
        block_bytes: int,  # bytes under one checksum
        # fetches the file of a remote store to `path` and returns an open descriptor of it; its argument checks a
        # fetched file
        fetch: Callable[[Callable[[Path], None]], int] | None = None,
        # for a plain file: path of each dataset, if not its own name
        paths: Mapping[str, str] | None = None,
        # for data that is not in HDF5: makes the arrays, instead of the other arguments
        make: Callable[[], dict[str, StoredArray]] | None = None,
    ) -> None:
        self.path = path
        self._paths = paths or {}
        self.opened_at = 0.0
        self._fetch, self._make = fetch, make
        self.info = info
        self._datasets = datasets
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._file: OpenFile | None = None
        self._stamp: Stamp | None = None
        self._arrays: dict[str, StoredArray] | None = None
        self._cached: dict[str, Array] = {}
        # Datasets whose damaged blocks are read as zeros, each with the byte ranges, within the dataset, of those that
        # have failed so far. Holds for arrays that are made afterwards (`forget`).
        self.tolerated: dict[str, set[tuple[int, int]]] = {}

    @property
    def arrays(self) -> dict[str, StoredArray]:
        """The datasets by path; opens the file on first use."""
        if (arrays := self._arrays) is None:  # a local name: `release` may run in between
            with self._lock:
                if (arrays := self._arrays) is None:
                    arrays = self._open()
                    for dataset, blocks in self.tolerated.items():
                        arrays[dataset].bad_blocks = blocks
                    self._arrays = arrays
        return arrays

    def whole(self, dataset: str) -> Array:
        """Return a small dataset (offsets, ends) entirely, as int64, kept in memory."""
        if (known := self._cached.get(dataset)) is None:
            array = self.arrays[dataset]
            # Offsets of a plain file may have 32 bits.
            values = array.read(0, len(array)).astype(np.int64, copy=False)
            known = self._cached.setdefault(dataset, values)
        return known

    def check_unchanged(self) -> None:
        """Raise when the file is no longer the one that was opened; nothing is read.

        Reads do not notice a file that takes its name later: the open descriptor still reads the old one.
        """
        if self._stamp is None:
            return
        try:
            now = Stamp.of(self.path.stat())
        except OSError as error:
            raise self._changed(error.strerror or "it is gone") from error
        if now.inode != self._stamp.inode or now.is_rewritten(self._stamp):
            raise self._changed("replaced" if now.inode != self._stamp.inode else "written to")

    def _changed(self, how: str) -> StoreError:
        how = f"has changed since it was opened ({how})"
        return changed_data(self.path, how, "pack into another folder")

    def release(self) -> bool:
        """Let go of the file without disturbing reads under way; False if it is not open, or being opened.

        The descriptor closes when the last read that uses it ends. Does not wait.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            was_open = self._file is not None
            self._file, self._arrays = None, None
            return was_open
        finally:
            self._lock.release()

    def hold(self) -> None:
        """Open the file without reading it, where it is there and has the right size.

        Later reads get the bytes of this file, also after another store took its place.
        """
        if self.info is None or self._fetch is not None or self._file is not None:
            return
        with contextlib.suppress(StoreError):
            file = OpenFile(self.path)
            if file.opened_as.num_bytes == self.info.size_bytes:
                self._file, self._stamp = file, file.opened_as

    def forget(self) -> None:
        """Check every block again when it is next read; the file stays open."""
        with self._lock:
            self._arrays, self._cached = None, {}

    def close(self) -> None:
        """Release the file; the next use opens it again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file, self._arrays, self._cached = None, None, {}

    def _open(self) -> dict[str, StoredArray]:
        if self._make is not None:
            return self._make()
        if self._fetch is not None:
            self._file = OpenFile(self.path, self._fetch(self._check_copy))
        elif self._file is None:
            self._check_file()
            if self.info is not None:  # what is opened again is held against the manifest
                _OPEN.add(self)
            self._file = OpenFile(self.path)
            self._stamp = self._file.opened_as
        file = self._file
        self.opened_at = time.monotonic()
        digests: Mapping[str, Array] = {}
        if self.info is None:
            with open_hdf5(self.path) as hdf5, named_damage(self.path):
                placed = {
                    name: locate(self.path, *find_node(hdf5, self._paths.get(name, name)))
                    for name in self._datasets
                }
        else:
            placed = {name: self._place(self.info, name) for name in self._datasets}
            digests = self._read_digests(self.info, file, placed)
        return {
            name: StoredArray(file, location, digests.get(name), self._block_bytes)
            for name, location in placed.items()
        }

    def _check_copy(self, path: Path) -> None:
        with contextlib.closing(Shard(path, self.info, self._datasets, self._block_bytes)) as copy:
            for array in copy.arrays.values():
                for low, high in array.pieces():
                    array.read(low, high)  # against its checksums

    def _check_file(self) -> None:
        if self.info is None:
            return
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise StoreError(
                f"shard {self.path} of the store cannot be found: {error.strerror}.",
                f"every shard beside {self.path.parent / 'store.json'}",
                "copy the whole folder, or pack again",
            ) from error
        if size != self.info.size_bytes:
            raise CorruptError(
                f"shard {self.path} has {size} bytes.",
                f"{self.info.size_bytes}, as the manifest says",
                "copy the shard again, or pack again",
            )

    def _place(self, info: ShardInfo, name: str) -> Location:
        """Return where a dataset lies by the sealed manifest, without asking the HDF5 library."""
        dtype, shape = self._datasets[name]
        location = Location(
            file=self.path,
            dataset=name,
            shape=(info.rows[name], *shape),
            dtype=np.dtype(dtype),
            layout="contiguous",
            offset=info.offsets[name],
        )
        check_bounds(location, info.size_bytes)
        return location

    def _read_digests(
        self, info: ShardInfo, file: OpenFile, placed: Mapping[str, Location]
    ) -> dict[str, Array]:
        digests = {}
        for name, location in placed.items():
            num_bytes = location.shape[0] * location.row_bytes
            digests[name] = np.empty(-(-num_bytes // self._block_bytes), dtype="<u8")
            offset = info.offsets[f"{CHECKSUM_GROUP}/{name}"]
            if offset is not None:
                file.read(offset, digests[name].view(np.uint8).data, f"{CHECKSUM_GROUP}/{name}")
        if combine_digests(digests) != info.checksum:
            raise CorruptError(
                f"{self.path} is not the shard that the manifest describes (its checksums differ).",
                f"the shard {info.label!r}",
                "copy the whole folder from one place, or pack again",
            )
        return digests


def load_shard(shard: Shard, fields: Mapping[str, FieldInfo]) -> dict[str, FieldData]:
    """Read a whole shard, verifying its checksums on the way."""
    return {name: _load(shard, name, info) for name, info in fields.items()}


def _load(shard: Shard, name: str, info: FieldInfo) -> FieldData:
    stored = {attribute_of(part): shard.arrays[name + part] for part in info.parts}
    parts: dict[str, Any] = {part: array.read(0, len(array)) for part, array in stored.items()}
    columns = None if info.columns is None else tuple(info.columns)
    if info.kind == "dense":
        return Dense(**parts, columns=columns)
    if info.kind == "ragged":
        return Ragged(**parts, encoding=info.encoding)
    timed = {"time": None, "gap": None} | parts
    window, duration_ns = cast(int, info.window), info.duration_ns
    return Series(**timed, window=window, columns=columns, duration_ns=duration_ns)


# -- writing ----------------------------------------------------------------------------------------
# Whole or absent: contiguous, uncompressed, aligned datasets that h5py and h5ls read as they are, with block
# checksums under /_checksums. Costs one copy to the page cache, one hash pass (about 10 GB/s), one fsync.


CHECKSUM_GROUP = "_checksums"


def write_shard(
    path: Path, fields: ShardData, label: str, block_bytes: int = BLOCK_BYTES
) -> ShardInfo:
    """Write one shard atomically and return its manifest entry. Blocking; not thread-safe per path."""
    num_samples = count_samples(fields)
    arrays = {
        name: array for field, data in fields.items() for name, array in data.arrays(field).items()
    }
    digests = {name: block_digests(array, block_bytes) for name, array in arrays.items()}
    try:
        # 'earliest' stays readable for every HDF5 since 1.8; 4 KiB alignment leaves direct reads open.
        with (
            writing(path, always) as temporary,
            h5py.File(
                temporary,
                "x",
                libver="earliest",
                alignment_threshold=4096,
                alignment_interval=4096,
                track_order=False,
            ) as file,
        ):
            file.attrs["num_samples"] = num_samples
            for name, array in arrays.items():
                for place, values in (
                    (name, array),
                    (f"{CHECKSUM_GROUP}/{name}", digests[name]),
                ):
                    group = place.rpartition("/")[0]
                    if group and group not in file:
                        file.create_group(group, track_order=False)
                    # The same data gives the same bytes, whatever `h5py.get_config().track_order` is.
                    file.create_dataset(place, data=values, track_times=False, track_order=False)
            for name, data in fields.items():
                _describe(file[name], FieldInfo.of(data), data)
            file.flush()
            offsets = {
                name: file[name].id.get_offset()
                for name in (*arrays, *(f"{CHECKSUM_GROUP}/{name}" for name in arrays))
            }
    except OSError as error:
        raise unwritable(path, error) from error
    return ShardInfo(
        file=path.name,
        label=label,
        num_samples=num_samples,
        size_bytes=path.stat().st_size,
        checksum=combine_digests(digests),
        rows={name: len(array) for name, array in arrays.items()},
        offsets=offsets,
    )


def count_samples(fields: ShardData) -> int:
    """Return the number of samples all fields agree on."""
    counts = {name: data.num_samples for name, data in fields.items()}
    if not counts:
        raise InputError("a shard was given no fields.", "at least one field")
    if len(set(counts.values())) != 1:
        raise InputError(
            f"the fields have different numbers of samples: {counts}.", "equal numbers"
        )
    for name in counts:
        if name.startswith("_") or "/" in name or name in {"", ".", ".."} or "\0" in name:
            raise InputError(
                f"{name!r} is not a field name.", "a name without / that does not begin with _"
            )
    return next(iter(counts.values()))


def _describe(node: h5py.Dataset | h5py.Group, info: FieldInfo, data: object) -> None:
    """Write attributes that explain the file to readers without stoker."""
    node.attrs["kind"] = info.kind
    if info.columns is not None:
        # Variable-length strings live in the file's heap, so thousands of names fit
        # where an attribute is capped at 64 KiB.
        node.attrs["columns"] = (
            "\n".join(info.columns) if len("".join(info.columns)) < 60_000 else "see store.json"
        )
    if isinstance(data, Series):
        node.attrs["window"] = data.window
        if data.duration_ns is not None:
            node.attrs["duration_ns"] = data.duration_ns
            node.attrs["time_unit"] = "nanoseconds since 1970-01-01, open of the bar"


def block_digests(array: Array, block_bytes: int) -> Array:
    """Return one 64-bit digest per block of the array's bytes."""
    view = array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
    starts = range(0, array.nbytes, block_bytes)
    digests = (xxhash.xxh3_64_intdigest(view[start : start + block_bytes]) for start in starts)
    return np.fromiter(digests, dtype="<u8", count=len(starts))


def combine_digests(digests: dict[str, Array]) -> str:
    """Return one digest over the block digests of all arrays, by name."""
    total = xxhash.xxh3_64()
    for name in sorted(digests):
        total.update(name.encode() + b"\0")
        total.update(np.ascontiguousarray(digests[name], dtype="<u8").tobytes())
    return total.hexdigest()
