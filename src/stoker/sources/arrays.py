"""`stoker pack arrays`: numpy, HDF5 and Zarr arrays, unchanged.

Enters: `.npy` (one field, named after the file), `.npz` (one field per entry), `.h5` or a Zarr folder (one field
per dataset), all with the same number of rows; and which arrays to take. Leaves: fields with the same dtypes, dense,
or ragged for a sparse matrix. Costs: one part of about 256 MB in memory per worker; `.npy` is read through a memory
map, `.npz` is unzipped once beside the store being made, after a check of the free disk space. `blocks` reads an
`.npz` as a stream, without unpacking it to disk.

A store's field names have no `/`: the array `train/x` becomes the field `train_x`, and a note says so.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import xxhash

from stoker import bounds
from stoker.display import command, quoted
from stoker.errors import SourceError, StokerError, file_error, require_file
from stoker.ownership import always, writing
from stoker.sources.contract import (
    Json,
    Part,
    PartContext,
    PartData,
    PlainSource,
    Preparation,
    cut_rows,
    recorded_options,
)
from stoker.store.fields import Array, Dense, FieldData, Ragged
from stoker.store.hdf5 import PACKED_BY
from stoker.store.plain import Selection, choose, group_prefix
from stoker.store.reader import Store, open_store
from stoker.store.zarr import is_zarr
from stoker.units import format_bytes

PART_BYTES = 256 << 20
_BLOCK_BYTES = 32 << 20
_DEFLATE_RATIO = 1032  # the most bytes that deflate packs into one
_ROW_COPIES = 3  # copies of a part: as read, as written, and for the hash of its bytes
_HDF5 = {".h5", ".hdf5", ".he5", ".hdf", ".h5ad", ".nxs", ".nc", ".mat"}


@dataclass(frozen=True)
class ArraysSource(PlainSource):
    """Arrays on disk.

    Attributes:
        paths: The files; several files give several fields of one store.
        names: Field names, where the files' own are not wanted: one per field, in order.
        part_bytes: Size of one part, and so of one shard.
        chosen: Which arrays of the file; with one file only.
    """

    paths: tuple[Path, ...]
    names: tuple[str, ...] = ()
    part_bytes: int = PART_BYTES
    chosen: Selection = Selection()  # noqa: RUF009

    kind: ClassVar[str] = "arrays"

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(map(Path, self.paths)))  # strings are allowed

    def options(self) -> Mapping[str, Json]:
        """Return the names, the chosen arrays, and the part size, which decides the shards."""
        chosen = {name: value for name, value in recorded_options(self.chosen).items() if value}
        return recorded_options(self, "paths", "chosen") | chosen

    def prepare(self, scratch: Path) -> Preparation:
        """Check that all arrays have the same rows, and cut them into parts."""
        notes: list[str] = []
        with opened_arrays(self, scratch, notes=notes) as arrays:
            fields = self._named(arrays)
            num_rows, row_bytes = _measure(self.paths[0], fields)
        renamed = {old: new for old, new in zip(arrays, fields, strict=True) if "/" in old}
        rows = max(1, self.part_bytes // max(1, row_bytes))
        parts = cut_rows(num_rows, rows, f"{self.paths[0]} rows", str(self.paths[0]))
        notes += [f"array {old!r} is stored as field {new!r}" for old, new in renamed.items()]
        return Preparation(
            parts, num_rows * row_bytes + (1 << 20), notes=notes, found=num_rows, unit="rows"
        )

    def blocks(self, scratch: Path) -> Iterator[tuple[int, dict[str, FieldData]]]:
        """Yield (rows, fields) from first to last, at most 32 MB or one row at a time.

        An `.npz` is decompressed as a stream; only one in Fortran order goes through `scratch`.
        """
        with opened_arrays(self, scratch, in_order=True) as arrays:
            fields = self._named(arrays)
            num_rows, row_bytes = _measure(self.paths[0], fields)
            step = max(1, _BLOCK_BYTES // max(1, row_bytes))
            for start in range(0, max(1, num_rows), step):
                stop = min(start + step, num_rows)
                yield stop - start, {name: rows.read(start, stop) for name, rows in fields.items()}

    def build(self, part: Part, context: PartContext) -> PartData:
        """Read one range of rows of every array."""
        with opened_arrays(self, context.scratch) as arrays:
            start, stop = part.payload, part.payload + part.num_samples
            fields = self._named(arrays).items()
            return PartData({name: rows.read(start, stop) for name, rows in fields})

    def _named(self, arrays: Mapping[str, Rows]) -> dict[str, Rows]:
        """Return the arrays by the names of their fields."""
        if self.names and len(self.names) != len(arrays):
            raise SourceError(
                f"{len(self.names)} names were given for {len(arrays)} arrays ({', '.join(arrays)}).",
                "one name per array",
                f"--names {quoted(','.join(arrays))}",
            )
        return dict(zip(self.names or _field_names(list(arrays)), arrays.values(), strict=True))


def _measure(path: Path, fields: Mapping[str, Rows]) -> tuple[int, int]:
    """Return the number of rows that all arrays have, and the bytes of one row of all of them."""
    counts = {name: rows.shape[0] for name, rows in fields.items()}
    if len(set(counts.values())) > 1:
        fix = "pack them into separate stores"
        if path.suffix.lower() == ".npz":
            fix = command("stoker", "inspect", path, "--rows", max(counts.values()))
        raise SourceError(
            f"the arrays have different numbers of rows: {counts}.",
            "one first dimension for all",
            fix,
        )
    row_bytes = sum(rows.row_bytes for rows in fields.values())
    bounds.require_memory(
        _ROW_COPIES * row_bytes,
        f"one row of {path} ({format_bytes(row_bytes)})",
        "cut the rows with numpy, so that the first dimension counts samples",
    )
    return next(iter(counts.values())), row_bytes


def _field_names(names: Sequence[str]) -> list[str]:
    """Return the field of each array: `/` becomes `_`. Names that a store cannot have are refused."""
    fields = [name.replace("/", "_") for name in names]
    for name, field in zip(names, fields, strict=True):
        same = [other for other, its in zip(names, fields, strict=True) if its == field]
        unusable = field.startswith("_") or field in {"", ".", ".."} or "\0" in field
        if len(same) == 1 and not unusable:
            continue
        examples = ",".join(f"field{number}" for number in range(len(names)))
        given = (
            f"the array {name!r} would be the field {field!r}."
            if unusable
            else f"the arrays {' and '.join(map(repr, same))} would both be the field {field!r}."
        )
        raise SourceError(
            given,
            "different names, none of which begins with _",
            f"--names {quoted(examples)}, for {', '.join(names)} in this order",
        )
    return fields


@dataclass(frozen=True)
class Rows:
    """An array `(rows, ...)` that is read by ranges of rows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[int, int], FieldData]
    ragged_bytes: int | None = None  # bytes of all values, if rows differ in length
    columns: tuple[str, ...] | None = None  # names of the last axis, where a table gives them
    time: Array | None = None  # time of each row in nanoseconds, if a table gives it

    @classmethod
    def of(cls, values: Array, **of_table: Any) -> Rows:
        """Return the rows of an array in memory, or of a mapped one."""

        def read(start: int, stop: int) -> FieldData:
            return Dense(np.array(values[start:stop]))

        return cls(values.shape, values.dtype, read, **of_table)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; of a ragged array, on average."""
        if self.ragged_bytes is not None:
            return self.ragged_bytes // max(1, self.shape[0]) + 8
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@contextmanager
def opened_arrays(
    source: ArraysSource, scratch: Path, in_order: bool = False, notes: list[str] | None = None
) -> Iterator[dict[str, Rows]]:
    """Open all files; duplicate names and unusable arrays are refused.

    Archives are unpacked into `scratch`, unless rows are read once and `in_order`. Messages for the user are appended
    to `notes`.
    """
    paths = source.paths
    if source.chosen != Selection() and len(paths) > 1:
        raise SourceError(
            f"--fields, --group or --rows with {len(paths)} files.",
            "one file, of which arrays are chosen",
            command("stoker", "inspect", paths[0]),
        )
    if not paths:
        raise SourceError(
            "no array files were given.",
            ".npy, .npz or .h5 files",
            "stoker pack arrays FILE.npy OUT",
        )
    arrays: dict[str, Rows] = {}
    with ExitStack() as stack:
        for path in paths:
            if not is_zarr(path):
                require_file(path, "array file")
            found = _open(path, source.chosen, scratch, stack, in_order, notes)
            for name, rows in found.items():
                if name in arrays:
                    raise SourceError(
                        f"two arrays are called {name!r}.",
                        "different names",
                        "rename one of them with numpy",
                    )
                if not rows.shape or rows.dtype.kind not in "biuf":
                    usable = _usable(path)
                    raise SourceError(
                        f"{path}: array {name!r} has dtype {rows.dtype} and shape {rows.shape}.",
                        "numbers with at least one dimension",
                        command("--fields", ",".join(usable))
                        if usable
                        else _as_numbers(path, rows.dtype),
                    )
                arrays[name] = rows
        if not arrays:
            raise SourceError(f"{paths[0]} holds no arrays.", "at least one array", "")
        yield arrays


def _as_numbers(path: Path, dtype: np.dtype[Any]) -> str:
    """Return a command that writes an array of another kind as numbers."""
    made = path.with_name(f"{path.stem}-numbers.npz")
    values = {
        "V": "{n: a[n] for n in a.dtype.names}" if dtype.names else "",
        "M": "{'seconds': a.astype('M8[s]').astype('int64')}",
        "m": "{'seconds': a.astype('m8[s]').astype('int64')}",
        "c": "{'values': numpy.stack([a.real, a.imag], -1)}",
        "U": "{'labels': numpy.unique(a, return_inverse=True)[1]}",
        "S": "{'labels': numpy.unique(a, return_inverse=True)[1]}",
    }.get(dtype.kind)
    if not values or path.suffix != ".npy":
        return "an array of numbers with a row for each sample"
    code = f"import numpy; a = numpy.load({str(path)!r}); numpy.savez({str(made)!r}, **{values})"
    return f"{command('python3', '-c', code)}; {command('stoker', 'pack', 'arrays', made, 'OUT')}"


def _open(
    path: Path,
    chosen: Selection,
    scratch: Path,
    stack: ExitStack,
    in_order: bool,
    notes: list[str] | None,
) -> dict[str, Rows]:
    suffix = path.suffix.lower()
    if suffix in _HDF5 or path.is_dir():
        store = stack.enter_context(open_store(path, **vars(chosen)))
        if notes is not None:
            notes.extend(store.notes)
        return {name: _stored_rows(store, name) for name in store.fields}
    if suffix not in {".npy", ".npz"}:
        kind = PACKED_BY.get(suffix)
        fix = command("stoker", "pack", kind, path, "OUT") if kind else ""
        raise SourceError(
            f"{path} has the ending {path.suffix!r}.", ".npy, .npz, .h5 or .hdf5", fix
        )
    try:
        if suffix == ".npy":
            return {path.stem: _map(path, path.name)}
        archive = stack.enter_context(bounds.open_zip(path))
        members = _selected(path, archive, _members(path, archive), chosen)
        if not in_order:
            _check_room(path, members.values(), scratch)
        return {
            name: (_stream(archive, member, stack) if in_order else None)
            or _map(_unzip(path, member, scratch), name)
            for name, member in members.items()
        }
    except StokerError:
        raise
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and (known := file_error(error, scratch)) is not None:
            raise known from error
        usable = _usable(path)
        if isinstance(error, _ObjectsError) and not usable:
            one = "" if path.suffix == ".npy" else "['NAME']"
            raise SourceError(
                f"{path} holds Python objects, as pickles, which run code when they are read.",
                "numbers; or samples in memory, from a file of your own",
                f"stoker.pack_from(numpy.load({str(path)!r}, allow_pickle=True){one}, 'OUT')",
            ) from error
        raise SourceError(
            f"{path} cannot be read as a numpy file: {error}.",
            "an intact .npy or .npz",
            command("--fields", ",".join(usable)) if usable else "",
        ) from error


class _ObjectsError(ValueError):
    """An array of Python objects."""


def _usable(path: Path) -> list[str]:
    """Return the arrays of an archive that can be packed together; none if that is not clear."""
    with suppress(*_DAMAGE, OSError, StokerError), bounds.open_zip(path) as archive:
        headers = _headers(archive, _members(path, archive))
        if len({header.shape[0] for header in headers.values()}) == 1:
            return list(headers)
    return []


def _headers(
    archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo]
) -> dict[str, _Header]:
    """Return the headers of arrays of numbers; an unreadable array is left out."""
    headers: dict[str, _Header] = {}
    for name, member in members.items():
        with suppress(ValueError), archive.open(member) as stream:
            header = _read_header(stream, member.filename)
            if header.shape and header.dtype.kind in "biuf":
                headers[name] = header
    return headers


def _stored_rows(store: Store, name: str) -> Rows:
    """Return a field of an HDF5 file; a sparse matrix has ragged ones."""
    info = store.fields[name]
    shape, dtype = (store.num_samples, *info.shape), np.dtype(info.dtype)
    if info.kind == "dense":
        return Rows(shape, dtype, lambda start, stop: Dense(store.read_rows(name, start, stop)))
    total = store.manifest.shards[0].rows[f"{name}/values"] * dtype.itemsize
    return Rows(
        shape, dtype, lambda start, stop: Ragged(*store.read_ragged(name, start, stop)), total
    )


def _selected(
    path: Path, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], chosen: Selection
) -> Mapping[str, zipfile.ZipInfo]:
    """Return the members that were chosen, by their names inside the group; others are not unpacked."""
    if chosen == Selection():
        return members
    # An unreadable member is no candidate; asked for by name, it counts as missing.
    headers = _headers(archive, members)
    lengths = {name: header.shape[0] for name, header in headers.items()}
    prefix = "" if chosen.group is None else group_prefix(path, chosen.group, lengths)
    inside = {name: rows for name, rows in lengths.items() if name.startswith(prefix)}
    sizes = {name: headers[name].data_bytes for name in inside}
    taken = choose(path, inside, sizes, chosen, prefix)
    return {name.removeprefix(prefix): members[name] for name in taken}


_DAMAGE = (
    ValueError, SyntaxError, EOFError, RecursionError, MemoryError, NotImplementedError, RuntimeError,
    zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
"""What numpy and zipfile raise on damaged files, and RuntimeError for an encrypted member."""


# -- numpy ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Header:
    """Header of a numpy file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool
    num_bytes: int

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _read_header(stream: IO[bytes], name: str) -> _Header:
    """Read the header of a numpy file; one that claims gigabytes is refused before it is read."""
    start = stream.read(8)
    if len(start) < 8:
        raise ValueError(f"{name} is empty or ends in its header")
    version = np.lib.format.read_magic(io.BytesIO(start))
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"{name} has the numpy format {version}")
    size = stream.read(2 if version[0] == 1 else 4)
    (length,) = struct.unpack("<H" if version[0] == 1 else "<I", size)
    bounds.NPY_HEADER.check(length, f"the header of {name}")
    text = io.BytesIO(size + stream.read(length))
    form = np.lib.format
    read = form.read_array_header_1_0 if version[0] == 1 else form.read_array_header_2_0
    try:
        shape, is_fortran, dtype = read(text)
    except Exception as error:  # numpy evaluates the text as Python: anything can go wrong
        raise ValueError(f"{name} has a damaged header: {type(error).__name__}") from error
    if dtype.hasobject:
        raise _ObjectsError("Object arrays cannot be loaded: they are pickles, which run code")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name} has shape {shape}")
    return _Header(shape, dtype, is_fortran, 8 + len(size) + length)


def _map(file: Path, name: str) -> Rows:
    with file.open("rb") as stream:
        _check_size(_read_header(stream, name), file.stat().st_size, name)
    return Rows.of(np.load(file, mmap_mode="r", allow_pickle=False))


def _check_size(header: _Header, size_bytes: int, name: str) -> None:
    wanted = header.num_bytes + header.data_bytes
    if wanted > size_bytes:
        raise ValueError(
            f"{name} says shape {header.shape} of {header.dtype}, {format_bytes(header.data_bytes)}, "
            f"but has {format_bytes(size_bytes)}"
        )


# -- archives ------------------------------------------------------------------------------


def _members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the arrays of an archive by their full name, so that `train/x` and `val/x` differ."""
    members: dict[str, zipfile.ZipInfo] = {}
    infos = [member for member in archive.infolist() if not member.is_dir()]
    bounds.MEMBERS.check(len(infos), str(path))
    for member in infos:
        name = member.filename.removesuffix(".npy")
        if name in members:
            raise SourceError(
                f"{path} holds two arrays called {name!r}.",
                "different names",
                "write the file again with numpy.savez",
            )
        most = _DEFLATE_RATIO * (member.compress_size + 64)
        if member.compress_type == zipfile.ZIP_DEFLATED and member.file_size > most:
            raise SourceError(
                f"{path}: {member.filename!r} claims {format_bytes(member.file_size)} in "
                f"{format_bytes(member.compress_size)} of compressed data.",
                f"at most {format_bytes(most)}: deflate packs {_DEFLATE_RATIO} bytes into one at best",
                "copy or write the file again",
            )
        members[name] = member
    return members


def _check_room(path: Path, members: Iterable[zipfile.ZipInfo], scratch: Path) -> None:
    """Refuse an archive that does not fit the disk before anything of it is written."""
    missing = [member for member in members if not _is_there(_place(path, member, scratch), member)]
    total = sum(member.file_size for member in missing)
    bounds.require_disk(scratch, total, f"unpacking {path} ({format_bytes(path.stat().st_size)})")


def _place(path: Path, member: zipfile.ZipInfo, scratch: Path) -> Path:
    """Return where a member is unpacked. Its name in the archive is hashed: it could be any path."""
    key = xxhash.xxh3_64_hexdigest(f"{path}\0{member.filename}".encode(errors="surrogatepass"))
    return scratch / "npz" / f"{key}.npy"


def _is_there(target: Path, member: zipfile.ZipInfo) -> bool:
    return target.exists() and target.stat().st_size == member.file_size


def _unzip(path: Path, member: zipfile.ZipInfo, scratch: Path) -> Path:
    """Unpack a member once, so that parts can be read without decompressing all before them."""
    target = _place(path, member, scratch)
    if _is_there(target, member):
        return target
    _check_room(path, [member], scratch)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        bounds.open_zip(path) as archive,
        archive.open(member) as packed,
        writing(target, always) as temporary,
        temporary.open("xb") as out,
    ):
        _check_size(_read_header(packed, member.filename), member.file_size, member.filename)
        packed.seek(0)
        num_bytes = bounds.copy_to_disk(packed, out, target.parent, f"unpacking {path}")
        if num_bytes != member.file_size:
            raise EOFError(
                f"{member.filename} has {num_bytes} bytes, and the archive says {member.file_size}"
            )
    return target


def _stream(archive: zipfile.ZipFile, member: zipfile.ZipInfo, stack: ExitStack) -> Rows | None:
    """Read a member from start to end without unpacking it; None in Fortran order, where rows are not contiguous."""
    stream = stack.enter_context(archive.open(member))
    header = _read_header(stream, member.filename)
    _check_size(header, member.file_size, member.filename)
    if header.is_fortran and len(header.shape) > 1:
        return None
    done = 0

    def read(start: int, stop: int) -> FieldData:
        nonlocal done
        assert start == done, "a stream is read in order"
        done = stop
        values = np.empty((stop - start, *header.shape[1:]), dtype=header.dtype)
        left = values.reshape(-1).view(np.uint8).data if values.nbytes else memoryview(b"")
        try:
            while left:
                count = stream.readinto(left)  # type: ignore[attr-defined]
                if not count:
                    raise EOFError(f"{member.filename} ends {len(left)} bytes early")
                left = left[count:]
            if stop == header.shape[0]:
                rest = 0
                while piece := stream.read(_BLOCK_BYTES):  # the checksum is compared at the end
                    rest += len(piece)
                if header.num_bytes + header.data_bytes + rest != member.file_size:
                    raise EOFError(f"{member.filename} has not the size that the archive says")
        except _DAMAGE as error:
            raise SourceError(
                f"{archive.filename} cannot be read as a numpy file: {error}.",
                "an intact .npy or .npz",
                "",
            ) from error
        return Dense(values)

    return Rows(header.shape, header.dtype, read)
