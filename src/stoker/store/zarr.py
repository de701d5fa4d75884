"""Zarr folders of version 2 and 3 as a store, opened in place; nothing is converted.

Enters: a folder with `zarr.json`, `.zgroup` or `.zarray`, and what the caller chose of it. Leaves: the same as for a
plain HDF5 file: dense and ragged fields, and notes on what was left aside. Costs: the metadata of every array is read
when the folder is opened, a file per chunk when rows are read.

Decoded here, by any thread: no compression, zlib, gzip, zstd; chunks in shards (`sharding_indexed`), whose index is
compared with its checksum and kept. Other codecs, blosc above all, need the package numcodecs. Transposed arrays, and
types that numpy does not have, are left aside by name. Checksums of chunks (crc32c) are taken off and not compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from stoker import bounds
from stoker.display import command, look_in
from stoker.errors import CorruptError, StoreError, install_command
from stoker.store.arrays import OpenFile, Stamp, StoredArray
from stoker.store.fields import Array
from stoker.store.foreign import unused_beside
from stoker.store.hdf5 import Chunk, Location, inflate, unzstd
from stoker.store.manifest import BLOCK_BYTES
from stoker.store.plain import PlainFile, Selection, find_sparse, select
from stoker.store.shard import Shard
from stoker.strict_json import parse_json

_ARRAY_NAMES = ("zarr.json", ".zarray")
_NAMES = (*_ARRAY_NAMES, ".zgroup")
_CHUNK_SLACK = 64 << 10
_NO_CHUNK = (1 << 64) - 1  # offset and size of a chunk that is not in its shard

Decode = Callable[[Any, int], Any]
"""Called with the bytes of a chunk and the number of bytes that must come out."""


def is_zarr(folder: Path) -> bool:
    """Return whether a folder is a Zarr array or group."""
    return any((folder / name).is_file() for name in _NAMES)


@dataclass(frozen=True)
class Sharding:
    """How chunks lie in a shard: one file for many of them, with an index of (offset, bytes) pairs."""

    counts: tuple[int, ...]  # chunks of a shard along each axis
    dtype: np.dtype[Any]  # type of the index
    is_checked: bool  # a crc32c follows the index
    at_end: bool  # the index stands at the end of the file, not at its start

    @property
    def index_bytes(self) -> int:
        """Bytes of the index with its checksum."""
        return 16 * math.prod(self.counts) + 4 * self.is_checked


@dataclass(frozen=True)
class ZarrArray:
    """One array, as its metadata describes it."""

    folder: Path  # where its chunks are
    shape: tuple[int, ...]  # shape of the array
    dtype: np.dtype[Any]  # as stored
    chunks: tuple[int, ...]  # shape of a chunk; chunks at the edges have it too
    fill: Any  # value of chunks that are not there
    order: str  # "C" or "F", within a chunk
    decode: tuple[Decode, ...]  # to undo, in this order
    key: Callable[[Sequence[int]], str]  # the file of a chunk, or of a shard, by its numbers
    sharding: Sharding | None = None  # how chunks lie in shards; None where each is a file

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, decoded."""
        return math.prod(self.chunks) * self.dtype.itemsize


class ZarrFolder:
    """All arrays of a folder by name, and the attributes of its groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.arrays: dict[str, ZarrArray] = {}
        self.aside: dict[str, str] = {}
        self.needs_numcodecs = False
        # Groups and arrays with their attributes: what `plain.find_sparse` looks at.
        self._nodes: dict[str, SimpleNamespace] = {}
        for folder, kind, facts, attributes in _walk(root):
            # An array alone has no name inside; `features` is what a single array is called elsewhere.
            name = folder.relative_to(root).as_posix()
            self._nodes[name.removeprefix(".")] = SimpleNamespace(attrs=attributes)
            if kind == "array":
                try:
                    self.arrays["features" if name == "." else name] = _read_array(folder, facts)
                except _UnusableError as error:
                    self.aside[name] = f"array {name!r} {error}: left aside"
                    self.needs_numcodecs |= isinstance(error.__cause__, ImportError)

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes of the root."""
        attributes: Mapping[str, Any] = self[""].attrs
        return attributes

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def __getitem__(self, name: str) -> SimpleNamespace:
        return self._nodes.get(name.strip("/"), SimpleNamespace(attrs={}))


class _UnusableError(Exception):
    """An array cannot be a field; the message says why."""


def open_zarr(path: Path, chosen: Selection) -> tuple[PlainFile, Shard]:
    """Return what a Zarr folder holds, and a shard that reads it."""
    folder = ZarrFolder(path)
    arrays = {name: (each.shape, each.dtype.str) for name, each in folder.arrays.items()}
    if not arrays and folder.aside:
        copy = unused_beside(path.absolute(), ".h5")
        code = (
            f"import h5py, zarr; z = zarr.open({str(path)!r}, mode='r'); f = h5py.File({copy!r}, 'w'); "
            "[f.create_dataset(n, data=a[...]) for n, a in (z.members(max_depth=None) if hasattr(z, 'members') "
            "else [('features', z)]) if getattr(a, 'dtype', None) is not None and a.dtype.kind in 'biuf']"
        )
        raise StoreError(
            f"{path} holds no array that can be read: {next(iter(folder.aside.values()))}.",
            "arrays of numbers, compressed by zlib, gzip or zstd; by others with numcodecs",
            install_command("zarr") if folder.needs_numcodecs else command("python3", "-c", code),
        )
    made = select(path, folder, arrays, folder.aside, find_sparse(folder, arrays), chosen)
    sources = {part: folder.arrays[name] for part, name in made.paths.items()}
    opened = {array.folder: _Metadata(array.folder) for array in sources.values()}
    for array in sources.values():
        what = f"{array.folder}: one chunk, {array.chunks} of {array.dtype},"
        bounds.CHUNK.check(array.chunk_bytes, what, command("ls", array.folder), StoreError)

    def make() -> dict[str, StoredArray]:
        return {
            part: _ChunkFiles(part, array, opened[array.folder]) for part, array in sources.items()
        }

    return made, Shard(path, None, {}, BLOCK_BYTES, make=make)


# -- metadata --------------------------------------------------------------------------------------


def _walk(root: Path) -> Iterator[tuple[Path, str, Any, Mapping[str, Any]]]:
    """Yield folder, kind, metadata and attributes of every group and array; chunks are not listed."""
    waiting, seen = [root], 0
    while waiting:
        folder = waiting.pop()
        seen += 1
        bounds.OBJECTS.check(seen, str(root), command("ls", root), StoreError)
        if len(folder.relative_to(root).parts) > bounds.DEPTH.most:
            bounds.DEPTH.check(bounds.DEPTH.most + 1, str(root), command("ls", root), StoreError)
        facts = _json(folder / "zarr.json")
        if facts is not None:
            kind = str(facts.get("node_type"))
            attributes = facts.get("attributes", {})
        else:
            facts = _json(folder / ".zarray")
            kind = "group" if facts is None else "array"
            attributes = _json(folder / ".zattrs") or {}
        yield folder, kind, facts, attributes
        if kind != "array":
            inner = [
                Path(each) for each in os.scandir(folder) if each.is_dir(follow_symlinks=False)
            ]
            waiting += sorted(inner, reverse=True)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            text = file.read(bounds.MANIFEST.most + 1)
    except OSError:
        return None
    bounds.MANIFEST.check(len(text), str(path), command("ls", "-l", path), StoreError)
    try:
        found = parse_json(text)
    except ValueError as error:
        raise _damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise _damaged(path, "it is not a JSON object")
    return found


def _read_array(folder: Path, facts: dict[str, Any]) -> ZarrArray:
    try:
        read = _read_v3 if facts.get("zarr_format") == 3 else _read_v2
        array = read(folder, facts)
        shape_ok = len(array.shape) == len(array.chunks) and min(array.chunks, default=1) > 0
        if not shape_ok or min(array.shape, default=0) < 0:
            raise ValueError(f"shape {array.shape} and chunks {array.chunks}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _damaged(folder, f"its metadata is wrong: {type(error).__name__}: {error}") from error
    if not array.shape:
        raise _UnusableError("is a single value")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise _UnusableError(f"has dtype {array.dtype}")
    return array


def _read_v2(folder: Path, facts: dict[str, Any]) -> ZarrArray:
    if facts.get("filters"):
        names = ", ".join(str(each.get("id")) for each in facts["filters"])
        raise _UnusableError(f"has the filters {names}")
    if not isinstance(facts["dtype"], str):
        raise _UnusableError("has a compound type")
    compressor = facts["compressor"]
    separator = facts.get("dimension_separator", ".")
    dtype = np.dtype(facts["dtype"])
    return ZarrArray(
        folder,
        tuple(facts["shape"]),
        dtype,
        tuple(facts["chunks"]),
        _fill(facts["fill_value"], dtype),
        facts["order"],
        () if compressor is None else (_codec(compressor["id"], compressor),),
        lambda numbers: separator.join(map(str, numbers)) or "0",
    )


def _read_v3(folder: Path, facts: dict[str, Any]) -> ZarrArray:
    if not isinstance(facts["data_type"], str) or facts["chunk_grid"]["name"] != "regular":
        raise _UnusableError("has a type or a chunk grid of an extension")
    try:
        dtype = np.dtype(facts["data_type"])
    except TypeError:
        raise _UnusableError(f"has dtype {facts['data_type']}") from None
    codecs = facts["codecs"]
    chunks = tuple(facts["chunk_grid"]["configuration"]["chunk_shape"])
    sharding = None
    if [each["name"] for each in codecs] == ["sharding_indexed"]:
        inside = codecs[0]["configuration"]
        sharding = _read_sharding(chunks, inside)
        chunks, codecs = tuple(inside["chunk_shape"]), inside["codecs"]
    first, *others = codecs
    if first["name"] != "bytes":
        raise _UnusableError(f"has the codec {first['name']}")
    is_little = first.get("configuration", {}).get("endian", "little") == "little"
    decode = (_codec(each["name"], each.get("configuration", {})) for each in reversed(others))
    encoding = facts["chunk_key_encoding"]
    default = {"default": "/", "v2": "."}[encoding["name"]]
    separator = encoding.get("configuration", {}).get("separator", default)
    start = ["c"] if encoding["name"] == "default" else []

    def key(numbers: Sequence[int]) -> str:
        return separator.join([*start, *map(str, numbers)]) or "0"

    return ZarrArray(
        folder,
        tuple(facts["shape"]),
        dtype.newbyteorder("<" if is_little else ">"),
        chunks,
        _fill(facts["fill_value"], dtype),
        "C",
        tuple(decode),
        key,
        sharding,
    )


def _read_sharding(shape: Sequence[int], facts: Mapping[str, Any]) -> Sharding:
    inner = facts["chunk_shape"]
    if len(inner) != len(shape) or any(
        not size or length % size for length, size in zip(shape, inner, strict=True)
    ):
        raise ValueError(f"chunks {inner} do not fill shards {shape}")
    first, *others = facts["index_codecs"]
    if first["name"] != "bytes" or [each["name"] for each in others] not in ([], ["crc32c"]):
        raise _UnusableError("has shards with a compressed index")
    endian = first.get("configuration", {}).get("endian", "little")
    counts = tuple(length // size for length, size in zip(shape, inner, strict=True))
    made = Sharding(
        counts,
        np.dtype("<u8" if endian == "little" else ">u8"),
        bool(others),
        {"end": True, "start": False}[facts.get("index_location", "end")],
    )
    bounds.CHUNK.check(made.index_bytes, "the index of a shard", "", StoreError)
    return made


def _fill(value: Any, dtype: np.dtype[Any]) -> Any:
    if dtype.kind not in "biuf":
        return 0  # such an array is left aside
    if isinstance(value, str) and value.startswith("0x"):
        return np.frombuffer(bytes.fromhex(value[2:]), dtype.newbyteorder(">"))[0]
    # None: version 2 may leave it undefined. Text: "NaN", "Infinity", "-Infinity".
    return dtype.type(0 if value is None else float(value) if isinstance(value, str) else value)


def _take_off_checksum(raw: Any, _size: int) -> Any:
    return memoryview(raw)[:-4]


def _codec(name: str, options: Mapping[str, Any]) -> Decode:
    known: dict[str, Decode] = {
        "zlib": inflate,
        "gzip": partial(inflate, is_gzip=True),
        "zstd": unzstd,
        "crc32c": _take_off_checksum,
    }
    if name in known:
        return known[name]
    if name in ("sharding_indexed", "transpose", "vlen-utf8", "vlen-bytes"):  # shards inside shards
        raise _UnusableError(f"has the codec {name}")
    try:
        import numcodecs
    except ImportError as error:
        raise _UnusableError(
            f"is compressed by {name}, which needs the package numcodecs"
        ) from error
    try:
        given = {key: value for key, value in options.items() if key not in ("id", "typesize")}
        if isinstance(given.get("shuffle"), str):  # version 3 has a word, the library a number
            given["shuffle"] = ["noshuffle", "shuffle", "bitshuffle"].index(given["shuffle"])
        codec = numcodecs.get_codec({"id": name, **given})
    except Exception as error:
        raise _UnusableError(f"has the codec {name}, which numcodecs refuses ({error})") from error
    return lambda raw, _size: codec.decode(raw)


# -- reading ---------------------------------------------------------------------------------------


class _Metadata:
    """The file with an array's metadata, in the place of `OpenFile`: each chunk is a file of its own.

    Whoever writes or removes the array writes or removes this file too. Without it a chunk that is not there would
    be one that holds the fill value.
    """

    direct = False

    def __init__(self, folder: Path) -> None:
        self._path = next(
            (folder / name for name in _ARRAY_NAMES if (folder / name).is_file()), folder
        )
        self.opened_as = self.stamp()

    def stamp(self) -> Stamp:
        """Return the stamp of the file that has this name now."""
        try:
            return Stamp.of(self._path.stat())
        except OSError as error:
            raise _unreadable(self._path, error) from error


class _ChunkFiles(StoredArray):
    """Rows of one array, a file per chunk."""

    def __init__(self, name: str, array: ZarrArray, metadata: _Metadata) -> None:
        counts = [-(-n // size) for n, size in zip(array.shape, array.chunks, strict=True)]

        def chunks_at(row: int) -> list[Chunk]:
            places = product([row], *map(range, counts[1:]))
            origins = (tuple(np.multiply(place, array.chunks).tolist()) for place in places)
            return [Chunk(origin, 0, 0, 0) for origin in origins]

        location = Location(
            file=array.folder,
            dataset=name,
            shape=array.shape,
            dtype=array.dtype,
            layout="chunked",
            fill=array.fill,
            chunk_shape=array.chunks,
            chunks_at=chunks_at,
            num_chunks=math.prod(counts),  # those that are not there have the fill value
        )
        super().__init__(cast(OpenFile, metadata), location, None, BLOCK_BYTES)
        self._array = array
        # One entry for each shard that was read: 16 bytes a chunk.
        self._indices: dict[Path, Array | None] = {}

    def read_stored(self, chunk: Chunk) -> None:
        """Read a chunk's bytes as they are stored, and drop them."""
        self._stored(chunk)

    def _stored(self, chunk: Chunk) -> tuple[Path, bytes | None]:
        """Return the file of a chunk or of its shard, and the chunk's bytes; None where it is not there."""
        array = self._array
        numbers = [at // size for at, size in zip(chunk.origin, array.chunks, strict=True)]
        # Compression makes random bytes a little longer; a chunk beyond that is none.
        most = array.chunk_bytes + array.chunk_bytes // 8 + _CHUNK_SLACK
        if array.sharding is not None:
            return self._read_inside(array.sharding, numbers, most)
        path = array.folder / array.key(numbers)
        return path, _read_at(path, 0, most)

    def _read_chunk(self, chunk: Chunk) -> Array:
        array, size = self._array, self._array.chunk_bytes
        path, stored = self._stored(chunk)
        self._check_unwritten()
        if stored is None:
            return np.full(array.chunks, array.fill, dtype=array.dtype)
        raw: Any = stored
        try:
            # A checksum that was added before the compression makes what comes out 4 bytes longer.
            for number, decode in enumerate(array.decode, 1):
                raw = decode(raw, size + 4 * array.decode[number:].count(_take_off_checksum))
        except (ValueError, RuntimeError, TypeError) as error:
            raise _damaged(path, str(error)) from error
        values = np.frombuffer(raw, dtype=np.uint8)
        if len(values) != size:
            raise _damaged(path, f"it decodes to {len(values)} bytes instead of {size}")
        return values.view(array.dtype).reshape(array.chunks, order=cast(Any, array.order))

    def _read_inside(
        self, sharding: Sharding, numbers: Sequence[int], most: int
    ) -> tuple[Path, bytes | None]:
        """Return the file of a shard, and the bytes of one chunk in it; None where it is not there."""
        counts = sharding.counts
        path = self._array.folder / self._array.key(
            [number // count for number, count in zip(numbers, counts, strict=True)]
        )
        if path not in self._indices:
            self._indices[path] = _read_index(path, sharding)
        index = self._indices[path]
        place = tuple(number % count for number, count in zip(numbers, counts, strict=True))
        entry = None if index is None else index[int(np.ravel_multi_index(place, counts))]
        if entry is None or (entry == _NO_CHUNK).all():
            return path, None
        offset, num_bytes = map(int, entry)
        if num_bytes > most or offset >= 1 << 62:
            raise _damaged(path, f"its index says {num_bytes} bytes at {offset} for one chunk")
        raw = _read_at(path, offset, num_bytes)
        if raw is None or len(raw) < num_bytes:
            raise _damaged(path, f"it ends inside the chunk at byte {offset}")
        return path, raw


def _read_index(path: Path, sharding: Sharding) -> Array | None:
    """Return `(chunks, 2)` offsets and sizes of a shard; None where there is no such file."""
    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    if size and size < sharding.index_bytes:
        raise _damaged(path, f"its {size} bytes are too few for its index")
    raw = _read_at(path, -sharding.index_bytes if sharding.at_end else 0, sharding.index_bytes)
    if raw is None:
        return None
    if sharding.is_checked:
        raw, stored = raw[:-4], int.from_bytes(raw[-4:], "little")
        if (found := crc32c(raw)) != stored:
            raise _damaged(
                path, f"the checksum of its index is {found:#010x}, stored is {stored:#010x}"
            )
    return np.frombuffer(raw, sharding.dtype).reshape(-1, 2)


def _read_at(path: Path, offset: int, num_bytes: int) -> bytes | None:
    """Return bytes of a file; from its end where the offset is negative. None where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
            return file.read(num_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be read: {error.strerror}.", "a readable file", look_in(path.parent, "-l")
    )


_CRC32C = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    _CRC32C.append(_byte)


def crc32c(data: bytes) -> int:
    """Return the checksum of Castagnoli, 10 MB/s: for indices, not for chunks."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _CRC32C[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def _damaged(path: Path, why: str) -> CorruptError:
    return CorruptError(f"{path}: {why}.", "a file as Zarr wrote it", "copy the folder again")
