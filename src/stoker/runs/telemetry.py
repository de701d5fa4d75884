"""Telemetry of a run: readings of GPU and process, written by a thread while it trains.

Enters: NVML, the process, the machine's cores, and the run's counters (`RunCounters`). Leaves: `telemetry.jsonl` in
the run's folder, written like the run log, with the events `begin`, `telemetry` (unknown values left out),
`note` and `end`. Costs about 0.5 ms of a core and 0.7 kB per reading: at first every half second,
later every five.

Success: the thread writes `end` and is joined when the context is left. Failure: it never ends a run. A reading that
fails is None and is noted once; a full disk ends the telemetry, and the run's own log reports it. A driver that
does not answer delays the end of the run by at most five seconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import psutil

from stoker.errors import StoreError
from stoker.machine import Gpu, GpuReader
from stoker.report import Note, RunEnd, RunLog

TELEMETRY_NAME = "telemetry.jsonl"
FIRST_SECONDS, MOST_SECONDS = 0.5, 5.0
_LEAST_SECONDS = 0.1
_GROWTH = 1.1
# Below this share of an interval the run was validating or saving: a rate would be noise.
_LEAST_TRAINED = 0.1
# A counter that wrapped around shows a rate above that of the slot.
_MOST_OF_LINK = 1.2


@dataclass(frozen=True)
class RunCounters:
    """Counters of a run since its process started."""

    samples: int  # trained on
    trained_seconds: float  # spent in epochs; validation and checkpoints do not count
    waited_seconds: float | None  # part of these spent waiting for batches; None if unknown
    epoch: int | None = None  # the current one
    loss: float | None = None  # the last loss that was read
    allocated_bytes: int | None = None  # device memory in tensors; None without a GPU
    reserved_bytes: int | None = None  # device memory that torch holds; None without a GPU


@dataclass(frozen=True)
class GpuReading:
    """One reading of a GPU; None where the driver gives no value. Attributes as in `machine.Gpu`."""

    index: int
    name: str | None
    uuid: str | None
    memory_used_bytes: int | None  # by all processes
    memory_total_bytes: int | None
    utilization_percent: int | None
    memory_utilization_percent: int | None
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: int | None
    throttle_reasons: tuple[str, ...] | None
    pcie_generation: int | None
    pcie_width: int | None
    # into the GPU, since the reading before; where its counters wrap too soon, in 20 ms
    pcie_received_bytes_per_second: float | None
    pcie_sent_bytes_per_second: float | None  # out of it

    @property
    def memory_share(self) -> float | None:
        """Used memory as a share of the total, from 0 to 1."""
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return None
        return self.memory_used_bytes / self.memory_total_bytes


# -- target ranges of a busy GPU -----------------------------------------------------------------

Verdict = Literal["below", "within", "above"]

BUSY_FOOTNOTE = (
    "busy is utilization.gpu: the share of time with at least one kernel running. One small kernel is "
    "enough, so it is not occupancy: trust samples/s."
)


@dataclass(frozen=True)
class Target:
    """A target range in percent or degrees, and the meaning of values below and above it."""

    low: float
    high: float
    below: str
    above: str

    def judge(self, value: float | None) -> Verdict | None:
        """Return the position of a value; the ends belong to the range."""
        if value is None:
            return None
        return "below" if value < self.low else "above" if value > self.high else "within"


BUSY = Target(85, 95, "waiting for the host", "no headroom, and nothing wrong with that")
SM_ACTIVE = Target(80, 95, "kernels that do not fill the GPU", "no headroom")
"""Target of DCGM's SM_ACTIVE; it is only shown, because NVML does not read that value."""
MEMORY = Target(70, 90, "room for a larger batch or more data", "close to running out")
TEMPERATURE = Target(0, 79, "", "may slow its clocks down")
TARGETS: Mapping[str, Target] = {"busy": BUSY, "memory": MEMORY, "temperature": TEMPERATURE}


def judge_gpu(gpu: GpuReading) -> dict[str, Verdict | None]:
    """Return the verdict on each reading that has a target."""
    share = gpu.memory_share
    return {
        "busy": BUSY.judge(gpu.utilization_percent),
        "memory": MEMORY.judge(None if share is None else share * 100),
        "temperature": TEMPERATURE.judge(gpu.temperature_celsius),
    }


# -- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessReading:
    """One reading of a process: the cores it kept busy since the reading before, its memory.

    The cores are None at the first reading and right after another one.
    """

    pid: int
    cpu_cores: float | None
    resident_bytes: int


class Meter:
    """Reads GPUs and a process repeatedly. Use as a context manager, in one thread."""

    def __init__(
        self,
        # of the process; this one by default, 0 for none. May be changed at any time.
        pid: int | None = None,
        # the only GPU to read, as NVML names it; all that this process sees by default, and all where none has that
        # name
        gpu_uuid: str | None = None,
        nvml: Any = None,  # module with pynvml's functions; None imports pynvml
        clock: Callable[[], float] = time.perf_counter,  # seconds, for rates
    ) -> None:
        self.pid = os.getpid() if pid is None else pid
        self._uuid = gpu_uuid
        self._reader = GpuReader(nvml)
        self._clock = clock
        self._process: psutil.Process | None = None
        self._read_at = 0.0
        self._counted: dict[int, tuple[float, int | None, int | None]] = {}

    @property
    def notes(self) -> list[str]:
        """Readings that failed, each with its reason once."""
        return self._reader.notes

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)

    def read_gpus(self) -> tuple[GpuReading, ...]:
        """Return a reading of each selected GPU; empty without NVML."""
        seen = [gpu for gpu in self._reader.read() if gpu.visible is not False]
        meant = [gpu for gpu in seen if gpu.uuid == self._uuid] if self._uuid else []
        # A list first: `tuple(generator)` grows a tuple in place, and CPython fails if another thread holds
        # the tuple, as the leak watch does when it walks all objects.
        return tuple([self._reading(gpu) for gpu in meant or seen])

    def read_process(self) -> ProcessReading | None:
        """Return a reading of the process; None if it has ended or none is selected."""
        try:
            if self._process is None or self._process.pid != self.pid:
                self._process = psutil.Process(self.pid) if self.pid else None
                is_known = False
            else:
                # The kernel counts time by ticks of 10 ms: a shorter span reads as 0 cores, or as too many.
                is_known = self._clock() - self._read_at >= _LEAST_SECONDS
            if self._process is None:
                return None
            self._read_at = self._clock()
            with self._process.oneshot():
                percent = self._process.cpu_percent()
                resident = self._process.memory_info().rss
        except psutil.Error:
            self._process = None
            return None
        return ProcessReading(self.pid, percent / 100 if is_known else None, resident)

    def read_other_cores(self, process: ProcessReading | None) -> float | None:
        """Return the cores that everything but the process kept busy; None at the first reading.

        In a container these are cores of the host: other work there slows the process down as well.
        """
        percent = psutil.cpu_percent()
        if process is None or process.cpu_cores is None:
            return None
        return max(0.0, percent / 100 * (psutil.cpu_count() or 1) - process.cpu_cores)

    def _reading(self, gpu: Gpu) -> GpuReading:
        total, free = gpu.memory_total_bytes, gpu.memory_free_bytes
        received, sent = self._pcie_rates(gpu)
        if gpu.pcie_received_bytes is None and gpu.pcie_sent_bytes is None:
            received, sent = self._reader.sample_traffic(gpu.index)
        names = (each.name for each in fields(GpuReading))
        return GpuReading(
            **{name: getattr(gpu, name) for name in names if hasattr(gpu, name)},
            memory_used_bytes=None if total is None or free is None else total - free,
            pcie_received_bytes_per_second=received,
            pcie_sent_bytes_per_second=sent,
        )

    def _pcie_rates(self, gpu: Gpu) -> tuple[float | None, float | None]:
        now = self._clock(), gpu.pcie_received_bytes, gpu.pcie_sent_bytes
        before = self._counted.get(gpu.index)
        self._counted[gpu.index] = now
        if before is None or now[0] <= before[0]:
            return None, None
        seconds, most = now[0] - before[0], gpu.pcie_bytes_per_second
        rates = [
            None if old is None or new is None else (new - old) / seconds
            for old, new in zip(before[1:], now[1:], strict=True)
        ]
        likely = [
            None if rate is None or rate < 0 or (most and rate > most * _MOST_OF_LINK) else rate
            for rate in rates
        ]
        return likely[0], likely[1]


class TelemetryLog:
    """Writes `telemetry.jsonl` from a thread while a run goes on. Use as a context manager."""

    def __init__(
        self,
        folder: str | Path,  # of the run
        # called in the thread for the run's counters; must be quick and take no lock
        counters: Callable[[], RunCounters] | None = None,
        *,
        gpu_uuid: str | None = None,  # as for `Meter`
        # interval between the first two readings; grows by a tenth each time, up to `most_seconds`
        first_seconds: float = FIRST_SECONDS,
        most_seconds: float = MOST_SECONDS,
        nvml: Any = None,  # as for `Meter`
    ) -> None:
        self.path = Path(folder) / TELEMETRY_NAME
        self.end = RunEnd()  # how the run ended, if not by an exception: set it before leaving
        self.notes: list[str] = []  # what could not be read or written
        self._counters = counters
        self._gpu_uuid, self._nvml = gpu_uuid, nvml
        self._first, self._most = first_seconds, most_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.end = RunEnd.by(error)
        self._stop.set()
        # A driver that has lost its GPU can block for longer; the run does not wait, the thread is a daemon.
        self._thread.join(timeout=5)

    # -- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with RunLog(self.path) as log, Meter(None, self._gpu_uuid, self._nvml) as meter:
                self._watch(log, meter)
        except (StoreError, psutil.Error, OSError) as error:
            self.notes.append(f"telemetry ended: {error}")

    def _watch(self, log: RunLog, meter: Meter) -> None:
        log.write("begin", {"pid": os.getpid(), "host": socket.gethostname()})
        rates, wait = _Rates(), self._first
        while True:
            self._take(log, meter, rates)
            if self._stop.wait(wait):
                break
            wait = min(self._most, wait * _GROWTH)
        self._take(log, meter, rates)
        log.write("end", asdict(self.end))

    def _take(self, log: RunLog, meter: Meter, rates: _Rates) -> None:
        # Without the uuid, which is in the run log's `machine`.
        gpus = [_compact(asdict(replace(gpu, uuid=None))) for gpu in meter.read_gpus()]
        values: dict[str, Any] = {"gpus": gpus}
        process = meter.read_process()
        if process is not None:
            values["process"] = _compact(asdict(process))
        values["host"] = _compact(
            {"other_cores": meter.read_other_cores(process), "num_cores": psutil.cpu_count()}
        )
        counted = None
        # A CUDA error leaves torch's own counters unreadable; the run reports it, not this thread.
        with contextlib.suppress(RuntimeError):
            counted = None if self._counters is None else self._counters()
        if counted is not None:
            since = rates.since_last(counted, time.perf_counter())
            values["run"] = _compact(asdict(counted) | since)
        log.write("telemetry", values, epoch=None if counted is None else counted.epoch)
        for note in meter.notes:
            if note not in self.notes:
                self.notes.append(note)
                log.write("note", Note(note).to_json())


_STILL_SECONDS = 60.0  # after this time without a batch the rate is 0: the run is stalled


class _Rates:
    """Turns counters into rates over the time between two readings."""

    def __init__(self) -> None:
        self._before: tuple[float, RunCounters] | None = None
        self._unknown: dict[str, float | None] = {"samples_per_second": None, "wait_share": None}
        self._last = self._unknown

    def since_last(self, counted: RunCounters, now: float) -> dict[str, float | None]:
        """Return the rates since the last reading; while no batch has ended, the last known rates.

        A batch may take longer than the interval of readings: the rates would be 0, 0, 0 and a peak.
        """
        if self._before is None:
            self._before = (now, counted)
            return self._unknown
        then, old = self._before
        trained = counted.trained_seconds - old.trained_seconds
        is_training = trained >= _LEAST_TRAINED * (now - then)
        is_same = (counted.samples, counted.epoch) == (old.samples, old.epoch)
        if is_same and now - then < _STILL_SECONDS:
            return self._last if is_training else self._unknown
        self._before, self._last = (now, counted), self._unknown
        if is_training and trained > 0:
            share = None
            if counted.waited_seconds is not None and old.waited_seconds is not None:
                waited = counted.waited_seconds - old.waited_seconds
                share = min(1.0, max(0.0, waited / trained))
            rate = (counted.samples - old.samples) / trained
            self._last = {"samples_per_second": rate, "wait_share": share}
        return self._last


def _compact(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known values, floats with six digits, so that the log of a long run stays small."""
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in values.items()
        if value is not None
    }
