"""One iteration after another over one loader: left early, taken to the last batch, in a child, at the end."""

from __future__ import annotations

import itertools
import multiprocessing
import time

import pytest
import torch

import warm_stoker
from stoker.compat.chunk_loader import ChunkDataLoader
from stoker.errors import InputError
from stoker.loader.background import JANITOR, Background
from stoker.loader.loader import Loader
from stoker.store.arrays import StoredArray
from test_loader_edges import targets_of, write_numbered

KINDS = {"resident": None, "chunked": 1000}


@pytest.fixture
def path(tmp_path):
    return write_numbered(tmp_path)


def make(path, kind, **options):
    return Loader(path, 8, "cpu", order="shuffled", seed=3, chunk_bytes=KINDS[kind], **options)


@pytest.fixture(params=KINDS)
def loader(request, path):
    with make(path, request.param) as made:
        yield made


@pytest.fixture
def epochs(path):
    with make(path, "resident") as made:
        return [targets_of(made) for _ in range(4)]


@pytest.fixture
def reads(monkeypatch):
    """How many pieces were read."""
    count, read = [0], StoredArray.read_into

    def counted(self, *given):
        count[0] += 1
        read(self, *given)

    monkeypatch.setattr(StoredArray, "read_into", counted)
    return count


# -- the last batch ----------------------------------------------------------------------------------


def test_taking_exactly_all_batches_begins_the_next_epoch(loader):
    seen = []
    for _ in range(3):
        seen.append([batch["targets"].tolist() for _, batch in zip(range(len(loader)), loader)])  # noqa: B905
    assert [len(one) for one in seen] == [len(loader)] * 3
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert [targets_of(loader) for _ in range(3)] == seen


def test_a_place_at_the_end_that_was_set_has_nothing_left(loader):
    state = None
    for _, _ in zip(range(len(loader)), loader):  # noqa: B905
        state = loader.state_dict()
    loader.load_state_dict(state)
    assert targets_of(loader) == []  # as a run that was cut there and goes on
    assert len(targets_of(loader)) == len(loader)


def test_a_loader_does_not_remember_the_chunks_of_epochs_that_are_over(path):
    with make(path, "chunked") as loader:
        remembered = []
        for _ in range(6):
            assert sum(1 for _ in loader) == len(loader)
            remembered.append(len(loader._data._feeder._visits))
        assert loader._data._feeder.num_visits == 7 * remembered[0]
    assert remembered == remembered[:1] * 6  # the next epoch's


def test_an_old_iteration_that_ends_moves_nobody(loader, epochs):
    old = iter(loader)
    for _ in range(len(loader)):
        next(old)
    loader.set_epoch(3)
    assert next(old, None) is None
    assert (loader.epoch, loader.state_dict()["batch"]) == (3, 0)
    assert targets_of(loader) == epochs[3] or loader.tier == "chunked"


# -- left early --------------------------------------------------------------------------------------


def test_an_epoch_left_early_is_not_read_to_its_end(path, reads):
    with make(path, "chunked") as loader:
        whole = len(loader._data.ring.chunks)
        for epoch in range(4):
            loader.set_epoch(epoch)
            for number, _ in enumerate(loader):
                if number == 1:
                    break
    assert reads[0] < 4 * whole  # two columns, so a whole epoch would be 2 * whole for each


@pytest.mark.parametrize("taken", range(1, 50, 5))
def test_an_old_iteration_is_told_and_does_not_wait(path, taken):
    with make(path, "chunked") as loader:
        old = iter(loader)
        for _ in range(taken):
            next(old)
        loader.set_epoch(1)
        next(iter(loader))
        with pytest.raises(InputError, match=r"one iteration at a time|newer one"):
            for _ in old:
                pass


# -- in a child ----------------------------------------------------------------------------------


def _in_child(loader, what, pipe):
    if what == "assemble":
        pipe.send(loader.assemble(torch.arange(4))["targets"].tolist())
    elif what == "shrink":
        loader.shrink(0.5)
        pipe.send(sorted(itertools.chain.from_iterable(targets_of(loader))))
    else:
        pipe.send(loader._load_chunk_to_gpu(0, 4)[1].tolist())


@pytest.mark.filterwarnings(
    "ignore:This process", "ignore:a Loader in a forked"
)  # Python warns of forks beside threads
@pytest.mark.parametrize(
    ("what", "expected"),
    [("assemble", [0, 1, 2, 3]), ("shrink", list(range(400))), ("chunk", [0, 1, 2, 3])],
)
def test_a_forked_child_has_threads_of_its_own(path, what, expected):
    if what == "chunk":
        loader = ChunkDataLoader(path, batch_size=8, device="cpu")
        loader._load_chunk_to_gpu(0, 8)
    else:
        loader = make(path, "resident" if what == "assemble" else "chunked")
        next(iter(loader))
        loader.set_epoch(0)
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(loader, what, theirs), daemon=True)
    child.start()
    try:
        assert mine.poll(100), "the child hangs"
        assert mine.recv() == expected
    finally:
        child.kill()
        child.join()
        loader.close()


def _dropped_in_child(pipe):
    JANITOR.start()
    began = time.monotonic()
    JANITOR.finish(20)
    pipe.send(time.monotonic() - began)


@pytest.mark.filterwarnings("ignore:This process", "ignore:a Loader in a forked")
def test_a_child_does_not_clean_up_for_its_parent():
    JANITOR.start()
    JANITOR.hand_over(lambda: time.sleep(1))
    JANITOR.hand_over(lambda: time.sleep(8))  # waits in the queue when the child is made
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_dropped_in_child, args=(theirs,), daemon=True)
    child.start()
    child.join(60)
    # The sleeper holds this process's janitor up; a new one takes over.
    JANITOR._process = -2
    JANITOR.start()
    assert mine.poll(0)
    assert mine.recv() < 5


# -- the end of the process ----------------------------------------------------------------------

ENDS = """
import sys, time
from stoker.loader.background import Background
from stoker.loader.loader import Loader
from stoker.store.arrays import StoredArray

read, count = StoredArray.read_into, [0]
def slowly(self, *given):
    count[0] += 1
    time.sleep(0.02)
    read(self, *given)
StoredArray.read_into = slowly

def pull():
    time.sleep(1.5)  # longer than a moment
    return 1

background = Background(pull, 1, "slow")
background.take()
loader = Loader(sys.argv[1], 8, "cpu", order="shuffled", chunk_bytes=6000)
loader._data.uploader._slab_bytes = 64
import atexit
atexit.register(lambda: print(count[0]))
for batch in loader:
    raise ValueError("in the first batch")
"""


def test_an_error_ends_the_process_without_reading_what_was_asked_for_ahead(path, tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    done = warm_stoker.shared().run([path], script=script)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "ValueError: in the first batch"
    at_exit = int(done.stdout)
    assert at_exit < 500  # three chunks of 250 rows in pieces of 3: two columns, 500 pieces


def test_a_background_thread_ends_when_told():
    ahead = Background(lambda: time.sleep(0.01), 2, "quick")
    ahead.take()
    ahead.stop()
    assert ahead.join(60)
