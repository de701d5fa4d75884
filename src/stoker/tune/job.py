"""`tune_job`: finds the fastest settings of a ready job by running them.

Enters: `Settings` of a config. Leaves: `Tuned`: the rates by batch size, every option that was tried, or why it was
not, the changes that paid, and a longer run of the chosen settings whose memory was checked. Costs 3 to 5 s for each
try: usually half a minute on a GPU.

The order is: batch size, which matters most; then capture; then the size of chunks. A change is kept if it gains 2 %
(`search.py`). The samples per update stay the same, and with them the learning rate and the result of the training: a
larger batch replaces accumulated ones. More samples per update are measured and shown, but used only on request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from stoker.config import Settings
from stoker.errors import InputError
from stoker.measure.search import (
    LEAST_GAIN,
    NOISY,
    UpdateShape,
    choose,
    climb,
    keeps_update,
    shape_ladder,
)
from stoker.recipes.run import Run, open_run
from stoker.report import Progress, Silent
from stoker.tune.trial import Effort, JobBench, Measured
from stoker.units import GIB, MIB, format_bytes, format_count

_CHUNK_FACTORS = (0.25, 0.5, 1.0, 2.0)
_LEAST_CHUNK_BYTES = 16 * MIB
_BATCH, _STEPS = "training.batch_size", "training.gradient_accumulation_steps"
_CAPTURE, _CHUNK = "training.capture", "data.chunk_size_gb"
_WORKERS = "no effect here: the loader reads the store with threads of this process"


@dataclass(frozen=True)
class OptionTry:
    """One tried value of one option, with all others unchanged; `is_kept` says if the tuned settings have it."""

    option: str
    value: str
    measured: Measured
    is_kept: bool


@dataclass(frozen=True)
class Tuned:
    """Result of a tuning."""

    configured: UpdateShape  # batch size and accumulation before
    curve: tuple[Measured, ...]  # tries of batch sizes, by rising size
    options: tuple[OptionTry, ...]  # tries of other options
    left_alone: Mapping[str, str]  # options that were not tried, and why
    changes: Mapping[str, Any]  # keys to their new values; empty if nothing pays
    final: Measured  # longer run of the tuned settings; its memory was below the limit
    # notes on the result: the learning rate, faster sizes that were not chosen
    notes: tuple[str, ...] = field(default=())

    @property
    def before(self) -> Measured:
        """The try of the configured settings."""
        return next(point for point in self.curve if point.shape == self.configured)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "gain": self.gain}

    @property
    def gain(self) -> float | None:
        """Speed-up (rate after / rate before); None if the configured settings did not run."""
        before, after = self.before.rate, self.final.rate
        return None if not before or after is None else after / before

    @property
    def noise(self) -> float | None:
        """Largest spread of the tries that decide, if it hides whether a change pays; else None."""
        if self.gain is None:
            return None
        decide = [self.before, self.final]
        if not self.changes:
            others = [each for each in self.curve if keeps_update(each.shape, self.configured)]
            others += [each.measured for each in self.options]
            rate, spread = self.before.rate or 0.0, self.before.spread or 0.0
            near = [
                each
                for each in others
                if each is not self.before
                and (each.rate or 0.0) * (1 + max(spread, each.spread or 0.0) / 2) > rate
            ]
            decide = [*decide, *near] if near else []
        noise = max((each.spread or 0.0 for each in decide), default=0.0)
        is_clear = noise <= NOISY or self.gain > 1 + noise / 2
        return None if is_clear else noise


def tune_job(
    settings: Settings,  # with a recipe and a store
    *,
    device: str | torch.device | None = None,  # the first GPU by default, else the CPU
    effort: Effort | None = None,  # duration of each try
    # also use batches larger than the effective batch: faster if the device is underused, but a different training,
    # whose learning rate must be chosen again
    grow_update: bool = False,
    progress: Progress | None = None,  # receives a line for each try
) -> Tuned:
    """Find the fastest settings of a job by running them.

    Raises:
        InputError: Not even one sample fits, or the job cannot be made.
    """
    with open_run(settings, device=device) as run:
        return _Search(run, effort or Effort(), progress or Silent()).finish(grow_update)


class _Search:
    """The state of one tuning: the tries so far, and why some options are not tried."""

    def __init__(self, run: Run, effort: Effort, told: Progress) -> None:
        self._run, self._effort, self._told = run, effort, told
        self._settings, self._bench = run.settings, JobBench(run, effort)
        training = run.settings.training
        self._configured = UpdateShape(training.batch_size, training.gradient_accumulation_steps)
        self._ladder = shape_ladder(self._configured, self._bench.num_samples)
        self._options: list[OptionTry] = []
        self._left_alone: dict[str, str] = {}
        if run.job.lanes is not None:
            self._ladder = (self._configured,)
            self._left_alone[_BATCH] = "every lane is a row of the batch: it is part of the job"
        self._start = self._ladder.index(self._configured)
        self._tried: dict[int, Measured] = {}

    def _measure_level(self, level: int) -> Measured:
        return self._measure(_shaped(self._settings, self._ladder[level]), "")

    def _measure(self, settings: Settings, what: str) -> Measured:
        done = self._bench.measure(settings)
        self._told.advance()
        self._told.say(f"{what}{describe(done)}")
        return done

    def finish(self, grow_update: bool) -> Tuned:
        """Measure the rate per batch size, choose one, try the options beside it, and run the result longer."""
        self._told.start("batch sizes", None, "tries")
        self._tried = climb(len(self._ladder), self._start, self._measure_level)

        def allowed(level: int) -> bool:
            return grow_update or keeps_update(self._ladder[level], self._configured)

        while True:
            level = choose(self._tried, self._start, allowed)
            if level is None:
                lower = min(self._tried) - 1
                if lower < 0:
                    raise self._nothing_fits()
                self._tried[lower] = self._measure_level(lower)
                continue
            chosen = _shaped(self._settings, self._ladder[level])
            self._options = []
            changes: dict[str, Any] = {}
            here = self._tried[level]
            for name, values in self._offers(here):
                value, here = self._try_option(chosen.changed(changes), name, values, here)
                if value is not None:
                    changes[name] = value
            final = self._verify(chosen.changed(changes))
            if final.fits:
                break
            self._told.say(f"batch {here.shape.batch_size} is given up: {final.reason}")
            self._tried[level] = replace(self._tried[level], fits=False, reason=final.reason)
        if not changes and level == self._start:
            return self._sum_up(chosen, changes, final)
        # Other programs may have started or ended since the config was measured.
        before = self._verify(self._settings, "the config, run as long")
        if before.fits and before.rate is not None and final.rate is not None:
            self._tried[self._start] = before
            if final.rate < before.rate * (1 + LEAST_GAIN):
                self._told.say("the gain did not last: the config stays as it is")
                return self._sum_up(self._settings, {}, before)
        return self._sum_up(chosen, changes, final)

    def _verify(self, settings: Settings, what: str = "the result, run longer") -> Measured:
        """Run settings for twice as long, because memory may run out later."""
        longer = Effort(2 * self._effort.seconds, 2 * self._effort.num_slices)
        final = self._bench.measure(settings, longer)
        self._told.say(f"{what}: {describe(final)}")
        return final

    def _offers(self, here: Measured) -> list[tuple[str, Sequence[Any]]]:
        """Return the options to try with their values; record why others are not tried."""
        for name in (_CAPTURE, _CHUNK):
            self._left_alone.pop(name, None)
        for name in ("data.num_workers", "data.prefetch_factor"):
            self._left_alone[name] = _WORKERS
        offers: list[tuple[str, Sequence[Any]]] = []
        if self._run.device.type != "cuda":
            self._left_alone[_CAPTURE] = "there are no CUDA graphs on the CPU"
        elif self._settings.training.capture == "off":
            offers.append((_CAPTURE, ["auto"]))
        elif here.is_captured:
            offers.append((_CAPTURE, ["off"]))
        else:
            self._left_alone[_CAPTURE] = here.step
        if here.tier == "chunked" and here.device_data_bytes >= _LEAST_CHUNK_BYTES:
            offers.append((_CHUNK, _chunk_sizes(here.device_data_bytes)))
        elif here.tier == "chunked":
            self._left_alone[_CHUNK] = "the chunks are tiny already"
        else:
            self._left_alone[_CHUNK] = {
                "resident": "all data is resident: there are no chunks",
                "streamed": "batches are streamed: there are no chunks",
            }.get(here.tier, here.tier)
        return offers

    def _try_option(
        self, settings: Settings, name: str, values: Sequence[Any], here: Measured
    ) -> tuple[Any, Measured]:
        """Return (value that gains enough, its measurement), or (None, `here`)."""
        self._told.start(name, None, "tries")
        ladder, start = (
            ([*values], _CHUNK_FACTORS.index(1.0)) if name == _CHUNK else ([None, *values], 0)
        )

        def measure(level: int) -> Measured:
            if level == start:
                return here
            trial = settings.changed({name: ladder[level]})
            return self._measure(trial, f"{name} {_show(name, ladder[level])}: ")

        tried = climb(len(ladder), start, measure)
        taken = choose(tried, start)
        assert taken is not None  # the start fits
        self._options += [
            OptionTry(name, _show(name, ladder[level]), done, level == taken)
            for level, done in sorted(tried.items())
            if level != start
        ]
        return (None, here) if taken == start else (ladder[taken], tried[taken])

    def _nothing_fits(self) -> InputError:
        smallest = self._tried[min(self._tried)]
        return InputError(
            f"no batch size fits on {self._run.device}: with {smallest.shape.batch_size} at once "
            f"{smallest.reason}.",
            "a job whose step fits",
            "training.precision=bf16, training.activation_checkpointing=true, or a smaller model",
        )

    # -- the result ------------------------------------------------------------------------

    def _sum_up(self, chosen: Settings, changes: dict[str, Any], final: Measured) -> Tuned:
        found: dict[str, Any] = {
            key: chosen.get(key)
            for key in (_BATCH, _STEPS)
            if chosen.get(key) != self._settings.get(key)
        }
        return Tuned(
            self._configured,
            tuple(self._tried[level] for level in sorted(self._tried)),
            tuple(self._options),
            self._left_alone,
            found | changes,
            final,
            (*self._rate_notes(final.shape), *self._missed_notes(final)),
        )

    def _rate_notes(self, shape: UpdateShape) -> list[str]:
        rate = self._settings.training.lr
        before, after = self._configured.samples_per_update, shape.samples_per_update
        if keeps_update(shape, self._configured):
            kept = f"{format_count(after, 'sample')} per update"
            kept += ", as before" if after == before else f" instead of {before:,}"
            return [f"{kept}: the learning rate stays {rate:g}"]
        factor = after / before
        if self._run.job.scales_rate:
            said = "the recipe scales the learning rate by its lr_rule"
        else:
            said = (
                f"another training. The learning rate is left at {rate:g}; {rate * factor:.2g} by the linear "
                f"rule (SGD), {rate * math.sqrt(factor):.2g} by the square root rule (Adam): try both"
            )
        return [f"{after:,} samples per update instead of {before:,}: {said}"]

    def _missed_notes(self, final: Measured) -> list[str]:
        """Return a note on faster sizes that would make the update larger."""
        beyond = choose(self._tried, self._start)
        if beyond is None or final.rate is None:
            return []
        best, shape = self._tried[beyond].rate or 0.0, self._ladder[beyond]
        if shape.batch_size <= final.shape.batch_size or best < final.rate * (1 + LEAST_GAIN):
            return []
        said = (
            f"Batches of {shape.batch_size:,} run at {best / final.rate:.2f} times this rate, but an update "
            f"then has {shape.samples_per_update:,} samples instead of "
            f"{self._configured.samples_per_update:,}: --grow-update takes them"
        )
        return [said]


def _shaped(settings: Settings, shape: UpdateShape) -> Settings:
    return settings.changed({_BATCH: shape.batch_size, _STEPS: shape.accumulation_steps})


def _chunk_sizes(now_bytes: int) -> list[float]:
    """Return sizes to try for all slots together, in GiB as in a config.

    Rounded to three significant digits: three decimals would turn half a MiB into 0, which configs do not accept.
    """
    return [float(f"{now_bytes * factor / GIB:.3g}") for factor in _CHUNK_FACTORS]


def _show(key: str, value: Any) -> str:
    return format_bytes(int(value * GIB)) if key == _CHUNK else str(value)


def describe(done: Measured) -> str:
    """Return a line of text on one try: batch size, rate, memory, or why it failed."""
    shape = done.shape
    size = f"batch {shape.batch_size:,}"
    if shape.accumulation_steps > 1:
        size += f" x {shape.accumulation_steps}"
    if done.rate is None:
        return f"{size}: {done.reason}"
    spread = "" if done.spread is None else f", spread {done.spread:.0%}"
    held = f", {format_bytes(done.peak_bytes)} of {format_bytes(done.cap_bytes)}"
    said = f"{size}: {done.rate:,.0f} samples/s{spread}{held}"
    return said if done.fits else f"{said}: {done.reason}"
