"""`stoker config migrate OLD.yaml NEW.yaml`: a config of the documents in today's layout.

Enters: an older YAML file. Leaves: a config that `stoker config check` accepts, and a line for every key that
was moved, corrected or dropped. Costs a few milliseconds; a named recipe costs the import of torch, which checks
its options.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stoker.address import masked
from stoker.cli.options import JsonOption, argument, option
from stoker.cli.terminal import echo, print_json
from stoker.display import quoted
from stoker.errors import InputError, unwritable
from stoker.ownership import free_name
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.compat.migrate.convert import Migration


def migrate(
    old: Annotated[Path, argument("The older YAML file.")],
    new: Annotated[Path, argument("The file to write; must not exist.")],
    recipe: Annotated[
        str | None,
        option(
            "--recipe",
            "Name this recipe in NEW, and take over the options that it knows.",
            show_default="the one that OLD names",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write an older config in today's layout; every key is taken over or listed."""
    from stoker.compat.migrate.convert import migrate_file
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
            if masked(made.text) != made.text:  # a password: for its owner's eyes only
                new.chmod(0o600)
            file.write(made.text)
    except OSError as error:
        raise unwritable(new, error) from error
    if as_json:
        _print_json(made, new)
    else:
        _print(made, old, new)


def _why_refused(recipe: str, option: str, value: Any) -> str | None:
    from stoker.recipes.options import parse_options
    from stoker.recipes.registry import find_recipe

    try:
        parse_options(find_recipe(recipe).Options, {option: value}, recipe)
    except InputError as error:
        return f"{error.given.rstrip('.')}; allowed: {error.allowed}"
    return None


def _print_json(made: Migration, new: Path) -> None:
    moved = [
        {"old": each.old, "place": str(each.place), "new": each.new, "value": each.value, "note": each.note}
        for each in made.moved
    ]  # fmt: skip
    dropped = [
        {"old": each.old, "place": str(each.place), "value": each.value, "reason": each.reason}
        for each in made.dropped
    ]
    facts = {"out": str(new), "moved": moved, "dropped": dropped}
    print_json(facts)


def _print(made: Migration, old: Path, new: Path) -> None:
    from stoker.compat.migrate.convert import TYPED

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
