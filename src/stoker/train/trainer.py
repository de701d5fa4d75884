"""The `Trainer`: epochs of steps, validation, checkpoints, and a clean end whatever happens.

Enters: a model, loaders, a criterion, an optimizer. Leaves: trained weights, a `History`, a run log
and checkpoints in the run's folder. Costs: below 1 % over the bare loop. Losses are read in blocks; the
host does not wait for the device between them.

Success: `History.ended` is "done". SIGTERM saves and ends with "terminated". The first Ctrl-C finishes the
step, saves and raises KeyboardInterrupt; the second one ends at once. With one rank, the finished steps are saved
before an error is raised. A checkpoint is only written when every loss before it was finite.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from stoker.errors import InputError, StokerError
from stoker.loader.slabs import usable_device
from stoker.report import INCIDENTS, Note, Progress, RunEnd, Topic
from stoker.train.activations import checkpoint_activations
from stoker.train.arguments import Answers, check_arguments, check_fit
from stoker.train.batches import Feed, Unpack, Work
from stoker.train.checks import (
    check_given,
    check_parameters,
    check_reduction,
    check_scheduler,
    check_skipping,
    check_steps,
    describe_resting,
    move_model,
    resting_modules,
    set_mode,
)
from stoker.train.diagnosis import explain_batch, explain_growth, explain_skipped
from stoker.train.evaluation import EvaluationStopped, Evaluator, no_batches
from stoker.train.generators import capture_rng, restore_rng, seed_rng
from stoker.train.graphs.graphed_step import has_graphs
from stoker.train.graphs.reasons import refuse_eager, step_note
from stoker.train.graphs.trainer_step import CapturedPass, CapturedStep, cannot_capture
from stoker.train.heartbeat import HEARTBEAT
from stoker.train.history import EpochLines, EpochReport, EpochTally, History, call_weakly
from stoker.train.losses import LossBook, NonFiniteError, StepLoss
from stoker.train.memory import BASELINE_AFTER_SECONDS, LeakWatch, log_gpu_stats
from stoker.train.parallel import Parallel, choose_parallel, share_statistics
from stoker.train.precision import PrecisionChoice, choose_precision
from stoker.train.ranks import Ranks
from stoker.train.recurrent_state import make_recurrent_state
from stoker.train.run_folder import RunFolder
from stoker.train.run_state import Place, Resumable
from stoker.train.schedule import Interval, check_alone, choose_interval, describe, step_scheduler
from stoker.train.settings import CLIPPED, Configured, TrainerConfig, clips_unasked, read_config
from stoker.train.shutdown import Shutdown
from stoker.train.step import Step, StepParts, fill_momentum, make_guarded
from stoker.train.update import Update
from stoker.units import usable_count

AUGMENTED = "✓ GPU augmentation enabled"
MOST_ROLLBACKS = 5


class _RollBackError(Exception):
    """Raised to leave the epoch's loop: the trainer goes back to the epoch's start and skips the batch."""

    def __init__(self, place: tuple[int, int], finding: NonFiniteError) -> None:
        super().__init__(finding.given)
        self.place = place
        self.finding = finding


class Trainer(Configured, Resumable, Answers):
    """Trains a model; see the module's text.

    Args:
        model: Moved to `device`.
        train_loader: A stoker `Loader`, a torch DataLoader, or batches that can be iterated every epoch.
        val_loader: The same for validation, or None.
        criterion: `(outputs, targets) -> mean loss of the batch`; a module is moved to `device`.
        optimizer: Over the model's parameters.
        scheduler: Of the learning rate, or None.
        config: `TrainSettings`, `Settings` of a config file, or a mapping with the names of either.
        device: "cuda", "cuda:1" or "cpu"; the first GPU by default, else the CPU.
        gpu_augmentation: `GPUAugmentation` or a similar object, for training images only; validation uses
            its `validation()`.
        unpack: Batch to (inputs, targets); needed when fields have unusual names.
        metrics: Makes an accumulator with `update(outputs, targets)` and `compute()`.
        run_dir: Folder of the run log and checkpoints; None keeps nothing.
        identity: Values besides the settings that a checkpoint must have to be resumed here.
        progress: Is told about epochs, batches and notes.
        scheduler_interval: "update" or "epoch": after which of them the scheduler is stepped. By default after
            every update; after an epoch where its `step` needs the metric (`ReduceLROnPlateau`).
        **others: What others' trainers take is refused with what to type.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_loader: Any,
        val_loader: Any = None,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
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
        scheduler_interval: Interval | None = None,
        **others: Any,
    ) -> None:
        check_arguments(others)
        criterion, optimizer = check_given(model, criterion, optimizer)
        found = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
        rates = [float(rate) for rate in found if rate is not None]  # some choose it themselves
        self.settings, unread = read_config(config, rates)
        self.ranks = Ranks.current()
        self.device = usable_device(device)
        self.model, norms = share_statistics(
            move_model(model, self.device), self.ranks, self.device
        )
        parallel = choose_parallel(self.model, self.ranks, self.device)
        if isinstance(criterion, torch.nn.Module):
            criterion = criterion.to(self.device)
        # Ranks average the gradients of the model only: the criterion's parameters would drift apart.
        trained = None if self.ranks.joined else criterion
        check_parameters(model, optimizer, self.device, trained)
        check_steps(optimizer)
        check_scheduler(scheduler, run_dir is not None)
        self.criterion, self.optimizer, self.scheduler = criterion, optimizer, scheduler
        self.history = History()
        self._progress = progress or EpochLines(self.settings.epochs)
        self._train = Feed(train_loader, self.device, unpack, gpu_augmentation, self.ranks)
        self._train.check_ranks()
        self._draw_apart()
        self._train.expect_loss(self.criterion)
        self._interval = choose_interval(
            scheduler,
            scheduler_interval,
            self.settings,
            self._train.num_batches,
            val_loader is not None,
        )
        if val_loader is not None and val_loader is train_loader and self._train.is_stoker:
            raise InputError(
                "one Loader was given for training and for validation.",
                "a loader each: a Loader has one position, and validation is not augmented",
                "Loader(store, batch_size, samples=...) a second time",
            )
        self._val = None
        if val_loader is not None:
            self._val = Feed(val_loader, self.device, unpack, None, self.ranks)
        if gpu_augmentation is not None:
            self._settle_validation(gpu_augmentation)
        self._identity = dict(identity or {})
        self._folder = RunFolder(run_dir, self.settings, self.ranks)
        self._shutdown = Shutdown(self.ranks)
        # `unpack` may change the number of samples in a foreign batch, for example to two views of each.
        is_exact = self._train.is_stoker or self.ranks.joined
        self._at = Place(has_batch_size=is_exact and self._train.batch_size is not None)
        self._book = LossBook(self.device, self.settings.read_every, self.ranks)
        # The parts below must not reference the trainer: in a reference cycle, model and loaders of a finished run
        # stay in memory until Python's full garbage collection, which may come hundreds of short runs later.
        self._weak_note = call_weakly(self.note)
        self._first_lines = [*unread, *([CLIPPED] if clips_unasked(config) else [])]
        self._resting = resting_modules(self.model)
        if self._resting:
            self._first_lines.append(describe_resting(self._resting))
        together = self.settings.gradient_accumulation_steps * self.ranks.world_size
        given = (
            *self._first_lines,
            *check_reduction(criterion, together),
            *self._train.notes,
        )
        for line in (*given, *describe(scheduler, self._interval)):
            self.note(Note(line))
        self._make_step(self._make_parts(parallel, norms), tell=True)
        if gpu_augmentation is not None:
            where = ", on the CPU: the run has no GPU" if self.device.type == "cpu" else ""
            self._progress.say(f"{AUGMENTED}{where}")
            self.history.told.append(Note(f"{AUGMENTED}{where}"))
        self._evaluator = Evaluator(
            self.model,
            criterion,
            metrics,
            self._precision,
            self.device,
            self.settings.survive_oom,
            self._weak_note,
            self._update.give_way,
            self.ranks,
        )

    def __repr__(self) -> str:
        name, at, most = type(self.model).__name__, self._at.epoch, self.settings.epochs
        return f"Trainer({name} on {self.device}, {at} of {most} epochs)"

    # -- setting up ------------------------------------------------------------------------

    def _make_parts(self, parallel: Parallel, norms: str | None) -> StepParts:
        """Choose the precision, optimizer kernels and module to call; note each choice with its reason."""
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
        elif model._compiled_call_impl is not None and "torch.nn" in type(model).forward.__module__:
            # torch silently does not compile the `forward` of its own modules.
            kind = type(model).__name__
            advice = 'config={"compile": True} compiles it'
            self.note(Note(f"torch does not compile a {kind} by model.compile(): {advice}"))
        return StepParts(
            model,
            self.criterion,
            self.optimizer,
            precision,
            precision.make_scaler(self.device),
            self.device,
            settings.clip_norm,
            self._of_all(self._train.batch_size or 1),
            settings.gradient_accumulation_steps,
            make_recurrent_state(model, self._train.loader, self.device),
            None if runner is model else runner,
            parallel,
            self.ranks,
            self._train.pair_words,
        )

    def _make_step(self, parts: StepParts, *, tell: bool = False) -> None:
        """Make the step, captured if possible, and the update around it; with `tell`, note which it is."""
        step, asked = Step(parts), self.settings.capture
        shrink = self._train.shrink if self._train.is_chunked else None
        self._update = Update(step, self.settings.survive_oom, self._weak_note, shrink)
        refusal = cannot_capture(asked, self._train, step)
        kind = CapturedPass if parts.accumulation_steps > 1 else CapturedStep
        given = step, self._train, self._update, self._weak_note, asked == "on"
        self._captured = kind(*given) if refusal is None else None
        if not tell:
            return
        check_skipping(step, self.settings.nonfinite)
        if refusal is not None and asked == "on":
            raise refuse_eager(refusal)
        if self._val is None and self.settings.monitor != "loss":
            missing = f"without validation there is no {self.settings.monitor!r}"
            self.note(Note(f"{missing}: no checkpoint is the best"))
        if refusal is None:
            self.note(step_note(f"captured: {kind.what}", captured=True))
            return
        fallback = asked != "off" and has_graphs(self.device)
        self.note(step_note(f"eager: {refusal}", captured=False, fallback=fallback))

    @property
    def gpu_augmentation(self) -> Any:
        """Augmentation of the training images on the device, or None. May be replaced at any time.

        The new one is used from the next batch on. A captured step is then captured again, and validation uses
        the new one's `validation()`.
        """
        return self._train.augmentation

    @gpu_augmentation.setter
    def gpu_augmentation(self, augmentation: Any) -> None:
        self._train.use_augmentation(augmentation)
        self._draw_apart()
        self._settle_validation(augmentation)
        if self._captured is not None:
            self._captured.forget()  # its graph holds the old kernels
        named = "none" if augmentation is None else type(augmentation).__name__
        self.note(Note(f"augmentation from epoch {self._at.epoch} on: {named}"))

    def _draw_apart(self) -> None:
        """Make the augmentation draw different numbers on each rank."""
        augmentation: Any = self._train.augmentation
        if augmentation is not None and self.ranks.are_several:
            drawn = augmentation.state_dict()
            augmentation.load_state_dict(drawn | {"stream": self.ranks.rank})

    def _settle_validation(self, augmentation: Any) -> None:
        """Apply the augmentation's deterministic part to validation images, unless their loader augments them."""
        if self._val is not None and not self._val.augments_itself:
            self._val.use_augmentation(None if augmentation is None else augmentation.validation())

    @property
    def _precision(self) -> PrecisionChoice:
        return self._update.step.parts.precision

    def note(self, note: Note) -> None:
        """Keep a decision with its reason, show it, and write it to the run's log."""
        self.history.told.append(note)
        is_urgent = note.topic in (*INCIDENTS, Topic.STOPPED) or "unsaved" in note.values
        is_urgent = is_urgent or bool(note.values.get("fallback"))
        # Besides its epoch lines a run prints problems only. A `progress` that the user gave gets every note.
        if self.ranks.is_first and (is_urgent or not isinstance(self._progress, EpochLines)):
            self._progress.say(note.text)
        self._write("note", note.to_json())

    # -- running ---------------------------------------------------------------------------

    def fit(self, *given: Any, resume: bool = False, quiet: bool = False, **others: Any) -> History:
        """Train for `config.epochs` epochs; return the history of the run.

        Prints a line per epoch and every problem, unless the trainer was given a `progress`.

        Args:
            resume: Continue from the run folder's latest checkpoint, if there is one.
            quiet: Print nothing.
            *given: Refused, with an error that says what to type. The number of epochs belongs to `config`.
            **others: Refused as well.
        """
        check_fit(given, others)
        settings, shutdown, at = self.settings, self._shutdown, self._at
        shutdown.forget()
        self.history.ended = "done"
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._precision.alone(self.device))
            stack.callback(shutdown.forget)  # a later call of `validate` must not end at once
            stack.enter_context(shutdown.signals())
            self._folder.open(stack, resume, self.history.told)
            is_resumed = resume and self.resume()
            if settings.seed is not None and not is_resumed and not at.num_steps:
                seed_rng(settings.seed + self.ranks.rank)
            leaks = LeakWatch.for_device(self.device, settings.leak_bytes, BASELINE_AFTER_SECONDS)
            self._write("fit", {"epochs": settings.epochs})
            stack.push(self._write_end)
            stack.push(self._keep_what_was_done)
            if isinstance(self._progress, EpochLines) and self.ranks.is_first and not quiet:
                stack.enter_context(self._progress.shown(at.epoch))
                for line in self._first_lines:
                    self._progress.say(line)
                if self.history.fallback is not None:
                    self._progress.say(self.history.fallback.text)
                if at.epoch >= settings.epochs:
                    self._progress.say(f"{at.epoch} epochs are trained: train_epoch() adds one")
            shutdown.agree()
            first_step = at.num_steps
            while at.epoch < settings.epochs and shutdown.reason is None and not self._is_over:
                if self._run_epoch():
                    growth = None if leaks is None else leaks.after_epoch()
                    if growth is not None:
                        grown = {"grown_bytes": growth.grown_bytes}
                        self.note(Note(str(growth), Topic.MEMORY, grown))
                shutdown.agree()  # a signal may have come during validation
            every = settings.checkpoint_every_epochs
            if shutdown.reason is not None:
                if at.saved_step != at.num_steps:
                    self.save()
                self.history.ended = shutdown.reason
            elif at.num_done and at.num_steps > first_step and at.tally.num_samples:
                self._end_within_epoch()
            elif self.history.epochs and every and at.epoch % every:
                self._save_epoch(self.history.epochs[-1])  # the interval left the last epoch out
            is_interrupted = shutdown.reason == "interrupted"
        if is_interrupted:
            raise KeyboardInterrupt
        return self.history

    @property
    def _is_over(self) -> bool:
        """Whether the run has reached `max_steps`, or has stopped improving for `patience` epochs."""
        settings, at = self.settings, self._at
        if settings.max_steps is not None and at.num_steps >= settings.max_steps:
            return True
        return bool(settings.patience) and at.stall.num_epochs >= settings.patience

    def _end_within_epoch(self) -> None:
        """Validate, report and save the part of an epoch that was trained when `max_steps` ended the run.

        A resumed run with a larger `max_steps` continues within the epoch.
        """
        set_mode(self.optimizer, training=False)
        report = self._at.tally.report(self._at.epoch)
        if self._val is not None:
            drawn = capture_rng(renew_cudnn=False)
            # By a signal: there are no validation metrics.
            with contextlib.suppress(EvaluationStopped):
                report.metrics = self.validate()
            restore_rng(drawn)
        self._tell_epoch(report)
        self._save_epoch(report)

    def _write_end(self, kind: type[BaseException] | None, error: Any, *_: object) -> None:
        """Write how the run ended to its log."""
        end = RunEnd(self.history.ended) if kind is None else RunEnd.by(error)
        with contextlib.suppress(StokerError):  # a full disk was reported by the first error
            self._write("end", {"ended": end.ended, "error": end.error})

    def _save_epoch(self, report: EpochReport) -> None:
        self.save(report.metrics or {"loss": report.train_loss})

    def _keep_what_was_done(self, kind: type[BaseException] | None, *_: object) -> None:
        """Save the finished steps when an error ends `fit`; not after a bad loss or within an update."""
        if kind is None or issubclass(kind, NonFiniteError | KeyboardInterrupt):
            return
        if self.ranks.are_several:  # saving is collective, and the others do not save now
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
                            "raised, is not in what was saved: a resumed run continues after it"
                        )
                    )

    def _run_epoch(self, *, alone: bool = False) -> bool:
        """Train and validate one epoch; False when it was cut short or rolled back.

        Args:
            alone: Whether to leave out what `fit` does between epochs: validation, checkpoints, early stopping.
        """
        at, settings = self._at, self.settings
        # True when a resumed run finished training this epoch but not its validation.
        if not at.tally.is_trained:
            if settings.nonfinite == "rollback":
                at.good = copy.deepcopy(self.state_dict())
            try:
                is_trained = self._train_batches()
            except _RollBackError as found:
                self._roll_back(found)
                return False
            if not is_trained:
                return False
            self._check_skipped()
            set_mode(self.optimizer, training=False)
        report = at.tally.report(at.epoch)
        if self._val is not None and not alone and not self._validate_epoch(report):
            return False
        self._step_scheduler("epoch", report)
        at.epoch += 1
        at.tally = EpochTally()
        self._tell_epoch(report)
        if alone:
            return True
        self._watch(report)
        every = settings.checkpoint_every_epochs
        if every and at.epoch % every == 0:
            self._save_epoch(report)
        every = settings.empty_cache_every_n_epochs
        if every and at.epoch % every == 0:
            torch.cuda.empty_cache()
        return True

    def _tell_epoch(self, report: EpochReport) -> None:
        """Keep an epoch's report, write it to the log, and print it."""
        report.growth = self._at.trend.growth
        if self.history.fallback is not None:
            report.is_fallback = True
            report.slowdown = self.history.fallback.values.get("slowdown")
        self.history.epochs.append(report)
        self._write("epoch", vars(report) | {"samples_per_second": report.samples_per_second})
        if isinstance(self._progress, EpochLines):
            self._progress.end_epoch(report)
        for feed in filter(None, (self._train, self._val)):
            if words := feed.new_broken():
                text = f"{len(words)} pictures could not be decoded and were left out or replaced"
                self.note(Note(text, Topic.DATA, {"broken": words}))

    def _watch(self, report: EpochReport) -> None:
        """Note that the loss grows from epoch to epoch, or that the monitored metric has stalled."""
        settings, at = self.settings, self._at
        num_rising = at.trend.end_epoch(report.train_loss)
        if num_rising:
            self.note(
                Note(
                    f"the loss has grown in {num_rising} epochs one after the other, to {report.train_loss:.4g}: "
                    "a lower learning rate, or clip_norm=1.0",
                    Topic.LOSS,
                    {"rising_epochs": num_rising},
                )
            )
        score = self._score(report)
        if score is not None:
            at.stall.add(-score if settings.maximise else score, settings.min_delta or 0.0)
        if settings.patience and at.stall.num_epochs >= settings.patience:
            self.note(
                Note(
                    f"stopped early: {settings.monitor} has not improved for {at.stall.num_epochs} epochs",
                    Topic.STOPPED,
                    {"monitor": settings.monitor, "epochs": at.stall.num_epochs},
                )
            )

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
        """Report updates that were skipped although their losses were finite: a note, or an error for "stop"."""
        skipped = self._step.num_skipped
        new, self._at.num_skipped = skipped - self._at.num_skipped, skipped
        told = sum(
            not math.isfinite(loss) for loss in self.history.step_losses[self._at.first_loss :]
        )
        if new <= told:
            return
        finding = explain_skipped(new - told, self._at.epoch)
        if self.settings.nonfinite == "stop":
            raise finding
        self.note(Note(finding.given, Topic.LOSS))

    def _roll_back(self, found: _RollBackError) -> None:
        """Restore the state of the epoch's start, and skip the batch from now on."""
        assert self._at.good is not None
        self._at.num_rollbacks += 1
        if self._at.num_rollbacks > MOST_ROLLBACKS:
            raise found.finding
        left_out = self._at.left_out | {found.place}
        self._update.drop()
        self.load_state_dict(self._at.good)
        # The state is that of the epoch's beginning.
        del self.history.step_losses[self._at.first_loss :]
        self._at.left_out = left_out
        self._at.num_skipped = self._step.num_skipped  # the cause is known
        self.note(
            Note(
                f"{found.finding.given} Went back to epoch {self._at.epoch}, step {self._at.num_steps}; batch "
                f"{found.place[1]} of epoch {found.place[0]} is left out.",
                Topic.LOSS,
            )
        )

    def train_epoch(self, epoch: int | None = None) -> EpochReport:
        """Train one epoch without validation, for a training loop of your own.

        Only `fit` opens the run folder, writes checkpoints and prints. `validate` may be called between epochs;
        `save` writes nothing until `fit` has opened the run folder.

        Args:
            epoch: Number of the epoch, from 0; by default the next one.

        Returns:
            The report of the epoch, which is also in `history`.
        """
        at = self._at
        if self._val is not None:
            check_alone(self.scheduler)
        if epoch is not None and epoch != at.epoch:
            at.epoch, at.tally = usable_count("epoch", epoch, least=0), EpochTally()
        number = at.epoch
        with self._precision.alone(self.device):
            while not self._run_epoch(alone=True) and not self._is_over:  # again after a rollback
                pass
        return self.history.epochs[-1] if at.epoch != number else at.tally.report(number)

    def _train_batches(self) -> bool:
        """Train on the remaining batches of the epoch; return False if the run ends before the epoch does."""
        at, shutdown, accumulation = self._at, self._shutdown, self._step.accumulation
        position, most = self._begin_epoch(), self.settings.max_steps
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
                if not at.has_batch_size or work.num_samples > self._step.parts.nominal_batch:
                    self._set_batch_size(work.num_samples)
                    accumulation = self._step.accumulation
                loss = (self._update.add if self._captured is None else self._captured.run)(work)
                is_updated = accumulation.steps == 1 or accumulation.is_complete
                if accumulation.is_complete:  # `CapturedStep` finishes its update itself
                    self._update.finish()
                if is_updated:
                    self._step_scheduler("update")
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
            is_over = shutdown.reason or (most is not None and at.num_steps >= most)
            if is_over and not accumulation.num_batches and position != num_batches:
                break
        if accumulation.num_batches:
            self._update.finish()
            self._step_scheduler("update")
        self._collect(self._book.flush())
        shutdown.agree()
        tally.spend(since, time.perf_counter())
        return tally.is_trained

    def _begin_epoch(self) -> int:
        """Prepare model, loader and totals for the epoch; return how many of its batches are done."""
        at, step = self._at, self._step
        self._resting = resting_modules(self.model) if self.model.training else self._resting
        self.model.train()
        for module in self._resting.values():
            module.training = False
        self._watch_numbers()
        step.parts.parallel.check(self.model)
        set_mode(self.optimizer, training=True)
        if step.guarded:
            make_guarded(self.optimizer, self.device)  # of groups that were added since
        fill_momentum(self.optimizer)  # of parameters that were frozen until now
        self._train.set_epoch(at.epoch)
        self._book = LossBook(self.device, self.settings.read_every, self.ranks)
        self.history.leave_early_losses()
        at.first_loss = len(self.history.step_losses)
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
        """Skip a batch that a rollback has excluded, and the augmentation's draws for it."""
        if work.index is not None and self._train.augmentation is not None:
            self._train.augmentation.seek(self._at.epoch, position + 1)

    def _step_scheduler(self, interval: Interval, report: EpochReport | None = None) -> None:
        """Step the scheduler if it is due, also after a skipped update; torch would warn about that."""
        if self.scheduler is None or interval != self._interval:
            return
        score = None if report is None else self._score(report)
        step_scheduler(self.scheduler, score, self._at.epoch + 1, not self._at.has_scheduled)
        self._at.has_scheduled = True

    def _score(self, report: EpochReport) -> float | None:
        """Return the monitored metric of an epoch; without validation the loss of training; None if there is none."""
        score = report.metrics.get(self.settings.monitor)
        return report.train_loss if score is None and self.settings.monitor == "loss" else score

    def _set_batch_size(self, num_samples: int) -> None:
        """Take the size of this batch as that of a full one: it is the first batch, or larger than a full one.

        A resumed run may begin with the short last batch of an epoch. An update in progress keeps its size.
        """
        is_known, self._at.has_batch_size = self._at.has_batch_size, True
        full = num_samples if is_known else self._of_all(num_samples)
        parts = self._step.parts
        may_change = not is_known or not (self.ranks.joined or self._step.accumulation.num_batches)
        if may_change and full != parts.nominal_batch:
            parts.nominal_batch = full
            self._make_step(parts)

    def _of_all(self, batch_size: int) -> int:
        """Return the largest batch size of all ranks: averaged gradients need one common weight."""
        return self.ranks.largest(batch_size)[0]

    def _collect(self, arrived: list[StepLoss]) -> None:
        """Record losses that have arrived on the host; handle those that are not finite."""
        for seen in arrived:
            self.history.step_losses.append(seen.loss)
            if not seen.is_finite:
                self._not_finite(seen)
                continue
            self._at.tally.add(seen.loss, seen.num_samples)
        if not arrived:
            return
        mean = float(np.mean([seen.loss for seen in arrived]))
        growth = self._at.trend.add(mean)
        if growth is not None:
            self.note(explain_growth(growth, mean, self._at.trend.first, arrived[-1].step))
        if self._folder.log is not None:
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
        """Do the periodic work that is due after `position` batches of the epoch."""
        settings = self.settings
        self._progress.advance()
        if not self._can_save and not self._step.accumulation.num_batches:
            self._check_saving()
        every = settings.empty_cache_every_n_batches
        if every and position % every == 0:
            torch.cuda.empty_cache()
        every = settings.log_gpu_stats_every_n_batches
        if every and position % every == 0:
            log_gpu_stats(SimpleNamespace(info=self._progress.say), self.device)
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
        with self._without_draws(), self._precision.alone(self.device):
            return self._evaluator.evaluate(self._val, when, self._shutdown.look_alone)

    # -- keeping ---------------------------------------------------------------------------

    def _write(self, event: str, values: Mapping[str, Any], step: int | None = None) -> None:
        at = self._at
        self._folder.write(event, values, at.num_steps if step is None else step, at.epoch)


__all__ = ["AUGMENTED", "EpochReport", "History", "NonFiniteError", "Trainer"]
