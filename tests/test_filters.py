"""Filters of HDF5 chunks are undone as the HDF5 library undoes them, and damage is named."""

from __future__ import annotations

import zlib

import h5py
import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import CorruptError
from stoker.store import hdf5 as filters
from stoker.store.hdf5 import (
    DEFLATE,
    FLETCHER32,
    SHUFFLE,
    ZSTD,
    can_undo,
    fletcher32,
    undo_filters,
)
from stoker.store.reader import open_store


def applied(wanted, data: bytes, itemsize: int) -> bytes:
    """The filters done by other code: numpy, zlib, pyarrow, and a checksum word by word."""
    for each in wanted:
        if each == SHUFFLE:
            whole = len(data) // itemsize * itemsize
            planes = np.frombuffer(data[:whole], np.uint8).reshape(-1, itemsize).T.tobytes()
            data = planes + data[whole:]
        elif each == DEFLATE:
            data = zlib.compress(data, 4)
        elif each == ZSTD:
            data = pyarrow.Codec("zstd").compress(data, asbytes=True)
        else:
            data += slow_sum(data).to_bytes(4, "little")
    return data


def slow_sum(data: bytes) -> int:
    one = two = 0
    for at in range(0, len(data), 2):
        one += int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big")
        one = (one & 0xFFFF) + (one >> 16)
        two += one
        two = (two & 0xFFFF) + (two >> 16)
    return two << 16 | one


@given(
    wanted=st.lists(st.sampled_from([SHUFFLE, DEFLATE, FLETCHER32, ZSTD]), max_size=4).filter(
        can_undo
    ),
    skipped=st.integers(0, 15),
    data=st.binary(min_size=1, max_size=300) | st.integers(1, 200).map(lambda n: b"\xff" * n),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    library=st.booleans(),
)
def test_what_was_applied_is_undone(wanted, skipped, data, itemsize, library):
    present = [each for number, each in enumerate(wanted) if not skipped >> number & 1]
    raw = applied(present, data, itemsize)
    with pytest.MonkeyPatch.context() as patch:
        if not library:
            patch.setattr(filters, "deflate", None)
        assert bytes(undo_filters(wanted, skipped, raw, len(data), itemsize)) == data


def test_unknown_filters_and_two_that_compress_are_left_to_the_library():
    assert can_undo(())
    assert can_undo((SHUFFLE, ZSTD, FLETCHER32))
    assert not can_undo((32000,))
    assert not can_undo((DEFLATE, ZSTD))


@given(data=st.binary(max_size=999) | st.integers(0, 999).map(lambda n: b"\xff\xff" * n))
def test_the_checksum_is_that_of_hdf5(data):
    assert fletcher32(data) == slow_sum(data)


def test_the_checksum_of_more_than_one_block_of_words(monkeypatch):
    data = np.random.default_rng(0).bytes(5001)
    monkeypatch.setattr(filters, "_SUM_WORDS", 7)
    assert fletcher32(data) == slow_sum(data)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize(
    ("wanted", "change", "words"),
    [
        ((DEFLATE,), lambda raw: raw[:-9], "does not end"),
        ((DEFLATE,), lambda raw: b"?" + raw[1:], "header check"),
        ((DEFLATE,), lambda raw: zlib.compress(bytes(10_000)), "does not end"),
        ((DEFLATE,), lambda raw: zlib.compress(bytes(10)), "decodes to 10 bytes instead of 64"),
        ((ZSTD,), lambda raw: raw[:-3], "(?i)zstd"),
        ((ZSTD,), lambda raw: applied([ZSTD], bytes(63), 1), "(?i)zstd"),
        ((FLETCHER32,), lambda raw: b"x" + raw[1:], "its checksum is"),
        ((FLETCHER32,), lambda raw: b"x", "too few for a checksum"),
        ((), lambda raw: raw + b"x", "decodes to 65 bytes"),
    ],
)
def test_damage_is_named_and_a_bomb_takes_no_memory(wanted, change, words, library, monkeypatch):
    if not library:
        monkeypatch.setattr(filters, "deflate", None)
    data = bytes(range(64))
    with pytest.raises(ValueError, match=words):
        undo_filters(wanted, 0, change(applied(wanted, data, 4)), 64, 4)


def test_a_zstd_file_is_read_without_the_plugin(tmp_path):
    values = np.arange(40, dtype="<f4").reshape(10, 4)
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((5, 4))
        plist.set_filter(ZSTD, h5py.h5z.FLAG_OPTIONAL, (3,))
        space = h5py.h5s.create_simple((10, 4))
        dataset = h5py.h5d.create(file.id, b"features", h5py.h5t.IEEE_F32LE, space, plist)
        for row in (0, 5):
            raw = applied([ZSTD], values[row : row + 5].tobytes(), 4)
            dataset.write_direct_chunk((row, 0), raw)
    with open_store(path) as store:
        assert (store.read_rows("features", 1, 9) == values[1:9]).all()


def test_a_wrong_checksum_names_the_chunk(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("features", data=np.ones((10, 4)), chunks=(5, 4), fletcher32=True)
        place = file["features"].id.get_chunk_info(1).byte_offset
    with path.open("r+b") as raw:
        raw.seek(place + 8)
        raw.write(b"!")
    with open_store(path) as store:
        assert store.read_rows("features", 0, 5).sum() == 20
        with pytest.raises(CorruptError, match=r"chunk at \(5, 0\).*its checksum is"):
            store.read_rows("features", 0, 10)
