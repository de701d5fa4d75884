"""docs/training.md: its examples run, its commands exist, its messages are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from stoker.cli.main import app
from stoker.loader.loader import Loader

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/training.md").read_text(encoding="utf-8")
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))


def test_the_examples_run(tmp_path, monkeypatch):
    from run_makers import make_store

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("train", "val"):
        features = rng.normal(size=(300, 6)).astype("f4")
        with h5py.File(f"{name}.h5", "w") as file:
            file["features"], file["targets"] = features, features[:, :1]
    make_store("tabular", tmp_path / "rows").close()
    own, epochs, recipe, captured = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    state: dict = {}
    exec(compile(own, "docs/training.md", "exec"), state)
    losses = [report.metrics["loss"] for report in state["history"].epochs]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    for name in ("train", "val"):  # the loaders of the first example are closed
        data = Loader(f"{name}.h5", 64, order="shuffled")
        getattr(state["trainer"], f"_{name}").loader = data
    exec(compile(epochs, "docs/training.md", "exec"), state)
    assert state["report"].epoch == 4
    assert state["metrics"]["loss"] < losses[0]
    exec(compile(captured, "docs/training.md", "exec"), state)
    assert state["step"].reason.startswith(("eager: there are no CUDA graphs", "captured"))
    recipe = recipe.replace('"run.dir=', '"training.epochs=1", "run.dir=')
    exec(compile(recipe, "docs/training.md", "exec"), state)
    assert state["run"].best.exists()
    assert set(state["run"].test) & set(state["run"].baseline)


def test_the_commands_and_options_exist(capsys):
    commands = re.findall(r"^stoker (\w+)", PAGE, re.MULTILINE)
    assert {"train", "predict", "export", "pack"} == set(commands)
    for verb in ("train", "predict", "export"):
        with pytest.raises(SystemExit) as ended:
            app([verb, "--help"])
        assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--set", "--store", "--run-dir", "--resume", "--device", "--json", "--split"):
        assert option in shown


def messages() -> list[str]:
    table = PAGE.partition("## When it goes wrong")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    said = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    return [part.strip() for text in said for part in text.split("…")]


@pytest.mark.parametrize("message", messages())
def test_every_message_of_the_page_is_in_the_code(message):
    if message.startswith("waited"):
        message = "waited {"
    parts = re.split(r"'\w+'", message)  # values stand in the code as placeholders
    assert all(part.strip() in SOURCE for part in parts), message


def test_the_exit_codes_are_those_of_the_house():
    from stoker.errors import EXIT_DONE, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OURS, EXIT_REFUSED

    rows = re.findall(r"\| (\d+) \|$", PAGE, re.MULTILINE)
    assert [int(code) for code in rows] == [EXIT_DONE, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_INPUT]
    assert f"| {EXIT_OURS} or {EXIT_INPUT} |" in PAGE


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([\w/.]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
