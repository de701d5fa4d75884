"""A forex run over lanes is evaluated as any other: its samples are put back into the order of time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from run_makers import make_store, settings_for
from stoker.recipes.forex.recipe import ForexRecipe
from stoker.recipes.run import run_recipe

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"d_model": 8, "heads": 2, "layers": 1}


def test_the_order_of_lanes_changes_nothing(tmp_path):
    store = make_store("forex", tmp_path / "store")
    job = ForexRecipe().make_job(store, SMALL, seed=1)
    samples = job.samples["test"]
    rng = np.random.default_rng(2)
    scores = torch.from_numpy(rng.normal(size=(len(samples), 3)).astype("f4"))
    wanted = torch.from_numpy(rng.integers(0, 3, len(samples)))
    found = []
    for ids in (None, rng.permutation(len(samples))):
        final = job.final_metrics()
        for part in np.array_split(np.arange(len(samples)) if ids is None else ids, 4):
            told = {"direction": wanted[part]}
            rows = scores[part]
            if ids is not None:  # with the rows of a lane that has ended among them
                told = {
                    "direction": torch.cat([wanted[part], torch.zeros(1, dtype=torch.int64)]),
                    "sample": torch.from_numpy(np.append(samples[part], -1)),
                }
                rows = torch.cat([rows, torch.full((1, 3), 9.0)])
            final.update({"direction": rows}, told)
        found.append(final.evaluate(job.model, torch.device("cpu"), samples))
    plain, lanes = found
    assert lanes.metrics == pytest.approx(plain.metrics, nan_ok=True)
    assert lanes.baselines.keys() == plain.baselines.keys()
    for name, values in plain.baselines.items():
        assert lanes.baselines[name] == pytest.approx(values, nan_ok=True)
    assert lanes.intervals == plain.intervals
    assert f"{len(samples):,} of {len(samples):,} test samples: the walk over lanes" in " ".join(
        lanes.notes
    )


def test_a_run_over_lanes_ends_in_an_evaluation(tmp_path):
    store = make_store("stateful", tmp_path / "store")
    settings = settings_for(
        "stateful", store.path, tmp_path / "run", "recipe.options.lanes=4", "recipe.options.max_gap_rows=10000",
        "training.batch_size=4", "training.epochs=1",
    )  # fmt: skip
    run = run_recipe(settings, device="cpu")
    assert run.evaluation is not None
    assert run.evaluation.compared_by == ("net_pips", True)
    assert run.evaluation.num_samples > 0
    assert any("the walk over lanes" in note for note in run.evaluation.notes)
    assert "linear regression" in run.evaluation.baselines
