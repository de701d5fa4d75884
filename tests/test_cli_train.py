"""`stoker train`, `predict` and `export --int8` as a user meets them: output, exit codes, signals, silence."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import warm_stoker
from run_makers import dirty_table, make_store
from stoker.cli.main import app
from stoker.errors import StokerError
from stoker.report import read_run_log

ENV = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
CONFIG = """\
recipe:
  name: tabular
  store: store
  options: {hidden: [16]}
training: {epochs: 2, batch_size: 16, lr: 0.003}
run: {dir: run}
"""


def stoker(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm_stoker.stoker(*args, cwd=cwd, env=ENV)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a config, a store, and a finished run; what training printed is in files."""
    folder = tmp_path_factory.mktemp("cli")
    make_store("tabular", folder / "store").close()
    (folder / "c.yaml").write_text(CONFIG)
    done = stoker("train", "--config", "c.yaml", "--device", "cpu", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "out").write_text(done.stdout)
    (folder / "err").write_text(done.stderr)
    return folder


def test_training_says_its_choices_epochs_metrics_and_what_to_type_next(trained):
    out, err = (trained / "out").read_text(), (trained / "err").read_text()
    for choice in ("precision fp32: the device is the CPU", "step eager: there are no CUDA graphs",
                   "data resident: all data is", "recipe tabular on cpu"):  # fmt: skip
        assert choice in err
    assert re.search(r"epoch 1/2  loss [\d.]+  val loss [\d.]+ .* samples/s  waited \d+%", err)
    assert "\x1b" not in out + err  # no bars or colours on a pipe
    assert "best checkpoint against chance" in out
    assert re.search(r"accuracy +│ +[\d.]+ │ +[\d.]+ │ +[\d.]+", out)
    assert "stoker predict run/best.pt store predictions.parquet --split test" in out
    assert (trained / "run" / "best.pt").exists()
    assert read_run_log(trained / "run" / "run.jsonl")[-1].event == "result"


def test_a_second_run_needs_another_folder_and_a_resumed_one_goes_on(trained, monkeypatch):
    monkeypatch.chdir(trained)
    with pytest.raises(StokerError, match="checkpoints of an earlier run") as caught:
        app(["train", "--config", "c.yaml", "--device", "cpu"], standalone_mode=False)
    assert "--resume" in caught.value.fix
    on = stoker("train", "--config", "c.yaml", "--device", "cpu", "--resume", "--json",
                "--set", "training.epochs=3", cwd=trained)  # fmt: skip
    assert on.returncode == 0, on.stderr
    assert on.stderr == ""
    facts = json.loads(on.stdout)
    assert [report["epoch"] for report in facts["epochs"]] == [2]
    assert set(facts["test"]) == set(facts["val"])
    assert facts["ended"] == "done"


def test_predict_and_int8(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(trained)

    def call(*args: object) -> str:
        app([*map(str, args)], standalone_mode=False)
        return capsys.readouterr().out

    out = tmp_path / "p.parquet"
    said = call("predict", "run/best.pt", "store", out, "--split", "test", "--json")
    facts = json.loads(said)
    assert facts["num_rows"] == pq.read_metadata(out).num_rows == 20
    assert facts["columns"] == ["class", "probability"]
    said = call("export", "run/best.pt", tmp_path / "int8.pt", "--int8")
    for words in ("int8 by torch.ao", "weights", "latency of a batch", "loss", "outputs differ"):
        assert words in said
    facts = json.loads(call("export", "run/best.pt", tmp_path / "int8.pt", "--int8", "--json"))
    assert facts["metric"] == "loss"
    assert facts["metric_after"] == pytest.approx(facts["metric_before"], rel=0.05)
    said = call("predict", tmp_path / "int8.pt", "store", tmp_path / "q.parquet")
    assert "200 rows of class, probability" in said


def test_quantize_is_an_old_spelling_that_names_the_new_one():
    with pytest.raises(StokerError, match="is now `stoker export --int8`") as caught:
        app(["quantize", "run/best.pt", "a.pt", "--batch-size", "8"], standalone_mode=False)
    assert caught.value.fix == "stoker export run/best.pt a.pt --batch-size 8 --int8"


def start(folder: Path, *args: object) -> warm_stoker.Started:
    words = ["train", "--config", "c.yaml", "--device", "cpu", *args]
    process = warm_stoker.Started(words, folder, ENV)
    for line in process.stderr:
        if re.match(r"epoch +2/", line):
            break
    return process


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGTERM, 0, "terminated: saved in"), (signal.SIGINT, 130, "saved; go on with")],
)
def test_a_signal_saves_and_a_resumed_run_ends(trained, number, code, words):
    run = f"run-{number}"
    process = start(trained, "--run-dir", run, "--set", "training.epochs=100000")
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == code, err
    assert words in out + err
    assert re.search(rf"stoker train --config c.yaml --run-dir {run} .*--resume", out + err)
    assert "Traceback" not in err
    saved = sorted((trained / run).glob("step-*.pt"))
    # At a multiple of an epoch's 15 batches only by chance: the step of the signal is kept.
    assert int(saved[-1].stem.removeprefix("step-")) > 15


def test_a_loss_that_is_not_finite_ends_with_3_and_names_the_sample(tmp_path):
    dirty_table(tmp_path / "store").close()
    (tmp_path / "c.yaml").write_text(
        CONFIG.replace("hidden: [16]", "hidden: [16], scale_inputs: false, split: random")
    )
    done = stoker("train", "--config", "c.yaml", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "features column 2 is inf in sample 5" in done.stderr
    assert "Try: stoker inspect" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "--config", "none.yaml"], ["none.yaml", "cannot be read"]),
        (
            ["train", "--config", "c.yaml", "--set", "training.epocs=3"],
            ["no key 'epocs'", "training.epochs"],
        ),
        (
            ["train", "--config", "bad.yaml"],
            [
                "bad.yaml:4:13 recipe.options.hiden",
                "has no option 'hiden'",
                "Try: recipe.options.hidden",
            ],
        ),
        (
            ["config", "check", "bad.yaml"],
            ["bad.yaml:4:13 recipe.options.hiden", "Try: recipe.options.hidden"],
        ),
        (
            ["train", "--config", "c.yaml", "--run-dir", "x", "--store", "nothing"],
            ["nothing does not exist", "Allowed:"],
        ),
        (["train", "--config", "c.yaml", "--run-dir", "x", "--device", "gpu"], ["gpu", "Try:"]),
        (["train"], ["names no recipe", "Try: stoker config init tabular my.yaml"]),
        (["predict", "run/run.jsonl", "store", "p.parquet"], ["is not a whole checkpoint"]),
        (["predict", "run/best.pt", "store", "p.parquet", "--split", "x"], ["--split is 'x'"]),
        (["export", "none.pt", "int8.pt", "--int8"], ["No such file", "Try: ls"]),
    ],
)
def test_bad_input_ends_with_2_and_three_parts(trained, args, words, monkeypatch):
    monkeypatch.chdir(trained)
    (trained / "bad.yaml").write_text(CONFIG.replace("hidden", "hiden"))
    with pytest.raises(StokerError) as caught:
        app(args, standalone_mode=False)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)
    assert not (trained / "x").exists()
    assert not (trained / "p.parquet").exists()


def test_a_bar_with_rate_loss_wait_and_time_left_on_a_terminal_only(trained):
    ours, terminal = pty.openpty()
    words = ["train", "--config", "c.yaml", "--device", "cpu", "--run-dir", "tty"]
    words += [
        "--set",
        "training.epochs=3",
        "--set",
        "training.batch_size=1",
        "--set",
        "training.read_every=1",
    ]
    environment = {**ENV, "TERM": "xterm-256color", "NO_COLOR": "1"}
    process = warm_stoker.Started(words, trained, environment, tty=os.ttyname(terminal))
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # what a terminal says at its end
        while data := os.read(ours, 1 << 16):
            shown += data
    os.close(ours)
    said = shown.decode(errors="replace")
    assert process.wait() == 0, said[-2000:]
    process.close()
    bar = re.findall(r"epoch \d+/3 .*?samples.*", said)
    assert any(re.search(r"[\d,]+/s", line) for line in bar)
    assert any("left" in line for line in bar)
    assert any(re.search(r"loss [\d.e-]+  waited \d+%", line) for line in bar)
