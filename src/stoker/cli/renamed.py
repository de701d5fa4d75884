"""Old spellings of the command line: they are not listed, and raise an error with the new command.

Enters: the words typed after them. Leaves: an error with the command that does the same. Costs nothing.
"""

from __future__ import annotations

from typing import NoReturn

import typer

from stoker.display import command
from stoker.errors import InputError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a removed verb: any option is accepted, so that its error is always the same."""


def quantize(context: typer.Context) -> NoReturn:
    """Now an option of `stoker export`."""
    raise InputError(
        "`stoker quantize` is now `stoker export --int8`.",
        "the same arguments after the new words",
        command("stoker", "export", *context.args, "--int8"),
    )


def profile(context: typer.Context) -> NoReturn:
    """Now an option of `stoker doctor`."""
    raise InputError(
        "`stoker profile` is now `stoker doctor --trace`.",
        "--trace FILE and --trace-steps; the doctor finds out more of the same job",
        command("stoker", "doctor", *context.args, "--trace", "trace.json")
        if context.args
        else "stoker doctor --config tabular --store STORE --trace trace.json",
    )


def migrate_config(context: typer.Context) -> NoReturn:
    """Now a verb below `stoker config`."""
    raise InputError(
        "`stoker migrate-config` is now `stoker config migrate`.",
        "the same arguments after the new words",
        command("stoker", "config", "migrate", *context.args),
    )


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
