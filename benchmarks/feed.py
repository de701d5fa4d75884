"""HDF5 to the device: stoker's uploader against the document's recipe and the pinned copy.

    python benchmarks/feed.py [--gigabytes 8]

Warm: the file is in the page cache. Cold: the cache is dropped first (needs root), and the limit is
`dd iflag=direct`. Overlap: an epoch over data four times the chunk, with compute per batch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch

from harness import publish, side_by_side
from stoker.loader.loader import Loader
from stoker.loader.staging import Copy, Uploader

ROW = 6250  # 25 kB rows
TURNS, EPOCHS_A_TURN, COLD_TURNS = 5, 3, 4


def drop_caches() -> bool:
    try:
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def write_file(path: Path, gigabytes: float) -> int:
    rows = int(gigabytes * 1e9 / (ROW * 4))
    block = np.random.default_rng(0).normal(size=(4000, ROW)).astype("f4")
    with h5py.File(path, "w", alignment_threshold=4096, alignment_interval=4096) as file:
        data = file.create_dataset("features", (rows, ROW), "f4")
        for low in range(0, rows, 4000):
            data[low : low + 4000] = block[: min(4000, rows - low)]
        file["targets"] = np.zeros(rows, "f4")
    return rows


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def upload_seconds(loader: Loader, uploader: Uploader, target: torch.Tensor) -> float:
    """The engine under resident and chunked loading: the whole file into one device tensor."""
    values = loader.columns[0].values[0]
    sync(loader.device)
    began = time.perf_counter()
    uploader.upload([Copy(values, 0, values.num_rows, target)])
    sync(loader.device)
    return time.perf_counter() - began


def document_seconds(path: Path, rows: int, device: torch.device) -> float:
    sync(device)
    began = time.perf_counter()
    with h5py.File(path) as file:
        host = torch.from_numpy(file["features"][0:rows])
        device_copy = (
            host.pin_memory().to(device, non_blocking=True)
            if device.type == "cuda"
            else host.clone()
        )
    sync(device)
    del device_copy
    return time.perf_counter() - began


def pinned_copy_rate(device: torch.device) -> float:
    if device.type != "cuda":
        return float("nan")
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    target.copy_(host, non_blocking=True)
    sync(device)
    began = time.perf_counter()
    for _ in range(8):
        target.copy_(host, non_blocking=True)
    sync(device)
    return 8 * (1 << 30) / (time.perf_counter() - began) / 1e9


def dd_seconds(path: Path) -> float:
    """The disk's own speed; nan where it cannot be read directly."""
    drop_caches()
    began = time.perf_counter()
    done = subprocess.run(
        ["dd", f"if={path}", "of=/dev/null", "bs=16M", "iflag=direct"],
        capture_output=True,
        check=False,
    )
    return time.perf_counter() - began if done.returncode == 0 else float("nan")


def from_cold_disk(path: Path, loader: Loader, target: torch.Tensor) -> dict:
    """The file with nothing of it in the page cache, and the same bytes by dd, in turns."""
    if not drop_caches():
        return {}

    def ours() -> float:
        drop_caches()
        reader = Uploader(loader.device, loader.store.threads, once=True)
        seconds = upload_seconds(loader, reader, target)
        reader.close()
        return seconds

    turns = np.array(side_by_side([ours, lambda: dd_seconds(path)], COLD_TURNS))
    rates = path.stat().st_size / np.median(turns, axis=0) / 1e9
    return {
        "cold_stoker_gb_per_second": float(rates[0]),
        "cold_dd_direct_gb_per_second": float(rates[1]),
        "share_of_direct": float(np.median(turns[:, 1] / turns[:, 0])),
        "shares_of_direct": (turns[:, 1] / turns[:, 0]).round(3).tolist(),
    }


def overlap(
    path: Path, rows: int, device: torch.device, compute_ms: float, num_slots: int = 2
) -> dict:
    """An epoch over four times the ring's memory: alone, with compute, and compute alone."""
    chunk_bytes = rows * ROW * 4 // (4 * num_slots)
    size = 2048 if device.type == "cuda" else 128
    weight = torch.randn(size, size, device=device)

    def compute() -> None:
        for _ in range(repeats):
            torch.mm(weight, weight)

    repeats = 1
    sync(device)
    compute()
    sync(device)
    began = time.perf_counter()
    for _ in range(50):
        compute()
    sync(device)
    repeats = max(1, round(compute_ms / ((time.perf_counter() - began) / 50 * 1e3)))
    with Loader(path, 2000, device, chunk_bytes=chunk_bytes, num_slots=num_slots) as loader:

        def epoch_seconds(with_load: bool, with_compute: bool) -> float:
            for number in range(EPOCHS_A_TURN):
                if number == 1:  # the first is warm-up: an epoch begins while the last one ends
                    sync(device)
                    began = time.perf_counter()
                for _ in loader if with_load else range(len(loader)):
                    if with_compute:
                        compute()
            sync(device)
            return (time.perf_counter() - began) / (EPOCHS_A_TURN - 1)

        ways = [(True, False), (False, True), (True, True)]
        turns = side_by_side([partial(epoch_seconds, *way) for way in ways], TURNS)
    read, compute_alone, both = (float(np.median(times)) for times in zip(*turns, strict=True))
    ratios = [both / max(read, alone) for read, alone, both in turns]
    return {
        "read": read,
        "compute": compute_alone,
        "both": both,
        "tier": loader.tier,
        "num_batches": len(loader),
        "ratio_to_slower": float(np.median(ratios)),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--gigabytes", type=float, default=8.0 if torch.cuda.is_available() else 1.0
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder) / "features.h5"
        rows = write_file(path, args.gigabytes)
        gigabytes = rows * ROW * 4 / 1e9
        with Loader(path, 1000, device, fields=["features"]) as loader:
            threads = loader.store.threads
            target = torch.empty((rows, ROW), device=device)
            uploader = Uploader(device, threads)
            times = [upload_seconds(loader, uploader, target) for _ in range(8)]
            first, ours = times[0], float(np.median(times[1:]))
            uploader.close()
            cold = from_cold_disk(path, loader, target)
        del target
        document = [document_seconds(path, rows, device) for _ in range(3)]
        result = {
            "gigabytes": gigabytes,
            "threads": threads,
            "stoker_gb_per_second": gigabytes / ours,
            "stoker_first_time_gb_per_second": gigabytes / first,
            "document_first_time_gb_per_second": gigabytes / document[0],
            "document_gb_per_second": gigabytes / float(np.median(document[1:])),
            "pinned_copy_gb_per_second": pinned_copy_rate(device),
            **cold,
        }
        balanced = 1e3 * ours / (rows / 2000)
        for num_slots in (2, 3, 4):
            result[f"overlap_equal_{num_slots}_slots"] = overlap(
                path, rows, device, balanced, num_slots
            )
        result["overlap_compute_bound"] = overlap(path, rows, device, 3 * balanced, 3)
    result["times_document"] = result["stoker_gb_per_second"] / result["document_gb_per_second"]
    result["times_document_first_time"] = (
        result["stoker_first_time_gb_per_second"] / result["document_first_time_gb_per_second"]
    )
    for name, value in result.items():
        print(f"  {name:34s} {value if not isinstance(value, float) else round(value, 3)}")
    publish("feed", result)
    os.sync()


if __name__ == "__main__":
    main()
