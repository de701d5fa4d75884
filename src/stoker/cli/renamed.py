"""Old spellings of the command line: they are not listed, do what they did, and name the new spelling.

Enters: a verb and both spellings. Leaves: the same verb, which says on stderr what it is called now; or, for what
has left the package, an error with the command that replaces it. Costs nothing beside the verb.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from stoker.cli.terminal import echo
from stoker.display import command
from stoker.errors import InputError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a verb that has left: its options are no error, so that the answer is always the same."""


def renamed(verb: Callable[..., None], old: str, new: str) -> Callable[..., None]:
    """Return `verb` for its old spelling, with the same arguments and options."""

    @functools.wraps(verb)
    def run_verb(*given: Any, **options: Any) -> None:
        echo(f"`stoker {old}` is now `stoker {new}`", err=True)
        verb(*given, **options)

    return run_verb


def bench_augment() -> NoReturn:
    """Moved to the repository: `python benchmarks/augment.py --part workers`, with the same options but --html."""
    raise InputError(
        "`stoker bench augment` has left the package.",
        "the script in stoker's repository, with the same options but --html",
        "python benchmarks/augment.py --part workers",
    )


def augment_pictures(context: typer.Context) -> NoReturn:
    """Moved to the repository: `python -m docs_build.pictures`, with the same argument."""
    raise InputError(
        "`stoker augment pictures` has left the package: it draws the pictures of the documentation.",
        "the module in stoker's repository, with the same folder",
        command("python", "-m", "docs_build.pictures", *context.args),
    )
