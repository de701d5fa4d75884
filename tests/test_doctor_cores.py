"""Who had the core that a step was queueing for: other work, which is left out, or the job's own workers."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor_scripts import script
from stoker.doctor.measurements import MachineFacts
from stoker.doctor.probe import clocks, recorder
from stoker.doctor.probe.recorder import Fetch
from stoker.doctor.rules import diagnose
from stoker.doctor.transcript import Clock, Process
from stoker.doctor.transcript_measures import measure
from test_doctor_attach import attached, row, state
from test_doctor_endings import loader
from test_doctor_rules import job

STEPS = 40
SECONDS = 0.030 * STEPS


def measured(
    outside: float, workers: float, loader_id: int = 0, seen_share: float = 1.0, waited: float = 0.0
):
    """40 steps of 30 ms, of which 10 are queued for a core, beside work of so many seconds of cores.

    The workers have `waited` seconds for the first step, after their first batches.
    """
    facts = loader(0, "train.py:1") | {"workers": 4, "persistent_workers": True}
    queued = {"delay": 0.010, "wait": 0.012, "wait_delay": 0.004, "cpu": 0.012}
    rows = [
        row(
            start=at * 0.030,
            seconds=0.030,
            backward=0.009,
            loader=0,
            batches=1,
            samples=4,
            **queued,
        )
        for at in range(STEPS)
    ]
    own = 0.012 * STEPS
    main = state(loaders=[facts], num_steps=STEPS, cpu=[own, SECONDS], busy=own + workers + outside)
    fetches = [Fetch(at * 0.030, 0.040, 0.005, 0.020, 0.010, 0) for at in range(STEPS)]
    early = [Fetch(-waited, 0.040, 0.005, 0.020, 0.010, 0) for _ in range(2 * bool(waited))]
    seen = SECONDS * seen_share + waited
    crew = [
        Process(
            [],
            early + fetches,
            state(
                role="worker",
                loader_id=loader_id,
                worker_id=n,
                cpu=[workers / 4 * seen_share + 0.010 * bool(waited), seen, seen - waited],
            ),
        )
        for n in range(4)
    ]
    return measure([Process(rows, [], main), *crew], "crowded", MachineFacts())


def test_queueing_behind_other_work_is_left_out():
    seen = measured(outside=0.8, workers=0.0)
    assert seen.step_seconds.median == pytest.approx(0.020)
    assert seen.wait_seconds.median == pytest.approx(0.008)
    assert seen.loader.crowding_share == 0
    (note,) = [note for note in seen.notes if "took the cores" in note]
    assert note.startswith(
        "other work on this machine took the cores: 33% of a step was spent queueing"
    )


def test_queueing_behind_the_jobs_own_workers_is_time_that_loading_costs():
    seen = measured(outside=0.0, workers=0.8)
    assert seen.step_seconds.median == pytest.approx(0.030)  # by the clock on the wall
    assert seen.seconds == pytest.approx(sum([0.030] * seen.steps))
    assert seen.wait_seconds.median == pytest.approx(0.018)
    assert seen.compute_seconds.median == pytest.approx(0.012)
    assert seen.backward_seconds.median == pytest.approx(0.006)  # a third of it was queueing
    assert seen.loader.crowding_share == pytest.approx(0.2)
    assert not any("other work" in note for note in seen.notes)


def test_workers_that_waited_for_a_first_step_that_compiles_are_as_busy_as_others():
    at_once, late = measured(0.0, 0.8), measured(0.0, 0.8, waited=60.0)
    assert late.loader.worker_cpu_shares == pytest.approx(at_once.loader.worker_cpu_shares, rel=0.1)
    assert late.wait_seconds.median == pytest.approx(at_once.wait_seconds.median, rel=0.1)


def test_one_step_beside_other_work_is_not_judged(monkeypatch):
    monkeypatch.setitem(globals(), "STEPS", 2)  # the first one is not counted
    assert any("1 step cannot tell" in why for why in measured(outside=0.8, workers=0.0).unjudged)
    monkeypatch.setitem(globals(), "STEPS", 4)
    assert not any("cannot tell" in why for why in measured(outside=0.8, workers=0.0).unjudged)


@given(st.floats(0, 5), st.floats(0, 5))
def test_a_step_is_what_it_waits_and_what_it_computes(outside, workers):
    seen = measured(outside, workers)
    assert 0.020 - 1e-9 <= seen.step_seconds.median <= 0.030 + 1e-9
    if outside + workers > 0.01:
        parts = seen.wait_seconds.median + seen.compute_seconds.median
        assert parts == pytest.approx(seen.step_seconds.median)


def test_without_the_kernels_word_all_queueing_is_other_work():
    rows = [row(seconds=0.03, delay=0.01, cpu=0.02)]
    for facts in ({}, {"cpu": None, "busy": 1.0}, {"cpu": [1.0, 2.0], "busy": None}):
        one = Process(rows, [], facts)
        assert Clock.of(one, [one]) == Clock(outside=1.0, loading=0.0)


def test_the_cores_that_count_are_those_the_process_may_use():
    before = clocks.busy_seconds()
    assert before is not None
    assert before > 0
    assert clocks.busy_seconds() >= before


def test_workers_of_another_loader_do_not_crowd_this_ones_steps():
    seen = measured(outside=0.0, workers=0.8, loader_id=1)
    assert seen.loader.crowding_share == 0
    assert seen.wait_seconds.median == pytest.approx(0.012)


def test_workers_that_were_ended_without_a_last_word_count_as_they_were_seen():
    seen = measured(outside=0.0, workers=0.8, seen_share=0.1)
    assert seen.loader.crowding_share == pytest.approx(0.2)
    assert not any("other work" in note for note in seen.notes)


def test_a_wait_that_is_queueing_is_no_slow_hand_over():
    """Decoding keeps both cores busy: three runs of one script must not get three verdicts."""
    for crowding in (0.16, 0.196, 0.241):
        wait = 0.15 + crowding
        seen = job(
            0.010, wait * 0.010, load=0.018, workers=4, busy=(0.4,) * 4,
            loader={"crowding_share": crowding, "queued_share": 0.5},
            machine=MachineFacts(cores=2),
        )  # fmt: skip
        assert [one.name for one in diagnose(seen)][:1] == ["decode-bound"], crowding


def test_workers_that_load_for_a_moment_are_not_what_the_step_queued_behind():
    """A step of 1.5 s whose batch takes 41 ms: the workers' start took the cores, and no store makes that faster."""
    seen = job(
        1.5, 0.337, load=0.041, workers=4, busy=(0.09,) * 4,
        loader={"crowding_share": 0.23, "queued_share": 0.4},
        machine=MachineFacts(cores=2),
    )  # fmt: skip
    assert diagnose(seen) == []


@given(
    st.lists(st.tuples(*[st.floats(0, 0.02)] * 5), min_size=1, max_size=20),
    st.integers(0, 40),
)
def test_queueing_between_two_steps_is_no_steps(steps, num_quiet):
    """Other work comes while the probe writes a step down: once "192% of a step was spent queueing"."""
    wall = on_core = in_queue = 0.0
    fake = SimpleNamespace(
        perf_counter=lambda: wall, thread_time=lambda: on_core, process_time=lambda: on_core
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "time", fake)
        patch.setattr(clocks, "read", lambda: (wall, on_core, in_queue))
        patch.setattr(clocks, "memory", lambda: (None, None))
        seen = recorder.Recorder("")
        seen.kind, seen.training_thread = "optimizer", threading.get_ident()
        away = 0.0  # of steps since the last one whose clocks were read
        for ran, blocked, queued, late, between in [(0.002, *[0.0] * 4)] * num_quiet + steps:
            wall, on_core, in_queue = (
                wall + ran + blocked + queued,
                on_core + ran,
                in_queue + queued,
            )
            usual, end = seen.usual_seconds, wall
            wall, in_queue = wall + late, in_queue + late  # before the clocks are read
            seen.mark("optimizer", end)
            written = seen.rows[-1]
            assert written.seconds == pytest.approx(ran + blocked + queued)
            if seen.num_unread > 1:  # one of some short steps, of which every fourth is read
                assert len(seen.rows) > 16
                assert written.seconds < 1.2 * usual
                away += blocked + queued + late
            else:
                # What the step has queued is there, and nothing of what came before or after it.
                least = 1e-4 + 1e-9
                assert queued - 1e-9 <= written.delay <= queued + away + least
                assert Clock().seconds(written) >= ran - away - least
                away = 0.0
            wall, in_queue = wall + between, in_queue + between
            seen._begin_step()  # the probe was held up: the next step begins after it


def test_clocks_are_read_again_if_reading_them_lost_the_core(monkeypatch):
    """Most cores are lost at a system call: once 20 ms queued there were a wait for a disk."""
    wall, queued, lost = 1.0, 0.0, [0.02, 0.0]

    def thread_time() -> float:
        nonlocal wall, queued
        gone = lost.pop(0)
        wall, queued = wall + gone, queued + gone
        return 0.5

    fake = SimpleNamespace(perf_counter=lambda: wall, thread_time=thread_time)
    monkeypatch.setattr(clocks, "time", fake)
    monkeypatch.setattr(clocks, "run_delay", lambda _: queued)
    assert clocks.read() == (1.02, 0.5, 0.02)


def test_what_a_worker_has_others_do_is_its_own_work():
    before = clocks.children_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert clocks.children_seconds() > before


CROWDED = """
import os, time, torch
from torch.utils.data import DataLoader, Dataset
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
torch.set_num_threads(1)
class Costly(Dataset):
    def __len__(self):
        return 300
    def __getitem__(self, index):
        until = time.process_time() + 0.002
        while time.process_time() < until:
            pass
        return torch.ones(16)
model = torch.nn.Sequential(torch.nn.Linear(16, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for batch in DataLoader(Costly(), 8, num_workers=4):
    optimizer.zero_grad()
    for _ in range(3):
        model(batch.repeat(32, 1)).mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_more_workers_than_cores_are_found_to_cost_the_step(tmp_path):
    came = attached(script(tmp_path, "crowded", CROWDED, head=""))
    seen = came.measurements
    assert seen.loader.crowding_share > 0.2
    assert any("the workers took the cores from the training" in note for note in seen.notes)
    first = diagnose(seen)[0]
    assert first.name == "decode-bound"
    assert "other dataset code" in " ".join(first.evidence)
