"""The page "What stoker reads, and what it does with it", from the table that the tests run.

Enters: `tests/gallery/cases_*.py`. Leaves: one Markdown page. Costs milliseconds: no file is written.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from docs_build.markdown import table

ROOT = Path(__file__).resolve().parent.parent
_HEAD = """# What stoker reads, and what it does with it

Each line is a file that a test writes and packs (`tests/test_gallery.py`), so the right column is what really happens.
The rule: what would surprise the owner of the data is either handled and said, or refused by name with what to type.
Nothing is guessed in silence, and every pack accounts for its input: found = packed + refused + ignored.
"""


def gallery_page(root: Path = ROOT) -> str:
    """Return the page, a table for each kind of input."""
    folder = root / "tests"
    added = str(folder) not in sys.path
    if added:
        sys.path.insert(0, str(folder))
    try:
        parts = [_HEAD.rstrip()]
        for path in sorted((folder / "gallery").glob("cases_*.py")):
            module = importlib.import_module(f"gallery.{path.stem}")
            rows = [
                [text.replace("|", "\\|") for text in (case.what, case.does)]
                for case in module.CASES
            ]
            parts += [f"\n## {module.KIND}\n", *table(("input", "what happens"), rows)]
        return "\n".join(parts) + "\n"
    finally:
        if added:
            sys.path.remove(str(folder))
