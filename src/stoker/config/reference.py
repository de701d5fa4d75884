"""The table of all keys in docs/config.md, from the models in `tree.py`.

Enters: nothing. Leaves: Markdown. Costs a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.config.load import _yaml_word, describe_allowed
from stoker.config.resolve import QUESTIONS
from stoker.config.tree import key_schemas, sections

_HEADER = "| key | allowed | default | unit | meaning | sets |\n|---|---|---|---|---|---|"


def render_reference() -> str:
    """Return one table per section: key, allowed, default, unit, meaning, field of `Settings`."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    questions = {
        key: question
        for question, ranks in QUESTIONS.items()
        for names in ranks
        for key in names.split("|")
    }
    opened = None
    for key, schema in key_schemas().items():
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
            f"`{questions.get(key) or key.replace('gpu_augmentation', 'augmentation')}`",
        )
        yield f"| {' | '.join(cells)} |"
