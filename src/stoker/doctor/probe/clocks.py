"""Readings of the kernel and of torch: memory, time queued for a core, the allocator.

Enters: nothing. Leaves: numbers; None or 0 if the system does not report them. Costs 2 to 8 µs per reading, more if the
kernel's code is not in the caches. Reading all cores, about once a second, costs 0.1 ms. Never calls the GPU's driver:
another thread may be capturing a graph, and such a call would abort the capture.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

current_thread = threading.get_ident
MEMORY_EVERY_SECONDS = 0.02
_statm: tuple[int, int] = (-1, -1)
_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory() -> tuple[int | None, int | None]:
    """Return (resident bytes, bytes allocated on the GPU). Call it at most every MEMORY_EVERY_SECONDS."""
    global _statm  # noqa: PLW0603
    try:
        # The file stays open, since opening costs more than reading; a forked child must not read its parent's.
        if _statm[0] != os.getpid():
            _statm = (os.getpid(), os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC))
        resident: int | None = int(os.pread(_statm[1], 256, 0).split()[1]) * _PAGE
    except OSError:
        resident = None
    torch: Any = sys.modules.get("torch")
    device = None
    if uses_cuda(torch):
        # `memory_allocated` first builds a flat dictionary of the same figures, which takes five times as long.
        device = int(torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"])
    return resident, device


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        *((f"_{number}", ctypes.c_size_t) for number in range(8)),
        ("free", ctypes.c_size_t),
        ("_8", ctypes.c_size_t),
    ]


_mallinfo: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
"""None without glibc, and before its version 2.33."""
if _mallinfo is not None:
    _mallinfo.restype = _Heap


def free_bytes() -> int:
    """Return the resident bytes that malloc keeps for later; 0 if unknown.

    Takes 30 µs, and 0.1 s with a heap of 100,000 free pieces: not for every step.
    """
    return int(_mallinfo().free) if _mallinfo is not None else 0


def uses_cuda(torch: Any) -> bool:
    """Return whether the script has begun to use a GPU.

    Asking whether there is a GPU would initialise the driver, and a process forked later could not use it.
    """
    cuda: Any = getattr(torch, "cuda", None)
    return getattr(cuda, "_initialized", False) and bool(cuda.is_initialized())


_schedstats: dict[int, int] = {}
_delays: dict[int, tuple[float, float]] = {}
"""Last reading of each thread: (wall-clock seconds less seconds on a core, seconds queued for a core)."""
_AWAY_SECONDS = 5e-5


def run_delay(cpu: float | None = None) -> float:
    """Return the seconds in which this thread was ready to run and no core was free; 0 if unknown.

    If the thread has been off its core for less than `_AWAY_SECONDS` since the last reading, it cannot have queued for
    longer, and the last value is returned: reading the kernel costs as much as all else at the end of a step.

    Args:
        cpu: The thread's seconds on a core, if they were just read.
    """
    thread = current_thread()
    away = time.perf_counter() - (time.thread_time() if cpu is None else cpu)
    known = _delays.get(thread)
    if known is not None and away - known[0] < _AWAY_SECONDS:
        return known[1]
    queued = _schedstat(thread, "thread-self")[1]
    _delays[thread] = away, queued
    return queued


_TOGETHER_SECONDS, _MOST_READINGS = 1e-4, 4


def read() -> tuple[float, float, float]:
    """Return the wall clock, this thread's seconds on a core, and those queued for one, of the same moment.

    A busy machine takes the core from a thread mostly at system calls, such as these readings: if they took long, they
    are repeated. Else a time and its queueing would begin or end at different moments.
    """
    for _ in range(_MOST_READINGS):
        now, cpu = time.perf_counter(), time.thread_time()
        delay = run_delay(cpu)
        if time.perf_counter() - now < _TOGETHER_SECONDS:
            break
    return now, cpu, delay


def awake_seconds(thread: threading.Thread) -> float:
    """Return the seconds in which another thread ran or was ready to run; 0 if unknown."""
    return sum(_schedstat(thread.ident or 0, f"self/task/{thread.native_id}"))


def _schedstat(thread: int, place: str) -> tuple[float, float]:
    """Return (seconds on a core, seconds queued for a core) of a thread; `place` is its folder below /proc."""
    file = _schedstats.get(thread)
    if file is None:
        try:
            file = os.open(f"/proc/{place}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            file = -1  # remembered: do not ask a kernel without this file again at each step
        _schedstats[thread] = file
    if file < 0:
        return 0.0, 0.0
    try:
        ran, queued, _ = os.pread(file, 64, 0).split(None, 2)
        return int(ran) / 1e9, int(queued) / 1e9
    except (OSError, ValueError):
        return 0.0, 0.0


def children_seconds() -> float:
    """Return the CPU seconds of child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def busy_seconds() -> float | None:
    """Return the busy seconds of the cores that this process may use, by any process; None if unknown.

    Under a container's quota only the container's own use counts: other work on the machine does not reduce
    the quota.
    """
    try:
        if Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()[0] != "max":
            usage = Path("/sys/fs/cgroup/cpu.stat").read_text(encoding="ascii").split()
            return int(usage[usage.index("usage_usec") + 1]) / 1e6
    except (OSError, ValueError, IndexError):
        pass
    try:
        usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *fields = line.split()
            if name in usable:
                # Without idle and iowait. Guests are counted in user already.
                user, nice, system, _, _, irq, softirq = map(int, fields[:7])
                ticks += user + nice + system + irq + softirq
    except (OSError, ValueError, AttributeError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def torch_facts() -> dict[str, Any]:
    """Return versions, devices and allocator counters of torch, without calling the driver."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return {}
    facts: dict[str, Any] = {"version": str(torch.__version__), "threads": torch.get_num_threads()}
    if uses_cuda(torch):
        # Counters of torch's allocator, kept on the host. Only the driver knows the memory of other processes.
        stats = torch.cuda.memory_stats()
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["cuda"] = device.name
        facts["free_bytes"] = device.total_memory - stats.get("reserved_bytes.all.current", 0)
        facts["retries"] = stats.get("num_alloc_retries", 0)
        facts["device_allocs"] = stats.get("num_device_alloc", 0)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        facts["rank"] = distributed.get_rank()
        facts["world_size"] = distributed.get_world_size()
    return facts


def forget() -> None:
    """Close the parent's files after a fork: they show the parent's threads."""
    for file in _schedstats.values():
        if file >= 0:
            os.close(file)
    _schedstats.clear()
    _delays.clear()
