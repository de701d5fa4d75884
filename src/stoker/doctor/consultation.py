"""Examines a stoker job: measures it, tries other settings, diagnoses, and on request applies a remedy and measures it.

Enters: a config. Leaves: a `Consultation`, and after `--apply` an `Outcome`: samples per second before, predicted
and after. Costs the measurements: one for the job, one for each proposal, a few short ones of the step alone for
larger batches. Before and after are measured in turn, so that a drift of the machine's speed affects both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stoker.doctor.ablation import default_patience, examine
from stoker.doctor.cases import WORTHWHILE
from stoker.doctor.findings import Consultation, Finding, Gain, Outcome, Patch, describe_changes
from stoker.doctor.job_config import JobConfig
from stoker.doctor.measurements import Alternative, Measurements
from stoker.doctor.rules import diagnose
from stoker.errors import ConfigError, InputError
from stoker.measure import search
from stoker.measure.gauge import Gauge
from stoker.measure.jobs import Timed, time_step, time_together
from stoker.measure.laps import LEAST_LAPS, Patience
from stoker.measure.readings import Spread
from stoker.recipes.run import Run, open_run
from stoker.report import Progress
from stoker.train.oom import forget_frames, is_oom

BATCH_GAIN = 1.05
"""Doubling stops after two sizes in a row at which samples per second grow by less than this factor."""
NEAR_BEST = 0.95
"""The smallest batch whose rate is at least this share of the best is proposed."""
_MOST_DOUBLINGS = 5
_RARELY = 10
_LONG_SECONDS = 60.0
"""A larger batch is not tried if measuring it would take longer."""


def propose(job: JobConfig, measured: Measurements) -> list[Alternative]:
    """Return the changes worth trying that this config allows, except larger batches. Pure."""
    training, data, reasons = job.settings.training, job.settings.data, job.settings.reasons
    tier = measured.loader.tier if measured.loader else None
    on_gpu = measured.machine.device == "cuda"
    found = []

    def offer(finding: str, key: str, value: Any, why: str, *turn_on: str) -> None:
        changes = {job.key_of(key): value, **dict.fromkeys(turn_on, True)}
        found.append(Alternative(finding, changes, f"{why}: {reasons[key]}"))

    if on_gpu and training.capture == "off":
        why = "the step is launched kernel by kernel"
        offer("launch-bound", "training.capture", "auto", why)
    if on_gpu and training.precision in ("fp32", "tf32"):
        amp = job.key_of("training.use_amp")
        turned_off = [amp] if job.config.written().get(amp) is False else []
        why = f"the step computes in {measured.precision}"
        offer("full-precision", "training.precision", "auto", why, *turned_off)
    if on_gpu and not data.use_chunk_loader:
        offer("starved-by-loader", "data.use_chunk_loader", True, f"the data is {tier}")
    elif data.use_chunk_loader and data.chunk_bytes is not None and tier == "chunked":
        offer("starved-by-loader", "data.chunk_size_gb", None, f"the data is {tier}")
    every = training.empty_cache_every_n_batches
    if on_gpu and 0 < every <= _RARELY:
        why = f"the cache is emptied every {every} batches"
        offer("empty-cache-each-step", "training.empty_cache_every_n_batches", 0, why)
    if on_gpu and training.read_every < _RARELY:
        why = f"losses are read every {training.read_every} steps"
        offer("sync-every-step", "training.read_every", 50, why)
    return found


# -- larger batches --------------------------------------------------------------------------------


def find_knee(
    batch: int,  # the configured size
    seconds: float,  # of the step alone at that size
    most: int,  # largest size to try
    measure: Callable[[int], float | None],  # seconds of the step alone; None if it does not fit
) -> tuple[list[tuple[int, float]], int | None]:
    """Double the batch while the step alone becomes faster per sample.

    Returns the sizes tried with the seconds of their steps, and the smallest size whose rate is near the best one; None
    in its place if that is the configured size.
    """
    doublings = [batch * 2**n for n in range(1, _MOST_DOUBLINGS + 1)]
    sizes = [batch, *(size for size in doublings if size <= most)]
    tried: list[tuple[int, float]] = []

    def try_level(level: int) -> search.Outcome:
        took = measure(sizes[level]) if level else seconds
        if took is None:
            return search.Outcome(None, False)
        if level:
            tried.append((sizes[level], took))
        return search.Outcome(sizes[level] / max(took, 1e-12), True)

    outcomes = search.climb(len(sizes), 0, try_level, BATCH_GAIN - 1, most_misses=1)
    knee = search.choose(outcomes, 0, least_gain=1 / NEAR_BEST - 1)
    return tried, sizes[knee] if knee else None


def batch_proposal(job: JobConfig, size: int) -> Alternative:
    """Return the change to a larger batch, with fewer accumulation steps if gradients are accumulated."""
    settings = job.settings
    factor = size // settings.training.batch_size
    changes: dict[str, Any] = {job.key_of("training.batch_size"): size}
    if settings.training.gradient_accumulation_steps > 1:
        fewer = max(1, settings.training.gradient_accumulation_steps // factor)
        changes[job.key_of("training.gradient_accumulation_steps")] = fewer
    return Alternative(
        "batch-too-small",
        changes,
        f"a batch of {settings.training.batch_size:,} leaves the device with little to do: "
        f"{settings.reasons['training.batch_size']}",
    )


# -- measuring -------------------------------------------------------------------------------------


def try_alternatives(
    run: Run, job: JobConfig, measured: Measurements, patience: Patience
) -> Measurements:
    """Measure the job with every proposed change, and add the results to its measurements."""
    ablation = measured.ablation
    assert ablation is not None
    tried, knee = _larger_batches(run, measured, patience)
    proposals = propose(job, measured)
    proposals += [batch_proposal(job, knee)] if knee is not None else []
    made = [_try(run, job, proposal, patience) for proposal in proposals]
    rate = ablation.together_rate
    if made and rate is not None:
        run.told.say("everything together once more")
        rate = _pooled(rate, time_together(run, patience))
    return replace(
        measured,
        ablation=replace(
            ablation, larger_batches=tuple(tried), alternatives=tuple(made), together_rate=rate
        ),
    )


def _pooled(rate: Spread, again: Timed) -> Spread:
    """Return a spread that covers both measurements, which differ because the machine's speed drifts."""
    other = again.rate()
    if other is None:
        return rate
    return Spread(
        (rate.median + other.median) / 2,
        min(rate.low, other.low),
        max(rate.high, other.high),
        rate.count + other.count,
    )


def _larger_batches(
    run: Run, measured: Measurements, patience: Patience
) -> tuple[list[tuple[int, float]], int | None]:
    ablation, settings = measured.ablation, run.settings
    if run.job.lanes is not None or ablation is None or ablation.step_seconds is None:
        return [], None
    per_sample = ablation.step_seconds.median / settings.training.batch_size
    num_steps = patience.warm_up + LEAST_LAPS
    gauge = Gauge(run.device)

    def time(size: int) -> Spread | None:
        run.told.say(f"the step alone, batches of {size:,}")
        larger = settings.changed({"training.batch_size": size, "training.survive_oom": False})
        return time_step(run.with_settings(larger), patience).seconds

    def measure(size: int) -> float | None:
        if per_sample * size * num_steps > _LONG_SECONDS:
            return None
        took, _ = gauge.attempt(size, lambda: time(size))
        # The faster quartile of the steps is least disturbed by other work on the machine.
        return None if took is None else took.low

    # At least two updates per epoch.
    most = len(run.job.samples["train"]) // 2
    return find_knee(settings.training.batch_size, ablation.step_seconds.low, most, measure)


def _try(run: Run, job: JobConfig, proposal: Alternative, patience: Patience) -> Alternative:
    said = describe_changes(proposal.changes)
    run.told.say(f"everything together with {said}")
    failure, rate = "", None
    try:
        settings = job.with_changes(proposal.changes).settings
        changed = run.with_settings(
            settings.changed({"training.survive_oom": False, "training.nonfinite": "skip"})
        )
        rate = time_together(changed, patience).rate()
    except (ConfigError, InputError) as error:
        failure = error.given
    except RuntimeError as error:
        if not is_oom(error):
            raise
        forget_frames(error)
        failure = "it does not fit into memory"
    return replace(proposal, samples_per_second=rate, failure=failure)


# -- findings --------------------------------------------------------------------------------------

_WORDS = {
    "launch-bound": (
        "the device waits for launches",
        "Let the whole step be replayed as one CUDA graph: {changes}.",
    ),
    "full-precision": (
        "the step computes in 32 bits",
        "Compute in 16 bits where it is safe; the loss stays in 32: {changes}.",
    ),
    "starved-by-loader": (
        "the step waits for data",
        "Let the plan place the data as near to the step as it fits: {changes}.",
    ),
    "empty-cache-each-step": (
        "memory is given back only to be asked for again",
        "Keep the allocator's cache: {changes}.",
    ),
    "sync-every-step": (
        "losses are read so often that the host waits for the device",
        "Read losses in blocks: {changes}.",
    ),
    "batch-too-small": (
        "the batch is too small for the device",
        "Give the device more per step: {changes}; look at the learning rate if the samples per update change.",
    ),
}


def weigh(measured: Measurements, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, with predicted gains replaced by measured ones where a remedy was tried.

    A finding whose remedy was tried without a gain is left out. Pure.
    """
    ablation = measured.ablation
    if ablation is None or ablation.together_rate is None:
        return list(findings)
    kept = {finding.name: finding for finding in findings}
    for alternative in ablation.alternatives:
        now, after = ablation.together_rate, alternative.samples_per_second
        if after is None:
            continue
        gain = measured_gain(now, after)
        known = kept.pop(alternative.finding, None)
        if gain.likely < WORTHWHILE or gain.low <= 1.0:
            continue
        changes = describe_changes(alternative.changes)
        title, remedy = _WORDS[alternative.finding]
        tried = f"tried: {changes} gives {after.median:,.0f} samples/s instead of {now.median:,.0f}"
        kept[alternative.finding] = Finding(
            name=alternative.finding,
            title=known.title if known else title,
            evidence=(*(known.evidence if known else (alternative.reason,)), tried),
            remedy=remedy.format(changes=changes),
            gain=gain,
            samples_per_second=now.median,
            patch=Patch(config=alternative.changes),
        )
    return sorted(kept.values(), key=lambda item: (not item.ends_the_run, -item.gain.likely))


def measured_gain(now: Spread, after: Spread) -> Gain:
    """Return the speed-up (after / now), with a range from the quartiles of both."""
    return Gain(after.low / now.high, after.median / now.median, after.high / now.low)


_ROUNDS = 3


def consult_job(
    job: JobConfig,
    *,
    device: str | None = None,  # the first GPU by default, else the CPU
    steps: int | None = None,  # of every measurement; by default 60 on a GPU and 20 on a CPU
    seconds: float | None = None,  # time limit of every measurement; 4 by default
    progress: Progress | None = None,  # told what is being measured
) -> Consultation:
    """Measure a job from its config, try other settings, and return the findings."""
    with open_run(job.settings, device=device, progress=progress) as run:
        patience = default_patience(run.device, steps, seconds)
        measured = examine(run, patience, job.file)
        measured = try_alternatives(run, job, measured, patience)
    return Consultation(measured, tuple(weigh(measured, diagnose(measured))))


def choose_treatment(
    job: JobConfig, findings: Sequence[Finding]
) -> tuple[Finding, JobConfig] | None:
    """Return the first finding with a gain that a change of the config can bring, and the changed config."""
    for finding in findings:
        changes = job.deciding(finding.patch.config)
        if not changes or finding.gain.likely <= 1.0:
            continue
        note = f"stoker doctor, {finding.name}: {describe_changes(changes)}"
        try:
            return finding, job.with_changes(changes, [note])
        except ConfigError:
            continue  # the change is not allowed together with another key of this config
    return None


def treat_job(
    job: JobConfig,
    treated: JobConfig,
    finding: Finding,
    *,
    device: str | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Measure a job without and with the change, in turn."""
    changes = describe_changes(job.deciding(finding.patch.config))
    before: list[Timed] = []
    after: list[Timed] = []
    with open_run(job.settings, device=device, progress=progress) as run:
        patience = default_patience(run.device, steps, seconds)
        other = run.with_settings(treated.settings)
        for number in range(_ROUNDS):
            run.told.say(f"before and after, round {number + 1} of {_ROUNDS}")
            before.append(time_together(run, patience))
            after.append(time_together(other, patience))
    return Outcome(finding, changes, _rate(before), _rate(after))


def _rate(timed: Sequence[Timed]) -> float | None:
    """Return samples per second, the median over the rounds."""
    rates = [
        sum(lap.num_samples for lap in each.laps) / sum(lap.seconds for lap in each.laps)
        for each in timed
        if each.laps
    ]
    middle = Spread.of(rates)
    return None if middle is None else middle.median
