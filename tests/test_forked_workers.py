"""Tests that run in forks: each is reported once, also when its worker dies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

import forked_workers

HERE = Path(__file__).parent
FILES = {
    "conftest.py": """
        import pytest
        from forked_workers import pytest_addoption, pytest_runtestloop

        @pytest.fixture(scope="session")
        def whole(tmp_path_factory):
            yield
            tmp_path_factory.getbasetemp().joinpath("undone").touch()
    """,
    "test_dying.py": """
        import os, signal

        def test_before(): pass
        def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
        def test_after(whole): print("still said"); assert 0
        def test_last(whole): pass
    """,
    "test_other.py": """
        import pytest

        def test_one(tmp_path, whole): assert tmp_path.parent.name == "worker-1"
        @pytest.mark.skip(reason="why not")
        def test_two(): pass
    """,
}


def run_in_forks(folder, *words):
    for name, text in FILES.items():
        (folder / name).write_text(re.sub(r"(?m)^ {8}", "", text))
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-c", "/dev/null", "--rootdir", folder, "-p",
         "no:cacheprovider", "-p", "no:xdist", "--basetemp", folder / "made", "--workers", "2", *words, folder],
        env={**variables, "PYTHONPATH": str(HERE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=folder, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_every_test_is_reported_once_and_a_dead_worker_is_replaced(tmp_path):
    code, said = run_in_forks(tmp_path)
    assert code == 1, said
    assert "2 failed, 3 passed, 1 skipped" in said
    assert "a worker ended with -9 in test_dying.py::test_dies" in said
    assert "still said" in said
    assert "why not" in said
    assert {path.parent.name for path in (tmp_path / "made").rglob("undone")} == {
        "worker-0",
        "worker-1",
    }


def test_it_stops_where_it_is_asked_to(tmp_path):
    code, said = run_in_forks(tmp_path, "-x", "test_dying.py", "--deselect", "test_other.py")
    assert code == 1, said
    assert "stopping after 1 failures" in said
    assert "test_after" not in said


@given(st.lists(st.integers(1, 6), max_size=8), st.integers(1, 5), st.data())
def test_every_file_is_run_once_and_nobody_ends_while_another_has_files_left(sizes, number, data):
    waiting = deque([[[share, file] for file in range(size)] for share, size in enumerate(sizes)])
    everything = sorted(file for share in waiting for file in share)
    workers = [SimpleNamespace(files=deque()) for _ in range(number)]
    given_out, busy = [], [*workers]
    while busy:
        worker = data.draw(st.sampled_from(busy))
        file = forked_workers.next_file(worker, workers, waiting)
        if file is None:
            busy.remove(worker)
            assert not waiting
            assert not any(one.files for one in workers)
        else:
            given_out.append(file)
    assert sorted(given_out) == everything


def test_nothing_is_forked_once_cuda_is_in_use(monkeypatch):
    assert forked_workers.forks_can_use_cuda() != torch.cuda.is_initialized()
    said = []
    asked = SimpleNamespace(workers=2, collectonly=False)
    plugins = SimpleNamespace(getplugin=lambda name: SimpleNamespace(write_line=said.append))
    session = SimpleNamespace(
        config=SimpleNamespace(option=asked, pluginmanager=plugins), testsfailed=0
    )
    in_use = SimpleNamespace(cuda=SimpleNamespace(_is_in_bad_fork=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", in_use)
    monkeypatch.setattr(forked_workers, "run", None)
    assert forked_workers.pytest_runtestloop(session) is None
    assert "CUDA" in said[0]


def test_asserts_of_a_fresh_clone_are_rewritten_in_a_fork_and_nothing_is_run(request, tmp_path):
    for name in ("ahead_a", "ahead_b", "ahead_c"):
        text = f"from pathlib import Path\nPath({str(tmp_path)!r}, {name!r}).touch()\nassert 1\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    ends = []
    config = SimpleNamespace(pluginmanager=request.config.pluginmanager, add_cleanup=ends.append)

    def kept() -> list[str]:
        return sorted(
            path.name.partition(".")[0] for path in (tmp_path / "__pycache__").glob("*.pyc")
        )

    forked_workers.write_bytecode_ahead(config, tmp_path)
    ends.pop()()
    assert kept() == ["test_ahead_a", "test_ahead_b", "test_ahead_c"]
    assert not list(tmp_path.glob("ahead_*")), "a module was run"
    forked_workers.write_bytecode_ahead(config, tmp_path)
    assert not ends, "all is there: no fork"
    for path in (tmp_path / "__pycache__").glob("test_ahead_[ac].*"):
        path.unlink()
    forked_workers.write_bytecode_ahead(config, tmp_path)
    ends.pop()()
    assert kept() == ["test_ahead_b", "test_ahead_c"], "it ends where it meets the other process"
