"""Hours of training in one process: does memory, device memory, a count of files or threads, or the step time grow?

    python benchmarks/proof/soak.py [--minutes 30] [--device cpu] [--interval 2]

Enters: nothing; a store of 24,000 samples is made. Half of the time (`--long-share`) is one long run of `Trainer.fit`
(streamed chunks, shuffled, validation every epoch, a checkpoint every 500 steps), ended by SIGTERM as by a scheduler.
The other half is short runs one after the other, each with new loaders, a new trainer and a new folder, in the same
process; it is read between two runs, when slabs and threads of both are gone. Leaves: slopes per hour with their 95 %
confidence in `benchmarks/results/proof_soak-*.json`. Costs: the minutes that it is given.

Contract: a run of this script is one more part of the result file, which it exchanges as a whole every 30 seconds: what
is killed leaves what it measured so far, and minutes of all parts add up. Slopes are those of one process each.

The first fifth of each half is warm-up and does not count (`--warm-up` for more: a history keeps the last million
losses, 8 MB, which a fast GPU fills in minutes). A slope is that of a straight line through the medians of
20 equal stretches of time; its confidence is Student's for that line. `grows` says that the interval lies above zero
and that the growth over an hour is more than 1 % of the level (of a count: one). The wall time of a step follows
whatever else the machine does; its CPU time says whether the work of a step grows.

Resident memory may grow without anything being kept. So beside it stand the bytes of it that are mapped files and
shared memory (pinned slabs are), those that C code has in use and those that its allocator holds (`mallinfo2`: the
difference is fragmentation), torch's pinned blocks and Python's blocks. At the beginning and the end of the part that
counts it notes the number of live objects of each class, the resident bytes by kind of mapping, and what a collection
of Python's garbage frees: that is in reference cycles, and not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from array import array
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from campaign import read_state, state_path, write_state
from harness import machine_facts
from stoker.loader.loader import Loader
from stoker.packing import PackOptions, pack
from stoker.sources.arrays import ArraysSource
from stoker.train.trainer import Trainer

SAMPLES, WIDTH, BATCH = 24_000, 256, 64
STRETCHES = 20
KEEP_SECONDS, COUNT_AFTER_SECONDS = 30.0, 60.0
# 97.5 % points of Student's t for 18 degrees of freedom (20 stretches, two of them for the line).
T_95 = 2.101


class _Malloc(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


try:
    _mallinfo2 = ctypes.CDLL(None).mallinfo2
    _mallinfo2.restype = _Malloc
except (AttributeError, OSError):
    _mallinfo2 = None


def of_allocators(device: str) -> dict[str, float | None]:
    """Return the bytes that C code has in use, those that its allocator holds, pinned bytes, and Python's blocks."""
    found: dict[str, float | None] = dict.fromkeys(("malloc_used_bytes", "malloc_held_bytes"))
    if _mallinfo2 is not None:
        told = _mallinfo2()
        found["malloc_used_bytes"] = float(told.uordblks + told.hblkhd)
        found["malloc_held_bytes"] = float(told.arena + told.hblkhd)
    found["pinned_bytes"] = None
    if device != "cpu" and hasattr(torch.cuda, "host_memory_stats"):
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current")
        found["pinned_bytes"] = None if pinned is None else float(pinned)
    found["python_blocks"] = float(sys.getallocatedblocks())
    return found


def count_objects() -> Counter[str]:
    """Return how many objects of every class there are that Python's collector knows."""
    kinds = Counter(type(one) for one in gc.get_objects())
    return Counter(
        {f"{kind.__module__}.{kind.__qualname__}": count for kind, count in kinds.items()}
    )


def count_mappings() -> Counter[str]:
    """Return the resident bytes by what is mapped; memory without a name by the size of its mapping, in MiB."""
    counts: Counter[str] = Counter()
    with contextlib.suppress(OSError), Path("/proc/self/smaps").open() as file:
        for line in file:
            first, *rest = line.split()
            if "-" in first and not first.endswith(":"):
                low, high = (int(end, 16) for end in first.split("-"))
                name = rest[4] if len(rest) > 4 else f"memory of {(high - low) / 2**20:.0f} MiB"
            elif first == "Rss:":
                counts[name] += int(rest[0]) * 1024
    return counts


def collect(device: str) -> dict[str, Any]:
    """Collect Python's garbage; return of which classes it was, and by how much each reading fell."""
    objects, before = count_objects(), measured(device)
    gc.collect()
    after = measured(device)
    fell = {name: value - (after[name] or 0.0) for name, value in before.items() if value}
    return {"classes": most_grown(count_objects(), objects), **fell}


def measured(device: str) -> dict[str, float | None]:
    """Return what may grow, now."""
    _, pages, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    found: dict[str, float | None] = {
        "rss_bytes": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "shared_bytes": float(shared * os.sysconf("SC_PAGE_SIZE")),
        "device_bytes": None,
        "device_reserved_bytes": None,
        "files": float(sum(1 for _ in Path("/proc/self/fd").iterdir())),
        "threads": float(sum(1 for _ in Path("/proc/self/task").iterdir())),
    }
    if device != "cpu":
        found["device_bytes"] = float(torch.cuda.memory_allocated())
        found["device_reserved_bytes"] = float(torch.cuda.memory_reserved())
    return found | of_allocators(device)


def most_grown(before: Counter[str], after: Counter[str]) -> dict[str, list[int]]:
    """Return the dozen names whose counts grew most, with both counts."""
    more = {name: [before[name], count] for name, count in after.items() if count > before[name]}
    return dict(sorted(more.items(), key=lambda item: item[1][0] - item[1][1])[:12])


def slope(times: list[float], values: list[float]) -> dict[str, Any] | None:
    """Return the slope per hour with its interval; None for fewer than 20 stretches of readings."""
    if len(times) < 2 * STRETCHES:
        return None
    edges = np.linspace(times[0], times[-1], STRETCHES + 1)
    which = np.clip(np.searchsorted(edges, times, "right") - 1, 0, STRETCHES - 1)
    inside = [
        [value for value, k in zip(values, which, strict=True) if k == stretch]
        for stretch in range(STRETCHES)
    ]
    if not all(inside):
        return None
    x = (edges[:-1] + edges[1:]) / 2 / 3600
    y = np.array([statistics.median(one) for one in inside])
    centred = x - x.mean()
    per_hour = float((centred @ y) / (centred @ centred))
    errors = y - y.mean() - per_hour * centred
    half = T_95 * float(np.sqrt((errors @ errors) / (STRETCHES - 2) / (centred @ centred)))
    level = float(y.mean())
    least = max(0.01 * abs(level), 1.0)
    return {
        "level": level, "per_hour": per_hour, "low": per_hour - half, "high": per_hour + half,
        "grows": per_hour - half > 0 and per_hour > least, "readings": len(values), "medians": y.round(4).tolist(),
    }  # fmt: skip


HALVES = ("one long run", "short runs")
READ = (
    "at", "rss_bytes", "device_bytes", "device_reserved_bytes", "files", "threads", "step_ms", "step_cpu_ms",
    "malloc_used_bytes", "malloc_held_bytes", "pinned_bytes", "python_blocks", "shared_bytes",
)  # fmt: skip


class Sampler:
    """Reads every few seconds in a thread, or when it is asked to (`in_thread=False`), but no more often.

    `steps` are those of the trainer's own count: a captured step calls none of the user's functions.

    Readings are kept as 104 bytes each: as dicts of floats they grew by 1 MiB an hour themselves.
    """

    def __init__(
        self,
        device: str,
        interval: float,
        warm_up: float,
        keep: Callable[[dict[str, Any]], None],
        in_thread: bool = True,
    ) -> None:
        self.device, self.interval, self.warm_up, self._keep = device, interval, warm_up, keep
        self._steps_before = 0
        self._trainer: Trainer | None = None
        self.readings = {name: array("d") for name in READ}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.began = self._kept = time.monotonic()
        self._before = (self.began, self.steps, time.process_time())
        self._objects: Counter[str] | None = None
        self._mappings: Counter[str] = Counter()
        self._runs_before = 0
        if in_thread:
            self._thread.start()

    @property
    def steps(self) -> int:
        """Steps of all trainers so far."""
        trainer = self._trainer
        return self._steps_before + (trainer._at.num_steps if trainer else 0)

    def watch(self, trainer: Trainer | None) -> None:
        """Count the steps of another trainer from now on."""
        self._steps_before, self._trainer = self.steps, trainer

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self.read()

    def read(self, runs: int = 0) -> None:
        """Take a reading, if the last one is long enough ago; `runs` have ended so far."""
        now = (time.monotonic(), self.steps, time.process_time())
        if now[0] - self._before[0] < 0.9 * self.interval:
            return
        if (
            runs
            and self._objects is None
            and (now[0] - self.began > max(self.warm_up, COUNT_AFTER_SECONDS))
        ):
            gc.collect()
            self._objects, self._runs_before = count_objects(), runs
            self._mappings = count_mappings()
        taken = now[1] - self._before[1]
        times = dict.fromkeys(("step_ms", "step_cpu_ms"))
        if taken:
            times = {
                "step_ms": 1e3 * (now[0] - self._before[0]) / taken,
                "step_cpu_ms": 1e3 * (now[2] - self._before[2]) / taken,
            }
        read = {"at": now[0] - self.began, **times, **measured(self.device)}
        for name, value in read.items():
            self.readings[name].append(math.nan if value is None else value)
        self._before = now
        if now[0] - self._kept > KEEP_SECONDS:
            self._kept = now[0]
            self._keep(self._slopes())

    def _grown(self, runs: int) -> dict[str, Any] | None:
        """Return what there is more of than at the first count, and what is garbage that was not collected yet."""
        if self._objects is None or runs <= self._runs_before:
            return None
        mappings, freed = count_mappings(), collect(self.device)
        return {
            "runs": runs - self._runs_before,
            "more_objects": most_grown(self._objects, count_objects()),
            "more_mapped_bytes": most_grown(self._mappings, mappings),
            "freed_by_collection": freed,
        }

    def _slopes(self) -> dict[str, Any]:
        seconds = time.monotonic() - self.began
        read = np.array([self.readings[name] for name in READ])
        is_warm = read[0] > max(0.2 * seconds, self.warm_up)
        kept = dict(zip(READ, read[:, is_warm], strict=True))
        found: dict[str, Any] = {"seconds": round(seconds, 1), "steps": self.steps}
        for name in READ[1:]:
            known = ~np.isnan(kept[name])
            found[name] = slope(kept["at"][known].tolist(), kept[name][known].tolist())
        return found

    def end(self, runs: int = 0) -> None:
        """Stop, and keep the slopes, and what there is more of after `runs`."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        grown = self._grown(runs)
        self._keep({**self._slopes(), **({"objects": grown} if grown else {})})


def run(folder: Path, name: str, device: str, sampler: Sampler, epochs: int) -> None:
    """Train once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def unpack(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values = batch["features"]
        return values, values.mean(1, keepdim=True)

    some = SAMPLES * WIDTH * 4 // 6
    with (
        Loader(folder / "store", BATCH, device, order="shuffled", data_bytes=some) as loader,
        Loader(folder / "store", BATCH, device, samples=np.arange(1000)) as held,
    ):
        trainer = Trainer(
            model, loader, held, torch.nn.functional.mse_loss, torch.optim.AdamW(model.parameters(), 1e-3), None,
            {"epochs": epochs, "precision": "fp32", "checkpoint_every_steps": 500}, device,
            run_dir=folder / name, unpack=unpack,
        )  # fmt: skip
        sampler.watch(trainer)
        try:
            trainer.fit(quiet=True)
        finally:
            sampler.watch(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between readings")
    parser.add_argument(
        "--long-share", type=float, default=0.5, help="share of the time for the long run"
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        default=0.0,
        help="seconds of each half that do not count, if more than a fifth",
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="a result file instead of that in benchmarks/results"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = options.out or state_path("soak")
    facts, long_seconds = machine_facts(), options.minutes * 60 * options.long_share
    short_seconds = options.minutes * 60 - long_seconds
    earlier = read_state(path).get("parts", [])
    part: dict[str, Any] = {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"), "commit": facts["commit"],
        "minutes_asked": options.minutes, "device": options.device,
    }  # fmt: skip

    def keep_as(name: str) -> Callable[[dict[str, Any]], None]:
        def keep(found: dict[str, Any]) -> None:
            part[name] = {**found, **({"runs": count} if name == "short runs" else {})}
            part["minutes"] = round(
                sum(part[each]["seconds"] for each in HALVES if each in part) / 60, 1
            )
            parts = [*earlier, part]
            minutes = round(sum(each["minutes"] for each in parts), 1)
            write_state(path, "soak", {"minutes": minutes, "parts": parts}, facts)

        return keep

    count = 0
    with tempfile.TemporaryDirectory(prefix="stoker-soak-") as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        np.save(folder / "features.npy", rng.normal(size=(SAMPLES, WIDTH)).astype("f4"))
        source = ArraysSource((folder / "features.npy",), part_bytes=SAMPLES * WIDTH)
        pack(source, folder / "store", PackOptions(jobs=1))
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(143)
        )  # before and after `fit`, which has its own
        sampler = Sampler(options.device, options.interval, options.warm_up, keep_as(HALVES[0]))
        threading.Timer(long_seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            run(folder, "long", options.device, sampler, 10**6)
        sampler.end()
        gc.collect()
        sampler = Sampler(
            options.device, options.interval, options.warm_up, keep_as(HALVES[1]), in_thread=False
        )
        while time.monotonic() - sampler.began < short_seconds:
            run(folder, "short", options.device, sampler, 1)
            shutil.rmtree(folder / "short")
            count += 1
            sampler.read(count)
        sampler.end(count)
    print(f"{path}: {part['minutes']} minutes, {count} short runs")


if __name__ == "__main__":
    main()
