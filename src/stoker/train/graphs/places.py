"""Places where the code of a step keeps a value: an entry, a variable, an attribute, the length of a list.

Enters: a container and a key. Leaves: the value, as one that `==` compares; whether it may be examined; the value put
back. Runs no code of a user's class, except where it asks for its `__class__` and `__dict__` (`is_opaque`).
"""

from __future__ import annotations

import inspect
import pickle
import random
from collections import deque
from collections.abc import Mapping
from enum import Enum
from types import (
    CellType,
    FunctionType,
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
LENGTH, ITEM, DRAWN, BYTES = object(), object(), object(), object()
"""Keys of a container's length, a tensor's only value, a generator's state and an array's values."""
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
        *("torch", "numpy", "stoker", "functools", "collections", "logging", "random"),
        *("builtins", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"),
        *("queue", "threading", "multiprocessing", "concurrent", "asyncio"),  # used by threads
    }
)
"""Packages whose objects and functions are not examined."""
_FRAMEWORKS = ["stoker", "frameworks"]
MODULE_TABLES = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes that torch sets in every module."""


def read_place(container: Any, key: Any) -> Any:
    """Return the value of an entry, a variable or an attribute; None if there is none."""
    if key is LENGTH:
        if isinstance(container, set):
            return frozenset(container)
        return _Entries(container) if isinstance(container, deque) else len(container)
    if key is ITEM:
        return container.item()
    if key is DRAWN:
        return _drawn(container)
    if key is BYTES:
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


def put_place(container: Any, key: Any, value: Any) -> None:
    """Restore the value that `read_place` has returned."""
    if key is ITEM:
        container.fill_(value)
    elif key is BYTES:
        if container.tobytes() != value:
            container[...] = np.frombuffer(value, container.dtype).reshape(container.shape)
    elif key is DRAWN:
        _set_drawn(container, value)
    elif key is LENGTH:
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
        return
    elif isinstance(container, dict | list | deque):
        container[key] = value
    else:
        setattr(container, key, value)


def name_key(key: Any) -> str:
    """Return a key of a container as text; its class for an object such as a parameter, whose text has all values."""
    return str(key) if isinstance(key, str | int | tuple) else type(key).__name__


def equals(one: Any, other: Any) -> bool:
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
    """Return the attributes of a user-defined object that has slots instead of a dict."""
    kind = type(value)
    if hasattr(value, "__dict__") or package_of(kind) in FOREIGN or callable(value):
        return []
    return [name for name, one in vars(kind).items() if isinstance(one, MemberDescriptorType)]


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
