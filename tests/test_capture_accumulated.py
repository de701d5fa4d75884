"""Accumulated batches are replayed one by one: the same numbers as eager passes, whatever happens between them.

On a CPU the graphs are made of paper (`paper_graphs.py`).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.train.graphs.trainer_step import CapturedPass
from stoker.train.trainer import Trainer
from training_makers import make_model, out_of_memory, weights, write_rows

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path)


class Normed(nn.Module):
    """With running statistics, a parameter that no loss reaches, and one that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.unused = nn.Parameter(torch.ones(3))
        self.net[0].bias.requires_grad_(False)

    def forward(self, x):
        return self.net(x)


class OwnMomentum(torch.optim.Optimizer):
    """An optimizer of one's own that counts on the host."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.add_(parameter.grad, alpha=-group["lr"] / state["count"] ** 0.5)


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def batches_of(kind, rows, device):
    if kind in ("resident", "chunked"):
        chunk_bytes = 2000 if kind == "chunked" else None
        return Loader(rows, 20, device, order="shuffled", seed=1, chunk_bytes=chunk_bytes)
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(203, 6), torch.randn(203, 1))
    if kind == "list":
        return list(DataLoader(data, 20))
    return DataLoader(data, 20, shuffle=True, generator=torch.Generator().manual_seed(5))


def fit(loader, device, capture="auto", model=None, kind=torch.optim.AdamW, **config):
    torch.manual_seed(0)
    model = (model or Normed()).to(device)
    optimizer = kind(model.parameters(), lr=0.01)
    config = {
        "epochs": 4,
        "capture": capture,
        "precision": "fp32",
        "gradient_accumulation_steps": 3,
        **config,
    }
    trainer = Trainer(model, loader, None, nn.functional.mse_loss, optimizer, None, config, device)
    return trainer, trainer.fit(quiet=True)


@pytest.mark.parametrize("kind", ["resident", "chunked", "loader", "list"])
def test_it_trains_as_the_eager_run_from_every_loader(rows, device, kind):
    trainer, history = fit(batches_of(kind, rows, device), device, "on")
    eager, expected = fit(batches_of(kind, rows, device), device, "off")
    assert isinstance(trainer._captured, CapturedPass)
    assert trainer._captured.active
    assert "captured without its update" in trainer._captured.reason
    assert len(history.losses) == 44
    torch.testing.assert_close(history.losses, expected.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights(trainer), weights(eager), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.optim.SGD, OwnMomentum])
@pytest.mark.parametrize("steps", [2, 50])
def test_any_optimizer_and_number_of_batches(rows, device, kind, steps):
    both = []
    for capture in ("on", "off"):
        loader = batches_of("resident", rows, device)
        options = {"gradient_accumulation_steps": steps}
        trainer, _ = fit(loader, device, capture, kind=kind, **options)
        both.append(weights(trainer))
    torch.testing.assert_close(*both, rtol=1e-3, atol=1e-4)


def test_a_wrong_graph_is_caught_in_the_middle_of_an_update(rows, device):
    class Alternates(nn.Module):
        """Reads a number that no graph would follow."""

        def __init__(self):
            super().__init__()
            self.net, self.turn = make_model(), [[iter(range(10_000))]]

        def forward(self, x):
            return self.net(x) * (1.0 + 0.5 * (next(self.turn[0][0]) % 2))

    trainer, history = fit(batches_of("resident", rows, device), device, model=Alternates())
    assert trainer._captured.is_given_up
    assert "differed" in trainer._captured.reason
    assert all(map(torch.isfinite, map(torch.tensor, history.losses)))


def test_giving_up_within_an_update_keeps_its_gradients(rows, device, monkeypatch):
    given_up = []

    def misjudge(self, work):
        given_up.append(self.step.accumulation.num_batches)
        self.give_up("planted")
        return self._run_eagerly(work)

    monkeypatch.setattr(CapturedPass, "_replay_and_check", misjudge)
    trainer, _ = fit(batches_of("resident", rows, device), device)
    eager, _ = fit(batches_of("resident", rows, device), device, "off")
    assert len(given_up) == 1
    assert trainer.history.fallback is not None
    torch.testing.assert_close(weights(trainer), weights(eager), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["_record", "_replay_and_check", "_warm_up"])
def test_memory_that_runs_out_repeats_the_whole_update(rows, device, monkeypatch, where):
    original, failures = getattr(CapturedPass, where), [1]

    def fail(self, *args):
        if self.step.accumulation.num_batches > 1 and failures:
            failures.pop()
            raise out_of_memory()
        return original(self, *args)

    monkeypatch.setattr(CapturedPass, where, fail)
    options = {"kind": OwnMomentum, "gradient_accumulation_steps": 2}
    trainer, history = fit(batches_of("resident", rows, device), device, **options)
    eager, expected = fit(batches_of("resident", rows, device), device, "off", **options)
    assert not failures
    assert "memory ran out" in trainer._captured.reason
    torch.testing.assert_close(history.losses, expected.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights(trainer), weights(eager), rtol=1e-4, atol=1e-5)


def test_memory_that_runs_out_in_a_short_batch_repeats_the_replays_before_it(rows, device):
    class Narrow(Normed):
        failures = 0

        def forward(self, x):
            if len(x) == 3 and Narrow.failures:
                Narrow.failures -= 1
                raise out_of_memory()
            return self.net(x)

    def model(failures):
        Narrow.failures = failures
        return Narrow()

    options = {"gradient_accumulation_steps": 2, "epochs": 3}
    # First: a run on a GPU begins with the parts that the last one had to make.
    loader = batches_of("resident", rows, device)
    _, expected = fit(loader, device, "off", model=model(0), kind=momentum, **options)
    loader = batches_of("resident", rows, device)
    trainer, history = fit(loader, device, model=model(1), kind=momentum, **options)
    assert any("memory ran out" in note.text for note in trainer.history.told)
    assert len(history.losses) == len(expected.losses)
    assert torch.isfinite(weights(trainer)).all()
    # Parts of a batch have statistics of their own, in a plain loop too: the first epoch's replays are exact.
    torch.testing.assert_close(history.losses[:10], expected.losses[:10], rtol=1e-4, atol=1e-5)


def test_sparse_gradients_stay_sparse(device):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.out = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 1)

        def forward(self, x):
            return self.out(self.table(x).mean(1))

    torch.manual_seed(2)
    batches = [(torch.randint(50, (8, 3)), torch.randn(8, 1)) for _ in range(12)]
    runs = []
    for capture in ("auto", "off"):
        trainer, _ = fit(batches, device, capture, model=Words(), kind=torch.optim.SGD)
        runs.append(weights(trainer))
        if capture == "auto":
            assert trainer._captured is None
            assert any("sparse gradients" in note.text for note in trainer.history.told)
    torch.testing.assert_close(*runs)


def test_parameters_that_are_thawed_get_their_gradients(rows, device):
    class Thaw:
        def __init__(self, model):
            self.model, self.num_steps = model, 0

        def step(self):
            self.num_steps += 1
            self.model.net[0].bias.requires_grad_(self.num_steps > 8)

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    runs = []
    for capture in ("on", "off"):
        model = Normed().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        config = {"epochs": 5, "capture": capture, "gradient_accumulation_steps": 2}
        config["precision"] = "fp32"
        loader = batches_of("resident", rows, device)
        trainer = Trainer(
            model, loader, None, nn.functional.mse_loss, optimizer, Thaw(model), config, device
        )
        trainer.fit(quiet=True)
        runs.append(weights(trainer))
        if capture == "on":
            assert trainer._captured.active
            assert any("thawed" in note.text for note in trainer.history.told)
    torch.testing.assert_close(*runs, rtol=1e-3, atol=1e-4)


def test_a_resumed_run_is_the_unbroken_one(rows, device, tmp_path):
    def run(folder, epochs, resume=False):
        torch.manual_seed(0)
        model = Normed().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        config = {"epochs": epochs, "gradient_accumulation_steps": 3, "precision": "fp32"}
        loader = batches_of("resident", rows, device)
        loss = nn.functional.mse_loss
        trainer = Trainer(
            model, loader, None, loss, optimizer, None, config, device, run_dir=tmp_path / folder
        )
        trainer.fit(resume=resume, quiet=True)
        return weights(trainer)

    whole = run("whole", 4)
    run("parts", 2)
    torch.testing.assert_close(run("parts", 4, resume=True), whole, rtol=1e-4, atol=1e-5)


def test_demanded_and_impossible_is_an_error(rows, device):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.num_calls = make_model(), 0

        def forward(self, x):
            self.num_calls += 1
            return self.net(x)

    with pytest.raises(InputError, match="num_calls"):
        fit(batches_of("resident", rows, device), device, "on", model=Counts())
