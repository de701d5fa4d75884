"""The position of an augmentation in a run: one counter per device, right in workers, threads and resumed runs.

Enters: a seed, a stream, and where the run is (epoch, step). Leaves: the counter tensor `[seed, epoch, step, stream]`
of a device, from which `philox.py` makes random numbers. Costs 0.2 µs per draw.

Processes. A DataLoader worker has a copy of the object, and every worker would draw the same numbers, in every
epoch. So in a worker the seed is hashed together with torch's seed of that worker, which differs by worker and by
epoch and follows `torch.manual_seed`, as torch's own random numbers do. Other child processes (a `Pool`, `mp.spawn`)
have nothing that tells them apart: there drawing is refused until a position of their own is set.

Threads. `lock` makes reading and advancing a counter one operation, so that no two threads draw the same numbers.
Which thread draws which step depends on timing. On a GPU, once a second thread has drawn, each draw waits for the
stream of the draw before.

Success: each draw advances the step by one. Failure: an error leaves the position as it was. After a fork the child
takes a new lock, because another thread may have held the old one.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch

from stoker.augment.philox import FIELDS, check_counter, make_counter
from stoker.errors import InputError

_MIXED = "worker"
"""Key in a state saved in a worker: its seed is already hashed, and is loaded unchanged."""


class _Process:
    """This process: a random name, and whether it was forked."""

    name = os.urandom(16)
    forked = False
    adopting = threading.Lock()


def _after_fork() -> None:
    _Process.name, _Process.forked, _Process.adopting = os.urandom(16), True, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Position:
    """Where a run is. The counter of the device that was used last is the state.

    A counter is never dropped: a captured CUDA graph may still add to it.

    Attributes:
        lock: Held while a counter is read and advanced.
        num_draws: How often this process took a counter to draw from, or moved it; replays of a graph are not counted.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        counter = make_counter(seed, stream=stream)
        self.lock = threading.RLock()
        self.num_draws = 0
        self._last = counter.device
        self._counters = {self._last: counter}
        self._known = {"seed": seed, "epoch": 0, "step": 0, "stream": stream}
        self._made_in = _Process.name
        self._used_in: bytes | None = None
        self._worker_seed: int | None = None
        self._thread: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            return {"state": self.read(), "made_in": self._made_in}

    def __setstate__(self, kept: Mapping[str, Any]) -> None:
        state = dict(kept["state"])
        mixed = state.pop(_MIXED, None)
        self.__init__(state["seed"], state["stream"])  # type: ignore[misc]
        self._worker_seed = mixed
        self._made_in = kept["made_in"]
        self._put(state)

    def __contains__(self, device: torch.device) -> bool:
        return device in self._counters and self._used_in is _Process.name

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the counter of a device, which becomes the state. Call it with `lock` held."""
        if self._used_in is not _Process.name:
            self._adopt()
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if device != self._last:
            if capturing:
                raise InputError(
                    f"a CUDA graph capture on {device} after a draw on {self._last}.",
                    "a capture on the device that was drawn on last",
                    "augment one batch on this device before torch.cuda.graph(...)",
                )
            state = self._counters[self._last]
            if device in self._counters:
                self._counters[device].copy_(state)
            else:
                with torch.inference_mode(False):
                    self._counters[device] = state.to(device)
            self._last = device
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        if device.type == "cuda" and not capturing and (self._stream or thread != self._thread):
            # Each thread may have a stream of its own, and the draw before may still be running on its stream.
            current = torch.cuda.current_stream(device)
            if self._stream is None:
                torch.cuda.synchronize(device)
            elif self._stream != current:
                current.wait_stream(self._stream)
            self._stream = current
        self.num_draws += 1
        return self._counters[device]

    def take_lock(self) -> threading.RLock:
        """Return the lock of this process; a copy that a fork made gets a new one first."""
        if self._used_in is not _Process.name:
            self._adopt()
        return self.lock

    def read(self) -> dict[str, int]:
        """Return seed, epoch, step and stream; waits for the device."""
        state = dict(zip(FIELDS, self._counters[self._last].tolist(), strict=True))
        return state if self._worker_seed is None else state | {_MIXED: self._worker_seed}

    def write(self, state: Mapping[str, int]) -> None:
        """Set the counters of all devices, in place, without waiting. In a worker the seed becomes its own."""
        state = dict(state)
        mixed = state.pop(_MIXED, None)
        check_counter(**state)
        if self._used_in is not _Process.name:
            self._adopt(is_told=True)
        if self._worker_seed is not None and mixed is None:
            state["seed"] = _mix(state["seed"], self._worker_seed)
        with self.lock:
            self._put(state)

    def move(self, epoch: int, step: int) -> None:
        """Set epoch and step; seed and stream stay. Does not wait for the device."""
        check_counter(0, epoch, step)
        if self._used_in is not _Process.name:
            self._adopt(is_told=True)
        with self.lock:  # seed and stream are known to the host: nothing is read from the device
            self._put(self._known | {"epoch": epoch, "step": step})

    def in_worker(self) -> bool:
        """Return whether this is a copy in a DataLoader worker."""
        return self._worker_seed is not None

    def _put(self, state: Mapping[str, int]) -> None:
        self.num_draws += 1
        self._known = {name: state[name] for name in FIELDS}
        counter = make_counter(**self._known)
        for held in self._counters.values():
            # Not pinned: the driver has copied it when this returns.
            held.copy_(counter, non_blocking=True)

    def _adopt(self, *, is_told: bool = False) -> None:
        """Bind the object to this process; `is_told` if the caller sets a position next."""
        with _Process.adopting:
            if self._used_in is _Process.name:
                return
            from torch.utils.data import get_worker_info

            info = get_worker_info()
            if self._made_in != _Process.name:
                is_child = _Process.forked or multiprocessing.parent_process() is not None
                if info is None and is_child and not is_told:
                    raise InputError(
                        "an augmentation that another process made: every process would draw the same numbers.",
                        "one that was made here, or has a position of its own",
                        "compose.load_state_dict(compose.state_dict() | {'stream': rank})",
                    )
                self.lock = threading.RLock()
                self._thread = self._stream = None
                if any(device.type == "cuda" for device in self._counters):
                    # A forked process cannot use its parent's GPU: begin where the host knows it was.
                    counter = make_counter(**self._known)
                    self._last, self._counters = counter.device, {counter.device: counter}
            if info is not None and self._worker_seed is None:
                state = self.read()
                self._worker_seed = int(info.seed)
                self._put(state | {"seed": _mix(state["seed"], self._worker_seed)})
            self._made_in = self._used_in = _Process.name


def _mix(seed: int, worker_seed: int) -> int:
    """Return a seed of 64 bits that depends on all bits of both."""
    text = f"{seed}:{worker_seed}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def check_state(state: object) -> dict[str, int]:
    """Return what `Position.read` returned, or raise: seed, epoch, step and stream, all whole."""
    fix = "compose.seek(epoch) to begin an epoch instead"
    if not isinstance(state, Mapping):
        raise InputError(
            f"an augmentation state is a {type(state).__name__}.",
            "the mapping that state_dict() returned",
            fix,
        )
    missing = set(FIELDS) - set(state)
    if missing:
        raise InputError(
            f"an augmentation state without {', '.join(sorted(missing))}.",
            "what state_dict() returned",
            fix,
        )
    checked = {name: state[name] for name in FIELDS}
    check_counter(**checked)
    return checked | ({_MIXED: int(state[_MIXED])} if _MIXED in state else {})


class Positioned:
    """An object that draws from a position: how to set, keep and restore it."""

    _position: Position

    @property
    def num_draws(self) -> int:
        """Number of draws and moves of the position; by it a loader notices draws that it did not make."""
        return self._position.num_draws

    def seek(self, epoch: int, step: int = 0) -> None:
        """Make the next draw that of (epoch, step); in place, so captured graphs follow."""
        self._position.move(epoch, step)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Its draws do not depend on earlier calls."""
        self.seek(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return seed, epoch, step and stream; waits for the device that was drawn on last."""
        return self._position.read()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was taken."""
        self._position.write(check_state(state))
