"""Small stores for tests: hypothesis strategies and a writer without the packer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stoker.ownership import always, write_text
from stoker.store.fields import Dense, FieldData, Ragged, Series, offsets_of
from stoker.store.manifest import FieldInfo, Manifest
from stoker.store.reader import Store, open_store
from stoker.store.shard import write_shard

DTYPES = st.sampled_from(["<f4", ">f4", "<f8", "<f2", "|u1", "<i2", ">i8", "<u4", "|b1"])


@st.composite
def dense_fields(draw: st.DrawFn, num_samples: int) -> Dense:
    shape = (num_samples, *draw(st.lists(st.integers(0, 5), max_size=3)))
    return Dense(draw(hnp.arrays(draw(DTYPES), shape)))


@st.composite
def ragged_fields(draw: st.DrawFn, num_samples: int) -> Ragged:
    lengths = np.array(
        draw(st.lists(st.integers(0, 7), min_size=num_samples, max_size=num_samples)), np.int64
    )
    shape = (int(lengths.sum()), *draw(st.lists(st.integers(1, 3), max_size=1)))
    return Ragged(draw(hnp.arrays(draw(DTYPES), shape)), offsets_of(lengths))


@st.composite
def series_fields(draw: st.DrawFn, num_samples: int) -> Series:
    window = draw(st.integers(1, 4))
    rows = window + draw(st.integers(0, 20))
    ends = draw(st.lists(st.integers(window, rows), min_size=num_samples, max_size=num_samples))
    features = draw(st.integers(1, 4))
    return Series(
        rows=draw(hnp.arrays("<f4", (rows, features))),
        time=np.cumsum(draw(st.lists(st.integers(1, 1000), min_size=rows, max_size=rows))),
        ends=np.array(ends, np.int64),
        window=window,
        gap=draw(hnp.arrays(np.uint8, rows, elements=st.integers(0, 1))),
        columns=tuple(f"c{number}" for number in range(features)),
        duration_ns=60,
    )


@st.composite
def shard_data(draw: st.DrawFn) -> dict[str, FieldData]:
    num_samples = draw(st.integers(0, 12))
    return {
        "dense": draw(dense_fields(num_samples)),
        "ragged": draw(ragged_fields(num_samples)),
        "series": draw(series_fields(num_samples)),
    }


def write_store(folder: Path, shards: list[dict[str, FieldData]], block_bytes: int = 4096) -> Store:
    """Write shards and their manifest; every shard must have the same fields."""
    folder.mkdir(parents=True, exist_ok=True)
    infos = [
        write_shard(folder / f"shard-{number:05d}.h5", fields, f"part {number}", block_bytes)
        for number, fields in enumerate(shards)
    ]
    manifest = Manifest(
        num_samples=sum(info.num_samples for info in infos),
        fields={name: FieldInfo.of(data) for name, data in shards[0].items()},
        shards=infos,
        block_bytes=block_bytes,
    )
    write_text(folder / "store.json", manifest.to_text(), always)
    return open_store(folder)


def simple_shard(rng: np.random.Generator, num_samples: int) -> dict[str, FieldData]:
    """Dense, ragged, text and series, big enough for several checksum blocks."""
    lengths = rng.integers(0, 30, num_samples)
    rows = num_samples + 16
    return {
        "features": Dense(rng.normal(size=(num_samples, 7, 5)).astype("f4")),
        "targets": Dense(rng.integers(0, 3, num_samples)),
        "peaks": Ragged(rng.integers(0, 500, int(lengths.sum())).astype("u2"), offsets_of(lengths)),
        "name": Ragged.from_strings([f"sample {number} é" for number in range(num_samples)]),
        "M1": Series(
            rows=rng.normal(size=(rows, 4)).astype("f4"),
            time=np.arange(rows) * 60_000_000_000,
            ends=np.arange(num_samples) + 16,
            window=16,
            gap=np.zeros(rows, np.uint8),
            columns=("o", "h", "l", "c"),
            duration_ns=60_000_000_000,
        ),
    }
