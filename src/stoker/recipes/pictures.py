"""Code that the picture recipes share: pixels of a store, their statistics, new pictures, thumbnails for pages.

Enters: a store of pixels or of encoded pictures; folders, files, Pillow images, arrays and tensors. Leaves: a store
whose `images` and `masks` are dense uint8 fields of one size (gathering decodes, turns upright and resizes);
statistics; `GivenPictures`, which have a key for each new picture and decode it. Costs one decode for each encoded
picture that is read. Statistics and evaluations read some hundreds; training uses a `Loader` on the store itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch

from stoker.errors import InputError, SourceError
from stoker.packing.samples import png_url
from stoker.recipes.contract import Facts
from stoker.recipes.options import Range
from stoker.recipes.scaling import evenly
from stoker.sources.images.decoding import (
    ORIENTATION,
    Decoded,
    PictureError,
    decode,
    pillow,
    to_pixels,
    turned,
)
from stoker.sources.images.encoded import decode_bytes, turned_pixels
from stoker.sources.images.listing import find_pictures
from stoker.store.fields import Array
from stoker.store.manifest import FieldInfo
from stoker.store.reader import Store
from stoker.train.predict import FILE_COLUMN, ROW_COLUMN
from stoker.units import format_count

Tensor = torch.Tensor
Size = tuple[int, int]
_LOOK_IMAGES = 512
_READ_BYTES = 64 << 20
IMAGE_SIZE = Range(
    "height and width, 1 to 16384",
    lambda size: 1 <= min(size) <= max(size) <= 16384,
    (224, 224),
)


class SizedStore:
    """Wraps a store of encoded pictures so that `images` and `masks` are dense; the rest is passed through."""

    def __init__(self, store: Store, size: Size) -> None:
        self._store, self._size = store, size
        channels = int(store.manifest.attributes["channels"])
        shapes = {"images": [channels, *size], "masks": list(size)}
        self.fields: Mapping[str, FieldInfo] = {
            name: FieldInfo(kind="dense", dtype="|u1", shape=shapes[name])
            if info.encoding == "picture"
            else info
            for name, info in store.fields.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return SizedStore, (self._store, self._size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def gather(self, field: str, samples: Array) -> Array:
        """Return rows of a field; pictures are decoded."""
        if self._store.fields[field].encoding != "picture":
            return self._store.gather(field, samples)
        info = self.fields[field]
        made = np.empty((len(samples), *info.shape), dtype=np.uint8)
        for row, sample in enumerate(np.asarray(samples).tolist()):
            made[row] = self._picture(field, sample)
        return made

    def _picture(self, field: str, sample: int) -> Array:
        way = pillow().Resampling
        if field == "masks":
            mask = decode_bytes(self._store.read_values(field, sample), 1)[0]
            image = pillow().fromarray(mask).resize(self._size[::-1], way.NEAREST)
            return np.asarray(image)
        channels = self.fields[field].shape[0]
        pixels = decode_bytes(self._store.read_values(field, sample), channels)
        orientation = int(self._store.read_rows("image_orientation", sample, sample + 1)[0])
        planes = [
            np.asarray(pillow().fromarray(plane).resize(self._size[::-1], way.BILINEAR))
            for plane in turned_pixels(pixels, orientation)
        ]
        return np.stack(planes)


def sized_store(store: Store, size: Size | None, default: Size) -> Store:
    """Return a store whose pictures can be gathered as pixels of one size.

    Args:
        store: Holds pixels or encoded pictures.
        size: Size that the user asks for; None takes the size that all pictures have, or the default.
        default: Size for encoded pictures of several sizes.
    """
    images = store.fields.get("images")
    if images is None or images.encoding != "picture":
        if size is not None and images is not None and list(images.shape[1:]) != list(size):
            raise InputError(
                f"size is {list(size)}, and {store.name} holds pixels of {list(images.shape[1:])}.",
                "a size for stores of encoded pictures only",
                "leave size out, or pack the pictures again",
            )
        return store
    facts = store.manifest.attributes["encoded"]
    if size is None and facts["smallest"] == facts["largest"]:
        size = (facts["smallest"][0], facts["smallest"][1])
    return cast(Store, SizedStore(store, size or default))


def describe_pictures(store: Store, train: Array) -> dict[str, Any]:
    """Return the facts that a checkpoint needs to prepare new pictures like those of the training store."""
    made_by, images = store.manifest.provenance, store.fields["images"]
    packed = {} if made_by is None else made_by.options
    mean, std = channel_statistics(store, train)
    return {
        "channels": int(images.shape[0]),
        "size": list(images.shape[1:]),
        # The loader decodes and resizes them.
        **({"encoded": True} if isinstance(store, SizedStore) else {}),
        # LOW and HIGH of 16-bit and float pictures; whether films gave their first frame.
        "value_range": packed.get("range"),
        "first_frame": bool(packed.get("first_frame", False)),
        "mean": mean,
        "std": std,
    }


def spell_fields(store: Store) -> str:
    """Return the fields of a store with types and shapes, for an error message."""
    shown = [f"{name} {info.dtype} {tuple(info.shape)}" for name, info in store.fields.items()]
    return ", ".join(shown) or "no fields"


# -- pixels of a store -----------------------------------------------------------------------------


def read_rows(store: Store, field: str, samples: Array) -> Iterator[Array]:
    """Yield pictures or masks of samples, 64 MB at a time."""
    row_bytes = int(np.prod(store.fields[field].shape, dtype=np.int64))
    step = max(1, _READ_BYTES // max(1, row_bytes))
    for low in range(0, len(samples), step):
        yield store.gather(field, samples[low : low + step])


def channel_statistics(store: Store, train: Array) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel of training images, scaled to [0, 1].

    Exact over at most 512 images, evenly spaced: computed from counts of the 256 values.
    """
    channels = store.fields["images"].shape[0]
    counts = np.zeros((channels, 256), dtype=np.int64)
    for images in read_rows(store, "images", evenly(train, _LOOK_IMAGES)):
        for channel in range(channels):
            counts[channel] += np.bincount(images[:, channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    shares = counts / counts.sum(axis=1, keepdims=True)
    mean = shares @ values
    variance = shares @ values**2 - mean**2
    # At least 1 / 255, so that images of one constant value do not divide by 0.
    std = np.maximum(np.sqrt(np.maximum(variance, 0)), 1 / 255)
    return mean.tolist(), std.tolist()


def make_normaliser(facts: Facts) -> Callable[[Tensor], Tensor]:
    """Return a function that normalises pixels from 0 to 255, as the loader does in training."""
    means, deviations = torch.tensor([facts["mean"], facts["std"]]).view(2, 1, -1, 1, 1)

    def normalise(pixels: Tensor) -> Tensor:
        on = pixels.device
        normal: Tensor = (pixels.float() * (1 / 255) - means.to(on)) * (1 / deviations.to(on))
        return normal

    return normalise


def sample_name(store: Store, sample: int) -> str:
    """Return the name of a picture, or its number if the store has no names."""
    return store.read_text("name", sample) if "name" in store.fields else f"sample {sample}"


def as_data_url(image: Array, side: int) -> str:
    """Return a picture `(1 or 3, height, width)` as the data URL of a small PNG."""
    pixels = np.moveaxis(np.broadcast_to(image, (3, *image.shape[1:])), 0, -1)
    return png_url(pixels, side)


# -- new pictures ----------------------------------------------------------------------------------


class FolderPictures:
    """New pictures, in the order of their names or of a list; the base of a `RawReader`."""

    def __init__(
        self,
        pictures: GivenPictures,  # files or arrays
        facts: Facts,  # of training, from `describe_pictures`
        batch_size: int,
    ) -> None:
        self._pictures, self.key = pictures, pictures.key
        self._batch_size, self._first_frame = batch_size, facts["first_frame"]
        self._channels, span = facts["channels"], facts["value_range"]
        self._size: Size = (facts["size"][0], facts["size"][1])
        self._value_range = None if span is None else (span[0], span[1])
        self._num_refused = 0
        self._one_grey: list[str] = []
        self.num_rows: int | None = len(pictures.keys)

    @classmethod
    def open(cls, given: Any, facts: Facts, batch_size: int, **more: Any) -> Self | None:
        """Return a reader of pictures that `given_pictures` accepts; None for anything else.

        Raises:
            SourceError: The folder contains no picture.
        """
        found = given_pictures(given)
        return None if found is None else cls(found, facts, batch_size, **more)

    def _decode(self, place: int) -> Decoded:
        return self._pictures.decode(place, self._first_frame, self._value_range)

    def _pixels(self, place: int, decoded: Decoded, size: Size) -> Array:
        path = self._pictures.path(place)
        made = to_pixels(decoded, path, size, self._channels, self._value_range)
        if made.span is not None and made.span[0] < made.span[1] and np.ptp(made.values) == 0:
            low, high = made.span
            self._one_grey.append(f"{self._pictures.keys[place]} with values {low:g} to {high:g}")
        return np.moveaxis(made.values, -1, 0)

    def _refuse(self, error: SourceError) -> str:
        """Count a picture that cannot be read, and return the reason."""
        self._num_refused += 1
        return error.reason if isinstance(error, PictureError) else error.given

    def _left_out(self, what: str) -> list[str]:
        count, grey = self._num_refused, self._one_grey
        told = [f"{format_count(count, 'picture')} without {what}; see 'reason'"] if count else []
        if grey:
            many = format_count(len(grey), "picture")
            told.append(
                f"{many} of one grey in the value range of training: other units? {grey[0]}"
            )
        return told


# -- pictures of a user ---------------------------------------------------------------------------

_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class GivenPictures:
    """New pictures, in files or in memory."""

    keys: Sequence[Any]  # relative paths, names, or numbers from 0
    root: Path = Path()  # folder of the files
    # pictures in memory, in the order of the keys; empty if the keys are names of files
    held: Sequence[Any] = ()
    told: Sequence[str] = field(default_factory=list)  # notes for the end of a prediction

    @property
    def key(self) -> str:
        """Name of the column of keys."""
        is_numbered = bool(self.held) and not isinstance(self.keys[0], str)
        return ROW_COLUMN if is_numbered else FILE_COLUMN

    def path(self, place: int) -> Path:
        """Return the file of a picture; for a picture in memory a made-up path for messages."""
        return self.root / str(self.keys[place])

    def decode(
        self, place: int, first_frame: bool, value_range: tuple[float, float] | None
    ) -> Decoded:
        """Decode one picture.

        Args:
            place: Index of the picture in `keys`.
            first_frame: Take the first frame of a file that holds several.
            value_range: LOW and HIGH of float arrays, as in training.

        Raises:
            SourceError: The picture is damaged, or it is no picture.
        """
        given = self.held[place] if self.held else self.path(place)
        if isinstance(given, str | os.PathLike):
            return decode(Path(given), first_frame)
        if isinstance(given, torch.Tensor | np.ndarray):
            given = _image_of(given, value_range)
        if not hasattr(given, "getbands"):
            raise PictureError(f"is a {type(given).__name__}, not a picture.")
        orientation = int(given.getexif().get(ORIENTATION, 1) or 1)
        upright = turned(given, orientation)
        return Decoded(upright, given.size, orientation, False, given.format or "", False)


def given_pictures(given: Any) -> GivenPictures | None:
    """Return the pictures of a folder, a file, an array, an image, or several of them; None for anything else.

    Args:
        given: A folder or file; an image of Pillow; an array or tensor of one picture, `(height, width)`,
            `(height, width, channels)` or `(channels, height, width)`, or of several, with one more axis in front of
            the last two kinds; a list of paths, images or arrays; a mapping of names to them.

    Raises:
        SourceError: The folder contains no picture.
    """
    found = find_pictures(given)
    if found is not None:
        root, names, told = found
        return GivenPictures(names, root, told=told)
    if isinstance(given, str | os.PathLike) and not _opens_as_picture(Path(given)):
        return None
    if isinstance(given, Mapping):
        values = list(given.values())
        is_pictures = all(map(_may_be_picture, values))
        return GivenPictures(list(map(str, given)), held=values) if is_pictures else None
    if isinstance(given, np.ndarray) and given.dtype.kind in "OUS":
        return given_pictures(given.tolist())
    if isinstance(given, torch.Tensor | np.ndarray):
        given = given if given.ndim == 4 else [given]
    elif _may_be_picture(given):
        given = [given]
    elif not isinstance(given, list | tuple):
        if not hasattr(given, "tolist"):  # a column of pandas
            return None
        return given_pictures(given.tolist())
    is_pictures = all(map(_may_be_picture, given))
    return GivenPictures(range(len(given)), held=list(given)) if is_pictures else None


def _opens_as_picture(path: Path) -> bool:
    """Return whether Pillow can open a file, whatever its ending; True for a path that is no file."""
    if path.is_file():
        try:
            pillow().open(path).close()
        except (OSError, ValueError):
            return False
    return True


def _may_be_picture(given: Any) -> bool:
    is_known = isinstance(given, str | os.PathLike | torch.Tensor | np.ndarray)
    return is_known or hasattr(given, "getbands")


def _image_of(given: Any, value_range: tuple[float, float] | None) -> Any:
    """Return an array as a Pillow image; float values are scaled as `decoding` does, also for colours."""
    is_tensor = isinstance(given, torch.Tensor)
    values = given.detach().cpu().numpy() if is_tensor else np.asarray(given)
    shape = tuple(values.shape)
    if values.ndim == 2:
        values = values[..., None]
    # Tensors have their channels first, arrays last. The other order is accepted if only that one fits.
    ends = (0, -1) if is_tensor else (-1, 0)
    axis = next((end for end in ends if values.ndim == 3 and values.shape[end] in _CHANNELS), None)
    if axis is None or not values.size:
        raise PictureError(
            f"is an array of shape {shape}, not (height, width[, channels]) with 1, 3 or 4 channels.",
            kind="not a picture",
        )
    values = np.moveaxis(values, axis, -1)
    if values.dtype.kind == "f":
        low, high = float(values.min()), float(values.max())
        bottom, top = value_range or (0.0, 1.0)
        is_outside = value_range is None and (low < 0 or high > 1)
        if is_outside or not np.isfinite([low, high]).all():
            raise PictureError(
                f"holds float values from {low:g} to {high:g}, not 0 to 1 (uint8: 0 to 255).",
                kind="float values",
            )
        scaled = np.clip((values.astype(np.float32) - bottom) * (255.0 / (top - bottom)), 0, 255)
        values = np.rint(scaled).astype(np.uint8)
    elif values.dtype == np.bool_:
        values = values.astype(np.uint8) * 255
    is_deep = values.dtype == np.uint16 and values.shape[-1] == 1
    if values.dtype != np.uint8 and not is_deep:
        raise PictureError(
            f"holds {values.dtype} values, not uint8 from 0 to 255.", kind="values of another type"
        )
    plain = np.ascontiguousarray(values[..., 0] if values.shape[-1] == 1 else values)
    return pillow().fromarray(plain)


def as_keys(names: Sequence[Any]) -> Array:
    """Return names, or numbers, as the keys of a batch; bytes of a name that are not UTF-8 are escaped."""
    if not names or not isinstance(names[0], str):
        return np.asarray(names, dtype=np.int64)
    return np.asarray([n.encode(errors="backslashreplace").decode() for n in names], dtype=object)
