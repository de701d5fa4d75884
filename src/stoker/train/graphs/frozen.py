"""Values that a CUDA graph freezes: numbers, texts and flags of modules and functions.

A graph repeats the numbers that the host had when it was captured. If one of them changes, a replay differs
from the eager step.

Enters: modules and functions of a captured step. Leaves: why a replay would differ, or None. Costs: per replay some µs
and 0.4 µs for each module.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch

from stoker.train.graphs.places import (
    BYTES,
    DRAWN,
    FOREIGN,
    GENERATORS,
    HOST,
    ITEM,
    LENGTH,
    MODULE_TABLES,
    MOST_COMPARED,
    equals,
    is_host_number,
    is_number,
    is_of_framework,
    is_opaque,
    is_plain_object,
    name_key,
    package_of,
    put_place,
    read_place,
    slots_of,
)
from stoker.train.graphs.step_code import (
    attributes_read,
    class_counts,
    named_in_step,
    names_in,
    surroundings,
)

_DEPTH, _MOST_BYTES, _MOST_IN_SET = 3, 4096, 200
"""Levels of containers that are examined, and the size of the largest array that is compared at every replay."""


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
        for kind, count in (found for each in kinds for found in class_counts(each)):
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
            elif is_of_framework(owner) and not isinstance(owner, torch.nn.Module):
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
            if key is DRAWN:  # other code may draw from it between two steps
                continue
            is_entry = isinstance(container, dict | list | deque | tuple)
            if key in (LENGTH, ITEM, BYTES) or not is_entry:
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
            if package_of(base) not in FOREIGN
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
                self._found[id(value), BYTES] = (name, value, BYTES)
        elif self._on_gpu and is_host_number(value):
            self._found[id(value), ITEM] = (name, value, ITEM)
        elif isinstance(value, GENERATORS) and getattr(value, "device", HOST) == HOST:
            self._found[id(value), DRAWN] = (name, value, DRAWN)
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
        if (id(value), LENGTH) in self._found:
            return
        if isinstance(value, set) and len(value) > _MOST_IN_SET:  # data
            return
        if not isinstance(value, tuple):
            what = "entries" if isinstance(value, deque | set) else "length"
            self._found[id(value), LENGTH] = (f"the {what} of {name}", value, LENGTH)
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
            if one is not other and not equals(one, other):
                yield name

    def put_back(self) -> None:
        """Restore the values that the numbers had at construction."""
        for (_, container, key), value in zip(self._places, self._values, strict=True):
            put_place(container, key, value)
