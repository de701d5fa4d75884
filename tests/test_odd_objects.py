"""Objects around a step that cannot be asked what they are, or hold themselves: the step trains, and is captured.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.train.graphs import graphed_step
from stoker.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


class Node:
    """Holds itself."""

    def __init__(self):
        self.up, self.nodes = self, []
        self.nodes.append(self.nodes)


class NoClass:
    """Knows no class of its own yet, as a proxy that is not bound."""

    @property
    def __class__(self):
        raise RuntimeError("not bound")


class NoAttributes:
    """Loads itself when something of it is read, and fails."""

    def __getattr__(self, name):
        raise RuntimeError(f"cannot load {name}")


class NoDict:
    """Does not tell what it holds."""

    @property
    def __dict__(self):
        raise RuntimeError("closed")


class Closed(Mapping):
    """A file that is closed."""

    def __getitem__(self, key):
        raise OSError("closed")

    def __iter__(self):
        raise OSError("closed")

    def __len__(self):
        return 3


class Box:
    """Holds what it is given."""

    def __init__(self, odd):
        self.odd = odd


def dict_of_itself():
    made = {}
    made["me"] = made
    return made


def list_of_itself():
    made = []
    made.append(made)
    return made


def dead_proxy():
    return weakref.proxy(Node())


ODD = [dict_of_itself, list_of_itself, Node, dead_proxy, NoClass, NoAttributes, NoDict, Closed]
AROUND = None
"""The odd object, as a global of a step."""


def parts(device):
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def weights_of_plain_steps(device, count, scale=lambda number: 1.0):
    model, optimizer = parts(device)
    for number in range(count):
        optimizer.zero_grad()
        model(torch.ones(3, 4, device=device) * scale(number)).square().mean().backward()
        optimizer.step()
    return model.weight.detach().clone()


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("where", ["global", "closure", "attribute", "argument", "dict", "object"])
def test_a_step_beside_an_odd_object_is_captured(device, make, where, monkeypatch):
    model, optimizer = parts(device)
    odd = make()

    def train(batch, _=None):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def with_global(batch):
        _ = AROUND
        return train(batch)

    def with_closure(batch):
        _ = odd
        return train(batch)

    def with_argument(batch, _=odd):
        return train(batch)

    settings, box = {"odd": odd, "list": [odd]}, Box(odd)

    def with_dict(batch):
        _ = settings["odd"]
        return train(batch)

    def with_object(batch):
        _ = box.odd
        return train(batch)

    steps = {"global": with_global, "closure": with_closure, "argument": with_argument}
    steps |= {"dict": with_dict, "object": with_object}
    step = steps.get(where, train)
    monkeypatch.setitem(globals(), "AROUND", odd)
    if where == "attribute":
        vars(model)["odd"] = odd
    captured = stoker.capture(step, model=model, optimizer=optimizer)
    for _ in range(8):
        captured(torch.ones(3, 4, device=device))
    assert captured.is_captured, captured.reason
    assert torch.equal(model.weight, weights_of_plain_steps(device, 8))


@pytest.mark.parametrize("make", ODD)
def test_a_trainer_with_an_odd_criterion_trains_and_saves(device, make, tmp_path):
    model, optimizer = parts(device)
    odd = make()

    def criterion(output, target):
        _ = odd
        return (output - target).square().mean()

    batches = [(torch.ones(3, 4, device=device), torch.zeros(3, 1, device=device))] * 8
    given = model, batches, None, criterion, optimizer, None, {"epochs": 1, "precision": "fp32"}
    trainer = Trainer(*given, device, run_dir=tmp_path / "run")
    trainer.fit(quiet=True)
    assert trainer._captured.active
    assert torch.equal(model.weight, weights_of_plain_steps(device, 8))


@pytest.mark.parametrize(
    "new", [np.full(4, 2.0), torch.full((4,), 2.0), torch.tensor(2.0), [2.0], "2.0"], ids=repr
)
def test_a_number_may_become_an_array(device, new):
    model, optimizer = parts(device)
    settings = {"scale": 1.0}

    def step(batch):
        optimizer.zero_grad()
        scale = settings["scale"]
        if isinstance(scale, np.ndarray | torch.Tensor):
            scale = torch.as_tensor(scale, dtype=torch.float32).to(device)
        loss = model(batch * (2.0 if isinstance(scale, list | str) else scale)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    captured = stoker.capture(step, model=model, optimizer=optimizer, say=lambda _: None)
    for number in range(16):
        if number == 8:
            assert captured.is_captured, captured.reason
            settings["scale"] = new
        captured(torch.ones(3, 4, device=device))
    expected = weights_of_plain_steps(device, 16, lambda number: 1.0 if number < 8 else 2.0)
    torch.testing.assert_close(model.weight.detach(), expected)


def test_data_that_a_step_names_is_not_compared_at_every_replay(device):
    model, optimizer = parts(device)
    table = [[*range(100)] for _ in range(100)]
    settings = {"table": table, "scale": 1.0}

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch * settings["scale"] + 0 * len(table)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    captured = stoker.capture(step, model=model, optimizer=optimizer, say=lambda _: None)
    for number in range(20):
        if number == 8:
            assert captured.is_captured, captured.reason
            assert len(captured._graphs[0]._numbers.values()) < 1200  # of 10,000
            settings["scale"] = 2.0  # beside the data
        captured(torch.ones(3, 4, device=device))
    expected = weights_of_plain_steps(device, 20, lambda number: 1.0 if number < 8 else 2.0)
    torch.testing.assert_close(model.weight.detach(), expected)


def test_a_step_that_cannot_be_examined_runs_eagerly(device, monkeypatch):
    model, optimizer = parts(device)

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def fail(*_):
        raise OSError("no such thing")

    monkeypatch.setattr(graphed_step, "KeptObjects", fail)
    captured = stoker.capture(step, model=model, optimizer=optimizer, say=lambda _: None)
    for _ in range(12):
        captured(torch.ones(3, 4, device=device))
    assert not captured.can_capture
    assert "cannot be examined (no such thing" in captured.reason
    assert torch.equal(model.weight, weights_of_plain_steps(device, 12))
