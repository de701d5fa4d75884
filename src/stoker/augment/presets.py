"""Ready lists of ops by name ("minimal", "standard", "strong"), and a different augmentation from given epochs on.

Enters: a name and the strength of each op; first epochs and a `Compose` for each. Leaves: a `Compose`; one object that
augments with the stage of the current epoch. Costs what a `Compose` costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stoker.arguments import explained
from stoker.augment.compose import Compose
from stoker.augment.definition import Op
from stoker.augment.geometry import RandomAffine, RandomHorizontalFlip, RandomRotation
from stoker.augment.ops import ColorJitter, GaussianBlur, Normalize, ToDtype
from stoker.augment.philox import check_counter
from stoker.augment.position import check_state
from stoker.errors import InputError

Channels = float | Sequence[float]


def minimal_ops(horizontal_flip_prob: float = 0.5) -> list[Op]:
    """The flip alone: for small memory and for the first epochs."""
    return [RandomHorizontalFlip(horizontal_flip_prob)]


def standard_ops(
    horizontal_flip_prob: float = 0.5,
    rotation_degrees: float = 15,
    brightness: float = 0.2,
    contrast: float = 0.2,
    saturation: float = 0.1,
) -> list[Op]:
    """Flip, rotation (p 0.3), scale 0.9 to 1.1 with shift 5 % (p 0.3), colour jitter (p 0.5)."""
    return [
        RandomHorizontalFlip(horizontal_flip_prob),
        RandomRotation(rotation_degrees, p=0.3),
        RandomAffine(scale=(0.9, 1.1), translate=(0.05, 0.05), p=0.3),
        ColorJitter(brightness, contrast, saturation, p=0.5),
    ]


def strong_ops(
    horizontal_flip_prob: float = 0.5,
    rotation_degrees: float = 20,
    brightness: float = 0.3,
    contrast: float = 0.3,
    saturation: float = 0.15,
) -> list[Op]:
    """Rotation 20 (p 0.4), scale 0.85 to 1.15 with shift 10 % (p 0.4), jitter (p 0.5), blur (p 0.2)."""
    return [
        RandomHorizontalFlip(horizontal_flip_prob),
        RandomRotation(rotation_degrees, p=0.4),
        RandomAffine(scale=(0.85, 1.15), translate=(0.1, 0.1), p=0.4),
        ColorJitter(brightness, contrast, saturation, p=0.5),
        GaussianBlur(3, sigma=(0.1, 2.0), p=0.2),
    ]


PRESETS: dict[str, Callable[..., list[Op]]] = {
    "minimal": minimal_ops,
    "standard": standard_ops,
    "strong": strong_ops,
}


@explained("make_preset('standard')")
def make_preset(
    name: str,
    *,
    mean: Channels | None = None,
    std: Channels | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    stream: int = 0,
    ignore_index: int = 255,
    backend: str = "auto",
    **strengths: Any,
) -> Compose:
    """Build a preset.

    Args:
        name: "minimal", "standard" or "strong".
        mean: Normalise after augmenting, with `std`; both or neither.
        std: See `mean`.
        dtype: Dtype of the images that leave; float32 by default.
        seed: Another seed, other draws.
        stream: Number of the random stream; ranks take one each.
        ignore_index: Written in masks where no input pixel is.
        backend: "auto", "torch" or "fused".
        **strengths: Arguments of `minimal_ops`, `standard_ops` or `strong_ops`.
    """
    if name not in PRESETS:
        raise InputError(
            f"an augmentation preset {name!r}.", ", ".join(PRESETS), 'make_preset("standard")'
        )
    ops = add_normalisation(PRESETS[name](**strengths), mean, std, dtype)
    return Compose(ops, seed=seed, stream=stream, ignore_index=ignore_index, backend=backend)


def add_normalisation(
    ops: Sequence[Op], mean: Channels | None, std: Channels | None, dtype: torch.dtype | None
) -> list[Op]:
    """Return `ops` followed by normalisation and conversion where they are asked for."""
    if (mean is None) != (std is None):
        raise InputError(
            f"mean is {mean!r} and std is {std!r}.",
            "both or neither",
            "mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)",
        )
    ending: list[Op] = [] if mean is None or std is None else [Normalize(mean, std)]
    return [*ops, *ending, *([] if dtype is None else [ToDtype(dtype)])]


@explained('ProgressiveAugmentation({0: make_preset("minimal"), 50: make_preset("strong")})')
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
