"""The worker processes of a pack, what happens when one of them dies, and a worker's own side.

Enters: a picklable function and its items. Leaves: results as they finish, in any order. Costs: one process per job,
started when it is first needed, about half a second and 100 MB for Python with numpy and h5py; with one job and
nothing that can hang, none at all.

Contract:
- Success: every item's result is yielded once. Workers stay alive for the next `run` until `close`.
- Failure: an exception in a worker ends the run with that exception and the item's label. A worker that
  dies (killed, crashed inside a C library, out of memory, too long on one row) does not: its item is given
  to a new worker, without the row that killed it. An item that keeps killing workers without naming a row
  ends the run. `run` waits for a worker that was stopped, and names it after 30 s.
- Cancel (Ctrl-C, a signal, the generator closed): all workers are killed before `run` returns. They end
  by themselves when this process is gone, or, on a cluster, when the file that marks the pack as running is
  gone: a worker of an interrupted pack must not write into the next one.

Each worker has its own pipes: so it is known which item a dead worker was on, and no semaphore or
shared memory remains. Not thread-safe: one thread calls everything.

The time limit of one row cannot be a Python signal handler, because C++ code that hangs never returns to Python.
So the worker sets a timer whose default action ends the process, and notes the row in a file before it begins.
The parent reads that note when a worker has died.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pickle import UnpicklingError
from typing import IO, Any, Protocol, Self, TypeVar

import cloudpickle
import psutil

from stoker import stalls
from stoker.errors import StokerError
from stoker.lifetime import child_environment, end_with_parent
from stoker.sources.dataset import pickled

_MAX_DEATHS = 2
_CHILD = "from stoker.packing.workers import serve; serve()"
_THREADS = ("OMP", "OPENBLAS", "MKL", "NUMEXPR")
_PARENT = "STOKER_PARENT"  # environment variable: the process that started this worker
_NOTES = "STOKER_NOTES"
"""Environment variable: the descriptor of the file in which the current row is noted."""
_ALIVE = "STOKER_ALIVE"
"""Environment variable: a file that exists while the pack runs; "" if observing the parent is enough."""
_ROW = struct.Struct("<q")
_BETWEEN_ROWS = -1

Guard = Callable[[int | None], None]


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
        # a file whose absence ends the workers (see `_end_without`); "" if observing this process is enough
        alive: str = "",
        # True runs work in other processes even if there is only one job and no row may hang
        isolated: bool | None = None,
    ) -> None:
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self.limit_seconds = limit_seconds
        self._alive = alive
        self.isolated = isolated or self.jobs > 1 or limit_seconds is not None
        self._processes: list[_Process] = []

    def run(
        self, work: Callable[[Item, Poison], Result], items: Sequence[Item]
    ) -> Iterator[tuple[int, Result]]:
        """Yield `(index, result)` as items finish. `work` gets an item and its rows that must not be touched."""
        if not self.isolated:
            for item in items:
                yield item.index, work(item, {})
            return
        poison: defaultdict[int, dict[int, str]] = defaultdict(dict)
        code = pickled(work)
        waiting = deque(items)
        deaths: Counter[tuple[int, int | None]] = Counter()
        finished = False
        try:
            while waiting or any(process.item for process in self._processes):
                self._hand_out(code, waiting, poison)
                for process in self._ready():
                    item, outcome = process.take()
                    if outcome is None:
                        self._processes.remove(process)
                        self._blame(process, item, poison[item.index], deaths)
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
            if idle is None:
                if len(self._processes) == self.jobs:
                    return
                idle = _Process(self.jobs, self._alive)
                self._processes.append(idle)
            item = waiting.popleft()
            idle.give(item, (code, item, poison[item.index], self.limit_seconds))

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
        self, process: _Process, item: Numbered, poison: dict[int, str], deaths: Counter[Any]
    ) -> None:
        """Find the row that killed a worker; one death may be an accident, two are not."""
        status, row = process.end()
        deaths[item.index, row] += 1
        twice = deaths[item.index, row] >= _MAX_DEATHS
        if row is not None and status == -signal.SIGALRM:
            poison[row] = f"took longer than {self.limit_seconds:g} s"
        elif row is not None and twice:
            poison[row] = "crashed the worker process twice"
        elif twice:
            how = f"its process ended with exit status {status}"
            if status < 0:
                known = {one.value: one.name for one in signal.Signals}
                how = f"its process was ended by {known.get(-status, f'signal {-status}')}"
            raise StokerError(
                f"the worker on {item.label!r} died again and again: {how}.",
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
        # A file without a name needs no removal; the worker inherits its descriptor.
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
                _PARENT: str(os.getpid()),
                _NOTES: str(self._notes.fileno()),
                _ALIVE: alive,
            },
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._orders: IO[bytes] = self._child.stdin
        self.answers: IO[bytes] = self._child.stdout

    def give(self, item: Any, order: tuple[Any, ...]) -> None:
        self.item = item
        message = cloudpickle.dumps(order)
        with contextlib.suppress(BrokenPipeError):  # it died; `take` will notice
            self._orders.write(message)
            self._orders.flush()

    def take(self) -> tuple[Any, tuple[bool, Any] | None]:
        """Return the item and its outcome; None as outcome when the worker died."""
        item, self.item = self.item, None
        return item, receive(self.answers)

    def say_if_stopped(self) -> None:
        """Tell the user, once, that the process was stopped (SIGSTOP, Ctrl-Z) and how to continue it."""
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


def receive(file: IO[bytes]) -> Any:
    """Return the next message, which is whole; None if the other side has ended, even in the middle of one."""
    try:
        return cloudpickle.load(file)
    except (EOFError, UnpicklingError):
        return None


# -- the current row -------------------------------------------------------------------------------


def note_row(descriptor: int, limit_seconds: float | None, row: int | None) -> None:
    """Note in a file that work on `row` begins; None means between two rows. Costs 2 µs.

    A row over the time limit ends the process.
    """
    os.pwrite(descriptor, _ROW.pack(_BETWEEN_ROWS if row is None else row), 0)
    if limit_seconds is not None:
        signal.setitimer(signal.ITIMER_REAL, 0 if row is None else limit_seconds)


def noted_row(descriptor: int) -> int | None:
    """Return the row that a worker was on when it died; None between two rows."""
    noted = os.pread(descriptor, _ROW.size, 0)
    row = _ROW.unpack(noted)[0] if len(noted) == _ROW.size else _BETWEEN_ROWS
    return None if row == _BETWEEN_ROWS else row


def unguarded(row: int | None) -> None:
    """Do nothing: the guard of work in the caller's own process, which must not be ended."""


_guard: Guard = unguarded


def current_guard() -> Guard:
    """Return the guard of the part that this process works on."""
    return _guard


# -- the process -----------------------------------------------------------------------------------


def serve() -> None:
    """Build parts until the input ends: the main function of a worker process."""
    global _guard  # noqa: PLW0603  one per process, as the process works on one part at a time
    end_with_parent(int(os.environ[_PARENT]))
    # Ctrl-C goes to the whole group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # send text that libraries print to stderr, away from the answers
    if alive := os.environ.get(_ALIVE):
        threading.Thread(target=_end_without, args=(alive,), daemon=True).start()
    stalls.start_watch(lambda text: sys.stderr.write(f"warning: {text}\n"))
    known: tuple[bytes, Any] = (b"", None)
    while (order := receive(sys.stdin.buffer)) is not None:
        code, item, poison, limit_seconds = order
        if code != known[0]:
            known = (code, cloudpickle.loads(code))
        _guard = partial(note_row, int(os.environ[_NOTES]), limit_seconds)
        _guard(None)
        outcome: tuple[bool, Any]
        try:
            outcome = (True, known[1](item, poison))
        except Exception as error:  # noqa: BLE001  the parent raises it
            error.add_note(f"while working on {item.label!r}")
            outcome = (False, error)
        _guard(None)
        try:
            message = cloudpickle.dumps(outcome)
            cloudpickle.loads(message)  # the parent will do the same
        except Exception as error:  # noqa: BLE001  pickling runs user code
            lost = f"{type(outcome[1]).__name__}: {outcome[1]} (which cannot be pickled: {error})."
            message = cloudpickle.dumps((False, StokerError(lost)))
        answers.write(message)
        answers.flush()


def _end_without(alive: str) -> None:
    """Kill this process when the file `alive` is gone: its pack has ended."""
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
