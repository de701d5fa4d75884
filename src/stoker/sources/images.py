"""`stoker pack images` and `stoker pack segmentation`: decode and resize once, store uint8.

Enters: class folders of images, or a folder of images and one of masks with the same names.
Leaves: `images` (n, channels, height, width) uint8, `labels` (class number) or `masks`
(n, height, width) uint8, and `name`. Costs: one decode per file, ever; one part of images in
memory per worker.

Images are resized with area-weighted bilinear filtering, masks by nearest, so a mask holds only
the values it had. Float images would carry four times the bytes and nothing more.
"""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from stoker import bounds
from stoker.display import command, look_in
from stoker.errors import InputError, MissingExtraError, Refusal, SourceError
from stoker.sources.contract import Json, Part, PartContext, PartData, Preparation
from stoker.store.fields import Array, Dense, FieldData, Ragged

_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
_PART_BYTES = 64 << 20
_PIXEL_BYTES = 12
"""As decoded, turned upright, and converted: up to four bytes each."""


@dataclass(frozen=True)
class _Folder:
    """What both kinds of image source share.

    Attributes:
        size: Stored (height, width).
        channels: 3 for RGB, 1 for grey.
    """

    size: tuple[int, int]
    channels: Literal[1, 3] = 3

    version: ClassVar[int] = 1
    row_limit_seconds: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        if min(self.size) < 1 or max(self.size) > 16384:
            raise InputError(
                f"the image size is {self.size}.", "1 to 16384 pixels a side", "--size 512x512"
            )
        if self.channels not in (1, 3):
            raise InputError(f"{self.channels} channels.", "1 (grey) or 3 (RGB)", "--channels 3")

    def _parts(self, items: Sequence[Any], folder: Path, extra_bytes: int) -> Preparation:
        if not items:
            raise SourceError(
                f"{folder} holds no images.",
                f"files ending in {', '.join(sorted(_ENDINGS))}",
                command("ls", folder),
            )
        image_bytes = self.size[0] * self.size[1] * (self.channels + extra_bytes)
        per_part = max(1, _PART_BYTES // image_bytes)
        parts = [
            Part(number, f"{folder} images {start}-{start + len(batch)}", len(batch), batch)
            for number, start in enumerate(range(0, len(items), per_part))
            if (batch := items[start : start + per_part])
        ]
        return Preparation(parts, len(items) * (image_bytes + 64) + (1 << 20))

    def _image(self, path: Path) -> Array:
        """Return one image as (channels, height, width) uint8."""
        decoded = _decode(path, "RGB" if self.channels == 3 else "L")
        if decoded.size != (self.size[1], self.size[0]):
            # reducing_gap stays off: it trades exactness for speed, and this runs once.
            decoded = decoded.resize((self.size[1], self.size[0]), _pillow().Resampling.BILINEAR)
        pixels = np.asarray(decoded, dtype=np.uint8).reshape(*self.size, self.channels)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Record the class names or the mask's values."""
        merged: dict[str, Json] = {"size": list(self.size), "channels": self.channels}
        if extras and "classes" in extras[0]:
            merged["classes"] = extras[0]["classes"]
        if extras and "mask_values" in extras[0]:
            merged["mask_values"] = sorted(
                {value for extra in extras for value in extra["mask_values"]}
            )
        return merged


@dataclass(frozen=True)
class ImagesSource(_Folder):
    """Class folders: `folder/<class>/<image>`.

    Attributes:
        folder: Their parent.
    """

    folder: Path = Path()
    kind: ClassVar[str] = "images"

    def files(self) -> Sequence[Path]:
        """The folder."""
        return [self.folder]

    def options(self) -> Mapping[str, Json]:
        """Everything that changes the store."""
        return {"size": list(self.size), "channels": self.channels}

    def prepare(self, scratch: Path) -> Preparation:
        """List the classes and their images."""
        del scratch
        classes = sorted(child.name for child in _listed(self.folder) if child.is_dir())
        if not classes:
            raise SourceError(
                f"{self.folder} has no class folders.",
                "folder/<class>/<image>",
                command("ls", self.folder),
            )
        items = [
            (str(image), number, classes)
            for number, name in enumerate(classes)
            for image in _images(self.folder / name)
        ]
        return self._parts(items, self.folder, 0)

    def build(self, part: Part, context: PartContext) -> PartData:
        """Decode one part; what cannot be decoded is refused."""
        del context
        images, labels, names, refused = [], [], [], []
        for path_text, label, _ in part.payload:
            try:
                images.append(self._image(Path(path_text)))
            except SourceError as error:
                refused.append(Refusal(path_text, None, error.given))
                continue
            labels.append(label)
            names.append(Path(path_text).name)
        fields: dict[str, FieldData] = {
            "images": Dense(_stack(images, (self.channels, *self.size))),
            "labels": Dense(np.array(labels, dtype=np.int64)),
            "name": Ragged.from_strings(names),
        }
        return PartData(fields, refused, {"classes": part.payload[0][2] if part.payload else []})


@dataclass(frozen=True)
class SegmentationSource(_Folder):
    """Images and masks with the same file names.

    Attributes:
        images: Folder of images.
        masks: Folder of masks: one value per pixel, the class.
    """

    images: Path = Path()
    masks: Path = Path()
    kind: ClassVar[str] = "segmentation"

    def files(self) -> Sequence[Path]:
        """Both folders."""
        return [self.images, self.masks]

    def options(self) -> Mapping[str, Json]:
        """Everything that changes the store."""
        return {"size": list(self.size), "channels": self.channels}

    def prepare(self, scratch: Path) -> Preparation:
        """Pair images and masks by name; what has no partner is refused."""
        del scratch
        images = {path.stem: path for path in _images(self.images)}
        masks = {path.stem: path for path in _images(self.masks)}
        pairs = [
            (str(images[stem]), str(masks[stem])) for stem in sorted(images.keys() & masks.keys())
        ]
        alone = [(images[stem], "mask") for stem in sorted(images.keys() - masks.keys())]
        alone += [(masks[stem], "image") for stem in sorted(masks.keys() - images.keys())]
        preparation = self._parts(pairs, self.images, 1)
        refused = [
            Refusal(str(path), None, f"there is no {other} of this name") for path, other in alone
        ]
        return Preparation(preparation.parts, preparation.estimated_bytes, refused)

    def build(self, part: Part, context: PartContext) -> PartData:
        """Decode one part of pairs; a pair with a fault is refused whole."""
        del context
        images, masks, names, refused = [], [], [], []
        for image_text, mask_text in part.payload:
            try:
                mask = self._mask(Path(mask_text), Path(image_text))
                images.append(self._image(Path(image_text)))
            except SourceError as error:
                refused.append(Refusal(image_text, None, error.given))
                continue
            masks.append(mask)
            names.append(Path(image_text).name)
        fields: dict[str, FieldData] = {
            "images": Dense(_stack(images, (self.channels, *self.size))),
            "masks": Dense(_stack(masks, self.size)),
            "name": Ragged.from_strings(names),
        }
        values = [int(value) for value in np.unique(np.stack(masks))] if masks else []
        return PartData(fields, refused, {"mask_values": values})

    def _mask(self, path: Path, image: Path) -> Array:
        decoded = _decode(path, None)
        if decoded.mode not in ("L", "P", "1", "I;16", "I"):
            raise SourceError(
                f"mask {path} is {decoded.mode}, not one value per pixel.",
                "a grey or palette image",
                "convert it",
            )
        with _open(image) as original:
            if original.size != decoded.size:
                raise SourceError(
                    f"mask {path} is {decoded.size} but its image is {original.size}.",
                    "equal sizes",
                    "",
                )
        values = np.asarray(decoded)
        if values.max(initial=0) > 255:
            raise SourceError(f"mask {path} holds the value {values.max()}.", "0 to 255", "")
        if decoded.size != (self.size[1], self.size[0]):
            resized = (
                _pillow()
                .fromarray(values.astype(np.uint8))
                .resize((self.size[1], self.size[0]), _pillow().Resampling.NEAREST)
            )
            values = np.asarray(resized)
        return values.astype(np.uint8)


def parse_size(text: str) -> tuple[int, int]:
    """Return (height, width) for "512", or "360x480" (height x width)."""
    numbers = text.lower().replace("×", "x").split("x")
    if len(numbers) > 2 or not all(number.strip().isdigit() for number in numbers):
        raise InputError(
            f"cannot read {text!r} as a size.", "HEIGHTxWIDTH, or one number", "--size 512x512"
        )
    height, width = int(numbers[0]), int(numbers[-1])
    return height, width


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError.for_package("pillow", "vision", "decoding images") from None
    return Image


def _open(path: Path) -> Any:
    image = _pillow()
    try:
        with warnings.catch_warnings():
            # Pillow warns from 89 megapixels on and refuses from 179: ours is one limit, by name.
            warnings.simplefilter("ignore", image.DecompressionBombWarning)
            opened = image.open(path)
    except image.DecompressionBombError as error:
        claimed = re.search(r"\((\d+) pixels\)", str(error))
        raise _too_large(path, int(claimed[1]) if claimed else None) from error
    except (OSError, ValueError, SyntaxError, EOFError, RecursionError, struct.error) as error:
        raise SourceError(
            f"{path} cannot be opened as an image: {error}.", "an intact image", ""
        ) from error
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


def _too_large(path: Path, pixels: int | None) -> SourceError:
    claimed = "too many" if pixels is None else f"{pixels:,}"
    return SourceError(
        f"{path} claims {claimed} pixels, and at most {bounds.PIXELS.most:,} are decoded.",
        bounds.PIXELS.allowed,
        "a smaller picture in its place",
    )


def _decode(path: Path, mode: str | None) -> Any:
    """Return a decoded image, upright as its EXIF says, converted to `mode`."""
    from PIL import ImageOps

    with _open(path) as opened:
        try:
            upright = ImageOps.exif_transpose(opened) or opened
            return upright.convert(mode) if mode else upright.copy()
        except (OSError, ValueError, SyntaxError, EOFError, struct.error) as error:
            raise SourceError(
                f"{path} cannot be decoded: {error}.", "an intact image", ""
            ) from error


def _listed(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise SourceError(
            f"{folder} is not a folder.", "an existing folder", look_in(folder.parent)
        )
    return sorted(folder.iterdir())


def _images(folder: Path) -> list[Path]:
    return [path for path in _listed(folder) if path.suffix.lower() in _ENDINGS and path.is_file()]


def _stack(items: Sequence[Array], shape: tuple[int, ...]) -> Array:
    return np.stack(items) if items else np.empty((0, *shape), dtype=np.uint8)
