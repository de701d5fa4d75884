"""Warns of disks that do not answer: names the file that a thread has been waiting for.

Enters: the file that a thread is about to read. Leaves: nothing; after 30 s without an answer a warning that names the
file, and again after 5 and 50 minutes. Costs: 1 µs a read, and one thread that looks every 5 s.

Contract: nothing is ended, repeated or skipped: when a network disk comes back, reading continues. A read is judged by
its time alone. Work (`is_work`) may take long; it counts as waiting only while this process uses less than a hundredth
of a core. The thread runs from the first `start_watch` to the end of the process; a forked child has none.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stoker.display import printable
from stoker.units import format_seconds

WAIT_SECONDS = 30.0
_AGAIN = 10
_LOOKS = 6  # in `WAIT_SECONDS`
_IDLE_SHARE = 0.01


class Waiting:
    """Context in which the calling thread waits for a file.

    Work on it (`is_work`) may take long while the processor is busy with it.
    """

    __slots__ = ("is_work", "outer", "since", "told_after", "what")

    def __init__(self, what: str | Path, *, is_work: bool = False) -> None:
        self.what, self.is_work = what, is_work

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self.outer = _waiting.get(thread)
        self.since, self.told_after = time.monotonic(), 0.0
        _waiting[thread] = self

    def __exit__(self, *_: object) -> None:
        if self.outer is None:
            _waiting.pop(threading.get_ident(), None)
        else:
            _waiting[threading.get_ident()] = self.outer


_waiting: dict[int, Waiting] = {}
"""By thread, the innermost wait; its `outer` is the wait around it."""


def find_stalled(now: float, busy_at: float) -> list[tuple[str, float]]:
    """Return the names of overdue waits with their seconds; each once, and again after ten times as long.

    `busy_at` is when this process last used its processors.
    """
    found: dict[str, float] = {}
    for waiting in list(_waiting.values()):
        seconds = now - (max(waiting.since, busy_at) if waiting.is_work else waiting.since)
        if seconds >= max(WAIT_SECONDS, _AGAIN * waiting.told_after):
            waiting.told_after = seconds
            found[str(waiting.what)] = max(seconds, found.get(str(waiting.what), 0.0))
    return sorted(found.items())


class _Watch:
    def __init__(self) -> None:
        self._tell: Callable[[str], object] = partial(
            warnings.warn, category=RuntimeWarning, stacklevel=2
        )
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self, tell: Callable[[str], object] | None = None) -> None:
        """Watch this process from now on.

        `tell` gets each text, in the watch's thread; the default is `warnings.warn`.
        """
        self._tell = tell or self._tell
        if self._thread is None:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, name="stoker-stalls", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join(1.0)

    def forget(self) -> None:
        """Reset in a forked child: the thread and the waits are the parent's."""
        self._thread = None
        _waiting.clear()

    def _run(self) -> None:
        looked_at, used = time.monotonic(), time.process_time()
        busy_at = looked_at
        while not self._stop.wait(WAIT_SECONDS / _LOOKS):
            now, before = time.monotonic(), used
            used = time.process_time()
            if used - before > _IDLE_SHARE * (now - looked_at):
                busy_at = now
            looked_at = now
            for what, seconds in find_stalled(now, busy_at):
                self.say(
                    f"still waiting for {what}, for {format_seconds(seconds)}: its disk does not answer"
                )

    def say(self, text: str) -> None:
        """Tell the user about a wait that the caller knows of, in the same way as the watch."""
        # Where warnings are errors, the thread must not end.
        with contextlib.suppress(Exception):
            self._tell(printable(text))


_watch = _Watch()


start_watch, say = _watch.start, _watch.say
atexit.register(_watch.stop)
os.register_at_fork(after_in_child=_watch.forget)
