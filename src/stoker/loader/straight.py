"""Batches of an ordered epoch in host memory: read once, straight into the tensors that are yielded.

Enters: dense columns whose samples lie one after the other on disk, and batches in that order.
Leaves: the batches' tensors. Costs: one copy of every byte, from the page cache into a buffer that
stays in the processor's cache: three quarters of the time of reading a chunk and gathering from it
(benchmarks/loader_cpu.py). Two buffers a column while one batch is held; the kernel reads ahead of them.

Small batches of one column share a buffer. It is reused when its last tensor is freed, so a batch may be kept
and changed.

Files are not mapped into memory, although that would avoid the copy. A batch would change with its file, a file
that another process truncates would end this one (SIGBUS), and the first write to each page of a batch would
cause a fault (adding 1 in place took ten times as long).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise

import numpy as np
import torch

from stoker.host_memory import Recycled
from stoker.loader.columns import Column, Values
from stoker.loader.planned import Mode, PlannedBatch
from stoker.loader.staging import restore_sign, signed_twin

BLOCK_BYTES = 4 << 20
"""Buffer size of all columns together. The buffer should stay in the processor's cache: one of 2 MB was filled
at 6 GB/s, two of 4 MB in turn at 4 GB/s (a core with 2 MB of cache)."""
_AHEAD_BYTES = 32 << 20
_MOST_TOGETHER = 64
"""Batches whose columns are cut together; a large column is read one batch at a time."""


def can_read_straight(columns: Sequence[Column], mode: Mode) -> bool:
    """Whether batches are ranges of rows that can be read by position, in disk order; opens no packed shard."""
    if mode not in ("sequential", "time") or any(column.kind != "dense" for column in columns):
        return False
    rising = all(bool((np.diff(column.starts) == 1).all()) for column in columns)
    return rising and all(
        values.is_packed
        or all(open_array().location.layout == "contiguous" for _, _, open_array in values.pieces)
        for column in columns
        for values in column.values
    )


class StraightReader:
    """Reads batches into recycled buffers. One iteration at a time; not thread-safe.

    Args:
        columns: Columns for which `can_read_straight` holds.
        block_bytes: Size of the buffers of all columns together; each buffer holds at least one batch.
    """

    def __init__(self, columns: Sequence[Column], block_bytes: int) -> None:
        self._columns = [
            (int(column.starts[0]), values) for column in columns for values in column.values
        ]
        self._block_bytes = block_bytes // max(1, len(self._columns))
        self._memory = Recycled()

    def read(
        self, batches: Iterator[PlannedBatch]
    ) -> Iterator[tuple[PlannedBatch, dict[str, torch.Tensor]]]:
        """Yield each batch with its tensors."""
        while group := list(islice(batches, _MOST_TOGETHER)):
            sizes = [len(batch.positions) for batch in group]
            edges = list(accumulate(sizes, initial=int(group[0].positions[0])))
            columns = [
                (max(1, self._block_bytes // max(1, sizes[0] * values.row_bytes)), base, values)
                for base, values in self._columns
            ]
            blocks: dict[str, tuple[torch.Tensor, int]] = {}
            for index, (low, high) in enumerate(pairwise(edges)):
                for together, base, values in columns:
                    if index % together == 0:
                        last = edges[min(index + together, len(group))]
                        blocks[values.name] = self._read_block(values, base + low, base + last), low
                yield (
                    group[index],
                    {name: block[low - at : high - at] for name, (block, at) in blocks.items()},
                )

    def _read_block(self, values: Values, first: int, last: int) -> torch.Tensor:
        count = last - first
        memory = self._memory.lend(values.name, count * values.row_bytes)
        out = memory.view(values.dtype).reshape(count, *values.shape)
        for array, low, high, where in values.spans(first, last):
            array.read_into(low, high, out[where : where + high - low])
            ahead = max(1, _AHEAD_BYTES // max(1, values.row_bytes))
            if low // ahead != high // ahead or low == 0:  # once per `ahead` rows
                array.expect(high, (high // ahead + 2) * ahead)
        return restore_sign(torch.from_numpy(out.view(signed_twin(values.dtype))), values.dtype)

    def close(self) -> None:
        """Free the unused buffers; the others are freed with their tensors."""
        self._memory.close()
