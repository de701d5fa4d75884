"""Bits that change in memory, for `faults.py`: in the page cache, and in the buffer that a file was read into.

Enters: a file, or a way to read an epoch. Leaves: a changed byte; or how many samples came changed.

What is promised: the checksums of a store are looked at when a block is in host memory, so that whatever changed before
is noticed: on the disk, in the page cache, on the network. What changes in host or device memory afterwards is not.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from fault_data import WIDTH, read_epoch
from stoker.store.arrays import OpenFile, StoredArray


def flip_in_page_cache(path: Path) -> None:
    """Change a byte through a shared mapping, as a stray write of another process, and set the times back."""
    time.sleep(0.05)  # the times of files move with the kernel's clock
    before, at = path.stat(), path.stat().st_size * 3 // 4
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        pages[at] ^= 0x10
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flipped_in_buffer(way: str, is_checked: bool, folder: Path) -> dict[str, Any]:
    """Flip a bit of the host memory that a file was read into: before its checksum was looked at, or behind it."""
    kind, name = (StoredArray, "read_into") if is_checked else (OpenFile, "_read")
    inner, left = getattr(kind, name), [1]

    def read(self: Any, *given: Any) -> None:
        inner(self, *given)
        out = next(one for one in given if isinstance(one, memoryview | np.ndarray))
        values = np.frombuffer(out, np.uint8) if isinstance(out, memoryview) else out.view(np.uint8)
        if left and values.size >= WIDTH * 4:
            left.pop()
            values.reshape(-1)[values.size // 2] ^= 0x10

    setattr(kind, name, read)
    return read_epoch(way, folder)


BUFFERS = {
    "a bit flipped in the buffer of a read": False,
    "a bit flipped in a buffer behind its checksum": True,
}
