"""`stoker config` and `stoker machine`: one document on stdout, and no heavy import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import stoker
from stoker.cli import config as config_cli
from stoker.cli import machine as machine_cli
from stoker.config import config_schema, load_config, parse_config, resolve
from stoker.errors import ConfigError
from stoker.machine import Gpu, probe

CONFIGS = Path(stoker.__file__).parent / "configs"
BEST = str(CONFIGS / "segmentation_best.yaml")

app = typer.Typer()
app.add_typer(config_cli.app, name="config")
app.command()(machine_cli.machine)


def call(*words: str):
    return CliRunner().invoke(app, list(words))


def test_check_prints_every_setting_with_its_origin():
    result = call("config", "check", BEST)
    assert result.exit_code == 0
    settled = resolve(load_config(BEST))
    lines = result.stdout.splitlines()
    for name in settled.values():
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert settled.reasons[name] in line
    assert any(f"training.batch_size ({BEST}:8:3)" in line for line in lines)
    (rate,) = [line for line in lines if line.startswith("training.lr ")]
    assert rate.split()[1] == "0.0008"
    assert "the recipe's default" in rate


def test_check_names_keys_that_no_job_reads():
    result = call("config", "check", "massspec", "--set", "data.pin_memory=false",
                  "--set", "training.init_gain=0.5")  # fmt: skip
    notes = " ".join(line for line in result.stdout.splitlines() if line.startswith("note: "))
    assert "data.pin_memory: false (--set) has no effect in `stoker train`: batches always" in notes
    assert "training.init_gain (--set): no effect" in notes


def test_check_prints_notes_and_takes_overrides():
    result = call("config", "check", BEST, "--set", "gpu_optimization.batch_size=7")
    assert result.exit_code == 0
    assert "gpu_optimization.batch_size (--set)" in result.stdout
    assert "note: training.batch_size: 32" in result.stdout


def test_check_as_json():
    result = call("config", "check", BEST, "--json", "--set", "training.batch_size=2")
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert document["settings"]["training.batch_size"] == {
        "value": 2,
        "reason": "training.batch_size (--set)",
    }
    assert document["notes"] == []


def test_check_of_a_bad_file(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("training:\n  lr: '8e-4'\ndata: {num_workers: 4-6}\n")
    plain = call("config", "check", str(bad))
    assert isinstance(plain.exception, ConfigError)
    assert plain.stdout == ""
    result = call("config", "check", str(bad), "--json")
    assert result.exit_code == 2
    first, second = json.loads(result.stdout)["problems"]
    assert (first["line"], first["column"], first["key"]) == (2, 3, "training.lr")
    assert first["fix"] == "8e-4"
    assert second["fix"] == "4 or 6"


def test_square_brackets_in_values_survive(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("data: {memory_efficient_mode: {lazy_cache_dir: '[red]x[/red]'}}")
    assert "[red]x[/red]" in call("config", "check", str(file)).stdout


def test_show_round_trips_and_lists_every_key():
    result = call("config", "show", BEST, "--set", "data.batch_size=3")
    assert parse_config(result.stdout).written()["data.batch_size"] == 3
    every = call("config", "show", BEST, "--all")
    assert parse_config(every.stdout) == load_config(BEST)
    assert "# student_distill" not in every.stdout
    assert parse_config(call("config", "show").stdout).written() == {}


def test_show_has_the_defaults_of_the_recipe():
    said = call("config", "show", BEST, "--all").stdout
    assert "  # lr: 0.0008" in said
    assert "  # epochs: 100" in said


def test_schema_is_one_json_document():
    assert json.loads(call("config", "schema").stdout) == config_schema()


def test_machine_as_json_and_as_table(tmp_path):
    document = json.loads(call("machine", "--json", str(tmp_path)).stdout)
    assert document["disk"]["path"] == str(tmp_path)
    assert document["cores_usable"] >= 1
    table = call("machine").stdout
    assert table.startswith("cores")
    assert "None" not in table


def test_machine_table_of_unknowns_says_n_a(monkeypatch, tmp_path):
    import stoker.machine

    bare = probe(tmp_path, root=tmp_path, environ={})
    full = Gpu(1, name="H200", compute_capability=(9, 0), throttle_reasons=(), visible=False)
    from dataclasses import replace

    found = replace(bare, gpus=(Gpu(0), full), cores_quota=2.5, ram_limit_bytes=2**30)
    monkeypatch.setattr(stoker.machine, "probe", lambda *_a, **_k: found)
    table = call("machine").stdout
    assert "None" not in table
    assert "gpu 0" in table
    assert "H200, compute capability 9.0, hidden by CUDA_VISIBLE_DEVICES" in table
    assert "clocks held by: nothing" in table
    assert "clocks held by: n/a" in table
    assert "cgroup quota 2.5" in table
    assert "cgroup limit 1.00 GiB" in table


@pytest.mark.parametrize("module", ["config", "machine"])
def test_importing_the_verbs_stays_light(module):
    code = (
        f"import sys, stoker.cli.{module};"
        "heavy = {'torch', 'pydantic', 'yaml', 'numpy', 'pynvml', 'h5py'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
