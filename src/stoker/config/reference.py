"""The table of all keys in docs/config.md, from the models in `options.py`.

Enters: nothing. Leaves: Markdown. Costs a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.config.load import _yaml_word
from stoker.config.options import describe_allowed
from stoker.config.resolve import PLACES
from stoker.config.tree import home_of, key_schemas, sections

_HEADER = (
    "| key | allowed | default | unit | meaning | also written as |\n|---|---|---|---|---|---|"
)


def render_reference() -> str:
    """Return one table per section: key, allowed, default, unit, meaning, other places."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    opened = None
    for key, schema in key_schemas().items():
        if home_of(key) != key:
            continue
        section = key.rpartition(".")[0]
        if section != opened:
            opened = section
            text = (sections()[section].__doc__ or "").strip()
            yield from ("", f"### `{section}`", "", text, "", _HEADER)
        cells = (
            f"`{key}`",
            describe_allowed(schema),
            f"`{_yaml_word(schema['default'])}`",
            str(schema.get("unit", "")),
            schema["description"],
            ", ".join(f"`{place}`" for place in PLACES[key] if place != key),
        )
        yield f"| {' | '.join(cells)} |"
