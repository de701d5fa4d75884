"""A set of positions: the rest of an epoch that other ranks began.

Enters: ranges, single positions, and *subsets* whose members are computed when they are first needed. Leaves:
the positions in ascending order, by their index in the set, and back. Costs: 16 bytes per range, not per position,
and one permutation per subset that is listed; each of N ranks lists about the N-th part of them, those that it
trains on. Half of a full shuffle has about as many ranges as samples. No torch. Threads may share a set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from stoker.store.fields import Array, offsets_of

_NONE = np.empty(0, np.int64)
_MOST_LISTED = 4


@dataclass(frozen=True)
class Subset:
    """`count` positions between `start` and `stop`; `members` computes them, ascending."""

    start: int
    stop: int
    count: int
    members: Callable[[], Array]


class _Entries(NamedTuple):
    """Ranges and subsets of a set, ascending: first position, last position + 1, count, number of the subset.

    The number is below 0 for a range.
    """

    lows: Array
    highs: Array
    counts: Array
    subset_of: Array


@dataclass(frozen=True, eq=False)
class PositionSet:
    """Ranges `starts` to `stops`, ascending, none empty, none touching the next; and subsets between them."""

    starts: Array
    stops: Array
    subsets: tuple[Subset, ...] = ()

    @classmethod
    def of(
        cls,
        positions: Array = _NONE,
        starts: Array = _NONE,
        stops: Array = _NONE,
        subsets: Sequence[Subset] = (),
    ) -> Self:
        """Return the union of positions, ranges and subsets, in any order, that do not overlap."""
        positions = np.sort(positions)
        breaks = np.diff(positions) != 1
        firsts = positions[np.append(True, breaks)[: len(positions)]]
        lasts = positions[np.append(breaks, True)[: len(positions)]]
        starts, stops = np.append(firsts, starts), np.append(lasts + 1, stops)
        filled = starts < stops
        starts, stops = np.sort(starts[filled]), np.sort(stops[filled])
        apart = starts[1:] != stops[:-1]
        return cls(
            starts[np.append(True, apart)[: len(starts)]],
            stops[np.append(apart, True)[: len(stops)]],
            tuple(each for each in subsets if each.count),
        )

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def positions(self) -> Array:
        """Return all positions, ascending."""
        return self.slice(0, len(self))

    def slice(self, low: int, high: int) -> Array:
        """Return members number `low` to `high` in ascending order."""
        if low >= high:
            return _NONE
        first = int(np.searchsorted(self._offsets, low, side="right")) - 1
        last = int(np.searchsorted(self._offsets, high, side="left"))
        counts = np.diff(np.clip(self._offsets[first : last + 1], low, high))
        taken: Array = np.arange(low, high) + np.repeat(self._shifts[first:last], counts)
        for entry in (np.flatnonzero(self._entries.subset_of[first:last] >= 0) + first).tolist():
            base = int(self._offsets[entry])
            begin, end = max(low, base), min(high, int(self._offsets[entry + 1]))
            taken[begin - low : end - low] = self._list(entry)[begin - base : end - base]
        return taken

    def bounds(self, lows: Array, highs: Array) -> tuple[Array, Array]:
        """Return ranges of positions that enclose members number `low` to `high`, for each pair.

        Ranges of different members do not overlap. No subset is listed that lies in a range as a whole.
        """
        begins, ends = self._entry_of(lows), self._entry_of(highs - 1)
        starts, stops = lows + self._shifts[begins], highs + self._shifts[ends]
        for row in np.flatnonzero(self._entries.subset_of[begins] >= 0).tolist():
            low, entry = int(lows[row]), int(begins[row])
            is_first = low == self._offsets[entry]
            starts[row] = self._entries.lows[entry] if is_first else self.slice(low, low + 1)[0]
        for row in np.flatnonzero(self._entries.subset_of[ends] >= 0).tolist():
            high, entry = int(highs[row]), int(ends[row])
            is_last = high == self._offsets[entry + 1]
            stops[row] = (
                self._entries.highs[entry] if is_last else self.slice(high - 1, high)[0] + 1
            )
        return starts, stops

    def count_below(self, positions: Array) -> Array:
        """Return how many members are smaller than each position."""
        if not len(self):
            return np.zeros_like(positions)
        entries = np.searchsorted(self._entries.lows, positions, side="right") - 1
        reached = np.minimum(positions, self._entries.highs[entries]) - self._entries.lows[entries]
        for row in np.flatnonzero(self._entries.subset_of[entries] >= 0).tolist():
            entry, position = int(entries[row]), positions[row]
            if position >= self._entries.highs[entry]:
                reached[row] = self._entries.counts[entry]
            elif position > self._entries.lows[entry]:
                reached[row] = np.searchsorted(self._list(entry), position)
        return np.where(entries < 0, 0, self._offsets[entries] + reached)

    def choose(self, indices: PositionSet, subsets: Sequence[Subset] = ()) -> PositionSet:
        """Return the members whose numbers lie in the ranges of `indices`, together with `subsets`."""
        edges = np.unique(np.concatenate([self._offsets, indices.starts, indices.stops]))
        lows, highs = edges[:-1], edges[1:]
        within = np.searchsorted(indices.starts, lows, side="right") - 1
        kept = within >= 0
        kept[kept] = lows[kept] < indices.stops[within[kept]]
        lows, highs = lows[kept], highs[kept]
        entries = self._entry_of(lows)
        is_listed = self._entries.subset_of[entries] >= 0
        shifts = self._shifts[entries[~is_listed]]
        chosen = [
            self.subset(*row)
            for row in zip(lows[is_listed].tolist(), highs[is_listed].tolist(), strict=True)
        ]
        return PositionSet.of(
            starts=lows[~is_listed] + shifts,
            stops=highs[~is_listed] + shifts,
            subsets=[*chosen, *subsets],
        )

    def subset(self, low: int, high: int) -> Subset:
        """Return members number `low` to `high` as a subset."""
        starts, stops = self.bounds(np.array([low]), np.array([high]))
        return Subset(int(starts[0]), int(stops[0]), high - low, lambda: self.slice(low, high))

    # -- entries: ranges and subsets together, ascending --------------------------------------

    @cached_property
    def _entries(self) -> _Entries:
        columns = np.array([(each.start, each.stop, each.count) for each in self.subsets], np.int64)
        starts, stops, counts = columns.reshape(-1, 3).T
        lows, highs = np.append(self.starts, starts), np.append(self.stops, stops)
        counts = np.append(self.stops - self.starts, counts)
        order = np.argsort(lows, kind="stable")
        return _Entries(lows[order], highs[order], counts[order], order - len(self.starts))

    @cached_property
    def _offsets(self) -> Array:
        return offsets_of(self._entries.counts)

    @cached_property
    def _shifts(self) -> Array:
        return self._entries.lows - self._offsets[:-1]

    def _entry_of(self, indices: Array) -> Array:
        return np.searchsorted(self._offsets, indices, side="right") - 1

    @cached_property
    def _listed(self) -> list[tuple[int, Array]]:
        return []

    def _list(self, entry: int) -> Array:
        """Return the members of a subset; the last few lists are kept."""
        listed = self._listed
        for known, members in listed:
            if known == entry:
                return members
        members = self.subsets[int(self._entries.subset_of[entry])].members()
        self.__dict__["_listed"] = [*listed[1 - _MOST_LISTED :], (entry, members)]  # one assignment
        return members
