"""The rule by which a replayed step agrees with an eager one: tolerances, noise, and counts that must be equal.

Two steps from the same state differ for three reasons. The graph is wrong, which must be found. Kernels add in
another order at every run (atomics), which Adam turns into whole steps where a gradient is almost zero. Or a
library chooses another algorithm while a graph is captured: Hugging Face models then keep an attention mask that
they drop otherwise, and attention with a mask draws other dropout.

Enters: losses, weights, optimizer states and buffers after a step, computed both ways. Leaves: the largest
difference, in units of what is allowed. Costs: a pass over the tensors; one copy of them for each way.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from stoker.train.batches import map_tensors
from stoker.train.step import StepParts, as_float32, run_model

_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
"""Tolerance between a replay and the eager step. The order of sums differs; wrong data differs more."""
_MOVED, _LEAST = 0.02, 1e-7
"""Tolerance as a share of how far a step moved a tensor; and the smallest difference of a result that counts.

A tolerance relative to the size of weights would accept any update at a learning rate of 1e-4: a number of the
optimizer that a graph has frozen, such as a count of steps, would not be found.
"""
_NOISE_FACTOR = 2.0
_MOST_NOISE = 0.02
"""If repeated steps differ by more than this share of the values in half of all tensors, no comparison is possible."""
_OUTPUT_TOLERANCE = 0.05
"""Tolerance between outputs of two algorithms for the same function, in bfloat16 through many layers."""


def difference(
    wanted: Sequence[torch.Tensor],
    got: Sequence[torch.Tensor],
    noise: torch.Tensor | None = None,
    before: Sequence[torch.Tensor] = (),
) -> float:
    """Return the largest difference in units of what is allowed.

    It is infinite if only one of two values is NaN, or if the lists have different lengths: then a parameter
    or a buffer exists after only one of the two steps.

    Args:
        wanted: Tensors after the eager step.
        got: The same tensors after the replay.
        noise: For each tensor, the difference between repeated steps from the same state (`spread`).
        before: The last tensors of `wanted` before the step. The tolerance is then a share of how far the step moved
            each of them, plus a rounding error; without `before` it is a share of their sizes.
    """
    if len(wanted) != len(got):
        return math.inf
    if not wanted:
        return 0.0
    sizes, num_results = _sizes(wanted), len(wanted) - len(before)
    if before:
        moved = spread(wanted[num_results:], before).nan_to_num(0.0, 0.0, 0.0)
        rounding = torch.tensor([*map(_rounding, wanted[num_results:])], device="cpu")
        room = torch.cat(
            [
                _LEAST + _RELATIVE * sizes[:, :num_results],
                _MOVED * moved + rounding.to(sizes) * sizes[:, num_results:] + 1e-30,
            ],
            dim=1,
        )
    else:
        room = _ABSOLUTE + _RELATIVE * sizes
    if noise is not None:
        room = room + _NOISE_FACTOR * noise
    worst = float((spread(wanted, got) / room).max())
    return math.inf if math.isnan(worst) else worst


def spread(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest difference of each pair of tensors, and in a second row the mean difference.

    NaN where only one value of a pair is NaN. A few values that atomics change at every run may dominate the largest
    difference, but not the mean.
    """
    if not one:
        return torch.zeros(2, 0, device="cpu")
    # One device for all: some optimizers keep their counts on the host.
    device = one[0].device
    return torch.stack([_apart(a, b).to(device) for a, b in zip(one, other, strict=True)], dim=1)


def is_too_noisy(
    wanted: Sequence[torch.Tensor], noise: torch.Tensor, before: Sequence[torch.Tensor] = ()
) -> bool:
    """Whether repeated steps differ so much that a comparison would accept a wrong graph.

    Args:
        wanted: Tensors after a step.
        noise: For each tensor, the largest difference between repeated steps from the same state (row 0 of `spread`).
        before: The last tensors of `wanted` before the step. Those that it does not change, such as the frozen part
            of a model, are equal after any two steps and are ignored. The first of `wanted` are then results, such as
            the loss, each of which must be steady.
    """
    relative = noise / _sizes(wanted)[0].clamp_min(_ABSOLUTE)
    if before:
        num_results = len(wanted) - len(before)
        moved = spread(wanted[num_results:], before)[0] != 0
        results, relative = relative[:num_results], relative[num_results:][moved]
        # Rounding changes no loss by that much: the step computes something else each time.
        if len(results) and not float(results.max()) <= _MOST_NOISE:
            return True
        if not len(relative):
            return False
    return not float(relative.median()) <= _MOST_NOISE


@contextlib.contextmanager
def as_if_captured() -> Iterator[None]:
    """Context in which models choose the algorithms that they choose during a capture."""
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        yield


def is_same_function(parts: StepParts, inputs: Any) -> bool:
    """Whether the model computes the same outputs with the algorithms that it chooses during a capture.

    Computed in evaluation mode, without dropout: two algorithms draw it in different ways.
    """
    modes = [(module, module.training) for module in parts.model.modules()]
    parts.model.eval()
    try:
        with torch.no_grad(), parts.precision.autocast(parts.device):
            plain = _leaves(as_float32(run_model(parts.model, inputs)))
            with as_if_captured():
                other = _leaves(as_float32(run_model(parts.model, inputs)))
    finally:
        for module, was_training in modes:
            module.training = was_training
    return are_close(plain, other)


def are_close(plain: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether the results of two algorithms are those of one function."""
    if [tensor.shape for tensor in plain] != [tensor.shape for tensor in other]:
        return False
    return all(
        bool(_apart(a, b)[0] <= _OUTPUT_TOLERANCE * _sizes([a])[0].clamp_min(_ABSOLUTE))
        for a, b in zip(plain, other, strict=True)
    )


def same_counts(wanted: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> bool:
    """Whether the counts in a step's state are equal after both steps; waits for the device.

    Counts are integers, and whole-numbered scalars such as an optimizer's count of steps, where a difference of one
    is below the tolerance after a thousand steps.
    """
    return len(wanted) == len(got) and all(
        torch.equal(one, other) for one, other in zip(wanted, got, strict=True) if _is_count(one)
    )


def _is_count(tensor: torch.Tensor) -> bool:
    if tensor.is_complex():
        return False
    if not tensor.is_floating_point():
        return True
    return tensor.numel() == 1 and float(tensor).is_integer()


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has real or complex values; integers are compared exactly by `same_counts`."""
    return bool(tensor.numel()) and (tensor.is_floating_point() or tensor.is_complex())


def _rounding(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if _has_values(tensor) else 0.0


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the largest and the mean difference."""
    if not _has_values(one):
        return torch.zeros(2, device=one.device)
    # After a loss that is not finite, both steps have the same NaN or infinity, and no other changes.
    alike = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(alike, 0.0, (one - other).abs()).detach().float()
    return torch.stack([apart.max(), apart.mean()])


def _sizes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest finite magnitude of each tensor, and in a second row the mean; 0 for integers."""
    device = tensors[0].device
    found = []
    for tensor in tensors:
        size = torch.zeros(1, device="cpu")
        if _has_values(tensor):
            size = tensor.detach().abs().float().nan_to_num(0.0, 0.0, 0.0)
        found.append(torch.stack([size.max(), size.mean()]).to(device))
    return torch.stack(found, dim=1)


def _leaves(outputs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, outputs, in_records=True)
    return found
