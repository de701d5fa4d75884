"""`stoker config`: write, check and show config files, bring older ones up to date, print the schema for editors.

Enters: a YAML file and `--set` overrides. Leaves: a table, YAML or one JSON document on stdout.
Costs a few milliseconds beside the imports.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.address import MARK, masked
from stoker.cli.migrate import migrate
from stoker.cli.options import JsonOption, SetOption, argument, option, require_output
from stoker.cli.terminal import echo, echo_lines, make_console, print_commands, print_json
from stoker.display import command, secret_hint
from stoker.ownership import always, write_text

if TYPE_CHECKING:
    from stoker.config import Config, Problem, Settings

app = typer.Typer(no_args_is_help=True, help="Write, check, show and migrate config files.")

FileArgument = Annotated[Path, argument("The YAML file.")]


@app.command()
def check(file: FileArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Check FILE, and say which value each setting gets, and from where."""
    from stoker.config import check_config, resolve
    from stoker.config.resolve import as_error

    config, problems = check_config(file, overrides or ())
    if config is None:
        if not as_json:
            raise as_error(problems)
        _print_json({"ok": False, "problems": [_problem_row(problem) for problem in problems]})
        raise typer.Exit(as_error(problems).exit_code)
    settings = resolve(config)
    if settings.recipe.name is not None:
        # Costs the import of torch, and finds what would otherwise end a run at its start.
        from stoker.recipes.catalogue import choose_recipe

        settings = choose_recipe(settings).noted_settings
    if as_json:
        _print_json({"ok": True, "problems": [], **settings.to_json()})
    else:
        _print_settings(settings)


@app.command()
def show(
    file: Annotated[
        Path | None, argument("The YAML file; without one, every key at its default.")
    ] = None,
    overrides: SetOption = None,
    every: Annotated[
        bool, option("--all", "Also list the keys that are not written, as comments.")
    ] = False,
) -> None:
    """Print FILE as stoker reads it: anchors and overrides worked in, YAML on stdout."""
    from stoker.config import describe_tree, dump_config, load_config, parse_config

    given = overrides or ()
    config = parse_config("", overrides=given) if file is None else load_config(file, given)
    if every or file is None:
        text = describe_tree(config, _recipe_defaults(config))
    else:
        text = dump_config(config)
    echo_lines(text)
    if masked(text) != text:
        echo(f"# {secret_hint(MARK)}")


def _recipe_defaults(config: Config) -> dict[str, object]:
    """Return the defaults that the config's recipe has of its own, by every key that asks for them."""
    name = config.written().get("recipe.name")
    if name is None:
        return {}
    from stoker.config.resolve import PLACES, as_key
    from stoker.recipes.registry import find_recipe

    return {
        place: each.value
        for each in find_recipe(name).defaults
        for place in PLACES[as_key(each.setting)]
    }


@app.command()
def init(
    recipe: Annotated[str, argument("A ready job, or package.module:Class.")],
    out: Annotated[Path | None, argument("The file to write; without one, stdout.")] = None,
    force: Annotated[bool, option("--force", "Let OUT replace a file.")] = False,
) -> None:
    """Write a complete, commented config for RECIPE, which trains as it stands once its store is packed."""
    from stoker.recipes.template import render_config

    require_output(out, "OUT", force=force)
    text = render_config(recipe)
    if out is None:
        echo_lines(text)
        return
    write_text(out, text, always)
    echo(f"{out}: {text.splitlines()[0].removeprefix('# ')}", err=True)
    echo("Then:", err=True)
    print_commands(make_console(stderr=True), [command("stoker", "train", "--config", out)])


app.command("migrate")(migrate)


@app.command()
def schema() -> None:
    """Print the JSON Schema of config files, so that editors complete and check them."""
    from stoker.config import config_schema

    _print_json(config_schema())


def _print_json(document: object) -> None:
    print_json(document, indent=2)


def _problem_row(problem: Problem) -> dict[str, object]:
    place = problem.place
    return {
        "file": place.file,
        "line": place.line,
        "column": place.column,
        "key": problem.key,
        "given": problem.given,
        "allowed": problem.allowed,
        "fix": problem.fix,
    }


def _print_settings(settings: Settings) -> None:
    from rich.table import Table

    console = make_console(width=200)
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for key, value in settings.values().items():
        table.add_row(key, _show(key, value), settings.reasons[key])
    console.print(table)
    for note in settings.notes:
        console.print(f"note: {note}")


def _show(key: str, value: object) -> str:
    if value is None:
        return "the plan's choice" if key == "data.chunk_size_gb" else "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {below}" for key, below in value.items()) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
