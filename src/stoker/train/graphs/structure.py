"""What a model is made of: its layers, parameters, names of buffers, and hooks. A graph keeps that of its capture.

Enters: modules and optimizers of a step. Leaves: whether somebody has put in another layer, pruned one, or added a hook
since. Costs: at each replay two numbers are compared. torch counts its hooks and tells of every registration: the
modules are looked at only after one of either. (To count the attributes of 400 modules at each replay took 30 µs: a
`forward` that is patched is found by the next comparison with an eager step.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as registrations
from torch.utils.hooks import RemovableHandle

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Structure:
    """The structure of modules at the time of a capture.

    Args:
        modules: With all modules inside them.
        optimizers: Their hooks count too.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        self._modules, self._optimizers = list(modules), list(optimizers)
        self._counted, self._then = _changes(), self._describe()
        # A hook that is taken away is counted by nobody.
        self._hooks = [(table, len(table)) for table in self._tables() if table]

    def has_changed(self) -> bool:
        """Whether it is another one now."""
        if any(len(table) != count for table, count in self._hooks):
            return True
        if _changes() == self._counted:
            return False
        self._counted = _changes()  # of another model, if this one is as it was
        return self._describe() != self._then

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


class _Counter:
    """Counts what torch tells of."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1


@functools.cache
def _told() -> _Counter:
    """Return the count of modules, parameters and buffers that were registered in this process, from now on."""
    counter = _Counter()
    registrations.register_module_module_registration_hook(counter)
    registrations.register_module_parameter_registration_hook(counter)
    registrations.register_module_buffer_registration_hook(counter)
    return counter


def _changes() -> tuple[int, int]:
    return _told().count, RemovableHandle.next_id
