"""Lanes for stateful recurrent training: row i of batch k continues row i of batch k - 1.

Enters: where every sample's window ends, which samples begin a new segment, how many lanes. Leaves:
a `LanePlan`: the samples whose windows tile their segment, and where state must be reset. Costs:
one binary search per sample and one step per tile; 10 million samples take about 2 s. No torch.

A recurrent state may only be carried over rows that follow each other, each row once. Carrying it between windows
that overlap would repeat rows. So of overlapping windows only those are used whose ends advance by exactly the
window: they tile the segment, and the model runs over every row once, in order.

    segment   ──────────────────────┊ gap ┊──────────────────────────
    windows   [  0  ][  1  ][  2  ]         [  3  ][  4  ][  5  ][  6  ]
    2 lanes   lane 0: 0 1 2 -               lane 1: 3 4 5 6
    batches   (0, 3) (1, 4) (2, 5) (-1, 6)
    reset     (T, T) (F, F) (F, F) ( T, F)

The tiles of all segments, in order, are cut into `num_lanes` contiguous lanes of equal length or one
less. State is reset at the start of a lane (so of an epoch), where a segment begins (gap, shard,
split), and where a tile does not begin at the row after the one before it (samples missing between).

Padding: a lane that has ended keeps its row, with position -1 and `reset` True; the other rows never move. Longer
lanes are spread over the ranks, so that all take the same number of steps; a rank whose lanes would all end one step
early has its first lane longer and its last lane shorter by one. With `drop_last` all lanes have the same length, and
the last tiles, fewer than the lanes, are left out. A cut between two lanes can be inside a segment; state then begins
anew there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stoker.errors import InputError
from stoker.loader.columns import check_samples, digest_samples
from stoker.store.fields import Array, offsets_of
from stoker.store.reader import Store

OVERLAPS = "that overlap the window before"
OVER_GAP = "that run over a gap"


@dataclass(frozen=True, eq=False)
class LanePlan:
    """Samples in lane order.

    Attributes:
        num_samples: Samples that were offered.
        num_lanes: Lanes over all ranks.
        positions: `(tiles,)` int64, positions of the taken samples, ascending.
        begins: `(tiles,)` bool, state begins anew at this tile.
        left_out: Reason to number of samples that are not taken.
        samples_digest: Digest of the samples of a store that were offered; "" if they are not known.
            A loader over others would carry state over missing samples, so an `Order` refuses the plan.
    """

    num_samples: int
    num_lanes: int
    positions: Array
    begins: Array
    left_out: Mapping[str, int]
    samples_digest: str = ""

    @property
    def num_segments(self) -> int:
        """Stretches over which state flows without a reset, before lanes cut them."""
        return int(self.begins.sum())

    @property
    def reason(self) -> str:
        """The plan in words: samples taken, samples left out, and why."""
        kept = f"{len(self.positions):,} of {self.num_samples:,} windows follow each other"
        lanes = f"in {self.num_lanes:,} lanes over {self.num_segments:,} segments"
        out = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items() if count)
        return f"lanes: {kept} {lanes}" + (f"; left out: {out}" if out else "")

    def lay_out(self, world_size: int = 1, drop_last: bool = False) -> tuple[Array, Array]:
        """Return the first tile and the length of every lane, `(num_lanes,)` each."""
        total = len(self.positions)
        if drop_last:
            lengths = np.full(self.num_lanes, total // self.num_lanes)
        else:
            num_steps = -(-total // self.num_lanes)
            shares = _share(total, world_size).tolist()
            per_rank = self.num_lanes // world_size
            lengths = np.concatenate([_lengths(share, per_rank, num_steps) for share in shares])
        return offsets_of(lengths)[:-1], lengths


def plan_lanes(
    ends: Array,
    window: int | Sequence[int],
    breaks: Array | None,
    num_lanes: int,
    *,
    over_gap: Array | None = None,
) -> LanePlan:
    """Choose the samples that tile their segments, for `num_lanes` lanes.

    Args:
        ends: `(n,)` exclusive end row of each sample's window, not falling within a segment; or
            `(n, k)` for k series whose states are carried together.
        window: Rows per window; k numbers for k series.
        breaks: `(n,)` bool, a new segment begins with this sample (gap, shard, split); None for one
            segment.
        num_lanes: Rows of a batch over all ranks: `batch_size * world_size`.
        over_gap: `(n,)` bool, the sample's own window runs over a gap: it is left out.

    Raises:
        InputError: Ends that fall, or fewer tiles than lanes.
    """
    ends, windows, segments = _check_arguments(ends, window, breaks, num_lanes)
    keep = np.arange(len(ends)) if over_gap is None else np.flatnonzero(~np.asarray(over_gap, bool))
    after = _next_tile(ends[keep], windows, segments[keep])
    tiles = keep[_follow(after)]
    begins = np.ones(len(tiles), bool)
    if len(tiles):
        joined = (np.diff(ends[tiles], axis=0) == windows).all(axis=1)
        begins[1:] = ~joined | (np.diff(segments[tiles]) != 0)
    left_out = {OVERLAPS: len(keep) - len(tiles), OVER_GAP: len(ends) - len(keep)}
    plan = LanePlan(len(ends), num_lanes, tiles, begins, left_out)
    if len(tiles) < num_lanes:
        raise InputError(
            f"{len(tiles)} windows for {num_lanes} lanes ({plan.reason}).",
            "at least one window per lane",
            f"num_lanes={len(tiles)}, or --set training.batch_size={len(tiles)}"
            if len(tiles)
            else "more data, a shorter window, or a larger max_gap_rows",
        )
    return plan


def plan_store_lanes(
    store: Store,
    num_lanes: int,
    *,
    fields: Sequence[str] | None = None,
    samples: Array | None = None,
    max_gap_rows: int = 0,
) -> LanePlan:
    """Plan lanes over the series of a store: never across gaps, shards or splits.

    Args:
        store: Store with at least one series.
        num_lanes: `batch_size * world_size`.
        fields: Series whose states are carried; all of them by default. Their windows must cover
            the same stretch of time, or they cannot all tile.
        samples: Samples of the store, ascending; all by default. Pass the loader's samples: it
            refuses a plan over others.
        max_gap_rows: Consecutive rows that may be missing without breaking the state.
    """
    names = list(fields) if fields is not None else _series_of(store)
    if not names:
        raise InputError(
            "no fields were given to carry state over.",
            f"at least one series of {store.name}: {', '.join(_series_of(store))}",
            f"fields={_series_of(store)[:1]}, or no fields= for all of them",
        )
    windows = [_window(store, name) for name in names]
    filled = [number for number, info in enumerate(store.manifest.shards) if info.num_samples]
    if not filled:
        raise InputError(f"{store.name} has no samples.", "at least one per lane", "")
    chosen = check_samples(samples, store)
    shards = [_look_at_shard(store, shard, names, max_gap_rows) for shard in filled]
    ends, breaks, over_gap = (np.concatenate(column) for column in zip(*shards, strict=True))
    if "split" in store.fields:
        split = store.read_rows("split", 0, store.num_samples)
        breaks[1:] |= split[1:] != split[:-1]
    # A number per segment of the whole store: samples that a selection skips still break it.
    segments = np.cumsum(breaks)[chosen]
    breaks = np.concatenate([[True], segments[1:] != segments[:-1]])[: len(chosen)]
    plan = plan_lanes(ends[chosen], windows, breaks, num_lanes, over_gap=over_gap[chosen])
    return replace(plan, samples_digest=digest_samples(chosen))


def _check_arguments(
    ends: Array, window: int | Sequence[int], breaks: Array | None, num_lanes: int
) -> tuple[Array, Array, Array]:
    """Return ends `(n, k)`, windows `(k,)` and the segment of every sample `(n,)`."""
    ends, windows = np.asarray(ends, np.int64), np.atleast_1d(np.asarray(window, np.int64))
    ends = ends[:, None] if ends.ndim == 1 else ends
    starts = np.zeros(len(ends), bool) if breaks is None else np.asarray(breaks, bool)
    fits = ends.shape[1:] == windows.shape and starts.shape == ends.shape[:1]
    if not fits or not windows.size or windows.min() < 1:
        raise InputError(
            f"ends {ends.shape}, window {window}, breaks {starts.shape}.",
            "ends (n,) with one window of 1 or more, or (n, k) with k windows; breaks (n,)",
            "plan_lanes(ends, window, breaks, num_lanes)",
        )
    if num_lanes < 1:
        raise InputError(f"num_lanes is {num_lanes}.", "1 or more", "num_lanes=1")
    falls = np.flatnonzero((np.diff(ends, axis=0) < 0).any(axis=1) & ~starts[1:])
    if len(falls):
        raise InputError(
            f"the window of sample {falls[0] + 1} ends before that of sample {falls[0]}.",
            "samples in time order within a segment",
            "sort the samples by time, and mark where a series begins in `breaks`",
        )
    return ends, windows, np.cumsum(starts)


def _next_tile(ends: Array, windows: Array, segments: Array) -> Array:
    """Return for each sample the first later one that overlaps it in no series, or is in another segment."""
    if not len(ends):
        return np.empty(0, np.int64)
    first = np.concatenate([[True], segments[1:] != segments[:-1]])
    heads = np.flatnonzero(first)
    of_segment = np.cumsum(first) - 1
    after = np.zeros(len(ends), np.int64)
    for column, window in zip(ends.T, windows.tolist(), strict=True):
        # One ascending key for one search: the segments are placed one after another, a window apart.
        tails = np.append(heads[1:], len(ends)) - 1
        bases = offsets_of(column[tails] - column[heads] + window)[:-1]
        key = column - column[heads][of_segment] + bases[of_segment]
        np.maximum(after, np.searchsorted(key, key + window), out=after)
    return after


def _follow(after: Array) -> Array:
    """Return 0, after[0], after[after[0]], ... while inside."""
    count = len(after)
    if (after == np.arange(1, count + 1)).all():
        return np.arange(count)
    taken, at, links = [], 0, after.data
    while at < count:
        taken.append(at)
        at = links[at]
    return np.array(taken, dtype=np.int64)


def _share(total: int, num_shares: int) -> Array:
    """Divide a number into shares that differ by at most one."""
    return np.diff(np.arange(num_shares + 1) * total // num_shares)


def _lengths(share: int, num_lanes: int, num_steps: int) -> Array:
    """Return the lengths of a rank's lanes; the longest has `num_steps`, so that no batch is empty."""
    lengths = _share(share, num_lanes)
    if lengths.max() < num_steps:
        lengths[0] += 1
        lengths[-1] -= 1
    return lengths


def _series_of(store: Store) -> list[str]:
    names = [name for name, info in store.fields.items() if info.kind == "series"]
    if not names:
        raise InputError(
            f"{store.name} has no series, so its windows cannot be laid out in lanes.",
            "a store of series (stoker pack bars), or window ends of your own",
            "plan_lanes(ends, window, breaks, num_lanes)",
        )
    return names


def _window(store: Store, name: str) -> int:
    info = store.fields.get(name)
    if info is None or info.window is None:
        raise InputError(
            f"{name!r} is no series of {store.name}.",
            ", ".join(_series_of(store)),
            f"fields={_series_of(store)[:1]}",
        )
    return int(info.window)


def _look_at_shard(
    store: Store, shard: int, names: Sequence[str], max_gap_rows: int
) -> tuple[Array, Array, Array]:
    """Return ends `(n, k)`, breaks and windows over gaps `(n,)` of one shard's samples."""
    ends = np.stack([store.read_series(name, "ends", shard) for name in names], axis=1)
    breaks, over_gap = np.zeros(len(ends), bool), np.zeros(len(ends), bool)
    breaks[0] = True
    for name, column in zip(names, ends.T, strict=True):
        stretch = np.cumsum(_broken_rows(store, name, shard, max_gap_rows))
        last = stretch[column - 1]
        breaks[1:] |= last[1:] != last[:-1]
        over_gap |= stretch[column - _window(store, name)] != last
    return ends, breaks, over_gap


def _broken_rows(store: Store, name: str, shard: int, max_gap_rows: int) -> Array:
    """Return, for each row, whether too many rows are missing before it."""
    duration = store.fields[name].duration_ns
    if duration is None:  # no times, and so no gaps
        return np.zeros(len(store.read_series(name, "rows", shard)), bool)
    broken: Array = store.read_series(name, "gap", shard) != 0
    if max_gap_rows:
        time = store.read_series(name, "time", shard)
        broken[1:] &= np.diff(time) // duration - 1 > max_gap_rows
    return broken
