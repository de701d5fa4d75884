"""Contact sheets: images and coloured masks as tiles of one picture.

Enters: uint8 images (H, W, 3) and integer masks (H, W). Leaves: one Pillow image. Costs milliseconds per
sheet; needs Pillow.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.sources.images.decoding import pillow

Pixels = npt.NDArray[np.uint8]
Classes = npt.NDArray[np.int64]

GAP = 4
STRIP = 18
_PAPER = (250, 249, 246)
_INK = (60, 62, 68)
# Neighbouring classes must differ most: 0 is road-grey, the rest walks around the colour circle.
_FIRST = (
    (88, 90, 96), (70, 130, 180), (94, 158, 86), (214, 137, 16), (186, 74, 65), (128, 88, 160),
    (214, 190, 60), (60, 160, 150), (200, 110, 150), (140, 100, 70), (150, 180, 60), (50, 80, 150),
    (236, 158, 140), (120, 206, 224), (112, 46, 52), (178, 160, 224), (30, 100, 66), (240, 224, 178),
    (84, 48, 112), (186, 226, 178),
)  # fmt: skip
_GOLDEN = 0.618033988749895


@dataclass(frozen=True)
class Line:
    """One row of tiles.

    Attributes:
        tiles: From left to right.
        caption: Above the row; empty for none.
    """

    tiles: Sequence[Pixels]
    caption: str = ""


def colour_mask(classes: Classes, ignore_index: int) -> Pixels:
    """Return a mask as colours; the ignore index is hatched, so that it looks like no class."""
    height, width = classes.shape
    colours = np.array([class_colour(number) for number in range(256)], dtype=np.uint8)
    shown = colours[np.clip(classes, 0, 255)]
    down, across = np.indices((height, width))
    hatch = np.where((down + across) % 8 < 3, 40, 235).astype(np.uint8)[..., None]
    return np.where((classes == ignore_index)[..., None], hatch, shown).astype(np.uint8)


def class_colour(number: int) -> tuple[int, int, int]:
    """Return the colour of a class, the same in every sheet."""
    if number < len(_FIRST):
        return _FIRST[number]
    light = 0.55 + 0.35 * ((number * 7) % 3) / 2
    red, green, blue = colorsys.hsv_to_rgb(number * _GOLDEN % 1.0, 0.55, light)
    return round(red * 255), round(green * 255), round(blue * 255)


def make_sheet(lines: Sequence[Line], header: Sequence[str] = (), footer: str = "") -> Any:
    """Return the sheet as a Pillow image.

    Tiles of one row may differ in size; each is centred in its cell.

    Args:
        lines: From top to bottom.
        header: Above the columns; empty for none.
        footer: Below everything.
    """
    image = pillow()
    columns = max(len(line.tiles) for line in lines)
    wide = max(tile.shape[1] for line in lines for tile in line.tiles)
    heights = [max(tile.shape[0] for tile in line.tiles) for line in lines]
    top = STRIP if header else 0
    captions = sum(STRIP for line in lines if line.caption)
    total = GAP + top + captions + sum(heights) + GAP * len(lines) + (STRIP if footer else 0)
    sheet = image.new("RGB", (columns * (wide + GAP) + GAP, total), _PAPER)
    for column, text in enumerate(header):
        _write(sheet, text, GAP + column * (wide + GAP), GAP, wide)
    y = GAP + top
    for line, tall in zip(lines, heights, strict=True):
        if line.caption:
            _write(sheet, line.caption, GAP, y, columns * (wide + GAP) - GAP)
            y += STRIP
        for column, tile in enumerate(line.tiles):
            x = GAP + column * (wide + GAP) + (wide - tile.shape[1]) // 2
            sheet.paste(image.fromarray(tile), (x, y + (tall - tile.shape[0]) // 2))
        y += tall + GAP
    if footer:
        _write(sheet, footer, GAP, y, columns * (wide + GAP) - GAP)
    return sheet


def _write(sheet: Any, text: str, x: int, y: int, room: int) -> None:
    """Write a line of text, shortened to `room` pixels."""
    from PIL import ImageDraw, ImageFont

    try:
        font = ImageFont.load_default(12)
    except (ImportError, OSError):  # a Pillow without FreeType has its bitmap font only
        font = ImageFont.load_default()
    draw = ImageDraw.Draw(sheet)
    while text and draw.textlength(text, font=font) > room:
        text = text[:-2].rstrip("…") + "…" if len(text) > 2 else ""
    draw.text((x, y), text, fill=_INK, font=font)
