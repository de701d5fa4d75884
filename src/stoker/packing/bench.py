"""One part of a pack on a worker of a cluster: a child process, watched.

Enters: a `Task` (a packed function, its item, what must hold). Leaves: the result, or the error as
it was raised in the child. Costs: starting Python once per part, about half a second.

A process of its own rather than the worker's threads: timers, the working folder and crashes belong
to processes, and Dask's are not allowed to have loky's children. The child dies with its worker, and
ends itself when the foreman's mark is gone: what an interrupted pack left behind must not write into
the next one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stoker
from stoker.errors import InputError, StokerError
from stoker.packing.crew import Crew, Item, Numbered, Poison, Result

JOURNAL = "STOKER_JOURNAL"
"""Environment variable that tells a child where to note its row."""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_CHILD = "from stoker.packing.bench import serve_one_task; serve_one_task()"


@dataclass(frozen=True)
class PackedWork:
    """A function on its way to a child process; the worker between them never opens it."""

    code: bytes

    def __call__(self, item: Numbered, poison: Poison) -> Any:
        """Open the function and call it."""
        return load(self.code)(item, poison)


@dataclass(frozen=True)
class Task:
    """One part and all that its child needs to know."""

    work: PackedWork
    item: Any
    poison: Poison
    limit_seconds: float | None
    mark: str
    folder: str
    version: str


def build_on_worker(task: Task) -> tuple[int, Any]:
    """Build one part in a child of this worker's process; find out the row that kills it."""
    from distributed import get_worker

    if task.version != stoker.__version__:  # a worker that came after the check
        raise InputError(
            f"worker {get_worker().address} has stoker {stoker.__version__}.",
            f"stoker {task.version}",
            f"pip install stoker=={task.version} there, and start the worker again",
        )
    poison = {task.item.index: dict(task.poison)}
    try:
        with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
            bench = _Bench(1, task.limit_seconds, Path(folder), task)
            ((index, result),) = bench.run(task.work, [task.item], poison)
            return index, result
    except Exception as error:
        error.add_note(f"on worker {get_worker().address}")
        raise


@dataclass(frozen=True)
class _Bench(Crew):
    """One child process at a time, on a cluster's worker."""

    task: Task

    @property
    def isolated(self) -> bool:
        return True

    def _round(
        self,
        work: Callable[[Item, Poison], Result],
        items: list[Item],
        poison: dict[int, dict[int, str]],
        jobs: int,
    ) -> Iterator[tuple[int, Result]]:
        del jobs
        for item in items:
            journal = self.journal(item.index)
            journal.unlink(missing_ok=True)
            order = dump((work, item, poison.get(item.index, {}), self.task.mark, os.getpid()))
            yield item.index, self._child(order, journal)

    def _child(self, order: bytes, journal: Path) -> Any:
        paths = [path for path in sys.path if path]
        done = subprocess.run(
            [sys.executable, "-c", _CHILD],
            input=order,
            stdout=subprocess.PIPE,
            cwd=self.task.folder if Path(self.task.folder).is_dir() else None,
            env={**os.environ, JOURNAL: str(journal), "PYTHONPATH": os.pathsep.join(paths)},
            check=False,
        )
        if not _is_there(self.task.mark):
            raise StokerError("the pack that wanted this part is over.")
        if done.returncode != 0:
            raise BrokenExecutor(f"its process ended with exit status {done.returncode}")
        built, value = load(done.stdout)
        if built:
            return value
        raise value


# -- the child's side ----------------------------------------------------------------------


def serve_one_task() -> None:
    """Do the task on standard input and answer on standard output; all a child ever does."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to the worker's log
    work, item, poison, mark, parent = load(sys.stdin.buffer.read())
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    threading.Thread(target=_end_without, args=(mark,), daemon=True).start()
    outcome: tuple[bool, Any]
    try:
        outcome = (True, work(item, poison))
    except Exception as error:  # noqa: BLE001  it is raised again where the pack was started
        error.add_note(f"while working on {item.label!r}")
        outcome = (False, error)
    with os.fdopen(answer, "wb") as file:
        file.write(_outcome_bytes(outcome))


def _outcome_bytes(outcome: tuple[bool, Any]) -> bytes:
    try:
        text = dump(outcome)
        load(text)
    except Exception as error:  # noqa: BLE001  pickling runs anybody's code
        lost = f"{type(outcome[1]).__name__}: {outcome[1]} (which does not travel: {error})."
        return dump((False, StokerError(lost)))
    return text


def _end_without(mark: str) -> None:
    """End this process when the foreman's mark is gone: its pack is over."""
    while _is_there(mark):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_there(mark: str) -> bool:
    """Whether a file exists. Opened, because a network file system answers `stat` from memory."""
    try:
        os.close(os.open(mark, os.O_RDONLY))
    except FileNotFoundError:
        return False
    except OSError:  # a network file system that stutters
        return True
    return True


def dump(value: Any) -> bytes:
    """Return a value as bytes, functions and classes of a user's own script included."""
    import cloudpickle

    code: bytes = cloudpickle.dumps(value)
    return code


def load(code: bytes) -> Any:
    """Return what `dump` was given."""
    import cloudpickle

    return cloudpickle.loads(code)
