"""Options that several verbs have, and what is refused before any work: an output that could not be written.

Enters: words of a command. Leaves: types for typer; nothing, or an error that names the option. Costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from stoker.display import command, quoted

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Replace one key, such as training.batch_size=64; repeatable."
    ),
]  # fmt: skip
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="The YAML file of the job, or the name of a shipped one.", show_default=False),
]  # fmt: skip
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store", help="Store folder, HDF5 file or URL, instead of the config's recipe.store.",
        show_default=False,
    ),
]  # fmt: skip
StoreArgument = Annotated[Path, typer.Argument(help="Store folder, HDF5 file or URL.", show_default=False)]  # fmt: skip
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cuda, cuda:1 or cpu; by default the GPU, if any.", show_default=False),
]  # fmt: skip


def require_output(
    path: Path | None,
    option: str,
    inputs: Sequence[Path | None] = (),
    *,
    force: bool | None = None,
    is_ours: Callable[[Path], bool] | None = None,
) -> None:
    """Refuse an output that is an input, a folder, in no folder, or somebody else's file.

    Args:
        path: As given; None is fine.
        option: The name to use in messages, such as "--html".
        inputs: What the same command reads.
        force: For files that people edit, such as configs: whether --force was given. None: the verb
            has no such option, and what stoker wrote before is replaced.
        is_ours: Whether an existing file may be replaced; by default one with stoker's signature.
    """
    from stoker.errors import InputError
    from stoker.ownership import always, check_output, has_signature

    if path is None:
        return
    if path.is_dir() or not path.resolve().parent.is_dir():
        given = f"{path} is a folder." if path.is_dir() else f"there is no folder {path.parent}."
        fix = (
            f"{option} {quoted(path / 'FILE')}"
            if path.is_dir()
            else command("mkdir", "-p", path.parent)
        )
        raise InputError(f"{option}: {given}", "a file in a folder that exists", fix)
    if not os.access(path.resolve().parent, os.W_OK):  # said now, not after the work
        raise InputError(
            f"{option}: {path.parent} cannot be written.",
            "a folder with write permission",
            command("ls", "-ld", path.parent),
        )
    read = [given for given in inputs if given is not None]
    try:
        check_output(path, read, always if force is not None else is_ours or has_signature)
    except InputError as error:
        raise InputError(
            f"{option}: {error.given}", error.allowed, f"{option} {error.fix}"
        ) from error
    if force is False and path.exists():
        raise InputError(
            f"{path} exists.",
            "a new file, or --force to replace it",
            f"{option} {quoted(path)} --force",
        )
