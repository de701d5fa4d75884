"""Kinds of errors that the benchmark showed on quiet cores and on a GPU, each held by figures made by hand."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import replace

import pytest

from stoker.doctor import attach
from stoker.doctor.findings import Consultation
from stoker.doctor.gains import crowded_seconds, side_by_side, worth
from stoker.doctor.measurements import HostCall, KernelFacts, LoaderFacts, MachineFacts
from stoker.doctor.probe import operators, sampling
from stoker.doctor.probe.recorder import EPOCH_START, UNWATCHED
from stoker.doctor.rules import diagnose, find_later, why_unjudged
from stoker.doctor.transcript import Process, find_elsewhere
from stoker.doctor.transcript_measures import measure
from test_doctor_attach import row, state
from test_doctor_rules import at, job

# -- cores that share a physical core ------------------------------------------------------------------


def test_second_threads_are_worth_less_than_cores():
    assert worth(4, MachineFacts(cores=4)) == 4
    shown = MachineFacts(cores=4, physical_cores=2)
    assert worth(2, shown) == 2
    assert worth(4, shown) == pytest.approx(3.0)
    assert worth(4, replace(shown, cores_worth=2.6)) == pytest.approx(2.6)
    hidden = MachineFacts(cores=4, physical_cores=4, cores_worth=2.5)
    assert worth(1, hidden) == 1
    assert worth(4, hidden) == pytest.approx(2.5)
    assert worth(9, hidden) == pytest.approx(2.5)


def test_more_workers_on_shared_cores_promise_less():
    gains = {
        share: next(
            one.gain.likely
            for one in diagnose(
                job(0.020, 0.015, workers=0, machine=MachineFacts(cores=2, cores_worth=share))
            )
            if one.name == "no-workers"
        )
        for share in (2.0, 1.4)
    }
    assert gains[1.4] < 0.8 * gains[2.0]


def test_workers_on_all_cores_crowd_the_training():
    """Measured on two cores: JSON lines parsed in 9.5 ms beside a step of 6.3; two workers brought × 1.64 to × 1.76."""
    seen = job(
        0.0159, 0.0095, load=0.0095, workers=0, main=0.71, machine=MachineFacts(2, cores_worth=1.84)
    )
    (found,) = (one for one in diagnose(seen) if one.name == "no-workers")
    assert found.gain.likely == pytest.approx(1.7, rel=0.15)
    assert crowded_seconds(0.003, 0.0095, 0.0075, 2, MachineFacts(cores=16)) == 0.0
    few = crowded_seconds(0.003, 0.0095, 0.0075, 2, MachineFacts(cores=2))
    assert few < crowded_seconds(0.003, 0.0150, 0.0075, 2, MachineFacts(cores=2)) < 0.003


def test_what_a_worker_does_now_was_measured_beside_the_others():
    machine = MachineFacts(cores=4, cores_worth=2.5)
    assert side_by_side(LoaderFacts(workers=4), 4, machine) == pytest.approx(4)
    assert side_by_side(LoaderFacts(workers=1), 4, machine) == pytest.approx(2.5)


def test_cores_are_measured_side_by_side():
    assert attach.cores_worth(1) is None
    assert attach.cores_worth(None) is None
    assert attach.cores_worth(1000) is None
    assert 1.0 <= attach.cores_worth(2) <= 2.0


def test_threads_of_one_core_are_counted_once(tmp_path):
    for number in os.sched_getaffinity(0):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-127\n")
    assert attach.physical_cores(tmp_path) == 1
    assert attach.physical_cores(tmp_path / "none") is None


# -- what the probe sees -------------------------------------------------------------------------------


def test_the_scripts_switch_interval_comes_back():
    before = sys.getswitchinterval()
    sampling._switch_fast(on=True)
    assert sys.getswitchinterval() == pytest.approx(2e-4)
    sampling._switch_fast(on=True)
    sampling._switch_fast(on=False)
    assert sys.getswitchinterval() == before


def event(number):
    return types.SimpleNamespace(sequence_nr=lambda: number)


def host(*events):
    """Return operators of one thread: (name, start, end, how many autograd remembered before it)."""
    return [(1, begin, begin - end, name, event(number)) for name, begin, end, number in events]


MS = 1_000_000


def test_the_time_before_the_forward_pass_is_told_from_the_loss():
    seen = host(
        ("aten::stack", 0.001, 0.002, 7),  # makes the batch
        ("aten::linear", 0.010, 0.012, 7),  # the first that autograd remembers
        ("aten::addmm", 0.011, 0.012, 7),
        ("aten::mul", 0.015, 0.016, 8),  # a loss by hand
        ("Optimizer.step#SGD.step", 0.024, 0.027, -1),
    )
    gap = operators._gap_seconds(seen, 0, 30 * MS, [(20 * MS, 24 * MS)])
    # Before the first operator 10 ms, between operators of the forward pass 7 ms, after the optimizer 3 ms.
    assert gap == pytest.approx((0.010 + 0.007 + 0.003, 0.007))
    # Calling the next operator takes a while: such pauses are no Python code of their own.
    close = host(
        *(("aten::mul", 0.010 + at * 1e-4, 0.01005 + at * 1e-4, 7 + at) for at in range(100))
    )
    assert operators._gap_seconds(close, 0, 30 * MS, [(20 * MS, 30 * MS)]) == pytest.approx(
        (0.010, 0)
    )
    assert operators._gap_seconds(seen, 0, 30 * MS, []) is None
    assert operators._gap_seconds(seen[:1], 0, 30 * MS, [(20 * MS, 24 * MS)]) is None


def test_a_forward_pass_begins_when_its_code_fetches_a_value():
    """Neighbours chosen by Python code before the first operator with a gradient: 2 of its 6 ms were seen."""
    seen = host(
        ("aten::to", 0.003, 0.006, 7),  # `tolist` in the forward pass: waits for the GPU
        ("aten::embedding", 0.012, 0.013, 7),
        ("aten::mul", 0.013, 0.020, 8),
        ("Optimizer.step#SGD.step", 0.024, 0.025, -1),
    )

    def gap(*fetches):
        return operators._gap_seconds(seen, 0, 25 * MS, [(20 * MS, 24 * MS)], fetches)

    assert gap() == pytest.approx((0.012, 0))
    assert gap(3 * MS) == pytest.approx((0.003 + 0.006, 0.006))
    # One of another step, or of the backward pass, says nothing of this one.
    assert gap(-1 * MS) == gap(21 * MS) == gap()


def test_weights_that_are_updated_by_hand_are_no_code_between_steps():
    """A public example: "31% of a step is spent outside of the model", most of it at `w1 -= rate * w1.grad`."""
    seen = host(
        ("aten::sub_", 0.000, 0.004, 7),
        ("aten::zero_", 0.00405, 0.005, 7),
        ("aten::mm", 0.008, 0.010, 7),
        ("aten::mm", 0.010, 0.019, 8),
    )
    passes = [(19 * MS, 24 * MS)]
    gap = operators._gap_seconds(seen, 0, 24 * MS, passes)
    assert gap == pytest.approx((0.003, 0)), (
        "what is left is code of Python before the forward pass"
    )
    update = host(("Optimizer.step#SGD.step", 0.0, 0.0005, -1))
    assert operators._gap_seconds(update + seen, 0, 24 * MS, passes)[0] == pytest.approx(0.008)


def test_accumulated_passes_have_a_gap_each():
    seen = host(
        ("aten::linear", 0.002, 0.003, 0),
        ("aten::mul", 0.003, 0.004, 1),
        ("aten::linear", 0.009, 0.010, 1),
        ("aten::mul", 0.010, 0.011, 2),
    )
    passes = [(5 * MS, 6 * MS), (12 * MS, 14 * MS)]
    assert operators._gap_seconds(seen, 0, 14 * MS, passes) == pytest.approx(
        ((0.002 + 0.001) + (0.003 + 0.001), 0.001 + 0.001)
    )


def test_a_loss_by_hand_is_not_loading():
    rows = [row(seconds=0.02) for _ in range(40)]
    doing = {"training": {"model": 20, "between": 80}, "between": {"a.py:5": 80}, "torch": {}}
    values = {**doing, "kind": "optimizer", "loaders": [], "profile": {"gap_seconds": 0.001}}
    found = measure([Process(rows, [], state(**values))], "x", MachineFacts(cores=2))
    assert found.between_seconds == pytest.approx(0.0012)
    assert diagnose(found) == []


def test_a_loop_of_timed_calls_is_not_sampled_again():
    site = {"family": "sync", "where": "a.py:5", "call": "item", "bytes": 0}
    site = {**site, "calls": 40 * 100, "seconds": 40 * 0.012}
    rows = [row(seconds=0.02, sync=0.012, cpu=0.02) for _ in range(40)]
    doing = {"training": {"model": 20, "between": 80}, "between": {"a.py:5": 80}, "torch": {}}
    values = {**doing, "kind": "optimizer", "loaders": [], "sites": [site], "num_watched": 40}
    found = measure([Process(rows, [], state(**values))], "x", MachineFacts(cores=2))
    assert found.between == ()
    assert [one.name for one in diagnose(found)] == ["sync-every-step"]


# -- steps ---------------------------------------------------------------------------------------------


def test_a_host_that_runs_ahead_of_the_gpu_does_not_make_the_step():
    rows = [row(seconds=0.001) for _ in range(40)]
    profile = {"steps": 3, "kernels": 30, "kernel_seconds": 0.03, "busy_seconds": 0.03}
    told = state(torch={"cuda": "H200"}, profile={**profile}, loaders=[])
    found = measure([Process(rows, [], told)], "x", MachineFacts(cores=2))
    assert found.step_seconds.median == pytest.approx(0.010)
    assert found.mean_step_seconds == pytest.approx(0.010)
    assert any("runs ahead" in note for note in found.notes)


def test_waits_for_a_gpu_that_was_not_measured_are_not_judged():
    waiting = replace(
        job(0.010),
        machine=MachineFacts(cores=8, device="cuda"),
        syncs=(HostCall("a.py:3", "item", 1.0, 0.006),),
    )
    assert diagnose(waiting) == []
    assert "unknown whether the GPU works" in why_unjudged(waiting, [])
    busy = replace(waiting, kernels=KernelFacts(50, 1e-5, 0.4))
    assert diagnose(busy)[0].name == "sync-every-step"


def test_housekeeping_is_what_the_median_step_would_be_shorter():
    site = {"family": "host", "where": "a.py:5", "call": "gc.collect", "bytes": 0}
    # The first steps collect less: their mean would leave 10 ms too much.
    rows = [row(seconds=0.025, host=0.020) for _ in range(10)]
    rows += [row(seconds=0.105, host=0.100) for _ in range(60)]
    whole = {**site, "calls": 70, "seconds": 10 * 0.02 + 60 * 0.1}
    found = measure([Process(rows, [], state(sites=[whole], num_steps=70))], "x", MachineFacts())
    (call,) = found.host_calls
    assert call.seconds_per_step == pytest.approx(0.1)


def test_restarts_beside_a_validation_still_cost():
    short = job(0.010, 0.001, workers=2, loader={"epoch_starts": 9, "epoch_start_seconds": 0.08})
    loader = replace(short.loader, persistent_workers=False, steps_per_epoch=8, counted_starts=0)
    found = diagnose(replace(short, loader=loader))
    assert [one.name for one in found] == ["workers-restarted"]
    assert found[0].gain.likely == pytest.approx(1.8, rel=0.1), "8 steps of 10 ms and 80 ms"
    assert EPOCH_START != UNWATCHED


def test_before_the_first_step_has_ended_no_loader_is_another_one():
    main = Process([], [], {"running": [30.0, 0, 0]})
    assert find_elsewhere(main, [], None).loaders == 0


# -- what hides behind the first finding ---------------------------------------------------------------


def test_a_cost_behind_a_slow_loader_is_told():
    slow = job(0.020, 0.015, workers=0)
    slow = replace(slow, host_calls=(HostCall("a.py:9", "torch.save", 0.1, 0.0015),))
    found = diagnose(slow)
    assert [one.name for one in found] == ["no-workers"]
    later = find_later(slow, found)
    assert [one.name for one in later] == ["saves-too-often"]
    told = Consultation(slow, tuple(found), later=tuple(later))
    assert "hidden behind it: saves-too-often" in told.behind[0]
    assert told.to_json()["later"][0]["name"] == "saves-too-often"


def test_a_slow_loader_behind_a_large_cost_is_told():
    slow = job(0.160, 0.012, workers=0)
    slow = replace(slow, host_calls=(HostCall("a.py:9", "gc.collect", 1.0, 0.140),))
    found = diagnose(slow)
    assert [one.name for one in found] == ["gc-each-step"]
    assert [one.name for one in find_later(slow, found)] == ["no-workers"]
    assert find_later(job(0.010), []) == []


def test_logging_is_left_out_and_loading_is_divided():
    between = replace(
        job(0.020), loader=None, wait_seconds=None, between_seconds=0.016,
        compute_seconds=at(0.020), machine=MachineFacts(cores=2), busy_cores=0.3,
    )  # fmt: skip
    (loads,) = diagnose(replace(between, between_loads=True))
    (logs,) = diagnose(replace(between, between_loads=False))
    assert logs.gain.likely == pytest.approx(0.020 / (0.004 + 0.05 * 0.016))
    assert loads.gain.likely < 2.6
    assert "DataLoader" in loads.remedy
    assert "DataLoader" not in logs.remedy + logs.patch.script, "there is nothing to load"


def test_waiting_for_a_core_is_no_python_code_of_the_model(monkeypatch):
    """A masked autoencoder beside other programs: "15% of a step is Python code" at a line of two operators."""
    monkeypatch.setattr(operators, "_gap_seconds", lambda *_: (0.004, 0.003))
    for queued, left in (([0.0, 0.002, 0.005], 0.0), ([1.0, 1.001, 1.0025], 0.0015), (None, 0.003)):
        seen = operators.summarise([], [0, 10 * MS, 20 * MS], [], queued)
        assert seen["python_seconds"] == pytest.approx(left)
        # Of the second step, the profiler's start is in the first; and without 0.1 ms for calling operators.
        gap = {0.0: 0.0009, 0.0015: 0.0024, 0.003: 0.0039}[left]
        assert seen["gap_seconds"] == pytest.approx(gap)


def test_an_update_that_takes_much_of_a_step_on_a_cpu_has_a_note():
    """A public recommender: Adam over its embeddings was 61 % of a step, and the doctor said nothing of it."""
    rows = [row(seconds=0.010, optimizer=0.006) for _ in range(40)]
    plain = {"version": "2.11.0+cpu", "optimizer": ["Adam", False]}
    quiet = ({"optimizer": ["Adam", True]}, {"optimizer": None}, {"cuda": "H200"}, {"version": "2.1"})  # fmt: skip
    for torch, share in ((plain, 0.6), *((plain | other, None) for other in quiet)):
        told = measure([Process(rows, [], state(torch=torch))], "train.py", MachineFacts(cores=2))
        notes = [note for note in told.notes if "the optimizer's update" in note]
        assert len(notes) == (share is not None)
        assert all(n.startswith("60% of a step") and "Adam(..., fused=True)" in n for n in notes)
    short = [row(seconds=0.010, optimizer=0.002) for _ in range(40)]
    told = measure([Process(short, [], state(torch=plain))], "train.py", MachineFacts(cores=2))
    assert not any("the optimizer's update" in note for note in told.notes)
