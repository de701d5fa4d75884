"""CIFAR-10 on the device: an epoch of loading, and the time to train a small network to an accuracy.

    python benchmarks/cifar.py [--data ../shared/data/images/cifar10_jpeg.npz] [--no-training] [--profile]

Loading: flip, crop with padding 4, normalise, fp16 channels-last, batches of 500 and 2,000. Peer: `HandLoader`,
a loader of 40 lines that keeps all images on the GPU and augments an epoch with a few torch operations. Limit:
one kernel that copies the epoch's images.

Sampling: epochs of batches of 500 with about 0.1 ms of work on the GPU for each, in a shuffled order and drawn by
weight, by class and from two stores; the ratio to shuffled.

Training, where the file of pictures is present: one network, one schedule, `EPOCHS` epochs of batches of 500 in
bf16, by a plain loop over `HandLoader`, by the same loop with torch.compile, and by `Trainer` over `Loader`, with the
network as it is and compiled. Timed with validation after every epoch; `seconds_to_accuracy` is when validation first
reached `ACCURACY`. Every way runs with three seeds, in turns; medians are given, and the runs beside them. Compiling
and capturing are counted (the first run compiles, later ones use torch's cache), and the seconds of the second epoch
on are given without them.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch

from harness import publish, side_by_side
from stoker.augment import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToDtype
from stoker.loader.drawing import mix
from stoker.loader.loader import Loader
from stoker.report import Topic
from stoker.store.fields import Dense
from stoker.store.memory import memory_store
from stoker.train.trainer import Trainer

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BATCHES = (500, 2000)
TURNS = 15
EPOCHS, ACCURACY, TRAINING_BATCH, SEEDS = 10, 0.86, 500, 3
DATA = Path(__file__).parent.parent.parent / "shared/data/images/cifar10_jpeg.npz"


def read_images(path: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, 3, 32, 32) and labels; noise of the same size where the file is absent."""
    if not path.exists():
        rng = np.random.default_rng(0)
        count = 50_000 if split == "train" else 10_000
        images = rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        return images, rng.integers(0, 10, count)
    from PIL import Image

    held = np.load(path)
    data, ends = held[f"{split}_bytes"].tobytes(), held[f"{split}_off"]
    images = np.empty((len(ends) - 1, 32, 32, 3), np.uint8)
    for number in range(len(images)):
        jpeg = io.BytesIO(data[ends[number] : ends[number + 1]])
        images[number] = np.asarray(Image.open(jpeg).convert("RGB"))
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)), held[f"{split}_lab"].astype(np.int64)


class HandLoader:
    """The best that 40 lines do: all images on the GPU, an epoch flipped and cropped by indexing, batches as views.

    It holds the normalised images padded and one augmented epoch beside them: 480 and 310 MB of fp16.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, batch: int) -> None:
        device = images.device
        mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) * 255 for v in (MEAN, STD))
        normal = ((images.float() - mean) / std).half()
        padded = torch.nn.functional.pad(normal, (4, 4, 4, 4))
        self.images = padded.permute(0, 2, 3, 1).contiguous()
        self.labels, self.batch = labels, batch

    def __len__(self) -> int:
        return len(self.labels) // self.batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        device, count = self.labels.device, len(self) * self.batch
        order = torch.randperm(len(self.labels), device=device)[:count]
        shifts = torch.randint(0, 9, (2, count, 1), device=device)
        flips = torch.rand(count, 1, device=device) < 0.5
        cells = torch.arange(32, device=device)
        across = torch.where(flips, 31 - cells, cells) + shifts[0]
        down = cells + shifts[1]
        picked = self.images[order[:, None, None], down[:, :, None], across[:, None, :]]
        images, labels = picked.permute(0, 3, 1, 2), self.labels[order]
        return zip(images.split(self.batch), labels.split(self.batch), strict=True)


def make_compose(seed: int = 1) -> Compose:
    ops = [
        RandomHorizontalFlip(0.5),
        RandomCrop(32, padding=4),
        Normalize(MEAN, STD),
        ToDtype(torch.float16, channels_last=True),
    ]
    return Compose(ops, seed=seed)


def epoch_seconds(batches, device) -> float:
    sync(device)
    began = time.perf_counter()
    for _ in batches:
        pass
    sync(device)
    return time.perf_counter() - began


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def load(path: Path, on_device: torch.Tensor, labels: torch.Tensor, profile: bool) -> dict:
    """Time an epoch of loading, every way in turn."""
    device, result = on_device.device, {}
    target = torch.empty_like(on_device, dtype=torch.float16)
    copies = partial(target.copy_, on_device)
    for batch in BATCHES:
        common = {"order": "shuffled", "seed": 1, "drop_last": True}
        augmented = Loader(path, batch, device, augment=make_compose(), **common)
        plain = Loader(path, batch, device, **common)
        ways = {
            "hand": HandLoader(on_device, labels, batch),
            "stoker": augmented,
            "stoker_without_augmentation": plain,
            "copy": Once(copies),
        }
        for loader in ways.values():
            for _ in range(3):
                epoch_seconds(loader, device)
        turns = [partial(epoch_seconds, loader, device) for loader in ways.values()]
        taken = side_by_side(turns, TURNS)
        found = {
            f"{name}_ms": statistics.median(turn[number] for turn in taken) * 1e3
            for number, name in enumerate(ways)
        }
        found["times_hand"] = found["stoker_ms"] / found["hand_ms"]
        found["host_us_a_batch"] = host_seconds(plain, device) * 1e6
        result[f"batch_{batch}"] = found
        if profile:
            print_profiles({name: ways[name] for name in ways if "stoker" in name}, batch, device)
        augmented.close()
        plain.close()
    return result


class Once:
    """An epoch of one item: what a function returns."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[object]:
        yield self._make()


def host_seconds(loader: Loader, device: torch.device) -> float:
    """Return the median time that the host takes for a batch, over ten epochs."""
    taken = []
    for _ in range(10):
        sync(device)
        before = time.perf_counter()
        for _ in loader:
            now = time.perf_counter()
            taken.append(now - before)
            before = now
    return statistics.median(taken)


def print_profiles(ways: dict, batch: int, device: torch.device) -> None:
    for name, loader in ways.items():
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(10):
            epoch_seconds(loader, device)
        profiler.disable()
        print(name, batch)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(28)


def sample(images: np.ndarray, labels: np.ndarray, device: torch.device) -> dict:
    """Time epochs of drawn orders beside a shuffled one, with a little work for every batch."""
    data = {"images": images, "labels": labels}
    halves = {
        memory_store(
            {name: Dense(values[part::2]) for name, values in data.items()}, f"half {part}"
        ): 1
        for part in (0, 1)
    }
    common = {"seed": 1, "drop_last": True}
    loaders = {
        "shuffled": Loader(data, BATCHES[0], device, order="shuffled", **common),
        "weighted": Loader(data, BATCHES[0], device, weights=1.0 + labels, **common),
        "balanced": Loader(data, BATCHES[0], device, balance="labels", **common),
        "mixed": Loader(mix(halves), BATCHES[0], device, **common),
        "mixed_per_batch": Loader(mix(halves, per_batch=True), BATCHES[0], device, **common),
    }
    square = torch.rand(3072, 3072, device=device).to(torch.bfloat16)

    def epoch(loader: Loader) -> float:
        sync(device)
        began = time.perf_counter()
        for _ in loader:
            torch.mm(square, square)
        sync(device)
        return time.perf_counter() - began

    ways = [partial(epoch, loader) for loader in loaders.values()]
    side_by_side(ways, 3)
    taken = np.array(side_by_side(ways, 2 * TURNS + 1))
    ratios = np.median(taken / taken[:, :1], axis=0)
    for loader in loaders.values():
        loader.close()
    return {
        "shuffled_ms": float(np.median(taken[:, 0])) * 1e3,
        **{
            f"{name}_to_shuffled": float(ratio) for name, ratio in zip(loaders, ratios, strict=True)
        },
    }


# -- training --------------------------------------------------------------------------------------


def block(before: int, after: int, *pool: torch.nn.Module) -> torch.nn.Sequential:
    convolution = torch.nn.Conv2d(before, after, 3, padding=1, bias=False)
    return torch.nn.Sequential(convolution, *pool, torch.nn.BatchNorm2d(after), torch.nn.ReLU())


def make_training(device: torch.device, steps: int, seed: int, width: int = 64) -> tuple:
    """Return the network, its loss, optimizer and schedule: the same numbers for every way."""
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = [block(3, width)]
    for before in (width, 2 * width, 4 * width):
        layers += [block(before, 2 * before, torch.nn.MaxPool2d(2)), block(2 * before, 2 * before)]
    head = torch.nn.AdaptiveMaxPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8 * width, 10)
    model = torch.nn.Sequential(*layers, *head).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, 0.9, nesterov=True, weight_decay=5e-4, fused=device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, steps, cycle_momentum=False)
    return model, torch.nn.CrossEntropyLoss(label_smoothing=0.1), optimizer, schedule


class Accuracy:
    right = count = 0.0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.right += (outputs.argmax(1) == targets).sum()
        self.count += len(targets)

    def compute(self) -> dict[str, float]:
        return {"accuracy": float(self.right) / self.count}


class Clock:
    """Notes the accuracy of every epoch, and when it was known."""

    def __init__(self, device: torch.device) -> None:
        sync(device)
        self._began = time.perf_counter()
        self.seen: list[tuple[float, float]] = []

    def note(self, accuracy: float) -> None:
        self.seen.append((time.perf_counter() - self._began, accuracy))

    def result(self) -> dict:
        reached = [seconds for seconds, accuracy in self.seen if accuracy >= ACCURACY]
        first, last = self.seen[0][0], self.seen[-1][0]
        return {
            "seconds": last,
            "accuracy": self.seen[-1][1],
            "seconds_to_accuracy": reached[0] if reached else None,
            "seconds_an_epoch_later": (last - first) / max(1, len(self.seen) - 1),
        }


def train_by_hand(train: HandLoader, test: list, epochs: int, seed: int, *, compiled: bool) -> dict:
    """Train as people write it."""
    device = train.labels.device
    model, criterion, optimizer, schedule = make_training(device, epochs * len(train), seed)
    clock = Clock(device)
    run = torch.compile(model, mode="reduce-overhead") if compiled else model
    for _ in range(epochs):
        model.train()
        for images, labels in train:
            with torch.autocast(device.type, torch.bfloat16):
                outputs = run(images)
            criterion(outputs.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        model.eval()
        counts = Accuracy()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            for images, labels in test:
                counts.update(model(images), labels)
        clock.note(counts.compute()["accuracy"])
    return clock.result()


def train_by_stoker(
    train: dict, test: dict, device: torch.device, epochs: int, seed: int, *, compiled: bool
) -> dict:
    augment = make_compose(seed)
    options = {"order": "shuffled", "seed": seed, "drop_last": True, "augment": augment}
    with (
        Loader(train, TRAINING_BATCH, device, **options) as loader,
        Loader(test, 2000, device, augment=augment.validation()) as held_out,
    ):
        model, criterion, optimizer, schedule = make_training(device, epochs * len(loader), seed)
        clock = Clock(device)

        class Noted(Accuracy):
            def compute(self) -> dict[str, float]:
                found = super().compute()
                clock.note(found["accuracy"])
                return found

        config = {"epochs": epochs, "precision": "bf16", "clip_norm": None, "compile": compiled}
        parts = (model, loader, held_out, criterion, optimizer, schedule, config, device)
        trainer = Trainer(*parts, metrics=Noted)
        trainer.fit(quiet=True)
    steps = [note.text for note in trainer.history.told if note.topic is Topic.STEP]
    return clock.result() | {"step": steps[-1] if steps else ""}


def train(images: np.ndarray, labels: np.ndarray, test: tuple, device: torch.device) -> dict:
    """Train every way, one after the other."""
    on_device, numbers = (torch.from_numpy(each).to(device) for each in (images, labels))
    validation = make_compose().validation()
    held_out = [
        (validation(torch.from_numpy(some).to(device)), torch.from_numpy(which).to(device))
        for some, which in zip(np.split(test[0], 5), np.split(test[1], 5), strict=True)
    ]
    hand = HandLoader(on_device, numbers, TRAINING_BATCH)
    epoch_seconds(hand, device)
    made = [{"images": some, "labels": which} for some, which in ((images, labels), test)]
    # cuDNN and the allocator are warm for all ways
    train_by_hand(hand, held_out, 1, 0, compiled=False)
    ways = {
        "plain": partial(train_by_hand, hand, held_out, EPOCHS, compiled=False),
        "stoker": partial(train_by_stoker, *made, device, EPOCHS, compiled=False),
        "compiled": partial(train_by_hand, hand, held_out, EPOCHS, compiled=True),
        "stoker_compiled": partial(train_by_stoker, *made, device, EPOCHS, compiled=True),
    }
    runs: dict[str, list[dict]] = {name: [] for name in ways}
    for seed in range(SEEDS):
        for name, run in ways.items():
            runs[name].append(run(seed))
            print(name, runs[name][-1], flush=True)
    return {name: summary(found) for name, found in runs.items()}


def summary(runs: list[dict]) -> dict:
    """Return the median of every number of some runs, and the runs."""
    numbers = {key for run in runs for key, value in run.items() if isinstance(value, float)}
    middle = {
        key: statistics.median(float("inf") if run[key] is None else run[key] for run in runs)
        for key in sorted(numbers)
    }
    return middle | {"runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = read_images(args.data, "train")
    result: dict = {"data": "CIFAR-10" if args.data.exists() else "noise", "device": str(device)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.h5"
        with h5py.File(path, "w") as file:
            file["images"], file["labels"] = images, labels
        on_device, numbers = (torch.from_numpy(each).to(device) for each in (images, labels))
        result |= load(path, on_device, numbers, args.profile)
    result["sampling"] = sample(images, labels, device)
    if args.data.exists() and not args.no_training:
        result["training"] = train(images, labels, read_images(args.data, "test"), device)
    publish("cifar", result)


if __name__ == "__main__":
    main()
