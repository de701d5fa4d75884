"""The package's modules as syntax trees, parsed once per process: ten tests read all of them, a second each time."""

from __future__ import annotations

import ast
import gc
from functools import cache


@cache
def parsed(code: str) -> ast.Module:
    """Return the tree of some source; it is shared, so nobody changes it."""
    tree = ast.parse(code)
    gc.freeze()  # half a million nodes that no collection has to look at
    return tree
