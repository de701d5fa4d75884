"""Runs a ready job for a while and times it: the whole job, its step alone, or its loader alone.

Enters: a `Run` that has not begun, and how long to measure. Leaves: `Timed`: a `Lap` per batch, and the choices of
the trainer. Costs the steps that are measured; the job trains in memory, nothing is written.

The run's own trainer runs, eager or captured, with its optimizer, precision and loader. The loop ends because the
stopwatch passes on no more batches: the trainer sees short epochs.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from stoker.errors import InputError
from stoker.loader.batch import Batch
from stoker.loader.loader import Loader
from stoker.measure.laps import HeldLoader, Lap, Patience, Phases, Stopwatch, block_rates
from stoker.measure.readings import Spread
from stoker.recipes.run import Run
from stoker.report import Silent
from stoker.train.history import History
from stoker.train.losses import NonFiniteError
from stoker.train.oom import let_go

_BLOCKS = 5


def warm_up_batches(device: torch.device) -> int:
    """Return the number of warm-up batches, which do not count.

    On a GPU a captured step first runs eagerly for three batches, is captured, and its first replays are checked.
    """
    return 16 if device.type == "cuda" else 3


@dataclass(frozen=True)
class Timed:
    """The result of timing a loop over batches."""

    laps: tuple[Lap, ...]  # one per batch
    # the trainer's choices and epochs; empty without training
    history: History = field(default_factory=History)
    trouble: NonFiniteError | None = None  # raised for a loss that was not finite
    # (kind, start, end) of forward, backward and update, on the laps' clock; on a CPU only
    phases: tuple[tuple[str, float, float], ...] = ()
    tier: str = ""  # the loader's tier
    device_data_bytes: int = 0  # data that the loader keeps on the device

    @property
    def seconds(self) -> Spread | None:
        """Seconds per batch; None if no batch was counted."""
        return Spread.of(lap.seconds for lap in self.laps)

    def rate(self) -> Spread | None:
        """Return samples per second, as the spread over a few blocks of batches."""
        return Spread.of(block_rates(self.laps, _BLOCKS))


def time_together(
    run: Run,
    patience: Patience,
    each: Callable[[], None] | None = None,
    *,
    with_epoch_ends: bool = True,
) -> Timed:
    """Train for a while as the run would, and time it; `each` is called before every batch. Blocking."""
    with run.make_train_loader() as loader:
        watch = Stopwatch(patience, run.device, each)
        with Phases(run.job.model, run.device) as phases:
            history, trouble = train_over(run, loader, watch, patience.most)
        laps = tuple(watch.laps(with_epoch_ends=with_epoch_ends))
        spans = tuple(
            (kind, start - watch.began, end - watch.began)
            for kind, start, end in phases.spans
            if start >= watch.began
        )
        made = Timed(laps, history, trouble, spans, loader.tier, loader.device_bytes)
    let_go(run.device)
    return made


def time_step(run: Run, patience: Patience, *, captured: bool = True) -> Timed:
    """Train repeatedly on one batch that is on the device, and time it. `captured=False` turns CUDA graphs off."""
    watch = Stopwatch(patience, run.device)
    held = HeldLoader(hold_batch(run), watch, patience.most)
    # Training on one batch repeatedly may diverge, which is not an error of the job.
    capture = run.settings.training.capture if captured else "off"
    calm = run.with_settings(
        run.settings.changed({"training.nonfinite": "skip", "training.capture": capture})
    )
    history, _ = train_over(calm, held, watch, patience.most)
    made = Timed(tuple(watch.laps()), history)
    let_go(run.device)
    return made


def time_loader(run: Run, patience: Patience, captured: bool) -> Timed:
    """Iterate over the run's loader without training, and time it; index batches only if the step is `captured`."""
    with run.make_train_loader() as loader:
        if run.drawn_augmentation is not None:
            loader.use_augmentation(run.drawn_augmentation)
        watch = Stopwatch(patience, run.device)
        loader.on_iteration = watch.timed
        while not watch.is_enough():
            batches: Any = (
                loader.index_batches()
                if captured and loader.tier != "streamed"
                else loader.remaining_batches()
            )
            for _ in batches:
                pass
        made = Timed(tuple(watch.laps()), tier=loader.tier)
    let_go(run.device)
    return made


def hold_batch(run: Run) -> Batch:
    """Return the first batch of the run, augmented, on the device."""
    with run.make_train_loader() as loader:
        if run.drawn_augmentation is not None:
            loader.use_augmentation(run.drawn_augmentation)
        return next(loader.remaining_batches())


def train_over(
    run: Run, loader: Any, watch: Stopwatch, most: int
) -> tuple[History, NonFiniteError | None]:
    """Train in memory until the watch has enough batches; return (history, error of a loss that is not finite).

    The loader is the run's own or a `HeldLoader`; it yields at most `most` batches.
    """
    if isinstance(loader, Loader):
        loader.on_iteration = watch.timed
    epochs = max(1, math.ceil(most / max(1, len(loader))))
    # Only the watch ends the training: a limit of steps or early stopping could leave nothing to time.
    ends = {"training.epochs": epochs, "training.max_steps": None, "training.patience": 0}
    ready = run.with_settings(run.settings.changed(ends))
    trainer = ready.make_trainer(loader, None, Silent(), run_dir=None)
    trouble = None
    try:
        trainer.fit()
    except NonFiniteError as error:
        trouble = error
    except InputError:
        # The watch may take no batch of the last epoch, which the trainer reports as an empty epoch.
        if not watch.is_enough():
            raise
    # The trainer stopped because of SIGTERM, so the measurement must end as well.
    if trainer.history.ended == "terminated":
        raise SystemExit(128 + signal.SIGTERM)
    return trainer.history, trouble
