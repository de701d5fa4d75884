"""Batches from values on the device: rows, windows, ragged ranges and augmented images, by index.

Enters: value tensors and an int64 index tensor. Leaves: new tensors (the values may be overwritten
afterwards). Costs: one read and one write of the batch at the device's memory speed. Pure device
work: no host synchronisation, and static shapes except for ragged values without a capacity, so all
of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from stoker.errors import InputError
from stoker.loader.batch import IndexBatch
from stoker.loader.columns import Column
from stoker.loader.recycled import Recycled
from stoker.loader.staging import restore_sign
from stoker.loader.takes import Ahead, Rows, Take


def window_view(values: torch.Tensor, window: int) -> torch.Tensor:
    """Return `(rows - window + 1, window, ...)`: every window as one row of an overlapping view.

    One `index_select` of it moves whole windows: 3.6 TB/s on an H200, where indexing with
    `starts + arange` reaches 0.8. Nothing is copied here.
    """
    num_rows, *inner = values.shape
    by_row, *by_inner = values.stride()
    shape = (max(0, num_rows - window + 1), window, *inner)
    return values.as_strided(shape, (by_row, by_row, *by_inner), values.storage_offset())


def ragged_offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Return the n + 1 offsets of n lengths."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def take_ranges(
    values: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor, total: int, exact: bool
) -> torch.Tensor:
    """Return the ranges of all samples one after the other.

    Args:
        values: All values.
        starts: First value of each sample.
        offsets: Where each sample's values go, from `ragged_offsets`.
        total: Values to return: their exact number, known to the host; or a capacity.
        exact: Whether `total` is exact. With a capacity the values past `offsets[-1]` are zero.
    """
    place = torch.arange(total, device=values.device)
    sample = torch.searchsorted(offsets[1:], place, right=True)
    if not exact:
        sample = sample.clamp_(max=len(starts) - 1)
    source = starts[sample] - offsets[sample] + place
    if exact:
        return values.index_select(0, source)
    inside = place < offsets[-1]
    taken = values.index_select(0, torch.where(inside, source, 0))
    # Not a product with 0: the first value may be anything, also not a number.
    return taken.masked_fill_(~inside.view(-1, *[1] * (values.dim() - 1)), 0)


class Augments(Protocol):
    """What can be applied to images while they are gathered: `stoker.augment.Compose` and its kin."""

    def __call__(
        self,
        images: torch.Tensor,
        masks: torch.Tensor | None = None,
        *,
        rows: torch.Tensor | None = None,
    ) -> Any:
        """Return the augmented rows of `images`, or of both as a pair."""

    def seek(self, epoch: int, step: int = 0) -> None:
        """Make the next draw that of (epoch, step)."""


class Assembler:
    """Builds batches from one tensor per dataset.

    Args:
        columns: What a batch holds.
        tensors: Values on the device by dataset.
        augment: Applied to `images` and `masks`.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        tensors: Mapping[str, torch.Tensor],
        augment: Augments | None,
    ) -> None:
        self._tensors = tensors
        self._augment = augment
        self._memory = Recycled()
        self._takes, self._ragged = _plan_takes(columns, tensors, self._memory)
        self._pictures = [] if augment is None else _find_pictures(self._takes)
        drawn = {take.name for take in self._pictures}
        self._others = [take for take in self._takes if take.name not in drawn]
        self._ahead = Ahead(self._others)

    def close(self) -> None:
        """Let go of the values."""
        self._takes, self._others, self._pictures, self._tensors = [], [], [], {}
        self._ahead = Ahead([])
        self._memory.close()

    def assemble_in_turn(self, index: IndexBatch) -> dict[str, torch.Tensor]:
        """`assemble` a batch for who takes one after the other; what it needs may have been gathered before."""
        return self.assemble(index, index.totals, self._ahead.pop(index.table, index.number))

    def assemble(
        self,
        rows: Rows,
        totals: Mapping[str, int] | None,
        ready: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> dict[str, torch.Tensor]:
        """Return a batch, augmented straight from where the images lie; of what is ready, that."""
        if self._augment is None:
            return self._take(rows, totals, self._takes, ready)
        batch = self._take(rows, totals, self._others, ready)
        images, *_ = self._pictures
        made = self._augment(*(take.values for take in self._pictures), rows=rows[images.row])
        return batch | self._named(made)

    def gather(self, rows: Rows, totals: Mapping[str, int] | None) -> dict[str, torch.Tensor]:
        """Return a batch as it is stored."""
        return self._take(rows, totals, self._takes)

    def augment(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Augment a batch that was gathered elsewhere."""
        if self._augment is None:
            return batch
        return batch | self._named(self._augment(*(batch[take.name] for take in self._pictures)))

    def _named(self, made: Any) -> dict[str, torch.Tensor]:
        made = (made,) if isinstance(made, torch.Tensor) else made
        return {take.name: value for take, value in zip(self._pictures, made, strict=True)}

    def _take(
        self,
        rows: Rows,
        totals: Mapping[str, int] | None,
        takes: Sequence[Take],
        ready: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = {}
        for take in takes:
            taken = ready.get(take.name)
            batch[take.name] = take(rows) if taken is None else taken
        for column, row in self._ragged:
            batch |= self._take_ragged(column, rows[row], rows[row + 1], totals)
        return batch

    def _take_ragged(
        self,
        column: Column,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        totals: Mapping[str, int] | None,
    ) -> dict[str, torch.Tensor]:
        values = column.values[0]
        offsets = ragged_offsets(lengths)
        assert not isinstance(column.lengths, int)
        capacity = int(column.lengths.max(initial=0)) * len(starts)
        total = capacity if totals is None else totals[column.field]
        exact = totals is not None
        taken = take_ranges(self._tensors[values.name], starts, offsets, total, exact)
        return {
            column.field: restore_sign(taken, values.dtype),
            f"{column.field}/offsets": offsets,
        }


def _plan_takes(
    columns: Sequence[Column], tensors: Mapping[str, torch.Tensor], memory: Recycled
) -> tuple[list[Take], list[tuple[Column, int]]]:
    """Decide once how each field is gathered, so that a batch costs one call per field."""
    takes: list[Take] = []
    ragged: list[tuple[Column, int]] = []
    row = 0
    for column in columns:
        if column.kind == "ragged":
            ragged.append((column, row))
            row += 2
            continue
        for values in column.values:
            tensor = tensors[values.name]
            unsigned = values.dtype.kind == "u" and values.dtype.itemsize > 1
            is_window = column.kind == "series"
            if is_window:
                assert isinstance(column.lengths, int)
                tensor = window_view(tensor, column.lengths)
            host = memory if tensor.device.type == "cpu" else None
            takes.append(Take(values.name, tensor, row, is_window, values.dtype, unsigned, host))
        row += 1
    return takes, ragged


def _find_pictures(takes: Sequence[Take]) -> list[Take]:
    """What an augmentation is applied to: images, then masks."""
    found = {take.name: take for take in takes if not take.is_window}
    if "images" not in found:
        raise InputError(
            f"an augmentation was given, but the loader has no images; it has {', '.join(found)}.",
            "a dense field 'images' (n, channels, height, width), and 'masks' if there are any",
            "stoker pack images FOLDER OUT --size 224x224",
        )
    return [found[name] for name in ("images", "masks") if name in found]
