"""Loss, metrics and final evaluation of a segmentation: per class, at boundaries, with two priors as baselines.

Enters: logits and masks of all test images; training masks for the baselines. Leaves: an `Evaluation`: IoU, Dice and
boundary F1 per class with intervals over images, the confusion of pixels, and the worst images with their masks. Costs:
per batch one count of pixels per image and some poolings per class; at the end one read of at most 512 training masks.

Boundary F1 (Csurka et al., 2013): a true and a predicted boundary pixel of a class match if they are within 0.75 % of
the image's diagonal, counted in steps to any of the eight neighbours. The score of an image and class is the harmonic
mean of both shares of matching pixels. The score of a class is the mean over images with the class in mask or answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from stoker.packing.samples import colour_of
from stoker.recipes.metrics import Counted, bootstrap
from stoker.recipes.pictures import as_data_url, read_rows, sample_name
from stoker.recipes.scaling import evenly
from stoker.runs.evaluation import Confusion, Evaluation, Example
from stoker.sources.images.masks import IGNORE
from stoker.store.fields import Array
from stoker.store.reader import Store

Tensor = torch.Tensor
EDGE_SHARE = 0.0075
_FIT_MASKS = 512
_SHOWN = 6
_SHOWN_SIDE = 120


class MaskJudge:
    """Evaluates predicted masks; a `Judge`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._confusions: list[Array] = []
        self._edges: list[Array] = []

    def update(self, columns: Mapping[str, Array], truth: Array) -> None:
        """Add predicted and true masks."""
        self.count(torch.from_numpy(columns["mask"]).long(), torch.from_numpy(truth).long())

    def count(self, answers: Tensor, masks: Tensor) -> None:
        """Add predicted and true class numbers of pixels, `(batch, height, width)` each."""
        num = len(self._names)
        self._confusions.append(count_each(answers, masks, num).cpu().numpy())
        self._edges.append(boundary_scores(answers, masks, num).cpu().numpy())

    @property
    def confusions(self) -> Array:
        """Pixel counts `(images, true class, predicted class)`."""
        return np.concatenate(self._confusions)

    def evaluate(self) -> Evaluation | None:
        """Return the evaluation over all masks; None without masks."""
        if not self._confusions:
            return None
        each, edges = self.confusions, np.concatenate(self._edges)
        total = each.sum(axis=0)
        ious, dices = class_scores(total[None].astype(np.float64))
        by_class = _known_mean(edges, axis=0)
        metrics = {**compute_metrics(total), "boundary_f1": float(_known_mean(by_class, axis=0))}
        rows = each.reshape(len(each), -1)
        num = len(self._names)
        return Evaluation(
            num_samples=len(each),
            compared_by=("miou", True),
            metrics=metrics,
            intervals={
                "miou": bootstrap(rows, partial(_drawn_mean, place=0, num_classes=num)),
                "mean_dice": bootstrap(rows, partial(_drawn_mean, place=1, num_classes=num)),
                "pixel_accuracy": bootstrap(rows, partial(_drawn_accuracy, num_classes=num)),
                "boundary_f1": bootstrap(_known_mean(edges, axis=1)),
            },
            groups={"class": self._per_class(total, ious[0], dices[0], by_class)},
            confusion=Confusion(tuple(self._names), tuple(map(tuple, total.tolist()))),
            notes=("confusion: pixels",),
        )

    def _per_class(
        self, total: Array, ious: Array, dices: Array, edges: Array
    ) -> dict[str, dict[str, float]]:
        pixels = total.sum(axis=1)
        answered = total.sum(axis=0)
        return {
            name: {
                "iou": float(ious[place]),
                "dice": float(dices[place]),
                "boundary_f1": float(edges[place]),
                "precision": float(total[place, place] / max(1, answered[place])),
                "recall": float(total[place, place] / max(1, pixels[place])),
                "share_of_pixels": float(pixels[place] / max(1, pixels.sum())),
            }
            for place, name in enumerate(self._names)
            if pixels[place] or answered[place]
        }


class FinalSegmentationMetrics:
    """Evaluates the best weights on the test images, with baselines fitted on training masks."""

    def __init__(
        self,
        store: Store,
        train: Array,
        names: Sequence[str],
        ignore_values: Sequence[int],
        normalise: Callable[[Tensor], Tensor],
    ) -> None:
        self._store, self._train, self._names = store, train, list(names)
        self._ignored, self._normalise = list(ignore_values), normalise
        self._judge = MaskJudge(names)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add logits and masks of a batch."""
        self._judge.count(outputs.argmax(dim=1), targets.long())

    def evaluate(self, model: torch.nn.Module, device: torch.device, samples: Array) -> Evaluation:
        """Return the evaluation over all batches; see `FinalMetrics`."""
        found = self._judge.evaluate()
        assert found is not None
        baselines, note = self._baselines(samples)
        return replace(
            found,
            baselines=baselines,
            examples=tuple(self._worst(model, device, samples, self._judge.confusions)),
            notes=(note, *found.notes, "pictures: the images of the lowest mIoU"),
            colours={
                **dict(legend(self._names).values()),
                "counts nowhere": "#" + bytes(palette()[IGNORE]).hex(),
            },
        )

    def _baselines(self, samples: Array) -> tuple[dict[str, dict[str, float]], str]:
        num = len(self._names)
        fitted = evenly(self._train, _FIT_MASKS)
        counts = self._place_counts(fitted)
        majority = int(counts.reshape(num, -1).sum(axis=1).argmax())
        prior = counts.argmax(axis=0)
        found = {
            "majority class": np.zeros((num, num), np.int64),
            "prior of each pixel": np.zeros((num, num), np.int64),
        }
        answers = {"majority class": np.full_like(prior, majority), "prior of each pixel": prior}
        for masks in self._masks(samples):
            counted = masks != IGNORE
            for name, answer in answers.items():
                said = np.broadcast_to(answer, masks.shape)[counted]
                cells = masks[counted].astype(np.int64) * num + said
                found[name] += np.bincount(cells, minlength=num * num).reshape(num, num)
        note = f"prior of each pixel: the commonest class at its place in {len(fitted):,} training masks"
        return {name: compute_metrics(table) for name, table in found.items()}, note

    def _place_counts(self, samples: Array) -> Array:
        """Return how often each class is at each pixel, `(classes, height, width)`."""
        shape = (len(self._names), *self._store.fields["masks"].shape)
        counts = np.zeros(shape, np.uint16)  # of at most 512 masks
        for masks in self._masks(samples):
            for place in range(len(self._names)):
                counts[place] += (masks == place).sum(axis=0, dtype=np.uint16)
        return counts

    def _masks(self, samples: Array) -> Iterator[Array]:
        """Yield masks with 255 at all ignored pixels."""
        for masks in read_rows(self._store, "masks", samples):
            masks[np.isin(masks, self._ignored)] = IGNORE
            yield masks

    def _worst(
        self, model: torch.nn.Module, device: torch.device, samples: Array, each: Array
    ) -> Iterator[Example]:
        scores = np.array([compute_metrics(table)["miou"] for table in each])
        order = np.argsort(np.where(np.isfinite(scores), scores, np.inf), kind="stable")
        for place in order[:_SHOWN].tolist():
            sample = int(samples[place])
            image = self._store.gather("images", np.array([sample]))
            (truth,) = next(iter(self._masks(np.array([sample]))))
            inputs = self._normalise(torch.from_numpy(image)).to(device)
            answer = model(inputs).argmax(dim=1)[0].cpu().numpy().astype(np.uint8)
            pictures = {
                "picture": image[0],
                "truth": np.moveaxis(palette()[truth], -1, 0),
                "answer": np.moveaxis(palette()[answer], -1, 0),
            }
            yield Example(
                "image",
                sample_name(self._store, sample),
                self._words(truth),
                f"{self._words(answer)}; mIoU {scores[place]:.2f}",
                {name: as_data_url(each, _SHOWN_SIDE) for name, each in pictures.items()},
            )

    def _words(self, mask: Array) -> str:
        counts = np.bincount(mask[mask != IGNORE], minlength=len(self._names))
        first = np.argsort(-counts, kind="stable")[:3]
        total = max(1, counts.sum())
        return ", ".join(f"{self._names[n]} {counts[n] / total:.0%}" for n in first if counts[n])


# -- counts --------------------------------------------------------------------------------------


def count_each(answers: Tensor, masks: Tensor, num_classes: int) -> Tensor:
    """Return pixel counts `(batch, true class, predicted class)` of each image; pixels of mask 255 are ignored."""
    batch, cells_each = len(masks), num_classes * num_classes + 1
    first = torch.arange(batch, device=masks.device).view(-1, 1, 1) * cells_each
    cells = (_cells(answers, masks, num_classes) + first).flatten()
    counts = torch.zeros(batch * cells_each, dtype=torch.int64, device=masks.device)
    counts.index_add_(0, cells, torch.ones_like(cells))
    return counts.view(batch, cells_each)[:, :-1].view(batch, num_classes, num_classes)


def _cells(answers: Tensor, masks: Tensor, num_classes: int) -> Tensor:
    """Return each pixel's cell in a flat confusion table. Ignored pixels get a spare cell: shapes stay static."""
    return torch.where(masks == IGNORE, num_classes * num_classes, masks * num_classes + answers)


def class_scores(confusions: Array) -> tuple[Array, Array]:
    """Return IoU and Dice, `(draws, classes)`, of `(draws, true, predicted)` pixel counts; NaN for absent classes."""
    both = np.diagonal(confusions, axis1=1, axis2=2)
    either = confusions.sum(axis=1) + confusions.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return both / (either - both), 2 * both / either


def _drawn_mean(means: Array, place: int, num_classes: int) -> Array:
    scores = class_scores(means.reshape(-1, num_classes, num_classes))[place]
    return _known_mean(scores, axis=1)


def _drawn_accuracy(means: Array, num_classes: int) -> Array:
    tables = means.reshape(-1, num_classes, num_classes)
    made: Array = np.trace(tables, axis1=1, axis2=2) / np.maximum(tables.sum(axis=(1, 2)), 1e-12)
    return made


def _known_mean(values: Array, axis: int) -> Array:
    """Return the mean of the finite values; NaN if there are none."""
    known = np.isfinite(values)
    count = known.sum(axis=axis)
    with np.errstate(divide="ignore", invalid="ignore"):
        made: Array = np.where(known, values, 0.0).sum(axis=axis) / np.where(count, count, np.nan)
    return made


# -- edges ---------------------------------------------------------------------------------------


def boundary_scores(answers: Tensor, masks: Tensor, num_classes: int) -> Tensor:
    """Return `(batch, classes)` boundary F1; NaN for a class without boundary pixels in mask and answer.

    Args:
        answers: `(batch, height, width)` predicted class numbers.
        masks: `(batch, height, width)` true class numbers; pixels of 255 and their neighbours are no boundary.
        num_classes: Classes are 0 to num_classes - 1.
    """
    height, width = masks.shape[1:]
    reach = max(1, round(EDGE_SHARE * math.hypot(height, width)))
    ignored = (masks == IGNORE)[:, None]
    near_ignored = _grown(ignored, 1)
    rows = []
    for number in range(num_classes):
        true = _edges((masks == number)[:, None]) & ~near_ignored
        said = _edges((answers == number)[:, None] & ~ignored) & ~near_ignored
        hit_true = (true & _grown(said, reach)).sum(dim=(1, 2, 3))
        hit_said = (said & _grown(true, reach)).sum(dim=(1, 2, 3))
        num_true, num_said = true.sum(dim=(1, 2, 3)), said.sum(dim=(1, 2, 3))
        precision = hit_said / num_said.clamp(min=1)
        recall = hit_true / num_true.clamp(min=1)
        score = 2 * precision * recall / (precision + recall).clamp(min=1e-12)
        rows.append(torch.where(num_true + num_said > 0, score, math.nan))
    return torch.stack(rows, dim=1)


def _grown(inside: Tensor, reach: int) -> Tensor:
    """Return `inside` dilated by `reach` steps to any of the eight neighbours."""
    # One axis after the other, so that a square of side 2 reach + 1 costs only as much as two lines.
    lines = functional.max_pool2d(inside.float(), (1, 2 * reach + 1), 1, (0, reach))
    return functional.max_pool2d(lines, (2 * reach + 1, 1), 1, (reach, 0)) > 0


def _edges(inside: Tensor) -> Tensor:
    """Return the pixels of `inside` that have a neighbour outside of it; the image's border is no edge."""
    return inside & _grown(~inside, 1)


# -- colours -------------------------------------------------------------------------------------


def palette() -> Array:
    """Return the colours of mask values, `(256, 3)` uint8, the same as in `stoker inspect`."""
    return np.array([colour_of(value) for value in range(256)], dtype=np.uint8)


def class_names(store_names: Sequence[str], num_classes: int) -> list[str]:
    """Return a name for every class: that of the store, else "class" with its number."""
    return [
        str(store_names[place]) if place < len(store_names) else f"class {place}"
        for place in range(num_classes)
    ]


def legend(names: Sequence[str]) -> Mapping[int, tuple[str, str]]:
    """Return mask value to the name and the colour (`#rrggbb`) of its class."""
    return {place: (name, "#" + bytes(palette()[place]).hex()) for place, name in enumerate(names)}


# -- loss, and the pixels counted at the end --------------------------------------------------------


def segmentation_loss(
    logits: Tensor, masks: Tensor, ce_weight: float = 1.0, dice_weight: float = 1.5
) -> Tensor:
    """Return the weighted sum of cross-entropy and Dice loss.

    Both are computed per sample and then averaged, so accumulated batches equal one big batch. A sample
    in which all pixels are ignored has loss 0 and counts in the mean.
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
    """Return `(batch,)` 1 - Dice, averaged over the classes that are in a sample's mask.

    Dice of a class is `(2 * overlap + 1) / (predicted + true + 1)`, in pixels. Only the cross-entropy
    trains classes that are not in the mask: their Dice is near 0 for any prediction.

    `shares` are probabilities, with 0 at ignored pixels.
    """
    classes = torch.arange(shares.shape[1], device=shares.device)[:, None, None]
    true = (labels[:, None] == classes) & counts[:, None]
    overlap = (shares * true).sum(dim=(2, 3))
    num_true = true.sum(dim=(2, 3))
    dice = (2 * overlap + 1) / (shares.sum(dim=(2, 3)) + num_true + 1)
    shown = num_true > 0
    return ((1 - dice) * shown).sum(dim=1) / shown.sum(dim=1).clamp(min=1)


class SegmentationMetrics(Counted):
    """Counts pixels by true and predicted class, on the device."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add logits and masks of a batch."""
        num = self._num_classes
        if self.counts is None:
            self.counts = torch.zeros(num * num + 1, dtype=torch.int64, device=outputs.device)
        cells = _cells(outputs.argmax(dim=1), targets.long(), num).flatten()
        self.counts.index_add_(0, cells, torch.ones_like(cells))

    def compute(self) -> dict[str, float]:
        """Return mIoU, mean Dice and pixel accuracy. Waits for the device."""
        if self.counts is None:
            return {}
        num = self._num_classes
        return compute_metrics(self.counts[:-1].view(num, num).cpu().numpy())


def compute_metrics(confusion: Array) -> dict[str, float]:
    """Return the metrics of `(true, predicted)` pixel counts.

    mIoU is the mean of intersection / union, and mean Dice that of `2 intersection / (true + predicted)`, over the
    classes that are in a mask or an answer.
    """
    ious, dices = class_scores(confusion[None].astype(np.float64))
    if not np.isfinite(ious).any():
        return dict.fromkeys(("miou", "mean_dice", "pixel_accuracy"), float("nan"))
    return {
        "miou": float(np.nanmean(ious)),
        "mean_dice": float(np.nanmean(dices)),
        "pixel_accuracy": float(np.trace(confusion) / confusion.sum()),
    }
