"""History of a training run: one report per epoch, every loss, and every decision with its reason.

Enters: values from the trainer. Leaves: plain values for pages, logs and tests. Costs one float per step.

An epoch that was interrupted and resumed has one report over all its samples: its totals are in the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.report import Note, Topic


@dataclass
class EpochReport:
    """One epoch.

    Attributes:
        epoch: Its number.
        train_loss: Mean over its samples.
        metrics: Of validation; empty without one.
        num_samples: Trained on.
        seconds: Of training, validation not counted.
        wait_share: Share of that time spent waiting for batches.
    """

    epoch: int
    train_loss: float
    metrics: dict[str, float]
    num_samples: int
    seconds: float
    wait_share: float

    @property
    def samples_per_second(self) -> float:
        """Training rate."""
        return self.num_samples / max(self.seconds, 1e-9)


@dataclass
class EpochTally:
    """Totals of the current epoch, over all processes that trained on it.

    Attributes:
        total: Sum of its losses, each times its samples.
        num_samples: Of these losses.
        seconds: Of training.
        waited_seconds: Part of them spent waiting for batches.
        is_trained: Whether only its validation remains.
    """

    total: float = 0.0
    num_samples: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    is_trained: bool = False

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> EpochTally:
        """Return the totals of a `state_dict`; old checkpoints have None."""
        return cls() if state is None else cls(**state)

    def state_dict(self) -> dict[str, Any]:
        """Return the totals in plain values."""
        return asdict(self)

    def add(self, loss: float, num_samples: int) -> None:
        """Count a step."""
        self.total += loss * num_samples
        self.num_samples += num_samples

    def spend(self, since: float, now: float) -> float:
        """Add the time of training since then; return `now`."""
        self.seconds += now - since
        return now

    def report(self, epoch: int) -> EpochReport:
        """Return the epoch so far, without metrics."""
        mean = self.total / self.num_samples if self.num_samples else math.nan
        share = self.waited_seconds / max(self.seconds, 1e-9)
        return EpochReport(epoch, mean, {}, self.num_samples, self.seconds, share)


@dataclass
class History:
    """History of a run.

    Attributes:
        epochs: Reports of finished epochs.
        losses: Loss of every step, in order, across epochs.
        ended: "done", "terminated" or "interrupted".
        told: Decisions with their reasons, and events, in order.
    """

    epochs: list[EpochReport] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    ended: str = "done"
    told: list[Note] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """The texts of `told`."""
        return [note.text for note in self.told]

    @property
    def step(self) -> Note | None:
        """The last note on how steps run; its value `captured` says whether as one CUDA graph."""
        return next((note for note in reversed(self.told) if note.topic is Topic.STEP), None)

    @property
    def is_captured(self) -> bool:
        """Whether steps run as one CUDA graph."""
        return self.step is not None and bool(self.step.values["captured"])
