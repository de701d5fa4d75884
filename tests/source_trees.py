"""The package's modules as syntax trees, parsed and walked once per process: ten tests read all of them."""

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


def nodes(code: str, *kinds: type[ast.AST]) -> list[ast.AST]:
    """Return the nodes of these classes, class by class, each in the order of `ast.walk`."""
    return [node for kind in kinds for node in _by_class(code).get(kind, ())]


@cache
def _by_class(code: str) -> dict[type[ast.AST], list[ast.AST]]:
    # `ast.walk` takes two seconds for the package, and a test that looks at every node for its class half of one.
    found: list[ast.AST] = [parsed(code)]
    classes: dict[type[ast.AST], list[ast.AST]] = {}
    for node in found:  # which becomes longer on the way
        classes.setdefault(type(node), []).append(node)
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [one for one in value if isinstance(one, ast.AST)]
            elif (
                isinstance(value, ast.AST) and name != "ctx"
            ):  # a third of all nodes, which nobody asks for
                found.append(value)
    gc.freeze()
    return classes
