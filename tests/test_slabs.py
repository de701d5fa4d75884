"""`map_batch`: any class of batch, rebuilt without a write into the caller's own."""

from __future__ import annotations

import time
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from stoker.errors import InputError
from stoker.loader.slabs import map_batch
from stoker.units import usable_count


def double(leaf):
    return leaf * 2


def ones():
    return torch.ones(1)


def values_of(batch):
    return {key: value.item() for key, value in batch.items() if isinstance(value, torch.Tensor)}


# -- mappings ----------------------------------------------------------------------------------


class Store(MutableMapping):
    """A mapping with its items in a dict of its own, which `copy.copy` shares."""

    def __init__(self, **items):
        self._items = dict(items)
        self.step = 0

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Deep(Store):
    """Items one level further down, where a new container for each attribute does not reach."""

    def __init__(self, **items):
        super().__init__()
        self._items = SimpleNamespace(inner=dict(items))

    def __getitem__(self, key):
        return self._items.inner[key]

    def __setitem__(self, key, value):
        self._items.inner[key] = value

    def __iter__(self):
        return iter(self._items.inner)

    def __len__(self):
        return len(self._items.inner)


class TwoLists(Store):
    """Keys and values side by side."""

    def __init__(self, **items):
        super().__init__()
        self._keys, self._values = list(items), list(items.values())

    def __getitem__(self, key):
        return self._values[self._keys.index(key)]

    def __setitem__(self, key, value):
        self._values[self._keys.index(key)] = value

    def __iter__(self):
        return iter(self._keys)

    def __len__(self):
        return len(self._keys)


class Selfish(Store):
    """Hands itself out as its copy, and has attributes that its constructor would lose."""

    def __copy__(self):
        return self


class Logged(dict):
    """Writes into what a copy shares."""

    def __init__(self, **items):
        super().__init__(items)
        self.log = dict(items)

    def __setitem__(self, key, value):
        self.log[key] = value
        super().__setitem__(key, value)


class Frozen(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")


class Itself(dict):
    def __copy__(self):
        return self


class Dotted(dict):
    """The usual trick: attributes are the items."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Doubling(UserDict):
    """Computes on reading; `clone[key] = value` would compute twice."""

    def __getitem__(self, key):
        return super().__getitem__(key) * 2


@pytest.mark.parametrize(
    "kind",
    [Store, Deep, TwoLists, Selfish, Logged, Frozen, Itself, Dotted, UserDict, OrderedDict],
    ids=lambda kind: kind.__name__,
)
def test_the_callers_own_mapping_is_never_written_to(kind):
    x, part = ones(), ones()
    batch = kind(x=x, parts=[part], note="kept")
    moved = map_batch(batch, double)
    assert batch["x"] is x
    assert batch["parts"][0] is part
    assert list(batch) == ["x", "parts", "note"]
    assert getattr(batch, "log", {"x": x})["x"] is x
    assert moved is not batch
    assert (moved["x"].item(), moved["parts"][0].item(), moved["note"]) == (2, 2, "kept")
    assert (x.item(), part.item()) == (1, 1)


@pytest.mark.parametrize("kind", [Store, TwoLists, Logged, Frozen, Dotted, UserDict, OrderedDict])
def test_mappings_that_can_be_rebuilt_keep_their_class(kind):
    assert type(map_batch(kind(x=ones(), note="kept"), double)) is kind


@pytest.mark.parametrize("kind", [Deep, Selfish, Itself])
def test_mappings_that_cannot_be_rebuilt_come_as_a_dict_or_by_their_constructor(kind):
    moved = map_batch(kind(x=ones()), double)
    assert type(moved) is (Itself if kind is Itself else dict)
    assert values_of(moved) == {"x": 2}


def test_attributes_stay_and_those_that_are_items_move_along():
    store = Store(x=ones())
    store.step = 9
    assert map_batch(store, double).step == 9
    dotted = map_batch(Dotted(x=ones(), name="a"), double)
    assert (dotted.x.item(), dotted["x"].item(), dotted.name) == (2, 2, "a")
    assert dotted.x is dotted["x"]
    factory = map_batch(defaultdict(list, x=ones()), double)
    assert factory["missing"] == []


def test_a_tensor_that_is_two_items_stays_two_items():
    shared = ones()
    moved = map_batch(UserDict(inputs=shared, labels=shared), double)
    assert type(moved) is UserDict
    assert values_of(moved) == {"inputs": 2, "labels": 2}


def test_items_that_are_computed_are_not_computed_twice():
    assert values_of(map_batch(Doubling(x=ones()), double)) == {"x": 4}


class Viewed(Mapping):
    """Not to be changed, and with a constructor of its own."""

    def __init__(self, x, y):
        self._items = {"x": x, "y": y}

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


@dataclass(frozen=True)
class Record(Mapping):
    x: torch.Tensor
    y: int

    def __getitem__(self, key):
        return getattr(self, key)

    def __iter__(self):
        return iter(("x", "y"))

    def __len__(self):
        return 2


@pytest.mark.parametrize("kind", [Viewed, Record])
def test_a_mapping_with_another_constructor(kind):
    batch = kind(ones(), 5)
    moved = map_batch(batch, double)
    assert type(moved) is kind
    assert (moved["x"].item(), moved["y"], batch["x"].item()) == (2, 5, 1)


def test_a_proxy_stays_a_proxy():
    moved = map_batch(MappingProxyType({"x": ones()}), double)
    assert type(moved) is MappingProxyType
    assert values_of(moved) == {"x": 2}


# -- tuples and lists --------------------------------------------------------------------------


class Twice(namedtuple("Twice", "x y")):
    __slots__ = ()

    def __new__(cls, x):
        return super().__new__(cls, x, x * 2)


class Pair(tuple):
    def __new__(cls, x, y):
        made = super().__new__(cls, (x, y))
        made.note, made.first = "kept", x
        return made


class Typed(NamedTuple):
    x: torch.Tensor
    y: int = 3


class Rows(list):
    def __init__(self, width, rows):
        super().__init__(rows)
        self.width, self.first = width, rows[0]


class Stubborn(list):
    def __copy__(self):
        return self


def test_a_named_tuple_with_its_own_new():
    batch = Twice(ones())
    moved = map_batch(batch, double)
    assert type(moved) is Twice
    assert (moved.x.item(), moved.y.item()) == (2, 4)
    assert (batch.x.item(), batch.y.item()) == (1, 2)
    assert map_batch(Typed(ones()), double) == Typed(torch.tensor([2.0]))


def test_a_tuple_with_its_own_new_keeps_its_class_and_its_attributes():
    batch = Pair(ones(), 7)
    moved = map_batch(batch, double)
    assert type(moved) is Pair
    assert (moved[0].item(), moved[1], moved.note) == (2, 7, "kept")
    assert moved.first is moved[0]
    assert batch.first is batch[0]


def test_a_list_with_its_own_constructor():
    batch = Rows(4, [ones(), ones()])
    moved = map_batch(batch, double)
    assert type(moved) is Rows
    assert ([row.item() for row in moved], moved.width) == ([2, 2], 4)
    assert moved.first is moved[0]
    assert batch[0].item() == 1


def test_a_list_that_hands_itself_out_as_its_copy_comes_as_a_plain_one():
    batch = Stubborn([ones()])
    moved = map_batch(batch, double)
    assert type(moved) is list
    assert (moved[0].item(), batch[0].item()) == (2, 1)


def test_tuples_of_torch_and_of_c():
    batch = torch.arange(6.0).reshape(2, 3).max(dim=1)
    moved = map_batch(batch, double)
    assert type(moved) is type(batch)
    assert moved.values.tolist() == [4, 10]
    moment = time.gmtime(0)
    assert map_batch((moment, ones()), double)[0] is moment


# -- dataclasses -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    x: torch.Tensor
    note: str

    def __copy__(self):
        return self


def test_a_dataclass_that_hands_itself_out_as_its_copy():
    batch = Constant(ones(), "kept")
    moved = map_batch(batch, double)
    assert type(moved) is Constant
    assert (moved.x.item(), moved.note, batch.x.item()) == (2, "kept", 1)


# -- counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [4, np.int64(4), np.uint8(4), np.array(4), torch.tensor(4)])
def test_whole_numbers_of_any_kind_are_counts(value):
    count = usable_count("depth", value)
    assert (type(count), count) == (int, 4)


@pytest.mark.parametrize("value", [True, np.True_, 4.0, np.float64(4), "4", None, [4], 0, -1])
def test_what_is_no_count_says_what_is_allowed(value):
    with pytest.raises(InputError, match="depth is") as caught:
        usable_count("depth", value)
    assert caught.value.allowed == "a whole number, 1 or more"
    assert caught.value.fix == "depth=2"
