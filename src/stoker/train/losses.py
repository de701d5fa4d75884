"""Losses of steps: kept on the device and read by the host in blocks, some steps later.

Enters: one loss per step, on the device. Leaves: the same numbers on the host, in order. Costs: one small copy
kernel per step, and every `read_every` steps one copy to pinned memory. The host waits for a copy only when two
others were queued after it, or at `flush`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import distributed

from stoker.errors import EXIT_REFUSED, StokerError
from stoker.store.fields import Array
from stoker.train.ranks import Ranks


class NonFiniteError(StokerError, ArithmeticError):
    """A loss that is not finite; the message names its batch and samples."""

    exit_code = EXIT_REFUSED


@dataclass(frozen=True)
class StepLoss:
    """One step's loss, on the host.

    Attributes:
        step: Number of the step, counted over the whole run.
        loss: Mean loss of the batch, over all ranks.
        num_samples: Samples of the batch, over all ranks.
        positions: Positions of this rank's samples in the loader's list, if known.
        place: Number of the epoch, and of the batch within it.
        own: Mean loss of this rank's part of the batch.
    """

    step: int
    loss: float
    num_samples: int
    positions: Array | None
    place: tuple[int, int] = (0, 0)
    own: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the loss is finite."""
        return math.isfinite(self.loss)


class _Note(NamedTuple):
    step: int
    num_samples: int
    num_together: int
    positions: Array | None
    place: tuple[int, int]


class _Read(NamedTuple):
    notes: list[_Note]
    values: torch.Tensor
    event: torch.cuda.Event | None


class LossBook:
    """Keeps losses on the device and brings them to the host in blocks.

    Args:
        device: Device of the losses.
        read_every: Steps per block.
        ranks: Losses are averaged over these ranks. Every rank must note the same steps.
    """

    def __init__(self, device: torch.device, read_every: int, ranks: Ranks | None = None) -> None:
        self.device = device
        self._ranks = ranks or Ranks()
        self._read_every = read_every
        self._losses: list[torch.Tensor] = []
        self._notes: list[_Note] = []
        self._reads: deque[_Read] = deque()

    def note(
        self,
        step: int,
        loss: torch.Tensor,
        num_samples: int,
        positions: Array | None,
        place: tuple[int, int] = (0, 0),
        num_together: int | None = None,
    ) -> list[StepLoss]:
        """Add a step's loss; return the losses that have arrived on the host since the last call.

        Args:
            step: Number of the step, counted over the whole run.
            loss: A scalar tensor that is not changed afterwards.
            num_samples: Samples of this rank's batch.
            positions: Positions of these samples in the loader's list.
            place: Number of the epoch, and of the batch within it.
            num_together: Samples of all ranks in this step.
        """
        self._losses.append(loss)
        together = num_samples if num_together is None else num_together
        self._notes.append(_Note(step, num_samples, together, positions, place))
        if len(self._losses) < self._read_every:
            return []
        self._begin_read()
        if self._ranks.are_several:  # all ranks must see a bad loss at the same step
            return self._arrived(wait=True, but=1)
        return self._arrived(wait=len(self._reads) > 2)

    def flush(self) -> list[StepLoss]:
        """Return all losses not yet returned; waits for the device."""
        if self._losses:
            self._begin_read()
        return self._arrived(wait=True)

    def _begin_read(self) -> None:
        values, event = self._weigh(torch.stack(self._losses)), None
        if self.device.type == "cuda":
            host = torch.empty(values.shape, device="cpu", pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            values = host
        self._reads.append(_Read(self._notes, values, event))
        self._losses, self._notes = [], []

    def _weigh(self, own: torch.Tensor) -> torch.Tensor:
        """Return `(2, steps)`: the mean losses over all ranks, weighted by samples, and this rank's own."""
        if not self._ranks.are_several:
            return torch.stack([own, own])
        shares = [note.num_samples / note.num_together for note in self._notes]
        weights = torch.tensor(shares, device="cpu", pin_memory=own.is_cuda)
        weights = weights.to(own.device, non_blocking=True)
        together = own * weights
        distributed.all_reduce(together)
        return torch.stack([together, own])

    def _arrived(self, wait: bool, but: int = 0) -> list[StepLoss]:
        """Return the losses that have arrived, in order.

        Args:
            wait: Whether to wait for losses that are still being copied.
            but: Number of newest blocks to leave for later.
        """
        arrived: list[StepLoss] = []
        while len(self._reads) > but:
            read = self._reads[0]
            if read.event is not None:
                if not wait and not read.event.query():
                    break
                read.event.synchronize()
            self._reads.popleft()
            for note, value, own in zip(read.notes, *read.values.tolist(), strict=True):
                arrived.append(
                    StepLoss(note.step, value, note.num_together, note.positions, note.place, own)
                )
        return arrived
