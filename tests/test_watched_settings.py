"""Places in which training scripts keep their settings: a captured step follows a change as the plain step does.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""
# ruff: noqa: PLW0108 (a lambda is a helper of the step, whose code names the setting)

from __future__ import annotations

import builtins
import collections
import contextvars
import dataclasses
import functools
import os
import threading
import types
import weakref
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from paper_graphs import losses_with_a_change
from stoker.train.graphs.frozen import HostNumbers
from stoker.train.graphs.graphed_step import CHECKED_REPLAYS, WARM_UP_STEPS
from stoker.train.graphs.held_tensors import WatchedTensors
from stoker.train.graphs.step_code import with_helpers

LATE = WARM_UP_STEPS + CHECKED_REPLAYS + 1
"""Steps before a change: the graph is then trusted."""
CASES = []


def case(make):
    """Register a function that returns a function to read a setting, and one to change it from 0 to 0.7."""
    CASES.append(make)
    return make


def beta_of(cfg):
    return cfg["beta"]


def put_in(container):
    return lambda: container.update(beta=0.7)


# -- partials ----------------------------------------------------------------------------------------


@case
def partial_of_a_library():
    loss = functools.partial(dict.get, {"beta": 0.0}, "beta")
    return lambda: loss(), put_in(loss.args[0])


@case
def keywords_of_a_partial_of_a_library():
    loss = functools.partial(dict, beta=0.0)
    return lambda: loss()["beta"], put_in(loss.keywords)


@case
def second_partial_of_a_function():
    cfg = {"beta": 0.0}
    terms = [functools.partial(beta_of, cfg={"beta": 0.0}), functools.partial(beta_of, cfg=cfg)]
    return lambda: sum(term() for term in terms), put_in(cfg)


@case
def partial_in_a_partial():
    cfg = {"beta": 0.0}
    scale = functools.partial(max, functools.partial(beta_of, cfg), key=lambda one: one())
    terms = SimpleNamespace(scale=functools.partial(map, lambda one: one(), [scale.args[0]]))
    return lambda: next(terms.scale()), put_in(cfg)


@case
def config_of_a_partial_in_a_table():
    cfg = SimpleNamespace(loss=SimpleNamespace(beta=0.0))
    terms = {"terms": {"one": functools.partial(getattr, cfg.loss)}}
    return lambda: terms["terms"]["one"]("beta"), lambda: setattr(cfg.loss, "beta", 0.7)


# -- containers --------------------------------------------------------------------------------------


@case
def user_dict():
    cfg = collections.UserDict(beta=0.0)
    return lambda: cfg["beta"], put_in(cfg)


@case
def user_list():
    cfg = collections.UserList([0.0])
    return lambda: cfg[0], lambda: cfg.__setitem__(0, 0.7)


@case
def chain_map():
    cfg = {"beta": 0.0}
    chain = collections.ChainMap({}, cfg)
    return lambda: chain["beta"], put_in(cfg)


@case
def read_only_view():
    cfg = {"beta": 0.0}
    view = types.MappingProxyType(cfg)
    return lambda: view["beta"], put_in(cfg)


@dataclasses.dataclass(slots=True)
class Slotted:
    beta: float = 0.0
    inner: object = None


@dataclasses.dataclass(slots=True)
class MoreSlots(Slotted):
    other: float = 0.0


@case
def dict_in_a_slot():
    cfg = Slotted(inner=MoreSlots(inner={"beta": 0.0}))
    return lambda: cfg.inner.inner["beta"], put_in(cfg.inner.inner)


class Delegates:
    """A config as OmegaConf and ml_collections make it: attributes are entries of a private dict."""

    def __init__(self, **entries):
        self.__dict__["_content"] = {key: self._wrap(value) for key, value in entries.items()}

    @staticmethod
    def _wrap(value):
        return Delegates(**value) if isinstance(value, dict) else SimpleNamespace(_val=value)

    def __getattr__(self, name):
        if name not in self.__dict__["_content"]:
            raise AttributeError(name)
        found = self.__dict__["_content"][name]
        return found if isinstance(found, Delegates) else found._val

    def __setattr__(self, name, value):
        self.__dict__["_content"][name] = self._wrap(value)


@case
def config_that_delegates():
    cfg = Delegates(train={"loss": {"beta": 0.0}})
    return lambda: cfg.train.loss.beta, lambda: setattr(cfg.train.loss, "beta", 0.7)


@case
def branch_of_a_config_that_delegates():
    cfg = Delegates(train={"loss": {"terms": {"beta": 0.0}}})
    return lambda: cfg.train.loss.terms.beta, lambda: setattr(
        cfg.train.loss, "terms", {"beta": 0.7}
    )


@case
def variable_of_the_environment():
    os.environ["STOKER_BETA"] = "0"
    return lambda: float(os.environ["STOKER_BETA"]), lambda: os.environ.update(STOKER_BETA="0.7")


@case
def variable_of_the_environment_that_comes_late():
    os.environ.pop("STOKER_BETA", None)
    return lambda: float(os.getenv("STOKER_BETA") or 0), lambda: os.environ.update(
        STOKER_BETA="0.7"
    )


@case
def context_variable():
    beta = contextvars.ContextVar("beta", default=0.0)
    return lambda: beta.get(), lambda: beta.set(0.7)


@case
def dict_in_a_context_variable():
    beta = contextvars.ContextVar("beta")
    beta.set({"beta": 0.0})
    return lambda: beta.get()["beta"], put_in(beta.get())


# -- what comes later --------------------------------------------------------------------------------


class Bare:
    pass


@case
def attribute_that_comes_late():
    cfg = Bare()
    return lambda: getattr(cfg, "beta", 0.0), lambda: setattr(cfg, "beta", 0.7)


@case
def attribute_that_is_asked_for():
    cfg = Bare()
    cfg.loss = Bare()

    def read():
        try:
            return cfg.loss.beta
        except AttributeError:
            return 0.0

    return read, lambda: setattr(cfg.loss, "beta", 0.7)


@case
def attribute_of_a_module_that_comes_late():
    criterion = nn.Identity()
    return lambda: getattr(criterion, "beta", 0.0) + criterion(0.0), lambda: setattr(
        criterion, "beta", 0.7
    )


@case
def attribute_of_a_class_that_comes_late():
    class Settings:
        pass

    return lambda: getattr(Settings, "beta", 0.0), lambda: setattr(Settings, "beta", 0.7)


@case
def attribute_of_its_class_that_comes_late():
    class Settings:
        pass

    cfg = Settings()
    return lambda: getattr(cfg, "beta", 0.0), lambda: setattr(Settings, "beta", 0.7)


@case
def global_that_comes_late():
    globals().pop("LATE_BETA", None)
    return lambda: globals().get("LATE_BETA", 0.0), lambda: globals().update(LATE_BETA=0.7)


@case
def entry_that_comes_late_and_deep():
    cfg = {"a": {"b": {"c": {"d": {"e": {}}}}}}
    inner = cfg["a"]["b"]["c"]["d"]["e"]
    return lambda: cfg["a"]["b"]["c"]["d"]["e"].get("beta", 0.0), put_in(inner)


@case
def attribute_of_a_function_that_comes_late():
    def read():
        return getattr(read, "beta", 0.0)

    return read, lambda: setattr(read, "beta", 0.7)


# -- depth -------------------------------------------------------------------------------------------


@case
def deep_dicts():
    cfg = {"a": {"b": {"c": {"d": {"e": {"beta": 0.0, "other": {}}}}}}}
    inner = cfg["a"]["b"]["c"]["d"]["e"]
    return lambda: cfg["a"]["b"]["c"]["d"]["e"]["beta"], put_in(inner)


@case
def deep_objects():
    cfg = SimpleNamespace(a=Bare())
    cfg.a.b = Bare()
    cfg.a.b.c = Bare()
    cfg.a.b.c.d = Bare()
    cfg.a.b.c.d.terms = [("one", 0.0)]
    return lambda: cfg.a.b.c.d.terms[0][1], lambda: cfg.a.b.c.d.terms.__setitem__(0, ("one", 0.7))


@case
def deep_branch_that_is_replaced():
    cfg = {"a": {"b": {"c": {"d": {"e": {"beta": 0.0}}}}}}
    inner = cfg["a"]["b"]["c"]["d"]
    return lambda: cfg["a"]["b"]["c"]["d"]["e"]["beta"], lambda: inner.update(e={"beta": 0.7})


# -- as strangers do it ------------------------------------------------------------------------------


@functools.lru_cache
def cached_settings():
    return SimpleNamespace(beta=0.0)


@case
def object_of_a_cached_function():
    cached_settings.cache_clear()
    return lambda: cached_settings().beta, lambda: setattr(cached_settings(), "beta", 0.7)


@case
def cached_function_that_is_cleared():
    cfg = {"beta": 0.0}

    @functools.cache
    def settings():
        return cfg["beta"]

    def put():
        cfg["beta"] = 0.7
        settings.cache_clear()

    return lambda: settings(), put


class Holder:
    cfg = SimpleNamespace(loss=SimpleNamespace(beta=0.0))
    table = Slotted()


@case
def object_of_a_class():
    Holder.cfg.loss.beta = 0.0
    return lambda: Holder.cfg.loss.beta, lambda: setattr(Holder.cfg.loss, "beta", 0.7)


@case
def slots_of_a_class():
    Holder.table.beta = 0.0
    return lambda: Holder.table.beta, lambda: setattr(Holder.table, "beta", 0.7)


@case
def object_of_a_python_module():
    settings = types.ModuleType("settings")
    settings.CFG = Slotted()
    return lambda: settings.CFG.beta, lambda: setattr(settings.CFG, "beta", 0.7)


class Callback:
    def __init__(self):
        self.state = {"decay": {"value": np.zeros(())}}

    def update(self):
        return float(self.state["decay"]["value"])


@case
def bytes_of_an_array():
    cfg = bytearray([0])
    return lambda: cfg[0] * 0.1, lambda: cfg.__setitem__(0, 7)


class Hyper(dict):
    """A dict with attributes, as Lightning's `hparams` are."""

    def __getattr__(self, name):
        return self[name]


@case
def dict_with_attributes():
    cfg = Hyper(loss=Hyper(beta=0.0))
    return lambda: cfg.loss.beta, put_in(cfg["loss"])


@case
def base_settings_through_super():
    class Base:
        def weight(self):
            return self.weights["beta"]

    class Own(Base):
        def __init__(self):
            self.weights = {"beta": 0.0}

        def weight(self):
            return super().weight()

    own = Own()
    return lambda: own.weight(), put_in(own.weights)


class Nested:
    class Loss:
        beta = 0.0


@case
def class_in_a_class():
    Nested.Loss.beta = 0.0
    return lambda: Nested.Loss.beta, lambda: setattr(Nested.Loss, "beta", 0.7)


def make_python_module():
    made = types.ModuleType("losses")
    exec("STATE = {'beta': 0.0}\ndef weight():\n    return STATE['beta']", vars(made))
    return made


@case
def function_of_a_python_module():
    losses = make_python_module()
    return lambda: losses.weight(), put_in(losses.STATE)


@case
def function_that_is_replaced_in_a_python_module():
    losses = make_python_module()
    return lambda: losses.weight(), lambda: setattr(losses, "weight", lambda: 0.7)


@case
def config_of_a_decorator():
    cfg = {"beta": 0.0}

    def plus(cfg):
        def decorate(function):
            @functools.wraps(function)
            def inner():
                return function() + cfg["beta"]

            return inner

        return decorate

    @plus(cfg)
    def read():
        return 0.0

    return read, put_in(cfg)


@case
def weak_reference():
    cfg = Bare()
    cfg.beta = 0.0
    ref = weakref.ref(cfg)
    return lambda: ref().beta, lambda: setattr(cfg, "beta", 0.7)


@case
def object_of_a_thread():
    current = threading.local()
    current.stack = [SimpleNamespace(obj={"beta": 0.0})]
    return lambda: current.stack[-1].obj["beta"], put_in(current.stack[0].obj)


@case
def deep_weights_that_no_code_names():
    cfg = {"a": {"b": {"c": {"d": {"one": 0.0, "two": 0.0}}}}}
    inner = cfg["a"]["b"]["c"]["d"]
    return lambda: sum(inner_of(cfg).values()), lambda: inner.update(three=0.7)


def inner_of(cfg):
    return cfg["a"]["b"]["c"]["d"]


@case
def structured_array():
    table = np.zeros(2, [("beta", "f8")])
    return lambda: float(table["beta"][1]), lambda: table["beta"].__setitem__(1, 0.7)


@case
def nested_object_that_is_replaced():
    cfg = SimpleNamespace(train=SimpleNamespace(loss=SimpleNamespace(beta=0.0)))
    return lambda: cfg.train.loss.beta, lambda: setattr(
        cfg.train, "loss", SimpleNamespace(beta=0.7)
    )


@case
def tensor_that_is_replaced_in_a_nested_object():
    cfg = SimpleNamespace(train=SimpleNamespace(beta=torch.zeros(2)))
    return lambda: float(cfg.train.beta.detach()[0]), lambda: setattr(
        cfg.train, "beta", torch.full((2,), 0.7)
    )


@case
def deep_tensor_that_is_replaced():
    cfg = {"a": {"b": {"c": {"d": {"beta": torch.zeros(2)}}}}}
    inner = cfg["a"]["b"]["c"]["d"]
    return lambda: float(cfg["a"]["b"]["c"]["d"]["beta"][0]), lambda: inner.update(
        beta=torch.full((2,), 0.7)
    )


@case
def array_that_is_replaced_in_a_nested_object():
    cfg = SimpleNamespace(train=SimpleNamespace(weights=np.zeros(2)))
    return lambda: float(cfg.train.weights[0]), lambda: setattr(
        cfg.train, "weights", np.full(2, 0.7)
    )


@case
def frozen_set_that_is_replaced_in_a_nested_object():
    cfg = SimpleNamespace(train=SimpleNamespace(flags=frozenset({"mean"})))
    return lambda: 0.7 if "sum" in cfg.train.flags else 0.0, lambda: setattr(
        cfg.train, "flags", frozenset({"sum"})
    )


@case
def module_that_is_replaced_in_a_nested_object():
    cfg = SimpleNamespace(train=SimpleNamespace(weigh=nn.Hardtanh(0.0, 0.1)))
    return lambda: float(cfg.train.weigh(torch.zeros(()))), lambda: setattr(
        cfg.train, "weigh", nn.Hardtanh(0.7, 1.0)
    )


@case
def function_that_is_replaced_in_a_nested_object():
    cfg = SimpleNamespace(train=SimpleNamespace(weigh=lambda: 0.0))
    return lambda: cfg.train.weigh(), lambda: setattr(cfg.train, "weigh", lambda: 0.7)


@case
def settings_that_are_made_late():
    made = {}

    def settings():
        if "all" not in made:
            made["all"] = SimpleNamespace(beta=made.get("beta", 0.0))
        return made["all"]

    def put():
        made["beta"] = 0.7
        del made["all"]

    return lambda: settings().beta, put


@case
def descriptor_of_a_class():
    class Setting:
        def __init__(self):
            self.value = 0.0

        def __get__(self, owner, kind=None):
            return self.value

        def __set__(self, owner, value):
            self.value = value

    class Own:
        beta = Setting()

    own = Own()
    return lambda: own.beta, lambda: setattr(own, "beta", 0.7)


@case
def attribute_of_a_parameter():
    weight = nn.Parameter(torch.zeros(1))
    weight.decay = 0.0
    return lambda: weight.decay, lambda: setattr(weight, "decay", 0.7)


@case
def attribute_of_a_parameter_of_a_module():
    head = nn.Linear(1, 1)
    head.weight.decay = 0.0
    return lambda: sum(getattr(p, "decay", 0.0) for p in head.parameters()), lambda: setattr(
        head.weight, "decay", 0.7
    )


@case
def python_module_that_delegates():
    settings = types.ModuleType("settings")
    exec("CFG = {'beta': 0.0}\ndef __getattr__(name):\n    return CFG[name]", vars(settings))
    return lambda: settings.beta, put_in(settings.CFG)


@case
def method_of_a_dict():
    cfg = {"beta": 0.0}
    get = cfg.get
    return lambda: get("beta"), put_in(cfg)


@case
def partial_of_a_method_of_a_dict():
    cfg = {"a": {"beta": 0.0}}
    terms = SimpleNamespace(get=functools.partial(cfg["a"].get, "beta"))
    return lambda: terms.get(), put_in(cfg["a"])


@case
def deep_list_that_grows():
    cfg = {"a": {"b": {"c": {"d": {"weights": [0.0]}}}}}
    inner = cfg["a"]["b"]["c"]["d"]["weights"]
    return lambda: sum(cfg["a"]["b"]["c"]["d"]["weights"]), lambda: inner.append(0.7)


@case
def deep_set():
    cfg = {"a": {"b": {"c": {"d": {"flags": {"mean"}}}}}}
    inner = cfg["a"]["b"]["c"]["d"]["flags"]
    return lambda: 0.7 if "sum" in cfg["a"]["b"]["c"]["d"]["flags"] else 0.0, lambda: inner.add(
        "sum"
    )


class Ramp:
    def __init__(self):
        self.value, self.name = 0.0, "ramp"

    def __float__(self):
        return self.value

    def describe(self):
        return self.name


@case
def object_that_is_a_number():
    ramp = Ramp()
    return lambda: float(ramp) if ramp.describe() else 0.0, lambda: setattr(ramp, "value", 0.7)


@case
def name_in_builtins():
    builtins.stoker_beta = 0.0
    return lambda: stoker_beta, lambda: setattr(builtins, "stoker_beta", 0.7)  # noqa: F821


@case
def singleton_of_a_class():
    class Settings:
        _only = None

        @classmethod
        def instance(cls):
            if cls._only is None:
                cls._only = cls()
                cls._only.values = {"loss": {"beta": 0.0}}
            return cls._only

    return lambda: Settings.instance().values["loss"][
        "beta"
    ], lambda: Settings.instance().values["loss"].update(beta=0.7)


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize("make", CASES)
def test_a_setting_is_never_stale(device, make, monkeypatch):
    monkeypatch.setenv("STOKER_BETA", "0")  # a case sets it

    def train(is_captured):
        read, put = make()
        torch.manual_seed(0)
        model = nn.Linear(2, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        batches = torch.randn(LATE + 2, 4, 2).to(device)

        def step(batch):
            loss = (model(batch) * (1 + read())).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        if is_captured:
            step = stoker.capture(step, model=model, optimizer=optimizer)
        return losses_with_a_change(step, batches, LATE, put)

    torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-5)


class Logger:
    def __init__(self):
        self.state = SimpleNamespace(history=[[]], meters={"run": {"seen": {"all": {"count": 0}}}})

    def log(self, loss):
        return loss


@dataclasses.dataclass
class Progress:
    scale: float = 1.0
    num_seen: int = 0


class Trainer:
    """Its step reads `beta`; its loop counts and notes much else."""

    num_steps, seen = 0, 0

    def __init__(self):
        self.beta, self.logger, self.batches = {"beta": 0.0}, Logger(), []
        self.model, self.progress = nn.Linear(2, 1), Progress()
        self.meters, self.last = {"loss": Logger()}, None

    def step(self, batch):
        loss = self.model(batch).sum() * (1 + self.beta["beta"])
        return self.logger.log(loss * self.progress.scale)

    def between(self, number):
        """Do what a loop does between two steps."""
        Trainer.seen += 1
        self.num_steps += 1
        self.progress.num_seen += 1
        self.logger.state.history[0].append(number)
        self.logger.state.meters["run"]["seen"]["all"]["count"] += 1
        self.last_loss, self.best = float(number), {"loss": number}
        self.batches.append(number)
        self.meters["loss"], self.last = Logger(), Logger()
        self.progress.last = {"loss": number}
        self.model.num_seen = self.num_steps
        globals()["LAST_OF_LOOP"] = number


def test_what_a_loop_counts_between_steps_is_not_watched():
    trainer = Trainer()
    of_step = [trainer.model], with_helpers([trainer.model], [trainer.step])
    numbers, watched = HostNumbers(*of_step), WatchedTensors(*of_step)
    for number in range(3):
        trainer.between(number)
        assert numbers.find_change() is watched.find_replaced() is None
    trainer.beta["beta"] = 0.7
    assert "beta" in numbers.find_change()


class Refuses:
    """Any look at it that runs its code raises."""

    def __init__(self):
        self.beta, self.table = 0.0, {"beta": 0.0}

    def _refuse(self, *_):
        raise AssertionError("code of the user was run")

    __getattr__ = __eq__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = _refuse
    __hash__ = __call__ = __repr__ = _refuse
    loss = property(_refuse)


class RefusingDict(dict):
    __getattr__ = __getitem__ = get = keys = items = __iter__ = __len__ = Refuses._refuse
    __contains__ = __eq__ = Refuses._refuse


class RefusingList(list):
    __getitem__ = __iter__ = __len__ = __contains__ = __eq__ = Refuses._refuse


@pytest.mark.parametrize("kind", [Refuses, RefusingDict, RefusingList])
def test_no_code_of_a_user_is_run(kind):
    cfg = kind()
    if kind is RefusingDict:
        dict.update(cfg, beta=0.0)
    elif kind is RefusingList:
        list.append(cfg, 0.0)
    held = {"one": {"cfg": cfg}, "weak": weakref.proxy(Bare()), "mock": mock.MagicMock()}

    def step(batch):
        return held["one"]["cfg"].loss, held["cfg"].beta, cfg["beta"], getattr(cfg, "late", 0)

    code = with_helpers([], [step])
    numbers, watched = HostNumbers([], code), WatchedTensors([], code)
    assert numbers.find_change() is watched.find_replaced() is None
    if kind is Refuses:
        vars(cfg)["table"]["beta"] = 0.7
    elif kind is RefusingDict:
        dict.__setitem__(cfg, "beta", 0.7)
    else:
        list.__setitem__(cfg, 0, 0.7)
    assert numbers.find_change() is not None
    numbers.put_back()
    assert numbers.find_change() is None
