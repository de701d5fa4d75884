"""`stoker config`: write, check and show config files, bring older ones up to date, print the schema for editors.

Enters: a YAML file and `--set` overrides. Leaves: a table, YAML or one JSON document on stdout.
Costs a few milliseconds beside the imports.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.address import MARK, masked
from stoker.cli.options import JsonOption, SetOption, require_output, verb
from stoker.cli.terminal import (
    echo,
    echo_lines,
    make_console,
    plain_table,
    print_commands,
    print_json,
)
from stoker.display import command, quoted, secret_hint
from stoker.errors import InputError, unwritable
from stoker.ownership import always, free_name, write_text
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.compat.migrate import Migration
    from stoker.config import Config, Settings

app = typer.Typer(no_args_is_help=True, help="Write, check, show and migrate config files.")

FileArgument = Annotated[Path, typer.Argument(help="The YAML file.")]


@app.command()
@verb
def check(file: FileArgument, *, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Check FILE, and say which value each setting gets, and from where."""
    from stoker.config import check_config, resolve
    from stoker.config.resolve import as_error

    config, problems = check_config(file, overrides or ())
    if config is None:
        if not as_json:
            raise as_error(problems)
        names = ("key", "given", "allowed", "fix")
        rows = [
            {name: getattr(problem.place, name) for name in ("file", "line", "column")}
            | {name: getattr(problem, name) for name in names}
            for problem in problems
        ]
        print_json({"ok": False, "problems": rows}, indent=2)
        raise typer.Exit(as_error(problems).exit_code)
    settings = resolve(config)
    if settings.recipe.name is not None:
        # Costs the import of torch, and finds errors that would otherwise end a run at its start.
        from stoker.recipes.catalogue import choose_recipe

        settings = choose_recipe(settings).noted_settings
    if as_json:
        print_json({"ok": True, "problems": [], **settings.to_json()}, indent=2)
    else:
        _print_settings(settings)


@app.command()
@verb
def show(
    file: Path | None = None,
    *,
    overrides: SetOption = None,
    every: Annotated[bool, typer.Option("--all")] = False,
) -> None:
    """Print FILE as stoker reads it: anchors and overrides worked in, YAML on stdout.

    Options:
        file: The YAML file; without one, every key at its default.
        every: Also list the keys that are not written, as comments.
    """
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
    """Return the recipe's own defaults, by every key that may write the setting."""
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
@verb
def init(recipe: str, out: Path | None = None, *, force: bool = False) -> None:
    """Write a complete, commented config for RECIPE, which trains as it stands once its store is packed.

    Options:
        recipe: A ready job, or package.module:Class.
        out: The file to write; without one, stdout.
        force: Let OUT replace a file.
    """
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


@app.command()
@verb
def migrate(
    old: Path,
    new: Path,
    *,
    recipe: Annotated[str | None, typer.Option(show_default="the one that OLD names")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write an older config in today's layout; every key is taken over or listed.

    Options:
        old: The older YAML file.
        new: The file to write; must not exist.
        recipe: Name this recipe in NEW, and take over the options that it knows.
    """
    from stoker.compat.migrate import migrate_file
    from stoker.config import parse_config, resolve

    if new.exists():
        raise InputError(
            f"{new} exists already.",
            "a file that is not there yet",
            f"{quoted(free_name(new))}, or move it away",
        )
    made = migrate_file(old, recipe, _why_refused)
    settings = resolve(parse_config(made.text, str(new)))
    if settings.recipe.name is not None:
        from stoker.recipes.catalogue import choose_recipe

        choose_recipe(settings)
    try:
        with new.open("x", encoding="utf-8") as file:
            if masked(made.text) != made.text:  # it holds a password: only its owner may read it
                new.chmod(0o600)
            file.write(made.text)
    except OSError as error:
        raise unwritable(new, error) from error
    if as_json:
        kinds = {"moved": ("new", "value", "note"), "dropped": ("value", "reason")}
        facts = {
            kind: [
                {"old": each.old, "place": str(each.place)}
                | {name: getattr(each, name) for name in names}
                for each in getattr(made, kind)
            ]
            for kind, names in kinds.items()
        }
        print_json({"out": str(new)} | facts)
    else:
        _print_migration(made, old, new)


@app.command()
def schema() -> None:
    """Print the JSON Schema of config files, so that editors complete and check them."""
    from stoker.config import config_schema

    print_json(config_schema(), indent=2)


def _print_settings(settings: Settings) -> None:
    console = make_console(width=200)
    rows = [
        (key, _show(key, value), settings.reasons[key]) for key, value in settings.values().items()
    ]
    console.print(plain_table(rows, ("setting", "value", "from")))
    for note in settings.notes:
        console.print(f"note: {note}")


def _show(key: str, value: object) -> str:
    if value is None:
        return "the plan's choice" if key == "data.chunk_size_gb" else "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {below}" for key, below in value.items()) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- migrating ------------------------------------------------------------------------------------


def _why_refused(recipe: str, option: str, value: Any) -> str | None:
    from stoker.recipes.options import parse_options
    from stoker.recipes.registry import find_recipe

    try:
        parse_options(find_recipe(recipe).Options, {option: value}, recipe)
    except InputError as error:
        return f"{error.given.rstrip('.')}; allowed: {error.allowed}"
    return None


def _print_migration(made: Migration, old: Path, new: Path) -> None:
    from stoker.compat.migrate import TYPED

    taken = [each for each in made.moved if each.old != TYPED]
    for each in taken:
        if each.old != each.new:
            echo(f"moved    {each.old} to {each.new}")
        if each.note:
            echo(f"fixed    {each.old} ({each.place}): {each.note}")
    for drop in made.dropped:
        echo(f"dropped  {drop}")
    echo(
        f"{new}: {format_count(len(taken), 'key')} of {old} taken over, {len(made.dropped)} dropped"
    )
    if not any(each.new == "recipe.name" and each.value for each in made.moved):
        echo("it names no recipe yet: --recipe NAME does, for `stoker train`")
