"""Runs of stoker's trainer that are broken on purpose, for `faults.py`.

Enters: a folder with a store. Leaves: whether the run that was broken and resumed has the weights of an unbroken one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fault_machine
from fault_data import BATCH, OURS, SAMPLES, WIDTH, file_of
from fault_files import data_place, flip, patch
from stoker.loader.loader import Loader
from stoker.train.trainer import Trainer


def trained(
    folder: Path,
    run: str,
    resume: bool = False,
    after: Callable[[str, int], None] | None = None,
    held: Path | None = None,
    data: str = "store",
    epochs: int = 2,
) -> list[float]:
    """Train two epochs; `after` is told each batch of "train" and "validate" with its number."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    counts = {"train": 0, "validate": 0}

    def unpack(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        phase = "train" if model.training else "validate"
        counts[phase] += 1
        if after:
            after(phase, counts[phase])
        values = batch["features"] / SAMPLES
        return values, values.mean(1, keepdim=True)

    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(Loader(folder / data, BATCH, "cpu", order="shuffled"))
        held_loader = held and stack.enter_context(
            Loader(held, BATCH, "cpu", data_bytes=SAMPLES * WIDTH * 2)
        )
        trainer = Trainer(
            model, loader, held_loader, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.05), None,
            {"epochs": epochs, "precision": "fp32", "capture": "off", "checkpoint_every_steps": 7},
            "cpu", run_dir=folder / run, unpack=unpack,
        )  # fmt: skip
        trainer.fit(resume=resume, quiet=True)
    return [float(value) for one in model.parameters() for value in one.detach().flatten()]


def killed_in(phase: str, number: int, folder: Path) -> dict[str, Any]:
    """End a run in its 40th training or 10th validation batch; the resumed run must be the unbroken one."""
    held = None
    if phase == "validate":
        held = folder / "held"
        shutil.copytree(folder / "store", held)
    expected = trained(folder, "unbroken", held=held)
    at = (phase, 40 if phase == "train" else 10)

    def hit(now: str, count: int) -> None:
        if (now, count) == at:
            os.kill(os.getpid(), number)

    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            trained(folder, "run", after=hit, held=held)
        os._exit(0)
    os.waitpid(child, 0)
    changed = trained(folder, "run", resume=True, held=held) != expected
    return {"lost": 0, "repeated": 0, "changed": int(changed)}


def damaged_while_validating(damage: Callable[[Path], object], folder: Path) -> dict[str, Any]:
    """Damage the validation store after its first batch of the second epoch: values that differ must raise."""
    held = folder / "held"
    shutil.copytree(folder / "store", held)
    expected = trained(folder, "unbroken", held=held)
    shard = sorted(held.glob("*.h5"))[-1]

    def hit(now: str, count: int) -> None:
        if (now, count) == ("validate", SAMPLES // BATCH + 1):
            time.sleep(0.02)  # the times of files move with the kernel's clock
            damage(shard)

    weights = trained(folder, "run", after=hit, held=held)
    # Weights do not depend on validation: a run that ends must have read what was there, or its old file.
    readable = damage is Path.unlink
    return {"lost": 0, "repeated": 0, "changed": int(weights != expected or not readable)}


def validated_on_broken_disk(folder: Path) -> dict[str, Any]:
    fault_machine.own_mounts()
    bad = file_of(OURS[0], folder)
    fault_machine.mount_broken(folder / "store", folder / "held", bad=bad)
    trained(folder, "run", held=folder / "held")
    return {"lost": 0, "repeated": 0, "changed": 1}


VALIDATION: dict[str, Callable[[Path], object]] = {
    "validation data removed": Path.unlink,
    "validation data cut": lambda path: os.truncate(path, path.stat().st_size // 3),
    "validation data overwritten": lambda path: patch(path, path.stat().st_size // 2, bytes(4096)),
}


def resumed_over_changed(way: str, folder: Path) -> dict[str, Any]:
    """Train an epoch, change a byte of the data at rest, and go on with the second one."""
    data = "store" if way == OURS[0] else "plain.h5"
    trained(folder, "run", data=data, epochs=1)
    path = file_of(way, folder)
    before = path.stat()
    flip(path, data_place(path))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    trained(folder, "run", resume=True, data=data)
    return {"lost": 0, "repeated": 0, "changed": 1}


def damaged_in_training(folder: Path) -> dict[str, Any]:
    flip(file_of(OURS[0], folder), data_place(file_of(OURS[0], folder)))
    trained(folder, "run")
    return {"lost": 0, "repeated": 0, "changed": 1}
