"""Batches of other loaders: those on the device are taken as they are, and a step costs few calls of Python."""

from __future__ import annotations

import cProfile
import pstats

import pytest
import torch
from torch import nn

from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.loader.prefetch import Prefetcher
from stoker.train.batches import Feed, unpack_by_name
from stoker.train.step import run_model
from stoker.train.trainer import Trainer
from training_makers import make_model

pytestmark = pytest.mark.usefixtures("one_thread")


class Held:
    """A loader of one's own: batches that are anywhere."""

    def __init__(self, batches, steps=None):
        self.batches, self.steps = batches, steps or len(batches)

    def __len__(self):
        return self.steps

    def __iter__(self):
        return (self.batches[number % len(self.batches)] for number in range(self.steps))


def make_batches(device, count=6):
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randn(8, 7, generator=generator) for _ in range(count)]
    return [(pair[:, :6].to(device), pair[:, 6:].to(device)) for pair in pairs]


@pytest.mark.gpu
@pytest.mark.parametrize("make", [list, Held])
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_batches_on_the_gpu_are_taken_without_a_thread(make, where):
    batches = make_batches(where)
    feed = Feed(make(batches), torch.device("cuda:0"))
    for epoch in range(2):
        feed.set_epoch(epoch)
        works = list(feed)
        assert len(works) == len(batches)
        for work, (x, y) in zip(works, batches, strict=True):
            assert work.inputs.is_cuda
            assert torch.equal(work.inputs.cpu(), x.cpu())
            assert torch.equal(work.targets.cpu(), y.cpu())
        assert isinstance(feed.loader, Prefetcher) == (where == "cpu")


def test_a_step_of_the_trainer_is_few_calls_more_than_a_loop():
    """The difference was 54 calls, some 10 µs, when this was written: a plain loop makes 430 calls a step."""
    batches, steps = make_batches("cpu"), 50

    def count_calls(run):
        profile = cProfile.Profile()
        profile.runcall(run, steps)
        return pstats.Stats(profile).total_calls / steps

    models = [make_model() for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in models]
    held = Held(batches)
    config = {"epochs": 1, "precision": "fp32", "clip_norm": 1.0}
    trainer = Trainer(
        models[0], held, None, nn.functional.mse_loss, optimizers[0], None, config, "cpu"
    )

    def train(count):
        held.steps = count
        trainer.train_epoch()

    def train_by_hand(count):
        for number in range(count):
            x, y = batches[number % len(batches)]
            loss = nn.functional.mse_loss(models[1](x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
            optimizers[1].step()
            optimizers[1].zero_grad(set_to_none=True)
            loss.detach()

    for run in (train, train_by_hand):
        run(3)
    assert count_calls(train) - count_calls(train_by_hand) < 100


def test_what_to_type_names_the_batch():
    cases = [
        ({"input_ids": 1, "labels": 2}, "(batch['input_ids'], batch['labels'])"),
        (torch.ones(3), "(batch, batch)"),
        ((1, 2, 3), "((batch[0], batch[1]), batch[2])"),
        ([1], "(batch[0], batch[0])"),
        ({"labels": 1, "ids": 2, "mask": 3}, "((batch['ids'], batch['labels']), batch['mask'])"),
        ({"y": 1, "ids": 2, "at": 3}, "((batch['ids'], batch['at']), batch['y'])"),
    ]
    for batch, words in cases:
        with pytest.raises(InputError) as error:
            unpack_by_name(batch)
        assert words in error.value.fix


class Pairwise(nn.Module):
    """Needs two arguments, as a Siamese network does."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 1)

    def forward(self, one, other, *, scale=1.0):
        return scale * (self.body(one) - self.body(other))


class Whole(Pairwise):
    """Takes one tuple or dict."""

    def forward(self, both, scale=1.0):
        one, other = both.values() if isinstance(both, dict) else both
        return super().forward(one, other, scale=scale)


@pytest.mark.parametrize("model", [Pairwise, Whole])
@pytest.mark.parametrize("form", [tuple, list, dict])
def test_a_model_of_several_arguments_gets_each(model, form):
    torch.manual_seed(0)
    one, other, y = torch.randn(40, 6), torch.randn(40, 6), torch.randn(40, 1)
    inputs = {"one": one, "other": other} if form is dict else form((one, other))
    plain, module = Pairwise(), model()
    module.load_state_dict(plain.state_dict())
    expected = nn.functional.mse_loss(plain(one, other), y)
    expected.backward()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batches, loss = [(inputs, y)], nn.functional.mse_loss
    config = {"clip_norm": None, "epochs": 1}
    trainer = Trainer(module, batches, batches, loss, optimizer, None, config, "cpu")
    assert trainer.fit(quiet=True).losses == [pytest.approx(expected.item())]
    stepped = plain.body.weight - 0.1 * plain.body.weight.grad
    torch.testing.assert_close(module.body.weight, stepped)


def test_a_wrapped_model_is_called_as_the_model_is():
    class Wrapped(nn.Module):
        forward = staticmethod(lambda *args, **named: (args, named))

    one, other = torch.ones(1), torch.zeros(1)
    assert run_model(Wrapped(), (one, other), Pairwise()) == ((one, other), {})
    assert run_model(Wrapped(), {"one": one}, Pairwise()) == ((), {"one": one})
    assert run_model(Wrapped(), (one, other), Whole()) == (((one, other),), {})
    assert run_model(Wrapped(), one, Pairwise()) == ((one,), {})


def test_a_loader_of_three_tensors_is_not_trained_on_two():
    # `features` and `targets` are the first two names: the second input was taken for the targets.
    x, y = torch.randn(40, 6), torch.randn(40, 1)
    model = Pairwise()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Loader((x, x, y), 10, "cpu") as loader:
        with pytest.raises(InputError, match="yields 3 tensors") as caught:
            Trainer(model, loader, None, nn.functional.mse_loss, optimizer)
        unpack = eval(caught.value.fix.partition("unpack=")[2].removesuffix(")"))
        trainer = Trainer(model, loader, None, nn.functional.mse_loss, optimizer, unpack=unpack)
        assert trainer.fit(quiet=True).epochs[0].train_loss > 0
        assert not any("neither input" in note for note in trainer.history.notes)


def test_fields_that_are_not_trained_on_are_noted():
    x, y = torch.randn(40, 6), torch.randn(40, 1)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Loader({"features": x, "targets": y, "weight": y}, 10, "cpu") as loader:
        notes = Trainer(model, loader, None, nn.functional.mse_loss, optimizer).history.notes
    assert any(note.startswith("neither input nor target: weight;") for note in notes)
