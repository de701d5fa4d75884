"""Loading on two CPU cores, no GPU: the documents' chunk loader, and how cost grows with the rows.

    python benchmarks/loader_cpu.py [--rows 12000]

(`windows.py` on the CPU has the comparison with torch's DataLoader.)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import h5py
import numpy as np
import psutil
import torch

from harness import publish
from stoker.loader.chunk_door import ChunkDataLoader
from stoker.loader.loader import Loader

STEPS, FEATURES, TARGETS = 60, 64, 36


def write_file(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", (rows, STEPS, FEATURES), "f4")
        for low in range(0, rows, 2000):
            count = min(2000, rows - low)
            features[low : low + count] = rng.normal(size=(count, STEPS, FEATURES)).astype("f4")
        file["targets"] = rng.normal(size=(rows, TARGETS)).astype("f4")
    with path.open("rb") as file:
        os.fsync(file.fileno())  # or the disk would be written to while the epochs are timed


def document_epoch(path: Path, batch: int, chunk_rows: int) -> int:
    """S0's loader with its bugs mended as little as needed to run here: slice, copy, cut."""
    seen = 0
    with h5py.File(path) as file:
        total = len(file["features"])
        for start in range(0, total, chunk_rows):
            features = torch.from_numpy(file["features"][start : start + chunk_rows]).clone()
            targets = torch.from_numpy(file["targets"][start : start + chunk_rows]).clone()
            for low in range(0, len(features), batch):
                seen += len(features[low : low + batch]) + 0 * len(targets[low : low + batch])
    return seen


def read_once(path: Path, threads: int = 1) -> None:
    """The limit: every byte of the file read once, into buffers that stay in the cache."""
    size = 2 << 20
    places = deque(range(0, path.stat().st_size, size))

    def read() -> None:
        buffer = bytearray(size)
        with path.open("rb", buffering=0) as file, contextlib.suppress(IndexError):
            while True:
                os.preadv(file.fileno(), [buffer], places.popleft())

    readers = [threading.Thread(target=read) for _ in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()


def seconds(run) -> float:
    run()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def growth(folder: Path, rows: int) -> dict:
    """An epoch over rows and ten times the rows, in chunks of the same size."""
    result = {}
    for name, count in (("one", rows), ("ten", 10 * rows)):
        path = folder / f"{name}.h5"
        write_file(path, count)
        before = psutil.Process().memory_info().rss
        with Loader(path, 128, "cpu", chunk_bytes=rows * STEPS * FEATURES * 4 // 4) as loader:
            result[name] = {
                "rows": count,
                "epoch_seconds": seconds(lambda loader=loader: [None for _ in loader]),
            }
            result[name]["rss_growth_mb"] = (psutil.Process().memory_info().rss - before) / 1e6
        path.unlink()
    result["ratio"] = result["ten"]["epoch_seconds"] / result["one"]["epoch_seconds"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=40_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder_text:
        folder = Path(folder_text)
        path = folder / "features.h5"
        write_file(path, args.rows)
        chunk_gib = args.rows * STEPS * FEATURES * 4 / 4 / 2**30
        chunk_rows = args.rows // 4
        door = ChunkDataLoader(path, 128, chunk_size_gb=chunk_gib, device="cpu")
        whole = ChunkDataLoader(path, 128, chunk_size_gb=64, device="cpu")
        result = {
            "rows": args.rows,
            "document_seconds": seconds(lambda: document_epoch(path, 128, chunk_rows)),
            "document_one_chunk_seconds": seconds(lambda: document_epoch(path, 128, args.rows)),
            "chunk_data_loader_seconds": seconds(
                lambda: sum(len(features) for features, _ in door)
            ),
            "chunk_data_loader_one_chunk_seconds": seconds(
                lambda: sum(len(features) for features, _ in whole)
            ),
            "read_once_seconds": seconds(lambda: read_once(path)),
            "read_once_two_threads_seconds": seconds(lambda: read_once(path, 2)),
            "growth": growth(folder, args.rows // 2),
        }
    result["times_document"] = result["document_seconds"] / result["chunk_data_loader_seconds"]
    result["times_limit"] = result["chunk_data_loader_seconds"] / result["read_once_seconds"]
    result["most_times_document"] = result["document_seconds"] / result["read_once_seconds"]
    result["most_times_document_two_threads"] = (
        result["document_seconds"] / result["read_once_two_threads_seconds"]
    )
    result["times_document_one_chunk"] = (
        result["document_one_chunk_seconds"] / result["chunk_data_loader_one_chunk_seconds"]
    )
    for name, value in result.items():
        print(f"  {name:40s} {value}")
    publish("loader_cpu", result)


if __name__ == "__main__":
    main()
