"""The `Trainer`: epochs of steps, validation, checkpoints, and a clean end whatever happens.

Enters: a model, loaders, a criterion, an optimizer. Leaves: trained weights, a `History`, a run log
and checkpoints in the run's folder. Costs: below 1 % over the bare loop; losses are read in blocks,
nothing waits for the device in between.

Ending: SIGTERM saves and ends with `History.ended == "terminated"`; the first Ctrl-C finishes the
step, saves and raises KeyboardInterrupt, the second one ends at once. A checkpoint is only written
when every loss before it was finite.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from stoker.errors import InputError
from stoker.loader.slabs import usable_device
from stoker.report import Note, Progress, RunLog, Silent, Topic, open_tensorboard
from stoker.train.activations import checkpoint_activations
from stoker.train.batches import Feed, Unpack, Work
from stoker.train.capture import CapturedStep, cannot_capture, refuse_eager, step_note
from stoker.train.carry import make_carry
from stoker.train.checkpoint import Checkpoints
from stoker.train.diagnosis import explain_batch
from stoker.train.ending import Ending
from stoker.train.fitness import (
    check_parameters,
    check_skipping,
    check_steps,
    load_criterion,
    move_model,
)
from stoker.train.generators import capture_rng, restore_rng, seed_rng
from stoker.train.history import EpochReport, EpochTally, History
from stoker.train.judging import Judge, JudgingStopped, no_batches
from stoker.train.lookout import LOOKOUT
from stoker.train.losses import LossBook, NonFiniteError, StepLoss
from stoker.train.memory import CacheEmptier, LeakWatch, log_gpu_stats
from stoker.train.parallel import (
    choose_parallel,
    gather_whole,
    load_whole_model,
    load_whole_optimizer,
    plain_name,
    share_statistics,
)
from stoker.train.precision import choose_precision
from stoker.train.ranks import Ranks, as_ranks, check_alike
from stoker.train.run_lock import RunLock
from stoker.train.settings import TrainerConfig, read_config
from stoker.train.step import (
    Step,
    StepParts,
    fill_momentum,
    make_guarded,
)
from stoker.train.window import Window

AUGMENTED = "✓ GPU augmentation enabled"
MOST_ROLLBACKS = 5
# What a run may be told otherwise when it goes on: the weights it arrives at do not depend on it, but for
# batches whose loss is not finite.
_MAY_CHANGE = (
    "epochs", "keep_last", "checkpoint_every_epochs", "checkpoint_every_steps", "monitor", "maximise",
    "nonfinite", "read_every", "survive_oom", "leak_bytes", "tensorboard", "log_gpu_stats_every_n_batches",
    "empty_cache_every_n_epochs", "empty_cache_every_n_batches",
)  # fmt: skip


class _RollBackError(Exception):
    """Leaves the epoch's loop; the trainer goes back and tries again without the batch."""

    def __init__(self, place: tuple[int, int], finding: NonFiniteError) -> None:
        super().__init__(finding.given)
        self.place = place
        self.finding = finding


class _Lines(NamedTuple):
    """A logger, as far as `log_gpu_stats` needs one."""

    info: Callable[[str], None]


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
        gpu_augmentation: `GPUAugmentation` or its kin, for training images only; validation gets
            its `validation()`.
        unpack: Batch to (inputs, targets); needed when fields have unusual names.
        metrics: Makes an accumulator with `update(outputs, targets)` and `compute()`.
        run_dir: Folder of the run log and checkpoints; None keeps nothing.
        identity: What a checkpoint must agree with to be resumed here, besides the settings.
        progress: Who wants to know how far it is.
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
        self.model = move_model(model, self.device)
        self.model, self._norms = share_statistics(self.model, self.ranks, self.device)
        self.parallel = choose_parallel(self.model, self.ranks, self.device)
        check_parameters(model, optimizer, self.device)
        check_steps(optimizer, scheduler)
        if isinstance(criterion, torch.nn.Module):
            criterion = criterion.to(self.device)
        self.criterion, self.optimizer, self.scheduler = criterion, optimizer, scheduler
        self.history = History()
        self._progress = progress or Silent()
        self._metrics = metrics
        self.gpu_augmentation = gpu_augmentation
        if gpu_augmentation is not None and self.ranks.are_several:  # every rank draws its own
            drawn = gpu_augmentation.state_dict()
            gpu_augmentation.load_state_dict(drawn | {"stream": self.ranks.rank})
        self._train = Feed(train_loader, self.device, unpack, gpu_augmentation, self.ranks)
        self._train.check_ranks()
        if val_loader is not None and val_loader is train_loader and self._train.is_stoker:
            raise InputError(
                "one Loader was given for training and for validation.",
                "a loader each: a Loader has one place, and validation is not augmented",
                "Loader(store, batch_size, samples=...) a second time",
            )
        plain = None if gpu_augmentation is None else gpu_augmentation.validation()
        self._val = (
            None if val_loader is None else Feed(val_loader, self.device, unpack, plain, self.ranks)
        )
        self._identity = dict(identity or {})
        self._folder = None if run_dir is None else Path(run_dir)
        self._checkpoints: Checkpoints | None = None
        self._log: RunLog | None = None
        self._epoch = 0
        self._num_steps = 0
        self._ending = Ending(self.ranks)
        self._saved_at = 0
        self._left_out: set[tuple[int, int]] = set()
        self._has_scheduled = False
        self._num_done = 0
        self._good: dict[str, Any] | None = None
        self._book = LossBook(self.device, self.settings.read_every, self.ranks)
        self._tally = EpochTally()
        self._has_judged = self._has_warned = False
        self._first_loss = self._num_skipped = self._num_rollbacks = 0
        self._saved_step = -1
        self._has_batch_size = self._train.batch_size is not None
        self._prepare(unread)

    # -- setting up ------------------------------------------------------------------------

    def _prepare(self, unread: Sequence[str]) -> None:
        settings = self.settings
        for line in unread:
            self.note(Note(line))
        self._precision = choose_precision(settings.precision, self.device, self.model)
        guarded = make_guarded(self.optimizer, self.device)
        self.note(Note(f"precision {self._precision.reason}", Topic.PRECISION))
        self.note(Note(f"optimizer {guarded}", Topic.OPTIMIZER))
        model = self.model
        if settings.activation_checkpointing:
            reason = checkpoint_activations(model).reason
            self.note(Note(f"activations {reason}", Topic.ACTIVATIONS))
        runner = self.parallel.wrap(model)
        if self.ranks.joined:
            self.note(Note(f"ranks {self.parallel.reason}", Topic.RANKS))
        if self._norms is not None:
            self.note(Note(self._norms, Topic.RANKS))
        if settings.compile:
            runner = cast(torch.nn.Module, torch.compile(runner))
        parts = StepParts(
            model,
            self.criterion,
            self.optimizer,
            self._precision,
            self._precision.make_scaler(self.device),
            self.device,
            settings.clip_norm,
            self._of_all(self._train.batch_size or 1),
            settings.accumulation_steps,
            make_carry(self.model, self._train.loader, self.device),
            None if runner is model else runner,
            self.parallel,
            self.ranks,
        )
        refusal = self._make_step(parts)
        check_skipping(self._step, settings.nonfinite)
        if refusal is not None and settings.capture == "on":
            raise refuse_eager(refusal)
        self._judge = Judge(
            self.model,
            self.criterion,
            self._metrics,
            self._precision,
            self.device,
            settings.survive_oom,
            self.note,
            self._give_way,
            self.ranks,
        )
        if self._val is None and settings.monitor != "loss":
            self.note(
                Note(
                    f"without validation there is no {settings.monitor!r}: no checkpoint is the best"
                )
            )
        self.note(
            step_note("captured: one CUDA graph", captured=True)
            if refusal is None
            else step_note(f"eager: {refusal}", captured=False)
        )
        if self.gpu_augmentation is not None:
            self._progress.say(AUGMENTED)
            self.history.told.append(Note(AUGMENTED))

    def _make_step(self, parts: StepParts) -> str | None:
        """Make the step, the window around it and its captured form; return why there is none."""
        self._step = Step(parts)
        shrink = self._train.shrink if self._train.is_chunked else None
        self._window = Window(self._step, self.settings.survive_oom, self.note, shrink)
        asked = self.settings.capture
        refusal = cannot_capture(asked, self._train, self._step)
        self._captured = (
            CapturedStep(self._step, self._train, self._window, self.note, asked == "on")
            if refusal is None
            else None
        )
        return refusal

    def _give_way(self) -> bool:
        """Let the training data give memory back, for validation."""
        return self._window.give_way()

    def note(self, note: Note) -> None:
        """Keep a choice with its reason, say it, and write it to the run's log."""
        self.history.told.append(note)
        if self.ranks.is_first:
            self._progress.say(note.text)
        self._write("note", note.to_json())

    # -- running ---------------------------------------------------------------------------

    def fit(self, *, resume: bool = False) -> History:
        """Train for `config.epochs`; return what happened.

        Args:
            resume: Go on from the run folder's latest checkpoint, if there is one.
        """
        self._ending.forget()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._precision.matmuls())
            stack.callback(self._ending.forget)  # a later call of `validate` is not to end
            stack.enter_context(self._ending.signals())
            if self._folder is not None:
                self._open_folder(stack, resume)
            settings = self.settings
            is_resumed = resume and self.resume()
            if settings.seed is not None and not is_resumed and not self._num_steps:
                seed_rng(settings.seed + self.ranks.rank)
            leaks = LeakWatch.for_device(self.device, settings.leak_bytes)
            cache = CacheEmptier(
                settings.empty_cache_every_n_epochs, settings.empty_cache_every_n_batches
            )
            stack.push(self._keep_what_was_done)
            self._ending.agree()
            while self._epoch < settings.epochs and self._ending.reason is None:
                if self._run_epoch(cache):
                    cache.after_epoch(self._epoch)
                    growth = None if leaks is None else leaks.after_epoch()
                    if growth is not None:
                        self.note(
                            Note(str(growth), Topic.MEMORY, {"grown_bytes": growth.grown_bytes})
                        )
                self._ending.agree()  # validation takes long: a signal in it ends the run here
            if self._ending.reason is None:
                self._save_the_last()
            if self._ending.reason is not None:
                if self._saved_step != self._num_steps:
                    self.save()
                self.history.ended = self._ending.reason
            is_interrupted = self._ending.reason == "interrupted"
        if is_interrupted:
            raise KeyboardInterrupt
        return self.history

    def _save_the_last(self) -> None:
        """Save the end of a run whose last epoch no checkpoint holds."""
        epochs, every = self.history.epochs, self.settings.checkpoint_every_epochs
        if epochs and every and self._epoch % every:
            self._save_epoch(epochs[-1])

    def _save_epoch(self, report: EpochReport) -> None:
        self.save(report.metrics or {"loss": report.train_loss})

    def _keep_what_was_done(self, kind: type[BaseException] | None, *_: object) -> None:
        """Save what an error would lose, unless the run itself went wrong or is in mid-window."""
        if kind is None or issubclass(kind, NonFiniteError | KeyboardInterrupt):
            return
        if self.ranks.are_several:  # the others are elsewhere; the last checkpoint is of all
            return
        is_new = self._saved_step != self._num_steps > 0
        if is_new and not self._step.window.num_batches:
            with contextlib.suppress(Exception):
                self.save()
                if self._checkpoints is not None and self._train.position > self._num_done:
                    self.note(
                        Note(
                            f"batch {self._num_done} of epoch {self._epoch}, in which the error was "
                            "raised, is not in what was saved: a resumed run goes on behind it"
                        )
                    )

    def _run_epoch(self, cache: CacheEmptier) -> bool:
        """Train and validate one epoch; False when it was cut short."""
        # It is trained where a run that ended before its validation goes on.
        if not self._tally.is_trained and not self._train_to_end(cache):
            return False
        report = self._tally.report(self._epoch)
        if self._val is not None and not self._judge_epoch(report):
            return False
        self._epoch += 1
        self._tally = EpochTally()
        self.history.epochs.append(report)
        self._write("epoch", vars(report) | {"samples_per_second": report.samples_per_second})
        every = self.settings.checkpoint_every_epochs
        if every and self._epoch % every == 0:
            self._save_epoch(report)
        return True

    def _train_to_end(self, cache: CacheEmptier) -> bool:
        """Train the rest of the epoch; False when it was cut short or rolled back."""
        if self.settings.nonfinite == "rollback":
            self._good = copy.deepcopy(self.state_dict())
        try:
            self.train_epoch(cache)
        except _RollBackError as found:
            self._roll_back(found)
            return False
        if self._tally.is_trained:
            self._check_skipped()
        return self._tally.is_trained

    def _judge_epoch(self, report: EpochReport) -> bool:
        """Validate the trained epoch; where the run is to end first, save it for later and return False."""
        # A torch DataLoader draws from the global generators, and a resumed run validates once more.
        drawn = capture_rng(renew_cudnn=False)
        try:
            if self._ending.reason is not None:
                raise JudgingStopped
            report.metrics = self.validate()
        except JudgingStopped:
            restore_rng(drawn)
            self.save()
            self.note(Note(f"epoch {self._epoch} is trained; a resumed run validates it first"))
            return False
        except Exception:
            restore_rng(drawn)
            raise
        self._check_metrics(report.metrics)
        return True

    def _check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Raise where the monitored metric is not among them; say once that the loss is not finite."""
        monitor = self.settings.monitor
        if not self._has_judged and monitor not in metrics:
            raise InputError(
                f"monitor is {monitor!r}, and validation has no metric of that name.",
                ", ".join(metrics),
                "monitor='loss', and fit(resume=True) where the run has a folder",
            )
        self._has_judged = True
        loss = metrics.get("loss", 0.0)
        if self._has_warned or math.isfinite(loss):
            return
        self._has_warned = True
        assert self._val is not None
        self.note(
            Note(
                f"the validation loss of epoch {self._epoch} is {loss}: the best checkpoint cannot be told "
                f"by it. {self._judge.explain(self._val)}",
                Topic.LOSS,
            )
        )

    def _check_skipped(self) -> None:
        """Say or raise that updates were left out although every loss was finite."""
        skipped = self._step.num_skipped
        new, self._num_skipped = skipped - self._num_skipped, skipped
        told = sum(not math.isfinite(loss) for loss in self.history.losses[self._first_loss :])
        if new <= told:
            return
        finding = NonFiniteError(
            f"the gradients of {new - told} updates of epoch {self._epoch} were not finite although "
            "their losses were; these updates were left out.",
            "a loss with finite gradients",
            "look for sqrt, log or a division at 0 in the loss: torch.autograd.set_detect_anomaly(True)",
        )
        if self.settings.nonfinite == "stop":
            raise finding
        self.note(Note(finding.given, Topic.LOSS))

    def _roll_back(self, found: _RollBackError) -> None:
        """Go back to the last good state; the batch is left out from now on."""
        assert self._good is not None
        self._num_rollbacks += 1
        if self._num_rollbacks > MOST_ROLLBACKS:
            raise found.finding
        left_out = self._left_out | {found.place}
        self._window.drop()
        self.load_state_dict(self._good)
        del self.history.losses[self._first_loss :]  # the state is that of the epoch's beginning
        self._left_out = left_out
        self._num_skipped = self._step.num_skipped  # the cause is known
        self.note(
            Note(
                f"{found.finding.given} Went back to epoch {self._epoch}, step {self._num_steps}; batch "
                f"{found.place[1]} of epoch {found.place[0]} is left out.",
                Topic.LOSS,
            )
        )

    def train_epoch(self, cache: CacheEmptier | None = None) -> EpochReport:
        """Train on the rest of the current epoch."""
        self.model.train()
        self.parallel.check(self.model)
        fill_momentum(self.optimizer)  # of parameters that were frozen until now
        self._train.set_epoch(self._epoch)
        self._first_loss = len(self.history.losses)
        position = self._saved_at = self._num_done = self._train.position
        if self._step.parts.carry is not None and not position:
            self._step.parts.carry.begin()
        works = self._works()
        self._book = LossBook(self.device, self.settings.read_every, self.ranks)
        tally = self._tally = self._tally if position else EpochTally()
        tally.is_trained = False
        num_batches = self._train.num_batches
        left = None if num_batches is None else num_batches - position
        self._progress.start(f"epoch {self._epoch + 1}", left, "batches")
        since = time.perf_counter()
        while True:
            LOOKOUT.mark("waiting for data", self._epoch, position)
            asked = time.perf_counter()
            try:
                work = next(works, None)
            except RuntimeError as error:
                works = self._begin_again(error)
                continue
            tally.waited_seconds += time.perf_counter() - asked
            if work is None:
                if not position:
                    raise no_batches(
                        f"the training loader yielded no batch in epoch {self._epoch}."
                    )
                tally.is_trained = True
                break
            LOOKOUT.mark("in the step", self._epoch, position)
            self._train_on(work, position)
            position += 1
            self._num_done = position
            since = tally.spend(since, time.perf_counter())
            self._after_batch(position, cache)
            self._ending.look(self._num_steps)
            # In the middle of a window its gradients would be lost: it is finished first. And an
            # epoch whose last batch is done is done.
            if (
                self._ending.reason
                and not self._step.window.num_batches
                and position != num_batches
            ):
                break
        if self._step.window.num_batches:
            self._window.finish()
            self._step_scheduler()
        self._collect(self._book.flush())
        self._ending.agree()
        tally.spend(since, time.perf_counter())
        return tally.report(self._epoch)

    def _works(self) -> Iterator[Work]:
        """Return the work of the rest of the epoch."""
        return iter(self._captured.works() if self._captured is not None else self._train)

    def _begin_again(self, error: RuntimeError) -> Iterator[Work]:
        """Go on after memory ran out while a batch was being built; raise other errors."""
        if not self._train.can_begin_again:
            raise error
        self._window.survive(error)
        return self._works()

    def _train_on(self, work: Work, position: int) -> None:
        """Take one batch, and the losses that have arrived meanwhile."""
        if (self._epoch, position) in self._left_out:
            if work.index is not None and self.gpu_augmentation is not None:
                self.gpu_augmentation.seek(self._epoch, position + 1)  # its draw is left out too
            return
        if not self._has_batch_size:
            self._set_batch_size(self._of_all(work.num_samples))
        if self._captured is not None:
            loss = self._captured.run(work)
            updated = True
        else:
            loss = self._window.add(work)
            updated = self._step.window.is_complete
            if updated:
                self._window.finish()
        if updated:
            self._step_scheduler()
        step, self._num_steps = self._num_steps, self._num_steps + 1
        place = (self._epoch, position)
        count, together = work.num_samples, work.num_together
        self._collect(self._book.note(step, loss, count, work.positions, place, together))

    def _step_scheduler(self) -> None:
        """Move the rate on, also after an update that was left out, which torch would warn of."""
        if self.scheduler is None:
            return
        if self._has_scheduled:
            self.scheduler.step()
            return
        self._has_scheduled = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
            self.scheduler.step()

    def _set_batch_size(self, num_samples: int) -> None:
        """Take the first batch's size for that of a full one, where the loader does not say."""
        self._has_batch_size = True
        self._step.parts.nominal_batch = num_samples
        self._make_step(self._step.parts)

    def _of_all(self, batch_size: int) -> int:
        """Return one size of a full batch for all ranks: gradients that were weighed by it are averaged."""
        return self.ranks.largest(batch_size)[0]

    def _collect(self, arrived: list[StepLoss]) -> None:
        """Keep losses that have arrived; deal with one that is not finite."""
        for seen in arrived:
            self.history.losses.append(seen.loss)
            if not seen.is_finite:
                self._not_finite(seen)
                continue
            self._tally.add(seen.loss, seen.num_samples)
        if arrived and self._log is not None:
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

    def _after_batch(self, position: int, cache: CacheEmptier | None) -> None:
        settings = self.settings
        self._progress.advance()
        if cache is not None:
            cache.after_batch(position)
        every = settings.log_gpu_stats_every_n_batches
        if every and position % every == 0:
            log_gpu_stats(_Lines(self._progress.say), self.device)
        every = settings.checkpoint_every_steps
        # Within a window its gradients would be lost: the checkpoint waits for the update.
        if (
            every
            and position // every > self._saved_at // every
            and not self._step.window.num_batches
        ):
            self._saved_at = position
            self.save()

    def validate(self) -> dict[str, float]:
        """Return the mean loss and the metrics over the validation loader; never augmented."""
        assert self._val is not None
        when = f"in epoch {self._epoch}"
        return self._judge.judge(self._val, when, self._ending.look_alone)

    # -- keeping ---------------------------------------------------------------------------

    def _open_folder(self, stack: contextlib.ExitStack, resume: bool) -> None:
        assert self._folder is not None
        settings = self.settings
        with self.ranks.shared_fate():
            self._claim_folder(stack, resume)
        if not self.ranks.is_first:
            return
        scalars = open_tensorboard(self._folder / "tensorboard") if settings.tensorboard else None
        self._log = stack.enter_context(RunLog(self._folder / "run.jsonl", scalars))
        stack.callback(self._close_log)
        for note in self.history.told:
            self._write("note", note.to_json())

    def _claim_folder(self, stack: contextlib.ExitStack, resume: bool) -> None:
        """Lock the run's folder, once for all ranks; refuse one that holds another run."""
        assert self._folder is not None
        settings = self.settings
        if self.ranks.is_first:
            stack.enter_context(RunLock(self._folder))
        self._checkpoints = Checkpoints(
            self._folder, settings.keep_last, settings.monitor, settings.maximise
        )
        if not resume and self._checkpoints.list():
            raise InputError(
                f"{self._folder} already holds a run.",
                "an empty folder, or the run to go on with",
                "fit(resume=True), or another run_dir",
            )
        if not resume:
            self._checkpoints.check_names()

    def _write(self, event: str, values: Mapping[str, Any], step: int | None = None) -> None:
        if self._log is not None:
            self._log.write(
                event, values, step=self._num_steps if step is None else step, epoch=self._epoch
            )

    def _close_log(self) -> None:
        self._log = None

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Write a checkpoint, if a run folder is open: every loss before it is known to be finite."""
        self._collect(self._book.flush())
        if self._checkpoints is None:
            return
        LOOKOUT.mark("saving", self._epoch)
        state, checkpoints = self._state(keep=self.ranks.is_first), self._checkpoints
        self.ranks.first_does(
            lambda: checkpoints.save(
                state, self._num_steps, self._epoch, dict(metrics or {}), self.identity
            )
        )
        self._saved_step = self._num_steps

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be resumed here, but for `_MAY_CHANGE`."""
        kinds = {
            "model": plain_name(self.model),
            "optimizer": type(self.optimizer).__name__,
            "scheduler": type(self.scheduler).__name__,
        }
        return {"settings": self.settings.to_json(), **kinds, **self._identity}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the rest of the run depends on; every rank must call it."""
        return self._state()

    def _state(self, keep: bool = True) -> dict[str, Any]:
        """Return the same; without `keep`, parameters in parts are only gathered for others."""
        state = {
            "model": gather_whole(self.model.state_dict(), keep),
            "optimizer": gather_whole(self.optimizer.state_dict(), keep),
            "scaler": self._step.parts.scaler.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "loader": self._train.state_dict(),
            "left_out": [list(place) for place in sorted(self._left_out)],
            "augmentation": None,
            "carried": None,
            "rng": self._of_ranks(capture_rng()),
            "epoch": self._epoch,
            "tally": self._tally.state_dict(),
            "criterion": None,
            "full_batch": self._step.parts.nominal_batch if self._has_batch_size else None,
            "num_steps": self._num_steps,
        }
        if isinstance(self.criterion, torch.nn.Module):
            state["criterion"] = self.criterion.state_dict()
        if self.gpu_augmentation is not None:
            state["augmentation"] = self.gpu_augmentation.state_dict()
        if self._step.parts.carry is not None:
            state["carried"] = self._of_ranks(self._step.parts.carry.state_dict())
        return state

    def _of_ranks(self, value: Any) -> Any:
        """Return a value that each rank has its own of: all of them, or the only one."""
        return self.ranks.gather(value) if self.ranks.are_several else value

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        full = state.get("full_batch")
        if full and self._train.batch_size is None and full != self._step.parts.nominal_batch:
            self._set_batch_size(int(full))
        self._has_batch_size = self._has_batch_size or bool(full)
        load_whole_model(self.model, state["model"])
        load_whole_optimizer(self.optimizer, state["optimizer"])
        make_guarded(self.optimizer, self.device)
        if isinstance(self.criterion, torch.nn.Module) and state.get("criterion") is not None:
            load_criterion(self.criterion, state["criterion"])
        if self._captured is not None:
            self._captured.forget()  # loading made new tensors for the optimizer's state
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
        carry, carried = self._step.parts.carry, state["carried"]
        if carry is not None:
            own = None if carried is None else carry.part_of(as_ranks(carried), *self._place)
            carry.load_state_dict(own)
        self._restore_rng(as_ranks(state["rng"]), int(state["num_steps"]))
        self._left_out = {(int(epoch), int(batch)) for epoch, batch in state["left_out"]}
        self._epoch, self._num_steps = int(state["epoch"]), int(state["num_steps"])
        self._tally = EpochTally.of(state.get("tally"))

    @property
    def _place(self) -> tuple[int, int]:
        return self.ranks.rank, self.ranks.world_size

    def _restore_rng(self, states: Sequence[Mapping[str, Any]], num_steps: int) -> None:
        """Let every rank draw as it would have; other ranks than before begin draws of their own."""
        if len(states) == self.ranks.world_size:
            restore_rng(states[self.ranks.rank])
            return
        seed_rng(hash((self.settings.seed or 0, num_steps, *self._place)) % 2**63)
        self.note(
            Note(
                f"{len(states)} ranks had saved and {self.ranks.world_size} go on: dropout draws anew"
            )
        )

    def resume(self) -> bool:
        """Go on from the latest checkpoint of the run folder; False when there is none."""
        if self._checkpoints is None:
            raise InputError(
                "there is no run folder to resume from.",
                "a folder",
                "a trainer with a run_dir, and its fit(resume=True)",
            )
        with self.ranks.shared_fate():
            latest = self._checkpoints.latest()
        check_alike(
            self.ranks, {"the latest checkpoint": None if latest is None else latest.path.name}
        )
        if latest is None:
            self.note(Note("there is no checkpoint yet: beginning anew"))
            return False
        free = {f"settings.{name}" for name in _MAY_CHANGE}
        with self.ranks.shared_fate():
            loaded = self._checkpoints.load_for(self.identity, free=free)
        # Apart: parts of a model are handed out among the ranks.
        with self.ranks.shared_fate():
            self.load_state_dict(loaded.state)
        for change in loaded.changes:
            self.note(Note(change))
        # A run that ends before its first step has nothing to save.
        self._saved_step = self._num_steps
        self.note(Note(f"resumed at epoch {self._epoch}, step {self._num_steps}", Topic.RESUMED))
        return True


__all__ = ["AUGMENTED", "EpochReport", "History", "NonFiniteError", "Trainer"]
