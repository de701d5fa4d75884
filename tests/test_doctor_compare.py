"""`stoker doctor compare`, `explain` and `--pid`: exit codes for CI, texts in the package, a process from outside."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.doctor import outside
from stoker.doctor.comparison import compare, read_examination
from stoker.doctor.findings import Consultation, Finding, Gain, explanations
from stoker.doctor.measurements import MachineFacts, Measurements
from stoker.doctor.rules import FINDING_NAMES
from stoker.errors import InputError
from stoker.measure.readings import Spread

SLOW = Finding(
    "no-workers", "the training process loads its own data", (), "r", Gain(1.5, 2.0, 2.5)
)


def measured(milliseconds=10.0, samples=64.0, **values):
    step = Spread(milliseconds / 1e3, 0.98 * milliseconds / 1e3, 1.02 * milliseconds / 1e3, 100)
    machine = MachineFacts(cores=8, device_name="CPU")
    return Measurements(
        "python train.py",
        machine=machine,
        steps=100,
        seconds=milliseconds / 10,
        samples_per_step=samples,
        step_seconds=step,
        **values,
    )


def examined(folder, name, measurements, *findings):
    document = Consultation(measurements, findings).to_json()
    (folder / name).write_text(json.dumps(document))
    return read_examination(folder / name)


def test_a_slower_run_is_worse_and_a_faster_one_is_not(tmp_path):
    before, after = (examined(tmp_path, f"{n}.json", measured(n)) for n in (10, 13))
    (why,) = compare(before, after, 0.1).worse
    assert why == "23% of the rate is lost, and 10% may be"
    assert compare(before, after, 0.3).worse == ()
    assert compare(after, before, 0.1).worse == ()


def test_a_loss_within_the_quartiles_does_not_count(tmp_path):
    before = examined(tmp_path, "a.json", measured(10))
    noisy = replace(measured(13), step_seconds=Spread(0.013, 0.0101, 0.02, 100))
    assert compare(before, examined(tmp_path, "b.json", noisy), 0.1).worse == ()


def test_a_new_finding_is_worse_and_an_old_one_is_not(tmp_path):
    plain, found = (
        examined(tmp_path, "a.json", measured()),
        examined(tmp_path, "b.json", measured(), SLOW),
    )
    assert compare(plain, found, 0.1).worse == (f"new: {SLOW.name}: {SLOW.title}",)
    assert compare(found, found, 0.1).worse == ()
    small = replace(SLOW, gain=Gain(1.0, 1.05, 1.1))
    assert compare(plain, examined(tmp_path, "c.json", measured(), small), 0.1).worse == ()


def test_without_samples_the_step_is_compared_and_other_machines_are_named(tmp_path):
    before = examined(tmp_path, "a.json", measured(10, None))
    other = replace(measured(20, None), machine=MachineFacts(cores=2, device_name="CPU"))
    found = compare(before, examined(tmp_path, "b.json", other), 0.1)
    assert found.worse == ("50% of the rate is lost, and 10% may be",)
    assert found.notes == ("different numbers of cores: 8 and 2",)


def test_a_run_without_a_step_is_worse_and_cannot_be_held(tmp_path):
    before = examined(tmp_path, "a.json", measured())
    empty = examined(tmp_path, "b.json", Measurements("python train.py"))
    assert compare(before, empty, 0.1).worse == ("no step was measured in b.json",)
    with pytest.raises(InputError, match="measured no step"):
        compare(empty, before, 0.1)


def test_the_exit_code_tells(tmp_path):
    examined(tmp_path, "a.json", measured(10))
    examined(tmp_path, "b.json", measured(20))
    words = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    run = CliRunner().invoke(app, ["doctor", "compare", *words])
    assert run.exit_code == 3
    assert "worse: 50% of the rate is lost" in run.output
    assert CliRunner().invoke(app, ["doctor", "compare", *words[::-1]]).exit_code == 0
    told = CliRunner().invoke(app, ["doctor", "compare", "--json", "--tolerance", "60", *words])
    assert told.exit_code == 0
    assert json.loads(told.output)["is_worse"] is False


def test_every_finding_is_explained_where_stoker_is_installed():
    assert set(explanations()) == set(FINDING_NAMES)
    run = CliRunner().invoke(app, ["doctor", "explain", "gc-each-step"])
    assert run.exit_code == 0
    assert "gc.collect()" in run.output


# -- a process from outside ----------------------------------------------------------------------------

LOADER = "/x/site-packages/torch/utils/data/dataloader.py"
STACKS = [
    f"thread (7): MainThread;<module> (/me/train.py:9);__next__ ({LOADER}:700) 30",
    "thread (7): MainThread;<module> (/me/train.py:10);forward (/x/site-packages/torch/nn/modules/linear.py:12) 50",
    "thread (7): MainThread;<module> (/me/train.py:8);get_batch (/me/train.py:3) 15",
    "thread (7): MainThread;<module> (/me/train.py:12) 5",
    "thread (8): pin;run (/x/threading.py:9) 100",
    "no stack",
]


def test_stacks_are_counted_by_what_the_main_thread_does():
    doing, lines = outside.count_stacks(STACKS)
    assert doing == {"loader": 30, "model": 50, "data": 15, "between": 5}
    assert lines == {"/me/train.py:9": 30, "/me/train.py:3": 15, "/me/train.py:12": 5}


def test_a_look_says_what_it_saw_and_what_it_could_not(monkeypatch):
    monkeypatch.setattr(outside, "_read_stacks", lambda *_: (STACKS, ""))
    look = outside.look_at(os.getpid(), 0.01)
    assert look.verdict == "the training thread spends 45% of its time on data"
    assert look.lines[0] == ("/me/train.py:9", 0.3)
    monkeypatch.undo()
    monkeypatch.setattr(outside.shutil, "which", lambda _: None)
    blind = outside.look_at(os.getpid(), 0.01)
    assert blind.verdict.startswith("cannot judge where the time goes: py-spy is not installed")
    assert blind.num_samples == 0


def test_a_process_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="cannot be looked at"):
        outside.look_at(4194303, 0.01)
