"""`stoker pack KIND ... OUT`: one subcommand per kind of raw data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from stoker.cli.options import JsonOption
from stoker.cli.picture_options import (
    Encoded,
    FirstFrame,
    ImageSize,
    Lists,
    MaskSize,
    MaxSide,
    Quality,
    Range,
    kept_encoded,
)
from stoker.cli.terminal import make_console, print_json
from stoker.display import command, printable

if TYPE_CHECKING:
    from stoker.packing import PackOptions, PackResult
    from stoker.sources.contract import Source
    from stoker.sources.tables import TableSource

_NOTES = 12
Word = TypeVar("Word", str, Path)

app = typer.Typer(
    help="Turn raw files into a store: in parallel, resumable, checked.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Jobs = Annotated[
    int, typer.Option("--jobs", "-j", help="Worker processes; 0 means one per usable core.")
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Build on a Dask cluster: its scheduler's address, such as tcp://10.0.0.1:8786.",
        show_default=False,
    ),
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
Separator = Annotated[
    str | None,
    typer.Option(
        "--sep",
        help="Between cells: a character, or comma, semicolon, tab, bar, whitespace [default: found].",
        show_default=False,
    ),
]
Decimal = Annotated[
    str | None,
    typer.Option("--decimal", help="Decimal sign, . or , [default: found].", show_default=False),
]
Encoding = Annotated[
    str | None,
    typer.Option(
        "--encoding", help="Of text files, such as cp1252 [default: found].", show_default=False
    ),
]
Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="Whether the first line names the columns [default: found, or asked].",
        show_default=False,
    ),
]
Drop = Annotated[list[str] | None, typer.Option("--drop", help="Column to leave out; repeatable.")]
Keep = Annotated[
    list[str] | None,
    typer.Option("--keep", help="Take only such columns, and the target; repeatable."),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        help="NAME=KIND where the values do not say it: number, float64, bool, category, one-hot, codes, date, "
        "day-first, month-first, seconds; repeatable.",
    ),
]
Missing = Annotated[
    str,
    typer.Option(
        "--missing",
        help="Missing numbers: stop: refuse them; median or zero: fill them; flag: fill by the median and mark them "
        "in a column of their own; drop: leave their rows out.",
    ),
]
Out = Annotated[Path, typer.Argument(help="Folder of the store.", show_default=False)]
Fields = Annotated[
    str | None,
    typer.Option(
        "--fields", help="Arrays of an HDF5 or .npz file, by commas.", show_default="all that fit"
    ),
]
Group = Annotated[
    str | None,
    typer.Option("--group", help="Group of an HDF5 or .npz file that holds the arrays."),
]
Rows = Annotated[
    int | None,
    typer.Option("--rows", min=0, help="Only arrays with this many rows, of an HDF5 or .npz file."),
]


@app.command()
def arrays(
    files: Annotated[
        list[Path], typer.Argument(help=".npy, .npz or .h5 files, then OUT.", show_default=False)
    ],
    names: Annotated[
        str | None, typer.Option("--names", help="Field names, by commas, in the files' order.")
    ] = None,
    fields: Fields = None,
    group: Group = None,
    rows: Rows = None,
    jobs: Jobs = 0,
    cluster: Cluster = None,
    force_recreate: Force = False,
    on_bad: OnBad = "stop",
    bad_budget: Budget = "1%",
    repair: Repair = None,
    as_json: JsonOption = False,
) -> None:
    """Pack numpy or HDF5 arrays of equal length, each as one field."""
    from stoker.sources.arrays import ArraysSource
    from stoker.store.plain import Selection

    paths, out = _split_out(files)
    chosen = Selection(group, tuple(fields.split(",")) if fields else (), rows)
    source = ArraysSource(paths, tuple(names.split(",")) if names else (), chosen=chosen)
    _pack(source, out, _options(jobs, cluster, force_recreate, on_bad, bad_budget, repair), as_json)


@app.command()
def table(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="CSV, Parquet or Feather files, folders or patterns, then OUT.", show_default=False
        ),
    ],
    target: Annotated[str | None, typer.Option("--target", help="Column to predict.")] = None,
    drop: Drop = None,
    keep: Keep = None,
    dtype: Dtype = None,
    missing: Missing = "stop",
    sep: Separator = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    header: Header = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Shares of train, validation, test in row order.")
    ] = None,
    jobs: Jobs = 0,
    cluster: Cluster = None,
    force_recreate: Force = False,
    on_bad: OnBad = "stop",
    bad_budget: Budget = "1%",
    repair: Repair = None,
    as_json: JsonOption = False,
) -> None:
    """Pack rows of tables: numbers, texts, dates and booleans as one table of numbers."""
    paths, out = _split_out(files)
    source = table_source(
        paths, target, drop, keep, dtype, missing, sep, decimal, encoding, header,
        _shares(split) if split else (),
    )  # fmt: skip
    fills = {"median": ["fill:median"], "flag": ["fill:median"], "zero": ["fill:0"]}
    repairs = [*(repair or []), *fills.get(missing, [])]
    _pack(
        source, out, _options(jobs, cluster, force_recreate, on_bad, bad_budget, repairs), as_json
    )


def table_source(
    paths: tuple[Path, ...],
    target: str | None,
    drop: list[str] | None,
    keep: list[str] | None,
    dtype: list[str] | None,
    missing: str,
    sep: str | None,
    decimal: str | None,
    encoding: str | None,
    header: bool | None,
    shares: tuple[float, ...] = (),
) -> TableSource:
    """Return the source that the options of `pack table` and `inspect` ask for."""
    from stoker.errors import InputError
    from stoker.sources.tables import TableSource, TextOptions, parse_dtypes

    allowed = ("stop", "median", "zero", "flag", "drop")
    if missing not in allowed:
        raise InputError(f"--missing is {missing!r}.", ", ".join(allowed), "--missing median")
    return TableSource(
        paths,
        target,
        tuple(drop or ()),
        shares,
        keep=tuple(keep or ()),
        dtypes=parse_dtypes(dtype or ()),
        missing={"median": "keep", "zero": "keep"}.get(missing, missing),
        text=TextOptions(sep, decimal, encoding, header),
    )


DayFirst = Annotated[
    bool | None,
    typer.Option(
        "--day-first/--month-first", help="How 10/11/2020 reads [default: found out, or asked]."
    ),
]
TimeZone = Annotated[
    str | None, typer.Option("--tz", help="Zone of the files' clock, such as Europe/Athens.")
]
Sort = Annotated[bool, typer.Option("--sort", help="Sort files of bars that are in no order.")]
TimeColumn = Annotated[
    str | None,
    typer.Option(
        "--time-column", help="Name of the time column, or DATE+TIME for two [default: found]."
    ),
]
BarColumns = Annotated[
    str | None,
    typer.Option(
        "--columns", help="What the file calls them: open=NAME,high=NAME,low=NAME,close=NAME."
    ),
]
Stamp = Annotated[
    str, typer.Option("--stamp", help="Whether a bar's time is its open or its close.")
]


@app.command()
def images(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder with one subfolder of images per class, perhaps below train, val and test.",
            show_default=False,
        ),
    ],
    out: Out,
    size: ImageSize = None,
    channels: Annotated[int, typer.Option("--channels", help="3 for RGB, 1 for grey.")] = 3,
    labels: Annotated[
        Path | None,
        typer.Option(
            "--labels",
            help="CSV of names and labels, instead of class folders.",
            show_default=False,
        ),
    ] = None,
    label_column: Annotated[
        str | None,
        typer.Option(
            "--label-column", help="Column of labels in it [default: found].", show_default=False
        ),
    ] = None,
    lists: Lists = None,
    value_range: Range = None,
    first_frame: FirstFrame = False,
    keep_encoded: Encoded = False,
    max_side: MaxSide = None,
    quality: Quality = None,
    jobs: Jobs = 0,
    cluster: Cluster = None,
    force_recreate: Force = False,
    on_bad: OnBad = "stop",
    bad_budget: Budget = "1%",
    as_json: JsonOption = False,
) -> None:
    """Pack class folders of images: as uint8, decoded and resized once, or as the bytes of their files."""
    from stoker.sources.images import ImagesSource, parse_range, parse_size

    kept = kept_encoded(keep_encoded, size, max_side, quality)
    source = ImagesSource(
        parse_size(size or "224x224"),
        channels,  # type: ignore[arg-type]
        folder,
        labels,
        label_column,
        value_range=parse_range(value_range),
        first_frame=first_frame,
        lists=tuple(lists or ()),
        keep_encoded=kept,
    )
    _pack(source, out, _options(jobs, cluster, force_recreate, on_bad, bad_budget), as_json)


@app.command()
def segmentation(
    out: Out,
    images: Annotated[Path, typer.Option("--images", help="Folder of images.", show_default=False)],
    masks: Annotated[
        Path,
        typer.Option(
            "--masks",
            help="Folder of masks with the same names; may be the same.",
            show_default=False,
        ),
    ],
    size: MaskSize = None,
    channels: Annotated[int, typer.Option("--channels", help="3 for RGB, 1 for grey.")] = 3,
    mask_suffix: Annotated[
        str,
        typer.Option(
            "--mask-suffix", help="What mask names have behind the image's: _L for x_L.png."
        ),
    ] = "",
    image_suffix: Annotated[
        str,
        typer.Option("--image-suffix", help="What image names have behind the part they share."),
    ] = "",
    mask_prefix: Annotated[
        str, typer.Option("--mask-prefix", help="What mask names have before the image's.")
    ] = "",
    mask_map: Annotated[
        list[str] | None,
        typer.Option(
            "--mask-map",
            help="Class of mask values or colours: 255=1, 0-127=0, #ff0000=2, other=255; or keep. Repeatable.",
            show_default=False,
        ),
    ] = None,
    mask_colors: Annotated[
        Path | None,
        typer.Option(
            "--mask-colors", help="Table of colours: r, g, b and a name a line.", show_default=False
        ),
    ] = None,
    mask_orientation: Annotated[
        str,
        typer.Option(
            "--mask-orientation",
            help="Masks without EXIF beside images with: image (turned like it), upright, or auto by size.",
        ),
    ] = "auto",
    lists: Lists = None,
    value_range: Range = None,
    first_frame: FirstFrame = False,
    keep_encoded: Encoded = False,
    max_side: MaxSide = None,
    quality: Quality = None,
    jobs: Jobs = 0,
    cluster: Cluster = None,
    force_recreate: Force = False,
    on_bad: OnBad = "stop",
    bad_budget: Budget = "1%",
    as_json: JsonOption = False,
) -> None:
    """Pack images and their masks: as uint8, resized once (masks by nearest), or as the bytes of files."""
    from stoker.sources.images import SegmentationSource, parse_range, parse_size

    kept = kept_encoded(keep_encoded, size, max_side, quality)
    source = SegmentationSource(
        parse_size(size or "512x512"),
        channels,  # type: ignore[arg-type]
        images,
        masks,
        mask_suffix,
        image_suffix,
        mask_prefix,
        tuple(mask_map or ()),
        mask_colors,
        mask_orientation,  # type: ignore[arg-type]
        value_range=parse_range(value_range),
        first_frame=first_frame,
        lists=tuple(lists or ()),
        keep_encoded=kept,
    )
    _pack(source, out, _options(jobs, cluster, force_recreate, on_bad, bad_budget), as_json)


@app.command()
def bars(
    files: Annotated[
        list[str],
        typer.Argument(
            help="CSV, Parquet or Feather files or folders, SYMBOL:TF=file to name one, then OUT.",
            show_default=False,
        ),
    ],
    windows: Annotated[
        str, typer.Option("--windows", help="Bars per window, by timeframe.")
    ] = "M1=480,M5=288,M15=192,H1=96,H4=48",
    horizon: Annotated[
        int, typer.Option("--horizon", help="Base bars ahead that the targets cover.")
    ] = 36,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="Timeframe that decides and is forecast [default: M5, else the shortest].",
        ),
    ] = None,
    ratios: Annotated[
        str, typer.Option("--split", help="Shares of train, validation, test in time order.")
    ] = "0.70,0.15,0.15",
    embargo: Annotated[
        int | None,
        typer.Option(
            "--embargo", help="Base bars left out after each boundary [default: the horizon]."
        ),
    ] = None,
    latency: Annotated[
        float, typer.Option("--latency", help="Seconds after its close before a bar may be used.")
    ] = 0.0,
    day_first: DayFirst = None,
    time_zone: TimeZone = None,
    sort: Sort = False,
    split_at: Annotated[
        str | None,
        typer.Option("--split-at", help="Last dates of train and validation, instead of shares."),
    ] = None,
    max_label_gap: Annotated[
        int | None,
        typer.Option(
            "--max-label-gap", help="Leave out samples whose label misses more bars in a row."
        ),
    ] = None,
    time_column: TimeColumn = None,
    columns: BarColumns = None,
    drop: Drop = None,
    stamp: Stamp = "open",
    decimal: Decimal = None,
    jobs: Jobs = 0,
    cluster: Cluster = None,
    force_recreate: Force = False,
    on_bad: OnBad = "stop",
    bad_budget: Budget = "1%",
    as_json: JsonOption = False,
) -> None:
    """Pack bars of several timeframes: each bar once, each sample a few end indices, no look-ahead."""
    from stoker.sources.bars import BarsSource, Naming, parse_windows

    paths, out = _split_out(files)
    shares = _shares(ratios)
    source = BarsSource(
        paths,
        windows=parse_windows(windows),
        base=base,
        horizon=horizon,
        latency_seconds=latency,
        ratios=shares,
        embargo=embargo,
        day_first=day_first,
        tz=time_zone,
        sort=sort,
        split_at=_dates(split_at),
        max_label_gap=max_label_gap,
        naming=Naming.parse(time_column, columns, drop or ()),
        stamp=stamp,
        decimal=decimal,
    )
    _pack(source, out, _options(jobs, cluster, force_recreate, on_bad, bad_budget), as_json)


Stride = Annotated[
    int | None,
    typer.Option(
        "--stride",
        help="Rows from one window to the next [default: the window].",
        show_default=False,
    ),
]


@app.command()
def series(
    files: Annotated[
        list[Path],
        typer.Argument(
            help=".npy, .npz, .h5, CSV, Parquet, or any file and --dtype; then OUT.",
            show_default=False,
        ),
    ],
    window: Annotated[int, typer.Option("--window", help="Rows of a window.")],
    stride: Stride = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Type of raw numbers, such as uint16, or uint8 for bytes of a text.",
            show_default=False,
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns", help="Columns of a table, by commas, or one array.", show_default=False
        ),
    ] = None,
    time_column: Annotated[
        str | None,
        typer.Option(
            "--time-column", help="Column of times, stored with gaps.", show_default=False
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Shares of train, validation, test in row order.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the field.")] = "series",
    jobs: Jobs = 0,
    cluster: Cluster = None,
    force_recreate: Force = False,
    on_bad: OnBad = "stop",
    bad_budget: Budget = "1%",
    as_json: JsonOption = False,
) -> None:
    """Pack a series of numbers or tokens: each row once, windows cut on the device."""
    from stoker.sources.series import SeriesSource

    paths, out = _split_out(files)
    source = SeriesSource(
        paths,
        window,
        stride,
        dtype,
        tuple(columns.split(",")) if columns else (),
        time_column,
        _shares(split) if split else (),
        name,
    )
    _pack(source, out, _options(jobs, cluster, force_recreate, on_bad, bad_budget), as_json)


@app.command()
def massspec(
    out: Out,
    msp: Annotated[
        Path,
        typer.Option(
            "--msp",
            help="Spectrum library: MSP, MSL, MGF, MassBank, SDF with peaks, mzML, gzipped or not; or a folder.",
            show_default=False,
        ),
    ],
    mol_dir: Annotated[
        Path | None,
        typer.Option(
            "--mol-dir", help="Folder or zip of MOL files, or one SDF.", show_default=False
        ),
    ] = None,
    max_mz: Annotated[
        int, typer.Option("--max-mz", help="Highest bin: max_mz + 1 bins at read time.")
    ] = 500,
    max_samples: Annotated[
        int | None, typer.Option("--max-samples", help="Stop after so many records.")
    ] = None,
    structures: Annotated[
        str,
        typer.Option(
            "--structures",
            help="mol: MOL files only; smiles: the record's SMILES or InChI; auto: MOL, else these; none.",
        ),
    ] = "auto",
    rounding: Annotated[
        str,
        typer.Option("--rounding", help="How an m/z finds its bin: nearest (halves up) or floor."),
    ] = "nearest",
    molecule_seconds: Annotated[
        float, typer.Option("--molecule-seconds", help="Time limit of one molecule.")
    ] = 10.0,
    split: Annotated[
        str, typer.Option("--split", help="Shares of train, validation, test; by compound.")
    ] = "0.8,0.1,0.1",
    seed: Annotated[int, typer.Option("--seed", help="Of the split.")] = 42,
    spectra: Annotated[
        str,
        typer.Option(
            "--spectra",
            help="Kinds to take: ei, msms, ms1, all; auto refuses a library that mixes them.",
        ),
    ] = "auto",
    without_spectra: Annotated[
        bool, typer.Option("--without-spectra", help="Keep records without peaks, for prediction.")
    ] = False,
    jobs: Jobs = 0,
    cluster: Cluster = None,
    force_recreate: Force = False,
    on_bad: OnBad = "quarantine",
    bad_budget: Budget = "10%",
    as_json: JsonOption = False,
) -> None:
    """Pack a spectrum library and its molecules: spectra, graphs, fingerprints, groups."""
    from stoker.sources.massspec import MassSpecSource

    shares = _shares(split)
    source = MassSpecSource(
        msp,
        mol_dir,
        max_mz=max_mz,
        max_samples=max_samples,
        structures=structures,  # type: ignore[arg-type]
        rounding=rounding,  # type: ignore[arg-type]
        row_limit_seconds=molecule_seconds,
        train_ratio=shares[0],
        val_ratio=shares[1],
        seed=seed,
        spectra=spectra,  # type: ignore[arg-type]
        without_spectra=without_spectra,
    )
    _pack(source, out, _options(jobs, cluster, force_recreate, on_bad, bad_budget), as_json)


def _split_out(files: list[Word]) -> tuple[tuple[Word, ...], Path]:
    """The last of the paths is the store, as with `cp`."""
    from stoker.errors import InputError

    if len(files) < 2:
        raise InputError(
            f"only {files[0]} was given.",
            "input files, then the store's folder",
            command(files[0], "store/"),
        )
    return tuple(files[:-1]), Path(files[-1])


def _shares(text: str) -> tuple[float, float, float]:
    """Return three shares that add up to 1."""
    from stoker.errors import InputError

    try:
        train, val, test = (float(number) for number in text.split(","))
    except ValueError:
        train = val = test = -1.0
    if min(train, val, test) < 0 or abs(train + val + test - 1) > 1e-6:
        raise InputError(
            f"--split is {text!r}.", "three shares that add up to 1", "--split 0.8,0.1,0.1"
        )
    return train, val, test


def _dates(text: str | None) -> tuple[str, str] | None:
    from stoker.errors import InputError

    if text is None:
        return None
    dates = [date.strip() for date in text.split(",")]
    if len(dates) != 2:
        raise InputError(
            f"--split-at is {text!r}.", "two dates", "--split-at 2020-09-01,2020-10-01"
        )
    return dates[0], dates[1]


def _options(
    jobs: int,
    cluster: str | None,
    force_recreate: bool,
    on_bad: str,
    bad_budget: str,
    repair: list[str] | None = None,
) -> PackOptions:
    from stoker.packing import PackOptions

    repairs = tuple(repair or ())
    return PackOptions(jobs, force_recreate, on_bad, bad_budget, repairs, cluster)  # type: ignore[arg-type]


def _pack(source: Source, out: Path, options: PackOptions, as_json: bool) -> None:
    from stoker.cli.progress import Bar
    from stoker.packing import pack

    with Bar(quiet=as_json) as bar:
        try:
            result = pack(source, out, options, bar)
        except KeyboardInterrupt:
            bar.say("finished parts are kept; the same command goes on from there")
            raise
    if not as_json:
        print_result(result)
        return
    if not result.reused:
        _write_page(result)
    print_json(_facts(result))


def _write_page(result: PackResult) -> dict[str, str]:
    """Draw samples of a store that was just packed into its page; return the facts about them."""
    from stoker.address import shown
    from stoker.ownership import write_text
    from stoker.packing.samples import sample_facts, samples_of, samples_page
    from stoker.sources.contract import Account
    from stoker.store.manifest import PAGE_NAME
    from stoker.store.reader import open_store

    with open_store(result.path) as store:
        samples = samples_of(store)
    assert result.inspection is not None
    facts = sample_facts(samples)
    counts = Account.from_json(result.manifest.counts).lines() if result.manifest.counts else []
    notes = [str(note) for note in result.manifest.attributes.get("notes", [])]
    about = {"input": "; ".join(line.strip() for line in counts)}
    about |= facts | {f"note {number}": note for number, note in enumerate(notes, 1)}
    text = samples_page(f"samples of {shown(result.path)}", result.inspection, about, samples)
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
    """Draw the samples of what a pack made into its page, and print it as a table for people."""
    from stoker.cli.tables import store_table
    from stoker.sources.contract import Account
    from stoker.store.manifest import PAGE_NAME, REFUSED_NAME
    from stoker.store.reader import open_store
    from stoker.units import format_count, format_seconds

    console = make_console(soft_wrap=True)
    with open_store(result.path) as store:
        console.print(store_table(store))
    done = "is up to date" if result.reused else f"packed in {format_seconds(result.seconds)}"
    console.print(
        f"{result.path} {done}: {format_count(result.manifest.num_samples)} samples",
    )
    notes = [] if result.reused else result.manifest.attributes.get("notes", [])
    for note in [
        *notes[:_NOTES],
        *([f"... and {len(notes) - _NOTES} more notes"] * (len(notes) > _NOTES)),
    ]:
        console.print(printable(str(note)))
    for account in result.manifest.attributes.get("accounts", []):
        for line in Account.from_json(account).lines():
            console.print(printable(line))
    if result.manifest.num_refused:
        refused = format_count(result.manifest.num_refused, "piece")
        console.print(f"{refused} of input refused; see {result.path / REFUSED_NAME}")
    for what, value in ({} if result.reused else _write_page(result)).items():
        console.print(printable(f"{what}: {value}"))
    if (result.path / PAGE_NAME).exists():
        console.print(f"samples as the model gets them: {result.path / PAGE_NAME}")
    if result.inspection is not None:
        for line in result.inspection.lines()[:10]:
            console.print(f"  {line}")
