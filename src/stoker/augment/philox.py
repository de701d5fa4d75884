"""Random numbers from a counter: Philox4x32-10 in int64 arithmetic.

Enters: the counter tensor `[seed, epoch, step, stream]` (int64, on the device). Leaves: uniforms in
[0, 1) for every (row, op), the same bits on every device and in Triton's `tl.philox(seed, c0..c3)`.
Costs: some 80 tiny kernels whatever the batch on a GPU, 0.2 ms on a CPU; no state but the counter, no
host synchronisation.

    key      the 64-bit seed
    c0       row in the batch
    c1       2 * op + half + (stream << 16); half 0 gives u0..u3, half 1 gives u4..u7
    c2, c3   step, epoch
    u        (x >> 8) * 2**-24, exact in float32
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from stoker.errors import InputError

SEED, EPOCH, STEP, STREAM = range(4)
FIELDS = ("seed", "epoch", "step", "stream")
NUM_UNIFORMS = 8

_WORD = 0xFFFFFFFF
_KEY_STEP = (0x9E3779B9, 0xBB67AE85)
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_ROUNDS = 10
_BOUNDS = {"epoch": _WORD, "step": _WORD, "stream": 0xFFFF}


def make_counter(seed: int, epoch: int = 0, step: int = 0, stream: int = 0) -> torch.Tensor:
    """Return `[seed, epoch, step, stream]` as int64 on the CPU.

    Raises:
        InputError: A seed beyond 64 bits, an epoch or step beyond 32, a stream beyond 16.
    """
    _check("seed", seed, -(1 << 63), (1 << 64) - 1)
    for name, value in (("epoch", epoch), ("step", step), ("stream", stream)):
        _check(name, value, 0, _BOUNDS[name])
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    with torch.inference_mode(False):  # calls outside of inference mode advance it too
        return torch.tensor([signed, epoch, step, stream], dtype=torch.int64)


class Position:
    """Where a run is: one counter per device, the one used last being the state.

    A counter is never dropped: a captured CUDA graph may still add to it. Not thread safe.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        counter = make_counter(seed, stream=stream)
        self._last = counter.device
        self._counters = {self._last: counter}

    def __contains__(self, device: torch.device) -> bool:
        return device in self._counters

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the counter of a device, which from here on is the state."""
        if device == self._last:
            return self._counters[device]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
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
        return self._counters[device]

    def read(self) -> dict[str, int]:
        """Return seed, epoch, step and stream; waits for the device."""
        return dict(zip(FIELDS, self._counters[self._last].tolist(), strict=True))

    def write(self, state: Mapping[str, int]) -> None:
        """Set the counters of all devices, in place."""
        counter = make_counter(*(state[name] for name in FIELDS))
        for held in self._counters.values():
            held.copy_(counter)


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
    make_counter(**checked)
    return checked


def advance(counter: torch.Tensor) -> None:
    """Count one step, in place on the device, so that a captured graph draws anew at each replay."""
    counter[STEP : STEP + 1].add_(1)


def uniforms(counter: torch.Tensor, batch: int, num_ops: int) -> torch.Tensor:
    """Return float32 `(batch, num_ops, 8)` on the counter's device: u0..u7 of every op."""
    rows = torch.arange(batch, device=counter.device).view(-1, 1).expand(batch, 2 * num_ops)
    blocks = torch.arange(2 * num_ops, device=counter.device) + (counter[STREAM] << 16)
    step, epoch, blocks = (word.expand_as(rows) for word in (counter[STEP], counter[EPOCH], blocks))
    words = philox(counter[SEED], torch.stack([rows, step]), torch.stack([blocks, epoch]))
    return ((words >> 8).to(torch.float32) * 2.0**-24).view(batch, num_ops, NUM_UNIFORMS)


def philox(seed: torch.Tensor, even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """Return the four words of Philox4x32-10, `(*shape, 4)` int64 in [0, 2**32).

    Args:
        seed: 0-dim int64; all 64 bits are the key.
        even: `(2, *shape)` int64: the words c0 and c2.
        odd: `(2, *shape)` int64: the words c1 and c3.
    """
    factors, steps = _constants(seed.device)
    broadcast = (2, *([1] * (even.dim() - 1)))
    keys = ((torch.stack([seed, seed >> 32]) & _WORD) + steps).view(_ROUNDS, *broadcast)
    even, factors = even & _WORD, factors.view(broadcast)
    if seed.device.type == "cpu":  # numpy's small operations cost a quarter of torch's
        host = (even.numpy(), odd.numpy()), keys.numpy(), factors.numpy()
        made = _rounds(*host, lambda product: product[::-1])
        even, odd = (torch.from_numpy(np.ascontiguousarray(words)) for words in made)
    else:
        even, odd = _rounds((even, odd), keys, factors, lambda product: product.flip(0))
    return torch.stack([even[0], odd[0], even[1], odd[1]], dim=-1) & _WORD


def _rounds(state: Any, keys: Any, factors: Any, swap: Callable[[Any], Any]) -> Any:
    """Run the rounds on arrays of numpy or of torch: only operators and `swap` are used.

    Both halves of the state are multiplied at once. A product wraps at 64 bits: its low word and, masked,
    its high word are right. Bits above 32 of `odd` are masked at the end.
    """
    even, odd = state
    for key in keys:
        product = swap(even * factors)
        even, odd = ((product >> 32) ^ odd ^ key) & _WORD, product
    return even, odd


@functools.lru_cache(maxsize=16)
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors and the key increments of each round; cached: a capture forbids host copies."""
    with torch.inference_mode(False):  # the cache also serves calls outside of inference mode
        steps = torch.tensor([[round_ * step for step in _KEY_STEP] for round_ in range(_ROUNDS)])
        return torch.tensor(_MULTIPLIERS).to(device), steps.to(device)


def _check(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InputError(
            f"{name} is {value!r}.", f"a whole number from {low} to {high}", f"{name}=0"
        )
