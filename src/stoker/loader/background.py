"""Background threads: a worker that runs ahead of its consumer, and the end of all threads.

Enters: a function that makes the next result. Leaves: its results, in order, made before they are asked for.
Costs: one thread and `ahead` results in memory.

Every thread of the loader is ended in one of three ways: by its owner's `close`, by the janitor thread after its
owner was garbage collected, or before the interpreter shuts down.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from stoker.errors import StokerError

_POLL_SECONDS = 1.0
_FINISH_SECONDS = 10.0

T = TypeVar("T")


class Stoppable(Protocol):
    """A thread of the loader, or an object that owns one."""

    def stop(self) -> None:
        """End it."""


_running: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def stop_at_exit(thread: Stoppable) -> None:
    """Register a thread to be ended before the interpreter shuts down.

    A daemon thread that asks for the interpreter's lock during shutdown is made to exit on the spot. Inside
    torch's C++ code (freeing a tensor is enough) that aborts the whole process, with exit code 134, although
    all work is done.
    """
    _running.add(thread)


class Background(Generic[T]):
    """Calls `pull` in a thread, at most `ahead` results before they are asked for.

    Success: results in order, then StopIteration. Failure: the results before `pull`'s error, then the error
    with its traceback, then StopIteration. Stop: the thread ends after the current call of `pull` and drops its
    reference to it; results that were not taken are dropped. The thread starts with the first `take`, and has torch's
    default device of the thread that made it.
    """

    def __init__(
        self,
        pull: Callable[[], T],
        ahead: int,
        name: str,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._pull: Callable[[], T] | None = pull
        self._ahead = ahead
        self._around = around
        self._default_device = _default_device()
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self.stopped = False
        self._changed = (
            threading.Condition()
        )  # its lock is reentrant: a finalizer may call `stop` anywhere
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def take(self) -> T:
        """Return the next result; blocks until there is one."""
        with self._changed:
            if self._thread.ident is None and not self.stopped:
                stop_at_exit(self)
                self._thread.start()
            while not self._ready:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if self._ended or self.stopped:
                    raise StopIteration
                if not self._thread.is_alive():
                    raise StokerError(
                        f"the thread {self._thread.name!r} is gone, as after a fork.",
                        "an iteration that stays in the process that began it",
                        "begin a new iteration in this process",
                    )
                self._changed.wait(_POLL_SECONDS)
            self._changed.notify_all()
            return self._ready.popleft()

    def stop(self) -> None:
        """Ask the thread to end; does not wait."""
        with self._changed:
            self.stopped = True
            self._ready.clear()
            self._changed.notify_all()
            if self._thread.ident is None:
                self._pull = None

    def join(self, seconds: float) -> bool:
        """Wait for the thread; True if it has ended or never started."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            with self._changed:
                self._changed.wait_for(lambda: self._ended, seconds)
            if self._ended:
                self._thread.join(_POLL_SECONDS)
        return self._thread.ident is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self._around(), self._default_device:
                while self._may_pull():
                    assert self._pull is not None
                    result = self._pull()
                    with self._changed:
                        if not self.stopped:
                            self._ready.append(result)
                        del result
                        self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001  the consumer raises it, whatever it is
            self._error = error
        finally:
            self._pull = None
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _may_pull(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or len(self._ready) < self._ahead)
            return not self.stopped


def _default_device() -> contextlib.AbstractContextManager[Any]:
    """Return a context with torch's default device: torch keeps it by thread, and a sampler may draw on the GPU."""
    torch = sys.modules.get(
        "torch"
    )  # without it there is none; the rooms that need no torch import this one
    device = torch.get_default_device() if torch else None
    # Each call of torch costs more inside such a context.
    return device if device is not None and device.type != "cpu" else contextlib.nullcontext()


class _Janitor:
    """A thread that waits on behalf of finalizers, and permutes the next epochs.

    A finalizer runs in any thread, under any lock: it must not wait, nor take a lock that is not reentrant.
    `SimpleQueue.put` is safe there; this thread then calls what was handed over.
    """

    def __init__(self) -> None:
        self._dropped: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._parents = self._dropped
        self._thread: threading.Thread | None = None
        self._process = -1

    def start(self) -> None:
        """Start the thread in this process; does nothing if it runs."""
        if self._process != os.getpid():
            if self._process != -1:
                # After a fork: what the parent handed over belongs to the parent. The queue is kept, because
                # freeing a CUDA event in a forked child aborts it.
                self._parents, self._dropped = self._dropped, queue.SimpleQueue()
            self._process = os.getpid()
            self._thread = threading.Thread(target=self._run, name="stoker-janitor", daemon=True)
            self._thread.start()

    def hand_over(self, end: Callable[[], object]) -> None:
        """Call `end` soon, in the janitor's thread. Never blocks; safe in a finalizer."""
        self._dropped.put(end)

    def finish(self, seconds: float) -> None:
        """Run the calls that were handed over, then end the thread. Calls handed over later do not run."""
        if self._thread is not None and self._process == os.getpid():
            self._dropped.put(None)
            # An interrupt came in the middle of Thread.start.
            with contextlib.suppress(RuntimeError):
                self._thread.join(seconds)

    def _run(self) -> None:
        while (end := self._dropped.get()) is not None:
            with contextlib.suppress(Exception):
                end()
            del end


JANITOR = _Janitor()


def _stop_threads() -> None:
    threads, until = list(_running), time.monotonic() + _FINISH_SECONDS
    for thread in threads:
        thread.stop()
    for thread in threads:
        if isinstance(thread, Background):
            thread.join(max(0.0, until - time.monotonic()))


@atexit.register
def _end_threads() -> None:
    _stop_threads()
    JANITOR.finish(_FINISH_SECONDS)


# Executors wait for all their tasks before `atexit` runs: a whole dataset may be queued. Functions registered
# later run first, so the executors' function must be registered before ours.
importlib.import_module("concurrent.futures.thread")
getattr(threading, "_register_atexit", atexit.register)(_stop_threads)


# A forked child has none of the threads, and their locks may be taken.
os.register_at_fork(after_in_child=_running.clear)
# Garbage of the parent stays garbage in a forked child: a DataLoader worker that collected a CUDA event or graph of the
# parent would call a driver that does not work after a fork, and abort.
os.register_at_fork(after_in_child=gc.freeze)
