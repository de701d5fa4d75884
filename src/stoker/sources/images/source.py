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
from collections.abc import Iterator, Mapping, Sequence
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

_PART_BYTES = 64 << 20
_ENCODED_PART, _LEAST_ENCODED = 512, 32
"""Encoded pictures of one part at most, and in a small set: 512 are 16 to 60 MB of usual photographs."""
_NAMED = 8
_LOOK_AT = 16


@dataclass(frozen=True)
class Payload:
    """One part: what to decode, and facts about the whole source."""

    items: Sequence[tuple[str, Any, int]]  # relative path; class number, masks or outlines; split
    classes: Sequence[str] = ()
    has_split: bool = False
    mask_map: MaskMap | None = None
    some_masks: Sequence[str] = ()  # of the whole source, for an advice about all masks


@dataclass
class Found:
    """Result of listing the files: all items in one payload, and counts of everything else."""

    payload: Payload
    num_found: int
    ignored: Counter[str]
    refused: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PictureFolder(PlainSource):
    """Base of both kinds of picture source."""

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
    mask_channels: ClassVar[int] = 0  # bytes of each pixel besides the picture's channels

    def __post_init__(self) -> None:
        if min(self.size) < 1 or max(self.size) > 16384:
            raise InputError(
                f"the image size is {self.size}.", "1 to 16384 pixels a side", "--size 512x512"
            )
        if self.channels not in (1, 3):
            raise InputError(f"{self.channels} channels.", "1 (grey) or 3 (RGB)", "--channels 3")
        parse_lists(self.lists)

    def options(self) -> Mapping[str, Json]:
        """Everything that changes the store: all fields but the folders."""
        told: dict[str, Json] = {}
        for name, value in asdict(self).items():
            if name not in ("folder", "images", "masks"):
                plain = list(value) if isinstance(value, tuple) else value
                told[name] = str(value) if isinstance(value, Path) else plain
        told["range"] = told.pop("value_range")
        if told["keep_encoded"] is None:  # older stores do not have this option
            del told["keep_encoded"]
        return told

    def _list_files(self) -> list[Path]:
        return [path for _, path in parse_lists(self.lists)]

    def _find(self) -> Found:
        """Return what the source finds; the first of its `files` is the folder of the pictures."""
        raise NotImplementedError

    def _keep_listed(self, found: Found, names: Sequence[str]) -> None:
        """Keep the items that a list names, with its split; lines that name no picture are refused."""
        if not self.lists:
            return
        split, bad_lines = read_lists(parse_lists(self.lists), names)
        items = found.payload.items
        listed = [(name, what, split[name]) for name, what, _ in items if name in split]
        found.payload = replace(found.payload, items=listed, has_split=True)
        found.ignored["in no list"] += len(items) - len(listed)
        found.refused += bad_lines
        found.num_found += len(bad_lines)

    def prepare(self, scratch: Path) -> Preparation:
        """Find the pictures, look at the ranges of some, and cut all of them into parts."""
        del scratch
        found, folder = self._find(), self.files()[0]
        items = found.payload.items
        if self.value_range is None and self.keep_encoded is None:
            step = max(1, len(items) // _LOOK_AT)
            check_ranges(folder / item[0] for item in items[::step])
        item_bytes = self.size[0] * self.size[1] * (self.channels + self.mask_channels)
        if self.keep_encoded is None:
            sizes, most_items = [item_bytes] * len(items), len(items)
            most_bytes = len(items) * (item_bytes + 64)
        else:
            # Small sets get smaller parts, so that every core has work.
            most_items = min(_ENCODED_PART, max(_LEAST_ENCODED, len(items) // 64))
            # Writing a picture anew makes it smaller, as a rule; masks as PNG are small beside photographs.
            sizes = [_file_bytes(f"{folder}/{item[0]}") for item in items]
            most_bytes = 2 * sum(sizes) * (1 + self.mask_channels)
            if self.keep_encoded.max_side is not None:  # JPEG has less than a byte a pixel
                sizes = [min(size, self.keep_encoded.max_side**2) for size in sizes]
        parts: list[Part] = []
        for start, end in _cut(sizes, most_items):
            label = f"{folder} images {start}-{end}"
            payload = replace(found.payload, items=items[start:end])
            parts.append(Part(len(parts), label, end - start, payload))
        return Preparation(
            parts, most_bytes + (1 << 20), found.refused, found.notes, found.num_found,
            dict(+found.ignored), "pictures",
        )  # fmt: skip

    def _read(self, path: Path) -> tuple[Pixels | Encoded, Decoded]:
        """Return a picture as it is stored, and decoded."""
        if not str(path).isascii() and not _is_utf8(str(path)):
            raise PictureError(
                "has a name that is not UTF-8, as the store's names are.",
                "names in UTF-8",
                "convmv -f latin1 -t utf-8 -r --notest FOLDER",
                path=path,
                kind="name that is not UTF-8",
            )
        if self.keep_encoded is not None:
            return read_encoded(path, self.channels, self.keep_encoded, self.first_frame)
        decoded = decode(path, self.first_frame)
        return to_pixels(decoded, path, self.size, self.channels, self.value_range), decoded

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Add up the facts about the pictures, with notes for the user."""
        kinds: Counter[str] = Counter()
        spans: dict[str, list[float]] = {}
        for extra in extras:
            kinds.update(extra["kinds"])
            for kind, span in extra["spans"].items():
                _widen(spans, kind, span)
        notes = []
        for kind, (low, high) in spans.items():
            bottom, top = self.value_range or ((0, 65535) if kind == "16-bit" else (0, 1))
            note = (
                f"{kinds[kind]:,} {kind} pictures with values {low:g} to {high:g}: "
                f"{bottom:g} to {top:g} became 0 to 255"
            )
            if high - low < (top - bottom) / 4:
                fitting = command("--range", f"{min(low, 0):g},{high:g}")
                note += f"; {fitting} would use all of it"
            notes.append(note)
        notes += [f"{kinds[kind]:,} {text}" for kind, text in _NOTES.items() if kinds[kind]]
        stored: dict[str, Any] = {"size": list(self.size)}
        if self.keep_encoded is not None:
            stored = {"encoded": merge_encoded([extra["encoded"] for extra in extras])}
            if anew := stored["encoded"]["encoded_anew"]:
                is_asked = self.keep_encoded.quality is not None
                form = "JPEG" if is_asked else "JPEG, or as PNG where the file was lossless"
                notes.append(
                    f"{anew:,} pictures were re-encoded as {form}; the others kept bit for bit"
                )
        if turned := sum(extra["turned"] for extra in extras):
            done = "are turned" if self.keep_encoded else "were turned"
            notes.append(f"{turned:,} pictures {done} upright as their EXIF says")
        # Parts that were built before this was counted do not have it.
        if damaged := sum(extra.get("damaged_exif", 0) for extra in extras):
            notes.append(
                f"{damaged:,} pictures have EXIF data that cannot be read: they are taken as they lie in their files"
            )
        return {
            **stored,
            "channels": self.channels,
            "classes": list(extras[0]["classes"]) if extras else [],
            "picture_kinds": dict(kinds),
            "original_sizes": self._original_sizes(extras),
            "notes": notes,
        }

    def _original_sizes(self, extras: Sequence[Mapping[str, Json]]) -> dict[str, Any] | None:
        """Return the range of original sizes, and the mean factor by which each side was resized.

        Encoded pictures are resized by the loader: for them it is the factor to a side of one pixel.
        """
        sizes = [extra["sizes"] for extra in extras if extra.get("sizes")]
        if not sizes:
            return None
        rows = np.array(sizes, dtype=np.float64)
        name, sides = ("per_pixel", (1, 1)) if self.keep_encoded else ("scale", self.size)
        return {
            "least": rows[:, 1:3].min(axis=0).astype(int).tolist(),
            "most": rows[:, 3:5].max(axis=0).astype(int).tolist(),
            name: (np.array(sides) * rows[:, 5:7].sum(axis=0) / rows[:, 0].sum()).tolist(),
        }


_NOTES = {
    "16-bit colour": "colour pictures of 16 bits a channel: the upper 8 bits are stored",
    "transparent": "pictures with transparency are laid over white",
    "CMYK": "CMYK pictures are converted to RGB without a colour profile",
}
"""Kind of picture to a note for the user."""


def _widen(spans: dict[str, list[float]], kind: str, span: Sequence[float]) -> None:
    known = spans.setdefault(kind, list(span))
    known[:] = [min(known[0], span[0]), max(known[1], span[1])]


class Columns:
    """The columns of one part while it is built, and facts about its pictures."""

    def __init__(self, source: PictureFolder, payload: Payload) -> None:
        self._source, self._payload = source, payload
        self._pictures: list[Any] = []  # `Encoded` where pictures stay encoded, else pixels
        self._names: list[str] = []
        self._splits: list[int] = []
        self._refused: list[Refusal] = []
        self._kinds: Counter[str] = Counter()
        self._spans: dict[str, list[float]] = {}
        self._num_turned = 0
        self._num_damaged_exif = 0
        self._sizes: list[tuple[int, int]] = []

    def add(self, made: Pixels | Encoded, decoded: Decoded, name: str, split: int) -> None:
        """Take one picture, as pixels or as the bytes of its file."""
        if isinstance(made, Encoded):
            self._pictures.append(made)
        else:
            self._pictures.append(np.ascontiguousarray(made.values.transpose(2, 0, 1)))
            if made.span:
                _widen(self._spans, decoded.kind, made.span)
        self._names.append(name)
        self._splits.append(split)
        self._kinds[decoded.kind] += 1
        self._num_turned += decoded.orientation != 1
        self._num_damaged_exif += decoded.has_damaged_exif
        self._sizes.append(decoded.size[::-1])

    def refuse(self, path: Path, error: SourceError) -> None:
        """List a refused picture, under the kind of its error."""
        kind, reason = "too large to decode", error.given
        if isinstance(error, PictureError):
            kind, reason = error.kind, error.reason
        self._refused.append(Refusal(str(path), None, reason, kind=kind, fix=error.fix))

    def part(self, fields: Mapping[str, FieldData], extra: Mapping[str, Json]) -> PartData:
        """Return the part: the fields that both kinds have, then `fields`; and what `PictureFolder.finish` adds up."""
        source, pictures = self._source, self._pictures
        is_encoded = source.keep_encoded is not None
        made: dict[str, FieldData]
        if is_encoded:
            made = encoded_fields(pictures)
        else:
            made = {"images": Dense(stack(pictures, (source.channels, *source.size)))}
        made["name"] = Ragged.from_strings(self._names)
        if self._payload.has_split:
            made["split"] = Dense(np.array(self._splits, dtype=np.uint8))
        sizes: list[float] = []
        if self._sizes:
            both = np.array(self._sizes, dtype=np.float64)
            sizes = [len(both), *both.min(axis=0), *both.max(axis=0), *(1 / both).sum(axis=0)]
        facts = {
            "classes": list(self._payload.classes),
            "kinds": dict(self._kinds),
            "spans": self._spans,
            "turned": self._num_turned,
            "damaged_exif": self._num_damaged_exif,
            # Number of pictures; smallest and largest height and width; sums of 1 / height and 1 / width.
            "sizes": sizes,
            "encoded": encoded_facts(pictures if is_encoded else []),
        }
        return PartData({**made, **fields}, self._refused, {**facts, **extra})


@dataclass(frozen=True)
class ImagesSource(PictureFolder):
    """Class folders `folder/<class>/<image>`, the same below train, val and test, or pictures with a CSV of labels.

    Attributes:
        folder: Parent of the class folders, or of the pictures.
        labels: CSV with one line per picture, instead of class folders.
        label_column: Label column of the CSV; None finds it.
    """

    folder: Path = Path()
    labels: Path | None = None
    label_column: str | None = None
    kind: ClassVar[str] = "images"

    def files(self) -> Sequence[Path]:
        """The folder, the CSV and the lists."""
        return [self.folder, *([self.labels] if self.labels else []), *self._list_files()]

    def _find(self) -> Found:
        """List the pictures, and find the class and the split of each."""
        listing = list_pictures(self.folder)
        if not listing.pictures and not listing.folders:
            raise _no_classes(listing)
        if not listing.pictures:
            raise no_pictures(listing)
        found = _by_folders(listing) if self.labels is None else self._by_csv(self.labels, listing)
        found.ignored += listing.ignored
        found.num_found += len(listing.pictures) + listing.ignored.total()
        self._keep_listed(found, listing.pictures)
        return found

    def _by_csv(self, labels: Path, listing: Listing) -> Found:
        table = read_labels(labels, listing.pictures, self.label_column)
        items = [
            (name, table.label[name], table.split.get(name, 0))
            for name in listing.pictures
            if name in table.label
        ]
        ignored = Counter({f"not in {labels.name}": len(listing.pictures) - len(items)})
        payload = Payload(items, table.classes, bool(table.split))
        return Found(payload, len(table.refused), ignored, list(table.refused), list(table.notes))

    def build(self, part: Part, context: PartContext) -> PartData:
        """Decode one part; what cannot be decoded is refused."""
        del context
        payload: Payload = part.payload
        columns, labels = Columns(self, payload), []
        paths = read_ahead(self.folder, [name for name, _, _ in payload.items])
        for path, (name, label, split) in zip(paths, payload.items, strict=True):
            try:
                columns.add(*self._read(path), name, split)
            except SourceError as error:
                columns.refuse(path, error)
                continue
            labels.append(label)
        counts = np.bincount(labels, minlength=len(payload.classes)).tolist() if labels else []
        return columns.part(
            {"labels": Dense(np.array(labels, dtype=np.int64))}, {"label_counts": counts}
        )

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Record the class names, how many pictures each has, and facts about the pictures."""
        merged = super().finish(extras)
        counts = np.zeros(len(merged["classes"]), dtype=np.int64)
        for extra in extras:
            counts[: len(extra["label_counts"])] += np.array(extra["label_counts"], dtype=np.int64)
        named = zip(merged["classes"], counts.tolist(), strict=True)
        return {**merged, "class_counts": dict(named)}


def _by_folders(listing: Listing) -> Found:
    """Take the class from the first folder, or from the one below `train`, `val` and `test`."""
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
    if len(kept) == 1:
        notes.append(_of_one_class(listing, kept[0]))
    if num_nested:
        notes.append(f"{num_nested:,} pictures lie deeper; their class is the first folder")
    items = [(name, numbers[kind], split) for name, kind, split in placed]
    return Found(Payload(items, kept, bool(splits)), 0, ignored, [], notes)


def _named_twice(pictures: Sequence[str], splits: Mapping[str, int]) -> bool:
    """Whether the only folder in each split is again named like a split, as in `seg_train/seg_train/forest`."""
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
    """Refuse a folder whose only class holds all the classes: one level too high, or several."""
    if len(classes) > 1 or depth:
        return
    parents = {name.rpartition("/")[0] for name, _, _ in placed}
    common = os.path.commonpath(parents)
    below = {parent[len(common) + 1 :].partition("/")[0] for parent in parents}
    if len(below) > 1 and common not in parents:
        raise SourceError(
            f"all pictures of {listing.root} lie in folders of its folder {common!r}: "
            f"{first_names(sorted(below), _NAMED)}.",
            "the folder whose folders are the classes",
            command("stoker", "pack", "images", listing.root / common, "OUT"),
        )


def _of_one_class(listing: Listing, name: str) -> str:
    """Return a note about a set of one class, with the CSV that may hold the labels."""
    beside = sorted(listing.root.glob("*.csv"))
    labels = f": {command('--labels', beside[0])} may tell others" if beside else ""
    return f"all pictures are of one class, {name!r}, and training needs two{labels}"


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


def _cut(sizes: Sequence[int], most_items: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of parts of at most so many pictures; of several, at most 64 MB: a part lies in memory."""
    start = total = 0
    for place, size in enumerate(sizes):
        if place > start and (place - start == most_items or total + size > _PART_BYTES):
            yield start, place
            start, total = place, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _file_bytes(path: str) -> int:
    """Return the size of a file; 0 for a missing one, which is refused when its part is built."""
    try:
        return os.stat(path).st_size  # noqa: PTH116  a path object for each takes five times as long
    except OSError:
        return 0


def stack(items: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Return the items as one uint8 array; without items, an empty one of the right shape."""
    return np.stack(items) if items else np.empty((0, *shape), dtype=np.uint8)
