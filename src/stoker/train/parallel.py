"""One model in several processes: whole on every rank, or in parts where it does not fit.

Enters: a model and the ranks. Leaves: what is called in the forward pass, and gradients that are those of one
process with the batches of all ranks together. Costs: one exchange of the gradients per update, beside the
backward pass; in parts, also the parameters of a block before its forward and backward pass.

The engines are torch's own: `DistributedDataParallel` and `fully_shard` (FSDP2). Both average over the ranks,
so a rank's mean loss is weighted with its samples * ranks / the samples of all (`Step.begin_batch`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed

from stoker.errors import InputError
from stoker.train.activations import choose_blocks
from stoker.train.ranks import Ranks


class Parallel:
    """How gradients meet; this one is for a process alone.

    Attributes:
        reason: What is done, in words.
    """

    reason = "one process"
    can_capture = True

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return what is called in the forward pass."""
        return model

    def held_back(self, runner: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Return the context of a backward pass whose gradients only add up on this rank."""
        return contextlib.nullcontext()

    def exchange(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average gradients that were held back."""


class Replicated(Parallel):
    """The whole model on every rank (DDP).

    Args:
        ranks: Who takes part.
        device: Of the model.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.reason = f"the whole model on each of {ranks.world_size} ranks (DDP, {backend})"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model with its gradients averaged as they come; weights become those of rank 0."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        on_gpu = self._device.type == "cuda"
        # On a stream of its own, so that the exchange can be captured in a CUDA graph.
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

    def held_back(self, runner: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return DDP's `no_sync`."""
        found: Any = getattr(runner, "_orig_mod", runner)
        no_sync = getattr(found, "no_sync", None)
        return contextlib.nullcontext() if no_sync is None else no_sync()

    @torch.no_grad()
    def exchange(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average all gradients in one message per type; a window that ends early has not done so."""
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

    Every batch of a window is exchanged: gradients that wait whole would be the memory that was to be saved.
    """

    can_capture = False

    def __init__(self, ranks: Ranks) -> None:
        self.reason = f"1/{ranks.world_size} of the model on each rank (FSDP2)"


def choose_parallel(model: torch.nn.Module, ranks: Ranks, device: torch.device) -> Parallel:
    """Return how a model is trained by these ranks: as it was sharded, else whole on each."""
    if is_sharded(model):
        return Sharded(ranks)
    return Replicated(ranks, device) if ranks.joined else Parallel()


# -- in parts -------------------------------------------------------------------------------------


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether `shard_model` has been here."""
    return any(is_spread(parameter) for parameter in model.parameters())


def shard_model(model: torch.nn.Module, ranks: Ranks, device: torch.device) -> torch.nn.Module:
    """Spread a model over the ranks, block by block; before its optimizer is made. Returns the model.

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
    model.to(device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):  # every rank's part of one model
            distributed.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    blocks = dict(model.named_modules())
    for name in choose_blocks(model).names:
        fully_shard(blocks[name], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gather_whole(value: Any) -> Any:
    """Return a nested value with every spread tensor whole, on the CPU; every rank must call it."""
    if is_spread(value):
        return value.full_tensor().detach().cpu()
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return {name: gather_whole(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gather_whole(item) for item in value)
    return value


def load_whole_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load whole tensors into a model, spread or not."""
    if not is_sharded(model):
        model.load_state_dict(state)
        return
    own = model.state_dict()
    model.load_state_dict({name: _like(value, own.get(name)) for name, value in state.items()})


def load_whole_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load whole tensors into an optimizer, each spread as its parameter is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    spread = {
        number: {
            name: _like(value, parameters[number]) if name != "step" else value
            for name, value in entry.items()
        }
        for number, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": spread})


def is_spread(tensor: Any) -> bool:
    """Whether a tensor is this rank's part of one that lies on several."""
    return hasattr(tensor, "full_tensor")


def _like(value: Any, example: Any) -> Any:
    """Return a whole tensor spread as another one of its shape is."""
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
    """Let batch norms see the batches of all ranks, as one process would; return what was done.

    Returns:
        The model, and a note where there are batch norms; torch has them on GPUs only.
    """
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    if not norms or not ranks.are_several:
        return model, None
    if device.type != "cuda":
        return model, (
            f"{len(norms)} batch norms see the {ranks.world_size} ranks' batches apart: torch shares their "
            "statistics on GPUs only, so losses differ a little from those of one process"
        )
    shared = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return shared, f"{len(norms)} batch norms share their statistics over {ranks.world_size} ranks"
