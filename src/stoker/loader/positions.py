"""A set of positions: what is left of an epoch that other ranks began.

Enters: ranges, single positions, and *parts* that are listed only when somebody asks for them. Leaves: the
set in ascending order, by index and back. Costs: 16 bytes per range, not per position, and a permutation
for each part that is asked for; of N ranks that go on, each asks for the N-th of them that it trains on.
(The half of a full shuffle falls into as many ranges as samples.) No torch. Threads may share a set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from stoker.store.fields import Array, offsets_of

_NONE = np.empty(0, np.int64)
_MOST_LISTED = 4


@dataclass(frozen=True)
class Part:
    """`count` positions between `start` and `stop`; `members` lists them, ascending."""

    start: int
    stop: int
    count: int
    members: Callable[[], Array]


@dataclass(frozen=True, eq=False)
class PositionSet:
    """Ranges `starts` to `stops`, ascending, none empty, none touching the next; and parts between them."""

    starts: Array
    stops: Array
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(
        cls,
        positions: Array = _NONE,
        starts: Array = _NONE,
        stops: Array = _NONE,
        parts: Sequence[Part] = (),
    ) -> Self:
        """Return the union of positions, ranges and parts, in any order, that do not overlap."""
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
            tuple(part for part in parts if part.count),
        )

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def positions(self) -> Array:
        """Return all of them, ascending."""
        return self.slice(0, len(self))

    def slice(self, low: int, high: int) -> Array:
        """Return those with the places `low` to `high` in ascending order."""
        if low >= high:
            return _NONE
        first = int(np.searchsorted(self._offsets, low, side="right")) - 1
        last = int(np.searchsorted(self._offsets, high, side="left"))
        counts = np.diff(np.clip(self._offsets[first : last + 1], low, high))
        taken: Array = np.arange(low, high) + np.repeat(self._shifts[first:last], counts)
        for entry in (np.flatnonzero(self._part_of[first:last] >= 0) + first).tolist():
            base = int(self._offsets[entry])
            begin, end = max(low, base), min(high, int(self._offsets[entry + 1]))
            taken[begin - low : end - low] = self._list(entry)[begin - base : end - base]
        return taken

    def bounds(self, lows: Array, highs: Array) -> tuple[Array, Array]:
        """Return ranges of positions that the places from each low to its high lie in.

        They do not overlap where the places do not, and list no part that is inside as a whole.
        """
        begins, ends = self._entry_of(lows), self._entry_of(highs - 1)
        starts, stops = lows + self._shifts[begins], highs + self._shifts[ends]
        for row in np.flatnonzero(self._part_of[begins] >= 0).tolist():
            low, entry = int(lows[row]), int(begins[row])
            is_first = low == self._offsets[entry]
            starts[row] = self._lows[entry] if is_first else self.slice(low, low + 1)[0]
        for row in np.flatnonzero(self._part_of[ends] >= 0).tolist():
            high, entry = int(highs[row]), int(ends[row])
            is_last = high == self._offsets[entry + 1]
            stops[row] = self._highs[entry] if is_last else self.slice(high - 1, high)[0] + 1
        return starts, stops

    def count_below(self, positions: Array) -> Array:
        """Return how many of the set are smaller than each position."""
        if not len(self):
            return np.zeros_like(positions)
        entries = np.searchsorted(self._lows, positions, side="right") - 1
        reached = np.minimum(positions, self._highs[entries]) - self._lows[entries]
        for row in np.flatnonzero(self._part_of[entries] >= 0).tolist():
            entry, position = int(entries[row]), positions[row]
            if position >= self._highs[entry]:
                reached[row] = self._counts[entry]
            elif position > self._lows[entry]:
                reached[row] = np.searchsorted(self._list(entry), position)
        return np.where(entries < 0, 0, self._offsets[entries] + reached)

    def choose(self, places: PositionSet, parts: Sequence[Part] = ()) -> PositionSet:
        """Return those whose places lie in the ranges of `places`, and `parts` of the set beside them."""
        edges = np.unique(np.concatenate([self._offsets, places.starts, places.stops]))
        lows, highs = edges[:-1], edges[1:]
        within = np.searchsorted(places.starts, lows, side="right") - 1
        kept = within >= 0
        kept[kept] = lows[kept] < places.stops[within[kept]]
        lows, highs = lows[kept], highs[kept]
        entries = self._entry_of(lows)
        is_part = self._part_of[entries] >= 0
        shifts = self._shifts[entries[~is_part]]
        chosen = [
            self.part(*row)
            for row in zip(lows[is_part].tolist(), highs[is_part].tolist(), strict=True)
        ]
        return PositionSet.of(
            starts=lows[~is_part] + shifts, stops=highs[~is_part] + shifts, parts=[*chosen, *parts]
        )

    def part(self, low: int, high: int) -> Part:
        """Return the places `low` to `high` as a part."""
        starts, stops = self.bounds(np.array([low]), np.array([high]))
        return Part(int(starts[0]), int(stops[0]), high - low, lambda: self.slice(low, high))

    # -- entries: ranges and parts together, ascending ---------------------------------------

    @cached_property
    def _entries(self) -> tuple[Array, Array, Array, Array]:
        """First position, last position + 1, count, and number of the part (below 0: a range)."""
        columns = np.array([(part.start, part.stop, part.count) for part in self.parts], np.int64)
        starts, stops, counts = columns.reshape(-1, 3).T
        lows, highs = np.append(self.starts, starts), np.append(self.stops, stops)
        counts = np.append(self.stops - self.starts, counts)
        order = np.argsort(lows, kind="stable")
        return lows[order], highs[order], counts[order], order - len(self.starts)

    @property
    def _lows(self) -> Array:
        return self._entries[0]

    @property
    def _highs(self) -> Array:
        return self._entries[1]

    @property
    def _counts(self) -> Array:
        return self._entries[2]

    @property
    def _part_of(self) -> Array:
        return self._entries[3]

    @cached_property
    def _offsets(self) -> Array:
        return offsets_of(self._counts)

    @cached_property
    def _shifts(self) -> Array:
        return self._lows - self._offsets[:-1]

    def _entry_of(self, places: Array) -> Array:
        return np.searchsorted(self._offsets, places, side="right") - 1

    @cached_property
    def _listed(self) -> list[tuple[int, Array]]:
        return []

    def _list(self, entry: int) -> Array:
        """Return the members of a part; the last few are kept."""
        listed = self._listed
        for known, members in listed:
            if known == entry:
                return members
        members = self.parts[int(self._part_of[entry])].members()
        self.__dict__["_listed"] = [*listed[1 - _MOST_LISTED :], (entry, members)]  # one assignment
        return members
