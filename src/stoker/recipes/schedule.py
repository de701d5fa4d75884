"""Optimizers and learning rates of the recipes: AdamW, warm-up and cosine, and scaling by the batch size.

Enters: parameters, a rate, the number of updates, batch sizes. Leaves: torch optimizers and
schedulers. Costs: nothing per step but a few host operations of the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Literal, get_args

import torch

from stoker.errors import InputError

LrRule = Literal["linear", "sqrt", "none"]


def make_adamw(
    parameters: Iterable[torch.nn.Parameter], lr: float, weight_decay: float = 0.01
) -> torch.optim.AdamW:
    """Return AdamW that decays matrices only; decay would pull biases and norms away from useful values."""
    given = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in given if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in given if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)


def warmup_cosine(
    optimizer: torch.optim.Optimizer, num_updates: int, warmup_share: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule that rises for `warmup_share` of the updates, then falls to 0 along half a cosine."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(cosine_factor, num_updates=num_updates, warmup_share=warmup_share)
    )


def cosine_factor(step: int, num_updates: int, warmup_share: float) -> float:
    """Return the share of the full rate at update `step`, counted from 0."""
    warm = round(num_updates * warmup_share)
    if step < warm:
        return (step + 1) / (warm + 1)
    past = (step - warm) / max(1, num_updates - warm)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, past)))


MAX_LR_FACTOR = 64.0
"""The most that a rate is multiplied with. The linear rule was shown to hold up to 32 (Goyal et al. 2017)."""


def lr_factor(
    batch_size: int | None, reference: int, rule: LrRule, num_samples: int | None = None
) -> tuple[float, str]:
    """Return the factor for a learning rate tuned at `reference` samples per update, and the reason.

    The factor is at most `MAX_LR_FACTOR`. An update has at most `num_samples` samples.

    Args:
        batch_size: Samples per update, over batch, accumulation and ranks. None: not scaled.
        reference: Samples per update for which the rate was tuned.
        rule: How the rate grows.
        num_samples: Training samples; None if unknown.

    Linear: k times the samples average the noise of k steps, so one step may be k times as long
    (Goyal et al. 2017, SGD). Sqrt keeps the noise of a step constant. It is safer for Adam, whose
    step does not grow with the gradient.
    """
    if rule not in get_args(LrRule):
        raise InputError(
            f"the rule for the learning rate is {rule!r}.", ", ".join(get_args(LrRule)), "'linear'"
        )
    if batch_size is None:
        return 1.0, "lr as given: no batch_size was given to scale it by"
    if rule == "none":
        return 1.0, "lr as given: lr_rule is 'none'"
    together = batch_size if num_samples is None else max(1, min(batch_size, num_samples))
    few = f" ({batch_size:,} were asked for, there are no more)" if together < batch_size else ""
    ratio = together / reference
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    limit = ""
    if factor > MAX_LR_FACTOR:
        limit = f", which would give {factor:g}; {MAX_LR_FACTOR:g} is the limit"
        factor = MAX_LR_FACTOR
    return factor, (
        f"lr x {factor:g}: the {rule} rule for {together} samples per update{few} against {reference}{limit}"
    )
