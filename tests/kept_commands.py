"""The command tree of `stoker`, built once per process: typer builds all of it, 0.08 s, for every command."""

from __future__ import annotations

import typer
import typer.testing

_built: dict[int, tuple[int, object]] = {}


def kept(app: typer.Typer):
    """Return the command of an app, built anew when verbs were added to it."""
    size = len(app.registered_commands) + len(app.registered_groups)
    if _built.get(id(app), (-1, None))[0] != size:
        _built[id(app)] = size, typer.main.get_command(app)
    return _built[id(app)][1]


def keep() -> None:
    """Take it in `app(…)` and in a `CliRunner`; `main.run` changes its command and builds its own."""
    typer.Typer.__call__ = lambda self, *words, **options: kept(self)(*words, **options)
    typer.testing._get_command = kept
