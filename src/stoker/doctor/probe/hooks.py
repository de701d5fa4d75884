"""Hooks: call a function when a module is imported, and replace functions in it.

Enters: a module's name and a function. Leaves: a call of the function right after the module's own code has run. A
failing import fails as it would without the probe. Costs one dictionary look-up per import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import recorder

_WANTED: dict[str, list[Callable[[Any], None]]] = {}


def when_imported(name: str, call: Callable[[Any], None]) -> None:
    """Call `call(module)` once `name` has been imported."""
    _WANTED.setdefault(name, []).append(call)


def watch() -> None:
    """Start observing imports."""
    sys.meta_path.insert(0, _Watcher())


class _Watcher(importlib.abc.MetaPathFinder):
    """Asks the other finders for a module, and adds our calls to its loader."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _WANTED:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    _call_after(spec.loader, name)
                return spec
        return None


def _call_after(loader: Any, name: str) -> None:
    original = loader.exec_module

    def exec_module(module: Any) -> None:
        original(module)
        for call in _WANTED.pop(name, ()):
            with recorder.guarded(f"{call.__module__} on {name}"):
                call(module)

    # Set on the instance, so that the loader keeps its type: inspect and runpy check it.
    with recorder.guarded("import hook"):
        loader.exec_module = exec_module


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)`, with the original's name and docstring; skip it if it is absent."""
    original = getattr(owner, name, None)
    if original is None:
        return
    wrapper = make(original)
    with contextlib.suppress(AttributeError, TypeError):
        functools.update_wrapper(wrapper, original)
    _replaced.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, wrapper)


_replaced: list[tuple[Any, str, Any]] = []
"""Owner, name and the original value of every replacement; None if the value was inherited."""


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """Undo, at the end of the block, all replacements that were made inside it."""
    first = len(_replaced)
    try:
        yield
    finally:
        while len(_replaced) > first:
            owner, name, own = _replaced.pop()
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def hide_from_compiler(trace_rules: Any) -> None:
    """Make torch.compile skip the probe's files, as it skips the C functions that they replace."""
    trace_rules.SKIP_DIRS.append(f"{Path(__file__).resolve().parent}/")
    trace_rules._recompile_re()


def note_temporaries(util: Any, folder: str) -> None:
    """Write the path of each temporary folder of the module `multiprocessing.util` to `folder`/temporary-NAME.

    A process that ends by itself removes its temporary folder; a killed one cannot. The function that removes the
    doctor's folder (`ownership.remove_leftover`) removes such folders too.
    """
    original = util.get_temp_dir
    noted: set[str] = set()

    @functools.wraps(original)
    def get_temp_dir() -> Any:
        path = original()
        try:
            if path not in noted:
                noted.add(path)
                name = str(Path(folder, f"temporary-{Path(path).name}"))
                file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                os.write(file, os.fsencode(path))
                os.close(file)
        except Exception:  # noqa: BLE001  the script must not see what the probe cannot do
            pass
        return path

    util.get_temp_dir = get_temp_dir
