"""The step as a CUDA graph: equal to the eager one, compared with it, and honest where it cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.train.batches import Work
from stoker.train.graphs.graphed_step import CHECKED_REPLAYS, WARM_UP_STEPS
from stoker.train.graphs.replay_check import difference
from stoker.train.graphs.trainer_step import CapturedStep
from stoker.train.step import Step
from stoker.train.trainer import Trainer
from training_makers import (
    chunked,
    fail_while_large,
    inject,
    make_model,
    train,
    train_chunked,
    weights,
    write_linear,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def path(tmp_path):
    return write_rows(tmp_path)


@pytest.fixture
def store(tmp_path):
    return write_linear(tmp_path / "s")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("chunk_bytes", [None, 2000])
def test_a_captured_run_is_the_eager_run(path, precision, chunk_bytes):
    runs = []
    for capture in ("on", "off"):
        model = make_model().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 230)
        loader = Loader(path, 20, "cuda", order="shuffled", seed=1, chunk_bytes=chunk_bytes)
        config = {"epochs": 21, "capture": capture, "precision": precision}
        trainer = Trainer(
            model, loader, None, nn.functional.mse_loss, optimizer, scheduler, config, "cuda"
        )
        history = trainer.fit()
        runs.append((np.array(history.losses), weights(trainer)))
        if capture == "on":
            assert trainer._captured.active, trainer._captured.reason
    (captured, one), (eager, two) = runs
    assert len(captured) == 231
    np.testing.assert_allclose(
        captured, eager, rtol=2e-2 if precision != "fp32" else 1e-3, atol=1e-4
    )
    torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_a_model_that_cannot_be_captured_trains_eagerly_and_says_why(path):
    class Peeks(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, x):
            return self.net(x) * (2.0 if x.sum().item() > 0 else 1.0)

    model = Peeks().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    loader = Loader(path, 20, "cuda", order="shuffled", seed=1)
    trainer = Trainer(
        model, loader, None, nn.functional.mse_loss, optimizer, None, {"epochs": 2}, "cuda"
    )
    history = trainer.fit()
    assert not trainer._captured.active
    assert "cannot be captured" in trainer._captured.reason
    assert np.isfinite(history.losses).all()
    assert len(history.losses) == 22


# -- capture, checked ----------------------------------------------------------------------------


def make_capturing(path, capture, **options):
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    loader = Loader(path, 20, "cuda", order="shuffled", seed=1)
    config = {"epochs": 3, "capture": capture, "precision": "fp32", **options}
    return Trainer(model, loader, None, nn.functional.mse_loss, optimizer, None, config, "cuda")


@pytest.mark.gpu
def test_the_first_replays_are_compared_each_from_the_same_state(path, monkeypatch):
    compared = []
    original = CapturedStep._replay_and_check
    monkeypatch.setattr(
        CapturedStep,
        "_replay_and_check",
        lambda self, work: compared.append(1) or original(self, work),
    )
    trainer = make_capturing(path, "on")
    history = trainer.fit()
    assert len(compared) == CHECKED_REPLAYS == 3
    assert "first 3 replays agreed" in trainer._captured.reason
    eager = make_capturing(path, "off").fit()
    assert history.losses == pytest.approx(eager.losses, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", range(CHECKED_REPLAYS))
def test_a_replay_that_differs_ends_capture_or_the_run(path, monkeypatch, wrong):
    def spoil(trainer):
        """Let the graph be right until the `wrong`-th comparison."""
        original = CapturedStep._replay_and_check

        def spoiled(self, work):
            if self._num_checked == wrong:
                self._static.zero_()
            return original(self, work)

        monkeypatch.setattr(CapturedStep, "_replay_and_check", spoiled)
        return trainer

    trainer = spoil(make_capturing(path, "auto"))
    history = trainer.fit()
    assert "a replayed step differed from the eager one" in trainer._captured.reason
    monkeypatch.undo()
    expected = make_capturing(path, "off").fit()
    assert history.losses == pytest.approx(expected.losses, rel=1e-3)
    with pytest.raises(InputError, match="capture is 'on', but a replayed step differed") as caught:
        spoil(make_capturing(path, "on")).fit()
    assert "capture='auto'" in caught.value.fix


@pytest.mark.gpu
def test_capture_that_is_on_ends_where_the_step_cannot_be_captured(path, monkeypatch):
    forward_backward, calls = Step.forward_backward, []

    def peeks(self, *args, **kwargs):
        calls.append(1)
        loss = forward_backward(self, *args, **kwargs)
        if len(calls) > WARM_UP_STEPS:
            loss.item()
        return loss

    monkeypatch.setattr(Step, "forward_backward", peeks)
    trainer = make_capturing(path, "on")
    with pytest.raises(InputError, match="capture is 'on', but the step cannot be captured"):
        trainer.fit()
    assert torch.isfinite(weights(trainer)).all()
    calls.clear()
    assert len(make_capturing(path, "auto").fit().losses) == 33


@pytest.mark.parametrize(
    ("one", "other", "is_alike"),
    [
        ([1.0, 2.0], [1.0, 2.001], True),
        ([1.0, 2.0], [1.0, 2.01], False),
        ([float("nan")], [float("nan")], True),
        ([float("inf"), 1.0], [float("inf"), 1.0], True),
        ([float("inf")], [-float("inf")], False),
        ([float("nan"), 1.0], [float("nan"), 1.1], False),
        ([1.0], [float("nan")], False),
        ([float("nan")], [1.0], False),
    ],
)
def test_only_what_differs_is_a_difference(one, other, is_alike):
    away = difference([torch.tensor(one)], [torch.tensor(other)])
    assert (away <= 1.0) is is_alike


# -- without CUDA ------------------------------------------------------------------------------


@pytest.fixture
def pretend_capture(monkeypatch):
    """A captured step on a machine without CUDA: what would be captured and replayed runs eagerly."""
    monkeypatch.setattr("stoker.train.trainer.cannot_capture", lambda *_: None)
    monkeypatch.setattr(CapturedStep, "_run_captured", CapturedStep._run_eagerly)


def test_capture_goes_on_eagerly_when_batches_must_be_cut(store, pretend_capture):
    _, expected = train(store, 16, "forward")
    trainer, history = train(store, 9, "forward")
    np.testing.assert_allclose(history.losses, expected.losses, rtol=1e-4, atol=1e-6)
    assert trainer._captured.reason.startswith(
        "eager: memory ran out, and a batch that goes through in"
    )
    assert f"step {trainer._captured.reason}" in history.notes
    with pytest.raises(InputError, match="capture is 'on', but memory ran out") as caught:
        train(store, 9, "forward", capture="on")
    assert "capture='auto'" in caught.value.fix


def test_capture_that_is_on_ends_when_batches_change_their_shape(pretend_capture):
    def run(capture):
        batches = [(torch.randn(4, 5 + n % 3), torch.randn(4, 1)) for n in range(9)]

        class Mean(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(1))

            def forward(self, x):
                return x.mean(1, keepdim=True) * self.scale

        model = Mean()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"capture": capture}
        trainer = Trainer(
            model, batches, None, nn.functional.mse_loss, optimizer, None, config, "cpu"
        )
        trainer._captured._set_static(Work(*batches[0], 4))
        trainer._set_batch_size = lambda count: None
        trainer._step.parts.nominal_batch = 4
        return trainer, trainer.fit()

    _, history = run("auto")
    assert len(history.losses) == 9
    assert "step eager: batches change their shape" in history.notes
    with pytest.raises(InputError, match="capture is 'on', but batches change their shape"):
        run("on")


def test_memory_that_runs_out_in_assembly_of_a_captured_run(store, pretend_capture, monkeypatch):
    """Its work is indices, which point into the ring as it was before."""
    _, expected = train_chunked(store, chunked(store), capture="off")
    loader = chunked(store)
    inject(monkeypatch, "assembly", fail_while_large(loader, 9))
    trainer, history = train_chunked(store, loader, capture="on")
    assert trainer._update.level.chunk_share == 0.6
    assert history.losses == expected.losses


@pytest.mark.gpu
def test_a_capture_that_failed_does_not_make_the_allocator_keep_everything(path, monkeypatch):
    """Torch leaves the allocator in the capture: memory that another stream has used is never freed."""
    forward_backward, calls = Step.forward_backward, []

    def peeks(self, *args, **kwargs):
        calls.append(1)
        loss = forward_backward(self, *args, **kwargs)
        loss.item()
        return loss

    monkeypatch.setattr(Step, "forward_backward", peeks)
    trainer = make_capturing(path, "auto")
    trainer.fit()
    assert "the step cannot be captured" in trainer._captured.reason
    side, kept = torch.cuda.Stream(), []
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    for _ in range(20):
        tensor = torch.empty(1 << 20, device="cuda")
        tensor.record_stream(side)
        del tensor
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_stats()["active_bytes.all.current"] - before)
    assert max(kept) <= 3 * (4 << 20)
