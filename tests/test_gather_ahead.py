"""Small fields are gathered for many batches at once: the same batches, each of them the caller's own."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.loader import gather
from stoker.loader.loader import Loader
from stoker.store.fields import Dense
from store_makers import write_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)
NUM_SAMPLES = 403


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Rows of 12, 2, 4 and 40,000 bytes: the last are too large for batches of more than one."""
    rng = np.random.default_rng(0)
    fields = {
        "features": Dense(rng.normal(size=(NUM_SAMPLES, 3)).astype("f4")),
        "codes": Dense(rng.integers(0, 1 << 16, NUM_SAMPLES, dtype=np.uint16)),
        "numbers": Dense(np.arange(NUM_SAMPLES, dtype=np.int32)),
        "large": Dense(rng.normal(size=(NUM_SAMPLES, 10_000)).astype("f4")),
    }
    return write_store(tmp_path_factory.mktemp("s"), [fields])


def shuffled(store, device, batch_size=8, **options):
    return Loader(store, batch_size, device, order="shuffled", **options)


@pytest.fixture
def gathers(monkeypatch):
    """Which fields were gathered, and how many samples of them."""
    seen: list[tuple[str, int]] = []
    take = gather.FieldGather.__call__

    def noted(self, rows):
        seen.append((self.name, len(rows[self.row])))
        return take(self, rows)

    monkeypatch.setattr(gather.FieldGather, "__call__", noted)
    return seen


@on_each_device
@given(
    batch_size=st.integers(1, 60),
    chunk_rows=st.one_of(st.none(), st.integers(60, 300)),
    ahead=st.sampled_from([0, 1 << 10, 1 << 14, gather.AHEAD_BYTES]),
    skipped=st.integers(0, 9),
)
def test_iterating_gives_what_assembling_gives(
    store, device, batch_size, chunk_rows, ahead, skipped
):
    chunk_bytes = chunk_rows and chunk_rows * 40_018
    with (
        pytest.MonkeyPatch.context() as patch,
        shuffled(store, device, batch_size, chunk_bytes=chunk_bytes) as loader,
    ):
        patch.setattr(gather, "AHEAD_BYTES", ahead)
        skipped = min(skipped, len(loader))
        loader.set_epoch(0, skipped)
        want = [loader.assemble(index.indices) for index in loader.index_batches()]
        loader.set_epoch(0, skipped)
        got = list(loader)
        assert len(got) == len(want) == len(loader) - skipped
        for mine, other in zip(got, want, strict=True):
            assert list(mine) == list(other)
            assert mine["numbers"].tolist() == mine.sample_ids.tolist()
            for name, values in mine.items():
                assert torch.equal(values, other[name])


@on_each_device
def test_a_launch_serves_many_batches(store, device, gathers):
    with shuffled(store, device, 16, drop_last=True) as loader:
        assert len(list(loader)) == 25
    if device == "cpu":
        assert gathers.count(("large", 16)) == 25  # 640 kB: one by one
    small = [count for name, count in gathers if name == "features"]
    assert sum(small) == 400
    assert len(small) == 1


@on_each_device
@pytest.mark.parametrize("batch_size", [2, 3, 8])
def test_every_tensor_begins_where_kernels_want_it(store, device, batch_size):
    with shuffled(store, device, batch_size) as loader:
        for batch in loader:
            for values in batch.values():
                assert values.data_ptr() % 16 == 0
                assert values.is_contiguous()
                held = values.untyped_storage().nbytes()
                assert held <= max(gather.RESIDENT_AHEAD_BYTES, values.nbytes)


@on_each_device
def test_a_batch_is_the_callers_own(store, device):
    with shuffled(store, device) as loader:
        batches = iter(loader)
        first, second = next(batches), next(batches)
        kept = first["features"].clone()
        weight = torch.ones(3, device=device, requires_grad=True)
        loss = (first["features"] * weight).sum()
        second["features"].zero_()  # not what the loss was computed from
        loss.backward()
        assert torch.equal(first["features"], kept)
        assert torch.allclose(weight.grad, kept.sum(0))
        third = next(batches)["features"].requires_grad_()
        (third**2).sum().backward()
        assert torch.equal(third.grad, 2 * third.detach())


@on_each_device
def test_an_index_that_is_assembled_again_gives_its_batch_again(store, device):
    with shuffled(store, device) as loader:
        for index in loader.index_batches():
            first = loader.assemble(index)
            want = {name: values.clone() for name, values in first.items()}
            for values in first.values():
                values.view(torch.uint8).zero_()
            again = loader.assemble(index)
            assert all(torch.equal(again[name], want[name]) for name in want)


def test_indices_that_are_taken_out_of_turn_gather_nothing_ahead(store, gathers):
    with shuffled(store, "cpu", drop_last=True) as loader:
        indices = list(loader.index_batches())[::-1]
        for index in indices:
            batch = loader.assemble(index)
            assert batch["numbers"].tolist() == batch.sample_ids.tolist()
    counts = [count for name, count in gathers if name == "numbers"]
    assert sum(count > 8 for count in counts) <= 3  # a block's first batch may be the first of many


def test_threads_may_assemble(store):
    """Each batch is its own, whoever gathers meanwhile."""
    with shuffled(store, "cpu", 2) as loader, ThreadPoolExecutor(4) as pool:
        for _ in range(30):
            for batch in pool.map(loader.assemble, list(loader.index_batches())):
                assert batch["numbers"].tolist() == batch.sample_ids.tolist()


def test_what_was_taken_for_validation_does_not_end_up_in_training(store):
    weight = torch.ones(3, requires_grad=True)
    with shuffled(store, "cpu") as loader:
        batches = iter(loader)
        with torch.inference_mode():
            assert next(batches)["features"].is_inference()
        batch = next(batches)
        assert batch["numbers"].tolist() == batch.sample_ids.tolist()
        (batch["features"] * weight).sum().backward()  # of an inference tensor: RuntimeError


def test_a_closed_loader_holds_nothing(store):
    with shuffled(store, "cpu") as loader:
        next(iter(loader))
        ahead = weakref.ref(loader._assembler._ahead)
        assert ahead() is not None
    assert ahead() is None


@pytest.mark.gpu
def test_another_stream_gets_batches_of_its_own(store):
    with shuffled(store, "cuda") as loader:
        batches = iter(loader)
        held = [next(batches) for _ in range(3)]
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(1e9))  # what the first stream gathered ahead comes after this
        with torch.cuda.stream(side):
            batch = next(batches)
            doubled = batch["numbers"] * 2
            side.synchronize()
            assert doubled.tolist() == (2 * batch.sample_ids).tolist()
        held += batches
        numbers = [batch["numbers"].tolist() for batch in held]
        assert numbers == [batch.sample_ids.tolist() for batch in held]


@pytest.mark.gpu
@pytest.mark.parametrize("taken", [0, 1])
def test_a_captured_graph_gathers_for_itself(store, taken):
    """Its memory holds values when it is replayed, not before, and they are those of the indices by then."""
    with shuffled(store, "cuda") as loader:
        indices = list(loader.index_batches())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for index in indices[:taken]:
                loader.assemble(index)  # gathers ahead, on the stream of the capture
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            out = loader.assemble(indices[1])
        for index in indices:
            batch = loader.assemble(index)
            assert batch["numbers"].tolist() == batch.sample_ids.tolist()
        graph.replay()
        assert out["numbers"].tolist() == out.sample_ids.tolist()
        indices[1].indices[0].copy_(indices[2].indices[0])  # dense fields: one row for all
        graph.replay()
        assert out["numbers"].tolist() == loader.samples[indices[2].planned.positions].tolist()
