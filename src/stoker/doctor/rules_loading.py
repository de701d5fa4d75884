"""Findings about the way to the step: workers, disk, decoding, augmentation, collating, HDF5.

Enters: a `Case`. Leaves: a finding or None. Costs nothing; pure.

The residues below say what a remedy leaves of the cost it removes. They are deliberately wide at the
cautious end: how well data is packed or an augmentation rewritten is not the doctor's to know.
"""

from __future__ import annotations

from stoker.doctor.cases import Case, Rule, milliseconds, worthwhile
from stoker.doctor.findings import Finding, Gain
from stoker.doctor.gains import (
    Pace,
    gain,
    gain_of_steps,
    hand_over_seconds,
    suggested_workers,
)
from stoker.doctor.measurements import Hdf5Facts, LoaderFacts
from stoker.units import MB, format_bytes, format_count

_CAUTIOUS, _LIKELY = 0.30, 0.05
"""Shares of a removed cost that stay, cautiously and likely; hopefully none."""
_DOMINANT = 0.4
"""A part is called the cause from this share of the loading on."""
_PLAIN_READ_BYTES_PER_SECOND = 1.0e9
"""Of samples that lie ready in a file that is in memory or on a local disk."""
_HDF5_READ_SECONDS = 80e-6
"""Of one h5py slice of contiguous, uncompressed data, whatever its size (FACTS 1: 60 to 170 µs)."""
_HDF5_BYTES_PER_SECOND = 2.0e9
_WASTEFUL = 4.0
"""Bytes read per byte used from which the chunks are called wrong."""

_SLOW_HAND_OVER = 0.3
"""Share of a step spent waiting, with workers that are fast enough, from which the way is the cause."""

NAMED_CAUSES = frozenset(
    {
        "decode-bound",
        "disk-bound",
        "augment-on-cpu",
        "python-collate",
        "hdf5-chunks",
        "hdf5-compressed",
    }
)


def _without(loader: LoaderFacts, pace: Pace, part: float, residue: float = 0.0) -> Gain:
    """Return the gain of loading without `part` (a share), of which `residue` seconds stay for certain."""
    left = pace.load * (1 - part)
    removed = pace.load * part
    residue *= loader.batches_per_step
    paces = (
        pace.loading(left + min(removed, residue + removed * kept))
        for kept in (_CAUTIOUS, _LIKELY, 0.0)
    )
    low, likely, high = paces
    return gain(pace, likely, low, high)


def _ready_seconds(loader: LoaderFacts) -> float:
    """Return what reading a batch costs when its values lie ready."""
    return (loader.batch_bytes or 0) / _PLAIN_READ_BYTES_PER_SECOND


def _share(loader: LoaderFacts, seconds: float | None) -> float:
    total = loader.work.total
    return (seconds or 0.0) / total if total > 0 else 0.0


def _blocked(loader: LoaderFacts) -> float:
    return loader.blocked_share or 0.0


def _work_line(loader: LoaderFacts) -> str | None:
    """Return where a batch's loading goes, the largest part first."""
    parts = {
        "reading": loader.work.read,
        "decoding": loader.work.decode,
        "transforms": loader.work.transform,
        "collating": loader.work.collate,
        "copying": loader.work.copy,
        "other dataset code": loader.work.other,
    }
    known = sorted(
        ((s, name) for name, s in parts.items() if s and _share(loader, s) > 0.02), reverse=True
    )
    if not known:
        return None
    listed = ", ".join(f"{name} {milliseconds(seconds)}" for seconds, name in known)
    return f"loading one batch takes {milliseconds(loader.work.total)} of one process: {listed}"


def _line_line(loader: LoaderFacts) -> str | None:
    if loader.busiest_line is None or (loader.busiest_share or 0) < 0.25:
        return f"the dataset stands at {loader.dataset_where}" if loader.dataset_where else None
    return f"{loader.busiest_share:.0%} of it was seen at {loader.busiest_line}"


def _busy_cores(loader: LoaderFacts) -> float | None:
    """Return the cores that the job keeps busy; None when that was not measured."""
    if loader.main_cpu_share is None:
        return None
    return sum(loader.worker_cpu_shares) + loader.main_cpu_share


def _more_workers(case: Case, loader: LoaderFacts, pace: Pace) -> tuple[int, Gain]:
    """Return a number of workers and what it brings, within what the cores can do."""
    blocked = _blocked(loader)
    workers = suggested_workers(pace.load, pace.compute, case.cores, blocked)
    busy = _busy_cores(loader)
    step = pace.step
    # However the work is spread, the cores cannot do more of it than they can.
    bound = step * busy / case.cores if busy is not None else 0.0
    compute = pace.compute + hand_over_seconds(loader)
    # Processes never overlap perfectly; what the present ones lose, more of them lose too.
    efficiency = min(1.0, pace.lanes / loader.workers) if loader.workers else 0.95
    likely = max(pace.load / (workers * efficiency), compute, bound)
    hopeful = max(pace.load / workers, pace.compute, bound * 0.9)
    return workers, gain_of_steps(step, likely * 1.25, likely, hopeful)


def _worker_patch(case: Case, loader: LoaderFacts, workers: int) -> dict[str, object]:
    arguments: dict[str, object] = {"num_workers": workers, "persistent_workers": True}
    if case.on_gpu:
        arguments["pin_memory"] = True
    written = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return {
        "loader_arguments": arguments,
        "where": loader.where,
        "script": f"DataLoader(..., {written})",
    }


# -- the rules -------------------------------------------------------------------------------------


def no_workers(case: Case) -> Finding | None:
    """The training process loads its own data while cores stand idle."""
    if case.feeding is None:
        return None
    loader, pace = case.feeding
    if loader.kind != "torch" or loader.workers > 0 or (case.cores < 2 and _blocked(loader) < 0.5):
        return None
    workers, gained = _more_workers(case, loader, pace)
    return worthwhile(
        case.finding(
            "no-workers",
            "the training process loads its own data",
            [
                case.wait_line(),
                f"the DataLoader{_at(loader.where)} has num_workers=0, and {case.cores} cores may be used",
                _work_line(loader),
                _line_line(loader),
            ],
            f"Set num_workers={workers} in the DataLoader, so that the next batches are made while this one "
            "trains.",
            gained,
            **_worker_patch(case, loader, workers),
        )
    )


def starved_by_loader(case: Case) -> Finding | None:
    """The loader is slower than the step, and there is room for more of it."""
    if case.feeding is None:
        return _slow_hand_over(case)
    loader, pace = case.feeding
    if loader.kind == "stoker":
        return _starved_stoker(case, loader, pace)
    if loader.workers == 0:
        return None
    workers, gained = _more_workers(case, loader, pace)
    if workers <= loader.workers:
        return None
    return worthwhile(
        case.finding(
            "starved-by-loader",
            "too few workers for the step",
            [
                case.wait_line(),
                (
                    f"the DataLoader{_at(loader.where)} has num_workers={loader.workers}, "
                    f"{case.cores} cores may be used{_cpu_words(loader)}"
                ),
                _work_line(loader),
                _line_line(loader),
            ],
            f"Raise num_workers from {loader.workers} to {workers}.",
            gained,
            **_worker_patch(case, loader, workers),
        )
    )


def _slow_hand_over(case: Case) -> Finding | None:
    """Workers are fast enough, and yet the step waits: for batches on their way."""
    loader, pace, wait = case.measured.loader, case.pace, case.measured.wait_seconds
    if loader is None or pace is None or wait is None or loader.workers == 0:
        return None
    if case.share_of_step(wait.median) < _SLOW_HAND_OVER:
        return None
    step = pace.compute + wait.median
    return worthwhile(
        case.finding(
            "starved-by-loader",
            "batches take long from the workers to the step",
            [
                case.wait_line(),
                _work_line(loader),
                f"a batch holds {format_bytes(loader.batch_bytes)}" if loader.batch_bytes else None,
            ],
            "Hand over less: keep values compact until they are on the device, or load whole batches in the "
            "training process from memory (stoker's Loader does both).",
            gain_of_steps(step, step, step - wait.median / 2, pace.compute),
            where=loader.where,
        )
    )


def _starved_stoker(case: Case, loader: LoaderFacts, pace: Pace) -> Finding | None:
    """A stoker job that waits: its data should live nearer to the device."""
    tier = loader.tier or "streamed"
    if tier == "resident":
        remedy = "Give the plan fewer fields to send, or a larger batch: the data is on the device already."
        config: dict[str, object] = {}
    else:
        remedy = (
            "Let the plan keep the data on the device: turn the chunk loader on and leave it the room it "
            "asks for (`stoker plan` says how much)."
        )
        config = {"gpu_optimization.use_chunk_loader": True, "gpu_optimization.chunk_size_gb": None}
    half = max(pace.compute, pace.load / 2)
    return worthwhile(
        case.finding(
            "starved-by-loader",
            "the step waits for the loader",
            [case.wait_line(), f"the plan's tier is {tier}", _work_line(loader)],
            remedy,
            gain_of_steps(pace.step, (pace.step + half) / 2, half, pace.compute),
            config=config,
        )
    )


def decode_bound(case: Case) -> Finding | None:
    """Turning bytes into values keeps every core busy."""
    if case.feeding is None:
        return None
    loader, pace = case.feeding
    part = _share(loader, (loader.work.decode or 0) + (loader.work.other or 0))
    if loader.kind == "stoker":
        part = _share(loader, loader.work.decode)
    elif loader.workers == 0 or not _cores_are_full(case, loader):
        return None
    if part < _DOMINANT or _blocked(loader) >= 0.5 or _hdf5_cause(case, loader) is not None:
        return None
    return worthwhile(
        case.finding(
            "decode-bound",
            "decoding samples keeps the cores busy",
            [
                case.wait_line(),
                f"{format_count(loader.workers, 'worker')} on {case.cores} cores{_cpu_words(loader)}",
                _work_line(loader),
                _line_line(loader),
            ],
            "Decode once instead of every epoch: `stoker pack` stores the decoded values, and batches are "
            "then copies.",
            _without(loader, pace, part, _ready_seconds(loader)),
            where=loader.dataset_where,
            script="stoker pack …  # then read the store instead of decoding in __getitem__",
        )
    )


def disk_bound(case: Case) -> Finding | None:
    """Loading is mostly waiting for a disk or a network."""
    if case.feeding is None:
        return None
    loader, pace = case.feeding
    blocked = _blocked(loader)
    if loader.kind == "stoker":
        blocked = max(blocked, _share(loader, loader.work.read))
    if blocked < 0.5:
        return None
    return worthwhile(
        case.finding(
            "disk-bound",
            "loading waits for the disk",
            [
                case.wait_line(),
                f"{blocked:.0%} of the loading is waiting, not computing: a disk, a network or a sleep",
                f"a batch holds {format_bytes(loader.batch_bytes)}" if loader.batch_bytes else None,
                _work_line(loader),
                _line_line(loader),
            ],
            "Put the data on a local disk in large sequential files (`stoker pack`), so that a batch is one "
            "read instead of one per sample.",
            _without(loader, pace, blocked, _ready_seconds(loader)),
            where=loader.dataset_where,
            config={"gpu_optimization.use_chunk_loader": True} if loader.kind == "stoker" else {},
        )
    )


def augment_on_cpu(case: Case) -> Finding | None:
    """Per-sample augmentation on the host is what the step waits for."""
    if case.feeding is None:
        return None
    loader, pace = case.feeding
    part = _share(loader, loader.work.transform)
    if part < _DOMINANT:
        return None
    return worthwhile(
        case.finding(
            "augment-on-cpu",
            "samples are augmented one by one on the CPU",
            [
                case.wait_line(),
                f"transforms are {part:.0%} of the loading",
                _work_line(loader),
                _line_line(loader),
            ],
            "Augment whole batches where they are trained: on the GPU with stoker.augment, on a CPU with one "
            "call per batch.",
            _without(loader, pace, part, _ready_seconds(loader)),
            where=loader.busiest_line or loader.dataset_where,
            script="augment = stoker.GPUAugmentation(...)\nimages = augment(images)  # in the training loop",
            config={"training.use_gpu_augmentation": True} if loader.kind == "stoker" else {},
        )
    )


def python_collate(case: Case) -> Finding | None:
    """Making one batch out of samples is what the step waits for."""
    if case.feeding is None:
        return None
    loader, pace = case.feeding
    part = _share(loader, loader.work.collate)
    if part < _DOMINANT:
        return None
    place = loader.collate_where or "torch's default_collate"
    return worthwhile(
        case.finding(
            "python-collate",
            "putting samples together in Python takes the time",
            [
                case.wait_line(),
                f"collating is {part:.0%} of the loading, in {place}",
                _work_line(loader),
            ],
            "Give the dataset a `__getitems__` that indexes a whole batch at once, or stack arrays in one "
            "call instead of looping over values.",
            _without(loader, pace, part, _ready_seconds(loader)),
            where=loader.collate_where or loader.where,
            script="def __getitems__(self, indices):\n    return self.values[indices]",
        )
    )


def hdf5_compressed(case: Case) -> Finding | None:
    """h5py decompresses, behind one lock, what the step waits for."""
    if case.feeding is None:
        return None
    loader, pace = case.feeding
    data = _hdf5_cause(case, loader)
    if data is None or data.compression is None:
        return None
    plain = data.reads_per_batch * _HDF5_READ_SECONDS
    plain += data.bytes_used_per_batch / _HDF5_BYTES_PER_SECOND
    asked = max(data.bytes_touched_per_batch, data.bytes_used_per_batch)
    rate = asked / max(data.seconds_per_batch, 1e-9)
    return worthwhile(
        case.finding(
            "hdf5-compressed",
            "HDF5 data is decompressed at every read",
            [
                case.wait_line(),
                _hdf5_line(data),
                (
                    f"{data.compression} comes out at {format_bytes(rate)}/s; uncompressed data is read at about "
                    f"{format_bytes(_HDF5_BYTES_PER_SECOND)}/s"
                ),
            ],
            "Store the dataset uncompressed and contiguous (`stoker pack`), or with a fast codec in chunks of "
            "one batch.",
            _without(loader, pace, _hdf5_share(loader, data), plain),
            where=data.where,
            script="file.create_dataset(name, data=values)  # no compression=",
        )
    )


def hdf5_chunks(case: Case) -> Finding | None:
    """Every row that is read drags whole chunks along."""
    if case.feeding is None:
        return None
    loader, pace = case.feeding
    data = _hdf5_cause(case, loader)
    waste = data.bytes_read_per_byte_used if data else None
    if data is None or data.chunks is None or waste is None or waste < _WASTEFUL:
        return None
    fitting = data.reads_per_batch * _HDF5_READ_SECONDS
    if data.compression is None:
        fitting += data.bytes_used_per_batch / _HDF5_BYTES_PER_SECOND
    else:
        fitting += data.seconds_per_batch / waste
    return worthwhile(
        case.finding(
            "hdf5-chunks",
            "HDF5 chunks do not fit the way they are read",
            [
                case.wait_line(),
                _hdf5_line(data),
                (
                    f"{waste:.0f} bytes are read for every byte used: chunks of {_shape(data.chunks)} in a dataset "
                    f"of {_shape(data.shape)}"
                ),
            ],
            "Write the dataset contiguous, or in chunks of whole rows as they are read (`stoker pack` does).",
            _without(loader, pace, _hdf5_share(loader, data), fitting),
            where=data.where,
            script=f"file.create_dataset(name, data=values, chunks={(1, *data.shape[1:])})",
        )
    )


def workers_restarted(case: Case) -> Finding | None:
    """Workers are started again for every epoch, and epochs are short."""
    loader, pace = case.measured.loader, case.pace
    if loader is None or pace is None or loader.persistent_workers or loader.workers == 0:
        return None
    start, length = loader.epoch_start_seconds, loader.steps_per_epoch
    mean = case.measured.mean_step_seconds
    if loader.epoch_starts < 2 or not start or not length or not mean:
        return None
    lost = start / max(1.0, length / loader.batches_per_step)
    # The measured mean already holds the restarts that fell into the measured time.
    return worthwhile(
        case.finding(
            "workers-restarted",
            "workers are started again for every epoch",
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
            "Set persistent_workers=True in the DataLoader, so that workers outlive an epoch.",
            gain_of_steps(mean, mean - 0.6 * lost, mean - 0.9 * lost, mean - lost),
            loader_arguments={"persistent_workers": True},
            where=loader.where,
            script="DataLoader(..., persistent_workers=True)",
        )
    )


RULES: tuple[Rule, ...] = (
    no_workers,
    starved_by_loader,
    decode_bound,
    disk_bound,
    augment_on_cpu,
    python_collate,
    hdf5_compressed,
    hdf5_chunks,
    workers_restarted,
)


# -- words and small questions ---------------------------------------------------------------------


def _hdf5_cause(case: Case, loader: LoaderFacts) -> Hdf5Facts | None:
    """Return the HDF5 dataset whose reads are most of the loading; None when none is."""
    costliest = max(case.measured.hdf5, key=lambda data: data.seconds_per_batch, default=None)
    if costliest is None or _hdf5_share(loader, costliest) < _DOMINANT:
        return None
    wasteful = (costliest.bytes_read_per_byte_used or 0) >= _WASTEFUL
    return costliest if costliest.compression or wasteful else None


def _hdf5_share(loader: LoaderFacts, data: Hdf5Facts) -> float:
    return min(1.0, _share(loader, data.seconds_per_batch))


def _hdf5_line(data: Hdf5Facts) -> str:
    return (
        f"{data.name}: {data.reads_per_batch:.0f} reads and {milliseconds(data.seconds_per_batch)} per batch "
        f"for {data.bytes_used_per_batch / MB:.2g} MB{_at(data.where)}"
    )


def _cores_are_full(case: Case, loader: LoaderFacts) -> bool:
    busy = _busy_cores(loader)
    return loader.workers >= case.cores or (busy is not None and busy >= case.cores - 0.5)


def _cpu_words(loader: LoaderFacts) -> str:
    if not loader.worker_cpu_shares:
        return ""
    each = sum(loader.worker_cpu_shares) / len(loader.worker_cpu_shares)
    return f"; a worker keeps {each:.0%} of a core busy"


def _at(where: str | None) -> str:
    return f" at {where}" if where else ""


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(str(size) for size in shape)
