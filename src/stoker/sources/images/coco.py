"""Outlines of objects in COCO files, drawn as masks of classes.

Enters: JSON files of "images", "annotations" and "categories", and the pictures that they name. Leaves: per picture its
`Outlines`, the classes, the split by the files' names. Costs: one parse of each file, about ten times its size in
memory; a mask is drawn when its picture is packed.

Class 0 is the background, the others are the categories that some annotation has, in the order of their ids. Small
objects are drawn over large ones. Polygons, and runs as lists or as text (`pycocotools`), are read; boxes alone are not
outlines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from stoker import bounds
from stoker.display import command
from stoker.errors import Refusal, SourceError
from stoker.sources.images.decoding import PictureError, pillow
from stoker.sources.images.labels import NameIndex
from stoker.sources.images.listing import SPLIT_ALIASES, find_split
from stoker.store.fields import Array
from stoker.strict_json import parse_json

BACKGROUND = "background"
_MOST_CLASSES = 254  # 255 is ignored
_LOOK_BYTES = 4096
_PARSED = 10
_KEYS = (b'"images"', b'"annotations"', b'"categories"', b'"info"', b'"licenses"')


@dataclass(frozen=True)
class Outlines:
    """The objects of one picture."""

    size: tuple[int, int]  # width and height of the picture that they were drawn on
    # class, and polygons (lists of x, y, x, y, ...) or runs of pixels in columns; large objects first
    shapes: Sequence[tuple[int, Any]]
    file: str  # COCO file

    def draw(self) -> Any:
        """Return the mask, a grey image of class numbers.

        Raises:
            PictureError: An outline cannot be drawn.
        """
        module = pillow()
        from PIL import ImageDraw

        width, height = self.size
        mask = module.new("L", self.size, 0)
        for number, shape in self.shapes:
            try:
                if isinstance(shape, Mapping):
                    inside = module.fromarray(_runs(shape, width, height).astype(np.uint8) * 255)
                    mask.paste(number, mask=inside)
                    continue
                for polygon in shape:
                    points = [float(value) for value in polygon]
                    if len(points) >= 6:
                        ImageDraw.Draw(mask).polygon(points, fill=number, outline=number)
            except (TypeError, ValueError, IndexError, OverflowError) as error:
                raise PictureError(
                    f"an outline in {self.file} cannot be drawn: {error}.",
                    "polygons of x, y, x, y, ..., or runs",
                    kind="outline that cannot be drawn",
                ) from error
        return mask


def _runs(shape: Mapping[str, Any], width: int, height: int) -> Array:
    """Return which pixels are inside: runs of outside and inside in turn, column by column."""
    given = shape["counts"]
    counts = np.array(_unpacked(given) if isinstance(given, str) else given, dtype=np.int64)
    if counts.min(initial=0) < 0 or counts.sum() != width * height:
        raise ValueError(f"runs of {counts.sum():,} pixels for {width} x {height}")
    inside = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return inside.reshape(width, height).T


def _unpacked(text: str) -> list[int]:
    """Return the runs in a text of `pycocotools`: five bits a letter, each run minus the run two before it."""
    counts: list[int] = []
    place = 0
    while place < len(text):
        value = shift = 0
        while True:
            bits = ord(text[place]) - 48
            value |= (bits & 0x1F) << shift
            place, shift = place + 1, shift + 5
            if not bits & 0x20:
                break
        if bits & 0x10:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
    return counts


@dataclass(frozen=True)
class CocoSet:
    """Contents of COCO files, by picture."""

    outlines: Mapping[str, Outlines]  # by relative path
    classes: Sequence[str]  # names, the background first
    splits: Mapping[str, int]  # by relative path, if every file names its split; else empty
    refused: Sequence[Refusal] = ()  # missing pictures, annotations without picture or category
    num_boxes: int = 0  # annotations without an outline


def find_coco(place: Path) -> list[Path]:
    """Return the COCO files of a path: the file itself, or those below a folder, by their first bytes."""
    if not place.is_dir():
        return [place] if place.suffix.lower() == ".json" and place.is_file() else []
    found = []
    for path in sorted(place.rglob("*.json")):
        with path.open("rb") as file:
            head = file.read(_LOOK_BYTES)
        if any(key in head for key in _KEYS):
            found.append(path)
    return found


@dataclass
class _Read:
    """One file, while all of them are read."""

    path: Path
    images: Mapping[Any, Mapping[str, Any]]
    categories: Mapping[Any, str]
    shapes: dict[Any, list[tuple[float, str, Any]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    num_boxes: int = 0


def read_coco(paths: Sequence[Path], root: Path, pictures: Sequence[str]) -> CocoSet:
    """Read files of outlines, as `find_coco` returns them, and find the pictures that they name."""
    refused: list[Refusal] = []
    files = [_parse(path, refused) for path in paths]
    num_boxes = sum(file.num_boxes for file in files)
    used = {name for file in files for shapes in file.shapes.values() for _, name, _ in shapes}
    if not used:
        what = f"{num_boxes:,} boxes and no outlines" if num_boxes else "no annotations"
        raise SourceError(
            f"{', '.join(map(str, paths[:3]))} holds {what}: there is nothing to make masks of.",
            "annotations with a 'segmentation': polygons or runs",
            command("head", paths[0]),
        )
    order = [name for file in files for name in file.categories.values() if name in used]
    classes = [BACKGROUND, *(name for name in dict.fromkeys(order) if name != BACKGROUND)]
    if len(classes) > _MOST_CLASSES:
        raise SourceError(
            f"{paths[0]} has {len(classes) - 1} categories.",
            f"at most {_MOST_CLASSES - 1}",
            command("head", paths[0]),
        )
    numbers = {name: number for number, name in enumerate(classes)}
    index = NameIndex(pictures)
    outlines: dict[str, Outlines] = {}
    splits: dict[str, int] = {}
    for file in files:
        split = _split_of_file(file.path, root)
        for key, image in file.images.items():
            found = _find(str(image["file_name"]), file.path, root, index)
            if len(found) != 1 or found[0] in outlines:
                lacks = "two pictures of one name" if found else "no picture"
                more = f", such as {found[0]}" if found else " of this name"
                reason = f"{image['file_name']!r}: {lacks}{more}"
                refused.append(Refusal(str(file.path), None, reason, kind=lacks))
                continue
            large_first = sorted(file.shapes.get(key, ()), key=lambda each: -each[0])
            shapes = tuple((numbers[name], shape) for _, name, shape in large_first)
            size = int(image["width"]), int(image["height"])
            outlines[found[0]] = Outlines(size, shapes, str(file.path))
            if split is not None:
                splits[found[0]] = split
    is_divided = len(splits) == len(outlines) and len(set(splits.values())) > 1
    return CocoSet(outlines, classes, splits if is_divided else {}, refused, num_boxes)


def _parse(path: Path, refused: list[Refusal]) -> _Read:
    bounds.require_memory(_PARSED * path.stat().st_size, f"reading {path}", "a smaller file")
    try:
        data = parse_json(path.read_text(encoding="utf-8-sig"))
        images = {each["id"]: each for each in data["images"]}
        categories = {each["id"]: str(each["name"]) for each in data["categories"]}
        annotations = list(data["annotations"])
        for image in images.values():
            if not (image["file_name"] and int(image["width"]) > 0 and int(image["height"]) > 0):
                raise ValueError("a picture without a name or a size")
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{path} is not a COCO file: {error!r}.",
            "JSON with 'images', 'annotations' and 'categories'",
            command("head", path),
        ) from error
    ordered = dict(sorted(categories.items(), key=lambda item: str(item[0]).zfill(12)))
    made = _Read(path, images, ordered)
    for each in annotations:
        shape = each.get("segmentation") if isinstance(each, Mapping) else None
        if not shape:
            made.num_boxes += 1
            continue
        if each.get("image_id") not in images or each.get("category_id") not in categories:
            reason = f"annotation {each.get('id')} is of a picture or a category that is not listed"
            refused.append(Refusal(str(path), None, reason, kind="annotation of nothing"))
            continue
        area = float(each.get("area") or 0.0)
        made.shapes[each["image_id"]].append((area, categories[each["category_id"]], shape))
    return made


def _find(name: str, file: Path, root: Path, index: NameIndex) -> list[str]:
    """Return the pictures of a name; of several, the one beside the file or in the folder it is named after."""
    found = index.find(name)
    folders = [file.stem.rpartition("_")[2]]  # instances_train2017
    if file.parent.is_relative_to(root):
        folders.insert(0, file.parent.relative_to(root).as_posix())
    for folder in folders if len(found) > 1 else ():
        near = [each for each in found if f"/{folder}/" in f"/{each}"]
        if len(near) == 1:
            return near
    return found


def _split_of_file(file: Path, root: Path) -> int | None:
    """Return the split that a file's name gives, or else the names of its folders."""
    words = [file.stem.rpartition("_")[2], file.stem]
    if file.is_relative_to(root):
        words += list(PurePosixPath(file.relative_to(root)).parts[:-1])
    names = [name for word in words if (name := find_split(word)) is not None]
    return SPLIT_ALIASES[names[0]] if names else None
