"""The documents' config files in the layout of this one: every key taken over, or dropped with its reason.

Enters: the text of an older YAML file. Leaves: the text of a sound config, in which each question is answered
once, at its usual place; what was moved, corrected and dropped, and why. Costs a few milliseconds.

Where the old file is accepted as it stands, the new one comes to the same `Settings`: who wins among several
keys is decided by `resolve`, and only the winner is taken over. Comments beside a key and above it follow it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from stoker.compat.migrate.values import (
    AUGMENT_NAMES,
    MODELS,
    NAMES,
    REASONS,
    RECIPE_OPTIONS,
    SECTIONS,
    correct,
)
from stoker.config.load import _yaml_word
from stoker.config.resolve import AUGMENT, OPTIONS, _answer_all, as_error, find_clashes
from stoker.config.tree import Config, home_of, key_schemas, open_leaves, sections
from stoker.config.yaml_lines import Document, KeyPath, Loader, Place, Problem, decode, read_yaml
from stoker.display import nearest, printable
from stoker.errors import ConfigError, require_file

NAME = "recipe.name"
TYPED = "--recipe"
"""Where a recipe comes from that the old file does not name."""
Accepts = Callable[[str, str, Any], str | None]


@dataclass(frozen=True)
class Migration:
    """What became of an old file: each of its keys is in `moved` (in the new order) or in `dropped` (the old one)."""

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

    `accepts` says why a recipe does not take a value for one of its options; None when it does.

    Raises:
        ConfigError: The text is not YAML, or says one thing twice: no guess is made about that; or there is
            no such recipe.
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
        loose = [
            Problem(
                Place(file, 1, 1),
                "",
                "is not a section per line",
                "a config",
                "lines such as training:",
            )
        ]
    if loose:
        raise as_error(loose)
    comments = Comments(text, document)
    work = _Work(document, comments, accepts or (lambda *_: None))
    work.take_all(recipe)
    moved = work.settle()
    dropped = tuple(sorted(work.dropped, key=lambda entry: (entry.place.line or 0, entry.old)))
    new = render_text(moved, comments.header, dropped)
    return Migration(new, moved, dropped)


def find_target(path: KeyPath) -> str | None:
    """Return the key of the tree that an old key is, or None."""
    key = ".".join(path)
    if key in key_schemas():
        return key
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
    """The work of one migration: leaves of the old file in; what is taken and what is dropped out."""

    document: Document
    comments: Comments
    accepts: Accepts
    taken: dict[str, Moved] = field(default_factory=dict)
    options: dict[str, Moved] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    recipe: str | None = None

    # -- one key after the other -------------------------------------------------------------------

    def take_all(self, recipe: str | None) -> None:
        """Find a key of the tree, an option or a reason for every leaf."""
        leaves = list(_leaves(self.document.values or {}))
        if recipe is not None:
            self.taken[NAME] = Moved(TYPED, Place(TYPED), NAME, recipe)
        for path, value in leaves:
            if ".".join(path) == NAME:
                self._take(path, value)
        for path, value in leaves:
            if path[-2:] == ("model", "name") and str(value).lower() in MODELS and not self.taken:
                made = self._moved(path, NAME, MODELS[str(value).lower()])
                note = f"{value} is a model of the recipe {made.value}"
                self.taken[NAME] = replace(made, note=note)
        self.recipe = self.taken[NAME].value if NAME in self.taken else None
        for path, value in leaves:
            key = ".".join(path)
            if key != NAME and all(moved.old != key for moved in self.taken.values()):
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
        if target is None and option is not None:
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
        return (
            f"there is no such key here; perhaps {NAMES[near[0]]}"
            if near
            else "there is no such key here"
        )

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
        """Return one answer per question, at its usual key; drop the keys that have no say."""
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
        tree: dict[str, Any] = {}
        for key, moved in self.taken.items():
            *above, name = key.split(".")
            below = tree
            for part in above:
                below = below.setdefault(part, {})
            below[name] = moved.value
        if self.options:
            named = {option: moved.value for option, moved in self.options.items()}
            tree.setdefault("recipe", {})["options"] = named
        places = {key: moved.place for key, moved in self.taken.items()}
        return replace(Config.model_validate(tree), places=places)


def _compare(loser: Moved, winner: Moved) -> str:
    if loser.value == winner.value:
        return f"says the same as {winner.old}"
    return f"{winner.old} says {_yaml_word(winner.value)}"


# -- the new text -----------------------------------------------------------------------------------


_COMMENT = re.compile(r"\s#")


@dataclass(frozen=True)
class Moved:
    """A key that was taken over, by its dotted names in the old and the new file, with the comments around it.

    `note` says what was corrected, and why; it is empty where nothing was.
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
    """Which comment belongs to which key.

    Attributes:
        header: Lines of comment that the file begins with.
    """

    def __init__(self, text: str, document: Document) -> None:
        self._lines = text.removeprefix("\ufeff").splitlines()
        self._places = document.places
        first = next(
            (at for at, line in enumerate(self._lines) if not line.startswith("#")),
            len(self._lines),
        )
        self.header = tuple(self._lines[:first])

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
        """Return the comment behind a value; a '#' inside the value begins none."""
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


def render_text(entries: Sequence[Moved], header: Sequence[str], dropped: Sequence[Dropped]) -> str:
    """Return the text of a config."""
    lines = [*header, *_lines(entries)]
    if dropped:
        lines += ["# Not taken over:", *(f"#   {printable(str(entry))}" for entry in dropped)]
    return "".join(f"{line}\n" for line in lines)


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
