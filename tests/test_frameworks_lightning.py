"""Lightning with a stoker Loader: the losses of a plain torch loop, whatever Lightning does around them."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from framework_makers import BATCH, RATE, docs_code, flat, makes, plain_losses, run_ranks
from stoker.errors import InputError
from stoker.loader.batch import Batch
from stoker.loader.loader import Loader
from stoker.loader.prefetch import prefetch
from stoker.report import read_run_log
from training_makers import out_of_memory, write_linear, write_rows

# Filled in by `_lightning`.
pl: Any = None
frameworks: Any = None
MisconfigurationException: Any = None
Net: Any = None
Judged: Any = None
Dice: Any = None
Breaking: Any = None

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
    # Lightning's own, about DataLoaders and torch's pytrees.
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _lightning():
    """Import it when the first test runs: six seconds that every collection would pay."""
    import lightning_makers

    names = ("pl", "frameworks", "MisconfigurationException", "Net", "Judged", "Dice", "Breaking")
    globals().update({name: getattr(lightning_makers, name) for name in names})


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


def trainer(**options):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
    }
    return pl.Trainer(**{**quiet, **options})


def fit(rows, callbacks=(), model=None, data=None, ckpt=None, **options):
    torch.manual_seed(3)
    model = model or Net(options.pop("dropout", 0.0))
    ran = trainer(callbacks=list(callbacks), **options)
    torch.manual_seed(3)
    ran.fit(model, datamodule=data or frameworks.StokerData(makes(rows)), ckpt_path=ckpt)
    return model, ran


# -- the loader ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_and_weights_are_those_of_a_plain_loop(rows, accumulate):
    model, _ = fit(rows, max_epochs=3, accumulate_grad_batches=accumulate)
    losses, weights = plain_losses(rows, epochs=3, accumulate=accumulate)
    assert model.losses == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(flat(model.body), weights)


def test_a_loader_given_to_fit_is_taken_as_it_is(rows):
    with frameworks.adapt(makes(rows)(device="cpu")) as loader:
        model = Net()
        trainer().fit(model, loader)
        assert model.losses == pytest.approx(plain_losses(rows)[0], rel=1e-5)


def test_a_plain_loader_trains_every_epoch_and_callbacks_want_it_adapted(rows, tmp_path):
    with makes(rows)(device="cpu") as loader:
        model = Net()
        trainer(max_epochs=4).fit(model, loader)
        assert len(model.losses) == 44  # Lightning never asks behind the last batch of an epoch
    made = (
        frameworks.ScheduleCallback(),
        frameworks.TelemetryCallback(tmp_path),
        frameworks.DoctorCallback(),
        frameworks.OomLadderCallback(),
    )
    for callback in made:
        with (
            makes(rows)(device="cpu") as loader,
            pytest.raises(InputError, match=r"adapt\(loader\)"),
        ):
            trainer(callbacks=[callback]).fit(Net(), loader)


@pytest.mark.gpu
def test_on_a_gpu_too_and_nothing_is_copied_again(rows):
    model, ran = fit(rows, [frameworks.OomLadderCallback()], accelerator="gpu")
    assert model.losses == pytest.approx(plain_losses(rows)[0], rel=1e-3)
    assert {batch["features"].device for batch in model.batches} == {ran.strategy.root_device}
    assert all(isinstance(batch, Batch) and batch.step >= 0 for batch in model.batches)


def test_batches_are_neither_copied_nor_wrapped_again(rows):
    seen = {}

    class Noting(frameworks.StokerData):
        def train_dataloader(self):
            loader = super().train_dataloader()
            hand_on = loader._handed_on

            def noting(batch):
                placed = hand_on(batch)
                seen[placed.step] = placed
                return placed

            loader._handed_on = noting
            return loader

    model, _ = fit(rows, data=Noting(makes(rows)), max_epochs=1)
    assert [batch.step for batch in model.batches] == list(range(11))
    assert all(batch is seen[batch.step] for batch in model.batches)
    assert isinstance(model.batches[0], Batch)
    assert len(model.batches[0].sample_ids) == BATCH


def test_fewer_batches_than_an_epoch_has_still_begin_a_new_epoch_each(rows):
    model, _ = fit(rows, limit_train_batches=4, max_epochs=3)
    got = [batch.positions.tolist() for batch in model.batches]
    with makes(rows)(device="cpu") as loader:
        wanted = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            wanted += [b.positions.tolist() for b, _ in zip(loader, range(4), strict=False)]
    assert got == wanted


def test_validation_begins_anew_each_time(rows):
    data = frameworks.StokerData(makes(rows), val=makes(rows, order="sequential"))
    model, _ = fit(
        rows, model=Judged(), data=data, limit_val_batches=2, val_check_interval=5, max_epochs=1
    )
    assert model.steps == [0, 1, 0, 1, 0, 1]  # the sanity check, and after batches 5 and 10
    assert model.losses == pytest.approx(plain_losses(rows, epochs=1)[0], rel=1e-5)


@pytest.mark.parametrize("every", [4, 11, 15], ids=["in mid-epoch", "at its end", "in the second"])
def test_a_resumed_run_is_the_unbroken_one(rows, tmp_path, every):
    whole, _ = fit(rows, max_epochs=3, dropout=0.2)
    path = tmp_path / "cut.ckpt"
    with pytest.raises(ZeroDivisionError):
        fit(rows, [Dice(path, every), Breaking(every + 2)], max_epochs=3, dropout=0.2)
    resumed, _ = fit(rows, [Dice(path)], max_epochs=3, dropout=0.2, ckpt=path)
    assert resumed.losses == pytest.approx(whole.losses[every:], rel=1e-5)
    torch.testing.assert_close(flat(resumed.body), flat(whole.body))


def test_prefetch_around_a_data_loader_can_be_checkpointed(tmp_path):
    """It has no state of its own, and must not look as if it had."""
    data = DataLoader(TensorDataset(torch.randn(40, 6), torch.randn(40, 1)), batch_size=10)
    ran = trainer(max_epochs=1)
    ran.fit(Net(), prefetch(data, "cpu"))
    ran.save_checkpoint(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").exists()


def test_a_part_that_was_not_given_is_named(rows):
    data = frameworks.StokerData(makes(rows))
    with pytest.raises(InputError, match="no trainer yet"):
        data.train_dataloader()
    with pytest.raises(MisconfigurationException, match="val_dataloader"):
        trainer().validate(Judged(), datamodule=data)


@pytest.mark.slow  # each imports Lightning; Accelerate's two processes are in `make test`
def test_two_processes_share_the_epoch_and_resume_from_what_the_first_has_saved(rows, tmp_path):
    ranks = run_ranks("lightning", rows, tmp_path)
    whole = [rank["whole"] for rank in ranks]
    for epoch in (slice(0, 6), slice(6, 12)):
        assert sorted(n for rank in whole for batch in rank[epoch] for n in batch) == list(
            range(203)
        )
    for rank in ranks:
        assert rank["first"] + rank["rest"] == rank["whole"][:6]
    wanted, weights = plain_losses(rows, batch=2 * BATCH, drop_last=True, momentum=0.0)
    for rank in ranks:
        assert rank["weights"] == pytest.approx(weights.tolist(), rel=1e-4, abs=1e-6)
    together = [sum(pair) / 2 for pair in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert together == pytest.approx(wanted, rel=1e-4)


# -- callbacks -------------------------------------------------------------------------------------


def test_the_schedule_is_that_of_the_recipes(rows):
    from stoker.recipes.schedule import cosine_factor, lr_factor

    schedule = frameworks.ScheduleCallback(0.25, tuned_batch=BATCH // 2, rule="sqrt")
    model, _ = fit(rows, [schedule], accumulate_grad_batches=2)
    full = RATE * lr_factor(2 * BATCH, BATCH // 2, "sqrt")[0]
    rate = lambda update: full * cosine_factor(update, 12, 0.25)  # noqa: E731
    losses, weights = plain_losses(rows, accumulate=2, set_rate=rate)
    assert model.losses == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(flat(model.body), weights)
    assert "the sqrt rule for 40 samples per update against 10" in schedule.reason


def test_a_resumed_schedule_goes_on(rows, tmp_path):
    whole, _ = fit(rows, [frameworks.ScheduleCallback(0.3)], max_epochs=2)
    half, ran = fit(rows, [frameworks.ScheduleCallback(0.3, 22)], max_epochs=1)
    ran.save_checkpoint(tmp_path / "half.ckpt")
    rest, _ = fit(
        rows, [frameworks.ScheduleCallback(0.3)], max_epochs=2, ckpt=tmp_path / "half.ckpt"
    )
    assert half.rates + rest.rates == pytest.approx(whole.rates)


def test_two_schedules_are_refused(rows):
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    with pytest.raises(InputError, match="one of them"):
        fit(rows, [frameworks.ScheduleCallback()], model=Scheduled())


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_share": 1.0},
        {"num_updates": 0},
        {"tuned_batch": -1},
        {"tuned_batch": 20, "batch_size": 0},
        {"tuned_batch": 20, "rule": "quadratic"},
    ],
)
def test_a_schedule_that_cannot_be_is_refused_at_once(options):
    with pytest.raises(InputError, match=[*options][-1]):
        frameworks.ScheduleCallback(**options)


def test_telemetry_is_a_run_that_report_and_monitor_read(rows, tmp_path):
    from stoker.runs.reading import read_run
    from stoker.runs.run_page import run_page

    data = frameworks.StokerData(makes(rows), val=makes(rows, order="sequential"))
    watch = frameworks.TelemetryCallback(tmp_path / "run", read_every=4, settings={"lr": RATE})
    model, _ = fit(rows, [watch], model=Judged(), data=data, accumulate_grad_batches=2)
    run = read_run(tmp_path / "run")
    assert run.state == "done"
    assert [epoch.num_samples for epoch in run.epochs] == [203, 203]
    assert run.config["framework"].startswith("lightning 2.")
    assert (run.config["training.lr"], run.config["training.epochs"]) == (RATE, 2)
    assert run.plan["tier"] == "resident"
    first = sum(model.losses[:4]) / 4
    assert run.losses[0] == (3, pytest.approx(first, rel=1e-5))
    assert run.epochs[0].metrics["val_loss"] > 0
    weights = [len(b.positions) for b in model.batches[:11]]
    mean = sum(a * b for a, b in zip(model.losses[:11], weights, strict=True)) / 203
    assert run.epochs[0].train_loss == pytest.approx(mean, rel=1e-5)
    assert 0 <= run.wait_share <= 1
    assert run.telemetry[-1][1]["run"]["samples"] == 406
    assert "lightning 2." in run_page([run])
    assert "lock" not in str(run.told)


def test_a_resumed_run_goes_on_in_its_log(rows, tmp_path):
    from stoker.runs.reading import read_run

    watch = partial(frameworks.TelemetryCallback, tmp_path / "run", read_every=4)
    with pytest.raises(ZeroDivisionError):
        fit(rows, [watch(), Dice(tmp_path / "cut.ckpt", 6), Breaking(9)])
    fit(rows, [watch(), Dice(tmp_path / "cut.ckpt")], ckpt=tmp_path / "cut.ckpt")
    run = read_run(tmp_path / "run")
    assert (run.state, run.num_sessions) == ("done", 2)
    assert [epoch.number for epoch in run.epochs] == [0, 1]
    assert [epoch.num_samples for epoch in run.epochs] == [203 - 6 * BATCH, 203]
    steps = [step for step, _ in run.losses]
    assert steps == sorted(steps)
    assert steps[-1] == 21
    assert [event.text for event in run.events if event.kind == "resumed"] == [
        "resumed at epoch 0, step 6"
    ]


def test_a_run_that_fails_says_so_and_leaves_the_profiler_as_it_was(rows, tmp_path):
    from stoker.runs.reading import read_run

    ran = trainer(callbacks=[frameworks.TelemetryCallback(tmp_path), Breaking(5)])
    with pytest.raises(ZeroDivisionError):
        ran.fit(Net(), datamodule=frameworks.StokerData(makes(rows)))
    run = read_run(tmp_path)
    assert (run.state, len(run.losses)) == ("failed", 1)
    assert "ZeroDivisionError" in run.told
    assert not {"start", "stop", "_stoker_clocks"} & set(vars(ran.profiler))


def test_waits_that_lightning_does_not_tell_of_are_unknown_and_not_zero(
    rows, tmp_path, monkeypatch
):
    from stoker.frameworks import lightning_watch
    from stoker.runs.reading import read_run

    monkeypatch.setattr(lightning_watch, "_QUESTION", "named otherwise")
    doctor = frameworks.DoctorCallback(say=lambda line: None)
    fit(rows, [frameworks.TelemetryCallback(tmp_path), doctor], max_epochs=3)
    run = read_run(tmp_path)
    assert [epoch.wait_share for epoch in run.epochs] == [None] * 3
    assert run.wait_share is None
    assert run.notes.count(lightning_watch.UNTOLD) == 1
    assert doctor.consultation.measurements.wait_share is None
    assert lightning_watch.UNTOLD in doctor.consultation.measurements.notes


class Slow(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, number):
        time.sleep(0.0015)
        return torch.full((6,), float(number)), torch.zeros(1)


def test_the_doctor_finds_a_loader_that_is_slow(tmp_path):
    lines = []
    doctor = frameworks.DoctorCallback(tmp_path, say=lines.append)
    torch_next = DataLoader.__iter__
    trainer(callbacks=[doctor], max_epochs=3).fit(Net(), DataLoader(Slow(), batch_size=8))
    found = doctor.consultation.findings[0]
    assert found.name in ("no-workers", "disk-bound")  # a sleep is a wait, as for a disk
    assert found.gain.likely > 1.5
    assert doctor.consultation.measurements.wait_share > 0.5
    assert any(found.name in line and "×" in line for line in lines)
    assert json.loads((tmp_path / "doctor.json").read_text())["findings"][0]["name"] == found.name
    assert DataLoader.__iter__ is torch_next, "the probe is taken out again"
    for _ in range(6000):
        left = [
            one.name
            for one in threading.enumerate()
            if one.name in ("stoker-sampler", "stoker-probe")
        ]
        if not left:
            break
        time.sleep(0.01)
    assert not left


def test_the_doctor_sees_what_workers_do():
    doctor = frameworks.DoctorCallback(say=lambda line: None)
    slow = DataLoader(Slow(), batch_size=8, num_workers=1, persistent_workers=True)
    trainer(callbacks=[doctor], max_epochs=2).fit(Net(), slow)
    loader = doctor.consultation.measurements.loader
    assert (loader.kind, loader.workers, loader.batch_size) == ("torch", 1, 8)
    # Eight sleeps of 1.5 ms in the worker; where other work has the cores, one estimate may be all there is, and
    # steps take as long as the sleeps.
    assert 0.0015 < loader.alone_seconds.median < 1.0
    assert loader.blocked_share > 0.1


def test_the_doctor_sees_a_stoker_loader_by_its_waits(rows, monkeypatch):
    doctor = frameworks.DoctorCallback(say=lambda line: None)
    healthy, _ = fit(rows, [doctor], max_epochs=3)
    seen = doctor.consultation.measurements
    assert (seen.loader.kind, seen.loader.tier, seen.loader.batch_size) == (
        "stoker",
        "resident",
        BATCH,
    )
    assert seen.samples_per_step == pytest.approx(203 / 11, rel=0.2)
    assert seen.steps > 20
    assert healthy.losses == pytest.approx(plain_losses(rows, epochs=3)[0], rel=1e-5)

    def slowly(self, *args, **named):
        time.sleep(0.004)
        return original(self, *args, **named)

    original = Loader._assemble
    monkeypatch.setattr(Loader, "_assemble", slowly)
    doctor = frameworks.DoctorCallback(say=lambda line: None)
    fit(rows, [doctor], max_epochs=3)
    assert [finding.name for finding in doctor.consultation.findings][:1] == ["starved-by-loader"]


def test_doctor_and_telemetry_together_measure_the_same_waits(rows, tmp_path):
    doctor = frameworks.DoctorCallback(tmp_path, say=lambda line: None)
    fit(rows, [frameworks.TelemetryCallback(tmp_path), doctor])
    events = [line.event for line in read_run_log(tmp_path / "run.jsonl")]
    assert events.count("epoch") == 2
    assert (tmp_path / "doctor.json").exists()


def test_in_a_lightning_without_that_door_the_ladder_stands_aside(rows, monkeypatch):
    from stoker.frameworks import lightning_capture

    class Other:
        epoch_loop = None

    Other.epoch_loop = Other
    Other.automatic_optimization = object()
    ran = trainer()
    monkeypatch.setattr(ran, "fit_loop", Other)
    assert "in another way" in lightning_capture._stands_aside(ran, Net())


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_memory_that_runs_out_changes_no_update(rows, tmp_path, where, accumulate):
    ladder = frameworks.OomLadderCallback()
    watch = frameworks.TelemetryCallback(tmp_path)
    model, _ = fit(
        rows, [ladder, watch], model=Net(most=12, where=where), accumulate_grad_batches=accumulate
    )
    losses, weights = plain_losses(rows, accumulate=accumulate)
    assert model.losses == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(flat(model.body), weights, rtol=1e-4, atol=1e-6)
    taken = [note.split(": ")[1].split(":")[0] for note in ladder.notes]
    assert taken == ["20 samples at once, now 15", "15 samples at once, now 10"]
    notes = [line for line in read_run_log(tmp_path / "run.jsonl") if line.event == "note"]
    assert sum("memory ran out" in line.values["text"] for line in notes) == 2


def test_what_a_step_drew_and_counted_before_memory_ran_out_is_taken_back(rows):
    """Dropout and a buffer: the second try sees what the first one saw."""
    whole = Net(dropout=0.3)
    fit(rows, model=whole)
    ladder = frameworks.OomLadderCallback()
    failed = Net(dropout=0.3)
    step, tries = failed.training_step, []

    def failing(batch, batch_idx):
        tries.append(batch_idx)
        loss = step(batch, batch_idx)
        if len(tries) == 5:
            raise out_of_memory()
        return loss

    failed.training_step = failing
    fit(rows, [ladder], model=failed)
    assert len(ladder.notes) == 1
    assert failed.losses[:4] == whole.losses[:4]
    assert failed.losses[5:] != whole.losses[5:]  # passes of another size draw other dropout
    assert failed.calls > whole.calls


def test_an_error_that_is_not_memory_goes_through(rows):
    class Wrong(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        fit(rows, [frameworks.OomLadderCallback()], model=Wrong())


def test_a_sample_that_does_not_fit_ends_the_run_with_words(rows):
    data = frameworks.StokerData(partial(Loader, rows, 2))
    with pytest.raises(InputError, match="memory ran out with 1 sample at once"):
        fit(rows, [frameworks.OomLadderCallback()], model=Net(most=0), data=data)


def test_chunks_give_way_first(tmp_path):
    store = write_linear(tmp_path)

    class Five(Net):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(5, 1)

        def training_step(self, batch, batch_idx):
            loader = self.trainer.train_dataloader.loader
            if loader.ring_number == 0 and self.global_step == 3:
                raise out_of_memory()
            return super().training_step(batch, batch_idx)

    ladder = frameworks.OomLadderCallback()
    make = partial(Loader, store, 8, order="shuffled", chunk_bytes=12 * 24, num_slots=5, seed=2)
    fit(None, [ladder], model=Five(), data=frameworks.StokerData(make))
    assert len(ladder.notes) == 1
    assert "of chunks given back" in ladder.notes[0]


def test_by_hand_the_ladder_stands_aside_and_says_so(rows):
    class ByHand(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

    ladder = frameworks.OomLadderCallback()
    model, _ = fit(rows, [ladder], model=ByHand())
    assert "only it knows what a step is" in ladder.notes[0]
    assert model.losses == pytest.approx(plain_losses(rows)[0], rel=1e-5)


def test_the_code_of_the_docs_runs(rows, tmp_path, monkeypatch):
    code, names = docs_code("Lightning", rows, tmp_path, monkeypatch), {"__name__": "docs"}
    exec(compile(code, "docs/frameworks.md", "exec"), names)
    assert names["trainer"].global_step == 22
    assert (tmp_path / "runs/a/run.jsonl").exists()
    assert (tmp_path / "runs/a/doctor.json").exists()
