"""Another default device changes no number: many scripts begin with `torch.set_default_device("cuda")`.

On a CPU the default device is "meta", whose tensors have no values: whoever makes one by chance fails.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import stoker
from stoker.augment import Compose, Normalize, RandAugment, RandomCrop, RandomHorizontalFlip
from stoker.loader.background import Background
from stoker.train.trainer import Trainer

PICTURES = torch.randint(0, 255, (64, 3, 24, 24), dtype=torch.uint8)
LABELS = torch.randint(0, 3, (64,))
AUGMENT = [RandomHorizontalFlip(0.5), RandomCrop(20, padding=2), RandAugment(), Normalize(0.5, 0.2)]


def make_network(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 20 * 20, 3, device=device))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loader(device, augment=None):
    data = {"images": PICTURES, "labels": LABELS}
    return stoker.Loader(data, 8, device, shuffle=True, seed=3, augment=augment)


def by_the_trainer(device):
    model, optimizer = make_network(device)
    trainer = Trainer(
        model, loader(device), loader(device), cross_entropy, optimizer, device=device,
        config={"epochs": 2}, gpu_augmentation=Compose(AUGMENT, seed=1),
    )  # fmt: skip
    history = trainer.fit(quiet=True)
    assert trainer._captured.active == (device == "cuda")
    return [epoch.train_loss for epoch in history.epochs]


def by_capture(device):
    model, optimizer = make_network(device)

    def step(batch):
        weights = torch.tensor([1.0, 2.0, 3.0], device=device)
        loss = cross_entropy(model(batch["images"]), batch["labels"], weight=weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = stoker.capture(step, model=model, optimizer=optimizer)
    losses = [captured(batch).item() for batch in loader(device, Compose(AUGMENT, seed=1))]
    assert captured.reason.startswith("captured")
    return losses


@pytest.mark.parametrize("train", [by_the_trainer, by_capture])
def test_another_default_device_changes_no_number(train, device):
    wanted = train(device)
    with torch.device("meta" if device == "cpu" else "cuda"):
        got = train(device)
    assert got == pytest.approx(wanted, rel=1e-5)


def test_a_thread_has_the_default_device_of_the_loop_that_started_it():
    with torch.device("meta"):
        ahead = Background(torch.get_default_device, 1, "ahead")
    assert ahead.take().type == "meta"
    ahead.stop()


@pytest.mark.gpu
def test_a_dataloader_may_draw_on_the_gpu():
    with torch.device("cuda"):
        rows = TensorDataset(torch.arange(64.0))
        loader = DataLoader(rows, 8, shuffle=True, generator=torch.Generator("cuda"))
        batches = list(stoker.prefetch(loader, "cuda"))
    assert sorted(torch.cat([rows for (rows,) in batches]).tolist()) == list(range(64))
