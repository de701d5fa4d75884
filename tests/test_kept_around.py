"""What a step keeps around itself, in dicts, lists and objects: put back when a replay is compared, and never frozen.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.loader.loader import Loader
from stoker.store.fields import Dense
from stoker.train.trainer import Trainer
from store_makers import write_store

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:stoker.capture"),
]
EPOCHS = 4


class Keeps:
    """A loss of one's own, no module: what it keeps decides the next one, in a way that a subclass says."""

    def __init__(self, device):
        self.average, self.recent = torch.ones((), device=device), []
        self.stats = {"n": 0, "average": torch.ones((), device=device), "norms": []}
        self.last = deque([torch.ones((), device=device)], maxlen=3)

    def __call__(self, outputs, targets):
        loss = nn.functional.mse_loss(outputs, targets)
        return loss * self.weigh(loss.detach())


class ReplacesAttribute(Keeps):
    def weigh(self, loss):
        self.average = 0.9 * self.average + 0.1 * loss
        return self.average


class ReplacesEntry(Keeps):
    def weigh(self, loss):
        self.stats["average"] = 0.9 * self.stats["average"] + 0.1 * loss
        return self.stats["average"]


class Appends(Keeps):
    def weigh(self, loss):
        self.stats["norms"].append(loss)
        return torch.stack(self.stats["norms"][-3:]).mean()


class Rotates(Keeps):
    """Keeps the length of its list."""

    def weigh(self, loss):
        self.recent[:] = [*(self.recent or [loss, loss])[1:], loss]
        return self.recent[0] + self.recent[1]


class RotatesDeque(Keeps):
    def weigh(self, loss):
        self.last.append(loss)
        return self.last[0]


class CountsInside(Keeps):
    def weigh(self, loss):
        self.stats["n"] += 1
        return 1.0 + 0.01 * self.stats["n"]


class OnlyWrites(Keeps):
    def weigh(self, loss):
        self.average = self.stats["average"] = loss
        return 1.0


KINDS = [ReplacesAttribute, ReplacesEntry, Appends, Rotates, RotatesDeque, CountsInside, OnlyWrites]


def make_model(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)


def batches(device):
    torch.manual_seed(3)
    return [(x, x[:, :1] * 2) for x in torch.randn(40, 6).to(device).split(8)]


def make_step(model, criterion, optimizer):
    def step(batch):
        loss = criterion(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def train_plainly(device, kind, through=lambda step, *_: step):
    model, criterion = make_model(device), kind(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = through(make_step(model, criterion, optimizer), model, optimizer)
    losses = [float(step(batch)) for batch in batches(device) * EPOCHS]
    return losses, criterion, step


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_is_the_plain_loop(device, kind):
    expected, plain, _ = train_plainly(device, kind)
    model, criterion = make_model(device), kind(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    parts = model, batches(device), None, criterion, optimizer, None
    trainer = Trainer(*parts, {"epochs": EPOCHS, "precision": "fp32"}, device)
    assert trainer.fit(quiet=True).losses == pytest.approx(expected, rel=1e-4)
    assert trainer._captured.active == (kind is OnlyWrites), trainer._captured.reason
    assert criterion.stats["n"] == plain.stats["n"]
    torch.testing.assert_close(criterion.average, plain.average)
    torch.testing.assert_close(criterion.stats["average"], plain.stats["average"])


@pytest.mark.parametrize("kind", KINDS)
def test_stoker_capture_is_the_plain_loop(device, kind):
    expected, plain, _ = train_plainly(device, kind)
    found, criterion, step = train_plainly(
        device, kind, lambda step, model, optimizer: stoker.capture(step, model=model, optimizer=optimizer)
    )  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-4)
    assert step.is_captured == (kind is OnlyWrites), step.reason
    torch.testing.assert_close(criterion.average, plain.average)


def test_what_is_kept_is_named(device):
    step = train_plainly(
        device, Appends, lambda step, model, optimizer: stoker.capture(step, model=model, optimizer=optimizer)
    )[2]  # fmt: skip
    assert "stats.norms on the host" in step.reason


# -- the function that unpacks a batch is in the graph of a loader on the device ------------------------


@pytest.fixture
def store(tmp_path):
    features = np.random.default_rng(0).normal(size=(100, 5)).astype("f4")
    data = {"features": Dense(features), "targets": Dense(features[:, :1] * 3)}
    return write_store(tmp_path / "store", [data])


class Unpacks:
    """Scales what it unpacks by a number that others change."""

    def __init__(self):
        self.factor = 1.0

    def __call__(self, batch):
        return batch["features"] * self.factor, batch["targets"]


class Changes(torch.optim.lr_scheduler.LRScheduler):
    """Changes the number of an `Unpacks` once, by little, after the comparisons of the first replays."""

    def __init__(self, optimizer, unpacks):
        self.unpacks = unpacks
        super().__init__(optimizer)

    def step(self, epoch=None):
        self.last_epoch += 1
        if self.last_epoch == 12:
            self.unpacks.factor = 1.01


def test_a_number_that_unpack_reads_is_never_stale(store, device):
    losses = []
    for capture in ("auto", "off"):
        torch.manual_seed(0)
        model = nn.Linear(5, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        unpack = Unpacks()
        config = {"epochs": 6, "precision": "fp32", "capture": capture}
        with Loader(store, 20, device, order="shuffled", seed=1) as loader:
            parts = model, loader, None, nn.functional.mse_loss, optimizer
            trainer = Trainer(
                *parts, Changes(optimizer, unpack), config, device,
                unpack=unpack, scheduler_interval="update",
            )  # fmt: skip
            losses.append(trainer.fit(quiet=True).losses)
        if capture == "auto":
            assert any("Unpacks.factor has changed" in note for note in trainer.history.notes)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# -- sparse gradients, and targets with fewer bits ------------------------------------------------------


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 8, sparse=True)

    def forward(self, words):
        return self.table(words).sum((1, 2))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_train_by_sgd_as_in_the_plain_loop(device, momentum):
    torch.manual_seed(1)
    given = [(x, x.float().mean(1)) for x in torch.randint(20, (5, 8, 3)).to(device)]
    found = []
    for captures in (False, True):
        model = Words().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
        step = make_step(model, nn.functional.mse_loss, optimizer)
        if captures:
            step = stoker.capture(step, model=model, optimizer=optimizer)
        for batch in given * 2:
            step(batch)
        found.append(model.table.weight.detach())
    torch.testing.assert_close(*found)
    assert step.reason == "eager: sparse gradients have another size at every step"


def test_a_model_with_fewer_bits_has_targets_of_its_own_kind(device):
    seen = []

    def criterion(outputs, targets):
        seen.append((outputs.dtype, targets.dtype))
        return nn.functional.mse_loss(outputs, targets)

    model = make_model(device).bfloat16()
    given = [(x.bfloat16(), y.bfloat16()) for x, y in batches(device)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = model, given, given, criterion, optimizer, None, {"epochs": 2, "precision": "fp32"}
    Trainer(*parts, device).fit(quiet=True)
    assert {*seen} == {(torch.float32, torch.float32)}


@pytest.mark.gpu
def test_a_step_that_needs_lengths_on_the_host_is_run_as_it_is():
    torch.manual_seed(0)
    lstm, head = nn.LSTM(4, 8, batch_first=True).cuda(), nn.Linear(8, 1).cuda()
    optimizer = torch.optim.SGD([*lstm.parameters(), *head.parameters()], lr=0.1)

    def step(batch):
        x, lengths = batch
        packed = nn.utils.rnn.pack_padded_sequence(
            x.cuda(), lengths, batch_first=True, enforce_sorted=False
        )
        loss = head(lstm(packed)[1][0][-1]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    captured = stoker.capture(step, model=[lstm, head], optimizer=optimizer)
    for _ in range(6):
        captured((torch.randn(5, 7, 4), torch.randint(1, 8, (5,))))
    assert "the step fails with a batch on the device" in captured.reason
