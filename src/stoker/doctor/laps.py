"""The clock of a loop that asks for batches: how long each batch was waited for, and each step took.

Enters: any iterator of batches, a device, and how long to measure. Leaves: the same batches, as many as
are wanted, and one `Lap` for each after the warm-up. Costs two clock readings per batch, on CUDA also one
event; nothing waits for the device before `laps` is called.

On CUDA the host runs ahead of the device, so a step's length is taken between events on the device; the
wait is the host's.
"""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stoker.errors import InputError
from stoker.loader.batch import Batch, IndexBatch
from stoker.loader.loader import Loader
from stoker.recipes.run import Run
from stoker.report import Silent
from stoker.train.history import History
from stoker.train.losses import NonFiniteError

LEAST_LAPS = 5
_T = TypeVar("_T")


@dataclass(frozen=True)
class Patience:
    """How long to measure.

    Attributes:
        warm_up: Batches that are not counted: threads start, caches fill, graphs are captured.
        steps: Batches that are counted.
        seconds: When these are over, fewer are enough, but never less than `LEAST_LAPS`.
    """

    warm_up: int
    steps: int
    seconds: float

    @property
    def most(self) -> int:
        """Batches at most, warm-up included."""
        return self.warm_up + self.steps


@dataclass(frozen=True)
class Lap:
    """One batch of a loop.

    Attributes:
        began: When it was asked for, in seconds since the first that counts.
        wait_seconds: Until it came.
        seconds: Until the next one was asked for.
        num_samples: In it.
    """

    began: float
    wait_seconds: float
    seconds: float
    num_samples: int


class Stopwatch:
    """Takes the time of one loop. Not thread-safe; one loop each.

    Args:
        patience: How long to measure.
        device: Where the steps run.
        each: Called before every batch is asked for, and once more at the end.
    """

    def __init__(
        self,
        patience: Patience,
        device: torch.device,
        each: Callable[[], None] | None = None,
    ) -> None:
        self._patience = patience
        self._each = each
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._asked: list[float] = []
        self._came: list[float] = []
        self._counts: list[int] = []
        self._events: list[torch.cuda.Event] = []

    @property
    def began(self) -> float:
        """The clock when the first batch that counts was asked for."""
        return self._asked[self._first]

    @property
    def _first(self) -> int:
        return min(self._patience.warm_up, max(0, len(self._came) - LEAST_LAPS))

    @property
    def num_batches(self) -> int:
        """Batches that were handed out."""
        return len(self._came)

    @property
    def is_enough(self) -> bool:
        """Whether no more batches are wanted."""
        counted = len(self._came) - self._patience.warm_up
        if counted >= self._patience.steps:
            return True
        if counted < LEAST_LAPS or not self._asked:
            return False
        return self._asked[-1] - self._asked[0] > self._patience.seconds

    def timed(self, batches: Iterable[_T]) -> Iterator[_T]:
        """Yield the batches until enough were timed; goes on with the next epoch's where it is called again."""
        source = iter(batches)
        while True:
            self._ask()
            if self.is_enough:
                return
            batch = next(source, None)
            if batch is None:
                return
            self._came.append(time.perf_counter())
            self._counts.append(_count_samples(batch))
            yield batch

    def laps(self) -> list[Lap]:
        """Return what was timed after the warm-up; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        first = self._first
        return [
            Lap(
                self._between(first, number),
                self._came[number] - self._asked[number],
                self._between(number, number + 1),
                self._counts[number],
            )
            for number in range(first, len(self._asked) - 1)
        ]

    def _between(self, one: int, other: int) -> float:
        """Seconds from one question to another, on the device where there is one."""
        if self._on_gpu:
            return float(self._events[one].elapsed_time(self._events[other])) / 1e3
        return self._asked[other] - self._asked[one]

    def _ask(self) -> None:
        """Note the time. What an epoch's end takes belongs to the step before it."""
        if len(self._asked) > len(self._came):
            self._asked.pop()
            if self._on_gpu:
                self._events.pop()
        elif self._each is not None:
            self._each()
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        self._asked.append(time.perf_counter())


def _count_samples(batch: Any) -> int:
    if isinstance(batch, IndexBatch):
        return len(batch.planned.positions)
    if isinstance(batch, Batch):
        return len(batch.positions) if batch.valid is None else int((batch.positions >= 0).sum())
    return 0


class Phases:
    """When the forward pass, the backward pass and the update of each step ran, on a CPU.

    Use as a context manager around the training. On CUDA the host only launches, and a captured step runs
    no hooks: nothing is noted there.
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
    """One batch that is on the device already, again and again: a step without a loader.

    Args:
        batch: What is held.
        stopwatch: Ends it.
        most: Batches of the only epoch.
    """

    pinned_bytes = 0  # says to the trainer that nothing needs to be staged

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


def train_over(
    run: Run, loader: Any, watch: Stopwatch, most: int
) -> tuple[History, NonFiniteError | None]:
    """Train in memory until the loader has had enough; return the trainer's history, and what went wrong.

    Args:
        run: Whose model, loss, optimizer and settings.
        loader: The run's, or a held batch.
        watch: Times the loop, and ends it.
        most: Batches it hands out at most.
    """
    if isinstance(loader, Loader):
        loader.on_iteration = watch.timed
    epochs = max(1, math.ceil(most / max(1, len(loader))))
    ready = run.with_settings(replace(run.settings, epochs=epochs))
    trainer = ready.make_trainer(loader, None, Silent(), run_dir=None)
    trouble = None
    try:
        trainer.fit()
    except NonFiniteError as error:
        trouble = error
    except InputError:
        # What was wanted of the last epoch may be nothing: then it has no batch.
        if not watch.is_enough:
            raise
    # The trainer has heeded the signal, the measurement must too.
    if trainer.history.ended == "terminated":
        raise SystemExit(128 + signal.SIGTERM)
    return trainer.history, trouble
