"""`stoker tune` as a command: what it writes, what it prints, and what docs/tuning.md shows of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from run_makers import make_store
from stoker.cli.main import app
from stoker.config import load_config, resolve
from stoker.errors import InputError, StokerError
from stoker.tune.trial import JobBench
from test_tune import QUICK, made_up


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    make_store("tabular", folder / "store").close()
    return folder


# -- the command -----------------------------------------------------------------------------------

CONFIG = """\
# kept: a comment
recipe:
  name: tabular
  store: store
  options: {hidden: [16]}
training:
  epochs: 2
  batch_size: 16 # and this one
  gradient_accumulation_steps: 2
  lr: 0.003
"""


def test_the_command_writes_a_config_that_says_what_was_measured(
    table, monkeypatch, capsys, one_thread
):
    monkeypatch.chdir(table)
    monkeypatch.setattr(
        JobBench, "measure", made_up({16: 100.0, 32: 250.0, 64: 300.0, 128: 301.0}, cap=999)
    )
    Path("c.yaml").write_text(CONFIG)
    words = [
        "tune",
        "--config",
        "c.yaml",
        "--device",
        "cpu",
        "--out",
        "tuned.yaml",
        "--html",
        "t.html",
    ]
    app(words, standalone_mode=False)
    out = capsys.readouterr().out
    for said in ("32 │          1 │         32 │       250", "taken", "configured", "2.50 times the",
                 "learning rate stays 0.003", "--grow-update takes them", "train --config tuned.yaml"):  # fmt: skip
        assert said in out
    text = Path("tuned.yaml").read_text()
    assert "# kept: a comment" in text
    assert "#   batch 16 x 2: 100 samples/s" in text
    before, after = (resolve(load_config(name)) for name in ("c.yaml", "tuned.yaml"))
    assert (after.training.batch_size, after.training.gradient_accumulation_steps) == (32, 1)
    assert (
        after.changed({"training.batch_size": 16, "training.gradient_accumulation_steps": 2})
        == before
    )
    page = Path("t.html").read_text()
    assert "chart-rate" in page
    assert "Peak memory" in page
    assert page.count("<script") == 0
    with pytest.raises(InputError, match=r"tuned\.yaml exists") as refused:
        app(words, standalone_mode=False)
    assert "--force" in refused.value.fix
    app(
        [*words, "--force", "--json", "--grow-update", "--set", "training.lr=0.004"],
        standalone_mode=False,
    )
    made = json.loads(capsys.readouterr().out)
    assert made["keys"] == {"training.batch_size": 64, "training.gradient_accumulation_steps": 1}
    assert made["gain"] == pytest.approx(3.0)
    assert resolve(load_config("tuned.yaml")).learning_rate == 0.004  # what was typed is part of it


def test_the_command_runs_a_real_job(table, monkeypatch, capsys, one_thread):
    monkeypatch.chdir(table)
    Path("real.yaml").write_text(CONFIG)
    app(["tune", "--config", "real.yaml", "--device", "cpu", "--seconds-per-try", "0.06", "--json"],
        standalone_mode=False)  # fmt: skip
    made = json.loads(capsys.readouterr().out)
    assert made["final"]["rate"] > 0
    assert made["final"]["fits"]
    assert made["curve"][0]["peak_bytes"] < made["curve"][0]["cap_bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune"], "nothing to tune"),
        (["tune", "--config", "none.yaml"], "cannot be read"),
        (["tune", "--config", "c.yaml", "--seconds-per-try", "0"], "seconds"),
        (["tune", "--config", "c.yaml", "--out", "no/where.yaml"], "no folder"),
        (["tune", "--config", "c.yaml", "--html", "."], "a folder"),
        (["tune", "--config", "c.yaml", "--set", "recipe.name=null"], "names no recipe"),
        (["tune", "--config", "c.yaml", "--set", "recipe.store=null"], "names no store"),
        (["tune", "--config", "c.yaml", "--store", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_tuned_says_what_to_type(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    with pytest.raises(StokerError, match=said) as refused:
        app(words, standalone_mode=False)
    assert refused.value.fix


# -- docs/tuning.md --------------------------------------------------------------------------------

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_examples_of_the_page_run(monkeypatch, capsys):
    monkeypatch.setattr("stoker.tune.loaders.Effort", lambda: QUICK)
    workers, largest = re.findall(
        r"```python\n(.*?)```", (DOCS / "tuning.md").read_text(), re.DOTALL
    )
    state: dict = {}
    exec(compile(workers, "docs/tuning.md", "exec"), state)
    assert state["found"].choice in [tried.choice for tried in state["found"].tries]
    exec(compile(largest, "docs/tuning.md", "exec"), state)
    assert capsys.readouterr().out == "Max batch size: 512\n"


def test_the_options_and_links_of_the_pages_exist(capsys):
    for name, verb in (("tuning.md", ["tune"]), ("memory.md", ["bench", "memory"])):
        page = (DOCS / name).read_text()
        with pytest.raises(SystemExit):
            app([*verb, "--help"])
        shown = capsys.readouterr().out
        table = page.partition("| | |\n|---|---|\n")[2].partition("\n\n")[0]
        options = re.findall(r"--[a-z-]+", table)
        assert len(options) >= 5
        assert all(option in shown for option in options)
        for target in re.findall(r"\]\(([\w/.]+)\)", page):
            assert (DOCS / target).exists()
