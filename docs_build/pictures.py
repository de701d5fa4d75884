"""A drawn street, and one picture of every op on it: the pictures of docs/augmentation.md.

    python -m docs_build.pictures docs/images/augmentation

Enters: a folder. Leaves: small PNGs, the same bytes for the same Pillow. Costs: about two seconds.
Needs Pillow. The scene is drawn, so that the pictures carry nobody's licence.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stoker.augment as ops
from stoker.augment.compose import Compose
from stoker.augment.mixing import CutMix, MixUp
from stoker.augment.presets import make_preset
from stoker.augment.preview import Sample, draw_columns, to_pixels, write_png
from stoker.augment.sheet import Line, colour_mask, make_sheet
from stoker.sources.images.decoding import pillow

SIZE = (96, 128)
STEPS = 5
SEED = 3
IGNORE = 255
ROAD, SKY, TREE, HOUSE, CAR, SUN = 0, 1, 2, 3, 4, 6
_SMOOTH = 4  # the image is drawn this many times too large and shrunk: soft edges


@dataclass(frozen=True)
class Picture:
    """One picture to make.

    Attributes:
        name: File name without its ending.
        compose: What is applied.
        masks: Show the mask below: geometry moves it.
    """

    name: str
    compose: Compose
    masks: bool = False


def pictures() -> list[Picture]:
    """Return one picture per op, strong enough to be seen at this size."""
    moving = {
        "horizontal_flip": ops.RandomHorizontalFlip(p=0.5),
        "vertical_flip": ops.RandomVerticalFlip(p=0.5),
        "rotation": ops.RandomRotation(30),
        "affine": ops.RandomAffine(10, translate=(0.1, 0.1), scale=(0.7, 1.3), shear=(15, 0)),
        "resized_crop": ops.RandomResizedCrop(SIZE, scale=(0.1, 0.6)),
        "crop": ops.RandomCrop((72, 96), padding=12),
        "resize": ops.Resize((60, 80)),
        "center_crop": ops.CenterCrop((72, 96)),
    }
    colouring = {
        "brightness": ops.RandomBrightness(0.6),
        "contrast": ops.RandomContrast(0.8),
        "saturation": ops.RandomSaturation(1.0),
        "hue": ops.RandomHue(0.5),
        "color_jitter": ops.ColorJitter(0.4, 0.4, 0.4, 0.1),
        "gaussian_blur": ops.GaussianBlur(9, sigma=(0.5, 3.0), p=0.8),
        "erasing": ops.RandomErasing(p=0.8, value=0.5),
    }
    made = [
        Picture(name, Compose([op], seed=SEED, backend="torch"), name in moving)
        for name, op in (moving | colouring).items()
    ]
    return made + [
        Picture(name, make_preset(name, seed=SEED, backend="torch"), True)
        for name in ("minimal", "standard", "strong")
    ]


def write_pictures(folder: Path) -> list[Path]:
    """Write every picture into `folder`, which must exist; return the files."""
    sheets = {each.name: strip(draw_scene(), each.compose, each.masks) for each in pictures()}
    sheets["normalize"] = normalized_strip()
    sheets["to_dtype"] = rounded_strip()
    sheets["mixup"] = mixing_strip(MixUp(1.0, 2, seed=SEED))
    sheets["cutmix"] = mixing_strip(CutMix(1.0, 2, seed=SEED))
    for name, sheet in sheets.items():
        write_png(_small(sheet), folder / f"{name}.png")
    return [folder / f"{name}.png" for name in sheets]


def strip(sample: Sample, compose: Compose, masks: bool) -> Any:
    """Return the original and five draws side by side, masks below."""
    shown = sample if masks else Sample(sample.name, sample.image, None)
    draws = draw_columns([shown], compose, STEPS, 0)
    lines = [Line([sample.image, *(images[0] for images, _ in draws)])]
    if masks and sample.mask is not None:
        classes = [sample.mask, *(each[0] for _, each in draws)]
        lines.append(Line([colour_mask(each, IGNORE) for each in classes]))
    return make_sheet(lines)


def normalized_strip() -> Any:
    """Return the scene before and after `Normalize`, channel by channel, each with its range."""
    image = draw_scene().image
    before = torch.tensor(image).permute(2, 0, 1)[None] / 255
    after = Compose([ops.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])(before)
    tiles, header = [], []
    for values in (before[0], after[0]):
        low, high = float(values.min()), float(values.max())
        for channel in values:
            grey = ((channel - low) / (high - low) * 255).round().to(torch.uint8)
            tiles.append(grey[..., None].expand(-1, -1, 3).numpy())
            header.append(f"{float(channel.min()):.2f} to {float(channel.max()):.2f}")
    return make_sheet([Line(tiles)], header)


def rounded_strip() -> Any:
    """Return the scene, and 512 times what float16 and bfloat16 round away of it."""
    image = draw_scene().image
    exact = torch.tensor(image).permute(2, 0, 1)[None] / 255
    tiles, header = [image], ["float32"]
    for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        made = Compose([ops.ToDtype(dtype)])(exact).float()
        tiles.append(to_pixels(((made - exact).abs() * 512).clamp(0, 1))[0])
        header.append(f"{name}: error x 512")
    return make_sheet([Line(tiles)], header)


def mixing_strip(mixer: MixUp | CutMix) -> Any:
    """Return day and night, and what mixing them makes, with the share of each in the target."""
    pair = [draw_scene(), draw_scene(night=True)]
    images = torch.from_numpy(np.stack([each.image for each in pair])).permute(0, 3, 1, 2) / 255
    tiles, header = [each.image for each in pair], ["class 0", "class 1"]
    for step in range(STEPS - 1):
        mixer.seek(0, step)
        mixed, targets = mixer(images, torch.arange(2))
        tiles.append(to_pixels(mixed)[0])
        header.append(" + ".join(f"{share:.2f}" for share in targets[0].tolist()))
    return make_sheet([Line(tiles)], header)


def _small(sheet: Any) -> Any:
    """Return the picture in 256 colours: half the bytes, and no difference to the eye."""
    return sheet.quantize(256, dither=pillow().Dither.NONE)


def draw_scene(night: bool = False) -> Sample:
    """Return a street with houses, trees and a car, as an image and as classes."""
    image = pillow()
    height, width = SIZE
    large = image.new("RGB", (width * _SMOOTH, height * _SMOOTH))
    classes = image.new("L", (width, height), SKY)
    _sky(large, night)
    for shape in _shapes(night):
        _paint(large, shape, _SMOOTH, shape.colour)
        _paint(classes, shape, 1, shape.number)
    small = large.resize((width, height), image.Resampling.BOX)
    return Sample("scene", np.asarray(small, dtype=np.uint8), np.asarray(classes).astype(np.int64))


@dataclass(frozen=True)
class _Shape:
    """A rectangle, ellipse or polygon in pixels of `SIZE`."""

    kind: str
    points: tuple[float, ...]
    colour: tuple[int, int, int]
    number: int


def _sky(large: Any, night: bool) -> None:
    top, bottom = ((16, 22, 52), (60, 62, 104)) if night else ((88, 150, 214), (196, 222, 240))
    ramp = np.linspace(0.0, 1.0, large.height)[:, None, None]
    rows = (1 - ramp) * np.array(top) + ramp * np.array(bottom)
    pixels = np.broadcast_to(rows, (large.height, large.width, 3)).round().astype(np.uint8)
    large.paste(pillow().fromarray(np.ascontiguousarray(pixels)))


def _shapes(night: bool) -> Sequence[_Shape]:
    glow = (238, 234, 210) if night else (250, 214, 92)
    window = (246, 210, 110) if night else (226, 236, 244)
    shapes = [
        _Shape("ellipse", (98, 8, 114, 24), glow, SUN),
        _Shape("rectangle", (8, 26, 40, 64), (182, 92, 74), HOUSE),
        _Shape("polygon", (4, 26, 24, 12, 44, 26), (122, 58, 52), HOUSE),
        _Shape("rectangle", (46, 36, 74, 64), (214, 186, 142), HOUSE),
        _Shape("rectangle", (44, 33, 76, 37), (120, 104, 84), HOUSE),
    ]
    shapes += [
        _Shape("rectangle", (x, y, x + 6, y + 8), window, HOUSE) for x in (13, 28) for y in (32, 48)
    ]
    shapes += [_Shape("rectangle", (x, 43, x + 5, 51), window, HOUSE) for x in (51, 63)]
    shapes += [
        _Shape("rectangle", (94, 46, 98, 66), (104, 74, 48), TREE),
        _Shape("ellipse", (83, 28, 109, 52), (64, 128, 66), TREE),
        _Shape("ellipse", (90, 22, 104, 38), (84, 150, 78), TREE),
        _Shape("rectangle", (0, 64, 128, 96), (96, 98, 104), ROAD),
    ]
    shapes += [
        _Shape("rectangle", (x, 81, x + 14, 83), (236, 232, 214), ROAD) for x in (4, 34, 64, 94)
    ]
    shapes += [
        _Shape("rectangle", (22, 66, 58, 78), (206, 58, 52), CAR),
        _Shape("polygon", (28, 66, 34, 57, 48, 57, 54, 66), (206, 58, 52), CAR),
        _Shape("polygon", (32, 65, 36, 59, 46, 59, 50, 65), window, CAR),
        _Shape("ellipse", (26, 73, 36, 83), (36, 36, 40), CAR),
        _Shape("ellipse", (45, 73, 55, 83), (36, 36, 40), CAR),
    ]
    return shapes


def _paint(canvas: Any, shape: _Shape, scale: int, fill: Any) -> None:
    from PIL import ImageDraw

    draw = ImageDraw.Draw(canvas)
    points = [value * scale for value in shape.points]
    if shape.kind == "polygon":
        draw.polygon(points, fill=fill)
        return
    # Pillow counts the last pixel in; ours are half-open.
    box = [points[0], points[1], points[2] - 1, points[3] - 1]
    getattr(draw, shape.kind)(box, fill=fill)


if __name__ == "__main__":
    write_pictures(Path(sys.argv[1]))
