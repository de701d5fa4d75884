"""The doctor's verdicts: pure functions over measurements that are made by hand here."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from stoker.config.tree import key_schemas
from stoker.doctor.cases import rule_name
from stoker.doctor.findings import Consultation, Finding, Gain, Outcome, Patch
from stoker.doctor.gains import Pace, gain, is_starved, pace_of, suggested_workers
from stoker.doctor.measurements import (
    Ablation,
    AllocatorFacts,
    BadValues,
    DeviceCopy,
    Hdf5Facts,
    HostCall,
    KernelFacts,
    LoaderFacts,
    LoaderWork,
    LongSteps,
    MachineFacts,
    Measurements,
    MemoryFacts,
    OperatorFacts,
    RankFacts,
    TimelineSpan,
)
from stoker.doctor.rules import FINDING_NAMES, RULES, diagnose, why_unjudged
from stoker.errors import CorruptError
from stoker.measure.readings import Spread

ROOT = Path(__file__).resolve().parent.parent


def at(seconds: float) -> Spread:
    return Spread(seconds, seconds * 0.98, seconds * 1.02, 50)


def job(step=0.010, wait=0.0, *, load=None, workers=1, work=None, **more) -> Measurements:
    """Return measurements of a script whose steps take `step` seconds, `wait` of them for data."""
    load = load if load is not None else (wait if workers == 0 else 0.001)
    loader = LoaderFacts(
        workers=workers,
        batch_size=64,
        work=work or LoaderWork(other=load),
        alone_seconds=at(load),
        blocked_share=more.pop("blocked", 0.0),
        worker_cpu_shares=more.pop("busy", (0.9,) * workers),
        main_cpu_share=more.pop("main", 0.2),
        persistent_workers=True,
        batch_bytes=1000,
        where="train.py:20",
        dataset_where="train.py:5",
        busiest_line="train.py:7",
        busiest_share=0.9,
        **more.pop("loader", {}),
    )
    plain = {
        "machine": MachineFacts(cores=8),
        "steps": 100,
        "seconds": 100 * step,
        "samples_per_step": 64.0,
        "step_seconds": at(step),
        "wait_seconds": at(wait),
        "compute_seconds": at(step - wait),
        "loader": loader,
        "operators": OperatorFacts(50, step / 2),
    }
    return Measurements("python train.py", **{**plain, **more})


def test_more_workers_than_it_is_worth():
    """4 ms of waiting for what one process makes in 0.3: none are better."""
    found = diagnose(job(0.006, 0.004, load=0.0003, workers=8, busy=(0.05,) * 8))[0]
    assert found.name == "starved-by-loader"
    assert "num_workers=0" in found.remedy
    # Caches stay warm: a batch takes 40 % of its time in a worker that slept, and the step 0.35 ms less.
    assert found.gain.likely == pytest.approx(0.006 / (0.4 * 0.0003 + 0.002 - 0.00035))
    assert len(DataLoader(range(4), 2, **found.patch.loader_arguments)) == 2  # torch takes them
    # The same wait for batches that cost a lot to make: workers are right, there are enough.
    dear = diagnose(job(0.006, 0.004, load=0.006, workers=8, busy=(0.2,) * 8))
    assert all("num_workers=0" not in one.remedy for one in dear)


GPU = MachineFacts(cores=8, device="cuda", device_name="GPU")
ROWS = Hdf5Facts("f.h5:/rows", (1000, 512), None, None, 1e6, 1e6, 0.028, 64, "train.py:9")


SICK = {
    "slow-between-steps": job(
        0.030,
        0.0,
        between_seconds=0.020,
        between=(HostCall("train.py:8", "between", 0.0, 0.019),),
    ),
    "no-workers": job(0.030, 0.020, workers=0),
    "starved-by-loader": job(0.030, 0.025, load=0.030, busy=(0.95,)),
    "decode-bound": job(
        0.030,
        0.025,
        load=0.240,
        workers=8,
        work=LoaderWork(decode=0.2, other=0.03),
        busy=(0.95,) * 8,
    ),
    "disk-bound": job(0.030, 0.025, load=0.060, workers=2, blocked=0.9),
    "augment-on-cpu": job(0.030, 0.025, load=0.030, work=LoaderWork(transform=0.028, read=0.002)),
    "python-collate": job(
        0.030,
        0.025,
        load=0.030,
        work=LoaderWork(collate=0.028, read=0.002),
        loader={"collate_where": "train.py:30"},
    ),
    "hdf5-compressed": job(
        0.030,
        0.025,
        load=0.030,
        work=LoaderWork(read=0.029),
        hdf5=(replace(ROWS, compression="gzip", chunks=(1, 512)),),
    ),
    "hdf5-chunks": job(
        0.030,
        0.025,
        load=0.030,
        work=LoaderWork(read=0.029),
        hdf5=(replace(ROWS, chunks=(500, 16), bytes_touched_per_batch=4e7),),
    ),
    "workers-restarted": replace(
        job(0.010, 0.0005, load=0.001, workers=2),
        seconds=1.6,
        loader=LoaderFacts(
            workers=2,
            persistent_workers=False,
            epoch_starts=10,
            epoch_start_seconds=0.060,
            steps_per_epoch=10,
            alone_seconds=at(0.001),
            where="train.py:20",
        ),
    ),
    "pageable-copies": job(
        machine=GPU,
        kernels=KernelFacts(50, 60e-6, 0.3),
        copies=(DeviceCopy("train.py:40", 20e6, 0.004),),
    ),
    "sync-every-step": job(
        machine=GPU,
        kernels=KernelFacts(80, 50e-6, 0.4),
        syncs=(
            HostCall("train.py:44", "item", 1.0, 0.004),
            HostCall("train.py:50", "cpu", 0.1, 0.001),
        ),
    ),
    "launch-bound": job(machine=GPU, kernels=KernelFacts(400, 5e-6, 0.2), samples_per_step=256.0),
    "batch-too-small": job(
        0.002,
        0.0001,
        workers=0,
        samples_per_step=4.0,
        operators=OperatorFacts(130, 0.0001, 0.00002),
    ),
    "empty-cache-each-step": job(
        machine=GPU,
        allocator=AllocatorFacts(0.0, 12.0, (HostCall("train.py:60", "empty_cache", 1.0, 0.002),)),
    ),
    "gc-each-step": job(host_calls=(HostCall("train.py:61", "gc.collect", 1.0, 0.004),)),
    "saves-too-often": job(host_calls=(HostCall("train.py:62", "torch.save", 0.1, 0.003),)),
    "evaluates-each-step": job(evaluation_seconds=0.004, evaluation_where="train.py:70"),
    "python-in-model": job(python_seconds=0.006, python_lines=("model.py:12",)),
    "long-steps": job(long_steps=LongSteps(20, 4.0, 0.4, 0.9, (("train.py:80", 0.8),))),
    "double-precision": job(operators=OperatorFacts(50, 0.009, 0.001, 0.008, {"float64": 0.007})),
    "full-precision": job(
        machine=GPU,
        kernels=KernelFacts(20, 4e-4, 0.95),
        operators=OperatorFacts(50, 0.005, single_product_seconds=0.006, single_times=6.0),
    ),
    "allocator-retries": job(machine=GPU, allocator=AllocatorFacts(0.5, 40.0)),
    "memory-creep": job(memory=MemoryFacts(host_bytes_per_step=2e6, host_bytes=10**9)),
    "bad-values": job(bad_values=(BadValues("batch", "train.py:5", 2, 12),)),
    "imbalanced-ranks": job(
        0.020, ranks=(RankFacts(0, 0.020, 0.008), RankFacts(1, 0.020, 0.020)), samples_per_step=8.0
    ),
}


def test_there_is_a_sick_job_for_every_finding():
    assert set(SICK) == {rule_name(rule) for rule in RULES}
    assert len(FINDING_NAMES) == len(set(FINDING_NAMES)) >= 12


@pytest.mark.parametrize("name", SICK)
def test_each_finding_is_found_first(name):
    found = diagnose(SICK[name])
    # More workers on idle cores come before the cause that makes loading slow.
    found = [
        one for one in found if one.name == name or "num_workers" not in one.patch.loader_arguments
    ]
    assert found
    assert found[0].name == name
    top = found[0]
    assert top.evidence
    assert all("None" not in line and "nan" not in line for line in top.evidence)
    assert top.remedy.count(".") <= 3
    assert top.remedy.endswith(".")
    assert 1 <= top.gain.low <= top.gain.likely <= top.gain.high < 100
    assert top.ends_the_run or name == "empty-cache-each-step" or top.gain.likely > 1.05


@pytest.mark.parametrize(
    "healthy",
    [
        job(),
        job(wait=0.0008),
        job(wait=0.0005, workers=0),
        job(0.002, 0.0001, samples_per_step=2048.0),
        job(machine=GPU, kernels=KernelFacts(300, 30e-6, 0.95)),
        job(machine=GPU, kernels=KernelFacts(1, 9e-3, 0.97), captured=True),
        job(machine=GPU, syncs=(HostCall("a:1", "item", 0.02, 0.0001),)),
        job(host_calls=(HostCall("a:1", "torch.save", 0.001, 0.0001),)),
        job(ranks=(RankFacts(0, 0.010, 0.0095), RankFacts(1, 0.010, 0.0099))),
        job(memory=MemoryFacts(device_bytes_per_step=0.0, host_bytes_per_step=0.0)),
        Measurements("python nothing.py"),
    ],
    ids=str,
)
def test_a_healthy_job_gets_no_advice(healthy):
    assert diagnose(healthy) == []


def test_what_ends_the_run_comes_first_and_then_the_larger_gain():
    sick = job(
        0.040,
        0.030,
        workers=0,
        bad_values=(BadValues("batch", None, 1, 1),),
        host_calls=(HostCall("a:1", "gc.collect", 1.0, 0.004),),
    )
    names = [finding.name for finding in diagnose(sick)]
    assert names[0] == "bad-values"
    gains = [finding.gain.likely for finding in diagnose(sick)[1:]]
    assert gains == sorted(gains, reverse=True)


def test_a_named_cause_replaces_the_generic_one():
    names = [finding.name for finding in diagnose(SICK["disk-bound"])]
    assert "starved-by-loader" not in names
    transforms = LoaderWork(transform=0.028, read=0.002)
    busy = job(0.030, 0.025, load=0.030, work=transforms, machine=MachineFacts(cores=2))
    assert [finding.name for finding in diagnose(busy)] == ["augment-on-cpu"]


def test_more_workers_are_offered_first_where_cores_are_idle():
    # One worker on a machine with sixteen cores, as many scripts are written.
    transforms = LoaderWork(transform=0.028, read=0.002)
    idle = job(0.030, 0.025, load=0.030, work=transforms, machine=MachineFacts(cores=16))
    first, second = diagnose(idle)
    assert first.name == "starved-by-loader"
    assert first.patch.loader_arguments["num_workers"] > 1
    assert second.name == "augment-on-cpu"


def test_gains_of_several_findings_are_said_to_overlap():
    idle = job(0.030, 0.025, load=0.030, work=LoaderWork(transform=0.028, read=0.002))
    found = Consultation(idle, tuple(diagnose(idle)))
    assert len(found.findings) == 2
    assert "not to be multiplied" in found.overlap
    assert found.to_json()["overlap"] == found.overlap
    assert Consultation(idle, found.findings[:1]).overlap == ""


@pytest.mark.parametrize(
    ("after", "told"), [(100.0, "21% below"), (127.0, ""), (200.0, "57% above")]
)
def test_a_prediction_that_missed_says_by_how_much(after, told):
    finding = Finding("no-workers", "t", (), "r", Gain(1.2, 1.27, 1.4))
    outcome = Outcome(finding, "num_workers=4", 100.0, after)
    assert (told in outcome.miss) if told else not outcome.miss
    assert outcome.to_json()["miss"] == outcome.miss
    assert Outcome(finding, "", 100.0, None).miss == ""


# -- what cannot be judged ---------------------------------------------------------------------------


def test_a_step_that_waits_without_a_remedy_is_not_called_healthy():
    # 90 % waiting for a slow __getitem__, on two cores that other programs keep busy.
    waiting = job(
        0.050,
        0.045,
        workers=0,
        machine=MachineFacts(cores=2),
        loader={"queued_share": 0.75},
        main=1.9,
    )
    findings = diagnose(waiting)
    if findings:  # a remedy is offered: right too
        assert findings[0].name == "no-workers"
        return
    told = why_unjudged(waiting, findings)
    assert "waits for data 90% of the time (a DataLoader at train.py:20 with num_workers=" in told
    assert "), and other work keeps the cores busy; measure again" in told
    assert Consultation(waiting, (), unjudged=told).verdict.startswith("cannot judge: ")


@pytest.mark.parametrize("busy", [0.8, 0.99])
def test_a_host_that_waits_while_its_gpu_works_is_told_what_is_to_be_had(busy):
    waiting = job(0.006, 0.005, workers=0, kernels=KernelFacts(20.0, 1e-4, busy))
    told = why_unjudged(waiting, [])
    if busy > 0.95:
        assert not told, "the GPU is the limit: there is nothing to fix"
    else:
        assert told.endswith("the GPU works 80% of the time, so that at most × 1.25 is to be had")


@pytest.mark.parametrize(
    ("library", "advice"),
    [
        ("transformers/trainer.py:2674", "logging_nan_inf_filter=False"),
        ("torch/amp/grad_scaler.py:364", "fused=True"),
        ("torch/distributions/distribution.py:76", "set_default_validate_args(False)"),
        ("lightning/fabric/utilities/apply_func.py:134", "prog_bar=False"),
        ("lightning_fabric/utilities/apply_func.py:134", "prog_bar=False"),
        ("other/loop.py:3", "the calls are those of other/loop.py:3"),
        ("", "read them every 50 steps"),
    ],
)
def test_values_that_a_library_fetches_are_not_looked_for_in_the_script(library, advice):
    call = HostCall("train.py:9", "bool", 2.0, 0.004, library=library)
    (finding,) = [
        one for one in diagnose(job(0.010, 0.0, syncs=(call,))) if one.name == "sync-every-step"
    ]
    assert advice.lower() in finding.remedy.lower()
    assert (f", in {library}" in finding.evidence[1]) == bool(library)
    assert bool(finding.patch.script) == (not library)


def test_only_a_job_without_findings_is_unjudged():
    unclear = job(0.010, 0.0, unjudged=("no nn.Module was seen to work",))
    assert why_unjudged(unclear, ()) == "no nn.Module was seen to work"
    assert why_unjudged(unclear, diagnose(SICK["no-workers"])) == ""
    assert why_unjudged(job(0.010, 0.0), ()) == ""


# -- an open HDF5 file -------------------------------------------------------------------------------


def test_workers_are_not_tried_for_a_dataset_with_an_open_hdf5_file():
    plain = (
        replace(ROWS, name="img.h5:/images"),
        replace(ROWS, name="img.h5:/labels", shape=(1000,)),
    )
    held = job(0.030, 0.020, workers=0, hdf5=plain, loader={"open_hdf5": ("file", "img.h5")})
    (finding,) = diagnose(held)
    assert finding.name == "no-workers"
    assert not finding.patch.loader_arguments
    assert "img.h5 open in self.file" in finding.remedy
    assert finding.patch.replacement == "stoker.Loader('img.h5', 64, as_tuple=('images', 'labels'))"
    in_order = job(
        0.030,
        0.020,
        workers=0,
        hdf5=plain[:1],
        loader={"open_hdf5": ("f", "img.h5"), "in_order": True},
    )
    (finding,) = diagnose(in_order)
    assert (
        finding.patch.replacement
        == "stoker.Loader('img.h5', 64, as_tuple=('images',), order='sequential')"
    )
    other = job(
        0.030,
        0.020,
        workers=0,
        hdf5=(plain[0], replace(ROWS, name="other.h5:/labels")),
        loader={"open_hdf5": ("f", "img.h5")},
    )
    assert diagnose(other)[0].patch.replacement == "", "two files are not one store"


def test_two_costs_that_hide_each_other_are_not_called_healthy():
    fetched = (HostCall("a.py:3", "float", 900.0, 0.012),)
    hidden = job(0.040, 0.007, workers=1, load=0.038, busy=(0.5,), syncs=fetched)
    told = why_unjudged(hidden, [])
    assert "waiting for data 18%, fetching values from the step 30%" in told
    assert not why_unjudged(job(0.040, 0.007, workers=1, load=0.038, busy=(0.5,)), [])


def test_a_restart_costs_no_more_than_what_is_beyond_a_step():
    short = job(0.010, 0.001, workers=2, loader={"epoch_starts": 9, "epoch_start_seconds": 2.0})
    loader = replace(short.loader, persistent_workers=False, steps_per_epoch=8)
    found = diagnose(replace(short, loader=loader, steps=100, seconds=3.0))
    finding = next(one for one in found if one.name == "workers-restarted")
    assert finding.gain.likely == pytest.approx(3.0, rel=0.1), (
        "0.03 s on average, 0.01 s without restarts"
    )


def test_data_that_is_converted_from_float64_is_no_model_in_float64():
    computing = OperatorFacts(100, 0.001, double_seconds=0.008, matmul_seconds={"float32": 0.002})
    assert not diagnose(job(0.010, 0.0, operators=computing))
    double = replace(computing, matmul_seconds={"float64": 0.002})
    assert diagnose(job(0.010, 0.0, operators=double))[0].name == "double-precision"


def test_float64_on_a_gpu_is_told_by_what_its_products_take_there():
    """On an H200 a product in float64 takes as long as in float32, on most other GPUs 32 to 64 times."""
    kernels = OperatorFacts(40, 0.001, double_seconds=0.009, matmul_seconds={"float64": 0.001})
    busy = KernelFacts(100, 9e-5, 0.95)

    def told(products, times, kernels_of=busy):
        facts = replace(kernels, double_product_seconds=products, double_times=times)
        found = diagnose(job(0.010, machine=GPU, operators=facts, kernels=kernels_of))
        return next((one for one in found if one.name == "double-precision"), None)

    assert told(0.009, 1.0) is None
    assert told(0.009, 32.0).gain.likely == pytest.approx(1 / (1 - 0.95 * 0.9 * 31 / 32))
    assert "a product in float64 takes × 32 as long" in told(0.009, 32.0).evidence[2]
    assert told(0.0, 1.0).gain.likely == pytest.approx(1 / (1 - 0.95 * 0.45)), "half of the bytes"
    launches = KernelFacts(100, 1e-6, 0.09)
    assert told(0.0, 2.0, launches) is None, "the step waits for launches, not for kernels"


def test_a_conversion_comes_with_its_command_and_the_loader_that_reads_the_store():
    packed = replace(ROWS, name="my data/img.h5:/images", chunks=(1, 512), compression="gzip")
    slow = job(0.030, 0.025, load=0.030, work=LoaderWork(read=0.029), hdf5=(packed,))
    found = diagnose(slow)
    finding = next(one for one in found if one.name == "hdf5-compressed")
    assert "`stoker pack arrays 'my data/img.h5' 'my data/img-store'`" in finding.remedy
    assert finding.patch.replacement.startswith("stoker.Loader('my data/img-store', 64, ")


def test_workers_that_are_fast_enough_are_not_blamed():
    # Loading takes a tenth of the step: whatever the step waits for, it is not the decoding.
    waiting = job(0.010, 0.002, load=0.001, work=LoaderWork(decode=0.001))
    assert diagnose(waiting) == []
    slow_way = job(0.010, 0.006, load=0.005, workers=4, work=LoaderWork(decode=0.005))
    (finding,) = diagnose(slow_way)
    assert finding.name == "starved-by-loader"
    assert "way" in finding.title or "from the workers" in finding.title


def test_workers_that_queue_for_cores_explain_the_waiting():
    crowded = job(
        0.040, 0.030, load=0.012, work=LoaderWork(decode=0.012), loader={"queued_share": 0.6}
    )
    assert is_starved(crowded)


def test_a_crowded_machine_promises_less():
    def promised(queued):
        sick = job(0.030, 0.025, load=0.030 * (1 - queued), busy=(0.9 * (1 - queued),), main=0.1)
        sick = replace(sick, machine=MachineFacts(cores=2))
        return diagnose(replace(sick, loader=replace(sick.loader, queued_share=queued)))[
            0
        ].gain.likely

    quiet, busy = promised(0.0), promised(0.4)
    assert quiet == pytest.approx(2, rel=0.1)
    assert 1.1 < busy < 0.85 * quiet


def test_larger_batches_that_were_tried_are_not_guessed_as_well():
    small = SICK["batch-too-small"]
    tried = Ablation(step_seconds=at(0.010), larger_batches=((128, 0.011), (256, 0.013)))
    found = diagnose(replace(small, ablation=tried))
    assert "batch-too-small" not in {one.name for one in found}


def test_a_captured_step_that_was_measured_beats_a_guess():
    alone = Ablation(step_seconds=at(0.010), captured_step_seconds=at(0.004))
    found = diagnose(job(machine=GPU, kernels=KernelFacts(400, 5e-6, 0.2), ablation=alone))
    finding = next(one for one in found if one.name == "launch-bound")
    assert finding.gain.likely == pytest.approx(2.5, rel=0.05)


def test_a_stoker_job_that_starves_gets_config_keys():
    waiting = replace(
        job(0.030, 0.020),
        kind="job",
        loader=LoaderFacts(kind="stoker", tier="streamed", alone_seconds=at(0.028)),
        ablation=Ablation(step_seconds=at(0.010), loader_seconds=at(0.028)),
    )
    (finding,) = diagnose(waiting)
    assert finding.name == "starved-by-loader"
    assert finding.patch.config["data.use_chunk_loader"] is True
    assert not finding.patch.loader_arguments


def test_every_config_key_that_is_suggested_exists():
    for name, sick in SICK.items():
        for finding in diagnose(sick):
            assert set(finding.patch.config) <= set(key_schemas()), name


def test_predictions_are_also_in_samples_per_second():
    finding = diagnose(SICK["no-workers"])[0]
    now = SICK["no-workers"].samples_per_second
    assert now == pytest.approx(64 / 0.030)
    low, likely, high = finding.predicted_samples_per_second
    assert (low, likely, high) == pytest.approx(
        [now * g for g in dataclasses.astuple(finding.gain)]
    )
    assert replace(finding, samples_per_second=None).predicted_samples_per_second is None


# -- arithmetic ------------------------------------------------------------------------------------


def test_without_workers_times_add_with_workers_the_slower_one_counts():
    assert Pace(0.02, 0.01, active_workers=0).step == pytest.approx(0.03)
    assert Pace(0.02, 0.01, active_workers=1).step == pytest.approx(0.02)
    assert Pace(0.02, 0.01, active_workers=4).step == pytest.approx(0.01)
    assert Pace(0.02, 0.01, active_workers=4, hand_over=0.002).step == pytest.approx(0.012)
    assert Pace(0.0, 0.01, device_busy=0.008).saving(0.009).step == pytest.approx(0.008)


@pytest.mark.parametrize("name", ["starved-by-loader", "decode-bound", "disk-bound", "no-workers"])
def test_the_pace_gives_the_step_that_was_measured(name):
    assert pace_of(SICK[name]).step == pytest.approx(SICK[name].step_seconds.median, rel=0.01)


seconds = st.floats(1e-5, 10.0)


@given(seconds, seconds, st.integers(1, 128), st.floats(0, 1))
def test_workers_that_are_suggested_can_be_had(load, compute, cores, blocked):
    workers = suggested_workers(load, compute, cores, blocked)
    assert 1 <= workers <= max(64, cores)
    assert workers <= math.ceil(load / compute) or workers == 1


@given(seconds, seconds, st.floats(0, 16), seconds, seconds)
def test_a_gain_is_never_below_one_and_always_in_order(load, compute, lanes, likely, other):
    now = Pace(load, compute, lanes)
    found = gain(now, now.loading(likely), now.loading(other))
    assert 1 <= found.low <= found.likely <= found.high or found.low >= 1


numbers = st.one_of(st.none(), st.floats(0, 1e3))
spreads = st.one_of(st.none(), seconds.map(at))


@given(
    step=spreads,
    wait=spreads,
    workers=st.integers(0, 64),
    parts=st.lists(numbers, min_size=6, max_size=6),
    blocked=st.one_of(st.none(), st.floats(0, 1)),
    alone=spreads,
    cuda=st.booleans(),
    kernels=st.one_of(
        st.none(), st.builds(KernelFacts, st.floats(1, 1e4), st.floats(1e-6, 1), st.floats(0, 1))
    ),
    samples=st.one_of(st.none(), st.floats(1, 1e5)),
    calls=st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 10)), max_size=3),
    steps=st.integers(0, 1000),
)
def test_no_measurement_breaks_a_rule(
    step, wait, workers, parts, blocked, alone, cuda, kernels, samples, calls, steps
):
    measured = Measurements(
        "x",
        machine=MachineFacts(cores=None, device="cuda" if cuda else "cpu"),
        steps=steps,
        seconds=steps * (step.median if step else 0.0),
        samples_per_step=samples,
        step_seconds=step,
        wait_seconds=wait,
        compute_seconds=step,
        loader=LoaderFacts(
            workers=workers,
            work=LoaderWork(*parts),
            blocked_share=blocked,
            alone_seconds=alone,
            epoch_starts=3,
            epoch_start_seconds=0.1,
            steps_per_epoch=10,
        ),
        syncs=tuple(HostCall("a:1", "item", *one) for one in calls),
        host_calls=tuple(HostCall("a:1", "gc.collect", *one) for one in calls),
        copies=tuple(DeviceCopy("a:1", 1e6 * n, s) for n, s in calls),
        kernels=kernels,
        operators=OperatorFacts(100, 0.001, 0.0001, 0.0005),
        hdf5=(replace(ROWS, chunks=(7, 7), bytes_touched_per_batch=1e9),),
    )
    for finding in diagnose(measured):
        assert finding.name in FINDING_NAMES
        assert all(math.isfinite(one) and one >= 1 for one in dataclasses.astuple(finding.gain))
        assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding
    assert Measurements.from_json(json.loads(json.dumps(measured.to_json()))) == measured


# -- values ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_spread_is_in_order_and_within_the_values(values):
    found = Spread.of(values)
    slack = 1e-6
    assert min(values) - slack <= found.low <= found.median + slack
    assert found.median <= found.high + slack <= max(values) + 2 * slack
    assert found.count == len(values)


def test_a_spread_of_nothing_is_unknown():
    assert Spread.of([]) is None
    assert Spread.of([math.nan, math.inf]) is None
    assert Spread.of([1.0, math.nan]).count == 1


def test_everything_survives_a_file(tmp_path):
    full = replace(
        job(
            machine=GPU,
            hdf5=(ROWS,),
            ranks=(RankFacts(0, 1.0, 0.5),),
            bad_values=(BadValues("batch", None, 0, 3),),
            timeline=(TimelineSpan(0, "main", "wait", 0.0, 0.1),),
            ablation=Ablation(larger_batches=((128, 0.5),)),
            allocator=AllocatorFacts(0.0, 1.0, (HostCall("a:1", "empty_cache", 1.0, 0.1),)),
        ),
        notes=("a",),
    )
    assert Measurements.from_json(json.loads(json.dumps(full.to_json()))) == full


def test_a_document_that_is_something_else_is_refused():
    with pytest.raises(CorruptError, match="not measurements"):
        Measurements.from_json({"subject": "x", "colour": "red"})


def test_a_finding_knows_its_docs():
    finding = Finding("no-workers", "t", ("e",), "r.", Gain(), patch=Patch(config={"a": 1}))
    assert finding.docs == "stoker doctor explain no-workers"
    assert Finding.from_json(finding.to_json()) == finding


# -- docs ------------------------------------------------------------------------------------------


def test_the_docs_have_an_anchor_for_every_finding():
    page = (ROOT / "docs" / "doctor.md").read_text()
    anchors = re.findall(r"^### (\S+)$", page, re.MULTILINE)
    assert sorted(anchors) == sorted(FINDING_NAMES)
    # The table of symptoms leads to each of them.
    assert set(re.findall(r"\]\(#([a-z0-9-]+)\)", page)) >= set(FINDING_NAMES)


def test_a_stream_is_not_given_workers_that_would_each_go_through_all_of_it():
    stream = {"loader": {"is_stream": True}}
    for workers, is_safe in ((0, False), (1, False), (2, True)):
        first = diagnose(
            job(0.030, 0.025, load=0.029 * max(1, workers), workers=workers, **stream)
        )[0]
        assert first.name in ("no-workers", "starved-by-loader")
        assert ("get_worker_info" in first.remedy) == (not is_safe)
        assert bool(first.patch.loader_arguments) == is_safe
        assert first.patch.where == "train.py:20"


def test_decode_bound_says_what_photographs_kept_as_files_would_give():
    other = SICK["decode-bound"]
    pictures = replace(other, loader=replace(other.loader, decodes_pictures=True))
    plain, found = (
        next(one for one in diagnose(of) if one.name == "decode-bound") for of in (other, pictures)
    )
    assert plain.gain == found.gain
    told = f"{plain.evidence}{plain.remedy}{plain.patch.script}"
    assert "pack_from(dataset" in told
    assert not re.search("(?i)photo|image", told), "it may decode text"
    assert "stoker pack images" in found.remedy
    (line,) = [line for line in found.evidence if "kept as files" in line]
    assert re.search(r"a step would take 2\d(\.\d)? ms \(1\.\d times as fast\)", line)
