"""Lock of a run directory: one process at a time.

Enters: a folder. Leaves: the lock on it, or an error with the id of the process that holds it. Costs one
system call. It is a lock of the kernel (flock), which ends with the process however that ends: nothing has to be
cleaned up after a kill.
"""

from __future__ import annotations

import fcntl
import os
import socket
import weakref
from pathlib import Path
from typing import Self

from stoker.errors import StoreError, unwritable
from stoker.ownership import empty_file, open_own_file

_BEGINNING = b"process "


class RunLock:
    """Holds a run directory for this process; also a context manager.

    Worker processes forked meanwhile do not inherit it: one that outlived a killed trainer would keep
    the directory locked.

    Args:
        folder: The run directory, made where missing; the lock is on the file `lock` in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file = -1

    def acquire(self) -> Self:
        """Take the lock at once, or raise.

        Raises:
            StoreError: Another process holds it; its id is named.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open_own_file(self.folder / "lock", os.O_RDWR, _is_lock, "the lock of the run")
        except OSError as error:
            raise unwritable(self.folder, error, "the run directory") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(file, 300, 0).decode(errors="replace").strip()
            os.close(file)
            raise self._refused(error, holder) from error
        empty_file(file)
        try:
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            os.close(file)
            raise unwritable(self.folder / "lock", error) from error
        self._file = file
        _held.add(self)
        return self

    def _refused(self, error: OSError, holder: str) -> StoreError:
        if isinstance(error, BlockingIOError):
            return StoreError(
                f"{self.folder} is in use by {holder or 'another process'}.",
                "one process per run directory",
                "wait for it, end it, or choose another run directory",
            )
        return StoreError(
            f"cannot lock {self.folder}: {error.strerror}.",
            "a file system with locks (flock)",
            "put the run directory on a local disk",
        )

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._file >= 0:
            empty_file(self._file)
            self._close()
            _held.discard(self)

    def _close(self) -> None:
        os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def _is_lock(file: int) -> bool:
    return os.pread(file, len(_BEGINNING), 0) == _BEGINNING


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # Closing a child's copy leaves the parent's lock alone.
    for lock in list(_held):
        lock._close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
