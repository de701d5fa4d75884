"""A ready job, run for some seconds at any settings: how fast, how steadily, in how much memory.

Enters: an open `Run` and settings to try. Leaves: `Measured`. Costs the seconds of the `Effort`, a warm-up,
and building loader, model and optimizer anew: nothing of one try is left for the next.

What runs is the run's own trainer, eager or captured, with its optimizer, precision and loader. Only
what a measurement must not do is off: checkpoints, logs, and the ladder that would hide an out of memory.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from dataclasses import dataclass, replace

import torch

from stoker.config import Settings
from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.recipes.run import Run
from stoker.report import Silent
from stoker.train.oom import forget_frames, is_oom
from stoker.train.ranks import Ranks
from stoker.tune.gauge import Gauge
from stoker.tune.ranks import agree
from stoker.tune.search import Outcome, UpdateShape
from stoker.units import format_bytes

_WARM_UP_CPU, _WARM_UP_GPU = 2, 12
"""Batches; a captured step trains three eagerly, is captured, and its first replays are checked."""
_MANY_EPOCHS = 1_000_000


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: Of one try, warm-up not counted.
        num_slices: Parts whose median is the rate. A step of many seconds may leave fewer, two at least.
    """

    seconds: float = 3.0
    num_slices: int = 5

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf or self.num_slices < 2:
            raise InputError(
                f"{self.seconds:g} seconds in {self.num_slices} slices for each try.",
                "more than 0 seconds, in 2 or more",
                "--seconds-per-try 3",
            )


@dataclass(frozen=True, kw_only=True)
class Measured(Outcome):
    """One try of a job.

    Attributes:
        shape: Batch size and accumulation.
        spread: (largest - smallest) / median rate of its slices; None when it did not run.
        peak_bytes: Most memory in use; None when it ran out of it, or was not tried.
        cap_bytes: Most that it may use.
        device_data_bytes: What the loader keeps on the device.
        tier: Of the loader: "resident", "chunked" or "streamed".
        step: How the step ran, in words: "eager: ..." or "captured: ...".
        is_captured: Whether it ran as one CUDA graph.
    """

    shape: UpdateShape
    spread: float | None = None
    peak_bytes: int | None = None
    cap_bytes: int = 0
    device_data_bytes: int = 0
    tier: str = ""
    step: str = ""
    is_captured: bool = False


class _EnoughError(Exception):
    """Leaves the trainer's loop."""


class StepClock(Silent):
    """Listens to a trainer as its `Progress`, and leaves it when enough slices are measured.

    Time between epochs is not counted. The device is waited for where a slice or an epoch ends, so a
    slice holds whole updates and all of their work.

    Args:
        loader: What the trainer iterates.
        accumulation_steps: Batches per update.
        effort: How long.
    """

    def __init__(self, loader: Loader, accumulation_steps: int, effort: Effort) -> None:
        self._device = loader.device
        self._batch_size, self._num_samples = loader.batch_size, len(loader.samples)
        self._window = accumulation_steps
        self._effort = effort
        least = _WARM_UP_GPU if self._device.type == "cuda" else _WARM_UP_CPU
        self._left_to_warm = -(-least // accumulation_steps) * accumulation_steps
        self._began: float | None = None
        self._samples = self._batches = 0
        self._seconds = self._in_all = 0.0
        self._num_batches: int | None = None
        self._at = 0
        self.rates: list[float] = []

    def start(self, label: str, total: int | None, unit: str) -> None:  # noqa: ARG002  Progress
        """An epoch begins."""
        self._num_batches, self._at = total, 0
        self._synchronize()
        self._began = time.perf_counter()

    def advance(self, count: int = 1) -> None:
        """Batches are done, or at least on their way."""
        self._at += count
        is_last = self._at == self._num_batches
        left = self._num_samples - (self._at - 1) * self._batch_size
        self._samples += max(0, min(self._batch_size, left))
        self._batches += count
        if self._left_to_warm > 0:
            self._left_to_warm -= count
            if self._left_to_warm <= 0:
                self._begin_slice()
            return
        due = self._batches % self._window == 0 and self._elapsed() >= self._slice_seconds
        if due or is_last:
            self._pause(is_last)
        if due:
            self._end_slice()

    @property
    def _slice_seconds(self) -> float:
        return self._effort.seconds / self._effort.num_slices

    def _elapsed(self) -> float:
        running = 0.0 if self._began is None else time.perf_counter() - self._began
        return self._seconds + running

    def _pause(self, is_last: bool) -> None:
        self._synchronize()
        self._seconds = self._elapsed()
        self._began = None if is_last else time.perf_counter()

    def _begin_slice(self) -> None:
        self._synchronize()
        self._samples = self._batches = 0
        self._seconds = 0.0
        if self._began is not None:
            self._began = time.perf_counter()

    def _end_slice(self) -> None:
        self.rates.append(self._samples / max(self._seconds, 1e-9))
        self._in_all += self._seconds
        slow = len(self.rates) >= 2 and self._in_all > 2 * self._effort.seconds
        if len(self.rates) == self._effort.num_slices or slow:
            raise _EnoughError
        self._samples = self._batches = 0
        self._seconds = 0.0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class JobBench:
    """Measures one job at many settings.

    Args:
        run: Open; its store and job are used, its model is copied for each try.
        effort: How long each try is.
        gauge: Of the run's device.
    """

    def __init__(self, run: Run, effort: Effort, gauge: Gauge | None = None) -> None:
        self._run = run
        self._effort = effort
        self._gauge = gauge or Gauge(run.device)

    @property
    def num_samples(self) -> int:
        """Training samples."""
        return len(self._run.job.samples["train"])

    def measure(self, settings: Settings, effort: Effort | None = None) -> Measured:
        """Run the job at these settings; every rank gets the same answer.

        Out of memory is an outcome, not an error; every other error is raised.
        """
        shape = UpdateShape(settings.batch_size, settings.accumulation_steps)
        return agree(self._measure(settings, shape, effort or self._effort))

    def _measure(self, settings: Settings, shape: UpdateShape, effort: Effort) -> Measured:
        gauge = self._gauge
        gauge.begin()
        nothing = Measured(None, False, shape=shape, cap_bytes=gauge.cap_bytes)
        refused = gauge.expect(shape.batch_size)
        if refused:
            return replace(nothing, reason=refused)
        try:
            done = self._try(settings, shape, effort)
        except Exception as error:  # a loader's thread wraps it in an error of its own
            if not is_oom(error):
                raise
            forget_frames(error)
            return replace(nothing, reason="out of memory")
        gauge.note(shape.batch_size)
        peak = gauge.peak_bytes()
        done = replace(done, peak_bytes=peak, cap_bytes=gauge.cap_bytes)
        if peak <= gauge.cap_bytes:
            return done
        reason = f"{format_bytes(peak)} leave too little free: {format_bytes(gauge.cap_bytes)} may be used"
        return replace(done, fits=False, reason=reason)

    def _try(self, settings: Settings, shape: UpdateShape, effort: Effort) -> Measured:
        # Each rank measures its part of the batch by itself: memory that runs out on one would leave the
        # others waiting in an exchange.
        ranks = Ranks.current()
        if ranks.are_several:
            each = max(1, settings.batch_size // ranks.world_size)
            with Ranks.alone():
                return self._try_alone(replace(settings, batch_size=each), shape, effort)
        return self._try_alone(settings, shape, effort)

    def _try_alone(self, settings: Settings, shape: UpdateShape, effort: Effort) -> Measured:
        run = self._run
        job = replace(run.job, model=copy.deepcopy(run.job.model))
        trial = Run(
            _for_measuring(settings), run.chosen, run.store, job, run.folder, run.device, Silent()
        )
        with trial.make_train_loader() as loader:
            clock = StepClock(loader, shape.accumulation_steps, effort)
            trainer = trial.make_trainer(loader, None, clock, run_dir=None)
            try:
                trainer.fit()
            except _EnoughError as enough:
                forget_frames(enough)
            else:
                raise KeyboardInterrupt  # SIGTERM ends a fit in good order; here nothing is to be saved
            data_bytes, tier = loader.device_bytes, loader.tier
        step = trainer.history.step
        rate = statistics.median(clock.rates)
        spread = (max(clock.rates) - min(clock.rates)) / rate
        return Measured(
            rate,
            True,
            shape=shape,
            spread=spread,
            device_data_bytes=data_bytes,
            tier=tier,
            step="" if step is None else str(step.values["how"]),
            is_captured=trainer.history.is_captured,
        )


def _for_measuring(settings: Settings) -> Settings:
    return replace(
        settings,
        epochs=max(settings.epochs, _MANY_EPOCHS),
        survive_oom=False,
        log_gpu_stats_every_n_batches=0,
        tensorboard=False,
    )
