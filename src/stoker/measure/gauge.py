"""Memory of a try: how much it uses, and how much it may use.

Enters: a device. Leaves: peak bytes between `begin` and `peak_bytes`, and their limit. Costs a garbage collection
per try; on a GPU the allocator's cache is emptied first, so that one try does not count for another.

On a GPU the peak is the memory that torch has reserved, CUDA graphs included; the limit is the memory that was free. On
a CPU the peak is the process's resident memory; the limit is that plus the available memory of the machine or its
cgroup. On a CPU, a size that does not fit kills the process instead of raising an error. So a size is refused before it
runs if its memory, in proportion to the largest size that ran, exceeds the limit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import psutil
import torch

from stoker.machine import forget_peak, peak_rss_bytes, probe, rss_bytes
from stoker.train.oom import forget_frames, is_oom
from stoker.units import format_bytes

T = TypeVar("T")
MARGIN = 0.10
"""Share of the memory that must stay free, for fragments, other processes and a longer batch."""


class Gauge:
    """Measures the memory of tries on one device, one at a time; each must leave the share `margin` of it free."""

    def __init__(self, device: torch.device, margin: float = MARGIN) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._margin = margin
        self._before = 0
        self._seen: tuple[int, int] | None = None
        # Computed once: the limit of the process does not depend on the memory that it holds at the moment.
        self._room = 0
        if not self._on_gpu:
            free = probe().ram_available_bytes or int(psutil.virtual_memory().available)
            self._room = rss_bytes() + free
        self.cap_bytes = 0  # limit of the current try, including what the process used before it

    def begin(self) -> None:
        """Free the memory of earlier tries, and measure from here on."""
        self.release()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_reserved(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            share = torch.cuda.get_per_process_memory_fraction(self.device)
            room = min(free + self._before, int(share * total))
        else:
            forget_peak()
            self._before, room = rss_bytes(), self._room
        self.cap_bytes = int(room * (1 - self._margin))

    def release(self) -> None:
        """Free unreferenced memory."""
        # On a CPU only the young generations: a full collection takes longer than a small try.
        gc.collect(2 if self._on_gpu else 1)
        if self._on_gpu:
            torch.cuda.empty_cache()

    def peak_bytes(self) -> int:
        """Return the peak since `begin`; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_reserved(self.device)
        return peak_rss_bytes()

    def attempt(self, size: int, work: Callable[[], T]) -> tuple[T | None, str]:
        """Run one try; return (its result, ""), or (None, why): it is too large to try, or memory ran out."""
        self.begin()
        refused = self.expect(size)
        if refused:
            return None, refused
        try:
            done = work()
        except Exception as error:  # a loader's thread wraps it in an error of its own
            if not is_oom(error):
                raise
            forget_frames(error)
            return None, "out of memory"
        self.note(size)
        return done, ""

    def note(self, size: int) -> None:
        """Remember the peak memory of a size that has run, for `expect`."""
        taken = max(0, self.peak_bytes() - self._before)
        if self._seen is None or size >= self._seen[0]:
            self._seen = (size, taken)

    def expect(self, size: int) -> str:
        """Return why a size must not be tried on a CPU; "" if it may. Call it after `begin`."""
        if self._on_gpu or self._seen is None or size <= self._seen[0]:
            return ""
        seen, taken = self._seen
        expected = self._before + taken * size // seen
        if expected <= self.cap_bytes:
            return ""
        return (
            f"not tried: by the memory of {seen:,} it would take {format_bytes(expected)}, and "
            f"{format_bytes(self.cap_bytes)} may be used"
        )
