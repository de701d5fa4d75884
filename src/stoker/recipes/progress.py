"""Progress of a run for people: samples instead of batches, loss and waits beside the bar, a line per epoch.

Enters: the trainer's calls of `Progress`, and the loader. Leaves: calls of another `Progress`. Costs a clock
reading per batch. `count` may be called from another thread.
"""

from __future__ import annotations

import time

import torch

from stoker.loader.loader import Loader
from stoker.report import Progress
from stoker.runs.telemetry import RunCounters
from stoker.train.history import History, describe_epoch

_SHOW_SECONDS = 0.2


class RunProgress:
    """Forwards progress to another `Progress` in samples, with a line for each epoch."""

    def __init__(self, told: Progress, loader: Loader, epochs: int) -> None:
        self._told = told
        self._loader = loader
        self._epochs = epochs
        self._show = getattr(told, "show", None)
        self._num_told = 0
        self._left = 0
        self._began = self._shown = time.perf_counter()
        self._waited = 0.0
        self._num_samples = 0
        # Seconds of finished epochs, and the start of the current one. One tuple, so that another thread
        # never reads one number before a change and the other after it.
        self._clock: tuple[float, float | None] = (0.0, None)
        self.history: History | None = None

    def start(self, label: str, total: int | None, unit: str) -> None:  # noqa: ARG002
        """Begin an epoch."""
        self.tell_epochs()
        batch = self._loader.batch_size
        whole = len(self._loader.samples)
        self._left = min(whole, batch * total) if total is not None else whole
        self._began, self._waited = time.perf_counter(), self._loader.waited_seconds
        self._clock = (self.trained_seconds, self._began)
        self._told.start(f"{label}/{self._epochs}", self._left, "samples")

    def advance(self, count: int = 1) -> None:
        """Count batches that are done."""
        done = min(self._left, count * self._loader.batch_size)
        self._left -= done
        self._num_samples += done
        self._told.advance(done)
        now = time.perf_counter()
        if not self._left:
            self._clock = (self.trained_seconds, None)
        if self._show is not None and now - self._shown >= _SHOW_SECONDS:
            self._shown = now
            waited = (self._loader.waited_seconds - self._waited) / max(now - self._began, 1e-9)
            losses = self.history.step_losses if self.history is not None else ()
            loss = f"loss {losses[-1]:.4g}  " if losses else ""
            self._show(f"{loss}waited {waited:.0%}")

    @property
    def trained_seconds(self) -> float:
        """Seconds in epochs so far, without the time between them."""
        finished, since = self._clock
        return finished if since is None else finished + time.perf_counter() - since

    def count(self) -> RunCounters:
        """Return the counters so far; may be called from another thread."""
        history, device = self.history, self._loader.device
        losses = history.step_losses if history is not None else ()
        on_gpu = device.type == "cuda"
        return RunCounters(
            self._num_samples,
            self.trained_seconds,
            self._loader.waited_seconds,
            min(self._loader.epoch, self._epochs - 1),
            losses[-1] if losses else None,
            torch.cuda.memory_allocated(device) if on_gpu else None,
            torch.cuda.memory_reserved(device) if on_gpu else None,
        )

    def say(self, line: str) -> None:
        """Show a line, unchanged."""
        self._told.say(line)

    def tell_epochs(self) -> None:
        """Print a line for each epoch that has ended since the last call."""
        for report in (self.history.epochs if self.history else [])[self._num_told :]:
            self._num_told += 1
            self._told.say(describe_epoch(report, self._epochs))
