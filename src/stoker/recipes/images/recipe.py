"""The images recipe: classifies pictures.

Enters: a store of `stoker pack images`: `images` uint8 (n, channels, height, width), or encoded pictures of any size,
and `labels` (n,); later a folder of pictures. Leaves: a `Job` for one of our networks or one of torchvision or timm,
augmented on the device; class names and probabilities for new pictures. Costs: one read of all labels and of at most
512 training pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
import torch

from stoker.augment import (
    ColorJitter,
    Compose,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
)
from stoker.errors import InputError, SourceError
from stoker.loader.splits import draw_samples
from stoker.recipes.classification import AnswerJudge, label_places
from stoker.recipes.contract import (
    BATCH,
    Columns,
    Default,
    Facts,
    Job,
    Layout,
    Port,
    RawBatch,
    RawReader,
    Rebuilt,
    Recipe,
    Tensors,
)
from stoker.recipes.gate import fill_parts, own_parts
from stoker.recipes.images.evaluation import COMPARED_BY, FinalImageMetrics, ImageMetrics
from stoker.recipes.images.networks import (
    SMALL_SIDE,
    ClassificationLoss,
    Classifier,
    choose_network,
    load_weights,
    make_network,
)
from stoker.recipes.metrics import majority_baseline
from stoker.recipes.options import AtLeastOne, CheckedOptions, Range, Share, parse_options
from stoker.recipes.pictures import (
    IMAGE_SIZE,
    FolderPictures,
    GivenPictures,
    Size,
    as_keys,
    describe_pictures,
    make_normaliser,
    sized_store,
    spell_fields,
)
from stoker.recipes.schedule import make_adamw, warmup_cosine
from stoker.store.fields import Array
from stoker.store.reader import Store

Tensor = torch.Tensor
_HELD_BACK = 0.1
_ENCODED_SIZE = (224, 224)
_ALPHA = Range("0, or 0.001 to 100", lambda alpha: alpha == 0 or 1e-3 <= alpha <= 100, 0.2)


@dataclass(frozen=True)
class ImagesOptions(CheckedOptions):
    """What the images recipe may be told.

    Attributes:
        network: "auto" (resnet9 up to 64 px, else convnext), "resnet9", "convnext", torchvision/NAME or timm/NAME.
        width: Channels of the first layer of our own networks.
        weights: File of pretrained weights, .safetensors or of torch.save; the last layer may have other classes.
        augmentation: "light" is crop and flip, "standard" adds colours, "strong" adds RandAugment and erased
            rectangles; "none" normalises only.
        horizontal_flip: Whether a mirrored picture is of the same class; not so for letters and digits.
        mixup: Alpha of MixUp; 0 is without, 0.2 is usual.
        cutmix: Alpha of CutMix; 0 is without, 1.0 is usual.
        mix_share: Share of the pictures that are mixed, where mixup or cutmix is above 0.
        label_smoothing: Share of each target that is spread over all classes.
        balance: Against classes of unequal size: "weights" weighs the loss, "sampling" draws each class equally often.
        ema: Decay per step of the averaged weights that are evaluated and kept; 0 is without.
        ratios: Shares of train, val and test, for stores without a split; each class is divided so.
        size: Height and width that encoded pictures are resized to; None takes the one that all have, else 224 x 224.
        weight_decay: Weight decay of AdamW, on matrices only.
        warmup_share: Share of the run in which the rate rises.
    """

    network: str = "auto"
    width: AtLeastOne = 64
    weights: str | None = None
    augmentation: Literal["none", "light", "standard", "strong"] = "standard"
    horizontal_flip: bool = True
    mixup: Annotated[float, _ALPHA] = 0.0
    cutmix: Annotated[float, _ALPHA] = 0.0
    mix_share: Annotated[float, Range("0 to 1", lambda share: 0 <= share <= 1)] = 1.0
    label_smoothing: Share = 0.1
    balance: Literal["none", "weights", "sampling"] = "none"
    ema: Share = 0.999
    ratios: tuple[float, float, float] = (0.8, 0.1, 0.1)
    size: Annotated[tuple[int, int] | None, IMAGE_SIZE] = None
    weight_decay: float = 0.05
    warmup_share: Share = 0.15


class ImagesRecipe(Recipe):
    """Builds jobs that classify pictures."""

    name = "images"
    Options = ImagesOptions
    pack_command = "stoker pack images FOLDER OUT"
    raw_kinds = "a picture or a folder of pictures"
    defaults = (
        Default("training.lr", 2e-3, "AdamW, rising for warmup_share, then half a cosine"),
        Default("training.epochs", 30, "enough for a small network from its first weights"),
        Default("training.batch_size", 128, "batches of a few hundred use a GPU well"),
        Default(
            "training.patience", 10, "epochs without a higher accuracy; the best weights count"
        ),
    )
    files = ("weights",)

    def make_job(self, store: Store, options: ImagesOptions | Mapping[str, Any], seed: int) -> Job:
        """Build the job; see `Recipe`."""
        chosen = parse_options(ImagesOptions, options, self.name)
        store = sized_store(store, chosen.size, _ENCODED_SIZE)
        names = find_classes(store)
        labels = store.read_rows("labels", 0, store.num_samples)
        samples, split_note = split_pictures(store, labels, chosen.ratios, seed)
        facts = {
            "inputs": ["images"],
            "is_classifier": True,
            **describe_pictures(store, samples["train"]),
            "num_classes": len(names),
        }
        train_labels = labels[samples["train"]]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, network_notes = _build(facts, chosen)
        weights, class_note = class_weights(train_labels, names, chosen.balance)
        mixing = (("mixup", chosen.mixup), ("cutmix", chosen.cutmix))
        augmentation = [
            chosen.augmentation,
            *(f"{name} {alpha}" for name, alpha in mixing if alpha),
        ]
        return Job(
            model=model,
            criterion=ClassificationLoss(chosen.label_smoothing, weights),
            unpack=unpack_pictures,
            metrics=partial(ImageMetrics, len(names)),
            final_metrics=partial(FinalImageMetrics, store, samples["train"], names),
            baseline=majority_baseline(train_labels, labels[samples["val"]], len(names)),
            samples=samples,
            make_optimizer=partial(make_adamw, weight_decay=chosen.weight_decay),
            make_schedule=partial(warmup_cosine, warmup_share=chosen.warmup_share),
            fields=["images", "labels"],
            augmentation=make_augmentation(facts, chosen, seed),
            monitor=COMPARED_BY,
            strata=train_labels,
            balance="labels" if chosen.balance == "sampling" else None,
            notes=(
                f"{len(names)} classes: {_some(names)}",
                split_note,
                *network_notes,
                *class_note,
                f"augmentation: {', '.join(augmentation)}",
                *([f"weights are averaged, decay {chosen.ema}"] if chosen.ema else []),
            ),
            facts=facts,
        )

    def describe(self, job: Job) -> dict[str, Any]:
        """Return channels, size and normalisation of the pictures: the loader normalises, not the model."""
        return dict(job.facts)

    def rebuild(self, options: ImagesOptions, facts: Facts) -> Rebuilt:
        """Return the network, and the normalisation of its pictures."""
        normalise = make_normaliser(facts)

        def unpack(batch: Tensors) -> Tensor:
            images = batch["images"]  # those of a store were normalised when they were gathered
            return images if images.is_floating_point() else normalise(images)

        resize = [Resize(_size(facts))] if facts.get("encoded") else []
        augment = Compose([*resize, *_normalisation(facts)])
        return Rebuilt(_build(facts, options)[0], ["images"], unpack, _predict, augment)

    def export_layout(self, made: Rebuilt, facts: Facts) -> Layout:
        """Return a graph from raw pixels of the training size to classes and probabilities."""
        shape = (BATCH, facts["channels"], *facts["size"])
        about = "pixels from 0 to 255, channel by channel, resized to this size"
        port = Port("images", shape, torch.uint8, about, below=256)
        return Layout([port], made.unpack, made.predict)

    def open_raw(
        self, given: Any, made: Rebuilt, facts: Facts, told: Mapping[str, Any]
    ) -> RawReader | None:
        """Open a folder of pictures, or one picture."""
        return PictureReader.open(given, facts, int(told.get("batch_size", 64)))

    def make_judge(self, options: ImagesOptions, facts: Facts) -> AnswerJudge:
        """Return the judge of classes, by the metric of the run."""
        return AnswerJudge(facts.get("class_names", ()), COMPARED_BY)

    def read_truth(
        self, store: Store, samples: Array, made: Rebuilt, options: ImagesOptions, facts: Facts
    ) -> Array | None:
        """Return the classes of a store's pictures."""
        if "labels" not in store.fields:
            return None
        labels = store.gather("labels", samples).astype(np.int64)
        places = label_places(store, labels, facts.get("class_names", ()))
        return np.where(places < facts["num_classes"], places, -1)


def _size(facts: Facts) -> Size:
    return facts["size"][0], facts["size"][1]


def _build(facts: Facts, options: ImagesOptions) -> tuple[Classifier, list[str]]:
    """Return the model with initial or pretrained weights, and what to say about it."""
    name, why = choose_network(options.network, _size(facts))
    network = make_network(
        name, facts["num_classes"], facts["channels"], options.width, _size(facts)
    )
    count = sum(parameter.numel() for parameter in network.parameters())
    notes = [f"{why}; {count:,} weights"]
    if options.weights is not None:
        notes.append(load_weights(network, options.weights))
    made = Classifier(network, options.mixup, options.cutmix, options.mix_share, options.ema)
    return made, notes


def _predict(model: Any, images: Tensor) -> Columns:
    shares = model(images).softmax(dim=1)
    return {"class": shares.argmax(dim=1), "probability": shares}


def unpack_pictures(batch: Tensors) -> tuple[Tensor, Tensor]:
    """Return images and class numbers."""
    return batch["images"], batch["labels"]


# -- from a store --------------------------------------------------------------------------------


def find_classes(store: Store) -> list[str]:
    """Return the names of the classes, or raise if the store is not one of pictures with classes."""
    images, labels = store.fields.get("images"), store.fields.get("labels")
    fits = (
        images is not None
        and labels is not None
        and len(images.shape) == 3
        and images.shape[0] in (1, 3)
        and list(labels.shape) == []
        and np.dtype(images.dtype) == np.uint8
        and np.dtype(labels.dtype).kind in "iu"
    )
    if not fits:
        raise _unfit(store, f"has {spell_fields(store)}")
    numbers = store.read_rows("labels", 0, store.num_samples)
    names = [str(name) for name in store.manifest.attributes.get("classes") or ()]
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    names = names or [str(number) for number in range(max(2, most + 1))]
    if least < 0 or most >= len(names):
        raise _unfit(store, f"has labels from {least} to {most} for {len(names)} classes")
    if len(names) < 2:
        raise _unfit(store, f"has one class, {names[0]!r}")
    return names


def _unfit(store: Store, what: str) -> InputError:
    return InputError(
        f"{store.name} {what}.",
        "images uint8 (1 or 3, height, width), and labels of two classes or more, whole numbers from 0",
        "stoker pack images FOLDER OUT",
    )


def split_pictures(
    store: Store, labels: Array, ratios: tuple[float, float, float], seed: int
) -> tuple[dict[str, Array], str]:
    """Return the samples of each split, and a note; random splits are drawn class by class."""
    samples: dict[str, Array]
    if "split" in store.fields:
        samples = own_parts(store)
        note = "split: the store's own"
    else:
        everything = np.arange(store.num_samples)
        train, rest = _divide(everything, labels, ratios[0], seed)
        # Share of val in the rest.
        share = ratios[1] / max(ratios[1] + ratios[2], 1e-9)
        val, test = _divide(rest, labels, share, seed + 1)
        samples = {"train": train, "val": val, "test": test}
        note = f"split: drawn by class, seed {seed}"
    if not len(samples["train"]):
        raise InputError(
            f"{store.name} has no training pictures.",
            "at least one picture in the training split",
            "ratios=[0.8, 0.1, 0.1]",
        )
    if not len(samples["val"]) and len(samples["test"]):
        held, kept = _divide(samples["train"], labels, _HELD_BACK, seed)
        samples |= {"train": kept, "val": held}
        note += f", and a tenth of train as val ({len(held):,}), since it has none"
    elif not len(samples["test"]) and len(samples["val"]) > 1:
        val, test = _divide(samples["val"], labels, 0.5, seed)
        samples |= {"val": val, "test": test}
        note += f", and half of val as test ({len(test):,}), since it has none"
    if "split" not in store.fields:
        fill_parts(samples, ratios, seed, None, "pictures")
    return samples, f"{note}; " + ", ".join(f"{name} {len(ids):,}" for name, ids in samples.items())


def _divide(samples: Array, labels: Array, share: float, seed: int) -> tuple[Array, Array]:
    """Return a share of the samples, drawn class by class, and the remaining samples."""
    if not len(samples):
        return samples, samples
    count = round(share * len(samples))
    if 0 < share < 1 and len(samples) > 1:
        count = min(max(count, 1), len(samples) - 1)
    first = draw_samples(samples, count, seed, labels[samples])
    return first, np.setdiff1d(samples, first)


def class_weights(labels: Array, names: list[str], balance: str) -> tuple[Tensor | None, list[str]]:
    """Return the weight of each class in the loss (mean 1 over the training pictures), and notes."""
    counts = np.bincount(labels, minlength=len(names))
    absent = [name for name, count in zip(names, counts, strict=True) if not count]
    notes = [f"no training picture of {_some(absent)}"] if absent else []
    known = counts[counts > 0]
    spread = f"{known.min():,} to {known.max():,} training pictures a class"
    if balance == "none":
        return None, [*notes, spread]
    if balance == "sampling":
        return None, [*notes, f"{spread}; each class is drawn equally often"]
    weights = np.where(counts > 0, len(labels) / (len(known) * np.maximum(counts, 1)), 0.0)
    return torch.from_numpy(weights).float(), [*notes, f"{spread}; the loss is weighed by 1 / size"]


def make_augmentation(facts: Facts, options: ImagesOptions, seed: int) -> Compose:
    """Return the augmentation of training pictures; `.validation()` of it only normalises."""
    ops: list[Any] = []
    size = _size(facts)
    if options.augmentation != "none":
        if max(size) <= SMALL_SIDE:
            # Small pictures usually show their object in full size, so they are shifted, not enlarged.
            ops.append(RandomCrop(size, padding=max(1, max(size) // 8)))
        else:
            least = {"light": 0.6, "standard": 0.35, "strong": 0.2}[options.augmentation]
            ops.append(RandomResizedCrop(size, scale=(least, 1.0)))
        if options.horizontal_flip:
            ops.append(RandomHorizontalFlip(0.5))
    if options.augmentation == "standard":
        saturation = 0.2 if facts["channels"] == 3 else 0.0
        ops.append(ColorJitter(0.2, 0.2, saturation, p=0.5))
    if options.augmentation == "strong":
        ops += [RandAugment(2, 9), RandomErasing(0.25)]
    if facts.get("encoded") and not any(isinstance(op, RandomResizedCrop) for op in ops):
        ops.insert(0, Resize(size))
    return Compose([*ops, *_normalisation(facts)], seed=seed)


def _normalisation(facts: Facts) -> list[Any]:
    # Convolutions are fastest with channels last, on a GPU and on most CPUs.
    return [Normalize(facts["mean"], facts["std"]), ToDtype(torch.float32, channels_last=True)]


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# -- new pictures -----------------------------------------------------------------------------------


class PictureReader(FolderPictures):
    """Reads new pictures at the training size. A folder named like a class gives the target of its pictures."""

    def __init__(self, pictures: GivenPictures, facts: Facts, batch_size: int) -> None:
        super().__init__(pictures, facts, batch_size)
        names = facts.get("class_names", ())
        self._places = {name: place for place, name in enumerate(names)}

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield every picture once, in the order of the names."""
        places = range(len(self._pictures.keys))
        for low in range(0, len(places), self._batch_size):
            yield self._read(places[low : low + self._batch_size])

    def _read(self, places: Sequence[int]) -> RawBatch:
        images = np.zeros((len(places), self._channels, *self._size), np.uint8)
        reasons: list[str | None] = [None] * len(places)
        for row, place in enumerate(places):
            try:
                images[row] = self._pixels(place, self._decode(place), self._size)
            except SourceError as error:
                reasons[row] = self._refuse(error)
        answered = np.array([reason is None for reason in reasons])
        names = [self._pictures.keys[place] for place in places]
        folders = [PurePosixPath(str(name)).parent.name for name in names]
        truth = np.array([self._places.get(folder, -1) for folder in folders])
        return RawBatch(
            as_keys(names), {"images": torch.from_numpy(images)}, answered, reasons, truth=truth
        )

    def notes(self) -> Sequence[str]:
        """Return what was left out."""
        return [*self._pictures.told, *self._left_out("an answer")]
