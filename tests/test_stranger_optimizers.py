"""Optimizers of kinds that nobody here wrote: each trains as in a plain loop, wherever it keeps its numbers.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import InputError
from stoker.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
EPOCHS = 4


class Own(torch.optim.Optimizer):
    """Steps less and less far, by a factor that a subclass keeps where it likes."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "k": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, group, self.state[parameter])
            group["k"] += 1
        self.count += 1

    def move(self, parameter, group, state):
        raise NotImplementedError


class CountsInGroup(Own):
    def move(self, parameter, group, state):
        parameter.sub_(parameter.grad, alpha=group["lr"] / (1 + group["k"]))


class CountsInAttribute(Own):
    def move(self, parameter, group, state):
        parameter.sub_(parameter.grad, alpha=0.05 / (1 + self.count))


class CountsInState(Own):
    def move(self, parameter, group, state):
        state["step"] = state.get("step", 0) + 1
        parameter.sub_(parameter.grad, alpha=0.05 / state["step"])


class ReplacesItsState(Own):
    def move(self, parameter, group, state):
        state["average"] = 0.9 * state.get("average", 0.0) + 0.1 * parameter.grad
        parameter.sub_(state["average"], alpha=0.05)


class KeepsLists(Own):
    def move(self, parameter, group, state):
        averages = state.setdefault("averages", [torch.zeros_like(parameter)])
        averages[0].lerp_(parameter.grad, 0.1)
        parameter.sub_(averages[0], alpha=0.05)


class Outer(torch.optim.Optimizer):
    """Wraps an optimizer, and pulls the weights back to slow ones every third step, as `Lookahead` does."""

    def __init__(self, params):
        self.inner = torch.optim.Adam(params, lr=0.01)
        super().__init__(self.inner.param_groups, {})
        self.param_groups, self.num_steps = self.inner.param_groups, 0
        every = [p for group in self.param_groups for p in group["params"]]
        self.slow = [parameter.detach().clone() for parameter in every]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            every = [p for group in self.param_groups for p in group["params"]]
            for slow, fast in zip(self.slow, every, strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params, **rate):
        super().__init__(params, rate)

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.sub_(parameter.grad, alpha=0.05)


class RateOfNone(WithoutRate):
    def __init__(self, params):
        super().__init__(params, lr=None)


def make_model(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)


def batches(device):
    torch.manual_seed(3)
    return [(x, x[:, :1] * 2) for x in torch.randn(40, 6).to(device).split(8)]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_plainly(device, kind, after=lambda *_: None):
    model = make_model(device)
    optimizer = kind(model.parameters())
    after(model, optimizer)
    for inputs, targets in batches(device) * EPOCHS:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def train(device, kind, after=lambda *_: None, epochs=EPOCHS, resume=False, run_dir=None, val=None):
    model = make_model(device)
    optimizer = kind(model.parameters())
    after(model, optimizer)
    config = {"epochs": epochs, "precision": "fp32"}
    parts = model, batches(device), val, nn.functional.mse_loss, optimizer, None, config, device
    trainer = Trainer(*parts, run_dir=run_dir)
    trainer.fit(quiet=True, resume=resume)
    return trainer


KINDS = [CountsInGroup, CountsInAttribute, CountsInState, ReplacesItsState, KeepsLists]
KINDS += [Outer, WithoutRate, RateOfNone]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_plain_loop(device, kind):
    trainer = train(device, kind)
    torch.testing.assert_close(weights(trainer.model), weights(train_plainly(device, kind)))
    assert trainer._captured.active, trainer._captured.reason


@pytest.mark.parametrize("kind", [CountsInGroup, CountsInState, ReplacesItsState, KeepsLists])
def test_it_is_resumed(device, kind, tmp_path):
    for epochs in (2, EPOCHS):
        trainer = train(device, kind, epochs=epochs, resume=epochs > 2, run_dir=tmp_path / "run")
    torch.testing.assert_close(weights(trainer.model), weights(train_plainly(device, kind)))


def test_the_count_is_named(device):
    trainer = train(device, CountsInGroup)
    assert "the step changes k of CountsInGroup on the host" in trainer._captured.split_reason


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize("kind", KINDS)
def test_stoker_capture_is_the_plain_loop(device, kind):
    model = make_model(device)
    optimizer = kind(model.parameters())

    def step(batch):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    captured = stoker.capture(step, model=model, optimizer=optimizer)
    for batch in batches(device) * EPOCHS:
        captured(batch)
    torch.testing.assert_close(weights(model), weights(train_plainly(device, kind)))


class Shadow:
    """A moving average, written through `.data` as most are."""

    def __init__(self, model):
        self.values = [p.detach().clone() for p in model.parameters()]
        self.num_updates = 0

    def update(self, model):
        self.num_updates += 1
        for kept, now in zip(self.values, model.parameters(), strict=True):
            kept.data.mul_(0.9).add_(now.data, alpha=0.1)


def average_in_module(model, kept):
    average = copy.deepcopy(model).requires_grad_(False)
    kept.append(average.parameters)

    def update(*_):
        for old, now in zip(average.parameters(), model.parameters(), strict=True):
            old.data.mul_(0.9).add_(now.data, alpha=0.1)

    return update


def average_in_object(model, kept):
    shadow = Shadow(model)
    kept.append(lambda: [*shadow.values, torch.tensor(float(shadow.num_updates))])
    return lambda *_: shadow.update(model)


@pytest.mark.parametrize("make", [average_in_module, average_in_object])
def test_an_average_in_a_hook_of_the_optimizer_is_updated_once_a_step(device, make):
    kept = []

    def after(model, optimizer):
        optimizer.register_step_post_hook(make(model, kept))

    trainer = train(device, lambda p: torch.optim.SGD(p, lr=0.05), after)
    train_plainly(device, lambda p: torch.optim.SGD(p, lr=0.05), after)
    for found, expected in zip(kept[0](), kept[1](), strict=True):
        torch.testing.assert_close(found, expected)
    assert trainer._captured.active == (make is average_in_module), trainer._captured.reason


@pytest.mark.filterwarnings("ignore:stoker.capture")
def test_an_average_through_data_in_a_captured_function_is_updated_once_a_step(device):
    model = make_model(device)
    optimizer, shadow = torch.optim.SGD(model.parameters(), lr=0.05), Shadow(model)

    def step(batch):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        for kept, now in zip(shadow.values, model.parameters(), strict=True):
            kept.data.mul_(0.9).add_(now.data, alpha=0.1)
        return loss

    captured = stoker.capture(step, model=model, optimizer=optimizer)
    plain = []

    def after(other, optimizer):
        plain.append(Shadow(other))
        optimizer.register_step_post_hook(lambda *_: plain[0].update(other))

    for batch in batches(device) * EPOCHS:
        captured(batch)
    train_plainly(device, lambda p: torch.optim.SGD(p, lr=0.05), after)
    torch.testing.assert_close(shadow.values, plain[0].values)
    assert "the step changes shadow" in captured.reason


def test_a_hook_that_collects_is_called_at_every_step(device):
    seen = []

    def after(model, optimizer):
        model[0].register_forward_hook(lambda *_: seen.append(1))

    trainer = train(device, lambda p: torch.optim.SGD(p, lr=0.05), after)
    assert "the length of seen" in trainer._captured.reason
    assert len(seen) == EPOCHS * 5


class Average:
    """As in many detectors: an object with a copy of the model."""

    def __init__(self, model):
        self.copy = copy.deepcopy(model).requires_grad_(False)

    def update(self, model):
        for mean, now in zip(self.copy.parameters(), model.parameters(), strict=True):
            mean.mul_(0.9).add_(now, alpha=0.1)


@pytest.mark.parametrize("kind", [Average, torch.optim.swa_utils.AveragedModel])
def test_an_average_in_a_hook_is_resumed(tmp_path, kind):
    def run(epochs, folder, resume=False):
        model = make_model("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = kind(model)
        update = average.update if kind is Average else average.update_parameters
        optimizer.register_step_post_hook(torch.no_grad()(lambda *_: update(model)))
        config = {"epochs": epochs, "precision": "fp32"}
        trainer = Trainer(
            model,
            batches("cpu"),
            None,
            nn.functional.mse_loss,
            optimizer,
            None,
            config,
            "cpu",
            run_dir=folder,
        )
        trainer.fit(quiet=True, resume=resume)
        return weights(average.copy if kind is Average else average)

    run(1, tmp_path / "broken")
    resumed = run(2, tmp_path / "broken", resume=True)
    torch.testing.assert_close(resumed, run(2, tmp_path / "whole"))


class TwoForms(torch.optim.SGD):
    """Trains weights that are shifted by one, and must be told when they are to be used."""

    def __init__(self, params):
        super().__init__(params, lr=0.05)
        self.param_groups[0]["train_mode"] = False

    @torch.no_grad()
    def _shift(self, training):
        if self.param_groups[0]["train_mode"] != training:
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(1.0 if training else -1.0)
        self.param_groups[0]["train_mode"] = training

    def train(self):
        self._shift(True)

    def eval(self):
        self._shift(False)

    def step(self, closure=None):
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("not in train mode")
        return super().step(closure)


def test_an_optimizer_with_two_forms_of_the_weights_is_told_which(device, tmp_path):
    val = batches(device)
    trainer = train(device, TwoForms, val=val, run_dir=tmp_path / "run")
    with torch.no_grad():
        losses = [nn.functional.mse_loss(trainer.model(x), y) for x, y in val]
    assert trainer.history.epochs[-1].metrics["loss"] == pytest.approx(float(sum(losses)) / 5)
    assert not trainer.optimizer.param_groups[0]["train_mode"]
    for epochs in (2, EPOCHS):
        folder = tmp_path / "two"
        last = train(device, TwoForms, epochs=epochs, resume=epochs > 2, run_dir=folder, val=val)
    torch.testing.assert_close(weights(last.model), weights(trainer.model))


class ByTensor(CountsInGroup):
    """Its state_dict names parameters by themselves."""

    def state_dict(self):
        return super().state_dict() | {"slow": dict.fromkeys(self.param_groups[0]["params"], 1.0)}


def test_what_cannot_be_saved_is_said_after_the_first_step(tmp_path):
    with pytest.raises(InputError, match=r"state\.optimizer\.slow has tensors as keys") as error:
        train("cpu", ByTensor, run_dir=tmp_path / "run")
    assert "without run_dir" in error.value.fix
    assert train("cpu", ByTensor).history.ended == "done"
