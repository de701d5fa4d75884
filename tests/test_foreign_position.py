"""Any loader, resumed in the middle of an epoch: no sample is repeated, none is lost."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn

from stoker.errors import InputError
from stoker.train.foreign_position import ForeignPosition
from stoker.train.trainer import Trainer
from training_makers import make_model


class Counting(torch.utils.data.Dataset):
    """Rows that are noisy by torch's own generator, as an augmented dataset's are."""

    def __init__(self, noise=0.1):
        self.rows = torch.randn(47, 6, generator=torch.Generator().manual_seed(0))
        self.asked = []
        self.noise = noise

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        self.asked.append(number)
        return self.rows[number] + self.noise * torch.randn(6), self.rows[number, :1]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        yield from (self.data[number] for number in torch.randperm(47).tolist())


class Stateful:
    """A loader that knows its place."""

    batch_size = 5

    def __init__(self):
        self.data, self.at = Counting(), 0

    def __len__(self):
        return 9

    def __iter__(self):
        while self.at < 9:
            self.at += 1
            rows = [self.data[5 * self.at - 5 + number] for number in range(5)]
            yield tuple(map(torch.stack, zip(*rows, strict=True)))
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Sampler:
    """A sampler of one's own, with a state that every epoch changes."""

    def __init__(self, kind, seed):
        self.kind, self.epoch, self.numbers = kind, 0, list(range(47))
        self.draws = random.Random(seed) if kind == "python's" else np.random.default_rng(seed)

    def __len__(self):
        return 47

    def __iter__(self):
        self.epoch += 1
        if self.kind == "python's":
            return iter(self.draws.sample(range(47), 47))
        if self.kind == "numpy's":
            return iter(self.draws.permutation(47).tolist())
        np.random.default_rng(self.epoch if self.kind == "count" else 7).shuffle(self.numbers)
        return iter(self.numbers)


def make_foreign(kind, seed, noise=0.1):
    data, generator = Counting(noise), torch.Generator().manual_seed(seed)
    loaders = {
        "own generator": lambda: torch.utils.data.DataLoader(
            data, 5, shuffle=True, generator=generator
        ),
        "torch's generator": lambda: torch.utils.data.DataLoader(data, 5, shuffle=True),
        "sampler": lambda: torch.utils.data.DataLoader(
            data,
            batch_sampler=torch.utils.data.BatchSampler(
                torch.utils.data.RandomSampler(data, generator=generator), 5, drop_last=True
            ),
        ),
        "workers": lambda: torch.utils.data.DataLoader(
            data, 5, shuffle=True, generator=generator, num_workers=1
        ),
        "replacement": lambda: torch.utils.data.DataLoader(
            data, 5, sampler=torch.utils.data.RandomSampler(data, True, 60, generator=generator)
        ),
        "stream": lambda: torch.utils.data.DataLoader(Stream(data), 5),
        "list": lambda: [
            (rows, rows[:, :1]) for rows in torch.ones(9, 5, 6) * torch.arange(9.0)[:, None, None]
        ],
        "stateful": Stateful,
    }
    return loaders[kind]()


def train_foreign(kind, seed, stop_at=None, resume=False, device="cpu", noise=0.1, **options):
    model = make_model(dropout=0.3).to(device)
    loader = make_foreign(kind, seed, noise)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run_dir = options.pop("run_dir", None)
    config = {"epochs": 2, "checkpoint_every_steps": 2, "precision": "fp32", **options}
    trainer = Trainer(
        model,
        loader,
        None,
        nn.functional.mse_loss,
        optimizer,
        None,
        config,
        device,
        run_dir=run_dir,
    )
    original = trainer._after_batch

    def stop(position):
        original(position)
        if stop_at == (trainer._at.epoch, position):
            raise KeyboardInterrupt  # saves nothing, as little as `kill -9` does

    trainer._after_batch = stop
    torch.manual_seed(seed)
    with pytest.raises(KeyboardInterrupt) if stop_at else contextlib.nullcontext():
        trainer.fit(resume=resume)
    return trainer, trainer.history, loader


@pytest.mark.thinned
@pytest.mark.parametrize("stop_at", [(0, 3), (1, 9)])
@pytest.mark.parametrize(
    "kind",
    ["own generator", "torch's generator", "sampler", "replacement", "stream", "list", "stateful"],
)
def test_any_loader_resumed_in_the_middle_repeats_and_loses_nothing(tmp_path, kind, stop_at):
    _, whole, _ = train_foreign(kind, 1)
    train_foreign(kind, 1, stop_at, run_dir=tmp_path / "run")
    trainer, rest, loader = train_foreign(kind, 8, resume=True, run_dir=tmp_path / "run")
    epoch, position = stop_at
    per_epoch = len(whole.losses) // 2
    done = epoch * per_epoch + position // 2 * 2
    assert rest.losses == whole.losses[done:]
    said = [note for note in trainer.history.notes if "of the epoch" in note]
    if kind in ("stateful",) or done % per_epoch == 0:
        assert not said
    elif kind in ("stream", "list"):
        assert f"the first {done % per_epoch} batches of the epoch are read again" in said[0]
    else:
        assert f"continues after the first {done % per_epoch} batches of the epoch" in said[0]
        left = len(whole.losses) - done
        assert len(loader.dataset.asked) <= left * 5, "nothing was loaded to be left out"


@pytest.mark.parametrize("kind", ["python's", "numpy's", "count", "in place"])
def test_a_sampler_with_a_state_of_its_own_goes_on(kind):
    """Its generator, its count of epochs, or the list that it shuffles again and again."""

    def run(place, epochs):
        for epoch in range(epochs, 3):
            place.set_epoch(epoch)
            rest = place.begin()
            for batch in place.loader if rest is None else rest:
                place.num_taken += 1
                yield batch.tolist()
            place.end()

    def make(seed):
        data = list(range(47))
        return ForeignPosition(torch.utils.data.DataLoader(data, 5, sampler=Sampler(kind, seed)))

    whole = list(run(make(1), 0))
    for taken in (14, 20):
        place = make(1)
        for _ in zip(range(taken), run(place, 0), strict=False):
            pass
        again = make(8 if "'s" in kind else 1)
        again.load_state_dict(place.state_dict())
        assert list(run(again, (taken - 1) // 10)) == whole[taken:]


@pytest.mark.parametrize("stop_at", [(0, 3), (1, 3)])
def test_persistent_workers_go_on_with_the_same_samples(tmp_path, monkeypatch, stop_at):
    """They draw a seed in the first epoch only. The iterators are stood in for: processes would take seconds."""

    class Persistent:
        def __init__(self, data):
            self.sampler = torch.utils.data.RandomSampler(data)
            self.batch_sampler = torch.utils.data.BatchSampler(self.sampler, 5, drop_last=False)
            self.dataset, self.persistent_workers = data, True
            self.generator = self._iterator = None

        def __iter__(self):
            if self._iterator is None:
                self._iterator = torch.empty((), dtype=torch.int64).random_(
                    generator=self.generator
                )
            return map(self.fetch, self.batch_sampler)

        def fetch(self, numbers):
            return tuple(map(torch.stack, zip(*(self.dataset[n] for n in numbers), strict=True)))

    monkeypatch.setitem(
        make_foreign.__globals__,
        "make_foreign",
        lambda kind, seed, noise: Persistent(Counting(0.0)),
    )
    options = {"epochs": 3}
    _, whole, _ = train_foreign("persistent", 1, **options)
    train_foreign("persistent", 1, stop_at, run_dir=tmp_path / "run", **options)
    _, rest, _ = train_foreign("persistent", 8, resume=True, run_dir=tmp_path / "run", **options)
    assert rest.losses == whole.losses[-len(rest.losses) :]


def test_a_loader_with_workers_goes_on_with_the_same_samples(tmp_path):
    _, whole, _ = train_foreign("workers", 1)
    train_foreign("workers", 1, (0, 6), run_dir=tmp_path / "run")
    _, rest, _ = train_foreign("workers", 8, resume=True, run_dir=tmp_path / "run")
    # The noise that worker processes draw begins anew; the samples, and so the losses but for that, do not.
    assert len(rest.losses) == len(whole.losses) - 6
    assert np.allclose(rest.losses, whole.losses[6:], atol=0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["own generator", "torch's generator", "stream"])
def test_any_loader_resumed_on_a_gpu_repeats_and_loses_nothing(tmp_path, kind):
    # Without noise: a thread fetches ahead, so the generator it draws from is ahead of the checkpoint.
    options = {"device": "cuda", "noise": 0.0, "capture": "off"}
    _, whole, _ = train_foreign(kind, 1, **options)
    train_foreign(kind, 1, (1, 4), run_dir=tmp_path / "run", **options)
    _, rest, _ = train_foreign(kind, 8, resume=True, run_dir=tmp_path / "run", **options)
    per_epoch = len(whole.losses) // 2
    assert rest.losses == pytest.approx(whole.losses[per_epoch + 4 :], rel=1e-3, abs=1e-5)


def test_a_rollback_meets_the_same_batches_in_the_same_order():
    seen = []

    def unpack(batch):
        seen.append(batch[0].clone())
        return batch

    data = torch.utils.data.TensorDataset(torch.randn(20, 6), torch.randn(20, 1))
    data.tensors[0][7, 0] = float("nan")
    loader = torch.utils.data.DataLoader(
        data, 5, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"nonfinite": "rollback", "read_every": 1}
    trainer = Trainer(
        model, loader, None, nn.functional.mse_loss, optimizer, None, config, "cpu", unpack=unpack
    )
    trainer.fit()
    bad = next(number for number, rows in enumerate(seen) if rows.isnan().any())
    again = seen[bad + 1 :]
    assert len(again) == 4
    for one, other in zip(seen[: bad + 1], again, strict=False):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert trainer.history.epochs[0].num_samples == 15


def loader_of(samples=40, size=5, shuffle=True, drop_last=False):
    data = torch.utils.data.TensorDataset(torch.arange(samples))
    return torch.utils.data.DataLoader(data, size, shuffle, drop_last=drop_last)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (loader_of(size=4), "batch size is 4, and was 5"),
        (loader_of(samples=41), "samples is 41, and was 40"),
        (loader_of(shuffle=False), "order is SequentialSampler, and was RandomSampler"),
        ([1] * 9, "batches is 9, and was 8"),
    ],
)
def test_a_loader_that_was_changed_within_an_epoch_is_refused(other, words):
    # By number of batches it would go on elsewhere, and train on samples twice or never.
    place = ForeignPosition([1] * 8 if isinstance(other, list) else loader_of())
    place.set_epoch(3)
    assert ForeignPosition(other).load_state_dict(place.state_dict()) is None, "a new epoch may"
    place.begin()
    place.num_taken = 2
    state = place.state_dict()
    with pytest.raises(InputError, match=words):
        ForeignPosition(other).load_state_dict(state)
    same = loader_of(drop_last=True) if not isinstance(other, list) else [1] * 8
    assert "the first 2 batches" in ForeignPosition(same).load_state_dict(state)
    del state["made"]  # as older checkpoints are
    assert "the first 2 batches" in ForeignPosition(same).load_state_dict(state)


def test_a_loader_with_other_generators_is_refused():
    state = ForeignPosition(make_foreign("own generator", 1)).state_dict()
    with pytest.raises(
        InputError, match="0 random generators of its own, the one that was saved had 1"
    ):
        ForeignPosition(make_foreign("list", 1)).load_state_dict(state)
