"""A training step as one CUDA graph: warmed up, captured, and compared with the eager step before it is trusted.

Enters: a step that reads its batch at fixed addresses, and everything that it changes (`StepState`). Leaves: the
same changes, from one launch. Costs: a few eager steps of warm-up (they train like any other), one capture, three
steps computed twice to compare; later the steps 64, 512, 4,096, ... are compared again. The graph's memory stays
reserved while it exists.

A replay repeats the kernels of the capture, with the host's numbers of that time. So a graph is refused when

    its result differs       from an eager step with the same batch, weights and random draws. The state that both
                             start from includes torch's generators and the counter of the augmentation
    the host takes part      the eager step changes a number that the host keeps (in the model, the criterion or the
                             optimizer), draws random numbers on the host that may change the step, copies other
                             numbers from the host at each step, or waits for the device
    a number has changed     since the capture: in the optimizer (except its learning rate, which the graph reads
                             on the device) or in a module. After a change in a module, the step is captured again

`trainer_step.py` uses it for the `Trainer`, `function.py` for other loops.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stoker.report import Note
from stoker.train.batches import alike, copy_into, iterate_tensors, map_tensors
from stoker.train.generators import restore_rng
from stoker.train.graphs.frozen import HostNumbers
from stoker.train.graphs.frozen_groups import OTHER_GROUPS, FrozenGroups
from stoker.train.graphs.held_tensors import HeldTensors, WatchedTensors, hides_tensors, put_in
from stoker.train.graphs.host_constants import STEPS_TO_LEARN, HostConstants, are_compiled
from stoker.train.graphs.host_draws import (
    DRAWS_ON_HOST,
    HostDraws,
    has_drawn,
    quiet_host_rng,
)
from stoker.train.graphs.places import read_place
from stoker.train.graphs.reasons import FOLLOWED, describe_failure, refuse_eager, step_note
from stoker.train.graphs.replay_check import (
    are_close,
    as_if_captured,
    difference,
    is_too_noisy,
    same_counts,
    spread,
)
from stoker.train.graphs.step_code import find_iterator
from stoker.train.graphs.step_state import KeptObjects, Replaced, Snapshot, StepState, disturbed
from stoker.train.graphs.structure import Structure, forget_computed_weights
from stoker.train.graphs.written import WrittenTensors
from stoker.train.oom import is_oom
from stoker.train.step import compact_recurrent, is_capturable, is_guarded, make_guarded

WARM_UP_STEPS = 3
WARM_UP_STEPS_OF_RANKS = 11
"""DDP observes its first ten steps and rebuilds its buckets during them."""
CHECKED_REPLAYS = 3
_WORTH_TELLING = 1.05
_MOVED = (
    "the step gives tensors other memory (p.data = ...), which a graph cannot follow: "
    "p.data.copy_(...) is followed"
)
_MOST_REPEATED = 3
"""Pairs of eager steps that are run to learn how far equal steps are apart."""
_FIRST_RECHECK, _RECHECK_GROWTH = 64, 8
"""Replays until a trusted graph is compared again, and the factor for each later time."""


class GraphedStep:
    """Runs a step as replays of a CUDA graph where possible, else eagerly; see the module's docstring.

    A subclass defines the step in `_given`, `_graphed_part` and `_run_eagerly`. Not thread safe; works on the current
    stream. Other threads may call CUDA while a graph is captured.

    If a graph of the whole step is impossible or wrong, and the subclass can run its update separately, the step is
    captured again without the update. The update has few launches and is often the reason: a scheduler may change the
    momentum, or the optimizer may count on the host.

    Args:
        state: What the step changes.
        say: Called with a note when steps continue eagerly.
        demanded: Whether to raise an error instead of continuing eagerly.

    Attributes:
        reason: How steps run, and why.
        active: Whether steps are replayed now.
        is_given_up: Whether all further steps run eagerly.
        slowdown: Time of an eager step / time of a replay, as measured while they were compared; None before.
        split_reason: Why the update is not in the graph; None while it is.
    """

    _others_draw = True
    _can_split = False
    _advice = ""
    """Advice that is added to the reason if the update is the problem and the step cannot be split."""

    def __init__(
        self,
        state: StepState,
        say: Callable[[Note], object],
        demanded: bool = False,
    ) -> None:
        self._state = state
        self._say = say
        self._demanded = demanded
        self._warm_up_steps = WARM_UP_STEPS_OF_RANKS if state.ranks.joined else WARM_UP_STEPS
        self.active = False
        self.reason = f"captured after {self._warm_up_steps} steps of warm-up"
        self.is_given_up = False
        self._num_short = 0
        self.slowdown: float | None = None
        self.split_reason: str | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: Any = None
        self._loss: Any = None
        self._host_draws: HostDraws | None = None
        self._constants: HostConstants | None = None
        self._refusal = ""
        self._frozen: list[FrozenGroups] = []
        self._numbers = HostNumbers(())
        self._held = HeldTensors(())
        self._held_values: list[Any] = []
        self._replaced: list[Replaced] = []
        self._watched, self._structure = WatchedTensors(), Structure()
        self._places: list[tuple[Any, Any, Any]] = []
        self._written, self._copies_all = WrittenTensors(), False
        self._num_warm = self._num_checked = self._num_replays = 0
        self._next_check = _FIRST_RECHECK
        self._worst = 0.0
        self._generation: Any = self._find_generation()

    # -- what a subclass defines -------------------------------------------------------------

    def _given(self, work: Any) -> Any:
        """Return the part of a batch that the graph reads: a nested value of tensors and constants."""
        raise NotImplementedError

    def _graphed_part(self) -> Any:
        """Run the captured part with the static tensors: up to the new weights, or, if split, up to the gradients.

        Returns:
            The result of the step.
        """
        raise NotImplementedError

    def _rest(self) -> None:
        """Run the part of the step after the graph: the update, if the step is split."""

    def _keep_gradients(self) -> None:
        """Record the tensors in which a graph without the update leaves its gradients."""

    def _run_eagerly(self, work: Any) -> Any:
        """Run the step without the graph."""
        raise NotImplementedError

    def _make_snapshot(self) -> Snapshot:
        return Snapshot(self._state)

    def _find_generation(self) -> Any:
        """Return a value that changes when the graph must be captured again: other augmentation ops, or moved data."""
        return 0

    def _is_invalid(self) -> bool:
        """Whether the eager step of a comparison has made the graph invalid."""
        return bool(self._generation != self._find_generation())

    def _before_giving_up(self) -> None:
        """Undo what a failed capture may have left behind."""

    # -- running -----------------------------------------------------------------------------

    @property
    def _is_trusted(self) -> bool:
        """Whether the next step is a plain replay, which allocates nothing."""
        if self._num_checked < CHECKED_REPLAYS or self._num_replays == self._next_check:
            return False
        return bool(self._generation == self._find_generation())

    def _run_captured(self, work: Any) -> Any:
        """Run a batch that fits the graph: warm up, capture, compare or replay."""
        if self._generation != self._find_generation():  # other ops, or the data has moved
            self.forget()
        if self._graph is None and self._num_warm < self._warm_up_steps:
            self._num_warm += 1
            result = self._warm_up(work)
            self._static = map_tensors(_copy_leaf, self._static)  # the step may keep the batch
            return result
        self._set_static(work)
        if self._graph is None and not self._capture():
            return self._run_eagerly(work)
        if any(frozen.has_other_groups() for frozen in self._frozen):
            self._regroup()
            return self._run_eagerly(work)
        change = next(filter(None, (frozen.find_change() for frozen in self._frozen)), None)
        if change is not None:
            if not self._can_split and self._num_replays >= _FIRST_RECHECK:
                self._renew(change)
            else:  # such values often change at every step: a new graph would be outdated at once
                self._split(change + self._advice)
            return self._run_eagerly(work)
        outdated = self._find_outdated(work)
        if outdated is not None:
            self._renew(*outdated)
            return self._run_eagerly(work)
        self._num_replays += 1
        if self._num_checked < CHECKED_REPLAYS or self._num_replays > self._next_check:
            return self._replay_and_check(work)
        self._replay_graph()
        self._written.put()
        return self._copied_result()

    def _find_outdated(self, work: Any) -> tuple[str, str] | None:
        """Return what a replay would miss, so that the step must be captured again, and advice; or None."""
        if any(frozen.trains_others() for frozen in self._frozen):
            return "parameters were frozen or thawed", ""
        moved = self._structure.find_moved()
        if moved is not None:
            return (
                f"{moved} was given other memory (p.data = ...)",
                "; p.data.copy_(...) is followed",
            )
        if self._structure.has_changed():
            return "layers, parameters, buffers or hooks of the model are others", ""
        changed = self._numbers.find_change()
        if changed is not None:
            return f"{changed} has changed", FOLLOWED
        if self._constants is not None and self._constants.have_changed():
            return "a tensor on the host has changed", FOLLOWED
        replaced = self._watched.find_replaced()
        if replaced is not None and self._depends_on(*replaced[1:], work):
            return f"another object was put in the place of {replaced[0]}", FOLLOWED
        if self._written.is_kept():
            self._copies_all = True
            return "a tensor that the step leaves behind is kept, and copied from now on", ""
        return None

    def _replay_graph(self) -> None:
        """Replay the graph and run the rest of the step; repeat draws on the host that have no effect on it."""
        assert self._graph is not None
        if self._host_draws is not None:
            self._host_draws.repeat()
        self._graph.replay()
        self._rest()

    def _copied_result(self) -> Any:
        return map_tensors(torch.clone, self._loss)  # the next replay overwrites it

    def _fits(self, work: Any) -> bool:
        """Whether the batch has the structure and shapes that the graph was captured with."""
        return self._static is None or alike(self._static, self._given(work))

    def _set_static(self, work: Any) -> None:
        """Copy the batch, or its indices, to the addresses that the graph reads."""
        given = self._given(work)
        if self._static is None:
            self._static = map_tensors(_copy_leaf, given)
        else:
            with torch.no_grad():
                copy_into(self._static, given)

    def _views(self) -> Any:
        """Return new tensors over the static memory: the step may set `requires_grad` on them."""
        return map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), self._static)

    def _warm_up(self, work: Any) -> Any:
        """Train eagerly on a side stream, which CUDA requires before a capture."""
        stream = _side_stream(self._state.device)
        current = torch.cuda.current_stream(self._state.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._set_static(work)
            with self._learning():
                result = self._graphed_part()
            self._rest()
        current.wait_stream(stream)
        return result

    @contextlib.contextmanager
    def _learning(self) -> Iterator[None]:
        """Context of a warm-up step; after a failed capture, it records the step's copies from the host.

        The model then chooses the algorithms that it chooses during a capture, so that the copies are the same.
        """
        if self._constants is None:
            yield
            return
        with as_if_captured(), self._constants.learn():
            yield

    def _capture(self) -> bool:
        """Capture the step; return False if that fails. Nothing is computed, and numbers on the host do not change."""
        state = self._state
        taken = find_iterator(*state.examined())
        if taken is not None:  # also not to try: what is taken from it would be lost
            self.give_up(f"the step takes from {taken}, an iterator on the host")
            return False
        on_host = state.find_on_host() if self.split_reason is None else None
        if on_host is not None:
            self._split(f"{on_host} keeps its counts on the host{self._advice}")
            return False
        if self._constants is not None and not self._constants.are_known:
            self._split(self._refusal)
            return False
        host_rng = quiet_host_rng(self._others_draw)
        why = self._record()
        if host_rng is not None and has_drawn(host_rng):
            # The eager step that follows must draw the same numbers. A graph would repeat them at every replay.
            restore_rng(host_rng)
            why = why or self._record_drawing(host_rng)
        may_learn = self._constants is None and not state.ranks.joined
        if self._refusal and may_learn and not are_compiled(state.modules):
            # The cause may be copies of numbers from the host: two more steps of warm-up record them.
            self._constants = HostConstants(state.device)
            self._num_warm -= STEPS_TO_LEARN
            return False
        if not state.ranks.all_of(not why):
            self._split(why or "the step cannot be captured (on another rank)")
            return False
        self.active = True
        return True

    def _record_drawing(self, host_rng: dict[str, Any]) -> str:
        """Capture a step that draws on the host again, watching its draws; return why that is impossible, or "".

        Not with several ranks, because all of them would have to capture the same number of times.
        """
        if self._state.ranks.joined:
            return DRAWS_ON_HOST
        draws = HostDraws()
        why = self._record(draws)
        is_explained = draws.explains(host_rng)
        self._host_draws = draws
        return why or ("" if is_explained else DRAWS_ON_HOST)

    def _record(self, watch: HostDraws | None = None) -> str:
        """Make a graph of the step, with its draws watched or not; return why that is impossible, or ""."""
        state = self._state
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        generator = self._copy_generator()
        for module in state.modules:
            compact_recurrent(module)
            forget_computed_weights(module)
        self._frozen = [
            FrozenGroups(
                each,
                state.device,
                is_guarded(each) or is_capturable(each),
                has_update=self.split_reason is None,
            )
            for each in state.optimizers
        ]
        try:
            modules, code = state.examined()
            self._numbers = HostNumbers(modules, code, state.device)
            held = HeldTensors(modules, code)
            kept = KeptObjects(state.optimizers, modules, code, held)
            before = held.values()
            watched = WatchedTensors(modules, code, self._numbers.nested_tensors())
            structure = Structure(modules, state.optimizers)
        except Exception as error:  # noqa: BLE001 (reading the attributes of a user's object may raise anything)
            self._refusal = f"what the step names cannot be examined ({describe_failure(error)})"
            return self._refusal
        draws = [(drawing, drawing.state_dict()) for drawing in state.draws()]
        self._refusal, handled = "", sys.exception()
        constants = (
            contextlib.nullcontext() if self._constants is None else self._constants.replace()
        )
        if _is_short_of_memory(state.device):
            gc.collect()  # 0.2 s, as much as forty small steps
        # No collection during the capture: it may free another graph's memory, which would end the capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            # thread_local: the feeder's threads call CUDA at the same time, which must not end the capture.
            stream = _side_stream(state.device)
            captured = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
            with captured, constants, watch or contextlib.nullcontext():
                self._loss = self._graphed_part()
            self._graph = graph
            self._keep_gradients()
        except Exception as error:
            self._heal(generator, pool)
            if is_oom(error):
                raise
            self._refusal = f"the step cannot be captured ({describe_failure(error, handled)})"
        finally:
            if collects:
                gc.enable()
        self._numbers.leave_replaced()
        watched.leave_replaced()
        self._watched = watched
        structure.leave_replaced()
        # A step that changes the structure itself is compared like any other.
        self._structure = Structure() if structure.has_changed() else structure
        # The capture ran the host's part of a step that was not computed.
        self._numbers.put_back()
        self._replaced = kept.replacements()
        why = self._refusal or (_MOVED if kept.has_moved() else "")
        kept.put_back()
        self._held, self._held_values = held, held.replacements(before)
        held.put(before)
        for drawing, position in draws:
            drawing.load_state_dict(position)
        return why

    def _copy_generator(self) -> Any:
        return torch.cuda.default_generators[self._state.device.index or 0].clone_state()

    def _heal(self, generator: Any, pool: Any) -> None:
        """Repair the generator and the allocator after a failed capture, which both still regard as running.

        The generator would refuse to draw. The allocator would keep every tensor that another stream has
        used, such as a prefetched batch, until the process ends (torch 2.13 and before).
        """
        number = self._state.device.index or 0
        with contextlib.suppress(RuntimeError):
            torch.cuda.default_generators[number].graphsafe_set_state(generator)
        # The allocation may have ended already, or another torch may lack these functions.
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(number, pool)
            torch._C._cuda_releasePool(number, pool)

    # -- comparing ---------------------------------------------------------------------------

    def _replay_and_check(self, work: Any) -> Any:
        """Run the step eagerly and as a replay from the same state; keep the replay's result if they agree."""
        keep = self._make_snapshot()
        keep.keep_batch(iterate_tensors(self._given(work)))  # a step may change its batch in place
        try:
            return self._compare(work, keep)
        except Exception:
            keep.restore()  # nothing of the step remains, so that the caller can repeat it
            raise

    def _compare(self, work: Any, keep: Snapshot) -> Any:
        state, since = self._state, self._clock()
        result = map_tensors(torch.clone, self._run_eagerly(work))
        eager_seconds = self._clock() - since
        if self._is_invalid():
            # The eager step ran out of memory and freed some: the tensors that the graph reads are gone.
            return result
        eager = [*iterate_tensors(result), *(tensor.detach().clone() for tensor in state.tensors())]
        num_results = sum(1 for _ in iterate_tensors(result))
        eager_positions, eager_numbers = state.positions(), self._numbers.values()
        changed, replaced, is_first = (
            keep.find_changed(),
            keep.find_replaced(),
            not self._num_checked,
        )
        others = keep.find_held()
        if is_first and not state.ranks.all_of(changed is None):
            self.give_up(
                f"the step changes {changed or 'a tensor'}, which is no module, optimizer or scaler that was given"
            )
            return result  # it cannot be undone, and need not be
        if is_first and not state.ranks.all_of(not keep.has_moved()):
            self.give_up(_MOVED)
            return result
        held = [tensor.detach().clone() for tensor in keep.replacements()]
        made = [tensor.detach().clone() for tensor in _made(self._replaced)]
        keep.restore()
        hidden = self._held.find_hidden(self._held_values) if is_first else None
        if is_first and hidden is None:
            hidden = next((one.name for one in self._replaced if hides_tensors(one.value)), None)
        if not state.ranks.all_of(hidden is None):
            self._split(
                f"the step replaces {hidden or 'an object'}, an object with tensors in it, which a graph cannot "
                "follow: a dict of tensors is followed"
            )
            return self._run_eagerly(work)
        if (
            is_first
            and replaced is not None
            and self._reads_held(work, keep, others, [*eager, *held])
        ):
            self.give_up(
                f"the step reads {replaced} of the step before, which a graph cannot follow: a buffer that copy_ "
                "changes is followed"
            )
            return self._run_eagerly(work)
        if is_first and self._replaced:
            return self._compare_replaced(work, keep, [*eager, *made])
        since = self._clock()
        replayed = self._replay()
        self.slowdown = eager_seconds / max(self._clock() - since, 1e-9)
        left_behind = self._numbers.name_difference(eager_numbers, self._numbers.values())
        left_behind = left_behind or state.find_moved(eager_positions)
        first = away = self._agreed(difference(eager, replayed, None, self._before(keep)))
        if left_behind is None and not alike(result, self._loss):
            left_behind = "a value that it returns"
        if not same_counts(eager[num_results:], replayed[num_results:]):
            first = away = self._agreed(math.inf)
        if 1.0 < away < math.inf:  # infinite: a tensor or a NaN exists in one way only
            away = self._compare_again(work, keep)
        if away <= 1.0 and state.ranks.all_of(left_behind is None):
            self._note_agreement(away)
            return self._copied_result()
        keep.restore()
        if away > 1.0 and self._num_checked >= CHECKED_REPLAYS:
            self._renew("a later replay no longer agreed with the eager step")
        elif away > 1.0 and left_behind is None:
            self._split(
                f"a replayed step differed from the eager one by {first:.3g} times the tolerance"
            )
        else:
            moved = left_behind or "a number"
            self._split(f"the step changes {moved} on the host, which a graph cannot follow")
        return self._run_eagerly(work)

    def _compare_replaced(self, work: Any, keep: Snapshot, eager: Sequence[torch.Tensor]) -> Any:
        """Compare a step that replaces tensors of an optimizer's state or of buffers instead of changing them.

        A graph always reads the tensors of its capture. If the step only writes them, the graph's own are used.
        """
        replaced, self._replaced = self._replaced, []
        kept = [one.container[one.key] for one in replaced]
        for one, value in zip(replaced, kept, strict=True):
            one.container[one.key] = map_tensors(disturbed, value)
        results = [*iterate_tensors(self._run_eagerly(work))]
        away = self._agreed(difference(eager, [*results, *self._state.tensors(), *_made(replaced)]))
        keep.restore()
        if away > 1.0:
            self._split(
                f"the step replaces {replaced[0].name} by other tensors and reads them, which a graph cannot follow: "
                "one that copy_ or mul_ changes is followed"
            )
            return self._run_eagerly(work)
        for one, value in zip(replaced, kept, strict=True):
            pairs = zip(iterate_tensors(one.value), iterate_tensors(value), strict=False)
            for own, tensor in pairs:
                if own.shape == tensor.shape:  # in case it is read after all
                    own.data.copy_(tensor.data)
            one.container[one.key] = one.value
        self._places = [(one.container, one.key, one.value) for one in replaced]
        self._set_static(work)  # a place may hold the batch itself
        return self._replay_and_check(work)

    def _reads_held(
        self, work: Any, keep: Snapshot, held: Sequence[bool], eager: Sequence[torch.Tensor]
    ) -> bool:
        """Whether a step depends on tensors that it replaces, such as a hidden state; restores the kept state."""
        keep.disturb(held)
        results = iterate_tensors(self._run_eagerly(work))
        found = [*results, *self._state.tensors(), *keep.replacements()]
        away = self._agreed(difference(eager, found))
        keep.restore()
        return away > 1.0

    def _depends_on(self, container: Any, key: Any, work: Any) -> bool:
        """Whether the step depends on a tensor that was replaced; if not, that tensor is no longer watched."""
        now = read_place(container, key)
        tensors = list(iterate_tensors(now))
        is_known = isinstance(now, torch.Tensor | tuple) and tensors
        if (
            not is_known
            or not all(map(torch.is_floating_point, tensors))
            or self._state.ranks.joined
        ):
            return True
        keep = self._make_snapshot()

        def run(value: Any, is_moved: bool) -> Any:
            put_in(container, key, value)
            if is_moved:
                self._state.move_weights()
            return self._run_eagerly(work)

        away = 0.0
        # At the weights of this moment a tensor may have no effect: a penalty on the distance from weights just saved.
        for is_moved in (False, True):
            one, other = (
                self._outcome(functools.partial(run, value, is_moved), keep)
                for value in (now, map_tensors(disturbed, now))
            )
            away = max(away, difference(one, other))
        keep.restore()
        put_in(container, key, now)
        if away <= 1.0:
            self._watched.leave(container, key)
        return away > 1.0

    def _compare_again(self, work: Any, keep: Snapshot) -> float:
        """Return the difference after allowing for the noise of repeated steps.

        If needed, eager steps with the algorithms of a capture are compared too. Leaves the weights of a replay.
        Every rank runs the same steps, because a step contains collectives.
        """
        replayed, again = self._outcome(self._replay, keep), self._outcome(self._replay, keep)
        between_replays = spread(replayed, again)
        before = self._before(keep)
        for run in (self._run_eagerly, self._run_as_if_captured):
            noise = between_replays
            for _ in range(_MOST_REPEATED):
                one, other = (self._outcome(functools.partial(run, work), keep) for _ in range(2))
                if self._is_invalid():
                    return math.inf  # memory ran out: the tensors that the graph reads are gone
                noise = torch.maximum(spread(one, other), noise)
                is_blind = is_too_noisy(one, noise[0], before)
                away = self._agreed(
                    math.inf if is_blind else difference(one, replayed, noise, before)
                )
                # Two repeated steps may agree by chance, so that the noise is underestimated: run more of them.
                if away <= 1.0 or not self._agreed(float(noise.sum())) > 0.0:
                    break
            if away <= 1.0:
                break
        else:
            return away
        if run == self._run_as_if_captured:
            keep.restore()
            away = self._agreed(away if self._is_same_function(work, keep) else math.inf)
        keep.restore()
        self._replay()
        return away

    def _before(self, keep: Snapshot) -> Sequence[torch.Tensor]:
        """Return the tensors before the step; none if the step has changed their number."""
        return keep.tensors if len(keep.tensors) == len(list(self._state.tensors())) else ()

    def _outcome(self, run: Callable[[], Any], keep: Snapshot) -> list[torch.Tensor]:
        """Run a step from the kept state; return copies of its result and of everything that it changed."""
        keep.restore()
        results = [tensor.clone() for tensor in iterate_tensors(run())]
        if run == self._replay:  # its result includes the state
            return results
        return [*results, *(tensor.detach().clone() for tensor in self._state.tensors())]

    def _replay(self) -> list[torch.Tensor]:
        """Replay the graph; return its result and the state that it leaves, not copied."""
        self._replay_graph()
        return [*iterate_tensors(self._loss), *self._state.tensors()]

    def _agreed(self, away: float) -> float:
        """Return the largest difference of all ranks, because they must decide alike. Collective."""
        return float(max(self._state.ranks.gather(away)))

    def _run_as_if_captured(self, work: Any) -> Any:
        """Run a step eagerly, with the algorithms that models choose during a capture."""
        with as_if_captured():
            return self._run_eagerly(work)

    def _is_same_function(self, work: Any, keep: Snapshot) -> bool:
        """Whether a step with the capture's algorithms has the same result; without dropout, whose draws differ."""
        modes = [(m, m.training) for root in self._state.modules for m in root.modules()]
        for module, _ in modes:
            module.training = False
        try:
            plain = [tensor.clone() for tensor in iterate_tensors(self._run_eagerly(work))]
            keep.restore()
            for module, _ in modes:
                module.training = False
            other = list(iterate_tensors(self._run_as_if_captured(work)))
        finally:
            for module, was_training in modes:
                module.training = was_training
        return are_close(plain, other)

    def _clock(self) -> float:
        """Return the time at which the device has done everything so far; waits for it."""
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)
        return time.perf_counter()

    def _note_agreement(self, away: float) -> None:
        self._num_checked += 1
        self._worst = max(self._worst, away)
        if self._num_replays >= self._next_check:
            self._next_check = self._num_replays * _RECHECK_GROWTH
        if self._num_checked == 1:
            places = [*self._places, *self._held.places_of(self._held_values)]
            self._written = WrittenTensors(places, self._state.tensors(), self._copies_all)
        self._written.put()
        if self._num_checked == CHECKED_REPLAYS:
            self._next_check = max(self._next_check, _FIRST_RECHECK)
            what = "captured" if self.split_reason is None else "captured without its update"
            self.reason = (
                f"{what} after {self._warm_up_steps} steps of warm-up; the first {CHECKED_REPLAYS} replays "
                f"agreed with eager steps from the same state ({self._worst:.2g} of the tolerance)"
            )
            if self.split_reason is not None:
                self._say(step_note(f"{what}: {self.split_reason}", captured=True))

    # -- giving up ---------------------------------------------------------------------------

    def _renew(self, reason: str, advice: str = "") -> None:
        """Drop the graph and capture the step again; give up, with advice, if graphs were dropped too often."""
        self._num_short += self._num_replays < _FIRST_RECHECK
        if self._num_short > CHECKED_REPLAYS:
            self.give_up(
                f"{reason}, for the {self._num_short}th time within {_FIRST_RECHECK} steps{advice}"
            )
            return
        self.forget()
        self._say(step_note(f"captured anew: {reason}", captured=True))

    def _regroup(self) -> None:
        """Capture the step again after the optimizer was given other groups, as by `load_state_dict`."""
        for optimizer in self._state.optimizers:
            make_guarded(optimizer, self._state.device)
        if self._num_short < CHECKED_REPLAYS:
            self._renew(OTHER_GROUPS)
        else:
            self._split(
                f"{OTHER_GROUPS} again and again, which a graph cannot follow{self._advice}"
            )

    def _split(self, reason: str) -> None:
        """Drop the graph, and capture the step without its update; continue eagerly if that was tried or cannot be."""
        if not self._can_split or self.split_reason is not None or self._state.ranks.joined:
            self.give_up(reason)
            return
        self.forget()
        self._before_giving_up()
        self.split_reason = reason

    def give_up(self, reason: str) -> None:
        """Continue eagerly from here on; with capture="on" raise the reason as an error."""
        self.forget()
        self.is_given_up, self.reason = True, f"eager: {reason}"
        self._before_giving_up()
        if self._demanded:
            raise refuse_eager(reason)
        words = self.reason
        if self.slowdown is not None and self.slowdown >= _WORTH_TELLING:
            words += f"; a step takes {self.slowdown:.1f} times as long as its replay did"
        self._say(step_note(words, captured=False, slowdown=self.slowdown, fallback=True))

    def forget(self) -> None:
        """Drop the graph; the next steps warm up and capture again. Called when its tensors or kernels have changed."""
        self._graph = self._static = self._loss = self._host_draws = self._constants = None
        self._frozen, self._numbers = [], HostNumbers(())
        self._held, self._held_values, self._replaced = HeldTensors(()), [], []
        self._watched, self._structure = WatchedTensors(), Structure()
        self._written, self._places = WrittenTensors(), []
        self._num_warm = self._num_checked = self._num_replays = 0
        self._next_check = _FIRST_RECHECK
        self._worst, self.active = 0.0, False
        self._generation = self._find_generation()


def _made(replaced: Sequence[Replaced]) -> list[torch.Tensor]:
    """Return the current tensors in the places where a step replaces them."""
    return list(iterate_tensors([one.container.get(one.key) for one in replaced]))


def has_graphs(device: torch.device) -> bool:
    """Whether steps on this device can be captured."""
    return device.type == "cuda"


def _is_short_of_memory(device: torch.device) -> bool:
    """Whether less than half of a GPU's memory is free."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free < total / 2


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for warm-up and capture; one per device.

    Torch keeps a cuBLAS workspace for every stream that ever ran a matrix product, 32 MB on an H200. A new
    stream for every warm-up would add up to a gigabyte.

    Its priority is high, and the kernels of a graph keep the priority of the stream that they were captured on: a
    GPU that decodes pictures beside the step does the step first.
    """
    return torch.cuda.Stream(device, priority=-1)


def _copy_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that requires gradients if the tensor does, and has no history."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
