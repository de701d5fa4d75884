"""One field of a batch, or of several batches at once.

Enters: values on the device and the rows to take. Leaves: new tensors. Costs: a gather costs the host 20 to
50 µs, whatever it moves, which is what a loop of small kernels waits for; so batches that are taken one after
the other share the gathers of small fields. (For large ones that gained little: four batches at once took as
long to cut as they saved.)
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
"""What may be gathered for batches to come: little, for a tensor that is kept or saved brings its neighbours."""

_LEAST_BATCHES, _MOST_BATCHES = 32, 64
"""A field is small when `_LEAST_BATCHES` of it fit; the host is held up by more than `_MOST_BATCHES` at once."""

_ALIGNMENT = 16
"""Bytes; kernels take wide loads from such addresses only, and a compiled model copies other inputs."""


_LARGE_BYTES = 1 << 20


class Rows(Protocol):
    """Indices row by row: of a batch, or of several."""

    def __getitem__(self, row: int, /) -> torch.Tensor: ...


class Take(NamedTuple):
    """One gather: rows of `values`, whose first axis is rows or windows."""

    name: str
    values: torch.Tensor
    row: int
    is_window: bool
    dtype: np.dtype[np.generic]
    unsigned: bool
    memory: Recycled | None = None
    """For large batches in host memory."""

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Gather; `rows` are those of a table, one of which is this field's."""
        indices = rows[self.row]
        out = None if self.memory is None else self._room(len(indices), self.memory)
        taken = torch.index_select(self.values, 0, indices, out=out)
        return restore_sign(taken, self.dtype) if self.unsigned else taken

    def _room(self, size: int, memory: Recycled) -> torch.Tensor | None:
        """Return where a batch of `size` goes if it is large; malloc does well with others."""
        row = self.values.shape[1:]
        num_bytes = size * row.numel() * self.values.element_size()
        if num_bytes < _LARGE_BYTES:
            return None
        lent = torch.from_numpy(memory.lend(self.name, num_bytes))
        return lent.view(self.values.dtype).view(size, *row)


class _Made(NamedTuple):
    """Batches of a table up to `end`, gathered; `parts` are those that were not given out."""

    table: IndexTable | None
    end: int
    where: tuple[int, bool]
    parts: dict[int, dict[str, torch.Tensor]]


_NOTHING = _Made(None, 0, (0, False), {})


class Ahead:
    """Small fields of the next batches, gathered at once for who takes batches one after the other.

    Every batch is given out once, and nobody else's values change with it, also in place; but its tensors
    lie beside those of its neighbours, on 16-byte boundaries. Threads may share it.
    """

    def __init__(self, takes: Sequence[Take]) -> None:
        self._takes = takes
        device = takes[0].values.device if takes else torch.device("cpu")
        self._gpu = device.index if device.type == "cuda" else None
        self._chosen: dict[int, tuple[Sequence[Take], int]] = {}
        self._made = _NOTHING

    def pop(self, table: IndexTable, number: int) -> dict[str, torch.Tensor]:
        """Return the small fields of a batch by name; none out of turn, or of a batch that was given out."""
        if self._gpu is not None and torch.cuda.is_current_stream_capturing():
            return {}  # a graph gathers for itself: its replays read new indices, and nobody else what they write
        made, where = self._made, self._where()  # once: another thread may gather meanwhile
        if table is not made.table or number >= made.end:
            if number != 0 and (table is not made.table or number != made.end):
                return {}
            made = _NOTHING  # the memory of those before is for the next
            made = self._gather(table, number)
        return made.parts.pop(number, {}) if made.where == where else {}

    def _where(self) -> tuple[int, bool]:
        """Whose the tensors are that are made now: the current stream's, and inference's or not."""
        stream = 0 if self._gpu is None else torch._C._cuda_getCurrentRawStream(self._gpu)
        return stream, torch.is_inference_mode_enabled()

    def _choose(self, size: int) -> tuple[Sequence[Take], int]:
        """Return the fields that are small in batches of `size`, and how many batches to gather at once."""
        small, total = [], 0
        for take in self._takes:
            num_bytes = size * take.values[:1].nbytes
            if 0 < num_bytes * _LEAST_BATCHES <= AHEAD_BYTES and num_bytes % _ALIGNMENT == 0:
                small.append(take)
                total += num_bytes
        most = min(AHEAD_BYTES // max(1, total), _MOST_BATCHES)
        return (small, most) if most > 1 else ([], 1)

    def _gather(self, table: IndexTable, first: int) -> _Made:
        """Gather for batch `first` of a table and those after it, where there is something to gain."""
        self._made = _NOTHING
        size = table.sizes[first]
        if size not in self._chosen:
            self._chosen[size] = self._choose(size)
        takes, most = self._chosen[size]
        if not takes:
            return _NOTHING
        others = (at for at in range(first, len(table.sizes)) if table.sizes[at] != size)
        end = min(first + most, next(others, len(table.sizes)))
        rows = table.rows_of(first, end)
        # "unsafe": without the version counter in common, by which autograd finds values changed in place
        cut = zip(*(torch.unsafe_split(take(rows), size) for take in takes), strict=True)
        names = [take.name for take in takes]
        parts = {at: dict(zip(names, part, strict=True)) for at, part in enumerate(cut, first)}
        self._made = made = _Made(table, end, self._where(), parts)
        return made
