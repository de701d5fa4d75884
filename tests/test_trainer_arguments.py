"""What people type first at a `Trainer` and at `fit`: refused by name, with what works when it is typed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.errors import InputError
from stoker.train.arguments import ARGUMENTS, check_arguments, check_fit
from stoker.train.trainer import Trainer


def make(**others):
    data = {"features": np.ones((40, 3), "f4"), "targets": np.ones((40, 1), "f4")}
    model = nn.Linear(3, 1)
    given = {
        "optimizer": torch.optim.SGD(model.parameters(), 1e-2),
        "criterion": nn.MSELoss(),
    } | others
    return Trainer(model, stoker.Loader(data, 10, "cpu"), device="cpu", **given)


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({"epochs": 3}, {"config": {"epochs": 3}}),
        ({"max_epochs": 2}, {"config": {"epochs": 2}}),
        ({"max_steps": 2}, {"config": {"max_steps": 2}}),
        ({"use_amp": False}, {"config": {"use_amp": False}}),
        ({"mixed_precision": "bf16"}, {"config": {"precision": "bf16"}}),
        ({"grad_clip": 1.0}, {"config": {"clip_norm": 1.0}}),
    ],
)
def test_settings_are_answered_with_the_config_that_takes_them(given, typed):
    with pytest.raises(InputError) as caught:
        make(**given)
    assert eval(f"dict({caught.value.fix})") == typed
    (name, value), = typed["config"].items()  # fmt: skip
    assert name == "use_amp" or getattr(make(**typed).settings, name) == value
    with pytest.raises(InputError) as caught:
        make().fit(**given)
    assert caught.value.fix == f"Trainer(..., config={typed['config']}), then fit()"


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({"loss_fn": nn.MSELoss()}, "criterion=..."),
        ({"train_dataloader": []}, "train_loader=..."),
        ({"output_dir": "runs"}, "run_dir='runs'"),
        ({"shceduler": None}, "scheduler=None"),
        ({"lr": 0.1}, "optimizer=torch.optim.AdamW(model.parameters(), lr=0.1)"),
        ({"learning_rate": 0.1}, "optimizer=torch.optim.AdamW(model.parameters(), lr=0.1)"),
        ({"batch_size": 8}, "train_loader=stoker.Loader(store, batch_size=8)"),
        ({"callbacks": []}, "leave callbacks out"),
    ],
)
def test_other_names_are_answered_with_ours(given, typed):
    with pytest.raises(InputError) as caught:
        make(**given)
    assert caught.value.fix == typed
    name = typed.partition("=")[0]
    assert name in ARGUMENTS or typed.startswith("leave ")


@pytest.mark.parametrize("given", [5, [], nn.Linear(2, 2)])
def test_fit_takes_nothing_by_place(given):
    with pytest.raises(InputError, match=re.escape("fit was given")) as caught:
        make().fit(given)
    assert ("epochs': 5" in caught.value.fix) == (given == 5)


def test_fit_names_the_argument_of_the_trainer_or_leaves_it_out():
    with pytest.raises(InputError) as caught:
        check_fit((), {"val_dataloaders": []})
    assert caught.value.fix == "Trainer(..., val_loader=...), then fit()"
    with pytest.raises(InputError) as caught:
        check_fit((), {"verbose": 1})
    assert caught.value.fix == "leave verbose out"
    check_fit((), {})
    check_arguments({})


def test_names_of_other_trainers_are_no_attributes_and_say_what_is():
    trainer = make()
    for name, instead in (("train", "fit()"), ("evaluate", "validate()"), ("predict", "model")):
        assert not hasattr(trainer, name)
        with pytest.raises(AttributeError, match=re.escape(instead)):
            getattr(trainer, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = trainer.nothing


def test_the_arguments_are_those_of_the_trainer():
    signature = list(Trainer.__init__.__annotations__)
    assert [name for name in signature if name not in ("others", "return")] == [*ARGUMENTS]


def test_what_a_prompt_shows_is_short():
    trainer = make()
    assert repr(trainer) == "Trainer(Linear on cpu, 0 of 1 epochs)"
    history = trainer.fit(quiet=True)
    assert repr(history).startswith("History(epochs 1, loss ")
    assert len(repr(history)) < 100
    assert "<table>" in history._repr_html_()

    def step(batch):
        trainer.optimizer.zero_grad()
        loss = trainer.model(batch).mean()
        loss.backward()
        trainer.optimizer.step()
        return loss

    captured = stoker.capture(step, model=trainer.model, optimizer=trainer.optimizer)
    assert "step, eager: there are no CUDA graphs on the CPU" in repr(captured)
