"""CIFAR-10 on the device: an epoch of loading, and the time to train a small network to an accuracy.

    python benchmarks/cifar.py [--data ../shared/data/images/cifar10_jpeg.npz] [--profile]

Loading: flip, crop with padding 4, normalise, fp16 channels-last, batches of 500 and 2,000. Peer: `HandLoader`,
a loader of 40 lines that keeps all images on the GPU and augments each batch with a few torch operations. Limit:
one kernel that copies the epoch's images.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch

from harness import publish, side_by_side
from stoker.augment import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToDtype
from stoker.loader.loader import Loader

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BATCHES = (500, 2000)
TURNS = 15
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
    """What people write: all images on the GPU, each batch flipped and cropped by indexing."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, batch: int) -> None:
        device = images.device
        mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) * 255 for v in (MEAN, STD))
        normal = ((images.float() - mean) / std).half()
        self.images = torch.nn.functional.pad(normal, (4, 4, 4, 4))
        self.images = self.images.to(memory_format=torch.channels_last)
        self.labels, self.batch = labels, batch

    def __len__(self) -> int:
        return len(self.labels) // self.batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        device = self.labels.device
        count = len(self.labels)
        order = torch.randperm(count, device=device)
        shifts = torch.randint(0, 9, (2, count), device=device)
        flips = torch.rand(count, device=device) < 0.5
        cells = torch.arange(32, device=device)
        for number in range(len(self)):
            cut = slice(number * self.batch, (number + 1) * self.batch)
            rows, flip = order[cut], flips[cut, None]
            across = torch.where(flip, 31 - cells, cells) + shifts[0, cut, None]
            down = cells + shifts[1, cut, None]
            picked = self.images.permute(0, 2, 3, 1)[
                rows[:, None, None], down[:, :, None], across[:, None, :]
            ]
            yield picked.permute(0, 3, 1, 2), self.labels[rows]


def make_compose() -> Compose:
    ops = [
        RandomHorizontalFlip(0.5),
        RandomCrop(32, padding=4),
        Normalize(MEAN, STD),
        ToDtype(torch.float16, channels_last=True),
    ]
    return Compose(ops, seed=1)


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = read_images(args.data, "train")
    on_device = torch.from_numpy(images).to(device)
    result: dict = {"data": "CIFAR-10" if args.data.exists() else "noise", "device": str(device)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.h5"
        with h5py.File(path, "w") as file:
            file["images"], file["labels"] = images, labels
        for batch in BATCHES:
            common = {"order": "shuffled", "seed": 1, "drop_last": True}
            augmented = Loader(path, batch, device, augment=make_compose(), **common)
            plain = Loader(path, batch, device, **common)
            hand = HandLoader(on_device, torch.from_numpy(labels).to(device), batch)
            ways = {
                "hand": hand,
                "stoker": augmented,
                "stoker_without_augmentation": plain,
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
            result[f"batch_{batch}"] = found
            if args.profile:
                for name in ("stoker", "stoker_without_augmentation"):
                    profiler = cProfile.Profile()
                    profiler.enable()
                    for _ in range(10):
                        epoch_seconds(ways[name], device)
                    profiler.disable()
                    print(name, batch)
                    pstats.Stats(profiler).sort_stats("tottime").print_stats(28)
            augmented.close()
            plain.close()
    publish("cifar", result)


if __name__ == "__main__":
    main()
