"""Images and their masks, brought together by name.

Enters: the relative paths of images and of masks. Leaves: a `Pairing`: each image with its mask or masks of
objects, and a reason for every file without a partner. Costs: a dictionary of names; no file is opened.

The key of a file is its path without ending, without the suffix or prefix that was given, and without folders called
`images`, `masks` and the like. Equal keys are a pair. Other files pair by the file name alone where that is
unique. A folder of masks named after an image holds one mask per object, and so do `x_mask.png`, `x_mask_1.png`.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from stoker.errors import Refusal

NO_MASK, NO_IMAGE = "no mask", "no image"
"""Kinds of files without a partner."""
MASK_FOLDERS = {
    "mask", "masks", "labels", "label", "annotations", "annotation", "gt", "groundtruth",
    "segmentation",
}  # fmt: skip
IMAGE_FOLDERS = {"image", "images", "img", "imgs", "jpegimages"}
_OBJECT = r"(?:[_-]?\d+)?"
_MASK_WORD = re.compile(r"(?i)mask|label|seg|annot|truth|manual|(?<![a-z])gt(?![a-z])")
_LOOK = 400


@dataclass(frozen=True)
class Affixes:
    """Parts of file names beside the part that an image and its mask share."""

    mask_suffix: str = ""
    image_suffix: str = ""
    mask_prefix: str = ""

    def __bool__(self) -> bool:
        return bool(self.mask_suffix or self.image_suffix or self.mask_prefix)


@dataclass(frozen=True)
class Pairing:
    """Which masks belong to which image."""

    # image and its masks; several are masks of objects. In the order of the images.
    pairs: Sequence[tuple[str, tuple[str, ...]]]
    # relative paths of files without a partner, or with two; of the kind `NO_IMAGE` for masks, all others are images
    refused: Sequence[Refusal]
    ignored: Counter[str]  # reason to number of files that the suffix leaves out
    num_masks: int  # masks that belong to an image
    num_objects: int  # images with one mask per object


def divide(pictures: Sequence[str], affixes: Affixes) -> tuple[list[str], list[str]]:
    """Divide the pictures of one folder that holds images and masks: by the suffix, else by folders called `masks`."""
    if affixes.mask_suffix or affixes.mask_prefix:
        named = re.compile(_pattern(affixes.mask_prefix, affixes.mask_suffix))
        masks = [name for name in pictures if named.fullmatch(PurePosixPath(name).stem)]
    else:
        masks = [
            name
            for name in pictures
            if any(part.lower() in MASK_FOLDERS for part in PurePosixPath(name).parts[:-1])
        ]
    apart = set(masks)
    return [name for name in pictures if name not in apart], masks


def _pattern(prefix: str, suffix: str) -> str:
    return f"{re.escape(prefix)}(.+){re.escape(suffix)}{_OBJECT if suffix else ''}"


def pair_names(images: Sequence[str], masks: Sequence[str], affixes: Affixes) -> Pairing:
    """Bring images and masks together; every file is in a pair, refused or ignored."""
    ignored: Counter[str] = Counter()
    image_keys = _keyed(images, "", affixes.image_suffix, ignored, "image")
    left = _keyed(masks, affixes.mask_prefix, affixes.mask_suffix, ignored, "mask")
    num_masks = sum(map(len, left.values()))
    by_image = {key: names[0] for key, names in image_keys.items() if len(names) == 1}
    found = {key: left.pop(key) for key in by_image if key in left}
    _take_objects(by_image, left, found)
    _take_by_name(by_image, left, found)
    refused, pairs = [], []
    for key, names in image_keys.items():
        if len(names) == 1:
            continue
        left.pop(key, None)  # the masks of images that are refused go with them
        for name in names:
            other = next(each for each in names if each != name)
            reason = f"{other} has the same name, and a mask belongs to one of them"
            refused.append(Refusal(name, None, reason, kind="two images of one name"))
    for key, image in sorted(by_image.items(), key=lambda item: item[1]):
        mine = found.get(key, [])
        # Masks of objects have different names; x.png and x.tif are two masks for one image.
        several = len({name[: -len(PurePosixPath(name).suffix)] for name in mine}) < len(mine)
        if not mine:
            refused.append(Refusal(image, None, "there is no mask of this name", kind=NO_MASK))
        elif several:
            reason = f"{mine[0]} and {mine[1]} have its name"
            refused.append(Refusal(image, None, reason, kind="two masks of one name"))
        else:
            pairs.append((image, tuple(sorted(mine))))
    alone = [name for names in left.values() for name in names]
    reason = "there is no image of this name"
    refused += [Refusal(name, None, reason, kind=NO_IMAGE) for name in alone]
    num_objects = sum(len(mine) > 1 for _, mine in pairs)
    return Pairing(pairs, refused, +ignored, num_masks - len(alone), num_objects)


def _keyed(
    names: Sequence[str], prefix: str, suffix: str, ignored: Counter[str], what: str
) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = defaultdict(list)
    pattern = re.compile(_pattern(prefix, suffix)) if prefix or suffix else None
    for name in names:
        path = PurePosixPath(name)
        stem = path.stem
        if pattern is not None:
            match = pattern.fullmatch(stem)
            if match is None:
                wanted = f"{prefix}*{suffix}" if prefix else suffix
                ignored[f"{what} without {wanted!r} in its name"] += 1
                continue
            stem = match[1]
        folders = [
            part for part in path.parts[:-1] if part.lower() not in MASK_FOLDERS | IMAGE_FOLDERS
        ]
        keys["/".join([*folders, stem])].append(name)
    return dict(keys)


def _take_objects(
    images: dict[str, str], left: dict[str, list[str]], found: dict[str, list[str]]
) -> None:
    """Take folders of masks that are named after an image: `masks/x/1.png`, `x/masks/1.png` beside `x/images/x.png`."""
    folders: dict[str, list[str]] = defaultdict(list)
    for key in left:
        if "/" in key:
            folders[key.rpartition("/")[0]].append(key)
    in_folder = Counter(key.rpartition("/")[0] for key in images)
    for key in images:
        folder, _, stem = key.rpartition("/")
        alone = in_folder[folder] == 1 and folder.rpartition("/")[2] == stem
        if key in found:
            continue
        # A folder of masks belongs to one image.
        mine = folders.pop(key, None) or (folders.pop(folder, None) if folder and alone else None)
        if mine:
            found[key] = [name for each in mine for name in left.pop(each)]


def _take_by_name(
    images: dict[str, str], left: dict[str, list[str]], found: dict[str, list[str]]
) -> None:
    """Pair what is left by the last part of its key, where only one image and one mask have it."""
    left_images: dict[str, list[str]] = defaultdict(list)
    for key in images:
        if key not in found:
            left_images[key.rpartition("/")[2]].append(key)
    left_masks: dict[str, list[str]] = defaultdict(list)
    for key in left:
        left_masks[key.rpartition("/")[2]].append(key)
    for name, keys in left_images.items():
        if len(keys) == len(left_masks.get(name, ())) == 1:
            found[keys[0]] = left.pop(left_masks[name][0])


def suggest(
    images: Iterable[str], masks: Iterable[str], mixed: bool = False
) -> tuple[Affixes, int, int] | None:
    """Return the suffix or prefix that would bring most images together with masks.

    Args:
        images: Names of images.
        masks: Names of masks.
        mixed: Whether both are the names of one folder: then only a word such as "mask" tells a mask.

    Returns:
        The affixes, how many of the images that were tried find a mask with them, and how many were tried; None when
        nothing fits.
    """
    image_stems = sorted({PurePosixPath(name).stem for name in images})[:_LOOK]
    mask_stems = sorted({PurePosixPath(name).stem for name in masks})
    known = set(mask_stems)
    tried: Counter[Affixes] = Counter()
    for stem in image_stems[:50]:
        ends = [mask for mask in mask_stems if mask.endswith(stem) and mask != stem]
        tried.update(Affixes(mask_prefix=mask[: -len(stem)]) for mask in ends)
        others = [mask for mask in mask_stems if mask != stem]
        shared = (os.path.commonprefix([stem, mask]) for mask in others)  # noqa: RUF071  letters
        best = max(shared, key=len, default="")
        if not best:
            continue
        near = [mask for mask in mask_stems if mask.startswith(best)]
        for mask in near[:20]:
            # The differing part begins at a word, so that x1 and x2 do not share the "x".
            tried.update([Affixes(mask_suffix=mask[len(best) :], image_suffix=stem[len(best) :])])
            for cut in (best.rstrip("_-. "), re.sub(r"[^_\-. ]+$", "", best).rstrip("_-. ")):
                if cut and cut != best:
                    tried.update(
                        [Affixes(mask_suffix=mask[len(cut) :], image_suffix=stem[len(cut) :])]
                    )
    scored = []
    for affixes in tried:
        of_mask = f"{affixes.mask_prefix} {affixes.mask_suffix}"
        if not affixes.mask_prefix and affixes.mask_suffix == affixes.image_suffix:
            continue  # nothing, or the name of the image itself
        if mixed and not _MASK_WORD.search(of_mask):
            continue
        hits = sum(
            f"{affixes.mask_prefix}{stem[: len(stem) - len(affixes.image_suffix)]}{affixes.mask_suffix}"
            in known
            for stem in image_stems
            if stem.endswith(affixes.image_suffix)
        )
        length = len(affixes.mask_suffix) + len(affixes.image_suffix) + len(affixes.mask_prefix)
        # Of those that fit equally well, prefer one that begins where a word does.
        words = {affixes.mask_suffix[:1], affixes.image_suffix[:1]} <= {"", *"_-. "}
        scored.append((hits, words, -length, affixes))
    best_score = max(scored, key=lambda each: each[:3], default=None)
    if best_score is None or best_score[0] < max(1, len(image_stems) // 4):
        return None
    return best_score[3], best_score[0], len(image_stems)
