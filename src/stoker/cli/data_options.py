"""Options of raw data, declared once: groups that `pack`, `inspect` and `predict` share.

Enters: what was typed. Leaves: what a source takes. Costs nothing: a source is imported when its group is used. A verb
with the decorator `options.with_groups` has all options of the groups among its parameters; an option of the same name
in two groups is one option, and both get its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stoker.cli.options import option
from stoker.display import quoted
from stoker.errors import InputError

if TYPE_CHECKING:
    from stoker.packing import PackOptions
    from stoker.sources.images import KeepEncoded
    from stoker.sources.tables import TableSource, TextOptions
    from stoker.store.plain import Selection

Columns = Annotated[
    str | None,
    option("--columns", "What the file calls them: open=NAME,high=NAME,low=NAME,close=NAME."),
]
Decimal = Annotated[str | None, option("--decimal", "Decimal sign, . or , [default: found].")]
Drop = Annotated[list[str] | None, option("--drop", "Column to leave out; repeatable.")]
Dtype = Annotated[
    list[str] | None,
    option(
        "--dtype",
        "NAME=KIND where the values do not say it: number, float64, bool, category, one-hot, codes, date, "
        "day-first, month-first, seconds; repeatable.",
    ),
]
Missing = Annotated[
    str,
    option(
        "--missing",
        "Missing numbers: stop: refuse them; median or zero: fill them; flag: fill by the median and mark them "
        "in a column of their own; drop: leave their rows out.",
    ),
]
Range = Annotated[
    str | None,
    option(
        "--range",
        "LOW,HIGH of 16-bit and float pictures, stored as 0 to 255 [default: 0,65535 and 0,1].",
    ),
]
Stride = Annotated[
    int | None, option("--stride", "Rows from one window to the next [default: the window].")
]
Target = Annotated[str | None, option("--target", "Column to predict.")]
TimeColumn = Annotated[
    str | None,
    option("--time-column", "Name of the time column, or DATE+TIME for two [default: found]."),
]
OnBad = Annotated[
    str,
    option("--on-bad", "stop: refuse the pack; quarantine: leave bad pieces out and list them."),
]
Budget = Annotated[
    str, option("--bad-budget", "Most that may be left out: a share (1%) or a number.")
]


def split_names(text: str | None) -> tuple[str, ...]:
    """Return the names of a list by commas."""
    return tuple(text.split(",")) if text else ()


@dataclass(frozen=True)
class Packing:
    """Options of every pack."""

    jobs: Annotated[
        int, option("--jobs", "-j", "Worker processes; 0 means one per usable core.")
    ] = 0
    cluster: Annotated[
        str | None,
        option(
            "--cluster",
            "Build on a Dask cluster: its scheduler's address, such as tcp://10.0.0.1:8786.",
        ),
    ] = None
    force_recreate: Annotated[
        bool, option("--force-recreate", "Pack again even when OUT is up to date.")
    ] = False
    on_bad: OnBad = "stop"
    bad_budget: Budget = "1%"

    def options(self, repairs: Sequence[str] = ()) -> PackOptions:
        """Return the same for `pack`."""
        from stoker.packing import PackOptions

        return PackOptions(**vars(self), repairs=tuple(repairs))


@dataclass(frozen=True)
class SpectrumPacking(Packing):
    """The same with the usual values for spectrum libraries, which have bad records."""

    on_bad: OnBad = "quarantine"
    bad_budget: Budget = "10%"


@dataclass(frozen=True)
class Chosen:
    """Which arrays of a file."""

    fields: Annotated[
        str | None,
        option(
            "--fields", "Arrays of an HDF5 or .npz file, by commas.", show_default="all that fit"
        ),
    ] = None
    group: Annotated[
        str | None, option("--group", "Group of an HDF5 or .npz file that holds the arrays.")
    ] = None
    rows: Annotated[
        int | None,
        option("--rows", "Only arrays with this many rows, of an HDF5 or .npz file.", min=0),
    ] = None

    def selection(self) -> Selection:
        """Return the same for `open_store`."""
        from stoker.store.plain import Selection

        return Selection(self.group, split_names(self.fields), self.rows)


@dataclass(frozen=True)
class Text:
    """How text files are written."""

    sep: Annotated[
        str | None,
        option(
            "--sep",
            "Between cells: a character, or comma, semicolon, tab, bar, whitespace [default: found].",
        ),
    ] = None
    decimal: Decimal = None
    encoding: Annotated[
        str | None, option("--encoding", "Of text files, such as cp1252 [default: found].")
    ] = None
    header: Annotated[
        bool | None,
        option(
            "--header/--no-header",
            "Whether the first line names the columns [default: found, or asked].",
        ),
    ] = None

    def options(self) -> TextOptions:
        """Return the same for the readers of tables."""
        from stoker.sources.tables import TextOptions

        return TextOptions(**vars(self))


@dataclass(frozen=True)
class Table:
    """What becomes of a table's columns."""

    target: Target = None
    drop: Drop = None
    keep: Annotated[
        list[str] | None, option("--keep", "Take only such columns, and the target; repeatable.")
    ] = None
    dtype: Dtype = None
    missing: Missing = "stop"

    def source(
        self, paths: tuple[Path, ...], text: Text, split: tuple[float, ...] = ()
    ) -> TableSource:
        """Return the source of these tables."""
        from stoker.sources.tables import TableSource, parse_dtypes

        allowed = ("stop", "median", "zero", "flag", "drop")
        if self.missing not in allowed:
            raise InputError(
                f"--missing is {self.missing!r}.", ", ".join(allowed), "--missing median"
            )
        return TableSource(
            paths,
            self.target,
            tuple(self.drop or ()),
            split,
            keep=tuple(self.keep or ()),
            dtypes=parse_dtypes(self.dtype or ()),
            missing={"median": "keep", "zero": "keep"}.get(self.missing, self.missing),
            text=text.options(),
        )


@dataclass(frozen=True)
class BarReading:
    """How files of bars are read."""

    day_first: Annotated[
        bool | None,
        option("--day-first/--month-first", "How 10/11/2020 reads [default: found out, or asked]."),
    ] = None
    time_zone: Annotated[
        str | None, option("--tz", "Zone of the files' clock, such as Europe/Athens.")
    ] = None
    sort: Annotated[bool, option("--sort", "Sort files of bars that are in no order.")] = False
    time_column: TimeColumn = None
    columns: Columns = None
    drop: Drop = None
    stamp: Annotated[str, option("--stamp", "Whether a bar's time is its open or its close.")] = (
        "open"
    )
    decimal: Decimal = None

    def settings(self) -> dict[str, Any]:
        """Return the same for `BarsSource`."""
        from stoker.sources.bars import Naming

        return {
            "day_first": self.day_first,
            "tz": self.time_zone,
            "sort": self.sort,
            "naming": Naming.parse(self.time_column, self.columns, self.drop or ()),
            "stamp": self.stamp,
            "decimal": self.decimal,
        }


@dataclass(frozen=True)
class Pictures:
    """How pictures are stored."""

    channels: Annotated[int, option("--channels", "3 for RGB, 1 for grey.")] = 3
    lists: Annotated[
        list[str] | None,
        option("--list", "Split by a list of names, such as train=train.txt; repeatable."),
    ] = None
    value_range: Range = None
    first_frame: Annotated[
        bool, option("--first-frame", "Take the first frame of files that hold several.")
    ] = False
    keep_encoded: Annotated[
        bool,
        option(
            "--keep-encoded",
            "Store the bytes of JPEG, PNG and WebP files, of any size; they are decoded while training.",
        ),
    ] = False
    max_side: Annotated[
        int | None,
        option(
            "--max-side",
            "With --keep-encoded: make larger pictures smaller, to this longer side.",
        ),
    ] = None
    quality: Annotated[
        int | None,
        option(
            "--quality",
            "With --keep-encoded: of JPEG that is written anew; takes progressive, CMYK and other files too.",
            show_default="90 with --max-side",
        ),
    ] = None

    def settings(self, size: str | None, usual: str) -> dict[str, Any]:
        """Return the same for `ImagesSource` and `SegmentationSource`.

        Args:
            size: As typed after `--size`; None takes the usual one.
            usual: HEIGHTxWIDTH.
        """
        from stoker.sources.images import parse_range, parse_size

        return {
            "keep_encoded": self._kept(size),
            "size": parse_size(size or usual),
            "channels": self.channels,
            "value_range": parse_range(self.value_range),
            "first_frame": self.first_frame,
            "lists": tuple(self.lists or ()),
        }

    def _kept(self, size: str | None) -> KeepEncoded | None:
        from stoker.sources.images import KeepEncoded

        if self.keep_encoded and size is not None:
            raise InputError(
                f"--size {size} and --keep-encoded were given.",
                "--size for pixels of one size, or --keep-encoded for files of any size",
                "leave --size out",
            )
        for name, value in (("--max-side", self.max_side), ("--quality", self.quality)):
            if value is not None and not self.keep_encoded:
                raise InputError(
                    f"{name} {value} was given without --keep-encoded.",
                    f"{name} with --keep-encoded",
                    f"--keep-encoded {quoted(name)} {quoted(value)}",
                )
        return KeepEncoded(self.max_side, self.quality) if self.keep_encoded else None


@dataclass(frozen=True)
class Labels:
    """Labels of pictures in a file of their own."""

    labels: Annotated[
        Path | None, option("--labels", "CSV of names and labels, instead of class folders.")
    ] = None
    label_column: Annotated[
        str | None, option("--label-column", "Column of labels in it [default: found].")
    ] = None


@dataclass(frozen=True)
class Masks:
    """Which mask belongs to a picture, and what its values mean."""

    mask_suffix: Annotated[
        str, option("--mask-suffix", "What mask names have behind the image's: _L for x_L.png.")
    ] = ""
    image_suffix: Annotated[
        str, option("--image-suffix", "What image names have behind the part they share.")
    ] = ""
    mask_prefix: Annotated[
        str, option("--mask-prefix", "What mask names have before the image's.")
    ] = ""
    mask_map: Annotated[
        list[str] | None,
        option(
            "--mask-map",
            "Class of mask values or colours: 255=1, 0-127=0, #ff0000=2, other=255; or keep. Repeatable.",
        ),
    ] = None
    mask_colors: Annotated[
        Path | None, option("--mask-colors", "Table of colours: r, g, b and a name a line.")
    ] = None
    mask_orientation: Annotated[
        str,
        option(
            "--mask-orientation",
            "Masks without EXIF beside images with: image (turned like it), upright, or auto by size.",
        ),
    ] = "auto"

    def settings(self) -> dict[str, Any]:
        """Return the same for `SegmentationSource`."""
        return {**vars(self), "mask_map": tuple(self.mask_map or ())}
