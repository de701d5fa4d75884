"""Evaluation: the mean loss and the metrics of a split, without gradients.

Enters: a model, a criterion, a feed. Leaves: numbers by name. Costs the forward passes. The host does not wait
for the device before the end, unless a metric does.

Out of memory: the batch is cut into smaller passes, and later batches too. In evaluation a sample's output does
not depend on the others, so the result is the same. Losses are weighted by their samples.
Stop: `is_over` is called before every batch; if it returns True, `EvaluationStopped` is raised and there is no result.
Failure: the error is raised, and the model has its former mode again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple, cast

import torch

from stoker.errors import InputError
from stoker.report import Note, Topic
from stoker.train.batches import Feed, Work, map_tensors
from stoker.train.diagnosis import explain_samples
from stoker.train.heartbeat import HEARTBEAT
from stoker.train.oom import bytes_in_use, forget_frames, is_oom, let_go, smaller_pass
from stoker.train.parallel import is_sharded
from stoker.train.precision import PrecisionChoice
from stoker.train.ranks import Ranks
from stoker.train.recurrent_state import RecurrentState, make_recurrent_state
from stoker.train.step import Criterion, in_float32, num_needed, run_model, take_rows
from stoker.units import format_bytes


class EvaluationStopped(Exception):  # noqa: N818 (no error: it was requested)
    """`is_over` was true before the end of the split: there is no result."""


class _Evaluated(NamedTuple):
    """Result of one pass: the number of its batch, the mean loss, and the values for the metrics."""

    number: int
    loss: torch.Tensor
    outputs: Any
    targets: Any
    num_samples: int


def check_accumulator(metrics: Any) -> None:
    """Raise if `metrics` neither makes an accumulator nor is one."""
    if metrics is None or _is_accumulator(metrics):
        return
    if callable(metrics) and not num_needed(metrics):
        return
    name = getattr(metrics, "__name__", type(metrics).__name__)
    raise InputError(
        f"metrics is {name}{', which needs arguments' if callable(metrics) else ''}.",
        "a class, or a function without arguments, that makes an object with update(outputs, targets) and compute()",
        "leave metrics out",
    )


def _is_accumulator(metrics: Any) -> bool:
    """Whether a value is an accumulator itself, such as a metric of torchmetrics, and not what makes one."""
    names = ("update", "compute")
    return not isinstance(metrics, type) and all(callable(getattr(metrics, n, None)) for n in names)


def make_accumulator(metrics: Any, device: torch.device) -> Any:
    """Return a new accumulator of metrics, on the device if it is a module; None without metrics."""
    if metrics is None:
        return None
    made = copy.deepcopy(metrics) if _is_accumulator(metrics) else metrics()
    return made.to(device) if isinstance(made, torch.nn.Module) else made


def computed(accumulator: Any) -> dict[str, float]:
    """Return the metrics of an accumulator by name; a single one is named by its class.

    Raises:
        InputError: A metric is no number.
    """
    found = accumulator.compute()
    if not isinstance(found, Mapping):
        found = {type(accumulator).__name__: found}
    numbers = {name: _number(value) for name, value in found.items()}
    odd = next((name for name, number in numbers.items() if number is None), None)
    if odd is not None:
        shape = tuple(getattr(found[odd], "shape", ()))
        raise InputError(
            f"metrics computed {odd!r} as a {type(found[odd]).__name__}{f' of shape {shape}' if shape else ''}.",
            "a number for each name",
            f"leave {odd} out of what compute() returns",
        )
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: Any) -> float | None:
    """Return a number, or the only value of a tensor or array, as a float; None for anything else."""
    if getattr(value, "shape", None) is not None and math.prod(value.shape) == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) else None


class Evaluator:
    """Evaluates a model on splits.

    Args:
        model: Put into evaluation mode during `evaluate`, then back into its former mode.
        criterion: `(outputs, targets) -> mean loss`.
        metrics: Makes an accumulator with `update(outputs, targets)` and `compute()`.
        precision: Number format of the forward pass.
        device: Device of the model.
        survive: Whether to cut batches when memory runs out; False raises the error.
        say: Called with a note for every cut.
        give_way: Called before a cut: frees memory elsewhere and returns whether it did.
        ranks: If each rank has its own part of the samples, the results are merged; metrics then need
            `state()` and `merge(states)`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        criterion: Criterion,
        metrics: Callable[[], Any] | None,
        precision: PrecisionChoice,
        device: torch.device,
        survive: bool = True,
        say: Callable[[Note], object] = lambda _: None,
        give_way: Callable[[], bool] = lambda: False,
        ranks: Ranks | None = None,
    ) -> None:
        check_accumulator(metrics)
        self._model, self._criterion, self._metrics = model, criterion, metrics
        self._precision, self._device = precision, device
        self._say, self._give_way = say, give_way
        self._most: int | None = None
        self._first_bad: int | None = None
        self._ranks = ranks or Ranks()
        # Every pass of a sharded model is collective: one rank alone cannot run smaller passes.
        self._survives = survive and not (self._ranks.are_several and is_sharded(model))

    @torch.no_grad()
    def evaluate(
        self, feed: Feed, when: str = "", is_over: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Return the mean loss and the metrics over all batches of the feed's epoch 0.

        Args:
            feed: Batches of the split.
            when: For the text of an error: "in epoch 3".
            is_over: Called before every batch; True stops the evaluation.

        Raises:
            InputError: The feed has no batch.
            EvaluationStopped: `is_over` was true.
        """
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        counted = make_accumulator(self._metrics, self._device)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        count, numbers = 0, []
        num_good = torch.zeros((), dtype=torch.int64, device=self._device)
        try:
            for evaluated in self._over(feed, is_over):
                total += evaluated.loss.double() * evaluated.num_samples
                num_good += torch.isfinite(
                    total
                )  # a total that is not finite stays so: this counts the passes before it
                count += evaluated.num_samples
                numbers.append(evaluated.number)
                if counted is not None:
                    counted.update(evaluated.outputs, evaluated.targets)
        finally:
            for module, was_training in modes:
                module.training = was_training
        loss, number = float(total), float(count)
        if self._ranks.are_several and (feed.is_shared or not feed.is_stoker):
            # Also right for a foreign loader that has all samples on every rank: the mean stays the same.
            loss, number = self._ranks.total(loss, number)
        if not number:
            raise no_batches(f"the validation loader yielded no batch{when and f' {when}'}.")
        self._first_bad = None if math.isfinite(float(total)) else numbers[int(num_good)]
        if self._ranks.are_several and feed.is_shared:
            counted = self._merge(counted)
        return {"loss": loss / number} | ({} if counted is None else computed(counted))

    def explain(self, feed: Feed) -> str:
        """Explain why the loss of the last `evaluate` was not finite: the first such batch and its samples.

        With a stoker loader, the batches up to that one are read again.
        """
        if self._first_bad is None:
            return "Every loss on this rank was finite."
        positions = None
        if feed.is_stoker:
            feed.begin_anew()
            with closing(cast(Any, iter(feed))) as works:
                for _ in range(self._first_bad + 1):
                    positions = next(works).positions
        where = f"the loss of validation batch {self._first_bad} is not finite"
        finding = explain_samples(feed.loader, positions, self._precision, where)
        return f"{finding.given} Try: {finding.fix}"

    def _merge(self, counted: Any) -> Any:
        """Return the metrics over the samples of all ranks, merged in the order of ranks."""
        if counted is None:
            return None
        if not hasattr(counted, "merge"):
            raise InputError(
                f"{type(counted).__name__} has no merge, and each rank has seen a part of the samples.",
                "metrics with state() and merge(states), or all samples on every rank",
                "Loader(..., rank=0, world_size=1) for validation",
            )
        own = map_tensors(torch.Tensor.cpu, counted.state())
        states = [
            map_tensors(lambda part: part.to(self._device), state)
            for state in self._ranks.gather(own)
        ]
        counted.merge(states)
        return counted

    def _over(self, feed: Feed, is_over: Callable[[], bool]) -> Iterator[_Evaluated]:
        recurrent = make_recurrent_state(self._model, feed.loader, self._device)
        feed.begin_anew()
        works, num_failures, number = iter(feed), 0, 0
        while True:
            if is_over():
                raise EvaluationStopped
            try:
                work = next(works, None)
            except RuntimeError as error:
                num_failures += 1
                if not feed.can_begin_again or (not self._let_go(error) and num_failures > 1):
                    raise
                works = iter(feed)
                continue
            if work is None:
                return
            num_failures = 0
            HEARTBEAT.mark("validating")
            yield from self._in_parts(work, recurrent, number)
            number += 1

    def _in_parts(
        self, work: Work, recurrent: RecurrentState | None, number: int
    ) -> Iterator[_Evaluated]:
        start = 0
        while start < work.num_samples:
            whole = self._most is None or not work.can_cut
            part = work if whole else work.part(start, start + (self._most or 0))
            state = None if recurrent is None else recurrent.state_dict()
            try:
                evaluated = self._forward(part, recurrent, number)
            except RuntimeError as error:
                before = bytes_in_use(self._device)
                if not self._let_go(error):
                    self._cut(work, before)
                if recurrent is not None:
                    recurrent.load_state_dict(state)
                continue
            yield evaluated
            start += part.num_samples

    def _forward(self, work: Work, recurrent: RecurrentState | None, number: int) -> _Evaluated:
        with self._precision.autocast(self._device):
            if recurrent is not None and work.reset is not None:
                outputs = recurrent.run(self._model, work.inputs, work.reset)
            else:
                outputs = run_model(self._model, work.inputs)
        (outputs, targets), rows = in_float32(outputs, work.targets), work.rows
        if rows is not None:
            outputs, targets = take_rows(outputs, rows), take_rows(targets, rows)
        loss = self._criterion(outputs, targets)
        return _Evaluated(number, loss, outputs, targets, work.num_samples)

    def _let_go(self, error: RuntimeError) -> bool:
        """Free memory after it ran out; raise other errors.

        Returns:
            Whether memory was freed elsewhere, so that the same pass can be repeated.
        """
        if not self._survives or not is_oom(error):
            raise error
        forget_frames(error)
        let_go(self._device)
        return self._give_way()

    def _cut(self, work: Work, before_bytes: int) -> None:
        """Run fewer samples per pass from now on; raise an InputError if that is not possible."""
        size = min(work.num_samples, self._most or work.num_samples)
        smaller = smaller_pass(work.num_samples, size) if work.can_cut else None
        if smaller is None:
            raise InputError(
                f"the device's memory ran out in validation with {size} sample{'s' * (size > 1)} at once"
                f"{'' if work.can_cut else ', which cannot go through in parts'}.",
                "a batch that fits beside the weights and what the optimizer keeps",
                "a smaller batch size of the validation loader, precision='bf16', or a larger GPU",
            )
        self._most = smaller
        after_bytes = bytes_in_use(self._device)
        self._say(
            Note(
                f"memory ran out in validation with {format_bytes(before_bytes)} in use "
                f"({format_bytes(after_bytes)} after letting go): {size} samples at once, now {smaller}",
                Topic.MEMORY,
                {"before_bytes": before_bytes, "after_bytes": after_bytes, "pass_size": smaller},
            )
        )


def no_batches(given: str) -> InputError:
    """Return the error for a loader whose epoch has no batch."""
    return InputError(
        given,
        "something that can be iterated every epoch, and has a batch in it",
        "a loader with drop_last=False, or a list or DataLoader instead of a generator, which can be read once",
    )
