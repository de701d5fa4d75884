"""New pictures for a trained classifier: batches in which each picture has an answer or a reason.

Enters: a folder, files, or pictures in memory. Leaves: batches of normalised pictures in the size of training, under
their relative file names, or their numbers. Costs one decode per file; one batch in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch

from stoker.errors import SourceError
from stoker.recipes.contract import RawBatch
from stoker.recipes.given_pictures import GivenPictures, as_keys
from stoker.recipes.pictures import FolderPictures, Size


class PictureReader(FolderPictures):
    """Pictures at the size of training; see `RawReader`.

    Args:
        pictures: Of the user.
        size: Height and width of training.
        normalise: Pixels `(n, channels, height, width)` uint8 to what the network takes.
        classes: Names of the classes: a folder that is called like one says the truth.
        more: As for `FolderPictures`.
    """

    def __init__(
        self,
        pictures: GivenPictures,
        *,
        size: Size,
        normalise: Callable[[torch.Tensor], torch.Tensor],
        classes: Sequence[str] = (),
        **more: Any,
    ) -> None:
        super().__init__(pictures, **more)
        self._size, self._normalise = size, normalise
        self._places = {name: place for place, name in enumerate(classes)}

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield every picture once, in the order of the names."""
        places = range(len(self._pictures.keys))
        for low in range(0, len(places), self._batch_size):
            yield self._read(places[low : low + self._batch_size])

    def _read(self, places: Sequence[int]) -> RawBatch:
        images = np.zeros((len(places), self._channels, *self._size), np.uint8)
        reasons: list[str | None] = [None] * len(places)
        for row, place in enumerate(places):
            try:
                images[row] = self._pixels(place, self._decode(place), self._size)
            except SourceError as error:
                reasons[row] = self._refuse(error)
        made = self._normalise(torch.from_numpy(images))
        answered = np.array([reason is None for reason in reasons])
        names = [self._pictures.keys[place] for place in places]
        folders = [PurePosixPath(str(name)).parent.name for name in names]
        truth = np.array([self._places.get(folder, -1) for folder in folders])
        return RawBatch(as_keys(names), {"images": made}, answered, reasons, truth=truth)

    def notes(self) -> Sequence[str]:
        """Return what was left out."""
        return [*self._pictures.told, *self._left_out("an answer")]
