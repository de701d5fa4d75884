"""`pack_from`: Python samples of any form become a store."""

from __future__ import annotations

import pickle
import sys
import threading
from types import ModuleType

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stoker import PackOptions, open_store, pack, pack_from
from stoker.errors import InputError, QualityError
from stoker.loader.loader import Loader
from stoker.packing import driver
from stoker.sources import dataset as dataset_source
from stoker.sources.contract import PartContext
from stoker.sources.dataset import samples_source
from stoker.sources.samples import collect
from stoker.sources.tables import TableSource
from stoker.store.fields import Dense, Ragged

HERE = PackOptions(jobs=1)


class Items(Dataset):
    def __init__(self, count=200):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {
            "x": torch.full((2, 3), float(i)),
            "mz": np.arange(i % 4, dtype="f4"),
            "label": i,
            "flag": i % 2 == 0,
            "name": f"sämple {i}",
        }


class Locked(Items):
    def __init__(self, count):
        super().__init__(count)
        self.lock = threading.Lock()


def check(path, count):
    with open_store(path) as store:
        assert store.num_samples == count
        for i in (0, count // 2, count - 1):
            sample = store.read_sample(i)
            assert sample["x"].tolist() == np.full((2, 3), i).tolist()
            assert sample["mz"].tolist() == list(range(i % 4))
            assert sample["label"] == i
            assert sample["flag"] == (i % 2 == 0)
            assert sample["name"] == f"sämple {i}"


@pytest.mark.parametrize(
    "make", [Items, Locked, lambda n: [Items(n)[i] for i in range(n)], lambda n: (Items(n)[i] for i in range(n))]
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:stoker.Loader leaves text out")
def test_samples_of_any_kind_become_a_store(tmp_path, make):
    result = pack_from(make(200), tmp_path / "store", options=HERE)
    assert result.manifest.num_samples == 200
    check(tmp_path / "store", 200)
    with Loader(tmp_path / "store", 16, "cpu", shuffle=True) as loader:
        for batch in loader:
            assert torch.equal(batch["x"][:, 0, 0].long(), batch["label"])


@pytest.mark.parametrize(
    "workers",
    ["forked", pytest.param("started", marks=pytest.mark.slow)],  # which import torch
)
def test_worker_processes_give_the_same_store(workers, tmp_path, request):
    if workers == "started":
        request.getfixturevalue("started_packers")
    one = pack_from(Items(), tmp_path / "one", options=HERE)
    two = pack_from(Items(), tmp_path / "two", options=PackOptions(jobs=2))
    assert [shard.checksum for shard in one.manifest.shards] == [
        shard.checksum for shard in two.manifest.shards
    ]
    assert len(one.manifest.shards) == 4


class Tenths(Items):
    def __getitem__(self, i):
        return {"x": torch.tensor([i / 10]), "y": np.float32(1) / np.float32(i != 150)}


def test_worker_processes_make_samples_under_the_settings_of_the_script(tmp_path):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with np.errstate(divide="raise"), samples_source(Tenths()) as (source, _):
            (_, _, part, *_) = source.prepare(tmp_path).parts  # of 64 samples each
    finally:
        torch.set_default_dtype(before)
    # As in a process without these settings.
    made = source.build(part, PartContext(tmp_path, lambda _: None, {}))
    assert made.fields["x"].values[:, 0].tolist() == [i / 10 for i in range(128, 192) if i != 150]
    assert [refusal.line for refusal in made.refused] == [150]


def test_arrays_become_a_store(tmp_path):
    x, y = torch.rand(30, 4), np.arange(30)
    pack_from({"x": x, "y": y}, tmp_path / "dict")
    pack_from((x, y), tmp_path / "tuple")
    with open_store(tmp_path / "dict") as one, open_store(tmp_path / "tuple") as two:
        assert np.array_equal(one.read_rows("x", 0, 30), x.numpy())
        assert np.array_equal(two.read_rows("targets", 0, 30), y)


def test_an_interrupted_pack_goes_on(tmp_path, monkeypatch):
    asked = []

    class Counted(Items):
        def __getitem__(self, i):
            asked.append(i)
            return super().__getitem__(i)

    built = driver._build_part

    def third_fails(source, folder, scratch, job, part, poison):
        if part.index == 2:
            raise KeyboardInterrupt
        return built(source, folder, scratch, job, part, poison)

    monkeypatch.setattr(driver, "_build_part", third_fails)
    with pytest.raises(KeyboardInterrupt):
        pack_from(Counted(), tmp_path / "store", options=HERE)
    monkeypatch.setattr(driver, "_build_part", built)
    asked.clear()
    pack_from(Counted(), tmp_path / "store", options=HERE)
    probes = np.unique(np.linspace(0, 199, 64, dtype=int)).tolist()
    assert asked == [*probes, *range(128, 200)]
    check(tmp_path / "store", 200)


def test_a_store_is_kept_while_its_dataset_is_the_same(tmp_path):
    values = np.arange(100)
    assert not pack_from({"v": values}, tmp_path / "store").reused
    assert pack_from({"v": values}, tmp_path / "store").reused
    values[51] = -1  # none of those that are looked at
    again = pack_from({"v": values}, tmp_path / "store")
    assert not again.reused
    assert "100 samples" in again.reason
    with open_store(tmp_path / "store") as store:
        assert store.read_rows("v", 51, 52).tolist() == [-1]
    assert not pack_from(iter([1, 2]), tmp_path / "stream").reused
    assert not pack_from(iter([1, 2]), tmp_path / "stream").reused


def test_tensors_are_known_by_their_values_wherever_they_lie(tmp_path):
    made = [TensorDataset(torch.arange(400.0).reshape(200, 2), torch.zeros(200)) for _ in "123"]
    assert not pack_from(made[0], tmp_path / "store", options=HERE).reused
    assert pack_from(made[1], tmp_path / "store", options=HERE).reused
    made[2].tensors[1][51] = -1  # none of those that are looked at
    assert not pack_from(made[2], tmp_path / "store", options=HERE).reused
    other = TensorDataset(made[0].tensors[0].reshape(200, 1, 2), made[0].tensors[1])
    assert not pack_from(other, tmp_path / "store", options=HERE).reused


class Broken(Items):
    def __getitem__(self, i):
        if i in (7, 150):
            raise ValueError("broken")
        return super().__getitem__(i)


def test_a_sample_that_raises_is_refused_by_its_number(tmp_path):
    with pytest.raises(QualityError, match="Broken sample 7: ValueError: broken"):
        pack_from(Broken(), tmp_path / "store", options=HERE)
    assert not (tmp_path / "store").exists()
    options = PackOptions(jobs=1, on_bad="quarantine")
    result = pack_from(Broken(), tmp_path / "store", options=options)
    assert [refusal.line for refusal in result.refused] == [7, 150]
    assert result.manifest.num_samples == 198


class Gone(Items):
    """A whole part that cannot be read."""

    def __getitem__(self, i):
        if 64 <= i < 128:
            raise OSError("gone")
        return super().__getitem__(i)


def test_a_part_without_any_sample_is_left_out(tmp_path):
    options = PackOptions(jobs=1, on_bad="quarantine", bad_budget="50%")
    result = pack_from(Gone(), tmp_path / "store", options=options)
    assert result.manifest.num_samples == 136
    assert len(result.refused) == 64


class Late(Items):
    """One longer sample, which is none of those looked at."""

    def __getitem__(self, i):
        return {"x": np.zeros(4 if i == 102 else 3)}


def test_a_field_that_turns_out_ragged_is_named(tmp_path):
    assert 102 not in np.linspace(0, 199, dataset_source._PROBES, dtype=int)
    with pytest.raises(InputError, match=r"\(4,\)[\s\S]*Try: ragged=\['x'\]"):
        pack_from(Late(), tmp_path / "store", options=HERE)
    pack_from(Late(), tmp_path / "store", options=HERE, ragged=["x"])
    with open_store(tmp_path / "store") as store:
        assert [len(store.read_values("x", i)) for i in (101, 102)] == [3, 4]


@pytest.mark.parametrize(
    ("samples", "given"),
    [
        ([], "has no samples"),
        (3, "given a int"),
        ({"x": np.zeros(3), "y": np.zeros(2)}, "these rows"),
        (DataLoader(Items()), "yields batches"),
        ([{"x": 1}, {"y": 1}], "sample 1 has the fields y"),
        ([{"x": 1}, {"x": 1.5}], "not int64 in all samples"),
        ([{"x": None}], "NoneType"),
        ([{"x": 1}, {"x": "a"}], "text in some"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(tmp_path, samples, given):
    with pytest.raises(InputError) as caught:
        pack_from(samples, tmp_path / "store")
    assert given in caught.value.given
    assert not (tmp_path / "store").exists()


def test_ragged_names_fields(tmp_path):
    for wrong in ("mz", ["MZ"]):
        with pytest.raises(InputError, match=r"Try: ragged=\['mz'\]"):
            pack_from(Items(), tmp_path / "store", ragged=wrong)


@given(
    st.lists(st.lists(st.integers(-9, 9), max_size=4), min_size=1, max_size=8),
    st.sampled_from(["i4", "f8", "u1"]),
)
def test_collected_samples_are_dense_or_ragged_and_nothing_is_lost(rows, dtype):
    samples = [{"v": np.array(row).astype(dtype)} for row in rows]
    field = collect(samples)["v"]
    if len({len(row) for row in rows}) == 1:
        assert isinstance(field, Dense)
        assert np.array_equal(field.values, np.stack([sample["v"] for sample in samples]))
    else:
        assert isinstance(field, Ragged)
        found = np.split(field.values, field.offsets[1:-1])
        assert all(
            np.array_equal(one, sample["v"]) for one, sample in zip(found, samples, strict=True)
        )


def test_pack_is_told_of_files_and_samples_what_takes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.csv").write_text("x,y\n1,2\n")
    (tmp_path / "photos").mkdir()
    for source, options, fix in (
        ("a b.csv", {"target": "y"}, "stoker pack table 'a b.csv' out --target y"),
        ([tmp_path / "a b.csv"], {}, f"stoker pack table '{tmp_path}/a b.csv' out"),
        ("photos", {}, "stoker pack images photos out"),
        ("a_b.csv", {}, "'a b.csv'"),
        ({"x": np.zeros(3)}, {}, "stoker.pack_from(SAMPLES, OUT)"),
        ([], {}, "stoker.pack_from(SAMPLES, OUT)"),
        (TableSource(("a b.csv",)), {"target": "y"}, "leave target out"),
    ):
        with pytest.raises(InputError, match="pack was given") as caught:
            pack(source, "out", **options)
        assert caught.value.fix == fix
    assert not (tmp_path / "out").exists()


def test_classes_of_a_script_in_a_started_process_are_stored_by_value(monkeypatch):
    """multiprocessing calls the script `__mp_main__` in a process that it spawns: no worker of a pack finds that."""
    script = ModuleType("__mp_main__")
    exec("class Items:\n    def __len__(self):\n        return 3\n", vars(script))
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "__mp_main__", script)
        code = dataset_source.pickled(script.Items())
        cloudpickle.unregister_pickle_by_value(script)
    assert len(pickle.loads(code)) == 3
