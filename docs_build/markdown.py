"""Markdown of tables, and of docstrings in the house's style (Google's sections).

Enters: cells; a docstring without its indentation. Leaves: Markdown whose text cannot become markup by accident.
Costs string work.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
_SECTION = re.compile(rf"^({'|'.join(_SECTIONS)}):$")
_NAMED = re.compile(r"^(\*{0,2}[\w., *]+): (.*)$", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; its cells are markup already."""
    first, *others = (f"| {' | '.join(row)} |" for row in (header, *rows))
    return [first, f"{'|---' * len(header)}|", *others]


def cell(text: str) -> str:
    """Return a text as a cell of a table, on one line."""
    return " ".join(text.replace("|", "\\|").split())


def to_markdown(doc: str) -> str:
    """Turn a docstring into paragraphs, literal blocks and one list per section."""
    parts: list[str] = []
    lines = doc.strip().splitlines()
    at = 0
    while at < len(lines):
        section = _SECTION.match(lines[at])
        end = at + 1
        if section:
            while end < len(lines) and (not lines[end] or lines[end].startswith(" ")):
                end += 1
            parts += [f"**{section[1]}**", _items(lines[at + 1 : end])]
        elif lines[at].startswith("    "):
            while end < len(lines) and (not lines[end] or lines[end].startswith("    ")):
                end += 1
            block = textwrap.dedent("\n".join(lines[at:end])).strip("\n")
            parts.append(f"```text\n{block}\n```")
        elif lines[at]:
            while end < len(lines) and lines[end] and not lines[end].startswith("    "):
                end += 1
            # A paragraph that is laid out in columns keeps its layout.
            text = "\n".join(lines[at:end])
            columns = sum(bool(re.search(r"\S {3,}\S", line)) for line in lines[at:end])
            parts.append(f"```text\n{text}\n```" if columns >= 2 else escaped(text))
        at = end
    return "\n\n".join(parts)


def _items(lines: list[str]) -> str:
    """Write the entries of a section as a list; a deeper indentation continues an entry."""
    entries: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        if line.startswith(" ") and entries:
            entries[-1] += f" {line.strip()}"
        elif line:
            entries.append(line)
    written = []
    for entry in entries:
        named = _NAMED.match(entry)
        written.append(f"- `{named[1]}`: {escaped(named[2])}" if named else f"- {escaped(entry)}")
    return "\n".join(written)


def escaped(text: str) -> str:
    """Keep `<`, `*` and brackets outside of code from becoming markup; code stays as it is."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece
        if piece.startswith("`")
        else re.sub(r"([*\[\]])", r"\\\1", piece).replace("<", "&lt;")
        for piece in pieces
    )
