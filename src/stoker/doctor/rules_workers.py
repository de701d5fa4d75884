"""Findings about workers: none, too few, too many, restarted workers, slow transfer of batches.

Enters: a `Case`. Leaves: a finding or None. Costs nothing; pure.
"""

from __future__ import annotations

import math
from dataclasses import replace

from stoker.doctor.cases import Case, Rule, at, milliseconds, while_waiting
from stoker.doctor.findings import Finding, Gain
from stoker.doctor.gains import (
    COLD_SECONDS,
    Pace,
    crowded_seconds,
    gain_of_steps,
    hand_over_seconds,
    load_seconds,
    running_share,
    side_by_side,
    suggested_workers,
    worth,
)
from stoker.doctor.measurements import LoaderFacts, WorkerStarts
from stoker.units import format_bytes, format_count

_WORTH_ALONE = 0.85
"""If loading and computing one after the other take less than this share of a step, workers are a loss."""
_LEAST_LOAD, _LEAST_COMPUTE = 0.4, 0.65
"""Least shares of the times of loading and of computing that remain with warm caches (measured: 0.4 and 0.7)."""
_SLOW_HAND_OVER = 0.3
"""If workers are fast enough and the step still waits for more than this share, transferring batches is the cause."""
_CROWDED = 0.3
"""A worker that queued for a core for more than this share of its time was late because of other programs."""
_LEFT_EARLY = 1.5
"""If workers start this many times as often as epochs would end, epochs are left before their end."""
_MOST_STARTING = 0.95
"""Most share of the time that starts of workers are assumed to take."""
_ONE_ITERATOR = (
    "Make the DataLoader and its iterator once, before the training loop, and take every batch from this iterator: "
    "iter(loader) starts the workers."
)
_ONE_ITERATOR_EDIT = (
    "batches = iter(loader)  # once, before the training loop\n"
    "batch = next(batches)  # in each step; at StopIteration, batches = iter(loader) again"
)
_SHARE_OUT = (
    " Its dataset is an IterableDataset: each worker must yield a share of its own "
    "(torch.utils.data.get_worker_info), or every sample comes as often as there are workers."
)


def _more_workers(case: Case, loader: LoaderFacts, pace: Pace) -> tuple[int, Gain]:
    """Return (suggested number of workers, its gain), both limited by the cores."""
    blocked = loader.blocked_share or 0.0
    workers = suggested_workers(pace.load, pace.compute, case.cores, blocked)
    busy = loader.busy_cores
    step = pace.step
    machine = case.measured.machine
    handed = hand_over_seconds(loader)
    # The device computes while the host loads, so a step also takes at least the device's time.
    compute = max(pace.compute + handed, pace.device_busy)
    bound = floor = 0.0
    if busy is not None:
        # Lower bound of a step: all cores busy with the measured work, less 5 % for the probe's own, and with receiving
        # batches.
        floor = 0.95 * step * busy / worth(case.cores, machine)
        bound = floor + handed * (loader.workers == 0) / worth(case.cores, machine)
        own = step * (loader.main_cpu_share or 0.0) + handed
        if not loader.workers:
            own -= pace.load * (1 - blocked)
        compute += crowded_seconds(max(0.0, own), pace.load, compute, workers, machine)
    # Processes never overlap perfectly: assume half of the loss that the present workers show.
    now = loader.workers * running_share(loader)
    efficiency = (1 + min(1.0, pace.active_workers / now)) / 2 if loader.workers else 0.95
    active_workers = side_by_side(loader, workers, machine) if blocked < 0.5 else float(workers)
    likely = max(pace.load / (active_workers * efficiency), compute, bound)
    hopeful = max(
        pace.load / max(active_workers, 1.0), pace.compute, pace.device_busy, 0.95 * floor
    )
    return workers, gain_of_steps(step, likely * 1.25, likely, hopeful)


def _sharing(loader: LoaderFacts) -> str:
    """Return a warning for a dataset that more workers would read wrongly: an open file, a stream; else ""."""
    if loader.open_hdf5 and not loader.workers:
        name, file = loader.open_hdf5
        return (
            f" Its dataset holds {file} open in self.{name}, and forked workers would share that handle and read wrong "
            "data: open the file in each worker, at the first __getitem__, or read it with stoker's Loader."
        )
    return _SHARE_OUT if loader.is_stream and loader.workers < 2 else ""


def _worker_patch(case: Case, loader: LoaderFacts, workers: int) -> dict[str, object]:
    if loader.open_hdf5:
        return {"where": loader.where, "replacement": case.loader_instead()}
    if _sharing(loader):
        return {"where": loader.where}  # more workers alone would repeat samples
    arguments: dict[str, object] = {"num_workers": workers, "persistent_workers": True}
    if case.on_gpu:
        arguments["pin_memory"] = True
    written = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return {
        "loader_arguments": arguments,
        "where": loader.where,
        "script": f"DataLoader(..., {written})",
    }


@while_waiting
def no_workers(case: Case, loader: LoaderFacts, pace: Pace) -> Finding | None:
    """The training process loads its own data while cores are idle."""
    if loader.kind != "torch" or loader.workers > 0:
        return None
    if case.cores < 2 and (loader.blocked_share or 0.0) < 0.5:
        return None
    return _advise_workers(
        case, loader, pace,
        "no-workers",
        "the training process loads its own data",
        f"the DataLoader{at(loader.where)} has num_workers=0, and {case.cores} cores may be used",
        "Set num_workers={workers} in the DataLoader, so that the next batches are made while this one trains.",
    )  # fmt: skip


def _advise_workers(
    case: Case, loader: LoaderFacts, pace: Pace, name: str, title: str, now: str, remedy: str
) -> Finding | None:
    """Advise more workers; None if the present ones are as many as there may be."""
    workers, gained = _more_workers(case, loader, pace)
    if workers <= loader.workers:
        return None
    return case.advise(
        name,
        title,
        [case.wait_line(), now, case.work_line(), case.busiest_line()],
        f"{remedy.format(workers=workers)}{_sharing(loader)}",
        gained,
        **_worker_patch(case, loader, workers),
    )


def starved_by_loader(case: Case) -> Finding | None:
    """The loader is slower than the step, and cores are free."""
    if _restarts_each_step(case):
        return None  # the step waits for new workers, not for too few
    if case.feeding is None:
        return _slow_hand_over(case)
    loader, pace = case.feeding
    if loader.kind == "stoker":
        return _starved_stoker(case, loader, pace)
    if loader.workers == 0:
        return None
    return _advise_workers(
        case, loader, pace,
        "starved-by-loader",
        "too few workers for the step",
        f"the DataLoader{at(loader.where)} has num_workers={loader.workers}, "
        f"{case.cores} cores may be used{case.cpu_words()}",
        f"Raise num_workers from {loader.workers} to {{workers}}.",
    )  # fmt: skip


def _slow_hand_over(case: Case) -> Finding | None:
    """Workers are fast enough, but transferring their batches to the training process takes long."""
    loader, pace, wait = case.measured.loader, case.pace, case.measured.wait_seconds
    if loader is None or pace is None or wait is None or loader.workers == 0:
        return None
    if case.share_of_step(wait.median) - (loader.crowding_share or 0.0) < _SLOW_HAND_OVER:
        return None
    if (loader.queued_share or 0.0) > _CROWDED:
        return None  # the workers were late because other programs had the cores
    step = pace.compute + wait.median
    alone = pace.load + pace.compute
    # Without workers, restarting them for every epoch costs nothing either.
    again = _restart_seconds(case, loader)
    if loader.kind == "torch" and 0 < alone < _WORTH_ALONE * (step + again):
        # A single process that never waits for another one keeps its caches warm.
        cold = COLD_SECONDS * loader.batches_per_step
        warm = sum(
            max(part - cold, least * part)
            for part, least in ((pace.load, _LEAST_LOAD), (pace.compute, _LEAST_COMPUTE))
        )
        return case.advise(
            "starved-by-loader",
            "samples are cheaper to make than to get from workers",
            [
                case.wait_line(),
                f"the DataLoader{at(loader.where)} has num_workers={loader.workers}, {case.cores} cores may be used",
                case.work_line(),
            ],
            "Set num_workers=0 in the DataLoader: the training process makes a batch in less time than it waits "
            "for one.",
            gain_of_steps(step + again, (step + again + warm) / 2, warm, 0.9 * warm),
            # torch refuses the last two without workers.
            loader_arguments={
                "num_workers": 0,
                "persistent_workers": False,
                "prefetch_factor": None,
            },
            where=loader.where,
            script="DataLoader(..., num_workers=0), without persistent_workers and prefetch_factor",
        )
    return case.advise(
        "starved-by-loader",
        "batches take long from the workers to the step",
        [
            case.wait_line(),
            case.work_line(),
            f"a batch holds {format_bytes(loader.batch_bytes)}" if loader.batch_bytes else None,
        ],
        "Hand over less: keep values compact until they are on the device, or load whole batches in the "
        "training process from memory (stoker's Loader does both).",
        gain_of_steps(step, step, step - wait.median / 2, pace.compute),
        where=loader.where,
    )


def _starved_stoker(case: Case, loader: LoaderFacts, pace: Pace) -> Finding | None:
    """The step of a stoker job waits for its loader."""
    tier = loader.tier or "streamed"
    if tier == "resident":
        remedy = "Give the plan fewer fields to send, or a larger batch: the data is on the device already."
        config: dict[str, object] = {}
    else:
        remedy = (
            "Let the plan keep the data on the device: turn the chunk loader on and leave it the room it "
            "asks for (`stoker plan` says how much)."
        )
        config = {"data.use_chunk_loader": True, "data.chunk_size_gb": None}
    half = max(pace.compute, pace.load / 2)
    return case.advise(
        "starved-by-loader",
        "the step waits for the loader",
        [case.wait_line(), f"the plan's tier is {tier}", case.work_line()],
        remedy,
        gain_of_steps(pace.step, (pace.step + half) / 2, half, pace.compute),
        config=config,
    )


def _starts_per_step(case: Case, loader: LoaderFacts) -> float:
    """Return how often a step starts workers: once per epoch, or more often if epochs are left early; 0 if unknown."""
    if not loader.steps_per_epoch:
        return 0.0
    counted = (loader.counted_starts or 0) / max(1, case.measured.steps)
    whole = min(1.0, loader.batches_per_step / loader.steps_per_epoch)
    return counted if counted > _LEFT_EARLY * whole else whole


def _restarts_each_step(case: Case) -> bool:
    """Return whether most steps start the workers anew, as `next(iter(loader))` does."""
    counted = case.loader.counted_starts or 0
    return case.loader.restarts and 2 * counted > case.measured.steps


def _restart_seconds(case: Case, loader: LoaderFacts) -> float:
    """Return the seconds that starting workers for every epoch costs per step; 0 if unknown."""
    if not loader.restarts or not loader.epoch_starts:
        return 0.0
    return (loader.epoch_start_seconds or 0.0) * _starts_per_step(case, loader)


def workers_restarted(case: Case) -> Finding | None:
    """Workers are started again and again: for every epoch or step, or by another DataLoader."""
    own = _restarted_per_step(case) if _restarts_each_step(case) else _restarted_per_epoch(case)
    return _restarted_elsewhere(case, own) or own


def _once(loader: LoaderFacts | WorkerStarts) -> tuple[str, str]:
    """Return (remedy, edit) for workers that start again for every epoch."""
    kept = "persistent_workers=True"
    if not loader.made_again:
        remedy = f"Set {kept} in the DataLoader{{at}}, so that workers outlive an epoch."
        return remedy, f"DataLoader(..., {kept})"
    remedy = f"Make the DataLoader{{at}} once, before the training loop, with {kept}: a new one starts new workers."
    return remedy, f"loader = DataLoader(..., {kept})  # once, before the training loop"


def _restarted_per_epoch(case: Case) -> Finding | None:
    loader, pace = case.measured.loader, case.pace
    if loader is None or pace is None or not loader.restarts:
        return None
    start, length = loader.epoch_start_seconds, loader.steps_per_epoch
    mean = case.measured.mean_step_seconds
    if loader.epoch_starts < 2 or not start or not length or not mean:
        return None
    lost = _restart_seconds(case, loader)
    # The mean includes restarts in counted steps, but not those in steps with a validation.
    counted = loader.epoch_starts if loader.counted_starts is None else loader.counted_starts
    now = mean if 2 * counted >= loader.epoch_starts else max(mean, pace.step + lost)
    remedy, edit = _once(loader)
    new = ": each has a new DataLoader" if loader.made_again else ""
    return case.advise(
        "workers-restarted",
        f"workers are started again for every epoch{new}",
        [
            (
                f"{format_count(loader.epoch_starts, 'epoch')} began while measuring, each "
                f"{milliseconds(start)} late: {format_count(loader.workers, 'worker')} started and filled again"
            ),
            (
                f"an epoch has {format_count(length, 'batch').replace('batchs', 'batches')} of "
                f"{milliseconds(pace.step)}"
            ),
        ],
        remedy.format(at=at(loader.where)),
        # Avoiding restarts does not make the steps between them shorter.
        gain_of_steps(now, *(max(pace.step, now - part * lost) for part in (0.6, 0.9, 1.0))),
        # Workers that outlive an epoch end with their DataLoader all the same.
        loader_arguments={} if loader.made_again else {"persistent_workers": True},
        where=loader.where,
        script=edit,
    )


def _restarted_per_step(case: Case) -> Finding | None:
    loader, pace, wait = case.loader, case.pace, case.measured.wait_seconds
    if pace is None or wait is None:
        return None
    now = max(case.measured.mean_step_seconds or 0.0, pace.step)
    load = load_seconds(loader) / worth(loader.workers, case.measured.machine)
    rest = max(load, pace.compute + hand_over_seconds(loader), pace.device_busy)
    remedy, edit, arguments = _ONE_ITERATOR, _ONE_ITERATOR_EDIT, {}
    # An epoch of one or two batches ends by itself: then its workers have to outlive it.
    if 2 * loader.batches_per_step >= (loader.steps_per_epoch or math.inf):
        remedy, edit = _once(loader)
        remedy = remedy.format(at=at(loader.where))
        arguments = {} if loader.made_again else {"persistent_workers": True}
        rest = load_seconds(loader) + pace.compute + hand_over_seconds(loader)
    return case.advise(
        "workers-restarted",
        "workers are started again for every step",
        [
            case.wait_line(),
            (
                f"most steps start {format_count(loader.workers, 'worker')} of the DataLoader{at(loader.where)}, which "
                "end soon after"
            ),
            case.work_line(),
        ],
        remedy,
        gain_of_steps(now, *(max(rest, now - part * wait.median) for part in (0.8, 0.97, 1.0))),
        loader_arguments=arguments,
        where=loader.where,
        script=edit,
    )


def _restarted_elsewhere(case: Case, own: Finding | None) -> Finding | None:
    """Return a finding for other DataLoaders, such as one for validation, together with the feeding one's."""
    starts = case.measured.worker_starts
    if not starts:
        return None
    # Gains of other loaders count from the whole time since the first step, not from that of the training steps.
    share = sum(one.share for one in starts)
    if own is not None:
        share += (1 - 1 / own.gain.likely) * max(0.0, 1 - (case.measured.elsewhere_share or 0.0))
    share = min(share, _MOST_STARTING)
    remedy, edit = _once(starts[0])
    remedies = dict.fromkeys(
        [remedy.format(at=at(starts[0].where)), *([own.remedy] if own else [])]
    )
    found = case.advise(
        "workers-restarted",
        "workers are started again and again",
        [
            *(
                f"{one.share:.0%} of the time since the first step: {format_count(one.workers, 'worker')} of the "
                f"DataLoader{at(one.where)} started {one.count:,} times, {milliseconds(one.seconds)} each"
                for one in starts
            ),
            *(own.evidence if own else ()),
            "the gain is that of the whole time since the first step, not of the training steps alone",
        ],
        " ".join(remedies),
        gain_of_steps(1.0, *(1 - part * share for part in (0.6, 0.9, 1.0))),
        where=starts[0].where,
        script=edit,
    )
    return None if found is None else replace(found, samples_per_second=None)


RULES: tuple[Rule, ...] = (no_workers, starved_by_loader, workers_restarted)
