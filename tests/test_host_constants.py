"""Numbers that a step copies from the host: a graph reads them on the device, if they are the same at every step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stoker
from stoker.train.graphs.host_constants import HostConstants, are_compiled

META = torch.device("meta")
ROW = torch.zeros(4, 3, device=META)

COPIES = {
    "tensor": lambda: torch.tensor([1.0, 2.0], device="meta"),
    "as_tensor": lambda: torch.as_tensor([1, 2], dtype=torch.float32, device=META),
    "as_tensor of a tensor": lambda: torch.as_tensor(torch.tensor([1.0, 2.0]), device=META),
    "asarray": lambda: torch.asarray(np.array([1.0, 2.0], np.float32), device=META),
    "new_tensor": lambda: ROW.new_tensor([1.0, 2.0]),
    "to": lambda: torch.tensor([1.0, 2.0]).to(META),
    "to another": lambda: torch.tensor([1.0, 2.0]).to(ROW),
    "to by name": lambda: torch.tensor([1.0, 2.0]).to(device="meta"),
    "type_as": lambda: torch.tensor([1.0, 2.0]).type_as(ROW),
    "copy_": lambda: torch.empty(2, device=META).copy_(torch.tensor([1.0, 2.0])),
    "copy_ by name": lambda: torch.empty(2, device=META).copy_(other=torch.tensor([1.0, 2.0])),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_every_way_to_copy_numbers_is_seen(copy):
    constants = HostConstants(META)
    for _ in range(2):
        with constants.learn():
            made = copy()
        assert made.device == META
        assert (made.shape, made.dtype) == ((2,), torch.float32)
    assert constants.are_known
    (kept,) = constants._learnt[0]
    assert kept.tolist() == [1.0, 2.0]
    with constants.replace():
        replaced = copy()
    assert (replaced.device, replaced.shape, replaced.dtype) == (META, made.shape, made.dtype)
    assert not constants.have_changed()


@pytest.mark.parametrize("index", [[2, 0], np.array([2, 0]), torch.tensor([2, 0])])
def test_lists_arrays_and_tensors_as_indices_are_seen(index):
    constants = HostConstants(META)
    with constants.learn():
        assert ROW[..., index].shape == (4, 2)
        assert ROW[index].shape == (2, 3)
        torch.zeros(4, 3, device=META)[index] = torch.ones(2, 3)
    kept = [each.tolist() for each in constants._learnt[0]]
    assert kept == [[2, 0], [2, 0], [[1.0] * 3] * 2, [2, 0]]  # of an assignment, the value first


def test_what_stays_where_it_is_is_no_copy():
    constants = HostConstants(META)
    with constants.learn():
        torch.tensor([1.0])
        torch.tensor([1.0]).to(torch.float64)
        ROW.to("meta")
        torch.as_tensor(ROW, device=META)
        ROW[0], ROW[:, None], ROW[torch.tensor(1)]
        ROW[0] = 1.0
        torch.ones(2)[[0, 1]]
    assert constants._learnt == [[]]
    with constants.learn():
        pass
    assert not constants.are_known


def test_other_numbers_at_each_step_are_not_taken():
    constants = HostConstants(META)
    for number in range(2):
        with constants.learn():
            torch.tensor([float(number)], device=META)
    assert not constants.are_known


def test_numbers_that_change_during_the_capture_end_it():
    constants = HostConstants(META)
    for _ in range(2):
        with constants.learn():
            torch.tensor([1.0], device=META)
    with constants.replace(), pytest.raises(RuntimeError, match="other numbers from the host"):
        torch.tensor([2.0], device=META)
    with constants.replace():
        torch.tensor([1.0], device=META)
        with pytest.raises(RuntimeError, match="other numbers from the host"):
            torch.tensor([1.0], device=META)


def test_a_tensor_that_is_kept_on_the_host_is_watched():
    constants, mean = HostConstants(META), torch.tensor([1.0, 2.0])
    for _ in range(2):
        with constants.learn():
            mean.to(META)
    with constants.replace():
        mean.to(META)
    assert not constants.have_changed()
    mean[0] = 5.0
    assert constants.have_changed()


def test_large_tensors_are_not_kept(monkeypatch):
    monkeypatch.setattr("stoker.train.graphs.host_constants._MOST_BYTES", 1000)
    constants = HostConstants(META)
    for _ in range(2):
        with constants.learn():
            torch.zeros(1000).to(META)
    assert not constants.are_known
    assert constants._learnt == [[], []]


class Habits(nn.Module):
    """Numbers from the host as people write them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.mean = torch.linspace(0, 1, 6)  # no buffer: it stays on the host
        self.num_steps = 0

    def forward(self, x):
        x = x - self.mean.to(x.device)
        x = torch.where(x > 0, x, torch.tensor(0.01, device=x.device))
        return self.body(x @ torch.eye(6).to(x))[:, [2, 0, 1]]


def class_weights(device):
    return torch.tensor([1.0, 2.0, 3.0], device=device)


def train(change=None, is_captured=True):
    torch.manual_seed(0)
    model = Habits().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [(torch.randn(8, 6).cuda(), torch.randint(0, 3, (8,)).cuda()) for _ in range(24)]

    def step(batch):
        loss = cross_entropy(model(batch[0]), batch[1], weight=class_weights(batch[0].device))
        if change == "every step":
            model.num_steps += 1
            loss = loss * torch.tensor(float(model.num_steps), device=loss.device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = stoker.capture(step, model=model, optimizer=optimizer) if is_captured else step
    losses = []
    for number, batch in enumerate(batches):
        if number == 18 and change == "in place":
            model.mean.mul_(3.0)
        if number == 18 and change == "another":
            model.mean = model.mean * 3.0
        losses.append(run(batch))
    return torch.stack(losses), getattr(run, "reason", "")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize("change", [None, "in place", "another", "every step"])
def test_a_step_that_copies_numbers_from_the_host_is_the_plain_step(change):
    plain, _ = train(change, is_captured=False)
    captured, reason = train(change)
    torch.testing.assert_close(captured, plain, rtol=1e-4, atol=1e-5)
    assert reason.startswith("eager" if change == "every step" else "captured"), reason


def test_compiled_code_is_run_as_it_was_written():
    @torch.compile(backend="eager", fullgraph=True)
    def scaled(x):
        return x * torch.tensor([1.0, 2.0, 3.0])

    constants = HostConstants(torch.device("cpu"))
    for _ in range(2):
        with constants.learn():
            scaled(torch.ones(3))
    assert constants.are_known
    with constants.replace():
        assert scaled(torch.ones(3)).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_networks_are_told_apart(compiled):
    inner = nn.Linear(2, 2)
    model = nn.Sequential(torch.compile(inner, backend="eager") if compiled else inner)
    assert are_compiled([model]) is compiled
    if compiled:
        inner.compile(backend="eager")
        assert are_compiled([inner])
