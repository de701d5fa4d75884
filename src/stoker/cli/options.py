"""Verbs for typer, options that several of them have, and outputs that are refused before any work.

Enters: words of a command. Leaves: types for typer; nothing, or an error that names the option. Costs nothing.
"""

from __future__ import annotations

import functools
import inspect
import mimetypes
import os
import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from stoker.display import command, quoted
from stoker.errors import InputError
from stoker.ownership import always, check_output, has_signature

_ENTRY = re.compile(r"^    (\w+): (.+(?:\n        .+)*)", re.MULTILINE)


def verb(run: Callable[..., None]) -> Callable[..., None]:
    """Return a function as typer takes it, with help texts for its parameters from its docstring.

    Parameters before `*` are arguments, those after it options. An option is named like its parameter unless its
    annotation has another name. Their help is the entry under "Options:" in the docstring. A parameter of a dataclass
    type stands for one option per field, whose help is under "Attributes:" of that class; fields of the same name are
    one option, and all of them get its value.
    """
    own = inspect.signature(run, eval_str=True).parameters
    about, meanings = _read_docstring(run, "Options:")
    kinds = {name: each.annotation for name, each in own.items()}
    groups: dict[str, Any] = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}
    shown: dict[str, inspect.Parameter] = {}
    for name, each in own.items():
        found, help_of = [each], meanings
        if name in groups:
            hints, help_of = get_type_hints(groups[name], include_extras=True), {}
            for kind in reversed(groups[name].__mro__):
                help_of |= _read_docstring(kind, "Attributes:")[1]
            members = inspect.signature(groups[name]).parameters.values()
            found = [
                each.replace(name=one.name, default=one.default, annotation=hints[one.name])
                for one in members
            ]
        for one in found:
            if one.name not in shown:
                shown[one.name] = _parameter(one, help_of.get(one.name))

    @functools.wraps(run)
    def run_verb(**typed: Any) -> None:
        made = {
            name: group(**{field.name: typed[field.name] for field in fields(group)})
            for name, group in groups.items()
        }
        run(**{name: made[name] if name in made else typed[name] for name in own})

    run_verb.__doc__ = about
    run_verb.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
    return run_verb


def _read_docstring(described: Any, section: str) -> tuple[str, dict[str, str]]:
    """Return a docstring without one of its sections, and the entries of that section."""
    about, _, entries = (inspect.getdoc(described) or "").partition(f"\n{section}\n")
    return about.strip(), {name: " ".join(text.split()) for name, text in _ENTRY.findall(entries)}


def _parameter(given: inspect.Parameter, meaning: str | None) -> inspect.Parameter:
    """Return a parameter as typer takes it: with its kind, its name and its help text."""
    kind, info = given.annotation, None
    if get_origin(kind) is Annotated:
        kind, info = get_args(kind)
    if info is None:
        is_argument = given.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        info = typer.Argument() if is_argument else typer.Option()
    info = copy(info)
    if isinstance(info, OptionInfo) and info.default is ...:
        info.param_decls = (f"--{given.name.replace('_', '-')}",)
    info.help = info.help or meaning
    # typer shows a default in brackets itself; brackets in the help would be taken for markup, and vanish.
    about, _, default = (info.help or "").partition(" [default: ")
    if default:
        info.help, info.show_default = f"{about}.", default.removesuffix("].")
    assert info.help, f"the docstring does not say what {given.name!r} means"
    return given.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Replace one key, such as training.batch_size=64; repeatable.",
        metavar="KEY=VALUE",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="The YAML file of the job, or the name of a shipped one."),
]
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store", help="Store folder, HDF5 file or URL, instead of the config's recipe.store."
    ),
]
StoreArgument = Annotated[Path, typer.Argument(help="Store folder, HDF5 file or URL.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cuda, cuda:1 or cpu; by default the GPU, if any.")
]


def require_page(path: Path | None, option: str) -> None:
    """Refuse a page whose name is that of another format."""
    if path is not None and mimetypes.guess_type(path.name)[0] not in (None, "text/html"):
        raise InputError(
            f"{option}: {path} has the ending of another format.",
            "a page, which ends in .html",
            f"{option} {quoted(path.with_suffix('.html'))}",
        )


def require_output(
    path: Path | None,  # as given; None is fine
    option: str,  # the name to use in messages, such as "--html"
    inputs: Sequence[Path | None] = (),  # what the same command reads
    *,
    # for files that people edit, such as configs: whether --force was given. None: the verb has no such option, and
    # what stoker wrote before is replaced.
    force: bool | None = None,
    # whether an existing file may be replaced; by default one with stoker's signature
    is_ours: Callable[[Path], bool] | None = None,
) -> None:
    """Refuse an output that is an input, a folder, in a missing folder, or a file that stoker did not write."""
    if path is None:
        return
    if path.is_dir() or not path.resolve().parent.is_dir():
        given = f"{path} is a folder." if path.is_dir() else f"there is no folder {path.parent}."
        fix = (
            f"{option} {quoted(path / 'FILE')}".removeprefix("OUT ")
            if path.is_dir()
            else command("mkdir", "-p", path.parent)
        )
        raise InputError(f"{option}: {given}", "a file in a folder that exists", fix)
    if not os.access(path.resolve().parent, os.W_OK):  # refused now, not after the work
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
            f"{option} {quoted(path)} --force".removeprefix("OUT "),
        )
