"""A Dask cluster as the crew: the same parts, built by other machines.

Enters: the address of a Dask scheduler, and what a `Crew` takes. Leaves: the same results and the
same bytes as local processes. Costs: one Python process per part on its worker (about half a second
to start); shards are written straight into the workshop, never sent over the network.

Contract: machines share the file system; that, the inputs and the version of stoker are checked on
every worker before the first part. A part runs in a child of the worker's process, so a row that
hangs or crashes ends the child only and is found out as in a local pack. A worker that is killed
takes its child with it, and Dask gives the part to another. When no worker is left or the
scheduler is gone, the pack ends within `PATIENCE_SECONDS`; finished parts stay.

The foreman's mark, a file beside the journals, lives as long as the pack: its children end
themselves when it is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stoker
from stoker.errors import InputError, MissingExtraError, StokerError
from stoker.packing.bench import JOURNAL, PackedWork, Task, build_on_worker, dump
from stoker.packing.crew import Crew, Item, Poison, Result
from stoker.units import format_count

PATIENCE_SECONDS = 30.0
"""How long a pack waits for a first or a new worker."""
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
_VISIBLE_SECONDS = 5.0
_MOST_INPUTS = 200
_DISMISSAL_SECONDS = 1.5
_MARK = "foreman-"
_ADDRESS = re.compile(r"inproc://\S+|(?:(?:tcp|tls|ucx|ws|wss)://)?[^\s/]+:[0-9]+/?")
_START = "dask scheduler, then dask worker tcp://HOST:8786 on every machine"


def hire(jobs: int, limit_seconds: float | None, journals: Path, cluster: str | None) -> Crew:
    """Return the crew of a pack: processes here, or the workers of a Dask cluster.

    Args:
        jobs: Most parts under way; 0 means one per usable core, here or of the cluster.
        limit_seconds: Time limit of one guarded row.
        journals: Folder for the workers' notes, in the workshop.
        cluster: Address of a Dask scheduler.
    """
    if cluster:
        return ClusterCrew(jobs, limit_seconds, journals.absolute(), cluster)
    return Crew(jobs or len(os.sched_getaffinity(0)), limit_seconds, journals)


def end_leftovers(journals: Path) -> None:
    """End the children that a killed pack left at work; call this under the workshop's lock."""
    marks = list(journals.glob(f"{_MARK}*"))
    for mark in marks:
        mark.unlink(missing_ok=True)
    if marks:
        time.sleep(_DISMISSAL_SECONDS)


def check_cluster(address: str, inputs: Sequence[Path]) -> str:
    """Ask every worker whether it could work on these inputs; return who they are, in words.

    Raises:
        InputError: Nobody answers, there is no worker, or one has another stoker or misses inputs.
    """
    with _connected(address) as client:
        asked = [
            str(Path(path).absolute()) for path in inputs[:: max(1, len(inputs) // _MOST_INPUTS)]
        ]
        facts = _ask_workers(client, None, asked)
        _check_versions(facts)
        for worker, fact in sorted(facts.items()):
            if fact["missing"]:
                raise InputError(
                    f"worker {worker} on {fact['host']} does not see {fact['missing'][0]}.",
                    "inputs on a file system that all workers mount at the same place",
                    f"ssh {fact['host']} ls {fact['missing'][0]}",
                )
        threads = format_count(_count_threads(client), "thread")
        return f"{format_count(len(facts), 'worker')} with {threads} at {address}"


@dataclass(frozen=True)
class ClusterCrew(Crew):
    """Workers of a Dask cluster.

    Attributes:
        address: The scheduler's.
    """

    address: str = ""

    @property
    def isolated(self) -> bool:
        """Always: every part has a process of its own."""
        return True

    def journal(self, index: int) -> Path:
        """Where the child that runs this notes its row: on its own machine, by its own clock."""
        return Path(os.environ.get(JOURNAL) or super().journal(index))

    def run(
        self,
        work: Callable[[Item, Poison], Result],
        items: Sequence[Item],
        poison: dict[int, dict[int, str]],
    ) -> Iterator[tuple[int, Result]]:
        """Yield `(index, result)` as items finish; see `Crew.run`."""
        from joblib import Parallel, delayed

        with _connected(self.address) as client, _foreman(self.journals) as mark:
            _check_shared(_ask_workers(client, mark, []), mark)
            packed = PackedWork(dump(work))
            said = (self.limit_seconds, str(mark), str(Path.cwd()), stoker.__version__)
            tasks = (
                delayed(build_on_worker)(Task(packed, item, poison.get(item.index, {}), *said))
                for item in items
            )
            crew = Parallel(
                n_jobs=-1,
                backend=_make_backend(client),
                return_as="generator_unordered",
                # A second part waits at every worker, so that none is idle between two.
                pre_dispatch=self.jobs or 2 * _count_threads(client),
                batch_size=1,
            )
            yield from crew(tasks)


# -- the scheduler's side ------------------------------------------------------------------


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Lend a client of the scheduler at `address` that has at least one worker."""
    try:
        from distributed import Client
        from distributed.utils import silence_logging_cmgr
    except ImportError:
        raise MissingExtraError.for_package("distributed", "cluster", "--cluster") from None
    if not _ADDRESS.fullmatch(address):  # Dask would end with a traceback of its own, 10 s later
        raise InputError(
            f"no Dask scheduler answers at {address!r}: it is no address of one.",
            "the address that `dask scheduler` prints, such as tcp://10.0.0.1:8786",
            f"{_START}; or leave --cluster out",
        )
    try:
        client = Client(address, timeout=_CONNECT_SECONDS, set_as_default=False, name="stoker")
    except (OSError, ValueError, ImportError) as error:  # unknown scheme: ValueError
        raise InputError(
            f"no Dask scheduler answers at {address!r} within {_CONNECT_SECONDS:g} s: "
            f"{str(error).splitlines()[0]}.",
            "the address that `dask scheduler` prints, such as tcp://10.0.0.1:8786",
            f"{_START}; or leave --cluster out",
        ) from error
    # What goes wrong is said by our errors; Dask's log would print tracebacks over them.
    with silence_logging_cmgr(logging.CRITICAL):
        try:
            _wait_for_a_worker(client, address)
            yield client
        finally:
            with contextlib.suppress(OSError):  # a scheduler that is gone needs no good-bye
                client.close(timeout=_CONNECT_SECONDS)


def _wait_for_a_worker(client: Any, address: str) -> None:
    try:
        client.wait_for_workers(1, timeout=PATIENCE_SECONDS)
    except OSError as error:  # TimeoutError, and a connection that was lost
        raise InputError(
            f"the Dask scheduler at {address} has had no worker for {PATIENCE_SECONDS:g} s.",
            "at least one worker",
            f"dask worker {address}",
        ) from error


def _ask_workers(client: Any, mark: Path | None, inputs: list[str]) -> dict[str, dict[str, Any]]:
    """Return what every worker sees, by its address."""

    # Defined here so that it travels as code: a worker may have another stoker, or none.
    async def look(mark: str | None, inputs: list[str], seconds: float) -> dict[str, Any]:
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
        if mark is not None:
            fact["echo"] = f"{mark}.{fact['host']}.{os.getpid()}"
            for _ in range(int(seconds / 0.1)):  # a network file system may be a little late
                if os.path.exists(mark):  # noqa: PTH110
                    break
                await asyncio.sleep(0.1)
            try:
                with open(mark) as file:  # noqa: PTH123
                    fact["read"] = file.read()
                os.close(os.open(fact["echo"], os.O_CREAT | os.O_WRONLY, 0o644))
            except OSError as error:
                fact["error"] = str(error)
        return fact

    async def ask() -> Any:
        named = None if mark is None else str(mark)
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
                f"pip install stoker=={ours[0]} on {fact['host']}, and start the worker again",
            )


def _check_shared(facts: dict[str, dict[str, Any]], mark: Path) -> None:
    """Refuse workers that do not read and write the workshop of this machine."""
    _check_versions(facts)
    token = mark.read_text()
    for worker, fact in sorted(facts.items()):
        problem = fact.get("error") or (
            "" if fact["read"] == token else "another file stands there"
        )
        if not problem and not _appears(Path(fact["echo"])):
            problem = "what it writes does not appear here"
        if problem:
            raise InputError(
                f"worker {worker} on {fact['host']} does not share the folder {mark.parent}: {problem}.",
                "OUT on a file system that all workers mount at the same place, and may write to",
                f"choose another OUT, or ssh {fact['host']} ls -l {mark.parent}",
            )
        Path(fact["echo"]).unlink(missing_ok=True)


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def _foreman(journals: Path) -> Iterator[Path]:
    """Lend the mark that says that this pack is at work."""
    mark = journals / f"{_MARK}{secrets.token_hex(8)}"
    mark.write_text(mark.name)
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


def _make_backend(client: Any) -> Any:
    """Return joblib's Dask backend, made to end where it would wait for ever.

    joblib's own never reports a part whose workers kept dying, and has no opinion on a cluster
    without workers: both leave `Parallel` waiting.
    """
    from joblib._dask import DaskDistributedBackend

    class Backend(DaskDistributedBackend):  # type: ignore[misc]  # joblib is untyped
        def __init__(self, client: Any) -> None:
            super().__init__(client=client)
            self._open: dict[Any, tuple[Any, str]] = {}
            self._over = threading.Event()

        def effective_n_jobs(self, n_jobs: int) -> int:
            # With one joblib would do the work here, in this process.
            return max(2, int(super().effective_n_jobs(n_jobs)))

        def start_call(self) -> None:
            super().start_call()
            threading.Thread(target=self._watch, daemon=True, name="stoker-cluster").start()

        def stop_call(self) -> None:
            self._over.set()
            super().stop_call()

        def submit(self, func: Any, callback: Any = None) -> Any:
            future = super().submit(func, callback)
            self._open[future] = (callback, func.items[0][1][0].item.label)
            future.add_done_callback(self._settle)
            return future

        def _settle(self, future: Any) -> None:
            callback, label = self._open.pop(future)
            if (error := future.exception()) is not None:
                callback(_named(error, label))

        def retrieve_result_callback(self, out: Any) -> Any:
            if isinstance(out, BaseException):
                raise _named(out)
            return super().retrieve_result_callback(out)

        def _watch(self) -> None:
            trouble_since: float | None = None
            while not self._over.wait(1.0):
                if not (trouble := _trouble(self.client)):
                    trouble_since = None
                    continue
                trouble_since = trouble_since or time.monotonic()
                if time.monotonic() - trouble_since > PATIENCE_SECONDS:
                    for future in list(self._open):
                        future.set_exception(_lost(trouble))
                    return

    return Backend(client)


def _count_threads(client: Any) -> int:
    cores = client.sync(client.scheduler.ncores, callback_timeout=_CONNECT_SECONDS)
    return sum(cores.values())


def _trouble(client: Any) -> str:
    """Return why nothing can happen at the moment; "" when something can."""
    try:
        if client.status == "running" and _count_threads(client):
            return ""
    except (OSError, RuntimeError):
        return "the scheduler does not answer"
    return "all workers are gone" if client.status == "running" else "the scheduler is gone"


def _named(error: BaseException, label: str = "") -> BaseException:
    """Return an error of the cluster as one of ours, with the part it met."""
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
