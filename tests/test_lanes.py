"""Lanes: state flows over rows once and in order, and over nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.loader.lanes import OVER_GAP, OVERLAPS, LanePlan, plan_lanes, plan_store_lanes
from stoker.loader.loader import Loader
from stoker.loader.order import Order
from stoker.loader.planned import PlannedBatch
from stoker.plan.facts import even_chunks
from stoker.store.fields import Dense, Series
from store_makers import write_store

HIDDEN = 3


class TinyRnn:
    """h = tanh(x A + h B), one row at a time."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.inputs, self.state = rng.normal(size=(2, HIDDEN)), rng.normal(size=(HIDDEN, HIDDEN))

    def run(self, rows: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        for row in rows:
            hidden = np.tanh(row @ self.inputs + hidden @ self.state)
        return hidden


def batches_of(plan: LanePlan, world_size: int, **options) -> list[list[PlannedBatch]]:
    """Batches per rank."""
    size = plan.num_lanes // world_size
    order = Order(plan.num_samples, size, "lanes", world_size=world_size, lanes=plan, **options)
    return [list(replace(order, rank=rank).epoch(0).batches()) for rank in range(world_size)]


@st.composite
def series(draw: st.DrawFn) -> tuple[np.ndarray, int, np.ndarray]:
    """Ends, window and breaks of a few segments, with samples missing here and there."""
    window = draw(st.integers(1, 5))
    stride = draw(st.integers(1, 3))
    ends, breaks, at = [], [], 0
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 40))
        own = at + window + stride * np.arange(length)
        own = own[draw(st.lists(st.booleans(), min_size=length, max_size=length).map(_mostly))]
        ends.append(own)
        breaks.append(np.arange(len(own)) == 0)
        if draw(st.booleans()):  # the next shard counts its rows from 0 again
            at = 0
        else:
            at = at + window + stride * length
    return np.concatenate(ends), window, np.concatenate(breaks)


def _mostly(flags: list[bool]) -> np.ndarray:
    """Keep a sample unless three draws in a row say no: holes, but long stretches too."""
    flags = np.array(flags)
    return flags | np.roll(flags, 1) | np.roll(flags, 2)


@st.composite
def lane_plans(draw: st.DrawFn) -> tuple[LanePlan, int, tuple[np.ndarray, int, np.ndarray]]:
    ends, window, breaks = draw(series())
    world_size, per_rank = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    try:
        plan = plan_lanes(ends, window, breaks, world_size * per_rank)
    except InputError:
        assume(False)
    assume(per_rank > 1 or len(plan.positions) % world_size == 0)
    return plan, world_size, (ends, window, breaks)


# ------------------------------------------------------------------------------------------ equality


@given(lane_plans(), st.integers(0, 5))
def test_truncated_forward_over_the_lanes_is_one_full_forward_per_segment(made, seed):
    """State carried batch by batch equals one pass over the joined rows since the last reset."""
    plan, world_size, (ends, window, breaks) = made
    shard = np.cumsum(breaks)  # every segment has rows of its own
    rows = np.random.default_rng(seed).normal(size=(shard.max() + 1, ends.max() + 1, 2))
    model = TinyRnn()
    for batches in batches_of(plan, world_size):
        hidden = np.zeros((len(batches[0].positions), HIDDEN))
        since: list[list[np.ndarray]] = [[] for _ in hidden]
        for batch in batches:
            hidden[batch.reset] = 0
            for row, position in enumerate(batch.positions.tolist()):
                if batch.reset[row]:
                    since[row] = []
                if position < 0:
                    continue
                own = rows[shard[position], ends[position] - window : ends[position]]
                since[row].append(own)
                hidden[row] = model.run(own, hidden[row])
                full = model.run(np.concatenate(since[row]), np.zeros(HIDDEN))
                np.testing.assert_allclose(hidden[row], full, rtol=0, atol=1e-12)


def test_carrying_state_over_the_lanes_reaches_the_start_of_the_segment():
    """Not only equal to itself: one lane over one segment sees all its rows, each once."""
    rows = np.random.default_rng(1).normal(size=(43, 2))
    plan = plan_lanes(np.arange(4, 44), 4, None, 1)
    hidden, model = np.zeros(HIDDEN), TinyRnn()
    (batches,) = batches_of(plan, 1)
    for batch in batches:
        hidden[:] = 0 if batch.reset[0] else hidden
        end = int(batch.positions[0]) + 4
        hidden = model.run(rows[end - 4 : end], hidden)
    np.testing.assert_allclose(hidden, model.run(rows[:40], np.zeros(HIDDEN)), atol=1e-12)
    assert [batch.reset[0] for batch in batches] == [True] + [False] * 9


# ------------------------------------------------------------------------------------------- layout


@given(lane_plans())
def test_a_row_that_is_not_reset_begins_where_the_row_before_ended(made):
    plan, world_size, (ends, window, breaks) = made
    segment = np.cumsum(breaks)
    for batches in batches_of(plan, world_size):
        assert batches[0].reset.all()
        for before, after in pairwise(batches):
            for old, new, reset in zip(before.positions, after.positions, after.reset, strict=True):
                if new < 0:
                    assert reset
                    continue
                assert old >= 0, "a lane ended and went on"
                follows = segment[old] == segment[new] and ends[new] - window == ends[old]
                assert reset == (not follows)


@given(lane_plans(), st.booleans())
def test_every_tile_exactly_once_in_equal_steps_without_empty_batches(made, drop_last):
    plan, world_size, _ = made
    total = len(plan.positions)
    assume(not drop_last or total >= plan.num_lanes)
    per_rank = batches_of(plan, world_size, drop_last=drop_last)
    num_steps = total // plan.num_lanes if drop_last else -(-total // plan.num_lanes)
    seen: list[int] = []
    for batches in per_rank:
        assert len(batches) == num_steps
        for step, batch in enumerate(batches):
            assert batch.step == step
            assert len(batch.positions) == plan.num_lanes // world_size
            assert batch.valid.any()
            assert (batch.valid == (batch.positions >= 0)).all()
            assert batch.valid.all() or not drop_last
            seen += batch.positions[batch.valid].tolist()
    expected = plan.positions[: num_steps * plan.num_lanes] if drop_last else plan.positions
    assert sorted(seen) == expected.tolist()


@given(lane_plans())
def test_lanes_are_contiguous_and_follow_each_other_over_the_ranks(made):
    plan, world_size, _ = made
    lanes = [
        [batch.positions[row] for batch in batches if batch.valid[row]]
        for batches in batches_of(plan, world_size)
        for row in range(plan.num_lanes // world_size)
    ]
    assert [place for lane in lanes for place in lane] == plan.positions.tolist()
    lengths = [len(lane) for lane in lanes]
    assert max(lengths) - min(lengths) <= 2
    assert max(lengths) == -(-len(plan.positions) // plan.num_lanes)


@given(series())
def test_tiles_never_overlap_and_nothing_that_fits_is_left_out(made):
    ends, window, breaks = made
    assume(len(ends))
    plan = plan_lanes(ends, window, breaks, 1)
    segment = np.cumsum(breaks)
    taken = set(plan.positions.tolist())
    last = None
    for place in range(len(ends)):
        new = last is None or segment[place] != segment[last]
        if new or ends[place] - window >= ends[last]:
            assert place in taken
            last = place
        else:
            assert place not in taken
    assert plan.left_out == {OVERLAPS: len(ends) - len(taken), OVER_GAP: 0}


@given(lane_plans(), st.data())
def test_resume_and_digest(made, data):
    plan, world_size, _ = made
    size = plan.num_lanes // world_size
    rank = data.draw(st.integers(0, world_size - 1))
    order = Order(plan.num_samples, size, "lanes", 0, rank, world_size, lanes=plan)
    start = data.draw(st.integers(0, len(order)))
    whole, rest = list(order.epoch(1).batches())[start:], list(order.epoch(1).batches(start))
    for one, other in zip(whole, rest, strict=True):
        assert one.positions.tolist() == other.positions.tolist()
        assert one.reset.tolist() == other.reset.tolist()
    assert order.epoch(0).digest() == order.epoch(1).digest(len(order))
    if start < len(order):
        assert order.epoch(0).digest(start) != order.epoch(0).digest()
    ranks = [replace(order, rank=number) for number in range(world_size)]
    left = [batch.positions for each in ranks for batch in each.epoch(0).batches(start)]
    left = sorted(place for positions in left for place in positions.tolist() if place >= 0)
    assert order.remaining(0, start).tolist() == left


@given(lane_plans(), st.integers(1, 6))
def test_chunks_of_steps_break_no_lane(made, most):
    plan, world_size, _ = made
    plain = batches_of(plan, world_size)
    chunked = batches_of(plan, world_size, chunks=even_chunks(len(plain[0]), most))
    for one, other in zip(plain, chunked, strict=True):
        for before, after in zip(one, other, strict=True):
            assert before.positions.tolist() == after.positions.tolist()
            assert before.reset.tolist() == after.reset.tolist()
            assert after.chunks == (after.chunks[0],)
        visited = list(dict.fromkeys(batch.chunks[0] for batch in other))
        assert visited == list(range(len(even_chunks(len(plain[0]), most))))


def test_the_picture_of_the_module():
    ends = np.array([2, 4, 6, 10, 12, 14, 16])
    breaks = np.array([1, 0, 0, 1, 0, 0, 0], bool)
    (batches,) = batches_of(plan_lanes(ends, 2, breaks, 2), 1)
    assert [batch.positions.tolist() for batch in batches] == [[0, 3], [1, 4], [2, 5], [-1, 6]]
    assert [batch.reset.tolist() for batch in batches] == [
        [True, True],
        [False, False],
        [False, False],
        [True, False],
    ]


def test_several_series_tile_together_or_begin_anew():
    """8 hours are 96 bars of M5 and 8 of H1: states of both flow. With 9 of H1 they would overlap."""
    decisions = np.arange(400, 1200)
    ends = np.stack([decisions, decisions // 12], axis=1)
    together = plan_lanes(ends, (96, 8), None, 1)
    assert together.positions.tolist() == list(range(0, 800, 96))
    assert together.num_segments == 1
    apart = plan_lanes(ends, (96, 9), None, 1)
    assert apart.num_segments == len(apart.positions)
    assert (np.diff(ends[apart.positions, 1]) >= 9).all()


def test_the_reason_tells_what_is_left_out():
    plan = plan_lanes(np.arange(10, 110), 10, None, 3, over_gap=np.arange(100) < 5)
    assert plan.reason == (
        "lanes: 10 of 100 windows follow each other in 3 lanes over 1 segments; "
        "left out: 85 that overlap the window before, 5 that run over a gap"
    )


# -------------------------------------------------------------------------------------------- store


def shard(num_samples: int, gap_at: list[int], split: list[int], window: int = 4) -> dict:
    """A minute series; before each row of `gap_at` two rows are missing."""
    num_rows = num_samples + window - 1
    gap = np.zeros(num_rows, np.uint8)
    gap[gap_at] = 1
    return {
        "M1": Series(
            rows=np.arange(num_rows, dtype="f4")[:, None],
            time=(np.arange(num_rows) + 2 * np.cumsum(gap)) * 60,
            ends=np.arange(num_samples) + window,
            window=window,
            gap=gap,
            columns=("c",),
            duration_ns=60,
        ),
        "split": Dense(np.array(split, np.uint8)),
    }


def rows_of(store, batches: list[PlannedBatch]) -> list[list[tuple[int, int]]]:
    """Per stretch without a reset: the (shard, row)s that the model runs over."""
    stretches: dict[int, list] = {}
    starts = np.cumsum([0, *(info.num_samples for info in store.manifest.shards)])
    done: list[list] = []
    for batch in batches:
        for row, place in enumerate(batch.positions.tolist()):
            if batch.reset[row]:
                stretches[row] = []
                done.append(stretches[row])
            if place >= 0:
                number = int(np.searchsorted(starts, place, side="right")) - 1
                end = place - int(starts[number]) + 4
                stretches[row] += [(number, each) for each in range(end - 4, end)]
    return [stretch for stretch in done if stretch]


@given(
    st.lists(st.integers(1, 49), max_size=5),
    st.lists(st.integers(1, 49), max_size=5),
    st.integers(0, 47),
    st.integers(1, 4),
)
def test_a_store_is_never_crossed_at_gaps_shards_or_splits(tmp_path_factory, one, two, val, lanes):
    split = [0] * val + [1] * (47 - val)
    store = write_store(
        tmp_path_factory.mktemp("store"), [shard(47, one, split), shard(47, two, [0] * 47)]
    )
    gaps = [set(one), set(two)]
    with store:
        try:
            plan = plan_store_lanes(store, lanes)
        except InputError as error:
            if "windows for" not in error.given:  # gaps everywhere
                raise
            assume(False)
        splits = store.read_rows("split", 0, 94)
        (batches,) = batches_of(plan, 1)
        for stretch in rows_of(store, batches):
            numbers = {number for number, _ in stretch}
            rows = [row for _, row in stretch]
            assert len(numbers) == 1
            assert rows == list(range(rows[0], rows[0] + len(rows))), "each row once, in order"
            assert not gaps[numbers.pop()] & set(rows[1:])
        for batch in batches[1:]:
            before = batches[batch.step - 1].positions
            carried = batch.valid & ~batch.reset
            assert (splits[before[carried]] == splits[batch.positions[carried]]).all()
        assert plan.left_out[OVER_GAP] == sum(
            bool(gaps[number] & set(range(end - 3, end)))
            for number in (0, 1)
            for end in range(4, 51)
        )


def test_the_next_shard_is_another_series_even_where_its_windows_would_join(tmp_path):
    first, second = shard(9, [], [0] * 9), shard(9, [], [0] * 9)
    ends = [np.array([4, 8]), np.array([12])]
    parts = [
        {"M1": replace(part["M1"], ends=each), "split": Dense(np.zeros(len(each), np.uint8))}
        for part, each in zip((first, second), ends, strict=True)
    ]
    with write_store(tmp_path / "store", parts) as store:
        plan = plan_store_lanes(store, 1)
    assert plan.positions.tolist() == [0, 1, 2]
    assert plan.begins.tolist() == [True, False, True]


def test_small_gaps_can_be_let_through(tmp_path):
    with write_store(tmp_path / "store", [shard(47, [20], [0] * 47)]) as store:
        assert plan_store_lanes(store, 1, max_gap_rows=1).num_segments == 2
        bridged = plan_store_lanes(store, 1, max_gap_rows=2)
        assert (bridged.num_segments, bridged.left_out[OVER_GAP]) == (1, 0)


def test_a_selection_that_skips_a_split_is_broken_there(tmp_path):
    """Two train blocks with one val sample between: their windows would join, state must not."""
    split = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    with write_store(tmp_path / "store", [shard(12, [], split)]) as store:
        train = np.flatnonzero(np.array(split) == 0)
        plan = plan_store_lanes(store, 1, fields=["M1"], samples=train)
        assert train[plan.positions].tolist() == [0, 4, 6, 10]
        assert plan.begins.tolist() == [True, False, True, False]
        assert plan.num_samples == 11
        assert train[plan_store_lanes(store, 1, samples=train[:5]).positions].tolist() == [0, 4]


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (([4, 3], 2, None, 1), "sample 1 ends before that of sample 0"),
        (([4, 5], 0, None, 1), "window 0"),
        (([4, 5], [2, 3], None, 1), "window [2, 3]"),
        (([4, 5], 2, [True], 1), "breaks (1,)"),
        (([4, 5], 2, None, 0), "num_lanes is 0"),
        (([4, 5], 2, None, 2), "1 windows for 2 lanes"),
        (([], 2, None, 1), "0 windows for 1 lanes"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(arguments, given):
    ends, window, breaks, num_lanes = arguments
    with pytest.raises(InputError) as caught:
        plan_lanes(np.array(ends, int), window, breaks, num_lanes)
    assert given in caught.value.given
    assert caught.value.allowed
    assert caught.value.fix


def test_a_fall_at_a_break_is_another_series():
    plan = plan_lanes(np.array([4, 6, 2, 4]), 2, np.array([0, 0, 1, 0], bool), 1)
    assert plan.positions.tolist() == [0, 1, 2, 3]
    assert plan.begins.tolist() == [True, False, True, False]


def test_stores_without_series_are_told_what_to_do(tmp_path):
    with write_store(tmp_path / "store", [{"x": Dense(np.zeros(3))}]) as store:
        with pytest.raises(InputError, match="has no series") as caught:
            plan_store_lanes(store, 1)
        assert "plan_lanes(ends" in caught.value.fix
    with (
        write_store(tmp_path / "other", [shard(9, [], [0] * 9)]) as store,
        pytest.raises(InputError, match="'split' is no series"),
    ):
        plan_store_lanes(store, 1, fields=["split"])
    empty = shard(1, [], [0])
    empty["M1"] = replace(empty["M1"], ends=np.empty(0, np.int64))
    empty["split"] = Dense(np.empty(0, np.uint8))
    with (
        write_store(tmp_path / "empty", [empty]) as store,
        pytest.raises(InputError, match="no samples"),
    ):
        plan_store_lanes(store, 1)


def test_an_order_refuses_a_plan_for_something_else():
    plan = plan_lanes(np.arange(1, 21), 1, None, 4)
    with pytest.raises(InputError, match="4 lanes for batch_size 4 on 2 ranks"):
        Order(20, 4, "lanes", world_size=2, lanes=plan)
    with pytest.raises(InputError, match="planned over 20 samples"):
        Order(21, 4, "lanes", lanes=plan)
    with pytest.raises(InputError, match="order='shuffled' with a lane plan"):
        Order(20, 4, "shuffled", lanes=plan)
    with pytest.raises(InputError, match="do not cover 0 to 5"):
        Order(20, 4, "lanes", lanes=plan, chunks=((0, 20),))
    one_each = plan_lanes(np.arange(1, 20), 1, None, 2)
    with pytest.raises(InputError, match="equal steps"):
        Order(19, 1, "lanes", world_size=2, lanes=one_each)


def tiling(folder, num_samples=20, window=4):
    """A store whose every window begins where the one before it ended."""
    part = shard(num_samples, [], [0] * num_samples)
    num_rows = num_samples * window
    series = replace(
        part["M1"],
        rows=np.arange(num_rows, dtype="f4")[:, None],
        time=np.arange(num_rows) * 60,
        ends=(np.arange(num_samples) + 1) * window,
        gap=np.zeros(num_rows, np.uint8),
    )
    return write_store(folder, [{**part, "M1": series}])


def test_a_loader_refuses_lanes_over_as_many_other_samples(tmp_path):
    """State would flow over the holes between every second window, unreset."""
    with tiling(tmp_path / "store") as store:
        every_second = np.arange(0, 20, 2)
        for planned, loaded in ((np.arange(10), every_second), (every_second, np.arange(10))):
            plan = plan_store_lanes(store, 2, samples=planned)
            with pytest.raises(
                InputError, match="over 10 samples, the order has as many others"
            ) as caught:
                Loader(store, 2, "cpu", order="lanes", samples=loaded, lanes=plan)
            assert caught.value.allowed == "one list of samples for both"
            assert "samples=samples" in caught.value.fix


@pytest.mark.parametrize(
    ("samples", "resets"),
    [
        (None, [[True] * 2] + [[False] * 2] * 9),
        (list(range(10)), [[True] * 2] + [[False] * 2] * 4),
        (np.arange(0, 20, 2, dtype=np.uint8), [[True] * 2] * 5),
        (np.arange(20)[::-2][::-1], [[True] * 2] * 5),
    ],
)
def test_a_loader_takes_lanes_over_its_own_samples(tmp_path, samples, resets):
    with tiling(tmp_path / "store") as store:
        plan = plan_store_lanes(store, 2, samples=samples)
        with Loader(store, 2, "cpu", order="lanes", samples=samples, lanes=plan) as loader:
            assert [batch.reset.tolist() for batch in loader] == resets


def test_plans_and_orders_that_do_not_know_their_samples_are_held_to_the_number():
    plan = plan_lanes(np.arange(1, 21), 1, None, 4)
    assert plan.samples_digest == ""
    assert len(Order(20, 4, "lanes", lanes=plan, samples_digest="a")) == 5
    known = replace(plan, samples_digest="a")
    assert len(Order(20, 4, "lanes", lanes=known)) == 5
    assert len(Order(20, 4, "lanes", lanes=known, samples_digest="a")) == 5
    with pytest.raises(InputError, match="planned over 20 samples, the order has as many others"):
        Order(20, 4, "lanes", lanes=known, samples_digest="b")
    with pytest.raises(InputError, match="planned over 20 samples, the order has 21"):
        Order(21, 4, "lanes", lanes=known, samples_digest="b")


@pytest.mark.parametrize(
    ("samples", "given", "allowed"),
    [
        ([30], "sample 30 was asked of", "from 0 to 19"),
        ([-1, 3], "sample -1 was asked of", "from 0 to 19"),
        ([3, 3], "sample 3 was asked for after 3", "rising, without repeats"),
        (np.array([3, 2], np.uint8), "sample 2 was asked for after 3", "rising, without repeats"),
        (np.ones(19, bool), "samples are bool (19,)", "1-D whole numbers"),
        ([[1, 2]], "samples are int64 (1, 2)", "1-D whole numbers"),
        ([], "no samples were asked for", "1 or more"),
    ],
)
def test_lanes_over_samples_that_a_store_has_not_are_refused(tmp_path, samples, given, allowed):
    with tiling(tmp_path / "store") as store, pytest.raises(InputError) as caught:
        plan_store_lanes(store, 1, samples=samples)
    assert given in caught.value.given
    assert allowed in caught.value.allowed
    assert caught.value.fix


def test_lanes_over_no_series_are_refused(tmp_path):
    with (
        tiling(tmp_path / "store") as store,
        pytest.raises(InputError, match="no fields") as caught,
    ):
        plan_store_lanes(store, 1, fields=[])
    assert "M1" in caught.value.allowed
    assert "fields=['M1']" in caught.value.fix
    with pytest.raises(InputError, match=r"ends \(3, 0\)"):
        plan_lanes(np.empty((3, 0), int), [], None, 1)
