"""A Loader as other people's loops take one: epochs that end with their last batch, a state, batches that stay."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework_makers import makes, taken
from stoker.errors import InputError, MissingExtraError
from stoker.frameworks.adapted import AdaptedLoader, check_makes, check_share, count_samples
from stoker.loader.loader import Loader
from training_makers import write_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture
def adapted(rows):
    with AdaptedLoader(makes(rows)(device="cpu")) as loader:
        yield loader


def epoch_order(rows, epoch):
    with makes(rows)(device="cpu") as loader:
        loader.set_epoch(epoch)
        return [taken(batch) for batch in loader]


def test_loops_that_stop_at_len_get_the_next_epoch_afterwards(adapted, rows):
    for epoch in range(3):
        batches = iter(adapted)
        assert [taken(next(batches)) for _ in range(len(adapted))] == epoch_order(rows, epoch)


def test_an_iteration_that_was_left_ends_its_epoch(adapted, rows):
    next(iter(adapted))
    iter(adapted)  # frameworks look whether they may iterate; that takes nothing
    assert [taken(batch) for batch in adapted] == epoch_order(rows, 1)


@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 11)),
            st.tuples(st.just("epoch"), st.integers(0, 3)),
            st.tuples(st.just("resume"), st.just(0)),
        ),
        max_size=6,
    )
)
def test_it_is_a_data_loader_with_a_state_whatever_is_done_to_it(moves, rows):
    """Against the simplest model: the epoch that comes, and whether its place was loaded."""
    orders = {}
    loader = AdaptedLoader(makes(rows)(device="cpu"))
    coming, begun = 0, 0  # the epoch of the next iteration, and batches of it that are done
    under_way = (0, 0)
    for move, number in moves:
        if move == "epoch":
            if not (begun and number == coming):
                coming, begun = number, 0
            loader.set_epoch(number)
            under_way = (coming, begun)
        elif move == "take":
            order = orders.setdefault(coming, None) or epoch_order(rows, coming)
            batches = iter(loader)
            wanted = order[begun : begun + number]
            got = [taken(next(batches)) for _ in wanted]
            assert got == wanted
            if number:
                under_way = (coming, begun + len(wanted))
                coming, begun = coming + 1, 0
        else:
            state = loader.state_dict()
            loader.close()
            loader = AdaptedLoader(makes(rows)(device="cpu"))
            loader.load_state_dict(state)
            epoch, done = under_way
            coming, begun = (epoch + 1, 0) if done >= 11 else (epoch, done)
            if not done:
                coming = epoch
            under_way = (coming, begun)
    loader.close()


def test_a_batch_stays_where_it_is_and_keeps_what_it_knows(adapted):
    batch = next(iter(adapted))
    assert batch.to("cpu") is batch
    assert batch.step == 0
    assert len(batch.sample_ids) == 20
    with pytest.raises(InputError, match="one device for both"):
        batch.to("meta")


def test_fields_are_renamed_and_others_left_out(rows):
    fields = {"features": "input_values"}
    with AdaptedLoader(makes(rows)(device="cpu"), fields) as loader:
        batch = next(iter(loader))
    assert list(batch) == ["input_values"]
    assert len(batch.positions) == 20
    with (
        AdaptedLoader(makes(rows)(device="cpu"), {"pixels": "x"}) as loader,
        pytest.raises(InputError, match="features, targets"),
    ):
        next(iter(loader))


def test_what_is_no_loader_and_what_is_anothers_share_is_refused(rows):
    with pytest.raises(InputError, match=r"stoker\.prefetch"):
        AdaptedLoader([1, 2])
    with (
        makes(rows)(device="cpu") as loader,
        pytest.raises(InputError, match="rank=1, world_size=2"),
    ):
        check_share(loader, 1, 2)


def test_samples_are_counted_in_any_batch(adapted):
    batch = next(iter(adapted))
    assert count_samples(batch) == 20
    assert count_samples(dict(batch)) == 20
    assert count_samples((batch["features"], batch["targets"])) == 20
    assert count_samples(["a", {"b": 3}]) == 0


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("lightning", "lightning", "lightning"),
        ("accelerate", "accelerate", "accelerate"),
        ("huggingface", "transformers", "huggingface"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(module, package, extra, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(f"stoker.frameworks.{module}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"\[{extra}\]"):
        importlib.import_module(f"stoker.frameworks.{module}")


@pytest.mark.parametrize("form", [("features", "targets"), ("targets",), None])
def test_batches_have_the_form_of_the_loader(rows, form):
    with (
        Loader(rows, 20, "cpu", as_tuple=form) as plain,
        Loader(rows, 20, "cpu", as_tuple=form) as own,
    ):
        batches = list(zip(plain, AdaptedLoader(own), strict=True))
    for expected, got in batches:
        assert isinstance(got, dict if form is None else tuple)
        pairs = [(expected[k], got[k]) for k in (range(len(form)) if form else expected)]
        assert all(torch.equal(one, other) for one, other in pairs)


def test_one_array_stays_one_tensor():
    with Loader(torch.arange(9), 4, "cpu") as loader:
        assert [batch.tolist() for batch in AdaptedLoader(loader)][1] == [4, 5, 6, 7]


def test_a_loader_in_the_place_of_what_makes_one_is_answered(rows):
    with Loader(rows, 20, "cpu") as loader, pytest.raises(InputError, match="train is a Loader"):
        check_makes(loader, "train")
