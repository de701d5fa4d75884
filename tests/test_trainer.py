"""The trainer: equal to a bare loop, equal after a resume, honest about what is wrong."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import warm_stoker
from stoker.augment import GPUAugmentation
from stoker.errors import CorruptError, InputError, StokerError
from stoker.loader.loader import Loader
from stoker.report import Silent, read_run_log
from stoker.store.fields import Dense
from stoker.train import checkpoint
from stoker.train.losses import NonFiniteError
from stoker.train.trainer import AUGMENTED, Trainer
from store_makers import write_store
from training_makers import DEVICES, make_model, make_trainer, weights, write_dirty, write_rows


class Says(Silent):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


@pytest.fixture
def path(tmp_path):
    return write_rows(tmp_path)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_equal_to_a_bare_loop_bit_for_bit(path, device, clip_norm):
    trainer = make_trainer(path, device, **({"clip_norm": clip_norm} if clip_norm else {}))
    history = trainer.fit()
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    losses = []
    with Loader(path, 20, device, order="shuffled", seed=1) as loader:
        for _ in range(2):
            for batch in loader:
                loss = nn.functional.mse_loss(model(batch["features"]), batch["targets"])
                loss.backward()
                if clip_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    if device == "cpu":
        assert history.losses == losses
    else:  # there the update divides by the norm as it reads a gradient, torch multiplies before
        assert history.losses == pytest.approx(losses, rel=1e-4)
    assert len(history.epochs) == 2
    assert history.epochs[0].num_samples == 203
    assert history.epochs[1].train_loss < history.epochs[0].train_loss


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_accumulation_equals_one_large_batch(path, device, steps):
    # 203 samples: the last window is short, and so is its last batch.
    small = make_trainer(path, device, 10, "sequential", accumulation_steps=steps, epochs=1)
    large = make_trainer(path, device, 10 * steps, "sequential", epochs=1)
    small.fit()
    large.fit()
    torch.testing.assert_close(weights(small), weights(large), rtol=1e-4, atol=1e-5)


def test_any_loader_works(path):
    data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randn(50, 1))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    history = Trainer(
        model, loader, loader, nn.functional.mse_loss, optimizer, None, {"epochs": 3}, "cpu"
    ).fit()
    assert [report.num_samples for report in history.epochs] == [50, 50, 50]
    assert history.epochs[2].metrics["loss"] < history.epochs[0].metrics["loss"]


def test_the_scheduler_steps_with_every_update(path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = Loader(path, 50, "cpu")
    settings = {"epochs": 1, "accumulation_steps": 2}
    Trainer(
        model, loader, None, nn.functional.mse_loss, optimizer, scheduler, settings, "cpu"
    ).fit()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(
        0.01 * 0.5**3
    )  # five batches: 2 + 2 + 1


# -- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 4])
def test_a_resumed_run_is_the_unbroken_run(path, tmp_path, every):
    whole = make_trainer(path, dropout=0.3, epochs=4)
    history = whole.fit()
    options = {"dropout": 0.3, "run_dir": tmp_path / "run", "checkpoint_every_steps": every}
    make_trainer(path, epochs=2, **options).fit()
    torch.manual_seed(99)
    rest = make_trainer(path, epochs=4, **options)
    second = rest.fit(resume=True)
    assert second.losses == history.losses[-len(second.losses) :]
    assert len(second.losses) == 2 * len(history.losses) // 4
    assert torch.equal(weights(rest), weights(whole))


SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
from pathlib import Path
from training_makers import make_trainer
trainer = make_trainer(Path({path!r}), dropout=0.3, epochs=400, run_dir={run!r},
                       checkpoint_every_steps=3, checkpoint_every_epochs=1)
history = trainer.fit(resume=True)
print(history.ended)
"""


def start(path, run, folder):
    script = folder / "train.py"
    code = SCRIPT.format(tests=str(Path(__file__).parent), path=str(path), run=str(run))
    script.write_text(textwrap.dedent(code))
    return warm_stoker.Started([], script=script, warned=["error"])


def wait_for_checkpoints(run, count=2, seconds=60):
    end = time.monotonic() + seconds
    while len(list(run.glob("step-*.pt"))) < count:
        assert time.monotonic() < end, "no checkpoint was written"
        time.sleep(0.02)


def test_kill_9_and_resume_gives_the_same_losses(path, tmp_path):
    run = tmp_path / "run"
    process = start(path, run, tmp_path)
    wait_for_checkpoints(run)
    process.kill()
    process.communicate()
    resumed = make_trainer(path, dropout=0.3, epochs=400, run_dir=run, checkpoint_every_steps=3)
    resumed.settings = type(resumed.settings)(**{**resumed.settings.to_json(), "epochs": 0})
    with pytest.MonkeyPatch.context():
        resumed.fit(resume=True)
    done = resumed._at.num_steps
    epochs = done // 11 + 2
    resumed = make_trainer(path, dropout=0.3, epochs=epochs, run_dir=run, checkpoint_every_steps=3)
    second = resumed.fit(resume=True)
    whole = make_trainer(path, dropout=0.3, epochs=epochs).fit()
    assert done > 0
    assert second.losses == whole.losses[-len(second.losses) :]
    assert len(whole.losses) - len(second.losses) == done


def test_sigterm_saves_and_ends_well(path, tmp_path):
    run = tmp_path / "run"
    process = start(path, run, tmp_path)
    wait_for_checkpoints(run)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    assert output.strip().splitlines()[-1] == "terminated"


def test_ctrl_c_saves_what_was_done(path, tmp_path):
    trainer = make_trainer(path, epochs=1000, run_dir=tmp_path / "run", checkpoint_every_epochs=0)
    before = signal.getsignal(signal.SIGINT)
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert len(list((tmp_path / "run").glob("step-*.pt"))) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_checkpoint_of_another_config_is_refused_with_the_difference(path, tmp_path):
    make_trainer(path, run_dir=tmp_path / "run").fit()
    other = make_trainer(path, run_dir=tmp_path / "run", clip_norm=2.0, epochs=3)
    with pytest.raises(InputError, match=r"clip_norm"):
        other.fit(resume=True)


def test_two_processes_cannot_share_a_run(path, tmp_path):
    process = start(path, tmp_path / "run", tmp_path)
    wait_for_checkpoints(tmp_path / "run")
    try:
        with pytest.raises(StokerError, match=f"process {process.pid}"):
            make_trainer(path, run_dir=tmp_path / "run").fit()
    finally:
        process.kill()
        process.communicate()


def test_the_run_log_tells_the_run(path, tmp_path):
    make_trainer(path, run_dir=tmp_path / "run").fit()
    lines = read_run_log(tmp_path / "run" / "run.jsonl")
    epochs = [line for line in lines if line.event == "epoch"]
    assert [line.epoch for line in epochs] == [1, 2]
    assert epochs[0].values["num_samples"] == 203
    assert any("precision fp32" in str(line.values) for line in lines if line.event == "note")


# -- what goes wrong -----------------------------------------------------------------------------


@pytest.fixture
def dirty(tmp_path):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 6)).astype("f4")
    features[77, 4] = np.nan
    with h5py.File(tmp_path / "dirty.h5", "w") as file:
        file["features"] = features
        file["targets"] = np.zeros((200, 1), "f4")
    return tmp_path / "dirty.h5"


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_value_is_named_with_its_sample_and_column(dirty, device):
    trainer = make_trainer(dirty, device)
    with pytest.raises(NonFiniteError, match=r"features column 4 is nan in sample 77") as caught:
        trainer.fit()
    assert torch.isfinite(weights(trainer)).all(), "the update was left out"
    with Loader(dirty, 20, "cpu", order="shuffled", seed=1) as loader:
        number = next(batch.step for batch in loader if 77 in batch.sample_ids)
    assert f"the loss of step {number} (epoch 0, batch {number}) is nan" in caught.value.given


def test_the_batch_that_is_named_is_counted_from_its_epochs_start(dirty, tmp_path):
    options = {"order": "sequential", "nonfinite": "skip", "run_dir": tmp_path / "run"}
    history = make_trainer(dirty, epochs=2, **options).fit()
    places = [note.partition(" is nan")[0] for note in history.notes if "is nan." in note]
    assert places == [f"the loss of step {e * 10 + 3} (epoch {e}, batch 3)" for e in (0, 1)]
    rest = make_trainer(dirty, epochs=3, **options).fit(resume=True)
    assert any("the loss of step 23 (epoch 2, batch 3)" in note for note in rest.notes)
    lines = read_run_log(tmp_path / "run" / "run.jsonl")
    told = [(line.step, line.values["message"]) for line in lines if line.event == "nonfinite"]
    assert [step for step, _ in told] == [3, 13, 23]
    assert all(f"the loss of step {step} " in message for step, message in told)


@pytest.mark.parametrize("device", DEVICES)
def test_skip_goes_on_without_the_update(dirty, device):
    trainer = make_trainer(dirty, device, nonfinite="skip")
    history = trainer.fit()
    assert sum(np.isnan(history.losses)) == 2
    assert torch.isfinite(weights(trainer)).all()
    assert any("left out" in note for note in history.notes)


def test_rollback_trains_as_if_the_batch_had_not_been_there(dirty):
    trainer = make_trainer(dirty, order="sequential", nonfinite="rollback", epochs=1)
    trainer.fit()
    assert torch.isfinite(weights(trainer)).all()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for number, batch in enumerate(Loader(dirty, 20, "cpu")):
        if number != 3:
            nn.functional.mse_loss(model(batch["features"]), batch["targets"]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(
        weights(trainer), torch.cat([p.detach().flatten() for p in model.parameters()])
    )


def test_a_model_that_diverges_is_not_blamed_on_the_data(path):
    trainer = make_trainer(path)
    trainer._step.parts.criterion = lambda outputs, targets: outputs.sum() * float("inf")
    with pytest.raises(NonFiniteError, match="holds finite values only"):
        trainer.fit()


def test_a_loader_that_raises_in_the_middle_keeps_its_error(path):
    class Broken:
        batch_size = 5

        def __len__(self):
            return 3

        def __iter__(self):
            yield torch.zeros(5, 6), torch.zeros(5, 1)
            raise OSError("the disk is gone")

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, Broken(), None, nn.functional.mse_loss, optimizer, None, None, "cpu")
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit()


def test_wrong_arguments_are_named(path):
    with pytest.raises(InputError, match="there is no training setting 'epoch'"):
        make_trainer(path, epoch=3)
    with pytest.raises(InputError, match=r"(?s)'output_dir'.*Try: run_dir='"):
        make_trainer(path, output_dir="runs/a")
    with pytest.raises(InputError, match="precision is 'fp8'"):
        make_trainer(path, precision="fp8")
    with pytest.raises(
        InputError, match="capture is 'on', but there are no CUDA graphs on the CPU"
    ):
        make_trainer(path, capture="on")
    other = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(InputError, match="not parameters of the model"):
        Trainer(
            make_model(),
            Loader(path, 5, "cpu"),
            None,
            nn.functional.mse_loss,
            other,
            None,
            None,
            "cpu",
        )
    detached = make_trainer(path)
    detached._step.parts.criterion = lambda outputs, targets: (
        torch.zeros((), requires_grad=True) + outputs.detach().sum()
    )
    with pytest.raises(InputError, match="no parameter has a gradient"):
        detached.fit()


# -- images --------------------------------------------------------------------------------------


def test_augmentation_is_announced_and_validation_is_never_augmented(tmp_path):
    rng = np.random.default_rng(0)
    store = write_store(
        tmp_path / "s",
        [
            {
                "images": Dense(rng.integers(0, 256, (16, 3, 8, 8), dtype=np.uint8)),
                "labels": Dense(rng.integers(0, 3, 16)),
            }
        ],
    )
    seen = {"train": [], "val": []}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(192, 3)

        def forward(self, images):
            seen["train" if self.training else "val"].append(images.detach().clone())
            return self.head(images.flatten(1))

    model, says = Net(), Says()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loaders = Loader(store, 16, "cpu"), Loader(store, 16, "cpu")
    Trainer(
        model,
        *loaders,
        nn.functional.cross_entropy,
        optimizer,
        None,
        {"epochs": 2},
        "cpu",
        GPUAugmentation(1.0, 90),
        progress=says,
    ).fit()
    plain = torch.from_numpy(store.gather("images", np.arange(16))) / 255
    assert f"{AUGMENTED}, on the CPU: the run has no GPU" in says.lines
    for images in seen["val"]:
        torch.testing.assert_close(images, plain)
    assert not torch.allclose(seen["train"][0], plain, atol=0.1)
    assert not torch.equal(seen["train"][0], seen["train"][1])


# -- found in review -----------------------------------------------------------------------------


def test_gradients_that_are_not_finite_are_told_although_losses_are(path):
    trainer = make_trainer(path)
    trainer._step.parts.criterion = lambda outputs, targets: ((outputs * 0).abs().sqrt()).sum()
    with pytest.raises(NonFiniteError, match="gradients of 11 updates of epoch 0 were not finite"):
        trainer.fit()


def test_no_checkpoint_is_written_behind_a_loss_that_is_not_finite(dirty, tmp_path):
    trainer = make_trainer(
        dirty, order="sequential", run_dir=tmp_path / "run", checkpoint_every_steps=2, read_every=50
    )
    with pytest.raises(NonFiniteError):
        trainer.fit()
    assert [path.name for path in (tmp_path / "run").glob("step-*.pt")] == ["step-000000002.pt"]


def test_rollback_ends_when_every_batch_is_bad(path):
    trainer = make_trainer(path, nonfinite="rollback", read_every=1)
    trainer._step.parts.criterion = lambda outputs, targets: outputs.sum() * float("nan")
    with pytest.raises(NonFiniteError):
        trainer.fit()


@pytest.mark.parametrize("at", [10, 11])
def test_a_signal_near_the_end_of_an_epoch_loses_and_repeats_nothing(path, tmp_path, at):
    whole = make_trainer(path, epochs=3).fit()
    first = make_trainer(path, epochs=3, run_dir=tmp_path / "run")
    original = first._after_batch

    def stop(position):
        original(position)
        if first._at.epoch == 1 and position == at:
            os.kill(os.getpid(), signal.SIGTERM)

    first._after_batch = stop
    begun = first.fit()
    assert begun.ended == "terminated"
    rest = make_trainer(path, epochs=3, run_dir=tmp_path / "run").fit(resume=True)
    assert begun.losses + rest.losses == whole.losses
    assert all(report.num_samples for report in rest.epochs)


def test_a_loader_that_raises_loses_no_step(path, tmp_path):
    broken = make_trainer(path, run_dir=tmp_path / "run", epochs=2)
    original = broken._after_batch

    def fail(position):
        original(position)
        if position == 5:
            raise OSError("the disk is gone")

    broken._after_batch = fail
    with pytest.raises(OSError, match="disk is gone"):
        broken.fit()
    rest = make_trainer(path, run_dir=tmp_path / "run", epochs=2).fit(resume=True)
    assert rest.losses == make_trainer(path, epochs=2).fit().losses[5:]


def test_long_runs_keep_the_losses_of_the_last_epochs(path, monkeypatch):
    every = make_trainer(path, epochs=4).fit().losses
    monkeypatch.setattr("stoker.train.history.LOSSES_KEPT", 7)
    assert make_trainer(path, epochs=4).fit().losses == every[-(len(every) // 4) - 7 :]


def test_a_used_folder_and_another_optimizer_are_refused(path, tmp_path):
    trainer = make_trainer(path, run_dir=tmp_path / "run", epochs=1)
    trainer.fit()
    with pytest.raises(InputError, match="already holds a run"):
        make_trainer(path, run_dir=tmp_path / "run", epochs=1).fit()
    model = make_model()
    other = Trainer(
        model,
        Loader(path, 20, "cpu", order="shuffled", seed=1),
        None,
        nn.functional.mse_loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        None,
        {"epochs": 2, "capture": "off", "precision": "fp32", "read_every": 7},
        "cpu",
        run_dir=tmp_path / "run",
    )
    with pytest.raises(InputError, match=r"optimizer.*AdamW.*SGD"):
        other.fit(resume=True)


def test_batches_without_a_known_size_or_number_go_through_whole(path):
    sizes = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, x):
            sizes.append(len(x))
            return self.net(x)

    data = torch.utils.data.TensorDataset(torch.randn(20, 6), torch.randn(20, 1))
    batches = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12]]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loader in (
        torch.utils.data.DataLoader(data, batch_sampler=batches),
        (data[rows] for rows in batches),
    ):
        sizes.clear()
        report = Trainer(model, loader, None, nn.functional.mse_loss, optimizer, device="cpu").fit()
        assert sizes == [5, 5, 3]
        assert report.epochs[0].num_samples == 13


def test_one_loader_for_both_is_refused(path):
    loader, model = Loader(path, 20, "cpu"), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="one Loader was given for training and for validation"):
        Trainer(model, loader, loader, nn.functional.mse_loss, optimizer, device="cpu")


# -- seeds, schedules, devices -------------------------------------------------------------------


def test_the_seed_decides_what_is_drawn_and_none_leaves_it_alone(path, tmp_path):
    def losses(before, **options):
        trainer = make_trainer(path, dropout=0.5, **options)
        torch.manual_seed(before)
        return trainer.fit().losses

    assert losses(1, seed=3) == losses(2, seed=3) != losses(1, seed=4)
    assert losses(1) == losses(1) != losses(2)
    options = {"seed": 3, "run_dir": tmp_path / "run"}
    first = losses(1, epochs=1, **options)
    rest = make_trainer(path, dropout=0.5, epochs=2, **options).fit(resume=True)
    assert first + rest.losses == losses(9, seed=3), "a resumed run is not seeded again"
    with pytest.raises(InputError, match=r"seed is -1[\s\S]*or None"):
        make_trainer(path, seed=-1)


def test_a_schedule_whose_first_update_is_left_out_raises_no_warning(tmp_path):
    path = write_dirty(tmp_path, 0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = Loader(path, 50, "cpu")
    config = {"nonfinite": "skip"}
    Trainer(model, loader, None, nn.functional.mse_loss, optimizer, scheduler, config, "cpu").fit()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01 * 0.5**4)


def test_a_criterion_goes_where_the_model_goes(path):
    class Weighted(nn.Module):
        moved_to = ()

        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.ones(1))

        def to(self, *args):
            self.moved_to = (*self.moved_to, *args)
            return super().to(*args)

        def forward(self, outputs, targets):
            return (self.weight * (outputs - targets).square()).mean()

    model, criterion = make_model(), Weighted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, Loader(path, 20, "cpu"), None, criterion, optimizer, device="cpu")
    assert criterion.moved_to == (torch.device("cpu"),)
    assert np.isfinite(trainer.fit().losses).all()


@pytest.mark.gpu
def test_a_weighted_criterion_made_on_the_cpu_works_on_a_gpu():
    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(5)]
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    history = Trainer(model, data, data, criterion, optimizer, device="cuda").fit()
    assert np.isfinite(history.losses).all()


def test_recurrent_weights_are_laid_together(path):
    calls = []

    class Watched(nn.LSTM):
        def flatten_parameters(self):
            calls.append(self)
            super().flatten_parameters()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Watched(6, 4)
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.cell(x[None])[0][0])

        def to(self, *args):  # moving lays them together too, where anything is moved
            return self

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls.clear()
    Trainer(model, Loader(path, 20, "cpu"), None, nn.functional.mse_loss, optimizer, device="cpu")
    assert calls == [model.cell]


# -- faults --------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_at_step_0_leaves_the_weights_as_they_were(tmp_path):
    path = write_dirty(tmp_path, 3)
    trainer = make_trainer(path, order="sequential", run_dir=tmp_path / "run", read_every=1)
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match=r"step 0 \(epoch 0, batch 0\).*column 4.*sample 3"):
        trainer.fit()
    assert torch.equal(weights(trainer), before)
    assert not list((tmp_path / "run").glob("step-*.pt"))


def test_a_model_on_the_wrong_device_is_a_clear_error(path):
    loader = Loader(path, 20, "cpu")
    loader.device = torch.device("cuda", 0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"batches are on cuda:0, the model is on cpu") as caught:
        Trainer(model, loader, None, nn.functional.mse_loss, optimizer, device="cpu")
    assert "device='cpu'" in caught.value.fix
    empty = make_model().to("meta")
    optimizer = torch.optim.SGD(empty.parameters(), lr=0.1)
    with pytest.raises(InputError, match="on the meta device: its parameters have no values"):
        Trainer(
            empty, Loader(path, 20, "cpu"), None, nn.functional.mse_loss, optimizer, device="cpu"
        )
    lazy = nn.LazyLinear(1)
    optimizer = torch.optim.SGD(lazy.parameters(), lr=0.1)
    with pytest.raises(InputError, match="lazy layers whose parameters have no shape"):
        Trainer(lazy, [], None, nn.functional.mse_loss, optimizer, device="cpu")


def test_a_full_disk_ends_with_its_error_and_the_older_checkpoint_goes_on(
    path, tmp_path, monkeypatch
):
    whole = make_trainer(path, epochs=3).fit()
    options = {"run_dir": tmp_path / "run", "epochs": 3}
    write_file, calls = checkpoint.write_file, []

    def full(*args):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write_file(*args)

    monkeypatch.setattr(checkpoint, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        make_trainer(path, **options).fit()
    monkeypatch.undo()
    assert [file.name for file in (tmp_path / "run").glob("step-*.pt")] == ["step-000000011.pt"]
    rest = make_trainer(path, **options).fit(resume=True)
    assert rest.losses == whole.losses[11:]


def test_a_truncated_checkpoint_is_named_and_the_one_before_goes_on(path, tmp_path):
    run = tmp_path / "run"
    make_trainer(path, run_dir=run, epochs=2).fit()
    last = run / "step-000000022.pt"
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(
        CorruptError, match=r"step-000000022\.pt is not a whole checkpoint"
    ) as caught:
        make_trainer(path, run_dir=run, epochs=3).fit(resume=True)
    assert "step-000000011.pt" in caught.value.fix
    last.unlink()
    rest = make_trainer(path, run_dir=run, epochs=3).fit(resume=True)
    assert rest.losses == make_trainer(path, epochs=3).fit().losses[11:]


@pytest.mark.parametrize("during", ["step", "save"])
def test_a_second_ctrl_c_ends_at_once_and_what_was_saved_goes_on(
    path, tmp_path, monkeypatch, during
):
    options = {"run_dir": tmp_path / "run", "epochs": 3, "checkpoint_every_steps": 4}
    trainer = make_trainer(path, **options)
    steps = []

    def interrupt():
        signal.raise_signal(signal.SIGINT)  # to this thread, whose handler has run when it returns

    forward = trainer.model.forward

    def pressed(x):
        steps.append(1)
        if len(steps) == 6:
            interrupt()
            if during == "step":
                interrupt()
                pytest.fail("the second one did not end the run")
        return forward(x)

    trainer.model.forward = pressed
    write_file = checkpoint.write_file

    def pressed_again(*args):
        if len(steps) >= 6:
            interrupt()
            pytest.fail("the second one did not end the run")
        return write_file(*args)

    if during == "save":
        monkeypatch.setattr(checkpoint, "write_file", pressed_again)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    assert [file.name for file in (tmp_path / "run").glob("step-*.pt")] == ["step-000000004.pt"]
    rest = make_trainer(path, **options).fit(resume=True)
    assert rest.losses == make_trainer(path, epochs=3).fit().losses[4:]


def test_a_batch_that_never_fits_is_not_in_what_was_saved_and_that_is_said(path, tmp_path):
    trainer = make_trainer(path, run_dir=tmp_path / "run")
    forward, steps = trainer.model.forward, []

    def fail(x):
        steps.append(1)
        if len(steps) >= 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(x)

    trainer.model.forward = fail
    with pytest.raises(InputError, match="memory ran out with 1 sample at once"):
        trainer.fit()
    assert [file.name for file in (tmp_path / "run").glob("step-*.pt")] == ["step-000000005.pt"]
    assert any(
        "batch 5 of epoch 0, in which the error was raised" in n for n in trainer.history.notes
    )


def test_the_cache_is_emptied_every_n_batches_and_epochs(path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    make_trainer(path, epochs=4).fit()
    assert not calls
    make_trainer(path, epochs=4, empty_cache_every_n_epochs=2).fit()
    assert len(calls) == 2
    make_trainer(path, epochs=2, empty_cache_every_n_batches=5).fit()  # 11 batches an epoch
    assert len(calls) == 2 + 4
