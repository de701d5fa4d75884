"""Places where the code of a step keeps a value: an entry, a variable, an attribute, the length of a list.

Enters: a container and a key. Leaves: the value, as one that `==` compares; whether it may be examined; the value put
back. Runs no code of a user's class, except where it asks for its `__class__` and `__dict__` (`is_opaque`).
"""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import random
import weakref
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from operator import is_, itemgetter
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import numpy as np
import torch

MOST_COMPARED = 1000
"""Most entries of containers that are examined for one variable or attribute; larger containers are data."""


class Inside:
    """A key that stands for what is inside a container."""


LENGTH, ITEM, DRAWN, BYTES, CURRENT = (Inside() for _ in range(5))
"""Keys of a container's length, a tensor's only value, a generator's state, an array's and a context's values."""
HOST = torch.device("cpu")
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
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
FOREIGN = frozenset(
    {
        *("torch", "numpy", "stoker", "functools", "logging", "random"),
        *("builtins", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"),
        *("queue", "threading", "multiprocessing", "concurrent", "asyncio"),  # used by threads
    }
)
"""Packages whose objects and functions are not examined."""
_DRAW_FOR_ALL: tuple[Any, ...] = random.random, np.random.random
"""Methods of the generators that all code shares, which are not the step's own."""
_CACHED = type(functools.cache(len))
_FRAMEWORKS = ["stoker", "frameworks"]
MODULE_TABLES = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes that torch sets in every module."""


_BUILTIN: tuple[Any, ...] = dict, list, tuple, deque
PLAIN_KEYS = frozenset({str, int, bytes})
_LENGTHS = frozenset(kind.__len__ for kind in _BUILTIN)


class CodeKeys(frozenset[Any]):
    """Names and texts in code; as a key, it stands for which of them a dict or a class has."""

    __slots__ = ()
    __hash__ = frozenset.__hash__


def read_place(container: Any, key: Any) -> Any:
    """Return the value of an entry, a variable or an attribute; None if there is none."""
    if key is LENGTH:
        if isinstance(container, set):
            return frozenset(container)
        return _InDeque(container) if isinstance(container, deque) else len(keys_of(container))
    if key is ITEM:
        return container.item()
    if key is DRAWN:
        return _drawn(container)
    if key is BYTES:
        return bytes(container) if isinstance(container, bytearray) else container.tobytes()
    if key is CURRENT:
        return container.get(None)
    if type(key) is CodeKeys:
        # Other keys would be hashed by code of their classes.
        return key.intersection(one for one in keys_of(container) if type(one) in PLAIN_KEYS)
    base = builtin_of(container)
    if base is dict:
        return dict.get(container, key)
    if base is not None:
        return base.__getitem__(container, key) if key < base.__len__(container) else None
    if isinstance(container, type):
        return getattr(container, key, None)
    try:
        if type(container) is CellType:
            return container.cell_contents
        return object.__getattribute__(container, key)  # of an object with slots
    except (ValueError, AttributeError):  # not assigned yet
        return None


class Entries:
    """Entries of dicts and lists with their values at construction; `itemgetter` reads a container's in one call."""

    def __init__(self, places: Iterable[tuple[Any, Any, Any]]) -> None:
        found: dict[int, tuple[Any, list[Any], list[Any]]] = {}
        for container, key, value in places:
            _, keys, values = found.setdefault(id(container), (container, [], []))
            keys.append(key)
            values.append(value)
        # At least two keys: with one, `itemgetter` returns the value and not a tuple.
        self._readers = [(one, itemgetter(*keys, keys[0])) for one, keys, _ in found.values()]
        self._then = [(*values, values[0]) for _, _, values in found.values()]

    def are_equal(self) -> bool:
        """Whether all have the values of construction. Raises if one was removed."""
        # One comparison of lists: a tuple compares identical entries without calling anything.
        return [read(container) for container, read in self._readers] == self._then

    def are_same(self) -> bool:
        """Whether all are the objects of construction. Raises if one was removed."""
        pairs = zip(self._readers, self._then, strict=True)
        return all(all(map(is_, read(container), then)) for (container, read), then in pairs)


def put_place(container: Any, key: Any, value: Any) -> None:
    """Restore the value that `read_place` has returned."""
    if type(key) in (Inside, CodeKeys):
        _put_inside(container, key, value)
    elif isinstance(container, CellType):
        container.cell_contents = value
    elif read_place(container, key) is value:
        return
    elif isinstance(container, dict):
        dict.__setitem__(container, key, value)
    elif isinstance(container, list | deque):
        container[key] = value
    elif isinstance(container, type):
        setattr(container, key, value)
    else:
        object.__setattr__(container, key, value)  # also where a dataclass is frozen


def _put_inside(container: Any, key: Any, value: Any) -> None:
    if key is ITEM:
        container.fill_(value)
    elif key is DRAWN:
        _set_drawn(container, value)
    elif read_place(container, key) == value:
        return
    elif key is CURRENT:
        container.set(value)
    elif key is BYTES and isinstance(container, np.ndarray):
        container[...] = np.frombuffer(value, container.dtype).reshape(container.shape)
    elif key is BYTES:
        container[:] = array(container.typecode, value) if type(container) is array else value
    elif type(key) is CodeKeys:
        for name in read_place(container, key) - value:
            _remove(container, name)
    elif isinstance(container, list):
        del container[value:]
    elif isinstance(container, set):
        container.clear()
        container.update(value)
    elif isinstance(container, deque):
        container.clear()
        container.extend(value)


def _remove(container: Any, name: Any) -> None:
    if isinstance(container, type):
        delattr(container, name)
    else:
        dict.__delitem__(container, name)


def builtin_of(container: Any) -> Any:
    """Return the class of Python whose entries a container has, whatever its own class makes of them; or None."""
    return next((kind for kind in _BUILTIN if issubclass(type(container), kind)), None)


def keys_of(container: Any) -> Collection[Any]:
    """Return the keys of a dict or class, or the places in a list, without running code of its class."""
    if isinstance(container, type):
        return vars(container).keys()
    base: Any = builtin_of(container) or set
    return list(dict.keys(container)) if base is dict else range(base.__len__(container))


def entries_of(container: Any) -> list[Any]:
    """Return the entries of a dict, list, tuple or deque without running code of its class."""
    base = builtin_of(container)
    return list(dict.values(container) if base is dict else base.__iter__(container))


def memory_bytes(value: Any) -> int:
    """Return the size of an array in bytes."""
    return int(value.nbytes) if isinstance(value, np.ndarray) else memoryview(value).nbytes


def is_plain_container(value: Any) -> bool:
    """Whether a value is a dict, list or deque whose class changes nothing about its entries."""
    base, kind = builtin_of(value), type(value)
    if base in (None, tuple):
        return False
    methods = ("__getitem__", "__iter__", "__len__", "items", "get")
    return kind.__module__ == "collections" or all(
        getattr(kind, name, None) is getattr(base, name, None) for name in methods
    )


def has_plain_length(container: Any) -> bool:
    """Whether `len` runs no code of the user's, and tells of every entry that comes."""
    return builtin_of(container) in (dict, list) and type(container).__len__ in _LENGTHS


def stores_of(value: Any) -> list[Any]:
    """Return the containers of an object of Python's library: arguments of a partial, results of a cached function."""
    kind = type(value)
    if issubclass(kind, functools.partial):
        own = functools.partial
        return [(own.func.__get__(value),), own.args.__get__(value), own.keywords.__get__(value)]
    if kind in (MethodType, BuiltinMethodType):
        owner = value.__self__
        is_shared = any(owner is draw.__self__ for draw in _DRAW_FOR_ALL)
        return [] if is_shared or isinstance(owner, ModuleType) else [(owner,)]
    if issubclass(kind, weakref.ref):
        return [(weakref.ref.__call__(value),)]
    if kind is MappingProxyType:
        return [one for one in gc.get_referents(value) if builtin_of(one) is dict]
    if kind is _CACHED:  # a dict of results; or of links to results, beside the results
        held = [one for one in gc.get_referents(value) if not isinstance(one, type | FunctionType)]
        tables = [one for one in held if type(one) is dict and one is not vars(value)]
        tables = [one for one in tables if any(map(_is_link, dict.values(one)))] or tables
        known = [vars(value), *tables]
        return [*tables, [one for one in held if not any(one is other for other in known)]]
    return [()] if _is_link(value) else []


def is_cached(value: Any) -> bool:
    """Whether a value is a function whose results are cached, or a result of a bounded cache."""
    return type(value) is _CACHED or _is_link(value)


def _is_link(value: Any) -> bool:
    return type(value).__name__ == "_lru_list_elem"


def is_delegating(value: Any) -> bool:
    """Whether the class of an object looks up its attributes or entries itself, as in a private dict."""
    return _defines(type(value), {"__getattr__", "__getitem__"})


def is_value(value: Any) -> bool:
    """Whether an object stands for what is in it, such as a node of a config: its class compares or looks up."""
    return _defines(type(value), {"__getattr__", "__getitem__", "__eq__"})


def _defines(kind: type, methods: set[str]) -> bool:
    return any(
        methods & vars(base).keys() for base in kind.__mro__ if package_of(base) not in FOREIGN
    )


def name_key(key: Any) -> str:
    """Return a key of a container as text; its class for an object such as a parameter, whose text has all values."""
    return str(key) if isinstance(key, str | int | tuple) else type(key).__name__


def equals(one: Any, other: Any) -> bool:
    """Whether two values are equal; an array of several numbers equals no number."""
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 (the comparison of a user's class)
        return False


class _InDeque(tuple[Any, ...]):
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


def is_opaque(value: Any) -> bool:
    """Whether reading an object's attributes raises: a weak proxy of a deleted object, or a lazy loader that fails.

    A step that uses it may still be captured. Values inside it are not watched.
    """
    if type(value) in _CLEAR:
        return False
    try:
        isinstance(value, Mapping)  # asks for its `__class__`
        getattr(value, "__dict__", None)
    except Exception:  # noqa: BLE001 (user code may raise anything)
        return True
    return False


def is_number(value: Any) -> bool:
    """Whether a value is a number, a text, a dtype or another constant that `==` compares, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_number, value))
    if isinstance(value, slice):
        return is_number((value.start, value.stop, value.step))
    return isinstance(value, _CONSTANTS)


def is_host_number(value: Any) -> bool:
    """Whether a value is a tensor with one value in host memory that requires no gradient."""
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return (
        is_tensor and value.device.type == "cpu" and value.numel() == 1 and not value.requires_grad
    )


def slots_of(value: Any) -> list[str]:
    """Return the attributes of a user-defined object that are in slots instead of a dict."""
    if isinstance(value, type) or builtin_of(value):
        return []
    kinds = (kind for kind in type(value).__mro__ if package_of(kind) not in FOREIGN)
    every = (pair for kind in kinds for pair in vars(kind).items())
    slots = (name for name, one in every if isinstance(one, MemberDescriptorType))
    return [name for name in slots if name != "__dict__"]  # of a SimpleNamespace


def is_plain_object(value: Any, may_be_called: bool = False) -> bool:
    """Whether a value is an object of a user-defined class, such as a config; not of torch or of Python itself."""
    if isinstance(value, torch.nn.Module | torch.Tensor | type | ModuleType):
        return False
    if callable(value) and (not may_be_called or inspect.isroutine(value)):
        return False
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):  # a step may change its counts
        return True
    is_own = package_of(type(value)) not in FOREIGN and not is_of_framework(value)
    return hasattr(value, "__dict__") and is_own


def is_of_framework(value: Any) -> bool:
    """Whether a value is a framework's trainer with a mix-in of stoker, which changes its own counts at every step."""
    return any(kind.__module__.split(".")[:2] == _FRAMEWORKS for kind in type(value).__mro__)


def package_of(thing: Any) -> str:
    """Return the top-level package of an object, a class or a Python module."""
    home = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return (home or "").partition(".")[0]
