"""The tables at the end of docs/config.md: every key of a config, from the models that check it.

Enters: the models of `stoker.config`. Leaves: Markdown; `python -m docs_build.config_table` prints it. Costs nothing.
"""

from __future__ import annotations

import sys

from docs_build.markdown import table
from stoker.config.load import _yaml_word
from stoker.config.options import describe_allowed
from stoker.config.resolve import PLACES
from stoker.config.tree import key_schemas, sections


def config_table() -> str:
    """Return the tables of docs/config.md in Markdown: one per section, a row per key."""
    lines: list[str] = []
    for section, model in sections().items():
        keys = [key for key in PLACES if key.rpartition(".")[0] == section]
        if not keys:
            continue
        header = ("key", "allowed", "default", "unit", "meaning", "also written as")
        schemas = [key_schemas()[key] for key in keys]
        rows = [
            (
                f"`{key}`",
                describe_allowed(schema),
                f"`{_yaml_word(schema['default'])}`",
                str(schema.get("unit", "")),
                schema["description"],
                ", ".join(f"`{place}`" for place in PLACES[key] if place != key),
            )
            for key, schema in zip(keys, schemas, strict=True)
        ]
        lines += ["", f"### `{section}`", "", (model.__doc__ or "").strip(), ""]
        lines += table(header, rows)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(config_table())
