"""`stoker augment preview`: shows what an augmentation does to your own images, before training.

Enters: a folder of images, one image or a packed store, masks if there are any, and an augmentation.
Leaves: a PNG with a row per image (the original, then one draw per column) and below it its mask,
coloured, the ignore index hatched. Costs: decoding the shown images and a second of torch on the CPU.
Needs Pillow.

Column k shows the draw of step k of the epoch for a batch of these images: the same seed and epoch give
the same picture on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.augment.compose import Compose
from stoker.augment.sheet import Classes, Line, Pixels, colour_mask, make_sheet
from stoker.display import command, look_for, quoted
from stoker.errors import InputError, SourceError
from stoker.ownership import SIGNATURE, free_name, writing
from stoker.sources.images.decoding import decode, pillow
from stoker.sources.images.listing import ENDINGS
from stoker.store.reader import Store, open_store

SHOWN_SIDE = 384
"""Without --size, images are shrunk until their longer side is this."""
_SINGLE_CHANNEL = ("L", "P", "1", "I;16", "I")


@dataclass(frozen=True)
class Sample:
    """One image to show.

    Attributes:
        name: File name, with its class folder if there is one, or row in the store.
        image: (H, W, 3).
        mask: (H, W), or None.
    """

    name: str
    image: Pixels
    mask: Classes | None


def read_samples(
    path: Path, masks: Path | None, count: int, size: tuple[int, int] | None
) -> list[Sample]:
    """Return the first `count` images, all of one size.

    Args:
        path: Folder of images or of class folders, image file, or packed store.
        masks: Folder of masks with the same names, or one mask for one image; None for none. A
            store brings its own.
        count: At most this many.
        size: (height, width) to resize to; None takes the first image's, shrunk to `SHOWN_SIDE`.
    """
    if is_store(path):
        if masks is not None:
            raise InputError(
                f"--masks {masks} with the store {path}.",
                "--masks with a folder of images; a store holds its own masks",
                "leave --masks out",
            )
        with open_store(path) as store:
            return _from_store(store, count, size)
    files = _image_files(path)[:count]
    partners = _mask_files(files, masks)
    first = _decode(files[0], "RGB")
    wanted = size or shown_size((first.height, first.width))
    root = path if path.is_dir() else path.parent
    return [
        replace(
            _from_files(file, partners.get(file), wanted), name=file.relative_to(root).as_posix()
        )
        for file in files
    ]


def is_store(path: Path) -> bool:
    """Say whether a path is something that `open_store` opens, not images."""
    return (path / "store.json").is_file() or path.suffix.lower() in (".h5", ".hdf5")


def shown_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) shrunk until the longer side is `SHOWN_SIDE`; never grown."""
    factor = min(1.0, SHOWN_SIDE / max(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def _image_files(path: Path, *, by_class: bool = True) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SourceError(
            f"{path} does not exist.",
            "a folder of images, an image, a store",
            look_for(path),
        )
    files = _images_in(path)
    if not files and by_class:
        # Class folders, as `stoker pack images` takes them: the first image of each class, then the second, ...
        classes = [_images_in(each) for each in sorted(path.iterdir()) if each.is_dir()]
        rounds = itertools.zip_longest(*classes)
        files = [file for one_each in rounds for file in one_each if file is not None]
    if not files:
        raise SourceError(
            f"{path} holds no images, and no class folders of images.",
            f"files ending in {', '.join(sorted(ENDINGS))}, or folder/<class>/<image>",
            command("ls", path),
        )
    return files


def _images_in(folder: Path) -> list[Path]:
    return sorted(
        each
        for each in folder.iterdir()
        if each.suffix.lower() in ENDINGS and each.is_file() and not each.name.startswith(".")
    )


def _mask_files(files: Sequence[Path], masks: Path | None) -> dict[Path, Path]:
    """Return the mask of every image, by name; one that is missing is an error."""
    if masks is None:
        return {}
    if masks.is_file():
        if len(files) != 1:
            raise InputError(
                f"--masks {masks} is one file for {len(files)} images.",
                "a folder of masks with the images' names",
                f"--masks {quoted(masks.parent)}",
            )
        return {files[0]: masks}
    there = {each.stem: each for each in _image_files(masks, by_class=False)}
    missing = [file for file in files if file.stem not in there]
    if missing:
        raise InputError(
            f"{masks} has no mask for {missing[0].name} and {len(missing) - 1} more."
            if len(missing) > 1
            else f"{masks} has no mask for {missing[0].name}.",
            "a mask with the same name for every image that is shown",
            f"{command('ls', masks)} shows them",
        )
    return {file: there[file.stem] for file in files}


def _from_files(file: Path, mask: Path | None, size: tuple[int, int]) -> Sample:
    image = pillow()
    decoded = _decode(file, "RGB")
    original = decoded.size
    if original != size[::-1]:
        decoded = decoded.resize(size[::-1], image.Resampling.BILINEAR)
    classes = None if mask is None else _read_mask(mask, file, original, size)
    return Sample(file.name, np.asarray(decoded, dtype=np.uint8), classes)


def _read_mask(path: Path, of: Path, expected: tuple[int, int], size: tuple[int, int]) -> Classes:
    decoded = _decode(path, None)
    if decoded.mode not in _SINGLE_CHANNEL:
        raise SourceError(
            f"mask {path} is {decoded.mode}, not one value per pixel.",
            "a grey or palette image whose values are classes",
            "convert it",
        )
    if decoded.size != expected:
        raise SourceError(
            f"mask {path} is {decoded.size[0]}x{decoded.size[1]} and {of.name} is "
            f"{expected[0]}x{expected[1]}.",
            "equal sizes",
            "the masks that belong to these images",
        )
    # Nearest by index: Pillow resizes some of these modes only after a conversion.
    values = np.asarray(decoded).astype(np.int64)
    down = (np.arange(size[0]) + 0.5) * values.shape[0] / size[0]
    across = (np.arange(size[1]) + 0.5) * values.shape[1] / size[1]
    picked: Classes = values[down.astype(np.int64)[:, None], across.astype(np.int64)[None, :]]
    return picked


def _decode(path: Path, mode: str | None) -> Any:
    """Return a decoded image, upright as its EXIF says, converted to `mode`."""
    image = decode(path, first_frame=True).image
    return image.convert(mode) if mode else image


def _from_store(store: Store, count: int, size: tuple[int, int] | None) -> list[Sample]:
    info = store.fields.get("images")
    if info is None or info.kind != "dense" or len(info.shape) != 3 or info.shape[0] not in (1, 3):
        known = ", ".join(f"{name} {tuple(about.shape)}" for name, about in store.fields.items())
        raise InputError(
            f"{store.name} has no field images of shape (1 or 3, H, W); it has {known}.",
            "a store that `stoker pack images` or `stoker pack segmentation` made",
            command("stoker", "inspect", store.name),
        )
    if np.dtype(info.dtype) != np.uint8:
        raise InputError(
            f"the images of {store.name} are {np.dtype(info.dtype).name}.",
            "uint8",
            "pack them again",
        )
    stored = (int(info.shape[1]), int(info.shape[2]))
    if size not in (None, stored):
        raise InputError(
            f"--size {size and size[0]}x{size and size[1]} and the store's images are {stored[0]}x{stored[1]}.",
            "the stored size",
            "leave --size out",
        )
    count = min(count, store.num_samples)
    if count == 0:
        raise InputError(
            f"{store.name} holds no samples.",
            "one at least",
            "stoker pack images FOLDER OUT --size 224x224",
        )
    images = store.read_rows("images", 0, count).transpose(0, 2, 3, 1)
    images = np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images
    masks = store.read_rows("masks", 0, count) if "masks" in store.fields else None
    return [
        Sample(
            f"row {row}",
            np.ascontiguousarray(images[row]),
            None if masks is None else masks[row].astype(np.int64),
        )
        for row in range(count)
    ]


def make_preview(
    samples: Sequence[Sample], compose: Compose, *, columns: int, epoch: int, ignore_index: int
) -> Any:
    """Return the sheet as a Pillow image: the original and `columns - 1` draws per sample."""
    draws = draw_columns(samples, compose, columns - 1, epoch)
    lines = []
    for number, sample in enumerate(samples):
        lines.append(Line([sample.image, *(images[number] for images, _ in draws)], sample.name))
        if sample.mask is not None:
            classes = [sample.mask, *(masks[number] for _, masks in draws)]
            lines.append(Line([colour_mask(each, ignore_index) for each in classes]))
    header = ["original", *(f"step {step}" for step in range(columns - 1))]
    masked = any(sample.mask is not None for sample in samples)
    footer = f"hatched: {ignore_index}, the ignore index" if masked else ""
    return make_sheet(lines, header, footer)


def draw_columns(
    samples: Sequence[Sample], compose: Compose, steps: int, epoch: int
) -> list[tuple[list[Pixels], list[Classes]]]:
    """Return, per step, the augmented images and masks of all samples."""
    images = torch.from_numpy(np.stack([sample.image for sample in samples])).permute(0, 3, 1, 2)
    given = [sample.mask for sample in samples if sample.mask is not None]
    masks = torch.from_numpy(np.stack(given)) if len(given) == len(samples) else None
    drawn = []
    for step in range(steps):
        compose.seek(epoch, step)
        made = compose(images.contiguous(), masks)
        out, out_masks = made if isinstance(made, tuple) else (made, None)
        classes = [] if out_masks is None else list(out_masks.numpy())
        drawn.append((to_pixels(out), classes))
    return drawn


def to_pixels(images: torch.Tensor) -> list[Pixels]:
    """Return float images (B, 3, H, W) in [0, 1] as arrays of bytes (H, W, 3)."""
    values = (images.clamp(0, 1) * 255).round().to(torch.uint8)
    return list(values.permute(0, 2, 3, 1).contiguous().numpy())


def check_output(out: Path, sources: Sequence[Path | None]) -> None:
    """Raise unless a picture can be written to `out` without losing another file.

    Args:
        out: The PNG to write. An older picture there is replaced; anything else is not.
        sources: Where images are read from; nothing is written there.
    """
    fix = "preview.png"
    if out.is_dir():
        raise InputError(f"{out} is a folder.", "a file ending in .png", quoted(out / fix))
    if out.suffix.lower() != ".png":
        raise InputError(
            f"{out} does not end in .png.", "a file ending in .png", quoted(out.with_suffix(".png"))
        )
    if not out.parent.is_dir():
        raise InputError(
            f"the folder {out.parent} does not exist.",
            "an existing folder",
            command("mkdir", "-p", out.parent),
        )
    if out.exists() and not _is_png(out):
        raise InputError(
            f"{out} exists and is not a PNG.",
            "a new file, or an older picture",
            quoted(free_name(out)),
        )
    for source in sources:
        if source is not None and out.resolve().is_relative_to(source.resolve()):
            raise InputError(
                f"{out} lies in {source}, which images are read from.",
                "another folder: the next run would take the picture for an image",
                quoted(free_name(Path(fix))),
            )


def _is_png(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8) == b"\x89PNG\r\n\x1a\n"


def write_png(sheet: Any, out: Path) -> None:
    """Write a Pillow image; if that fails, an older file there stays as it was."""
    from PIL.PngImagePlugin import PngInfo

    about = PngInfo()
    about.add_text("Software", SIGNATURE)
    with writing(out) as temporary:
        sheet.save(temporary, format="PNG", pnginfo=about)
