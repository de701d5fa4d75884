"""Answers for input whose truth is known are evaluated, as at the end of the run."""

from __future__ import annotations

import numpy as np
import pytest

from run_makers import make_store, settings_for
from stoker.packing import PackOptions, pack
from stoker.recipes.answers import predict_file
from stoker.recipes.classification import AnswerJudge, label_places
from stoker.recipes.inference import load_trained
from stoker.recipes.run import run_recipe
from stoker.recipes.tabular.options import TabularOptions
from stoker.recipes.tabular.recipe import TabularRecipe
from stoker.sources.bars import BarsSource
from stoker.store.fields import Dense
from stoker.store.reader import open_store
from store_makers import write_store
from test_bars import WINDOWS, write_symbol

pytestmark = pytest.mark.usefixtures("one_thread")
SEEN = "training samples are among them: --split test says what the model is worth"


@pytest.mark.parametrize("kind", ["forex", "massspec", "segmentation", "tabular", "series"])
def test_test_samples_of_a_store_are_evaluated_as_in_the_run(tmp_path, kind):
    store = make_store(kind, tmp_path / "store")
    settings = settings_for(kind, store.path, tmp_path / "run", "training.epochs=1")
    run = run_recipe(settings, device="cpu")
    trained = load_trained(run.best)
    made = {
        split: predict_file(
            trained, store.path, tmp_path / f"{split}.parquet", split=split, device="cpu"
        ).evaluation
        for split in ("test", "all")
    }
    found, wanted = made["test"], run.evaluation
    assert found.num_samples == wanted.num_samples
    assert found.compared_by == wanted.compared_by
    shared = found.metrics.keys() & wanted.metrics.keys()
    assert len(shared) >= (1 if kind == "series" else 4)
    for name in shared:
        assert found.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-4, nan_ok=True)
    if found.confusion is not None:
        assert found.confusion.counts == wanted.confusion.counts
    assert SEEN not in found.notes
    assert SEEN in made["all"].notes
    assert made["all"].num_samples == store.num_samples


def test_bars_whose_future_is_known_are_evaluated(tmp_path):
    (tmp_path / "raw").mkdir()
    write_symbol(tmp_path / "raw", "EURUSD", 1500)
    source = BarsSource((tmp_path / "raw",), windows=WINDOWS, horizon=4)
    pack(source, tmp_path / "store", PackOptions(jobs=1))
    settings = settings_for("forex", tmp_path / "store", tmp_path / "run", "training.epochs=1")
    trained = load_trained(run_recipe(settings, device="cpu").best)
    report = predict_file(trained, tmp_path / "raw", tmp_path / "raw.csv", device="cpu")
    with open_store(tmp_path / "store") as store:
        times = store.read_rows("time", 0, store.num_samples)
        until = trained.facts["bars"]["scalers"]["EURUSD"]["M5"]["fitted_until_ns"]
        later = np.flatnonzero(times > until)
        options, facts = trained.chosen.options, trained.facts
        truth = trained.chosen.recipe.read_truth(store, later, trained.made, options, facts)
    # Of 300 bars, the last four have no future yet; those of training say nothing about new ones.
    found = report.evaluation
    assert found.num_samples == len(later)
    assert found.baselines["buy and hold"]["gross_pips"] == pytest.approx(
        truth.mean() / trained.facts["labels"]["pip"], rel=1e-4
    )
    assert set(found.groups) == {"class", "side"}
    assert any(
        "of the span that was trained on: answered, not evaluated" in n for n in report.notes
    )


def test_answers_for_a_table_count_false_alarms_as_the_run_does():
    facts = {"is_classifier": True, "class_names": ["attack", "Benign"]}
    judge = TabularRecipe().make_judge(TabularOptions(), facts)
    judge.update({"probability": np.eye(2)[[0, 0, 1, 1]]}, np.array([0, 1, 1, 1]))
    found = judge.evaluate()
    assert found.metrics["false_alarms_per_1000"] == pytest.approx(1000 / 3)
    assert "'Benign'" in found.notes[0]


def test_classes_of_another_store_are_found_by_name(tmp_path):
    made = write_store(tmp_path / "s", [{"labels": Dense(np.arange(3))}])
    made.manifest.attributes["classes"] = ["dog", "cat", "owl"]
    numbers = np.array([0, 1, 2, -1, 7])
    assert label_places(made, numbers, ["cat", "dog"]).tolist() == [1, 0, -1, -1, -1]
    assert label_places(made, numbers, ["dog", "cat", "owl"]).tolist() == numbers.tolist()


def test_answers_without_a_known_truth_are_not_evaluated():
    judge = AnswerJudge(["a", "b"])
    judge.update({"probability": np.eye(2)}, np.array([-1, -1]))
    assert judge.evaluate() is None
    judge.update({"probability": np.eye(2)}, np.array([0, -1]))
    assert judge.evaluate().num_samples == 1


def test_measured_spectra_in_a_library_are_compared(tmp_path):
    """The library that was packed, raw: the same similarities as of its store."""
    store = make_store("massspec", tmp_path / "store")
    settings = settings_for("massspec", store.path, tmp_path / "run", "training.epochs=1")
    trained = load_trained(run_recipe(settings, device="cpu").best)
    raw, packed = (
        predict_file(trained, tmp_path / name, tmp_path / f"{name}.parquet", device="cpu")
        for name in ("store.msp", "store")
    )
    assert raw.evaluation.num_samples == packed.evaluation.num_samples == store.num_samples
    assert raw.evaluation.metrics == pytest.approx(packed.evaluation.metrics, rel=1e-3)
    assert any("with a measured spectrum" in note for note in raw.notes)
    report = predict_file(trained, tmp_path / "store.msp", tmp_path / "out.msp", device="cpu")
    assert report.evaluation.metrics == raw.evaluation.metrics
    assert "\n0.0 " not in (tmp_path / "out.msp").read_text()  # no ion has a mass of 0
    (tmp_path / "new.smi").write_text("CCO ethanol\n")
    bare = predict_file(trained, tmp_path / "new.smi", tmp_path / "bare.csv", device="cpu")
    assert bare.evaluation is None
