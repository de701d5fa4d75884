"""Calls that wait for the device or maintain memory: `.item()`, `.cpu()`, pageable copies, `empty_cache`.

Enters: the script's calls of a few methods of Tensor and functions of torch. Leaves: seconds, calls and
bytes by file and line. Costs about 1 µs per call.

On a GPU such a call waits for all work before it, so its seconds are mostly the device's. On a CPU there is
nothing to wait for, and only the call itself costs time. A loop of such calls is counted with the time between
them, because the loop as a whole is the cost.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from . import clocks, hooks, loading, operators, places, recorder

_LOOP_GAP_SECONDS, _LONG_GAP_SECONDS = 3e-5, 1e-3
"""Fetches with gaps below the first are a loop over values; an episode of a game, with a model and a world between two
fetches, is not. A gap up to the second belongs to the loop if the fetches before it took longer: the next row of values
was being prepared."""
_LOOP_CALLS = 3
_SCALAR_SECONDS = 1e-4
_SCALARS = ("item", "tolist", "__bool__", "__float__", "__int__")
_DEVICE_ONLY = ("numpy", "nonzero")
_COLLECTIVES = (
    "all_reduce", "barrier", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
)  # fmt: skip
_KNOWN: dict[int, tuple[bool, Any]] = {}
_OPTIM: tuple[str, ...] = ()


def install(torch: Any) -> None:
    """Watch fetches, copies and housekeeping."""
    global _OPTIM  # noqa: PLW0603
    folder = torch.__file__.rsplit("/", 1)[0]
    # Optimizers read their own step counters. On a CPU such reads, and the probe's, are not fetches of the user.
    _OPTIM = (
        str(Path(__file__).parent),
        f"{folder}/optim/",
        f"{folder}/_dynamo/",
        f"{folder}/_inductor/",
        f"{folder}/_tensor_str",
    )
    tensor = torch.Tensor
    for name in _SCALARS:
        hooks.replace(tensor, name, partial(_reading, call=name.strip("_")))
    for name in _DEVICE_ONLY:
        hooks.replace(tensor, name, partial(_fetching, call=name))
    for name in ("cpu", "to", "cuda"):
        hooks.replace(tensor, name, partial(_moving, name=name))
    for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
        hooks.replace(owner, "synchronize", partial(_waiting, family="sync", call="synchronize"))
    for owner in (torch.cuda, torch.cuda.memory):
        hooks.replace(owner, "empty_cache", partial(_waiting, family="empty", call="empty_cache"))
    hooks.replace(gc, "collect", partial(_waiting, family="host", call="gc.collect"))
    if torch.distributed.is_available():
        for name in _COLLECTIVES:
            hooks.replace(
                torch.distributed, name, partial(_waiting, family="collective", call=name)
            )
    hooks.replace(torch, "save", partial(_waiting, family="host", call="torch.save"))


def _add(
    family: str, call: str, frame: Any, began: float, ended: float, num_bytes: int = 0
) -> None:
    seen = recorder.get()
    if not seen.kind or seen.training_thread != clocks.current_thread():
        return
    if family == "sync" and loading.of_thread.inside:
        return
    site = seen.site(family, frame, call)
    seconds = ended - began
    if site.mark == seen.num_steps:
        site.num_in_step += 1
        gap = began - site.last_end
        most = _LOOP_GAP_SECONDS
        if site.loop_seconds > gap > most:
            most = _LONG_GAP_SECONDS
        if site.num_in_step >= _LOOP_CALLS and gap < most:
            seconds += gap
            site.loop_seconds += seconds
        else:
            site.loop_seconds = 0.0
    else:
        site.begin_step(seen.num_steps)
    site.last_end = ended
    site.calls += 1
    site.seconds += seconds
    site.num_bytes += num_bytes
    if family == "sync":
        seen.sync += seconds
        if site.in_model:
            operators.note_fetch(ended - began)
        if seconds > 2e-4:
            loading.add_span(seen, "sync", began, ended)
    elif family == "collective":
        seen.collective += ended - began
    elif family in ("host", "empty"):
        seen.host += ended - began
    elif family in ("copy", "pinned"):
        loading.add_span(seen, "copy", began, ended)


def _reading(original: Any, call: str) -> Any:
    """Wrap a method that turns a tensor into a number or a list. Must be cheap: an optimizer may call it per weight."""
    of_thread, getframe, known_codes = loading.of_thread, sys._getframe, _KNOWN.get

    def method(self: Any) -> Any:
        # A collate function may call it for every value.
        if not recorder.watching or of_thread.inside:
            return original(self)
        frame = getframe(1)
        known = known_codes(id(frame.f_code))
        if (known[0] if known else _is_torchs_own(frame.f_code)) and not self.is_cuda:
            return original(self)
        began = time.perf_counter()
        value = original(self)
        ended = time.perf_counter()
        try:
            if ended - began > _SCALAR_SECONDS and not self.is_cuda and call != "tolist":
                # Nothing to wait for: the thread lost its core meanwhile.
                began = ended - _SCALAR_SECONDS
            _add("sync", call, frame, began, ended)
            if call == "item" and type(value) is float:
                _check(value)
        except Exception as error:  # noqa: BLE001  a context manager would cost more than everything else here
            recorder.note_failure(call, error)
        return value

    return method


def _fetching(original: Any, call: str) -> Any:
    """Wrap a method that waits for the device only if the tensor is on a GPU."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.watching or not self.is_cuda:
            return original(self, *args, **kwargs)
        began = time.perf_counter()
        value = original(self, *args, **kwargs)
        ended = time.perf_counter()
        try:
            _add("sync", call, sys._getframe(1), began, ended)
        except Exception as error:  # noqa: BLE001
            recorder.note_failure(call, error)
        return value

    return method


def _is_torchs_own(code: Any) -> bool:
    """Return whether a call comes from torch's own bookkeeping or the probe; the answer is cached."""
    known = _KNOWN.get(id(code))
    if known is None:
        # The key is the id: hashing a code object takes longer than the call. The code is kept with the
        # answer, so that its id is not reused.
        known = _KNOWN[id(code)] = (code.co_filename.startswith(_OPTIM), code)
    return known[0]


def _check(value: float) -> None:
    """Count the values that the script reads, such as a loss, and those that are not finite."""
    counts = recorder.get().bad.get("value read with .item()")
    if counts is not None:
        counts[1] += 1
    if not math.isfinite(value):
        frame = sys._getframe(2)
        bad = recorder.get().bad
        bad.setdefault("value read with .item()", [0, 1, places.place_of(frame)])[0] += 1


def _moving(original: Any, name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.watching:
            return original(self, *args, **kwargs)
        began = time.perf_counter()
        moved = original(self, *args, **kwargs)
        if moved is self:
            return moved
        try:
            if moved.is_cuda != self.is_cuda:
                ended = time.perf_counter()
                num_bytes = self.numel() * self.element_size()
                if self.is_cuda:
                    _add("sync", name, sys._getframe(1), began, ended, num_bytes)
                else:
                    # A copy from pinned memory takes long too, unless it has non_blocking=True.
                    family = "pinned" if self.is_pinned() else "copy"
                    _add(family, name, sys._getframe(1), began, ended, num_bytes)
        except Exception as error:  # noqa: BLE001
            recorder.note_failure(name, error)
        return moved

    return method


def _waiting(original: Any, family: str, call: str) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        # Collectives are part of every step, and housekeeping is rare: those are always timed.
        if not recorder.watching and family == "sync":
            return original(*args, **kwargs)
        began, _, delay = clocks.read()
        try:
            return original(*args, **kwargs)
        finally:
            try:
                ended, _, queued = clocks.read()
                # Leave out the time queued for a core: other work caused it.
                queued = min(ended - began, queued - delay)
                frame = sys._getframe(1)
                if not _is_torchs_own(frame.f_code):
                    _add(family, call, frame, began + queued, ended)
            except Exception as error:  # noqa: BLE001
                recorder.note_failure(call, error)

    return function
