"""Mask files as one class per pixel: values, colours, one mask per object.

Enters: a mask file, and a `MaskMap` (given by the user, or detected from the first masks). Leaves: `(height, width)`
uint8, each value a class, 255 where a pixel is ignored. Costs: one decode and one table lookup a mask.

Refused instead of guessed: JPEG masks (their values are blurred), colours without a table, values above 255, and a
mask whose orientation relative to its image is unknown.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stoker.display import command
from stoker.errors import InputError, SourceError, require_file
from stoker.sources.images.decoding import Decoded, PictureError, decode, turned
from stoker.store.fields import Array

MaskOrientation = Literal["auto", "image", "upright"]
IGNORE = 255
_ENTRY = re.compile(r"(?:(\d{1,5})(?:-(\d{1,5}))?|#([0-9a-fA-F]{6})|other)=(\d{1,3})")
_HINT = "--mask-map 255=1"
_SPREAD, _FEW, _LOOK_AT = 63, 16, 16
_MANY = 200  # COCO-Stuff, the most of the usual sets, has 182 classes
_MOST_COLOURS = 64
COLOURS, LARGE_VALUES = "colours without a table", "mask value above 255"
"""Kinds of refusals whose advice needs the colours or values of all masks; see `map_of_all`."""
_MOST_ENTRIES = 20


@dataclass(frozen=True)
class MaskMap:
    """Classes of mask values or colours."""

    # (low, high, class): values from low to high, both included
    values: tuple[tuple[int, int, int], ...] = ()
    colours: tuple[tuple[int, int], ...] = ()  # 0xRRGGBB and its class
    # class of all others; None keeps other values, and refuses other colours
    other: int | None = None
    names: tuple[str, ...] = ()  # class names, if a colour table has them
    is_binary: bool = False  # detected: the masks hold 0 and 255 only, and 255 is class 1

    def __bool__(self) -> bool:
        return bool(self.values or self.colours or self.other is not None)


BINARY = MaskMap(values=((255, 255, 1),), is_binary=True)


def parse_mask_map(texts: Sequence[str]) -> MaskMap | None:
    """Return the map for ["255=1"], ["0-127=0,128-255=1", "#ff0000=2", "other=255"].

    Without texts it is None: the map is detected. "keep" is a map that changes nothing.
    """
    if not texts:
        return None
    entries = [entry.strip() for text in texts for entry in text.split(",") if entry.strip()]
    if entries == ["keep"]:
        return MaskMap()
    values, colours, other = [], [], None
    for entry in entries:
        found = _ENTRY.fullmatch(entry)
        low, high, colour, number = found.groups() if found else (None, None, None, "256")
        if found is None or int(number) > 255 or int(high or low or 0) > 65535:
            raise InputError(
                f"--mask-map has the entry {entry!r}.",
                "VALUE=CLASS, LOW-HIGH=CLASS, #RRGGBB=CLASS, other=CLASS (classes 0 to 255), or keep",
                _HINT,
            )
        if low is not None:
            values.append((int(low), int(high or low), int(number)))
        elif colour is not None:
            colours.append((int(colour, 16), int(number)))
        else:
            other = int(number)
    for name, taken in (
        ("value", [value for low, high, _ in values for value in range(low, high + 1)]),
        ("colour", [f"#{colour:06x}" for colour, _ in colours]),
    ):
        twice, times = Counter(taken).most_common(1)[0] if taken else ("", 1)
        if times > 1:
            raise InputError(
                f"--mask-map gives the {name} {twice} two classes.", "one class each", _HINT
            )
    return MaskMap(tuple(values), tuple(colours), other)


def read_colour_table(path: Path) -> MaskMap:
    """Read a table of colours: CSV with the columns r, g, b and name, or lines such as "128 0 0 Building".

    The class is the number of the line, or the column `id`, `class` or `value` where there is one.
    """
    require_file(path, "the colour table")
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise _bad_table(path, 1, str(error)) from error
    header: list[str] = []
    if lines and "," in lines[0]:
        rows = list(csv.reader(lines))
        if not _three(rows[0]):
            header = [cell.strip().lower() for cell in rows.pop(0)]
    else:
        rows = [line.split() for line in lines if not line.lstrip().startswith("#")]
    at = next((header.index(name) for name in ("id", "class", "value") if name in header), None)
    colours, names = [], {}
    for number, row in enumerate(rows):
        own = row[at].strip() if at is not None and at < len(row) else ""
        given = int(own) if own.isdecimal() else number
        channels = _three([cell for place, cell in enumerate(row) if place != at])
        if channels is None or given > 255:
            raise _bad_table(path, number + 1 + bool(header), " ".join(row))
        red, green, blue = channels
        colours.append((red << 16 | green << 8 | blue, given))
        words = [cell.strip() for cell in row if cell.strip() and not cell.strip().isdecimal()]
        names[given] = " ".join(words) or str(given)
    if len({colour for colour, _ in colours}) < len(colours) or not colours:
        raise _bad_table(path, len(lines), "a colour that stands twice" if colours else "nothing")
    ordered = tuple(names.get(n, str(n)) for n in range(max(names) + 1))
    return MaskMap(colours=tuple(colours), names=ordered)


def _three(cells: Sequence[str]) -> tuple[int, int, int] | None:
    """Return the first three whole numbers from 0 to 255 among the cells."""
    numbers = [int(cell) for cell in cells if cell.strip().isdecimal()]
    if len(numbers) < 3 or max(numbers[:3]) > 255:
        return None
    return numbers[0], numbers[1], numbers[2]


def _bad_table(path: Path, line: int, text: str) -> SourceError:
    return SourceError(
        f"{path}:{line} is no colour of a table: {text!r}.",
        "red, green and blue from 0 to 255, and a name; each colour once, classes up to 255",
        command("head", path),
    )


# -- one mask --------------------------------------------------------------------------------------


class Palettes:
    """Palette colours of the values of masks: a value must have the same colour in all masks.

    A program that makes a new palette for each file also numbers the colours anew: one value then means many classes.
    """

    def __init__(self) -> None:
        self.colours: dict[int, int] = {}  # value to colour, 0xRRGGBB

    def add(self, image: Any, path: Path) -> None:
        """Compare the palette of a mask with those before.

        Raises:
            ContradictionError: One of its values has another colour.
        """
        table = np.asarray(image.convert("P").getpalette("RGB"), np.uint32).reshape(-1, 3)
        present = np.flatnonzero(np.bincount(np.asarray(image).ravel())).tolist()
        codes = _codes(table)
        self.merge({value: int(codes[value]) for value in present if value < len(codes)}, str(path))

    def merge(self, others: Mapping[int, int], where: str = "") -> None:
        """Add the colours of other masks.

        Raises:
            ContradictionError: One of their values has another colour.
        """
        for value, colour in others.items():
            known = self.colours.setdefault(value, colour)
            if known != colour:
                named = dict.fromkeys([*self.colours.values(), *others.values()])
                numbered = [f"#{code:06x}={place}" for place, code in enumerate(named)]
                entries = ",".join([*numbered, f"other={IGNORE}"])
                raise ContradictionError(
                    f"masks have palettes of their own: the value {value} is the colour #{known:06x} in one and "
                    f"#{colour:06x} in another{f', {where}' if where else ''}.",
                    "--mask-map with the colours, which says what each is; keep takes the values as they are",
                    f"{command('--mask-map', entries)}, or --mask-map keep",
                )


def read_mask(
    path: Path,
    image: Decoded,
    image_path: Path,
    mask_map: MaskMap | None,
    orientation: MaskOrientation = "auto",
    palettes: Palettes | None = None,
) -> Array:
    """Return the classes of one mask, turned like its image, at the size of its image.

    `orientation` says whether a mask without EXIF is turned too. Where values are classes, their colours are compared
    with the `palettes` of the masks before.
    """
    decoded = decode(path)
    if palettes is not None and decoded.image.mode == "P":
        palettes.add(decoded.image, path)
    upright = _beside(decoded, path, image, image_path, orientation)
    return classes_of(upright, decoded.format, path, mask_map)


def beside_image(mask: Any, path: Path, image: Decoded, image_path: Path) -> Array:
    """Return a mask drawn from outlines in `path`, a grey picture of classes, upright like its image."""
    drawn = Decoded(mask, mask.size, 1, False, "COCO", False)
    # Annotation tools show pictures upright; the size in the file tells if one did not.
    upright = image.size in (image.stored_size, mask.size)
    shown = _beside(drawn, path, image, image_path, "upright" if upright else "image")
    return np.asarray(shown, dtype=np.uint8)


def join_objects(masks: Iterable[Array], path: Path) -> Array:
    """Return 1 wherever one of several masks of objects is not 0."""
    joined: Array | None = None
    for mask in masks:
        inside = mask != 0
        if joined is not None and joined.shape != inside.shape:
            raise PictureError(
                f"{path} has masks of objects of different sizes.",
                "equal sizes",
                kind="masks of several sizes",
            )
        joined = inside if joined is None else joined | inside
    assert joined is not None
    return joined.astype(np.uint8)


def _beside(
    mask: Decoded, path: Path, image: Decoded, image_path: Path, orientation: MaskOrientation
) -> Any:
    """Return the mask, upright like its image.

    A mask with its own EXIF orientation is already upright. A mask without one, of an image that has one, was drawn
    either on the turned picture or on the stored pixels: the sizes decide, or the user.
    """
    shown = mask.image
    if image.orientation != 1 and not mask.has_orientation:
        lying, same = image.stored_size, image.stored_size == image.size
        if orientation == "image" or (orientation == "auto" and not same and shown.size == lying):
            shown = turned(shown, image.orientation)
        elif orientation == "auto" and same and shown.size == lying:
            raise PictureError(
                f"{image_path} is turned by its EXIF orientation {image.orientation}, and mask {path} has none: "
                "their sizes do not tell whether the mask is turned too.",
                "--mask-orientation image (turned like the image), or upright (as it is)",
                "--mask-orientation image",
                kind="turned image beside a mask that may be turned or not",
            )
    if shown.size != image.size:
        raise PictureError(
            f"mask {path} is {shown.size} but its image is {image.size}.",
            "equal sizes, as (width, height)",
            kind="mask of another size than its image",
        )
    return shown


def classes_of(image: Any, form: str, path: Path, mask_map: MaskMap | None) -> Array:
    """Return the class of every pixel of a decoded mask, by the map."""
    mode = image.mode
    chosen = mask_map or MaskMap()
    if form in ("JPEG", "MPO") and not chosen:
        raise PictureError(
            f"mask {path} is a JPEG: its values are blurred by the compression.",
            "PNG masks, or ranges of values",
            "--mask-map 0-127=0,128-255=1",
            kind="JPEG mask without ranges of values",
        )
    if mode in ("LA", "La"):
        image = image.getchannel("L")
    elif mode == "P" and chosen.colours:
        image = image.convert("RGB")
    elif mode not in ("L", "P", "1", "I;16", "I;16B", "I", "RGB", "RGBA"):
        raise PictureError(
            f"mask {path} is {mode}, not one value or colour per pixel.",
            "a grey, palette or RGB image",
            kind=f"mask of type {mode}",
        )
    values = np.asarray(image)
    if values.dtype == bool:
        values = values.astype(np.uint8)
    if values.ndim == 3:
        if chosen.colours:
            return _by_colour(values, path, chosen)
        if not ((values[..., 0] == values[..., 1]) & (values[..., 0] == values[..., 2])).all():
            raise _colours_without_table(values, path)
        values = values[..., 0]  # grey, saved as RGB
    elif chosen.colours:
        raise PictureError(
            f"mask {path} holds grey values ({mode}), not colours.",
            "the colours of the table",
            kind="grey mask with a table of colours",
        )
    return _by_value(values, path, chosen)


def _by_value(values: Array, path: Path, chosen: MaskMap) -> Array:
    if values.min(initial=0) < 0 or values.max(initial=0) > 65535:
        raise PictureError(
            f"mask {path} holds the value {values.max()}.",
            "0 to 65535",
            kind="mask value out of range",
        )
    if not chosen and values.dtype == np.uint8:
        return values
    present = np.flatnonzero(np.bincount(values.ravel()))
    named = {value for low, high, _ in chosen.values for value in range(low, high + 1)}
    targets = {number for _, _, number in chosen.values}
    left = [int(value) for value in present if int(value) not in named]
    if chosen.is_binary and any(left):
        strange = max(left)
        entries = f"255=1,{strange}={2 if strange == 1 else min(254, strange)}"
        raise ContradictionError(
            f"mask {path} holds the value {strange}, while the masks before held 0 and 255 only.",
            "--mask-map, which says what each value is",
            f"{command('--mask-map', entries)}, or --mask-map keep",
        )
    if chosen.other is None:
        both = [value for value in left if value in targets and not chosen.is_binary]
        if both:
            raise PictureError(
                f"mask {path} holds the value {both[0]}, and another value is mapped to class {both[0]} too.",
                "every value that becomes this class, named",
                command("--mask-map", f"{both[0]}={both[0]}"),
                kind="mask value that another is mapped to",
            )
        if left and max(left) > 255:
            raise PictureError(
                f"mask {path} holds the value {max(left)}.",
                "classes from 0 to 255, or a map",
                command("--mask-map", _map_of_large(left, chosen)),
                kind=LARGE_VALUES,
            )
    table = np.arange(65536, dtype=np.int64)
    if chosen.other is not None:
        table[:] = chosen.other
    for low, high, number in chosen.values:
        table[low : high + 1] = number
    return table.astype(np.uint8)[values]


def _map_of_large(left: Sequence[int], chosen: MaskMap) -> str:
    """Return the map with an entry for each value above 255 that has none; for each thousand where there are many."""
    large = [value for value in left if value > 255]
    width = 1 if len(large) <= _MOST_ENTRIES else 1000
    used = {value for value in left if value <= 255} | {number for _, _, number in chosen.values}
    free = (number for number in range(1, 255) if number not in used)
    firsts = dict.fromkeys(value // width * width for value in large)
    added = ((first, first + width - 1, n) for first, n in zip(firsts, free, strict=False))
    return ",".join(
        f"{low}={number}" if low == high else f"{low}-{high}={number}"
        for low, high, number in (*chosen.values, *added)
    )


def _by_colour(values: Array, path: Path, chosen: MaskMap) -> Array:
    codes = _codes(values)
    colours, classes = np.array(sorted(chosen.colours), dtype=np.uint32).T
    at = np.searchsorted(colours, codes).clip(max=len(colours) - 1)
    known = colours[at] == codes
    if chosen.other is None and not known.all():
        strange, counts = np.unique(codes[~known], return_counts=True)
        worst = int(strange[counts.argmax()])
        raise PictureError(
            f"mask {path} has the colour #{worst:06x} ({int(counts.max()):,} pixels; "
            f"{len(strange)} such colours), which the table does not name.",
            "colours of the table, or other=CLASS",
            f"--mask-map other={IGNORE}",
            kind="colour that the table does not name",
        )
    return np.where(known, classes.astype(np.uint8)[at], np.uint8(chosen.other or 0))


def _codes(values: Array) -> Array:
    wide = values.astype(np.uint32)
    return np.asarray(wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2])


def _colours_without_table(values: Array, path: Path) -> PictureError:
    colours, counts = np.unique(_codes(values), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    listed = ", ".join(f"#{int(colours[n]):06x}" for n in order[:6])
    # Other masks may have further colours; `other` takes them, so that the command works as it is.
    named = [f"#{int(colours[n]):06x}={place}" for place, n in enumerate(order[:_MOST_COLOURS])]
    entries = ",".join([*named, f"other={IGNORE}"])
    return PictureError(
        f"mask {path} has {len(colours)} colours, and nothing says which class each is: {listed}.",
        "--mask-colors FILE (r, g, b and a name a line), or --mask-map with colours",
        command("--mask-map", entries),
        kind=COLOURS,
    )


def map_of_all(masks: Iterable[Path], chosen: MaskMap | None) -> str | None:
    """Return the map that names the colours, or else the values above 255, of all these masks; None if there are none.

    One mask rarely has all colours: those that a map of its own left out would be `other`, and count nowhere.
    """
    colours: Counter[str] = Counter()
    values: set[int] = set()
    for path in masks:
        try:
            image = decode(path).image
        except SourceError:
            continue
        if image.mode in ("RGB", "RGBA", "P"):
            for count, (red, green, blue) in image.convert("RGB").getcolors(_MANY) or ():
                colours[f"#{red:02x}{green:02x}{blue:02x}"] += count
        elif image.mode in ("L", "I", "I;16", "I;16B"):
            found = np.asarray(image).ravel()
            if found.min(initial=0) >= 0 and found.max(initial=0) < 65536:
                values.update(np.flatnonzero(np.bincount(found)).tolist())
    if colours:
        named = [f"{code}={n}" for n, (code, _) in enumerate(colours.most_common(_MOST_COLOURS))]
        return command("--mask-map", ",".join([*named, f"other={IGNORE}"]))
    chosen = chosen or MaskMap()
    named_values = {value for low, high, _ in chosen.values for value in range(low, high + 1)}
    left = sorted(values - named_values)
    return command("--mask-map", _map_of_large(left, chosen)) if left and left[-1] > 255 else None


class ContradictionError(SourceError):
    """A mask that contradicts what was detected about all masks: it ends the pack."""


# -- all masks -------------------------------------------------------------------------------------


def find_map(masks: Iterable[tuple[Path, ...]]) -> MaskMap | None:
    """Return `BINARY` if the masks, given in the order to look at them, hold 0 and 255 only; else None.

    The search ends after 16 masks that are not empty, or at the first mask with another value.
    """
    seen = 0
    for paths in masks:
        for path in paths:
            try:
                decoded = decode(path)
                values = np.asarray(decoded.image)
            except SourceError:
                continue  # refused when its part is built
            if decoded.format in ("JPEG", "MPO"):
                continue
            if values.ndim == 3:
                if not (values == values[..., :1])[..., :3].all():
                    return None
                values = values[..., 0]
            if values.dtype != np.uint8:
                return None
            present = np.flatnonzero(np.bincount(values.ravel(), minlength=256)).tolist()
            if set(present) - {0, 255}:
                return None
            seen += 255 in present
        if seen >= _LOOK_AT:
            break
    return BINARY if seen else None


def check_values(pixels: Mapping[int, int]) -> None:
    """Refuse mask values that are more likely grey levels than classes; `pixels` counts them in the whole store.

    Raises:
        SourceError: There are few values far apart, such as 0, 128 and 255; or more than 200.
    """
    values = sorted(pixels)
    inner = [value for value in values if value != IGNORE]
    if len(inner) > _MANY:
        raise SourceError(
            f"the masks hold {len(inner)} different values: these look like pictures, or like numbers of objects.",
            "masks whose values are classes; or --mask-map, which says what each value is: keep takes them as classes",
            "exchange --images and --masks, or --mask-map keep",
        )
    nothing_left = inner in ([], [0]) and IGNORE in values
    if nothing_left or (max(inner, default=0) > _SPREAD and len(inner) <= _FEW):
        entries = ",".join(f"{value}={number}" for number, value in enumerate(values))
        raise SourceError(
            f"the masks hold the values {', '.join(map(str, values))}: these look like grey levels, not classes.",
            "--mask-map, which says what each value is; keep takes them as classes (255 counts nowhere)",
            f"{command('--mask-map', entries)}, or --mask-map keep",
        )
