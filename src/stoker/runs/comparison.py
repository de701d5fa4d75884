"""The figures by which runs are compared, and their ratios.

Enters: `RunRecord`s. Leaves: numbers, and the words for them. Costs a pass over the telemetry per figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.page import format_number
from stoker.runs.record import RunRecord, as_number, mean
from stoker.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True)
class Quantity:
    """One line of the comparison.

    Attributes:
        key: Its name for programs.
        title: Its name for people.
        value: Of a run; None where it is not known.
        text: A value for people.
        has_ratio: Whether dividing by the first run's value says something.
    """

    key: str
    title: str
    value: Callable[[RunRecord], float | None]
    text: Callable[[float | None], str]
    has_ratio: bool = True


def _gpu_mean(name: str) -> Callable[[RunRecord], float | None]:
    return lambda run: mean(v for index in run.gpu_indices for _, v in run.gpu_track(index, name))


def _energy(run: RunRecord) -> float | None:
    """Return watt hours of the GPUs per million samples."""
    watts, rate = _gpu_mean("power_watts")(run), run.samples_per_second
    return None if watts is None or not rate else watts * len(run.gpu_indices) / rate * 1e6 / 3600


def _batch_size(run: RunRecord) -> float | None:
    return as_number(run.config.get("training.batch_size"))


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
    Quantity("batch_size", "Batch size", _batch_size, _whole),
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
            "figures": {quantity.key: quantity.value(run) for quantity in QUANTITIES},
            "ratios": {
                quantity.key: ratio(quantity, runs[0], run)
                for quantity in QUANTITIES
                if quantity.has_ratio
            },
        }
        for run in runs
    ]


def ratio(quantity: Quantity, first: RunRecord, run: RunRecord) -> float | None:
    """Return how many times the first run's value; None where one of them is not known."""
    base, value = quantity.value(first), quantity.value(run)
    return None if value is None or not base or not quantity.has_ratio else value / base
