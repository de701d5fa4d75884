"""Runs a stoker job under torch's profiler: a chrome trace, the costliest operations, the device's kernels.

Enters: a `Run` that has not begun, and a schedule: steps to skip, to warm up, to record. Leaves: a `Trace`, and on
request a file for chrome://tracing or ui.perfetto.dev. Costs the steps, which are slower while they are recorded, and
about a megabyte of trace per thousand operations.
"""

from __future__ import annotations

import gzip
import math
import shutil
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from stoker.display import command
from stoker.doctor.measurements import KernelFacts
from stoker.errors import StoreError
from stoker.measure.jobs import train_over
from stoker.measure.laps import Patience, Stopwatch
from stoker.ownership import SIGNATURE, temporary_folder, writing
from stoker.recipes.run import Run
from stoker.train.losses import NonFiniteError

_NO_KERNEL = ("Memcpy", "Memset", "ProfilerStep", "Optimizer.")


@dataclass(frozen=True)
class Schedule:
    """Which steps are recorded."""

    wait: int = 10  # steps skipped at the beginning; on a GPU the first ones capture the graph
    # steps that run under the profiler but are not kept, because starting the profiler takes time
    warmup: int = 3
    active: int = 5  # steps that are recorded

    @property
    def most(self) -> int:
        """Number of steps, skipped and warm-up steps included."""
        return self.wait + self.warmup + self.active


@dataclass(frozen=True)
class Operation:
    """One kind of operation over the recorded steps."""

    name: str  # torch's name of the operation
    calls: int  # number of calls
    cpu_seconds: float  # self time on the host
    device_seconds: float  # self time on the device; 0 without a GPU


@dataclass(frozen=True)
class Trace:
    """The result of `record`."""

    num_steps: int  # number of recorded steps
    seconds: float  # their duration, including the profiler's own work
    operations: tuple[Operation, ...]  # costliest first
    kernels: KernelFacts | None  # kernels per step; None without a GPU


def record(run: Run, plan: Schedule, out: Path | None = None) -> Trace:
    """Train a job that has not begun for the steps of the schedule under torch's profiler.

    The chrome trace is written to `out`, compressed if the name ends with ".gz"; without `out` it is not kept.

    Raises:
        InputError: An epoch of the job has no batch.
        NonFiniteError: The loss became not finite before the last step.
        StoreError: The trace cannot be written.
    """
    on_gpu = run.device.type == "cuda"
    marks: list[tuple[float, float]] = []  # before and after the profiler's own work
    with run.make_train_loader() as loader, _make_profiler(plan, on_gpu) as profiler:

        def next_step() -> None:
            before = time.perf_counter()
            if marks:  # the first batch begins a step and ends none
                profiler.step()
            marks.append((before, time.perf_counter()))

        watch = Stopwatch(Patience(0, plan.most, math.inf), run.device, next_step)
        _, trouble = train_over(run, loader, watch, plan.most)
        if trouble is not None:
            raise trouble
    if out is not None:
        _export(profiler, out)
    began = plan.wait + plan.warmup
    kernels = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not event.name.startswith(_NO_KERNEL)
    ]
    return Trace(
        plan.active,
        marks[began + plan.active][0] - marks[began][1],
        _operations(profiler.key_averages()),
        find_kernels(kernels, plan.active),
    )


def measure_kernels(run: Run, warm_up: int) -> KernelFacts | None:
    """Return the facts of the device's kernels in a few steps; None if the profiler sees no kernel."""
    try:
        return record(run, Schedule(warm_up, 2, 8)).kernels
    except NonFiniteError:  # already reported by the examination
        return None


def _make_profiler(plan: Schedule, on_gpu: bool) -> profile:
    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        schedule=schedule(wait=plan.wait, warmup=plan.warmup, active=plan.active, repeat=1),
        acc_events=True,
    )


def _export(profiler: profile, out: Path) -> None:
    try:
        with writing(out, is_trace) as temporary, temporary_folder() as folder:
            plain = folder / "trace.json"
            profiler.export_chrome_trace(str(plain))
            opened = gzip.open if out.suffix == ".gz" else open
            with plain.open("rb") as trace, opened(temporary, "xb") as file:
                trace.seek(trace.read(4096).index(b"{") + 1)
                file.write(f'{{"{SIGNATURE}": 1,'.encode())
                shutil.copyfileobj(trace, file, 8 << 20)
    except (OSError, RuntimeError) as error:
        raise StoreError(
            f"the trace cannot be written to {out}: {error}.",
            "a folder with room and write permission",
            command("df", "-h", out.parent),
        ) from error


def is_trace(path: Path) -> bool:
    """Return whether a chrome trace, compressed or not, was written by stoker."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return SIGNATURE.encode() in file.read(1 << 20)
    except (OSError, EOFError, zlib.error):
        return False


def _operations(averages: Iterable[Any]) -> tuple[Operation, ...]:
    found = [
        Operation(
            item.key,
            item.count,
            item.self_cpu_time_total / 1e6,
            getattr(item, "self_device_time_total", 0) / 1e6,
        )
        for item in averages
        if not item.key.startswith("ProfilerStep")
    ]
    return tuple(sorted(found, key=lambda item: (-item.device_seconds, -item.cpu_seconds)))


def find_kernels(intervals: Sequence[tuple[float, float]], num_steps: int) -> KernelFacts | None:
    """Return the number of kernels per step, their mean duration, and the share of the time in which any ran.

    `intervals` are begin and end of every kernel, in seconds, in any order.
    """
    if not intervals:
        return None
    ordered = sorted(intervals)
    busy, reached = 0.0, ordered[0][0]
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    whole = max(reached - ordered[0][0], 1e-12)
    mean = sum(end - begin for begin, end in ordered) / len(ordered)
    return KernelFacts(len(ordered) / num_steps, mean, min(1.0, busy / whole))
