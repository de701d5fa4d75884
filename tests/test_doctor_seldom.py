"""What the median step hides: evaluation, a few long steps, and Python code inside of the forward pass."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch

from stoker.doctor.findings import Consultation
from stoker.doctor.measurements import MachineFacts
from stoker.doctor.probe import clocks, operators, places, recorder, sampling, steps
from stoker.doctor.probe.recorder import UNWATCHED, Fetch
from stoker.doctor.rules import diagnose, why_unjudged
from stoker.doctor.transcript import Process
from stoker.doctor.transcript_measures import measure
from test_doctor_attach import event, row, state

SAMPLED = {"training": {"model": 95, "between": 5}, "between": {}, "modules": True}


def judged(rows, **values):
    told = state(**{**SAMPLED, **values})
    found = measure([Process(rows, [], told)], "python train.py", MachineFacts(cores=2))
    findings = diagnose(found)
    return Consultation(found, tuple(findings), unjudged=why_unjudged(found, findings))


# -- evaluation ------------------------------------------------------------------------------------

SITE = {"family": "evaluation", "where": "a.py:7", "call": "evaluation", "calls": 1, "bytes": 0}


def test_evaluation_in_every_step_is_a_finding():
    told = judged(
        [row(seconds=0.010, evaluation=0.004) for _ in range(40)],
        sites=[{**SITE, "seconds": 0.16}],
    )
    (finding,) = told.findings
    assert finding.name == "evaluates-each-step"
    assert finding.patch.where == "a.py:7"
    # Every tenth step: 6 ms and a tenth of 4.
    assert finding.gain.likely == pytest.approx(0.010 / 0.0064)
    assert finding.gain.high == pytest.approx(0.010 / 0.006)


def test_evaluation_that_the_host_only_launches_is_known_from_its_kernels():
    """On an H200 it was "nothing to fix": 0.4 ms of a host, 2.6 ms of a GPU that is never idle; the fix brought 1.8."""
    profile = {"steps": 2, "kernels": 20, "kernel_seconds": 0.02, "busy_seconds": 0.02}
    told = judged(
        [row(seconds=0.010, evaluation=0.001) for _ in range(40)],
        sites=[{**SITE, "seconds": 0.04}],
        profile={**profile, "evaluation_busy_seconds": 0.01},
    )
    (finding,) = told.findings
    assert finding.gain.likely == pytest.approx(0.010 / (0.005 + 0.0005))
    assert "5 ms (50%) is the GPU's work" in finding.evidence[0]
    # A device that rests waits for its host: then the host's time counts, until the device is never idle.
    for busy, after in ((0.008, 0.0064), (0.017, 0.00769)):
        told = judged(
            [row(seconds=0.010, evaluation=0.004) for _ in range(40)],
            sites=[{**SITE, "seconds": 0.16}],
            profile={
                **profile,
                "busy_seconds": busy,
                "evaluation_busy_seconds": 0.0018 * (busy > 0.01),
            },
        )
        (finding,) = told.findings
        assert finding.gain.likely == pytest.approx(0.010 / after, rel=0.01), busy


def test_kernels_of_an_evaluation_are_those_that_its_operators_launch():
    def numbered(number, linked, *args, **values):
        made = event(*args, **values)
        made.correlation_id, made.linked_correlation_id = (lambda: number), (lambda: linked)
        return made

    gpu = {"device": "DeviceType.CUDA"}
    events = [
        numbered(1, 0, "aten::mm", 0, 5),
        numbered(7, 1, "cudaLaunchKernel", 2, 2),
        numbered(2, 0, "aten::mm", 100, 5),
        numbered(8, 2, "cudaLaunchKernel", 102, 2),
        numbered(3, 0, "aten::mm", 200, 5),
        # All of them run after the host has gone on.
        numbered(7, 1, "gemm", 300, 100, **gpu),
        numbered(8, 2, "gemm", 400, 50, **gpu),
        numbered(8, 2, "relu", 420, 50, **gpu),
        numbered(2, 3, "gemm", 500, 100, **gpu),
        numbered(9, 2, "Memcpy DtoH", 600, 100, **gpu),
    ]
    seen = operators.summarise(events, [0, 1_000_000], [], evaluations=[(90_000, 190_000)])
    assert seen["busy_seconds"] == pytest.approx(270e-6)
    assert seen["evaluation_busy_seconds"] == pytest.approx(70e-6)
    assert operators.summarise(events, [0, 1_000_000], [])["evaluation_busy_seconds"] == 0


def test_operators_of_an_evaluation_are_those_that_the_profiler_saw_meanwhile():
    model, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(x).relu()
        began = time.time_ns()
        model(x).tanh()
        ended = time.time_ns()
        model(x).sigmoid()
    events = list(profiler.profiler.kineto_results.events())
    numbers = operators._started_in([(began, ended)], events)
    names = {one.name() for one in events if one.correlation_id() in numbers}
    assert {"aten::linear", "aten::tanh"} <= names
    assert not names & {"aten::relu", "aten::sigmoid"}
    assert operators._started_in([], events) == set()


def test_evaluation_now_and_then_is_no_part_of_a_step():
    rows = [row(seconds=0.010) for _ in range(40)]
    rows[20] = row(seconds=0.510, evaluation=0.5)
    told = judged(rows, sites=[{**SITE, "seconds": 0.5}])
    assert not told.findings
    assert told.measurements.step_seconds.high == pytest.approx(0.010)
    (note,) = [note for note in told.measurements.notes if "evaluation" in note]
    assert "56% of the time" in note
    assert "a.py:7" in note
    assert "they are only 44% of the time" in told.verdict


def test_time_from_eval_to_train_of_the_same_model_is_evaluation(monkeypatch):
    now = iter(range(100))
    sites = []

    def site(_family, frame, call):
        sites.append(recorder.Site(frame, call))
        return sites[-1]

    seen = SimpleNamespace(
        training_thread=threading.get_ident(), evaluated=None, evaluation=0.0, site=site,
        backward=0.0, drawing=False, kind="optimizer", is_profiling=True,
    )  # fmt: skip
    monkeypatch.setattr(recorder, "get", lambda: seen)
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    monkeypatch.setattr(torch.nn.Module, "train", steps._noting_mode(torch.nn.Module.train))
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
    teacher = torch.nn.Linear(1, 1)
    model.eval()
    line = sys._getframe().f_lineno - 1
    assert not model[1].training
    teacher.eval()  # within the evaluation of the model
    teacher.train()
    assert seen.evaluation == 0
    assert model.train() is model
    assert seen.evaluation == 3
    (known,) = sites
    assert known.where == f"{__file__}:{line}"
    assert (known.calls, known.seconds) == (1, 3)
    # What is trained in this mode is no evaluation.
    model.eval()
    steps._note_backward(0.0, 1.0)
    model.train()
    assert seen.evaluation == 3


def test_the_line_of_a_library_is_told_as_in_its_package():
    seen = []
    json.loads('{"a": 1}', object_hook=lambda _: seen.append(sys._getframe(1)))
    assert re.fullmatch(r"json/decoder\.py:\d+", places.library_of(seen[0]))
    assert places.library_of(sys._getframe()) == "", "the user's own code"
    formats = SimpleNamespace(co_filename=torch._tensor.__file__)
    assert places.library_of(SimpleNamespace(f_code=formats, f_lineno=1)) == "", (
        "it is the tensor's"
    )


# -- long steps ------------------------------------------------------------------------------------


def uneven(every=16):
    return [row(seconds=0.200 if at % every == 8 else 0.010) for at in range(160)]


def test_a_few_long_steps_are_told_with_their_lines():
    late = {"between": 90, "model": 10}
    told = judged(uneven(), late=late, late_lines={"a.py:30": 80, "a.py:9": 20})
    (finding,) = told.findings
    assert finding.name == "long-steps"
    assert finding.patch.where == "a.py:30"
    spent = 0.9 * (10 * 0.190) / (157 * 0.010 + 10 * 0.190)
    assert finding.gain.likely == pytest.approx(1 / (1 - spent / 2), rel=0.01)
    assert any("a.py:30 (80%)" in note for note in told.measurements.notes)


@pytest.mark.parametrize(("busy", "finds"), [(1.0, False), (0.5, True)])
def test_long_steps_beside_a_gpu_that_never_rests_cost_nothing(busy, finds):
    """A plot of 190 ms every 16 steps on an H200, while the GPU works off what was launched before."""
    mean = (150 * 0.010 + 10 * 0.200) / 160
    kernels = {
        "kernels": 40,
        "kernel_seconds": 2 * mean,
        "busy_seconds": 2 * mean * busy,
        "steps": 2,
    }
    told = judged(
        uneven(),
        late={"between": 100},
        late_lines={"a.py:30": 100},
        profile=kernels,
        torch={"cuda": "NVIDIA H200", "version": "2.11.0"},
    )
    assert ["long-steps"] * finds == [one.name for one in told.findings if one.name == "long-steps"]


def test_long_steps_of_the_model_are_a_note_and_the_rest_of_the_verdict():
    (note,) = [
        note
        for note in judged(
            uneven(), late={"model": 100}, late_lines={"a.py:3": 1}
        ).measurements.notes
        if "took longer than the others" in note
    ]
    assert note.endswith("at no line of your own"), "a public script's was mostly at a line with 0%"
    told = judged(uneven(), late={"model": 100}, late_lines={"a.py:30": 100})
    assert not told.findings
    assert "they are only" in told.verdict
    assert any("a.py:30 (100%)" in note for note in told.measurements.notes)


def test_steps_that_vary_by_themselves_are_not_long_ones():
    for rows in (
        [row(seconds=0.010 + 0.02 * (at % 2)) for at in range(160)],  # two kinds of steps
        uneven()[:40],  # two long steps may be chance
    ):
        assert judged(rows, late={"between": 9}, late_lines={"a": 9}).verdict == "nothing to fix"


def test_samples_of_a_step_are_counted_once_it_is_known_whether_it_is_long(monkeypatch):
    late = [False, False, True, True, False]
    seen = SimpleNamespace(
        num_steps=50, disturbed_steps=0, training_thread=threading.get_ident(), evaluated=None,
        looks=[], looked_at=50, counts=defaultdict(Counter), is_late=lambda: late[0],
        paths=SimpleNamespace(number_of_call=lambda _: "0"),
    )  # fmt: skip
    kinds = iter([("between", "a:1"), ("model", "a:2"), ("data", "a:3"), ("model", "a:4")] * 2)
    monkeypatch.setattr(sampling, "describe_training", lambda _: next(kinds))
    monkeypatch.setattr(recorder, "watching", True)
    for _ in range(4):
        sampling._look_at_training(seen)
        late.pop(0)
    assert (seen.counts["training"], seen.counts["between"]) == ({}, {}), (
        "all of it was a long step"
    )
    assert seen.counts["late"] == {"between": 1, "model": 2, "data": 1}
    assert seen.counts["late_lines"] == {"a:1": 1, "a:2": 1, "a:3": 1, "a:4": 1}
    late[:] = [False]
    sampling._look_at_training(seen)
    sampling._look_at_training(seen)
    seen.num_steps += 1
    sampling._look_at_training(seen)
    assert seen.counts["training"] == {"between": 1, "model": 1}
    assert seen.counts["between"] == {"a:1": 1}
    assert seen.counts["model_lines"] == {"a:2": 1}
    assert seen.counts["model_calls"] == {"0": 1}


def test_short_steps_are_sampled_half_as_often_and_every_sample_stands_for_its_time():
    seen = SimpleNamespace(usual_seconds=0.0015, counts={"training": Counter(model=400)})
    assert sampling._weight_of_look(seen) == 2, "200 samples of 8 ms: a hundred more"
    seen.usual_seconds = 0.010
    assert sampling._weight_of_look(seen) == 5, "every 20 ms from 300 samples on"
    seen.counts["training"]["model"] = 299
    assert sampling._weight_of_look(seen) == 1


# -- Python code of the forward pass -----------------------------------------------------------------

INSIDE = {"training": {"model": 100}, "model_lines": {"net.py:12": 60}}


def test_python_code_of_the_forward_pass_is_found():
    rows = [row(seconds=0.010, cpu=0.010, backward=0.002) for _ in range(40)]
    (finding,) = judged(rows, **INSIDE, profile={"python_seconds": 0.004}).findings
    assert finding.name == "python-in-model"
    assert finding.patch.where == "net.py:12"
    assert finding.gain.high == pytest.approx(0.010 / 0.006)


@pytest.mark.parametrize(("in_model", "python"), [(True, 0.005), (False, 0.005), (True, 0.001)])
def test_values_that_python_code_of_the_forward_pass_fetches_go_with_it(in_model, python):
    """Figures of an H200: 5.5 ms of kernels, for which `tolist` waits before 5 ms of Python code."""
    rows = [row(seconds=0.0115, cpu=0.0115, backward=0.001, sync=0.004) for _ in range(40)]
    site = {"family": "sync", "where": "net.py:11", "call": "tolist", "calls": 40, "bytes": 0}
    kernels = {"kernels": 180, "kernel_seconds": 0.0165, "busy_seconds": 0.0165, "steps": 3}
    found = judged(
        rows,
        **INSIDE,
        sites=[{**site, "seconds": 0.16, "in_model": in_model}],
        profile={**kernels, "python_seconds": python},
        torch={"cuda": "NVIDIA H200", "version": "2.11.0"},
    ).findings
    if python < 0.15 * 0.0115:  # it fetches, and does little with it
        assert [one.name for one in found] == ["sync-every-step"]
        return
    assert found[0].name == ("python-in-model" if in_model else "sync-every-step")
    assert len(found) == 2 - in_model, "it is one cause with one remedy"
    if in_model:
        assert found[0].gain.likely == pytest.approx(0.0115 / 0.0055), "the kernels are left"
        assert "4 ms more is spent on fetching the values" in found[0].evidence[2]


def test_loading_and_fetching_are_no_python_code_of_a_forward_pass_that_waits():
    """Figures of a busy machine: the forward pass sleeps for 10 ms, in which no operator and no Python code runs."""
    times = {"seconds": 0.0182, "cpu": 0.0074, "wait": 0.0038, "sync": 0.0033, "backward": 0.0003}
    rows = [row(**times, loader=0, batches=1) for _ in range(40)]
    fetches = [Fetch(0.0, 0.0037, 0.0037, 0.0, 0.0, 0)] * 40
    where = {"where": "a.py:8", "dataset_where": "a.py:3", "collate_where": None, "length": 99}
    loader = {
        **{"number": 0, "workers": 0, "batch_size": 512, "epochs": [], "ends": []},
        **{"prefetch_factor": None, "persistent_workers": False},
        **where,
    }
    site = {"family": "sync", "where": "a.py:9", "call": "item", "calls": 20480, "bytes": 0}
    told = state(
        loaders=[loader], sites=[{**site, "seconds": 40 * 0.0033}], profile={"python_seconds": 0.0115},
        torch={}, training={"model": 80}, between={}, model_lines={"a.py:12": 58},
    )  # fmt: skip
    seen = measure([Process(rows, fetches, told)], "python a.py", MachineFacts(cores=2))
    assert seen.python_seconds < 0.1 * seen.step_seconds.median
    assert "sync-every-step" in {one.name for one in diagnose(seen)}


def test_fetches_leave_a_step_its_sleep():
    """12,800 calls of `float`: timing them takes a step of 27 ms, 6 of which sleep, to 90 ms (measured gain: 4.4)."""
    timed = [row(seconds=0.090, cpu=0.084, sync=0.0835) for _ in range(40)]
    plain = [row(seconds=0.027, cpu=0.021, backward=0.0005, flags=UNWATCHED) for _ in range(40)]
    site = {"family": "sync", "where": "a.py:9", "call": "float", "calls": 40 * 12_800, "bytes": 0}
    told = state(num_steps=80, num_watched=40, torch={}, sites=[{**site, "seconds": 40 * 0.0835}])
    seen = measure([Process(timed + plain, [], told)], "python a.py", MachineFacts(cores=2))
    (finding,) = diagnose(seen)
    assert finding.name == "sync-every-step"
    assert finding.gain.likely == pytest.approx(4.4, rel=0.3)


@pytest.mark.parametrize(("free", "grows"), [(30 << 20, 0.0), (1 << 20, 1 << 20)])
def test_memory_that_malloc_keeps_is_no_leak(free, grows):
    """A gradient of 1 MB a step, made and freed: glibc's heap grew by 20 MB before it was trimmed."""
    rows = [row(host_bytes=(300 + at) << 20) for at in range(40)]
    told = state(torch={}, heap_free=[2 << 20, (2 << 20) + free])
    seen = measure([Process(rows, [], told)], "python a.py", MachineFacts())
    assert seen.memory.host_bytes_per_step == pytest.approx(grows)


@pytest.mark.skipif(clocks._mallinfo is None, reason="not glibc, or before 2.33")
def test_free_memory_of_the_heap_is_seen():
    kept = [bytes(100_000) for _ in range(200)]
    before = clocks.free_bytes()
    del kept[::2]
    assert clocks.free_bytes() - before > 5_000_000


def test_a_fetch_knows_whether_a_module_calls_it():
    class Reads(torch.nn.Module):
        def forward(self, x):
            return places.is_in_module(sys._getframe())

    assert torch.nn.Sequential(Reads())(torch.zeros(1))
    assert not places.is_in_module(sys._getframe())


@pytest.mark.parametrize(
    ("cpu", "profiled", "lines"),
    [
        (0.010, 0.0005, {"net.py:12": 60}),  # operators follow each other
        (0.0025, 0.004, {"net.py:12": 60}),  # the thread waits
        (0.010, 0.004, {"net.py:12": 5}),  # in torch's own modules
    ],
)
def test_a_forward_pass_of_operators_is_healthy(cpu, profiled, lines):
    rows = [row(seconds=0.010, cpu=cpu, backward=0.002) for _ in range(40)]
    told = judged(rows, **{**INSIDE, "model_lines": lines}, profile={"python_seconds": profiled})
    assert told.verdict == "nothing to fix"


def test_a_loss_of_many_lines_is_no_code_between_steps():
    rows = [row(seconds=0.010) for _ in range(40)]
    lines = {f"a.py:{at}": 1 for at in range(20)}
    assert judged(rows, training={"model": 80, "between": 20}, between=lines).findings == ()
    one = judged(rows, training={"model": 80, "between": 20}, between={"a.py:1": 20}).findings
    assert [finding.name for finding in one] == ["slow-between-steps"]


# -- whose code ------------------------------------------------------------------------------------


def test_packages_of_a_folder_on_the_path_are_not_the_users(tmp_path, monkeypatch):
    (tmp_path / "deps" / "lib-1.dist-info").mkdir(parents=True)
    (tmp_path / "deps" / "lib-1.dist-info" / "RECORD").touch()
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "own"), str(tmp_path / "deps"), *sys.path])
    assert places.is_foreign(str(tmp_path / "deps" / "lib" / "a.py"))
    assert not places.is_foreign(str(tmp_path / "own" / "b.py"))
    assert not places.is_foreign(str(tmp_path / "c.py"))


def test_a_library_that_loads_by_itself_has_no_line_of_the_user():
    """A dataset of torchvision under a loop of the user's: the loop is not what loads."""
    made = {"look": lambda: sampling.describe(sys._getframe(1))}
    for filename, body in (
        ("/x/site-packages/torchvision/datasets/mnist.py", "look()"),
        ("/x/site-packages/torch/utils/data/dataloader.py", "inner()"),
        ("/home/me/train.py", "middle()"),
    ):
        name = {"look()": "inner", "inner()": "middle", "middle()": "main"}[body]
        exec(compile(f"def {name}():\n    return {body}\n", filename, "exec"), made)
    assert made["main"]() == ("other", None)
