"""State carried by lanes: equal to one pass over the whole series, and it survives a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stoker.loader.lanes import plan_store_lanes
from stoker.loader.loader import Loader
from stoker.store.fields import Dense, Series
from stoker.train.losses import NonFiniteError
from stoker.train.recurrent_state import RecurrentState
from stoker.train.trainer import Trainer
from store_makers import write_store

WINDOW, STEPS = 4, 60


class Recurrent(nn.Module):
    """Adds up what it sees, through a GRU; remembers the outputs of every call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRU(2, 5, batch_first=True)
        self.head = nn.Linear(5, 1)
        self.seen = []

    def initial_state(self, batch, device):
        return {"h": torch.zeros(batch, 5, device=device)}

    def reset_state(self, state, rows):
        return {name: torch.where(rows[:, None], 0.0, value) for name, value in state.items()}

    def forward(self, inputs, state=None):
        if state is None:
            state = self.initial_state(len(inputs), inputs.device)
        out, last = self.cell(inputs, state["h"][None].contiguous())
        self.seen.append((out.detach().clone(), state["h"].clone(), last.requires_grad))
        return self.head(out[:, -1]), {"h": last[0]}


def make_store(folder, bad_row=None):
    rng = np.random.default_rng(0)
    rows = STEPS * WINDOW
    values = rng.normal(size=(rows, 2)).astype("f4")
    if bad_row is not None:
        values[bad_row, 1] = np.nan
    series = Series(
        rows=values,
        time=np.arange(rows, dtype=np.int64) * 60,
        ends=np.arange(WINDOW, rows + 1, dtype=np.int64),
        window=WINDOW,
        gap=np.zeros(rows, np.uint8),
        columns=("a", "b"),
        duration_ns=60,
    )
    count = len(series.ends)
    targets = Dense(rng.normal(size=(count, 1)).astype("f4"))
    return write_store(folder, [{"M1": series, "targets": targets}])


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "s")


def make_trainer(store, lr=0.0, device="cpu", **options):
    model = Recurrent().to(device)
    lanes = plan_store_lanes(store, 3)
    loader = Loader(store, 3, device, order="lanes", lanes=lanes, fields=["M1", "targets"])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    extra = {name: options.pop(name) for name in ("run_dir",) if name in options}
    return Trainer(
        model,
        loader,
        options.pop("val", None),
        nn.functional.mse_loss,
        optimizer,
        None,
        {"epochs": 1, "precision": "fp32", **options},
        device,
        unpack=lambda batch: (batch["M1"], batch["targets"]),
        **extra,
    )


def test_windows_in_lanes_are_one_pass_over_the_series(store):
    trainer = make_trainer(store)
    trainer.fit()
    rows = torch.from_numpy(store.read_series("M1", "rows", 0))
    lanes = trainer._train.loader._order.lanes
    starts, lengths = lanes.lay_out(1, False)
    carried = torch.cat([out for out, _, _ in trainer.model.seen], dim=1)
    ends = store.read_series("M1", "ends", 0)
    for lane, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        first = int(ends[lanes.positions[start]]) - WINDOW
        whole, _ = trainer.model.cell(rows[None, first : first + int(length) * WINDOW])
        torch.testing.assert_close(carried[lane, : whole.shape[1]], whole[0], rtol=1e-5, atol=1e-6)


def test_the_gradient_does_not_flow_from_batch_to_batch_and_epochs_begin_anew(store):
    trainer = make_trainer(store, epochs=2)
    trainer.fit()
    num = len(trainer._train.loader)
    states = [state for _, state, _ in trainer.model.seen]
    assert not any(state.requires_grad for state in states)
    assert (states[0] == 0).all()
    assert (states[num] == 0).all()
    assert not (states[1] == 0).all()


def test_validation_has_a_state_of_its_own(store):
    lanes = plan_store_lanes(store, 3)
    val = Loader(store, 3, "cpu", order="lanes", lanes=lanes, fields=["M1", "targets"])
    trainer = make_trainer(store, val=val)
    trainer.fit()
    states = [state for _, state, _ in trainer.model.seen]
    assert (states[len(trainer._train.loader)] == 0).all()
    first = trainer.validate()
    assert trainer.validate() == first


def test_a_resumed_run_carries_on(store, tmp_path):
    whole = make_trainer(store, lr=0.1).fit()
    options = {"lr": 0.1, "run_dir": tmp_path / "run", "checkpoint_every_steps": 7}
    broken = make_trainer(store, **options)
    original = broken._after_batch

    def stop_at(position):
        original(position)
        if position == 14:
            raise OSError("power cut")

    broken._after_batch = stop_at
    with pytest.raises(OSError, match="power cut"):
        broken.fit()
    rest = make_trainer(store, **options).fit(resume=True)
    assert rest.losses == whole.losses[14:]


def test_lanes_that_have_ended_do_not_count(store):
    counted = []
    trainer = make_trainer(store)

    def criterion(outputs, targets):
        counted.append(len(outputs))
        return nn.functional.mse_loss(outputs, targets)

    trainer._step.parts.criterion = criterion
    report = trainer.fit().epochs[0]
    lanes = trainer._train.loader._order.lanes
    assert sum(counted) == report.num_samples == len(lanes.positions)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_a_bad_batch_leaves_no_trace_in_the_state(tmp_path, device, nonfinite):
    """The batch after it goes on from the state before it; a lane that began in it has begun."""
    store = make_store(tmp_path / "s", bad_row=41)
    trainer = make_trainer(store, lr=0.01, device=device, nonfinite=nonfinite, read_every=50)
    if nonfinite == "stop":
        with pytest.raises(NonFiniteError, match="M1 column 1 is nan"):
            trainer.fit()
    else:
        assert sum(np.isnan(trainer.fit().losses)) == 1
    seen = trainer.model.seen
    (bad,) = [number for number, (out, _, _) in enumerate(seen) if out.isnan().any()]
    assert 0 < bad < len(seen) - 1
    states = [state for _, state, _ in seen]
    assert all(state.isfinite().all() for state in states)
    assert torch.equal(states[bad + 1], states[bad])
    assert torch.isfinite(trainer._step.parts.recurrent.state_dict()["h"]).all()


def test_a_lane_that_begins_in_a_bad_batch_has_begun():
    model = Recurrent()
    recurrent = RecurrentState(torch.device("cpu"), model)
    first, reset = torch.randn(2, WINDOW, 2), torch.tensor([False, True])
    recurrent.run(model, first, torch.tensor([True, True]))
    before = recurrent.state_dict()["h"]
    recurrent.run(model, first * float("nan"), reset)
    recurrent.keep_if(torch.tensor(False))
    after = recurrent.state_dict()["h"]
    assert torch.equal(after[0], before[0])
    assert (after[1] == 0).all()
    recurrent.run(model, first, reset)
    kept = recurrent.state_dict()["h"]
    recurrent.keep_if(torch.tensor(True))
    assert torch.equal(recurrent.state_dict()["h"], kept)
