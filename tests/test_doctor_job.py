"""The doctor on stoker's own jobs: parts alone and together, what was tried, what was applied."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from run_makers import dirty_table, make_store, settings_for
from stoker.doctor.ablation import _per_step, default_patience, examine
from stoker.doctor.consultation import (
    NEAR_BEST,
    batch_proposal,
    choose_treatment,
    consult_job,
    find_knee,
    measured_gain,
    propose,
    treat_job,
    try_alternatives,
    weigh,
)
from stoker.doctor.findings import Finding, Gain, Patch
from stoker.doctor.gains import split_step
from stoker.doctor.job_config import JobConfig
from stoker.doctor.measurements import (
    Ablation,
    Alternative,
    LoaderFacts,
    LoaderWork,
    MachineFacts,
    Measurements,
)
from stoker.doctor.rules import FINDING_NAMES
from stoker.doctor.trace import Schedule, find_kernels, record
from stoker.errors import ConfigError, InputError
from stoker.loader.loader import Loader
from stoker.measure.jobs import Timed, time_loader, time_step, time_together
from stoker.measure.laps import LEAST_LAPS, Lap, Patience
from stoker.measure.readings import Spread
from stoker.recipes.run import open_run
from store_makers import write_store
from test_recipe_tabular import class_table

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SHORT = Patience(warm_up=2, steps=8, seconds=5.0)


# -- pure parts ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(1e-6, 0.2)), min_size=1, max_size=30),
    st.integers(1, 5),
)
def test_kernels_that_overlap_are_busy_once(pairs, steps):
    intervals = [(begin, begin + length) for begin, length in pairs]
    facts = find_kernels(intervals, steps)
    assert facts is not None
    assert facts.per_step == len(intervals) / steps
    assert 0 < facts.busy_share <= 1
    # Against a ruler with marks every 0.1 ms.
    first, last = min(b for b, _ in intervals), max(e for _, e in intervals)
    marks = np.arange(first, last, 1e-4)
    covered = np.zeros(len(marks), bool)
    for begin, end in intervals:
        covered |= (marks >= begin) & (marks < end)
    if len(marks) > 100:
        assert facts.busy_share == pytest.approx(covered.mean(), abs=0.03)
    assert find_kernels([], steps) is None


@given(st.floats(1e-4, 1e-2), st.floats(1e-7, 1e-4), st.integers(1, 64), st.integers(1, 4096))
def test_the_knee_was_tried_and_is_nearly_the_best(fixed, per_sample, batch, most):
    def seconds(size):
        return fixed + per_sample * size

    asked = []

    def measure(size):
        asked.append(size)
        return seconds(size)

    tried, knee = find_knee(batch, seconds(batch), most, measure)
    assert [size for size, _ in tried] == asked
    assert all(size <= most for size in asked)
    rates = {size: size / seconds(size) for size in [batch, *asked]}
    chosen = knee or batch
    assert chosen in rates
    assert rates[chosen] >= NEAR_BEST * max(rates.values())
    assert not [
        size for size in rates if size < chosen and rates[size] >= NEAR_BEST * max(rates.values())
    ]


def test_a_batch_that_does_not_fit_ends_the_search():
    tried, knee = find_knee(8, 1.0, 1000, lambda size: 1.0 if size < 64 else None)
    assert tried == [(16, 1.0), (32, 1.0)]
    assert knee == 32


def spread(value):
    return Spread(value, value * 0.98, value * 1.02, 5)


def measured_job(**changes):
    facts = {
        "subject": "c.yaml",
        "kind": "job",
        "machine": MachineFacts(cores=8, device="cuda"),
        "steps": 20,
        "seconds": 20 * 0.01,
        "samples_per_step": 16.0,
        "step_seconds": spread(0.01),
        "wait_seconds": spread(0.0001),
        "loader": LoaderFacts(kind="stoker", tier="streamed", batch_size=16),
        "precision": "fp32",
        "ablation": Ablation(step_seconds=spread(0.01), together_rate=spread(1600.0)),
    }
    return Measurements(**(facts | changes))


SLOW_CONFIG = """\
gpu_optimization: {use_chunk_loader: false, use_amp: false}
data:
  batch_size: 16
  memory_efficient_mode: {ram_32gb_mode: {empty_cache_frequency: 1}}
training: {capture: off, read_every: 1}
"""


def test_every_brake_in_a_config_is_proposed_to_be_released():
    job = JobConfig(SLOW_CONFIG, "c.yaml")
    changes = {item.finding: item.changes for item in propose(job, measured_job())}
    assert changes == {
        "launch-bound": {"training.capture": "auto"},
        "full-precision": {"training.precision": "auto", "gpu_optimization.use_amp": True},
        "starved-by-loader": {"gpu_optimization.use_chunk_loader": True},
        "empty-cache-each-step": {
            "data.memory_efficient_mode.ram_32gb_mode.empty_cache_frequency": 0
        },
        "sync-every-step": {"training.read_every": 50},
    }
    assert set(changes) <= set(FINDING_NAMES)  # each has its place in the docs
    for item in propose(job, measured_job()):
        after = job.with_changes(item.changes).settings
        assert after != job.settings
        assert "c.yaml:" in item.reason  # where the brake is written
    assert job.with_changes(changes["full-precision"]).settings.precision == "auto"
    free = JobConfig("training: {batch_size: 16}", "c.yaml")
    assert propose(free, measured_job()) == []
    assert propose(job, measured_job(machine=MachineFacts(device="cpu"))) == []


def test_a_larger_batch_takes_over_from_accumulation():
    text = "training: {batch_size: 16, gradient_accumulation_steps: 8}"
    job = JobConfig(text, "c.yaml")
    changes = batch_proposal(job, 64).changes
    after = job.with_changes(changes).settings
    assert (after.training.batch_size, after.training.gradient_accumulation_steps) == (64, 2)
    assert after.samples_per_update == job.settings.samples_per_update
    assert (
        job.with_changes(
            batch_proposal(job, 512).changes
        ).settings.training.gradient_accumulation_steps
        == 1
    )


def with_alternative(name, rate, **more):
    tried = Alternative(name, {"training.batch_size": 64}, "why", rate, **more)
    measured = measured_job()
    return replace(measured, ablation=replace(measured.ablation, alternatives=(tried,)))


def test_what_was_tried_replaces_what_was_reckoned():
    reckoned = Finding("batch-too-small", "title", ("seen",), "remedy", Gain(1.5, 9.0, 12.0))
    other = Finding("memory-creep", "t", (), "r", ends_the_run=True)
    measured = with_alternative("batch-too-small", spread(3200.0))
    found = weigh(measured, [reckoned, other])
    assert [item.name for item in found] == ["memory-creep", "batch-too-small"]
    assert found[1].gain.likely == pytest.approx(2.0)
    assert found[1].evidence[0] == "seen"
    assert "3,200 samples/s instead of 1,600" in found[1].evidence[-1]
    assert found[1].patch.config == {"training.batch_size": 64}
    # Nothing was reckoned: what was tried is a finding by itself.
    assert [item.name for item in weigh(measured, [])] == ["batch-too-small"]


def test_what_brought_nothing_is_no_finding():
    reckoned = Finding("batch-too-small", "title", (), "remedy", Gain(1.5, 3.0, 4.0))
    assert weigh(with_alternative("batch-too-small", spread(1650.0)), [reckoned]) == []
    within_noise = Spread(2000.0, 1400.0, 2600.0, 5)
    assert weigh(with_alternative("batch-too-small", within_noise), [reckoned]) == []
    failed = with_alternative("batch-too-small", None, failure="it does not fit into memory")
    assert weigh(failed, [reckoned]) == [reckoned]
    gain = measured_gain(Spread(100, 90, 110, 5), Spread(200, 180, 220, 5))
    assert gain.low < gain.likely < gain.high
    assert gain.likely == 2.0


@given(
    st.floats(1e-4, 1), st.floats(0, 0.5), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.01),
    st.sampled_from([None, "job"]),
)  # fmt: skip
def test_the_parts_of_a_step_add_up_to_it(step, wait, backward, optimizer, collate, loader):
    measured = Measurements(
        "x",
        step_seconds=spread(step),
        wait_seconds=spread(wait * step),
        backward_seconds=spread(backward * step),
        optimizer_seconds=spread(optimizer * step),
        loader=loader and LoaderFacts(kind="stoker", work=LoaderWork(collate=collate)),
    )
    parts = split_step(measured)
    assert sum(part.seconds for part in parts) == pytest.approx(step, rel=2e-3)
    assert all(part.seconds >= 0 for part in parts)
    waited = sum(part.seconds for part in parts if part.kind == "wait")
    assert waited == pytest.approx(wait * step, abs=1e-3 * step)  # as the headline says
    assert split_step(Measurements("x")) == []


# -- configs ---------------------------------------------------------------------------------------


def test_what_is_typed_is_worked_into_the_config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("# mine\ntraining:\n  batch_size: 16 # small\nrecipe: {name: tabular}\n")
    job = JobConfig.read(path, ["training.lr=0.5", "recipe.options.hidden=[4, 5]"], "a store")
    assert job.settings.training.lr == 0.5
    assert job.settings.recipe.options == {"hidden": [4, 5]}
    assert job.settings.recipe.store == "a store"
    assert "# mine" in job.text
    assert "batch_size: 16 # small" in job.text
    assert job.file == str(path)
    assert JobConfig.read(path).text == path.read_text()
    with pytest.raises(ConfigError, match="epocs"):
        JobConfig.read(path, ["training.epocs=3"])


def test_a_change_goes_to_the_key_that_decides():
    job = JobConfig("data: {batch_size: 4}", "c.yaml")
    assert job.deciding({"training.batch_size": 9, "unknown.key": 1}) == {
        "data.batch_size": 9,
        "unknown.key": 1,
    }
    finding = Finding(
        "batch-too-small", "t", (), "r", Gain(1, 2, 3), patch=Patch({"training.batch_size": 9})
    )
    ends = replace(finding, name="bad-values", gain=Gain(), ends_the_run=True)
    unreadable = replace(finding, name="x", patch=Patch({"training.no_such_key": 1}))
    chosen, treated = choose_treatment(job, [ends, unreadable, finding])
    assert chosen is finding
    assert treated.settings.batch_size == 9
    assert "# stoker doctor, batch-too-small: data.batch_size: 9" in treated.text
    assert choose_treatment(job, [ends, unreadable]) is None


# -- measured --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tabular", "stateful", "massspec", "segmentation"])
def test_every_kind_of_job_can_be_taken_apart(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_store(kind, tmp_path / "store").close()
    settings = settings_for(kind, tmp_path / "store", tmp_path / "run")
    with open_run(settings, device="cpu") as run:
        measured = examine(run, SHORT, "c.yaml")
    assert measured.kind == "job"
    assert measured.steps >= 2 * LEAST_LAPS
    assert 0 < measured.samples_per_step <= 16
    ablation = measured.ablation
    for spread_ in (ablation.loader_seconds, ablation.step_seconds, ablation.together_seconds):
        assert spread_.low <= spread_.median <= spread_.high
        assert spread_.median > 0
    assert ablation.copy_seconds is None  # there is no device to copy to
    assert measured.loader.tier == "resident"
    assert measured.loader.work.collate > 0
    assert (measured.loader.work.transform > 0) == (kind == "segmentation")
    assert measured.loader.work.read == 0.0  # resident
    # A backward pass is a part of its step, and all steps count: whatever else the machine does, it is shorter.
    assert measured.backward_seconds.count == measured.step_seconds.count == measured.steps
    assert measured.backward_seconds.median < measured.step_seconds.median
    assert {"wait", "step", "forward", "backward", "optimizer"} == {
        span.kind for span in measured.timeline
    }
    assert not measured.bad_values
    assert Measurements.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    assert not (tmp_path / "run").exists()  # nothing is written
    assert not (tmp_path / "runs").exists()


def test_an_update_of_several_batches_is_one_step(tmp_path):
    make_store("tabular", tmp_path / "store").close()
    more = "training.gradient_accumulation_steps=4"
    settings = settings_for("tabular", tmp_path / "store", tmp_path / "run", more)
    with open_run(settings, device="cpu") as run:
        measured = examine(run, SHORT, "c.yaml")
    assert measured.samples_per_step == pytest.approx(64, abs=4)
    assert measured.steps == 2 * SHORT.steps // 4
    assert measured.loader.batches_per_step == 4
    assert measured.step_seconds.count == measured.steps


def test_the_laps_of_an_update_are_added_and_its_waits_are_those_for_data():
    laps = [Lap(float(at), 0.3, 1.0 + at, 16) for at in range(11)]
    work = LoaderWork(collate=0.05, transform=0.05)
    seconds, waits = _per_step(laps, Timed(()), work, 4, torch.device("cpu"))
    assert seconds == [1 + 2 + 3 + 4, 5 + 6 + 7 + 8]  # the last three are no whole update
    assert waits == pytest.approx([4 * 0.2] * 2)
    assert _per_step(laps, Timed(()), work, 1, torch.device("cpu"))[0] == [
        lap.seconds for lap in laps
    ]


def test_reading_and_decoding_are_told_apart_where_data_is_compressed(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    # Larger than what a store keeps of decoded chunks, so that they are decoded in every epoch.
    monkeypatch.setattr("stoker.store.arrays._CACHED_CHUNK_BYTES", 4 << 20)
    features = rng.integers(0, 9, size=(1500, 2048)).astype("f4")
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file.create_dataset(
            "features", data=features, compression="gzip", compression_opts=1, chunks=(50, 2048)
        )
        file.create_dataset("targets", data=(features[:, 0] > 0).astype("i8"))
    settings = settings_for(
        "tabular", tmp_path / "plain.h5", tmp_path / "run",
        "gpu_optimization.chunk_size_gb=0.0025", "training.batch_size=50",
    )  # fmt: skip
    with open_run(settings, device="cpu") as run:
        measured = examine(run, SHORT, "c.yaml")
    assert measured.loader.tier == "chunked"
    assert measured.loader.work.decode > measured.loader.work.read > 0
    facts = {item.name.rpartition(":")[2]: item for item in measured.hdf5}
    assert set(facts) == {"features"}
    assert facts["features"].compression == "gzip"
    assert facts["features"].chunks == (50, 2048)
    assert facts["features"].bytes_used_per_batch == pytest.approx(50 * 2048 * 4, rel=0.4)
    assert 1 <= facts["features"].reads_per_batch <= 3


CONFIG = """\
# what a user wrote
recipe:
  name: tabular
  store: {store}
  options: {{hidden: [16]}}
training:
  batch_size: {batch} # chosen long ago
"""


def make_job(tmp_path, batch, num_samples=4000):
    write_store(tmp_path / "store", [class_table(num_samples)]).close()
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(store=tmp_path / "store", batch=batch))
    return JobConfig.read(path)


def test_a_tiny_batch_is_found_tried_and_applied(tmp_path):
    job = make_job(tmp_path, batch=4)
    for steps in (
        10,
        30,
        90,
    ):  # a crowded machine may need more: the doctor judges nothing within the noise
        found = consult_job(job, device="cpu", steps=steps, seconds=steps / 5)
        if found.findings:
            break
    assert found.findings[0].name == "batch-too-small"
    assert found.verdict.startswith("batch-too-small: ")
    (tried,) = found.measurements.ablation.alternatives
    assert tried.finding == "batch-too-small"
    sizes = [size for size, _ in found.measurements.ablation.larger_batches]
    assert tried.changes["training.batch_size"] in sizes  # never an untried one
    finding, treated = choose_treatment(job, found.findings)
    for steps in (10, 30, 90):
        outcome = treat_job(job, treated, finding, device="cpu", steps=steps, seconds=steps / 5)
        if outcome.ratio > 1.5:
            break
    assert outcome.ratio > 1.5
    low, likely, high = outcome.predicted
    assert low <= likely <= high
    assert outcome.before * finding.gain.likely == pytest.approx(likely)
    text = treated.text
    assert "# what a user wrote\n" in text
    assert f"batch_size: {tried.changes['training.batch_size']} # chosen long ago" in text
    document = json.loads(json.dumps(found.to_json()))
    assert document["findings"][0]["name"] == "batch-too-small"
    assert document["measurements"]["kind"] == "job"


@pytest.mark.slow
def test_the_predicted_gain_is_the_measured_one(tmp_path):
    """Within 30 %, on a machine that does nothing else."""
    job = make_job(tmp_path, batch=8, num_samples=20_000)
    found = consult_job(job, device="cpu")
    finding, treated = choose_treatment(job, found.findings)
    outcome = treat_job(job, treated, finding, device="cpu")
    assert outcome.ratio == pytest.approx(finding.gain.likely, rel=0.3)


def test_a_healthy_job_has_nothing_to_fix(tmp_path):
    # Two batches an epoch: a larger one would be no epoch any more, and the data is resident.
    job = make_job(tmp_path, batch=256, num_samples=640)
    job = job.with_changes({"recipe.options.hidden": [128, 128]})
    found = consult_job(job, device="cpu", steps=10, seconds=2)
    assert found.findings == ()
    assert found.verdict == "nothing to fix"
    assert found.measurements.ablation.alternatives == ()


def test_values_that_are_not_finite_are_the_first_finding(tmp_path):
    dirty_table(tmp_path / "store").close()
    settings = settings_for(
        "tabular", tmp_path / "store", tmp_path / "run",
        "recipe.options.scale_inputs=false", "recipe.options.split=random",
    )  # fmt: skip
    with open_run(settings, device="cpu") as run:
        measured = examine(run, Patience(2, 30, 5.0), "c.yaml")
    (bad,) = measured.bad_values
    assert bad.what == "loss"
    assert "sample 5" in bad.where
    from stoker.doctor.rules import diagnose

    first = diagnose(measured)[0]
    assert first.name == "bad-values"
    assert first.ends_the_run


def test_a_job_without_a_batch_is_refused(tmp_path):
    make_store("tabular", tmp_path / "store").close()
    settings = settings_for(
        "tabular", tmp_path / "store", tmp_path / "run",
        "training.batch_size=5000", "data.drop_last=true",
    )  # fmt: skip
    with open_run(settings, device="cpu") as run, pytest.raises(InputError, match="no batch"):
        examine(run, SHORT, "c.yaml")


def test_a_size_that_does_not_fit_is_no_alternative(tmp_path, monkeypatch):
    job = make_job(tmp_path, batch=4)
    with open_run(job.settings, device="cpu") as run:
        measured = examine(run, SHORT, "c.yaml")
        forward = run.job.model.forward

        def limited(inputs):
            count = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
            if len(count) > 8:
                raise torch.OutOfMemoryError("made up")
            return forward(inputs)

        monkeypatch.setattr(run.job.model, "forward", limited)
        tried = try_alternatives(run, job, measured, SHORT).ablation
    assert [size for size, _ in tried.larger_batches] == [8]
    assert all(item.changes == {"training.batch_size": 8} for item in tried.alternatives)


def test_each_part_alone_does_nothing_else(tmp_path, monkeypatch):
    make_store("segmentation", tmp_path / "store").close()
    settings = settings_for("segmentation", tmp_path / "store", tmp_path / "run")
    trained, gathered = [], []
    with open_run(settings, device="cpu") as run:
        forward, gather = run.job.model.forward, Loader.remaining_batches

        def noted(images):
            trained.append(images.sum().item())
            return forward(images)

        def counted(self):
            for batch in gather(self):
                gathered.append(batch)
                yield batch

        monkeypatch.setattr(run.job.model, "forward", noted)
        monkeypatch.setattr(Loader, "remaining_batches", counted)
        loader = time_loader(run, SHORT, captured=False)
        assert len(gathered) == SHORT.most
        assert not trained, "the loader alone trains nothing"
        gathered.clear()
        step = time_step(run, SHORT)
        assert len(gathered) == 1, "the step alone has its batch before it begins"
        assert (len(trained), len(set(trained))) == (SHORT.most, 1)
        trained.clear()
        together = time_together(run, SHORT)
        assert len(set(trained)) == len(trained) == SHORT.most
    assert [len(timed.laps) for timed in (loader, step, together)] == [SHORT.steps] * 3


# -- profile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_of_the_recorded_steps_only(tmp_path, name):
    make_store("tabular", tmp_path / "store").close()
    settings = settings_for("tabular", tmp_path / "store", tmp_path / "run")
    with open_run(settings, device="cpu") as run:
        trace = record(run, Schedule(wait=2, warmup=1, active=3), tmp_path / name)
    raw = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"}
    assert [path.name for path in tmp_path.glob("*trace*")] == [name]
    assert trace.num_steps == 3
    assert 0 < trace.seconds < 60
    assert trace.kernels is None
    updates = next(item for item in trace.operations if item.name.startswith("Optimizer.step"))
    assert updates.calls == 3
    costs = [item.cpu_seconds for item in trace.operations]
    assert costs == sorted(costs, reverse=True)


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tabular", "forex", "segmentation", "massspec"])
def test_every_kind_of_job_on_a_gpu(kind, tmp_path):
    make_store(kind, tmp_path / "store").close()
    settings = settings_for(kind, tmp_path / "store", tmp_path / "run", "training.precision=auto")
    with open_run(settings, device="cuda") as run:
        patience = replace(default_patience(run.device), steps=30)
        measured = examine(run, patience, "c.yaml")
    assert measured.machine.device == "cuda"
    assert measured.ablation.copy_seconds.median > 0
    assert measured.machine.pinned_bytes_per_second > 0
    assert measured.kernels.per_step > 1
    assert 0 < measured.kernels.busy_share <= 1
    assert measured.captured == (kind != "massspec")  # ragged fields have no static shape
    assert measured.memory.device_bytes > 0
    assert measured.wait_seconds.median <= measured.step_seconds.median


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_a_job_with_its_brakes_on_is_told_to_release_them(tmp_path):
    write_store(tmp_path / "store", [class_table(20_000)]).close()
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(store=tmp_path / "store", batch=4096) + "  capture: off\n")
    job = JobConfig.read(path)
    found = consult_job(job, device="cuda", steps=40)
    names = [finding.name for finding in found.findings]
    assert "launch-bound" in names
    finding = next(item for item in found.findings if item.name == "launch-bound")
    assert finding.patch.config == {"training.capture": "auto"}
    treated = job.with_changes(finding.patch.config)
    outcome = treat_job(job, treated, finding, device="cuda", steps=40)
    assert outcome.ratio > 1.2
    assert outcome.ratio == pytest.approx(finding.gain.likely, rel=0.3)
