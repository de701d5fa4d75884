"""The loader's contract, points 1 to 3, for every mix of batch, chunk, rank and world sizes."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.loader.lanes import plan_lanes
from stoker.loader.order import Order, pick_mode
from stoker.plan.facts import even_chunks


def cut(num_samples: int, edges: list[int]) -> tuple[tuple[int, int], ...]:
    inner = sorted({edge for edge in edges if 0 < edge < num_samples})
    return tuple(zip([0, *inner], [*inner, num_samples], strict=True))


@st.composite
def orders(draw: st.DrawFn, modes=("sequential", "shuffled", "time"), **fixed) -> Order:
    """An order that can be: at least one sample per rank and step."""
    world_size = fixed.get("world_size") or draw(st.integers(1, 6))
    batch_size = draw(st.integers(1, 17))
    num_samples = draw(st.integers(world_size, 160))
    drop_last = fixed.get("drop_last", draw(st.booleans()))
    if drop_last:
        num_samples = max(num_samples, batch_size * world_size)
    if batch_size == 1 and not drop_last:
        num_samples -= num_samples % world_size
    chunks = None
    if draw(st.booleans()):
        chunks = cut(num_samples, draw(st.lists(st.integers(1, 160), max_size=12)))
    return Order(
        num_samples,
        batch_size,
        draw(st.sampled_from(modes)),
        draw(st.integers(0, 2**70)),
        0,
        world_size,
        drop_last,
        chunks,
    )


def ranks(order: Order) -> list[Order]:
    return [replace(order, rank=rank) for rank in range(order.world_size)]


def taken(order: Order, epoch: int = 0, start: int = 0) -> list[np.ndarray]:
    return [batch.positions for batch in order.epoch(epoch).batches(start)]


def flat(order: Order, epoch: int = 0) -> list[int]:
    return np.concatenate(taken(order, epoch)).tolist()


# ------------------------------------------------------------------------------------- exactly once


@given(orders(), st.integers(0, 3))
def test_every_sample_exactly_once_over_all_ranks(order, epoch):
    seen = sorted(chain.from_iterable(flat(each, epoch) for each in ranks(order)))
    left_out = sorted(set(range(order.num_samples)) - set(seen))
    assert len(seen) == len(set(seen)) == order.num_used
    assert len(seen) + len(left_out) == order.num_samples
    step_samples = order.batch_size * order.world_size
    assert len(left_out) == (order.num_samples % step_samples if order.drop_last else 0)


@given(orders())
def test_len_is_what_is_yielded_and_no_batch_is_empty_or_too_large(order):
    for each in ranks(order):
        batches = list(each.epoch(0).batches())
        assert [batch.step for batch in batches] == list(range(len(order)))
        assert each.epoch(0).num_batches == len(order)
        for batch in batches:
            assert 1 <= len(batch.positions) <= order.batch_size
            assert batch.positions.dtype == np.int64
            assert batch.positions.flags.writeable
            assert batch.reset is None
            assert batch.valid.all()


@given(orders(drop_last=False))
def test_batches_are_full_but_the_last_two(order):
    for each in ranks(order):
        sizes = [len(batch) for batch in taken(each)]
        assert set(sizes[:-2]) <= {order.batch_size}
        if order.world_size == 1:
            assert set(sizes[:-1]) <= {order.batch_size}
        elif len(sizes) > 1 and sizes[-2] < order.batch_size:
            assert sizes[-1] == 1  # given up by the batch before, so that this one is not empty


@given(orders(drop_last=True))
def test_drop_last_leaves_full_batches_only(order):
    for each in ranks(order):
        assert {len(batch) for batch in taken(each)} == {order.batch_size}


@given(orders(modes=("sequential", "time"), drop_last=True))
def test_drop_last_drops_the_end_of_the_sequence_not_of_each_rank(order):
    seen = list(chain.from_iterable(flat(each) for each in ranks(order)))
    assert seen == list(range(order.num_used))


def test_drop_last_drops_other_samples_in_other_epochs():
    for chunks in (None, even_chunks(100, 20)):
        order = Order(100, 7, "shuffled", drop_last=True, chunks=chunks)
        dropped = [tuple(sorted(set(range(100)) - set(flat(order, epoch)))) for epoch in range(5)]
        assert all(len(each) == 2 for each in dropped)
        assert len(set(dropped)) > 1


@given(orders(), st.integers(0, 2))
def test_every_rank_knows_what_all_ranks_take_in_a_step(order, epoch):
    steps = zip(*(each.epoch(epoch).batches() for each in ranks(order)), strict=True)
    for step in steps:
        total = sum(len(batch.positions) for batch in step)
        assert {batch.num_together for batch in step} == {total}


@given(st.integers(1, 90), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_every_rank_knows_how_many_lanes_are_left_on_all_ranks(tiles, size, world, drop_last):
    try:
        plan = plan_lanes(np.arange(1, tiles + 1), 1, None, size * world)
        order = Order(tiles, size, "lanes", 0, 0, world, drop_last, None, plan)
    except InputError:
        assume(False)
    for step in zip(*(each.epoch(0).batches() for each in ranks(order)), strict=True):
        total = sum(int(batch.valid.sum()) for batch in step)
        assert {batch.num_together for batch in step} == {total}


# -------------------------------------------------------------------------------------------- modes


@given(orders(modes=("sequential", "time")))
def test_in_sequence_every_rank_has_one_ascending_block(order):
    blocks = [flat(each) for each in ranks(order)]
    assert list(chain.from_iterable(blocks)) == list(range(order.num_used))
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 1


@given(orders(), st.integers(0, 5))
def test_the_same_seed_and_epoch_give_the_same_order(order, epoch):
    again = pickle.loads(pickle.dumps(replace(order)))
    assert flat(order, epoch) == flat(again, epoch)
    if order.mode != "shuffled":
        assert flat(order, epoch) == flat(replace(order, seed=order.seed + 1), epoch + 1)


@given(orders(modes=("shuffled",), world_size=1), st.integers(0, 5))
def test_another_epoch_or_seed_gives_another_order(order, epoch):
    assume(order.num_used >= 40)  # two equal shuffles of fewer can happen
    sizes = [stop - start for start, stop in order.chunks or [(0, order.num_samples)]]
    assume(max(sizes) >= 20)
    first = flat(order, epoch)
    assert first != flat(order, epoch + 1)
    assert first != flat(replace(order, seed=order.seed + 1), epoch)
    assert first != sorted(first)


def test_a_full_shuffle_moves_samples_anywhere():
    """Each of 20 samples is seen at each of 20 places about 100 times in 2000 epochs."""
    order = Order(20, 20, "shuffled", seed=3)
    seen = np.zeros((20, 20), int)
    for epoch in range(2000):
        seen[np.arange(20), flat(order, epoch)] += 1
    assert ((seen - 100) ** 2 / 100).sum() < 480  # chi-square, 361 degrees: p = 2e-5


def test_a_chunked_shuffle_mixes_chunk_order_and_the_order_within():
    order = Order(60, 10, "shuffled", chunks=even_chunks(60, 15))
    visits = {tuple(order.epoch(epoch).chunk_visits()) for epoch in range(40)}
    assert len(visits) > 10
    for epoch in range(5):
        positions = flat(order, epoch)
        for number, chunk in enumerate(order.epoch(epoch).chunk_visits()):
            part = positions[15 * number : 15 * number + 15]
            assert sorted(part) == list(range(15 * chunk, 15 * chunk + 15))
            assert part != sorted(part)


@given(orders(modes=("shuffled",), drop_last=False), st.integers(0, 3))
def test_ranks_together_see_what_one_rank_sees_when_resident(order, epoch):
    """N ranks with batch B take the step that one rank with batch N * B takes."""
    order = replace(order, chunks=None)
    single = replace(order, batch_size=order.batch_size * order.world_size, world_size=1)
    steps = zip(*(taken(each, epoch) for each in ranks(order)), strict=True)
    together = [np.concatenate(step) for step in steps]
    assert np.concatenate(together).tolist() == flat(single, epoch)
    rest = order.num_samples % (order.batch_size * order.world_size)
    if rest == 0 or rest >= order.world_size:
        assert [len(step) for step in together] == [len(step) for step in taken(single, epoch)]


# ------------------------------------------------------------------------------------------- chunks


@given(orders())
def test_chunks_are_invisible_in_batch_boundaries(order):
    for each in ranks(order):
        plain = replace(each, chunks=None, mode="sequential")
        in_blocks = order.mode != "shuffled" or order.chunks is not None
        expected = [len(batch) for batch in taken(plain)]
        if in_blocks:
            assert [len(batch) for batch in taken(each)] == expected
    if order.mode != "shuffled" and order.chunks is not None:
        whole = replace(order, chunks=None)
        assert [list(batch) for batch in taken(order)] == [list(batch) for batch in taken(whole)]


@given(orders(), st.integers(0, 3))
def test_batches_name_their_chunks_in_visit_order(order, epoch):
    starts = [start for start, _ in order.chunks or [(0, order.num_samples)]]
    for each in ranks(order):
        visits = list(each.epoch(epoch).chunk_visits())
        assert len(visits) == len(set(visits))
        touched: list[int] = []
        for batch in each.epoch(epoch).batches():
            rows = np.repeat(batch.chunks, batch.chunk_rows)
            if order.chunks is not None:
                assert (np.searchsorted(starts, batch.positions, side="right") - 1 == rows).all()
            assert len(rows) == len(batch.positions)
            assert len(batch.chunks) <= order.most_chunks_per_batch
            touched += batch.chunks
        assert list(dict.fromkeys(touched)) == visits
        assert [visits.index(chunk) for chunk in touched] == sorted(map(visits.index, touched))


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 5), st.booleans(), st.data())
def test_a_batch_touches_two_chunks_at_most(num_samples, batch_size, world_size, drop_last, data):
    most = data.draw(st.integers(batch_size, 100))
    chunks = even_chunks(num_samples, most)
    assume(all(stop - start >= batch_size for start, stop in chunks))
    try:
        order = Order(num_samples, batch_size, "shuffled", 1, 0, world_size, drop_last, chunks)
    except InputError:
        assume(False)
    assert order.most_chunks_per_batch <= 2
    for each in ranks(order):
        assert all(len(batch.chunks) <= 2 for batch in each.epoch(0).batches())


@given(orders(), st.integers(0, 3))
def test_ranks_read_their_part_and_nothing_else(order, epoch):
    """Over all ranks every position is read once, so a rank reads 1 / world of the bytes."""
    assume(order.chunks is not None or order.mode != "shuffled")
    read: list[int] = []
    for each in ranks(order):
        visits = each.epoch(epoch).visits()
        own = [place for visit in visits for place in range(visit.start, visit.stop)]
        assert sorted(own) == sorted(flat(each, epoch))
        for visit in visits:
            low, high = (order.chunks or [(0, order.num_samples)])[visit.chunk]
            assert low <= visit.start < visit.stop <= high
        read += own
    assert len(read) == len(set(read)) == order.num_used


@pytest.mark.parametrize("mode", ["sequential", "shuffled"])
def test_ranks_share_the_chunk_visits(mode):
    order = Order(10_000, 32, mode, world_size=4, chunks=even_chunks(10_000, 100))
    counts = [len(each.epoch(1).chunk_visits()) for each in ranks(order)]
    assert max(counts) <= 100 / 4 + 1
    assert sum(counts) <= 100 + 3  # a chunk at a rank's edge is visited twice, in parts


@given(st.integers(0, 400), st.integers(1, 80))
def test_even_chunks_cover_and_differ_by_one(num_samples, most):
    chunks = even_chunks(num_samples, most)
    assert [place for start, stop in chunks for place in range(start, stop)] == [
        *range(num_samples)
    ]
    sizes = [stop - start for start, stop in chunks]
    assert not sizes or (max(sizes) <= most and max(sizes) - min(sizes) <= 1)
    assert len(chunks) == -(-num_samples // most)


@given(orders())
def test_the_worst_case_of_chunks_per_batch_is_not_too_careful(order):
    """Slots are memory: the bound is what some order of these chunks really needs."""
    assume(order.chunks is not None)
    sizes = sorted(stop - start for start, stop in order.chunks)
    bound = order.most_chunks_per_batch
    if bound > 2:
        assert sum(sizes[: bound - 2]) + 2 <= order.batch_size


# ------------------------------------------------------------------------------------------- resume


@given(orders(), st.integers(0, 3), st.data())
def test_resuming_at_any_batch_is_the_unbroken_run(order, epoch, data):
    order = data.draw(st.sampled_from(ranks(order)))
    start = data.draw(st.integers(0, len(order)))
    whole = list(order.epoch(epoch).batches())[start:]
    rest = list(order.epoch(epoch).batches(start))
    assert [batch.step for batch in rest] == [batch.step for batch in whole]
    assert [batch.chunks for batch in rest] == [batch.chunks for batch in whole]
    assert all(
        np.array_equal(one.positions, other.positions)
        for one, other in zip(rest, whole, strict=True)
    )
    visited = list(dict.fromkeys(chunk for batch in rest for chunk in batch.chunks))
    assert visited == list(order.epoch(epoch).chunk_visits(start))


@given(orders(), st.integers(0, 3), st.data())
def test_remaining_is_what_no_rank_was_given(order, epoch, data):
    step = data.draw(st.integers(0, len(order)))
    rest = list(chain.from_iterable(taken(each, epoch, step) for each in ranks(order)))
    expected = np.sort(np.concatenate(rest)).tolist() if rest else []
    for each in ranks(order):
        assert each.remaining(epoch, step).tolist() == expected


@given(orders(), orders(), st.integers(0, 2), st.integers(0, 2), st.data())
def test_digests_are_equal_exactly_for_the_same_samples_in_the_same_order(one, two, a, b, data):
    if data.draw(st.booleans()):  # two unrelated orders are hardly ever equal
        two = replace(
            one, batch_size=data.draw(st.integers(min(2, one.batch_size), one.batch_size))
        )
    upto = data.draw(st.integers(0, len(one)))
    first = np.concatenate([np.empty(0, int), *islice(taken(one, a), upto)]).tolist()
    assert (one.epoch(a).digest(upto) == two.epoch(b).digest()) == (first == flat(two, b))
    assert one.epoch(a).digest() == one.epoch(a).digest(len(one))


def test_the_shuffle_is_pinned():
    """A changed digest breaks every saved state: numpy or the keys changed, say so in the notes."""
    chunked = Order(1000, 32, "shuffled", 7, 1, 3, chunks=even_chunks(1000, 90))
    assert flat(Order(8, 8, "shuffled", 42)) == [1, 6, 0, 5, 7, 3, 4, 2]
    assert Order(1000, 32, "shuffled", 7).epoch(2).digest() == "3530d716f57b18d86e43ae5c64eb69bf"
    assert chunked.epoch(2).digest() == "0a1b9877b02e73acb38c22b4a107c04d"
    assert Order(4, 2).epoch(0).digest(0) == "99aa06d3014798d86001c324468d497f"  # of nothing


# -------------------------------------------------------------------------------------------- costs


def cpu_seconds(call):
    begin = time.process_time()
    call()
    return time.process_time() - begin


def test_an_epoch_costs_about_what_numpys_shuffle_costs_and_one_number_a_sample():
    num_samples = 1_000_000
    order, rng = Order(num_samples, 128, "shuffled", 1), np.random.default_rng(1)
    ratios = [
        cpu_seconds(lambda epoch=epoch: next(order.epoch(epoch).batches(5_000)))
        / cpu_seconds(lambda: rng.permutation(num_samples))
        for epoch in range(5)
    ]
    assert min(ratios) < 2, ratios
    tracemalloc.start()
    next(order.epoch(1).batches(7_500))
    assert tracemalloc.get_traced_memory()[1] < num_samples * 8 + 1_000_000
    tracemalloc.stop()


def test_chunked_orders_permute_only_the_chunk_they_are_in():
    order = Order(100_000_000, 128, "shuffled", 1, chunks=even_chunks(100_000_000, 100_000))
    tracemalloc.start()
    epoch = order.epoch(3)
    batches = epoch.batches(700_000)
    for _ in range(2000):  # over two chunks' edges
        next(batches)
    assert tracemalloc.get_traced_memory()[1] < 2_500_000  # two chunks, the list of 1000 chunks
    tracemalloc.stop()


def test_no_torch():
    code = "import sys, stoker.loader.order, stoker.loader.splits; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "given", "fix"),
    [
        ({"batch_size": 0}, "batch_size is 0", "batch_size=128"),
        ({"mode": "random"}, "'random'", "order='shuffled'"),
        ({"seed": -1}, "seed is -1", "seed=0"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2", "WORLD_SIZE"),
        ({"rank": -1}, "rank -1", "RANK"),
        ({"world_size": 0}, "world_size 0", "RANK"),
        ({"num_samples": 3, "world_size": 4}, "3 samples for 4 ranks", "stoker inspect"),
        ({"num_samples": 0}, "0 samples for 1 ranks", "stoker inspect"),
        ({"batch_size": 1, "world_size": 3}, "batches of 1", "drop_last=True"),
        ({"batch_size": 64, "drop_last": True}, "leaves no batch", "drop_last=False"),
        ({"mode": "lanes"}, "without a lane plan", "plan_store_lanes"),
        ({"chunks": ((0, 5),)}, "end at 5", "even_chunks"),
        ({"chunks": ((0, 5), (6, 10))}, "chunk 1 is (6, 10)", "even_chunks"),
        ({"chunks": ((0, 5), (5, 5), (5, 10))}, "chunk 1 is (5, 5)", "even_chunks"),
        ({"chunks": ((1, 10),)}, "chunk 0 is (1, 10)", "even_chunks"),
        ({"chunks": ()}, "end at 0", "even_chunks"),
    ],
)
def test_what_cannot_be_is_refused(options, given, fix):
    with pytest.raises(InputError) as caught:
        Order(**{"num_samples": 10, "batch_size": 4, **options})
    assert given in caught.value.given
    assert caught.value.allowed
    assert fix in caught.value.fix


def test_batches_beyond_the_epoch_are_refused_at_once():
    epoch = Order(10, 4).epoch(0)
    for call in (epoch.batches, epoch.visits, epoch.chunk_visits, epoch.digest):
        with pytest.raises(InputError, match="batch 4 of an epoch of 3"):
            call(4)
    assert list(epoch.batches(3)) == []
    assert list(epoch.visits(3)) == []
    with pytest.raises(InputError, match="epoch is -1"):
        Order(10, 4).epoch(-1)


@pytest.mark.parametrize(
    ("order", "shuffle", "mode"),
    [
        (None, None, "sequential"),
        (None, False, "sequential"),
        (None, True, "shuffled"),
        ("shuffled", True, "shuffled"),
        ("shuffled", None, "shuffled"),
        ("time", None, "time"),
        ("time", False, "time"),
        ("lanes", False, "lanes"),
    ],
)
def test_modes_from_flags(order, shuffle, mode):
    assert pick_mode(order, shuffle) == mode


@pytest.mark.parametrize("order", ["time", "lanes", "sequential"])
def test_shuffling_what_keeps_its_order_is_refused(order):
    with pytest.raises(InputError, match="shuffle=True with order="):
        pick_mode(order, True)


def test_other_clashes_of_flags():
    with pytest.raises(InputError, match="shuffle=False with order='shuffled'"):
        pick_mode("shuffled", False)
    with pytest.raises(InputError, match="'random'"):
        pick_mode("random", None)
    with pytest.raises(InputError, match="chunks of 0"):
        even_chunks(10, 0)


def test_the_reason_says_which_shuffle_it_is():
    assert Order(10, 4, "shuffled").reason == "full shuffle: everything is resident"
    reason = Order(10, 4, "shuffled", chunks=even_chunks(10, 4)).reason
    assert "within chunks are shuffled: 3 chunks of up to 4 samples" in reason
    assert "nothing is shuffled" in Order(10, 4, "time").reason
    assert "as they stand" in Order(10, 4).reason
