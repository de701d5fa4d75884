"""Bytes of pictures that fail their checksum after they were packed: they follow `on_broken`, others' reads do not."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import stoker
from stoker.augment import Compose, Resize
from stoker.errors import CorruptError, StoreError
from stoker.packing import PackOptions, pack
from stoker.sources.images import ImagesSource, KeepEncoded
from stoker.store.reader import open_store

AUGMENT = Compose([Resize((16, 16))])


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A store of 40 noisy pictures, about 70 kB each, with one byte changed in the middle of its second block."""
    home = tmp_path_factory.mktemp("damage")
    rng = np.random.default_rng(0)
    for number in range(40):
        folder = home / "photos" / f"class-{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = rng.integers(0, 256, (240, 300, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number:02}.jpg", quality=95)
    store = home / "store"
    pack(ImagesSource((8, 8), 3, home / "photos", keep_encoded=KeepEncoded()), store, PackOptions())
    with open_store(store) as opened:
        values = opened.shards[0].arrays["images/values"]
        offsets = opened.shards[0].whole("images/offsets")
        file, place = opened.shards[0].path, values.location.offset
    block = 1 << 20
    assert offsets[-1] > 2 * block
    with file.open("r+b") as raw:
        raw.seek(place + block + block // 2)
        byte = raw.read(1)
        raw.seek(place + block + block // 2)
        raw.write(bytes([byte[0] ^ 0x55]))
    hit = np.flatnonzero((offsets[:-1] < 2 * block) & (offsets[1:] > block))
    return store, set(hit.tolist())


@pytest.mark.parametrize("chunk_bytes", [None, 1 << 20])
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_pictures_of_a_damaged_block_are_skipped_or_replaced(packed, policy, chunk_bytes):
    store, hit = packed
    options = {"augment": AUGMENT, "on_broken": policy, "broken_budget": 40, "shuffle": True}
    with stoker.Loader(store, 20, "cpu", chunk_bytes=chunk_bytes, **options) as loader:
        for _ in range(2):
            seen = np.concatenate([batch.sample_ids for batch in loader]).tolist()
            assert not hit & set(seen)
            assert set(seen) == set(range(40)) - hit
            assert len(seen) == (40 - len(hit) if policy == "skip" else 40)
        assert set(loader.broken) == hit
        assert all("fails its checksum" in why for why in loader.broken.values())


def test_it_stops_by_default_and_when_the_budget_is_spent(packed):
    store, hit = packed
    with (
        pytest.raises(CorruptError, match="fails its checksum in block 1"),
        stoker.Loader(store, 20, "cpu", augment=AUGMENT) as loader,
    ):
        list(loader)
    with (
        pytest.raises(StoreError, match=f"at most {len(hit) - 1} may be left out"),
        stoker.Loader(
            store, 40, "cpu", augment=AUGMENT, on_broken="skip", broken_budget=len(hit) - 1
        ) as loader,
    ):
        list(loader)


def test_others_who_read_the_same_store_get_no_zeros(packed):
    store, hit = packed
    with open_store(store) as opened:
        options = {"augment": AUGMENT, "on_broken": "skip", "broken_budget": 40}
        with stoker.Loader(opened, 20, "cpu", **options) as loader:
            list(loader)
            assert set(loader.broken) == hit
        assert not opened.damaged("images")
        with pytest.raises(CorruptError, match="fails its checksum"):
            opened.read_values("images", min(hit) + 1)
