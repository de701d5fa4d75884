"""Masks for new pictures: a folder in, a folder of PNG masks at the original sizes out.

Enters: a folder of pictures, or one. Leaves: a palette PNG for each under its name, `classes.csv` with names and
colours, `answers.csv` with the reason for each picture that has no mask. Costs: one decode and one pass per picture;
for a large picture its pixels, and scores for one row of tiles.

A picture no larger than those of training is resized as they were, and its scores are brought back to its own size. A
larger one is brought to the scale of training and goes through in tiles of the training size. Tiles overlap by a
quarter; probabilities are blended with weights that fall towards a tile's border.
"""

from __future__ import annotations

import csv
import io
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from stoker.errors import InputError, SourceError, unwritable
from stoker.ownership import SIGNATURE, claim_folder, has_signature, write_text, writing
from stoker.recipes.contract import RawBatch
from stoker.recipes.pictures import FolderPictures, Size
from stoker.recipes.segmentation.evaluation import legend, palette
from stoker.store.fields import Array
from stoker.train.predict import Predicted
from stoker.units import format_count

Tensor = torch.Tensor
OVERLAP = 0.25
_LARGER = 1.25
"""Pictures up to this much larger than the largest of training are resized, not cut into tiles."""
_BATCH_BYTES = 64 << 20
_TILES_AT_ONCE = 4


@dataclass(frozen=True)
class Scale:
    """How pictures of training became what the network saw.

    Attributes:
        size: Height and width after resizing.
        most: Largest height and width before; None where the store does not know.
        share: Mean of after / before, by height and width.
    """

    size: Size
    most: Size | None = None
    share: tuple[float, float] = (1.0, 1.0)

    def work_size(self, original: Size) -> Size:
        """Return the size in which a picture goes through the network, in tiles where it is not `size`."""
        if self.most is None or all(
            own <= _LARGER * most for own, most in zip(original, self.most, strict=True)
        ):
            return self.size
        high, wide = (
            max(least, round(own * share))
            for own, share, least in zip(original, self.share, self.size, strict=True)
        )
        return high, wide


# -- pictures in ---------------------------------------------------------------------------------


class ScenePictures(FolderPictures):
    """The pictures of a folder at the size they go through the network; see `RawReader`.

    Args:
        found: Of `find_pictures`.
        scale: Of training.
        is_table: Whether answers become rows of one table, which needs masks of one size.
        more: As for `FolderPictures`.
    """

    def __init__(self, *found: Any, scale: Scale, is_table: bool, **more: Any) -> None:
        super().__init__(*found, **more)
        self._scale, self._is_table = scale, is_table
        self._num_tiled = 0

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield every picture once, in the order of the names; those of one size together."""
        held: list[tuple[str, Array, Size]] = []
        first: Size | None = None
        for name in self._names:
            try:
                decoded = self._decode(name)
                original = (decoded.image.height, decoded.image.width)
                size = self._scale.work_size(original)
                pixels = self._pixels(name, decoded, size)
            except SourceError as error:
                yield from _as_batch(held)
                held = []
                yield self._refused(name, error, first)
                continue
            self._num_tiled += size != self._scale.size
            if self._is_table and first not in (None, original):
                raise InputError(
                    f"{self._root / name} has {original[1]} x {original[0]} pixels, and pictures before it had others.",
                    "masks of one size in a table, or a folder of masks",
                    "a folder as OUT",
                )
            first = first or original
            is_full = len(held) * pixels.nbytes >= _BATCH_BYTES or len(held) >= self._batch_size
            if held and (is_full or held[0][2] != original):
                yield from _as_batch(held)
                held = []
            held.append((name, pixels, original))
        yield from _as_batch(held)

    def _refused(self, name: str, error: SourceError, size: Size | None) -> RawBatch:
        blank = torch.zeros((1, self._channels, *self._scale.size), dtype=torch.uint8)
        batch = {"images": blank, "original_size": torch.tensor([size or self._scale.size])}
        reasons = [self._refuse(error)]
        return RawBatch(np.array([name], dtype=object), batch, np.zeros(1, bool), reasons)

    def notes(self) -> Sequence[str]:
        """Return what was cut into tiles and what was left out."""
        tiled, (high, wide) = self._num_tiled, self._scale.size
        words = f"{format_count(tiled, 'large picture')} went through in tiles of {wide} x {high}"
        return [*self._told, *([words] if tiled else []), *self._left_out("a mask")]


def _as_batch(held: Sequence[tuple[str, Array, Size]]) -> Iterator[RawBatch]:
    if held:
        names, pixels, sizes = zip(*held, strict=True)
        batch = {
            "images": torch.from_numpy(np.stack(pixels)),
            "original_size": torch.tensor(sizes),
        }
        yield RawBatch(
            np.array(names, dtype=object), batch, np.ones(len(names), bool), [None] * len(names)
        )


# -- through the network -------------------------------------------------------------------------


def segment(
    model: Any,
    images: Tensor,
    original: Size,
    tile: Size,
    normalise: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return masks `(batch, *original)` uint8.

    Images are uint8, at the size they go through in; those larger than `tile`, the size of training, are cut.
    """
    if tuple(images.shape[2:]) == tile:
        return _enlarged(model(normalise(images)), original)
    masks = torch.stack([_in_tiles(model, image, tile, normalise) for image in images])
    return _nearest(masks, original)


def _enlarged(scores: Tensor, size: Size) -> Tensor:
    """Return the best class of every pixel of scores that are enlarged bilinearly, one class at a time."""
    if tuple(scores.shape[2:]) == size:
        return scores.argmax(dim=1).to(torch.uint8)
    best: Tensor | None = None
    answer = torch.zeros((len(scores), *size), dtype=torch.uint8, device=scores.device)
    for number in range(scores.shape[1]):
        wide = functional.interpolate(
            scores[:, number : number + 1].float(), size, mode="bilinear", align_corners=False
        )[:, 0]
        if best is None:
            best = wide
            continue
        # In place: a large picture has room for few maps of its size.
        answer.masked_fill_(wide > best, number)
        torch.maximum(best, wide, out=best)
    return answer


def _nearest(masks: Tensor, size: Size) -> Tensor:
    high, wide = masks.shape[1:]
    if (high, wide) == size:
        return masks
    rows = ((torch.arange(size[0], device=masks.device) + 0.5) * (high / size[0])).long()
    columns = ((torch.arange(size[1], device=masks.device) + 0.5) * (wide / size[1])).long()
    return masks[:, rows.clamp(max=high - 1)][:, :, columns.clamp(max=wide - 1)]


def tile_starts(side: int, tile: int) -> list[int]:
    """Return where tiles begin so that neighbours overlap by a quarter or more and the side is covered."""
    if side <= tile:
        return [0]
    step = max(1, tile - round(tile * OVERLAP))
    return [*range(0, side - tile, step), side - tile]


def _in_tiles(
    model: Any, image: Tensor, tile: Size, normalise: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the mask of one image; keeps the scores of one row of tiles."""
    high, wide = image.shape[1:]
    mask = torch.zeros((high, wide), dtype=torch.uint8, device=image.device)
    weights = _ramp(tile[0], image.device)[:, None] * _ramp(tile[1], image.device)
    tops, lefts = tile_starts(high, tile[0]), tile_starts(wide, tile[1])
    held: Tensor | None = None
    for top, following in zip(tops, [*tops[1:], high], strict=True):
        for low in range(0, len(lefts), _TILES_AT_ONCE):
            some = lefts[low : low + _TILES_AT_ONCE]
            cut = [image[:, top : top + tile[0], left : left + tile[1]] for left in some]
            shares = model(normalise(torch.stack(cut))).float().softmax(dim=1)
            if held is None:
                held = torch.zeros((shares.shape[1], tile[0], wide), device=image.device)
            for left, share in zip(some, shares, strict=True):
                held[:, :, left : left + tile[1]] += share * weights
        assert held is not None
        # Rows above the next tiles are done: no later tile adds to them.
        done = following - top
        mask[top:following] = held[:, :done].argmax(dim=0).to(torch.uint8)
        rest = held[:, done:].clone()
        held.zero_()
        held[:, : rest.shape[1]] = rest
    return mask


def _ramp(side: int, device: torch.device) -> Tensor:
    """Return weights that rise from a tile's border over the overlap, and are 1 inside."""
    reach = max(1, round(side * OVERLAP))
    place = torch.arange(side, device=device)
    return ((torch.minimum(place, side - 1 - place) + 1) / (reach + 1)).clamp(max=1.0)


# -- masks out -----------------------------------------------------------------------------------


def write_masks(out: Path, answers: Iterable[Predicted], names: Sequence[str]) -> int:
    """Write every mask as a PNG below a folder of ours; return how many pictures there were."""
    claim_folder(out, "masks", "a folder of masks")
    listed: list[tuple[str, str, str]] = []
    used: set[str] = set()
    colours = palette()
    for predicted in answers:
        for row, name in enumerate(map(str, predicted.sample_ids)):
            if predicted.answered is not None and not predicted.answered[row]:
                why = predicted.reasons[row] if predicted.reasons is not None else ""
                listed.append((name, "", why or ""))
                continue
            target = free_mask_name(name, used)
            path = out / target
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with writing(path, has_signature) as temporary, temporary.open("xb") as file:
                    file.write(encode_mask(predicted.columns["mask"][row], colours))
            except OSError as error:
                raise unwritable(path, error) from error
            listed.append((name, target, ""))
    _write_table(out / "answers.csv", ("file", "mask", "reason"), listed)
    rows = [(str(value), name, colour) for value, (name, colour) in legend(names).items()]
    _write_table(out / "classes.csv", ("value", "class", "colour"), rows)
    return len(listed)


def free_mask_name(name: str, used: set[str]) -> str:
    """Return the name of a mask: that of the picture with .png, or with .png behind it where that is taken.

    A name in a store may be any text: its folders stay below that of the masks.
    """
    parts = [part for part in PurePosixPath(name).parts if part not in ("/", "..")]
    path = PurePosixPath(*parts or ["mask"])
    target = path.with_suffix(".png").as_posix()
    if target in used:
        target = f"{path}.png"
    number = 2
    while target in used:
        target = f"{path}-{number}.png"
        number += 1
    used.add(target)
    return target


def _write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    first = ",".join(header)

    def is_ours(found: Path) -> bool:
        with found.open("rb") as file:
            return file.read(len(first)) == first.encode()

    write_text(path, text.getvalue(), is_ours)


def encode_mask(mask: Array, colours: Array) -> bytes:
    """Return `(height, width)` uint8 as a PNG whose pixels are the values, shown in colours."""
    high, wide = mask.shape

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    packer = zlib.compressobj(6)
    rows = b"".join(packer.compress(b"\0" + np.ascontiguousarray(row).tobytes()) for row in mask)
    parts: Mapping[bytes, bytes] = {
        b"IHDR": struct.pack(">IIBBBBB", wide, high, 8, 3, 0, 0, 0),
        b"tEXt": b"Software\0" + SIGNATURE.encode(),
        b"PLTE": colours.astype(np.uint8).tobytes(),
        b"IDAT": rows + packer.flush(),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, data) for name, data in parts.items())
