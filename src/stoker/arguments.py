"""Public functions and classes that answer a wrong argument in stoker's three parts instead of Python's words.

Enters: a function or class that users call. Leaves: the same. Costs one more frame per call: the arguments are looked
at only after a call has failed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from stoker.display import nearest
from stoker.errors import ArgumentError, StokerError

T = TypeVar("T")
_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    Path: "a path",
    None: "None",
    types.NoneType: "None",
}
_LONGEST, _FEW = 60, 8
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def explained(usual: str, allowed: str = "") -> Callable[[T], T]:
    """Decorate a function or class: a call that fails because of an argument raises an `ArgumentError`.

    An argument is at fault if its name is unknown, or if it is not what the annotation says. Other errors pass.

    Args:
        usual: A call that works, to type instead.
        allowed: What is allowed, if users do not call it themselves; by default its arguments.
    """

    def hold(made: Any) -> Any:
        if not isinstance(made, type):
            return _guarded(made, made.__name__, usual, allowed)
        kind: Any = made
        kind.__init__ = _guarded(kind.__init__, kind.__name__, usual, allowed, kind)
        return kind

    return cast("Callable[[T], T]", hold)


def _guarded(made: Any, name: str, usual: str, allowed: str, only: type | None = None) -> Any:
    @functools.wraps(made)
    def called(*given: Any, **named: Any) -> Any:
        try:
            return made(*given, **named)
        except StokerError:
            raise
        except (TypeError, AttributeError, ValueError) as error:
            if only is not None and type(given[0]) is not only:
                raise  # the class that was called answers
            told = _explain(made, name, given, named, error)
            if told is None:
                raise
            found, fits, fix = told
            raise ArgumentError(
                found, allowed or fits, usual if allowed else fix or usual
            ) from error

    return called


def _explain(
    made: Any, name: str, given: tuple[Any, ...], named: Mapping[str, Any], error: Exception
) -> tuple[str, str, str] | None:
    """Return what was given, what is allowed, and what to type, if known; None: no argument is at fault."""
    known = {each.name: each for each in _parameters(made, given)}
    if not _takes_any(made, given) and (word := next((w for w in named if w not in known), None)):
        parts = (each for each in known if word.casefold() in each or each in word)
        near = nearest(word, known) or next(parts, None)
        fix = _typed(known[near], named[word]) if near else f"leave {word} out"
        return f"{name} has no argument {word!r}.", ", ".join(known), fix
    try:
        bound = inspect.signature(made).bind(*given, **named)
        if error.__traceback__ is None or error.__traceback__.tb_next is None:
            raise error  # the call itself, which the signature does not tell
    except TypeError as wrong:
        return f"{name}: {wrong}.", ", ".join(known), ""
    for word, value in bound.arguments.items():
        if word in known and not _fits(value, kind := known[word].annotation):
            fix = _typed(known[word], inspect.Parameter.empty)
            return f"{word} of {name} is {_shown(value)}.", _words(kind), fix
    return None


def _takes_any(made: Any, given: tuple[Any, ...]) -> bool:
    """Whether keywords of any name are taken, and not handed on to a base class."""
    kinds = {each.kind for each in inspect.signature(made).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds and not _base_of(made, given)


def _base_of(made: Any, given: tuple[Any, ...]) -> list[Any]:
    """Return the constructor of the base class of an object that is made, in a list; none for a function."""
    bases = type(given[0]).__mro__[1:-1] if made.__name__ == "__init__" else ()
    return list(filter(None, [vars(kind).get("__init__") for kind in bases]))[:1]


def _parameters(made: Any, given: tuple[Any, ...]) -> Iterator[inspect.Parameter]:
    """Yield the parameters that have a name; also the keywords of the base class if a class hands others on to it."""
    is_class = made.__name__ == "__init__"
    for number, each in enumerate((made, *_base_of(made, given))):
        for one in list(inspect.signature(each).parameters.values())[is_class:]:
            if one.kind in _VARIABLE or (number and one.kind is not inspect.Parameter.KEYWORD_ONLY):
                continue
            told = one.annotation
            try:
                kind = eval(told, each.__globals__) if isinstance(told, str) else told
            except (NameError, TypeError, AttributeError):  # imported for type checkers only
                kind = Any
            yield one.replace(annotation=kind)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is what an annotation says; True where that cannot be told."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    kind = types.NoneType if kind is None else origin or kind
    if kind is Callable:
        return callable(value)
    if kind in (Any, inspect.Parameter.empty) or not isinstance(kind, type):
        return True
    if "_is_protocol" in vars(kind):
        return True
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    expected: Any = os.PathLike if kind is Path else kind
    if not isinstance(value, expected):
        return False
    if issubclass(kind, Mapping) and len(inner) == 2:
        return all(_fits(key, inner[0]) and _fits(each, inner[1]) for key, each in value.items())
    if issubclass(kind, Collection) and inner:
        first = list(itertools.islice(value, _FEW))  # a Dataset may never end
        return not isinstance(value, str | bytes) and all(_fits(each, inner[0]) for each in first)
    return True


def _words(kind: Any) -> str:
    """Return what an annotation allows, in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    plain = origin or kind
    told = _WORDS.get(plain) or f"a {getattr(plain, '__name__', plain)}"
    of = ", ".join(_words(each) for each in inner if each is not ...)
    return f"{told} of {of}" if of and issubclass(plain, Collection) else told


def _typed(parameter: inspect.Parameter, value: Any) -> str:
    """Return an argument as it is typed, with this value if it fits, else its default; "" if it has none."""
    if value is inspect.Parameter.empty or not _fits(value, parameter.annotation):
        value = parameter.default
    if value is not None and not isinstance(value, bool | int | float | str | tuple):
        return ""
    return f"{parameter.name}={value!r}"


def _shown(value: Any) -> str:
    """Return a short value, or its type."""
    is_plain = value is None or isinstance(value, bool | int | float | str | bytes | list | dict)
    text = repr(value) if is_plain else ""
    return text if 0 < len(text) <= _LONGEST else f"of the type {type(value).__name__}"
