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


def invoke(*words: object) -> typer.testing.Result:
    """Run `stoker words` in this process; on lines that are wide enough for every message."""
    from stoker.cli.main import app

    return typer.testing.CliRunner(env={"COLUMNS": "400"}).invoke(
        app, [str(word) for word in words]
    )


def said_by(*words: object) -> str:
    """Run `stoker words`, which must end well, in this process; return what it printed."""
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result.output
