"""The folder of a run: locked for one process, with its checkpoints and its log.

Enters: a folder. Leaves: the lock on it, or an error with the id of the process that holds it; events in its
log. Costs: two system calls to open, one `write` per event. The kernel holds the lock (flock) and releases it
whenever the process ends, so nothing has to be cleaned up after a kill.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from stoker.errors import InputError, StoreError, unwritable
from stoker.ownership import check_home, empty_file, open_own_file
from stoker.report import LOG_NAME, Note, RunLog, open_tensorboard
from stoker.train.checkpoint import Checkpoints
from stoker.train.ranks import Ranks
from stoker.train.settings import TrainSettings

_BEGINNING = b"process "


class RunLock:
    """Lock on a run directory for this process; also a context manager.

    Forked worker processes do not inherit the lock: a worker that outlives a killed trainer would keep
    the directory locked.

    Args:
        folder: The run directory, created if missing; the lock is on the file `lock` in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file = -1

    def acquire(self) -> Self:
        """Take the lock, or raise without waiting.

        Raises:
            StoreError: Another process holds the lock, whose id is named; or the directory cannot be locked.
        """
        check_home(self.folder)
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


class RunFolder:
    """The folder of a training run, while `fit` has it open.

    Args:
        path: The folder; with None, nothing is saved.
        settings: How many checkpoints are kept, and which is the best.
        ranks: Rank 0 locks the folder and writes the log.

    Attributes:
        checkpoints: The run's checkpoints; None before `open`, and without a folder.
        log: The run's log; None while it is not open, and on all ranks but the first.
    """

    def __init__(self, path: str | Path | None, settings: TrainSettings, ranks: Ranks) -> None:
        self.path = None if path is None else Path(path)
        self._settings, self._ranks = settings, ranks
        self.checkpoints: Checkpoints | None = None
        self.log: RunLog | None = None

    def open(self, stack: contextlib.ExitStack, resume: bool, told: Sequence[Note]) -> None:
        """Lock the folder and open its log, until the stack is closed. Collective.

        Args:
            stack: Releases the lock and closes the log.
            resume: Whether the folder may hold a run already.
            told: Notes from before the log was open; they are written first.

        Raises:
            InputError: The folder holds a run, or other files with the names of checkpoints.
            StoreError: Another process holds it, or it cannot be written.
        """
        path, settings, ranks = self.path, self._settings, self._ranks
        if path is None:
            return
        with ranks.shared_fate():
            if ranks.is_first:
                stack.enter_context(RunLock(path))
            self.checkpoints = Checkpoints(
                path, settings.keep_last, settings.monitor, settings.maximise
            )
            if not resume and self.checkpoints.list():
                raise InputError(
                    f"{path} already holds a run.",
                    "an empty folder, or the run to go on with",
                    "fit(resume=True), or another run_dir",
                )
            if not resume:
                self.checkpoints.check_names()
        if not ranks.is_first:
            return
        scalars = open_tensorboard(path / "tensorboard") if settings.tensorboard else None
        self.log = stack.enter_context(RunLog(path / LOG_NAME, scalars))
        stack.callback(self._forget_log)
        for note in told:
            self.write("note", note.to_json(), 0, 0)

    def _forget_log(self) -> None:
        self.log = None

    def write(self, event: str, values: Mapping[str, Any], step: int, epoch: int) -> None:
        """Write an event to the log, if it is open."""
        if self.log is not None:
            self.log.write(event, values, step=step, epoch=epoch)
