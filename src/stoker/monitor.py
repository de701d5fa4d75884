"""Readings of GPUs, the host and a run every second or so; and the same as CSV.

Enters: NVML, psutil, and a run's folder if one is given. Leaves: a frozen `Snapshot` per look, and rows of a
CSV file. Costs about 2 ms of a core per look with one GPU; nothing is started on the GPU, no torch is
imported. Without a GPU, or without NVML, everything else works.
"""

from __future__ import annotations

import csv
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from stoker.display import quoted
from stoker.errors import InputError, unwritable
from stoker.runs.follow import RunFollower, RunNow
from stoker.runs.telemetry import GpuReading, Meter, ProcessReading, judge_gpu
from stoker.units import MB, MIB, local_time

LEAST_INTERVAL_SECONDS = 0.1
NUM_KEPT = 60  # looks that `Monitor.history` keeps
ONCE_SECONDS = 0.2  # between the two looks behind a single snapshot: rates need two


@dataclass(frozen=True)
class HostReading:
    """The machine around the process; a container sees its host here."""

    cpu_percent: float | None  # of all cores, since the last reading; None at the first one
    ram_used_bytes: int  # the total less what is available without swapping
    ram_total_bytes: int  # of the machine


@dataclass(frozen=True)
class Snapshot:
    """All readings at one `time` (seconds since 1970); `process` is the one that trains the run, on this host."""

    time: float
    gpus: tuple[GpuReading, ...]
    host: HostReading
    process: ProcessReading | None
    run: RunNow | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the verdict on each reading that has a target."""
        document = asdict(self)
        for gpu, plain in zip(self.gpus, document["gpus"], strict=True):
            plain["verdicts"] = judge_gpu(gpu)
        if self.run is not None:
            document["run"]["folder"] = str(self.run.folder)
        return document


class Monitor:
    """Looks at GPUs, host and run. Use as a context manager; one thread.

    Attributes:
        history: Of the last minute or so, one number per look: `busy N` in percent per GPU, `samples/s`.

    Args:
        run_dir: Folder of a run; it may come later.
        nvml: Module with pynvml's functions; None imports pynvml.

    Raises:
        InputError: `run_dir` is a file.
    """

    def __init__(self, run_dir: str | Path | None = None, nvml: Any = None) -> None:
        self._run = None if run_dir is None else RunFollower(run_dir)
        self._meter = Meter(pid=0, nvml=nvml)
        self._has_looked = False
        self.history: dict[str, deque[float | None]] = defaultdict(lambda: deque(maxlen=NUM_KEPT))

    def __enter__(self) -> Self:
        self._meter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._meter.__exit__(*error)

    def look(self) -> Snapshot:
        """Return a snapshot of the current state."""
        run = None if self._run is None else self._run.look()
        self._meter.pid = (run.pid if run is not None else None) or 0
        gpus = self._meter.read_gpus()
        for gpu in gpus:
            self.history[f"busy {gpu.index}"].append(gpu.utilization_percent)
        if run is not None:
            self.history["samples/s"].append(run.samples_per_second)
        return Snapshot(
            time.time(),
            gpus,
            self._read_host(),
            self._meter.read_process(),
            run,
            tuple(self._meter.notes),
        )

    def looks(self, interval_seconds: float, stop: threading.Event) -> Iterator[Snapshot]:
        """Yield a snapshot every `interval_seconds` until `stop` is set.

        Raises:
            InputError: The interval is too short to cost little.
        """
        if not interval_seconds >= LEAST_INTERVAL_SECONDS:
            raise InputError(
                f"an interval of {interval_seconds:g} s.",
                f"{LEAST_INTERVAL_SECONDS:g} s or more",
                "interval_seconds=1, or --interval 1",
            )
        due = time.monotonic()
        while not stop.is_set():
            yield self.look()
            # If a reading takes longer than the interval, the missed ones are not repeated.
            due = max(due + interval_seconds, time.monotonic())
            stop.wait(due - time.monotonic())

    def look_once(self) -> Snapshot:
        """Return one snapshot with rates, from two looks a fifth of a second apart."""
        self.look()
        time.sleep(ONCE_SECONDS)
        return self.look()

    def _read_host(self) -> HostReading:
        percent, first = psutil.cpu_percent(), not self._has_looked
        self._has_looked = True
        memory = psutil.virtual_memory()
        used = memory.total - memory.available
        return HostReading(None if first else percent, used, memory.total)


# -- CSV -----------------------------------------------------------------------------------------

# The first four are named and scaled as `nvidia-smi --format=csv,nounits` does.
CSV_COLUMNS = (
    "timestamp", "memory.used [MiB]", "memory.total [MiB]", "utilization.gpu [%]",
    "utilization.memory [%]", "index", "name", "temperature.gpu", "power.draw [W]", "power.limit [W]",
    "pcie.link.gen.current", "pcie.link.width.current", "pcie.rx [MB/s]", "pcie.tx [MB/s]",
    "clocks_event_reasons", "host.cpu [%]", "host.ram.used [MiB]", "process.cpu [cores]",
    "process.ram [MiB]", "run.state", "run.epoch", "run.step", "run.loss", "run.samples_per_second",
    "run.wait_share [%]",
)  # fmt: skip


class CsvLog:
    """Appends snapshots to a CSV file: a row per GPU and look, one with empty cells without a GPU.

    Once `write` returns, a row survives a kill of the process (not a power cut). Also a context manager.

    Args:
        path: The file; one that exists must have been made by this class.

    Raises:
        InputError: The file holds something else.
        StoreError: It cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("a+", newline="", encoding="utf-8")
            self._file.seek(0)
            header = self._file.readline()
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._rows = csv.writer(self._file)
        if not header:
            self._append([CSV_COLUMNS])
        elif header.rstrip("\r\n").split(",") != list(CSV_COLUMNS):
            self._file.close()
            raise InputError(
                f"{self.path} does not begin like a log of `stoker monitor`: {header[:60]!r}.",
                "a new file, or one that `stoker monitor --csv` made",
                f"--csv {quoted(self.path.with_name('gpu_log-2.csv'))}",
            )

    def write(self, snapshot: Snapshot) -> None:
        """Append a snapshot.

        Raises:
            StoreError: The disk is full, or the file cannot be written.
        """
        self._append([_row(snapshot, gpu) for gpu in snapshot.gpus or (None,)])

    def _append(self, rows: list[Any]) -> None:
        try:
            self._rows.writerows(rows)
            self._file.flush()
        except OSError as error:
            raise unwritable(self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _row(snapshot: Snapshot, gpu: GpuReading | None) -> list[Any]:
    """Return one row; unknown values become empty cells."""
    when = local_time(snapshot.time)
    values: dict[str, Any] = {
        "timestamp": f"{when:%Y/%m/%d %H:%M:%S}.{when.microsecond // 1000:03d}"
    }
    if gpu is not None:
        values |= _gpu_cells(gpu)
    values |= {
        "host.cpu [%]": snapshot.host.cpu_percent,
        "host.ram.used [MiB]": _in(snapshot.host.ram_used_bytes, MIB),
    }
    if snapshot.process is not None:
        values["process.cpu [cores]"] = snapshot.process.cpu_cores
        values["process.ram [MiB]"] = _in(snapshot.process.resident_bytes, MIB)
    run = snapshot.run
    if run is not None:
        values |= {f"run.{name}": getattr(run, name) for name in ("state", "epoch", "step", "loss")}
        values["run.samples_per_second"] = _rounded(run.samples_per_second, 1)
        share = run.wait_share
        values["run.wait_share [%]"] = None if share is None else _rounded(share * 100, 2)
    return [values.get(column) for column in CSV_COLUMNS]


def _gpu_cells(gpu: GpuReading) -> Mapping[str, Any]:
    reasons = gpu.throttle_reasons
    return {
        "memory.used [MiB]": _in(gpu.memory_used_bytes, MIB),
        "memory.total [MiB]": _in(gpu.memory_total_bytes, MIB),
        "utilization.gpu [%]": gpu.utilization_percent,
        "utilization.memory [%]": gpu.memory_utilization_percent,
        "index": gpu.index,
        "name": gpu.name,
        "temperature.gpu": gpu.temperature_celsius,
        "power.draw [W]": _rounded(gpu.power_watts, 1),
        "power.limit [W]": _rounded(gpu.power_limit_watts, 1),
        "pcie.link.gen.current": gpu.pcie_generation,
        "pcie.link.width.current": gpu.pcie_width,
        "pcie.rx [MB/s]": _in(gpu.pcie_received_bytes_per_second, MB),
        "pcie.tx [MB/s]": _in(gpu.pcie_sent_bytes_per_second, MB),
        "clocks_event_reasons": None if reasons is None else "; ".join(reasons) or "none",
    }


def _in(num_bytes: float | None, unit: int) -> int | None:
    return None if num_bytes is None else round(num_bytes / unit)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
