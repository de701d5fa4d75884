"""From measurements to findings: pure functions, one per finding, ranked by predicted gain.

Enters: `Measurements`. Leaves: a list of `Finding`s, the largest gain first; empty for a healthy job. Costs
microseconds. The rules are in `rules_*.py`; each is a function of a `Case` that returns a finding or None and does
not depend on other rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stoker.doctor import rules_loading, rules_run, rules_step, rules_workers
from stoker.doctor.cases import Case, Rule, at, rule_name
from stoker.doctor.findings import Consultation, Finding
from stoker.doctor.gains import gain_of_steps, hand_over_seconds, load_seconds, split_step, worth
from stoker.doctor.measurements import LoaderFacts, Measurements
from stoker.measure.readings import Spread

RULES: tuple[Rule, ...] = (
    *rules_workers.RULES,
    *rules_loading.RULES,
    *rules_step.RULES,
    *rules_run.RULES,
)
_IDLE_CORES = 2.0
"""More workers are the first remedy if at least this many cores are idle."""
_LEAST_LEFT = 0.02
"""Least share of a step that is assumed to remain without the cost of a finding."""
_MUCH_WAITING, _MUCH_QUEUEING, _SMALL_COST = 0.3, 0.1, 0.05
_DEVICE_WORKS = 0.95
"""A GPU that works for this share of the time is the limit, whatever the host waits for meanwhile."""
FINDING_NAMES = tuple(rule_name(rule) for rule in RULES)


def consult(measurements: Measurements) -> Consultation:
    """Return the findings, the costs that the first one hides, and why the speed cannot be judged if so."""
    found = diagnose(measurements)
    later = find_later(measurements, found)
    unjudged = why_unjudged(measurements, found)
    return Consultation(measurements, tuple(found), unjudged=unjudged, later=tuple(later))


def diagnose(measurements: Measurements) -> list[Finding]:
    """Return the findings; an empty list if there is nothing to fix.

    The order: findings that end the run; more workers, if cores are idle; the others by falling gain. The generic
    starved-by-loader is left out if another rule names the cause and fewer than two cores are idle.
    """
    found = _judge(measurements)
    if measurements.kind == "script" and all(one.gain.likely <= 1.0 for one in found):
        found += _entangled(measurements)
    return found


def _judge(measurements: Measurements) -> list[Finding]:
    """Return the findings of all rules, each predicted for its own remedy alone, in the order of `diagnose`."""
    case = Case(measurements)
    found = [finding for rule in RULES if (finding := rule(case)) is not None]
    names = {finding.name for finding in found}
    first = _one_word_remedy(case)
    if names & rules_loading.NAMED_CAUSES and first != "starved-by-loader":
        found = [finding for finding in found if finding.name != "starved-by-loader"]
    return sorted(
        found,
        key=lambda finding: (not finding.ends_the_run, finding.name != first, -finding.gain.likely),
    )


def _entangled(measurements: Measurements) -> list[Finding]:
    """Return a cost of the step that takes about as long as loading beside it, so that neither remedy helps alone.

    Each is found in the measurements without the other; `find_later` returns the second. Empty without such a pair.
    """
    step = measurements.step_seconds
    for name in (*_HOST, "sync-every-step", "slow-between-steps"):
        rest = _without(measurements, name)
        hidden = [one.name for one in _judge(rest) if one.name in _LOADING] if rest else []
        other = _without(measurements, hidden[0]) if hidden else None
        own = next((one for one in _judge(other) if one.name == name), None) if other else None
        if own is None or step is None or rest is None or rest.step_seconds is None:
            continue
        told = f"alone its remedy may bring nothing: the step then waits for data ({hidden[0]})"
        after = rest.step_seconds.median
        gain = gain_of_steps(step.median, step.median, (step.median + after) / 2, after)
        return [replace(own, evidence=(*own.evidence, told), gain=gain)]
    return []


def find_later(measurements: Measurements, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that would appear after the first finding's remedy: costs that it hides now.

    Loading in workers hides time that the step wastes, and the other way round; a large cost makes the share of a small
    one small. Gains are relative to the step without the first cost.
    """
    first = next((finding for finding in findings if finding.name in _HIDDEN), None)
    if first is None or measurements.kind != "script":
        return []
    rest = _without(measurements, first.name, first.gain.likely)
    known = {finding.name for finding in findings}
    if rest is None:
        return []
    return [one for one in _judge(rest) if one.name in _HIDDEN and one.name not in known]


_LOADING = rules_loading.NAMED_CAUSES | {"no-workers", "starved-by-loader"}
_HOST = {"gc-each-step": "gc.collect", "saves-too-often": "torch.save"}
_STEP = {"sync-every-step", "slow-between-steps", "double-precision", "launch-bound"}
_HIDDEN = _LOADING | set(_HOST) | _STEP


def _without(measured: Measurements, name: str, gain: float = 1.0) -> Measurements | None:
    """Return the measurements expected without the cost of the finding `name`; None if they are unknown."""
    step, compute = measured.step_seconds, measured.compute_seconds
    if step is None or compute is None:
        return None
    on_core: float | None = None
    if name in _LOADING:
        spent = max(0.0, step.median - compute.median)
        rest = replace(measured, wait_seconds=None, loader=None)
        return _shorter(rest, step, step.median - spent)
    if name in _HOST:
        calls = [one for one in measured.host_calls if one.call == _HOST[name]]
        spent = sum(one.seconds_per_step for one in calls)
        others = tuple(one for one in measured.host_calls if one not in calls)
        rest = replace(measured, host_calls=others)
    elif name == "sync-every-step":
        spent = on_core = sum(one.seconds_per_step for one in measured.syncs)
        if measured.kernels is not None:
            # Part of the wait was for the device's own work, which remains, but keeps no core busy any more.
            spent = min(spent, compute.median - measured.kernels.busy_share * step.median)
        rest = replace(measured, syncs=())
    elif name == "slow-between-steps":
        spent = measured.between_seconds or 0.0
        rest = replace(measured, between_seconds=None)
    elif name in _STEP:
        spent = step.median - step.median / gain
        rest = measured
    else:
        return None
    timed = (measured.backward_seconds, measured.optimizer_seconds)
    known = sum(spread.median for spread in timed if spread is not None)
    compute = _less(compute, spent, known)
    rest = replace(rest, compute_seconds=compute)
    if rest.loader is not None and rest.loader.workers:
        return _beside_workers(
            rest, step, compute, rest.loader, spent if on_core is None else on_core
        )
    return _shorter(rest, step, step.median - spent)


def _shorter(measured: Measurements, step: Spread, seconds: float) -> Measurements:
    """Return the measurements with a median step of `seconds` and the same work on the device."""
    after = _less(step, step.median - seconds)
    kernels = measured.kernels
    if kernels is not None:
        busy = min(1.0, kernels.busy_share * step.median / after.median)
        kernels = replace(kernels, busy_share=busy)
    whole = max(measured.seconds - (step.median - after.median) * measured.steps, 1e-9)
    return replace(measured, step_seconds=after, seconds=whole, kernels=kernels)


def _beside_workers(
    measured: Measurements, step: Spread, compute: Spread, loader: LoaderFacts, spent: float
) -> Measurements:
    """Return the measurements of a step that takes `compute` and keeps a core busy for `spent` seconds less.

    The time of a fetch was measured, so the workers' pace is known: the batches of a step every `load / workers`
    seconds, but no faster than the cores can do all work of a step. The rest of that time, the step waits.
    """
    load = load_seconds(loader)
    own = max(0.0, (loader.main_cpu_share or 0.0) * step.median - spent)
    cpu = own + load * (1 - (loader.blocked_share or 0.0))
    cores = worth(measured.machine.cores or 2, measured.machine)
    after = min(step.median, max(compute.median, load / loader.workers, cpu / cores))
    if after <= compute.median + hand_over_seconds(loader):
        return replace(_shorter(measured, step, compute.median), wait_seconds=None)
    wait = after - compute.median
    # The same work in less time: cores are busy for a larger share of it.
    times = step.median / after
    changed = replace(
        loader,
        main_cpu_share=own / after,
        worker_cpu_shares=tuple(min(1.0, share * times) for share in loader.worker_cpu_shares),
        queued_share=None,
        crowding_share=None,
    )
    rest = replace(measured, wait_seconds=Spread(wait, wait, wait, compute.count), loader=changed)
    return _shorter(rest, step, after)


def _less(spread: Spread, seconds: float, least: float = 0.0) -> Spread:
    # Medians of uneven steps do not add up, so a small share of every step is kept.
    low, median, high = (
        max(value - seconds, least, _LEAST_LEFT * value)
        for value in (spread.low, spread.median, spread.high)
    )
    return Spread(median, low, high, spread.count)


def _one_word_remedy(case: Case) -> str:
    """Return the finding about more workers if idle cores make it the first remedy to offer; else ""."""
    loader = case.measured.loader
    if loader is None or loader.kind != "torch" or loader.open_hdf5 or loader.is_stream:
        return ""
    busy = loader.busy_cores
    if (loader.blocked_share or 0.0) >= 0.5:
        return ""  # the disk may not answer more of them at once
    if busy is None or case.cores - busy < _IDLE_CORES:
        return ""
    return "starved-by-loader" if loader.workers else "no-workers"


def why_unjudged(measurements: Measurements, findings: Sequence[Finding]) -> str:
    """Return why the speed of a job cannot be judged; "" if it can, or if a finding predicts a gain."""
    if any(one.gain.likely > 1.0 for one in findings) or not measurements.steps:
        return ""
    if measurements.unjudged:
        return "; ".join(measurements.unjudged)
    share, kernels = measurements.wait_share or 0.0, measurements.kernels
    working = kernels.busy_share if kernels is not None else 0.0
    if share > _MUCH_WAITING and working < _DEVICE_WORKS:
        loader = measurements.loader
        busy = loader is not None and (loader.queued_share or 0.0) > _MUCH_QUEUEING
        alone = "no remedy is predicted to help by itself"
        why = "other work keeps the cores busy" if busy else alone
        place = [
            f"a DataLoader{at(loader.where)} with num_workers={loader.workers}" if loader else None,
            f"most of it at {loader.busiest_line}" if loader and loader.busiest_line else None,
        ]
        told = ", ".join(filter(None, place))
        then = "measure again on a quiet machine"
        if working and not busy:
            then = f"the GPU works {working:.0%} of the time, so that at most × {1 / working:.2f} is to be had"
        return f"the step waits for data {share:.0%} of the time{f' ({told})' if told else ''}, and {why}; {then}"
    return (
        _unknown_device(measurements)
        or rules_run.why_doubtful(Case(measurements))
        or _hidden_costs(measurements)
    )


def _unknown_device(measurements: Measurements) -> str:
    """Return why it is unknown if the GPU works while the host waits for it; "" if known, or if waits are short."""
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
    """Return the costs of a step that hide each other, so that no single remedy helps; "" if they are small."""
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
