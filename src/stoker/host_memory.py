"""Host memory that is reused: batches, pictures on their way into them, and results of augmentation on a CPU.

Enters: sizes in bytes, or shapes. Leaves: arrays and tensors over memory that earlier ones gave back. Costs: some µs
for each; up to four unused buffers of each name stay allocated.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

LARGE_BYTES = 1 << 20
"""Tensors from this size on use recycled memory; malloc is fast enough for smaller ones."""
_MOST_KEPT = 4
_MOST_TIMES_LARGER = 4
"""A larger buffer is freed, else a kept batch of 5 MB held the 1.2 GB of an earlier call. A short last batch may use
one."""


class Recycled:
    """Host memory that is reused after the last array or tensor over it is freed. Thread safe.

    New memory costs a page fault for every 4 kB: gathering a batch of 30 MB took 9 ms into new memory and 3 ms into
    reused memory. malloc returns large blocks to the kernel, so it does not help. Memory is lent by field name,
    so that keeping a batch's labels does not keep its images.
    """

    def __init__(self) -> None:
        self._free: dict[str, list[mmap.mmap]] = {}

    def lend(self, name: str, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return `(num_bytes,)` uint8, page aligned and not initialised."""
        free = self._free.setdefault(name, [])
        try:
            buffer = free.pop()  # the last one freed: most likely still in the cache
        except IndexError:
            buffer = None
        if buffer is None or not num_bytes <= len(buffer) <= _MOST_TIMES_LARGER * num_bytes:
            buffer = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(buffer, dtype=np.uint8)
        weakref.finalize(whole, _take_back, self._free, name, buffer).atexit = False
        return whole[:num_bytes]

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the CPU that is not initialised; a small one has memory of its own."""
        num_bytes = math.prod(shape) * dtype.itemsize
        # torch.compile cannot trace the lending: its guards fail on the registry of `weakref.finalize`.
        if num_bytes < LARGE_BYTES or torch.compiler.is_compiling():
            return torch.empty(*shape, dtype=dtype, device="cpu")  # not on torch's default device
        return torch.from_numpy(self.lend(name, num_bytes)).view(dtype).view(*shape)

    def close(self) -> None:
        """Free the unused buffers; the others are freed with their last user."""
        self._free.clear()

    @property
    def num_free(self) -> int:
        """Number of unused buffers."""
        return sum(map(len, self._free.values()))


def _take_back(free: dict[str, list[mmap.mmap]], name: str, buffer: mmap.mmap) -> None:
    """Keep a buffer for reuse, up to a few: more were needed only while many batches were kept."""
    kept = free.get(name)
    if kept is not None and len(kept) < _MOST_KEPT:
        kept.append(buffer)
