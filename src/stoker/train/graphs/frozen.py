"""Values that a CUDA graph freezes: numbers, texts and flags of modules and functions.

A graph repeats the numbers that the host had when it was captured. If one of them changes, a replay differs
from the eager step.

Enters: modules and functions of a captured step. Leaves: why a replay would differ, or None. Costs: per replay some µs
and 0.2 µs for each module; 16 µs for 50 modules and a nested config, measured on a slow x86 core.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import numpy as np
import torch

from stoker.train.graphs.places import (
    BYTES,
    CURRENT,
    DRAWN,
    FOREIGN,
    GENERATORS,
    HOST,
    ITEM,
    LENGTH,
    MODULE_TABLES,
    MOST_COMPARED,
    PLAIN_KEYS,
    CodeKeys,
    Entries,
    Inside,
    builtin_of,
    equals,
    has_plain_length,
    is_cached,
    is_delegating,
    is_host_number,
    is_number,
    is_of_framework,
    is_opaque,
    is_plain_object,
    is_value,
    keys_of,
    memory_bytes,
    name_key,
    package_of,
    put_place,
    read_place,
    slots_of,
    stores_of,
)
from stoker.train.graphs.step_code import (
    attributes_read,
    class_counts,
    is_own,
    keys_in,
    layers_of,
    named_in_step,
    names_in,
    surroundings,
)

_DEPTH, _DEEPEST = 3, -7
"""Levels whose entries are all examined; below, down to the tenth, only what the code of the step names."""
_MOST_BYTES, _MOST_FEW, _MOST_UNNAMED = 4096, 200, 16
"""Size of an array, a set and a deep dict without named keys: larger ones are data, not compared at every replay."""
_READ_AT_ONCE = frozenset({dict, OrderedDict, list, tuple, deque})
"""Types of containers whose entries are read by one call, which runs no code of a user."""


class HostNumbers:
    """Numbers, texts and flags that a step's Python code may read: a graph repeats those of its capture.

    They are attributes of modules (`training`, a dropout's `p`), and outer variables that functions and forward
    passes use. Lists, dicts, partials and plain objects are examined three levels deep, and seven levels further where
    the code names an attribute or a key. Included are the length of a list or dict, because a replay appends nothing;
    names in the code that no object has yet; tuples of numbers, None, and small numpy arrays; the states of random
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
        self._left, self._left_named = MOST_COMPARED, _MOST_FEW
        self._tensors: dict[tuple[int, Any], tuple[str, Any, Any]] = {}
        self._found: dict[tuple[int, Any], tuple[str, Any, Any]] = {}
        self._objects: dict[tuple[int, Any], tuple[str, Any, Any, Any]] = {}
        self._entered: dict[int, int] = {}
        self._waiting: deque[tuple[str, Any, Any, int]] = deque()
        functions = list(functions)
        self._named, self._keys = names_in(functions), CodeKeys(keys_in(functions))
        code: dict[int, tuple[str, Any]] = {}
        kinds: dict[type, None] = {}
        for root in modules:
            for path, module in root.named_modules():
                name = f"{type(root).__name__}.{path}" if path else type(root).__name__
                only = named_in_step(type(module))
                for key in vars(module).keys() - MODULE_TABLES:
                    if only is None or key in only:
                        self._take(f"{name}.{key}", vars(module), key)
                self._take_of_class(name, module)
                self._take_absence(name, vars(module))
                for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                    if tensor is not None:
                        self._take_of_tensor(f"{name}.{key}", tensor)
                code[id(type(module).forward)] = type(module).__name__, type(module).forward
                kinds[type(module)] = None
        for kind, count in (found for each in kinds for found in class_counts(each)):
            self._take(f"{kind.__name__}.{count}", kind, count)
        self._take_surroundings(code)
        code = {}
        for given in functions:
            function = getattr(given, "func", given)  # of a functools.partial
            if is_plain_object(function, may_be_called=True):  # such as a criterion with settings
                self._take_owner(function)
                function = type(function).__call__
            owner = getattr(function, "__self__", None)
            if is_plain_object(owner, may_be_called=True):  # of a method
                self._take_owner(owner)
            elif is_of_framework(owner) and not isinstance(owner, torch.nn.Module):
                for key in vars(owner).keys() & {*function.__code__.co_names}:
                    self._take(f"{type(owner).__name__}.{key}", vars(owner), key)
            is_partial = isinstance(given, functools.partial)
            code[id(given)] = getattr(function, "__name__", ""), given if is_partial else function
        self._take_surroundings(code)
        self._drain()
        if self._named & {"environ", "getenv"}:
            self._take_environment()
        self._places = list(self._found.values())
        self._values = self.values()
        self._group()
        self._sizes = [*map(len, self._sized)]

    def _group(self) -> None:
        """Prepare `find_change`: all entries of a container are read by one call, 0.2 µs for a module."""
        entries: list[tuple[Any, Any, Any]] = []
        self._rest: list[tuple[Any, Any, Any]] = []
        self._sized: list[Any] = []
        self._counted: list[tuple[Any, Any, Any]] = []
        for (_, container, key), value in zip(self._places, self._values, strict=True):
            place = container, key, value
            if key is DRAWN:  # other code may draw from it between two steps
                continue
            if type(key) is CodeKeys and isinstance(container, type):
                self._sized.append(vars(container))
                self._counted.append(place)
            elif (type(key) is CodeKeys or key is LENGTH) and has_plain_length(container):
                self._sized.append(container)
                self._counted.append(place)
            elif type(container) in _READ_AT_ONCE and type(key) is not Inside:
                entries.append(place)
            else:
                self._rest.append(place)
        objects = [place[1:] for place in self._objects.values()]
        self._numbers = Entries(entries)
        self._held = Entries(place for place in objects if type(place[0]) in _READ_AT_ONCE)
        self._links = [place for place in objects if type(place[0]) not in _READ_AT_ONCE]

    def _take_surroundings(self, code: Mapping[int, tuple[str, Any]]) -> None:
        for name, function in code.values():
            for variable, container, key in surroundings(function):
                self._take(f"{variable} of {name}" if name else variable, container, key)
            for layer in filter(is_own, layers_of(function)):
                self._take_absence("the globals", layer.__globals__)
                self._take_absence(name, vars(layer))

    def _take_environment(self) -> None:
        """Take the variables of the process that the code names."""
        data = vars(os.environ)["_data"]
        named = CodeKeys(os.environ.encodekey(key) for key in self._keys if isinstance(key, str))
        for key in named & data.keys():
            self._found[id(data), key] = f"os.environ[{key!r}]", data, key
        self._take_absence("os.environ", data, named)

    def _take_absence(self, name: str, container: Any, keys: CodeKeys | None = None) -> None:
        """Take which names of the code are in a dict or a class: `getattr(cfg, "beta", None)` may find one later."""
        if self._keys:
            key = self._keys if keys is None else keys
            self._found.setdefault(
                (id(container), CodeKeys), (f"the set of names in {name}", container, key)
            )

    def _take_of_class(self, name: str, owner: Any, depth: int = _DEPTH) -> None:
        """Take values in slots, and those that the class of an object gives it, if the code names them."""
        bases = [base for base in type(owner).__mro__[::-1] if package_of(base) not in FOREIGN]
        of_classes = {key: value for base in bases for key, value in vars(base).items()}
        slots = {*slots_of(owner)}
        # Of a dict, entries are read; of other objects, attributes.
        holder = type(owner) if builtin_of(owner) else owner
        for base in bases:
            self._take_absence(base.__name__, base)
        own = getattr(owner, "__dict__", {}).keys()
        for key in (self._named | slots) & of_classes.keys() - own:
            value = of_classes[key]
            if key in slots or is_number(value):
                self._waiting.append((f"{name}.{key}", holder, key, depth))
            elif not hasattr(type(value), "__get__"):
                self._waiting.append((f"{name}.{key}", type(owner), key, depth))
            elif is_plain_object(value, may_be_called=True):  # a descriptor: the user's `__get__`
                self._waiting.append((f"{name}.{key}", (value,), 0, depth))

    def _take_owner(self, owner: Any) -> None:
        """Take what an object holds that is called, or whose method is the step."""
        self._take_of_class(type(owner).__name__, owner)
        self._take_absence(type(owner).__name__, vars(owner))
        for key in self._attributes_of(owner, _DEPTH):
            self._take(f"{type(owner).__name__}.{key}", vars(owner), key)

    def _take(self, name: str, container: Any, key: Any) -> None:
        """Take what a variable or an attribute holds, the nearest first."""
        self._left, self._left_named = MOST_COMPARED, _MOST_FEW
        self._examine(name, container, key, _DEPTH)
        for table in (self._objects, self._tensors):  # `WatchedTensors` has the variables
            table.pop((id(container), key), None)
        self._drain()

    def _drain(self) -> None:
        while self._waiting:
            self._examine(*self._waiting.popleft())

    def _examine(self, name: str, container: Any, key: Any, depth: int) -> None:
        """Take a value; look into an object that holds others, and watch that it is not replaced."""
        value = read_place(container, key)
        if is_opaque(value):
            return
        if not isinstance(value, torch.Tensor) and not is_number(value):
            self._objects[id(container), key] = (name, container, key, value)
        if is_number(value):
            self._found[id(container), key] = (name, container, key)
        elif isinstance(value, np.ndarray | bytearray | array):
            has_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
            if not has_objects and memory_bytes(value) <= _MOST_BYTES:
                self._found[id(value), BYTES] = (name, value, BYTES)
        elif self._on_gpu and is_host_number(value):
            self._found[id(value), ITEM] = (name, value, ITEM)
        elif isinstance(value, GENERATORS) and getattr(value, "device", HOST) == HOST:
            self._found[id(value), DRAWN] = (name, value, DRAWN)
        elif type(value) is ContextVar:
            self._waiting.append((name, value, CURRENT, depth))
        elif isinstance(value, type | ModuleType):
            if package_of(value) not in FOREIGN:
                self._take_absence(name, value if isinstance(value, type) else vars(value))
        elif isinstance(value, torch.Tensor):
            self._tensors[id(container), key] = (name, container, key)
            self._take_of_tensor(name, value)
        elif isinstance(value, torch.nn.Module) or inspect.isroutine(value):
            self._enter_stores(name, value, depth)
        elif depth >= _DEEPEST:
            with contextlib.suppress(ReferenceError):  # a weak proxy whose object has just gone
                self._enter(name, value, depth)

    def _take_of_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Take the user's attributes of a tensor that the code names, such as `parameter.decay`."""
        own = object.__getattribute__(tensor, "__dict__")
        self._follow(name, own, [*read_place(own, self._keys)] if own else (), _DEPTH - 1)

    def _enter(self, name: str, value: Any, depth: int) -> None:
        """Examine what an object or a container holds."""
        is_container = issubclass(type(value), dict | list | deque | tuple | set)
        is_called = callable(value) and is_plain_object(value, may_be_called=True)
        is_object = is_called or is_plain_object(value)
        has_slots = bool(slots_of(value))
        depth = _DEPTH + 1 if is_called else depth
        if self._entered.get(id(value), _DEEPEST - 1) >= depth:
            return
        self._entered[id(value)] = depth
        if is_container:
            self._look(name, value, depth)
        self._enter_stores(name, value, depth)
        if has_slots or is_object:
            self._take_of_class(name, value, depth)
        if is_object:
            # Such as a loss that a step function calls, or a config whose attributes are entries of a private dict.
            below = depth - (not is_delegating(value))
            self._follow(name, vars(value), self._attributes_of(value, depth), below)
            self._take_absence(name, vars(value))

    def _enter_stores(self, name: str, value: Any, depth: int) -> None:
        """Examine the arguments of a partial, or results that a function has cached, to which others may be added."""
        for store in stores_of(value):
            if not is_cached(value):
                self._look(name, store, depth + 1)
            elif len(store) <= _MOST_FEW:
                self._follow(name, store, keys_of(store), depth)

    def _look(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, set) and len(value) > _MOST_FEW:  # data
            return
        # A dict far below may be a log: only its names are compared.
        if not isinstance(value, tuple | dict) or (depth > 0 and isinstance(value, dict)):
            what = "entries" if isinstance(value, deque | set) else "length"
            self._found[id(value), LENGTH] = (f"the {what} of {name}", value, LENGTH)
        if isinstance(value, set):
            return
        keys = keys_of(value)
        if isinstance(value, dict) and (depth <= 0 or len(keys) > self._left):
            self._take_absence(name, value)
        if isinstance(value, dict) and depth <= 0:
            named = [*read_place(value, self._keys)]
            is_unnamed = not named and len(keys) <= _MOST_UNNAMED
            if is_unnamed:  # passed on, or `for key in weights`
                self._found[id(value), LENGTH] = (f"the length of {name}", value, LENGTH)
            keys = keys if is_unnamed else named
        self._follow(name, value, keys, depth - 1)

    def _follow(self, name: str, container: Any, keys: Collection[Any], depth: int) -> None:
        """Examine entries later, those that the code names first.

        Where a container is too large, such as a vocabulary, it is data: only entries that code names are examined.
        """
        # Other keys than texts and numbers would be hashed by code of their classes.
        named = [key for key in keys if type(key) in PLAIN_KEYS and key in self._keys]
        if len(keys) <= self._left:
            self._left -= len(keys)
            first = {*named}
            others = (key for key in keys if type(key) not in PLAIN_KEYS or key not in first)
            keys = [*named, *others]
        else:
            keys = named[: self._left_named]
            self._left_named -= len(keys)
        for key in keys:
            self._waiting.append((f"{name}.{name_key(key)}", container, key, depth))

    def _attributes_of(self, owner: Any, depth: int) -> list[str]:
        """Return the attributes of an object that the code may read; far below, those that it names."""
        if depth > 0:
            only = attributes_read(owner, self._named)
        else:
            only = None if is_value(owner) else self._keys
        return [key for key in vars(owner) if only is None or key in only]

    def nested_tensors(self) -> list[tuple[str, Any, Any]]:
        """Return the places of tensors inside containers and objects, for `WatchedTensors`."""
        return [one for one in self._tensors.values() if not isinstance(one[1], tuple)]

    def values(self) -> list[Any]:
        """Return their current values."""
        return [read_place(container, key) for _, container, key in self._places]

    def leave_replaced(self) -> None:
        """Stop watching the objects that were replaced during the capture: the step itself replaces them."""
        self._objects = {
            place: one
            for place, one in self._objects.items()
            if read_place(one[1], one[2]) is one[3]
        }
        self._group()

    def find_change(self) -> str | None:
        """Return the name of a number or an object that has changed since construction, or None."""
        try:
            if self._is_same():
                return None
        except Exception:  # noqa: BLE001 (removed, or replaced by an object whose comparison raises)
            pass
        drawn = {name for name, _, key in self._places if key is DRAWN}
        changed = self._name_differences(self.values(), self._values)
        replaced = (
            name
            for name, container, key, value in self._objects.values()
            if read_place(container, key) is not value
        )
        return next(
            (name for name in itertools.chain(changed, replaced) if name not in drawn), None
        )

    def _is_same(self) -> bool:
        return (
            self._numbers.are_equal()
            and self._held.are_same()
            and self._has_same_names()
            and all(read_place(container, key) == then for container, key, then in self._rest)
            and all(read_place(container, key) is then for container, key, then in self._links)
        )

    def _has_same_names(self) -> bool:
        sizes = [*map(len, self._sized)]
        if sizes == self._sizes:
            return True
        pairs = zip(self._counted, sizes, self._sizes, strict=True)
        if any(now != then and read_place(*one[:2]) != one[2] for one, now, then in pairs):
            return False
        self._sizes = sizes  # other attributes have come than those that the code names
        return True

    def name_difference(self, some: list[Any], others: list[Any]) -> str | None:
        """Return the name of the first number that differs between two results of `values`, or None."""
        return next(self._name_differences(some, others), None)

    def name_counts(self) -> list[str]:
        """Return the names of the numbers that have changed since construction, except `training` of modules."""
        changed = self._name_differences(self.values(), self._values)
        kept = {name for name, _, key in self._places if type(key) is not CodeKeys}
        return [name for name in changed if name in kept and name.rpartition(".")[2] != "training"]

    def _name_differences(self, some: list[Any], others: list[Any]) -> Iterator[str]:
        for (name, _, _), one, other in zip(self._places, some, others, strict=True):
            if one is not other and not equals(one, other):
                yield name

    def put_back(self) -> None:
        """Restore the values that the numbers had at construction."""
        for (_, container, key), value in zip(self._places, self._values, strict=True):
            put_place(container, key, value)
