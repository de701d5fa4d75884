"""Stages: work between the fused parts of a Compose. Your own functions, RandAugment, TrivialAugment.

Enters: float images in [0, 1], masks, and uniform numbers of each sample. Leaves: images and masks, of the same shape
unless a stage's `out_size` says otherwise.
Costs what its torch operations cost, and one read and one write of the batch more, because the fused kernel stops
before a stage and another one starts behind it.

A stage draws from the counter as every other op does: the same (seed, epoch, step) gives the same numbers on every
device, and a captured graph draws anew at each replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from stoker.augment.definition import TAPE_WIDTH, Op, Opcode, Phase, Program, Size, check_number
from stoker.errors import InputError

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor | None]
Apply = Callable[[Tensor, Tensor | None, Tensor, Program], Pair]
"""Applies a parameter table with the backend of the Compose."""

PHASES = {phase.name.lower(): phase for phase in Phase if phase != Phase.DTYPE}


@dataclass(frozen=True)
class Stage(Op):
    """Base of the ops that the fused kernel does not know."""

    opcode = Opcode.STAGE

    @property
    def moves(self) -> bool:
        """Whether it moves pixels; masks, boxes and keypoints would have to move with them."""
        return self.phase == Phase.GEOMETRY

    @property
    def num_rows(self) -> int:
        """Rows of 8 uniforms that each sample gets."""
        return 1

    def rows(self, _size: Size, /) -> list[list[float]]:
        """Return rows that only draw uniforms."""
        return [[float(self.opcode), 0.0, *[0.0] * (TAPE_WIDTH - 2)] for _ in range(self.num_rows)]

    def run(
        self,
        images: Tensor,
        masks: Tensor | None,
        uniforms: Tensor,
        ignore_index: int,
        apply: Apply,
    ) -> Pair:
        """Return images and masks.

        Args:
            images: Float `(B, C, H, W)`; may be written to.
            masks: Integer `(B, H, W)` or `(B, 1, H, W)`, or None.
            uniforms: Float32 `(B, num_rows, 8)` in [0, 1).
            ignore_index: Written in masks where no input pixel is.
            apply: Applies a parameter table to images and masks.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Function(Stage):
    """A torch function of your own, at a declared phase of a Compose.

    Args:
        function: `function(images, u)` returns images of the same shape. `images` is float `(B, C, H, W)` in
            [0, 1] (normalised in the phase "normalize" after a `Normalize`), `u` float32 `(B, 7)` uniform in [0, 1):
            take random numbers from it, and each sample has its own, the same in every run. A loader may pass several
            batches at once, so treat samples one by one. Before "normalize" the result is clamped to [0, 1].
        phase: "geometry", "colour", "blur", "erase" or "normalize": where it may stand.
        p: Probability per sample; the function sees all samples, and the others keep their values.
        masks: Phase "geometry": `masks(masks, u)` moves masks in the same way. Without it masks are refused.
        validation: Whether validation images go through it too; for functions that are not random.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    phase: Any = field(default="colour", kw_only=True)  # type: ignore[misc]
    p: float = 1.0
    masks: Callable[[Tensor, Tensor], Tensor] | None = None
    validation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        phase = PHASES.get(self.phase) if isinstance(self.phase, str) else self.phase
        if not isinstance(phase, Phase) or phase == Phase.DTYPE:
            raise InputError(
                f"phase is {self.phase!r}.", ", ".join(PHASES), 'Function(function, phase="colour")'
            )
        for name in ("function", "masks"):
            value = getattr(self, name)
            if not callable(value) and not (name == "masks" and value is None):
                raise InputError(
                    f"{name} is {value!r}.",
                    "a function of images and uniform numbers",
                    "Function(lambda images, u: 1 - images)",
                )
        self._keep(phase=phase)

    def __repr__(self) -> str:
        return f"Function({self.name}, phase={self.phase.name.lower()!r}, p={self.p:g})"

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def settled(self) -> Op | None:
        """Return itself if validation images go through it."""
        return self if self.validation else None

    def run(
        self, images: Tensor, masks: Tensor | None, uniforms: Tensor, _ignore: int, _apply: Apply
    ) -> Pair:
        """Call the function for all samples; those whose gate is closed keep their values."""
        gate, u = uniforms[:, 0, 0] < self.p, uniforms[:, 0, 1:]
        if self.moves and masks is not None:
            if self.masks is None:
                raise InputError(
                    f"masks with {self!r}, which moves images only.",
                    "a function that moves masks in the same way",
                    "Function(function, phase='geometry', masks=function_for_masks)",
                )
            masks = self._gated(self.masks(masks, u), masks, gate, "masks")
        made = self._gated(self.function(images, u), images, gate, "images")
        return made if self.phase >= Phase.NORMALIZE else made.clamp(0.0, 1.0), masks

    def _gated(self, made: object, given: Tensor, gate: Tensor, what: str) -> Tensor:
        if (
            not isinstance(made, Tensor)
            or made.shape != given.shape
            or made.device != given.device
            or made.is_floating_point() != given.is_floating_point()
        ):
            got = (
                f"{made.dtype} {tuple(made.shape)} on {made.device}"
                if isinstance(made, Tensor)
                else type(made).__name__
            )
            raise InputError(
                f"{self.name} returned {got} for {what}.",
                f"{given.dtype} {tuple(given.shape)} on {given.device}",
                "return a tensor like the one that was given",
            )
        made = made.to(given.dtype)
        return (
            made
            if self.p == 1.0
            else torch.where(gate.view(-1, *[1] * (given.dim() - 1)), made, given)
        )


def check_whole(name: str, value: Any, low: int, high: int, fix: str) -> int:
    """Return a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}.", f"a whole number from {low} to {high}", fix)
    return int(check_number(name, value, low, high, fix))
