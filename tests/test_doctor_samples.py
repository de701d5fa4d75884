"""What one sample more would cost, which tells what a larger batch would: loading and computing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stoker.doctor.measurements import HostCall, LoaderWork, MachineFacts, OperatorFacts
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


TINY = job(
    0.002,
    0.0002,
    workers=0,
    samples_per_step=2.0,
    operators=OperatorFacts(130, 0.00001, 0.00001),
)


def tiny(**loader) -> float:
    """Return the predicted gain of a step of 2 ms with two samples, of which a batch costs 200 us."""
    measured = TINY
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


def test_rows_of_products_tell_a_batch_of_one_but_not_those_of_the_backward_pass():
    one = [
        event("aten::linear", 0, 50, [[1, 20], [8, 20], [8]], ["float"] * 3),
        event("aten::addmm", 10, 30, [[8], [1, 20], [20, 8]], ["float"] * 3),
        event("aten::linear", 60, 30, [[20], [8, 20], [8]], ["float"] * 3),  # a vector
        event("autograd::engine::evaluate_function: AddmmBackward0", 100, 50),
        event("aten::mm", 110, 30, [[8, 1], [1, 20]], ["float"] * 2),
    ]
    assert operators.summarise(one, [0, 1_000_000], [])["rows"] == 1
    for more in ([[16, 20], [20, 8]], [[1, 16, 20], [1, 20, 8]], [[2, 3, 9, 9], [4, 3, 3, 3]]):
        several = [*one, event("aten::mm", 200, 30, more, ["float"] * 2)]
        assert operators.summarise(several, [0, 1_000_000], [])["rows"] > 1


def test_a_larger_batch_takes_longer_to_receive_and_to_load():
    """Measured on two cores, ten workers for windows of a series: four times the batch brought × 1.35, not × 2.8."""
    many = {
        "workers": 10, "busy": (0.04,) * 10, "samples_per_step": 32.0, "compute_seconds": at(0.00307),
        "machine": MachineFacts(cores=2), "operators": OperatorFacts(110, 0.0009, 0.0002),
    }  # fmt: skip

    def promised(wait: float, load: float) -> float:
        found = diagnose(job(0.00307 + wait, wait, load=load, **many))
        return next((one.gain.likely for one in found if one.name == "batch-too-small"), 1.0)

    assert promised(0.0019, 0.0018) < 2.0
    # 32 ms of loading in place of 4 on two cores.
    assert promised(0.0007, 0.004) < promised(0.0007, 0.0004)


def test_one_row_at_a_time_without_a_loader_is_a_batch_too_small():
    measured = replace(
        TINY, loader=None, samples_per_step=None, wait_seconds=None, between_seconds=4e-5,
        between=(HostCall("train.py:7", "between", 1.0, 4e-5),),
    )  # fmt: skip
    assert not [one for one in diagnose(measured) if one.name == "batch-too-small"]
    rows = replace(measured, operators=replace(measured.operators, num_rows=1))
    (found,) = [one for one in diagnose(rows) if one.name == "batch-too-small"]
    assert "one row at a time" in found.evidence[0]
    assert "Give the model 32 samples at once" in found.remedy
    assert found.patch.where == "train.py:7"
    # The user's code makes every sample by itself: 40 us of each.
    assert found.gain.likely == pytest.approx(32 * 1.8 / (1.8 + 31 * 0.04))
    several = replace(measured, operators=replace(measured.operators, num_rows=16))
    assert not [one for one in diagnose(several) if one.name == "batch-too-small"]


def test_cheap_samples_that_take_half_a_step_are_named_where_workers_would_not_help():
    """Trials of public scripts: whole tensors brought × 1.6 to 1.8, workers nothing, and it was "nothing to fix"."""
    work = LoaderWork(collate=0.0003, other=0.0007)
    cheap = job(0.002, 0.001, workers=0, work=work, machine=MachineFacts(cores=2))
    (found,) = diagnose(cheap)
    assert found.name == "python-collate"
    assert found.title == "samples are made one by one in Python"
    assert found.patch.where == "train.py:7"
    assert found.gain.likely == pytest.approx(1.7, rel=0.05)
    # Below 30 % of a step it is the usual cost of a DataLoader; dear samples are made by workers.
    assert diagnose(job(0.0035, 0.001, workers=0, work=work)) == []
    # Seen beside a whole test run: the rest of the wait was queueing for a core.
    crowded = replace(cheap.loader, alone_seconds=at(0.0001), queued_share=0.9)
    assert diagnose(replace(cheap, loader=crowded)) == []
    dear = job(0.02, 0.01, workers=0, work=LoaderWork(other=0.01))
    assert [one.name for one in diagnose(dear)] == ["no-workers"]
    read = job(0.002, 0.001, workers=0, work=LoaderWork(read=0.0008, other=0.0002))
    assert diagnose(replace(read, machine=MachineFacts(cores=2))) == []


def test_the_dataset_that_is_advised_gives_the_same_batches():
    (found,) = diagnose(
        job(0.002, 0.001, workers=0, work=LoaderWork(other=0.001), machine=MachineFacts(cores=2))
    )
    method, call = found.patch.script.rsplit("\n", 1)
    rows = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    typed = {"torch": torch, "DataLoader": lambda _, **given: DataLoader(dataset, 4, **given)}
    exec(method, typed)
    kind = type("Whole", (TensorDataset,), {"__getitems__": typed["__getitems__"]})
    dataset = kind(*rows.tensors)
    dataset.x, dataset.y = rows.tensors
    for one, other in zip(eval(call, typed), DataLoader(rows, 4), strict=True):
        assert all(map(torch.equal, one, other))
