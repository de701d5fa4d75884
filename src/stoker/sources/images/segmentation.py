"""`stoker pack segmentation`: images and their masks.

Enters: a folder of images and one of masks (or one with both), perhaps a map of mask values, a table of colours, lists
of splits. Leaves: `images` and `masks` as uint8, `name`, and `split` where folders or lists give one. Costs: one decode
of each file; before that, at most 16 masks that are not empty, to find out whether they hold 0 and 255 only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from stoker.display import command, first_names
from stoker.errors import InputError, SourceError
from stoker.sources.contract import Json, Part, PartContext, PartData
from stoker.sources.images.coco import Outlines, find_coco, read_coco
from stoker.sources.images.decoding import Decoded, PictureError, pillow
from stoker.sources.images.encoded import Encoded, encode_mask, picture_field
from stoker.sources.images.listing import Listing, list_pictures, no_pictures, split_of
from stoker.sources.images.masks import (
    COLOURS,
    IGNORE,
    LARGE_VALUES,
    ContradictionError,
    MaskMap,
    MaskOrientation,
    Palettes,
    beside_image,
    check_values,
    find_map,
    join_objects,
    map_of_all,
    parse_mask_map,
    read_colour_table,
    read_mask,
)
from stoker.sources.images.pairing import (
    NO_IMAGE,
    NO_MASK,
    Affixes,
    Pairing,
    divide,
    pair_names,
    suggest,
)
from stoker.sources.images.source import Columns, Found, Payload, PictureFolder, stack
from stoker.store.fields import Array, Dense

_SOME_MASKS = 256
"""Most masks that are looked at for an advice about all of them: a few seconds."""


@dataclass(frozen=True)
class SegmentationSource(PictureFolder):
    """Images and masks with the same file names.

    Attributes:
        images: Folder of images.
        masks: Folder of masks: one value or colour per pixel; or a COCO file of outlines, or a folder of such files.
            The same folder may hold images and masks.
        mask_suffix: What mask names have after the image's name ("_L" for x.png and x_L.png).
        image_suffix: What image names have after the part they share with the mask's.
        mask_prefix: What mask names have before the image's name.
        mask_map: Texts such as "255=1", "0-127=0,128-255=1", "#ff0000=2", "other=255"; "keep" changes nothing.
        mask_colors: File with a colour table.
        mask_orientation: Whether a mask without EXIF is turned like its image; see `masks`.
        class_names: Names of the classes 0, 1, 2, ..., if no colour table or COCO file gives them.
    """

    images: Path = Path()
    masks: Path = Path()
    mask_suffix: str = ""
    image_suffix: str = ""
    mask_prefix: str = ""
    mask_map: tuple[str, ...] = ()
    mask_colors: Path | None = None
    mask_orientation: MaskOrientation = "auto"
    class_names: tuple[str, ...] = ()
    kind: ClassVar[str] = "segmentation"
    mask_channels: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_orientation not in ("auto", "image", "upright"):
            raise InputError(
                f"--mask-orientation is {self.mask_orientation!r}.",
                "auto, image or upright",
                "--mask-orientation image",
            )
        self._given_map()

    def files(self) -> Sequence[Path]:
        """Both folders, the colour table and the lists."""
        folders = [self.images] if self.images == self.masks else [self.images, self.masks]
        table = [self.mask_colors] if self.mask_colors else []
        return [*folders, *table, *self._list_files()]

    @property
    def _takes_values(self) -> bool:
        """Whether the values of masks are taken as classes, without a map or table from the user."""
        return not self.mask_map and self.mask_colors is None

    def _given_map(self) -> MaskMap | None:
        given = parse_mask_map(self.mask_map)
        if self.mask_colors is None:
            return given
        table = read_colour_table(self.mask_colors)
        return replace(table, other=given.other if given else None)

    def _find(self) -> Found:
        """Pair images and masks by name; what has no partner is refused."""
        affixes = Affixes(self.mask_suffix, self.image_suffix, self.mask_prefix)
        images = list_pictures(self.images)
        ignored = Counter(images.ignored)
        if self.images == self.masks:
            image_names, mask_names = divide(images.pictures, affixes)
        else:
            # A COCO file stands for the masks of all pictures that it names.
            others = list_pictures(self.masks) if self.masks.suffix.lower() != ".json" else None
            ignored += others.ignored if others else Counter()
            image_names = list(images.pictures)
            mask_names = list(others.pictures) if others else []
        if not image_names and not mask_names:
            raise no_pictures(images)
        if not mask_names and (files := find_coco(self.masks)):
            return self._by_outlines(files, images)
        pairing = pair_names(image_names, mask_names, affixes)
        if not pairing.pairs:
            raise self._no_pairs(image_names, mask_names)
        splits = self._splits(pairing)
        items = [(image, masks, splits.get(image, 0)) for image, masks in pairing.pairs]
        # The names already include files that the suffix leaves out.
        num_found = len(image_names) + len(mask_names) - pairing.num_masks + ignored.total()
        found = Found(Payload(items, (), bool(splits)), num_found, ignored + pairing.ignored)
        for each in pairing.refused:
            folder = self.masks if each.kind == NO_IMAGE else self.images
            found.refused.append(replace(each, file=str(folder / each.file)))
        self._keep_listed(found, image_names)
        if splits and not self.lists:
            found.notes.append("the folders train, val and test are taken as splits")
        mask_map = self._given_map()
        if mask_map is None:
            items = list(found.payload.items)
            step = max(1, len(items) // 64)
            in_order = [*items[::step], *(item for n, item in enumerate(items) if n % step)]
            mask_map = find_map(tuple(self.masks / name for name in item[1]) for item in in_order)
            if mask_map is not None:
                found.notes.append(
                    "the masks hold 0 and 255 only: 255 is stored as class 1 (--mask-map keep stores 255, "
                    "which training leaves out)"
                )
        if pairing.num_objects:
            found.notes.append(
                f"{pairing.num_objects:,} pictures have one mask per object: joined, class 1 is inside any of them"
            )
        if found.refused and (better := self._advice(pairing)):
            found.notes.append(better)
        names = self.class_names or (mask_map.names if mask_map else ())
        step = max(1, len(found.payload.items) // _SOME_MASKS)
        some = [name for item in found.payload.items[::step] for name in item[1]]
        found.payload = replace(
            found.payload, classes=names, mask_map=mask_map, some_masks=some[:_SOME_MASKS]
        )
        return found

    def _by_outlines(self, files: Sequence[Path], images: Listing) -> Found:
        """Return the pictures that COCO files name; their masks are drawn from the outlines."""
        if not self._takes_values:
            option = "--mask-map" if self.mask_map else "--mask-colors"
            raise InputError(
                f"{option} for the outlines in {files[0]}, whose classes are its categories.",
                f"{option} for masks that are pictures",
                f"leave {option} out",
            )
        made = read_coco(files, self.images, images.pictures)
        items = [
            (name, outlines, made.splits.get(name, 0))
            for name, outlines in sorted(made.outlines.items())
        ]
        found = Found(
            Payload(items, made.classes, bool(made.splits)),
            len(images.pictures) + images.ignored.total() + len(made.refused),
            images.ignored + Counter({"in no COCO file": len(images.pictures) - len(items)}),
            list(made.refused),
            [f"masks are drawn from the outlines in {first_names(files, 3)}"],
        )
        self._keep_listed(found, images.pictures)
        if made.splits and not self.lists:
            found.notes.append("the split is that of the COCO files")
        if empty := sum(not outlines.shapes for outlines in made.outlines.values()):
            found.notes.append(f"{empty:,} pictures without an object: all background")
        if boxes := made.num_boxes:
            found.notes.append(f"{boxes:,} annotations have a box and no outline: not drawn")
        return found

    def _splits(self, pairing: Pairing) -> dict[str, int]:
        """Return the split of each image whose first or second folder is train, val or test, if all are."""
        names = [name for name, _ in pairing.pairs]
        for depth in (0, 1):  # 1: images/train/x.png below a folder that holds images/ and masks/
            if any(name.count("/") <= depth for name in names):
                break
            folders = {name: name.split("/")[depth] for name in names}
            if splits := split_of(sorted(set(folders.values()))):
                return {name: splits[folder] for name, folder in folders.items()}
        return {}

    def _advice(self, pairing: Pairing) -> str:
        found = suggest(
            [each.file for each in pairing.refused if each.kind == NO_MASK],
            [each.file for each in pairing.refused if each.kind == NO_IMAGE],
        )
        if found is None:
            return ""
        return f"with {_options(found[0])}, {found[1]:,} of {found[2]:,} images without a mask find one"

    def _no_pairs(self, images: Sequence[str], masks: Sequence[str]) -> SourceError:
        shown = f"{first_names(images, 2)} in {self.images}"
        shown += f"; {first_names(masks, 2)} in {self.masks}" if masks else ""
        found = suggest(images, images, mixed=True) if self.images == self.masks else None
        if not images or (not masks and found is None):
            empty = self.masks if images else self.images
            return SourceError(
                f"{empty} holds no masks ({len(images):,} images)."
                if images
                else f"{empty} holds no images.",
                "a folder of images and a folder of masks, or one folder and --mask-suffix",
                command("ls", empty),
            )
        found = suggest(images, masks) or found
        fix = _options(found[0]) if found else command("ls", self.images, self.masks)
        hint = f" With it {found[1]:,} of {found[2]:,} images find a mask." if found else ""
        return SourceError(
            f"no image has a mask of its name: {shown}.{hint}",
            "equal names, or a suffix or prefix that masks have",
            fix,
        )

    def build(self, part: Part, context: PartContext) -> PartData:
        """Decode one part of pairs; a pair with a fault is refused whole."""
        del context
        payload: Payload = part.payload
        columns, is_encoded = Columns(self, payload), self.keep_encoded is not None
        masks: list[Any] = []  # bytes where pictures stay encoded, else pixels
        pixels = np.zeros(256, dtype=np.int64)
        palettes = Palettes() if self._takes_values else None
        advice = cache(partial(self._map_of_all, payload))
        for name, mask_names, split in payload.items:
            path = self.images / name
            try:
                made, decoded = self._read(path)
                size = made.size if isinstance(made, Encoded) else self.size
                mask = self._mask(mask_names, decoded, path, payload.mask_map, size, palettes)
            except ContradictionError as error:
                if palettes is None or payload.mask_map is not None or not (better := advice()):
                    raise
                fix = f"{better}, or --mask-map keep"
                raise ContradictionError(error.given, error.allowed, fix) from error
            except SourceError as error:
                if isinstance(error, PictureError) and error.kind in (COLOURS, LARGE_VALUES):
                    error.fix = advice() or error.fix
                columns.refuse(path, error)
                continue
            columns.add(made, decoded, name, split)
            masks.append(encode_mask(mask) if is_encoded else mask)
            pixels += np.bincount(mask.ravel(), minlength=256)
        field = picture_field(masks) if is_encoded else Dense(stack(masks, self.size))
        colours = palettes.colours if palettes else {}
        extra = {
            "mask_pixels": pixels.tolist(),
            "binary": bool(payload.mask_map and payload.mask_map.is_binary),
            "palette": {str(key): code for key, code in colours.items()},
        }
        return columns.part({"masks": field}, extra)

    def _map_of_all(self, payload: Payload) -> str | None:
        return map_of_all((self.masks / name for name in payload.some_masks), payload.mask_map)

    def _mask(
        self,
        names: Sequence[str] | Outlines,
        image: Decoded,
        path: Path,
        mask_map: MaskMap | None,
        size: tuple[int, int],
        palettes: Palettes | None,
    ) -> Array:
        if isinstance(names, Outlines):
            values = beside_image(names.draw(), Path(names.file), image, path)
        else:
            turning = self.mask_orientation
            masks = (
                read_mask(self.masks / name, image, path, mask_map, turning, palettes)
                for name in names
            )
            values = join_objects(masks, path) if len(names) > 1 else next(masks)
        if values.shape == size:
            return values
        module = pillow()
        resized = module.fromarray(values).resize((size[1], size[0]), module.Resampling.NEAREST)
        return np.asarray(resized, dtype=np.uint8)

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Record the mask's values and their pixels; refuse values that cannot be classes."""
        merged = dict(super().finish(extras))
        total = np.sum([extra["mask_pixels"] for extra in extras], axis=0)
        pixels = {int(value): int(total[value]) for value in np.flatnonzero(total)}
        if self._takes_values:
            palettes = Palettes()
            for extra in extras:
                palettes.merge({int(key): code for key, code in extra["palette"].items()})
            if pixels:
                check_values(pixels)
        merged["mask_values"] = sorted(pixels)
        merged["mask_pixels"] = {str(value): count for value, count in pixels.items()}
        if extras and extras[0]["binary"]:
            merged["mask_map"] = "255=1"
        if IGNORE in pixels:
            share = f"({pixels[IGNORE] / sum(pixels.values()):.1%} of the pixels)"
            given = parse_mask_map(self.mask_map)
            merged["notes"].append(
                f"colours that --mask-map does not name {share} count nowhere in training (other=255)"
                if given is not None and given.colours
                else f"mask value 255 {share} counts nowhere in training; --mask-map 255=CLASS makes it a class"
            )
        if not merged["classes"]:
            del merged["classes"]
        return merged


def _options(affixes: Affixes) -> str:
    words: list[str] = []
    for name, value in (
        ("--mask-suffix", affixes.mask_suffix),
        ("--image-suffix", affixes.image_suffix),
        ("--mask-prefix", affixes.mask_prefix),
    ):
        words += [f"{name}={value}"] if value.startswith("-") else [name, value] if value else []
    return command(*words)
