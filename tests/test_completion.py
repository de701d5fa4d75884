"""Words for the shell: completion scripts for bash, zsh and fish, and what they ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import warm_stoker

SCRIPTS = {
    "bash": "complete -o default -F _stoker_completion stoker",
    "zsh": "#compdef stoker",
    "fish": "complete --command stoker",
}
HEAVY = {"torch", "numpy", "h5py", "pyarrow", "joblib"}


def run(*command: str, **env: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", **env},
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def warm(**env: str) -> str:
    done = warm_stoker.stoker(env={**os.environ, "COLUMNS": "200", **env})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(one, marks=pytest.mark.slow) for one in ("zsh", "fish"))]
)
def test_the_script_for_the_shell_that_asks(shell, tmp_path):
    # The shell is recognised by the name of the process that started stoker.
    (tmp_path / shell).symlink_to("/bin/sh")
    asked = f"'{sys.executable}' -m stoker --show-completion; true"
    script = run(str(tmp_path / shell), "-c", asked, SHELL=str(tmp_path / shell))
    assert SCRIPTS[shell] in script
    assert f"_STOKER_COMPLETE=complete_{shell}" in script


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_for_any_shell_by_a_variable(shell):
    script = warm(_STOKER_COMPLETE=f"source_{shell}")
    assert SCRIPTS[shell] in script


def test_it_is_installed_in_the_home_folder_only(tmp_path):
    (tmp_path / "bash").symlink_to("/bin/sh")
    asked = f"'{sys.executable}' -m stoker --install-completion; true"
    said = run(str(tmp_path / "bash"), "-c", asked, HOME=str(tmp_path))
    assert "bash completion installed" in said
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert written - {Path("bash")} == {Path(".bashrc"), Path(".bash_completions/stoker.sh")}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("stoker mig", []),  # old spellings work and are not offered
        ("stoker config mi", ["migrate"]),
        ("stoker export --op", ["--opset"]),
        ("stoker pack se", ["segmentation", "series"]),
    ],
)
def test_bash_gets_the_words_that_fit(words, wanted):
    number = str(words.count(" "))
    found = warm(_STOKER_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=number)
    assert found.split() == wanted


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_get_them_with_help(shell):
    found = warm(
        _STOKER_COMPLETE=f"complete_{shell}",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
        _TYPER_COMPLETE_ARGS="stoker ex",
    )
    assert "export" in found
    assert "ONNX" in found


def test_completing_loads_nothing_heavy():
    check = (
        "import sys\nfrom stoker.cli.main import run\n"
        "try:\n run()\nexcept SystemExit:\n pass\n"
        f"heavy = {HEAVY} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    asked = {"_STOKER_COMPLETE": "complete_bash", "COMP_WORDS": "stoker tr", "COMP_CWORD": "1"}
    assert run(sys.executable, "-c", check, **asked).split() == ["train"]


def test_python_dash_m_is_the_same_command():
    shown = run(sys.executable, "-m", "stoker", "--help")
    assert "Usage: stoker [OPTIONS] COMMAND" in shown
    assert "--install-completion" in shown
    assert run(sys.executable, "-m", "stoker", "--version").startswith("stoker ")
