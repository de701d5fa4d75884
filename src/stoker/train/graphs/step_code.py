"""The code of a step: the names that it reads, the variables around it, and the functions that it calls.

Enters: functions and modules of a step. Leaves: names of attributes and globals; places of outer variables; the user's
own functions that a step calls, with the objects of their methods. Costs: milliseconds at each capture.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import itertools
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from io import IOBase
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

import torch

from stoker.train.graphs.places import (
    FOREIGN,
    MODULE_TABLES,
    MOST_COMPARED,
    builtin_of,
    entries_of,
    is_cached,
    is_number,
    is_opaque,
    is_plain_object,
    name_key,
    package_of,
    read_place,
    stores_of,
)
from stoker.train.graphs.structure import HOOKS

_DEPTH, _DEEPEST = 3, 10
"""Levels of containers and of objects in which functions of the step are found."""
_MOST_HELPERS = 200
_NOT_IN_STEP = re.compile(
    r"__(init|new|post_init|del|str|repr|eq|ne|lt|le|gt|ge|hash|setattr|delattr|getstate|setstate|reduce|copy|deepcopy)__"
)
"""Names of methods that Python calls, but not where code computes with an object; each names all fields."""
_BY_ANY_NAME = frozenset({"getattr", "setattr", "vars", "__dict__", "attrgetter"})
_LIBRARY = sysconfig.get_path("stdlib")
_OUTSIDE_STEP = re.compile(r"__|on_|validation_|test_|predict_|configure_")
"""Names of methods of a Lightning module that its `training_step` does not call."""


def surroundings(function: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the outer variables that a function uses: name, container, and key in the container.

    They are in its closure, globals, defaults and attributes; for a `functools.partial` also in its arguments.
    """
    for place in _variables_around(function):
        if not is_opaque(read_place(*place[1:])):
            yield place


def _variables_around(function: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(function, functools.partial):
        yield from (("an argument", function.args, place) for place in range(len(function.args)))
        yield from ((name, function.keywords, name) for name in function.keywords)
        function = function.func
    owner = getattr(function, "__self__", None)
    for layer in layers_of(function):
        if package_of(layer) not in FOREIGN:
            if isinstance(owner, type):
                yield from _settings_of(owner.__name__, owner, layer.__code__)
            yield from _variables_of(layer)


def layers_of(function: Any) -> list[FunctionType]:
    """Return the Python function that is called, and those that its decorators of the user have wrapped around it."""
    layers = [getattr(function, "__func__", function)]
    while len(layers) < _MOST_HELPERS and "__wrapped__" in getattr(layers[-1], "__dict__", ()):
        layers.append(vars(layers[-1])["__wrapped__"])
    functions = [one for one in layers if isinstance(one, FunctionType)]
    return [f for f in functions if f is functions[-1] or _is_own_file(f.__code__.co_filename)]


def _variables_of(function: FunctionType) -> Iterator[tuple[str, Any, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell, name
        yield from _settings_of(name, read_place(cell, name), code)
    for name in _globals_named(code):
        if name in function.__globals__:
            yield name, function.__globals__, name
            yield from _settings_of(name, function.__globals__[name], code)
        elif is_number(vars(builtins).get(name)) and name in vars(builtins):
            yield name, vars(builtins), name
    if is_own(function):
        positional = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        with_default = positional[len(positional) - len(defaults) :]
        yield from ((name, defaults, place) for place, name in enumerate(with_default))
        given = function.__kwdefaults__ or {}
        yield from ((name, given, name) for name in given)
        own = vars(function)
        yield from ((f"{function.__name__}.{name}", own, name) for name in own)


def _settings_of(
    name: str, value: Any, code: CodeType, depth: int = _DEPTH
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the attributes of a user's Python module or class that code names: `config.BETA`, `Settings.beta`."""
    if is_opaque(value) or not isinstance(value, ModuleType | type):
        return
    is_file = isinstance(value, ModuleType) and _is_own_file(vars(value).get("__file__") or "")
    is_class = isinstance(value, type) and not issubclass(value, torch.nn.Module | Enum)
    if not (is_file or is_class) or package_of(value) in FOREIGN:
        return
    names = {*_names(code), "__getattr__"} if is_file else _names(code).keys()
    for key in names & vars(value).keys():
        held = vars(value)[key]
        if type(held) in (ModuleType, type):  # settings of settings
            if depth:
                yield from _settings_of(f"{name}.{key}", held, code, depth - 1)
        elif is_file or not hasattr(type(held), "__get__"):  # reading a descriptor runs user code
            yield f"{name}.{key}", value if is_class else vars(value), key


@functools.cache
def _globals_named(code: CodeType) -> tuple[str, ...]:
    """Return the globals that code and the functions inside it read or assign to; not names of attributes."""
    names = {
        one.argval: None
        for one in dis.get_instructions(code)
        if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "STORE_NAME")
    }
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= dict.fromkeys(_globals_named(inner))
    return tuple(names)


def _names(code: CodeType) -> dict[str, None]:
    """Return the names of globals and attributes in code and in the functions inside it."""
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _names(inner)
    return names


def names_in(functions: Iterable[Any]) -> frozenset[str]:
    """Return the names of all globals and attributes in the code of functions."""
    return frozenset(name for code in _codes(functions) for name in _names(code))


def keys_in(functions: Iterable[Any]) -> frozenset[Any]:
    """Return the names in the code of functions, and its texts, which may be keys or names of attributes."""
    keys: set[Any] = set()
    waiting: list[Any] = [*_codes(functions)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, CodeType):
            keys.update(one.co_names)
            waiting += one.co_consts
        elif isinstance(one, tuple | frozenset):
            waiting += one
        elif isinstance(one, str):
            keys.update((one, *one.split(".")))  # `OmegaConf.select(cfg, "loss.beta")`
        elif isinstance(one, int):
            keys.add(one)
    return frozenset(key for key in keys if isinstance(key, int) or not key.startswith("__"))


def _codes(functions: Iterable[Any]) -> Iterator[CodeType]:
    for given in functions:
        function = getattr(given, "func", given)
        if is_plain_object(function, may_be_called=True):
            function = type(function).__call__
        is_of_module = isinstance(getattr(function, "__self__", None), torch.nn.Module)
        for layer in layers_of(function):
            if is_own(layer) or not is_of_module:
                yield layer.__code__


def named_in_step(kind: type) -> set[str] | None:
    """Return the attributes that a Lightning module may read within a step; None for any other module.

    Attributes that only hooks around the step use may change freely.
    """
    if not hasattr(kind, "training_step"):
        return None
    names = {"training"}
    for name, value in ((n, v) for base in kind.__mro__ for n, v in vars(base).items()):
        is_users = inspect.isfunction(value) and package_of(value) not in FOREIGN
        if is_users and not _OUTSIDE_STEP.match(name):
            names.update(value.__code__.co_names)
    for name in [*names]:  # `hparams` reads `_hparams`
        getter = getattr(inspect.getattr_static(kind, name, None), "fget", None)
        if inspect.isfunction(getter):
            names.update(getter.__code__.co_names)
    return names


def attributes_read(owner: Any, named: frozenset[str]) -> frozenset[str] | None:
    """Return the attributes of an object that code with these names may read; None if it may read any.

    If the step is a method, its object may also hold counts of the loop, which are not the step's.
    """
    methods = [
        m for kind in type(owner).__mro__[:-1] for m in vars(kind).values() if inspect.isfunction(m)
    ]
    is_passed_on = not named & {*vars(owner), *dir(type(owner))} - {*dir(object)}
    if is_passed_on or named & _BY_ANY_NAME or not all(map(is_own, methods)):
        return None
    return named


def class_counts(kind: type) -> list[tuple[type, str]]:
    """Return the numbers in a class and its bases that a method assigns to, as in `Net.count += 1`."""
    found = []
    for base in (one for one in kind.__mro__ if package_of(one) not in FOREIGN):
        numbers = {n for n, v in vars(base).items() if isinstance(v, bool | int | float)}
        for method in filter(inspect.isfunction, vars(base).values()):
            named = numbers & {*method.__code__.co_names}
            if named:
                stored = {
                    i.argval for i in dis.get_instructions(method) if i.opname == "STORE_ATTR"
                }
                found += [(base, name) for name in sorted(named & stored)]
    return found


def is_own(function: Any) -> bool:
    """Whether a function is in the user's own code, not in an installed package or the standard library."""
    function = inspect.unwrap(function) if callable(function) else None
    if not inspect.isfunction(function):
        return False
    return _is_own_file(function.__code__.co_filename) and package_of(function) not in FOREIGN


def _is_own_file(file: str) -> bool:
    return "-packages" not in file and not file.startswith((_LIBRARY, "<frozen"))


def find_iterator(modules: Iterable[torch.nn.Module], functions: Iterable[Any]) -> str | None:
    """Return the name of an iterator that code of a step names, also in a dict or list; None without one.

    What is taken from it cannot be given back: a generator, `itertools.cycle`, the iterator of a loader. Files, which
    are iterators too, are left out.
    """
    places: list[tuple[str, Any, Any]] = []
    for given in functions:
        places += surroundings(given)
        owner = getattr(getattr(given, "func", given), "__self__", None)
        named = names_in([given]) & getattr(owner, "__dict__", {}).keys()
        places += [(f"{type(owner).__name__}.{name}", vars(owner), name) for name in named]
    for module in {type(each): each for root in modules for each in root.modules()}.values():
        named = names_in([type(module).forward]) & vars(module).keys() - MODULE_TABLES
        places += [(f"{type(module).__name__}.{name}", vars(module), name) for name in named]
    for name, container, key in places:
        held = read_place(container, key)
        inner: Iterable[Any] = enumerate(held) if type(held) in (list, tuple) else ()
        few = itertools.islice(held.items() if type(held) is dict else inner, MOST_COMPARED)
        for place, one in ((name, held), *((f"{name}.{name_key(k)}", v) for k, v in few)):
            # `type` asks the object nothing. A weak proxy has the methods of all kinds.
            if issubclass(type(one), Iterator) and not issubclass(type(one), (IOBase, *ProxyTypes)):
                return place
    return None


def _function_behind(found: Any) -> Any:
    if isinstance(found, property):
        return found.fget
    return found.__func__ if isinstance(found, staticmethod) else found


def _operators(kind: type) -> list[str]:
    """Return the methods of an object that code calls without naming them: `weight * loss`, `float(weight)`."""
    bases = (base for base in kind.__mro__ if package_of(base) not in FOREIGN)
    named = {name for base in bases for name, method in vars(base).items() if is_own(method)}
    return sorted(name for name in named if name.startswith("__") and not _NOT_IN_STEP.match(name))


def with_helpers(modules: Iterable[torch.nn.Module], functions: Iterable[Any]) -> list[Any]:
    """Return `functions`, and the user's functions that they and forward passes name.

    Methods are bound to the object on which they are called.
    """
    found: dict[tuple[int, int], Any] = {}
    seen: dict[tuple[int, int], Any] = {}

    def add(given: Any) -> None:
        function, owner = getattr(given, "func", given), getattr(given, "__self__", None)
        if is_plain_object(function, may_be_called=True):
            function, owner = type(function).__call__, function
        layers = layers_of(function)
        is_partial = isinstance(given, functools.partial)  # with arguments of its own
        key = id(owner), id(given if is_partial else getattr(function, "__func__", function))
        if key in found or not layers or len(found) >= _MOST_HELPERS:
            return
        found[key] = given
        if any(map(is_own, layers)):
            names = {name: None for layer in layers for name in _names(layer.__code__)}
            enter(owner, names)
            for _, container, name in surroundings(given):
                enter(read_place(container, name), names)

    def enter(value: Any, names: Mapping[str, None], depth: int = 0) -> None:
        if is_opaque(value):
            return
        if depth > _DEPTH:
            if depth > _DEEPEST or (id(value), id(names)) in seen:
                return
            seen[id(value), id(names)] = names
        if builtin_of(value):  # of callbacks
            entries = entries_of(value) if depth <= _DEPTH else []
            for one in entries if len(entries) <= _MOST_HELPERS else ():
                enter(one, names, depth + 1)
            return
        value = inspect.unwrap(value) if is_cached(value) else value
        if isinstance(value, FunctionType | MethodType | functools.partial):
            function = getattr(value, "func", value)
            if is_own(getattr(function, "__func__", function)):
                add(value)
                return
        for store in stores_of(value):  # of a partial of a library's function
            enter(store, names, depth + 1)
        if isinstance(value, torch.nn.Module):
            enter_module(value)
        if isinstance(value, torch.nn.Module | type) or is_plain_object(value, may_be_called=True):
            with contextlib.suppress(ReferenceError):  # a weak proxy whose object has just gone
                enter_object(value, names, depth)

    def enter_object(value: Any, names: Mapping[str, None], depth: int) -> None:
        kind = value if isinstance(value, type) else type(value)
        is_plain = not isinstance(value, torch.nn.Module | type)
        for name in (*names, *_operators(kind)) if is_plain else names:
            method = _function_behind(inspect.getattr_static(kind, name, None))
            for inherited in kind.__mro__ if "super" in names else ():
                if is_own(vars(inherited).get(name)):
                    add(MethodType(vars(inherited)[name], value))
            if isinstance(method, classmethod):
                add(MethodType(method.__func__, kind))
            elif is_own(method):
                add(MethodType(method, value))
            elif (name not in vars(value) and not callable(method)) or isinstance(
                method, torch.nn.Module
            ):
                enter(method, names, depth + 1)  # what the class gives to all its objects
        for name in names.keys() & vars(value).keys() - MODULE_TABLES:
            enter(vars(value)[name], names, depth + 1)

    def enter_module(root: torch.nn.Module) -> None:
        if id(root) in entered:
            return
        entered.update(map(id, root.modules()))
        # Also a library's: `StepState.examined` finds the module by it.
        add(MethodType(type(root).forward, root))
        kinds = {type(each): each for each in root.modules()}
        for kind, module in kinds.items():
            if is_own(kind.forward):
                add(MethodType(kind.forward, module))
        for module in root.modules():
            for name in HOOKS:
                enter(getattr(module, name, None) or {}, {})

    given, entered = list(functions), set[int]()
    for root in modules:
        enter_module(root)
    for function in given:
        add(function)
    known = {id(function) for function in given}
    return [*given, *(one for one in found.values() if id(one) not in known)]
