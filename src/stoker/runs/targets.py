"""Where a busy GPU's readings should lie, and the words for where they are.

Enters: readings. Leaves: "below", "within", "above", or None where nothing was read. Costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stoker.runs.telemetry import GpuReading

Verdict = Literal["below", "within", "above"]

BUSY_FOOTNOTE = (
    "busy is utilization.gpu: the share of time with at least one kernel running. One small kernel is "
    "enough, so it is not occupancy: trust samples/s."
)


@dataclass(frozen=True)
class Target:
    """A range of percents or degrees.

    Attributes:
        low: The least that is aimed at; 0 when any little is fine.
        high: The most.
        below: What it means to be below.
        above: What it means to be above.
    """

    low: float
    high: float
    below: str
    above: str

    def judge(self, value: float | None) -> Verdict | None:
        """Say where a value lies; the ends belong to the range."""
        if value is None:
            return None
        return "below" if value < self.low else "above" if value > self.high else "within"


BUSY = Target(85, 95, "waiting for the host", "no headroom, and nothing wrong with that")
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
