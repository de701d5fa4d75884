"""`stoker pack images`, and what it shares with `stoker pack segmentation`: decode and resize once, store uint8.

Enters: folders of pictures, perhaps a CSV of labels or lists of splits. Leaves: `images` (n, channels, height, width)
uint8, `labels` (class number) or `masks` (n, height, width) uint8, `name`, and `split` where folders or lists give one.
Costs: one decode per file, ever; one part of images in memory per worker.

Images are resized with area-weighted bilinear filtering, masks by nearest, so a mask holds only the classes it had.
Float images would carry four times the bytes and nothing more. How values become 8 bits is stated in `decoding`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from stoker.display import command, first_names
from stoker.errors import InputError, Refusal, SourceError
from stoker.sources.contract import Json, Part, PartContext, PartData, PlainSource, Preparation
from stoker.sources.images.coco import find_coco
from stoker.sources.images.decoding import (
    Decoded,
    PictureError,
    Pixels,
    _kind,
    check_ranges,
    decode,
    to_pixels,
)
from stoker.sources.images.encoded import (
    Encoded,
    KeepEncoded,
    encoded_facts,
    encoded_fields,
    merge_encoded,
    read_encoded,
)
from stoker.sources.images.labels import parse_lists, read_labels, read_lists
from stoker.sources.images.listing import (
    SPLIT_ALIASES,
    Listing,
    find_split,
    list_pictures,
    no_pictures,
    read_ahead,
    split_of,
)
from stoker.sources.images.masks import MaskMap
from stoker.store.fields import Array, Dense, FieldData, Ragged

SPLIT_NAMES = ("train", "val", "test")
_PART_BYTES = 64 << 20
_ENCODED_PART, _LEAST_ENCODED = 512, 32
"""Encoded pictures of one part at most and at least: 512 are 16 to 60 MB of usual photographs."""
_NAMED = 8
_LOOK_AT = 16


@dataclass(frozen=True)
class Payload:
    """One part: what to decode, and what was found out about all of it."""

    items: Sequence[Any]
    classes: Sequence[str] = ()
    has_split: bool = False
    mask_map: MaskMap | None = None


@dataclass(frozen=True)
class PictureFolder(PlainSource):
    """What both kinds of picture source share."""

    size: tuple[int, int]  # stored (height, width)
    channels: Literal[1, 3] = 3  # 3 for RGB, 1 for grey
    # LOW and HIGH of 16-bit, 32-bit and float pictures; None takes the type's own
    value_range: tuple[float, float] | None = field(default=None, kw_only=True)
    # take the first frame of files that hold several; otherwise they are refused
    first_frame: bool = field(default=False, kw_only=True)
    # texts such as "train=train.txt": the split of each picture, by lists of names
    lists: tuple[str, ...] = field(default=(), kw_only=True)
    # store the bytes of the files instead of pixels of one size; None stores pixels
    keep_encoded: KeepEncoded | None = field(default=None, kw_only=True)

    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if min(self.size) < 1 or max(self.size) > 16384:
            raise InputError(
                f"the image size is {self.size}.", "1 to 16384 pixels a side", "--size 512x512"
            )
        if self.channels not in (1, 3):
            raise InputError(f"{self.channels} channels.", "1 (grey) or 3 (RGB)", "--channels 3")
        parse_lists(self.lists)

    def options(self) -> Mapping[str, Json]:
        """Everything that changes the store."""
        return {
            "size": list(self.size),
            "channels": self.channels,
            "range": list(self.value_range) if self.value_range else None,
            "first_frame": self.first_frame,
            "lists": list(self.lists),
            **({"keep_encoded": asdict(self.keep_encoded)} if self.keep_encoded else {}),
        }

    def _list_files(self) -> list[Path]:
        return [path for _, path in parse_lists(self.lists)]

    def _listed(
        self, names: Sequence[str], items: Sequence[Any], ignored: Counter[str]
    ) -> tuple[list[Any], list[Refusal]]:
        """Return the items that a list names, with its split, and the lines that name none."""
        split, bad_lines = read_lists(parse_lists(self.lists), names)
        listed = [(name, what, split[name]) for name, what, _ in items if name in split]
        ignored["in no list"] += len(items) - len(listed)
        return listed, bad_lines

    def _prepared(
        self,
        items: Sequence[Any],
        common: Payload,
        folder: Path,
        bytes_more: int,
        refused: Sequence[Refusal],
        notes: Sequence[str],
        found: int,
        ignored: Counter[str],
    ) -> Preparation:
        """Look at the ranges of some pictures, and cut all of them into parts."""
        if self.value_range is None:
            step = max(1, len(items) // _LOOK_AT)
            check_ranges(folder / item[0] for item in items[::step])
        parts = self._parts(items, common, folder, bytes_more)
        size = self._estimate(items, folder, bytes_more)
        return Preparation(parts, size, refused, notes, found, dict(+ignored), "pictures")

    def _parts(
        self, items: Sequence[Any], common: Payload, label: Path, bytes_more: int
    ) -> list[Part]:
        image_bytes = self.size[0] * self.size[1] * (self.channels + bytes_more)
        per_part = max(1, _PART_BYTES // image_bytes)
        if self.keep_encoded:
            # Small sets in smaller parts, so that every core has some.
            per_part = min(_ENCODED_PART, max(_LEAST_ENCODED, len(items) // 64))
        return [
            Part(
                number,
                f"{label} images {start}-{start + len(batch)}",
                len(batch),
                replace(common, items=batch),
            )
            for number, start in enumerate(range(0, len(items), per_part))
            if (batch := items[start : start + per_part])
        ]

    def _estimate(self, items: Sequence[Any], folder: Path, bytes_more: int) -> int:
        """Return the most bytes that the store is expected to have."""
        num_items = len(items)
        if self.keep_encoded:
            # Writing a picture anew makes it smaller, as a rule; masks as PNG are small beside photographs.
            sizes = [_file_bytes(f"{folder}/{item[0]}") for item in items]
            return 2 * sum(sizes) * (1 + bytes_more) + (1 << 20)
        return num_items * (self.size[0] * self.size[1] * (self.channels + bytes_more) + 64) + (
            1 << 20
        )

    def _read(self, path: Path) -> tuple[Pixels | Encoded, Decoded]:
        """Return a picture as it is stored, and decoded."""
        if self.keep_encoded is not None:
            return read_encoded(path, self.channels, self.keep_encoded, self.first_frame)
        decoded = decode(path, self.first_frame)
        return to_pixels(decoded, path, self.size, self.channels, self.value_range), decoded


class Columns:
    """The columns of one part while it is built, and what its pictures were."""

    def __init__(self) -> None:
        self.images: list[Array] = []
        self.encoded: list[Encoded] = []
        self.names: list[str] = []
        self.splits: list[int] = []
        self.refused: list[Refusal] = []
        self.kinds: Counter[str] = Counter()
        self.spans: dict[str, list[float]] = {}
        self.num_turned = 0
        self.num_damaged_exif = 0
        self.sizes: list[tuple[int, int]] = []

    def add(self, made: Pixels | Encoded, decoded: Decoded, name: str, split: int) -> None:
        """Take one picture, as pixels or as the bytes of its file."""
        if isinstance(made, Encoded):
            self.encoded.append(made)
            kind, (width, height) = _kind(decoded), decoded.size
        else:
            self.images.append(np.ascontiguousarray(made.values.transpose(2, 0, 1)))
            kind, (width, height) = made.kind, decoded.image.size
            if made.span:
                low, high = made.span
                known = self.spans.setdefault(kind, [low, high])
                known[:] = [min(known[0], low), max(known[1], high)]
        self.names.append(name)
        self.splits.append(split)
        self.kinds[kind] += 1
        self.num_turned += decoded.orientation != 1
        self.num_damaged_exif += decoded.has_damaged_exif
        self.sizes.append((height, width))

    def refuse(self, path: Path, error: SourceError) -> None:
        """List a picture that is not taken, under the kind of its error."""
        kind, reason = "too large to decode", error.given
        if isinstance(error, PictureError):
            kind, reason = error.kind, error.reason
        self.refused.append(Refusal(str(path), None, reason, kind=kind, fix=error.fix))

    def fields(
        self, shape: tuple[int, ...], has_split: bool, is_encoded: bool
    ) -> dict[str, FieldData]:
        """Return the fields that both kinds have."""
        fields: dict[str, FieldData] = (
            encoded_fields(self.encoded)
            if is_encoded
            else {"images": Dense(stack(self.images, shape))}
        )
        fields["name"] = Ragged.from_strings(self.names)
        if has_split:
            fields["split"] = Dense(np.array(self.splits, dtype=np.uint8))
        return fields

    def extra(self, classes: Sequence[str]) -> dict[str, Json]:
        """Return what `merged_facts` adds up."""
        return {
            "classes": list(classes),
            "kinds": dict(self.kinds),
            "spans": self.spans,
            "turned": self.num_turned,
            "damaged_exif": self.num_damaged_exif,
            # Number of pictures; smallest and largest height and width; sums of 1 / height and 1 / width.
            "sizes": _summed_sizes(self.sizes),
            "encoded": encoded_facts(self.encoded),
        }


@dataclass(frozen=True)
class ImagesSource(PictureFolder):
    """Class folders `folder/<class>/<image>`, the same below train, val and test, or pictures with a CSV of labels.

    Attributes:
        folder: Their parent.
        labels: CSV with one line per picture, instead of class folders.
        label_column: Its column of labels; None finds it.
    """

    folder: Path = Path()
    labels: Path | None = None
    label_column: str | None = None
    kind: ClassVar[str] = "images"

    def files(self) -> Sequence[Path]:
        """The folder, the CSV and the lists."""
        return [self.folder, *([self.labels] if self.labels else []), *self._list_files()]

    def options(self) -> Mapping[str, Json]:
        """Everything that changes the store."""
        return {
            **super().options(),
            "labels": str(self.labels) if self.labels else None,
            "label_column": self.label_column,
        }

    def prepare(self, scratch: Path) -> Preparation:
        """List the pictures, and find the class and the split of each."""
        del scratch
        listing = list_pictures(self.folder)
        if not listing.pictures and not listing.top_folders:
            raise _no_classes(listing)
        if not listing.pictures:
            raise no_pictures(listing)
        found = len(listing.pictures) + listing.ignored.total()
        if self.labels is not None:
            sorted_out = self._by_csv(listing)
            found += sum(refusal.line is not None for refusal in sorted_out.refused)
        else:
            sorted_out = _by_folders(listing)
        items, refused = sorted_out.items, list(sorted_out.refused)
        ignored = listing.ignored + sorted_out.ignored
        has_split = sorted_out.has_split
        if self.lists:
            items, bad_lines = self._listed(listing.pictures, items, ignored)
            refused += bad_lines
            found += len(bad_lines)
            has_split = True
        common = Payload((), sorted_out.classes, has_split)
        notes = sorted_out.notes
        return self._prepared(items, common, self.folder, 0, refused, notes, found, ignored)

    def _by_csv(self, listing: Listing) -> _Sorted:
        assert self.labels is not None
        table = read_labels(self.labels, listing.pictures, self.label_column)
        items = [
            (name, table.label[name], table.split.get(name, 0))
            for name in listing.pictures
            if name in table.label
        ]
        ignored = Counter({f"not in {self.labels.name}": len(listing.pictures) - len(items)})
        return _Sorted(table.classes, items, bool(table.split), ignored, table.refused, table.notes)

    def build(self, part: Part, context: PartContext) -> PartData:
        """Decode one part; what cannot be decoded is refused."""
        del context
        payload: Payload = part.payload
        columns, labels = Columns(), []
        paths = read_ahead(self.folder, [name for name, _, _ in payload.items])
        for path, (name, label, split) in zip(paths, payload.items, strict=True):
            try:
                columns.add(*self._read(path), name, split)
            except SourceError as error:
                columns.refuse(path, error)
                continue
            labels.append(label)
        shape = (self.channels, *self.size)
        fields = columns.fields(shape, payload.has_split, self.keep_encoded is not None)
        fields["labels"] = Dense(np.array(labels, dtype=np.int64))
        counts = np.bincount(labels, minlength=len(payload.classes)).tolist() if labels else []
        return PartData(
            fields, columns.refused, {**columns.extra(payload.classes), "label_counts": counts}
        )

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Record the class names, how many pictures each has, and what the pictures were."""
        merged = merged_facts(self, extras)
        counts = np.zeros(len(merged["classes"]), dtype=np.int64)
        for extra in extras:
            counts[: len(extra["label_counts"])] += np.array(extra["label_counts"], dtype=np.int64)
        named = zip(merged["classes"], counts.tolist(), strict=True)
        return {**merged, "class_counts": dict(named)}


@dataclass(frozen=True)
class _Sorted:
    """Pictures with their classes: (relative path, class number, split number)."""

    classes: Sequence[str]
    items: Sequence[tuple[str, int, int]]
    has_split: bool = False
    ignored: Counter[str] = field(default_factory=Counter)
    refused: Sequence[Refusal] = ()
    notes: Sequence[str] = ()


def _by_folders(listing: Listing) -> _Sorted:
    """Take the class from the first folder, below `train`, `val` and `test` where there are such."""
    filled = {name.split("/")[0] for name in listing.pictures if "/" in name}
    splits = split_of(sorted(filled))
    depth = 1 if splits else 0
    pictures, folders = listing.pictures, listing.folders
    twice = _named_twice(pictures, splits)
    if twice:  # training_set/training_set/cats
        pictures = [name for name in pictures if name.count("/") > 1]
        folders = [folder for folder in folders if folder.count("/") > 1]
        depth = 2
    classes = sorted(
        {
            folder.split("/")[depth]
            for folder in folders
            if folder.count("/") == depth and (not splits or folder.split("/")[0] in splits)
        }
    )
    if not classes:
        raise _no_classes(listing)
    if not splits:
        _refuse_parts(listing, sorted(filled))
    per_class: Counter[str] = Counter()
    placed, ignored = [], Counter[str]()
    ignored["in no class folder"] += len(listing.pictures) - len(pictures)
    num_nested = 0
    for name in pictures:
        parts = name.split("/")
        if len(parts) < depth + 2:
            where = f"in {parts[0]}/, outside" if splits and len(parts) > 1 else "outside"
            ignored[f"{where} the class folders"] += 1
            continue
        placed.append((name, parts[depth], splits.get(parts[0], 0)))
        per_class[parts[depth]] += 1
        num_nested += len(parts) > depth + 2
    if not placed:
        raise no_pictures(listing)
    _check_level(listing, classes, placed, depth)
    empty = [name for name in classes if not per_class[name]]
    kept = [name for name in classes if per_class[name]]
    numbers = {name: number for number, name in enumerate(kept)}
    notes = []
    if splits:
        notes.append(f"{', '.join(splits)} are taken as splits, the folders below as classes")
    if empty:
        notes.append(f"class folders without pictures are no classes: {first_names(empty, _NAMED)}")
    if num_nested:
        notes.append(f"{num_nested:,} pictures lie deeper; their class is the first folder")
    items = [(name, numbers[kind], split) for name, kind, split in placed]
    return _Sorted(kept, items, bool(splits), ignored, (), notes)


def _named_twice(pictures: Sequence[str], splits: Mapping[str, int]) -> bool:
    """Whether the only folder in each split is called like a split again, as in `seg_train/seg_train/forest`."""
    inner: dict[str, set[str]] = {}
    for name in pictures:
        top, _, rest = name.partition("/")
        if "/" in rest:
            inner.setdefault(top, set()).add(rest.partition("/")[0])
    return bool(splits) and all(
        len(inner.get(top, ())) == 1 and find_split(next(iter(inner[top]))) for top in splits
    )


def _refuse_parts(listing: Listing, names: Sequence[str]) -> None:
    """Refuse folders that are no classes by their names: splits beside something else, images beside masks."""
    parts = [name for name in names if find_split(name) is not None]
    lowered = {name.lower() for name in names}
    scenes = lowered & {"jpegimages", "segmentationclass"} or lowered <= {"images", "masks"}
    if scenes and len(names) > 1:
        raise SourceError(
            f"{listing.root} holds images and masks, not classes: {first_names(names, _NAMED)}.",
            "folder/<class>/<image>; or for a class of every pixel, images and masks",
            command("stoker", "pack", "segmentation", listing.root, "OUT"),
        )
    first = next((name for name in parts if SPLIT_ALIASES[str(find_split(name))] == 0), None)
    if len(parts) > 1 and first is not None:
        others = [name for name in names if name not in parts]
        raise SourceError(
            f"{listing.root} holds {first_names(parts, _NAMED)}, which are splits, beside "
            f"{first_names(others, _NAMED)}: no class folders.",
            "folders of splits alone, or of classes alone",
            command("stoker", "pack", "images", listing.root / first, "OUT"),
        )


def _check_level(
    listing: Listing, classes: Sequence[str], placed: Sequence[tuple[str, str, int]], depth: int
) -> None:
    """Refuse a folder whose only class holds all the classes: one level too high."""
    below = {name.split("/")[depth + 1] for name, _, _ in placed if name.count("/") > depth + 1}
    direct = any(name.count("/") == depth + 1 for name, _, _ in placed)
    if len(classes) == 1 and len(below) > 1 and not direct and not depth:
        raise SourceError(
            f"all pictures of {listing.root} lie in folders of its only folder {classes[0]!r}: "
            f"{first_names(sorted(below), _NAMED)}.",
            "the folder whose folders are the classes",
            command("stoker", "pack", "images", listing.root / classes[0], "OUT"),
        )


def _no_classes(listing: Listing) -> SourceError:
    flat = f" and {len(listing.pictures):,} pictures" if listing.pictures else ""
    beside = sorted({*listing.root.glob("*.csv"), *listing.root.glob("*/*.csv")})
    outlines = find_coco(listing.root) if flat else []
    fix = command("ls", listing.root)
    if outlines:
        fix = command("stoker", "pack", "segmentation", listing.root, "OUT")
    elif beside:
        fix = command("--labels", beside[0])
    return SourceError(
        f"{listing.root} has no class folders{flat}.",
        "folder/<class>/<image>, folder/train/<class>/<image>, or pictures and --labels FILE.csv; "
        "for a class of every pixel, stoker pack segmentation",
        fix,
    )


def parse_size(text: str) -> tuple[int, int]:
    """Return (height, width) for "512", or "360x480" (height x width)."""
    numbers = text.lower().replace("×", "x").split("x")
    if len(numbers) > 2 or not all(number.strip().isdigit() for number in numbers):
        raise InputError(
            f"cannot read {text!r} as a size.", "HEIGHTxWIDTH, or one number", "--size 512x512"
        )
    height, width = int(numbers[0]), int(numbers[-1])
    return height, width


def parse_range(text: str | None) -> tuple[float, float] | None:
    """Return (low, high) for "0,4095"."""
    if text is None:
        return None
    try:
        low, high = (float(number) for number in text.split(","))
    except ValueError:
        low = high = 0.0
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise InputError(
            f"--range is {text!r}.", "LOW,HIGH: two numbers that rise", "--range 0,4095"
        )
    return low, high


def merged_facts(source: PictureFolder, extras: Sequence[Mapping[str, Json]]) -> dict[str, Any]:
    """Add up what the pictures were, and say what a person should know of it."""
    kinds: Counter[str] = Counter()
    spans: dict[str, list[float]] = {}
    for extra in extras:
        kinds.update(extra["kinds"])
        for kind, (low, high) in extra["spans"].items():
            known = spans.setdefault(kind, [low, high])
            known[:] = [min(known[0], low), max(known[1], high)]
    notes = []
    for kind, (low, high) in spans.items():
        bottom, top = source.value_range or ((0, 65535) if kind == "16-bit" else (0, 1))
        note = f"{kinds[kind]:,} {kind} pictures with values {low:g} to {high:g}: {bottom:g} to {top:g} became 0 to 255"
        if high - low < (top - bottom) / 4:
            fitting = command("--range", f"{min(low, 0):g},{high:g}")
            note += f"; {fitting} would use all of it"
        notes.append(note)
    words = {
        "16-bit colour": "colour pictures of 16 bits a channel: the upper 8 bits are stored",
        "transparent": "pictures with transparency are laid over white",
        "CMYK": "CMYK pictures are converted to RGB without a colour profile",
    }
    notes += [f"{kinds[kind]:,} {text}" for kind, text in words.items() if kinds[kind]]
    turned = sum(extra["turned"] for extra in extras)
    encoded: dict[str, Any] = {"size": list(source.size)}
    if source.keep_encoded is not None:
        encoded = {"encoded": merge_encoded([extra["encoded"] for extra in extras])}
        if anew := encoded["encoded"]["encoded_anew"]:
            is_asked = source.keep_encoded.quality is not None
            form = "JPEG" if is_asked else "JPEG, or as PNG where the file was lossless"
            notes.append(
                f"{anew:,} pictures were encoded anew as {form}; the others kept bit for bit"
            )
    if turned:
        done = "are turned" if source.keep_encoded else "were turned"
        notes.append(f"{turned:,} pictures {done} upright as their EXIF says")
    # Parts that were built before this was counted do not have it.
    if damaged := sum(extra.get("damaged_exif", 0) for extra in extras):
        notes.append(
            f"{damaged:,} pictures have EXIF data that cannot be read: they are taken as they lie in their files"
        )
    return {
        **encoded,
        "channels": source.channels,
        "classes": list(extras[0]["classes"]) if extras else [],
        "picture_kinds": dict(kinds),
        "original_sizes": _original_sizes(source, extras),
        "notes": notes,
    }


def _file_bytes(path: str) -> int:
    """Return the size of a file; 0 of one that is gone, which is refused when its part is built."""
    try:
        return os.stat(path).st_size  # noqa: PTH116  a path object for each takes five times as long
    except OSError:
        return 0


def _summed_sizes(sizes: Sequence[tuple[int, int]]) -> list[float]:
    if not sizes:
        return []
    both = np.array(sizes, dtype=np.float64)
    return [len(sizes), *both.min(axis=0), *both.max(axis=0), *(1 / both).sum(axis=0)]


def _original_sizes(
    source: PictureFolder, extras: Sequence[Mapping[str, Json]]
) -> dict[str, Any] | None:
    """Return how large the pictures were, and the mean share to which each side was resized.

    Encoded pictures are resized by who reads them: of these, the share for a side of one pixel.
    """
    rows = np.array([extra["sizes"] for extra in extras if extra.get("sizes")], dtype=np.float64)
    if not len(rows):
        return None
    count = rows[:, 0].sum()
    return {
        "least": [int(side) for side in rows[:, 1:3].min(axis=0)],
        "most": [int(side) for side in rows[:, 3:5].max(axis=0)],
        "per_pixel" if source.keep_encoded else "scale": [
            float(side * total / count)
            for side, total in zip(
                (1, 1) if source.keep_encoded else source.size,
                rows[:, 5:7].sum(axis=0),
                strict=True,
            )
        ],
    }


def stack(items: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Return the items as one uint8 array; of none, an empty one of the right shape."""
    return np.stack(items) if items else np.empty((0, *shape), dtype=np.uint8)
