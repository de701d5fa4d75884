"""Options of `stoker pack images` and `stoker pack segmentation`, and what they come to together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stoker.sources.images import KeepEncoded

Range = Annotated[
    str | None,
    typer.Option(
        "--range",
        help="LOW,HIGH of 16-bit and float pictures, stored as 0 to 255 [default: 0,65535 and 0,1].",
        show_default=False,
    ),
]
FirstFrame = Annotated[
    bool, typer.Option("--first-frame", help="Take the first frame of files that hold several.")
]
Lists = Annotated[
    list[str] | None,
    typer.Option(
        "--list",
        help="Split by a list of names, such as train=train.txt; repeatable.",
        show_default=False,
    ),
]

ImageSize = Annotated[
    str | None,
    typer.Option("--size", help="Stored HEIGHTxWIDTH.", show_default="224x224"),
]
MaskSize = Annotated[
    str | None,
    typer.Option("--size", help="Stored HEIGHTxWIDTH.", show_default="512x512"),
]
Encoded = Annotated[
    bool,
    typer.Option(
        "--keep-encoded",
        help="Store the bytes of JPEG, PNG and WebP files, of any size; they are decoded while training.",
    ),
]
MaxSide = Annotated[
    int | None,
    typer.Option(
        "--max-side",
        help="With --keep-encoded: make larger pictures smaller, to this longer side.",
        show_default=False,
    ),
]
Quality = Annotated[
    int | None,
    typer.Option(
        "--quality",
        help="With --keep-encoded: of JPEG that is written anew; takes progressive, CMYK and other files too.",
        show_default="90 with --max-side",
    ),
]


def kept_encoded(
    keep_encoded: bool, size: str | None, max_side: int | None, quality: int | None
) -> KeepEncoded | None:
    """Return how pictures are kept encoded, or None where they are stored as pixels."""
    from stoker.display import quoted
    from stoker.errors import InputError
    from stoker.sources.images import KeepEncoded

    if keep_encoded and size is not None:
        raise InputError(
            f"--size {size} and --keep-encoded were given.",
            "--size for pixels of one size, or --keep-encoded for files of any size",
            "leave --size out",
        )
    for name, value in (("--max-side", max_side), ("--quality", quality)):
        if value is not None and not keep_encoded:
            raise InputError(
                f"{name} {value} was given without --keep-encoded.",
                f"{name} with --keep-encoded",
                f"--keep-encoded {quoted(name)} {quoted(value)}",
            )
    return KeepEncoded(max_side, quality) if keep_encoded else None
