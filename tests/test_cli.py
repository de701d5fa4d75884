"""The command line as a user meets it: help, exit codes, JSON, mistakes, silence."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

import warm_stoker
from stoker.cli.main import app
from stoker.errors import InputError

ENV = {**os.environ, "COLUMNS": "200", "PYTHONWARNINGS": "default"}


def stoker(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return warm_stoker.stoker(*args, cwd=cwd, env=ENV)


@pytest.fixture
def arrays(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "features.npy", rng.normal(size=(200, 4)).astype("f4"))
    np.save(tmp_path / "targets.npy", rng.integers(0, 2, 200))
    return tmp_path


def test_help_names_every_verb_and_every_verb_has_help():
    shown = stoker("--help")
    assert shown.returncode == 0
    groups = {
        "Data": ["pack", "inspect", "verify", "plan", "augment"],
        "Training": ["train", "tune", "predict", "export", "config"],
        "Diagnosis and monitoring": ["doctor", "monitor", "report", "machine", "demo"],
    }
    panels = dict(re.findall(r"─ ([\w ,]+) ─+╮\n(.*?)╰", shown.stdout, re.DOTALL))
    assert {name: re.findall(r"^│ (\w+)", panels[name], re.MULTILINE) for name in groups} == groups
    for verb in (verb for verbs in groups.values() for verb in verbs):
        page = CliRunner(env=ENV).invoke(app, [verb, "--help"])
        assert page.exit_code == 0
        assert "Usage" in page.stdout
        if verb not in ("pack", "config", "augment"):
            assert "--json" in page.stdout
    for kind in ("arrays", "table", "images", "segmentation", "bars", "massspec"):
        page = CliRunner(env=ENV).invoke(app, ["pack", kind, "--help"])
        for option in ("--jobs", "--force-recreate", "--on-bad", "--bad-budget", "--json"):
            assert option in page.stdout, (kind, option)
    assert stoker("--version").stdout.startswith("stoker 0.")


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (
            ["bench", "augment", "--batch", "8", "--html", "b.html"],
            "python benchmarks/augment.py --part workers",
        ),
        (["augment", "pictures", "a folder"], "python -m docs_build.pictures 'a folder'"),
    ],
)
def test_what_has_left_the_package_says_what_to_type(words, typed):
    with pytest.raises(InputError, match="has left the package") as caught:
        app(words, standalone_mode=False)
    assert caught.value.fix == typed
    script = Path(__file__).resolve().parent.parent / (
        typed.split()[1] if typed.split()[1] != "-m" else "docs_build/pictures.py"
    )
    assert "__main__" in script.read_text()


def test_pack_verify_inspect_and_their_json(arrays):
    packed = stoker("pack", "arrays", "features.npy", "targets.npy", "s", "--json", cwd=arrays)
    assert packed.returncode == 0, packed.stderr
    facts = json.loads(packed.stdout)
    assert facts["num_samples"] == 200
    assert not facts["reused"]
    assert json.loads(
        stoker("pack", "arrays", "features.npy", "targets.npy", "s", "--json", cwd=arrays).stdout
    )["reused"]
    verified = stoker("verify", "s", "--json", cwd=arrays)
    assert json.loads(verified.stdout)["ok"]
    inspected = stoker("inspect", "s", "--json", "--html", "page.html", cwd=arrays)
    assert json.loads(inspected.stdout)["refused"] is False
    assert (arrays / "page.html").read_text().startswith("<!doctype html>")
    for verb in (
        ("verify", "s"),
        ("inspect", "s"),
        ("pack", "arrays", "features.npy", "targets.npy", "s"),
    ):
        plain = stoker(*verb, cwd=arrays)
        assert plain.returncode == 0
        assert (
            "\x1b" not in plain.stdout + plain.stderr
        )  # no colours or bars when not on a terminal


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["packk"], 2, ["No such command", "packk"]),
        (["pack", "arrays", "nothing.npy", "s"], 2, ["does not exist", "Try:"]),
        (
            ["pack", "arrays", "features.npy"],
            2,
            ["only features.npy was given", "Try: features.npy store/"],
        ),
        (["pack", "arrays", "features.npy", "s", "--jobs", "-3"], 2, ["--jobs is -3", "Allowed:"]),
        (
            ["pack", "arrays", "features.npy", "s", "--on-bad", "hope"],
            2,
            ["--on-bad is 'hope'", "quarantine"],
        ),
        (
            ["pack", "images", ".", "s", "--size", "big"],
            2,
            ["cannot read 'big' as a size", "--size 512x512"],
        ),
        (["pack", "bars", "x.csv", "s", "--windows", "M7=3"], 2, ["M7"]),
        (
            ["pack", "bars", "x.csv", "s", "--split", "0.9,0.3,0.1"],
            2,
            ["add up to 1", "--split 0.8"],
        ),
        (["pack", "bars", "x.csv", "s", "--split-at", "2020"], 2, ["two dates"]),
        (["pack", "table", "dirty.csv", "s", "--split", "half"], 2, ["--split is 'half'"]),
        (
            ["pack", "table", "dirty.csv", "t"],
            3,
            ["quality gate refuses", "nan features['b']", "--on-bad quarantine"],
        ),
        (
            ["pack", "arrays", "features.npy", "http://host/store"],
            2,
            ["OUT is http://host/store", "a folder of this machine", "docs/remote.md"],
        ),
        (["config", "check", "dirty.csv"], 2, ["not a section per line"]),
        (["inspect", "dirty.csv"], 3, ["nan features['b']"]),
        (["inspect", "nothing"], 2, ["nothing does not exist"]),
        (["inspect", "ran"], 2, ["ran is the folder of a run", "Try: stoker report ran"]),
        (["verify", "features.npy"], 2, ["Try: stoker pack arrays features.npy OUT"]),
        (["config", "check", "none.yaml"], 2, ["none.yaml"]),
        (["demo", "--weeks", "1"], 2, ["weeks"]),
        (["doctor", "--html", "--json", "--", "true"], 2, ["is an option itself", "--html FILE"]),
        (["pack", "table", "dirty.csv", "s", "--target", "--sep"], 2, ["--target VALUE --sep"]),
    ],
)
def test_mistakes_end_with_their_code_and_what_to_type(arrays, args, code, words):
    (arrays / "dirty.csv").write_text("a,b\n1,\n2,3\n")
    (arrays / "ran").mkdir()  # a run, with predictions that are a table
    (arrays / "ran/run.jsonl").touch()
    (arrays / "ran/predictions.csv").write_text("a,b\n1,2\n2,3\n")
    done = stoker(*args, cwd=arrays)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stdout + done.stderr


def test_a_corrupt_store_fails_verify_with_the_place(arrays):
    stoker("pack", "arrays", "features.npy", "s", cwd=arrays)
    shard = arrays / "s" / "shard-00000.h5"
    with h5py.File(shard) as file:
        offset = file["features"].id.get_offset()
    data = bytearray(shard.read_bytes())
    data[offset + 100] ^= 1
    shard.write_bytes(data)
    done = stoker("verify", "s", cwd=arrays)
    assert done.returncode == 2
    assert "dataset 'features' fails its checksum in block 0" in done.stdout
    assert not json.loads(stoker("verify", "s", "--json", cwd=arrays).stdout)["ok"]


def test_our_own_faults_end_with_1_and_a_hint(arrays, tmp_path):
    code = (
        "import sys\nfrom stoker.cli import main\nimport stoker.store.reader as reader\n"
        "def broken(*a, **k):\n    raise RuntimeError('planted')\n"
        "reader.open_store = broken\nsys.argv = ['stoker', 'verify', 'x']\nmain.run()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    done = warm_stoker.shared().run([], environment=ENV, script=script)
    assert done.returncode == 1
    assert "RuntimeError: planted" in done.stderr
    assert "STOKER_TRACEBACK=1" in done.stderr
    assert "Traceback" not in done.stderr
    told = warm_stoker.shared().run([], environment={**ENV, "STOKER_TRACEBACK": "1"}, script=script)
    assert "Traceback" in told.stderr


def test_an_interrupt_ends_with_130(tmp_path):
    words = ["demo", "--folder", tmp_path / "d", "--weeks", "400"]
    process = warm_stoker.Started(words, environment=ENV)
    assert "making 400 weeks" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest


def test_output_into_a_closed_pipe_is_no_error(arrays):
    stoker("pack", "arrays", "features.npy", "s", cwd=arrays)
    command = [sys.executable, "-m", "stoker", "inspect", "s", "--json"]
    process = subprocess.Popen(
        command, cwd=arrays, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # nobody reads: the write fails with EPIPE
    complaint = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(200) == 0
    assert complaint == ""


def test_progress_bars_show_on_a_terminal_only_and_no_color_is_respected(arrays):
    script = (
        "import os, pty, sys\n"
        "out = bytearray()\n"
        "def read(fd):\n    data = os.read(fd, 65536)\n    out.extend(data)\n    return data\n"
        f"code = pty.spawn([{sys.executable!r}, '-m', 'stoker', 'verify', 'features.h5'], read)\n"
    )
    with h5py.File(arrays / "features.h5", "w") as file:
        file["features"] = np.zeros((1000, 100))
    coloured = subprocess.run(
        [sys.executable, "-c", script],
        cwd=arrays,
        capture_output=True,
        text=True,
        env={**ENV, "TERM": "xterm-256color"},
        check=False,
    )
    assert "verifying" in coloured.stdout
    plain = subprocess.run(
        [sys.executable, "-c", script],
        cwd=arrays,
        capture_output=True,
        text=True,
        env={**ENV, "TERM": "xterm-256color", "NO_COLOR": "1"},
        check=False,
    )
    assert "\x1b[38;5" not in plain.stdout
    assert "\x1b[31m" not in plain.stdout
