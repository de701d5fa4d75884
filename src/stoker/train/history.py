"""What a training run did: one report per epoch, every loss, and every choice with its reason.

Enters: what the trainer fills in. Leaves: plain values for pages, logs and tests. Costs one float per step.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
class History:
    """What a run did.

    Attributes:
        epochs: Reports of those that were finished.
        losses: Loss of every step, in order, across epochs.
        ended: "done", "terminated" or "interrupted".
        notes: Choices with their reasons.
    """

    epochs: list[EpochReport] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    ended: str = "done"
    notes: list[str] = field(default_factory=list)
