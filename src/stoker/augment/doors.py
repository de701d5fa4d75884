"""The documented names of S3: ready augmentations, a schedule over epochs, and the way from a config.

Enters: the keyword arguments of the documents, or `AugmentationSettings`. Leaves: a `Compose`, called
as `aug(images)` or `aug(images, masks)`. Costs what a `Compose` costs; nothing here works on pixels.

Unlike in the documents' own code: masks are labels and stay so (integer in, the same dtype out, the
ignore index in rotated-in corners, never class 0), every key of the config has an effect, and a
change of schedule reaches a trainer that already holds the object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from stoker.augment.compose import Compose, Params
from stoker.augment.definition import Op
from stoker.augment.dice import check_state, make_counter
from stoker.augment.ops import (
    ColorJitter,
    GaussianBlur,
    Normalize,
    RandomAffine,
    RandomHorizontalFlip,
    RandomRotation,
    ToDtype,
)
from stoker.config.resolve import AugmentationSettings
from stoker.errors import InputError

Tensor = torch.Tensor
Channels = float | Sequence[float]


def _with_ending(
    ops: Sequence[Op], mean: Channels | None, std: Channels | None, dtype: torch.dtype | None
) -> list[Op]:
    """Return `ops` with normalisation and dtype where they were asked for."""
    if (mean is None) != (std is None):
        raise InputError(
            f"mean is {mean!r} and std is {std!r}.",
            "both or neither",
            "mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)",
        )
    ending: list[Op] = [] if mean is None or std is None else [Normalize(mean, std)]
    return [*ops, *ending, *([] if dtype is None else [ToDtype(dtype)])]


class GPUAugmentation(Compose):
    """Flip, rotation (p 0.3), scale 0.9 to 1.1 with shift 5 % (p 0.3), colour jitter (p 0.5).

    Args:
        horizontal_flip_prob: Share of samples flipped left to right.
        rotation_degrees: Rotate by up to this, either way.
        brightness, contrast, saturation: Factors within 1 ± this.
        mean, std: Normalise after augmenting; both or neither.
        dtype: Of the images that leave; float32 by default.
        seed: Another seed, other draws.
        ignore_index: Written in masks where no input pixel is.
        backend: "auto", "torch" or "fused".
    """

    def __init__(
        self,
        horizontal_flip_prob: float = 0.5,
        rotation_degrees: float = 15,
        brightness: float = 0.2,
        contrast: float = 0.2,
        saturation: float = 0.1,
        *,
        mean: Channels | None = None,
        std: Channels | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        stream: int = 0,
        ignore_index: int = 255,
        backend: str = "auto",
    ) -> None:
        ops = [
            RandomHorizontalFlip(horizontal_flip_prob),
            RandomRotation(rotation_degrees, p=0.3),
            RandomAffine(scale=(0.9, 1.1), translate=(0.05, 0.05), p=0.3),
            ColorJitter(brightness, contrast, saturation, p=0.5),
        ]
        super().__init__(
            _with_ending(ops, mean, std, dtype),
            seed=seed,
            stream=stream,
            ignore_index=ignore_index,
            backend=backend,
        )


class MinimalGPUAugmentation(Compose):
    """The flip alone: for small memory and for the first epochs. Arguments as above."""

    def __init__(
        self,
        horizontal_flip_prob: float = 0.5,
        *,
        mean: Channels | None = None,
        std: Channels | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        stream: int = 0,
        ignore_index: int = 255,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            _with_ending([RandomHorizontalFlip(horizontal_flip_prob)], mean, std, dtype),
            seed=seed,
            stream=stream,
            ignore_index=ignore_index,
            backend=backend,
        )


class StrongGPUAugmentation(Compose):
    """Rotation 20 (p 0.4), scale 0.85 to 1.15 with shift 10 % (p 0.4), jitter (p 0.5), blur (p 0.2).

    Arguments as for `GPUAugmentation`, with stronger defaults.
    """

    def __init__(
        self,
        horizontal_flip_prob: float = 0.5,
        rotation_degrees: float = 20,
        brightness: float = 0.3,
        contrast: float = 0.3,
        saturation: float = 0.15,
        *,
        mean: Channels | None = None,
        std: Channels | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        stream: int = 0,
        ignore_index: int = 255,
        backend: str = "auto",
    ) -> None:
        ops = [
            RandomHorizontalFlip(horizontal_flip_prob),
            RandomRotation(rotation_degrees, p=0.4),
            RandomAffine(scale=(0.85, 1.15), translate=(0.1, 0.1), p=0.4),
            ColorJitter(brightness, contrast, saturation, p=0.5),
            GaussianBlur(3, sigma=(0.1, 2.0), p=0.2),
        ]
        super().__init__(
            _with_ending(ops, mean, std, dtype),
            seed=seed,
            stream=stream,
            ignore_index=ignore_index,
            backend=backend,
        )


class ProgressiveAugmentation:
    """One augmentation from each epoch on, changed in place.

    A trainer holds this object and calls `set_epoch`; the stage changes under its hands. Whoever
    captured a CUDA graph compares `generation` and captures again when it has changed.

    Args:
        stages: First epoch -> augmentation; epoch 0 must be there.
            `{0: MinimalGPUAugmentation(), 50: StrongGPUAugmentation()}`

    Attributes:
        stages: As given, in the order of their epochs.
        current: The stage that works now.
        generation: Counts the changes of stage.
    """

    def __init__(self, stages: Mapping[int, Compose]) -> None:
        fix = "ProgressiveAugmentation({0: MinimalGPUAugmentation(), 50: StrongGPUAugmentation()})"
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
        """Begin an epoch with the stage that is due."""
        self.seek(epoch)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Make the next draw that of (epoch, step), by the stage that is due."""
        make_counter(0, epoch, step)  # raises before the stage is looked for
        due = self.stages[max(start for start in self.stages if start <= epoch)]
        due.seek(epoch, step)
        self.generation += due is not self.current
        self.current, self._epoch = due, epoch

    def __call__(
        self, images: Tensor, masks: Tensor | None = None, *, rows: Tensor | None = None
    ) -> Any:
        """Augment a batch with the current stage; see `Compose`."""
        if masks is None:
            return self.current(images, rows=rows)
        return self.current(images, masks, rows=rows)

    def draw(
        self, batch: int, size: Sequence[int], channels: int, device: torch.device | str
    ) -> Params:
        """Draw with the current stage; see `Compose.draw`."""
        return self.current.draw(batch, size, channels, device)

    def apply(
        self,
        images: Tensor,
        params: Params | None = None,
        masks: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Any:
        """Apply with the current stage; see `Compose.apply`."""
        return self.current.apply(images, params, masks, rows)

    def boxes(self, boxes: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Move boxes; see `Compose.boxes`."""
        return self.current.boxes(boxes, params)

    def keypoints(self, keypoints: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Move keypoints; see `Compose.keypoints`."""
        return self.current.keypoints(keypoints, params)

    def check(self) -> None:
        """Wait for the device and raise what any stage found."""
        for stage in self.stages.values():
            stage.check()

    def validation(self) -> Compose:
        """Return what validation images go through, by the current stage."""
        return self.current.validation()

    @property
    def backend_reason(self) -> str:
        """Which backend the current stage works with, and why."""
        return self.current.backend_reason

    def state_dict(self) -> dict[str, int]:
        """Return seed, epoch, step and stream of the current stage."""
        return self.current.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken, with the stage that was due there."""
        self.seek(check_state(state)["epoch"])
        self.current.load_state_dict(state)


def augmentation_from_settings(
    settings: AugmentationSettings | None, **options: Any
) -> GPUAugmentation | None:
    """Build what the config's section `gpu_augmentation` says.

    Args:
        settings: `Settings.augmentation`; None (training.use_gpu_augmentation is off) builds nothing.
        **options: Keywords of `GPUAugmentation`: mean, std, dtype, seed, ignore_index, backend.
    """
    return None if settings is None else GPUAugmentation(**asdict(settings), **options)
