"""A store of encoded pictures, read as if it held pixels of one size.

Enters: a store and a size. Leaves: the same store where it holds pixels; else one whose `images` and `masks` are dense
uint8 fields, decoded, turned upright and resized when they are gathered. Costs one decode for each picture that is
read: for statistics and evaluations, which look at some hundreds. Training reads the store itself, by a `Loader`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from stoker.errors import InputError
from stoker.recipes.options import Range
from stoker.sources.images.decoding import pillow
from stoker.sources.images.encoded import decode_bytes, turned_pixels
from stoker.store.fields import Array
from stoker.store.manifest import FieldInfo
from stoker.store.reader import Store

Size = tuple[int, int]
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

    Raises:
        InputError: A size is asked of a store that holds pixels of another.
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
