"""Tensors in dicts, lists and objects around a step: a captured loop leaves them as the plain loop does.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import stoker
from paper_graphs import losses_with_a_change
from stoker.train.graphs.held_tensors import WatchedTensors
from stoker.train.graphs.step_code import with_helpers

NUM_BATCHES, LATE = 16, 13
"""The first replays are compared with eager steps; what changes at batch LATE comes after them."""


class Loop:
    """A model, an optimizer and batches; `capture` captures a step, or leaves it as it is."""

    def __init__(self, device, is_captured):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        features = torch.randn(NUM_BATCHES, 8, 6).to(device)
        self.batches = [(x, x[:, :1] * 2) for x in features]
        self.device, self.is_captured, self.step = device, is_captured, None

    def capture(self, step):
        self.step = step
        if self.is_captured:
            self.step = stoker.capture(step, model=self.model, optimizer=self.optimizer)
        return self.step

    def zero(self):
        return torch.zeros((), device=self.device)

    def update(self, batch, by):
        loss = mse_loss(self.model(batch[0]) * (1 + by), batch[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, step, *state):
        step = self.capture(step)
        losses = [step(batch) for batch in self.batches]
        return [*losses, *(read() for read in state)]


def after(hidden, loss):
    return 0.5 * hidden + 0.3 * torch.tanh(loss)


def tuple_in_a_dict(loop):
    state = {"hidden": (loop.zero(), loop.zero()), "name": "x"}

    def step(batch):
        one, other = state["hidden"]
        loss = loop.update(batch, one + other)
        state["hidden"] = after(one, loss), after(other, loss)
        return loss

    return loop.run(step, lambda: state["hidden"][0], lambda: state["hidden"][1])


def mean_in_a_dict(loop):
    state = {"mean": loop.zero(), "share": 0.1}

    def step(batch):
        loss = loop.update(batch, 0.0)
        state["mean"] = (1 - state["share"]) * state["mean"] + state["share"] * loss
        return loss

    return loop.run(step, lambda: state["mean"])


def by_helpers(loop):
    state = {"hidden": loop.zero(), "name": "x"}

    def get():
        return state["hidden"]

    def put(hidden):
        state["hidden"] = hidden

    def step(batch):
        loss = loop.update(batch, get())
        put(after(get(), loss))
        return loss

    return loop.run(step, get)


STATE: dict = {}


def get_global():
    return STATE["hidden"]


def by_a_global_helper(loop):
    STATE["hidden"] = loop.zero()

    def step(batch):
        loss = loop.update(batch, get_global())
        STATE["hidden"] = after(get_global(), loss)
        return loss

    return loop.run(step, get_global)


def in_a_default(loop):
    state = {"hidden": loop.zero(), "name": "x"}

    def step(batch, state=state):
        loss = loop.update(batch, state["hidden"])
        state["hidden"] = after(state["hidden"], loss)
        return loss

    return loop.run(step, lambda: state["hidden"])


def in_a_partial(loop):
    state = [loop.zero(), "x"]

    def step(state, batch):
        loss = loop.update(batch, state[0])
        state[0] = after(state[0], loss)
        return loss

    return loop.run(functools.partial(step, state), lambda: state[0])


def in_the_function(loop):
    def step(batch):
        loss = loop.update(batch, step.hidden)
        step.hidden = after(step.hidden, loss)
        return loss

    step.hidden = loop.zero()
    return loop.run(step, lambda: step.hidden)


@dataclasses.dataclass(slots=True)
class Slots:
    hidden: torch.Tensor


def in_slots(loop):
    state = Slots(loop.zero())

    def step(batch):
        loss = loop.update(batch, state.hidden)
        state.hidden = after(state.hidden, loss)
        return loss

    return loop.run(step, lambda: state.hidden)


class Own:
    """A loop as an object: it keeps tensors, and counts and collects outside of its step."""

    def __init__(self, loop):
        self.loop, self.hidden, self.nested = loop, loop.zero(), {"a": {"hidden": loop.zero()}}
        self.num_steps, self.losses, self.last = 0, [], None

    def read(self):
        return self.hidden

    def step(self, batch):
        nested = self.nested["a"]
        loss = self.loop.update(batch, self.read() + nested["hidden"])
        self.hidden = nested["hidden"] = after(self.read(), loss)
        return loss

    def reads_only(self, batch):
        return self.loop.update(batch, self.read())

    def fit(self, step):
        step = self.loop.capture(step)
        for batch in self.loop.batches:
            self.last = step(batch)
            self.losses.append(self.last)
            self.num_steps += 1
        return [*self.losses, self.hidden, self.nested["a"]["hidden"]]


def in_an_object(loop):
    own = Own(loop)
    return own.fit(own.step)


def counts_outside(loop):
    own = Own(loop)
    return own.fit(own.reads_only)


def writes_only(loop):
    """Batches of another size between the others have a graph of their own, or run eagerly."""
    seen, told = {"loss": None}, []

    def step(batch):
        loss = loop.update(batch, 0.0)
        seen["loss"] = loss
        return loss

    step = loop.capture(step)
    for number, batch in enumerate(loop.batches):
        step(tuple(each[:5] for each in batch) if number == LATE else batch)
        told.append(seen["loss"].clone())
    return told


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (tuple_in_a_dict, "replaces hidden of state"),
        (mean_in_a_dict, "replaces mean of state"),
        (by_helpers, "replaces hidden of state"),
        (by_a_global_helper, "replaces hidden of STATE"),
        (in_a_default, "replaces hidden of state"),
        (in_a_partial, "changes the entries of an argument"),
        (in_the_function, "reads step.hidden of the step before"),
        (in_slots, "reads state.hidden of the step before"),
        (in_an_object, "replaces hidden of Own"),
        (counts_outside, "replays agreed"),
        (writes_only, "replays agreed"),
    ],
)
def test_it_is_the_plain_loop(device, write, reason):
    expected = [float(value) for value in write(Loop(device, is_captured=False))]
    loop = Loop(device, is_captured=True)
    found = [float(value) for value in write(loop)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert reason in loop.step.reason


def keep(loop, step, read, num_epochs=1):
    """Return what is read after each step, kept without `clone`; one batch has another size."""
    step, told = loop.capture(step), []
    for number, batch in enumerate(loop.batches * num_epochs):
        result = step(tuple(each[:5] for each in batch) if number == LATE else batch)
        told.append(read(result))
    return told


def in_a_dict(loop):
    logs = {}

    def step(batch):
        loss = loop.update(batch, 0.0)
        logs.update(loss=loss, twice=2 * loss, name="x")
        return loss

    # Beyond the first later comparison.
    return keep(loop, step, lambda _: logs["loss"].detach(), num_epochs=5)


def many_in_a_dict(loop):
    logs = {}

    def step(batch):
        loss = loop.update(batch, 0.0)
        logs.update({str(number): loss * number for number in range(6)})
        return loss

    return keep(loop, step, lambda _: logs["5"])


def in_a_new_dict(loop):
    logs = {}

    def step(batch):
        loss = loop.update(batch, 0.0)
        logs["out"] = {"loss": loss, "weight": loop.model[0].weight, "num": 3}
        return loss

    told = keep(loop, step, lambda _: logs["out"])
    assert told[-1]["weight"] is loop.model[0].weight
    return [each["loss"] for each in told]


def in_a_variable(loop):
    mask, last = torch.full((), 0.3, device=loop.device), None

    def step(batch):
        nonlocal last
        last = loop.update(batch, mask)
        return last

    return keep(loop, step, lambda _: last, num_epochs=5)


def in_a_dict_of_a_variable(loop):
    last = None

    def step(batch):
        nonlocal last
        loss = loop.update(batch, 0.0)
        last = {"loss": loss, "rate": 0.05}
        return loss

    return keep(loop, step, lambda _: last["loss"])


def in_a_module(loop):
    class Seeing(nn.Linear):
        def forward(self, x):
            self.seen = super().forward(x)
            return self.seen

    loop.model[0].__class__ = Seeing
    return keep(
        loop, lambda batch: loop.update(batch, 0.0), lambda _: loop.model[0].seen.detach()[0, 0]
    )


def large(loop):
    logs, zeros = {}, torch.zeros(300_000, device=loop.device)

    def step(batch):
        loss = loop.update(batch, 0.0)
        logs["loss"] = loss + zeros
        return loss

    return keep(loop, step, lambda _: logs["loss"][:1])


def the_batch(loop):
    logs = {}

    def step(batch):
        logs["x"] = batch[0]
        return loop.update(batch, 0.0)

    return keep(loop, step, lambda _: logs["x"][0, 0])


def the_result(loop):
    def step(batch):
        return {"loss": loop.update(batch, 0.0), "wanted": batch[1], "name": "x"}

    return keep(loop, step, lambda result: result["wanted"][0])


def an_object(loop):
    state = SimpleNamespace()

    def step(batch):
        loss = loop.update(batch, 0.0)
        state.out = SimpleNamespace(loss=loss)
        return loss

    return keep(loop, step, lambda _: state.out.loss)


def a_distribution(loop):
    state = SimpleNamespace()

    def step(batch):
        loss = loop.update(batch, 0.0)
        state.told = torch.distributions.Normal(loss, 1.0, validate_args=False)
        return loss

    return keep(loop, step, lambda _: state.told.loc)


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")  # torch: a module keeps its output
@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (in_a_dict, "replays agreed"),
        (many_in_a_dict, "replays agreed"),
        (in_a_new_dict, "replays agreed"),
        (in_a_variable, "replays agreed"),
        (in_a_dict_of_a_variable, "replays agreed"),
        (in_a_module, "replays agreed"),
        (large, "replays agreed"),
        (the_batch, "replays agreed"),
        (the_result, "replays agreed"),
        (an_object, "replaces out of state, an object with tensors in it"),
        (a_distribution, "replaces told of state, an object with tensors in it"),
    ],
)
def test_what_a_step_leaves_behind_may_be_kept(device, write, reason):
    expected = [float(value) for value in write(Loop(device, is_captured=False))]
    loop = Loop(device, is_captured=True)
    found = [float(value) for value in write(loop)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert reason in loop.step.reason


def test_a_large_tensor_is_copied_only_when_it_is_kept(device):
    loop, notes, logs = Loop(device, is_captured=True), [], {}
    zeros = torch.zeros(300_000, device=device)

    def step(batch):
        loss = loop.update(batch, 0.0)
        logs["out"] = loss + zeros, loss
        return loss

    step = loop.capture(step)
    step._say = notes.append
    places = []
    for batch in loop.batches:
        loss = step(batch)
        assert float(loss) == float(logs["out"][0][7]) == float(logs["out"][1])
        places.append(logs["out"][0].data_ptr())
    assert len({*places[-5:]}) == 1  # the graph's own
    assert not notes
    kept = [logs["out"]]
    for batch in loop.batches:
        kept.append((step(batch), logs["out"])[1])
    assert len({float(large[0]) for large, _ in kept}) == len(kept)
    assert len([note for note in notes if "is kept, and copied from now on" in note]) == 1


@pytest.mark.filterwarnings("ignore:stoker.capture")
def test_a_number_of_the_host_in_a_result_is_never_stale(device):
    loop, number = Loop(device, is_captured=True), functools.partial(next, iter(range(1000)))
    step = loop.capture(lambda batch: (loop.update(batch, 0.0), number()))
    told = [step(batch)[1] for batch in loop.batches]
    assert told == sorted({*told})
    assert "eager: the step changes a value that it returns" in step.reason


def weight_in_a_variable(loop):
    weight = loop.zero()

    def put(value):
        nonlocal weight
        weight = value

    return (lambda batch: loop.update(batch, weight)), put


def weight_in_a_dict(loop):
    state = {"weight": loop.zero(), "name": "x"}
    return (lambda batch: loop.update(batch, state["weight"])), functools.partial(
        state.__setitem__, "weight"
    )


def weight_in_a_list(loop):
    state = [loop.zero(), "x"]
    return (lambda batch: loop.update(batch, state[0])), functools.partial(state.__setitem__, 0)


def weight_in_an_object(loop):
    state = SimpleNamespace(weight=loop.zero())
    return (lambda batch: loop.update(batch, state.weight)), functools.partial(
        setattr, state, "weight"
    )


def weight_of_a_module(loop):
    loop.model.weighing = loop.zero()

    def step(batch):
        return loop.update(batch, loop.model.weighing)

    return step, functools.partial(setattr, loop.model, "weighing")


def teacher(loop):
    teacher = copy.deepcopy(loop.model)

    def step(batch):
        with torch.no_grad():
            wanted = batch[1] + teacher(batch[0])
        return loop.update((batch[0], wanted), 0.0)

    def put(_):
        nonlocal teacher
        teacher = copy.deepcopy(loop.model)

    return step, put


def unused(loop):
    state = {"weight": loop.zero(), "last": loop.zero()}
    return (lambda batch: loop.update(batch, state["weight"])), functools.partial(
        state.__setitem__, "last"
    )


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize(
    "make",
    [
        weight_in_a_variable,
        weight_in_a_dict,
        weight_in_a_list,
        weight_in_an_object,
        weight_of_a_module,
        teacher,
        unused,
    ],
)
def test_a_tensor_that_is_replaced_between_steps_is_followed(device, make):
    def train(is_captured, notes=None):
        loop = Loop(device, is_captured)
        step, put = make(loop)
        step = loop.capture(step)
        if notes is not None:
            step._say = notes.append
        losses = []
        for number, batch in enumerate(loop.batches):
            if number == LATE:
                put(torch.full((), 0.7, device=device))
            losses.append(float(step(batch)))
        return losses

    notes: list[str] = []
    torch.testing.assert_close(train(True, notes), train(False), rtol=1e-4, atol=1e-5)
    renewed = [note for note in notes if "another object was put in the place of" in note]
    assert len(renewed) == (0 if make is unused else 1)


@pytest.mark.filterwarnings("ignore:stoker.capture")
def test_a_tensor_that_is_replaced_at_every_step_ends_capture(device):
    loop = Loop(device, is_captured=True)
    step, put = weight_in_a_dict(loop)
    step = loop.capture(step)
    for batch in loop.batches * 3:
        put(torch.rand((), device=device))
        step(batch)
    assert step.reason.startswith("eager: another object was put in the place of state.weight")


def test_what_a_step_does_not_name_is_not_watched():
    loop = Loop("cpu", is_captured=False)
    own = Own(loop)
    code = with_helpers([loop.model], [own.reads_only])
    watched = WatchedTensors([loop.model], code)
    assert {function.__name__ for function in code} >= {"reads_only", "read", "update"}
    own.last = loop.zero()
    assert watched.find_replaced() is None
    own.hidden = loop.zero()
    found = watched.find_replaced()
    assert found is not None
    assert found[0] == "Own.hidden"


@pytest.mark.parametrize("is_number", [True, False], ids=["number", "tensor"])
def test_a_change_in_a_large_model_is_seen_before_the_next_replay(device, is_number):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 1.0 if is_number else torch.ones((), device=device)

        def forward(self, x):
            return x * self.scale

    def train(is_captured):
        loop = Loop(device, is_captured)
        loop.model = nn.Sequential(*loop.model, *(Scaled() for _ in range(300)))
        step = loop.capture(lambda batch: loop.update(batch, 0.0))
        losses = []
        for number, batch in enumerate(loop.batches):
            if number >= LATE:
                loop.model[-1].scale = loop.model[-1].scale * 1.5
            losses.append(float(step(batch)))
        return losses, loop.step

    losses, captured = train(is_captured=True)
    assert captured.reason.startswith("captured")
    torch.testing.assert_close(losses, train(is_captured=False)[0], rtol=1e-4, atol=1e-5)


class Settings:
    beta = 0.0


SETTINGS = ModuleType("settings")


class Kind(enum.Enum):
    plain, other = range(2)


def number_in_nested_dicts(loop):
    config = {"loss": {"weights": [0.0, 1.0]}}

    def put():
        config["loss"]["weights"][0] = 0.7

    return (lambda batch: loop.update(batch, config["loss"]["weights"][0])), put


def number_in_nested_objects(loop):
    config = SimpleNamespace(loss=SimpleNamespace(beta=0.0))
    return (lambda batch: loop.update(batch, config.loss.beta)), lambda: setattr(
        config.loss, "beta", 0.7
    )


def dict_that_is_replaced(loop):
    config = {"loss": {"beta": 0.0}}
    return (lambda batch: loop.update(batch, config["loss"]["beta"])), lambda: config.update(
        loss={"beta": 0.7}
    )


def object_that_is_replaced(loop):
    config = SimpleNamespace(loss=SimpleNamespace(beta=0.0))
    return (lambda batch: loop.update(batch, config.loss.beta)), lambda: setattr(
        config, "loss", SimpleNamespace(beta=0.7)
    )


def numbers_in_a_tuple(loop):
    state = SimpleNamespace(beta=(0.0, 1.0))
    return (lambda batch: loop.update(batch, state.beta[0])), lambda: setattr(
        state, "beta", (0.7, 1.0)
    )


def nothing_that_becomes_a_number(loop):
    state = SimpleNamespace(beta=None)
    return (lambda batch: loop.update(batch, state.beta or 0.0)), lambda: setattr(
        state, "beta", 0.7
    )


def member_of_an_enumeration(loop):
    state = SimpleNamespace(kind=Kind.plain)

    def step(batch):
        return loop.update(batch, 0.7 if state.kind is Kind.other else 0.0)

    return step, lambda: setattr(state, "kind", Kind.other)


def array_that_is_changed(loop):
    weights = np.zeros(3)

    def put():
        weights[1] = 0.7

    return (lambda batch: loop.update(batch, float(weights[1]))), put


def array_that_is_replaced(loop):
    state = SimpleNamespace(weights=np.zeros(3))
    return (lambda batch: loop.update(batch, float(state.weights[1]))), lambda: setattr(
        state, "weights", np.full(3, 0.7)
    )


def function_that_is_replaced(loop):
    state = SimpleNamespace(beta=lambda: 0.0)
    return (lambda batch: loop.update(batch, state.beta())), lambda: setattr(
        state, "beta", lambda: 0.7
    )


def number_of_a_class(loop):
    Settings.beta = 0.0
    return (lambda batch: loop.update(batch, Settings.beta)), lambda: setattr(Settings, "beta", 0.7)


def number_of_a_module(loop):
    SETTINGS.beta = 0.0
    return (lambda batch: loop.update(batch, SETTINGS.beta)), lambda: setattr(SETTINGS, "beta", 0.7)


def optimizer_that_is_replaced(loop):
    def put():
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.2)

    return (lambda batch: loop.update(batch, 0.0)), put


class Bent(nn.Module):
    """A criterion, or a teacher, that is not given as a model."""

    beta = 0.0

    def __init__(self):
        super().__init__()
        self.inner = nn.LeakyReLU(0.0)

    def forward(self, batch):
        return self.beta - float(self.inner(torch.tensor(-1.0)))


def number_of_a_module_that_is_named(loop):
    bent = Bent()
    return (lambda batch: loop.update(batch, bent(batch))), lambda: setattr(
        bent.inner, "negative_slope", 0.7
    )


def module_that_is_replaced(loop):
    bent = [Bent()]

    def put():
        bent[0] = Bent()
        bent[0].inner.negative_slope = 0.7

    return (lambda batch: loop.update(batch, bent[0](batch))), put


def number_that_a_class_gives(loop):
    bent = [("first", Bent())]
    return (lambda batch: loop.update(batch, bent[0][1].beta)), lambda: setattr(
        bent[0][1], "beta", 0.7
    )


def number_in_a_slot(loop):
    slots = Slots(0.0)
    return (lambda batch: loop.update(batch, slots.hidden)), lambda: setattr(slots, "hidden", 0.7)


def function_beside_its_weight(loop):
    terms = {"one": (len, 0.0)}
    return (lambda batch: loop.update(batch, terms["one"][1])), lambda: terms.update(one=(len, 0.7))


def entry_of_a_set(loop):
    terms = {"mean"}

    def put():
        terms.remove("mean")
        terms.add("sum")

    return (lambda batch: loop.update(batch, 0.7 if "sum" in terms else 0.0)), put


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize(
    "make",
    [
        number_in_nested_dicts,
        number_in_nested_objects,
        dict_that_is_replaced,
        object_that_is_replaced,
        numbers_in_a_tuple,
        nothing_that_becomes_a_number,
        member_of_an_enumeration,
        array_that_is_changed,
        array_that_is_replaced,
        function_that_is_replaced,
        number_of_a_class,
        number_of_a_module,
        optimizer_that_is_replaced,
        number_of_a_module_that_is_named,
        module_that_is_replaced,
        number_that_a_class_gives,
        number_in_a_slot,
        function_beside_its_weight,
        entry_of_a_set,
    ],
)
def test_what_decides_a_step_is_never_stale(device, make):
    def train(is_captured):
        loop = Loop(device, is_captured)
        step, put = make(loop)
        return losses_with_a_change(loop.capture(step), loop.batches, LATE, put)

    torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-5)


LAST = None


def test_a_global_that_is_called_like_an_attribute_is_not_watched(device):
    loop, state = Loop(device, is_captured=True), SimpleNamespace(LAST=0.0)
    step = loop.capture(lambda batch: loop.update(batch, state.LAST))
    for batch in loop.batches:
        globals()["LAST"] = {"loss": step(batch)}
    assert "replays agreed" in step.reason
