"""`stoker.capture`: the whole step of a user's training loop as one CUDA graph.

Enters: a function that trains on one batch, and the model and optimizer that it changes. Leaves: a function to call
instead, with the same effect. Costs: see `graphed_step.py`; a graph for each of the first few shapes of a batch.

    step = stoker.capture(train_step, example_batch, model=model, optimizer=optimizer)
    for batch in loader:
        loss = step(batch)

The function does everything for one batch: forward, backward, clip, optimizer step, zero_grad, and returns the loss.
With `loader=` it is called with the indices of `Loader.index_batches`: gather and augmentation are then in the graph.

Contract:

    success        the weights are those that the function itself would give; the result is a copy, detached
    cannot capture the function itself is called from then on; `reason` says why
    another shape  has a graph of its own after its own warm-up; after `MOST_GRAPHS` shapes, others run eagerly
    out of memory  while a graph is made: the step is undone and run eagerly. Elsewhere: raised
    another error  of the function is raised unchanged
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stoker.arguments import explained
from stoker.errors import InputError
from stoker.loader.batch import IndexBatch
from stoker.loader.loader import Loader
from stoker.report import Note
from stoker.train.batches import alike, is_plain, iterate_tensors, map_tensors
from stoker.train.graphs.graphed_step import GraphedStep, has_graphs
from stoker.train.graphs.places import is_plain_object, name_key
from stoker.train.graphs.reasons import describe_failure, step_note
from stoker.train.graphs.step_state import StepState, drawing_objects, used_objects
from stoker.train.oom import forget_frames, is_oom, let_go
from stoker.train.ranks import Ranks
from stoker.train.schedule import needed_argument
from stoker.train.step import (
    SPARSE,
    fill_momentum,
    has_sparse_gradients,
    make_guarded,
    make_unfused,
    num_needed,
)

MOST_GRAPHS = 4
"""Shapes of a batch that get a graph each; every graph keeps the memory of a step."""
StepFunction = Callable[..., Any]
_T = TypeVar("_T")
Several: TypeAlias = _T | Sequence[_T] | Mapping[str, _T]
"""One, a list of them, or a dict of them by name."""


class _Arguments(NamedTuple):
    """A batch that was given to the step as several arguments, or by name."""

    given: tuple[Any, ...]
    named: dict[str, Any]


@explained("stoker.capture(step, model=model, optimizer=optimizer)")
def capture(
    step: StepFunction,
    example_batch: Any = None,
    *,
    model: Several[torch.nn.Module],
    optimizer: Several[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None = None,
    loader: Loader | None = None,
    say: Callable[[str], object] | None = None,
) -> CapturedFunction:
    """Return a function that does what `step` does, from one launch per call where that is possible.

    torch's Adam, AdamW and SGD are made fused, with the learning rate on the device, so that schedulers may change it.
    Other optimizers are captured as they are; if their learning rate changes, steps run eagerly.

    Args:
        step: Trains on one batch and returns its loss, or a nested value of tensors; `step(batch)` or `step(x, y)`.
            It must change only objects that are given here; pass a moving average of the weights in `model` too.
        example_batch: A batch as `step` gets it, to check that it can be captured. It is not trained on.
        model: Every module that `step` changes.
        optimizer: Every optimizer that `step` steps. Tensors in it that are no `nn.Parameter` need no module.
        scaler: Scaler of the gradients, if there is one; one that `step` names is found.
        loader: A stoker `Loader`. Call the result with the items of its `index_batches()`; `step` then gets the
            batches that they stand for.
        say: Called with a line when steps continue eagerly; by default a RuntimeWarning is issued.

    Raises:
        InputError: There is nothing to capture: no function, no parameters, or a batch without tensors. Or the step
            trains a model or optimizer that was not given here.
    """
    return CapturedFunction(step, example_batch, model, optimizer, scaler, loader, say)


class CapturedFunction:
    """The result of `capture`: call it with a batch.

    Args:
        step: As for `capture`.
        example_batch: As for `capture`.
        model: As for `capture`.
        optimizer: As for `capture`.
        scaler: As for `capture`.
        loader: As for `capture`.
        say: As for `capture`.
        calls: Functions of the user that `step` calls: the variables that they read are watched too.
        refusal: Why the step must not be captured, if the caller knows; the optimizer is then left as it is.

    Attributes:
        device: Device on which the step runs.
    """

    def __init__(
        self,
        step: StepFunction,
        example_batch: Any,
        model: Several[torch.nn.Module],
        optimizer: Several[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None,
        loader: Loader | None,
        say: Callable[[str], object] | None,
        calls: Sequence[Any] = (),
        refusal: str | None = None,
    ) -> None:
        optimizers = _listed(optimizer, torch.optim.Optimizer)
        modules = [*_listed(model, torch.nn.Module), *_bare_tensors(optimizers)]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        if not callable(step) or not parameters or not optimizers:
            raise InputError(
                f"a step that is a {type(step).__name__}, {len(parameters)} parameters and "
                f"{len(optimizers)} optimizers.",
                "a function of one batch, and what it trains; a list of layers is a module as nn.ModuleList",
                "stoker.capture(step, batch, model=model, optimizer=optimizer)",
            )
        _check_trained(step, parameters, optimizers)
        self.device = parameters[0].device
        if loader is not None and (loader.tier == "streamed" or loader.walks_in_lanes):
            raise InputError(
                f"a loader that {'walks in lanes' if loader.walks_in_lanes else 'streams its data'}.",
                "a loader with its data on the device, without lanes; or no loader=, and step(batch)",
                "stoker.capture(step, model=model, optimizer=optimizer)",
            )
        self._step, self._loader, self._say = step, loader, say
        self._needs_several = num_needed(step) > 1
        self._graphs: list[_FunctionGraph] = []
        others = drawing_objects(step, *calls)

        def draws() -> list[Any]:
            augmentation = None if loader is None else loader.augment
            return others if augmentation is None else [augmentation, *others]

        found = _scalers_of(step) if scaler is None else [scaler]
        scalers = list({id(one): one for one in found}.values())
        ranks = Ranks.current()
        self._state = StepState(
            modules, optimizers, scalers, self.device, draws, ranks, [step, *calls]
        )
        self._refusal = self._find_refusal(example_batch, parameters) or refusal
        if self._refusal is None:
            for each in optimizers:
                make_guarded(each, self.device)
                fill_momentum(each)
        elif has_graphs(self.device):
            self._tell(step_note(self.reason, captured=False, fallback=True))

    def _find_refusal(self, example: Any, parameters: Sequence[torch.Tensor]) -> str | None:
        """Return why the step cannot be captured, as far as is known without trying."""
        if example is not None and not isinstance(example, IndexBatch):
            if not is_plain(example):
                return _name_kind(example)
            if not any(True for _ in iterate_tensors(example)):
                raise InputError(
                    f"the batch is a {type(example).__name__} without tensors.",
                    "tensors, or tuples, lists and dicts of them",
                    "stoker.capture(step, next(iter(loader)), model=model, optimizer=optimizer)",
                )
        if not has_graphs(self.device):
            return f"there are no CUDA graphs on the {self.device.type.upper()}"
        if has_sparse_gradients(self._state.modules):
            return SPARSE
        closures = [type(one).__name__ for one in self._state.optimizers if needed_argument(one)]
        if closures:
            # LBFGS: how often the closure runs depends on its losses, and a graph has a fixed number of launches.
            return f"{closures[0]} runs its closure as often as it decides on the host"
        # Launches of other threads are not part of a capture.
        if any(isinstance(module, torch.nn.DataParallel) for module in self._state.modules):
            return "DataParallel starts threads in the forward pass"
        if len({parameter.device for parameter in parameters}) > 1:
            return "the model is on several devices"
        if self._state.ranks.are_several:
            # One rank's short batch would leave the others waiting in a comparison.
            return "several processes train together, and only a Trainer knows the batches of all"
        # A graph's tensors have fixed sizes: padding them would change what the step computes.
        ragged = (
            [c.field for c in self._loader.columns if c.kind == "ragged"] if self._loader else []
        )
        if ragged:
            return f"ragged fields ({', '.join(ragged)}) have another size in every batch"
        return None

    def __repr__(self) -> str:
        name = getattr(self._step, "__qualname__", type(self._step).__name__)
        return f"CapturedFunction({name}, {self.reason})"

    @property
    def reason(self) -> str:
        """How steps run, and why: "captured ..." or "eager: ..."."""
        if self._refusal is not None:
            return f"eager: {self._refusal}"
        if not self._graphs:
            return "captured after the first steps"
        return "; ".join(dict.fromkeys(graph.reason for graph in self._graphs))

    @property
    def is_captured(self) -> bool:
        """Whether batches of the last shape are replayed now."""
        return bool(self._graphs) and self._graphs[0].active

    @property
    def can_capture(self) -> bool:
        """Whether steps are replayed, or may still be; False where all of them run eagerly for good."""
        given_up = self._graphs and all(graph.is_given_up for graph in self._graphs)
        return self._refusal is None and not given_up

    @property
    def slowdown(self) -> float | None:
        """Time of an eager step / time of a replay, as measured while they were compared; None before."""
        return self._graphs[0].slowdown if self._graphs else None

    def __call__(self, *batches: Any, **named: Any) -> Any:
        """Train on a batch; return what the step returns, detached. Does not wait for the device.

        A step with several arguments, `step(x, y)`, is called with them, or with a tuple or dict of them.
        """
        is_one = len(batches) == 1 and not named
        batch = batches[0] if is_one else _Arguments(batches, named)
        if self._refusal is not None:
            return self.run_eagerly(batch)
        if not isinstance(batch, IndexBatch) and not is_plain(batch):
            self.refuse(_name_kind(batch))
            return self.run_eagerly(batch)
        return self._graph_for(batch).run(batch)

    def run_eagerly(self, batch: Any) -> Any:
        """Call the step itself."""
        if isinstance(batch, IndexBatch):
            if self._loader is None:
                raise InputError(
                    "the step was called with the indices of a batch.",
                    "the loader that they are of",
                    "stoker.capture(step, model=model, optimizer=optimizer, loader=loader)",
                )
            batch = self._assembled(self._loader, batch)
        return _checked_result(self._call(batch))

    @staticmethod
    def _assembled(loader: Loader, indices: IndexBatch | torch.Tensor) -> Any:
        """Return the batch in the form that an iteration over the loader yields."""
        batch, names = loader.assemble(indices), loader.as_tuple
        if names is None:
            return batch
        return batch[names] if isinstance(names, str) else tuple(batch[name] for name in names)

    def _call(self, batch: Any) -> Any:
        if isinstance(batch, _Arguments):
            return self._step(*batch.given, **batch.named)
        if self._needs_several and isinstance(batch, tuple | list):
            return self._step(*batch)
        if self._needs_several and isinstance(batch, Mapping):
            return self._step(**batch)
        return self._step(batch)

    def run_static(self, static: Any) -> Any:
        """Call the step with the static tensors of a graph; indices are assembled first."""
        if self._loader is not None and isinstance(static, torch.Tensor):
            static = self._assembled(self._loader, static)
        return _checked_result(self._call(static))

    def forget(self) -> None:
        """Drop all graphs; the next steps warm up and capture again. Call it after loading an optimizer's state."""
        for graph in self._graphs:
            graph.forget()

    def refuse(self, reason: str) -> None:
        """Run all further steps eagerly, for a reason that the caller gives."""
        self._refusal = reason
        self._graphs.clear()
        if has_graphs(self.device):
            self._tell(step_note(self.reason, captured=False, fallback=True))

    def _graph_for(self, batch: Any) -> _FunctionGraph:
        """Return the graph for batches of this shape, which becomes the first in the list."""
        for number, graph in enumerate(self._graphs):
            if graph.matches(batch):
                # The last shape comes first: most batches have it, and are found by one comparison.
                if number:
                    self._graphs.insert(0, self._graphs.pop(number))
                return graph
        made = _FunctionGraph(self, batch, self._state, self._loader, self._tell)
        # Shapes that were given up stay in the list, so that they are not tried again; they have no graph to count.
        if sum(not graph.is_given_up for graph in self._graphs) >= MOST_GRAPHS:
            constant = _name_constant(made.shape, self._graphs[0].shape)
            made.give_up(
                f"batches have more than {MOST_GRAPHS} shapes"
                if constant is None
                else f"{constant} in a batch has more than {MOST_GRAPHS} values, and a graph repeats numbers and "
                "texts: a tensor is followed, and what the step does not read can be left out"
            )
        del self._graphs[2 * MOST_GRAPHS :]
        self._graphs.insert(0, made)
        return made

    def _tell(self, note: Note) -> None:
        if self._say is not None:
            self._say(note.text)
        elif note.values.get("fallback"):
            warnings.warn(f"stoker.capture: {note.text}", RuntimeWarning, stacklevel=2)


class _FunctionGraph(GraphedStep):
    """The step for batches of one shape."""

    _advice = "; a Trainer captures the step without its update"

    def __init__(
        self,
        owner: CapturedFunction,
        batch: Any,
        state: StepState,
        loader: Loader | None,
        say: Callable[[Note], object],
    ) -> None:
        self._owner, self._loader = owner, loader
        self.shape = self._given(batch)
        super().__init__(state, say)
        # Only shapes are kept from here on: the first batch would stay in memory as long as the graph.
        self.shape = map_tensors(lambda x: torch.empty_like(x, device="meta"), self.shape)

    def matches(self, batch: Any) -> bool:
        """Whether a batch has this shape."""
        return alike(self.shape, self._given(batch))

    def run(self, batch: Any) -> Any:
        """Train on a batch of this shape."""
        if self.is_given_up:
            return self._owner.run_eagerly(batch)
        if self._is_trusted or self._num_warm < self._warm_up_steps:
            return self._run_captured(batch)
        try:
            return self._run_captured(batch)
        except RuntimeError as error:
            if not is_oom(error):
                raise
            forget_frames(error)
        self.forget()
        let_go(self._state.device)
        self.give_up("memory ran out while the step was being captured")
        return self._run_eagerly(batch)

    def _warm_up(self, work: Any) -> Any:
        sparse: list[bool] = []

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            sparse.append(_has_sparse(optimizer))
            if sparse[-1]:
                make_unfused(optimizer)

        keep = self._make_snapshot() if self._num_warm == 1 and self._is_on_host(work) else None
        hook = register_optimizer_step_pre_hook(look)
        try:
            result = super()._warm_up(work)
        except RuntimeError as error:
            if keep is None or is_oom(error):
                raise
            keep.restore()  # `pack_padded_sequence`, say, takes lengths on the host only
            self.give_up(f"the step fails with a batch on the device ({describe_failure(error)})")
            return self._run_eagerly(work)
        finally:
            hook.remove()
        if any(sparse):
            self.give_up(SPARSE)
        elif not sparse:
            for optimizer in self._state.optimizers:
                if _has_sparse(optimizer):
                    make_unfused(optimizer)
            self.give_up(
                "the step calls no optimizer.step(), and gradients that are used outside of a graph are not those of "
                "a plain step: put it into the step, or use Trainer, which also accumulates"
            )
        return result

    def _is_on_host(self, work: Any) -> bool:
        device = self._state.device.type
        return any(tensor.device.type != device for tensor in iterate_tensors(self._given(work)))

    def _given(self, work: Any) -> Any:
        return work.indices if isinstance(work, IndexBatch) else work

    def _set_static(self, work: Any) -> None:
        # A batch may be on the host: the graph reads a copy on the device.
        if self._static is None:
            device = self._state.device
            self._static = map_tensors(
                lambda x: x.detach().to(device, copy=True).requires_grad_(x.requires_grad),
                self._given(work),
            )
        else:
            super()._set_static(work)

    def _graphed_part(self) -> Any:
        return self._owner.run_static(self._views())

    def _run_eagerly(self, work: Any) -> Any:
        # A copy of a dict: a step may take entries out of it, and runs again in a comparison.
        if not isinstance(work, IndexBatch):
            work = map_tensors(lambda tensor: tensor, work)
        return self._owner.run_eagerly(work)

    def _find_generation(self) -> tuple[int, int]:
        if self._loader is None:
            return 0, 0
        return int(getattr(self._loader.augment, "generation", 0)), self._loader.ring_number


def _has_sparse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter has a sparse gradient, which torch's fused SGD refuses."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return any(p.grad is not None and p.grad.is_sparse for p in parameters)


def _listed(given: Any, kind: type[_T]) -> list[_T]:
    """Return the given objects of a kind as a list; others are left out."""
    if isinstance(given, kind):
        return [given]
    several = given.values() if isinstance(given, Mapping) else given
    return [one for one in several if isinstance(one, kind)] if several is not None else []


def _bare_tensors(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.nn.Module]:
    """Return a module of the optimizers' tensors that are no `Parameter`, and so in no module; none without them."""
    trained = (p for one in optimizers for group in one.param_groups for p in group["params"])
    bare = {id(p): p for p in trained if not isinstance(p, torch.nn.Parameter)}
    holder: Any = torch.nn.Module()
    holder._parameters.update((f"tensor_{n}", p) for n, p in enumerate(bare.values()))
    return [holder] if bare else []


def _scalers_of(step: StepFunction) -> list[torch.amp.GradScaler]:
    """Return the gradient scalers that a step names, and those in the user's objects that it names."""
    used = used_objects(step)
    own = (vars(one).values() for one in used if is_plain_object(one, may_be_called=True))
    inner = (one for values in own for one in values)
    # `type` asks the object nothing.
    return [one for one in (*used, *inner) if issubclass(type(one), torch.amp.GradScaler)]


def _name_constant(one: Any, other: Any, name: str = "") -> str | None:
    """Return the name of the first constant that differs between two batches; None if their tensors differ."""
    if isinstance(one, _Arguments) and isinstance(other, _Arguments):
        return _name_constant([*one.given, one.named], [*other.given, other.named], "argument")
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        pairs = [(name_key(key), value, other[key]) for key, value in one.items()]
    elif isinstance(one, tuple | list) and isinstance(other, tuple | list):
        pairs = [(str(place), *pair) for place, pair in enumerate(zip(one, other, strict=False))]
    elif isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return None
    else:
        return name or "a constant"
    differ = [(key, left, right) for key, left, right in pairs if not alike(left, right)]
    found = [
        _name_constant(left, right, f"{name}[{key}]" if name else key)
        for key, left, right in differ
    ]
    return None if None in found else next(iter(found), None)


def _check_trained(
    step: StepFunction,
    parameters: Sequence[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Raise if the step trains parameters that were not given: a comparison of steps could not restore them.

    Raises:
        InputError: An optimizer has other parameters, or the step uses an optimizer that was not given.
    """
    known = {id(parameter) for parameter in parameters}
    used = [one for one in used_objects(step) if isinstance(one, torch.optim.Optimizer)]
    trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    for one in (*optimizers, *used):
        own = {id(p) for group in one.param_groups for p in group["params"]}
        if not own <= known or not own <= trained:
            what = "a model" if not own <= known else "an optimizer"
            raise InputError(
                f"the step trains {what} that was not given: {len(own - (known & trained))} parameters of "
                f"{type(one).__name__}.",
                "every module that the step changes, and every optimizer that it steps",
                "stoker.capture(step, model=[maker, judge], optimizer=[first, second])",
            )


def _checked_result(result: Any) -> Any:
    """Return a step's result, detached; raise if there is no tensor in it."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    if any(True for _ in iterate_tensors(result)):
        return map_tensors(torch.Tensor.detach, result)
    raise InputError(
        f"the step returned {'None' if result is None else f'a {type(result).__name__}'}.",
        "its loss as a tensor, or tensors in a tuple, list or dict",
        "return loss at the end of the step, not loss.item(), which waits for the device",
    )


def _name_kind(batch: Any) -> str:
    return f"a batch is a {type(batch).__name__}, not tensors in tuples, lists and dicts"
