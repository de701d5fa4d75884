"""Baselines of the same run: boosted trees, least squares, and the evaluation of tables beside them."""

from __future__ import annotations

import numpy as np
import pytest

from run_makers import make_store, settings_for
from stoker.errors import InputError
from stoker.recipes import baselines
from stoker.recipes.baselines import Boosting, Ridge, summary_rows, thin_samples
from stoker.recipes.run import as_json, run_recipe
from stoker.recipes.tabular.evaluation import find_quiet
from stoker.report import read_run_log
from stoker.runs.evaluation import Evaluation
from stoker.store.fields import Dense, Series
from stoker.strict_json import json_text
from store_makers import write_store

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _as_many_trees_as_a_run_has(monkeypatch):
    monkeypatch.setattr(baselines, "_ROUNDS", 60)


def rings(count: int, seed: int):
    """Two classes that no line can divide."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, 4))
    return rows, (np.hypot(rows[:, 0], rows[:, 1]) > 1.18).astype(np.int64)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_boosted_trees_learn_what_a_line_cannot(num_classes):
    rows, labels = rings(800, 0)
    labels = labels + (rows[:, 2] > 1) * (num_classes - 2) * (labels == 1)
    tested, wanted = rings(400, 1)
    wanted = wanted + (tested[:, 2] > 1) * (num_classes - 2) * (wanted == 1)
    chances = Boosting(rows, labels, num_classes).predict(tested)
    np.testing.assert_allclose(chances.sum(axis=1), 1.0)
    assert (chances.argmax(axis=1) == wanted).mean() > 0.9
    line = Ridge(rows, np.eye(num_classes)[labels]).predict(tested)
    assert (line.argmax(axis=1) == wanted).mean() < 0.7


def test_boosted_trees_of_numbers_and_the_same_again():
    rng = np.random.default_rng(0)
    rows = rng.uniform(-2, 2, size=(900, 3))
    values = np.stack([np.sin(2 * rows[:, 0]), 100 * rows[:, 1] ** 2], axis=1)
    made = Boosting(rows[:700], values[:700], None).predict(rows[700:])
    errors = np.abs(made - values[700:]).mean(axis=0)
    assert (errors < 0.2 * values.std(axis=0)).all()
    again = Boosting(rows[:700], values[:700], None).predict(rows[700:])
    np.testing.assert_array_equal(made, again)


def test_columns_without_spread_and_single_rows_do_no_harm():
    rows = np.zeros((20, 3))
    chances = Boosting(rows, np.arange(20) % 2, 2).predict(rows[:1])
    np.testing.assert_allclose(chances, 0.5, atol=0.1)
    assert np.isfinite(Ridge(rows, np.ones((20, 1))).predict(np.full((1, 3), 1e9))).all()


def test_summaries_of_windows_are_those_of_the_windows_themselves(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 2)).astype("f4")
    ends = np.arange(8, 48, 3)
    time = np.arange(50, dtype=np.int64)
    fields = {
        "bars": Series(
            rows=rows,
            time=time,
            ends=ends,
            window=6,
            gap=np.zeros(50, np.uint8),
            columns=("a", "b"),
            duration_ns=1,
        )
    }
    store = write_store(tmp_path / "s", [fields, fields])
    samples = np.array([0, 3, len(ends) + 1])
    made = summary_rows(store, "bars", samples)
    for row, sample in zip(made, samples, strict=True):
        window = rows[ends[sample % len(ends)] - 6 : ends[sample % len(ends)]].astype("f8")
        want = np.concatenate([window[-1], window.mean(axis=0), window.std(axis=0)])
        np.testing.assert_allclose(row, want, rtol=1e-5, atol=1e-6)


def test_dense_windows_are_summarised_in_parts(tmp_path, monkeypatch):
    windows = np.random.default_rng(0).normal(size=(11, 5, 2)).astype("f4")
    store = write_store(tmp_path / "s", [{"features": Dense(windows)}])
    samples = np.arange(11)
    whole = summary_rows(store, "features", samples)
    monkeypatch.setattr(baselines, "_PART_BYTES", 3 * 8 * 10)
    monkeypatch.setattr(baselines, "_PART_ROWS", 4)
    np.testing.assert_array_equal(summary_rows(store, "features", samples), whole)
    line = Ridge(whole, windows[:, -1].astype("f8"))
    made = baselines.answer_samples(line, store, "features", samples)
    np.testing.assert_allclose(made, line.predict(whole))


def test_thinned_samples_keep_their_order():
    kept = thin_samples(np.arange(100), 30, seed=1)
    assert len(kept) == 30
    assert (np.diff(kept) > 0).all()
    assert thin_samples(np.arange(3), 30, seed=1).tolist() == [0, 1, 2]


# -- a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    store = make_store("tabular", folder / "store")
    settings = settings_for("tabular", store.path, folder / "run", "training.epochs=3")
    return run_recipe(settings, device="cpu")


def test_a_run_is_evaluated_beside_its_baselines(run):
    made = run.evaluation
    assert made is not None
    assert made.num_samples > 10
    assert list(made.baselines) == ["majority", "boosted trees"]
    assert made.metrics["accuracy"] == pytest.approx(run.test["accuracy"])
    assert made.metrics["balanced_accuracy"] == pytest.approx(run.test["balanced_accuracy"])
    assert made.metrics["log_loss"] == pytest.approx(run.test["loss"], rel=1e-4)
    low, high = made.intervals["macro_f1"]
    assert low <= made.metrics["macro_f1"] <= high
    assert made.baselines["boosted trees"]["macro_f1"] > made.baselines["majority"]["macro_f1"]
    assert made.confusion is not None
    assert sum(map(sum, made.confusion.counts)) == made.num_samples
    assert made.importance
    assert list(made.importance.values()) == sorted(made.importance.values(), reverse=True)
    # An example of a table says which row it is, and what its most important columns hold.
    top = list(made.importance)[:3]
    assert made.examples
    assert all(
        each.key.startswith("sample ") and all(name in each.key for name in top)
        for each in made.examples
    )


def test_the_log_and_the_json_of_a_run_hold_the_evaluation(run):
    (line,) = [line for line in read_run_log(run.run_dir / "run.jsonl") if line.event == "result"]
    logged = Evaluation.from_json(line.values["evaluation"])
    assert logged is not None
    assert logged.verdict == run.evaluation.verdict
    assert "NaN" not in json_text(as_json(run))


def test_a_regression_is_evaluated_in_its_own_units(tmp_path):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, 3)).astype("f4")
    targets = (1000 + 50 * features[:, 0]).astype("f4")
    store = write_store(tmp_path / "s", [{"features": Dense(features), "targets": Dense(targets)}])
    settings = settings_for("tabular", store.path, tmp_path / "r", "training.epochs=12")
    run = run_recipe(settings, device="cpu")
    made = run.evaluation
    assert made is not None
    assert made.compared_by == ("mae", False)
    assert made.metrics["mae"] == pytest.approx(run.test["mae"], rel=1e-4)
    assert made.metrics["r2"] == pytest.approx(run.test["r2"], abs=1e-3)
    assert made.baselines["linear"]["mae"] < 2 < made.baselines["median"]["mae"]
    assert made.worth == "worse"  # the targets are a line
    assert "not worth training" in made.verdict
    best = max(made.importance, key=made.importance.__getitem__)
    assert best == "column 0"


def test_the_class_without_alarm_is_found_or_named():
    assert find_quiet(["Attack", " Benign "], None)[0] == 1
    assert find_quiet(["normal", "benign"], None) == (None, ())
    assert find_quiet(["a", "b"], "b") == (1, ())
    with pytest.raises(InputError, match="'quiet_class' is 'x'") as error:
        find_quiet(["a", "b"], "x")
    assert error.value.fix == "quiet_class='a'"
