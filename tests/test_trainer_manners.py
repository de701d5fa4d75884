"""What a Trainer says and takes: epoch lines, limits, early stopping, growth of the loss, shapes, its own epochs."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paper_graphs import Jitter, use_paper_graphs
from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.report import Silent, read_run_log
from stoker.runs.follow import RunFollower
from stoker.runs.reading import read_run
from stoker.store.fields import Dense
from stoker.train.history import (
    MUCH,
    EpochLines,
    EpochReport,
    LossTrend,
    Stall,
    describe_epoch,
)
from stoker.train.trainer import Trainer
from store_makers import write_store
from training_makers import make_model, make_trainer, weights, write_rows

BATCHES = 11


@pytest.fixture
def path(tmp_path):
    return write_rows(tmp_path)


def make_small(criterion=nn.functional.mse_loss, targets=(8, 1), lr=0.1, scale=1.0, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    data = [(torch.randn(8, 4) * scale, torch.randn(targets)) for _ in range(4)]
    run_dir, progress = options.pop("run_dir", None), options.pop("progress", None)
    config = {"epochs": 2, "precision": "fp32", "clip_norm": None, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Trainer(
        model, data, None, criterion, optimizer, None, config, "cpu", run_dir=run_dir, progress=progress
    )  # fmt: skip


def told_about_compiling(model):
    data = [(torch.randn(8, 4), torch.randn(8, 1))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model, data, None, nn.functional.mse_loss, optimizer, None, {"epochs": 1}, "cpu"
    )
    return [note.text for note in trainer.history.told if "compile" in note.text]


def test_a_compile_that_torch_leaves_out_is_told():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, inputs):
            return self.inner(inputs)

    for model in (nn.Sequential(nn.Linear(4, 1)), Own()):
        compiled = []
        model.compile(backend=lambda graph, _, made=compiled: made.append(1) or graph.forward)
        model(torch.zeros(2, 4))
        assert bool(told_about_compiling(model)) != bool(compiled)


# -- lines -------------------------------------------------------------------------------------------


def test_fit_prints_a_line_per_epoch_and_making_a_trainer_prints_nothing(path, capsys):
    val = Loader(path, 20, "cpu")
    trainer = make_trainer(path, epochs=3, val=val)
    assert capsys.readouterr().out == ""
    trainer.fit()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("epoch 1/3  loss ")
    assert "val loss" in lines[0]
    assert "samples/s" in lines[0]
    assert lines[0].endswith("left")
    assert not lines[2].endswith("left")


def test_it_is_quiet_on_request(path, capsys):
    make_trainer(path).fit(quiet=True)
    make_trainer(path, progress=Silent()).fit()
    trainer = make_trainer(path)
    trainer.train_epoch()
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_rate_and_time_left(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("stoker.train.history._SHOW_SECONDS", 0.0)
    stream = Terminal()
    lines = EpochLines(2, stream)
    with lines.shown(0):
        lines.start("epoch 1", 100, "batches")
        lines.advance(25)
        lines.say("memory ran out")
    text = stream.getvalue()
    assert "epoch 1/2  25/100 batches" in text
    assert "/s" in text
    assert "left" in text
    assert text.endswith("\r\x1b[Kmemory ran out\n")


class Tee:
    """A stream of a script's own: `print` needs no more than `write`."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


CLOSED = io.StringIO()
CLOSED.close()


@pytest.mark.parametrize("show_seconds", [0.0, 1e9])  # batches are counted, epochs are told
@pytest.mark.parametrize("stream", [CLOSED, None, Tee()], ids=["closed", "none", "tee"])
def test_no_stream_of_a_script_ends_a_run(path, monkeypatch, show_seconds, stream):
    monkeypatch.setattr("stoker.train.history._SHOW_SECONDS", show_seconds)
    monkeypatch.setattr("sys.stdout", stream)
    assert make_trainer(path).fit().ended == "done"
    assert not isinstance(stream, Tee) or "epoch 2/2" in stream.text


def test_a_line_is_told_in_the_letters_of_the_stream():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    EpochLines(1, stream)._write("loss 1.2 (3 × the first)\n")
    assert stream.buffer.getvalue() == b"loss 1.2 (3 \\xd7 the first)\n"


def test_a_fall_back_to_eager_is_in_the_lines_the_report_and_the_history(
    path, tmp_path, monkeypatch, capsys
):
    use_paper_graphs(monkeypatch)

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, x):
            return self.net(x) * (2.0 if x[0, 0].item() > 0 else 1.0)

    model = Branches()
    trainer = Trainer(
        model, Loader(path, 20, "cpu", order="shuffled", seed=1), None, nn.functional.mse_loss,
        torch.optim.AdamW(model.parameters()), None, {"epochs": 2, "precision": "fp32"}, "cpu",
        run_dir=tmp_path / "run",
    )  # fmt: skip
    history = trainer.fit()
    assert history.fallback is not None
    assert history.fallback.values["slowdown"] > 0
    out = capsys.readouterr().out
    assert "step eager: a replayed step differed" in out
    assert "  eager" in out.splitlines()[-1]
    assert history.epochs[-1].is_fallback
    record = read_run(tmp_path / "run")
    assert any("step eager" in event.text for event in record.events)


def test_a_step_that_was_never_to_be_captured_is_no_fall_back(path, capsys):
    history = make_trainer(path).fit()
    assert history.fallback is None
    assert "eager" not in capsys.readouterr().out


def test_the_line_of_an_epoch():
    report = EpochReport(1, 12.0, {"loss": 2.0, "accuracy": 0.5}, 100, 2.0, 0.03, 240.0, True, 6.14)
    assert describe_epoch(report, 10) == (
        "epoch  2/10  loss 12 (240 × the first)  val loss 2  accuracy 0.5  50 samples/s  waited 3%  "
        "eager, 6.1 × slower than captured"
    )


# -- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 7, BATCHES, BATCHES + 4, 100])
def test_max_steps_ends_the_run_where_a_longer_one_goes_on(path, tmp_path, most):
    whole = make_trainer(path, epochs=3, dropout=0.3, seed=5).fit()
    options = {"epochs": 3, "dropout": 0.3, "run_dir": tmp_path / "run", "seed": 5}
    first = make_trainer(path, max_steps=most, **options)
    history = first.fit()
    assert history.ended == "done"
    assert history.losses == whole.losses[:most]
    assert history.epochs[-1].num_samples > 0
    second = make_trainer(path, **options)
    rest = second.fit(resume=True)
    assert history.losses + rest.losses == whole.losses
    assert [e.train_loss for e in rest.epochs][-1:] == [whole.epochs[-1].train_loss] or most == 100


def test_max_steps_validates_the_part_of_an_epoch(path):
    val = Loader(path, 20, "cpu")
    history = make_trainer(path, epochs=3, val=val, max_steps=4).fit()
    assert [report.num_samples for report in history.epochs] == [80]
    assert history.epochs[0].metrics["loss"] > 0


def test_max_steps_waits_for_an_update_to_be_whole(path):
    history = make_trainer(path, max_steps=4, accumulation_steps=3).fit()
    assert len(history.losses) == 6


def test_early_stopping(path, tmp_path, capsys):
    val = Loader(path, 20, "cpu")
    options = {"epochs": 9, "lr": 0.0, "run_dir": tmp_path / "run", "patience": 2}
    history = make_trainer(path, val=val, **options).fit()
    assert len(history.epochs) == 3  # the first, and two that are no better
    assert history.ended == "done"
    assert "stopped early: loss has not improved for 2 epochs" in capsys.readouterr().out
    # The count is saved: a resumed run does not begin to count anew.
    again = make_trainer(path, val=Loader(path, 20, "cpu"), **options).fit(resume=True)
    assert not again.epochs
    longer = make_trainer(path, val=Loader(path, 20, "cpu"), **{**options, "patience": 4})
    assert len(longer.fit(resume=True).epochs) == 2


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20), st.floats(0, 10))
def test_a_stall_counts_epochs_since_the_best(scores, min_delta):
    stall = Stall()
    for score in scores:
        before = stall.best
        stall.add(score, min_delta)
        improved = score == score and (before is None or score < before - min_delta)
        assert (stall.num_epochs == 0) is improved
    finite = [score for score in scores if score == score]
    assert (stall.best is None) is (not finite)


@pytest.mark.parametrize(
    "bad", [{"max_steps": 0}, {"patience": -1}, {"min_delta": -1.0}, {"max_steps": 1.5}]
)
def test_limits_that_are_none_are_refused(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        make_small(**bad)


# -- a loss that grows -------------------------------------------------------------------------------


def test_a_loss_that_grows_without_bound_is_told_while_it_happens(tmp_path, capsys):
    trainer = make_small(lr=0.3, scale=3.0, read_every=2, epochs=3, run_dir=tmp_path / "run")
    history = trainer.fit()
    assert history.epochs[-1].growth > 1000
    out = capsys.readouterr().out
    first, *_ = out.splitlines()
    assert first.startswith("the loss grows without bound")  # before the first epoch's line
    assert "× the first)" in out
    record = read_run(tmp_path / "run")
    assert any(e.kind == "loss" and "grows without bound" in e.text for e in record.events)
    lines = [line.event for line in read_run_log(tmp_path / "run" / "run.jsonl")]
    told = lines.index("note", lines.index("steps") if "steps" in lines else 0)
    assert told < lines.index("epoch")
    assert "grow" in str(RunFollower(tmp_path / "run").look().note)


def test_a_loss_that_falls_is_not_told(path):
    trainer = make_trainer(path, epochs=4, read_every=3)
    assert not [note for note in trainer.fit().notes if "grow" in note]


def test_a_loss_that_grows_a_little_in_every_epoch_is_told_once():
    trend = LossTrend()
    told = [trend.end_epoch(1.2**number) for number in range(8)]
    assert [number for number, found in enumerate(told) if found] == [3]
    assert not any(LossTrend().end_epoch(loss) for loss in (1.0, 2.0, 1.0, 2.0, 1.0))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_growth_is_measured_from_the_first_block(means):
    trend = LossTrend()
    told = [trend.add(mean) for mean in means]
    assert all(found >= MUCH for found in told if found is not None)
    if max(means) / means[0] >= MUCH * 1.001:
        assert any(found is not None for found in told)
    if max(means) / means[0] < MUCH * 0.999:
        assert not any(found is not None for found in told)


# -- shapes ------------------------------------------------------------------------------------------


def by_hand(outputs, targets):
    return ((outputs - targets) ** 2).mean()


@pytest.mark.parametrize("criterion", [nn.functional.mse_loss, nn.L1Loss(), by_hand])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_outputs_of_another_shape_than_the_targets_are_named_before_training(criterion):
    trainer = make_small(criterion, targets=(8,))
    before = weights(trainer)
    with pytest.raises(InputError, match=r"outputs are \(8, 1\) and the targets \(8,\)") as error:
        trainer.fit()
    assert "reshape(-1, 1)" in error.value.fix
    assert torch.equal(before, weights(trainer))


def squeezing(outputs, targets):
    return nn.functional.mse_loss(outputs.squeeze(-1), targets)


def test_a_criterion_that_brings_both_to_one_shape_is_left_alone():
    assert make_small(squeezing, targets=(8,)).fit(quiet=True).ended == "done"


def test_class_numbers_beside_one_output_are_left_alone():
    trainer = make_small(nn.functional.cross_entropy, targets=(8,))
    trainer._train.loader = [(x, (y * 0).long()) for x, y in trainer._train.loader]
    assert trainer.fit(quiet=True).ended == "done"


# -- epochs of one's own -----------------------------------------------------------------------------


def test_train_epoch_goes_on_to_the_next_epoch(path):
    whole = make_trainer(path, epochs=3).fit(quiet=True)
    trainer = make_trainer(path, epochs=3)
    reports = [trainer.train_epoch() for _ in range(2)]
    assert [report.epoch for report in reports] == [0, 1]
    assert trainer.history.losses == whole.losses[: 2 * BATCHES]
    trainer.fit(quiet=True)
    assert trainer.history.losses == whole.losses
    assert [report.epoch for report in trainer.history.epochs] == [0, 1, 2]


def test_train_epoch_takes_the_number_of_an_epoch(path):
    trainer = make_trainer(path, epochs=9)
    assert trainer.train_epoch(3).epoch == 3
    assert trainer.train_epoch().epoch == 4
    assert trainer._train.loader.epoch == 5
    with pytest.raises(InputError, match="epoch"):
        trainer.train_epoch(-1)


def test_train_epoch_between_validations(path):
    trainer = make_trainer(path, val=Loader(path, 20, "cpu"), epochs=2)
    losses = []
    for _ in range(3):
        assert trainer.train_epoch().metrics == {}
        losses.append(trainer.validate()["loss"])
    assert losses[2] < losses[0]


# -- the run's end -----------------------------------------------------------------------------------


def test_a_run_of_ones_own_trainer_reports_as_complete(path, tmp_path):
    make_trainer(path, epochs=2, run_dir=tmp_path / "run").fit()
    record = read_run(tmp_path / "run")
    assert record.state == "done"
    assert RunFollower(tmp_path / "run").look().state == "done"


def test_a_run_that_failed_reports_its_error(path, tmp_path):
    trainer = make_trainer(path, epochs=2, run_dir=tmp_path / "run")

    def fail(position):
        raise OSError("the disk is gone")

    trainer._after_batch = fail
    with pytest.raises(OSError, match="disk"):
        trainer.fit()
    record = read_run(tmp_path / "run")
    assert record.state == "failed"
    assert "the disk is gone" in record.told
    # Resumed, it is complete; a resume that is refused afterwards changes nothing.
    make_trainer(path, epochs=2, run_dir=tmp_path / "run").fit(resume=True)
    assert read_run(tmp_path / "run").state == "done"
    with pytest.raises(InputError, match="another run"):
        make_trainer(path, epochs=2, run_dir=tmp_path / "run", clip_norm=7.0).fit(resume=True)
    assert read_run(tmp_path / "run").state == "done"


# -- another augmentation ----------------------------------------------------------------------------


class Brighter(Jitter):
    def __call__(self, images, masks=None, *, rows=None):
        return super().__call__(images, masks, rows=rows) + 5.0


@pytest.mark.parametrize("kind", ["loader", "list"])
@pytest.mark.parametrize("capture", ["auto", "off"])
def test_an_augmentation_may_be_replaced(tmp_path, monkeypatch, kind, capture):
    use_paper_graphs(monkeypatch)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (96, 3, 4, 4), dtype=np.uint8)
    labels = rng.integers(0, 4, 96)
    store = write_store(tmp_path / "s", [{"images": Dense(images), "labels": Dense(labels)}])
    pairs = [
        (torch.from_numpy(images[i : i + 16]), torch.from_numpy(labels[i : i + 16]))
        for i in range(0, 96, 16)
    ]

    def run(first, second):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
        trainer = Trainer(
            model,
            Loader(store, 16, "cpu") if kind == "loader" else pairs,
            Loader(store, 16, "cpu"),
            nn.functional.cross_entropy,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            None,
            {"epochs": 9, "precision": "fp32", "capture": capture},
            "cpu",
            first,
        )
        for number in range(4):
            if number == 2:
                trainer.gpu_augmentation = second
            trainer.train_epoch()
        assert trainer.gpu_augmentation is second
        return trainer.history.losses, trainer.validate()["loss"]

    same, other = Jitter(), Brighter()
    (plain, _), (swapped, validated), (late, _) = (
        run(same, same),
        run(Jitter(), other),
        run(other, other),
    )
    assert swapped[:12] == pytest.approx(plain[:12], rel=1e-4)
    assert swapped[12] != pytest.approx(plain[12], rel=1e-2)
    assert np.isfinite(validated)
    assert late[0] != pytest.approx(plain[0], rel=1e-2)


def test_a_fall_back_is_in_the_last_lines_of_stoker_train(tmp_path, capsys):
    from stoker.cli.train import _print
    from stoker.recipes.run import RecipeRun
    from stoker.train.graphs.reasons import step_note

    note = step_note("eager: batches change their shape", captured=False, fallback=True)
    run = RecipeRun(told=[note], recipe="forex", run_dir=tmp_path)
    _print(run, None, "again")  # type: ignore[arg-type]
    assert "step eager: batches change their shape" in capsys.readouterr().out
    note = step_note("eager: capture is off", captured=False)
    _print(RecipeRun(told=[note], recipe="forex", run_dir=tmp_path), None, "again")  # type: ignore[arg-type]
    assert "eager" not in capsys.readouterr().out
