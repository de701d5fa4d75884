"""What the doctor tries on a GPU after the profiled steps: float32 in full against TF32."""

from __future__ import annotations

import math
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from doctor_runs import CASES
from stoker.doctor.attach import run_script
from stoker.doctor.measurements import KernelFacts, MachineFacts, OperatorFacts
from stoker.doctor.probe import operators, trials
from stoker.doctor.rules import diagnose
from test_doctor_attach import event
from test_doctor_rules import job

SIZE = st.integers(1, 1 << 20)


@given(st.lists(st.integers(1, 4096), max_size=2), SIZE, st.integers(1, 1 << 12), SIZE)
def test_operands_of_a_trial_are_small_and_still_multiply(stack, rows, inner, columns):
    first, second = trials._small_enough([[*stack, rows, inner], [*stack, inner, columns]])
    assert first[-1] == second[-2] == inner
    assert first[:-2] == second[:-2]
    result = (*first[:-1], second[-1])
    assert max(math.prod(first), math.prod(second), math.prod(result)) <= trials._MOST_VALUES
    if (
        max(rows, columns) * inner * math.prod(stack) + rows * columns * math.prod(stack)
        < trials._MOST_VALUES
    ):
        assert math.prod(first) == math.prod(stack) * rows * inner, (
            "nothing is changed without need"
        )


def test_products_in_float32_are_told_from_others():
    a, b = torch.ones(8, 8), torch.ones(2, 8, 8)
    conv = torch.nn.Conv2d(1, 1, 3)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profiler:
        a @ a
        b @ b
        torch.nn.functional.linear(a, a, a[0])
        a.double() @ a.double()
        a.bfloat16() @ a.bfloat16()
        conv(torch.ones(1, 1, 9, 9))
    found = trials.single_products(profiler.profiler.kineto_results.events())
    assert sorted(found.values()) == [((2, 8, 8), (2, 8, 8)), ((8, 8), (8, 8)), ((8, 8), (8, 8))]


def test_kernels_are_added_up_by_the_shapes_of_their_products():
    def numbered(number, linked, *args, **values):
        made = event(*args, **values)
        made.correlation_id, made.linked_correlation_id = (lambda: number), (lambda: linked)
        return made

    large, small = [[64, 64], [64, 64]], [[8, 8], [8, 8]]
    events = [
        numbered(1, 0, "aten::mm", 0, 5, large, ["float", "float"]),
        numbered(2, 0, "aten::addmm", 10, 5, [[8], *small], ["float"] * 3),
        numbered(3, 0, "aten::mm", 20, 5, large, ["float", "float"]),
        numbered(4, 0, "aten::mm", 30, 5, large, ["double", "double"]),
        *(
            numbered(9, one, "gemm", 100 * one, 10 * one, device="DeviceType.CUDA")
            for one in (1, 2, 3, 4)
        ),
    ]
    seen = operators.summarise(events, [0, 1_000_000], [])
    assert seen["single_product_seconds"] == pytest.approx(60e-6)
    assert seen["single_products"] == [
        [pytest.approx(40e-6), 2, (64, 64), (64, 64)],
        [pytest.approx(20e-6), 1, (8, 8), (8, 8)],
    ]


def test_what_is_tried_depends_on_the_profile(monkeypatch):
    def seconds(_torch, shapes, kind, _repeats):
        return {torch.float64: 8.0, torch.float32: 4.0, torch.bfloat16: 0.5}[kind] * shapes[0][0]

    monkeypatch.setattr(trials, "_product_seconds", seconds)
    profile = {"kernel_seconds": 1.0, "double_kernel_seconds": 0.0}
    assert trials.run(torch, profile, copies=False) == {}
    assert trials.run(torch, profile | {"double_kernel_seconds": 0.2}, copies=False) == {
        "double_times": 2.0
    }
    products = [[0.6, 3, [4, 4], [4, 4]], [0.2, 1, [8, 4], [4, 4]]]
    # Eight times the time of bfloat16, of which TF32 takes two.
    single = {"single_products": products, "single_product_seconds": 0.8}
    assert trials.run(torch, profile | single, copies=False) == {"single_times": pytest.approx(4.0)}
    few = {"single_products": products, "single_product_seconds": 0.01}
    assert trials.run(torch, profile | few, copies=False) == {}


def test_a_product_that_is_no_slower_in_full_has_a_ratio_of_one(monkeypatch):
    monkeypatch.setattr(trials, "_product_seconds", lambda *_: 1.0)
    assert trials._single_times(torch, [[0.6, 3, [4, 4], [4, 4]]]) == 1.0


def on_gpu(**values):
    return job(
        0.010,
        machine=MachineFacts(cores=8, device="cuda"),
        kernels=KernelFacts(50, 1e-4, 1.0),
        operators=OperatorFacts(50, 0.005, **values),
    )


def test_full_float32_is_a_finding_with_the_gain_of_its_products():
    (found,) = diagnose(on_gpu(single_product_seconds=0.008, single_times=5.0))
    assert found.name == "full-precision"
    assert found.gain.likely == pytest.approx(10 / (10 - 0.8 * 8))
    assert "set_float32_matmul_precision" in found.remedy
    assert diagnose(on_gpu(single_product_seconds=0.008, single_times=1.0)) == []
    assert diagnose(on_gpu(single_product_seconds=0.0005, single_times=8.0)) == []
    assert diagnose(on_gpu(single_product_seconds=0.008)) == []


def test_nothing_of_a_script_is_set_or_drawn_by_a_trial(monkeypatch):
    """Numbers come from no generator, and no setting of matrix products is touched."""
    monkeypatch.setattr(torch, "linspace", lambda *_, **__: torch.ones(16))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    used = SimpleNamespace(calls=0)
    monkeypatch.setattr(
        torch, "set_float32_matmul_precision", lambda _: setattr(used, "calls", used.calls + 1)
    )
    before = torch.get_rng_state()
    assert trials._product_seconds(torch, ((4, 4), (4, 4)), torch.float32, 2) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert used.calls == 0


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [[], ["--remedied"]])
def test_tf32_is_advised_only_where_it_is_off(flags):
    script = [sys.executable, str(CASES / "full_precision.py"), *flags]
    measured = run_script(script, steps=60, environment=dict(os.environ)).measurements
    names = [one.name for one in diagnose(measured)]
    assert ("full-precision" in names) == (not flags), (names, measured)
    if not flags:
        assert names[0] == "full-precision"
        assert measured.operators.single_times > 1.5
