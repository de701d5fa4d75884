"""From measurements to findings: pure functions, one per finding, ranked by predicted gain.

Enters: `Measurements`. Leaves: a list of `Finding`s, the largest gain first; empty for a healthy job. Costs
microseconds. The rules are in `rules_*.py`; each is a function of a `Case` that returns a finding or None and does
not depend on other rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stoker.doctor import rules_loading, rules_run, rules_step, rules_workers
from stoker.doctor.cases import Case, Rule, at, blocked_share, busy_cores, rule_name
from stoker.doctor.findings import Finding
from stoker.doctor.gains import split_step
from stoker.doctor.measurements import Measurements
from stoker.measure.readings import Spread

RULES: tuple[Rule, ...] = (
    *rules_workers.RULES,
    *rules_loading.RULES,
    *rules_step.RULES,
    *rules_run.RULES,
)
_IDLE_CORES = 2.0
"""Cores that are idle before more workers are offered first."""
_MUCH_WAITING, _MUCH_QUEUEING, _SMALL_COST = 0.3, 0.1, 0.05
FINDING_NAMES = (
    *(rule_name(rule) for rule in RULES),
    "full-precision",  # no rule gives it: it is found only by trying it (consultation.py)
)


def diagnose(measurements: Measurements) -> list[Finding]:
    """Return the findings; an empty list if there is nothing to fix.

    Findings that end the run come first, then more workers if cores are idle, then the larger gain. The generic
    starved-by-loader is left out if another rule names the cause and no core is idle.
    """
    case = Case.of(measurements)
    found = [finding for rule in RULES if (finding := rule(case)) is not None]
    names = {finding.name for finding in found}
    first = _one_word_remedy(case)
    if names & rules_loading.NAMED_CAUSES and first != "starved-by-loader":
        found = [finding for finding in found if finding.name != "starved-by-loader"]
    return sorted(
        found,
        key=lambda finding: (not finding.ends_the_run, finding.name != first, -finding.gain.likely),
    )


def find_later(measurements: Measurements, findings: Sequence[Finding]) -> list[Finding]:
    """Return what would be found after the remedy of the first finding: costs that it hides now.

    Loading beside a step hides what the step wastes, and the other way round; a large cost makes a small one a small
    share. Gains count from the step without the first cost.
    """
    if not findings or findings[0].gain.likely <= 1.0 or measurements.kind != "script":
        return []
    rest = _without(measurements, findings[0].name)
    known = {finding.name for finding in findings}
    if rest is None:
        return []
    return [one for one in diagnose(rest) if one.name in _HIDDEN and one.name not in known]


_LOADING = rules_loading.NAMED_CAUSES | {"no-workers", "starved-by-loader"}
_HOST = {"gc-each-step": "gc.collect", "saves-too-often": "torch.save"}
_HIDDEN = _LOADING | set(_HOST) | {"sync-every-step", "slow-between-steps"}


def _without(measured: Measurements, name: str) -> Measurements | None:
    """Return the measurements as they would be without the cost of a finding; None if that cannot be told."""
    step, compute = measured.step_seconds, measured.compute_seconds
    if step is None or compute is None:
        return None
    if name in _LOADING:
        spent = max(0.0, step.median - compute.median)
        rest = replace(measured, wait_seconds=None, loader=None)
    elif name in _HOST:
        calls = [one for one in measured.host_calls if one.call == _HOST[name]]
        spent = sum(one.seconds_per_step for one in calls)
        others = tuple(one for one in measured.host_calls if one not in calls)
        rest = replace(measured, compute_seconds=_less(compute, spent), host_calls=others)
    elif name == "sync-every-step" and measured.machine.device == "cpu":
        spent = sum(one.seconds_per_step for one in measured.syncs)
        rest = replace(measured, compute_seconds=_less(compute, spent), syncs=())
    elif name == "slow-between-steps":
        spent = measured.between_seconds or 0.0
        rest = replace(measured, compute_seconds=_less(compute, spent), between_seconds=None)
    else:
        return None
    loader = rest.loader
    if loader is not None and loader.workers:
        return None  # what the workers did beside a longer step does not tell their pace beside a shorter one
    seconds = max(measured.seconds - spent * measured.steps, 1e-9)
    return replace(rest, step_seconds=_less(step, spent), seconds=seconds)


def _less(spread: Spread, seconds: float) -> Spread:
    # Medians of uneven steps do not add up: something is left of every step.
    low, median, high = (
        max(value - seconds, value / 10) for value in (spread.low, spread.median, spread.high)
    )
    return Spread(median, low, high, spread.count)


def _one_word_remedy(case: Case) -> str:
    """Return the finding to offer first because more workers, one argument, have idle cores to run on; else ""."""
    loader = case.measured.loader
    if loader is None or loader.kind != "torch" or loader.open_hdf5 or loader.is_stream:
        return ""
    busy = busy_cores(loader)
    if blocked_share(loader) >= 0.5:
        return ""  # the disk may not answer more of them at once
    if busy is None or case.cores - busy < _IDLE_CORES:
        return ""
    return "starved-by-loader" if loader.workers else "no-workers"


def why_unjudged(measurements: Measurements, findings: Sequence[Finding]) -> str:
    """Return why a job without findings is not called healthy; "" if it is, or if there are findings."""
    if findings or not measurements.steps:
        return ""
    if measurements.unjudged:
        return "; ".join(measurements.unjudged)
    share = measurements.wait_share or 0.0
    if share > _MUCH_WAITING:
        loader = measurements.loader
        busy = loader is not None and (loader.queued_share or 0.0) > _MUCH_QUEUEING
        why = (
            "other work keeps the cores busy"
            if busy
            else "no remedy is predicted to help by itself"
        )
        place = [
            f"a DataLoader{at(loader.where)} with num_workers={loader.workers}" if loader else None,
            f"most of it at {loader.busiest_line}" if loader and loader.busiest_line else None,
        ]
        told = ", ".join(filter(None, place))
        return (
            f"the step waits for data {share:.0%} of the time{f' ({told})' if told else ''}, and {why}; "
            "measure again on a quiet machine"
        )
    return _unknown_device(measurements) or _hidden_costs(measurements)


def _unknown_device(measurements: Measurements) -> str:
    """Return why waits for a GPU cannot be divided into its work and idling; "" if they can or are short."""
    if measurements.machine.device != "cuda" or measurements.kernels is not None:
        return ""
    waits = [one.seconds_per_step for one in measurements.syncs]
    waits += [one.seconds_per_step for one in measurements.copies]
    step = measurements.step_seconds
    share = sum(waits) / step.median if step else 0.0
    if share < _MUCH_WAITING:
        return ""
    return (
        f"{share:.0%} of a step the host waits for the GPU, and kernels were not measured, so it is unknown whether "
        "the GPU works meanwhile"
    )


def _hidden_costs(measurements: Measurements) -> str:
    """Return the costs of a step of which each hides the other, so that no remedy alone helps; "" if they are small."""
    parts = split_step(measurements)
    whole = sum(part.seconds for part in parts)
    on_gpu = measurements.machine.device == "cuda"  # there the host waits for the step's own work
    costs = [
        part
        for part in parts
        if part.kind in (("wait", "load") if on_gpu else ("wait", "load", "host"))
        and part.seconds > _SMALL_COST * whole
    ]
    share = sum(part.seconds for part in costs) / whole if whole else 0.0
    if len(costs) < 2 or share < _MUCH_WAITING:
        return ""
    listed = ", ".join(f"{part.label} {part.seconds / whole:.0%}" for part in costs)
    return f"of a step {listed}; no remedy for one of them alone is predicted to help"
