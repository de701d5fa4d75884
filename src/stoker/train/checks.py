"""Checks of a trainer's arguments, before anything runs.

Enters: model, optimizer, scheduler, criterion, device. Leaves: nothing, or an `InputError` that says what to pass
instead. Costs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from stoker.errors import InputError
from stoker.train.step import Step, compact_recurrent


def move_model(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return the model on the device, with contiguous weights in its recurrent layers."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            "the model is on the meta device: its parameters have no values.",
            "a model with weights",
            f"model.to_empty(device='{device}'), then initialise its weights or load them",
        )
    moved = model.to(device)
    compact_recurrent(moved)
    return moved


def check_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Raise if the optimizer has parameters that are not this model's."""
    own = {id(parameter) for parameter in model.parameters()}
    strange = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in own
    ]
    if strange:
        raise InputError(
            f"the optimizer has {len(strange)} tensors that are not parameters of the model on {device}.",
            "an optimizer over this model's parameters",
            "torch.optim.AdamW(model.parameters(), lr=1e-4)",
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise if it is not one optimizer."""
    if isinstance(optimizer, list | tuple | dict):
        raise InputError(
            f"a {type(optimizer).__name__} of {len(optimizer)} optimizers.",
            "one optimizer, with a group of parameters for each rate; or a loop of your own with several",
            "stoker.capture(step, model=[maker, judge], optimizer=[first, second])",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"an optimizer that is a {type(optimizer).__name__}.",
            "a torch optimizer, or a class of one's own that inherits from torch.optim.Optimizer",
            "torch.optim.AdamW(model.parameters(), lr=1e-4)",
        )


def check_steps(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Raise if `step` of the optimizer or scheduler needs an argument, such as a closure or a metric."""
    if _needs(optimizer):
        raise InputError(
            f"{type(optimizer).__name__}.step needs {_needs(optimizer)!r}, and a step has one forward pass.",
            "an optimizer whose step needs nothing",
            "torch.optim.AdamW(model.parameters(), lr=1e-4)",
        )
    if scheduler is not None and _needs(scheduler):
        raise InputError(
            f"{type(scheduler).__name__}.step needs {_needs(scheduler)!r}, and rates move on after every update.",
            "a scheduler whose step needs nothing",
            "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches_per_epoch)",
        )


def _needs(thing: Any) -> str | None:
    """Return the first required argument of its `step`; None if there is none."""
    try:
        # Of the class: a scheduler replaces the optimizer's method on the instance.
        _, *parameters = inspect.signature(type(thing).step).parameters.values()
    except (TypeError, ValueError, AttributeError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next(
        (one.name for one in parameters if one.kind in positional and one.default is one.empty),
        None,
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
    """Load a criterion's state; raise an InputError if it is another criterion's."""
    try:
        criterion.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(
            f"the checkpoint's criterion kept {', '.join(state) or 'nothing'}; {type(criterion).__name__} keeps "
            f"{', '.join(criterion.state_dict()) or 'nothing'}, or in other shapes.",
            "the criterion that the run began with",
            "the same criterion, or a new run_dir",
        ) from error
