"""A run as one frozen value: its course over time, and the figures computed from it.

Enters: what `reading.py` found in a run's folder. Leaves: a `RunRecord`; tracks over time, means, peaks.
Costs a pass over the telemetry per track.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from stoker.page import format_number
from stoker.report import as_mapping, as_mappings, as_number
from stoker.runs.evaluation import Evaluation
from stoker.units import format_bytes, format_count, format_seconds

State = Literal["running", "done", "stopped", "failed", "cut short", "empty"]
Track = list[tuple[float, float | None]]


BUSY_SHARE = 0.2
"""If other work takes this share of a machine's cores or more, rates of runs are not compared."""


@dataclass(frozen=True)
class Epoch:
    """One finished epoch, as `EpochReport` has it."""

    number: int
    at: float  # seconds since the run began, without pauses
    step: int | None  # batches trained on when it ended
    train_loss: float | None
    metrics: Mapping[str, float]
    num_samples: float | None
    seconds: float | None
    wait_share: float | None
    samples_per_second: float | None


@dataclass(frozen=True)
class Event:
    """An incident of a run."""

    at: float  # seconds since the run began, without pauses
    kind: str  # "memory", "loss", "resumed", "ended" or "telemetry"
    text: str  # its message
    step: int | None = None  # step of the message; None where that is not known


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder."""

    folder: Path  # of the run
    name: str  # last part of the folder; the page of several runs makes it unique
    state: State  # its state
    told: str  # the state in a sentence
    began: float | None  # seconds since 1970; None for an empty log
    seconds: float  # from the beginning to the last event, pauses left out
    num_sessions: int  # processes that worked on it: one, and one more per resume
    epochs: tuple[Epoch, ...]  # finished ones, each once: the last report of a number counts
    losses: tuple[tuple[int, float], ...]  # (step, mean training loss of a block)
    # (seconds since the beginning, values) of every reading
    telemetry: tuple[tuple[float, Mapping[str, Any]], ...]
    notes: tuple[str, ...]  # choices with their reasons, of the last session
    events: tuple[Event, ...]  # what happened, in order
    config: Mapping[str, Any]  # settings of the last session by key; empty where not recorded
    reasons: Mapping[str, str]  # key to the origin of its value
    plan: Mapping[str, Any]  # as `Plan.to_json`; empty where not recorded
    machine: Mapping[str, Any]  # as `Machine.to_json`; empty where not recorded
    # what was trained on, what was left out of it, and a digest of data and code; empty where not recorded
    data: Mapping[str, Any]
    # the best checkpoint on validation and test samples, and chance; empty before the end
    result: Mapping[str, Any]
    findings: tuple[Mapping[str, Any], ...]  # the doctor's, if it was run
    problems: tuple[str, ...]  # what could not be read

    def track(self, part: str, name: str) -> Track:
        """Return one number of `run`, `process` or `host` over time; None where it was not known."""
        return [(at, as_number(as_mapping(v.get(part)).get(name))) for at, v in self.telemetry]

    def gpu_track(self, index: int, name: str) -> Track:
        """Return one number of a GPU over time."""
        return [(at, as_number(gpu.get(name))) for at, gpu in self._by_gpu.get(index, [])]

    def gpu_values(self, name: str) -> list[float | None]:
        """Return one number of all GPUs, at every reading."""
        return [value for index in self.gpu_indices for _, value in self.gpu_track(index, name)]

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """Evaluation of the best checkpoint; None before it was evaluated."""
        return Evaluation.from_json(self.result.get("evaluation"))

    @cached_property
    def _by_gpu(self) -> dict[int, list[tuple[float, Mapping[str, Any]]]]:
        found: dict[int, list[tuple[float, Mapping[str, Any]]]] = {}
        for at, values in self.telemetry:
            for gpu in as_mappings(values.get("gpus")):
                index = as_number(gpu.get("index"))
                if index is not None:
                    found.setdefault(int(index), []).append((at, gpu))
        return found

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """GPUs that telemetry has seen."""
        return tuple(sorted(self._by_gpu))

    def gpu_name(self, index: int) -> str:
        """Return the number of a GPU and its name from the driver."""
        names = (gpu.get("name") for _, gpu in self._by_gpu.get(index, []))
        return f"GPU {index}, {next((str(name) for name in names if name), 'name unknown')}"

    @cached_property
    def throttle_shares(self) -> dict[str, float]:
        """Share of readings in which something but idleness held a GPU's clocks down, by reason."""
        told = [
            [str(word) for word in gpu["throttle_reasons"]]
            for readings in self._by_gpu.values()
            for _, gpu in readings
            if isinstance(gpu.get("throttle_reasons"), list)
        ]
        words = {word for reasons in told for word in reasons} - {"idle"}
        shares = {word: sum(word in reasons for reasons in told) / len(told) for word in words}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @cached_property
    def samples_per_second(self) -> float | None:
        """Training rate over the epochs after the first, if there are several; without epochs, the telemetry's mean."""
        return self._per_second("samples_per_second", lambda epoch, _: epoch.num_samples)

    @cached_property
    def wait_share(self) -> float | None:
        """Share of training time spent waiting for batches, over the same epochs."""
        return self._per_second(
            "wait_share",
            lambda epoch, seconds: None if epoch.wait_share is None else epoch.wait_share * seconds,
        )

    def _per_second(self, key: str, amount: Callable[[Epoch, float], float | None]) -> float | None:
        """Return amounts over seconds of the epochs after the first; without any, the mean of the telemetry."""
        known = [
            (found, epoch.seconds)
            for epoch in self.epochs
            if epoch.seconds and (found := amount(epoch, epoch.seconds)) is not None
        ]
        if steady := known[1:] or known:
            return sum(found for found, _ in steady) / sum(seconds for _, seconds in steady)
        return mean(value for _, value in self.track("run", key))

    @cached_property
    def other_cores(self) -> float | None:
        """Cores that other processes kept busy, on average; None where that was not recorded."""
        return mean(value for _, value in self.track("host", "other_cores"))

    @property
    def is_disturbed(self) -> bool:
        """Whether other work took so much of the machine that the run's speed is not its own."""
        cores = largest(value for _, value in self.track("host", "num_cores"))
        return bool(cores) and (self.other_cores or 0.0) >= BUSY_SHARE * (cores or 1.0)

    @cached_property
    def epoch_seconds(self) -> float | None:
        """Mean time of an epoch, the first one left out where there are several."""
        known = [epoch.seconds for epoch in self.epochs if epoch.seconds]
        return mean(known[1:] or known)

    @cached_property
    def peak_device_bytes(self) -> float | None:
        """Most device memory that the process held; NVML's reading where torch's is missing."""
        held = largest(value for _, value in self.track("run", "reserved_bytes"))
        return largest(self.gpu_values("memory_used_bytes")) if held is None else held


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values, or None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def largest(values: Iterable[float | None]) -> float | None:
    """Return the largest of the known values, or None."""
    return max((value for value in values if value is not None), default=None)


# -- figures of runs, side by side ------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """One line of the comparison."""

    key: str  # its name for programs
    title: str  # its name for readers
    value: Callable[[RunRecord], float | None]  # of a run; None where it is not known
    text: Callable[[float | None], str]  # formats a value
    has_ratio: bool = True  # whether the ratio to the first run's value is shown


def _gpu_mean(name: str) -> Callable[[RunRecord], float | None]:
    return lambda run: mean(run.gpu_values(name))


def _energy(run: RunRecord) -> float | None:
    """Return watt hours of the GPUs per million samples."""
    watts, rate = mean(run.gpu_values("power_watts")), run.samples_per_second
    return None if watts is None or not rate else watts * len(run.gpu_indices) / rate * 1e6 / 3600


def _last_loss(run: RunRecord) -> float | None:
    return run.epochs[-1].train_loss if run.epochs else run.losses[-1][1] if run.losses else None


def _best_validation(run: RunRecord) -> float | None:
    losses = [epoch.metrics["loss"] for epoch in run.epochs if "loss" in epoch.metrics]
    return min(losses, default=None)


def format_rate(value: float | None) -> str:
    """Return samples/s with three digits at least; n/a when unknown."""
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_share(value: float | None) -> str:
    """Return "4.2 %"; n/a when unknown."""
    return "n/a" if value is None else f"{value * 100:.1f} %"


def _whole(value: float | None) -> str:
    return format_count(None if value is None else int(value))


def _with(unit: str, digits: int = 0) -> Callable[[float | None], str]:
    return lambda value: "n/a" if value is None else f"{value:,.{digits}f} {unit}"


QUANTITIES = (
    Quantity("samples_per_second", "Samples/s", lambda run: run.samples_per_second, format_rate),
    Quantity("wait_share", "Waited for batches", lambda run: run.wait_share, format_share, False),
    Quantity("epoch_seconds", "Mean epoch", lambda run: run.epoch_seconds, format_seconds),
    Quantity("seconds", "Whole run", lambda run: run.seconds or None, format_seconds),
    Quantity("num_epochs", "Epochs finished", lambda run: len(run.epochs), _whole, False),
    Quantity("batch_size", "Batch size", lambda run: as_number(run.config.get("training.batch_size")), _whole),
    Quantity("train_loss", "Last training loss", _last_loss, format_number),
    Quantity("validation_loss", "Best validation loss", _best_validation, format_number),
    Quantity("device_bytes", "Most device memory", lambda run: run.peak_device_bytes, format_bytes),
    Quantity("gpu_busy_percent", "GPU busy, mean", _gpu_mean("utilization_percent"), _with("%"), False),
    Quantity("gpu_watts", "GPU power, mean", _gpu_mean("power_watts"), _with("W")),
    Quantity("other_cores", "Other work, mean", lambda run: run.other_cores, _with("cores", 1), False),
    Quantity("watt_hours_per_million", "Energy, 1M samples", _energy, _with("Wh", 1)),
)  # fmt: skip


def compare(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the figures of every run as plain values, and their ratio to the first run's."""
    return [
        {
            "run": run.name,
            "folder": str(run.folder),
            "state": run.state,
            "is_disturbed": run.is_disturbed,
            "figures": {each.key: each.value(run) for each in QUANTITIES},
            "ratios": {
                each.key: ratio(each, runs[0], run) for each in QUANTITIES if each.has_ratio
            },
        }
        for run in runs
    ]


def ratio(quantity: Quantity, first: RunRecord, run: RunRecord) -> float | None:
    """Return the ratio of a run's value to the first run's; None where one of them is not known."""
    base, value = quantity.value(first), quantity.value(run)
    return None if value is None or not base or not quantity.has_ratio else value / base
