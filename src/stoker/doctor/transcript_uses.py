"""Calls of a model whose results no update needs, from the probe's samples, its profile and the script's source.

Enters: the state of the process that trains. Leaves: `Uses`. Costs milliseconds per file of the script, which is read.

Two things must agree before a call counts: the source, in which the result reaches no update, and the profile of a few
steps, in which some of the model's work belongs to no backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.doctor.dataflow import Calls, Place, Use, find_use
from stoker.doctor.measurements import HostCall
from stoker.doctor.probe.unused import KINDS
from stoker.doctor.transcript import seconds_of_look
from stoker.measure.readings import Spread

_NOTABLE = 0.02
"""Calls with a smaller share of a step are left out."""
_AGREEING = 0.3
"""The profile agrees with the samples from this part of their share on."""
_MOST_MISSED = 1.5
"""Longest time of an evaluation, its loss included, as a multiple of the time for which its model was sampled."""
_MOST_BYTES = 1 << 22


@dataclass(frozen=True)
class Uses:
    """What becomes of the results of a model's calls, without those that reach an update."""

    unused: tuple[HostCall, ...] = ()  # no update needs them
    unused_device_seconds: float = 0.0  # time of the device for them, per step
    doubtful: tuple[HostCall, ...] = ()  # an update may need them
    doubtful_device_seconds: float = 0.0
    # whether the training needs what is computed between `eval()` and `train()`, such as labels for its next batch
    needs_evaluation: bool = False


@dataclass(frozen=True)
class _Call:
    """The samples of one path of lines that calls a model."""

    use: Use
    looks: int

    @property
    def kind(self) -> str:
        """The kind of the profile's periods that its work belongs to, unless an update needs it."""
        return "ungraded" if self.use.without_gradient else "underived"


def find_uses(state: Mapping[str, Any], step: Spread | None, known: float) -> Uses:
    """Return the calls of a usual step; `known` are its seconds spent waiting for data and in timed calls."""
    paths = state.get("paths") or {}
    # Without a backward pass, as where weights are updated by trial, all of the model's work may be for the update.
    if step is None or not step.median or not paths.get("calls") or not paths["updates"]:
        return Uses()
    uses = {number: _use_of(path, paths) for number, path in paths["calls"].items()}
    calls = [_Call(uses[number], looks) for number, looks in state["model_calls"].items()]
    _, _, seconds = seconds_of_look(state, step, known)
    unused, doubtful = _Sum(), _Sum()
    for kind in KINDS:
        profiled = _Profiled.of(state, kind)
        others = [call for call in calls if call.kind == kind and call.use.is_other]
        taken = seconds * sum(call.looks for call in others)
        if profiled.share is None and kind == "underived":
            continue  # the source alone does not show all ways to a backward pass
        agreeing = _AGREEING * taken / step.median
        if kind == "underived" and profiled.share is not None and profiled.share < agreeing:
            # Gradients may be off where the source does not say so.
            known_looks = sum(call.looks for call in calls if call.kind == "ungraded")
            profiled = _Profiled.of(state, "ungraded").without(known_looks * seconds / step.median)
        if profiled.share is not None and profiled.share < agreeing:
            continue  # a backward pass belongs to these calls, or other work is meant
        # Work without gradients may be needed, such as a teacher's; work without a backward pass is not.
        sharing = [call for call in calls if call.kind == kind] if kind == "ungraded" else others
        looks = max(1, sum(call.looks for call in sharing))
        busy = profiled.busy_seconds / looks
        # The profile's periods include the loss, which samples miss; and other work of this kind, if there is any.
        told = (profiled.share or 0.0) * step.median / looks
        seconds_of_call = max(seconds, min(told, _MOST_MISSED * seconds))
        for call in others:
            is_certain = call.use.reaches == "nothing" or call.use.evaluates
            into = unused if is_certain and profiled.share is not None else doubtful
            into.add(call.use.where, call.looks * seconds_of_call, call.looks * busy)
    if calls and all(call.use.reaches == "unknown" for call in calls):
        known_of = [_Profiled.of(state, kind) for kind in KINDS]
        doubtful.add(
            " or ".join(call.use.where for call in calls[:3]),
            step.median * sum(one.share or 0.0 for one in known_of),
            sum(one.busy_seconds for one in known_of),
        )
    evaluated = [_Call(uses[number], looks) for number, looks in state["evaluated_calls"].items()]
    needed = sum(call.looks for call in evaluated if call.use.reaches == "update")
    least = _NOTABLE * step.median
    return Uses(
        *unused.told(least),
        *doubtful.told(least),
        needs_evaluation=2 * needed > sum(call.looks for call in evaluated),
    )


@dataclass(frozen=True)
class _Profiled:
    """Work of the profiled steps that belongs to no backward pass."""

    share: float | None  # of these steps, with the host in it; None if nothing was profiled
    busy_seconds: float  # seconds of a step for which the device computes it

    @classmethod
    def of(cls, state: Mapping[str, Any], kind: str) -> _Profiled:
        """Return what the profile tells of a kind of work."""
        profile = state["profile"]
        busy = profile.get(f"{kind}_busy_seconds", 0.0) / max(1, profile.get("steps", 1))
        return cls(profile.get(f"{kind}_share"), busy)

    def without(self, share: float) -> _Profiled:
        """Return what is left without a share of the steps."""
        left = max(0.0, (self.share or 0.0) - share)
        return _Profiled(left, self.busy_seconds * left / self.share if self.share else 0.0)


class _Sum:
    """Seconds by line."""

    def __init__(self) -> None:
        self._host: defaultdict[str, float] = defaultdict(float)
        self._device: defaultdict[str, float] = defaultdict(float)

    def add(self, where: str, seconds: float, device_seconds: float) -> None:
        """Add a call's seconds of the host and of the device."""
        self._host[where] += seconds
        self._device[where] += device_seconds

    def told(self, least: float) -> tuple[tuple[HostCall, ...], float]:
        """Return the lines with so many seconds or more on host or device, costliest first, and the device's."""
        lines = sorted(self._host, key=lambda where: -self._host[where] - self._device[where])
        found = [one for one in lines if max(self._host[one], self._device[one]) >= least]
        calls = tuple(HostCall(where, "model", 1.0, self._host[where]) for where in found)
        return calls, sum(self._device[where] for where in found)


def _use_of(path: Any, paths: Mapping[str, Any]) -> Use:
    places, is_whole, is_trained = path
    sources = paths.get("sources", {})
    use = find_use(
        Calls(tuple(Place(*place) for place in places), is_whole),
        [tuple(Place(*place) for place in stack) for stack in paths["updates"]],
        lambda file: sources.get(file) or _text_of(file),
    )
    # A model that is not trained is rarely evaluated: it is a teacher, whose output may come through a hook.
    is_teacher = not is_trained and not use.evaluates
    return replace(use, reaches="update") if is_teacher else use


def _text_of(file: str) -> str | None:
    path = Path(file)
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
