"""Work of the model in the profiled steps that belongs to no backward pass: without gradients, or never derived.

Enters: the raw events of torch's profiler. Leaves: periods of such work, in which products of matrices or convolutions
ran. Costs milliseconds, once.

The profiler gives each operator the number of the autograd graph's next node, or -1 while gradients are off, and each
backward function the number of its node. So an operator whose nodes no backward function has is never derived.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("ungraded", "underived")
_BACKWARD = ("autograd::engine", "torch::autograd")
_OPTIMIZER = "Optimizer."
_OTHERS = (_OPTIMIZER, "enumerate(DataLoader)")
"""torch's annotations around work that is not the model's."""
_COMPILED = "## Call CompiledFxGraph"

_Row = tuple[int, int, int, str, int]
"""Thread, start in ns, negative duration, name and number of an event."""


@dataclass
class _Outermost:
    """An operator that no other operator calls."""

    start_ns: int
    end_ns: int
    number: int  # of its first node in the autograd graph; -1 while gradients are off
    is_other: bool  # a backward pass, an optimizer or a DataLoader, not the forward pass
    has_product: bool


def find_unused(
    events: Sequence[Any],
    begin: int,
    end: int,
    leave_out: Sequence[tuple[int, int]],
    products: Collection[str],
) -> dict[str, list[tuple[int, int]]]:
    """Return periods in ns between two times: "ungraded", without gradients, and "underived", without a backward pass.

    A period begins when the operator before it ends, because a model may begin with code of its own. What begins inside
    of the periods `leave_out` is no part of them.
    """
    threads, derived = _outermost(events, begin, end, products)
    found: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
    for operators in threads.values():
        kinds = [
            "" if any(first <= one.start_ns < last for first, last in leave_out) else kind
            for one, kind in zip(operators, _kinds(operators, derived), strict=True)
        ]
        until = operators[0].start_ns
        for kind, group in itertools.groupby(
            zip(kinds, operators, strict=True), lambda pair: pair[0]
        ):
            run = [operator for _, operator in group]
            if kind and any(operator.has_product for operator in run):
                found[kind].append((until, run[-1].end_ns))
            until = run[-1].end_ns
    return found


def _outermost(
    events: Sequence[Any], begin: int, end: int, products: Collection[str]
) -> tuple[dict[int, list[_Outermost]], set[int]]:
    """Return the outermost operators by thread, and the numbers of all nodes that a backward pass went through."""
    derived = set()
    rows: list[_Row] = []
    for event in events:
        if str(event.device_type()).endswith("CPU"):
            name, number = event.name(), event.sequence_nr()
            if number >= 0 and name.startswith(_BACKWARD):
                derived.add(number)
            is_container = name.startswith((*_OTHERS, _COMPILED))
            if number >= 0 or "::" in name or is_container:
                start = event.start_ns()
                thread = event.start_thread_id()
                rows.append((thread, start, -event.duration_ns(), name, number))
    rows = _without_closures(sorted(rows, key=lambda row: row[:3]))
    threads: dict[int, list[_Outermost]] = {}
    until, open_thread, last = 0, None, None
    for thread, start, negative, name, number in rows:
        is_product = name in products or name.startswith(_COMPILED)
        if thread == open_thread and start < until:
            if last is not None:
                last.has_product |= is_product
            continue
        open_thread, until, last = thread, start - negative, None
        if begin <= start < end:
            is_other = name.startswith((*_BACKWARD, *_OTHERS))
            last = _Outermost(start, until, number, is_other, is_product)
            threads.setdefault(thread, []).append(last)
    return threads, derived


def _without_closures(rows: list[_Row]) -> list[_Row]:
    """Return the rows with optimizers that begin after the forward and backward passes of their closures.

    Lightning calls the whole training step in one.
    """
    kept = []
    for at, (thread, start, negative, name, number) in enumerate(rows):
        first = start
        if name.startswith(_OPTIMIZER):
            for other, begun, its_negative, inner, its_number in itertools.islice(
                rows, at + 1, None
            ):
                if other != thread or begun >= start - negative:
                    break
                if its_number >= 0 or inner.startswith(_BACKWARD):
                    first = max(first, begun - its_negative)
        kept.append((thread, first, negative + first - start, name, number))
    return sorted(kept, key=lambda row: row[:3])


def _kinds(operators: Sequence[_Outermost], derived: set[int]) -> list[str]:
    """Return "ungraded", "underived" or "" for each operator of a thread.

    An operator that needs no gradient, such as one on the input, belongs to those that follow it.
    """
    kinds = []
    # Number and kind of the next operator for which autograd makes nodes.
    following, nearest = -1, ""
    for operator in reversed(operators):
        if operator.is_other or operator.number < 0:
            kind = "" if operator.is_other else "ungraded"
            nearest = ""
        else:
            # Numbers begin again where a compiled function ran, and the range is empty: nothing is known.
            made = range(operator.number, following)
            if made:
                nearest = "underived" if derived.isdisjoint(made) else ""
            kind, following = nearest, operator.number
        kinds.append(kind)
    return kinds[::-1]
