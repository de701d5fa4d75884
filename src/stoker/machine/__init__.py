"""Cores, memory, disk and GPUs of this machine, and the part of them that this process may use.

Enters: /proc, /sys and the cgroup files under a root folder, the disk behind a path, and NVML.
Leaves: one frozen `Machine`. Readings that fail are None; for GPUs and the disk, its notes say why.
Costs about 2 ms, plus 30–100 ms to start NVML, plus up to 1 s when the disk is measured. Blocking.

Files: `_limits.py` cores and memory, `_disk.py` the disk, `_gpus.py` NVML (no other file talks
to it). torch is described without importing it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from stoker.arguments import explained
from stoker.machine._disk import BandwidthClass, Disk, read_disk
from stoker.machine._gpus import THROTTLE_WORDS, Gpu, GpuReader
from stoker.machine._limits import Cgroups, find_text, read_cores, read_memory
from stoker.units import KIB

__all__ = [
    "THROTTLE_WORDS", "BandwidthClass", "Choice", "Disk", "Gpu", "GpuReader", "Machine",
    "available_memory", "probe", "recommended_workers",
]  # fmt: skip


@explained("stoker.probe()", "a Machine is what probe returns")
@dataclass(frozen=True)
class Machine:
    """The machine, and the limits of this process. None: could not be read.

    Attributes:
        cores_total: Logical cores that are online.
        cores_usable: Cores by affinity and cgroup quota, rounded down, at least 1.
        cores_quota: The cgroup's CPU quota in cores; None when there is none.
        cpu: Model name.
        ram_total_bytes: Of the machine.
        ram_available_bytes: What can be used without swapping, the cgroup's limit respected.
        ram_limit_bytes: The tightest cgroup memory limit; None when there is none.
        disk: The filesystem of the path that was asked about.
        gpus: As NVML lists them.
        driver: NVIDIA driver version.
        torch: Version of the installed torch.
        torch_cuda: CUDA version it was built for; None for a CPU build.
        python: Version.
        os: Kernel and distribution.
        notes: What could not be read, and why.
    """

    cores_total: int | None
    cores_usable: int | None
    cores_quota: float | None
    cpu: str | None
    ram_total_bytes: int | None
    ram_available_bytes: int | None
    ram_limit_bytes: int | None
    disk: Disk
    gpus: tuple[Gpu, ...]
    driver: str | None
    torch: str | None
    torch_cuda: str | None
    python: str
    os: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document; unknown readings are null."""
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    """An automatic choice and why it was made."""

    value: int
    reason: str


@explained("stoker.probe('.')")
def probe(
    path: str | Path = ".",
    *,
    measure: bool = False,
    root: Path = Path("/"),
    nvml: Any = None,
    environ: Mapping[str, str] | None = None,
) -> Machine:
    """Describe this machine. A missing reading never raises an exception.

    Args:
        path: The disk of this path is described; usually the folder of the data.
        measure: Also measure the speed of that disk, for up to a second.
        root: Folder with `proc` and `sys`; tests give a copy.
        nvml: Module with pynvml's functions; None imports pynvml.
        environ: Variables to read `CUDA_VISIBLE_DEVICES` from; None: `os.environ`.
    """
    notes: list[str] = []
    groups = Cgroups(root)
    cores_total, cores_usable, quota = read_cores(root, groups)
    total, available, limit = read_memory(root, groups)
    with GpuReader(nvml, os.environ if environ is None else environ) as reader:
        gpus, driver = reader.read(), reader.driver
    notes += reader.notes
    torch_version, torch_cuda = _read_torch()
    return Machine(
        cores_total=cores_total,
        cores_usable=cores_usable,
        cores_quota=quota,
        cpu=find_text(root / "proc/cpuinfo", r"^model name\s*:\s*(.+)$"),
        ram_total_bytes=total,
        ram_available_bytes=available,
        ram_limit_bytes=limit,
        disk=read_disk(Path(path), root, measure, notes),
        gpus=gpus,
        driver=driver,
        torch=torch_version,
        torch_cuda=torch_cuda,
        python=platform.python_version(),
        os=platform.platform(),
        notes=tuple(notes),
    )


def available_memory() -> int | None:
    """Return the bytes that this process can still allocate, by machine, cgroup and resource limits."""
    root = Path("/")
    found = [read_memory(root, Cgroups(root))[1]]
    with contextlib.suppress(OSError, ValueError, IndexError):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            found.append(max(0, limit - pages * resource.getpagesize()))
    return min((size for size in found if size is not None), default=None)


def recommended_workers(
    machine: Machine, augmentation: Literal["gpu", "cpu", "none"] = "none"
) -> Choice:
    """Choose a number of loading processes.

    Half the usable cores, limited to 2–4 when the GPU augments and 4–8 when the CPU does, and
    always leaving one core to the training process. 0 when batches are assembled on the device.
    """
    if augmentation == "none":
        return Choice(0, "batches are cut on the device: workers would only copy them once more")
    low, high = (2, 4) if augmentation == "gpu" else (4, 8)
    cores = machine.cores_usable
    if cores is None:
        return Choice(low, f"the number of cores is unknown; {low} is the least that helps")
    value = min(max(cores // 2, low), high, cores - 1)
    who = "the GPU augments" if augmentation == "gpu" else "the CPU augments"
    if value == cores - 1:
        return Choice(value, f"{cores} usable cores less one for the training process; {who}")
    return Choice(value, f"half of {cores} usable cores, within {low} to {high} as {who}")


@functools.cache
def _read_torch() -> tuple[str | None, str | None]:
    """Return (version, CUDA version) of the installed torch, without importing it, which takes 1–2 s."""
    try:
        version = importlib.metadata.version("torch")
        spec = importlib.util.find_spec("torch")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None, None
    for folder in (spec.submodule_search_locations if spec else None) or []:
        # A file of plain assignments; its version also names the build, such as +cu130.
        file = Path(folder) / "version.py"
        exact = find_text(file, r"^__version__\b[^=\n]*=\s*['\"](.+?)['\"]")
        return exact or version, find_text(file, r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]")
    return version, None


_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process since its start, or since `forget_peak`."""
    # VmHWM belongs to the address space, while `ru_maxrss` is inherited through fork and exec: a small child of a
    # large parent would look large.
    found = find_text(_STATUS, r"^VmHWM:\s*(\d+) kB$")
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if found is None else int(found)
    return kilobytes * KIB


def forget_peak() -> None:
    """Reset the peak of `peak_rss_bytes`; if the kernel does not permit that, it stays the peak since the start."""
    try:
        with _FORGET.open("r+") as file:
            file.write("5")
    except OSError:
        return
