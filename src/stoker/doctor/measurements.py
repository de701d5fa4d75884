"""The measurements of a stoker job or a script, as plain frozen values.

Enters: figures from an ablation or from an attached script. Leaves: `Measurements`, also as JSON and back. Costs
nothing. No torch here: rules, pages and the command line use these values without it.

Seconds are wall-clock seconds of the training process unless the name says otherwise; "per step" is one
optimizer update, "per batch" one batch from the loader. A reading that was not taken is None.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from stoker.errors import CorruptError
from stoker.measure.readings import Spread

FORMAT_VERSION = 1
OPERATOR_SECONDS = 40e-6
"""Upper bound for calling one operator of torch, including its Python code."""
NOTABLE_BETWEEN = 0.12
"""Share of a step spent between the model's calls from which it is a finding; from half of it a note tells."""


@dataclass(frozen=True)
class MachineFacts:
    """Facts of the machine that the rules use.

    Attributes:
        cores: Cores that the job may use.
        physical_cores: Of these, how many are not the second thread of another one; None if unknown.
        cores_worth: Work that all of them do at once, in single threads; less than `cores` if threads share a
            physical core, as on most rented machines, which do not tell. None if it was not measured.
        device: Where the step computes: "cuda" or "cpu".
        device_name: The vendor's name for it.
        torch: Version of torch.
        pinned_bytes_per_second: Copy rate from pinned memory to the device, if measured.
        ram_free_bytes: Free host memory when the measurement began.
        device_free_bytes: Free device memory when the measurement began.
    """

    cores: int | None = None
    physical_cores: int | None = None
    cores_worth: float | None = None
    device: Literal["cuda", "cpu"] = "cpu"
    device_name: str | None = None
    torch: str | None = None
    pinned_bytes_per_second: float | None = None
    ram_free_bytes: int | None = None
    device_free_bytes: int | None = None


@dataclass(frozen=True)
class LoaderWork:
    """Seconds that one loading process works on one batch, by kind of work.

    Attributes:
        read: Reading bytes: files, HDF5 without its decompression where that is known, sockets.
        decode: Decoding bytes: images, archives, parsing.
        transform: Augmentation and preprocessing of samples.
        collate: Putting samples together into a batch.
        copy: Moving the batch: pinning, shared memory, to the device.
        other: The rest of the dataset's code.
    """

    read: float | None = None
    decode: float | None = None
    transform: float | None = None
    collate: float | None = None
    copy: float | None = None
    other: float | None = None

    @property
    def total(self) -> float:
        """Sum of the known parts."""
        return float(sum(value for value in dataclasses.asdict(self).values() if value is not None))


@dataclass(frozen=True)
class LoaderFacts:
    """The loader that feeds the step.

    Attributes:
        kind: "torch" for a DataLoader, "stoker" for stoker's own.
        workers: Loading processes; 0 if the training process loads. For stoker's own loader: threads.
        batch_size: Samples per batch as configured.
        pin_memory: Whether batches arrive in pinned memory.
        persistent_workers: Whether workers live longer than an epoch.
        prefetch_factor: Batches that each worker loads ahead.
        start_method: "fork", "spawn" or "forkserver".
        work: The work on one batch by kind, in one loading process.
        alone_seconds: Seconds of one batch in one loading process (torch), or of the whole loader without
            training (stoker).
        sample_seconds: Seconds of one more sample in a batch, if samples are fetched one by one.
        blocked_share: Share of `alone_seconds` that was not computing: a disk, a network, a sleep.
        queued_share: Share of the time of a fetch in which the loading process was ready and no core was
            free; not part of `alone_seconds`.
        is_stream: Whether its dataset is an IterableDataset, which every worker reads whole unless the dataset
            divides itself.
        crowding_share: Share of a step in which the training queued for a core behind loading processes; part
            of the wait for data.
        worker_cpu_shares: Share of one core that each worker kept busy.
        main_cpu_share: Number of cores that the training process kept busy.
        epoch_starts: Iterators made within the measured time.
        counted_starts: How many of these fell into counted steps; a step with a validation in it is not counted.
        epoch_start_seconds: From asking for an iterator to its first batch, beyond a usual wait.
        steps_per_epoch: Batches per epoch, if the loader has a length.
        batches_per_step: Above 1 if gradients are accumulated.
        batch_bytes: Size of the tensors of one batch.
        where: file:line where the loader was made.
        dataset_where: file:line of the dataset's `__getitem__`.
        collate_where: file:line of a collate function that is not torch's own.
        busiest_line: file:line of the user's code in which most of the loading time was sampled.
        busiest_share: Share of the loading time on that line.
        tier: Tier of a stoker plan: "resident", "chunked" or "streamed".
        open_hdf5: Attribute and file name of an HDF5 file that the dataset holds open, which forked workers would
            share; empty if there is none.
        in_order: Whether samples come in the order of the dataset.
    """

    kind: Literal["torch", "stoker"] = "torch"
    workers: int = 0
    batch_size: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    start_method: str | None = None
    work: LoaderWork = field(default_factory=LoaderWork)
    alone_seconds: Spread | None = None
    sample_seconds: Spread | None = None
    blocked_share: float | None = None
    queued_share: float | None = None
    crowding_share: float | None = None
    is_stream: bool = False
    worker_cpu_shares: tuple[float, ...] = ()
    main_cpu_share: float | None = None
    epoch_starts: int = 0
    counted_starts: int | None = None
    epoch_start_seconds: float | None = None
    steps_per_epoch: int | None = None
    batches_per_step: float = 1.0
    batch_bytes: int | None = None
    where: str | None = None
    dataset_where: str | None = None
    collate_where: str | None = None
    busiest_line: str | None = None
    busiest_share: float | None = None
    tier: str | None = None
    open_hdf5: tuple[str, ...] = ()
    in_order: bool = False


@dataclass(frozen=True)
class HostCall:
    """A line that fetches from or waits for the device, or does housekeeping such as `gc.collect`.

    Attributes:
        where: file:line.
        call: Name of the call: "item", "cpu", "tolist", "numpy", "bool", "synchronize", "gc.collect", ...
        calls_per_step: Number of calls.
        seconds_per_step: Time spent there; a loop of fetches counts with the time between them.
        in_model: Whether the forward pass of a module calls it.
    """

    where: str
    call: str
    calls_per_step: float
    seconds_per_step: float
    in_model: bool = False


@dataclass(frozen=True)
class DeviceCopy:
    """A line that copies memory to the device, and the host waits for it.

    Attributes:
        where: file:line.
        bytes_per_step: Bytes copied.
        seconds_per_step: Time that the host spent there.
        calls_per_step: Number of calls.
        pinned: Whether the memory is pinned, so that the copy need not block; it is pageable otherwise.
    """

    where: str
    bytes_per_step: float
    seconds_per_step: float
    calls_per_step: float = 1.0
    pinned: bool = False


@dataclass(frozen=True)
class KernelFacts:
    """Kernels of a few steps, from the profiler.

    Attributes:
        per_step: Number of kernels.
        mean_seconds: Mean duration of a kernel.
        busy_share: Share of the step in which at least one kernel ran (the union of their intervals).
    """

    per_step: float
    mean_seconds: float
    busy_share: float


@dataclass(frozen=True)
class OperatorFacts:
    """torch's operators on the host in a few steps, from the profiler. Seconds are per step.

    Attributes:
        per_step: Number of operators, nested ones not counted.
        work_seconds: Time explained by the sizes of the tensors, which grows with the batch or the weights. The
            rest is the cost of calling operators.
        weight_seconds: The part of it that grows with the weights only: the optimizer's.
        double_seconds: Time in operators on float64.
        matmul_seconds: Time in matrix products and convolutions, by dtype.
        num_rows: Most rows that a matrix product of the forward pass multiplies. 1 means that the model is called
            with one sample at a time; a larger number may be that of weights or of pixels.
        double_product_seconds: Of the kernels on float64, matrix products and convolutions; None without a GPU.
        double_times: How many times as long a product in float64 takes on this GPU as in float32; None if not measured.
    """

    per_step: float
    work_seconds: float
    weight_seconds: float | None = None
    double_seconds: float | None = None
    matmul_seconds: Mapping[str, float] = field(default_factory=dict)
    num_rows: int | None = None
    double_product_seconds: float | None = None
    double_times: float | None = None


@dataclass(frozen=True)
class AllocatorFacts:
    """The device's caching allocator; None on a CPU.

    Attributes:
        retries_per_step: How often the cache was flushed to find room.
        device_allocs_per_step: Calls to the driver for memory.
        empty_cache: Calls of `empty_cache` by line, on a CPU too, where they do nothing.
    """

    retries_per_step: float | None = None
    device_allocs_per_step: float | None = None
    empty_cache: tuple[HostCall, ...] = ()


@dataclass(frozen=True)
class MemoryFacts:
    """Memory over the measured steps, without the first quarter.

    Attributes:
        device_bytes_per_step: Steady growth of allocated device memory; 0 if it does not grow.
        host_bytes_per_step: Steady growth of resident host memory; 0 if it does not grow.
        device_bytes: Device memory in use at the end.
        host_bytes: Host memory in use at the end.
    """

    device_bytes_per_step: float | None = None
    host_bytes_per_step: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True)
class Hdf5Facts:
    """How one HDF5 dataset is read.

    Attributes:
        name: Path of the file and of the dataset in it.
        shape: Shape of the dataset.
        chunks: Chunk shape; None if it is contiguous.
        compression: "gzip", "lzf", ...; None if it is not compressed.
        bytes_used_per_batch: Bytes that the reads of one batch return.
        bytes_touched_per_batch: Bytes of the chunks that had to be read and decompressed for them, without
            those that the chunk cache of one process can hold.
        seconds_per_batch: Time of these reads.
        reads_per_batch: Number of reads.
        where: file:line of the reads.
    """

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    compression: str | None
    bytes_used_per_batch: float
    bytes_touched_per_batch: float
    seconds_per_batch: float
    reads_per_batch: float
    where: str | None = None

    @property
    def bytes_read_per_byte_used(self) -> float | None:
        """Bytes read for every byte used; 1 is ideal."""
        return (
            self.bytes_touched_per_batch / self.bytes_used_per_batch
            if self.bytes_used_per_batch
            else None
        )


@dataclass(frozen=True)
class RankFacts:
    """One process of a data-parallel job.

    Attributes:
        rank: Number of the rank.
        step_seconds: Duration of a step; nearly equal on all ranks, because they wait for each other.
        own_seconds: The part of a step in which it does not wait for other ranks.
    """

    rank: int
    step_seconds: float
    own_seconds: float


@dataclass(frozen=True)
class LongSteps:
    """A few steps that take much longer than the others: a rollout, a plot, an export.

    Attributes:
        count: How many.
        seconds: By how much they are longer, all together, without evaluation, waiting for data and saving.
        share: That as a share of the time of all counted steps.
        outside_share: Share of it outside of the model, its backward pass and the optimizer.
        lines: Places at which they were sampled, with shares of their time, the largest first.
    """

    count: int
    seconds: float
    share: float
    outside_share: float
    lines: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class BadValues:
    """Values that are not finite.

    Attributes:
        what: "batch", "loss", ... or a field's name.
        where: file:line, or a field and row.
        count: Number of checks that found any.
        looks: Number of checks.
    """

    what: str
    where: str | None
    count: int
    looks: int


@dataclass(frozen=True)
class TimelineSpan:
    """A span of time in a few steps, for drawing.

    Attributes:
        step: Counted from the first step drawn.
        lane: "main", "worker 0", "device", ...
        kind: "step", "wait", "forward", "backward", "optimizer", "sync", "copy", "kernels", "load".
        start_seconds: Start, since the beginning of the first step drawn.
        seconds: Duration.
    """

    step: int
    lane: str
    kind: str
    start_seconds: float
    seconds: float


@dataclass(frozen=True)
class Alternative:
    """A change of a job's config that is worth trying, and the whole job measured with it.

    Attributes:
        finding: Name of the finding whose remedy it is.
        changes: Dotted keys of the config with their new values.
        reason: Why it was tried, in words.
        samples_per_second: Its rate; None if it was not tried or could not run.
        failure: Why it could not run.
    """

    finding: str
    changes: Mapping[str, Any]
    reason: str
    samples_per_second: Spread | None = None
    failure: str = ""


@dataclass(frozen=True)
class Ablation:
    """Parts of a stoker job that were measured alone.

    Attributes:
        loader_seconds: Per batch, without training.
        step_seconds: Per step, on one batch that stays on the device.
        copy_seconds: Per batch, host to device.
        together_seconds: Per step, everything.
        captured_step_seconds: Like `step_seconds`, replayed as a CUDA graph.
        larger_batches: Step alone for larger batches: (size, seconds per step).
        together_rate: Samples per second of everything together, to compare with the alternatives.
        alternatives: Other settings that were tried.
    """

    loader_seconds: Spread | None = None
    step_seconds: Spread | None = None
    copy_seconds: Spread | None = None
    together_seconds: Spread | None = None
    captured_step_seconds: Spread | None = None
    larger_batches: tuple[tuple[int, float], ...] = ()
    together_rate: Spread | None = None
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Measurements:
    """All input of the rules.

    Attributes:
        subject: The command or the config that was measured, as the user wrote it.
        kind: "script" or "job" (stoker's own, from a config).
        machine: The machine.
        steps: Number of measured steps, without warm-up.
        seconds: Their duration.
        samples_per_step: Samples per step of one process.
        step_seconds: From one optimizer update to the next.
        wait_seconds: Part of a step spent waiting for data (loading it, if there are no workers).
        compute_seconds: The rest of the step.
        backward_seconds: Part of the compute in `backward`.
        optimizer_seconds: Part of the compute in the optimizer.
        loader: The loader; None if the script uses no DataLoader.
        syncs: Lines that make the host wait, costliest first.
        copies: Copies to the device, costliest first.
        kernels: Kernels; None without a GPU.
        operators: Operators; None if the profiler could not run.
        allocator: The device's allocator.
        memory: Growth of memory.
        host_calls: `gc.collect` and `torch.save` by line.
        between: Lines outside of the model, its backward pass and the optimizer at which the training thread was
            sampled, costliest first; time that is measured otherwise (a DataLoader, copies, syncs) is not in it.
        between_seconds: Their time per step, all lines together; None if it was not sampled.
        between_loads: Whether most of it looks like loading, which workers could do; otherwise it is code that
            could run rarely or not at all, such as logging.
        evaluation_seconds: Part of a usual step from `model.eval()` to `model.train()`; 0 if it has none.
        evaluation_where: Line that calls `eval()`.
        python_seconds: Part of a usual step in which the forward pass runs Python code and no operator.
        python_lines: Lines of modules at which the training thread was sampled, the most frequent first.
        long_steps: What a few steps do that take much longer than the others; None if that is little.
        busy_cores: Cores that the training process kept busy; None if unknown.
        hdf5: Datasets read through h5py, costliest first.
        ranks: Ranks of a data-parallel job; empty for one process.
        bad_values: Values that are not finite.
        ablation: Parts measured alone; only for stoker's own jobs.
        precision: Precision of the step ("fp32", "bf16", ...), if known.
        captured: Whether the step is replayed as a CUDA graph.
        elsewhere_share: Share of the time since the first step that went to other DataLoaders, to evaluation now
            and then, to a few long steps, or came after the last step; it is in no other figure.
        timeline: A few steps, for drawing.
        unjudged: Why the steps cannot be judged, in words; empty if they can.
        notes: What could not be measured, and why.
    """

    subject: str
    kind: Literal["script", "job"] = "script"
    machine: MachineFacts = field(default_factory=MachineFacts)
    steps: int = 0
    seconds: float = 0.0
    samples_per_step: float | None = None
    step_seconds: Spread | None = None
    wait_seconds: Spread | None = None
    compute_seconds: Spread | None = None
    backward_seconds: Spread | None = None
    optimizer_seconds: Spread | None = None
    loader: LoaderFacts | None = None
    syncs: tuple[HostCall, ...] = ()
    copies: tuple[DeviceCopy, ...] = ()
    kernels: KernelFacts | None = None
    operators: OperatorFacts | None = None
    allocator: AllocatorFacts = field(default_factory=AllocatorFacts)
    memory: MemoryFacts = field(default_factory=MemoryFacts)
    host_calls: tuple[HostCall, ...] = ()
    between: tuple[HostCall, ...] = ()
    between_seconds: float | None = None
    between_loads: bool = True
    evaluation_seconds: float = 0.0
    evaluation_where: str | None = None
    python_seconds: float = 0.0
    python_lines: tuple[str, ...] = ()
    long_steps: LongSteps | None = None
    busy_cores: float | None = None
    hdf5: tuple[Hdf5Facts, ...] = ()
    ranks: tuple[RankFacts, ...] = ()
    bad_values: tuple[BadValues, ...] = ()
    ablation: Ablation | None = None
    precision: str | None = None
    captured: bool | None = None
    elsewhere_share: float | None = None
    timeline: tuple[TimelineSpan, ...] = ()
    unjudged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def mean_step_seconds(self) -> float | None:
        """Mean duration of a step, which decides samples per second."""
        return self.seconds / self.steps if self.steps and self.seconds > 0 else None

    @property
    def samples_per_second(self) -> float | None:
        """Rate over the whole measured time and all ranks."""
        step = self.mean_step_seconds
        if step is None or self.samples_per_step is None:
            return None
        return self.samples_per_step * max(1, len(self.ranks)) / step

    @property
    def wait_share(self) -> float | None:
        """Share of the median step that is spent waiting for data."""
        if self.step_seconds is None or self.wait_seconds is None or not self.step_seconds.median:
            return None
        return min(1.0, self.wait_seconds.median / self.step_seconds.median)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `from_json` reads them."""
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Measurements:
        """Read what `to_json` returned, also after it was written as JSON.

        Raises:
            CorruptError: It is something else.
        """
        apart = ("format_version", "generator")
        values = {name: value for name, value in document.items() if name not in apart}
        try:
            built: Measurements = build(cls, values)
        except (TypeError, KeyError, ValueError) as error:
            raise CorruptError(
                f"these are not measurements of the doctor: {error}.",
                "what `stoker doctor --json` writes",
                "measure again with this version",
            ) from error
        return built


# -- plain values to dataclasses -------------------------------------------------------------------


_field_types = cache(typing.get_type_hints)


def build(kind: Any, value: Any) -> Any:
    """Return `value`, made of lists and dicts, as the annotated type `kind`."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return build(next(choice for choice in inside if choice is not type(None)), value)
    if origin is tuple:
        if inside[-1] is Ellipsis:
            return tuple(build(inside[0], item) for item in value)
        return tuple(build(choice, item) for choice, item in zip(inside, value, strict=True))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        known = _field_types(kind)
        return kind(**{name: build(known[name], item) for name, item in value.items()})
    return dict(value) if origin is not None and isinstance(value, Mapping) else value
