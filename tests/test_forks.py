"""`pytest --forks`: each test once, a file in one process, a crash fails one test and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from forks import FIRST, into_files

TESTS = Path(__file__).parent


def run(folder, files, *words):
    (folder / "conftest.py").write_text("from forks import pytest_addoption, pytest_runtestloop")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--forks",
        "2",
        *words,
    ]
    return subprocess.run(
        [*command, str(folder)], cwd=folder, env={**kept, "PYTHONPATH": str(TESTS)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


ONE_PROCESS = """
import os, pytest
@pytest.fixture(scope="module")
def made(tmp_path_factory):
    yield (os.getpid(), tmp_path_factory.mktemp("made"))
@pytest.mark.parametrize("number", range(20))
def test_each(made, number, tmp_path):
    assert made[0] == os.getpid()
    (made[1] / str(number)).touch(exist_ok=False)
    print("seen here", number)
    assert number != 13
"""


def test_every_test_runs_once_and_a_crash_fails_its_own(tmp_path):
    crash = "import os\ndef test_a(): pass\ndef test_b(): os._exit(5)\ndef test_c(): pass\n"
    files = {"one": ONE_PROCESS, "two": ONE_PROCESS, "crash": crash, "none": ""}
    done = run(tmp_path, files)
    assert done.returncode == 1
    assert "3 failed, 40 passed" in done.stdout, done.stdout
    assert "test_crash.py::test_b" in done.stdout
    assert "the process of this test ended with 5" in done.stdout
    # What a test has printed is its own.
    assert re.findall(r"seen here \d+", done.stdout) == ["seen here 13"] * 2


def test_the_first_failure_ends_all_with_x(tmp_path):
    slow = "import time\ndef test_s(): time.sleep(60)\ndef test_t(): time.sleep(60)\n"
    done = run(tmp_path, {"fails": "def test_f(): assert 0\n", "slow": slow}, "-x")
    assert done.returncode == 1
    assert "1 failed" in done.stdout


def test_long_files_begin_first_and_nothing_is_lost():
    class Item:
        def __init__(self, name):
            self.path = Path(f"{name}.py")

    items = [Item(name) for name in ("test_z", "test_z", FIRST[1], "test_a", FIRST[0], FIRST[0])]
    files = into_files(items)
    assert files == [(4, 6), (2, 3), (0, 2), (3, 4)]


def test_the_files_that_begin_first_exist():
    assert [name for name in FIRST if not (TESTS / f"{name}.py").exists()] == []
