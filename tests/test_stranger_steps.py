"""Steps that people write for `stoker.capture`: each trains as without it, captured, or eager with the reason.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import stoker


class Loop:
    """A model, an optimizer and a loop over batches; `through` captures the step, or leaves it as it is."""

    def __init__(self, device, through, kind=torch.optim.SGD):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        self.optimizer = kind(self.model.parameters(), lr=0.05)
        features = torch.randn(40, 6).to(device)
        self.batches = [(x, x[:, :1] * 2) for x in features.split(8)] * 3
        self.through, self.device = through, device
        self.step = None

    def captured(self, step, *others):
        self.step = self.through(step, [self.model, *others], self.optimizer)
        return self.step

    def loss(self, batch):
        return mse_loss(self.model(batch[0]), batch[1])

    def update(self, batch):
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def accumulates_outside(loop):
    def passes(batch):
        loss = loop.loss(batch) / 2
        loss.backward()
        return loss.detach()

    step = loop.captured(passes)
    for number, batch in enumerate(loop.batches):
        step(batch)
        if number % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return []


def sharpness_aware(loop):
    parameters = list(loop.model.parameters())

    def step(batch):
        loss = loop.loss(batch)
        loss.backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in parameters]
            torch._foreach_add_(parameters, moves)
        loop.optimizer.zero_grad()
        loop.loss(batch).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss.detach()

    step = loop.captured(step)
    return [step(batch) for batch in loop.batches]


def averages_in_a_module(loop, given=False):
    average = copy.deepcopy(loop.model)

    def step(batch):
        loss = loop.update(batch)
        with torch.no_grad():
            for kept, now in zip(average.parameters(), loop.model.parameters(), strict=True):
                kept.lerp_(now, 0.1)
        return loss

    step = loop.captured(step, *([average] if given else []))
    losses = [step(batch) for batch in loop.batches]
    return [*losses, *(p.detach().sum() for p in average.parameters())]


def averages_in_a_given_module(loop):
    return averages_in_a_module(loop, given=True)


class Shadow:
    """The moving average that people write."""

    def __init__(self, model):
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter, 0.1)


def averages_in_an_object(loop):
    shadow = Shadow(loop.model)

    def step(batch):
        loss = loop.update(batch)
        shadow.update(loop.model)
        return loss

    step = loop.captured(step)
    losses = [step(batch) for batch in loop.batches]
    return [*losses, *(value.sum() for value in shadow.values.values())]


def keeps_a_running_mean(loop):
    mean = torch.zeros((), device=loop.device)

    def step(batch):
        nonlocal mean
        loss = loop.update(batch)
        mean = 0.9 * mean + 0.1 * loss
        return loss

    step = loop.captured(step)
    return [*(step(batch) for batch in loop.batches), mean]


def steps_its_scheduler(loop):
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, len(loop.batches))

    def step(batch):
        loss = loop.update(batch)
        scheduler.step()
        return loss

    step = loop.captured(step)
    return [step(batch) for batch in loop.batches]


def uses_a_target_network(loop):
    target = copy.deepcopy(loop.model)

    def step(batch):
        with torch.no_grad():
            wanted = batch[1] + 0.5 * target(batch[0])
        loss = mse_loss(loop.model(batch[0]), wanted)
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
        return loss.detach()

    step, losses = loop.captured(step), []
    for number, batch in enumerate(loop.batches):
        losses.append(step(batch))
        if number % 4 == 3:
            target.load_state_dict(loop.model.state_dict())
    return losses


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (accumulates_outside, "calls no optimizer.step()"),
        (sharpness_aware, "captured"),
        (averages_in_a_module, "the step changes average"),
        (averages_in_a_given_module, "captured"),
        (averages_in_an_object, "the step changes shadow"),
        (keeps_a_running_mean, "reads mean of the step before"),
        (steps_its_scheduler, "scheduler of step.last_epoch"),
        (uses_a_target_network, "captured"),
    ],
)
def test_it_is_the_loop_without_capture(device, write, reason):
    plain = Loop(device, lambda step, *_: step)
    expected = [float(value) for value in write(plain)]
    loop = Loop(
        device, lambda step, *given: stoker.capture(step, model=given[0], optimizer=given[1])
    )
    found = [float(value) for value in write(loop)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loop.weights(), plain.weights(), rtol=1e-3, atol=1e-5)
    assert reason in loop.step.reason


@pytest.mark.filterwarnings("ignore:stoker.capture")
def test_an_optimizer_with_a_closure_is_not_captured(device):
    def run(through):
        loop = Loop(device, through, torch.optim.LBFGS)

        def step(batch):
            def closure():
                loop.optimizer.zero_grad()
                loss = loop.loss(batch)
                loss.backward()
                return loss

            return loop.optimizer.step(closure)

        step = loop.captured(step)
        for batch in loop.batches[:6]:
            step(batch)
        return loop

    loop = run(lambda step, *given: stoker.capture(step, model=given[0], optimizer=given[1]))
    torch.testing.assert_close(loop.weights(), run(lambda step, *_: step).weights())
    assert "LBFGS runs its closure" in loop.step.reason


class Table(nn.Module):
    """An embedding with sparse gradients: torch's module, or the function alone."""

    def __init__(self, is_module):
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=is_module)
        self.out, self.is_module = nn.Linear(12, 1), is_module

    def forward(self, x):
        if self.is_module:
            return self.out(self.table(x).flatten(1))
        return self.out(nn.functional.embedding(x, self.table.weight, sparse=True).flatten(1))


@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_are_never_given_to_a_fused_optimizer(
    device, is_module, is_inside, momentum
):
    def train(through):
        torch.manual_seed(0)
        model = Table(is_module).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

        def step(batch):
            loss = mse_loss(model(batch[0]), batch[1])
            loss.backward()
            if is_inside:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        step = through(step, model, optimizer)
        for _ in range(10):
            batch = torch.randint(20, (8, 3)).to(device), torch.randn(8, 1).to(device)
            step(batch)
            if not is_inside:
                optimizer.step()
                optimizer.zero_grad()
        return model, step

    plain, _ = train(lambda step, *_: step)
    model, step = train(
        lambda step, *given: stoker.capture(step, model=given[0], optimizer=given[1])
    )
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    wanted = "sparse gradients" if is_module or is_inside else "calls no optimizer.step()"
    assert step.reason.startswith("eager: ")
    assert wanted in step.reason


def speaks(loop):
    """A loss over sequences whose lengths are on the device."""
    recurrent = nn.GRU(6, 8, batch_first=True).to(loop.device)
    loop.optimizer.add_param_group({"params": [*recurrent.parameters()]})
    wanted = torch.randint(1, 8, (8, 3), device=loop.device)
    lengths = torch.tensor([9, 8, 7, 9, 8, 7, 9, 9], device=loop.device)
    several = torch.tensor([3, 2, 1, 3, 2, 1, 3, 2], device=loop.device)

    def step(batch):
        spoken, _ = recurrent(batch[0][:, None] * torch.ones(1, 9, 1, device=loop.device))
        likely = spoken.log_softmax(-1).transpose(0, 1)
        loss = nn.functional.ctc_loss(likely, wanted, lengths, several, zero_infinity=True)
        loss = loss + 0 * loop.model(batch[0]).sum()
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
        return loss.detach()

    step = loop.captured(step, recurrent)
    return [step(batch) for batch in loop.batches]


def reads_packed_sequences(loop):
    recurrent = nn.GRU(6, 8, batch_first=True).to(loop.device)
    loop.optimizer.add_param_group({"params": [*recurrent.parameters()]})

    def step(batch):
        lengths = (batch[0][:, 0] > 0).long() + 1
        rows = batch[0][:, None].repeat(1, 2, 1)
        packed = nn.utils.rnn.pack_padded_sequence(
            rows, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        loss = mse_loss(loop.model[2](recurrent(packed)[1][-1]), batch[1])
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
        return loss.detach()

    step = loop.captured(step, recurrent)
    return [step(batch) for batch in loop.batches]


def selects_by_a_mask(loop):
    """Boxes of a detector: another number in every batch."""

    def step(batch):
        there = batch[0][:, 0] > 0
        return loop.update((batch[0][there], batch[1][there]))

    step = loop.captured(step)
    return [step(batch) for batch in loop.batches]


def reads_its_loss(loop):
    told = []

    def step(batch):
        loss = loop.update(batch)
        told.append(loss.item())
        return loss

    step = loop.captured(step)
    losses = [step(batch) for batch in loop.batches]
    assert told == pytest.approx([float(loss) for loss in losses])
    return losses


def skips_bad_batches(loop):
    def step(batch):
        loss = loop.loss(batch)
        if loss > 2.0:
            return loss.detach()
        return loop.update(batch)

    step = loop.captured(step)
    return [step(batch) for batch in loop.batches]


def keeps_a_queue_by_a_number(loop):
    queue = nn.Module().to(loop.device)
    queue.register_buffer("rows", torch.zeros(16, 6, device=loop.device))
    queue.register_buffer("place", torch.zeros(1, dtype=torch.long, device=loop.device))

    def step(batch):
        place = int(queue.place)
        loss = loop.update((batch[0] + queue.rows.mean(0), batch[1]))
        queue.rows[place : place + 8] = batch[0]
        queue.place[0] = (place + 8) % 16
        return loss

    step = loop.captured(step, queue)
    return [*(step(batch) for batch in loop.batches), queue.rows.sum()]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:stoker.capture")
@pytest.mark.parametrize(
    "write",
    [
        speaks,
        reads_packed_sequences,
        selects_by_a_mask,
        reads_its_loss,
        skips_bad_batches,
        keeps_a_queue_by_a_number,
    ],
)
def test_a_step_that_waits_for_the_device_is_the_loop_without_capture(write):
    """Graphs of paper go through what a real capture refuses."""
    plain = Loop("cuda", lambda step, *_: step)
    expected = [float(value) for value in write(plain)]
    loop = Loop(
        "cuda", lambda step, *given: stoker.capture(step, model=given[0], optimizer=given[1])
    )
    found = [float(value) for value in write(loop)]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(loop.weights(), plain.weights(), rtol=1e-3, atol=1e-4)
    if write is not speaks:  # cuDNN's own or torch's kernels, which may wait or not
        assert loop.step.reason.startswith("eager: "), loop.step.reason
