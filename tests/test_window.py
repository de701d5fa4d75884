"""Running out of memory: wherever it happens, the run ends where one with enough memory ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.store.fields import Dense
from stoker.train.trainer import Trainer
from store_makers import write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(100, 5)).astype("f4")
    data = {"features": Dense(features), "targets": Dense(features[:, :1] * 3)}
    return write_store(tmp_path_factory.mktemp("rows"), [data])


class Net(nn.Module):
    """A model with a buffer that counts its calls, and room for `most` rows at a time."""

    def __init__(self, most, where):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros(()))
        self.most, self.where = most, where

    def forward(self, x):
        self.seen += len(x)
        if self.where == "forward" and len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        result = self.body(x)
        if self.where == "backward" and len(x) > self.most:
            result.register_hook(self._fail)
        return result

    def _fail(self, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class Failing(torch.optim.SGD):
    """An optimizer that runs out of memory the first few times."""

    failures = 0
    _step_supports_amp_scaling = True  # as a fused one: it changes nothing before it has its memory

    def step(self, closure=None):
        if Failing.failures:
            Failing.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().step(closure)


def train(store, most, where, steps=1, failures=0, **options):
    model = Net(most, where)
    kind = Failing if where == "optimizer" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    Failing.failures = failures
    loader = Loader(store, 16, "cpu", order="shuffled", seed=3)
    config = {"epochs": 2, "accumulation_steps": steps, **options}
    trainer = Trainer(model, loader, None, nn.functional.mse_loss, optimizer, None, config, "cpu")
    return trainer, trainer.fit()


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
    assert short._window.footing.pass_size <= most
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
