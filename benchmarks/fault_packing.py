"""`stoker pack` over broken inputs, onto broken disks, and killed, for `faults.py`.

Enters: a folder with `features.npy`. Leaves: whether the store, where there is one, is sound and holds the samples.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fault_machine
from fault_data import SAMPLES, WIDTH, rows
from fault_files import small_disk
from stoker.packing import PackOptions, pack
from stoker.sources.arrays import ArraysSource
from stoker.store.reader import open_store


def packed(
    folder: Path, damage: Callable[[Path], object] | None = None, limit: int = 0, jobs: int = 1
) -> dict[str, Any]:
    path = folder / "features.npy"
    if damage:
        damage(path)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    pack(
        ArraysSource((path,), part_bytes=SAMPLES * WIDTH * 2),
        folder / "new",
        PackOptions(jobs=jobs),
    )
    return {"lost": 0, "repeated": 0, "changed": int(not holds_rows(folder / "new"))}


def packed_on(kind: str, folder: Path) -> dict[str, Any]:
    out = small_disk(folder, kind) / "new"
    source = ArraysSource((folder / "features.npy",), part_bytes=SAMPLES * WIDTH * 2)
    pack(source, out, PackOptions(jobs=1))
    return {"lost": 0, "repeated": 0, "changed": int(not holds_rows(out))}


def holds_rows(path: Path) -> bool:
    """Return whether a store is sound and holds the samples."""
    with open_store(path) as store:
        sound = not store.verify().problems
        return sound and np.array_equal(store.read_rows("features", 0, store.num_samples), rows())


def packed_from_broken_disk(delay: float, folder: Path) -> dict[str, Any]:
    fault_machine.own_mounts()
    (folder / "inputs").mkdir()
    shutil.copy(folder / "features.npy", folder / "inputs")
    bad = None if delay else folder / "inputs/features.npy"
    fault_machine.mount_broken(folder / "inputs", folder / "disk", delay, bad)
    pack(ArraysSource((folder / "disk/features.npy",)), folder / "new", PackOptions(jobs=1))
    return {"lost": 0, "repeated": 0, "changed": int(not holds_rows(folder / "new"))}


def killed_while_packing(seed: int, folder: Path) -> dict[str, Any]:
    rng = random.Random(seed)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                packed(folder)
            os._exit(0)
        time.sleep(rng.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return packed(folder)


def onto_own_files(folder: Path) -> dict[str, Any]:
    (folder / "new").mkdir()
    (folder / "new" / "thesis.tex").write_text("mine")
    try:
        return packed(folder)
    finally:
        if not (folder / "new" / "thesis.tex").exists():
            raise RuntimeError("a file of the user's is gone")
