"""What the doctor says: a named finding with its evidence, its remedy and what the remedy would bring.

Enters: what the rules decide. Leaves: frozen `Finding`s, also as JSON and back. Costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.doctor.measurements import build

DOCS_PAGE = "docs/doctor.md"


@dataclass(frozen=True)
class Gain:
    """How many times the samples per second after the remedy, compared with now. 1 is no gain.

    Attributes:
        low: At least, if the remedy works as such remedies usually do.
        likely: What to expect.
        high: At most.
    """

    low: float = 1.0
    likely: float = 1.0
    high: float = 1.0


@dataclass(frozen=True)
class Patch:
    """What to change.

    Attributes:
        config: Keys of a stoker config with their new values, for stoker's own jobs.
        loader_arguments: Arguments of torch's DataLoader with their new values, for scripts; these can be
            tried without editing the script (see `attach.run_script`).
        where: file:line of the script that `script` is about.
        script: Suggested code or edit, a few lines; empty when there is none.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    loader_arguments: Mapping[str, Any] = field(default_factory=dict)
    where: str | None = None
    script: str = ""


@dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
        name: Such as "sync-every-step"; its anchor on the docs page.
        title: In a few words.
        evidence: Lines with numbers and file:line.
        remedy: One sentence.
        gain: Predicted.
        samples_per_second: Now; None when samples were not counted.
        patch: What to change.
        ends_the_run: Whether the job would fail or be worthless if nothing is done: memory that creeps,
            values that are not finite.
    """

    name: str
    title: str
    evidence: tuple[str, ...]
    remedy: str
    gain: Gain = field(default_factory=Gain)
    samples_per_second: float | None = None
    patch: Patch = field(default_factory=Patch)
    ends_the_run: bool = False

    @property
    def docs(self) -> str:
        """Where the docs speak of it."""
        return f"{DOCS_PAGE}#{self.name}"

    @property
    def predicted_samples_per_second(self) -> tuple[float, float, float] | None:
        """After the remedy: low, likely, high."""
        now = self.samples_per_second
        if now is None:
            return None
        return now * self.gain.low, now * self.gain.likely, now * self.gain.high

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the derived ones too; `from_json` gives the finding back."""
        return {
            **dataclasses.asdict(self),
            "docs": self.docs,
            "predicted_samples_per_second": self.predicted_samples_per_second,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Finding:
        """Read what `to_json` wrote."""
        known = {item.name for item in dataclasses.fields(cls)}
        built: Finding = build(cls, {n: value for n, value in document.items() if n in known})
        return built
