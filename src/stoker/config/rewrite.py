"""A config with some keys changed, its comments and its order kept.

Enters: the text of a config file and dotted keys with their new values. Leaves: the text with only
these values changed or added, which reads as the same keys typed with `--set` would; where the text
cannot be edited in place (aliases, merges, an empty section), a clean YAML without comments. Costs a few
milliseconds.

The edit is checked by reading it: what comes back is never another config than the one asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from stoker.config.load import _in_brackets, _yaml_word, dump_config, parse_config
from stoker.config.resolve import PLACES
from stoker.config.tree import Config
from stoker.config.yaml_lines import Loader
from stoker.display import printable
from stoker.errors import ConfigError

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
    return _with_notes(edited, notes)


def find_key(config: Config, key: str) -> str:
    """Return the place that decides a key in a config: where it is written, else its usual one.

    A value written at a less specific place would have no effect.
    """
    written = config.written()
    return next((place for place in PLACES.get(key, ()) if place in written), key)


def _says(text: str, wanted: Config) -> bool:
    try:
        return parse_config(text) == wanted
    except ConfigError:
        return False


def _with_notes(text: str, notes: Sequence[str]) -> str:
    """Put comment lines below the comments that the text begins with."""
    lines = text.splitlines(keepends=True)
    at = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "".join([*lines[:at], *(f"# {printable(note)}\n" for note in notes), *lines[at:]])


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
    return _add_line(text, spot, value)


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


def _add_line(text: str, spot: _Spot, value: Any) -> str:
    """Add a line behind the mapping's last one-line entry, or before its first."""
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


def _block(path: tuple[str, ...], value: Any, pad: int) -> str:
    lines = [f"{' ' * (pad + _STEP * depth)}{name}:" for depth, name in enumerate(path)]
    return "\n".join([*lines[:-1], f"{lines[-1]} {_yaml_word(value)}"]) + "\n"
