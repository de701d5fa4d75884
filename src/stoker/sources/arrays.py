"""`stoker pack arrays`: numpy and HDF5 arrays as they are.

Enters: `.npy` (one field, named after the file), `.npz` (one field per entry) or `.h5` (one field
per dataset), all with the same number of rows. Leaves: dense fields with the same dtypes. Costs:
one part of about 256 MB in memory per worker; `.npy` is read through a memory map, `.npz` is
unzipped once beside the store being made.
"""

from __future__ import annotations

import math
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from stoker.display import quoted
from stoker.errors import SourceError, require_file
from stoker.sources.contract import Json, Part, PartContext, PartData, Preparation
from stoker.store.fields import Array, Dense
from stoker.store.reader import open_store

PART_BYTES = 256 << 20
_HDF5 = {".h5", ".hdf5", ".he5", ".hdf"}


@dataclass(frozen=True)
class ArraysSource:
    """Arrays on disk.

    Attributes:
        paths: The files; several files give several fields of one store.
        names: Field names, where the files' own are not wanted: one per field, in order.
        part_bytes: Size of one part, and so of one shard.
    """

    paths: tuple[Path, ...]
    names: tuple[str, ...] = ()
    part_bytes: int = PART_BYTES

    kind: ClassVar[str] = "arrays"
    version: ClassVar[int] = 1
    row_limit_seconds: ClassVar[float | None] = None

    def files(self) -> Sequence[Path]:
        """The array files."""
        return self.paths

    def options(self) -> Mapping[str, Json]:
        """The names, and the part size: it decides the shards."""
        return {"names": list(self.names), "part_bytes": self.part_bytes}

    def prepare(self, scratch: Path) -> Preparation:
        """Check that all arrays have the same rows, and cut them into parts."""
        with _opened(self.paths, scratch) as arrays:
            counts = {
                name: array.shape[0]
                for name, array in zip(self._names(arrays), arrays.values(), strict=True)
            }
            if len(set(counts.values())) != 1:
                raise SourceError(
                    f"the arrays have different numbers of rows: {counts}.",
                    "one first dimension for all",
                    "pack them into separate stores",
                )
            num_rows = next(iter(counts.values()))
            row_bytes = sum(array.row_bytes for array in arrays.values())
        rows = max(1, self.part_bytes // max(1, row_bytes))
        starts = range(0, num_rows, rows) if num_rows else [0]
        parts = [
            Part(
                number,
                f"{self.paths[0]} rows {start}-{min(start + rows, num_rows)}",
                min(rows, num_rows - start),
                start,
                str(self.paths[0]),
                start,
            )
            for number, start in enumerate(starts)
        ]
        return Preparation(parts, num_rows * row_bytes + (1 << 20))

    def build(self, part: Part, context: PartContext) -> PartData:
        """Read one range of rows of every array."""
        with _opened(self.paths, context.scratch) as arrays:
            names = self._names(arrays)
            stop = part.payload + part.num_samples
            fields = {
                name: Dense(array.read(part.payload, stop))
                for name, array in zip(names, arrays.values(), strict=True)
            }
        return PartData(fields)

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Nothing to add."""
        del extras
        return {}

    def _names(self, arrays: Mapping[str, _Rows]) -> list[str]:
        if not self.names:
            return list(arrays)
        if len(self.names) != len(arrays):
            raise SourceError(
                f"{len(self.names)} names were given for {len(arrays)} arrays ({', '.join(arrays)}).",
                "one name per array",
                f"--names {quoted(','.join(arrays))}",
            )
        return list(self.names)


@dataclass(frozen=True)
class _Rows:
    """An array that hands out ranges of rows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[int, int], Array]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@contextmanager
def _opened(paths: Sequence[Path], scratch: Path) -> Iterator[dict[str, _Rows]]:
    """Open all files; duplicate names and unusable arrays are refused."""
    if not paths:
        raise SourceError(
            "no array files were given.",
            ".npy, .npz or .h5 files",
            "stoker pack arrays FILE.npy OUT",
        )
    arrays: dict[str, _Rows] = {}
    with ExitStack() as stack:
        for path in paths:
            for name, rows in _open(require_file(path, "array file"), scratch, stack).items():
                if name in arrays:
                    raise SourceError(
                        f"two arrays are called {name!r}.",
                        "different names",
                        "rename one of the files",
                    )
                if not rows.shape or rows.dtype.kind not in "biuf":
                    raise SourceError(
                        f"{path}: array {name!r} has dtype {rows.dtype} and shape {rows.shape}.",
                        "numbers with at least one dimension",
                        "convert it with numpy first",
                    )
                arrays[name] = rows
        yield arrays


def _open(path: Path, scratch: Path, stack: ExitStack) -> dict[str, _Rows]:
    suffix = path.suffix.lower()
    if suffix in _HDF5:
        store = stack.enter_context(open_store(path))
        return {
            name: _Rows(
                (store.num_samples, *info.shape),
                np.dtype(info.dtype),
                partial(store.read_rows, name),
            )
            for name, info in store.fields.items()
        }
    if suffix not in {".npy", ".npz"}:
        raise SourceError(f"{path} has the ending {path.suffix!r}.", ".npy, .npz, .h5 or .hdf5", "")
    try:
        files = [path] if suffix == ".npy" else _unzip(path, scratch)
        return {file.stem: _map(file) for file in files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise SourceError(
            f"{path} cannot be read as a numpy file: {error}.", "an intact .npy or .npz", ""
        ) from error


def _map(file: Path) -> _Rows:
    values = np.load(file, mmap_mode="r", allow_pickle=False)
    return _Rows(values.shape, values.dtype, lambda start, stop: np.array(values[start:stop]))


def _unzip(path: Path, scratch: Path) -> list[Path]:
    """Unpack an archive once, so that parts can be read without loading it whole each time."""
    folder = scratch / "npz" / path.name
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            target = folder / Path(member.filename).name
            if not target.exists() or target.stat().st_size != member.file_size:
                folder.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as packed, target.open("wb") as out:
                    shutil.copyfileobj(packed, out, 8 << 20)
        return [folder / Path(member.filename).name for member in archive.infolist()]
