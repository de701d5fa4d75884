"""A worker process of a pack: builds parts, one at a time.

Enters: on standard input, one message per part. Leaves: one message per part on the original standard output:
the result, or the exception. Costs: starting Python with numpy and h5py once per worker, about
half a second and 100 MB.

A worker ends when its input ends, when its parent is gone, or, on a cluster, when the file that marks the pack as
running is gone. A worker of an interrupted pack must not write into the next one.

The time limit of one row cannot be a Python signal handler, because C++ code that hangs never returns to Python.
So the worker sets a timer whose default action ends the process, and notes the row in a file before it begins.
The parent reads that note when a worker has died.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from stoker.errors import StokerError
from stoker.lifetime import end_with_parent
from stoker.stalls import start_watch

PARENT = "STOKER_PARENT"  # environment variable: the process that started this worker
NOTES = "STOKER_NOTES"
"""Environment variable: the descriptor of the file in which the current row is noted."""
ALIVE = "STOKER_ALIVE"
"""Environment variable: a file that exists while the pack runs; "" if observing the parent is enough."""
_LENGTH = struct.Struct("<Q")
_ROW = struct.Struct("<q")
_BETWEEN_ROWS = -1

Guard = Callable[[int | None], None]


# -- messages --------------------------------------------------------------------------------------


def dump(value: Any) -> bytes:
    """Return a value as bytes, including functions and classes that a user's script defines."""
    import cloudpickle

    code: bytes = cloudpickle.dumps(value)
    return code


def load(code: bytes) -> Any:
    """Return what `dump` was given."""
    import cloudpickle

    return cloudpickle.loads(code)


def send(file: IO[bytes], message: bytes) -> None:
    """Write one message."""
    file.write(_LENGTH.pack(len(message)) + message)
    file.flush()


def receive(file: IO[bytes]) -> bytes | None:
    """Return the next message; None if the other side has ended."""
    header = file.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    message = file.read(length)
    return message if len(message) == length else None


# -- the current row -------------------------------------------------------------------------------


class RowNotes:
    """Notes the current row in a file; a row over the time limit ends the process. Costs 2 µs a row."""

    def __init__(self, descriptor: int, limit_seconds: float | None) -> None:
        self._descriptor = descriptor
        self._limit_seconds = limit_seconds

    def __call__(self, row: int | None) -> None:
        """Note that work on `row` begins; None: between two rows."""
        os.pwrite(self._descriptor, _ROW.pack(_BETWEEN_ROWS if row is None else row), 0)
        if self._limit_seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0 if row is None else self._limit_seconds)


def noted_row(descriptor: int) -> int | None:
    """Return the row that a worker was on when it died; None between two rows."""
    noted = os.pread(descriptor, _ROW.size, 0)
    row = _ROW.unpack(noted)[0] if len(noted) == _ROW.size else _BETWEEN_ROWS
    return None if row == _BETWEEN_ROWS else row


def unguarded(row: int | None) -> None:
    """The guard of work in the caller's own process, which must not be ended."""


_guard: Guard = unguarded


def current_guard() -> Guard:
    """Return the guard of the part that this process works on."""
    return _guard


# -- the process -----------------------------------------------------------------------------------


def serve() -> None:
    """Build parts until the input ends: the main function of a worker process."""
    global _guard  # noqa: PLW0603  one per process, as the process works on one part at a time
    end_with_parent(int(os.environ[PARENT]))
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the whole group; the parent decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # text that libraries print must not get between two answers
    if alive := os.environ.get(ALIVE):
        threading.Thread(target=_end_without, args=(alive,), daemon=True).start()
    start_watch(lambda text: sys.stderr.write(f"warning: {text}\n"))
    known: tuple[bytes, Any] = (b"", None)
    while (message := receive(sys.stdin.buffer)) is not None:
        code, item, poison, limit_seconds = load(message)
        if code != known[0]:
            known = (code, load(code))
        _guard = RowNotes(int(os.environ[NOTES]), limit_seconds)
        _guard(None)
        outcome: tuple[bool, Any]
        try:
            outcome = (True, known[1](item, poison))
        except Exception as error:  # noqa: BLE001  the parent raises it
            error.add_note(f"while working on {item.label!r}")
            outcome = (False, error)
        _guard(None)
        send(answers, _as_message(outcome))


def _as_message(outcome: tuple[bool, Any]) -> bytes:
    try:
        message = dump(outcome)
        load(message)
    except Exception as error:  # noqa: BLE001  pickling runs user code
        lost = f"{type(outcome[1]).__name__}: {outcome[1]} (which cannot be pickled: {error})."
        return dump((False, StokerError(lost)))
    return message


def _end_without(alive: str) -> None:
    """End this process when its pack has ended."""
    while is_alive(alive):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def is_alive(path: str) -> bool:
    """Whether a file exists. It is opened, because a network file system answers `stat` from its cache."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        return False
    except OSError:  # a temporary failure of a network file system
        return True
    return True
