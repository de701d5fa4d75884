"""The segmentation recipe: predicts a class for every pixel.

Enters: a store of `stoker pack segmentation`: `images` uint8 (n, channels, height, width) and `masks` uint8
(n, height, width), or both as encoded pictures of any size. Leaves: a `Job` for `MicroSegFormer`, augmented while
batches are gathered. Costs: one read of at most 512 training images and masks and of all validation masks.

A pixel whose mask is 255, or one of `ignore_values`, is ignored: in the loss, the metrics and the
baselines. Augmentation writes 255 where a rotated image has no pixel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from stoker.augment import Compose, ProgressiveAugmentation, make_preset
from stoker.augment.geometry import Resize
from stoker.augment.ops import Normalize
from stoker.config import Settings
from stoker.errors import InputError
from stoker.loader.splits import split_randomly
from stoker.recipes.contract import (
    BATCH,
    IMAGE_SIZES,
    Columns,
    Default,
    Facts,
    Job,
    Judge,
    Layout,
    Port,
    RawReader,
    Rebuilt,
    Recipe,
    Tensors,
)
from stoker.recipes.gate import complete_parts, drawn_parts, fill_parts, own_parts
from stoker.recipes.options import parse_options, require
from stoker.recipes.pictures import (
    describe_pictures,
    make_normaliser,
    read_rows,
    sized_store,
    spell_fields,
)
from stoker.recipes.scaling import evenly
from stoker.recipes.schedule import make_adamw, warmup_cosine
from stoker.recipes.segmentation.evaluation import (
    FinalSegmentationMetrics,
    MaskJudge,
    SegmentationMetrics,
    class_names,
    compute_metrics,
    segmentation_loss,
)
from stoker.recipes.segmentation.masks import ScenePictures, segment, write_masks
from stoker.recipes.segmentation.network import MicroSegFormer
from stoker.recipes.segmentation.options import SegmentationOptions
from stoker.sources.images import find_scenes
from stoker.sources.images.masks import IGNORE
from stoker.store.fields import Array
from stoker.store.reader import Store
from stoker.train.predict import Predicted

Tensor = torch.Tensor
LEARNING_RATE = 8e-4
"""Learning rate of AdamW."""

_JITTER = ("horizontal_flip_prob", "rotation_degrees", "brightness", "contrast", "saturation")
_LOOK_IMAGES = 512
_ENCODED_SIZE = (512, 512)


class SegmentationRecipe(Recipe):
    """Builds segmentation jobs."""

    name = "segmentation"
    Options = SegmentationOptions
    pack_command = "stoker pack segmentation --images IMAGES --masks MASKS OUT"
    raw_kinds = "a picture or a folder of pictures"
    defaults = (
        Default(
            "training.lr", LEARNING_RATE, "AdamW, rising for warmup_epochs, then half a cosine"
        ),
        Default("training.epochs", 100, "as in the config that ships"),
        Default("training.batch_size", 32, "as in the config that ships"),
        Default("training.patience", 30, "epochs without a higher mIoU; the best weights count"),
    )
    uses = ("training.use_gpu_augmentation",)
    endings = ("/",)
    transient = ("epochs",)

    def make_job(
        self, store: Store, options: SegmentationOptions | Mapping[str, Any], seed: int
    ) -> Job:
        """Build the job; see `Recipe`."""
        chosen = parse_options(SegmentationOptions, options, self.name)
        store = sized_store(store, chosen.size, _ENCODED_SIZE)
        _check_fields(store)
        num_classes, class_note = find_classes(store, chosen)
        samples, split_note = split_images(store, chosen, seed)
        facts = {
            "inputs": ["images"],
            **describe_pictures(store, samples["train"]),
            "num_classes": num_classes,
            "original_sizes": find_original_sizes(store),
        }
        size = (facts["size"][0], facts["size"][1]) if facts.get("encoded") else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = MicroSegFormer(num_classes, facts["channels"], chosen)
        return Job(
            model=model,
            criterion=partial(
                segmentation_loss, ce_weight=chosen.ce_weight, dice_weight=chosen.dice_weight
            ),
            unpack=partial(unpack_images, ignore_values=chosen.ignore_values),
            metrics=partial(SegmentationMetrics, num_classes),
            final_metrics=partial(
                FinalSegmentationMetrics,
                store,
                samples["train"],
                class_names(store.manifest.attributes.get("classes") or (), num_classes),
                chosen.ignore_values,
                make_normaliser(facts),
            ),
            baseline=majority_metrics(store, samples, num_classes, chosen.ignore_values),
            samples=samples,
            make_optimizer=partial(make_adamw, weight_decay=chosen.weight_decay),
            make_schedule=partial(warmup_cosine, warmup_share=chosen.warmup_share),
            fields=["images", "masks"],
            augmentation=make_augmentation(chosen, facts["mean"], facts["std"], seed, size),
            monitor=("miou", True),
            notes=(
                class_note,
                split_note,
                f"normalised by training images: mean {_spell(facts['mean'])}, std {_spell(facts['std'])}",
                f"augmentation: {_augmentation_words(chosen)}",
                *([f"pictures are resized to {size[0]} x {size[1]}"] if size else []),
            ),
            facts=facts,
        )

    def from_settings(self, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the number of epochs, and the augmentation options of `gpu_augmentation`."""
        asked: dict[str, Any] = {"epochs": max(1, settings.training.epochs)}
        if settings.is_default("training.use_gpu_augmentation"):
            return asked  # the user set nothing: the recipe's own augmentation is used
        if settings.augmentation is None:
            return asked | {"augmentation": "none"}
        # If the user names a preset, only numbers that the user wrote replace those of the preset.
        named = "augmentation" in given
        return asked | {
            name: getattr(settings.augmentation, name)
            for name in _JITTER
            if not (named and settings.is_default(f"gpu_augmentation.{name}"))
        }

    def describe(self, job: Job) -> dict[str, Any]:
        """Return channels, classes, sizes and normalisation: the loader normalises, not the model."""
        return dict(job.facts)

    def rebuild(self, options: SegmentationOptions, facts: Facts) -> Rebuilt:
        """Return the network, and the normalisation of its images."""
        normalise = make_normaliser(facts)

        def unpack(batch: Tensors) -> Tensor | tuple[Tensor, Tensor]:
            # Images of a store, without `original_size`, were normalised when they were gathered.
            original = batch.get("original_size")
            return batch["images"] if original is None else (batch["images"], original)

        def predict(model: Any, inputs: Tensor | tuple[Tensor, Tensor]) -> Columns:
            # Only the class of every pixel: scores would take 4 bytes per pixel and class.
            if isinstance(inputs, Tensor):
                return {"mask": model(inputs).argmax(dim=1).to(torch.uint8)}
            images, original = inputs
            high, wide = original[0].tolist()
            tile = (facts["size"][0], facts["size"][1])
            return {"mask": segment(model, images, (high, wide), tile, normalise)}

        network = MicroSegFormer(facts["num_classes"], facts["channels"], options)
        resize = [Resize((facts["size"][0], facts["size"][1]))] if facts.get("encoded") else []
        augment = Compose([*resize, Normalize(facts["mean"], facts["std"])])
        return Rebuilt(network, ["images"], unpack, predict, augment)

    def export_layout(self, made: Rebuilt, facts: Facts) -> Layout:
        """Return a graph from raw pixels of any size to classes and scores."""
        normalise = make_normaliser(facts)

        def answer(model: Any, images: Tensor) -> Columns:
            scores = model(images)
            return {"mask": scores.argmax(dim=1).to(torch.uint8), "scores": scores}

        shape = (BATCH, facts["channels"], *IMAGE_SIZES)
        about = "pixels from 0 to 255, channel by channel"
        port = Port("images", shape, torch.uint8, about, below=256)
        return Layout([port], lambda named: normalise(named["images"]), answer)

    def open_raw(
        self, given: Any, made: Rebuilt, facts: Facts, told: Mapping[str, Any]
    ) -> RawReader | None:
        """Open a folder of pictures, or one picture."""
        if "size" not in facts:
            raise InputError(
                "the checkpoint was written before stoker answered for raw pictures.",
                "a store of pictures, or a new run",
                "stoker pack segmentation --help",
            )
        skipped = ""
        if isinstance(given, str | Path) and Path(given).is_dir():
            found = find_scenes(Path(given))
            if found.masks != Path(given):  # a folder as for training: leave out its masks
                given, skipped = found.images, f"{found.masks} holds masks: not predicted"
        return ScenePictures.open(
            given,
            facts,
            int(told.get("batch_size", 8)),
            skipped=skipped,
            is_table=bool(told.get("is_table")),
        )

    def read_truth(
        self,
        store: Store,
        samples: Array,
        made: Rebuilt,
        options: SegmentationOptions,
        facts: Facts,
    ) -> Array | None:
        """Return the masks of a store's images, with 255 at ignored pixels."""
        info = store.fields.get("masks")
        if info is None or list(info.shape) != list(facts.get("size", ())):
            return None
        masks = store.gather("masks", samples)
        strange = (masks >= facts["num_classes"]) | np.isin(masks, options.ignore_values)
        return np.where(strange, IGNORE, masks)

    def make_judge(self, options: SegmentationOptions, facts: Facts) -> Judge:
        """Return the judge of masks."""
        return MaskJudge(class_names(facts.get("class_names", ()), facts["num_classes"]))

    def write_answers(
        self, out: Path, answers: Iterable[Predicted], made: Rebuilt, facts: Facts
    ) -> tuple[int, list[str]]:
        """Write a folder of masks."""
        names = class_names(facts.get("class_names", ()), facts["num_classes"])
        return write_masks(out, answers, names)


# -- batches -------------------------------------------------------------------------------------


def unpack_images(batch: Tensors, ignore_values: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return images, and masks with 255 at ignored pixels; device work only."""
    masks = batch["masks"]
    for value in ignore_values:
        masks = masks.masked_fill(masks == value, IGNORE)
    return batch["images"], masks


# -- from a store --------------------------------------------------------------------------------


def find_original_sizes(store: Store) -> Any:
    """Return the sizes of pictures before packing, and their mean scale; None if not known."""
    sizes = store.manifest.attributes.get("original_sizes")
    if sizes is None or "per_pixel" not in sizes:
        return sizes
    size = store.fields["images"].shape[1:]
    scale = [side * share for side, share in zip(size, sizes["per_pixel"], strict=True)]
    return {"least": sizes["least"], "most": sizes["most"], "scale": scale}


def find_classes(store: Store, options: SegmentationOptions) -> tuple[int, str]:
    """Return the number of classes, and a note.

    The packer records the values of all masks; the masks of a store without that record are read once.
    """
    recorded = store.manifest.attributes.get("mask_values")
    if recorded is None:
        counts = count_pixels(store, np.arange(store.num_samples))
        recorded = np.flatnonzero(counts).tolist()
    apart = {IGNORE, *options.ignore_values}
    values = [int(value) for value in recorded if value not in apart]
    if not values:
        raise InputError(
            f"the masks of {store.name} hold nothing but ignored values.",
            "masks with classes from 0 up",
            "ignore_values=[]",
        )
    if values == [0] and IGNORE in recorded and options.num_classes is None:
        raise InputError(
            f"the masks of {store.name} hold 0 and 255 only, and 255 counts nowhere: every pixel left is class 0.",
            "two classes; `stoker pack segmentation` stores 255 as class 1",
            "pack the images and masks again",
        )
    num_classes = options.num_classes or max(2, max(values) + 1)
    beyond = [value for value in values if value >= num_classes]
    if beyond:
        raise InputError(
            f"the masks hold the value {max(values)}, and there are {num_classes} classes.",
            f"0 to {num_classes - 1}, 255 and ignore_values",
            f"num_classes={max(values) + 1}, or ignore_values={[*options.ignore_values, *beyond]}",
        )
    ignored = ", ".join(str(value) for value in sorted(apart))
    names = list(store.manifest.attributes.get("classes") or ())[:num_classes]
    named = f" ({', '.join(names)})" if names else ""
    return num_classes, f"{num_classes} classes{named}; mask values {ignored} count nowhere"


def split_images(
    store: Store, options: SegmentationOptions, seed: int
) -> tuple[dict[str, Array], str]:
    """Return the samples of each split, and a note."""
    samples: dict[str, Array]
    if "split" in store.fields:
        samples, made = complete_parts(own_parts(store), seed, np.arange(store.num_samples))
        note = f"split: the store's own{made}"
    else:
        division: Array = split_randomly(store.num_samples, options.ratios, seed)
        if options.split == "ordered":
            division = np.sort(division)
        samples = drawn_parts(division)
        each = np.arange(store.num_samples)
        samples, filled = fill_parts(samples, options.ratios, seed, each, "images")
        note = f"split: {options.split}" + (f", seed {seed}" if options.split == "random" else "")
        note += filled
    if not len(samples["train"]):
        raise InputError(
            f"{store.name} has no training samples.",
            "at least one image in the training split",
            "ratios=[0.8, 0.1, 0.1]",
        )
    return samples, f"{note}; " + ", ".join(f"{name} {len(ids):,}" for name, ids in samples.items())


def make_augmentation(
    options: SegmentationOptions,
    mean: list[float],
    std: list[float],
    seed: int,
    size: tuple[int, int] | None = None,
) -> Compose | ProgressiveAugmentation:
    """Return the augmentation of training images; `.validation()` of it only resizes and normalises."""
    if options.augmentation == "progressive":
        others: dict[str, Any] = dict.fromkeys(_JITTER[1:])
        first = replace(options, augmentation="minimal", **others)
        stages = {0: first, options.strong_from_epoch: replace(options, augmentation="strong")}
        return ProgressiveAugmentation(
            {
                epoch: cast(Compose, make_augmentation(stage, mean, std, seed, size))
                for epoch, stage in stages.items()
            }
        )
    given = {name: getattr(options, name) for name in _JITTER if getattr(options, name) is not None}
    if options.augmentation in ("none", "minimal"):
        strange = [
            name for name in given if (options.augmentation, name) != ("minimal", _JITTER[0])
        ]
        require(
            not strange,
            ", ".join(strange),
            [given[name] for name in strange],
            f"nothing beside augmentation={options.augmentation!r}, which does not use it",
            "augmentation='standard'",
        )
    preset = "minimal" if options.augmentation == "none" else options.augmentation
    made = make_preset(preset, **given, mean=mean, std=std, seed=seed, ignore_index=IGNORE)
    if size is not None:
        made = Compose([Resize(size), *made.ops], seed=seed, ignore_index=IGNORE)
    return made.validation() if options.augmentation == "none" else made


def _augmentation_words(options: SegmentationOptions) -> str:
    if options.augmentation != "progressive":
        return options.augmentation
    words = f"minimal, from epoch {options.strong_from_epoch} on strong"
    if options.strong_from_epoch >= options.epochs:
        words += f"; the run has {options.epochs} epochs, so it never is"
    return words


def majority_metrics(
    store: Store, samples: Mapping[str, Array], num_classes: int, ignore_values: tuple[int, ...]
) -> dict[str, float]:
    """Return the validation metrics of answering the most common class of training pixels everywhere."""
    val = count_pixels(store, samples["val"])[:num_classes]
    train = count_pixels(store, evenly(samples["train"], _LOOK_IMAGES))[:num_classes]
    for counts in (train, val):
        counts[[value for value in ignore_values if value < num_classes]] = 0
    confusion = np.zeros((num_classes, num_classes), dtype=np.int64)
    confusion[:, int(np.argmax(train))] = val
    return compute_metrics(confusion) if val.sum() else {}


def count_pixels(store: Store, samples: Array) -> Array:
    """Return `(256,)` pixels of each mask value."""
    counts = np.zeros(256, dtype=np.int64)
    for masks in read_rows(store, "masks", samples):
        counts += np.bincount(masks.ravel(), minlength=256)
    return counts


def _check_fields(store: Store) -> None:
    """Raise when the store is not one of images and masks."""
    images, masks = store.fields.get("images"), store.fields.get("masks")
    fits = (
        images is not None
        and masks is not None
        and len(images.shape) == 3
        and list(masks.shape) == list(images.shape[1:])
        and np.dtype(images.dtype) == np.uint8
        and np.dtype(masks.dtype) == np.uint8
    )
    if not fits:
        raise InputError(
            f"{store.name} has {spell_fields(store)}.",
            "images uint8 (channels, height, width) and masks uint8 (height, width)",
            "stoker pack segmentation --images IMAGES --masks MASKS OUT",
        )


def _spell(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:.4f}" for value in values) + ")"
