"""Going on in the middle of an epoch with other ranks: nothing lost, nothing twice, equal steps."""

from __future__ import annotations

import dataclasses
import json
import time
import tracemalloc
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.loader.elastic import Cut, ElasticEpoch, find_resume_point, save_state
from stoker.loader.epochs import DealtEpoch
from stoker.loader.lanes import plan_lanes, plan_store_lanes
from stoker.loader.loader import Loader
from stoker.loader.order import Order
from stoker.loader.planned import EpochOrder, PlannedBatch
from stoker.loader.positions import PositionSet, Subset
from stoker.plan.facts import even_chunks
from store_makers import simple_shard, write_store
from test_loader import check_batch

EPOCH = 3


@dataclass
class Stage:
    """What all ranks of one size of job did of the epoch: batches per rank, and the first step."""

    order: Order
    epochs: list[EpochOrder]
    batches: list[list[PlannedBatch]]
    first_step: int
    cuts: tuple[Cut, ...]

    @property
    def stop(self) -> int:
        return self.first_step + len(self.batches[0])

    def positions(self) -> np.ndarray:
        taken = [batch.positions for rank in self.batches for batch in rank]
        return np.concatenate([np.empty(0, np.int64), *taken])


def ranks_of(order: Order) -> list[Order]:
    return [replace(order, rank=rank) for rank in range(order.world_size)]


def run_stage(order: Order, state: dict | None, share: float) -> tuple[Stage, dict]:
    """Have every rank go on from a state and take a share of what is left; return one rank's state."""
    epochs, taken, states, first_step, cuts = [], [], [], 0, ()
    for each in ranks_of(order):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            place = (
                None if state is None else find_resume_point(each, json.loads(json.dumps(state)))
            )
        epoch = each.epoch(EPOCH) if place is None or place.begun is None else place.begun
        if place is not None:
            first_step, cuts = place.batch, place.cuts
        stop = first_step + int(share * (epoch.num_batches - first_step) + 0.5)
        taken.append([batch for batch in epoch.batches(first_step) if batch.step < stop])
        epochs.append(epoch)
        states.append(save_state(each, epoch, stop, cuts))
    return Stage(order, epochs, taken, first_step, cuts), states[len(states) // 2]


@st.composite
def ways(draw: st.DrawFn, num_samples: int, mode: str, drop_last: bool, chunked: bool) -> Order:
    """One of many ways to share the same epoch."""
    chunks = None
    if chunked or draw(st.booleans()):
        inner = draw(st.sets(st.integers(1, num_samples - 1), max_size=10))
        edges = [0, *sorted(inner), num_samples]
        chunks = tuple(pairwise(edges))
    sizes = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    try:
        return Order(num_samples, sizes[0], mode, 5, 0, sizes[1], drop_last, chunks)
    except InputError:
        assume(False)
        raise


@st.composite
def histories(draw: st.DrawFn, modes=("sequential", "shuffled", "time"), **fixed) -> list[Stage]:
    """An epoch that is cut twice, or once, and then taken to its end."""
    num_samples, mode = draw(st.integers(12, 130)), draw(st.sampled_from(modes))
    drop_last = fixed.get("drop_last", draw(st.booleans()))
    count = draw(st.integers(2, 3))
    chunked = fixed.get("chunked", False)
    orders = [draw(ways(num_samples, mode, drop_last, chunked)) for _ in range(count)]
    shares = [draw(st.floats(0, 1)) for _ in range(count - 1)] + [1.0]
    stages: list[Stage] = []
    state = None
    for order, share in zip(orders, shares, strict=True):
        stage, state = run_stage(order, state, share)
        stages.append(stage)
    return stages


# ------------------------------------------------------------------------------------- exactly once


@given(histories())
def test_nothing_is_lost_or_repeated_however_often_the_ranks_change(stages):
    seen = np.concatenate([stage.positions() for stage in stages])
    order, last = stages[-1].order, stages[-1].epochs[0]
    assert len(set(seen.tolist())) == len(seen)
    over = order.num_samples - len(seen)
    if order.drop_last:
        assert over < order.batch_size * order.world_size
    else:
        assert over == last.num_offered - last.num_used
        assert over < order.world_size
        if over:
            assert order.batch_size == 1 or last.num_used == 0


@given(histories())
def test_all_ranks_take_equal_steps_that_go_on_counting_and_none_is_empty(stages):
    step = 0
    for stage in stages:
        assert stage.first_step == step
        expected = list(range(step, stage.stop))
        for batches in stage.batches:
            assert [batch.step for batch in batches] == expected
            assert all(1 <= len(batch.positions) <= stage.order.batch_size for batch in batches)
            if stage.order.drop_last:
                assert {len(batch.positions) for batch in batches} <= {stage.order.batch_size}
        step = stage.stop
        assert len({epoch.num_batches for epoch in stage.epochs}) == 1
    assert step == stages[-1].epochs[0].num_batches


@given(histories())
def test_every_rank_knows_what_all_take_in_a_step_of_a_rest(stages):
    for stage in stages:
        for together in zip(*stage.batches, strict=True):
            total = sum(len(batch.positions) for batch in together)
            assert {batch.num_together for batch in together} == {total}


@given(histories(modes=("sequential", "time")))
def test_time_order_stays_ascending_on_every_rank_in_blocks(stages):
    for stage in stages:
        blocks = [np.concatenate([b.positions for b in rank]) for rank in stage.batches if rank]
        for block in blocks:
            assert (np.diff(block) > 0).all()
        for one, other in pairwise(blocks):
            assert one[-1] < other[0]


@given(histories(modes=("shuffled",), drop_last=False), st.data())
def test_a_resident_shuffle_goes_on_as_one_process_would_take_it(stages, data):
    """Where no stage has chunks, all ranks of all stages together walk through one permutation."""
    orders = [replace(stage.order, chunks=None) for stage in stages]
    state, walked, over = None, [], 0
    for number, order in enumerate(orders):
        share = data.draw(st.floats(0, 1)) if number < len(orders) - 1 else 1.0
        stage, state = run_stage(order, state, share)
        over = stage.epochs[0].num_offered - stage.epochs[0].num_used
        walked += [batch.positions for step in zip(*stage.batches, strict=True) for batch in step]
    single = Order(orders[0].num_samples, 7, "shuffled", 5).epoch(EPOCH)
    whole = np.concatenate(list(single.stream(0, single.num_batches)))
    walk = np.concatenate([np.empty(0, np.int64), *walked])
    assert walk.tolist() == whole[: len(whole) - over].tolist()


@given(histories(), st.data())
def test_a_rest_begins_anywhere_names_its_chunks_and_repeats(stages, data):
    stage = data.draw(st.sampled_from(stages))
    rank = data.draw(st.integers(0, stage.order.world_size - 1))
    epoch, order = stage.epochs[rank], stage.order
    whole = list(epoch.batches())
    start = data.draw(st.integers(epoch.first_step, epoch.num_batches))
    rest = list(epoch.batches(start))
    assert [b.positions.tolist() for b in rest] == [
        b.positions.tolist() for b in whole[start - epoch.first_step :]
    ]
    visits = epoch.visits(start)
    touched = list(dict.fromkeys(chunk for batch in rest for chunk in batch.chunks))
    assert touched == [visit.chunk for visit in visits]
    ranges = {visit.chunk: visit for visit in visits}
    starts = [low for low, _ in order.chunks or [(0, order.num_samples)]]
    for batch in rest:
        chunks = np.repeat(batch.chunks, batch.chunk_rows)
        for position, chunk in zip(batch.positions.tolist(), chunks.tolist(), strict=True):
            assert ranges[chunk].start <= position < ranges[chunk].stop
            if order.chunks is not None:
                assert np.searchsorted(starts, position, side="right") - 1 == chunk
    upto = np.concatenate([np.empty(0, np.int64), *(b.positions for b in whole)])
    streamed = np.concatenate(
        [np.empty(0, np.int64), *epoch.stream(epoch.first_step, epoch.num_batches)]
    )
    assert upto.tolist() == streamed.tolist()
    if epoch.first_step:
        for call in (epoch.batches, epoch.visits, epoch.digest, epoch.untaken):
            with pytest.raises(InputError, match="are behind it"):
                call(epoch.first_step - 1)


@given(histories(modes=("shuffled",), chunked=True))
def test_ranks_of_a_rest_read_parts_of_their_chunks_that_do_not_overlap(stages):
    for stage in stages:
        visits = [visit for epoch in stage.epochs for visit in epoch.visits()]
        for visit in visits:
            low, high = stage.order.chunks[visit.chunk]
            assert low <= visit.start < visit.stop <= high
        ranges = sorted((visit.start, visit.stop) for visit in visits)
        assert all(one[1] <= other[0] for one, other in pairwise(ranges))


@given(histories(modes=("shuffled",), chunked=True))
def test_chunks_of_a_rest_come_in_the_order_of_the_epoch(stages):
    for stage in stages:
        alone = replace(stage.order, world_size=1, batch_size=2, drop_last=False)
        visited = list(alone.epoch(EPOCH).chunk_visits())
        for epoch in stage.epochs:
            order = [visited.index(chunk) for chunk in epoch.chunk_visits()]
            assert order == sorted(order)


def test_the_rest_of_a_chunk_is_shuffled_and_not_as_before():
    began = Order(400, 10, "shuffled", 1, chunks=even_chunks(400, 200))
    begun = began.epoch(0)
    left = begun.untaken(5)
    rest = ElasticEpoch(replace(began, batch_size=20), 0, left, 5)
    ours = next(rest.batches()).positions
    assert ours.tolist() != sorted(ours.tolist())
    assert ours.tolist() != np.concatenate(list(begun.stream(5, 7))).tolist()
    later = ElasticEpoch(replace(began, batch_size=20), 1, left, 5)
    assert ours.tolist() != next(later.batches()).positions.tolist()


# -------------------------------------------------------------------------------------------- lanes


@given(
    st.integers(2, 60),
    st.integers(2, 6),
    st.lists(st.integers(0, 20), min_size=2, max_size=3),
    st.booleans(),
    st.data(),
)
def test_lanes_go_on_where_they_were_on_any_number_of_ranks(tiles, lanes, steps, drop_last, data):
    lanes = min(lanes, tiles)
    plan = plan_lanes(np.arange(1, tiles + 1), 1, None, lanes)
    sizes = [ranks for ranks in range(1, lanes + 1) if lanes % ranks == 0]
    state, seen, last = None, [], {}
    for number, count in enumerate([*steps, 10**6]):
        ranks = data.draw(st.sampled_from(sizes))
        try:
            order = Order(tiles, lanes // ranks, "lanes", 0, 0, ranks, drop_last, None, plan)
        except InputError:
            assume(False)
        total = max(1, len(order))
        share = 1.0 if number == len(steps) else min(1.0, count / total)
        stage, state = run_stage(order, state, share)
        for together in zip(*stage.batches, strict=True):
            row = np.concatenate([batch.positions for batch in together])
            assert {batch.num_together for batch in together} == {int((row >= 0).sum())}
            assert all((batch.positions >= 0).any() for batch in together)
            for lane, position in enumerate(row.tolist()):
                if position >= 0:
                    assert last.get(lane, position - 1) == position - 1
                    last[lane] = position
                    seen.append(position)
    assert len(set(seen)) == len(seen)
    epoch = stage.epochs[0]
    left_out = tiles % lanes if drop_last else epoch.num_offered - epoch.num_used
    assert len(seen) == tiles - left_out
    assert left_out < 2 * lanes


def test_another_number_of_lanes_waits_for_the_next_epoch():
    def order(lanes: int, rank: int = 0, ranks: int = 1) -> Order:
        plan = plan_lanes(np.arange(1, 61), 1, None, lanes)
        return Order(60, lanes // ranks, "lanes", rank=rank, world_size=ranks, lanes=plan)

    six = order(6)
    state = save_state(six, six.epoch(0), 4, ())
    with pytest.raises(InputError, match="an epoch of 6 lanes, this loader has 4") as caught:
        find_resume_point(order(4), state)
    assert "batch_size=6" in caught.value.fix
    with pytest.raises(InputError, match="6 lanes") as caught:
        find_resume_point(order(8, 0, 4), state)
    assert "divides 6" in caught.value.fix
    place = find_resume_point(order(4), save_state(six, six.epoch(1), 0, ()))
    assert (place.epoch, place.batch, place.begun) == (1, 0, None)


# ------------------------------------------------------------------------------------------- states


@given(histories(), st.data())
def test_every_rank_goes_on_from_the_state_of_any_rank(stages, data):
    """Also within a rest: the same ranks again take just the batches they would have taken."""
    stage = stages[-1]
    stop = data.draw(st.integers(stage.first_step, stage.stop))
    saver = data.draw(st.integers(0, stage.order.world_size - 1))
    state = save_state(replace(stage.order, rank=saver), stage.epochs[saver], stop, stage.cuts)
    for rank, each in enumerate(ranks_of(stage.order)):
        place = find_resume_point(each, state)
        assert place.words is None
        epoch = place.begun or each.epoch(EPOCH)
        again = [batch.positions.tolist() for batch in epoch.batches(place.batch)]
        expected = [b.positions.tolist() for b in stage.batches[rank] if b.step >= stop]
        assert again == expected


def test_the_same_global_batch_goes_on_as_a_whole_epoch():
    eight = Order(1000, 8, "shuffled", 2, 3, 8)
    state = save_state(eight, eight.epoch(1), 5, ())
    for order in ranks_of(Order(1000, 16, "shuffled", 2, 0, 4)):
        place = find_resume_point(order, state)
        assert (place.cuts, place.words) == ((), None)
        assert isinstance(place.begun, DealtEpoch)
        theirs = [batch.positions.tolist() for batch in order.epoch(1).batches(5)]
        assert [batch.positions.tolist() for batch in place.begun.batches(5)] == theirs
        assert place.begun.digest() == order.epoch(1).digest()


def test_chunks_of_another_size_do_not_matter_in_sequence():
    one = Order(100, 8, "time", chunks=even_chunks(100, 30))
    place = find_resume_point(replace(one, chunks=None), save_state(one, one.epoch(0), 3, ()))
    assert (place.batch, place.cuts, place.begun) == (3, (), None)


def test_a_state_of_before_there_were_cuts_still_loads():
    order = Order(100, 8, "shuffled", 1, 1, 2)
    state = save_state(order, order.epoch(2), 3, ())
    del state["cuts"]
    place = find_resume_point(order, state)
    assert (place.epoch, place.batch, place.begun) == (2, 3, None)


@pytest.mark.parametrize(
    ("change", "given"),
    [
        ({"num_samples": 99}, "num_samples 99, this loader has 100"),
        ({"order": "time"}, "order 'time'"),
        ({"seed": 2}, "seed 2"),
        ({"drop_last": True}, "drop_last True"),
        ({"batch": -1}, "batch -1"),
        ({"batch": 14}, "batch 14 of an epoch of 13"),
        ({"batch": None}, "batch None"),
        ({"world_size": 0}, "world_size 0"),
        ({"rank": 5}, "rank 5 of world_size 1"),
        ({"digest": "0"}, "order digest"),
        ({"batch": 4}, "order digest"),
        ({"cuts": [{"batch": 2}]}, "batch_size None"),
    ],
)
def test_what_is_no_state_of_this_epoch_is_refused(change, given):
    order = Order(100, 8, "shuffled", 1)
    state = save_state(order, order.epoch(0), 3, ()) | change
    with pytest.raises(InputError) as caught:
        find_resume_point(replace(order, batch_size=10), state)
    assert given in caught.value.given
    assert caught.value.allowed


def test_too_little_for_all_ranks_ends_the_epoch_and_says_so():
    began = Order(50, 8, "shuffled", 1)  # 6 batches of 8, and 2 samples
    state = save_state(began, began.epoch(0), 6, ())
    three = Order(50, 8, "shuffled", 1, 1, 3)
    with pytest.warns(
        UserWarning, match="2 cannot be shared by 3 ranks and wait for the next epoch"
    ):
        place = find_resume_point(three, state)
    assert place.begun is not None
    assert place.begun.num_batches == place.batch == 6
    assert list(place.begun.batches()) == []
    assert "2 cannot be shared" in place.words
    assert len(list(three.epoch(1).batches())) == len(three)
    later = save_state(three, place.begun, 6, place.cuts)  # and two ranks can still take them
    two = [find_resume_point(each, later) for each in ranks_of(replace(began, world_size=2))]
    assert [sum(len(b.positions) for b in place.begun.batches()) for place in two] == [1, 1]
    assert {len(place.cuts) for place in two} == {1}, "who took nothing leaves no cut"
    with pytest.warns(UserWarning, match="2 cannot be shared by 4"):
        place = find_resume_point(Order(48, 1, "shuffled", 1, 0, 4), _state_after(48, 6, taken=3))
    assert place.begun.num_used == 28


def _state_after(num_samples: int, batch_size: int, taken: int) -> dict:
    order = Order(num_samples, batch_size, "shuffled", 1)
    return save_state(order, order.epoch(0), taken, ())


# -------------------------------------------------------------------------------------------- costs


def test_many_ranks_become_few_without_listing_what_is_left():
    """100 million samples are left as ranges: as positions they would be 800 MB on every rank."""
    count = 100_000_000
    order = Order(count, 128, "shuffled", 1, 0, 100, chunks=even_chunks(count, 50_000))
    state = save_state(order, order.epoch(0), 500, ())
    fewer = Order(count, 128, "shuffled", 1, 3, 8, chunks=even_chunks(count, 50_000))
    tracemalloc.start()
    begin = time.process_time()
    place = find_resume_point(fewer, state)
    assert time.process_time() - begin < 5  # 0.6 s: a permutation for every rank there was
    batches = place.begun.batches()
    for _ in range(2000):
        next(batches)
    assert tracemalloc.get_traced_memory()[1] < 60_000_000
    tracemalloc.stop()


@given(st.sets(st.integers(0, 60)), st.data())
def test_a_set_of_positions_is_that_set(members, data):
    whole = np.array(sorted(members), np.int64)
    cut = data.draw(st.integers(0, len(whole)))
    ranged = PositionSet.of(whole[:cut])
    both = PositionSet.of(
        data.draw(st.permutations(whole[cut:].tolist()).map(np.array)).astype(np.int64),
        ranged.starts,
        ranged.stops,
    )
    assert both.positions().tolist() == whole.tolist()
    assert len(both) == len(whole)
    assert (both.starts[1:] > both.stops[:-1]).all()
    edges = np.arange(-1, 63)
    assert both.count_below(edges).tolist() == [int((whole < edge).sum()) for edge in edges]
    chosen = st.lists(st.booleans(), min_size=len(whole), max_size=len(whole))
    places = np.flatnonzero(data.draw(chosen))
    assert both.choose(PositionSet.of(places)).positions().tolist() == whole[places].tolist()


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 9)), st.booleans())), st.data())
def test_parts_that_are_listed_late_are_in_the_set_all_the_same(pieces, data):
    """Every piece is ten positions wide: a range of the first few of them, or some as a part."""
    members, starts, stops, parts = [], [], [], []
    for number, (width, some, is_part) in enumerate(pieces):
        base = 10 * number
        own = np.array(sorted(some), np.int64) + base if is_part else base + np.arange(width)
        members += own.tolist()
        if is_part:
            parts.append(Subset(base, base + 10, len(own), lambda own=own: own))
        else:
            starts, stops = [*starts, base], [*stops, base + width]
    ours = PositionSet.of(
        starts=np.array(starts, int), stops=np.array(stops, int), subsets=parts[::-1]
    )
    whole = np.array(members, np.int64)
    assert ours.positions().tolist() == members
    edges = np.arange(0, 10 * len(pieces) + 2)
    assert ours.count_below(edges).tolist() == [int((whole < edge).sum()) for edge in edges]
    inner = data.draw(st.sets(st.integers(0, len(members))))
    cuts = np.array(sorted({0, len(members), *inner}), np.int64)
    lows, highs = ours.bounds(cuts[:-1], cuts[1:])
    assert (highs[:-1] <= lows[1:]).all()
    for low, high, first, last in zip(lows, highs, cuts[:-1], cuts[1:], strict=True):
        own = ours.slice(int(first), int(last))
        assert own.tolist() == members[first:last]
        assert low <= own[0] <= own[-1] < high
    every_other = PositionSet.of(starts=cuts[:-1:2], stops=cuts[1::2][: len(cuts[:-1:2])])
    chosen = ours.choose(every_other)
    again = chosen.choose(PositionSet.of(np.arange(0, len(chosen), 2)))
    expected = [members[place] for place in every_other.positions()]
    assert chosen.positions().tolist() == expected
    assert again.positions().tolist() == expected[::2]


# ------------------------------------------------------------------------------------------- loader


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    return write_store(
        tmp_path_factory.mktemp("rest"), [simple_shard(rng, n) for n in (37, 0, 50, 13)]
    )


def make_loader(store, kind: str, rank: int, ranks: int, batch: int, **options) -> Loader:
    """A loader of one of the ways data reaches the device."""
    options |= {"rank": rank, "world_size": ranks, "seed": 3}
    if kind.endswith("chunked"):
        return Loader(store, batch, "cpu", chunk_bytes=200 * batch, num_slots=2, **options)
    if kind == "streamed":
        with Loader(store, batch, "cpu", **options) as resident:
            plan = dataclasses.replace(resident.plan, tier="streamed", chunk_rows=None, num_slots=0)
        return Loader(store, batch, "cpu", plan=plan, **options)
    return Loader(store, batch, "cpu", **options)


@given(
    kind=st.sampled_from(["resident", "chunked", "straight chunked", "streamed"]),
    order=st.sampled_from(["sequential", "shuffled", "time"]),
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(2, 12)), min_size=2, max_size=3),
    shares=st.lists(st.floats(0, 0.99), min_size=2, max_size=2),
)
def test_loaders_of_other_ranks_give_the_right_values_once_each(store, kind, order, sizes, shares):
    options = {"fields": ["features", "targets"]} if kind == "straight chunked" else {}
    state, seen = None, []
    for number, (ranks, batch_size) in enumerate(sizes):
        share = 1.0 if number == len(sizes) - 1 else shares[number]
        states = []
        for rank in range(ranks):
            with make_loader(
                store, kind, rank, ranks, batch_size, order=order, **options
            ) as loader:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    if state is not None:
                        loader.load_state_dict(json.loads(json.dumps(state)))
                left = loader.num_batches - (0 if state is None else state["batch"])
                took = 0
                stop = int(share * left + 0.5)
                for batch in loader if stop else ():
                    if not options:
                        check_batch(store, batch)
                    values = batch["features"].numpy()
                    assert (values == store.gather("features", batch.sample_ids)).all()
                    seen += batch.sample_ids.tolist()
                    took += 1
                    if took == stop and share < 1:
                        break
                assert took == stop
                if share == 1 and stop:
                    assert (loader.epoch, loader.num_batches) == (1, len(loader))
                states.append(loader.state_dict())
        state = states[-1]
    assert len(set(seen)) == len(seen)
    ranks = sizes[-1][0]
    assert 100 - len(seen) < ranks


def take(loader: Loader, count: int) -> list[list[int]]:
    batches = iter(loader)
    return [next(batches).sample_ids.tolist() for _ in range(count)]


def nearly_done(store) -> dict:
    """The state of seven ranks that each have a few samples left, in chunks of their own."""
    with Loader(
        store, 2, "cpu", order="shuffled", seed=3, world_size=7, rank=2, chunk_bytes=14 * 300
    ) as loader:
        take(loader, 5)
        return loader.state_dict()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fields", [None, ["features", "targets"]])
def test_a_batch_of_more_chunks_than_slots_is_loaded_by_itself(store, device, fields):
    """Windows of samples far apart need more rows than a small chunk has: the ring then grows."""
    state = nearly_done(store)
    options = {
        "order": "shuffled",
        "seed": 3,
        "chunk_bytes": 24 * (340 if fields is None else 300),
        "num_slots": 2,
    }
    with Loader(store, 24, device, fields=fields, **options) as loader:
        before = loader.device_bytes
        loader.load_state_dict(state)
        epoch = loader._progress.get(0)
        assert (epoch.num_chunks_of(state["batch"]) > loader._data.ring.num_slots).any()
        batch_bytes = 24 * (35 * 4 + 8 + 16 * 4 * 4 + 16 + 30 * 2)
        assert 0 <= loader.device_bytes - before <= batch_bytes
        assert (loader.device_bytes == before) == (fields is not None)
        seen = []
        for batch in loader:
            if fields is None:
                check_batch(store, batch)
            values = batch["features"].cpu().numpy()
            assert (values == store.gather("features", batch.sample_ids)).all()
            seen += batch.sample_ids.tolist()
        assert len(set(seen)) == len(seen) == 100 - 7 * 2 * 5
        assert sorted(np.concatenate(take(loader, len(loader)))) == list(range(100))


@pytest.mark.parametrize("kind", ["straight chunked", "streamed", "resident"])
def test_what_is_read_straight_has_no_holes(store, kind):
    """Ordered batches are ranges of rows on disk, but not those of a rest."""
    options = {"order": "time", "fields": ["features", "targets"]}
    with make_loader(store, kind, 1, 3, 4, **options) as loader:
        take(loader, 3)
        state = loader.state_dict()
    with make_loader(store, kind, 0, 1, 9, **options) as loader:
        loader.load_state_dict(state)
        assert (loader._straight is not None) == (kind == "straight chunked")
        seen = []
        for batch in loader:
            values = batch["features"].numpy()
            assert (values == store.gather("features", batch.sample_ids)).all()
            seen += batch.sample_ids.tolist()
        assert seen == [*range(12, 33), *range(45, 66), *range(78, 100)]
        assert [batch.sample_ids[0] for batch in loader] == [*range(0, 100, 9)]


def test_a_ring_that_shrinks_in_a_rest_changes_no_batch(store):
    state = nearly_done(store)
    options = {"order": "shuffled", "seed": 3, "chunk_bytes": 14 * 300, "num_slots": 6}
    with Loader(store, 7, "cpu", **options) as loader:
        loader.load_state_dict(state)
        expected = [batch.sample_ids.tolist() for batch in loader]
        loader.load_state_dict(state)
        seen = []
        for batch in loader:
            check_batch(store, batch)
            seen.append(batch.sample_ids.tolist())
            if len(seen) == 1:
                assert loader.shrink(0.3) > 0
        assert seen == expected
        loader.load_state_dict(state)
        for index in loader.index_batches():
            check_batch(store, loader.assemble(index))


def test_a_ring_that_shrinks_still_holds_a_batch_of_samples_from_anywhere(store):
    options = {"order": "shuffled", "seed": 3, "chunk_bytes": 14 * 195, "num_slots": 8}
    with Loader(store, 14, "cpu", **options) as loader:
        loader.load_state_dict(nearly_done(store))
        assert loader._progress.get(0).num_chunks_of(6).max() > 3
        batches = iter(loader)
        check_batch(store, next(batches))
        loader.shrink(0.25)
        assert loader._data.ring.num_slots == 3
        for batch in batches:
            check_batch(store, batch)


def test_the_loader_says_how_long_the_epoch_is_and_what_all_ranks_take(store):
    with Loader(store, 8, "cpu", order="shuffled", seed=3) as one:
        assert one.num_batches == len(one) == 13
        assert [batch.num_together for batch in one] == [8] * 12 + [4]
        take(one, 5)
        state = one.state_dict()
    for rank in range(3):
        options = {"order": "shuffled", "seed": 3, "rank": rank, "world_size": 3}
        with Loader(store, 5, "cpu", **options) as loader:
            words = loader.load_state_dict(state)
            assert words.startswith(
                "epoch 1 was begun by 1 x 8 samples a batch and goes on at batch 5"
            )
            assert len(loader) == 7
            assert loader.num_batches == 5 + 4
            batches = list(loader)
            assert [batch.step for batch in batches] == [5, 6, 7, 8]
            assert [batch.num_together for batch in batches] == [15, 15, 15, 15]
            assert (loader.epoch, loader.num_batches) == (2, 7)
            assert [batch.num_together for batch in loader] == [15] * 6 + [10]
            loader.load_state_dict(state)
            assert loader.order_digest() == loader._progress.get(1).digest(5)
            loader.set_epoch(1)
            assert loader.num_batches == 7


def test_lanes_of_a_loader_move_to_other_ranks(tmp_path):
    rng = np.random.default_rng(0)
    store = write_store(tmp_path / "s", [simple_shard(rng, 352)])
    lanes = plan_store_lanes(store, num_lanes=4, fields=["M1"])

    def make(rank: int, ranks: int) -> Loader:
        return Loader(
            store,
            4 // ranks,
            "cpu",
            order="lanes",
            lanes=lanes,
            fields=["M1"],
            rank=rank,
            world_size=ranks,
        )

    with make(0, 1) as one:
        whole = [batch.positions.tolist() for batch in one]
        take(one, 3)
        state = one.state_dict()
    halves = []
    for rank in range(2):
        with make(rank, 2) as loader:
            loader.load_state_dict(state)
            halves.append([batch.positions.tolist() for batch in loader])
    assert [a + b for a, b in zip(*halves, strict=True)] == whole[3:]
