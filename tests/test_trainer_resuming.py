"""A run that goes on as if nothing had happened, also where it was cut in an odd place or went on to fail."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stoker.errors import InputError
from stoker.train.checkpoint import Checkpoints
from stoker.train.checks import check_reduction, check_skipping, check_steps
from stoker.train.trainer import Trainer
from test_trainer_edges import make
from training_makers import make_model, read_rows, weights, write_rows


class Flaky(TensorDataset):
    """Rows that cannot be read while `is_away`."""

    is_away = False

    def __getitem__(self, index):
        if self.is_away:
            raise OSError("NFS is away")
        return super().__getitem__(index)


@pytest.fixture
def path(tmp_path):
    return write_rows(tmp_path)


@pytest.fixture
def rows(path):
    return Flaky(*read_rows(path))


def saved(folder):
    kept = Checkpoints(folder)
    best = kept.best()
    return [(one.step, one.metrics) for one in kept.list()], best and best.step


# -- a resumed run that does nothing -----------------------------------------------------------------


def test_a_resumed_run_that_fails_before_its_first_step_changes_nothing(tmp_path, rows):
    loader = DataLoader(rows, 20)
    unbroken = make(None, loader, loader, epochs=4)
    unbroken.fit()
    run = {"run_dir": tmp_path / "run", "keep_last": 9}
    make(None, loader, loader, epochs=2, **run).fit()
    before = saved(run["run_dir"])
    assert len(before[0]) == 2
    rows.is_away = True
    for _ in range(3):  # as a machine that starts it again and again
        with pytest.raises(OSError, match="NFS is away"):
            make(None, loader, loader, epochs=4, **run).fit(resume=True)
    assert saved(run["run_dir"]) == before
    rows.is_away = False
    resumed = make(None, loader, loader, epochs=4, **run)
    history = resumed.fit(resume=True)
    assert [epoch.num_samples for epoch in history.epochs] == [203, 203]
    assert torch.equal(weights(resumed), weights(unbroken))


def test_a_signal_before_the_first_step_of_a_resumed_run_saves_nothing_anew(tmp_path, path):
    run = {"run_dir": tmp_path / "run", "keep_last": 9}
    make(path, epochs=2, **run).fit()
    before = saved(run["run_dir"])
    trainer = make(path, epochs=4, **run)
    resume = trainer.resume

    def resume_and_signal():
        found = resume()
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    trainer.resume = resume_and_signal
    assert trainer.fit(resume=True).ended == "terminated"
    assert saved(run["run_dir"]) == before


# -- where validation was cut ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["signal", "error"])
def test_a_validation_that_was_cut_has_drawn_nothing(tmp_path, rows, how):
    """A DataLoader draws a seed from torch's own generator whenever it is begun, shuffled or not."""

    class Judged(TensorDataset):
        def __getitem__(self, index):
            if self.is_cut and index == 30:
                if how == "error":
                    raise OSError("gone")
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__getitem__(index)

    def trainer(is_cut, run_dir=None):
        judged = Judged(*rows.tensors)
        judged.is_cut = is_cut
        train = DataLoader(rows, 20, shuffle=True)
        return make(None, train, DataLoader(judged, 20), run_dir=run_dir)

    whole = trainer(False)
    expected = whole.fit().losses
    first = trainer(True, tmp_path / "run")
    if how == "error":
        with pytest.raises(OSError, match="gone"):
            first.fit()
    else:
        assert first.fit().ended == "terminated"
    second = trainer(False, tmp_path / "run")
    second.fit(resume=True)
    assert first.history.losses + second.history.losses == expected
    assert torch.equal(weights(second), weights(whole))


# -- loaders that do not say their batch size --------------------------------------------------------


def test_a_list_of_batches_is_weighed_after_resuming_as_before(tmp_path, path):
    options = {"accumulation_steps": 3, "val": None}
    whole = make(path, **options)
    expected = whole.fit().losses
    first = make(path, epochs=1, run_dir=tmp_path / "run", **options)
    first.fit()
    second = make(path, run_dir=tmp_path / "run", **options)
    second.fit(resume=True)
    assert second._step.parts.nominal_batch == whole._step.parts.nominal_batch == 20
    assert first.history.losses + second.history.losses == expected


class Small(nn.Module):
    """Runs out of memory with more than four samples at once."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, x):
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return self.inner(x)


def test_memory_that_runs_out_after_resuming_is_survived_too(tmp_path, path):
    inputs, targets = read_rows(path)
    batches = [(inputs[at : at + 8], targets[at : at + 8]) for at in range(0, 64, 8)]

    def trainer(epochs):
        model = Small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        config = {"epochs": epochs}
        given = (model, batches, None, nn.functional.mse_loss, optimizer, None, config, "cpu")
        return Trainer(*given, run_dir=tmp_path / "run")

    trainer(1).fit()
    assert trainer(2).fit(resume=True).ended == "done"


# -- what a checkpoint holds -------------------------------------------------------------------------


class Normalised(nn.Module):
    """A loss that depends on the losses before it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs, targets):
        loss = nn.functional.mse_loss(outputs, targets)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean


def test_the_criterions_own_state_goes_on(tmp_path, path):
    whole = make(path, val=None, criterion=Normalised())
    expected = whole.fit().losses
    first = make(path, val=None, criterion=Normalised(), epochs=1, run_dir=tmp_path / "run")
    first.fit()
    second = make(path, val=None, criterion=Normalised(), run_dir=tmp_path / "run")
    second.fit(resume=True)
    assert first.history.losses + second.history.losses == expected


def test_another_criterion_is_refused_in_words(tmp_path, path):
    make(path, val=None, criterion=Normalised(), epochs=1, run_dir=tmp_path / "run").fit()
    second = make(path, val=None, criterion=nn.MSELoss(), run_dir=tmp_path / "run")
    with pytest.raises(InputError, match="criterion kept mean; MSELoss keeps nothing"):
        second.fit(resume=True)


@pytest.mark.parametrize("every_steps", [0, 11])  # 11: also at the last batch, not judged yet
def test_the_last_epoch_is_saved_whatever_the_interval(tmp_path, path, every_steps):
    options = {"checkpoint_every_epochs": 2, "checkpoint_every_steps": every_steps, "keep_last": 9}
    trainer = make(path, run_dir=tmp_path / "run", **options)
    history = trainer.fit()
    kept, best = saved(tmp_path / "run")
    assert kept[-1] == (33, pytest.approx(history.epochs[-1].metrics))
    losses = {22: history.epochs[1].metrics["loss"], 33: history.epochs[2].metrics["loss"]}
    assert best == min(losses, key=losses.__getitem__)


# -- what cannot be trained --------------------------------------------------------------------------


def test_steps_that_need_more_than_there_is_are_refused_at_once():
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    check_steps(plain)
    with pytest.raises(InputError, match=r"LBFGS\.step needs 'closure'"):
        check_steps(torch.optim.LBFGS(model.parameters()))


def test_a_loss_that_sums_is_not_averaged_over_batches():
    assert check_reduction(torch.nn.functional.mse_loss, 4) == []
    assert check_reduction(torch.nn.MSELoss(), 4) == []
    sums = torch.nn.MSELoss(reduction="sum")
    assert "the gradients grow with the batch size" in check_reduction(sums, 1)[0]
    with pytest.raises(InputError, match="an update is made of 4 batches"):
        check_reduction(sums, 4)


def test_an_update_that_cannot_be_left_out_on_a_gpu_is_not_promised_to_be(path, monkeypatch):
    step = make(path)._step
    check_skipping(step, "skip")  # a CPU looks first
    monkeypatch.setattr(step.parts, "device", torch.device("cuda"))
    check_skipping(step, "skip")  # AdamW runs fused
    monkeypatch.setattr(step, "guarded", False)
    check_skipping(step, "rollback")
    with pytest.raises(InputError, match="AdamW on a GPU cannot leave an update out"):
        check_skipping(step, "skip")


def test_a_metric_that_nothing_measures_is_told(path):
    told = make(path, val=None, monitor="accuracy").history.notes
    assert any("without validation there is no 'accuracy'" in note for note in told)


# -- memory that runs out in the update --------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_memory_that_runs_out_in_a_later_group_changes_no_weight_twice(path, monkeypatch, kind):
    inputs, targets = read_rows(path)
    batches = [(inputs[at : at + 8], targets[at : at + 8]) for at in range(0, 64, 8)]

    def run(fails_at):
        model = make_model()
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        optimizer = kind(groups, lr=0.05)
        config = {"epochs": 1, "precision": "fp32"}
        trainer = Trainer(
            model, batches, None, nn.functional.mse_loss, optimizer, None, config, "cpu"
        )
        made, zeros = [0], torch.zeros_like

        def run_out(*given, **options):
            made[0] += 1
            if made[0] == fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return zeros(*given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros_like", run_out)
            history = trainer.fit()
        assert made[0] >= 8
        return history, weights(trainer)

    expected = run(None)
    for fails_at in (1, 3, 5, 8):
        history, found = run(fails_at)
        assert any("memory ran out" in note for note in history.notes)
        assert history.losses == pytest.approx(expected[0].losses, rel=1e-5)
        torch.testing.assert_close(found, expected[1], rtol=1e-4, atol=1e-6)
