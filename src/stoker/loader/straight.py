"""Batches of an ordered epoch in host memory: read once, straight into the tensors that are yielded.

Enters: dense columns whose samples lie one after the other on disk, and batches in that order.
Leaves: the batches' tensors. Costs: one copy of every byte, from the page cache into a buffer that
stays in the processor's cache: 14 GB/s where reading a chunk and gathering from it reached 6
(benchmarks/loader_cpu.py). About four buffers of 4 MB; the kernel reads ahead of them.

A few batches of one column share a buffer. It is used again when the last tensor in it is gone, whoever
held it: keep what you like, and change it as you like.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from stoker.loader.columns import Column
from stoker.loader.order import Mode, PlannedBatch
from stoker.loader.staging import restore_sign, signed_twin
from stoker.store.fields import Array

BLOCK_BYTES = 4 << 20
"""Larger blocks leave the processor's cache: 4 MB read at 14.4 GB/s here, 32 MB at 11.4."""
_AHEAD_BYTES = 32 << 20
_MOST_KEPT = 4


def can_read_straight(columns: Sequence[Column], mode: Mode) -> bool:
    """Whether batches are ranges of rows that can be read by position, in disk order."""
    if mode not in ("sequential", "time") or any(column.kind != "dense" for column in columns):
        return False
    rising = all(bool((np.diff(column.starts) == 1).all()) for column in columns)
    return rising and all(
        array().location.layout == "contiguous"
        for column in columns
        for values in column.values
        for _, _, array in values.pieces
    )


class StraightReader:
    """Reads batches into recycled buffers. One iteration at a time; not thread-safe.

    Args:
        columns: For which `can_read_straight` holds.
        block_bytes: Size of a buffer; at least one batch goes into each.
    """

    def __init__(self, columns: Sequence[Column], block_bytes: int) -> None:
        self._columns = [
            (int(column.starts[0]), values, signed_twin(values.dtype))
            for column in columns
            for values in column.values
        ]
        self._sample_bytes = sum(values.row_bytes for _, values, _ in self._columns)
        self._block_bytes = block_bytes
        self._free: dict[str, list[mmap.mmap]] = {}

    def read(
        self, batches: Iterator[PlannedBatch]
    ) -> Iterator[tuple[PlannedBatch, dict[str, torch.Tensor]]]:
        """Yield each batch with its tensors."""
        for block in self._blocks(batches):
            edges = [0, *accumulate(len(batch.positions) for batch in block)]
            first = int(block[0].positions[0])
            whole = self._read_block(first, first + edges[-1])
            for batch, (low, high) in zip(block, pairwise(edges), strict=True):
                yield batch, {name: tensor[low:high] for name, tensor in whole.items()}
            del whole

    def _blocks(self, batches: Iterator[PlannedBatch]) -> Iterator[list[PlannedBatch]]:
        block: list[PlannedBatch] = []
        num_bytes = 0
        for batch in batches:
            block.append(batch)
            num_bytes += len(batch.positions) * self._sample_bytes
            if num_bytes + len(batch.positions) * self._sample_bytes > self._block_bytes:
                yield block
                block, num_bytes = [], 0
        if block:
            yield block

    def _read_block(self, first: int, last: int) -> dict[str, torch.Tensor]:
        count = last - first
        tensors: dict[str, torch.Tensor] = {}
        for base, values, twin in self._columns:
            memory = self._lend(values.name, count * values.row_bytes)
            out = memory.view(values.dtype).reshape(count, *values.shape)
            for array, low, high, where in values.spans(base + first, base + last):
                array.read_into(low, high, out[where : where + high - low])
                ahead = max(1, _AHEAD_BYTES // max(1, values.row_bytes))
                if low // ahead != high // ahead or low == 0:  # once for each window of this size
                    array.expect(high, (high // ahead + 2) * ahead)
            signed = torch.from_numpy(out.view(twin))
            tensors[values.name] = restore_sign(signed, values.dtype)
        return tensors

    def close(self) -> None:
        """Give back the buffers that nobody holds; the others go with their tensors."""
        self._free.clear()

    def _lend(self, name: str, num_bytes: int) -> Array:
        """Return memory that comes back here when the last array over it is gone.

        Each column has its own, so that a kept target does not keep its features.
        """
        free = self._free.setdefault(name, [])
        buffer = free.pop() if free else None
        if buffer is None or len(buffer) < num_bytes:
            size = max(num_bytes, 1)
            buffer = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(buffer, dtype=np.uint8)
        weakref.finalize(whole, _take_back, self._free, name, buffer).atexit = False
        return whole[:num_bytes]


def _take_back(free: dict[str, list[mmap.mmap]], name: str, buffer: mmap.mmap) -> None:
    """Keep a few; more were needed only while somebody held many batches."""
    kept = free.get(name)
    if kept is not None and len(kept) < _MOST_KEPT:
        kept.append(buffer)
