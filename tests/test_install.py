"""The constraints and extras resolve on a machine that has nothing but the public package index."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def resolve(folder: Path, *wanted: str, seconds: int = 250) -> dict[str, str]:
    """Return what pip would install, by name; skips where no index answers."""
    report = folder / "report.json"
    plain = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed",
         "--report", str(report), "--constraint", str(ROOT / "constraints.txt"), *wanted],
        env=plain | {"PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True, check=False,
        timeout=seconds,
    )  # fmt: skip
    if re.search(
        r"NewConnectionError|Temporary failure|ConnectTimeout|No matching.*pip", done.stderr
    ):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(report.read_text())["install"]
    return {entry["metadata"]["name"].lower(): entry["metadata"]["version"] for entry in found}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extra", ["", "[dev]", "[all]"])
def test_the_package_resolves_without_local_wheels(tmp_path, extra):
    found = resolve(tmp_path, f"{ROOT}{extra}", seconds=800)
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    assert found["torch"] == pins["torch"]


@pytest.mark.slow
def test_no_pin_contradicts_what_torch_itself_needs(tmp_path):
    """A pin of another triton than torch's cannot be resolved: pip ends with ResolutionImpossible."""
    found = resolve(tmp_path, "torch==2.13.0")
    assert "torch" in found


def test_the_extra_all_is_every_extra_of_the_product():
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(re.search(r"\[(.*)\]", everything)[1].split(","))
    assert named == set(extras) - {"all", "dev", "docs", "bench"}
