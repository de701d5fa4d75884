"""The Hugging Face Trainer with a stoker Loader: the losses of a plain loop, resumed runs included."""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from framework_makers import BATCH, RATE, docs_code, flat, makes, plain_losses, run_ranks, step_loss
from stoker.errors import InputError
from stoker.loader.loader import Loader
from training_makers import make_model, write_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    *(
        pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
        for name in ("transformers", "accelerate")
    ),
]
FIELDS = {"features": "input_values", "targets": "labels"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = make_model(dropout)
        self.inputs = []

    def forward(self, input_values, labels):
        self.inputs.append(input_values)
        logits = self.body(input_values)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


@cache
def training_class():
    """The Trainer under test; its import takes four seconds, which every collection would pay."""
    import transformers

    from stoker.frameworks.huggingface import StokerTrainerMixin

    class Training(StokerTrainerMixin, transformers.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.losses = []

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.losses.append(loss.item() * self.current_gradient_accumulation_steps)
            return loss

    return Training


def make_trainer(rows, folder, *, dropout=0.0, epochs=2, **options):
    accumulate = options.pop("accumulate", 1)
    loaders = {"train_loader": makes(rows, batch=None), "fields": FIELDS}
    loaders |= {name: options.pop(name) for name in ("eval_loader",) if name in options}
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "gradient_accumulation_steps": accumulate,
            "num_train_epochs": epochs,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "optim": "sgd",
            "optim_args": "momentum=0.9",
            "save_strategy": "no",
            "logging_steps": 1,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        },
    )
    torch.manual_seed(0)
    model = Net(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return training_class()(model, arguments, optimizers=(optimizer, schedule), **loaders)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_and_weights_are_those_of_a_plain_loop(rows, tmp_path, accumulate):
    trainer = make_trainer(rows, tmp_path, accumulate=accumulate, epochs=3)
    trainer.train()
    losses, weights = plain_losses(rows, epochs=3, accumulate=accumulate, counts_short_windows=True)
    assert trainer.losses == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(flat(trainer.model), weights)
    assert trainer.state.global_step == 3 * -(-11 // accumulate)
    assert trainer.state.epoch == 3
    trainer.close_loaders()


def test_nothing_is_copied_on_the_way_to_the_model(rows, tmp_path):
    trainer = make_trainer(rows, tmp_path, epochs=1)
    handed, loader = [], trainer.get_train_dataloader()
    hand_on = loader._handed_on

    def noting(batch):
        placed = hand_on(batch)
        handed.append(placed["input_values"])
        return placed

    loader._handed_on = noting
    trainer.train()
    assert len(handed) == len(trainer.model.inputs) == 11
    assert all(a is b for a, b in zip(handed, trainer.model.inputs, strict=True))
    assert trainer.num_examples(loader) == 203
    trainer.close_loaders()


@pytest.mark.parametrize(("accumulate", "cut"), [(1, 4), (2, 9), (1, 11)])
def test_a_resumed_run_is_the_unbroken_one(rows, tmp_path, accumulate, cut):
    """With dropout: the Trainer keeps the generators, and the loader draws nothing from them."""
    options = {
        "accumulate": accumulate,
        "dropout": 0.2,
        "save_strategy": "steps",
        "save_steps": cut,
    }
    whole = make_trainer(rows, tmp_path / "whole", **options)
    whole.train()
    resumed = make_trainer(rows, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{cut}"))
    updates = -(-11 // accumulate)
    done = cut // updates * 11 + cut % updates * accumulate
    assert resumed.losses == pytest.approx(whole.losses[done:], rel=1e-5)
    assert len(resumed.losses) == 22 - done
    torch.testing.assert_close(flat(resumed.model), flat(whole.model))
    assert resumed.state.global_step == whole.state.global_step
    assert resumed.state.epoch == pytest.approx(whole.state.epoch)


def test_ignore_data_skip_begins_the_epoch_anew_as_the_trainer_means_it(rows, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 15, "epochs": 2}
    make_trainer(rows, tmp_path, **options).train()
    resumed = make_trainer(rows, tmp_path, ignore_data_skip=True, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-15"))
    assert (
        len(resumed.losses) == 7
    )  # up to the 22 updates of the whole run, from the first batch on
    with makes(rows)(device="cpu") as loader:
        loader.set_epoch(1)
        first = next(iter(loader))["features"]
    assert torch.equal(resumed.model.inputs[0], first)


def test_evaluation_counts_every_sample_once(rows, tmp_path):
    evaluated = {
        "eval_loader": makes(rows, batch=None, order="sequential"),
        "eval_strategy": "epoch",
    }
    trainer = make_trainer(rows, tmp_path, **evaluated)
    trainer.train()
    reported = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    with makes(rows, batch=203, order="sequential")(device="cpu") as loader, torch.no_grad():
        batch = next(iter(loader))
        wanted = step_loss(trainer.model.body.eval(), batch["features"], batch["targets"]).item()
    assert len(reported) == 2
    assert reported[-1] == pytest.approx(wanted, rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    assert trainer.losses == pytest.approx(plain_losses(rows)[0], rel=1e-5)


def test_a_smaller_batch_makes_a_new_loader(rows, tmp_path):
    trainer = make_trainer(rows, tmp_path)
    first = trainer.get_train_dataloader()
    assert trainer.get_train_dataloader() is first
    trainer._train_batch_size = BATCH // 2  # as `auto_find_batch_size` does
    assert len(trainer.get_train_dataloader()) == 21
    with pytest.raises(InputError, match="closed"):
        next(iter(first))


def test_a_loader_that_decides_its_own_batch_size_is_refused_in_words(rows, tmp_path):
    trainer = make_trainer(rows, tmp_path)
    trainer._makes["train"] = lambda **given: Loader(rows, 20, **given)
    with pytest.raises(InputError, match="which TrainingArguments decide"):
        trainer.train()


def test_last_batches_that_could_not_be_gathered_are_refused(rows, tmp_path, monkeypatch):
    from transformers import TrainingArguments

    from stoker.frameworks import accelerate

    monkeypatch.setattr(accelerate, "check_share", lambda *_: None)  # one process stands for two
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    trainer = make_trainer(rows, tmp_path)
    trainer._makes["eval"] = partial(Loader, rows)
    with pytest.raises(InputError, match=r"203 samples to 2 processes(.|\n)*dataloader_drop_last"):
        trainer.get_eval_dataloader()
    trainer.args.dataloader_drop_last = True
    assert trainer.get_eval_dataloader().num_samples == 200
    trainer.close_loaders()


@pytest.mark.slow  # its loader is Accelerate's, whose two processes run in every `make test`
def test_two_processes_are_one_with_twice_the_batch(rows, tmp_path):
    ranks = run_ranks("huggingface", rows, tmp_path)
    wanted, weights = plain_losses(rows, batch=2 * BATCH, drop_last=True, momentum=0.0)
    for rank in ranks:
        assert rank["weights"] == pytest.approx(weights.tolist(), rel=1e-4, abs=1e-6)
    together = [sum(pair) / 2 for pair in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert together == pytest.approx(wanted, rel=1e-4)


def test_the_code_of_the_docs_runs(rows, tmp_path, monkeypatch):
    code, names = (
        docs_code("Hugging Face Trainer", rows, tmp_path, monkeypatch),
        {"__name__": "docs"},
    )
    exec(compile(code, "docs/frameworks.md", "exec"), names)
    assert names["trainer"].state.global_step == 22
