"""Which data a run was trained on: a few values that a checkpoint keeps, and the comparison with another run's.

Enters: an open store. Leaves: its identity in plain values; an error if another identity is of other data. Costs:
nothing for a packed store, whose manifest has checksums; 1 MiB of reads for each plain file, once.

A plain file is known by its size and by 16 blocks of 64 KiB, evenly spread from its first byte to its last. A change
elsewhere in a larger file that leaves its size as it was shows in its time alone. That is a note and no refusal: a
copy has another time, too. Only `stoker pack` has checksums of all bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stoker.errors import InputError
from stoker.stalls import Waiting
from stoker.store.reader import Store

_BLOCK_BYTES, _NUM_BLOCKS = 64 << 10, 16


def identify(store: Store) -> dict[str, Any] | None:
    """Return the identity of a store's data; None if it has no files (arrays in memory) or they cannot be read.

    Returns:
        `digest`, which is the same for equal data, and `written_ns`, the newest time of files without checksums.
    """
    try:
        digest = xxhash.xxh3_64()
        newest: int | None = None
        for info, shard in zip(store.manifest.shards, store.shards, strict=True):
            if info.checksum:
                digest.update(f"{info.num_samples} {info.checksum} ".encode())
            elif shard.path.is_file():
                digest.update(_sampled(shard.path))
                newest = max(newest or 0, shard.path.stat().st_mtime_ns)
            elif shard.path.is_dir():  # Zarr
                for path in sorted(each for each in shard.path.rglob("*") if each.is_file()):
                    found = path.stat()
                    digest.update(f"{path.relative_to(shard.path)} {found.st_size} ".encode())
                    newest = max(newest or 0, found.st_mtime_ns)
            else:
                return None
        return {"digest": digest.hexdigest(), "written_ns": newest}
    except OSError:  # removed, or on a bad sector: reading the samples will report it
        return None


def _sampled(path: Path) -> bytes:
    """Return a digest of a file's size and of evenly spread blocks; of all bytes if the file is small."""
    made = xxhash.xxh3_128()
    with Waiting(path), path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        made.update(f"{size} ".encode())
        for at in np.linspace(0, max(0, size - _BLOCK_BYTES), _NUM_BLOCKS).astype(np.int64):
            file.seek(int(at))
            made.update(file.read(_BLOCK_BYTES))
    return made.digest()


def compare_identity(
    saved: Mapping[str, Any], own: Mapping[str, Any] | None, name: str
) -> str | None:
    """Return a note if the files were written to or copied since; None if nothing differs, or `own` is None.

    Raises `InputError` for other data.
    """
    if own is None:
        return None
    if saved.get("digest") != own["digest"]:
        raise InputError(
            f"{name} holds other data than when the state was saved.",
            "the same files: what was learned and the order of samples belong to them",
            "the old files in their place; or start again, in another run folder",
        )
    if saved.get("written_ns") != own["written_ns"]:
        return (
            f"{name} was written to or copied since the state was saved; its size and the blocks that were looked at "
            "are the same. Stores of `stoker pack` have checksums of every byte"
        )
    return None
