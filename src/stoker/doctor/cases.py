"""A case before the rules: the measurements, their pace, and the words that every rule needs.

Enters: `Measurements`. Leaves: a `Case`, and findings written by it. Costs nothing; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.doctor.findings import Finding, Gain, Patch
from stoker.doctor.gains import Pace, gain, is_starved, pace_of
from stoker.doctor.measurements import HostCall, HostSync, LoaderFacts, Measurements
from stoker.units import format_seconds

WORTHWHILE = 1.1
"""A likely gain below this is within the noise of most machines: no advice."""


@dataclass(frozen=True)
class Case:
    """What a rule is given.

    Attributes:
        measured: Everything.
        pace: None when no step was measured.
        starved: Whether the step waits for data.
    """

    measured: Measurements
    pace: Pace | None
    starved: bool

    @classmethod
    def of(cls, measured: Measurements) -> Case:
        """Prepare a case."""
        return cls(measured, pace_of(measured), is_starved(measured))

    @property
    def on_gpu(self) -> bool:
        """Whether the step computes on a GPU."""
        return self.measured.machine.device == "cuda"

    @property
    def cores(self) -> int:
        """Cores the job may use; 2 when unknown, which promises least."""
        return self.measured.machine.cores or 2

    @property
    def feeding(self) -> tuple[LoaderFacts, Pace] | None:
        """The loader and the pace, where the step waits for data; None otherwise."""
        loader = self.measured.loader
        if not self.starved or self.pace is None or loader is None:
            return None
        return loader, self.pace

    def share_of_step(self, seconds: float) -> float:
        """What part of a usual step `seconds` are."""
        step = self.measured.step_seconds
        return seconds / step.median if step and step.median > 0 else 0.0

    def wait_line(self) -> str:
        """The evidence that every loading finding begins with."""
        step, wait = self.measured.step_seconds, self.measured.wait_seconds
        assert step is not None
        assert wait is not None
        return (
            f"of a step of {milliseconds(step.median)}, {milliseconds(wait.median)} "
            f"({self.share_of_step(wait.median):.0%}) is waiting for data"
        )

    def finding(
        self,
        name: str,
        title: str,
        evidence: Iterable[str | None],
        remedy: str,
        gain: Gain,
        **patch: Any,
    ) -> Finding:
        """Write a finding; evidence that is None is left out."""
        return Finding(
            name=name,
            title=title,
            evidence=tuple(line for line in evidence if line),
            remedy=remedy,
            gain=gain,
            samples_per_second=self.measured.samples_per_second,
            patch=Patch(**patch),
        )


Rule = Callable[[Case], Finding | None]


def rule_name(rule: Rule) -> str:
    """Return the finding a rule may give: its function's name with dashes."""
    return rule.__name__.replace("_", "-")


def worthwhile(finding: Finding) -> Finding | None:
    """Return the finding if its likely gain is more than noise."""
    return finding if finding.gain.likely >= WORTHWHILE else None


def milliseconds(seconds: float) -> str:
    """Return "12.3 ms" below a second, seconds above: two steps that differ look different."""
    if seconds >= 1:
        return format_seconds(seconds)
    return f"{seconds * 1e3:.3g} ms"


def saved(pace: Pace, seconds: float, low: float = 0.5, likely: float = 0.95) -> Gain:
    """Return the gain of `seconds` less on the host, of which only shares may come true."""
    return gain(
        pace, pace.saving(seconds * likely), pace.saving(seconds * low), pace.saving(seconds)
    )


def call_lines(calls: Sequence[HostSync | HostCall]) -> list[str]:
    """Return the three costliest lines of code as evidence."""
    return [
        f"{call.where}: {call.call}, {call.calls_per_step:.3g} times and "
        f"{milliseconds(call.seconds_per_step)} per step"
        for call in calls[:3]
    ]
