"""When the scheduler of the learning rate is stepped: after every update, or after every epoch.

Enters: a scheduler, and how many updates and epochs the run has. Leaves: the interval, or an `InputError` where a
schedule that counts epochs would be stepped by updates. Costs nothing.

Most scripts step their scheduler at the end of an epoch. If such a scheduler is stepped after every update, its
schedule is over within the first epochs, and the rest of the run trains at a rate near zero, without any error.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Literal

import torch
from torch.optim import lr_scheduler

from stoker.errors import InputError
from stoker.train.settings import TrainSettings

Interval = Literal["update", "epoch"]
_GONE = 1e-6
"""Share of the first learning rate below which a model no longer learns."""


def choose_interval(
    scheduler: Any,
    given: str | None,
    settings: TrainSettings,
    num_batches: int | None,
    has_validation: bool,
) -> Interval:
    """Return when to step a scheduler.

    Args:
        scheduler: Any object with `step`, or None.
        given: "update", "epoch", or None to choose: "epoch" where `step` needs a metric, else "update".
        settings: Settings of the run.
        num_batches: Batches of an epoch; None if the loader does not know.
        has_validation: Whether an epoch ends with metrics.

    Raises:
        InputError: `given` does not fit the scheduler; or it is None, and the schedule seems to count epochs.
    """
    if given not in (None, "update", "epoch"):
        raise InputError(
            f"scheduler_interval is {given!r}.",
            "'update', 'epoch', or None to choose",
            "scheduler_interval='epoch'",
        )
    if scheduler is None:
        return "update"
    name, needed = type(scheduler).__name__, needed_argument(scheduler)
    if needed is not None:
        if given == "update":
            raise InputError(
                f"{name}.step needs {needed!r}, which there is after an epoch only.",
                "scheduler_interval='epoch'",
                "scheduler_interval='epoch'",
            )
        if _needs_epoch(scheduler):
            return "epoch"
        mode = getattr(scheduler, "mode", None)
        if mode in ("min", "max") and (mode == "max") is not settings.maximise:
            raise InputError(
                f"{name} has mode {mode!r}, and maximise is {settings.maximise} for monitor {settings.monitor!r}.",
                "the same in both: mode 'max' with maximise True, 'min' with False",
                f"config={{'monitor': {settings.monitor!r}, 'maximise': {mode == 'max'}}}",
            )
        if not has_validation and settings.monitor != "loss":
            raise InputError(
                f"{name}.step needs {needed!r}, and an epoch without validation has its loss only.",
                "a validation loader, or monitor='loss'",
                "config={'monitor': 'loss'}",
            )
        return "epoch"
    updates = -(-(num_batches or 0) // settings.gradient_accumulation_steps)
    if given is None and updates > 1 < settings.epochs:
        reason = _counts_epochs(scheduler, settings.epochs, updates)
        if reason is not None:
            raise InputError(
                f"{name} would move on after every update, {updates:,} times an epoch: {reason}.",
                "scheduler_interval='epoch' where it counts epochs, 'update' where it counts updates",
                "scheduler_interval='epoch'",
            )
    return "epoch" if given == "epoch" else "update"


def describe(scheduler: Any, interval: Interval) -> list[str]:
    """Return a line on when the scheduler is stepped; none where there is no scheduler."""
    kind = type(scheduler).__name__
    return [] if scheduler is None else [f"scheduler {kind} is stepped after every {interval}"]


def step_scheduler(scheduler: Any, score: float | None, num_epochs: int, is_first: bool) -> None:
    """Step a scheduler, without torch's warning about a skipped update before its first step.

    Args:
        scheduler: Any object with `step`.
        score: The monitored metric, for a `step` that needs one.
        num_epochs: Epochs that are done, for a `step` that needs their number.
        is_first: Whether this is its first step. Only then is the warning filtered, which costs time.
    """
    needed: tuple[float, ...] = ()
    if needed_argument(scheduler) is not None:
        needed = (num_epochs,) if _needs_epoch(scheduler) else () if score is None else (score,)
    if not is_first:
        scheduler.step(*needed)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
        scheduler.step(*needed)


def _needs_epoch(scheduler: Any) -> bool:
    """Whether `step` of a scheduler needs the number of the epoch, as those of timm do, and no metric."""
    return "epoch" in (needed_argument(scheduler) or "")


def check_alone(scheduler: Any) -> None:
    """Raise if `step` of a scheduler needs a metric: `train_epoch` leaves validation to the caller."""
    if needed_argument(scheduler) and not _needs_epoch(scheduler):
        raise InputError(
            f"train_epoch has no metric for {type(scheduler).__name__}: validation is yours.",
            "a trainer without a scheduler, which is stepped in your loop",
            "scheduler.step(trainer.validate()['loss'])",
        )


def needed_argument(thing: Any) -> str | None:
    """Return the first required argument of an optimizer's or scheduler's `step`; None if there is none."""
    try:
        # The class's method: on the instance, a scheduler replaces the optimizer's `step`.
        _, *parameters = inspect.signature(type(thing).step).parameters.values()
    except (TypeError, ValueError, AttributeError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next(
        (one.name for one in parameters if one.kind in positional and one.default is one.empty),
        None,
    )


def _counts_epochs(scheduler: Any, epochs: int, updates: int) -> str | None:
    """Return why a schedule must count epochs; None if it may count updates."""
    total = epochs * updates
    if isinstance(scheduler, lr_scheduler.StepLR | lr_scheduler.ExponentialLR):
        share = float(scheduler.gamma) ** (total / getattr(scheduler, "step_size", 1))
        return f"it would end at {share:.2g} of its first rate" if share < _GONE else None
    if type(scheduler) is lr_scheduler.LambdaLR:
        return _fades(scheduler, total)
    length = _length(scheduler)
    if length is None or length > epochs:
        return None
    return f"its {length:,} steps would be over in epoch {-(-length // updates)} of {epochs}"


def _length(scheduler: Any) -> int | None:
    """Return the number of steps of a schedule; None if it is unknown, or the schedule has no end.

    Linear and constant schedules are not considered: as a warm-up of a few updates they are short on purpose.
    """
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = _length(scheduler._schedulers[-1])
        return None if last is None else int(scheduler._milestones[-1]) + last
    if isinstance(scheduler, lr_scheduler.MultiStepLR):
        return max(scheduler.milestones, default=None)
    named = {
        lr_scheduler.CosineAnnealingLR: "T_max",
        lr_scheduler.CosineAnnealingWarmRestarts: "T_0",
        lr_scheduler.OneCycleLR: "total_steps",
        lr_scheduler.PolynomialLR: "total_iters",
    }
    found = next((name for kind, name in named.items() if isinstance(scheduler, kind)), None)
    return None if found is None else int(getattr(scheduler, found))


def _fades(scheduler: torch.optim.lr_scheduler.LambdaLR, total: int) -> str | None:
    """Return a text if the factor of the rate is near zero after a quarter of the run; None if it is not."""
    at = max(1, total // 4)
    try:
        shares = [float(function(at)) for function in scheduler.lr_lambdas]
    except Exception:  # noqa: BLE001  a user's function, which may not be defined for this step
        return None
    if max(shares) > _GONE:
        return None
    return f"its factor would be {max(shares):.2g} after {at:,} of {total:,} updates"
