"""What one sample more would cost, which tells what a larger batch would: loading and computing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.doctor.measurements import LoaderWork, OperatorFacts
from stoker.doctor.probe import operators
from stoker.doctor.rules import diagnose
from test_doctor_attach import event
from test_doctor_rules import at, job


def test_samples_are_timed_without_the_first_and_without_what_a_fetch_costs(seen):
    loader = seen.slow.loader
    assert (
        loader.alone_seconds.median >= 0.07
    )  # 83 ms of sleeps; other work on the cores is estimated and left out
    # A sleep of 1 ms has taken 4 on a busy machine (17 now and then): far from the first one's 80.
    assert 0.001 <= loader.sample_seconds.median < 0.04


def test_what_takes_all_indices_at_once_is_given_what_torch_gives_it(seen):
    assert seen.whole.loader.sample_seconds is None  # and the script's own checks have passed


def tiny(**loader) -> float:
    """Return the predicted gain of a step of 2 ms with two samples, of which a batch costs 200 us."""
    measured = job(
        0.002,
        0.0002,
        workers=0,
        samples_per_step=2.0,
        operators=OperatorFacts(130, 0.00001, 0.00001),
    )
    about = replace(measured.loader, **loader)
    (found,) = [
        one for one in diagnose(replace(measured, loader=about)) if one.name == "batch-too-small"
    ]
    return found.gain.likely


def test_the_fixed_cost_of_a_fetch_is_not_multiplied():
    # 32 times the samples; 1.8 ms computing stays, and 31 times 140 us, all but asking, is loading.
    assert tiny() == pytest.approx(32 * 2.0 / (1.8 + 0.2 + 31 * 0.14))
    known = {"sample_seconds": at(5e-6), "work": LoaderWork(collate=84e-6, other=116e-6)}
    assert tiny(**known) == pytest.approx(32 * 2.0 / (1.8 + 0.2 + 31 * (0.010 + 0.004)))
    # A collate function of the user's may do anything for every sample; large samples are copied.
    assert tiny(**known, collate_where="train.py:9") == pytest.approx(
        32 * 2.0 / (1.8 + 0.2 + 31 * (0.010 + 0.084))
    )
    large = known | {"batch_bytes": 200_000}
    assert tiny(**large) == pytest.approx(32 * 2.0 / (1.8 + 0.2 + 31 * (0.010 + 0.050)))


def test_operators_that_move_no_data_do_not_grow_with_the_batch():
    matrix = ([[64, 64]], ["float"])
    events = [
        event("aten::resolve_conj", 0, 50, *matrix),
        event("aten::resolve_neg", 100, 50, *matrix),
        event("torch::autograd::AccumulateGrad", 200, 50, *matrix),
    ]
    assert operators.summarise(events, [0, 1_000_000], [])["work_seconds"] == 0
    events.append(event("aten::relu", 300, 50, *matrix))
    assert operators.summarise(events, [0, 1_000_000], [])["work_seconds"] > 0
