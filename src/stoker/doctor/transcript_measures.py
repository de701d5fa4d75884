"""Turns the probe's records into measurements.

Enters: the processes of a script. Leaves: `Measurements` of the process that trains, with those of its workers and
of the other ranks. Costs nothing; pure.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.doctor.measurements import (
    NOTABLE_BETWEEN,
    OPERATOR_SECONDS,
    AllocatorFacts,
    BadValues,
    DeviceCopy,
    HostCall,
    KernelFacts,
    LongSteps,
    MachineFacts,
    Measurements,
    MemoryFacts,
    OperatorFacts,
    RankFacts,
    TimelineSpan,
    WorkerStarts,
)
from stoker.doctor.probe.places import is_foreign
from stoker.doctor.probe.recorder import WARM_UP, Row
from stoker.doctor.transcript import (
    Elsewhere,
    Process,
    Training,
    computing,
    epoch_starts,
    find_elsewhere,
    is_made_again,
    main_process,
    read_hdf5,
    read_loader,
    running,
    seconds_of_look,
    undisturbed,
)
from stoker.doctor.transcript_uses import find_uses
from stoker.measure.readings import Spread
from stoker.units import format_count

_NOTABLE_SHARE = 0.1
_NOTABLE_STARTS = 0.02
_NOTABLE_QUEUEING, _MUCH_QUEUEING = 0.2, 0.6
_MOST_UNEXPLAINED = 2.0
"""Beside other programs, a step may compute for this many times the time that its operators explain."""
_UNEVEN = 3.0
"""Beside other programs, steps are too uneven to judge if their upper quartile is this many times the lower one."""
_TIMING_SECONDS = 4e-6
"""Most time that timing one call usually costs; in a loop of thousands it was 5."""
_LEAST_SYNC = 0.5
"""Least share of the measured seconds of syncs that counts as theirs, whatever the timing costs."""
_AHEAD = 0.9
"""A step shorter than this share of its kernels' time ends before its kernels do."""
_SHORT_STEP_SECONDS = 1e-3
"""The profiler makes steps below this notably longer as a whole."""
_LOOSE = 1.2
"""The sampled time between passes may exceed that of the few profiled steps by this factor."""
_NOTABLE_UPDATE = 0.3
"""A note reports an update on a CPU that is not fused from this share of a step."""
_FUSED_ON_CPU = (2, 5)
"""The first version of torch with fused Adam, AdamW, SGD and Adagrad on a CPU."""
_FEW_STEPS = 10
"""With fewer steps, every figure is rough."""
_FEWEST_BESIDE = 3
"""Beside other programs, fewer steps than these are not judged."""
_FEW_LOOKS = 20
"""With fewer samples of the training thread, no shares of a step are given."""


def measure(
    processes: Sequence[Process],
    subject: str,
    machine: MachineFacts,
    ending: str = "",
) -> Measurements:
    """Return the measurements of a script; `ending` describes how it ended, such as "it finished"."""
    main = main_process(processes)
    if main is None:
        why = _why_no_step(processes, ending)
        return Measurements(subject, machine=machine, notes=(why,))
    seen = Training(main, processes)
    state, rows, plain = seen.state, seen.rows, seen.plain
    torch, profile = state["torch"], state["profile"]
    elsewhere = find_elsewhere(main, rows, seen.number)
    usual = _usual_step(seen)
    step = usual.step
    between, between_seconds, unjudged = _between(state, step, usual.known)
    uses = find_uses(state, step, usual.known)
    samples = sum(row.samples for row in rows)
    sampled, cpu = state.get("training", {}), state["cpu"]
    backward = Spread.of(row.backward * undisturbed(row) for row in plain if row.backward)
    optimizer = Spread.of(row.optimizer * undisturbed(row) for row in plain if row.optimizer)
    return Measurements(
        subject,
        machine=replace(
            machine,
            device="cuda" if torch.get("cuda") else "cpu",
            device_name=torch.get("cuda") or machine.device_name,
            torch=torch.get("version"),
            device_free_bytes=torch.get("free_bytes"),
            pinned_bytes_per_second=profile.get("pinned_bytes_per_second"),
        ),
        steps=len(rows),
        seconds=usual.seconds,
        samples_per_step=samples / len(rows) if rows and samples else None,
        step_seconds=step,
        wait_seconds=usual.wait,
        compute_seconds=Spread.of(map(computing, plain)),
        backward_seconds=backward,
        optimizer_seconds=optimizer,
        loader=read_loader(seen),
        syncs=usual.calls(state, "sync"),
        copies=_copies(state, usual),
        kernels=_kernels(profile, step),
        operators=_operators(profile),
        allocator=_allocator(state, usual),
        memory=_memory(main),
        host_calls=usual.calls(state, "host"),
        between=between,
        between_seconds=between_seconds,
        between_loads=sampled.get("data", 0) > sampled.get("between", 0),
        evaluation_seconds=0.0 if uses.needs_evaluation else usual.evaluated,
        evaluation_device_seconds=_evaluation_device(profile, usual),
        evaluation_where=next((s["where"] for s in _costliest(state, "evaluation")), None),
        unused_calls=uses.unused,
        unused_device_seconds=uses.unused_device_seconds,
        doubtful_calls=uses.doubtful,
        doubtful_device_seconds=uses.doubtful_device_seconds,
        long_steps=_long_steps(state, elsewhere),
        python_seconds=_python(seen, usual),
        python_lines=tuple(state.get("model_lines", ())),
        busy_cores=cpu[0] / cpu[1] if cpu and cpu[1] > 0 else None,
        hdf5=read_hdf5(seen),
        ranks=_ranks(processes),
        bad_values=tuple(
            BadValues(what, where, count, looks)
            for what, (count, looks, where) in state["bad"].items()
            if count
        ),
        captured=True if state["kind"] == "replay" else None,
        elsewhere_share=elsewhere.share,
        worker_starts=_worker_starts(seen, elsewhere),
        timeline=_timeline(seen),
        unjudged=tuple(_why_unjudged(seen, step, unjudged)),
        notes=(
            *_notes(seen),
            *_notes_elsewhere(seen, elsewhere),
            *(
                ["the host runs ahead of the GPU: a step is the time of its kernels"]
                * usual.is_ahead
            ),
            *_notes_between(between, between_seconds, step),
            *_notes_update(torch, plain, step),
        ),
    )


# -- a usual step ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Usual:
    """A usual step, and the factors that turn totals of timed calls into their part of a step."""

    step: Spread | None  # seconds
    wait: Spread | None  # seconds of waiting for data
    seconds: float  # of all counted steps together
    is_ahead: bool  # whether the host runs ahead of the GPU
    evaluated: float  # seconds from `model.eval()` to `model.train()`
    known: float  # seconds of waiting for data and in calls that are timed
    count_factors: Mapping[str, float]  # for numbers of calls, by family of calls
    second_factors: Mapping[str, float]  # for their seconds

    def calls(self, state: Mapping[str, Any], family: str) -> tuple[HostCall, ...]:
        """Return the calls of a family by line, the costliest first."""
        count, second = self.count_factors[family], self.second_factors[family]
        return tuple(
            HostCall(
                site["where"],
                site["call"],
                site["calls"] * count,
                site["seconds"] * second,
                site.get("in_model", False),
                site.get("library", ""),
            )
            for site in _costliest(state, family)
        )


def _usual_step(seen: Training) -> _Usual:
    """Return the time of a usual step, and the parts of it that were timed."""
    state, plain, clock = seen.state, seen.plain, seen.clock
    step, slowed = seen.spread(plain, clock.seconds), seen.spread(seen.watched, clock.seconds)
    # A host that never waits for the GPU runs ahead of it: then the GPU's time is the step's.
    busy = state["profile"].get("busy_seconds", 0.0) / max(1, state["profile"].get("steps", 1))
    is_ahead = step is not None and step.median < _AHEAD * busy
    if step is not None and is_ahead:
        step = Spread(busy, max(busy, step.low), max(busy, step.high), step.count)
    wait = seen.spread(plain, clock.wait) if seen.loader else None
    # Steps in which calls were timed are longer by the cost of timing, which is subtracted.
    cost = max(0.0, slowed.median - step.median) if slowed and step and plain != seen.rows else 0.0
    seconds = max(0.0, sum(map(clock.seconds, seen.rows)) - cost * len(seen.watched))
    if is_ahead:
        seconds = max(seconds, busy * len(seen.rows))
    # There are too many syncs to read the scheduler's clock at each: assume that they queue like the rest of the step.
    on_core = statistics.median(map(running, seen.rows)) if seen.rows else 1.0
    watched, every = 1.0 / seen.num_watched, 1.0 / max(1, state["num_steps"])
    copied, host = watched * on_core, _usual_host(seen)
    sync = _usual_sync(seen, copied, slowed, step)
    factors = {"sync": sync, "copy": copied, "pinned": copied, "host": host}
    evaluated = timed = 0.0
    if plain:
        evaluated = statistics.median(row.evaluation * undisturbed(row) for row in plain)
        timed = statistics.median(row.backward * undisturbed(row) + row.collective for row in plain)
    known = (wait.median if wait else 0.0) + evaluated + timed
    known += sum(site["seconds"] * factors.get(site["family"], 0.0) for site in state["sites"])
    return _Usual(
        step,
        wait,
        seconds,
        is_ahead,
        evaluated,
        known,
        {"sync": watched, "copy": watched, "pinned": watched, "host": every, "empty": every},
        {**factors, "empty": host},
    )


def _costliest(state: Mapping[str, Any], family: str) -> list[dict[str, Any]]:
    """Return the sites of one family by line, the costliest first."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for site in state["sites"]:
        if site["family"] == family:
            known = merged.setdefault(
                (site["where"], site["call"]), {**site, "calls": 0, "seconds": 0.0, "bytes": 0}
            )
            for name in ("calls", "seconds", "bytes"):
                known[name] += site[name]
    return sorted(merged.values(), key=lambda site: -site["seconds"])[:20]


def _usual_sync(
    seen: Training,
    otherwise: float,  # the factor to return if most steps have no sync
    slowed: Spread | None,  # seconds of steps in which calls were timed
    step: Spread | None,  # seconds of a usual step
) -> float:
    """Return the factor that turns the seconds of all syncs into those of a usual step.

    In a loop of thousands of calls, timing a call takes longer than the call. So the seconds of syncs are those of a
    step without timing, less the other time of a step with timing.
    """
    sites = [site for site in seen.state["sites"] if site["family"] == "sync"]
    whole = float(sum(site["seconds"] for site in sites))
    # A share of the time without queueing for a core, which does not count for calls on a CPU.
    shares = [row.sync / max(row.seconds - row.delay, 1e-9) for row in seen.watched]
    share = min(1.0, statistics.median(shares)) if shares else 0.0
    if share <= 0 or whole <= 0 or slowed is None or step is None:
        return otherwise
    timed = share * slowed.median
    calls = float(sum(site["calls"] for site in sites)) / seen.num_watched
    least = max(timed - calls * _TIMING_SECONDS, _LEAST_SYNC * share * step.median)
    # On a busy machine timing takes longer, but calls never take longer than what is left of their step.
    most = step.median
    if not seen.state["torch"].get("cuda"):  # a GPU keeps the host waiting, on a core or not
        most = min(most, _own_seconds(seen))
    return min(timed, most, max(step.median - slowed.median + timed, least)) / whole


def _own_seconds(seen: Training) -> float:
    """Return the seconds of a usual step on a core that loading, the backward pass and the optimizer leave."""
    fetches = [] if seen.num_workers else [one for own in seen.loading for one in own.fetches]
    loaded = sum(one.seconds - one.delay for one in fetches)
    on_core = sum(one.cpu for one in fetches) / loaded if loaded > 0 else 0.0
    spent = (
        row.cpu
        - (row.backward + row.optimizer) * undisturbed(row)
        - (row.wait - row.wait_delay) * on_core
        for row in seen.plain
    )
    return max(0.0, statistics.median(spent))


def _usual_host(seen: Training) -> float:
    """Return the factor that turns the seconds of all housekeeping into those of a step.

    If most steps have housekeeping, its seconds are the difference that it makes to the median step: the mean would
    include the first steps, in which less garbage is collected. Otherwise they are the mean.
    """
    state, rows, clock = seen.state, seen.plain, seen.clock
    told = (site["seconds"] for site in state["sites"] if site["family"] in ("host", "empty"))
    whole = float(sum(told))
    if whole > 0 and rows and statistics.median(row.host for row in rows) > 0:
        step = statistics.median(map(clock.seconds, rows))
        without = statistics.median(max(0.0, clock.seconds(row) - row.host) for row in rows)
        if step > without:
            return (step - without) / whole
    return 1.0 / max(1, int(state["num_steps"]))


# -- parts of it -----------------------------------------------------------------------------------


def _between(
    state: Mapping[str, Any], step: Spread | None, known: float
) -> tuple[tuple[HostCall, ...], float | None, list[str]]:
    """Return lines between model calls, their seconds per step, and why they cannot be judged.

    The training thread was sampled while no DataLoader was working. Timed calls are known exactly, and calls that hold
    Python's lock, such as `gc.collect`, are never sampled: so samples divide the rest of the step. `known` are the
    seconds of a step spent waiting for data and in timed calls.
    """
    doing = state.get("training", {})
    looks = sum(doing.values())
    if step is None or state["kind"] == "batch":
        return (), None, []
    if looks < _FEW_LOOKS:
        few = f"the training thread was sampled {looks} times only: let it run for more steps"
        return (), None, [] if state["loaders"] else [few]
    loops, inside, seconds = seconds_of_look(state, step, known)
    lines = tuple(
        HostCall(where, "between", 0.0, count * seconds)
        for where, count in sorted(state["between"].items(), key=lambda item: -item[1])[:20]
        if where not in loops
    )
    between, data = max(0, doing.get("between", 0) - inside), doing.get("data", 0)
    gap = state["profile"].get("gap_seconds")
    if gap is not None:
        if step.median < _SHORT_STEP_SECONDS:  # the profiler makes calls of Python longer, too
            gap *= min(1.0, step.median / max(state["profile"].get("gap_step_seconds", 0.0), 1e-9))
        # A loss that is computed line by line is sampled in the user's code as loading is, but belongs to the model.
        return lines, data * seconds + min(between * seconds, _LOOSE * gap), []
    if doing.get("model") or state.get("modules") or state["kind"] == "replay" or state["loaders"]:
        return lines, (between + data) * seconds, []
    # Without a module the forward pass looks like any other code of the script; only loading is known by its names.
    if data >= _NOTABLE_QUEUEING * looks:
        return lines, data * seconds, []
    told = "no nn.Module was seen to work, so the forward pass cannot be told from loading"
    return lines, None, [f"{told}; most of the time went to {lines[0].where}" if lines else told]


def _python(seen: Training, usual: _Usual) -> float:
    """Return the seconds of a step in which the forward pass runs Python code and no operator.

    The smallest of three upper bounds: samples in a module's code may be in operators that it calls, the few profiled
    steps may be unusual, and a waiting thread runs no code. So the third is the time on a core that loading, fetches,
    the backward pass and the optimizer leave.
    """
    state, step = seen.state, usual.step
    looks = int(sum(count for kind, count in state.get("training", {}).items() if kind != "timed"))
    profiled = float(state["profile"].get("python_seconds", 0.0))
    if step is None or looks < _FEW_LOOKS or not seen.plain:
        return 0.0
    inside = int(sum(state.get("model_lines", {}).values()))
    ran = _own_seconds(seen)
    if not state["torch"].get("cuda"):  # on a GPU a fetch waits for kernels, on a core or not
        syncs = usual.calls(state, "sync")
        ran -= sum(sync.seconds_per_step for sync in syncs if not sync.in_model)
    shared = (step.median - usual.known) * min(1.0, inside / looks)
    return float(max(0.0, min(profiled, shared, ran)))


def _long_steps(state: Mapping[str, Any], elsewhere: Elsewhere) -> LongSteps | None:
    """Return the facts of a few long steps; None if their extra time is small."""
    doing = state.get("late", {})
    looks = sum(doing.values())
    share = elsewhere.long / max(elsewhere.counted, 1e-9)
    if share < _NOTABLE_SHARE or not looks:
        return None
    lines = sorted(state["late_lines"].items(), key=lambda item: -item[1])
    return LongSteps(
        count=elsewhere.num_long,
        seconds=elsewhere.long,
        share=share,
        outside_share=(doing.get("between", 0) + doing.get("data", 0)) / looks,
        lines=tuple((where, count / looks) for where, count in lines[:5]),
    )


def _worker_starts(seen: Training, elsewhere: Elsewhere) -> tuple[WorkerStarts, ...]:
    """Return the starts of other DataLoaders' workers that take a notable part of the time, the costliest first."""
    found = []
    for facts in seen.state["loaders"]:
        again = is_made_again(facts)
        if facts["number"] == seen.number or (facts["persistent_workers"] and not again):
            continue
        fetches = [
            fetch.seconds - fetch.delay
            for one in seen.processes
            if one.state["role"] == "worker" and one.state["loader_id"] == facts["number"]
            for fetch in one.fetches
        ]
        # The first batch has to be loaded however long its worker lives.
        count, seconds = epoch_starts(facts, statistics.median(fetches) if fetches else 0.0)
        if count < 2 or not facts["workers"] or not fetches or not seconds:
            continue
        share = min(1.0, count * seconds / max(elsewhere.whole, 1e-9))
        if share >= _NOTABLE_STARTS:
            starts = (facts["where"], facts["workers"], count, seconds, share, again)
            found.append(WorkerStarts(*starts))
    return tuple(sorted(found, key=lambda one: -one.share)[:5])


def _copies(state: Mapping[str, Any], usual: _Usual) -> tuple[DeviceCopy, ...]:
    """Return the copies to the device by line of code, the costliest first."""
    count, second = usual.count_factors["copy"], usual.second_factors["copy"]
    found = (
        DeviceCopy(
            site["where"],
            site["bytes"] * count,
            site["seconds"] * second,
            site["calls"] * count,
            pinned=family == "pinned",
        )
        for family in ("copy", "pinned")
        for site in _costliest(state, family)
    )
    return tuple(sorted(found, key=lambda copy: -copy.seconds_per_step))


def _memory(main: Process) -> MemoryFacts:
    """Return the growth of memory; 0 on the host if most of it is free memory that malloc keeps.

    A program that frees all that it takes still grows by tens of MB if pieces of a MB do not fit into the gaps.
    """
    rows = main.rows
    found = MemoryFacts.of([row.device_bytes for row in rows], [row.host_bytes for row in rows])
    before, after = main.state.get("heap_free") or (0, 0)
    grown = (found.host_bytes_per_step or 0.0) * len(rows)
    return replace(found, host_bytes_per_step=0.0) if 0 < grown < 2 * (after - before) else found


def _allocator(state: Mapping[str, Any], usual: _Usual) -> AllocatorFacts:
    now, first = state["torch"], state["first_torch"]
    num_steps = max(1, int(state["num_steps"]) - WARM_UP)
    retries, allocs = (
        float(now[name] - first.get(name, 0)) / num_steps if name in now else None
        for name in ("retries", "device_allocs")
    )
    return AllocatorFacts(retries, allocs, usual.calls(state, "empty"))


def _kernels(profile: Mapping[str, Any], step: Spread | None) -> KernelFacts | None:
    if not profile.get("kernels") or step is None or step.median <= 0:
        return None
    # The profiler slows the host but not the kernels, so their time is compared with a usual step.
    busy = profile["busy_seconds"] / profile["steps"]
    return KernelFacts(
        per_step=profile["kernels"] / profile["steps"],
        mean_seconds=profile["kernel_seconds"] / profile["kernels"],
        busy_share=min(1.0, busy / step.median),
    )


def _evaluation_device(profile: Mapping[str, Any], usual: _Usual) -> float:
    """Return the part of a usual step in which the device computes what is launched between `eval()` and `train()`."""
    if not usual.evaluated:
        return 0.0
    return float(profile.get("evaluation_busy_seconds", 0.0) / max(1, profile.get("steps", 1)))


def _operators(profile: Mapping[str, Any]) -> OperatorFacts | None:
    if not profile.get("operators"):
        return None
    double, products = profile["double_seconds"], profile.get("double_product_seconds")
    steps = max(1, profile.get("steps", 1))
    if "double_kernel_seconds" in profile:
        double = profile["double_kernel_seconds"] / steps
    return OperatorFacts(
        per_step=profile["operators"],
        work_seconds=profile["work_seconds"] + profile["update_seconds"],
        weight_seconds=profile["update_seconds"],
        double_seconds=double,
        matmul_seconds=profile["matmul_seconds"],
        num_rows=profile.get("rows") or None,
        double_product_seconds=None if products is None else products / steps,
        double_times=profile.get("double_times"),
        single_product_seconds=profile.get("single_product_seconds", 0.0) / steps,
        single_times=profile.get("single_times"),
    )


def _ranks(processes: Sequence[Process]) -> tuple[RankFacts, ...]:
    """Return the part of a step in which each rank does not wait for the others.

    The time in `backward` and in collectives is the rank's own work plus waiting. The rank that waits least shows
    how much of it is work.
    """
    found: dict[int, tuple[float, float]] = {}
    for one in processes:
        if one.rank is None or one.state["role"] == "worker":
            continue
        seen = Training(one, processes)
        if seen.rows:
            shared = statistics.median(row.backward + row.collective for row in seen.rows)
            found[one.rank] = (statistics.median(map(seen.clock.seconds, seen.rows)), shared)
    if len(found) < 2:
        return ()
    least = min(shared for _, shared in found.values())
    return tuple(
        RankFacts(rank, step, max(0.0, step - shared + least))
        for rank, (step, shared) in sorted(found.items())
    )


# -- what is said ----------------------------------------------------------------------------------


def _why_no_step(processes: Sequence[Process], ending: str) -> str:
    """Return why nothing was measured: how the script ended, and the line at which it was blocked until then."""
    standing = [
        place
        for one in processes
        if one.state.get("role") != "worker" and (place := one.state.get("stands"))
    ]
    # The user's code first: a launcher waits in a library, the process that it launched in the user's code.
    standing.sort(key=lambda place: is_foreign(place.rpartition(":")[0]))
    if standing:
        return f"no step was seen: {ending or 'it ended'}, and until then it stood at {standing[0]}"
    when = "without a step" if ending == "it finished" else "before its first step"
    return (
        "no Python process of the script was seen to train with torch: "
        f"{ending or 'it ended'} {when}"
    )


def _notes_elsewhere(seen: Training, elsewhere: Elsewhere) -> list[str]:
    """Return notes about time that is in no other figure; none if it is little."""
    state, whole = seen.state, max(elsewhere.whole, 1e-9)
    notes = []
    if elsewhere.loaders / whole >= _NOTABLE_SHARE:
        others = [one for one in state["loaders"] if one["number"] != seen.number and one["where"]]
        others.sort(key=lambda one: -one.get("batches", 0))
        places = ", ".join(dict.fromkeys(one["where"] for one in others[:3]))
        notes.append(
            f"{elsewhere.loaders / whole:.0%} of the time since the first step went to another DataLoader, "
            f"such as one for validation{f' ({places})' if places else ''}; it is not in these figures"
        )
    if elsewhere.evaluation / whole >= _NOTABLE_SHARE:
        places = ", ".join(site["where"] for site in _costliest(state, "evaluation")[:3])
        notes.append(
            f"{elsewhere.evaluation / whole:.0%} of the time since the first step was evaluation, from model.eval() "
            f"at {places} to model.train(); it is not in these figures"
        )
    long = _long_steps(state, elsewhere)
    if long is not None:
        listed = ", ".join(
            f"{where} ({share:.0%})" for where, share in long.lines[:3] if share >= _NOTABLE_SHARE
        )
        place = f"mostly at {listed}" if listed else "at no line of your own"
        notes.append(
            f"{long.share:.0%} of the time of all steps is what {format_count(long.count, 'step')} "
            f"took longer than the others, {long.seconds / long.count * 1e3:.3g} ms each, {place}"
        )
    if elsewhere.after / whole >= _NOTABLE_SHARE and not state["stands"]:
        notes.append(
            f"{elsewhere.after / whole:.0%} of the time since the first step came after the last one; "
            "it is not in these figures"
        )
    return notes


def _notes(seen: Training) -> list[str]:
    state, rows, clock = seen.state, seen.rows, seen.clock
    notes = list(state["notes"])
    if state["kind"] == "batch":
        notes.append("no optimizer step and no backward pass was seen: a step is one batch")
    elif state["kind"] == "backward":
        notes.append("no optimizer step was seen: a step is one backward pass")
    if 0 < len(rows) < _FEW_STEPS:
        told = "one step was" if len(rows) == 1 else f"{len(rows)} steps were"
        notes.append(f"only {told} measured: every figure is rough")
    queued = _queued_outside(seen)
    if queued > _NOTABLE_QUEUEING:
        notes.append(
            f"other work on this machine took the cores: {queued:.0%} of a step was spent "
            "queueing for one and is left out of the figures"
        )
        threads = state["torch"].get("threads", 1)
        if threads > 1 and not state["torch"].get("cuda"):
            notes.append(
                f"torch computes with {threads} threads, and all of them wait for one that has no core: beside other "
                "work a single one may be several times as fast (export OMP_NUM_THREADS=1)"
            )
    crowding = sum(map(clock.crowding, rows)) / max(1e-9, sum(map(clock.seconds, rows)))
    if crowding > _NOTABLE_QUEUEING:
        notes.append(
            f"the workers took the cores from the training: {crowding:.0%} of a step was spent queueing for one "
            "behind them, and counts as waiting for data"
        )
    if not state["loaders"]:
        notes.append(
            "no DataLoader was used: time between the model's calls was measured by sampling the training thread"
            if state.get("training")
            else "no DataLoader was used, and no sample of the training thread was taken: waiting was not measured"
        )
    if "skipped" in state["profile"]:
        notes.append(f"operators and kernels were not measured: {state['profile']['skipped']}")
    if state["stands"]:
        notes.append(f"at the end the script had been standing at {state['stands']} for a while")
    others = [
        one
        for one in seen.processes
        if one is not seen.main and one.rank is None and one.rows and one.state["role"] != "worker"
    ]
    if others:
        notes.append(
            f"{len(others)} other processes of the script trained too; this is the longest"
        )
    return notes


def _queued_outside(seen: Training) -> float:
    """Return the share of the steps in which the training queued for a core behind other programs."""
    queued = sum(row.delay for row in seen.rows)
    return queued / max(1e-9, sum(row.seconds for row in seen.rows)) * seen.clock.outside


def _notes_between(
    lines: Sequence[HostCall], seconds: float | None, step: Spread | None
) -> list[str]:
    """Return a note on code between the model's calls that takes too little of a step for a finding."""
    share = seconds / step.median if lines and seconds and step else 0.0
    if not NOTABLE_BETWEEN / 2 <= share < NOTABLE_BETWEEN:
        return []
    told = f"{share:.0%} of a step is code between the model's calls, mostly at {lines[0].where}; below "
    most = f"without it a step would be × {1 / (1 - share):.2f} as fast at most"
    return [f"{told}{NOTABLE_BETWEEN:.0%} that is no finding: {most}"]


def _why_unjudged(seen: Training, step: Spread | None, unjudged: list[str]) -> list[str]:
    """Return why the steps cannot be judged: too few steps, other programs, or the given reasons (`unjudged`)."""
    profile = seen.state["profile"]
    if not seen.rows:
        return ["too few training steps ended to measure one: let it run for longer (--seconds)"]
    if len(seen.rows) < _FEW_STEPS and not profile.get("operators"):
        unjudged.append(
            f"{len(seen.rows)} steps were measured and none of their operators: let it run for longer (--seconds)"
        )
    queued = _queued_outside(seen)
    if queued > _MUCH_QUEUEING:
        unjudged.append("other work on this machine had the cores most of the time")
    elif queued > _NOTABLE_QUEUEING and step is not None and step.high > _UNEVEN * step.low:
        unjudged.append(
            f"other work took the cores, and steps took {step.low * 1e3:.3g} to {step.high * 1e3:.3g} ms; measure "
            "again on a quiet machine"
        )
    elif queued > _NOTABLE_QUEUEING and len(seen.rows) < _FEWEST_BESIDE:
        told = f"{format_count(len(seen.rows), 'step')} cannot tell how unevenly"
        unjudged.append(f"other work took the cores, {told}: let it run for longer (--seconds)")
    elif queued > _NOTABLE_QUEUEING and not seen.state["torch"].get("cuda"):
        unjudged += _unexplained(profile, Spread.of(map(computing, seen.plain)))
    return unjudged


def _unexplained(profile: Mapping[str, Any], computes: Spread | None) -> list[str]:
    """Return the reason if, beside other programs, a step computes for much longer than its operators explain.

    An operator takes longer with cold caches, and while its other threads have no core. Empty if times agree.
    """
    operators = _operators(profile)
    if operators is None or computes is None:
        return []
    explained = operators.work_seconds + operators.per_step * OPERATOR_SECONDS
    if computes.median < _MOST_UNEXPLAINED * explained:
        return []
    told = f"a step computes for {computes.median * 1e3:.3g} ms, and its operators explain {explained * 1e3:.3g} ms"
    return [f"other work took the cores: {told}; measure again on a quiet machine"]


def _notes_update(torch: Mapping[str, Any], rows: Sequence[Row], step: Spread | None) -> list[str]:
    """Return a note if, on a CPU, an update that is not fused takes a large share of a step."""
    name, fused = torch.get("optimizer") or ("", True)
    version = tuple(map(int, re.findall(r"\d+", torch.get("version") or "0")[:2]))
    if fused or torch.get("cuda") or step is None or version < _FUSED_ON_CPU or not rows:
        return []
    share = statistics.median(row.optimizer * undisturbed(row) for row in rows) / step.median
    if share < _NOTABLE_UPDATE:
        return []
    told = f"{share:.0%} of a step is the optimizer's update: `{name}(..., fused=True)` makes one pass over a tensor "
    most = f"without the update a step would be × {1 / (1 - min(share, 0.9)):.2f} as fast at most"
    return [f"{told}instead of several; {most}"]


# -- drawing ---------------------------------------------------------------------------------------


def _timeline(seen: Training) -> tuple[TimelineSpan, ...]:
    """Return the spans of a few steps, and those of the workers in the same time."""
    main = seen.main
    raw = [tuple(span) for span in main.state["spans"]]
    drawn = sorted({step for step, *_ in raw if step < len(main.rows)})
    if not drawn:
        return ()
    zero = main.rows[drawn[0]].start
    spans = []
    for count, step in enumerate(drawn):
        row = main.rows[step]
        spans.append(TimelineSpan(count, "main", "step", row.start - zero, row.seconds))
        inside = sorted((began, ended, kind) for at, kind, began, ended in raw if at == step)
        data = [ended for began, ended, kind in inside if kind == "wait"]
        back = [began for began, ended, kind in inside if kind == "backward"]
        if data and back and back[0] > data[0]:
            inside.append((data[0], back[0], "forward"))
        spans += [
            TimelineSpan(
                count, "main", kind, max(began, row.start) - zero, ended - max(began, row.start)
            )
            for began, ended, kind in inside
            if ended > row.start
        ]
    end = main.rows[drawn[-1]].start + main.rows[drawn[-1]].seconds
    for one in seen.loading if seen.num_workers else ():
        spans += [
            TimelineSpan(0, f"worker {one.state['worker_id']}", "load", f.start - zero, f.seconds)
            for f in one.fetches
            if f.start + f.seconds > zero and f.start < end
        ]
    return tuple(spans)
