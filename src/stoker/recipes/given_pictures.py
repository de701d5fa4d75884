"""Pictures as people have them: folders, files, images of Pillow, arrays and tensors.

Enters: any of these, or several. Leaves: `GivenPictures`: a key for each, and its decoding by one rule. Costs: a look
at the folder; pictures are decoded one by one, when they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.sources.images.decoding import (
    ORIENTATION,
    Decoded,
    PictureError,
    decode,
    pillow,
    turned,
)
from stoker.sources.images.listing import find_pictures
from stoker.store.fields import Array
from stoker.train.predict import FILE_COLUMN, ROW_COLUMN

_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class GivenPictures:
    """Pictures of a user, in files or in memory.

    Attributes:
        keys: Relative paths, names, or numbers from 0.
        root: Folder of the files.
        held: Pictures in memory, in the order of the keys; empty where all are files of those names.
        told: What to say at the end.
    """

    keys: Sequence[Any]
    root: Path = Path()
    held: Sequence[Any] = ()
    told: Sequence[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Name of the column of keys."""
        is_numbered = bool(self.held) and not isinstance(self.keys[0], str)
        return ROW_COLUMN if is_numbered else FILE_COLUMN

    def path(self, place: int) -> Path:
        """Return the file of a picture, or what stands for it in messages."""
        return self.root / str(self.keys[place])

    def decode(
        self, place: int, first_frame: bool, value_range: tuple[float, float] | None
    ) -> Decoded:
        """Decode one picture.

        Args:
            place: Of the picture among the keys.
            first_frame: Take the first frame of a file that holds several.
            value_range: LOW and HIGH of float arrays, as in training.

        Raises:
            SourceError: It is damaged or not a picture.
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
        SourceError: The folder holds no picture.
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
    """Return whether Pillow knows what a file holds, whatever its ending; True for a path that is no file."""
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
    """Return an array as Pillow's image; float values by the rule of `decoding`, for colours too."""
    is_tensor = isinstance(given, torch.Tensor)
    values = given.detach().cpu().numpy() if is_tensor else np.asarray(given)
    shape = tuple(values.shape)
    if values.ndim == 2:
        values = values[..., None]
    # Tensors have their channels in front, arrays behind; an array that can only be meant the other way is taken so.
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
    """Return names, or numbers, as the keys of a batch."""
    return np.asarray(names, dtype=object if names and isinstance(names[0], str) else np.int64)
