"""The user's lines through which a script calls its model, and those through which it calls `backward`.

Enters: frames of the training thread. Leaves: each path of lines once, from the call outwards, whether an optimizer
trains that model, and the text of files that are not on the disk, such as cells of a notebook. Costs about 5 µs per
frame that is looked at. Whether a result reaches an update is read from the source later, outside of the script
(`dataflow.py`).
"""

from __future__ import annotations

import linecache
import os
import weakref
from typing import Any

from . import places

_MOST_PATHS, _MOST_CALLERS = 50, 12
_MOST_CHARACTERS = 1 << 20
_DECORATOR = os.path.join("torch", "utils", "_contextlib.py")  # noqa: PTH118  an end of a path
_NESTED = ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>", "<lambda>")
"""Functions inside of a statement, whose line is that of the frame around them."""


class Paths:
    """What is known so far; only the sampling thread adds calls, and only the training thread adds updates."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], str] = {}
        self._calls: dict[str, Any] = {}
        self._updates: dict[tuple[Any, ...], list[tuple[str, int, str]]] = {}
        self._sources: dict[str, str] = {}
        self._optimizers: dict[int, Any] = {}

    def number_of_call(self, frame: Any) -> str:
        """Return the number of the path of a frame in the model; "" if no line of the user calls the model."""
        at, module = places.find_model(frame)
        key: list[Any] = []
        is_whole = False
        while at is not None and not is_whole and len(key) < _MOST_CALLERS:
            code = at.f_code
            if not code.co_filename.endswith(_DECORATOR):
                if places.is_foreign(code.co_filename):
                    break  # a library
                if code.co_name not in _NESTED:
                    key.append((code, at.f_lineno))
                is_whole = code.co_name == "<module>"
            at = at.f_back
        if not key:
            return ""
        whole = (*key, is_whole)
        known = self._numbers.get(whole)
        if known is None and len(self._numbers) < _MOST_PATHS:
            known = self._numbers[whole] = str(len(self._numbers))
            places_of = [_plain(code, line) for code, line in key]
            self._calls[known] = [places_of, is_whole, self._is_trained(module)]
            for code, _ in key:
                self._keep_source(code.co_filename)
        return known or ""

    def note_optimizer(self, optimizer: Any) -> None:
        """Note an optimizer, which tells which models are trained."""
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)

    def _is_trained(self, module: Any) -> bool:
        """Return whether an optimizer has a parameter of the module of this frame; True if that is unknown."""
        optimizers = [one for known in list(self._optimizers.values()) if (one := known())]
        model = module.f_locals.get("self") if module is not None else None
        if model is None or not optimizers:
            return True
        trained = {
            id(weight)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for weight in group["params"]
        }
        return any(id(weight) in trained for weight in model.parameters())

    def note_update(self, frame: Any) -> None:
        """Note the user's lines on the stack of a backward pass, innermost first."""
        key: list[tuple[Any, int]] = []
        while frame is not None and len(key) < _MOST_CALLERS:
            if not places.is_foreign(frame.f_code.co_filename):
                key.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        stack = tuple(key)
        if stack and stack not in self._updates and len(self._updates) < _MOST_PATHS:
            self._updates[stack] = [_plain(code, line) for code, line in stack]

    def _keep_source(self, file: str) -> None:
        if file not in self._sources and not os.path.exists(file):  # noqa: PTH110  it may be no path
            self._sources[file] = "".join(linecache.getlines(file))[:_MOST_CHARACTERS]

    def plain(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "calls": dict(self._calls),
            "updates": list(self._updates.values()),
            "sources": dict(self._sources),
        }


def _plain(code: Any, line: int | None) -> tuple[str, int, str]:
    file = code.co_filename
    absolute = os.path.abspath(file) if os.path.exists(file) else file  # noqa: PTH100, PTH110
    return absolute, line or 0, code.co_name
