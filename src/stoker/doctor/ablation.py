"""Measures a stoker job whole and in parts: everything together, the loader alone, the step alone, the copy alone.

Enters: a `Run` that has not begun. Leaves: `Measurements`, with the spread of every reading. Costs a few times the
steps that are measured. The job trains in memory while it is measured; nothing is written.

"Together" is the job's own trainer and loader. The loader alone is the same loader without training. The step
alone is the same trainer on one batch that is already on the device. The difference between together and the step
alone is the cost of the data. The loader's work on one batch is also measured in parts: reading, decoding, gathering,
augmenting and copying, each a few times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import psutil
import torch
from h5py.h5z import FILTER_DEFLATE, FILTER_LZF

from stoker.config import Settings
from stoker.doctor.measurements import (
    Ablation,
    AllocatorFacts,
    BadValues,
    Hdf5Facts,
    HostCall,
    LoaderFacts,
    LoaderWork,
    MachineFacts,
    Measurements,
    MemoryFacts,
    TimelineSpan,
)
from stoker.doctor.probe.clocks import run_delay
from stoker.doctor.trace import measure_kernels
from stoker.loader.batch import Batch
from stoker.loader.loader import Loader
from stoker.machine import probe
from stoker.measure.jobs import (
    Timed,
    hold_batch,
    time_loader,
    time_step,
    time_together,
    warm_up_batches,
)
from stoker.measure.laps import Lap, Patience
from stoker.measure.readings import Spread
from stoker.recipes.run import Run
from stoker.report import Topic
from stoker.store.arrays import StoredArray
from stoker.train.losses import NonFiniteError
from stoker.train.oom import let_go
from stoker.train.precision import choose_precision

NUM_STEPS_DRAWN = 6
_SHOWN_TOPICS = (Topic.PRECISION, Topic.OPTIMIZER, Topic.STEP, Topic.ACTIVATIONS, Topic.MEMORY)
_ROUNDS = 2
"""Rounds in which all parts are measured in turn, so that a slow phase of the machine affects all of them."""
_LONG_SECONDS = 30.0
"""If the first round takes longer than this, there is no second one."""
_REPEATS = 7
_READ_BYTES = 32 << 20
_FILTERS = {FILTER_DEFLATE: "gzip", FILTER_LZF: "lzf"}


def default_patience(
    device: torch.device, steps: int | None = None, seconds: float | None = None
) -> Patience:
    """Return how long to measure. On a GPU the warm-up lasts until the step has been captured."""
    on_gpu = device.type == "cuda"
    return Patience(
        warm_up=warm_up_batches(device),
        steps=steps or (60 if on_gpu else 20),
        seconds=seconds or 4.0,
    )


# -- the whole examination -------------------------------------------------------------------------


class _Round(NamedTuple):
    together: Timed
    loader: Timed
    step: Timed
    trouble: NonFiniteError | None
    busy_cores: float
    memory: MemoryFacts


def _measure_parts(run: Run, patience: Patience, number: int) -> _Round:
    run.told.say(f"round {number} of {_ROUNDS}: everything together, then each part alone")
    host: list[int] = []
    on_device: list[int] = []
    process = psutil.Process()

    def look() -> None:
        """Record the memory in use, before each batch."""
        host.append(process.memory_info().rss)
        if run.device.type == "cuda":
            on_device.append(torch.cuda.memory_allocated(run.device))

    busy, wall = time.process_time(), time.perf_counter()
    together = time_together(run, patience, look)
    busy, wall = time.process_time() - busy, time.perf_counter() - wall
    trouble = together.trouble
    if trouble is not None:
        calm = run.with_settings(run.settings.changed({"training.nonfinite": "skip"}))
        together = time_together(calm, patience)
    loader = time_loader(run, patience, together.history.is_captured)
    step = time_step(run, patience, captured=together.history.is_captured)
    held = MemoryFacts.of(on_device, host, run.settings.training.gradient_accumulation_steps)
    return _Round(together, loader, step, trouble, busy / max(wall, 1e-9), held)


def _joined(timed: Sequence[Timed]) -> Timed:
    """Return one `Timed` with the laps of all rounds. History and phases, timed within a round, are the first's."""
    return replace(timed[0], laps=tuple(lap for each in timed for lap in each.laps))


def examine(run: Run, patience: Patience, subject: str) -> Measurements:
    """Measure the parts of a job that has not begun, alone and together, in turn.

    Raises:
        InputError: The job cannot be measured: no batch, no memory.
    """
    batches = run.settings.training.gradient_accumulation_steps
    counts = _allocator_counts(run.device)
    began = time.perf_counter()
    rounds = [_measure_parts(run, patience, 1)]
    allocator = _allocator_facts(run, counts, patience.most)
    while len(rounds) < _ROUNDS and time.perf_counter() - began < _LONG_SECONDS:
        rounds.append(_measure_parts(run, patience, len(rounds) + 1))
    together = _joined([each.together for each in rounds])
    step = _joined([each.step for each in rounds])
    batch = hold_batch(run)
    copied = _time_copy(batch, run.device)
    loader, hdf5 = _loader_facts(run, batch, rounds, copied)
    kernels = measure_kernels(run, patience.warm_up) if run.device.type == "cuda" else None
    seconds, waits = _per_step(together.laps, step, loader.work, batches, run.device)
    notes = [note.text for note in together.history.told if note.topic in _SHOWN_TOPICS]
    if loader.tier == "resident":
        notes.append(
            "data is resident: it was read once before the first step, and counts as no time here"
        )
    bad = [each.trouble.given for each in rounds if each.trouble is not None]
    looks = max(1, len(together.laps))
    return Measurements(
        subject=subject,
        kind="job",
        machine=_machine_facts(run, copied, batch),
        steps=len(seconds),
        seconds=sum(seconds),
        samples_per_step=_mean([lap.num_samples for lap in together.laps]) * batches,
        step_seconds=Spread.of(seconds),
        wait_seconds=Spread.of(waits),
        compute_seconds=Spread.of(a - b for a, b in zip(seconds, waits, strict=True)),
        backward_seconds=_phase(rounds, "backward", batches),
        optimizer_seconds=_phase(rounds, "optimizer", 1),
        loader=loader,
        kernels=kernels,
        allocator=allocator,
        # The round that grew least: memory that grows once and then stays is no leak.
        memory=min(
            (each.memory for each in rounds),
            key=lambda facts: (facts.host_bytes_per_step or 0) + (facts.device_bytes_per_step or 0),
        ),
        hdf5=hdf5,
        bad_values=(BadValues("loss", bad[0], len(bad), looks),) if bad else (),
        ablation=Ablation(
            loader_seconds=loader.alone_seconds,
            step_seconds=step.seconds,
            copy_seconds=copied,
            together_seconds=together.seconds,
            captured_step_seconds=step.seconds if step.history.is_captured else None,
            together_rate=together.rate(),
        ),
        precision=choose_precision(run.settings.training.precision, run.device, run.job.model).name,
        captured=together.history.is_captured if run.device.type == "cuda" else None,
        timeline=draw_timeline(together),
        notes=tuple(notes),
    )


def _per_step(
    laps: Sequence[Lap], step: Timed, work: LoaderWork, batches: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return (seconds, seconds of waiting for data) of every optimizer update.

    Gathering and augmenting a batch is work on the step's own device, not waiting. On a GPU the host waits for many
    reasons, so its wait counts at most as the time by which a step is slower than the step alone.
    """
    alone = step.seconds.median if step.seconds is not None and device.type == "cuda" else 0.0
    at_work = (work.collate or 0.0) + (work.transform or 0.0)
    waits = [
        max(0.0, min(lap.wait_seconds, lap.seconds - alone, lap.seconds) - at_work) for lap in laps
    ]
    starts = range(0, len(laps) - batches + 1, batches)
    seconds = [sum(lap.seconds for lap in laps[at : at + batches]) for at in starts]
    return seconds, [sum(waits[at : at + batches]) for at in starts]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _phase(rounds: Sequence[_Round], kind: str, batches: int) -> Spread | None:
    """Return the seconds per update of a phase, over all rounds as for steps: one round may have been disturbed."""
    return Spread.of(
        (end - start) * batches
        for each in rounds
        for name, start, end in each.together.phases
        if name == kind
    )


def _machine_facts(run: Run, copied: Spread | None, batch: Batch) -> MachineFacts:
    machine = probe(run.store.path)
    kind: Literal["cuda", "cpu"] = "cuda" if run.device.type == "cuda" else "cpu"
    num_bytes = sum(tensor.nbytes for tensor in batch.values())
    return MachineFacts(
        cores=machine.cores_usable,
        device=kind,
        device_name=torch.cuda.get_device_name(run.device) if kind == "cuda" else machine.cpu,
        torch=torch.__version__,
        pinned_bytes_per_second=num_bytes / copied.median if copied is not None else None,
        ram_free_bytes=machine.ram_available_bytes,
        device_free_bytes=torch.cuda.mem_get_info(run.device)[0] if kind == "cuda" else None,
    )


def _loader_facts(
    run: Run, batch: Batch, rounds: Sequence[_Round], copied: Spread | None
) -> tuple[LoaderFacts, tuple[Hdf5Facts, ...]]:
    hdf5: tuple[Hdf5Facts, ...] = ()
    with run.make_train_loader() as loader:
        collate, transform = _gather_and_augment(run, loader)
        read = decode = copy = blocked = 0.0
        if loader.tier != "resident":  # such data was read once, before the first step
            read, decode, blocked, hdf5 = _read(loader, len(batch.positions))
            copy = copied.median if copied else 0.0
        work = LoaderWork(read, decode, transform, collate, copy)
        facts = LoaderFacts(
            kind="stoker",
            workers=loader.store.threads,
            batch_size=loader.batch_size,
            pin_memory=run.device.type == "cuda",
            work=work,
            alone_seconds=_joined([each.loader for each in rounds]).seconds,
            blocked_share=blocked / max(work.total, 1e-12),
            main_cpu_share=_mean([each.busy_cores for each in rounds]),
            steps_per_epoch=len(loader),
            batches_per_step=float(run.settings.training.gradient_accumulation_steps),
            batch_bytes=sum(tensor.nbytes for tensor in batch.values()),
            where=run.store.name,
            tier=loader.tier,
        )
    let_go(run.device)
    return facts, hdf5


def _allocator_counts(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    stats = torch.cuda.memory_stats(device)
    return stats.get("num_alloc_retries", 0), stats.get("num_device_alloc", 0)


def _allocator_facts(run: Run, before: tuple[int, int], batches: int) -> AllocatorFacts:
    settings: Settings = run.settings
    calls = []
    training = settings.training
    if training.empty_cache_every_n_batches:
        where = settings.reasons["training.empty_cache_every_n_batches"]
        per_step = training.gradient_accumulation_steps / training.empty_cache_every_n_batches
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        # The call itself; asking the driver for the memory again costs more on top.
        began = time.perf_counter()
        torch.cuda.empty_cache()
        took = time.perf_counter() - began
        calls.append(HostCall(where, "empty_cache", per_step, per_step * took))
    if run.device.type != "cuda":
        return AllocatorFacts(empty_cache=tuple(calls))
    retries, allocs = _allocator_counts(run.device)
    return AllocatorFacts(
        (retries - before[0]) / max(1, batches),
        (allocs - before[1]) / max(1, batches),
        tuple(calls),
    )


def draw_timeline(timed: Timed) -> tuple[TimelineSpan, ...]:
    """Return the first few batches as spans: waits, steps, and the phases that were timed."""
    spans: list[TimelineSpan] = []
    drawn = timed.laps[:NUM_STEPS_DRAWN]
    for number, lap in enumerate(drawn):
        spans.append(TimelineSpan(number, "main", "wait", lap.began, lap.wait_seconds))
        rest = max(0.0, lap.seconds - lap.wait_seconds)
        start = lap.began + lap.wait_seconds
        spans.append(TimelineSpan(number, "main", "step", start, rest))
        spans += [
            TimelineSpan(number, "main", kind, begin, end - begin)
            for kind, begin, end in timed.phases
            if lap.began <= begin < lap.began + lap.seconds
        ]
    return tuple(spans)


# -- the work of the loader on one batch -----------------------------------------------------------


def _time_copy(batch: Batch, device: torch.device) -> Spread | None:
    """Return the seconds of copying a batch from pinned memory to the GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    num_bytes = sum(tensor.nbytes for tensor in batch.values())
    host = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    target = torch.empty_like(host, device=device)
    return Spread.of(_times(lambda: target.copy_(host, non_blocking=True), device))


def _gather_and_augment(run: Run, loader: Loader) -> tuple[float, float]:
    """Return the seconds of gathering a batch, and of augmenting it."""
    augmentation = run.drawn_augmentation or loader.augment
    indices = loader.index_batches()
    index = next(indices)

    def assemble() -> None:
        loader.assemble(index.indices, index.totals)

    loader.use_augmentation(None)
    gather = statistics.median(_times(assemble, loader.device))
    augmented = gather
    if augmentation is not None:
        loader.use_augmentation(augmentation)
        augmented = statistics.median(_times(assemble, loader.device))
    return gather, max(0.0, augmented - gather)


def _times(work: Callable[[], object], device: torch.device) -> list[float]:
    """Run `work` a few times and return the seconds of each; the first two runs are warm-up and left out."""
    took = []
    for _ in range(_REPEATS + 2):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return took[2:]


class _Rows(NamedTuple):
    """A range of rows of one stored array."""

    array: StoredArray
    first: int
    last: int

    @property
    def num_bytes(self) -> int:
        """Size of the decoded rows."""
        return (self.last - self.first) * self.array.location.row_bytes

    @property
    def chunk_rows(self) -> range:
        """Numbers of the chunks, along the first axis, that contain the rows."""
        height = (self.array.location.chunk_shape or (self.last - self.first,))[0]
        return range(self.first // height, -(-self.last // height))


def _read(loader: Loader, batch_size: int) -> tuple[float, float, float, tuple[Hdf5Facts, ...]]:
    """Read about 32 MiB of consecutive samples in one thread, and scale the times to one batch.

    Returns (seconds of reading, seconds of decoding, seconds of both spent off the CPU, layout of the datasets).
    """
    per_batch = max(1, sum(rows.num_bytes for rows in _rows(loader, 0, batch_size)))
    num_samples = min(len(loader.samples), batch_size * max(1, _READ_BYTES // per_batch))
    scale = batch_size / num_samples
    read = decode = 0.0
    facts = []
    waited = _idle_seconds()
    for rows in _rows(loader, 0, num_samples):
        raw, whole = _time_rows(rows)
        read += raw * scale
        decode += max(0.0, whole - raw) * scale
        if rows.array.location.layout != "contiguous":
            facts.append(_describe(rows, whole, scale))
    # Chunks were read twice, decoded and raw, but only the first time may have waited for the disk.
    waited = max(0.0, _idle_seconds() - waited) * scale
    return read, decode, min(waited, read), tuple(facts)


def _idle_seconds() -> float:
    """Return the seconds, plus a constant, in which this thread neither ran nor was queued for a core."""
    return time.perf_counter() - time.thread_time() - run_delay()


def _rows(loader: Loader, start: int, stop: int) -> Iterator[_Rows]:
    for column in loader.columns:
        low, high = column.extent(start, min(stop, len(loader.samples)))
        for values in column.values:
            for array, first, last, _ in values.spans(low, high):
                yield _Rows(array, first, last)


def _time_rows(rows: _Rows) -> tuple[float, float]:
    """Return (seconds of reading the stored bytes, seconds of reading and decoding the rows)."""
    began = time.perf_counter()
    rows.array.read(rows.first, rows.last)
    whole = time.perf_counter() - began
    location = rows.array.location
    if location.layout != "chunked":
        return whole, whole
    began = time.perf_counter()
    for row in rows.chunk_rows:
        for chunk in location.chunks_at(row):
            rows.array.read_stored(chunk)
    return min(whole, time.perf_counter() - began), whole


def _describe(rows: _Rows, seconds: float, scale: float) -> Hdf5Facts:
    location = rows.array.location
    used = rows.num_bytes * scale
    num_chunks = sum(len(location.chunks_at(row)) for row in rows.chunk_rows)
    return Hdf5Facts(
        name=f"{location.file}:{location.dataset}",
        shape=location.shape,
        chunks=location.chunk_shape or None,
        compression=next((_FILTERS[code] for code in location.filters if code in _FILTERS), None),
        bytes_used_per_batch=used,
        # A stoker loader reads samples in order, so every chunk is decoded once.
        bytes_touched_per_batch=used,
        seconds_per_batch=seconds * scale,
        reads_per_batch=(num_chunks or len(rows.chunk_rows)) * scale,
    )
