"""Predictions from a checkpoint: the model's own outputs, in order, every sample once, in any store."""

from __future__ import annotations

import json
import tracemalloc

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from recipe_loops import judge_job
from run_makers import OPTIONS, make_store, settings_for
from stoker.errors import CorruptError, InputError, StoreError
from stoker.loader.loader import Loader
from stoker.ownership import SIGNATURE
from stoker.packing import PackOptions, pack
from stoker.recipes.answers import find_samples, predict_file
from stoker.recipes.catalogue import choose_recipe
from stoker.recipes.inference import (
    find_training_store,
    load_trained,
    quantize_trained,
)
from stoker.recipes.run import run_recipe
from stoker.sources.tables import TableSource
from stoker.store.fields import Dense
from stoker.train.checkpoint import Checkpoints
from stoker.train.precision import choose_precision
from stoker.train.predict import Predicted, check_ending, evaluate, write_predictions
from stoker.train.quantize import pack_int8, quantize_dynamic, unpack_int8
from store_makers import write_store

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A store and a short run of each kind, made once."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def get(kind):
        if kind not in made:
            store = make_store(kind, folder / f"{kind}-store")
            settings = settings_for(kind, store.path, folder / kind, "training.epochs=1")
            made[kind] = store, run_recipe(settings, device="cpu")
        return made[kind]

    return get


def read(path):
    table = pq.read_table(path)
    columns = {}
    for name in table.column_names:
        values = table[name].combine_chunks()
        flat = values.flatten() if hasattr(values.type, "list_size") else values
        columns[name] = flat.to_numpy(zero_copy_only=False).reshape(len(table), -1).squeeze()
    return table, columns


def job_of(kind, store):
    """The job as training made it: built from the store, not from the blueprint."""
    chosen = choose_recipe(settings_for(kind, store.path, store.path))
    return chosen.make_job(store, 0)


# -- the same outputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", OPTIONS)
def test_predictions_are_the_models_outputs_in_order_every_sample_once(
    kind, device, runs, tmp_path
):
    # Wanted from the CPU: cuDNN may round the inputs of its LSTM and convolutions to TF32.
    close = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-2}
    store, run = runs(kind)
    job = job_of(kind, store)
    job.model.load_state_dict(Checkpoints(run.run_dir).load(run.best).state["model"])
    job.model.eval()
    augment = None if job.augmentation is None else job.augmentation.validation()
    report = predict_file(
        load_trained(run.best), store.path, tmp_path / "p.parquet", batch_size=7, device=device
    )
    assert report.num_rows == store.num_samples
    _, got = read(tmp_path / "p.parquet")
    assert got["sample"].tolist() == list(range(store.num_samples))
    wanted = []
    with Loader(store, 50, CPU, fields=job.fields, augment=augment) as loader, torch.no_grad():
        for batch in loader:
            outputs = job.model(job.unpack(batch)[0])
            wanted.append(outputs if isinstance(outputs, dict) else {"": outputs})
    whole = {name: torch.cat([part[name] for part in wanted]) for name in wanted[0]}
    if kind in ("forex", "stateful"):
        chances = whole["direction"].softmax(dim=1).numpy()
        np.testing.assert_allclose(got["probability"], chances, **close)
        names = np.array(["down", "neutral", "up"])
        assert got["class"].tolist() == names[got["probability"].argmax(axis=1)].tolist()
        np.testing.assert_allclose(got["swing"], whole["swing"].numpy(), **close)
    elif kind.startswith("massspec"):
        np.testing.assert_allclose(got["spectrum"], whole["spectrum"].numpy(), **close)
    elif kind == "segmentation":
        classes = whole[""].argmax(dim=1).flatten(1).numpy()
        assert (got["mask"] == classes).mean() > 0.99  # a tie may fall either way
    elif kind == "tabular":
        chances = whole[""].softmax(dim=1).numpy()
        np.testing.assert_allclose(got["probability"], chances, **close)
        assert got["class"].tolist() == got["probability"].argmax(axis=1).tolist()
    else:
        scaled = whole[""] * job.model.target_scale + job.model.target_center
        np.testing.assert_allclose(got["value"], scaled.numpy().squeeze(), **close)


@pytest.mark.parametrize("kind", ["forex", "massspec", "segmentation", "tabular", "series"])
def test_no_targets_are_needed(kind, runs, tmp_path):
    store, run = runs(kind)
    trained = load_trained(run.best)
    bare = {
        name: make_bare(store, name)
        for name in trained.facts["inputs"]
    }  # fmt: skip
    new = write_store(tmp_path / "bare", [bare])
    assert not {"targets", "masks", "mz"} & set(new.fields)
    predict_file(trained, new.path, tmp_path / "new.parquet", device="cpu")
    predict_file(trained, store.path, tmp_path / "old.parquet", device="cpu")
    answers, with_names = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("new", "old"))
    assert answers.to_pydict() == with_names.select(answers.column_names).to_pydict()


def make_bare(store, name):
    """One field of a store, back in memory."""
    from stoker.store.fields import Ragged, Series

    info = store.fields[name]
    if info.kind == "dense":
        columns = tuple(info.columns) if info.columns else None
        return Dense(store.read_rows(name, 0, store.num_samples), columns)
    if info.kind == "ragged":
        parts = [
            store.read_ragged(name, number, number + 1)[0] for number in range(store.num_samples)
        ]
        return Ragged(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))
    return Series(
        rows=store.read_series(name, "rows"),
        time=store.read_series(name, "time"),
        ends=store.read_series(name, "ends"),
        window=info.window,
        gap=store.read_series(name, "gap"),
        columns=tuple(info.columns),
        duration_ns=info.duration_ns,
    )


def test_splits(runs, tmp_path):
    store, run = runs("tabular")
    trained = load_trained(run.best)
    parts = [find_samples(store, trained, name) for name in ("train", "val", "test")]
    job = job_of("tabular", store)
    for part, name in zip(parts, ("train", "val", "test"), strict=True):
        assert part.tolist() == job.samples[name].tolist()
    assert sorted(np.concatenate(parts).tolist()) == list(range(store.num_samples))
    predict_file(trained, store.path, tmp_path / "t.parquet", split="test", device="cpu")
    assert read(tmp_path / "t.parquet")[1]["sample"].tolist() == parts[2].tolist()
    with pytest.raises(InputError, match="--split is 'tests'"):
        find_samples(store, trained, "tests")
    fields = {"features": make_bare(store, "features")}
    other = write_store(tmp_path / "other", [fields])
    with pytest.raises(InputError, match="has no split, and is not the store"):
        find_samples(other, trained, "test")
    with_split = write_store(
        tmp_path / "split", [fields | {"split": Dense((np.arange(200) % 3).astype("u1"))}]
    )
    assert find_samples(with_split, trained, "val").tolist() == list(range(1, 200, 3))


def test_other_columns_and_missing_fields_are_refused(runs, tmp_path):
    store, run = runs("tabular")
    trained = load_trained(run.best)
    values = store.read_rows("features", 0, 10)
    swapped = write_store(tmp_path / "a", [{"features": Dense(values, tuple("bacdefg"))}])
    with pytest.raises(InputError, match="'a' was trained on, 'b' stands there"):
        predict_file(trained, swapped.path, tmp_path / "p.parquet", device="cpu")
    missing = write_store(tmp_path / "b", [{"x": Dense(values)}])
    with pytest.raises(InputError, match="has no field 'features'; it holds x"):
        predict_file(trained, missing.path, tmp_path / "p.parquet", device="cpu")
    assert not (tmp_path / "p.parquet").exists()


def test_the_repairs_of_training_are_made_on_new_data(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(400, 3))
    values[rng.random(400) < 0.02, 1] = 1e15
    label = (values[:, 0] > 0).astype(int)
    rows = "\n".join(
        f"{a:.6g},{b:.6g},{c:.6g},{y}" for (a, b, c), y in zip(values, label, strict=True)
    )
    (tmp_path / "t.csv").write_text(f"a,b,c,label\n{rows}\n")
    source = TableSource((tmp_path / "t.csv",), target="label")
    clip = "clip:0.065,0.935@b"
    pack(source, tmp_path / "clean", PackOptions(jobs=1, repairs=(clip, "robust")))
    # As it comes in one day, with no gate in front: no names, no repairs, 1e15 in it.
    table = np.array([line.split(",")[:3] for line in rows.splitlines()], "f8").astype("f4")
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        file["features"] = table
    settings = settings_for("tabular", tmp_path / "clean", tmp_path / "run")
    trained = load_trained(run_recipe(settings, device="cpu").best)
    assert len(trained.facts["repairs"]["features"]) == 2
    packed = predict_file(trained, tmp_path / "clean", tmp_path / "a.parquet", device="cpu")
    made = predict_file(trained, tmp_path / "raw.h5", tmp_path / "b.parquet", device="cpu")
    assert "as packed" in packed.notes[0]
    assert "made here as in training (clip:0.065,0.935@b, robust" in made.notes[0]
    assert pq.read_table(tmp_path / "a.parquet") == pq.read_table(tmp_path / "b.parquet")
    pack(source, tmp_path / "asinh", PackOptions(jobs=1, repairs=(clip, "asinh")))
    with pytest.raises(InputError, match="b, asinh; the model was trained on clip"):
        predict_file(trained, tmp_path / "asinh", tmp_path / "c.parquet", device="cpu")


# -- the file ------------------------------------------------------------------------------------


def test_the_file_says_where_it_comes_from(runs, tmp_path):
    store, run = runs("segmentation")
    predict_file(load_trained(run.best), store.path, tmp_path / "p.parquet", device="cpu")
    schema = pq.read_schema(tmp_path / "p.parquet")
    about = json.loads(schema.metadata[b"stoker"])
    assert about["recipe"] == "segmentation"
    assert about["checkpoint"] == str(run.best)
    assert json.loads(schema.field("mask").metadata[b"shape"]) == [32, 32]


def rows(count, size=4, number=200):
    for low in range(0, count, number):
        ids = np.arange(low, min(low + number, count))
        yield Predicted(ids, {"x": np.repeat(ids[:, None], size, axis=1).astype("f4")})


def test_memory_does_not_grow_with_the_samples(tmp_path):
    write_predictions(tmp_path / "warm.parquet", rows(200), {})
    peaks = []
    for count in (20_000, 80_000):
        tracemalloc.start()
        assert write_predictions(tmp_path / "p.parquet", rows(count, 128), {}) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
    file = pq.ParquetFile(tmp_path / "p.parquet")
    assert 1 < file.num_row_groups < 40
    assert file.read(["sample"])["sample"].to_pylist() == list(range(80_000))


def test_a_broken_pass_leaves_no_file(tmp_path):
    def breaks():
        yield from rows(400)
        raise RuntimeError("in the middle")

    (tmp_path / "p.parquet").write_text(f"older, {SIGNATURE}")
    with pytest.raises(RuntimeError):
        write_predictions(tmp_path / "p.parquet", breaks(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["p.parquet"]
    assert (tmp_path / "p.parquet").read_text() == f"older, {SIGNATURE}"
    (tmp_path / "mine.parquet").write_text("mine")
    with pytest.raises(InputError, match="stoker did not write it"):
        write_predictions(tmp_path / "mine.parquet", rows(5), {})
    write_predictions(tmp_path / "p.parquet", rows(5), {})
    write_predictions(tmp_path / "p.parquet", rows(6), {})
    with pytest.raises(InputError, match="no sample to predict"):
        write_predictions(tmp_path / "q.parquet", [], {})
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        write_predictions(tmp_path / "file" / "q.parquet", rows(5), {})


def test_a_model_with_other_rows_is_refused(runs, tmp_path):
    from stoker.train.predict import predict

    store, run = runs("tabular")
    made = load_trained(run.best).made
    with (
        Loader(store, 20, CPU, fields=made.fields) as loader,
        pytest.raises(InputError, match="gives 3 rows of 'x' for 20 samples"),
    ):
        next(predict(made.model, loader, made.unpack, lambda *_: {"x": torch.zeros(3)}))


# -- checkpoints ---------------------------------------------------------------------------------


def test_checkpoints_that_are_not_of_a_recipe(runs, tmp_path):
    Checkpoints(tmp_path).save({"model": {}}, 3, 0, {}, {"a": 1})
    with pytest.raises(InputError, match="a Trainer that was called directly"):
        load_trained(tmp_path / "step-000000003.pt")
    _, run = runs("tabular")
    with pytest.raises(InputError, match="is a checkpoint of tabular"):
        load_trained(run.best, "massspec-teacher")
    cut = tmp_path / "cut.pt"
    cut.write_bytes(run.best.read_bytes()[:-100])
    with pytest.raises(CorruptError):
        load_trained(cut)
    with pytest.raises(StoreError, match="No such file"):
        load_trained(tmp_path / "none.pt")


@pytest.mark.parametrize("kind", ["forex", "tabular", "segmentation"])
def test_evaluate_is_the_loop_by_hand(kind, runs):
    store, run = runs(kind)
    job = job_of(kind, store)
    job.model.load_state_dict(Checkpoints(run.run_dir).load(run.best).state["model"])
    augment = None if job.augmentation is None else job.augmentation.validation()
    with Loader(
        store, 13, CPU, fields=job.fields, samples=job.samples["val"], augment=augment
    ) as loader:
        found = evaluate(
            job.model, loader, job.unpack, job.criterion, job.metrics,
            choose_precision("fp32", CPU, job.model), CPU,
        )  # fmt: skip
    by_hand = judge_job(job, store, job.model, 13)
    assert found.pop("loss") > 0
    assert found == pytest.approx(by_hand)
    assert job.model.training is False


# -- int8 ----------------------------------------------------------------------------------------


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 24, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(24)
        self.head = torch.nn.Linear(24, 5)

    def forward(self, inputs):
        return self.head(self.norm(self.lstm(inputs)[0][:, -1]))


@pytest.mark.parametrize("seed", range(3))
def test_packed_int8_weights_give_the_very_same_int8_model(seed, tmp_path):
    torch.manual_seed(seed)
    model, inputs = Mixed(), torch.randn(9, 6, 3)
    small, report = quantize_dynamic(model, [inputs], api="torch.ao", num_runs=1)
    packed = pack_int8(model.state_dict(), report.modules)
    kept = [name for name, value in packed.items() if isinstance(value, torch.Tensor)]
    assert {"norm.weight", "head.bias", "lstm.bias_ih_l0"} <= set(kept)
    assert packed["lstm.weight_hh_l1"]["int8"].dtype == torch.int8
    Checkpoints(tmp_path).save(packed, 1, 0)
    again = Mixed()
    again.load_state_dict(unpack_int8(dict(Checkpoints(tmp_path).load().state)))
    second, _ = quantize_dynamic(again, [inputs], api="torch.ao", num_runs=1)
    assert torch.equal(small(inputs), second(inputs))
    assert not torch.equal(small(inputs), model(inputs))


def test_int8_of_zeros_and_of_one_weight():
    state = {
        "a.weight": torch.zeros(2, 3),
        "b.weight": torch.tensor([[-0.25]]),
        "b.bias": torch.ones(1),
    }
    again = unpack_int8(pack_int8(state, ["a", "b"]))
    for name, value in state.items():
        assert torch.equal(again[name], value)


def test_an_int8_checkpoint_predicts_like_any_other(runs, tmp_path):
    store, run = runs("forex")
    trained = load_trained(run.best)
    report, metric = quantize_trained(trained, tmp_path / "int8.pt", store.path, batch_size=32)
    assert metric == "loss"
    assert report.metric_after == pytest.approx(report.metric_before, rel=0.05)
    assert report.metric_before == pytest.approx(run.test["loss"], rel=1e-4)
    assert report.latency_before is not None
    small = load_trained(tmp_path / "int8.pt")
    predict_file(small, store.path, tmp_path / "a.parquet", split="test")
    predict_file(trained, store.path, tmp_path / "b.parquet", split="test", device="cpu")
    (_, a), (_, b) = read(tmp_path / "a.parquet"), read(tmp_path / "b.parquet")
    assert a["sample"].tolist() == b["sample"].tolist()
    assert 0 < np.abs(a["probability"] - b["probability"]).max() < 0.05
    with pytest.raises(InputError, match="int8 weights already"):
        quantize_trained(small, tmp_path / "twice.pt")
    blind, no_metric = quantize_trained(trained, tmp_path / "blind.pt")
    assert (blind.latency_before, no_metric) == (None, None)
    assert (tmp_path / "blind.pt").stat().st_size < run.best.stat().st_size


def test_the_log_remembers_the_store(runs, tmp_path):
    store, run = runs("tabular")
    assert find_training_store(run.best) == store.path.resolve()
    assert find_training_store(tmp_path / "x.pt") is None


def test_a_run_without_a_best_checkpoint_names_one_that_is_there(tmp_path):
    """A store too small for a validation split has no best.pt: the newest checkpoint is named."""
    for step in (2, 4):
        (tmp_path / f"step-{step:09}.pt").touch()
    with pytest.raises(InputError) as told:
        load_trained(tmp_path / "best.pt")
    assert "without validation" in str(told.value)
    assert told.value.fix == str(tmp_path / "step-000000004.pt")


@pytest.mark.parametrize(("others", "fix"), [((), "one.csv"), (("/",), "one")])
def test_another_ending_is_answered_with_one_that_is_taken(others, fix):
    with pytest.raises(InputError) as told:
        check_ending("one.png", others)
    assert told.value.fix == fix
    check_ending(fix, others)
