"""A mask value that a loss rejects is found before the step; the preview of class folders."""

from __future__ import annotations

import pytest
import torch

from stoker import GPUAugmentation, Loader, ProgressiveAugmentation, Trainer
from stoker.augment import (
    AlternatingFlip,
    Compose,
    RandAugment,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomRotation,
)
from stoker.augment.guard import check_loss
from stoker.augment.preview import read_samples
from stoker.errors import InputError
from stoker.packing import pack
from stoker.sources.arrays import ArraysSource


@pytest.mark.parametrize(
    ("ops", "writes"),
    [
        ([RandomHorizontalFlip()], False),
        ([RandomCrop(4)], False),
        ([RandomCrop(4, 1)], True),
        ([RandomCrop(4, 1, "reflect")], False),
        ([RandomRotation(10)], True),
        ([RandomRotation(10, p=0.0)], False),
        ([RandomAffine()], False),
        ([RandomAffine(scale=(0.5, 1.0))], True),
        ([RandAugment()], True),
    ],
)
def test_ops_that_write_the_ignore_index_need_a_loss_that_ignores_it(ops, writes):
    compose = Compose(ops)
    for loss in (torch.nn.CrossEntropyLoss(), torch.nn.functional.cross_entropy):
        if writes:
            with pytest.raises(InputError, match="writes 255 in masks") as caught:
                check_loss(loss, compose)
            assert "torch.nn.CrossEntropyLoss(ignore_index=255)" in str(caught.value)
        else:
            check_loss(loss, compose)
    check_loss(torch.nn.CrossEntropyLoss(ignore_index=255), compose)
    check_loss(torch.nn.CrossEntropyLoss(), Compose(ops, ignore_index=-100))
    check_loss(torch.nn.MSELoss(), compose)


def test_a_later_stage_of_a_schedule_counts_too():
    schedule = ProgressiveAugmentation(
        {0: Compose([RandomHorizontalFlip()]), 5: Compose([RandomRotation(9)])}
    )
    with pytest.raises(InputError, match="RandomRotation writes 255"):
        check_loss(torch.nn.CrossEntropyLoss(), schedule)


@pytest.fixture
def segmentation_store(tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    path = tmp_path / "set.npz"
    images = rng.integers(0, 256, (12, 3, 8, 8), dtype=np.uint8)
    np.savez(path, images=images, masks=rng.integers(0, 4, (12, 8, 8)))
    pack(ArraysSource((path,)), tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("loader", ["stoker", "torch"])
def test_a_trainer_refuses_before_its_first_step(segmentation_store, loader):
    model = torch.nn.Conv2d(3, 4, 1)
    before = model.weight.detach().clone()

    def train(loss):
        batches = Loader(segmentation_store, 4, device="cpu")
        if loader == "torch":
            batches = [(torch.rand(4, 3, 8, 8), torch.randint(0, 4, (4, 8, 8)))]
        trainer = Trainer(
            model,
            batches,
            None,
            criterion=loss,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            device="cpu",
            gpu_augmentation=GPUAugmentation(),
            config={"epochs": 1},
        )
        trainer.fit()

    with pytest.raises(InputError, match="writes 255 in masks"):
        train(torch.nn.CrossEntropyLoss())
    assert torch.equal(model.weight, before)
    train(torch.nn.CrossEntropyLoss(ignore_index=255))
    assert not torch.equal(model.weight, before)


def test_the_alternating_flip_follows_a_resident_loader_and_no_other(segmentation_store):
    with Loader(
        segmentation_store, 4, device="cpu", augment=Compose([AlternatingFlip()])
    ) as loader:
        assert loader.tier == "resident"
        epochs = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            seen = {}
            for batch in loader:
                for place, image in zip(batch.positions, batch["images"], strict=True):
                    seen[int(place)] = image
            epochs.append(seen)
    first, second = epochs
    assert all(torch.equal(first[place].flip(-1), second[place]) for place in first)
    with pytest.raises(InputError, match="AlternatingFlip with data that is"):
        Loader(
            segmentation_store,
            4,
            device="cpu",
            data_bytes=5632,
            augment=Compose([AlternatingFlip()]),
        )


# -- the preview of class folders ----------------------------------------------------------------------


def test_the_preview_takes_the_class_folders_that_pack_takes(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, count in (("cats", 3), ("dogs", 2), ("empty", 0)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(count):
            picture = image.new("RGB", (6, 5), (number, 2, 3))
            picture.save(tmp_path / "photos" / name / f"{number}.png")
    samples = read_samples(tmp_path / "photos", None, 4, None)
    assert [sample.name for sample in samples] == [
        "cats/0.png",
        "dogs/0.png",
        "cats/1.png",
        "dogs/1.png",
    ]
    flat = read_samples(tmp_path / "photos" / "cats", None, 2, None)
    assert [sample.name for sample in flat] == ["0.png", "1.png"]
