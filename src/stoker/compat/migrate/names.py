"""What the documents and their projects call things, and what that is here.

Enters: nothing. Leaves: tables from a name to a key of `tree.py`, to an option of a recipe, or to the reason why
it has no place. Costs nothing.

Names count in sections of training and loading only: `validation.batch_size` is another thing.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.config.names import SYNONYMS
from stoker.config.resolve import AUGMENT, PLACES

_PARTS = (
    "training train trainer data dataset dataloader data_loader loader gpu_optimization optimizer optim "
    "common general gpu hardware system performance amp memory model loss checkpoint checkpoints paths"
)
SECTIONS = frozenset(_PARTS.split())
"""Sections whose names are looked up below; so are names at the top level."""

_TOO_GENERAL = frozenset({"name", "dir", "store", "options", "enabled"})


def _find_names() -> dict[str, str]:
    """Return every name that means one key: those of the tree, then synonyms."""
    homes = {place.rpartition(".")[2]: home for home, places in PLACES.items() for place in places}
    found = {name: home for name, home in homes.items() if name not in _TOO_GENERAL}
    found |= SYNONYMS
    return found


NAMES: Mapping[str, str] = _find_names()
"""A name in one of `SECTIONS`, and its key."""

AUGMENT_NAMES: Mapping[str, str] = {
    "flip_prob": f"{AUGMENT}.horizontal_flip_prob",
    "hflip_prob": f"{AUGMENT}.horizontal_flip_prob",
    "horizontal_flip": f"{AUGMENT}.horizontal_flip_prob",
    "rotation": f"{AUGMENT}.rotation_degrees",
    "degrees": f"{AUGMENT}.rotation_degrees",
}
"""A name in the section `gpu_augmentation`, and its key."""

_HEADS, _LAYERS, _PATCH = (
    "heads num_heads n_heads",
    "layers num_layers n_layers e_layers",
    "patch patch_len",
)
RECIPE_OPTIONS: Mapping[str, Mapping[str, str]] = {
    recipe: {
        word: words.split()[0] for words in options for word in words.split()
    }
    for recipe, options in {
        "forex": ("d_model", _HEADS, _LAYERS, "dropout", "weight_decay", "timeframes", "stateful", "order"),
        "images": ("weight_decay", "label_smoothing", "mixup", "cutmix", "ema"),
        "massspec": ("width", "num_blocks", "bottleneck", "dropout", "max_mz", "mass_power", "ratios"),
        "massspec-teacher": ("width", "num_blocks", "dropout", "max_mz", "num_layers", "drop_edge"),
        "segmentation": ("ce_weight", "dice_weight", "dropout", "weight_decay", "warmup_epochs", "num_classes"),
        "tabular": ("d_model", _HEADS, _LAYERS, _PATCH, "stride", "dropout", "weight_decay", "channels"),
    }.items()
}  # fmt: skip
"""Per recipe, a name in one of `SECTIONS`, and the option it is."""

MODELS: Mapping[str, str] = {
    "microsegformer": "segmentation",
    "segformer": "segmentation",
    "unifiedpatchtst": "tabular",
    "patchtst": "tabular",
}
"""A model of the documents, and the recipe that trains its like."""

_REASONS = {
    "the order belongs to the recipe (forex: recipe.options.order); the others shuffle": "shuffle",
    "the device is typed: stoker train --device cuda:0": "device gpu_id cuda",
    "raw files are packed once: stoker pack massspec --msp FILE --mol-dir DIR STORE": "msp_file msp_path "
    "mol_files_dir mol_dir mol_files",
    "splits are made when packing (--split), or by recipe.options.ratios": "train_ratio val_ratio "
    "test_ratio train_split val_split test_split",
    "functional groups are always packed": "use_functional_groups",
    "the recipe brings its own optimizer and schedule": "optimizer scheduler",
    "the recipe brings its own model": "model",
    "windows are chosen when packing: stoker pack bars --windows": "sequence_length context_window "
    "input_sequence_length",
    "the horizon is chosen when packing: stoker pack bars --horizon": "target_length horizon",
    "the log is written beside the checkpoints, in run.dir": "log_dir logs_dir",
    "one list here: recipe.options.loss_weights, for direction, scalp, swing and trend": "loss_weights",
    "copies to the device never wait": "non_blocking",
    "a chunk's size is told in GiB: data.chunk_size_gb": "samples_per_chunk chunk_ranges",
}
REASONS: Mapping[str, str] = {
    word: reason for reason, words in _REASONS.items() for word in words.split()
}
"""A name, or a section, and why it has no place in a config."""
