"""Tensors that the code of a step keeps around it: in attributes, variables, dicts, lists and objects.

A graph reads the tensors of its capture for ever. `HeldTensors` are those that a step may replace itself,
`WatchedTensors` those that others may replace between two steps.

Enters: modules and functions of a step. Leaves: where their tensors are, and which are others now. Costs: 30 ns at each
replay for every tensor that is watched; the rest at a capture.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_, itemgetter
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from stoker.train.graphs.frozen import (
    MODULE_TABLES,
    MOST_COMPARED,
    attributes_read,
    is_opaque,
    is_plain_object,
    named_in_step,
    names_in,
    read_place,
    slots_of,
    surroundings,
)

_DEPTH, _DEEPEST = 3, 20
_MOST_VISITED = 3000
_LEAVE = object()
"""A value that is left as it is."""


class HeldTensors:
    """Tensors that modules keep in plain attributes, and functions in variables around them.

    A graph reads the ones of its capture for ever: a hidden state that each step reads and then replaces would stay
    as it was. One that a step only replaces (a cache, the weight of an old-style `weight_norm`) does no harm.

    Args:
        modules: With all modules inside them.
        functions: Other code of the step.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], functions: Iterable[Any] = ()) -> None:
        self._places: list[tuple[str, Any, Any]] = []
        code: dict[int, Any] = {}
        for module in (inner for root in modules for inner in root.modules()):
            # Parameters, buffers and submodules are in tables of their own, which the step's state follows.
            for name in vars(module).keys() - MODULE_TABLES:
                if not is_opaque(vars(module)[name]):
                    self._places.append((f"{type(module).__name__}.{name}", vars(module), name))
            code[id(type(module).forward)] = type(module).forward
        code |= {id(function): function for function in functions}
        for function in code.values():
            self._places += surroundings(function)
        for name, container, key in [*self._places]:
            value = read_place(container, key)
            self._places += [(f"{name}.{slot}", value, slot) for slot in slots_of(value)]
        # Values are put back where tensors were; places that hold none yet are kept for those who watch for new ones.
        self._all_places = self._places
        self._places = [place for place in self._places if holds_tensors(read_place(*place[1:]))]

    def all_places(self) -> list[tuple[str, Any, Any]]:
        """Return the places of all attributes and variables: name, what holds it, and its key there."""
        return list(self._all_places)

    def values(self) -> list[Any]:
        """Return what they are now: the objects themselves."""
        return [read_place(container, key) for _, container, key in self._places]

    def reachable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of attributes and variables by name, and those inside of objects and modules there."""
        for name, container, key in self._all_places:
            for tensor in tensors_in(read_place(container, key)):
                yield name, tensor

    def replacements(self, before: Sequence[Any]) -> list[Any]:
        """Return the values that are other objects than before, for `put`, which leaves the rest alone."""
        pairs = zip(self.values(), before, strict=True)
        return [_LEAVE if now is then else now for now, then in pairs]

    def places_of(self, values: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
        """Return where `put` would put values: what holds each, its key there, and the value."""
        pairs = zip(self._places, values, strict=True)
        return [(one, key, value) for (_, one, key), value in pairs if value is not _LEAVE]

    def find_hidden(self, values: Sequence[Any]) -> str | None:
        """Return the name of the first whose value is an object with tensors in it, or None."""
        pairs = zip(self._places, values, strict=True)
        return next((name for (name, _, _), value in pairs if hides_tensors(value)), None)

    def put(self, values: Sequence[Any]) -> None:
        """Give them values."""
        for (_, container, key), value in zip(self._places, values, strict=True):
            if value is not _LEAVE and read_place(container, key) is not value:
                put_in(container, key, value)

    def find_replaced(self, before: Sequence[Any]) -> str | None:
        """Return the name of the first that is another object than before, or None."""
        pairs = zip(self._places, self.values(), before, strict=True)
        return next((name for (name, _, _), now, then in pairs if now is not then), None)


class WatchedTensors:
    """Tensors that a step reads and does not replace: somebody may put others in their place between two steps.

    A graph goes on with the ones of its capture: a mask that is made anew, a table of weights in a dict, a network in
    a variable. Likewise a function, a table of settings, an array, an object or an optimizer. Of an object whose method
    the step is, attributes count that the code names.

    Args:
        modules: With all modules inside them.
        functions: Other code of the step.
    """

    def __init__(
        self, modules: Iterable[torch.nn.Module] = (), functions: Iterable[Any] = ()
    ) -> None:
        modules, functions = list(modules), list(functions)
        named, of_torch = names_in(functions), set[int]()
        owners = {id(vars(o)): o for o in map(_owner, functions) if o is not None}
        read: dict[int, frozenset[str] | None] = {
            key: attributes_read(owner, named) for key, owner in owners.items()
        }
        for module in (inner for root in modules for inner in root.modules()):
            names = named_in_step(type(module))
            read[id(vars(module))] = None if names is None else frozenset(names)
            if type(module).__module__.startswith("torch."):
                of_torch.add(id(vars(module)))
        places = HeldTensors(modules, functions).all_places()
        for name, held in containers_around(modules, functions):
            keys = held if isinstance(held, dict) else range(len(held))
            places += [(f"{name}.{key}", held, key) for key in keys]
        self._places: dict[tuple[int, Any], tuple[str, Any, Any, Any]] = {}
        for name, container, key in places:
            only, value = read.get(id(container)), read_place(container, key)
            if is_opaque(value) or (only is not None and key not in only):
                continue
            # Of torch's own modules only tensors are watched, not the dicts and functions that torch keeps there.
            is_watched = id(container) not in of_torch and _may_be_replaced(value)
            if is_watched or any(True for _ in tensors_in(value)):
                self._places[id(container), key] = name, container, key, value
        self._group()

    def _group(self) -> None:
        # One `itemgetter` per container reads all its keys in C: hence the 30 ns of the module's text.
        self._others = [
            (container, key, value)
            for _, container, key, value in self._places.values()
            if not isinstance(container, dict | list | deque | tuple)
        ]
        keys: dict[int, tuple[Any, list[Any], list[Any]]] = {}
        for _, container, key, value in self._places.values():
            if isinstance(container, dict | list | deque):
                _, names, values = keys.setdefault(id(container), (container, [], []))
                names.append(key)
                values.append(value)
        # Two keys at least: of one, `itemgetter` returns the value and not a tuple.
        self._groups = [
            (container, itemgetter(*names, names[0]), [*values, values[0]])
            for container, names, values in keys.values()
        ]

    def leave_replaced(self) -> None:
        """Watch those no longer that have been replaced by now: the step does that itself."""
        self._places = {
            place: one
            for place, one in self._places.items()
            if read_place(one[1], one[2]) is one[3]
        }
        self._group()

    def find_replaced(self) -> tuple[str, Any, Any] | None:
        """Return one that is another now: its name, what holds it, and its key there; None if there is none."""
        try:
            is_same = all(all(map(is_, get(one), then)) for one, get, then in self._groups)
        except (KeyError, IndexError):  # it is gone
            is_same = False
        if is_same and all(read_place(one, key) is then for one, key, then in self._others):
            return None
        return next(
            (
                (name, container, key)
                for name, container, key, value in self._places.values()
                if read_place(container, key) is not value
            ),
            None,
        )

    def leave(self, container: Any, key: Any) -> None:
        """Watch one no longer: the step does not read it."""
        del self._places[id(container), key]
        self._group()


def _may_be_replaced(value: Any) -> bool:
    """Whether it is something without tensors that decides what a step does, and that is no number."""
    return isinstance(
        value, dict | list | np.ndarray | FunctionType | MethodType | torch.optim.Optimizer
    ) or is_plain_object(value, may_be_called=True)


def _owner(function: Any) -> Any:
    """Return the object of somebody's own whose method a function is, or that is called itself; or None."""
    function = getattr(function, "func", function)
    for value in (function, getattr(function, "__self__", None)):
        if is_plain_object(value, may_be_called=True):
            return value
    return None


def put_in(container: Any, key: Any, value: Any) -> None:
    """Put a value where `WatchedTensors` found one."""
    if isinstance(container, CellType):
        container.cell_contents = value
    elif isinstance(container, dict | list | deque):
        container[key] = value
    else:
        setattr(container, key, value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, modules and objects of somebody's own, such as a moving average of weights."""
    return _walk(value, _entries, _DEPTH)


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return value
    return list(vars(value).values()) if is_plain_object(value, may_be_called=True) else ()


def _walk(
    value: Any, entries: Callable[[Any], Iterable[Any]], depth: int
) -> Iterator[torch.Tensor]:
    """Yield the tensors inside of a value, those nearest to it first; each container is entered once.

    After some thousand entries the rest is data, which would take seconds to go through.
    """
    level = [] if is_opaque(value) else [value]
    left, entered = _MOST_VISITED, set[int]()
    for _ in range(depth + 1):
        following: list[Any] = []
        for each in level:
            if isinstance(each, torch.Tensor):
                yield each
            elif id(each) not in entered:
                entered.add(id(each))
                inner = (one for one in entries(each) if not is_opaque(one))
                following += itertools.islice(inner, left - len(following))
        level, left = following, left - len(following)


def containers_around(
    modules: Iterable[torch.nn.Module], functions: Iterable[Any]
) -> list[tuple[str, Any]]:
    """Return the dicts, lists and deques in which the code of a step may keep something, by name.

    They are attributes of modules, variables around functions, and the attributes of objects of somebody's own there;
    with the containers inside of them. A large one is data, not something that a step changes.
    """
    found: dict[int, tuple[str, Any]] = {}
    left = MOST_COMPARED

    def look(name: str, value: Any, depth: int = 0, in_object: bool = False) -> None:
        nonlocal left
        if depth == 0:
            left = MOST_COMPARED
        if is_opaque(value) or isinstance(value, torch.optim.Optimizer):  # what that keeps is known
            return
        if not in_object and is_plain_object(value, may_be_called=True):
            value, in_object = vars(value), True
        is_container = isinstance(value, dict | list | deque) and len(value) <= left
        if not is_container or id(value) in found or depth > _DEPTH:
            return
        left -= len(value)
        found[id(value)] = name, value
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            look(f"{name}.{key}", inner, depth + 1, in_object)

    for module in (inner for root in modules for inner in root.modules()):
        for key in vars(module).keys() - MODULE_TABLES:
            look(f"{type(module).__name__}.{key}", vars(module)[key])
    for given in functions:
        function = getattr(given, "func", given)  # of a functools.partial
        owner = getattr(function, "__self__", None)
        for value in (function, owner):
            look(type(value).__name__, value)
        if is_plain_object(function, may_be_called=True):
            function = type(function).__call__
        for name, container, key in surroundings(
            given if isinstance(given, functools.partial) else function
        ):
            look(name, read_place(container, key))
    return list(found.values())


def holds_tensors(value: Any) -> bool:
    """Whether it is a tensor that is no parameter, or something with one in it; not a module."""
    return any(not isinstance(tensor, torch.nn.Parameter) for tensor in _tensors_anywhere(value))


def hides_tensors(value: Any) -> bool:
    """Whether tensors are in an object, where a replay cannot put others."""
    return bool({*map(id, _tensors_anywhere(value))} - {*map(id, _nested_tensors(value))})


def _tensors_anywhere(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers and objects, torch's own among them, such as a distribution."""
    if is_opaque(value) or isinstance(
        value, torch.nn.Module | torch.optim.Optimizer | type | ModuleType
    ):
        return
    yield from tensors_in(value)
    yield from _nested_tensors(value)
    if not isinstance(value, torch.Tensor) and not is_plain_object(value, may_be_called=True):
        yield from _nested_tensors(list(getattr(value, "__dict__", {}).values()))


def _nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested value of mappings, lists and tuples."""
    return _walk(value, _items, _DEEPEST)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        # What somebody's own mapping raises, of a file that is closed say, is its own affair.
        with contextlib.suppress(Exception):
            return list(value.values())
    return value if isinstance(value, list | tuple) else ()
