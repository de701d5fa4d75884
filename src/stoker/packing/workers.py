"""The worker processes of a pack, and what happens when one of them dies.

Enters: a picklable function and its items. Leaves: results as they finish, in any order. Costs: one
process per job, started when it is first needed; with one job and nothing that can hang, none at all.

Contract:
- Success: every item's result is yielded once. Workers stay for the next `run` until `close`.
- Failure: an exception in a worker ends the run with that exception and the item's label. A worker that
  dies (killed, crashed inside a C library, out of memory, too long on one row) does not: its item is given
  to a new worker, without the row that killed it. An item that keeps killing workers without naming a row
  ends the run. A worker that was stopped is waited for, and named after 30 s.
- Cancel (Ctrl-C, a signal, the generator closed): all workers are killed before `run` returns. They end
  by themselves when this process is gone.

Each worker has pipes of its own, so that it is known which item a dead worker was on, and so that no
semaphore or shared memory is left behind. Not thread-safe: one thread calls everything.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Protocol, Self, TypeVar

import psutil

from stoker import stalls
from stoker.errors import StokerError
from stoker.lifetime import child_environment
from stoker.packing.worker import ALIVE, NOTES, PARENT, dump, load, noted_row, receive, send

_MAX_DEATHS = 2
_CHILD = "from stoker.packing.worker import serve; serve()"
_THREADS = ("OMP", "OPENBLAS", "MKL", "NUMEXPR")


class Numbered(Protocol):
    """An item of work: anything with an index and a label."""

    @property
    def index(self) -> int:
        """Position among the items."""

    @property
    def label(self) -> str:
        """Name for people."""


Item = TypeVar("Item", bound=Numbered)
Result = TypeVar("Result")
Poison = Mapping[int, str]  # rows that must not be touched again, with the reason


class Workers:
    """Up to `jobs` worker processes; also a context manager that ends them."""

    def __init__(
        self,
        jobs: int = 0,  # worker processes; 0 means one per usable core
        # time limit of one guarded row; None when nothing can hang
        limit_seconds: float | None = None,
        # a file whose absence ends the workers (see `worker`); "" where this process is enough
        alive: str = "",
        # whether work always runs in processes that may die; by default where there are several, or a row may hang
        isolated: bool | None = None,
    ) -> None:
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self.limit_seconds = limit_seconds
        self._alive = alive
        self.isolated = isolated or self.jobs > 1 or limit_seconds is not None
        self._processes: list[_Process] = []

    def run(
        self,
        work: Callable[[Item, Poison], Result],
        items: Sequence[Item],
        poison: Mapping[int, Poison] | None = None,
    ) -> Iterator[tuple[int, Result]]:
        """Yield `(index, result)` as items finish.

        `work` is given an item and the rows of it that must not be touched; `poison` has those known already, by
        item index.
        """
        known = {index: dict(rows) for index, rows in (poison or {}).items()}
        if not self.isolated:
            for item in items:
                yield item.index, work(item, known.get(item.index, {}))
            return
        code = dump(work)
        waiting = deque(items)
        deaths: Counter[tuple[int, int | None]] = Counter()
        finished = False
        try:
            while waiting or any(process.item for process in self._processes):
                self._hand_out(code, waiting, known)
                for process in self._ready():
                    item, outcome = process.take()
                    if outcome is None:
                        self._processes.remove(process)
                        self._blame(process, item, known, deaths)
                        waiting.appendleft(item)
                    elif outcome[0]:
                        yield item.index, outcome[1]
                    else:
                        raise outcome[1]
            finished = True
        finally:
            if not finished:
                self.close()

    def _hand_out(
        self, code: bytes, waiting: deque[Any], poison: Mapping[int, dict[int, str]]
    ) -> None:
        while waiting:
            idle = next((process for process in self._processes if process.item is None), None)
            if idle is None and len(self._processes) < self.jobs:
                idle = _Process(self.jobs, self._alive)
                self._processes.append(idle)
            if idle is None:
                return
            item = waiting.popleft()
            idle.give(item, dump((code, item, poison.get(item.index, {}), self.limit_seconds)))

    def _ready(self) -> list[_Process]:
        """Wait until a worker has answered or died, and return those that have; name one that was stopped."""
        busy = {process.answers.fileno(): process for process in self._processes if process.item}
        readable: list[int] = []
        while not readable:
            readable, _, _ = select.select(list(busy), [], [], stalls.WAIT_SECONDS)
            if not readable:
                for process in busy.values():
                    process.say_if_stopped()
        return [busy[descriptor] for descriptor in readable]

    def _blame(
        self,
        process: _Process,
        item: Numbered,
        poison: dict[int, dict[int, str]],
        deaths: Counter[tuple[int, int | None]],
    ) -> None:
        """Find the row that killed a worker; one death may be an accident, two are not."""
        status, row = process.end()
        deaths[item.index, row] += 1
        twice = deaths[item.index, row] >= _MAX_DEATHS
        if row is not None and status == -signal.SIGALRM:
            poison.setdefault(item.index, {})[row] = f"took longer than {self.limit_seconds:g} s"
        elif row is not None and twice:
            poison.setdefault(item.index, {})[row] = "crashed the worker process twice"
        elif twice:
            raise StokerError(
                f"the worker on {item.label!r} died again and again: {_describe(status)}.",
                "workers that live",
                "free some memory, or use fewer workers: --jobs 1",
            )

    def close(self) -> None:
        """Kill the workers; a second call does nothing."""
        for process in self._processes:
            process.end()
        self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Process:
    """One worker process and the item it is on."""

    def __init__(self, jobs: int, alive: str) -> None:
        self.item: Any = None
        self._is_told = False
        # Without a name: nothing to remove. Passed on by its descriptor.
        self._notes = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
        threads = max(1, len(os.sched_getaffinity(0)) // jobs)
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._notes.fileno()],
            env={
                **{f"{library}_NUM_THREADS": str(threads) for library in _THREADS},
                **child_environment(),
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                PARENT: str(os.getpid()),
                NOTES: str(self._notes.fileno()),
                ALIVE: alive,
            },
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._orders: IO[bytes] = self._child.stdin
        self.answers: IO[bytes] = self._child.stdout

    def give(self, item: Any, order: bytes) -> None:
        self.item = item
        with contextlib.suppress(BrokenPipeError):  # it died; `take` will find out
            send(self._orders, order)

    def take(self) -> tuple[Any, tuple[bool, Any] | None]:
        """Return the item and its outcome; None as outcome when the worker died."""
        item, self.item = self.item, None
        message = receive(self.answers)
        return item, None if message is None else load(message)

    def say_if_stopped(self) -> None:
        """Tell the user, once, that the process was stopped (SIGSTOP, Ctrl-Z of a debugger) and how it goes on."""
        pid = self._child.pid
        with contextlib.suppress(psutil.Error):
            if not self._is_told and psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                self._is_told = True
                stalls.say(
                    f"still waiting for the worker (pid {pid}) on {self.item.label}: it is stopped; "
                    f"`kill -CONT {pid}` lets it go on, `kill -9 {pid}` gives its work to another"
                )

    def end(self) -> tuple[int, int | None]:
        """Kill the worker if it lives; return how it ended, and the row that it was on."""
        self._child.kill()
        status = self._child.wait()
        row = noted_row(self._notes.fileno())
        for file in (self._orders, self.answers, self._notes):
            with contextlib.suppress(BrokenPipeError):
                file.close()
        return status, row


def _describe(status: int) -> str:
    if status >= 0:
        return f"its process ended with exit status {status}"
    known = {one.value: one.name for one in signal.Signals}
    return f"its process was ended by {known.get(-status, f'signal {-status}')}"
