"""Schedulers of anybody's script: by epochs as the script steps them, or refused before the rates go wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from stoker import Trainer
from stoker.errors import InputError
from stoker.train import schedule
from stoker.train.settings import TrainSettings

pytestmark = pytest.mark.usefixtures("one_thread")
torch.manual_seed(0)
ROWS, TARGETS = torch.randn(60, 6), torch.randn(60, 1)
PAIRS = [(ROWS[at : at + 10], TARGETS[at : at + 10]) for at in range(0, 50, 10)]
HELD_OUT = [(ROWS[50:], TARGETS[50:])]

BY_EPOCHS = {
    "StepLR(1, 0.1)": lambda to: schedules.StepLR(to, 1, 0.1),
    "StepLR(2, 0.01)": lambda to: schedules.StepLR(to, 2, 0.01),
    "ExponentialLR": lambda to: schedules.ExponentialLR(to, 0.3),
    "MultiStepLR": lambda to: schedules.MultiStepLR(to, [2, 3]),
    "CosineAnnealingLR": lambda to: schedules.CosineAnnealingLR(to, 4),
    "PolynomialLR": lambda to: schedules.PolynomialLR(to, 4),
    "warm restarts": lambda to: schedules.CosineAnnealingWarmRestarts(to, 2),
    "warm-up, then cosine": lambda to: schedules.SequentialLR(
        to, [schedules.LinearLR(to, 0.5, total_iters=1), schedules.CosineAnnealingLR(to, 3)], [1]
    ),
    "a function": lambda to: schedules.LambdaLR(to, lambda epoch: max(0.0, 1 - epoch / 4)),
}
BY_UPDATES = {
    "StepLR": lambda to: schedules.StepLR(to, 8, 0.5),
    "ExponentialLR": lambda to: schedules.ExponentialLR(to, 0.9),
    "CosineAnnealingLR": lambda to: schedules.CosineAnnealingLR(to, 20),
    "OneCycleLR": lambda to: schedules.OneCycleLR(to, 0.1, 20),
    "warm-up": lambda to: schedules.LinearLR(to, 0.5, total_iters=3),
    "a function": lambda to: schedules.LambdaLR(to, lambda step: 1 - step / 20),
    "one that fails": lambda to: schedules.LambdaLR(to, {0: 1.0}.__getitem__),
}


def choose_interval(scheduler, given, epochs, updates, monitor="loss"):
    settings = TrainSettings(epochs=epochs, monitor=monitor)
    return schedule.choose_interval(scheduler, given, settings, updates, has_validation=False)


def optimizer_of(model=None):
    parameters = [nn.Parameter(torch.ones(1))] if model is None else model.parameters()
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", BY_EPOCHS)
def test_a_schedule_that_counts_epochs_is_not_stepped_by_updates_unasked(name):
    scheduler = BY_EPOCHS[name](optimizer_of())
    with pytest.raises(InputError, match=r"5 times an epoch") as caught:
        choose_interval(scheduler, None, 4, 5)
    assert caught.value.fix == "scheduler_interval='epoch'"
    for given in ("update", "epoch"):
        assert choose_interval(scheduler, given, 4, 5) == given
    # One update an epoch is the same by both, and one epoch, or an unknown number of updates, tells nothing.
    assert choose_interval(scheduler, None, 4, 1) == "update"
    assert choose_interval(scheduler, None, 1, 5) == "update"
    assert choose_interval(scheduler, None, 4, None) == "update"


@pytest.mark.parametrize("name", BY_UPDATES)
def test_a_schedule_that_counts_updates_goes_through(name):
    assert choose_interval(BY_UPDATES[name](optimizer_of()), None, 4, 5) == "update"


def plain_loop(model, make, epochs=4):
    optimizer = optimizer_of(model)
    scheduler, rates = make(optimizer), []
    for _ in range(epochs):
        for rows, targets in PAIRS:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(rows), targets).backward()
            optimizer.step()
        with torch.no_grad():
            metric = nn.functional.mse_loss(model(HELD_OUT[0][0]), HELD_OUT[0][1]).item()
        scheduler.step(*([metric] if isinstance(scheduler, schedules.ReduceLROnPlateau) else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def trainer_of(model, make, run_dir=None, epochs=4, **more):
    optimizer = optimizer_of(model)
    given = {"epochs": epochs, "clip_norm": None}
    return Trainer(
        model, PAIRS, HELD_OUT, nn.functional.mse_loss, optimizer, make(optimizer), given, "cpu",
        run_dir=run_dir, **more,
    )  # fmt: skip


def plateau(optimizer):
    return schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


@pytest.mark.parametrize("name", [*BY_EPOCHS, "plateau"])
def test_by_epochs_a_trainer_has_the_weights_of_the_plain_loop(name):
    make, more = BY_EPOCHS.get(name, plateau), {"scheduler_interval": "epoch"}
    torch.manual_seed(1)
    plain = nn.Linear(6, 1)
    model = copy.deepcopy(plain)
    rates = plain_loop(plain, make)
    trainer = trainer_of(model, make, **({} if name == "plateau" else more))
    trainer.fit(quiet=True)
    assert float(trainer.optimizer.param_groups[0]["lr"]) == pytest.approx(rates[-1])
    assert len({0.1, *rates}) > 1, "the schedule did nothing"
    torch.testing.assert_close(model.weight, plain.weight)
    assert any("after every epoch" in note for note in trainer.history.notes)


@pytest.mark.parametrize("make", [BY_EPOCHS["StepLR(1, 0.1)"], plateau])
def test_a_resumed_run_goes_on_with_its_schedule(tmp_path, make):
    def model():
        torch.manual_seed(1)
        return nn.Linear(6, 1)

    interval = {"scheduler_interval": "epoch"}
    unbroken, broken, rest = model(), model(), model()
    trainer_of(unbroken, make, **interval).fit(quiet=True)
    trainer_of(broken, make, tmp_path / "run", 2, **interval).fit(quiet=True)
    trainer_of(rest, make, tmp_path / "run", **interval).fit(quiet=True, resume=True)
    assert torch.equal(rest.weight, unbroken.weight)


def test_a_run_is_not_resumed_with_another_interval(tmp_path):
    make = BY_UPDATES["StepLR"]
    trainer_of(nn.Linear(6, 1), make, tmp_path / "run", 1).fit(quiet=True)
    other = trainer_of(nn.Linear(6, 1), make, tmp_path / "run", 2, scheduler_interval="epoch")
    with pytest.raises(InputError, match="StepLR by epochs"):
        other.fit(quiet=True, resume=True)


def test_a_metric_that_there_is_not_is_asked_for():
    optimizer = optimizer_of()
    with pytest.raises(InputError, match="needs 'metrics', which there is after an epoch only"):
        choose_interval(plateau(optimizer), "update", 4, 5)
    with pytest.raises(InputError, match="an epoch without validation has its loss only"):
        choose_interval(plateau(optimizer), None, 4, 5, "accuracy")
    with pytest.raises(InputError, match="train_epoch has no metric for ReduceLROnPlateau"):
        trainer_of(nn.Linear(6, 1), plateau).train_epoch()
