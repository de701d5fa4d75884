"""The cores and memory that affinity and cgroups (versions 1 and 2, nested) allow.

Enters: /proc and /sys under a root folder. Leaves: counts and bytes; None for missing values.
Costs about 1 ms, for reading small files.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stoker.units import KIB

_NO_LIMIT = 2**60  # cgroup v1 writes "no limit" as a number near 2**63


def read_text(path: Path) -> str | None:
    """Return the text of a small kernel file, or None if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Return the number that is the whole content of a file, or None."""
    text = (read_text(path) or "").strip()
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else None


def find_text(path: Path, pattern: str) -> str | None:
    """Return the first group of a pattern in a file, line by line, or None."""
    match = re.search(pattern, read_text(path) or "", re.MULTILINE)
    return match[1].strip() if match else None


def _count_list(text: str | None) -> int | None:
    """Return the number of items in a kernel list such as "0-3,8"; None if it is not such a list."""
    if not text or not re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", text):
        return None
    pairs = [part.split("-") for part in text.split(",")]
    return sum(int(pair[-1]) - int(pair[0]) + 1 for pair in pairs)


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    device_number: str
    root: str
    point: str
    filesystem: str
    source: str
    options: frozenset[str]


def read_mounts(root: Path) -> list[Mount]:
    """Return every mount that this process sees, in the order in which they were made."""
    mounts = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        # man 5 proc: id parent major:minor root point options [tags…] - type source options
        before, dash, after = line.partition(" - ")
        head, tail = before.split(), after.split()
        if dash and len(head) >= 5 and len(tail) >= 2:
            options = frozenset(tail[2].split(",")) if len(tail) > 2 else frozenset()
            plain = [_unescape(word) for word in (head[3], head[4], tail[1])]
            mounts.append(Mount(head[2], plain[0], plain[1], tail[0], plain[2], options))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


class Cgroups:
    """The cgroup folders of this process, innermost first, for versions 1 and 2."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts = [m for m in read_mounts(root) if m.filesystem in ("cgroup", "cgroup2")]
        lines = (read_text(root / "proc/self/cgroup") or "").splitlines()
        self.entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]

    def folders(self, controller: str) -> list[tuple[int, Path]]:
        """Return (version, folder) of this process's group and of its visible parents, innermost first."""
        found: list[tuple[int, Path]] = []
        for _, names, path in self.entries:
            for mount in self.mounts:
                ours = (not names and mount.filesystem == "cgroup2") or (
                    controller in names.split(",")
                    and mount.filesystem == "cgroup"
                    and controller in mount.options
                )
                if ours:
                    version = 2 if mount.filesystem == "cgroup2" else 1
                    found += [(version, folder) for folder in self._up(mount, path)]
        return found

    def _up(self, mount: Mount, path: str) -> list[Path]:
        top = self.root / mount.point.lstrip("/")
        try:
            below = PurePosixPath(path).relative_to(mount.root)
        except ValueError:
            # In a container, the path is the host's, and the mount's root is the group of this process.
            return [top]
        if ".." in below.parts:
            return [top]
        return [top / below, *(top / parent for parent in below.parents)]

    def cpu_quota(self) -> float | None:
        """Return the tightest quota in cores; the quota of an outer group also limits all groups inside it."""
        quotas = []
        for version, folder in self.folders("cpu"):
            if version == 2:
                words = (read_text(folder / "cpu.max") or "").split()
            else:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                words = [str(read_int(folder / name)) for name in names]
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
                quotas.append(int(words[0]) / int(words[1]))
        return min((quota for quota in quotas if quota > 0), default=None)

    def memory(self) -> tuple[int | None, int | None]:
        """Return (tightest limit, bytes left in the group that has the fewest left)."""
        limits, left = [], []
        for version, folder in self.folders("memory"):
            names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
            known = [read_int(folder / name) for name in names]
            limit = min((n for n in known if n is not None and 0 <= n < _NO_LIMIT), default=None)
            used = read_int(
                folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")
            )
            if limit is None:
                continue
            limits.append(limit)
            if used is not None:
                # Before the kernel kills a process, it reclaims file pages that were not used lately.
                cached = find_text(folder / "memory.stat", r"^(?:total_)?inactive_file (\d+)$")
                left.append(max(0, limit - used + min(int(cached or 0), used)))
        return min(limits, default=None), min(left, default=None)


def read_cores(root: Path, groups: Cgroups) -> tuple[int | None, int | None, float | None]:
    """Return (cores online, cores this process may use, quota in cores)."""
    total = _count_list((read_text(root / "sys/devices/system/cpu/online") or "").strip())
    allowed = _count_list(find_text(root / "proc/self/status", r"^Cpus_allowed_list:\s*(\S+)$"))
    if root == Path("/"):
        total = total or os.cpu_count()
        if allowed is None and hasattr(os, "sched_getaffinity"):
            allowed = len(os.sched_getaffinity(0))
    quota = groups.cpu_quota()
    bounds = [n for n in (total, allowed) if n is not None]
    bounds += [] if quota is None else [math.floor(quota)]
    return total, (max(1, min(bounds)) if bounds else None), quota


def read_memory(root: Path, groups: Cgroups) -> tuple[int | None, int | None, int | None]:
    """Return the bytes (of the machine, available to this process, of the cgroup limit)."""

    def kib(name: str) -> int | None:
        text = find_text(root / "proc/meminfo", rf"^{name}:\s*([0-9]+) kB$")
        return None if text is None else int(text) * KIB

    total, available = kib("MemTotal"), kib("MemAvailable")
    limit, left = groups.memory()
    if limit is not None and total is not None and limit >= total:
        limit = None
    if limit is not None:
        known = [n for n in (available, left if left is not None else limit) if n is not None]
        available = min(known)
    return total, available, limit
