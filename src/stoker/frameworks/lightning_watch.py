"""A Lightning run in stoker's own logs: `stoker report` and `stoker monitor` read it like any other.

Enters: a Lightning `Trainer` that fits. Leaves: in a run folder `run.jsonl` (config, plan, machine, losses,
epochs, notes) and `telemetry.jsonl` (GPU, process, samples/s, waits). Costs 0.15 ms of the host per step,
where a step of Lightning's own costs 1.4; losses are read in blocks, nothing waits for the device in between.

The time that the loop waits for batches comes from Lightning's own profiler hook around the request for a
batch, so it is known for any loader.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from stoker.errors import InputError, MissingExtraError
from stoker.frameworks.adapted import AdaptedLoader, check_share, count_samples
from stoker.loader.loader import Loader
from stoker.machine import probe
from stoker.report import LOG_NAME, Note, RunEnd, RunLog, Topic
from stoker.runs.telemetry import RunCounters, TelemetryLog
from stoker.train.history import EpochReport
from stoker.train.losses import LossBook, StepLoss
from stoker.train.memory import gpu_uuid
from stoker.train.run_folder import RunLock

try:
    import lightning.pytorch as pl
    from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
    from lightning.pytorch.utilities.rank_zero import rank_zero_info
except ImportError as error:
    raise MissingExtraError.for_package(
        "lightning", "lightning", "stoker.frameworks.lightning"
    ) from error

_QUESTION, _CLOCKS = "train_dataloader_next", "_stoker_clocks"
UNTOLD = (
    "how long the loop waits for batches is not known: Lightning's profiler was never told of it"
)
"""Note for a version of Lightning that names the request otherwise: a wait that was not seen is not 0."""


class WaitClock:
    """Measures how long a Lightning loop waits for training batches. Use as a context manager around the fit.

    Args:
        trainer: Its profiler gets hooks; it keeps its type, and is restored at the end.
        told: Called after every wait with its begin and end.
    """

    def __init__(
        self, trainer: pl.Trainer, told: Callable[[float, float], None] | None = None
    ) -> None:
        self._profiler: Any = trainer.profiler
        self._told = told
        self._since: float | None = None
        self.waited_seconds = 0.0
        self.num_waits = 0

    def __enter__(self) -> WaitClock:
        own = vars(self._profiler)
        if _CLOCKS not in own:
            own[_CLOCKS] = []
            _listen(self._profiler)
        own[_CLOCKS].append(self)
        return self

    def __exit__(self, *error: object) -> None:
        own = vars(self._profiler)
        own[_CLOCKS].remove(self)
        if not own[_CLOCKS]:
            for name in (_CLOCKS, "start", "stop"):
                del own[name]

    def begin(self) -> None:
        """Note that a batch is requested."""
        self._since = time.perf_counter()

    def end(self) -> None:
        """Note that the batch has come, or that there is none."""
        if self._since is not None:
            began, self._since = self._since, None
            now = time.perf_counter()
            self.waited_seconds += now - began
            self.num_waits += 1
            if self._told is not None:
                self._told(began, now)


def _listen(profiler: Any) -> None:
    """Hook a profiler: its clocks are called at every request for a training batch."""
    start, stop = profiler.start, profiler.stop

    def telling_start(name: str) -> None:
        start(name)
        if name.endswith(_QUESTION):
            for clock in vars(profiler)[_CLOCKS]:
                clock.begin()

    def telling_stop(name: str) -> None:
        if name.endswith(_QUESTION):
            for clock in vars(profiler)[_CLOCKS]:
                clock.end()
        stop(name)

    profiler.start, profiler.stop = telling_start, telling_stop


def require_adapted(trainer: pl.Trainer) -> None:
    """Refuse a plain Loader, whose position Lightning's checkpoints would not hold, and one of another rank."""
    loader = trainer.train_dataloader
    if isinstance(loader, AdaptedLoader):
        check_share(loader.loader, trainer.global_rank, trainer.world_size)
    if isinstance(loader, Loader):
        raise InputError(
            "the training loader is a plain stoker Loader: Lightning sets no epoch of it, and keeps no place of it "
            "in its checkpoints.",
            "a loader that is adapted to Lightning",
            "trainer.fit(model, stoker.frameworks.lightning.adapt(loader)), or StokerData",
        )


def tell(trainer: pl.Trainer, note: Note) -> None:
    """Log a note on the first rank, and write it to the run's log where there is one."""
    rank_zero_info(note.text)
    for callback in trainer.callbacks:
        if isinstance(callback, TelemetryCallback):
            callback.note(note)


class TelemetryCallback(pl.Callback):
    """Writes what a fit does into a run folder, on the first rank; see the module's text.

    Args:
        run_dir: The folder; one process at a time may write there.
        read_every: Steps per block of losses.
        settings: What else the report should show of the run, in plain values.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        read_every: int = 50,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._read_every = read_every
        self._settings = dict(settings or {})
        self._stack = contextlib.ExitStack()
        self._log: RunLog | None = None
        self._telemetry: TelemetryLog | None = None
        self._clock: WaitClock | None = None
        self._book: LossBook | None = None
        self._device = torch.device("cpu")
        self._forget()

    def _forget(self) -> None:
        self._num_steps = self._num_samples = self._epoch = 0
        self._loss: float | None = None
        self._was_training = False
        # Seconds of finished stretches, and the begin of the current one: one value, so that the telemetry
        # thread never sees half of a change.
        self._trained: tuple[float, float | None] = (0.0, None)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._total, self._count = 0.0, 0
        self._seconds_before = self.trained_seconds
        self._waited_before = self._waited_seconds or 0.0

    @property
    def trained_seconds(self) -> float:
        """Time in epochs so far; validation is not counted."""
        finished, since = self._trained
        return finished if since is None else finished + time.perf_counter() - since

    @property
    def _waited_seconds(self) -> float | None:
        clock = self._clock
        return clock.waited_seconds if clock is not None and clock.num_waits else None

    def note(self, note: Note) -> None:
        """Write a note into the run's log."""
        self._write("note", note.to_json())

    def _write(self, event: str, values: Mapping[str, Any], step: int | None = None) -> None:
        if self._log is not None:
            at = self._num_steps if step is None else step
            self._log.write(event, values, step=at, epoch=self._epoch)

    # -- the run ---------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the run folder: lock, log and telemetry."""
        if not trainer.is_global_zero:
            return
        self._forget()
        self._device = pl_module.device
        self._book = LossBook(self._device, self._read_every)
        with contextlib.ExitStack() as stack:
            stack.enter_context(RunLock(self.run_dir))
            self._log = stack.enter_context(RunLog(self.run_dir / LOG_NAME))
            self._log.write("config", {"settings": self._described(trainer), "reasons": {}})
            self._log.write("machine", probe(self.run_dir).to_json())
            self._clock = stack.enter_context(WaitClock(trainer))
            log = TelemetryLog(self.run_dir, self.count, gpu_uuid=gpu_uuid(self._device))
            self._telemetry = stack.enter_context(log)
            self._stack = stack.pop_all()

    def _described(self, trainer: pl.Trainer) -> dict[str, Any]:
        known = {
            "framework": f"lightning {pl.__version__}",
            "epochs": trainer.max_epochs,
            "precision": str(trainer.precision),
            "accumulation_steps": trainer.accumulate_grad_batches,
            "clip_norm": trainer.gradient_clip_val,
            "world_size": trainer.world_size,
            "run_dir": str(self.run_dir),
        }
        return known | self._settings

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the plan of a stoker loader to the log; the loaders are known by now."""
        require_adapted(trainer)
        self._num_steps = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        loader = trainer.train_dataloader
        if isinstance(loader, AdaptedLoader):
            self._write("plan", loader.loader.plan.to_json())
            self.note(Note(f"data {loader.loader.reason}", Topic.DATA))
        if self._num_steps:
            self._epoch = trainer.current_epoch
            text = f"resumed at epoch {self._epoch}, step {self._num_steps}"
            self.note(Note(text, Topic.RESUMED))
            self._go_on()  # in the middle of an epoch, for which `on_train_epoch_start` is not called

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the run folder."""
        self._close(RunEnd())

    def on_exception(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        exception: BaseException,
    ) -> None:
        """Write how the run ended, and close the run folder."""
        self._close(RunEnd.by(exception))

    def _close(self, end: RunEnd) -> None:
        if self._log is None or self._telemetry is None or self._book is None:
            return
        self._pause()
        with contextlib.suppress(RuntimeError):  # a device that failed gives no losses any more
            self._keep(self._book.flush())
        self._telemetry.end = end
        self._stack.close()
        self._log = self._telemetry = self._clock = None

    # -- steps and epochs ------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count an epoch."""
        self._epoch = trainer.current_epoch
        self._go_on()
        self._begin_epoch()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the loss, on the device."""
        if self._log is None or self._book is None:
            return
        count = count_samples(batch)
        self._num_samples += count
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # Lightning has divided it by the batches of an update.
            whole = loss.detach().float().reshape(()) * trainer.accumulate_grad_batches
            self._keep(self._book.note(step, whole, count, None, (self._epoch, batch_idx)))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: validation is no training time."""
        self._was_training = self._trained[1] is not None
        self._pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock again, unless this was the check before training."""
        if self._was_training:
            self._go_on()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the epoch to the log, with the metrics that the module has logged."""
        if self._log is None or self._book is None:
            return
        self._pause()
        self._keep(self._book.flush())
        seconds = self.trained_seconds - self._seconds_before
        waited = self._waited_seconds
        share = None
        if waited is not None:
            share = min(1.0, (waited - self._waited_before) / max(seconds, 1e-9))
        elif self._epoch == 0:
            self.note(Note(UNTOLD))
        mean = self._total / self._count if self._count else math.nan
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if value.numel() == 1
        }
        report = EpochReport(self._epoch, mean, metrics, self._count, seconds, share or 0.0)
        told = {"samples_per_second": report.samples_per_second, "wait_share": share}
        self._write("epoch", vars(report) | told)

    def _keep(self, arrived: list[StepLoss]) -> None:
        if not arrived:
            return
        for seen in arrived:
            if seen.is_finite:
                self._total += seen.loss * seen.num_samples
                self._count += seen.num_samples
        self._loss = arrived[-1].loss
        mean = sum(seen.loss for seen in arrived) / len(arrived)
        self._write("steps", {"loss": mean, "count": len(arrived)}, arrived[-1].step)

    def _go_on(self) -> None:
        if self._trained[1] is None:
            self._trained = (self._trained[0], time.perf_counter())

    def _pause(self) -> None:
        self._trained = (self.trained_seconds, None)

    def count(self) -> RunCounters:
        """Return the counters of the run so far; called by the telemetry thread."""
        on_gpu = self._device.type == "cuda"
        return RunCounters(
            self._num_samples,
            self.trained_seconds,
            self._waited_seconds,
            self._epoch,
            self._loss,
            torch.cuda.memory_allocated(self._device) if on_gpu else None,
            torch.cuda.memory_reserved(self._device) if on_gpu else None,
        )


__all__ = [
    "Closure", "ClosureResult", "TelemetryCallback", "WaitClock", "pl", "rank_zero_info", "require_adapted", "tell",
]  # fmt: skip
