"""A Dask cluster instead of local workers: the same parts, built by other machines.

Enters: the address of a Dask scheduler, and what `Workers.run` takes. Leaves: the same results and the same
bytes as local processes. Costs: one Python process per part on its worker (about half a second to start);
shards are written straight into the work folder, never sent over the network.

Contract:
- Machines share the file system; that, the inputs and the version of stoker are checked on every worker
  before the first part.
- A part runs in a child of the Dask worker's process, so a row that hangs or crashes ends the child only
  and is found as in a local pack. A Dask worker that is killed takes its child with it, and Dask gives
  the part to another.
- When no worker is left or the scheduler is gone, the pack ends within `PATIENCE_SECONDS`; finished parts
  stay.
- A file in the work folder exists while the pack runs. Children end themselves when it is gone: it is
  removed when the pack ends, by the janitor when it is killed, and by the next pack at the latest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

import stoker
from stoker import lifetime
from stoker.display import command
from stoker.errors import InputError, MissingExtraError, StokerError
from stoker.ownership import always, is_temporary, remove_file, write_new
from stoker.packing.workers import Item, Numbered, Poison, Result, Workers, is_alive
from stoker.sources.dataset import pickled
from stoker.units import format_count

PATIENCE_SECONDS = 30.0  # how long a pack waits for a first or a new worker
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
_VISIBLE_SECONDS = 5.0
_MOST_INPUTS = 200
_ADDRESS = re.compile(r"inproc://\S+|(?:(?:tcp|tls|ucx|ws|wss)://)?[^\s/]+:[0-9]+/?")
_START = "dask scheduler, then dask worker tcp://HOST:8786 on every machine"


def check_cluster(address: str, inputs: Sequence[Path]) -> str:
    """Check that every worker sees these inputs, of many a sample; return a description of the workers.

    Raises:
        InputError: No scheduler answers, there is no worker, or one has another stoker or misses inputs.
    """
    with _connected(address) as client:
        some = inputs[:: max(1, len(inputs) // _MOST_INPUTS)]
        facts = _ask_workers(client, None, [str(Path(path).absolute()) for path in some])
        _check_versions(facts)
        for worker, fact in sorted(facts.items()):
            if fact["missing"]:
                raise InputError(
                    f"worker {worker} on {fact['host']} does not see {fact['missing'][0]}.",
                    "inputs on a file system that all workers mount at the same place",
                    command("ssh", fact["host"], command("ls", Path(fact["missing"][0]))),
                )
        threads = format_count(_count_threads(client), "thread")
        return f"{format_count(len(facts), 'worker')} with {threads} at {address}"


class ClusterWorkers:
    """Workers of the Dask cluster at `address`, in the place of `Workers`; all share the work folder.

    `jobs` limits the parts in progress; 0 means two per thread of the cluster.
    """

    def __init__(self, address: str, jobs: int, limit_seconds: float | None, folder: Path) -> None:
        self.address = address
        self.jobs = jobs
        self.limit_seconds = limit_seconds
        self._folder = folder.absolute()

    def run(
        self, work: Callable[[Item, Poison], Result], items: Sequence[Item]
    ) -> Iterator[tuple[int, Result]]:
        """Yield `(index, result)` as items finish; see `Workers.run`."""
        with _connected(self.address) as client, _kept_alive(self._folder) as alive:
            _check_shared(_ask_workers(client, alive, []), alive)
            code = pickled(work)
            here = str(Path.cwd())
            # A second part waits at every worker, so that none is idle between two.
            most = self.jobs or 2 * _count_threads(client)
            waiting = deque(items)
            open_parts: dict[Any, Item] = {}
            try:
                while waiting or open_parts:
                    while waiting and len(open_parts) < most:
                        item = waiting.popleft()
                        said = (self.limit_seconds, str(alive), here, stoker.__version__)
                        task = Task(code, item, *said)
                        open_parts[client.submit(build_on_worker, task, pure=False)] = item
                    for future in _wait_for_some(client, open_parts):
                        item = open_parts.pop(future)
                        try:
                            yield future.result()
                        except Exception as error:
                            raise _named(error, item.label) from error
            finally:
                # A scheduler that is gone has nothing to cancel.
                with contextlib.suppress(Exception):
                    client.cancel(list(open_parts))

    def close(self) -> None:
        """Do nothing: the cluster belongs to its owner."""


@dataclass(frozen=True)
class Task:
    """One part and all that a worker needs. Only the worker's child unpickles `code`."""

    code: bytes
    item: Any
    limit_seconds: float | None
    alive: str
    folder: str
    version: str


def _work_elsewhere(code: bytes, folder: str, item: Numbered, poison: Poison) -> Any:
    """Work in another machine's copy of the caller's folder."""
    with contextlib.suppress(OSError):  # paths may all be absolute
        os.chdir(folder)
    return cloudpickle.loads(code)(item, poison)


def build_on_worker(task: Task) -> tuple[int, Any]:
    """Build one part in a child of this worker's process; leave out a row that kills it."""
    from distributed import get_worker

    if task.version != stoker.__version__:  # a worker that came after the check
        raise InputError(
            f"worker {get_worker().address} has stoker {stoker.__version__}.",
            f"stoker {task.version}",
            f"pip install -e '.[cluster]' in a checkout of stoker {task.version} there; then start the worker",
        )
    try:
        with Workers(1, task.limit_seconds, alive=task.alive, isolated=True) as workers:
            work = partial(_work_elsewhere, task.code, task.folder)
            ((index, result),) = workers.run(work, [task.item])
            return index, result
    except Exception as error:
        if not is_alive(task.alive):
            raise StokerError("the pack that wanted this part is over.") from error
        error.add_note(f"on worker {get_worker().address}")
        raise


# -- the scheduler's side ------------------------------------------------------------------


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Yield a client of the scheduler at `address`, which has at least one worker."""
    try:
        from distributed import Client
        from distributed.utils import silence_logging_cmgr
    except ImportError:
        raise MissingExtraError.for_package("distributed", "cluster", "--cluster") from None

    def silent(why: str) -> InputError:
        return InputError(
            f"no Dask scheduler answers at {address!r}{why}.",
            "the address that `dask scheduler` prints, such as tcp://10.0.0.1:8786",
            f"{_START}; or leave --cluster out",
        )

    if not _ADDRESS.fullmatch(address):  # Dask would raise a traceback, 10 s later
        raise silent(": it is no address of one")
    try:
        client = Client(address, timeout=_CONNECT_SECONDS, set_as_default=False, name="stoker")
    except (OSError, ValueError, ImportError) as error:  # unknown scheme: ValueError
        why = str(error).splitlines()[0]
        raise silent(f" within {_CONNECT_SECONDS:g} s: {why}") from error
    # Our errors report failures; Dask's log would print tracebacks over them.
    with silence_logging_cmgr(logging.CRITICAL):
        try:
            try:
                client.wait_for_workers(1, timeout=PATIENCE_SECONDS)
            except OSError as error:  # TimeoutError, and a connection that was lost
                raise InputError(
                    f"the Dask scheduler at {address} has had no worker for {PATIENCE_SECONDS:g} s.",
                    "at least one worker",
                    command("dask", "worker", address),
                ) from error
            yield client
        finally:
            with contextlib.suppress(OSError):  # the scheduler may be gone
                client.close(timeout=_CONNECT_SECONDS)


def _ask_workers(client: Any, alive: Path | None, inputs: list[str]) -> dict[str, dict[str, Any]]:
    """Return facts about every worker, by its address."""

    # Defined here so that it travels as code: a worker may have another stoker, or none.
    async def look(alive: str | None, inputs: list[str], seconds: float) -> dict[str, Any]:
        import asyncio
        import os
        import socket
        import sys

        try:
            version = __import__("stoker").__version__
        except ImportError:
            version = ""
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        fact: dict[str, Any] = {"host": socket.gethostname(), "stoker": version, "python": python}
        fact["missing"] = [path for path in inputs if not os.path.exists(path)]  # noqa: PTH110
        if alive is not None:
            fact["echo"] = alive.replace(".alive.", f".echo-{fact['host']}-{os.getpid()}.")
            for _ in range(int(seconds / 0.1)):  # a network file system may be a little late
                if os.path.exists(alive):  # noqa: PTH110
                    break
                await asyncio.sleep(0.1)
            try:
                with open(alive) as file:  # noqa: PTH123
                    fact["read"] = file.read()
                os.close(os.open(fact["echo"], os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except OSError as error:
                fact["error"] = str(error)
        return fact

    async def ask() -> Any:
        named = None if alive is None else str(alive)
        return await client.run(look, named, inputs, _VISIBLE_SECONDS)

    try:
        facts: dict[str, dict[str, Any]] = client.sync(ask, callback_timeout=_ANSWER_SECONDS)
    except OSError as error:  # TimeoutError is one
        raise InputError(
            f"not every worker answered within {_ANSWER_SECONDS:g} s: {error}.",
            "workers that answer",
            "look at the scheduler's dashboard, and restart the workers that hang",
        ) from error
    return facts


def _check_versions(facts: dict[str, dict[str, Any]]) -> None:
    ours = (stoker.__version__, f"{sys.version_info[0]}.{sys.version_info[1]}")
    for worker, fact in sorted(facts.items()):
        if (fact["stoker"], fact["python"]) != ours:
            found = f"stoker {fact['stoker']}" if fact["stoker"] else "no stoker"
            raise InputError(
                f"worker {worker} on {fact['host']} has {found} on Python {fact['python']}.",
                f"stoker {ours[0]} on Python {ours[1]}, as here: other code gives other bytes",
                f"pip install -e '.[cluster]' in a checkout of stoker {ours[0]} on {fact['host']}; "
                "then start the worker",
            )


def _check_shared(facts: dict[str, dict[str, Any]], alive: Path) -> None:
    """Refuse workers that do not read and write the work folder of this machine."""
    _check_versions(facts)
    token = alive.read_text()
    for worker, fact in sorted(facts.items()):
        problem = fact.get("error") or (
            "" if fact["read"] == token else "another file stands there"
        )
        # Only the name is taken from the answer: a worker cannot name a file elsewhere.
        echo = alive.parent / Path(fact["echo"]).name
        if not problem and not _appears(echo):
            problem = "what it writes does not appear here"
        if problem:
            raise InputError(
                f"worker {worker} on {fact['host']} does not share the folder {alive.parent}: {problem}.",
                "OUT on a file system that all workers mount at the same place, and may write to",
                f"choose another OUT, or {command('ssh', fact['host'], command('ls', '-l', alive.parent))}",
            )
        if is_temporary(echo.name):
            remove_file(echo, always)


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def _kept_alive(folder: Path) -> Iterator[Path]:
    """Yield the path of a file that exists while this pack runs."""
    token = secrets.token_hex(4)
    alive = folder / f".alive.{token}.tmp"
    lifetime.remember(alive, token)
    write_new(alive, token)
    try:
        yield alive
    finally:
        remove_file(alive, always)
        lifetime.forget(alive)


def _wait_for_some(client: Any, futures: Any) -> list[Any]:
    """Wait for at least one future, and return those that are done; raise if the cluster is lost."""
    from distributed import wait

    trouble_since: float | None = None
    while True:
        try:
            # `wait` asks the current client, and ours is not the default one.
            with client.as_current():
                done = wait(list(futures), timeout=1.0, return_when="FIRST_COMPLETED").done
        except CancelledError as error:
            raise _named(error) from error
        except TimeoutError:
            done = set()
        if done:
            return [future for future in futures if future in done]
        if not (trouble := _trouble(client)):
            trouble_since = None
            continue
        trouble_since = trouble_since or time.monotonic()
        if time.monotonic() - trouble_since > PATIENCE_SECONDS:
            raise _lost(trouble)


def _count_threads(client: Any) -> int:
    cores = client.sync(client.scheduler.ncores, callback_timeout=_CONNECT_SECONDS)
    return sum(cores.values())


def _trouble(client: Any) -> str:
    """Return why no part can make progress at the moment; "" if parts can."""
    try:
        if client.status == "running" and _count_threads(client):
            return ""
    except (OSError, RuntimeError):
        return "the scheduler does not answer"
    return "all workers are gone" if client.status == "running" else "the scheduler is gone"


def _named(error: BaseException, label: str = "") -> BaseException:
    """Return an error of the cluster as one of ours, with the label of its part."""
    from distributed import KilledWorker

    if isinstance(error, KilledWorker):
        return StokerError(
            f"the cluster's workers died again and again on {label!r}; the last was "
            f"{getattr(error.last_worker, 'address', 'unknown')}.",
            "workers that live",
            "look at that worker's log (out of memory?); the same command goes on",
        )
    if isinstance(error, StokerError):
        return error
    if isinstance(error, CancelledError):
        return _lost("the scheduler is gone")
    if label:
        error.add_note(f"while working on {label!r}")
    return error


def _lost(trouble: str) -> StokerError:
    return StokerError(
        f"the cluster cannot go on: {trouble}.",
        "a scheduler with at least one worker",
        f"{_START}; the same command goes on with the parts that are missing",
    )
