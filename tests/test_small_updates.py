"""Graphs that are wrong by part of an update are caught however small the update is beside the weights.

On a CPU the graphs are made of paper (`paper_graphs.py`). What is wrong is a number that nobody watches: a graph
repeats the one of its capture.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

import stoker
from stoker.train.graphs.replay_check import difference
from stoker.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
EPOCHS = 3


class Scaled(torch.optim.Optimizer):
    """Steps further by a factor that others change; keeps masters in float32 of weights with fewer bits."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.hidden = ctypes.c_double(1.0)  # a number where no code of stoker looks

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                target = parameter
                if parameter.dtype == torch.bfloat16:
                    target = state.setdefault("master", parameter.float())
                target.sub_(parameter.grad.to(target.dtype) * (group["lr"] * self.hidden.value))
                if target is not parameter:
                    parameter.copy_(target)

    def grow(self):
        self.hidden.value *= 1.1


class Growth(torch.optim.lr_scheduler.LRScheduler):
    """Lets an optimizer step a tenth further every time."""

    def step(self, epoch=None):
        if self.last_epoch >= 0:
            self.optimizer.grow()
        self.last_epoch += 1


class ComplexNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 16, dtype=torch.complex64) / 3)
        self.second = nn.Parameter(torch.randn(16, 1, dtype=torch.complex64) / 4)

    def forward(self, x):
        h = x.to(self.first.dtype) @ self.first
        return ((h * h.abs().sigmoid()) @ self.second).real


class Tiny(nn.Module):
    """Weights whose gradients are a hundred-millionth of those of the others."""

    def __init__(self):
        super().__init__()
        self.net, self.tiny = (
            nn.Linear(6, 1).requires_grad_(False),
            nn.Parameter(torch.randn(1) * 1e-9),
        )

    def forward(self, x):
        return self.net(x) + 1e-8 * self.tiny


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.Parameter(torch.randn(6, 16) * 1e-3)
        self.large = nn.Parameter(torch.randn(16, 1) * 1e3)

    def forward(self, x):
        return (x @ (self.small * 1e3)).tanh() @ (self.large * 1e-3)


def plain_net():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def low_precision():
    return plain_net().bfloat16()


RATES = {plain_net: 1e-4, ComplexNet: 1e-4, Tiny: 1e-2, Scales: 1e-10, low_precision: 1e-4}


def batches(model, device):
    torch.manual_seed(3)
    kind = next(model.parameters()).dtype
    kind = torch.float32 if kind.is_complex else kind
    given = torch.randn(40, 6).to(device, kind).split(8)
    return [(x, x[:, :1] * 2) for x in given]


def made(kind, make_optimizer, device):
    torch.manual_seed(0)
    model = kind().to(device)
    return model, make_optimizer(model.parameters(), lr=RATES[kind])


def train_plainly(kind, make_optimizer, device):
    model, optimizer = made(kind, make_optimizer, device)
    start = weights(model, optimizer)
    for inputs, targets in batches(model, device) * EPOCHS:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if isinstance(optimizer, Scaled):
            optimizer.grow()
    return start, weights(model, optimizer)


def weights(model, optimizer):
    """The weights, or the masters of those that have fewer bits."""
    state = optimizer.state
    return [state[p].get("master", p).detach().clone() for p in model.parameters()]


def check_moved_alike(found, start, expected, most=1e-3):
    """Each tensor went where the plain loop took it, in units of how far that is."""
    for one, before, other in zip(found, start, expected, strict=True):
        moved = (other - before).abs().max()
        rounding = torch.finfo(one.dtype).eps * other.abs().max()
        assert (one - other).abs().max() <= most * moved + 8 * rounding


@pytest.mark.parametrize("kind", RATES)
def test_the_trainer_does_not_accept_it(device, kind):
    start, expected = train_plainly(kind, Scaled, device)
    model, optimizer = made(kind, Scaled, device)
    config = {"epochs": EPOCHS, "precision": "fp32"}
    parts = model, batches(model, device), None, nn.functional.mse_loss, optimizer
    trainer = Trainer(*parts, Growth(optimizer), config, device, scheduler_interval="update")
    trainer.fit(quiet=True)
    check_moved_alike(weights(model, optimizer), start, expected)
    assert "differed from the eager one" in trainer._captured.split_reason


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize("kind", RATES)
def test_stoker_capture_does_not_accept_it(device, kind):
    start, expected = train_plainly(kind, Scaled, device)
    model, optimizer = made(kind, Scaled, device)

    def step(batch):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    captured = stoker.capture(step, model=model, optimizer=optimizer)
    for batch in batches(model, device) * EPOCHS:
        captured(batch)
        optimizer.grow()
    check_moved_alike(weights(model, optimizer), start, expected)
    assert not captured.can_capture


@pytest.mark.parametrize("kind", [plain_net, ComplexNet, Scales])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam])
def test_optimizers_that_count_follow_their_counts(device, kind, make):
    start, expected = train_plainly(kind, make, device)
    model, optimizer = made(kind, make, device)
    config = {"epochs": EPOCHS, "precision": "fp32"}
    parts = model, batches(model, device), None, nn.functional.mse_loss, optimizer, None, config
    trainer = Trainer(*parts, device)
    trainer.fit(quiet=True)
    check_moved_alike(weights(model, optimizer), start, expected, most=5e-3)
    assert trainer._captured.active, trainer._captured.reason


KINDS = [torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_the_measure_is_how_far_a_step_went(kind, scale):
    torch.manual_seed(0)
    before = torch.randn(50).to(kind) * scale
    move = torch.randn(50).to(kind) * scale * (1e-4 if kind != torch.bfloat16 else 0.5)
    loss = torch.tensor(scale)

    def away(share):
        return difference([loss, before + move], [loss, before + move * share], None, [before])

    assert away(1.0) == 0.0
    assert away(1.1) > 1.0  # a tenth too far
    assert away(0.0) > 1.0  # not at all
    assert away(-1.0) > 1.0


def test_what_does_not_move_must_not_move_in_a_replay():
    still, loss = torch.ones(4), torch.tensor(1.0)
    assert difference([loss, still], [loss, still + 1e-5], None, [still]) > 1.0
    assert difference([loss, still], [loss, still.clone()], None, [still]) == 0.0


def test_a_few_noisy_values_do_not_hide_the_others():
    before = torch.zeros(1000)
    one, wrong = torch.full((1000,), 1e-3), torch.full((1000,), 1.2e-3)
    noise = torch.tensor([[0.0, 2e-3], [0.0, 4e-6]])  # two values of a thousand flip their sign
    loss = torch.tensor(1.0)
    assert difference([loss, one], [loss, wrong], noise, [before]) > 1.0
    flipped = one.clone()
    flipped[:2] *= -1
    assert difference([loss, one], [loss, flipped], noise, [before]) <= 1.0
