"""What the doctor says in the end: findings, the verdict, and what a treatment came to.

Enters: measurements and findings. Leaves: a `Consultation`, also as plain values. Costs nothing, and no
torch: somebody's script is judged without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.address import masked_values
from stoker.doctor.findings import Finding
from stoker.doctor.measurements import Measurements
from stoker.strict_json import json_text

HEALTHY = "nothing to fix"
_MOST_ELSEWHERE = 0.5
"""Of the time since the first step; above, the steps are not what the job is about."""


def describe_changes(changes: Mapping[str, Any]) -> str:
    """Return "training.batch_size: 64, training.capture: auto"."""
    words = (
        (key, value if isinstance(value, str) else json_text(value))
        for key, value in changes.items()
    )
    return ", ".join(f"{key}: {word}" for key, word in words)


@dataclass(frozen=True)
class Outcome:
    """A remedy that was applied and measured.

    Attributes:
        finding: What it was for.
        change: What was changed, in words.
        before: Samples per second as it was.
        after: With the change; None when it could not be measured.
        failure: What went wrong in the run with the change; "" when nothing did.
    """

    finding: Finding
    change: str
    before: float | None
    after: float | None
    failure: str = ""

    @property
    def ratio(self) -> float | None:
        """After by before; None when one is unknown."""
        if not self.before or self.after is None:
            return None
        return self.after / self.before

    @property
    def predicted(self) -> tuple[float, float, float] | None:
        """Low, likely and high samples per second, from the rate before and the predicted gain."""
        if self.before is None:
            return None
        gain = self.finding.gain
        return self.before * gain.low, self.before * gain.likely, self.before * gain.high

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "finding": self.finding.name,
            "change": self.change,
            "before": self.before,
            "predicted": self.predicted,
            "after": self.after,
            "ratio": self.ratio,
            "failure": self.failure,
        }


@dataclass(frozen=True)
class Consultation:
    """What was measured, and what the doctor says to it.

    Attributes:
        measurements: Everything.
        findings: The most worthwhile first; empty for a healthy job.
        outcome: Of `--apply`.
    """

    measurements: Measurements
    findings: tuple[Finding, ...]
    outcome: Outcome | None = None

    @property
    def verdict(self) -> str:
        """The one sentence that it comes to."""
        if not self.findings:
            if not self.measurements.steps:
                return "no training step was seen, so there is nothing to judge"
            elsewhere = self.measurements.elsewhere_share or 0.0
            if elsewhere > _MOST_ELSEWHERE:
                return (
                    f"{HEALTHY} in the training steps, but they are only {1 - elsewhere:.0%} of the time "
                    "since the first one; the notes say where the rest went"
                )
            return HEALTHY
        first = self.findings[0]
        if first.gain.likely <= 1.0:
            return f"{first.name}: {first.title}"
        return f"{first.name}: {first.title}; the remedy would bring ×\u00a0{first.gain.likely:.2f}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values: what `stoker report` and other programs read."""
        document = {
            "verdict": self.verdict,
            "samples_per_second": self.measurements.samples_per_second,
            "findings": [finding.to_json() for finding in self.findings],
            "outcome": None if self.outcome is None else self.outcome.to_json(),
            "measurements": self.measurements.to_json(),
        }
        plain: dict[str, Any] = masked_values(document)
        return plain
