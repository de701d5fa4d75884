"""`stoker doctor` as a user meets it: both forms, the trace, output, exit codes, mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import warm_stoker
from stoker.cli import doctor
from stoker.cli.main import app
from stoker.cli.terminal import make_console
from stoker.doctor import rules, scripts
from stoker.doctor.attach import Attached
from stoker.doctor.findings import Consultation, Finding, Gain, Patch
from stoker.doctor.measurements import Measurements
from stoker.doctor.scripts import edit_call, suggest_patch
from stoker.errors import StokerError
from stoker.measure.readings import Spread
from store_makers import write_store
from test_recipe_tabular import class_table

ENV = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
CONFIG = """\
# a comment that stays
recipe:
  name: tabular
  store: store
  options: {hidden: [16]}
training:
  batch_size: 4 # tiny
"""
SCRIPT = """\
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.ones(8), index % 2


def main():
    loader = DataLoader(Slow(), batch_size=4)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in loader:
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained with", *sys.argv[1:])
    print("a word of its own", file=sys.stderr)


if __name__ == "__main__":
    main()
    sys.exit(7 if "--fail" in sys.argv else 0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("doctor")
    write_store(made / "store", [class_table(1200)]).close()
    (made / "c.yaml").write_text(CONFIG)
    (made / "train.py").write_text(SCRIPT)
    return made


@pytest.fixture
def inside(folder, monkeypatch, one_thread):
    monkeypatch.chdir(folder)
    return folder


def call(capsys, *args: object) -> tuple[object, str, str]:
    code = app([*map(str, args)], standalone_mode=False)
    said = capsys.readouterr()
    return code, said.out, said.err


SHORT = ("--device", "cpu", "--steps", 8, "--seconds", 1)


def test_a_config_is_examined_changed_and_measured_again(inside, capsys):
    code, out, err = call(
        capsys, "doctor", "--config", "c.yaml", *SHORT,
        "--apply", "better.yaml", "--html", "page.html", "--out", "doctor.json",
    )  # fmt: skip
    assert code in (None, 0)
    assert re.search(
        r"c\.yaml: [\d,]+ samples/s, a step takes [\d.]+ ms \(.*\), \d+% of it waiting", out
    )
    assert "1. batch-too-small  × " in out
    assert re.search(r"alone, per batch: step .* loader .* host to device n/a", out)
    assert re.search(r"the loader's work on a batch: reading .* decoding .* collating", out)
    assert "stoker doctor explain batch-too-small" in out
    assert re.search(
        r"samples/s before [\d,]+, predicted [\d,]+ \([\d,]+ to [\d,]+\), after [\d,]+  × [\d.]+",
        out,
    )
    assert "everything together" in err  # what is being done is told beside, not between
    written = Path("better.yaml").read_text()
    assert "# a comment that stays" in written
    assert re.search(r"  batch_size: \d{2,} # tiny", written)
    assert Path("c.yaml").read_text() == CONFIG
    document = json.loads(Path("doctor.json").read_text())
    assert document["findings"][0]["name"] == "batch-too-small"
    assert {"title", "evidence", "remedy"} <= set(document["findings"][0])
    assert document["outcome"]["after"] > document["outcome"]["before"]
    assert "batch-too-small" in Path("page.html").read_text()
    with pytest.raises(StokerError, match=r"better\.yaml exists"):
        app(["doctor", "--config", "c.yaml", "--apply", "better.yaml"], standalone_mode=False)


def test_json_is_one_document_and_a_healthy_job_has_nothing_to_fix(inside, capsys):
    healthy = ("--set", "training.batch_size=512", "--set", "recipe.options.hidden=[128, 128]")
    args = ("doctor", "--config", "c.yaml", *SHORT, *healthy, "--apply", "none.yaml")
    _, out, err = call(capsys, *args, "--json")
    assert err == ""
    document = json.loads(out)
    assert document["verdict"] == "nothing to fix"
    assert document["findings"] == []
    assert document["outcome"] is None
    assert document["measurements"]["loader"]["batch_size"] == 512
    assert not Path("none.yaml").exists()


def test_a_healthy_job_is_told_so(inside, capsys, monkeypatch):
    found = Consultation(script_facts(100.0), ())
    monkeypatch.setattr("stoker.doctor.consultation.consult_job", lambda *_, **__: found)
    _, out, _ = call(capsys, "doctor", "--config", "c.yaml", "--apply", "none.yaml")
    assert "\nnothing to fix\n" in out
    assert "not measured again: there is nothing to apply" in out
    assert not Path("none.yaml").exists()


def test_a_script_runs_as_it_is_and_is_judged_beside(folder):
    command = ["doctor", "--out", "script.json", "--html", "script.html", "--apply", "script.patch",
               "--", sys.executable, "train.py", "--lr", "3", "--fail"]  # fmt: skip
    variables = {**ENV, "PYTHONWARNINGS": "default"}
    done = warm_stoker.shared().run(command, folder, variables, forks_scripts=True)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "trained with --lr 3 --fail\n"
    assert done.stderr.startswith("a word of its own\n")
    assert re.search(r"\d\. no-workers  × ", done.stderr)
    assert f"{folder}/train.py:16" in done.stderr
    document = json.loads((folder / "script.json").read_text())
    assert "no-workers" in [finding["name"] for finding in document["findings"]]
    assert "no-workers" in (folder / "script.html").read_text()
    # It failed: a second run with other arguments would fail too, and is not tried.
    assert "not measured again: the script ended with 7" in done.stderr
    patched = subprocess.run(
        ["patch", "-p1", "-o", "patched.py", "-i", "script.patch"], cwd=folder, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert patched.returncode == 0, patched.stdout
    assert "DataLoader(Slow(), batch_size=4, num_workers=" in (folder / "patched.py").read_text()


def script_facts(rate, findings=()):
    return Measurements(
        "python x.py", steps=10, seconds=10 * 8 / rate, samples_per_step=8.0,
        step_seconds=Spread(8 / rate, 8 / rate, 8 / rate, 10),
    )  # fmt: skip


def no_workers():
    return Finding(
        "no-workers", "slow", ("seen",), "Do it.", Gain(1.5, 2.0, 3.0), 100.0,
        Patch(loader_arguments={"num_workers": 2}, where=None, script="num_workers=2"),
    )  # fmt: skip


def test_loader_arguments_are_tried_in_a_second_run(inside, capsys, monkeypatch):
    runs = []

    def run_script(command, *, steps, seconds, loader_arguments=None):
        runs.append((list(command), steps, seconds, loader_arguments))
        return Attached(0, "", script_facts(100.0 if loader_arguments is None else 210.0))

    monkeypatch.setattr(scripts, "run_script", run_script)
    monkeypatch.setattr(rules, "diagnose", lambda measured: [no_workers()])
    code, out, err = call(
        capsys, "doctor", "--steps", 5, "--apply", "tried.patch", "--force", "--", "python", "x.py"
    )
    assert code == 0
    assert out == ""
    assert runs == [
        (["python", "x.py"], 5, None, None),
        (["python", "x.py"], 5, None, {"num_workers": 2}),
    ]
    assert "applied no-workers: DataLoader(num_workers=2)" in err
    assert "samples/s before 100, predicted 200 (150 to 300), after 210  × 2.10" in err
    assert "# no-workers: Do it." in Path("tried.patch").read_text()


@pytest.mark.parametrize("dashes", [["--"], []])
def test_options_behind_the_command_are_the_scripts(inside, capsys, monkeypatch, dashes):
    seen = []

    def run_script(command, **_):
        seen.append(command)
        return Attached(0, "", Measurements("python x.py"))

    monkeypatch.setattr(scripts, "run_script", run_script)
    call(capsys, "doctor", "--steps", 3, *dashes, "python", "x.py", "--config", "a.yaml", "--json")
    assert seen == [["python", "x.py", "--config", "a.yaml", "--json"]]


@pytest.mark.parametrize(
    ("code", "stopped", "ends"),
    [
        (0, "", 0),
        (None, "steps", 0),
        (3, "", 3),
        (-15, "", 143),
        (None, "interrupt", 130),
        (None, "termination", 143),
    ],
)
def test_the_scripts_exit_code_is_the_doctors(inside, capsys, monkeypatch, code, stopped, ends):
    measured = Measurements("python x.py", notes=("it stood at [x.py:3]",))
    monkeypatch.setattr(scripts, "run_script", lambda *_, **__: Attached(code, stopped, measured))
    ended, out, err = call(capsys, "doctor", "--", "python", "x.py")
    assert ended == ends
    assert out == ""
    assert "no training step was seen" in err
    assert "note: it stood at [x.py:3]" in err
    assert ("was ended after its steps" in err) == (stopped == "steps")


def test_after_ctrl_c_the_script_is_not_run_again(inside, capsys, monkeypatch):
    runs = []

    def run_script(command, **_):
        runs.append(command)
        return Attached(None, "interrupt", script_facts(100.0))

    monkeypatch.setattr(scripts, "run_script", run_script)
    monkeypatch.setattr(rules, "diagnose", lambda measured: [no_workers()])
    code, _, err = call(capsys, "doctor", "--apply", "cut.patch", "--", "python", "x.py")
    assert (code, len(runs)) == (130, 1)
    assert "not measured again" in err
    assert "# no-workers: Do it." in Path("cut.patch").read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["nothing to examine", "stoker doctor --config", "stoker doctor -- python train.py"]),
        (["--config", "c.yaml", "--", "python", "x.py"], ["a config and a command were given"]),
        (["--config", "none.yaml"], ["none.yaml", "cannot be read"]),
        (["--config", "c.yaml", "--set", "training.epocs=3"], ["no key 'epocs'", "training.epochs"]),
        (["--config", "c.yaml", "--store", "nothing"], ["nothing does not exist"]),
        (["--config", "c.yaml", "--device", "gpu"], ["gpu", "Try:"]),
        (["--config", "c.yaml", "--apply", "c.yaml", "--force"], ["c.yaml is read by this command"]),
        (["--config", "c.yaml", "--html", "no/where.html"], ["there is no folder no", "mkdir -p no"]),
        (["--config", "c.yaml", "--out", "store"], ["store is a folder"]),
        (["--json", "--", "python", "x.py"], ["stdout is the script's own", "--out doctor.json"]),
        (["--set", "a=1", "--", "python", "x.py"], ["are for a config", "after --"]),
        (["--", "no-such-program-anywhere"], ["no-such-program-anywhere"]),
    ],
)  # fmt: skip
def test_mistakes_end_with_2_and_say_what_to_type(inside, args, words):
    with pytest.raises(StokerError) as caught:
        app(["doctor", *args], standalone_mode=False)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


def test_help_names_both_forms_and_costs_no_torch(folder):
    code = (
        "import sys\nfrom stoker.cli.main import app\n"
        "try:\n    app(['doctor', '--help'], standalone_mode=False)\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=ENV,
        timeout=2000,
        check=True,
    )
    assert "--config" in done.stdout
    assert "python train.py" in done.stdout


# -- suggested edits -------------------------------------------------------------------------------

CALLS = """\
loader = DataLoader(dataset, batch_size=4)
loader = DataLoader(dataset, num_workers=0, shuffle=True)  # größer
loader = torch.utils.data.DataLoader(
    Set("a(b, c)"),
    batch_size=8,
    pin_memory=False,
)
loader = make()
other = wrap(DataLoader(dataset))
loader = DataLoader((dataset))
"""


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (1, "+loader = DataLoader(dataset, batch_size=4, num_workers=2, pin_memory=True)"),
        (
            2,
            "+loader = DataLoader(dataset, num_workers=2, shuffle=True, pin_memory=True)  # größer",
        ),
        (3, "+    pin_memory=True, num_workers=2,"),
        (5, "+    pin_memory=True, num_workers=2,"),
        (8, "+loader = make(num_workers=2, pin_memory=True)"),
        (9, "+other = wrap(DataLoader(dataset, num_workers=2, pin_memory=True))"),
        (10, None),
        (99, None),
    ],
)
def test_a_call_is_edited_where_it_stands(tmp_path, monkeypatch, line, wanted):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(CALLS, encoding="utf-8")
    diff = edit_call(f"{path}:{line}", {"num_workers": 2, "pin_memory": True})
    assert path.read_text(encoding="utf-8") == CALLS
    if wanted is None:
        assert diff is None
        return
    assert diff.startswith("--- a/train.py\n+++ b/train.py\n")
    assert wanted in diff.splitlines()
    done = subprocess.run(
        ["patch", "-p1", "--quiet"], input=diff, text=True, cwd=tmp_path, check=True, timeout=200
    )
    assert done.returncode == 0
    compile(path.read_text(encoding="utf-8"), "train.py", "exec")


def test_what_cannot_be_edited_is_said_in_words(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def (")
    for where in (None, "nowhere", f"{broken}:1", f"{tmp_path / 'none.py'}:3", f"{tmp_path}:1"):
        assert edit_call(where, {"num_workers": 2}) is None
    found = Finding(
        "sync-every-step", "t", (), "Read it less often.",
        patch=Patch(where="train.py:9", script="losses.append(loss.detach())"),
    )  # fmt: skip
    assert suggest_patch([found, Finding("x", "t", (), "No edit.")]) == (
        "# sync-every-step: Read it less often.\n# at train.py:9\n#   losses.append(loss.detach())\n"
    )


# -- the trace -------------------------------------------------------------------------------------


def test_a_trace_is_written_beside_the_findings(folder):
    command = ["doctor", "--config", "c.yaml", "--device", "cpu", "--seconds", "0.2", "--steps", "5",
               "--trace", "t.json", "--trace-steps", "2"]  # fmt: skip
    done = warm_stoker.stoker(*command, cwd=folder, env=ENV)
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout.partition("\n")[0]
    assert re.search(r"2 steps, own time of each operation", done.stdout)
    assert re.search(r"Optimizer.step#AdamW.step +│ +2 │ +[\d.]+ ms │ +\d+%", done.stdout)
    assert "trace: t.json" in done.stdout
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert any("addmm" in str(event.get("name")) for event in events)


def test_a_trace_is_part_of_the_documents(inside, capsys):
    _, out, _ = call(
        capsys, "doctor", "--config", "c.yaml", "--device", "cpu", "--seconds", 0.2, "--steps", 5,
        "--trace", "t.json.gz", "--trace-steps", 1, "--json", "--out", "d.json",
    )  # fmt: skip
    trace = json.loads(out)["trace"]
    assert trace["num_steps"] == 1
    assert len(trace["operations"]) == 15
    assert trace["trace"] == "t.json.gz"
    assert json.loads(Path("d.json").read_text())["trace"] == trace
    for args, word in (
        (["--config", "c.yaml", "--trace", "no/t.json"], "there is no folder no"),
        (["--config", "c.yaml", "--trace", "c.yaml"], "c.yaml"),
        (["--trace", "t.json", "--", "python", "x.py"], "--trace are for a config"),
    ):
        with pytest.raises(StokerError, match=word) as caught:
            app(["doctor", *args], standalone_mode=False)
        assert caught.value.exit_code == 2


def test_one_step_is_no_steps(capsys):
    second = Spread(1.5, 1.5, 1.5, 1)
    doctor._print(make_console(), Consultation(Measurements("x", steps=1, step_seconds=second), ()))
    assert "; 1 step on cpu" in capsys.readouterr().out


def test_profile_is_an_old_spelling_that_names_the_new_one():
    with pytest.raises(StokerError, match="is now `stoker doctor --trace`") as caught:
        app(["profile", "--config", "c.yaml", "--active", "2"], standalone_mode=False)
    assert caught.value.exit_code == 2


def test_a_job_of_short_epochs_is_measured_until_the_time_is_over(inside, capsys):
    options = ("--device", "cpu", "--seconds", 0.1, "--steps", 5000)
    code, out, err = call(capsys, "doctor", "--config", "c.yaml", *options)
    assert code in (None, 0), err
    assert "samples/s" in out
