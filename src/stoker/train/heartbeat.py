"""Heartbeat of the ranks: if a rank is lost or makes no progress, all ranks end with a message that names it.

Enters: marks of the training loop ("step 37, waiting for data"). Leaves: nothing while ranks make progress. Costs:
one thread; per second one small write to the process group's store and, on rank 0 only, one read of all ranks'
marks. There is no all-to-all traffic.

A collective cannot be interrupted: a rank that waits for a lost one would wait until torch's own timeout, and
would then report only that something timed out. So the heartbeat's thread ends the whole process.

Contract:

    success  `close` stops the thread; nothing was printed
    failure  a sentence with rank, machine and process on stderr, then `os._exit(1)` on every rank. Rank 0
             decides and writes its verdict to the store; the others read it, and watch rank 0
    a rank ends with an error  it leaves an exit notice with its reason, which the others name
    the store is unreachable   every rank ends after `stall_seconds`
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import distributed

from stoker.display import printable, show
from stoker.strict_json import exact_text, parse_json

_BEAT_SECONDS = 1.0
_QUIET_SECONDS = 3.0
"""After another failure, a rank without a heartbeat for this long counts as lost."""
_VERDICT, _LEFT = "verdict", "left"
_SILENT_SECONDS = 120.0
"""A rank without a heartbeat for this long is lost, however long `stall_seconds` is."""
_LEFT_SECONDS = 10.0
"""Time after the first exit notice that is left for the other ranks' collectives to fail on their own."""


@dataclass
class _RankStatus:
    """The last heartbeat and mark of a rank, and when each of them last changed."""

    beat: int = -1
    count: int = -1
    words: str = ""
    beat_at: float = 0.0
    moved_at: float = 0.0

    def update(self, found: dict[str, Any], now: float) -> None:
        if found["beat"] != self.beat:
            self.beat, self.beat_at = found["beat"], now
        if found["count"] != self.count:
            self.count, self.moved_at = found["count"], now
        self.words = f"{found['where']}, {found['doing']}"


def _end(words: str) -> NoReturn:
    """End this process at once; its other threads may be inside a collective."""
    show(f"error: {printable(words)}\n", sys.stderr)
    os._exit(1)


class Heartbeat:
    """Sends this rank's heartbeat and checks those of the others, in the default process group.

    Making it is collective: all ranks must do so.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        stall_seconds: All ranks end after this long without progress, or without one rank's heartbeat.
        end: Called with the reason when this process must end.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        stall_seconds: float,
        end: Callable[[str], object] = _end,
    ) -> None:
        self._rank, self._size, self._stall, self._end = rank, world_size, stall_seconds, end
        base: Any = distributed.distributed_c10d._get_default_store()
        # A connection of its own: a call of the training thread may block the shared one.
        self._store: Any = distributed.distributed_c10d.PrefixStore("heartbeat", base.clone())
        self._lock = threading.Lock()
        self._where = f"{platform.node()}, process {os.getpid()}"
        self._doing: tuple[str, int | None, int | None] = "starting", None, None
        self._count = self._beat = 0
        self._seen = {number: _RankStatus(beat_at=time.monotonic(), moved_at=time.monotonic())
                      for number in range(world_size)}  # fmt: skip
        self._post()
        distributed.barrier()  # from now on every rank's key exists, so reading never blocks
        self._left_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stoker-heartbeat", daemon=True)
        self._thread.start()

    def mark(self, doing: str, epoch: int | None = None, batch: int | None = None) -> None:
        """Record what this rank does now. All ranks must make the same marks in the same order."""
        self._doing = doing, epoch, batch
        self._count += 1

    def announce_exit(self, words: str) -> None:
        """Write an exit notice for the other ranks: why this one ends."""
        with self._lock, contextlib.suppress(RuntimeError):
            self._store.set(f"exit/{self._rank}", words[:600])
            self._store.set(_LEFT, str(self._rank))

    def close(self) -> None:
        """Stop the thread; waits for it."""
        self._stop.set()
        self._thread.join(timeout=5)

    def find_lost(self, seconds: float) -> list[str]:
        """Return a sentence for every rank with an exit notice or without heartbeat; look for up to `seconds`."""
        until, since = time.monotonic() + seconds, time.monotonic()
        while True:
            try:
                found = self._exit_notices()
                self._look()
            except RuntimeError:
                return ["the process that all ranks met at is gone (rank 0, or torchrun itself)"]
            found |= {
                number: f"rank {number} ({seen.words}) gave no sign of life for {_QUIET_SECONDS:.0f} s"
                for number, seen in self._seen.items()
                if number != self._rank
                and number not in found
                and time.monotonic() - max(seen.beat_at, since) > _QUIET_SECONDS
            }
            if found or time.monotonic() > until:
                return [found[number] for number in sorted(found)]
            time.sleep(0.2)

    # -- inside ----------------------------------------------------------------------------

    def _post(self) -> None:
        self._beat += 1
        doing, epoch, batch = self._doing
        place = [
            f"{name} {number}"
            for name, number in (("epoch", epoch), ("batch", batch))
            if number is not None
        ]
        sign = {
            "beat": self._beat,
            "count": self._count,
            "where": self._where,
            "doing": ", ".join([*place, doing]),
        }
        with self._lock:
            self._store.set(f"beat/{self._rank}", exact_text(sign))

    def _look(self) -> None:
        with self._lock:
            signs = self._store.multi_get([f"beat/{number}" for number in range(self._size)])
        now = time.monotonic()
        for number, sign in enumerate(signs):
            self._seen[number].update(parse_json(sign), now)

    def _exit_notices(self) -> dict[int, str]:
        found = {}
        with self._lock:
            for number in range(self._size):
                if number != self._rank and self._store.check([f"exit/{number}"]):
                    words = self._store.get(f"exit/{number}").decode()
                    found[number] = f"rank {number} ({self._seen[number].words}) ended: {words}"
        return found

    def _watch(self) -> None:
        unreachable_since: float | None = None
        while not self._stop.wait(min(_BEAT_SECONDS, self._stall / 4)):
            try:
                self._post()
                verdict = self._find_verdict()
                unreachable_since = None
            except RuntimeError:
                unreachable_since = unreachable_since or time.monotonic()
                verdict = None
                if time.monotonic() - unreachable_since > self._stall:
                    verdict = (
                        "the process that all ranks met at is gone (rank 0, or torchrun itself)"
                    )
            if verdict is not None and not self._stop.is_set():
                self._end(f"{verdict} This is rank {self._rank}; what was saved last stays.")
                return

    def _find_verdict(self) -> str | None:
        """Return why all ranks must end, or None. Rank 0 decides; the others read its verdict and watch it."""
        with self._lock:
            if self._store.check([_VERDICT]):
                return str(self._store.get(_VERDICT).decode())
        if self._rank != 0:
            with self._lock:
                sign = parse_json(self._store.get("beat/0"))
            first, now = self._seen[0], time.monotonic()
            first.update(sign, now)
            quiet = now - first.beat_at
            return (
                _silent(0, first, quiet) if quiet > 2 * min(self._stall, _SILENT_SECONDS) else None
            )
        self._look()
        verdict = self._find_fault()
        if verdict is not None:
            with self._lock:
                self._store.set(_VERDICT, verdict)
        return verdict

    def _find_fault(self) -> str | None:
        now = time.monotonic()
        with self._lock:
            is_left = self._store.check([_LEFT])
        if is_left:
            self._left_at = self._left_at or now
            if now - self._left_at > _LEFT_SECONDS:
                return f"{'; '.join(self._exit_notices().values()) or 'a rank has ended'}."
        for number, seen in self._seen.items():
            if now - seen.beat_at > min(self._stall, _SILENT_SECONDS):
                return _silent(number, seen, now - seen.beat_at)
        still = now - max(seen.moved_at for seen in self._seen.values())
        if still <= self._stall:
            return None
        last = min(seen.count for seen in self._seen.values())
        behind = [f"rank {n} ({s.words})" for n, s in self._seen.items() if s.count == last]
        shown = ", ".join(behind[:3]) + (f" and {len(behind) - 3} more" if len(behind) > 3 else "")
        return (
            f"no rank has moved for {still:.0f} s; furthest behind: {shown}. Where that is no fault, raise "
            "training.stall_seconds."
        )


def _silent(number: int, seen: _RankStatus, seconds: float) -> str:
    return f"rank {number} ({seen.words}) has given no sign of life for {seconds:.0f} s."


class _ProcessHeartbeat:
    """This process's heartbeat; with one rank there is none, and every call does nothing."""

    def __init__(self) -> None:
        self._heartbeat: Heartbeat | None = None

    def set(self, heartbeat: Heartbeat | None) -> None:
        """Use this heartbeat from now on, or none."""
        self._heartbeat = heartbeat

    def mark(self, doing: str, epoch: int | None = None, batch: int | None = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.mark(doing, epoch, batch)

    def announce_exit(self, words: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.announce_exit(words)

    def find_lost(self, seconds: float) -> list[str]:
        return [] if self._heartbeat is None else self._heartbeat.find_lost(seconds)

    def close(self) -> None:
        """Stop the heartbeat, if there is one."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._heartbeat = None


HEARTBEAT = _ProcessHeartbeat()
