"""Values that were written in good faith and read as something else: what was meant, and a note.

Enters: a key of the tree, a value of an old file and its text. Leaves: a value that the key takes, with a note
where it is another one than YAML read; or the reason why there is none. Costs microseconds.

What is corrected is what `stoker config check` would tell its user to write: `"32"` is a number, of `4-6` the
smaller one is taken, `010` is ten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from stoker.config.load import _NUMBER, _RANGE, _describe_given, _yaml_word
from stoker.config.names import SYNONYMS
from stoker.config.options import describe_allowed
from stoker.config.resolve import AUGMENT, PLACES
from stoker.config.tree import Config, key_schemas
from stoker.config.yaml_lines import _OCTAL, Place

_WORDS = {"true": True, "yes": True, "on": True, "1": True}
_WORDS |= {"false": False, "no": False, "off": False, "0": False}
_NOTHING = ("none", "null", "~", "nil")
_FORMATS = {
    "float16": "fp16",
    "half": "fp16",
    "16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "32": "fp32",
}


@dataclass(frozen=True)
class Corrected:
    """A value for a key, with a note where it was corrected; or the reason why there is none."""

    value: Any = None
    note: str = ""
    reason: str = ""


def correct(key: str, value: Any, place: Place, unreadable: bool = False) -> Corrected:
    """Return what was meant by a value. `unreadable`: YAML 1.1 reads another number than its text shows."""
    schema = key_schemas()[key]
    if not unreadable and fits(key, value):
        return Corrected(value)
    for meant, why in _guesses(schema, place.text if unreadable else value, place):
        if fits(key, meant):
            return Corrected(meant, f"{why}; written as {_yaml_word(meant)}")
    given = f"{place.text!r} is no plain value" if unreadable else _describe_given(value, place)
    return Corrected(reason=f"{given}; allowed: {describe_allowed(schema)}")


def fits(key: str, value: Any) -> bool:
    """Whether a key of the tree takes a value."""
    tree: Any = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    try:
        Config.model_validate(tree)
    except ValidationError:
        return False
    return True


def _guesses(schema: Mapping[str, Any], value: Any, place: Place) -> Iterator[tuple[Any, str]]:
    """Yield what may have been meant, the likeliest first, and what was wrong about it."""
    options = schema.get("anyOf", [schema])
    kinds = {option.get("type") for option in options}
    text = value.strip() if isinstance(value, str) else ""
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        yield int(value), f"{_yaml_word(value)} is no whole number to a strict reader"
    if kinds & {"integer", "number"} and text:
        yield from _numbers(text, place, "integer" in kinds)
    if "boolean" in kinds and str(value).lower() in _WORDS:
        yield _WORDS[str(value).lower()], f"{_yaml_word(value)} stands for true or false"
    if "null" in kinds and text.lower() in _NOTHING:
        yield None, f"{text!r} is text"
    for option in options:
        if "enum" in option:
            said = str(value).strip().lower()
            yield _FORMATS.get(said, said), f"{_yaml_word(value)} is none of the names"
    if "string" in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        yield place.text, f"{place.text} is a number"


def _numbers(text: str, place: Place, whole: bool) -> Iterator[tuple[Any, str]]:
    span = _RANGE.fullmatch(text)
    if span is not None:
        low, high = (_spelt(part) for part in span.groups())
        yield low, f"{text!r} is text, not a range, and {_yaml_word(high)} would do as well"
        return
    if _OCTAL.fullmatch(text):
        yield int(text.replace("_", "")), f"{text} is read in base 8 by YAML 1.1"
        return
    bare = text.lower().removesuffix("gib").removesuffix("gb").strip()
    number = _spelt(bare)
    if number is None:
        return
    if whole and isinstance(number, float) and number.is_integer():
        number = int(number)
    yield number, f"{text!r} is text" + (" (in quotes)" if place.quoted else "")


def _spelt(text: str) -> int | float | None:
    """Return the number that a text spells, whole where it has neither point nor exponent."""
    if _NUMBER.fullmatch(text) is None:
        return None
    plain = text.replace("_", "")
    if plain.lstrip("+-").isdecimal():
        return int(plain)
    value = float(plain)
    return value if math.isfinite(value) else None


# -- what the documents and their projects call things ----------------------------------------------


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
