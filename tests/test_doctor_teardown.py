"""The probe's profiler detaches CUPTI where that is safe, and leaves a script's own choice alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stoker.doctor.probe import operators


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
