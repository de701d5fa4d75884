"""What the segmentation recipe may be told.

Enters: plain values of a config. Leaves: checked `SegmentationOptions`, which split, augmentation and network read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from stoker.recipes.options import AtLeastOne, CheckedOptions, Range, Share, require
from stoker.recipes.pictures import IMAGE_SIZE
from stoker.sources.images.masks import IGNORE

Four = tuple[int, int, int, int]
_CLASSES = Range("2 to 255", lambda num: 2 <= num <= IGNORE, 19)
_MASK_VALUES = Range(
    "mask values, 0 to 255", lambda values: all(0 <= value <= IGNORE for value in values), (11,)
)
_STAGES = Range("four numbers of 1 or more", lambda four: min(four) >= 1, (2, 2, 2, 2))


@dataclass(frozen=True)
class SegmentationOptions(CheckedOptions):
    """What the segmentation recipe may be told.

    Attributes:
        num_classes: Classes are 0 to num_classes - 1; None takes the largest mask value + 1.
        ignore_values: Mask values that count nowhere, besides 255 (CamVid: 11).
        widths: Widths of the four stages.
        depths: Blocks of the four stages.
        heads: Attention heads of the four stages; each divides its width.
        expansion: Expansion of the feed-forward parts.
        head_width: Width of the joined map.
        dropout: Before the classes.
        ce_weight: Weight of the cross-entropy.
        dice_weight: Weight of the Dice loss.
        augmentation: "standard", "minimal", "strong", "progressive" (minimal, later strong), or "none": normalise only.
        strong_from_epoch: The epoch, counted from 0, from which "progressive" is strong.
        horizontal_flip_prob: Instead of the preset's; so are the next four.
        rotation_degrees: Up to this, either way.
        brightness: Within 1 plus or minus this.
        contrast: The same.
        saturation: The same.
        split: For stores without a split: "random" samples, or "ordered": the first samples train and
            the last ones test, which keeps most frames of one film on one side.
        ratios: Shares of train, val and test, for stores without a split.
        size: Height and width that encoded pictures are resized to; None takes the one that all have, else 512 x 512.
        weight_decay: Weight decay of AdamW, on matrices only.
        warmup_epochs: Epochs in which the rate rises, update by update; at most half of the run.
        epochs: Epochs of the run, as the trainer gets them.
    """

    num_classes: Annotated[int | None, _CLASSES] = None
    ignore_values: Annotated[tuple[int, ...], _MASK_VALUES] = ()
    widths: Annotated[Four, _STAGES] = (32, 64, 128, 192)
    depths: Annotated[Four, _STAGES] = (2, 2, 2, 2)
    heads: Annotated[Four, _STAGES] = (1, 2, 4, 6)
    expansion: AtLeastOne = 3
    head_width: AtLeastOne = 128
    dropout: Share = 0.1
    ce_weight: float = 1.0
    dice_weight: float = 1.5
    augmentation: Literal["standard", "minimal", "strong", "progressive", "none"] = "standard"
    strong_from_epoch: AtLeastOne = 50
    horizontal_flip_prob: float | None = None
    rotation_degrees: float | None = None
    brightness: float | None = None
    contrast: float | None = None
    saturation: float | None = None
    split: Literal["random", "ordered"] = "random"
    ratios: tuple[float, float, float] = (0.8, 0.1, 0.1)
    size: Annotated[tuple[int, int] | None, IMAGE_SIZE] = None
    weight_decay: float = 0.01
    warmup_epochs: Annotated[int, Range("0 or more", lambda epochs: epochs >= 0)] = 5
    epochs: AtLeastOne = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = all(
            width % heads == 0 for width, heads in zip(self.widths, self.heads, strict=True)
        )
        require(
            whole,
            "heads",
            self.heads,
            f"divisors of the widths {self.widths}",
            f"heads={[math.gcd(*each) for each in zip(self.widths, self.heads, strict=True)]}",
        )
        weights = (self.ce_weight, self.dice_weight)
        require(
            min(weights) >= 0 and sum(weights) > 0,
            "ce_weight and dice_weight",
            weights,
            "0 or more, not both 0",
            "ce_weight=1, dice_weight=1.5",
        )

    @property
    def warmup_share(self) -> float:
        """Share of the run that warms up."""
        return min(0.5, self.warmup_epochs / self.epochs)
