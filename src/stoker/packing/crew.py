"""Worker processes that build parts, and what happens when one of them dies.

Enters: a picklable function and its items. Leaves: results as they finish, in any order. Costs:
one process per job (joblib's loky); with one job and nothing that can hang, no process at all.

Contract: an exception in a worker ends the run with that exception and the part's label. A worker
that dies (killed, crashed inside a C library, out of memory, or longer than the limit on one row)
does not: its part is built again, without the row that killed it. A part that keeps dying without
naming a row ends the run. Cancelling (Ctrl-C) kills the workers; finished parts
stay on disk.

The time limit cannot be a Python signal handler: C++ that hangs never returns to Python. So the
worker arms a timer whose default action ends the process, and notes in a journal which row it is
on; the parent reads the journals of the dead.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from stoker.errors import StokerError

_ENTRY = struct.Struct("<qd")
_MAX_DEATHS = 2
_NOBODY = -1


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
Poison = Mapping[int, str]


class Guard:
    """Notes the row a worker is on, and ends the process when the row takes too long."""

    def __init__(self, journal: Path, limit_seconds: float | None) -> None:
        self._limit_seconds = limit_seconds
        self._descriptor = os.open(journal, os.O_CREAT | os.O_WRONLY, 0o644)

    def __call__(self, row: int | None) -> None:
        """Begin work on `row`; None ends the watch. About 2 µs."""
        entry = _ENTRY.pack(-1 if row is None else row, time.monotonic())
        os.pwrite(self._descriptor, entry, 0)
        if self._limit_seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0 if row is None else self._limit_seconds)

    def close(self) -> None:
        """End the watch."""
        self(None)
        os.close(self._descriptor)


def unguarded(row: int | None) -> None:
    """The guard of work that runs in the caller's own process, which must not be ended."""


@dataclass(frozen=True)
class Crew:
    """How to run the work.

    Attributes:
        jobs: Worker processes.
        limit_seconds: Time limit of one guarded row; None when nothing can hang.
        journals: Folder for the workers' notes.
    """

    jobs: int
    limit_seconds: float | None
    journals: Path

    @property
    def isolated(self) -> bool:
        """Whether work runs in processes that may be ended."""
        return self.jobs > 1 or self.limit_seconds is not None

    def journal(self, index: int) -> Path:
        """Where the worker on item `index` notes its row."""
        return self.journals / f"part-{index:05d}.journal"

    def run(
        self,
        work: Callable[[Item, Poison], Result],
        items: Sequence[Item],
        poison: dict[int, dict[int, str]],
    ) -> Iterator[tuple[int, Result]]:
        """Yield `(index, result)` as items finish.

        Args:
            work: Module-level function of an item and the rows it must not touch.
            items: The work.
            poison: Item index to row to reason; grows as rows are found out.
        """
        if not self.isolated:
            for item in items:
                yield item.index, work(item, poison.get(item.index, {}))
            return
        waiting = {item.index: item for item in items}
        suspects: list[int] = []
        deaths: Counter[int] = Counter()
        while waiting:
            alone = bool(suspects)
            batch = [waiting[suspects.pop(0)]] if alone else list(waiting.values())
            try:
                for index, result in self._round(work, batch, poison, 1 if alone else self.jobs):
                    del waiting[index]
                    yield index, result
            except BrokenExecutor as error:  # loky: a worker was killed or crashed
                left = [item for item in batch if item.index in waiting]
                suspects = self._blame(left, poison, deaths, alone, error) + suspects

    def _round(
        self,
        work: Callable[[Item, Poison], Result],
        items: list[Item],
        poison: dict[int, dict[int, str]],
        jobs: int,
    ) -> Iterator[tuple[int, Result]]:
        from joblib import Parallel, delayed

        for item in items:
            self.journal(item.index).unlink(missing_ok=True)
        # At most `jobs` tasks are under way even where loky insists on two processes.
        crew = Parallel(
            n_jobs=max(2, jobs),
            backend="loky",
            return_as="generator_unordered",
            pre_dispatch=jobs,
            batch_size=1,
            max_nbytes=None,
        )
        here = Path.cwd()
        tasks = (delayed(_call)(here, work, item, poison.get(item.index, {})) for item in items)
        yield from crew(tasks)

    def _blame(
        self,
        items: Sequence[Numbered],
        poison: dict[int, dict[int, str]],
        deaths: Counter[int],
        alone: bool,
        error: BaseException,
    ) -> list[int]:
        """Find the row that killed a worker, and return the items to try again by themselves.

        The innocent die with the guilty, so a death in company only makes suspects; a row over its
        time limit, or a death with no other item under way, is proof.
        """
        suspects = []
        for item in items:
            noted = read_journal(self.journal(item.index))
            if noted is None:
                continue
            suspects.append(item.index)
            row, seconds = noted
            if row >= 0 and self.limit_seconds is not None and seconds >= self.limit_seconds:
                poison.setdefault(item.index, {})[row] = (
                    f"took longer than {self.limit_seconds:g} s"
                )
            elif row >= 0 and alone:
                poison.setdefault(item.index, {})[row] = "crashed the worker process twice"
            else:
                deaths[item.index] += alone
        deaths[_NOBODY] += not suspects
        guilty = next((item.label for item in items if deaths[item.index] >= _MAX_DEATHS), None)
        if guilty is not None or deaths[_NOBODY] > _MAX_DEATHS:
            raise StokerError(
                f"the worker on {guilty or 'nothing yet'!r} died again and again: {error}.",
                "workers that live",
                "free some memory, or use fewer workers: --jobs 1",
            ) from error
        return suspects


def _call(
    folder: Path, work: Callable[[Item, Poison], Result], item: Item, poison: Poison
) -> tuple[int, Result]:
    try:
        os.chdir(folder)  # a worker outlives a pack, and its caller may have moved since
        return item.index, work(item, poison)
    except Exception as error:
        error.add_note(f"while working on {item.label!r}")
        raise


def read_journal(path: Path) -> tuple[int, float] | None:
    """Return `(row, seconds since it began)` of a worker's last note; row -1 is "between rows"."""
    try:
        row, began = _ENTRY.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return row, time.monotonic() - began
