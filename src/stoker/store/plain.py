"""Any plain HDF5 file as a one-shard store, opened in place; nothing is converted.

Enters: an `.h5` with arrays of equal first dimension (`features`, `targets`). Leaves: a
`Manifest` of dense fields and notes on what was left aside. Costs: a walk over the file's
directory; no data is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from stoker.display import command
from stoker.errors import StoreError
from stoker.store.hdf5 import named_damage, open_hdf5
from stoker.store.manifest import FieldInfo, Manifest, ShardInfo

_MOST_BYTES = 8
"""Of a number: torch has no longer ones."""


class PlainFile(NamedTuple):
    """A plain file as a store.

    Attributes:
        manifest: What it would have.
        aside: Datasets that are no field, by name, and why.
        notes: What else a user should know.
    """

    manifest: Manifest
    aside: dict[str, str]
    notes: tuple[str, ...]


def describe_plain_file(path: Path) -> PlainFile:
    """Return what a plain file holds; reads no data."""
    notes: tuple[str, ...] = ()
    with open_hdf5(path) as file, named_damage(path):
        arrays, aside = _find_arrays(file)
        if not arrays:
            raise StoreError(
                f"{path} holds no numeric array.",
                "at least one dataset of numbers, for example 'features'",
                command("h5ls", "-r", path),
            )
        num_samples = _count(arrays)
        fields: dict[str, FieldInfo] = {}
        for name, (shape, dtype) in arrays.items():
            if shape[0] == num_samples:
                fields[name] = FieldInfo(kind="dense", dtype=dtype, shape=list(shape[1:]))
            else:
                aside[name] = f"dataset {name!r} has {shape[0]} rows, not {num_samples}: left aside"
        stated = file.attrs.get("num_samples")
        if stated is not None and not np.array_equal(stated, num_samples):
            notes = (
                f"the attribute num_samples says {stated}, but the data has {num_samples} rows",
            )
    shard = ShardInfo(
        file=path.name,
        label=path.name,
        num_samples=num_samples,
        size_bytes=path.stat().st_size,
        checksum="",
        rows=dict.fromkeys(fields, num_samples),
    )
    manifest = Manifest(num_samples=num_samples, fields=fields, shards=[shard])
    return PlainFile(manifest, aside, notes)


def _find_arrays(file: h5py.File) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, str]]:
    arrays: dict[str, tuple[tuple[int, ...], str]] = {}
    aside: dict[str, str] = {}

    def visit(name: str | bytes, node: Any) -> None:
        if not isinstance(node, h5py.Dataset):
            return
        if not isinstance(name, str):  # h5py gives bytes where a name is not UTF-8
            aside[repr(name)] = f"dataset {name!r} has a name that is not text: left aside"
            return
        try:
            dtype = node.dtype
        except TypeError as error:  # numbers of 24 bits, for example
            aside[name] = f"dataset {name!r} has a type that numpy has not ({error}): left aside"
            return
        if node.shape is None or len(node.shape) == 0:
            aside[name] = f"dataset {name!r} is a single value: left aside"
        elif dtype.kind not in "biuf" or dtype.itemsize > _MOST_BYTES:
            aside[name] = f"dataset {name!r} has dtype {dtype}: left aside"
        else:
            arrays[name] = (tuple(map(int, node.shape)), dtype.str)

    file.visititems(visit)
    return arrays, aside


def _count(arrays: dict[str, tuple[tuple[int, ...], str]]) -> int:
    """`features` decides; without it, the length that most arrays share, the longest on a tie."""
    if "features" in arrays:
        return arrays["features"][0][0]
    lengths = [shape[0] for shape, _ in arrays.values()]
    return max(set(lengths), key=lambda length: (lengths.count(length), length))
