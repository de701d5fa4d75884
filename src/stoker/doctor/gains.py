"""The arithmetic of "what if": how a step's time comes about, and what it would be after a remedy.

Enters: `Measurements`. Leaves: a `Pace`, and a `Gain` for a changed one. Costs nothing; pure.

Without workers a step loads and then computes: load + compute. With workers both happen side by side and
the slower one sets the pace: max(load / lanes, compute), where `lanes` is how many loading processes'
worth of work really ran at once. Where the loader was the slower one, the lanes are calibrated so that
the formula gives the step that was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stoker.doctor.findings import Gain
from stoker.doctor.measurements import LoaderFacts, Measurements

STARVED_SHARE = 0.10
"""Waiting below this share of a step is what handing over a batch costs."""
_HAND_OVER_SECONDS, _HAND_OVER_BYTES_PER_SECOND = 7e-4, 2e9
_EXPLAINED = 0.5
"""Loading explains the waiting if the workers at their best need at least this share of a step for it."""


@dataclass(frozen=True)
class Pace:
    """How a step's time comes about.

    Attributes:
        load: Seconds that the batches of one step cost one loading process.
        compute: Seconds of a step without waiting for data.
        lanes: Loading processes that work at once; 0 when the training process loads.
        device_busy: Seconds per step in which the device computes: no remedy on the host goes below.
        hand_over: Seconds that a batch from a worker costs the training process, however fast the worker.
    """

    load: float
    compute: float
    lanes: float = 1.0
    device_busy: float = 0.0
    hand_over: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of one step."""
        if self.lanes <= 0:
            return self.load + self.compute
        return max(self.load / self.lanes, self.compute + self.hand_over)

    def loading(self, seconds: float, lanes: float | None = None) -> Pace:
        """Return the pace with a step's loading costing `seconds`, perhaps on other lanes."""
        return replace(
            self, load=max(0.0, seconds), lanes=self.lanes if lanes is None else max(0.0, lanes)
        )

    def saving(self, seconds: float) -> Pace:
        """Return the pace with `seconds` less on the host, the device's work kept."""
        floor = min(self.device_busy, self.compute)
        return replace(self, compute=max(floor, self.compute - seconds, 1e-9))


def pace_of(measured: Measurements) -> Pace | None:
    """Return the pace that was measured; None when no step was."""
    if measured.step_seconds is None:
        return None
    step = measured.step_seconds.median
    wait = measured.wait_seconds.median if measured.wait_seconds else 0.0
    alone = measured.ablation.step_seconds if measured.ablation else None
    compute = (
        (alone or measured.compute_seconds or measured.step_seconds).median
        if wait or alone or measured.compute_seconds
        else step
    )
    busy = measured.kernels.busy_share * step if measured.kernels else 0.0
    load, lanes = _loading(measured, step, wait)
    # What the step waits although it is not starved is the hand-over as it was measured.
    hand_over = hand_over_seconds(measured.loader) if lanes else 0.0
    return Pace(
        load, compute, lanes, busy, hand_over if is_starved(measured) else wait * bool(lanes)
    )


def hand_over_seconds(loader: LoaderFacts | None) -> float:
    """Return what batches from workers usually cost a step of the training process: queue, pickle, memory."""
    if loader is None or loader.kind != "torch":
        return 0.0
    copied = (loader.batch_bytes or 0) / _HAND_OVER_BYTES_PER_SECOND
    # On a crowded machine whoever is to hand over has to queue for a core first.
    return (_HAND_OVER_SECONDS + copied) * loader.batches_per_step / running_share(loader)


def running_share(loader: LoaderFacts) -> float:
    """Return the share of its time on or queued for a core that a loading process had one; 0.25 at least."""
    return max(0.25, 1 - (loader.queued_share or 0.0))


def side_by_side(loader: LoaderFacts, workers: int, cores: int) -> float:
    """Return how many cores' worth of work that many workers get beside whatever else the machine does.

    Ready processes share the cores evenly, so a worker's queueing tells how many there are; a little of it
    happens on any machine and tells nothing.
    """
    crowded = min(1.0, max(0.0, ((loader.queued_share or 0.0) - 0.1) / 0.3))
    others = crowded * max(0.0, cores / running_share(loader) - max(1, loader.workers))
    return workers * min(1.0, cores / (workers + others))


def _loading(measured: Measurements, step: float, wait: float) -> tuple[float, float]:
    """Return (seconds of loading per step, lanes)."""
    loader = measured.loader
    if loader is None or (loader.kind == "torch" and loader.workers == 0):
        return wait, 0.0
    if loader.kind == "stoker":
        alone = measured.ablation.loader_seconds if measured.ablation else None
        alone = alone or loader.alone_seconds
        load = (alone.median if alone else wait) * loader.batches_per_step
        # What the loader cannot hide is what the step waits for, whatever it manages alone.
        return (step, 1.0) if is_starved(measured) else (min(load, step), 1.0)
    load = _load_seconds(loader)
    if load <= 0:
        return (step * loader.workers if is_starved(measured) else 0.0), float(loader.workers)
    lanes = load / step if is_starved(measured) else max(load / step, float(loader.workers))
    return load, lanes


def _load_seconds(loader: LoaderFacts) -> float:
    """Return what a step's batches cost one loading process; 0 when that is unknown."""
    whole = loader.alone_seconds.median if loader.alone_seconds else loader.work.total
    return whole * loader.batches_per_step


def waits(measured: Measurements) -> bool:
    """Return whether the step waits for data by more than a hand-over costs."""
    share = measured.wait_share
    return share is not None and share > STARVED_SHARE


def is_starved(measured: Measurements) -> bool:
    """Return whether the step waits for data because loading it takes so long."""
    loader, step = measured.loader, measured.step_seconds
    if not waits(measured) or loader is None or step is None:
        return False
    if loader.kind == "stoker" or loader.workers == 0:
        return True
    # What workers do takes too long, however many do it.
    if (loader.crowding_share or 0.0) > STARVED_SHARE:
        return True
    taken = _load_seconds(loader) / max(0.05, 1 - (loader.queued_share or 0.0))
    return taken <= 0 or taken / loader.workers >= _EXPLAINED * step.median


def gain(now: Pace, likely: Pace, low: Pace | None = None, high: Pace | None = None) -> Gain:
    """Return how many times faster `likely` is, between a cautious and a hopeful case; never below 1."""
    return gain_of_steps(now.step, (low or likely).step, likely.step, (high or likely).step)


def gain_of_steps(now: float, low: float, likely: float, high: float) -> Gain:
    """Return the gain of steps that take `low` (cautious) to `high` (hopeful) seconds instead."""
    least, expected, most = sorted(
        max(1.0, now / max(after, 1e-9)) for after in (low, likely, high)
    )
    # Where the new step is bound by something else in all three cases, measuring is what is uncertain.
    more = expected - 1
    return Gain(min(least, 1 + 0.85 * more), expected, max(most, 1 + 1.15 * more))


def suggested_workers(load: float, compute: float, cores: int, blocked_share: float) -> int:
    """Return how many loading processes keep up with the step, as far as the cores allow.

    Work that waits for a disk needs no core, so such workers may outnumber the cores by as much.
    """
    wanted = math.ceil(load / max(compute, 1e-6))
    room = max(1, math.floor(cores / max(1 - blocked_share, 0.25)))
    return max(1, min(wanted, room, 64))
