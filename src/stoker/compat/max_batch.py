"""`find_max_batch_size`: the largest batch that trains on a device, under its documented name (S2-11).

Enters: a model, the shape of one sample, a device. Leaves: a number of samples that was trained on, twice,
with the margin of memory left free; the model as it was. Costs about 2 log2(n) trial batches.

The chapter's version counts neither the optimizer's state nor mixed precision, leaves gradients and changed
batch norms behind, keeps the batch that did not fit alive during the next trial, and returns 1 when 1 does not fit.
Here a trial is two whole training steps: the second runs beside the state that the first has made.

The largest batch is seldom the fastest: `stoker tune` looks for that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from stoker.arguments import explained
from stoker.errors import InputError
from stoker.loader.slabs import usable_device
from stoker.measure.gauge import MARGIN, Gauge
from stoker.measure.search import largest_fitting
from stoker.train.batches import iterate_tensors, map_tensors
from stoker.train.generators import capture_rng, restore_rng
from stoker.train.precision import PrecisionChoice, choose_precision
from stoker.train.ranks import Ranks
from stoker.train.settings import Precision
from stoker.train.step import as_float32

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@explained("stoker.find_max_batch_size(model, (3, 224, 224), 'cuda')")
def find_max_batch_size(
    model: torch.nn.Module,
    input_shape: Sequence[int],
    device: str | int | torch.device,
    *,
    make_loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    precision: Precision = "fp32",
    max_batch: int = 65536,
    margin: float = MARGIN,
    make_inputs: Callable[[int], Any] | None = None,
    say: Callable[[str], object] = print,
) -> int:
    """Return the largest batch whose training step fits into the device's memory, and report it by `say`.

    Weights, gradients, buffers, optimizer state, random generators, train or eval mode and the model's
    device are afterwards what they were. Where torch.distributed is initialised, every rank must call it
    with its own bare model (not DistributedDataParallel, whose ranks wait for each other while one is out
    of memory), and all return the smallest of their answers.

    Args:
        model: Called with one batch of inputs.
        input_shape: Shape of one sample, without the batch: (3, 224, 224).
        device: "cuda", "cuda:0", "cpu".
        make_loss: Turns the model's outputs into a loss; by default the cross entropy of outputs with two or
            more classes, and the mean square of others.
        optimizer: What the training will use: an optimizer over this model's parameters, or a function
            that makes one of parameters; AdamW by default.
        precision: As in `TrainSettings`: autocast and scaled gradients are counted.
        max_batch: The largest size of interest.
        margin: Share of the memory that must stay free.
        make_inputs: Makes inputs on the device for a batch size, for models that take something else than one
            float32 tensor.
        say: Gets the line "Max batch size: N", on the first rank.

    Raises:
        InputError: Not even one sample fits, or an argument makes no sense.
    """
    _check(input_shape, max_batch, margin)
    target = usable_device(device)
    gauge, chosen = Gauge(target, margin), choose_precision(precision, target, model)

    def train(size: int) -> None:
        inputs = (
            make_inputs(size) if make_inputs else torch.randn((size, *input_shape), device=target)
        )
        _train_twice(model, inputs, make_loss or default_loss, optimizer, chosen, target)

    def fits(size: int) -> bool:
        """Whether two steps of this size ran and left the margin free, on all ranks."""
        model.zero_grad(set_to_none=True)
        _, refused = gauge.attempt(size, lambda: train(size))
        return Ranks.current().all_of(not refused and gauge.peak_bytes() <= gauge.cap_bytes)

    with _as_it_was(model, target, optimizer):
        best = largest_fitting(max_batch, fits)
        gauge.release()
    if not best:
        raise InputError(
            f"one sample of shape {tuple(input_shape)} does not fit on {target} with the model's weights, "
            f"gradients and optimizer state, {margin:.0%} left free.",
            "a model whose training step fits",
            "precision='bf16', an optimizer with less state, a smaller model, or a larger device",
        )
    if Ranks.current().is_first:
        say(f"Max batch size: {best}")
    return best


def default_loss(outputs: Any) -> torch.Tensor:
    """Return a loss of every floating tensor of the outputs: cross entropy, or the mean square."""
    losses = [_loss_of(tensor) for tensor in iterate_tensors(outputs) if tensor.is_floating_point()]
    if not losses:
        raise InputError(
            f"the model returns {type(outputs).__name__} without a floating tensor.",
            "outputs to compute a loss of",
            "make_loss=lambda outputs: my_loss(outputs)",
        )
    return torch.stack(losses).sum()


def _loss_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2 or tensor.shape[1] < 2:
        return tensor.square().mean()
    wanted = torch.zeros(
        tensor.shape[0], *tensor.shape[2:], dtype=torch.int64, device=tensor.device
    )
    return torch.nn.functional.cross_entropy(tensor, wanted)


def _check(input_shape: Sequence[int], max_batch: int, margin: float) -> None:
    if not all(isinstance(size, int) and size >= 1 for size in input_shape):
        raise InputError(
            f"input_shape is {tuple(input_shape)!r}.",
            "sizes of 1 or more, of one sample, without the batch",
            "(3, 224, 224)",
        )
    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
        raise InputError(f"max_batch is {max_batch!r}.", "1 or more", "max_batch=65536")
    if not 0 <= margin < 1:
        raise InputError(f"margin is {margin!r}.", "0 or more, below 1", f"margin={MARGIN}")


def _train_twice(
    model: torch.nn.Module,
    inputs: Any,
    make_loss: Callable[[Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | MakeOptimizer | None,
    precision: PrecisionChoice,
    device: torch.device,
) -> None:
    """Run two training steps: the second runs beside the state that the first has made."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = (optimizer or torch.optim.AdamW)(
            [p for p in model.parameters() if p.requires_grad]
        )
    scaler = precision.make_scaler(device)
    with precision.alone(device):
        for _ in range(2):
            with precision.autocast(device):
                outputs = model(inputs)
            loss = make_loss(as_float32(outputs))
            scaler.scale(loss).backward()
            if scaler.is_enabled():
                scaler.unscale_(optimizer)
            # Not by the scaler, which skips the first updates while it searches its scale: the
            # optimizer's state would not be made, nor counted. The weights are restored anyway.
            optimizer.step()
            if scaler.is_enabled():
                scaler.update()
            optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _as_it_was(model: torch.nn.Module, device: torch.device, optimizer: Any) -> Iterator[None]:
    """Put the model on the device in train mode; afterwards restore everything from copies in host memory."""
    tensors = [*model.parameters(), *model.buffers()]
    homes = {tensor.device for tensor in tensors} or {device}
    if len(homes) > 1:
        raise InputError(
            f"the model lies on {', '.join(sorted(map(str, homes)))}.",
            "a model on one device",
            f"model.to('{device}')",
        )
    kept = [tensor.detach().cpu().clone() for tensor in tensors]
    gradients = [p.grad.cpu() if p.grad is not None else None for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    state = None
    if isinstance(optimizer, torch.optim.Optimizer):
        state = map_tensors(lambda tensor: tensor.cpu().clone(), optimizer.state_dict())
    generators = capture_rng()
    model.to(device).train()
    if state is not None and homes != {device}:
        # Its tensors follow the parameters. Clones, because `load_state_dict` does not copy on a CPU.
        optimizer.load_state_dict(map_tensors(torch.clone, state))
    try:
        yield
    finally:
        model.to(next(iter(homes)))
        with torch.no_grad():
            for tensor, before in zip([*model.parameters(), *model.buffers()], kept, strict=True):
                tensor.copy_(before)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        for module, training in modes:
            module.training = training
        if state is not None:
            optimizer.load_state_dict(state)
        restore_rng(generators)
