"""What people type first at a `Loader`: data in memory, DataLoader's keywords, tuples, names with a slip."""

from __future__ import annotations

import pickle
import warnings
from collections import namedtuple

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from stoker.augment import Compose, RandomHorizontalFlip
from stoker.errors import InputError, StoreError
from stoker.loader import arguments
from stoker.loader.batch import Batch
from stoker.loader.loader import Loader
from stoker.loader.splits import samples_of, split_by_group, split_by_time, split_randomly
from stoker.store.reader import open_store

N = 20
X, Y = torch.arange(N * 2.0).reshape(N, 2), torch.arange(N)


@pytest.fixture(autouse=True)
def fresh_notes(monkeypatch):
    monkeypatch.setattr(arguments, "_told", set())


def loader_of(data=(X, Y), batch_size=8, **more):
    return Loader(data, batch_size, "cpu", **more)


# -- data in memory ------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize("data", [(X, Y), (X.numpy(), Y.numpy()), TensorDataset(X, Y), Pair(X, Y)])
def test_a_tuple_of_arrays_gives_tuples(data):
    with loader_of(data, shuffle=True, seed=3) as loader:
        seen = [(x, y) for x, y in loader]
    assert [len(y) for _, y in seen] == [8, 8, 4]
    for x, y in seen:
        assert torch.equal(x, X[y])
    assert sorted(torch.cat([y for _, y in seen]).tolist()) == list(range(N))


def test_one_array_gives_tensors():
    with loader_of(X) as loader:
        assert torch.equal(torch.cat(list(loader)), X)


def test_a_dict_of_arrays_gives_batches_by_name():
    with loader_of(
        {"x": X, "y": Y.numpy(), "mz": [np.arange(i, dtype="f4") for i in range(N)]}
    ) as loader:
        batch = next(iter(loader))
    assert set(batch) == {"x", "y", "mz", "mz/offsets"}
    assert batch["mz/offsets"].tolist() == np.cumsum([0, *range(8)]).tolist()


class Table:
    """What a table of pandas has."""

    columns = ("x", 3)

    def __getitem__(self, name):
        return Column(X[:, 0].numpy() if name == "x" else Y.numpy())

    def to_numpy(self):
        raise NotImplementedError


class Column(list):
    def to_numpy(self):
        return np.array(self)


def test_the_columns_of_a_table_are_fields():
    with loader_of(Table()) as loader:
        batch = next(iter(loader))
    assert torch.equal(batch["3"], Y[:8])


def test_a_list_of_paths_is_answered_with_a_mixture():
    with pytest.raises(InputError, match=r"Try: mix\(\{'a': 1, 'b': 1\}\)"):
        loader_of(["a", "b"])


class Items(Dataset):
    def __init__(self, form):
        self.form = form

    def __len__(self):
        return N

    def __getitem__(self, i):
        if self.form is dict:
            return {"x": X[i], "y": i, "mz": np.arange(i), "name": f"sample {i}"}
        return (X[i], i) if self.form is tuple else X[i]


@pytest.mark.parametrize("form", [dict, tuple, None])
def test_a_dataset_is_read_once_and_gives_batches_in_its_form(form):
    with pytest.warns(UserWarning, match="stays the same in every epoch|leaves text out"):
        loader = loader_of(Items(form))
    with loader:
        batches = list(loader)
    if form is dict:
        assert batches[1]["mz"].tolist() == [k for i in range(8, 16) for k in range(i)]
        assert torch.equal(batches[1]["x"], X[8:16])
    elif form is tuple:
        assert torch.equal(batches[1][1], Y[8:16])
    else:
        assert torch.equal(batches[1], X[8:16])


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 9),
    st.sampled_from(["f4", "f8", "i2", "u1", "u2", "u4", "bool"]),
    st.booleans(),
)
def test_memory_gives_what_the_arrays_hold(count, batch_size, dtype, chunked):
    values = np.random.default_rng(count).integers(0, 2, (count, 3)).astype(dtype)
    more = {"chunk_bytes": values.nbytes // 2 + values[:batch_size].nbytes} if chunked else {}
    with loader_of({"v": values}, batch_size, **more) as loader:
        got = torch.cat([batch["v"].view(torch.uint8) for batch in loader]).numpy()
    assert got.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("data", "given"),
    [
        ((X, Y[:3]), "different or no rows"),
        ((X[:0], Y[:0]), "different or no rows"),
        ((), "empty"),
        ({}, "empty"),
        ({"a/b": X}, "'a/b'"),
        ({"x": "text"}, "a single value"),
        ({"x": np.array([1j])}, "complex"),
        ({"x": X.bfloat16()}, "bfloat16"),
        (iter([1]), "one after the other"),
        (DataLoader(TensorDataset(X)), "a DataLoader"),
        (3, "given int"),
        ([], "is empty"),
        ([{"a": 1}, {"b": 1}], "sample 1 has the fields b"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], "not of one shape"),
        ([1, "a"], "text in some samples"),
    ],
)
def test_data_that_is_none_is_refused_by_name(data, given):
    with pytest.raises(InputError) as caught:
        loader_of(data)
    assert given in caught.value.given


def test_an_iterable_dataset_is_sent_to_pack_from():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1])

    with pytest.raises(InputError, match="Stream is a class"):
        loader_of(Stream)
    with pytest.raises(InputError, match="pack_from"):
        loader_of(Stream())


def test_a_loader_over_memory_is_pickled_with_its_data_and_place():
    with loader_of(shuffle=True) as loader:
        walk = iter(loader)
        next(walk)
        twin = pickle.loads(pickle.dumps(loader))
        with twin:
            rest = [y.tolist() for _, y in twin]
        assert rest == [y.tolist() for _, y in walk]
    pictures = torch.arange(4 * 12, dtype=torch.uint8).reshape(4, 3, 2, 2), torch.arange(4)
    with (
        Loader(pictures, 4, "cpu", augment=Compose([RandomHorizontalFlip(0.5)])) as loader,
        pickle.loads(pickle.dumps(loader)) as twin,
    ):
        assert torch.equal(next(iter(loader))[0], next(iter(twin))[0])


def test_a_loader_lists_what_it_has_not_the_options_that_are_fixed():
    with loader_of() as loader:
        listed = [name for name in dir(loader) if not name.startswith("_")]
        assert all(hasattr(loader, name) for name in listed)
        assert "epoch" in listed
        assert "weights" not in listed


# -- keywords of a DataLoader ----------------------------------------------------------------------


def test_shuffle_is_an_order():
    with loader_of(shuffle=True) as one, loader_of(order="shuffled") as other:
        assert [y.tolist() for _, y in one] == [y.tolist() for _, y in other]
    with pytest.raises(InputError, match="shuffle=True with order='time'"):
        loader_of(shuffle=True, order="time")


def test_needless_keywords_are_accepted_with_one_note():
    with pytest.warns(UserWarning, match="Loader needs no") as caught:
        loader_of(num_workers=4, pin_memory=True).close()
    assert [note.filename for note in caught] == [__file__] * 2
    assert "needs no num_workers" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader_of(num_workers=4, pin_memory=True).close()


@pytest.mark.parametrize(
    ("word", "fix"),
    [("sampler", "samples="), ("collate_fn", "as_tuple="), ("generator", "seed=0"), ("batchsize", "batch_size=")],
)  # fmt: skip
def test_other_keywords_are_answered(word, fix):
    with pytest.raises(InputError) as caught:
        loader_of(**{word: 1})
    assert word in caught.value.given
    assert fix in f"{caught.value.allowed} {caught.value.fix}"


# -- tuples and names --------------------------------------------------------------------------------


def test_unpacking_a_batch_says_what_to_type_and_dicts_work():
    with loader_of({"x": X, "y": Y}) as loader:
        batch = next(iter(loader))
        with pytest.raises(InputError, match=r"as_tuple=\('x', 'y'\)"):
            [x + y for x, y in loader]
        with pytest.raises(InputError, match="as_tuple"):
            _first, *_ = batch
    assert list(batch) == ["x", "y"]
    assert [name for name in batch] == ["x", "y"]  # noqa: C416  the loop is what is tested
    assert {**batch}.keys() == dict(batch).keys() == {"x", "y"}
    assert dict(**batch)["x"] is batch["x"]
    assert sorted(batch) == ["x", "y"]
    assert "x" in batch
    assert len(batch) == 2
    assert (batch | {"z": 1}).keys() == {"x", "y", "z"}
    assert isinstance(pickle.loads(pickle.dumps(batch)), Batch)
    a, b = batch.values()
    assert a is batch["x"]
    assert b is batch["y"]


def test_a_compiled_function_may_loop_over_a_batch():
    def total(batch):
        return sum(batch[name].float().sum() for name in batch)

    with loader_of({"x": X, "y": Y}) as loader:
        batch = next(iter(loader))
    compiled = torch.compile(total, backend="eager", fullgraph=True)
    assert compiled(batch) == total(batch)


def test_as_tuple_loads_and_yields_these_fields_only():
    data = {"x": X, "y": Y, "z": X, "mz": [np.arange(i) for i in range(N)]}
    with loader_of(data, as_tuple=("y", "x")) as loader:
        assert [column.field for column in loader.columns] == ["y", "x"]
        for y, x in loader:
            assert torch.equal(x, X[y])
    with loader_of(data, as_tuple=["x"]) as loader:
        assert torch.equal(torch.cat([x for (x,) in loader]), X)
    with loader_of(data, as_tuple=("mz", "mz/offsets")) as loader:
        values, offsets = next(iter(loader))
        assert len(values) == offsets[-1]
    wrongs = {"x": "('x',)", ("X", "y"): "('x', 'y')", True: "('x', 'y', 'z', 'mz')"}
    for wrong, fix in ((wrong, f"as_tuple={fix}") for wrong, fix in wrongs.items()):
        with pytest.raises(InputError) as caught:
            loader_of(data, as_tuple=wrong)
        assert caught.value.fix == fix
    with pytest.raises(InputError, match="not loaded"):
        loader_of(data, as_tuple=("x",), fields=["y"])


def test_a_field_with_a_slip_is_a_key_error_that_names_it():
    with loader_of({"features": X, "label": Y}) as loader:
        batch = next(iter(loader))
    for slip, name in (("feature", "features"), ("Label", "label"), ("LABEL", "label")):
        with pytest.raises(KeyError) as caught:
            batch[slip]
        assert str(caught.value).endswith(f"Try: batch[{name!r}]")
    assert batch.get("feature") is None
    with pytest.raises(InputError, match=r"Try: fields=\['label'\]"):
        loader_of({"features": X, "label": Y}, fields=["Label"])


# -- a fresh epoch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [None, 100])
def test_a_loop_after_a_break_is_a_whole_new_epoch(chunk_bytes):
    data = {"x": X, "y": Y}
    with (
        loader_of(data, shuffle=True, chunk_bytes=chunk_bytes) as loader,
        loader_of(data, shuffle=True, chunk_bytes=chunk_bytes) as other,
    ):
        for batch in loader:
            if batch.step == 1:
                break
        state = loader.state_dict()
        other.set_epoch(1)
        again = [batch["y"].tolist() for batch in loader]
        assert again == [batch["y"].tolist() for batch in other]
        assert sorted(y for batch in again for y in batch) == list(range(N))
        assert loader.epoch == 2
        # Resuming is asked for.
        loader.load_state_dict(state)
        assert [batch.step for batch in loader] == [2]
        loader.set_epoch(5, 1)
        assert [batch.step for batch in loader] == [1, 2]


def test_making_an_iterator_moves_nothing():
    with loader_of() as loader:
        next(iter(loader))
        iter(loader)
        assert loader.state_dict()["batch"] == 1
        assert len(list(loader.remaining_batches())) == 2


# -- samples -------------------------------------------------------------------------------------------


def test_splits_give_what_samples_takes():
    for split in (
        split_randomly(N),
        split_by_group(np.arange(N)),
        split_by_time(np.arange(N), np.arange(N)),
    ):
        for name in ("train", "val", "test"):
            chosen = getattr(split, name)
            assert chosen.tolist() == samples_of(split, name).tolist()
            if len(chosen):
                with (
                    loader_of(samples=chosen) as loader,
                    loader_of(samples=split == split[chosen[0]]) as masked,
                ):
                    assert loader.samples.tolist() == masked.samples.tolist() == chosen.tolist()
        for codes in (split, np.asarray(split)):
            with pytest.raises(InputError) as caught:
                loader_of(samples=codes)
            assert "split" in caught.value.given
            assert "train" in caught.value.fix


def test_samples_by_the_name_of_a_split():
    split = np.array([0, 1, 2, 0] * 5, np.uint8)
    with loader_of({"y": Y, "split": split}, samples="val") as loader:
        assert loader.samples.tolist() == np.flatnonzero(split == 1).tolist()
    with pytest.raises(InputError, match="no field 'split'"):
        loader_of(samples="val")


# -- HDF5 with groups ------------------------------------------------------------------------------------


@pytest.fixture
def grouped(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for name, count in (("train", 12), ("test", 5)):
            file[f"{name}/x"] = np.full((count, 2), count, np.float32)
            file[f"{name}/deep/y"] = np.arange(count)
        file["train"].create_dataset("v", (12,), dtype=h5py.vlen_dtype("f4"))
    return tmp_path / "data.h5"


@pytest.mark.parametrize(("group", "count"), [("train", 12), ("test", 5), ("/test/", 5)])
def test_a_group_of_a_file_is_a_store_of_its_own(grouped, group, count):
    with open_store(grouped, group=group) as store:
        assert set(store.fields) == {"x", "deep/y"}
        assert store.num_samples == count
        with pickle.loads(pickle.dumps(store)) as twin:
            assert twin.read_rows("deep/y", 0, count).tolist() == list(range(count))
    with Loader(grouped, 4, "cpu", group=group, fields=["x"]) as loader:
        assert {float(value) for batch in loader for value in batch["x"].flatten()} == {count}


def test_a_group_that_is_not_there_is_named(grouped, tmp_path):
    with pytest.raises(StoreError, match="Try: group='test'"):
        open_store(grouped, group="tests")
    with pytest.raises(InputError, match="plain HDF5"):
        loader_of(group="train")


def test_a_file_whose_arrays_differ_in_length_opens_by_rows_or_fields(grouped):
    with pytest.raises(StoreError, match="rows=12"):
        Loader(grouped, 4, "cpu")
    with Loader(grouped, 4, "cpu", fields=["test/x"]) as loader:
        assert len(loader.samples) == 5
    with Loader(grouped, 4, "cpu", as_tuple=("train/x", "train/deep/y")) as loader:
        assert sum(len(x) for x, _ in loader) == 12
    with pytest.raises(InputError, match="leave rows out"):
        loader_of(rows=12)


def test_what_is_left_aside_is_said_once(grouped):
    with pytest.warns(UserWarning, match="left aside") as caught:
        Loader(grouped, 4, "cpu", rows=12).close()
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "'train/v' has rows of different lengths" in text
    assert "'test/x' has 5 rows, not 12: left aside" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loader(grouped, 4, "cpu", rows=12).close()


@pytest.mark.parametrize(
    ("sampler", "typed"),
    [
        (torch.utils.data.RandomSampler(X), {"shuffle": True}),
        (torch.utils.data.WeightedRandomSampler(torch.ones(N), N), {"weights": torch.ones(N)}),
        (torch.utils.data.SubsetRandomSampler([5, 2]), {"shuffle": True, "samples": [2, 5]}),
    ],
)
def test_a_sampler_of_torch_is_answered_with_what_does_the_same(sampler, typed):
    with pytest.raises(InputError) as error:
        loader_of(sampler=sampler)
    advised = eval(f"dict({error.value.fix})", {"np": np, "sampler": sampler})
    assert advised.keys() == typed.keys()
    assert all(np.array_equal(advised[name], typed[name]) for name in typed)
    assert len(list(loader_of(**advised))) == len(list(loader_of(**typed)))


def test_text_in_memory_is_a_field_that_is_not_loaded_by_itself_and_that_is_said(monkeypatch):
    names = np.array([f"sample {number}" for number in range(N)])
    pairs = [(x, name, y) for x, name, y in zip(X, names, Y, strict=True)]
    ways = [{"x": X, "name": names}, {"x": X, "name": names.astype(object)}, (X, names, Y), pairs]
    for data in ways:
        monkeypatch.setattr(arguments, "_told", set())
        with pytest.warns(UserWarning, match="leaves text out of its batches") as told:
            loader = loader_of(data)
        with loader:
            batch = next(iter(loader))
            assert set(batch) == {"x"} if isinstance(data, dict) else len(batch) == 2
        (text,) = (name for name, info in loader.store.fields.items() if info.encoding == "utf8")
        assert f"fields={[text]}" in str(told[0].message)
    with loader_of({"x": X, "name": names}, fields=["name"]) as loader:
        batch = next(iter(loader))
        end = int(batch["name/offsets"][1])
        assert bytes(batch["name"][:end].numpy()).decode() == names[0]


def test_the_dataset_of_a_dataloader_is_asked_for_in_vain_and_told_where_it_is():
    with loader_of() as loader, pytest.raises(AttributeError, match=r"len\(loader.samples\)"):
        len(loader.dataset)


def test_only_fields_of_classes_are_offered_for_balance():
    with pytest.raises(InputError) as error:
        loader_of({"x": X, "kind": Y % 3}, balance="label")
    assert error.value.fix == "balance='kind'"
    with pytest.raises(InputError) as error:
        loader_of({"x": X}, balance="label")
    assert error.value.fix == "leave balance out"


@pytest.mark.parametrize("augment", [[RandomHorizontalFlip()], RandomHorizontalFlip(), len])
def test_what_is_no_augmentation_is_refused_before_the_first_batch(augment):
    with pytest.raises(InputError, match="augment is"):
        loader_of({"images": torch.zeros(N, 3, 4, 4)}, augment=augment)
