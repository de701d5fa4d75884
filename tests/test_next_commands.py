"""What a command prints under "Next:" works when it is typed, also beside an earlier run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from run_makers import make_store
from stoker.cli.main import app
from stoker.tune.trial import JobBench
from test_tune import made_up

CONFIG = """\
recipe: {name: tabular, store: store, options: {hidden: [8]}}
training: {epochs: 1, batch_size: 16, gradient_accumulation_steps: 2}
run: {dir: run}
"""
TRAIN = ["train", "--config", "c.yaml", "--device", "cpu"]


@pytest.fixture
def here(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    make_store("tabular", tmp_path / "store").close()
    Path("c.yaml").write_text(CONFIG)


def next_commands(text: str) -> list[list[str]]:
    _, _, after = text.partition("Next:")
    return [shlex.split(line) for line in after.splitlines() if line.strip().startswith("stoker ")]


@pytest.mark.parametrize("out", [["--out", "tuned.yaml"], []])
def test_the_tuned_config_trains_beside_the_run_that_was_tuned(here, out, monkeypatch, capsys):
    app(TRAIN, standalone_mode=False)
    Path("run-2").mkdir()
    monkeypatch.setattr(
        JobBench, "measure", made_up({16: 100.0, 32: 250.0, 64: 260.0, 128: 261.0}, cap=999)
    )
    capsys.readouterr()
    app(["tune", "--config", "c.yaml", "--device", "cpu", *out], standalone_mode=False)
    (words,) = next_commands(capsys.readouterr().out)
    assert words[-4:] == ["--run-dir", "run-2", "--device", "cpu"]
    app(words[1:], standalone_mode=False)
    assert list(Path("run-2").glob("step-*.pt"))


def test_a_folder_in_use_is_answered_with_one_that_is_free(here, capsys):
    from stoker.errors import InputError

    app(TRAIN, standalone_mode=False)
    app([*TRAIN, "--run-dir", "run-2"], standalone_mode=False)
    with pytest.raises(InputError, match=r"--resume, or --run-dir run-3$"):
        app(TRAIN, standalone_mode=False)
    capsys.readouterr()
    app([*TRAIN, "--run-dir", "run-3"], standalone_mode=False)
    assert list(Path("run-3").glob("step-*.pt"))
