"""Opening a store and reading samples from it, by many threads at once.

Enters: a store folder or any plain HDF5 file, field names, row numbers, optionally the caller's
buffers. Leaves: rows. Costs: opening reads the manifest only (a plain file: its directory);
shards open on first use; nothing of the data is kept but offsets and window ends.

A `Store` may be shared by threads and is pickled by its path, so it crosses to worker processes.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np

from stoker.address import as_url, shown
from stoker.arguments import explained
from stoker.bounds import require_memory
from stoker.display import command, table_html
from stoker.errors import CorruptError, InputError, StokerError, StoreError, refuse_special
from stoker.stalls import Waiting
from stoker.store.arrays import Stamp, StoredArray, Task, changed_data
from stoker.store.fields import Array, offsets_of
from stoker.store.manifest import MANIFEST_NAME, FieldInfo, Manifest, find_store, read_manifest
from stoker.store.plain import Selection, describe_plain_file
from stoker.store.remote import Mirror, update_mirror
from stoker.store.shard import Shard
from stoker.store.zarr import is_zarr, open_zarr

_MOST_NOTES = 100
_INLINE_BYTES = 4 << 20
"""Reads below this run in the caller's thread: a hand-over costs more than it saves."""
_HELD_SHARDS = 64  # shards that are opened with the store: a process may have 1,024 open files
_TRIES = 100


@explained("stoker.open_store('data.h5')")
def open_store(
    path: str | Path,
    threads: int | None = None,
    checksum: str = "",
    group: str | None = None,
    fields: Sequence[str] | None = None,
    rows: int | None = None,
) -> Store:
    """Open a store folder, or any plain HDF5 file or Zarr folder with arrays of equal first dimension.

    While another process packs the store anew, this opens the old one or the new one, never a mixture.

    Args:
        path: The folder or file; or the URL of a folder (http, s3, whatever fsspec knows), whose
            shards are copied into a local cache when they are first used.
        threads: Reader threads; by default one per usable core, at most 16.
        checksum: Checksum that the manifest must have; "" accepts any.
        group: Open only the arrays in this group of an HDF5 file or Zarr folder, such as "train", by their names there.
        fields: Open only these arrays of such a file or folder; they must have the same number of rows.
        rows: Open only arrays with this many rows of such a file or folder.

    Raises:
        StoreError: There is no such store, or which dimension of a plain file counts samples is not clear; the
            error lists the candidates.
    """
    named = (fields,) if isinstance(fields, str) else tuple(fields or ())
    chosen = Selection(group, named, rows)
    if (url := as_url(path)) is not None:
        folder, notes = update_mirror(url)
        return assemble_store(folder, read_manifest(folder), threads, notes)
    with Waiting(path, is_work=True):
        return _open_here(Path(path), threads, checksum, chosen)


def _open_here(path: Path, threads: int | None, checksum: str, chosen: Selection) -> Store:
    """Open a store, an HDF5 file or a Zarr folder of this machine."""
    refuse_special(path, "the store", StoreError)
    place = path.absolute()  # the caller may change the current folder
    if path.is_file() and path.name != "store.json":
        manifest, paths, aside, notes = describe_plain_file(path, chosen)
        shard = Shard(place, None, _datasets(manifest.fields), manifest.block_bytes, paths=paths)
        return Store(place, manifest, [shard], threads, notes, str(path), aside, chosen)
    if is_zarr(path) and not (path / MANIFEST_NAME).exists():
        (manifest, _, aside, notes), shard = open_zarr(place, chosen)
        return Store(place, manifest, [shard], threads, notes, str(path), aside, chosen)
    if chosen != Selection():
        given = [f"{name}={value!r}" for name, value in vars(chosen).items() if value]
        raise InputError(
            f"{', '.join(given)} with {shown(path)}.",
            "group=, fields= and rows= with an HDF5 file or Zarr folder; the parts of a store are its splits",
            f"leave {given[0].partition('=')[0]} out",
        )
    folder = path.parent if path.name == "store.json" else path
    store = _open_folder(folder, threads)
    if checksum and store.manifest.checksum != checksum:
        store.close()
        how = "was packed again while a job reads it"
        raise changed_data(folder, how, "pack into another folder")
    return store


def _open_folder(path: Path, threads: int | None) -> Store:
    """Open manifest and shards of one and the same store.

    If the kernel cannot exchange two folders in one step, the store is missing for some microseconds between
    two renames. So a store that is gone or has changed since the look-up is looked up again.
    """
    for attempt in range(_TRIES):
        folder = find_store(path)
        before = _manifest_stamp(folder)
        try:
            store = assemble_store(folder.absolute(), read_manifest(folder), threads)
        except StoreError:
            now = find_store(path)
            if (now == folder and _manifest_stamp(now) == before) or attempt == _TRIES - 1:
                raise
            continue
        # A shard that is missing or damaged raises when it is read.
        for shard in store.shards[:_HELD_SHARDS]:
            shard.hold()
        if _manifest_stamp(folder) == before:
            break
        store.close()
    if store.name == str(folder.absolute()):  # no address of a remote store
        store.name = str(folder)
    return store


def _manifest_stamp(folder: Path) -> tuple[int, ...] | None:
    """Return the identity of the manifest's file, which changes when the store is exchanged."""
    try:
        return Stamp.of((folder / MANIFEST_NAME).stat())[:3]
    except OSError:
        return None


def assemble_store(
    folder: Path, manifest: Manifest, threads: int | None = None, notes: Iterable[str] = ()
) -> Store:
    """Make a `Store` of the shards in `folder` that `manifest` names."""
    datasets = _datasets(manifest.fields)
    mirror = Mirror.of(folder)
    shards = []
    for info in manifest.shards:
        fetch = None if mirror is None else partial(mirror.open_shard, info)
        shards.append(Shard(folder / info.file, info, datasets, manifest.block_bytes, fetch))
        if mirror is not None:
            mirror.adopt(shards[-1])
    name = None if mirror is None else mirror.remote.name
    return Store(folder, manifest, shards, threads, notes, name)


def _described(info: FieldInfo | None) -> str:
    if info is None:
        return "none"
    window = f", windows of {info.window}" if info.window else ""
    return f"{info.kind} {np.dtype(info.dtype)} {tuple(info.shape)}{window}"


def join_stores(stores: Sequence[Store]) -> Store:
    """Return one store over the samples of several with the same fields, one store after another.

    The caller keeps the given stores, and must keep them open.
    """
    first = stores[0]
    for store in stores[1:]:
        if store.fields != first.fields:
            differ = sorted({*first.fields, *store.fields})
            name = next(n for n in differ if first.fields.get(n) != store.fields.get(n))
            raise InputError(
                f"{store.name} and {first.name} differ in the field {name!r}: "
                f"{_described(store.fields.get(name))} and {_described(first.fields.get(name))}.",
                "stores with the same fields, dtypes and shapes",
            )
    manifest = Manifest(
        num_samples=sum(store.num_samples for store in stores),
        fields=first.fields,
        shards=[info for store in stores for info in store.manifest.shards],
        attributes=_shared_attributes(stores),
    )
    shards = [shard for store in stores for shard in store.shards]
    notes = [note for store in stores for note in store.notes]
    name = " + ".join(store.name for store in stores)
    joined = Store(first.path, manifest, shards, first.threads, notes, name)
    joined.made_by = join_stores, (tuple(stores),)
    return joined


def _shared_attributes(stores: Sequence[Store]) -> dict[str, Any]:
    """Return the class names of all stores, and the channels of their pictures.

    Raises:
        InputError: A number is another class in another store, or pictures have other channels.
    """
    shared: dict[str, Any] = {}
    named: dict[int, tuple[str, str]] = {}
    for store in stores:
        attributes = store.manifest.attributes
        for number, name in enumerate(attributes.get("classes") or ()):
            known, where = named.setdefault(number, (name, store.name))
            if name != known:
                raise InputError(
                    f"class {number} is {known!r} in {where} and {name!r} in {store.name}.",
                    "stores whose classes have the same names in the same order",
                    "one store of both, packed from a folder that holds all of them",
                )
        channels = attributes.get("channels")
        if channels is not None and shared.setdefault("channels", channels) != channels:
            raise InputError(
                f"the pictures of {store.name} have {channels} channels, and others {shared['channels']}.",
                "stores of the same channels",
                "one of them packed again with --channels of the other",
            )
    return shared | ({"classes": [name for name, _ in named.values()]} if named else {})


def _datasets(fields: Mapping[str, FieldInfo]) -> dict[str, tuple[str, list[int]]]:
    """Return the datasets of a shard with the dtype and row shape each must have."""
    return {
        name + part: (info.dtype, info.shape) if dtype is None else (dtype, [])
        for name, info in fields.items()
        for part, dtype in info.parts.items()
    }


@dataclass(frozen=True)
class VerifyReport:
    """Result of `Store.verify`. `problems` is empty for a sound store."""

    num_bytes: int
    num_blocks: int
    problems: tuple[str, ...]
    checksummed: bool


@explained("stoker.open_store('data.h5')", "a Store is what open_store returns")
class Store:
    """Samples `0 .. num_samples - 1`, in shard order. Made by `open_store`.

    Attributes:
        path: The folder or file; of a store behind a URL, its copy in the cache.
        name: What to call it: the path, or the URL without a password.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        shards: list[Shard],
        threads: int | None,
        notes: Iterable[str],
        name: str | None = None,
        aside: Mapping[str, str] | None = None,
        chosen: Selection = Selection(),  # noqa: B008
    ) -> None:
        self.path = path
        self._chosen = chosen
        self.name = name or str(path)
        self.manifest = manifest
        self.shards = shards
        self._aside = dict(aside or {})
        shown = list(self._aside.values())[:_MOST_NOTES]
        if len(self._aside) > len(shown):
            shown.append(f"{len(self._aside) - len(shown):,} more datasets are left aside")
        self.notes = (*shown, *notes)
        self.threads = threads or min(16, len(os.sched_getaffinity(0)))
        self._starts = [0, *accumulate(info.num_samples for info in manifest.shards)]
        self._damaged: dict[tuple[str, int, tuple[int, int]], list[int]] = {}
        self._pool: tuple[int, ThreadPoolExecutor] | None = None
        # Function and arguments that open it in another process; None for `open_store` with its path.
        self.made_by: tuple[Callable[..., Store], tuple[Any, ...]] | None = None

    num_samples = property(lambda self: self.manifest.num_samples, doc="Samples in the store.")
    fields = property(lambda self: self.manifest.fields, doc="Field name to `FieldInfo`.")

    def __len__(self) -> int:
        return self.manifest.num_samples

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {value}" for name, value in self._summary()[1:])
        return f"Store({self.name!r}: {self.num_samples:,} samples; {fields})"

    def _repr_html_(self) -> str:
        return table_html(f"Store {self.name}", self._summary())

    def _summary(self) -> list[tuple[str, str]]:
        described = [
            (name, f"{info.kind} {tuple(info.shape)} {np.dtype(info.dtype).name}")
            for name, info in self.fields.items()
        ]
        return [("samples", f"{self.num_samples:,}"), *described]

    def __reduce__(self) -> tuple[Callable[..., Store], tuple[Any, ...]]:
        if self.made_by is not None:
            return self.made_by
        checksum = "" if self.path.is_file() else self.manifest.checksum
        chosen = self._chosen
        given = chosen.group, chosen.fields, chosen.rows
        return open_store, (str(self.path), self.threads, checksum, *given)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close files and end the reader threads."""
        if self._pool is not None and self._pool[0] == os.getpid():
            self._pool[1].shutdown()
        self._pool = None
        for shard in self.shards:
            shard.close()

    def left_aside(self, name: str) -> str | None:
        """Return why a dataset of the file is not a field; None if it is one, or is not there."""
        return self._aside.get(name)

    def check_unchanged(self) -> None:
        """Raise when a file of the store is no longer the one that was opened; reads nothing."""
        for shard in self.shards:
            shard.check_unchanged()

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, of all shards."""
        pairs = zip(self.manifest.shards, self.shards, strict=True)
        return sum(info.size_bytes if info.checksum else _size(each.path) for info, each in pairs)

    @property
    def _is_packed(self) -> bool:
        """Whether stoker wrote it: other files have no checksums."""
        return all(info.checksum for info in self.manifest.shards)

    # -- dense -----------------------------------------------------------------------------

    def read_rows(self, field: str, start: int, stop: int, out: Array | None = None) -> Array:
        """Read rows `start` to `stop` of a dense field, with all reader threads.

        Args:
            field: A dense field.
            start: First row.
            stop: One past the last row.
            out: Filled when given: this field's dtype, shape `(stop - start, ...)`, C-contiguous
                (a pinned tensor's `.numpy()` for instance).
        """
        self._check_range(start, stop)
        out = self._buffer(field, stop - start, out)
        tasks: list[Task] = []
        for number, low, high in self._spans(start, stop):
            base = self._starts[number]
            target = out[low - start : high - start]
            tasks.extend(self.shards[number].arrays[field].tasks(low - base, high - base, target))
        self._run(tasks, out.nbytes)
        return out

    def gather(self, field: str, indices: Array, out: Array | None = None) -> Array:
        """Read any rows of a dense field, in the order of `indices`."""
        wanted = np.asarray(indices)
        if wanted.ndim != 1 or (len(wanted) and wanted.dtype.kind not in "iu"):
            raise InputError(
                f"indices of dtype {wanted.dtype}, shape {wanted.shape}.", "1-D integers"
            )
        wanted = wanted.astype(np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self.num_samples):
            raise InputError(
                f"indices from {wanted.min()} to {wanted.max()}.", f"0 to {self.num_samples - 1}"
            )
        out = self._buffer(field, len(wanted), out)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1

        def gather_from(number: int, where: Array) -> None:
            array = self.shards[number].arrays[field]
            local = wanted[where] - self._starts[number]
            if len(where) == len(out):
                array.gather_into(local, out)
            else:
                part = np.empty((len(where), *array.shape[1:]), dtype=array.dtype)
                array.gather_into(local, part)
                out[where] = part

        tasks: list[Task] = [
            partial(gather_from, int(number), np.flatnonzero(numbers == number))
            for number in np.unique(numbers)
        ]
        self._run(tasks, out.nbytes)
        return out

    # -- ragged ----------------------------------------------------------------------------

    def read_ragged(self, field: str, start: int, stop: int) -> tuple[Array, Array]:
        """Return `(values, offsets)` of samples `start` to `stop`; offsets begin at 0."""
        self._check_range(start, stop)
        info = self._field(field, "ragged")
        pieces = [self._ragged_piece(field, *span) for span in self._spans(start, stop)]
        if len(pieces) == 1:
            array, offsets = pieces[0]
            first = int(offsets[0])
            return array.read(first, int(offsets[-1])), offsets - first
        lengths = [np.diff(offsets) for _, offsets in pieces]
        joined = offsets_of(np.concatenate(lengths) if lengths else np.empty(0, np.int64))
        values = np.empty(
            (int(joined[-1]), *info.shape), dtype=np.dtype(info.dtype).newbyteorder("=")
        )
        tasks: list[Task] = []
        filled = 0
        for array, offsets in pieces:
            first, last = int(offsets[0]), int(offsets[-1])
            tasks.extend(array.tasks(first, last, values[filled : filled + last - first]))
            filled += last - first
        self._run(tasks, values.nbytes)
        return values, joined

    def read_values(self, field: str, index: int) -> Array:
        """Return the values of one sample of a ragged field: one read, no offsets."""
        self._check_range(index, index + 1)
        self._field(field, "ragged")
        number = bisect.bisect_right(self._starts, index) - 1
        array, offsets = self._ragged_piece(field, number, index, index + 1)
        return array.read(int(offsets[0]), int(offsets[1]))

    def _ragged_piece(
        self, field: str, number: int, low: int, high: int
    ) -> tuple[StoredArray, Array]:
        """Return the values' array of one shard and the offsets of samples `low` to `high` in it."""
        shard, base = self.shards[number], self._starts[number]
        offsets = shard.whole(f"{field}/offsets")[low - base : high - base + 1]
        values = shard.arrays[f"{field}/values"]
        if not 0 <= offsets[0] <= offsets[-1] <= len(values):
            raise CorruptError(
                f"{shard.path}: field {field!r} has offsets {offsets[0]} to {offsets[-1]}.",
                f"offsets within 0 to {len(values)}",
                "pack the data again",
            )
        return values, offsets

    def tolerating(self, fields: Sequence[str]) -> Store | None:
        """Open this store once more; there, damaged blocks of these ragged fields read as zeros.

        `damaged` says which samples they belong to. None for files without checksums: nothing fails in them.
        """
        if not self._is_packed:
            return None
        opened, arguments = self.__reduce__()
        again = opened(*arguments)
        for shard in again.shards:
            shard.tolerated = {f"{field}/values": set() for field in fields}
            shard.forget()  # shards of joined stores may be open
        return again

    def damaged(self, field: str) -> set[int]:
        """Return the samples of a ragged field that lie in blocks that failed so far; see `tolerating`."""
        found: set[int] = set()
        for shard, base in zip(self.shards, self._starts, strict=False):
            for block in sorted(shard.tolerated.get(f"{field}/values", ())):
                key = (field, base, block)
                if key not in self._damaged:
                    offsets = shard.whole(f"{field}/offsets")
                    row_bytes = shard.arrays[f"{field}/values"].location.row_bytes
                    low, high = np.array(block) // row_bytes
                    hit = np.flatnonzero((offsets[:-1] < high) & (offsets[1:] > low)) + base
                    self._damaged[key] = hit.tolist()
                found.update(self._damaged[key])
        return found

    def read_text(self, field: str, index: int) -> str:
        """Return one sample of a text field."""
        if self._field(field, "ragged").encoding != "utf8":
            raise InputError(
                f"field {field!r} is not text.",
                "a ragged field with encoding utf8",
                f"store.read_ragged({field!r}, {index}, {index + 1})",
            )
        return bytes(self.read_values(field, index)).decode()

    # -- series ----------------------------------------------------------------------------

    def read_window(self, field: str, index: int) -> Array:
        """Return sample `index`'s window of a series, `(window, features)`."""
        self._check_range(index, index + 1)
        info = self._field(field, "series")
        number = bisect.bisect_right(self._starts, index) - 1
        shard = self.shards[number]
        end = int(shard.whole(f"{field}/ends")[index - self._starts[number]])
        assert info.window is not None
        return shard.arrays[f"{field}/rows"].read(end - info.window, end)

    def read_series(self, field: str, part: str, shard: int = 0) -> Array:
        """Return `rows`, `time`, `gap` or `ends` of one shard's series, entirely."""
        parts = [name.removeprefix("/") for name in self._field(field, "series").parts]
        if part not in parts:
            raise InputError(f"the series {field!r} has no part {part!r}.", ", ".join(parts))
        array = self.shards[shard].arrays[f"{field}/{part}"]
        out = np.empty(array.shape, dtype=array.dtype)
        self._run(list(array.tasks(0, len(array), out)), out.nbytes)
        return out

    # -- all -------------------------------------------------------------------------------

    def read_sample(self, index: int) -> dict[str, Any]:
        """Return one sample of every field: rows, values, text or windows."""
        sample: dict[str, Any] = {}
        for name, info in self.fields.items():
            if info.kind == "dense":
                sample[name] = self.read_rows(name, index, index + 1)[0]
            elif info.kind == "series":
                sample[name] = self.read_window(name, index)
            elif info.encoding == "utf8":
                sample[name] = self.read_text(name, index)
            else:
                sample[name] = self.read_values(name, index)
        return sample

    def verify(self, advance: Callable[[int], None] = lambda _: None) -> VerifyReport:
        """Read every byte against its checksum and collect all problems; `advance` gets the bytes of each read."""
        problems: list[str] = []
        num_bytes = num_blocks = 0
        for shard in self.shards:
            shard.forget()  # verify all blocks again: the disk may have changed since
            try:
                arrays = shard.arrays
            except StokerError as error:
                problems.append(error.given)
                continue
            for array in arrays.values():
                for low, high in array.pieces():
                    try:
                        piece = array.read(low, high)
                    except StokerError as error:
                        problems.append(error.given)
                        continue
                    num_bytes += piece.nbytes
                    num_blocks += 1
                    advance(piece.nbytes)
            problems += self._index_problems(shard)
        return VerifyReport(num_bytes, num_blocks, tuple(dict.fromkeys(problems)), self._is_packed)

    def _index_problems(self, shard: Shard) -> list[str]:
        """Compare offsets and window ends of a shard with the rows that they point to."""
        problems = []
        for name, info in self.fields.items():
            kind, into = {"ragged": ("offsets", "values"), "series": ("ends", "rows")}.get(
                info.kind, ("", "")
            )
            if not kind:
                continue
            try:
                index = shard.whole(f"{name}/{kind}")
            except StokerError as error:
                problems.append(error.given)
                continue
            num_rows = len(shard.arrays[f"{name}/{into}"])
            least = info.window or 0
            ok = not len(index) or (least <= index.min() and index.max() <= num_rows)
            if ok and kind == "offsets":
                ok = index[0] == 0 and index[-1] == num_rows and bool((np.diff(index) >= 0).all())
            if not ok:
                problems.append(
                    f"{shard.path}: field {name!r} has {kind} outside of its {num_rows} {into}"
                )
        return problems

    # -- the work --------------------------------------------------------------------------

    def _spans(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Cut a row range at shard edges: `(shard, first row, last row)` in store numbers."""
        spans = []
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            high = min(stop, self._starts[number + 1])
            if high > start:
                spans.append((number, start, high))
            start, number = high, number + 1
        return spans

    def _run(self, tasks: list[Task], num_bytes: int) -> None:
        """Run read tasks, and raise the first failure after all have ended.

        All are waited for, also after a failure: the caller may free or reuse the buffer as soon as this returns.
        """
        if len(tasks) < 2 or num_bytes < _INLINE_BYTES or self.threads == 1:
            for task in tasks:
                task()
            return
        # Threads do not survive a fork, so the pool belongs to one process.
        if self._pool is None or self._pool[0] != os.getpid():
            pool = ThreadPoolExecutor(self.threads, thread_name_prefix="stoker-read")
            self._pool = (os.getpid(), pool)
        futures = [self._pool[1].submit(task) for task in tasks]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def _field(self, name: str, kind: str) -> FieldInfo:
        info: FieldInfo | None = self.fields.get(name)
        if info is None or info.kind != kind:
            known = ", ".join(f"{other} ({about.kind})" for other, about in self.fields.items())
            given = f"{self.path} has no {kind} field {name!r}."
            raise InputError(given, known or "no fields", command("stoker", "inspect", self.path))
        return info

    def _buffer(self, field: str, rows: int, out: Array | None) -> Array:
        info = self._field(field, "dense")
        dtype = np.dtype(info.dtype).newbyteorder("=")
        shape = (rows, *info.shape)
        if out is None:
            num_bytes = math.prod(shape) * dtype.itemsize
            what = f"reading {rows:,} rows of field {field!r}"
            require_memory(num_bytes, what, "read fewer rows", StoreError)
            return np.empty(shape, dtype=dtype)
        is_usable = out.flags.c_contiguous and out.flags.writeable
        if out.shape != shape or out.dtype != dtype or not is_usable:
            raise InputError(
                f"the buffer for field {field!r} is {out.dtype} {out.shape}.",
                f"writable, C-contiguous {dtype} {shape}",
                f"np.empty({shape}, np.{dtype})",
            )
        return out

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.num_samples:
            raise InputError(
                f"samples {start} to {stop} of {self.path}.",
                f"a range within 0 to {self.num_samples}",
            )


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)
