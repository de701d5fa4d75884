"""New pictures for a trained model: a folder of files as batches, each file with an answer or a reason.

Enters: a folder, or one file. Leaves: batches of uint8 pictures in the size of training, under their relative file
names. Costs one decode per file; one batch in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from stoker.errors import SourceError
from stoker.recipes.contract import RawBatch
from stoker.sources.images.decoding import PictureError, decode, to_pixels
from stoker.sources.images.listing import find_pictures
from stoker.store.fields import Array
from stoker.units import format_count


class PictureReader:
    """The pictures of a folder in the order of their names; see `RawReader`.

    Args:
        root: The folder.
        names: Relative paths of its pictures.
        size: Height and width of training.
        channels: 1 for grey, 3 for RGB.
        value_range: LOW and HIGH of 16-bit and float pictures, as in training.
        first_frame: Take the first frame of files that hold several.
        normalise: Pixels `(n, channels, height, width)` uint8 to what the network takes.
        batch_size: Pictures at once.
        classes: Names of the classes: a folder that is called like one says the truth.
        told: What to say at the end.
    """

    key = "file"

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        size: tuple[int, int],
        channels: int,
        value_range: tuple[float, float] | None,
        first_frame: bool,
        normalise: Callable[[torch.Tensor], torch.Tensor],
        batch_size: int,
        classes: Sequence[str] = (),
        told: Sequence[str] = (),
    ) -> None:
        self._root, self._names = root, names
        self._size, self._channels = size, channels
        self._value_range, self._first_frame = value_range, first_frame
        self._normalise = normalise
        self._batch_size, self._told = batch_size, list(told)
        self._num_refused = 0
        self._places = {name: place for place, name in enumerate(classes)}
        self.num_rows: int | None = len(names)

    @classmethod
    def open(
        cls,
        given: Any,
        size: tuple[int, int],
        channels: int,
        value_range: tuple[float, float] | None,
        first_frame: bool,
        normalise: Callable[[torch.Tensor], torch.Tensor],
        batch_size: int,
        classes: Sequence[str] = (),
    ) -> PictureReader | None:
        """Return a reader of a folder of pictures, of one picture, or of a list of their paths; None for anything else.

        Raises:
            SourceError: The folder holds no picture.
        """
        found = find_pictures(given)
        if found is None:
            return None
        more = (size, channels, value_range, first_frame, normalise, batch_size, classes)
        root, names, told = found
        return cls(root, names, *more, told=told)

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield every picture once, in the order of the names."""
        for low in range(0, len(self._names), self._batch_size):
            yield self._read(self._names[low : low + self._batch_size])

    def _read(self, names: Sequence[str]) -> RawBatch:
        images = np.zeros((len(names), self._channels, *self._size), np.uint8)
        answered = np.ones(len(names), bool)
        reasons: list[str | None] = [None] * len(names)
        for row, name in enumerate(names):
            try:
                images[row] = self._decode(self._root / name)
            except SourceError as error:
                answered[row] = False
                reasons[row] = error.reason if isinstance(error, PictureError) else error.given
                self._num_refused += 1
        keys = np.asarray(names, dtype=object)
        made = self._normalise(torch.from_numpy(images))
        truth = np.array([self._places.get(PurePosixPath(name).parent.name, -1) for name in names])
        return RawBatch(keys, {"images": made}, answered, reasons, truth=truth)

    def _decode(self, path: Path) -> Array:
        decoded = decode(path, self._first_frame)
        pixels = to_pixels(decoded, path, self._size, self._channels, self._value_range)
        return np.moveaxis(pixels.values, -1, 0)

    def notes(self) -> Sequence[str]:
        """Return what was left out."""
        refused = self._num_refused
        return [
            *self._told,
            *(
                [f"{format_count(refused, 'picture')} without an answer; see 'reason'"]
                if refused
                else []
            ),
        ]
