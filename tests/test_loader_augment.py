"""A loader that augments while it gathers: the same pictures in every tier, and after a resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stoker.augment import GPUAugmentation, ProgressiveAugmentation, StrongGPUAugmentation
from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.store.fields import Dense
from store_makers import write_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NORM = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    shards = [
        {
            "images": Dense(rng.integers(0, 256, (size, 3, 12, 10), dtype=np.uint8)),
            "masks": Dense(rng.integers(0, 5, (size, 12, 10), dtype=np.uint8)),
            "labels": Dense(rng.integers(0, 9, size)),
        }
        for size in (23, 30)
    ]
    return write_store(tmp_path_factory.mktemp("pictures"), shards)


def run(loader):
    return [(b["images"].cpu(), b["masks"].cpu(), b["labels"].cpu()) for b in loader]


def same(one, two) -> bool:
    pairs = [(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_equal_to_augmenting_the_plain_batches(store, device, order):
    with (
        Loader(store, 8, device, order=order, augment=GPUAugmentation(**NORM)) as augmented,
        Loader(store, 8, device, order=order) as plain,
    ):
        by_hand = GPUAugmentation(**NORM)
        for _ in range(2):
            by_hand.set_epoch(augmented.epoch)
            wanted = []
            for batch in plain:
                images, masks = by_hand(batch["images"], batch["masks"])
                wanted.append((images.cpu(), masks.cpu(), batch["labels"].cpu()))
            assert same(run(augmented), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_chunked_and_straight_give_the_same_as_resident(store, device):
    options = {"augment": GPUAugmentation(), "order": "sequential"}
    with Loader(store, 8, device, **options) as resident:
        wanted = run(resident)
    with Loader(store, 8, device, chunk_bytes=5000, **options) as chunked:
        assert chunked.tier == "chunked"
        assert same(run(chunked), wanted)


def test_a_resumed_epoch_goes_on_with_the_same_draws(store):
    with Loader(store, 8, "cpu", order="shuffled", augment=GPUAugmentation()) as loader:
        whole = run(loader)
        loader.set_epoch(0)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = loader.state_dict()
    with Loader(store, 8, "cpu", order="shuffled", augment=GPUAugmentation()) as other:
        other.load_state_dict(state)
        assert same(run(other), whole[3:])


def test_a_progressive_schedule_reaches_a_loader_that_already_runs(store):
    stages = {0: GPUAugmentation(0.0, 0, 0, 0, 0), 1: StrongGPUAugmentation(1.0)}
    schedule = ProgressiveAugmentation(stages)
    with Loader(store, 8, "cpu", augment=schedule) as loader:
        run(loader)
        assert schedule.current is stages[0]
        run(loader)
        assert schedule.current is stages[1]


def test_validation_is_never_augmented(store):
    augmentation = GPUAugmentation(1.0, **NORM)
    with (
        Loader(store, 53, "cpu", augment=augmentation.validation()) as loader,
        Loader(store, 53, "cpu") as plain,
    ):
        (images, masks, _), (raw, raw_masks, _) = run(loader)[0], run(plain)[0]
    mean, std = (torch.tensor(NORM[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(images, (raw / 255 - mean) / std, rtol=0, atol=1e-6)
    assert torch.equal(masks, raw_masks)


def test_without_images_it_says_what_is_missing(tmp_path):
    store = write_store(tmp_path / "s", [{"features": Dense(np.zeros((4, 3), "f4"))}])
    with pytest.raises(InputError, match="no images; it has features"):
        Loader(store, 2, "cpu", augment=GPUAugmentation())


@pytest.mark.parametrize(
    "make", [GPUAugmentation, lambda: ProgressiveAugmentation({0: GPUAugmentation()})]
)
@pytest.mark.parametrize("data_bytes", [None, 8_000])
def test_loaders_that_share_an_augmentation_draw_as_if_each_had_its_own(store, make, data_bytes):
    options = {"order": "shuffled", "data_bytes": data_bytes}
    with Loader(store, 8, "cpu", augment=make(), **options) as loader:
        alone = run(loader)
    shared = make()
    with (
        Loader(store, 8, "cpu", augment=shared, **options) as one,
        Loader(store, 8, "cpu", augment=shared, **options) as two,
    ):
        pairs = list(zip(one, two, strict=True))
        assert same(run(first for first, _ in pairs), alone)
        assert same(run(second for _, second in pairs), alone)


def test_a_draw_by_hand_in_the_middle_of_an_epoch_changes_no_batch(store):
    with Loader(store, 8, "cpu", augment=GPUAugmentation()) as loader:
        alone = run(loader)
    shared = GPUAugmentation()
    with Loader(store, 8, "cpu", augment=shared) as loader:
        taken = []
        for batch in loader:
            taken += run([batch])
            shared(torch.zeros(2, 3, 12, 10, dtype=torch.uint8))
    assert same(taken, alone)
