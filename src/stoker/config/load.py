"""Reading and writing config files, with every problem named at its line.

Enters: a path, the name of a file that comes with stoker, or a text; `--set` overrides. Leaves: a `Config`
that knows where each key was written, or one `ConfigError` with all problems: `file:line:column key: given;
allowed; try`. Costs a few milliseconds for a file of a hundred lines.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stoker.arguments import explained
from stoker.config.options import SYNONYMS, describe_allowed
from stoker.config.resolve import PLACES, as_error, find_clashes
from stoker.config.tree import Config, home_of, key_schemas, open_leaves, sections
from stoker.config.yaml_lines import (
    INIT,
    Document,
    Dumper,
    KeyPath,
    Loader,
    Place,
    Problem,
    decode,
    read_yaml,
)
from stoker.display import command, look_for, nearest, printable, quoted
from stoker.errors import ConfigError, InputError, refuse_special
from stoker.strict_json import exact_text

_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_RANGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:-|–|\.\.|to)\s*(\d+(?:\.\d+)?)\s*")
_MOST_SHOWN = 80
FOLDER = Path(__file__).resolve().parent.parent / "configs"  # the files that come with stoker
_OLD_NAMES = {
    "s0_chunk_loader": "forex_16gb",
    "s1_massspec": "massspec_32gb",
    "s4_tabular": "tabular_large_batch",
}
_KINDS = {bool: "a yes/no value", int: "a whole number", float: "a number", str: "text"}


def shipped_configs() -> dict[str, Path]:
    """Return the files that come with stoker, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def find_config(typed: str | Path) -> Path:
    """Return the file that is meant: one that exists, or a shipped one by its name.

    `forex` is a shipped file, and so is `configs/forex.yaml`, the former path of these files. A file of the
    user's own with such a name comes first.
    """
    path = Path(typed)
    if path.is_file():
        return path
    is_name = path.suffix == "" and len(path.parts) == 1
    is_old_place = path.suffix == ".yaml" and path.parts[:-1] in ((), ("configs",))
    shipped = FOLDER / f"{_OLD_NAMES.get(path.stem, path.stem)}.yaml"
    return shipped if (is_name or is_old_place) and shipped.is_file() else path


@explained("stoker.load_config('my.yaml')")
def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a config file.

    Args:
        path: The YAML file, or the name of a shipped one, such as "forex"; an empty file gives the defaults.
        overrides: `key=value` texts that replace what the file says, checked the same way.

    Raises:
        ConfigError: With every problem of the file and the overrides.
    """
    if not isinstance(path, str | Path):
        raise InputError(
            f"load_config was given a {type(path).__name__}.",
            "the path of a YAML file, or the name of a shipped one; a Trainer takes a mapping as its config",
            "load_config('my.yaml')",
        )
    if isinstance(overrides, str):
        raise InputError(
            f"overrides is the text {overrides!r}.", "a list of texts", f"overrides=[{overrides!r}]"
        )
    config, problems = check_config(path, overrides)
    if config is None:
        raise as_error(problems)
    return config


def parse_config(text: str, file: str = "<text>", overrides: Sequence[str] = ()) -> Config:
    """Read and check a config text; `file` is the name used in messages."""
    config, problems = _check(read_yaml(text, file), file, overrides)
    if config is None:
        raise as_error(problems)
    return config


def check_config(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[Config | None, list[Problem]]:
    """Return the config, or None with the problems in the order of the file."""
    path = find_config(path)
    refuse_special(path, "config", ConfigError, is_read_once=True)
    try:
        text = decode(path.read_bytes(), str(path))
    except OSError as error:
        meant = nearest(path.stem, shipped_configs()) if path.parent == Path() else None
        raise ConfigError(
            f"config {str(path)!r} cannot be read: {error.strerror}.",
            f"a readable YAML file, or one of {', '.join(shipped_configs())}",
            command("ls", path)
            if path.is_dir()
            else quoted(meant)
            if meant
            else look_for(path, "-l"),
        ) from error
    if isinstance(text, Problem):
        return None, [text]
    return _check(read_yaml(text, str(path)), str(path), overrides)


def dump_config(config: Config) -> str:
    """Return YAML of what was written, defaults left out; reading it gives an equal config."""
    return "".join(f"{line}\n" for line in _yaml_lines(config.tree))


def _yaml_lines(tree: Mapping[str, Any], pad: str = "") -> Iterator[str]:
    # By hand, for the sake of _yaml_word: PyYAML loses U+0085 when it writes a whole tree.
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{pad}{name}:" if value else f"{pad}{name}: {{}}"
            open_names = {_yaml_word(key): below for key, below in value.items()}
            yield from _yaml_lines(open_names, f"{pad}  ")
        else:
            yield f"{pad}{name}: {_yaml_word(value)}"


def describe_tree(config: Config, defaults: Mapping[str, Any] | None = None) -> str:
    """Return YAML with every key: written ones as they are, the others as comments at their usual place.

    `defaults` are those of a recipe, by dotted key.
    """
    own = defaults or {}
    lines: list[str] = []
    written = config.written()
    seen: set[str] = set()
    for key, schema in key_schemas().items():
        if key not in written and home_of(key) != key:
            continue
        *above, name = key.split(".")
        for depth in range(len(above)):
            section = ".".join(above[: depth + 1])
            if section not in seen:
                seen.add(section)
                lines.append(f"{'  ' * depth}{above[depth]}:")
        pad = "  " * len(above)
        mark = "" if key in written else "# "
        value = _yaml_word(written.get(key, own.get(key, schema["default"])))
        lines.append(f"{pad}## {schema['description']} Allowed: {describe_allowed(schema)}.")
        lines.append(f"{pad}{mark}{name}: {value}")
    return "\n".join(lines) + "\n"


def _yaml_word(value: Any) -> str:
    if isinstance(value, Mapping):
        parts = (f"{_in_brackets(key)}: {_in_brackets(below)}" for key, below in value.items())
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_brackets, value))}]"
    # PyYAML ends a lone scalar with "..." and folds text; in quotes it stays on one line.
    word = yaml.dump(value, Dumper=Dumper, allow_unicode=True, width=sys.maxsize)
    word = word.removesuffix("...\n").rstrip("\n")
    if len(word.splitlines()) <= 1:
        return word
    return yaml.safe_dump(value, default_style='"', width=sys.maxsize).rstrip("\n")


def _in_brackets(value: Any) -> str:
    # Between brackets a comma ends a word, so text is always quoted.
    if isinstance(value, str):
        return yaml.safe_dump(value, default_style='"', width=sys.maxsize).rstrip("\n")
    return _yaml_word(value)


def _check(
    document: Document, file: str, overrides: Sequence[str]
) -> tuple[Config | None, list[Problem]]:
    problems = list(document.problems)
    if document.values is not None and not isinstance(document.values, dict):
        problems.append(_not_a_section(document.values, Place(file, 1, 1), ""))
        document.values = None
    values = _without_empty_sections(document.values or {})
    _remove(values, document.unreadable)
    problems += _apply_overrides(values, document, overrides)
    bad, found = _validate(values, document.places)
    problems += found
    _remove(values, bad)
    places = {".".join(path): place for path, place in document.places.items()}
    config = replace(Config.model_validate(values), places=places)
    unread = {".".join(path) for path in [*bad, *document.unreadable]}
    below = (leaf for leaf in key_schemas() for key in unread if f"{leaf}.".startswith(f"{key}."))
    problems += find_clashes(config, frozenset(below))
    problems.sort(key=lambda item: (item.place.line or 1 << 30, item.place.column or 0))
    return (None if problems else config), problems


def _without_empty_sections(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    # `training:` with every line below it commented out is an empty section, not a null.
    kept: dict[str, Any] = {}
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, dict) and key in sections():
            kept[name] = _without_empty_sections(value, f"{key}.")
        elif value is not None or (key not in sections() and key not in open_leaves()):
            kept[name] = value
    return kept


def _section_of(values: dict[str, Any], path: KeyPath) -> dict[str, Any] | None:
    """Return the section of a key, made where it is missing; None where a value that is no section stands there."""
    for name in path[:-1]:
        below: Any = values.setdefault(name, {})
        if not isinstance(below, dict):
            return None  # the check of types reports it
        values = below
    return values


def _remove(values: dict[str, Any], paths: Iterable[KeyPath]) -> None:
    for path in filter(None, paths):
        section = _section_of(values, path)
        if section is not None:
            section.pop(path[-1], None)


def _apply_overrides(
    values: dict[str, Any], document: Document, overrides: Sequence[str]
) -> list[Problem]:
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for text in overrides:
        key, equals, typed = text.partition("=")
        key, typed = key.strip(), typed.strip()
        place = Place("--set", text=typed, quoted=typed[:1] in ("'", '"'))
        problem = _override_problem(place, text, key, bool(equals), seen)
        read = read_yaml(typed, "--set")
        if problem is None and read.problems:
            first = read.problems[0]
            problem = Problem(place, key, first.given, first.allowed, first.fix)
        if problem is not None:
            problems.append(problem)
            continue
        seen[key] = typed
        path = tuple(key.split("."))
        section = _section_of(values, path)
        if section is not None:
            section[path[-1]] = read.values
            document.places[path] = place
    return problems


def _override_problem(
    place: Place, text: str, key: str, equals: bool, seen: Mapping[str, str]
) -> Problem | None:
    if not equals or not key:
        what = "key" if equals else "'='"
        fix = "--set training.lr=0.001"
        return Problem(place, "", f"{text!r} has no {what}", "key=value", fix)
    if key in sections():
        first = next(leaf for leaf in key_schemas() if leaf.startswith(f"{key}."))
        given = f"{key!r} is a section"
        usual = f"{first}={_yaml_word(key_schemas()[first]['default'])}"
        return Problem(place, key, given, "one key at a time", f"--set {quoted(usual)}")
    if key not in key_schemas() and key.rpartition(".")[0] not in open_leaves():
        return _unknown_key(place, tuple(key.split(".")))
    if key in seen and seen[key] != place.text:
        given = f"given twice, as {seen[key]} and as {place.text}"
        return Problem(place, key, given, "each key once", f"--set {quoted(f'{key}={place.text}')}")
    return None


def _validate(
    values: Mapping[str, Any], places: Mapping[KeyPath, Place]
) -> tuple[list[KeyPath], list[Problem]]:
    try:
        Config.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        return [], []
    # A leaf of several types is one problem, though pydantic has one for each of them.
    first = {_leaf_path(detail["loc"]): detail for detail in reversed(details)}
    problems = [
        _translate(detail, path, places.get(path, Place("config")))
        for path, detail in first.items()
    ]
    return list(first), problems


def _leaf_path(where: tuple[int | str, ...]) -> KeyPath:
    """Return the path of a key, without the type that pydantic names behind it."""
    path = tuple(str(part) for part in where)
    return path[:-1] if ".".join(path[:-1]) in key_schemas() else path


def _translate(detail: ErrorDetails, path: KeyPath, place: Place) -> Problem:
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        return _unknown_key(place, path)
    if key in sections():
        return _not_a_section(detail["input"], place, key)
    schema = key_schemas()[key]
    given = _describe_given(detail["input"], place)
    allowed = describe_allowed(schema, bounds=detail["type"] == "less_than_equal")
    return Problem(place, key, given, allowed, _suggest(place, schema))


def _not_a_section(value: Any, place: Place, key: str) -> Problem:
    names = list(sections()[key].model_fields)
    given = f"is {_describe_value(value)}, not a section" + ("" if key else " per line")
    fix = (
        _nested(next(leaf for leaf in key_schemas() if leaf.startswith(f"{key}.")), value)
        if key
        else INIT
    )
    return Problem(place, key, given, f"a section with the keys {', '.join(names)}", fix)


def _nested(leaf: str, value: Any = None) -> str:
    """Return a key as YAML in one line: `training: {lr: 0.001}`, with its default; a name with the text given."""
    is_name = leaf == "recipe.name" and isinstance(value, str)
    word = _yaml_word(value if is_name else key_schemas()[leaf]["default"])
    return f"{leaf.replace('.', ': {')}: {word}{'}' * leaf.count('.')}"


def _unknown_key(place: Place, path: KeyPath) -> Problem:
    *above, name = path
    depth = next((i for i in range(len(above)) if ".".join(above[: i + 1]) not in sections()), None)
    if depth is not None:
        *above, name = above[: depth + 1]  # on --set, the wrong part may stand further up
    section = ".".join(above)
    leaf = ".".join((*above, name))
    if leaf in key_schemas() and len(above) + 1 < len(path):
        allowed = describe_allowed(key_schemas()[leaf])
        return Problem(place, ".".join(path), f"{leaf} is not a section", allowed, leaf)
    siblings = list(sections()[section].model_fields)
    key = ".".join(path)
    where = f"in the section {section}" if section else "at the top level"
    given = f"there is no key {name!r} {where}"
    return Problem(place, key, given, ", ".join(siblings), _suggest_name(path, name, section))


def _suggest_name(path: KeyPath, name: str, section: str) -> str:
    prefix = f"{section}." if section else ""
    if name in key_schemas():
        return _nested(name)
    if path[-1] in SYNONYMS and name == path[-1]:
        return SYNONYMS[name]
    known = [*key_schemas(), *(key for key in sections() if key)]
    joined = [key for key in known if "." in key and key.replace(".", "_") == name]
    if joined:  # recipe_options for recipe.options
        return joined[0]
    near = difflib.get_close_matches(name, sections()[section].model_fields, n=1, cutoff=0.75)
    if near:
        better = prefix + near[0]
        whole = ".".join((better, *path[better.count(".") + 1 :]))
        return whole if whole in key_schemas() else better
    elsewhere = [key for key in known if key.rpartition(".")[2] == path[-1]]
    if elsewhere:
        return " or ".join(elsewhere)
    leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
    near = difflib.get_close_matches(path[-1], leaves, n=1, cutoff=0.75)
    return leaves[near[0]] if near else "delete it"


def _describe_value(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a section"
    text = exact_text(value)
    if len(text) > _MOST_SHOWN:  # a CSV file is one long text to YAML
        text = f"{text[:_MOST_SHOWN]}…"
    return f"{text} ({_KINDS[type(value)]})"


def _describe_given(value: Any, place: Place) -> str:
    if isinstance(value, str):
        return f"{value!r} is text" + (" (in quotes)" if place.quoted else "")
    return f"is {_describe_value(value)}"


def _suggest(place: Place, schema: Mapping[str, Any]) -> str:
    options = [schema, *schema.get("anyOf", [])]
    kinds = {option.get("type") for option in options}
    text = place.text.strip()
    numeric = next((part for part in options if part.get("type") in ("integer", "number")), None)
    if numeric is not None:
        if advice := _suggest_number(text, numeric):
            return advice
        if schema.get("default") is None and (bound := _nearest_bound(text, numeric)):
            return bound
    choices = next((option["enum"] for option in options if "enum" in option), None)
    if choices is not None:
        return nearest(text, map(str, choices)) or str(choices[0])
    if "boolean" in kinds:
        words = {"1": "true", "0": "false", "true": "true", "false": "false"}
        return words.get(text.lower(), _yaml_word(schema.get("default")))
    word = _yaml_word(schema.get("default"))
    return word if place.line is None else f"{word}, or delete the line"  # --set has no lines


def _nearest_bound(text: str, schema: Mapping[str, Any]) -> str:
    """Return the largest or smallest number that is allowed, whichever is nearer; "" for no number."""
    try:
        value = float(text)
    except ValueError:
        return ""
    if value > schema["maximum"]:
        return _yaml_word(schema["maximum"])
    return _yaml_word(schema["minimum"]) if value < schema.get("minimum", -math.inf) else ""


def _suggest_number(text: str, schema: Mapping[str, Any]) -> str:
    """Return the number that was probably meant, or two joined by "or"; "" if unknown or not allowed."""
    span, found = _RANGE.fullmatch(text), _NUMBER.match(text.replace(",", "."))
    words = [] if found is None else [found[0]]
    if span is not None:
        words = [span[1], span[2]]
    elif found is not None and schema["type"] == "integer" and math.isfinite(float(found[0])):
        value = float(found[0])
        words = [str(part) for part in dict.fromkeys((math.floor(value), math.ceil(value)))]
    least, above = (schema.get(name, -math.inf) for name in ("minimum", "exclusiveMinimum"))
    fit = all(above < float(word) <= schema["maximum"] and least <= float(word) for word in words)
    return " or ".join(words) if fit else ""


# -- some keys changed, comments and order kept -----------------------------------------------------
# Where a text cannot be edited in place (aliases, merges, an empty section), a clean YAML without comments replaces
# it. The edit is checked by reading it, so the result is never another config than the one asked for.


_STEP = 2


def rewrite_config(
    text: str, changes: Mapping[str, Any], file: str = "<text>", notes: Sequence[str] = ()
) -> str:
    """Return `text` with the dotted keys of `changes` at their new values.

    `notes` become lines of comment below those at the top.
    """
    overrides = [f"{key}={_yaml_word(value)}" for key, value in changes.items()]
    wanted = parse_config(text, file, overrides)
    edited = text if text.endswith("\n") or not text else f"{text}\n"
    for key, value in changes.items():
        better = _edit(edited, tuple(key.split(".")), value)
        if better is None:
            break
        edited = better
    if not _says(edited, wanted):
        edited = dump_config(wanted)
    # The notes go below the comments that the text begins with.
    lines = edited.splitlines(keepends=True)
    at = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "".join([*lines[:at], *(f"# {printable(note)}\n" for note in notes), *lines[at:]])


def find_key(config: Config, key: str) -> str:
    """Return the place whose value a key gets: the most specific one that is written, else the usual one.

    A value written at a less specific place would have no effect.
    """
    written = config.written()
    return next((place for place in PLACES.get(key, ()) if place in written), key)


def _says(text: str, wanted: Config) -> bool:
    try:
        return parse_config(text) == wanted
    except ConfigError:
        return False


class _Spot(NamedTuple):
    """The deepest mapping on the path to a key, and the part of the path that is missing."""

    mapping: yaml.MappingNode
    missing: tuple[str, ...]
    leaf: yaml.Node | None


def _edit(text: str, path: tuple[str, ...], value: Any) -> str | None:
    """Return the text with one value changed or added; None where that cannot be done in place."""
    root = yaml.compose(text, Loader=Loader)
    if root is None:
        return text + _block(path, value, 0)
    if not isinstance(root, yaml.MappingNode):
        return None
    spot = _find(root, path)
    if spot.leaf is not None:
        if isinstance(spot.leaf, yaml.CollectionNode) and not spot.leaf.flow_style:
            return None
        word = _in_brackets(value) if spot.mapping.flow_style else _yaml_word(value)
        start, end = spot.leaf.start_mark.index, spot.leaf.end_mark.index
        # Nothing stands there when a key has no value.
        return f"{text[:start]}{'' if end > start else ' '}{word}{text[end:]}"
    if spot.mapping.flow_style:
        return _add_to_brackets(text, spot, value)
    # Add a line behind the mapping's last one-line entry, or before its first.
    entries = spot.mapping.value
    pad = entries[0][0].start_mark.column
    block = _block(spot.missing, value, pad)
    ends = [
        below.end_mark.index
        for key, below in entries
        if key.start_mark.line == below.end_mark.line
        and (isinstance(below, yaml.ScalarNode) or below.flow_style)
    ]
    if ends:
        at = text.find("\n", max(ends)) + 1
    elif pad == 0:
        at = len(text)  # a new section goes to the end
    else:
        at = text.rfind("\n", 0, entries[0][0].start_mark.index) + 1
    return text[:at] + block + text[at:]


def _find(root: yaml.MappingNode, path: tuple[str, ...]) -> _Spot:
    mapping = root
    for depth, name in enumerate(path):
        below = next((value for key, value in mapping.value if key.value == name), None)
        if below is None:
            return _Spot(mapping, path[depth:], None)
        if depth == len(path) - 1 or not isinstance(below, yaml.MappingNode):
            return _Spot(mapping, (), below)
        mapping = below
    raise AssertionError(path)


def _add_to_brackets(text: str, spot: _Spot, value: Any) -> str:
    inner = _in_brackets(value)
    for name in reversed(spot.missing[1:]):
        inner = f"{{{name}: {inner}}}"
    word = f"{spot.missing[0]}: {inner}"
    entries = spot.mapping.value
    if entries:
        at = entries[-1][1].end_mark.index
        return f"{text[:at]}, {word}{text[at:]}"
    at = spot.mapping.start_mark.index + 1
    return f"{text[:at]}{word}{text[at:]}"


def _block(path: tuple[str, ...], value: Any, pad: int) -> str:
    lines = [f"{' ' * (pad + _STEP * depth)}{name}:" for depth, name in enumerate(path)]
    return "\n".join([*lines[:-1], f"{lines[-1]} {_yaml_word(value)}"]) + "\n"
