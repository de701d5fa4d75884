"""Optimizers of other people, frozen parts and accumulation in a captured `Trainer`: captured, or a reason with advice.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.train.trainer import Trainer
from training_makers import make_model, write_rows

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


class Muon(torch.optim.Optimizer):
    """Momentum that is made orthogonal for matrices, as people write it."""

    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                update = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                if update.dim() == 2:
                    update = update / (update.norm() + 1e-7)
                    for _ in range(3):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                parameter.sub_(update * group["lr"])


def run(path, device, capture, make_optimizer, model=None, scheduler=None, **options):
    model = (model or make_model()).to(device)
    optimizer = make_optimizer(model)
    config = {"epochs": 2, "capture": capture, "precision": "fp32", **options}
    made = None if scheduler is None else scheduler(optimizer)
    with Loader(path, 20, device, order="shuffled", seed=1, drop_last=True) as loader:
        trainer = Trainer(
            model, loader, None, nn.functional.mse_loss, optimizer, made, config, device
        )
        return trainer, trainer.fit(quiet=True)


def decay(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


OPTIMIZERS = {
    "Muon": lambda m: Muon(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.001),
    "SGD with dampening": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.01, momentum=0.9, dampening=0.5
    ),
    "two groups": lambda m: torch.optim.AdamW(
        [{"params": m[0].parameters(), "lr": 0.001}, {"params": m[3].parameters()}], lr=0.01
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_is_not_fused_is_captured(path, device, name):
    expected = run(path, device, "off", OPTIMIZERS[name])[1].losses
    trainer, history = run(path, device, "auto", OPTIMIZERS[name])
    assert trainer._captured.active, trainer._captured.reason
    assert history.losses == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("scheduler", [None, decay])
def test_torchs_own_keep_counts_and_rates_on_the_gpu(path, scheduler):
    def amsgrad(model):
        return torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)

    expected = run(path, "cuda", "off", amsgrad, scheduler=scheduler)[1].losses
    trainer, history = run(path, "cuda", "on", amsgrad, scheduler=scheduler)
    assert trainer._captured.active
    assert history.losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.gpu
def test_one_that_counts_on_the_host_is_left_out_of_the_graph(path):
    def adagrad(model):
        return torch.optim.Adagrad(model.parameters(), lr=0.01)

    trainer, history = run(path, "cuda", "auto", adagrad)
    assert trainer._captured.split_reason == "Adagrad keeps its counts on the host"
    assert trainer._captured.active
    expected = run(path, "cuda", "off", adagrad)[1].losses
    assert history.losses == pytest.approx(expected, rel=1e-3)


def test_the_rate_of_ones_own_optimizer_is_followed_as_a_tensor(path, device):
    def with_number(model):
        return Muon(model.parameters())

    def with_tensor(model):
        return Muon(model.parameters(), lr=torch.tensor(0.02, device=device))

    expected = run(path, device, "off", with_number, scheduler=decay)[1].losses
    trainer, history = run(path, device, "auto", with_number, scheduler=decay)
    assert "an lr that is a tensor on the GPU" in trainer._captured.split_reason
    assert history.losses == pytest.approx(expected, rel=1e-3)
    trainer, history = run(path, device, "auto", with_tensor, scheduler=decay)
    assert trainer._captured.active, trainer._captured.reason
    assert history.losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("all_given", [True, False])
def test_parts_that_are_frozen_from_the_beginning_are_captured(path, device, all_given):
    def make(model):
        model[0].requires_grad_(False)
        given = model.parameters() if all_given else model[3].parameters()
        return torch.optim.AdamW(given, lr=0.01)

    expected = run(path, device, "off", make)[1].losses
    trainer, history = run(path, device, "auto", make)
    assert trainer._captured.active, trainer._captured.reason
    assert history.losses == pytest.approx(expected, rel=1e-3)
    torch.testing.assert_close(trainer.model[0].weight.cpu(), make_model()[0].weight)


def test_several_optimizers_are_sent_to_capture(path):
    def several(model):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[3])]

    with pytest.raises(InputError, match="a list of 2 optimizers") as error:
        run(path, "cpu", "off", several)
    assert "stoker.capture(step" in error.value.fix
    with pytest.raises(InputError, match="an optimizer that is a Linear"):
        run(path, "cpu", "off", lambda _: nn.Linear(1, 1))
