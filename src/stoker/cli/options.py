"""Options that several verbs have, and what is refused before any work: an output that could not be written.

Enters: words of a command. Leaves: types for typer; nothing, or an error that names the option. Costs nothing.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from stoker.display import command, quoted
from stoker.errors import InputError
from stoker.ownership import always, check_output, has_signature


def option(*words: str, **settings: Any) -> Any:
    """Return an option of a verb: its names, then the line that `--help` shows."""
    *names, meaning = words
    return typer.Option(*names, help=meaning, **settings)


def argument(meaning: str, **settings: Any) -> Any:
    """Return an argument of a verb, with the line that `--help` shows."""
    return typer.Argument(
        help=meaning, show_default=settings.pop("show_default", False), **settings
    )


def with_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb for typer whose parameters of a dataclass type became one option for each field.

    Fields of the same name, and a parameter of that name, are one option: all of them get its value.
    """
    own = inspect.signature(verb, eval_str=True).parameters
    groups = {name: each.annotation for name, each in own.items() if is_dataclass(each.annotation)}
    options: dict[str, inspect.Parameter] = {}
    for name, each in own.items():
        if name not in groups:
            options.setdefault(name, each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            made = inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            options.setdefault(field.name, made)

    @functools.wraps(verb)
    def run_verb(**typed: Any) -> None:
        made = {
            name: group(**{field.name: typed[field.name] for field in fields(group)})
            for name, group in groups.items()
        }
        verb(**{name: made[name] if name in made else typed[name] for name in own})

    run_verb.__signature__ = inspect.Signature(list(options.values()))  # type: ignore[attr-defined]
    return run_verb


JsonOption = Annotated[bool, option("--json", "Print one JSON document on stdout.")]
SetOption = Annotated[
    list[str] | None,
    option(
        "--set", "Replace one key, such as training.batch_size=64; repeatable.", metavar="KEY=VALUE"
    ),
]
ConfigOption = Annotated[
    Path | None, option("--config", "The YAML file of the job, or the name of a shipped one.")
]
StoreOption = Annotated[
    Path | None,
    option("--store", "Store folder, HDF5 file or URL, instead of the config's recipe.store."),
]
StoreArgument = Annotated[Path, argument("Store folder, HDF5 file or URL.")]
DeviceOption = Annotated[
    str | None, option("--device", "cuda, cuda:1 or cpu; by default the GPU, if any.")
]


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
