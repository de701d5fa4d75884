"""A model that is changed between two captured steps trains on as the changed one, from the next step.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import stoker
from stoker.train.graphs.structure import Structure

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, AT = 24, 12


class Net(nn.Module):
    """Has a layer of each kind that is replaced."""

    def __init__(self):
        super().__init__()
        self.first, self.activation, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.last(self.activation(self.first(x))) * self.scale


class Half(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight * 0.5


def prune_layer(model, _):
    prune.l1_unstructured(model.first, "weight", 0.5)


def normalise_layer(model, _):
    nn.utils.spectral_norm(model.first)


def parametrize_layer(model, _):
    parametrize.register_parametrization(model.first, "weight", Half())


def replace_layer(model, _):
    model.activation = nn.Tanh()


def replace_parameter(model, _):
    model.last.bias = nn.Parameter(torch.ones_like(model.last.bias))


def replace_buffer(model, _):
    model.scale = model.scale * 2


def add_forward_hook(model, _):
    model.first.register_forward_hook(lambda module, given, made: made * 2)


def add_forward_pre_hook(model, _):
    model.last.register_forward_pre_hook(lambda module, given: (given[0] * 2,))


def add_gradient_hook(model, _):
    model.first.weight.register_hook(lambda gradient: gradient * 0.5)


def add_accumulated_hook(model, _):
    def halve(parameter):
        parameter.grad.mul_(0.5)

    model.first.weight.register_post_accumulate_grad_hook(halve)


def add_update_hook(model, optimizer):
    def halve(*_):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)


def take_hook_away(model, _):
    model.handle.remove()


CHANGES = [
    *(
        prune_layer,
        normalise_layer,
        parametrize_layer,
        replace_layer,
        replace_parameter,
        add_forward_hook,
    ),
    *(add_forward_pre_hook, add_gradient_hook, add_accumulated_hook, add_update_hook),
    *(take_hook_away, replace_buffer),
]


def losses(change, device, captured):
    torch.manual_seed(0)
    model = Net().to(device)
    if change is take_hook_away:
        vars(model)["handle"] = model.first.register_forward_hook(lambda m, given, made: made * 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).to(device)

    def step(batch):
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run, told = step, []
    if captured:
        run = stoker.capture(step, model=model, optimizer=optimizer, say=told.append)
    found = []
    for number in range(STEPS):
        if number == AT:
            assert not captured or run.is_captured, run.reason
            change(model, optimizer)
        found.append(run(x).item())
    if captured:
        assert run.is_captured, run.reason
        assert told == [
            "step captured anew: layers, parameters, buffers or hooks of the model are others"
        ]
    return found


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")  # torch: pruning keeps its output
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_trains_on_as_changed(device, change):
    expected = losses(change, device, captured=False)
    assert losses(change, device, captured=True) == pytest.approx(expected, rel=1e-4)


def test_another_model_is_no_change():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    structure = Structure([model], [optimizer])
    Net().register_forward_hook(print)
    handle = model.register_forward_hook(print)
    handle.remove()
    model.activation.training = False
    assert not structure.has_changed()
    model.first.register_buffer("mask", torch.ones(1))
    assert structure.has_changed()
