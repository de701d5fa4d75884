"""Gradient accumulation: several small batches in one update, equal to one large batch, also at the end of an epoch.

Enters: the sizes of the batches of an update. Leaves: the weight of each batch's mean loss, and one factor
for the gradients at the end of the update. Costs nothing; only a short update pays one pass over the gradients.

The gradient of one batch of N samples is sum(n_i / N * gradient_i). N is not known before the update's
end: the epoch may end first, and its last batch may be short. So every batch is weighted as if the update
were full, by n_i / (nominal * steps). For a full batch that is the constant 1 / steps, as a captured step needs.
If the update turns out shorter, its gradients are multiplied by nominal * steps / N at the end: after unscaling,
before clipping.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from stoker.errors import InputError


class Accumulation:
    """Counts the batches of one update and computes their weights.

    Per batch: `(loss * accumulation.add(num_samples)).backward()`. When `is_complete`, or when the epoch ends
    and `num_batches` is not 0: unscale, `scale_gradients(parameters, accumulation.close())`, clip, step.

    Args:
        nominal: Samples of a full batch.
        steps: Batches of a complete update.
    """

    def __init__(self, nominal: int, steps: int = 1) -> None:
        _check_positive("nominal", nominal)
        _check_positive("steps", steps)
        self.nominal = nominal
        self.steps = steps
        self.num_batches = 0
        self.num_samples: float = 0

    def weight(self, num_samples: int) -> float:
        """Return the factor for the mean loss of a batch of this size, without counting the batch."""
        _check_positive("num_samples", num_samples)
        return num_samples / (self.nominal * self.steps)

    def add(self, num_samples: int, counted: float | None = None) -> float:
        """Count one batch and return its weight.

        Args:
            num_samples: Samples of the batch.
            counted: Samples to add to the update's count, if that is another number: with several ranks, the mean
                over them.
        """
        weight = self.weight(num_samples)
        if self.is_complete:
            raise InputError(
                f"batch {self.num_batches + 1} was added to an update of {self.steps}.",
                "no batch between the last one of an update and close()",
                "if accumulation.is_complete: scale_gradients(parameters, accumulation.close())",
            )
        self.num_batches += 1
        self.num_samples += num_samples if counted is None else counted
        return weight

    @property
    def is_complete(self) -> bool:
        """Whether the update has all its batches, so that the optimizer should step."""
        return self.num_batches == self.steps

    @property
    def correction(self) -> float:
        """Factor that turns the gradients so far into those of one large batch; 1 for a complete update."""
        if not self.num_samples:
            return 1.0
        return self.nominal * self.steps / self.num_samples

    def close(self) -> float:
        """Return the correction and begin the next update."""
        factor = self.correction
        self.num_batches = self.num_samples = 0
        return factor

    def state_dict(self) -> dict[str, float]:
        """Return the counts, for a checkpoint between two batches of an update."""
        return {"num_batches": self.num_batches, "num_samples": self.num_samples}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from saved counts."""
        self.num_batches, self.num_samples = int(state["num_batches"]), state["num_samples"]


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply all gradients by `factor` in place; does nothing for 1. No host synchronisation."""
    if factor == 1.0:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dense = [gradient for gradient in gradients if gradient.layout == torch.strided]
    if dense:
        torch._foreach_mul_(dense, factor)
    for gradient in gradients:
        if gradient.layout != torch.strided:
            gradient.mul_(factor)


class GradientAccumulator:
    """One optimizer step for every `steps` batches, the last ones of an epoch included.

    Call once per batch, in this order: `scale_loss(loss).backward()`, then `should_update()`. With
    batches of equal size and a mean loss, the gradient is that of one large batch. If the last batch is
    shorter, use `Accumulation`.

    Args:
        steps: Batches per update.
        num_batches: Batches per epoch. The last update may then have fewer: its losses are divided by
            their own number. Without it only complete updates happen.
        accumulation_steps: Another name of `steps`.
    """

    def __init__(
        self,
        steps: int | None = None,
        num_batches: int | None = None,
        *,
        accumulation_steps: int | None = None,
    ) -> None:
        steps = (accumulation_steps or 0) if steps is None else steps
        _check_positive("steps", steps)
        if num_batches is not None:
            _check_positive("num_batches", num_batches)
        self.steps = steps
        self.num_batches = num_batches
        self._accumulation = Accumulation(1, steps)
        self._done = 0

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss divided by the number of batches in its update."""
        return loss / self._length()

    def should_update(self) -> bool:
        """Count one batch; True when its update is complete and the optimizer should step."""
        self._accumulation.add(1)
        complete = self._accumulation.num_batches == self._length()
        if complete:
            self._done += self._accumulation.num_batches
            self._accumulation.close()
            if self.num_batches is None or self._done == self.num_batches:
                self._done = 0
        return complete

    def _length(self) -> int:
        if self.num_batches is None:
            return self.steps
        return min(self.steps, self.num_batches - self._done)


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}.", "a whole number, 1 or more", f"{name}=1")
