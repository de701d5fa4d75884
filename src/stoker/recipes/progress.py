"""A run as people follow it: samples instead of batches, loss and waits behind the bar, a line per epoch.

Enters: what the trainer tells its `Progress`, and the loader. Leaves: the same, told to another one.
Costs a clock reading per batch. What was done so far can be asked for from another thread.
"""

from __future__ import annotations

import time

import torch

from stoker.loader.loader import Loader
from stoker.report import Progress
from stoker.runs.telemetry import RunCounters
from stoker.train.trainer import EpochReport, History

_SHOW_SECONDS = 0.2
_SHOWN_METRICS = 5


class RunProgress:
    """Tells a `Progress` in samples instead of batches, and each epoch in a line."""

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
        # Seconds of finished epochs, and since when the current one goes on; one value, so that a
        # thread that looks in never sees half of a change.
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
        """A batch is done."""
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
            losses = self.history.losses if self.history is not None else []
            loss = f"loss {losses[-1]:.4g}  " if losses else ""
            self._show(f"{loss}waited {waited:.0%}")

    @property
    def trained_seconds(self) -> float:
        """Time in epochs so far; what comes between them is not counted."""
        finished, since = self._clock
        return finished if since is None else finished + time.perf_counter() - since

    def count(self) -> RunCounters:
        """Return what was done so far; for a thread that looks in from time to time."""
        history, device = self.history, self._loader.device
        losses = history.losses if history is not None else []
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
        """Pass on."""
        self._told.say(line)

    def tell_epochs(self) -> None:
        """Say a line for each epoch that has ended since."""
        for report in (self.history.epochs if self.history else [])[self._num_told :]:
            self._num_told += 1
            self._told.say(describe_epoch(report, self._epochs))


def describe_epoch(report: EpochReport, epochs: int) -> str:
    """Return one line: losses, metrics, rate and wait."""
    width = len(str(epochs))
    shown = list(report.metrics.items())[:_SHOWN_METRICS]
    metrics = "".join(f"  {'val loss' if n == 'loss' else n} {value:.4g}" for n, value in shown)
    return (
        f"epoch {report.epoch + 1:{width}}/{epochs}  loss {report.train_loss:.4g}{metrics}  "
        f"{report.samples_per_second:,.0f} samples/s  waited {report.wait_share:.0%}"
    )
