"""`stoker augment`: look at what augmentation does, before anything is trained.

Enters: images, masks, an augmentation by name or by config. Leaves: a PNG to look at, and a line that
says what it shows. Costs a second or two; needs Pillow.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stoker.cli.options import JsonOption, verb
from stoker.cli.renamed import PASS_ON, augment_pictures
from stoker.cli.terminal import echo, print_json
from stoker.errors import InputError

if TYPE_CHECKING:
    from stoker.augment.compose import Compose

app = typer.Typer(
    no_args_is_help=True,
    help="Draw what augmentation does to your images before you train with it.",
)


@app.command()
@verb
def preview(
    images: Path,
    out: Path,
    *,
    masks: Path | None = None,
    rows: int = 4,
    columns: int = 6,
    preset: str | None = None,
    config: Path | None = None,
    seed: int = 0,
    epoch: int = 0,
    size: str | None = None,
    ignore_index: int = 255,
    as_json: JsonOption = False,
) -> None:
    """Write a grid: every image, its draws, and the masks that follow them.

    Options:
        images: Folder of images, one image, or a packed store.
        out: PNG to write.
        masks: Folder of masks with the images' names.
        rows: Images to show, from the first.
        columns: The original and its draws.
        preset: standard (the default), minimal or strong.
        config: Config file whose gpu_augmentation to show.
        seed: Seed of the draws.
        epoch: Epoch whose draws to show.
        size: HEIGHTxWIDTH to resize to; by default at most 384.
        ignore_index: Class of pixels to ignore; fills corners.
    """
    from stoker.augment.preview import check_output, make_preview, read_samples, write_png
    from stoker.sources.images import parse_size

    limits = {
        "--rows": (rows, 1, 64, 4),
        "--columns": (columns, 2, 64, 6),
        "--epoch": (epoch, 0, 2**31 - 1, 0),
        "--seed": (seed, 0, 2**63 - 1, 0),
    }
    for name, (value, low, high, usual) in limits.items():
        if not low <= value <= high:
            raise InputError(f"{name} is {value}.", f"{low} to {high:,}", f"{name} {usual}")
    check_output(out, (images, masks))
    wanted = None if size is None else parse_size(size)
    if wanted is not None and (min(wanted) < 2 or max(wanted) > 4096):
        raise InputError(f"--size is {size}.", "2 to 4,096 a side", "--size 360x480")
    compose = _compose(preset, config, seed, ignore_index)
    samples = read_samples(images, masks, rows, wanted)
    sheet = make_preview(samples, compose, columns=columns, epoch=epoch, ignore_index=ignore_index)
    write_png(sheet, out)
    shape = samples[0].image.shape
    facts = {
        "out": str(out),
        "images": [sample.name for sample in samples],
        "size": [shape[0], shape[1]],
        "masks": samples[0].mask is not None,
        "augmentation": str(config) if config is not None else preset or "standard",
        "ops": [str(op) for op in compose.ops],
        "seed": seed,
        "epoch": epoch,
    }
    if as_json:
        print_json(facts)
        return
    echo(
        f"{out}: {len(samples)} images of {shape[0]}x{shape[1]}, {columns - 1} draws each, "
        f"{facts['augmentation']}, seed {seed}, epoch {epoch}"
    )
    for op in compose.ops:
        echo(f"  {op}")


app.command("pictures", hidden=True, context_settings=PASS_ON)(augment_pictures)


def _compose(preset: str | None, config: Path | None, seed: int, ignore_index: int) -> Compose:
    """Return the requested augmentation without normalisation, whose result would not look right."""
    from stoker.augment.presets import PRESETS, make_preset

    if config is not None:
        if preset is not None:
            raise InputError(
                f"--preset {preset} and --config {config}.", "one of them", "leave --preset out"
            )
        from stoker.compat.augmentation import augmentation_from_settings
        from stoker.config import load_config, resolve

        settings = resolve(load_config(config)).augmentation
        made = augmentation_from_settings(
            settings, seed=seed, ignore_index=ignore_index, backend="torch"
        )
        if made is None:
            raise InputError(
                f"{config} does not augment on the GPU.",
                "training.use_gpu_augmentation: true",
                "stoker config show CONFIG",
            )
        return made
    name = preset or "standard"
    if name not in PRESETS:
        raise InputError(f"--preset is {name!r}.", ", ".join(PRESETS), "--preset strong")
    return make_preset(name, seed=seed, ignore_index=ignore_index, backend="torch")
