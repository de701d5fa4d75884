"""The arithmetic of a step: the parts of its time, and its expected time after a remedy.

Enters: `Measurements`. Leaves: a `Pace`, a `Gain` for a changed one, and the parts of a step for tables. Costs
nothing; pure.

Without workers a step loads and then computes: load + compute. With workers both happen in parallel, and the slower one
sets the pace: max(load / active_workers, compute). `active_workers` is the number of loading processes that effectively
worked at once. If the loader was the slower part, `active_workers` is chosen so that the formula gives the measured
step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stoker.doctor.findings import Gain
from stoker.doctor.measurements import LoaderFacts, MachineFacts, Measurements

STARVED_SHARE = 0.10
"""Waiting for less than this share of a step is the normal cost of receiving a batch."""
_HAND_OVER_SECONDS, _HAND_OVER_BYTES_PER_SECOND = 7e-4, 2e9
COLD_SECONDS = 3.5e-4
"""Seconds per batch that a process loses to cold CPU caches if it slept before: the training process that waits for a
worker, or a worker that waits for work (measured: 0.34 ms on a Xeon, 0.49 on an ARM core)."""
_LEAST_WAIT_SECONDS = 5e-4
"""Without workers, a shorter wait is the cost of collating samples that are in memory; no remedy makes it shorter."""
_FEWEST_CORES = 2
"""Assumed number of cores if it is unknown: the predicted gains are then smallest."""
_SECOND_THREAD = 0.5
"""Work that the second thread of a physical core adds (measured with workers on an H200's host: 0.3 to 0.6)."""
_WAKE_UP_SECONDS = 1e-3
"""Time until the training gets a core, if its workers have all of them when it wakes up (measured on two cores)."""
_EXPLAINED = 0.5
"""Loading explains the waiting if the workers, all busy, need at least this share of a step for a step's batches."""


@dataclass(frozen=True)
class Pace:
    """The terms that make up the time of a step."""

    load: float  # seconds that one loading process needs for the batches of one step
    compute: float  # seconds of a step without waiting for data
    # loading processes that effectively work at once; 0 if the training process loads
    active_workers: float = 1.0
    # seconds per step in which the device computes; no remedy on the host makes a step shorter than this
    device_busy: float = 0.0
    hand_over: float = 0.0  # seconds for which a batch from a worker occupies the training process

    @property
    def step(self) -> float:
        """Seconds of one step."""
        if self.active_workers <= 0:
            return max(self.load + self.compute, self.device_busy)
        return max(self.load / self.active_workers, self.compute + self.hand_over, self.device_busy)

    def loading(self, seconds: float, active_workers: float | None = None) -> Pace:
        """Return the pace if loading costs `seconds` per step, optionally with another number of active workers."""
        workers = self.active_workers if active_workers is None else max(0.0, active_workers)
        return replace(self, load=max(0.0, seconds), active_workers=workers)

    def saving(self, seconds: float) -> Pace:
        """Return the pace with `seconds` less of compute; the time of the device stays a lower bound."""
        floor = min(self.device_busy, self.compute)
        return replace(self, compute=max(floor, self.compute - seconds, 1e-9))


def pace_of(measured: Measurements) -> Pace | None:
    """Return the measured pace; None if no step was measured."""
    if measured.step_seconds is None:
        return None
    step = measured.step_seconds.median
    wait = measured.wait_seconds.median if measured.wait_seconds else 0.0
    alone = measured.ablation.step_seconds if measured.ablation else None
    compute = (alone or measured.compute_seconds or measured.step_seconds).median
    busy = measured.kernels.busy_share * step if measured.kernels else 0.0
    load, active_workers = _loading(measured, step, wait)
    # If the step is not starved, its wait is the measured cost of receiving batches.
    hand_over = hand_over_seconds(measured.loader) if active_workers else 0.0
    return Pace(
        load,
        compute,
        active_workers,
        busy,
        hand_over if is_starved(measured) else wait * bool(active_workers),
    )


def hand_over_seconds(loader: LoaderFacts | None) -> float:
    """Return the usual cost per step of receiving batches from workers: queue, pickle, memory."""
    if loader is None or loader.kind != "torch":
        return 0.0
    cost = _HAND_OVER_SECONDS + (loader.batch_bytes or 0) / _HAND_OVER_BYTES_PER_SECOND
    if loader.workers == 0:  # with workers, the measured step includes this cost
        cost += COLD_SECONDS
    # On a busy machine the worker first queues for a core.
    return cost * loader.batches_per_step / running_share(loader)


def running_share(loader: LoaderFacts) -> float:
    """Return the share of a loading process's runnable time in which it had a core; at least 0.25."""
    return max(0.25, 1 - (loader.queued_share or 0.0))


def worth(threads: float, machine: MachineFacts) -> float:
    """Return the throughput of `threads` parallel threads on this machine, as a multiple of one thread's.

    The two hardware threads of a physical core together do about one and a half times the work of one. If the system
    reports which logical cores share a physical one, second threads are used last; if not, by chance.
    """
    cores = machine.cores or _FEWEST_CORES
    physical = min(cores, machine.physical_cores or cores)
    running = min(threads, cores)
    if physical < cores:
        second = _SECOND_THREAD
        if machine.cores_worth is not None:
            second = max(0.0, machine.cores_worth - physical) / (cores - physical)
        return min(running, physical) + second * max(0.0, running - physical)
    if machine.cores_worth is None or cores < 2 or running <= 1:
        return running
    return 1 + (running - 1) * (machine.cores_worth - 1) / (cores - 1)


def crowded_seconds(
    own: float, load: float, step: float, workers: int, machine: MachineFacts
) -> float:
    """Return the seconds of a step for which the training queues for a core behind its own workers.

    `own` are its seconds on a core, `load` those of loading a step's batches in one process. 0 if the workers leave it
    a core: else the processes share the cores evenly, while all workers are busy.
    """
    cores = machine.cores or _FEWEST_CORES
    if workers < cores:
        return 0.0
    all_busy = min(1.0, load / (workers * max(step, 1e-9))) ** cores
    return all_busy * (own * (workers + 1 - cores) / cores + _WAKE_UP_SECONDS)


def side_by_side(loader: LoaderFacts, workers: int, machine: MachineFacts) -> float:
    """Return the throughput of `workers` loading processes beside other work, as a multiple of one present worker's.

    Runnable processes share the cores evenly, so the time that a worker queued for a core shows how many there are. A
    little queueing happens on every machine and is ignored.
    """
    cores, present = machine.cores or _FEWEST_CORES, max(1, loader.workers)
    crowded = min(1.0, max(0.0, ((loader.queued_share or 0.0) - 0.1) / 0.3))
    others = crowded * max(0.0, cores / running_share(loader) - present)
    # What a worker does now was measured beside the present others.
    speed = worth(present, machine) / min(present, cores)
    return worth(workers * min(1.0, cores / (workers + others)), machine) / speed


def _loading(measured: Measurements, step: float, wait: float) -> tuple[float, float]:
    """Return (seconds of loading per step, active workers)."""
    loader = measured.loader
    if loader is None:
        return wait, 0.0
    if loader.kind == "torch" and loader.workers == 0:
        # The wait is the loading. If it is much longer, the thread was queued for a core behind other programs.
        seconds = load_seconds(loader)
        return (min(wait, 1.5 * seconds + _LEAST_WAIT_SECONDS) if seconds > 0 else wait), 0.0
    if loader.kind == "stoker":
        alone = measured.ablation.loader_seconds if measured.ablation else None
        alone = alone or loader.alone_seconds
        load = (alone.median if alone else wait) * loader.batches_per_step
        # If the step waits, the loader is as slow as the step, however fast it is alone.
        return (step, 1.0) if is_starved(measured) else (min(load, step), 1.0)
    load = load_seconds(loader)
    workers, starved = float(loader.workers), is_starved(measured)
    if load <= 0:
        return (step * workers if starved else 0.0), workers
    return load, (load / step if starved else max(load / step, workers))


def load_seconds(loader: LoaderFacts) -> float:
    """Return the seconds that one loading process needs for the batches of a step; 0 if unknown."""
    whole = loader.alone_seconds.median if loader.alone_seconds else loader.work.total
    return whole * loader.batches_per_step


def waits(measured: Measurements) -> bool:
    """Return whether the step waits for data for longer than receiving a batch takes."""
    share = measured.wait_share
    return share is not None and share > STARVED_SHARE


def is_starved(measured: Measurements) -> bool:
    """Return whether the step waits for data because loading it takes so long."""
    loader, step, wait = measured.loader, measured.step_seconds, measured.wait_seconds
    if not waits(measured) or loader is None or step is None or wait is None:
        return False
    if loader.kind == "stoker":
        return True
    if loader.workers == 0:
        return wait.median >= _LEAST_WAIT_SECONDS
    # The workers take the cores from the training process: loading is too expensive for any number of workers, unless
    # they work for less time than the training queued. Then it queued behind their start, or behind another loader's.
    load, crowded = load_seconds(loader), loader.crowding_share or 0.0
    if crowded > STARVED_SHARE and not 0 < load < crowded * step.median:
        return True
    taken = load / max(0.05, 1 - (loader.queued_share or 0.0))
    return taken <= 0 or taken / loader.workers >= _EXPLAINED * step.median


def gain(now: Pace, likely: Pace, low: Pace | None = None, high: Pace | None = None) -> Gain:
    """Return the speed-up of `likely` over `now`, with a cautious (`low`) and a hopeful (`high`) case; at least 1."""
    return gain_of_steps(now.step, (low or likely).step, likely.step, (high or likely).step)


def gain_of_steps(now: float, low: float, likely: float, high: float) -> Gain:
    """Return the gain if steps take `likely` seconds, or `low` (cautious) or `high` (hopeful), instead of `now`."""
    least, expected, most = sorted(
        max(1.0, now / max(after, 1e-9)) for after in (low, likely, high)
    )
    # If all three cases give the same step, the range is the uncertainty of measuring.
    more = expected - 1
    return Gain(min(least, 1 + 0.85 * more), expected, max(most, 1 + 1.15 * more))


def suggested_workers(load: float, compute: float, cores: int, blocked_share: float) -> int:
    """Return the number of loading processes that keep up with the step, limited by the cores.

    A worker that waits for a disk needs no core, so there may be more such workers than cores.
    """
    wanted = math.ceil(load / max(compute, 1e-6))
    room = max(1, math.floor(cores / max(1 - blocked_share, 0.25)))
    return max(1, min(wanted, room, 64))


_ORDER = ("wait", "load", "compute", "host")
_SMALLEST_SHARE = 1e-3
"""Parts below this share of a step are not listed."""


@dataclass(frozen=True)
class StepShare:
    """A part of the median step."""

    label: str  # the work, in words
    seconds: float  # its duration
    kind: str  # "wait", "load", "host" or "compute"; selects the colour


def split_step(measured: Measurements) -> list[StepShare]:
    """Return parts that add up to the median step; empty if no step was measured."""
    if measured.step_seconds is None:
        return []
    step = measured.step_seconds.median
    least = step * _SMALLEST_SHARE
    known = _fitted([part for part in _known_parts(measured) if part.seconds > least], step)
    has_backward = any(part.label == "backward pass" for part in known)
    rest = "forward pass, loss and the rest" if has_backward else "the step itself"
    left = step - sum(part.seconds for part in known)
    parts = [*([StepShare(rest, left, "compute")] if left > least else []), *known]
    return sorted(parts, key=lambda part: _ORDER.index(part.kind))


def _fitted(parts: list[StepShare], step: float) -> list[StepShare]:
    """Return the parts, scaled down if their sum is more than the step: medians of uneven steps do not add up."""
    waits = sum(part.seconds for part in parts if part.kind == "wait")
    others = sum(part.seconds for part in parts if part.kind != "wait")
    wait_scale = min(1.0, step / max(waits, 1e-12))
    scale = min(1.0, max(0.0, step - waits) / max(others, 1e-12))
    return [
        replace(part, seconds=part.seconds * (wait_scale if part.kind == "wait" else scale))
        for part in parts
    ]


def _known_parts(measured: Measurements) -> list[StepShare]:
    """Return the parts of a step that were measured; 0 seconds for the others."""
    loader, gathering, augmenting = measured.loader, 0.0, 0.0
    # A CUDA graph of the step includes the gathering.
    if loader is not None and loader.kind == "stoker" and not measured.captured:
        gathering = (loader.work.collate or 0) * loader.batches_per_step
        augmenting = (loader.work.transform or 0) * loader.batches_per_step
    wait, backward, optimizer = (
        spread.median if spread else 0.0
        for spread in (measured.wait_seconds, measured.backward_seconds, measured.optimizer_seconds)
    )
    copied = sum(copy.seconds_per_step for copy in measured.copies)
    synced = sum(sync.seconds_per_step for sync in measured.syncs)
    calls = [*measured.host_calls, *measured.allocator.empty_cache]
    unused = sum(call.seconds_per_step for call in measured.unused_calls)
    return [
        StepShare("waiting for data", wait, "wait"),
        StepShare("between the model's calls", measured.between_seconds or 0.0, "load"),
        StepShare("gathering the batch", gathering, "load"),
        StepShare("augmenting it", augmenting, "load"),
        StepShare("copies for which the host waits", copied, "host"),
        StepShare("fetching values from the step", synced, "host"),
        StepShare("evaluation", measured.evaluation_seconds + unused, "host"),
        StepShare("housekeeping", sum(call.seconds_per_step for call in calls), "host"),
        StepShare("backward pass", backward, "compute"),
        StepShare("optimizer", optimizer, "compute"),
    ]
