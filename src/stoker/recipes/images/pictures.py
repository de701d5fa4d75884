"""New pictures for a trained classifier: a folder of files as batches, each file with an answer or a reason.

Enters: a folder, one file, or a list of paths. Leaves: batches of normalised pictures in the size of training, under
their relative file names. Costs one decode per file; one batch in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch

from stoker.errors import SourceError
from stoker.recipes.contract import RawBatch
from stoker.recipes.pictures import FolderPictures, Size


class PictureReader(FolderPictures):
    """The pictures of a folder at the size of training; see `RawReader`.

    Args:
        found: Of `find_pictures`.
        size: Height and width of training.
        normalise: Pixels `(n, channels, height, width)` uint8 to what the network takes.
        classes: Names of the classes: a folder that is called like one says the truth.
        more: As for `FolderPictures`.
    """

    def __init__(
        self,
        *found: Any,
        size: Size,
        normalise: Callable[[torch.Tensor], torch.Tensor],
        classes: Sequence[str] = (),
        **more: Any,
    ) -> None:
        super().__init__(*found, **more)
        self._size, self._normalise = size, normalise
        self._places = {name: place for place, name in enumerate(classes)}

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield every picture once, in the order of the names."""
        for low in range(0, len(self._names), self._batch_size):
            yield self._read(self._names[low : low + self._batch_size])

    def _read(self, names: Sequence[str]) -> RawBatch:
        images = np.zeros((len(names), self._channels, *self._size), np.uint8)
        reasons: list[str | None] = [None] * len(names)
        for row, name in enumerate(names):
            try:
                images[row] = self._pixels(name, self._decode(name), self._size)
            except SourceError as error:
                reasons[row] = self._refuse(error)
        made = self._normalise(torch.from_numpy(images))
        answered = np.array([reason is None for reason in reasons])
        truth = np.array([self._places.get(PurePosixPath(name).parent.name, -1) for name in names])
        keys = np.asarray(names, dtype=object)
        return RawBatch(keys, {"images": made}, answered, reasons, truth=truth)

    def notes(self) -> Sequence[str]:
        """Return what was left out."""
        return [*self._told, *self._left_out("an answer")]
