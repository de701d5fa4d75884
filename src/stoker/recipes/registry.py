"""Recipes by name: stoker's own by their folders, a user's own as `package.module:Class`.

Enters: a name. Leaves: a `Recipe`, or an `InputError` that says what is missing and what to type. Costs the
import of that one recipe (torch); listing stoker's own names imports no torch.

A folder of `stoker.recipes` is registered if its `__init__.py` has `RECIPES = {name: "module:Class"}`; no other
file changes for a new recipe. A user's own module is searched where `python -m` searches: in the working folder,
in `PYTHONPATH`, and among installed packages.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import pkgutil
import site
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stoker.recipes
from stoker.config.resolve import PLACES, as_key
from stoker.display import command
from stoker.errors import InputError, StokerError

if TYPE_CHECKING:
    from stoker.recipes.contract import Recipe

OWN = "package.module:Class of your own"
_WALK = "docs/extending.md has a whole recipe"
_SHOWN_FRAMES = 2


@cache
def ready_recipes() -> Mapping[str, str]:
    """Return stoker's own recipes: name to `module:Class`. Imports no torch."""
    found: dict[str, str] = {}
    for entry in pkgutil.iter_modules(stoker.recipes.__path__, "stoker.recipes."):
        if entry.ispkg:
            found |= getattr(importlib.import_module(entry.name), "RECIPES", {})
    return found


def find_recipe(name: str) -> Recipe:
    """Import the recipe of this name and return an instance of it."""
    ready = ready_recipes()
    if name in ready:
        return _checked(_load(ready[name]), name)
    module, _, kind = name.partition(":")
    if kind.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)  # as `python -m` does; a command's own path begins elsewhere
        return _checked(_load(name), name)
    near = difflib.get_close_matches(name, ready, n=1)
    dotted = all(part.isidentifier() for part in name.split(".")) and "." in name
    raise InputError(
        f"there is no recipe {name!r}.",
        f"{', '.join(ready)}, or {OWN}",
        near[0] if near else f"{name}:CLASS" if dotted else next(iter(ready)),
    )


def is_ready(recipe: Recipe) -> bool:
    """Whether a recipe is one of stoker's own. An error in its code is then a bug in stoker."""
    return type(recipe).__module__.startswith("stoker.")


@contextlib.contextmanager
def blamed(recipe: Recipe, member: str) -> Iterator[None]:
    """Turn an error in a user's own recipe into an `InputError` that shows where it happened."""
    try:
        yield
    except StokerError:
        raise
    except Exception as error:
        if is_ready(recipe):
            raise
        raise InputError(
            f"{member} of the recipe {recipe.name!r} ended with {_told(error)}",
            "",
            "STOKER_TRACEBACK=1 before the command shows the whole way",
            _frames(error),
        ) from error


# -- loading -------------------------------------------------------------------------------------


def _load(name: str) -> type[Any]:
    """Return the class `package.module:Class`."""
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _not_found(name, module_name, str(error.name)) from error
    except Exception as error:
        raise InputError(
            f"the recipe {name!r}: importing {module_name} ended with {_told(error)}",
            "a module that can be imported",
            command("python", "-c", f"import {module_name}"),
            _frames(error),
        ) from error
    kind = getattr(module, class_name, None)
    if isinstance(kind, type):
        return kind
    offered = [
        key for key, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "make_job")
    ]  # fmt: skip
    raise InputError(
        f"the module {module_name} ({getattr(module, '__file__', 'built in')}) has no class "
        f"{class_name!r}.",
        ", ".join(f"{module_name}:{key}" for key in offered) or "a class that inherits Recipe",
        f"{module_name}:{offered[0]}" if offered else "docs/extending.md has a whole recipe",
    )


def _not_found(name: str, module: str, missing: str) -> InputError:
    if module == missing or module.startswith(f"{missing}."):
        top = module.partition(".")[0]
        return InputError(
            f"the recipe {name!r}: there is no module {missing!r}.",
            f"a module in the working folder {Path.cwd()}, in PYTHONPATH, or an installed one",
            f"type the command in the folder that holds {top}, or PYTHONPATH=FOLDER before it",
        )
    return InputError(
        f"the recipe {name!r}: {module} imports {missing!r}, which is not installed.",
        "an environment with everything that the recipe imports",
        command("pip", "install", missing.partition(".")[0]),
    )


def _checked(kind: type[Any], name: str) -> Recipe:
    """Return an instance of a class that has every member of `Recipe`."""
    from stoker.recipes.contract import Recipe

    members = [key for key in (*Recipe.__annotations__, *vars(Recipe)) if not key.startswith("_")]
    abstract: frozenset[str] = getattr(kind, "__abstractmethods__", frozenset())
    missing = [key for key in dict.fromkeys(members) if not hasattr(kind, key) or key in abstract]
    if missing:
        raise InputError(
            f"the recipe {name!r} has no {', '.join(missing)}.",
            "a class that inherits stoker.recipes.contract.Recipe, with name, Options, make_job, describe "
            "and rebuild",
            _WALK,
        )
    if not is_dataclass(kind.Options):
        raise InputError(
            f"Options of the recipe {name!r} is {kind.Options!r}.",
            "a frozen dataclass; without fields where there is nothing to choose",
            _WALK,
        )
    named = [*(each.setting for each in kind.defaults), *kind.uses]
    strange = [name for name in named if as_key(name) not in PLACES]
    if strange:
        raise InputError(
            f"defaults or uses of the recipe {name!r} name {', '.join(strange)}.",
            "keys of a config",
            "names such as training.lr, training.epochs and training.batch_size",
        )
    try:
        made: Recipe = kind()
    except TypeError as error:
        raise InputError(
            f"the recipe {name!r} cannot be made: {error}.", "a class without arguments", _WALK
        ) from error
    return made


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(". ") + "."


def _frames(error: BaseException) -> list[str]:
    """Return the last frames of the traceback in the user's own code, and the frame that raised the error."""
    frames = list(traceback.extract_tb(error.__traceback__))
    libraries = (str(Path(stoker.__file__).parent), *site.getsitepackages(), sys.prefix, "<frozen")
    own = [frame for frame in frames[:-1] if not frame.filename.startswith(libraries)]
    shown = [*own[-_SHOWN_FRAMES:], *frames[-1:]]
    return [
        f"{frame.filename}:{frame.lineno}: {frame.line}"
        for frame in shown
    ]  # fmt: skip
