"""Tensors that the code of a step keeps outside of it: in attributes, variables, dicts, lists and objects.

A graph always reads the tensors of its capture. `HeldTensors` are those that a step itself may replace,
`WatchedTensors` those that other code may replace between two steps.

Enters: modules and functions of a step. Leaves: the places of their tensors, and which were replaced. Costs: 30 ns at
each replay for every watched tensor; the rest at a capture.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, ModuleType
from typing import Any

import torch

from stoker.train.graphs.places import (
    MODULE_TABLES,
    MOST_COMPARED,
    Entries,
    builtin_of,
    entries_of,
    is_number,
    is_opaque,
    is_plain_container,
    is_plain_object,
    name_key,
    read_place,
    slots_of,
)
from stoker.train.graphs.step_code import (
    attributes_read,
    named_in_step,
    names_in,
    surroundings,
)

_DEPTH, _DEEPEST = 3, 20
_MOST_VISITED = 3000
_LEAVE = object()
"""Stands for a place whose value `put` does not change."""


class HeldTensors:
    """Tensors that modules keep in plain attributes, and functions in outer variables.

    A graph always reads the tensors of its capture, so a hidden state that each step reads and then replaces would
    never change. A tensor that a step only replaces (a cache, the weight of an old-style `weight_norm`) is harmless.

    Args:
        modules: Modules, with all modules inside them.
        functions: Other functions of the step.
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
        # `put` restores only places with tensors; `WatchedTensors` needs the places without tensors too.
        self._all_places = self._places
        self._places = [place for place in self._places if holds_tensors(read_place(*place[1:]))]

    def all_places(self) -> list[tuple[str, Any, Any]]:
        """Return the places of all attributes and variables: name, container, and key in the container."""
        return list(self._all_places)

    def values(self) -> list[Any]:
        """Return the current values of the places with tensors, not copied."""
        return [read_place(container, key) for _, container, key in self._places]

    def reachable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in attributes and variables, objects and modules there included, with the place's name."""
        for name, container, key in self._all_places:
            for tensor in tensors_in(read_place(container, key)):
                yield name, tensor

    def replacements(self, before: Sequence[Any]) -> list[Any]:
        """Return the values that are other objects than before, for `put`, which leaves other places alone."""
        pairs = zip(self.values(), before, strict=True)
        return [_LEAVE if now is then else now for now, then in pairs]

    def places_of(self, values: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
        """Return the places that `put` would change: container, key in the container, and value."""
        pairs = zip(self._places, values, strict=True)
        return [(one, key, value) for (_, one, key), value in pairs if value is not _LEAVE]

    def find_hidden(self, values: Sequence[Any]) -> str | None:
        """Return the name of the first place whose value is an object with tensors in it, or None."""
        pairs = zip(self._places, values, strict=True)
        return next((name for (name, _, _), value in pairs if hides_tensors(value)), None)

    def put(self, values: Sequence[Any]) -> None:
        """Set the places with tensors to `values`."""
        for (_, container, key), value in zip(self._places, values, strict=True):
            if value is not _LEAVE and read_place(container, key) is not value:
                put_in(container, key, value)

    def find_replaced(self, before: Sequence[Any]) -> str | None:
        """Return the name of the first place that holds another object than before, or None."""
        pairs = zip(self._places, self.values(), before, strict=True)
        return next((name for (name, _, _), now, then in pairs if now is not then), None)


class WatchedTensors:
    """Tensors that a step reads and does not replace, but that other code may replace between two steps.

    A graph would keep using those of its capture: an old mask, a table of weights in a dict, a network in a variable.
    Functions, tables of settings, arrays, modules, optimizers and other objects are watched as well. If the step is a
    method, only the attributes of its object that the code names are watched.

    Args:
        modules: Modules, with all modules inside them.
        functions: Other functions of the step.
        nested: Further places with tensors, deep in objects (`HostNumbers.nested_tensors`).
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module] = (),
        functions: Iterable[Any] = (),
        nested: Iterable[tuple[str, Any, Any]] = (),
    ) -> None:
        modules, functions = list(modules), list(functions)
        read: dict[int, frozenset[str] | None] = {}
        of_torch = set[int]()
        for module in (inner for root in modules for inner in root.modules()):
            names = named_in_step(type(module))
            read[id(vars(module))] = None if names is None else frozenset(names)
            if type(module).__module__.startswith("torch."):
                of_torch.add(id(vars(module)))
        places = [*nested, *HeldTensors(modules, functions).all_places()]
        for name, held in containers_around(modules, functions, read):
            keys = held if isinstance(held, dict) else range(len(held))
            places += [(f"{name}.{name_key(key)}", held, key) for key in keys]
        self._places: dict[tuple[int, Any], tuple[str, Any, Any, Any]] = {}
        for name, container, key in places:
            only, value = read.get(id(container)), read_place(container, key)
            if is_opaque(value) or (only is not None and key not in only):
                continue
            # In torch's own modules only tensors are watched, not the dicts and functions that torch keeps there.
            is_watched = id(container) not in of_torch and _may_be_replaced(value)
            if is_watched or any(True for _ in tensors_in(value)):
                self._places[id(container), key] = name, container, key, value
        self._group()

    def _group(self) -> None:
        places = [place[1:] for place in self._places.values()]
        self._others = [
            one for one in places if not isinstance(one[0], dict | list | deque | tuple)
        ]
        self._entries = Entries(one for one in places if isinstance(one[0], dict | list | deque))

    def leave_replaced(self) -> None:
        """Stop watching the tensors that were replaced during the capture: the step itself replaces them."""
        self._places = {
            place: one
            for place, one in self._places.items()
            if read_place(one[1], one[2]) is one[3]
        }
        self._group()

    def find_replaced(self) -> tuple[str, Any, Any] | None:
        """Return the first place whose value was replaced: name, container, key; None if there is none."""
        try:
            is_same = self._entries.are_same()
        except (KeyError, IndexError):  # it was removed
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
        """Stop watching a place: the step does not read it."""
        del self._places[id(container), key]
        self._group()


def _may_be_replaced(value: Any) -> bool:
    """Whether a value without tensors may change what a step does, and is not compared by `HostNumbers`."""
    return not is_number(value) and not isinstance(value, ModuleType | type)


def put_in(container: Any, key: Any, value: Any) -> None:
    """Set the value of a place: a variable of a closure, an entry, or an attribute."""
    if isinstance(container, CellType):
        container.cell_contents = value
    elif isinstance(container, dict | list | deque):
        container[key] = value
    else:
        setattr(container, key, value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, modules and user-defined objects, such as a moving average of weights."""
    return _walk(value, _entries, _DEPTH)


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if builtin_of(value):
        return entries_of(value)
    if isinstance(value, torch.amp.GradScaler):
        return list(vars(value).values())
    return list(vars(value).values()) if is_plain_object(value, may_be_called=True) else ()


def _walk(
    value: Any, entries: Callable[[Any], Iterable[Any]], depth: int
) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a value, breadth first; each container is entered once.

    Stops after `_MOST_VISITED` entries: larger containers are data, and would take seconds.
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
    modules: Iterable[torch.nn.Module],
    functions: Iterable[Any],
    read: dict[int, frozenset[str] | None] | None = None,
) -> list[tuple[str, Any]]:
    """Return the dicts, lists and deques that the code of a step may change, by name.

    They are in attributes of modules, outer variables of functions, and attributes of user-defined objects there;
    containers inside them are included. A large container is data, which a step does not change.

    Args:
        modules: Modules, with all modules inside them.
        functions: Other functions of the step.
        read: Filled with the attributes that the code reads of each object, by the id of the object's dict (None: it
            may read any). Others are left out then: a loop keeps its own counts and meters there.
    """
    found: dict[int, tuple[str, Any]] = {}
    left, functions = MOST_COMPARED, list(functions)
    named = names_in(functions)

    def look(name: str, value: Any, depth: int = 0, in_object: bool = False) -> None:
        nonlocal left
        if depth == 0:
            left = MOST_COMPARED
        if is_opaque(value) or isinstance(value, torch.optim.Optimizer):  # see `KeptObjects`
            return
        is_held, only = builtin_of(value) is not None, None
        if not is_held and not in_object and is_plain_object(value, may_be_called=True):
            only = None if read is None else attributes_read(value, named)
            value, in_object = vars(value), True
        is_container = is_plain_container(value) and len(value) <= left
        if not is_container or id(value) in found or depth > _DEPTH:
            return
        left -= len(value)
        found[id(value)] = name, value
        if read is not None and only is not None:
            read[id(value)] = only
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if only is None or key in only:
                look(f"{name}.{name_key(key)}", inner, depth + 1, in_object)

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
    """Whether a value is or contains a tensor that is not a parameter; False for a module."""
    return any(not isinstance(tensor, torch.nn.Parameter) for tensor in _tensors_anywhere(value))


def hides_tensors(value: Any) -> bool:
    """Whether tensors are attributes of an object, where a replay cannot replace them."""
    return bool({*map(id, _tensors_anywhere(value))} - {*map(id, _nested_tensors(value))})


def _tensors_anywhere(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers and objects, also in torch's own, such as a distribution."""
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
    if builtin_of(value):
        return entries_of(value)
    if isinstance(value, Mapping):
        # A user's mapping may raise, for example one over a closed file.
        with contextlib.suppress(Exception):
            return list(value.values())
    return ()
