"""Writes and reads JSON as the standard defines it: the only module that calls Python's `json`.

Enters: plain values; bytes or text. Leaves: text that every JSON reader takes; plain values, nested at most
`MAX_DEPTH` levels. Costs what `json` costs: a second pass over the values only where one is not finite, or
where a text has more than `MAX_DEPTH` brackets.

Python's own `json` writes `NaN` and `Infinity`, which the standard does not know, and ends with a
RecursionError on a text of ten thousand brackets. (The doctor's probe runs without stoker, and has its own.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 100
"""Nesting levels that a text may have. Ours have about ten; code that walks the values needs two frames a level."""


def json_text(
    document: Any,
    *,
    indent: int | None = None,
    ensure_ascii: bool = True,
    default: Callable[[Any], Any] | None = None,
) -> str:
    """Return a document as JSON; numbers that are not finite become null. Arguments as for `json.dumps`."""

    def written(values: Any) -> str:
        return json.dumps(
            values, indent=indent, ensure_ascii=ensure_ascii, default=default,
            allow_nan=False,
        )  # fmt: skip

    try:
        return written(document)
    except ValueError:  # a number that is not finite
        return written(finite(document))


def exact_text(
    document: Any, *, sort_keys: bool = False, default: Callable[[Any], Any] | None = None
) -> str:
    """Return a document as Python spells it, `NaN` included: for checksums, messages, and our own processes.

    Not for a file that others read. `parse_json` gives back the same values.
    """
    return json.dumps(document, sort_keys=sort_keys, default=default)


def finite(value: Any) -> Any:
    """Return plain values, nested in any way, with None for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def parse_json(text: str | bytes) -> Any:
    """Return the values of a JSON text.

    `NaN` and `Infinity` are taken: older versions wrote them.

    Raises:
        json.JSONDecodeError: It is not JSON, or nested more than `MAX_DEPTH` levels deep. A ValueError.
        UnicodeDecodeError: Bytes that are not text. A ValueError too.
    """
    try:
        values = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MAX_DEPTH and _is_deep(values):  # type: ignore[arg-type]
        raise _too_deep()
    return values


def _is_deep(values: Any) -> bool:
    """Whether a list or mapping, even an empty one, stands below `MAX_DEPTH` others."""
    level = [values] if isinstance(values, dict | list) else []  # a text may hold brackets too
    for _ in range(MAX_DEPTH):
        level = [
            entry
            for value in level
            for entry in (value.values() if isinstance(value, dict) else value)
            if isinstance(entry, dict | list)
        ]
        if not level:
            return False
    return True


def _too_deep() -> json.JSONDecodeError:
    return json.JSONDecodeError(f"nested more than {MAX_DEPTH} levels deep", "", 0)
