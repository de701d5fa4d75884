"""CIFAR-10, from folders of JPEG files to a trained network: packed once, then one launch per training step.

    python examples/cifar10.py FOLDER

The pictures are FOLDER/train/<class>/*.jpg and FOLDER/test/<class>/*.jpg. Without a folder the example makes a few
of its own, so that it runs in seconds on a CPU too.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from stoker import Loader, PackOptions, Trainer, pack
from stoker.augment import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToDtype
from stoker.sources.images.source import ImagesSource


def make_pictures(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(120):
        pixels = rng.integers(0, 90, (32, 32, 3), dtype=np.uint8)
        pixels[..., number % 3] += 100  # red, green and blue ones
        where = folder / ("train" if number < 96 else "test") / f"class {number % 3}"
        where.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(where / f"{number}.jpg")
    return folder


def block(before: int, after: int, *pool: nn.Module) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return nn.Sequential(convolution, *pool, nn.BatchNorm2d(after), nn.ReLU())


torch.manual_seed(0)
small = len(sys.argv) == 1
batch, epochs, width = (24, 2, 2) if small else (512, 10, 64)
layers = [block(3, width)]
for size in (width, 2 * width, 4 * width):
    layers += [block(size, 2 * size, nn.MaxPool2d(2)), block(2 * size, 2 * size)]
head = nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)
model = nn.Sequential(*layers, *head).to(memory_format=torch.channels_last)
norm = Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
dtype = ToDtype(torch.float32, channels_last=True)
augment = Compose([RandomHorizontalFlip(), RandomCrop(32, padding=4), norm, dtype], seed=1)
with tempfile.TemporaryDirectory() as made:
    folder = make_pictures(Path(made, "pictures")) if small else Path(sys.argv[1])
    store = Path(made, "store")
    pack(ImagesSource((32, 32), folder=folder), store, PackOptions(jobs=int(small)))
    train = Loader(store, batch, samples="train", shuffle=True, drop_last=True, augment=augment)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, nesterov=True, weight_decay=5e-4)
    # Without momentum in the schedule the step becomes one CUDA graph.
    rate = OneCycleLR(optimizer, 0.2, epochs * len(train), cycle_momentum=False)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    config = {"epochs": epochs, "clip_norm": 1.0}
    began = time.perf_counter()
    Trainer(model, train, None, loss, optimizer, rate, config).fit(quiet=True)
    seconds = time.perf_counter() - began
    test = Loader(store, batch, samples="test", augment=augment.validation())
    with torch.inference_mode():
        right = sum((model.eval()(b["images"]).argmax(1) == b["labels"]).sum() for b in test)
    print(f"{right / len(test.samples):.1%} right after {epochs} epochs in {seconds:.1f} s")
