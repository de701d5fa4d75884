"""Small fields (labels, weights, flags), gathered for many batches with one kernel.

Enters: values on the device and the rows to gather. Leaves: new tensors. Costs: up to `AHEAD_BYTES` on the
device. A gather costs the host 20 to 50 µs whatever its size, and a training step of small kernels waits for
the host. So consecutive batches share the gathers of their small fields. Large fields gain little: gathering
four batches at once saved no more than splitting them cost.

Contract: each batch's tensors are handed out once and belong to the caller, who may change them in place.
They are used on the stream that gathered them only; on another stream, in inference mode or inside a CUDA
graph the batch is gathered anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from stoker.loader.batch import IndexTable
from stoker.loader.recycled import Recycled
from stoker.loader.staging import restore_sign

AHEAD_BYTES = 2 << 20
"""Most bytes gathered ahead. Small, because a tensor that the user keeps keeps its neighbours' memory too."""

_LEAST_BATCHES, _MOST_BATCHES = 32, 64
"""A field is small if `_LEAST_BATCHES` batches of it fit. Splitting more than `_MOST_BATCHES` delays the host."""

_ALIGNMENT = 16
"""Bytes. Kernels use wide loads only at aligned addresses, and a compiled model copies unaligned inputs."""


_LARGE_BYTES = 1 << 20


class Rows(Protocol):
    """Indices of one batch, or of several, one row per field."""

    def __getitem__(self, row: int, /) -> torch.Tensor: ...


class FieldGather(NamedTuple):
    """How one field is gathered: `values[indices]`, whose first axis is rows, or windows of a series."""

    name: str
    values: torch.Tensor
    row: int
    is_window: bool
    dtype: np.dtype[np.generic]
    unsigned: bool
    memory: Recycled | None = None
    """Reused memory for large batches on the CPU."""

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return the field's values at `rows[self.row]`."""
        indices = rows[self.row]
        out = None if self.memory is None else self._room(len(indices), self.memory)
        taken = torch.index_select(self.values, 0, indices, out=out)
        return restore_sign(taken, self.dtype) if self.unsigned else taken

    def _room(self, size: int, memory: Recycled) -> torch.Tensor | None:
        """Return reused memory for a batch of `size` if it is large; malloc is fast enough for small ones."""
        row = self.values.shape[1:]
        num_bytes = size * row.numel() * self.values.element_size()
        if num_bytes < _LARGE_BYTES:
            return None
        lent = torch.from_numpy(memory.lend(self.name, num_bytes))
        return lent.view(self.values.dtype).view(size, *row)


class _Made(NamedTuple):
    """Gathered fields of a table's batches up to `end`; `parts` has those that were not handed out yet."""

    table: IndexTable | None
    end: int
    where: tuple[int, bool]
    parts: dict[int, dict[str, torch.Tensor]]


_NOTHING = _Made(None, 0, (0, False), {})


class GatheredAhead:
    """Small fields of the next batches of an iteration, gathered with one kernel per field.

    A batch's tensors are views of one allocation that it shares with its neighbours, 16-byte aligned. They do
    not overlap, so changing one in place changes no other batch. Thread safe: a race costs one more gather.
    """

    def __init__(self, fields: Sequence[FieldGather]) -> None:
        self._fields = fields
        device = fields[0].values.device if fields else torch.device("cpu")
        self._gpu = device.index if device.type == "cuda" else None
        self._chosen: dict[int, tuple[Sequence[FieldGather], int]] = {}
        self._made = _NOTHING

    def pop(self, table: IndexTable, number: int) -> dict[str, torch.Tensor]:
        """Return the small fields of a batch by name; empty if it is out of turn or was handed out before."""
        if self._gpu is not None and torch.cuda.is_current_stream_capturing():
            # A graph must record its own gathers: its replays read new indices.
            return {}
        made, where = self._made, self._where()  # read once: another thread may replace it
        if table is not made.table or number >= made.end:
            if number != 0 and (table is not made.table or number != made.end):
                return {}
            made = _NOTHING  # free the memory of the batches before, so that the next can use it
            made = self._gather(table, number)
        return made.parts.pop(number, {}) if made.where == where else {}

    def _where(self) -> tuple[int, bool]:
        """Key of the cache: the current stream, and whether inference mode is on."""
        stream = 0 if self._gpu is None else torch._C._cuda_getCurrentRawStream(self._gpu)
        return stream, torch.is_inference_mode_enabled()

    def _choose(self, size: int) -> tuple[Sequence[FieldGather], int]:
        """Return the fields that are small at this batch size, and how many batches to gather at once."""
        small, total = [], 0
        for field in self._fields:
            num_bytes = size * field.values[:1].nbytes
            if 0 < num_bytes * _LEAST_BATCHES <= AHEAD_BYTES and num_bytes % _ALIGNMENT == 0:
                small.append(field)
                total += num_bytes
        most = min(AHEAD_BYTES // max(1, total), _MOST_BATCHES)
        return (small, most) if most > 1 else ([], 1)

    def _gather(self, table: IndexTable, first: int) -> _Made:
        """Gather the small fields of batch `first` of a table and of the batches of the same size after it."""
        self._made = _NOTHING
        size = table.sizes[first]
        if size not in self._chosen:
            self._chosen[size] = self._choose(size)
        fields, most = self._chosen[size]
        if not fields:
            return _NOTHING
        others = (at for at in range(first, len(table.sizes)) if table.sizes[at] != size)
        end = min(first + most, next(others, len(table.sizes)))
        rows = table.rows_of(first, end)
        # unsafe_split: views with version counters of their own. With a shared counter, changing one batch in
        # place would make autograd refuse all the others.
        cut = zip(*(torch.unsafe_split(field(rows), size) for field in fields), strict=True)
        names = [field.name for field in fields]
        parts = {at: dict(zip(names, part, strict=True)) for at, part in enumerate(cut, first)}
        self._made = made = _Made(table, end, self._where(), parts)
        return made
