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
from collections.abc import Callable
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


def check_counter(seed: int, epoch: int = 0, step: int = 0, stream: int = 0) -> None:
    """Raise InputError for a seed beyond 64 bits, an epoch or step beyond 32, or a stream beyond 16."""
    bounds = (-(1 << 63), (1 << 64) - 1), (0, _WORD), (0, _WORD), (0, 0xFFFF)
    for name, value, (low, high) in zip(FIELDS, (seed, epoch, step, stream), bounds, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InputError(
                f"{name} is {value!r}.", f"a whole number from {low} to {high}", f"{name}=0"
            )


def make_counter(seed: int, epoch: int = 0, step: int = 0, stream: int = 0) -> torch.Tensor:
    """Return `[seed, epoch, step, stream]` as int64 on the CPU; raises as `check_counter` does."""
    check_counter(seed, epoch, step, stream)
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    with torch.inference_mode(False):  # calls outside of inference mode advance it too
        return torch.tensor([signed, epoch, step, stream], dtype=torch.int64, device="cpu")


def advance(counter: torch.Tensor, steps: int = 1) -> None:
    """Count steps, in place on the device, so that a captured graph draws anew at each replay."""
    counter[STEP : STEP + 1].add_(steps)


def uniforms(counter: torch.Tensor, batch: int, num_ops: int, num_batches: int = 1) -> torch.Tensor:
    """Return float32 `(num_batches * batch, num_ops, 8)` on the counter's device: u0..u7 of every op.

    Each batch has the numbers that it would have alone, one step after the batch before it.
    """
    samples = torch.arange(batch * num_batches, device=counter.device).view(-1, 1)
    rows = (samples % batch if num_batches > 1 else samples).expand(-1, 2 * num_ops)
    step = counter[STEP] + samples // batch if num_batches > 1 else counter[STEP]
    blocks = torch.arange(2 * num_ops, device=counter.device) + (counter[STREAM] << 16)
    step, epoch, blocks = (word.expand_as(rows) for word in (step, counter[EPOCH], blocks))
    words = philox(counter[SEED], torch.stack([rows, step]), torch.stack([blocks, epoch]))
    return ((words >> 8).to(torch.float32) * 2.0**-24).view(-1, num_ops, NUM_UNIFORMS)


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
        steps = [[round_ * step for step in _KEY_STEP] for round_ in range(_ROUNDS)]
        return torch.tensor(_MULTIPLIERS, device=device), torch.tensor(steps, device=device)
