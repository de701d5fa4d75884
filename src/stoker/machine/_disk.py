"""The disk behind a path: its kind, its free space, and on request its speed.

Enters: a path, /proc and /sys under a root folder. Leaves: a frozen `Disk`. Costs microseconds,
or up to a second and a temporary file if the speed is measured. Blocking.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from stoker.machine._limits import Mount, read_int, read_mounts, read_text
from stoker.ownership import unnamed_file
from stoker.units import MIB

_BLOCK_BYTES = 4 * MIB

BandwidthClass = Literal["tmpfs", "nvme", "ssd", "hdd", "network", "unknown"]

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
_NETWORK_FILESYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "glusterfs", "9p", "virtiofs",
    "beegfs", "gpfs", "afs", "orangefs", "pvfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs",
    "fuse.gcsfuse", "fuse.juicefs", "fuse.ceph", "fuse.rclone",
}  # fmt: skip
_VIRTUAL_VENDORS = {"qemu", "vmware", "msft", "google", "virtio", "xen", "vbox", "amazon"}


@dataclass(frozen=True)
class Disk:
    """The filesystem that holds a path.

    Attributes:
        path: The path that was asked about.
        filesystem: As the kernel names it: ext4, xfs, nfs4, overlay.
        device: Block device or source of the mount.
        total_bytes: Size of the filesystem.
        free_bytes: Free for an ordinary user.
        kind: rotational, ssd, nvme, network, tmpfs, overlay or virtual; None when not known.
        bandwidth_class: What to expect of it; "unknown" for virtual disks unless measured.
        read_bytes_per_second: Measured sequential reading, one thread; None when not measured.
    """

    path: str
    filesystem: str | None = None
    device: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    kind: str | None = None
    bandwidth_class: BandwidthClass = "unknown"
    read_bytes_per_second: float | None = None


def read_disk(path: Path, root: Path, measure: bool, notes: list[str]) -> Disk:
    """Describe the filesystem of `path`, or of its nearest parent that exists."""
    absolute = path.resolve()
    while not absolute.exists() and absolute != absolute.parent:
        absolute = absolute.parent  # `path` may be a store that is not written yet
    total = free = None
    try:
        stats = os.statvfs(absolute)
        total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    except OSError as error:
        notes.append(f"disk of {path}: {error.strerror}")
    over = [mount for mount in read_mounts(root) if absolute.is_relative_to(mount.point)]
    # The longest mount point holds the path; of two mounts at one point, the later one covers the earlier.
    mount = max(reversed(over), key=lambda each: len(each.point), default=None)
    kind = None if mount is None else _disk_kind(mount, root)
    speed = measure_read(absolute, notes) if measure else None
    return Disk(
        path=str(path),
        filesystem=mount.filesystem if mount else None,
        device=mount.source if mount else None,
        total_bytes=total,
        free_bytes=free,
        kind=kind,
        bandwidth_class=_bandwidth_class(kind, speed),
        read_bytes_per_second=speed,
    )


def _disk_kind(mount: Mount, root: Path) -> str | None:
    if mount.filesystem in _MEMORY_FILESYSTEMS:
        return "tmpfs"
    if mount.filesystem in _NETWORK_FILESYSTEMS:
        return "network"
    if mount.filesystem == "overlay":
        return "overlay"
    folder = root / "sys/dev/block" / mount.device_number
    if not folder.exists():  # btrfs and zfs number their mounts themselves
        folder = root / "sys/class/block" / PurePosixPath(mount.source).name
    return _block_kind(folder.resolve(), depth=0) if folder.exists() else None


def _block_kind(folder: Path, depth: int) -> str | None:
    """Return the kind of disk of a /sys/block folder, resolving partitions, LVM and RAID."""
    if (folder / "partition").exists():
        folder = folder.parent
    slaves = folder / "slaves"
    below = sorted(slaves.iterdir()) if slaves.is_dir() and depth < 4 else []
    if below:
        kinds = {_block_kind(slave.resolve(), depth + 1) for slave in below}
        # A striped set is as slow as its slowest member.
        return next((k for k in (None, "virtual", "rotational", "ssd") if k in kinds), "nvme")
    vendor = (read_text(folder / "device/vendor") or "").strip().lower()
    if re.match(r"(vd|xvd|nbd|rbd|loop|zram)", folder.name) or vendor in _VIRTUAL_VENDORS:
        return "virtual"  # its rotational flag does not describe the host's real disk
    if folder.name.startswith("nvme"):
        return "nvme"
    rotational = read_int(folder / "queue/rotational")
    return None if rotational is None else "rotational" if rotational else "ssd"


def _bandwidth_class(kind: str | None, speed: float | None) -> BandwidthClass:
    known: dict[str | None, BandwidthClass] = {
        "tmpfs": "tmpfs", "network": "network", "nvme": "nvme", "ssd": "ssd", "rotational": "hdd",
    }  # fmt: skip
    if kind in known:
        return known[kind]
    if speed is None:
        return "unknown"
    # The limit of SATA is 0.55 GB/s, that of a rotating disk 0.28 GB/s.
    return "nvme" if speed > 0.7e9 else "ssd" if speed > 0.3e9 else "hdd"


def measure_read(path: Path, notes: list[str], seconds: float = 0.7) -> float | None:
    """Return the sequential read speed of one thread in bytes/s, bypassing the page cache. Blocking.

    Reads `path` itself if it is a file of 32 MiB or more; else an unnamed temporary file in its folder, of up to
    256 MiB, written for half of `seconds`. None, with a note, if neither works.
    """
    if not hasattr(os, "O_DIRECT"):
        notes.append("disk speed is measured on Linux only")
        return None
    try:
        if path.is_file() and path.stat().st_size >= 32 * MIB:
            return _timed_read(path, seconds, notes)
        folder = path if path.is_dir() else path.parent
        with unnamed_file(folder) as file:
            _fill(file.fileno(), seconds / 2)
            notes.append("disk speed is of a file just written; a device cache may flatter it")
            opened = Path(f"/proc/self/fd/{file.fileno()}")
            return _timed_read(opened, seconds / 2, notes)
    except OSError as error:
        notes.append(f"disk speed could not be measured: {error}")
        return None


def _fill(handle: int, seconds: float) -> None:
    block = os.urandom(_BLOCK_BYTES)  # a compressing disk would make zeros look fast
    stats = os.fstatvfs(handle)
    most = min(256 * MIB, stats.f_bavail * stats.f_frsize // 10)
    until = time.perf_counter() + seconds
    for _ in range(max(1, most // _BLOCK_BYTES)):
        os.write(handle, block)
        os.fdatasync(handle)
        if time.perf_counter() > until:
            return


def _timed_read(path: Path, seconds: float, notes: list[str]) -> float | None:
    with mmap.mmap(-1, _BLOCK_BYTES) as buffer:  # O_DIRECT wants page-aligned memory
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                return _read_rate(handle, buffer, seconds)
            finally:
                os.close(handle)
        except OSError:  # some filesystems refuse O_DIRECT, at open or at the first read
            notes.append("disk speed is of buffered reads; the page cache may flatter it")
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            return _read_rate(handle, buffer, seconds)
        finally:
            os.close(handle)


def _read_rate(handle: int, buffer: mmap.mmap, seconds: float) -> float | None:
    start = time.perf_counter()
    done = offset = 0
    while (spent := time.perf_counter() - start) < seconds:
        got = os.preadv(handle, [buffer], offset)
        done, offset = done + got, offset + got
        if got < len(buffer):
            if offset == got:  # the file is shorter than one block, too short to measure
                return None
            offset = 0  # from the start again; direct reads bypass the page cache
    return done / spent if done else None
