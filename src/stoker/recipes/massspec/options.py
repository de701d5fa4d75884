"""What the massspec recipes may be told.

Enters: plain values of a config. Leaves: checked options, which the jobs and the networks read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from stoker.recipes.options import AtLeastOne, CheckedOptions, Range, Share

_TEMPERATURE = Range("1 or more", lambda value: value >= 1)


@dataclass(frozen=True)
class MassSpecOptions(CheckedOptions):
    """What both massspec recipes may be told.

    Attributes:
        max_mz: Last bin; None takes what the store was packed for.
        width: Width of the hidden layers.
        num_blocks: Residual blocks.
        bottleneck: Share of the width inside a block.
        dropout: Inside a block.
        mass_power: Power of the mass weights, in loss and metrics.
        recall_at: The k of recall@k.
        mass_tolerance: Tolerance of the mass filter, in dalton.
        warmup_share: Share of the updates in which the rate rises.
        ratios: Expected shares of compounds in train, val and test, for stores without a split.
    """

    max_mz: Annotated[int | None, Range("1 or more", lambda mz: mz >= 1, 500)] = None
    width: AtLeastOne = 1024
    num_blocks: AtLeastOne = 3
    bottleneck: Annotated[float, Range("above 0, up to 1", lambda share: 0 < share <= 1)] = 0.5
    dropout: Share = 0.25
    mass_power: float = 1.0
    recall_at: Annotated[
        tuple[int, ...],
        Range("one or more ranks of 1 or more", lambda ranks: bool(ranks) and min(ranks) >= 1),
    ] = (1, 5, 10)
    mass_tolerance: Annotated[float, Range("0 dalton or more", lambda mass: mass >= 0)] = 5.0
    warmup_share: Share = 0.05
    ratios: tuple[float, float, float] = (0.8, 0.1, 0.1)


@dataclass(frozen=True)
class StudentOptions(MassSpecOptions):
    """Options of the recipe "massspec".

    Attributes:
        teacher: A checkpoint of the recipe "massspec-teacher" to learn from as well.
        distill_weights: Weights of the loss against the measured spectrum, against the teacher's softened
            spectrum, and against the teacher's as it is, without a weight by mass.
        temperature_start: Temperature at the first update.
        temperature_end: Temperature at the last update.
    """

    teacher: str | None = None
    distill_weights: Annotated[
        tuple[float, float, float],
        Range(
            "three weights of 0 or more, not all 0",
            lambda weights: len(weights) == 3 and min(weights) >= 0 and sum(weights) > 0,
        ),
    ] = (0.3, 0.5, 0.2)
    temperature_start: Annotated[float, _TEMPERATURE] = 4.0
    temperature_end: Annotated[float, _TEMPERATURE] = 1.0


@dataclass(frozen=True)
class TeacherOptions(MassSpecOptions):
    """Options of the recipe "massspec-teacher".

    Attributes:
        num_layers: GINE layers; the published teacher has 8 of width 256, the default is lighter.
        graph_width: Features per atom.
        drop_edge: Share of bonds that carry no message in a training step.
    """

    num_blocks: AtLeastOne = 2
    num_layers: AtLeastOne = 4
    graph_width: AtLeastOne = 128
    drop_edge: Share = 0.2
