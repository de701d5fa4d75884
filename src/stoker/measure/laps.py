"""Times a loop over batches: the wait for each batch, and the duration of each step.

Enters: any iterator of batches, a device, and how long to measure. Leaves: the same batches, as many as needed,
and one `Lap` for each after the warm-up. Costs two clock readings per batch, on CUDA also one event; the host does
not wait for the device before `laps` is called.

On CUDA the host runs ahead of the device. So the duration of a step is measured between events on the device, and the
wait on the host.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, TypeVar

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stoker.loader.batch import Batch, IndexBatch

LEAST_LAPS = 5
_T = TypeVar("_T")


@dataclass(frozen=True)
class Patience:
    """How long to measure."""

    warm_up: int  # first batches, not counted: threads start, caches fill, graphs are captured
    steps: int  # largest number of batches to count
    seconds: float  # time limit from the end of the warm-up
    least: int = LEAST_LAPS  # number of batches to count even after the time limit

    @property
    def most(self) -> int:
        """Largest number of batches, warm-up included."""
        return self.warm_up + self.steps


@dataclass(frozen=True)
class Lap:
    """Times of one batch in a loop."""

    began: float  # when it was asked for, in seconds since the first counted batch was
    wait_seconds: float  # until it arrived
    seconds: float  # until the next batch was asked for, the wait included
    num_samples: int


class Stopwatch:
    """Times one loop. Not thread safe; make one for each loop.

    `each` is called before every batch is asked for, and once more at the end.
    """

    def __init__(
        self, patience: Patience, device: torch.device, each: Callable[[], None] | None = None
    ) -> None:
        self._patience = patience
        self._each = each
        self._device = device
        self._on_gpu = device.type == "cuda"
        # A mark is the time at which a batch is asked for, on the host and on the device. The last request of
        # an epoch yields no batch, so every batch stores the number of its mark.
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._batches: list[
            tuple[int, float, int]
        ] = []  # number of its mark, time of its arrival, number of samples

    @property
    def began(self) -> float:
        """Time at which the first counted batch was asked for."""
        return self._marks[self._batches[self._first][0]]

    @property
    def _first(self) -> int:
        return min(self._patience.warm_up, max(0, self.num_batches - self._patience.least))

    @property
    def num_batches(self) -> int:
        """Number of batches that were yielded."""
        return len(self._batches)

    def is_enough(self) -> bool:
        """Return whether enough batches were timed."""
        counted = self.num_batches - self._patience.warm_up
        if counted >= self._patience.steps:
            return True
        if counted < self._patience.least:
            return False
        began = self._marks[self._batches[self._patience.warm_up][0]]
        return self._marks[-1] - began > self._patience.seconds

    def timed(self, batches: Iterable[_T]) -> Iterator[_T]:
        """Yield batches until enough were timed; a second call continues with another epoch."""
        source = iter(batches)
        if self.is_enough():  # do not even begin the next epoch
            return
        while True:
            self._mark()
            if self.is_enough():
                return
            batch = next(source, None)
            if batch is None:
                return
            came = time.perf_counter()
            self._batches.append((len(self._marks) - 1, came, _count_samples(batch)))
            yield batch

    def laps(self, *, with_epoch_ends: bool = True) -> list[Lap]:
        """Return the laps after the warm-up; waits for the device.

        `with_epoch_ends`: whether the time between two epochs counts for the step before it.
        """
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        counted, last = self._batches[self._first :], len(self._marks) - 1
        following = [*(asked for asked, _, _ in counted[1:]), last]
        return [
            Lap(
                self._between(counted[0][0], asked),
                came - self._marks[asked],
                self._between(asked, end if with_epoch_ends else asked + 1),
                num_samples,
            )
            for (asked, came, num_samples), end in zip(counted, following, strict=False)
            if asked < last
        ]

    def _between(self, one: int, other: int) -> float:
        """Return the seconds between two marks, measured on the device if there is one."""
        if self._on_gpu:
            return float(self._events[one].elapsed_time(self._events[other])) / 1e3
        return self._marks[other] - self._marks[one]

    def _mark(self) -> None:
        """Record that a batch is asked for; after the end of an epoch this is the second request for it."""
        last = self._batches[-1][0] if self._batches else -1
        is_again = bool(self._marks) and last < len(self._marks) - 1
        if self._each is not None and not is_again:
            self._each()
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        self._marks.append(time.perf_counter())


def block_rates(
    laps: Sequence[Lap],
    num_blocks: int,
    batches_per_update: int = 1,
    count: Callable[[Lap], int] = lambda lap: lap.num_samples,
) -> list[float]:
    """Return the rates (the sum of `count` over laps, per second) of at most `num_blocks` blocks of laps, in order.

    Unlike in a median of steps, slow steps count in full. A block has whole updates of `batches_per_update` batches.
    """
    num_updates = len(laps) // batches_per_update
    edges = [
        round(num_updates * part / num_blocks) * batches_per_update
        for part in range(num_blocks + 1)
    ]
    blocks = [laps[low:high] for low, high in pairwise(edges) if low < high]
    return [
        sum(map(count, block)) / max(sum(lap.seconds for lap in block), 1e-9) for block in blocks
    ]


def _count_samples(batch: Any) -> int:
    if isinstance(batch, IndexBatch):
        return len(batch.planned.positions)
    if isinstance(batch, Batch):
        return len(batch.positions) if batch.valid is None else int((batch.positions >= 0).sum())
    return 0


class Phases:
    """Records the times of the forward pass, the backward pass and the update of each step, on a CPU.

    Use as a context manager around the training. On CUDA nothing is recorded: there the host only launches kernels,
    and a captured step runs no hooks.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self._model = model
        self._is_on = device.type == "cpu"
        self._handles: list[Any] = []
        self._forward_began = self._forward_ended = self._update_began = 0.0

    def __enter__(self) -> Self:
        if self._is_on:
            self._handles = [
                self._model.register_forward_pre_hook(self._before_forward),
                self._model.register_forward_hook(self._after_forward),
                register_optimizer_step_pre_hook(self._before_update),
                register_optimizer_step_post_hook(self._after_update),
            ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, *_: Any) -> None:
        self._forward_began = time.perf_counter()

    def _after_forward(self, *_: Any) -> None:
        self._forward_ended = time.perf_counter()
        self.spans.append(("forward", self._forward_began, self._forward_ended))

    def _before_update(self, *_: Any) -> None:
        self._update_began = time.perf_counter()
        self.spans.append(("backward", self._forward_ended, self._update_began))

    def _after_update(self, *_: Any) -> None:
        self.spans.append(("optimizer", self._update_began, time.perf_counter()))


class HeldLoader:
    """Yields one batch on the device repeatedly, for timing a step without loading. The stopwatch ends it."""

    pinned_bytes = 0  # tells the trainer that batches need no prefetching

    def __init__(self, batch: Batch, stopwatch: Stopwatch, most: int) -> None:
        self.batch_size = len(batch.positions)
        self._batch = batch
        self._stopwatch = stopwatch
        self._most = most

    def __len__(self) -> int:
        return self._most

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batch until the stopwatch has enough."""
        yield from self._stopwatch.timed(itertools.repeat(self._batch, self._most))
