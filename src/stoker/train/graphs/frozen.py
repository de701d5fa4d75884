"""Values that a CUDA graph freezes: numbers of modules and functions, and numbers drawn on the host.

A graph repeats the numbers that the host had when it was captured. If one of them changes, a replay differs
from the eager step.

Enters: modules and functions of a captured step; earlier states of the host's generators. Leaves: why a replay would
differ, or None. Costs: per replay some µs and 0.4 µs for each module; 50 ms per capture if other threads may draw
random numbers.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import pickle
import random
import re
import sysconfig
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from io import IOBase
from operator import itemgetter
from types import (
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any
from weakref import ProxyTypes

import numpy as np
import torch

from stoker.train.generators import capture_host_rng
from stoker.train.graphs.structure import HOOKS

DRAWS_ON_HOST = "the step draws random numbers on the host"
_LOOK_SECONDS, _MOST_LOOKS = 0.05, 20
MOST_COMPARED = 1000
"""Most entries of containers that are examined for one variable or attribute; larger containers are data."""
_MOST_HELPERS = 200
_BY_ANY_NAME = frozenset({"getattr", "setattr", "vars", "__dict__", "attrgetter"})
_LIBRARY = sysconfig.get_path("stdlib")
_LENGTH, _ITEM, _DRAWN, _BYTES = object(), object(), object(), object()
"""Keys of a container's length, a tensor's only value, a generator's state and an array's values."""
_DEPTH, _MOST_BYTES = 3, 4096
"""Levels of containers that are examined, and the size of the largest array that is compared at every replay."""
_HOST = torch.device("cpu")
_CLEAR = frozenset(
    {
        *(
            bool,
            int,
            float,
            str,
            bytes,
            NoneType,
            dict,
            list,
            tuple,
            deque,
            np.ndarray,
            torch.Tensor,
        ),
        *(torch.nn.Parameter, FunctionType, MethodType, ModuleType),
    }
)
"""Types whose attributes can be read without running user code."""
_NUMBERS = bool, int, float, complex, np.generic, Enum
_CONSTANTS = (*_NUMBERS, str, bytes, range, NoneType, torch.dtype, torch.device)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_FOREIGN = frozenset(
    {
        *("torch", "numpy", "stoker", "functools", "collections", "logging", "random"),
        *("builtins", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"),
        *("queue", "threading", "multiprocessing", "concurrent", "asyncio"),  # used by threads
    }
)
"""Packages whose objects and functions are not examined."""
_FRAMEWORKS = ["stoker", "frameworks"]
_OUTSIDE_STEP = re.compile(r"__|on_|validation_|test_|predict_|configure_")
"""Names of methods of a Lightning module that its `training_step` does not call."""
MODULE_TABLES = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes that torch sets in every module."""


class HostNumbers:
    """Numbers, texts and flags that a step's Python code may read: a graph repeats those of its capture.

    They are attributes of modules (`training`, a dropout's `p`), and outer variables that functions and forward
    passes use. Lists, dicts and plain objects are examined three levels deep. Included are the length of a list or
    dict, because a replay appends nothing; tuples of numbers, None, and small numpy arrays; the states of random
    generators, because a replay does not draw from them; and numbers in classes that their methods assign to.

    Args:
        modules: Modules, with all modules inside them.
        functions: Other functions of the step: a criterion, a step function.
        device: Device on which the step runs. On a GPU, tensors with one value in host memory are numbers too,
            because a kernel gets their value, not their address.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        functions: Iterable[Any] = (),
        device: torch.device | None = None,
    ) -> None:
        self._on_gpu = device is not None and device.type == "cuda"
        self._left = MOST_COMPARED
        self._found: dict[tuple[int, Any], tuple[str, Any, Any]] = {}
        self._called: set[int] = set()
        functions = list(functions)
        self._named = names_in(functions)
        code: dict[int, tuple[str, Any]] = {}
        kinds: dict[type, None] = {}
        for root in modules:
            for path, module in root.named_modules():
                name = f"{type(root).__name__}.{path}" if path else type(root).__name__
                self._look(name, vars(module), only=named_in_step(type(module)))
                self._take_of_class(name, module)
                code[id(type(module).forward)] = type(module).__name__, type(module).forward
                kinds[type(module)] = None
        for kind, count in (found for each in kinds for found in _class_counts(each)):
            self._take(f"{kind.__name__}.{count}", kind, count)
        self._take_surroundings(code)
        code = {}
        for given in functions:
            function = getattr(given, "func", given)  # of a functools.partial
            if is_plain_object(function, may_be_called=True):  # such as a criterion with settings
                self._look_into(type(function).__name__, function)
                function = type(function).__call__
            owner = getattr(function, "__self__", None)
            if is_plain_object(owner, may_be_called=True):  # of a method
                self._look_into(type(owner).__name__, owner)
            elif _is_of_framework(owner) and not isinstance(owner, torch.nn.Module):
                self._look(type(owner).__name__, vars(owner), only=function.__code__.co_names)
            is_partial = isinstance(given, functools.partial)
            code[id(given)] = getattr(function, "__name__", ""), given if is_partial else function
        self._take_surroundings(code)
        self._places = list(self._found.values())
        self._values = self.values()
        # All numbers of a container are compared by one call: 0.2 µs for a module.
        keys: dict[int, tuple[Any, list[Any]]] = {}
        self._rest: list[tuple[Any, Any, Any]] = []
        for (_, container, key), value in zip(self._places, self._values, strict=True):
            if key is _DRAWN:  # other code may draw from it between two steps
                continue
            is_entry = isinstance(container, dict | list | deque | tuple)
            if key in (_LENGTH, _ITEM, _BYTES) or not is_entry:
                self._rest.append((container, key, value))
            else:
                keys.setdefault(id(container), (container, []))[1].append(key)
        getters = ((container, itemgetter(*names)) for container, names in keys.values())
        self._groups = [(container, get, get(container)) for container, get in getters]

    def _take_surroundings(self, code: Mapping[int, tuple[str, Any]]) -> None:
        for name, function in code.values():
            for variable, container, key in surroundings(function):
                self._take(f"{variable} of {name}" if name else variable, container, key)

    def _take_of_class(self, name: str, owner: Any) -> None:
        """Take numbers in slots, and those that the class of an object gives it, if the code names them."""
        of_classes = {
            key: value
            for base in type(owner).__mro__[::-1]
            if _package(base) not in _FOREIGN
            for key, value in vars(base).items()
        }
        for key in self._named & of_classes.keys() - getattr(owner, "__dict__", {}).keys():
            value = of_classes[key]
            is_slot = isinstance(value, MemberDescriptorType)
            if is_number(getattr(owner, key, None) if is_slot else value):
                self._found[id(owner), key] = f"{name}.{key}", owner, key
            elif not hasattr(type(value), "__get__"):  # reading a descriptor runs user code
                self._take(f"{name}.{key}", type(owner), key)

    def _look_into(self, name: str, owner: Any, depth: int = _DEPTH) -> None:
        self._take_of_class(name, owner)
        if self._may_look(vars(owner)):
            self._look(name, vars(owner), depth, attributes_read(owner, self._named))

    def _may_look(self, container: Any) -> bool:
        """Whether all entries of a container may still be examined; if so, they are counted."""
        if len(container) > self._left:
            return False
        self._left -= len(container)
        return True

    def _look(
        self, name: str, container: Any, depth: int = _DEPTH, only: Collection[str] | None = None
    ) -> None:
        # A large container, such as a vocabulary, is data: only its length is compared.
        is_listed = isinstance(container, list | deque | tuple)
        keys = range(len(container)) if is_listed else list(container)
        for key in keys if len(keys) <= MOST_COMPARED else ():
            if key not in MODULE_TABLES and (only is None or key in only):
                self._take(f"{name}.{name_key(key)}", container, key, depth)

    def _take(self, name: str, container: Any, key: Any, depth: int = _DEPTH) -> None:
        value = read_place(container, key)
        if is_opaque(value):
            return
        if depth == _DEPTH:
            self._left = MOST_COMPARED
        if is_number(value):
            self._found[id(container), key] = (name, container, key)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_BYTES and value.dtype.kind in "biuf":
                self._found[id(value), _BYTES] = (name, value, _BYTES)
        elif self._on_gpu and _is_host_number(value):
            self._found[id(value), _ITEM] = (name, value, _ITEM)
        elif isinstance(value, _GENERATORS) and getattr(value, "device", _HOST) == _HOST:
            self._found[id(value), _DRAWN] = (name, value, _DRAWN)
        elif depth and isinstance(value, dict | list | deque | tuple | set):
            self._take_container(name, value, depth)
        elif slots_of(value):
            self._take_of_class(name, value)
        elif depth and is_plain_object(value):
            self._look_into(name, value, depth - 1)
        elif depth and is_plain_object(value, may_be_called=True) and id(value) not in self._called:
            self._called.add(id(value))  # such as a loss that a step function calls
            self._look_into(name, value)

    def _take_container(self, name: str, value: Any, depth: int) -> None:
        if (id(value), _LENGTH) in self._found:
            return
        if isinstance(value, set) and len(value) > _MOST_HELPERS:  # data
            return
        if not isinstance(value, tuple):
            what = "entries" if isinstance(value, deque | set) else "length"
            self._found[id(value), _LENGTH] = (f"the {what} of {name}", value, _LENGTH)
        if not isinstance(value, set) and self._may_look(value):
            self._look(name, value, depth - 1)

    def values(self) -> list[Any]:
        """Return their current values."""
        return [read_place(container, key) for _, container, key in self._places]

    def find_change(self) -> str | None:
        """Return the name of a number that has changed since construction, or None."""
        try:
            is_same = all(get(container) == then for container, get, then in self._groups)
            is_same = is_same and all(
                read_place(container, key) == then for container, key, then in self._rest
            )
        except Exception:  # noqa: BLE001 (removed, or replaced by an object whose comparison raises)
            is_same = False
        return None if is_same else self.name_difference(self.values(), self._values)

    def name_difference(self, some: list[Any], others: list[Any]) -> str | None:
        """Return the name of the first number that differs between two results of `values`, or None."""
        return next(self._name_differences(some, others), None)

    def name_counts(self) -> list[str]:
        """Return the names of the numbers that have changed since construction, except `training` of modules."""
        changed = self._name_differences(self.values(), self._values)
        return [name for name in changed if name.rpartition(".")[2] != "training"]

    def _name_differences(self, some: list[Any], others: list[Any]) -> Iterator[str]:
        for (name, _, _), one, other in zip(self._places, some, others, strict=True):
            if one is not other and not _equals(one, other):
                yield name

    def put_back(self) -> None:
        """Restore the values that the numbers had at construction."""
        for (_, container, key), value in zip(self._places, self._values, strict=True):
            if key is _ITEM:
                container.fill_(value)
            elif key is _BYTES:
                if container.tobytes() != value:
                    container[...] = np.frombuffer(value, container.dtype).reshape(container.shape)
            elif key is _DRAWN:
                _set_drawn(container, value)
            elif key is _LENGTH:
                if isinstance(container, list):
                    del container[value:]
                elif isinstance(container, set) and container != value:
                    container.clear()
                    container.update(value)
                elif isinstance(container, deque) and _Entries(container) != value:
                    container.clear()
                    container.extend(value)
            elif isinstance(container, CellType):
                container.cell_contents = value
            elif read_place(container, key) is value:
                continue
            elif isinstance(container, dict | list | deque):
                container[key] = value
            else:
                setattr(container, key, value)


def name_key(key: Any) -> str:
    """Return a key of a container as text; its class for an object such as a parameter, whose text has all values."""
    return str(key) if isinstance(key, str | int | tuple) else type(key).__name__


def _equals(one: Any, other: Any) -> bool:
    """Whether two values are equal; an array of several numbers equals no number."""
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 (the comparison of a user's class)
        return False


class _Entries(tuple[Any, ...]):
    """The entries of a deque, compared by identity: the length of a full deque does not change."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple) or len(self) != len(other):
            return False
        return all(one is another for one, another in zip(self, other, strict=True))

    __hash__ = tuple.__hash__


def _drawn(generator: Any) -> bytes:
    """Return the state of a random generator on the host, as bytes."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)


def _set_drawn(generator: Any, state: bytes) -> None:
    """Set a generator to a state of `_drawn`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))  # noqa: S301 (made by `_drawn` in this process)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))  # noqa: S301
    else:
        generator.bit_generator.state = pickle.loads(state)  # noqa: S301


def _class_counts(kind: type) -> list[tuple[type, str]]:
    """Return the numbers in a class and its bases that a method assigns to, as in `Net.count += 1`."""
    found = []
    for base in (one for one in kind.__mro__ if _package(one) not in _FOREIGN):
        numbers = {n for n, v in vars(base).items() if isinstance(v, bool | int | float)}
        for method in filter(inspect.isfunction, vars(base).values()):
            named = numbers & {*method.__code__.co_names}
            if named:
                stored = {
                    i.argval for i in dis.get_instructions(method) if i.opname == "STORE_ATTR"
                }
                found += [(base, name) for name in sorted(named & stored)]
    return found


def read_place(container: Any, key: Any) -> Any:
    """Return the value of an entry, a variable or an attribute; None if there is none."""
    if key is _LENGTH:
        if isinstance(container, set):
            return frozenset(container)
        return _Entries(container) if isinstance(container, deque) else len(container)
    if key is _ITEM:
        return container.item()
    if key is _DRAWN:
        return _drawn(container)
    if key is _BYTES:
        return container.tobytes()
    if isinstance(container, dict):
        return container.get(key)
    if isinstance(container, type):
        return getattr(container, key, None)
    if isinstance(container, list | deque | tuple):
        return container[key] if key < len(container) else None
    if not isinstance(container, CellType):
        return getattr(container, key, None)  # of an object with slots
    try:
        return container.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return None


def is_opaque(value: Any) -> bool:
    """Whether reading an object's attributes raises: a weak proxy of a deleted object, or a lazy loader that fails.

    A step that uses it may still be captured. Values inside it are not watched.
    """
    if type(value) in _CLEAR:
        return False
    try:
        isinstance(value, Mapping)  # asks for its `__class__`
        for name in ("__dict__", "__self__", "__func__", "func", "__module__"):
            getattr(value, name, None)
    except Exception:  # noqa: BLE001 (user code may raise anything)
        return True
    return False


def slots_of(value: Any) -> list[str]:
    """Return the attributes of a user-defined object that has slots instead of a dict."""
    kind = type(value)
    if hasattr(value, "__dict__") or _package(kind) in _FOREIGN or callable(value):
        return []
    return [name for name, one in vars(kind).items() if isinstance(one, MemberDescriptorType)]


def is_number(value: Any) -> bool:
    """Whether a value is a number, a text, a dtype or another constant that `==` compares, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_number, value))
    if isinstance(value, slice):
        return is_number((value.start, value.stop, value.step))
    return isinstance(value, _CONSTANTS)


def _is_host_number(value: Any) -> bool:
    """Whether a value is a tensor with one value in host memory that requires no gradient."""
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return (
        is_tensor and value.device.type == "cpu" and value.numel() == 1 and not value.requires_grad
    )


def is_plain_object(value: Any, may_be_called: bool = False) -> bool:
    """Whether a value is an object of a user-defined class, such as a config; not of torch or of Python itself."""
    if isinstance(value, torch.nn.Module | torch.Tensor | type | ModuleType):
        return False
    if callable(value) and (not may_be_called or inspect.isroutine(value)):
        return False
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):  # a step may change its counts
        return True
    is_own = _package(type(value)) not in _FOREIGN and not _is_of_framework(value)
    return hasattr(value, "__dict__") and is_own


def _is_of_framework(value: Any) -> bool:
    """Whether a value is a framework's trainer with a mix-in of stoker, which changes its own counts at every step."""
    return any(kind.__module__.split(".")[:2] == _FRAMEWORKS for kind in type(value).__mro__)


def named_in_step(kind: type) -> set[str] | None:
    """Return the attributes that a Lightning module may read within a step; None for any other module.

    Attributes that only hooks around the step use may change freely.
    """
    if not hasattr(kind, "training_step"):
        return None
    names = {"training"}
    for name, value in ((n, v) for base in kind.__mro__ for n, v in vars(base).items()):
        is_own = inspect.isfunction(value) and _package(value) not in _FOREIGN
        if is_own and not _OUTSIDE_STEP.match(name):
            names.update(value.__code__.co_names)
    return names


def _package(thing: Any) -> str:
    """Return the top-level package of an object, a class or a Python module."""
    home = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return (home or "").partition(".")[0]


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
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(function) or _package(function) in _FOREIGN:
        return
    code = function.__code__
    if isinstance(owner, type):
        yield from _settings_of(owner.__name__, owner, code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell, name
        yield from _settings_of(name, read_place(cell, name), code)
    for name in _globals_named(code):
        if name in function.__globals__:
            yield name, function.__globals__, name
            yield from _settings_of(name, function.__globals__[name], code)
    if _is_own(function):
        positional = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        with_default = positional[len(positional) - len(defaults) :]
        yield from ((name, defaults, place) for place, name in enumerate(with_default))
        given = function.__kwdefaults__ or {}
        yield from ((name, given, name) for name in given)
        own = vars(function)
        yield from ((f"{function.__name__}.{name}", own, name) for name in own)


def _settings_of(name: str, value: Any, code: CodeType) -> Iterator[tuple[str, Any, Any]]:
    """Yield the attributes of a user's Python module or class that code names: `config.BETA`, `Settings.beta`."""
    if is_opaque(value):
        return
    is_file = isinstance(value, ModuleType) and _is_own_file(getattr(value, "__file__", None) or "")
    is_class = isinstance(value, type) and not issubclass(value, torch.nn.Module | Enum)
    if (is_file or is_class) and _package(value) not in _FOREIGN:
        container = value if is_class else vars(value)
        for key in _names(code).keys() & vars(value).keys():
            if is_number(vars(value)[key]) or isinstance(vars(value)[key], dict | list):
                yield f"{name}.{key}", container, key


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
    names: dict[str, None] = {}
    for given in functions:
        function = getattr(given, "func", given)
        if is_plain_object(function, may_be_called=True):
            function = type(function).__call__
        is_of_module = isinstance(getattr(function, "__self__", None), torch.nn.Module)
        function = inspect.unwrap(getattr(function, "__func__", function))
        if inspect.isfunction(function) and (_is_own(function) or not is_of_module):
            names |= _names(function.__code__)
    return frozenset(names)


def attributes_read(owner: Any, named: frozenset[str]) -> frozenset[str] | None:
    """Return the attributes of an object that code with these names may read; None if it may read any.

    If the step is a method, its object may also hold counts of the loop, which are not the step's.
    """
    methods = [
        m for kind in type(owner).__mro__[:-1] for m in vars(kind).values() if inspect.isfunction(m)
    ]
    is_passed_on = not named & {*vars(owner), *dir(type(owner))} - {*dir(object)}
    if is_passed_on or named & _BY_ANY_NAME or not all(map(_is_own, methods)):
        return None
    return named


def _is_own(function: Any) -> bool:
    """Whether a function is in the user's own code, not in an installed package or the standard library."""
    function = inspect.unwrap(function) if callable(function) else None
    if not inspect.isfunction(function):
        return False
    return _is_own_file(function.__code__.co_filename) and _package(function) not in _FOREIGN


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


def with_helpers(modules: Iterable[torch.nn.Module], functions: Iterable[Any]) -> list[Any]:
    """Return `functions`, and the user's functions that they and forward passes name.

    Methods are bound to the object on which they are called.
    """
    found: dict[tuple[int, int], Any] = {}

    def add(given: Any) -> None:
        function, owner = getattr(given, "func", given), getattr(given, "__self__", None)
        if is_plain_object(function, may_be_called=True):
            function, owner = type(function).__call__, function
        function = inspect.unwrap(getattr(function, "__func__", function))
        key = id(owner), id(function)
        if key in found or not inspect.isfunction(function) or len(found) >= _MOST_HELPERS:
            return
        found[key] = given
        if _is_own(function):
            names = _names(function.__code__)
            enter(owner, names)
            for _, container, name in surroundings(given):
                enter(read_place(container, name), names)

    def enter(value: Any, names: Mapping[str, None], depth: int = 0) -> None:
        if is_opaque(value):
            return
        if isinstance(value, dict | list | tuple):  # of callbacks
            few = depth <= _DEPTH and len(value) <= _MOST_HELPERS
            for one in (value.values() if isinstance(value, dict) else value) if few else ():
                enter(one, names, depth + 1)
            return
        if isinstance(value, FunctionType | MethodType | functools.partial):
            function = getattr(value, "func", value)
            if _is_own(getattr(function, "__func__", function)):
                add(value)
            return
        is_plain = is_plain_object(value, may_be_called=True)
        if depth > _DEPTH or not (is_plain or isinstance(value, torch.nn.Module | type)):
            return
        if isinstance(value, torch.nn.Module):
            enter_module(value)
        kind = value if isinstance(value, type) else type(value)
        for name in (*names, "__call__") if is_plain else names:
            found = inspect.getattr_static(kind, name, None)
            method: Any = found.fget if isinstance(found, property) else found
            if isinstance(method, classmethod):
                add(MethodType(method.__func__, kind))
            elif _is_own(method):
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
            if _is_own(kind.forward):
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


def quiet_host_rng(may_wait: bool) -> dict[str, Any] | None:
    """Return the states of the host's generators at a time when no other thread draws; None if others go on drawing.

    Args:
        may_wait: Whether other threads may draw, such as one that prefetches from a dataset. Such a thread pauses
            when it is far enough ahead; this function waits for that, at most a second.
    """
    state = capture_host_rng()
    if not may_wait:
        return state
    for _ in range(_MOST_LOOKS):
        time.sleep(_LOOK_SECONDS)
        before, state = state, capture_host_rng()
        if _is_same(before, state):
            return state
    return None


def has_drawn(before: dict[str, Any]) -> bool:
    """Whether the host's generators have changed since the states `before`."""
    return not _is_same(before, capture_host_rng())


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_is_same(value, other[name]) for name, value in one.items())
    return bool(one == other)
