"""The whole doctor on planted bottlenecks: the top finding is the planted one, the predicted gain comes true.

Each script in `doctor_cases/` has one cause. They run here with the probe inside, as they would under
`stoker doctor -- python case.py`; what their remedies really bring is measured by the slow tests.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import pytest

from doctor_runs import CASES, run_warm
from stoker.doctor.attach import run_script
from stoker.doctor.findings import Finding
from stoker.doctor.measurements import Measurements
from stoker.doctor.rules import diagnose

PLANTED = {
    "zero_workers": "no-workers",
    "one_worker": "starved-by-loader",
    "busy_decoders": "decode-bound",
    "sleepy_disk": "disk-bound",
    "cpu_augmentation": "augment-on-cpu",
    "python_collate": "python-collate",
    "gzip_hdf5": "hdf5-compressed",
    "default_chunks_hdf5": "hdf5-chunks",
    "short_epochs": "workers-restarted",
    "item_every_step": "sync-every-step",
    "tiny_batch": "batch-too-small",
    "empty_cache": "empty-cache-each-step",
    "gc_every_step": "gc-each-step",
    "saves_every_step": "saves-too-often",
    "validation_every_step": "evaluates-each-step",
    "double_precision": "double-precision",
    "leak": "memory-creep",
    "bad_values": "bad-values",
    "imbalanced_ranks": "imbalanced-ranks",
    "healthy": None,
}
ON_GPU = {
    "pageable_copies": "pageable-copies",
    "many_small_kernels": "launch-bound",
    "evaluation_every_step": "evaluates-each-step",
    "full_precision": "full-precision",
}
HELPERS = {"loop", "warm"}


def describe(name: str, found: list[Finding], measured: Measurements) -> str:
    step, wait = measured.step_seconds, measured.wait_seconds
    return (
        f"{name}: {[(one.name, round(one.gain.likely, 2)) for one in found]} "
        f"step {step and step.median} wait {wait and wait.median} loader {measured.loader} "
        f"memory {measured.memory} notes {measured.notes}"
    )


def test_every_script_is_a_case_with_a_planted_cause():
    scripts = {path.stem for path in CASES.glob("*.py")} - HELPERS
    assert scripts == set(PLANTED) | set(ON_GPU)
    assert len(PLANTED) >= 14


ONE_OF_A_KIND = {
    name: PLANTED[name]
    for name in (
        "zero_workers", "python_collate", "gzip_hdf5", "item_every_step", "leak", "healthy",
    )
}  # fmt: skip
"""A case of each part of the doctor: loader, code of the script, file, syncs, memory, none."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ONE_OF_A_KIND, id="one of a kind"),
        pytest.param(PLANTED, id="all", marks=pytest.mark.slow),
    ],
)
def test_the_top_finding_is_the_planted_one(cases, tmp_path):
    seen = run_warm(cases, 45, tmp_path / "seen")
    assert set(seen) == set(cases)
    wrong, crowded = [], []
    for name, planted in cases.items():
        found = diagnose(seen[name])
        top = found[0].name if found else None
        if top != planted:
            # Where other work has the cores, the doctor may be silent and say so; it may not name another cause.
            is_crowded = any("other work on this machine" in note for note in seen[name].notes)
            is_silent = top is None and is_crowded
            (crowded if is_silent else wrong).append(describe(name, found, seen[name]))
    # 13 of 14 is what is asked for.
    assert len(wrong) <= len(cases) // 14, "\n".join(wrong)
    if len(crowded) > len(cases) // 4:
        pytest.skip("other work has the cores, and the doctor says so: " + "\n".join(crowded))


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ON_GPU)
def test_the_top_finding_is_the_planted_one_on_a_gpu(name):
    measured = run_script([sys.executable, str(CASES / f"{name}.py")], steps=60).measurements
    found = diagnose(measured)
    assert found, measured
    assert found[0].name == ON_GPU[name], describe(name, found, measured)


WITHOUT_GAIN = {"empty-cache-each-step", "memory-creep", "bad-values"}
"""Remedies that bring no speed on a CPU: predicted 1, and that is what is measured."""


def rate(name: str, measured: Measurements) -> float:
    """Return samples per second of the usual step, so that one hiccup of the machine does not decide.

    Starting workers again is no hiccup, and neither is every tenth step: there the whole time counts.
    """
    assert measured.samples_per_second is not None
    if PLANTED[name] in ("workers-restarted", "evaluates-each-step"):
        return measured.samples_per_second
    return measured.samples_per_step / measured.step_seconds.median


def rates(name: str, steps: int, folder: Path) -> tuple[Finding, float, float]:
    """Return the top finding, and the rates without and with its remedy.

    The remedy is applied by the doctor's own arguments where it has any, else by the case's flag.
    """
    remedied = f"{name}:remedied"
    seen = run_warm([name, remedied], steps, folder)
    top = diagnose(seen[name])[0]
    after = seen[remedied]
    if top.patch.loader_arguments:
        after = run_script(
            [sys.executable, str(CASES / f"{name}.py")],
            steps=steps - 15,
            loader_arguments=top.patch.loader_arguments,
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
        ).measurements
    return top, rate(name, seen[name]), rate(name, after)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name, planted in PLANTED.items() if planted])
def test_the_predicted_gain_comes_true(name, tmp_path):
    predicted, measured = [], []
    for trial in range(3):
        top, before, after = rates(name, 90, tmp_path / f"trial-{trial}")
        assert top.name == PLANTED[name]
        predicted.append(round(top.gain.likely, 2))
        measured.append(round(after / before, 2))
    ratio = statistics.median(predicted) / statistics.median(measured)
    print(f"{name}: predicted {predicted}, measured {measured}, ratio {ratio:.2f}")
    assert 0.7 <= ratio <= 1.3, (predicted, measured)
    if PLANTED[name] in WITHOUT_GAIN:
        assert statistics.median(predicted) == pytest.approx(1.0, abs=0.02)
