"""The `Trainer`: epochs of steps, validation, checkpoints, and a clean end whatever happens.

Enters: a model, loaders, a criterion, an optimizer. Leaves: trained weights, a `History`, a run log
and checkpoints in the run's folder. Costs: below 1 % over the bare loop. Losses are read in blocks; the
host does not wait for the device between them.

Success: `History.ended` is "done". SIGTERM saves and ends with "terminated". The first Ctrl-C finishes the
step, saves and raises KeyboardInterrupt; the second one ends at once. An error is raised after saving what
was trained, if there is one rank. A checkpoint is only written when every loss before it was finite.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from stoker.errors import InputError
from stoker.loader.slabs import usable_device
from stoker.report import Note, Progress, Silent, Topic
from stoker.train.activations import checkpoint_activations
from stoker.train.batches import Feed, Unpack, Work
from stoker.train.capture import CapturedStep, cannot_capture, refuse_eager, step_note
from stoker.train.checks import (
    check_parameters,
    check_skipping,
    check_steps,
    load_criterion,
    move_model,
)
from stoker.train.diagnosis import explain_batch
from stoker.train.evaluation import EvaluationStopped, Evaluator, no_batches
from stoker.train.generators import capture_rng, restore_rng, seed_rng
from stoker.train.heartbeat import HEARTBEAT
from stoker.train.history import EpochReport, EpochTally, History
from stoker.train.losses import LossBook, NonFiniteError, StepLoss
from stoker.train.memory import LeakWatch, log_gpu_stats
from stoker.train.parallel import (
    Parallel,
    choose_parallel,
    gather_whole,
    load_whole_model,
    load_whole_optimizer,
    plain_name,
    share_statistics,
)
from stoker.train.precision import PrecisionChoice, choose_precision
from stoker.train.ranks import Ranks, as_ranks, check_alike
from stoker.train.recurrent_state import make_recurrent_state
from stoker.train.run_folder import RunFolder
from stoker.train.settings import TrainerConfig, read_config
from stoker.train.shutdown import Shutdown
from stoker.train.step import (
    Step,
    StepParts,
    fill_momentum,
    make_guarded,
)
from stoker.train.update import Update

AUGMENTED = "✓ GPU augmentation enabled"
MOST_ROLLBACKS = 5
# Settings that may differ when a run is resumed: the weights do not depend on them, except after a batch
# whose loss is not finite.
_MAY_CHANGE = (
    "epochs", "keep_last", "checkpoint_every_epochs", "checkpoint_every_steps", "monitor", "maximise",
    "nonfinite", "read_every", "survive_oom", "leak_bytes", "tensorboard", "log_gpu_stats_every_n_batches",
    "empty_cache_every_n_epochs", "empty_cache_every_n_batches",
)  # fmt: skip


class _RollBackError(Exception):
    """Leaves the epoch's loop; the trainer restores the epoch's start and leaves the batch out."""

    def __init__(self, place: tuple[int, int], finding: NonFiniteError) -> None:
        super().__init__(finding.given)
        self.place = place
        self.finding = finding


class _Lines(NamedTuple):
    """The part of a logger that `log_gpu_stats` uses."""

    info: Callable[[str], None]


@dataclass
class _Place:
    """Where a run is.

    Attributes:
        epoch: The current one.
        num_steps: Batches trained on, over the whole run.
        num_done: Batches of this epoch that are done.
        first_loss: Number of this epoch's first loss in the history.
        tally: Totals of this epoch.
        left_out: Epoch and batch of what rollbacks have left out.
        good: State at the epoch's beginning, for a rollback.
        num_rollbacks: So far.
        num_skipped: Updates that the step has skipped so far.
        saved_step: Step of the last checkpoint; -1 before the first.
        saved_at: Batch of this epoch after which a checkpoint was written.
        has_batch_size: Whether the size of a full batch is known.
        has_scheduled: Whether the scheduler was stepped.
        has_metrics: Whether validation was seen to have the monitored metric.
        has_warned: Whether a validation loss that is not finite was noted.
    """

    epoch: int = 0
    num_steps: int = 0
    num_done: int = 0
    first_loss: int = 0
    tally: EpochTally = field(default_factory=EpochTally)
    left_out: set[tuple[int, int]] = field(default_factory=set)
    good: dict[str, Any] | None = None
    num_rollbacks: int = 0
    num_skipped: int = 0
    saved_step: int = -1
    saved_at: int = 0
    has_batch_size: bool = False
    has_scheduled: bool = False
    has_metrics: bool = False
    has_warned: bool = False


class Trainer:
    """Trains a model; see the module's text.

    Args:
        model: Moved to `device`.
        train_loader: A stoker `Loader`, a torch DataLoader, or batches that can be iterated every epoch.
        val_loader: The same for validation, or None.
        criterion: `(outputs, targets) -> mean loss of the batch`; a module is moved to `device`.
        optimizer: Over the model's parameters.
        scheduler: Stepped after every update, or None.
        config: `TrainSettings`, `Settings` of a config file, or a mapping with the names of either.
        device: "cuda", "cuda:1" or "cpu"; the first GPU by default, else the CPU.
        gpu_augmentation: `GPUAugmentation` or a similar object, for training images only; validation uses
            its `validation()`.
        unpack: Batch to (inputs, targets); needed when fields have unusual names.
        metrics: Makes an accumulator with `update(outputs, targets)` and `compute()`.
        run_dir: Folder of the run log and checkpoints; None keeps nothing.
        identity: Values besides the settings that a checkpoint must have to be resumed here.
        progress: Is told about epochs, batches and notes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_loader: Any,
        val_loader: Any,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        config: TrainerConfig = None,
        device: str | torch.device | None = None,
        gpu_augmentation: Any = None,
        *,
        unpack: Unpack | None = None,
        metrics: Callable[[], Any] | None = None,
        run_dir: str | Path | None = None,
        identity: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.settings, unread = read_config(config, rates)
        self.ranks = Ranks.current()
        self.device = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model, norms = share_statistics(
            move_model(model, self.device), self.ranks, self.device
        )
        parallel = choose_parallel(self.model, self.ranks, self.device)
        check_parameters(model, optimizer, self.device)
        check_steps(optimizer, scheduler)
        if isinstance(criterion, torch.nn.Module):
            criterion = criterion.to(self.device)
        self.criterion, self.optimizer, self.scheduler = criterion, optimizer, scheduler
        self.history = History()
        self._progress = progress or Silent()
        self.gpu_augmentation = gpu_augmentation
        if gpu_augmentation is not None and self.ranks.are_several:  # each rank draws its own
            drawn = gpu_augmentation.state_dict()
            gpu_augmentation.load_state_dict(drawn | {"stream": self.ranks.rank})
        self._train = Feed(train_loader, self.device, unpack, gpu_augmentation, self.ranks)
        self._train.check_ranks()
        if val_loader is not None and val_loader is train_loader and self._train.is_stoker:
            raise InputError(
                "one Loader was given for training and for validation.",
                "a loader each: a Loader has one position, and validation is not augmented",
                "Loader(store, batch_size, samples=...) a second time",
            )
        plain = None if gpu_augmentation is None else gpu_augmentation.validation()
        self._val = (
            None if val_loader is None else Feed(val_loader, self.device, unpack, plain, self.ranks)
        )
        self._identity = dict(identity or {})
        self._folder = RunFolder(run_dir, self.settings, self.ranks)
        self._shutdown = Shutdown(self.ranks)
        self._at = _Place(has_batch_size=self._train.batch_size is not None)
        self._book = LossBook(self.device, self.settings.read_every, self.ranks)
        for line in unread:
            self.note(Note(line))
        self._make_step(self._make_parts(parallel, norms), tell=True)
        self._evaluator = Evaluator(
            self.model,
            criterion,
            metrics,
            self._precision,
            self.device,
            self.settings.survive_oom,
            self.note,
            self._update.give_way,
            self.ranks,
        )

    # -- setting up ------------------------------------------------------------------------

    def _make_parts(self, parallel: Parallel, norms: str | None) -> StepParts:
        """Choose precision, optimizer kernels and the module to call; note each choice with its reason."""
        settings, model = self.settings, self.model
        precision = choose_precision(settings.precision, self.device, model)
        self.note(Note(f"precision {precision.reason}", Topic.PRECISION))
        guarded = make_guarded(self.optimizer, self.device)
        self.note(Note(f"optimizer {guarded}", Topic.OPTIMIZER))
        if settings.activation_checkpointing:
            reason = checkpoint_activations(model).reason
            self.note(Note(f"activations {reason}", Topic.ACTIVATIONS))
        runner = parallel.wrap(model)
        if self.ranks.joined:
            self.note(Note(f"ranks {parallel.reason}", Topic.RANKS))
        if norms is not None:
            self.note(Note(norms, Topic.RANKS))
        if settings.compile:
            runner = cast(torch.nn.Module, torch.compile(runner))
        return StepParts(
            model,
            self.criterion,
            self.optimizer,
            precision,
            precision.make_scaler(self.device),
            self.device,
            settings.clip_norm,
            self._of_all(self._train.batch_size or 1),
            settings.accumulation_steps,
            make_recurrent_state(model, self._train.loader, self.device),
            None if runner is model else runner,
            parallel,
            self.ranks,
        )

    def _make_step(self, parts: StepParts, *, tell: bool = False) -> None:
        """Make the step and the update around it, captured if it can be; with `tell` note that."""
        step, asked = Step(parts), self.settings.capture
        shrink = self._train.shrink if self._train.is_chunked else None
        self._update = Update(step, self.settings.survive_oom, self.note, shrink)
        refusal = cannot_capture(asked, self._train, step)
        self._captured = (
            CapturedStep(step, self._train, self._update, self.note, asked == "on")
            if refusal is None
            else None
        )
        if not tell:
            return
        check_skipping(step, self.settings.nonfinite)
        if refusal is not None and asked == "on":
            raise refuse_eager(refusal)
        if self._val is None and self.settings.monitor != "loss":
            missing = f"without validation there is no {self.settings.monitor!r}"
            self.note(Note(f"{missing}: no checkpoint is the best"))
        self.note(
            step_note("captured: one CUDA graph", captured=True)
            if refusal is None
            else step_note(f"eager: {refusal}", captured=False)
        )
        if self.gpu_augmentation is not None:
            self._progress.say(AUGMENTED)
            self.history.told.append(Note(AUGMENTED))

    @property
    def _step(self) -> Step:
        return self._update.step

    @property
    def _precision(self) -> PrecisionChoice:
        return self._update.step.parts.precision

    @property
    def _epoch(self) -> int:
        return self._at.epoch

    @property
    def _tally(self) -> EpochTally:
        return self._at.tally

    def note(self, note: Note) -> None:
        """Keep a decision with its reason, show it, and write it to the run's log."""
        self.history.told.append(note)
        if self.ranks.is_first:
            self._progress.say(note.text)
        self._write("note", note.to_json())

    # -- running ---------------------------------------------------------------------------

    def fit(self, *, resume: bool = False) -> History:
        """Train for `config.epochs`; return what happened.

        Args:
            resume: Continue from the run folder's latest checkpoint, if there is one.
        """
        settings, shutdown = self.settings, self._shutdown
        shutdown.forget()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._precision.matmuls())
            stack.callback(shutdown.forget)  # a later call of `validate` must not end at once
            stack.enter_context(shutdown.signals())
            self._folder.open(stack, resume, self.history.told)
            is_resumed = resume and self.resume()
            if settings.seed is not None and not is_resumed and not self._at.num_steps:
                seed_rng(settings.seed + self.ranks.rank)
            leaks = LeakWatch.for_device(self.device, settings.leak_bytes)
            stack.push(self._keep_what_was_done)
            shutdown.agree()
            while self._at.epoch < settings.epochs and shutdown.reason is None:
                if self._run_epoch():
                    growth = None if leaks is None else leaks.after_epoch()
                    if growth is not None:
                        grown = {"grown_bytes": growth.grown_bytes}
                        self.note(Note(str(growth), Topic.MEMORY, grown))
                shutdown.agree()  # a signal may have come during validation
            every = settings.checkpoint_every_epochs
            if shutdown.reason is not None:
                if self._at.saved_step != self._at.num_steps:
                    self.save()
                self.history.ended = shutdown.reason
            elif self.history.epochs and every and self._at.epoch % every:
                self._save_epoch(self.history.epochs[-1])  # the interval left the last epoch out
            is_interrupted = shutdown.reason == "interrupted"
        if is_interrupted:
            raise KeyboardInterrupt
        return self.history

    def _save_epoch(self, report: EpochReport) -> None:
        self.save(report.metrics or {"loss": report.train_loss})

    def _keep_what_was_done(self, kind: type[BaseException] | None, *_: object) -> None:
        """Save what an error would lose. Not after a bad loss, and not between two batches of an update."""
        if kind is None or issubclass(kind, NonFiniteError | KeyboardInterrupt):
            return
        if self.ranks.are_several:  # saving is collective, and the others are elsewhere
            return
        at = self._at
        is_new = at.saved_step != at.num_steps > 0
        if is_new and not self._step.accumulation.num_batches:
            with contextlib.suppress(Exception):
                self.save()
                if self._folder.checkpoints is not None and self._train.position > at.num_done:
                    self.note(
                        Note(
                            f"batch {at.num_done} of epoch {at.epoch}, in which the error was "
                            "raised, is not in what was saved: a resumed run goes on behind it"
                        )
                    )

    def _run_epoch(self) -> bool:
        """Train and validate one epoch; False when it was cut short or rolled back."""
        at, settings = self._at, self.settings
        # True when a resumed run finished training this epoch but not its validation.
        if not at.tally.is_trained:
            if settings.nonfinite == "rollback":
                at.good = copy.deepcopy(self.state_dict())
            try:
                self._train_batches()
            except _RollBackError as found:
                self._roll_back(found)
                return False
            if not at.tally.is_trained:
                return False
            self._check_skipped()
        report = at.tally.report(at.epoch)
        if self._val is not None and not self._validate_epoch(report):
            return False
        at.epoch += 1
        at.tally = EpochTally()
        self.history.epochs.append(report)
        self._write("epoch", vars(report) | {"samples_per_second": report.samples_per_second})
        every = settings.checkpoint_every_epochs
        if every and at.epoch % every == 0:
            self._save_epoch(report)
        every = settings.empty_cache_every_n_epochs
        if every and at.epoch % every == 0:
            torch.cuda.empty_cache()
        return True

    def _validate_epoch(self, report: EpochReport) -> bool:
        """Validate the trained epoch. If the run is asked to end first, save and return False."""
        # A torch DataLoader draws from the global generators. A resumed run validates again, and must then
        # draw the same numbers.
        drawn = capture_rng(renew_cudnn=False)
        try:
            if self._shutdown.reason is not None:
                raise EvaluationStopped
            report.metrics = self.validate()
        except EvaluationStopped:
            restore_rng(drawn)
            self.save()
            self.note(Note(f"epoch {self._at.epoch} is trained; a resumed run validates it first"))
            return False
        except Exception:
            restore_rng(drawn)
            raise
        self._check_metrics(report.metrics)
        return True

    def _check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Raise if the monitored metric is missing; note once that the loss is not finite."""
        monitor = self.settings.monitor
        if not self._at.has_metrics and monitor not in metrics:
            raise InputError(
                f"monitor is {monitor!r}, and validation has no metric of that name.",
                ", ".join(metrics),
                "monitor='loss', and fit(resume=True) where the run has a folder",
            )
        self._at.has_metrics = True
        loss = metrics.get("loss", 0.0)
        if self._at.has_warned or math.isfinite(loss):
            return
        self._at.has_warned = True
        assert self._val is not None
        self.note(
            Note(
                f"the validation loss of epoch {self._at.epoch} is {loss}: the best checkpoint cannot be told "
                f"by it. {self._evaluator.explain(self._val)}",
                Topic.LOSS,
            )
        )

    def _check_skipped(self) -> None:
        """Note, or raise, that updates were skipped although every loss was finite."""
        skipped = self._step.num_skipped
        new, self._at.num_skipped = skipped - self._at.num_skipped, skipped
        told = sum(not math.isfinite(loss) for loss in self.history.losses[self._at.first_loss :])
        if new <= told:
            return
        finding = NonFiniteError(
            f"the gradients of {new - told} updates of epoch {self._at.epoch} were not finite although "
            "their losses were; these updates were left out.",
            "a loss with finite gradients",
            "look for sqrt, log or a division at 0 in the loss: torch.autograd.set_detect_anomaly(True)",
        )
        if self.settings.nonfinite == "stop":
            raise finding
        self.note(Note(finding.given, Topic.LOSS))

    def _roll_back(self, found: _RollBackError) -> None:
        """Restore the last good state; the batch is left out from now on."""
        assert self._at.good is not None
        self._at.num_rollbacks += 1
        if self._at.num_rollbacks > MOST_ROLLBACKS:
            raise found.finding
        left_out = self._at.left_out | {found.place}
        self._update.drop()
        self.load_state_dict(self._at.good)
        del self.history.losses[self._at.first_loss :]  # the state is that of the epoch's beginning
        self._at.left_out = left_out
        self._at.num_skipped = self._step.num_skipped  # the cause is known
        self.note(
            Note(
                f"{found.finding.given} Went back to epoch {self._at.epoch}, step {self._at.num_steps}; batch "
                f"{found.place[1]} of epoch {found.place[0]} is left out.",
                Topic.LOSS,
            )
        )

    def train_epoch(self) -> EpochReport:
        """Train on the remaining batches of the current epoch."""
        self._train_batches()
        return self._at.tally.report(self._at.epoch)

    def _train_batches(self) -> None:
        """Train on the remaining batches of the epoch, until it or the run ends."""
        at, shutdown, accumulation = self._at, self._shutdown, self._step.accumulation
        position = self._begin_epoch()
        works, tally, num_batches = self._works(), at.tally, self._train.num_batches
        left = None if num_batches is None else num_batches - position
        self._progress.start(f"epoch {at.epoch + 1}", left, "batches")
        since = time.perf_counter()
        while True:
            HEARTBEAT.mark("waiting for data", at.epoch, position)
            asked = time.perf_counter()
            try:
                work = next(works, None)
            except RuntimeError as error:  # memory ran out while a batch was being built
                if not self._train.can_begin_again:
                    raise
                self._update.survive(error)
                works = self._works()
                continue
            tally.waited_seconds += time.perf_counter() - asked
            if work is None:
                if not position:
                    raise no_batches(f"the training loader yielded no batch in epoch {at.epoch}.")
                tally.is_trained = True
                break
            HEARTBEAT.mark("in the step", at.epoch, position)
            if (at.epoch, position) in at.left_out:
                self._skip(work, position)
            else:
                if not at.has_batch_size:
                    self._set_batch_size(self._of_all(work.num_samples))
                    accumulation = self._step.accumulation
                if self._captured is not None:
                    loss, is_updated = self._captured.run(work), True
                else:
                    loss = self._update.add(work)
                    is_updated = accumulation.is_complete
                    if is_updated:
                        self._update.finish()
                if is_updated:
                    self._step_scheduler()
                step, at.num_steps = at.num_steps, at.num_steps + 1
                place, count = (at.epoch, position), work.num_samples
                self._collect(
                    self._book.note(step, loss, count, work.positions, place, work.num_together)
                )
            position += 1
            at.num_done = position
            since = tally.spend(since, time.perf_counter())
            self._after_batch(position)
            shutdown.look(at.num_steps)
            # Not between two batches of an update, whose gradients would be lost. And not after the last
            # batch: the epoch is then complete.
            if shutdown.reason and not accumulation.num_batches and position != num_batches:
                break
        if accumulation.num_batches:
            self._update.finish()
            self._step_scheduler()
        self._collect(self._book.flush())
        shutdown.agree()
        tally.spend(since, time.perf_counter())

    def _begin_epoch(self) -> int:
        """Prepare model, loader and totals for the epoch; return how many of its batches are done."""
        at, step = self._at, self._step
        self.model.train()
        step.parts.parallel.check(self.model)
        fill_momentum(self.optimizer)  # of parameters that were frozen until now
        self._train.set_epoch(at.epoch)
        self._book = LossBook(self.device, self.settings.read_every, self.ranks)
        at.first_loss = len(self.history.losses)
        position = at.saved_at = at.num_done = self._train.position
        if not position:
            at.tally = EpochTally()
            if step.parts.recurrent is not None:
                step.parts.recurrent.begin()
        at.tally.is_trained = False
        return position

    def _works(self) -> Iterator[Work]:
        """Return an iterator over the remaining work of the epoch."""
        return iter(self._captured.works() if self._captured is not None else self._train)

    def _skip(self, work: Work, position: int) -> None:
        """Leave a batch out that a rollback has named, and its draw with it."""
        if work.index is not None and self._train.augmentation is not None:
            self._train.augmentation.seek(self._at.epoch, position + 1)

    def _step_scheduler(self) -> None:
        """Step the scheduler, also after a skipped update; torch would warn about that."""
        if self.scheduler is None:
            return
        if self._at.has_scheduled:
            self.scheduler.step()
            return
        self._at.has_scheduled = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
            self.scheduler.step()

    def _set_batch_size(self, num_samples: int) -> None:
        """Use the first batch's size as the full one, if the loader does not tell it."""
        self._at.has_batch_size = True
        self._step.parts.nominal_batch = num_samples
        self._make_step(self._step.parts)

    def _of_all(self, batch_size: int) -> int:
        """Return the largest full batch of all ranks: averaged gradients need one common weight."""
        return self.ranks.largest(batch_size)[0]

    def _collect(self, arrived: list[StepLoss]) -> None:
        """Record losses that have arrived; handle one that is not finite."""
        for seen in arrived:
            self.history.losses.append(seen.loss)
            if not seen.is_finite:
                self._not_finite(seen)
                continue
            self._at.tally.add(seen.loss, seen.num_samples)
        if arrived and self._folder.log is not None:
            mean = float(np.mean([seen.loss for seen in arrived]))
            self._write("steps", {"loss": mean, "count": len(arrived)}, arrived[-1].step)

    def _not_finite(self, seen: StepLoss) -> None:
        finding = explain_batch(self._train.loader, seen, self._precision, self.ranks)
        self._write("nonfinite", {"message": finding.given}, seen.step)
        if self.settings.nonfinite == "skip":
            self.note(Note(f"{finding.given} The update was left out.", Topic.LOSS))
            return
        if self.settings.nonfinite == "rollback":
            raise _RollBackError(seen.place, finding)
        raise finding

    def _after_batch(self, position: int) -> None:
        """Do what is due after so many batches of the epoch."""
        settings = self.settings
        self._progress.advance()
        every = settings.empty_cache_every_n_batches
        if every and position % every == 0:
            torch.cuda.empty_cache()
        every = settings.log_gpu_stats_every_n_batches
        if every and position % every == 0:
            log_gpu_stats(_Lines(self._progress.say), self.device)
        every = settings.checkpoint_every_steps
        # Between two batches of an update its gradients would be lost: the checkpoint waits for it.
        if (
            every
            and position // every > self._at.saved_at // every
            and not self._step.accumulation.num_batches
        ):
            self._at.saved_at = position
            self.save()

    def validate(self) -> dict[str, float]:
        """Return the mean loss and the metrics over the validation loader; never augmented."""
        assert self._val is not None
        when = f"in epoch {self._at.epoch}"
        return self._evaluator.evaluate(self._val, when, self._shutdown.look_alone)

    # -- keeping ---------------------------------------------------------------------------

    def _write(self, event: str, values: Mapping[str, Any], step: int | None = None) -> None:
        at = self._at
        self._folder.write(event, values, at.num_steps if step is None else step, at.epoch)

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Write a checkpoint if a run folder is open. Waits for the losses before it, which must be finite."""
        self._collect(self._book.flush())
        checkpoints = self._folder.checkpoints
        if checkpoints is None:
            return
        HEARTBEAT.mark("saving", self._at.epoch)
        state = self.state_dict(keep=self.ranks.is_first)
        self.ranks.first_does(
            lambda: checkpoints.save(
                state, self._at.num_steps, self._at.epoch, dict(metrics or {}), self.identity
            )
        )
        self._at.saved_step = self._at.num_steps

    @property
    def identity(self) -> dict[str, Any]:
        """Values that a checkpoint must have to be resumed here, except those in `_MAY_CHANGE`."""
        kinds = {
            "model": plain_name(self.model),
            "optimizer": type(self.optimizer).__name__,
            "scheduler": type(self.scheduler).__name__,
        }
        return {"settings": self.settings.to_json(), **kinds, **self._identity}

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """Return the state that the rest of the run depends on; every rank must call it.

        Args:
            keep: Whether this rank needs it. If not, it only takes part in gathering sharded parameters.
        """
        at = self._at
        state = {
            "model": gather_whole(self.model.state_dict(), keep),
            "optimizer": gather_whole(self.optimizer.state_dict(), keep),
            "scaler": self._step.parts.scaler.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "loader": self._train.state_dict(),
            "left_out": [list(place) for place in sorted(at.left_out)],
            "augmentation": None,
            "carried": None,
            "rng": self._of_ranks(capture_rng()),
            "epoch": at.epoch,
            "tally": at.tally.state_dict(),
            "criterion": None,
            "full_batch": self._step.parts.nominal_batch if at.has_batch_size else None,
            "num_steps": at.num_steps,
        }
        if isinstance(self.criterion, torch.nn.Module):
            state["criterion"] = self.criterion.state_dict()
        if self.gpu_augmentation is not None:
            state["augmentation"] = self.gpu_augmentation.state_dict()
        if self._step.parts.recurrent is not None:
            state["carried"] = self._of_ranks(self._step.parts.recurrent.state_dict())
        return state

    def _of_ranks(self, value: Any) -> Any:
        """Return the values of all ranks as a list; the value itself if there is one rank."""
        return self.ranks.gather(value) if self.ranks.are_several else value

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        at = self._at
        full = state.get("full_batch")
        if full and self._train.batch_size is None and full != self._step.parts.nominal_batch:
            self._set_batch_size(int(full))
        at.has_batch_size = at.has_batch_size or bool(full)
        load_whole_model(self.model, state["model"])
        load_whole_optimizer(self.optimizer, state["optimizer"])
        make_guarded(self.optimizer, self.device)
        if isinstance(self.criterion, torch.nn.Module) and state.get("criterion") is not None:
            load_criterion(self.criterion, state["criterion"])
        if self._captured is not None:
            self._captured.forget()  # loading replaced the optimizer's tensors, which the graph writes
        if state["scaler"]:
            self._step.parts.scaler.load_state_dict(state["scaler"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        words = self._train.load_state_dict(state["loader"])
        if words is not None:
            self.note(Note(words))
        if self.gpu_augmentation is not None and state["augmentation"] is not None:
            own_draws = {"stream": self.ranks.rank} if self.ranks.are_several else {}
            self.gpu_augmentation.load_state_dict(dict(state["augmentation"]) | own_draws)
        recurrent, carried, ranks = self._step.parts.recurrent, state["carried"], self.ranks
        if recurrent is not None:
            own = (
                None
                if carried is None
                else recurrent.part_of(as_ranks(carried), ranks.rank, ranks.world_size)
            )
            recurrent.load_state_dict(own)
        self._restore_rng(as_ranks(state["rng"]), int(state["num_steps"]))
        at.left_out = {(int(epoch), int(batch)) for epoch, batch in state["left_out"]}
        at.epoch, at.num_steps = int(state["epoch"]), int(state["num_steps"])
        at.tally = EpochTally.of(state.get("tally"))

    def _restore_rng(self, states: Sequence[Mapping[str, Any]], num_steps: int) -> None:
        """Restore each rank's random generators; with another number of ranks, seed them anew."""
        if len(states) == self.ranks.world_size:
            restore_rng(states[self.ranks.rank])
            return
        seed_rng(
            hash((self.settings.seed or 0, num_steps, self.ranks.rank, self.ranks.world_size))
            % 2**63
        )
        self.note(
            Note(
                f"{len(states)} ranks had saved and {self.ranks.world_size} go on: dropout draws anew"
            )
        )

    def resume(self) -> bool:
        """Continue from the latest checkpoint of the run folder; False if there is none."""
        checkpoints = self._folder.checkpoints
        if checkpoints is None:
            raise InputError(
                "there is no run folder to resume from.",
                "a folder",
                "a trainer with a run_dir, and its fit(resume=True)",
            )
        with self.ranks.shared_fate():
            latest = checkpoints.latest()
        check_alike(
            self.ranks, {"the latest checkpoint": None if latest is None else latest.path.name}
        )
        if latest is None:
            self.note(Note("there is no checkpoint yet: beginning anew"))
            return False
        free = {f"settings.{name}" for name in _MAY_CHANGE}
        with self.ranks.shared_fate():
            loaded = checkpoints.load_for(self.identity, free=free)
        # A block of its own: loading a sharded model is collective.
        with self.ranks.shared_fate():
            self.load_state_dict(loaded.state)
        for change in loaded.changes:
            self.note(Note(change))
        # A run that is ended before its first step has nothing new to save.
        at = self._at
        at.saved_step = at.num_steps
        self.note(Note(f"resumed at epoch {at.epoch}, step {at.num_steps}", Topic.RESUMED))
        return True


__all__ = ["AUGMENTED", "EpochReport", "History", "NonFiniteError", "Trainer"]
