"""Any plain HDF5 file as a one-shard store, opened in place; nothing is converted.

Enters: an `.h5` with arrays of equal first dimension (`features`, `targets`). Leaves: a
`Manifest` of dense fields and notes on what was left aside. Costs: a walk over the file's
directory; no data is read. What a file only claims (chunks of gigabytes, rows that were never
written, groups without end) is refused by `stoker.bounds` before memory is taken for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from stoker import bounds
from stoker.display import command, nearest
from stoker.errors import StoreError
from stoker.store.hdf5 import check_claims, named_damage, open_hdf5
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


def describe_plain_file(path: Path, group: str | None = None) -> PlainFile:
    """Return what a plain file holds; reads no data.

    Args:
        path: The file.
        group: Only what is in this group, by its names there; None is the whole file.
    """
    notes: tuple[str, ...] = ()
    with open_hdf5(path) as file, named_damage(path):
        arrays, aside = _find_arrays(file)
        if group is not None:
            arrays, aside = _within(path, group, arrays, aside)
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
                if "/" in name:
                    aside[name] += f" (group={name.rpartition('/')[0]!r} loads it)"
        bounds.MEMBERS.check(len(fields), str(path), command("h5ls", "-r", path), StoreError)
        for name in fields:
            check_claims(path, file[f"{group}/{name}" if group else name])
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


def _within(
    path: Path, group: str, arrays: dict[str, Any], aside: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what lies in a group, by its names there."""
    start = group.strip("/") + "/"
    groups = sorted({name.rpartition("/")[0] for name in arrays if "/" in name})
    if not any(name.startswith(start) for name in arrays):
        near = nearest(group, groups) or next(iter(groups), None)
        raise StoreError(
            f"{path} has no numeric array in a group {group!r}.",
            f"one of {', '.join(groups)}" if groups else "no group=: the file has no groups",
            f"group={near!r}" if near else "leave group out",
        )
    inside = {name[len(start) :]: fact for name, fact in arrays.items() if name.startswith(start)}
    return inside, {n[len(start) :]: why for n, why in aside.items() if n.startswith(start)}


def _find_arrays(file: h5py.File) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, str]]:
    arrays: dict[str, tuple[tuple[int, ...], str]] = {}
    aside: dict[str, str] = {}
    for raw_name, identifier in _walk(file):
        fact = _describe(raw_name, identifier)
        if isinstance(fact, str):
            name = _text(raw_name)
            aside[name if isinstance(name, str) else repr(name)] = (
                f"dataset {name!r} {fact}: left aside"
            )
        else:
            arrays[raw_name.decode()] = fact
    return arrays, aside


def _describe(raw_name: bytes, identifier: Any) -> tuple[tuple[int, ...], str] | str:
    """Return shape and dtype of an array of numbers, or why a dataset is none."""
    if not isinstance(_text(raw_name), str):
        return "has a name that is not text"
    node = h5py.Dataset(identifier)
    try:
        dtype = node.dtype
    except TypeError as error:  # numbers of 24 bits, for example
        return f"has a type that numpy has not ({error})"
    if node.shape is None or len(node.shape) == 0:
        return "is a single value"
    if dtype.kind not in "biuf" or dtype.itemsize > _MOST_BYTES:
        return f"has dtype {dtype}"
    return tuple(map(int, node.shape)), dtype.str


def _text(raw_name: bytes) -> str | bytes:
    try:
        return raw_name.decode()
    except UnicodeDecodeError:
        return raw_name


def _walk(file: h5py.File) -> Iterator[tuple[bytes, Any]]:
    """Yield path and identifier of every dataset, each once, by name.

    h5py's own walk recurses in C, and groups 20,000 deep end the process.
    """
    h5o, name = h5py.h5o, file.filename
    seen = {h5o.get_info(file.id).addr}
    waiting = [(b"", file.id, iter(_links(file.id, name)))]
    while waiting:
        prefix, group, links = waiting[-1]
        link = next(links, None)
        if link is None:
            waiting.pop()
            continue
        address = h5o.get_info(group, link).addr
        if address in seen:  # a second name, or a group within itself
            continue
        seen.add(address)
        bounds.OBJECTS.check(len(seen), name, command("h5ls", file.filename), StoreError)
        child = h5o.open(group, link)
        if isinstance(child, h5py.h5d.DatasetID):
            yield prefix + link, child
        elif isinstance(child, h5py.h5g.GroupID):
            bounds.DEPTH.check(len(waiting), name, command("h5ls", file.filename), StoreError)
            waiting.append((prefix + link + b"/", child, iter(_links(child, name))))


def _links(group: Any, name: str) -> list[bytes]:
    """Return the names of what lies in a group; links to other places are left out."""
    found: list[bytes] = []

    def take(link: bytes) -> bool | None:
        found.append(link)
        return len(found) > bounds.OBJECTS.most or None  # anything but None ends the walk

    group.links.iterate(take)
    bounds.OBJECTS.check(len(found), name, command("h5ls", name), StoreError)
    hard = h5py.h5l.TYPE_HARD
    return sorted(link for link in found if group.links.get_info(link).type == hard)


def _count(arrays: dict[str, tuple[tuple[int, ...], str]]) -> int:
    """`features` decides; without it, the length that most arrays share, the longest on a tie."""
    if "features" in arrays:
        return arrays["features"][0][0]
    lengths = [shape[0] for shape, _ in arrays.values()]
    return max(set(lengths), key=lambda length: (lengths.count(length), length))
