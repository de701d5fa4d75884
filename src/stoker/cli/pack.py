"""`stoker pack KIND ... OUT`: one subcommand per kind of raw data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from stoker.address import shown
from stoker.cli.data_options import (
    BarReading,
    Chosen,
    Labels,
    Masks,
    Packing,
    Pictures,
    SpectrumPacking,
    Stride,
    Table,
    Text,
    split_names,
)
from stoker.cli.options import JsonOption, verb
from stoker.cli.terminal import Bar, make_console, print_json, store_table
from stoker.display import command, printable
from stoker.errors import InputError
from stoker.ownership import write_text
from stoker.units import format_count, format_seconds

if TYPE_CHECKING:
    from stoker.packing import PackResult
    from stoker.sources.contract import Source

_NOTES = 12
Word = TypeVar("Word", str, Path)

app = typer.Typer(
    help="Turn raw files into a store: in parallel, resumable, checked.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[Path, typer.Argument(help="Folder of the store.")]
Repair = Annotated[
    list[str] | None,
    typer.Option(
        "--repair",
        help="Repair of the features: clip, robust, asinh, fill, min-denominator:...; repeatable.",
    ),
]
RowShares = Annotated[
    str | None, typer.Option("--split", help="Shares of train, validation, test in row order.")
]


@app.command()
@verb
def arrays(
    files: list[Path],
    *,
    names: str | None = None,
    chosen: Chosen,
    packing: Packing,
    repair: Repair = None,
    as_json: JsonOption = False,
) -> None:
    """Pack numpy or HDF5 arrays of equal length, each as one field.

    Options:
        files: .npy, .npz or .h5 files, then OUT.
        names: Field names, separated by commas, in the order of the files.
    """
    from stoker.sources.arrays import ArraysSource

    paths, out = _split_out(files)
    source = ArraysSource(paths, split_names(names), chosen=chosen.selection())
    _pack(source, out, packing, as_json, repair or ())


@app.command()
@verb
def table(
    files: list[Path],
    *,
    columns: Table,
    missing: str = "stop",
    text: Text,
    split: RowShares = None,
    packing: Packing,
    repair: Repair = None,
    as_json: JsonOption = False,
) -> None:
    """Pack rows of tables: numbers, texts, dates and booleans as one table of numbers.

    Options:
        files: CSV, Parquet or Feather files, folders or patterns, then OUT.
    """
    paths, out = _split_out(files)
    source = columns.source(paths, text, _shares(split) if split else ())
    fills = {"median": ["fill:median"], "flag": ["fill:median"], "zero": ["fill:0"]}
    _pack(source, out, packing, as_json, [*(repair or []), *fills.get(missing, [])])


@app.command()
@verb
def images(
    folder: Path,
    out: Out,
    *,
    size: Annotated[str | None, typer.Option(show_default="224x224")] = None,
    labels: Labels,
    pictures: Pictures,
    packing: Packing,
    as_json: JsonOption = False,
) -> None:
    """Pack class folders of images: as uint8, decoded and resized once, or as the bytes of their files.

    Options:
        folder: Folder with one subfolder of images per class, perhaps below train, val and test.
        size: Stored HEIGHTxWIDTH.
    """
    from stoker.sources.images import ImagesSource

    settings = pictures.settings(size, "224x224")
    source = ImagesSource(folder=folder, **vars(labels), **settings)
    _pack(source, out, packing, as_json)


@app.command()
@verb
def segmentation(
    files: list[Path],
    *,
    images: Path | None = None,
    masks: Path | None = None,
    size: Annotated[str | None, typer.Option(show_default="512x512")] = None,
    how: Masks,
    pictures: Pictures,
    packing: Packing,
    as_json: JsonOption = False,
) -> None:
    """Pack images and their masks: as uint8, resized once (masks by nearest), or as the bytes of files.

    Options:
        files: OUT with --images and --masks; or FOLDER OUT: of Pascal VOC, of COCO outlines, or with images and masks.
        images: Folder of images.
        masks: Folder of masks with the same names, which may be the same; or a COCO file.
        size: Stored HEIGHTxWIDTH.
    """
    from stoker.sources.images import SegmentationSource, find_scenes

    settings = how.settings() | pictures.settings(size, "512x512")
    if (images is None) != (masks is None) or len(files) != (2 if images is None else 1):
        words: tuple[str | Path, ...] = images or files[0], "OUT"
        if len(files) == 3 and images is None and masks is None:
            words = "--images", files[0], "--masks", *files[1:]
        raise InputError(
            f"{format_count(len(files), 'path')}, and {'no' if images is None else 'an'} --images and "
            f"{'no' if masks is None else 'a'} --masks.",
            "one folder of images and masks, then the store's folder; or --images, --masks and the store's folder",
            f"stoker pack segmentation {command(*words)}",
        )
    if images is None or masks is None:
        found = find_scenes(files[0])
        images, masks = found.images, found.masks
        settings["lists"] = settings["lists"] or found.lists
        if found.said and not as_json:
            make_console(stderr=True).print(f"{files[0]}: {found.said}", markup=False)
    _pack(SegmentationSource(images=images, masks=masks, **settings), files[-1], packing, as_json)


@app.command()
@verb
def bars(
    files: list[str],
    *,
    windows: str = "M1=480,M5=288,M15=192,H1=96,H4=48",
    horizon: int = 36,
    base: str | None = None,
    ratios: Annotated[str, typer.Option("--split")] = "0.70,0.15,0.15",
    embargo: int | None = None,
    latency: float = 0.0,
    split_at: str | None = None,
    max_label_gap: int | None = None,
    reading: BarReading,
    packing: Packing,
    as_json: JsonOption = False,
) -> None:
    """Pack bars of several timeframes: each bar once, each sample a few end indices, no look-ahead.

    Options:
        files: CSV, Parquet or Feather files or folders, SYMBOL:TF=file to name one, then OUT.
        windows: Bars per window, by timeframe.
        horizon: Base bars ahead that the targets cover.
        base: Timeframe that decides and is forecast [default: M5, else the shortest].
        ratios: Shares of train, validation, test in time order.
        embargo: Base bars left out after each boundary [default: the horizon].
        latency: Seconds after its close before a bar may be used.
        split_at: Last dates of train and validation, instead of shares.
        max_label_gap: Leave out samples whose label misses more bars in a row.
    """
    from stoker.sources.bars import BarsSource, parse_windows

    paths, out = _split_out(files)
    source = BarsSource(
        paths,
        windows=parse_windows(windows),
        base=base,
        horizon=horizon,
        latency_seconds=latency,
        ratios=_shares(ratios),
        embargo=embargo,
        split_at=_dates(split_at),
        max_label_gap=max_label_gap,
        **reading.settings(),
    )
    _pack(source, out, packing, as_json)


@app.command()
@verb
def series(
    files: list[Path],
    *,
    window: int,
    stride: Stride = None,
    dtype: str | None = None,
    columns: str | None = None,
    time_column: str | None = None,
    split: RowShares = None,
    name: str = "series",
    packing: Packing,
    as_json: JsonOption = False,
) -> None:
    """Pack a series of numbers or tokens: each row once, windows cut on the device.

    Options:
        files: .npy, .npz, .h5, CSV, Parquet, or any file and --dtype; then OUT.
        window: Rows of a window.
        dtype: Type of raw numbers, such as uint16, or uint8 for bytes of a text.
        columns: Columns of a table, separated by commas, or one array.
        time_column: Column of times, stored with gaps.
        name: Name of the field.
    """
    from stoker.sources.series import SeriesSource

    paths, out = _split_out(files)
    names, shares = split_names(columns), _shares(split) if split else ()
    source = SeriesSource(paths, window, stride, dtype, names, time_column, shares, name)
    _pack(source, out, packing, as_json)


@dataclass(frozen=True)
class Library:
    """A spectrum library and how it is packed: keywords of `MassSpecSource`, and the shares of its splits.

    Attributes:
        msp: Spectrum library: MSP, MSL, MGF, MassBank, SDF with peaks, mzML, gzipped or not; or a folder.
        mol_dir: Folder or zip of MOL files, or one SDF.
        max_mz: Highest bin: max_mz + 1 bins at read time.
        max_samples: Stop after this many records.
        structures: mol: MOL files only; smiles: the record's SMILES or InChI; auto: MOL, else these; none.
        rounding: How an m/z finds its bin: nearest (halves up) or floor.
        row_limit_seconds: Time limit of one molecule.
        split: Shares of train, validation, test; by compound.
        seed: Seed of the split.
        spectra: Kinds to take: ei, msms, ms1, all; auto refuses a library that mixes them.
        without_spectra: Keep records without peaks, for prediction.
    """

    msp: Path
    mol_dir: Path | None = None
    max_mz: int = 500
    max_samples: int | None = None
    structures: str = "auto"
    rounding: str = "nearest"
    row_limit_seconds: Annotated[float, typer.Option("--molecule-seconds")] = 10.0
    split: str = "0.8,0.1,0.1"
    seed: int = 42
    spectra: str = "auto"
    without_spectra: bool = False


@app.command()
@verb
def massspec(
    out: Out, *, library: Library, packing: SpectrumPacking, as_json: JsonOption = False
) -> None:
    """Pack a spectrum library and its molecules: spectra, graphs, fingerprints, groups."""
    from stoker.sources.massspec import MassSpecSource

    settings: dict[str, Any] = dict(vars(library))
    train_ratio, val_ratio, _ = _shares(settings.pop("split"))
    source = MassSpecSource(**settings, train_ratio=train_ratio, val_ratio=val_ratio)
    _pack(source, out, packing, as_json)


def _split_out(files: list[Word]) -> tuple[tuple[Word, ...], Path]:
    """Split off the last path, which is the store, as with `cp`."""
    if len(files) < 2:
        raise InputError(
            f"only {files[0]} was given.",
            "input files, then the store's folder",
            command(files[0], "store/"),
        )
    if Path(files[-1]).is_file() and not any(map(os.path.exists, files[:-1])):
        raise InputError(
            f"{files[-1]} is a file, and {files[0]} does not exist.",
            "input files, then the store's folder",
            command(files[-1], *files[:-1]),
        )
    return tuple(files[:-1]), Path(files[-1])


def _shares(text: str) -> tuple[float, float, float]:
    """Return three shares that add up to 1."""
    from stoker.sources.contract import check_shares

    try:
        train, val, test = (float(number) for number in text.split(","))
        check_shares((train, val, test))
    except ValueError:  # an InputError too: here the option is known
        raise InputError(
            f"--split is {text!r}.", "three shares that add up to 1", "--split 0.8,0.1,0.1"
        ) from None
    return train, val, test


def _dates(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    dates = [date.strip() for date in text.split(",")]
    if len(dates) != 2:
        raise InputError(
            f"--split-at is {text!r}.", "two dates", "--split-at 2020-09-01,2020-10-01"
        )
    return dates[0], dates[1]


def _pack(
    source: Source, out: Path, packing: Packing, as_json: bool, repairs: Sequence[str] = ()
) -> None:
    from stoker.packing import pack

    with Bar(quiet=as_json) as bar:
        try:
            result = pack(source, out, packing.options(repairs), bar)
        except KeyboardInterrupt:
            bar.say("finished parts are kept; the same command goes on from there")
            raise
    if not as_json:
        print_result(result)
        return
    if _lacks_page(result):
        _write_page(result)
    print_json(_facts(result))


def _lacks_page(result: PackResult) -> bool:
    """Return whether the store is to get its page of samples: it is new, or its pack was ended before it had one."""
    from stoker.store.manifest import PAGE_NAME

    missing = not os.path.lexists(result.path / PAGE_NAME)
    return not result.reused or (missing and os.access(result.path, os.W_OK))


def _write_page(result: PackResult) -> dict[str, str]:
    """Write the page of samples of a store that was just packed; return the facts about them."""
    from stoker.packing.samples import sample_facts, samples_of, samples_page
    from stoker.sources.contract import Account
    from stoker.store.inspection import inspect_store
    from stoker.store.manifest import PAGE_NAME
    from stoker.store.reader import open_store

    with open_store(result.path) as store:
        samples = samples_of(store)
        inspection = result.inspection or inspect_store(store)
    facts = sample_facts(samples)
    counts = Account(**result.manifest.counts).lines() if result.manifest.counts else []
    notes = [str(note) for note in result.manifest.attributes.get("notes", [])]
    about = {"input": "; ".join(line.strip() for line in counts)}
    about |= facts | {f"note {number}": note for number, note in enumerate(notes, 1)}
    text = samples_page(f"samples of {shown(result.path)}", inspection, about, samples)
    write_text(result.path / PAGE_NAME, text)
    return facts


def _facts(result: PackResult) -> dict[str, object]:
    from stoker.store.manifest import PAGE_NAME

    page = result.path / PAGE_NAME
    return {
        "path": str(result.path),
        "page": str(page) if page.exists() else None,
        "reused": result.reused,
        "reason": result.reason,
        "num_samples": result.manifest.num_samples,
        "num_bytes": sum(shard.size_bytes for shard in result.manifest.shards),
        "num_shards": len(result.manifest.shards),
        "num_refused": result.manifest.num_refused,
        "counts": result.manifest.counts,
        "seconds": round(result.seconds, 3),
        "fields": {name: info.model_dump() for name, info in result.manifest.fields.items()},
        "quality": result.manifest.quality,
    }


def print_result(result: PackResult) -> None:
    """Print the result of a pack as a table; write the page of samples if the store is new or has none."""
    from stoker.sources.contract import Account
    from stoker.store.manifest import PAGE_NAME, REFUSED_NAME
    from stoker.store.reader import open_store

    console = make_console(soft_wrap=True)
    with open_store(result.path) as store:
        console.print(store_table(store))
    done = "is up to date" if result.reused else f"packed in {format_seconds(result.seconds)}"
    console.print(f"{result.path} {done}: {format_count(result.manifest.num_samples, 'sample')}")
    notes = [] if result.reused else result.manifest.attributes.get("notes", [])
    for note in notes[:_NOTES]:
        console.print(printable(str(note)))
    if len(notes) > _NOTES:
        console.print(f"... and {len(notes) - _NOTES} more notes")
    for account in result.manifest.attributes.get("accounts", []):
        for line in Account(**account).lines():
            console.print(printable(line))
    if result.manifest.num_refused:
        refused = format_count(result.manifest.num_refused, "piece")
        console.print(f"{refused} of input refused; see {result.path / REFUSED_NAME}")
    for what, value in (_write_page(result) if _lacks_page(result) else {}).items():
        console.print(printable(f"{what}: {value}"))
    if (result.path / PAGE_NAME).exists():
        console.print(f"samples as the model gets them: {result.path / PAGE_NAME}")
    if result.inspection is not None:
        for line in result.inspection.lines()[:10]:
            console.print(f"  {line}")
