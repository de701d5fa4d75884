"""Every example runs, quickly, on a machine without a GPU, and stays short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
SAYS = {
    "keep_your_dataloader.py": r"epoch 1: 20 batches on (cpu|cuda:0), last loss \d",
    "own_hdf5.py": r"24 batches, 3000 samples, last loss \d",
    "windows.py": r"\d+ batches from [\d,]+ bytes; last loss 0\.\d",
}


def test_every_example_is_listed_here():
    assert sorted(path.name for path in FOLDER.glob("*.py")) == sorted(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example_runs_and_says_what_it_did(name, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FOLDER / name)],
        capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[name], done.stdout), done.stdout
    assert done.stderr == ""
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")]
    assert left == [], "an example leaves nothing behind; torch's own cache folder does not count"


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example_is_under_40_lines(name):
    assert len((FOLDER / name).read_text().splitlines()) < 40
