"""A stoker job before the doctor: measured, judged, and on request treated and measured again.

Enters: a config. Leaves: a `Consultation`, and after a treatment an `Outcome`: before, predicted and after,
in samples per second. Costs the measurements; a treatment measures the job both ways in turn, so that a
machine that drifts slows both.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.doctor.ablation import default_patience, examine
from stoker.doctor.alternatives import try_alternatives, weigh
from stoker.doctor.findings import Finding
from stoker.doctor.job_config import JobConfig
from stoker.doctor.rules import diagnose
from stoker.doctor.verdict import Consultation, Outcome, describe_changes
from stoker.errors import ConfigError
from stoker.measure.jobs import Timed, time_together
from stoker.measure.readings import Spread
from stoker.recipes.run import open_run
from stoker.report import Progress

_ROUNDS = 3


def consult_job(
    job: JobConfig,
    *,
    device: str | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Consultation:
    """Measure a job from its config, try what might help, and judge.

    Args:
        job: The config.
        device: The first GPU by default, else the CPU.
        steps: Of every measurement; 60 on a GPU and 20 on a CPU by default.
        seconds: After which a measurement has enough with fewer; 4 by default.
        progress: Told what is being measured.
    """
    with open_run(job.settings, device=device, progress=progress) as run:
        patience = default_patience(run.device, steps, seconds)
        measured = examine(run, patience, job.file)
        measured = try_alternatives(run, job, measured, patience)
    return Consultation(measured, tuple(weigh(measured, diagnose(measured))))


def choose_treatment(
    job: JobConfig, findings: Sequence[Finding]
) -> tuple[Finding, JobConfig] | None:
    """Return the first finding that a change of the config makes faster, and the changed config."""
    for finding in findings:
        changes = job.deciding(finding.patch.config)
        if not changes or finding.gain.likely <= 1.0:
            continue
        note = f"stoker doctor, {finding.name}: {describe_changes(changes)}"
        try:
            return finding, job.with_changes(changes, [note])
        except ConfigError:
            continue  # a key that another one of this config rules out
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
    """Measure a job as it was and as it is now, in turn."""
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
    """Return the middle of the rounds: whole time over all samples, as samples per second are felt."""
    rates = [
        sum(lap.num_samples for lap in each.laps) / sum(lap.seconds for lap in each.laps)
        for each in timed
        if each.laps
    ]
    middle = Spread.of(rates)
    return None if middle is None else middle.median
