"""The protocol of torchdata's StatefulDataLoader: code written for it works with a Loader and with prefetch."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from framework_makers import docs_code, makes, taken
from stoker.frameworks.adapted import AdaptedLoader
from stoker.loader.prefetch import prefetch
from test_prefetch import late
from training_makers import write_rows

torchdata = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is not installed"
)
# torchdata 0.11 still calls what torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


def stateful(num=43, workers=0, shuffle=True):
    return torchdata.StatefulDataLoader(
        TensorDataset(torch.arange(num)),
        batch_size=4,
        shuffle=shuffle,
        num_workers=workers,
        generator=torch.Generator().manual_seed(5),
    )


def train_for(make, num_batches, state=None):
    """A loop as it is written for StatefulDataLoader; returns what it saw and the state at its end."""
    loader = make()
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    while len(seen) < num_batches:
        for batch in loader:
            seen.append(taken(batch))
            if len(seen) == num_batches:
                break
    return seen, loader.state_dict()


KINDS = [
    "StatefulDataLoader",
    "prefetch, thread",
    "prefetch, next",
    "prefetch, cpu",
    "Loader",
    "adapted",
]


def maker(kind, rows):
    if kind == "Loader":
        return lambda: makes(rows)(device="cpu")
    if kind == "adapted":
        return lambda: AdaptedLoader(makes(rows)(device="cpu"))
    if kind == "StatefulDataLoader":
        return stateful
    if kind == "prefetch, cpu":
        return lambda: prefetch(stateful(), "cpu")
    return lambda: late(stateful(), depth=3, background=kind.endswith("thread"))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_in_the_middle_of_an_epoch_goes_on_in_a_new_loader(kind, rows):
    make = maker(kind, rows)
    whole, _ = train_for(make, 11)  # an epoch of each has 11 batches
    for cut in (1, 4, 10):
        first, state = train_for(make, cut)
        rest, _ = train_for(make, 11 - cut, state)
        assert first + rest == whole, f"cut behind batch {cut}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_once_per_epoch_whatever_was_cut(kind, rows):
    make = maker(kind, rows)
    first, state = train_for(make, 7)
    rest, _ = train_for(make, 4, state)
    samples = [number for batch in first + rest for number in batch]
    assert sorted(samples) == list(range(len(samples)))


@pytest.mark.parametrize("background", [True, False], ids=["thread", "next"])
def test_the_state_of_a_new_iteration_is_its_beginning_not_where_the_last_one_was_left(background):
    make = lambda: late(stateful(shuffle=False), depth=3, background=background)[0]  # noqa: E731
    wrapped = make()
    for _, _batch in zip(range(3), wrapped, strict=False):
        pass
    batches = iter(wrapped)
    again = make()
    again.load_state_dict(wrapped.state_dict())
    assert taken(next(iter(again))) == taken(next(batches)) == [0, 1, 2, 3]


def test_workers_of_the_wrapped_loader_change_nothing():
    make = lambda: late(stateful(workers=1, shuffle=False), depth=2)[0]  # noqa: E731
    first, state = train_for(make, 3)
    rest, _ = train_for(make, 8, state)
    assert [n for batch in first + rest for n in batch] == list(range(43))


def test_prefetch_has_a_state_only_where_the_wrapped_loader_has_one():
    """Checkpoint code asks by `hasattr`: a state that cannot be taken would end the run when it saves."""
    plain = prefetch(DataLoader(TensorDataset(torch.arange(8))), "cpu")
    assert not hasattr(plain, "state_dict")
    assert not hasattr(plain, "load_state_dict")
    assert hasattr(prefetch(stateful(), "cpu"), "state_dict")


def test_a_loaders_state_survives_json(rows):
    first, state = train_for(maker("Loader", rows), 5)
    rest, _ = train_for(maker("Loader", rows), 6, json.loads(json.dumps(state)))
    assert first + rest == train_for(maker("Loader", rows), 11)[0]


def test_the_code_of_the_docs_runs(rows, tmp_path, monkeypatch):
    code, names = (
        docs_code("torchdata's StatefulDataLoader", rows, tmp_path, monkeypatch),
        {"__name__": "docs"},
    )
    exec(compile(code, "docs/frameworks.md", "exec"), names)
    assert names["state"] is not None
