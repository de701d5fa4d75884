"""One model on several ranks: replicated (DDP), or sharded (FSDP2) if it does not fit.

Enters: a model and the ranks. Leaves: the module to call in the forward pass. Gradients are those of one process
with the batches of all ranks together. Costs: one all-reduce of the gradients per update, during the backward
pass; a sharded model also gathers the parameters of a block before its forward and backward pass.

The engines are torch's own: `DistributedDataParallel` and `fully_shard` (FSDP2). Both average over the ranks,
so a rank's mean loss is weighted with its samples * ranks / the samples of all (`Step.begin_batch`).
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import distributed

from stoker.errors import InputError
from stoker.train.activations import choose_blocks
from stoker.train.ranks import Ranks


class Parallel:
    """How ranks combine gradients. This class is for a single process; subclasses are for several ranks.

    Attributes:
        reason: Description for the run's log.
        can_capture: Whether a step can be captured as a CUDA graph.
    """

    reason = "one process"
    can_capture = True

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module to call in the forward pass."""
        return model

    def held_back(self, runner: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Return a context for a backward pass without exchange: gradients accumulate on this rank only."""
        return contextlib.nullcontext()

    def exchange(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average the gradients that were accumulated in `held_back`."""

    def check(self, model: torch.nn.Module) -> None:
        """Raise if the model has changed since it was wrapped."""


class Replicated(Parallel):
    """The whole model on every rank (DDP).

    Args:
        ranks: The ranks of the process group.
        device: Device of the model.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._trained: set[int] = set()
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.reason = f"the whole model on each of {ranks.world_size} ranks (DDP, {backend})"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model in DDP, which copies rank 0's weights and averages gradients in the backward pass."""
        self._trained = _trained(model)
        if not self._trained:
            return model
        on_gpu = self._device.type == "cuda"
        # DDP must be made on a side stream for its all-reduce to be captured in a CUDA graph.
        with (
            torch.cuda.stream(torch.cuda.Stream(self._device))
            if on_gpu
            else contextlib.nullcontext()
        ):
            wrapped = torch.nn.parallel.DistributedDataParallel(
                model, device_ids=[self._device] if on_gpu else None, gradient_as_bucket_view=True
            )
        if on_gpu:
            torch.cuda.synchronize(self._device)
        return wrapped

    def check(self, model: torch.nn.Module) -> None:
        """Raise if parameters were frozen or unfrozen: DDP averages those that were trained when it was made.

        Raises:
            InputError: A parameter that DDP does not average would differ between ranks.
        """
        changed = len(self._trained ^ _trained(model))
        if changed:
            raise InputError(
                f"{changed} parameters were frozen or unfrozen after the trainer was made, and "
                f"{self._ranks.world_size} ranks share the model.",
                "the same trained parameters as when the trainer was made",
                "make a new Trainer after each change of requires_grad",
            )

    def held_back(self, runner: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return DDP's `no_sync`."""
        found: Any = getattr(runner, "_orig_mod", runner)
        no_sync = getattr(found, "no_sync", None)
        return contextlib.nullcontext() if no_sync is None else no_sync()

    @torch.no_grad()
    def exchange(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average all gradients, one message per type: for an update that ended before its last batch."""
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                groups.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in groups.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            distributed.all_reduce(flat)
            parts = (flat / self._ranks.world_size).split([g.numel() for g in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


class Sharded(Parallel):
    """A part of every parameter, gradient and optimizer state on each rank (FSDP2).

    Gradients are reduced after every batch of an update: unreduced gradients would need the memory that sharding
    saves.
    """

    can_capture = False

    def __init__(self, ranks: Ranks) -> None:
        self.reason = f"1/{ranks.world_size} of the model on each rank (FSDP2)"


def choose_parallel(model: torch.nn.Module, ranks: Ranks, device: torch.device) -> Parallel:
    """Return how these ranks train a model: sharded if it was sharded, else replicated.

    Raises:
        InputError: The model is wrapped in DDP already.
    """
    if ranks.joined and isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise InputError(
            "the model is a DistributedDataParallel already.",
            "the model itself: the trainer shares it among the ranks, and weighs short batches",
            "Trainer(model.module, ...)",
        )
    if is_sharded(model):
        return Sharded(ranks)
    return Replicated(ranks, device) if ranks.joined else Parallel()


# -- sharded models -------------------------------------------------------------------------------


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether the model was sharded. Checks modules, because parameters may be whole during a pass."""
    return any(_is_fsdp(type(module)) for module in model.modules())


def plain_name(model: torch.nn.Module) -> str:
    """Return the name of a model's own class; `fully_shard` replaces it by a subclass."""
    return next(kind.__name__ for kind in type(model).__mro__ if not _is_fsdp(kind))


def _is_fsdp(kind: type) -> bool:
    fsdp: Any = sys.modules.get(
        "torch.distributed.fsdp"
    )  # if it is not imported, no model is sharded
    return fsdp is not None and issubclass(kind, fsdp.FSDPModule)


def shard_model(model: torch.nn.Module, ranks: Ranks, device: torch.device) -> torch.nn.Module:
    """Shard a model over the ranks, block by block, before its optimizer is made. Returns the model.

    Batch norms are converted before, because modules cannot be replaced after they are sharded.

    Raises:
        InputError: There is no process group.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not ranks.joined:
        raise InputError(
            "the model is to be spread over ranks, and this process is alone.",
            "a run that torchrun has started",
            "stoker train --gpus 2, or torchrun --nproc-per-node 2 -m stoker train",
        )
    model = share_statistics(model.to(device), ranks, device)[0]
    with torch.no_grad():
        # All ranks must shard the same values.
        for tensor in (
            *model.parameters(),
            *model.buffers(),
        ):
            distributed.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    blocks = dict(model.named_modules())
    for name in choose_blocks(model).names:
        fully_shard(blocks[name], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gather_whole(value: Any, keep: bool = True) -> Any:
    """Return a nested value with every sharded tensor whole, on the CPU. Collective.

    Args:
        value: Tensors in dicts, lists and tuples.
        keep: False returns None instead of sharded tensors, on ranks that only take part in gathering.
    """
    if is_spread(value):
        whole = value.full_tensor()
        return whole.detach().cpu() if keep else None
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return _map_entries(lambda _, item: gather_whole(item, keep), value)
    if type(value) in (list, tuple):
        return type(value)(gather_whole(item, keep) for item in value)
    return value


def _map_entries(change: Callable[[Any, Any], Any], entries: Mapping[Any, Any]) -> Any:
    """Return a dict with every entry changed; a model's state dict keeps its version metadata."""
    made: Any = OrderedDict() if hasattr(entries, "_metadata") else {}
    made.update((name, change(name, item)) for name, item in entries.items())
    if hasattr(entries, "_metadata"):
        made._metadata = entries._metadata
    return made


def load_whole_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load whole tensors into a model, sharded or not."""
    if not is_sharded(model):
        model.load_state_dict(state)
        return
    own = model.state_dict()
    model.load_state_dict(_map_entries(lambda name, value: _like(value, own.get(name)), state))


def load_whole_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load whole tensors into an optimizer, each sharded like its parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(is_spread, parameters)):
        optimizer.load_state_dict(dict(state))
        return
    spread = {
        number: {
            name: _like(value, parameters[number]) if name != "step" else value
            for name, value in entry.items()
        }
        for number, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": spread})


def is_spread(tensor: Any) -> bool:
    """Whether a tensor is sharded over ranks."""
    return hasattr(tensor, "full_tensor")


def _like(value: Any, example: Any) -> Any:
    """Return a whole tensor, sharded like `example` if that is sharded and has the same shape."""
    if (
        not is_spread(example)
        or not isinstance(value, torch.Tensor)
        or value.shape != example.shape
    ):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(example.device), example.device_mesh, example.placements)


# -- normalisation --------------------------------------------------------------------------------


def share_statistics(
    model: torch.nn.Module, ranks: Ranks, device: torch.device
) -> tuple[torch.nn.Module, str | None]:
    """Make batch norms compute their statistics over the batches of all ranks, as one process would.

    Returns:
        The model, and a note if there are batch norms. torch supports this on GPUs only.
    """
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    if not norms or not ranks.are_several:
        return model, None
    if device.type != "cuda":
        return model, (
            f"{len(norms)} batch norms see the {ranks.world_size} ranks' batches apart: torch shares their "
            "statistics on GPUs only, so losses differ a little from those of one process"
        )
    if not all(isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms):
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model, f"{len(norms)} batch norms share their statistics over {ranks.world_size} ranks"


def _trained(model: torch.nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
