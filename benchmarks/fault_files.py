"""What can be wrong with files and with the machine, for `faults.py`: damage at rest and midway, limits, disks.

Enters: a path, or this process. Leaves: the damage. Limits and mounts are those of this process and end with it.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

import fault_machine
from fault_data import file_of, read_epoch, rows
from fault_machine import NotApplicableError
from fault_memory import flip_in_page_cache


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def data_place(path: Path) -> int:
    """Return a place inside the values: in the middle of the file; of a tar file, behind the header of a member."""
    middle = path.stat().st_size // 2
    return middle // 1024 * 1024 + 700 if path.suffix == ".tar" else middle


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def swap(path: Path) -> None:
    others = [one for one in sorted(path.parent.glob(f"*{path.suffix}")) if one != path]
    if not others:
        with h5py.File(path, "w") as file:
            file["features"] = rows()[::-1].copy()
        return
    first, second = path.read_bytes(), others[0].read_bytes()
    path.write_bytes(second)
    others[0].write_bytes(first)


AT_REST: dict[str, Callable[[Path], object]] = {
    "a bit of the values flipped": lambda path: flip(path, data_place(path)),
    "4 KiB of the values zeroed": lambda path: patch(path, data_place(path), bytes(4096)),
    "values of noise": lambda path: patch(path, data_place(path), random.Random(0).randbytes(2048)),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by one byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
    "a megabyte behind its end": lambda path: patch(path, path.stat().st_size, bytes(1 << 20)),
    "another signature": lambda path: patch(path, 0, b"notHDF5!"),
    "noise in its headers": lambda path: patch(path, 48, random.Random(1).randbytes(200)),
    "a folder in its place": lambda path: instead(path, Path.mkdir),
    "a link to nowhere": lambda path: instead(path, lambda at: at.symlink_to("nowhere")),
    "a link to itself": lambda path: instead(path, lambda at: at.symlink_to(at.name)),
    "a pipe in its place": lambda path: instead(path, os.mkfifo),
    "exchanged with another file": swap,
}

MIDWAY: dict[str, Callable[[Path], object]] = {
    "removed while it is read": Path.unlink,
    "cut while it is read": lambda path: os.truncate(path, path.stat().st_size // 3),
    "overwritten while it is read": lambda path: patch(
        path, path.stat().st_size * 3 // 4, bytes(4096)
    ),
    "a page changed in the page cache, times set back": flip_in_page_cache,
}


# -- the machine -------------------------------------------------------------------------------------


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def little_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2)


def wrong_clock() -> None:
    real, begun = time.time, time.time()
    time.time = lambda: real() - 86400 * (real() - begun)  # type: ignore[assignment]


MACHINE = {
    "64 file descriptors": few_descriptors,
    "96 MiB of memory": little_memory,
    "a clock that runs backwards": wrong_clock,
}


def signal_a_worker(number: int) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    if not children:
        raise NotApplicableError
    os.kill(int(children[0]), number)


def on_broken_disk(way: str, delay: float, folder: Path) -> dict[str, Any]:
    """Read an epoch from a disk with one bad sector, or one that takes `delay` seconds for every read."""
    fault_machine.own_mounts()
    bad = None if delay else file_of(way, folder)
    fault_machine.mount_broken(folder, folder.with_name("disk"), delay, bad)
    return read_epoch(way, folder.with_name("disk"))


def with_small_shm(way: str, folder: Path) -> dict[str, Any]:
    fault_machine.own_mounts()
    fault_machine.mount_memory(Path("/dev/shm"), "size=8k")
    return read_epoch(way, folder)


DISKS = {
    "a bad sector (EIO)": 0.0,
    "a slow disk, 0.2 s a read": 0.2,
    "a disk that never answers": 3600.0,
}


def small_disk(folder: Path, kind: str) -> Path:
    """Return a folder on a disk of its own: full, without inodes, or read-only."""
    fault_machine.own_mounts()
    place = folder / "disk"
    options = {"full": "size=24k", "no inodes": "size=8m,nr_inodes=3", "read-only": "size=8m"}[kind]
    fault_machine.mount_memory(place, options)
    if kind == "read-only":
        fault_machine.make_read_only(place)
    return place


SMALL = {"a disk of 24 KiB": "full", "no inodes left": "no inodes", "a read-only disk": "read-only"}
