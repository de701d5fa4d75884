"""What the recipes of pictures share: pixels of a store, their statistics, new files, small pictures for pages.

Enters: a store of pixels or of encoded pictures; folders of new ones. Leaves: a store whose `images` and `masks` are
dense uint8 fields of one size, decoded, turned upright and resized when they are gathered; statistics; new pictures.
Costs one decode for each encoded picture that is read: for statistics and evaluations, which look at some hundreds.
Training reads the store itself, by a `Loader`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, cast

import numpy as np
import torch

from stoker.errors import InputError, SourceError
from stoker.packing.samples import encode_png
from stoker.recipes.given_pictures import GivenPictures, given_pictures
from stoker.recipes.options import Range
from stoker.recipes.scaling import evenly
from stoker.sources.images.decoding import Decoded, PictureError, pillow, to_pixels
from stoker.sources.images.encoded import decode_bytes, turned_pixels
from stoker.store.fields import Array
from stoker.store.manifest import FieldInfo
from stoker.store.reader import Store
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
    """A store of encoded pictures with dense `images` and `masks`; everything else is the store's own."""

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
        store: Of either kind.
        size: As the user asks; None takes the size that all pictures have, or the default.
        default: For encoded pictures of several sizes.
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


def is_encoded(store: Store) -> bool:
    """Whether pictures of this store have to be decoded."""
    return isinstance(store, SizedStore)


# -- pixels of a store -----------------------------------------------------------------------------


def read_rows(store: Store, field: str, samples: Array) -> Iterator[Array]:
    """Yield pictures or masks of samples, 64 MB at a time."""
    row_bytes = int(np.prod(store.fields[field].shape, dtype=np.int64))
    step = max(1, _READ_BYTES // max(1, row_bytes))
    for low in range(0, len(samples), step):
        yield store.gather(field, samples[low : low + step])


def channel_statistics(store: Store, train: Array) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel of training images, scaled to [0, 1].

    Exact over at most 512 images, evenly spaced: counts of the 256 values, no running sums.
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
    # One grey for all images must not divide by nothing: the smallest step is 1 / 255.
    std = np.maximum(np.sqrt(np.maximum(variance, 0)), 1 / 255)
    return mean.tolist(), std.tolist()


def make_normaliser(mean: list[float], std: list[float]) -> Callable[[Tensor], Tensor]:
    """Return what makes floats of pixels from 0 to 255, as the loader does in training."""
    means, deviations = torch.tensor([mean, std]).view(2, 1, -1, 1, 1)

    def normalise(pixels: Tensor) -> Tensor:
        on = pixels.device
        normal: Tensor = (pixels.float() * (1 / 255) - means.to(on)) * (1 / deviations.to(on))
        return normal

    return normalise


def packed_as(store: Store) -> tuple[list[float] | None, bool]:
    """Return LOW and HIGH that 16-bit and float pictures were packed with, and whether films gave their first frame."""
    made_by = store.manifest.provenance
    options = {} if made_by is None else made_by.options
    return options.get("range"), bool(options.get("first_frame", False))


def sample_name(store: Store, sample: int) -> str:
    """Return what a picture of the store is called."""
    return store.read_text("name", sample) if "name" in store.fields else f"sample {sample}"


def as_data_url(image: Array, side: int) -> str:
    """Return a picture `(1 or 3, height, width)` as a small PNG for a page."""
    pixels = np.moveaxis(np.broadcast_to(image, (3, *image.shape[1:])), 0, -1)
    step = max(1, -(-max(pixels.shape[:2]) // side))
    small = np.ascontiguousarray(pixels[::step, ::step])
    return f"data:image/png;base64,{base64.b64encode(encode_png(small)).decode()}"


# -- new pictures ----------------------------------------------------------------------------------


class FolderPictures:
    """Pictures of a user in the order of their names, or in that of a list; the base of a `RawReader`.

    Args:
        pictures: Files or arrays.
        channels: 1 for grey, 3 for RGB.
        value_range: LOW and HIGH of 16-bit and float pictures, as in training.
        first_frame: Take the first frame of files that hold several.
        batch_size: Pictures at once.
    """

    def __init__(
        self,
        pictures: GivenPictures,
        *,
        channels: int,
        value_range: tuple[float, float] | None,
        first_frame: bool,
        batch_size: int,
    ) -> None:
        self._pictures, self.key = pictures, pictures.key
        self._channels, self._value_range = channels, value_range
        self._first_frame, self._batch_size = first_frame, batch_size
        self._num_refused = 0
        self._one_grey: list[str] = []
        self.num_rows: int | None = len(pictures.keys)

    @classmethod
    def open(cls, given: Any, **more: Any) -> Self | None:
        """Return a reader of what `given_pictures` takes; None for anything else.

        Raises:
            SourceError: The folder holds no picture.
        """
        found = given_pictures(given)
        return None if found is None else cls(found, **more)

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
        """Count a picture that cannot be read; return the reason."""
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
