"""Running out of memory: wherever it happens, the run ends where one with enough memory ends."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.store.fields import Dense
from stoker.train.trainer import Trainer
from store_makers import write_store
from training_makers import (
    DEVICES,
    Net,
    chunked,
    fail_while_large,
    inject,
    out_of_memory,
    train,
    train_chunked,
    write_linear,
)

pytestmark = pytest.mark.usefixtures("forgetful")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_linear(tmp_path_factory.mktemp("rows"))


@pytest.mark.thinned
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("most", [15, 9, 5, 1])
def test_equal_to_a_run_without_it(store, where, most, steps):
    plain, expected = train(store, 16, where, steps)
    short, history = train(store, most, where, steps)
    np.testing.assert_allclose(history.losses, expected.losses, rtol=1e-4, atol=1e-6)
    for one, other in zip(short.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert short.model.seen == plain.model.seen == 200, "buffers went back with every retry"
    assert short._update.level.pass_size <= most
    assert [note for note in history.notes if note.startswith("memory ran out")]


@pytest.mark.parametrize("steps", [1, 2])
def test_in_the_optimizer(store, steps):
    plain, _ = train(store, 16, "optimizer", steps)
    short, history = train(store, 16, "optimizer", steps, failures=2)
    for one, other in zip(short.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert len([note for note in history.notes if note.startswith("memory ran out")]) == 2


def test_the_bottom_of_the_ladder_is_an_error_with_a_remedy(store):
    with pytest.raises(InputError, match="memory ran out with 1 sample at once"):
        train(store, 0, "forward")


def test_it_can_be_turned_off(store):
    with pytest.raises(torch.OutOfMemoryError):
        train(store, 9, "forward", survive_oom=False)


def test_other_errors_pass_through(store):
    class Broken(Net):
        def forward(self, x):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    model = Broken(16, "")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = Loader(store, 16, "cpu")
    trainer = Trainer(model, loader, None, nn.functional.mse_loss, optimizer, None, None, "cpu")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        trainer.fit()


# -- the data gives way first --------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["forward", "update", "assembly"])
@pytest.mark.parametrize("steps", [1, 3])
def test_chunks_give_way_first_and_nothing_else_changes(store, monkeypatch, device, where, steps):
    plain, expected = train_chunked(store, chunked(store, device), device, accumulation_steps=steps)
    loader = chunked(store, device)
    large = loader.device_bytes
    inject(monkeypatch, where, fail_while_large(loader))
    short, history = train_chunked(store, loader, device, accumulation_steps=steps)
    assert loader.device_bytes == large * 2 // 3
    assert (short._update.level.chunk_share, short._update.level.pass_size) == (0.6, 16)
    (said,) = [note for note in history.notes if note.startswith("memory ran out")]
    assert re.search(r"with \S+ \S+ in use \(\S+ \S+ after letting go\)", said)
    assert "75% to 60%" in said
    assert f"({large // 3} B of chunks given back)" in said
    np.testing.assert_allclose(history.losses, expected.losses, rtol=0 if device == "cpu" else 1e-5)
    for one, other in zip(short.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0 if device == "cpu" else 1e-5, atol=0)
    assert short.model.seen == plain.model.seen == 300


def test_where_chunks_cannot_give_way_the_batch_does(store, monkeypatch):
    loader = chunked(store, num_slots=2)
    inject(monkeypatch, "forward", fail_while_large(loader, 10**9))
    assert loader.shrink(0.8) == 0
    model = Net(9, "forward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, loader, None, nn.functional.mse_loss, optimizer, None, None, "cpu")
    notes = [note for note in trainer.fit().notes if note.startswith("memory ran out")]
    assert "16 samples at once, now 12" in notes[0]
    assert trainer._update.level.pass_size == 8


@given(
    batch=st.integers(1, 30),
    chunk=st.integers(10, 60),
    num_slots=st.integers(2, 6),
    share=st.floats(0.1, 1.0),
    at=st.integers(0, 12),
    order=st.sampled_from(["shuffled", "sequential"]),
    by_index=st.booleans(),
)
def test_a_loader_that_shrinks_yields_what_it_would_have(
    store, batch, chunk, num_slots, share, at, order, by_index
):
    options = {"chunk_bytes": chunk * 24, "num_slots": num_slots, "order": order, "batch": batch}
    with chunked(store, **options) as loader:
        expected = [(b.sample_ids.copy(), b["features"].clone()) for _ in range(2) for b in loader]
        before, state = loader.device_bytes, loader.tier
    with chunked(store, **options) as loader:
        seen = []
        for _ in range(2):
            for given_batch in loader.index_batches() if by_index else loader:
                if len(seen) == at:
                    freed = loader.shrink(share)
                    assert freed == before - loader.device_bytes >= 0
                    assert not freed or state == "chunked"
                made = loader.assemble(given_batch) if by_index else given_batch
                seen.append((made.sample_ids.copy(), made["features"].clone()))
    assert len(seen) == len(expected)
    for (ids, values), (want_ids, want) in zip(seen, expected, strict=True):
        np.testing.assert_array_equal(ids, want_ids)
        assert torch.equal(values, want)


def test_a_loader_that_shrank_can_be_resumed_by_one_that_did_not(store):
    with chunked(store) as loader, chunked(store) as other:
        batches = iter(loader)
        next(batches)
        assert loader.shrink(0.8) > 0
        next(batches)
        other.load_state_dict(loader.state_dict())
        for one, two in zip(batches, other, strict=True):
            assert torch.equal(one["features"], two["features"])


@pytest.mark.gpu
def test_shrinking_gives_device_memory_back(tmp_path):
    rows = np.random.default_rng(0).normal(size=(300_000, 32)).astype("f4")
    made = write_store(tmp_path / "s", [{"features": Dense(rows), "targets": Dense(rows[:, :1])}])
    with Loader(made, 1000, "cuda", order="shuffled", chunk_bytes=8 << 20) as loader:
        batches = iter(loader)
        kept = next(batches)["features"].clone()
        before = torch.cuda.memory_allocated()
        freed = loader.shrink(0.8)
        assert freed > 7 << 20
        assert before - torch.cuda.memory_allocated() >= freed * 0.95
        assert kept.isfinite().all()
        ids = np.concatenate([batch.sample_ids for batch in batches])
        assert len(np.unique(ids)) == 299_000


@pytest.mark.gpu
@pytest.mark.parametrize("at", [2, 4, 5])
def test_chunks_give_way_while_the_step_is_captured(store, monkeypatch, at):
    """At a warm-up step, in the capture, in an eager step that a replay is compared with."""
    _, expected = train_chunked(store, chunked(store, "cuda"), "cuda", epochs=12)
    loader = chunked(store, "cuda")
    inject(monkeypatch, "forward", fail_while_large(loader, at))
    trainer, history = train_chunked(store, loader, "cuda", epochs=12, capture="on")
    assert trainer._captured.active, trainer._captured.reason
    assert trainer._update.level.chunk_share == 0.6
    np.testing.assert_allclose(history.losses, expected.losses, rtol=1e-3, atol=1e-5)


# -- batches that cannot be cut ------------------------------------------------------------------


class Scaled(nn.Module):
    """Takes rows and one vector for all of them."""

    def __init__(self, fails=lambda self: False):
        super().__init__()
        torch.manual_seed(1)
        block = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.Sequential(*block)
        self.head = nn.Linear(5, 1)
        self.fails = fails

    def forward(self, inputs):
        if self.fails(self):
            raise out_of_memory()
        rows, scale = inputs
        return self.head(self.blocks(rows * scale))


def train_scaled(store, model, pass_size=None):
    loader = Loader(store, 16, "cpu", order="shuffled", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = torch.linspace(0.5, 1.5, 5)
    trainer = Trainer(
        model,
        loader,
        None,
        nn.functional.mse_loss,
        optimizer,
        None,
        {"epochs": 2},
        "cpu",
        unpack=lambda batch: ((batch["features"], scale), batch["targets"]),
    )
    if pass_size is not None:
        trainer._update.level = replace(trainer._update.level, pass_size=pass_size)
    return trainer, trainer.fit()


def test_a_remembered_part_of_a_batch_that_cannot_be_cut_trains_it_whole(store):
    _, expected = train_scaled(store, Scaled())
    _, history = train_scaled(store, Scaled(), pass_size=4)
    assert history.losses == expected.losses
    (said,) = [note for note in history.notes if "go through whole" in note]
    assert "not 4 samples at once" in said


def test_where_a_batch_cannot_be_cut_activations_are_recomputed(store):
    def fails(model):
        return "forward" not in model.blocks[0].__dict__

    _, expected = train_scaled(store, Scaled())
    trainer, history = train_scaled(store, Scaled(fails))
    assert history.losses == expected.losses
    assert trainer._update.level.is_checkpointed
    with pytest.raises(
        InputError, match=r"16 samples at once, which cannot go through in parts"
    ) as e:
        train_scaled(store, Scaled(lambda _: True))
    assert "smaller batch size" in e.value.fix


# -- in validation -------------------------------------------------------------------------------


class Counted:
    """A metric that adds up."""

    def __init__(self):
        self.count, self.total = 0, 0.0

    def update(self, outputs, targets):
        assert len(outputs) == len(targets)
        self.count += len(outputs)
        self.total += float(outputs.sum())

    def compute(self):
        return {"count": self.count, "sum": self.total}


def judge(store, most, val=None, **options):
    class Eval(Net):
        def forward(self, x):
            self.where = "" if self.training else "forward"
            return super().forward(x)

    model = Eval(most, "")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train = options.pop("train", None) or Loader(store, 16, "cpu")
    trainer = Trainer(
        model,
        train,
        val or Loader(store, 16, "cpu"),
        nn.functional.mse_loss,
        optimizer,
        None,
        {"epochs": 1, **options},
        "cpu",
        metrics=Counted,
    )
    return trainer, trainer.fit()


@pytest.mark.parametrize("most", [15, 7, 1])
def test_validation_goes_through_in_parts(store, most):
    _, expected = judge(store, 16)
    trainer, history = judge(store, most)
    assert history.epochs[0].metrics == pytest.approx(expected.epochs[0].metrics, rel=1e-5)
    assert history.epochs[0].metrics["count"] == 100
    assert not trainer._update.is_lowered, "training needs no smaller parts"
    notes = [note for note in history.notes if "ran out in validation" in note]
    assert "16 samples at once, now 12" in notes[0]
    assert trainer.validate() == pytest.approx(expected.epochs[0].metrics, rel=1e-5)
    assert [note for note in trainer.history.notes if "in validation" in note] == notes, (
        "it is kept"
    )


def test_validation_lets_the_training_data_give_way_first(store):
    train = chunked(store)
    large = train.device_bytes

    class Val(Loader):
        def _assemble(self, *args, **named):
            if train.device_bytes == large:
                raise out_of_memory()
            return super()._assemble(*args, **named)

    _, expected = judge(store, 16)
    trainer, history = judge(store, 16, Val(store, 16, "cpu"), train=train)
    assert history.epochs[0].metrics == pytest.approx(expected.epochs[0].metrics, rel=1e-6)
    assert trainer._update.level.chunk_share == 0.6
    assert train.device_bytes < large


def test_validation_that_cannot_be_made_smaller_is_an_error(store):
    with pytest.raises(InputError, match="ran out in validation with 1 sample at once"):
        judge(store, 0)
    with pytest.raises(torch.OutOfMemoryError):
        judge(store, 9, survive_oom=False)

    class Val(Loader):
        def _assemble(self, *args, **named):
            raise out_of_memory()

    with pytest.raises(torch.OutOfMemoryError):
        judge(store, 16, Val(store, 16, "cpu"))


def test_validation_that_was_interrupted_begins_anew(store):
    trainer, history = judge(store, 16)
    next(iter(trainer._val))
    assert trainer.validate() == history.epochs[0].metrics


# -- other loaders -------------------------------------------------------------------------------


def test_a_batch_of_any_loader_that_did_not_fit_is_tried_again(monkeypatch):
    data = torch.utils.data.TensorDataset(torch.randn(50, 5), torch.randn(50, 1))

    def run(fails):
        left = list(fails)

        def unpack(batch):
            if left and len(left) and left[0] == len(seen):
                left.pop(0)
                raise out_of_memory()
            seen.append(batch[0].clone())
            return batch[0], batch[1]

        seen = []
        generator = torch.Generator().manual_seed(4)
        loader = torch.utils.data.DataLoader(data, 8, shuffle=True, generator=generator)
        model = Net(1000, "")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(
            model, loader, None, nn.functional.mse_loss, optimizer, None, {"epochs": 2}, "cpu",
            unpack=unpack,
        )  # fmt: skip
        return trainer.fit().losses, seen

    expected, rows = run([])
    losses, again = run([0, 3, 9])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)  # parts of a batch add up differently
    assert all(map(torch.equal, rows, again))
    assert len(rows) == len(again)
