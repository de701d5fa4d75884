"""One step: what a bad batch must not leave behind, and an optimizer's first update."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.train.activations import Buffers
from stoker.train.losses import NonFiniteError
from stoker.train.step import fill_momentum, make_guarded
from stoker.train.trainer import Trainer
from training_makers import DEVICES, make_model, write_dirty, write_rows

# -- a bad batch leaves no trace -----------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    return write_rows(tmp_path)


def make_normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def train_normed(path, device, left_out=(), **options):
    """Train a model with running statistics, without some batches, or with a setting about them."""
    model = make_normed().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = Loader(path, 20, device)
    config = {"epochs": 2, "capture": "off", "precision": "fp32", "read_every": 3, **options}
    trainer = Trainer(model, loader, None, nn.functional.mse_loss, optimizer, None, config, device)
    trainer._at.left_out = set(left_out)
    return trainer


def assert_same_state(one, other, exact):
    for (name, value), want in zip(
        one.model.state_dict().items(), other.model.state_dict().values(), strict=True
    ):
        assert value.isfinite().all(), name
        if exact:
            assert torch.equal(value, want), name
        else:
            torch.testing.assert_close(value, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", [77, 5])
def test_running_statistics_are_those_of_a_run_without_the_bad_batch(tmp_path, device, sample):
    """In the middle, and in the very first batch: before SGD has any momentum."""
    path = write_dirty(tmp_path, sample)
    bad = {(epoch, sample // 20) for epoch in range(2)}
    skipped = train_normed(path, device, nonfinite="skip")
    history = skipped.fit()
    assert sum(np.isnan(history.losses)) == 2
    plain = train_normed(path, device, bad)
    plain.fit()
    assert_same_state(skipped, plain, device == "cpu")
    stopped = train_normed(path, device, nonfinite="stop", read_every=50)
    with pytest.raises(NonFiniteError):
        stopped.fit()
    assert all(value.isfinite().all() for value in stopped.model.state_dict().values())


@pytest.mark.gpu
@pytest.mark.parametrize("sample", [5, 77, 177])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_captured_step_forgets_a_bad_batch_too(tmp_path, sample, precision):
    """In warm-up, in a replay that is compared, in one that is not."""
    path = write_dirty(tmp_path, sample)
    options = {"epochs": 3, "precision": precision}
    bad = {(epoch, sample // 20) for epoch in range(3)}
    captured = train_normed(path, "cuda", capture="auto", nonfinite="skip", **options)
    captured.fit()
    assert captured._captured.active, captured._captured.reason
    eager = train_normed(path, "cuda", capture="off", nonfinite="skip", **options)
    eager.fit()
    for one, other in zip(
        captured.model.state_dict().values(), eager.model.state_dict().values(), strict=True
    ):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    if precision == "fp32":
        plain = train_normed(path, "cuda", bad, **options)
        plain.fit()
        assert_same_state(eager, plain, exact=False)


def test_buffers_behind_one_that_is_none_shared_or_sparse_are_restored_too():
    model = torch.nn.Module()
    model.register_buffer("none", None)
    model.register_buffer("first", torch.ones(2))
    model.register_buffer("again", model.first)
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    model.register_buffer("last", torch.ones(3))
    buffers = Buffers(model)
    copies = buffers.copy()
    for buffer in (model.first, model.last):
        buffer.zero_()
    buffers.put_back(copies)
    assert model.first.tolist() == [1, 1]
    assert model.last.tolist() == [1, 1, 1]


def test_buffers_that_take_their_shape_from_the_first_batch_are_no_obstacle(path):
    class Observing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_model()
            self.register_buffer("most", torch.empty(0))

        def forward(self, x):
            now = x.detach().amax(0)
            self.most = now if not len(self.most) else torch.maximum(self.most, now)
            return self.net(x)

    model = Observing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = Loader(path, 20, "cpu")
    Trainer(model, loader, None, nn.functional.mse_loss, optimizer, device="cpu").fit()
    whole = torch.cat([batch["features"] for batch in loader])
    assert torch.equal(model.most, whole.amax(0))


# -- SGD's first update --------------------------------------------------------------------------


def one_update(optimizer, model, x, found_inf=None):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if found_inf is not None:
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(found_inf), None
    optimizer.step()


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_first_update_of_sgd_that_is_left_out_leaves_no_momentum(monkeypatch, nesterov):
    # What torch finds in fresh memory is a matter of luck: here it is the worst.
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan"))
    )
    x = torch.randn(8, 6)
    model = make_model()
    plain = copy.deepcopy(model)
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    assert make_guarded(optimizer, torch.device("cpu")) == "SGD runs fused"
    one_update(optimizer, model, x, found_inf=1.0)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    bare = torch.optim.SGD(plain.parameters(), **options)
    for _ in range(3):
        one_update(optimizer, model, x, found_inf=0.0)
        one_update(bare, plain, x)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_momentum_is_filled_where_it_is_missing_only():
    model = make_model()
    groups = [
        {"params": model[0].parameters()},
        {"params": model[3].parameters(), "dampening": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    model[0].bias.requires_grad_(False)
    kept = optimizer.state[model[0].weight]["momentum_buffer"] = torch.ones(16, 6)
    fill_momentum(optimizer)
    assert optimizer.state[model[0].weight]["momentum_buffer"] is kept
    assert "momentum_buffer" not in optimizer.state.get(model[0].bias, {})
    assert "momentum_buffer" not in optimizer.state.get(model[3].weight, {})
    model[0].bias.requires_grad_(True)
    fill_momentum(optimizer)
    assert torch.equal(optimizer.state[model[0].bias]["momentum_buffer"], torch.zeros(16))


@pytest.mark.gpu
def test_sgd_with_dampening_is_not_fused_on_a_gpu():
    optimizer = torch.optim.SGD(make_model().cuda().parameters(), 0.1, momentum=0.9, dampening=0.1)
    assert "dampening" in make_guarded(optimizer, torch.device("cuda"))
    assert not optimizer.param_groups[0].get("fused")


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        (lambda outputs, targets: (outputs - targets).square().mean().item(), "not loss.item()"),
        (lambda outputs, targets: (outputs - targets).detach().square().mean(), ".detach()"),
        (lambda outputs, targets: (outputs - targets).square(), "loss.mean()"),
    ],
)
def test_a_loss_that_trains_nothing_is_answered(criterion, words):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.ones(4, 3), torch.ones(4, 1))]
    trainer = Trainer(model, batches, None, criterion, optimizer, device="cpu")
    with pytest.raises(InputError) as caught:
        trainer.fit(quiet=True)
    assert words in caught.value.fix
