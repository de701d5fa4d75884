"""The results of an examination: findings, the verdict, and the outcome of an applied remedy.

Enters: the decisions of the rules. Leaves: frozen values, also as JSON. Costs nothing. Imports no torch: scripts are
examined without it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.address import masked_values
from stoker.display import command
from stoker.doctor.measurements import Measurements
from stoker.strict_json import json_text

_EXPLANATIONS = Path(__file__).with_name("explanations.md")


@dataclass(frozen=True)
class Gain:
    """Speed-up by the remedy, in samples per second (after / before). 1 is no gain."""

    low: float = 1.0  # cautious estimate
    likely: float = 1.0  # expected value
    high: float = 1.0  # hopeful estimate

    def times(self, rate: float | None) -> tuple[float, float, float] | None:
        """Return a rate after the remedy: low, likely, high; None if it is unknown now."""
        return None if rate is None else (rate * self.low, rate * self.likely, rate * self.high)


@dataclass(frozen=True)
class Patch:
    """The change that a finding suggests."""

    # keys of a stoker config with their new values, for stoker's own jobs
    config: Mapping[str, Any] = field(default_factory=dict)
    # arguments of torch's DataLoader with their new values, for scripts; these can be tried without editing the script
    # (see `attach.run_script`)
    loader_arguments: Mapping[str, Any] = field(default_factory=dict)
    where: str | None = None  # file:line of the script to edit
    script: str = ""  # suggested code or edit, a few lines; "" if there is none
    # code that can replace the call at `where`, in a script that imports stoker; "" if there is none
    replacement: str = ""


@dataclass(frozen=True)
class Finding:
    """One cause of lost time, or of a run that will fail."""

    name: str  # such as "sync-every-step"; the name of its explanation
    title: str  # the cause in a few words
    evidence: tuple[str, ...]  # lines with numbers and file:line
    remedy: str  # one sentence
    gain: Gain = field(default_factory=Gain)
    samples_per_second: float | None = None  # rate now; None if samples were not counted
    patch: Patch = field(default_factory=Patch)
    # whether the job fails or is worthless without the remedy: memory that grows, values that are not finite
    ends_the_run: bool = False

    @property
    def docs(self) -> str:
        """The command that explains this finding and its remedy; it works wherever stoker is installed."""
        return command("stoker", "doctor", "explain", self.name)

    @property
    def predicted_samples_per_second(self) -> tuple[float, float, float] | None:
        """Samples per second after the remedy: low, likely, high; None if the rate now is unknown."""
        return self.gain.times(self.samples_per_second)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, including derived ones; `from_json` reads them."""
        return {
            **dataclasses.asdict(self),
            "docs": self.docs,
            "predicted_samples_per_second": self.predicted_samples_per_second,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Finding:
        """Read what `to_json` wrote."""
        from pydantic import TypeAdapter  # here: a script is examined without it

        return TypeAdapter(cls).validate_python(document)


def explanations() -> dict[str, str]:
    """Return the explanation of every finding by name, from docs/doctor.md (`explanations.md` is a link to it)."""
    page = _EXPLANATIONS.read_text(encoding="utf-8")
    part = page.partition("\n## Findings\n")[2].partition("\n## ")[0]
    pieces = re.split(r"^### (\S+)$", part, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], (text.strip() for text in pieces[2::2]), strict=True))


HEALTHY = "nothing to fix"
_MOST_ELSEWHERE = 0.25
"""The verdict mentions time outside of the steps above this share of the time since the first step."""


def describe_changes(changes: Mapping[str, Any]) -> str:
    """Return changes of a config as text, such as "training.batch_size: 64, training.capture: auto"."""
    return ", ".join(
        f"{key}: {value if isinstance(value, str) else json_text(value)}"
        for key, value in changes.items()
    )


@dataclass(frozen=True)
class Outcome:
    """The result of applying a remedy and measuring again."""

    finding: Finding  # whose remedy was applied
    change: str  # the change in words
    before: float | None  # samples per second without the change
    after: float | None  # samples per second with it; None if it could not be measured
    failure: str = ""  # what went wrong in the run with the change; "" if nothing did

    @property
    def ratio(self) -> float | None:
        """Speed-up (after / before), or None if either is unknown."""
        if not self.before or self.after is None:
            return None
        return self.after / self.before

    @property
    def predicted(self) -> tuple[float, float, float] | None:
        """Low, likely and high samples per second: the rate before times the predicted gain."""
        return self.finding.gain.times(self.before)

    @property
    def miss(self) -> str:
        """By how much the measured rate misses the predicted range, in words; "" if it does not, or if unknown."""
        predicted = self.predicted
        if predicted is None or self.after is None or self.failure:
            return ""
        low, likely, high = predicted
        if low <= self.after <= high:
            return ""
        side = "below" if self.after < low else "above"
        return (
            f"the prediction missed: {abs(self.after / likely - 1):.0%} {side} the likely rate; other work on the "
            "machine, or a second cause behind this one"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "finding": self.finding.name,
            "miss": self.miss,
            "change": self.change,
            "before": self.before,
            "predicted": self.predicted,
            "after": self.after,
            "ratio": self.ratio,
            "failure": self.failure,
        }


@dataclass(frozen=True)
class Consultation:
    """The measurements and the findings."""

    measurements: Measurements  # everything that was measured
    findings: tuple[Finding, ...]  # largest gain first; empty for a healthy job
    outcome: Outcome | None = None  # the result of `--apply`, if it ran
    # why the speed cannot be judged; "" if it can, or if a finding predicts a gain
    unjudged: str = ""
    # findings expected after the first finding's remedy; their gains are relative to that
    later: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if not self.findings:
            if not self.measurements.steps and self.measurements.unjudged:
                return f"cannot judge: {'; '.join(self.measurements.unjudged)}"
            if not self.measurements.steps:
                return "no training step was seen, so there is nothing to judge"
            if self.unjudged:
                return f"cannot judge: {self.unjudged}"
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

    @property
    def overlap(self) -> str:
        """A note that gains cannot be multiplied; "" if fewer than two findings have one."""
        if sum(finding.gain.likely > 1.0 for finding in self.findings) < 2:
            return ""
        return (
            "these gains overlap: each is that of its remedy alone, and they are not to be multiplied; "
            "measure again after the first"
        )

    @property
    def behind(self) -> tuple[str, ...]:
        """A line for each cost that the first finding hides, or one that says why the speed cannot be judged."""
        if self.findings and self.unjudged and not self.later:
            return (f"cannot judge its speed: {self.unjudged}",)
        return tuple(
            f"hidden behind it: {one.name}, {one.title}: ×\u00a0{one.gain.likely:.2f} more after the first remedy"
            + (f" ({one.patch.where})" if one.patch.where else "")
            for one in self.later
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for `stoker report` and other programs."""
        document = {
            "verdict": self.verdict,
            "samples_per_second": self.measurements.samples_per_second,
            "unjudged": self.unjudged,
            "overlap": self.overlap,
            "findings": [finding.to_json() for finding in self.findings],
            "later": [finding.to_json() for finding in self.later],
            "outcome": None if self.outcome is None else self.outcome.to_json(),
            "measurements": self.measurements.to_json(),
        }
        plain: dict[str, Any] = masked_values(document)
        return plain
