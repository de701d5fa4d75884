"""Loading on two CPU cores, no GPU: the documents' chunk loader, and how cost grows with the rows.

    python benchmarks/loader_cpu.py [--rows 40000]

(`windows.py` on the CPU has the comparison with torch's DataLoader.)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import psutil
import torch

from harness import publish, seconds_of, side_by_side
from stoker.compat.chunk_loader import ChunkDataLoader
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


def document_epoch(path: Path, batch: int, chunk_rows: int, use=len) -> float:
    """The published loader with its bugs mended as little as needed to run here: slice, copy, cut."""
    seen = 0.0
    with h5py.File(path) as file:
        total = len(file["features"])
        for start in range(0, total, chunk_rows):
            features = torch.from_numpy(file["features"][start : start + chunk_rows]).clone()
            targets = torch.from_numpy(file["targets"][start : start + chunk_rows]).clone()
            for low in range(0, len(features), batch):
                seen += float(use(features[low : low + batch])) + 0 * len(
                    targets[low : low + batch]
                )
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


def in_turn(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, after one round unmeasured."""
    taken = side_by_side([partial(seconds_of, run) for run in ways.values()], rounds + 1)
    return dict(zip(ways, map(list, zip(*taken[1:], strict=True)), strict=True))


def ratio(times: dict[str, list[float]], above: str, below: str) -> float:
    """Of two ways, the median over the rounds."""
    return float(np.median(np.divide(times[above], times[below])))


def growth(folder: Path, rows: int, rounds: int) -> dict:
    """An epoch over rows and ten times the rows, in chunks of the same size, in turns."""
    result: dict = {}
    epochs: dict[str, Callable[[], object]] = {}
    with contextlib.ExitStack() as stack:
        for name, count, repeats in (("one", rows, 10), ("ten", 10 * rows, 1)):
            path = folder / f"{name}.h5"
            write_file(path, count)
            before = psutil.Process().memory_info().rss
            loader = stack.enter_context(
                Loader(path, 128, "cpu", chunk_bytes=rows * STEPS * FEATURES * 4 // 4)
            )
            epochs[name] = lambda loader=loader, repeats=repeats: [
                None for _ in range(repeats) for _ in loader
            ]
            epochs[name]()
            growth_mb = (psutil.Process().memory_info().rss - before) / 1e6
            result[name] = {"rows": count, "rss_growth_mb": growth_mb}
        times = in_turn(epochs, rounds)
    result["one"]["epoch_seconds"] = float(np.median(times["one"])) / 10
    result["ten"]["epoch_seconds"] = float(np.median(times["ten"]))
    result["ratio"] = 10 * ratio(times, "ten", "one")
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder_text:
        folder = Path(folder_text)
        path = folder / "features.h5"
        write_file(path, args.rows)
        chunk_gib = args.rows * STEPS * FEATURES * 4 / 4 / 2**30
        chunk_rows = args.rows // 4
        chunk_loader = ChunkDataLoader(path, 128, chunk_size_gb=chunk_gib, device="cpu")
        whole = ChunkDataLoader(path, 128, chunk_size_gb=64, device="cpu")
        times = in_turn(
            {
                "document": lambda: document_epoch(path, 128, chunk_rows),
                "chunk_data_loader": lambda: sum(len(features) for features, _ in chunk_loader),
                "read_once": lambda: read_once(path),
                "read_once_two_threads": lambda: read_once(path, 2),
                "document_one_chunk": lambda: document_epoch(path, 128, args.rows),
                "chunk_data_loader_one_chunk": lambda: sum(len(features) for features, _ in whole),
                "document_summed": lambda: document_epoch(path, 128, chunk_rows, use=torch.sum),
                "chunk_data_loader_summed": lambda: sum(float(x.sum()) for x, _ in chunk_loader),
            },
            args.rounds,
        )
        result = {
            "rows": args.rows,
            "rounds": args.rounds,
            **{f"{name}_seconds": float(np.median(taken)) for name, taken in times.items()},
            "times_document": ratio(times, "document", "chunk_data_loader"),
            "times_document_one_chunk": ratio(
                times, "document_one_chunk", "chunk_data_loader_one_chunk"
            ),
            "times_document_summed": ratio(times, "document_summed", "chunk_data_loader_summed"),
            "times_limit": ratio(times, "chunk_data_loader", "read_once"),
            "most_times_document": ratio(times, "document", "read_once"),
            "most_times_document_two_threads": ratio(times, "document", "read_once_two_threads"),
            "growth": growth(folder, args.rows // 2, args.rounds),
        }
    for name, value in result.items():
        print(f"  {name:40s} {value}")
    publish("loader_cpu", result)


if __name__ == "__main__":
    main()
