"""Device memory: lines for the log, and detection of leaks.

Enters: a device, or functions that measure. Leaves: lines for a log; a `Growth` if memory grows over epochs.
Costs: a line is some µs; the leak watch collects garbage and walks all Python objects when it sets its baseline and
when memory has grown, about 0.4 s per million (0.2 of it the collector).

GB and MB in these lines are 2^30 and 2^20 bytes.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensor

from stoker.arguments import explained
from stoker.train.activations import checkpoint_activations
from stoker.units import GIB, MIB

__all__ = [
    "GrowingTensors",
    "Growth",
    "LeakWatch",
    "checkpoint_activations",
    "count_live_tensors",
    "log_gpu_stats",
    "memory_usage_lines",
    "print_memory_usage",
]

Device = str | int | torch.device | None
BASELINE_AFTER_SECONDS = 20.0
"""Time of training before a leak watch sets its baseline, which takes about 0.3 s."""


# -- lines -----------------------------------------------------------------------------------------


def _cuda_device(device: Device) -> torch.device | None:
    """Return the CUDA device for an argument; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    meant = (
        torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    )
    if meant.type != "cuda":
        return None
    # "cuda" without a number is the current one; tensors always say theirs.
    return meant if meant.index is not None else torch.device("cuda", torch.cuda.current_device())


@explained("stoker.log_gpu_stats(logger)")
def log_gpu_stats(logger: Any, device: Device = None) -> None:
    """Log a GPU's memory use in three lines, by `logger.info`; nothing without CUDA.

    Args:
        logger: Anything with `info(line)`.
        device: The current one by default.
    """
    meant = _cuda_device(device)
    if meant is None:
        return
    allocated = torch.cuda.memory_allocated(meant)
    total = torch.cuda.get_device_properties(meant).total_memory
    logger.info("GPU memory:")
    logger.info(
        f"allocated: {allocated / GIB:.2f}GB / {total / GIB:.2f}GB ({100 * allocated / total:.1f}%)"
    )
    logger.info(f"reserved: {torch.cuda.memory_reserved(meant) / GIB:.2f}GB")


def memory_usage_lines(device: Device = None) -> list[str]:
    """Return this process's memory as lines: resident RAM, and allocated GPU memory with CUDA."""
    lines = [f"CPU Memory: {psutil.Process().memory_info().rss / GIB:.2f} GB"]
    meant = _cuda_device(device)
    if meant is not None:
        lines.append(f"GPU Memory: {torch.cuda.memory_allocated(meant) / GIB:.2f} GB")
    return lines


@explained("stoker.print_memory_usage()")
def print_memory_usage(say: Callable[[str], object] = print) -> None:
    """Print the lines of `memory_usage_lines`, or call `say` with each."""
    for line in memory_usage_lines():
        say(line)


# -- leaks -----------------------------------------------------------------------------------------

TensorKind = tuple[tuple[int, ...], str, str]
Census = Mapping[TensorKind, tuple[int, int]]


def count_live_tensors(device: torch.device | None = None) -> dict[TensorKind, tuple[int, int]]:
    """Return (count, bytes) of the tensors that Python holds, by (shape, dtype, device).

    Views of one storage count once for bytes. Tensors that only C++ holds, such as those saved in an
    autograd graph, are not seen.

    Args:
        device: Count on this one only; all by default.
    """
    counts: dict[TensorKind, tuple[int, int]] = {}
    storages: set[tuple[str, int]] = set()
    things = gc.get_objects()  # a million and more where something was compiled: by type first
    # The fake tensors of torch.compile hold no memory, and reading their address makes torch warn.
    kinds = {
        kind
        for kind in set(map(type, things))
        if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor)
    }
    for thing in [thing for thing in things if type(thing) in kinds]:
        try:
            if device is not None and thing.device != device:
                continue
            storage = thing.untyped_storage()
            place = (str(thing.device), storage.data_ptr())
            kind = (tuple(thing.shape), str(thing.dtype).removeprefix("torch."), place[0])
            num_bytes = storage.nbytes()
        except (RuntimeError, NotImplementedError, ReferenceError):
            continue  # a sparse or dying tensor: no storage to count
        count, total = counts.get(kind, (0, 0))
        counts[kind] = (count + 1, total + (0 if place in storages else num_bytes))
        storages.add(place)
    return counts


@dataclass(frozen=True)
class GrowingTensors:
    """Tensors of one shape, dtype and device whose number has grown.

    Attributes:
        shape: Shape of each tensor.
        dtype: Name of the type without "torch.".
        device: Name of the device, as torch writes it.
        num_before: Number of tensors at the baseline.
        num_now: Number of tensors now.
        grown_bytes: Growth of their storage.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    num_before: int
    num_now: int
    grown_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.shape} {self.dtype} on {self.device}, {self.num_before} to {self.num_now} tensors "
            f"(+{self.grown_bytes / MIB:.1f}MB)"
        )


def gpu_uuid(device: torch.device) -> str | None:
    """Return the UUID of a device, as NVML has it; None for the CPU."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@dataclass(frozen=True)
class Growth:
    """Device memory that grew by more than the threshold.

    Attributes:
        grown_bytes: Growth since the baseline.
        allocated_bytes: Bytes allocated now.
        num_epochs: Epochs since the baseline was taken.
        times: Reports so far without a quiet epoch between them; more than 1 is a leak.
        tensors: The kinds of tensors that grew most, largest first.
        unnamed_bytes: Growth that no Python tensor explains.
    """

    grown_bytes: int
    allocated_bytes: int
    num_epochs: int
    times: int
    tensors: tuple[GrowingTensors, ...]
    unnamed_bytes: int

    @property
    def is_leak(self) -> bool:
        """Whether the growth repeats; a single one may be legitimate."""
        return self.times > 1

    def __str__(self) -> str:
        epochs = "one epoch" if self.num_epochs == 1 else f"{self.num_epochs} epochs"
        grown, now = self.grown_bytes / MIB, self.allocated_bytes / MIB
        parts = [f"GPU memory grew by +{grown:.1f}MB in {epochs}, to {now:.1f}MB"]
        parts += [str(tensors) for tensors in self.tensors]
        if self.unnamed_bytes >= MIB:
            parts.append(
                f"+{self.unnamed_bytes / MIB:.1f}MB that no Python tensor holds: a graph, kept alive by "
                "a loss without .detach() or .item(), or a library"
            )
        verdict = (
            f"time {self.times} in a row: a leak"
            if self.is_leak
            else "if it stays there it was needed: the baseline moves with it"
        )
        return "; ".join([*parts, verdict])


class LeakWatch:
    """Detects memory that grows from epoch to epoch.

    The baseline is taken at the end of the first epoch after `after_seconds`: the optimizer's state then exists, and
    a short run does not pay for it. Growth beyond the threshold is reported, with the tensors that grew, and moves
    the baseline. Legitimate growth (an unfrozen layer's state, a larger workspace) happens once; a leak continues. So
    the next report says leak, unless an epoch in between was quiet: it grew by less than a hundredth of the threshold.
    Slow leaks add up until they cross the threshold. Three epochs below the baseline lower it.

    Args:
        allocated: Returns the bytes in use, e.g. `torch.cuda.memory_allocated`.
        threshold_bytes: Growth that is reported.
        census: Returns the live tensors, by kind.
        logger: Its `warning` is called with the growth, which is returned as well.
        collect: Called before growth is reported, so that unreachable reference cycles do not count.
        after_seconds: Time before which no baseline is taken.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        allocated: Callable[[], int],
        threshold_bytes: int = 100 * MIB,
        census: Callable[[], Census] = count_live_tensors,
        logger: logging.Logger | None = None,
        collect: Callable[[], object] = gc.collect,
        after_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocated = allocated
        self._census = census
        self._collect = collect
        self._clock, self._begins = clock, clock() + after_seconds
        self._logger = logger
        self.threshold_bytes = threshold_bytes
        self.baseline_bytes: int | None = None
        self._kinds: Census = {}
        self._num_epochs = 0
        self._times = 0
        self._recent: deque[int] = deque(maxlen=3)

    @classmethod
    def for_device(
        cls, device: Device, threshold_bytes: int, after_seconds: float = 0.0
    ) -> LeakWatch | None:
        """Return a watch of a CUDA device; None for a CPU, whose memory torch does not count."""
        meant = _cuda_device(device)
        if meant is None:
            return None
        return cls(
            lambda: torch.cuda.memory_allocated(meant),
            threshold_bytes,
            lambda: count_live_tensors(meant),
            after_seconds=after_seconds,
        )

    def after_epoch(self) -> Growth | None:
        """Measure at the end of an epoch; return growth over the threshold, after warning of it."""
        if self.baseline_bytes is None and self._clock() < self._begins:
            return None
        now, last = self._measure(), self._recent[-1] if self._recent else None
        self._recent.append(now)
        if self.baseline_bytes is None:
            self._move_baseline(now)
            return None
        self._num_epochs += 1
        if last is not None and now - last < self.threshold_bytes / 100:
            self._times = 0
        if now - self.baseline_bytes <= self.threshold_bytes:
            self._lower_baseline()
            return None
        self._times += 1
        growth = self._describe(now)
        self._move_baseline(now)
        if self._logger is not None:
            self._logger.warning(str(growth))
        return growth

    def _measure(self) -> int:
        """Return the bytes in use; the collector, which takes 0.2 s, runs only if that may change a report."""
        now = self._allocated()
        if self.baseline_bytes is not None:
            last = self._recent[-1] if self._recent else self.baseline_bytes
            # Whether an epoch is quiet matters only after growth was reported.
            is_quiet = not self._times or now - last < self.threshold_bytes / 100
            if is_quiet and now - self.baseline_bytes <= self.threshold_bytes:
                return now
        self._collect()
        return self._allocated()

    def _lower_baseline(self) -> None:
        # Three epochs, so that alternating epochs (with and without a checkpoint) raise no alarm.
        # Not for small differences: the census takes as long as some steps.
        assert self.baseline_bytes is not None
        lower = self.baseline_bytes - self.threshold_bytes / 100
        if len(self._recent) == 3 and max(self._recent) < lower:
            self._move_baseline(max(self._recent))

    def _move_baseline(self, to_bytes: int) -> None:
        self.baseline_bytes = to_bytes
        self._kinds = self._census()
        self._num_epochs = 0

    def _describe(self, now: int) -> Growth:
        assert self.baseline_bytes is not None
        grown = now - self.baseline_bytes
        kinds = []
        for kind, (count, num_bytes) in self._census().items():
            before = self._kinds.get(kind, (0, 0))
            if num_bytes > before[1]:
                kinds.append(GrowingTensors(*kind, before[0], count, num_bytes - before[1]))
        kinds.sort(key=lambda tensors: -tensors.grown_bytes)
        unnamed = max(0, grown - sum(tensors.grown_bytes for tensors in kinds))
        return Growth(grown, now, self._num_epochs, self._times, tuple(kinds[:5]), unnamed)
