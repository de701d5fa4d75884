"""The forex recipe: labels, network, state, honest metrics, and that it learns."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from recipe_loops import train_job
from stoker.errors import InputError, QualityError
from stoker.loader.batch import Batch
from stoker.loader.loader import Loader
from stoker.recipes.contract import Job, Metrics
from stoker.recipes.forex.labels import (
    ForexMetrics,
    LabelPlan,
    find_baseline,
    forex_loss,
    make_labels,
    plan_labels,
)
from stoker.recipes.forex.model import ForexModel, Recurrent
from stoker.recipes.forex.recipe import ForexOptions, ForexRecipe
from stoker.recipes.metrics import ClassCounts, MaskedMean
from stoker.recipes.options import parse_options
from stoker.recipes.schedule import cosine_factor, make_adamw
from stoker.store.fields import Dense, Series
from stoker.store.reader import Store
from store_makers import write_store

MINUTE = 60_000_000_000
HORIZON = 6
SMALL = {"d_model": 16, "heads": 2, "layers": 2}
WEIGHTS = (0.40, 0.35, 0.15, 0.10)
PLAN = LabelPlan(pip=1e-4, neutral=2e-4, direction_step=5, scalp_step=1, swing_step=3)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


pytestmark = pytest.mark.usefixtures("one_thread")


def make_fields(num_samples: int = 1200, seed: int = 0) -> dict:
    """Two timeframes; the last two M5 bars decide the direction, the last H1 bar the size."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_samples + 40, 4)).astype("f4")
    hours = rng.normal(size=(num_samples // 4 + 20, 3)).astype("f4")
    ends, hour_ends = np.arange(num_samples) + 40, np.arange(num_samples) // 4 + 12
    pull = rows[ends - 1, 2] + rows[ends - 2, 2]
    size = np.exp(0.7 * hours[hour_ends - 1, 1])
    noise = rng.normal(size=(num_samples, HORIZON))
    steps = (0.3 * noise + 0.8 * pull[:, None]) * 1e-4 * size[:, None]
    time = ends * 5 * MINUTE
    return {
        "M5": Series(
            rows=rows,
            time=np.arange(len(rows)) * 5 * MINUTE,
            ends=ends,
            window=12,
            gap=(rng.random(len(rows)) < 0.05).astype("u1"),
            columns=("return", "range", "pull", "volume_change"),
            duration_ns=5 * MINUTE,
        ),
        "H1": Series(
            rows=hours,
            time=np.arange(len(hours)) * 60 * MINUTE,
            ends=hour_ends,
            window=6,
            gap=np.zeros(len(hours), "u1"),
            columns=("return", "range", "other"),
            duration_ns=60 * MINUTE,
        ),
        "time": Dense(time),
        "label_time": Dense(time + HORIZON * 5 * MINUTE),
        "targets": Dense(np.cumsum(steps, axis=1).astype("f4")),
        "label_gap": Dense((np.arange(num_samples) % 10 == 0).astype("u1")),
    }


@pytest.fixture(scope="module")
def fields() -> dict:
    return make_fields()


@pytest.fixture(scope="module")
def store(tmp_path_factory, fields) -> Store:
    return write_store(tmp_path_factory.mktemp("forex") / "store", [fields])


def make_job(store: Store, **options: object) -> Job:
    return ForexRecipe().make_job(store, {**SMALL, **options}, seed=3)


def take(store: Store, job: Job, samples: np.ndarray, device: str = "cpu") -> Batch:
    with Loader(store, len(samples), device, fields=job.fields, samples=samples) as loader:
        return next(iter(loader))


def make_model(num_timeframes: int = 2, **options: object) -> ForexModel:
    features = {f"M{number + 1}": 3 for number in range(num_timeframes)}
    torch.manual_seed(0)
    chosen = ForexOptions(**{"d_model": 8, "heads": 2, **options})
    model = ForexModel(features, chosen, chosen.carried or ())
    for encoder in model.encoders.values():
        encoder.steps[0] = 1.0
    return model


def make_inputs(model: ForexModel, batch: int = 3, bars: int = 7) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    inputs = {name: torch.randn(batch, bars, 3) for name in model.timeframes}
    gaps = {f"{name}/gap": torch.zeros(batch, bars, dtype=torch.uint8) for name in model.timeframes}
    return inputs | gaps


# -------------------------------------------------------------------------------------------- labels


def reference_labels(returns: np.ndarray, plan: LabelPlan) -> dict[str, np.ndarray]:
    """The same labels, one sample and one number at a time."""
    made: dict[str, list] = {"direction": [], "scalp": [], "swing": [], "trend": []}
    for path in returns.astype("f8"):
        last = path[plan.direction_step - 1]
        made["direction"].append(0 if last < -plan.neutral else 2 if last > plan.neutral else 1)
        for name, step, low, high in (
            ("scalp", plan.scalp_step, 0.5, 2.0),
            ("swing", plan.swing_step, 2.0, 5.0),
        ):
            made[name].append(min(max(abs(path[step - 1]) / plan.pip, low), high))
        length, before = 0.0, 0.0
        for value in path:
            length, before = length + abs(value - before), value
        made["trend"].append(path[-1] / length if length else 0.0)
    return {name: np.array(values) for name, values in made.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_labels_equal_the_reference(device):
    rng = np.random.default_rng(0)
    returns = np.cumsum(rng.normal(size=(300, HORIZON)) * 2e-4, axis=1).astype("f4")
    returns[0] = 0
    made = make_labels(torch.from_numpy(returns).to(device), PLAN)
    for name, wanted in reference_labels(returns, PLAN).items():
        np.testing.assert_allclose(made[name].cpu().numpy(), wanted, rtol=2e-5, atol=1e-6)
    assert set(made["direction"].tolist()) == {0, 1, 2}


def test_limits_come_from_the_returns_they_are_given():
    rng = np.random.default_rng(1)
    sizes = np.array([0.2, 1.0, 1.8, 3.2, 6.0, 20.0]) * 1e-4 / 0.6745  # the median of |normal|
    returns = rng.normal(size=(20_000, HORIZON)) * sizes
    plan = plan_labels(returns, ForexOptions(neutral_share=0.25))
    assert (plan.scalp_step, plan.swing_step, plan.direction_step) == (2, 4, 6)
    assert np.mean(np.abs(returns[:, 5]) <= plan.neutral) == pytest.approx(0.25, abs=1e-3)
    given = plan_labels(returns, ForexOptions(neutral_share=0.0, direction_step=2, scalp_step=5))
    assert (given.neutral, given.direction_step, given.scalp_step) == (0.0, 2, 5)
    with pytest.raises(InputError, match=r"swing_step.*7"):
        plan_labels(returns, ForexOptions(neutral_share=0.25, swing_step=7))


# ----------------------------------------------------------------------------------- nothing ahead


def rewritten(folder: Path, fields: dict, **changed: object) -> Store:
    return write_store(folder, [{**fields, **changed}])


def test_the_future_of_a_window_changes_nothing(tmp_path, store, fields):
    job = make_job(store, dropout=0.0)
    sample = int(job.samples["train"][500])
    ahead = {}
    for name in ("M5", "H1"):
        series = fields[name]
        rows, gap = series.rows.copy(), series.gap.copy()
        end = int(series.ends[sample])
        rows[end:] = 1e3
        gap[end:] = 1
        ahead[name] = replace(series, rows=rows, gap=gap)
    job.model.eval()
    before = job.model(job.unpack(take(store, job, np.array([sample])))[0])
    with rewritten(tmp_path / "ahead", fields, **ahead) as other:
        after = job.model(job.unpack(take(other, job, np.array([sample])))[0])
    for name in before:
        assert torch.equal(before[name], after[name])
    rows = fields["M5"].rows.copy()
    rows[int(fields["M5"].ends[sample]) - 1] += 1  # the last bar that is known
    with rewritten(tmp_path / "now", fields, M5=replace(fields["M5"], rows=rows)) as other:
        now = job.model(job.unpack(take(other, job, np.array([sample])))[0])
    assert not torch.equal(before["direction"], now["direction"])


def test_scalers_and_limits_know_training_samples_only(tmp_path, store, fields):
    job = make_job(store)
    last = int(job.samples["train"][-1])
    changed: dict = {"targets": Dense(fields["targets"].values.copy())}
    changed["targets"].values[last + 1 :] *= 50
    for name in ("M5", "H1"):
        rows = fields[name].rows.copy()
        rows[int(fields[name].ends[last]) :] *= 50
        changed[name] = replace(fields[name], rows=rows)
    with rewritten(tmp_path / "later", fields, **changed) as other:
        again = make_job(other)
    assert again.unpack.keywords == job.unpack.keywords
    for name, value in job.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    assert again.baseline != job.baseline  # judged on other validation samples
    rows = fields["M5"].rows.copy()
    rows[: int(fields["M5"].ends[last])] *= 50
    with rewritten(tmp_path / "earlier", fields, M5=replace(fields["M5"], rows=rows)) as other:
        moved = make_job(other).model.encoders["M5"].scaler.scale
    assert not torch.equal(moved, job.model.encoders["M5"].scaler.scale)


def test_the_scaler_is_the_median_and_quartiles_of_visible_training_rows(store, fields):
    job = make_job(store)
    ends = fields["M5"].ends[job.samples["train"]]
    visible = fields["M5"].rows[ends.min() - 12 : ends.max()].astype("f8")
    low, middle, high = np.percentile(visible, (25, 50, 75), axis=0)
    scaler = job.model.encoders["M5"].scaler
    np.testing.assert_allclose(scaler.center.numpy(), middle, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(scaler.scale.numpy(), high - low, rtol=1e-5)


def test_samples_are_divided_by_time_with_purge_and_embargo(store, fields):
    job = make_job(store)
    time, label_time = fields["time"].values, fields["label_time"].values
    for before, after in (("train", "val"), ("val", "test")):
        border = label_time[job.samples[before]].max()
        first = time[job.samples[after]].min()
        assert first > border
        assert (first - time[job.samples[before]].max()) >= 2 * HORIZON * 5 * MINUTE
    kept = make_job(store, label_gaps="drop").samples
    assert not fields["label_gap"].values[kept["train"]].any()
    assert len(kept["train"]) < len(job.samples["train"])
    assert any("left out whose label" in note for note in make_job(store, label_gaps="drop").notes)


# ------------------------------------------------------------------------------------------- network


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_at_the_default_sizes():
    d, features, timeframes = 128, 11, 5
    names = ("M1", "M5", "M15", "H1", "H4")
    model = ForexModel(dict.fromkeys(names, features), ForexOptions())
    lstm = 4 * d * (features + 1 + d + 2) + 4 * d * (2 * d + 2)
    attention = 4 * (d * d + d)
    encoder = lstm + 2 * d + d + attention
    fusion = attention + (d * 4 * d + 4 * d) + (4 * d * d + d) + 4 * d
    assert count(model) == timeframes * encoder + fusion + 2 * d + 6 * (d + 1)
    one_call = ForexModel(dict.fromkeys(names, features), ForexOptions(dropout=0.0))
    assert count(one_call) == count(model)
    assert len(one_call.encoders["M5"].recurrent.calls) == 1
    assert one_call.encoders["M5"].recurrent.calls[0].num_layers == 2


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_have_their_shapes_and_bands(device):
    model = make_model().to(device).eval()
    inputs = {name: value.to(device) * 100 for name, value in make_inputs(model, 64).items()}
    outputs = model(inputs)
    assert outputs["direction"].shape == (64, 3)
    for name, low, high in (("scalp", 0.5, 2), ("swing", 2, 5), ("trend", -1, 1)):
        assert outputs[name].shape == (64,)
        assert low <= outputs[name].min() <= outputs[name].max() <= high
    read = model.predict(inputs)
    torch.testing.assert_close(read["probability"].sum(dim=1), torch.ones(64, device=device))
    assert torch.equal(read["class"], outputs["direction"].argmax(dim=1))
    assert torch.equal(read["swing"], outputs["swing"])


def test_every_parameter_gets_a_gradient():
    model = make_model()
    outputs = model(make_inputs(model))
    sum(value.square().sum() for value in outputs.values()).backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # The keys' bias shifts all scores of a query alike, which a softmax does not see.
    assert idle == []


def test_pooling_by_attention_alone_does_not_know_which_bar_is_the_last():
    """Why "attention+last" is the default: rows in another order give the same pooled vector."""
    model = make_model(pooling="attention", dropout=0.0).eval()
    encoder = model.encoders["M1"]
    rows = encoder.norm(torch.randn(2, 7, 8))
    query = encoder.query.expand(2, -1, -1)
    pooled = [encoder.pool(query, r, r, need_weights=False)[0] for r in (rows, rows.flip(1))]
    torch.testing.assert_close(pooled[0], pooled[1])
    last = make_model(pooling="last", dropout=0.0)
    assert not hasattr(last.encoders["M1"], "pool")
    assert last(make_inputs(last))["direction"].shape == (3, 3)


def test_gaps_are_masked_flagged_or_ignored():
    window, gap = torch.randn(1, 5, 3), torch.zeros(1, 5, dtype=torch.uint8)
    gap[0, 2] = 1
    jump = window.clone()
    jump[0, 2, 0] = 77.0  # the step over the gap
    made = {}
    for mode in ("mask", "flag", "ignore"):
        encoder = make_model(1, gaps=mode, input_clip=None).encoders["M1"]
        made[mode] = encoder.prepare(jump, gap)
    assert made["mask"][0, 2].tolist() == [0.0, *window[0, 2, 1:].tolist(), 1.0]
    assert made["mask"][0, 1].tolist() == [*window[0, 1].tolist(), 0.0]
    assert made["flag"][0, 2].tolist() == [77.0, *window[0, 2, 1:].tolist(), 1.0]
    assert torch.equal(made["ignore"], jump)


def test_the_documents_weights_reach_the_two_heads():
    model = make_model(5, head_weights="document")
    assert model.head_weights[1].tolist() == pytest.approx([0.35, 0.30, 0.20, 0.10, 0.05])
    assert model.head_weights[2].tolist() == pytest.approx([0.20, 0.20, 0.25, 0.20, 0.15])
    plain = make_model(5)
    outputs = [m.eval()(make_inputs(m)) for m in (model, plain)]
    assert torch.equal(outputs[0]["direction"], outputs[1]["direction"])
    assert not torch.equal(outputs[0]["scalp"], outputs[1]["scalp"])
    with pytest.raises(InputError, match="2 timeframes"):
        make_model(2, head_weights="document")


def test_scalers_travel_with_the_weights(store):
    job, stranger = make_job(store, dropout=0.0), make_job(store, dropout=0.0)
    for name in ("M5", "H1"):
        stranger.model.encoders[name].scaler.center += 5
    batch = job.unpack(take(store, job, job.samples["val"][:4]))[0]
    with torch.no_grad():
        wanted = job.model.eval()(batch)["direction"]
        assert not torch.equal(stranger.model.eval()(batch)["direction"], wanted)
        stranger.model.load_state_dict(job.model.state_dict())
        assert torch.equal(stranger.model(batch)["direction"], wanted)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_on_a_cpu_does_not_end_in_the_lstm():
    model = make_model()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(make_inputs(model))
    assert torch.isfinite(outputs["direction"].float()).all()
    assert outputs["scalp"].dtype == torch.float32


@pytest.mark.gpu
def test_streams_of_their_own_give_the_same_and_can_be_captured():
    plain, apart = (
        make_model(3, dropout=0.0, parallel_streams=choice).cuda() for choice in (False, True)
    )
    apart.load_state_dict(plain.state_dict())
    inputs = {name: value.cuda() for name, value in make_inputs(plain, 32, 48).items()}
    gradients = []
    for model in (plain, apart):
        loss = sum(value.square().sum() for value in model(inputs).values())
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        apart(inputs)
    torch.cuda.current_stream().wait_stream(side)
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = apart(inputs)
    inputs["M1"].add_(1.0)
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(captured["direction"], plain(inputs)["direction"])


# --------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["one call", "a call per layer"])
def test_carried_state_equals_one_long_run(dropout):
    torch.manual_seed(0)
    stack = Recurrent(3, 8, 2, dropout).eval()
    rows, zeros = torch.randn(2, 12, 3), torch.zeros(2, 2, 8)
    whole, hidden, cell = stack(rows, zeros, zeros)
    state = (zeros, zeros)
    pieces = []
    for start in range(0, 12, 4):
        piece, *state = stack(rows[:, start : start + 4], *state)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    torch.testing.assert_close(state[0], hidden)
    torch.testing.assert_close(state[1], cell)


def test_the_model_carries_detaches_and_resets_its_state():
    model = make_model(carried=("M2",), dropout=0.0)
    assert model.stateful
    assert not make_model().stateful
    inputs = make_inputs(model)
    fresh = model.initial_state(3, "cpu")
    assert set(fresh) == {"M2/hidden", "M2/cell"}
    outputs, state = model(inputs, fresh)
    torch.testing.assert_close(outputs, model(inputs))  # nothing carried yet
    assert not any(value.requires_grad for value in state.values())
    carried, _ = model(inputs, state)
    assert not torch.equal(carried["direction"], outputs["direction"])
    reset = model.reset_state(state, torch.tensor([True, False, True]))
    assert not reset["M2/hidden"][:, [0, 2]].any()
    assert torch.equal(reset["M2/cell"][:, 1], state["M2/cell"][:, 1])
    mixed, _ = model(inputs, reset)
    torch.testing.assert_close(mixed["direction"][[0, 2]], outputs["direction"][[0, 2]])
    torch.testing.assert_close(mixed["direction"][1], carried["direction"][1])
    bad = {name: torch.full_like(value, torch.nan) for name, value in state.items()}
    assert torch.equal(
        model.reset_state(bad, torch.ones(3, dtype=torch.bool))["M2/cell"], fresh["M2/cell"]
    )


def test_a_stateful_job_runs_over_lanes(store):
    job = make_job(store, stateful=True, lanes=4, max_gap_rows=10_000)
    assert job.order == "lanes"
    assert job.lanes.num_lanes == 4
    assert job.model.carried == ("M5",)  # the shortest, where the store names no base
    assert job.lanes.reason in job.notes
    state = job.model.initial_state(4, "cpu")
    seen = 0
    with Loader(
        store,
        4,
        "cpu",
        order=job.order,
        lanes=job.lanes,
        fields=job.fields,
        samples=job.samples["train"],
    ) as loader:
        for batch in loader:
            inputs, targets = job.unpack(batch)
            assert targets["valid"].tolist() == (batch.positions >= 0).tolist()
            state = job.model.reset_state(state, batch.reset)
            outputs, state = job.model(inputs, state)
            assert torch.isfinite(job.criterion(outputs, targets))
            seen += int(targets["valid"].sum())
    assert seen == len(job.lanes.positions)
    with pytest.raises(InputError, match="carried"):
        make_job(store, stateful=True, lanes=4, carried=["D1"])


# ---------------------------------------------------------------------------------- loss and metrics


def some_answers(batch: int, seed: int = 0) -> tuple[dict, dict]:
    rng = np.random.default_rng(seed)
    returns = np.cumsum(rng.normal(size=(batch, HORIZON)) * 2e-4, axis=1).astype("f4")
    outputs = {
        "direction": torch.from_numpy(rng.normal(size=(batch, 3)).astype("f4")),
        "scalp": torch.from_numpy(rng.uniform(0.5, 2, batch).astype("f4")),
        "swing": torch.from_numpy(rng.uniform(2, 5, batch).astype("f4")),
        "trend": torch.from_numpy(rng.uniform(-1, 1, batch).astype("f4")),
    }
    return outputs, make_labels(torch.from_numpy(returns), PLAN)


def rows_of(values: dict, rows: slice) -> dict:
    return {name: value[rows] for name, value in values.items()}


def test_the_loss_is_the_documents_and_the_mean_over_samples():
    outputs, targets = some_answers(2)
    both = forex_loss(outputs, targets, WEIGHTS)
    single = [
        forex_loss(rows_of(outputs, row), rows_of(targets, row), WEIGHTS)
        for row in (slice(0, 1), slice(1, 2))
    ]
    torch.testing.assert_close(both, (single[0] + single[1]) / 2)
    wanted = 0.0
    for row in range(2):
        scores = outputs["direction"][row].double().numpy()
        log_sum = np.log(np.exp(scores).sum())
        wanted += 0.40 * (log_sum - scores[targets["direction"][row]])
        for name, weight, delta in (("scalp", 0.35, 0.3), ("swing", 0.15, 0.5)):
            error = abs(float(outputs[name][row] - targets[name][row]))
            small = error <= delta
            wanted += weight * (0.5 * error**2 if small else delta * (error - delta / 2))
        wanted += 0.10 * float(outputs["trend"][row] - targets["trend"][row]) ** 2
    assert float(both) == pytest.approx(wanted / 2, rel=1e-5)


def test_rows_without_a_sample_count_nowhere():
    outputs, targets = some_answers(6)
    valid = torch.tensor([True, False, True, True, False, True])
    wanted = forex_loss(rows_of(outputs, valid), rows_of(targets, valid), WEIGHTS)
    outputs["scalp"][1] = torch.nan
    masked = {**targets, "valid": valid}
    torch.testing.assert_close(forex_loss(outputs, masked, WEIGHTS), wanted)
    counted, all_of_it = ForexMetrics(), ForexMetrics()
    counted.update(outputs, masked)
    all_of_it.update(rows_of(outputs, valid), rows_of(targets, valid))
    assert counted.compute() == pytest.approx(all_of_it.compute())
    nothing = {**targets, "valid": torch.zeros(6, dtype=torch.bool)}
    assert float(forex_loss(outputs, nothing, WEIGHTS)) == 0.0


@pytest.mark.parametrize("device", DEVICES)
def test_metrics_equal_numpy(device):
    metrics, parts = ForexMetrics(), []
    for seed, size in enumerate((5, 17, 1)):
        outputs, targets = some_answers(size, seed)
        parts.append((outputs, targets))
        metrics.update(
            {name: value.to(device) for name, value in outputs.items()},
            {name: value.to(device) for name, value in targets.items()},
        )
    outputs, targets = (
        {name: np.concatenate([part[side][name].numpy() for part in parts]) for name in parts[0][0]}
        for side in (0, 1)
    )
    answers, labels = outputs["direction"].argmax(1), targets["direction"]
    recalls = [np.mean(answers[labels == label] == label) for label in np.unique(labels)]
    moved = labels != 1
    up = outputs["direction"][moved, 2] > outputs["direction"][moved, 0]
    wanted = {
        "accuracy": np.mean(answers == labels),
        "balanced_accuracy": np.mean(recalls),
        "side_accuracy": np.mean(up == (labels[moved] == 2)),
    } | {
        f"mae_{name}": np.abs(outputs[name].astype("f8") - targets[name]).mean()
        for name in ("scalp", "swing", "trend")
    }
    assert metrics.compute() == pytest.approx(wanted)
    assert np.isnan(MaskedMean().compute())
    assert np.isnan(ClassCounts(3).compute()["accuracy"])


def test_the_baseline_is_what_constants_from_training_reach():
    rng = np.random.default_rng(0)
    train = np.cumsum(rng.normal(0.3, 1, size=(400, HORIZON)) * 2e-4, axis=1).astype("f4")
    val = np.cumsum(rng.normal(-0.2, 1, size=(300, HORIZON)) * 2e-4, axis=1).astype("f4")
    known, wanted = reference_labels(train, PLAN), reference_labels(val, PLAN)
    baseline = find_baseline(train, val, PLAN, WEIGHTS)
    majority = np.bincount(known["direction"]).argmax()
    assert majority == 2
    assert baseline["accuracy"] == pytest.approx(np.mean(wanted["direction"] == 2))
    assert baseline["balanced_accuracy"] == pytest.approx(1 / 3)
    for name in ("scalp", "swing"):
        middle = np.sort(known[name])[(len(known[name]) - 1) // 2]
        error = np.abs(wanted[name] - middle).mean()
        assert baseline[f"mae_{name}"] == pytest.approx(error, rel=1e-4)
    assert baseline["mae_trend"] == pytest.approx(np.abs(wanted["trend"]).mean(), rel=1e-4)
    metrics = ForexMetrics()
    labels = make_labels(torch.from_numpy(val), PLAN)
    scores = torch.zeros(len(val), 3)
    scores[:, majority] = 1
    metrics.update({**labels, "direction": scores, "trend": torch.zeros(len(val))}, labels)
    reached = metrics.compute()
    moved = wanted["direction"][wanted["direction"] != 1]
    assert baseline["side_accuracy"] == pytest.approx(np.mean(moved == 2))
    for name in ("accuracy", "balanced_accuracy", "side_accuracy", "mae_trend"):
        assert reached[name] == pytest.approx(baseline[name], rel=1e-5)
    assert find_baseline(train, val[:0], PLAN, WEIGHTS) == {}


# --------------------------------------------------------------------------------------- the whole job


def test_the_job_meets_the_contract(store):
    state = torch.get_rng_state()
    job, again, other = make_job(store), make_job(store), ForexRecipe().make_job(store, SMALL, 4)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in job.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
    assert not torch.equal(
        other.model.heads["direction"].weight, job.model.heads["direction"].weight
    )
    assert job.fields == ["M5", "H1", "targets"]  # shortest first
    metrics: Metrics = job.metrics()
    inputs, targets = job.unpack(take(store, job, job.samples["val"]))
    with torch.no_grad():
        metrics.update(job.model.eval()(inputs), targets)
    assert set(job.baseline) == {*metrics.compute(), "loss"}
    assert any(note.startswith("labels: direction at bar 6") for note in job.notes)
    optimizer = job.make_optimizer(job.model.parameters(), 1e-3)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 1e-2}
    schedule = job.make_schedule(optimizer, 100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert np.argmax(rates) == 5
    assert max(rates) == pytest.approx(1e-3)
    assert rates[0] < 2e-4
    assert rates[-1] < 1e-5
    assert cosine_factor(0, 0, 0.05) == 1.0


def test_a_step_never_asks_the_host(store):
    """On the meta device there are no values: any `.item()`, `bool()` or dynamic shape raises."""
    job = make_job(store)
    batch = take(store, job, job.samples["train"][:8])
    abstract = {name: value.to("meta") for name, value in batch.items()}
    model = copy.deepcopy(job.model).to("meta")
    inputs, targets = job.unpack(abstract)
    outputs = model(inputs)
    job.criterion(outputs, targets).backward()
    metrics = job.metrics()
    metrics.update(outputs, targets)
    assert targets["direction"].shape == (8,)


@pytest.mark.parametrize("device", DEVICES)
def test_it_learns(store, device):
    job = make_job(store)
    _, _, reached = train_job(job, store, epochs=8, batch_size=64, lr=6e-3, device=device)
    assert reached["accuracy"] > job.baseline["accuracy"] + 0.3
    assert reached["balanced_accuracy"] > job.baseline["balanced_accuracy"] + 0.3
    assert reached["side_accuracy"] > 0.9
    for name in ("mae_scalp", "mae_swing", "mae_trend"):
        assert reached[name] < 0.85 * job.baseline[name], name


def test_options_are_read_strictly(store):
    read = partial(parse_options, ForexOptions, recipe="forex")
    chosen = read({"timeframes": ["M5"], "pip": 1, "input_clip": None, "stateful": True})
    assert chosen.timeframes == ("M5",)
    assert (chosen.pip, chosen.input_clip, chosen.stateful) == (1.0, None, True)
    for wrong, words in (
        ({"d_modell": 3}, "no option 'd_modell'"),
        ({"d_model": "128"}, "'d_model'.*'128'"),
        ({"layers": True}, "'layers'.*True"),
        ({"dropout": "1e-1"}, "'dropout'"),
        ({"gaps": "fill"}, "mask, flag, ignore"),
        ({"loss_weights": [1, 2]}, "a list of 4 numbers"),
        ({"heads": 3}, "a divisor of d_model"),
        ({"dropout": 1.0}, "below 1"),
        ({"loss_weights": [0, 0, 0, 0]}, "not all 0"),
        ({"timeframes": "M5"}, "a list of texts or null"),
    ):
        with pytest.raises(InputError, match=words):
            read(wrong)
    with pytest.raises(InputError, match="M30"):
        make_job(store, timeframes=["M30"])


def test_stores_that_do_not_fit_are_refused_with_what_to_type(tmp_path, fields):
    rows = {"features": Dense(np.zeros((5, 2), "f4")), "targets": Dense(np.zeros(5, "f4"))}
    with (
        write_store(tmp_path / "rows", [rows]) as other,
        pytest.raises(InputError, match="stoker pack bars"),
    ):
        ForexRecipe().make_job(other, {}, 0)
    bare = {name: fields[name] for name in ("M5", "targets")}
    with (
        write_store(tmp_path / "bare", [bare]) as other,
        pytest.raises(InputError, match="neither 'split' nor"),
    ):
        ForexRecipe().make_job(other, SMALL, 0)
    with (
        write_store(tmp_path / "gaps", [bare | {"split": Dense(np.zeros(1200, "u1"))}]) as other,
        pytest.raises(InputError, match="label_gap"),
    ):
        ForexRecipe().make_job(other, {**SMALL, "label_gaps": "drop"}, 0)


def test_a_bad_bar_is_refused_before_the_first_step(tmp_path, fields):
    rows = fields["M5"].rows.copy()
    rows[100, 1] = np.nan
    with (
        rewritten(tmp_path / "bad", fields, M5=replace(fields["M5"], rows=rows)) as other,
        pytest.raises(QualityError, match=r"nan M5\['range'\].*row 100"),
    ):
        make_job(other)


def test_weights_that_do_not_train_are_not_given_to_the_optimizer():
    layer = torch.nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    groups = make_adamw(layer.parameters(), 1e-3, 0.1).param_groups
    assert [len(group["params"]) for group in groups] == [1]


@pytest.mark.slow  # real data, where it is there; what is made is learned above
def test_real_bars_give_a_job_that_trains(shared_data, tmp_path):
    from stoker.packing import PackOptions, pack
    from stoker.sources.bars import BarsSource
    from stoker.store.reader import open_store

    windows = (("M5", 16), ("H4", 6))
    source = BarsSource((shared_data / "bars",), windows=windows)
    pack(source, tmp_path / "store", PackOptions(jobs=1, on_bad="quarantine"))
    with open_store(tmp_path / "store") as store:
        job = make_job(store)
        assert 0.25 < job.baseline["accuracy"] < 0.45
        assert {len(job.samples[name]) > 5_000 for name in ("train", "val", "test")} == {True}
        optimizer = job.make_optimizer(job.model.parameters(), 3e-3)
        losses = []
        with Loader(
            store, 128, "cpu", order=job.order, fields=job.fields, samples=job.samples["train"]
        ) as loader:
            for batch in loader:
                inputs, targets = job.unpack(batch)
                loss = job.criterion(job.model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
                if len(losses) == 40:
                    break
    assert np.mean(losses[-10:]) < np.mean(losses[:5]) - 0.02
