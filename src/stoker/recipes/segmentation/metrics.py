"""How good a segmentation is: the loss that trains it, and the pixels counted at the end.

Enters: logits `(batch, classes, height, width)` and masks `(batch, height, width)` on the device, with
255 where a pixel counts nowhere. Leaves: a loss; mIoU, mean Dice and pixel accuracy of a validation. Costs: some
passes over the logits; static shapes and no host synchronisation until the metrics are asked for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from stoker.recipes.metrics import Counted
from stoker.store.fields import Array

Tensor = torch.Tensor
IGNORE = 255
"""Mask value of pixels that count nowhere."""


def segmentation_loss(
    logits: Tensor, masks: Tensor, ce_weight: float = 1.0, dice_weight: float = 1.5
) -> Tensor:
    """Return the mean over samples of cross-entropy and Dice, each from a sample's own pixels.

    Both are taken per sample and then averaged, so accumulated batches equal one big batch. A sample
    without a pixel that counts adds nothing but its place in the mean.
    """
    counts = masks != IGNORE
    labels = masks.masked_fill(~counts, 0).long()
    logs = functional.log_softmax(logits, dim=1)
    surprise = -logs.gather(1, labels[:, None]).squeeze(1) * counts
    num_pixels = counts.sum(dim=(1, 2)).clamp(min=1)
    entropy = surprise.sum(dim=(1, 2)) / num_pixels
    dice = dice_losses(logs.exp() * counts[:, None], labels, counts)
    return (ce_weight * entropy + dice_weight * dice).mean()


def dice_losses(shares: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return `(batch,)` 1 - Dice, averaged over the classes that a sample's mask shows.

    Dice of a class is `(2 * overlap + 1) / (predicted + true + 1)`, in pixels. Classes that the mask
    does not show are left to the cross-entropy: their Dice is next to 0 for any prediction.

    Shares are probabilities, 0 where a pixel does not count.
    """
    classes = torch.arange(shares.shape[1], device=shares.device)[:, None, None]
    true = (labels[:, None] == classes) & counts[:, None]
    overlap = (shares * true).sum(dim=(2, 3))
    num_true = true.sum(dim=(2, 3))
    dice = (2 * overlap + 1) / (shares.sum(dim=(2, 3)) + num_true + 1)
    shown = num_true > 0
    return ((1 - dice) * shown).sum(dim=1) / shown.sum(dim=1).clamp(min=1)


class SegmentationMetrics(Counted):
    """Counts every pixel's class against its prediction, on the device."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take logits and masks of a batch."""
        num = self._num_classes
        if self.counts is None:
            # One spare cell takes the pixels that count nowhere, so that shapes stay static.
            self.counts = torch.zeros(num * num + 1, dtype=torch.int64, device=outputs.device)
        masks = targets.long()
        cells = torch.where(masks == IGNORE, num * num, masks * num + outputs.argmax(dim=1))
        cells = cells.flatten()
        self.counts.index_add_(0, cells, torch.ones_like(cells))

    def compute(self) -> dict[str, float]:
        """Return mIoU, mean Dice and pixel accuracy; waits for the device."""
        if self.counts is None:
            return {}
        num = self._num_classes
        return compute_metrics(self.counts[:-1].view(num, num).cpu().numpy())


def compute_metrics(confusion: Array) -> dict[str, float]:
    """Return the metrics of `(true, predicted)` pixel counts.

    mIoU is the mean of `both / either` over the classes that are true or predicted somewhere; the mean Dice is that of
    `2 both / (true + predicted)`.
    """
    both = np.diag(confusion).astype(np.float64)
    sizes = confusion.sum(axis=0) + confusion.sum(axis=1)
    occurs = sizes > 0
    if not occurs.any():
        return dict.fromkeys(("miou", "mean_dice", "pixel_accuracy"), float("nan"))
    both_known, sizes_known = both[occurs], sizes[occurs]
    return {
        "miou": float((both_known / (sizes_known - both_known)).mean()),
        "mean_dice": float((2 * both_known / sizes_known).mean()),
        "pixel_accuracy": float(both.sum() / confusion.sum()),
    }
