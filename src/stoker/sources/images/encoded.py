"""Pictures as encoded files: the bytes of JPEG, PNG and WebP, checked by one decode.

Enters: a path, and the largest side and quality to encode again with, where these are asked for. Leaves: an `Encoded`:
bytes, size, orientation; and the way back, `decode_bytes`. Costs: one read and one decode for each file; encoding again
costs about as much as decoding. If no file is encoded again, JPEG is decoded at an eighth of its size.

Only what every decoder of the loader reads is kept unchanged: baseline JPEG of one or three channels, and PNG and WebP
of 8 bits. Progressive and CMYK JPEG, 16-bit RGB and other formats are refused by name, or written anew as JPEG when a
quality is given. Damaged pictures, grey values of 16 bits or more and floats are refused either way. A picture that is
made smaller stays lossless if its file was, unless a quality is given.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker import bounds
from stoker.display import quoted
from stoker.errors import InputError, special_kind
from stoker.sources.images.decoding import (
    Decoded,
    PictureError,
    converted,
    decode,
    jpeg_frame,
    pillow,
)
from stoker.store.fields import Array, Dense, FieldData, Ragged, offsets_of

DEFAULT_QUALITY = 90
_ENDINGS = {"JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"), "PNG": (".png",), "WEBP": (".webp",)}
_PNG_COMPRESSION = 6
_FRAMES_KEPT = (0xC0, 0xC1)
"""Markers of the frame of JPEG with Huffman coding: baseline, and the same with more tables."""


@dataclass(frozen=True)
class KeepEncoded:
    """How pictures are kept as the bytes of their files.

    Attributes:
        max_side: Larger pictures are made smaller, so that their longer side is this; None keeps all sizes.
        quality: Of JPEG that is written anew, 1 to 100. None writes pictures anew only where `max_side` needs it: as
            JPEG those that were JPEG or lossy WebP, as PNG all others.
    """

    max_side: int | None = None
    quality: int | None = None

    def __post_init__(self) -> None:
        if self.max_side is not None and not 1 <= self.max_side <= 16384:
            raise InputError(
                f"--max-side is {self.max_side}.", "1 to 16384 pixels", "--max-side 256"
            )
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise InputError(f"--quality is {self.quality}.", "1 to 100", "--quality 90")


@dataclass(frozen=True)
class Encoded:
    """One picture: the bytes of a JPEG, PNG or WebP file, its upright (height, width), its EXIF orientation."""

    data: bytes
    size: tuple[int, int]
    orientation: int
    is_new: bool = False


def read_encoded(
    path: Path, channels: int, keep: KeepEncoded, first_frame: bool
) -> tuple[Encoded, Decoded]:
    """Read one file, decode it once, and return its bytes, or those of a smaller or plainer JPEG; and the picture.

    Raises:
        PictureError: It is damaged, or of a kind that is refused.
    """
    if kind := special_kind(path):
        raise PictureError(f"is {kind}.", path=path)
    try:
        size = path.stat().st_size
        bounds.RECORD.check(size, str(path), "a smaller picture in its place", PictureError)
        data = path.read_bytes()
    except OSError as error:
        raise PictureError(f"cannot be read: {error.strerror}.", path=path) from error
    if not data:
        raise PictureError("holds no bytes.", path=path, kind="empty file")
    # The pixels are needed only to encode again. Only the usual two kinds of JPEG are decoded smaller.
    frame = jpeg_frame(data) if data.startswith(b"\xff\xd8") else None
    is_small = keep.max_side is None and keep.quality is None
    is_usual = frame is not None and frame[0] in _FRAMES_KEPT
    decoded = decode(path, first_frame, data, small=is_small and is_usual)
    form = "JPEG" if decoded.format == "MPO" else decoded.format
    ending = path.suffix.lower()
    if ending not in _ENDINGS.get(form, (ending,)):
        raise PictureError(
            f"is {form}, not what its ending {ending!r} says.",
            "an ending that fits the content",
            path=path,
            kind="wrong ending",
        )
    if form == "JPEG" and data.rfind(b"\xff\xd9") < 0:
        raise PictureError("ends in the middle of the picture.", path=path, kind="truncated")
    width, height = decoded.size
    if decoded.kind in ("16-bit", "32-bit", "float"):
        raise PictureError(
            f"holds {decoded.kind} values.",
            "8 bits a channel with --keep-encoded",
            "leave --keep-encoded out",
            path=path,
            kind=f"{decoded.kind} values",
        )
    plain = _why_not_kept(decoded, form, frame)
    too_large = keep.max_side is not None and max(width, height) > keep.max_side
    if plain and keep.quality is None and not too_large:
        raise PictureError(
            f"is {plain}, which --keep-encoded does not keep.",
            "baseline JPEG; PNG and WebP of 8 bits",
            f"--quality {quoted(DEFAULT_QUALITY)}",
            path=path,
            kind=plain,
        )
    if not plain and not too_large:
        return Encoded(data, (height, width), decoded.orientation), decoded
    image = converted(decoded.image, channels)
    if keep.max_side is not None and too_large:
        scale = keep.max_side / max(width, height)
        smaller = (max(1, round(width * scale)), max(1, round(height * scale)))
        image = image.resize(smaller, pillow().Resampling.BICUBIC)
    file = io.BytesIO()
    is_lossy = form == "JPEG" or (form == "WEBP" and b"VP8L" not in data)
    if keep.quality is None and not is_lossy:
        image.save(file, "PNG", compress_level=_PNG_COMPRESSION)
    else:
        image.save(file, "JPEG", quality=keep.quality or DEFAULT_QUALITY)
    return Encoded(file.getvalue(), (image.height, image.width), 1, is_new=True), decoded


def _why_not_kept(decoded: Decoded, form: str, frame: tuple[int, int] | None) -> str:
    """Return the kind of a picture that not every decoder reads; "" for one that is kept."""
    if form not in _ENDINGS:
        return form or "an unknown format"
    if decoded.kind in ("16-bit colour", "CMYK"):
        return f"{decoded.kind} {form}"
    if form == "JPEG" and decoded.image.info.get("progressive"):
        return "progressive JPEG"
    if form == "JPEG" and frame is not None and frame[0] not in _FRAMES_KEPT:
        # Pillow decodes them, and no GPU does.
        return "arithmetic-coded JPEG" if frame[0] > 0xC8 else "lossless JPEG"
    return ""


def decode_bytes(data: Any, channels: int) -> Array:
    """Return `(channels, height, width)` uint8 of the bytes of one picture as in the file (not turned).

    Raises:
        PictureError: The bytes are no intact picture.
    """
    image = decode(Path("picture"), True, bytes(data), upright=False).image
    return np.ascontiguousarray(
        np.asarray(converted(image, channels), dtype=np.uint8)
        .reshape(image.height, image.width, channels)
        .transpose(2, 0, 1)
    )


def turned_pixels(pixels: Array, orientation: int) -> Array:
    """Return `(channels, height, width)` pixels as a viewer that reads the EXIF orientation shows them."""
    if orientation >= 5:
        pixels = pixels.swapaxes(-1, -2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[..., ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[..., ::-1, :]
    return np.ascontiguousarray(pixels)


def encode_mask(mask: Array) -> bytes:
    """Return a mask as PNG, which loses nothing."""
    file = io.BytesIO()
    pillow().fromarray(mask).save(file, "PNG", compress_level=_PNG_COMPRESSION)
    return file.getvalue()


def picture_field(pictures: list[bytes]) -> Ragged:
    """Return the bytes of pictures as a field."""
    lengths = np.fromiter(map(len, pictures), dtype=np.int64, count=len(pictures))
    values = np.frombuffer(b"".join(pictures), dtype=np.uint8)
    return Ragged(values, offsets_of(lengths), "picture")


def encoded_fields(pictures: list[Encoded]) -> dict[str, FieldData]:
    """Return the bytes, sizes and orientations of the pictures of one part."""
    sizes = np.array([picture.size for picture in pictures], dtype=np.int32).reshape(-1, 2)
    turns = np.array([picture.orientation for picture in pictures], dtype=np.uint8)
    return {
        "images": picture_field([picture.data for picture in pictures]),
        "image_size": Dense(sizes),
        "image_orientation": Dense(turns),
    }


def encoded_facts(pictures: list[Encoded]) -> dict[str, Any]:
    """Return the facts of one part that `merge_encoded` adds up: bytes, pixels, smallest and largest size."""
    sizes = np.array([picture.size for picture in pictures], dtype=np.int64).reshape(-1, 2)
    return {
        "bytes": sum(len(picture.data) for picture in pictures),
        "pixels": int(sizes.prod(axis=1).sum()),
        "smallest": sizes.min(axis=0, initial=1 << 20).tolist(),
        "largest": sizes.max(axis=0, initial=0).tolist(),
        "encoded_anew": sum(picture.is_new for picture in pictures),
    }


def merge_encoded(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up `encoded_facts` of all parts, for the manifest's attribute `encoded`."""
    return {
        **{name: sum(part[name] for part in facts) for name in ("bytes", "pixels", "encoded_anew")},
        "smallest": np.min([part["smallest"] for part in facts], axis=0).tolist() if facts else [],
        "largest": np.max([part["largest"] for part in facts], axis=0).tolist() if facts else [],
    }
