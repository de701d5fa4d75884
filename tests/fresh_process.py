"""Tests that need a process of their own: others leave memory on the GPU, in pools of graphs that live on."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

_ALONE = "STOKER_TEST_ALONE"


def in_a_fresh_process(test):
    """Run a test in a pytest of its own; its output is shown when it fails."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        if os.environ.get(_ALONE):
            test(*args, **kwargs)
            return
        node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        passed_on = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", node],
            env={**passed_on, _ALONE: "1"},
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
        assert "1 passed" in done.stdout

    return run
