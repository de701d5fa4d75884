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


@cache
def nodes(code: str) -> tuple[ast.AST, ...]:
    """Return all nodes of that tree, as `ast.walk` finds them: it takes a second for the package, ten times."""
    found = tuple(ast.walk(parsed(code)))
    gc.freeze()
    return found
