"""A replay is compared like with like: noise and other algorithms are no difference, a wrong graph is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stoker.train.graphs.replay_check import (
    as_if_captured,
    difference,
    is_same_function,
    is_too_noisy,
    spread,
)
from stoker.train.trainer import Trainer


def test_noise_widens_only_the_tensor_that_is_noisy():
    wanted = [torch.ones(4), torch.ones(4)]
    got = [torch.ones(4) * 1.05, torch.ones(4)]
    noise = torch.tensor([0.04, 0.0])
    assert difference(wanted, got) > 1.0
    assert difference(wanted, got, noise) <= 1.0
    assert difference(wanted, got[::-1], noise) > 1.0


def test_the_spread_is_that_of_each_pair():
    one = [torch.tensor([1.0, 2.0]), torch.tensor([], dtype=torch.float32), torch.tensor([3])]
    other = [torch.tensor([1.5, 2.0]), torch.tensor([], dtype=torch.float32), torch.tensor([9])]
    np.testing.assert_allclose(spread(one, other), [[0.5, 0.0, 0.0], [0.25, 0.0, 0.0]])


def test_steps_that_differ_everywhere_cannot_be_judged():
    tensors = [torch.ones(2)] * 3
    assert not is_too_noisy(tensors, torch.tensor([0.5, 0.001, 0.0]))
    assert is_too_noisy(tensors, torch.tensor([0.5, 0.5, 0.0]))
    assert is_too_noisy(tensors, torch.tensor([float("nan")] * 3))


def test_what_a_step_leaves_alone_does_not_hide_noise():
    frozen = [torch.ones(3)] * 6
    after, before = [torch.tensor(1.0), *frozen, torch.ones(2)], [*frozen, torch.zeros(2)]
    noise = torch.tensor([0.5, *[0.0] * 6, 0.5])
    assert not is_too_noisy(after, noise)
    assert is_too_noisy(after, noise, before)
    assert is_too_noisy(after, torch.tensor([0.0, *[0.0] * 6, 0.5]), before)
    assert not is_too_noisy(after, torch.zeros(8), before)


def test_a_loss_that_is_different_each_time_is_no_noise():
    after, before = [torch.tensor(1.0), *[torch.ones(2)] * 5], [torch.zeros(2)] * 5
    assert is_too_noisy(after, torch.tensor([0.1, *[0.0] * 5]), before)
    assert not is_too_noisy(after, torch.tensor([0.001, *[0.0] * 5]), before)


class Masked(nn.Module):
    """Takes another way while a graph is captured, as attention masks of Hugging Face models do."""

    def __init__(self, wrong: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.dropout = nn.Dropout(0.3)
        self.wrong = wrong

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            torch.rand(1, device=x.device)  # the other way draws more, so its dropout is another
            return self.layer(self.dropout(x)) * self.wrong
        return self.layer(self.dropout(x))


def parts_of(model):
    batches = [(torch.ones(4, 6), torch.ones(4, 1))]
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = Trainer(model, batches, None, nn.functional.mse_loss, optimizer, None, {}, "cpu")
    return trainer._step.parts


def test_another_algorithm_for_the_same_function_is_told_from_another_function(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: False
    )  # not in CPU builds
    inputs = torch.ones(4, 6)
    same, other = parts_of(Masked()), parts_of(Masked(wrong=2.0))
    assert is_same_function(same, inputs)
    assert not is_same_function(other, inputs)
    assert same.model.training
    assert same.model.dropout.training
    with as_if_captured():
        assert torch.cuda.is_current_stream_capturing()


class Noisy(nn.Module):
    """Adds with atomics, in another order at every run; Adam turns the rounding of a zero gradient into steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 64)
        self.shift = nn.Parameter(torch.zeros(64))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        hidden = self.layer(x) + self.shift
        index = torch.randint(0, 8, (x.shape[0] * 64,), device=x.device)
        pooled = torch.zeros(8, 64, device=x.device).index_add(
            0, index, hidden.repeat_interleave(64, 0)
        )
        return self.head(hidden + 1e-4 * pooled.mean(0))


def run(model, batches, **config):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"epochs": 3, "precision": "fp32", **config}
    trainer = Trainer(
        model, batches, None, nn.functional.mse_loss, optimizer, None, settings, "cuda"
    )
    trainer.fit()
    return trainer._captured


@pytest.fixture
def batches():
    torch.manual_seed(0)
    return [(torch.randn(32, 6), torch.randn(32, 1)) for _ in range(12)]


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Masked, Noisy])
def test_noise_and_other_algorithms_are_captured(batches, make):
    captured = run(make(), batches)
    assert captured.active, captured.reason


@pytest.mark.gpu
def test_a_model_that_computes_something_else_while_captured_is_found(batches):
    captured = run(Masked(wrong=1.5), batches)
    assert not captured.active
    assert "differed from the eager one" in captured.reason


class Counted(nn.Module):
    """Multiplies with a number of the host, which a graph freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * (1.0 + 0.1 * (self.calls % 7))


@pytest.mark.gpu
def test_a_number_of_the_host_that_moves_is_found(batches):
    captured = run(Counted(), batches)
    assert not captured.active
    assert "the step changes Counted.calls on the host" in captured.reason
