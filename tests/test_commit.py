"""The exchange of a store: killed at any moment, read at any moment, there is one whole store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import warm_stoker
from packing_makers import NumbersSource
from stoker import ownership
from stoker.errors import StokerError, StoreError
from stoker.packing import PackOptions, pack
from stoker.packing.work_folder import work_folder_of
from stoker.store.reader import open_store

ONE = PackOptions(jobs=1)

# Packs `option` into `out`, and kills itself at the N-th line that is run in the code of the commit.
SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from packing_makers import NumbersSource
from stoker import ownership
from stoker.packing import PackOptions, pack, work_folder
if {two_steps}:
    ownership.exchange = lambda one, other: False
files = {{ownership.__file__, work_folder.__file__}}
left, begun = int(sys.argv[1]), [False]
def trace(frame, event, arg):
    global left
    code = frame.f_code
    if code.co_filename not in files:
        return None
    if code.co_name == "commit":
        begun[0] = True
    if event == "line" and begun[0]:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
    return trace
source = NumbersSource(Path({file!r}), option={option!r}, rows={rows})
sys.settrace(trace)
pack(source, Path({out!r}), PackOptions(jobs=1))
sys.settrace(None)
print("lines left", left)
"""


@pytest.fixture
def numbers(tmp_path) -> Path:
    file = tmp_path / "numbers.txt"
    file.write_text("source")
    return file


def option_of(path: Path) -> str:
    """Read the whole store, against its checksums, and return the option it was packed with."""
    with open_store(path) as store:
        assert not store.verify().problems
        rows = store.read_rows("features", 0, store.num_samples)
        assert len(rows) == store.num_samples
        return store.manifest.provenance.options["option"]


def count_lines(numbers: Path, out: Path, two_steps: bool) -> int:
    done = kill_at(10**9, numbers, out, two_steps)
    assert done.returncode == 0, done.stderr
    return 10**9 - int(done.stdout.split()[-1])


def kill_at(line: int, numbers: Path, out: Path, two_steps: bool):
    script = SCRIPT.format(
        tests=str(Path(__file__).parent), file=str(numbers), out=str(out), option="b", rows=7,
        two_steps=two_steps,
    )  # fmt: skip
    path = numbers.with_name("killed.py")
    path.write_text(script)
    return warm_stoker.shared().run([line], script=path)


@pytest.mark.parametrize("two_steps", [False, True], ids=["exchange", "two steps"])
def test_killed_at_moments_of_the_commit_the_newest_good_store_is_there(
    numbers, tmp_path, two_steps
):
    check_kills(numbers, tmp_path, two_steps, every=149)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("two_steps", [False, True], ids=["exchange", "two steps"])
def test_killed_at_every_line_of_the_commit_the_newest_good_store_is_there(
    numbers, tmp_path, two_steps
):
    check_kills(numbers, tmp_path, two_steps, every=1)


def check_kills(numbers: Path, tmp_path: Path, two_steps: bool, every: int) -> None:
    old, out = tmp_path / "old", tmp_path / "s"
    pack(NumbersSource(numbers, option="a"), old, ONE)
    shutil.copytree(old, out)
    lines = count_lines(numbers, out, two_steps)
    assert lines > 100
    seen = set()
    for line in range(1, lines + 1, every):
        for folder in (out, work_folder_of(out)):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(old, out)
        assert kill_at(line, numbers, out, two_steps).returncode == -9
        there = option_of(out)  # a reader finds one of the two, whole
        seen.add(there)
        # The next pack fails: what was there stays.
        with pytest.raises(RuntimeError):
            pack(NumbersSource(numbers, option="c", trouble=((1, "raise"),)), out, ONE)
        assert option_of(out) in {there, "b"}  # a commit in two steps may have been finished
        # The next one succeeds, and leaves nothing else.
        pack(NumbersSource(numbers, option="d"), out, ONE)
        assert option_of(out) == "d"
        assert not work_folder_of(out).exists()
    assert seen == {"a", "b"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("two_steps", [False, True], ids=["exchange", "two steps"])
def test_killed_at_every_system_call_of_the_commit(numbers, tmp_path, two_steps):
    """The same with the kernel's own view: strace kills at the N-th call that changes the disk."""
    calls = "renameat2,rename,renameat,unlink,unlinkat,rmdir,mkdir,fsync,ftruncate,openat,write"
    old, out = tmp_path / "old", tmp_path / "s"
    pack(NumbersSource(numbers, option="a"), old, ONE)
    script = SCRIPT.format(
        tests=str(Path(__file__).parent), file=str(numbers), out=str(out), option="b", rows=7,
        two_steps=two_steps,
    )  # fmt: skip
    plain = script.replace("sys.settrace(trace)", "pass")
    plain = plain.replace("pack(source,", "os.write(2, b'BEGIN')\npack(source,")

    def run(*inject: str):
        for folder in (out, work_folder_of(out)):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(old, out)
        words = ["strace", "-qq", "-o", str(tmp_path / "trace"), "-e", f"trace={calls}", *inject]
        command = [*words, sys.executable, "-B", "-c", plain, "0"]
        return subprocess.run(command, capture_output=True, check=False)

    assert run().returncode == 0
    lines = (tmp_path / "trace").read_text(errors="replace").splitlines()
    names = [line.split("(")[0] for line in lines]
    start = next(n for n, line in enumerate(lines) if "refused.jsonl" in line)
    killed = 0
    for number in range(start, len(lines)):
        name = names[number]
        nth = names[: number + 1].count(name)
        if str(tmp_path) not in lines[number] and name in {"openat", "write"}:
            continue
        done = run("-e", f"inject={name}:signal=KILL:when={nth}")
        killed += done.returncode != 0
        assert option_of(out) in {"a", "b"}
        with pytest.raises(RuntimeError):
            pack(NumbersSource(numbers, option="c", trouble=((1, "raise"),)), out, ONE)
        assert option_of(out) in {"a", "b"}
        pack(NumbersSource(numbers, option="d"), out, ONE)
        assert not work_folder_of(out).exists()
    assert killed > 10


@pytest.mark.parametrize("two_steps", [False, True], ids=["exchange", "two steps"])
def test_readers_meet_one_of_the_two_stores_while_it_is_exchanged(
    numbers, tmp_path, two_steps, monkeypatch
):
    if two_steps:
        monkeypatch.setattr("stoker.ownership.exchange", lambda one, other: False)
    out = tmp_path / "s"
    pack(NumbersSource(numbers, option="0"), out, ONE)
    over = threading.Event()
    problems: list[str] = []
    opened = [0]

    def read() -> None:
        while not over.is_set():
            try:
                with open_store(out, threads=1) as store:
                    rows = store.read_rows("features", 0, store.num_samples)
                    assert len(rows) == store.num_samples
                opened[0] += 1
            except (StokerError, AssertionError) as error:
                problems.append(str(error))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(1, 6):
        pack(NumbersSource(numbers, option=str(number), rows=3 + number % 4), out, ONE)
    over.set()
    for reader in readers:
        reader.join()
    assert not problems, problems[:3]
    assert opened[0] > 5


def test_a_store_that_is_open_goes_on_with_the_bytes_it_was_opened_with(numbers, tmp_path):
    out = tmp_path / "s"
    pack(NumbersSource(numbers, option="a"), out, ONE)
    with open_store(out) as store:
        before = store.read_rows("features", 0, 15)
        pack(NumbersSource(numbers, option="b", rows=4), out, ONE)
        assert (store.read_rows("features", 0, 15) == before).all()
        assert not store.verify().problems
    assert open_store(out).num_samples == 12


def test_a_worker_that_gets_another_store_than_its_parent_says_so(numbers, tmp_path):
    import pickle

    out = tmp_path / "s"
    pack(NumbersSource(numbers, option="a"), out, ONE)
    with open_store(out) as store:
        sent = pickle.dumps(store)
        with pickle.loads(sent) as same:
            assert same.num_samples == 15
        pack(NumbersSource(numbers, option="b"), out, ONE)
        with pytest.raises(StoreError, match="was packed again while a job reads it"):
            pickle.loads(sent)


def test_what_a_pack_left_that_was_killed_behind_its_commit_goes_with_the_next(numbers, tmp_path):
    out = tmp_path / "s"
    with pytest.raises(RuntimeError):
        pack(NumbersSource(numbers, trouble=((1002, "raise"),)), out, ONE)
    shutil.copytree(work_folder_of(out), tmp_path / "left")
    pack(NumbersSource(numbers), out, ONE)
    shutil.copytree(tmp_path / "left", work_folder_of(out))
    assert pack(NumbersSource(numbers), out, ONE).reused
    assert not work_folder_of(out).exists()


# -- parts of other jobs ---------------------------------------------------------------------------


def test_a_part_of_another_job_is_not_believed(numbers, tmp_path):
    """G4: a worker that an old pack left behind writes into the next one's work folder."""
    out = tmp_path / "s"
    a = NumbersSource(numbers, option="a", rows=5)
    pack(a, tmp_path / "a", ONE)
    with pytest.raises(RuntimeError):
        pack(NumbersSource(numbers, option="a", trouble=((1002, "raise"),)), out, ONE)
    (stage_a,) = work_folder_of(out).glob("built-*")
    left_by_a = {path.name: path.read_bytes() for path in stage_a.iterdir()}
    failing = NumbersSource(numbers, option="b", rows=5, trouble=((2002, "raise"),))
    with pytest.raises(RuntimeError):
        pack(failing, out, ONE)
    (stage_b,) = work_folder_of(out).glob("built-*")
    assert stage_b != stage_a
    # Whatever the old worker managed to write: its note, its shard, or both, under B's names.
    for name, content in left_by_a.items():
        (stage_b / name).write_bytes(content)
    (stage_b / "shard-00001.h5").write_bytes(left_by_a["shard-00000.h5"])
    b = NumbersSource(numbers, option="b", rows=5)
    pack(b, out, ONE)
    with open_store(out) as store:
        values = store.read_rows("features", 0, store.num_samples)[:, 0]
    expected = np.concatenate([np.arange(5) + part * 1000 for part in range(3)])
    assert (values == expected).all()
    assert option_of(out) == "b"


def test_a_shard_that_was_exchanged_behind_its_note_is_built_again(numbers, tmp_path):
    out = tmp_path / "s"
    with pytest.raises(RuntimeError):
        pack(NumbersSource(numbers, trouble=((2002, "raise"),)), out, ONE)
    (stage,) = work_folder_of(out).glob("built-*")
    shard = bytearray((stage / "shard-00000.h5").read_bytes())
    other = (stage / "shard-00001.h5").read_bytes()
    assert len(shard) == len(other)
    (stage / "shard-00000.h5").write_bytes(other)
    pack(NumbersSource(numbers), out, ONE)
    with open_store(out) as store:
        assert store.read_rows("features", 0, 5)[:, 0].tolist() == [0, 1, 2, 3, 4]
        assert not store.verify().problems


def test_every_part_carries_the_digest_of_its_job(numbers, tmp_path):
    with pytest.raises(RuntimeError):
        pack(NumbersSource(numbers, trouble=((2002, "raise"),)), tmp_path / "s", ONE)
    (stage,) = work_folder_of(tmp_path / "s").glob("built-*")
    notes = [json.loads(path.read_text()) for path in stage.glob("part-*.json")]
    assert [note["job"] for note in notes] == [stage.name.removeprefix("built-")] * 2


def test_without_an_exchange_the_commit_is_two_renames(tmp_path, monkeypatch):
    """What the kernel says where it has no renameat2, or the disk no exchange."""
    import errno

    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert ownership.exchange(one, other) in {True, False}

    class OldKernel:
        @staticmethod
        def renameat2(*_):
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *_args, **_words: OldKernel)
    for code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        monkeypatch.setattr("ctypes.get_errno", lambda code=code: code)
        assert not ownership.exchange(one, other)
        ownership.move_folder(one, tmp_path / "new")
        ownership.move_folder(tmp_path / "new", one)
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EBUSY)
    with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
        ownership.exchange(one, other)
