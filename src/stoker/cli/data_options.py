"""Options of raw data, declared once: groups that `pack`, `inspect` and `predict` share.

Enters: what was typed. Leaves: what a source takes. Costs nothing: a source is imported when its group is used. A verb
with the decorator `options.verb` has all options of the groups among its parameters; an option of the same name
in two groups is one option, and both get its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.address import shown
from stoker.display import quoted
from stoker.errors import InputError

if TYPE_CHECKING:
    from stoker.packing import PackOptions
    from stoker.sources.images import KeepEncoded
    from stoker.sources.tables import TableSource, TextOptions
    from stoker.store.plain import Selection

Range = Annotated[
    str | None,
    typer.Option(
        "--range",
        help="LOW,HIGH of 16-bit and float pictures, stored as 0 to 255 [default: 0,65535 and 0,1].",
    ),
]
Stride = Annotated[
    int | None,
    typer.Option("--stride", help="Rows from one window to the next [default: the window]."),
]


def split_names(text: str | None) -> tuple[str, ...]:
    """Return the names of a comma-separated list."""
    return tuple(text.split(",")) if text else ()


@dataclass(frozen=True)
class Packing:
    """Options of every pack.

    Attributes:
        jobs: Worker processes; 0 means one per usable core.
        cluster: Build on a Dask cluster: its scheduler's address, such as tcp://10.0.0.1:8786.
        force_recreate: Pack again even when OUT is up to date.
        on_bad: stop: refuse the pack; quarantine: leave bad pieces out and list them.
        bad_budget: Most that quarantine may leave out: a share (1%) or a number.
    """

    jobs: Annotated[int, typer.Option("--jobs", "-j")] = 0
    cluster: str | None = None
    force_recreate: bool = False
    on_bad: str = "stop"
    bad_budget: str = "1%"

    def options(self, repairs: Sequence[str] = ()) -> PackOptions:
        """Return the same for `pack`."""
        from stoker.packing import PackOptions

        given = dict(vars(self))
        if self.on_bad == "stop" and self.bad_budget == type(self).bad_budget:
            del given["bad_budget"]  # not given, and without effect
        return PackOptions(**given, repairs=tuple(repairs))


@dataclass(frozen=True)
class SpectrumPacking(Packing):
    """The same with the usual values for spectrum libraries, which have bad records."""

    on_bad: str = "quarantine"
    bad_budget: str = "10%"


@dataclass(frozen=True)
class Chosen:
    """Which arrays of a file.

    Attributes:
        fields: Arrays of an HDF5 or .npz file, separated by commas.
        group: Group of an HDF5 or .npz file that holds the arrays.
        rows: Only arrays with this many rows, of an HDF5 or .npz file.
    """

    fields: Annotated[str | None, typer.Option(show_default="all that fit")] = None
    group: str | None = None
    rows: Annotated[int | None, typer.Option(min=0)] = None

    def selection(self) -> Selection:
        """Return the same for `open_store`."""
        from stoker.store.plain import Selection

        return Selection(self.group, split_names(self.fields), self.rows)


def refuse_given(options: object, store: Path) -> None:
    """Refuse options for raw files together with a store: packing has already applied them."""
    for field in fields(options):  # type: ignore[arg-type]
        if getattr(options, field.name) != field.default:
            option = f"--{field.name}"
            raise InputError(
                f"{option} was given, and {shown(store)} is a store.",
                f"{option} for raw files only",
                f"leave {option} out",
            )


@dataclass(frozen=True)
class Text:
    """How text files are written.

    Attributes:
        sep: Separator of cells: a character, or comma, semicolon, tab, bar, whitespace [default: found].
        decimal: Decimal sign, . or , [default: found].
        encoding: Encoding of text files, such as cp1252 [default: found].
        header: Whether the first line names the columns [default: found, or asked].
    """

    sep: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    header: Annotated[bool | None, typer.Option("--header/--no-header")] = None

    def options(self) -> TextOptions:
        """Return the same for the readers of tables."""
        from stoker.sources.tables import TextOptions

        return TextOptions(**vars(self))


@dataclass(frozen=True)
class Table:
    """What becomes of a table's columns.

    Attributes:
        target: Column to predict.
        drop: Column to leave out; repeatable.
        keep: Take only such columns, and the target; repeatable.
        dtype: NAME=KIND where the values do not say it: number, float64, bool, category, one-hot, codes, date,
            day-first, month-first, seconds; repeatable.
        value: NAME=WORD: a text that is a value of that column, though it usually stands for a missing one, such as
            damage=None; repeatable.
        missing: Missing numbers: stop: refuse them; median or zero: fill them; flag: fill by the median and mark them
            in a column of their own; drop: leave their rows out, and those with a blank target.
        missing_code: A number that stands for a missing value in every column, such as -999, or NAME=NUMBER for one
            column; repeatable.
    """

    target: str | None = None
    drop: list[str] | None = None
    keep: list[str] | None = None
    dtype: list[str] | None = None
    value: list[str] | None = None
    missing: str = "stop"
    missing_code: list[str] | None = None

    def source(
        self, paths: tuple[Path, ...], text: Text, split: tuple[float, ...] = ()
    ) -> TableSource:
        """Return the source of these tables."""
        from stoker.sources.tables import TableSource, parse_codes, parse_dtypes, parse_words

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
            words=parse_words(self.value or ()),
            codes=parse_codes(self.missing_code or ()),
        )


@dataclass(frozen=True)
class BarReading:
    """How files of bars are read.

    Attributes:
        day_first: How 10/11/2020 reads [default: found out, or asked].
        time_zone: Zone of the files' clock, such as Europe/Athens.
        sort: Sort files of bars that are in no order.
        time_column: Name of the time column, or DATE+TIME for two [default: found].
        columns: What the file calls them: open=NAME,high=NAME,low=NAME,close=NAME.
        drop: Column to leave out; repeatable.
        stamp: Whether a bar's time is its open or its close.
        decimal: Decimal sign, . or , [default: found].
    """

    day_first: Annotated[bool | None, typer.Option("--day-first/--month-first")] = None
    time_zone: Annotated[str | None, typer.Option("--tz")] = None
    sort: bool = False
    time_column: str | None = None
    columns: str | None = None
    drop: list[str] | None = None
    stamp: str = "open"
    decimal: str | None = None

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
    """How pictures are stored.

    Attributes:
        channels: 3 for RGB, 1 for grey.
        lists: Split by a list of names, such as train=train.txt; repeatable.
        first_frame: Take the first frame of files that hold several.
        keep_encoded: Store the bytes of JPEG, PNG and WebP files, of any size; they are decoded while training.
        max_side: With --keep-encoded: make larger pictures smaller, to this longer side; lossless files stay lossless.
        quality: With --keep-encoded: write what is written anew as JPEG of this quality, lossless files and
            progressive, CMYK and other ones too.
    """

    channels: int = 3
    lists: Annotated[list[str] | None, typer.Option("--list")] = None
    value_range: Range = None
    first_frame: bool = False
    keep_encoded: bool = False
    max_side: int | None = None
    quality: Annotated[int | None, typer.Option(show_default="90 with --max-side")] = None

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
    """Labels of pictures in a file of their own.

    Attributes:
        labels: CSV of names and labels, instead of class folders.
        label_column: Column of labels in it [default: found].
    """

    labels: Path | None = None
    label_column: str | None = None


@dataclass(frozen=True)
class Masks:
    """Which mask belongs to a picture, and what its values mean.

    Attributes:
        mask_suffix: Text that mask names have after the name of the image: _L for x_L.png.
        image_suffix: Text that image names have after the part that masks share.
        mask_prefix: Text that mask names have before the name of the image.
        mask_map: Class of mask values or colours: 255=1, 0-127=0, #ff0000=2, other=255; or keep. Repeatable.
        mask_colors: Table of colours: r, g, b and a name a line.
        class_names: Names of the classes 0, 1, 2, ... of masks, separated by commas.
        mask_orientation: Masks without EXIF beside images with: image (turned like it), upright, or auto by
            size.
    """

    mask_suffix: str = ""
    image_suffix: str = ""
    mask_prefix: str = ""
    mask_map: list[str] | None = None
    mask_colors: Path | None = None
    class_names: str | None = None
    mask_orientation: str = "auto"

    def settings(self) -> dict[str, Any]:
        """Return the same for `SegmentationSource`."""
        names = tuple(name.strip() for name in split_names(self.class_names))
        return {**vars(self), "mask_map": tuple(self.mask_map or ()), "class_names": names}
