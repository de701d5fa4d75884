"""The faults of the machine in the phases behind loading, for `faults.py`: pack, train, validate, save and resume.

Enters: a folder of `faults.py`. Leaves: whether the store is sound, the weights are those of an unbroken run, or the
checkpoint is whole. A limit is set after the expected answer was made, in the process that has to live with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fault_machine
from fault_data import OURS, file_of
from fault_files import DISKS, MACHINE
from fault_packing import packed
from fault_training import trained


def small_shm() -> None:
    fault_machine.own_mounts()
    fault_machine.mount_memory(Path("/dev/shm"), "size=8k")


def jumping_clock() -> None:
    """Let the clock jump back and forth by a year, every other time that it is read."""
    real, turns = time.time, [0]

    def jumped() -> float:
        turns[0] += 1
        return real() + (turns[0] % 2) * 365 * 86400

    time.time = jumped


LIMITS = {**MACHINE, "8 KiB of /dev/shm": small_shm, "a clock that jumps by a year": jumping_clock}


def pause_this_process(seconds: float = 2.0) -> None:
    """Stop this process (SIGSTOP) and let it go on."""
    own = os.getpid()
    if (helper := os.fork()) == 0:
        os.kill(own, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    os.waitpid(helper, 0)


def _compared(weights: list[float], expected: list[float]) -> dict[str, Any]:
    return {"lost": 0, "repeated": 0, "changed": int(weights != expected)}


# -- train and validate ------------------------------------------------------------------------------


def trained_within(limit: Callable[[], None], folder: Path) -> dict[str, Any]:
    expected = trained(folder, "unbroken")
    limit()
    return _compared(trained(folder, "run"), expected)


def hit_in_training(hit: Callable[[Path], object], folder: Path) -> dict[str, Any]:
    """Do something to the process or the run's folder in the 40th batch, in the second epoch."""
    expected = trained(folder, "unbroken")

    def after(phase: str, count: int) -> None:
        if (phase, count) == ("train", 40):
            hit(folder / "run")

    return _compared(trained(folder, "run", after=after), expected)


IN_TRAINING: dict[str, Callable[[Path], object]] = {
    "stopped for 2 s": lambda _: pause_this_process(),
    "the run's folder removed": shutil.rmtree,
    "the run's folder made read-only": lambda path: (
        fault_machine.own_mounts(),
        fault_machine.make_read_only(path),
    ),
}


def trained_on(delay: float, phase: str, folder: Path) -> dict[str, Any]:
    """Train, or validate, on data that lie on a slow disk, a bad one, or one that never answers."""
    held = folder / "store" if phase == "validate" else None
    expected = trained(folder, "unbroken", held=held)
    fault_machine.own_mounts()
    bad = None if delay else file_of(OURS[0], folder)
    fault_machine.mount_broken(folder / "store", folder / "disk", delay, bad)
    if phase == "validate":
        return _compared(trained(folder, "run", held=folder / "disk"), expected)
    return _compared(trained(folder, "run", data="disk"), expected)


# -- pack --------------------------------------------------------------------------------------------


def packed_within(limit: Callable[[], None], folder: Path) -> dict[str, Any]:
    limit()
    return packed(folder, jobs=2)


def packed_with_worker(number: int, folder: Path) -> dict[str, Any]:
    """Send a signal to the first worker as soon as there is one."""

    def watch() -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while True:
            for pid in children.read_text().split():
                # Not before its program runs: until then `Popen` itself waits for it.
                with contextlib.suppress(OSError):
                    if b"packing.worker" in Path("/proc", pid, "cmdline").read_bytes():
                        return os.kill(int(pid), number)
            time.sleep(0.001)

    threading.Thread(target=watch, daemon=True).start()
    return packed(folder, jobs=2)


def paused_while_packing(folder: Path) -> dict[str, Any]:
    threading.Timer(0.05, pause_this_process).start()
    return packed(folder, jobs=2)


# -- all of them -------------------------------------------------------------------------------------

Phase = tuple[str, str, str, Callable[[Path], dict[str, Any]]]


def all_phases() -> list[Phase]:
    """Return phase, fault, way and what to run."""
    found: list[Phase] = []
    for fault, limit in LIMITS.items():
        found.append(("train", fault, "stoker trainer", partial(trained_within, limit)))
        found.append(("pack", fault, "stoker pack", partial(packed_within, limit)))
    found += [
        ("train", fault, "stoker trainer", partial(hit_in_training, hit))
        for fault, hit in IN_TRAINING.items()
    ]
    for fault, delay in DISKS.items():
        found.append(
            ("train", f"data on {fault}", "stoker trainer", partial(trained_on, delay, "train"))
        )
        if delay:
            run = partial(trained_on, delay, "validate")
            found.append(("validate", f"data on {fault}", "stoker trainer", run))
    for fault, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        run = partial(packed_with_worker, number)
        found.append(("pack", f"a worker is {fault}", "stoker pack", run))
    found.append(("pack", "stopped for 2 s", "stoker pack", paused_while_packing))
    return found
