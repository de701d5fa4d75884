"""A campaign against encoded pictures: damaged JPEG files through pack and load.

`STOKER_FUZZ_N` files (100,000 unless set) are made from intact ones by bit flips, deletions, repetitions, splices and
cuts. Packing may refuse one, by a `SourceError`, or take it; what is taken is loaded among intact pictures. Nothing may
crash, hang, or show an intact picture with other pixels than its own under its label.
"""

from __future__ import annotations

import io
import os
import random
import time

import numpy as np
import pytest
import torch

import stoker
from stoker.augment import Compose, Resize
from stoker.errors import SourceError
from stoker.sources.images.encoded import KeepEncoded, picture_field, read_encoded
from stoker.store.fields import Dense
from stoker.store.memory import memory_store

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra 'vision')")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
NUM_INPUTS = int(os.environ.get("STOKER_FUZZ_N", "100000"))
LIMIT_SECONDS = 10.0
BATCH = 64
SIDE = 32


def intact(number: int) -> bytes:
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    file = io.BytesIO()
    options = [{}, {"subsampling": 0}, {"progressive": True}, {"restart_marker_rows": 1}]
    made = coarse.resize((SIDE + number % 9, SIDE), Image.Resampling.BICUBIC)
    made.save(file, "JPEG", quality=60 + number % 40, **options[number % 4])
    return file.getvalue()


def mutated(data: bytes, other: bytes, rng: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(made))
        kind = rng.randrange(6)
        if kind == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            made[at] = rng.choice((0, 0xFF, 0xD8, 0xD9, 0xC0, 0xC2, 0xDA, rng.randrange(256)))
        elif kind == 2:
            del made[at : at + rng.choice((1, 2, 16, 200))]
        elif kind == 3:
            made[at:at] = made[at : at + rng.choice((1, 4, 64))]
        elif kind == 4:
            made[at : at + 40] = other[at : at + 40]
        else:
            made = made[: max(1, at)]
        made = made or bytearray(b"\xff")
    return bytes(made)


def test_damaged_pictures_are_refused_or_taken_and_disturb_no_other(tmp_path):
    rng = random.Random(os.environ.get("STOKER_FUZZ_SEED", "0"))
    sound = [intact(number) for number in range(BATCH) if number % 4 != 2]  # progressive is refused
    augment = Compose([Resize(SIDE)])
    keep, path = KeepEncoded(), tmp_path / "one.jpg"
    wanted = load([*sound], [size_of(data) for data in sound], augment)[0]
    counts = {"refused": 0, "taken": 0, "broken": 0}
    seeds = [intact(number) for number in range(BATCH)]
    while counts["refused"] + counts["taken"] < NUM_INPUTS:
        data, sizes = list(sound[: BATCH // 2]), [size_of(each) for each in sound[: BATCH // 2]]
        for _ in range(BATCH // 2):
            raw = mutated(rng.choice(seeds), rng.choice(seeds), rng)
            path.write_bytes(raw)
            began = time.perf_counter()
            try:
                kept, _ = read_encoded(path, 3, keep, False)
            except SourceError:
                counts["refused"] += 1
                # What is refused is loaded all the same: as bytes that were damaged after they were packed.
                data.append(raw)
                sizes.append((SIDE, SIDE))
            else:
                counts["taken"] += 1
                data.append(kept.data)
                sizes.append(kept.size)
            assert time.perf_counter() - began < LIMIT_SECONDS
        images, labels, broken = load(data, sizes, augment)
        counts["broken"] += len(broken)
        for image, label in zip(images, labels.tolist(), strict=True):
            if label < BATCH // 2:
                assert torch.equal(image, wanted[label])
        assert all(label >= BATCH // 2 for label in broken)
        assert {*labels.tolist(), *broken} == set(range(len(data)))
        print(counts, flush=True)  # a campaign that is cut short says how far it came


def size_of(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        return image.height, image.width


def load(data, sizes, augment):
    """Return images, labels and broken samples of one batch of encoded pictures."""
    store = memory_store(
        {
            "images": picture_field(data),
            "image_size": Dense(np.array(sizes, np.int32)),
            "image_orientation": Dense(np.ones(len(data), np.uint8)),
            "labels": Dense(np.arange(len(data))),
        },
        "damaged",
    )
    with stoker.Loader(
        store, len(data), "cpu", augment=augment, on_broken="skip", broken_budget="100%"
    ) as loader:
        began = time.perf_counter()
        (batch,) = list(loader)
        assert time.perf_counter() - began < LIMIT_SECONDS
        return batch["images"], batch["labels"], loader.broken
