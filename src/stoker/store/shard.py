"""One HDF5 file of a store, opened on first use and held against its manifest entry.

Enters: a path and, for a packed store, its `ShardInfo`. Leaves: `StoredArray`s by dataset path,
or an error that says whether the shard is missing, cut short, or another one. Costs: about 1 ms
and 0.1 ms per dataset, once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from stoker.errors import CorruptError, StoreError
from stoker.store.arrays import OpenFile, StoredArray
from stoker.store.fields import Array
from stoker.store.hdf5 import Location, locate, named_damage, open_hdf5
from stoker.store.manifest import ShardInfo
from stoker.store.writer import CHECKSUM_GROUP, combine_digests


class Shard:
    """A shard; thread-safe, lazy.

    Args:
        path: The HDF5 file.
        info: Its manifest entry; None for a plain file, which then has no checksums.
        datasets: Dataset paths to expose, with the dtype and row shape each must have.
        block_bytes: Bytes under one checksum.
    """

    def __init__(
        self,
        path: Path,
        info: ShardInfo | None,
        datasets: Mapping[str, tuple[str, list[int]]],
        block_bytes: int,
    ) -> None:
        self.path = path
        self.info = info
        self._datasets = datasets
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._file: OpenFile | None = None
        self._arrays: dict[str, StoredArray] | None = None
        self._cached: dict[str, Array] = {}

    @property
    def arrays(self) -> dict[str, StoredArray]:
        """The datasets by path; opens the file on first use."""
        if self._arrays is None:
            with self._lock:
                if self._arrays is None:
                    self._arrays = self._open()
        return self._arrays

    def whole(self, dataset: str) -> Array:
        """Return a small dataset (offsets, ends) entirely, kept in memory."""
        if (known := self._cached.get(dataset)) is None:
            array = self.arrays[dataset]
            known = self._cached.setdefault(dataset, array.read(0, len(array)))
        return known

    def close(self) -> None:
        """Release the file; the next use opens it again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file, self._arrays, self._cached = None, None, {}

    def _open(self) -> dict[str, StoredArray]:
        self._check_file()
        self._file = OpenFile(self.path)
        with open_hdf5(self.path) as file, named_damage(self.path):
            digests = self._read_digests(file) if self.info is not None else {}
            return {name: self._locate(file, name, digests.get(name)) for name in self._datasets}

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

    def _locate(self, file: h5py.File, name: str, digests: Array | None) -> StoredArray:
        dataset = file[name]
        if not isinstance(dataset, h5py.Dataset):
            raise KeyError(f"{name!r} is no dataset")
        location = locate(self.path, dataset)
        if self.info is not None:
            self._check_rows(name, location)
        assert self._file is not None
        return StoredArray(self._file, location, digests, self._block_bytes)

    def _check_rows(self, name: str, location: Location) -> None:
        assert self.info is not None
        dtype, shape = self._datasets[name]
        expected = (self.info.rows.get(name), *shape)
        if location.shape != expected or location.dtype != np.dtype(dtype):
            raise CorruptError(
                f"{self.path}: dataset {name!r} is {location.dtype} {location.shape}.",
                f"{dtype} {expected}, as the manifest says",
                "pack again",
            )

    def _read_digests(self, file: h5py.File) -> dict[str, Array]:
        assert self.info is not None
        digests = {
            name: np.asarray(file[f"{CHECKSUM_GROUP}/{name}"][()], dtype="<u8")
            for name in self._datasets
        }
        if combine_digests(digests) != self.info.checksum:
            raise CorruptError(
                f"{self.path} is not the shard that the manifest describes (its checksums differ).",
                f"the shard {self.info.label!r}",
                "copy the whole folder from one place, or pack again",
            )
        return digests
