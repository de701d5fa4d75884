"""The structure of a model: its layers, parameters, buffers, and hooks. A graph keeps that of its capture.

Enters: modules and optimizers of a step. Leaves: whether a layer or a buffer was replaced or pruned, a hook added or
removed, or a tensor moved to other memory, since the capture. Costs: at each replay two numbers and the addresses of
all parameters and buffers (0.1 µs each) are compared. torch counts hooks and calls back at every registration; the
modules are examined only if one of these counts has changed. A patched `forward` is found only by the next comparison
with an eager step: counting the attributes of 400 modules at each replay took 30 µs. Before a capture, layers forget
what hooks have computed from their weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as registrations
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Structure:
    """The structure of modules at the time of a capture.

    Args:
        modules: With all modules inside them.
        optimizers: Optimizers, whose hooks are part of the structure.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        self._modules, self._optimizers = list(modules), list(optimizers)
        self._buffers = [
            (module._buffers, name, buffer)
            for module in (inner for root in self._modules for inner in root.modules())
            for name, buffer in module._buffers.items()
        ]
        tensors: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in filter(lambda named: _has_address(named[1]), self._named_tensors()):
            tensors.setdefault(id(tensor), (name, tensor))
        self._names = [name for name, _ in tensors.values()]
        self._tensors = [tensor for _, tensor in tensors.values()]
        self._addresses = [*map(torch.Tensor.data_ptr, self._tensors)]
        self._counted, self._then = _changes(), self._describe()
        # torch does not count the removal of a hook.
        self._hooks = [(table, len(table)) for table in self._tables() if table]

    def has_changed(self) -> bool:
        """Whether the structure is another one now."""
        if any(len(table) != count for table, count in self._hooks):
            return True
        if _changes() == self._counted:
            return False
        self._counted = _changes()  # if this model is as it was, another one has changed
        is_other = any(table.get(name) is not buffer for table, name, buffer in self._buffers)
        return is_other or self._describe() != self._then

    def find_moved(self) -> str | None:
        """Return the name of a parameter or buffer that was given other memory, as by `p.data = ...`; or None."""
        now = [*map(torch.Tensor.data_ptr, self._tensors)]
        if now == self._addresses:
            return None
        pairs = zip(self._names, now, self._addresses, strict=True)
        return next(name for name, one, other in pairs if one != other)

    def leave_replaced(self) -> None:
        """Ignore the buffers that were replaced during the capture: the step itself replaces them."""
        self._buffers = [each for each in self._buffers if each[0].get(each[1]) is each[2]]

    def _named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        for root in self._modules:
            for name, tensor in (*root.named_parameters(), *root.named_buffers()):
                yield f"{type(root).__name__}.{name}", tensor
        for optimizer in self._optimizers:
            for tensor in (p for group in optimizer.param_groups for p in group["params"]):
                yield f"a parameter of {type(optimizer).__name__}", tensor

    def _owners(self) -> Iterable[tuple[Any, tuple[str, ...]]]:
        for module in (inner for root in self._modules for inner in root.modules()):
            yield module, HOOKS
            yield from ((p, PARAMETER_HOOKS) for p in module._parameters.values() if p is not None)
        yield from ((optimizer, STEP_HOOKS) for optimizer in self._optimizers)

    def _tables(self) -> Iterable[Any]:
        return (getattr(owner, name, None) for owner, names in self._owners() for name in names)

    def _describe(self) -> list[Any]:
        made: list[Any] = [
            (*((name, id(part)) for name, part in table.items()),)
            for module in (inner for root in self._modules for inner in root.modules())
            for table in (module._parameters, module._modules, dict.fromkeys(module._buffers))
        ]
        return [*made, *((*table,) if table else () for table in self._tables())]


def _has_address(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an address that can be read without running code of its class."""
    plain = torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl
    if type(tensor).__torch_function__ not in plain:
        return False
    try:
        torch.Tensor.data_ptr(tensor)
    except RuntimeError:  # a sparse tensor, or a parameter without a shape yet
        return False
    return True


class _Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1


@functools.cache
def _told() -> _Counter:
    """Return a counter of the modules, parameters and buffers that are registered in this process from now on."""
    counter = _Counter()
    registrations.register_module_module_registration_hook(counter)
    registrations.register_module_parameter_registration_hook(counter)
    registrations.register_module_buffer_registration_hook(counter)
    return counter


def _changes() -> tuple[int, int]:
    return _told().count, RemovableHandle.next_id


def forget_computed_weights(model: torch.nn.Module) -> None:
    """Cut off the history of the weights that hooks of pruning, `weight_norm` and `spectral_norm` compute anew.

    A layer keeps the one of the forward pass before, and with it autograd's nodes of the parameters. They run on the
    stream on which the layer was pruned, which a capture on another stream refuses.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod | SpectralNorm | WeightNorm):
                name = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
                weight = vars(module).get(name)
                if isinstance(weight, torch.Tensor) and weight.grad_fn is not None:
                    vars(module)[name] = weight.detach()
