"""Weighted, balanced and mixed epochs: pure functions of (seed, epoch), for any ranks, resumed exactly."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.loader.drawing import Draws, class_weights, draw, mix, spread
from stoker.loader.elastic import find_resume_point, save_state
from stoker.loader.loader import Loader
from stoker.loader.order import Order
from stoker.plan.facts import even_chunks
from stoker.store.fields import Dense
from store_makers import write_store

weights_of = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=40
).filter(any)


# -- one epoch ---------------------------------------------------------------------------------------


@given(weights_of, st.integers(1, 200), st.integers(0, 5), st.integers(0, 5))
def test_each_sample_comes_as_often_as_its_weight_says(weights, num_draws, seed, epoch):
    weights = np.array(weights)
    drawn = draw(weights, num_draws, seed, epoch)
    assert len(drawn) == num_draws
    assert (np.diff(drawn) >= 0).all()
    counts = np.bincount(drawn, minlength=len(weights))
    expected = num_draws * weights / weights.sum()
    assert (counts >= np.floor(expected - 1e-6)).all()
    assert (counts <= np.ceil(expected + 1e-6)).all()
    assert not counts[weights == 0].any()
    assert np.array_equal(drawn, draw(weights, num_draws, seed, epoch))


def test_equal_weights_are_a_plain_epoch():
    assert draw(np.full(7, 0.3), 7, 1, 2).tolist() == list(range(7))
    with Loader(np.arange(50), 8, "cpu", weights=np.full(50, 0.3)) as loader:
        assert sorted(int(v) for batch in loader for v in batch) == list(range(50))


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def test_over_many_epochs_the_counts_fit_the_weights():
    weights = np.random.default_rng(0).random(60) + 0.05
    epochs, num_draws = 400, 25
    counts = sum(np.bincount(draw(weights, num_draws, 3, e), minlength=60) for e in range(epochs))
    expected = epochs * num_draws * weights / weights.sum()
    assert chi_square(counts, expected) < 59 + 5 * np.sqrt(2 * 59)
    assert len({draw(weights, num_draws, 3, e).tobytes() for e in range(epochs)}) == epochs


def test_pairs_of_samples_are_drawn_independently_of_where_they_stand():
    """Systematic draws in the order of the store would take every second sample together."""
    weights, epochs = np.full(12, 1.0), 3000
    together = np.zeros((12, 12))
    for epoch in range(epochs):
        drawn = draw(weights, 6, 1, epoch)
        together[np.ix_(drawn, drawn)] += 1
    pairs = together[np.triu_indices(12, 1)]
    expected = np.full(len(pairs), epochs * 6 * 5 / (12 * 11))
    assert chi_square(pairs, expected) < len(pairs) + 5 * np.sqrt(2 * len(pairs))


def test_every_place_of_an_epoch_can_hold_every_sample():
    """Each of 8 samples is drawn at each of 8 steps in proportion to its weight."""
    weights = np.arange(1.0, 9)
    order = Order(8, 1, "shuffled", draws=Draws(8, weights, 8))
    counts, epochs = np.zeros((8, 8)), 2000
    for epoch in range(epochs):
        for batch in order.epoch(epoch).batches():
            counts[batch.step, batch.positions] += 1
    expected = np.tile(epochs * weights / weights.sum(), (8, 1))
    assert chi_square(counts, expected) < 64 + 5 * np.sqrt(2 * 64)


# -- ranks, chunks, resuming -----------------------------------------------------------------------


def orders(draws, batch_size, world_size, most):
    chunks = None if most is None else even_chunks(draws.num_positions, most)
    return [
        Order(
            draws.num_positions, batch_size, "shuffled", 7, rank, world_size,
            chunks=chunks, draws=draws,
        )
        for rank in range(world_size)
    ]  # fmt: skip


chunk_sizes = st.one_of(st.none(), st.integers(1, 40))


@given(
    weights_of,
    st.integers(3, 120),
    st.integers(2, 7),
    st.integers(1, 3),
    chunk_sizes,
    st.integers(0, 3),
)
def test_the_ranks_together_have_what_was_drawn(weights, num_draws, batch_size, ranks, most, epoch):
    if len(weights) < ranks:
        return
    draws = Draws(len(weights), np.array(weights), num_draws)
    taken: list[int] = []
    for order in orders(draws, batch_size, ranks, most):
        whole = order.epoch(epoch)
        edges = order.edges.tolist()
        visits = {visit.chunk: visit for visit in whole.visits()}
        for batch in whole.batches():
            taken += batch.positions.tolist()
            for chunk, rows in zip(
                batch.chunks,
                np.split(batch.positions, np.cumsum(batch.chunk_rows)[:-1]),
                strict=True,
            ):
                if most is not None:
                    assert visits[chunk].start <= rows.min()
                    assert rows.max() < visits[chunk].stop
                    assert (
                        edges[chunk] <= visits[chunk].start < visits[chunk].stop <= edges[chunk + 1]
                    )
    assert Counter(taken) == Counter(draws.positions(7, epoch).tolist())


def test_resident_ranks_see_what_one_rank_sees():
    draws = Draws(30, np.arange(30.0), 48)
    (one,) = orders(draws, 12, 1, None)
    several = orders(draws, 4, 3, None)
    for step, batch in enumerate(one.epoch(2).batches()):
        parts = [list(each.epoch(2).batches())[step].positions for each in several]
        assert np.array_equal(np.concatenate(parts), batch.positions)


@given(
    weights_of,
    st.integers(20, 120),
    st.lists(st.tuples(st.integers(2, 7), st.integers(1, 3), chunk_sizes), min_size=2, max_size=4),
    st.data(),
)
@pytest.mark.filterwarnings("ignore:epoch .* cannot be shared")
def test_an_epoch_goes_on_with_other_ranks_and_nothing_drawn_is_lost_or_repeated(
    weights, num_draws, stages, data
):
    weights = np.array([*weights, 1.0, 2.0, 3.0])
    draws = Draws(len(weights), weights, num_draws)
    taken: list[int] = []
    state, left_over = None, 0
    for number, (batch_size, ranks, most) in enumerate(stages):
        last = number == len(stages) - 1
        states = []
        cut = None
        for order in orders(draws, batch_size, ranks, most):
            if state is None:
                epoch, start, cuts = order.epoch(1), 0, ()
            else:
                point = find_resume_point(order, state)
                epoch, start, cuts = point.begun or order.epoch(1), point.batch, point.cuts
            if cut is None:
                cut = (
                    epoch.num_batches if last else data.draw(st.integers(start, epoch.num_batches))
                )
                left_over = epoch.num_offered - epoch.num_used
            for batch in epoch.batches(start):
                if batch.step == cut:
                    break
                taken += batch.positions.tolist()
            states.append(save_state(order, epoch, cut, cuts))
        state = data.draw(st.sampled_from(states))
    drawn = Counter(draws.positions(7, 1).tolist())
    assert not Counter(taken) - drawn
    assert sum(drawn.values()) - len(taken) == left_over


# -- the Loader ----------------------------------------------------------------------------------------

N = 400


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    values = np.arange(N)
    made = write_store(
        tmp_path_factory.mktemp("drawn") / "store",
        [{"y": Dense(values), "label": Dense((values % 10 == 0).astype(np.int64))}],
    )
    yield made
    made.close()


def ys(loader):
    return [batch["y"].tolist() for batch in loader]


@pytest.mark.parametrize("most", [None, 6_000, 1_600])
def test_loaded_samples_are_those_that_were_drawn(store, most):
    # Most of the weight is on a few samples: most chunks hold few draws, and batches touch many of them.
    weights = np.where(np.arange(N) % 37 == 0, 40.0, 0.3)
    with Loader(store, 32, "cpu", weights=weights, seed=2, data_bytes=most) as loader:
        assert (loader.tier == "resident") == (most is None)
        for epoch in range(3):
            got = [v for batch in ys(loader) for v in batch]
            assert Counter(got) == Counter(draw(weights, N, 2, epoch).tolist())


def test_a_state_in_the_middle_resumes_in_chunks_and_whole(store):
    options = {"balance": "label", "seed": 4, "epoch_samples": 333}
    for before, after in ((None, 6_000), (6_000, None), (6_000, 2_000)):
        with (
            Loader(store, 16, "cpu", data_bytes=before, **options) as one,
            Loader(store, 24, "cpu", data_bytes=after, **options) as two,
        ):
            assert len(one) == 21
            walk = iter(one)
            taken = [next(walk)["y"].tolist() for _ in range(7)]
            two.load_state_dict(one.state_dict())
            taken += ys(two)
            drawn = two._order.draws.positions(4, 0)
            assert Counter(v for batch in taken for v in batch) == Counter(drawn.tolist())
            assert two.epoch == 1


def test_classes_are_equally_likely(store):
    with Loader(store, 50, "cpu", balance="label") as loader:
        assert "equally likely" in loader.reason
        labels = np.concatenate([batch["label"].numpy() for batch in loader])
    assert np.bincount(labels).tolist() == [200, 200]


def by_epoch(epoch):
    weights = np.zeros(N)
    weights[epoch::7] = 1
    return weights


def test_weights_may_change_with_the_epoch(store):
    with Loader(store, 8, "cpu", weights=by_epoch, epoch_samples=50) as loader:
        for epoch in range(3):
            assert {v % 7 for batch in ys(loader) for v in batch} == {epoch}
        twin = pickle.loads(pickle.dumps(loader))
        with twin:
            assert ys(twin) == ys(loader)
    chosen = np.arange(0, N, 2)
    with Loader(store, 8, "cpu", weights=by_epoch, samples=chosen) as loader:
        assert {v % 14 for batch in ys(loader) for v in batch} == {0}


def test_a_state_of_other_weights_is_refused(store):
    weights = np.arange(N) + 1.0
    with (
        Loader(store, 8, "cpu", weights=weights) as one,
        Loader(store, 8, "cpu", weights=weights[::-1]) as other,
        Loader(store, 8, "cpu", shuffle=True) as plain,
    ):
        for first, second in ((one, other), (one, plain), (plain, one)):
            with pytest.raises(InputError, match="weights"):
                second.load_state_dict(first.state_dict())
        state = plain.state_dict()
        del state["weights"]  # as older versions saved it
        plain.load_state_dict(state)


def test_shrinking_keeps_the_draws(store):
    weights = np.where(np.arange(N) % 37 == 0, 40.0, 0.3)
    with Loader(store, 16, "cpu", weights=weights, chunk_bytes=800, num_slots=6) as loader:
        walk = iter(loader)
        got = [next(walk)["y"].tolist() for _ in range(5)]
        assert loader.shrink(0.5) > 0
        got += [batch["y"].tolist() for batch in walk]
        assert Counter(v for batch in got for v in batch) == Counter(
            draw(weights, N, 0, 0).tolist()
        )


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"weights": -np.ones(N)}, "weight of sample 0 is -1.0"),
        ({"weights": np.full(N, np.nan)}, "is nan"),
        ({"weights": np.full(N, np.inf)}, "is inf"),
        ({"weights": np.full(N, 1e308)}, "add up to inf"),
        ({"weights": np.zeros(N)}, "add up to 0.0"),
        ({"weights": np.ones(3)}, "float64 (3,)"),
        ({"weights": ["a"] * N}, "are <U1"),
        ({"weights": np.ones(N), "balance": "label"}, "weights and balance"),
        ({"weights": np.ones(N), "order": "time"}, "order='time'"),
        ({"weights": np.ones(N), "shuffle": False}, "shuffle=False"),
        ({"balance": "Label"}, "balance='Label'"),
        ({"epoch_samples": -3}, "epoch_samples is -3"),
    ],
)
def test_what_cannot_be_drawn_is_refused(store, options, given):
    with pytest.raises(InputError) as caught:
        Loader(store, **{"batch_size": 8, "device": "cpu", **options})
    assert given in caught.value.given
    assert caught.value.fix


def test_slots_that_no_batch_of_long_samples_fits_into_are_refused():
    lengths = np.where(np.arange(N) % 8 == 0, 100, 1)
    data = {"v": [np.full(count, number) for number, count in enumerate(lengths)]}
    with pytest.raises(InputError, match="drawn samples may lie in many chunks") as caught:
        Loader(data, 32, "cpu", weights=lengths, data_bytes=11_000)
    more = int(caught.value.fix.partition(",")[0].removeprefix("data_bytes="))
    with Loader(data, 32, "cpu", weights=lengths, data_bytes=more) as loader:
        assert loader.tier == "chunked"
        drawn = Counter(draw(lengths, N, 0, 0).tolist())
        got = Counter(v for batch in loader for v in batch["v"].tolist())
    assert got == {number: count * lengths[number] for number, count in drawn.items()}


def test_weights_of_an_epoch_are_checked_when_it_comes(store):
    with (
        Loader(store, 8, "cpu", weights=lambda epoch: np.full(N, 1.0 - epoch)) as loader,
    ):
        assert len(list(loader)) == 50
        with pytest.raises(InputError, match="in epoch 1 add up to 0"):
            list(loader)


def test_classes_of_more_than_one_number_are_refused():
    with pytest.raises(InputError, match="one whole number per sample"):
        class_weights(np.zeros((4, 2), int), "y")


# -- several stores ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    write_store(folder / "a", [{"y": Dense(np.arange(300))}]).close()
    write_store(folder / "b", [{"y": Dense(1000 + np.arange(60))}]).close()
    return {str(folder / "a"): 1, str(folder / "b"): 3}


@pytest.mark.parametrize("data_bytes", [None, 1_500])
def test_stores_are_mixed_by_their_shares(pair, data_bytes):
    with Loader(mix(pair), 16, "cpu", data_bytes=data_bytes) as loader:
        got = np.array([v for batch in ys(loader) for v in batch])
    assert len(got) == 360
    assert (got >= 1000).sum() == 270
    # Each sample of the small store comes four or five times, of the large one never or once.
    counts = np.bincount(got, minlength=1060)
    assert set(counts[1000:]) == {4, 5}
    assert set(counts[:300]) == {0, 1}


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_batch_holds_the_shares(pair, ranks):
    got = []
    for rank in range(ranks):
        with Loader(mix(pair, per_batch=True), 12, "cpu", rank=rank, world_size=ranks) as loader:
            twin = pickle.loads(pickle.dumps(loader))
            batches = ys(loader)
            with twin:
                assert ys(twin) == batches
        for batch in batches[:-1]:
            assert abs(sum(v >= 1000 for v in batch) - 9) <= 1
        got += [v for batch in batches for v in batch]
    assert sum(v >= 1000 for v in got) == 270


def test_shares_over_a_selection(pair):
    with Loader(mix(pair), 16, "cpu", samples=np.r_[0:10, 300:310]) as loader:
        got = [v for batch in ys(loader) for v in batch]
    assert {v for v in got if v < 1000} <= set(range(10))
    assert sum(v >= 1000 for v in got) == 15
    with pytest.raises(InputError, match="no sample of"):
        Loader(mix(pair), 16, "cpu", samples=np.arange(10))


def test_mixtures_that_cannot_be_are_refused(pair, tmp_path):
    for shares in ({}, dict.fromkeys(pair, 0.0), dict.fromkeys(pair, -1.0)):
        with pytest.raises(InputError, match="a share of 0 or more"):
            mix(shares)
    write_store(tmp_path / "c", [{"y": Dense(np.arange(3.0))}]).close()
    with pytest.raises(InputError, match=r"differ in the field 'y': dense float64"):
        mix({next(iter(pair)): 1, str(tmp_path / "c"): 1})
    with pytest.raises(InputError, match="need resident data"):
        Loader(mix(pair, per_batch=True), 16, "cpu", data_bytes=1_500)


def test_stores_are_mixed_if_their_classes_have_the_same_numbers(tmp_path):
    def store(name, classes, channels):
        made = write_store(tmp_path / name, [{"y": Dense(np.arange(3))}])
        made.manifest.attributes.update(classes=classes, channels=channels)
        return made

    pets = store("pets", ["cat", "dog"], 3)
    more = mix({pets: 1, store("more", ["cat", "dog", "fox"], 3): 1})
    assert more.store.manifest.attributes == {"classes": ["cat", "dog", "fox"], "channels": 3}
    with pytest.raises(InputError, match=r"class 0 is 'cat' in .*pets and 'cow' in"):
        mix({pets: 1, store("cows", ["cow", "dog"], 3): 1})
    with pytest.raises(InputError, match="have 1 channels, and others 3"):
        mix({pets: 1, store("grey", ["cat", "dog"], 1): 1})


@given(st.lists(st.integers(0, 4), min_size=1, max_size=200), st.integers(1, 30))
def test_every_stretch_has_the_shares(strata, length):
    strata = np.array(strata)
    rows = np.random.default_rng(0).permutation(len(strata))
    made = spread(rows, strata[rows], np.random.default_rng(1))
    assert sorted(made) == sorted(rows)
    for low in range(0, len(made) - length + 1):
        counts = np.bincount(strata[made[low : low + length]], minlength=5)
        expected = length * np.bincount(strata, minlength=5) / len(strata)
        assert (np.abs(counts - expected) < len(set(strata.tolist())) + 1).all()
