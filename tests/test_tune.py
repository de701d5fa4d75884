"""`stoker tune`: the search on made-up machines, the measuring on small real jobs, and all ranks agreed."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
import math
import os
import random
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import stoker
from forked import Forked
from fresh_process import in_a_fresh_process
from run_makers import make_store, settings_for
from stoker.compat.max_batch import find_max_batch_size
from stoker.errors import InputError, StokerError
from stoker.machine import probe
from stoker.measure.gauge import Gauge
from stoker.measure.search import (
    LEAST_GAIN,
    Outcome,
    UpdateShape,
    choose,
    climb,
    keeps_update,
    largest_fitting,
    shape_ladder,
)
from stoker.recipes.run import open_run
from stoker.store.fields import Dense
from stoker.tune.job import _CHUNK_FACTORS, Tuned, _chunk_sizes, describe, tune_job
from stoker.tune.loaders import LoaderChoice, _LoaderBench, first_workers, tune_loader
from stoker.tune.trial import Effort, JobBench, Measured
from stoker.tune.tuned_page import curve_cells, verdict
from stoker.units import GIB, format_bytes
from store_makers import write_store
from tune_rank import Limited, decide

QUICK = Effort(0.06, 3)
shapes = st.builds(UpdateShape, st.integers(1, 700), st.integers(1, 40))


# -- ladders ---------------------------------------------------------------------------------------


@given(shapes, st.integers(1, 100_000))
def test_a_ladder_rises_keeps_the_update_below_it_and_doubles_above(configured, most):
    ladder = shape_ladder(configured, most)
    sizes = [shape.batch_size for shape in ladder]
    whole = configured.samples_per_update
    assert sizes == sorted(set(sizes))
    assert configured in ladder
    assert all(size <= most or size == configured.batch_size for size in sizes)
    for shape in ladder:
        if shape.batch_size <= whole:
            assert keeps_update(shape, configured)
        else:
            assert shape.accumulation_steps == 1
            assert not keeps_update(shape, configured)
    for one, other in itertools.pairwise(sizes):
        assert other <= 2 * one or other > most
    assert sizes[0] == 1 or configured.batch_size > most
    if configured.batch_size <= most:
        assert 2 * sizes[-1] > most or sizes[-1] < whole


def test_a_ladder_of_powers_of_two_keeps_the_update_exactly():
    ladder = shape_ladder(UpdateShape(32, 4), 600)
    assert [(s.batch_size, s.accumulation_steps) for s in ladder] == [
        (1, 128), (2, 64), (4, 32), (8, 16), (16, 8), (32, 4), (64, 2), (128, 1), (256, 1), (512, 1),
    ]  # fmt: skip


# -- climbing --------------------------------------------------------------------------------------


class Made:
    """A made-up machine: seconds per step of a size, and how much fits. Counts what is asked of it."""

    def __init__(self, rates: list[float], cap: int) -> None:
        self.rates, self.cap, self.asked = rates, cap, []

    def __call__(self, level: int) -> Outcome:
        self.asked.append(level)
        if level > self.cap:
            return Outcome(None, False, "out of memory")
        return Outcome(self.rates[level], True)


rate_lists = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=12)


@given(rate_lists, st.data())
def test_nothing_untried_is_offered_nothing_is_tried_twice_and_it_ends(rates, data):
    start = data.draw(st.integers(0, len(rates) - 1))
    made = Made(rates, data.draw(st.integers(-1, len(rates) - 1)))
    tried = climb(len(rates), start, made)
    assert made.asked == list(tried)
    assert len(set(made.asked)) == len(made.asked) <= len(rates)
    assert made.asked[0] == start
    chosen = choose(tried, start)
    if made.cap < 0:
        assert chosen is None
        assert set(tried) == set(range(start + 1))
        return
    assert chosen is not None
    assert tried[chosen].fits
    fitting = [outcome.rate for outcome in tried.values() if outcome.fits]
    assert tried[chosen].rate * (1 + LEAST_GAIN) >= max(fitting)
    if tried[start].fits and chosen != start:
        assert tried[chosen].rate >= tried[start].rate * (1 + LEAST_GAIN) * (1 - 1e-12)


def saturating(fixed: float, per_sample: float, sizes: list[int]) -> list[float]:
    """Rates of a step that costs `fixed` seconds and `per_sample` more: rising, ever more slowly."""
    return [size / (fixed + per_sample * size) for size in sizes]


costs = st.tuples(st.floats(1e-5, 1.0), st.floats(1e-6, 1e-2))


@given(costs, shapes, st.integers(1, 10**6))
def test_the_knee_is_found(cost, configured, most):
    ladder = shape_ladder(configured, most)
    rates = saturating(*cost, [shape.batch_size for shape in ladder])
    start = ladder.index(configured)
    tried = climb(len(ladder), start, Made(rates, len(ladder)))
    chosen = choose(tried, start)
    # Every further step gains less than 2 %, and less each time: what is left above adds up to 5 %.
    # (Steps smaller than a doubling, at the end of an odd accumulation, may stop earlier.)
    steps = [b.batch_size / a.batch_size for a, b in itertools.pairwise(ladder)]
    if all(step == 2 for step in steps):
        assert rates[chosen] >= 0.95 * max(rates)
        assert chosen >= start
        above = tried.get(chosen + 1)
        assert chosen + 1 == len(ladder) or above.rate < rates[chosen] * (1 + LEAST_GAIN)


@given(costs, shapes, st.integers(1, 10**5), st.data())
def test_more_memory_never_means_a_smaller_batch_or_a_lower_rate(cost, configured, most, data):
    ladder = shape_ladder(configured, most)
    rates = saturating(*cost, [shape.batch_size for shape in ladder])
    start = ladder.index(configured)
    caps = sorted(data.draw(st.lists(st.integers(0, len(ladder)), min_size=2, max_size=2)))
    less, more = (choose(climb(len(ladder), start, Made(rates, cap)), start) for cap in caps)
    assert less <= more
    assert rates[less] <= rates[more]
    assert less <= caps[0]


def test_a_size_that_did_not_fit_or_may_not_be_taken_is_not_chosen():
    tried = {0: Outcome(10.0, True), 1: Outcome(20.0, True), 2: Outcome(40.0, False, "too big")}
    assert choose(tried, 0) == 1
    assert choose(tried, 0, allowed=lambda level: level == 0) == 0
    assert choose(tried, 0, allowed=lambda level: level == 2) is None
    assert choose({0: Outcome(100.0, True), 1: Outcome(101.9, True)}, 0) == 0


@given(st.integers(1, 5000), st.integers(0, 6000))
def test_the_largest_that_fits_is_exact_and_was_tried(most, limit):
    tried = []

    def fits(size: int) -> bool:
        assert 1 <= size <= most
        tried.append(size)
        return size <= limit

    found = largest_fitting(most, fits)
    assert found == min(most, limit)
    assert found == 0 or found in tried
    assert len(tried) == len(set(tried)) <= 2 * math.log2(most + 1) + 2


# -- find_max_batch_size ---------------------------------------------------------------------------


def everything(model: nn.Module) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *grads)]


def test_the_name_is_public():
    assert stoker.find_max_batch_size is find_max_batch_size


@pytest.mark.parametrize("limit", [2, 37, 1000])
def test_the_limit_is_found_and_said(limit, capsys):
    assert find_max_batch_size(Limited(limit), (4,), "cpu", max_batch=64) == min(limit, 64)
    assert capsys.readouterr().out == f"Max batch size: {min(limit, 64)}\n"


@pytest.mark.parametrize("has_state", [False, True])
def test_everything_is_afterwards_as_it_was(has_state):
    model = Limited(21)
    model.layers[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if has_state:
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    before, state = everything(model), copy.deepcopy(optimizer.state_dict())
    modes = [module.training for module in model.modules()]
    generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    assert find_max_batch_size(model, (4,), "cpu", optimizer=optimizer, say=lambda _: None) == 21
    after = everything(model)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(generators[0], torch.get_rng_state())
    assert (generators[1] == np.random.get_state()[1]).all()
    assert generators[2] == random.getstate()
    now = optimizer.state_dict()
    assert state["param_groups"] == now["param_groups"]
    assert state["state"].keys() == now["state"].keys()
    for key, values in state["state"].items():
        assert torch.equal(values["momentum_buffer"], now["state"][key]["momentum_buffer"])


def test_the_optimizer_and_mixed_precision_are_part_of_a_trial():
    made, seen = [], []

    class Watched(torch.optim.AdamW):
        def step(self, *args, **kwargs):
            super().step(*args, **kwargs)
            made.append(sum(len(state) for state in self.state.values()))

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        seen.append(outputs.dtype)
        return outputs.square().mean()

    model = Limited(4)
    dtypes = []
    model.layers[0].register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    size = find_max_batch_size(
        model, (4,), "cpu", optimizer=Watched, make_loss=loss, precision="bf16", max_batch=4,
        say=lambda _: None,
    )  # fmt: skip
    assert size == 4
    assert made
    assert all(count > 0 for count in made)
    assert set(dtypes) == {torch.bfloat16}
    assert set(seen) == {torch.float32}  # the loss is always in float32, as in training


def test_a_trial_trains_twice_and_never_on_one_sample_where_two_fit():
    model = Limited(16)
    find_max_batch_size(model, (4,), "cpu", say=lambda _: None)
    assert model.sizes[:4] == [2, 2, 4, 4]
    assert 1 not in model.sizes


def test_when_one_sample_does_not_fit_it_is_an_error():
    with pytest.raises(InputError, match=r"one sample of shape \(4,\) does not fit on cpu"):
        find_max_batch_size(Limited(0), (4,), "cpu")


def test_other_errors_are_raised_and_leave_the_model_as_it_was():
    model = Limited(8)
    before = everything(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        find_max_batch_size(model, (5,), "cpu")
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model), strict=True))


def test_models_with_other_inputs_and_outputs():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, batch):
            found = self.table(batch["words"])
            return {"mean": found.mean(1), "count": len(found)}

    size = find_max_batch_size(
        Words(), (), "cpu", max_batch=9, say=lambda _: None,
        make_inputs=lambda n: {"words": torch.zeros(n, 6, dtype=torch.int64)},
    )  # fmt: skip
    assert size == 9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"margin": 1.0}, "margin is 1.0"),
        ({"input_shape": (0, 3)}, r"input_shape is \(0, 3\)"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_senseless_arguments_are_refused(change, said):
    arguments = {"input_shape": (4,), "device": "cpu"} | change
    with pytest.raises(InputError, match=said):
        find_max_batch_size(Limited(4), **arguments)


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@in_a_fresh_process
def test_on_a_gpu_the_found_size_trains_and_a_much_larger_one_does_not(precision):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((2 << 30) / total)
    try:
        model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)).cuda()
        before = everything(model)
        found = find_max_batch_size(
            model, (4096,), "cuda", precision=precision, margin=0.1, say=lambda _: None
        )
        assert found > 64
        assert all(torch.equal(a, b) for a, b in zip(before, everything(model), strict=True))
        optimizer = torch.optim.AdamW(model.parameters())

        def train(size: int) -> None:
            for _ in range(3):
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                    out = model(torch.randn(size, 4096, device="cuda"))
                nn.functional.cross_entropy(
                    out.float(), torch.zeros(size, device="cuda").long()
                ).backward()
                optimizer.step()
                optimizer.zero_grad()

        train(found)
        with pytest.raises(torch.OutOfMemoryError):
            train(4 * found)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


# -- memory and time -------------------------------------------------------------------------------


def test_the_gauge_sees_what_a_try_takes_and_forgets_it():
    gauge = Gauge(torch.device("cpu"))
    gauge.begin()
    low = gauge.peak_bytes()
    held = np.ones(300 << 20, np.uint8)
    del held
    assert gauge.peak_bytes() >= low + (290 << 20)
    gauge.begin()
    assert gauge.peak_bytes() < low + (100 << 20)
    assert gauge.cap_bytes > gauge.peak_bytes()


def test_the_gauge_expects_memory_in_proportion_to_what_was_seen(monkeypatch):
    monkeypatch.setattr(
        "stoker.measure.gauge.probe", lambda: replace(probe(), ram_available_bytes=1 << 30)
    )
    gauge = Gauge(torch.device("cpu"))
    gauge.begin()
    assert gauge.expect(10**9) == ""  # nothing was seen yet
    held = np.ones(300 << 20, np.uint8)
    gauge.note(100)
    del held
    gauge.begin()
    assert gauge.expect(150) == ""
    assert "by the memory of 100" in gauge.expect(400)


def test_an_effort_without_time_is_refused():
    for seconds in (0, -1, math.inf, math.nan):
        with pytest.raises(InputError, match="seconds"):
            Effort(seconds)


# -- whole jobs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    make_store("tabular", folder / "store").close()
    return folder


def test_a_job_is_tuned_by_running_it(table, one_thread):
    settings = settings_for(
        "tabular", table / "store", table / "run", "training.gradient_accumulation_steps=4"
    )
    for _ in range(4):  # a busy machine may hide a gain for a moment
        tuned = tune_job(settings, device="cpu", effort=QUICK)
        if tuned.changes and tuned.gain > 1.2:
            break
    sizes = [point.shape.batch_size for point in tuned.curve]
    assert tuned.before.shape == UpdateShape(16, 4)
    assert tuned.final.shape in [point.shape for point in tuned.curve]
    # Small batches of a small model cost the same each: half of them are nearly twice as fast.
    assert tuned.changes["training.batch_size"] > 16
    assert tuned.final.shape.samples_per_update == 64
    assert tuned.gain > 1.2
    assert tuned.final.peak_bytes < tuned.final.cap_bytes
    assert "as before: the learning rate stays 0.003" in tuned.notes[0]
    assert sizes == sorted(sizes)
    assert tuned.left_alone["training.capture"] == "there are no CUDA graphs on the CPU"
    assert "threads" in tuned.left_alone["data.num_workers"]
    assert not (table / "run").exists()  # nothing is written
    json.dumps(tuned.to_json())


def test_a_larger_update_is_taken_only_when_asked_for(table, monkeypatch):
    rates = {16: 100.0, 32: 150.0, 64: 220.0, 128: 222.0}
    monkeypatch.setattr(JobBench, "measure", made_up(rates, cap=200))
    settings = settings_for("tabular", table / "store", table / "run")
    kept = tune_job(settings, device="cpu")
    assert kept.changes == {}
    assert kept.final.shape == UpdateShape(16, 1)
    assert "Batches of 64 run at 2.20 times this rate" in kept.notes[1]
    assert "--grow-update" in kept.notes[1]
    grown = tune_job(settings, device="cpu", grow_update=True)
    assert grown.changes == {"training.batch_size": 64}
    assert "lr_rule" in grown.notes[0]
    plain = settings_for("tabular", table / "store", table / "run", "recipe.options.lr_rule=none")
    said = tune_job(plain, device="cpu", grow_update=True).notes[0]
    assert "0.012 by the linear rule" in said
    assert "0.006 by the square root rule" in said


def made_up(
    rates: dict[int, float], cap: int, final_cap: int | None = None, tier: str = "resident"
):
    """Return a `measure` of made-up rates: by batch size, and better for small chunks."""

    def measure(self, settings, effort=None):
        shape = UpdateShape(
            settings.training.batch_size, settings.training.gradient_accumulation_steps
        )
        limit = cap if effort is None else (final_cap or cap)
        about = {"shape": shape, "cap_bytes": cap, "tier": tier, "device_data_bytes": 256 << 20}
        if shape.batch_size > limit:
            return Measured(None, False, "out of memory", **about)
        rate = rates[shape.batch_size]
        chunk = settings.chunk_bytes or 256 << 20
        rate *= {True: 1.0, chunk <= 130 << 20: 1.3, chunk <= 66 << 20: 2.0}[True]
        return Measured(
            rate, True, spread=0.0, peak_bytes=shape.batch_size, step="eager: x", **about
        )

    return measure


@pytest.mark.parametrize(
    ("rates", "spread", "is_noisy"),
    [
        ((100.0, 101.0), 1.14, True),
        ((100.0, 101.0), 0.04, False),
        ((100.0, 50.0), 0.5, False),  # the configured size stays, and nothing comes near
        ((100.0, 110.0), 0.5, True),  # taken, by less than the noise
        ((100.0, 300.0), 0.5, False),
    ],
)
def test_a_measurement_that_is_too_noisy_to_tell_says_so(rates, spread, is_noisy):
    one, two = (
        Measured(rate, True, shape=UpdateShape(*shape), spread=spread)
        for rate, shape in zip(rates, ((16, 2), (32, 1)), strict=True)
    )
    changes = {"training.batch_size": 32} if rates[1] > 102 else {}
    tuned = Tuned(one.shape, (one, two), (), {}, changes, two if changes else one)
    assert ("too noisy to tell" in verdict(tuned)) == is_noisy
    # One meaning of spread, in the line and in the table.
    assert f"spread {curve_cells(tuned)[0][4]}" in describe(one)


def test_a_result_that_does_not_last_is_given_up(table, monkeypatch):
    rates = {16: 100.0, 32: 150.0, 64: 220.0}
    monkeypatch.setattr(JobBench, "measure", made_up(rates, cap=64, final_cap=40))
    settings = settings_for(
        "tabular", table / "store", table / "run", "training.gradient_accumulation_steps=4"
    )
    tuned = tune_job(settings, device="cpu")
    assert tuned.final.shape == UpdateShape(32, 2)
    assert [point.fits for point in tuned.curve] == [True, True, False, False]


def test_where_nothing_that_was_tried_lasts_smaller_sizes_are(table, monkeypatch):
    rates = {2**power: 2.0**power for power in range(9)}
    monkeypatch.setattr(JobBench, "measure", made_up(rates, cap=64, final_cap=3))
    tuned = tune_job(settings_for("tabular", table / "store", table / "run"), device="cpu")
    assert tuned.final.shape == UpdateShape(2, 8)
    assert tuned.changes == {"training.batch_size": 2, "training.gradient_accumulation_steps": 8}


def test_options_are_kept_only_where_they_pay(table, monkeypatch):
    monkeypatch.setattr(
        JobBench, "measure", made_up({16: 100.0, 32: 101.0, 8: 90.0}, cap=999, tier="chunked")
    )
    settings = settings_for("tabular", table / "store", table / "run")
    tuned = tune_job(settings, device="cpu")
    assert [(tried.value, tried.is_kept) for tried in tuned.options] == [
        ("64.0 MiB", True),
        ("128.0 MiB", False),
        ("512.0 MiB", False),
    ]
    assert tuned.changes == {"data.chunk_size_gb": 0.0625}
    assert tuned.gain == pytest.approx(2.0)


def test_when_nothing_fits_the_error_says_what_to_change(table, monkeypatch):
    monkeypatch.setattr(JobBench, "measure", made_up({}, cap=0))
    settings = settings_for("tabular", table / "store", table / "run")
    with pytest.raises(InputError, match="no batch size fits on cpu: with 1 at once out of memory"):
        tune_job(settings, device="cpu")


def test_out_of_memory_is_an_outcome_and_other_errors_are_not(table, one_thread, monkeypatch):
    """A real job whose model runs out of memory above 40 samples."""
    settings = settings_for("tabular", table / "store", table / "run")

    def fail_above(limit: int, error: Exception):
        def hook(module, args):
            first = next(iter(args[0].values())) if isinstance(args[0], dict) else args[0]
            if len(first) > limit:
                raise error

        return hook

    with open_run(settings, device="cpu") as run:
        bench = JobBench(run, QUICK)
        run.job.model.register_forward_pre_hook(
            fail_above(40, torch.OutOfMemoryError("CUDA out of memory"))
        )
        assert bench.measure(settings.changed({"training.batch_size": 32})).fits
        done = bench.measure(settings.changed({"training.batch_size": 64}))
        assert (done.fits, done.rate, done.reason) == (False, None, "out of memory")
        run.job.model.register_forward_pre_hook(fail_above(10, RuntimeError("shapes differ")))
        with pytest.raises(RuntimeError, match="shapes differ"):
            bench.measure(settings)


def test_an_error_that_was_raised_from_running_out_of_memory_counts_as_such(table, monkeypatch):
    settings = settings_for("tabular", table / "store", table / "run")

    def fail(*_):
        raise StokerError("stage 'upload' failed") from torch.OutOfMemoryError("CUDA out of memory")

    with open_run(settings, device="cpu") as run:
        monkeypatch.setattr(JobBench, "_try", fail)
        assert JobBench(run, QUICK).measure(settings).reason == "out of memory"


def test_a_batch_larger_than_the_data_with_drop_last_is_refused(table):
    settings = settings_for(
        "tabular", table / "store", table / "run", "training.batch_size=1000", "data.drop_last=true"
    )
    with pytest.raises(InputError, match="leaves no batch of 1000"):
        tune_job(settings, device="cpu", effort=QUICK)


@pytest.mark.parametrize("now_bytes", [1, 1 << 20, 1_288_490, 16 << 20, 10_000_000_000, 1 << 41])
def test_sizes_of_chunks_are_short_and_allowed_at_every_scale(now_bytes):
    sizes = _chunk_sizes(now_bytes)
    assert [size * GIB / now_bytes for size in sizes] == pytest.approx(_CHUNK_FACTORS, rel=5e-3)
    settings = settings_for("tabular", "store", "run")
    for size in sizes:
        assert len(Decimal(repr(size)).normalize().as_tuple().digits) <= 3
        assert settings.changed({"data.chunk_size_gb": size}).data.chunk_size_gb == size


def test_chunks_are_tried_on_a_real_job(tmp_path, one_thread, monkeypatch):
    monkeypatch.setattr("stoker.tune.job._LEAST_CHUNK_BYTES", 1 << 20)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4_000, 128)).astype("f4")
    fields = {"features": Dense(values), "targets": Dense((values[:, 0] > 0).astype("i8"))}
    write_store(tmp_path / "store", [fields]).close()
    settings = settings_for(
        "tabular", tmp_path / "store", tmp_path / "run",
        "gpu_optimization.chunk_size_gb=0.0012", "training.batch_size=512", "recipe.options.hidden=[8]",
    )  # fmt: skip
    with open_run(settings, device="cpu") as run:
        tuned_at = JobBench(run, QUICK).measure(settings)
    assert tuned_at.tier == "chunked"
    tuned = tune_job(settings, device="cpu", effort=QUICK)
    assert {tried.option for tried in tuned.options} == {"data.chunk_size_gb"}
    # A quarter of this chunk holds no batch: then there is a reason instead of a rate.
    assert all(tried.measured.rate or tried.measured.reason for tried in tuned.options)
    tried_bytes = {tried.value for tried in tuned.options}
    chunk = tuned.changes.get("data.chunk_size_gb")
    assert chunk is None or format_bytes(int(chunk * GIB)) in tried_bytes


def test_lanes_keep_their_batch(tmp_path, one_thread):
    make_store("stateful", tmp_path / "store").close()
    settings = settings_for(
        "stateful", tmp_path / "store", tmp_path / "run", "training.batch_size=4"
    )
    tuned = tune_job(settings, device="cpu", effort=QUICK)
    assert len(tuned.curve) == 1
    assert "lane" in tuned.left_alone["training.batch_size"]
    assert "training.batch_size" not in tuned.changes


# -- loaders of others -----------------------------------------------------------------------------


class Quick(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def test_a_dataset_that_costs_nothing_needs_no_workers():
    def make(num_workers: int, prefetch_factor: int | None):
        assert (prefetch_factor is None) == (num_workers == 0)
        return torch.utils.data.DataLoader(
            Quick(), 4, num_workers=num_workers, prefetch_factor=prefetch_factor
        )

    found = tune_loader(make, lambda batch: None, "cpu", effort=QUICK)
    assert found.choice in [tried.choice for tried in found.tries]
    assert found.choice == LoaderChoice(0, None)  # handing batches over costs more than making them
    assert all(tried.rate > 0 for tried in found.tries)


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [
        (lambda c: 1 + 10 * c.num_workers + (c.prefetch_factor or 0), LoaderChoice(8, 8)),
        (lambda c: 1 + 10 * min(c.num_workers, 3), LoaderChoice(4, 2)),
        (lambda c: 1 + min(c.prefetch_factor or 0, 4), LoaderChoice(2, 4)),
        (lambda c: 100 / c.num_workers if c.num_workers else 50, LoaderChoice(1, 2)),
        (lambda c: 10 * c.num_workers or 100, LoaderChoice(0, None)),
        (lambda c: 7.0, LoaderChoice(2, 2)),
    ],
)
def test_workers_and_batches_ahead_are_searched_up_down_and_at_none(rate, wanted, monkeypatch):
    monkeypatch.setattr(_LoaderBench, "_rates", lambda self, choice: [rate(choice)] * 3)
    machine = replace(probe(), cores_usable=4)
    found = tune_loader(lambda *_: None, lambda batch: None, "cpu", machine=machine)
    assert found.tries[0].choice == LoaderChoice(2, 2)
    assert "started at 2 workers, half of 4 usable cores" in found.reason
    assert found.choice == wanted
    assert ("nothing beats" in found.reason) == (wanted == LoaderChoice(2, 2))
    assert "too noisy" not in found.reason


def test_workers_whose_rates_are_noise_say_so(monkeypatch):
    monkeypatch.setattr(_LoaderBench, "_rates", lambda self, choice: [5.0, 7.0, 9.0])
    found = tune_loader(lambda *_: None, lambda batch: None, "cpu", machine=probe())
    assert "57%, which is too noisy to tell" in found.reason


def test_the_rule_of_s3_8_is_where_the_search_starts():
    machine = probe()
    cores = {None: 1, 1: 1, 2: 1, 4: 2, 7: 3, 16: 8, 64: 8}
    assert {n: first_workers(replace(machine, cores_usable=n)) for n in cores} == cores


def test_a_loader_without_batches_is_refused():
    with pytest.raises(InputError, match="no batch"):
        tune_loader(lambda *_: [], lambda batch: None, "cpu", effort=QUICK)


# -- ranks -----------------------------------------------------------------------------------------


def test_all_ranks_take_what_fits_everywhere_and_add_their_rates(tmp_path):
    results = torch.multiprocessing.get_context("fork").SimpleQueue()

    def be(rank):
        torch.set_num_threads(1)
        decide(rank, str(tmp_path), results)
        os._exit(0)

    ranks = [Forked(["rank"], functools.partial(be, rank)) for rank in range(2)]
    (_, *first), (_, *second) = sorted(results.get() for _ in ranks)
    assert [process.wait(200) for process in ranks] == [0, 0]
    chosen, tried, size, lines = first
    assert chosen == second[0] == 3
    assert tried[3] == (32.0, True, "") == second[1][3]
    assert tried[4] == (None, False, "it did not fit on another rank")
    assert second[1][4] == (None, False, "out of memory")
    assert size == second[2] == 23
    assert (lines, second[3]) == (["Max batch size: 23"], [])  # said once


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_on_a_gpu_capture_is_tried_and_memory_is_what_torch_reserved(table):
    settings = settings_for("tabular", table / "store", table / "run")
    tuned = tune_job(settings, device="cuda", effort=QUICK)
    assert [tried.option for tried in tuned.options] == [
        "training.capture"
    ] or "training.capture" in tuned.left_alone
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0 < tuned.final.peak_bytes <= tuned.final.cap_bytes < total


@pytest.mark.gpu
@pytest.mark.whole_gpu
@in_a_fresh_process
def test_on_a_gpu_a_batch_that_does_not_fit_is_an_outcome_and_is_let_go(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(60_000, 64)).astype("f4")
    fields = {"features": Dense(values), "targets": Dense((values[:, 0] > 0).astype("i8"))}
    write_store(tmp_path / "store", [fields]).close()
    settings = settings_for(
        "tabular", tmp_path / "store", tmp_path / "run", "recipe.options.hidden=[8192]"
    )
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((2 << 30) / total)
    try:
        with open_run(settings, device="cuda") as run:
            bench = JobBench(run, QUICK)
            assert bench.measure(settings.changed({"training.batch_size": 64})).fits
            held = torch.cuda.memory_allocated()
            assert not bench.measure(settings.changed({"training.batch_size": 32_768})).fits
            assert bench.measure(settings.changed({"training.batch_size": 64})).fits
            gc.collect()
            assert torch.cuda.memory_allocated() <= held + (8 << 20)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
