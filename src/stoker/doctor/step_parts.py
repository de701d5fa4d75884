"""Where a step's time goes, as parts that add up to it.

Enters: `Measurements`. Leaves: named parts with their seconds, for the table and the page. Costs nothing;
pure. Medians of parts do not add up to the median of the step: the last part takes what is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker.doctor.measurements import LoaderWork, Measurements

_LOADER_WORDS = {
    "read": "read",
    "decode": "decode",
    "transform": "transform",
    "collate": "collate",
    "copy": "copy",
    "other": "rest of the dataset's code",
}

_ORDER = ("wait", "load", "compute", "host")
_SMALLEST_SHARE = 1e-3
"""Of a step: what is less is no part of its own."""


@dataclass(frozen=True)
class Part:
    """A part of a usual step.

    Attributes:
        label: What happens.
        seconds: How long.
        kind: "wait", "load", "host" or "compute"; decides the colour.
    """

    label: str
    seconds: float
    kind: str


def split_step(measured: Measurements) -> list[Part]:
    """Return the parts of a usual step; empty when no step was measured."""
    if measured.step_seconds is None:
        return []
    step = measured.step_seconds.median
    least = step * _SMALLEST_SHARE
    known = _fitted([part for part in _known_parts(measured) if part.seconds > least], step)
    has_backward = any(part.label == "backward pass" for part in known)
    rest = "forward pass, loss and the rest" if has_backward else "the step itself"
    left = step - sum(part.seconds for part in known)
    parts = [*([Part(rest, left, "compute")] if left > least else []), *known]
    return sorted(parts, key=lambda part: _ORDER.index(part.kind))


def _fitted(parts: list[Part], step: float) -> list[Part]:
    """Return the parts within the step: medians of uneven steps, and parts that overlap, exceed it."""
    waits = sum(part.seconds for part in parts if part.kind == "wait")
    others = sum(part.seconds for part in parts if part.kind != "wait")
    wait_scale = min(1.0, step / max(waits, 1e-12))
    scale = min(1.0, max(0.0, step - waits) / max(others, 1e-12))
    return [
        replace(part, seconds=part.seconds * (wait_scale if part.kind == "wait" else scale))
        for part in parts
    ]


def _known_parts(measured: Measurements) -> list[Part]:
    parts = []
    if measured.wait_seconds is not None:
        parts.append(Part("waiting for data", measured.wait_seconds.median, "wait"))
    loader = measured.loader
    if loader is not None and loader.kind == "stoker":
        batches = loader.batches_per_step
        if not measured.captured:  # a replayed step gathers by itself
            parts.append(Part("gathering the batch", (loader.work.collate or 0) * batches, "load"))
            parts.append(Part("augmenting it", (loader.work.transform or 0) * batches, "load"))
    copied = sum(copy.seconds_per_step for copy in measured.copies)
    parts.append(Part("copies that are not pinned", copied, "host"))
    synced = sum(sync.seconds_per_step for sync in measured.syncs)
    parts.append(Part("fetching values from the step", synced, "host"))
    calls = [*measured.host_calls, *measured.allocator.empty_cache]
    parts.append(Part("housekeeping", sum(call.seconds_per_step for call in calls), "host"))
    for label, spread in (
        ("backward pass", measured.backward_seconds),
        ("optimizer", measured.optimizer_seconds),
    ):
        if spread is not None:
            parts.append(Part(label, spread.median, "compute"))
    return parts


def split_work(work: LoaderWork) -> list[tuple[str, float | None]]:
    """Return what one batch costs the loader, by what is done; None where it was not measured."""
    return [(words, getattr(work, name)) for name, words in _LOADER_WORDS.items()]
