"""An ImageNet-style script: class folders of JPEG files, a DataLoader with Pillow, a convolutional network.

    stoker doctor -- python benchmarks/doctor/photographs.py FOLDER --workers 2     before
    stoker pack images FOLDER STORE --keep-encoded                                  what the doctor says
    stoker doctor -- python benchmarks/doctor/photographs.py STORE --store          after

`--make 600` fills FOLDER with made-up photographs of 500 x 375 first. Both ways crop at random to 224, flip and
normalise. `docs/pictures.md` shows what the doctor printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Photographs(torch.utils.data.Dataset):
    """What the usual script does: open, decode, crop, flip, normalise one file."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(each for each in folder.iterdir() if each.is_dir())
        self.files = [
            (file, n) for n, each in enumerate(classes) for file in sorted(each.iterdir())
        ]
        self.mean, self.std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        file, label = self.files[number]
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        side = int(min(image.size) * (0.3 + 0.7 * torch.rand(()).item()))
        left, top = (int(torch.rand(()).item() * (most - side)) for most in image.size)
        image = image.crop((left, top, left + side, top + side)).resize((224, 224))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        if torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return (pixels - self.mean) / self.std, label


def make_loader(options: argparse.Namespace, device: torch.device) -> Any:
    if not options.store:
        data = Photographs(options.data)
        return torch.utils.data.DataLoader(
            data, options.batch, shuffle=True, num_workers=options.workers, drop_last=True
        )
    from stoker import Loader
    from stoker.augment import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop

    ops = [RandomResizedCrop(224), RandomHorizontalFlip(), Normalize(MEAN, STD)]
    return Loader(
        options.data, options.batch, device, shuffle=True, drop_last=True, augment=Compose(ops),
        as_tuple=("images", "labels"),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--make", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    if options.make:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        from pictures import write_folder

        write_folder(options.data, (375, 500), options.make)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = make_loader(options, device)
    layers = [torch.nn.Conv2d(3, 8, 7, 8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)]
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(8, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(options.epochs):
        began, count = time.perf_counter(), 0
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(
                model(images.to(device)), labels.long().view(-1).to(device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count += len(images)
        print(f"epoch {epoch}: {count / (time.perf_counter() - began):,.0f} photographs a second")


if __name__ == "__main__":
    main()
