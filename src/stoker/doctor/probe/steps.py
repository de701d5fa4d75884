"""Optimizer steps and backward passes: where one step ends and the next begins.

Enters: calls of optimizers and of `backward`. Leaves: a row per step. After the number of steps that the doctor
asked for, the script is blocked until the doctor ends it. Costs about 4 µs per step, and several times as much if the
model has evicted the CPU caches: then even a call of an empty Python function costs some µs.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

from . import clocks, hooks, loading, operators, recorder, sampling

_BLOCK_SECONDS = 30.0
_PATHS_AT_FIRST, _PATHS_EVERY = 30, 64
_torch: Any = None


class _Began(threading.local):
    """When this thread's last update began, and when its last backward pass ended."""

    at = 0.0
    backward_end = 0.0


_began = _Began()


def install(torch: Any) -> None:
    """Observe every optimizer, every backward pass and every replayed CUDA graph."""
    from torch.optim import optimizer

    optimizer.register_optimizer_step_pre_hook(_before_update)
    optimizer.register_optimizer_step_post_hook(_after_update)
    hooks.replace(torch.autograd, "backward", _timed_backward)
    hooks.replace(getattr(torch.cuda, "CUDAGraph", None), "replay", _noting_replay)
    hooks.replace(torch.nn.Module, "train", _noting_mode)
    global _torch  # noqa: PLW0603
    _torch = torch
    recorder.get().on_step.append(_stop_when_enough)
    recorder.get().on_restart.append(sampling.begin)


def _before_update(*_: Any) -> None:
    _began.at = time.perf_counter()


def _after_update(optimizer: Any, *_: Any) -> None:
    now = time.perf_counter()
    try:
        cuda = _torch.cuda
        began_cuda = getattr(cuda, "_initialized", False)
        if began_cuda and clocks.uses_cuda(_torch) and cuda.is_current_stream_capturing():
            return  # a capture runs nothing; its replays are counted
        seen = recorder.get()
        # Lightning runs forward and backward inside `optimizer.step`: the update begins after them.
        began = max(_began.at, _began.backward_end) or now
        seen.optimizer += now - began
        if seen.drawing:
            loading.add_span(seen, "optimizer", began, now)
        # With several optimizers, a step ends when one of them is called for the second time.
        number, stepped = id(optimizer), seen.stepped
        if number in stepped or seen.kind != "optimizer":
            stepped.clear()
            seen.mark("optimizer", now)
        stepped.add(number)
        seen.paths.note_optimizer(optimizer)
        if not seen.num_steps:
            # A small model may never be sampled, but its parameters show that there is one.
            first = optimizer.param_groups[0]["params"][0]
            seen.trains_modules = isinstance(first, _torch.nn.Parameter)
            kind = type(optimizer)
            if kind.__module__.startswith("torch.optim") and "fused" in optimizer.param_groups[0]:
                fused = bool(optimizer.param_groups[0]["fused"])
                seen.torch["optimizer"] = [kind.__name__, fused]
    except Exception as error:  # noqa: BLE001  cheaper than a context manager
        recorder.note_failure("optimizer", error)


def _timed_backward(original: Any) -> Any:
    def backward(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            now = _began.backward_end = time.perf_counter()
            _note_backward(began, now)
            _note_path()

    return backward


def _note_backward(began: float, now: float) -> None:
    try:
        seen = recorder.get()
        seen.backward += now - began
        # A backward pass after `eval()`, as with frozen statistics, is training, not evaluation.
        seen.evaluated = None
        if seen.is_profiling:
            operators.note_backward(now - began)
        if seen.drawing:
            loading.add_span(seen, "backward", began, now)
        if seen.kind != "optimizer":
            seen.mark("backward", now)
    except Exception as error:  # noqa: BLE001
        recorder.note_failure("backward", error)


def _note_path() -> None:
    """Note the lines that lead to this backward pass, in the first steps and now and then."""
    seen = recorder.get()
    if seen.num_steps < _PATHS_AT_FIRST or not seen.num_steps % _PATHS_EVERY:
        with recorder.guarded("paths"):
            # Frames: this function, `backward` above, torch's own.
            seen.paths.note_update(sys._getframe(2))


def _noting_mode(original: Any) -> Any:
    """Time the code between `eval()` of a model and its next `train()`; a model also calls them on its parts."""
    inside = threading.local()

    def train(self: Any, mode: bool = True) -> Any:
        if getattr(inside, "whole", None) is not None:
            return original(self, mode)
        inside.whole = self
        try:
            return original(self, mode)
        finally:
            inside.whole = None
            with recorder.guarded("evaluation"):
                _note_mode(self, mode)

    return train


def _note_mode(model: Any, mode: bool) -> None:
    seen, now = recorder.get(), time.perf_counter()
    if threading.get_ident() != seen.training_thread:
        return
    if seen.evaluated is None and not mode:
        # Frames: this function, `train` above, torch's `eval`.
        site = seen.site("evaluation", sys._getframe(2), "evaluation")
        seen.evaluated = (id(model), now, site)
    elif seen.evaluated is not None and mode and seen.evaluated[0] == id(model):
        _, began, site = seen.evaluated
        seen.evaluated = None
        seen.evaluation += now - began
        if seen.is_profiling:
            operators.note_evaluation(now - began)
        site.calls += 1
        site.seconds += now - began


def _noting_replay(original: Any) -> Any:
    def replay(self: Any) -> Any:
        result = original(self)
        with recorder.guarded("replay"):
            recorder.get().mark_replay(time.perf_counter())
        return result

    return replay


def _stop_when_enough(seen: Any) -> None:
    """After enough steps tell the doctor, and block the script until the doctor ends it."""
    if seen.num_counted < seen.stop_at:
        return
    seen.stop_at = 1 << 60
    for stream in (sys.stdout, sys.stderr):
        # It may be missing, closed, or a script's own without `flush`.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    seen.say_done()
    # If the doctor does not end the script, it continues: the doctor may have been killed.
    time.sleep(_BLOCK_SECONDS)
