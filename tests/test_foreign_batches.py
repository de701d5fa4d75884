"""Batches of other loaders: those on the device are taken as they are, and a step costs few calls of Python."""

from __future__ import annotations

import cProfile
import pstats

import pytest
import torch
from torch import nn

from stoker.errors import InputError
from stoker.loader.prefetch import Prefetcher
from stoker.train.batches import Feed, unpack_by_name
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
    config = {"epochs": 1, "precision": "fp32"}
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
        ((1, 2, 3), "(batch[0], batch[1])"),
    ]
    for batch, words in cases:
        with pytest.raises(InputError) as error:
            unpack_by_name(batch)
        assert words in error.value.fix
