"""What became of the keys of an old config file, its comments, and the text of the new one.

Enters: the old text and the places of its keys; then keys with their values and comments. Leaves: the comments
that belong to a key; then YAML in the order of the tree, with the keys that were dropped listed at its end.
Costs a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from stoker.config.load import _yaml_word
from stoker.config.resolve import OPTIONS
from stoker.config.yaml_lines import Document, KeyPath, Loader, Place

_COMMENT = re.compile(r"\s#")


@dataclass(frozen=True)
class Moved:
    """A key that was taken over.

    Attributes:
        old: Its dotted name in the old file.
        place: Where it stood.
        new: Its dotted name in the new file.
        value: As it is written there.
        note: What was corrected, and why; empty where nothing was.
        above: Lines of comment above it.
        beside: Comment beside it.
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
        lines += ["# Not taken over:", *(f"#   {_printable(str(entry))}" for entry in dropped)]
    return "".join(f"{line}\n" for line in lines)


def _printable(text: str) -> str:
    """Return a text that cannot leave its line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


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
