"""Findings about loading: disk, decoding, augmentation, collating, HDF5.

Enters: a `Case`. Leaves: a finding or None. Costs nothing; pure.

The constants `_CAUTIOUS` and `_LIKELY` are the shares of a cost that remain after its remedy. The first one is large,
because the doctor cannot know how well data will be packed or an augmentation rewritten.
"""

from __future__ import annotations

from stoker.doctor.cases import WORTHWHILE, Case, Rule, at, milliseconds, while_waiting
from stoker.doctor.findings import Finding, Gain
from stoker.doctor.gains import (
    Pace,
    crowded_seconds,
    gain,
    gain_of_steps,
    hand_over_seconds,
    suggested_workers,
    worth,
)
from stoker.doctor.measurements import NOTABLE_BETWEEN, Hdf5Facts, LoaderFacts
from stoker.units import MB, format_bytes, format_count

_CAUTIOUS, _LIKELY = 0.30, 0.05
"""Shares of a removed cost that remain: cautious and likely estimates."""
_DOMINANT = 0.4
"""A part of loading is named as the cause if it takes at least this share of the loading time."""
_LEAST_BETWEEN_SECONDS = 1e-4
"""Sampling cannot measure less: the sampling thread gets Python's lock mostly where a line writes or waits."""
_NOTABLE_LINE = 0.03
"""If the costliest line takes less than this share of a step, no single line is worth improving."""
_OWN_DATA = (
    "What needs the results of earlier steps, as a replay buffer does, cannot run ahead: index arrays there, in one "
    "call, instead of making tensors of lists."
)
_MOSTLY, _LEAST_ONE_BY_ONE, _INDEXED = 0.75, 0.3, 0.15
"""Samples made one by one are a cause from this share of loading and this share of a step; indexing whole tensors takes
the last share of their time (measured: 0.11 to 0.25)."""
_WHOLE_BATCHES = (
    "Give the dataset a `__getitems__` that indexes a whole batch, and the DataLoader "
    "collate_fn=default_convert of torch.utils.data"
)
_WHOLE_BATCHES_EDIT = (
    "def __getitems__(self, indices):  # in the dataset, where x and y hold all samples\n"
    "    return self.x[indices], self.y[indices]\n"
    "DataLoader(..., collate_fn=torch.utils.data.default_convert)  # it is a batch already"
)
_DECODE_PICTURES = (
    (
        "Decode once instead of every epoch: `stoker pack images FOLDER OUT` stores the decoded values of class "
        "folders, and batches are then copies. Photographs that do not fit into memory as pixels can stay compressed: "
        "with `stoker pack images FOLDER OUT --keep-encoded` the loader decodes them ahead, on a GPU in batches, and "
        "`stoker plan OUT` says which is better here."
    ),
    (
        "stoker pack images FOLDER OUT --size 224x224  # or --keep-encoded; then stoker.Loader('OUT', 64) "
        "instead of decoding in __getitem__"
    ),
)
_DECODE_ONCE = (
    (
        "Decode once instead of every epoch: `stoker.pack_from(dataset, 'OUT')` stores what __getitem__ returns, "
        "before anything random, and stoker.Loader('OUT', 64) copies batches of it."
    ),
    "stoker.pack_from(dataset, 'OUT')  # once; then stoker.Loader('OUT', 64) in the place of the DataLoader",
)
"""Remedy and edit for decoding of pictures, and of anything else."""
_OVERLAP = 0.95
"""Share of their time in which workers work in parallel."""
_LEAST_REST = 0.05
"""Least share of a step that is assumed to remain without the code between the model's calls."""
_PLAIN_READ_BYTES_PER_SECOND = 1.0e9
"""Rate of reading decoded samples from a file in memory or on a local disk."""
_HDF5_READ_SECONDS = 80e-6
"""Fixed cost of one h5py slice of contiguous, uncompressed data (measured: 60 to 170 µs)."""
_HDF5_BYTES_PER_SECOND = 2.0e9
_WASTEFUL = 4.0
"""From this number of bytes read per byte used, the chunks are reported as unfit."""

NAMED_CAUSES = frozenset({
    "decode-bound", "disk-bound", "augment-on-cpu", "python-collate", "hdf5-chunks", "hdf5-compressed",
})  # fmt: skip


def _without(loader: LoaderFacts, pace: Pace, part: float, residue: float = 0.0) -> Gain:
    """Return the gain of removing the share `part` of loading; at least `residue` seconds per batch of it remain."""
    left = pace.load * (1 - part)
    removed = pace.load * part
    residue *= loader.batches_per_step
    low, likely, high = (
        pace.loading(left + min(removed, residue + removed * kept))
        for kept in (_CAUTIOUS, _LIKELY, 0.0)
    )
    return gain(pace, likely, low, high)


def _ready_seconds(loader: LoaderFacts) -> float:
    """Return the seconds that reading a batch would take if its values were stored decoded."""
    return (loader.batch_bytes or 0) / _PLAIN_READ_BYTES_PER_SECOND


def _kept_line(case: Case, loader: LoaderFacts, pace: Pace) -> str | None:
    """Return a line on the step if threads decoded ahead and loading cost nothing else; None if the gain is small."""
    decode = loader.work.decode
    if not loader.decodes_pictures or not decode:
        return None
    kept = pace.loading(decode * loader.batches_per_step, active_workers=case.cores)
    times = pace.step / max(kept.step, 1e-9)
    if times < WORTHWHILE:
        return None
    rate = loader.batch_size / decode if loader.batch_size else None
    measured = f"a core decodes {rate:,.0f} samples a second; " if rate else ""
    return (
        f"{measured}photographs kept as files and decoded ahead by {case.cores} threads, a step would take "
        f"{milliseconds(kept.step)} ({times:.2g} times as fast), and less where a GPU decodes"
    )


@while_waiting
def decode_bound(case: Case, loader: LoaderFacts, pace: Pace) -> Finding | None:
    """Decoding samples keeps every core busy."""
    part = loader.work.share((loader.work.decode or 0) + (loader.work.other or 0))
    if loader.kind == "stoker":
        part = loader.work.share(loader.work.decode)
    else:
        busy = loader.busy_cores
        full = loader.workers >= case.cores or (busy is not None and busy >= case.cores - 0.5)
        if loader.workers == 0 or not full:
            return None
    if (
        part < _DOMINANT
        or (loader.blocked_share or 0.0) >= 0.5
        or _hdf5_cause(case, loader) is not None
    ):
        return None
    remedy, edit = (
        _DECODE_PICTURES if loader.decodes_pictures or loader.kind == "stoker" else _DECODE_ONCE
    )
    return case.advise(
        "decode-bound",
        "decoding samples keeps the cores busy",
        [
            case.wait_line(),
            f"{format_count(loader.workers, 'worker')} on {case.cores} cores{case.cpu_words()}",
            case.work_line(),
            case.busiest_line(),
            _kept_line(case, loader, pace),
        ],
        remedy,
        _without(loader, pace, part, _ready_seconds(loader)),
        where=loader.dataset_where,
        script=edit,
    )


@while_waiting
def disk_bound(case: Case, loader: LoaderFacts, pace: Pace) -> Finding | None:
    """Most of loading is waiting for a disk or a network."""
    blocked = loader.blocked_share or 0.0
    if loader.kind == "stoker":
        blocked = max(blocked, loader.work.share(loader.work.read))
    if blocked < 0.5:
        return None
    return case.advise(
        "disk-bound",
        "loading waits for the disk",
        [
            case.wait_line(),
            f"{blocked:.0%} of the loading is waiting, not computing: a disk, a network or a sleep",
            f"a batch holds {format_bytes(loader.batch_bytes)}" if loader.batch_bytes else None,
            case.work_line(),
            case.busiest_line(),
        ],
        "Put the data on a local disk in large sequential files (`stoker pack`), so that a batch is one "
        "read instead of one per sample.",
        _without(loader, pace, blocked, _ready_seconds(loader)),
        where=loader.dataset_where,
        config={"data.use_chunk_loader": True} if loader.kind == "stoker" else {},
    )


@while_waiting
def augment_on_cpu(case: Case, loader: LoaderFacts, pace: Pace) -> Finding | None:
    """The step waits for augmentation of single samples on the CPU."""
    part = loader.work.share(loader.work.transform)
    if part < _DOMINANT:
        return None
    return case.advise(
        "augment-on-cpu",
        "samples are augmented one by one on the CPU",
        [
            case.wait_line(),
            f"transforms are {part:.0%} of the loading",
            case.work_line(),
            case.busiest_line(),
        ],
        "Augment whole batches where they are trained: on the GPU with stoker.augment, on a CPU with one "
        "call per batch.",
        _without(loader, pace, part, _ready_seconds(loader)),
        where=loader.busiest_line or loader.dataset_where,
        script="augment = stoker.GPUAugmentation(...)\nimages = augment(images)  # in the training loop",
        config={"training.use_gpu_augmentation": True} if loader.kind == "stoker" else {},
    )


@while_waiting
def python_collate(case: Case, loader: LoaderFacts, pace: Pace) -> Finding | None:
    """The step waits for samples to be collated into a batch."""
    part = loader.work.share(loader.work.collate)
    if part < _DOMINANT:
        return _made_one_by_one(case, loader, pace)
    place = loader.collate_where or "torch's default_collate"
    return case.advise(
        "python-collate",
        "putting samples together in Python takes the time",
        [
            case.wait_line(),
            f"collating is {part:.0%} of the loading, in {place}",
            case.work_line(),
        ],
        f"{_WHOLE_BATCHES}, or stack arrays in one call instead of looping over values.",
        _without(loader, pace, part, _ready_seconds(loader)),
        where=loader.collate_where or loader.where,
        script=_WHOLE_BATCHES_EDIT,
    )


def _made_one_by_one(case: Case, loader: LoaderFacts, pace: Pace) -> Finding | None:
    """Return the finding for samples that cost much beside the step, and too little for workers to help."""
    work = loader.work
    part = work.share((work.collate or 0) + (work.other or 0))
    # What a process queues for a core behind other programs is part of the wait, not of the loading.
    busy = loader.alone_seconds.median * loader.batches_per_step if loader.alone_seconds else 0.0
    wait = min(case.measured.wait_share or 0.0, busy / pace.step)
    if loader.kind != "torch" or loader.workers or part < _MOSTLY or wait < _LEAST_ONE_BY_ONE:
        return None
    if loader.is_stream or (loader.blocked_share or 0.0) >= 0.5:
        return None
    workers = suggested_workers(pace.load, pace.compute, case.cores, 0.0)
    beside = pace.load / (_OVERLAP * worth(workers, case.measured.machine))
    if pace.step >= WORTHWHILE * max(beside, pace.compute + hand_over_seconds(loader)):
        return None
    low, likely, high = (
        pace.loading(pace.load * (1 - part * (1 - kept))) for kept in (0.5, _INDEXED, _LIKELY)
    )
    return case.advise(
        "python-collate",
        "samples are made one by one in Python",
        [case.wait_line(), case.work_line(), case.busiest_line()],
        f"{_WHOLE_BATCHES}, from tensors of all samples made once, before the training; workers bring nothing.",
        gain(pace, likely, low, high),
        where=loader.busiest_line or loader.dataset_where or loader.where,
        script=_WHOLE_BATCHES_EDIT,
    )


@while_waiting
def hdf5_compressed(case: Case, loader: LoaderFacts, pace: Pace) -> Finding | None:
    """The step waits for h5py to decompress data, behind one lock per process."""
    data = _hdf5_cause(case, loader)
    if data is None or data.compression is None:
        return None
    plain = data.reads_per_batch * _HDF5_READ_SECONDS
    plain += data.bytes_used_per_batch / _HDF5_BYTES_PER_SECOND
    asked = max(data.bytes_touched_per_batch, data.bytes_used_per_batch)
    rate = asked / max(data.seconds_per_batch, 1e-9)
    return _stored_otherwise(
        case, loader, pace, data,
        "hdf5-compressed",
        "HDF5 data is decompressed at every read",
        f"{data.compression} comes out at {format_bytes(rate)}/s; uncompressed data is read at about "
        f"{format_bytes(_HDF5_BYTES_PER_SECOND)}/s",
        "Store the dataset uncompressed and contiguous (`{pack}`), or with a fast codec in chunks of one batch.",
        plain,
        "data=values)  # no compression=",
    )  # fmt: skip


@while_waiting
def hdf5_chunks(case: Case, loader: LoaderFacts, pace: Pace) -> Finding | None:
    """Reading a row reads whole chunks, and most of their bytes are not used."""
    data = _hdf5_cause(case, loader)
    waste = data.bytes_read_per_byte_used if data else None
    if data is None or data.chunks is None or waste is None or waste < _WASTEFUL:
        return None
    fitting = data.reads_per_batch * _HDF5_READ_SECONDS
    if data.compression is None:
        fitting += data.bytes_used_per_batch / _HDF5_BYTES_PER_SECOND
    else:
        fitting += data.seconds_per_batch / waste
    return _stored_otherwise(
        case, loader, pace, data,
        "hdf5-chunks",
        "HDF5 chunks do not fit the way they are read",
        f"{waste:.0f} bytes are read for every byte used: chunks of {_shape(data.chunks)} in a dataset "
        f"of {_shape(data.shape)}",
        "Write the dataset contiguous, or in chunks of whole rows as they are read (`{pack}` does).",
        fitting,
        f"data=values, chunks={(1, *data.shape[1:])})",
    )  # fmt: skip


def _stored_otherwise(
    case: Case, loader: LoaderFacts, pace: Pace, data: Hdf5Facts,
    name: str, title: str, evidence: str, remedy: str, residue: float, create: str,
) -> Finding | None:  # fmt: skip
    """Advise to store a dataset otherwise; reading a batch of it then takes `residue` seconds."""
    pack, call = case.packed_instead()
    read = f"{data.reads_per_batch:.0f} reads and {milliseconds(data.seconds_per_batch)} per batch"
    used = f"{data.bytes_used_per_batch / MB:.2g} MB"
    return case.advise(
        name,
        title,
        [case.wait_line(), f"{data.name}: {read} for {used}{at(data.where)}", evidence],
        remedy.format(pack=pack or "stoker pack"),
        _without(loader, pace, _hdf5_share(loader, data), residue),
        where=loader.where,
        script=pack or f"# where the file is written:\nfile.create_dataset(name, {create}",
        replacement=call,
    )


def slow_between_steps(case: Case) -> Finding | None:
    """Code between the model's calls, such as a hand-made `get_batch`, takes a notable part of the step."""
    between, pace = case.measured.between_seconds, case.pace
    if between is None or pace is None or case.share_of_step(between) < NOTABLE_BETWEEN:
        return None
    if between < _LEAST_BETWEEN_SECONDS:
        return None
    if not case.measured.between_loads and case.measured.between:
        costliest = case.measured.between[0].seconds_per_step
        if case.share_of_step(costliest) < _NOTABLE_LINE:
            return None  # a loss or a metric of many lines, each of them short
    # Both without the time queued for a core, whose share is the same in a step and in its parts.
    step, between = pace.step, case.share_of_step(between) * pace.step
    # Samples only give shares. The clock measures a small model better, and its time is never 0.
    timed = (case.measured.backward_seconds, case.measured.optimizer_seconds)
    known = sum(spread.median for spread in timed if spread is not None)
    # A GPU computes while the host is there, so no remedy makes a step shorter than its kernels.
    rest = max(step - between, known, _LEAST_REST * step, pace.device_busy)
    workers = suggested_workers(between, rest, case.cores, 0.0)
    machine = case.measured.machine
    handed, busy = hand_over_seconds(LoaderFacts()), step * (case.measured.busy_cores or 0.0)
    beside = rest + handed
    own = max(0.0, busy - between) + handed
    divided = max(
        between / (_OVERLAP * worth(workers, machine)),
        beside + crowded_seconds(own, between, beside, workers, machine),
        (_OVERLAP * busy + handed) / worth(case.cores, machine),
    )
    lines = [
        f"{line.where}: {milliseconds(line.seconds_per_step)} per step "
        f"({case.share_of_step(line.seconds_per_step):.0%})"
        for line in case.measured.between[:3]
    ]
    # Other work than loading, such as logging, can be left out of most steps.
    likely, cautious = rest + _LIKELY * between, max(rest, between)
    if case.measured.between_loads:
        # One background thread still needs the whole time; workers divide it, on cores that may be worth less.
        likely, cautious = divided, max(cautious, 1.25 * divided)
    if not case.measured.between_loads:
        remedy = (
            "Do this work in fewer steps, in one call for a whole batch, or in another process while the model "
            "computes; log every 50 steps."
        )
        script = ""
    else:
        ahead = 'stoker.prefetch(batches, "cuda")'
        prefetch = f", or iterate over {ahead}" if case.on_gpu else ""
        remedy = (
            "Do this work while the model computes: move loading into a Dataset for a DataLoader with "
            f"num_workers={workers}{prefetch}; log every 50 steps. {_OWN_DATA}"
        )
        script = f"DataLoader(dataset, num_workers={workers})  # its __getitem__ does what is done here now"
        if case.on_gpu:
            script = f"for batch in {ahead}:  # a generator of what is made here now"
    return case.advise(
        "slow-between-steps",
        "the step waits for code between the model's calls",
        [
            (
                f"of a step of {milliseconds(step)}, {milliseconds(between)} ({case.share_of_step(between):.0%}) "
                "is spent outside of the model, its backward pass and the optimizer"
            ),
            *lines,
        ],
        remedy,
        gain_of_steps(step, cautious, likely, rest),
        where=case.measured.between[0].where if case.measured.between else None,
        script=script,
    )


RULES: tuple[Rule, ...] = (
    slow_between_steps,
    decode_bound,
    disk_bound,
    augment_on_cpu,
    python_collate,
    hdf5_compressed,
    hdf5_chunks,
)


# -- HDF5 ------------------------------------------------------------------------------------------


def _hdf5_cause(case: Case, loader: LoaderFacts) -> Hdf5Facts | None:
    """Return the HDF5 dataset whose slow reads dominate loading; None if there is none."""
    costliest = max(case.measured.hdf5, key=lambda data: data.seconds_per_batch, default=None)
    if costliest is None or _hdf5_share(loader, costliest) < _DOMINANT:
        return None
    wasteful = (costliest.bytes_read_per_byte_used or 0) >= _WASTEFUL
    return costliest if costliest.compression or wasteful else None


def _hdf5_share(loader: LoaderFacts, data: Hdf5Facts) -> float:
    return min(1.0, loader.work.share(data.seconds_per_batch))


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(str(size) for size in shape)
