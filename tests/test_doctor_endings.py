"""How a script ends under the doctor, and what is said of the time that is in no step."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import forked_scripts
from doctor_scripts import LIGHT, script
from stoker.doctor import rules, scripts
from stoker.doctor.attach import Attached, _lives, describe_ending, run_script
from stoker.doctor.findings import HEALTHY, Consultation, Finding, Gain, Outcome, Patch
from stoker.doctor.findings_page import findings_page
from stoker.doctor.measurements import MachineFacts, Measurements
from stoker.doctor.probe import recorder
from stoker.doctor.probe.recorder import OTHER_LOADER
from stoker.doctor.scripts import edit_call, suggest_patch, treat_script
from stoker.doctor.transcript import Process
from stoker.doctor.transcript_measures import measure
from stoker.measure.readings import Spread
from test_cli_doctor import call
from test_doctor_attach import attached, row, state

# -- other loaders, and what comes after the last step ---------------------------------------------


def loader(number, where):
    return {
        **{"number": number, "where": where, "workers": 0, "batch_size": 4, "batches": 9},
        **{"pin_memory": False, "persistent_workers": False, "prefetch_factor": None},
        **{"start_method": None, "dataset_where": None, "collate_where": None, "length": 10},
        **{"epochs": [], "ends": [], "batch_bytes": 8},
    }


def judged(rows, running=None, num_loaders=2):
    loaders = [loader(number, f"train.py:{number + 1}0") for number in range(num_loaders)]
    main = Process(rows, [], state(loaders=loaders, running=running, torch={}))
    return Consultation(measure([main], "python train.py", MachineFacts()), ())


def steps(count, **values):
    return [row(loader=0, batches=1, samples=4, **values) for _ in range(count)]


def test_time_spent_on_another_loader_is_named():
    # 40 steps of 10 ms; behind every tenth a validation of 300 ms.
    rows = [*steps(9), *steps(1, seconds=0.310, flags=OTHER_LOADER)] * 4
    found = judged(rows)
    assert found.measurements.seconds == pytest.approx(0.01 * found.measurements.steps)
    (note,) = [note for note in found.measurements.notes if "another DataLoader" in note]
    assert "75% of the time since the first step" in note
    assert "(train.py:20)" in note
    assert "only 25% of the time" in found.verdict
    assert "only 25% of the time" in findings_page(found)
    assert "Nothing to fix.<" not in findings_page(found)


def test_a_validation_after_the_last_step_counts_too():
    found = judged(steps(40), running=[2.0, 0, 1])
    assert found.measurements.elsewhere_share == pytest.approx(2.0 / 2.4)
    assert any("83% of the time" in note for note in found.measurements.notes)
    assert found.verdict != HEALTHY


def test_time_after_the_last_step_is_named_when_it_is_long():
    found = judged(steps(40), running=[4.0, 0, -1])
    assert any("91% of the time" in note and "after" in note for note in found.measurements.notes)
    assert found.verdict != HEALTHY
    assert judged(steps(40), running=[1.5, 0, -1]).verdict == HEALTHY


@pytest.mark.parametrize(
    "rows",
    [
        steps(40),
        steps(40, flags=OTHER_LOADER),  # two loaders in every step
        [*steps(39), *steps(1, seconds=0.02, flags=OTHER_LOADER)],
    ],
    ids=["one", "zipped", "little"],
)
def test_steps_that_are_all_counted_leave_nothing_to_say(rows):
    found = judged(rows, running=[0.001, 0, 0])
    assert not [note for note in found.measurements.notes if "since the first step" in note]
    assert found.verdict == HEALTHY


def test_a_script_that_mostly_validates_is_told_so(seen):
    path, measured = seen.paths["validating"], seen.validating
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "Slow(*" in text)
    assert any(f"({path}:{line})" in note for note in measured.notes), measured.notes
    assert measured.elsewhere_share > 0.5
    assert measured.seconds < 0.9  # 256 samples of 4 ms each were between the two epochs


def test_what_a_running_step_has_read_does_not_count(seen):
    (sync, *_) = seen.reading.syncs
    assert sync.calls_per_step == 128


# -- no step at all --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "stopped", "words"),
    [
        (0, "", "it finished"),
        (3, "", "it ended with exit code 3"),
        (-9, "", "it was killed by signal 9 (SIGKILL)"),
        (None, "seconds", "the doctor ended it after 15 s"),
        (None, "interrupt", "it was ended by Ctrl-C"),
        (None, "termination", "it was ended by SIGTERM"),
    ],
)
def test_an_ending_is_told_as_it_was(code, stopped, words):
    assert describe_ending(code, stopped, 15.0) == words


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exit 3", "it ended with exit code 3 before its first step"),
        ("kill -9 $$", "it was killed by signal 9 (SIGKILL) before its first step"),
        ("true", "it finished without a step"),
    ],
)
def test_without_a_step_the_note_says_how_it_ended(command, words):
    (note,) = run_script(["sh", "-c", command]).measurements.notes
    assert note.endswith(words)


def test_a_launcher_is_not_where_the_script_stands():
    launcher = Process([], [], state(kind="", stands="/x/site-packages/torch/distributed/run.py:1"))
    worker = Process([], [], state(kind="", role="worker", stands="/x/a.py:1"))
    rank = Process([], [], state(kind="", stands="/x/train.py:7"))
    seen = measure([launcher, worker, rank], "x", MachineFacts(), ending="it was ended by Ctrl-C")
    (note,) = seen.notes
    assert note == (
        "no step was seen: it was ended by Ctrl-C, and until then it stood at /x/train.py:7"
    )


def test_a_script_that_hangs_before_its_first_step_is_located(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.doctor.attach._start", forked_scripts.start)
    body = """
    class Stuck(TensorDataset):
        def __getitem__(self, index):
            while True:
                time.sleep(1000)
    for x, y in DataLoader(Stuck(*data.tensors), batch_size=8):
        update(x, y)
    """
    path = script(tmp_path, "stuck", body, LIGHT)
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "1000" in text)
    for seconds in (2, 15, 90):  # a crowded machine may need the longer time
        came = attached(path, seconds=seconds)
        assert came.stopped == "seconds"
        (note,) = came.measurements.notes
        assert f"the doctor ended it after {seconds} s" in note
        if note.endswith(f"it stood at {path}:{line}"):
            break
    else:
        pytest.fail(note)


# -- Ctrl-C, twice ---------------------------------------------------------------------------------

STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(300)
"""


@pytest.mark.parametrize(
    "pauses",
    [
        pytest.param((0.6,), id="two", marks=pytest.mark.slow),
        pytest.param((0.6, 0.3, 0.3), id="four"),
        pytest.param((5.8,), id="late", marks=pytest.mark.slow),
    ],
)
def test_more_than_one_ctrl_c_leaves_nothing_behind(tmp_path, pauses):
    path, told = tmp_path / "stubborn.py", tmp_path / "pids"
    path.write_text(STUBBORN)
    command = [sys.executable, "-m", "stoker", "doctor", "--", sys.executable, path, told]
    doctor = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not told.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = [psutil.Process(int(word)) for word in told.read_text().split()]
    try:
        began = time.monotonic()
        doctor.send_signal(signal.SIGINT)
        for pause in pauses:
            time.sleep(pause)
            doctor.send_signal(signal.SIGINT)
        doctor.communicate(timeout=200)
        # The last of four may meet a Python that has given its handlers back; a shell says 130 then, too.
        assert doctor.returncode in (130, -signal.SIGINT)
        assert time.monotonic() - began < sum(pauses) + 30  # the script would sleep 300 s
        time.sleep(0.2)  # a kill takes a moment
        assert not [one for one in family if _lives(one)]
    finally:
        doctor.kill()
        for one in filter(_lives, family):
            one.kill()


# -- the second run --------------------------------------------------------------------------------


def no_workers(where=None):
    return Finding(
        "no-workers", "slow", ("seen",), "Do it.", Gain(1.5, 2.0, 3.0), 100.0,
        Patch(loader_arguments={"num_workers": 2}, where=where, script="num_workers=2"),
    )  # fmt: skip


NOTHING = "nothing was measured"


def facts(num_steps):
    spread = Spread(0.08, 0.08, 0.08, num_steps) if num_steps else None
    return Measurements(
        "x", steps=num_steps, seconds=0.08 * num_steps, samples_per_step=8.0, step_seconds=spread
    )


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (Attached(0, "", facts(10)), ""),
        (Attached(None, "steps", facts(10)), ""),
        (Attached(3, "", facts(0)), "the second run ended with exit code 3 before its first step: " + NOTHING),
        (Attached(-11, "", facts(5)), "the second run was killed by signal 11 (SIGSEGV) after 5 steps that counted"),
        (Attached(None, "seconds", facts(0)), "the doctor ended the second run after 9 s before its first step: "
         + NOTHING),
        (Attached(None, "interrupt", facts(1)), "the second run was ended by Ctrl-C after 1 step that counted"),
    ],
)  # fmt: skip
def test_a_second_run_that_fails_is_told(monkeypatch, again, words):
    monkeypatch.setattr(scripts, "run_script", lambda *_, **__: again)
    outcome = treat_script(["x"], Consultation(facts(10), (no_workers(),)), seconds=9.0)
    assert outcome.failure == words
    assert outcome.to_json()["failure"] == words
    assert (outcome.after is None) == (again.measurements.steps == 0)


@pytest.mark.parametrize("piped", [True, False])
def test_the_failure_is_printed_and_an_empty_stdin_is_warned_of(
    tmp_path, monkeypatch, capsys, piped
):
    def run_script(command, *, steps, seconds, loader_arguments=None):
        if loader_arguments is None:
            return Attached(0, "", facts(10))
        return Attached(3, "", facts(0))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scripts, "run_script", run_script)
    monkeypatch.setattr(rules, "diagnose", lambda measured: [no_workers()])
    ends = os.pipe() if piped else (os.open(os.devnull, os.O_RDONLY), None)
    kept = os.dup(0)
    os.dup2(ends[0], 0)
    try:
        _, _, err = call(capsys, "doctor", "--apply", "x.patch", "--html", "x.html", "--", "x")
    finally:
        os.dup2(kept, 0)
        for file in (kept, *filter(None, ends)):
            os.close(file)
    assert "after n/a" in err
    said = "the second run ended with exit code 3 before its first step: nothing was measured"
    assert f"\n{said}\n" in err
    assert said in (tmp_path / "x.html").read_text()
    assert ("the second gets an empty one" in err) == piped


def test_an_outcome_without_failure_says_nothing_of_one():
    outcome = Outcome(no_workers(), "x", 1.0, 2.0)
    page = findings_page(Consultation(facts(10), (no_workers(),), outcome))
    failed = findings_page(Consultation(facts(10), (), replace(outcome, failure="it broke")))
    assert "it broke" not in page
    assert "it broke." in failed


@pytest.mark.parametrize("end", ["\n", ""], ids=["newline", "none"])
@pytest.mark.parametrize("tool", [["git", "apply", "-"], ["patch", "-p1", "--quiet"]])
def test_the_patch_is_one_for_git_and_patch(tmp_path, monkeypatch, tool, end):
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "train.py"
    path.write_text(f"import x\nloader = DataLoader(data){end}")
    monkeypatch.chdir(tmp_path)
    text = suggest_patch([no_workers(f"{path}:2"), no_workers()])
    assert "\n--- a/sub/train.py\n+++ b/sub/train.py\n" in text
    subprocess.run(
        tool, input=text, text=True, cwd=tmp_path, check=True, timeout=200,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
    )  # fmt: skip
    assert path.read_text() == f"import x\nloader = DataLoader(data, num_workers=2){end}"


def test_a_file_elsewhere_is_named_from_the_root(tmp_path, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text("loader = DataLoader(data)\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    diff = edit_call(f"{path}:1", {"num_workers": 2})
    assert diff.startswith(f"--- a{path.resolve()}\n+++ b{path.resolve()}\n")


CLOSES_ALL = """
import os, sys, time
folder = sys.argv[1]
sys.path.insert(0, sys.argv[2])
from recorder_package import recorder
recorder.begin(folder)
one = recorder.get()
one.write({"event": "first"})
os.closerange(3, 4096)
# Every number is the script's own now, the probe's old one included.
own = [os.open(f"{folder}/own", os.O_RDWR | os.O_CREAT | os.O_APPEND) for _ in range(1020)]
one.write({"event": "second"})
one.write({"event": "third"})
os.close(own[-1]); os.close(own[-2])
one.write({"event": "fourth"})
assert os.fstat(own[0]).st_size == 0
"""


def test_the_probe_never_writes_into_a_file_of_the_script(tmp_path):
    (tmp_path / "recorder_package").symlink_to(Path(recorder.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", CLOSES_ALL, str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1030, 1030)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("*.jsonl")
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events[:4] == ["first", "second", "third", "fourth"]
    assert (tmp_path / "own").read_bytes() == b""


def test_folders_of_multiprocessing_go_with_a_killed_script(tmp_path, monkeypatch):
    """A DataLoader's worker makes `pymp-*`; killed, it cannot remove it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\nfrom multiprocessing import util\n"
        "print(util.get_temp_dir(), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code = (
        "import sys; from stoker.doctor.attach import run_script\n"
        "run_script([sys.executable, sys.argv[1]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(tmp_path / "pymp-"))
    assert list(tmp_path.iterdir()) == [script]
