"""Writing shards so that they are whole or absent.

Enters: fields in memory. Leaves: one HDF5 file with contiguous, uncompressed, aligned datasets
that h5py and h5ls read as they are, plus block checksums under `/_checksums`. Costs: one copy
to the page cache, one hash pass (about 10 GB/s), one fsync.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import xxhash

from stoker.errors import InputError, unwritable
from stoker.ownership import always, writing
from stoker.store.fields import Array, Series, ShardData
from stoker.store.manifest import BLOCK_BYTES, FieldInfo, ShardInfo

CHECKSUM_GROUP = "_checksums"


def write_shard(
    path: Path, fields: ShardData, label: str, block_bytes: int = BLOCK_BYTES
) -> ShardInfo:
    """Write one shard atomically and return its manifest entry. Blocking; not thread-safe per path."""
    num_samples = count_samples(fields)
    arrays = {
        name: array for field, data in fields.items() for name, array in data.arrays(field).items()
    }
    digests = {name: block_digests(array, block_bytes) for name, array in arrays.items()}
    try:
        # 'earliest' stays readable for every HDF5 since 1.8; 4 KiB alignment leaves direct reads open.
        with (
            writing(path, always) as temporary,
            h5py.File(
                temporary, "x", libver="earliest", alignment_threshold=4096, alignment_interval=4096
            ) as file,
        ):
            file.attrs["num_samples"] = num_samples
            for name, array in arrays.items():
                file.create_dataset(name, data=array, track_times=False)
                file.create_dataset(
                    f"{CHECKSUM_GROUP}/{name}", data=digests[name], track_times=False
                )
            for name, data in fields.items():
                _describe(file[name], FieldInfo.of(data), data)
            file.flush()
            offsets = {
                name: file[name].id.get_offset()
                for name in (*arrays, *(f"{CHECKSUM_GROUP}/{name}" for name in arrays))
            }
    except OSError as error:
        raise unwritable(path, error) from error
    return ShardInfo(
        file=path.name,
        label=label,
        num_samples=num_samples,
        size_bytes=path.stat().st_size,
        checksum=combine_digests(digests),
        rows={name: len(array) for name, array in arrays.items()},
        offsets=offsets,
    )


def count_samples(fields: ShardData) -> int:
    """Return the number of samples all fields agree on."""
    counts = {name: data.num_samples for name, data in fields.items()}
    if not counts:
        raise InputError("a shard was given no fields.", "at least one field", "")
    if len(set(counts.values())) != 1:
        raise InputError(
            f"the fields have different numbers of samples: {counts}.", "equal numbers", ""
        )
    for name in counts:
        if name.startswith("_") or "/" in name or name in {"", ".", ".."} or "\0" in name:
            raise InputError(
                f"{name!r} is not a field name.", "a name without / that does not begin with _", ""
            )
    return next(iter(counts.values()))


def _describe(node: h5py.Dataset | h5py.Group, info: FieldInfo, data: object) -> None:
    """Write attributes that explain the file to people who open it without stoker."""
    node.attrs["kind"] = info.kind
    if info.columns is not None:
        # Variable-length strings live in the file's heap, so thousands of names fit
        # where an attribute is capped at 64 KiB.
        node.attrs["columns"] = (
            "\n".join(info.columns) if len("".join(info.columns)) < 60_000 else "see store.json"
        )
    if isinstance(data, Series):
        node.attrs["window"] = data.window
        if data.duration_ns is not None:
            node.attrs["duration_ns"] = data.duration_ns
            node.attrs["time_unit"] = "nanoseconds since 1970-01-01, open of the bar"


def block_digests(array: Array, block_bytes: int) -> Array:
    """Return one 64-bit digest per block of the array's bytes."""
    view = array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
    starts = range(0, array.nbytes, block_bytes)
    digests = (xxhash.xxh3_64_intdigest(view[start : start + block_bytes]) for start in starts)
    return np.fromiter(digests, dtype="<u8", count=len(starts))


def combine_digests(digests: dict[str, Array]) -> str:
    """Return one digest over the block digests of all arrays, by name."""
    total = xxhash.xxh3_64()
    for name in sorted(digests):
        total.update(name.encode() + b"\0")
        total.update(np.ascontiguousarray(digests[name], dtype="<u8").tobytes())
    return total.hexdigest()
