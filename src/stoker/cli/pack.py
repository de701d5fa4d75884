"""`stoker pack KIND ... OUT`: one subcommand per kind of raw data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stoker.pack import PackOptions, PackResult
    from stoker.sources.contract import Source

app = typer.Typer(
    help="Turn raw files into a store: parallel, resumable, checked.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Jobs = Annotated[
    int, typer.Option("--jobs", "-j", help="Worker processes; 0 means one per usable core.")
]
Force = Annotated[
    bool, typer.Option("--force-recreate", help="Pack again even when OUT is up to date.")
]
OnBad = Annotated[
    str,
    typer.Option(
        "--on-bad", help="stop: refuse the pack; quarantine: leave bad pieces out and list them."
    ),
]
Budget = Annotated[
    str, typer.Option("--bad-budget", help="Most that may be left out: a share (1%) or a number.")
]
Repair = Annotated[
    list[str] | None,
    typer.Option(
        "--repair",
        help="Repair of the features: clip, robust, asinh, fill, min-denominator:...; repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Out = Annotated[Path, typer.Argument(help="Folder of the store.", show_default=False)]


@app.command()
def arrays(
    files: Annotated[
        list[Path], typer.Argument(help=".npy, .npz or .h5 files, then OUT.", show_default=False)
    ],
    names: Annotated[
        str | None, typer.Option("--names", help="Field names, by commas, in the files' order.")
    ] = None,
    jobs: Jobs = 0,
    force_recreate: Force = False,
    on_bad: OnBad = "stop",
    bad_budget: Budget = "1%",
    repair: Repair = None,
    as_json: AsJson = False,
) -> None:
    """Pack numpy or HDF5 arrays of equal length, each as one field."""
    from stoker.sources.arrays import ArraysSource

    paths, out = _split_out(files)
    source = ArraysSource(paths, tuple(names.split(",")) if names else ())
    _pack(source, out, _options(jobs, force_recreate, on_bad, bad_budget, repair), as_json)


@app.command()
def table(
    files: Annotated[
        list[Path], typer.Argument(help="CSV or Parquet files, then OUT.", show_default=False)
    ],
    target: Annotated[str | None, typer.Option("--target", help="Column to predict.")] = None,
    drop: Annotated[
        list[str] | None, typer.Option("--drop", help="Column to leave out; repeatable.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Shares of train, validation, test in row order.")
    ] = None,
    jobs: Jobs = 0,
    force_recreate: Force = False,
    on_bad: OnBad = "stop",
    bad_budget: Budget = "1%",
    repair: Repair = None,
    as_json: AsJson = False,
) -> None:
    """Pack rows of CSV or Parquet files as one float32 table."""
    from stoker.sources.tables import TableSource

    paths, out = _split_out(files)
    shares = tuple(_numbers(split, "--split", "0.8,0.1,0.1")) if split else ()
    source = TableSource(paths, target, tuple(drop or ()), shares)
    _pack(source, out, _options(jobs, force_recreate, on_bad, bad_budget, repair), as_json)


@app.command()
def images(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder with one subfolder of images per class.", show_default=False),
    ],
    out: Out,
    size: Annotated[str, typer.Option("--size", help="Stored HEIGHTxWIDTH.")] = "224x224",
    channels: Annotated[int, typer.Option("--channels", help="3 for RGB, 1 for grey.")] = 3,
    jobs: Jobs = 0,
    force_recreate: Force = False,
    on_bad: OnBad = "stop",
    bad_budget: Budget = "1%",
    as_json: AsJson = False,
) -> None:
    """Pack class folders of images as uint8, decoded and resized once."""
    from stoker.sources.images import ImagesSource, parse_size

    source = ImagesSource(parse_size(size), channels, folder)  # type: ignore[arg-type]
    _pack(source, out, _options(jobs, force_recreate, on_bad, bad_budget), as_json)


@app.command()
def segmentation(
    out: Out,
    images: Annotated[Path, typer.Option("--images", help="Folder of images.", show_default=False)],
    masks: Annotated[
        Path,
        typer.Option("--masks", help="Folder of masks with the same names.", show_default=False),
    ],
    size: Annotated[str, typer.Option("--size", help="Stored HEIGHTxWIDTH.")] = "512x512",
    channels: Annotated[int, typer.Option("--channels", help="3 for RGB, 1 for grey.")] = 3,
    jobs: Jobs = 0,
    force_recreate: Force = False,
    on_bad: OnBad = "stop",
    bad_budget: Budget = "1%",
    as_json: AsJson = False,
) -> None:
    """Pack images and their masks as uint8, resized once (masks by nearest)."""
    from stoker.sources.images import SegmentationSource, parse_size

    source = SegmentationSource(parse_size(size), channels, images, masks)  # type: ignore[arg-type]
    _pack(source, out, _options(jobs, force_recreate, on_bad, bad_budget), as_json)


def _split_out(files: list[Path]) -> tuple[tuple[Path, ...], Path]:
    """The last of the paths is the store, as with `cp`."""
    from stoker.errors import InputError

    if len(files) < 2:
        raise InputError(
            f"only {files[0]} was given.",
            "input files, then the store's folder",
            f"{files[0]} store/",
        )
    return tuple(files[:-1]), files[-1]


def _numbers(text: str, option: str, example: str) -> list[float]:
    from stoker.errors import InputError

    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise InputError(
            f"{option} is {text!r}.", "numbers with commas", f"{option} {example}"
        ) from None


def _options(
    jobs: int, force_recreate: bool, on_bad: str, bad_budget: str, repair: list[str] | None = None
) -> PackOptions:
    from stoker.pack import PackOptions

    return PackOptions(jobs, force_recreate, on_bad, bad_budget, tuple(repair or ()))  # type: ignore[arg-type]


def _pack(source: Source, out: Path, options: PackOptions, as_json: bool) -> None:
    from stoker.cli.progress import Bar
    from stoker.pack import pack

    with Bar(quiet=as_json) as bar:
        result = pack(source, out, options, bar)
    if as_json:
        import json

        typer.echo(json.dumps(_facts(result)))
    else:
        print_result(result)


def _facts(result: PackResult) -> dict[str, object]:
    return {
        "path": str(result.path),
        "reused": result.reused,
        "reason": result.reason,
        "num_samples": result.manifest.num_samples,
        "num_bytes": sum(shard.size_bytes for shard in result.manifest.shards),
        "num_shards": len(result.manifest.shards),
        "num_refused": result.manifest.num_refused,
        "seconds": round(result.seconds, 3),
        "fields": {name: info.model_dump() for name, info in result.manifest.fields.items()},
        "quality": result.manifest.quality,
    }


def print_result(result: PackResult) -> None:
    """Print what a pack made, as a table for people."""
    from rich.console import Console

    from stoker.cli.tables import store_table
    from stoker.store.manifest import REFUSED_NAME
    from stoker.store.reader import open_store
    from stoker.units import format_count, format_seconds

    console = Console(soft_wrap=True)
    with open_store(result.path) as store:
        console.print(store_table(store))
    done = "is up to date" if result.reused else f"packed in {format_seconds(result.seconds)}"
    console.print(
        f"{result.path} {done}: {format_count(result.manifest.num_samples)} samples",
        highlight=False,
    )
    if result.manifest.num_refused:
        listed = result.path / REFUSED_NAME
        console.print(
            f"{format_count(result.manifest.num_refused)} pieces of input were refused; see {listed}",
            highlight=False,
        )
    if result.inspection is not None:
        for line in result.inspection.lines()[:10]:
            console.print(f"  {line}", highlight=False, markup=False)
