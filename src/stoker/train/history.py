"""History of a training run: one report per epoch, every loss, and every decision with its reason.

Enters: values from the trainer. Leaves: plain values for pages, logs and tests. Costs: 8 bytes per step, and about
1 KiB per epoch; nothing else in a run's memory grows with its length.

An epoch that was interrupted and resumed has one report over all its samples, because checkpoints hold its totals.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from stoker.display import printable, show, table_html
from stoker.report import Note, Topic
from stoker.units import format_seconds

MUCH = 10.0
"""A loss that is this many times the first one is noted."""
RISE, MOST_RISING = 1.1, 3
"""A loss that grows by the first factor in each of this many consecutive epochs is noted."""
_SHOW_SECONDS = 0.5
_WORTH_TELLING = 1.05
_SHOWN_METRICS = 5


@dataclass
class EpochReport:
    """Results of one epoch.

    Attributes:
        epoch: Number of the epoch, from 0.
        train_loss: Mean training loss over its samples.
        metrics: Metrics of validation; empty without validation.
        num_samples: Samples trained on.
        seconds: Time of training, without validation.
        wait_share: Share of that time spent waiting for batches.
        growth: Last block's loss / the loss at the start of the run, if that is 10 or more; else None.
        is_fallback: Whether steps ran eagerly although capture was wanted.
        slowdown: Time of an eager step / time of a replay; None if it is unknown.
    """

    epoch: int
    train_loss: float
    metrics: dict[str, float]
    num_samples: int
    seconds: float
    wait_share: float
    growth: float | None = None
    is_fallback: bool = False
    slowdown: float | None = None

    @property
    def samples_per_second(self) -> float:
        """Training rate."""
        return self.num_samples / max(self.seconds, 1e-9)


@dataclass
class EpochTally:
    """Totals of the current epoch, including parts that were trained before a resume.

    Attributes:
        total: Sum of the batches' mean losses, each multiplied by the batch's number of samples.
        num_samples: Samples of these batches.
        seconds: Time of training.
        waited_seconds: The part of `seconds` spent waiting for batches.
        is_trained: True if only the validation of the epoch remains.
    """

    total: float = 0.0
    num_samples: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    is_trained: bool = False

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> EpochTally:
        """Return the totals of a `state_dict`; old checkpoints have None."""
        return cls() if state is None else cls(**state)

    def state_dict(self) -> dict[str, Any]:
        """Return the totals in plain values."""
        return asdict(self)

    def add(self, loss: float, num_samples: int) -> None:
        """Count a step."""
        self.total += loss * num_samples
        self.num_samples += num_samples

    def spend(self, since: float, now: float) -> float:
        """Add the time from `since` to `now`; return `now`."""
        self.seconds += now - since
        return now

    def report(self, epoch: int) -> EpochReport:
        """Return the epoch so far, without metrics."""
        mean = self.total / self.num_samples if self.num_samples else math.nan
        share = self.waited_seconds / max(self.seconds, 1e-9)
        return EpochReport(epoch, mean, {}, self.num_samples, self.seconds, share)


@dataclass
class LossTrend:
    """Detects a loss that grows without bound.

    Attributes:
        first: Mean loss of the first block of steps; None before it.
        noted: The last growth that was noted.
        growth: Loss of the last block / loss of the first block, if that is `MUCH` or more; else None.
        last_epoch: Mean loss of the last epoch.
        num_rising: Consecutive epochs whose loss was more than `RISE` times that of the epoch before.
    """

    first: float | None = None
    noted: float = 1.0
    growth: float | None = None
    last_epoch: float | None = None
    num_rising: int = 0

    def add(self, mean: float) -> float | None:
        """Add the mean loss of a block of steps; return its growth if that is worth a note, else None.

        A note is due when the loss has grown tenfold since the first block, and tenfold again since the last note.
        """
        if not math.isfinite(mean):
            return None
        if self.first is None:
            self.first = mean
        growth = mean / max(abs(self.first), 1e-12)
        self.growth = growth if growth >= MUCH else None
        if growth < MUCH * self.noted:
            return None
        self.noted = growth
        return growth

    def end_epoch(self, mean: float) -> int:
        """Add the mean loss of an epoch; return `num_rising` when it reaches `MOST_RISING`, else 0."""
        before, self.last_epoch = self.last_epoch, mean
        is_rising = before is not None and before > 0 and mean > RISE * before
        self.num_rising = self.num_rising + 1 if is_rising else 0
        return self.num_rising if self.num_rising == MOST_RISING else 0


@dataclass
class Stall:
    """Counts the epochs since the monitored metric was best.

    Attributes:
        best: The lowest score; None before the first epoch.
        num_epochs: Epochs since the lowest score.
    """

    best: float | None = None
    num_epochs: int = 0

    def add(self, score: float, min_delta: float) -> None:
        """Count an epoch. A lower score is better; NaN never counts as better."""
        if score == score and (self.best is None or score < self.best - min_delta):  # noqa: PLR0124
            self.best, self.num_epochs = score, 0
        else:
            self.num_epochs += 1


class EpochLines:
    """A `Progress` that prints a line per epoch and, in a terminal, the progress within the epoch.

    It prints only within the context `shown`: the constructor of a trainer and `train_epoch` are silent.

    Args:
        epochs: Epochs of the whole run.
        stream: Where to print; by default `sys.stdout`, looked up at each print.
    """

    def __init__(self, epochs: int, stream: TextIO | None = None) -> None:
        self._epochs, self._first, self._stream = epochs, 0, stream
        self._began = self._epoch_began = self._updated = time.monotonic()
        self._label, self._total, self._done, self._unit = "", 0, 0, ""
        self._is_shown = self._is_open = False

    @contextlib.contextmanager
    def shown(self, first: int) -> Iterator[None]:
        """Context in which lines are printed; `first` is the number of the first epoch in it."""
        self._first, self._began, self._is_shown = first, time.monotonic(), True
        try:
            yield
        finally:
            self._clear()
            self._is_shown = False

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin an epoch of `total` batches; None if the number is unknown."""
        self._label, self._total, self._unit = f"{label}/{self._epochs}", total or 0, unit
        self._done, self._epoch_began = 0, time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Count batches; in a terminal, shows rate and time left at most twice a second."""
        self._done += count
        now = time.monotonic()
        if not self._is_shown or now - self._updated < _SHOW_SECONDS:
            return
        self._updated = now
        try:
            is_terminal = (self._stream or sys.stdout).isatty()
        except (AttributeError, ValueError):
            return  # a stream that is missing, closed or a script's own must not end a run
        if not is_terminal:
            return
        rate = self._done / max(now - self._epoch_began, 1e-9)
        left = (self._total - self._done) / max(rate, 1e-9)
        ahead = f"/{self._total:,}" if self._total else ""
        remaining = f"  {format_seconds(left)} left" if self._total else ""
        line = f"{self._label}  {self._done:,}{ahead} {self._unit}  {rate:,.1f}/s{remaining}"
        self._write(f"\r\x1b[K{line}")
        self._is_open = True

    def say(self, line: str) -> None:
        """Print a line, within `shown` only."""
        if self._is_shown:
            self._clear()
            self._write(f"{printable(line)}\n")

    def end_epoch(self, report: EpochReport) -> None:
        """Print the line of an epoch that has ended."""
        num_done = report.epoch + 1 - self._first
        seconds = (time.monotonic() - self._began) / max(num_done, 1)
        num_left = self._epochs - report.epoch - 1
        left = f"  {format_seconds(seconds * num_left)} left" if num_left else ""
        self.say(describe_epoch(report, self._epochs) + left)

    def _clear(self) -> None:
        if self._is_open:
            self._write("\r\x1b[K")
        self._is_open = False

    def _write(self, text: str) -> None:
        show(text, self._stream or sys.stdout)


def describe_epoch(report: EpochReport, epochs: int) -> str:
    """Return one line: losses, metrics, samples per second, share of waiting, and whether steps ran eagerly."""
    width = len(str(epochs))
    shown = list(report.metrics.items())[:_SHOWN_METRICS]
    metrics = "".join(f"  {'val loss' if n == 'loss' else n} {value:.4g}" for n, value in shown)
    grown = "" if report.growth is None else f" ({report.growth:.3g} × the first)"
    line = (
        f"epoch {report.epoch + 1:{width}}/{epochs}  loss {report.train_loss:.4g}{grown}{metrics}  "
        f"{report.samples_per_second:,.0f} samples/s  waited {report.wait_share:.0%}"
    )
    if report.is_fallback:
        line += "  eager"
        if report.slowdown is not None and report.slowdown >= _WORTH_TELLING:
            line += f", {report.slowdown:.1f} × slower than captured"
    return line


# Losses of finished epochs: 8 MB.
LOSSES_KEPT = 1_000_000


@dataclass
class History:
    """History of a run.

    Attributes:
        epochs: Reports of finished epochs.
        step_losses: Losses of the steps, in order, across epochs: all of this epoch, and of the epochs before it the
            last million. A GPU does 5,000 small steps a second, and all their losses would be 150 MB an hour.
        ended: "done", "terminated" or "interrupted".
        told: Decisions with their reasons, and events, in order.
    """

    epochs: list[EpochReport] = field(default_factory=list)
    step_losses: array[float] = field(default_factory=lambda: array("d"))
    ended: str = "done"
    told: list[Note] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"History({', '.join(f'{name} {value}' for name, value in self._summary())})"

    def _repr_html_(self) -> str:
        return table_html("History", self._summary())

    def _summary(self) -> list[tuple[str, str]]:
        losses = [report.train_loss for report in self.epochs] or self.step_losses[-1:].tolist()
        return [
            ("epochs", f"{len(self.epochs):,}"),
            ("loss", " to ".join(f"{loss:.4g}" for loss in dict.fromkeys(losses[:1] + losses[-1:]))),
            *((name, f"{value:.4g}") for name, value in (self.epochs[-1].metrics if self.epochs else {}).items()),
            ("ended", self.ended),
        ]  # fmt: skip

    @property
    def losses(self) -> list[float]:
        """Loss of every step, in order, across epochs: a new list at each call. See `step_losses` for long runs."""
        return self.step_losses.tolist()

    def leave_early_losses(self) -> None:
        """Drop all but the last `LOSSES_KEPT` losses."""
        del self.step_losses[:-LOSSES_KEPT]

    @property
    def notes(self) -> list[str]:
        """The texts of `told`."""
        return [note.text for note in self.told]

    @property
    def step(self) -> Note | None:
        """The last note on how steps run; its value `captured` says whether as one CUDA graph."""
        return next((note for note in reversed(self.told) if note.topic is Topic.STEP), None)

    @property
    def fallback(self) -> Note | None:
        """The note on why steps run eagerly although capture was wanted; None if that is not the case."""
        return self.step if self.step is not None and self.step.values.get("fallback") else None

    @property
    def is_captured(self) -> bool:
        """Whether steps run as one CUDA graph."""
        return self.step is not None and bool(self.step.values["captured"])


def call_weakly(tell: Callable[[Note], object]) -> Callable[[Note], None]:
    """Return a function that calls a bound method but holds its object by a weak reference only."""
    method = weakref.WeakMethod(tell)

    def call(note: Note) -> None:
        if (alive := method()) is not None:
            alive(note)

    return call
