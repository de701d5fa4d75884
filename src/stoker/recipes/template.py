"""A complete, commented config file to start from, for one recipe.

Enters: the name of a recipe. Leaves: YAML that trains without changes once the store is packed. Every key that
the recipe reads is a comment in it, with meaning, unit, default and allowed values. Costs the import of the
recipe (torch).

All texts come from the code: keys from `config/options.py`, options from the recipe's dataclass and its
docstring, defaults from the recipe.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from stoker.config import parse_config, resolve
from stoker.config.load import _yaml_word
from stoker.config.options import describe_allowed
from stoker.config.resolve import AUGMENT, OPTIONS, PLACES, UNREAD, as_key
from stoker.config.tree import key_schemas
from stoker.recipes.catalogue import OPTIONAL, choose_recipe
from stoker.recipes.contract import Recipe
from stoker.recipes.options import spell_type
from stoker.recipes.registry import find_recipe

_WIDTH = 100
_NEEDED = ("recipe.name", "recipe.store", "run.dir")
_ENTRY = re.compile(r"^ {4}(?! )(\w+): (.*(?:\n {8}.*)*)", re.M)


def render_config(name: str) -> str:
    """Return a commented config for a recipe."""
    find_recipe(name)  # its error repeats the name; that of `resolve` would show `--set`
    chosen = choose_recipe(resolve(parse_config("", overrides=[f"recipe.name={_yaml_word(name)}"])))
    short = name.rpartition(":")[2]
    values = {as_key(each.setting): each.value for each in chosen.recipe.defaults}
    values |= dict(zip(_NEEDED, (name, f"stores/{short}", f"runs/{short}"), strict=True))
    values["training.use_gpu_augmentation"] = True  # shown only for recipes that use it
    pack = chosen.recipe.pack_command.replace("OUT", values["recipe.store"])
    head = [
        f"# A config for the recipe {chosen.recipe.name}. Make its store first: {pack}",
        "# Lines that begin with # and a name are defaults: take the # away to change one.",
    ]
    return "\n".join([*head, *_lines(chosen.recipe, values)]) + "\n"


def _lines(recipe: Recipe, values: Mapping[str, Any]) -> Iterator[str]:
    keys = [key for key in key_schemas() if key in PLACES and _is_read(key, recipe)]
    opened: tuple[str, ...] = ()
    for key in keys:
        *above, word = key.split(".")
        for depth, part in enumerate(above):
            if opened[: depth + 1] != tuple(above[: depth + 1]):
                yield f"{'  ' * depth}{part}:"
        opened = tuple(above)
        pad = "  " * len(above)
        if key == OPTIONS:
            yield f"{pad}{word}:"
            yield from _option_lines(recipe, f"{pad}  ")
            continue
        schema = key_schemas()[key]
        unit = f"; unit: {schema['unit']}" if "unit" in schema else ""
        yield from _prose(f"{schema['description']} ({describe_allowed(schema)}{unit})", pad)
        value = _yaml_word(values.get(key, schema["default"]))
        yield f"{pad}{'' if key in _NEEDED else '#'}{word}: {value}"


def _is_read(key: str, recipe: Recipe) -> bool:
    """Whether the config of a recipe lists a key: every job reads the key, or this recipe does."""
    used = {as_key(name) for name in recipe.uses}
    if key.partition(".")[0] == AUGMENT:
        return "training.use_gpu_augmentation" in used
    return key not in UNREAD and (key not in OPTIONAL or key in used)


def _option_lines(recipe: Recipe, pad: str) -> Iterator[str]:
    hints, texts = get_type_hints(recipe.Options), _option_texts(recipe.Options)
    known = {key.rpartition(".")[2] for key in key_schemas()}
    for entry in fields(recipe.Options):
        if entry.name in known:
            continue  # a config key of the same name sets it
        yield from _prose(f"{texts.get(entry.name, '')} ({spell_type(hints[entry.name])})", pad)
        default = entry.default
        if default is MISSING:
            yield f"{pad}#{entry.name}:"
        else:
            plain = list(default) if isinstance(default, tuple) else default
            yield f"{pad}#{entry.name}: {_yaml_word(plain)}"


def _option_texts(kind: type[Any]) -> dict[str, str]:
    """Return the text of each field from the `Attributes:` sections of a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, section = (vars(base).get("__doc__") or "").partition("Attributes:\n")
        lines = "\n".join(line.removeprefix("    ") for line in section.splitlines())
        for name, text in _ENTRY.findall(lines):
            found[name] = re.sub(r"\bNone\b", "null", " ".join(text.split()))
    return found


def _prose(text: str, pad: str) -> list[str]:
    """Return comment lines, which begin with "# "; lines that a user may activate begin with "#name"."""
    return textwrap.wrap(
        text.strip(), _WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# "
    )
