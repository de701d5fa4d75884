"""Packing on a Dask cluster: the bytes of a local pack, whoever dies in the middle."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import stoker
from cluster_makers import TracedSource
from packing_makers import NumbersSource
from stoker.cli.main import app
from stoker.errors import InputError, StokerError
from stoker.packing import PackOptions, cluster, pack
from stoker.sources.arrays import ArraysSource
from stoker.store.reader import open_store

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")


def start_cluster(num_workers: int = 2) -> distributed.LocalCluster:
    return distributed.LocalCluster(
        n_workers=num_workers,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        silence_logs=50,
    )


@contextlib.contextmanager
def lone_worker(address: str, *prefix: str):
    """A worker process that nobody starts again; `prefix` is what it is started with."""
    command = [sys.executable, "-m", "distributed.cli.dask_worker", address]
    process = subprocess.Popen(
        [*prefix, *command, "--no-nanny", "--no-dashboard", "--nthreads", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        yield
    finally:
        process.kill()
        process.wait(200)


@pytest.fixture(scope="module", autouse=True)
def _forked_workers():
    """Have one process import distributed for all workers, which are its forks."""
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        yield


@pytest.fixture(scope="module")
def address():
    with start_cluster() as running:
        yield running.scheduler_address


@pytest.fixture(scope="module")
def lonely():
    """The address of a scheduler without workers."""
    with start_cluster(0) as running:
        yield running.scheduler_address


@pytest.fixture
def numbers(tmp_path) -> Path:
    file = tmp_path / "numbers.txt"
    file.write_text("source")
    return file


def built(file: Path) -> list[int]:
    log = file.parent / "built.log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def tree(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def pids(file: Path, part: int) -> tuple[int, int]:
    """Wait for `part` to be under way; return its child's and its worker's process id."""
    note = file.parent / f"pids-{part}"
    wait_until(lambda: note.exists() and len(note.read_text().split()) == 2)
    wait_until(lambda: part in built(file))
    child, worker = note.read_text().split()
    return int(child), int(worker)


@contextlib.contextmanager
def killing_the_worker_on(file: Path, part: int):
    """Kill the worker that is on `part`, as soon as it is."""
    killer = threading.Thread(target=lambda: os.kill(pids(file, part)[1], signal.SIGKILL))
    killer.start()
    yield
    killer.join(200)


def wait_until(true, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_cluster_gives_the_bytes_of_a_local_pack_and_relative_paths_work(
    address, numbers, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    source = NumbersSource(Path("numbers.txt"))
    pack(source, Path("here"), PackOptions(jobs=1))
    result = pack(source, Path("there"), PackOptions(cluster=address))
    assert not result.reused
    assert tree(tmp_path / "here") == tree(tmp_path / "there")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_quarantine_on_a_cluster_too(address, tmp_path):
    values = np.random.default_rng(0).normal(size=(1000, 4)).astype("f4")
    values[17, 3] = 1e15
    np.save(tmp_path / "features.npy", values)
    source = ArraysSource((tmp_path / "features.npy",), part_bytes=8000)
    options = PackOptions(jobs=1, on_bad="quarantine")
    pack(source, tmp_path / "here", options)
    result = pack(source, tmp_path / "there", replace(options, jobs=2, cluster=address))
    assert len(result.manifest.shards) == 2
    assert [refusal.line for refusal in result.refused] == [17]
    assert tree(tmp_path / "here") == tree(tmp_path / "there")


@pytest.mark.slow
def test_rows_that_kill_are_found_out_as_in_a_local_pack(address, numbers, tmp_path):
    trouble = ((2, "hang"), (1002, "crash"), (2002, "die-once"))
    source = NumbersSource(numbers, trouble=trouble, row_limit_seconds=0.7)
    options = PackOptions(on_bad="quarantine", bad_budget="20%", cluster=address)
    result = pack(source, tmp_path / "s", options)
    assert [(refusal.line, refusal.reason) for refusal in result.refused] == [
        (2, "took longer than 0.7 s"),
        (1002, "crashed the worker process twice"),
    ]
    with open_store(tmp_path / "s") as store:
        values = store.read_rows("features", 0, store.num_samples)[:, 0].tolist()
    assert values == [0, 1, 3, 4, 1000, 1001, 1003, 1004, 2000, 2001, 2002, 2003, 2004]


def test_an_error_keeps_its_text_names_part_and_worker_and_leaves_what_was_finished(
    address, numbers, tmp_path
):
    source = NumbersSource(numbers, parts=2, trouble=((1000, "raise"),))
    with pytest.raises(RuntimeError, match="this source is broken") as caught:
        pack(source, tmp_path / "s", PackOptions(jobs=1, cluster=address))
    assert "while working on 'part 1'" in caught.value.__notes__
    assert any(note.startswith("on worker tcp://127.0.0.1") for note in caught.value.__notes__)
    assert not (tmp_path / "s").exists()
    pack(NumbersSource(numbers, parts=2), tmp_path / "s", PackOptions(cluster=address))
    assert built(numbers) == [0, 1, 1]


@pytest.mark.slow
def test_a_part_that_dies_outside_any_row_ends_the_pack(address, numbers, tmp_path):
    source = NumbersSource(numbers, parts=1, trouble=((2, "die"),))
    with pytest.raises(StokerError, match="the worker on 'part 0' died again and again"):
        pack(source, tmp_path / "s", PackOptions(cluster=address))


def test_what_a_killed_pack_left_at_work_ends_with_it(address, numbers, tmp_path):
    """The child on part 0 would sleep for ten minutes, and then write into the work folder."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from cluster_makers import TracedSource
from stoker.packing import PackOptions, pack
source = TracedSource(Path({str(numbers)!r}), parts=1, trouble=((2, "hang"),))
pack(source, {str(tmp_path / "s")!r}, PackOptions(cluster={address!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    child, _ = pids(numbers, 0)
    os.kill(child, 0)  # alive
    process.kill()
    process.wait(200)
    wait_until(lambda: not Path(f"/proc/{child}").exists(), 5)
    pack(NumbersSource(numbers, parts=1), tmp_path / "s", PackOptions(jobs=1))
    assert not list(tmp_path.glob("*.partial"))


def test_a_worker_killed_in_the_middle_loses_nothing(address, numbers, tmp_path):
    pack(NumbersSource(numbers), tmp_path / "here", PackOptions(jobs=1))
    (tmp_path / "built.log").unlink()
    source = TracedSource(numbers, trouble=((2, "slow"),))
    with killing_the_worker_on(numbers, 0):
        pack(source, tmp_path / "there", PackOptions(cluster=address))
    assert sorted(built(numbers)) == [0, 0, 1, 2]
    assert tree(tmp_path / "here") == tree(tmp_path / "there")


@pytest.mark.slow
def test_a_part_whose_workers_keep_dying_ends_the_pack_with_its_name(numbers, tmp_path):
    source = TracedSource(numbers, parts=2, trouble=((1002, "slow"),))
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        start_cluster(1) as running,
        killing_the_worker_on(numbers, 1),
        pytest.raises(StokerError, match="died again and again on 'part 1'"),
    ):
        pack(source, tmp_path / "s", PackOptions(cluster=running.scheduler_address))


def test_without_a_worker_left_it_ends_and_the_same_command_goes_on(
    lonely, numbers, tmp_path, monkeypatch
):
    source = TracedSource(numbers, trouble=((1002, "slow"),))
    options = PackOptions(jobs=1, cluster=lonely)
    with lone_worker(lonely):
        cluster.check_cluster(lonely, [])  # waits for the worker
        monkeypatch.setattr(cluster, "PATIENCE_SECONDS", 1.0)
        with (
            killing_the_worker_on(numbers, 1),
            pytest.raises(StokerError, match="all workers are gone") as caught,
        ):
            pack(source, tmp_path / "s", options)
    assert "the same command goes on" in caught.value.fix
    with pytest.raises(InputError, match="has had no worker for 1 s"):
        pack(source, tmp_path / "s", options)
    assert built(numbers) == [0, 1]
    pack(source, tmp_path / "s", PackOptions(jobs=1))
    assert built(numbers) == [0, 1, 1, 2]


# -- before the first part -----------------------------------------------------------------


def test_a_scheduler_that_does_not_answer_is_an_error_within_seconds(
    numbers, tmp_path, monkeypatch
):
    monkeypatch.setattr(cluster, "_CONNECT_SECONDS", 2.0)
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(InputError, match=f"no Dask scheduler answers at '{nobody}'") as caught:
            pack(NumbersSource(numbers), tmp_path / "s", PackOptions(cluster=nobody))
        assert time.monotonic() - began < 60
    assert "dask scheduler, then dask worker" in caught.value.fix
    assert not list(tmp_path.glob("s*"))
    for words in ("nonsense", "http://127.0.0.1:1", "tcp://127.0.0.1"):
        with pytest.raises(InputError, match=f"answers at '{words}': it is no address of one"):
            pack(NumbersSource(numbers), tmp_path / "s", PackOptions(cluster=words))
    with pytest.raises(InputError, match="no Dask scheduler answers at 'carrier-pigeon://home'"):
        pack(NumbersSource(numbers), tmp_path / "s", PackOptions(cluster="carrier-pigeon://home"))


def test_other_versions_on_workers_are_refused(address, numbers, tmp_path, monkeypatch):
    monkeypatch.setattr(stoker, "__version__", "9.9.9")
    match = r"worker tcp://127\.0\.0\.1:\d+ on \S+ has stoker 0\.1\.0 on Python"
    with pytest.raises(InputError, match=match) as caught:
        pack(NumbersSource(numbers), tmp_path / "s", PackOptions(cluster=address))
    assert "in a checkout of stoker 9.9.9" in caught.value.fix


def test_a_worker_of_another_version_that_comes_later_refuses_its_task(address):
    task = cluster.Task(b"", None, None, "", "", "9.9.9")
    with distributed.Client(address) as client, pytest.raises(InputError, match=r"stoker 9\.9\.9"):
        client.submit(cluster.build_on_worker, task).result(timeout=200)


def test_a_worker_that_does_not_see_an_input_is_named(address, numbers, tmp_path, monkeypatch):
    hidden = tmp_path / "only-here.txt"
    with pytest.raises(InputError, match=r"worker tcp://\S+ on \S+ does not see .*only-here.txt"):
        cluster.check_cluster(address, [numbers, hidden])
    assert "2 workers with 2 threads" in cluster.check_cluster(address, [numbers])


def test_a_worker_that_does_not_share_the_work_folder_is_named(
    lonely, numbers, tmp_path, monkeypatch
):
    """A real worker, in a mount namespace of its own, where OUT is another file system."""
    monkeypatch.setattr(cluster, "_VISIBLE_SECONDS", 0.3)
    out = tmp_path / "mounted"
    out.mkdir()
    prefix = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {out} && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces for this user")
    match = r"worker tcp://\S+ on \S+ does not share the folder"
    with lone_worker(lonely, *prefix), pytest.raises(InputError, match=match):
        pack(NumbersSource(numbers), out / "s", PackOptions(cluster=lonely))


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ({"error": "Permission denied"}, "Permission denied"),
        ({"read": "of somebody else"}, "another file stands there"),
        ({"read": "0123abcd"}, "what it writes does not appear here"),
    ],
)
def test_what_can_be_wrong_with_a_shared_folder(tmp_path, monkeypatch, seen, problem):
    monkeypatch.setattr(cluster, "_VISIBLE_SECONDS", 0.2)
    alive = tmp_path / ".alive.0123abcd.tmp"
    alive.write_text("0123abcd")
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    echo = str(tmp_path / ".echo-far-1.0123abcd.tmp")
    fact = {"host": "far", "stoker": stoker.__version__, "python": python, "echo": echo}
    with pytest.raises(InputError, match=f"worker tcp://far:1 on far .*{problem}"):
        cluster._check_shared({"tcp://far:1": fact | seen}, alive)


def test_a_worker_cannot_make_the_packer_remove_a_file_that_it_names(tmp_path):
    work, thesis = tmp_path / "work", tmp_path / "thesis.tex"
    work.mkdir()
    thesis.write_text("mine")
    alive = work / ".alive.0123abcd.tmp"
    alive.write_text("0123abcd")
    (work / "thesis.tex").write_text("mine")
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    fact = {"host": "far", "stoker": stoker.__version__, "python": python, "read": "0123abcd"}
    cluster._check_shared({"tcp://far:1": fact | {"echo": str(thesis)}}, alive)
    assert thesis.exists()
    assert (work / "thesis.tex").exists()


def test_the_command_line(address, tmp_path):
    np.save(tmp_path / "features.npy", np.ones((10, 2), "f4") * np.arange(2))
    words = ["pack", "arrays", str(tmp_path / "features.npy"), str(tmp_path / "s")]
    done = CliRunner().invoke(app, [*words, "--cluster", address])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "s" / "store.json").exists()


@pytest.mark.parametrize("kind", ["arrays", "table", "images", "segmentation", "bars", "massspec"])
def test_every_kind_can_be_packed_on_a_cluster(kind):
    assert "--cluster" in CliRunner().invoke(app, ["pack", kind, "--help"]).output


def test_the_page_runs_and_its_messages_are_those_of_the_code(address, tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "cluster.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    np.save("features.npy", np.arange(20, dtype="f4").reshape(10, 2))
    np.save("targets.npy", np.arange(10))
    example = example.replace("tcp://10.0.0.1:8786", address).replace("/shared", str(tmp_path))
    exec(compile(example, "docs/cluster.md", "exec"), {})
    with open_store(tmp_path / "store") as store:
        assert store.num_samples == 10
    code = Path(cluster.__file__).read_text()
    for words in (
        "no Dask scheduler answers at",
        "has had no worker for",
        "does not see",
        "does not share the folder",
        "died again and again on",
        "the cluster cannot go on:",
        "all workers are gone",
    ):
        assert words in page
        assert words in code


def test_a_scheduler_that_goes_is_said_in_our_words():
    lost = cluster._named(
        distributed.client.FutureCancelledError("key", "scheduler-connection-lost")
    )
    assert "the cluster cannot go on: the scheduler is gone" in str(lost)
    assert cluster._named(ValueError("own"), "part 1").__notes__ == ["while working on 'part 1'"]
