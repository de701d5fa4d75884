"""The state of a training run: where it is, saved in checkpoints and restored from them.

Enters: a trainer's parts. Leaves: one dict of tensors and plain values; or the trainer restored from one, whose
further steps are those of an unbroken run. Costs: a checkpoint's bytes; sharded parameters are gathered first.

Saving and loading are collective: all ranks must take part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from stoker.augment import Compose, CutMix, MixUp
from stoker.errors import InputError
from stoker.report import Note, Topic
from stoker.train.batches import Feed
from stoker.train.checkpoint_file import loadable
from stoker.train.checks import load_criterion
from stoker.train.generators import capture_rng, restore_rng, seed_rng
from stoker.train.graphs.frozen import HostNumbers
from stoker.train.graphs.places import is_plain_object
from stoker.train.graphs.step_state import drawing_objects, used_objects
from stoker.train.graphs.structure import STEP_HOOKS
from stoker.train.graphs.trainer_step import CapturedStep
from stoker.train.heartbeat import HEARTBEAT
from stoker.train.history import EpochTally, LossTrend, Stall
from stoker.train.losses import LossBook, StepLoss
from stoker.train.parallel import (
    gather_whole,
    load_whole_model,
    load_whole_optimizer,
    plain_name,
)
from stoker.train.ranks import Ranks, as_ranks, check_alike
from stoker.train.run_folder import RunFolder
from stoker.train.schedule import Interval
from stoker.train.settings import TrainSettings
from stoker.train.step import Step, make_guarded
from stoker.train.update import Update

# Settings that may differ when a run is resumed: the weights do not depend on them, except after a batch
# whose loss is not finite.
MAY_CHANGE = (
    "epochs", "max_steps", "patience", "min_delta",
    "keep_last", "checkpoint_every_epochs", "checkpoint_every_steps", "monitor", "maximise",
    "nonfinite", "read_every", "survive_oom", "leak_bytes", "tensorboard", "log_gpu_stats_every_n_batches",
    "empty_cache_every_n_epochs", "empty_cache_every_n_batches",
)  # fmt: skip


@dataclass
class Place:
    """Progress of a run.

    Attributes:
        epoch: Number of the current epoch.
        num_steps: Batches trained on, over the whole run.
        num_done: Batches of this epoch that are done.
        first_loss: Index of this epoch's first loss in `History.step_losses`.
        tally: Totals of this epoch.
        left_out: (epoch, batch) of every batch that a rollback has excluded.
        good: State at the epoch's beginning, for a rollback.
        num_rollbacks: Rollbacks so far.
        num_skipped: Updates that the step has skipped so far.
        saved_step: `num_steps` at the last checkpoint; -1 before the first.
        saved_at: Batches of this epoch that were done at its last checkpoint by `checkpoint_every_steps`.
        has_batch_size: Whether the size of a full batch is known.
        has_scheduled: Whether the scheduler was stepped.
        has_metrics: Whether validation was seen to have the monitored metric.
        has_warned: Whether a validation loss that is not finite was noted.
        trend: Detects a growing loss.
        stall: Counts the epochs without a better monitored metric.
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
    trend: LossTrend = field(default_factory=LossTrend)
    stall: Stall = field(default_factory=Stall)


class Resumable:
    """Base class of `Trainer` that saves and resumes. `Trainer` sets the attributes.

    Attributes:
        model: The model, on the device.
        criterion: The loss function. Its state is saved if it is a module.
        optimizer: Optimizer of the model's parameters.
        scheduler: Scheduler of the learning rate, or None.
        settings: How to train.
        ranks: The ranks that train together.
        device: Device of the model.
    """

    model: torch.nn.Module
    criterion: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    settings: TrainSettings
    ranks: Ranks
    device: torch.device
    _train: Feed
    _update: Update
    _captured: CapturedStep | None
    _at: Place
    _book: LossBook
    _folder: RunFolder
    _identity: dict[str, Any]
    _interval: Interval
    _can_save = False
    _numbers: HostNumbers | None = None

    @property
    def _step(self) -> Step:
        return self._update.step

    @property
    def gpu_augmentation(self) -> Any:
        """Augmentation of the training images on the device, or None."""
        return self._train.augmentation

    def note(self, note: Note) -> None:
        """Record a decision with its reason."""
        raise NotImplementedError

    def _collect(self, arrived: list[StepLoss]) -> None:
        raise NotImplementedError

    def _set_batch_size(self, num_samples: int) -> None:
        raise NotImplementedError

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Write a checkpoint; does nothing before `fit` has opened the run folder. Collective.

        Waits until all losses so far are on the host. One that is not finite is handled first, and may raise.
        """
        self._collect(self._book.flush())
        checkpoints = self._folder.checkpoints
        if checkpoints is None:
            return
        HEARTBEAT.mark("saving", self._at.epoch)
        self._tell_unsaved()
        state = self.state_dict(keep=self.ranks.is_first)
        self.ranks.first_does(
            lambda: checkpoints.save(
                state, self._at.num_steps, self._at.epoch, dict(metrics or {}), self.identity
            )
        )
        self._at.saved_step = self._at.num_steps

    def _watch_numbers(self) -> None:
        """Record the numbers that model and criterion keep on the host, before the first step."""
        if self._numbers is None and self._folder.checkpoints is not None:
            modules = [m for m in (self.model, self.criterion) if isinstance(m, torch.nn.Module)]
            self._numbers = HostNumbers(modules, [] if len(modules) == 2 else [self.criterion])

    def _tell_unsaved(self) -> None:
        """Note, at the first checkpoint, numbers that the steps have changed and that are in no state_dict."""
        names = [] if self._numbers is None else self._numbers.name_counts()
        self._numbers = HostNumbers(())  # once is enough
        if names:
            self.note(
                Note(
                    f"not in a checkpoint, because in no state_dict: {', '.join(names[:3])}"
                    f"{', ...' if len(names) > 3 else ''}. A resumed run begins with it as a new one does; a buffer, "
                    "or get_extra_state and set_extra_state of the module, keeps it",
                    values={"unsaved": names},
                )
            )

    def _check_saving(self) -> None:
        """Raise after the first update, not after an epoch, if optimizer or scheduler cannot be saved."""
        self._can_save = True
        # With several ranks the states may be sharded; they are gathered only when they are saved.
        if self._folder.checkpoints is not None and not self.ranks.are_several:
            parts = {"optimizer": self.optimizer, "scheduler": self.scheduler}
            loadable({n: one.state_dict() for n, one in parts.items() if one is not None})

    @property
    def identity(self) -> dict[str, Any]:
        """Values that must be equal in a checkpoint to resume from it, except those in `MAY_CHANGE`."""
        kinds = {
            "model": plain_name(self.model),
            "optimizer": type(self.optimizer).__name__,
            # Older checkpoints name no interval: their schedulers were stepped after updates.
            "scheduler": type(self.scheduler).__name__
            + (" by epochs" if self._interval == "epoch" else ""),
        }
        return {"settings": self.settings.to_json(), **kinds, **self._identity}

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """Return the state that the rest of the run depends on; every rank must call it.

        Args:
            keep: Whether this rank needs the state. If not, it only takes part in gathering sharded parameters.
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
            "trend": asdict(at.trend),
            "stall": asdict(at.stall),
        }
        if averages := self._averages():
            state["averages"] = {str(n): one.state_dict() for n, one in enumerate(averages)}
        if drawing := self._drawing():
            positions = {str(n): one.state_dict() for n, one in enumerate(drawing)}
            state["draws"] = self._of_ranks(positions)
        if isinstance(self.criterion, torch.nn.Module):
            state["criterion"] = self.criterion.state_dict()
        if hasattr(self.gpu_augmentation, "state_dict"):
            state["augmentation"] = self.gpu_augmentation.state_dict()
        if self._step.parts.recurrent is not None:
            state["carried"] = self._of_ranks(self._step.parts.recurrent.state_dict())
        return state

    def _drawing(self) -> list[Any]:
        """Return the objects with counters of draws, such as `MixUp`, that `unpack` and the criterion use."""
        found = drawing_objects(self._train.given_unpack, self.criterion)
        return [one for one in found if one is not self.gpu_augmentation]

    def _averages(self) -> list[torch.nn.Module]:
        """Return the modules that hooks of the optimizer use, such as a moving average of the weights."""
        tables = (getattr(self.optimizer, name, None) or {} for name in STEP_HOOKS)
        used = used_objects(*(hook for table in tables for hook in table.values()))
        own = (vars(one).values() for one in used if is_plain_object(one, may_be_called=True))
        found = [*used, *(one for values in own for one in values)]
        modules = {id(one): one for one in found if issubclass(type(one), torch.nn.Module)}
        known = {id(parameter) for parameter in self.model.parameters()}
        return [one for one in modules.values() if known.isdisjoint(map(id, one.parameters()))]

    @contextlib.contextmanager
    def _without_draws(self) -> Iterator[None]:
        """Raise at the end if `unpack` or the criterion has mixed or augmented at random: in validation."""
        random = [one for one in self._drawing() if _is_random(one)]
        before = [one.state_dict() for one in random]
        yield
        drawn = [o for o, then in zip(random, before, strict=True) if o.state_dict() != then]
        if drawn:
            raise InputError(
                f"{type(drawn[0]).__name__} has drawn in validation: unpack and the criterion are for both.",
                "draws in training only",
                "unpack=lambda batch: mix(*batch) if model.training else batch",
            )

    def _of_ranks(self, value: Any) -> Any:
        """Return the values of all ranks as a list; the value itself if there is one rank."""
        return self.ranks.gather(value) if self.ranks.are_several else value

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        at = self._at
        full = state.get("full_batch")
        if full and self._train.batch_size is None and full != self._step.parts.nominal_batch:
            self._set_batch_size(int(full))
        # Where the loader tells its batch size, the first batch shows how many samples `unpack` makes of it.
        at.has_batch_size = at.has_batch_size or (bool(full) and self._train.batch_size is None)
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
        averages = (state.get("averages") or {}).values()
        for average, values in zip(self._averages(), averages, strict=False):
            average.load_state_dict(values)
        drawn = as_ranks(state.get("draws") or {})
        positions = drawn[self.ranks.rank] if len(drawn) == self.ranks.world_size else {}
        for one, position in zip(self._drawing(), positions.values(), strict=False):
            one.load_state_dict(position)
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
        at.trend = LossTrend(
            **state.get("trend") or {}
        )  # checkpoints of older versions have neither
        at.stall = Stall(**state.get("stall") or {})

    def _restore_rng(self, states: Sequence[Mapping[str, Any]], num_steps: int) -> None:
        """Restore each rank's random generators; with another number of ranks, seed them again."""
        if len(states) == self.ranks.world_size:
            restore_rng(states[self.ranks.rank])
            return
        seed_rng(
            hash((self.settings.seed or 0, num_steps, self.ranks.rank, self.ranks.world_size))
            % 2**63
        )
        self.note(
            Note(
                f"{len(states)} ranks had saved and {self.ranks.world_size} continue: dropout draws other numbers"
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
            self.note(Note("there is no checkpoint yet: starting from the beginning"))
            return False
        free = {f"settings.{name}" for name in MAY_CHANGE}
        with self.ranks.shared_fate():
            loaded = checkpoints.load_for(self.identity, free=free)
        # A block of its own: loading a sharded model is collective.
        with self.ranks.shared_fate():
            self.load_state_dict(loaded.state)
        for change in loaded.changes:
            self.note(Note(change))
        # If the run is ended before its first step, there is nothing new to save.
        at = self._at
        at.saved_step = at.num_steps
        self.note(Note(f"resumed at epoch {at.epoch}, step {at.num_steps}", Topic.RESUMED))
        return True


def _is_random(drawing: Any) -> bool:
    """Whether an object of stoker's draws numbers that change what it returns."""
    if isinstance(drawing, Compose):
        return not all(op.is_fixed for op in drawing.ops)
    return isinstance(drawing, MixUp | CutMix)
