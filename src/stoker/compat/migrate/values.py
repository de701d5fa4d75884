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

from stoker.config.load import (
    _NUMBER,
    _RANGE,
    _describe_given,
    _yaml_word,
)
from stoker.config.options import describe_allowed
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
    """A value for a key, or the reason why there is none.

    Attributes:
        value: As the key takes it; meaningless with a reason.
        note: What was corrected; empty where nothing was.
        reason: Why no value could be found; empty where one was.
    """

    value: Any = None
    note: str = ""
    reason: str = ""


def correct(key: str, value: Any, place: Place, unreadable: bool = False) -> Corrected:
    """Return what was meant by a value.

    Args:
        key: A leaf of the tree, which is to have it.
        value: As YAML read it.
        place: Where it stood, with its text.
        unreadable: YAML 1.1 reads another number than its text shows.
    """
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
