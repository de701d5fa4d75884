"""Zarr folders of version 2 and 3 as a store, opened in place; nothing is converted.

Enters: a folder with `zarr.json`, `.zgroup` or `.zarray`, and what the caller chose of it. Leaves: the same as for a
plain HDF5 file: dense and ragged fields, and notes on what was left aside. Costs: the metadata of every array is read
when the folder is opened, a file per chunk when rows are read.

Decoded here, by any thread: no compression, zlib, gzip, zstd. Others, blosc above all, need the package numcodecs.
Arrays in shards, transposed ones, and types that numpy has not are left aside by name. Checksums (crc32c) are taken off
and not compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np

from stoker import bounds
from stoker.display import command
from stoker.errors import CorruptError, StoreError, install_command
from stoker.store.arrays import OpenFile, StoredArray
from stoker.store.fields import Array
from stoker.store.filters import inflate, unzstd
from stoker.store.foreign import find_sparse
from stoker.store.hdf5 import Chunk, Location
from stoker.store.plain import PlainFile, Selection, select
from stoker.store.shard import Shard
from stoker.strict_json import parse_json

_NAMES = ("zarr.json", ".zarray", ".zgroup")
_CHUNK_SLACK = 64 << 10

Decode = Callable[[Any, int], Any]
"""Called with the bytes of a chunk and the number that must come out."""


def is_zarr(folder: Path) -> bool:
    """Return whether a folder is a Zarr array or group."""
    return any((folder / name).is_file() for name in _NAMES)


@dataclass(frozen=True)
class ZarrArray:
    """One array, as its metadata describes it.

    Attributes:
        folder: Where its chunks are.
        shape: Of the array.
        dtype: As stored.
        chunks: Shape of a chunk; chunks at the edges have it too.
        fill: Value of chunks that are not there.
        order: "C" or "F", within a chunk.
        decode: To undo, in this order.
        key: The file of a chunk by its numbers.
    """

    folder: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    fill: Any
    order: str
    decode: tuple[Decode, ...]
    key: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class _Node:
    """A group or array with its attributes: what `foreign.py` looks at."""

    attrs: Mapping[str, Any] = field(default_factory=dict)


class ZarrFolder:
    """All arrays of a folder by name, and the attributes of its groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.arrays: dict[str, ZarrArray] = {}
        self.aside: dict[str, str] = {}
        self.needs_numcodecs = False
        self._nodes: dict[str, _Node] = {}
        for folder, kind, facts, attributes in _walk(root):
            # An array alone has no name inside; `features` is what a single array is called elsewhere.
            name = folder.relative_to(root).as_posix()
            self._nodes[name.removeprefix(".")] = _Node(attributes)
            if kind == "array":
                try:
                    self.arrays["features" if name == "." else name] = _read_array(folder, facts)
                except _UnusableError as error:
                    self.aside[name] = f"array {name!r} {error}: left aside"
                    self.needs_numcodecs |= isinstance(error.__cause__, ImportError)

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes of the root."""
        return self[""].attrs

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def __getitem__(self, name: str) -> _Node:
        return self._nodes.get(name.strip("/"), _Node())


class _UnusableError(Exception):
    """Why an array is no field."""


def open_zarr(path: Path, chosen: Selection) -> tuple[PlainFile, Shard]:
    """Return what a Zarr folder holds, and a shard that reads it.

    Raises:
        StoreError: As for a plain HDF5 file.
        CorruptError: Metadata that cannot be read.
    """
    folder = ZarrFolder(path)
    arrays = {name: (each.shape, each.dtype.str) for name, each in folder.arrays.items()}
    if not arrays and folder.aside:
        copy = path.absolute().with_suffix(".h5")
        code = (
            f"import h5py, zarr; z = zarr.open({str(path)!r}, mode='r'); f = h5py.File({str(copy)!r}, 'w'); "
            "[f.create_dataset(n, data=a[...]) for n, a in (z.members(max_depth=None) if hasattr(z, 'members') "
            "else [('features', z)]) if getattr(a, 'dtype', None) is not None and a.dtype.kind in 'biuf']"
        )
        raise StoreError(
            f"{path} holds no array that can be read: {next(iter(folder.aside.values()))}.",
            "arrays of numbers, compressed by zlib, gzip or zstd; by others with numcodecs",
            install_command("zarr") if folder.needs_numcodecs else command("python3", "-c", code),
        )
    made = select(path, folder, arrays, folder.aside, find_sparse(folder, arrays), chosen)
    for name in made.paths.values():
        array = folder.arrays[name]
        what = f"{array.folder}: one chunk, {array.chunks} of {array.dtype},"
        chunk_bytes = math.prod(array.chunks) * array.dtype.itemsize
        bounds.CHUNK.check(chunk_bytes, what, command("ls", array.folder), StoreError)
    return made, _ZarrShard(path, {part: folder.arrays[name] for part, name in made.paths.items()})


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
    first, *others = facts["codecs"]
    if first["name"] != "bytes":
        raise _UnusableError(f"has the codec {first['name']}")
    endian = first.get("configuration", {}).get("endian", "little")
    encoding = facts["chunk_key_encoding"]
    default = {"default": "/", "v2": "."}[encoding["name"]]
    separator = encoding.get("configuration", {}).get("separator", default)
    start = ["c"] if encoding["name"] == "default" else []

    def key(numbers: Sequence[int]) -> str:
        return separator.join([*start, *map(str, numbers)]) or "0"

    return ZarrArray(
        folder,
        tuple(facts["shape"]),
        dtype.newbyteorder("<" if endian == "little" else ">"),
        tuple(facts["chunk_grid"]["configuration"]["chunk_shape"]),
        _fill(facts["fill_value"], dtype),
        "C",
        tuple(_codec(each["name"], each.get("configuration", {})) for each in reversed(others)),
        key,
    )


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
    if name in ("sharding_indexed", "transpose", "vlen-utf8", "vlen-bytes"):
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


class _ZarrShard(Shard):
    """The arrays of a folder; opening it costs nothing."""

    def __init__(self, path: Path, sources: Mapping[str, ZarrArray]) -> None:
        datasets = {name: (each.dtype.str, list(each.shape[1:])) for name, each in sources.items()}
        super().__init__(path, None, datasets, 1 << 20)
        self._sources = sources

    def _open(self) -> dict[str, StoredArray]:
        return {name: _ChunkFiles(name, each) for name, each in self._sources.items()}


class _Grid(Mapping[int, tuple[Chunk, ...]]):
    """All chunks by their number along the first axis, made when they are asked for."""

    def __init__(self, array: ZarrArray) -> None:
        self._array = array
        self._counts = [-(-n // size) for n, size in zip(array.shape, array.chunks, strict=True)]

    def __getitem__(self, row: int) -> tuple[Chunk, ...]:
        if not 0 <= row < self._counts[0]:
            raise KeyError(row)
        places = product([row], *map(range, self._counts[1:]))
        sizes = self._array.chunks
        return tuple(
            Chunk(tuple(n * size for n, size in zip(place, sizes, strict=True)), 0, 0, 0)
            for place in places
        )

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._counts[0]))

    def __len__(self) -> int:
        return self._counts[0]

    @property
    def num_chunks(self) -> int:
        """Of the whole array; those that are not there have the fill value."""
        return math.prod(self._counts)


class _NoFile:
    """In the place of an open file: a chunk is a file of its own."""

    direct = False

    def expect(self, offset: int, num_bytes: int) -> None:
        """Nothing is read ahead."""


class _ChunkFiles(StoredArray):
    """Rows of one array, a file per chunk."""

    def __init__(self, name: str, array: ZarrArray) -> None:
        grid = _Grid(array)
        location = Location(
            file=array.folder,
            dataset=name,
            shape=array.shape,
            dtype=array.dtype,
            layout="chunked",
            fill=array.fill,
            chunk_shape=array.chunks,
            chunk_rows=grid,
            num_chunks=grid.num_chunks,
        )
        super().__init__(cast(OpenFile, _NoFile()), location, None, 1 << 20)
        self._array = array

    def _read_chunk(self, chunk: Chunk) -> Array:
        array = self._array
        numbers = [at // size for at, size in zip(chunk.origin, array.chunks, strict=True)]
        path = array.folder / array.key(numbers)
        size = math.prod(array.chunks) * array.dtype.itemsize
        try:
            with path.open("rb") as file:
                # Compression makes random bytes a little longer; a file beyond that is no chunk.
                raw: Any = file.read(size + size // 8 + _CHUNK_SLACK)
        except FileNotFoundError:
            return np.full(array.chunks, array.fill, dtype=array.dtype)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be read: {error.strerror}.",
                "a readable file",
                command("ls", "-l", path),
            ) from error
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


def _damaged(path: Path, why: str) -> CorruptError:
    return CorruptError(f"{path}: {why}.", "a file as Zarr wrote it", "copy the folder again")
