"""What the probe leaves behind, and what new workers cost after their first batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stoker.doctor import transcript
from stoker.doctor.measurements import (
    HostCall,
    KernelFacts,
    LoaderFacts,
    MachineFacts,
    Measurements,
    OperatorFacts,
)
from stoker.doctor.probe import operators
from stoker.doctor.probe.recorder import EPOCH_START, Row
from stoker.doctor.rules import diagnose
from stoker.doctor.transcript import Process
from stoker.measure.readings import Spread


@pytest.mark.parametrize(
    ("cuda", "given", "after"),
    [
        ("13.0", None, "1"),
        ("12.6", None, "1"),
        ("12.4", None, None),  # with CUDA graphs it crashed there
        (None, None, None),
        ("13.0", "0", "0"),
        ("12.4", "1", "1"),
    ],
)
def test_cupti_is_detached_where_that_is_safe(monkeypatch, cuda, given, after):
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if given is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", given)
    else:
        monkeypatch.setenv("TEARDOWN_CUPTI", "to be restored")
        monkeypatch.delenv("TEARDOWN_CUPTI")
    torch = SimpleNamespace(version=SimpleNamespace(cuda=cuda))
    assert operators._detaches(torch) is (after == "1")
    assert operators.os.environ.get("TEARDOWN_CUPTI") == after


@pytest.mark.parametrize("keep", [True, False])
def test_a_script_that_profiles_itself_meets_no_teardown(monkeypatch, keep):
    done = []
    seen = SimpleNamespace(
        was_profiled=False, call_at=0, profile={}, sites={}, loaders={}, disturb=done.append
    )
    cuda = SimpleNamespace(synchronize=lambda: done.append("sync"))
    torch = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=cuda)
    results = SimpleNamespace(events=list)
    profiler = SimpleNamespace(
        stop=lambda: done.append(operators.os.environ.get("TEARDOWN_CUPTI")),
        profiler=SimpleNamespace(kineto_results=results),
    )
    monkeypatch.setenv("TEARDOWN_CUPTI", "to be restored")
    monkeypatch.delenv("TEARDOWN_CUPTI")
    monkeypatch.setitem(operators.sys.modules, "torch", torch)
    monkeypatch.setattr(operators.clocks, "uses_cuda", lambda _: True)
    monkeypatch.setattr(operators, "_profiler", profiler)
    monkeypatch.setattr(operators, "_marks", [0, 1])
    monkeypatch.setattr(operators, "_asked_teardown", False)
    assert operators._detaches(torch)
    operators._stop(seen, keep=keep)
    if keep:
        # CUDA is called after the end as well: there it detaches, not in a step.
        assert done == ["sync", "1", *["sync"] * operators._TEARDOWN_CALLS]
        assert not seen.was_profiled
    else:
        assert done == ["sync", None]
        assert seen.was_profiled


def row(seconds: float, flags: int = 0) -> Row:
    return Row(
        0.0, seconds, seconds, 0.0, 0.0, 0.0, 1, 32, 0.0, 0.0, 0.0, 0.0, flags, 0, None, None
    )


def test_new_workers_that_fill_their_queues_slow_more_than_the_first_step():
    epoch = [row(0.030, EPOCH_START), *[row(0.015)] * 4, *[row(0.010)] * 11]
    main = Process(rows=[row(0.010)] * 8 + epoch * 3)
    facts = {"workers": 2, "prefetch_factor": 2, "persistent_workers": False, "number": 0}
    assert transcript._filling_seconds(main, main.rows, facts) == pytest.approx(4 * 0.005)
    for kept in ({"persistent_workers": True}, {"workers": 0}):
        assert transcript._filling_seconds(main, main.rows, {**facts, **kept}) == 0.0


@pytest.mark.parametrize(("operators", "gain"), [(10, 2.0), (35_000, 3.98 / (3.98 - 0.5 * 3.425))])
def test_float32_halves_the_work_of_operators_and_not_their_calls(operators, gain):
    """An LSTM of single cells: 35,000 small operators in a step of 4 s, of which float32 saved a quarter."""
    counted = OperatorFacts(operators, 0.9, 0.0, 3.95, {"float64": 1.82})
    step = Spread(3.98, 3.9, 4.0, 10)
    measured = Measurements("x", steps=10, seconds=40.0, step_seconds=step, operators=counted)
    (found,) = (one for one in diagnose(measured) if one.name == "double-precision")
    assert found.gain.likely == pytest.approx(gain, rel=0.02)


@pytest.mark.parametrize(("busy", "gain"), [(0.97, None), (0.7, 10.0 / 7.0), (0.05, 2.0)])
def test_code_between_steps_runs_beside_the_kernels_of_a_gpu(busy, gain):
    """A host that makes batches while the GPU computes: a step takes no less than its kernels."""
    machine = MachineFacts(cores=8, device="cuda", device_name="NVIDIA H200")
    kernels = KernelFacts(per_step=4.0, mean_seconds=busy * 0.010 / 4, busy_share=busy)
    measured = Measurements(
        "x", machine=machine, steps=100, seconds=1.0, step_seconds=Spread(0.010, 0.0098, 0.0102, 100),
        compute_seconds=Spread(0.010, 0.0098, 0.0102, 100), between_seconds=0.006, kernels=kernels,
        between=(HostCall("train.py:9", "between", 0.0, 0.006),), between_loads=True,
    )  # fmt: skip
    found = [one for one in diagnose(measured) if one.name == "slow-between-steps"]
    assert [one.gain.likely for one in found] == pytest.approx([gain] if gain else [], rel=0.25)


@pytest.mark.parametrize(("workers", "names"), [(0, ["batch-too-small"]), (2, [])])
def test_a_small_batch_is_found_on_a_slow_core_and_not_beside_workers(workers, names):
    """A step of 23 operators took 0.7 ms, and 1.1 ms on the same host half an hour later."""
    step = Spread(1.1e-3, 1.0e-3, 1.2e-3, 100)
    measured = Measurements(
        "x",
        steps=100,
        seconds=0.11,
        samples_per_step=2.0,
        step_seconds=step,
        compute_seconds=step,
        loader=LoaderFacts("torch", workers, batch_size=2),
        operators=OperatorFacts(23, 1e-6, 0.0, 0.0, {}),
    )
    assert [one.name for one in diagnose(measured)] == names
