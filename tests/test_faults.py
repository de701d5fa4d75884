"""The harness of faults judges rightly, and what it found in stoker stays mended."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import StokerError, StoreError
from stoker.sources.fingerprint import _describe
from stoker.store.fields import Dense
from stoker.store.reader import open_store
from stoker.train.checkpoint_file import read_description
from store_makers import write_store

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks/results").glob("faults-*.json"))


@pytest.fixture(scope="module")
def faults():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import faults

        yield faults
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_a_shard_is_refused_and_not_waited_for(tmp_path):
    write_store(tmp_path / "s", [{"x": Dense(np.arange(40, dtype="f4"))}]).close()
    (shard,) = (tmp_path / "s").glob("*.h5")
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(StoreError, match=shard.name), open_store(tmp_path / "s") as store:
        store.read_rows("x", 0, 40)


def test_outcomes_are_told_apart(faults, tmp_path):
    def judged(**answer):
        return faults.judged(answer, tmp_path)["outcome"]

    whole = {"lost": 0, "repeated": 0, "changed": 0}
    assert judged(**whole) == "survived"
    assert judged(**whole | {"lost": 1}) == judged(**whole | {"changed": 1}) == "wrong"
    assert judged(error="CorruptError: shard-00000.h5: block 3 differs") == "named"
    assert judged(error="OSError: file signature not found") == "error"
    error = ValueError("once")
    error.__cause__ = error
    assert faults.texts_of(error) == "ValueError: once\n"


@pytest.mark.timeout(120)
def test_cases_run_in_forks_and_a_hang_ends_at_its_limit(faults, tmp_path):
    faults.make_world(tmp_path)
    cases = {case[1:3]: case for case in faults.all_cases(0)}
    assert len({(phase, fault) for phase, fault, *_ in faults.all_cases(0)}) >= 40
    flipped = cases["a bit of the values flipped", "stoker store"]
    assert faults.run_case(flipped, tmp_path, 60)["outcome"] == "named"
    assert faults.run_case(cases["missing", "h5py loop"], tmp_path, 60)["outcome"] == "named"
    asleep = ("load", "sleep", "way", lambda folder: faults.time.sleep(60))
    assert faults.run_case(asleep, tmp_path, 0.5)["outcome"] == "hung"
    dead = ("load", "dies", "way", lambda folder: os.kill(os.getpid(), 9))
    assert faults.run_case(dead, tmp_path, 30)["outcome"] == "crashed"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_table_of_the_page_is_that_of_the_file(faults, path):
    result = json.loads(path.read_text("utf-8"))["result"]
    assert result["summary"] == faults.summary(result["cases"])
    assert faults.table(result) in (ROOT / "docs/faults.md").read_text("utf-8")


def test_a_file_that_opens_and_cannot_be_read_is_named(tmp_path):
    """As on a bad sector: the system says "Input/output error", and not of which file."""
    broken = tmp_path / "step-000000001.pt"
    broken.symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match="Input/output error") as raised, broken.open("rb") as file:
        file.read(1)
    assert raised.value.filename is None
    with pytest.raises(StokerError, match=r"step-000000001\.pt: Input/output error"):
        _describe(broken, {})
    with pytest.raises(StoreError, match=r"step-000000001\.pt"):
        read_description(broken)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_folder_or_a_pipe_called_store_json_is_no_manifest(tmp_path, make):
    make(tmp_path / "store.json")
    with pytest.raises(StoreError, match="not a finished store"):
        open_store(tmp_path)


@pytest.mark.timeout(120)
def test_what_flips_before_the_checksum_is_found_and_what_flips_behind_it_is_not(faults, tmp_path):
    """The promise of docs/faults.md, as it is: host memory behind the checksum is not watched."""
    faults.make_world(tmp_path)
    cases = {case[1:3]: case for case in faults.all_cases(0)}
    outcomes = [
        faults.run_case(cases[fault, "stoker store"], tmp_path, 60)["outcome"]
        for fault in (*faults.BUFFERS, "a page changed in the page cache, times set back")
    ]
    assert outcomes == ["named", "wrong", "named"]
