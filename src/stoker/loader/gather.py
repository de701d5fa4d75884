"""Batches from values on the device: rows, windows, ragged ranges and augmented images, by index.

Enters: value tensors and an int64 index tensor. Leaves: new tensors, so the values may be overwritten
afterwards. Costs: one read and one write of the batch at the device's memory speed.

Everything is queued on the current stream; the host never waits for the device. Shapes are static, except
for ragged values whose exact total is given. A batch can therefore be assembled inside a CUDA graph.

A gather costs the host 20 to 50 µs whatever its size, and a training step of small kernels waits for the host. So
consecutive batches share the gathers of their small fields (labels, weights, flags). Drawing and applying an
augmentation costs it about 90 µs, so small images share those too: `MadeAhead`. Large fields gain little: gathering
four batches at once saved no more than splitting them cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from stoker.errors import InputError
from stoker.host_memory import Recycled
from stoker.loader.batch import Batch, IndexBatch, IndexTable
from stoker.loader.columns import Column
from stoker.loader.staging import restore_sign

AHEAD_BYTES, RESIDENT_AHEAD_BYTES = 2 << 20, 128 << 20
"""Most bytes made ahead. The second limit is for data that is resident on a GPU, where memory is not short; the size of
the data limits it too. A tensor that the user keeps keeps its neighbours' memory too."""

_LEAST_BATCHES, _MOST_BATCHES = {"cpu": 32, "cuda": 8}, 64
"""A field is small if at least this many of its batches fit. Splitting more than `_MOST_BATCHES` delays the host."""

_ALIGNMENT = 16
"""Bytes. Kernels use wide loads only at aligned addresses, and a compiled model copies unaligned inputs."""


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
        offsets: Place of each sample's values in the result, from `ragged_offsets`.
        total: Values to return: their exact number, known to the host; or a capacity.
        exact: Whether `total` is exact. With a capacity the values past `offsets[-1]` are zero.
    """
    target = torch.arange(total, device=values.device)
    sample = torch.searchsorted(offsets[1:], target, right=True)
    if not exact:
        sample = sample.clamp_(max=len(starts) - 1)
    source = starts[sample] - offsets[sample] + target
    if exact:
        return values.index_select(0, source)
    inside = target < offsets[-1]
    taken = values.index_select(0, torch.where(inside, source, 0))
    # Filled, not multiplied by 0: the value that was gathered instead may be NaN.
    return taken.masked_fill_(~inside.view(-1, *[1] * (values.dim() - 1)), 0)


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
        indices, out = rows[self.row], None
        if self.memory is not None:
            shape = len(indices), *self.values.shape[1:]
            out = self.memory.empty(self.name, shape, self.values.dtype)
        taken = torch.index_select(self.values, 0, indices, out=out)
        return restore_sign(taken, self.dtype) if self.unsigned else taken


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


class Draws:
    """Keeps an augmentation at the draws of (epoch, batch), even if other code draws from the same object.

    Two loaders, or a loader and the user's own loop, may share an augmentation. It has one position. If its
    `num_draws` shows that it moved since the last draw, the position is set again. Not thread-safe.
    """

    def __init__(self, augment: Any) -> None:
        self.augment = augment
        self._at: tuple[int, int] | None = None
        self._num_draws: int | None = None

    def seek(self, epoch: int, step: int) -> None:
        """Make the next draw that of (epoch, step)."""
        if self.augment is not None:
            self.augment.seek(epoch, step)
            self._at, self._num_draws = (epoch, step), getattr(self.augment, "num_draws", None)

    def begin(self, step: int) -> None:
        """Make the next draw that of batch number `step` of the epoch; call `end` after it."""
        num_draws = getattr(self.augment, "num_draws", None)
        if self._at is not None and (self._at[1] != step or self._num_draws != num_draws):
            self.augment.seek(self._at[0], step)

    def end(self, step: int) -> None:
        """Note that the batches before number `step` were drawn."""
        if self._at is not None:
            self._at = self._at[0], step
            self._num_draws = getattr(self.augment, "num_draws", None)


class _Made(NamedTuple):
    """Batches of a table up to `end`; `parts` has those that were not handed out yet."""

    table: IndexTable | None
    end: int
    where: tuple[int, bool] = (0, False)
    parts: dict[int, Batch] = {}  # noqa: RUF012  nothing is ever put into this one
    has_images: bool = False


_NOTHING = _Made(None, 0)


class MadeAhead:
    """Small fields and augmented images of the next batches of an iteration: one kernel for many batches.

    A batch's tensors are views of one allocation that it shares with its neighbours, 16-byte aligned. They do
    not overlap, so changing one in place changes no other batch. Each batch is handed out once, on the stream that
    made it only; on another stream, in inference mode or inside a CUDA graph it is made anew.

    Fields are thread safe: a race costs one more gather. Images are for one thread that takes every batch in turn.
    Their draws equal those of one call per batch. The augmentation counts a step for each batch when it is made,
    not when it is handed out; so its position is set again when batches that were made are not used.

    Args:
        fields: Fields to gather ahead if they are small.
        room_bytes: Most bytes of batches that are made at once.
        draws: Images are made ahead if its augmentation has `batches`, as `Compose` has.
        images: Images, then masks if there are any.
    """

    def __init__(
        self,
        fields: Sequence[FieldGather],
        room_bytes: int,
        draws: Draws | None = None,
        images: Sequence[FieldGather] = (),
    ) -> None:
        self._fields, self._images, self._draws = fields, images, draws
        self._room_bytes = room_bytes
        gathers = [*fields, *images]
        device = gathers[0].values.device if gathers else torch.device("cpu")
        self._least = _LEAST_BATCHES.get(device.type, 32)
        self._gpu = device.index if device.type == "cuda" else None
        self._chosen: dict[tuple[int, int], tuple[Sequence[FieldGather], int]] = {}
        # By batch size: bytes of the augmented images, 0 where they are made one by one.
        self._image_bytes: dict[int, int] = {}
        self._made = _NOTHING

    def forget_images(self) -> None:
        """Drop the images made ahead, because the augmentation's position was set."""
        if self._draws is not None:
            self._made = _NOTHING

    def pop(self, rows: IndexBatch, in_turn: bool) -> Batch:
        """Return the tensors made ahead for a batch; empty if it is out of turn or was handed out before.

        Args:
            rows: The batch.
            in_turn: Whether all batches of the iteration are asked for, so that images may be made ahead.
        """
        stream = 0
        if self._gpu is not None:
            stream = torch._C._cuda_getCurrentRawStream(self._gpu)
            # A graph must record its own gathers: its replays read new indices. The stream 0 cannot be captured.
            if stream and torch.cuda.is_current_stream_capturing():
                return Batch()
        where = stream, torch.is_inference_mode_enabled()
        table, number = rows.table, rows.number
        made = self._made  # read once: another thread may replace it
        if table is made.table and number < made.end:
            usable = made.where == where and (in_turn or not made.has_images)
            return (made.parts.pop(number, None) if usable else None) or Batch()
        if number != 0 and (table is not made.table or number != made.end):
            return Batch()
        self._made = _NOTHING  # free the batches before, so that the next can use their memory
        size, image_bytes = table.sizes[number], 0
        if in_turn and self._draws is not None:
            image_bytes = self._image_bytes.get(size, -1)
            if image_bytes < 0:  # `augmented` finds out
                self._made = _Made(table, number + 1)
                return Batch()
        fields, most = self._chosen.get((size, image_bytes)) or self._choose(size, image_bytes)
        if most < 2:
            return Batch()
        end = table.equal_from(number, most)
        parts = [Batch() for _ in range(number, end)]
        indices = table.rows_of(number, end)
        for field in fields:
            _hand_out(field.name, field(indices), parts)
        if image_bytes:
            images = self.augmented(indices, rows.planned.step, size, len(parts))
            for gather, tensor in zip(self._images, images, strict=True):
                _hand_out(gather.name, tensor, parts)
        self._made = _Made(table, end, where, dict(enumerate(parts, number)), image_bytes > 0)
        return self._made.parts.pop(number)

    def augmented(self, indices: Rows, step: int, size: int, count: int = 1) -> Sequence[Any]:
        """Augment `count` batches of `size` samples, the first of which is batch number `step` of the epoch."""
        assert self._draws is not None
        augment = self._draws.augment
        values = [gather.values for gather in self._images]
        row = indices[self._images[0].row]
        self._draws.begin(step)
        if count > 1:
            taken = augment.batches(*values, rows=row, batch_size=size)
        else:
            taken = augment(*values, rows=row)
        self._draws.end(step + count)
        made: Sequence[Any] = (taken,) if isinstance(taken, torch.Tensor) else taken
        if size not in self._image_bytes:
            sizes = [tensor.nbytes for tensor in made]
            apart = not hasattr(augment, "batches") or any(n % _ALIGNMENT for n in sizes)
            one_by_one = apart or 2 * sum(sizes) > self._room_bytes
            self._image_bytes[size] = 0 if one_by_one else sum(sizes)
        return made

    def _choose(self, size: int, image_bytes: int) -> tuple[Sequence[FieldGather], int]:
        """Return the fields that are small at this batch size, and how many batches to make at once."""
        small, total = [], image_bytes
        for field in self._fields:
            num_bytes = size * field.values[:1].nbytes
            is_small = 0 < num_bytes * self._least <= self._room_bytes
            if is_small and num_bytes % _ALIGNMENT == 0:
                small.append(field)
                total += num_bytes
        most = min(self._room_bytes // total, _MOST_BATCHES) if total else 1
        self._chosen[size, image_bytes] = chosen = small, most
        return chosen


def _hand_out(name: str, tensor: torch.Tensor, parts: Sequence[Batch]) -> None:
    """Give each batch its share of a tensor.

    unsafe_split: views with version counters of their own. With a shared counter, changing one batch in place would
    make autograd refuse all the others.
    """
    shares = torch.unsafe_split(tensor, len(tensor) // len(parts))
    for part, share in zip(parts, shares, strict=True):
        part[name] = share


class Assembler:
    """Builds batches from one tensor per dataset.

    Args:
        columns: Columns of a batch.
        tensors: Values on the device by dataset.
        augment: Augmentation of `images` and `masks`.
        is_resident: Whether the tensors hold all data.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        tensors: Mapping[str, torch.Tensor],
        augment: Augments | None,
        is_resident: bool = False,
    ) -> None:
        self._tensors = tensors
        self._augment = augment
        self._memory = Recycled()
        self._gathers, ragged = _plan_gathers(columns, tensors, self._memory)
        self._ragged = [(column, row) for column, row in ragged if not column.is_encoded]
        self._encoded = [(column, row) for column, row in ragged if column.is_encoded]
        self._is_resident = is_resident
        coded = [column.field for column, _ in self._encoded]
        self._images = [] if augment is None or coded else _find_images(self._gathers)
        self._image_names = [gather.name for gather in self._images] or [
            name for name in ("images", "masks") if name in coded
        ]
        drawn = {gather.name for gather in self._images}
        self._others = [gather for gather in self._gathers if gather.name not in drawn]
        room = AHEAD_BYTES
        if is_resident and any(tensor.is_cuda for tensor in tensors.values()):
            held = sum(tensor.nbytes for tensor in tensors.values())
            room = max(room, min(RESIDENT_AHEAD_BYTES, held))
        self._draws = Draws(augment)
        drawing = self._draws if self._images else None
        self._ahead = MadeAhead(self._others, room, drawing, self._images)
        self._num_fields = len(self._others) + len(self._images)

    def seek(self, epoch: int, step: int) -> None:
        """Make the augmentation's next draw that of (epoch, step)."""
        self._draws.seek(epoch, step)
        self._ahead.forget_images()

    def close(self) -> None:
        """Drop the references to the values, so that their memory can be freed."""
        self._gathers, self._others, self._images, self._tensors = [], [], [], {}
        self._ahead = MadeAhead([], 0)
        self._memory.close()

    def assemble(
        self, rows: Rows, totals: Mapping[str, int] | None, *, in_turn: bool = False
    ) -> Batch:
        """Return a batch. Images are augmented while they are read, without a copy between.

        Args:
            rows: Indices, one row per field. Of an `IndexBatch` the small fields may have been gathered with
                those of earlier batches.
            totals: Exact number of values of each ragged field; None pads them to a static shape.
            in_turn: Whether this is an `IndexBatch` and all batches of the iteration are asked for in turn. Only
                then may images be augmented ahead: a captured step makes draws of its own in between.
        """
        known = rows if isinstance(rows, IndexBatch) else None
        ready = Batch() if known is None else self._ahead.pop(known, in_turn)
        if len(ready) == self._num_fields and not self._ragged:
            return ready
        batch = Batch()
        for gather in self._others:
            taken = ready.get(gather.name)
            batch[gather.name] = gather(rows) if taken is None else taken
        for column, row in self._ragged:
            self._gather_ragged(batch, column, rows[row], rows[row + 1], totals)
        if self._images and self._images[0].name in ready:
            self._name(batch, [ready[gather.name] for gather in self._images])
        elif known is not None and in_turn and self._images:
            size = known.table.sizes[known.number]
            self._name(batch, self._ahead.augmented(rows, known.planned.step, size))
        elif self._images and self._augment is not None:
            values = (gather.values for gather in self._images)
            self._name(batch, self._augment(*values, rows=rows[self._images[0].row]))
        return batch

    def gather(self, rows: Rows, totals: Mapping[str, int] | None) -> dict[str, torch.Tensor]:
        """Return a batch as it is stored, without augmentation."""
        batch: dict[str, torch.Tensor] = {}
        for gather in self._gathers:
            batch[gather.name] = gather(rows)
        for column, row in self._ragged:
            self._gather_ragged(batch, column, rows[row], rows[row + 1], totals)
        return batch

    def pictures(self, rows: Rows) -> dict[str, Sequence[torch.Tensor]]:
        """Return the bytes of each encoded picture of a batch, by field, in host memory.

        Views of resident data; copies of data that is loaded in chunks, whose memory will be written again.
        """
        found: dict[str, Sequence[torch.Tensor]] = {}
        for column, row in self._encoded:
            values = self._tensors[column.values[0].name]
            pairs = zip(rows[row].tolist(), rows[row + 1].tolist(), strict=True)
            pieces = [values[start : start + length] for start, length in pairs]
            if not self._is_resident:
                pieces = list(torch.cat(pieces).split([len(piece) for piece in pieces]))
            found[column.field] = pieces
        return found

    def augment(self, tensors: Mapping[str, torch.Tensor], step: int) -> Batch:
        """Augment the result of `gather` for batch number `step`, perhaps decoded or copied to another device since."""
        batch = Batch(tensors)
        if self._augment is not None:
            self._draws.begin(step)
            self._name(batch, self._augment(*(batch[name] for name in self._image_names)))
            self._draws.end(step + 1)
        return batch

    def _name(self, batch: Batch, made: Any) -> None:
        made = (made,) if isinstance(made, torch.Tensor) else made
        batch.update(dict(zip(self._image_names, made, strict=True)))

    def _gather_ragged(
        self,
        batch: dict[str, torch.Tensor],
        column: Column,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        totals: Mapping[str, int] | None,
    ) -> None:
        values = column.values[0]
        offsets = ragged_offsets(lengths)
        assert not isinstance(column.lengths, int)
        capacity = int(column.lengths.max(initial=0)) * len(starts)
        total = capacity if totals is None else totals[column.field]
        exact = totals is not None
        taken = gather_ranges(self._tensors[values.name], starts, offsets, total, exact)
        batch[column.field] = restore_sign(taken, values.dtype)
        batch[f"{column.field}/offsets"] = offsets


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


def check_augment(augment: Any, tier: str, name: str = "augment") -> None:
    """Raise if `augment` is no augmentation, or must identify images by row and the data is not resident."""
    if hasattr(augment, "num_classes"):  # MixUp or CutMix
        raise InputError(
            f"{name} is {type(augment).__name__}, which mixes labels too.",
            "a Compose; mix(images, labels) belongs into the loop, or into unpack= of a Trainer for training alone: "
            "lambda batch: mix(*batch) if model.training else batch",
            f"leave {name} out",
        )
    if augment is not None and not (callable(augment) and hasattr(augment, "seek")):
        raise InputError(
            f"{name} is {getattr(augment, '__name__', repr(augment))}.",
            "a Compose of ops; Compose.from_torchvision(...) makes one of transforms of torchvision",
            f"{name}=Compose([RandomHorizontalFlip()])",
        )
    if getattr(augment, "needs_ids", False) and tier != "resident":
        raise InputError(
            f"AlternatingFlip with data that is {tier}: rows change their images from chunk to chunk.",
            "AlternatingFlip with resident data",
            "RandomHorizontalFlip()",
        )


def _find_images(gathers: Sequence[FieldGather]) -> list[FieldGather]:
    """Return the fields that an augmentation is applied to: images, then masks if there are any.

    Tuples and single arrays have no names: their `features` are the images if they have the shape of images, and no
    masks, which would have to move with them, are beside them.
    """
    found = {gather.name: gather for gather in gathers if not gather.is_window}
    num_axes = {name: gather.values.dim() for name, gather in found.items()}
    if (
        "images" not in found
        and num_axes.pop("features", 0) == 4
        and max([*num_axes.values(), 0]) < 3
    ):
        return [found["features"]]
    if "images" not in found:
        raise InputError(
            f"an augmentation was given, but the loader has no images; it has {', '.join(found)}.",
            "a dense field 'images' (n, channels, height, width), and 'masks' if there are any",
            "Loader({'images': images, 'labels': labels}, 64), or stoker pack images FOLDER OUT --size 224x224",
        )
    return [found[name] for name in ("images", "masks") if name in found]
