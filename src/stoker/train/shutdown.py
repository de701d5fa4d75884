"""Shutdown of a run: a signal to any rank ends all ranks at the same step.

Enters: SIGTERM, SIGINT, SIGHUP. Leaves: the reason, once every rank knows it. Costs nothing with one rank; with
several, one small collective per second, in which all ranks take part at the same step.

The signal handler only stores the request. The training loop reads it after a step, so that a run ends between
two steps, with everything saved. The first Ctrl-C ends the run after the current step; the second one raises
KeyboardInterrupt at once. Handlers are restored when the run ends. Outside of the main thread Python allows no
handlers: signals then act as without this class.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from stoker.train.ranks import Ranks

_REASONS = (None, "interrupted", "terminated")
_ASK_SECONDS = 1.0
_MOST_STEPS = 1000


class Shutdown:
    """Turns signals into a request to end, on which all ranks agree.

    Args:
        ranks: The ranks that must agree.

    Attributes:
        reason: "terminated", "interrupted", or None to continue; the same on every rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asked: str | None = None
        self.reason: str | None = None
        self._next_step = 0
        self._last: tuple[int, float] | None = None

    def forget(self) -> None:
        """Drop all requests."""
        self._asked = self.reason = None
        self._next_step, self._last = 0, None

    def look(self, step: int) -> None:
        """Read the request after a step. All ranks must call it with the same step number."""
        if not self._ranks.are_several:
            self.reason = self._asked
        elif step >= self._next_step:
            self.agree()
            self._next_step = step + self._steps_until_next(step)

    def look_alone(self) -> bool:
        """Read the request if there is one rank; return whether to end. Not collective."""
        if not self._ranks.are_several:
            self.reason = self._asked
        return self.reason is not None

    def agree(self) -> None:
        """Set `reason` on every rank if any rank was asked to end. Collective: all ranks must call it."""
        (code,) = self._ranks.largest(_REASONS.index(self._asked))
        self.reason = _REASONS[code]

    def _steps_until_next(self, step: int) -> int:
        """Return how many steps rank 0 does in about a second. Collective; the same on every rank."""
        now, steps = time.perf_counter(), 1
        if self._last is not None:
            done, seconds = step - self._last[0], max(now - self._last[1], 1e-6)
            steps = int(min(_MOST_STEPS, max(1, done * _ASK_SECONDS / seconds)))
        self._last = (step, now)
        return int(self._ranks.largest(steps if self._ranks.is_first else 0)[0])

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Context in which SIGTERM, SIGHUP and the first SIGINT request the end of the run."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            if number == signal.SIGINT and self._asked == "interrupted":
                raise KeyboardInterrupt
            self._asked = "interrupted" if number == signal.SIGINT else "terminated"

        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under `nohup`, and stays so
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
