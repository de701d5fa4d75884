"""The measurements of a stoker job or a script, as plain frozen values.

Enters: figures from an ablation or from a script run with the probe. Leaves: `Measurements`, also as JSON and back.
Costs nothing. Imports no torch: rules, pages and the command line use these values without it.

Seconds are wall-clock seconds of the training process unless the name says otherwise; "per step" is one
optimizer update, "per batch" one batch from the loader. A reading that was not taken is None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from stoker.errors import CorruptError
from stoker.measure.readings import CREEP_DEVICE_BYTES, CREEP_HOST_BYTES, Spread, creep

FORMAT_VERSION = 1
OPERATOR_SECONDS = 40e-6
"""Upper bound for calling one operator of torch, including its Python code."""
NOTABLE_BETWEEN = 0.12
"""Code between the model's calls is a finding from this share of a step, and a note from half of it."""


@dataclass(frozen=True)
class MachineFacts:
    """Facts of the machine that the rules use."""

    cores: int | None = None  # that the job may use
    # physical cores among these, without second hardware threads; None if unknown
    physical_cores: int | None = None
    # throughput of all these cores together, as a multiple of one thread's; less than `cores` if two share a physical
    # core, as on most rented machines, which do not report it. None if it was not measured
    cores_worth: float | None = None
    device: Literal["cuda", "cpu"] = "cpu"  # where the step computes: "cuda" or "cpu"
    device_name: str | None = None  # the vendor's name of the device
    torch: str | None = None
    # copy rate from pinned memory to the device, if measured
    pinned_bytes_per_second: float | None = None
    ram_free_bytes: int | None = None  # free host memory after the measurement
    # free device memory at its end; for a script, all device memory less what the script reserved
    device_free_bytes: int | None = None


@dataclass(frozen=True)
class LoaderWork:
    """Seconds that one loading process works on one batch, by kind of work."""

    # reading bytes: files, HDF5 without its decompression where that is known, sockets
    read: float | None = None
    decode: float | None = None  # decoding bytes: images, archives, parsing
    transform: float | None = None  # augmentation and preprocessing of samples
    collate: float | None = None  # joining samples to a batch
    copy: float | None = None  # moving the batch: pinning, shared memory, to the device
    other: float | None = None  # the rest of the dataset's code

    @property
    def parts(self) -> dict[str, float | None]:
        """The same by kind of work in words."""
        return {
            "reading": self.read,
            "decoding": self.decode,
            "transforms": self.transform,
            "collating": self.collate,
            "copying": self.copy,
            "other dataset code": self.other,
        }

    @property
    def total(self) -> float:
        """Sum of the known parts."""
        return float(sum(filter(None, self.parts.values())))

    def share(self, seconds: float | None) -> float:
        """Return `seconds` as a share of the known parts."""
        return (seconds or 0.0) / self.total if self.total > 0 else 0.0


@dataclass(frozen=True)
class LoaderFacts:
    """The loader that feeds the step."""

    # "torch" for a DataLoader, "stoker" for stoker's own
    kind: Literal["torch", "stoker"] = "torch"
    # loading processes; 0 if the training process loads. For stoker's own loader: reader threads
    workers: int = 0
    batch_size: int | None = None  # samples per batch as configured
    pin_memory: bool | None = None  # whether batches arrive in pinned memory
    persistent_workers: bool | None = None  # whether workers live longer than an epoch
    prefetch_factor: int | None = None  # batches that each worker loads ahead
    start_method: str | None = None  # "fork", "spawn" or "forkserver"
    # the work on one batch by kind, in one loading process
    work: LoaderWork = field(default_factory=LoaderWork)
    # seconds of one batch in one loading process (torch), or of the whole loader without training (stoker)
    alone_seconds: Spread | None = None
    # seconds of one more sample in a batch, if samples are fetched one by one
    sample_seconds: Spread | None = None
    # share of `alone_seconds` spent waiting, not computing: a disk, a network, a sleep
    blocked_share: float | None = None
    # share of the time of a fetch in which the loading process was runnable and no core was free; not part of
    # `alone_seconds`
    queued_share: float | None = None
    # share of a step in which the training queued for a core behind loading processes; part of the wait for data
    crowding_share: float | None = None
    # whether its dataset is an IterableDataset, which every worker reads whole unless it divides itself among them
    is_stream: bool = False
    worker_cpu_shares: tuple[float, ...] = ()  # share of one core that each worker kept busy
    main_cpu_share: float | None = None  # number of cores that the training process kept busy
    epoch_starts: int = 0  # iterators made within the measured time
    # how many of these were in counted steps; a step with a validation in it is not counted
    counted_starts: int | None = None
    # seconds from asking for an iterator to its first batch, beyond a usual wait
    epoch_start_seconds: float | None = None
    steps_per_epoch: int | None = None  # batches per epoch, if the loader has a length
    batches_per_step: float = 1.0  # above 1 if gradients are accumulated
    batch_bytes: int | None = None  # size of the tensors of one batch
    where: str | None = None  # file:line where the loader was made
    dataset_where: str | None = None  # file:line of the dataset's `__getitem__`
    collate_where: str | None = None  # file:line of a collate function that is not torch's own
    # file:line of the user's code in which most of the loading time was sampled
    busiest_line: str | None = None
    busiest_share: float | None = None  # share of the loading time on that line
    tier: str | None = None  # tier of a stoker plan: "resident", "chunked" or "streamed"
    # attribute and file name of an HDF5 file that the dataset holds open, which forked workers would share; empty if
    # there is no such file
    open_hdf5: tuple[str, ...] = ()
    in_order: bool = False  # whether samples come in the order of the dataset
    decodes_pictures: bool = False  # whether most of what it decodes is pictures
    made_again: bool = False  # whether the script makes a new DataLoader for every epoch

    @property
    def restarts(self) -> bool:
        """Whether every epoch starts its own workers."""
        return self.workers > 0 and (not self.persistent_workers or self.made_again)

    @property
    def busy_cores(self) -> float | None:
        """Number of cores that the job keeps busy; None if not measured."""
        if self.main_cpu_share is None:
            return None
        return sum(self.worker_cpu_shares) + self.main_cpu_share


@dataclass(frozen=True)
class HostCall:
    """A line of code that fetches from or waits for the device, or does housekeeping such as `gc.collect`."""

    where: str  # file:line
    # name of the call: "item", "cpu", "tolist", "numpy", "bool", "synchronize", "gc.collect", ...
    call: str
    calls_per_step: float
    seconds_per_step: float  # time spent there; in a loop of fetches, with the time between them
    in_model: bool = False  # whether the forward pass of a module calls it
    library: str = ""  # file:line in the library that makes the call, "" in the user's own code


@dataclass(frozen=True)
class DeviceCopy:
    """A line of code that copies memory to the device while the host waits."""

    where: str  # file:line
    bytes_per_step: float
    seconds_per_step: float  # time that the host spent there
    calls_per_step: float = 1.0
    # whether the memory is pinned, so that the copy need not block; otherwise it is pageable
    pinned: bool = False


@dataclass(frozen=True)
class KernelFacts:
    """Kernels of a few steps, from the profiler."""

    per_step: float  # number of kernels
    mean_seconds: float  # mean duration of a kernel
    # share of the step in which at least one kernel ran (the union of their intervals)
    busy_share: float


@dataclass(frozen=True)
class OperatorFacts:
    """torch's operators on the host in a few steps, from the profiler. Seconds are per step."""

    per_step: float  # number of operators, nested ones not counted
    # time explained by the sizes of the tensors, which grows with the batch or the weights; the rest of a step's time
    # is the cost of calling operators
    work_seconds: float
    # the part of `work_seconds` that grows with the weights only: the optimizer's
    weight_seconds: float | None = None
    double_seconds: float | None = None  # time in operators on float64
    # time in matrix products and convolutions, by dtype
    matmul_seconds: Mapping[str, float] = field(default_factory=dict)
    # most rows that a matrix product of the forward pass multiplies. 1 means that the model is called with one sample
    # at a time; a larger number may count weights or pixels
    num_rows: int | None = None
    # time of matrix products and convolutions among the kernels on float64; None without a GPU
    double_product_seconds: float | None = None
    # time of a matrix product in float64 on this GPU, as a multiple of that in float32; None if not measured
    double_times: float | None = None
    # time of the device for matrix products of float32; None without a GPU
    single_product_seconds: float | None = None
    # time of these products as a multiple of that in TF32; 1 if TF32 is on, None if not measured
    single_times: float | None = None


@dataclass(frozen=True)
class AllocatorFacts:
    """torch's caching allocator for the device; counts are None on a CPU."""

    retries_per_step: float | None = None  # how often the cache was flushed to find room
    device_allocs_per_step: float | None = None  # calls to the driver for memory
    # calls of `empty_cache` by line, on a CPU too, where they do nothing
    empty_cache: tuple[HostCall, ...] = ()


@dataclass(frozen=True)
class MemoryFacts:
    """Memory over the measured steps, without the first quarter."""

    # steady growth of allocated device memory; 0 if it does not grow
    device_bytes_per_step: float | None = None
    # steady growth of resident host memory; 0 if it does not grow
    host_bytes_per_step: float | None = None
    device_bytes: int | None = None  # device memory in use at the end
    host_bytes: int | None = None  # host memory in use at the end

    @classmethod
    def of(
        cls, device: Sequence[int | None], host: Sequence[int | None], per_step: float = 1.0
    ) -> MemoryFacts:
        """Return the growth of memory in use from readings, `per_step` of them in a step; None: not read."""
        grown = creep(device, CREEP_DEVICE_BYTES), creep(host, CREEP_HOST_BYTES)
        device_grown, host_grown = (None if one is None else one * per_step for one in grown)
        device_now, host_now = (
            next((held for held in reversed(read) if held is not None), None)
            for read in (device, host)
        )
        return cls(device_grown, host_grown, device_now, host_now)


@dataclass(frozen=True)
class Hdf5Facts:
    """How one HDF5 dataset is read."""

    name: str  # path of the file and of the dataset in it
    shape: tuple[int, ...]  # shape of the dataset
    chunks: tuple[int, ...] | None  # chunk shape; None if it is contiguous
    compression: str | None  # "gzip", "lzf", ...; None if it is not compressed
    bytes_used_per_batch: float  # bytes that the reads of one batch return
    # bytes of the chunks that were read and decompressed for these reads, without chunks that were in the chunk cache
    # of the process
    bytes_touched_per_batch: float
    seconds_per_batch: float  # time of these reads
    reads_per_batch: float  # number of reads
    where: str | None = None  # file:line of the reads

    @property
    def bytes_read_per_byte_used(self) -> float | None:
        """Bytes read for every byte used; 1 is ideal."""
        used = self.bytes_used_per_batch
        return self.bytes_touched_per_batch / used if used else None


@dataclass(frozen=True)
class RankFacts:
    """One process of a data-parallel job."""

    rank: int
    # duration of a step; nearly equal on all ranks, because they wait for each other
    step_seconds: float
    own_seconds: float  # the part of a step in which the process does not wait for other ranks


@dataclass(frozen=True)
class LongSteps:
    """A few steps that take much longer than the others: a rollout, a plot, an export."""

    count: int  # number of these steps
    # sum of the seconds by which they are longer, without evaluation, waiting for data and saving
    seconds: float
    share: float  # `seconds` as a share of the time of all counted steps
    outside_share: float  # share of their samples outside of model, backward pass and optimizer
    # lines at which they were sampled, with their shares of the samples, the largest first
    lines: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class WorkerStarts:
    """The starts of the workers of a DataLoader that does not feed the steps, such as one for validation."""

    where: str | None  # file:line where the loader was made
    workers: int  # loading processes
    count: int  # starts within the measured time
    seconds: float  # median time of a start and its end, without loading the first batch
    share: float  # time of all of them as a share of the time since the first step
    made_again: bool = False  # whether a new DataLoader is made each time


@dataclass(frozen=True)
class BadValues:
    """Values that are not finite."""

    what: str  # "batch", "loss", ... or a field's name
    where: str | None  # file:line, or a field and row
    count: int  # number of checks that found such values
    looks: int  # number of checks


@dataclass(frozen=True)
class TimelineSpan:
    """A span of time in a few steps, for drawing."""

    step: int  # counted from the first step drawn
    lane: str  # "main", "worker 0", "device", ...
    # "step", "wait", "forward", "backward", "optimizer", "sync", "copy", "kernels", "load"
    kind: str
    start_seconds: float  # start, since the beginning of the first step drawn
    seconds: float  # duration


@dataclass(frozen=True)
class Alternative:
    """A change of a job's config that is worth trying, and the rate of the whole job with it."""

    finding: str  # name of the finding whose remedy the change is
    changes: Mapping[str, Any]  # dotted keys of the config with their new values
    reason: str  # why it was tried, in words
    samples_per_second: Spread | None = None  # its rate; None if it was not tried or could not run
    failure: str = ""  # why it could not run


@dataclass(frozen=True)
class Ablation:
    """Parts of a stoker job that were measured alone."""

    loader_seconds: Spread | None = None  # per batch, without training
    step_seconds: Spread | None = None  # per step, on one batch that stays on the device
    copy_seconds: Spread | None = None  # per batch, host to device
    together_seconds: Spread | None = None  # per step, everything
    captured_step_seconds: Spread | None = None  # like `step_seconds`, replayed as a CUDA graph
    # step alone for larger batches: (size, seconds per step)
    larger_batches: tuple[tuple[int, float], ...] = ()
    # samples per second of everything together, to compare with the alternatives
    together_rate: Spread | None = None
    alternatives: tuple[Alternative, ...] = ()  # other settings that were tried


@dataclass(frozen=True)
class Measurements:
    """All input of the rules."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}  # see `from_json`

    subject: str  # the command or the config that was measured, as the user wrote it
    kind: Literal["script", "job"] = "script"  # "script" or "job" (stoker's own, from a config)
    machine: MachineFacts = field(default_factory=MachineFacts)
    steps: int = 0  # number of measured steps, without warm-up
    seconds: float = 0.0  # their duration
    samples_per_step: float | None = None  # samples per step of one process
    step_seconds: Spread | None = None  # from one optimizer update to the next
    # part of a step spent waiting for data (loading it, if there are no workers)
    wait_seconds: Spread | None = None
    compute_seconds: Spread | None = None  # the rest of the step
    backward_seconds: Spread | None = None  # part of the compute in `backward`
    optimizer_seconds: Spread | None = None  # part of the compute in the optimizer
    loader: LoaderFacts | None = None  # the loader; None if the script uses no DataLoader
    syncs: tuple[HostCall, ...] = ()  # lines that make the host wait, costliest first
    copies: tuple[DeviceCopy, ...] = ()  # copies to the device, costliest first
    kernels: KernelFacts | None = None  # kernels; None without a GPU
    operators: OperatorFacts | None = None  # operators; None if the profiler could not run
    allocator: AllocatorFacts = field(default_factory=AllocatorFacts)  # the device's allocator
    memory: MemoryFacts = field(default_factory=MemoryFacts)  # growth of memory
    host_calls: tuple[HostCall, ...] = ()  # `gc.collect` and `torch.save` by line
    # lines outside of the model, its backward pass and the optimizer at which the training thread was sampled,
    # costliest first; without time that is measured directly (a DataLoader, copies, syncs)
    between: tuple[HostCall, ...] = ()
    # time per step of all such lines together; None if it was not sampled
    between_seconds: float | None = None
    # whether most of that time looks like loading, which workers could do; otherwise it is code that could run rarely
    # or not at all, such as logging
    between_loads: bool = True
    # part of a usual step from `model.eval()` to `model.train()`; 0 if there is none
    evaluation_seconds: float = 0.0
    # part of a usual step in which the device computes what is launched there; 0 if unknown
    evaluation_device_seconds: float = 0.0
    evaluation_where: str | None = None  # line that calls `eval()`
    # lines that call a model in every step for a result that no update needs, outside of that part; costliest first
    unused_calls: tuple[HostCall, ...] = ()
    unused_device_seconds: float = 0.0  # part of a usual step in which the device computes them
    # the same for results of which it is unknown whether the training needs them
    doubtful_calls: tuple[HostCall, ...] = ()
    doubtful_device_seconds: float = 0.0
    # part of a usual step in which the forward pass runs Python code and no operator
    python_seconds: float = 0.0
    # lines of modules at which the training thread was sampled, the most frequent first
    python_lines: tuple[str, ...] = ()
    # a few steps that take much longer than the others; None if their extra time is small
    long_steps: LongSteps | None = None
    busy_cores: float | None = None  # cores that the training process kept busy; None if unknown
    hdf5: tuple[Hdf5Facts, ...] = ()  # datasets read through h5py, costliest first
    ranks: tuple[RankFacts, ...] = ()  # ranks of a data-parallel job; empty for one process
    bad_values: tuple[BadValues, ...] = ()  # values that are not finite
    ablation: Ablation | None = None  # parts measured alone; only for stoker's own jobs
    precision: str | None = None  # precision of the step ("fp32", "bf16", ...), if known
    captured: bool | None = None  # whether the step is replayed as a CUDA graph
    # share of the time since the first step that went to other DataLoaders, to occasional evaluation, to a few long
    # steps, or passed after the last step; it is in no other figure
    elsewhere_share: float | None = None
    # DataLoaders beside the one that feeds the steps whose workers start again and again, the costliest first
    worker_starts: tuple[WorkerStarts, ...] = ()
    timeline: tuple[TimelineSpan, ...] = ()  # a few steps, for drawing
    unjudged: tuple[str, ...] = ()  # why the steps cannot be judged, in words; empty if they can
    notes: tuple[str, ...] = ()  # what could not be measured, and why

    @property
    def mean_step_seconds(self) -> float | None:
        """Mean duration of a step, from which samples per second are computed; None if no step was measured."""
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
            CorruptError: The document holds something else.
        """
        from pydantic import TypeAdapter, ValidationError  # here: a script is examined without it

        values = {
            n: value for n, value in document.items() if n not in ("format_version", "generator")
        }
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise CorruptError(
                f"these are not measurements of the doctor: {first['loc']}: {first['msg']}.",
                "what `stoker doctor --json` writes",
                "measure again with this version",
            ) from error
