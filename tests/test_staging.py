"""The uploader: many small pieces, many threads, errors in between; nothing lost, nothing mixed up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from fake_cuda import FakeCuda, FakeEvent, FakeTarget
from stoker.loader.columns import make_columns
from stoker.loader.staging import Copy, Upload, Uploader, torch_dtype
from stoker.store.arrays import StoredArray
from stoker.store.fields import Dense
from store_makers import write_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = 3000


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return {
        "wide": rng.normal(size=(ROWS, 40)).astype("f4"),
        "narrow": rng.integers(0, 60_000, ROWS, dtype=np.uint16),
    }


@pytest.fixture
def columns(tmp_path, data):
    halves = [slice(0, 1100), slice(1100, ROWS)]
    shards = [{name: Dense(values[half]) for name, values in data.items()} for half in halves]
    store = write_store(tmp_path / "store", shards)
    with store:
        yield make_columns(store, list(data), np.arange(ROWS))


def make_targets(columns, device):
    values = [column.values[0] for column in columns]
    targets = [
        torch.zeros((ROWS, *value.shape), dtype=torch_dtype(value.dtype), device=device)
        for value in values
    ]
    if device == "cuda":
        torch.cuda.synchronize()  # the uploader's streams do not wait for the zeros
    return targets


def copies_of(columns, targets, low, high):
    return [
        Copy(column.values[0], low, high, target[low:high])
        for column, target in zip(columns, targets, strict=True)
    ]


def assert_equal(targets, columns, data):
    for target, column in zip(targets, columns, strict=True):
        values = data[column.field]
        assert np.array_equal(target.cpu().numpy().view(values.dtype), values), column.field


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [1, 12])
def test_many_uploads_of_many_pieces_arrive_whole(columns, data, device, threads):
    targets = make_targets(columns, device)
    uploader = Uploader(torch.device(device), threads, slab_bytes=1024)
    try:
        for _ in range(3):
            edges = [0, 1, 700, 1100, 1101, 2500, ROWS]
            uploads = [
                uploader.begin(copies_of(columns, targets, low, high))
                for low, high in pairwise(edges)
            ]
            for upload in uploads:
                event = upload.wait()
                assert (event is None) == (device == "cpu")
                if event is not None:
                    event.synchronize()
            assert_equal(targets, columns, data)
            for target in targets:
                target.zero_()
            if device == "cuda":
                torch.cuda.synchronize()
    finally:
        uploader.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_read_ends_its_upload_and_no_other(columns, data, device, monkeypatch):
    """More failures than there are slabs: each must come back."""
    read = StoredArray.read_into
    broken = [True]

    def fail_sometimes(self, start, stop, out):
        if broken[0] and start % 3 == 0:
            raise OSError(f"rows {start} to {stop} are gone")
        read(self, start, stop, out)

    monkeypatch.setattr(StoredArray, "read_into", fail_sometimes)
    targets = make_targets(columns, device)
    uploader = Uploader(torch.device(device), 4, slab_bytes=512, num_slabs=5)
    try:
        for _ in range(10):
            with pytest.raises(OSError, match="are gone"):
                uploader.upload(copies_of(columns, targets, 0, ROWS))
        broken[0] = False
        uploader.upload(copies_of(columns, targets, 0, ROWS))
        if device == "cuda":
            torch.cuda.synchronize()
        assert_equal(targets, columns, data)
    finally:
        uploader.close()


@pytest.mark.gpu
def test_a_failed_copy_ends_its_upload_and_its_slab_comes_back(columns, data):
    targets = make_targets(columns, "cuda")
    uploader = Uploader(torch.device("cuda"), 4, slab_bytes=512, num_slabs=5)
    short = [Copy(columns[0].values[0], 0, ROWS, targets[0][:7])]  # no room for the rest
    try:
        for _ in range(10):
            with pytest.raises(RuntimeError):
                uploader.upload(short)
        uploader.upload(copies_of(columns, targets, 0, ROWS))
        torch.cuda.synchronize()
        assert_equal(targets, columns, data)
    finally:
        uploader.close()


# -- the same threads, with streams that are threads ------------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    fake = FakeCuda(monkeypatch)
    yield fake
    fake.end()


def fake_copies(columns, targets, fake, low, high):
    return [
        Copy(copy.values, copy.start, copy.stop, FakeTarget(copy.target, fake))
        for copy in copies_of(columns, targets, low, high)
    ]


def assert_all_slabs_are_back(uploader):
    assert not uploader._ready
    assert uploader._slabs.qsize() == uploader._num_slabs


@pytest.mark.parametrize(
    ("threads", "slab_bytes", "num_slabs"), [(1, 1024, None), (8, 512, None), (8, 100, 3)]
)
def test_copies_queued_for_others_arrive_in_their_place(
    columns, data, fake, threads, slab_bytes, num_slabs
):
    uploader = fake.make_uploader(threads, slab_bytes, num_slabs)
    for _ in range(3):
        targets = make_targets(columns, "cpu")
        edges = [0, 400, 1100, 1101, ROWS]
        uploads = [
            uploader.begin(fake_copies(columns, targets, fake, low, high))
            for low, high in pairwise(edges)
        ]
        for upload in uploads:
            upload.wait().synchronize()
        assert_equal(targets, columns, data)
        assert_all_slabs_are_back(uploader)
    uploader.close()


def test_an_upload_that_waits_for_its_target_does_not_hold_up_the_one_before_it(
    columns, data, fake
):
    uploader = fake.make_uploader(4, 1024)
    first, second = make_targets(columns, "cpu"), make_targets(columns, "cpu")
    in_use = FakeEvent()
    in_use._reached.clear()
    going = uploader.begin(fake_copies(columns, first, fake, 0, ROWS))
    waiting = uploader.begin(fake_copies(columns, second, fake, 0, ROWS), wait_for=in_use)
    going.wait().synchronize()
    assert_equal(first, columns, data)
    assert all(not target.any() for target in second), "copied into memory that is still in use"
    in_use._reached.set()
    waiting.wait().synchronize()
    assert_equal(second, columns, data)
    uploader.close()


def test_a_small_first_upload_does_not_keep_the_next_ones_slow(columns, data, fake):
    uploader = fake.make_uploader(4, 1024)
    targets = make_targets(columns, "cpu")
    uploader.upload(fake_copies(columns, targets, fake, 0, 1)).synchronize()
    assert uploader._slabs.qsize() == 2  # a piece of each column
    uploader.upload(fake_copies(columns, targets, fake, 0, ROWS)).synchronize()
    assert_all_slabs_are_back(uploader)
    assert_equal(targets, columns, data)
    uploader.close()


def test_refused_copies_end_their_uploads_and_no_other(columns, data, fake):
    uploader = fake.make_uploader(8, 512)
    for _ in range(5):
        fake.share_of_failing_copies = 0.05
        with pytest.raises(RuntimeError, match="refused"):
            uploader.upload(fake_copies(columns, make_targets(columns, "cpu"), fake, 0, ROWS))
        assert_all_slabs_are_back(uploader)
    fake.share_of_failing_copies = 0.0
    targets = make_targets(columns, "cpu")
    uploader.upload(fake_copies(columns, targets, fake, 0, ROWS)).synchronize()
    assert_equal(targets, columns, data)
    uploader.close()


def test_stopped_in_the_middle_and_begun_again(columns, data, fake):
    uploader = fake.make_uploader(8, 512)
    for _ in range(5):
        upload = uploader.begin(fake_copies(columns, make_targets(columns, "cpu"), fake, 0, ROWS))
        uploader.stop()
        if upload.error is not None:
            with pytest.raises(InterruptedError):
                upload.wait()
        uploader.stop(False)
    targets = make_targets(columns, "cpu")
    uploader.upload(fake_copies(columns, targets, fake, 0, ROWS)).synchronize()
    assert_equal(targets, columns, data)
    assert_all_slabs_are_back(uploader)
    uploader.close()


@pytest.mark.parametrize("what", ["the last event", "the callback"])
def test_what_goes_wrong_at_the_very_end_is_raised_not_waited_for(columns, fake, what):
    uploader = fake.make_uploader(4, 1024)

    def end(_upload) -> None:
        if what == "the callback":
            raise RuntimeError("CUDA error: in the callback")

    real = Upload._finish

    def finish(self):
        FakeEvent.fail = what == "the last event"
        try:
            real(self)
        finally:
            FakeEvent.fail = False

    targets = make_targets(columns, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Upload, "_finish", finish)
        upload = uploader.begin(fake_copies(columns, targets, fake, 0, ROWS), when_done=end)
        assert upload._finished.wait(60), "waits forever"
        with pytest.raises(RuntimeError, match="CUDA error"):
            upload.wait()
    assert_all_slabs_are_back(uploader)
    uploader.close()


def test_an_upload_that_finds_no_threads_any_more_ends_and_can_be_stopped(columns):
    """As at the end of the process, when tasks are refused and a feeder still wants its next chunk."""
    uploader = Uploader(torch.device("cpu"), 2, 256)
    uploader._pool.shutdown()
    told = []
    copies = copies_of(columns, make_targets(columns, torch.device("cpu")), 0, ROWS)
    upload = uploader.begin(copies, when_done=told.append)
    assert told == [upload]
    with pytest.raises(RuntimeError, match="cannot schedule"):
        upload.wait()
    uploader.stop()
    uploader.close()
