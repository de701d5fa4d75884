"""Masks for new pictures: reads a folder of pictures, writes a folder of PNG masks with the original sizes.

Enters: a folder of pictures, or one. Leaves: a palette PNG for each under its name, `classes.csv` with names and
colours, `answers.csv` with the reason for each picture that has no mask. Costs: one decode and one pass per picture;
for a large picture memory for its pixels, and for the scores of one row of tiles.

A picture not much larger than those of training is resized as they were, and its scores are resized back. A larger one
is resized to the scale of training and processed in tiles of the training size. Tiles overlap by a quarter;
probabilities are blended with weights that fall towards a tile's border.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from stoker.display import quoted
from stoker.errors import InputError, SourceError, unwritable
from stoker.ownership import (
    MARK_NAME,
    SIGNATURE,
    claim_folder,
    has_signature,
    remove_empty_folder,
    remove_file,
    write_text,
    writing,
)
from stoker.packing.samples import encode_png
from stoker.recipes.contract import Facts, RawBatch
from stoker.recipes.pictures import FolderPictures, GivenPictures, Size, as_keys
from stoker.recipes.segmentation.evaluation import legend, palette
from stoker.store.fields import Array
from stoker.train.predict import Predicted
from stoker.units import format_count

Tensor = torch.Tensor
OVERLAP = 0.25
_LARGER = 1.25
"""Pictures up to this factor larger than the largest one of the training are resized, not cut into tiles."""
_BATCH_BYTES = 64 << 20
_TILES_AT_ONCE = 4
_ANSWERS_HEADER = ("file", "mask", "reason")
_CLASSES_HEADER = ("value", "class", "colour")


@dataclass(frozen=True)
class Scale:
    """How the pictures of the training were resized."""

    size: Size  # height and width after resizing
    most: Sequence[int] | None = None  # largest height and width before resizing; None: not known
    share: Sequence[float] = (1.0, 1.0)  # mean of size after / size before, for height and width

    def work_size(self, original: Size) -> Size:
        """Return the size to which a picture is resized for the network. If it is not `size`, tiles are used."""
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
    """Reads pictures, resized for the network; a `RawReader`.

    Args:
        is_table: Whether answers become rows of one table, which needs masks of one size.
        skipped: A note on what was left out of the folder, or "".
    """

    def __init__(
        self,
        pictures: GivenPictures,
        facts: Facts,
        batch_size: int,
        *,
        is_table: bool,
        skipped: str = "",
    ) -> None:
        super().__init__(pictures, facts, batch_size)
        sizes = facts["original_sizes"] or {}
        self._scale = Scale(self._size, sizes.get("most"), sizes.get("scale", (1.0, 1.0)))
        self._is_table, self._skipped = is_table, skipped
        self._num_tiled = 0

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield every picture once, in the order of the names; a batch has pictures of one size."""
        held: list[tuple[Any, Array, Size]] = []
        first: Size | None = None
        for place, name in enumerate(self._pictures.keys):
            try:
                decoded = self._decode(place)
                original = (decoded.image.height, decoded.image.width)
                size = self._scale.work_size(original)
                pixels = self._pixels(place, decoded, size)
            except SourceError as error:
                yield from _as_batch(held)
                held = []
                yield self._refused(name, error, first)
                continue
            self._num_tiled += size != self._scale.size
            if self._is_table and first not in (None, original):
                raise InputError(
                    f"{self._pictures.path(place)} has {original[1]} x {original[0]} pixels, and those before it had "
                    "others.",
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

    def _refused(self, name: Any, error: SourceError, size: Size | None) -> RawBatch:
        blank = torch.zeros((1, self._channels, *self._scale.size), dtype=torch.uint8)
        blank_size = size or self._scale.size
        batch = {"images": blank, "original_size": torch.tensor([blank_size])}
        reasons = [self._refuse(error)]
        labels = _size_labels([blank_size])
        return RawBatch(as_keys([name]), batch, np.zeros(1, bool), reasons, labels)

    def notes(self) -> Sequence[str]:
        """Return notes on pictures that were cut into tiles or left out."""
        tiled, (high, wide) = self._num_tiled, self._scale.size
        words = f"{format_count(tiled, 'large picture')} went through in tiles of {wide} x {high}"
        told = [*self._pictures.told, *([self._skipped] if self._skipped else [])]
        return [*told, *([words] if tiled else []), *self._left_out("a mask")]


def _as_batch(held: Sequence[tuple[Any, Array, Size]]) -> Iterator[RawBatch]:
    if held:
        names, pixels, sizes = zip(*held, strict=True)
        batch = {
            "images": torch.from_numpy(np.stack(pixels)),
            "original_size": torch.tensor(sizes),
        }
        answered, reasons = np.ones(len(names), bool), [None] * len(names)
        yield RawBatch(as_keys(names), batch, answered, reasons, _size_labels(sizes))


def _size_labels(sizes: Sequence[Size]) -> dict[str, Array]:
    high, wide = np.array(sizes, np.int64).T
    return {"height": high, "width": wide}


# -- through the network -------------------------------------------------------------------------


def segment(
    model: Any,
    images: Tensor,
    original: Size,
    tile: Size,
    normalise: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return masks `(batch, *original)` uint8.

    `images` are uint8, resized for the network. If their size is not `tile`, the training size, tiles are used.
    """
    if tuple(images.shape[2:]) == tile:
        return _enlarged(model(normalise(images)), original)
    masks = torch.stack([_in_tiles(model, image, tile, normalise) for image in images])
    return _nearest(masks, original)


def _enlarged(scores: Tensor, size: Size) -> Tensor:
    """Return the best class of every pixel after bilinear resizing of the scores, one class at a time."""
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
        # In place, to save memory: maps of a large picture are large.
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
    """Return the starts of tiles that cover the side, with an overlap of at least a quarter."""
    if side <= tile:
        return [0]
    step = max(1, tile - round(tile * OVERLAP))
    return [*range(0, side - tile, step), side - tile]


def _in_tiles(
    model: Any, image: Tensor, tile: Size, normalise: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the mask of one image. Memory: scores of one row of tiles."""
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
        # Pixel rows above the next tiles are complete: no later tile adds to them.
        done = following - top
        mask[top:following] = held[:, :done].argmax(dim=0).to(torch.uint8)
        rest = held[:, done:].clone()
        held.zero_()
        held[:, : rest.shape[1]] = rest
    return mask


def _ramp(side: int, device: torch.device) -> Tensor:
    """Return weights along one side of a tile: they rise from the border over the overlap, and are 1 inside."""
    reach = max(1, round(side * OVERLAP))
    place = torch.arange(side, device=device)
    return ((torch.minimum(place, side - 1 - place) + 1) / (reach + 1)).clamp(max=1.0)


# -- masks out -----------------------------------------------------------------------------------


def write_masks(
    out: Path, answers: Iterable[Predicted], names: Sequence[str]
) -> tuple[int, list[str]]:
    """Write every mask as a PNG in a folder that stoker owns; return the number of pictures, and notes.

    Masks of an earlier prediction are removed first, so that a folder never mixes two predictions. `answers.csv` is
    written last: without it, a prediction did not finish.

    Raises:
        InputError: The folder contains files that stoker did not write.
        FileError: A file cannot be written.
    """
    answers = iter(answers)
    first = next(answers, None)  # before masks are removed: input that cannot be read raises here
    claim_folder(out, "masks", "a folder of masks")
    told = _clear_masks(out)
    listed: list[tuple[str, str, str]] = []
    used: set[str] = set()
    colours = palette()
    for predicted in itertools.chain([] if first is None else [first], answers):
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
                    mask = predicted.columns["mask"][row]
                    file.write(encode_png(mask, colours, Software=SIGNATURE))
            except OSError as error:
                raise unwritable(path, error) from error
            listed.append((name, target, ""))
    rows = [(str(value), name, colour) for value, (name, colour) in legend(names).items()]
    _write_table(out / "classes.csv", _CLASSES_HEADER, rows)
    _write_table(out / "answers.csv", _ANSWERS_HEADER, listed)
    return len(listed), told


def _clear_masks(out: Path) -> list[str]:
    """Remove the masks and tables of an earlier prediction; return notes on their number and on other files."""
    removed = 0
    others: list[str] = []
    tables = {"answers.csv": _is_table(_ANSWERS_HEADER), "classes.csv": _is_table(_CLASSES_HEADER)}
    for path in sorted(each for each in out.rglob("*") if each.is_file() or each.is_symlink()):
        if path.name == MARK_NAME and path.parent == out:
            continue
        is_table = path.parent == out and path.name in tables
        if remove_file(path, tables[path.name] if is_table else _is_mask):
            removed += not is_table
        else:
            others.append(str(path.relative_to(out)))
    for folder in sorted((each for each in out.rglob("*") if each.is_dir()), reverse=True):
        with contextlib.suppress(OSError):  # a folder with other things in it stays
            remove_empty_folder(folder)
    shown = ", ".join(map(quoted, others[:3])) + (", ..." if len(others) > 3 else "")
    return [
        *([f"{format_count(removed, 'mask')} of an earlier prediction removed"] if removed else []),
        *(
            [
                f"{format_count(len(others), 'file')} in {quoted(out)} not of this prediction: {shown}"
            ]
            if others
            else []
        ),
    ]


def _is_mask(path: Path) -> bool:
    return path.suffix == ".png" and not path.is_symlink() and has_signature(path)


def _is_table(header: Sequence[str]) -> Callable[[Path], bool]:
    first = ",".join(header).encode()

    def is_ours(found: Path) -> bool:
        with found.open("rb") as file:
            return file.read(len(first)) == first

    return is_ours


def free_mask_name(name: str, used: set[str]) -> str:
    """Return the name of a mask: the picture's, with its ending replaced by .png, or .png appended if that is taken.

    A name in a store may be any text. "/" and ".." are removed from it, so masks stay inside their folder.
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
    write_text(path, text.getvalue(), _is_table(header))
