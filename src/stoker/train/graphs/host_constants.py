"""Numbers that a step copies to the device: `torch.tensor([1.0, 2.0], device="cuda")`, `torch.eye(8).to(x)`.

A CUDA graph cannot contain a copy from memory that is not pinned. Most such copies have the same numbers at every
step: weights of classes, the mean of pixels, the fill value of a mask. A graph may then read them on the device.

Enters: two steps of warm-up, run within `learn`, and the captured step, run within `replace`. Leaves: the numbers
of each copy, if they were the same every time. Costs: a call of Python for every operation of these steps; the numbers
twice, on the host and on the device; at each replay a copy of them from the device to the device.

Contract: numbers of the batch are not included, because the batch of a captured step is on the device.
Not for compiled networks: torch would compile them again for the watched steps.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

STEPS_TO_LEARN = 2
_MOST_BYTES = 2**28
_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_Tensor = torch.Tensor
_Bring = Callable[[_Tensor], _Tensor]


class HostConstants:
    """The copies from the host that a step makes, in order.

    Args:
        device: Device on which the step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._learnt: list[list[_Tensor]] = []
        self._num_bytes = 0
        self._on_device: list[_Tensor] = []
        self._sources: list[tuple[weakref.ref[_Tensor], int]] = []

    @property
    def are_known(self) -> bool:
        """Whether the watched steps made copies, and each step copied the same numbers."""
        if len(self._learnt) < STEPS_TO_LEARN or self._num_bytes > _MOST_BYTES:
            return False
        first, *others = self._learnt
        return bool(first) and all(
            len(first) == len(each) and all(map(_is_same, first, each)) for each in others
        )

    @contextlib.contextmanager
    def learn(self) -> Iterator[None]:
        """Context that records the copies of the step that runs in it."""
        found: list[_Tensor] = []
        self._learnt.append(found)

        def remember(tensor: _Tensor) -> _Tensor:
            self._num_bytes += tensor.nbytes
            if self._num_bytes <= _MOST_BYTES:
                found.append(tensor.detach().clone())
            return tensor.to(self._device)

        with _uncompiled(), _Copies(self._device, remember):
            yield

    def replace(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a step reads the numbers on the device instead of copying them.

        Must be called before the capture begins, because the call copies the numbers to the device.
        """
        known = self._learnt[0]
        self._on_device = [tensor.to(self._device) for tensor in known]
        self._sources = []
        left = list(zip(known, self._on_device, strict=True))[::-1]

        def bring(tensor: _Tensor) -> _Tensor:
            if not left or not _is_same(left[-1][0], tensor):
                raise RuntimeError("the step copies other numbers from the host at each step")
            if not tensor.is_inference():
                self._sources.append((weakref.ref(tensor), tensor._version))
            return left.pop()[1].clone()  # the step may change it

        @contextlib.contextmanager
        def replaced() -> Iterator[None]:
            with _uncompiled(), _Copies(self._device, bring):
                yield

        return replaced()

    def have_changed(self) -> bool:
        """Whether a tensor on the host was changed in place since the capture."""
        return any(
            tensor is not None and tensor._version != version
            for tensor, version in ((source(), version) for source, version in self._sources)
        )


def are_compiled(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether one of these modules, or a module inside them, is compiled with `torch.compile`."""
    inner = (each for root in modules for each in root.modules())
    return any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in inner)


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled functions run without compilation."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _is_same(one: _Tensor, other: _Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


class _Copies(TorchFunctionMode):
    """Calls `bring` for every tensor that is copied from the host; it returns the tensor on the device."""

    def __init__(self, device: torch.device, bring: _Bring) -> None:
        super().__init__()
        self._device, self._bring = device, bring

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in _MAKERS:
            return self._make(func, args, given)
        if func in (_Tensor.to, _Tensor.cuda, _Tensor.type_as) and _is_on_host(args[0]):
            named = (*args[1:], *given.values())
            if func is _Tensor.cuda or any(map(self._is_target, named)):
                return func(self._bring(args[0]), *args[1:], **given)
        elif func is _Tensor.copy_ and self._is_here(args[0]):
            args = tuple(self._bring(each) if _is_on_host(each) else each for each in args)
            given = {k: self._bring(v) if _is_on_host(v) else v for k, v in given.items()}
        elif func in (_Tensor.__getitem__, _Tensor.__setitem__) and self._is_here(args[0]):
            value = [self._brought(each) for each in args[2:]]
            args = (args[0], self._brought_index(args[1]), *value)
        return func(*args, **given)

    def _make(self, func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Make a tensor from numbers: first on the host, then call `bring` for it."""
        is_like = func is _Tensor.new_tensor
        device = given.get("device")
        if device is None:
            device = args[0].device if is_like else torch.get_default_device()
        numbers = next(iter(args[is_like:]), None)
        if not self._is_target(device) or self._is_here(numbers):
            return func(*args, **given)
        tracked = {"requires_grad": False} if "requires_grad" in given else {}
        made = func(*args, **{**given, "device": "cpu", **tracked})
        # For a tensor on the host, `as_tensor` returns the tensor itself, with its gradient history.
        if not _is_on_host(made):
            return func(*args, **given)
        return self._bring(made).requires_grad_(given.get("requires_grad", False))

    def _brought_index(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return tuple(map(self._brought, index))
        return self._brought(index)

    def _brought(self, one: Any) -> Any:
        """Return an index or value on the device if torch would copy it there; other values unchanged."""
        if _is_list_of_numbers(one):
            one = torch.tensor(one, device="cpu")
        elif isinstance(one, np.ndarray):
            one = torch.from_numpy(one)
        # torch passes single values to kernels as numbers.
        return self._bring(one) if _is_on_host(one) and one.dim() else one

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, _Tensor) and value.device.type == self._device.type

    def _is_target(self, named: Any) -> bool:
        """Whether an argument of `to` or `device=` names this kind of device."""
        if isinstance(named, _Tensor):
            return self._is_here(named)
        if isinstance(named, str):
            return named.partition(":")[0] == self._device.type
        if isinstance(named, int) and not isinstance(named, bool):
            return self._device.type == "cuda"
        return isinstance(named, torch.device) and named.type == self._device.type


def _is_on_host(value: Any) -> bool:
    """Whether a value is a plain tensor on the host that requires no gradient."""
    is_plain = type(value) in (_Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return is_plain and value.device.type == "cpu" and not value.requires_grad


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
