"""Ramps between the quantiles of a column: what an MLP on rows gets beside the scaled values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stoker.errors import InputError
from stoker.recipes.catalogue import describe_job
from stoker.recipes.options import parse_options
from stoker.recipes.scaling import Ramps, fit_ramps
from stoker.recipes.tabular.recipe import TabularOptions, TabularRecipe
from stoker.store.fields import Dense
from stoker.store.reader import open_store
from store_makers import write_store

pytestmark = pytest.mark.usefixtures("one_thread")


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 40), st.integers(1, 4)),
        elements=st.floats(-10, 10, width=32),
    ),
    st.integers(1, 9),
)
def test_a_ramp_goes_from_one_quantile_to_the_next(rows, num_ramps):
    columns, starts, widths = fit_ramps(rows, num_ramps)
    assert (widths > 0).all()
    ramps = Ramps(columns, starts, widths)
    made = ramps(torch.from_numpy(rows)).numpy()
    assert np.array_equal(made[:, : rows.shape[1]], rows)
    past = made[:, rows.shape[1] :]
    assert ((past >= 0) & (past <= 1)).all()
    for column in range(rows.shape[1]):
        own = past[:, columns == column].sum(axis=1)
        assert own.shape == (len(rows),)
        assert (columns == column).sum() <= num_ramps
        # Larger values have gone further; the least has not begun, the largest is behind all of them.
        order = np.argsort(rows[:, column], kind="stable")
        assert (np.diff(own[order]) >= -1e-5).all()
        assert own[order[0]] == 0
        assert own[order[-1]] == pytest.approx((columns == column).sum(), abs=1e-3)


def rows_and_classes(num_rows: int = 240) -> dict:
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(num_rows, 3)) * [1, 100, 0]
    return {
        "features": Dense(rows.astype("f4")),
        "targets": Dense((rows[:, 0] > 0.3).astype("i8")),
    }


def test_a_checkpoint_brings_its_ramps_back(tmp_path):
    write_store(tmp_path / "store", [rows_and_classes()])
    recipe = TabularRecipe()
    with open_store(tmp_path / "store") as store:
        options = {"input_ramps": 8, "hidden": [16]}
        job = recipe.make_job(store, options, seed=1)
        # The third column never moves: it has no ramp.
        assert sorted(set(job.model.ramps.columns.tolist())) == [0, 1]
        assert any("16 ramps beside the columns" in note for note in job.notes)
        facts = describe_job(recipe, job, store)
        made = recipe.rebuild(parse_options(TabularOptions, options, "tabular"), facts)
        made.model.load_state_dict(job.model.state_dict())
        rows = torch.from_numpy(store.gather("features", np.arange(20)))
    job.model.eval(), made.model.eval()
    assert torch.equal(job.model(rows), made.model(rows))


def test_wide_tables_have_fewer_ramps_and_windows_none(tmp_path):
    rng = np.random.default_rng(0)
    wide = {
        "features": Dense(rng.normal(size=(60, 1500)).astype("f4")),
        "targets": Dense(rng.integers(0, 2, 60)),
    }
    write_store(tmp_path / "wide", [wide])
    windows = {
        "features": Dense(rng.normal(size=(60, 8, 2)).astype("f4")),
        "targets": Dense(rng.integers(0, 2, 60)),
    }
    write_store(tmp_path / "windows", [windows])
    small = {"input_ramps": 32, "hidden": [4], "model": "mlp"}
    with open_store(tmp_path / "wide") as store:
        job = TabularRecipe().make_job(store, small, seed=1)
        assert len(job.model.ramps.columns) == 1500 * (4096 // 1500)
    with open_store(tmp_path / "windows") as store:
        assert TabularRecipe().make_job(store, small, seed=1).model.ramps is None
    with pytest.raises(InputError, match="input_ramps"):
        parse_options(TabularOptions, {"input_ramps": -1}, "tabular")
