"""Activation checkpointing: saves memory at the cost of about one more forward pass.

Enters: a model. Leaves: the same model, whose chosen blocks keep only their inputs and are run again in
the backward pass; parameters, names and outputs are unchanged. Costs: the forward pass of these blocks
once more, about a third of the step.

Gradients are those of the plain model. For the second pass random generators are reset, cuDNN's own dropout
generator included, and buffers that the first pass changed (running statistics) have their values from before it.
They do not change twice.

`Buffers` copies a model's buffers and restores them after a bad batch, always or depending on a flag on the
device: one kernel per dtype to copy, two more to restore. The host never waits for the device, so it can be
captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stoker.errors import InputError

# Running statistics are vectors; a larger buffer is a table or a mask, which no forward pass changes.
LARGEST_CHANGING_BUFFER = 1 << 16
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Checkpointed:
    """The blocks that are recomputed, and why these were chosen.

    Attributes:
        names: Names of the modules; empty when none is suitable.
        reason: Text for the log.
    """

    names: tuple[str, ...]
    reason: str


def checkpoint_activations(
    model: nn.Module, modules: Iterable[str | nn.Module] | None = None
) -> Checkpointed:
    """Make blocks of a model recompute their activations in the backward pass, in place.

    Blocks may return anything, such as the tuple of an LSTM. A block that is wrapped already stays so.

    Args:
        model: Changed in place; its state_dict is not.
        modules: Names or modules to wrap; by default the largest blocks that occur more than once.

    Raises:
        InputError: A module that is not part of the model.
    """
    if modules is None:
        chosen = choose_blocks(model)
    else:
        names = tuple(_name_of(model, module) for module in modules)
        chosen = Checkpointed(names, f"{len(names)} modules as asked for")
    for name in chosen.names:
        _wrap(model.get_submodule(name))
    return chosen


def choose_blocks(model: nn.Module) -> Checkpointed:
    """Decide which blocks to recompute: the repeated ones that hold most of the parameters.

    A single layer is not a block, because it keeps only its input; a recurrent layer is, because it keeps every time
    step. Of nested candidates the smaller ones are chosen, if they hold four fifths of the parameters.
    """
    groups: dict[type[nn.Module], dict[str, int]] = {}
    for name, module in model.named_modules():
        size = sum(parameter.numel() for parameter in module.parameters())
        if name and size and _is_block(module):
            group = groups.setdefault(type(module), {})
            for outer in [other for other in group if name.startswith(f"{other}.")]:
                del group[outer]
            group[name] = size
    repeated = {kind: group for kind, group in groups.items() if len(group) > 1}
    if not repeated:
        repeated = {kind: group for kind, group in groups.items() if issubclass(kind, nn.RNNBase)}
    if not repeated:
        return Checkpointed((), "no repeated block and no recurrent layer to recompute")
    largest = max(sum(group.values()) for group in repeated.values())
    fit = [item for item in repeated.items() if sum(item[1].values()) >= 0.8 * largest]
    kind, group = max(fit, key=lambda item: len(item[1]))
    total = sum(parameter.numel() for parameter in model.parameters())
    share = 100 * sum(group.values()) / total
    return Checkpointed(
        tuple(group), f"{len(group)} × {kind.__name__}, with {share:.0f} % of the parameters"
    )


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _CONTAINERS):
        return False
    return isinstance(module, nn.RNNBase) or any(True for _ in module.children())


def _name_of(model: nn.Module, module: str | nn.Module) -> str:
    for name, part in model.named_modules():
        if part is module or (name and name == module):
            return str(name)
    given = module if isinstance(module, str) else f"a {type(module).__name__}"
    known = [name for name, part in model.named_modules() if name and _is_block(part)]
    raise InputError(
        f"{given!r} is not a module of this {type(model).__name__}.",
        ", ".join(known[:20]) or "a module of the model",
        "names as in model.named_modules()",
    )


def _wrap(module: nn.Module) -> None:
    own = module.__dict__.get("forward")
    if isinstance(own, partial) and own.func is _recomputed:
        return
    # Set on the instance, so that names, state_dict and class stay; a partial, so that the model can be copied.
    module.forward = partial(_recomputed, module, own)


def _recomputed(
    module: nn.Module, own: Callable[..., Any] | None, /, *args: Any, **kwargs: Any
) -> Any:
    forward = partial(own or partial(type(module).forward, module), **kwargs)
    if not torch.is_grad_enabled():
        return forward(*args)
    _renew_cudnn_dropout(module)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=partial(_contexts, module),
    )


def _renew_cudnn_dropout(module: nn.Module) -> None:
    """Make cuDNN seed an RNN's dropout from torch's generator, in the first pass as in the second.

    cuDNN keeps a dropout state of its own from call to call. Torch seeds it from its generator when that is set.
    The second pass sets the generator; the first must do so too, or the dropout masks differ.
    """
    draws = any(
        isinstance(part, nn.RNNBase) and part.training and part.dropout > 0 and part.num_layers > 1
        for part in module.modules()
    )
    weight = next(module.parameters(), None)
    if draws and weight is not None and weight.is_cuda:
        torch.cuda.set_rng_state(torch.cuda.get_rng_state(weight.device), weight.device)


def _contexts(
    module: nn.Module,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return the contexts of the first and the second pass."""
    before = {
        (owner, name): buffer.clone()
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.numel() <= LARGEST_CHANGING_BUFFER
    }
    return contextlib.nullcontext(), _BuffersBefore(before)


class _BuffersBefore(contextlib.AbstractContextManager[None]):
    """Context in which copies of `before` replace a block's buffers.

    Buffers are replaced, not overwritten, because the autograd graph may hold them. Can be entered several times:
    a retained graph is recomputed for every backward pass.
    """

    def __init__(self, before: dict[tuple[nn.Module, str], torch.Tensor]) -> None:
        self._before = before
        self._now: list[dict[tuple[nn.Module, str], torch.Tensor | None]] = []

    def __enter__(self) -> None:
        now: dict[tuple[nn.Module, str], torch.Tensor | None] = {}
        for (owner, name), buffer in self._before.items():
            now[owner, name] = owner._buffers[name]
            owner._buffers[name] = buffer.clone()
        self._now.append(now)

    def __exit__(self, *error: object) -> None:
        for (owner, name), buffer in self._now.pop().items():
            owner._buffers[name] = buffer


# -- copies of buffers ----------------------------------------------------------------------------

Copies = dict[torch.dtype, torch.Tensor]


class Buffers:
    """The buffers of a model. They are looked up at every use: a forward pass may replace them.

    Args:
        model: On its device already.
        most_values: Leave out buffers with more values.
    """

    def __init__(self, model: torch.nn.Module, most_values: int | None = None) -> None:
        seen: set[int] = set()
        self._owners: list[tuple[torch.nn.Module, str]] = []
        for owner in model.modules():
            for name, buffer in owner._buffers.items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                # Such as the sparse matrix of a graph, a constant.
                if buffer.layout != torch.strided:
                    continue
                if most_values is None or buffer.numel() <= most_values:
                    self._owners.append((owner, name))

    @classmethod
    def that_change(cls, model: torch.nn.Module) -> Buffers:
        """Return the buffers that a forward pass may change: small ones, such as running statistics."""
        return cls(model, LARGEST_CHANGING_BUFFER)

    def __bool__(self) -> bool:
        return bool(self._owners)

    def copy(self) -> Copies:
        """Return copies of their values, one tensor per dtype."""
        return {
            dtype: torch.cat([buffer.detach().reshape(-1) for buffer in group])
            for dtype, group in self._groups().items()
        }

    @torch.no_grad()
    def put_back(self, copies: Copies, keep_if: torch.Tensor | None = None) -> None:
        """Overwrite the buffers with copies.

        Args:
            copies: From `copy`.
            keep_if: A bool on the device; if it is true, the buffers keep their current values.
        """
        for dtype, group in self._groups().items():
            values, sizes = copies.get(dtype), [buffer.numel() for buffer in group]
            if values is None or sum(sizes) != values.numel():
                continue  # a buffer changed its shape in this batch, as in a quantisation observer
            if keep_if is not None:
                now = torch.cat([buffer.detach().reshape(-1) for buffer in group])
                values = torch.where(keep_if, now, values)
            parts = values.split(sizes)
            torch._foreach_copy_(
                group, [part.view(b.shape) for part, b in zip(parts, group, strict=True)]
            )

    def _groups(self) -> dict[torch.dtype, list[torch.Tensor]]:
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for owner, name in self._owners:
            buffer = owner._buffers[name]
            assert buffer is not None
            groups.setdefault(buffer.dtype, []).append(buffer)
        return groups
