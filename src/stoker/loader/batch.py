"""A loader's results: batches, and the indices that batches are assembled from.

Enters: tensors by name and the samples that they hold. Leaves: `Batch` for training loops, `IndexBatch` for
callers that assemble batches themselves, for example in a CUDA graph. Costs: nothing is copied.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from stoker.display import nearest, table_html
from stoker.errors import FieldNameError, InputError
from stoker.loader.planned import PlannedBatch
from stoker.store.fields import Array

_UNPACKING = {dis.opmap["UNPACK_SEQUENCE"], dis.opmap["UNPACK_EX"]}


class Batch(dict[str, torch.Tensor]):
    """Tensors on the device by name, and which samples they are.

    They may be changed in place. Small tensors share one storage with those of other batches, and large ones
    on the host cannot be resized: `clone` a tensor before keeping it for long, saving or resizing it, or
    sending it to another process.

    Attributes:
        step: Number of the batch in its epoch.
        positions: Positions in the loader's list of samples, in row order; -1 for a lane that has ended.
        reset: Lanes only: rows whose recurrent state must be reset, on the device.
        valid: Lanes only: rows that hold a sample (a lane that has ended does not).
    """

    step: int = -1
    positions: Array = np.empty(0, np.int64)
    reset: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    _samples: Array = np.empty(0, np.int64)
    _num_together: int | None = None

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            instead = ""
            if name in self:
                instead = f": batch[{name!r}] is the field"
            elif name in ("to", "cuda", "cpu", "pin_memory") and self:
                instead = f": its tensors are on {next(iter(self.values())).device} already"
            raise AttributeError(f"a Batch has no attribute {name!r}{instead}")

    def __missing__(self, name: str) -> torch.Tensor:
        near = nearest(name, self)
        raise FieldNameError(
            f"the batch has no field {name!r}.",
            ", ".join(self),
            f"batch[{near or next(iter(self), '')!r}]",
        )

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, as a dict does; raises where a batch is unpacked into variables.

        `for x, y in loader` would assign field names. The caller's bytecode tells unpacking from a loop.
        """
        if torch.compiler.is_compiling():  # frames cannot be traced
            return super().__iter__()
        caller = sys._getframe(1)
        if caller.f_code.co_code[caller.f_lasti] in _UNPACKING:
            names = tuple(self.keys())
            raise InputError(
                f"a batch of {', '.join(names)} was unpacked into variables, which would get these names.",
                "a batch by names, or a loader that gives tuples",
                f"Loader(..., as_tuple={names})",
            )
        return super().__iter__()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {_describe(tensor)}" for name, tensor in self.items())
        return f"Batch(step {self.step}: {fields})"

    def _repr_html_(self) -> str:
        rows = ((name, _describe(tensor)) for name, tensor in self.items())
        return table_html(f"Batch, step {self.step}", rows)

    @property
    def sample_ids(self) -> Array:
        """Sample numbers in the store, on the host, in row order; -1 for a lane that has ended."""
        found = self._samples[np.maximum(self.positions, 0)]
        return cast(Array, np.where(self.positions < 0, -1, found))

    @property
    def num_together(self) -> int:
        """Samples of this step over all ranks."""
        own = self._num_together
        return int((self.positions >= 0).sum()) if own is None else own


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


class IndexTable:
    """The indices of many batches. They are split with one call for all batches, which is fastest.

    Args:
        indices: `(rows, samples)` int64 on the device; or `(1, samples)` if all rows are the same.
        sizes: Samples of each batch; also an attribute.
        num_rows: Rows of the table, also if `indices` has one row for all.
    """

    def __init__(self, indices: torch.Tensor, sizes: list[int], num_rows: int) -> None:
        self.sizes = sizes
        self._starts = [0, *accumulate(sizes)]
        # The last two batches of an epoch may be shorter than the others.
        shorter = (number for number, size in enumerate(sizes) if size != sizes[0])
        self._num_equal = next(shorter, len(sizes))
        self._indices = indices.expand(num_rows, -1)
        self._by_row: dict[int, Sequence[torch.Tensor]] = {}

    @cached_property
    def batches(self) -> Sequence[torch.Tensor]:
        """Indices of every batch, `(rows, batch)` each."""
        return torch.split(self._indices, self.sizes, dim=1)

    def row(self, row: int) -> Sequence[torch.Tensor]:
        """Return every batch's indices in one row."""
        if (batches := self._by_row.get(row)) is None:
            batches = self._by_row[row] = self._indices[row].split(self.sizes)
        return batches

    def rows_of(self, first: int, last: int) -> Sequence[torch.Tensor]:
        """Return, row by row, the concatenated indices of batches `first` to `last`."""
        return self._indices[:, self._starts[first] : self._starts[last]].unbind(0)

    def equal_from(self, first: int, most: int) -> int:
        """Return the end of at most `most` batches from `first` on that have the same size."""
        return min(first + most, self._num_equal) if first < self._num_equal else first + 1


@dataclass(slots=True, eq=False)
class IndexBatch:
    """The indices of one batch.

    Attributes:
        table: Table with the indices of this batch and its neighbours.
        number: Number of the batch in the table.
        totals: Number of values in the batch, by ragged field.
        planned: The batch in the epoch's order.
        ring_number: Number of the loader's ring that the indices refer to; see `Loader.shrink`.
    """

    table: IndexTable
    number: int
    totals: Mapping[str, int]
    planned: PlannedBatch
    ring_number: int

    @property
    def indices(self) -> torch.Tensor:
        """`(rows of the table, batch)` int64 on the device; see `Loader.assemble`."""
        return self.table.batches[self.number]

    def __getitem__(self, row: int) -> torch.Tensor:
        """Return a row of `indices`."""
        return self.table.row(row)[self.number]
