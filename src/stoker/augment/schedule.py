"""`ProgressiveAugmentation`: a different augmentation from given epochs on.

Enters: first epochs and a `Compose` for each. Leaves: one object that augments with the stage of the current epoch.
Costs nothing beside the stage itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.augment.compose import Compose
from stoker.augment.philox import check_counter
from stoker.augment.position import check_state
from stoker.errors import InputError


class ProgressiveAugmentation:
    """Stages of augmentation, each used from its first epoch on.

    A trainer holds this object and calls `set_epoch`, which selects the stage. Code that captured a CUDA
    graph compares `generation` and captures again when it has changed.

    Args:
        stages: First epoch -> augmentation; epoch 0 must be there.
            `{0: make_preset("minimal"), 50: make_preset("strong")}`

    Attributes:
        stages: As given, sorted by epoch.
        current: The stage of the current epoch.
        generation: Number of changes of stage.
    """

    def __init__(self, stages: Mapping[int, Compose]) -> None:
        fix = 'ProgressiveAugmentation({0: make_preset("minimal"), 50: make_preset("strong")})'
        if not isinstance(stages, Mapping) or 0 not in stages:
            raise InputError(f"stages {stages!r}.", "a mapping that begins with epoch 0", fix)
        for epoch, stage in stages.items():
            if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
                raise InputError(f"a stage from epoch {epoch!r}.", "whole numbers >= 0", fix)
            if not isinstance(stage, Compose):
                raise InputError(f"the stage from epoch {epoch} is {stage!r}.", "a Compose", fix)
        self.stages = dict(sorted(stages.items()))
        self.current = self.stages[0]
        self.generation = 0
        self._epoch = 0

    def __repr__(self) -> str:
        return f"ProgressiveAugmentation({self.stages!r})"

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch and select its stage."""
        self.seek(epoch)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Make the next draw that of (epoch, step), and select the stage of that epoch."""
        check_counter(0, epoch, step)  # raises before the stage is looked for
        due = self.stages[max(start for start in self.stages if start <= epoch)]
        due.seek(epoch, step)
        self.generation += due is not self.current
        self.current, self._epoch = due, epoch

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Augment a batch with the current stage; see `Compose`."""
        return self.current(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the current stage: `draw`, `apply`, `batches`, `boxes`, `state_dict`, ..."""
        if name.startswith("_") or name == "current":  # copy and pickle look before __init__ ran
            raise AttributeError(name)
        return getattr(self.current, name)

    def check(self) -> None:
        """Wait for the device and raise the faults that any stage found."""
        for stage in self.stages.values():
            stage.check()

    @property
    def needs_ids(self) -> bool:
        """Whether a stage has to know images from epoch to epoch."""
        return any(stage.needs_ids for stage in self.stages.values())

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was taken, with the stage of that epoch."""
        self.seek(check_state(state)["epoch"])
        self.current.load_state_dict(state)
