"""A disk that does not answer is named, and nothing is ended."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from stoker import stalls
from stoker.loader.loader import Loader
from stoker.packing import PackOptions, pack
from stoker.sources.arrays import ArraysSource
from stoker.stalls import Waiting, find_stalled
from stoker.store.arrays import OpenFile
from stoker.store.fields import Dense
from store_makers import write_store

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def told(monkeypatch):
    """A queue of what the watch says, a moment after a wait begins."""
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(stalls, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(stalls._watch, "_tell", said.put)
    stalls._watch.stop()
    yield said
    stalls._watch.stop()


def test_a_read_is_named_once_and_again_after_ten_times_as_long():
    now = time.monotonic()
    with Waiting("work", is_work=True), Waiting(Path("a.h5")):
        assert find_stalled(now + 29, now) == []
        (found,) = find_stalled(now + 31, now)
        assert found[0] == "a.h5"
        assert found[1] == pytest.approx(31, abs=1)
        assert find_stalled(now + 200, now) == []
        assert [name for name, _ in find_stalled(now + 320, now)] == ["a.h5"]
    assert find_stalled(now + 1e6, now) == []


def test_work_counts_as_waiting_only_while_the_process_is_idle():
    now = time.monotonic()
    with Waiting("a part", is_work=True):
        with Waiting("a.h5"):
            pass
        assert find_stalled(now + 100, busy_at=now + 90) == []
        assert [name for name, _ in find_stalled(now + 121, busy_at=now + 90)] == ["a part"]


def test_a_loader_names_the_shard_that_its_threads_wait_for(tmp_path, monkeypatch, told):
    write_store(tmp_path / "s", [{"x": Dense(np.arange(400, dtype="f4"))}]).close()
    answers, read = threading.Event(), OpenFile._read

    def silent(self, offset, out, dataset):
        answers.wait(200)
        read(self, offset, out, dataset)

    with Loader(tmp_path / "s", 50, "cpu", order="shuffled", data_bytes=800) as loader:
        monkeypatch.setattr(OpenFile, "_read", silent)
        said: list[str] = []
        threading.Thread(target=lambda: (said.append(told.get(timeout=200)), answers.set())).start()
        numbers = np.concatenate([batch["x"].numpy() for batch in loader])
    assert "shard-00000.h5" in said[0]
    assert "still waiting for" in said[0]
    assert sorted(numbers.tolist()) == list(range(400)), "what was waited for comes"


def test_a_pack_names_the_input_that_it_waits_for(tmp_path, monkeypatch, told):
    np.save(tmp_path / "x.npy", np.zeros((40, 3), "f4"))
    build = ArraysSource.build

    def silent(self, part, context):
        said.append(told.get(timeout=200))
        return build(self, part, context)

    said: list[str] = []
    monkeypatch.setattr(ArraysSource, "build", silent)
    source = ArraysSource((tmp_path / "x.npy",))
    pack(source, tmp_path / "out", PackOptions(jobs=1))
    assert "x.npy" in said[0]


def test_forked_children_have_no_watch_and_no_reads_of_their_parents(told):
    stalls.start_watch()
    with Waiting("of the parent"):
        child = os.fork()
        if child == 0:
            os._exit(int(stalls._watch._thread is not None or bool(stalls._waiting)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_warnings_as_errors_do_not_end_the_watch_and_the_process_ends_well():
    code = """
import sys, threading, time, warnings
from stoker import stalls
stalls.WAIT_SECONDS = 0.1
told = threading.Event()
def show(message, *_):
    print(message, flush=True)
    told.set()
warnings.showwarning = show
stalls.start_watch()
with stalls.Waiting("a.h5"):
    told.wait(200)
warnings.simplefilter("error")
with stalls.Waiting("b.h5"):
    time.sleep(0.5)
print(stalls._watch._thread.is_alive())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    first, last = done.stdout.splitlines()
    assert first.startswith("still waiting for a.h5")
    assert last == "True"
    assert done.stderr == ""
