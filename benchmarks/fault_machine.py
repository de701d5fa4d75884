"""Broken disks and small machines for one process: real mounts in a mount namespace of its own; needs root.

Enters: a folder, and what is wrong with the disk under it. Leaves: the same files below another folder, where reading
fails, waits or never ends; or a tiny, full or read-only file system. Costs: two forks; everything goes away with the
process, because no other one sees the mounts.

`EIO` and slow reads are made by a file system in user space that speaks the kernel's FUSE protocol itself (no library,
no LD_PRELOAD): every program meets them alike, with `read`, with `mmap` and in the page cache. A bad sector is 4 KiB in
the middle of a file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import time
from pathlib import Path

_CLONE_NEWNS, _MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    0x20000,
    1,
    32,
    4096,
    16384,
    1 << 18,
)
_LOOKUP, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE, _INIT = 1, 3, 14, 15, 17, 18, 26
_OPENDIR, _READDIR, _RELEASEDIR, _FORGET, _BATCH_FORGET, _FLUSH = 27, 28, 29, 2, 42, 25
_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_PR_SET_PDEATHSIG = 1


class NotApplicableError(Exception):
    """The fault does not exist here: no workers, or no right to mount."""


def _call(name: str, *given: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*given) != 0:
        number = ctypes.get_errno()
        raise NotApplicableError(f"{name}: {os.strerror(number)}")


def own_mounts() -> None:
    """Give this process mounts of its own."""
    _call("unshare", _CLONE_NEWNS)
    _call("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)


def mount_memory(folder: Path, options: str) -> None:
    """Mount an empty file system in memory: "size=64k", "nr_inodes=4"."""
    folder.mkdir(exist_ok=True)
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), options.encode())


def make_read_only(folder: Path) -> None:
    """Remount a folder read-only; root cannot write there either."""
    place = os.fsencode(folder)
    _call("mount", place, place, None, ctypes.c_ulong(_MS_BIND), None)
    _call("mount", None, place, None, ctypes.c_ulong(_MS_REMOUNT | _MS_BIND | _MS_RDONLY), None)


def mount_broken(source: Path, folder: Path, delay: float = 0.0, bad: Path | None = None) -> None:
    """Show `source` below `folder`: every read waits `delay` seconds, a sector of `bad` cannot be read.

    What is written there (lock files, caches of the peers) goes into memory.
    """
    lower, upper = (
        folder.with_name(f"{folder.name}-lower"),
        folder.with_name(f"{folder.name}-upper"),
    )
    lower.mkdir()
    folder.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NotApplicableError(f"/dev/fuse: {error.strerror}") from error
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    _call(
        "mount", b"faults", os.fsencode(lower), b"fuse.faults", ctypes.c_ulong(0), options.encode()
    )
    if os.fork() == 0:
        try:
            _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _Server(device, source, delay, bad).run()
        finally:
            os._exit(0)
    os.close(device)
    mount_memory(upper, "size=64m")
    for name in ("up", "work"):
        (upper / name).mkdir()
    layers = f"lowerdir={lower},upperdir={upper}/up,workdir={upper}/work"
    _call("mount", b"overlay", os.fsencode(folder), b"overlay", ctypes.c_ulong(0), layers.encode())


class _Server:
    """Answers the kernel, one question after the other, in a process of its own."""

    def __init__(self, device: int, source: Path, delay: float, bad: Path | None) -> None:
        self.device, self.delay = device, delay
        self.nodes, self.numbers = {1: source}, {source: 1}
        middle = bad.stat().st_size // 2 // 4096 * 4096 if bad else 0
        self.bad = (bad, middle, middle + 4096)

    def run(self) -> None:
        while True:
            try:
                asked = os.read(self.device, 1 << 20)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                continue
            _, what, number, node, *_ = _IN.unpack_from(asked)
            if what in (_FORGET, _BATCH_FORGET):
                continue
            try:
                answer, code = self._answer(what, node, asked[_IN.size :]), 0
            except OSError as error:
                answer, code = b"", -(error.errno or errno.EIO)
            os.write(self.device, _OUT.pack(_OUT.size + len(answer), code, number) + answer)

    def _answer(self, what: int, node: int, data: bytes) -> bytes:
        if what == _INIT:
            # Version 7.31; no read ahead beyond 16 KiB, so that a bad sector spoils little around it.
            return struct.pack(
                "<IIIIHHIIHHI7I", 7, 31, 16384, 0, 12, 10, 16384, 1, 1, 0, 0, *[0] * 7
            )
        path = self.nodes[node]
        if what == _LOOKUP:
            path = path / os.fsdecode(data.rstrip(b"\0"))
            found = path.lstat()
            number = self.numbers.setdefault(path, len(self.numbers) + 1)
            self.nodes[number] = path
            return struct.pack("<QQQQII", number, 0, 1, 1, 0, 0) + self._attributes(number, found)
        if what == _GETATTR:
            return struct.pack("<QII", 1, 0, 0) + self._attributes(node, path.lstat())
        if what in (_OPEN, _OPENDIR):
            return struct.pack("<QII", 0, 0, 0)
        if what == _READ:
            return self._read(path, *struct.unpack_from("<QQI", data)[1:])
        if what == _READDIR:
            return self._list(path, *struct.unpack_from("<QQI", data)[1:])
        if what == _STATFS:
            return struct.pack("<QQQQQIIII6I", *[1 << 20] * 5, 4096, 255, 4096, 0, *[0] * 6)
        if what in (_RELEASE, _RELEASEDIR, _FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "not known")

    def _attributes(self, number: int, found: os.stat_result) -> bytes:
        seconds = int(found.st_mtime)
        return struct.pack(
            "<QQQQQQIIIIIIIIII", number, found.st_size, found.st_blocks, seconds, seconds, seconds, 0, 0, 0,
            found.st_mode, found.st_nlink, 0, 0, 0, 4096, 0,
        )  # fmt: skip

    def _read(self, path: Path, offset: int, size: int) -> bytes:
        time.sleep(self.delay)
        if path == self.bad[0] and offset < self.bad[2] and offset + size > self.bad[1]:
            raise OSError(errno.EIO, "a bad sector")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def _list(self, path: Path, offset: int, size: int) -> bytes:
        made = b""
        names = [".", "..", *sorted(each.name for each in path.iterdir())]
        for place, name in list(enumerate(names))[offset:]:
            raw = os.fsencode(name)
            kind = stat.S_IFDIR if (path / name).is_dir() else stat.S_IFREG
            entry = struct.pack("<QQII", place + 100, place + 1, len(raw), kind >> 12) + raw
            entry += bytes(-len(entry) % 8)
            if len(made) + len(entry) > size:
                break
            made += entry
        return made
