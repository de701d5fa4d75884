"""The ready jobs on the device: epochs of the forex recipe against the document's, and how busy it is.

    python benchmarks/recipes.py

forex: five timeframes of 480/288/192/96/48 x 128, batch 128, the recipe's model. Peer: the document's
chunk loader (h5py slice, pin, copy, slice on the device), AMP, an eager loop, the same model. Busy: the
union of kernel times over wall time, by torch.profiler, in an epoch of its own. segmentation: 512 x 512,
batch 32, fused augmentation.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from harness import publish
from stoker.loader.loader import Loader
from stoker.recipes.forex.recipe import ForexRecipe
from stoker.recipes.segmentation.recipe import SegmentationRecipe
from stoker.store.fields import Dense
from stoker.store.reader import Store
from stoker.train.trainer import Trainer
from windows import JOBS, document_chunks, make_series, materialise, write_store

HORIZON = 36


def forex_store(folder: Path, count: int, scale: int) -> tuple[Store, dict[str, int]]:
    windows, features, _ = JOBS["five timeframes"]
    windows = {name: max(4, window // scale) for name, window in windows.items()}
    rng = np.random.default_rng(0)
    returns = rng.normal(scale=1e-4, size=(count, HORIZON)).cumsum(axis=1).astype("f4")
    fields: dict = {"targets": Dense(returns), "split": Dense(np.zeros(count, np.uint8))}
    fields["split"].values[-count // 10 :] = 1
    fields |= make_series(windows, features, count)
    return write_store(folder, fields, count), windows


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def busy_share(trainer: Trainer, device: torch.device) -> float | None:
    """Union of kernel intervals over the time from the first to the last, in one epoch."""
    if device.type != "cuda":
        return None
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        trainer.train_epoch()
        sync(device)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    total, end = 0.0, spans[0][0]
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / (end - spans[0][0])


def make_trainer(job, store: Store, batch: int, device: torch.device) -> Trainer:
    loader = Loader(
        store, batch, device, order="shuffled", fields=job.fields, samples=job.samples["train"],
        drop_last=True,
    )  # fmt: skip
    return Trainer(
        job.model,
        loader,
        None,
        job.criterion,
        job.make_optimizer(job.model.parameters(), 1e-4),
        None,
        {"epochs": 4, "precision": "auto", "clip_norm": 1.0},
        device,
        job.augmentation,
        unpack=job.unpack,
    )


def document_epoch(job, path: Path, names: list[str], count: int, device: torch.device) -> float:
    """The document's loop: its chunk loader, AMP with a scaler, clip, eager."""
    model = copy.deepcopy(job.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    times = []
    for _ in range(2):
        sync(device)
        began = time.perf_counter()
        for batch in document_chunks(path, names, device, count):
            batch |= {
                f"{name}/gap": batch[name].new_zeros(batch[name].shape[:2], dtype=torch.uint8)
                for name in names
            }
            inputs, targets = job.unpack(batch)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16, enabled=device.type == "cuda"):
                outputs = model(inputs)
            outputs = (
                type(outputs)(*(value.float() for value in outputs))
                if isinstance(outputs, tuple)
                else outputs
            )
            if isinstance(outputs, dict):
                outputs = {name: value.float() for name, value in outputs.items()}
            scaler.scale(job.criterion(outputs, targets)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        sync(device)
        times.append(time.perf_counter() - began)
    return min(times)


def forex(device: torch.device, count: int, scale: int) -> dict:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as text:
        folder = Path(text)
        store, windows = forex_store(folder, count, scale)
        materialise(store, folder / "windows.h5", windows)
        names = list(windows)
        result: dict = {"samples": count, "windows": windows}
        job = ForexRecipe().make_job(store, {}, 0)
        result["parameters"] = sum(p.numel() for p in job.model.parameters())
        peer = document_epoch(job, folder / "windows.h5", names, count, device)
        result["document_samples_per_second"] = count / peer
        for way, options in (("default", {}), ("one stream", {"parallel_streams": False})):
            if way != "default" and device.type != "cuda":
                continue
            trainer = make_trainer(ForexRecipe().make_job(store, options, 0), store, 128, device)
            history = trainer.fit()
            rate = max(report.samples_per_second for report in history.epochs[1:])
            captured = trainer._captured
            result[way] = {
                "samples_per_second": rate,
                "times_document": rate * peer / count,
                "step": "eager" if captured is None else captured.reason,
                "precision": trainer._precision.reason,
                "busy": busy_share(trainer, device),
            }
    return result


def segmentation(device: torch.device, count: int, side: int, batch: int) -> dict:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 3, side, side), dtype=np.uint8)
    masks = rng.integers(0, 19, (count, side, side), dtype=np.uint8)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as text:
        store = write_store(Path(text), {"images": Dense(images), "masks": Dense(masks)}, count)
        options = {"num_classes": 19, "ratios": (0.9, 0.05, 0.05)}
        trainer = make_trainer(
            SegmentationRecipe().make_job(store, options, 0), store, batch, device
        )
        history = trainer.fit()
        captured = trainer._captured
        return {
            "images_per_second": max(report.samples_per_second for report in history.epochs[1:]),
            "step": "eager" if captured is None else captured.reason,
            "augmentation": trainer.gpu_augmentation.backend_reason,
            "busy": busy_share(trainer, device),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    result = {
        "device": str(device),
        "forex": forex(device, 4096 if on_gpu else 300, 1 if on_gpu else 24),
        "segmentation": segmentation(device, *((320, 512, 32) if on_gpu else (24, 64, 4))),
    }
    for name, value in result.items():
        print(f"  {name}: {value}")
    publish("recipes", result)


if __name__ == "__main__":
    main()
