"""Strict YAML that records the line of every key.

Enters: the text of one file. Leaves: plain dicts and scalars, the place of every key, and
every problem found on the way. Costs about 1 ms per 100 lines (PyYAML in Python).

What PyYAML would let through in silence is a problem here: a key written twice, a number that
YAML 1.1 reads in base 8 or 60, tags that build objects, aliases that contain themselves or
unfold into more nodes than any config has. Numbers are those of YAML 1.2: `8e-4` is one, though
PyYAML, which follows YAML 1.1, reads text there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stoker.address import keep_secrets
from stoker.display import command

MAX_TEXT_BYTES = 1024 * 1024
MAX_NODES = 10_000  # the tree has about 50 leaves; more is an alias bomb, not a config
MAX_DEPTH = 32

_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAG + name for name in ("null", "bool", "int", "float", "str")}
_OCTAL = re.compile(r"[-+]?0[0-9_]+")

KeyPath = tuple[str, ...]


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with the floats of YAML 1.2."""


class Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; text that `Loader` would read as a number is written in quotes."""


for _kind in (Loader, Dumper):
    _kind.add_implicit_resolver(
        _TAG + "float",
        re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


@dataclass(frozen=True)
class Place:
    """Where a key was written, and the text of its value.

    Attributes:
        file: File as the user named it, or "--set".
        line: 1-based; None for the command line.
        column: 1-based; None for the command line.
        text: The value as typed when it is a scalar, else "".
        quoted: Whether the value stood in quotes.
    """

    file: str
    line: int | None = None
    column: int | None = None
    text: str = ""
    quoted: bool = False

    def __str__(self) -> str:
        """Format as `file:line:column`, the way editors and compilers do."""
        return self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in the three parts of every message here, and where.

    Attributes:
        place: Where it stands.
        key: Dotted key, or "" when it is the whole file.
        given: What was found.
        allowed: What would have been right; may be empty.
        fix: What to type instead; may be empty.
        loser: Key whose removal settles a clash of two; "" where it is `key` or where there is none.
    """

    place: Place
    key: str
    given: str
    allowed: str = ""
    fix: str = ""
    loser: str = ""

    def __str__(self) -> str:
        """Format as one line: `file:line:column key: given; allowed: …; try: …`."""
        head = f"{self.place} {self.key}".rstrip()
        parts = [f"{head}: {self.given}"]
        parts += [f"allowed: {self.allowed}"] if self.allowed else []
        parts += [f"try: {self.fix}"] if self.fix else []
        return "; ".join(parts)


@dataclass
class Document:
    """The values of a text, the place of every key by its path, and the problems.

    `unreadable` holds the paths whose value a problem has left empty; `repeats` those problems that are
    about a key written twice.
    """

    values: Any = None
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[KeyPath] = field(default_factory=set)
    repeats: list[Problem] = field(default_factory=list)


INIT = "stoker config init RECIPE my.yaml"  # advice for a file that is no config at all
_LOOK = "check quotes, indentation, and the space after each colon"


def decode(raw: bytes, file: str) -> str | Problem:
    """Return the text of a file, or the problem that prevents reading it as text."""
    if len(raw) > MAX_TEXT_BYTES:
        given = f"the file has {len(raw):,} bytes"
        return Problem(Place(file), "", given, f"up to {MAX_TEXT_BYTES:,} bytes", "a config file")
    try:
        # Windows editors write a byte order mark first; it does not belong to the first key.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        given = f"byte {raw[error.start]:#04x} at offset {error.start} is not UTF-8"
        is_text = b"\0" not in raw
        fix = (
            f"{command('iconv', '-f', 'latin1', '-t', 'utf-8', Path(file))} > utf8.yaml"
            if is_text
            else INIT
        )
        return Problem(Place(file, line, column), "", given, "text in UTF-8", fix)


def read_yaml(text: str, file: str) -> Document:
    """Return values, places and problems of one YAML text. Never raises on bad text."""
    document = Document()
    try:
        node = yaml.compose(text, Loader=Loader)
        if node is not None:
            document.values = _Reader(document, file).build(node, ())
    except yaml.YAMLError as error:
        document.problems.append(_syntax_problem(error, text, file))
    except RecursionError:
        given = "brackets or indents are nested too deep to read"
        document.problems.append(
            Problem(Place(file), "", given, f"{MAX_DEPTH} levels", "flatten it")
        )
    return document


def _syntax_problem(error: yaml.YAMLError, text: str, file: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        place = Place(file, before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1)
        code = ord(text[error.position : error.position + 1] or "\0")
        given = f"character U+{code:04X} is not printable"
        return Problem(place, "", given, "printable text", "delete the character")
    place = Place(file) if mark is None else Place(file, mark.line + 1, mark.column + 1)
    given = str(getattr(error, "problem", None) or "the text is not YAML")
    if "\\t" in given or "\t" in given:
        return Problem(
            place,
            "",
            "a tab stands where YAML wants spaces",
            "spaces",
            command("expand", "-t", "2", Path(file)),
        )
    is_composed = isinstance(error, yaml.composer.ComposerError)
    if is_composed and mark is not None and text.startswith("---", mark.index):
        given = "a second document begins here"
        return Problem(place, "", given, "one document per file", "delete the line '---'")
    return Problem(place, "", f"not YAML: {given}", "key: value lines", _LOOK)


class _Reader:
    """Turns composed nodes into plain values; collects places and problems on the way."""

    def __init__(self, document: Document, file: str) -> None:
        self.document = document
        self.file = file
        self.num_nodes = 0
        self.has_unfolded = False
        self.open: list[yaml.Node] = []
        self.constructor = yaml.constructor.SafeConstructor()

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the plain value of a node; None, with a problem, where there is none."""
        self.num_nodes += 1
        if any(node is above for above in self.open):
            self._refuse(node, path, "an alias contains itself", "no cycles", "write it out")
            return None
        if self.num_nodes > MAX_NODES or len(self.open) > MAX_DEPTH:
            if not self.has_unfolded:
                self.has_unfolded = True
                given = f"aliases or nesting unfold into more than {MAX_NODES:,} nodes"
                given += f" or {MAX_DEPTH} levels"
                self._complain(node, path, given, "a config", "write it out without aliases")
            self.document.unreadable.add(path)
            return None
        self.open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, path) for item in node.value]
            return self._scalar(node, path)
        finally:
            self.open.pop()

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        # Merges first, so that the section's own keys override them, and their places.
        merges = [value for key, value in node.value if key.tag == _TAG + "merge"]
        found = self._merge(merges, path) if merges else {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = None if key.tag == _TAG + "merge" else self._name(key, path)
            if name is None:
                continue
            line = key.start_mark.line + 1
            if name in lines:
                given = f"written twice, on lines {lines[name]} and {line}"
                self._complain(key, (*path, name), given, "each key once", "delete one of the two")
                self.document.repeats.append(self.document.problems[-1])
                continue
            lines[name] = line
            self._forget((*path, name))
            self.document.places[(*path, name)] = self._place(key, value)
            found[name] = self.build(value, (*path, name))
        return found

    def _merge(self, merges: list[yaml.Node], path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        only = merges[0]
        if len(merges) > 1:
            self._complain(
                merges[1], path, "'<<' is written twice", "one per section", "<<: [*a, *b]"
            )
        sources = only.value if isinstance(only, yaml.SequenceNode) else [only]
        for source in reversed(sources):  # the first of a list wins, so it is merged last
            if isinstance(source, yaml.MappingNode):
                found |= self.build(source, path) or {}
            else:
                given = "'<<' merges something that is not a section"
                self._complain(source, path, given, "an alias of a section", "<<: *name")
        return found

    def _name(self, key: yaml.Node, path: KeyPath) -> str | None:
        if isinstance(key, yaml.ScalarNode) and key.tag == _TAG + "str":
            return str(key.value)
        word = key.value if isinstance(key, yaml.ScalarNode) else "a list or section"
        given = f"the key {word!r} is not text"
        self._complain(key, path, given, "names", f"'{word}': in quotes if it is meant as a name")
        return None

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        text = str(node.value)
        keep_secrets(text)
        if node.tag not in _PLAIN_TAGS:
            kind = node.tag.removeprefix(_TAG)
            given = f"{text!r} is a YAML {kind}"
            self._refuse(node, path, given, "text, numbers, true, false, null", f'"{text}"')
            return None
        if "\0" in text:  # no path, and no name of anything, may hold one
            self._refuse(node, path, f"{text!r} holds a NUL character", "text without \\0")
            return None
        numeric = node.tag in (_TAG + "int", _TAG + "float")
        if numeric and (":" in text or _OCTAL.fullmatch(text)):
            base = 60 if ":" in text else 8
            given = f"{text} is read in base {base} by YAML 1.1"
            plain = text.lstrip("+-0_").replace(":", "") or "0"
            self._refuse(node, path, given, "a plain decimal number", plain)
            return None
        try:
            return self.constructor.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError, LookupError) as error:
            given = f"{text[:40]!r} cannot be read as {node.tag.removeprefix(_TAG)}: {error}"
            self._refuse(node, path, given.splitlines()[0], "a plain value")
            return None

    def _place(self, key: yaml.Node, value: yaml.Node) -> Place:
        line, column = key.start_mark.line + 1, key.start_mark.column + 1
        if not isinstance(value, yaml.ScalarNode):
            return Place(self.file, line, column)
        return Place(self.file, line, column, str(value.value), value.style in ("'", '"'))

    def _forget(self, path: KeyPath) -> None:
        places = self.document.places
        for known in [known for known in places if known[: len(path)] == path]:
            del places[known]

    def _refuse(
        self, node: yaml.Node, path: KeyPath, given: str, allowed: str = "", fix: str = ""
    ) -> None:
        self.document.unreadable.add(path)
        self._complain(node, path, given, allowed, fix)

    def _complain(
        self, node: yaml.Node, path: KeyPath, given: str, allowed: str = "", fix: str = ""
    ) -> None:
        place = Place(self.file, node.start_mark.line + 1, node.start_mark.column + 1)
        self.document.problems.append(Problem(place, ".".join(path), given, allowed, fix))
