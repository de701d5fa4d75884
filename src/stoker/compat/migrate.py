"""Turns the documents' config files into today's layout: every key is taken over, or dropped with its reason.

Enters: the text of an older YAML file. Leaves: the text of a sound config, in which each question is answered
once, at its usual place; what was moved, corrected and dropped, and why. Costs a few milliseconds.

Where the old file is accepted as it stands, the new one results in the same `Settings`: `resolve` decides which of
several keys wins, and only the winner is taken over. Comments beside a key and above it follow it.
Values that YAML reads as another type are corrected as `stoker config check` would advise: `"32"` becomes a
number, of `4-6` the smaller one is taken, `010` is ten.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from stoker.config.load import _NUMBER, _RANGE, _describe_given, _yaml_word
from stoker.config.options import SYNONYMS, describe_allowed
from stoker.config.resolve import AUGMENT, OPTIONS, PLACES, _answer_all, as_error, find_clashes
from stoker.config.tree import Config, home_of, key_schemas, open_leaves, sections
from stoker.config.yaml_lines import (
    _OCTAL,
    Document,
    KeyPath,
    Loader,
    Place,
    Problem,
    decode,
    read_yaml,
)
from stoker.display import nearest, printable
from stoker.errors import ConfigError, require_file

NAME = "recipe.name"
TYPED = "--recipe"  # origin of a recipe that the old file does not name
Accepts = Callable[[str, str, Any], str | None]


@dataclass(frozen=True)
class Migration:
    """Result for an old file: each of its keys is in `moved` (in the new order) or in `dropped` (in the old order)."""

    text: str
    moved: tuple[Moved, ...]
    dropped: tuple[Dropped, ...]


def migrate_file(
    path: str | Path, recipe: str | None = None, accepts: Accepts | None = None
) -> Migration:
    """Return an old config file in today's layout; see `migrate_config`."""
    text = decode(require_file(path, "config").read_bytes(), str(path))
    if isinstance(text, Problem):
        raise as_error([text])
    return migrate_config(text, str(path), recipe, accepts)


def migrate_config(
    text: str, file: str = "<text>", recipe: str | None = None, accepts: Accepts | None = None
) -> Migration:
    """Return the text of an old config file in today's layout; `recipe` is named in it, and its options taken over.

    `accepts` returns why a recipe refuses a value for one of its options; None when it takes it.

    Raises:
        ConfigError: The text is not YAML, or writes a key twice (no guess is made which one is meant); or there
            is no such recipe.
    """
    if recipe is not None and recipe not in RECIPE_OPTIONS:
        known = ", ".join(RECIPE_OPTIONS)
        near = nearest(recipe, RECIPE_OPTIONS) or next(iter(RECIPE_OPTIONS))
        raise ConfigError(f"--recipe is {recipe!r}.", known, f"--recipe {near}")
    document = read_yaml(text, file)
    unreadable = {".".join(path) for path in document.unreadable}
    loose = [
        problem
        for problem in document.problems
        if problem in document.repeats or problem.key not in unreadable
    ]
    if not loose and not isinstance(document.values, dict | None):
        place, given = Place(file, 1, 1), "is not a section per line"
        loose = [Problem(place, "", given, "a config", "lines such as training:")]
    if loose:
        raise as_error(loose)
    comments = Comments(text, document)
    work = _Work(document, comments, accepts or (lambda *_: None))
    work.take_all(recipe)
    moved = work.settle()
    dropped = tuple(sorted(work.dropped, key=lambda entry: (entry.place.line or 0, entry.old)))
    lines = [*comments.header, *_lines(moved)]
    if dropped:
        lines += ["# Not taken over:", *(f"#   {printable(str(entry))}" for entry in dropped)]
    return Migration("".join(f"{line}\n" for line in lines), moved, dropped)


def find_target(path: KeyPath) -> str | None:
    """Return the key of today's tree that an old key stands for, or None."""
    key = ".".join(path)
    if key in key_schemas():
        return key
    if key in WHOLE_NAMES:
        return WHOLE_NAMES[key]
    if len(path) > 1:
        # A known section at another depth, such as trainer.gpu_optimization or data.ram_32gb_mode.
        alike = [leaf for leaf in key_schemas() if tuple(leaf.split(".")[-2:]) == path[-2:]]
        if len(alike) == 1:
            return alike[0]
    name = path[-1].lower()
    if path[-2:-1] == (AUGMENT,):
        return AUGMENT_NAMES.get(name)
    return NAMES.get(name) if _is_about_training(path) else None


def _is_about_training(path: KeyPath) -> bool:
    return len(path) == 1 or path[-2].lower() in SECTIONS


def _leaves(tree: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for name, value in tree.items():
        path = (*above, name)
        if isinstance(value, dict) and value and ".".join(above) != OPTIONS:
            yield from _leaves(value, path)
        elif not (value in (None, {}) and ".".join(path) in {*sections(), *open_leaves()}):
            yield path, value


@dataclass
class _Work:
    """The work of one migration: takes the leaves of the old file, sorts them into taken and dropped ones."""

    document: Document
    comments: Comments
    accepts: Accepts
    taken: dict[str, Moved] = field(default_factory=dict)
    options: dict[str, Moved] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    recipe: str | None = None

    # -- key by key ---------------------------------------------------------------------------------

    def take_all(self, recipe: str | None) -> None:
        """Find a key of the tree, an option or a reason for every leaf."""
        leaves = list(_leaves(self.document.values or {}))
        if recipe is not None:
            self.taken[NAME] = Moved(TYPED, Place(TYPED), NAME, recipe)
        for path, value in leaves:
            if find_target(path) == NAME:
                self._take(path, value)
        for path, value in leaves:
            if path[-2:] == ("model", "name") and str(value).lower() in MODELS and not self.taken:
                made = self._moved(path, NAME, MODELS[str(value).lower()])
                note = f"{value} is a model of the recipe {made.value}"
                self.taken[NAME] = replace(made, note=note)
        self.recipe = self.taken[NAME].value if NAME in self.taken else None
        for path, value in leaves:
            key = ".".join(path)
            if find_target(path) != NAME and all(moved.old != key for moved in self.taken.values()):
                self._take(path, value)

    def _take(self, path: KeyPath, value: Any) -> None:
        if ".".join(path[:2]) == OPTIONS and len(path) > 2:
            self._take_option(path, ".".join(path[2:]), value)
            return
        target = find_target(path)
        option = (
            None
            if self.recipe is None or not _is_about_training(path)
            else RECIPE_OPTIONS.get(self.recipe, {}).get(path[-1].lower())
        )
        if path == ("recipe",) and not _RECIPE.fullmatch(str(value)):
            self._drop(path, value, f"no recipe; name one of {', '.join(RECIPE_OPTIONS)}")
        elif target is None and option is not None:
            self._take_option(path, option, value)
        elif target is None:
            self._drop(path, value, self._find_reason(path))
        else:
            self._take_key(path, target, value)

    def _take_key(self, path: KeyPath, target: str, value: Any) -> None:
        unreadable = path in self.document.unreadable
        meant = correct(target, value, self._place(path), unreadable)
        if meant.reason:
            self._drop(path, value, meant.reason)
            return
        made = replace(self._moved(path, target, meant.value), note=meant.note)
        known = self.taken.get(target)
        if known is not None and known.old not in (target, TYPED) and made.old == target:
            known, made = made, known
            self.taken[target] = known
        if known is None:
            self.taken[target] = made
        else:
            self._drop_moved(made, _compare(made, known))

    def _take_option(self, path: KeyPath, option: str, value: Any) -> None:
        made = self._moved(path, f"{OPTIONS}.{option}", value)
        refused = self.accepts(self.recipe, option, value) if self.recipe else None
        if refused is not None:
            self._drop(path, value, refused)
        elif option in self.options:
            self._drop(path, value, _compare(made, self.options[option]))
        else:
            self.options[option] = made

    def _find_reason(self, path: KeyPath) -> str:
        name = path[-1].lower()
        owners = [recipe for recipe, known in RECIPE_OPTIONS.items() if name in known]
        if self.recipe is None and owners and _is_about_training(path):
            return f"an option of a recipe: name one of {', '.join(owners)} with --recipe"
        for part in reversed(path):
            if part.lower() in REASONS:
                return REASONS[part.lower()]
        if len(path) > 1 and name in NAMES:
            return f"{'.'.join(path[:-1])} is no section of training here; perhaps {NAMES[name]}"
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.8)
        return "there is no such key here" + (f"; perhaps {NAMES[near[0]]}" if near else "")

    def _place(self, path: KeyPath) -> Place:
        return self.document.places.get(path, Place("config"))

    def _moved(self, path: KeyPath, new: str, value: Any) -> Moved:
        above, beside = self.comments.of(path)
        return Moved(".".join(path), self._place(path), new, value, "", above, beside)

    def _drop(self, path: KeyPath, value: Any, reason: str) -> None:
        self.dropped.append(Dropped(".".join(path), self._place(path), value, reason))

    def _drop_moved(self, moved: Moved, reason: str) -> None:
        self.dropped.append(Dropped(moved.old, moved.place, moved.value, reason))

    # -- all of them together ----------------------------------------------------------------------

    def settle(self) -> tuple[Moved, ...]:
        """Return one entry per setting, at its usual key; drop the keys that have no effect."""
        while problems := find_clashes(self._config()):
            first = problems[0]
            loser = first.loser or first.key
            self._drop_moved(self.taken.pop(loser), first.given)
        answers = _answer_all(self._config())
        homes = {key: home for home, key in answers.winners.items() if key in answers.written}
        winners = {home: key for key, home in homes.items()}
        for key, moved in self.taken.items():
            if key not in homes:
                why = answers.unused.get(key)
                why = why or f"says the same as {self.taken[winners[home_of(key)]].old}"
                self._drop_moved(moved, why)
        kept = [
            replace(self.taken[key], new=home) for key, home in homes.items() if key in self.taken
        ]
        if OPTIONS in homes:
            kept += self.options.values()
        else:
            for moved in self.options.values():
                self._drop_moved(moved, "no recipe is named")
        order = {key: number for number, key in enumerate(key_schemas())}
        return tuple(sorted(kept, key=lambda moved: order.get(moved.new, order[OPTIONS])))

    def _config(self) -> Config:
        written = {key: moved.value for key, moved in self.taken.items()}
        if self.options:
            written[OPTIONS] = {option: moved.value for option, moved in self.options.items()}
        return Config.of(written, {key: moved.place for key, moved in self.taken.items()})


def _compare(loser: Moved, winner: Moved) -> str:
    if loser.value == winner.value:
        return f"says the same as {winner.old}"
    return f"{winner.old} says {_yaml_word(winner.value)}"


# -- the new text -----------------------------------------------------------------------------------


_COMMENT = re.compile(r"\s#")


@dataclass(frozen=True)
class Moved:
    """A key that was taken over, by its dotted names in the old and the new file, with the comments around it.

    `note` says what was corrected, and why; empty without a correction.
    """

    old: str
    place: Place
    new: str
    value: Any
    note: str = ""
    above: tuple[str, ...] = ()
    beside: str = ""


@dataclass(frozen=True)
class Dropped:
    """A key that was not taken over."""

    old: str
    place: Place
    value: Any
    reason: str

    def __str__(self) -> str:
        """Format as `key: value (place): reason`, on one line."""
        return f"{self.old}: {_yaml_word(self.value)} ({self.place}): {self.reason}"


class Comments:
    """Finds the comments that belong to a key."""

    def __init__(self, text: str, document: Document) -> None:
        self._lines = text.removeprefix("\ufeff").splitlines()
        self._places = document.places
        # Comment lines at the beginning of the file.
        self.header = tuple(takewhile(lambda line: line.startswith("#"), self._lines))

    def of(self, path: KeyPath) -> tuple[tuple[str, ...], str]:
        """Return the lines of comment above a key (and above a section that it opens), and beside it."""
        place = self._places.get(path)
        if place is None or place.line is None:
            return (), ""
        return tuple(self._above(path, place.line)), self._beside(place, place.line)

    def _above(self, path: KeyPath, line: int) -> list[str]:
        found: list[str] = []
        opened = [self._places[path[:depth]].line for depth in range(1, len(path))]
        at = line - 1  # lines count from 1: this is the index of the line above, plus one
        while at > len(self.header):
            text = self._lines[at - 1].strip()
            if text.startswith("#"):
                found.insert(0, text)
            elif at not in opened:
                break
            at -= 1
        return found

    def _beside(self, place: Place, line: int) -> str:
        """Return the comment behind a value, not a '#' inside the value."""
        text = self._lines[line - 1]
        for mark in _COMMENT.finditer(text):
            try:
                node = yaml.compose(text[: mark.start()].strip(), Loader=Loader)
            except yaml.YAMLError:
                continue
            if isinstance(node, yaml.MappingNode) and len(node.value) == 1:
                value = node.value[0][1]
                if isinstance(value, yaml.ScalarNode) and str(value.value) == place.text:
                    return text[mark.end() - 1 :].rstrip()
        return ""


def _lines(entries: Sequence[Moved]) -> Iterator[str]:
    opened: tuple[str, ...] = ()
    for entry in entries:
        *above, name = _split(entry.new)
        for depth, part in enumerate(above):
            if opened[: depth + 1] != tuple(above[: depth + 1]):
                yield f"{'  ' * depth}{part}:"
        opened = tuple(above)
        pad = "  " * len(above)
        yield from (f"{pad}{line}" for line in entry.above)
        line = f"{pad}{_yaml_word(name)}: {_yaml_word(entry.value)}"
        yield f"{line} {entry.beside}".rstrip() if entry.beside else line


def _split(key: str) -> list[str]:
    """Return the parts of a dotted key; an option's own name may have dots."""
    if key.startswith(f"{OPTIONS}."):
        return [*OPTIONS.split("."), key.removeprefix(f"{OPTIONS}.")]
    return key.split(".")


# -- values that were meant -----------------------------------------------------------------------

_WORDS = {"true": True, "yes": True, "on": True, "1": True}
_WORDS |= {"false": False, "no": False, "off": False, "0": False}
_NOTHING = ("none", "null", "~", "nil")
_FORMATS = {"float16": "fp16", "half": "fp16", "16": "fp16", "bfloat16": "bf16"}
_FORMATS |= {"float32": "fp32", "32": "fp32"}


@dataclass(frozen=True)
class Corrected:
    """The value to write for a key, with a note if it was corrected; or the reason why there is none."""

    value: Any = None
    note: str = ""
    reason: str = ""


def correct(key: str, value: Any, place: Place, unreadable: bool = False) -> Corrected:
    """Return the intended value. `unreadable`: YAML 1.1 reads another number than the text shows."""
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
    try:
        Config.of({key: value}, {})
    except ValidationError:
        return False
    return True


def _guesses(schema: Mapping[str, Any], value: Any, place: Place) -> Iterator[tuple[Any, str]]:
    """Yield possible intended values, the likeliest first, each with the mistake in the given one."""
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
    """Return the number that a text spells: an int without point and exponent; None for no number."""
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


WHOLE_NAMES: Mapping[str, str] = {
    "recipe": "recipe.name",
    "store": "recipe.store",
    "data.store": "recipe.store",
}
"""Names that stand for a key only where they stand alone; `stoker config check` advises the same."""


def _find_names() -> dict[str, str]:
    """Return every name that stands for one key: those of the tree, then synonyms."""
    homes = {place.rpartition(".")[2]: home for home, places in PLACES.items() for place in places}
    found = {name: home for name, home in homes.items() if name not in _TOO_GENERAL}
    found |= SYNONYMS
    return found


NAMES: Mapping[str, str] = _find_names()  # a name in one of `SECTIONS`, and its key

AUGMENT_NAMES: Mapping[str, str] = {
    "flip_prob": f"{AUGMENT}.horizontal_flip_prob",
    "hflip_prob": f"{AUGMENT}.horizontal_flip_prob",
    "horizontal_flip": f"{AUGMENT}.horizontal_flip_prob",
    "rotation": f"{AUGMENT}.rotation_degrees",
    "degrees": f"{AUGMENT}.rotation_degrees",
}
"""A name in the section `gpu_augmentation` -> its key."""

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
"""Per recipe: a name in one of `SECTIONS` -> the recipe's option."""

_RECIPE = re.compile(rf"{'|'.join(RECIPE_OPTIONS)}|[\w.]+:\w+")

MODELS: Mapping[str, str] = {
    "microsegformer": "segmentation",
    "segformer": "segmentation",
    "unifiedpatchtst": "tabular",
    "patchtst": "tabular",
}
"""A model of the documents -> the recipe that trains a similar model."""

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
"""A name or section -> why a config has no such key."""
