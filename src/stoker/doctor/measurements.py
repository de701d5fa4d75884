"""What the doctor measured, of a stoker job or of somebody's script, as plain frozen values.

Enters: figures from an ablation or from an attached script. Leaves: `Measurements`, also as JSON and
back. Costs nothing. No torch here: rules, pages and the command line read these without it.

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
from pathlib import Path
from typing import Any, Literal

from stoker.address import masked_values
from stoker.errors import CorruptError, StoreError
from stoker.measure.readings import Spread
from stoker.ownership import SIGNATURE, write_text
from stoker.strict_json import json_text, parse_json

FORMAT_VERSION = 1


@dataclass(frozen=True)
class MachineFacts:
    """The machine as far as verdicts need it.

    Attributes:
        cores: Cores the job may use.
        device: "cuda" or "cpu": where the step computes.
        device_name: As the vendor calls it.
        torch: Version.
        pinned_bytes_per_second: Host to device from pinned memory, if measured.
        ram_free_bytes: When the measurement began.
        device_free_bytes: Likewise.
    """

    cores: int | None = None
    device: Literal["cuda", "cpu"] = "cpu"
    device_name: str | None = None
    torch: str | None = None
    pinned_bytes_per_second: float | None = None
    ram_free_bytes: int | None = None
    device_free_bytes: int | None = None


@dataclass(frozen=True)
class LoaderWork:
    """Seconds of work that one batch costs one loading process, by what is done.

    Attributes:
        read: Getting bytes: files, HDF5 without its decompression where that is known, sockets.
        decode: Bytes to values: images, archives, parsing.
        transform: Augmentation and preprocessing of samples.
        collate: Samples to one batch.
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
        """All that is known, added."""
        return float(sum(value for value in dataclasses.asdict(self).values() if value is not None))


@dataclass(frozen=True)
class LoaderFacts:
    """The loader that feeds the step.

    Attributes:
        kind: "torch" for a DataLoader, "stoker" for stoker's own.
        workers: Loading processes; 0 loads in the training process. Threads for stoker's own loader.
        batch_size: Samples per batch as configured.
        pin_memory: Whether batches arrive in pinned memory.
        persistent_workers: Whether workers outlive an epoch.
        prefetch_factor: Batches each worker loads ahead.
        start_method: "fork", "spawn" or "forkserver".
        work: Where the seconds of one batch go, in one loading process.
        alone_seconds: Of one batch in one loading process (torch), or of the whole loader with nobody
            training beside it (stoker).
        sample_seconds: Of one sample more in a batch, where samples are fetched one by one; the first, with
            all that a fetch costs however small, left out.
        blocked_share: Of these seconds, how much was not computing: a disk, a network, a sleep.
        queued_share: Of the time from asking for a batch to having it, how much the loading process was
            ready and no core was free; not part of `alone_seconds`.
        is_stream: Whether its dataset is an IterableDataset, whose workers each go through all of it unless
            they share it out themselves.
        crowding_share: Of a step, how much the training queued for a core behind loading processes; part of
            the wait for data.
        worker_cpu_shares: Of one core each, by worker, over the measured time.
        main_cpu_share: Cores the training process itself keeps busy.
        epoch_starts: How often an iterator was made within the measured time.
        epoch_start_seconds: From asking for an iterator to its first batch, beyond a usual wait.
        steps_per_epoch: Batches per epoch, where the loader knows.
        batches_per_step: Above 1 where gradients are accumulated.
        batch_bytes: Of the tensors of one batch.
        where: file:line where the loader was made.
        dataset_where: file:line of the dataset's `__getitem__`.
        collate_where: file:line of a collate function that is not torch's own.
        busiest_line: file:line of the user's code that most of the work was seen in, with its share.
        busiest_share: Of the work, that line's.
        tier: Of a stoker plan: "resident", "chunked" or "streamed".
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


@dataclass(frozen=True)
class HostSync:
    """A line that makes the host wait for, or fetch from, the device (or on a CPU, fetch values).

    Attributes:
        where: file:line.
        call: "item", "cpu", "tolist", "numpy", "bool", "synchronize", ...
        calls_per_step: How often.
        seconds_per_step: Spent there; a loop of such calls counts with what stands between them.
    """

    where: str
    call: str
    calls_per_step: float
    seconds_per_step: float


@dataclass(frozen=True)
class HostCall:
    """A housekeeping call that costs time where it stands: `empty_cache`, `gc.collect`, `torch.save`.

    Attributes:
        where: file:line.
        call: Its name.
        calls_per_step: How often.
        seconds_per_step: Spent there.
    """

    where: str
    call: str
    calls_per_step: float
    seconds_per_step: float


@dataclass(frozen=True)
class PageableCopy:
    """A line that copies memory which is not pinned to the device.

    Attributes:
        where: file:line.
        bytes_per_step: Copied there.
        seconds_per_step: The host spent there.
        calls_per_step: How often.
    """

    where: str
    bytes_per_step: float
    seconds_per_step: float
    calls_per_step: float = 1.0


@dataclass(frozen=True)
class KernelFacts:
    """What the profiler saw of the device in a few steps.

    Attributes:
        per_step: Kernels.
        mean_seconds: Length of one.
        busy_share: Of the step, how much at least one kernel ran (the union of their intervals).
    """

    per_step: float
    mean_seconds: float
    busy_share: float


@dataclass(frozen=True)
class OperatorFacts:
    """What the profiler saw of torch's operators on the host in a few steps.

    Attributes:
        per_step: Operators, nested ones not counted again.
        work_seconds: Per step, what the sizes of the operators' tensors account for: the part that grows
            with the batch or the weights. The rest is the cost of calling them.
        weight_seconds: Per step, the part of it that grows with the weights only: the optimizer's.
        double_seconds: Per step, spent in operators on float64.
        matmul_seconds: Per step, spent in matrix products and convolutions, by dtype.
    """

    per_step: float
    work_seconds: float
    weight_seconds: float | None = None
    double_seconds: float | None = None
    matmul_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AllocatorFacts:
    """The device's caching allocator; None where there is none.

    Attributes:
        retries_per_step: Times the cache had to be flushed to find room.
        device_allocs_per_step: Calls to the driver for memory.
        empty_cache: Calls of `empty_cache` by line. Counted on a CPU too, where they do nothing.
    """

    retries_per_step: float | None = None
    device_allocs_per_step: float | None = None
    empty_cache: tuple[HostCall, ...] = ()


@dataclass(frozen=True)
class MemoryFacts:
    """Memory over the measured steps, the first quarter left out.

    Attributes:
        device_bytes_per_step: Steady growth of what is allocated on the device; 0 when it does not creep.
        host_bytes_per_step: Steady growth of resident memory; 0 when it does not creep.
        device_bytes: Held at the end.
        host_bytes: Likewise.
    """

    device_bytes_per_step: float | None = None
    host_bytes_per_step: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True)
class Hdf5Facts:
    """How one HDF5 dataset is read.

    Attributes:
        name: Path of the file and the dataset in it.
        shape: Of the dataset.
        chunks: Its chunk shape; None when it is contiguous.
        compression: "gzip", "lzf", ...; None without.
        bytes_used_per_batch: Asked for by the reads of one batch.
        bytes_touched_per_batch: Read and, if compressed, decompressed to answer them: whole chunks, less
            those that the chunk cache of one process can hold.
        seconds_per_batch: In these reads.
        reads_per_batch: How many.
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
        """How much of what is read is thrown away: 1 is ideal."""
        return (
            self.bytes_touched_per_batch / self.bytes_used_per_batch
            if self.bytes_used_per_batch
            else None
        )


@dataclass(frozen=True)
class RankFacts:
    """One process of a data-parallel job.

    Attributes:
        rank: Its number.
        step_seconds: As it measures them; nearly the same everywhere, since ranks wait for each other.
        own_seconds: Per step, the part in which it does not wait for the others.
    """

    rank: int
    step_seconds: float
    own_seconds: float


@dataclass(frozen=True)
class BadValues:
    """Values that are not finite.

    Attributes:
        what: "batch", "loss", ... or a field's name.
        where: file:line, or a field and row.
        count: How many looks found any.
        looks: How many were taken.
    """

    what: str
    where: str | None
    count: int
    looks: int


@dataclass(frozen=True)
class TimelineSpan:
    """A piece of a few steps, for drawing.

    Attributes:
        step: Counted from the first step drawn.
        lane: "main", "worker 0", "device", ...
        kind: "step", "wait", "forward", "backward", "optimizer", "sync", "copy", "kernels", "load".
        start_seconds: Since the first step drawn began.
        seconds: How long.
    """

    step: int
    lane: str
    kind: str
    start_seconds: float
    seconds: float


@dataclass(frozen=True)
class Alternative:
    """The same job with some keys of its config changed, everything together, measured.

    Attributes:
        finding: Name of the finding that the change answers.
        changes: Dotted keys of the config with their new values.
        reason: Why it was tried, in words.
        samples_per_second: What it reached; None when it could not run.
        failure: Why it could not run.
    """

    finding: str
    changes: Mapping[str, Any]
    reason: str
    samples_per_second: Spread | None = None
    failure: str = ""


@dataclass(frozen=True)
class Ablation:
    """Parts measured alone, where the doctor can run them alone (its own jobs).

    Attributes:
        loader_seconds: Per batch, nobody training beside it.
        step_seconds: Per step on one batch that is already there.
        copy_seconds: Per batch, host to device.
        together_seconds: Per step, everything.
        captured_step_seconds: Like `step_seconds`, replayed as a CUDA graph.
        larger_batches: Step alone by batch size, where larger ones were tried: (size, seconds per step).
        together_rate: Samples per second of everything together, for comparison with the alternatives.
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
    """Everything the rules look at.

    Attributes:
        subject: The command or the config that was measured, as the user wrote it.
        kind: "script" or "job" (stoker's own, from a config).
        machine: Where.
        steps: Steps that were measured, warm-up left out.
        seconds: That they took.
        samples_per_step: Of one process.
        step_seconds: From one optimizer update to the next.
        wait_seconds: Of a step, spent waiting for the loader (with no workers: loading).
        compute_seconds: The rest of the step.
        backward_seconds: Of the compute, in `backward`.
        optimizer_seconds: Of the compute, in the optimizer.
        loader: None when the script uses no DataLoader.
        syncs: Lines that make the host wait, costliest first.
        copies: Pageable copies, costliest first.
        kernels: None without a GPU.
        operators: None when the profiler could not run.
        allocator: Of the device.
        memory: Growth.
        host_calls: `gc.collect`, `torch.save` by line.
        hdf5: Datasets read through h5py, costliest first.
        ranks: Of a data-parallel job; empty for one process.
        bad_values: Found in what was looked at.
        ablation: Only for stoker's own jobs.
        precision: "fp32", "bf16", ... of the step, where it is known.
        captured: Whether the step is replayed as a CUDA graph.
        elsewhere_share: Of the time since the first step, what went to other DataLoaders or came after the
            last step; it is in no other figure.
        timeline: A few steps.
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
    syncs: tuple[HostSync, ...] = ()
    copies: tuple[PageableCopy, ...] = ()
    kernels: KernelFacts | None = None
    operators: OperatorFacts | None = None
    allocator: AllocatorFacts = field(default_factory=AllocatorFacts)
    memory: MemoryFacts = field(default_factory=MemoryFacts)
    host_calls: tuple[HostCall, ...] = ()
    hdf5: tuple[Hdf5Facts, ...] = ()
    ranks: tuple[RankFacts, ...] = ()
    bad_values: tuple[BadValues, ...] = ()
    ablation: Ablation | None = None
    precision: str | None = None
    captured: bool | None = None
    elsewhere_share: float | None = None
    timeline: tuple[TimelineSpan, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def mean_step_seconds(self) -> float | None:
        """Of a step, slow ones counted in full: what decides samples per second."""
        return self.seconds / self.steps if self.steps and self.seconds > 0 else None

    @property
    def samples_per_second(self) -> float | None:
        """What the job manages, over the whole measured time and all ranks."""
        step = self.mean_step_seconds
        if step is None or self.samples_per_step is None:
            return None
        return self.samples_per_step * max(1, len(self.ranks)) / step

    @property
    def wait_share(self) -> float | None:
        """Share of a usual step that is spent waiting for data."""
        if self.step_seconds is None or self.wait_seconds is None or not self.step_seconds.median:
            return None
        return min(1.0, self.wait_seconds.median / self.step_seconds.median)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `from_json` gives the measurements back."""
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Measurements:
        """Read what `to_json` wrote, also after a trip through a JSON text.

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

    def write(self, path: str | Path) -> None:
        """Write them as a JSON file."""
        document = {"generator": SIGNATURE, **masked_values(self.to_json())}
        write_text(path, json_text(document, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Measurements:
        """Read what `write` wrote.

        Raises:
            StoreError: There is no such file.
            CorruptError: It holds something else.
        """
        try:
            document = parse_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise StoreError(
                f"cannot read {path}: {error.strerror}.", "a file of measurements"
            ) from error
        except ValueError as error:
            raise CorruptError(f"{path} is not JSON: {error}.", "a file of measurements") from error
        return cls.from_json(document)


# -- plain values to dataclasses -------------------------------------------------------------------


@cache
def _field_types(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


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
