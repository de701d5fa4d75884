"""Ordered batches read straight from disk: the same as from the ring, and nobody's memory is reused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import CorruptError
from stoker.loader.loader import Loader
from stoker.loader.straight import StraightReader
from stoker.store.fields import Dense
from store_makers import write_store


def make_store(folder, sizes):
    rng = np.random.default_rng(len(sizes))
    shards = [
        {
            "x": Dense(rng.normal(size=(size, 3, 2)).astype("f4")),
            "y": Dense(rng.integers(0, 60_000, size, dtype=np.uint16)),
            "big_endian": Dense(rng.normal(size=(size, 2)).astype(">f4")),
        }
        for size in sizes
    ]
    return write_store(folder, shards)


def as_lists(batches):
    return [{name: value.tolist() for name, value in batch.items()} for batch in batches]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    batch=st.integers(1, 9),
    block_bytes=st.integers(1, 2000),
    first=st.integers(0, 5),
    skip=st.booleans(),
    world=st.integers(1, 2),
)
def test_equal_to_the_ring(tmp_path_factory, sizes, batch, block_bytes, first, skip, world):
    store = make_store(tmp_path_factory.mktemp("store"), sizes)
    samples = np.arange(min(first, store.num_samples - 1), store.num_samples)
    samples = samples[:: 1 + (skip and len(samples) > 4 * batch * world)]
    if len(samples) <= batch * world or (batch == 1 and len(samples) % world):
        return
    options = {"samples": samples, "world_size": world, "order": "sequential"}
    for rank in range(world):
        with (
            Loader(store, batch, "cpu", chunk_bytes=1, rank=rank, **options) as chunked,
            Loader(store, batch, "cpu", rank=rank, **options) as resident,
        ):
            assert (chunked._straight is not None) == bool((np.diff(samples) == 1).all())
            if chunked._straight is not None:
                chunked._straight._block_bytes = block_bytes
            assert as_lists(chunked) == as_lists(resident)


def test_a_held_batch_is_never_overwritten_and_a_changed_one_changes_nothing_else(tmp_path):
    store = make_store(tmp_path / "store", [64])
    with Loader(store, 4, "cpu", chunk_bytes=1) as loader:
        assert loader._straight is not None
        loader._straight._block_bytes = 500
        held = list(loader)
        copies = as_lists(held)
        for batch in held[::2]:
            batch["x"].fill_(-1)
        again = as_lists(loader)
        assert again == copies
        assert as_lists(held[1::2]) == copies[1::2]


def test_buffers_are_used_again(tmp_path):
    store = make_store(tmp_path / "store", [400])
    with Loader(store, 4, "cpu", chunk_bytes=1) as loader:
        reader = loader._straight
        assert isinstance(reader, StraightReader)
        reader._block_bytes = 500
        places = {batch["x"].untyped_storage().data_ptr() for batch in loader}
        assert len(loader) == 100
        assert len(places) <= 12


def test_a_small_column_is_read_for_many_batches_and_a_large_one_batch_by_batch(tmp_path):
    shard = {"x": Dense(np.zeros((4000, 256), "f4")), "y": Dense(np.arange(4000))}
    store = write_store(tmp_path / "store", [shard])
    with Loader(store, 8, "cpu", chunk_bytes=100_000) as loader:
        assert loader._straight is not None
        loader._straight._block_bytes = 8 * 256 * 4
        held = list(loader)
    places = [{batch[name].untyped_storage().data_ptr() for batch in held} for name in "xy"]
    assert [len(place) for place in places] == [500, 8]  # 500 batches of one, 8 groups of 64
    assert torch.equal(torch.cat([batch["y"] for batch in held]), torch.arange(4000))


def test_resumes_in_the_middle(tmp_path):
    store = make_store(tmp_path / "store", [30, 30])
    with (
        Loader(store, 7, "cpu", chunk_bytes=1) as one,
        Loader(store, 7, "cpu", chunk_bytes=1) as two,
    ):
        whole = as_lists(one)
        iterator = iter(one)
        for _ in range(3):
            next(iterator)
        two.load_state_dict(one.state_dict())
        assert as_lists(two) == whole[3:]


def test_a_flipped_byte_is_found(tmp_path):
    store = make_store(tmp_path / "store", [5000])
    shard = next((tmp_path / "store").glob("*.h5"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 1
    shard.write_bytes(data)
    with (
        Loader(store.path, 64, "cpu", chunk_bytes=1) as loader,
        pytest.raises(CorruptError, match="checksum"),
    ):
        torch.stack([batch["x"].sum() for batch in loader])


def test_a_kept_target_does_not_keep_its_features(tmp_path):
    store = make_store(tmp_path / "store", [400])
    with Loader(store, 4, "cpu", chunk_bytes=1) as loader:
        kept = [batch["y"] for batch in loader]
        storages = [y.untyped_storage() for y in kept]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        assert sum(sizes.values()) <= 400 * 2 + 100
        del kept
        assert 0 < loader._straight._memory.num_free <= 3 * 4
    assert loader._straight._memory.num_free == 0
