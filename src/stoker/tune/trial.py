"""Runs a ready job for some seconds at given settings, and measures its rate, its steadiness and its memory.

Enters: an open `Run` and settings to try. Leaves: `Measured`. Costs the seconds of the `Effort`, a warm-up,
and building loader, model and optimizer anew: nothing of one try is left for the next.

The run's own trainer runs, eager or captured, with its optimizer, precision and loader. Only checkpoints, logs and
the recovery from running out of memory, which would hide that a size does not fit, are off.
"""

from __future__ import annotations

import copy
import math
import statistics
from dataclasses import dataclass, replace

from stoker.config import Settings
from stoker.errors import DoesNotFitError, InputError
from stoker.measure.gauge import Gauge
from stoker.measure.jobs import time_together, warm_up_batches
from stoker.measure.laps import Patience, block_rates
from stoker.measure.search import Outcome, OutcomeT, UpdateShape
from stoker.recipes.run import Run
from stoker.report import Silent
from stoker.train.ranks import Ranks
from stoker.units import format_bytes

_MANY_BATCHES = 1_000_000


def agree(outcome: OutcomeT) -> OutcomeT:
    """Return one outcome for all ranks: it fits if it fits on every rank, and rates are added.

    Ranks that decide only by agreed outcomes make the same tries, so no rank waits for a size that the others
    do not try. Blocking: every rank must call it, in the same order.
    """
    ranks = Ranks.current()
    if not ranks.are_several:
        return outcome
    fits = ranks.all_of(outcome.fits)
    is_known = ranks.all_of(outcome.rate is not None)
    (rate,) = ranks.total(outcome.rate or 0.0)
    reason = "it did not fit on another rank" if outcome.fits and not fits else outcome.reason
    return replace(outcome, fits=fits, rate=rate if is_known else None, reason=reason)


@dataclass(frozen=True)
class Effort:
    """How long to measure: the seconds of one try without its warm-up, and the number of slices.

    The rate is the median of the slices. Updates of many seconds may leave fewer slices, but at least two.
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
    """One try of a job."""

    shape: UpdateShape  # batch size and accumulation
    # (largest - smallest) / median rate of its slices; None if the try did not run
    spread: float | None = None
    # peak memory; None if memory ran out, or if the size was not tried
    peak_bytes: int | None = None
    cap_bytes: int = 0  # limit of the memory
    device_data_bytes: int = 0  # data that the loader keeps on the device
    tier: str = ""  # tier of the loader: "resident", "chunked" or "streamed"
    step: str = ""  # how the step ran, in words: "eager: ..." or "captured: ..."
    is_captured: bool = False  # whether it ran as one CUDA graph


class JobBench:
    """Measures one job at many settings. All tries share its store; each has its own copy of the model."""

    def __init__(self, run: Run, effort: Effort) -> None:
        self._run, self._effort = run, effort
        self._gauge = Gauge(run.device)

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return len(self._run.job.samples["train"])

    def measure(self, settings: Settings, effort: Effort | None = None) -> Measured:
        """Run the job at these settings; every rank gets the same answer.

        Out of memory is an outcome, not an error; every other error is raised.
        """
        shape = UpdateShape(
            settings.training.batch_size, settings.training.gradient_accumulation_steps
        )
        return agree(self._measure(settings, shape, effort or self._effort))

    def _measure(self, settings: Settings, shape: UpdateShape, effort: Effort) -> Measured:
        gauge = self._gauge
        try:
            done, reason = gauge.attempt(
                shape.batch_size, lambda: self._try(settings, shape, effort)
            )
        except DoesNotFitError as error:
            done, reason = None, error.given
        cap = gauge.cap_bytes
        if done is None:
            return Measured(None, False, reason, shape=shape, cap_bytes=cap)
        peak = gauge.peak_bytes()
        done = replace(done, peak_bytes=peak, cap_bytes=cap)
        if peak <= cap:
            return done
        reason = f"{format_bytes(peak)} leave too little free: {format_bytes(cap)} may be used"
        return replace(done, fits=False, reason=reason)

    def _try(self, settings: Settings, shape: UpdateShape, effort: Effort) -> Measured:
        # Each rank measures its part of the batch alone: if memory ran out on one rank, the others would wait in a
        # collective.
        ranks = Ranks.current()
        if ranks.are_several:
            each = max(1, settings.training.batch_size // ranks.world_size)
            with Ranks.alone():
                return self._try(settings.changed({"training.batch_size": each}), shape, effort)
        run, steps = self._run, shape.accumulation_steps
        job = replace(run.job, model=copy.deepcopy(run.job.model))
        bare = settings.changed(
            {
                "training.survive_oom": False,
                "training.log_gpu_stats_every_n_batches": 0,
                "training.tensorboard": False,
            }
        )
        trial = Run(bare, run.chosen, run.store, job, run.folder, run.device, Silent())
        warm_up = -(-warm_up_batches(run.device) // steps) * steps
        patience = Patience(warm_up, _MANY_BATCHES, effort.seconds, 2 * steps)
        # Without the pauses between epochs, which would make small data sets look slow.
        timed = time_together(trial, patience, with_epoch_ends=False)
        if timed.trouble is not None:
            raise timed.trouble
        rates = block_rates(timed.laps, effort.num_slices, steps)
        rate, step = statistics.median(rates), timed.history.step
        return Measured(
            rate,
            True,
            shape=shape,
            spread=(max(rates) - min(rates)) / rate,
            device_data_bytes=timed.device_data_bytes,
            tier=timed.tier,
            step="" if step is None else str(step.values["how"]),
            is_captured=timed.history.is_captured,
        )
