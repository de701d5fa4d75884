"""Forex evaluated in time: baselines that know no future, costs, folds with purge and embargo."""

from __future__ import annotations

import math

import numpy as np
import pytest
from typer.testing import CliRunner

from run_makers import make_store, settings_for
from stoker.cli.main import app
from stoker.errors import InputError
from stoker.recipes.forex.evaluation import last_values
from stoker.recipes.forex.recipe import ForexOptions, ForexRecipe, split_store
from stoker.recipes.run import run_recipe
from stoker.recipes.walk_forward import merge_folds, walk_forward
from stoker.runs.evaluation import Evaluation
from stoker.runs.reading import read_run
from stoker.store.fields import Dense
from stoker.strict_json import parse_json
from store_makers import write_store
from test_recipe_forex import make_fields

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    fields = make_fields(420)
    fields.pop("split", None)
    return write_store(tmp_path_factory.mktemp("forex") / "store", [fields])


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return run_recipe(settings_for("forex", store.path, folder / "r"), device="cpu")


def test_a_run_is_evaluated_by_what_it_would_have_earned(run):
    made = run.evaluation
    assert made is not None
    assert list(made.baselines) == ["buy and hold", "random", "last value", "linear regression"]
    assert made.compared_by == ("net_pips", True)
    assert made.metrics["accuracy"] == pytest.approx(run.test["accuracy"])
    paid = made.metrics["gross_pips"] - made.metrics["net_pips"]
    assert paid == pytest.approx(made.metrics["traded"] * 1.0)
    assert set(made.groups) == {"class", "side", "horizon", "part of the test span"}
    parts = made.groups["part of the test span"].values()
    whole = sum(part["net_pips"] * part["samples"] for part in parts) / made.num_samples
    assert whole == pytest.approx(made.metrics["net_pips"])
    trades = sum(side["trades"] for side in made.groups["side"].values())
    assert trades == pytest.approx(made.metrics["traded"] * made.num_samples)
    assert (
        made.baselines["buy and hold"]["net_pips"] == made.baselines["buy and hold"]["gross_pips"]
    )
    assert "test samples" in made.verdict


def test_the_last_value_is_one_that_was_known(tmp_path):
    """Labels that end after a decision are changed: the last value of that decision is the same."""
    fields = make_fields(420)
    changed = dict(fields)
    cut = int(np.asarray(fields["time"].values)[250])
    returns = np.array(fields["targets"].values)
    later = np.asarray(fields["label_time"].values) > cut
    changed["targets"] = Dense(np.where(later[:, None], 9.0, returns).astype("f4"))
    one = write_store(tmp_path / "one", [fields])
    two = write_store(tmp_path / "two", [changed])
    samples = np.arange(420)
    known = np.asarray(fields["time"].values) <= cut
    first, second = last_values(one, samples, 0), last_values(two, samples, 0)
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(first[known], second[known])
    assert (second[~known] == 9.0).any()


def test_the_future_changes_no_fit_and_no_split_of_a_fold(tmp_path):
    """Everything after the test span of a fold is changed: scalers, limits and samples are the same."""
    fields = make_fields(420)
    options = ForexOptions(d_model=8, heads=2, layers=1, fold=(2, 4))
    one = write_store(tmp_path / "one", [fields])
    samples, _ = split_store(one, options)
    last = int(samples["test"][-1])
    changed = dict(fields)
    returns = np.array(fields["targets"].values)
    returns[last + 1 :] = 5.0
    changed["targets"] = Dense(returns)
    two = write_store(tmp_path / "two", [changed])
    jobs = [ForexRecipe().make_job(each, options, seed=0) for each in (one, two)]
    for name in ("train", "val", "test"):
        np.testing.assert_array_equal(jobs[0].samples[name], jobs[1].samples[name])
    assert jobs[0].unpack.keywords["plan"] == jobs[1].unpack.keywords["plan"]
    for one_weight, two_weight in zip(
        jobs[0].model.state_dict().values(), jobs[1].model.state_dict().values(), strict=True
    ):
        assert one_weight.equal(two_weight)


@pytest.mark.parametrize("count", [2, 5])
def test_folds_walk_forward_without_overlap(store, count):
    time = store.read_rows("time", 0, store.num_samples)
    label_time = store.read_rows("label_time", 0, store.num_samples)
    seen, last_size = [], 0
    for number in range(1, count + 1):
        samples, notes = split_store(store, ForexOptions(fold=(number, count), embargo=3))
        train, val, test = samples["train"], samples["val"], samples["test"]
        assert label_time[train].max() <= time[val].min()
        assert label_time[val].max() <= time[test].min()
        assert len(train) > last_size
        last_size = len(train)
        seen.append(test)
        assert f"fold {number} of {count}" in notes[0]
    together = np.concatenate(seen)
    assert len(np.unique(together)) == len(together)
    assert len(together) > 0.4 * store.num_samples


def test_a_walk_forward_trains_every_fold_and_merges_them(store, tmp_path):
    settings = settings_for("forex", store.path, tmp_path / "w", "training.epochs=1")
    walk = walk_forward(settings, 2, device="cpu")
    made = walk.evaluation
    assert made is not None
    assert made.num_samples == sum(run.evaluation.num_samples for run in walk.runs)
    assert list(made.groups["fold"]) == ["1", "2"]
    assert (tmp_path / "w" / "fold-2" / "best.pt").exists()
    logged = Evaluation.from_json(read_run(tmp_path / "w").result["evaluation"])
    assert logged is not None
    assert logged.verdict == made.verdict
    with pytest.raises(InputError, match="has checkpoints of an earlier run"):
        walk_forward(settings, 2, device="cpu")


def test_merged_folds_are_means_over_samples():
    folds = [
        Evaluation(
            size, ("x", True), {"x": value}, {"x": (value - 1, value + 1)}, {"b": {"x": 0.0}},
            {"side": {"long": {"trades": trades, "hit_rate": value}}},
        )
        for size, value, trades in ((100, 1.0, 10.0), (300, 3.0, 0.0))
    ]  # fmt: skip
    made = merge_folds(folds)
    assert made.metrics == {"x": 2.5}
    assert made.groups["side"]["long"] == {"trades": 10.0, "hit_rate": 1.0}
    low, high = made.intervals["x"]
    assert (high - low) / 2 == pytest.approx(math.hypot(0.25, 0.75))


def test_folds_of_a_recipe_without_time_are_refused(tmp_path):
    store = make_store("tabular", tmp_path / "s")
    settings = settings_for("tabular", store.path, tmp_path / "w")
    with pytest.raises(InputError, match="has no option 'fold'") as error:
        walk_forward(settings, 3)
    assert error.value.fix == "leave --folds out"


def test_the_command_prints_one_document(store, tmp_path):
    options = ["d_model=8", "heads=2", "layers=1"]
    typed = [
        "train",
        "--store",
        str(store.path),
        "--run-dir",
        str(tmp_path / "w"),
        "--device",
        "cpu",
    ]
    typed += ["--set", "recipe.name=forex", "--set", "training.epochs=1", "--json", "--folds", "2"]
    for option in options:
        typed += ["--set", f"recipe.options.{option}"]
    done = CliRunner().invoke(app, typed)
    assert done.exit_code == 0, done.output
    told = parse_json(done.stdout)
    assert len(told["folds"]) == 2
    assert told["evaluation"]["compared_by"] == "net_pips"
