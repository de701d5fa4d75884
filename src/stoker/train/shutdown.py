"""The early end of a run: a signal to this process, or to another rank, heeded by all at the same step.

Enters: SIGTERM, SIGINT, SIGHUP. Leaves: the reason, once every rank knows it. Costs nothing alone; among several ranks
one small question per second, asked by all at the same step.

The first Ctrl-C ends after the current step, the second one at once.
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
    """Listens for signals, and says when all ranks are to end.

    Args:
        ranks: Who must agree.

    Attributes:
        reason: "terminated", "interrupted", or None to go on; the same on every rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asked: str | None = None
        self.reason: str | None = None
        self._next_step = 0
        self._last: tuple[int, float] | None = None

    def forget(self) -> None:
        """Go on, whatever was asked for before."""
        self._asked = self.reason = None
        self._next_step, self._last = 0, None

    def look(self, step: int) -> None:
        """Heed what was asked for; called after every step, with the same number on every rank."""
        if not self._ranks.are_several:
            self.reason = self._asked
        elif step >= self._next_step:
            self.agree()
            self._next_step = step + self._steps_until_next(step)

    def look_alone(self) -> bool:
        """Heed what was asked for where no other rank must agree; return whether to end."""
        if not self._ranks.are_several:
            self.reason = self._asked
        return self.reason is not None

    def agree(self) -> None:
        """Learn what any rank was asked for; all ranks must call it."""
        (code,) = self._ranks.largest(_REASONS.index(self._asked))
        self.reason = _REASONS[code]

    def _steps_until_next(self, step: int) -> int:
        """Return about a second's worth of steps, as rank 0 counts them."""
        now, steps = time.perf_counter(), 1
        if self._last is not None:
            done, seconds = step - self._last[0], max(now - self._last[1], 1e-6)
            steps = int(min(_MOST_STEPS, max(1, done * _ASK_SECONDS / seconds)))
        self._last = (step, now)
        return int(self._ranks.largest(steps if self._ranks.is_first else 0)[0])

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn SIGTERM, SIGHUP and the first SIGINT into a wish to end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            if number == signal.SIGINT and self._asked == "interrupted":
                raise KeyboardInterrupt
            self._asked = "interrupted" if number == signal.SIGINT else "terminated"

        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup`
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
