"""Draws in DataLoader workers, processes, threads, epochs and resumed runs: distinct, or refused."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from stoker.augment import (
    AlternatingFlip,
    Compose,
    MixUp,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
)
from stoker.errors import InputError

NUM = 24
IMAGE = torch.arange(3 * 16 * 16, dtype=torch.int64).remainder(251).to(torch.uint8).view(3, 16, 16)


class Augmented(Dataset):
    """The same picture at every index, so that equal results are equal draws."""

    def __init__(self, augment):
        self.augment = augment

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return self.augment.apply(IMAGE)


def crops():
    return Compose(
        [RandomHorizontalFlip(), RandomCrop(16, padding=8), RandomErasing(p=1.0)], seed=5
    )


def epochs(augment, context, num=2, **options):
    """The results of some epochs, as tuples that compare and hash."""
    torch.manual_seed(11)
    loader = DataLoader(
        Augmented(augment), batch_size=4, num_workers=2, multiprocessing_context=context, **options
    )
    return [[hash(one.numpy().tobytes()) for batch in loader for one in batch] for _ in range(num)]


@pytest.mark.parametrize(
    ("context", "persistent"),
    [
        ("fork", False),
        ("fork", True),
        # Each process imports torch: three to five seconds.
        pytest.param("spawn", True, marks=pytest.mark.slow),
        pytest.param("spawn", False, marks=pytest.mark.slow),
    ],
)
def test_workers_and_epochs_draw_differently_and_follow_torchs_seed(context, persistent):
    augment = crops()
    made = epochs(augment, context, persistent_workers=persistent)
    flat = [one for epoch in made for one in epoch]
    assert len(set(flat)) == len(flat), "each sample of each epoch has draws of its own"
    if context == "fork":  # once is enough: starting processes takes seconds
        again = epochs(crops(), context, persistent_workers=persistent)
        assert again == made, "torch.manual_seed reproduces the run"


def test_an_op_without_a_compose_draws_differently_in_every_worker():
    made = epochs(RandomErasing(p=1.0), "fork")
    flat = [one for epoch in made for one in epoch]
    assert len(set(flat)) > 0.9 * len(flat)


def test_a_compose_that_drew_before_the_workers_began_is_no_exception():
    augment = crops()
    augment.apply(IMAGE)
    augment.set_epoch(3)
    flat = [one for epoch in epochs(augment, "fork") for one in epoch]
    assert len(set(flat)) == len(flat)
    assert augment.state_dict() == {"seed": 5, "epoch": 3, "step": 0, "stream": 0}


class Stateful(Dataset):
    """Hands out the state in the worker before each sample, and can be told one."""

    def __init__(self, state=None):
        self.augment, self.state = crops(), state

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if self.state is not None:
            self.augment.load_state_dict(self.state)
            self.state = None
        state = self.augment.state_dict() if get_worker_info() else {}
        return state, self.augment.apply(IMAGE)


def test_a_workers_state_resumes_exactly_in_another_worker():
    torch.manual_seed(1)
    states, images = zip(*DataLoader(Stateful(), batch_size=None, num_workers=1), strict=True)
    torch.manual_seed(2)  # the new worker has another seed, and is told where the old one was
    _, again = zip(*DataLoader(Stateful(states[2]), batch_size=None, num_workers=1), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(images[2:], again, strict=False))


def _draw_in_child(augment, queue):
    try:
        augment.apply(IMAGE)
        queue.put("drew")
    except InputError as error:
        queue.put(str(error))


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_copy_in_another_process_is_refused_until_it_has_a_position(context):
    processes = multiprocessing.get_context(context)
    queue = processes.Queue()
    child = processes.Process(target=_draw_in_child, args=(crops(), queue))
    child.start()
    told = queue.get(timeout=120)
    child.join()
    assert "every process would draw the same numbers" in told
    assert "'stream': rank" in told


def _draw_as_rank(augment, rank, queue):
    augment.load_state_dict(augment.state_dict() | {"stream": rank})
    queue.put(hash(augment.apply(IMAGE).numpy().tobytes()))


def test_a_copy_with_a_stream_of_its_own_draws():
    processes = multiprocessing.get_context("fork")
    queue = processes.Queue()
    children = [
        processes.Process(target=_draw_as_rank, args=(crops(), rank, queue)) for rank in (1, 2)
    ]
    for child in children:
        child.start()
    drawn = {queue.get(timeout=120) for _ in children}
    for child in children:
        child.join()
    assert len(drawn) == 2


def test_a_copy_in_this_process_goes_on_as_the_original_would():
    augment = crops()
    augment.apply(IMAGE)
    twins = [copy.deepcopy(augment), pickle.loads(pickle.dumps(augment))]
    expected = augment.apply(IMAGE)
    assert all(torch.equal(twin.apply(IMAGE), expected) for twin in twins)


def test_threads_never_draw_the_same_step():
    augment, results = crops(), []

    def work():
        mine = [augment.draw(1, (16, 16), 3, "cpu").table.numpy().tobytes() for _ in range(40)]
        results.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 160
    assert augment.state_dict()["step"] == 160
    augment.seek(0)
    in_order = [augment.draw(1, (16, 16), 3, "cpu").table.numpy().tobytes() for _ in range(160)]
    assert set(in_order) == set(results), "the same draws as one thread makes, in another order"


class Mixed(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3, 4, 4), float(index)), 0


class Collate:
    def __init__(self):
        self.mix = MixUp(1.0, 2, seed=3)

    def __call__(self, samples):
        images = torch.stack([image for image, _ in samples])
        _, targets = self.mix(images, torch.tensor([0, 1]))
        return targets


def test_mixup_in_workers_mixes_each_batch_differently():
    torch.manual_seed(0)
    loader = DataLoader(Mixed(), batch_size=2, num_workers=2, collate_fn=Collate())
    shares = [tuple(batch.flatten().tolist()) for _ in range(2) for batch in loader]
    assert len(set(shares)) == len(shares)


def test_the_alternating_flip_is_refused_in_a_worker():
    with pytest.raises(InputError, match="AlternatingFlip in a DataLoader worker"):
        epochs(Compose([AlternatingFlip()]), "fork", num=1)
