"""Habits of models and losses: counts, histories and generators on the host. Each trains as in a plain loop.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import l1_loss, mse_loss

import stoker
from stoker.errors import InputError
from stoker.train.step import check_loss
from stoker.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
EPOCHS = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 1)

    def factor(self):
        raise NotImplementedError

    def forward(self, x):
        return self.out(x + self.factor() * self.inner(x))


class CountsInClass(Net):
    count = 0

    def factor(self):
        return CountsInClass.count / 10

    def forward(self, x):
        CountsInClass.count += 1
        return super().forward(x)


class Draws(Net):
    """Leaves its layer out now and then: a graph of it may agree with many steps that do not."""

    def __init__(self):
        super().__init__()
        self.rng = random.Random(4)

    def factor(self):
        return float(self.draw() > 0.1)

    def draw(self):
        return self.rng.random()


class DrawsByNumpy(Draws):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(4)


class DrawsByOldNumpy(Draws):
    def __init__(self):
        super().__init__()
        self.rng = np.random.RandomState(4)

    def draw(self):
        return self.rng.rand()


class KeepsHistory(Net):
    def __init__(self):
        super().__init__()
        self.history = deque([0.5], maxlen=2)

    def factor(self):
        return sum(self.history) / len(self.history)

    def forward(self, x):
        y = super().forward(x)
        self.history.append(y.detach().mean())
        return y


class Balance:
    """Weighs two losses by how they went, in a dict of its own."""

    def __init__(self):
        self.weights, self.num_calls = {"first": 1.0}, 0

    def __call__(self, outputs, targets):
        self.num_calls += 1
        self.weights["first"] = 1.0 / self.num_calls
        return self.weights["first"] * mse_loss(outputs, targets) + l1_loss(outputs, targets)


class Plain(Net):
    def factor(self):
        return 1.0


HABITS = [
    (CountsInClass, mse_loss, "CountsInClass.count"),
    (Draws, mse_loss, "Draws.rng"),
    (DrawsByNumpy, mse_loss, "DrawsByNumpy.rng"),
    (DrawsByOldNumpy, mse_loss, "DrawsByOldNumpy.rng"),
    (KeepsHistory, mse_loss, "the entries of KeepsHistory.history"),
    (Plain, Balance, "weights.first"),
]


@pytest.fixture(autouse=True)
def forget_counts():
    CountsInClass.count = 0


def batches(device):
    torch.manual_seed(3)
    return [(x, x[:, :1] * 2) for x in torch.randn(40, 6).to(device).split(8)]


def make(device, kind, loss):
    CountsInClass.count = 0
    return kind().to(device), loss() if isinstance(loss, type) else loss


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_plainly(device, kind, loss, together=1):
    model, loss = make(device, kind, loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(EPOCHS):
        given = batches(device)
        for group in (given[i : i + together] for i in range(0, len(given), together)):
            optimizer.zero_grad()
            for inputs, targets in group:
                (loss(model(inputs), targets) / len(group)).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize(("kind", "loss", "name"), HABITS)
@pytest.mark.parametrize("together", [1, 2])
def test_the_trainer_is_the_plain_loop(device, kind, loss, name, together):
    expected = train_plainly(device, kind, loss, together)
    model, loss = make(device, kind, loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = {"epochs": EPOCHS, "precision": "fp32", "gradient_accumulation_steps": together}
    trainer = Trainer(model, batches(device), None, loss, optimizer, None, config, device)
    trainer.fit(quiet=True)
    torch.testing.assert_close(weights(model), weights(expected))
    assert name in trainer._captured.reason
    assert not trainer._captured.active


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize(("kind", "loss", "name"), HABITS)
def test_stoker_capture_is_the_plain_loop(device, kind, loss, name):
    expected = train_plainly(device, kind, loss)
    model, criterion = make(device, kind, loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batch):
        optimizer.zero_grad()
        loss = criterion(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    captured = stoker.capture(step, model=model, optimizer=optimizer)
    for batch in batches(device) * EPOCHS:
        captured(batch)
    torch.testing.assert_close(weights(model), weights(expected))
    assert name in captured.reason


@pytest.mark.parametrize(("kind", "loss", "name"), [*HABITS, (Plain, mse_loss, None)])
def test_what_no_checkpoint_holds_is_said(tmp_path, capsys, kind, loss, name):
    model, loss = make("cpu", kind, loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = {"epochs": 2}
    given = model, batches("cpu"), batches("cpu"), loss, optimizer, None, config, "cpu"
    Trainer(*given, run_dir=tmp_path / "run").fit()
    said = capsys.readouterr().out
    if name is None:
        assert "not in a checkpoint" not in said
    else:
        assert said.count("not in a checkpoint, because in no state_dict:") == 1
        assert name in said


@pytest.mark.parametrize(
    ("loss", "advice"),
    [
        ({"loss": torch.zeros(())}, "return losses['loss'] at"),
        ({"box": torch.zeros(()), "class": torch.zeros(())}, "return sum(losses.values()) at"),
        ((torch.zeros(()), torch.zeros(3)), "return losses[0] at"),
        (None, "return loss at"),
        (torch.zeros(3), "loss.mean()"),
    ],
)
def test_a_loss_of_another_kind_is_answered_with_what_to_return(loss, advice):
    with pytest.raises(InputError, match="the criterion returned") as error:
        check_loss(loss)
    assert advice in error.value.fix


class Normed(Net):
    """With a running mean that it replaces, masks, and a sparse matrix: buffers of all kinds."""

    def __init__(self, in_place=False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("graph", torch.eye(6).to_sparse())
        self.in_place = in_place

    def factor(self):
        return self.mask * (1 + self.mean)

    def forward(self, x):
        mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        if self.in_place:
            self.mean.copy_(mean)
        else:
            self.mean = mean
        return super().forward(torch.sparse.mm(self.graph, x.T).T)


class NormedInPlace(Normed):
    def __init__(self):
        super().__init__(in_place=True)


class Learner(torch.optim.Optimizer):
    """The first optimizer that people write."""

    def __init__(self, params, lr=0.0005):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.data = parameter.data - 0.0005 * parameter.grad


class Returns(torch.optim.Optimizer):
    """Keeps weights to go back to, which every step replaces before it reads them."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.detach().clone()
                parameter.mul_(0.5)
                parameter.copy_(self.state[parameter]["old"] - group["lr"] * parameter.grad)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def returns(parameters):
    return Returns(parameters, {"lr": 0.05})


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize("by", ["trainer", "capture"])
@pytest.mark.parametrize(
    ("kind", "make_optimizer", "reason"),
    [
        (Normed, sgd, "the step replaces mean of Normed by other tensors"),
        (NormedInPlace, sgd, None),
        (Plain, Learner, "the step gives tensors other memory"),
        (Plain, returns, None),
    ],
)
def test_what_is_replaced_is_not_frozen(device, kind, make_optimizer, reason, by):
    def run(through):
        model = kind().to(device)
        optimizer = make_optimizer(model.parameters())

        def step(batch):
            optimizer.zero_grad()
            loss = mse_loss(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss

        return through(step, model, optimizer), model

    def train_all(step):
        for batch in batches(device) * EPOCHS:
            step(batch)
        return step

    def by_trainer(_, model, optimizer):
        config = {"epochs": EPOCHS, "precision": "fp32"}
        trainer = Trainer(model, batches(device), None, mse_loss, optimizer, None, config, device)
        trainer.fit(quiet=True)
        return trainer._captured

    def by_capture(step, model, optimizer):
        return train_all(stoker.capture(step, model=model, optimizer=optimizer))

    _, expected = run(lambda step, *_: train_all(step))
    found, model = run(by_trainer if by == "trainer" else by_capture)
    torch.testing.assert_close(weights(model), weights(expected))
    torch.testing.assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))
    assert (reason or "captured after") in found.reason


class ByName(Plain):
    """Takes its inputs by name, all of them optional, and returns its own loss."""

    def forward(self, input_ids=None, scale=None, labels=None):
        outputs = super().forward(input_ids if scale is None else input_ids * scale)
        return {"loss": mse_loss(outputs, labels), "outputs": outputs}


def test_inputs_are_given_by_name_to_a_model_that_needs_none_of_them(device):
    given = [
        {"labels": y, "scale": torch.full_like(x, 2.0), "input_ids": x} for x, y in batches(device)
    ]
    model, expected = ByName().to(device), Plain().to(device)
    optimizer = sgd(model.parameters())

    def own_loss(outputs, _):
        return outputs["loss"]

    parts = model, given, None, own_loss, optimizer, None, {"precision": "fp32"}, device
    with pytest.raises(InputError, match="takes by name") as error:
        Trainer(*parts).fit(quiet=True)
    assert "unpack=lambda batch: (batch, None)" in error.value.fix
    Trainer(*parts, unpack=lambda batch: (batch, None)).fit(quiet=True)
    optimizer = sgd(expected.parameters())
    for x, y in batches(device):
        optimizer.zero_grad()
        mse_loss(expected(2 * x), y).backward()
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(expected))


class Noam:
    def step(self):
        pass


@pytest.mark.parametrize(
    ("scheduler", "folder", "given"),
    [([Noam(), Noam()], None, "a scheduler that is a list"), (Noam(), "run", "Noam has no state")],
)
def test_a_scheduler_that_cannot_be_used_is_refused_at_once(tmp_path, scheduler, folder, given):
    model = Plain()
    parts = model, batches("cpu"), None, mse_loss, sgd(model.parameters()), scheduler, {}, "cpu"
    with pytest.raises(InputError, match=given):
        Trainer(*parts, run_dir=folder and tmp_path / folder)
    if folder:
        assert Trainer(*parts).fit(quiet=True).ended == "done"
