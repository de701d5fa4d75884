"""Checks of a trainer's arguments, before anything runs.

Enters: model, optimizer, criterion, device. Leaves: nothing, or an `InputError` that says what to pass
instead. Costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.nn.parameter import UninitializedParameter

from stoker.errors import InputError
from stoker.train.schedule import needed_argument
from stoker.train.step import Step, compact_recurrent


def move_model(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return the model on the device, with contiguous weights in its recurrent layers."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            "the model is on the meta device: its parameters have no values.",
            "a model with weights",
            f"model.to_empty(device='{device}'), then initialise its weights or load them",
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise InputError(
            "the model has lazy layers whose parameters have no shape yet.",
            "a model that has seen a batch",
            "model(next(iter(train_loader))[0]) before the Trainer is made",
        )
    moved = model.to(device)
    compact_recurrent(moved)
    return moved


def check_parameters(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    criterion: Any = None,
) -> None:
    """Raise if the optimizer has parameters that are neither this model's nor the criterion's."""
    modules = [model, *([criterion] if isinstance(criterion, torch.nn.Module) else [])]
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    strange = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in own
    ]
    if strange:
        raise InputError(
            f"the optimizer has {len(strange)} tensors that are not parameters of the model on {device}.",
            "an optimizer over the parameters of this model, and of a criterion that is a Module (not among ranks)",
            "torch.optim.AdamW(model.parameters(), lr=1e-4)",
        )


def check_given(
    model: Any, criterion: Any, optimizer: Any
) -> tuple[Callable[[Any, Any], torch.Tensor], torch.optim.Optimizer]:
    """Return criterion and optimizer; raise if one of the three is missing, or is a class instead of an object."""
    if not isinstance(model, torch.nn.Module):
        is_class = isinstance(model, type)
        raise InputError(
            f"a model that is {_named(model)}.",
            "a torch.nn.Module",
            f"model = {model.__name__}(...)" if is_class else "model = torch.nn.Linear(8, 1)",
        )
    return _check_criterion(criterion), check_optimizer(optimizer)


def _named(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _check_criterion(criterion: Any) -> Callable[[Any, Any], torch.Tensor]:
    """Return the criterion; raise if it is missing, a class, or not callable."""
    if criterion is None or isinstance(criterion, type) or not callable(criterion):
        is_class = isinstance(criterion, type)
        if isinstance(criterion, torch.optim.Optimizer):
            raise InputError(
                f"the criterion is an optimizer, {type(criterion).__name__}.",
                "model, train_loader, val_loader, criterion, optimizer, in this order or by name",
                "Trainer(model, train_loader, None, criterion, optimizer)",
            )
        raise InputError(
            "no criterion was given."
            if criterion is None
            else f"a criterion that is {_named(criterion)}.",
            "(outputs, targets) -> the mean loss of the batch",
            f"criterion={criterion.__module__}.{criterion.__name__}()"
            if is_class and issubclass(criterion, torch.nn.Module)
            else "criterion=torch.nn.functional.mse_loss",
        )
    return cast(Callable[[Any, Any], torch.Tensor], criterion)


def check_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer, or raise if it is not one."""
    if isinstance(optimizer, list | tuple | dict):
        raise InputError(
            f"a {type(optimizer).__name__} of {len(optimizer)} optimizers.",
            "one optimizer, with a group of parameters for each rate; or a loop of your own with several",
            "stoker.capture(step, model=[maker, judge], optimizer=[first, second])",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            "no optimizer was given."
            if optimizer is None
            else f"an optimizer that is a {type(optimizer).__name__}.",
            "a torch optimizer, or a class of one's own that inherits from torch.optim.Optimizer",
            "torch.optim.AdamW(model.parameters(), lr=1e-4)",
        )
    return optimizer


def check_reduction(criterion: Any, num_together: int) -> list[str]:
    """Raise if a criterion sums over its batch and an update has several batches; with one batch, return a note.

    Only torch's own losses say how they reduce. Batches are weighted by their samples: from the means of batches that
    gives the mean over all samples, but from sums nothing useful.

    Args:
        criterion: The trainer's loss function.
        num_together: Batches of an update: accumulated batches times ranks.
    """
    if getattr(criterion, "reduction", None) != "sum":
        return []
    name = type(criterion).__name__
    if num_together > 1:
        raise InputError(
            f"{name} sums over a batch, and an update is made of {num_together} batches.",
            "a criterion that returns the mean of its batch",
            f"torch.nn.{name}(reduction='mean')",
        )
    return [
        f"{name} sums over a batch: losses are those of batches, and the gradients grow with the batch size"
    ]


def check_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer's `step` needs an argument, such as a closure."""
    if needed_argument(optimizer):
        raise InputError(
            f"{type(optimizer).__name__}.step needs {needed_argument(optimizer)!r}, and a step has one forward pass.",
            "an optimizer whose step needs nothing",
            "torch.optim.AdamW(model.parameters(), lr=1e-4)",
        )


def check_scheduler(scheduler: Any, has_folder: bool) -> None:
    """Raise if `scheduler` is not one object with `step`, or if checkpoints are wanted and it cannot be saved."""
    if scheduler is None:
        return
    kind = type(scheduler).__name__
    if not callable(getattr(scheduler, "step", None)):
        raise InputError(
            f"a scheduler that is a {kind}.",
            "one object with a step method",
            "torch.optim.lr_scheduler.ChainedScheduler([first, second])"
            if isinstance(scheduler, list | tuple)
            else "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)",
        )
    if has_folder and not all(hasattr(scheduler, n) for n in ("state_dict", "load_state_dict")):
        raise InputError(
            f"{kind} has no state_dict and load_state_dict, and a run with a folder saves its scheduler.",
            "a scheduler with both, such as a class that inherits from torch.optim.lr_scheduler.LRScheduler",
            "Trainer(...) without run_dir",
        )


def check_skipping(step: Step, nonfinite: str) -> None:
    """Raise if nonfinite is "skip" and the optimizer cannot skip an update on this device."""
    parts = step.parts
    if nonfinite != "skip" or parts.device.type != "cuda":
        return
    if not step.guarded and not parts.precision.scales:
        raise InputError(
            f"nonfinite is 'skip', and {type(parts.optimizer).__name__} on a GPU cannot leave an update out "
            "(it does not run fused, or the model is in parts).",
            "nonfinite='stop' or 'rollback'; torch's Adam, AdamW or SGD; or fp16, which leaves it out",
            "nonfinite='rollback'",
        )


def load_criterion(criterion: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a criterion's state; raise an InputError if the state does not fit."""
    try:
        criterion.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(
            f"the checkpoint's criterion kept {', '.join(state) or 'nothing'}; {type(criterion).__name__} keeps "
            f"{', '.join(criterion.state_dict()) or 'nothing'}, or in other shapes.",
            "the criterion that the run began with",
            "the same criterion, or a new run_dir",
        ) from error


def set_mode(optimizer: Any, *, training: bool) -> None:
    """Put an optimizer with two modes into one of them; other optimizers are left alone.

    A schedule-free optimizer, for example, keeps two forms of the weights. It has `train` and `eval`, and raises in
    the wrong mode.
    """
    train, evaluate = getattr(optimizer, "train", None), getattr(optimizer, "eval", None)
    if callable(train) and callable(evaluate):
        (train if training else evaluate)()


def resting_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return by name the modules that the user has put into evaluation mode, while the model is in training mode."""
    if not model.training:
        return {}
    return {name: module for name, module in model.named_modules() if not module.training}


def describe_resting(modules: Mapping[str, torch.nn.Module]) -> str:
    """Return the line that says which modules stay in evaluation mode."""
    names = ", ".join([*modules][:3]) + (", ..." if len(modules) > 3 else "")
    return f"modules that were in evaluation mode stay there: {names}; model.train() before the Trainer trains all"
