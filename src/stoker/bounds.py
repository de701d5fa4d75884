"""Limits of memory and disk for one input, checked before either is taken.

Enters: a size that a header claims, or the bytes read so far. Leaves: nothing, or an error with the size
found, the limit and what to type. Costs: nothing below `SMALL_BYTES`; above it about 1 ms, to read how much memory
is available.

There are two kinds of limit. A `Bound` is the same number on every machine: an input above it is damaged or
malicious. `require_memory` and `require_disk` compare with the free memory and disk of this machine.
"""

from __future__ import annotations

import shutil
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from stoker.display import command
from stoker.errors import SourceError, StokerError
from stoker.machine import available_memory
from stoker.units import GIB, KIB, MIB, format_bytes

SMALL_BYTES = 64 * MIB
"""Less memory than this is taken without a check."""
DISK_RESERVE_BYTES = 64 * MIB
"""Space that unpacking leaves free on a disk: a full disk stops other programs."""
_COPY_BYTES = 8 * MIB
_ZIP_TAIL_BYTES = 128 * KIB  # a comment of 64 KiB, and the records around it


@dataclass(frozen=True)
class Bound:
    """A limit that is the same on every machine: its `name` in messages, and the most bytes, or `unit`s."""

    name: str
    most: int
    unit: str = "bytes"

    def check(
        self, found: int, what: str, fix: str = "", error: type[StokerError] = SourceError
    ) -> None:
        """Raise `error` when `found`, the size that was claimed or counted, exceeds the limit.

        `what` names the thing of that size ("data.h5: one chunk of dataset 'x'"); `fix` is what to type next.
        """
        if found > self.most:
            raise error(f"{what} has {self.shown(found)}.", self.allowed, fix)

    def shown(self, size: int) -> str:
        """Return a size with its unit."""
        return format_bytes(size) if self.unit == "bytes" else f"{size:,} {self.unit}"

    @property
    def allowed(self) -> str:
        """The limit in words."""
        return f"at most {self.shown(self.most)}: the limit of {self.name}"


MANIFEST = Bound("a store.json", 64 * MIB)
"""About 50,000 shards. Parsing takes up to 20 times as much memory."""
NPY_HEADER = Bound("a numpy header", 64 * KIB)
MEMBERS = Bound("an archive or HDF5 file", 10_000, "arrays")
DIRECTORY = Bound("the list of files in an archive", 64 * MIB)
"""About 800,000 names. Opening an archive makes an object of each first, ten times as large."""
OBJECTS = Bound("an HDF5 file", 1_000_000, "groups and datasets")
DEPTH = Bound("an HDF5 file", 200, "nested groups")
CHUNK = Bound("an HDF5 chunk", GIB)
"""Decoded. A reader holds three copies of a chunk, and every reader thread holds another chunk."""
UNWRITTEN = Bound("rows that were never written", 4 * GIB)
PIXELS = Bound("a picture", 178_956_970, "pixels")
"""Pillow's own default limit."""
LINE = Bound("a line of text", 16 * MIB)
RECORD = Bound("one record or structure", 64 * MIB)


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open an archive for reading, after a check of the size of its list of files.

    Raises:
        SourceError: The list is longer than `DIRECTORY`.
        zipfile.BadZipFile: It is no archive.
    """
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _ZIP_TAIL_BYTES))
        tail = file.read(_ZIP_TAIL_BYTES)
    end = tail.rfind(b"PK\5\6")
    size = struct.unpack_from("<I", tail, end + 12)[0] if 0 <= end <= len(tail) - 22 else 0
    # A large archive (zip64) has the size in 64 bits, in a record of its own; a locator before the end marks it.
    if tail[max(0, end - 20) : max(0, end - 16)] == b"PK\6\7":
        large = tail.rfind(b"PK\6\6", 0, end - 20)
        size = struct.unpack_from("<Q", tail, large + 40)[0] if 0 <= large <= end - 76 else 0
    DIRECTORY.check(size, f"the list of files in {path}", command("unzip", "-Z1", path))
    return zipfile.ZipFile(path)


def require_memory(
    num_bytes: int, what: str, fix: str = "", error: type[StokerError] = SourceError
) -> None:
    """Raise when `num_bytes`, the total that a step holds at once, are more than this process can take.

    The other arguments are those of `Bound.check`: what needs the memory ("one row of data.npz"), fix, error.
    """
    if num_bytes < SMALL_BYTES:
        return
    free = available_memory()
    if free is not None and num_bytes > free:
        raise error(
            f"{what} needs {format_bytes(num_bytes)} of memory.",
            f"at most {format_bytes(free)}: the memory that is available",
            fix or "free some memory, or use a machine with more",
        )


def require_disk(
    folder: Path, num_bytes: int, what: str, error: type[StokerError] = SourceError
) -> None:
    """Raise when `num_bytes` would not fit on the disk of `folder`, which need not exist yet."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = max(0, shutil.disk_usage(existing).free - DISK_RESERVE_BYTES)
    if num_bytes > free:
        raise error(
            f"{what} needs {format_bytes(num_bytes)} on the disk of {existing}.",
            f"at most {format_bytes(free)}: the space that is free there",
            f"{command('df', '-h', existing)}, then free some space",
        )


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def copy_to_disk(packed: _Readable, plain: IO[bytes], folder: Path, what: str) -> int:
    """Copy a stream of unknown size; raise before it fills the disk of `folder`. Return the number of bytes."""
    total = 0
    while piece := packed.read(_COPY_BYTES):
        if shutil.disk_usage(folder).free - len(piece) < DISK_RESERVE_BYTES:
            raise SourceError(
                f"{what}: the disk of {folder} was full after {format_bytes(total)} were unpacked.",
                "content that fits the disk",
                f"{command('df', '-h', folder)}, then free some space",
            )
        plain.write(piece)
        total += len(piece)
    return total


def read_within(
    bound: Bound, pieces: Iterator[bytes], what: str, fix: str, error: type[StokerError]
) -> bytes:
    """Join pieces; raise as soon as they exceed the bound (as `Bound.check` does). The rest is not read."""
    parts: list[bytes] = []
    total = 0
    for piece in pieces:
        parts.append(piece)
        total += len(piece)
        if total > bound.most:
            raise error(f"{what} has {bound.shown(total)} or more.", bound.allowed, fix)
    return b"".join(parts)
