"""One picture file as 8-bit pixels, by a rule that does not depend on the picture.

Enters: a path, the channels wanted, perhaps a range of values. Leaves: a `Decoded`: pixels, upright as the EXIF says,
with the sizes before and after. Costs: one decode; memory for the picture, compared with what is free before.

The rule, by the type of the file's values:

    8 bits                 unchanged
    1 bit                  0 and 255
    palette                the colours of the palette
    grey for RGB           three equal channels; RGB for grey: 0.299 R + 0.587 G + 0.114 B
    transparency           laid over white
    CMYK, YCbCr            converted without a colour profile
    16 bits                0 to 65535 becomes 0 to 255, or LOW to HIGH of `--range`
    float                  0 to 1 becomes 0 to 255, or LOW to HIGH; values outside 0 to 1 are refused without `--range`
    32-bit whole numbers   LOW to HIGH; refused without `--range`
    Lab, several frames    refused (`--first-frame` takes the first of several)

With `--range`, values beyond it become 0 or 255. A scale that followed each picture's own darkest and brightest value
would make pictures incomparable, so there is none.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stoker import bounds
from stoker.display import command, printable
from stoker.errors import MissingExtraError, SourceError, special_kind
from stoker.store.fields import Array

_PIXEL_BYTES = 12  # as decoded, turned upright, and converted: up to four bytes each
_HEAD_BYTES = 1 << 17
"""Bytes to read of a file that Pillow does not open: a JPEG may have 64 kB of EXIF data before its frame."""
_HEIC = (b"hei", b"hev", b"mif", b"msf")
"""First letters of the kinds of HEIC files, as phones write them."""
_HEADER = "whose header is damaged or unknown to Pillow"
ORIENTATION = 0x0112
_BITS_PER_SAMPLE = 258  # tag of a TIFF
_SIGN = 339  # another, for the format of its samples
_TRANSPOSES = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
"""EXIF orientation to Pillow's name of the transpose that turns such a picture upright."""
_TIFF_HEADS = {b"MM\0*", b"II*\0", b"MM*\0", b"II\0*", b"MM\0+", b"II+\0"}
"""First bytes of EXIF data that Pillow accepts."""
_KINDS = {
    "I;16": "16-bit", "I;16L": "16-bit", "I;16B": "16-bit", "I;16N": "16-bit", "F": "float", "P": "palette",
    "1": "1-bit", "CMYK": "CMYK",
}  # fmt: skip
_ANIMATED = {"GIF", "TIFF", "WEBP", "PNG"}
"""Formats whose files may hold several frames. An MPO of a phone holds a photo, which comes first, and its previews."""
_FAULTS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    RecursionError,
    struct.error,
    # What Pillow's Python parts raise on a damaged header.
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    NotImplementedError,
)


class PictureError(SourceError):
    """A picture or mask that is refused."""

    def __init__(
        self,
        given: str,
        allowed: str = "an intact image",
        fix: str = "",
        details: Sequence[str] = (),
        kind: str = "cannot be decoded",
        path: Path | None = None,
    ) -> None:
        super().__init__(given if path is None else f"{path} {given}", allowed, fix, details)
        self.kind = kind  # kind of reason under which it is counted
        # the fault, without the path if that was given as `path`
        self.reason = given

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the parts, so that the error survives a worker process."""
        return type(self), (self.given, self.allowed, self.fix, self.details, self.kind)


@dataclass(frozen=True)
class Decoded:
    """One picture."""

    image: Any  # Pillow's image, upright; not converted yet; smaller where only that was asked for
    stored_size: tuple[int, int]  # (width, height) in the file, not turned
    orientation: int  # EXIF orientation, 1 to 8; 1 where the file has none
    has_orientation: bool  # whether the file has the tag
    format: str  # Pillow's name of the file format
    # the file has 16 bits for each of several channels, of which Pillow returns the upper 8
    is_deep_colour: bool
    # the file has EXIF data that cannot be read: which way is up is not known
    has_damaged_exif: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """(width, height), upright."""
        width, height = self.stored_size
        return (width, height) if self.orientation < 5 else (height, width)

    @property
    def kind(self) -> str:
        """Type of the file's values: "8-bit", "16-bit", "float", "32-bit", "palette", "CMYK", ..."""
        mode = self.image.mode
        if mode == "I":  # Pillow's mode for 16-bit PGM and PNG
            return "16-bit" if self.format in ("PPM", "PNG") else "32-bit"
        if self.is_deep_colour:
            return "16-bit colour"
        if _is_transparent(self.image) and _KINDS.get(mode) not in ("16-bit", "float"):
            return "transparent"
        return _KINDS.get(mode, "8-bit")


class Pixels(NamedTuple):
    """Pixels as they are stored."""

    values: Array  # `(height, width, channels)` uint8
    # smallest and largest value of the file, where it was scaled; else None
    span: tuple[float, float] | None = None


def pillow() -> Any:
    """Return `PIL.Image`, or say what to install."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError.for_package("pillow", "vision", "decoding images") from None
    return Image


class _Here(threading.local):
    is_unwarned = False


_here = _Here()


class _InThisThread(type):
    def __subclasscheck__(cls, other: type) -> bool:
        return _here.is_unwarned


class _Unwarned(Warning, metaclass=_InThisThread):
    """Category of a filter: every warning within `unwarned`, and no other."""


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Context in which this thread's warnings are dropped: those of Pillow, of large pictures and damaged tags.

    `warnings.catch_warnings` exchanges the filters of the process. Of threads that enter and leave it in turn the last
    one puts back those of another: from then on every warning of the script is dropped.
    """
    filters = warnings.filters
    if not filters or filters[0][2] is not _Unwarned:
        warnings.simplefilter("ignore", _Unwarned)
    before, _here.is_unwarned = _here.is_unwarned, True
    try:
        yield
    finally:
        _here.is_unwarned = before


def open_picture(path: Path, data: bytes | None = None) -> Any:
    """Open a picture, or its `data` if it was read already, without decoding; limits of size and memory apply."""
    image = pillow()
    if data is None and (kind := special_kind(path)):
        raise PictureError(f"is {kind}.", path=path)
    try:
        # Pillow warns from 89 megapixels on and refuses from 179: ours is one limit, by name. It also warns of
        # damaged tags; pixels that cannot be read are an error.
        with unwarned():
            opened = image.open(path if data is None else io.BytesIO(data))
    except image.DecompressionBombError as error:
        claimed = re.search(r"\((\d+) pixels\)", str(error))
        raise _too_large(path, int(claimed[1]) if claimed else None) from error
    except _FAULTS as error:
        head = _head(path, data)
        if head[4:8] == b"ftyp" and head[8:11] in _HEIC:
            raise PictureError(
                "is HEIC, which Pillow does not read.",
                "JPEG, PNG, WebP or AVIF",
                "heif-convert OLD.heic NEW.jpg for each, or an export as JPEG",
                path=path,
                kind="HEIC",
            ) from error
        raise PictureError(not_opened(error, head), path=path) from error
    pixels = opened.width * opened.height
    try:
        if pixels > bounds.PIXELS.most:
            raise _too_large(path, pixels)
        what = f"decoding {path} ({pixels:,} pixels)"
        bounds.require_memory(_PIXEL_BYTES * pixels, what, "a smaller picture in its place")
    except SourceError:
        opened.close()
        raise
    return opened


def _head(path: Path, data: bytes | None) -> bytes:
    if data is not None:
        return data
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def not_opened(error: Exception, head: bytes = b"") -> str:
    """Return why Pillow did not open a file, without the memory address in Pillow's message.

    Args:
        error: Pillow's error.
        head: First bytes of the file; they tell the kind of a file that Pillow does not know.
    """
    is_unknown = isinstance(error, pillow().UnidentifiedImageError)
    return f"cannot be opened as an image: {_unknown_kind(head) if is_unknown else error}."


def _unknown_kind(head: bytes) -> str:
    """Return the kind of a file that Pillow does not open, by its first bytes."""
    if head.startswith(b"\xff\xd8"):
        _, bits = jpeg_frame(head) or (0, 8)
        return f"a JPEG of {bits} bits a channel" if bits != 8 else f"a JPEG {_HEADER}"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return f"a PNG {_HEADER}"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return f"a WebP {_HEADER}"
    if head[4:8] == b"ftyp":  # AVIF and videos
        return f"a file of kind {printable(head[8:12].decode('latin-1').strip())!r}"
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return "a web page"
    return "of no known kind"


def jpeg_frame(data: bytes) -> tuple[int, int] | None:
    """Return the marker of a JPEG's frame, 0xC0 to 0xCF, and its bits a channel; None where none is found."""
    at = 2
    while at + 5 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # tables, and one unused
            return marker, data[at + 4]
        # A byte 0xFF may fill the space before a marker.
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _too_large(path: Path, pixels: int | None) -> SourceError:
    claimed = "too many" if pixels is None else f"{pixels:,}"
    return SourceError(
        f"{path} claims {claimed} pixels, and at most {bounds.PIXELS.most:,} are decoded.",
        bounds.PIXELS.allowed,
        "a smaller picture in its place",
    )


def decode(
    path: Path,  # the file
    # take the first frame of a file that holds several, instead of refusing it
    first_frame: bool = False,
    data: bytes | None = None,  # bytes of the file, if they were read already
    *,
    upright: bool = True,  # False returns the picture as in the file, not turned
    # decode JPEG at an eighth of its size: all bytes are read and most of the arithmetic is left out, to check only
    # whether it is intact. 1.7 times as fast.
    small: bool = False,
) -> Decoded:
    """Decode one file and turn it upright."""
    with open_picture(path, data) as opened, unwarned():
        try:
            frames = int(getattr(opened, "n_frames", 1)) if opened.format in _ANIMATED else 1
            if frames > 1 and not first_frame:
                raise PictureError(
                    f"holds {frames} frames.",
                    "one picture a file, or the first frame of each",
                    "--first-frame",
                    path=path,
                    kind="several frames in one file",
                )
            size = opened.size
            # Before `load`, and `getexif` of PNG, which empty the list of tiles: only the file knows of its 16 bits.
            deep = len(opened.getbands()) > 1 and any(map(_has_16_bits, opened.tile))
            if opened.format == "TIFF" and not deep and _has_misread_planes(opened):
                raise PictureError(
                    "is a TIFF of 16 bits with a plane for each colour, which Pillow misreads.",
                    "the colours of a pixel side by side",
                    "tiffcp -p contig OLD NEW",
                    path=path,
                    kind="16-bit TIFF with a plane for each colour",
                )
            if opened.format == "PNG":
                opened.load()  # else `getexif` does, and pixel faults count as EXIF faults
            said, has_damaged_exif = _read_orientation(opened)
            has_orientation, orientation = said is not None, said or 1
            if orientation > 1 and opened.format == "TIFF" and data is None:
                # Pillow reads plain TIFF files of this kind by a memory map of the wrong width; bytes it does not.
                return decode(path, first_frame, path.read_bytes(), upright=upright, small=small)
            if opened.format == "TIFF" and opened.mode == "L" and opened.tag_v2.get(_SIGN) == (2,):
                raise PictureError(
                    "holds signed values of 8 bits, which would be read as others.",
                    "values from 0 to 255, or 16 bits",
                    path=path,
                    kind="signed values of 8 bits",
                )
            if small and opened.format in ("JPEG", "MPO"):
                opened.draft(None, (max(1, opened.width // 8), max(1, opened.height // 8)))
            opened.load()
            known = orientation if 1 <= orientation <= 8 else 1
            if has_orientation and ORIENTATION not in opened.getexif():  # `load` turns TIFF itself
                image = opened.copy()
                size = image.size if known < 5 else image.size[::-1]
            else:
                image = turned(opened, known) if upright else opened
            if image is opened:
                image = opened.copy()
            return Decoded(
                image, size, known, has_orientation, opened.format or "", deep, has_damaged_exif
            )
        except _FAULTS as error:
            if isinstance(error, SourceError):
                raise
            raise PictureError(f"cannot be decoded: {error}.", path=path) from error


def _read_orientation(opened: Any) -> tuple[int | None, bool]:
    """Return the EXIF orientation of the file, None if it has none, and whether its EXIF data is damaged.

    Damaged data gives no orientation, as in viewers. Depending on the file, Pillow raises for it or returns none.
    """
    given = opened.info.get("exif")
    if isinstance(given, bytes) and given:
        while given.startswith(b"Exif\0\0"):  # some phones write it twice
            given = given[6:]
        if given[:4] not in _TIFF_HEADS:
            return None, True
    try:
        said = opened.getexif().get(ORIENTATION)
        return None if said is None else int(said), False
    except _FAULTS:
        return None, True


def _has_16_bits(tile: Any) -> bool:
    """Return whether a tile's raw mode, such as "RGB;16B", has 16 bits a channel."""
    given = tile[3]
    raw = given[0] if isinstance(given, tuple) and given else given
    return isinstance(raw, str) and raw.partition(";")[2][:2] == "16"


def _has_misread_planes(opened: Any) -> bool:
    """Return whether Pillow 13 takes each 16-bit value of a colour TIFF for two pixels, which gives noise."""
    bits = opened.tag_v2.get(_BITS_PER_SAMPLE, 1)
    return len(opened.getbands()) > 1 and bool(np.max(bits) > 8)


def turned(image: Any, orientation: int) -> Any:
    """Return the image as a viewer that reads the EXIF orientation shows it."""
    way = _TRANSPOSES.get(orientation)
    return image if way is None else image.transpose(pillow().Transpose[way])


def to_pixels(
    decoded: Decoded,
    path: Path,
    size: tuple[int, int],
    channels: int,
    value_range: tuple[float, float] | None = None,
) -> Pixels:
    """Convert, scale and resize one picture to (height, width), with 1 channel for grey or 3 for RGB.

    `value_range` is LOW and HIGH of 16-bit, 32-bit and float pictures; None takes the type's own.
    """
    image, kind, span = decoded.image, decoded.kind, None
    try:
        if kind in ("16-bit", "32-bit", "float"):
            image, span = _scaled(image, kind, path, value_range)
        elif kind == "16-bit colour" and value_range is not None:
            raise PictureError(
                "has colours of 16 bits a channel, of which the upper 8 are read: --range does not fit.",
                "grey pictures with --range",
                "leave --range out",
                path=path,
                kind="16-bit colour with --range",
            )
        elif image.mode == "LAB":
            raise PictureError(
                "is in Lab colours.", "RGB, grey, palette or CMYK", path=path, kind="Lab colours"
            )
        image = converted(image, channels)
        if image.size != (size[1], size[0]):
            # reducing_gap stays off: it trades exactness for speed, and this runs once.
            image = image.resize((size[1], size[0]), pillow().Resampling.BILINEAR)
    except _FAULTS as error:
        if isinstance(error, SourceError):
            raise
        raise PictureError(f"cannot be converted: {error}.", path=path) from error
    return Pixels(np.asarray(image, dtype=np.uint8).reshape(*size, channels), span)


def _is_transparent(image: Any) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _scaled(
    image: Any, kind: str, path: Path, value_range: tuple[float, float] | None
) -> tuple[Any, tuple[float, float]]:
    """Scale 16-bit, 32-bit and float values to 0 to 255 by the rule of this module."""
    values: Array = np.asarray(image).astype(np.float64 if kind == "32-bit" else np.float32)
    low, high = float(values.min()), float(values.max())
    if not np.isfinite(low) or not np.isfinite(high):
        raise PictureError(
            "holds values that are not finite.",
            "finite values",
            path=path,
            kind="values that are not finite",
        )
    bottom, top = value_range or {"16-bit": (0.0, 65535.0), "float": (0.0, 1.0)}.get(
        kind, (0.0, 0.0)
    )
    if value_range is None and kind != "16-bit" and (kind == "32-bit" or low < 0 or high > 1):
        raise _no_range(path, kind, low, high)
    scaled = np.clip((values - bottom) * (255.0 / (top - bottom)), 0, 255)
    if isinstance(clear := image.info.get("transparency"), int):  # one value, laid over white
        scaled[values == clear] = 255
    return pillow().fromarray(np.rint(scaled).astype(np.uint8)), (low, high)


def _no_range(path: Path, kind: str, low: float, high: float) -> PictureError:
    allowed = "0 to 1 for float pictures" if kind == "float" else "a range that is given"
    return PictureError(
        f"holds {kind} values from {low:g} to {high:g}.",
        f"{allowed}, or --range LOW,HIGH",
        command("--range", f"{min(0.0, low):g},{max(high, low + 1):g}"),
        path=path,
        kind=f"{kind} values without --range",
    )


def check_ranges(paths: Iterable[Path]) -> None:
    """Check some pictures before all are decoded: float and 32-bit values need a range that fits all of them.

    Raises:
        PictureError: Values that no rule brings to 8 bits; the advised range covers the pictures that were checked.
    """
    worst: tuple[Path, str] | None = None
    lows, highs = [], []
    for path in paths:
        try:
            with open_picture(path) as opened:
                if opened.mode not in ("F", "I") or opened.format in ("PPM", "PNG"):
                    continue
                low, high = (float(value) for value in opened.getextrema())
                kind = "float" if opened.mode == "F" else "32-bit"
        except (SourceError, *_FAULTS):
            continue  # refused when its part is built
        if not np.isfinite(low) or not np.isfinite(high):
            continue
        lows.append(low)
        highs.append(high)
        if kind == "32-bit" or low < 0 or high > 1:
            worst = worst or (path, kind)
    if worst is not None:
        raise _no_range(*worst, min(lows), max(highs))


def converted(image: Any, channels: int) -> Any:
    """Return Pillow's image with 1 or 3 channels of 8 bits; a transparent one on white."""
    wanted = "RGB" if channels == 3 else "L"
    if _is_transparent(image):
        image = image.convert("RGBA")
        if image.getextrema()[3] != (255, 255):
            page = pillow().new("RGBA", image.size, "white")
            page.alpha_composite(image)
            image = page
    if image.mode == "P":  # direct conversion to grey would use the palette's index for some files
        image = image.convert("RGB")
    return image if image.mode == wanted else image.convert(wanted)
