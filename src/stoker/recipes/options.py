"""A recipe's options from plain values: checks of names, types and ranges, with errors that say what to type.

Enters: a frozen dataclass with annotated defaults, and a mapping (a config section, `--set`). Leaves:
an instance of it. Costs: microseconds; no torch. The range of a field is in its annotation (`Range`).
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import ConfigDict, TypeAdapter, ValidationError

from stoker.display import quoted
from stoker.errors import InputError
from stoker.strict_json import json_text

T = TypeVar("T")
# Evaluating the annotations of a class takes 4 ms, and a run reads its options several times.
_hints: Callable[..., dict[str, Any]] = functools.cache(get_type_hints)


class OptionError(InputError):
    """An option of a recipe that cannot be used."""

    option = ""

    @classmethod
    def about(cls, option: str, given: str, allowed: str, fix: str) -> Self:
        """Return the error for one option."""
        made = cls(given, allowed, fix)
        made.option = option
        return made


def parse_options(kind: type[T], given: T | Mapping[str, Any], recipe: str) -> T:
    """Return the options; an unknown name or a value of another type is an error.

    Args:
        kind: A frozen dataclass whose fields are bool, int, float, str, Literal, tuples or None.
        given: Plain values, as YAML or `--set` gives them; lists are accepted for tuples. An instance of
            `kind` is returned as it is.
        recipe: Name of the recipe, for the message.
    """
    if isinstance(given, kind):
        return given
    assert isinstance(given, Mapping)
    hints = _hints(kind)
    known = {entry.name: entry.default for entry in fields(kind)}  # type: ignore[arg-type]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InputError(
            f"the recipe {recipe!r} has no option {', '.join(map(repr, unknown))}.",
            ", ".join(known) or "no options",
            f"leave {unknown[0]} out",
        )
    values = {}
    for name, value in given.items():
        try:
            values[name] = _adapter(hints[name]).validate_python(_as_tuples(value))
        except ValidationError:
            raise OptionError.about(
                name,
                f"the option {name!r} of the recipe {recipe!r} is {value!r}.",
                spell_type(hints[name]),
                f"leave {name} out"
                if known[name] is MISSING
                else f"{name}={known[name]!r}, its default",
            ) from None
    try:
        return kind(**values)
    except TypeError as error:
        raise InputError(
            f"the options of the recipe {recipe!r}: {error}.",
            "",
            "give every option that has no default under recipe.options",
        ) from error


def as_overrides(fix: str, kind: type[Any]) -> str:
    """Rewrite the options in an advice for the command line.

    The errors of recipes use Python's form, `task='regression'`. A user who trains from a config
    types `--set recipe.options.task=regression`.
    """
    names = {entry.name for entry in fields(kind)}
    return ", or ".join(_as_override(way, names) for way in fix.split(", or "))


def _as_override(way: str, names: set[str]) -> str:
    try:
        call = ast.parse(f"f({way.removesuffix(', its default')})", mode="eval").body
        given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}  # type: ignore[attr-defined]
    except (SyntaxError, ValueError):
        return way
    if not given or not names.issuperset(given):
        return way
    settings = (f"recipe.options.{name}={_yaml(value)}" for name, value in given.items())
    return " ".join(f"--set {quoted(text)}" for text in settings)


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) and value.isalpha() else json_text(value)


def require(holds: bool, name: str, value: object, allowed: str, fix: str) -> None:
    """Raise unless a condition on an option holds."""
    if not holds:
        raise OptionError.about(name, f"the option {name!r} is {value!r}.", allowed, fix)


class Range(NamedTuple):
    """The allowed values of an option: `width: Annotated[int, Range("1 or more", lambda n: n >= 1)]`.

    Define a `Range` whose function uses names of its module above the class, not inside the annotation.
    """

    words: str  # the allowed values in words, for the error
    holds: Callable[[Any], bool]  # tells whether a value is allowed; not called for None
    example: Any = None  # the value that the error advises; None advises the default


AtLeastOne = Annotated[int, Range("1 or more", lambda value: value >= 1)]
Share = Annotated[float, Range("0 or more, below 1", lambda value: 0 <= value < 1, 0.1)]


class CheckedOptions:
    """Base of dataclasses of options: checks the `Range` of every field."""

    def __post_init__(self) -> None:
        hints = _hints(type(self), include_extras=True)
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            for rule in getattr(hints[entry.name], "__metadata__", ()):
                if isinstance(rule, Range) and value is not None and not rule.holds(value):
                    example = entry.default if rule.example is None else rule.example
                    example = list(example) if isinstance(example, tuple) else example
                    require(False, entry.name, value, rule.words, f"{entry.name}={example}")


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(strict=True))  # neither True nor "1" is a number


def _as_tuples(value: Any) -> Any:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return tuple(map(_as_tuples, value)) if is_list else value


def spell_type(hint: Any) -> str:
    """Return the values that an annotation allows, in words."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(spell_type(choice) for choice in get_args(hint))
    if origin is Literal:
        return ", ".join(map(str, get_args(hint)))
    if origin is tuple:
        inner = get_args(hint)
        many = {int: "whole numbers", float: "numbers", str: "texts"}
        named = many.get(inner[0], spell_type(inner[0]))
        return f"a list of {named}" if inner[-1] is Ellipsis else f"a list of {len(inner)} {named}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return names.get(hint, "null")
