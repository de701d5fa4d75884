"""The rest of an epoch: going on with another number of ranks, or other batches, in its middle.

Enters: a saved state, and the order of a rank that goes on from it. Leaves: where that rank goes on, and
for the rest of that one epoch an order in which every sample is taken that nobody had, none twice; the
next epoch is a whole one. Costs: what is left, as ranges, and a permutation for every chunk that the rank
trains on (or the one of everything, which the rest goes on with). No rank asks another. No torch.

An epoch is a list of *cuts*: these ranks took it up to this batch, then those up to that one, and so on.
A state holds them, so that any rank of any number can find out what is left. Batches go on counting
where they were cut. How the rest is shared:

    sequential, time   what is left, ascending; rank r has the r-th of `world_size` blocks of it
    shuffled, chunks   the chunks that have something left, in this epoch's order; rank r has the r-th
                       block; shuffled anew within what a rank has of a chunk
    shuffled, resident the same permutation goes on, in pieces of the new `batch_size * world_size`:
                       ranks may come and go, and the samples come as one process would take them
    lanes              every lane goes on where it was; their number must stay. The state that a model
                       carries from batch to batch belongs to the lane, so it must move with it

The rule of the tail is that of a whole epoch: equal steps, no batch empty, and with `drop_last` only
full ones. What is left can be too little for it: two samples for three ranks, or in batches of one
a number that the ranks do not divide. Then the samples over, fewer than there are ranks, wait for the
next epoch, and a warning says how many. (Lanes: the steps in which a rank would have no lane left.)
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stoker.errors import InputError
from stoker.loader.epochs import BlockEpoch, DealtEpoch, Deck, LaneEpoch
from stoker.loader.order import EpochOrder, Order, Share
from stoker.loader.positions import Part, PositionSet
from stoker.store.fields import Array


class RestEpoch(BlockEpoch):
    """What is left of an epoch at a step, in blocks of chunks; see the module's text.

    Args:
        order: Of the ranks that share it.
        epoch: Its number.
        left: What no rank has taken.
        first_step: Number of the first batch.
    """

    def __init__(self, order: Order, epoch: int, left: PositionSet, first_step: int) -> None:
        self._left = left
        edges = left.count_below(order.edges)
        super().__init__(order, epoch, first_step, share_rest(order, len(left)), edges)

    def _at(self, low: int, high: int) -> Array:
        return self._left.slice(low, high)

    def _shuffled(self, start: int, rows: Array) -> Array:
        return self._left.slice(start, start + len(rows))[rows]

    def _bounds(self, lows: Array, highs: Array) -> tuple[Array, Array]:
        return self._left.bounds(lows, highs)

    def _chosen(self, places: PositionSet, parts: Sequence[Part]) -> PositionSet:
        return self._left.choose(places, parts)


@dataclass(frozen=True)
class Cut:
    """These ranks took an epoch up to batch `batch`."""

    batch_size: int
    world_size: int
    chunks: tuple[tuple[int, int], ...] | None
    batch: int

    def apply_to(self, order: Order, rank: int = 0) -> Order:
        """Return the order of a rank of these ranks."""
        return replace(
            order,
            rank=rank,
            world_size=self.world_size,
            batch_size=self.batch_size,
            chunks=self.chunks,
        )

    def to_json(self) -> dict[str, Any]:
        """Return it in plain values."""
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
class Place:
    """Where a loader goes on.

    Attributes:
        epoch: In this epoch,
        batch: at this batch,
        cuts: that were made in the epoch,
        begun: and so is the order of the epoch; None when it is a whole one.
        words: How it goes on, where others began.
    """

    epoch: int
    batch: int
    cuts: tuple[Cut, ...] = ()
    begun: EpochOrder | None = None
    words: str | None = None


def share_rest(order: Order, num_left: int) -> Share:
    """Return how the ranks of an order share what is left; see the rule of the tail."""
    steps = order.count_steps(num_left)
    full = order.batch_size * order.world_size
    used = steps * full if order.drop_last else num_left
    if used < steps * order.world_size:
        steps, used = steps - 1, (steps - 1) * full
    return Share(steps, num_left, used)


def hand_over(begun: EpochOrder, order: Order, step: int) -> EpochOrder:
    """Return the rest of an epoch from `step` on, shared by the ranks of `order`."""
    epoch = begun.epoch
    if isinstance(begun, LaneEpoch):
        assert order.lanes is not None
        return LaneEpoch(order, epoch, order.lanes, begun.layout_ranks, step)
    if isinstance(begun, DealtEpoch) and order.is_dealt:
        begin = begun.dealt(step)
        rest = share_rest(order, begun.begin + begun.num_offered - begin)
        return DealtEpoch(order, epoch, begun.deck, begin, step, rest)
    left = begun.untaken(step)
    if order.is_dealt:
        deck = Deck(len(left), order.seed, epoch, step, left)
        return DealtEpoch(order, epoch, deck, 0, step, share_rest(order, len(left)))
    return RestEpoch(order, epoch, left, step)


def save_place(order: Order, epochs: EpochOrder, batch: int, cuts: Sequence[Cut]) -> dict[str, Any]:
    """Return a state: `epochs` is the order of the current epoch, of which `batch` batches are done."""
    return {
        **_data_of(order),
        **Cut(order.batch_size, order.world_size, order.chunks, batch).to_json(),
        "rank": order.rank,
        "epoch": epochs.epoch,
        "cuts": [cut.to_json() for cut in cuts],
        "digest": epochs.digest(batch),
    }


def find_place(order: Order, state: Mapping[str, Any]) -> Place:
    """Return where the rank of `order` goes on from a state that any rank of any number has saved.

    Raises:
        InputError: The state is of other data or another kind of order, or of another number of lanes;
            the message says which.
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
                "the state of a loader with the same samples, order, seed and drop_last",
                "make the loader as it was when the state was saved",
            )
    last = Cut.from_json(state)
    cuts = tuple(map(Cut.from_json, state.get("cuts", ())))
    epoch, rank = _read(state, "epoch"), _read(state, "rank")
    if not cuts and not last.batch:
        _check_digest(order.epoch(epoch), 0, state)
        return Place(epoch, 0)
    _check_num_lanes(order, last)
    begun = _replay(order, epoch, cuts, last.apply_to(order, rank))
    _check_digest(begun, last.batch, state)
    is_same = _is_same(begun.order, order)
    if is_same and not cuts:
        return Place(epoch, last.batch)
    if is_same or last.batch == begun.first_step:  # who took nothing leaves no cut
        rest = _replay(order, epoch, cuts, order)
    else:
        cuts += (last,)
        rest = hand_over(begun, order, last.batch)
    whole = _as_whole(rest)
    if whole is not None:
        return Place(epoch, last.batch, (), whole)
    words = None if is_same else _describe(begun.order, rest)
    return Place(epoch, last.batch, cuts, rest, words)


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
    """What must agree between the ranks that began an epoch and those that go on."""
    return {
        "num_samples": order.num_samples,
        "order": order.mode,
        "seed": order.seed,
        "drop_last": order.drop_last,
        "samples": order.samples_digest,
    }


def _replay(order: Order, epoch: int, cuts: Sequence[Cut], last: Order) -> EpochOrder:
    """Return the epoch as `last` had it, after the cuts before."""
    orders = [*(cut.apply_to(order) for cut in cuts), last]
    begun = orders[0].epoch(epoch)
    for cut, following in zip(cuts, orders[1:], strict=True):
        begun = hand_over(begun, following, cut.batch)
    return begun


def _is_same(one: Order, other: Order) -> bool:
    """Whether two orders give their ranks the same samples; chunks do not matter in sequence."""
    chunks = one.chunks == other.chunks or one.mode in ("sequential", "time")
    return (one.batch_size, one.world_size) == (other.batch_size, other.world_size) and chunks


def _as_whole(rest: EpochOrder) -> EpochOrder | None:
    """Return the whole epoch of the same ranks, if what it has left at this step is just the rest."""
    order = rest.order
    if rest.num_batches != len(order):
        return None
    if isinstance(rest, DealtEpoch) and rest.deck.is_whole:
        full = order.batch_size * order.world_size
        if rest.begin == rest.first_step * full:
            return DealtEpoch(order, rest.epoch, rest.deck)
    if isinstance(rest, LaneEpoch) and order.lanes is not None:
        began, _ = order.lanes.lay_out(rest.layout_ranks, order.drop_last)
        if np.array_equal(began, order.lanes.lay_out(order.world_size, order.drop_last)[0]):
            return LaneEpoch(order, rest.epoch, order.lanes)
    return None


def _describe(before: Order, rest: EpochOrder) -> str:
    """Return how an epoch goes on; warn where something of it is left out that nobody asked to."""
    order, steps = rest.order, rest.num_batches - rest.first_step
    words = (
        f"epoch {rest.epoch} was begun by {before.world_size} x {before.batch_size} samples a batch and "
        f"goes on at batch {rest.first_step} with {order.world_size} x {order.batch_size}: "
        f"{rest.num_used:,} samples are left for {steps:,} batches"
    )
    over = rest.num_offered - rest.num_used
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
