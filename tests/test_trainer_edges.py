"""Where an epoch is cut, empty, or judged by nothing: the trainer says so, and counts it once."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace

import h5py
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.recipes.tabular.recipe import TabularRecipe
from stoker.report import read_run_log
from stoker.store.reader import open_store
from stoker.train.checkpoint import Checkpoints, load_checkpoint
from stoker.train.settings import TrainSettings
from stoker.train.trainer import Trainer
from training_makers import make_model, make_trainer, read_rows, weights, write_dirty, write_rows

EPOCHS = 3
BATCHES = 11


@pytest.fixture
def path(tmp_path):
    return write_rows(tmp_path)


def make_loader(path, kind):
    if kind == "stoker":
        return Loader(path, 20, "cpu", order="shuffled", seed=1)
    inputs, targets = read_rows(path)
    if kind == "torch":
        return DataLoader(TensorDataset(inputs, targets), 20, shuffle=True)
    return [(inputs[at : at + 20], targets[at : at + 20]) for at in range(0, 203, 20)]


def make(path, kind="list", val="list", criterion=nn.functional.mse_loss, run_dir=None, **options):
    model = make_model(0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train = make_loader(path, kind) if isinstance(kind, str) else kind
    judged = make_loader(path, val) if isinstance(val, str) else val
    config = {"epochs": EPOCHS, "read_every": 7, "seed": 5, **options}
    return Trainer(model, train, judged, criterion, optimizer, None, config, "cpu", run_dir=run_dir)


class KilledError(BaseException):
    """As a kill: nothing is saved on the way out."""


def kill_at(trainer, epoch, position):
    """Let the run die after a batch, or in validation behind the last one."""
    after, validate = trainer._after_batch, trainer.validate

    def die_after(at):
        after(at)
        if (trainer._at.epoch, at) == (epoch, position):
            raise KilledError

    def die_in_validation():
        if trainer._at.epoch == epoch and position > BATCHES:
            raise KilledError
        return validate()

    trainer._after_batch, trainer.validate = die_after, die_in_validation
    trainer._keep_what_was_done = lambda *_: None
    with pytest.raises(KilledError):
        trainer.fit()


def epoch_events(run):
    lines = [line.values for line in read_run_log(run / "run.jsonl") if line.event == "epoch"]
    return [(values["epoch"], values["train_loss"], values["num_samples"]) for values in lines]


# -- an epoch in two processes -------------------------------------------------------------------


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["stoker", "torch", "list"])
@pytest.mark.parametrize("position", [1, 7, BATCHES, BATCHES + 1])
def test_the_epoch_of_a_killed_run_is_reported_as_that_of_the_unbroken_one(
    path, tmp_path, kind, position
):
    whole, run = tmp_path / "whole", tmp_path / "run"
    options = {"checkpoint_every_steps": 1}
    unbroken = make(path, kind, run_dir=whole, **options).fit()
    kill_at(make(path, kind, run_dir=run, **options), 1, position)
    rest = make(path, kind, run_dir=run, **options)
    resumed = rest.fit(resume=True)
    assert epoch_events(run) == epoch_events(whole)
    assert [report.metrics for report in resumed.epochs] == [
        report.metrics for report in unbroken.epochs[1:]
    ]
    assert all(0 < report.samples_per_second < 1e9 for report in resumed.epochs)
    assert all(report.num_samples == 203 for report in resumed.epochs)


def test_the_best_checkpoint_is_that_of_the_unbroken_run_where_training_decides_it(tmp_path):
    # The last batch of an epoch is easy: alone it would look like the best epoch of all.
    torch.manual_seed(0)
    inputs = torch.randn(80, 6)
    targets = inputs[:, :1].clone()
    targets[:70] *= 20
    batches = [(inputs[at : at + 10], targets[at : at + 10]) for at in range(0, 80, 10)]
    options = {"val": None, "checkpoint_every_steps": 1, "keep_last": 9}
    unbroken = make(None, batches, run_dir=tmp_path / "whole", **options)
    unbroken.fit()
    killed = make(None, batches, run_dir=tmp_path / "run", **options)
    kill_at(killed, 0, 7)
    make(None, batches, run_dir=tmp_path / "run", **options).fit(resume=True)
    best = [Checkpoints(tmp_path / name).best() for name in ("whole", "run")]
    assert best[0].step == best[1].step == 24
    assert best[0].metrics == best[1].metrics


def test_a_rollback_counts_the_epoch_anew(tmp_path):
    dirty = write_dirty(tmp_path, 150)
    history = make_trainer(dirty, order="sequential", nonfinite="rollback", read_every=1).fit()
    assert [report.num_samples for report in history.epochs] == [180, 180]


def test_a_checkpoint_from_before_there_was_a_tally_goes_on(path, tmp_path):
    trainer = make(path, run_dir=tmp_path / "run", epochs=1)
    trainer.fit()
    state = trainer.state_dict()
    state["tally"]["num_samples"] = 7
    trainer.load_state_dict(state)
    assert trainer._at.tally.num_samples == 7
    del state["tally"]
    trainer.load_state_dict(state)
    assert trainer._at.tally.num_samples == 0


# -- a signal in validation ----------------------------------------------------------------------


class Signalling(list):
    """Validation batches in which a signal comes."""

    def __init__(self, batches, number):
        super().__init__(batches)
        self.number, self.taken = number, []

    def __iter__(self):
        for at, batch in enumerate(super().__iter__()):
            self.taken.append(at)
            if at == 2 and len(self.taken) > len(self):  # the second epoch's validation
                os.kill(os.getpid(), self.number)
            yield batch


@pytest.mark.parametrize("kind", ["stoker", "torch", "list"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_validation_ends_between_its_batches_and_it_is_made_up_for(
    path, tmp_path, kind, number
):
    unbroken = make(path, kind)
    whole = unbroken.fit()
    val = Signalling(make_loader(path, "list"), number)
    first = make(path, kind, val, run_dir=tmp_path / "run")
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            first.fit()
    else:
        assert first.fit().ended == "terminated"
    assert val.taken == [*range(BATCHES), 0, 1, 2]
    assert len(first.history.epochs) == 1
    val.taken.clear()
    assert first.validate()["loss"] > 0  # what was asked of the run is not asked of a later call
    assert first.history.notes[-1] == "epoch 1 is trained; a resumed run validates it first"
    rest = make(path, kind, run_dir=tmp_path / "run")
    resumed = rest.fit(resume=True)
    assert resumed.losses == whole.losses[2 * BATCHES :]
    assert [(r.epoch, r.train_loss, r.metrics) for r in resumed.epochs] == [
        (r.epoch, r.train_loss, r.metrics) for r in whole.epochs[1:]
    ]
    assert torch.equal(weights(rest), weights(unbroken))


def test_an_error_in_validation_does_not_train_the_epoch_twice(path, tmp_path):
    whole = make(path).fit()

    def broken():
        raise OSError("the disk is gone")

    first = make(path, run_dir=tmp_path / "run")
    first.validate = broken
    with pytest.raises(OSError, match="disk is gone"):
        first.fit()
    rest = make(path, run_dir=tmp_path / "run").fit(resume=True)
    assert first.history.losses + rest.losses == whole.losses
    assert [r.train_loss for r in rest.epochs] == [r.train_loss for r in whole.epochs]


# -- loaders without a batch ---------------------------------------------------------------------


def test_validation_without_a_batch_is_refused(path, tmp_path):
    few = TensorDataset(torch.randn(5, 6), torch.randn(5, 1))
    empty = DataLoader(few, 32, drop_last=True)
    trainer = make(path, val=empty, run_dir=tmp_path / "run")
    words = r"validation loader yielded no batch in epoch 0(.|\n)*every epoch(.|\n)*drop_last=False"
    with pytest.raises(InputError, match=words):
        trainer.fit()
    assert not (tmp_path / "run" / "best.pt").exists()


def test_validation_batches_that_can_be_read_once_are_refused_in_the_second_epoch(path):
    once = (batch for batch in make_loader(path, "list"))
    with pytest.raises(InputError, match="validation loader yielded no batch in epoch 1"):
        make(path, val=once).fit()


@pytest.mark.parametrize("batches", [[], ()])
def test_training_without_a_batch_is_refused_and_leaves_the_folder_free(path, tmp_path, batches):
    with pytest.raises(InputError, match="training loader yielded no batch in epoch 0"):
        make(path, batches, run_dir=tmp_path / "run").fit()
    make(path, run_dir=tmp_path / "run").fit()


def test_training_batches_that_can_be_read_once_are_refused_in_the_second_epoch(path, tmp_path):
    once = (batch for batch in make_loader(path, "list"))
    words = r"training loader yielded no batch in epoch 1(.|\n)*a list or DataLoader"
    with pytest.raises(InputError, match=words):
        make(path, once, run_dir=tmp_path / "run").fit()
    assert [saved.epoch for saved in Checkpoints(tmp_path / "run").list()] == [1]


# -- what may change when a run goes on ----------------------------------------------------------

FREE = {
    "nonfinite": "skip", "read_every": 1, "tensorboard": True, "log_gpu_stats_every_n_batches": 1000,
    "empty_cache_every_n_epochs": 9, "empty_cache_every_n_batches": 900, "leak_bytes": 1 << 30,
    "survive_oom": False, "monitor": "loss", "maximise": True, "keep_last": 5, "epochs": EPOCHS,
}  # fmt: skip


def test_what_changes_no_weight_may_change_when_a_run_goes_on_and_is_noted(path, tmp_path):
    whole = make(path)
    whole.fit()
    make(path, run_dir=tmp_path / "run", epochs=2).fit()
    changed = {name: value for name, value in FREE.items() if name != "tensorboard"}
    rest = make(path, run_dir=tmp_path / "run", **changed)
    history = rest.fit(resume=True)
    assert torch.equal(weights(rest), weights(whole))
    before = TrainSettings(epochs=2, read_every=7).to_json()
    for name, value in changed.items():
        line = f"settings.{name}: {json.dumps(before[name])} in the checkpoint, {json.dumps(value)} now"
        assert (line in history.notes) == (value != before[name])


@pytest.mark.parametrize("name", ["nonfinite", "tensorboard", "survive_oom", "leak_bytes"])
def test_each_of_them_is_free(path, tmp_path, name):
    trainer = make(path, run_dir=tmp_path / "run", epochs=1)
    trainer.fit()
    trainer.settings = replace(trainer.settings, **{name: FREE[name]})
    assert trainer.resume()


def test_what_changes_the_weights_may_not(path, tmp_path):
    make(path, run_dir=tmp_path / "run", epochs=1).fit()
    with pytest.raises(
        InputError, match=r"settings\.gradient_accumulation_steps: 1 in the checkpoint, 2 now"
    ) as caught:
        make(path, run_dir=tmp_path / "run", accumulation_steps=2, nonfinite="skip").fit(
            resume=True
        )
    assert "nonfinite" not in str(caught.value)


def test_a_checkpoint_whose_identity_lacks_what_may_change_goes_on(path, tmp_path):
    trainer = make(path, run_dir=tmp_path / "run", epochs=1)
    trainer.fit()
    identity = trainer.identity
    for name in ("epochs", "keep_last", "checkpoint_every_epochs", "checkpoint_every_steps"):
        del identity["settings"][name]
    kept = Checkpoints(tmp_path / "run")
    kept.save(trainer.state_dict(), 99, 1, {}, identity)
    rest = make(path, run_dir=tmp_path / "run", epochs=2)
    assert len(rest.fit(resume=True).epochs) == 1
    assert not [note for note in rest.history.notes if "absent" in note]


# -- validation that judges nothing --------------------------------------------------------------


def test_a_validation_loss_that_is_not_finite_is_noted_once_with_its_sample(path, tmp_path):
    dirty = write_dirty(tmp_path, 77)
    with Loader(dirty, 20, "cpu") as val:
        history = make(path, "stoker", val, run_dir=tmp_path / "run").fit()
    (note,) = [note for note in history.notes if "validation loss" in note]
    assert note.startswith("the validation loss of epoch 0 is nan: ")
    assert "the loss of validation batch 3 is not finite. Its batch (samples 60, 61, 62" in note
    assert "features column 4 is nan in sample 77" in note
    assert "stoker inspect" in note
    assert len(history.epochs) == EPOCHS
    assert all(math.isnan(report.metrics["loss"]) for report in history.epochs)


def test_a_validation_loss_of_other_loaders_names_its_batch(path):
    batches = make_loader(path, "list")
    batches[4][0][0, 0] = math.nan
    history = make(path, val=batches).fit()
    assert any("the loss of validation batch 4 is" in note for note in history.notes)


def test_a_mistyped_monitor_is_refused_after_the_first_validation_and_can_be_corrected(
    path, tmp_path
):
    whole = make(path).fit()
    with pytest.raises(InputError, match=r"monitor is 'accuracy'(.|\n)*loss") as caught:
        make(path, run_dir=tmp_path / "run", monitor="accuracy").fit()
    assert caught.value.allowed == "loss"
    rest = make(path, run_dir=tmp_path / "run").fit(resume=True)
    assert [r.metrics for r in rest.epochs] == [r.metrics for r in whole.epochs]
    assert load_checkpoint(tmp_path / "run" / "best.pt").saved.metrics["loss"] > 0


# -- settings and criteria -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("clip_norm", "1.0", "a number above 0, or None"),
        ("clip_norm", True, "a number above 0, or None"),
        ("clip_norm", 0.0, "a number above 0, or None"),
        ("clip_norm", math.nan, "a number above 0, or None"),
        ("compile", "no", "True or False"),
        ("maximise", 1, "True or False"),
        ("survive_oom", None, "True or False"),
        ("monitor", 3, "text"),
        ("seed", 1.5, "a whole number, 0 or more, or None"),
        ("keep_last", 0, "a whole number from 1 to 10,000"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named(name, value, allowed):
    with pytest.raises(InputError) as caught:
        TrainSettings.of({name: value})
    assert caught.value.given == f"{name} is {value!r}."
    assert caught.value.allowed == allowed


def test_settings_of_the_right_kind_pass():
    given = {"clip_norm": 1, "compile": False, "seed": None, "monitor": "accuracy", "epochs": 0}
    assert TrainSettings.of(given).clip_norm == 1
    assert TrainSettings(clip_norm=None).clip_norm is None


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        (lambda outputs, targets: None, "the criterion returned None"),
        (nn.MSELoss(reduction="none"), r"the criterion returned a tensor of shape \(20, 1\)"),
        (lambda outputs, targets: (outputs - targets).square().mean().item(), "returned a float"),
    ],
)
def test_a_criterion_that_returns_no_scalar_is_refused(path, tmp_path, criterion, words):
    with pytest.raises(InputError, match=rf"{words}(.|\n)*mean loss of the batch: a scalar"):
        make(path, criterion=criterion, run_dir=tmp_path / "run").fit()
    assert not list((tmp_path / "run").glob("step-*.pt"))


def test_a_target_of_another_length_is_named_with_both_lengths(tmp_path):
    with h5py.File(tmp_path / "short.h5", "w") as file:
        file["features"] = torch.randn(60, 3).numpy()
        file["targets"] = torch.zeros(50, dtype=torch.int64).numpy()
    with (
        open_store(tmp_path / "short.h5") as store,
        pytest.raises(InputError, match="'targets' has 50 rows, not 60") as caught,
    ):
        TabularRecipe().make_job(store, {}, 0)
    assert "60 rows" in caught.value.allowed
