"""A store over arrays in memory: the same `Store`, without files.

Enters: fields as they would be written to a shard. Leaves: a `Store` that reads from the arrays themselves. Costs:
nothing is copied until it is read; the arrays must not change meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np

from stoker.store.arrays import OpenFile, Stamp, StoredArray
from stoker.store.fields import Array, FieldData
from stoker.store.hdf5 import Location
from stoker.store.manifest import BLOCK_BYTES, FieldInfo, Manifest, ShardInfo
from stoker.store.reader import Store
from stoker.store.shard import Shard

_NOWHERE = Path("/dev/null/memory")
"""A store must have a path; this one cannot be a file or folder."""


class _MemoryFile:
    """Stand-in for `OpenFile` that reads from an array."""

    def __init__(self, values: Array) -> None:
        self.direct = False
        self.opened_as = Stamp(0, 0, 0, 0)
        self._bytes = values.reshape(-1).view(np.uint8)

    def read(self, offset: int, out: memoryview, dataset: str) -> None:  # noqa: ARG002
        """Copy bytes; numpy does it without the interpreter's lock."""
        np.copyto(np.frombuffer(out, np.uint8), self._bytes[offset : offset + len(out)])

    def stamp(self) -> Stamp:
        """Return a constant: changes of an array in memory are not noticed."""
        return self.opened_as

    def expect(self, offset: int, num_bytes: int) -> None:
        """Nothing can be read ahead."""


def memory_store(fields: Mapping[str, FieldData], name: str) -> Store:
    """Return a store over fields in memory, all with the same number of samples; messages call it `name`."""
    datasets = {
        name: array for field, data in fields.items() for name, array in data.arrays(field).items()
    }
    num_samples = next(iter(fields.values())).num_samples
    info = ShardInfo(
        file=name,
        label=name,
        num_samples=num_samples,
        size_bytes=sum(values.nbytes for values in datasets.values()),
        checksum="",
        rows={dataset: len(values) for dataset, values in datasets.items()},
    )
    described = {field: FieldInfo.of(data) for field, data in fields.items()}
    manifest = Manifest(num_samples=num_samples, fields=described, shards=[info])

    def make() -> dict[str, StoredArray]:
        made = {}
        for dataset, values in datasets.items():
            place = Location(_NOWHERE, dataset, values.shape, values.dtype, "contiguous", offset=0)
            file = cast(OpenFile, _MemoryFile(values))
            made[dataset] = StoredArray(file, place, None, BLOCK_BYTES)
        return made

    shard = Shard(_NOWHERE, None, {}, BLOCK_BYTES, make=make)
    store = Store(_NOWHERE, manifest, [shard], None, (), name)
    # Pickled with its arrays: another process gets a copy of them.
    store.made_by = memory_store, (dict(fields), name)
    return store


def is_in_memory(store: Store) -> bool:
    """Whether a store has no files, so that no command can inspect it."""
    return store.made_by is not None and store.made_by[0] is memory_store
