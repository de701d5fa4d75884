"""A loader in a forked process, under interrupts, over other samples; and what it says of itself."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import h5py
import numpy as np
import pytest
import torch

from stoker.compat.basics import PrefetchingDataLoader
from stoker.compat.chunk_loader import ChunkDataLoader
from stoker.errors import InputError, StokerError
from stoker.loader.batch import Batch
from stoker.loader.lanes import plan_store_lanes
from stoker.loader.loader import Loader
from stoker.loader.staging import OnceFlag

ROWS = 400


def write_numbered(folder):
    """Write rows whose targets are their numbers."""
    rng = np.random.default_rng(0)
    path = folder / "rows.h5"
    with h5py.File(path, "w") as file:
        file["features"] = rng.normal(size=(ROWS, 5)).astype("f4")
        file["targets"] = np.arange(ROWS, dtype="i4")
    return path


@pytest.fixture
def path(tmp_path):
    return write_numbered(tmp_path)


def targets_of(loader):
    return [batch["targets"].tolist() for batch in loader]


# -- the end of the process ------------------------------------------------------------------------

LEFT_AT_EXIT = """
import atexit, sys, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # runs last
import torch
from stoker.loader.loader import Loader
from stoker.loader.background import JANITOR

loader = Loader(sys.argv[1], 32, "cpu", order="shuffled", chunk_bytes=1000)
batches = iter(loader)
next(batches)
dropped = Loader(sys.argv[1], 32, "cpu", order="shuffled", chunk_bytes=1000)
next(iter(dropped))
del dropped
# Freed while the interpreter goes down, a tensor aborts the process.
JANITOR.hand_over(lambda: [torch.ones(10) for _ in range(100_000)])
"""


def test_no_thread_is_left_when_the_interpreter_goes_down(path):
    done = subprocess.run(
        [sys.executable, "-c", LEFT_AT_EXIT, str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "['MainThread']"


# -- forks ---------------------------------------------------------------------------------------


def _iterate_in_child(loader, pipe):
    pipe.send(targets_of(loader))


@pytest.mark.filterwarnings(
    "ignore:This process", "ignore:a Loader in a forked"
)  # Python warns of forks beside threads
@pytest.mark.parametrize("chunk_bytes", [None, 1000])
@pytest.mark.parametrize("taken", [1, None])
def test_a_forked_child_can_iterate_what_the_parent_has_iterated(path, chunk_bytes, taken):
    context = multiprocessing.get_context("fork")
    with Loader(path, 32, "cpu", order="shuffled", seed=3, chunk_bytes=chunk_bytes) as loader:
        iterator = iter(loader)
        for _ in range(taken or len(loader)):
            next(iterator)
        if taken is None:
            assert next(iterator, None) is None
        mine, theirs = context.Pipe()
        child = context.Process(target=_iterate_in_child, args=(loader, theirs), daemon=True)
        child.start()
        assert mine.poll(100), "the child hangs"
        seen = mine.recv()
        child.join(60)
        assert child.exitcode == 0
        # A child of an epoch that was left early begins the next one.
        loader.set_epoch(loader.epoch + bool(taken))
        assert seen == targets_of(loader)


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_leaves_the_garbage_of_its_parent_alone():
    """A CUDA event in it cannot be freed after a fork: the child, a DataLoader worker, would abort."""

    class Garbage:
        def __del__(self):
            if os.getpid() != parent:
                os._exit(3)

    parent, held = os.getpid(), Garbage()
    held.myself = held
    gc.disable()
    try:
        del held
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
    finally:
        gc.enable()
    assert os.waitpid(child, 0)[1] == 0
    gc.collect()


@pytest.mark.filterwarnings("ignore:This process", "ignore:a Loader in a forked")
def test_a_forked_child_does_not_wait_for_threads_of_torch_that_stayed_in_the_parent():
    context, before = multiprocessing.get_context("fork"), torch.get_num_threads()
    rows = {"targets": np.arange(512), "features": np.zeros((512, 4096), np.float32)}
    torch.set_num_threads(2)
    try:
        with Loader(rows, 256, "cpu") as loader:
            expected = targets_of(loader)  # gathers large enough for several threads
            mine, theirs = context.Pipe()
            child = context.Process(target=_iterate_in_child, args=(loader, theirs), daemon=True)
            child.start()
            hangs = not mine.poll(100)
            child.kill() if hangs else child.join(60)
            assert not hangs
            assert mine.recv() == expected
    finally:
        torch.set_num_threads(before)


def _go_on_in_child(iterator, pipe):
    try:
        for _ in iterator:
            pass
    except StokerError as error:
        pipe.send(str(error))
    else:
        pipe.send("went on")


@pytest.mark.filterwarnings("ignore:This process", "ignore:a Loader in a forked")
def test_an_iteration_does_not_go_on_in_a_child(path):
    context = multiprocessing.get_context("fork")
    with Loader(path, 8, "cpu", order="shuffled", chunk_bytes=300) as loader:
        iterator = iter(loader)
        next(iterator)
        mine, theirs = context.Pipe()
        child = context.Process(target=_go_on_in_child, args=(iterator, theirs), daemon=True)
        child.start()
        assert mine.poll(100), "the child hangs"
        assert "forked" in mine.recv()
        child.join(60)


# -- interrupts ----------------------------------------------------------------------------------


class InterruptError(Exception):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
def test_an_interrupt_at_any_moment_leaves_a_loader_that_goes_on(path):
    def interrupt(*_):
        raise InterruptError

    before = signal.signal(signal.SIGALRM, interrupt)
    rng = np.random.default_rng(1)
    try:
        with Loader(path, 16, "cpu", order="shuffled", chunk_bytes=1000) as loader:
            for _ in range(60):
                until = time.monotonic() + 1  # Python swallows one that comes in a finalizer
                seconds = float(rng.uniform(1e-4, 6e-3))
                try:
                    signal.setitimer(signal.ITIMER_REAL, seconds)  # may come before this returns
                    while time.monotonic() < until:
                        targets_of(loader)
                except (InterruptError, RuntimeError, KeyError):
                    pass  # Python's own Thread.start can be broken by it: "release unlocked lock", its table
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            loader.set_epoch(1)
            assert sorted(itertools.chain(*targets_of(loader))) == list(range(ROWS))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_flag_that_was_interrupted_while_waited_for_can_still_be_set_and_seen():
    flag = OnceFlag()
    assert not flag.wait(0.01)
    flag._until.acquire(blocking=False)  # as if an interrupt came behind taking it
    threading.Timer(0.05, lambda: setattr(flag, "_is_set", True)).start()
    began = time.monotonic()
    assert flag.wait(60)
    assert time.monotonic() - began < 30


# -- which samples -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_digests_and_states_know_their_samples(path, order):
    one, other = (
        Loader(path, 8, "cpu", order=order, samples=np.arange(low, low + 100)) for low in (0, 100)
    )
    with one, other:
        next(iter(one))
        next(iter(other))
        assert one.order_digest() != other.order_digest()
        with pytest.raises(InputError, match="other samples"):
            other.load_state_dict(one.state_dict())


def test_the_digest_after_an_epoch_is_that_of_the_epoch(path):
    digests = []
    for seed in (1, 2, 1):
        with Loader(path, 16, "cpu", order="shuffled", seed=seed) as loader:
            for _ in loader:
                inside = loader.order_digest()
            digests.append(loader.order_digest())
            assert digests[-1] == inside
            next(iter(loader))
            assert loader.order_digest() != digests[-1]
            loader.set_epoch(1)
            assert loader.order_digest() not in digests, "nothing is taken yet"
    assert digests[0] == digests[2] != digests[1]


def test_states_of_numpy_numbers_are_plain(path):
    with Loader(
        path, np.int64(8), "cpu", order="shuffled", seed=np.int32(3), world_size=np.int64(2)
    ) as loader:
        loader.set_epoch(np.int64(1))
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [batch["targets"].tolist() for batch in loader.remaining_batches()]
        loader.load_state_dict(state)
        assert targets_of(loader) == rest


@pytest.mark.parametrize(
    "change", [{"batch_size": 1.5}, {"batch_size": "a"}, {"seed": 1.5}, {"rank": None}]
)
def test_numbers_that_are_none_are_refused(path, change):
    with pytest.raises(InputError, match=f"(?s){next(iter(change))} is .*whole number"):
        Loader(path, **{"batch_size": 8, "device": "cpu"} | change)


def test_a_damaged_state_is_refused(path):
    with Loader(path, 8, "cpu", order="shuffled", chunk_bytes=1000) as loader:
        next(iter(loader))
        state = loader.state_dict()
        for damage in ({"chunks": [[1], [2, 3]]}, {"batch": True}, {"epoch": "2"}):
            with pytest.raises(InputError):
                loader.load_state_dict(state | damage)


# -- words ---------------------------------------------------------------------------------------


def test_the_loader_says_how_it_shuffles(path):
    with (
        Loader(path, 8, "cpu", order="shuffled") as whole,
        Loader(path, 8, "cpu", order="shuffled", chunk_bytes=1000) as parts,
        Loader(path, 8, "cpu") as straight,
    ):
        assert "full shuffle" in whole.reason
        assert "within chunks" in parts.reason
        assert "sequential" in straight.reason


def test_a_dataset_of_another_length_is_named(tmp_path):
    path = tmp_path / "short.h5"
    with h5py.File(path, "w") as file:
        file["features"], file["targets"] = np.zeros((10, 3), "f4"), np.zeros(9, "f4")
    with pytest.raises(InputError, match="9 rows"):
        ChunkDataLoader(path, 4, device="cpu")
    with pytest.raises(InputError, match="9 rows"):
        Loader(path, 4, "cpu", fields=["features", "targets"])


def test_closed_in_the_middle_of_compressed_data(tmp_path):
    path = tmp_path / "zipped.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("features", data=np.ones((500, 50), "f4"), compression="gzip")
    loader = Loader(path, 16, "cpu", chunk_bytes=2000)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(InputError, match="closed"):
        next(iterator)


def test_lanes_in_chunks_are_refused(path, tmp_path):
    from run_makers import make_store

    store = make_store("forex", tmp_path / "forex")
    lanes = plan_store_lanes(store, num_lanes=4)
    with pytest.raises(InputError, match=r"lanes .* resident"):
        Loader(store, 4, "cpu", order="lanes", lanes=lanes, chunk_bytes=500)


def test_none_is_no_batch():
    loader = PrefetchingDataLoader([1, None, 3])
    assert loader.next_batch() == 1
    with pytest.raises(InputError, match="None"):
        loader.next_batch()


def test_an_ended_lane_holds_no_sample():
    batch = Batch()
    batch.positions, batch._samples = np.array([-1, 1]), np.array([5, 9])
    assert batch.sample_ids.tolist() == [-1, 9]


@pytest.mark.parametrize("chunk_bytes", [None, 256])
def test_a_pickled_loader_goes_on_where_it_stands(tmp_path, chunk_bytes):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(200, dtype=np.float32).reshape(50, 4)
    options = {"order": "shuffled", "seed": 3, "chunk_bytes": chunk_bytes}
    with Loader(tmp_path / "x.h5", 8, "cpu", **options) as loader:
        batches = iter(loader)
        next(batches)
        code = pickle.dumps(loader)
        rest = [batch["x"].tolist() for batch in batches]
    with pickle.loads(code) as other:
        assert [batch["x"].tolist() for batch in other] == rest
    with pytest.raises(InputError, match="closed"):
        pickle.dumps(loader)
