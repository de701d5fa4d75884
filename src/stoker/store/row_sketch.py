"""Sketches of the rows of a table: a bounded sample, and a bounded set of row hashes.

Enters: blocks of rows with their row numbers. Leaves: two mergeable sketches, the same whatever
the order or the split of the blocks. Costs: about 2^20 sampled values, and 16 bytes per distinct
row up to 2^23 rows (134 MB, twice that while merging), however many rows pass.

`RowSample` keeps the k rows whose scrambled row numbers are smallest. The choice depends on the
row number alone, so parts sampled apart agree with the whole, and two fields of one store sample
the same rows: that is what lets a column be compared with the target.

`RowHashes` keeps one 64-bit hash per distinct row. Above its cap it keeps only hashes that end in
one more zero bit, again and again: the kept hashes stay an unbiased 1 in 2^level of all distinct
rows, so a count of duplicates becomes an estimate instead of a refusal to answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from stoker.store.fields import Array

FIRST_ROWS = 5
MAX_HASHES = 2**23
SAMPLE_VALUES = 2**20
# Below this width a Python call per row (0.3 µs) costs more than mixing whole columns at once.
_WIDE_ROW_BYTES = 384


def scramble(words: Array, seed: int = 1) -> Array:
    """Mix each 64-bit word (splitmix64, a bijection): neighbours end up far apart."""
    words = words.astype(np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % (1 << 64))
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def hash_rows(rows: Array) -> Array:
    """Return a 64-bit hash of the bytes of each row, C-contiguous. Equal means equal bytes: 0.0 and -0.0 differ."""
    num_rows = len(rows)
    if num_rows == 0 or rows.size == 0:
        return np.zeros(num_rows, dtype=np.uint64)
    width = rows.nbytes // num_rows
    if width >= _WIDE_ROW_BYTES:
        view = rows.reshape(-1).view(np.uint8).data
        digest = xxhash.xxh3_64_intdigest
        spans = range(0, rows.nbytes, width)
        hashes = (digest(view[start : start + width]) for start in spans)
        return np.fromiter(hashes, dtype=np.uint64, count=num_rows)
    table = rows.reshape(num_rows, -1).view(np.uint8)
    step = max(1, 2**20 // width)
    parts = [_hash_narrow(table[start : start + step]) for start in range(0, num_rows, step)]
    return np.concatenate(parts)


def _hash_narrow(table: Array) -> Array:
    num_rows, width = table.shape
    words = np.zeros((-(-width // 8), num_rows), dtype=np.uint64)
    whole = width // 8
    if width % 8 == 0:
        words[:] = table.view(np.uint64).T
    else:
        words.view(np.uint8).reshape(len(words), num_rows, 8)[:whole] = (
            table[:, : whole * 8].reshape(num_rows, whole, 8).transpose(1, 0, 2)
        )
        words[whole:].view(np.uint8).reshape(num_rows, 8)[:, : width % 8] = table[:, whole * 8 :]
    hashes = np.full(num_rows, width, dtype=np.uint64)
    for word in words:
        hashes ^= word
        hashes *= np.uint64(0xFF51AFD7ED558CCD)
        hashes ^= hashes >> np.uint64(32)
    return scramble(hashes)


@dataclass(frozen=True, eq=False)
class RowSample:
    """The rows whose scrambled numbers are smallest, in row order."""

    limit: int  # rows kept at most
    rows: Array  # `(s,)` int64 row numbers
    values: Array  # `(s, m, columns)`: m values of every column per row, in the dtype scanned

    @classmethod
    def take(cls, table: Array, first_row: int) -> RowSample:
        """Sample a table `(n, inner, columns)` whose row 0 has the number `first_row`."""
        num_rows, inner, num_columns = table.shape
        # One column over many positions (an image) needs many values per row to show its shape.
        per_row = max(1, min(inner, 256 // max(1, num_columns)))
        limit = max(256, min(4096, SAMPLE_VALUES // max(1, num_columns * per_row)))
        priority = scramble(np.arange(first_row, first_row + num_rows))
        chosen = np.sort(_smallest(priority, limit))
        offsets = (priority[chosen] % np.uint64(max(1, inner))).astype(np.int64)
        steps = np.arange(per_row) * inner // per_row
        positions = (offsets[:, None] + steps[None, :]) % max(1, inner)
        return cls(limit, chosen.astype(np.int64) + first_row, table[chosen[:, None], positions])

    def merge(self, other: RowSample) -> RowSample:
        """Return the sample of both."""
        limit = min(self.limit, other.limit)
        if len(self.rows) == 0 and len(other.rows) <= limit:
            return RowSample(limit, other.rows, other.values)
        rows = np.concatenate([self.rows, other.rows])
        values = np.concatenate([self.values, other.values])
        kept = _smallest(scramble(rows), limit)
        kept = kept[np.argsort(rows[kept], kind="stable")]
        return RowSample(limit, rows[kept], values[kept])


def _smallest(priority: Array, limit: int) -> Array:
    if len(priority) <= limit:
        return np.arange(len(priority))
    return np.argpartition(priority, limit - 1)[:limit]


@dataclass(frozen=True, eq=False)
class RowHashes:
    """Distinct rows seen so far, by hash."""

    tallies: Array  # `(65,)` int64: rows whose hash ends in at least that many zero bits
    level: int  # zero bits that a kept hash ends in; 0 while every distinct row is kept
    repeats: tuple[int, ...]  # first rows that repeat an earlier row, at most five
    hashes: Array  # `(num_distinct,)` uint64, sorted
    rows: Array  # `(num_distinct,)` int64: where each was seen first
    cap: int = MAX_HASHES  # hashes kept at most

    @classmethod
    def take(cls, table: Array, first_row: int, cap: int = MAX_HASHES) -> RowHashes:
        """Hash every row of `(n, ...)`, whose row 0 has the number `first_row`."""
        hashes = hash_rows(table)
        rows = np.arange(first_row, first_row + len(hashes), dtype=np.int64)
        # Radix-sorting 16 bits first leaves so little disorder that all together takes a third.
        order = np.argsort((hashes >> np.uint64(48)).astype(np.uint16), kind="stable")
        order = order[np.argsort(hashes[order], kind="stable")]
        tallies, hashes, rows = _tally(hashes), hashes[order], rows[order]
        is_new = np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)]
        # Stable sorts keep rows in order: the first of equal hashes is the earliest row.
        repeats = _earliest(rows[~is_new])
        return _capped(tallies, 0, repeats, hashes[is_new], rows[is_new], cap)

    @property
    def num_distinct(self) -> int:
        """Distinct rows at this level."""
        return len(self.hashes)

    @property
    def num_duplicates(self) -> int:
        """Rows that repeat an earlier one; an estimate when `level` is not 0."""
        return int(self.tallies[self.level] - self.num_distinct) << self.level

    def merge(self, other: RowHashes) -> RowHashes:
        """Return the hashes of both."""
        level = max(self.level, other.level)
        a, b = _at_level(self.hashes, self.rows, level), _at_level(other.hashes, other.rows, level)
        (hashes, rows), (more_hashes, more_rows) = (a, b) if len(a[0]) >= len(b[0]) else (b, a)
        # Inserting the smaller side needs one copy of the larger; sorting both would need five.
        at = np.searchsorted(hashes, more_hashes)
        known = at < len(hashes)
        known[known] = hashes[at[known]] == more_hashes[known]
        seen, again = rows[at[known]], more_rows[known]
        repeats = _earliest(np.array([*self.repeats, *other.repeats]), np.maximum(seen, again))
        rows = rows.copy()
        rows[at[known]] = np.minimum(seen, again)
        return _capped(
            self.tallies + other.tallies,
            level,
            repeats,
            np.insert(hashes, at[~known], more_hashes[~known]),
            np.insert(rows, at[~known], more_rows[~known]),
            min(self.cap, other.cap),
        )


def _tally(hashes: Array) -> Array:
    tallies = np.zeros(65, dtype=np.int64)
    for level in range(65):
        tallies[level] = len(hashes)
        if len(hashes) == 0 or level == 64:
            break
        hashes = hashes[(hashes & np.uint64(1 << level)) == 0]
    return tallies


def _earliest(*rows: Array) -> tuple[int, ...]:
    """Return the smallest five of all these rows."""
    smallest = [part[_smallest(part, FIRST_ROWS)] for part in rows]
    return tuple(np.unique(np.concatenate(smallest)).astype(np.int64)[:FIRST_ROWS].tolist())


def _capped(
    tallies: Array, level: int, repeats: tuple[int, ...], hashes: Array, rows: Array, cap: int
) -> RowHashes:
    """Raise the level until the cap holds."""
    while len(hashes) > cap:
        level += 1
        hashes, rows = _at_level(hashes, rows, level)
    return RowHashes(tallies, level, repeats, hashes, rows, cap)


def _at_level(hashes: Array, rows: Array, level: int) -> tuple[Array, Array]:
    if level == 0:
        return hashes, rows
    kept = (hashes & np.uint64((1 << level) - 1)) == 0
    return hashes[kept], rows[kept]
