"""One training step, eager: forward, loss in float32 or more, backward, unscale, clip, update.

Enters: `Work`. Leaves: the model's next weights, and the loss as a tensor on the device. Costs: the
model's own work; no host synchronisation on a GPU where the optimizer is fused.

The order: forward under autocast, scaled backward, unscale, clip, optimizer step, update of the scale.
The gradients of several batches add up to exactly those of one batch with all their samples.

Gradients that are not finite do not reach the weights, with one exception. On a GPU a fused optimizer skips the
update on the device. On the CPU, and for sparse gradients, the host checks the norm first: making sparse rows unique
waits for the device anyway. The exception is other optimizers on a GPU without a gradient scaler: they are not
checked, because the host would have to wait at every step. A batch whose loss is not finite changes neither running
statistics nor recurrent state.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stoker.errors import InputError
from stoker.train.accumulation import Accumulation, scale_gradients
from stoker.train.activations import Buffers
from stoker.train.batches import map_tensors
from stoker.train.parallel import Parallel, gather_whole, is_spread
from stoker.train.precision import PrecisionChoice
from stoker.train.ranks import Ranks
from stoker.train.recurrent_state import RecurrentState
from stoker.train.split_update import SplitUpdate, split_tensors

Criterion = Callable[[Any, Any], torch.Tensor]
SPARSE = "sparse gradients have another size at every step"
_NUM_FLAGS = 256
# Cached by class, because `inspect.signature` costs 10 us; weakly, because a user's class may hold much memory.
_Arguments = tuple[int, frozenset[str], frozenset[str]]
_ARGUMENTS: weakref.WeakKeyDictionary[type, _Arguments] = weakref.WeakKeyDictionary()


@dataclass
class StepParts:
    """The objects that a step works on.

    Attributes:
        runner: The compiled or parallel form of the model, if there is one.
        pair_words: Returns how an `unpack` takes inputs and targets from a batch, for advice (`Feed.pair_words`).
    """

    model: torch.nn.Module
    criterion: Criterion
    optimizer: torch.optim.Optimizer
    precision: PrecisionChoice
    scaler: torch.amp.GradScaler
    device: torch.device
    clip_norm: float | None
    nominal_batch: int
    accumulation_steps: int
    recurrent: RecurrentState | None = None
    runner: torch.nn.Module | None = None
    parallel: Parallel = field(default_factory=Parallel)
    ranks: Ranks = field(default_factory=Ranks)
    pair_words: Callable[[], tuple[str, str] | None] = lambda: None

    @property
    def forward(self) -> torch.nn.Module:
        """The module to call in the forward pass: the runner if there is one, else the model."""
        return self.model if self.runner is None else self.runner


def run_model(module: torch.nn.Module, inputs: Any, model: torch.nn.Module | None = None) -> Any:
    """Return a model's outputs.

    If `forward` requires two or more arguments, a tuple, list or mapping of inputs is spread over them. A mapping is
    also spread if `forward` accepts two or more arguments, the keys are among their names, and all required ones are
    among the keys, as for Hugging Face models. Any other `forward` gets the inputs as one argument.

    Args:
        module: The module to call.
        inputs: Inputs of one batch.
        model: The module whose `forward` is inspected, where `module` wraps it.
    """
    if isinstance(inputs, torch.Tensor):
        return module(inputs)
    count, needed, named = _arguments(type(module if model is None else model))
    if isinstance(inputs, tuple | list) and count > 1:
        return module(*inputs)
    if isinstance(inputs, Mapping) and (
        count > 1 or (len(named) > 1 and needed <= inputs.keys() <= named)
    ):
        return module(**inputs)
    return module(inputs)


def _arguments(kind: type[torch.nn.Module]) -> _Arguments:
    """Return how many arguments a `forward` requires, their names, and the names of all that it accepts."""
    found = _ARGUMENTS.get(kind)
    if found is None:
        given = _positional(kind.forward)[1:]  # the first is `self`
        needed = [one.name for one in given if one.default is one.empty]
        found = len(needed), frozenset(needed), frozenset(one.name for one in given)
        _ARGUMENTS[kind] = found
    return found


def num_needed(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a function requires; 0 if it has no signature."""
    return sum(one.default is one.empty for one in _positional(function))


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the positional arguments of a function; none if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one for one in parameters if one.kind in named]


class Step:
    """Forward and backward passes of batches, and the optimizer's step after the last batch of an update.

    Not thread safe. Works on the current CUDA stream.

    Attributes:
        guarded: Whether the optimizer itself skips an update with a non-finite gradient, on the device.
    """

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        optimizer = parts.optimizer
        self.guarded = is_guarded(optimizer)
        self._on_gpu = parts.device.type == "cuda"
        self._skipped = torch.zeros((), device=parts.device)
        self._flags: list[torch.Tensor] = []
        self._block = torch.zeros((), device=parts.device)
        self._one = torch.ones((), device=parts.device)
        self._epsilon = self._one * (1e-6 / (parts.clip_norm or 1.0))
        self.accumulation = Accumulation(parts.nominal_batch, parts.accumulation_steps)
        self._buffers = Buffers.that_change(parts.model)
        self._is_exchanged = True
        self._has_loss = False

    @property
    def _parameters(self) -> list[torch.Tensor]:
        """All parameters of the optimizer, to which a user may add a group at any time."""
        return [p for group in self.parts.optimizer.param_groups for p in group["params"]]

    @property
    def num_skipped(self) -> int:
        """Updates that were skipped because of a non-finite gradient; waits for the device."""
        return int(self._skipped + self._block.sum())

    def begin_batch(self, num_samples: int, num_together: int | None = None) -> float:
        """Count a batch of the update; return the weight of its mean loss.

        Args:
            num_samples: Samples on this rank.
            num_together: Samples on all ranks, whose gradients are averaged; None if there is one rank.
        """
        ranks = self.parts.ranks.world_size
        together = num_samples * ranks if num_together is None else num_together
        weight = self.accumulation.add(num_samples, together / ranks if ranks > 1 else None)
        if self.parts.accumulation_steps > 1:
            return weight
        # The only batch of an update has weight 1, however short it is: no rounding.
        return 1.0 if num_samples * ranks == together else num_samples * ranks / together

    def forward_backward(
        self,
        inputs: Any,
        targets: Any,
        weight: float,
        reset: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        exchange: bool = True,
    ) -> torch.Tensor:
        """Add `weight` times the gradients of the mean loss.

        Args:
            inputs: Inputs of the model.
            targets: Targets for the criterion.
            weight: Factor of the loss.
            reset: Rows whose recurrent state starts from the initial one.
            rows: Rows with a sample; all by default. A lane that has ended keeps a row without one.
            exchange: Whether ranks average their gradients in this backward pass: True for the last of an update.
        """
        parts = self.parts
        held_back: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._is_exchanged = True
        if not exchange and parts.runner is not None:
            held_back, self._is_exchanged = parts.parallel.held_back(parts.runner), False
        before = self._buffers.copy() if self._buffers else {}
        recurrent = parts.recurrent if reset is not None else None
        with held_back:
            with parts.precision.autocast(parts.device):
                if recurrent is not None and reset is not None:
                    outputs = recurrent.run(parts.forward, inputs, reset)
                else:
                    outputs = run_model(parts.forward, inputs, parts.model)
            if rows is not None:
                outputs, targets = take_rows(outputs, rows), take_rows(targets, rows)
            outputs, targets = in_float32(outputs, targets)
            loss = parts.criterion(outputs, targets)
            if not self._has_loss:
                check_loss(loss)
                check_gradient(loss)
                check_shapes(parts.criterion, outputs, targets, loss, parts.pair_words())
                self._has_loss = True
            parts.scaler.scale(loss if weight == 1.0 else loss * weight).backward()
        loss = loss.detach().float()
        # Reading a loss on the CPU costs nothing. On a GPU the host would wait, so the device decides.
        if (before or recurrent is not None) and (self._on_gpu or not math.isfinite(loss.item())):
            is_sound = torch.isfinite(loss)
            self._buffers.put_back(before, keep_if=is_sound)
            if recurrent is not None:
                recurrent.keep_if(is_sound)
        return loss

    def finish_update(self) -> None:
        """Update the weights with the batches that were added; does nothing if there are none."""
        if self.accumulation.num_batches:
            correction = self.accumulation.close()
            self.update(1.0 if self.parts.accumulation_steps == 1 else correction)

    def drop_update(self) -> None:
        """Drop the gradients of the batches that were added."""
        self.accumulation.close()
        self.parts.optimizer.zero_grad(set_to_none=True)
        if self.parts.scaler.is_enabled():
            # The scaler remembers that it has unscaled this optimizer, and would refuse to do so again.
            self.parts.scaler._per_optimizer_states.clear()

    def update(self, correction: float = 1.0, pieces: bool = False) -> None:
        """Unscale, correct, clip, step; leaves no gradients behind.

        Args:
            correction: Factor for the gradients.
            pieces: Whether to split small parameters (`split_update.py`), which pays in a captured step.
        """
        parts, parameters = self.parts, self._parameters
        if not self._is_exchanged:  # the epoch ended before the update had all its batches
            parts.parallel.exchange(parameters)
            self._is_exchanged = True
        if parts.scaler.is_enabled():
            parts.scaler.unscale_(parts.optimizer)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            raise InputError(
                "no parameter has a gradient after the backward pass.",
                "a loss that depends on the model's parameters",
                "give the optimizer the parameters of this model: AdamW(model.parameters())",
            )
        scale_gradients(parameters, correction)
        is_sparse = any(gradient.is_sparse for gradient in gradients)
        if is_sparse:
            gradients = self._use_sparse()
        if self.guarded and len(parts.optimizer.state) < len(parameters):
            make_moments(parts.optimizer)
        norm = torch.nn.utils.get_total_norm(split_tensors(gradients) if pieces else gradients)
        if self._on_gpu and self.guarded:
            with SplitUpdate() if pieces else contextlib.nullcontext():
                self._step_fused(norm)
        else:
            if parts.clip_norm is not None and is_sparse:
                clip_values(gradients, parts.clip_norm, norm)
            elif parts.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, parts.clip_norm, norm)
            self._step(norm, look=is_sparse or not self._on_gpu)
        parts.optimizer.zero_grad(set_to_none=True)

    def _use_sparse(self) -> list[torch.Tensor]:
        """Prepare for sparse gradients; return the values of all gradients, sharing their memory."""
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(SPARSE)
        optimizer = self.parts.optimizer
        make_unfused(optimizer)
        self.guarded = is_guarded(optimizer)
        return coalesce_gradients(self._parameters)

    def _step(self, norm: torch.Tensor, look: bool) -> None:
        """Step the optimizer. With `look` the host reads the norm first and skips an update that is not finite."""
        parts = self.parts
        if parts.scaler.is_enabled():
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()
        elif not look or math.isfinite(norm_on_host(norm)):
            parts.optimizer.step()
        else:
            self._skipped += 1

    def _step_fused(self, norm: torch.Tensor) -> None:
        """Clip and update in one pass over the gradients: the kernel divides them as it reads them.

        That saves three kernels, one of which is spent on checking whether the norm is finite. The step is no
        slower than a hand-written one without that check.
        """
        parts = self.parts
        optimizer: Any = parts.optimizer
        optimizer.grad_scale = None
        if parts.clip_norm is not None:
            # 1 / min(1, clip / (norm + 1e-6)), as torch clips.
            scale = torch.add(self._epsilon, norm.float(), alpha=1.0 / parts.clip_norm)
            optimizer.grad_scale = scale.clamp_min_(1.0)
        if parts.scaler.is_enabled():
            parts.scaler.step(optimizer)
            parts.scaler.update()
            return
        optimizer.found_inf = self._flag(norm)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _flag(self, norm: torch.Tensor) -> torch.Tensor:
        """Return a scalar on the device: 1 if the norm is not finite, else 0."""
        captured = torch.cuda.is_current_stream_capturing()
        if captured:
            flag = torch.zeros_like(self._one)
        else:
            if not self._flags:  # zeros for many steps in one kernel; summed up when they are used
                self._skipped += self._block.sum()
                self._block = torch.zeros(_NUM_FLAGS, device=norm.device)
                self._flags = list(self._block.unbind())
            flag = self._flags.pop()
        # The kernel does not support bfloat16.
        known = norm.float() if norm.dtype == torch.bfloat16 else norm
        torch._amp_foreach_non_finite_check_and_unscale_([known], flag, self._one)
        if captured:
            self._skipped += flag
        return flag


@torch.no_grad()
def coalesce_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Make the rows of sparse gradients unique; return dense gradients, and the values of sparse ones.

    Entries of the same row are added up first: the norm of their sum is not that of the entries.
    """
    values = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            parameter.grad = gradient.coalesce()
            gradient = parameter.grad.values()
        if gradient is not None:
            values.append(gradient)
    return values


@torch.no_grad()
def clip_values(values: Iterable[torch.Tensor], most: float, norm: torch.Tensor) -> None:
    """Clip in place, as torch clips dense gradients; torch cannot clip sparse ones."""
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for value in values:
        value.mul_(factor.to(value.device))


def norm_on_host(norm: torch.Tensor) -> float:
    """Return a norm on the host; for sharded gradients it is summed over ranks. Waits for the device."""
    return float(gather_whole(norm))


def as_float32(outputs: Any) -> Any:
    """Cast floating tensors of a nested output to float32, unless they are more precise."""
    if type(outputs) is torch.Tensor and outputs.dtype is torch.float32:  # most often
        return outputs
    return map_tensors(
        lambda x: x.float() if x.is_floating_point() and x.itemsize < 4 else x,
        outputs,
        in_records=True,
    )


def in_float32(outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return outputs in float32 or more. If they were cast, cast targets with fewer bits too.

    On a GPU, the backward pass of torch's losses fails where the two types differ.
    """
    made = as_float32(outputs)
    if made is not outputs and isinstance(targets, torch.Tensor):
        targets = as_float32(targets)
    return made, targets


def check_loss(loss: Any) -> None:
    """Raise an InputError unless the criterion returned a scalar tensor."""
    if isinstance(loss, torch.Tensor) and not loss.dim():
        return
    given = "None" if loss is None else f"a {type(loss).__name__}"
    if isinstance(loss, torch.Tensor):
        given = f"a tensor of shape {tuple(loss.shape)}"
    advice = "loss.mean() at the end of the criterion; torch's own losses have reduction='mean'"
    if isinstance(loss, float | int | None):
        advice = "return loss at the end of the criterion, not loss.item()"
    elif isinstance(loss, Mapping):
        whole = "losses['loss']" if "loss" in loss else "sum(losses.values())"
        advice = f"return {whole} at the end of the criterion"
    elif isinstance(loss, tuple | list):
        advice = "return losses[0] at the end of the criterion, or sum(losses)"
    raise InputError(
        f"the criterion returned {given}.", "the mean loss of the batch: a scalar tensor", advice
    )


def check_gradient(loss: torch.Tensor) -> None:
    """Raise an InputError if a loss has no gradient."""
    if not loss.requires_grad and not torch.is_grad_enabled():
        raise InputError(
            "gradients are turned off where the model is trained.",
            "training outside of torch.no_grad() and torch.inference_mode()",
            "torch.set_grad_enabled(True) before",
        )
    if not loss.requires_grad:
        raise InputError(
            "the criterion returned a loss without a gradient.",
            "a loss that is computed from the model's outputs and parameters that require a gradient",
            "leave .detach(), torch.no_grad() and .data out of the model and the criterion",
        )


@torch.no_grad()
def check_shapes(
    criterion: Criterion,
    outputs: Any,
    targets: Any,
    loss: torch.Tensor,
    pair: tuple[str, str] | None = None,
) -> None:
    """Raise if the criterion compares every output with every target: (B, 1) against (B,), or the reverse.

    torch broadcasts both to (B, B), and trains the model towards the mean. A criterion that reshapes them
    itself is accepted: it gives the same loss for outputs of the targets' shape.

    Args:
        criterion: Compares outputs with targets.
        outputs: Outputs of the model.
        targets: Targets of the batch.
        loss: The criterion's result for them.
        pair: Inputs and targets as an `unpack` takes them from a batch; None if the user gave an `unpack`.
    """
    if not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
        return
    shapes = tuple(outputs.shape), tuple(targets.shape)
    longer, shorter = max(shapes, key=len), min(shapes, key=len)
    if longer != (*shorter, 1) or shorter[-1:] == (1,) or not targets.is_floating_point():
        return
    # One that counts its calls counts this one in a copy.
    if isinstance(criterion, torch.nn.Module):
        criterion = copy.deepcopy(criterion)
    try:
        wanted = criterion(outputs.detach().reshape(targets.shape), targets)
    except Exception:  # noqa: BLE001  it needs both shapes as they are: `outputs[:, 0] - targets`
        return
    if torch.allclose(wanted.float(), loss.detach().float(), rtol=1e-4):
        return
    changed = ".reshape(-1, 1)" if len(shapes[0]) > len(shapes[1]) else ".reshape(-1)"
    raise InputError(
        f"the model's outputs are {shapes[0]} and the targets {shapes[1]}: the criterion compares every output "
        "with every target.",
        "outputs and targets of one shape",
        f"targets{changed} in unpack="
        if pair is None
        else f"Trainer(..., unpack=lambda batch: ({pair[0]}, {pair[1]}{changed}))",
    )


def take_rows(value: Any, rows: torch.Tensor) -> Any:
    """Return the rows of every tensor in a nested value."""
    return map_tensors(lambda x: x.index_select(0, rows), value)


def make_guarded(optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """Make torch's Adam, AdamW and SGD run fused, with the learning rate on the device; return what was done.

    A fused update is one kernel for all parameters. It can skip itself if a gradient is not finite, and it
    can be captured in a CUDA graph. The mathematics is the same. SGD with dampening treats its first update
    specially, so that update cannot be skipped on a GPU: there it stays unfused.
    """
    kind, groups = type(optimizer), optimizer.param_groups
    on_gpu = device.type == "cuda"
    if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return _keep_unfused(optimizer, device)
    floating = all(p.is_floating_point() for group in groups for p in group["params"])
    if any(is_spread(p) for group in groups for p in group["params"]):
        return f"{kind.__name__} runs as it is (parameters in parts)"
    unlike = [name for name in ("differentiable", "amsgrad") if any(g.get(name) for g in groups)]
    if on_gpu and any(g.get("momentum") and g.get("dampening") for g in groups):
        unlike.append("dampening")
    if not floating or unlike:
        why = ", ".join(unlike) or "parameters are not floating"
        return f"{_keep_unfused(optimizer, device)} ({why})"
    for group in groups:
        group["fused"], group["foreach"] = True, False
    _bring_counts(optimizer, device)
    fill_momentum(optimizer)
    vars(optimizer)["_step_supports_amp_scaling"] = True
    return f"{kind.__name__} runs fused"


def _keep_unfused(optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """Leave an optimizer unfused; put counts and rates of torch's own on a GPU; return what was done."""
    name = type(optimizer).__name__
    if device.type != "cuda" or not is_capturable(optimizer):
        return f"{name} runs as it is"
    _bring_counts(optimizer, device)
    return f"{name} runs unfused, with its counts on the GPU"


def is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's own that can keep its counts and its rate on the device."""
    is_torchs = type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]
    return is_torchs and all("capturable" in group for group in optimizer.param_groups)


def _bring_counts(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Put an optimizer's step counts and rates on the device: a graph would repeat values of the host.

    Loading a checkpoint replaces them, so this is called again after it.
    """
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = device.type == "cuda"
        if device.type == "cuda":
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device)


def is_guarded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer itself skips an update with a non-finite gradient, on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_sparse_gradients(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether an embedding asks for sparse gradients (`sparse=True`) and is trained."""
    return any(
        getattr(module, "sparse", None) is True
        and any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        for root in modules
        for module in root.modules()
    )


def make_unfused(optimizer: torch.optim.Optimizer) -> None:
    """Undo `make_guarded`: torch's fused SGD refuses sparse gradients."""
    groups = optimizer.param_groups
    if any(group.get("fused") for group in groups):
        for group in groups:
            group["fused"] = False
        vars(optimizer).pop("_step_supports_amp_scaling", None)
    for parameter in (p for group in groups if group.get("nesterov") for p in group["params"]):
        # Nesterov adds momentum to the gradient, and torch cannot add a dense tensor to a sparse one.
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        sparse = parameter.grad is not None and parameter.grad.is_sparse
        if sparse and momentum is not None and not momentum.is_sparse:
            dims = parameter.grad.sparse_dim()
            optimizer.state[parameter]["momentum_buffer"] = momentum.to_sparse(dims)


def fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Create SGD's momentum buffers with the value 0, from which the first update is torch's own.

    Torch allocates them uninitialised at the first update and lets the kernel fill them. If that update is
    skipped, the next one would read whatever was in that memory. Existing momentum stays. With dampening
    torch's first update is a different formula, so nothing is done.

    Parameters that are unfrozen later get buffers before their first update: the fused kernel takes all or none.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    _fill_momentum(optimizer)
    if _fill_momentum not in optimizer._optimizer_step_pre_hooks.values():
        optimizer.register_step_pre_hook(_fill_momentum)


def _fill_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        if group["momentum"] == 0 or group["dampening"] != 0:
            continue
        for parameter in group["params"]:
            known = optimizer.state.get(parameter, {})
            if parameter.requires_grad and known.get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(
                    parameter, memory_format=torch.preserve_format
                )


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create Adam's state for every parameter that has a gradient, before any parameter is changed.

    Torch creates it group by group, each just before its update. If memory runs out in a later group, the
    first groups are already updated, and the update cannot be undone.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not optimizer.state.get(parameter):
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


def compact_recurrent(model: torch.nn.Module) -> None:
    """Make the weights of every LSTM and GRU contiguous, as cuDNN requires.

    After a layer is copied or its weights are assigned, they are not: cuDNN would warn and compact them at every call.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()
