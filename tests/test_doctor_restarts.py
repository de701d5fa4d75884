"""Workers that start again and again: in a DataLoader made anew, for one batch, or beside the training's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from stoker.doctor.measurements import LoaderFacts, MachineFacts, WorkerStarts
from stoker.doctor.probe import clocks, loading, recorder
from stoker.doctor.probe.recorder import Fetch
from stoker.doctor.rules import diagnose
from stoker.doctor.scripts import suggest_patch
from stoker.doctor.transcript import Process
from stoker.doctor.transcript_measures import measure
from test_doctor_attach import row, state
from test_doctor_rules import at, job

SHORT = LoaderFacts(
    workers=2, batch_size=32, epoch_starts=10, counted_starts=10, epoch_start_seconds=0.060,
    steps_per_epoch=10, alone_seconds=at(0.001), persistent_workers=True, where="train.py:20",
)  # fmt: skip


def test_a_loader_made_for_every_epoch_is_made_once_instead():
    """With persistent_workers=True it was healthy, and without it this argument was advised, which brings nothing."""
    again = replace(job(0.010, 0.0005), seconds=1.6, loader=replace(SHORT, made_again=True))
    (found,) = diagnose(again)
    assert found.name == "workers-restarted"
    assert "DataLoader at train.py:20 once, before the training loop" in found.remedy
    assert not found.patch.loader_arguments
    assert "# once, before the training loop" in suggest_patch([found])
    assert found.gain.likely == pytest.approx(1.51, rel=0.02), (
        "16 ms on average, 6 of them restarts"
    )
    assert diagnose(replace(again, loader=SHORT)) == []


def test_a_loader_that_gives_one_batch_per_start_needs_one_iterator():
    """Measured on two cores: 57 ms per step with next(iter(loader)), 4.5 with one iterator."""
    one_batch = replace(SHORT, persistent_workers=False, epoch_starts=100, counted_starts=100)
    measured = job(0.0555, 0.051)
    (found,) = diagnose(replace(measured, loader=one_batch))
    assert found.name == "workers-restarted"
    assert "iterator once" in found.remedy
    assert 6 < found.gain.likely < 13
    whole = replace(
        one_batch, steps_per_epoch=1
    )  # an epoch of one batch: the iterator ends by itself
    (found,) = diagnose(replace(measured, loader=whole))
    assert found.patch.loader_arguments == {"persistent_workers": True}
    # It was said that samples are cheaper to make than to get, or that there are too few workers.
    assert "starved-by-loader" in {one.name for one in diagnose(measured)}


def test_workers_of_another_loader_are_named_with_their_share_of_the_whole_time():
    starts = WorkerStarts("train.py:30", 4, 9, 0.5, 0.45)
    (found,) = diagnose(replace(job(0.010), worker_starts=(starts,), elsewhere_share=0.6))
    assert found.name == "workers-restarted"
    assert found.patch.where == "train.py:30"
    assert "at train.py:30" in found.remedy
    assert found.gain.likely == pytest.approx(1 / (1 - 0.9 * 0.45))
    assert found.samples_per_second is None, "the rate is that of the training steps alone"
    both = replace(
        job(0.010, 0.0005), seconds=1.6, loader=replace(SHORT, persistent_workers=False),
        worker_starts=(starts,), elsewhere_share=0.6,
    )  # fmt: skip
    (more,) = diagnose(both)
    assert more.gain.likely > found.gain.likely
    assert "10 epochs began" in "".join(more.evidence)
    assert ("at train.py:30" in more.remedy, "at train.py:20" in more.remedy) == (True, True)
    (same,) = diagnose(replace(both, worker_starts=(replace(starts, where="train.py:20"),)))
    assert same.remedy.count("persistent_workers") == 1, "one line makes both loaders"


def facts(number, **more):
    return {
        "number": number, "workers": 2, "batch_size": 4, "pin_memory": False, "persistent_workers": False,
        "prefetch_factor": 2, "start_method": "fork", "where": f"a.py:{number}", "dataset_where": "a.py:2",
        "collate_where": None, "epochs": [], "ends": [], "batch_bytes": 8, "length": 10, "made": 1, **more,
    }  # fmt: skip


def test_the_starts_of_another_loader_are_measured_without_its_first_batch():
    rows = [row(seconds=0.01, cpu=0.01, loader=0, samples=4, batches=1) for _ in range(400)]
    epochs = [(step, 0.1, 0.06) for step in range(50, 400, 50)]
    held_out = facts(1, epochs=epochs, ends=[(step, 0.02) for step in range(50, 400, 50)])
    fetched = [Fetch(0.0, 0.01, 0.01, 0.0, 0.0, 1)]
    worker = Process([], fetched, state(role="worker", loader_id=1, worker_id=0, num_fetches=1))
    feeding = facts(0, persistent_workers=True)

    def starts(loader):
        main = Process(rows, [], state(loaders=[feeding, loader]))
        return measure([main, worker], "x", MachineFacts(cores=2)).worker_starts

    (one,) = starts(held_out)
    assert (one.where, one.count, one.made_again) == ("a.py:1", 7, False)
    assert one.seconds == pytest.approx(0.1 + 0.05 + 0.02)
    assert one.share == pytest.approx(7 * 0.17 / 4.0)
    kept = {**held_out, "persistent_workers": True}
    assert starts(kept) == ()
    assert starts({**kept, "made": 7})[0].made_again
    assert starts({**held_out, "workers": 0}) == ()


def test_the_end_of_workers_that_are_dropped_early_is_waiting(monkeypatch):
    seen = recorder.Recorder.__new__(recorder.Recorder)
    vars(seen).update(
        training_thread=clocks.current_thread(), step_start=0.0, num_steps=9, drawing=False
    )
    vars(seen).update(wait=0.0, wait_delay=0.0)
    monkeypatch.setattr(recorder, "_RECORDER", seen)
    iterator = SimpleNamespace(_stoker_facts=facts(0), _shutdown=False)
    shut = loading._timed_shutdown(lambda self: setattr(self, "_shutdown", True))
    shut(iterator)
    shut(iterator)  # torch calls it again when the iterator is deleted
    assert len(iterator._stoker_facts["ends"]) == 1
    assert seen.wait > 0
