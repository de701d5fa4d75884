"""Batches from values on the device: rows, windows, ragged ranges and augmented images, by index.

Enters: value tensors and an int64 index tensor. Leaves: new tensors, so the values may be overwritten
afterwards. Costs: one read and one write of the batch at the device's memory speed.

Everything is queued on the current stream; the host never waits for the device. Shapes are static, except
for ragged values whose exact total is given. A batch can therefore be assembled inside a CUDA graph.
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
from stoker.loader.small_fields import FieldGather, GatheredAhead, Rows
from stoker.loader.staging import restore_sign


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


def gather_ranges(
    values: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor, total: int, exact: bool
) -> torch.Tensor:
    """Return the values of all samples, concatenated.

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
    # Filled, not multiplied by 0: the value that was gathered instead may be NaN.
    return taken.masked_fill_(~inside.view(-1, *[1] * (values.dim() - 1)), 0)


class Augments(Protocol):
    """An augmentation that gathers its images itself: `stoker.augment.Compose` and similar classes."""

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
        self._gathers, self._ragged = _plan_gathers(columns, tensors, self._memory)
        self._images = [] if augment is None else _find_images(self._gathers)
        drawn = {gather.name for gather in self._images}
        self._others = [gather for gather in self._gathers if gather.name not in drawn]
        self._ahead = GatheredAhead(self._others)

    def close(self) -> None:
        """Drop the references to the values, so that their memory can be freed."""
        self._gathers, self._others, self._images, self._tensors = [], [], [], {}
        self._ahead = GatheredAhead([])
        self._memory.close()

    def assemble_in_turn(self, index: IndexBatch) -> dict[str, torch.Tensor]:
        """Assemble the next batch of an iteration; its small fields may have been gathered with earlier ones."""
        return self.assemble(index, index.totals, self._ahead.pop(index.table, index.number))

    def assemble(
        self,
        rows: Rows,
        totals: Mapping[str, int] | None,
        ready: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> dict[str, torch.Tensor]:
        """Return a batch. Images are augmented while they are read from the resident chunk, without a copy between.

        Args:
            rows: Indices, one row per field.
            totals: Exact number of values of each ragged field; None pads them to a static shape.
            ready: Fields that were gathered ahead; they are returned as they are.
        """
        if self._augment is None:
            return self._gather(rows, totals, self._gathers, ready)
        batch = self._gather(rows, totals, self._others, ready)
        images, *_ = self._images
        made = self._augment(*(gather.values for gather in self._images), rows=rows[images.row])
        return batch | self._named(made)

    def gather(self, rows: Rows, totals: Mapping[str, int] | None) -> dict[str, torch.Tensor]:
        """Return a batch as it is stored, without augmentation."""
        return self._gather(rows, totals, self._gathers)

    def augment(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Augment a batch that `gather` has returned, possibly copied to another device since."""
        if self._augment is None:
            return batch
        return batch | self._named(self._augment(*(batch[gather.name] for gather in self._images)))

    def _named(self, made: Any) -> dict[str, torch.Tensor]:
        made = (made,) if isinstance(made, torch.Tensor) else made
        return {gather.name: value for gather, value in zip(self._images, made, strict=True)}

    def _gather(
        self,
        rows: Rows,
        totals: Mapping[str, int] | None,
        gathers: Sequence[FieldGather],
        ready: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = {}
        for gather in gathers:
            taken = ready.get(gather.name)
            batch[gather.name] = gather(rows) if taken is None else taken
        for column, row in self._ragged:
            batch |= self._gather_ragged(column, rows[row], rows[row + 1], totals)
        return batch

    def _gather_ragged(
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
        taken = gather_ranges(self._tensors[values.name], starts, offsets, total, exact)
        return {
            column.field: restore_sign(taken, values.dtype),
            f"{column.field}/offsets": offsets,
        }


def _plan_gathers(
    columns: Sequence[Column], tensors: Mapping[str, torch.Tensor], memory: Recycled
) -> tuple[list[FieldGather], list[tuple[Column, int]]]:
    """Decide once how each field is gathered, so that a batch costs one call per field."""
    gathers: list[FieldGather] = []
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
            gathers.append(
                FieldGather(values.name, tensor, row, is_window, values.dtype, unsigned, host)
            )
        row += 1
    return gathers, ragged


def check_ids(augment: Augments | None, tier: str) -> None:
    """Raise if an augmentation has to know images from epoch to epoch, and rows do not tell."""
    if getattr(augment, "needs_ids", False) and tier != "resident":
        raise InputError(
            f"AlternatingFlip with data that is {tier}: rows change their images from chunk to chunk.",
            "AlternatingFlip with resident data",
            "RandomHorizontalFlip()",
        )


def _find_images(gathers: Sequence[FieldGather]) -> list[FieldGather]:
    """Return the fields that an augmentation is applied to: images, then masks if there are any."""
    found = {gather.name: gather for gather in gathers if not gather.is_window}
    if "images" not in found:
        raise InputError(
            f"an augmentation was given, but the loader has no images; it has {', '.join(found)}.",
            "a dense field 'images' (n, channels, height, width), and 'masks' if there are any",
            "stoker pack images FOLDER OUT --size 224x224",
        )
    return [found[name] for name in ("images", "masks") if name in found]
