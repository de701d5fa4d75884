"""Where the bytes of an HDF5 dataset lie, so that they can be read without the HDF5 library.

Enters: an open h5py dataset. Leaves: a frozen `Location`: contiguous bytes at an offset, a table
of chunks, or "library" with the reason. Costs: about 1.2 µs per chunk, once per dataset.

h5py serialises every call of a process behind one lock, and its default chunk shape makes one
row of a wide array cost 47 ms; positional reads at known offsets have neither problem. Data
that this file does not understand (filters that it cannot undo, virtual or external data, numbers of
other bits than numpy's) goes through the library, slower but correctly.
"""

from __future__ import annotations

import importlib
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from stoker import bounds
from stoker.display import command, first_names, look_for, look_in, quoted
from stoker.errors import CorruptError, StokerError, StoreError
from stoker.report import LOG_NAME
from stoker.stalls import Waiting
from stoker.store.fields import Array
from stoker.store.foreign import identify_file
from stoker.units import format_bytes

_CHUNK_COPIES = 3  # as stored, inflated, and with its bytes in order
_CHUNK_ENTRY_BYTES = 400


@dataclass(frozen=True)
class Chunk:
    """One stored chunk: where it stands in the array, and in the file."""

    origin: tuple[int, ...]
    byte_offset: int
    size: int
    filter_mask: int


@dataclass(frozen=True)
class Location:
    """How to read one dataset."""

    file: Path
    dataset: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # as stored, so possibly big-endian
    # "contiguous" and "chunked" are read by position; "library" goes through h5py
    layout: Literal["contiguous", "chunked", "library"]
    reason: str = ""  # why "library", in words; empty otherwise
    offset: int | None = None  # first byte, for "contiguous"; None when nothing was ever written
    fill: Any = 0
    chunk_shape: tuple[int, ...] = ()
    filters: tuple[int, ...] = ()
    # the chunks with a number along the first axis, for "chunked"
    chunks_at: Callable[[int], Sequence[Chunk]] = lambda _row: ()
    num_chunks: int = 0
    column: str = ""  # column to read of a table (a compound type), for "library"

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row (Python integers: no overflow at 2^31 or 2^63)."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def damaged(file: Path, dataset: str, what: str, allowed: str = "a whole file") -> CorruptError:
    """Return the error for a dataset that is not as it was written; `what` continues the sentence after its name."""
    return CorruptError(
        f"{file}: dataset {dataset!r}{what}.", allowed, "copy or pack the file again"
    )


def listing(path: str | Path) -> str:
    """Return a command that lists the content of an HDF5 file or a Zarr folder."""
    if Path(path).is_dir():
        return command("ls", path)
    # Not h5ls: few machines have it, and every one that runs stoker has h5py.
    code = "from sys import argv; from h5py import File; File(argv[1]).visititems(print)"
    return command("python3", "-c", code, path)


def check_claims(file: Path, dataset: h5py.Dataset) -> None:
    """Refuse a dataset whose chunks, chunk table or unwritten rows would take more than their bound."""
    name, itemsize = dataset.name.lstrip("/"), dataset.dtype.itemsize
    total = math.prod(map(int, dataset.shape)) * itemsize
    size = file.stat().st_size
    if dataset.chunks is not None:
        chunk_bytes = math.prod(map(int, dataset.chunks)) * itemsize
        what = f"{file}: one chunk of dataset {name!r}, {dataset.chunks} of {dataset.dtype},"
        # h5repack would decode a chunk of 2 GB anew for every piece of it that it writes, and take an hour.
        copy = file.with_name(f"{file.stem}-plain{file.suffix}")
        code = (
            f"import h5py; i = h5py.File({str(file)!r}); o = h5py.File({str(copy)!r}, 'w'); "
            "i.visititems(lambda n, d: (getattr(d, 'shape', None) is not None and "
            "[o.require_dataset(n, d.shape, d.dtype).__setitem__(s, d[s]) "
            "for s in (d.iter_chunks() if d.chunks else [...])], None)[1])"
        )
        fix = command("python3", "-c", code)
        bounds.CHUNK.check(chunk_bytes, what, fix, StoreError)
        bounds.require_memory(_CHUNK_COPIES * chunk_bytes, what.rstrip(","), fix, StoreError)
        num_chunks = dataset.id.get_num_chunks()
        what = f"{file}: the table of {num_chunks:,} chunks of dataset {name!r}"
        bounds.require_memory(_CHUNK_ENTRY_BYTES * num_chunks, what, fix, StoreError)
        stored = num_chunks * chunk_bytes
    else:
        stored = _stored_bytes(file, dataset, total)
    # Deflate packs 1,000 bytes into one: more rows than that have nothing behind them.
    bound = replace(bounds.UNWRITTEN, most=max(bounds.UNWRITTEN.most, 1000 * size))
    bound.check(
        total - stored,
        f"{file}: the unwritten part of dataset {name!r} of shape {dataset.shape}, in a file of "
        f"{format_bytes(size)},",
        f"{listing(file)}, and cut the dataset to the rows that were written",
        StoreError,
    )


def check_readable(file: Path, dataset: h5py.Dataset) -> None:
    """Refuse a dataset whose filter is not installed, or whose values are in other files that are missing.

    For values in missing files, HDF5 would silently return fill values.
    """
    name, plist = dataset.name.lstrip("/"), dataset.id.get_create_plist()
    for number in range(plist.get_nfilters()):
        code, _, _, label = plist.get_filter(number)
        if code not in _UNDO and not _has_filter(code):
            copy = file.with_name(f"{file.stem}-plain{file.suffix}")
            filter_name = label.partition(b";")[0].decode(errors="replace")
            raise StoreError(
                f"{file}: dataset {name!r} was written through the filter {filter_name!r} "
                f"(HDF5's number {code}), which is not installed.",
                "gzip, lzf, szip, zstd and others of HDF5; blosc, bitshuffle, lz4 and more with the package hdf5plugin",
                command("pip", "install", "hdf5plugin")
                if code in _PLUGINS
                else f"{command('h5repack', '-f', 'NONE', file, copy)}, where the filter is installed",
            )
    sources = _sources(file, dataset)
    gone = [name for place, name in sources if place is None]
    for place in () if gone else sorted({place for place, inside in sources if place and inside}):
        lost = _lacks(place, [inside for each, inside in sources if each == place])
        gone += [f"{place}, dataset {each!r}" for each in lost]
    if gone:
        raise StoreError(
            f"{file}: dataset {name!r} takes values from {first_names(gone, 1)}, which is not there: they would be "
            f"read as {dataset.fillvalue if has_fill(dataset) else 0}.",
            "all files that its values are in",
            look_in(file.parent),
        )


def _has_filter(code: int) -> bool:
    if not h5py.h5z.filter_avail(code) and code in _PLUGINS:
        with suppress(ImportError):  # importing it makes its filters known
            importlib.import_module("hdf5plugin")
    return bool(h5py.h5z.filter_avail(code))


def _lacks(place: Path, names: list[str]) -> list[str]:
    """Return which of the names a file does not hold: all of them if it is no HDF5 file."""
    try:
        with h5py.File(place, "r", locking="best-effort") as other:
            return [name for name in names if name not in other]
    except OSError:
        return names


def _sources(file: Path, dataset: h5py.Dataset) -> list[tuple[Path | None, str]]:
    """Return the files that a virtual or external dataset reads, with the dataset in each; None and a name if missing.

    They are looked for as HDF5 does: beside the file, with and without folders, and from the current folder.
    """
    plist = dataset.id.get_create_plist()
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        wanted = {(each.file_name, each.dset_name) for each in dataset.virtual_sources()}
        folders = [file.parent, Path()]
    else:  # HDF5 looks for these from the current folder only
        count = plist.get_external_count()
        wanted = {(os.fsdecode(plist.get_external(number)[0]), "") for number in range(count)}
        folders = [Path()]
    found: list[tuple[Path | None, str]] = []
    for name, inside in sorted(wanted):
        if name == ".":
            found.append((file, inside))
        elif "%" not in name and "%" not in inside:  # numbered files: as many as there are
            places = [folder / each for folder in folders for each in (name, Path(name).name)]
            place = next((each for each in places if each.is_file()), None)
            found.append((place, name if place is None else inside))
    return found


def _stored_bytes(file: Path, dataset: h5py.Dataset, total: int) -> int:
    """Return how many bytes of a dataset without chunks stand in some file."""
    plist = dataset.id.get_create_plist()
    if plist.get_layout() != h5py.h5d.VIRTUAL and not plist.get_external_count():
        return total if dataset.id.get_storage_size() else 0
    places = {place for place, _ in _sources(file, dataset) if place is not None}
    # The sources may be compressed.
    return min(total, 1000 * sum(place.stat().st_size for place in places))


def has_fill(dataset: h5py.Dataset) -> bool:
    """Return whether the dataset has a defined fill value."""
    defined = dataset.id.get_create_plist().fill_value_defined()
    return bool(defined != h5py.h5d.FILL_VALUE_UNDEFINED)


def is_written(dataset: h5py.Dataset) -> bool:
    """Return whether every chunk of a dataset was written, or its one piece of bytes."""
    if dataset.chunks is None:
        return bool(dataset.id.get_storage_size()) or 0 in dataset.shape
    grid = (
        -(-length // chunk) for length, chunk in zip(dataset.shape, dataset.chunks, strict=True)
    )
    return bool(dataset.id.get_num_chunks() == math.prod(grid))


def find_node(file: h5py.File, name: str) -> tuple[h5py.Dataset, str]:
    """Return the dataset of a name, and the column if the name is `TABLE/COLUMN` of a compound type, else ""."""
    node = file.get(name)
    if isinstance(node, h5py.Dataset):
        return node, ""
    for end, letter in enumerate(name):
        # Nothing lies below a dataset but its columns.
        if letter == "/" and isinstance(node := file.get(name[:end]), h5py.Dataset):
            return node, name[end + 1 :]
    raise KeyError(name)


def locate(file: Path, dataset: h5py.Dataset, column: str = "") -> Location:
    """Find out how `dataset`, or a column of it, can be read. The h5py file may be closed afterwards."""
    plist = dataset.id.get_create_plist()
    values = dataset.dtype[column] if column else dataset.dtype
    shape = (*map(int, dataset.shape), *values.shape)
    plain = Location(file, dataset.name.lstrip("/"), shape, values.base, "library", column=column)
    if column or values.subdtype:
        reason = "it is a column of a table" if column else "each of its values is an array"
        return replace(plain, reason=reason)
    # netCDF's no-fill mode leaves it undefined, where h5py raises. Unwritten rows are read as 0 then.
    plain = replace(plain, fill=dataset.fillvalue if has_fill(dataset) else 0)
    if not _is_numpys(dataset):
        stored = dataset.id.get_type()
        bits = f"{8 * stored.get_size()} bits that are not numpy's {dataset.dtype}"
        return replace(plain, reason=f"its numbers are {bits}")
    layout = plist.get_layout()
    if layout == h5py.h5d.CONTIGUOUS and plist.get_external_count() == 0:
        location = replace(plain, layout="contiguous", offset=dataset.id.get_offset())
        if location.offset is not None:  # else its rows are the fill value
            check_bounds(location, location.file.stat().st_size)
        return location
    if layout == h5py.h5d.CHUNKED:
        return _locate_chunked(plain, dataset, plist)
    names = {h5py.h5d.COMPACT: "compact", h5py.h5d.VIRTUAL: "virtual"}
    return replace(plain, reason=f"its data is {names.get(layout, 'external')}")


def _is_numpys(dataset: h5py.Dataset) -> bool:
    """Return whether the file holds numbers bit by bit as numpy does: not bfloat16, nor 12 bits in 16."""
    stored, kind = dataset.id.get_type(), dataset.dtype
    if isinstance(stored, h5py.h5t.TypeEnumID):  # also booleans: small numbers with names
        stored = stored.get_super()
        kind = np.dtype(kind.str.replace("b", "i"))
    return bool(stored.equal(h5py.h5t.py_create(np.dtype(kind.str))))


def check_bounds(location: Location, size_bytes: int) -> None:
    """Refuse a contiguous dataset whose bytes would lie beyond the end of its file."""
    num_bytes = location.shape[0] * location.row_bytes
    if num_bytes == 0:
        return
    begin = location.offset
    if begin is None:
        what = f" needs {num_bytes} bytes, and none are stored"
        raise damaged(location.file, location.dataset, what)
    if begin + num_bytes > size_bytes:
        what = f" needs bytes {begin} to {begin + num_bytes}, but the file ends at {size_bytes}"
        raise damaged(location.file, location.dataset, what)


def _locate_chunked(plain: Location, dataset: h5py.Dataset, plist: Any) -> Location:
    found = [plist.get_filter(number) for number in range(plist.get_nfilters())]
    filters = tuple(each[0] for each in found)
    if not can_undo(filters):
        names = ", ".join(each[3].decode(errors="replace") for each in found)
        return replace(plain, reason=f"its filters are {names}")
    free = [axis for axis, most in enumerate(dataset.maxshape) if most is None]
    header = h5py.h5o.get_info(dataset.id).hdr.version
    if len(free) == 1 and free != [0] and header > 1:
        # HDF5 2.0 walks over such a table (an extensible array) as if the first axis were the one that grows, and
        # gives most chunks the place of another. Its own reads look chunks up one by one, and are right.
        reason = f"HDF5 does not list the places of its chunks, because axis {free[0]} can grow"
        return replace(plain, reason=reason)
    rows: dict[int, list[Chunk]] = {}
    height = dataset.chunks[0]

    def collect(info: Any) -> None:
        chunk = Chunk(tuple(info.chunk_offset), info.byte_offset, info.size, info.filter_mask)
        rows.setdefault(chunk.origin[0] // height, []).append(chunk)

    dataset.id.chunk_iter(collect)
    if filters and header > 1 and _has_plain_edge(dataset, rows.values()):
        reason = "chunks at its edge may be stored without its filters, and the file's table does not say it"
        return replace(plain, reason=reason)
    return replace(
        plain,
        layout="chunked",
        chunk_shape=tuple(dataset.chunks),
        filters=filters,
        chunks_at=lambda row: rows.get(row, ()),
        num_chunks=sum(map(len, rows.values())),
    )


def _has_plain_edge(dataset: h5py.Dataset, rows: Iterable[list[Chunk]]) -> bool:
    """Return whether a chunk that reaches beyond the array has the size of one without filters."""
    size = math.prod(dataset.chunks) * dataset.dtype.itemsize
    return any(
        chunk.size == size
        and any(
            origin + length > end
            for origin, length, end in zip(chunk.origin, dataset.chunks, dataset.shape, strict=True)
        )
        for row in rows
        for chunk in row
    )


def read_chunk(location: Location, chunk: Chunk, read: Callable[[int, memoryview], None]) -> Array:
    """Read and decode one chunk; `read(offset, buffer)` fills the buffer from the file. Thread-safe.

    Raises:
        CorruptError: The chunk is damaged; says its place in the array and in the file.
    """
    itemsize = location.dtype.itemsize
    expected = math.prod(location.chunk_shape) * itemsize
    try:
        # Deflate makes random bytes a little longer.
        if chunk.size > expected + expected // 8 + 4096:
            raise ValueError(f"its table says {chunk.size} bytes, for {expected}")
        raw = bytearray(chunk.size)
        read(chunk.byte_offset, memoryview(raw))
        data = undo_filters(location.filters, chunk.filter_mask, raw, expected, itemsize)
    except ValueError as error:
        raise CorruptError(
            f"{location.file}: dataset {location.dataset!r}, chunk at {chunk.origin} "
            f"(byte {chunk.byte_offset}): {error}.",
            "a chunk as it was written",
            "restore the file from its source",
        ) from error
    return np.frombuffer(data, dtype=location.dtype).reshape(location.chunk_shape)


PACKED_BY = {
    ".csv": "table", ".tsv": "table", ".parquet": "table", ".feather": "table", ".npy": "arrays", ".npz": "arrays",
    ".bin": "series",
}  # fmt: skip
"""Suffix of a raw file to the source of `stoker pack` that reads it."""
READ_BY = {
    ".yaml": "stoker config check {}", ".yml": "stoker config check {}", ".pt": "stoker export {} OUT.safetensors",
}  # fmt: skip
"""Suffix of a file that is not data to the command that takes it."""
_OPENED = "a store folder, an HDF5 file or a URL"


def open_hdf5(path: Path) -> h5py.File:
    """Open for reading, with errors that say what to do."""
    with suppress(OSError), Waiting(path):
        # HDF5 holds Python's lock while it waits for a disk, so no thread could warn. So wait here first, without it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.read(descriptor, 1)
        finally:
            os.close(descriptor)
    try:
        # Best effort: file systems without locks (read-only, network) still open.
        return h5py.File(path, "r", locking="best-effort")
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist.", "an HDF5 file", look_for(path)) from None
    except IsADirectoryError:
        raise StoreError(f"{path} is a folder.", "an HDF5 file", command("ls", path)) from None
    except PermissionError as error:
        raise StoreError(
            f"{path} may not be read: {error}.", "read permission", command("ls", "-l", path)
        ) from None
    except BlockingIOError:
        raise StoreError(
            f"{path} is open for writing in another process.",
            "a closed file",
            "wait until the writer ends",
        ) from None
    except OSError as error:
        kind = PACKED_BY.get(Path(path.name.removesuffix(".gz")).suffix.lower())
        if kind is not None:
            raise StoreError(
                f"{path} is a file to be packed first, no store.",
                _OPENED,
                command("stoker", "pack", kind, path, "OUT"),
            ) from None
        if path.suffix == ".pt" and path.with_name(LOG_NAME).exists():
            raise StoreError(
                f"{path} is a checkpoint of a run, no HDF5 file.",
                _OPENED,
                READ_BY[".pt"].format(quoted(path)),
            ) from None
        if path.suffix not in (".yaml", ".yml") and (other := identify_file(path)) is not None:
            raise StoreError(f"{path} is {other.what}, no HDF5 file.", _OPENED, other.fix) from None
        if _is_marked_open(path):
            raise StoreError(
                f"{path} was not closed by the program that wrote it, or is being written.",
                "a closed file",
                f"{command('h5clear', '-s', path)}, when no program writes to it",
            ) from error
        raise CorruptError(
            f"{path} cannot be opened as HDF5: {error}.",
            "a whole HDF5 file",
            READ_BY.get(path.suffix.lower(), "copy or pack the file again").format(quoted(path)),
        ) from error


_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def _is_marked_open(path: Path) -> bool:
    """Whether the superblock, of version 3, says that a program has the file open for writing."""
    with suppress(OSError), path.open("rb") as file:
        for place in (0, *(512 << power for power in range(20))):  # behind a user block
            file.seek(place)
            start = file.read(12)
            if start.startswith(_HDF5_SIGNATURE):
                return start[8:9] == b"\3" and bool(start[11] & 0b101)  # written, or SWMR
            if len(start) < 12:
                break
    return False


@contextmanager
def named_damage(path: Path) -> Iterator[None]:
    """Turn any exception of h5py on a damaged file into an error that names the file.

    Fuzzing saw OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, OverflowError
    and UnicodeDecodeError, from places that cannot be foreseen.
    """
    try:
        yield
    except StokerError:
        raise
    except Exception as error:
        raise CorruptError(
            f"{path}: its HDF5 structures cannot be read: {type(error).__name__}: {error}.",
            "an intact HDF5 file",
            "copy or pack the file again",
        ) from error


# -- filters of chunks ------------------------------------------------------------------------------
# h5py decodes one chunk at a time, behind one lock of the process. The functions here are pure and release the GIL
# for nearly all of their time. Deflate is undone by libdeflate where the package `deflate` is installed, 2 to 4 times
# as fast as zlib; isal, measured on the same data, was as fast as zlib on ARM.


deflate: Any
try:
    deflate = importlib.import_module("deflate")
except ImportError:  # a platform without a wheel: zlib gives the same bytes, slower
    deflate = None

Bytes = bytes | bytearray | memoryview

SHUFFLE: int = h5py.h5z.FILTER_SHUFFLE
DEFLATE: int = h5py.h5z.FILTER_DEFLATE
FLETCHER32: int = h5py.h5z.FILTER_FLETCHER32
ZSTD = 32015  # registered with the HDF Group; h5py needs hdf5plugin for it, we need pyarrow's codec

_PLUGINS = frozenset((307, 32001, 32004, 32008, 32013, 32015, 32017, 32018, 32024, 32026, 32028))
"""Filters that the package hdf5plugin brings along."""

_SUM_WORDS = 1 << 20
"""Words per partial sum of fletcher32: 2^20 words of 16 bits, weighted up to 2^20, stay below 2^64."""


def can_undo(filters: Sequence[int]) -> bool:
    """Return whether `undo_filters` knows all filters, and at most one of them compresses.

    The size of the data between two compressing filters is not recorded, so nothing would bound it.
    """
    return _UNDO.keys() >= set(filters) and sum(each in (DEFLATE, ZSTD) for each in filters) <= 1


def undo_filters(
    filters: Sequence[int], skipped: int, raw: Bytes, size: int, itemsize: int
) -> Bytes | Array:
    """Return the bytes of a chunk before its filters, which `can_undo`, in the order in which they were applied.

    Bit i of `skipped` is set where filter i was not applied to this chunk; `itemsize` is for shuffle.

    Raises:
        ValueError: The bytes are damaged, or more or fewer than `size` come out.
    """
    applied = [each for number, each in enumerate(filters) if not skipped >> number & 1]
    data: Bytes | Array = raw
    while applied:
        last = applied.pop()
        # A checksum that was added before makes what comes out here 4 bytes longer.
        data = _UNDO[last](data, size + 4 * applied.count(FLETCHER32), itemsize)
    if len(data) != size:
        raise ValueError(f"it decodes to {len(data)} bytes instead of {size}")
    return data


def inflate(raw: Any, size: int, _itemsize: int = 1, *, is_gzip: bool = False) -> Bytes:
    """Undo deflate in a zlib or gzip container; at most `size` bytes come out.

    Raises:
        ValueError: The data is damaged, or longer.
    """
    if deflate is not None and not is_gzip:
        # It never writes more than `size` bytes: a bomb is refused before it takes memory. Data that it
        # refuses goes to zlib, which says why.
        with suppress(deflate.DeflateError):
            inflated: bytearray = deflate.zlib_decompress(raw, size)
            return inflated
    inflater = zlib.decompressobj(wbits=31 if is_gzip else 15)
    try:
        # One byte more than allowed tells a bomb or a wrong size from a good chunk.
        data = inflater.decompress(raw, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not inflater.eof:
        raise ValueError("its compressed data does not end where it should")
    return data


def unzstd(raw: Any, size: int, _itemsize: int = 1) -> Bytes:
    """Undo zstd; exactly `size` bytes must come out."""
    import pyarrow  # here: it takes 0.1 s, and few files need it

    try:
        return memoryview(pyarrow.Codec("zstd").decompress(raw, size)).cast("B")
    except OSError as error:
        raise ValueError(f"{error}".rstrip(".")) from error


def _unshuffle(raw: Any, _size: int, itemsize: int) -> Bytes | Array:
    """Put the bytes of each number together again: all first bytes are stored first, then all second ones."""
    count = len(raw) // itemsize
    if itemsize == 1 or count == 0:
        return raw  # type: ignore[no-any-return]
    flat = np.frombuffer(raw, dtype=np.uint8)
    out = np.empty(len(flat), dtype=np.uint8)
    whole = count * itemsize
    planes, numbers = flat[:whole].reshape(itemsize, count), out[:whole].reshape(count, itemsize)
    # Plane by plane: 2.3 GB/s; transposed in one step, numpy makes 0.5.
    for byte in range(itemsize):
        numbers[:, byte] = planes[byte]
    out[whole:] = flat[whole:]
    return out


def _check_sum(raw: Any, _size: int, _itemsize: int) -> Bytes:
    """Compare the checksum at the end of the chunk with its bytes, and take it off."""
    view = memoryview(raw)
    if len(view) < 4:
        raise ValueError(f"its {len(view)} bytes are too few for a checksum")
    body, stored = view[:-4], int.from_bytes(view[-4:], "little")
    if (found := fletcher32(body)) != stored:
        raise ValueError(f"its checksum is {found:#010x}, stored is {stored:#010x}")
    return body


def fletcher32(data: Bytes) -> int:
    """Return HDF5's checksum: two sums over big-endian words of 16 bits, modulo 65,535."""
    odd = len(data) % 2
    words = np.frombuffer(data, dtype=">u2", count=len(data) // 2).astype(np.uint64)
    if odd:
        words = np.append(words, np.uint64(data[-1] << 8))
    plain = weighted = 0
    for start in range(0, len(words), _SUM_WORDS):
        block = words[start : start + _SUM_WORDS]
        # The second sum counts a word once for itself and once for every word after it.
        weighted += len(block) * plain + int(block @ np.arange(len(block), 0, -1, dtype=np.uint64))
        plain += int(block.sum())
    # HDF5 folds the carry back in, so that a sum that is a multiple of 65,535 stays 65,535.
    sums = [value and (value - 1) % 65535 + 1 for value in (plain, weighted)]
    return sums[1] << 16 | sums[0]


_UNDO: Mapping[int, Callable[..., Bytes | Array]] = {
    SHUFFLE: _unshuffle,
    DEFLATE: inflate,
    FLETCHER32: _check_sum,
    ZSTD: unzstd,
}
