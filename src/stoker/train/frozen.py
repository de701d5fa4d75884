"""Values that a CUDA graph freezes: numbers of the optimizer and of modules, and numbers drawn on the host.

A graph repeats the numbers that the host had when it was captured. If one of them changes, a replay differs
from the eager step.

Enters: an optimizer whose update is captured; the states of the host's generators before. Leaves: why a replay
would differ, or None. Costs: some µs per replay, 0.1 µs for each parameter; 50 ms per capture if other threads
may draw random numbers.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import pickle
import random
import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from operator import itemgetter
from types import CellType, ModuleType
from typing import Any

import numpy as np
import torch

from stoker.train.generators import capture_host_rng

DRAWS_ON_HOST = "the step draws random numbers on the host"
_OTHER_GROUPS = "the optimizer was given other parameter groups, which a graph cannot follow"
_LOOK_SECONDS, _MOST_LOOKS = 0.05, 20
_MOST_COMPARED = 1000
_DEPTH = 3
_MOST_GROUPS = 200
"""Containers that are looked into at every replay; those of a larger model at every n-th only."""
_LENGTH, _ITEM, _DRAWN, _LEAVE = object(), object(), object(), object()
"""Keys of a container's length, a tensor's only value and a generator's state; a value that is left as it is."""
_HOST = torch.device("cpu")
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_FOREIGN = frozenset(
    {
        *("torch", "numpy", "stoker", "functools", "collections", "logging", "random"),
        *("builtins", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"),
        *("queue", "threading", "multiprocessing", "concurrent", "asyncio"),  # of other threads
    }
)
"""Packages whose objects and functions are not looked into."""
_FRAMEWORKS = ["stoker", "frameworks"]
_OUTSIDE_STEP = re.compile(r"__|on_|validation_|test_|predict_|configure_")
"""Methods of a Lightning module that are not called by its `training_step`."""
_MODULE_TABLES = frozenset(vars(torch.nn.Module())) - {"training"}
"""What torch keeps in every module."""
_Frozen = tuple[dict[str, Any], torch.Tensor | None, list[str], list[Any]]
"""A group, its learning rate on the device, and the names and values that are compared."""


class FrozenGroups:
    """The parameter groups of an optimizer at the time its update is captured.

    Only learning rates may change: torch's own optimizers get them as tensors on the device, which the graph
    reads.

    Args:
        optimizer: About to be captured.
        device: Where the graph will read the learning rates.
        bring_rates: Whether to put them there. Optimizers that are not fused may not take a rate on the device.
        has_update: Whether the update is captured; without it only the parameters that are trained must stay.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        bring_rates: bool = True,
        has_update: bool = True,
    ) -> None:
        self._optimizer, self._has_update = optimizer, has_update
        groups = optimizer.param_groups if has_update else ()
        self._groups = [_freeze(optimizer, group, device, bring_rates) for group in groups]
        self._trained = self._list_trained()

    def find_change(self) -> str | None:
        """Return what a replay would not follow, in words, or None; new learning rates are copied to the graph's."""
        groups = self._optimizer.param_groups if self._has_update else ()
        if len(groups) != len(self._groups):
            return _OTHER_GROUPS
        for group, (recorded, rate, names, values) in zip(groups, self._groups, strict=True):
            if group is not recorded:
                return _OTHER_GROUPS
            if rate is not None and group["lr"] is not rate:
                _put_back(group, rate)
            now = [group[name] for name in names]
            if not is_equal(now, values):
                alike = map(is_equal, now, values)
                changed = [name for name, same in zip(names, alike, strict=True) if not same]
                return f"the scheduler changes {', '.join(changed)}, which a graph cannot follow{_advise(changed)}"
        return None

    def trains_others(self) -> bool:
        """Whether parameters were frozen or thawed since."""
        return self._list_trained() != self._trained

    def _list_trained(self) -> list[bool]:
        groups = self._optimizer.param_groups
        return [parameter.requires_grad for group in groups for parameter in group["params"]]


class HostNumbers:
    """Numbers, texts and flags that a step's Python code may read: a graph repeats those of its capture.

    They are attributes of modules (`training`, a dropout's `p`), and variables that functions and forward passes
    take from around them. Lists, dicts and plain objects are looked into one level deep; the length of a list or
    dict counts too: a replay appends nothing. So do the states of random generators that are kept there, which a
    replay does not draw from, and numbers of classes that count in their methods.

    Args:
        modules: With all modules inside them.
        functions: Other code of the step: a criterion, a step function.
        device: Where the step runs. On a GPU, tensors with one value in host memory are numbers too: a kernel
            gets their value, not their address.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        functions: Iterable[Any] = (),
        device: torch.device | None = None,
    ) -> None:
        self._on_gpu = device is not None and device.type == "cuda"
        self._found: dict[tuple[int, Any], tuple[str, Any, Any]] = {}
        self._called: set[int] = set()
        code: dict[int, tuple[str, Any]] = {}
        kinds: dict[type, None] = {}
        for root in modules:
            for path, module in root.named_modules():
                name = f"{type(root).__name__}.{path}" if path else type(root).__name__
                self._look(name, vars(module), only=_named_in_step(type(module)))
                code[id(type(module).forward)] = type(module).__name__, type(module).forward
                kinds[type(module)] = None
        for kind, count in (found for each in kinds for found in _class_counts(each)):
            self._take(f"{kind.__name__}.{count}", kind, count)
        for given in functions:
            function = getattr(given, "func", given)  # of a functools.partial
            if is_plain_object(function, may_be_called=True):  # such as a criterion with settings
                self._look(type(function).__name__, vars(function))
                function = type(function).__call__
            owner = getattr(function, "__self__", None)
            if is_plain_object(owner):  # of a method
                self._look(type(owner).__name__, vars(owner))
            elif _is_of_framework(owner) and not isinstance(owner, torch.nn.Module):
                self._look(type(owner).__name__, vars(owner), only=function.__code__.co_names)
            code[id(function)] = getattr(function, "__name__", ""), function
        for name, function in code.values():
            for variable, container, key in _surroundings(function):
                self._take(f"{variable} of {name}" if name else variable, container, key)
        self._places = list(self._found.values())
        self._values = self.values()
        # All numbers of a container are compared by one call: 0.2 µs for a module.
        keys: dict[int, tuple[Any, list[Any]]] = {}
        self._rest: list[tuple[Any, Any, Any]] = []
        for (_, container, key), value in zip(self._places, self._values, strict=True):
            if key is _DRAWN:  # others may draw from it between two steps
                continue
            if key in (_LENGTH, _ITEM) or isinstance(container, CellType | type):
                self._rest.append((container, key, value))
            else:
                keys.setdefault(id(container), (container, []))[1].append(key)
        getters = ((container, itemgetter(*names)) for container, names in keys.values())
        self._groups = [(container, get, get(container)) for container, get in getters]
        self._every = 1 + len(self._groups) // _MOST_GROUPS
        self._num_asked = 0

    def _look(
        self, name: str, container: Any, deeper: bool = True, only: Collection[str] | None = None
    ) -> None:
        # A vocabulary is no setting: of a large container only the length counts.
        keys = range(len(container)) if isinstance(container, list | deque) else list(container)
        for key in keys if len(keys) <= _MOST_COMPARED else ():
            if key not in _MODULE_TABLES and (only is None or key in only):
                self._take(f"{name}.{key}", container, key, deeper)

    def _take(self, name: str, container: Any, key: Any, deeper: bool = True) -> None:
        value = _read(container, key)
        if isinstance(value, bool | int | float | str | np.generic):
            self._found[id(container), key] = (name, container, key)
        elif self._on_gpu and _is_host_number(value):
            self._found[id(value), _ITEM] = (name, value, _ITEM)
        elif isinstance(value, _GENERATORS) and getattr(value, "device", _HOST) == _HOST:
            self._found[id(value), _DRAWN] = (name, value, _DRAWN)
        elif deeper and isinstance(value, dict | list | deque):
            what = "entries" if isinstance(value, deque) else "length"
            self._found[id(value), _LENGTH] = (f"the {what} of {name}", value, _LENGTH)
            self._look(name, value, deeper=False)
        elif deeper and is_plain_object(value):
            self._look(name, vars(value), deeper=False)
        elif (
            deeper and is_plain_object(value, may_be_called=True) and id(value) not in self._called
        ):
            self._called.add(id(value))  # such as a loss that a step function calls
            self._look(name, vars(value))

    def values(self) -> list[Any]:
        """Return what they are now."""
        return [_read(container, key) for _, container, key in self._places]

    def find_change(self) -> str | None:
        """Return the name of one that has another value than at first, or None."""
        self._num_asked += 1
        if self._num_asked % self._every:
            return None
        try:
            is_same = all(get(container) == then for container, get, then in self._groups)
        except (KeyError, IndexError):  # it is gone
            is_same = False
        if is_same and all(_read(container, key) == then for container, key, then in self._rest):
            return None
        return self.name_difference(self.values(), self._values)

    def name_difference(self, some: list[Any], others: list[Any]) -> str | None:
        """Return the name of the first that differs between two results of `values`, or None."""
        return next(self._name_differences(some, others), None)

    def name_counts(self) -> list[str]:
        """Return the names of those that have another value than at first, but for modes of modules."""
        changed = self._name_differences(self.values(), self._values)
        return [name for name in changed if name.rpartition(".")[2] != "training"]

    def _name_differences(self, some: list[Any], others: list[Any]) -> Iterator[str]:
        for (name, _, _), one, other in zip(self._places, some, others, strict=True):
            if one is not other and one != other:
                yield name

    def put_back(self) -> None:
        """Give each the value that it had at first."""
        for (_, container, key), value in zip(self._places, self._values, strict=True):
            if key is _ITEM:
                container.fill_(value)
            elif key is _DRAWN:
                _set_drawn(container, value)
            elif key is _LENGTH:
                if isinstance(container, list):
                    del container[value:]
                elif isinstance(container, deque) and _Entries(container) != value:
                    container.clear()
                    container.extend(value)
            elif isinstance(container, type):
                setattr(container, key, value)
            elif isinstance(container, CellType):
                container.cell_contents = value
            elif _read(container, key) is not value:
                container[key] = value


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
            for name in vars(module).keys() - _MODULE_TABLES:
                self._places.append((f"{type(module).__name__}.{name}", vars(module), name))
            code[id(type(module).forward)] = type(module).forward
        code |= {id(function): getattr(function, "func", function) for function in functions}
        for function in code.values():
            self._places += _surroundings(function)
        self._all_places = self._places
        self._places = [place for place in self._places if _holds_tensors(_read(*place[1:]))]

    def values(self) -> list[Any]:
        """Return what they are now: the objects themselves."""
        return [_read(container, key) for _, container, key in self._places]

    def reachable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of attributes and variables by name, and those inside of objects and modules there."""
        for name, container, key in self._all_places:
            for tensor in tensors_in(_read(container, key)):
                yield name, tensor

    def replacements(self, before: Sequence[Any]) -> list[Any]:
        """Return the values that are other objects than before, for `put`, which leaves the rest alone."""
        pairs = zip(self.values(), before, strict=True)
        return [_LEAVE if now is then else now for now, then in pairs]

    def put(self, values: Sequence[Any]) -> None:
        """Give them values."""
        for (_, container, key), value in zip(self._places, values, strict=True):
            if value is _LEAVE or _read(container, key) is value:
                continue
            if isinstance(container, CellType):
                container.cell_contents = value
            else:
                container[key] = value

    def find_replaced(self, before: Sequence[Any]) -> str | None:
        """Return the name of the first that is another object than before, or None."""
        pairs = zip(self._places, self.values(), before, strict=True)
        return next((name for (name, _, _), now, then in pairs if now is not then), None)


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, modules and objects of somebody's own, such as a moving average of weights."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif depth < _DEPTH:
        inner: Iterable[Any] = ()
        if isinstance(value, dict):
            inner = list(value.values())
        elif isinstance(value, list | tuple):
            inner = value
        elif is_plain_object(value, may_be_called=True):
            inner = list(vars(value).values())
        for each in itertools.islice(inner, _MOST_COMPARED):
            yield from tensors_in(each, depth + 1)


def containers_around(
    modules: Iterable[torch.nn.Module], functions: Iterable[Any]
) -> list[tuple[str, Any]]:
    """Return the dicts, lists and deques in which the code of a step may keep something, by name.

    They are attributes of modules, variables around functions, and the attributes of objects of somebody's own there;
    with the containers inside of them. A large one is data, not something that a step changes.
    """
    found: dict[int, tuple[str, Any]] = {}

    def look(name: str, value: Any, depth: int = 0, in_object: bool = False) -> None:
        if isinstance(value, torch.optim.Optimizer):
            return  # what it keeps is known
        if not in_object and is_plain_object(value, may_be_called=True):
            value, in_object = vars(value), True
        is_container = isinstance(value, dict | list | deque) and len(value) <= _MOST_COMPARED
        if not is_container or id(value) in found or depth > _DEPTH:
            return
        found[id(value)] = name, value
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            look(f"{name}.{key}", inner, depth + 1, in_object)

    for module in (inner for root in modules for inner in root.modules()):
        for key in vars(module).keys() - _MODULE_TABLES:
            look(f"{type(module).__name__}.{key}", vars(module)[key])
    for given in functions:
        function = getattr(given, "func", given)  # of a functools.partial
        owner = getattr(function, "__self__", None)
        for value in (function, owner):
            look(type(value).__name__, value)
        if is_plain_object(function, may_be_called=True):
            function = type(function).__call__
        for name, container, key in _surroundings(function):
            look(name, _read(container, key))
    return list(found.values())


def _holds_tensors(value: Any) -> bool:
    """Whether it is a tensor, or a container of tensors only, that is no parameter."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


class _Entries(tuple[Any, ...]):
    """What a deque holds, which is the same if the objects are: a full one keeps its length."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple) or len(self) != len(other):
            return False
        return all(one is another for one, another in zip(self, other, strict=True))

    __hash__ = tuple.__hash__


def _drawn(generator: Any) -> bytes:
    """Return the state of a generator of random numbers on the host."""
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
    """Return the numbers of a class and its bases that a method assigns to, as in `Net.count += 1`."""
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


def _read(container: Any, key: Any) -> Any:
    if key is _LENGTH:
        return _Entries(container) if isinstance(container, deque) else len(container)
    if key is _ITEM:
        return container.item()
    if key is _DRAWN:
        return _drawn(container)
    if isinstance(container, dict):
        return container.get(key)
    if isinstance(container, type):
        return getattr(container, key, None)
    if isinstance(container, list | deque):
        return container[key] if key < len(container) else None
    try:
        return container.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return None


def _is_host_number(value: Any) -> bool:
    """Whether it is a tensor with one value in host memory, which nothing differentiates."""
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return (
        is_tensor and value.device.type == "cpu" and value.numel() == 1 and not value.requires_grad
    )


def is_plain_object(value: Any, may_be_called: bool = False) -> bool:
    """Whether it is an object of somebody's own class, such as a config; not of torch or of the language."""
    if isinstance(value, torch.nn.Module | torch.Tensor | type | ModuleType):
        return False
    if callable(value) and (not may_be_called or inspect.isroutine(value)):
        return False
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):  # whose counts a step must not move
        return True
    is_own = _package(type(value)) not in _FOREIGN and not _is_of_framework(value)
    return hasattr(value, "__dict__") and is_own


def _is_of_framework(value: Any) -> bool:
    """Whether it is a trainer with one of our mix-ins, which changes its own counts at every step."""
    return any(kind.__module__.split(".")[:2] == _FRAMEWORKS for kind in type(value).__mro__)


def _named_in_step(kind: type) -> set[str] | None:
    """Return the attributes that the code of a Lightning module may read within a step; None if it is another module.

    Its hooks around the step may count and collect as they like.
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
    return (getattr(thing, "__module__", None) or "").partition(".")[0]


def _surroundings(function: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the variables that a function takes from around it: name, what holds it, and its key there."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(function) or _package(function) in _FOREIGN:
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell, name
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__, name


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; False if that has no single answer, as for arrays."""
    try:
        return bool(one == other)
    except (ValueError, TypeError, RuntimeError):
        return False


def quiet_host_rng(may_wait: bool) -> dict[str, Any] | None:
    """Return the states of the host's generators at a time when no other thread draws; None if there is none.

    Args:
        may_wait: Whether other threads may draw, such as one that prefetches from a dataset. It pauses when it
            is far enough ahead; this waits for that, at most a second.
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
    """Whether the host's generators have changed since."""
    return not _is_same(before, capture_host_rng())


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_is_same(value, other[name]) for name, value in one.items())
    return bool(one == other)


def _freeze(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device, bring: bool
) -> _Frozen:
    rate = _bring_rate(optimizer, group, device, bring)
    names = _compared_names(optimizer, group, rate)
    return group, rate, names, [copy(group[name]) for name in names]  # a list may change in place


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is of a class of torch, not of one that inherits from it."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _bring_rate(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device, bring: bool
) -> torch.Tensor | None:
    """Return the group's learning rate as a tensor on the device; None if it must stay a number."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor) and rate.device.type == device.type:
        return rate
    if rate is None or not bring or not is_torchs_own(optimizer):
        return None
    brought = torch.as_tensor(rate, dtype=torch.float32).to(device)
    group["lr"] = brought
    return brought


def _compared_names(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rate: torch.Tensor | None
) -> list[str]:
    """Return the names of the values that the captured update may have read on the host."""
    # Torch's optimizers read their defaults only; schedulers and users keep other values in a group.
    read = optimizer.defaults if is_torchs_own(optimizer) else group
    return [
        name
        for name, value in group.items()
        if name in read
        and name != "params"
        and not isinstance(value, torch.Tensor)
        and (name != "lr" or rate is None)
    ]


def _advise(changed: list[str]) -> str:
    """Return how to avoid that these values of a group change, as the end of a sentence."""
    if "lr" in changed:
        return "; it follows an lr that is a tensor on the GPU"
    if {"betas", "momentum"} & {*changed}:
        return "; cycle_momentum=False leaves it as it is"
    return ""


def _put_back(group: dict[str, Any], rate: torch.Tensor) -> None:
    """Copy a new learning rate into the tensor that the graph reads."""
    given = group["lr"]
    rate.fill_(given.reshape(()) if isinstance(given, torch.Tensor) else float(given))
    group["lr"] = rate
