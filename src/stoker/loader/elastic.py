"""The position in a run, and elastic resume: continuing within an epoch with other ranks or batch sizes.

Enters: a saved state, and the order of a rank that continues from it. Leaves: the epoch and batch to
continue at, and an order for the remaining samples of that epoch: each once, and none that was trained on
before. The next epoch is a whole one again. Costs: the remaining samples as ranges, and a permutation for
every chunk that the rank trains on. Ranks do not communicate. No torch.

An epoch is described by its *cuts*: one set of ranks trained up to this batch, the next set up to that one,
and so on. The state holds the cuts, so that any rank, out of any number of ranks, can compute which samples
remain. Batch numbers continue at the cut. How the remaining samples are shared:

    sequential, time   in ascending order; rank r has the r-th of `world_size` blocks
    shuffled, chunks   chunks with samples left, in this epoch's order; rank r has the r-th block, and
                       shuffles its samples of a chunk anew
    shuffled, resident the same permutation continues, in pieces of the new `batch_size * world_size`. The
                       samples have the order in which one process would train on them
    lanes              every lane continues; their number must stay the same. A model's recurrent state
                       belongs to a lane, and moves with it

At the end of the epoch the rule of a whole epoch holds: all ranks have the same number of steps, no batch
is empty, and with `drop_last` every batch is full. Too few samples may remain for that: two samples for
three ranks, for example. The samples that cannot be shared are fewer than the ranks. They wait for the next
epoch, and a warning says how many. With lanes this concerns the steps in which a rank would have no lane.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from stoker.errors import InputError
from stoker.loader.epochs import BlockEpoch, DealtEpoch, Deck, LaneEpoch
from stoker.loader.order import Order
from stoker.loader.planned import EpochOrder, OrderFacts, Share
from stoker.loader.positions import PositionSet, Subset
from stoker.store.fields import Array


class ElasticEpoch(BlockEpoch):
    """The remaining samples of an epoch, shared in blocks of chunks; see the module's text.

    Args:
        order: Order of the ranks that share the samples.
        epoch: Number of the epoch.
        left: Samples that no rank has trained on.
        first_step: Number of the first batch.
    """

    def __init__(self, order: Order, epoch: int, left: PositionSet, first_step: int) -> None:
        self._left = left
        edges = left.count_below(order.edges_in(epoch))
        super().__init__(order, epoch, first_step, share_remaining(order, len(left)), edges)
        self.has_small_chunks = True

    def _at(self, low: int, high: int) -> Array:
        return self._left.slice(low, high)

    def _shuffled(self, start: int, rows: Array) -> Array:
        return self._left.slice(start, start + len(rows))[rows]

    def _bounds(self, lows: Array, highs: Array) -> tuple[Array, Array]:
        return self._left.bounds(lows, highs)

    def _chosen(self, indices: PositionSet, subsets: Sequence[Subset]) -> PositionSet:
        return self._left.choose(indices, subsets)


@dataclass(frozen=True)
class Cut:
    """A part of an epoch: `world_size` ranks with this batch size trained on it up to batch `batch`."""

    batch_size: int
    world_size: int
    chunks: tuple[tuple[int, int], ...] | None
    batch: int

    def apply_to(self, order: Order, rank: int = 0) -> Order:
        """Return the order that one of these ranks had."""
        return replace(
            order,
            rank=rank,
            world_size=self.world_size,
            batch_size=self.batch_size,
            chunks=self.chunks,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the cut in plain values."""
        return {
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "chunks": None if self.chunks is None else [list(chunk) for chunk in self.chunks],
            "batch": self.batch,
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Cut:
        """Read what `to_json` returned, or the same keys of a state."""
        batch_size, world_size, batch = (
            _read(plain, name) for name in ("batch_size", "world_size", "batch")
        )
        if plain.get("chunks") is None:
            return cls(batch_size, world_size, None, batch)
        try:
            chunks = np.asarray(plain["chunks"], np.int64).reshape(-1, 2).tolist()
        except (ValueError, TypeError) as error:
            raise InputError(
                f"the state's chunks cannot be read ({error}).",
                "pairs of whole numbers, as Loader.state_dict() gives them",
                "loader.load_state_dict(state) with a state that was saved whole",
            ) from None
        return cls(batch_size, world_size, tuple((low, high) for low, high in chunks), batch)


@dataclass(frozen=True)
class ResumePoint:
    """The position at which a loader continues.

    Attributes:
        epoch: Epoch to continue.
        batch: Next batch of that epoch.
        cuts: Cuts of that epoch so far.
        begun: Order of the remaining samples; None for a whole epoch.
        words: A sentence for the user if other ranks began the epoch.
    """

    epoch: int
    batch: int
    cuts: tuple[Cut, ...] = ()
    begun: EpochOrder | None = None
    words: str | None = None


def share_remaining(order: Order, num_left: int) -> Share:
    """Return how the ranks of an order share the remaining samples; the module's text has the rule."""
    steps = order.count_steps(num_left)
    full = order.batch_size * order.world_size
    used = steps * full if order.drop_last else num_left
    if used < steps * order.world_size:
        steps, used = steps - 1, (steps - 1) * full
    return Share(steps, num_left, used)


def hand_over(begun: EpochOrder, order: Order, step: int) -> EpochOrder:
    """Return the order of an epoch's samples from `step` on, shared by the ranks of `order`."""
    epoch = begun.epoch
    if isinstance(begun, LaneEpoch):
        assert order.lanes is not None
        return LaneEpoch(order, epoch, order.lanes, begun.layout_ranks, step)
    if isinstance(begun, DealtEpoch) and order.is_dealt:
        begin = begun.dealt(step)
        remaining = share_remaining(order, begun.begin + begun.num_offered - begin)
        return DealtEpoch(order, epoch, begun.deck, begin, step, remaining)
    left = begun.untaken(step)
    if order.is_dealt:
        deck = Deck(order, epoch, step, left)
        return DealtEpoch(order, epoch, deck, 0, step, share_remaining(order, len(left)))
    return ElasticEpoch(order, epoch, left, step)


def save_state(order: Order, epochs: EpochOrder, batch: int, cuts: Sequence[Cut]) -> dict[str, Any]:
    """Return the state of a loader that has finished `batch` batches of the epoch `epochs`."""
    return {
        **_data_of(order),
        **Cut(order.batch_size, order.world_size, order.chunks, batch).to_json(),
        "rank": order.rank,
        "epoch": epochs.epoch,
        "cuts": [cut.to_json() for cut in cuts],
        "digest": epochs.digest(batch),
    }


def find_resume_point(order: Order, state: Mapping[str, Any]) -> ResumePoint:
    """Return where a rank continues from a state that any rank, of any number of ranks, has saved.

    Raises:
        InputError: The state belongs to other samples, another kind of order or another number of lanes;
            the message names the difference.
    """
    if not isinstance(state, Mapping):
        raise InputError(
            f"the state is {state!r}.",
            "what state_dict() returned",
            "loader.load_state_dict(state)",
        )
    for name, own in _data_of(order).items():
        if name == "samples" and state.get(name) != own:
            raise InputError(
                f"the state is of {order.num_samples:,} other samples.",
                "the state of a loader over the same samples",
                "the same split, files and samples= as when the state was saved",
            )
        if state.get(name) != own:
            raise InputError(
                f"the state has {name} {state.get(name)!r}, this loader has {own!r}.",
                "the state of a loader with the same samples, order, weights, seed and drop_last",
                "make the loader as it was when the state was saved",
            )
    last = Cut.from_json(state)
    cuts = tuple(map(Cut.from_json, state.get("cuts", ())))
    epoch, rank = _read(state, "epoch"), _read(state, "rank")
    if not cuts and not last.batch:
        _check_digest(order.epoch(epoch), 0, state)
        return ResumePoint(epoch, 0)
    _check_num_lanes(order, last)
    begun = _replay(order, epoch, cuts, last.apply_to(order, rank))
    _check_digest(begun, last.batch, state)
    is_same = _is_same(begun.order, order)
    if is_same and not cuts:
        return ResumePoint(epoch, last.batch)
    # The last ranks trained on nothing: they leave no cut.
    if is_same or last.batch == begun.first_step:
        remaining = _replay(order, epoch, cuts, order)
    else:
        cuts += (last,)
        remaining = hand_over(begun, order, last.batch)
    whole = _as_whole(remaining)
    if whole is not None:
        return ResumePoint(epoch, last.batch, (), whole)
    words = None if is_same else _describe(begun.order, remaining)
    return ResumePoint(epoch, last.batch, cuts, remaining, words)


def _read(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(
            f"the state has {name} {value!r}.",
            "a whole number of 0 or more, as Loader.state_dict() gives it",
            "loader.load_state_dict(state) with a state that was saved whole",
        )
    return value


def _data_of(order: Order) -> dict[str, Any]:
    """Return what must be the same for the ranks that began an epoch and those that continue it."""
    return {
        "num_samples": order.num_samples,
        "order": order.mode,
        "seed": order.seed,
        "drop_last": order.drop_last,
        "samples": order.samples_digest,
        "weights": None if order.draws is None else order.draws.digest,
    }


def _replay(order: Order, epoch: int, cuts: Sequence[Cut], last: Order) -> EpochOrder:
    """Return the order that the ranks of `last` had in this epoch, after all cuts."""
    orders = [*(cut.apply_to(order) for cut in cuts), last]
    begun = orders[0].epoch(epoch)
    for cut, following in zip(cuts, orders[1:], strict=True):
        begun = hand_over(begun, following, cut.batch)
    return begun


def _is_same(one: OrderFacts, other: OrderFacts) -> bool:
    """Whether two orders give their ranks the same samples; sequential orders do not depend on chunks."""
    chunks = one.chunks == other.chunks or one.mode in ("sequential", "time")
    return (one.batch_size, one.world_size) == (other.batch_size, other.world_size) and chunks


def _as_whole(remaining: EpochOrder) -> EpochOrder | None:
    """Return the whole epoch of the same ranks if the same samples remain in it; else None.

    A run that returns to its first number of ranks then needs no cuts any more.
    """
    order = remaining.order
    if remaining.num_batches != len(order):
        return None
    if isinstance(remaining, DealtEpoch) and remaining.deck.is_whole:
        full = order.batch_size * order.world_size
        if remaining.begin == remaining.first_step * full:
            return DealtEpoch(order, remaining.epoch, remaining.deck)
    if isinstance(remaining, LaneEpoch) and order.lanes is not None:
        began, _ = order.lanes.lay_out(remaining.layout_ranks, order.drop_last)
        if np.array_equal(began, order.lanes.lay_out(order.world_size, order.drop_last)[0]):
            return LaneEpoch(order, remaining.epoch, order.lanes)
    return None


def _describe(before: OrderFacts, remaining: EpochOrder) -> str:
    """Return how an epoch continues, in words; warn if samples are left out without `drop_last`."""
    order, steps = remaining.order, remaining.num_batches - remaining.first_step
    words = (
        f"epoch {remaining.epoch} was begun by {before.world_size} x {before.batch_size} samples a batch and "
        f"goes on at batch {remaining.first_step} with {order.world_size} x {order.batch_size}: "
        f"{remaining.num_used:,} samples are left for {steps:,} batches"
    )
    over = remaining.num_offered - remaining.num_used
    if not over:
        return words
    if order.drop_last:
        return f"{words}; drop_last leaves out {over:,}"
    words = f"{words}; {over:,} cannot be shared by {order.world_size} ranks and wait for the next epoch"
    warnings.warn(words, stacklevel=4)
    return words


def _check_num_lanes(order: Order, last: Cut) -> None:
    before, now = last.batch_size * last.world_size, order.batch_size * order.world_size
    if order.lanes is not None and before != now:
        raise InputError(
            f"the state was saved in the middle of an epoch of {before} lanes, this loader has {now}.",
            f"batch_size * world_size = {before} lanes until the epoch ends",
            f"batch_size={before // order.world_size}, lanes=plan_store_lanes(store, {before}); "
            "or a state from the end of an epoch"
            if before % order.world_size == 0
            else f"a number of ranks that divides {before}, or a state from the end of an epoch",
        )


def _check_digest(begun: EpochOrder, batch: int, state: Mapping[str, Any]) -> None:
    if begun.digest(batch) != state.get("digest"):
        raise InputError(
            "the state's order digest is not this loader's: other samples came before.",
            "the same samples in the same order",
            "the order, seed and ranks of the loader that saved it",
        )


class Progress:
    """How far a loader has come: which batch of which epoch comes next, and which samples came before.

    One consumer thread. The orders of two epochs are kept, so that none is permuted twice.

    Attributes:
        order: What all epochs depend on.
        epoch: The current epoch.
        batch: Next batch of that epoch.
        is_begun: Whether a batch was taken since the position was set.
        is_over: Whether the epoch's last batch was taken.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.epoch = self.batch = 0
        self.is_begun = self.is_over = False
        self._epochs: dict[int, EpochOrder] = {}
        self._begun: EpochOrder | None = None  # an epoch that other ranks began
        self._cuts: tuple[Cut, ...] = ()
        self._ended: tuple[int, EpochOrder | None] | None = None

    @property
    def current(self) -> EpochOrder:
        """The order of the current epoch."""
        return self.get(self.epoch)

    def get(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch; the last two asked for are kept."""
        if self._begun is not None and self._begun.epoch == epoch:
            return self._begun
        found = self._epochs.pop(epoch, None) or self.order.epoch(epoch)
        self._epochs[epoch] = found
        while len(self._epochs) > 2:
            del self._epochs[next(iter(self._epochs))]
        return found

    def forget_epochs(self) -> None:
        """Drop the kept orders: in a forked child a thread of the parent may hold a lock of one of them."""
        self._epochs = {}

    def advance(self, num_batches: int) -> None:
        """Count a batch that was taken, of an epoch of `num_batches`."""
        self.batch += 1
        self.is_begun, self.is_over = True, self.batch == num_batches

    def begin_next_epoch(self) -> None:
        """Go to the first batch of the next epoch."""
        ended = self.epoch, self._begun if self.current is self._begun else None
        is_whole = self.batch == self.current.num_batches
        self.go_to(ResumePoint(self.epoch + 1, 0))
        self._ended = ended if is_whole else None

    def go_to(self, point: ResumePoint) -> None:
        """Continue at a position."""
        self._begun, self._cuts, self._ended = point.begun, point.cuts, None
        self.epoch, self.batch = point.epoch, point.batch
        self.is_begun = self.is_over = False

    def digest(self, broken: Sequence[tuple[int, int, int]] = ()) -> str:
        """Return the digest of the current epoch's batches so far; see `Loader.order_digest`.

        Args:
            broken: (epoch, step, sample) of samples that were skipped or replaced; those before this position count.
        """
        if self._ended is not None and self.batch == 0:
            number, begun = self._ended
            epoch = begun or self.order.epoch(number)
            digest, stop = epoch.digest(), epoch.num_batches
        else:
            number, stop = self.epoch, self.batch
            digest = self.current.digest(stop)
        left_out = [entry for entry in broken if entry[0] == number and entry[1] < stop]
        return (
            str(xxhash.xxh3_64_hexdigest(f"{digest} {left_out}".encode())) if left_out else digest
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in plain values."""
        return save_state(self.order, self.current, self.batch, self._cuts)

    def load_state_dict(self, state: Mapping[str, Any]) -> ResumePoint:
        """Go to a saved position; return it."""
        point = find_resume_point(self.order, state)
        self.go_to(point)
        return point
