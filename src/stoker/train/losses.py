"""Losses that stay on the device until somebody needs them, and the alarm when one is not finite.

Enters: one loss per step, on the device. Leaves: the same numbers on the host, some steps later, in
order. Costs: one small copy kernel per step, and every `read_every` steps one copy to pinned memory
that nobody waits for.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stoker.errors import EXIT_REFUSED, StokerError
from stoker.store.fields import Array


class NonFiniteError(StokerError, ArithmeticError):
    """A loss that is not a number; the message says of which batch, and what is in it."""

    exit_code = EXIT_REFUSED


@dataclass(frozen=True)
class StepLoss:
    """One step's loss, on the host.

    Attributes:
        step: Counted over the whole run.
        loss: Its value.
        num_samples: Of its batch.
        positions: Places of its samples in the loader's list, where known.
        place: Its epoch, and the number of its batch there.
    """

    step: int
    loss: float
    num_samples: int
    positions: Array | None
    place: tuple[int, int] = (0, 0)

    @property
    def is_finite(self) -> bool:
        """Whether the loss is a number."""
        return math.isfinite(self.loss)


class _Note(NamedTuple):
    step: int
    num_samples: int
    positions: Array | None
    place: tuple[int, int]


class _Read(NamedTuple):
    notes: list[_Note]
    values: torch.Tensor
    event: torch.cuda.Event | None


class LossBook:
    """Keeps losses on the device and brings them to the host in blocks.

    Args:
        device: Where losses are.
        read_every: Steps per block.
    """

    def __init__(self, device: torch.device, read_every: int) -> None:
        self.device = device
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
    ) -> list[StepLoss]:
        """Keep a step's loss; return those that have arrived on the host since the last call.

        Args:
            step: Counted over the whole run.
            loss: A scalar that nobody writes to any more.
            num_samples: Of its batch.
            positions: Places of its samples in the loader's list.
            place: Its epoch, and the number of its batch there.
        """
        self._losses.append(loss)
        self._notes.append(_Note(step, num_samples, positions, place))
        if len(self._losses) < self._read_every:
            return []
        self._begin_read()
        return self._arrived(wait=len(self._reads) > 2)

    def flush(self) -> list[StepLoss]:
        """Return all losses not yet returned; waits for the device."""
        if self._losses:
            self._begin_read()
        return self._arrived(wait=True)

    def _begin_read(self) -> None:
        values, event = torch.stack(self._losses), None
        if self.device.type == "cuda":
            host = torch.empty(len(values), pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            values = host
        self._reads.append(_Read(self._notes, values, event))
        self._losses, self._notes = [], []

    def _arrived(self, wait: bool) -> list[StepLoss]:
        arrived: list[StepLoss] = []
        while self._reads:
            read = self._reads[0]
            if read.event is not None:
                if not wait and not read.event.query():
                    break
                read.event.synchronize()
            self._reads.popleft()
            for note, value in zip(read.notes, read.values.tolist(), strict=True):
                arrived.append(
                    StepLoss(note.step, value, note.num_samples, note.positions, note.place)
                )
        return arrived
