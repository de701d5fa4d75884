"""The tabular recipe: the gate in front, two networks, bounded outputs, and that it learns."""

from __future__ import annotations

import copy
import os
import re
import subprocess
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import warm_stoker
from stoker.errors import InputError, QualityError
from stoker.loader.batch import Batch
from stoker.loader.loader import Loader
from stoker.recipes.contract import Job
from stoker.recipes.gate import quality_gate
from stoker.recipes.options import parse_options
from stoker.recipes.scaling import OnDevice, RobustScale, fit_robust, training_rows
from stoker.recipes.schedule import MAX_LR_FACTOR, lr_factor
from stoker.recipes.tabular.data import find_inputs, find_task, split_samples
from stoker.recipes.tabular.evaluation import Classify, Regress, _plain
from stoker.recipes.tabular.model import (
    PatchTransformer,
    RowMlp,
    TabularModel,
    bound_outputs,
    set_gain,
)
from stoker.recipes.tabular.recipe import TabularOptions, TabularRecipe
from stoker.store.fields import Dense, Series
from stoker.store.reader import Store, open_store
from store_makers import write_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = {"d_model": 16, "heads": 2, "layers": 1, "patch": 4, "stride": 2, "hidden": [32]}
MINUTE = 60_000_000_000


pytestmark = pytest.mark.usefixtures("one_thread")


def make_job(store: Store, **options: object) -> Job:
    return TabularRecipe().make_job(store, {**SMALL, **options}, seed=1)


def class_table(num_rows: int = 1500, seed: int = 0) -> dict:
    """Seven columns; the product of two of them decides among three classes."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(num_rows, 7)) * [1, 10, 0.01, 1, 100, 1, 1] + [0, 5, 0, 3, 0, 0, 0]
    features = features.astype("f4")
    product = features[:, 0] * (features[:, 1] - 5) / 10
    return {
        "features": Dense(features, tuple("abcdefg")),
        "targets": Dense(np.searchsorted([-0.4, 0.4], product)),
    }


def window_fields(num_samples: int = 900, seed: int = 0) -> dict:
    """Windows of 14 x 3; the target is the mean of the last four rows of the second column."""
    rng = np.random.default_rng(seed)
    windows = rng.normal(size=(num_samples, 14, 3)).astype("f4")
    targets = 40 + 6 * windows[:, -4:, 1].mean(axis=1) + 0.2 * rng.normal(size=num_samples)
    return {"features": Dense(windows), "targets": Dense(targets.astype("f4"))}


def series_fields(num_samples: int = 700, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_samples + 20, 3)).astype("f4")
    ends = np.arange(num_samples) + 14
    values = np.stack([rows[ends - 1, 0], rows[ends - 2, 1] - rows[ends - 1, 1]], axis=1)
    return {
        "M5": Series(
            rows=rows,
            time=np.arange(len(rows)) * 5 * MINUTE,
            ends=ends,
            window=12,
            gap=(rng.random(len(rows)) < 0.1).astype("u1"),
            columns=("x", "y", "z"),
            duration_ns=5 * MINUTE,
        ),
        "time": Dense(ends * 5 * MINUTE),
        "label_time": Dense((ends + 3) * 5 * MINUTE),
        "targets": Dense(values.astype("f4")),
    }


@pytest.fixture(scope="module")
def classes(tmp_path_factory) -> Store:
    return write_store(tmp_path_factory.mktemp("tabular") / "classes", [class_table()])


@pytest.fixture(scope="module")
def windows(tmp_path_factory) -> Store:
    return write_store(tmp_path_factory.mktemp("tabular") / "windows", [window_fields()])


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> Store:
    return write_store(tmp_path_factory.mktemp("tabular") / "series", [series_fields()])


def take(store: Store, job: Job, samples: np.ndarray, device: str = "cpu") -> Batch:
    with Loader(store, len(samples), device, fields=job.fields, samples=samples) as loader:
        return next(iter(loader))


def train(
    job: Job, store: Store, epochs: int, lr: float, device: str = "cpu", batch: int = 64
) -> list[float]:
    """The loop everybody writes: AdamW, the job's own schedule, clipped gradients."""
    model = job.model.to(device).train()
    losses = []
    with Loader(
        store, batch, device, order=job.order, fields=job.fields, samples=job.samples["train"]
    ) as loader:
        optimizer = job.make_optimizer(model.parameters(), lr)
        schedule = job.make_schedule(optimizer, epochs * len(loader))
        for _ in range(epochs):
            for loaded in loader:
                inputs, targets = job.unpack(loaded)
                loss = job.criterion(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.detach())
    return torch.stack(losses).tolist()


def judge(job: Job, store: Store, split: str = "val", device: str = "cpu") -> dict[str, float]:
    metrics = job.metrics()
    job.model.eval()
    with (
        torch.no_grad(),
        Loader(store, 256, device, fields=job.fields, samples=job.samples[split]) as loader,
    ):
        for batch in loader:
            inputs, targets = job.unpack(batch)
            metrics.update(job.model(inputs), targets)
    return metrics.compute()


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ------------------------------------------------------------------------------------ bounded outputs


def test_the_soft_bound_bounds_and_keeps_gradients_where_a_clamp_has_none():
    x = torch.tensor([-80.0, -30.0, -3.0, 0.0, 3.0, 30.0, 80.0], requires_grad=True)
    bounded = bound_outputs(x, 10.0, "soft")
    assert bounded.abs().max() <= 10
    torch.testing.assert_close(bounded, 10 * torch.tanh(x / 10))
    (soft,) = torch.autograd.grad(bounded.sum(), x)
    assert (soft > 0).all()
    assert (bounded[2:5] - x[2:5]).abs().max() < 0.04 * 3
    (hard,) = torch.autograd.grad(bound_outputs(x, 10.0, "clamp").sum(), x)
    assert hard.tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert torch.equal(bound_outputs(x, None, "soft"), x)


ONE_NUMBER = {
    "is_series": False,
    "window": None,
    "num_features": 1,
    "num_outputs": 1,
    "is_classifier": False,
    "body": "mlp",
}


def test_a_model_that_ran_away_comes_back_under_the_soft_bound_only():
    """S4's clamp: beyond the bound no gradient is left, so the loss never moves again."""
    losses = {}
    for mode in ("soft", "clamp"):
        options = TabularOptions(hidden=(), output_bound=10.0, output_bound_mode=mode)
        model = TabularModel(options, ONE_NUMBER)
        torch.nn.init.constant_(model.body[-1].weight, 0.0)
        torch.nn.init.constant_(model.body[-1].bias, 25.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.0)
        for _ in range(80):
            loss = model(torch.ones(4, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[mode] = loss.item()
    assert losses["clamp"] == 100.0
    assert losses["soft"] < 1.0


# ------------------------------------------------------------------------------------------ networks


def small_patches(patch: int, stride: int, **more) -> TabularOptions:
    sizes = {"d_model": 8, "layers": 1, "heads": 2, "ffn_factor": 2, "dropout": 0.0}
    return TabularOptions(patch=patch, stride=stride, **sizes, **more)


def test_shapes_and_parameters_of_s4():
    model = PatchTransformer(168, 159, TabularOptions(), 36)
    assert model.places.shape == (1, 20, 256)
    d = 256
    layer = 4 * (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d) + 4 * d
    embed, head = 16 * 159 * d + d, 20 * d * 36 + 36
    assert count(model) == embed + 20 * d + 3 * layer + 2 * d + head
    mlp = RowMlp(256, (512, 512), 3, 0.0)
    assert count(mlp) == 256 * 512 + 512 + 512 * 512 + 512 + 512 * 3 + 3
    assert mlp(torch.zeros(5, 256)).shape == (5, 3)
    tiny = PatchTransformer(14, 3, small_patches(4, 2), 5)
    assert tiny(torch.zeros(6, 14, 3)).shape == (6, 5)
    with pytest.raises(InputError, match="windows of 14"):
        PatchTransformer(14, 3, TabularOptions(), 5)


@pytest.mark.parametrize("window", [4, 5, 9, 14])
def test_every_row_of_a_window_is_in_a_patch_and_the_last_patch_ends_now(window):
    torch.manual_seed(0)
    model = PatchTransformer(window, 2, small_patches(4, 3), 1).eval()
    rows = torch.randn(1, window, 2, requires_grad=True)
    model(rows).sum().backward()
    assert rows.grad.abs().sum(dim=2).min() > 0
    assert 0 <= model.missing < 3


def test_independent_channels_share_their_weights():
    torch.manual_seed(0)
    rows = torch.randn(2, 12, 5)
    swapped = rows[:, :, [4, 2, 0, 1, 3]]
    apart = PatchTransformer(12, 5, small_patches(4, 2, channels="independent"), 3).eval()
    torch.testing.assert_close(apart(rows), apart(swapped))
    mixed = PatchTransformer(12, 5, small_patches(4, 2, channels="mixed"), 3).eval()
    assert not torch.allclose(mixed(rows), mixed(swapped))
    assert count(mixed) - count(apart) == 4 * 4 * 8  # (features - 1) x patch x d_model


def test_the_gain_of_the_first_weights():
    torch.manual_seed(0)
    for body in (
        RowMlp(200, (300,), 4, 0.0),
        PatchTransformer(16, 3, TabularOptions(d_model=64, layers=1, heads=2, ffn_factor=2), 9),
    ):
        set_gain(body, 0.5)
        for part in body.modules():
            if isinstance(part, torch.nn.Linear):
                wanted = 0.5 * np.sqrt(2 / (part.in_features + part.out_features))
                assert part.weight.std().item() == pytest.approx(wanted, rel=0.15)
                assert not part.bias.any()
            if isinstance(part, torch.nn.MultiheadAttention):
                wanted = 0.5 * np.sqrt(2 / (64 + 3 * 64))
                assert part.in_proj_weight.std().item() == pytest.approx(wanted, rel=0.1)


def test_the_gain_of_the_options_reaches_the_model(classes):
    small, large = (make_job(classes, init_gain=gain).model.body for gain in (0.1, 1.0))
    ratio = large[1].weight / small[1].weight
    torch.testing.assert_close(ratio, torch.full_like(ratio, 10.0))


def test_scaling_is_robust_float32_and_cut():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1001, 4)) * [1, 5, 0, 1]
    rows[:, 3] = rng.random(1001) < 0.1  # mostly zeros: no quartile range
    rows[0, 0] = 1e12
    center, scale = fit_robust(rows)
    low, middle, high = np.percentile(rows[:, 1], (25, 50, 75))
    assert (center[1], scale[1]) == pytest.approx((middle, high - low))
    assert abs(center[0]) < 0.2
    assert scale[0] == pytest.approx(1.35, rel=0.1)
    assert (scale[2], scale[3]) == (1.0, pytest.approx(rows[:, 3].std()))
    scaler = RobustScale(center, scale, 10.0)
    made = scaler(torch.from_numpy(rows).float())
    assert made.dtype == torch.float32
    assert made.abs().max() == 10
    assert scaler(torch.tensor([[60_000, 1, 0, 0]], dtype=torch.float16)).isfinite().all()
    with pytest.raises(InputError, match="training row"):
        fit_robust(rows[:0])


# --------------------------------------------------------------------------- decisions, with reasons


def test_task_and_model_follow_from_the_store(classes, windows, series):
    notes = make_job(classes).notes
    assert "classification into 3 classes: the targets are int64" in notes
    assert any(note.startswith("model: mlp") for note in notes)
    notes = make_job(windows).notes
    assert "regression of 1 values: the targets are float32" in notes
    assert any(note.startswith("model: patchtst") for note in notes)
    job = make_job(series)
    assert job.fields == ["M5", "targets"]
    assert "regression of 2 values: the targets are float32" in job.notes
    assert isinstance(make_job(windows, model="mlp").model.body, RowMlp)
    with pytest.raises(InputError, match="rows without a window"):
        make_job(classes, model="patchtst")


def test_classes_keep_their_own_numbers(tmp_path):
    table = class_table(300)
    own = np.array([-7, 2, 90])[table["targets"].values]
    with write_store(tmp_path / "own", [{**table, "targets": Dense(own)}]) as store:
        job = make_job(store)
        ids = job.samples["train"][:20]
        inputs, targets = job.unpack(take(store, job, ids))
        assert targets.tolist() == table["targets"].values[ids].tolist()
        read = job.model.eval().predict(inputs)
        assert set(read["class"].tolist()) <= {-7, 2, 90}
        torch.testing.assert_close(read["probability"].sum(dim=1), torch.ones(20))


def test_floats_that_are_a_few_whole_numbers_are_classes(tmp_path):
    table = class_table(300)
    floats = Dense(table["targets"].values.astype("f4"))
    with write_store(tmp_path / "floats", [{**table, "targets": floats}]) as store:
        job = make_job(store)
        assert job.model.is_classifier
        assert any(
            "the targets are 3 different whole numbers (task='regression'" in note
            for note in job.notes
        )
        assert not make_job(store, task="regression").model.is_classifier
        job = make_job(store, task="classification")
        assert job.model.is_classifier
        assert "classification into 3 classes: it was asked for" in job.notes
    values = np.linspace(0, 1, 50)
    with pytest.raises(InputError, match="one whole number per sample"):
        find_task(store, "targets", values, "classification")
    with pytest.raises(InputError, match="1 different values"):
        find_task(store, "targets", np.zeros(5, np.int64), "auto")


def test_inputs_that_cannot_be_found_are_named(classes, series):
    assert find_inputs(series, "M5", "targets").num_columns == 4  # and the gap flag
    with pytest.raises(InputError, match="'nothing' is no input"):
        make_job(classes, field="nothing")
    with pytest.raises(InputError, match="Try: target_field='targets'"):
        make_job(classes, target_field="label")


def test_splits_choose_what_cannot_leak(tmp_path, classes, windows, series):
    table = class_table(400)
    features = table["features"].values
    features[200:] = features[:200]  # every row twice
    repeats = {**table, "features": Dense(features, tuple("abcdefg"))}
    with write_store(tmp_path / "repeats", [repeats]) as store:
        job = make_job(store)
        assert any("split 'distinct'" in note for note in job.notes)
        seen = {name: {row.tobytes() for row in features[ids]} for name, ids in job.samples.items()}
        assert not seen["train"] & seen["val"]
        assert not seen["train"] & seen["test"]
        assert sum(map(len, job.samples.values())) == 400
        mixed = make_job(store, split="random").samples
        both = {row.tobytes() for row in features[mixed["train"]]}
        assert both & {row.tobytes() for row in features[mixed["val"]]}  # what it avoids
    assert any("split 'random'" in note for note in make_job(classes).notes)
    samples = make_job(windows).samples
    assert samples["val"].min() - samples["train"].max() > 14  # no window on both sides
    assert any("an embargo of 14 samples" in note for note in make_job(windows).notes)
    samples = make_job(series).samples
    time, label_time = (series.read_rows(name, 0, 700) for name in ("time", "label_time"))
    assert time[samples["val"]].min() > label_time[samples["train"]].max()
    own = {**table, "split": Dense(np.repeat([0, 1, 2, 3], 100).astype("u1"))}
    with write_store(tmp_path / "own", [own]) as store:
        assert make_job(store).samples["val"].tolist() == list(range(100, 200))
    about = find_inputs(windows, None, "targets")
    small, how = split_samples(windows, about, "time", (0.98, 0.01, 0.01), None, 0)
    assert "the store is small" in how
    assert len(small["train"]) > 800
    with pytest.raises(InputError, match="dense features"):
        make_job(series, split="distinct")


@given(
    st.integers(1, 10**10), st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from(["linear", "sqrt"])
)  # fmt: skip
def test_the_rate_is_scaled_by_samples_that_exist(batch, reference, have, rule):
    factor, why = lr_factor(batch, reference, rule, have)
    together = min(batch, have)
    exact = (together / reference) ** (1 if rule == "linear" else 0.5)
    assert factor == pytest.approx(min(exact, MAX_LR_FACTOR))
    assert f"{together} samples per update" in why
    assert (f"{batch:,} were asked for" in why) == (batch > have)
    assert ("is the limit" in why) == (exact > MAX_LR_FACTOR)


@pytest.mark.parametrize("labels", [np.arange(90, dtype="u8") % 3 + 2**63, np.full(90, 1e30)])
def test_labels_beyond_int64_are_refused_by_name(tmp_path, labels):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["features"] = np.arange(180, dtype=np.float32).reshape(90, 2)
        file["label"] = labels
    with (
        open_store(tmp_path / "x.h5") as store,
        pytest.raises(InputError, match="'label' holds the label"),
    ):
        TabularRecipe().make_job(store, {"target_field": "label", "task": "classification"}, 0)


def test_a_field_of_no_columns_is_refused_by_name(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["features"] = np.ones((90, 0), np.float32)
        file["label"] = np.arange(90) % 3
    with open_store(tmp_path / "x.h5") as store, pytest.raises(InputError, match="0 columns"):
        TabularRecipe().make_job(store, {"target_field": "label"}, 0)


def test_the_rate_follows_the_batch(classes):
    assert lr_factor(1024, 128, "linear")[0] == 8
    assert lr_factor(512, 128, "sqrt")[0] == 2
    with pytest.raises(InputError, match="'cubic'"):
        lr_factor(512, 128, "cubic")
    assert lr_factor(512, 128, "none")[0] == 1
    assert lr_factor(None, 128, "linear") == (
        1.0,
        "lr as given: no batch_size was given to scale it by",
    )
    job = make_job(classes, batch_size=1024)
    assert "lr x 8: the linear rule for 1024 samples per update against 128" in job.notes
    optimizer = job.make_optimizer(job.model.parameters(), 1e-4)
    assert {group["lr"] for group in optimizer.param_groups} == {8e-4}


def test_the_future_of_a_window_changes_nothing(tmp_path, series):
    fields = series_fields()
    job = make_job(series)
    job.model.eval()
    sample = 300
    end = int(fields["M5"].ends[sample])
    before = job.model(job.unpack(take(series, job, np.array([sample])))[0])
    fields["M5"].rows[end:] = 1e3
    fields["M5"].gap[end:] = 1
    with write_store(tmp_path / "ahead", [fields]) as other:
        assert torch.equal(job.model(job.unpack(take(other, job, np.array([sample])))[0]), before)
    fields["M5"].rows[end - 1] += 1
    with write_store(tmp_path / "now", [fields]) as other:
        now = job.model(job.unpack(take(other, job, np.array([sample])))[0])
        assert not torch.equal(now, before)
    rows = training_rows(series, "M5", job.samples["train"])
    assert len(rows) == job.samples["train"][-1] + 12  # each visible row once


# -------------------------------------------------------------------------------- losses and metrics


def test_the_loss_is_the_mean_over_samples_with_and_without_weights():
    torch.manual_seed(0)
    train = np.array([0] * 6 + [1] * 3 + [2])
    scores, labels = torch.randn(2, 3), torch.tensor([2, 0])
    for weights in ("none", "balanced", (1.0, 2.0, 3.0)):
        goal = Classify(np.arange(3), train, train, weights)
        single = [goal.criterion(scores[row : row + 1], labels[row : row + 1]) for row in (0, 1)]
        torch.testing.assert_close(goal.criterion(scores, labels), (single[0] + single[1]) / 2)
    plain = functional.cross_entropy(scores, labels, reduction="none")
    balanced = Classify(np.arange(3), train, train, "balanced")
    wanted = (plain * torch.tensor([10 / 3 / 1, 10 / 3 / 6])).mean()
    torch.testing.assert_close(balanced.criterion(scores, labels), wanted)
    assert balanced.notes == ("class weights: 0.556, 1.11, 3.33",)
    with pytest.raises(InputError, match="3 weights"):
        Classify(np.arange(3), train, train, (1.0, 2.0))
    for loss in ("huber", "mse"):
        goal = Regress(np.random.default_rng(0).normal(size=(50, 2)), np.zeros((3, 2)), loss)
        outputs, targets = torch.randn(2, 2) * 3, torch.randn(2, 2)
        single = [goal.criterion(outputs[row : row + 1], targets[row : row + 1]) for row in (0, 1)]
        torch.testing.assert_close(goal.criterion(outputs, targets), (single[0] + single[1]) / 2)


@pytest.mark.parametrize("device", DEVICES)
def test_regression_metrics_equal_numpy_in_the_targets_own_units(device):
    rng = np.random.default_rng(0)
    train, val = rng.normal(50, 8, size=(200, 2)), rng.normal(52, 9, size=(31, 2))
    goal = Regress(train, val, "huber")
    answers = torch.from_numpy(rng.normal(size=(31, 2)))
    metrics = goal.metrics()
    for rows in (slice(0, 20), slice(20, 31)):
        targets = goal.encode(torch.from_numpy(val[rows]).to(device))
        metrics.update(answers[rows].to(device), targets)
    facts = goal.fitted
    values = answers.numpy() * facts["target_scale"] + facts["target_center"]
    scaled = (val - train.mean(axis=0)) / facts["target_scale"]
    share = (((values - val) / facts["target_scale"]) ** 2).mean() / (scaled**2).mean()
    reached = metrics.compute()
    assert reached["mae"] == pytest.approx(np.abs(values - val).mean(), rel=1e-5)
    assert reached["r2"] == pytest.approx(1 - share, rel=1e-4)
    median = np.median(train, axis=0)
    assert goal.baseline["mae"] == pytest.approx(np.abs(val - median).mean())
    huber = functional.huber_loss(
        torch.zeros(31, 2).double(), torch.from_numpy((val - median) / facts["target_scale"])
    )
    assert goal.baseline["loss"] == pytest.approx(float(huber), rel=1e-4)
    assert any("always answering 0" in note for note in goal.notes)


def test_the_baseline_of_classes_is_the_training_majority(classes):
    job = make_job(classes)
    labels = {name: classes.gather("targets", ids) for name, ids in job.samples.items()}
    counts = np.bincount(labels["train"])
    assert job.baseline["accuracy"] == pytest.approx(np.mean(labels["val"] == counts.argmax()))
    assert job.baseline["balanced_accuracy"] == pytest.approx(1 / 3)
    priors = (counts + 1) / (counts + 1).sum()
    assert job.baseline["loss"] == pytest.approx(-np.log(priors[labels["val"]]).mean(), rel=1e-5)
    assert set(judge(job, classes)) | {"loss"} == set(job.baseline)


@pytest.mark.parametrize("name", ["classes", "windows", "series"])
def test_a_step_never_asks_the_host(name, request):
    """On the meta device there are no values: any `.item()`, `bool()` or dynamic shape raises."""
    store = request.getfixturevalue(name)
    options = {"class_weights": "balanced"} if name == "classes" else {"output_bound": 10.0}
    job = make_job(store, **options)
    batch = take(store, job, job.samples["train"][:8])
    abstract = {field: value.to("meta") for field, value in batch.items()}
    model = copy.deepcopy(job.model).to("meta")
    inputs, targets = job.unpack(abstract)
    outputs = model(inputs)
    job.criterion(outputs, targets).backward()
    job.metrics().update(outputs, targets)
    assert len(outputs) == 8


def test_constants_follow_the_batch_once():
    constant = OnDevice(np.array([1.0, 2.0]))
    meta = torch.device("meta")
    assert constant.on(meta) is constant.on(meta)
    assert constant.on(torch.device("cpu")).tolist() == [1.0, 2.0]


def test_options_are_read_strictly():
    read = partial(parse_options, TabularOptions, recipe="tabular")
    assert read({"class_weights": [1, 2]}).class_weights == (1.0, 2.0)
    assert read({"class_weights": "balanced"}).class_weights == "balanced"
    for wrong, words in (
        ({"lr": 1e-3}, "no option 'lr'"),
        ({"output_bound_mode": "hard"}, "soft, clamp"),
        ({"class_weights": "some"}, "none, balanced or a list of numbers"),
        ({"output_bound": "10"}, "a number or null"),
        ({"output_bound": 0}, "above 0"),
        ({"hidden": [8, 0]}, "widths of 1 or more"),
        ({"heads": 7}, "a divisor of d_model"),
        ({"patch": 0}, "1 or more"),
    ):
        with pytest.raises(InputError, match=words):
            read(wrong)


# ------------------------------------------------------------------------------------------ it learns


@pytest.mark.parametrize("device", DEVICES)
def test_the_mlp_learns_classes(classes, device):
    job = make_job(classes, init_gain=1.0, output_bound=10.0, hidden=[48, 48], dropout=0.0)
    losses = train(job, classes, 12, 1e-2, device)
    reached = judge(job, classes, device=device)
    assert np.isfinite(losses).all()
    assert reached["accuracy"] > job.baseline["accuracy"] + 0.3
    assert reached["balanced_accuracy"] > job.baseline["balanced_accuracy"] + 0.4


@pytest.mark.parametrize("device", DEVICES)
def test_the_patch_transformer_learns_values(windows, device):
    job = make_job(windows, dropout=0.0)
    train(job, windows, 10, 1e-2, device)
    reached = judge(job, windows, device=device)
    assert reached["mae"] < 0.4 * job.baseline["mae"]
    assert reached["r2"] > 0.8
    inputs, _ = job.unpack(take(windows, job, job.samples["val"][:40], device))
    with torch.no_grad():
        values = job.model.predict(inputs)["value"][:, 0].cpu().numpy()
    wanted = windows.gather("targets", job.samples["val"][:40])
    assert np.abs(values - wanted).mean() < 0.5 * job.baseline["mae"]


def test_windows_of_a_series_are_learned_from_where_they_lie(series):
    job = make_job(series, dropout=0.0)
    train(job, series, 12, 1e-2)
    assert judge(job, series)["mae"] < 0.5 * job.baseline["mae"]


# ------------------------------------------------------------------------------------- the 1e15 story


def write_h5(path: Path, **arrays: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
    return path


def test_the_gate_refuses_what_nobody_has_packed(tmp_path):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, 3)).astype("f4")
    targets = rng.integers(0, 2, 400)
    with open_store(write_h5(tmp_path / "clean.h5", features=features, targets=targets)) as store:
        assert quality_gate(store, ["features", "targets"], scaled=True) == []
    for value, name in ((1e15, "extreme"), (np.inf, "inf"), (np.nan, "nan")):
        dirty = features.copy()
        dirty[17, 1] = value
        path = write_h5(tmp_path / f"{name}.h5", features=dirty, targets=targets)
        with open_store(path) as store, pytest.raises(QualityError, match=name) as caught:
            make_job(store)
        assert "rows 17" in str(caught.value) or "row 17" in str(caught.value)
        assert re.search(
            r"stoker pack arrays FILE OUT --repair '?(clip[^@]*|fill:median)@1", str(caught.value)
        )


def test_values_beyond_float16_are_refused_only_where_nothing_scales_them(tmp_path):
    rng = np.random.default_rng(0)
    features = (rng.normal(size=(400, 3)) * 1e5).astype("f4")
    path = write_h5(tmp_path / "large.h5", features=features, targets=rng.integers(0, 2, 400))
    with open_store(path) as store:
        notes = make_job(store).notes
        assert any("3 columns above 65,504" in note for note in notes)
        with pytest.raises(QualityError, match="overflows-fp16"):
            make_job(store, scale_inputs=False)


def write_dirty_csv(path: Path) -> np.ndarray:
    """Close over VWAP with next to no volume: a ratio near 1, and 1e15 where the volume vanished."""
    rng = np.random.default_rng(0)
    close, ratio, other = (rng.normal(1, 0.1, 1200) for _ in range(3))
    label = np.where(close * 2 + other > ratio + 2, "up", "down")
    ratio[[31, 900, 1100]] = 1e15  # train, val, test
    lines = ["close,ratio,other,label"]
    lines += [
        f"{a:.6f},{b:.6g},{c:.6f},{d}"
        for a, b, c, d in zip(close, ratio, other, label, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return np.stack([close, ratio, other], axis=1)


def stoker(*args: object) -> subprocess.CompletedProcess[str]:
    return warm_stoker.stoker(*args, env={**os.environ, "COLUMNS": "200"})


def test_from_a_dirty_file_to_a_stable_run(tmp_path):
    raw = write_dirty_csv(tmp_path / "dirty.csv")
    pack = ("pack", "table", tmp_path / "dirty.csv", tmp_path / "out", "--target", "label")
    pack = (*pack, "--split", "0.7,0.15,0.15", "--jobs", 1)
    refused = stoker(*pack)
    assert refused.returncode == 3
    assert "refuse extreme features['ratio']: 3 of 1,200 values reach 1e+15" in refused.stderr
    assert "rows 31, 900, 1100" in refused.stderr
    assert not (tmp_path / "out").exists()
    named = re.search(r"--repair (clip\S*@\w+)", refused.stderr)
    assert named is not None
    assert named[1] == "clip:0.005,0.995@ratio"
    packed = stoker(*pack, "--repair", named[1])
    assert packed.returncode == 0, packed.stderr

    with open_store(tmp_path / "out") as store:
        assert store.manifest.repairs["features"][0]["repair"].startswith("clip:")
        job = make_job(store, init_gain=0.5, output_bound=10.0, hidden=[32, 32], dropout=0.0)
        losses = train(job, store, 12, 1e-2)
        reached = judge(job, store)
    assert np.isfinite(losses).all()
    second_half = losses[len(losses) // 2 :]
    assert max(second_half) < job.baseline["loss"]  # stable, not only good at the end
    assert reached["accuracy"] > job.baseline["accuracy"] + 0.3

    # What the gate keeps out: the same network on the rows as they were, a loss of 1e10 and more
    # for one class or the other; and in float16 not even a number.
    torch.manual_seed(0)
    bare = RowMlp(3, (32, 32), 2, 0.0)
    rows = torch.from_numpy(raw).float()
    sides = [functional.cross_entropy(bare(rows), torch.full((1200,), side)) for side in (0, 1)]
    assert max(sides) > 1e10
    assert rows.half().isinf().sum() == 3


@pytest.mark.slow  # real data, where it is there; what is made is learned above
def test_real_flows_are_learned_after_the_named_repairs(shared_data, tmp_path):
    from stoker.packing import PackOptions, pack
    from stoker.sources.tables import TableSource

    source = TableSource((shared_data / "tabular" / "cicids2017_sample.csv",), "Label")
    with pytest.raises(QualityError, match="Flow Bytes/s"):
        pack(source, tmp_path / "store", PackOptions(jobs=1))
    repairs = ("fill:0@Flow Bytes/s", "clip@Flow Bytes/s,Flow Packets/s")
    pack(source, tmp_path / "store", PackOptions(jobs=1, repairs=repairs))
    with open_store(tmp_path / "store") as store:
        job = make_job(store, hidden=[64], class_weights="balanced")
        assert any("split 'distinct'" in note for note in job.notes)
        losses = train(job, store, 3, 3e-3, batch=128)
        reached = judge(job, store)
    assert np.isfinite(losses).all()
    assert reached["accuracy"] > job.baseline["accuracy"] + 0.4
    assert reached["balanced_accuracy"] > 0.7


@pytest.mark.parametrize(
    ("value", "text"),
    [(4998240.0, "4,998,240"), (-12345.6, "-12,346"),
     (0.000123456, "0.00012346"), (542.163, "542.16"), (1e20, "1e+20")],
)  # fmt: skip
def test_values_of_examples_are_written_out(value, text):
    assert _plain(value) == text
