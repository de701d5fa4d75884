"""The loader's contract: once each, same everywhere, resumable, within its memory, honest failures."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import time
import weakref
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import CorruptError, InputError, StokerError, StoreError
from stoker.loader import staging
from stoker.loader.gather import window_view
from stoker.loader.lanes import plan_store_lanes
from stoker.loader.loader import Loader
from store_makers import simple_shard, write_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    return write_store(
        tmp_path_factory.mktemp("s"), [simple_shard(rng, n) for n in (37, 0, 50, 13)]
    )


def expected(store, name: str, ids: np.ndarray) -> list[np.ndarray]:
    kind = store.fields[name].kind
    if kind == "dense":
        return list(store.gather(name, ids))
    return [
        store.read_window(name, int(i)) if kind == "series" else store.read_values(name, int(i))
        for i in ids
    ]


def check_batch(store, batch) -> None:
    """Every value of the batch is what the store says of its samples."""
    for name in ("features", "targets", "M1"):
        for got, want in zip(
            batch[name].cpu().numpy(), expected(store, name, batch.sample_ids), strict=True
        ):
            assert got.tobytes() == np.ascontiguousarray(want).tobytes()
    offsets = batch["peaks/offsets"].cpu().numpy()
    values = batch["peaks"].cpu().view(torch.int16).numpy().view(np.uint16)
    assert offsets[-1] == len(values)
    for row, want in enumerate(expected(store, "peaks", batch.sample_ids)):
        assert (values[offsets[row] : offsets[row + 1]] == want).all()


@pytest.mark.parametrize("device", DEVICES)
@given(
    batch_size=st.integers(2, 40),
    chunk_rows=st.one_of(st.none(), st.integers(1, 120)),
    order=st.sampled_from(["sequential", "shuffled", "time"]),
    seed=st.integers(0, 5),
    world=st.integers(1, 3),
    subset=st.booleans(),
)
def test_every_sample_once_per_epoch_with_the_right_values(
    store, device, batch_size, chunk_rows, order, seed, world, subset
):
    samples = (
        np.flatnonzero(np.random.default_rng(seed).random(100) < 0.7) if subset else np.arange(100)
    )
    seen = []
    for rank in range(world):
        options = {
            "order": order,
            "seed": seed,
            "rank": rank,
            "world_size": world,
            "samples": samples,
        }
        with Loader(
            store, batch_size, device, chunk_bytes=chunk_rows and chunk_rows * 300, **options
        ) as loader:
            batches = list(loader)
            assert len(batches) == len(loader)
            for batch in batches:
                check_batch(store, batch)
                seen.extend(batch.sample_ids.tolist())
            assert loader.epoch == 1
    assert sorted(seen) == samples.tolist()
    if order in ("sequential", "time"):
        assert seen == samples.tolist()


@pytest.mark.parametrize("device", DEVICES)
@given(
    batch_size=st.integers(1, 30),
    chunked=st.booleans(),
    order=st.sampled_from(["sequential", "shuffled"]),
    share=st.floats(0, 1),
)
def test_a_resumed_epoch_is_the_unbroken_one(store, device, batch_size, chunked, order, share):
    def make() -> Loader:
        return Loader(
            store, batch_size, device, order=order, seed=3, chunk_bytes=9000 if chunked else None
        )

    with make() as loader:
        loader.set_epoch(2)
        whole = [batch.sample_ids.tolist() for batch in loader]
    stop = int(share * len(whole))
    with make() as first:
        first.set_epoch(2)
        iterator = iter(first)
        begun = [next(iterator).sample_ids.tolist() for _ in range(stop)]
        state = first.state_dict()
        digest = first.order_digest()
    with make() as second:
        second.load_state_dict(state)
        assert second.order_digest() == digest
        rest = []
        for batch in second:
            check_batch(store, batch)
            rest.append(batch.sample_ids.tolist())
        assert second.epoch == 3
    assert begun + rest == whole


def test_epochs_differ_and_repeat_from_seed_and_epoch(store):
    with Loader(store, 10, "cpu", order="shuffled", seed=1) as loader:
        first = [batch.sample_ids.tolist() for batch in loader]
        second = [batch.sample_ids.tolist() for batch in loader]
        loader.set_epoch(0)
        again = [batch.sample_ids.tolist() for batch in loader]
    assert first == again
    assert first != second


def test_the_loader_agrees_with_torchs_dataloader_sample_for_sample(store):
    values = store.read_rows("features", 0, 100)
    dataset = torch.utils.data.TensorDataset(
        torch.from_numpy(values), torch.from_numpy(store.read_rows("targets", 0, 100))
    )
    theirs = torch.utils.data.DataLoader(dataset, batch_size=32)
    with Loader(store, 32, "cpu", fields=["features", "targets"], chunk_bytes=5000) as ours:
        assert len(ours) == len(theirs)
        for batch, (features, targets) in zip(ours, theirs, strict=True):
            assert torch.equal(batch["features"], features)
            assert torch.equal(batch["targets"], targets)


@pytest.mark.parametrize("device", DEVICES)
def test_assemble_from_positions_equals_the_iterated_batches(store, device):
    with Loader(store, 16, device, order="shuffled") as loader:
        for batch in loader:
            again = loader.assemble(torch.from_numpy(batch.sample_ids).to(loader.device))
            for name in ("features", "targets", "M1", "M1/gap"):
                assert torch.equal(again[name], batch[name])
            total = int(batch["peaks/offsets"][-1])
            assert torch.equal(
                again["peaks"].view(torch.int16)[:total], batch["peaks"].view(torch.int16)
            )
            assert (again["peaks"].view(torch.int16)[total:] == 0).all()
    with (
        Loader(store, 16, device, chunk_bytes=5000) as loader,
        pytest.raises(InputError, match="index_batches"),
    ):
        loader.assemble(torch.zeros(16, dtype=torch.int64))


@pytest.mark.parametrize("device", DEVICES)
def test_held_batches_are_never_overwritten(store, device):
    with Loader(store, 7, device, chunk_bytes=3000) as loader:
        held = list(loader) + list(loader)
        for batch in held:
            check_batch(store, batch)


def test_device_memory_stays_within_slots_of_chunks(store):
    with Loader(store, 4, "cpu", fields=["features"], chunk_bytes=140 * 10) as loader:
        assert loader.tier == "chunked"
        list(loader)
        assert loader.device_bytes == 3 * 10 * 140


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_streamed_batches_are_the_same_and_keep_no_data_on_the_device(store, device, order):
    with Loader(store, 16, device, order=order) as resident:
        plan = dataclasses.replace(resident.plan, tier="streamed", chunk_rows=None, num_slots=0)
        with Loader(store, 16, device, order=order, plan=plan) as streamed:
            assert streamed.tier == "streamed"
            for ours, theirs in zip(streamed, resident, strict=True):
                check_batch(store, ours)
                assert ours["features"].device.type == device
                assert ours.sample_ids.tolist() == theirs.sample_ids.tolist()
            assert streamed.device_bytes == 0
            iterator = iter(streamed)
            next(iterator)
            assert streamed.state_dict()["batch"] == 1  # the consumer's place, not the prefetcher's
            assert streamed.epoch == 1


def test_lanes_continue_row_by_row_and_reset_where_they_must(tmp_path):
    rng = np.random.default_rng(0)
    store = write_store(tmp_path / "s", [simple_shard(rng, 200), simple_shard(rng, 130)])
    lanes = plan_store_lanes(store, num_lanes=3, fields=["M1"])
    with Loader(store, 3, "cpu", order="lanes", lanes=lanes, fields=["M1", "targets"]) as loader:
        ends = np.concatenate([store.read_series("M1", "ends", number) for number in range(2)])
        shard = np.repeat([0, 1], [200, 130])
        last: np.ndarray | None = None
        seen: list[int] = []
        for batch in loader:
            ids = batch.sample_ids
            for row in range(3):
                if batch.valid[row] and not batch.reset[row]:
                    assert last is not None
                    assert ends[ids[row]] == ends[last[row]] + 16  # the next 16 bars, none twice
                    assert shard[ids[row]] == shard[last[row]]
                if batch.valid[row]:
                    assert (
                        batch["M1"][row].numpy() == store.read_window("M1", int(ids[row]))
                    ).all()
                    seen.append(int(ids[row]))
            last = ids
        assert batch.step == len(loader) - 1
    assert len(set(seen)) == len(seen) == len(lanes.positions)
    assert set(np.unique(shard[seen])) == {0, 1}


# -- failures ------------------------------------------------------------------------------


def broken_store(tmp_path, at_row: int):
    values = np.random.default_rng(0).normal(size=(2000, 50)).astype("f4")
    from stoker.store.fields import Dense

    write_store(tmp_path / "s", [{"features": Dense(values)}]).close()
    shard = tmp_path / "s" / "shard-00000.h5"
    with h5py.File(shard) as file:
        offset = file["features"].id.get_offset()
    data = bytearray(shard.read_bytes())
    data[offset + at_row * 200] ^= 1
    shard.write_bytes(data)
    return tmp_path / "s"


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_byte_ends_the_epoch_at_its_chunk_with_its_place(tmp_path, device):
    path = broken_store(tmp_path, 1500)
    with Loader(path, 100, device, chunk_bytes=200 * 250) as loader:
        good: list[int] = []
        with pytest.raises(CorruptError, match=r"dataset 'features' fails its checksum") as caught:
            good.extend(batch.step for batch in loader)
        assert 8 <= len(good) <= 15
        if device == "cuda":
            assert any("while loading chunk" in note for note in caught.value.__notes__)


def test_a_shard_truncated_in_the_middle_of_an_epoch_is_named(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["features"] = np.zeros((4000, 50), "f4")
    with Loader(tmp_path / "x.h5", 100, "cpu", chunk_bytes=200 * 200) as loader:
        iterator = iter(loader)
        next(iterator)
        os.truncate(tmp_path / "x.h5", 300_000)
        # Which of the two depends on whether the file ends before or behind the rows that are read next.
        with pytest.raises(StoreError, match=r"x\.h5.*( ends at byte|was written to while)"):
            list(iterator)


def test_a_feeder_thread_that_dies_is_noticed(store, monkeypatch):
    from stoker.loader import ring

    monkeypatch.setattr(ring.Feeder, "_run", lambda self: None)
    with (
        Loader(store, 10, "cpu", chunk_bytes=3000) as loader,
        pytest.raises(StokerError, match="feeder thread ended"),
    ):
        next(iter(loader))


def test_an_error_in_the_feeder_keeps_its_traceback(store, monkeypatch):
    from stoker.loader import staging

    def explode(*args):
        raise MemoryError("planted")

    monkeypatch.setattr(staging.Uploader, "_read_into_place", explode)
    with Loader(store, 10, "cpu") as loader:
        began = time.monotonic()
        with pytest.raises(MemoryError, match="planted") as caught:
            next(iter(loader))
        assert time.monotonic() - began < 60, "at once, not when a limit is over"
        assert "explode" in str(caught.traceback[-1])


def test_leaving_in_the_middle_ends_the_threads(store):
    before = set(threading.enumerate())  # loaders of other tests may not be collected yet

    def feeders():
        now = set(threading.enumerate()) - before
        return [thread for thread in now if thread.name == "stoker-feeder"]

    loader = Loader(store, 5, "cpu", chunk_bytes=2000)
    for _ in range(3):
        for batch in loader:
            if batch.step == 2:
                break
        assert feeders()
        loader.set_epoch(0)
    loader.close()
    deadline = time.monotonic() + 60
    while feeders() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not feeders()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch"),
        ({"fields": ["nothing"]}, r"fields \['nothing'\]"),
        ({"fields": "features"}, "fields is 'features'"),
        ({"samples": np.array([1, 3, 2])}, "sample 2 was asked for after 3"),
        ({"samples": np.array([3, 3])}, "sample 3 was asked for after 3"),
        ({"samples": np.array([0, 200])}, "sample 200 was asked of"),
        ({"samples": np.array([-1, 2])}, "sample -1 was asked of"),
        ({"samples": np.array([2**63], np.uint64)}, "sample 9223372036854775808 was asked of"),
        ({"samples": []}, "no samples were asked for"),
        ({"plan": 3}, "plan is 3"),
        ({"num_slots": -1, "chunk_bytes": 1000}, "num_slots is -1"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"order": "random"}, "random"),
    ],
)
def test_wrong_arguments_are_refused(store, options, message):
    with pytest.raises(InputError, match=message):
        Loader(store, **{"batch_size": 4, "device": "cpu", **options})


def test_cuda_without_a_device_is_refused(store):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(InputError, match="torch sees 0 CUDA devices") as caught:
        Loader(store, 4, "cuda")
    assert "device='cpu'" in caught.value.fix


def test_what_is_no_state_is_refused(store):
    with Loader(store, 4, "cpu") as loader, pytest.raises(InputError, match="the state is None"):
        loader.load_state_dict(None)


def test_a_state_of_another_loader_is_refused_with_the_difference(store):
    with Loader(store, 4, "cpu", seed=1) as loader, Loader(store, 4, "cpu", seed=2) as other:
        with pytest.raises(InputError, match="the state has seed 1, this loader has 2"):
            other.load_state_dict(loader.state_dict())
        state = {**loader.state_dict(), "digest": "0"}
        with pytest.raises(InputError, match="order digest"):
            loader.load_state_dict(state)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_bytes", [None, 20_000])
def test_a_captured_gather_replays_with_new_indices(store, chunk_bytes):
    with Loader(
        store, 10, "cuda", order="shuffled", chunk_bytes=chunk_bytes, drop_last=True
    ) as loader:
        static = None
        for index in loader.index_batches():
            if static is None:
                static = index.indices.clone()
                loader.assemble(static)
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    out = loader.assemble(static)
            static.copy_(index.indices)
            graph.replay()
            want = loader.assemble(index.indices)
            for name in ("features", "targets", "M1"):
                assert torch.equal(out[name], want[name])
            ids = loader.samples[index.planned.positions]
            assert (out["features"].cpu().numpy() == store.gather("features", ids)).all()


@pytest.mark.gpu
def test_device_peak_is_the_plans_while_the_consumer_holds_the_last_batch(tmp_path):
    from stoker.store.fields import Dense

    values = np.random.default_rng(0).normal(size=(40_000, 1000)).astype("f4")
    store = write_store(tmp_path / "s", [{"features": Dense(values)}], block_bytes=1 << 20)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    with Loader(store, 100, "cuda", chunk_bytes=20_000_000) as loader:
        held = None
        for batch in loader:
            held = batch
        peak = torch.cuda.max_memory_allocated() - start
        batch_bytes = held["features"].nbytes
        assert loader.device_bytes <= 3 * 20_000_000
        assert peak <= loader.device_bytes + 3 * batch_bytes + (8 << 20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 4, 167])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.int64])
def test_window_views_select_whole_windows(device, width, dtype):
    values = torch.randint(0, 100, (500, width), device=device).to(dtype)
    starts = torch.randint(0, 500 - 37 + 1, (19,), device=device)
    want = torch.stack([values[start : start + 37] for start in starts.tolist()])
    view = window_view(values, 37)
    assert torch.equal(view.index_select(0, starts), want)
    assert view.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    assert window_view(values[:20], 37).shape == (0, 37, width)


def test_an_older_iteration_cannot_go_on_beside_a_newer_one(store):
    with Loader(store, 10, "cpu") as loader:
        older, newer = iter(loader), iter(loader)
        next(older)
        next(newer)
        with pytest.raises(InputError, match="one iteration at a time"):
            next(older)


def test_a_rank_reads_only_its_part_of_a_chunk(store, monkeypatch):
    begin = staging.Uploader.begin
    rows: list[int] = []

    def counting(self, copies, *rest):
        rows.append(sum(copy.stop - copy.start for copy in copies))
        return begin(self, copies, *rest)

    monkeypatch.setattr(staging.Uploader, "begin", counting)
    read = 0
    for rank in range(3):
        rows.clear()
        options = {"fields": ["features"], "chunk_bytes": 3000, "world_size": 3}
        with Loader(store, 4, "cpu", order="shuffled", rank=rank, **options) as loader:
            num_visits = len(loader._progress.get(0).visits())
            assert sum(1 for _ in loader) == len(loader)
        read += sum(rows[:num_visits])  # behind them are the next epoch's
    assert read == store.num_samples


def test_a_closed_loader_leaves_nothing_to_the_garbage_collector(store):
    """CUDA events freed by the collector in a forked DataLoader worker would abort it."""
    gc.collect()
    gc.disable()
    try:
        for order in ("sequential", "shuffled"):
            loader = Loader(store, 10, "cpu", order=order, chunk_bytes=3000)
            list(loader)
            uploads = [weakref.ref(upload) for upload in loader._data.uploader._recent]
            parts = [
                weakref.ref(loader._data.ring),
                weakref.ref(loader._data.uploader),
                weakref.ref(loader),
            ]
            assert uploads
            loader.close()
            del loader
            assert not [ref() for ref in uploads + parts if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
@pytest.mark.parametrize("chunk_bytes", [None, 3000])
def test_a_closed_loader_says_so(store, order, chunk_bytes):
    loader = Loader(store, 10, "cpu", order=order, chunk_bytes=chunk_bytes, fields=["features"])
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(InputError, match="the loader is closed"):
        next(iterator)
    with pytest.raises(InputError, match="the loader is closed"):
        next(iter(loader))


@pytest.mark.parametrize("chunk_bytes", [None, 3000])
def test_a_place_that_is_set_in_the_middle_ends_the_iteration(store, chunk_bytes):
    with Loader(store, 10, "cpu", chunk_bytes=chunk_bytes, fields=["features"]) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        loader.set_epoch(5)
        with pytest.raises(InputError, match="its position was set"):
            next(iterator)
        iterator = iter(loader)
        next(iterator)
        loader.load_state_dict(state)
        with pytest.raises(InputError, match="its position was set"):
            next(iterator)


def test_a_dropped_loader_does_not_wait_for_its_threads(store, monkeypatch):
    """The collector may run in one of them: waiting there would never end."""
    loader = Loader(store, 10, "cpu", order="shuffled", chunk_bytes=3000)
    next(iter(loader))
    here = threading.get_ident()
    ended = threading.Event()
    close = staging.Uploader.close

    def note(self):
        assert threading.get_ident() != here
        close(self)
        ended.set()

    monkeypatch.setattr(staging.Uploader, "close", note)
    del loader
    assert ended.wait(60)


# -- a store that changes ----------------------------------------------------------------------


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
@pytest.mark.parametrize("change", ["replaced", "written to", "gone"])
def test_a_store_that_changes_under_a_running_job_is_noticed(tmp_path, order, change):
    path = tmp_path / "rows.h5"

    def write(to: Path, value: float) -> None:
        with h5py.File(to, "w") as file:
            file["features"] = np.full((400, 4), value, "f4")

    write(path, 1.0)
    with Loader(path, 16, "cpu", order=order, chunk_bytes=1600) as loader:
        assert loader.tier == "chunked"
        assert sum(len(batch["features"]) for batch in loader) == 400
        if change == "replaced":
            write(tmp_path / "new.h5", 2.0)
            (tmp_path / "new.h5").replace(path)
        elif change == "written to":
            with path.open("r+b") as file:
                file.seek(-16, 2)
                file.write(b"\0" * 16)
        else:
            path.unlink()
        with pytest.raises(StoreError, match="has changed since it was opened"):
            next(iter(loader))


def test_what_is_resident_does_not_need_the_store_any_more(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        file["features"] = np.ones((40, 4), "f4")
    with Loader(path, 16, "cpu") as loader:
        assert sum(1 for _ in loader) == 3
        path.unlink()
        assert sum(1 for _ in loader) == 3


@pytest.mark.parametrize("chunk_bytes", [None, 2000])
def test_an_iteration_can_be_watched_and_ended_early(store, chunk_bytes):
    taken: list[int] = []

    def few(batches):
        for number, batch in enumerate(batches):
            if number == 2:
                return
            taken.append(number)
            yield batch

    with Loader(store, 5, "cpu", chunk_bytes=chunk_bytes) as loader:
        plain = [batch.positions.tolist() for batch in loader]
        assert loader.waited_seconds > 0
        loader.on_iteration = few
        for asked in (loader, loader.index_batches()):
            epoch = loader.epoch
            assert len(list(asked)) == 2
            assert loader.epoch == epoch + 1  # the rest is left out, not kept for later
        assert taken == [0, 1, 0, 1]
        loader.on_iteration = None
        assert [batch.positions.tolist() for batch in loader] == plain
